"""Pictures of attention weights and of how an array lies in memory. Needs matplotlib: ``pip install "fastmha[study]"``.

Both functions return a `matplotlib.figure.Figure` of their own, which pyplot does not know and which is in no file until
``figure.savefig("weights.png")``; a notebook shows it. Arguments are checked before anything is drawn.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastmha.validate import cut, integer, reals, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["attention", "layout"]

DPI = 120
CHARACTER, LINE_OF_TEXT = 0.068, 0.16       # inches of a wide character and of a line, 8 points
MOST_HEADS = 400                            # of a picture: more are no picture, and soon too many pixels
MOST_RUNS = 20_000                          # of removed pairs in rows, up to which they are hatched; beyond, grey alone
REMOVED, HATCH = "0.82", {"facecolor": "none", "edgecolor": "0.55", "hatch": "////", "linewidth": 0}
NOT_FINITE = {"facecolor": "#d62728", "edgecolor": "none"}
LINE, PAGE = 64, 4096                       # bytes of a cache line and of a page
TOKENS, HEADS, MOST_PAGES = 6, 4, 12        # of the map of memory: so many first ones
AXES = {2: "LD", 3: "LHD", 4: "BLHD"}
NAMED = {"B": "batch", "L": "token", "H": "head", "D": "width"}
FILLS = ("#1f4e8c", "#e8912d", "#8fc1e3", "#f6dfb0")       # of heads, also apart in grey
DARK = FILLS[:1]                                            # there white is read more easily


def _figure(width: float, height: float) -> Any:
    """A figure without panels; ImportError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('fastmha.plot needs matplotlib: pip install "fastmha[study]"') from error
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def _foot(figure: Any, handles: Sequence[Any]) -> None:
    """A legend in a strip of its own below the panels."""
    if handles:
        columns = len(handles) if figure.get_figwidth() > 5 else 1
        figure.legend(handles=handles, loc="lower center", ncols=columns, fontsize=8, frameon=False)
        share = (0.12 + 0.18 * len(handles) / columns) / figure.get_figheight()
        figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))


# ------------------------------------------------------------------------------------------------------------- the weights

def attention(weights: np.ndarray, tokens: Sequence[Any] | None = None, heads: Sequence[int] | Sequence[str] | None = None,
              ) -> Figure:
    """Attention weights, heads side by side: a row for each query, a column for each key, one scale of colours for all.

    Pairs whose weight is exactly 0 in all heads, such as those that causality, a window or a mask removes, are grey and hatched:
    nothing is confused with a small weight, which is a pale blue.

    Parameters
    ----------
    weights : array (Lq, Lk), (H, Lq, Lk) or (1, H, Lq, Lk)
        Of any real dtype, as ``fastmha.attention(..., capture=fastmha.Capture())`` and
        ``module.forward(..., need_weights=True)`` return them; one batch row, ``weights[b]``.
    tokens : sequence of str, or a pair of such sequences, optional
        Names of the tokens, for queries and keys alike where Lq equals Lk, or a pair (queries, keys), either of which may be
        None. Integers, such as ids of tokens, are taken as well. Without them the axes are numbered. Where there is no room for
        all labels, every second, fifth, tenth ... is shown.
    heads : sequence of int or of str, optional
        Integers select the heads that are drawn, in this order, negative ones from the end; strings, one for each head, name
        them. Without it all heads are drawn as "head 0", "head 1" ...

    Returns
    -------
    matplotlib.figure.Figure
        As large as its heads need. Shades reach from 0 to the largest weight drawn and go with the square root, so that small
        weights of long sequences are seen; a NaN or infinity is red.

    Raises
    ------
    ValueError
        weights of another number of axes, of several batch rows, without elements, with negative ones or with more than 400
        heads to draw; tokens or heads whose number is not that of weights; a head out of range.
    TypeError
        weights that are no real numbers, tokens that are no strings, heads that are neither integers nor strings.
    ImportError
        If matplotlib is not installed.

    Examples
    --------
    ::

        import fastmha.plot

        q = np.random.default_rng(0).standard_normal((1, 4, 6, 16), np.float32)
        out, weights = fastmha.attention(q, q, q, is_causal=True, capture=fastmha.Capture())
        figure = fastmha.plot.attention(weights, tokens="the cat sat on the mat".split())
        figure.savefig("weights.png")
    """
    every, single = _weights(weights)
    chosen, names = _heads(heads, len(every), single)
    shown = every[chosen]
    n, (Lq, Lk) = len(shown), shown.shape[1:]
    queries, keys = _tokens(tokens, Lq, Lk)
    largest = {1: 5.0, 2: 4.2, 3: 3.5}.get(n, 2.7 if n <= 16 else 1.8)      # inches of a panel
    wide, tall = (min(max(0.19 * length, least), largest) for length, least in ((Lk, 1.3), (Lq, 0.5)))
    rows = math.ceil(n / min(n, int(12 / (wide + 0.25))))
    columns = math.ceil(n / rows)
    left, below = (0.45 + CHARACTER * max(map(len, labels or [str(length)])) for labels, length in ((queries, Lq), (keys, Lk)))
    figure = _figure(max(columns * (wide + 0.2) + left + 1.0, 3.5), rows * (tall + 0.35) + (below if keys else 0.5) + 0.35)

    from matplotlib import colormaps
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Patch

    finite = np.isfinite(shown)
    top = float(shown.max(initial=0, where=finite))
    scale = PowerNorm(0.5, 0, top if top > 0 else 1)        # else 1 in the first row of causal weights leaves the others white
    colours = colormaps["Blues"].with_extremes(bad=REMOVED)
    removed = (every == 0).all(axis=0)
    runs = _runs(removed) if removed.any() else []
    whole = max(Lq / tall, Lk / wide) < DPI         # a cell has a pixel at least
    grid = figure.subplots(rows, columns, squeeze=False)
    panels = list(grid.flat)
    for axes in panels[n:]:
        axes.remove()
    for at, (axes, values) in enumerate(zip(panels, shown)):
        image = axes.imshow(np.ma.masked_array(values, removed | ~finite[at]), cmap=colours, norm=scale, aspect="auto",
                            interpolation="nearest" if whole else "antialiased")
        if 0 < len(runs) <= MOST_RUNS:
            axes.add_patch(_cells(runs, HATCH))
        if not finite[at].all():
            axes.add_patch(_cells(_runs(~finite[at]), NOT_FINITE))
        axes.set_title(_plain(names[at]), fontsize=9)
        lowest = at + columns >= n                  # of its column
        _ticks(axes.yaxis, Lq, queries, tall, at % columns == 0)
        _ticks(axes.xaxis, Lk, keys, wide, lowest)
        if at % columns == 0:
            axes.set_ylabel("query", fontsize=9)
        if lowest:
            axes.set_xlabel("key", fontsize=9)
    bar = figure.colorbar(image, ax=panels[:n], aspect=max(8.0, 8 * rows * tall), pad=0.02,
                          fraction=max(0.05, 0.3 / (columns * wide)))
    bar.set_label("attention weight (shade: square root)" if rows * tall > 2 else "weight", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    _foot(figure, [*([Patch(label="exactly 0 in all heads: removed", **{**HATCH, "facecolor": REMOVED})] if runs else []),
                   *([] if finite.all() else [Patch(label="NaN or infinite", **NOT_FINITE)])])
    return figure


def _weights(weights: Any) -> tuple[np.ndarray, bool]:
    """(H, Lq, Lk), and whether they came as (Lq, Lk)."""
    x = reals("weights", weights)
    if x.ndim not in (2, 3, 4):
        raise ValueError(f"weights must have 2 to 4 axes, (Lq, Lk), (H, Lq, Lk) or (1, H, Lq, Lk), got shape {x.shape}")
    if x.ndim == 4 and len(x) != 1:
        raise ValueError(f"weights must be those of one batch row, such as weights[0], got shape {x.shape}")
    if x.size == 0:
        raise ValueError(f"weights must have heads, queries and keys, got shape {x.shape}")
    every = x.reshape(1, *x.shape) if x.ndim == 2 else x.reshape(x.shape[-3:])
    if x.dtype.kind in "fi" and (every < 0).any():
        h, i, j = np.argwhere(every < 0)[0].tolist()
        raise ValueError(f"weights must not be negative, got {every[h, i, j]:.4g} for head {h}, query {i}, key {j}: are these "
                         "scores before the softmax?")
    return every, x.ndim == 2


def _several(name: str, value: Any, of: str) -> list[Any]:
    """A sequence as a list; a string is none."""
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be {of}, got {short(value)}")
    if isinstance(value, np.ndarray) and value.ndim != 1:
        raise ValueError(f"{name} must have one axis where it is an array, got shape {value.shape}")
    return list(value)


def _heads(heads: Any, H: int, single: bool) -> tuple[list[int], list[str]]:
    """Which heads are drawn, and their names."""
    if heads is None:
        chosen = list(range(H))
        names = [""] if single else [f"head {h}" for h in chosen]
    else:
        given = _several("heads", heads, "a sequence of ints, which select, or of strs, which name")
        if not given:
            raise ValueError("heads must name or select one head at least, got none")
        if isinstance(given[0], str):
            for at, name in enumerate(given):
                if not isinstance(name, str):
                    raise TypeError(f"heads must be all ints or all strs, got {short(name)} at index {at}")
            if len(given) != H:
                raise ValueError(f"heads has {len(given)} names but weights has {H} heads")
            chosen, names = list(range(H)), given
        else:
            chosen = [integer(f"heads[{at}]", h) for at, h in enumerate(given)]
            for at, h in enumerate(chosen):
                if not -H <= h < H:
                    raise ValueError(f"heads must lie in [{-H}, {H}) as weights has {H} heads, got {short(h)} at index {at}")
            chosen = [h % H for h in chosen]
            names = [f"head {h}" for h in chosen]
    if len(chosen) > MOST_HEADS:
        raise ValueError(f"weights has {len(chosen)} heads to draw, and a picture at most {MOST_HEADS}: select some by heads")
    return chosen, names


def _tokens(tokens: Any, Lq: int, Lk: int) -> tuple[list[str] | None, list[str] | None]:
    """Labels of the queries and of the keys, None where they are numbered."""
    if tokens is None:
        return None, None
    given = _several("tokens", tokens, "a sequence of strs or a pair (queries, keys) of such")
    if len(given) == 2 and all(x is None or (isinstance(x, (Sequence, np.ndarray)) and not isinstance(x, (str, bytes)))
                               for x in given):
        queries, keys = (None if x is None else _labels(f"tokens[{at}]", _several(f"tokens[{at}]", x, "a sequence of strs"))
                         for at, x in enumerate(given))
        for at, (labels, length, what) in enumerate(((queries, Lq, "queries"), (keys, Lk, "keys"))):
            if labels is not None and len(labels) != length:
                raise ValueError(f"tokens[{at}] has {len(labels)} tokens but weights has {length} {what}")
        return queries, keys
    both = _labels("tokens", given)
    if len(both) != Lq or Lq != Lk:
        differ = "" if Lq == Lk else f" and {Lk} keys: pass a pair (queries, keys)"
        raise ValueError(f"tokens has {len(both)} tokens but weights has {Lq} queries{differ}")
    return both, both


def _labels(name: str, tokens: list[Any]) -> list[str]:
    labels = []
    for at, token in enumerate(tokens):
        if not isinstance(token, str):
            token = str(integer(f"{name}[{at}]", token)) if isinstance(token, (int, np.integer)) else token
        if not isinstance(token, str):
            raise TypeError(f"{name}[{at}] must be a str, got {short(token)}")
        seen = token if token.isprintable() and token.strip() else repr(token)      # a space or a line feed is to be seen
        labels.append(_plain(seen if len(seen) <= 16 else seen[:15] + "…"))
    return labels


def _plain(text: str) -> str:
    """No mathematics in the names of tokens and heads."""
    return text.replace("$", r"\$")


def _ticks(axis: Any, length: int, labels: list[str] | None, inches: float, labelled: bool) -> None:
    """Ticks at as many tokens as the axis has room for."""
    across = axis.axis_name == "x"
    room = LINE_OF_TEXT if labels or not across else CHARACTER * len(str(length)) + 0.1
    step = next(s for s in _steps() if math.ceil(length / s) * room <= inches or s >= length)
    places = range(0, length, step)
    texts = [labels[i] if labels else str(i) for i in places] if labelled else [""] * len(places)
    turned = {"rotation": 90} if labels and across else {}
    axis.set_ticks(places, texts, fontsize=8, **turned)
    axis.set_tick_params(length=2)


def _steps() -> Iterable[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _runs(cells: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, first column, behind the last) of runs of true cells in the rows."""
    edges = np.diff(np.pad(cells, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    (rows, starts), (_, ends) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    return list(zip(rows.tolist(), starts.tolist(), ends.tolist()))


def _cells(runs: Sequence[tuple[int, int, int]], look: dict[str, Any]) -> Any:
    """One patch over runs of cells of an image, so that a hatch goes through from row to row."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = np.array([[(a, i), (b, i), (b, i + 1), (a, i + 1), (a, i)] for i, a, b in runs], float).reshape(-1, 2) - 0.5
    codes = np.tile(np.array([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], Path.code_type), len(runs))
    return PathPatch(Path(corners, codes), **look)


# -------------------------------------------------------------------------------------------------------------- the memory

class _Piece(NamedTuple):
    """Neighbouring bytes of a head's row, within a page: [start, end) counted from the page's begin."""

    page: int           # from that of the first element
    start: int
    end: int
    head: int
    tokens: tuple[int, ...]


def layout(array: np.ndarray, axes: str | None = None) -> Figure:
    """How an array lies in memory: its strides, and the pages and cache lines that the first tokens of the first heads touch.

    Above, a bar for each axis: how far an element is from its neighbour along the axis, in bytes, elements and words, beside
    the cache line of 64 bytes and the page of 4096. Below, a map of memory: a row for each page that is touched, its cache lines
    marked, and in it the bytes of the first 6 tokens of the first 4 heads of the first batch row. The addresses are those of this
    array in this process; the elements themselves are not read, so that any view will do, and any memory behind it.

    Parameters
    ----------
    array : np.ndarray, 2 to 4 axes
        Of any dtype and any strides: contiguous, transposed, sliced, broadcast (stride 0) or reversed (negative).
    axes : str, optional
        What the axes are, a letter each: B batch, L tokens, H heads, D width, with L and D among them. By default "LD", "LHD" or
        "BLHD", by the number of axes; a head-major array is "BHLD".

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        array of another number of axes, without elements, or of elements without bytes; axes that are no such letters.
    TypeError
        array that is no np.ndarray (to make it one could move it), axes that is no str.
    ImportError
        If matplotlib is not installed.

    Examples
    --------
    ::

        import fastmha.plot

        fused = np.zeros((1, 1024, 3 * 16 * 64), np.float32)            # rows of Q|K|V
        q = fused[..., :16 * 64].reshape(1, 1024, 16, 64)               # (B, L, H, D), a view
        fastmha.plot.layout(q)                                          # each token on a page of its own
        fastmha.plot.layout(np.ascontiguousarray(q.transpose(0, 2, 1, 3)), "BHLD")
    """
    names = _axes_of(array, axes)
    pieces = _touched(array, names)
    touched = list(dict.fromkeys(piece.page for piece in pieces))
    pages = sorted(touched[:MOST_PAGES])
    strides, rows = 0.34 * array.ndim, 0.42 * len(pages)
    figure = _figure(10.0, strides + rows + 2.6)

    from matplotlib.patches import Patch

    figure.suptitle(_described(array, names), fontsize=10)
    bars, memory = figure.subplots(2, 1, height_ratios=(strides + 0.3, rows + 0.3))
    _draw_strides(bars, array, names)
    _draw_pages(memory, pieces, pages, rows / len(pages))
    own = [piece for piece in pieces if piece.head == 0]
    memory.set_title(
        f"First {_count(_first(array, names, 'L', TOKENS), 'token')}"
        + (f" of the first {_count(_first(array, names, 'H', HEADS), 'head')}" if "H" in names else "")
        + f": {_lines_and_pages(pieces)}" + (f"; head 0 alone: {_lines_and_pages(own)}" if "H" in names else "")
        + (f"; the {len(pages)} pages touched first are shown" if len(pages) < len(touched) else ""), fontsize=9)
    heads = sorted({piece.head for piece in pieces})
    _foot(figure, [Patch(label=f"head {h}" if "H" in names else "tokens", facecolor=FILLS[h], edgecolor="black", linewidth=0.5)
                   for h in heads])
    return figure


def _axes_of(array: Any, axes: Any) -> str:
    """The letters of the axes of an array that can be drawn."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"array must be a np.ndarray, whose memory is drawn as it lies, got {type(array).__name__}")
    if array.ndim not in AXES:
        raise ValueError(f"array must have 2 to 4 axes, got shape {array.shape}")
    if array.size == 0 or array.itemsize == 0:
        what = f"shape {array.shape}" if array.size == 0 else f"dtype {cut(array.dtype)}"
        raise ValueError(f"array must have elements that take memory, got {what}")
    if axes is None:
        return AXES[array.ndim]
    if not isinstance(axes, str):
        raise TypeError(f"axes must be a str such as {AXES[array.ndim]!r}, got {short(axes)}")
    if len(axes) != array.ndim or len(set(axes)) < len(axes) or not {"L", "D"} <= set(axes) <= set(NAMED):
        raise ValueError(f"axes must name the {array.ndim} axes of array by different letters of B, L, H and D, with L and D "
                         f"among them, got {short(axes)}")
    return axes


def _described(array: np.ndarray, names: str) -> str:
    """Shape, kind and size."""
    span = array.itemsize + sum((n - 1) * abs(stride) for n, stride in zip(array.shape, array.strides))
    kind = ("contiguous" if array.flags.c_contiguous else "Fortran-contiguous" if array.flags.f_contiguous else
            "broadcast" if any(stride == 0 and n > 1 for n, stride in zip(array.shape, array.strides)) else
            "overlapping" if array.nbytes > span else "strided")
    sizes = ", ".join(f"{name} {n}" for name, n in zip(names, array.shape))
    return f"{_plain(cut(array.dtype))} ({sizes}), {kind}: {array.nbytes:,} bytes of elements within {span:,} bytes of memory"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _in_items(stride: int, itemsize: int) -> str:
    """A stride in elements; views of fields may have parts of one."""
    return _count(stride // itemsize, "element") if stride % itemsize == 0 else f"{stride / itemsize:,.2f} elements"


def _neighbour(stride: int, size: int, itemsize: int) -> str:
    """Where the neighbour along an axis lies, in words."""
    far, way = abs(stride), "back" if stride < 0 else "on"
    if size == 1:
        return "there is one index only"
    if far == 0:
        return "the same memory, broadcast"
    if far == itemsize:
        return "the element just before" if stride < 0 else "the element just after"
    if far < LINE:
        return f"{far} bytes {way}, within a cache line"
    if far < PAGE:
        return f"{far / LINE:.4g} cache line{'s' * (far != LINE)} {way}"
    same = ", at the same place of its page" if far % PAGE == 0 else ""
    return f"{far / PAGE:,.4g} page{'s' * (far != PAGE)} {way}{same}"


def _draw_strides(axes: Any, array: np.ndarray, names: str) -> None:
    """A bar for each axis, over powers of two of bytes."""
    farthest = max(PAGE, *(abs(stride) for size, stride in zip(array.shape, array.strides) if size > 1))
    low = min(array.itemsize, LINE) / 2
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, (farthest / low) ** 2.1 * low)       # right of the bars there is room for words
    for place, (size, stride) in enumerate(zip(array.shape, array.strides)):
        far = abs(stride) if size > 1 else 0        # along an axis of one index nobody steps
        if far:
            axes.barh(place, max(0, far - low), left=low, height=0.55, edgecolor="black", linewidth=0.7,
                      facecolor="white" if stride < 0 else "0.75", hatch="////" if stride < 0 else "")
        said = f"{_count(stride, 'byte')} = {_in_items(stride, array.itemsize)}: {_neighbour(stride, size, array.itemsize)}"
        axes.text(max(far, low) * 1.15, place, said.replace("-", "−"), va="center", fontsize=8,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    for place, text, side in ((LINE, "cache line", "right"), (PAGE, "page", "left")):
        axes.axvline(place, color="0.2", linewidth=0.9, linestyle=(0, (2, 2)), zorder=0.5)
        axes.text(place, -0.62, f"{text}, {place} bytes", ha=side, va="bottom", fontsize=8)
    axes.set_ylim(array.ndim - 0.5, -0.55)
    axes.set_yticks(range(array.ndim), [f"{name}: {NAMED[name]}, {size}" for name, size in zip(names, array.shape)], fontsize=8)
    ticks = [2**e for e in range(math.ceil(math.log2(low)), math.floor(math.log2(farthest)) + 1)]
    ticks = ticks[::math.ceil(len(ticks) / 9)]
    axes.set_xticks(ticks, [f"{t:,}" for t in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("stride: bytes from an element to its neighbour along the axis (hatched: backwards)", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _first(array: np.ndarray, names: str, name: str, most: int) -> int:
    return min(most, array.shape[names.index(name)]) if name in names else 1


def _touched(array: np.ndarray, names: str) -> list[_Piece]:
    """What the first tokens of the first heads touch, in this order; tokens of a head at the same place as one."""
    stride = dict(zip(names, array.strides))
    size, item = dict(zip(names, array.shape)), array.itemsize
    begin = array.__array_interface__["data"][0] % PAGE         # of the first element; no element is read
    found: dict[tuple[int, int, int, int], list[int]] = {}
    for token, head in product(range(min(TOKENS, size["L"])), range(min(HEADS, size.get("H", 1)))):
        start = begin + token * stride["L"] + head * stride.get("H", 0)
        for first, end in _intervals(start, stride["D"], size["D"], item):
            while first < end:          # cut at the ends of pages
                page = first // PAGE
                here = min(end, (page + 1) * PAGE)
                tokens = found.setdefault((page, first - page * PAGE, here - page * PAGE, head), [])
                if token not in tokens:
                    tokens.append(token)
                first = here
    return [_Piece(*place, tuple(tokens)) for place, tokens in found.items()]


def _intervals(start: int, stride: int, size: int, item: int) -> list[tuple[int, int]]:
    """[begin, end) of the bytes of a row of so many elements, neighbours as one."""
    if abs(stride) <= item:
        low = min(start, start + (size - 1) * stride)
        return [(low, low + (size - 1) * abs(stride) + item)]
    return [(start + i * stride, start + i * stride + item) for i in range(size)]


def _lines_and_pages(pieces: Iterable[_Piece]) -> str:
    lines = {(p.page, line) for p in pieces for line in range(p.start // LINE, (p.end - 1) // LINE + 1)}
    return f"{_count(len(lines), 'cache line')} on {_count(len({page for page, _ in lines}), 'page')}"


def _lanes(pieces: Sequence[_Piece]) -> list[int]:
    """A lane for each piece of a page, such that pieces that share bytes, as those of a broadcast array do, lie one above the
    other."""
    lanes, ends = [0] * len(pieces), list[int]()
    for at in sorted(range(len(pieces)), key=lambda at: (pieces[at].start, pieces[at].head)):
        lane = next((i for i, end in enumerate(ends) if end <= pieces[at].start), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane], lanes[at] = pieces[at].end, lane
    return lanes


def _draw_pages(axes: Any, pieces: Sequence[_Piece], pages: Sequence[int], inches: float) -> None:
    """A row of so many inches for each page, its pieces where they lie in it."""
    from matplotlib.patches import Rectangle

    byte = 8.6 / PAGE           # inches, about
    for place, page in enumerate(pages):
        own = [piece for piece in pieces if piece.page == page]
        lanes = _lanes(own)
        tall = 0.8 / (max(lanes) + 1)
        axes.add_patch(Rectangle((0, place - 0.4), PAGE, 0.8, facecolor="0.96", edgecolor="0.5", linewidth=0.7, zorder=1))
        for piece, lane in zip(own, lanes):
            wide, low = piece.end - piece.start, place - 0.4 + lane * tall
            look = {"edgecolor": "black", "linewidth": 0.5} if wide * byte > 0.03 else {"linewidth": 0}
            axes.add_patch(Rectangle((piece.start, low), wide, tall, facecolor=FILLS[piece.head], zorder=2, **look))
            text = _span(piece.tokens)
            if wide * byte > CHARACTER * len(text) and tall * inches > 0.09:
                axes.text(piece.start + wide / 2, low + tall / 2, text, ha="center", va="center", fontsize=7, zorder=4,
                          color="white" if FILLS[piece.head] in DARK else "black")
        axes.vlines(range(LINE, PAGE, LINE), place - 0.4, place + 0.4, color="0.5", linewidth=0.3, zorder=3)
    axes.set_xlim(0, PAGE)
    axes.set_ylim(len(pages) - 0.45, -0.55)
    axes.set_xticks(range(0, PAGE + 1, 512))
    axes.set_yticks(range(len(pages)), ["page 0" if page == 0 else f"page {page:+,}".replace("-", "−") for page in pages])
    axes.tick_params(labelsize=8, length=2)
    axes.set_xlabel("byte within the page of 4096; thin lines: cache lines of 64 bytes; t0: token 0; page 0: that of the first "
                    "element", fontsize=8)


def _span(tokens: Sequence[int]) -> str:
    """"t0", or "t0–t5" where several tokens lie at one place."""
    return f"t{tokens[0]}" if len(tokens) == 1 else f"t{tokens[0]}–t{tokens[-1]}"
