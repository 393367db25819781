"""The pictures of the study, each kind once: readable in black and white, units on every axis. Needs matplotlib.

Every function writes a PNG and takes what it draws as plain data; `found` is the results, whose command, machine, threads,
kernels and date stand below each picture.
"""
from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, StrMethodFormatter

from fastmha.study.folder import replacing

Found = Mapping[str, Any]

WIDTH, DPI = 10.0, 130                  # inches; pixels per inch
CHARACTER = {8: 0.068, 9: 0.076, 12: 0.112}     # inches of a wide one, by size in points
LABEL, GAP = 42, 0.1                    # characters of a row's label before it is wrapped; inches between header, panels, footer
CELL = 0.62, 0.34                       # inches of a cell of a heat map: width, height
BESIDE = 0.06                           # inches between the points of several lines at one place
LEAST_SPAN, MOST_SPAN = 1.1, 1.25       # its shades reach to this ratio at least: noise stays pale; and at most
SHADES = ("#1f4e8c", "0.97", "#e8912d")         # below 1, at it, above: without colours dark and light
DARK = -0.75                            # shades, from -1 to 1, below this: there white has the greater contrast
NOT_MEASURED = {"facecolor": "white", "hatch": "xxxx", "edgecolor": "0.6", "linewidth": 0}

# fills differ in grey and in hatch, lines in dashes and in marker; whoever draws more than there are starts again
FILLS: tuple[dict[str, Any], ...] = tuple({"facecolor": grey, "hatch": hatch} for grey, hatch in (
    ("0.35", ""), ("1.0", "////"), ("0.75", ""), ("1.0", "...."), ("0.85", "\\\\\\\\"), ("1.0", ""), ("0.6", "xxxx"),
    ("0.1", ""), ("1.0", "----"), ("0.8", "++++"), ("0.92", "||||"), ("0.7", "oo"), ("1.0", "OO"), ("0.6", "////"), ("0.55", ""),
    ("1.0", "**"), ("0.8", "xx")))
STROKES: tuple[dict[str, Any], ...] = tuple({"color": grey, "linestyle": dashes, "marker": marker} for grey, dashes, marker in (
    ("0.0", "-", "o"), ("0.35", "--", "s"), ("0.0", ":", "^"), ("0.5", "-", "D"), ("0.0", "-.", "v"), ("0.35", (0, (7, 2)), "x"),
    ("0.0", (0, (1, 2)), "P"), ("0.5", "--", "<"), ("0.0", (0, (5, 1, 1, 1, 1, 1)), ">"), ("0.35", ":", "*")))
MARKERS = "osD^vP<>X*ph"
HOLLOW = {"float32": ("full", "filled"), "float64": ("none", "hollow")}
CONTOUR = {"color": "black", "linewidth": 2.2, "solid_capstyle": "projecting"}
EDGE = {"edgecolor": "black", "linewidth": 0.7}


def heat_maps(path: Path, found: Found, *, title: str, panels: Sequence[Mapping[str, Any]], x: str, y: str, shade: str) -> None:
    """Maps of ratios side by side on one scale of shades that part at 1, where a line runs between the cells. A panel: {"title",
    "columns": texts, "rows": texts, "values": rows of numbers or None where nothing was measured, "texts": the same with what
    each cell says}; columns and rows are those of the first panel in all. `x`, `y`, `shade`: what the axes and the shade mean,
    with units."""
    columns, rows = panels[0]["columns"], panels[0]["rows"]
    maps = np.array([p["values"] for p in panels], dtype=float)
    span = _span(maps)
    names, wide, tall = CHARACTER[9] * max(map(len, rows)), CELL[0] * len(columns), CELL[1] * len(rows)
    across = _columns(len(panels), (WIDTH - 1.2 - names) / (wide + 0.3))
    down = -(-len(panels) // across)
    width = min(WIDTH, max(6.5, across * (wide + 0.3) + names + 1.9))
    figure, grid = _figure(width, max(2.2, down * (tall + 0.9)), len(panels), across)
    colours = LinearSegmentedColormap.from_list("sides", SHADES)
    for index, (axes, panel, values) in enumerate(zip(grid, panels, maps, strict=True)):
        shades = np.clip(np.log(values) / span, -1, 1)
        image = axes.imshow(np.ma.masked_invalid(shades), cmap=colours, vmin=-1, vmax=1, aspect="auto")
        for row, column in np.ndindex(*values.shape):
            if np.isfinite(values[row, column]):
                axes.text(column, row, panel["texts"][row][column], ha="center", va="center", fontsize=8,
                          color="white" if shades[row, column] < DARK else "black")
            else:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **NOT_MEASURED))
        _contour(axes, values)
        axes.set_xticks(range(len(columns)), columns, fontsize=9)
        axes.set_yticks(range(len(rows)), rows if index % across == 0 else [""] * len(rows), fontsize=9)
        axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)      # white lines between the cells
        axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2)
        axes.tick_params(which="both", length=0)
        _named(axes, panel["title"], x, wide, y if index % across == 0 else "", tall)
    bar = figure.colorbar(image, ax=grid, ticks=np.linspace(-1, 1, 5), aspect=30, fraction=0.06, pad=0.02)
    bar.set_ticklabels([_number(math.exp(t * span)) for t in bar.get_ticks()])
    bar.set_label(_wrapped(shade, int(max(2.0, down * tall) / CHARACTER[9])))
    bar.ax.axhline(0, **CONTOUR)
    _save(figure, path, found, title, [Line2D([], [], label="between values below 1.00 and others", **CONTOUR),
                                       *([] if np.isfinite(maps).all() else [Patch(label="not measured", **NOT_MEASURED)])])


def _span(ratios: np.ndarray) -> float:
    """The logarithm at which shades are full."""
    return float(np.clip(np.nanmax(np.abs(np.log(ratios))), math.log(LEAST_SPAN), math.log(MOST_SPAN)))


def _contour(axes: Any, values: np.ndarray) -> None:
    """A line along the edges of cells between values below 1 and others."""
    above = np.where(np.isfinite(values), values >= 1, np.nan)
    for row, column in np.argwhere(np.abs(np.diff(above, axis=1)) == 1):
        axes.plot([column + 0.5] * 2, [row - 0.5, row + 0.5], **CONTOUR)
    for row, column in np.argwhere(np.abs(np.diff(above, axis=0)) == 1):
        axes.plot([column - 0.5, column + 0.5], [row + 0.5] * 2, **CONTOUR)


def stacked_bars(path: Path, found: Found, *, title: str, bars: Sequence[Mapping[str, Any]], x: str,
                 reference: float | None = None) -> None:
    """Horizontal bars of parts. A bar: {"group", "label", "parts": [{"name", "value"}, ...]}, with "low" and "high" of its whole
    where known; bars of a group follow one another."""
    names = _looks((part["name"] for bar in bars for part in bar["parts"]), FILLS)
    places: list[float] = []
    headings: list[tuple[float, str]] = []
    height = 0.0
    for group, own in groupby(bars, lambda bar: bar["group"]):        # heights in inches, from the top
        text = _wrapped(group, LABEL)
        height += 0.12 * bool(places)
        headings.append((height + (0.17 * _lines(text) + 0.05) / 2, text))
        height += 0.17 * _lines(text) + 0.05
        for _ in own:
            places.append(height + 0.27 / 2)
            height += 0.27
    figure, (axes,) = _figure(WIDTH, height + 0.65)
    for place, bar in zip(places, bars, strict=True):
        ends = {True: 0.0, False: 0.0}      # parts below 0, which a difference may be, go to the left
        for part in bar["parts"]:
            side = part["value"] < 0
            axes.barh(place, part["value"], left=ends[side], height=0.2, **EDGE, **names[part["name"]])
            ends[side] += part["value"]
        _whisker(axes, bar, place)
        axes.text(1.01, place, _number(sum(ends.values())), transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    labels = [*(bar["label"] for bar in bars), *(text for _, text in headings)]
    axes.set_yticks([*places, *(place for place, _ in headings)], labels, fontsize=9)
    for tick in axes.yaxis.get_major_ticks()[len(places):]:
        tick.label1.set_fontweight("bold")
        tick.tick1line.set_visible(False)
    axes.set_ylim(height, 0)
    _horizontal(axes, x, reference)
    _save(figure, path, found, title, _legend(names, reference))


def bars(path: Path, found: Found, *, title: str, panels: Sequence[Mapping[str, Any]], x: str,
         reference: float | None = None) -> None:
    """Horizontal bars beside each other with whiskers. A panel: {"title", "rows": [{"label", "values": [{"name", "value",
    "low", "high"}, ...]}, ...]}; bars of one name have one hatch. They start at `reference` where it is given, else at 0."""
    names = _looks((value["name"] for p in panels for row in p["rows"] for value in row["values"]), FILLS)
    labels = [[_wrapped(row["label"], LABEL) for row in p["rows"]] for p in panels]
    shared = all(each == labels[0] for each in labels)          # the same rows: panels beside each other, labels once
    longest = max(len(line) for texts in labels for text in texts for line in text.split("\n"))
    columns = _columns(len(panels), (WIDTH - CHARACTER[9] * longest) / 2.4) if shared else 1
    taken = [[max(0.19 * len(row["values"]), 0.16 * _lines(text)) + 0.12 for row, text in zip(p["rows"], texts, strict=True)]
             for p, texts in zip(panels, labels, strict=True)]
    x = _wrapped(x, int(WIDTH / columns / CHARACTER[9] / 1.4))
    rows = [max(map(sum, taken[at:at + columns])) for at in range(0, len(panels), columns)]
    figure, grid = _figure(WIDTH, sum(rows) + len(rows) * (0.75 + 0.17 * _lines(x)), len(panels), columns, rows, sharex=True)
    start = 0.0 if reference is None else reference
    for index, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        places = [end - height / 2 for end, height in zip(accumulate(taken[index]), taken[index])]
        for middle, row in zip(places, panel["rows"], strict=True):
            for number, bar in enumerate(row["values"]):
                place = middle + 0.19 * (number - (len(row["values"]) - 1) / 2)
                axes.barh(place, bar["value"] - start, left=start, height=0.17, **EDGE, **names[bar["name"]])
                _whisker(axes, bar, place)
                axes.text(1.015, place, _number(bar["value"]), transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        axes.set_yticks(places, labels[index] if index % columns == 0 else [""] * len(places), fontsize=9)
        axes.set_ylim(sum(taken[index]), 0)
        axes.set_title(_wrapped(panel["title"], int(WIDTH / columns / CHARACTER[9])), fontsize=10)
        axes.tick_params(labelbottom=True)
        axes.use_sticky_edges = reference is None       # else a line at the edge is not seen
        _horizontal(axes, x, reference)
    _save(figure, path, found, title, _legend(names, reference))


def lines(path: Path, found: Found, *, title: str, panels: Sequence[Mapping[str, Any]], x: str, y: str, x_log2: bool = False,
          y_log: bool = False, same_y: bool = False) -> None:
    """Lines with their spread. A panel: {"title", "series": [{"name", "x": [...], "y": [...], "low": [...], "high": [...]}]}
    (low and high may be missing), with "reference": a horizontal line, which the legend calls "reference_name", "marks":
    [(x, text)] vertical ones. Where spreads of several lines at one x overlap, their points stand beside each other. `same_y`:
    one scale for all panels."""
    strokes = _looks((series["name"] for p in panels for series in p["series"]), STROKES)
    columns = _columns(len(panels), 2)
    tall = (3.5 if columns > 1 else 4.0) + 0.5 * any(p.get("marks") for p in panels)
    figure, grid = _figure(WIDTH, -(-len(panels) // columns) * tall, len(panels), columns, sharey=same_y)
    references: dict[str, Line2D] = {}
    for index, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        if x_log2:
            axes.set_xscale("log", base=2)
        if y_log:
            axes.set_yscale("log")
        places = _beside(panel["series"], 0.85 * WIDTH / columns, x_log2)
        for series, xs in zip(panel["series"], places, strict=True):
            ys, spread = np.array(series["y"], dtype=float), None
            if "low" in series:
                spread = np.maximum(0, np.stack((ys - series["low"], series["high"] - ys)))
            size = {"linewidth": 1.4, "markersize": 5, "capsize": 2.5} if len(ys) <= 40 else {"linewidth": 0.9, "markersize": 2}
            axes.errorbar(xs, ys, spread, elinewidth=0.9, **size, **strokes[series["name"]])
        if panel.get("reference") is not None:
            look = {"color": "black", "linewidth": 0.8, "dashes": (2, 2)}
            axes.axhline(panel["reference"], zorder=1, **look)
            name = panel.get("reference_name", f"reference {_short(panel['reference'])}")
            references[name] = Line2D([], [], label=_wrapped(name, 60), **look)
        _grid(axes)
        for log, limits, put in ((x_log2, axes.get_xlim, axes.set_xlim), (y_log, axes.get_ylim, axes.set_ylim)):
            low, high = limits()
            if log and high < 1.0001 * low:         # one point: a logarithmic axis around it has no length
                put(low / 2, high * 2)
        if x_log2:
            _powers_of_two(axes, {v for series in panel["series"] for v in series["x"]}, WIDTH / columns - 1.0)
        else:
            axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        if y_log:
            _plain_log(axes.yaxis)
        else:
            axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        _marks(axes, panel.get("marks") or ())
        _named(axes, panel["title"], x, WIDTH / columns * 0.9, y if index % columns == 0 else "", 3.2)
    _save(figure, path, found, title, [*(Line2D([], [], label=_wrapped(name, 60), linewidth=1.4, markersize=5, **stroke)
                                         for name, stroke in strokes.items()), *references.values()])


def _beside(series: Sequence[Mapping[str, Any]], inches: float, log: bool) -> list[np.ndarray]:
    """Where the points of the lines of a panel are drawn that is so many inches wide: if whiskers would lie on each other, all
    that have an x in common are moved apart, as far as there is room up to the next x."""
    to, back = (np.log2, np.exp2) if log else (np.asarray, np.asarray)
    places = [to(np.array(s["x"], dtype=float)) for s in series]
    xs = np.unique(np.concatenate(places)) if places else np.empty(0)
    common = [[(i, int(j)) for i, s in enumerate(series) if "low" in s for j in np.flatnonzero(places[i] == x)] for x in xs]
    if len(xs) < 2 or not any(_overlap(series, points) for points in common):
        return [np.array(s["x"], dtype=float) for s in series]
    unit = 1.1 * (xs[-1] - xs[0]) / inches
    moved = [at.copy() for at in places]
    for points, before, behind in zip(common, np.diff(xs, prepend=-np.inf), np.diff(xs, append=np.inf)):
        step = min(BESIDE * unit, 0.6 * min(before, behind) / max(1, len(points) - 1))
        for number, (i, j) in enumerate(points):
            moved[i][j] += step * (number - (len(points) - 1) / 2)
    return [back(at) for at in moved]


def _overlap(series: Sequence[Mapping[str, Any]], points: Iterable[tuple[int, int]]) -> bool:
    """Whether spreads of points, (which line, which of its points), have values in common."""
    spreads = sorted((series[i]["low"][j], series[i]["high"][j]) for i, j in points)
    return any(behind[0] <= before[1] for before, behind in pairwise(spreads))


def _marks(axes: Any, marks: Iterable[tuple[float, str]]) -> None:
    """Vertical lines, named above the panel."""
    low, high = axes.get_xlim()
    inside = {place: text for place, text in marks if low <= place <= high}
    for place in inside:
        axes.axvline(place, color="0.3", linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=1)
    if inside:
        top = axes.secondary_xaxis("top")
        top.xaxis.set_minor_locator(NullLocator())
        top.set_xticks(list(inside), list(inside.values()), fontsize=8)
        top.tick_params(length=2, which="major")


def roofline(path: Path, found: Found, *, title: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Operations/s over operations a byte, with the roofs of found["limits"]. A point: {"group", "dtype", "intensity" in
    FLOP/byte, "rate" in FLOP/s}; a group has one marker."""
    roofs, read = {name: found["limits"][name] / 1e9 for name in HOLLOW}, found["limits"]["read"] / 1e9
    highest, xs, rates = max(roofs.values()), [p["intensity"] for p in points], [p["rate"] / 1e9 for p in points]
    ridge = highest / read
    left = min(*xs, *(roof / read for roof in roofs.values())) / 2
    right = (max(*xs, ridge) * 1.3 / left) ** 1.35 * left       # right of the points there is room for the names of the roofs
    bottom = min(*rates, *(roof / 8 for roof in roofs.values())) / 1.6
    figure, (axes,) = _figure(WIDTH, 6.0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, max(*rates, highest) * 2)
    _grid(axes)
    for (name, roof), dashes in zip(roofs.items(), ("-", "--")):
        axes.plot([roof / read, right], [roof, roof], color="black", linewidth=1.5, linestyle=dashes)
        above = roof == highest     # the other's name below it: the two may be close
        axes.text(right * 0.96, roof * (1.03 if above else 0.97), f"fastest {name} product: {_number(roof)} GFLOP/s", ha="right",
                  va="bottom" if above else "top", fontsize=9)
    start = max(left, bottom / read)
    axes.plot([start, ridge], [start * read, ridge * read], color="black", linewidth=1.5)
    middle = math.sqrt(start * ridge)
    near_it = [p["intensity"] for p in points if p["rate"] / 1e9 > p["intensity"] * read / 1.5]
    lower = sum(x < middle for x in near_it) <= sum(middle <= x < ridge for x in near_it)
    near = start * (ridge / start) ** (0.04 if lower else 0.95)     # where fewer points are
    axes.text(near, near * read * 1.06, f"read from memory: {_number(read)} GB/s", fontsize=9, rotation_mode="anchor",
              rotation=math.degrees(math.atan(read)), transform_rotates_text=True, va="bottom", ha="left" if lower else "right")
    markers = _looks((p["group"] for p in points), MARKERS)
    drawn: dict[str, Any] = {"color": "0.15", "linestyle": "", "markersize": 7.5, "markeredgewidth": 1.1}
    for point in points:
        axes.plot(point["intensity"], point["rate"] / 1e9, fillstyle=HOLLOW[point["dtype"]][0], marker=markers[point["group"]],
                  zorder=3, **drawn)
    for axis in (axes.xaxis, axes.yaxis):
        _plain_log(axis)
    axes.set_xlabel("arithmetic intensity: operations a byte of operands and results (FLOP/byte)")
    axes.set_ylabel("speed of the whole call (GFLOP/s)")
    handles = [Line2D([], [], label=_wrapped(group, 60), marker=marker, **{**drawn, "markerfacecolor": "0.7"})
               for group, marker in markers.items()]
    handles += [Line2D([], [], label=f"{HOLLOW[d][1]}: {d}", marker="o", fillstyle=HOLLOW[d][0], **drawn)
                for d in dict.fromkeys(p["dtype"] for p in points)]
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
    for columns in range(min(6, len(handles)), 0, -1):
        legend = figure.legend(handles=handles, ncols=_columns(len(handles), columns), loc="upper center", borderaxespad=0,
                               fontsize=9, frameon=False, handlelength=3)
        legend.set_in_layout(False)
        if columns == 1 or legend.get_window_extent(renderer).width / DPI <= width - 0.2:
            break
        legend.remove()
    tall = [part.get_window_extent(renderer).height / DPI + GAP for part in (head, legend, foot)]
    total = height + sum(tall) + 2 * GAP
    figure.set_size_inches(width, total)
    head.set_y(1 - GAP / total)
    legend.set_bbox_to_anchor((0.5, 1 - (GAP + tall[0]) / total), figure.transFigure)
    foot.set_y(GAP / total)
    figure.set_layout_engine("constrained", rect=(0, (GAP + tall[2]) / total, 1, height / total))
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    with matplotlib.rc_context({"hatch.linewidth": 0.6}), replacing(path) as partial:
        figure.canvas.print_png(partial)        # `savefig` would draw everything twice, once for the layout


def _wrapped(text: str, width: int) -> str:
    text = text.replace("$", r"\$")     # no mathematics in the names of files and machines
    return "\n".join(textwrap.fill(line, max(12, width), break_on_hyphens=False) for line in text.split("\n"))


def _lines(text: str) -> int:
    return text.count("\n") + 1


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}" if size >= 0.0995 else f"{value:.2g}"


def _short(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _looks(names: Iterable[str], looks: Sequence[Any]) -> dict[str, Any]:
    return {name: looks[number % len(looks)] for number, name in enumerate(dict.fromkeys(names))}


def _legend(names: Mapping[str, dict[str, Any]], reference: float | None) -> list[Any]:
    line = {"color": "black", "linewidth": 1.2, "linestyle": "--"}
    return [*(Patch(label=_wrapped(name, 60), **EDGE, **fill) for name, fill in names.items()),
            *([] if reference is None else [Line2D([], [], label=f"reference {_short(reference)}", **line)])]


def _whisker(axes: Any, bar: Mapping[str, Any], place: float) -> None:
    if "low" in bar:
        for width, color in ((3.2, "white"), (1.4, "black")):       # white around it: seen on dark bars too
            axes.plot([bar["low"], bar["high"]], [place, place], color=color, linewidth=width, solid_capstyle="butt", marker="|",
                      markersize=6, markeredgewidth=width)


def _named(axes: Any, title: str, x: str, wide: float, y: str, tall: float) -> None:
    """Title and names of the axes of a panel that is so many inches wide and tall."""
    axes.set_title(_wrapped(title, int(wide / CHARACTER[9])), fontsize=10)
    axes.set_xlabel(_wrapped(x, int(wide / CHARACTER[9])))
    axes.set_ylabel(_wrapped(y, int(tall / CHARACTER[9])))


def _grid(axes: Any) -> None:
    axes.grid(color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)


def _horizontal(axes: Any, x: str, reference: float | None) -> None:
    """What panels with horizontal bars have alike."""
    if reference is not None:
        axes.axvline(reference, color="black", linewidth=1.2, linestyle="--")
    axes.set_xlabel(x)
    axes.grid(axis="x", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.05)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)


def _powers_of_two(axes: Any, values: Collection[float], inches: float) -> None:
    """Ticks at powers of two, and where they are few at the other values as far as their numbers have room."""
    least, most = min(values), max(values)
    powers = [2.0**n for n in range(math.ceil(math.log2(least)), math.floor(math.log2(most)) + 1)]
    others = [v for v in sorted(values) if v not in powers] if len(values) <= 12 else []
    low, high = np.log2(axes.get_xlim())
    room = CHARACTER[9] * (len(f"{most:.0f}") + 1.5) * (high - low) / inches
    shown: list[float] = []
    for value in [v for v in powers if v in values or not others] + others:
        if all(abs(math.log2(value / other)) >= room for other in shown):
            shown.append(value)
    axes.set_xticks(sorted(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))


def _plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers, at steps of 1, of 1, 2, 5, or of 10."""
    low, high = axis.get_view_interval()
    steps = range(1, 10) if high / low < 8 else (1, 2, 5) if high / low < 300 else (1,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(_short))
    axis.set_minor_formatter(NullFormatter())
