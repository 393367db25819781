"""Attention on heads and its gradients, also of packed sequences: what rules remove and drop, and what is summed.

The definitions are those of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastmha.masks import create_padding_mask

Array = NDArray[Any]
Window = tuple[int | None, int | None]
Ranges = tuple[ArrayLike | None, ArrayLike | None]
Fold = Callable[[Array], Array]

# Of the half types: what one rounding errs by, relative, and the same of the smallest numbers, absolute; the largest number.
_HALF = {"float16": (2.0**-11, 2.0**-25, 65504.0), "bfloat16": (2.0**-8, 2.0**-126, (2 - 2.0**-7) * 2.0**127)}


def _wide(*arrays: Array) -> list[Array]:
    """Arrays of half precision in float64, others as they are."""
    with np.errstate(invalid="ignore"):
        return [x.astype(np.float64) if x.dtype.name in _HALF else x for x in arrays]


def _like(x: Array, dtype: Any) -> Array:
    """A result for operands of a dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype, copy=False)


def _lse_like(lse: Array, dtype: Any) -> Array:
    return _like(lse, np.float32 if np.dtype(dtype).name in _HALF else dtype)


def _ahead(seq_len_q: int, seq_len_k: int, offset: ArrayLike | None) -> NDArray[np.int64]:
    """How far key j is ahead of query i, j - (i + offset): (B or 1, 1, Lq, Lk)."""
    if offset is None and seq_len_q != seq_len_k:
        raise ValueError(
            f"offset must be given for {seq_len_q} queries and {seq_len_k} keys: usually 0 (they begin together) "
            f"or {seq_len_k - seq_len_q} (they end together)"
        )
    start = np.asarray(0 if offset is None else offset, np.int64).reshape(-1, 1, 1, 1)
    return np.arange(seq_len_k) - np.arange(seq_len_q)[:, None] - start


def removed(
    seq_len_q: int,
    seq_len_k: int,
    mask: Array | None = None,
    is_causal: bool = False,
    offset: ArrayLike | None = None,
    key_padding_lengths: ArrayLike | None = None,
    window: Window | None = None,
    key_ranges: Ranges | None = None,
) -> NDArray[np.bool_]:
    """The removed pairs, all kinds together: bool, (B or 1, H or 1, Lq, Lk).

    Raises ValueError if causality or a window needs an offset: it has a default, 0, for Lq == Lk only.
    """
    gone: Array = np.zeros((1, 1, seq_len_q, seq_len_k), bool)
    if mask is not None:
        gone = gone | (mask if mask.dtype == bool else mask == -np.inf)
    if key_padding_lengths is not None:
        gone = gone | create_padding_mask(key_padding_lengths, seq_len_k)[:, None, None, :]
    if key_ranges is not None:
        starts, ends = key_ranges
        if starts is not None:
            gone = gone | (np.arange(seq_len_k) < np.reshape(starts, (-1, 1, 1, 1)))
        if ends is not None:
            gone = gone | (np.arange(seq_len_k) >= np.reshape(ends, (-1, 1, 1, 1)))
    if is_causal or window is not None:
        ahead = _ahead(seq_len_q, seq_len_k, offset)
        left, right = (None, None) if window is None else window
        if is_causal:
            gone = gone | (ahead > 0)
        if left is not None:
            gone = gone | (ahead < -left)
        if right is not None:
            gone = gone | (ahead > right)
    return gone


def _alibi(slopes: Array, seq_len_q: int, seq_len_k: int, offset: ArrayLike | None) -> Array:
    """slopes[h] |i + offset - j|, (B or 1, H, Lq, Lk); the distances are integers until they are multiplied."""
    return slopes[:, None, None] * np.abs(_ahead(seq_len_q, seq_len_k, offset)).astype(slopes.dtype)


def philox(counter: Array, key: tuple[int, int]) -> NDArray[np.uint32]:
    """Philox4x32-10, the counter-based generator of Salmon et al. 2011: 4 random words of each 4 words on the last axis."""
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    low = np.uint64(0xFFFFFFFF)
    for r in range(10):
        k0, k1 = (np.uint64((word + r * weyl) & 0xFFFFFFFF) for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85)))
        x, y = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = y >> np.uint64(32) ^ c1 ^ k0, y & low, x >> np.uint64(32) ^ c3 ^ k1, x & low
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def kept(
    seed: int, dropout: float, B: int, H: int, Lq: int, Lk: int, *, first: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> NDArray[np.bool_]:
    """The pairs that dropout keeps: bool, (B, H, Lq, Lk), each with probability 1 - dropout.

    A draw belongs to its pair alone, whatever the shapes: key j of query i, head h and batch row b (those here begin with
    `first`, numbers of b, h, i and j) gets word j % 4 of `philox` of the counter (j // 4, i, h, b) and the key (seed % 2**32,
    seed // 2**32), seed an int in [0, 2**64). It is dropped if and only if this word is below dropout * 2**32, rounded and at
    most 2**32 - 1.
    """
    b0, h0, i0, j0 = first
    axes = np.arange(j0 // 4, -(-(j0 + Lk) // 4)), i0 + np.arange(Lq), h0 + np.arange(H), b0 + np.arange(B)
    j, i, h, b = np.meshgrid(*axes, indexing="ij")
    words = philox(np.stack([j, i, h, b], axis=-1), (seed % 2**32, seed // 2**32))  # (Lk / 4, Lq, H, B, 4)
    words = words.transpose(3, 2, 1, 0, 4).reshape(B, H, Lq, 4 * len(axes[0]))[..., j0 % 4:]
    return words[..., :Lk] >= np.uint32(min(int(dropout * 2**32 + 0.5), 2**32 - 1))


@dataclass(frozen=True)
class _Rules:
    """What a call says beside its operands; the arguments of `attention`."""

    mask: Array | None = None
    is_causal: bool = False
    offset: ArrayLike | None = None
    key_padding_lengths: ArrayLike | None = None
    key_ranges: Ranges | None = None
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Array | None = None
    alibi: Array | None = None
    dropout: float = 0.0
    seed: int | None = None
    first: tuple[int, int, int, int] = (0, 0, 0, 0)  # batch row, head, query and key that the draws of dropout begin with

    def wide(self) -> _Rules:
        """The same with floats of half precision in float64."""
        mask, sinks, alibi = (x if x is None else _wide(x)[0] for x in (self.mask, self.sinks, self.alibi))
        return replace(self, mask=mask, sinks=sinks, alibi=alibi)

    def removed(self, seq_len_q: int, seq_len_k: int) -> NDArray[np.bool_]:
        return removed(
            seq_len_q, seq_len_k, self.mask, self.is_causal, self.offset, self.key_padding_lengths, self.window, self.key_ranges
        )

    def scores(self, q: Array, k: Array, gone: Array) -> tuple[Array, Array | None, float]:
        """Scores (B, H, Lq, Lk), -inf where removed; the softcap's slope d score / d product, None for 1; the scale."""
        width = q.shape[-1]
        factor = float(self.scale) if self.scale is not None else 1 / math.sqrt(width) if width else 1.0
        scores = (q @ k.swapaxes(-1, -2)) * factor
        slope = None
        if self.softcap is not None:
            tanh = np.tanh(scores / float(self.softcap))
            scores = tanh * float(self.softcap)
            slope = 1 - tanh * tanh
        if self.alibi is not None:
            scores = scores - _alibi(self.alibi, q.shape[2], k.shape[2], self.offset)
        if self.mask is not None and self.mask.dtype != bool:
            scores = scores + self.mask
        np.copyto(scores, -np.inf, where=gone)
        return scores, slope, factor

    def drawn(self, weights: Array) -> Array | float:
        """What dropout multiplies probabilities by: 0, or 1 / (1 - dropout) where the pair is kept."""
        if not self.dropout:
            return 1.0
        assert self.seed is not None
        factor = weights.dtype.type(1 / (1 - self.dropout))
        return kept(self.seed, self.dropout, *weights.shape, first=self.first) * factor


def _softmax(scores: Array, sinks: Array | None = None) -> tuple[Array, Array, Array]:
    """Probabilities and lse of the rows, and the probabilities of their sinks; see the definitions of the package for -inf."""
    sink = -np.inf if sinks is None else sinks[:, None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    np.copyto(top, 0, where=top == -np.inf)
    weights, of_sink = np.exp(scores - top), np.exp(sink - top)
    total = weights.sum(axis=-1, keepdims=True) + of_sink
    lse = (top + np.log(total))[..., 0]  # log(0) = -inf
    weights = weights / total
    np.copyto(weights, 0, where=scores == -np.inf)  # 0 / 0 in an empty row, 0 / NaN in a row that holds a NaN
    return weights, lse, (of_sink / total)[..., 0]


def _product(weights: Array, rows: Array, gone: Array) -> Array:
    """``weights @ rows``, where a removed pair (weight 0) adds nothing: 0 * NaN would be NaN.

    weights (B, H, M, N), rows (B, H, N, W), gone broadcasts to weights -> (B, H, M, W). Rows that are not finite are
    left out of the product and then added to the sums that may see them.
    """
    bad: Array = np.any(~np.isfinite(rows), axis=-1)
    if not bad.any():
        return weights @ rows
    total = weights @ np.where(bad[..., None], 0, rows)
    gone = np.broadcast_to(gone, weights.shape)
    for b, h, j in np.argwhere(bad):
        allowed = ~gone[b, h, :, j]
        total[b, h, allowed] += weights[b, h, allowed, j, None] * rows[b, h, j]
    return total


def _swap(layout: str, *arrays: Array) -> list[Array]:
    """(B, H, L, D) views of arrays in `layout`, and back: the swap is its own inverse."""
    return [x if layout == "BHLD" else x.swapaxes(1, 2) for x in arrays]


def _per_query_head(x: Array, heads: int) -> Array:
    """(B, Hkv, L, D) -> (B, H, L, D): query head h reads head h // (H // Hkv)."""
    return np.repeat(x, heads // max(x.shape[1], 1), axis=1)


def _sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes along which `shape` broadcasts to x's, the transpose of that."""
    aligned = (1,) * (x.ndim - len(shape)) + shape
    return x.sum(axis=tuple(a for a, n in enumerate(aligned) if n == 1), keepdims=True).reshape(shape)


def _sum_groups(x: Array, kv_heads: int) -> Array:
    """(B, H, L, D) -> (B, Hkv, L, D): the sum over the query heads of each group, the transpose of the above."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, kv_heads, heads // max(kv_heads, 1), length, width).sum(axis=2)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    layout: str = "BHLD",
    mask: Array | None = None,
    is_causal: bool = False,
    offset: ArrayLike | None = None,
    key_padding_lengths: ArrayLike | None = None,
    key_ranges: Ranges | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    alibi: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    algorithm: str = "auto",
    return_lse: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Any:
    """``softmax(scale * q k^T) v`` per head, with softcap, sinks, ALiBi, masks and dropout.

    Parameters
    ----------
    q, k, v : ndarray, shapes (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv); axes 1 and 2 swapped in layout "BLHD"
    layout : {"BHLD", "BLHD"}
    mask : ndarray, 2 axes (Lq, Lk) or 4 that broadcast to (B, H, Lq, Lk)
        bool: True = may not attend. Floating: added to the scores, -inf = removed.
    is_causal : bool
        Query i may attend key j if and only if j <= i + offset.
    offset : int or ndarray of int (B,)
        Default 0 for Lq == Lk; must be given otherwise, if causality, a window or alibi needs it.
    key_padding_lengths : ndarray of int (B,)
        Keys from this position on are removed.
    key_ranges : (starts, ends), each ndarray of int (B,), int or None
        Keys before the start and from the end on are removed; None = 0 and Lk.
    window : (left, right), each int or None
        Query i may attend i + offset - left <= j <= i + offset + right; None = unbounded.
    scale : float
        Default 1 / sqrt(D).
    softcap : float
        A score s becomes softcap * tanh(s / softcap), before alibi and any mask.
    sinks : ndarray (H,)
        exp(sinks[h]) joins the denominator of every row of head h, and lse: the probabilities of the keys add up to less than 1.
        -inf: none. NaN, or +inf: NaN in every row that is not empty.
    alibi : ndarray (H,)
        Slopes: scores get ``-alibi[h] * |i + offset - j|``, before any mask.
    dropout : float in [0, 1)
        After the softmax a probability counts 0, or 1 / (1 - dropout) times itself where the pair is `kept`; lse is what it was.
    seed : int in [0, 2**64)
        Of the draws of dropout.
    return_lse : bool
    out : ndarray
        Filled and returned, if given.
    algorithm, num_threads
        Ignored: there is one algorithm here.

    Returns
    -------
    out : ndarray, (B, H, Lq, Dv) in `layout`
    lse : ndarray (B, H, Lq), only with `return_lse`
        Natural logarithm of the sum of the exponentials of the scores and of the sink; the sink, or -inf, for a row with nothing
        left.
    """
    rules = _Rules(
        mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout, seed
    )
    q, k, v = _swap(layout, q, k, v)
    result, lse = _forward(q, k, v, rules)
    result, lse = _like(_swap(layout, result)[0], q.dtype), _lse_like(lse, q.dtype)
    if out is not None:
        out[...] = result
        result = out
    return (result, lse) if return_lse else result


def _weights(q: Array, k: Array, gone: Array, rules: _Rules) -> tuple[Array, Array]:
    """What multiplies the values, probabilities behind dropout, and lse; (B, H, L, D) layout."""
    scores, _, _ = rules.scores(q, _per_query_head(k, q.shape[1]), gone)
    weights, lse, _ = _softmax(scores, rules.sinks)
    return weights * rules.drawn(weights), lse


def _forward(q: Array, k: Array, v: Array, rules: _Rules) -> tuple[Array, Array]:
    """Output and lse, in (B, H, L, D) layout; of operands of half precision in float64."""
    (q, k, v), rules = _wide(q, k, v), rules.wide()
    gone = rules.removed(q.shape[2], k.shape[2])
    with np.errstate(all="ignore"):
        weights, lse = _weights(q, k, gone, rules)
        return _product(weights, _per_query_head(v, q.shape[1]), gone), lse


def attention_weights(q: Array, k: Array, *, layout: str = "BHLD", **rules: Any) -> Array:
    """What multiplies the values in `attention`, the probabilities behind dropout: (B, H, Lq, Lk) in either layout, 0 if removed.

    rules: mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout and seed, as in
    `attention`.
    """
    dtype = q.dtype
    q, k = _swap(layout, *_wide(q, k))
    given = _Rules(**rules).wide()
    with np.errstate(all="ignore"):
        return _like(_weights(q, k, given.removed(q.shape[2], k.shape[2]), given)[0], dtype)


def attention_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    layout: str = "BHLD",
    mask: Array | None = None,
    is_causal: bool = False,
    offset: ArrayLike | None = None,
    key_padding_lengths: ArrayLike | None = None,
    key_ranges: Ranges | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    alibi: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    need_bias_grad: bool = False,
    algorithm: str = "auto",
    num_threads: int | None = None,
) -> tuple[Array, ...]:
    """Gradients of ``sum(grad_out * attention(q, k, v, ...))``.

    grad_out and out have the shape of `attention`'s output, lse is (B, H, Lq); the rest is as in `attention`. Returns
    grad_q, grad_k, grad_v in the shapes of q, k, v and in `layout`; where there are sinks also grad_sinks (H,), to which
    empty rows add nothing, 0 for a sink of -inf; with `need_bias_grad` also grad_mask, of the additive mask in its own shape,
    0 at removed pairs.
    """
    rules = _Rules(
        mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout, seed
    )
    grad_out, q, k, v, out = _swap(layout, grad_out, q, k, v, out)
    grad_q, grad_k, grad_v, *others = _backward(grad_out, q, k, v, out, lse, rules, need_bias_grad)
    of = [q, k, v, *(x for x, there in ((sinks, sinks is not None), (mask, need_bias_grad)) if there and x is not None)]
    return tuple(_like(x, y.dtype) for x, y in zip([*_swap(layout, grad_q, grad_k, grad_v), *others], of))


def _backward(
    grad_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, rules: _Rules, need_bias_grad: bool = False
) -> list[Array]:
    """The gradients of `attention_backward`, in (B, H, L, D) layout; of operands of half precision in float64."""
    (grad_out, q, k, v, out), rules = _wide(grad_out, q, k, v, out), rules.wide()
    heads, kv_heads = q.shape[1], k.shape[1]
    gone = rules.removed(q.shape[2], k.shape[2])
    gone_t = gone.swapaxes(-1, -2)
    k, v = _per_query_head(k, heads), _per_query_head(v, heads)
    with np.errstate(all="ignore"):
        scores, slope, factor = rules.scores(q, k, gone)
        # weights = softmax(scores), by the sums of these scores: exp(scores - lse) errs by the rounding of lse, which has lost
        # the number of keys where they all are one huge constant. lse says more only if it was taken over more keys than these:
        # then it exceeds their own by more than rounding.
        weights, own_lse, of_sinks = _softmax(scores, rules.sinks)
        slack = 16 * np.finfo(lse.dtype).eps * (1 + np.abs(lse))
        of_more_keys = (own_lse < lse - slack)[..., None]
        weights = np.where(of_more_keys, np.where(scores == -np.inf, 0, np.exp(scores - lse[..., None])), weights)
        drawn = rules.drawn(weights)
        # out = (weights * drawn) @ v
        grad_v = _sum_groups(_product((weights * drawn).swapaxes(-1, -2), grad_out, gone_t), kv_heads)
        grad_weights = (grad_out @ v.swapaxes(-1, -2)) * drawn
        # d softmax; sum_j weights_ij grad_weights_ij = sum_c grad_out_ic out_ic, the sum over all keys that out was taken over
        own_delta = np.where(scores == -np.inf, 0, weights * grad_weights).sum(axis=-1, keepdims=True)
        delta = np.where(of_more_keys, (grad_out * out).sum(axis=-1, keepdims=True), own_delta)
        grad_scores = weights * (grad_weights - delta)
        np.copyto(grad_scores, 0, where=gone)
        further = []
        if rules.sinks is not None:
            # a sink is a key of value 0: its grad_weights are 0
            sink = rules.sinks[:, None]
            of_sinks = np.where(of_more_keys[..., 0], np.exp(sink - lse), of_sinks)
            none = (sink == -np.inf) | np.all(scores == -np.inf, axis=-1)
            further.append(np.where(none, 0, -of_sinks * delta[..., 0]).sum(axis=(0, 2)))
        if need_bias_grad:
            assert rules.mask is not None
            further.append(_sum_to_shape(grad_scores, rules.mask.shape))
        # scores = softcap * tanh(product / softcap), then masked
        if slope is not None:
            grad_scores = grad_scores * slope
            np.copyto(grad_scores, 0, where=gone)  # the slope of a NaN
        # product = factor * q @ k^T
        grad_q = _product(grad_scores, k, gone) * factor
        grad_k = _sum_groups(_product(grad_scores.swapaxes(-1, -2), q, gone_t), kv_heads) * factor
    return [grad_q, grad_k, grad_v, *further]


def _sequences(
    lengths_q: ArrayLike, lengths_k: ArrayLike | None, rules: Mapping[str, Any]
) -> Iterator[tuple[slice, slice, _Rules]]:
    """The queries, the keys and the rules of each of the sequences that lie end to end."""
    counts_q = np.asarray(lengths_q, np.int64)
    counts_k = counts_q if lengths_k is None else np.asarray(lengths_k, np.int64)
    offset = rules["offset"]
    offsets = [None] * len(counts_q) if offset is None else np.broadcast_to(np.asarray(offset), counts_q.shape)
    for s, (n, m, end, key_end) in enumerate(zip(counts_q, counts_k, counts_q.cumsum(), counts_k.cumsum())):
        own = _Rules(**{**rules, "offset": offsets[s]}, first=(s, 0, 0, 0))
        yield slice(end - n, end), slice(key_end - m, key_end), own


def attention_packed(
    q: Array,
    k: Array,
    v: Array,
    lengths_q: ArrayLike,
    lengths_k: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    offset: ArrayLike | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    alibi: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    algorithm: str = "auto",
    return_lse: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Any:
    """`attention` of sequences of different lengths that lie end to end.

    Parameters
    ----------
    q, k, v : ndarray, shapes (total_q, H, D), (total_k, Hkv, D), (total_k, Hkv, Dv)
    lengths_q, lengths_k : ndarray of int (S,)
        The queries of sequence s, lengths_q[s] of them, attend its keys, lengths_k[s] of them, and no others: as `attention` over
        these alone, except that in the draws of dropout its batch row is s. lengths_k defaults to lengths_q.
    offset : int or ndarray of int (S,)
        Default 0 for a sequence of as many queries as keys; as in `attention`.
    is_causal, window, scale, softcap, sinks, alibi, dropout, seed, return_lse, out
        As in `attention`.
    algorithm, num_threads
        Ignored: there is one algorithm here.

    Returns
    -------
    out : ndarray (total_q, H, Dv)
    lse : ndarray (H, total_q), only with `return_lse`
    """
    result = np.empty((*q.shape[:2], v.shape[2]), q.dtype) if out is None else out
    lse = _lse_like(np.empty((q.shape[1], q.shape[0])), q.dtype)
    rules = {
        "is_causal": is_causal, "offset": offset, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks,
        "alibi": alibi, "dropout": dropout, "seed": seed,
    }  # fmt: skip
    for rows, keys, own in _sequences(lengths_q, lengths_k, rules):
        one_q, one_k, one_v = _swap("BLHD", q[None, rows], k[None, keys], v[None, keys])
        of_sequence, lse[:, rows] = (x[0] for x in _forward(one_q, one_k, one_v, own))
        result[rows] = _like(of_sequence.swapaxes(0, 1), q.dtype)
    return (result, lse) if return_lse else result


def attention_packed_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    lengths_q: ArrayLike,
    lengths_k: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    offset: ArrayLike | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    alibi: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    algorithm: str = "auto",
    num_threads: int | None = None,
) -> tuple[Array, ...]:
    """Gradients of ``sum(grad_out * attention_packed(q, k, v, ...))``.

    grad_out and out have the shape of `attention_packed`'s output, lse is (H, total_q). Returns grad_q, grad_k, grad_v in the
    shapes of q, k, v and, where there are sinks, grad_sinks (H,): the sum over the sequences.
    """
    grads = [np.zeros_like(x) for x in ((q, k, v) if sinks is None else (q, k, v, *_wide(sinks)))]
    rules = {
        "is_causal": is_causal, "offset": offset, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks,
        "alibi": alibi, "dropout": dropout, "seed": seed,
    }  # fmt: skip
    for rows, keys, own in _sequences(lengths_q, lengths_k, rules):
        one_g, one_q, one_out = _swap("BLHD", grad_out[None, rows], q[None, rows], out[None, rows])
        one_k, one_v = _swap("BLHD", k[None, keys], v[None, keys])
        of_sequence = _backward(one_g, one_q, one_k, one_v, one_out, lse[None, :, rows], own)
        for grad, where, x in zip(grads, (rows, keys, keys), of_sequence):
            grad[where] = _like(x[0].swapaxes(0, 1), grad.dtype)
        if sinks is not None:
            grads[3] += of_sequence[3]
    return tuple(grads) if sinks is None else (*grads[:3], _like(grads[3], sinks.dtype))
