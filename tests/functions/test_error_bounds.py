"""`reference.error_bounds`: what plain NumPy errs by lies within them, what a wrong kernel errs by beyond."""

import numpy as np
import pytest
from support import ILL_SCALED, SMALL, draw, draw_ill_scaled, draw_small, every_case, ill_scaled, oracle, run

from fastmha import reference

B, H, HKV, LQ, LK, D, DV = SMALL
RULES = {"plain": {}, "causal": {"is_causal": True}, "softcap": {"softcap": 5.0}}
every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)


def beyond(results, arrays, dtype=np.float32, **rules):
    """The largest error, in bounds, of each of out, lse, grad_q, grad_k, grad_v; infinite where it is no number."""
    exact, bounds = oracle(*arrays, dtype, **rules)
    errors = [np.abs(got.astype(np.float64) - wanted) / bound for got, wanted, bound in zip(results, exact, bounds)]
    return [float(np.nan_to_num(error, nan=np.inf).max(initial=0)) for error in errors]


@ill_scaled
@every_rule
def test_plain_numpy_in_float32_errs_by_less_than_half_of_the_bounds(kind, rules, rng):
    arrays = draw_ill_scaled(kind, rng, 2, 4, 2, 65, 65, 64, 64)
    assert max(beyond(run(reference, *arrays, **rules), arrays, **rules)) < 0.5


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


@every_case
def test_bounds_of_float64_hold_against_extended_precision(rng, keywords):
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("longdouble is no more than double here")
    q, k, v, g = draw_small(rng)
    results = run(reference, q, k, v, g, **keywords)
    exact = run(reference, *(x.astype(np.longdouble) for x in (q, k, v, g)), **keywords)
    for got, wanted, bound in zip(results, exact, reference.error_bounds(q, k, v, g, np.float64, **keywords)):
        finite = np.isfinite(wanted)
        assert (np.abs(got[finite] - wanted[finite]) <= bound[finite]).all()


@every_case
def test_bounds_have_the_shapes_of_the_results_in_either_layout(rng, keywords):
    operands = draw_small(rng)
    by_head = reference.error_bounds(*operands, np.float32, **keywords)
    assert [x.shape for x in by_head] == [(B, H, LQ, DV), (B, H, LQ), (B, H, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV)]
    by_row = reference.error_bounds(*(x.swapaxes(1, 2) for x in operands), np.float32, layout="BLHD", **keywords)
    for x, y in zip(by_head, by_row):
        np.testing.assert_allclose(x, y if y.ndim == 3 else y.swapaxes(1, 2), rtol=1e-9)


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


def test_an_empty_row_and_a_key_that_nobody_attends_have_no_error(rng):
    gone = np.zeros((LQ, LK), bool)
    gone[1] = gone[:, 2] = True
    out, lse, grad_q, grad_k, grad_v = reference.error_bounds(*draw_small(rng), np.float32, mask=gone)
    for none in (out[:, :, 1], lse[:, :, 1], grad_q[:, :, 1], grad_k[:, :, 2], grad_v[:, :, 2]):
        assert none.max() < 1e-35
    assert out[:, :, 0].min() > 1e-9


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
