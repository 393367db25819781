"""The textbook functions, the receipts of plan, and what attention is good for."""

import numpy as np
import pytest
from support import (
    HALVES,
    all_dtypes,
    assert_gradient,
    bits,
    draw,
    eps,
    layouts,
    padded,
    same_bits,
)

import fastmha
from fastmha import reference

EPS = {np.float32: 2e-5, np.float64: 1e-13}  # some hundred roundings of numbers of size 1 to 4
EPS |= {dtype: 2e-5 + 2 * eps(dtype) for dtype in HALVES}  # and one to the dtype


def close(a, b, dtype):
    assert a.dtype == dtype
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, rtol=0, atol=EPS[dtype])


def normal(rng, dtype, *shape):
    return padded(rng.standard_normal(shape).astype(dtype))


def wide(*arrays):
    return [x.astype(np.float64) for x in arrays]


# ----------------------------------------------------------------------------------------- scaled_dot_product_attention


def masks(rng, *shape):
    blocked = rng.random(shape) < 0.4
    return blocked, np.where(blocked, -np.inf, rng.standard_normal(shape))


@all_dtypes
@pytest.mark.parametrize("mask_shape", [None, (5, 7), (3, 5, 7), (3, 1, 7), (1, 7)])
@pytest.mark.parametrize("additive", [False, True])
def test_scaled_dot_product_attention_of_three_axes(isa, dtype, mask_shape, additive, rng):
    Q, K, V = normal(rng, dtype, 3, 5, 4), normal(rng, dtype, 3, 7, 4), normal(rng, dtype, 3, 7, 6)
    mask = None if mask_shape is None else masks(rng, *mask_shape)[additive]
    if additive and mask is not None:
        mask = mask.astype(dtype)
    output, weights = fastmha.scaled_dot_product_attention(Q, K, V, mask)
    wide_mask = mask.astype(np.float64) if additive and mask is not None else mask
    expected, expected_weights = reference.scaled_dot_product_attention(*wide(Q, K, V), wide_mask)
    close(output, expected, dtype)
    close(weights, expected_weights, dtype)


@all_dtypes
@pytest.mark.parametrize("mask_shape", [None, (5, 7), (3, 2, 5, 7), (3, 1, 1, 7), (1, 2, 5, 1)])
def test_scaled_dot_product_attention_of_four_axes(isa, dtype, mask_shape, rng):
    Q, K, V = normal(rng, dtype, 3, 2, 5, 4), normal(rng, dtype, 3, 2, 7, 4), normal(rng, dtype, 3, 2, 7, 6)
    mask = None if mask_shape is None else masks(rng, *mask_shape)[0]
    output, weights = fastmha.scaled_dot_product_attention(Q, K, V, mask)
    expected, expected_weights = reference.scaled_dot_product_attention(*wide(Q, K, V), mask)
    close(output, expected, dtype)
    close(weights, expected_weights, dtype)


@all_dtypes
@pytest.mark.parametrize("L", [1, 2, 17, 300])
def test_attention_and_its_weights_agree(dtype, L, rng):
    q, k, v, _ = draw(rng, 2, 3, 3, L, L, 8, 5, dtype)
    mask = fastmha.create_causal_mask(L)
    output, weights = fastmha.scaled_dot_product_attention(q, k, v, mask)
    close(output, fastmha.attention(*wide(q, k, v), is_causal=True), dtype)
    close(output, weights.astype(np.float64) @ v, dtype)


@all_dtypes
def test_weights_sum_to_one_per_head_and_are_lower_triangular_where_causal(isa, dtype, rng):
    x = normal(rng, dtype, 2, 33, 24)
    for mask in (None, fastmha.create_causal_mask(33)):
        _, weights = fastmha.multi_head_attention_core(x, x, x, 6, mask)
        assert weights.shape == (2, 6, 33, 33)
        assert (weights >= 0).all()
        np.testing.assert_allclose(weights.sum(axis=-1, dtype=np.float64), 1, rtol=10 * EPS[dtype])
    assert not np.triu(weights, 1).any()
    assert (weights[..., 0, 0] == 1).all()


@all_dtypes
@pytest.mark.parametrize(("B", "n", "m", "d"), [(0, 3, 3, 2), (2, 0, 3, 2), (2, 3, 0, 2), (2, 3, 3, 0)])
def test_textbook_functions_of_empty_arrays(dtype, B, n, m, d):
    output, weights = fastmha.scaled_dot_product_attention(
        np.ones((B, n, d), dtype), np.ones((B, m, d), dtype), np.ones((B, m, 4), dtype)
    )
    assert output.shape == (B, n, 4)
    assert weights.shape == (B, n, m)
    np.testing.assert_allclose(output, 1 if m else 0, rtol=1e-6)
    output, weights = fastmha.multi_head_attention_core(
        np.ones((B, n, 2 * d), dtype), np.ones((B, m, 2 * d), dtype), np.ones((B, m, 8), dtype), 2
    )
    assert output.shape == (B, n, 8)
    assert weights.shape == (B, 2, n, m)
    W = {
        "W_Q": np.ones((2 * d, 4), dtype),
        "W_K": np.ones((2 * d, 4), dtype),
        "W_V": np.ones((8, 6), dtype),
        "W_O": np.ones((6, 3), dtype),
    }
    result = fastmha.multi_head_attention(
        np.ones((B, n, 2 * d), dtype), np.ones((B, m, 2 * d), dtype), np.ones((B, m, 8), dtype), 2, W
    )
    assert result.shape == (B, n, 3)


# ----------------------------------------------------------------------------------------------------------- multi-head


@all_dtypes
@pytest.mark.parametrize("num_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_attention_core(isa, dtype, num_heads, causal, rng):
    Q, K, V = normal(rng, dtype, 2, 9, 12), normal(rng, dtype, 2, 9, 12), normal(rng, dtype, 2, 9, 18)
    mask = fastmha.create_causal_mask(9) if causal else None
    output, weights = fastmha.multi_head_attention_core(Q, K, V, num_heads, mask)
    expected, expected_weights = reference.multi_head_attention_core(*wide(Q, K, V), num_heads, mask)
    close(output, expected, dtype)
    close(weights, expected_weights, dtype)


def test_multi_head_attention_core_is_separate_attention_per_head(rng):
    Q, K, V = (normal(rng, np.float64, 2, 5, 12) for _ in range(3))
    output, weights = fastmha.multi_head_attention_core(Q, K, V, 3)
    for h in range(3):
        columns = slice(4 * h, 4 * h + 4)
        one, one_weights = fastmha.scaled_dot_product_attention(Q[..., columns], K[..., columns], V[..., columns])
        close(output[..., columns], one, np.float64)
        close(weights[:, h], one_weights, np.float64)


def drawn_weights(rng, dtype, d_q, d_k, d_v, d_model, d_out, biases=""):
    shapes = {"Q": (d_q, d_model), "K": (d_k, d_model), "V": (d_v, d_model), "O": (d_model, d_out)}
    weights = {
        f"W_{letter}": (normal(rng, dtype, *shape) / np.sqrt(shape[0])).astype(dtype)
        for letter, shape in shapes.items()
    }
    return weights | {f"b_{letter}": normal(rng, dtype, shapes[letter][1]) for letter in biases}


@all_dtypes
@pytest.mark.parametrize("biases", ["", "QKVO", "O", "QV"])
@pytest.mark.parametrize("num_heads", [1, 4])
def test_multi_head_attention(isa, dtype, biases, num_heads, rng):
    q, k, v = normal(rng, dtype, 2, 5, 6), normal(rng, dtype, 2, 7, 9), normal(rng, dtype, 2, 7, 10)
    weights = drawn_weights(rng, dtype, 6, 9, 10, 8, 3, biases)
    mask = rng.random((2, 1, 5, 7)) < 0.3
    result = fastmha.multi_head_attention(q, k, v, num_heads, weights, mask)
    expected = reference.multi_head_attention(
        *wide(q, k, v), num_heads, {n: x.astype(np.float64) for n, x in weights.items()}, mask
    )
    close(result, expected, dtype)


def test_a_bias_of_none_is_no_bias(rng):
    x, weights = normal(rng, np.float64, 1, 4, 6), drawn_weights(rng, np.float64, 6, 6, 6, 6, 6)
    assert same_bits(
        fastmha.multi_head_attention(x, x, x, 2, weights),
        fastmha.multi_head_attention(x, x, x, 2, weights | {"b_Q": None}),
    )


def test_a_bias_on_the_keys_changes_no_weight(rng):
    """It adds the same number to all scores of a query."""
    x, weights = normal(rng, np.float64, 2, 6, 8), drawn_weights(rng, np.float64, 8, 8, 8, 8, 8)
    close(
        fastmha.multi_head_attention(x, x, x, 2, weights | {"b_K": normal(rng, np.float64, 8)}),
        fastmha.multi_head_attention(x, x, x, 2, weights),
        np.float64,
    )


def test_separate_projections_per_head_equal_the_fused_one(rng):
    """Concatenated heads through W_O are the sum over the heads through their rows of W_O."""
    x, weights = normal(rng, np.float64, 2, 6, 8), drawn_weights(rng, np.float64, 8, 8, 8, 12, 5)
    total = 0
    for h in range(4):
        columns = slice(3 * h, 3 * h + 3)
        one, _ = fastmha.scaled_dot_product_attention(
            *(x @ weights[name][:, columns] for name in ("W_Q", "W_K", "W_V"))
        )
        total = total + one @ weights["W_O"][columns]
    close(fastmha.multi_head_attention(x, x, x, 4, weights), total, np.float64)


def test_a_permutation_of_the_sequence_permutes_the_output(rng):
    x, weights, order = (
        normal(rng, np.float64, 1, 6, 8),
        drawn_weights(rng, np.float64, 8, 8, 8, 8, 8),
        [3, 1, 5, 0, 2, 4],
    )
    close(
        fastmha.multi_head_attention(*[x[:, order]] * 3, 2, weights),
        fastmha.multi_head_attention(x, x, x, 2, weights)[:, order],
        np.float64,
    )


# ---------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    "x",
    [
        np.arange(120.0).reshape(2, 5, 12),
        padded(np.arange(120.0).reshape(2, 5, 12)),
        np.arange(120).reshape(2, 5, 12)[:, ::-1, ::-1],
        np.broadcast_to(np.float32(1), (2, 5, 12)),
        np.zeros((0, 5, 12)),
        np.zeros((2, 0, 12)),
        np.asfortranarray(np.ones((2, 5, 12))),
    ],
    ids=["contiguous", "padded", "backwards", "broadcast", "no batch", "no length", "Fortran"],
)
@pytest.mark.parametrize("num_heads", [1, 3, 12])
def test_split_heads_is_a_view_and_combine_heads_its_inverse(x, num_heads):
    heads = fastmha.split_heads(x, num_heads)
    B, L, d_model = x.shape
    assert heads.shape == (B, num_heads, L, d_model // num_heads)
    assert np.shares_memory(heads, x) or not x.size
    for h in range(num_heads):
        assert np.array_equal(heads[:, h], x[..., h * heads.shape[3] : (h + 1) * heads.shape[3]])
    back = fastmha.combine_heads(heads)
    assert np.array_equal(back, x)
    assert np.shares_memory(back, x) or not x.size


def test_combine_heads_of_contiguous_heads_is_a_copy(rng):
    x = rng.standard_normal((2, 3, 5, 4))
    combined = fastmha.combine_heads(x)
    assert combined.shape == (2, 5, 12)
    assert np.array_equal(combined, reference.combine_heads(x))
    assert not np.shares_memory(combined, x)


def test_split_heads_writes_through():
    x = np.zeros((1, 2, 6))
    fastmha.split_heads(x, 3)[0, 1, 1] = 5
    assert x.tolist() == [[[0] * 6, [0, 0, 5, 5, 0, 0]]]


# -------------------------------------------------------------------------------------------------- what attention does


def test_without_the_scale_wide_keys_saturate_and_with_it_they_do_not(rng):
    """Products of d_k = 512 unit normals have a deviation of 22.6: softmax of that is all but one-hot."""
    q, k = rng.standard_normal((2, 1, 8, 64, 512), dtype=np.float32)
    identity = np.broadcast_to(np.eye(64, dtype=np.float32), (1, 8, 64, 64))  # the output is the weights
    unscaled = fastmha.attention(q, k, identity, scale=1.0).max(axis=-1)
    scaled = fastmha.attention(q, k, identity).max(axis=-1)
    assert unscaled.mean() > 0.9
    assert scaled.mean() < 0.3
    assert scaled.max() < 0.8


def test_saturated_weights_pass_no_gradient_and_scaled_ones_do(rng):
    q, k, v, g = rng.standard_normal((4, 1, 4, 32, 512))
    sizes = []
    for scale in (1.0, None):
        out, lse = fastmha.attention(q, k, v, scale=scale, return_lse=True)
        grad_q, _, _ = fastmha.attention_backward(g, q, k, v, out, lse, scale=scale)
        sizes.append(np.median(np.abs(grad_q)) / (scale or 1 / np.sqrt(512)))
    assert sizes[0] < sizes[1] / 100


@all_dtypes
def test_weights_over_512_keys_do_not_vanish(isa, dtype, rng):
    x = normal(rng, dtype, 1, 512, 64)
    output, weights = fastmha.multi_head_attention_core(x, x, x, 4)
    assert (weights > 0).all()
    assert (weights.max(axis=-1) > 1 / 512).all()
    np.testing.assert_allclose(weights.sum(axis=-1, dtype=np.float64), 1, rtol=10 * EPS[dtype])
    assert np.abs(output).max() > 0.1
    equal = fastmha.attention(
        np.zeros((1, 1, 1, 8), dtype), np.zeros((1, 1, 512, 8), dtype), np.ones((1, 1, 512, 1), dtype)
    )
    np.testing.assert_allclose(equal, 1, rtol=EPS[dtype])


@pytest.mark.parametrize(("B", "H", "L"), [(1, 1, 1), (2, 4, 16), (3, 2, 33)])
def test_the_weights_have_batch_times_heads_times_length_squared_elements(B, H, L):
    x = np.ones((B, L, 4 * H))
    _, weights = fastmha.multi_head_attention_core(x, x, x, H)
    assert weights.size == B * H * L * L


@layouts
def test_no_gradient_through_masked_positions(isa, layout, rng):
    q, k, v, g = draw(rng, 2, 4, 2, 6, 9, 3, 5, layout=layout)
    keywords = {"layout": layout, "key_padding_lengths": [4, 9]}
    out, lse = fastmha.attention(q, k, v, return_lse=True, **keywords)
    _, grad_k, grad_v = fastmha.attention_backward(g, q, k, v, out, lse, **keywords)
    for x in (grad_k, grad_v):
        x = x if layout == "BHLD" else x.swapaxes(1, 2)
        assert not bits(x[0, :, 4:]).any()
        assert (np.abs(x[0, :, :4]).max(axis=-1) > 0).all()
        assert (np.abs(x[1]).max(axis=-1) > 0).all()


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True, "offset": 1},
        {"softcap": 1.0},
        {"scale": -0.6},
        {"window": (1, 1), "offset": 0, "key_padding_lengths": [3]},
    ],
    ids=str,
)
def test_gradients_by_central_differences(isa, keywords, rng):
    q, k, v, g = draw(rng, 1, 2, 1, 3, 4, 3, 2)
    out, lse = fastmha.attention(q, k, v, return_lse=True, **keywords)
    grads = fastmha.attention_backward(g, q, k, v, out, lse, **keywords)
    for name, x, grad in zip("qkv", (q, k, v), grads, strict=True):
        assert_gradient(grad, lambda: (fastmha.attention(q, k, v, **keywords) * g).sum(), x, name)


def test_the_gradient_does_not_read_more_than_it_needs_of_the_output(rng):
    """The gradients follow from q, k, v, lse and grad_out; a read-only output of other strides is as good."""
    q, k, v, g = draw(rng, 2, 2, 2, 5, 5, 4, 4)
    out, lse = fastmha.attention(q, k, v, return_lse=True)
    expected = fastmha.attention_backward(g, q, k, v, out, lse)
    out, lse = np.asfortranarray(out), padded(lse)
    out.flags.writeable = lse.flags.writeable = False
    for x, y in zip(fastmha.attention_backward(g, q, k, v, out, lse), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-14)


# ----------------------------------------------------------------------------------------------------------------- plan


def test_the_receipt_of_a_plan_says_what_will_happen(isa, capsys):
    q = np.ones((2, 8, 64, 16), np.float32)
    k = np.ones((2, 2, 70, 32), np.float32)[..., ::2]
    plan = fastmha.plan(q, k, k, is_causal=True, offset=6, num_threads=3, backward=True)
    print(plan)
    receipt = capsys.readouterr().out
    for text in (
        plan.algorithm,
        plan.reasons[plan.algorithm],
        plan.isa,
        "3 threads",
        "float32",
        "B 2",
        "H 8/2",
        "L 64 x 70",
        "D 16",
        "BHLD",
        "forward + backward",
        f"{plan.tile[0]} queries x {plan.tile[1]} keys",
        f"{plan.bytes_copied:,} bytes",
        f"{plan.scratch_bytes:,} bytes",
        f"{plan.balance:.0%}",
        f"{plan.flops / 1e9:.3g} GFLOP",
    ):
        assert text in receipt, text
    assert plan.isa == isa
    assert plan.threads == 3
    assert plan.bytes_copied == 2 * 2 * 2 * 70 * 16 * 4
    assert "forward + backward" not in str(fastmha.plan(q, q, q))


def test_a_plan_gives_a_reason_for_each_algorithm():
    q = np.ones((1, 1, 4, 4))
    plan = fastmha.plan(q, q, q)
    assert plan.algorithm in plan.reasons
    assert all(isinstance(reason, str) and reason for reason in plan.reasons.values())


def test_a_plan_counts_the_products_of_the_pairs_that_are_left():
    q, k, v = np.ones((2, 4, 6, 8)), np.ones((2, 2, 6, 8)), np.ones((2, 2, 6, 5))
    forward, both = 2 * (8 + 5), 2 * (8 + 5) + 2 * (3 * 8 + 2 * 5)
    for keywords, pairs in (
        ({}, 2 * 36),
        ({"is_causal": True}, 2 * 21),
        ({"window": (1, 0)}, 2 * 11),
        ({"window": (None, None)}, 2 * 36),
        ({"key_padding_lengths": [2, 0]}, 12),
        ({"is_causal": True, "offset": np.array([-6, 2])}, 30),
        ({"mask": np.ones((6, 6), bool)}, 2 * 36),
    ):
        assert fastmha.plan(q, k, v, **keywords).flops == 4 * pairs * forward
        assert fastmha.plan(q, k, v, backward=True, **keywords).flops == 4 * pairs * both


def test_a_plan_does_not_look_at_values_and_cannot_be_changed():
    shape = (2, 2, 300, 8)
    plans = [fastmha.plan(*[np.full(shape, value, np.float32)] * 3, num_threads=2) for value in (0, np.nan, np.inf)]
    assert plans[0] == plans[1] == plans[2]
    with pytest.raises(AttributeError):
        plans[0].algorithm = "magic"


@pytest.mark.parametrize("threads", [1, 2, 8, 64])
@pytest.mark.parametrize("backward", [False, True])
def test_the_balance_is_a_share(threads, backward):
    for B, H, L in ((0, 1, 4), (1, 1, 1), (1, 3, 900), (5, 8, 64)):
        q = np.broadcast_to(np.float32(0), (B, H, L, 4))
        plan = fastmha.plan(q, q, q, is_causal=True, num_threads=threads, backward=backward)
        assert 0 < plan.balance <= 1
        assert plan.scratch_bytes >= 0
