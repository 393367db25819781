"""Masks of pairs, boolean, -inf or a large finite constant, that leave each row a run of keys, as causality and padding do: to
"tiled" these are the keys of the rows, with the bits of the rules that they spell out.

Blocks hold 64 rows, tiles 192 keys and runs of a softmax 768; a boolean mask is read 32 keys at a time.
"""

import numpy as np
import pytest
from support import DTYPES, HALVES, all_dtypes, assert_same, check, computed, draw, dtypes, run, same_bits

import fastmha
from fastmha import reference

SHAPES = [(37, 100), (75, 230), (130, 777)]     # Lq, Lk
shapes = pytest.mark.parametrize(("Lq", "Lk"), SHAPES)
RULES = {
    "causal": lambda Lq, Lk: {"is_causal": True, "offset": Lk - Lq},
    "causal from the first key": lambda Lq, Lk: {"is_causal": True, "offset": 0},
    "window": lambda Lq, Lk: {"window": (40, 3), "offset": Lk - Lq - 3},
    "window beyond the keys": lambda Lq, Lk: {"window": (9, 0), "offset": Lk - 20},
    "padding": lambda Lq, Lk: {"key_padding_lengths": [Lk - 70, Lk]},
    "causal, padding on the left": lambda Lq, Lk: {"is_causal": True, "offset": 0, "key_ranges": ([5, Lq - 10], [Lk, Lk])},
}
rules = pytest.mark.parametrize("rule", RULES)


def removed_by(Lq, Lk, is_causal=False, offset=0, window=(None, None), key_padding_lengths=None, key_ranges=None):
    """(2, 1, Lq, Lk): True where the rules remove a pair."""
    i, j = np.arange(Lq)[:, None], np.arange(Lk)
    left, right = window
    gone = np.zeros((2, 1, Lq, Lk), bool)
    if is_causal:
        gone |= j > i + offset
    if left is not None:
        gone |= j < i + offset - left
    if right is not None:
        gone |= j > i + offset + right
    starts, ends = key_ranges or ([0, 0], [Lk, Lk] if key_padding_lengths is None else key_padding_lengths)
    return gone | (j < np.reshape(starts, (2, 1, 1, 1))) | (j >= np.reshape(ends, (2, 1, 1, 1)))


def masks_of(gone, dtype):
    """The two masks that remove what is gone."""
    return gone, np.where(gone, -np.inf, 0).astype(dtype)


@all_dtypes
@rules
@shapes
def test_a_mask_that_spells_out_a_rule_gives_the_bits_of_the_rule(isa, dtype, rule, Lq, Lk, rng):
    of = RULES[rule](Lq, Lk)
    arrays = draw(rng, 2, 4, 2, Lq, Lk, 17, 24, dtype)
    wanted = run(fastmha, *arrays, algorithm="tiled", **of)
    for mask in masks_of(removed_by(Lq, Lk, **of), dtype):
        for threads in (1, 5):
            assert_same(run(fastmha, *arrays, mask=mask, algorithm="tiled", threads=threads), wanted)


@dtypes
@rules
def test_under_such_a_mask_weights_follow_the_reference_and_are_0_where_it_removes_pairs(isa, dtype, rule, rng):
    """Of the textbook function."""
    q, k, v, _ = draw(rng, 2, 3, 3, 75, 230, 16, 8, dtype)
    gone = removed_by(75, 230, **RULES[rule](75, 230))
    for mask in masks_of(gone, dtype):
        out, weights = fastmha.scaled_dot_product_attention(q, k, v, mask)
        assert not weights[np.broadcast_to(gone, weights.shape)].any()
        exact = reference.scaled_dot_product_attention(*(x.astype(np.float64) for x in (q, k, v)), gone)
        for x, y in zip((out, weights), exact, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=40 * np.finfo(dtype).eps)


def some_runs(rng, B, H, Lq, Lk):
    """Runs of any length, also none, of each row; True outside."""
    ends = np.sort(rng.integers(0, Lk + 1, (2, B, H, Lq, 1)), 0)
    return (np.arange(Lk) < ends[0]) | (np.arange(Lk) >= ends[1])


@all_dtypes
@pytest.mark.parametrize("odd", [None, 0, 5, 63, 64, 69])
def test_runs_of_every_row_and_head_and_a_row_that_has_none(isa, dtype, odd, rng):
    """A row with a hole, or whose mask is neither 0 nor -inf, is asked pair by pair, and so are those behind it."""
    arrays = draw(rng, 2, 4, 2, 70, 210, 8, 5, dtype)
    gone = some_runs(rng, 2, 4, 70, 210)
    gone[0, 0] = True       # a head without any key
    if odd is not None:
        gone[1, :, odd] = np.arange(210) % 3 == 1
    boolean, additive = masks_of(gone, dtype)
    check(*arrays, mask=boolean, algorithm="tiled")
    if odd is not None:
        additive[0, :, odd, 100:] = -1.5
    check(*arrays, mask=additive, algorithm="tiled")
    check(*arrays, mask=additive, algorithm="tiled", softcap=2.0, is_causal=True, offset=150)


@dtypes
@rules
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_keys_outside_the_runs_change_no_bit(isa, dtype, rule, poison, rng):
    of = RULES[rule](75, 230)
    q, k, v, g = draw(rng, 2, 2, 2, 75, 230, 8, 8, dtype)
    gone = removed_by(75, 230, **of)
    for mask in masks_of(gone, dtype):
        wanted = run(fastmha, q, k, v, g, mask=mask, algorithm="tiled")
        spoilt_k, spoilt_v = k.copy(), v.copy()
        spoilt_k[:, :, 200, 3] = spoilt_v[:, :, 200, 5] = poison
        results = run(fastmha, q, spoilt_k, spoilt_v, g, mask=mask, algorithm="tiled")
        rows = gone[:, 0, :, 200]       # which do not attend that key
        assert rows.any()
        for b in range(2):
            for x, y in zip(results[:3], wanted[:3], strict=True):
                assert same_bits(x[b][:, rows[b]], y[b][:, rows[b]])


def constants(dtype):
    least = -65504.0 if dtype == np.float16 else float(np.finfo(DTYPES[0] if dtype in HALVES else dtype).min)
    return [least, -1e4]


@all_dtypes
@shapes
@pytest.mark.parametrize("rule", ["causal", "causal from the first key", "padding"])
def test_a_constant_that_drowns_the_ends_of_rows_gives_the_bits_of_minus_infinity(isa, dtype, rule, Lq, Lk, rng):
    """Each row here has a key."""
    arrays = draw(rng, 2, 4, 2, Lq, Lk, 8, 16, dtype)
    gone = removed_by(Lq, Lk, **RULES[rule](Lq, Lk))
    wanted = run(fastmha, *arrays, mask=masks_of(gone, dtype)[1], algorithm="tiled")
    for constant in constants(dtype):
        assert_same(run(fastmha, *arrays, mask=np.where(gone, constant, 0).astype(dtype), algorithm="tiled"), wanted)


@all_dtypes
def test_rows_of_padding_among_others_follow_the_oracle_under_a_constant(isa, dtype, rng):
    arrays = draw(rng, 2, 4, 2, 75, 230, 8, 5, dtype)
    gone = removed_by(75, 230, **RULES["causal, padding on the left"](75, 230))
    for constant in constants(dtype):
        mask = np.where(gone, constant, 0).astype(dtype)
        check(*arrays, mask=mask, algorithm="tiled")
        if dtype not in HALVES:
            check(*arrays, mask=mask, algorithm="tiled", sinks=np.array([0.5, -np.inf, 2, -30], dtype))


@all_dtypes
@pytest.mark.parametrize("values", [1, 0, 1e-44, 1e-40, 3e38, np.nan, np.inf])
def test_rows_of_padding_under_the_least_number_have_the_bits_that_each_by_itself_would_have(isa, dtype, values, rng):
    """They attend their keys evenly, and are done once; beside sinks, also where these are none, each is."""
    q, k, v, g = draw(rng, 2, 4, 2, 150, 900, 8, 5, dtype)
    with np.errstate(all="ignore"):
        if np.isfinite(values):
            v *= dtype(values)
        else:
            v[:, :, 800, 3] = values
    start = np.arange(150)[:, None] < np.array([70, 149])[:, None, None, None]
    gone = start | (np.arange(900) > np.arange(150)[:, None])
    mask = np.where(gone, constants(dtype)[0], 0).astype(dtype)
    mask[:, :, 40:60, :3] = mask[:, :, 50:, 890:] = -np.inf
    rules = {"mask": mask, "algorithm": "tiled"}
    none = np.full(4, -np.inf, computed(dtype))
    with np.errstate(all="ignore"):
        found = run(fastmha, q, k, v, g, **rules)
        assert_same(run(fastmha, q, k, v, g, sinks=none, **rules)[:5], found[:5])
        assert_same(fastmha.attention(q, k, v, num_threads=3, return_lse=True, **rules), found[:2])


@dtypes
@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("key", [2, 100, 225])
def test_what_is_not_finite_under_a_constant_reaches_the_rows_that_may_attend_it(isa, dtype, operand, value, key, rng):
    """Documents leave the rows of a block no key in common."""
    documents = np.arange(75)[:, None] // 25 != np.arange(230) // 80
    for gone in (removed_by(75, 230, **RULES["causal from the first key"](75, 230)), documents):
        q, k, v, g = draw(rng, 2, 2, 2, 75, 230, 8, 8, dtype)
        (k if operand == "k" else v)[:, :, key, 2] = value
        mask = np.where(gone, -1e4, 0).astype(dtype)
        results, wanted = (run(fastmha, q, k, v, g, mask=mask, algorithm=name) for name in ("tiled", "blas"))
        for x, y in zip(results, wanted, strict=True):
            assert np.array_equal(np.isnan(x), np.isnan(y))
        assert np.isnan(results[0]).any()


@dtypes
@pytest.mark.parametrize("size", [30, 300, 3000])
def test_scores_as_large_as_the_constant_count(isa, dtype, size, rng):
    """Scores of 1000 and more outweigh a mask of -1e4."""
    q, k, v, g = draw(rng, 2, 2, 2, 75, 230, 8, 8, dtype)
    gone = removed_by(75, 230, **RULES["causal from the first key"](75, 230))
    check((q * size).astype(dtype), (k * size).astype(dtype), v, g, mask=np.where(gone, -1e4, 0).astype(dtype), algorithm="tiled")


@dtypes
def test_a_key_that_makes_up_for_the_constant_counts_beside_ordinary_scores(isa, dtype, rng):
    q, k, v, g = draw(rng, 2, 2, 2, 75, 230, 4, 8, dtype)
    q[..., 0], k[:, :, 200] = 1, 0
    k[:, :, 200, 0] = 2e4       # scores of 1e4 beside others of a few
    gone = removed_by(75, 230, **RULES["causal from the first key"](75, 230))
    out, *_ = check(q, k, v, g, mask=np.where(gone, -1e4, 0).astype(dtype), algorithm="tiled")
    other, *_ = run(fastmha, q, k, v, g, mask=gone, algorithm="tiled")
    assert np.abs(out - other).max() > 0.1
