"""What stands around attention: rows of softmax, activations and norms, linear layers, and multi-head attention of textbooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastmha.reference.heads import Array, Fold, _like, _softmax, _wide, attention, attention_backward, attention_weights


def softmax(x: Array) -> Array:
    """Softmax of the rows (last axis) of x, any leading axes; a row of only -inf becomes a row of zeros."""
    with np.errstate(all="ignore"):
        return _like(_softmax(*_wide(x))[0], x.dtype)


def softmax_backward(grad_output: Array, softmax_output: Array) -> Array:
    """``y * (g - sum(g * y))`` over the last axis, for y = softmax_output and g = grad_output, of one shape."""
    dtype = softmax_output.dtype
    grad_output, softmax_output = _wide(grad_output, softmax_output)
    with np.errstate(all="ignore"):
        inner = (grad_output * softmax_output).sum(axis=-1, keepdims=True)
        return _like(softmax_output * (grad_output - inner), dtype)


def _cumulative(x: Array, approximate: str) -> tuple[Array, Array]:
    """P and P' of gelu(x) = x P(x)."""
    from scipy.special import expit, ndtr  # here: importing fastmha need not wait for it

    if approximate == "none":
        return ndtr(x), np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    # (1 + tanh(u)) / 2 = expit(2u)
    rate = 2 * math.sqrt(2 / math.pi)
    log_odds = rate * (x + 0.044715 * x**3)
    p = expit(log_odds)
    return p, p * expit(-log_odds) * rate * (1 + 3 * 0.044715 * x * x)


def gelu(x: Array, *, approximate: str = "none") -> Array:
    """``x Phi(x)``; "tanh": ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` (Hendrycks and Gimpel 2016); 0 at -inf."""
    with np.errstate(all="ignore"):
        return np.where(x == -np.inf, 0, x * _cumulative(x, approximate)[0]).astype(x.dtype)


def gelu_backward(grad_output: Array, x: Array, *, approximate: str = "none") -> Array:
    """``grad_output (P(x) + x P'(x))``, for `gelu`'s P; the slope is 0 at -inf and 1 at inf."""
    with np.errstate(all="ignore"):
        p, density = _cumulative(x, approximate)
        return grad_output * np.where(np.isinf(x), p, p + x * density).astype(x.dtype)


def silu(x: Array) -> Array:
    """``x / (1 + exp(-x))`` (Elfwing et al. 2018); 0 at -inf."""
    with np.errstate(all="ignore"):
        return np.where(x == -np.inf, 0, x / (1 + np.exp(-x))).astype(x.dtype)


def silu_backward(grad_output: Array, x: Array) -> Array:
    """``grad_output s (1 + x (1 - s))`` with ``s = 1 / (1 + exp(-x))``; the slope is 0 at -inf and 1 at inf."""
    with np.errstate(all="ignore"):
        s = 1 / (1 + np.exp(-x))
        return grad_output * np.where(np.isinf(x), s, s + x * s / (1 + np.exp(x))).astype(x.dtype)


def _normalised(z: Array, eps: float, centered: bool) -> tuple[Array, Array]:
    """(z - mean) / sigma, and sigma; the mean is 0 where not centered."""
    if centered:
        z = z - z.mean(axis=-1, keepdims=True)
    sigma = np.sqrt(np.mean(z * z, axis=-1, keepdims=True) + eps)
    return z / sigma, sigma


def _norm_backward(
    grad_output: Array, z: Array, weight: Array, eps: float, centered: bool
) -> tuple[Array, Array, Array]:
    h, sigma = _normalised(z, eps, centered)
    g = grad_output * weight
    mean = g.mean(axis=-1, keepdims=True) if centered else 0
    grad_x = (g - mean - h * np.mean(g * h, axis=-1, keepdims=True)) / sigma
    rows = tuple(range(z.ndim - 1))
    return grad_x, (grad_output * h).sum(axis=rows), grad_output.sum(axis=rows)


def layer_norm(
    x: Array, weight: Array, bias: Array | None = None, eps: float = 1e-5, residual: Array | None = None
) -> Array:
    """``(z - mean) / sqrt(var + eps) weight + bias`` over the last axis of z = x + residual (Ba et al. 2016)."""
    with np.errstate(all="ignore"):
        y = _normalised(x if residual is None else x + residual, eps, True)[0] * weight
        return y if bias is None else y + bias


def layer_norm_backward(
    grad_output: Array, x: Array, weight: Array, bias: Array | None = None, eps: float = 1e-5,
    residual: Array | None = None,
) -> tuple[Array, ...]:
    """grad_x (that of residual too), grad_weight and, where there is a bias, grad_bias."""
    with np.errstate(all="ignore"):
        grads = _norm_backward(grad_output, x if residual is None else x + residual, weight, eps, True)
    return grads if bias is not None else grads[:2]


def rms_norm(x: Array, weight: Array, eps: float = 1e-6, *, residual: Array | None = None) -> Array:
    """``z / sqrt(mean(z^2) + eps) weight`` over the last axis of z = x + residual (Zhang and Sennrich 2019)."""
    with np.errstate(all="ignore"):
        return _normalised(x if residual is None else x + residual, eps, False)[0] * weight


def rms_norm_backward(
    grad_output: Array, x: Array, weight: Array, eps: float = 1e-6, *, residual: Array | None = None
) -> tuple[Array, Array]:
    """grad_x (that of residual too) and grad_weight."""
    with np.errstate(all="ignore"):
        return _norm_backward(grad_output, x if residual is None else x + residual, weight, eps, False)[:2]


_ACTIVATIONS: Mapping[str | None, tuple[Fold, Callable[[Array, Array], Array]]] = {
    None: (lambda x: x, lambda g, x: g),
    "gelu": (gelu, gelu_backward),
    "gelu_tanh": (lambda x: gelu(x, approximate="tanh"), lambda g, x: gelu_backward(g, x, approximate="tanh")),
    "relu": (lambda x: np.maximum(x, 0), lambda g, x: g * (x > 0)),
    "silu": (silu, silu_backward),
}


def linear(
    x: Array, W: Array, b: Array | None = None, *, activation: str | None = None, residual: Array | None = None
) -> Array:
    """``activation(x W + b) + residual`` over the last axis of x."""
    with np.errstate(all="ignore"):
        z = x @ W if b is None else x @ W + b
        y = _ACTIVATIONS[activation][0](z)
        return y if residual is None else y + residual


def linear_backward(
    grad_out: Array, x: Array, W: Array, b: Array | None = None, *, activation: str | None = None
) -> tuple[Array, ...]:
    """grad_x, grad_W and, where there is a bias, grad_b; the gradient of the residual is grad_out."""
    with np.errstate(all="ignore"):
        g = _ACTIVATIONS[activation][1](grad_out, x @ W if b is None else x @ W + b)
        tokens = math.prod(x.shape[:-1])
        rows = g.reshape(tokens, g.shape[-1])
        grads = g @ W.T, x.reshape(tokens, x.shape[-1]).T @ rows
        return grads if b is None else (*grads, rows.sum(axis=0))


def scaled_dot_product_attention(Q: Array, K: Array, V: Array, mask: Array | None = None) -> tuple[Array, Array]:
    """Output and weights for Q (B, n, d), K (B, m, d), V (B, m, dv) and a mask (n, m) or (B, n, m).

    Returns (B, n, dv) and (B, n, m). With a head axis, (B, H, ., .) in all four, as `attention` takes them.
    """
    if Q.ndim == 4:
        return attention(Q, K, V, mask=mask), attention_weights(Q, K, mask=mask)
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]
    Q, K, V = Q[:, None], K[:, None], V[:, None]
    return attention(Q, K, V, mask=mask)[:, 0], attention_weights(Q, K, mask=mask)[:, 0]


def split_heads(x: Array, num_heads: int) -> Array:
    """(B, L, H*D) -> (B, H, L, D)."""
    batch, length, width = x.shape
    return x.reshape(batch, length, num_heads, width // num_heads).swapaxes(1, 2)


def combine_heads(x: Array) -> Array:
    """(B, H, L, D) -> (B, L, H*D)."""
    batch, heads, length, width = x.shape
    return x.swapaxes(1, 2).reshape(batch, length, heads * width)


def multi_head_attention_core(
    Q: Array, K: Array, V: Array, num_heads: int, mask: Array | None = None
) -> tuple[Array, Array]:
    """Attention of projected Q (B, Lq, d_model), K and V (B, Lk, d_model), split into heads.

    Returns the combined output (B, Lq, d_model) and the weights (B, H, Lq, Lk).
    """
    Q, K, V = (split_heads(x, num_heads) for x in (Q, K, V))
    output, weights = scaled_dot_product_attention(Q, K, V, mask)
    return combine_heads(output), weights


def _project(x: Array, weights: Mapping[str, Array], name: str) -> Array:
    y = x @ weights["W_" + name]
    return y + weights["b_" + name] if "b_" + name in weights else y


def multi_head_attention(
    q: Array, k: Array, v: Array, num_heads: int, weights: Mapping[str, Array], mask: Array | None = None
) -> Array:
    """Projections, attention per head, output projection.

    q (B, Lq, d_model), k and v (B, Lk, d_model); weights: W_Q, W_K, W_V, W_O, each (in, out), and optionally b_Q, b_K,
    b_V, b_O. Returns (B, Lq, d_model).
    """
    dtype, (q, k, v) = q.dtype, _wide(q, k, v)
    mask, weights = None if mask is None else _wide(mask)[0], {name: _wide(x)[0] for name, x in weights.items()}
    Q, K, V = _project(q, weights, "Q"), _project(k, weights, "K"), _project(v, weights, "V")
    return _like(_project(multi_head_attention_core(Q, K, V, num_heads, mask)[0], weights, "O"), dtype)


def mha_forward_backward(
    X: Array,
    weights: Mapping[str, Array],
    num_heads: int,
    num_kv_heads: int | None = None,
    context: Array | None = None,
    grad_output: Array | None = None,
    **attention_keywords: Any,
) -> dict[str, Array]:
    """The specification of the modules, forward and backward.

    Parameters
    ----------
    X : ndarray (B, L, d_model)
    weights : mapping of W_Q (d_model, H*D), W_K (d_model, Hkv*D), W_V (d_model, Hkv*Dv), W_O (H*Dv, d_out) and
        optionally b_Q, b_K, b_V, b_O
    num_heads, num_kv_heads : int
        H and Hkv; Hkv defaults to H.
    context : ndarray (B, Lk, d_model)
        Keys and values are projected from it; default X.
    grad_output : ndarray (B, L, d_out)
        Asks for the gradients of ``sum(grad_output * output)``.
    **attention_keywords
        mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout, seed, as in
        `attention`.

    Returns
    -------
    dict
        output (B, L, d_out), weights (B, H, L, Lk), lse (B, H, L), concat (B, L, H*Dv), Q, K, V (B, H or Hkv, length,
        width); with `grad_output` also grad_X, grad_W_Q ... grad_W_O, and grad_context and grad_b_Q ... grad_b_O
        where there is a context and where there are biases, and grad_sinks where there are sinks.
    """
    source = X if context is None else context
    Q = split_heads(_project(X, weights, "Q"), num_heads)
    K = split_heads(_project(source, weights, "K"), num_kv_heads or num_heads)
    V = split_heads(_project(source, weights, "V"), num_kv_heads or num_heads)
    heads_out, lse = attention(Q, K, V, return_lse=True, **attention_keywords)
    concat = combine_heads(heads_out)
    result = {
        "output": _project(concat, weights, "O"), "weights": attention_weights(Q, K, **attention_keywords),
        "lse": lse, "concat": concat, "Q": Q, "K": K, "V": V,
    }  # fmt: skip
    if grad_output is None:
        return result
    grad_heads = split_heads(grad_output @ weights["W_O"].T, num_heads)
    grad_qkv = list(attention_backward(grad_heads, Q, K, V, heads_out, lse, **attention_keywords))
    if attention_keywords.get("sinks") is not None:
        result["grad_sinks"] = grad_qkv.pop()
    grad_q, grad_k, grad_v = (combine_heads(x) for x in grad_qkv)
    # y = x @ W + b, for each of the four
    for name, x, grad_y in (("Q", X, grad_q), ("K", source, grad_k), ("V", source, grad_v), ("O", concat, grad_output)):
        result["grad_W_" + name] = np.tensordot(x, grad_y, axes=((0, 1), (0, 1)))
        if "b_" + name in weights:
            result["grad_b_" + name] = grad_y.sum(axis=(0, 1))
    through_q = grad_q @ weights["W_Q"].T
    through_kv = grad_k @ weights["W_K"].T + grad_v @ weights["W_V"].T
    if context is None:
        result["grad_X"] = through_q + through_kv
    else:
        result["grad_X"], result["grad_context"] = through_q, through_kv
    return result
