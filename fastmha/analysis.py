"""Operations and bytes of a multi-head attention layer, counted on paper.

Axis letters: ``B`` batch, ``Lq`` ``Lk`` lengths, ``h`` query heads, ``hkv`` key/value heads, ``dk`` ``dv`` widths of a
head, ``d`` d_model. A multiplication and an addition are two operations (FLOP). Biases are not counted.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fastmha import validate
from fastmha.algorithms import BLAS, TILED

__all__ = ["arithmetic_intensity", "count_flops", "count_memory_bytes", "crossover_length", "kv_cache_bytes"]


# what an algorithm keeps in memory for each query and head, and how many items; None: one for each key
_PER_ROW = MappingProxyType({BLAS.name: ("scores", None), TILED.name: ("lse", 1)})


def _item_bytes(dtype: DTypeLike, half: bool = False) -> int:
    """Of float32 or float64; with `half` also of float16 and bfloat16, which NumPy need not know."""
    kind = validate.dtype_of(dtype)
    if half and (kind == np.float16 or kind.name == "bfloat16" or (isinstance(dtype, str) and dtype == "bfloat16")):
        return 2
    if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
        allowed = "float32, float64, float16 or bfloat16" if half else "float32 or float64"
        raise TypeError(f"dtype must be {allowed}, got {validate.short(dtype)}")
    return int(kind.itemsize)


def _heads(d_model: Any, n_heads: Any, n_kv_heads: Any, d_k: Any, d_v: Any) -> tuple[int, int, int, int, int]:
    """Checked d, h, hkv, dk, dv with their defaults."""
    width, heads = validate.integer("d_model", d_model, 1), validate.integer("n_heads", n_heads, 1)
    kv_heads = heads if n_kv_heads is None else validate.integer("n_kv_heads", n_kv_heads, 1)
    if heads % kv_heads:
        came = f"{validate.short(heads)} and {validate.short(kv_heads)}"
        raise ValueError(f"n_heads must be a multiple of n_kv_heads, got {came}")
    if d_k is None and width % heads:
        came = f"{validate.short(width)} and {validate.short(heads)}"
        raise ValueError(f"d_model must be a multiple of n_heads unless d_k is given, got {came}")
    key_width = width // heads if d_k is None else validate.integer("d_k", d_k, 1)
    value_width = key_width if d_v is None else validate.integer("d_v", d_v, 1)
    return width, heads, kv_heads, key_width, value_width


def _pairs(seq_len_q: int, seq_len_k: int, left: int | None, right: int | None) -> int:
    """How many (i, j) have -left <= j - (i + Lk - Lq) <= right; None = unbounded. Exact, in constant time."""

    def sum_below(end: int) -> int:  # sum over n < end of n clipped to 0 ... Lk
        inside = min(max(end, 0), seq_len_k)
        return inside * (inside - 1) // 2 + max(end - seq_len_k, 0) * seq_len_k

    def up_to(bound: int) -> int:  # row i has i + Lk - Lq + bound + 1 keys up to the bound, clipped to 0 ... Lk
        first = seq_len_k - seq_len_q + bound + 1
        return sum_below(first + seq_len_q) - sum_below(first)

    everything = seq_len_q * seq_len_k
    return (everything if right is None else up_to(right)) - (0 if left is None else up_to(-left - 1))


def count_flops(
    batch_size: int,
    seq_len: int,
    d_model: int,
    n_heads: int,
    *,
    n_kv_heads: int | None = None,
    d_k: int | None = None,
    d_v: int | None = None,
    seq_len_k: int | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    backward: bool = False,
) -> int:
    """Operations of one multi-head attention layer.

    Plain (one sequence, all heads alike, no mask): ``8*B*L*d**2 + 4*B*L**2*d + 5*B*h*L**2``. The three terms in
    general, where P is the number of pairs (i, j) that remain per head:

    ======================= =================================================== ====================================
    term                    forward                                             backward
    ======================= =================================================== ====================================
    projections             2*B*d*(Lq*h*dk + Lk*hkv*dk + Lk*hkv*dv + Lq*h*dv)   twice that: products for the weight
                                                                                and for the input gradient
    products over the pairs 2*B*h*P*(dk + dv): scores, weighted sum             2*B*h*P*(3*dk + 2*dv): scores again,
                                                                                weights', values', queries', keys'
                                                                                gradients
    softmax                 5*B*h*P: maximum, difference, exponential, sum,     5*B*h*P: probability again, product
                            division, one each                                  and sum, difference, product
    ======================= =================================================== ====================================

    The first two terms, the matrix products, do not depend on h for h*dk = h*dv = d and hkv = h.

    Parameters
    ----------
    batch_size, seq_len : int
        B and Lq, at least 0.
    d_model, n_heads : int
        d and h, at least 1.
    n_kv_heads : int, optional
        hkv, a divisor of h. Default h.
    d_k, d_v : int, optional
        Default of d_k: d_model // n_heads, which must be exact; of d_v: d_k.
    seq_len_k : int, optional
        Lk for cross-attention: keys and values are projected from that many tokens. Default Lq.
    is_causal : bool, default False
        Only the pairs with ``j <= i + Lk - Lq`` are counted: both sequences end together.
    window : (left, right), optional
        Only the pairs with ``i + Lk - Lq - left <= j <= i + Lk - Lq + right`` are counted; None = unbounded.
    backward : bool, default False
        Count a whole training step, forward plus backward, instead of the forward alone.

    Returns
    -------
    int

    Raises
    ------
    TypeError
        A size is not an integer, or `window` is not a pair.
    ValueError
        A size is too small, or two do not divide.

    Examples
    --------
    >>> count_flops(1, 2, 4, 2) == 8 * 2 * 4**2 + 4 * 2**2 * 4 + 5 * 2 * 2**2
    True
    """
    batch, rows = validate.integer("batch_size", batch_size, 0), validate.integer("seq_len", seq_len, 0)
    columns = rows if seq_len_k is None else validate.integer("seq_len_k", seq_len_k, 0)
    width, heads, kv_heads, key_width, value_width = _heads(d_model, n_heads, n_kv_heads, d_k, d_v)
    if window is None:
        window = (None, None)
    elif not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right), got {validate.short(window)}")
    left, right = (None if x is None else validate.integer(f"window[{axis}]", x, 0) for axis, x in enumerate(window))
    is_causal, backward = validate.flag("is_causal", is_causal), validate.flag("backward", backward)
    pairs = _pairs(rows, columns, left, 0 if is_causal else right)
    both_widths = key_width + value_width
    projections = 2 * batch * width * (rows * heads + columns * kv_heads) * both_widths
    products = 2 * batch * heads * pairs * both_widths
    softmax = 5 * batch * heads * pairs
    if not backward:
        return projections + products + softmax
    backward_products = 2 * batch * heads * pairs * (3 * key_width + 2 * value_width)
    return 3 * projections + products + backward_products + 2 * softmax


def count_memory_bytes(
    batch_size: int,
    seq_len: int,
    d_model: int,
    n_heads: int,
    dtype: DTypeLike = "float32",
    *,
    n_kv_heads: int | None = None,
    d_k: int | None = None,
    d_v: int | None = None,
    algorithm: str = "blas",
    backward: bool = False,
) -> dict[str, int]:
    """Bytes of every array of one self-attention layer, each counted once.

    This is the textbook count: "blas" holds the whole score matrices, though the library may keep only blocks of them
    at a time; "tiled" holds none. Tiles and scratch, which do not grow with B, are not counted; the largest is that of the
    backward pass of "tiled", about L*(dk + dv) items per thread.

    Parameters
    ----------
    batch_size, seq_len, d_model, n_heads, n_kv_heads, d_k, d_v
        As in `count_flops`.
    dtype : dtype, default "float32"
        float32 or float64.
    algorithm : {"blas", "tiled"}
    backward : bool, default False
        Count a whole training step: also the gradients.

    Returns
    -------
    dict of str to int
        ========================= ===============================================================
        weights                   d*h*dk + d*hkv*(dk + dv) + h*dv*d items
        input, output             B*L*d each
        qkv                       B*L*(h*dk + hkv*(dk + dv))
        scores ("blas")           B*h*L**2, turned into probabilities in place
        lse ("tiled")             B*h*L
        concat                    B*L*h*dv
        total                     the sum
        ========================= ===============================================================

        With `backward` also a gradient of each of them, of the same size: grad_weights, grad_input, grad_qkv,
        grad_scores, grad_concat, grad_output; for "tiled" the sums of ``grad_concat * concat`` over each head, named
        delta, of the size of lse, stand in the place of grad_scores.

    Raises
    ------
    TypeError
        A size is not an integer, or `dtype` is neither of the two.
    ValueError
        A size is too small, two do not divide, or `algorithm` is unknown.
    """
    batch, length = validate.integer("batch_size", batch_size, 0), validate.integer("seq_len", seq_len, 0)
    width, heads, kv_heads, key_width, value_width = _heads(d_model, n_heads, n_kv_heads, d_k, d_v)
    item = _item_bytes(dtype)
    validate.choice("algorithm", algorithm, tuple(_PER_ROW))
    backward = validate.flag("backward", backward)
    tokens = batch * length
    projected = heads * key_width + kv_heads * (key_width + value_width)
    concat = heads * value_width
    kept, per_row = _PER_ROW[algorithm]
    items = {
        "weights": width * (projected + concat),
        "input": tokens * width,
        "qkv": tokens * projected,
        kept: tokens * heads * (per_row or length),
        "concat": tokens * concat,
        "output": tokens * width,
    }
    if backward:
        items |= {"delta" if name == "lse" else f"grad_{name}": count for name, count in items.items()}
    components = {name: item * count for name, count in items.items()}
    return components | {"total": sum(components.values())}


def arithmetic_intensity(
    batch_size: int,
    seq_len: int,
    d_model: int,
    n_heads: int,
    dtype: DTypeLike = "float32",
    *,
    n_kv_heads: int | None = None,
    d_k: int | None = None,
    d_v: int | None = None,
    algorithm: str = "blas",
    backward: bool = False,
) -> float:
    """FLOP per byte: `count_flops` over the "total" of `count_memory_bytes`, of the same arguments.

    An upper bound of what a machine sees, because each array is counted once, however often it is read.

    Returns
    -------
    float

    Raises
    ------
    TypeError, ValueError
        As in the two functions.
    """
    shape = (batch_size, seq_len, d_model, n_heads)
    memory = count_memory_bytes(
        *shape, dtype, n_kv_heads=n_kv_heads, d_k=d_k, d_v=d_v, algorithm=algorithm, backward=backward
    )
    return count_flops(*shape, n_kv_heads=n_kv_heads, d_k=d_k, d_v=d_v, backward=backward) / memory["total"]


def kv_cache_bytes(
    batch_size: int,
    seq_len: int,
    n_kv_heads: int,
    head_dim: int,
    n_layers: int = 1,
    dtype: DTypeLike = "float32",
) -> int:
    """Bytes of the cached keys and values: ``2 * B * L * hkv * head_dim * n_layers`` items.

    Parameters
    ----------
    batch_size, seq_len : int
        At least 0.
    n_kv_heads, head_dim, n_layers : int
        At least 1. Keys and values have the same width.
    dtype : dtype, default "float32"
        float32, float64, float16 or bfloat16.

    Returns
    -------
    int

    Raises
    ------
    TypeError
        A size is not an integer, or `dtype` is none of the four.
    ValueError
        A size is too small.
    """
    tokens = validate.integer("batch_size", batch_size, 0) * validate.integer("seq_len", seq_len, 0)
    heads, width = validate.integer("n_kv_heads", n_kv_heads, 1), validate.integer("head_dim", head_dim, 1)
    per_token = heads * width * validate.integer("n_layers", n_layers, 1)
    return 2 * tokens * per_token * _item_bytes(dtype, half=True)


def crossover_length(d_model: int) -> int:
    """Smallest sequence length at which the products over the pairs cost as much as the projections.

    ``4*B*L**2*d >= 8*B*L*d**2`` if and only if ``L >= 2*d``. The softmax, 5*B*h*L**2, is left out, so that the answer
    depends neither on the number of heads nor on the cost of an exponential.

    Parameters
    ----------
    d_model : int
        At least 1.

    Returns
    -------
    int
        ``2 * d_model``.

    Raises
    ------
    TypeError
        `d_model` is not an integer.
    ValueError
        `d_model` is below 1.
    """
    return 2 * validate.integer("d_model", d_model, 1)
