"""Masks of the keys alone, boolean, -inf or a large finite constant, as padding has them: keys that get weight 0 are left out
where nothing shows it.

Blocks hold 64 rows and tiles 192 keys, whose first and last ones may be left out; runs 768 keys.
"""

import itertools

import numpy as np
import pytest
from support import (
    DTYPES,
    HALVES,
    NAMED,
    algorithms,
    all_dtypes,
    assert_same,
    check,
    draw,
    dtypes,
    halves,
    in_float64,
    run,
    same_bits,
)

import fastmha
from fastmha import reference

KEYS = {  # which keys are padding
    "left": lambda B, L: np.arange(L) < np.linspace(1, L - 1, B).astype(int)[:, None],
    "right": lambda B, L: np.arange(L) >= np.linspace(1, L - 1, B).astype(int)[:, None],
    "both": lambda B, L: (np.arange(L) < np.arange(B)[:, None] * 40 + 3) | (np.arange(L) >= L - 60 * np.arange(B)[:, None] - 7),
    "holes": lambda B, L: np.arange(L) // (61 + 30 * np.arange(B)[:, None]) % 2 == 0,
}
kinds = pytest.mark.parametrize("kind", KEYS)


def padding(kind, B, L):
    return KEYS[kind](B, L)[:, None, None, :]


def constants(dtype):
    """What callers add to the scores of padding; the last one drowns nothing by itself."""
    least = -65504.0 if dtype == np.float16 else float(np.finfo(DTYPES[0] if dtype in HALVES else dtype).min)
    return [least, least / 2, -1e4, -1e3, -50.0] if dtype != np.float16 else [least, -1e4, -1e3, -50.0]


def reversed_in_memory(mask):
    """The same mask, its last axis with a negative stride."""
    return np.ascontiguousarray(mask[..., ::-1])[..., ::-1]


def constant_mask(removed, constant, dtype):
    return np.where(removed, constant, 0).astype(dtype)


@all_dtypes
@algorithms
@kinds
def test_masks_of_keys_follow_the_oracle_with_any_constant(isa, dtype, algorithm, kind, rng):
    arrays = draw(rng, 3, 4, 2, 37, 230, 8, 5, dtype)
    removed = padding(kind, 3, 230)
    check(*arrays, mask=removed, algorithm=algorithm)
    check(*arrays, mask=reversed_in_memory(removed), algorithm=algorithm)
    check(*arrays, mask=reversed_in_memory(constant_mask(removed, -np.inf, dtype)), algorithm=algorithm)
    for constant in [-np.inf, *constants(dtype)]:
        check(*arrays, mask=constant_mask(removed, constant, dtype), algorithm=algorithm)


@dtypes
@kinds
@pytest.mark.parametrize("threads", [1, 5])
def test_a_constant_that_drowns_keys_gives_the_bits_of_minus_infinity(isa, dtype, kind, threads, rng):
    """Each row here has a key that is not padding. 800 keys are two runs."""
    for Lq, Lk in ((70, 450), (130, 800)):
        arrays = draw(rng, 3, 2, 1, Lq, Lk, 8, 16, dtype)
        removed = padding(kind, 3, Lk)
        wanted = run(fastmha, *arrays, mask=constant_mask(removed, -np.inf, dtype), algorithm="tiled", threads=threads)
        for constant in constants(dtype)[:3]:
            of_keys, of_pairs = (constant_mask(x, constant, dtype) for x in (removed, np.repeat(removed, Lq, axis=2)))
            for mask in (of_keys, of_pairs, reversed_in_memory(of_keys), reversed_in_memory(of_pairs)):
                assert_same(run(fastmha, *arrays, mask=mask, algorithm="tiled", threads=threads), wanted)


@halves
@kinds
def test_constants_of_half_precision_drown_keys_in_masks_of_keys_and_of_pairs(isa, dtype, kind, rng):
    arrays = draw(rng, 3, 2, 1, 70, 450, 8, 16, dtype)
    removed = padding(kind, 3, 450)
    wanted = run(fastmha, *arrays, mask=constant_mask(removed, -np.inf, dtype), algorithm="tiled")
    of_keys = constant_mask(removed, constants(dtype)[0], dtype)
    of_pairs = np.repeat(of_keys, 70, axis=2)
    apart = np.repeat(of_pairs, 2, axis=3)[..., ::2]
    for mask in (of_keys, of_pairs, reversed_in_memory(of_keys), reversed_in_memory(of_pairs), apart):
        assert_same(run(fastmha, *arrays, mask=mask, algorithm="tiled"), wanted)


@dtypes
@kinds
def test_rows_of_padding_alone_attend_it_evenly(isa, dtype, kind, rng):
    """With causality the first rows of left padding see nothing else, some of a block with rows that do."""
    for Lq, sinks in ((230, None), (230, np.array([0.5, -2.0]))):
        arrays = draw(rng, 3, 2, 1, Lq, Lq, 8, 5, dtype)
        for constant in constants(dtype):
            mask = constant_mask(padding(kind, 3, Lq), constant, dtype)
            keywords = {} if sinks is None else {"sinks": sinks.astype(dtype)}
            check(*arrays, mask=mask, is_causal=True, algorithm="tiled", **keywords)


@dtypes
@pytest.mark.parametrize(("operand", "value"), [("q", np.nan), *itertools.product("kvg", (np.nan, np.inf, -np.inf))])
def test_what_is_not_finite_reaches_the_rows_that_may_attend_it(isa, dtype, operand, value, rng):
    """A constant removes nothing: 0 * NaN is NaN, of keys and values under it, and for gradients of such keys."""
    arrays = dict(zip("qkvg", draw(rng, 2, 2, 1, 40, 230, 8, 5, dtype), strict=True))
    for constant in constants(dtype)[:3]:
        mask = constant_mask(padding("both", 2, 230), constant, dtype)
        spoilt = {name: x.copy() for name, x in arrays.items()}
        spoilt[operand][1, 0, 33 if operand in "qg" else 225, 2] = value
        (q, k, v, g), wide = in_float64(spoilt.values(), {"mask": mask})
        with np.errstate(invalid="ignore"):
            wanted = run(reference, q, k, v, g, **wide)
        for x, y in zip(run(fastmha, *spoilt.values(), mask=mask, algorithm="tiled"), wanted, strict=True):
            assert np.array_equal(np.isfinite(x), np.isfinite(y))
            assert not np.isfinite(x).all() or operand in "vg"      # of these lse and some gradients are finite


@dtypes
@pytest.mark.parametrize("size", [3e2, 3e4, 1e9])
def test_scores_as_large_as_the_constant_count(isa, dtype, size, rng):
    """Keys under a constant that rise above all others by their scores."""
    for constant in (-2e3, -1e4):
        q, k, v, g = draw(rng, 2, 2, 1, 40, 230, 8, 5, dtype)
        q[..., 0] = np.sign(q[..., 0])
        k[1, 0, 200:, 0] = size * np.array([1, -1] * 15)
        check(q, k, v, g, mask=constant_mask(padding("both", 2, 230), constant, dtype), algorithm="tiled")


@dtypes
def test_keys_under_a_constant_count_beside_scores_that_are_as_low(isa, dtype):
    """Scores of -1650 beside one of 400 under -2000."""
    q, k = np.zeros((1, 1, 1, 8), dtype), np.zeros((1, 1, 60, 8), dtype)
    v, g = np.ones_like(k), np.ones_like(q)
    q[..., 0], k[:, :, :50, 0], k[:, :, 50, 0] = 40, -1650 / 40, 400 / 40
    v[:, :, 50:] = np.arange(10)[:, None]
    mask = np.where(np.arange(60) >= 50, -2e3, 0).astype(dtype)[None, None, None]
    for algorithm in NAMED:
        check(q, k, v, g, mask=mask, scale=1.0, algorithm=algorithm)


@dtypes
def test_values_near_the_largest_number_do_not_overflow_beside_a_constant(isa, dtype, rng):
    q, k, v, g = draw(rng, 2, 2, 1, 40, 230, 8, 5, dtype)
    v[:, :, 200:] = np.finfo(dtype).max * 0.9
    mask = constant_mask(padding("both", 2, 230), constants(dtype)[0], dtype)
    check(q, k, v, g * np.finfo(dtype).tiny, mask=mask, algorithm="tiled")


@dtypes
@algorithms
def test_a_batch_row_has_the_same_bits_whatever_masks_the_others_have(isa, dtype, algorithm, rng):
    """Of one range, which a mask of keys becomes, beside one with holes, for which it stays."""
    arrays = draw(rng, 2, 4, 2, 37, 230, 8, 5, dtype)
    removed = np.concatenate([padding("left", 2, 230)[:1], padding("holes", 2, 230)[:1]])
    for mask in (removed, constant_mask(removed, -np.inf, dtype), constant_mask(removed, constants(dtype)[0], dtype)):
        both = run(fastmha, *arrays, mask=mask, algorithm=algorithm)
        for b in range(2):
            alone = run(fastmha, *(x[b : b + 1] for x in arrays), mask=mask[b : b + 1], algorithm=algorithm)
            for x, y in zip(both, alone, strict=True):
                assert same_bits(x[b : b + 1], y)


@dtypes
@pytest.mark.parametrize("masks", ["boolean", "additive"])
def test_masks_of_keys_compose_with_ranges_and_bands(isa, dtype, masks, rng):
    arrays = draw(rng, 3, 2, 1, 50, 230, 8, 5, dtype)
    removed = padding("both", 3, 230)
    mask = removed if masks == "boolean" else constant_mask(removed, -np.inf, dtype)
    for rules in ({"key_ranges": ([0, 90, 20], [230, 120, 21])}, {"key_padding_lengths": [10, 0, 230]},
                  {"window": (70, 3), "offset": np.array([40, 100, -60])}, {"is_causal": True, "offset": 30}):
        check(*arrays, mask=mask, algorithm="tiled", **rules)
        check(*arrays, mask=mask, algorithm="blas", **rules)


@dtypes
def test_a_mask_of_keys_that_removes_all_leaves_empty_rows(dtype, rng):
    arrays = draw(rng, 2, 2, 1, 9, 30, 4, 4, dtype)
    removed = np.concatenate([np.ones((1, 1, 1, 30), bool), np.zeros((1, 1, 1, 30), bool)])
    for mask in (removed, constant_mask(removed, -np.inf, dtype)):
        out, lse = check(*arrays, mask=mask)[:2]
        assert (out[0] == 0).all()
        assert np.isneginf(lse[0]).all()


@dtypes
def test_the_gradient_of_a_mask_of_keys_is_whole(dtype, rng):
    """What lies beside the range it leaves gets zeros."""
    arrays = draw(rng, 3, 2, 1, 9, 230, 4, 4, dtype)
    for constant in (-np.inf, *constants(dtype)):
        check(*arrays, mask=constant_mask(padding("both", 3, 230), constant, dtype), need_bias_grad=True)


def test_a_plan_counts_all_pairs_of_a_mask_of_keys(rng):
    q, k, v, _ = draw(rng, 2, 2, 1, 9, 30, 4, 4, np.float32)
    mask = padding("left", 2, 30)
    assert fastmha.plan(q, k, v, mask=mask).flops == fastmha.plan(q, k, v).flops


@dtypes
@pytest.mark.parametrize("pairs", [False, True])
def test_queries_so_large_that_they_are_packed_smaller_make_up_for_the_constant(isa, dtype, pairs, rng):
    """What is packed says nothing of the scores, which lie above the constant here."""
    large = np.float64(2.0) ** (100 if dtype == np.float32 else 900)
    q, k, v, _ = draw(rng, 1, 2, 2, 75, 75, 4, 5, dtype)
    q[...], k[...] = 0, 0
    q[..., 0], k[:, :, 70, 0] = large, 2.0**20
    mask = np.where(np.arange(75) >= np.arange(1, 76)[:, None] if pairs else np.arange(75) >= 60, -large, 0).astype(dtype)
    out, lse = fastmha.attention(q, k, v, mask=mask if pairs else mask[None, None, None], algorithm="tiled", return_lse=True)
    assert (lse > large).all()
    assert same_bits(out, np.broadcast_to(v[:, :, 70:71], out.shape))
