"""Attention and products on matrix tiles: half precision, and float32 where a lower precision is permitted.

Every case runs on the tiles' arithmetic in plain C, and on AMX where the machine has it. Bounds are shares of an array's largest
entry: what is rounded to one bfloat16 part has 8 bits, to two 16; operands of float16 are exact in two, results have 11 bits."""

import dataclasses
import itertools
import re
import shutil

import numpy as np
import pytest
from support import TILE_ISAS, Guard, assert_same, guards, in_float64, padded, raises, selected
from test_fences import instructions

import fastmha
from fastmha import _core, algorithms, precision, reference, tuning, validate

bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
KINDS = {"bfloat16": (bfloat16, None, 3e-2), "float16": (np.float16, None, 3e-3), "high": (np.float32, "high", 1e-4),
         "medium": (np.float32, "medium", 3e-2)}
RESULTS = ("out", "lse", "grad_q", "grad_k", "grad_v")


def on_tiles_from(least):
    """The settings in use, but matrix tiles from so many rows, and keys or terms, on."""
    return dataclasses.replace(tuning.current(), **dict.fromkeys(tuning.OF_TILES, least))


@pytest.fixture(params=TILE_ISAS)
def tiles(request):
    """Tiles from few rows and keys on, whether they pay or not."""
    with selected(request.param), tuning.using(on_tiles_from(tuning.TILE)):
        yield request.param


kinds = pytest.mark.parametrize("kind", KINDS)


def operands(kind, B, H, Hkv, Lq, Lk, D, Dv, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(KINDS[kind][0])
            for shape in ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), (B, H, Lq, Dv))]


def attend(kind, arrays, num_threads=1, **rules):
    """out, lse and the gradients, by tiles."""
    q, k, v, g = arrays
    rules |= {"algorithm": "tiled", "num_threads": num_threads, "precision": KINDS[kind][1]}
    assert "matrix tiles" in fastmha.plan(q, k, v, **rules).products
    out, lse = fastmha.attention(q, k, v, return_lse=True, **rules)
    return out, lse, *fastmha.attention_backward(g, q, k, v, out, lse, **rules)[:3]


def exact(arrays, **rules):
    (q, k, v, g), rules = in_float64(arrays, rules)
    out, lse = reference.attention(q, k, v, return_lse=True, **rules)
    return out, lse, *reference.attention_backward(g, q, k, v, out, lse, **rules)[:3]


def assert_within(kind, results, expected, share=None):
    for name, result, wanted in zip(RESULTS[: len(expected)], results, expected, strict=True):
        result = result.astype(np.float64)
        np.testing.assert_array_equal(np.isneginf(result), np.isneginf(wanted), err_msg=name)
        finite = np.isfinite(wanted)
        if finite.any():
            error = np.abs(result[finite] - wanted[finite]).max()
            assert error <= (share or KINDS[kind][2]) * max(1e-3, np.abs(wanted[finite]).max()), (name, error)


def rules_of(rng, B, H, Lq, Lk, dtype):
    """By name: every rule, and some together."""
    causal = {"is_causal": True, "offset": Lk - Lq}
    removed, added = rng.random((B, 1, Lq, Lk)) < 0.3, rng.standard_normal((1, H, Lq, Lk)).astype(dtype)
    slopes = np.linspace(0.05, 0.3, H).astype(np.float32)
    return {
        "plain": {}, "causal": causal, "window": {"window": (20, 3), "offset": Lk - Lq},
        "lengths": {"key_padding_lengths": [Lk // 3] * B},
        "ranges": {"key_ranges": ([Lk // 4] * B, [Lk - 5] * B)}, "removed": {"mask": removed}, "added": {"mask": added},
        "row added": {"mask": added[:, :1, :1]}, "softcap": {"softcap": 2.0}, "alibi": {"alibi": slopes, "offset": Lk - Lq},
        "sinks": {"sinks": 3 * slopes}, "scale": {"scale": -0.5}, "tiny scale": {"scale": 2.0**-25},
        "dropout": {"dropout": 0.3, "seed": 5},
        "all": {**causal, "window": (60, 60), "softcap": 3.0, "mask": removed, "dropout": 0.2, "seed": 1, "sinks": slopes,
                "key_padding_lengths": [Lk - 7] * B},
    }


@pytest.mark.parametrize("rule", rules_of(np.random.default_rng(0), 1, 1, 1, 1, np.float32))
@kinds
def test_results_and_gradients_are_those_of_the_oracle_under_every_rule(tiles, kind, rule):
    B, H, Hkv, Lq, Lk, D, Dv = 2, 4, 2, 75, 230, 40, 24
    arrays = operands(kind, B, H, Hkv, Lq, Lk, D, Dv)
    rules = rules_of(np.random.default_rng(1), B, H, Lq, Lk, KINDS[kind][0])[rule]
    assert_within(kind, attend(kind, arrays, **rules), exact(arrays, **rules))


@pytest.mark.parametrize(("Lq", "Lk"), [(24, 32), (31, 33), (33, 191), (63, 192), (64, 193), (65, 385), (130, 64), (100, 95)])
@kinds
def test_every_length_around_the_edges_of_tiles(tiles, kind, Lq, Lk):
    arrays = operands(kind, 1, 2, 1, Lq, Lk, 32, 32)
    for rules in ({}, {"is_causal": True, "offset": Lk - Lq}):
        assert_within(kind, attend(kind, arrays, **rules), exact(arrays, **rules))


@pytest.mark.parametrize(("D", "Dv"), [(1, 1), (8, 20), (31, 33), (64, 48), (100, 65), (160, 16)])
@kinds
def test_every_width(tiles, kind, D, Dv):
    arrays = operands(kind, 1, 2, 2, 40, 70, D, Dv)
    assert_within(kind, attend(kind, arrays), exact(arrays))


@kinds
def test_sinks_beside_an_additive_mask_stay_on_tiles_unless_its_gradient_is_wanted(tiles, kind, monkeypatch):
    """The pass over the mask multiplies by vectors, and what it knows of rows must be rounded as there."""
    arrays = q, k, v, g = operands(kind, 1, 2, 1, 70, 100, 32, 32)
    rules = {"mask": g[:, :, :, :1], "sinks": np.ones(2, np.float32)}
    out, lse = attend(kind, arrays, **rules)[:2]
    parts, run_of_core = [], _core.tiled_backward

    def watched(problem, *rest):
        parts.append(problem.parts)
        run_of_core(problem, *rest)

    monkeypatch.setattr(_core, "tiled_backward", watched)
    rules |= {"algorithm": "tiled", "precision": KINDS[kind][1]}
    for wanted in (False, True):
        fastmha.attention_backward(g, q, k, v, out, lse, need_bias_grad=wanted, **rules)
    assert parts == [2 if kind in ("float16", "high") else 1, 0]


@pytest.mark.parametrize(("Lk", "Dv"), [(32, 129), (33, 300), (70, 400), (130, 600), (250, 800)])
@kinds
def test_values_that_are_wide_for_the_number_of_keys(tiles, kind, Lk, Dv):
    """Sixteen rows of results are more numbers than the scores of a block: they once ran into what was yet to be read."""
    arrays = operands(kind, 1, 2, 1, 50, Lk, 40, Dv)
    assert_within(kind, attend(kind, arrays), exact(arrays))


@kinds
def test_the_bits_depend_neither_on_threads_nor_on_other_batch_rows(tiles, kind):
    arrays = operands(kind, 3, 2, 1, 150, 210, 32, 32)
    rules = {"is_causal": True, "offset": 60}
    alone = attend(kind, arrays, **rules)
    for threads in (2, 3, 5):           # some leave heads whole, which pack their own operands, others do not
        assert_same(alone, attend(kind, arrays, threads, **rules))
    assert_same([x[1:2] for x in alone], attend(kind, [x[1:2] for x in arrays], **rules))


@kinds
def test_heads_of_which_backward_has_copies(tiles, kind):
    arrays = operands(kind, 2, 8, 2, 280, 100, 40, 24)
    for rules in ({}, {"window": (60, 9), "offset": np.array([-90, 3])}):
        alone = attend(kind, arrays, **rules)
        assert_within(kind, alone, exact(arrays, **rules))
        for threads in (2, 3, 9):
            assert_same(alone, attend(kind, arrays, threads, **rules))


@kinds
def test_strides_change_no_bit_and_nothing_outside_is_read(tiles, kind):
    arrays = operands(kind, 2, 4, 2, 50, 100, 40, 24)
    expected = attend(kind, arrays)
    odd = [padded(x.transpose(0, 2, 1, 3).copy()).transpose(0, 2, 1, 3) for x in arrays]
    assert_same(expected, attend(kind, odd))
    turned = [x[..., ::-1][..., ::-1][:, :, ::-1].copy()[:, :, ::-1] for x in arrays]
    assert_same(expected, attend(kind, turned))


@guards
@pytest.mark.parametrize("of", KINDS)
def test_nothing_is_read_beyond_the_operands(tiles, of, kind):
    guard = Guard(kind)
    arrays = operands(of, 1, 1, 1, 37, 53, 20, 12)
    assert_same(attend(of, arrays), attend(of, [guard(x) for x in arrays]))


def test_grad_q_of_bfloat16_is_hardly_less_exact_than_its_own_rounding(tiles):
    """One part of the scores' gradients alone would make it 1.4 times as inexact."""
    arrays = operands("bfloat16", 1, 2, 2, 256, 256, 128, 128)
    grad_q, expected = attend("bfloat16", arrays)[2], exact(arrays)[2]
    errors, roundings = grad_q.astype(np.float64) - expected, expected.astype(bfloat16).astype(np.float64) - expected
    assert np.sqrt(np.mean(errors**2)) <= 1.1 * np.sqrt(np.mean(roundings**2))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e38])
@kinds
def test_a_removed_key_and_value_change_no_bit_of_the_rows(tiles, kind, poison):
    Lq, Lk = 70, 230
    q, k, v, g = operands(kind, 1, 2, 1, Lq, Lk, 32, 32)
    poison = np.inf if kind == "float16" and poison == 1e38 else poison
    mask = np.zeros((Lq, Lk), bool)
    mask[:50, [3, 100, 210]] = True
    clean = attend(kind, (q, k, v, g), mask=mask)
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[:, :, 3], bad_v[:, :, 100], bad_v[:, :, 210, 5] = poison, poison, poison
    with np.errstate(all="ignore"):
        poisoned = attend(kind, (q, bad_k, bad_v, g), mask=mask)
    for x in (0, 1, 2):
        assert_same([clean[x][:, :, :50]], [poisoned[x][:, :, :50]])


@pytest.mark.parametrize("num_threads", [1, 2, 5])      # heads whole, and split
@kinds
def test_rows_that_are_left_to_vectors_change_no_bit_of_the_others(tiles, kind, num_threads):
    """Also where these rows want sums of their own, and the head is done again."""
    q, k, v, g = operands(kind, 1, 2, 1, 300, 300, 32, 32)
    odd = np.random.default_rng(1).permutation(300)[:12]
    zeroed = g.copy()
    g[:, 1, odd, 7], zeroed[:, 1, odd] = np.nan, 0
    dirty, clean = (attend(kind, (q, k, v, x), num_threads, window=(40, 35))[2] for x in (g, zeroed))
    assert_same([dirty[:, 0], np.delete(dirty[:, 1], odd, axis=1)], [clean[:, 0], np.delete(clean[:, 1], odd, axis=1)])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@kinds
def test_a_row_of_queries_changes_no_bit_of_the_gradients_of_keys_that_it_may_not_attend(tiles, kind, poison):
    Lq, Lk = 100, 230
    q, k, v, g = operands(kind, 1, 2, 1, Lq, Lk, 32, 32)
    rules = {"is_causal": True, "offset": 0}
    for at in (0, 3):       # q, grad_out
        bad = [q, k, v, g]
        bad[at] = bad[at].copy()
        # what such a row gives the keys that it attends is its own; the row with zeros instead is what the others see
        zeroed = [x.copy() for x in bad]
        bad[at][:, 1, 40, 7] = poison
        zeroed[at][:, 1, 40] = 0
        zeroed[3][:, 1, 40] = 0
        with np.errstate(all="ignore"):
            dirty, clean = attend(kind, bad, **rules), attend(kind, zeroed, **rules)
        for x in (3, 4):
            assert_same([dirty[x][:, :, 41:]], [clean[x][:, :, 41:]])
        assert_same([dirty[2][:, 0]], [clean[2][:, 0]])


@kinds
def test_a_nan_reaches_the_rows_that_attend_it(tiles, kind):
    q, k, v, _ = operands(kind, 1, 1, 1, 64, 100, 32, 32)
    v[:, :, 50, 3] = np.nan
    out = fastmha.attention(q, k, v, is_causal=True, offset=0, algorithm="tiled", precision=KINDS[kind][1]).astype(np.float32)
    assert np.isnan(out[0, 0, 50:, 3]).all()
    assert not np.isnan(out[0, 0, :50]).any()


@kinds
def test_empty_rows_are_zero_and_contribute_nothing(tiles, kind):
    arrays = operands(kind, 1, 2, 1, 80, 100, 32, 32)
    mask = np.zeros((80, 100), bool)
    mask[10:30] = True
    out, lse, grad_q, _, _ = results = attend(kind, arrays, mask=mask)
    assert not out[:, :, 10:30].any()
    assert not grad_q[:, :, 10:30].any()
    assert np.isneginf(lse[:, :, 10:30]).all()
    assert_within(kind, results, exact(arrays, mask=mask))


@pytest.mark.parametrize("constant", ["least", -1e4])
@kinds
def test_rows_masked_by_a_padding_constant_are_right(tiles, kind, constant):
    arrays = operands(kind, 1, 2, 2, 70, 130, 32, 32)
    dtype = KINDS[kind][0]
    least = float(np.finfo(dtype).min) if kind != "bfloat16" else -3.3895e38
    mask = np.zeros((70, 130), dtype)
    mask[:20] = least if constant == "least" else constant
    mask[30:, 90:] = least if constant == "least" else constant
    # beside the constant a score keeps a 2**-24th of it
    share = KINDS[kind][2] + (0 if constant == "least" else 1e4 * 2.0**-23)
    assert_within(kind, attend(kind, arrays, mask=mask), exact(arrays, mask=mask), share)


RUNS = {
    "causal": {"is_causal": True, "offset": 60}, "causal from the first key": {"is_causal": True, "offset": 0},
    "window": {"window": (40, 3), "offset": 300}, "padding": {"key_padding_lengths": [250, 390]},
    "causal, padding on the left": {"is_causal": True, "offset": 0, "key_ranges": ([5, 120], [400, 400])},
}   # fmt: skip
runs = pytest.mark.parametrize("rule", RUNS)


def removed_by(rule, Lq, Lk):
    """(2, 1, Lq, Lk): True where the rule removes a pair."""
    weights = reference.attention_weights(np.zeros((2, 1, Lq, 1)), np.zeros((2, 1, Lk, 1)), **RUNS[rule])
    return weights == 0


def least_of(kind):
    return {"float16": -65504.0, "bfloat16": -3.3895e38}.get(kind, float(np.finfo(np.float32).min))


@runs
@kinds
def test_a_mask_that_spells_out_a_rule_gives_the_bits_of_the_rule(tiles, kind, rule):
    arrays = operands(kind, 2, 4, 2, 150, 400, 40, 24)
    gone = removed_by(rule, 150, 400)
    wanted = attend(kind, arrays, **RUNS[rule])
    for threads in (1, 5):
        assert_same(attend(kind, arrays, threads, mask=gone), wanted)
    out, lse, weights = weighted(kind, *arrays[:3], mask=gone)
    assert_same([out, lse], wanted[:2])
    assert not weights[np.broadcast_to(gone, weights.shape)].any()


@runs
@pytest.mark.parametrize("constant", [-np.inf, "least", -1e4])
@kinds
def test_keys_under_a_mask_get_nothing_whatever_the_mask_is_elsewhere(tiles, kind, rule, constant):
    """A row that asks for more than a run of keys has all pairs of its block asked, with the same bits; so has a constant."""
    arrays = operands(kind, 2, 4, 2, 150, 400, 40, 24)
    dtype, gone = KINDS[kind][0], removed_by(rule, 150, 400)
    added = np.where(gone, -np.inf, 0).astype(dtype)
    asked = added.copy()
    asked[:, :, [3, 70], 130] = -1.5
    wanted, others = attend(kind, arrays, mask=asked), ~np.isin(np.arange(150), [3, 70])
    found = attend(kind, arrays, mask=np.where(gone, least_of(kind) if constant == "least" else constant, 0).astype(dtype))
    for b in range(2):
        rows = others & ~gone[b, 0].all(-1)     # an empty row attends keys under a constant evenly
        for x, y in zip(found[:3], wanted[:3], strict=True):
            assert_same([x[b][:, rows]], [y[b][:, rows]])
    assert_same(attend(kind, arrays, 5, mask=added), attend(kind, arrays, mask=added))


@pytest.mark.parametrize("constant", ["least", -1e4])
@kinds
def test_rows_of_padding_on_the_left_under_a_constant_are_right(tiles, kind, constant):
    """Some blocks have no other rows."""
    arrays = operands(kind, 2, 4, 2, 150, 400, 40, 24)
    gone = removed_by("causal, padding on the left", 150, 400)
    mask = np.where(gone, least_of(kind) if constant == "least" else constant, 0).astype(KINDS[kind][0])
    share = KINDS[kind][2] + (0 if constant == "least" else 1e4 * 2.0**-23)
    assert_within(kind, attend(kind, arrays, mask=mask), exact(arrays, mask=mask), share)
    assert_same(attend(kind, arrays, 5, mask=mask), attend(kind, arrays, mask=mask))
    sinks = np.array([0.5, -np.inf, -10030, -9990], np.float32)         # as large as what padding has under the constant
    results = fastmha.attention(*arrays[:3], mask=mask, sinks=sinks, algorithm="tiled", precision=KINDS[kind][1], return_lse=True)
    (q, k, v, _), rules = in_float64(arrays, {"mask": mask, "sinks": sinks})
    assert_within(kind, results, reference.attention(q, k, v, return_lse=True, **rules), share)


@kinds
def test_rows_of_padding_have_bits_of_their_own(tiles, kind):
    """They attend their keys evenly, and one of them is done for all; whatever the mask is at other rows of their block."""
    arrays = operands(kind, 2, 4, 2, 150, 400, 40, 24)
    gone = removed_by("causal, padding on the left", 150, 400)
    mask = np.where(gone, least_of(kind), 0).astype(KINDS[kind][0])
    asked = mask.copy()
    asked[:, :, [3, 70, 149], 130] = -1.5
    asked[:, :, [4, 71], 130:140] = -np.inf
    others = ~np.isin(np.arange(150), [3, 70, 149, 4, 71])
    for x, y in zip(attend(kind, arrays, mask=asked)[:3], attend(kind, arrays, mask=mask)[:3], strict=True):
        assert_same([x[:, :, others]], [y[:, :, others]])


@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize(("value", "key"), [(np.nan, 2), (np.inf, 230), (np.nan, 395)])
@kinds
def test_what_is_not_finite_under_a_constant_reaches_the_rows_that_may_attend_it(tiles, kind, operand, value, key):
    q, k, v, g = operands(kind, 2, 2, 2, 150, 400, 32, 32)
    (k if operand == "k" else v)[:, :, key, 2] = value
    mask = np.where(removed_by("causal from the first key", 150, 400), -1e4, 0).astype(KINDS[kind][0])
    with np.errstate(all="ignore"):
        results, wanted = attend(kind, (q, k, v, g), mask=mask), exact((q, k, v, g), mask=mask)
    for name, x, y in zip(RESULTS, results, wanted, strict=True):
        assert np.array_equal(np.isnan(x.astype(np.float64)), np.isnan(y)), name
    assert np.isnan(wanted[0]).any()


@pytest.mark.parametrize("key", [100, 390])
@kinds
def test_a_key_that_makes_up_for_the_constant_counts(tiles, kind, key):
    """Beside ordinary scores there is one as large as the constant."""
    q, k, v, g = operands(kind, 2, 2, 2, 150, 400, 32, 32)
    q[..., 0], k[:, :, key] = 32, 0
    k[:, :, key, 0] = 9984      # a bfloat16, so that its score, 9984, is exact
    arrays, mask = (q, k, v, g), np.where(removed_by("causal from the first key", 150, 400), -9984, 0).astype(KINDS[kind][0])
    results, wanted = attend(kind, arrays, mask=mask, scale=1 / 32), exact(arrays, mask=mask, scale=1 / 32)
    rows = slice(0, key)        # which have it under the constant; with it and without the constant lse is huge
    for name, x, y in zip(RESULTS[:3], results[:3], wanted[:3], strict=True):
        x, y = x.astype(np.float64)[:, :, rows], y[:, :, rows]
        assert np.abs(x - y).max() <= KINDS[kind][2] * np.abs(y).max(), name


@kinds
def test_scores_as_large_as_the_constant_count(tiles, kind):
    """Those of 16000 outweigh a mask of -1e4; what they err by is theirs, not the mask's."""
    q, k, v, g = operands(kind, 1, 2, 2, 150, 400, 32, 32)
    q, k = (q * 96).astype(q.dtype), (k * 48).astype(k.dtype)
    gone = removed_by("causal from the first key", 150, 400)[:1]
    asked = np.where(gone, -1e4, 0).astype(KINDS[kind][0])
    asked[:, :, [3, 70, 140], 399] += -64
    others = ~np.isin(np.arange(150), [3, 70, 140])
    found, wanted = (attend(kind, (q, k, v, g), mask=mask) for mask in (np.where(gone, -1e4, 0).astype(KINDS[kind][0]), asked))
    for x, y in zip(found[:3], wanted[:3], strict=True):
        assert_same([x[:, :, others]], [y[:, :, others]])
    scores = q[:, :, 0].astype(np.float64) @ np.swapaxes(k[:, :, 0], -1, -2).astype(np.float64) / np.sqrt(32)
    assert (found[1][0, :, 0] > np.diagonal(scores[0]) + 100).any()       # row 0 attends one key, and others from under the mask


@pytest.mark.parametrize("masked", [False, True])
@kinds
def test_what_was_summed_stays_as_it_is_where_later_keys_have_no_larger_score(tiles, kind, masked):
    """Of 300 chunks the first one has the largest score; the others add a little each."""
    Lk, dtype = 300 * 192, KINDS[kind][0]
    q, k, v = np.ones((1, 1, 16, 8), dtype), np.zeros((1, 1, Lk, 8), dtype), np.ones((1, 1, Lk, 8), dtype)
    k[:, :, 5, 0] = 32
    mask = np.zeros((1, Lk), dtype) if masked else None
    lse = fastmha.attention(q, k, v, mask=mask, scale=0.25, algorithm="tiled", precision=KINDS[kind][1], return_lse=True)[1]
    # of one part the fit of an exponential errs by 7.5e-5 of it
    np.testing.assert_allclose(lse, np.log(np.exp(8) + Lk - 1), rtol=0, atol=4e-6 if kind in ("high", "float16") else 1e-4)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("kind", ["high", "medium", "bfloat16"])
def test_values_of_any_size(tiles, kind, size):
    """Too small or too large for tiles: such rows are computed by vectors."""
    q, k, v, _ = operands(kind, 1, 2, 1, 40, 70, 32, 32)
    v = (v.astype(np.float32) * np.float32(size)).astype(v.dtype)
    out = fastmha.attention(q, k, v, algorithm="tiled", precision=KINDS[kind][1])
    wanted = reference.attention(*(x.astype(np.float64) for x in (q, k, v)))
    assert np.abs(out.astype(np.float64) - wanted).max() <= KINDS[kind][2] * np.abs(wanted).max()


@pytest.mark.parametrize("spread", [20, 200])
@kinds
def test_peaked_scores(tiles, kind, spread):
    q, k, v, _ = operands(kind, 1, 2, 1, 70, 200, 32, 32)
    q = (q.astype(np.float32) * spread).astype(q.dtype)
    _, lse = fastmha.attention(q, k, v, return_lse=True, algorithm="tiled", precision=KINDS[kind][1])
    q64, k64 = q.astype(np.float64), k.astype(np.float64)
    scores = q64 @ np.swapaxes(k64, 2, 3) / np.sqrt(32)
    # what the scores may err by: of rounded operands by their rounding, of exact ones by that of sums
    unit = {"medium": 2.0**-8, "high": 2.0**-15}.get(kind, 2.0**-20)
    slack = unit * (np.abs(q64) @ np.swapaxes(np.abs(k64), 2, 3)).max() / np.sqrt(32)
    wanted = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    assert np.abs(lse - wanted).max() <= 2 * slack + 1e-3


# -------------------------------------------------------------------------------------------------------- the weights


def weighted(kind, q, k, v, num_threads=1, on_tiles=True, **rules):
    """out, lse and the weights."""
    problem = validate.attention_problem(q, k, v, "BHLD", validate.Rules(**rules, precision=KINDS[kind][1]))
    assert (precision.parts_of(problem) > 0) == on_tiles
    B, H, _, Lq, Lk, _, Dv = problem.shape
    out, lse = np.empty((B, H, Lq, Dv), q.dtype), np.empty((B, H, Lq), np.float32)
    weights = Guard("end").empty((B, H, Lq, Lk), np.float32)
    weights[...] = np.nan
    algorithms.forward("tiled", problem, out, lse, weights, num_threads)
    return out, lse, weights


@pytest.mark.parametrize("rule", rules_of(np.random.default_rng(0), 1, 1, 1, 1, np.float32))
@kinds
def test_weights_are_those_of_the_oracle_and_out_has_the_bits_that_it_has_without(tiles, kind, rule):
    B, H, Hkv, D, Dv = 2, 4, 2, 40, 24
    for Lq, Lk in ((75, 230), (33, 65)):
        q, k, v, _ = operands(kind, B, H, Hkv, Lq, Lk, D, Dv)
        rules = rules_of(np.random.default_rng(1), B, H, Lq, Lk, KINDS[kind][0])[rule]
        out, lse, weights = results = weighted(kind, q, k, v, **rules)
        assert_same([out, lse], attend(kind, (q, k, v, out), **rules)[:2])
        assert_same(results, weighted(kind, q, k, v, 3, **rules))
        arrays, given = in_float64((q, k, v), rules)
        wanted = reference.attention_weights(*arrays[:2], **given)
        assert np.abs(weights - wanted).max() <= KINDS[kind][2] / 2 * np.abs(wanted).max()
        assert not weights[wanted == 0].any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@kinds
def test_what_is_not_finite_reaches_the_weights_of_the_rows_that_attend_it_alone(tiles, kind, poison):
    q, k, v, _ = operands(kind, 1, 2, 1, 70, 230, 32, 32)
    mask = np.zeros((70, 230), bool)
    mask[:50, [3, 100]] = True
    clean = weighted(kind, q, k, v, mask=mask)
    bad_q, bad_k, bad_v = q.copy(), k.copy(), v.copy()
    bad_q[0, 1, 7, 5], bad_k[:, :, 3, 1], bad_v[:, :, 100, 2] = poison, poison, poison
    with np.errstate(all="ignore"):
        dirty = weighted(kind, bad_q, bad_k, bad_v, mask=mask)
        with selected("baseline" if tiles == "amx-emulated" else "avx512"):
            by_vectors = weighted(kind, bad_q, bad_k, bad_v, on_tiles=False, mask=mask)
    rows = np.ones((1, 2, 70), bool)
    rows[0, 1, 7], rows[:, :, 50:] = False, False
    for x, y in zip(clean, dirty, strict=True):
        assert_same([x[rows]], [y[rows]])
    for x, y in zip(by_vectors, dirty, strict=True):
        assert_same([x[~rows]], [y[~rows]])
    assert not np.isfinite(dirty[2][~rows]).all()
    assert not dirty[2][:, :, :50, [3, 100]].any()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("M", "N", "K"), [(16, 16, 32), (33, 50, 70), (128, 96, 300), (1, 48, 33), (70, 272, 600)])
def test_products_of_matrices_in_every_orientation(tiles, M, N, K, parts):
    rng = np.random.default_rng(0)
    a, b, residual = rng.standard_normal((M, K)), rng.standard_normal((K, N)), rng.standard_normal((M, N)).astype(np.float32)
    bias = rng.standard_normal(N).astype(np.float32)
    for trans_a, trans_b, dtype in itertools.product((False, True), (False, True), (np.float32, np.float16)):
        share = 2.0**-7 if parts == 1 else 2.0**-14 if dtype is np.float32 else 2.0**-10
        x, y = a.astype(dtype), b.astype(dtype)
        out, added = np.empty((M, N), dtype), residual.astype(dtype)
        operands = [np.ascontiguousarray(z.T if trans else z) for z, trans in ((x, trans_a), (y, trans_b))]
        assert _core.matmul_matrix(*operands, out, trans_a, trans_b, bias, (64, 64), 2, parts, None, 0, added)
        wanted = x.astype(float) @ y.astype(float) + bias + added
        assert np.abs(out - wanted).max() <= share * np.abs(wanted).max()


@pytest.mark.parametrize(("M", "N", "K"), [(16, 16, 32), (17, 31, 33), (40, 40, 50), (200, 70, 599), (513, 33, 2)])
def test_products_of_whole_numbers_are_exact(tiles, M, N, K):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (M, K)), rng.integers(-8, 9, (K, N))
    for of, trans_a, trans_b in itertools.product((np.float32, bfloat16), (False, True), (False, True)):
        x, y = (np.ascontiguousarray(z.T if trans else z).astype(of) for z, trans in ((a, trans_a), (b, trans_b)))
        out = np.empty((M, N), np.float32)
        assert _core.matmul_matrix(validate.bits(x), validate.bits(y), out, trans_a, trans_b, None, (64, 64), 2, 1)
        assert np.array_equal(out, a @ b)


@pytest.mark.parametrize(("M", "N", "K"), [(1, 2100, 70), (9, 4200, 130), (40, 1100, 300), (200, 333, 530), (600, 70, 290)])
def test_a_product_has_the_bits_of_the_same_of_a_packed_operand_in_any_slices(tiles, M, N, K):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (M, K)).astype(np.float32), rng.integers(-8, 9, (K, N)).astype(np.float32)
    assert np.array_equal(product_of(a, b, (16, 32), 1), a @ b)
    for of, parts in ((bfloat16, 1), (np.float32, 2)):
        x, y = a.astype(of), b.astype(of) * of(0.3)
        tiles_of_y = np.empty(_core.tiles_bytes(N, K, parts), np.uint8)
        assert _core.pack_tiles(validate.bits(y), tiles_of_y, parts, 2)
        whole = (-(-M // 16) * 16, -(-N // 32) * 32)
        wanted = product_of(x, y, whole, parts, packed=tiles_of_y)
        assert np.abs(wanted - x.astype(float) @ y.astype(float)).max() <= 2.0**-8 * np.abs(wanted).max()
        for slices in (whole, (16, 32), (64, 544)):
            for trans_b in (False, True):
                assert_same([product_of(x, y, slices, parts, trans_b=trans_b)], [wanted])


def product_of(a, b, slices, parts, trans_b=False, packed=None):
    """a @ b in float32 on matrix tiles, b transposed in memory or packed."""
    out = np.empty((len(a), b.shape[1]), np.float32)
    operand = None if packed is not None else validate.bits(np.ascontiguousarray(b.T) if trans_b else b)
    assert _core.matmul_matrix(validate.bits(a), operand, out, False, trans_b, None, slices, 2, parts, packed)
    return out


@pytest.mark.parametrize("isa", TILE_ISAS)
def test_products_of_float32_need_a_whole_tile_of_rows_those_of_bfloat16_what_the_settings_say(isa):
    single, bits = np.dtype(np.float32), np.dtype(np.uint16)
    with selected(isa):
        least = tuning.current().one_part_products[0]
        for of, rows in ((bits, least), (single, max(least, tuning.TILE[0]))):
            parts = [precision.parts_of_product(of, of, "medium", m, 64, 64) for m in (rows - 1, rows)]
            assert parts == [0, 1]


@pytest.mark.parametrize("trans_b", [False, True])
def test_a_product_says_when_tiles_cannot_do_it(tiles, trans_b):
    a, b, out = np.ones((32, 700), np.float32), np.ones((700, 1500), np.float32), np.empty((32, 1500), np.float32)
    for bad in (np.nan, np.inf, 1e20):
        for at in ((3, 4), (699, 1499)):
            b[at] = bad
            operand = np.ascontiguousarray(b.T) if trans_b else b
            assert not _core.matmul_matrix(a, operand, out, False, trans_b, None, (32, 1504), 1, 2)
            b[at] = 1


@pytest.mark.skipif("amx" not in TILE_ISAS, reason="this machine has no AMX")
@kinds
def test_the_emulated_tiles_have_the_bits_of_the_unit(kind):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((100, 100)).astype(KINDS[kind][0]) for _ in range(2))
    b[::7] *= 2.0**-10
    results = []
    for isa in ("amx", "amx-emulated"):
        with selected(isa):
            out = np.empty((100, 100), np.float32)
            parts = 2 if kind in ("high", "float16") else 1
            assert _core.matmul_matrix(validate.bits(a), validate.bits(b), out, False, True, None, (64, 64), 1, parts)
            results.append(out)
    assert_same(results[:1], results[1:])


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_the_instructions_for_tiles_stand_in_their_fence_alone():
    found = {function for function, mnemonic, _ in instructions(_core.__file__) if re.match(r"t(ile|dpbf)", mnemonic)}
    if not found and not any(function.startswith("fmha_") for function, _, _ in instructions(_core.__file__)):
        pytest.skip("the module is stripped of its local symbols")
    assert all(function.startswith("fmha_amx_") and "emulated" not in function for function in found)
    if _core.runnable_isas().count("avx2"):
        assert found


# --------------------------------------------------------------------------------------------------------- the precision


def test_highest_is_what_it_was_bit_for_bit(tiles):
    q, k, v, _ = operands("high", 1, 2, 1, 70, 130, 32, 32)
    before = fastmha.attention(q, k, v, algorithm="tiled")
    with selected("baseline" if tiles == "amx-emulated" else "avx512"):
        assert_same([before], [fastmha.attention(q, k, v, algorithm="tiled")])


def test_the_precision_is_that_of_the_call_else_the_one_set_else_the_environments(tiles, monkeypatch):
    q, k, v, _ = operands("high", 1, 2, 1, 70, 130, 32, 32)

    def products(**more):
        return fastmha.plan(q, k, v, **more).products

    monkeypatch.setenv("FASTMHA_PRECISION", "medium")
    try:
        fastmha.set_precision(None)
        assert fastmha.get_precision() == "medium"
        assert products() == 'bfloat16 on matrix tiles, summed in float32 (precision "medium")'
        fastmha.set_precision("high")
        assert products() == 'two bfloat16 parts of each operand on matrix tiles, summed in float32 (precision "high")'
        assert products(precision="highest") == "float32"
        assert fastmha.plan(*(x.astype(np.float64) for x in (q, k, v))).products == "float64"
        monkeypatch.setenv("FASTMHA_PRECISION", "exact")
        fastmha.set_precision(None)
        with raises(ValueError, "FASTMHA_PRECISION must be one of highest, high, medium, got 'exact'"):
            fastmha.get_precision()
    finally:
        monkeypatch.delenv("FASTMHA_PRECISION")
        fastmha.set_precision(None)
    assert fastmha.get_precision() == "highest"


def test_a_precision_is_permission_and_not_an_order():
    q, k, v, _ = operands("high", 1, 2, 1, 70, 130, 32, 32)
    with selected("baseline"):
        products = fastmha.plan(q, k, v, precision="medium").products
        assert products == 'float32 ("medium" would permit less: nothing faster for this call here)'
        assert_same([fastmha.attention(q, k, v, precision="medium")], [fastmha.attention(q, k, v)])


@pytest.mark.parametrize("kind", ["high", "medium"])
def test_packed_sequences_take_the_precision_of_their_call(tiles, kind):
    asked = KINDS[kind][1]
    x = operands(kind, 1, 2, 1, 70, 70, 32, 32)
    q, k, v, g = (np.ascontiguousarray(y[0].transpose(1, 0, 2)) for y in x)
    out, lse = fastmha.attention_packed(q, k, v, [70], return_lse=True, algorithm="tiled", precision=asked)
    grads = fastmha.attention_packed_backward(g, q, k, v, out, lse, [70], algorithm="tiled", precision=asked)
    assert_same([y.transpose(1, 0, 2)[None] for y in (out, *grads)] + [lse[None]],
                [y for n, y in enumerate(attend(kind, x)) if n != 1] + [attend(kind, x)[1]])
    assert (out != fastmha.attention_packed(q, k, v, [70], algorithm="tiled")).any()


@pytest.mark.parametrize("wrong", ["", "best", 3, ["high"]])
def test_an_unknown_precision_is_an_error_that_names_it(wrong):
    q, k, v, _ = operands("high", 1, 1, 1, 2, 2, 4, 4)
    for call in (lambda: fastmha.attention(q, k, v, precision=wrong), lambda: fastmha.plan(q, k, v, precision=wrong),
                 lambda: fastmha.attention_packed(q[0, 0, :, None], k[0, 0, :, None], v[0, 0, :, None], [2], precision=wrong)):
        with raises(ValueError, f'precision must be "highest", "high" or "medium", got {wrong!r}'):
            call()
    with raises(ValueError, f'name must be "highest", "high" or "medium", got {wrong!r}'):
        fastmha.set_precision(wrong)


def parts(kind, Lq, Lk, backward=False, **rules):
    q, k, v, _ = operands(kind, 1, 2, 1, Lq, Lk, 32, 32)
    rules |= {"precision": KINDS[kind][1]}
    return precision.parts_of(validate.attention_problem(q, k, v, "BHLD", validate.Rules(**rules)), backward)


def test_two_parts_are_left_to_float32_where_tiles_have_twice_its_rate_alone():
    with selected("amx-emulated"), tuning.using(tuning.DEFAULTS["avx512bf16"]):
        for kind, most in (("bfloat16", 1), ("medium", 1), ("float16", 0), ("high", 0)):
            of, asked = validate.bits(np.empty(0, KINDS[kind][0])).dtype, KINDS[kind][1]
            assert parts(kind, 1000, 1000) == parts(kind, 1000, 1000, backward=True) == most
            assert precision.parts_of_product(of, of, asked, 1000, 1000, 1000) == most


def test_few_rows_tiny_calls_and_odd_scales_are_left_to_vectors():
    with selected("amx-emulated"):
        for kind, most in (("bfloat16", 1), ("medium", 1), ("float16", 2), ("high", 2)):
            least = ((24, 32), (48, 48)) if most == 1 else ((64, 64), (96, 96))
            for backward, (rows, keys) in zip((False, True), least, strict=True):
                assert parts(kind, rows // 2, keys, backward) == most
                assert parts(kind, rows // 2 - 1, 4096, backward) == parts(kind, 4096, keys - 1, backward) == 0
            assert parts(kind, 256, 256, scale=0.0) == parts(kind, 256, 256, scale=1e20) == 0
