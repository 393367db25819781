"""The reference against loops over single numbers, central differences, and the rules that need no numbers."""

import math

import numpy as np
import pytest
from support import ILL_SCALED, draw_ill_scaled, ill_scaled, oracle, run
from support import draw as draw_operands

from fastmha import reference

B, H, HKV, LQ, LK, D, DV = 2, 4, 2, 3, 4, 3, 2

BLOCKED = np.zeros((LQ, LK), bool)
BLOCKED[0, 2] = BLOCKED[2, 0] = BLOCKED[2, 3] = True
PER_HEAD = np.random.default_rng(5).random((B, H, LQ, LK)) < 0.3
ADDITIVE = np.where(PER_HEAD, -np.inf, np.random.default_rng(6).standard_normal((B, H, LQ, LK)))
EMPTY_ROW = np.zeros((1, 1, LQ, LK), bool)
EMPTY_ROW[..., 1, :] = True

CASES = {
    "plain": {},
    "scale and softcap": {"scale": 0.7, "softcap": 1.5},
    "bool mask of two axes": {"mask": BLOCKED},
    "bool mask per head": {"mask": PER_HEAD},
    "bool mask of keys": {"mask": PER_HEAD[:, :1, :1]},
    "additive mask": {"mask": ADDITIVE, "softcap": 2.0},
    "additive mask of two axes": {"mask": ADDITIVE[0, 0]},
    "causal": {"is_causal": True, "offset": 0},
    "causal to the end": {"is_causal": True, "offset": LK - LQ},
    "causal, an offset per batch row": {"is_causal": True, "offset": np.array([1, -1])},
    "window": {"window": (1, 0), "offset": 1},
    "window to the right, an offset per batch row": {"window": (None, 1), "offset": np.array([-2, 1])},
    "window to the left": {"window": (1, None), "offset": 2},
    "padding": {"key_padding_lengths": np.array([3, 0])},
    "empty row": {"mask": EMPTY_ROW},
    "all together": {
        "mask": ADDITIVE, "is_causal": True, "offset": np.array([1, 2]), "window": (2, 3),
        "key_padding_lengths": np.array([4, 3]), "scale": 1.3, "softcap": 3.0,
    },
}  # fmt: skip
every_case = pytest.mark.parametrize("keywords", CASES.values(), ids=CASES.keys())


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def draw(rng):
    shapes = (B, H, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV), (B, H, LQ, DV)
    return [rng.standard_normal(shape) for shape in shapes]


def may_attend(b, h, i, j, mask=None, is_causal=False, offset=0, key_padding_lengths=None, window=None, **_):
    """One pair, straight from the rules."""
    if mask is not None:
        entry = mask[i, j] if mask.ndim == 2 else np.broadcast_to(mask, (B, H, LQ, LK))[b, h, i, j]
        if entry if mask.dtype == bool else entry == -np.inf:
            return False
    if key_padding_lengths is not None and j >= key_padding_lengths[b]:
        return False
    position = i + (offset if np.ndim(offset) == 0 else offset[b])
    left, right = window or (None, None)
    if is_causal and j > position:
        return False
    return (left is None or j >= position - left) and (right is None or j <= position + right)


def allowed_pairs(keywords):
    return np.array(
        [[[[may_attend(b, h, i, j, **keywords) for j in range(LK)] for i in range(LQ)] for h in range(H)]
         for b in range(B)]
    )  # fmt: skip


def attention_by_loops(q, k, v, allowed, mask=None, scale=None, softcap=None, **_):
    out, lse, weights = np.zeros((B, H, LQ, DV)), np.full((B, H, LQ), -np.inf), np.zeros((B, H, LQ, LK))
    for b in range(B):
        for h in range(H):
            g = h // (H // HKV)
            for i in range(LQ):
                exponentials = {}
                for j in range(LK):
                    if not allowed[b, h, i, j]:
                        continue
                    score = sum(q[b, h, i, c] * k[b, g, j, c] for c in range(D))
                    score *= 1 / math.sqrt(D) if scale is None else scale
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if mask is not None and mask.dtype != bool:
                        score += mask[i, j] if mask.ndim == 2 else mask[b, h, i, j]
                    exponentials[j] = math.exp(score)
                total = sum(exponentials.values())
                if exponentials:
                    lse[b, h, i] = math.log(total)
                for j, exponential in exponentials.items():
                    weights[b, h, i, j] = exponential / total
                    for c in range(DV):
                        out[b, h, i, c] += exponential / total * v[b, g, j, c]
    return out, lse, weights


def central_differences(function, x, step=1e-5):
    """Gradient of a scalar function that reads x, which is changed in place and restored."""
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        kept = x[index]
        x[index] = kept + step
        above = function()
        x[index] = kept - step
        below = function()
        x[index] = kept
        gradient[index] = (above - below) / (2 * step)
    return gradient


def assert_gradients_agree(analytic, numeric):
    assert analytic.shape == numeric.shape
    assert np.all(np.abs(analytic - numeric) <= 1e-5 * np.maximum(np.abs(analytic), np.abs(numeric)) + 1e-8)


def forward_backward(q, k, v, grad_out, keywords):
    """out, lse, weights and the three gradients, by the reference."""
    out, lse = reference.attention(q, k, v, return_lse=True, **keywords)
    weights = reference.attention_weights(q, k, **keywords)
    return out, lse, weights, *reference.attention_backward(grad_out, q, k, v, out, lse, **keywords)


def same_bits(a, b):
    return np.ascontiguousarray(a).view(np.int64) == np.ascontiguousarray(b).view(np.int64)


@every_case
def test_forward_equals_loops_over_single_numbers(rng, keywords):
    q, k, v, _ = draw(rng)
    out, lse, weights = attention_by_loops(q, k, v, allowed_pairs(keywords), **keywords)
    found, found_lse = reference.attention(q, k, v, return_lse=True, **keywords)
    np.testing.assert_allclose(found, out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(found_lse, lse, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(reference.attention_weights(q, k, **keywords), weights, rtol=1e-13, atol=1e-14)


@every_case
def test_gradients_equal_central_differences_of_the_loops(rng, keywords):
    q, k, v, grad_out = draw(rng)
    allowed = allowed_pairs(keywords)
    gradients = forward_backward(q, k, v, grad_out, keywords)[3:]
    for x, analytic in zip((q, k, v), gradients, strict=True):
        numeric = central_differences(
            lambda: float(np.sum(grad_out * attention_by_loops(q, k, v, allowed, **keywords)[0])), x
        )
        assert_gradients_agree(analytic, numeric)


@every_case
def test_weights_sum_to_one_or_to_zero_in_an_empty_row_and_are_zero_where_removed(rng, keywords):
    q, k, *_ = draw(rng)
    allowed = allowed_pairs(keywords)
    weights = reference.attention_weights(q, k, **keywords)
    np.testing.assert_allclose(weights.sum(axis=-1), allowed.any(axis=-1), rtol=1e-14)
    assert np.array_equal(weights != 0, allowed)


@every_case
def test_empty_rows_have_no_output_no_weights_and_no_gradient(rng, keywords):
    q, k, v, grad_out = draw(rng)
    empty = ~allowed_pairs(keywords).any(axis=-1)
    out, lse, weights, grad_q, grad_k, grad_v = forward_backward(q, k, v, grad_out, keywords)
    assert all(np.all(x[empty] == 0) for x in (out, weights, grad_q))
    assert np.array_equal(lse == -np.inf, empty)
    grad_out[empty] = q[empty] = np.nan
    after = forward_backward(q, k, v, grad_out, keywords)
    assert all(same_bits(x, y).all() for x, y in zip((out, lse, weights, grad_q, grad_k, grad_v), after, strict=True))


def test_the_cases_contain_empty_rows():
    with_empty_rows = {name for name, keywords in CASES.items() if not allowed_pairs(keywords).any(axis=-1).all()}
    assert {"padding", "empty row", "causal, an offset per batch row"} <= with_empty_rows


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@every_case
def test_a_removed_key_or_value_changes_no_bit_of_the_query(rng, keywords, poison):
    q, k, v, grad_out = draw(rng)
    allowed = allowed_pairs(keywords)
    before = forward_backward(q, k, v, grad_out, keywords)
    for b, g, j in np.ndindex(B, HKV, LK):
        poisoned_k, poisoned_v = k.copy(), v.copy()
        poisoned_k[b, g, j] = poisoned_v[b, g, j] = poison
        after = forward_backward(q, poisoned_k, poisoned_v, grad_out, keywords)
        free = np.ones((B, H, LQ), bool)
        group = slice(g * (H // HKV), (g + 1) * (H // HKV))
        free[b, group] = ~allowed[b, group, :, j]
        for x, y in zip(before[:4], after[:4], strict=True):  # out, lse, weights, grad_q
            assert same_bits(x[free], y[free]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@every_case
def test_a_removed_query_or_output_gradient_changes_no_bit_of_the_key(rng, keywords, poison):
    q, k, v, grad_out = draw(rng)
    allowed = allowed_pairs(keywords)
    before = forward_backward(q, k, v, grad_out, keywords)
    for b, h, i in np.ndindex(B, H, LQ):
        poisoned_q, poisoned_grad = q.copy(), grad_out.copy()
        poisoned_q[b, h, i] = poisoned_grad[b, h, i] = poison
        after = forward_backward(poisoned_q, k, v, poisoned_grad, keywords)
        free = np.ones((B, HKV, LK), bool)
        free[b, h // (H // HKV)] = ~allowed[b, h, i]
        for x, y in zip(before[4:], after[4:], strict=True):  # grad_k, grad_v
            assert same_bits(x[free], y[free]).all()


@every_case
def test_a_nan_that_may_be_attended_reaches_the_rows_that_attend_it(rng, keywords):
    q, k, v, grad_out = draw(rng)
    allowed = allowed_pairs(keywords)
    j = 1
    v[:, :, j] = np.nan
    out, _, weights, grad_q, *_ = forward_backward(q, k, v, grad_out, keywords)
    assert np.array_equal(np.isnan(out).all(axis=-1), allowed[..., j])
    assert np.array_equal(np.isnan(grad_q).all(axis=-1), allowed[..., j])
    assert np.isfinite(weights).all()
    _, k, v, grad_out = draw(rng)
    k[:, :, j] = np.nan
    out, lse, weights, *_ = forward_backward(q, k, v, grad_out, keywords)
    assert np.array_equal(np.isnan(out).all(axis=-1), allowed[..., j])
    assert np.array_equal(np.isnan(lse), allowed[..., j])
    assert np.array_equal(np.isnan(weights), allowed & allowed[..., j, None])
    q, k, v, grad_out = draw(rng)
    grad_out[:, :, 0] = np.nan
    grad_k, grad_v = forward_backward(q, k, v, grad_out, keywords)[4:]
    reached = allowed[:, :, 0].reshape(B, HKV, H // HKV, LK).any(axis=2)
    assert np.array_equal(np.isnan(grad_k).all(axis=-1), reached)
    assert np.array_equal(np.isnan(grad_v).all(axis=-1), reached)


def test_an_infinite_value_that_may_be_attended_is_an_infinite_output(rng):
    q, k, v, _ = draw(rng)
    finite = reference.attention(q, k, v)
    v[0, 0, 1, 0] = np.inf
    out = reference.attention(q, k, v)
    assert np.all(out[0, :2, :, 0] == np.inf)
    out[0, :2, :, 0] = finite[0, :2, :, 0]
    np.testing.assert_allclose(out, finite, rtol=1e-12, atol=1e-14)


def test_a_score_of_minus_infinity_from_the_operands_has_probability_zero():
    q, k = np.ones((1, 1, 2, 1)), np.array([1.0, -np.inf, 1.0]).reshape(1, 1, 3, 1)
    v = np.array([2.0, 8.0, 4.0]).reshape(1, 1, 3, 1)
    assert reference.attention_weights(q, k).tolist() == [[[[0.5, 0.0, 0.5], [0.5, 0.0, 0.5]]]]
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert out.ravel().tolist() == [3.0, 3.0]
    out, lse = reference.attention(q, np.full_like(k, -np.inf), v, return_lse=True)
    assert out.ravel().tolist() == [0.0, 0.0]
    assert lse.ravel().tolist() == [-np.inf, -np.inf]


@every_case
def test_layouts_agree(rng, keywords):
    inputs = draw(rng)
    q, k, v, grad_out = inputs
    expected = forward_backward(q, k, v, grad_out, keywords)
    q, k, v, grad_out = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in inputs)
    out, lse, weights, *gradients = forward_backward(q, k, v, grad_out, {**keywords, "layout": "BLHD"})
    assert out.shape == (B, LQ, H, DV)
    np.testing.assert_allclose(out.swapaxes(1, 2), expected[0], rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-13)
    np.testing.assert_allclose(weights, expected[2], rtol=1e-13)
    for x, y in zip(gradients, expected[3:], strict=True):
        np.testing.assert_allclose(x.swapaxes(1, 2), y, rtol=1e-12, atol=1e-15)


@every_case
def test_float32_stays_float32_and_inputs_stay_unwritten(rng, keywords):
    inputs = draw(rng)
    mask = keywords.get("mask")
    in_double = forward_backward(*inputs, keywords)
    if mask is not None and mask.dtype != bool:
        keywords = {**keywords, "mask": mask.astype(np.float32)}
    inputs = [x.astype(np.float32) for x in inputs]
    for x in inputs:
        x.flags.writeable = False
    for x, y in zip(forward_backward(*inputs, keywords), in_double, strict=True):
        assert (x.dtype, y.dtype) == (np.float32, np.float64)
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("key_width", [0, 3])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "rows", "columns"),
    [(0, 2, 2, 3, 4), (2, 0, 0, 3, 4), (2, 0, 3, 3, 4), (2, 2, 1, 0, 4), (2, 2, 1, 3, 0), (2, 2, 1, 0, 0)],
)
def test_empty_axes_give_empty_or_zero_results(batch, heads, kv_heads, rows, columns, key_width):
    q, k, v = (
        np.ones(shape)
        for shape in (
            (batch, heads, rows, key_width),
            (batch, kv_heads, columns, key_width),
            (batch, kv_heads, columns, 5),
        )
    )
    out, lse = reference.attention(q, k, v, return_lse=True)
    assert np.array_equal(out, np.zeros((batch, heads, rows, 5)))
    assert np.array_equal(lse, np.full((batch, heads, rows), -np.inf))
    for x, gradient in zip((q, k, v), reference.attention_backward(out, q, k, v, out, lse), strict=True):
        assert np.array_equal(gradient, np.zeros(x.shape))


def test_keys_without_width_have_equal_scores(rng):
    q, k, v = np.zeros((1, 1, 2, 0)), np.zeros((1, 1, 3, 0)), rng.standard_normal((1, 1, 3, 4))
    out, lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(axis=2, keepdims=True), out.shape), rtol=1e-14)
    np.testing.assert_allclose(lse, math.log(3), rtol=1e-15)


def test_offset_defaults_to_zero_for_equal_lengths_only(rng):
    q, k, v, _ = draw(rng)
    for keywords in ({"is_causal": True}, {"window": (1, 0)}):
        square = reference.attention(q, k[:, :, :LQ], v[:, :, :LQ], **keywords)
        assert np.array_equal(square, reference.attention(q, k[:, :, :LQ], v[:, :, :LQ], offset=0, **keywords))
        with pytest.raises(ValueError, match=r"offset must be given for 3 queries and 4 keys: usually 0 .* or 1 \("):
            reference.attention(q, k, v, **keywords)


def test_additive_and_boolean_masks_agree(rng):
    q, k, v, grad_out = draw(rng)
    additive = np.where(PER_HEAD, -np.inf, 0.0)
    for x, y in zip(
        forward_backward(q, k, v, grad_out, {"mask": additive}),
        forward_backward(q, k, v, grad_out, {"mask": PER_HEAD}),
        strict=True,
    ):
        assert np.array_equal(x, y)


def test_large_scores_stay_finite(rng):
    q, k, v, grad_out = draw(rng)
    results = forward_backward(1000 * q, 1000 * k, v, grad_out, {})
    assert all(np.isfinite(x).all() for x in results)
    assert np.abs(results[1]).max() > 700


def test_out_is_filled_and_returned(rng):
    q, k, v, _ = draw(rng)
    for layout in ("BHLD", "BLHD"):
        a, b, c = (x if layout == "BHLD" else x.swapaxes(1, 2) for x in (q, k, v))
        expected = reference.attention(a, b, c, layout=layout)
        out = np.empty(expected.shape)
        found, _ = reference.attention(a, b, c, layout=layout, out=out, return_lse=True)
        assert found is out
        assert np.array_equal(out, expected)


def test_algorithm_and_threads_are_ignored(rng):
    q, k, v, grad_out = draw(rng)
    out, lse = reference.attention(q, k, v, return_lse=True, algorithm="tiled", num_threads=3)
    assert np.array_equal(out, reference.attention(q, k, v))
    reference.attention_backward(grad_out, q, k, v, out, lse, algorithm="blas", num_threads=3)


def test_softmax_equals_a_hand_count_and_has_zeros_for_rows_of_minus_infinity():
    logs = np.log([[1.0, 2.0, 5.0], [4.0, 0.5, 0.5]]) + 1000
    np.testing.assert_allclose(reference.softmax(logs), [[0.125, 0.25, 0.625], [0.8, 0.1, 0.1]], rtol=1e-12)
    rows = np.array([[-np.inf, -np.inf], [-np.inf, 3.0], [-np.inf, np.nan]])
    assert np.array_equal(reference.softmax(rows), [[0, 0], [0, 1], [0, np.nan]], equal_nan=True)
    assert reference.softmax(np.zeros((2, 0))).shape == (2, 0)
    assert reference.softmax(np.zeros(4, np.float32)).tolist() == [0.25] * 4


def test_softmax_gradient_equals_central_differences(rng):
    x, grad_output = rng.standard_normal((2, 2, 3, 5))
    analytic = reference.softmax_backward(grad_output, reference.softmax(x))
    numeric = central_differences(lambda: float(np.sum(grad_output * reference.softmax(x))), x)
    assert_gradients_agree(analytic, numeric)


@pytest.mark.parametrize(
    "mask", [None, BLOCKED, PER_HEAD[:, 0], ADDITIVE[:, 0]], ids=["none", "2-d", "3-d", "additive"]
)
def test_scaled_dot_product_attention_is_attention_with_one_head(rng, mask):
    q, k, v, _ = (x[:, 0] for x in draw(rng))
    output, weights = reference.scaled_dot_product_attention(q, k, v, mask)
    for b in range(B):
        scores = q[b] @ k[b].T / math.sqrt(D)
        if mask is not None:
            row_mask = mask if mask.ndim == 2 else mask[b]
            scores = np.where(row_mask, -np.inf, scores) if mask.dtype == bool else scores + row_mask
        exponentials = np.exp(scores)
        expected = exponentials / exponentials.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(weights[b], expected, rtol=1e-13)
        np.testing.assert_allclose(output[b], expected @ v[b], rtol=1e-12, atol=1e-14)


def test_scaled_dot_product_attention_takes_a_head_axis(rng):
    q, k, v, _ = draw(rng)
    output, weights = reference.scaled_dot_product_attention(q[:, :HKV], k, v, PER_HEAD[:, :HKV])
    for h in range(HKV):
        one, one_weights = reference.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h], PER_HEAD[:, h])
        np.testing.assert_allclose(output[:, h], one, rtol=1e-13)
        np.testing.assert_allclose(weights[:, h], one_weights, rtol=1e-13)


def test_the_core_attends_within_slices_of_the_model_width(rng):
    Q, K, V = rng.standard_normal((3, B, LK, 6))
    mask = rng.random((B, 1, LK, LK)) < 0.3
    output, weights = reference.multi_head_attention_core(Q, K, V, 2, mask)
    assert (output.shape, weights.shape) == ((B, LK, 6), (B, 2, LK, LK))
    for h, columns in enumerate((slice(0, 3), slice(3, 6))):
        one, one_weights = reference.scaled_dot_product_attention(
            Q[..., columns], K[..., columns], V[..., columns], mask[:, 0]
        )
        np.testing.assert_allclose(output[..., columns], one, rtol=1e-13)
        np.testing.assert_allclose(weights[:, h], one_weights, rtol=1e-13)


def test_splitting_and_combining_heads_are_inverse(rng):
    x = rng.standard_normal((2, 3, 6))
    heads = reference.split_heads(x, 2)
    assert heads.shape == (2, 2, 3, 3)
    assert np.array_equal(heads[1, 1, 2], x[1, 2, 3:])
    assert np.array_equal(reference.combine_heads(heads), x)


def module_weights(rng, heads, kv_heads, key_width, value_width, d_model, d_out, biases):
    shapes = {
        "W_Q": (d_model, heads * key_width), "W_K": (d_model, kv_heads * key_width),
        "W_V": (d_model, kv_heads * value_width), "W_O": (heads * value_width, d_out),
    }  # fmt: skip
    weights = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if biases:
        weights |= {"b_" + name[2:]: rng.standard_normal(shape[1]) for name, shape in shapes.items()}
    return weights


MODULES = {
    "plain": {"sizes": (2, 2, 3, 3, 6, 6)},
    "causal and padded, with biases": {
        "sizes": (2, 2, 2, 2, 4, 4), "biases": True,
        "keywords": {"is_causal": True, "key_padding_lengths": np.array([3, 2])},
    },
    "grouped heads": {"sizes": (4, 2, 2, 2, 8, 8), "biases": True, "keywords": {"softcap": 1.0, "window": (1, 1)}},
    "cross-attention": {"sizes": (2, 1, 2, 2, 4, 4), "biases": True, "context": True},
    "one head of free widths": {"sizes": (1, 1, 3, 2, 4, 5), "biases": True},
}  # fmt: skip


@pytest.mark.parametrize("case", MODULES.values(), ids=MODULES.keys())
def test_gradients_of_the_whole_module_equal_central_differences(rng, case):
    heads, kv_heads, _, _, d_model, d_out = case["sizes"]
    keywords = case.get("keywords", {})
    weights = module_weights(rng, *case["sizes"], case.get("biases", False))
    X, grad_output = rng.standard_normal((2, 3, d_model)), rng.standard_normal((2, 3, d_out))
    context = rng.standard_normal((2, 4, d_model)) if "context" in case else None
    result = reference.mha_forward_backward(X, weights, heads, kv_heads, context, grad_output, **keywords)

    def loss():
        forward = reference.mha_forward_backward(X, weights, heads, kv_heads, context, **keywords)
        return float(np.sum(grad_output * forward["output"]))

    inputs = {"X": X, **weights} | ({} if context is None else {"context": context})
    assert {name for name in result if name.startswith("grad_")} == {"grad_" + name for name in inputs}
    for name, x in inputs.items():
        assert_gradients_agree(result["grad_" + name], central_differences(loss, x))


def test_the_module_equals_projections_by_hand(rng):
    heads, kv_heads, key_width, value_width, d_model, d_out = sizes = (4, 2, 3, 2, 5, 6)
    weights = module_weights(rng, *sizes, True)
    X, context = rng.standard_normal((2, 3, d_model)), rng.standard_normal((2, 4, d_model))
    result = reference.mha_forward_backward(X, weights, heads, kv_heads, context)
    concat = []
    for h in range(heads):
        g = h // 2
        q_columns = slice(h * key_width, (h + 1) * key_width)
        k_columns = slice(g * key_width, (g + 1) * key_width)
        v_columns = slice(g * value_width, (g + 1) * value_width)
        Q = X @ weights["W_Q"][:, q_columns] + weights["b_Q"][q_columns]
        K = context @ weights["W_K"][:, k_columns] + weights["b_K"][k_columns]
        V = context @ weights["W_V"][:, v_columns] + weights["b_V"][v_columns]
        output, head_weights = reference.scaled_dot_product_attention(Q, K, V)
        concat.append(output)
        for found, expected in (
            (result["Q"][:, h], Q), (result["K"][:, g], K), (result["V"][:, g], V),
            (result["weights"][:, h], head_weights),
        ):  # fmt: skip
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(result["concat"], np.concatenate(concat, axis=-1), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(
        result["output"], np.concatenate(concat, axis=-1) @ weights["W_O"] + weights["b_O"], rtol=1e-11, atol=1e-12
    )
    assert (result["output"].shape, result["lse"].shape) == ((2, 3, d_out), (2, heads, 3))


@pytest.mark.parametrize("biases", [False, True])
def test_the_function_of_a_weight_dictionary_equals_the_module(rng, biases):
    weights = module_weights(rng, 2, 2, 3, 3, 6, 6, biases)
    X, context = rng.standard_normal((2, 3, 6)), rng.standard_normal((2, 4, 6))
    found = reference.multi_head_attention(X, context, context, 2, weights, BLOCKED)
    expected = reference.mha_forward_backward(X, weights, 2, context=context, mask=BLOCKED)["output"]
    np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_two_tokens_worked_by_hand():
    # One head of width 1, scale 1: scores log 1, log 3 for the first query, both 0 for the second.
    q = np.array([1.0, 0.0]).reshape(1, 1, 2, 1)
    k = np.log([1.0, 3.0]).reshape(1, 1, 2, 1)
    v = np.array([4.0, 8.0]).reshape(1, 1, 2, 1)
    out, lse = reference.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out.ravel(), [7.0, 6.0], rtol=1e-15)  # 1/4 * 4 + 3/4 * 8; 1/2 * 4 + 1/2 * 8
    np.testing.assert_allclose(lse.ravel(), [math.log(4), math.log(2)], rtol=1e-15)
    grad_q, grad_k, grad_v = reference.attention_backward(np.ones_like(out), q, k, v, out, lse)
    np.testing.assert_allclose(grad_v.ravel(), [0.75, 1.25], rtol=1e-15)  # 1/4 + 1/2; 3/4 + 1/2
    # grad_scores: 1/4 * (4 - 7), 3/4 * (8 - 7); 1/2 * (4 - 6), 1/2 * (8 - 6)
    np.testing.assert_allclose(grad_k.ravel(), [-0.75, 0.75], rtol=1e-14)
    np.testing.assert_allclose(grad_q.ravel(), [0.75 * math.log(3), math.log(3)], rtol=1e-14)


# ------------------------------------------------------------------------------------------------- the bounds of rounding

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
    arrays = [x.astype(np.float32) for x in draw_operands(rng, 2, 4, 4, 65, 65, 64, 64)]
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
    q, k, v, g = draw_operands(rng, 1, 2, 1, 9, 17, 4, 3)
    ordinary = reference.error_bounds(q, k, v, g, np.float64)
    large = reference.error_bounds(q * 1e-80, k * 1e80, v * 1e160, g * 1e-20, np.float64)
    for bound, same, size in zip(large, ordinary, (1e160, 1, 1e220, 1e60, 1e-20)):
        np.testing.assert_allclose(bound, same * size, rtol=1e-6)


@every_case
def test_bounds_of_float64_hold_against_extended_precision(rng, keywords):
    if np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("longdouble is no more than double here")
    q, k, v, g = draw(rng)
    results = forward_and_backward(q, k, v, g, keywords)
    exact = forward_and_backward(*(x.astype(np.longdouble) for x in (q, k, v, g)), keywords)
    for got, wanted, bound in zip(results, exact, reference.error_bounds(q, k, v, g, np.float64, **keywords)):
        finite = np.isfinite(wanted)
        assert (np.abs(got[finite] - wanted[finite]) <= bound[finite]).all()


def forward_and_backward(q, k, v, g, keywords):
    out, lse = reference.attention(q, k, v, return_lse=True, **keywords)
    return out, lse, *reference.attention_backward(g, q, k, v, out, lse, **keywords)


@every_case
def test_bounds_have_the_shapes_of_the_results_in_either_layout(rng, keywords):
    operands = draw(rng)
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
    out, lse, grad_q, grad_k, grad_v = reference.error_bounds(*draw(rng), np.float32, mask=gone)
    for none in (out[:, :, 1], lse[:, :, 1], grad_q[:, :, 1], grad_k[:, :, 2], grad_v[:, :, 2]):
        assert none.max() < 1e-35
    assert out[:, :, 0].min() > 1e-9


def test_the_sign_of_the_scale_changes_no_bound(rng):
    q, k, v, g = draw(rng)
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
