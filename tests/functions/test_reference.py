"""The reference against loops over single numbers, central differences, and the rules that need no numbers."""

import math

import numpy as np
import pytest
from support import ADDITIVE, BLOCKED, PER_HEAD, SMALL, SMALL_CALLS, assert_gradient, assert_same, draw_small, every_case

from fastmha import reference

B, H, HKV, LQ, LK, D, DV = SMALL


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


def poisoned(x, at, poison):
    """x with a row of nothing but the poison."""
    changed = x.copy()
    changed[at] = poison
    return changed


def forward_backward(q, k, v, grad_out, keywords):
    """out, lse, weights and the three gradients, by the reference."""
    out, lse = reference.attention(q, k, v, return_lse=True, **keywords)
    weights = reference.attention_weights(q, k, **keywords)
    return out, lse, weights, *reference.attention_backward(grad_out, q, k, v, out, lse, **keywords)


@every_case
def test_forward_equals_loops_over_single_numbers(rng, keywords):
    q, k, v, _ = draw_small(rng)
    out, lse, weights = attention_by_loops(q, k, v, allowed_pairs(keywords), **keywords)
    found, found_lse = reference.attention(q, k, v, return_lse=True, **keywords)
    np.testing.assert_allclose(found, out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(found_lse, lse, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(reference.attention_weights(q, k, **keywords), weights, rtol=1e-13, atol=1e-14)


@every_case
def test_gradients_equal_central_differences_of_the_loops(rng, keywords):
    q, k, v, grad_out = draw_small(rng)
    allowed = allowed_pairs(keywords)
    gradients = forward_backward(q, k, v, grad_out, keywords)[3:]
    for name, x, analytic in zip("qkv", (q, k, v), gradients, strict=True):
        assert_gradient(analytic, lambda: np.sum(grad_out * attention_by_loops(q, k, v, allowed, **keywords)[0]), x, name)


@every_case
def test_weights_sum_to_one_or_to_zero_in_an_empty_row_and_are_zero_where_removed(rng, keywords):
    q, k, *_ = draw_small(rng)
    allowed = allowed_pairs(keywords)
    weights = reference.attention_weights(q, k, **keywords)
    np.testing.assert_allclose(weights.sum(axis=-1), allowed.any(axis=-1), rtol=1e-14)
    assert np.array_equal(weights != 0, allowed)


@every_case
def test_empty_rows_have_no_output_no_weights_and_no_gradient(rng, keywords):
    q, k, v, grad_out = draw_small(rng)
    empty = ~allowed_pairs(keywords).any(axis=-1)
    out, lse, weights, grad_q, grad_k, grad_v = forward_backward(q, k, v, grad_out, keywords)
    assert all(np.all(x[empty] == 0) for x in (out, weights, grad_q))
    assert np.array_equal(lse == -np.inf, empty)
    grad_out[empty] = q[empty] = np.nan
    after = forward_backward(q, k, v, grad_out, keywords)
    assert_same(after, (out, lse, weights, grad_q, grad_k, grad_v))


def test_the_cases_contain_empty_rows():
    with_empty_rows = {name for name, keywords in SMALL_CALLS.items() if not allowed_pairs(keywords).any(axis=-1).all()}
    assert {"padding", "empty row", "causal, an offset per batch row"} <= with_empty_rows


poisons = pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])


@poisons
@every_case
def test_a_removed_key_or_value_changes_no_bit_of_the_query(rng, keywords, poison):
    q, k, v, grad_out = draw_small(rng)
    allowed = allowed_pairs(keywords)
    before = forward_backward(q, k, v, grad_out, keywords)
    for b, g, j in np.ndindex(B, HKV, LK):
        after = forward_backward(q, poisoned(k, (b, g, j), poison), poisoned(v, (b, g, j), poison), grad_out, keywords)
        group = slice(g * (H // HKV), (g + 1) * (H // HKV))
        free = np.ones((B, H, LQ), bool)
        free[b, group] = ~allowed[b, group, :, j]
        assert_same([x[free] for x in after[:4]], [x[free] for x in before[:4]])  # out, lse, weights, grad_q


@poisons
@every_case
def test_a_removed_query_or_output_gradient_changes_no_bit_of_the_key(rng, keywords, poison):
    q, k, v, grad_out = draw_small(rng)
    allowed = allowed_pairs(keywords)
    before = forward_backward(q, k, v, grad_out, keywords)
    for b, h, i in np.ndindex(B, H, LQ):
        after = forward_backward(poisoned(q, (b, h, i), poison), k, v, poisoned(grad_out, (b, h, i), poison), keywords)
        free = np.ones((B, HKV, LK), bool)
        free[b, h // (H // HKV)] = ~allowed[b, h, i]
        assert_same([x[free] for x in after[4:]], [x[free] for x in before[4:]])  # grad_k, grad_v


@every_case
def test_a_nan_that_may_be_attended_reaches_the_rows_that_attend_it(rng, keywords):
    q, k, v, grad_out = draw_small(rng)
    allowed = allowed_pairs(keywords)
    j = 1
    v[:, :, j] = np.nan
    out, _, weights, grad_q, *_ = forward_backward(q, k, v, grad_out, keywords)
    assert np.array_equal(np.isnan(out).all(axis=-1), allowed[..., j])
    assert np.array_equal(np.isnan(grad_q).all(axis=-1), allowed[..., j])
    assert np.isfinite(weights).all()
    _, k, v, grad_out = draw_small(rng)
    k[:, :, j] = np.nan
    out, lse, weights, *_ = forward_backward(q, k, v, grad_out, keywords)
    assert np.array_equal(np.isnan(out).all(axis=-1), allowed[..., j])
    assert np.array_equal(np.isnan(lse), allowed[..., j])
    assert np.array_equal(np.isnan(weights), allowed & allowed[..., j, None])
    q, k, v, grad_out = draw_small(rng)
    grad_out[:, :, 0] = np.nan
    grad_k, grad_v = forward_backward(q, k, v, grad_out, keywords)[4:]
    reached = allowed[:, :, 0].reshape(B, HKV, H // HKV, LK).any(axis=2)
    assert np.array_equal(np.isnan(grad_k).all(axis=-1), reached)
    assert np.array_equal(np.isnan(grad_v).all(axis=-1), reached)


def test_an_infinite_value_that_may_be_attended_is_an_infinite_output(rng):
    q, k, v, _ = draw_small(rng)
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
    inputs = draw_small(rng)
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
    inputs = draw_small(rng)
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
    q, k, v, _ = draw_small(rng)
    for keywords in ({"is_causal": True}, {"window": (1, 0)}):
        square = reference.attention(q, k[:, :, :LQ], v[:, :, :LQ], **keywords)
        assert np.array_equal(square, reference.attention(q, k[:, :, :LQ], v[:, :, :LQ], offset=0, **keywords))
        with pytest.raises(ValueError, match=r"offset must be given for 3 queries and 4 keys: usually 0 .* or 1 \("):
            reference.attention(q, k, v, **keywords)


def test_additive_and_boolean_masks_agree(rng):
    q, k, v, grad_out = draw_small(rng)
    additive = np.where(PER_HEAD, -np.inf, 0.0)
    for x, y in zip(
        forward_backward(q, k, v, grad_out, {"mask": additive}),
        forward_backward(q, k, v, grad_out, {"mask": PER_HEAD}),
        strict=True,
    ):
        assert np.array_equal(x, y)


def test_large_scores_stay_finite(rng):
    q, k, v, grad_out = draw_small(rng)
    results = forward_backward(1000 * q, 1000 * k, v, grad_out, {})
    assert all(np.isfinite(x).all() for x in results)
    assert np.abs(results[1]).max() > 700


def test_out_is_filled_and_returned(rng):
    q, k, v, _ = draw_small(rng)
    for layout in ("BHLD", "BLHD"):
        a, b, c = (x if layout == "BHLD" else x.swapaxes(1, 2) for x in (q, k, v))
        expected = reference.attention(a, b, c, layout=layout)
        out = np.empty(expected.shape)
        found, _ = reference.attention(a, b, c, layout=layout, out=out, return_lse=True)
        assert found is out
        assert np.array_equal(out, expected)


def test_algorithm_and_threads_are_ignored(rng):
    q, k, v, grad_out = draw_small(rng)
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
    assert_gradient(analytic, lambda: np.sum(grad_output * reference.softmax(x)), x)


@pytest.mark.parametrize(
    "mask", [None, BLOCKED, PER_HEAD[:, 0], ADDITIVE[:, 0]], ids=["none", "2-d", "3-d", "additive"]
)
def test_scaled_dot_product_attention_is_attention_with_one_head(rng, mask):
    q, k, v, _ = (x[:, 0] for x in draw_small(rng))
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
    q, k, v, _ = draw_small(rng)
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
        return np.sum(grad_output * forward["output"])

    inputs = {"X": X, **weights} | ({} if context is None else {"context": context})
    assert {name for name in result if name.startswith("grad_")} == {"grad_" + name for name in inputs}
    for name, x in inputs.items():
        assert_gradient(result["grad_" + name], loss, x, name)


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
