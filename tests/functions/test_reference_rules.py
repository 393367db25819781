"""Sinks, ALiBi, dropout, gradients of masks and packed sequences in the reference: each by what it equals without the rule."""

import numpy as np
import pytest
from support import (
    ADDITIVE,
    SINKS,
    SLOPES,
    SMALL,
    assert_gradient,
    assert_same,
    draw_small,
    every_case,
    every_rule_call,
    raises,
    results_of,
    run,
)

from fastmha import reference

B, H, HKV, LQ, LK, D, DV = SMALL


WITHOUT_OFFSET = "offset must be given for 3 queries and 4 keys: usually 0 (they begin together) or 1 (they end together)"


def pairs_of(keywords):
    """The removed pairs, (B, H, LQ, LK)."""
    names = ("mask", "is_causal", "offset", "key_padding_lengths", "window", "key_ranges")
    rules = {name: keywords[name] for name in names if name in keywords}
    return np.broadcast_to(reference.removed(LQ, LK, **rules), (B, H, LQ, LK))


def as_mask(keywords):
    """One additive mask per head with everything that the call's masks, causality, windows and padding say, and the rest."""
    mask = keywords.get("mask")
    added = 0 if mask is None or mask.dtype == bool else mask
    whole = np.where(pairs_of(keywords), -np.inf, np.broadcast_to(added, (B, H, LQ, LK)))
    return whole, {name: keywords[name] for name in ("scale", "softcap") if name in keywords}


def close(results, expected):
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)


# ---------------------------------------------------------------------------------------------------------------- gradients

SHAPES = [(B, H, LQ, LK), (1, H, LQ, LK), (B, 1, LQ, LK), (B, H, 1, LK), (B, H, LQ, 1), (1, 1, 1, LK), (1, 1, 1, 1), (LQ, LK)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"softcap": 1.5},
        {"is_causal": True, "offset": np.array([1, 0])},
        {"window": (1, 1), "offset": 1, "alibi": SLOPES, "sinks": SINKS},
        {"key_padding_lengths": np.array([3, 0]), "sinks": SINKS, "softcap": 2.0},
        {
            "dropout": 0.4, "seed": 5, "sinks": SINKS, "alibi": SLOPES, "offset": np.array([0, 2]), "is_causal": True,
            "softcap": 3.0,
        },
    ],
    ids=["plain", "softcap", "causal", "window, alibi, sinks", "padding, sinks, softcap", "dropout and all"],
)  # fmt: skip
def test_gradients_of_operands_sinks_and_mask_equal_central_differences(rng, rules, shape):
    q, k, v, g = draw_small(rng)
    mask, rules = rng.standard_normal(shape), dict(rules)
    wanted = {"q": q, "k": k, "v": v, "mask": mask}
    if "sinks" in rules:
        rules["sinks"] = wanted["sinks"] = rng.standard_normal(H)
    keywords = {**rules, "mask": mask, "need_bias_grad": True}
    found = dict(zip(results_of(keywords), run(reference, q, k, v, g, **keywords)))
    for name, x in wanted.items():
        assert_gradient(found[f"grad_{name}"], lambda: np.sum(g * reference.attention(q, k, v, mask=mask, **rules)), x, name)


@every_rule_call
def test_every_call_has_the_gradients_of_central_differences(rng, keywords):
    q, k, v, g = draw_small(rng)
    forward = {name: x for name, x in keywords.items() if name != "need_bias_grad"}
    results = run(reference, q, k, v, g, **keywords)
    assert len(results) == len(results_of(keywords))
    for name, x, analytic in zip("qkv", (q, k, v), results[2:]):
        assert_gradient(analytic, lambda: np.sum(g * reference.attention(q, k, v, **forward)), x, name)


def test_the_gradient_of_a_mask_is_zero_at_removed_pairs_and_of_what_is_added_behind_the_softcap(rng):
    q, k, v, g = draw_small(rng)
    rules = {"softcap": 1.5, "scale": 0.7, "key_padding_lengths": np.array([4, 2])}
    grad_mask = run(reference, q, k, v, g, mask=ADDITIVE, need_bias_grad=True, **rules)[-1]
    gone = pairs_of({"mask": ADDITIVE, **rules})
    assert np.array_equal(grad_mask != 0, ~gone & ((~gone).sum(axis=-1, keepdims=True) > 1))  # a row of one key has weight 1
    np.testing.assert_allclose(grad_mask.sum(axis=-1), 0, atol=1e-14)


# -------------------------------------------------------------------------------------------------------------------- sinks

@every_case
def test_a_sink_is_one_more_key_with_its_score_and_the_value_zero(rng, keywords):
    q, k, v, g = draw_small(rng)
    mask, rest = as_mask(keywords)
    column = np.broadcast_to(SINKS[:, None, None], (B, H, LQ, 1))
    longer = [np.concatenate([x, np.zeros((B, HKV, 1, x.shape[-1]))], axis=2) for x in (k, v)]
    whole = np.concatenate([mask, column], axis=-1)
    out, lse, *grads, grad_mask = run(reference, q, *longer, g, mask=whole, need_bias_grad=True, **rest)
    found = run(reference, q, k, v, g, sinks=SINKS, **keywords)
    close(found, (out, lse, grads[0], grads[1][:, :, :-1], grads[2][:, :, :-1], grad_mask[..., -1].sum(axis=(0, 2))))
    weights = reference.attention_weights(q, k, sinks=SINKS, **keywords)
    close([weights], [reference.attention_weights(q, longer[0], mask=whole, **rest)[..., :-1]])
    some = ~pairs_of(keywords).all(axis=-1) & np.isfinite(SINKS)[:, None]
    assert (weights.sum(axis=-1)[some] < 1).all()


@every_case
def test_a_sink_of_minus_infinity_changes_no_bit_and_has_no_gradient(rng, keywords):
    q, k, v, g = draw_small(rng)
    *results, grad_sinks = run(reference, q, k, v, g, sinks=np.full(H, -np.inf), **keywords)
    assert_same(results, run(reference, q, k, v, g, **keywords))
    assert grad_sinks.tolist() == [0] * H
    g[:] = np.nan
    assert run(reference, q, k, v, g, sinks=np.full(H, -np.inf), **keywords)[-1].tolist() == [0] * H


@every_case
def test_an_empty_row_has_the_lse_of_its_sink_and_gives_the_sink_no_gradient(rng, keywords):
    q, k, v, g = draw_small(rng)
    empty = pairs_of(keywords).all(axis=-1)
    before = run(reference, q, k, v, g, sinks=SINKS, **keywords)
    assert np.array_equal(before[1][empty], np.broadcast_to(SINKS[:, None], empty.shape)[empty])
    assert all((x[empty] == 0).all() for x in (before[0], before[2], reference.attention_weights(q, k, sinks=SINKS, **keywords)))
    g[empty] = q[empty] = np.nan
    assert_same(run(reference, q, k, v, g, sinks=SINKS, **keywords), before)


def test_keys_that_are_all_removed_leave_the_sinks_alone(rng):
    q, k, v, g = draw_small(rng)
    for mask in (np.ones((LQ, LK), bool), np.full((LQ, LK), -np.inf)):
        out, lse, *grads = run(reference, q, k, v, g * np.nan, sinks=SINKS, mask=mask)
        assert not out.any()
        assert np.array_equal(lse, np.broadcast_to(SINKS[:, None], lse.shape))
        assert not any(x.any() for x in grads)
    out, lse, *grads = run(reference, q, k[:, :, :0], v[:, :, :0], g, sinks=SINKS)
    assert not out.any()
    assert np.array_equal(lse, np.broadcast_to(SINKS[:, None], lse.shape))
    assert not any(x.any() for x in grads)


def test_a_sink_of_nan_makes_the_rows_of_its_head_nan_and_no_others(rng):
    q, k, v, g = draw_small(rng)
    before = run(reference, q, k, v, g, sinks=SINKS)
    out, lse, grad_q, _, _, grad_sinks = run(reference, q, k, v, g, sinks=np.where(np.arange(H) == 1, np.nan, SINKS))
    for x in (out, lse, grad_q):
        assert np.isnan(x[:, 1]).all()
    assert np.isnan(grad_sinks[1])
    others = [0, 2, 3]
    assert_same([x[:, others] for x in (out, lse, grad_q)], [x[:, others] for x in before[:3]])
    assert_same([grad_sinks[others]], [before[5][others]])


def test_sinks_far_above_and_far_below_the_scores_stay_finite(rng):
    q, k, v, g = draw_small(rng)
    for sink in (1e4, -1e4):
        results = run(reference, q, k, v, g, sinks=np.full(H, sink))
        assert all(np.isfinite(x).all() for x in results)
    assert_same(results[:1], run(reference, q, k, v, g)[:1])


def test_parts_of_the_keys_with_the_lse_of_all_have_the_gradients_of_all(rng):
    q, k, v, g = draw_small(rng)
    out, lse, _, grad_k, grad_v, grad_sinks = run(reference, q, k, v, g, sinks=SINKS)
    for part in (slice(0, 2), slice(2, LK)):
        grads = reference.attention_backward(g, q, k[:, :, part], v[:, :, part], out, lse, sinks=SINKS)
        close(grads[1:], (grad_k[:, :, part], grad_v[:, :, part], grad_sinks))


# -------------------------------------------------------------------------------------------------------------------- ALiBi

@every_case
def test_alibi_is_an_additive_mask_of_slopes_times_distances(rng, keywords):
    q, k, v, g = draw_small(rng)
    mask, rest = as_mask(keywords)
    offsets = np.broadcast_to(keywords.get("offset", 0), B)
    for b, h, i, j in np.ndindex(mask.shape):
        mask[b, h, i, j] -= SLOPES[h] * abs(i + int(offsets[b]) - j)
    close(run(reference, q, k, v, g, alibi=SLOPES, **{"offset": 0, **keywords}), run(reference, q, k, v, g, mask=mask, **rest))


def test_alibi_takes_positions_from_each_other_before_it_converts_them():
    """float32 holds no odd number beyond 2**24: of the distances 2**24 + 1, 2**24, 2**24 - 1 only the first is changed."""
    q, k = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 3, 1), np.float32)
    weights = reference.attention_weights(q, k, alibi=np.ones(1, np.float32), offset=2**24 + 1)
    exponentials = np.exp([-1.0, -1.0, 0.0])
    np.testing.assert_allclose(weights.ravel(), exponentials / exponentials.sum(), rtol=1e-6)


def test_alibi_needs_an_offset_where_causality_does(rng):
    q, k, v, _ = draw_small(rng)
    with raises(ValueError, WITHOUT_OFFSET):
        reference.attention(q, k, v, alibi=SLOPES)
    square = reference.attention(q, k[:, :, :LQ], v[:, :, :LQ], alibi=SLOPES)
    assert_same([square], [reference.attention(q, k[:, :, :LQ], v[:, :, :LQ], alibi=SLOPES, offset=0)])


# ------------------------------------------------------------------------------------------------------------------ dropout

@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter, key, words):
    """kat_vectors of Random123, philox4x32 with 10 rounds."""
    counter, key, words = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    assert reference.philox(np.array(counter), tuple(key)).tolist() == words
    together = reference.philox(np.array([[counter, counter]] * 3), tuple(key))
    assert together.tolist() == [[words, words]] * 3
    assert together.dtype == np.uint32


@pytest.mark.parametrize("dropout", [1e-9, 0.1, 0.5, 1 - 1e-12])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF])
def test_a_pair_is_kept_by_the_word_of_its_own_counter(seed, dropout):
    threshold = min(int(dropout * 2**32 + 0.5), 2**32 - 1)
    kept = reference.kept(seed, dropout, 2, 3, 4, 6)
    for b, h, i, j in np.ndindex(kept.shape):
        words = reference.philox(np.array([j // 4, i, h, b]), (seed & 0xFFFFFFFF, seed >> 32))
        assert kept[b, h, i, j] == (int(words[j % 4]) >= threshold)


def test_a_pair_whose_word_is_the_threshold_itself_is_kept():
    word = int(reference.philox(np.zeros(4, int), (0, 0))[1])
    kept = [reference.kept(0, threshold / 2**32, 1, 1, 1, 2)[0, 0, 0, 1] for threshold in (word - 1, word, word + 1)]
    assert kept == [True, True, False]


def test_the_draws_are_these():
    """For implementations elsewhere: rows of batch row 0, head 0, query 0 first."""
    rows = reference.kept(2**40 + 7, 0.3, 2, 2, 2, 9).reshape(8, 9)
    assert ["".join(map(str, row)) for row in rows.astype(int)] == [
        "010111010", "011001010", "110111111", "001010010",
        "110111011", "000111110", "111010110", "011010100",
    ]  # fmt: skip


def test_draws_do_not_depend_on_shapes():
    whole = reference.kept(9, 0.4, 3, 4, 5, 11)
    for b, h, i, j in [(1, 2, 3, 4), (2, 1, 5, 7), (3, 4, 1, 1), (0, 4, 5, 11), (3, 4, 5, 0)]:
        assert np.array_equal(reference.kept(9, 0.4, b, h, i, j), whole[:b, :h, :i, :j])
    assert np.array_equal(reference.kept(9, 0.4, 1, 2, 2, 4, first=(2, 1, 3, 6)), whole[2:, 1:3, 3:, 6:10])


def test_nothing_is_dropped_with_probability_zero():
    assert reference.kept(3, 0.0, 2, 3, 40, 50).all()


@pytest.mark.parametrize("dropout", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 7, 2**63])
def test_as_many_pairs_are_dropped_as_asked_and_neighbours_know_nothing_of_each_other(seed, dropout):
    """Six standard deviations, of 2**18 draws: once in 5e8 such comparisons by chance, and the seeds are fixed."""
    dropped = ~reference.kept(seed, dropout, 8, 8, 64, 64)
    assert abs(dropped.mean() - dropout) < 6 * np.sqrt(dropout * (1 - dropout) / dropped.size)
    others = ~reference.kept(seed + 1, dropout, *dropped.shape), ~reference.kept(seed ^ 1 << 32, dropout, *dropped.shape)
    pairs = [(dropped, other) for other in others]
    for axis, step in [(0, 1), (1, 1), (2, 1), *((3, step) for step in (1, 2, 3, 4, 8))]:
        along = np.moveaxis(dropped, axis, 0)
        pairs.append((along[step:], along[:-step]))
    for x, y in pairs:
        deviation = np.mean((x - dropout) * (y - dropout)) / (dropout * (1 - dropout))  # of variance 1 / n if independent
        assert abs(deviation) < 6 / np.sqrt(x.size)


@every_case
def test_dropout_multiplies_the_weights_and_leaves_lse_alone(rng, keywords):
    q, k, v, g = draw_small(rng)
    factors = reference.kept(21, 0.4, B, H, LQ, LK) / 0.6
    weights, rules = reference.attention_weights(q, k, **keywords), {"dropout": 0.4, "seed": 21, **keywords}
    close([reference.attention_weights(q, k, **rules)], [weights * factors])
    out, lse, _, _, grad_v = run(reference, q, k, v, g, **rules)
    plain_lse = reference.attention(q, k, v, return_lse=True, **keywords)[1]
    assert_same([lse], [plain_lse])
    values = np.repeat(v, H // HKV, axis=1)
    close([out], [(weights * factors) @ values])
    grad_values = (weights * factors).swapaxes(-1, -2) @ g
    close([grad_v], [grad_values.reshape(B, HKV, H // HKV, LK, DV).sum(axis=2)])
    assert (factors == 0).any()
    none = run(reference, q, k, v, g, **{**rules, "dropout": 0.0, "seed": None})
    assert_same(none, run(reference, q, k, v, g, **keywords))


# ---------------------------------------------------------------------------------------------------------- all of the rules

@every_rule_call
def test_layouts_agree_under_every_rule(rng, keywords):
    operands = draw_small(rng)
    by_head = run(reference, *operands, **keywords)
    by_row = run(reference, *(x.swapaxes(1, 2) for x in operands), layout="BLHD", **keywords)
    turned = {"out", "grad_q", "grad_k", "grad_v"}
    close([x.swapaxes(1, 2) if name in turned else x for name, x in zip(results_of(keywords), by_row, strict=True)], by_head)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@every_rule_call
def test_a_removed_pair_changes_no_bit_under_any_rule(rng, keywords, poison):
    q, k, v, g = draw_small(rng)
    gone = pairs_of(keywords)
    before = dict(zip(results_of(keywords), run(reference, q, k, v, g, **keywords)))
    for b, n, j in np.ndindex(B, HKV, LK):
        dirty_k, dirty_v = k.copy(), v.copy()
        dirty_k[b, n, j] = dirty_v[b, n, j] = poison
        after = dict(zip(results_of(keywords), run(reference, q, dirty_k, dirty_v, g, **keywords)))
        free = np.ones((B, H, LQ), bool)
        free[b, n * (H // HKV) : (n + 1) * (H // HKV)] = gone[b, n * (H // HKV) : (n + 1) * (H // HKV), :, j]
        assert_same(*([x[name][free] for name in ("out", "lse", "grad_q")] for x in (after, before)))
        heads = free.all(axis=(0, 2))
        if "grad_sinks" in before:
            assert_same([after["grad_sinks"][heads]], [before["grad_sinks"][heads]])
        if np.shape(before.get("grad_mask")) == (B, H, LQ, LK):
            assert_same([after["grad_mask"][free]], [before["grad_mask"][free]])
    for b, h, i in np.ndindex(B, H, LQ):
        dirty_q, dirty_g = q.copy(), g.copy()
        dirty_q[b, h, i] = dirty_g[b, h, i] = poison
        after = dict(zip(results_of(keywords), run(reference, dirty_q, k, v, dirty_g, **keywords)))
        free = np.ones((B, HKV, LK), bool)
        free[b, h // (H // HKV)] = gone[b, h, i]
        assert_same(*([x[name][free] for name in ("grad_k", "grad_v")] for x in (after, before)))
        if np.shape(before.get("grad_mask")) == (B, H, LQ, LK):
            assert not after["grad_mask"][b, h, i][gone[b, h, i]].any()


@every_rule_call
def test_float32_stays_float32_under_every_rule(rng, keywords):
    operands = draw_small(rng)
    wide = run(reference, *operands, **keywords)
    narrow = {name: x.astype(np.float32) if name in ("sinks", "alibi", "mask") else x for name, x in keywords.items()}
    for x, y in zip(run(reference, *(x.astype(np.float32) for x in operands), **narrow), wide, strict=True):
        assert (x.dtype, y.dtype) == (np.float32, np.float64)
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


def test_the_module_passes_the_rules_on_and_has_a_gradient_of_the_sinks(rng):
    weights = {f"W_{name}": rng.standard_normal((4, 4)) for name in "QKVO"}
    X, g, sinks = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3, 4)), rng.standard_normal(2)
    rules = {"sinks": sinks, "alibi": np.array([0.5, 0.25]), "dropout": 0.3, "seed": 4, "is_causal": True}
    found = reference.mha_forward_backward(X, weights, 2, grad_output=g, **rules)

    def loss():
        return np.sum(g * reference.mha_forward_backward(X, weights, 2, **rules)["output"])

    for name, x in {"X": X, "sinks": sinks, **weights}.items():
        assert_gradient(found[f"grad_{name}"], loss, x, name)


# ------------------------------------------------------------------------------------------------------------------- packed

PACKED = {
    "plain": {},
    "causal and window": {"is_causal": True, "window": (2, None), "offset": 0},
    "an offset per sequence": {"is_causal": True, "offset": np.array([1, 0, -1, 2, 0])},
    "all": {
        "is_causal": True, "offset": np.array([1, 0, 0, 2, 0]), "scale": 0.9, "softcap": 2.0, "sinks": SINKS, "alibi": SLOPES,
        "dropout": 0.3, "seed": 2**33 + 1,
    },
}  # fmt: skip
every_packed = pytest.mark.parametrize("rules", PACKED.values(), ids=PACKED)
LENGTHS_Q, LENGTHS_K = [3, 1, 0, 4, 2], [4, 0, 2, 4, 5]


def draw_packed(rng, lengths_q, lengths_k):
    q, g = rng.standard_normal((sum(lengths_q), H, D)), rng.standard_normal((sum(lengths_q), H, DV))
    return q, rng.standard_normal((sum(lengths_k), HKV, D)), rng.standard_normal((sum(lengths_k), HKV, DV)), g


@every_packed
def test_packed_sequences_are_calls_of_their_own(rng, rules):
    """In a batch of as many rows as sequences, all but one padded: then the draws are those of its row."""
    q, k, v, g = draw_packed(rng, LENGTHS_Q, LENGTHS_K)
    out, lse = reference.attention_packed(q, k, v, LENGTHS_Q, LENGTHS_K, return_lse=True, **rules)
    grads = reference.attention_packed_backward(g, q, k, v, out, lse, LENGTHS_Q, LENGTHS_K, **rules)
    assert (out.shape, lse.shape) == (g.shape, (H, len(q)))
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape, *([(H,)] if "sinks" in rules else [])]
    grad_sinks = 0
    rows = keys = 0
    for s, (n, m) in enumerate(zip(LENGTHS_Q, LENGTHS_K)):
        at, to = slice(rows, rows + n), slice(keys, keys + m)
        rows, keys = rows + n, keys + m
        batch = [np.repeat(x[None], s + 1, axis=0) for x in (q[at], k[to], v[to], g[at])]
        own = {**rules, "layout": "BLHD"}
        if np.ndim(rules.get("offset")):
            own["offset"] = int(rules["offset"][s])
        one, one_lse, *one_grads = (x[s] if x.ndim > 1 else x for x in run(reference, *batch, **own))
        close((out[at], lse[:, at]), (one, one_lse))
        close([x[w] for x, w in zip(grads, (at, to, to))], one_grads[:3])
        if "sinks" in rules:
            grad_sinks += reference.attention_backward(
                np.where(np.arange(s + 1)[:, None, None, None] == s, batch[3], 0), *batch[:3],
                *reference.attention(*batch[:3], return_lse=True, **own), **own,
            )[3]  # fmt: skip
    if "sinks" in rules:
        close([grads[3]], [grad_sinks])
        assert np.array_equal(grad_sinks != 0, np.isfinite(SINKS))


def test_gradients_of_packed_sequences_equal_central_differences(rng):
    q, k, v, g = draw_packed(rng, [2, 3], [3, 2])
    sinks = rng.standard_normal(H)
    rules = {"sinks": sinks, "alibi": SLOPES, "offset": np.array([1, 0]), "dropout": 0.3, "seed": 1, "is_causal": True}
    out, lse = reference.attention_packed(q, k, v, [2, 3], [3, 2], return_lse=True, **rules)
    grads = reference.attention_packed_backward(g, q, k, v, out, lse, [2, 3], [3, 2], **rules)
    for x, analytic in zip((q, k, v, sinks), grads, strict=True):
        assert_gradient(analytic, lambda: np.sum(g * reference.attention_packed(q, k, v, [2, 3], [3, 2], **rules)), x)


def test_packed_keys_are_as_many_as_queries_where_nothing_is_said_and_out_is_filled(rng):
    lengths = [3, 0, 4]
    q, k, v, g = draw_packed(rng, lengths, lengths)
    expected = reference.attention_packed(q, k, v, lengths, lengths, is_causal=True)
    out = np.empty_like(g)
    found = reference.attention_packed(q, k, v, np.array(lengths), is_causal=True, out=out, algorithm="tiled", num_threads=2)
    assert found is out
    assert_same([out], [expected])
    out, lse = reference.attention_packed(q[:0], k[:0], v[:0], [], return_lse=True)
    assert (out.shape, lse.shape) == ((0, H, DV), (H, 0))
    assert [x.shape for x in reference.attention_packed_backward(out, q[:0], k[:0], v[:0], out, lse, [], sinks=SINKS)] == [
        (0, H, D), (0, HKV, D), (0, HKV, DV), (H,)
    ]  # fmt: skip


def test_the_sequences_draw_differently(rng):
    q, k, v, _ = (np.concatenate([x, x]) for x in draw_packed(rng, [4], [4]))
    out = reference.attention_packed(q, k, v, [4, 4], dropout=0.5, seed=0)
    assert not np.array_equal(out[:4], out[4:])
    assert np.array_equal(reference.attention_packed(q, k, v, [4, 4])[:4], reference.attention_packed(q, k, v, [4, 4])[4:])


def test_a_sequence_of_other_lengths_needs_an_offset(rng):
    q, k, v, _ = draw_packed(rng, [2, 3], [2, 4])
    with raises(ValueError, WITHOUT_OFFSET):
        reference.attention_packed(q, k, v, [2, 3], [2, 4], is_causal=True)
