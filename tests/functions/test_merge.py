"""`merge`: attention over two sets of keys is attention over their union, whatever either side lacks or holds."""

import functools
import itertools
import re

import numpy as np
import pytest
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    NAMED,
    RESULTS,
    all_dtypes,
    assert_dtypes,
    assert_same,
    computed,
    draw,
    dtypes,
    eps,
    error_bounds,
    in_float64,
    layouts,
    padded,
    same_bits,
)

import fastmha
from fastmha import reference, validate
from fastmha.algorithms import backward

B, H, HKV, LQ, LK = 2, 4, 2, 7, 50


def attend(q, k, v, keys, layout="BHLD", mask=None, offset=None, key_padding_lengths=None, **keywords):
    """(out, lse) over a slice of the keys, under the rules of the whole."""
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., keys]
    if offset is not None:
        offset = offset - keys.start
    if key_padding_lengths is not None:
        key_padding_lengths = np.clip(key_padding_lengths - keys.start, 0, keys.stop - keys.start)
    k, v = ((x[:, :, keys] if layout == "BHLD" else x[:, keys]) for x in (k, v))
    return fastmha.attention(q, k, v, layout=layout, mask=mask, offset=offset, key_padding_lengths=key_padding_lengths,
                             return_lse=True, **keywords)  # fmt: skip


def merged(q, k, v, cuts, algorithm):
    """out and lse over the parts of the keys between these cuts."""
    parts = [fastmha.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, algorithm=algorithm)
             for a, b in itertools.pairwise(cuts)]
    return functools.reduce(lambda one, other: fastmha.merge(*one, *other), parts)


def check(arrays, cuts, layout="BHLD", **keywords):
    """The parts between the cuts, merged from the left, against the oracle over all keys."""
    q, k, v, _ = arrays
    sides = [attend(q, k, v, slice(*ends), layout, **keywords) for ends in itertools.pairwise(cuts)]
    merged = sides[0]
    for side in sides[1:]:
        before = [x.copy() for x in (*merged, *side)]
        result = fastmha.merge(*merged, *side, layout=layout)
        for x, kept in zip((*merged, *side), before, strict=True):
            assert same_bits(x, kept)
        merged = result
    wide, keywords = in_float64(arrays, {**keywords, "layout": layout})
    expected = reference.attention(*wide[:3], return_lse=True, **keywords)
    assert_dtypes(merged, RESULTS[:2], q, k, keywords)
    for got, wanted, bound in zip(merged, expected, error_bounds(*wide, q.dtype, **keywords)[:2], strict=True):
        assert got.shape == wanted.shape
        finite = np.isfinite(wanted)
        assert np.array_equal(got[~finite], wanted[~finite])
        assert np.abs(got[finite] - wanted[finite]).max(initial=0) <= bound * len(sides)
    return merged


def sides(rng, dtype=np.float64, layout="BHLD", shape=(2, 3, 4, 5)):
    """out1, lse1, out2, lse2 of any size."""
    b, h, length, width = shape
    out_shape = shape if layout == "BHLD" else (b, length, h, width)
    arrays = [rng.standard_normal(s).astype(dtype) for s in (out_shape, shape[:3], out_shape, shape[:3])]
    return [x.astype(computed(dtype)) if x.ndim == 3 else x for x in arrays]


# ------------------------------------------------------------------------------------------------- against the whole

MASKS = {
    "none": lambda rng, dtype: None,
    "bool": lambda rng, dtype: rng.random((B, H, LQ, LK)) < 0.5,
    "bool of two axes, most removed": lambda rng, dtype: rng.random((LQ, LK)) < 0.97,
    "additive": lambda rng, dtype: rng.standard_normal((B, 1, LQ, LK)).astype(dtype) * 5,
    "everything removed": lambda rng, dtype: np.ones((LQ, 1), bool),
}
RULES = {
    "plain": {},
    "causal": {"is_causal": True, "offset": np.array([-3, 30])},
    "window": {"window": (5, 2), "offset": np.array([10, 40])},
    "padding": {"key_padding_lengths": np.array([20, 0])},
    "softcap and scale": {"softcap": 2.0, "scale": 3.0},
}


@all_dtypes
@layouts
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("cuts", [(0, 20, 50), (0, 0, 50), (0, 50, 50), (0, 1, 17, 17, 49, 50)])
def test_merged_parts_are_attention_over_all_keys(dtype, layout, rules, cuts, rng):
    check(draw(rng, B, H, HKV, LQ, LK, 5, 6, dtype, layout), cuts, layout, **RULES[rules])


@pytest.mark.filterwarnings("ignore::fastmha.ConventionWarning")  # parts of which nothing is left
@all_dtypes
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("cuts", [(0, 20, 50), (0, 5, 10, 45, 50)])
def test_merged_parts_under_a_mask(dtype, kind, cuts, rng):
    check(draw(rng, B, H, HKV, LQ, LK, 5, 6, dtype), cuts, mask=MASKS[kind](rng, dtype))


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=6),
    dtype=st.sampled_from([np.float32, np.float64]),
    layout=st.sampled_from(["BHLD", "BLHD"]),
    offset=st.none() | st.integers(-8, 45),
    seed=st.integers(0, 5),
)
def test_any_splits(cuts, dtype, layout, offset, seed):
    rules = {} if offset is None else {"is_causal": True, "offset": offset}
    check(draw(np.random.default_rng(seed), 2, 2, 1, 6, 40, 4, 3, dtype, layout), [0, *sorted(cuts), 40], layout, **rules)


@support.ill_scaled
@dtypes
@pytest.mark.parametrize("algorithm", NAMED)
def test_gradients_over_parts_of_the_keys_add_up_to_those_over_all(isa, dtype, algorithm, kind, rng):
    """With the lse and the output over all keys, also where one part has next to nothing of the weights; each sum rounds."""
    arrays = q, k, v, g = [x.astype(dtype) for x in support.draw_ill_scaled(kind, rng, 2, 4, 2, 40, 210)]
    cuts = (0, 50, 51, 190, 210)
    out, lse = merged(*arrays[:3], cuts, algorithm)
    sums = [np.zeros_like(x) for x in (q, k, v)]
    for start, stop in itertools.pairwise(cuts):
        part = slice(start, stop)
        problem = validate.attention_problem(q, k[:, :, part], v[:, :, part], "BHLD").of_part()
        grads = [np.empty(x.shape, dtype) for x in (problem.q, problem.k, problem.v)]
        backward(algorithm, problem, out, lse, g, *grads, 1)
        for to, grad in zip((sums[0], sums[1][:, :, part], sums[2][:, :, part]), grads, strict=True):
            to += grad
    exact, bounds = support.oracle(*arrays, dtype)
    support.assert_close((out, lse, *sums), exact, [len(cuts) * bound for bound in bounds])


@dtypes
@pytest.mark.parametrize("constant", [-2e3, -1e4])
def test_gradients_over_a_part_that_is_padding_alone_are_those_of_all_keys(isa, dtype, constant, rng):
    """Rows of which the constant is at every key attend them as if it were not there; the others nothing of that part."""
    arrays = q, k, v, g = draw(rng, 2, 4, 2, 40, 210, 8, 6, dtype)
    mask = np.zeros((2, 1, 40, 210), dtype)
    mask[:, :, :, :100] = mask[:, :, :13] = constant
    out, lse = fastmha.attention(q, k, v, mask=mask, algorithm="tiled", return_lse=True)
    sums = [np.zeros_like(x) for x in (q, k, v)]
    for part in (slice(0, 100), slice(100, 210)):
        rules = validate.Rules(mask=mask[..., part])
        problem = validate.attention_problem(q, k[:, :, part], v[:, :, part], "BHLD", rules).of_part()
        grads = [np.empty(x.shape, dtype) for x in (problem.q, problem.k, problem.v)]
        backward("tiled", problem, out, lse, g, *grads, 1)
        for to, grad in zip((sums[0], sums[1][:, :, part], sums[2][:, :, part]), grads, strict=True):
            to += grad
    exact, bounds = support.oracle(*arrays, dtype, mask=mask)
    rounding = np.abs(constant) * eps(dtype)        # of lse, which is what these weights come from
    support.assert_close(sums, exact[2:], [2 * bound + rounding * 4 for bound in bounds[2:]], ("grad_q", "grad_k", "grad_v"))


@all_dtypes
def test_the_order_of_merging_matters_in_rounding_alone(dtype, rng):
    a, b, c = [tuple(sides(rng, dtype)[:2]) for _ in range(3)]
    left = fastmha.merge(*fastmha.merge(*a, *b), *c)
    right = fastmha.merge(*a, *fastmha.merge(*b, *c))
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=30 * eps(dtype))
    assert_same(fastmha.merge(*a, *b), fastmha.merge(*b, *a))


# ---------------------------------------------------------------------------------------------------------- empty sides


@all_dtypes
@layouts
def test_an_empty_side_leaves_the_bits_of_the_other(dtype, layout, rng):
    out1, lse1, out2, lse2 = sides(rng, dtype, layout)
    out1[0, 0, 0], lse1[0, 0, 0] = -0.0, -0.0
    lse1[0, 1, 1], out1[1, 0, 0, 0] = np.nan, np.inf
    for nothing in (out2, np.full_like(out2, np.nan), np.full_like(out2, np.inf)):
        empty = np.full_like(lse2, -np.inf)
        for merged in (
            fastmha.merge(out1, lse1, nothing, empty, layout=layout),
            fastmha.merge(nothing, empty, out1, lse1, layout=layout),
        ):
            assert same_bits(merged[0], out1)
            assert same_bits(merged[1], lse1)


@all_dtypes
@layouts
def test_two_empty_sides_are_an_empty_row(dtype, layout, rng):
    out1, lse1, out2, lse2 = sides(rng, dtype, layout)
    for value in (np.nan, -3.0):
        lse1[...], lse2[...] = -np.inf, -np.inf
        out, lse = fastmha.merge(np.full_like(out1, value), lse1, out2, lse2, layout=layout)
        assert same_bits(out, np.zeros_like(out))
        assert np.isneginf(lse).all()


def test_rows_that_are_empty_on_one_side_change_no_other_row(rng):
    out1, lse1, out2, lse2 = sides(rng)
    wanted = fastmha.merge(out1, lse1, out2, lse2)
    lse1[:, :, 1], lse2[:, :, 2] = -np.inf, -np.inf
    out1[:, :, 1], out2[:, :, 2] = np.nan, np.inf
    got = fastmha.merge(out1, lse1, out2, lse2)
    for x, y, one, two in zip(got, wanted, (out1, lse1), (out2, lse2), strict=True):
        for row, source in enumerate((y, two, one, y)):
            assert same_bits(x[:, :, row], source[:, :, row])


@all_dtypes
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("distance", [0, 5, -5, 1e4, -1e4])
def test_what_is_not_finite_reaches_the_rows_in_which_it_has_weight_alone(dtype, value, distance, rng):
    """As in attention over all keys, a weight that underflows is one: 0 * NaN is NaN."""
    out1, lse1, out2, lse2 = sides(rng, dtype)
    lse2 += lse2.dtype.type(distance)
    wanted, _ = fastmha.merge(out1, lse1, out2, lse2)
    out2[0, 1, 2, 3] = value
    got, _ = fastmha.merge(out1, lse1, out2, lse2)
    assert not np.isfinite(got[0, 1, 2, 3])
    if distance > -100:
        assert np.array_equal(got[0, 1, 2, 3], value, equal_nan=True)
    got[0, 1, 2, 3] = wanted[0, 1, 2, 3]
    assert same_bits(got, wanted)


def test_a_lse_that_is_nan_makes_its_row_nan(rng):
    out1, lse1, out2, lse2 = sides(rng)
    lse1[0, 0, 0] = np.nan
    out, lse = fastmha.merge(out1, lse1, out2, lse2)
    assert np.isnan(lse).sum() == 1
    assert np.isnan(out[0, 0, 0]).all()
    assert np.isfinite(out).sum() == out.size - out.shape[-1]


@all_dtypes
def test_far_apart_and_large_lses_neither_overflow_nor_lose_the_larger(dtype, rng):
    out1, lse1, out2, lse2 = sides(rng, dtype)
    largest = np.finfo(lse1.dtype).max
    for a, b in ((1e4, -1e4), (largest, -largest), (1e30, 0), (largest, 1)):
        lse1[...], lse2[...] = a, b
        out, lse = fastmha.merge(out1, lse1, out2, lse2)
        assert np.array_equal(out, out1)
        assert same_bits(lse, lse1)
    for level in (3e4, -3e4, largest, -largest):
        lse1[...], lse2[...] = level, level
        out, lse = fastmha.merge(out1, lse1, out2, lse2)
        np.testing.assert_allclose(out, (out1 + out2) / 2, rtol=0, atol=4 * eps(dtype))
        np.testing.assert_allclose(lse, lse1 + lse1.dtype.type(np.log(2)), rtol=np.finfo(lse.dtype).eps)


# --------------------------------------------------------------------------------------------------------------- memory


@layouts
def test_strange_memory_and_inputs_untouched(layout, rng):
    arrays = sides(rng, layout=layout)
    wanted = fastmha.merge(*arrays, layout=layout)
    strange = [padded(x) for x in arrays]
    strange[0] = np.asfortranarray(strange[0])
    strange[1] = np.repeat(arrays[1], 2, axis=2)[:, :, ::2]
    strange[2] = arrays[2][..., ::-1].copy()[..., ::-1]
    before = [x.copy() for x in strange]
    for x in strange:
        x.flags.writeable = False
    assert_same(fastmha.merge(*strange, layout=layout), wanted)
    assert_same(strange, before)


@layouts
@pytest.mark.parametrize("axis", range(4))
def test_axes_of_length_zero(layout, axis, rng):
    arrays = sides(rng, layout=layout, shape=tuple(0 if i == axis else 2 for i in range(4)))
    out, lse = fastmha.merge(*arrays, layout=layout)
    assert (out.shape, lse.shape) == (arrays[0].shape, arrays[1].shape)


# --------------------------------------------------------------------------------------------------------------- errors


def zeros(*shape, dtype=np.float64):
    return np.zeros(shape, dtype)


ERRORS = {
    "layout": ({"layout": "BDLH"}, ValueError, r'layout must be "BHLD" or "BLHD", got \'BDLH\''),
    "out1 of three axes": ({"out1": zeros(2, 3, 4)}, ValueError, r'out1 must have 4 axes \(B, H, L, D\) for layout "BHLD"'),
    "out1 of integers": (
        {"out1": np.zeros((2, 3, 4, 5), int)}, TypeError, r"out1 must be float32, float64, float16 or bfloat16.*got int64"
    ),
    "out2 of another dtype": (
        {"out2": zeros(2, 3, 4, 5, dtype=np.float32)}, TypeError, r"out2 has dtype float32 but out1 has float64",
    ),
    "lse1 of another dtype": (
        {"lse1": zeros(2, 3, 4, dtype=np.float32)}, TypeError, r"lse1 has dtype float32 but out1 has float64",
    ),
    "out2 of another shape": (
        {"out2": zeros(2, 3, 4, 6)}, ValueError, r'out2 must have shape \(2, 3, 4, 5\) for layout "BHLD", got \(2, 3, 4, 6\)',
    ),
    "lse1 of another shape": ({"lse1": zeros(2, 4, 3)}, ValueError, r"lse1 must have shape \(2, 3, 4\).*got \(2, 4, 3\)"),
    "lse2 that would broadcast": ({"lse2": zeros(2, 3, 1)}, ValueError, r"lse2 must have shape \(2, 3, 4\).*got \(2, 3, 1\)"),
    "lse2 a number": ({"lse2": np.float64(0)}, ValueError, r"lse2 must have shape \(2, 3, 4\).*got \(\)"),
    "lse of the other layout": (
        {"layout": "BLHD"}, ValueError, r'lse1 must have shape \(2, 4, 3\) for layout "BLHD", got \(2, 3, 4\)',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, rng):
    changes, kind, message = ERRORS[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        fastmha.merge(**(dict(zip(("out1", "lse1", "out2", "lse2"), sides(rng), strict=True)) | changes))
    assert caught.type is kind
    assert re.search(message, str(caught.value)), caught.value
