"""`reference.error_bounds`: what plain NumPy errs by lies within them, what a wrong kernel errs by beyond."""

import numpy as np
import pytest
from support import (
    ILL_SCALED,
    SMALL,
    draw,
    draw_ill_scaled,
    draw_small,
    every_case,
    every_rule_call,
    ill_scaled,
    in_float64,
    oracle,
    results_of,
    run,
)

from fastmha import reference

B, H, HKV, LQ, LK, D, DV = SMALL
RULES = {"plain": {}, "causal": {"is_causal": True}, "softcap": {"softcap": 5.0}}
every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)


def beyond(results, arrays, dtype=np.float32, **rules):
    """The largest error, in bounds, of each of `results_of`; infinite where it is no number."""
    exact, bounds = oracle(*arrays, dtype, **rules)
    errors = [np.abs(got.astype(np.float64) - wanted) / bound for got, wanted, bound in zip(results, exact, bounds, strict=True)]
    return [float(np.nan_to_num(error, nan=np.inf).max(initial=0)) for error in errors]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("sink", [100.0, 360.0, 400.0, 600.0, 690.0])
def test_bounds_of_the_smallest_results_are_no_smaller_than_those_of_the_others_times_their_size(sink, dropout, rng):
    """Of which a sink leaves exp(-sink): the squares of errors, and of weights, are no numbers any more."""
    arrays = draw(rng, 1, 1, 1, 5, 7, 8, 8, np.float64)
    keywords = {"dropout": dropout, "seed": 1} if dropout else {}
    large, small = (
        reference.error_bounds(*arrays, np.float64, sinks=np.array([size]), **keywords) for size in (50.0, sink)
    )
    for i in (0, 2, 3, 4):
        assert (small[i] * np.exp(sink - 50.0) >= 0.9 * large[i]).all()


@pytest.mark.parametrize("constant", [1e5, 1e9])
def test_plain_numpy_errs_within_the_bounds_where_nothing_is_left_of_the_scores(constant, rng):
    """All keys of a row masked by one constant: weights of any kind become even ones, and delta is another."""
    for _ in range(20):
        arrays = draw(rng, 1, 2, 1, 40, 3, 128, 8, np.float32)
        mask = np.full((40, 3), -constant, np.float32)
        q, k, v, g = arrays[0] * 2, *arrays[1:]
        assert max(beyond(run(reference, q, k, v, g, mask=mask), (q, k, v, g), mask=mask)) < 1


@ill_scaled
@every_rule
def test_plain_numpy_in_float32_errs_by_less_than_half_of_the_bounds(kind, rules, rng):
    arrays = draw_ill_scaled(kind, rng, 2, 4, 2, 65, 65, 64, 64)
    assert max(beyond(run(reference, *arrays, **rules), arrays, **rules)) < 0.5


HEAD_SINKS, HEAD_SLOPES = np.array([0.0, 1.0, -1.0, 4.0], np.float32), np.array([0.25, 0.0625, 0.3, 3.1], np.float32)
MORE_RULES = {
    "sinks": {"sinks": HEAD_SINKS},
    "alibi": {"alibi": HEAD_SLOPES, "is_causal": True},
    "alibi far away": {"alibi": HEAD_SLOPES, "offset": 10**6},
    "alibi, distances beyond 24 bits": {"alibi": HEAD_SLOPES / 2**20, "offset": 3 * 2**25 + 1},
    "dropout": {"dropout": 0.3, "seed": 5},
    "most dropped": {"dropout": 0.97, "seed": 6, "sinks": HEAD_SINKS},
    "gradient of a mask": {"mask": (2, 4, 65, 65), "need_bias_grad": True},
    "gradient of a mask of two axes": {"mask": (65, 65), "need_bias_grad": True, "dropout": 0.1, "seed": 7},
    "gradient of a mask of keys": {"mask": (2, 1, 1, 65), "need_bias_grad": True, "sinks": HEAD_SINKS},
    "gradient of a mask of queries": {"mask": (1, 4, 65, 1), "need_bias_grad": True, "sinks": HEAD_SINKS},
    "gradient of one number": {"mask": (1, 1, 1, 1), "need_bias_grad": True, "sinks": HEAD_SINKS, "softcap": 5.0},
    "all": {
        "mask": (2, 4, 65, 65), "need_bias_grad": True, "sinks": HEAD_SINKS, "alibi": HEAD_SLOPES, "is_causal": True,
        "dropout": 0.2, "seed": 8, "softcap": 5.0,
    },
}  # fmt: skip
every_further_rule = pytest.mark.parametrize("rules", MORE_RULES.values(), ids=MORE_RULES)


def with_mask(rules):
    """The rules with an additive mask in place of its shape."""
    if "mask" not in rules:
        return rules
    return {**rules, "mask": 3 * np.random.default_rng(3).standard_normal(rules["mask"]).astype(np.float32)}


@ill_scaled
@every_further_rule
def test_plain_numpy_in_float32_errs_by_less_than_half_of_the_bounds_under_further_rules(kind, rules, rng):
    arrays, rules = draw_ill_scaled(kind, rng, 2, 4, 2, 65, 65, 64, 64), with_mask(rules)
    arrays[2] *= np.float32(1 - rules.get("dropout", 0))  # no overflow of what the results are to be
    few_roundings = rules.get("offset", 0) > 65  # of huge numbers: they do not even out, and may nearly reach the bounds
    assert max(beyond(run(reference, *arrays, **rules), arrays, **rules)) < (1 if few_roundings else 0.5)


@ill_scaled
@every_further_rule
def test_bounds_are_finite_and_positive_under_further_rules(kind, rules, rng):
    for dtype in (np.float32, np.float64):
        arrays, wide = in_float64(draw_ill_scaled(kind, rng, 2, 4, 2, 65, 65, 8, 8), with_mask(rules))
        for name, bound in zip(results_of(wide), reference.error_bounds(*arrays, dtype, **wide), strict=True):
            assert np.isfinite(bound).all(), name
            assert (bound > 0).all(), name


def with_bits(x, n):
    """x rounded to n significant bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, n)), exponent - n)


def textbook(arrays, is_causal=False, scale=0.125, width=None, bits=None, peaks=None, pairs=None, by_lse=False, mask=None):
    """Attention in float32, forward and backward, with a fault: operands or exponentials of few bits, other rows' peaks,
    other pairs than is_causal says, probabilities backward that trust lse."""
    q, k, v, g = arrays if width is None else (with_bits(x, width) for x in arrays)
    scores = (q @ k.swapaxes(-1, -2)) * np.float32(scale) + (0 if mask is None else mask)
    gone = np.triu(np.ones(scores.shape[-2:], bool), 1) if is_causal else np.zeros(scores.shape[-2:], bool)
    scores[pairs(scores, gone) if pairs else np.broadcast_to(gone, scores.shape)] = -np.inf
    top = scores.max(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - (peaks(top) if peaks else top))
        total = weights.sum(axis=-1, keepdims=True)
        lse = top + np.log(total)
        weights = (with_bits(weights, bits) if bits else weights) / total
        out = weights @ v
        if by_lse:
            weights = np.exp(scores - lse)
        z = g @ v.swapaxes(-1, -2) - (g * out).sum(axis=-1, keepdims=True)
        grad_scores = weights * z * np.float32(scale)
        columns, grads = weights.swapaxes(-1, -2), grad_scores.swapaxes(-1, -2)
        return out, lse[..., 0], grad_scores @ k, grads @ q, columns @ g


def without_its_peak(scores, gone):
    """One pair less: the key with the largest score of one row."""
    gone = np.broadcast_to(gone, scores.shape).copy()
    gone[0, 0, 30, np.where(gone[0, 0, 30], -np.inf, scores[0, 0, 30]).argmax()] = True
    return gone


def one_key_later(scores, gone):
    return np.broadcast_to(np.triu(gone, 2), scores.shape)


def one_key_earlier(scores, gone):
    return np.broadcast_to(np.triu(np.ones(gone.shape, bool), 0) & (np.arange(len(gone)) > 0), scores.shape)


MOST = [kind for kind in ILL_SCALED if kind != "tiny"]      # where scores are not all 0
FAULTS = {
    "operands of 8 bits, as bfloat16 has": ({"width": 8}, ILL_SCALED, "plain"),
    "operands of 11 bits, as float16 and TF32 have": ({"width": 11}, ILL_SCALED, "plain"),
    "operands of 16 bits": ({"width": 16}, MOST, "plain"),
    "a key dropped": ({"pairs": without_its_peak}, ILL_SCALED, "causal"),
    "a key too many": ({"pairs": one_key_later}, ILL_SCALED, "causal"),
    "a key too few": ({"pairs": one_key_earlier}, ILL_SCALED, "causal"),
    "the scale off by 1e-5": ({"scale": 0.125 * (1 + 1e-5)}, MOST, "plain"),
    "the peak of another row": (
        {"peaks": lambda top: np.roll(top, 1, axis=2)}, ["scores x900", "scores to 1e9", "offset 100", "keys offset 100"], "plain"
    ),
    "exponentials of 12 bits": ({"bits": 12}, [kind for kind in MOST if kind != "scores to 1e9"], "plain"),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "kind"), [(fault, kind) for fault, (_, kinds, _) in FAULTS.items() for kind in kinds])
def test_what_a_wrong_kernel_errs_by_is_beyond_the_bounds(fault, kind, rng):
    arrays = draw_ill_scaled(kind, rng, 2, 4, 4, 65, 65, 64, 64)
    change, _, rules = FAULTS[fault]
    right = beyond(textbook(arrays, **RULES[rules]), arrays, **RULES[rules])
    wrong = beyond(textbook(arrays, **RULES[rules], **change), arrays, **RULES[rules])
    assert max(right) < 0.5
    assert max(wrong) > 1


def changed(which, factor):
    """A further result that is not what it should be."""
    return lambda results, rules: [x * np.float32(factor) if name == which else x for name, x in zip(results_of(rules), results)]


def other(**changes):
    """The results under other rules."""
    return lambda results, rules: {**rules, **{name: change(rules[name]) for name, change in changes.items()}}


WRONG = {
    "a sink off by 1e-4": ({"sinks": HEAD_SINKS}, other(sinks=lambda x: x + np.float32(1e-4))),
    "sinks of 11 bits": ({"sinks": HEAD_SINKS / 3}, other(sinks=lambda x: with_bits(x, 11))),
    "no sinks": ({"sinks": HEAD_SINKS}, other(sinks=lambda x: np.full_like(x, -np.inf))),
    "a sink on another head": ({"sinks": HEAD_SINKS}, other(sinks=lambda x: np.roll(x, 1))),
    "slopes of 11 bits": ({"alibi": HEAD_SLOPES, "offset": 0}, other(alibi=lambda x: with_bits(x, 11))),
    "distances off by one": ({"alibi": HEAD_SLOPES, "offset": 0}, other(offset=lambda x: x + 1)),
    "draws of another seed": ({"dropout": 0.1, "seed": 1}, other(seed=lambda x: 2)),
    "a probability of dropout off by 1e-5": ({"dropout": 0.1, "seed": 1}, other(dropout=lambda p: p + 1e-5)),
    "gradient of the sinks off by 1e-4": ({"sinks": HEAD_SINKS}, changed("grad_sinks", 1 + 1e-4)),
    "gradient of the sinks with the other sign": ({"sinks": HEAD_SINKS}, changed("grad_sinks", -1)),
    "gradient of the mask with the scale": ({"mask": (2, 4, 65, 65), "need_bias_grad": True}, changed("grad_mask", 0.125)),
    "gradient of the mask off by 1e-4": ({"mask": (2, 4, 65, 65), "need_bias_grad": True}, changed("grad_mask", 1 + 1e-4)),
    "gradient of a mask of keys off by 1e-4": ({"mask": (1, 1, 1, 65), "need_bias_grad": True}, changed("grad_mask", 1 + 1e-4)),
}


@pytest.mark.parametrize(("rules", "fault"), WRONG.values(), ids=WRONG)
def test_what_a_kernel_errs_by_that_reads_a_rule_wrongly_is_beyond_the_bounds(rules, fault, rng):
    arrays, rules = draw_ill_scaled("unit", rng, 2, 4, 4, 65, 65, 64, 64), with_mask(rules)
    results = run(reference, *arrays, **rules)
    assert max(beyond(results, arrays, **rules)) < 0.5
    wrong = fault(results, rules)
    wrong = run(reference, *arrays, **wrong) if isinstance(wrong, dict) else wrong
    assert max(beyond(wrong, arrays, **rules)) > 1


def test_a_backward_pass_that_trusts_a_large_lse_is_beyond_the_bounds(rng):
    """All probabilities of a row are 1: each could be, but not all of them."""
    arrays = [x.astype(np.float32) for x in draw(rng, 2, 4, 4, 65, 65, 64, 64)]
    mask = np.full((65, 65), np.float32(-1e9))
    for by_lse in (False, True):
        worst = max(beyond(textbook(arrays, mask=mask, by_lse=by_lse), arrays, mask=mask))
        assert (worst > 1) == by_lse


@ill_scaled
@every_rule
def test_bounds_are_finite_and_positive(kind, rules, rng):
    for dtype in (np.float32, np.float64):
        arrays = draw_ill_scaled(kind, rng, 1, 2, 1, 9, 9, 4, 3)
        for low in (0, -1e9, np.finfo(dtype).min):
            mask = np.where(rng.random((9, 9)) < 0.5, low, 0)
            mask[3] = low
            for bound in reference.error_bounds(*(x.astype(np.float64) for x in arrays), dtype, mask=mask, **rules):
                assert np.isfinite(bound).all()
                assert (bound > 0).all()


def test_bounds_of_float64_do_not_overflow_before_the_results_do(rng):
    q, k, v, g = draw(rng, 1, 2, 1, 9, 17, 4, 3)
    ordinary = reference.error_bounds(q, k, v, g, np.float64)
    large = reference.error_bounds(q * 1e-80, k * 1e80, v * 1e160, g * 1e-20, np.float64)
    for bound, same, size in zip(large, ordinary, (1e160, 1, 1e220, 1e60, 1e-20)):
        np.testing.assert_allclose(bound, same * size, rtol=1e-6)


def in_longdouble(keywords):
    names = {name for name in ("sinks", "alibi", "mask") if name in keywords and keywords[name].dtype != bool}
    return {name: x.astype(np.longdouble) if name in names else x for name, x in keywords.items()}


@every_case
def test_bounds_of_float64_hold_against_extended_precision(rng, keywords):
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("longdouble is no more than double here")
    q, k, v, g = draw_small(rng)
    results = run(reference, q, k, v, g, **keywords)
    exact = run(reference, *(x.astype(np.longdouble) for x in (q, k, v, g)), **in_longdouble(keywords))
    for got, wanted, bound in zip(results, exact, reference.error_bounds(q, k, v, g, np.float64, **keywords), strict=True):
        finite = np.isfinite(wanted)
        assert (np.abs(got[finite] - wanted[finite]) <= bound[finite]).all()


@every_rule_call
def test_bounds_of_float64_hold_against_extended_precision_under_further_rules(rng, keywords):
    test_bounds_of_float64_hold_against_extended_precision(rng, keywords)


@every_case
def test_bounds_have_the_shapes_of_the_results_in_either_layout(rng, keywords):
    operands = draw_small(rng)
    by_head = reference.error_bounds(*operands, np.float32, **keywords)
    further = [np.shape(keywords[name[5:]]) for name in results_of(keywords)[5:]]
    shapes = [(B, H, LQ, DV), (B, H, LQ), (B, H, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV), *further]
    assert [x.shape for x in by_head] == shapes
    by_row = reference.error_bounds(*(x.swapaxes(1, 2) for x in operands), np.float32, layout="BLHD", **keywords)
    turned = {"out", "grad_q", "grad_k", "grad_v"}
    for name, x, y in zip(results_of(keywords), by_head, by_row, strict=True):
        np.testing.assert_allclose(x, y.swapaxes(1, 2) if name in turned else y, rtol=1e-9)


@every_rule_call
def test_bounds_have_the_shapes_of_the_results_in_either_layout_under_further_rules(rng, keywords):
    test_bounds_have_the_shapes_of_the_results_in_either_layout(rng, keywords)


@pytest.mark.parametrize(
    "sizes", [(0, 2, 2, 3, 4, 3, 2), (2, 0, 0, 3, 4, 3, 2), (2, 2, 2, 0, 4, 3, 2), (2, 2, 2, 3, 0, 3, 2), (2, 2, 1, 3, 4, 0, 2),
              (2, 2, 1, 3, 4, 3, 0)]
)  # fmt: skip
def test_bounds_of_empty_arrays(sizes, rng):
    batch, heads, kv_heads, rows, keys, width, value_width = sizes
    shapes = (batch, heads, rows, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, value_width)
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    g = rng.standard_normal((batch, heads, rows, value_width))
    found = reference.error_bounds(q, k, v, g, np.float32)
    assert [x.shape for x in found] == [g.shape, g.shape[:3], q.shape, k.shape, v.shape]
    assert all(np.isfinite(x).all() for x in found)
    mask, sinks = np.zeros((rows, keys)), np.zeros(heads)
    more = reference.error_bounds(
        q, k, v, g, np.float32, sinks=sinks, alibi=sinks, offset=0, dropout=0.5, seed=1, mask=mask, need_bias_grad=True
    )
    assert [x.shape for x in more] == [*(x.shape for x in found), sinks.shape, mask.shape]
    assert all(np.isfinite(x).all() for x in more)


def test_an_empty_row_and_a_key_that_nobody_attends_have_no_error(rng):
    gone = np.zeros((LQ, LK), bool)
    gone[1] = gone[:, 2] = True
    out, lse, grad_q, grad_k, grad_v = reference.error_bounds(*draw_small(rng), np.float32, mask=gone)
    for none in (out[:, :, 1], lse[:, :, 1], grad_q[:, :, 1], grad_k[:, :, 2], grad_v[:, :, 2]):
        assert none.max() < 1e-35
    assert out[:, :, 0].min() > 1e-9


def test_a_sink_of_minus_infinity_changes_no_bound_and_a_row_of_nothing_else_has_no_error(rng):
    operands, gone = draw_small(rng), np.zeros((LQ, LK), bool)
    gone[1] = True
    plain = reference.error_bounds(*operands, np.float32, mask=gone)
    *same, grad_sinks = reference.error_bounds(*operands, np.float32, mask=gone, sinks=np.full(H, -np.inf))
    for x, y in zip(same, plain, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-37)
    assert grad_sinks.max() < 1e-30
    out, _, grad_q, _, _, grad_sinks = reference.error_bounds(*operands, np.float32, mask=gone | True, sinks=np.ones(H))
    assert max(x.max() for x in (out, grad_q, grad_sinks)) < 1e-30


def test_the_only_key_of_a_row_errs_by_a_few_roundings_behind_dropout_however_its_score_errs(rng):
    q, k, v, g = draw(rng, 2, 4, 4, 65, 1, 64, 64)
    rules = {"dropout": 0.5, "seed": 4}
    bound = reference.error_bounds(q * 1e3, k * 1e3, v, g, np.float32, **rules)[0]
    out = reference.attention(q, k, v, **rules)
    assert (np.abs(out) > 0).mean() == pytest.approx(0.5, abs=0.1)
    assert (bound <= 16 * 2.0**-24 * np.abs(out) + 1e-30).all()
    assert (bound >= 4 * 2.0**-24 * np.abs(out)).all()


def test_the_sign_of_the_scale_changes_no_bound(rng):
    q, k, v, g = draw_small(rng)
    for x, y in zip(
        reference.error_bounds(q, k, v, g, np.float32, scale=-0.7), reference.error_bounds(-q, k, v, g, np.float32, scale=0.7)
    ):
        np.testing.assert_array_equal(x, y)


def test_a_product_errs_within_its_bounds_and_without_a_term_beyond_them(rng):
    for terms in (1, 2, 7, 64, 1000):
        a, b = (rng.standard_normal(shape).astype(np.float32) + 3 for shape in ((40, terms), (terms, 50)))
        wide = a.astype(np.float64), b.astype(np.float64)
        bounds, exact = reference.product_error_bounds(*wide, np.float32), wide[0] @ wide[1]
        one_by_one = np.zeros((40, 50), np.float32)
        for i in range(terms):
            one_by_one += a[:, i, None] * b[i]
        for product in (a @ b, one_by_one):
            assert (np.abs(product - exact) <= 0.6 * bounds).all()
        assert (np.abs(wide[0][:, 1:] @ wide[1][1:] - exact) > bounds).any()
        half = a.astype(np.float16).astype(np.float32)
        assert (np.abs(half @ b - exact) > bounds).any()
