"""`capture`: weights of chosen heads and rows beside an output that does not change by a bit, and their reductions.

The oracle is `fastmha.reference.attention_weights` in float64, indexed as NumPy would; a weight is at most 1, so that
bounds are absolute: those of `support.weights_bound`.
"""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    LAYOUTS,
    NAMED,
    all_dtypes,
    draw,
    dtypes,
    fails,
    in_float64,
    padded,
    same_bits,
    unaligned,
    weights_bound,
)

import fastmha
from fastmha import Capture, _core, capture, reference
from fastmha.algorithms import ALGORITHMS

B, H, HKV, LQ, LK = 3, 6, 2, 37, 45
SELECTIONS = {
    "all": (None, None),
    "ints": (3, -1),
    "lists with duplicates, out of order": ([4, -6, 4, 1], [36, 0, 0, 7, 8, 9, -3, 7]),
    "duplicates next to a row that is left out": ([0], [3, 3, 5]),
    "slices": (slice(1, 5), slice(10, -5)),
    "slices with steps": (slice(None, None, 2), slice(None, None, -3)),
    "arrays": (np.array([5, 0], np.uint8), np.array([30, 31, 2], np.int16)),
    "range and tuple": ((2, 3), range(20, 30)),
    "far apart": (None, [0, 17, 36]),
}
REDUCTIONS = (None, *capture.REDUCTIONS)


def expected(weights, heads, rows, reduce):
    """What a capture of these weights (B, H, Lq, Lk) shall be."""

    def index(chosen):
        return chosen if isinstance(chosen, slice) else slice(None) if chosen is None else np.atleast_1d(chosen).astype(int)

    part = weights[:, index(heads)][:, :, index(rows)]
    if reduce is None:
        return part
    if reduce == "sum_q":
        return part.sum(axis=2)
    if reduce == "max":
        return part.max(axis=3, initial=0)
    return -(part * np.log(np.where(part > 0, part, 1))).sum(axis=3)


def check(q, k, v, *, heads=None, rows=None, reduce=None, algorithm="auto", **keywords):
    """The capture against the oracle; out and lse against the call without it, bit by bit."""
    wanted_out, wanted_lse = fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True, **keywords)
    out, lse, got = fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True, capture=Capture(heads, rows, reduce),
                                      **keywords)
    assert same_bits(out, wanted_out)
    assert same_bits(lse, wanted_lse)
    wide, rules = in_float64([q, k], keywords)
    wanted = expected(reference.attention_weights(*wide, **rules), heads, rows, reduce)
    assert got.shape == wanted.shape
    assert got.dtype == q.dtype
    bound = weights_bound(*wide, q.dtype, **rules) * {None: 1, "max": 1}.get(reduce, 8 + np.log(k.size))
    if reduce == "sum_q":
        bound *= max(1.0, wanted.max(initial=0))
    error = np.abs(got - wanted).max(initial=0)
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"
    return got


def masks(dtype):
    rng = np.random.default_rng(1)
    gone = rng.random((B, H, LQ, LK)) < 0.4
    gone[1, 2, 1] = gone[:, :, 30] = True
    additive = np.where(gone, -np.inf, rng.standard_normal(gone.shape)).astype(dtype)
    return {
        "none": None,
        "bool of two axes": gone[0, 0],
        "bool of four axes": gone,
        "bool of keys": gone[:, :1, :1],
        "bool of rows": gone[:1, :, :, :1],
        "bool of one element": np.zeros((1, 1), bool),
        "bool with negative strides": gone[::-1, ::-1, ::-1, ::-1],
        "additive of two axes": additive[1, 2],
        "additive of four axes": padded(additive),
        "additive of keys, two axes": additive[0, 0, :1],
        "additive with zero strides": np.broadcast_to(additive[:, :1, :1], gone.shape),
        "additive with a step": np.repeat(additive, 2, axis=2)[:, :, ::2],
        "additive, unaligned": unaligned(additive),
        "additive, everything removed": np.full((LQ, LK), -np.inf, dtype),
    }


BANDS = {
    "none": {},
    "causal": {"is_causal": True, "offset": LK - LQ},
    "causal, an offset per batch row": {"is_causal": True, "offset": np.array([-5, 2, 30])},
    "window": {"window": (6, 3), "offset": 4},
    "window to the left": {"window": (2, None), "offset": np.array([0, 5, -9])},
    "window without limits": {"window": (None, None), "offset": 3},
    "offset at its limit": {"window": (None, 0), "offset": 2**59},
    "padding": {"key_padding_lengths": np.array([LK, 5, 0])},
    "padding on the left": {"key_ranges": (np.array([LK, 5, 0]), None)},
    "ranges, causal": {"key_ranges": (3, [LK, 20, 3]), "is_causal": True, "offset": 5},
    "padding, causal, window": {"key_padding_lengths": [3, 17, 40], "is_causal": True, "window": (9, None), "offset": 8},
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 rows and one or two heads, so that small cases need many of them."""
    monkeypatch.setattr(capture, "_BUFFER_BYTES", 32 * LK * 4)


# ---------------------------------------------------------------------------------------------------- against the oracle


@all_dtypes
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_every_selection_and_reduction(dtype, selection, reduce, small_blocks, rng):
    heads, rows = SELECTIONS[selection]
    arrays = draw(rng, B, H, HKV, LQ, LK, 5, 3, dtype)[:3]
    check(*arrays, heads=heads, rows=rows, reduce=reduce, is_causal=True, offset=np.array([-3, 8, 20]))


@all_dtypes
@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("kind", masks(np.float32))
@pytest.mark.parametrize("reduce", [None, "sum_q"])
def test_every_mask(dtype, algorithm, kind, reduce, small_blocks, rng):
    arrays = draw(rng, B, H, HKV, LQ, LK, 5, 3, dtype)[:3]
    check(*arrays, heads=[5, 0, 1], rows=slice(3, 35), reduce=reduce, algorithm=algorithm, mask=masks(dtype)[kind])


@all_dtypes
@pytest.mark.parametrize("algorithm", ["auto", *NAMED])
@pytest.mark.parametrize("band", BANDS)
def test_every_band_and_padding(dtype, algorithm, band, small_blocks, rng):
    arrays = draw(rng, B, H, HKV, LQ, LK, 5, 3, dtype)[:3]
    check(*arrays, rows=slice(2, None), algorithm=algorithm, **BANDS[band])


@all_dtypes
@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("rules", [{"softcap": 1.5}, {"scale": -0.8}, {"scale": 0.0}, {"scale": 2, "softcap": np.float32(20)}])
def test_scale_and_softcap_with_masks(dtype, algorithm, rules, rng):
    arrays = draw(rng, B, H, HKV, LQ, LK, 5, 3, dtype)[:3]
    mask = masks(dtype)["additive of four axes"]
    check(*arrays, rows=[4, 30], algorithm=algorithm, mask=mask, is_causal=True, offset=10, **rules)


@all_dtypes
@pytest.mark.parametrize("Hkv", [1, 2, 3, 6])
@pytest.mark.parametrize("heads", [None, [1, 2, 3], [5], slice(None, None, -1)])
def test_grouped_heads_read_their_own_keys(dtype, Hkv, heads, small_blocks, rng):
    check(*draw(rng, 2, 6, Hkv, 20, 30, 5, 3, dtype)[:3], heads=heads)


@dtypes
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_few_rows_by_every_algorithm(dtype, reduce, rng):
    """Where "decode", which has no weights, can be named, too."""
    q, k, v, _ = draw(rng, 2, 4, 2, 2, 600, 64, 5, dtype)
    assert fastmha.plan(q, k, v, algorithm="decode").algorithm == "decode"
    for algorithm in ALGORITHMS:
        check(q, k, v, heads=[3, 1], rows=-1, reduce=reduce, algorithm=algorithm, is_causal=True, offset=500)


@pytest.mark.parametrize("algorithm", NAMED)
def test_strange_memory(algorithm, rng):
    q, k, v, _ = draw(rng, 2, 4, 4, 20, 21, 6, 6)
    for x in (q[::-1, :, ::-1], np.repeat(q, 2, axis=3)[..., ::2], np.broadcast_to(q[:1, :1], q.shape)):
        check(x, k[:, ::-1], v, heads=[0, 1, 3], rows=slice(None, None, 2), algorithm=algorithm)
        check(q, np.broadcast_to(k[:, :, :1], k.shape), v, rows=[7, 3], algorithm=algorithm)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("empty", [{"B": 0}, {"H": 0, "Hkv": 0}, {"Lq": 0}, {"Lk": 0}, {"D": 0}, {"Dv": 0}])
@pytest.mark.parametrize("algorithm", NAMED)
def test_axes_of_length_zero(reduce, empty, algorithm, rng):
    q, k, v, _ = draw(rng, **{"B": 2, "H": 4, "Hkv": 2, "Lq": 5, "Lk": 6, "D": 3, "Dv": 3, **empty})
    _, got = fastmha.attention(q, k, v, algorithm=algorithm, capture=Capture(reduce=reduce))
    wanted = expected(reference.attention_weights(q, k), None, None, reduce)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-14)
    for nothing in ([], slice(0, 0), np.array([], int)):
        _, got = fastmha.attention(q, k, v, capture=Capture(nothing, nothing, reduce))
        assert got.shape == expected(reference.attention_weights(q, k), [], [], reduce).shape
        assert got.size == 0
    _, got = fastmha.attention(q, k, v, capture=Capture(None, [], reduce))
    assert same_bits(got, np.zeros_like(expected(reference.attention_weights(q, k), None, [], reduce)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_lists_of_heads_and_rows(data):
    rows = data.draw(st.lists(st.integers(-80, 79), max_size=40))
    heads = data.draw(st.lists(st.integers(-6, 5), max_size=8))
    reduce = data.draw(st.sampled_from(REDUCTIONS))
    arrays = draw(np.random.default_rng(0), 2, 6, data.draw(st.sampled_from([1, 3, 6])), 80, 33, 4, 4)[:3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "_BUFFER_BYTES", data.draw(st.sampled_from([1, 20 * 33 * 8, 10**6])))
        check(*arrays, heads=heads, rows=rows, reduce=reduce, is_causal=True, offset=3)


# ---------------------------------------------------------------------------------------------------------- what is returned


def test_the_captured_is_the_last_of_what_is_returned(rng):
    q, k, v, _ = draw(rng)
    chosen = Capture()
    assert isinstance(fastmha.attention(q, k, v), np.ndarray)
    assert [x.ndim for x in fastmha.attention(q, k, v, capture=chosen)] == [4, 4]
    assert [x.ndim for x in fastmha.attention(q, k, v, return_lse=True, capture=chosen)] == [4, 3, 4]
    out = np.empty_like(q)
    assert fastmha.attention(q, k, v, out=out, capture=chosen)[0] is out


@all_dtypes
def test_reductions_of_an_empty_row_are_zero(dtype, rng):
    q, k, v, _ = draw(rng, dtype=dtype)
    for reduce in REDUCTIONS:
        _, got = fastmha.attention(q, k, v, is_causal=True, offset=-10, capture=Capture(reduce=reduce))
        assert same_bits(got, np.zeros_like(got))


@dtypes
def test_entropy_lies_between_zero_and_the_logarithm_of_the_keys(dtype):
    q = np.zeros((1, 1, 6, 4), dtype)
    _, got = fastmha.attention(q, q, q, is_causal=True, capture=Capture(reduce="entropy"))
    np.testing.assert_allclose(got[0, 0], np.log(np.arange(1, 7)), rtol=4 * np.finfo(dtype).eps)
    assert same_bits(got[0, 0, :1], np.zeros(1, dtype))


@dtypes
def test_entropy_counts_weights_far_below_one(dtype):
    """Nine weights of 1e-10 beside one of almost 1: all of the entropy is in them."""
    q = np.zeros((1, 1, 1, 4), dtype)
    mask = np.log(np.array([[1] + [1e-10] * 9])).astype(dtype)
    k = np.zeros((1, 1, 10, 4), dtype)
    _, got = fastmha.attention(q, k, k, mask=mask, capture=Capture(reduce="entropy"))
    small = 1e-10 / (1 + 9e-10)
    exact = -9 * small * np.log(small) - np.log(1 - 9 * small) * (1 - 9 * small)
    assert abs(got.item() - exact) <= {np.float32: 9.1e-10, np.float64: 1e-15}[dtype]  # float32 rounds the largest to 1


@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_nan_of_a_key_reaches_the_rows_that_attend_it_and_no_others(algorithm, reduce, rng):
    q, k, v, _ = draw(rng, 1, 2, 1, 40, 40)
    call = {"is_causal": True, "algorithm": algorithm}
    _, clean = fastmha.attention(q, k, v, capture=Capture(rows=slice(0, 20), reduce=reduce), **call)
    k[:, :, 20:], v[...] = np.nan, np.nan
    _, dirty = fastmha.attention(q, k, v, capture=Capture(rows=slice(0, 20), reduce=reduce), **call)
    assert same_bits(clean, dirty)
    _, reached = fastmha.attention(q, k, v, capture=Capture(rows=slice(20, None), reduce=reduce), **call)
    assert np.isnan(reached).any(axis=-1).all()


def test_rows_between_chosen_ones_that_hold_nan_do_not_reach_the_sum(rng):
    q, k, v, _ = draw(rng, 1, 2, 1, 12, 9)
    wanted = fastmha.attention(q, k, v, capture=Capture(rows=[1, 3], reduce="sum_q"))[1]
    q[:, :, 2] = np.nan
    assert same_bits(fastmha.attention(q, k, v, capture=Capture(rows=[1, 3], reduce="sum_q"))[1], wanted)


@all_dtypes
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_bits_depend_neither_on_threads_nor_on_the_batch(dtype, reduce, small_blocks, rng):
    q, k, v, _ = draw(rng, 3, 6, 2, 150, LK, 8, 8, dtype)
    chosen = Capture(slice(1, None), slice(5, None), reduce)
    _, wanted = fastmha.attention(q, k, v, capture=chosen, num_threads=1)
    assert same_bits(fastmha.attention(q, k, v, capture=chosen, num_threads=3)[1], wanted)
    for b in range(3):
        part = slice(b, b + 1)
        assert same_bits(fastmha.attention(q[part], k[part], v[part], capture=chosen)[1], wanted[part])


def test_the_weights_are_those_of_blas_where_it_was_named(rng):
    q, k, v, _ = draw(rng, 1, 2, 2, 40, 300, 16, 16, np.float32)
    used = []
    with pytest.MonkeyPatch.context() as patch:
        forward = capture.algorithms.forward

        def spy(name, problem, out, lse, weights, threads):
            used.append((name, weights is not None))
            forward(name, problem, out, lse, weights, threads)

        patch.setattr(capture.algorithms, "forward", spy)
        for algorithm in ("blas", "tiled", "auto"):
            fastmha.attention(q, k, v, algorithm=algorithm, capture=Capture())
        fastmha.attention(q[:, :, :2], k, v, algorithm="decode", capture=Capture())
    assert [name for name, with_weights in used if with_weights] == ["blas", "tiled", "tiled", "tiled"]


# --------------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("reduce", capture.REDUCTIONS)
def test_a_reduction_never_holds_all_weights(reduce, rng):
    L = 4096
    q, k, v = (rng.standard_normal((1, 2, L, 4)).astype(np.float32) for _ in range(3))
    fastmha.attention(q[:, :, :20], k, v, capture=Capture(reduce=reduce))
    tracemalloc.start()
    try:
        fastmha.attention(q, k, v, is_causal=True, capture=Capture(reduce=reduce))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * L * L * 4 / 10


def test_weights_take_what_was_asked_for_and_a_buffer(rng):
    L = 4096
    q, k, v = (rng.standard_normal((1, 8, L, 4)).astype(np.float32) for _ in range(3))
    some, threads = Capture([2, 7], slice(-64, None)), 2
    rows, _, _, _ = _core.tile_sizes()
    block = L * (rows * 4 + 64)     # the weights of a block of rows, those of each key up to a cache line further apart
    scratch = fastmha.plan(q, k, v, num_threads=threads).scratch_bytes + threads * block
    tracemalloc.start()
    try:
        _, got = fastmha.attention(q, k, v, capture=some, num_threads=threads)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert got.nbytes == 2 * 64 * L * 4
    assert peak < got.nbytes + q.nbytes + capture._BUFFER_BYTES + scratch + 2**16


# --------------------------------------------------------------------------------------------------------------------- errors

AT_ONCE = {
    "heads a float": ({"heads": 1.5}, TypeError, "capture.heads must be None, an int, a slice or a sequence of ints, got 1.5"),
    "heads a string": ({"heads": "12"}, TypeError, "capture.heads must be None, an int, .* got '12'"),
    "heads bytes": ({"heads": b"12"}, TypeError, "capture.heads must be None, an int, .* got b'12'"),
    "heads a bool": ({"heads": True}, TypeError, "capture.heads must be None, an int, .* got True"),
    "heads a set": ({"heads": {1}}, TypeError, r"capture.heads must be None, an int, .* got \{1\}"),
    "rows with a float": ({"rows": [0, 1.0]}, TypeError, r"capture.rows\[1\] must be an integer, got 1.0"),
    "rows a boolean array": ({"rows": np.ones(5, bool)}, TypeError, r"capture.rows\[0\] must be an integer, got (np\.)?True"),
    "rows of two axes": ({"rows": np.ones((2, 3), int)}, ValueError, r"capture.rows must have one axis .* got shape \(2, 3\)"),
    "rows of no axes": ({"rows": np.array(3)}, ValueError, r"capture.rows must have one axis .* got shape \(\)"),
    "a slice from a float": ({"rows": slice(0.5, 2)}, TypeError, r"capture.rows.start must be an integer, got 0.5"),
    "a slice with a string": ({"heads": slice(0, "b")}, TypeError, r"capture.heads.stop must be an integer, got 'b'"),
    "a slice with step 0": ({"heads": slice(0, 2, 0)}, ValueError, r"capture.heads.step must not be 0"),
    "an unknown reduction": (
        {"reduce": "mean"}, ValueError, r'capture.reduce must be None, "sum_q", "max" or "entropy", got \'mean\'',
    ),
    "a reduction that is no string": ({"reduce": ["max"]}, ValueError, r"capture.reduce must be None, .* got \['max'\]"),
}  # fmt: skip
IN_A_CALL = {
    "a head behind the last": (Capture(heads=4), ValueError, r"capture.heads must lie in \[-4, 4\) as q has 4 heads, got 4$"),
    "a head before the first": (Capture(heads=[0, -5]), ValueError, r"capture.heads must lie in \[-4, 4\).* got -5 at index 1"),
    "a row behind the last": (Capture(rows=(0, 5)), ValueError, r"capture.rows must lie in \[-5, 5\) as q has 5 rows, got 5 at"),
    "a huge row": (Capture(rows=2**70), ValueError, r"capture.rows must lie in .* got 1180591620717411303424"),
    "no capture": ({"heads": 1}, TypeError, r"capture must be a fastmha.Capture or None, got dict"),
    "True": (True, TypeError, r"capture must be a fastmha.Capture or None, got bool"),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_errors_of_a_capture_by_itself(name):
    keywords, kind, message = AT_ONCE[name]
    fails(lambda: Capture(**keywords), kind, message)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", IN_A_CALL)
def test_errors_of_a_capture_that_does_not_fit_come_before_anything_is_written(name, layout, rng):
    chosen, kind, message = IN_A_CALL[name]
    q, k, v, _ = draw(rng, 2, 4, 2, 5, 6, 3, 3, np.float64, layout)
    out = np.full(q.shape, 7.0)
    for call in (lambda: fastmha.attention(q, k, v, layout=layout, out=out, capture=chosen),
                 lambda: fastmha.plan(q, k, v, layout=layout, capture=chosen)):
        fails(call, kind, message)
    assert (out == 7).all()


def test_a_capture_keeps_the_indices_it_was_given():
    rows = [1, 2]
    chosen = Capture(3, rows)
    rows[0] = 100
    assert chosen == Capture(3, (1, 2))
    assert hash(chosen) == hash(Capture(3, (1, 2)))
    assert repr(chosen) == "Capture(heads=3, rows=(1, 2), reduce=None)"
    with pytest.raises(AttributeError):
        chosen.rows = None


def test_plan_takes_a_capture_and_plans_the_output_alone(rng):
    q, k, v, _ = draw(rng, 1, 2, 2, 3, 400)
    assert fastmha.plan(q, k, v, capture=Capture(reduce="max")) == fastmha.plan(q, k, v)
