"""Pictures of weights and of memory: what a reader can tell apart, what is said of strides, what is refused."""

import re
import sys
from itertools import pairwise

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import fastmha
from fastmha import plot

pytest.importorskip("matplotlib", reason='needs matplotlib: pip install "fastmha[study]"')


def weights(H=2, Lq=5, Lk=5, **rules):
    generator = np.random.default_rng(H + Lq + Lk)
    q, k = (generator.standard_normal((1, H, L, 8), dtype=np.float32) for L in (Lq, Lk))
    return fastmha.attention(q, k, k, capture=fastmha.Capture(), **rules)[1]


def heads_of(figure):
    """The panels of heads; the last panel of a figure is the bar of colours."""
    return [axes for axes in figure.axes if axes.images]


def labels(axis):
    return [tick.get_text() for tick in axis.get_ticklabels()]


def legend(figure):
    return [text.get_text() for found in figure.legends for text in found.get_texts()]


def drawn(figure):
    """The pixels, and per panel of a head its box in them, from the top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].astype(int)


def cell(figure, pixels, axes, query, key):
    """The pixels within a cell."""
    x, y = axes.transData.transform([(key - 0.35, query + 0.35), (key + 0.35, query - 0.35)]).T
    height = pixels.shape[0]
    return pixels[int(height - y[1]):int(height - y[0]), int(x[0]):int(x[1])].reshape(-1, 3)


# ------------------------------------------------------------------------------------------------ the weights

def test_all_heads_have_one_scale_from_0_to_the_largest_weight_and_one_bar():
    given = weights(5)
    given[0, 2] *= 0.1
    figure = plot.attention(given)
    images = [axes.images[0] for axes in heads_of(figure)]
    assert len(images) == 5
    assert len({id(image.norm) for image in images}) == 1
    assert (images[0].norm.vmin, images[0].norm.vmax) == (0, pytest.approx(given.max()))
    assert len(figure.axes) == 5 + 1
    for image, head in zip(images, given[0], strict=True):
        np.testing.assert_array_equal(image.get_array(), head)


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (1, 1, 5, 5)])
def test_axes_that_are_not_there_are_not_missed(shape):
    figure = plot.attention(weights(1).reshape(shape))
    (axes,) = heads_of(figure)
    assert axes.get_title() == ("" if len(shape) == 2 else "head 0")


def test_tokens_are_labels_of_both_axes_or_of_each():
    same = list("abcde")
    (axes,) = heads_of(plot.attention(weights(1), same))
    assert labels(axes.xaxis) == labels(axes.yaxis) == same
    (axes,) = heads_of(plot.attention(weights(1, 2, 5), (np.array([7, 8]), same)))
    assert (labels(axes.yaxis), labels(axes.xaxis)) == (["7", "8"], same)
    (axes,) = heads_of(plot.attention(weights(1, 2, 5), (None, same)))
    assert (labels(axes.yaxis), labels(axes.xaxis)) == (["0", "1"], same)
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("query", "key")


def test_two_tokens_are_no_pair_of_sequences():
    (axes,) = heads_of(plot.attention(weights(1, 2, 2), ("ab", "cd")))
    assert labels(axes.xaxis) == ["ab", "cd"]


def test_tokens_that_would_not_be_seen_or_be_read_as_mathematics_are_shown_as_they_are():
    figure = plot.attention(weights(1), ["\n", " ", "$x_y$", "", "w" * 99])
    (axes,) = heads_of(figure)
    assert labels(axes.xaxis) == [r"'\n'", "' '", r"\$x_y\$", "''", "w" * 15 + "…"]
    drawn(figure)


@pytest.mark.parametrize("L", [40, 300, 2000])
def test_labels_of_long_sequences_are_dropped_until_they_do_not_touch(L):
    figure = plot.attention(np.full((L, L), 1 / L, np.float32), [f"token{i}" for i in range(L)])
    drawn(figure)
    (axes,) = heads_of(figure)
    renderer = figure.canvas.get_renderer()
    for axis, across in ((axes.xaxis, 0), (axes.yaxis, 1)):
        shown = axis.get_ticklabels()
        assert 5 < len(shown) < 60
        assert [f"token{round(tick.get_position()[across])}" for tick in shown] == labels(axis)
        ends = sorted((box.intervalx if across == 0 else box.intervaly).tolist()
                      for box in (tick.get_window_extent(renderer) for tick in shown))
        assert all(a[1] <= b[0] for a, b in pairwise(ends))


def test_heads_are_selected_by_ints_and_named_by_strs():
    given = weights(4)
    shown = heads_of(plot.attention(given, heads=[2, -1, 2]))
    assert [axes.get_title() for axes in shown] == ["head 2", "head 3", "head 2"]
    for axes, h in zip(shown, (2, 3, 2), strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), given[0, h])
    shown = heads_of(plot.attention(given, heads=["a", "b", "$c$", "d"]))
    assert [axes.get_title() for axes in shown] == ["a", "b", r"\$c\$", "d"]


def test_many_heads_wrap_into_rows_and_the_lowest_of_a_column_has_labels():
    figure = plot.attention(weights(11, 30, 30))
    shown = heads_of(figure)
    rows = {round(axes.get_subplotspec().get_position(figure).y0, 6) for axes in shown}
    assert len(shown) == 11
    assert 1 < len(rows) < 11
    columns = -(-11 // len(rows))
    for at, axes in enumerate(shown):
        assert any(labels(axes.xaxis)) == (at + columns >= 11)
        assert any(labels(axes.yaxis)) == (at % columns == 0)


def test_what_causality_removes_is_told_from_a_small_weight():
    given = weights(2, is_causal=True)
    given[0, :, 4, 0] = 1e-6        # small, and nowhere 0
    figure = plot.attention(given)
    pixels = drawn(figure)
    for axes in heads_of(figure):
        removed, small, zero = (cell(figure, pixels, axes, *at) for at in ((0, 4), (4, 0), (1, 3)))
        assert np.abs(removed.mean(axis=0) - small.mean(axis=0)).max() > 30
        assert np.ptp(removed, axis=0).max() > 20           # hatched,
        assert np.ptp(removed, axis=1).max() <= 2           # and neutral
        assert np.ptp(zero, axis=0).max() > 20
        assert np.ptp(small, axis=0).max() == 0
        assert axes.images[0].get_array().mask.tolist() == np.triu(np.ones((5, 5), bool), 1).tolist()
    assert legend(figure) == ["exactly 0 in all heads: removed"]


def test_what_is_0_in_one_head_alone_is_a_weight():
    given = weights(2)
    given[0, 0, 1, 3] = 0
    figure = plot.attention(given)
    assert not any(np.ma.getmaskarray(axes.images[0].get_array()).any() for axes in heads_of(figure))
    assert legend(figure) == []
    given[0, 1, 1, 3] = 0
    figure = plot.attention(given, heads=[0])       # of all heads, not of those that are drawn
    assert np.argwhere(heads_of(figure)[0].images[0].get_array().mask).tolist() == [[1, 3]]


def test_a_nan_is_red_and_does_not_move_the_scale():
    given = weights(2)
    top = given.max()
    given[0, 1, 2, 3], given[0, 1, 0, 0] = np.nan, np.inf
    figure = plot.attention(given)
    first, second = heads_of(figure)
    assert first.images[0].norm.vmax <= top
    red = cell(figure, drawn(figure), second, 2, 3).mean(axis=0)
    assert red[0] > 150 > 100 > red[1]
    assert legend(figure) == ["NaN or infinite"]


def test_weights_that_are_all_0_are_drawn_without_an_error():
    drawn(plot.attention(np.zeros((3, 3))))


REFUSED = {
    "one axis": ((np.ones(3),), {}, ValueError, "weights must have 2 to 4 axes, .* got shape (3,)"),
    "several batch rows": ((np.ones((2, 1, 3, 3)),), {}, ValueError,
                           "weights must be those of one batch row, such as weights[0], got shape (2, 1, 3, 3)"),
    "no keys": ((np.ones((3, 0)),), {}, ValueError, "weights must have heads, queries and keys, got shape (3, 0)"),
    "complex": ((np.ones((3, 3), complex),), {}, TypeError, "weights must hold real numbers, got dtype complex128"),
    "scores": ((np.array([[0.5, -2.0]]),), {}, ValueError,
               "weights must not be negative, got -2 for head 0, query 0, key 1: are these scores before the softmax?"),
    "a str": ((np.ones((3, 3)), "abc"), {}, TypeError, "tokens must be a sequence of strs or a pair .* such, got 'abc'"),
    "too few tokens": ((np.ones((3, 3)), ["a"]), {}, ValueError, "tokens has 1 tokens but weights has 3 queries"),
    "tokens for two lengths": ((np.ones((2, 3)), ["a", "b"]), {}, ValueError,
                               "tokens has 2 tokens but weights has 2 queries and 3 keys: pass a pair (queries, keys)"),
    "a pair": ((np.ones((2, 3)), (["a", "b"], ["c"])), {}, ValueError, "tokens[1] has 1 tokens but weights has 3 keys"),
    "a token": ((np.ones((2, 2)), ["a", None]), {}, TypeError, "tokens[1] must be a str, got None"),
    "a token of a pair": ((np.ones((1, 1)), (["a"], [0.5])), {}, TypeError, "tokens[1][0] must be a str, got 0.5"),
    "a table of tokens": ((np.ones((2, 2)), np.array([["a"]])), {}, ValueError,
                          "tokens must have one axis where it is an array, got shape (1, 1)"),
    "an int": ((np.ones((3, 3)),), {"heads": 0}, TypeError, "heads must be a sequence of ints, .* got 0"),
    "no heads": ((np.ones((3, 3)),), {"heads": []}, ValueError, "heads must name or select one head at least, got none"),
    "a head out of range": ((np.ones((2, 3, 3)),), {"heads": [0, 2]}, ValueError,
                            "heads must lie in [-2, 2) as weights has 2 heads, got 2 at index 1"),
    "a head that is none": ((np.ones((2, 3, 3)),), {"heads": [0, 0.5]}, TypeError, "heads[1] must be an integer, got 0.5"),
    "two kinds": ((np.ones((2, 3, 3)),), {"heads": ["a", 1]}, TypeError, "heads must be all ints or all strs, got 1 at index 1"),
    "too few names": ((np.ones((2, 3, 3)),), {"heads": ["a"]}, ValueError, "heads has 1 names but weights has 2 heads"),
    "too many heads": ((np.ones((401, 1, 1)),), {}, ValueError,
                       "weights has 401 heads to draw, and a picture at most 400: select some by heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_drawn_are_named_before_anything_is_drawn(name, monkeypatch):
    args, more, kind, message = REFUSED[name]
    monkeypatch.setattr(plot, "_figure", lambda *a: pytest.fail("a figure was made"))
    with pytest.raises(kind, match=f"^{re.escape(message).replace(re.escape('.*'), '.*')}$"):
        plot.attention(*args, **more)


# ------------------------------------------------------------------------------------------------ the memory

def aligned(shape, dtype=np.float32):
    """An array that begins a page."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.zeros(size + plot.PAGE, np.uint8)
    start = -room.ctypes.data % plot.PAGE
    return room[start:start + size].view(dtype).reshape(shape)


def said(figure):
    """What stands beside the bars, by axis."""
    bars = figure.axes[0]
    texts = [text.get_text() for text in bars.texts if "=" in text.get_text()]
    return {label[0]: text for label, text in zip(labels(bars.yaxis), texts, strict=True)}


def test_strides_are_said_in_bytes_and_elements_for_a_view_and_its_transpose():
    fused = aligned((2, 100, 3 * 16 * 64))
    q = fused[..., :16 * 64].reshape(2, 100, 16, 64)
    expected = {"B": "1,228,800 bytes = 307,200 elements: 300 pages on, at the same place of its page",
                "L": "12,288 bytes = 3,072 elements: 3 pages on, at the same place of its page",
                "H": "256 bytes = 64 elements: 4 cache lines on", "D": "4 bytes = 1 element: the element just after"}
    assert said(plot.layout(q)) == expected
    turned = said(plot.layout(q.transpose(0, 2, 1, 3), "BHLD"))
    assert turned == expected
    assert list(turned) == list("BHLD")
    assert said(plot.layout(q.transpose(0, 3, 1, 2), "BDLH")) == expected


@pytest.mark.parametrize(("array", "name", "expected"), [
    (np.broadcast_to(np.zeros((3, 1, 8)), (3, 4, 8)), "H", "0 bytes = 0 elements: the same memory, broadcast"),
    (np.zeros((4, 8))[::-1], "L", "−64 bytes = −8 elements: 1 cache line back"),
    (np.zeros((4, 8))[:, ::-1], "D", "−8 bytes = −1 elements: the element just before"),
    (np.zeros((4, 8))[:, ::2], "D", "16 bytes = 2 elements: 16 bytes on, within a cache line"),
    (np.zeros((1, 8)), "L", "64 bytes = 8 elements: there is one index only"),
    (np.zeros((4, 8), [("a", "f4"), ("b", "i2")])["a"], "D", "6 bytes = 1.50 elements: 6 bytes on, within a cache line"),
], ids=["broadcast", "reversed", "mirrored", "every second", "one", "a field"])
def test_strides_of_any_view_are_said(array, name, expected):
    figure = plot.layout(array)
    assert said(figure)[name] == expected
    drawn(figure)


def test_strides_are_drawn_as_long_as_they_are():
    array = aligned((4, 8, 16))[:, ::-1]
    (bars, _) = plot.layout(array).axes
    assert [patch.get_x() + patch.get_width() for patch in bars.patches] == pytest.approx([512, 64, 4])
    assert [bool(patch.get_hatch()) for patch in bars.patches] == [False, True, False]
    assert len(plot.layout(np.broadcast_to(array, (2, 4, 8, 16))).axes[0].patches) == 3


def map_of(figure):
    """By colour, the (page, first byte, bytes) of the pieces of the map."""
    memory = figure.axes[1]
    pages = labels(memory.yaxis)
    found = {}
    for patch in memory.patches:
        colour = tuple(np.round(patch.get_facecolor(), 4))
        place = pages[int(np.floor(patch.get_y() + 0.5))], patch.get_x(), patch.get_width()
        found.setdefault(colour, []).append(place)
    background = next(colour for colour, places in found.items() if any(width == plot.PAGE for _, _, width in places))
    found.pop(background)
    return list(found.values())


def test_tokens_of_a_fused_row_lie_on_pages_of_their_own_and_packed_ones_on_one():
    fused = aligned((1, 100, 3 * 16 * 64))
    q = fused[..., :16 * 64].reshape(1, 100, 16, 64)
    figure = plot.layout(q)
    assert map_of(figure) == [[(f"page {3 * t:+}" if t else "page 0", 256 * h, 256) for t in range(6)] for h in range(4)]
    assert figure.axes[1].get_title() == ("First 6 tokens of the first 4 heads: 96 cache lines on 6 pages; head 0 alone: "
                                          "24 cache lines on 6 pages")
    packed = aligned((1, 16, 128, 64))
    figure = plot.layout(packed, "BHLD")
    assert map_of(figure) == [[(f"page {8 * h:+}" if h else "page 0", 256 * t, 256) for t in range(6)] for h in range(4)]
    assert "24 cache lines on 1 page" in figure.axes[1].get_title()
    assert legend(figure) == [f"head {h}" for h in range(4)]


def test_a_row_that_crosses_a_page_is_cut_there():
    array = aligned((2, 3, 512))[:, :, 256:]        # rows of 1024 bytes from byte 1024, 2048 bytes apart
    (first, *_) = map_of(plot.layout(array.reshape(6, 256)))
    assert first == [(f"page {t // 2:+}" if t > 1 else "page 0", 1024 + 2048 * (t % 2), 1024) for t in range(6)]
    (pieces,) = map_of(plot.layout(aligned((2, 1536))))
    assert pieces == [("page 0", 0, 4096), ("page +1", 0, 2048), ("page +1", 2048, 2048), ("page +2", 0, 4096)]


def test_reversed_tokens_go_back_in_memory():
    (pieces,) = map_of(plot.layout(aligned((8, 1024))[::-1]))
    assert pieces == [*((f"page −{t}", 0, 4096) for t in range(5, 0, -1)), ("page 0", 0, 4096)]


def test_heads_that_share_memory_lie_one_above_the_other():
    array = np.broadcast_to(aligned((1, 3, 1, 64)), (1, 3, 4, 64))
    figure = plot.layout(array)
    own = [patch for patch in figure.axes[1].patches if patch.get_width() < plot.PAGE]
    assert len(own) == 3 * 4
    first = [patch for patch in own if patch.get_x() == 0]
    spans = sorted((patch.get_y(), patch.get_y() + patch.get_height()) for patch in first)
    assert len(spans) == 4
    assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))
    assert "12 cache lines on 1 page; head 0 alone: 12 cache lines on 1 page" in figure.axes[1].get_title()


def test_elements_far_from_each_other_are_counted_in_full_and_drawn_in_part():
    figure = plot.layout(aligned((64, 2048), np.float64).T)
    assert len(labels(figure.axes[1].yaxis)) == plot.MOST_PAGES
    assert figure.axes[1].get_title() == "First 6 tokens: 64 cache lines on 64 pages; the 12 pages touched first are shown"


def test_memory_behind_an_array_is_not_read():
    """It need not even be there: a view of one element with the strides of a terabyte."""
    wild = as_strided(np.zeros(1, np.float32), (1, 10**6, 16, 64), (0, 10**9, -(10**8), 4), writeable=False)
    figure = plot.layout(wild)
    assert said(figure)["H"].startswith("−100,000,000 bytes = −25,000,000 elements")
    drawn(figure)


@pytest.mark.parametrize(("array", "axes", "kind", "message"), [
    ([[1.0]], None, TypeError, "array must be a np.ndarray, whose memory is drawn as it lies, got list"),
    (np.zeros(3), None, ValueError, "array must have 2 to 4 axes, got shape (3,)"),
    (np.zeros((1, 1, 1, 1, 1)), None, ValueError, "array must have 2 to 4 axes, got shape (1, 1, 1, 1, 1)"),
    (np.zeros((3, 0)), None, ValueError, "array must have elements that take memory, got shape (3, 0)"),
    (np.zeros((3, 3), "V0"), None, ValueError, "array must have elements that take memory, got dtype |V0"),
    (np.zeros((3, 3)), 3, TypeError, "axes must be a str such as 'LD', got 3"),
    *((np.zeros((3, 3, 3)), axes, ValueError, "axes must name the 3 axes of array by different letters of B, L, H and D, with L "
       f"and D among them, got '{axes}'") for axes in ("LD", "LLD", "BHL", "LXD", "BLHD")),
])
def test_arrays_that_cannot_be_drawn_are_named_before_anything_is_drawn(array, axes, kind, message, monkeypatch):
    monkeypatch.setattr(plot, "_figure", lambda *a: pytest.fail("a figure was made"))
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        plot.layout(array, axes)


# ------------------------------------------------------------------------------------------------ both

MADE = {"attention": lambda: plot.attention(weights(3, is_causal=True), list("abcde")),
        "layout": lambda: plot.layout(np.zeros((1, 20, 4, 64), np.float32))}


@pytest.mark.parametrize("name", MADE)
def test_a_figure_is_the_callers_own_and_nothing_is_written(name, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)     # importing it would fail
    figure = MADE[name]()
    assert type(figure) is Figure
    assert list(tmp_path.iterdir()) == []
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", MADE)
def test_texts_lie_within_the_figure(name):
    figure = MADE[name]()
    height, width, _ = drawn(figure).shape
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        ticks = *axes.get_xticklabels(), *axes.get_yticklabels()
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *ticks, *axes.texts):
            if text.get_text():
                box = text.get_window_extent(renderer)
                assert box.x0 >= -1, text
                assert box.y0 >= -1, text
                assert box.x1 <= width + 1, text
                assert box.y1 <= height + 1, text


@pytest.mark.parametrize("name", MADE)
def test_without_matplotlib_the_extra_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'^fastmha\.plot needs matplotlib: pip install "fastmha\[study\]"$'):
        MADE[name]()
