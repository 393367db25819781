"""The specification of fastmha in plain NumPy: what every kernel must return, and the oracle of the tests.

Axis letters: ``B`` batch, ``Lq`` ``Lk`` lengths, ``H`` query heads, ``Hkv`` key/value heads, ``D`` key width, ``Dv``
value width. One line of mathematics per step, everything materialised, in the dtype of the inputs, or for inputs of float16
and bfloat16 in float64, rounded to theirs at the end. Valid inputs are assumed: the checks and their messages belong to the
functions of the same names in `fastmha`.

Definitions used throughout:

* A pair (i, j) is *removed* by a boolean mask, by -inf in an additive mask, by causality, window or padding.
* A score of -inf, wherever it comes from, has probability exactly 0. A row of only -inf (or of no keys at all) has
  probabilities 0, output 0 and a log-sum-exp (lse) of -inf.
* A removed pair adds nothing to any sum, even if its operands are NaN or Inf. Any other NaN or Inf propagates.
* A sink is the score of one more key, of value 0, that every query of its head attends: it joins the denominator and lse, and is
  no pair: a row without pairs is empty, with the lse of its sink. A sink of -inf is none.
* A *dropped* pair keeps its share of the denominator and lse; its probability counts 0, its operands are multiplied by that 0.

Sources: Vaswani et al. 2017, "Attention Is All You Need", section 3.2; grouped heads: Ainslie et al. 2023, "GQA";
backward from the lse and ``delta``: Dao et al. 2022, "FlashAttention", appendix B; sinks: OpenAI 2025, "gpt-oss model card",
section 2.2; ALiBi: Press et al. 2022, "Train Short, Test Long"; the draws of dropout: Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .masks import create_padding_mask

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
    """Probabilities and lse of the rows, and the probabilities of their sinks; see the definitions above for -inf."""
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
        Ignored.

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
        rows = g.reshape(-1, g.shape[-1])
        grads = g @ W.T, x.reshape(-1, x.shape[-1]).T @ rows
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


# ------------------------------------------------------------------------------------------------------ rounding errors

_LIKELY = 8.0  # times the root of the sum of squares: a sum of independent errors is beyond it once in 4e13 times


@dataclass(frozen=True)
class _Rounding:
    """How errors add up: the `power`-th root of the sum of their powers."""

    power: int  # 1: all of one sign, the worst case; 2: independent
    u: float  # of one rounding, relative

    @property
    def unit(self) -> float:
        """What one rounding counts in the sum."""
        return self.u if self.power == 1 else _LIKELY * self.u

    def raised(self, x: Any) -> Any:
        return np.abs(x) if self.power == 1 else x * x

    def root(self, x: Any) -> Any:
        return x if self.power == 1 else np.sqrt(x)

    def join(self, *errors: Any) -> Array:
        """Of a sum of things that err by these."""
        return self.root(sum(self.raised(error) for error in errors))

    def along(self, errors: Array) -> Array:
        """Of the sums over the last axis, which is kept."""
        return self.root(self.raised(errors).sum(axis=-1, keepdims=True))

    def carried(self, errors: Array, x: Array, fold: Fold = np.asarray) -> Array:
        """Of ``a @ x`` where the elements of a err by these; `fold` adds up the query heads of a group."""
        return self.root(fold(self.raised(errors) @ self.raised(x)))

    def about(self, errors: Array, x: Array, centre: Array, slope: Array | None = None) -> Array:
        """Of ``sum_j a_ij (slope_ij x_j - centre_i)`` where the elements of a err by these; no slope: 1."""
        weights = self.raised(errors)
        size = weights.sum(axis=-1, keepdims=True)
        once, twice = (weights, weights) if slope is None else (weights * slope, weights * slope * slope)
        squares = twice @ (x * x) + centre * centre * size
        total = np.maximum(squares - 2 * centre * (once @ x), 1e-15 * squares)  # float64 knows no more
        return np.sqrt(total * size if self.power == 1 else total)  # power 1: Cauchy-Schwarz

    def rounded(self, terms: Array | int, a: Array, x: Array, fold: Fold = np.asarray) -> Array:
        """Of ``a @ x`` computed as sums of so many rounded products: the notes of `error_bounds`."""
        total = fold(a @ x) if self.power == 2 else np.zeros(())
        return self.summed(terms, total, fold(self.raised(a) @ self.raised(x)))

    def summed(self, terms: Array | int, total: Array, powers: Array) -> Array:
        """Of sums of so many rounded products; the sums of the powers of their terms' sizes."""
        if self.power == 1:
            return (terms + 1) * self.unit * powers
        h = (terms + 1) / 6
        return self.unit * np.sqrt(2 * h * total**2 + (h + 1) * powers)


def product_error_bounds(a: Array, b: Array, dtype: Any) -> Array:
    """How far rounding may take ``a @ b``, computed in `dtype`, from the exact product.

    Parameters
    ----------
    a, b : ndarray of float64
        Finite, and exactly what the computation in `dtype` is given; shapes as in ``a @ b``.
    dtype : numpy.float32 or numpy.float64

    Returns
    -------
    ndarray of float64, of the shape of ``a @ b``
        Absolute, an element each. `error_bounds` says why, and what is assumed of the order of the sums.
    """
    info = np.finfo(dtype)
    terms = a.shape[-1]
    worst, likely = (_Rounding(power, float(info.eps) / 2).rounded(terms, a, b) for power in (1, 2))
    operands = np.abs(a).sum(axis=-1, keepdims=True) + np.abs(b).sum(axis=-2, keepdims=True)
    return np.fmin(worst, likely) + float(info.tiny) * (terms + operands)  # the latter where something underflows


def error_bounds(
    q: Array,
    k: Array,
    v: Array,
    grad_out: Array,
    dtype: Any,
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
) -> list[Array]:
    """How far rounding may take `attention` and `attention_backward`, computed in `dtype`, from the exact results.

    A result that is further away is wrong, whatever BLAS, instruction set and blocking made it; the bounds know none of them.

    Parameters
    ----------
    q, k, v, grad_out : ndarray of float64
        Finite, and exactly what the computation in `dtype` is given; shapes as in `attention_backward`.
    dtype : numpy.float32, numpy.float64, numpy.float16 or ml_dtypes.bfloat16
        If float64, a reference computed in float64 errs as well: two results differ by twice the bound at most. If float16 or
        bfloat16, that of the operands and results of a computation in float32.
    layout, mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout, seed
        As in `attention`; sinks finite or -inf, and like alibi exactly what the computation in `dtype` is given.
    need_bias_grad
        As in `attention_backward`.
    algorithm
        Ignored.

    Returns
    -------
    list of ndarray of float64
        Of out, lse, grad_q, grad_k and grad_v, and of grad_sinks and grad_mask where `attention_backward` returns them: absolute,
        an element each, finite also where no score is left of the rounding; 0 for the -inf of an empty row in lse.

    Notes
    -----
    An operation returns ``x (1 + d)`` with ``|d| <= u = eps / 2``, or 0 instead of operands and results below the smallest normal
    number. Such errors are followed to first order through the formulas of `attention_backward` and added up in two ways;
    for each element the smaller sum counts:

    * *worst case*: all of one sign.
    * *likely*: independent and of mean 0, so that their sum is beyond 8 times the root of the sum of their squares with
      probability 2 exp(-8² / 2) = 2.5e-14 at most (Hoeffding's inequality; Higham and Mary 2019, "A new approach to
      probabilistic rounding error analysis"). An error that the keys of a row share is added as in the worst case.

    **A sum of n products** x_m, with sum S and sum of squares Q. Worst case: no partial sum is larger than ``sum|x_m|``, so that
    n + 1 roundings make ``(n + 1) u sum|x_m|``. Likely: each product errs by ``u |x_m|``, each addition by u times a partial sum.
    Of terms in no particular order (sorted ones may err more) the first m have the mean m S / n and the variance (Q - S² / n) m
    (n - m) / (n (n - 1)), so that the squares of all partial sums and products add up to S² (n + 1) / 3 + Q ((n + 1) / 6 + 1).
    Blocks, lanes and fused multiply-adds round less.

    **A score** s_ij = scale q_i·k_j: its sum of D products; ``u |s_ij|`` where the scale is multiplied in, or u of each element
    of q, the same for all keys, if it is there; ``u |s_ij|`` of the scale itself. A softcap adds ``3 u |s|`` before the
    hyperbolic tangent and ``4 u |s|`` behind it. ALiBi rounds its product, ``u |slope distance|``, in every row and batch row
    alike where the distance is the same (and once more a distance beyond 1 / u, which `dtype` cannot hold), and the difference to
    ``u |s - slope distance|``. An additive mask rounds the sum to ``u |s + mask|``: beside a mask of -1e9 nothing is left of a
    score. A sink is exact. The exponential adds ``u |s - peak|`` of its argument, and 3 u (1.5 units in the last place). Together
    this is e_ij, a relative error of exp(s_ij - peak).

    **What e does**, with z = dP - delta and dS = P z: to P, P_ij (e_ij - sum_k P_ik e_ik); to lse, sum_j P_ij e_ij; to out,
    sum_j P_ij e_ij (v_j - out_i); to delta, sum_j P_ij e_ij z_ij; to grad_q, scale sum_j P_ij e_ij z_ij (k_j - sum_k P_ik k_k)
    and grad_q times the change of lse; to grad_k and grad_v what the changes of dS and P do. If e is not small, P changes by
    the exponential of it, and stays between 0 and 1; a P below the smallest normal number may become 0. To grad_mask it does
    the sum of the changes of dS without the softcap's slope; those of one row, which share delta, are added as in the worst case.

    **A sink** is one more key here, with the product 0, the value 0 and thereby dP = 0: one more term of the denominator, and
    grad_sinks the sum over the rows of its dS = -P delta.

    **Dropout** multiplies v_j in the change of out, grad_out in that of grad_v, and is part of dP: by the exact number 0, or by
    1 / (1 - p), rounded once for all pairs and again in each product. Both are added, u of the results and 2 u of each product.

    **Behind the scores**, each over the pairs that are left: the sums of exponentials, P v, grad_out v, delta (as grad_out·out
    and as sum P dP: an algorithm takes one of them), dS k, dS q and P grad_out, the sums of dS that are grad_sinks and grad_mask,
    and a few single roundings. Where lse normalises P backward, it brings ``u |lse|``; more than P itself it cannot.

    **Half precision** rounds each result but lse once more, to its own u, beyond its largest number to infinity. Backward out is
    such a result: where delta is grad_out·out it errs by ``sum_c u |grad_out_ic out_ic|``, which the keys of a row share; added
    as in the worst case, as is what it does to dS: P_ij times as much.
    """
    if np.dtype(dtype).name in _HALF:
        return _half_bounds(q, k, v, grad_out, np.dtype(dtype).name, {
            "layout": layout, "mask": mask, "is_causal": is_causal, "offset": offset, "key_padding_lengths": key_padding_lengths,
            "key_ranges": key_ranges, "window": window, "scale": scale, "softcap": softcap, "sinks": sinks, "alibi": alibi,
            "dropout": dropout, "seed": seed,
        }, need_bias_grad)  # fmt: skip
    q, k, v, grad_out = _swap(layout, q, k, v, grad_out)
    (B, H, Lq, D), (kv_heads, Lk, Dv) = q.shape, v.shape[1:]
    shape_of_mask = mask.shape if need_bias_grad and mask is not None else None
    if 0 in (B, H, Lq, Lk):
        bounds = [np.zeros(shape) for shape in ((B, H, Lq, Dv), (B, H, Lq), q.shape, k.shape, v.shape)]
        further = [np.zeros(shape) for shape in (None if sinks is None else (H,), shape_of_mask) if shape is not None]
        return [*_swap(layout, bounds[0]), bounds[1], *_swap(layout, *bounds[2:]), *further]
    factor = float(scale) if scale is not None else 1 / math.sqrt(D) if D else 1.0
    if factor < 0:
        q, factor = -q, -factor
    rules = _Rules(
        mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout, seed
    )
    gone = np.broadcast_to(rules.removed(Lq, Lk), (B, H, Lq, Lk))
    additive = None if mask is None or mask.dtype == bool else np.where(np.isneginf(mask), 0, mask)
    distances = None if alibi is None else (alibi[:, None, None], np.abs(_ahead(Lq, Lk, offset)).astype(np.float64))
    drawn = np.broadcast_to(rules.drawn(np.zeros(gone.shape)), gone.shape) if dropout else None
    info = np.finfo(dtype)
    tiny = float(info.tiny)  # what an underflow loses at most

    def fold(x: Array) -> Array:
        return _sum_groups(x, kv_heads)

    # The sizes are taken out: then nothing here, squares of scores among them, over- or underflows where the results do not.
    size_q, size_k, size_v, size_g = (float(np.abs(x).max(initial=0)) or 1.0 for x in (q, k, v, grad_out))
    operands = q / size_q, _per_query_head(k, H) / size_k, _per_query_head(v, H) / size_v, grad_out / size_g
    keys = (~gone).sum(axis=-1, keepdims=True)
    rows = fold((~gone).sum(axis=-2)[..., None])
    lost_scores = tiny * max(1, factor) * (D + 2 + D * size_q + D * size_k)
    problem = _Problem(
        operands, factor * size_q * size_k, gone, distances, additive, softcap, sinks, drawn, shape_of_mask, lost_scores, fold
    )
    with np.errstate(all="ignore"):
        ways = _propagated(float(info.eps) / 2, tiny, problem)
        # squares of what is smaller underflow: rows of which a sink leaves next to nothing
        out, lse, grad_q, grad_k, grad_v, *further = (
            np.where(likely > 1e-140, np.fmin(worst, likely), worst) for worst, likely in zip(*ways)
        )
    most = 1 / (1 - dropout)
    lost = tiny * max(1, factor) * (Dv + 4) * (1 + size_g) * (1 + size_v) * most
    out = out * size_v + tiny * (keys + 3) * most
    grad_q = grad_q / size_q * size_g * size_v + lost * (keys + 2) * (1 + size_k)
    grad_k = grad_k[:, :, :Lk] / size_k * size_g * size_v + lost * (rows + 2) * (1 + size_q)
    grad_v = grad_v[:, :, :Lk] * size_g + tiny * (2 * rows + 2) * most
    further = [x * size_g * size_v + lost * (gone.size / max(x.size, 1) + 2) for x in further]
    return [*_swap(layout, out), lse, *_swap(layout, grad_q, grad_k, grad_v), *further]


def _half_bounds(
    q: Array, k: Array, v: Array, grad_out: Array, name: str, rules: dict[str, Any], need_bias_grad: bool
) -> list[Array]:
    """`error_bounds` of results of half precision: of those in float32, with the rounding of the results on top of them."""
    u, least, largest = _HALF[name]
    bounds = error_bounds(q, k, v, grad_out, np.float32, **rules, need_bias_grad=need_bias_grad)
    out, lse = attention(q, k, v, return_lse=True, **rules)
    exact = [out, lse, *attention_backward(grad_out, q, k, v, out, lse, **rules, need_bias_grad=need_bias_grad)]
    layout = rules["layout"]
    given = _Rules(**{rule: x for rule, x in rules.items() if rule != "layout"})
    q, k, v, grad_out, out = _swap(layout, q, k, v, grad_out, out)
    gone = given.removed(q.shape[2], k.shape[2])
    shift = (np.abs(grad_out) * np.maximum(u * np.abs(out), least)).sum(axis=-1, keepdims=True)  # what delta errs by
    with np.errstate(all="ignore"):
        scores, slope, factor = given.scores(q, _per_query_head(k, q.shape[1]), gone)
        weights, _, of_sinks = _softmax(scores, given.sinks)
        of_capped = np.broadcast_to(weights * shift, scores.shape)
        of_scores = abs(factor) * of_capped * (1 if slope is None else slope)
        more = [
            np.abs(weights * (1 if slope is None else slope) @ _per_query_head(k, q.shape[1])) * abs(factor) * shift,
            _sum_groups(of_scores.swapaxes(-1, -2) @ np.abs(q), k.shape[1]),
        ]
        more = [np.zeros(()), np.zeros(()), *_swap(layout, *more), np.zeros(())]
        if given.sinks is not None:
            more.append((of_sinks * shift[..., 0]).sum(axis=(0, 2)))
        if need_bias_grad and given.mask is not None:
            more.append(_sum_to_shape(of_capped, given.mask.shape))
        bounds = [x + y for x, y in zip(bounds, more)]
        for i, x in enumerate(exact):
            if i != 1:
                most = np.abs(x) + bounds[i]
                bounds[i] = np.where(most < largest, bounds[i] + np.maximum(u * most, least), np.inf)
    return bounds


@dataclass(frozen=True)
class _Problem:
    """What `_propagated` follows errors through; arrays without a sink's column."""

    operands: tuple[Array, Array, Array, Array]  # q, k, v, grad_out: (B, H, L, width), of size 1 at most
    factor: float
    gone: Array
    distances: tuple[Array, Array] | None  # the slopes of ALiBi and what they multiply
    additive: Array | None
    softcap: float | None
    sinks: Array | None
    drawn: Array | None  # what dropout multiplies probabilities by
    shape_of_mask: tuple[int, ...] | None  # where its gradient is wanted
    lost_scores: float
    fold: Fold


def _propagated(u: float, tiny: float, problem: _Problem) -> list[list[Array]]:
    """The bounds of `error_bounds` in both ways of adding up."""
    (q, k, v, grad_out), factor, fold, sinks = problem.operands, problem.factor, problem.fold, problem.sinks
    left, drawn, softcap = ~problem.gone, problem.drawn, problem.softcap
    length, width, value_width = k.shape[2], q.shape[-1], v.shape[-1]

    def transposed(x: Array) -> Array:
        return x.swapaxes(-1, -2)

    def with_sink(x: Array, value: float = 0.0) -> Array:
        """One more column, that of the sink."""
        if sinks is None:
            return x
        return np.concatenate([x, np.full((*x.shape[:-1], 1), value, x.dtype)], axis=-1)

    # The exact results, and what they are made of.
    products = q @ transposed(k) * factor
    scores, tanh, slope = products, np.zeros(()), None
    if softcap is not None:
        cap = abs(float(softcap))
        tanh = np.tanh(np.abs(products) / cap)
        scores, slope = np.copysign(cap * tanh, products), 1 - tanh * tanh
    sums, of_alibi = [], None  # of scores with what is added to them; of products with slopes
    if problem.distances is not None:
        slopes, distance = problem.distances
        scores = scores - slopes * distance
        sums.append(with_sink(scores))
        of_alibi = with_sink(u * np.abs(slopes * distance) * (1 + (distance * u > 1)))
    if problem.additive is not None:
        scores = scores + problem.additive
        sums.append(with_sink(scores))
    if sinks is not None:
        k, v = transposed(with_sink(transposed(k))), transposed(with_sink(transposed(v)))
        products, scores, left = with_sink(products), with_sink(scores), with_sink(left, True)
        scores[..., -1] = np.where(sinks == -np.inf, 0, sinks)[:, None]
        left[..., -1] = (sinks != -np.inf)[:, None]
        if slope is not None:
            tanh, slope = with_sink(tanh), with_sink(slope, 1)
    keys, rows = left.sum(axis=-1, keepdims=True), fold(left.sum(axis=-2)[..., None])
    weights, lse, _ = _softmax(np.where(left, scores, -np.inf))
    some = left.any(axis=-1, keepdims=True)
    lse = np.where(some, lse[..., None], 0)
    log_weights = np.where(left, scores - lse, -np.inf)
    log_sum = np.where(some, -log_weights.max(axis=-1, keepdims=True), 0)  # of exp(scores - peak)
    drawn_weights, grad_weights = weights, grad_out @ transposed(v)
    if drawn is not None:
        drawn = with_sink(drawn)
        drawn_weights, grad_weights = weights * drawn, grad_weights * drawn
    out = drawn_weights @ v
    delta = (weights * grad_weights).sum(axis=-1, keepdims=True)
    z = grad_weights - delta
    sloped = weights if slope is None else weights * slope
    grad_scores, middle = sloped * z, sloped @ k  # middle: where a change of delta goes
    grad_q, grad_k = factor * (grad_scores @ k), factor * fold(transposed(grad_scores) @ q)

    def sums_of_scores(x: Array) -> list[Array]:
        """The sums of the pairs' gradients that are grad_sinks and grad_mask; x may have had its rows added up."""
        of_sinks = [] if sinks is None else [x[..., -1].sum(axis=(0, 2))]
        return of_sinks + ([] if problem.shape_of_mask is None else [_sum_to_shape(x[..., :length], problem.shape_of_mask)])

    def carried_to_sums(model: _Rounding, errors: Array) -> list[Array]:
        """Of these sums where the gradients err so: worst case in a row, where errors are shared."""
        if problem.shape_of_mask is not None and problem.shape_of_mask[-1] == 1 and length > 1:
            whole = errors[..., :length].sum(axis=-1, keepdims=True)
            errors = np.concatenate([whole, np.zeros_like(errors[..., 1:length]), errors[..., length:]], axis=-1)
        return [model.root(x) for x in sums_of_scores(model.raised(errors))]

    def of_scores(model: _Rounding) -> tuple[list[Array], Array]:
        """Errors of the scores: a pair's own; those that the keys of a row share; those that all share. Of the slope."""
        unit = model.unit
        own = model.join(factor * model.rounded(width, q, transposed(k)), unit * products) + problem.lost_scores
        errors, of_slope = [own, factor * unit * model.carried(q, transposed(k)), u * np.abs(products)], np.zeros(())
        if slope is not None:
            errors[0] = model.join(errors[0], 3 * unit * products)
            size = np.abs(products) / cap
            errors = [cap * np.tanh(e / cap) * (1 - tanh * np.tanh(size - e / cap)) for e in errors]  # tanh(a) - tanh(b)
            errors[0] = model.join(errors[0], 4 * unit * cap * tanh)
            of_slope = model.join(2 * tanh * sum(errors) / cap, unit * tanh, unit * slope)
        if of_alibi is not None:
            errors.append(of_alibi)
        rounded = [unit * x for x in sums]
        errors[0] = model.join(errors[0], *rounded, unit * np.where(left, log_weights + log_sum, 0), 3 * unit)
        return [np.where(left, e, 0) for e in (errors if model.power == 2 else [sum(errors)])], of_slope

    def changes(errors: Array, along_row: _Rounding, along_column: _Rounding) -> list[Array]:
        """Of out, lse, grad_q, grad_k, grad_v and the sums of gradients with errors of the scores, which add up so."""
        shifted, linear = log_weights + errors, weights * errors
        most = shifted.max(axis=-1, keepdims=True, initial=0)
        large = np.where(errors < 1, weights * np.expm1(np.minimum(errors, 1)), np.exp(np.minimum(shifted, 300)))
        of_lse = np.where(most < 300, np.log1p(along_row.along(large)), most + np.log(np.maximum(keys, 1)))
        powers = along_row.raised(linear)
        others = along_row.root(np.maximum(powers.sum(axis=-1, keepdims=True) - powers, 0))
        relative = np.where((errors < 0.5) & (of_lse < 0.5), errors - linear + others, errors + of_lse)
        of_weights = np.where(
            relative < 1, weights * np.expm1(np.minimum(relative, 1)), np.exp(np.minimum(log_weights + relative, 0))
        )
        of_weights = np.where(left, of_weights + tiny, 0)
        weighted = of_weights * np.abs(z)
        of_capped = weighted + weights * along_row.along(weighted)  # behind the softcap
        of_grad_scores = of_capped if slope is None else of_capped * slope
        return [
            along_row.about(of_weights, v, out, drawn),
            of_lse,
            factor * along_row.about(weighted, k, middle, slope) + np.minimum(of_lse, 1) * np.abs(grad_q),
            factor * along_column.carried(transposed(of_grad_scores), q, fold),
            along_column.carried(transposed(of_weights if drawn is None else of_weights * drawn), grad_out, fold),
            *carried_to_sums(along_column, of_capped),
        ]

    def roundings(model: _Rounding, of_slope: Array) -> list[Array]:
        """Of the same, behind the scores."""
        unit, ones = model.unit, np.ones((max(weights.shape[-1], value_width), 1))
        of_draw = 0.0 if drawn is None else unit  # of 1 / (1 - p); 2 of it: of a product with it too
        of_sum = model.rounded(keys, weights, ones[: weights.shape[-1]])  # relative, of the sum of exponentials
        of_out = model.join(model.rounded(keys, drawn_weights, v), 3 * unit * out)
        of_grad_weights = model.rounded(value_width, grad_out, transposed(v))
        if drawn is not None:
            of_out = model.join(of_out, of_draw * out, model.carried(2 * of_draw * drawn_weights, v))
            of_grad_weights = model.join(of_grad_weights * drawn, 2 * of_draw * grad_weights)
        of_lse = model.join(of_sum, 3 * unit * log_sum, unit * lse)
        of_weights = np.minimum(model.join(of_lse, unit * lse), 1)  # relative, of a whole row
        of_delta = model.join(
            model.rounded(value_width, grad_out * out, ones[:value_width]),
            model.along(of_out * grad_out),
            model.rounded(keys, weights * grad_weights, ones[: weights.shape[-1]]),
            model.along(weights * of_grad_weights),
            of_sum * delta,
        )
        of_capped = model.join(weights * of_grad_weights, 5 * unit * weights * z, weights * of_delta, of_weights * weights * z)
        of_grad_scores = model.join(sloped * of_grad_weights, 5 * unit * grad_scores, weights * z * of_slope)
        of_grad_q = model.join(
            factor * model.rounded(keys, grad_scores, k), factor * model.carried(of_grad_scores, k),
            factor * middle * of_delta, of_weights * grad_q, (2 * unit + of_draw) * grad_q,
        )  # fmt: skip
        of_grad_scores = model.join(of_grad_scores, sloped * of_delta, of_weights * grad_scores)
        of_grad_k = model.join(
            factor * model.rounded(rows, transposed(grad_scores), q, fold),
            factor * model.carried(transposed(of_grad_scores), q, fold), (2 * unit + of_draw) * grad_k,
        )  # fmt: skip
        of_grad_v = model.join(
            model.rounded(rows, transposed(drawn_weights), grad_out, fold),
            model.carried(transposed(drawn_weights * model.join(of_weights, 2 * of_draw)), grad_out, fold),
            of_draw * fold(transposed(drawn_weights) @ grad_out),
        )
        capped = weights * z
        parts = map(sums_of_scores, (left + 0, capped, model.raised(capped)))
        of_sums = [
            model.join(error, of_draw * total, model.summed(terms, total, powers))
            for error, terms, total, powers in zip(carried_to_sums(model, of_capped), *parts)
        ]
        return [model.join(of_out, of_sum * out), of_lse, of_grad_q, of_grad_k, of_grad_v, *of_sums]

    def added_up(model: _Rounding) -> list[Array]:
        (own, *shared), of_slope = of_scores(model)
        total = [model.join(*parts) for parts in zip(roundings(model, of_slope), changes(own, model, model))]
        for errors, along_column in zip(shared, (model, worst, worst)):
            total = [x + y for x, y in zip(total, changes(errors, worst, along_column))]
        total[1] = total[1][..., 0]
        return total

    worst = _Rounding(1, u)
    return [added_up(worst), added_up(_Rounding(2, u))]
