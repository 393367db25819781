"""The pictures of the study, each kind once: readable in black and white, units on every axis. Needs matplotlib.

Every function writes a PNG and takes what it draws as plain data; `found` is the results, whose command, machine, threads,
kernels and date stand below each picture.
"""
from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from fastmha.study.folder import replacing

Found = Mapping[str, Any]

WIDTH, DPI = 10.0, 130                  # inches; pixels per inch
CHARACTER = {8: 0.068, 9: 0.076, 12: 0.112}     # inches of a wide one, by size in points
LABEL, GAP = 42, 0.1                    # characters of a row's label before it is wrapped; inches between header, panels, footer
LEAST_SPAN, MOST_SPAN = 1.1, 1.25       # a heat map's shades reach to so many times `centre`, at least: noise stays pale; at most
SHADES = ("#1f4e8c", "0.97", "#e8912d")         # below `centre`, at it, above: without colours dark and light
NOT_MEASURED = {"facecolor": "white", "hatch": "xxxx", "edgecolor": "0.6", "linewidth": 0}

# fills differ in grey and in hatch, lines in dashes and in marker; whoever draws more than there are starts again
FILLS: tuple[dict[str, Any], ...] = tuple({"facecolor": grey, "hatch": hatch} for grey, hatch in (
    ("0.35", ""), ("1.0", "////"), ("0.75", ""), ("1.0", "...."), ("0.85", "\\\\\\\\"), ("1.0", ""), ("0.6", "xxxx"),
    ("0.1", ""), ("1.0", "----"), ("0.8", "++++"), ("0.92", "||||"), ("0.7", "oo")))
STROKES: tuple[dict[str, Any], ...] = tuple({"color": grey, "linestyle": dashes, "marker": marker} for grey, dashes, marker in (
    ("0.0", "-", "o"), ("0.35", "--", "s"), ("0.0", ":", "^"), ("0.5", "-", "D"), ("0.0", "-.", "v"), ("0.35", (0, (7, 2)), "x"),
    ("0.0", (0, (1, 2)), "P"), ("0.5", "--", "<"), ("0.0", (0, (5, 1, 1, 1, 1, 1)), ">"), ("0.35", ":", "*")))
MARKERS = "osD^vP<>X*ph"
CONTOUR = {"color": "black", "linewidth": 2.2, "solid_capstyle": "projecting"}
EDGE = {"edgecolor": "black", "linewidth": 0.7}


def heat_maps(path: Path, found: Found, *, title: str, panels: Sequence[Mapping[str, Any]], x: str, y: str, shade: str,
              centre: float = 1.0) -> None:
    """Maps side by side on one scale of shades that part at `centre`, where a line runs between the cells. A panel: {"title",
    "columns": texts, "rows": texts, "values": rows of numbers or None where nothing was measured, "texts": the same with what
    each cell says}. `x`, `y`, `shade`: what the axes and the shade mean, with units."""
    maps = [np.array(p["values"], dtype=float).reshape(len(p["rows"]), len(p["columns"])) for p in panels]
    position, value = _around(centre, np.concatenate([m[np.isfinite(m)] for m in maps]))
    said = [text.split("\n") for p in panels for row in p["texts"] for text in row if text]
    cell = max(0.62, CHARACTER[8] * max((len(line) for parts in said for line in parts), default=0) + 0.1)
    names = CHARACTER[9] * min(LABEL, max((len(row) for p in panels for row in p["rows"]), default=0))
    shared = len({tuple(p["rows"]) for p in panels}) == 1
    wide = cell * max(len(p["columns"]) for p in panels)
    columns = _columns(len(panels), (WIDTH - 1.2 - names * shared) / (wide + 0.3 + names * (not shared)))
    line = 0.19 * max((len(parts) for parts in said), default=1) + 0.15
    heights = [line * max(len(p["rows"]) for p in panels[at:at + columns]) for at in range(0, len(panels), columns)]
    width = min(WIDTH, max(6.5, columns * (wide + 0.3) + names * (1 if shared else columns) + 1.9))
    sideways = max(len(c) for p in panels for c in p["columns"]) * CHARACTER[9] > (width - names - 1.9) / columns / wide * cell
    below = (CHARACTER[9] * max(len(c) for p in panels for c in p["columns"]) if sideways else 0.2) + 0.25
    figure, grid = _figure(width, max(2.2, sum(heights) + len(heights) * (0.45 + below)), len(panels), columns, heights)
    colours = LinearSegmentedColormap.from_list("sides", SHADES)
    empty = any(not np.isfinite(m).all() for m in maps)
    for index, (panel, values) in enumerate(zip(panels, maps, strict=True)):
        axes = grid[index]
        axes.set_facecolor("white")
        shades = position(values)
        image = axes.imshow(np.ma.masked_invalid(shades), cmap=colours, vmin=-1, vmax=1, aspect="auto")
        for row, column in np.ndindex(*values.shape):
            if np.isfinite(values[row, column]):
                dark = _luminance(colours((shades[row, column] + 1) / 2)) < 0.18     # there white has the greater contrast
                axes.text(column, row, _plain(panel["texts"][row][column]), ha="center", va="center", fontsize=8,
                          color="white" if dark else "black")
            else:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **NOT_MEASURED))
        _contour(axes, values, centre)
        axes.set_xticks(range(len(panel["columns"])), [_plain(c) for c in panel["columns"]], fontsize=9,
                        rotation=90 if sideways else 0)
        axes.set_yticks(range(len(panel["rows"])), [_wrapped(r, LABEL) for r in panel["rows"]], fontsize=9)
        for edges in (axes.set_xticks, axes.set_yticks):        # white lines between the cells
            count = len(panel["columns"] if edges == axes.set_xticks else panel["rows"])
            edges(np.arange(count + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2)
        axes.tick_params(which="both", length=0)
        axes.set_title(_wrapped(panel["title"], int(wide / CHARACTER[9])), fontsize=10)
        axes.set_xlabel(_wrapped(x, int(wide / CHARACTER[9])))
        if index % columns == 0:
            axes.set_ylabel(_wrapped(y, int(line * len(panel["rows"]) / CHARACTER[9])))
        elif shared:
            axes.set_yticklabels([])
    ticks = np.linspace(-1, 1, 5)
    bar = figure.colorbar(image, ax=grid, ticks=ticks, aspect=30, fraction=0.06, pad=0.02)
    bar.set_ticklabels([_number(value(t)) for t in ticks])
    bar.set_label(_wrapped(shade, int(max(2.0, sum(heights)) / CHARACTER[9])))
    bar.ax.axhline(0, **CONTOUR)
    _save(figure, path, found, title, [Line2D([], [], label=f"between values below {centre:.2f} and others", **CONTOUR),
                                       *([Patch(label="not measured", **NOT_MEASURED)] if empty else [])])


def _contour(axes: Any, values: np.ndarray, centre: float) -> None:
    """A line along the edges of cells between values below the centre and others."""
    above = np.where(np.isfinite(values), values >= centre, np.nan)
    for row, column in zip(*np.nonzero(np.abs(np.diff(above, axis=1)) == 1)):
        axes.plot([column + 0.5] * 2, [row - 0.5, row + 0.5], **CONTOUR)
    for row, column in zip(*np.nonzero(np.abs(np.diff(above, axis=0)) == 1)):
        axes.plot([column - 0.5, column + 0.5], [row + 0.5] * 2, **CONTOUR)


def _luminance(colour: Sequence[float]) -> float:
    """Of a colour of sRGB, as the contrast of the Web Content Accessibility Guidelines takes it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _around(centre: float, values: np.ndarray) -> tuple[Callable[[Any], Any], Callable[[float], float]]:
    """From a value to its place between -1 and 1 on a scale around centre, and back; in ratios where all are positive."""
    if centre > 0 and (values > 0).all():
        span = min(math.log(MOST_SPAN), max(math.log(LEAST_SPAN), float(np.abs(np.log(values / centre)).max(initial=0))))
        return lambda v: np.clip(np.log(v / centre) / span, -1, 1), lambda t: centre * math.exp(t * span)
    span = max((LEAST_SPAN - 1) * abs(centre), float(np.abs(values - centre).max(initial=0))) or 1.0
    return lambda v: (v - centre) / span, lambda t: centre + t * span


def stacked_bars(path: Path, found: Found, *, title: str, bars: Sequence[Mapping[str, Any]], x: str,
                 reference: float | None = None) -> None:
    """Horizontal bars of parts. A bar: {"label", "parts": [{"name", "value"}, ...]}, with "low" and "high" of its whole
    where known; an equal "group" draws bars together."""
    names = _names(part["name"] for bar in bars for part in bar["parts"])
    labels: list[str] = []
    places: list[float] = []
    headings: list[tuple[float, str]] = []
    height, group = 0.0, None
    for bar in bars:        # heights in inches, from the top
        if bar.get("group") is not None and bar["group"] != group:
            text = _wrapped(bar["group"], LABEL)
            taken = 0.17 * _lines(text) + 0.05
            height += 0.12 * bool(places)
            headings.append((height + taken / 2, text))
            height += taken
        group = bar.get("group")
        labels.append(_wrapped(bar["label"], LABEL))
        taken = max(0.27, 0.16 * _lines(labels[-1]) + 0.06)
        places.append(height + taken / 2)
        height += taken
    figure, (axes,) = _figure(WIDTH, height + 0.65)
    for place, bar in zip(places, bars, strict=True):
        ends = {True: 0.0, False: 0.0}      # parts below 0, which a difference may be, go to the left
        for part in bar["parts"]:
            side = part["value"] < 0
            axes.barh(place, part["value"], left=ends[side], height=0.2, **EDGE, **names[part["name"]])
            ends[side] += part["value"]
        whole = sum(ends.values())
        _whisker(axes, bar, place)
        axes.text(1.01, place, _number(whole), transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_yticks([*places, *(place for place, _ in headings)], [*labels, *(text for _, text in headings)], fontsize=9)
    for number, tick in enumerate(axes.yaxis.get_major_ticks()):
        if number >= len(places):
            tick.label1.set_fontweight("bold")
            tick.tick1line.set_visible(False)
    axes.set_ylim(height, 0)
    _horizontal(axes, x, reference)
    _save(figure, path, found, title, _fills(names) + _reference(reference))


def bars(path: Path, found: Found, *, title: str, panels: Sequence[Mapping[str, Any]], x: str,
         reference: float | None = None) -> None:
    """Horizontal bars beside each other with whiskers. A panel: {"title", "rows": [{"label", "values": [{"name", "value",
    "low", "high"}, ...]}, ...]}; bars of one name have one hatch. They start at `reference` where it is given, else at 0."""
    names = _names(value["name"] for p in panels for row in p["rows"] for value in row["values"])
    labels = [tuple(_wrapped(row["label"], LABEL) for row in p["rows"]) for p in panels]
    shared = len(set(labels)) == 1          # the same rows: panels beside each other, labels once
    longest = max((len(line) for texts in labels for text in texts for line in text.split("\n")), default=0)
    columns = _columns(len(panels), (WIDTH - CHARACTER[9] * longest) / 2.4) if shared else 1
    places: list[list[float]] = []
    heights: list[float] = []
    for index, panel in enumerate(panels):
        height, middle = 0.0, []
        for row, text in zip(panel["rows"], labels[index], strict=True):
            taken = max(0.19 * max(1, len(row["values"])), 0.16 * _lines(text)) + 0.12
            middle.append(height + taken / 2)
            height += taken
        places.append(middle)
        heights.append(height)
    below = 0.4 + 0.17 * _lines(_wrapped(x, int(WIDTH / columns / CHARACTER[9] / 1.4)))
    rows = [max(heights[at:at + columns]) for at in range(0, len(panels), columns)]
    figure, grid = _figure(WIDTH, sum(rows) + len(rows) * (0.35 + below), len(panels), columns, rows, sharex=True)
    start = 0.0 if reference is None else reference
    for index, panel in enumerate(panels):
        axes = grid[index]
        for middle_of_row, row in zip(places[index], panel["rows"], strict=True):
            for number, bar in enumerate(row["values"]):
                place = middle_of_row + 0.19 * (number - (len(row["values"]) - 1) / 2)
                if bar["value"] is not None:
                    axes.barh(place, bar["value"] - start, left=start, height=0.17, **EDGE, **names[bar["name"]])
                    _whisker(axes, bar, place)
                text = "not measured" if bar["value"] is None else _number(bar["value"])
                axes.text(1.015, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        axes.set_yticks(places[index], labels[index] if index % columns == 0 else [""] * len(labels[index]), fontsize=9)
        axes.set_ylim(heights[index], 0)
        axes.set_title(_wrapped(panel["title"], int(WIDTH / columns / CHARACTER[9])), fontsize=10)
        axes.tick_params(labelbottom=True)
        axes.use_sticky_edges = reference is None       # else a line at the edge is not seen
        _horizontal(axes, _wrapped(x, int(WIDTH / columns / CHARACTER[9] / 1.4)), reference)
    _save(figure, path, found, title, _fills(names) + _reference(reference) if len(names) > 1 else [])


def lines(path: Path, found: Found, *, title: str, panels: Sequence[Mapping[str, Any]], x: str, y: str, x_log2: bool = False,
          y_log: bool = False) -> None:
    """Lines with their spread. A panel: {"title", "series": [{"name", "x": [...], "y": [...], "low": [...], "high": [...]}]}
    (low and high may be missing), with "reference": a horizontal line, "marks": [(x, text)] vertical ones."""
    order = list(dict.fromkeys(series["name"] for p in panels for series in p["series"]))
    strokes = {name: STROKES[number % len(STROKES)] for number, name in enumerate(order)}
    columns = _columns(len(panels), 2)
    count = -(-len(panels) // columns)
    marked = any(p.get("marks") for p in panels)
    figure, grid = _figure(WIDTH, count * ((3.5 if columns > 1 else 4.0) + 0.5 * marked), len(panels), columns)
    for index, panel in enumerate(panels):
        axes = grid[index]
        if x_log2:
            axes.set_xscale("log", base=2)
        if y_log:
            axes.set_yscale("log")
        for series in panel["series"]:
            xs, ys = (np.array(series[name], dtype=float) for name in ("x", "y"))
            spread = None
            if series.get("low") is not None and series.get("high") is not None:
                low, high = (np.array(series[name], dtype=float) for name in ("low", "high"))
                spread = np.maximum(0, np.stack((ys - low, high - ys)))
            size = {"linewidth": 1.4, "markersize": 5, "capsize": 2.5} if len(xs) <= 40 else {"linewidth": 0.9, "markersize": 2}
            axes.errorbar(xs, ys, spread, elinewidth=0.9, **size, **strokes[series["name"]])
        if panel.get("reference") is not None:
            axes.axhline(panel["reference"], color="black", linewidth=0.8, dashes=(2, 2), zorder=1)
        axes.grid(color="0.88", linewidth=0.6)
        axes.set_axisbelow(True)
        for log, limits, put in ((x_log2, axes.get_xlim, axes.set_xlim), (y_log, axes.get_ylim, axes.set_ylim)):
            low, high = limits()
            if log and high < 1.0001 * low:         # one point: a logarithmic axis around it has no length
                put(low / 2, high * 2)
        if x_log2:
            _powers_of_two(axes, [v for series in panel["series"] for v in series["x"]], WIDTH / columns - 1.0)
        else:
            axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        if y_log:
            _plain_log(axes.yaxis)
        else:
            axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        _marks(axes, panel.get("marks") or (), WIDTH / columns - 1.0)
        axes.set_title(_wrapped(panel["title"], int(WIDTH / columns / CHARACTER[9] * 0.9)), fontsize=10)
        axes.set_xlabel(_wrapped(x, int(WIDTH / columns / CHARACTER[9] * 0.9)))
        if index % columns == 0:
            axes.set_ylabel(_wrapped(y, int(3.2 / CHARACTER[9])))
    handles = [Line2D([], [], label=_wrapped(name, 60), linewidth=1.4, markersize=5, **stroke)
               for name, stroke in strokes.items()]
    _save(figure, path, found, title, handles)


def _marks(axes: Any, marks: Iterable[tuple[float, str]], inches: float) -> None:
    """Vertical lines, named above the panel; upright where the names would meet, in one where even these would."""
    low, high = axes.get_xlim()
    scale: Callable[[float], float] = math.log if axes.get_xscale() == "log" else float
    inside = sorted((place, _wrapped(text, 16)) for place, text in marks if low <= place <= high)
    at = [inches * (scale(place) - scale(low)) / (scale(high) - scale(low)) for place, _ in inside]
    shown: list[tuple[float, float, str]] = []
    for inch, (place, text) in zip(at, inside, strict=True):
        axes.axvline(place, color="0.3", linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=1)
        if shown and inch - shown[-1][0] < 0.17:
            shown[-1] = (*shown[-1][:2], f"{shown[-1][2]}, {text}")
        else:
            shown.append((inch, place, text))
    if shown:
        long = [CHARACTER[8] * max(map(len, text.split("\n"))) for *_, text in shown]
        meet = any(shown[n + 1][0] - shown[n][0] < (long[n] + long[n + 1]) / 2 + 0.05 for n in range(len(shown) - 1))
        top = axes.secondary_xaxis("top")
        top.xaxis.set_minor_locator(NullLocator())
        top.set_xticks([place for _, place, _ in shown], [text for *_, text in shown], fontsize=8,
                       rotation=90 if meet else 0)
        top.tick_params(length=2, which="major")


def roofline(path: Path, found: Found, *, title: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Operations/s over operations a byte, with the roofs of found["limits"]. A point: {"group", "dtype", "intensity" in
    FLOP/byte, "rate" in FLOP/s}; a group has one marker."""
    limits = found["limits"]
    roofs = {name: limits[name] / 1e9 for name in ("float32", "float64") if name in limits}
    read = limits["read"] / 1e9
    xs = [p["intensity"] for p in points] + [roof / read for roof in roofs.values()]
    rates = [p["rate"] / 1e9 for p in points]
    left = min(xs) / 2
    right = (max(xs) * 1.3 / left) ** 1.35 * left       # right of the points there is room for the names of the roofs
    top, bottom = max([*rates, *roofs.values()]) * 2, min([*rates, *(roof / 8 for roof in roofs.values())]) / 1.6
    figure, (axes,) = _figure(WIDTH, 6.0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.grid(color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    for (name, roof), dashes in zip(roofs.items(), ("-", "--")):
        axes.plot([roof / read, right], [roof, roof], color="black", linewidth=1.5, linestyle=dashes)
        above = roof == max(roofs.values())     # the other's name below it: the two may be close
        axes.text(right * 0.96, roof * (1.03 if above else 0.97), f"fastest {name} product: {_number(roof)} GFLOP/s", ha="right",
                  va="bottom" if above else "top", fontsize=9)
    ridge = max(roofs.values(), default=top) / read
    start = max(left, bottom / read)
    axes.plot([start, ridge], [start * read, ridge * read], color="black", linewidth=1.5)
    middle = math.sqrt(start * ridge)
    near_it = [p["intensity"] for p in points if p["rate"] / 1e9 > p["intensity"] * read / 1.5]
    lower = sum(x < middle for x in near_it) <= sum(middle <= x < ridge for x in near_it)
    near = start * (ridge / start) ** (0.04 if lower else 0.95)     # where fewer points are
    axes.text(near, near * read * 1.06, f"read from memory: {_number(read)} GB/s", fontsize=9, rotation_mode="anchor",
              rotation=math.degrees(math.atan(read)), transform_rotates_text=True, va="bottom", ha="left" if lower else "right")
    groups = list(dict.fromkeys(p["group"] for p in points))
    dtypes = list(dict.fromkeys(p["dtype"] for p in points))
    fills = {"float32": "full", "float64": "none", **dict.fromkeys(set(dtypes) - {"float32", "float64"}, "left")}
    called = {"full": "filled", "none": "hollow", "left": "half filled"}
    drawn: dict[str, Any] = {"color": "0.15", "markerfacecoloralt": "white", "linestyle": "", "markersize": 7.5,
                             "markeredgewidth": 1.1}
    for point in points:
        axes.plot(point["intensity"], point["rate"] / 1e9, fillstyle=fills[point["dtype"]],
                  marker=MARKERS[groups.index(point["group"]) % len(MARKERS)], zorder=3, **drawn)
    for axis in (axes.xaxis, axes.yaxis):
        _plain_log(axis)
    axes.set_xlabel("arithmetic intensity: operations a byte of operands and results (FLOP/byte)")
    axes.set_ylabel("speed of the whole call (GFLOP/s)")
    handles = [Line2D([], [], label=_wrapped(group, 60), marker=MARKERS[n % len(MARKERS)], **{**drawn, "markerfacecolor": "0.7"})
               for n, group in enumerate(groups)]
    handles += [Line2D([], [], label=f"{called[fills[d]]}: {d}", marker="o", fillstyle=fills[d], **drawn) for d in dtypes]
    _save(figure, path, found, title, handles)


# ------------------------------------------------------------------------------------------------ the page

def _figure(width: float, height: float, panels: int = 1, columns: int = 1, heights: Sequence[float] | None = None,
            **more: Any) -> tuple[Figure, list[Any]]:
    """A figure whose panels have that many inches in all; the panels, row by row."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    grid = figure.subplots(-(-panels // columns), columns, squeeze=False, height_ratios=heights, **more)
    for axes in grid.flat[panels:]:     # the last row may have fewer
        axes.remove()
    return figure, list(grid.flat[:panels])


def _columns(panels: int, fit: float) -> int:
    """Columns of a grid where so many panels fit side by side: as even as can be."""
    rows = math.ceil(panels / max(1, min(panels, int(fit))))
    return math.ceil(panels / rows)


def _save(figure: Figure, path: Path, found: Found, title: str, handles: Sequence[Any]) -> None:
    """Set the title and the legend above the panels and the footer below them, each as high as it turns out, and write."""
    width, height = figure.get_size_inches()
    renderer = figure.canvas.get_renderer()
    head = figure.text(0.5, 1, _wrapped(title, int(width / CHARACTER[12])), fontsize=12, fontweight="bold", ha="center", va="top")
    count = found["threads"]
    where = (f"{found['machine']['cpu']}, {count} thread{'s' * (count != 1)}, {found['kernels']['isa']}   ·   "
             f"fastmha {found['versions']['fastmha']}, {found['date'][:10]}")
    fit = int(width / CHARACTER[8])
    between = "   ·   " if len(found["command"]) + len(where) + 7 <= fit else "\n"
    foot = figure.text(0.5, 0, _wrapped(found["command"] + between + where, fit), fontsize=8, color="0.3", ha="center",
                       va="bottom")
    legend = None
    for columns in range(min(6, len(handles)), 0, -1):
        if legend is not None:
            legend.remove()
        even = _columns(len(handles), columns)
        legend = figure.legend(handles=handles, ncols=even, loc="upper center", borderaxespad=0, fontsize=9, frameon=False,
                               handlelength=3)
        legend.set_in_layout(False)
        if legend.get_window_extent(renderer).width / DPI <= width - 0.2:
            break
    tall = [0 if part is None else part.get_window_extent(renderer).height / DPI + GAP for part in (head, legend, foot)]
    total = height + sum(tall) + 2 * GAP
    figure.set_size_inches(width, total)
    head.set_y(1 - GAP / total)
    if legend is not None:
        legend.set_bbox_to_anchor((0.5, 1 - (GAP + tall[0]) / total), figure.transFigure)
    foot.set_y(GAP / total)
    figure.set_layout_engine("constrained", rect=(0, (GAP + tall[2]) / total, 1, height / total))
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    with matplotlib.rc_context({"hatch.linewidth": 0.6}), replacing(path) as partial:
        figure.canvas.print_png(partial)        # `savefig` would draw everything twice, once for the layout


def _plain(text: str) -> str:
    return text.replace("$", r"\$")     # no mathematics in the names of files and machines


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.fill(line, max(12, width), break_on_hyphens=False) for line in _plain(text).split("\n"))


def _lines(text: str) -> int:
    return text.count("\n") + 1


def _number(value: float, _: object = None) -> str:
    """Three digits, or all before the point."""
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.0995 else f"{value:.2g}"


def _short(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _names(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {name: FILLS[number % len(FILLS)] for number, name in enumerate(dict.fromkeys(names))}


def _fills(names: Mapping[str, dict[str, Any]]) -> list[Any]:
    return [Patch(label=_wrapped(name, 60), **EDGE, **fill) for name, fill in names.items()]


def _reference(reference: float | None) -> list[Any]:
    if reference is None:
        return []
    return [Line2D([], [], color="black", linewidth=1.2, linestyle="--", label=f"reference {_short(reference)}")]


def _whisker(axes: Any, bar: Mapping[str, Any], place: float) -> None:
    if bar.get("low") is not None and bar.get("high") is not None:
        for width, color in ((3.2, "white"), (1.4, "black")):       # white around it: seen on dark bars too
            axes.plot([bar["low"], bar["high"]], [place, place], color=color, linewidth=width, solid_capstyle="butt", marker="|",
                      markersize=6, markeredgewidth=width)


def _horizontal(axes: Any, x: str, reference: float | None) -> None:
    """What panels with horizontal bars have alike."""
    if reference is not None:
        axes.axvline(reference, color="black", linewidth=1.2, linestyle="--")
    axes.set_xlabel(x)
    axes.grid(axis="x", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.05)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)


def _powers_of_two(axes: Any, values: Iterable[float], inches: float) -> None:
    """Ticks at powers of two, and where they are few at the other values as far as their numbers have room; in Ki, Mi, Gi
    where they go beyond 2^17."""
    several = sorted({v for v in values if v > 0})
    if not several:
        return
    powers = [2.0**n for n in range(math.ceil(math.log2(several[0])), math.floor(math.log2(several[-1])) + 1)]
    others = [v for v in several if v not in powers] if len(several) <= 12 else []
    text = _binary if several[-1] >= 1 << 17 else _whole
    low, high = np.log2(axes.get_xlim())
    shown: list[float] = []
    for value in [v for v in powers if v in several or not others] + others:
        room = CHARACTER[9] * (max(len(text(v)) for v in several) + 1.5) * (high - low) / inches
        if all(abs(math.log2(value / other)) >= room for other in shown):
            shown.append(value)
    axes.set_xticks(sorted(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(text))


def _binary(value: float, _: object = None) -> str:
    for power, unit in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if value >= 1 << power:
            return f"{value / (1 << power):.4g} {unit}"
    return f"{value:g}"


def _whole(value: float, _: object = None) -> str:
    return f"{value:.0f}" if value >= 1 else f"{value:g}"


def _plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers, at steps of 1, of 1, 2, 5, or of 10."""
    low, high = axis.get_view_interval()
    steps = range(1, 10) if high / low < 8 else (1, 2, 5) if high / low < 300 else (1,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(_short))
    axis.set_minor_formatter(NullFormatter())
