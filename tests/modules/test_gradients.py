"""Every gradient against central differences in float64, and what a gradient must not depend on."""

import numpy as np
import pytest
from support import assert_gradient, normal

import fastmha

B, L, LK, D_MODEL, HEADS = 2, 4, 5, 6, 2


def assert_module_gradients(m, X, context=None, **keywords):
    """Of every weight, every bias, X and the context."""
    for i, (name, view) in enumerate(m.parameters().items()):
        if name[0] == "b":
            view[...] = normal(*view.shape, seed=20 + i)
    if context is not None:
        keywords["context"] = context
    grad_output = normal(*m.forward(X, **keywords).shape, seed=30)

    def loss():
        return (m.forward(X, training=False, **keywords) * grad_output).sum()

    m.forward(X, **keywords)
    grad_X = m.backward(grad_output)
    assert_gradient(grad_X, loss, X, "X")
    pair = isinstance(context, tuple)
    for gradient, x in zip(m.grad_context, context) if pair else [] if context is None else [(m.grad_context, context)]:
        assert_gradient(gradient, loss, x, "context")
    for name, gradient in m.gradients().items():
        assert np.abs(gradient).max() > 1e-3 or name == "b_K", name  # nothing to compare would agree, too
        assert_gradient(gradient, loss, m.parameters()[name], name)


# -------------------------------------------------------------------------------------------------------------- modules

ADDITIVE = normal(B, HEADS, L, L, seed=3)
ADDITIVE[:, :, 1, :2] = -np.inf
ADDITIVE[1, 0, 2] = -np.inf  # an empty row
MASKS = {
    "no mask": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_lengths": np.array([4, 2])},
    "causal and padding": {"is_causal": True, "key_padding_lengths": np.array([4, 2])},
    "padding on the left": {"is_causal": True, "key_ranges": (np.array([1, 2]), None)},
}
MORE = {
    "softcap": {"softcap": 0.8},
    "window": {"window": (1, 1)},
    "causal window": {"window": (1, None), "is_causal": True},
    "offset per batch row": {"is_causal": True, "offset": np.array([1, -1])},
    "bool mask": {"mask": normal(B, HEADS, L, L, seed=4) > 0.5},
    "additive mask": {"mask": ADDITIVE},
    "all together": {"mask": ADDITIVE, "window": (2, 1), "softcap": 1.1, "key_padding_lengths": np.array([4, 3])},
}
CROSS = {
    "no mask": {},
    "causal": {"is_causal": True, "offset": LK - L},
    "padding": {"key_padding_lengths": np.array([5, 2])},
    "causal and padding": {"is_causal": True, "offset": np.array([1, 0]), "key_padding_lengths": np.array([5, 2])},
    "softcap and window": {"softcap": 0.8, "window": (1, 1), "offset": 1},
}


def cases(masks):
    return pytest.mark.parametrize("keywords", masks.values(), ids=masks.keys())


@cases(MASKS | MORE)
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
@pytest.mark.parametrize("use_bias", [False, True])
def test_multi_head_attention(keywords, layout, use_bias):
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, use_bias=use_bias, dtype=np.float64, layout=layout, rng=0)
    assert_module_gradients(m, normal(B, L, D_MODEL), **keywords)


@cases(MASKS | MORE)
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_grouped_query_attention(keywords, num_kv_heads):
    m = fastmha.MultiHeadAttention(8, 4, num_kv_heads=num_kv_heads, use_bias=True, dtype=np.float64, rng=0)
    mask = keywords.get("mask")
    if mask is not None:
        keywords = {**keywords, "mask": np.concatenate([mask, mask[:, ::-1]], axis=1)}
    assert_module_gradients(m, normal(B, L, 8), **keywords)


@cases(CROSS)
@pytest.mark.parametrize("num_kv_heads", [2, 1])
@pytest.mark.parametrize("use_bias", [False, True])
def test_cross_attention(keywords, num_kv_heads, use_bias):
    m = fastmha.MultiHeadAttention(
        D_MODEL, HEADS, num_kv_heads=num_kv_heads, use_bias=use_bias, dtype=np.float64, rng=0
    )  # fmt: skip
    assert_module_gradients(m, normal(B, L, D_MODEL), normal(B, LK, D_MODEL, seed=2), **keywords)


WIDTHS = {
    "a pair": {},
    "head_dim": {"head_dim": 2, "use_bias": "out"},
    "head_dim, grouped": {"head_dim": 7, "num_kv_heads": 1, "use_bias": "qkv"},
    "kdim = vdim": {"kdim": 3, "vdim": 3, "use_bias": "qkv"},
    "kdim": {"kdim": 5, "use_bias": "out"},
    "vdim": {"vdim": 4, "num_kv_heads": 1, "use_bias": True},
    "all": {"head_dim": 5, "kdim": 4, "vdim": 7, "use_bias": "qkv"},
}


def cases_of_widths(names):
    names = list(names)
    return pytest.mark.parametrize("widths", [WIDTHS[name] for name in names], ids=names)


@cases(CROSS)
@cases_of_widths(WIDTHS)
def test_keys_and_values_of_their_own_widths(keywords, widths):
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, dtype=np.float64, rng=0, **widths)
    pair = normal(B, LK, m.kdim, seed=2), normal(B, LK, m.vdim, seed=5)
    assert_module_gradients(m, normal(B, L, D_MODEL), pair, **keywords)


@cases(CROSS)
@cases_of_widths(name for name, widths in WIDTHS.items() if widths.get("kdim") == widths.get("vdim"))
def test_a_context_of_its_own_width(keywords, widths):
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, dtype=np.float64, rng=0, **widths)
    assert_module_gradients(m, normal(B, L, D_MODEL), normal(B, LK, m.kdim, seed=2), **keywords)


@cases(MASKS)
@cases_of_widths(name for name, widths in WIDTHS.items() if "kdim" not in widths and "vdim" not in widths)
def test_heads_of_their_own_width(keywords, widths):
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, dtype=np.float64, rng=0, **widths)
    assert_module_gradients(m, normal(B, L, D_MODEL), **keywords)


@cases(MASKS)
@pytest.mark.parametrize(("d_k", "d_v", "d_out"), [(2, 5, 3), (5, 2, 6)])
@pytest.mark.parametrize("use_bias", [False, True])
def test_self_attention_with_free_widths(keywords, d_k, d_v, d_out, use_bias):
    m = fastmha.SelfAttention(D_MODEL, d_k, d_v, d_out, use_bias=use_bias, dtype=np.float64, rng=0)
    assert_module_gradients(m, normal(B, L, D_MODEL), **keywords)


# ------------------------------------------------------------------------------------------------- the bias of the keys


@cases(MASKS)
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_gradient_of_b_k_is_zero_because_softmax_ignores_a_shift_of_its_row(keywords, num_kv_heads):
    """b_K adds the same vector to every key: all scores q_i . (k_j + b) of query i move by q_i . b, and
    softmax(s + c) = softmax(s). So neither the output nor the loss depends on b_K."""
    m = fastmha.MultiHeadAttention(
        D_MODEL, HEADS, num_kv_heads=num_kv_heads, use_bias=True, dtype=np.float64, rng=0
    )  # fmt: skip
    m.b_Q = normal(D_MODEL, seed=2)
    X = normal(B, L, D_MODEL)
    before = m.forward(X, **keywords)
    m.backward(normal(B, L, D_MODEL, seed=3))
    np.testing.assert_allclose(m.grad_b_K, 0, rtol=0, atol=1e-14)
    assert np.abs(m.grad_b_Q).min() > 1e-4
    m.b_K = 5 * normal(*m.b_K.shape, seed=4)
    np.testing.assert_allclose(m.forward(X, **keywords), before, rtol=1e-12, atol=1e-13)


def test_gradient_of_b_k_is_not_zero_under_a_softcap_which_bends_the_shift():
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, use_bias=True, dtype=np.float64, rng=0)
    m.b_Q = normal(D_MODEL, seed=2)
    m.forward(normal(B, L, D_MODEL), softcap=0.5)
    m.backward(normal(B, L, D_MODEL, seed=3))
    assert np.abs(m.grad_b_K).max() > 1e-3


# ----------------------------------------------------------------------------------------------------- masked positions


def test_no_gradient_flows_back_from_a_query_to_later_positions_when_causal():
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, use_bias=True, dtype=np.float64, rng=0)
    m.forward(normal(B, L, D_MODEL), is_causal=True)
    for i in range(L):
        grad_output = np.zeros((B, L, D_MODEL))
        grad_output[:, i] = normal(B, D_MODEL)
        grad_X = m.backward(grad_output)
        np.testing.assert_array_equal(grad_X[:, i + 1 :], 0)
        assert (np.abs(grad_X[:, : i + 1]).max(axis=(0, 2)) > 1e-6).all()


def test_no_gradient_reaches_padded_keys():
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, use_bias=True, dtype=np.float64, rng=0)
    m.forward(normal(B, L, D_MODEL), context=normal(B, LK, D_MODEL, seed=2), key_padding_lengths=np.array([5, 2]))
    m.backward(normal(B, L, D_MODEL, seed=3))
    np.testing.assert_array_equal(m.grad_context[1, 2:], 0)
    assert (np.abs(m.grad_context[0]).max(axis=1) > 1e-6).all()
    assert (np.abs(m.grad_context[1, :2]).max(axis=1) > 1e-6).all()


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_no_gradient_passes_a_masked_pair(kind):
    """Key 3 is masked for every query, query 1 may attend nothing."""
    mask = np.zeros((L, LK), bool)
    mask[:, 3] = mask[1] = True
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, dtype=np.float64, rng=0)
    m.forward(
        normal(B, L, D_MODEL), mask if kind == "bool" else np.where(mask, -np.inf, 0.0), context=normal(B, LK, D_MODEL)
    )  # fmt: skip
    grad_X = m.backward(normal(B, L, D_MODEL, seed=3))
    np.testing.assert_array_equal(grad_X[:, 1], 0)
    np.testing.assert_array_equal(m.grad_context[:, 3], 0)
    assert (np.abs(grad_X[:, [0, 2, 3]]).max(axis=2) > 1e-6).all()
    assert (np.abs(m.grad_context[:, [0, 1, 2, 4]]).max(axis=2) > 1e-6).all()


# ------------------------------------------------------------------------------------------------------------ functions


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 1), (2, 1, 3, 17)])
def test_softmax_backward(shape):
    x, g = normal(*shape), normal(*shape, seed=2)
    analytic = fastmha.softmax_backward(g, fastmha.softmax(x))
    assert_gradient(analytic, lambda: (fastmha.softmax(x) * g).sum(), x, "x")


def test_softmax_backward_of_removed_entries_is_zero():
    x, g = normal(3, 6), normal(3, 6, seed=2)
    x[0, 2] = x[1] = -np.inf
    gradient = fastmha.softmax_backward(g, fastmha.softmax(x))
    np.testing.assert_array_equal(gradient[1], 0)
    assert gradient[0, 2] == 0
    np.testing.assert_allclose(gradient.sum(-1), 0, atol=1e-15)


FUNCTION_ADDITIVE = normal(B, 4, L, LK, seed=3)
FUNCTION_ADDITIVE[:, :, 1, :2] = -np.inf
FUNCTION_ADDITIVE[1, 0, 2] = -np.inf
FUNCTIONS = {
    "no mask": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 0.8},
    "causal": {"is_causal": True, "offset": 0},
    "causal to the end": {"is_causal": True, "offset": LK - L},
    "causal, offset per batch row": {"is_causal": True, "offset": np.array([2, -1])},
    "window": {"window": (1, 1), "offset": 1},
    "window to the left": {"window": (1, None), "offset": 1},
    "window to the right": {"window": (None, 0), "offset": 1},
    "padding": {"key_padding_lengths": np.array([5, 2])},
    "a row without keys": {"key_padding_lengths": np.array([5, 0])},
    "key ranges": {"key_ranges": (np.array([1, 3]), np.array([4, 5]))},
    "padding on the left, causal": {"key_ranges": ([2, 0], None), "is_causal": True, "offset": 2},
    "bool, two axes": {"mask": normal(L, LK, seed=4) > 0.5},
    "bool, per head": {"mask": normal(B, 4, L, LK, seed=5) > 0.5},
    "bool, keys alone": {"mask": normal(B, 1, 1, LK, seed=6) > 0.5},
    "additive, two axes": {"mask": normal(L, LK, seed=7)},
    "additive, per head, with -inf": {"mask": FUNCTION_ADDITIVE},
    "additive and softcap": {"mask": FUNCTION_ADDITIVE, "softcap": 1.3},
    "all together": {
        "mask": FUNCTION_ADDITIVE, "is_causal": True, "offset": np.array([1, 2]), "window": (2, 3), "scale": 0.9,
        "softcap": 2.0, "key_padding_lengths": np.array([5, 4]),
    },
}  # fmt: skip


@cases(FUNCTIONS)
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_backward(keywords, layout, kv_heads):
    width, v_width = 3, 2
    q, k = normal(B, 4, L, width), normal(B, kv_heads, LK, width, seed=2)
    v, grad_out = normal(B, kv_heads, LK, v_width, seed=8), normal(B, 4, L, v_width, seed=9)
    if layout == "BLHD":
        q, k, v, grad_out = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, grad_out))

    def loss():
        return (fastmha.attention(q, k, v, layout=layout, **keywords) * grad_out).sum()

    out, lse = fastmha.attention(q, k, v, layout=layout, return_lse=True, **keywords)
    gradients = fastmha.attention_backward(grad_out, q, k, v, out, lse, layout=layout, **keywords)
    for name, x, gradient in zip("qkv", (q, k, v), gradients, strict=True):
        assert np.abs(gradient).max() > 1e-3
        assert_gradient(gradient, loss, x, name)
