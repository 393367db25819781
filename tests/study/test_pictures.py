"""Pictures of the study: texts that can be read, shades and strokes that are told apart, bars, whiskers and roofs in place."""

import re

import numpy as np
import pytest
from study_support import ARMS, FOUND, KINDS, curves, heat, needs_extra, roofs, side

from fastmha.study import questions, report, runner

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draws a kind of picture; returns its figure, drawn, and the path of its PNG."""
    plots = pytest.importorskip("fastmha.study.plots", reason='needs matplotlib: pip install "fastmha[study]"',
                                exc_type=ImportError)
    figures, Figure = [], plots.Figure
    monkeypatch.setattr(plots, "Figure", lambda *a, **more: figures.append(Figure(*a, **more)) or figures[-1])

    def draw(kind, data, found=FOUND):
        path = tmp_path / "picture.png"
        getattr(plots, kind)(path, found, **data)
        return figures[-1], path

    return draw


def texts(figure):
    """The texts that are seen."""
    panels = [*figure.axes, *(child for axes in figure.axes for child in axes.child_axes)]
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in panels:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 if tick.label1.get_visible() else tick.label2 for tick in axis.get_major_ticks()
                      if low <= tick.get_loc() <= high]
    return [text for text in found if text.get_visible() and text.get_text()]


@needs_extra
@pytest.mark.parametrize(("panels", "rows"), [(1, 3), (4, 3), (1, 40), (2, 7)])
@kinds
def test_texts_of_a_picture_lie_within_it_and_not_on_each_other(kind, panels, rows, draw):
    title = "Where it goes, for each of the shapes that were measured here and in each of both directions, one after another"
    found = {**FOUND, "command": f"fastmha study --quick --threads 2 --out {'/a/folder/that/lies/deep' * 8}",
             "machine": {**FOUND["machine"], "cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"}}
    figure, _ = draw(kind, {**KINDS[kind](panels, rows), "title": title}, found)
    renderer = figure.canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(figure)
             if text.get_rotation() in (0, 90)]       # the box of an inclined one is larger than it
    assert len(boxes) > 8
    width, height = figure.canvas.get_width_height()
    for name, box in boxes:
        assert box.x0 >= -1, name
        assert box.y0 >= -1, name
        assert box.x1 <= width + 1, name
        assert box.y1 <= height + 1, name
    for at, (name, box) in enumerate(boxes):
        for other, beside in boxes[at + 1:]:
            x = min(box.x1, beside.x1) - max(box.x0, beside.x0)
            y = min(box.y1, beside.y1) - max(box.y0, beside.y0)
            assert min(x, y) <= 2, f"{name!r} and {other!r} overlap by {x:.0f} x {y:.0f} pixels"


@needs_extra
@kinds
def test_a_picture_is_a_png_of_readable_size_and_heat_maps_alone_have_colours(kind, draw):
    from matplotlib.image import imread

    figure, path = draw(kind, KINDS[kind](2, 3))
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = imread(path)[..., :3]
    assert (np.ptp(pixels, axis=-1).max() > 0) == (kind == "heat_maps")
    assert pixels.shape[1::-1] == figure.canvas.get_width_height()
    assert 800 <= pixels.shape[1] <= 1300


@needs_extra
@pytest.mark.parametrize("kind", ["heat_maps", "stacked_bars", "bars"])
def test_a_picture_grows_with_its_rows(kind, draw):
    small, _ = draw(kind, KINDS[kind](1, 3))
    large, _ = draw(kind, KINDS[kind](1, 40))
    assert large.get_size_inches()[1] > small.get_size_inches()[1] + 30 * 0.25


@needs_extra
@kinds
def test_the_footer_says_how_and_where_it_was_measured(kind, draw):
    figure, _ = draw(kind, KINDS[kind](1, 3), {**FOUND, "command": "fastmha study --out $HOME/$x"})
    said = " ".join(text.get_text() for text in figure.texts).replace(r"\$", "$")
    for part in ("fastmha study --out $HOME/$x", "A CPU", "2 threads", "avx2", "fastmha 1.0", "2025-01-02"):
        assert part in said


@needs_extra
@kinds
def test_axes_name_units(kind, draw):
    figure, _ = draw(kind, KINDS[kind](2, 3))
    named = [text.replace("\n", " ") for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel()) if text]
    assert named
    for text in named:
        assert re.search(r"\(.*\)", text) or text == "case"


@needs_extra
@pytest.mark.parametrize("missing", [True, False])
def test_cells_that_were_not_measured_are_hatched_and_the_legend_says_so(missing, draw):
    data = heat(2, 3, missing)
    figure, _ = draw("heat_maps", data)
    hatched = [patch for axes in figure.axes for patch in axes.patches if patch.get_hatch()]
    assert len(hatched) == sum(v is None for p in data["panels"] for row in p["values"] for v in row)
    assert bool(hatched) is missing
    said = [t.get_text() for legend in figure.legends for t in legend.get_texts()]
    assert said == ["between values below 1.00 and others", *["not measured"] * missing]


@needs_extra
def test_texts_of_cells_have_contrast_and_shades_part_at_the_centre_with_and_without_colours(draw):
    figure, _ = draw("heat_maps", heat(1, 7, missing=False))
    axes = figure.axes[0]
    (image,) = axes.get_images()
    shades = []
    for text in axes.texts:
        column, row = map(int, text.get_position())
        colour = image.cmap(image.norm(image.get_array()[row, column]))
        light, dark = sorted([luminance(colour), {"white": 1.0, "black": 0.0}[text.get_color()]], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
        shades.append((float(text.get_text().split()[1]), *colour[:3], luminance(colour)))
    below, above = ([shade for shade in sorted(shades) if (shade[0] < 1) == side] for side in (True, False))
    assert all(blue > red for _, red, _, blue, _ in below)
    assert all(red > blue for _, red, _, blue, _ in above)
    assert [s[-1] for s in below] == sorted(s[-1] for s in below)               # from dark to pale, and on to a middle grey
    assert [s[-1] for s in above] == sorted((s[-1] for s in above), reverse=True)
    assert above[-1][-1] - below[0][-1] > 0.25


@needs_extra
def test_a_line_runs_between_cells_on_either_side_of_the_centre(draw):
    values = [[0.9, 1.0, None], [0.8, 0.95, 0.9]]
    panel = {"title": "t", "columns": list("abc"), "rows": list("de"), "values": values,
             "texts": [[str(v or "") for v in row] for row in values]}
    figure, _ = draw("heat_maps", {**heat(1, 1), "panels": [panel]})
    edges = {(*line.get_xdata(), *line.get_ydata()) for line in figure.axes[0].lines}
    assert edges == {(0.5, 0.5, -0.5, 0.5), (0.5, 1.5, 0.5, 0.5)}


def luminance(colour):
    """As the contrast of the Web Content Accessibility Guidelines takes it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


@needs_extra
@pytest.mark.parametrize(("ratios", "full"), [([0.9, 1.2, np.nan], 1.2), ([0.9, 1.1], 1 / 0.9), ([1.001], 1.1), ([0.3, 1], 1.25)])
def test_shades_are_full_at_the_ratio_farthest_from_1_but_noise_stays_pale_and_one_far_off_leaves_some(ratios, full):
    from fastmha.study import plots

    assert np.exp(plots._span(np.array(ratios))) == pytest.approx(full)


@needs_extra
def test_fills_and_strokes_are_told_apart_without_colours():
    from fastmha.study import plots

    assert len({(fill["facecolor"], fill["hatch"]) for fill in plots.FILLS}) == len(plots.FILLS) >= 10
    assert len({stroke["marker"] for stroke in plots.STROKES}) == len(plots.STROKES) >= 8
    assert len({stroke["linestyle"] for stroke in plots.STROKES[:3]}) == 3


def look(handle):
    """What a swatch of a legend looks like."""
    from matplotlib.lines import Line2D

    if isinstance(handle, Line2D):
        fill = handle.get_fillstyle(), str(handle.get_markerfacecolor())
        return handle.get_color(), str(handle._unscaled_dash_pattern), str(handle.get_marker()), *fill
    return handle.get_facecolor(), handle.get_hatch()


@needs_extra
def test_no_two_swatches_of_the_documents_pictures_are_alike_and_every_name_is_there(monkeypatch):
    from fastmha.study import plots

    found = runner.read(report.Path(__file__).parents[2] / "docs" / "layouts" / "results.json")
    pictures = [p for q in questions.ALL for p in q.answered(found).pictures]
    kept = {}
    monkeypatch.setattr(plots, "_save", lambda figure, path, found, title, handles: kept.update({path: (figure, handles)}))
    for picture in pictures:
        getattr(plots, picture.kind)(picture.name, found, **picture.data)
    assert len(kept) == len(pictures) > 15
    for picture in pictures:
        _, handles = kept[picture.name]
        looks = [look(handle) for handle in handles]
        assert len(set(looks)) == len(looks), picture.name
        said = {handle.get_label().replace("\n", " ") for handle in handles}
        for bar in picture.data.get("bars", ()):
            assert {part["name"] for part in bar["parts"]} <= said
        for panel in picture.data.get("panels", ()):
            assert {series["name"] for series in panel.get("series", ())} <= said
            if picture.kind == "lines" and "reference" in panel:
                assert panel.get("reference_name", "reference 1") in said, picture.name


@needs_extra
def test_a_horizontal_line_is_named_in_the_legend(draw):
    data = curves(2, 3)
    data["panels"][1].update(reference=2.5, reference_name="half of it")
    figure, _ = draw("lines", data)
    assert [t.get_text() for legend in figure.legends for t in legend.get_texts()] == [*ARMS, "reference 1", "half of it"]


@needs_extra
@pytest.mark.parametrize("log", [False, True])
def test_whiskers_that_would_lie_on_each_other_stand_beside_each_other_near_their_place(log, draw):
    xs = [1024, 2048, 4096]
    series = [{"name": name, "x": xs, "y": (y := [1 + 0.01 * i] * 3), "low": [v - 0.1 for v in y], "high": [v + 0.1 for v in y]}
              for i, name in enumerate("abc")]
    without = {"name": "without", "x": xs, "y": [1.0] * 3}
    alone = {**series[0], "name": "alone", "x": [1500], **{key: [1.0] for key in ("y", "low", "high")}}
    panel = {"title": "t", "series": [*series, without, alone]}
    figure, _ = draw("lines", {**curves(1, 3), "panels": [panel], "x_log2": log, "y_log": False})
    axes = figure.axes[0]
    places = [line.get_xdata() for line, *_ in axes.containers]
    pixels = [axes.transData.transform(np.stack((x, np.ones(len(x))), axis=1))[:, 0] / figure.dpi for x in places]
    true = axes.transData.transform(np.stack((xs, np.ones(3)), axis=1))[:, 0] / figure.dpi
    for at in range(3):
        a, b, c = (pixels[i][at] for i in range(3))
        assert 0.03 < b - a < 0.1
        assert 0.03 < c - b < 0.1
        assert b == pytest.approx(true[at], abs=1e-6)
    assert places[3].tolist() == pytest.approx(xs)
    assert places[4].tolist() == pytest.approx([1500])


@needs_extra
def test_points_stay_at_their_place_where_no_whisker_hides_another(draw):
    xs = [512, 1024]
    series = [{"name": str(y), "x": xs, "y": [y] * 2, "low": [y - 0.1] * 2, "high": [y + 0.1] * 2} for y in (1.0, 2.0, 3.0)]
    figure, _ = draw("lines", {**curves(1, 3), "panels": [{"title": "t", "series": series}]})
    assert [line.get_xdata().tolist() for line, *_ in figure.axes[0].containers] == [xs] * 3


@needs_extra
def test_panels_have_one_scale_where_they_are_to_be_compared(draw):
    data = curves(2, 3)
    data["panels"][1]["series"] = [{"name": "high", "x": [512, 1024], "y": [50.0, 60.0]}]
    limits = {same: [axes.get_ylim() for axes in draw("lines", {**data, "same_y": same})[0].axes[:2]] for same in (True, False)}
    assert limits[True][0] == limits[True][1]
    assert limits[False][0] != limits[False][1]


@needs_extra
def test_bars_start_at_the_reference_and_whiskers_span_the_interval(draw):
    figure, _ = draw("bars", side(1, 3))
    axes = figure.axes[0]
    data = [bar for row in side(1, 3)["panels"][0]["rows"] for bar in row["values"]]
    assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches] == [
        pytest.approx((1.0, bar["value"])) for bar in data]
    whiskers = {tuple(line.get_xdata()) for line in axes.lines}
    assert {(bar["low"], bar["high"]) for bar in data} <= whiskers


@needs_extra
def test_parts_of_a_bar_follow_one_another_those_below_0_to_the_left(draw):
    parts = [{"name": "a", "value": 2.0}, {"name": "b", "value": -1.0}, {"name": "c", "value": 3.0}]
    figure, _ = draw("stacked_bars", {"title": "t", "x": "ms (ms)", "bars": [{"group": "g", "label": "bar", "parts": parts}]})
    axes = figure.axes[0]
    assert [(p.get_x(), p.get_x() + p.get_width()) for p in axes.patches] == [(0.0, 2.0), (0.0, -1.0), (2.0, 5.0)]
    assert [text.get_text() for text in axes.texts] == ["4.00"]


@needs_extra
def test_roofs_are_the_limits_of_the_machine(draw):
    figure, _ = draw("roofline", roofs(1, 3))
    axes = figure.axes[0]
    lines = [(line.get_xdata(), line.get_ydata()) for line in axes.lines]
    assert {200.0, 100.0} <= {y[0] for x, y in lines if len(y) == 2 and y[0] == y[1]}
    (x, y), = [(x, y) for x, y in lines if len(y) == 2 and y[0] != y[1]]
    assert np.array(y) / np.array(x) == pytest.approx(20.0)     # GB/s
    assert x[1] == pytest.approx(10.0)                          # FLOP/byte where the two meet
    said = {text.get_text() for text in axes.texts}
    assert said == {"fastest float32 product: 200 GFLOP/s", "fastest float64 product: 100 GFLOP/s", "read from memory: 20.0 GB/s"}
