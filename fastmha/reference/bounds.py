"""How far rounding alone may take each result from the exact one: the errors of every step, added up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fastmha.reference.heads import (
    _HALF,
    Array,
    Fold,
    Ranges,
    Window,
    _ahead,
    _per_query_head,
    _Rules,
    _softmax,
    _sum_groups,
    _sum_to_shape,
    _swap,
    attention,
    attention_backward,
)

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
        return np.sqrt(total) * np.sqrt(size) if self.power == 1 else np.sqrt(total)  # power 1: Cauchy-Schwarz

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
        bfloat16, that of the operands and results of a computation in float32: what products of bfloat16 on ``amx`` and
        ``avx512bf16`` round besides, probabilities and gradients of scores, is not in it.
    layout, mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout, seed
        As in `attention`; sinks finite or -inf, and like alibi exactly what the computation in `dtype` is given.
    need_bias_grad
        As in `attention_backward`.
    algorithm
        Ignored: the bounds hold for each, and so the keywords of a call serve.

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
    Of terms in no particular order (sorted ones, and many that are equal, may err more) the first m have the mean m S / n and
    the variance (Q - S² / n) m (n - m) / (n (n - 1)), so that the squares of all partial sums and products add up to
    S² (n + 1) / 3 + Q ((n + 1) / 6 + 1). Blocks, lanes and fused multiply-adds round less.

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
    the exponential of it, and stays between 0 and 1, and its change times that of delta counts, too; a P below the smallest
    normal number may become 0. To grad_mask it does the sum of the changes of dS without the softcap's slope; those of one row,
    which share delta, are added as in the worst case.

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


def _transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)


@dataclass(frozen=True)
class _Exact:
    """The exact results of a `_Problem`, and what they are made of; where there are sinks, with a last column for theirs."""

    q: Array
    k: Array
    v: Array
    grad_out: Array
    left: Array  # pairs that are not removed
    keys: Array  # how many of a row,
    rows: Array  # and of a key
    products: Array
    tanh: Array  # of the softcap, whose derivative is `slope`
    slope: Array | None
    cap: float
    sums: list[Array]  # of scores with what is added to them
    of_alibi: Array | None  # what products with slopes err by
    weights: Array
    log_weights: Array
    lse: Array
    log_sum: Array  # of exp(scores - peak)
    drawn: Array | None
    drawn_weights: Array
    grad_weights: Array
    out: Array
    delta: Array
    z: Array  # grad_weights - delta
    sloped: Array
    grad_scores: Array
    middle: Array  # where a change of delta goes
    grad_q: Array
    grad_k: Array


def _exact(u: float, problem: _Problem) -> _Exact:
    (q, k, v, grad_out), factor, fold, sinks = problem.operands, problem.factor, problem.fold, problem.sinks
    left, drawn, softcap, cap = ~problem.gone, problem.drawn, problem.softcap, 0.0

    def with_sink(x: Array, value: float = 0.0) -> Array:
        """One more column, that of the sink."""
        if sinks is None:
            return x
        return np.concatenate([x, np.full((*x.shape[:-1], 1), value, x.dtype)], axis=-1)

    products = q @ _transposed(k) * factor
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
        k, v = _transposed(with_sink(_transposed(k))), _transposed(with_sink(_transposed(v)))
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
    drawn_weights, grad_weights = weights, grad_out @ _transposed(v)
    if drawn is not None:
        drawn = with_sink(drawn)
        drawn_weights, grad_weights = weights * drawn, grad_weights * drawn
    out = drawn_weights @ v
    delta = (weights * grad_weights).sum(axis=-1, keepdims=True)
    z = grad_weights - delta
    sloped = weights if slope is None else weights * slope
    grad_scores, middle = sloped * z, sloped @ k  # middle: where a change of delta goes
    grad_q, grad_k = factor * (grad_scores @ k), factor * fold(_transposed(grad_scores) @ q)
    return _Exact(
        q, k, v, grad_out, left, keys, rows, products, tanh, slope, cap, sums, of_alibi, weights, log_weights, lse, log_sum,
        drawn, drawn_weights, grad_weights, out, delta, z, sloped, grad_scores, middle, grad_q, grad_k,
    )  # fmt: skip


class _Propagation:
    """How errors of a problem's steps go through those behind them."""

    def __init__(self, u: float, tiny: float, problem: _Problem) -> None:
        self.u, self.tiny, self.problem, self.exact = u, tiny, problem, _exact(u, problem)
        self.worst = _Rounding(1, u)

    def added_up(self, model: _Rounding) -> list[Array]:
        """The bounds of the results, in one way of adding up."""
        (own, *shared), of_slope = self.of_scores(model)
        total = [model.join(*parts) for parts in zip(self.roundings(model, of_slope), self.changes(own, model, model))]
        for errors, along_column in zip(shared, (model, self.worst, self.worst)):
            total = [x + y for x, y in zip(total, self.changes(errors, self.worst, along_column))]
        total[1] = total[1][..., 0]
        return total

    def of_scores(self, model: _Rounding) -> tuple[list[Array], Array]:
        """Errors of the scores: a pair's own; those that the keys of a row share; those that all share. Of the slope."""
        x, u, factor = self.exact, self.u, self.problem.factor
        q, k, products, tanh, slope, cap = x.q, x.k, x.products, x.tanh, x.slope, x.cap
        unit = model.unit
        own = model.join(factor * model.rounded(q.shape[-1], q, _transposed(k)), unit * products) + self.problem.lost_scores
        errors, of_slope = [own, factor * unit * model.carried(q, _transposed(k)), u * np.abs(products)], np.zeros(())
        if slope is not None:
            errors[0] = model.join(errors[0], 3 * unit * products)
            size = np.abs(products) / cap
            errors = [cap * np.tanh(e / cap) * (1 - tanh * np.tanh(size - e / cap)) for e in errors]  # tanh(a) - tanh(b)
            errors[0] = model.join(errors[0], 4 * unit * cap * tanh)
            of_slope = model.join(2 * tanh * sum(errors) / cap, unit * tanh, unit * slope)
        if x.of_alibi is not None:
            errors.append(x.of_alibi)
        rounded = [unit * each for each in x.sums]
        errors[0] = model.join(errors[0], *rounded, unit * np.where(x.left, x.log_weights + x.log_sum, 0), 3 * unit)
        return [np.where(x.left, e, 0) for e in (errors if model.power == 2 else [sum(errors)])], of_slope

    def changes(self, errors: Array, along_row: _Rounding, along_column: _Rounding) -> list[Array]:
        """Of out, lse, grad_q, grad_k, grad_v and the sums of gradients with errors of the scores, which add up so."""
        x, tiny, factor, fold = self.exact, self.tiny, self.problem.factor, self.problem.fold
        weights, log_weights, slope, drawn = x.weights, x.log_weights, x.slope, x.drawn
        shifted, linear = log_weights + errors, weights * errors
        most = shifted.max(axis=-1, keepdims=True, initial=0)
        large = np.where(errors < 1, weights * np.expm1(np.minimum(errors, 1)), np.exp(np.minimum(shifted, 300)))
        of_lse = np.where(most < 300, np.log1p(along_row.along(large)), most + np.log(np.maximum(x.keys, 1)))
        powers = along_row.raised(linear)
        others = along_row.root(np.maximum(powers.sum(axis=-1, keepdims=True) - powers, 0))
        relative = np.where((errors < 0.5) & (of_lse < 0.5), errors - linear + others, errors + of_lse)
        of_weights = np.where(
            relative < 1, weights * np.expm1(np.minimum(relative, 1)), np.exp(np.minimum(log_weights + relative, 0))
        )
        of_weights = np.where(x.left, of_weights + tiny, 0)
        weighted = of_weights * np.abs(x.z)
        of_delta = along_row.along(weighted)
        weighted = weighted + of_weights * of_delta  # of second order, where weights change by as much as themselves
        of_capped = weighted + weights * of_delta  # behind the softcap
        of_grad_scores = of_capped if slope is None else of_capped * slope
        return [
            along_row.about(of_weights, x.v, x.out, drawn),
            of_lse,
            factor * along_row.about(weighted, x.k, x.middle, slope) + np.minimum(of_lse, 1) * np.abs(x.grad_q),
            factor * along_column.carried(_transposed(of_grad_scores), x.q, fold),
            along_column.carried(_transposed(of_weights if drawn is None else of_weights * drawn), x.grad_out, fold),
            *self.carried_to_sums(along_column, of_capped),
        ]

    def roundings(self, model: _Rounding, of_slope: Array) -> list[Array]:
        """Of the same, behind the scores."""
        x, factor, fold, keys, rows = self.exact, self.problem.factor, self.problem.fold, self.exact.keys, self.exact.rows
        k, v, grad_out, drawn, weights, drawn_weights = x.k, x.v, x.grad_out, x.drawn, x.weights, x.drawn_weights
        grad_weights, grad_scores, z, sloped, value_width = x.grad_weights, x.grad_scores, x.z, x.sloped, x.v.shape[-1]
        unit, ones = model.unit, np.ones((max(weights.shape[-1], value_width), 1))
        of_draw = 0.0 if drawn is None else unit  # of 1 / (1 - p); 2 of it: of a product with it too
        of_sum = model.rounded(keys, weights, ones[: weights.shape[-1]])  # relative, of the sum of exponentials
        of_out = model.join(model.rounded(keys, drawn_weights, v), 3 * unit * x.out)
        of_grad_weights = model.rounded(value_width, grad_out, _transposed(v))
        if drawn is not None:
            of_out = model.join(of_out, of_draw * x.out, model.carried(2 * of_draw * drawn_weights, v))
            of_grad_weights = model.join(of_grad_weights * drawn, 2 * of_draw * grad_weights)
        of_lse = model.join(of_sum, 3 * unit * x.log_sum, unit * x.lse)
        of_weights = np.minimum(model.join(of_lse, unit * x.lse), 1)  # relative, of a whole row
        of_delta = model.join(
            model.rounded(value_width, grad_out * x.out, ones[:value_width]),
            model.along(of_out * grad_out),
            model.rounded(keys, weights * grad_weights, ones[: weights.shape[-1]]),
            model.along(weights * of_grad_weights),
            of_sum * x.delta,
        )
        of_capped = model.join(weights * of_grad_weights, 5 * unit * weights * z, weights * of_delta, of_weights * weights * z)
        of_grad_scores = model.join(sloped * of_grad_weights, 5 * unit * grad_scores, weights * z * of_slope)
        of_grad_q = model.join(
            factor * model.rounded(keys, grad_scores, k), factor * model.carried(of_grad_scores, k),
            factor * x.middle * of_delta, of_weights * x.grad_q, (2 * unit + of_draw) * x.grad_q,
        )  # fmt: skip
        of_grad_scores = model.join(of_grad_scores, sloped * of_delta, of_weights * grad_scores)
        of_grad_k = model.join(
            factor * model.rounded(rows, _transposed(grad_scores), x.q, fold),
            factor * model.carried(_transposed(of_grad_scores), x.q, fold), (2 * unit + of_draw) * x.grad_k,
        )  # fmt: skip
        of_grad_v = model.join(
            model.rounded(rows, _transposed(drawn_weights), grad_out, fold),
            model.carried(_transposed(drawn_weights * model.join(of_weights, 2 * of_draw)), grad_out, fold),
            of_draw * fold(_transposed(drawn_weights) @ grad_out),
        )
        capped = weights * z
        parts = map(self.sums_of_scores, (x.left + 0, capped, model.raised(capped)))
        of_sums = [
            model.join(error, of_draw * total, model.summed(terms, total, powers))
            for error, terms, total, powers in zip(self.carried_to_sums(model, of_capped), *parts)
        ]
        return [model.join(of_out, of_sum * x.out), of_lse, of_grad_q, of_grad_k, of_grad_v, *of_sums]

    def sums_of_scores(self, x: Array) -> list[Array]:
        """The sums of the pairs' gradients that are grad_sinks and grad_mask; x may have had its rows added up."""
        of_sinks = [] if self.problem.sinks is None else [x[..., -1].sum(axis=(0, 2))]
        shape, length = self.problem.shape_of_mask, self.problem.gone.shape[-1]
        return of_sinks + ([] if shape is None else [_sum_to_shape(x[..., :length], shape)])

    def carried_to_sums(self, model: _Rounding, errors: Array) -> list[Array]:
        """Of these sums where the gradients err so: worst case in a row, where errors are shared."""
        shape, length = self.problem.shape_of_mask, self.problem.gone.shape[-1]
        if shape is not None and shape[-1] == 1 and length > 1:
            whole = errors[..., :length].sum(axis=-1, keepdims=True)
            errors = np.concatenate([whole, np.zeros_like(errors[..., 1:length]), errors[..., length:]], axis=-1)
        return [model.root(x) for x in self.sums_of_scores(model.raised(errors))]


def _propagated(u: float, tiny: float, problem: _Problem) -> list[list[Array]]:
    """The bounds of `error_bounds` in both ways of adding up."""
    propagation = _Propagation(u, tiny, problem)
    return [propagation.added_up(propagation.worst), propagation.added_up(_Rounding(2, u))]
