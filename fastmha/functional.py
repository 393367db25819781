"""Attention and the textbook functions: validate, plan, call the core."""
from __future__ import annotations

from typing import Any

import numpy as np

from fastmha import _core, algorithms, threads, validate
from fastmha import capture as captures
from fastmha._core import Problem
from fastmha.algorithms import AUTO
from fastmha.capture import Capture
from fastmha.merging import shares
from fastmha.planning import Plan, choose, make_plan
from fastmha.validate import KeyRanges, Rules


@validate.own_keywords(validate.CALL_NAMES)
def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, layout: str = "BHLD", mask: np.ndarray | None = None,
    is_causal: bool = False, offset: int | np.ndarray | None = None, key_padding_lengths: np.ndarray | None = None,
    key_ranges: KeyRanges | None = None, window: tuple[int | None, int | None] | None = None, scale: float | None = None,
    softcap: float | None = None, sinks: np.ndarray | None = None, alibi: np.ndarray | None = None, dropout: float = 0.0,
    seed: int | None = None, algorithm: str = "auto", return_lse: bool = False, out: np.ndarray | None = None,
    capture: Capture | None = None, num_threads: int | None = None, precision: str | None = None,
) -> Any:
    """Scaled dot-product attention on heads: softmax(scale · q kᵀ, masked) v [1]_.

    Parameters
    ----------
    q : (B, H, Lq, D) array of float32, float64, float16 or bfloat16
        Queries; (B, Lq, H, D) with ``layout="BLHD"``. Any strides: only an array whose last axis is not unit-stride or
        that is not aligned is copied ("blas": also heads whose row stride BLAS cannot take).
    k : (B, Hkv, Lk, D) array of q's dtype
        Keys. H must be a multiple of Hkv; query head h reads key/value head ``h // (H // Hkv)``. Where q is float32 or float64,
        k and v may both be float16 or both bfloat16.
    v : (B, Hkv, Lk, Dv) array of k's dtype
        Values.
    layout : {"BHLD", "BLHD"}
        Axis order of q, k, v and the output. "BHLD": each head contiguous. "BLHD": what a fused projection writes, each
        head a strided view.
    mask : array of bool, of q's dtype or where that is of half precision of float32, optional
        (Lq, Lk), or 4 axes that broadcast to (B, H, Lq, Lk); never expanded in memory. bool: True = may **not** attend.
        Float: added to the scores, -inf = removed.
    is_causal : bool
        Query i may attend key j iff ``j <= i + offset``. For Lq = 2, Lk = 4 (x = may attend)::

            offset = 0:  x . . .        offset = 2 (= Lk - Lq):  x x x .
                         x x . .                                 x x x x

    offset : int or (B,) array of int, optional
        Position of query 0 among the keys, for `is_causal`, `window` and `alibi`, within ±2**61. Default 0 where Lq == Lk; must
        be given elsewhere.
    key_padding_lengths : (B,) array of int, optional
        Valid keys of each batch row, 0 to Lk; those behind are removed.
    key_ranges : (starts, ends), optional
        Keys ``starts[b] <= j < ends[b]`` of batch row b are valid, all others are removed. Each side is a (B,) array of int, one
        int for all rows, or None: from key 0, to Lk. With key_padding_lengths a row ends at the smaller of both. For left
        padding, here of rows with 3 and 5 tokens (x = valid, . = padding)::

            starts = [2, 0]:  . . x x x
                              x x x x x

    window : (left, right), optional
        Key j is kept iff ``i + offset - left <= j <= i + offset + right``; a side None (or from 2**62 on) is unbounded.
    scale : float, optional
        Factor of the products, default 1/sqrt(D).
    softcap : float, optional
        Scores s become ``softcap * tanh(s / softcap)``, before any mask.
    sinks : (H,) array of q's dtype or where that is of half precision of float32, optional
        Logits of query heads that join the denominator alone: the weights of a row of head h add up to less than 1 by
        ``exp(sinks[h] - lse)``.
    alibi : (H,) array of a dtype as for sinks, optional
        Slopes: scores get ``-alibi[h] * |i + offset - j|``, behind the softcap and before any mask [2]_; no array of (Lq, Lk) is
        made.
    dropout : float
        Each weight is 0 with this probability p, 0 <= p < 1, and divided by 1 - p elsewhere. What is drawn for a pair follows
        from (seed, b, h, i, j) alone [3]_: the same for every algorithm, tiling and number of threads, never stored, drawn again
        backward.
    seed : int, with `dropout`
        0 to 2**64 - 1. A call with the same seed draws the same.
    algorithm : {"auto", "blas", "tiled", "decode"}
        "blas": scores in blocks, products by BLAS. "tiled": fused, O(L) memory. "decode": few queries, many keys, forward
        only. "auto" chooses (see `fastmha.plan`).
    return_lse : bool
        Also return the log of the sum of exponentials of each row, as the backward pass needs it.
    out : array of q's dtype, optional
        Where to write the output; must not overlap an input.
    capture : Capture, optional
        Also return the attention weights of chosen query heads and rows, or a reduction of them, from a second pass over
        those: no bit of `out` and `lse` changes, whatever the algorithm. See `fastmha.Capture`.
    num_threads : int, optional
        Threads for this call; default `fastmha.get_num_threads()`. The bits do not depend on it.
    precision : {"highest", "high", "medium"}, optional
        Of products of float32, by permission and not by order: see `fastmha.set_precision`, whose setting is the default.

    Returns
    -------
    out : (B, H, Lq, Dv) array of q's dtype in the layout asked for
        A query from which every key is removed gives zeros.
    lse : (B, H, Lq) array of q's dtype, of float32 where that is of half precision, with ``return_lse=True``
        Natural logarithm, of the sum with the sink; for a query from which every key is removed that sink, or -inf.
    captured : array, with `capture`
        (B, n_heads, n_rows, Lk), or what ``reduce`` of `Capture` leaves of it; always the last.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came, before anything is computed.
    MemoryError
        Where there is no memory for scratch; with "blas", where it is wanted in the middle, `out` may have been written in part.
    KeyboardInterrupt, or what else a signal handler raises
        Within half a second, in the middle of the call; what is in `out` then is undefined.

    Warns
    -----
    ConventionWarning
        For a boolean mask (of up to 2**24 elements) that removes everything, or exactly the keys up to each query's own: masks in
        which True means "may attend" elsewhere look so.

    Notes
    -----
    Where (i, j) is removed, nothing in k or v at j changes a bit of row i of the output, not even NaN or Inf.

    Blocks of keys wholly outside a row's key range are skipped. They are counted from key 0, so that a row's result equals that
    over the keys of its range alone, ``k[:, :, start:end]``, to rounding and not to the bit.

    Numbers below the smallest normal one of the dtype count as 0, but for rows of the output that are as small throughout.

    float16 and bfloat16 (that of the package ml_dtypes) are converted as they are loaded; all arithmetic is in float32, and each
    result is rounded once, to nearest, beyond float16's largest number to infinity. "blas" converts whole heads first, which the
    plan counts. Where the instruction set multiplies bfloat16 as it is (``amx``, ``avx512bf16``), products do, and what they take
    of probabilities is rounded to it before; sums, the softmax and lse remain float32.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", 2017, equation (1).
    .. [2] Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation", 2022.
    .. [3] Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011: Philox4x32-10 of the counter (j / 4, i, h, b),
       whose word j % 4 is that of key j.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 8, 16, 64), dtype=np.float32)
    >>> k = v = rng.standard_normal((2, 2, 16, 64), dtype=np.float32)       # 2 key/value heads for 8 query heads
    >>> fastmha.attention(q, k, v, is_causal=True).shape
    (2, 8, 16, 64)
    """
    rules = validate.rules_of(mask, is_causal, offset, key_padding_lengths, window, scale, softcap, algorithm, num_threads,
                              key_ranges, sinks, alibi, dropout, seed, precision)
    problem = validate.attention_problem(q, k, v, layout, rules)
    name, _ = choose(problem, algorithm)
    if return_lse is not False:
        return_lse = validate.flag("return_lse", return_lse)
    workers = threads.resolve(num_threads)
    B, H, _, Lq, _, _, Dv = problem.shape
    shape = (B, H, Lq, Dv) if layout == "BHLD" else (B, Lq, H, Dv)
    chosen = None if capture is None else captures.choose(capture, problem)
    if out is None:
        result = target = np.empty(shape, problem.element)
    else:
        sides = dict(zip(validate.KEY_RANGES, key_ranges or ()))
        result = target = validate.output(out, shape, problem.element,
                                                 {"q": q, "k": k, "v": v, "mask": mask, "offset": offset,
                                                  "key_padding_lengths": key_padding_lengths, "sinks": sinks, "alibi": alibi,
                                                  **sides})
        if not _core.in_place(validate.bits(result)):
            target = np.empty(shape, problem.element)
    lse = np.empty((B, H, Lq), problem.dtype) if return_lse else None
    algorithms.forward(name, problem, _by_head(target, layout), lse, None, workers)
    if target is not result:
        result[...] = target
    if chosen is None:
        return (result, lse) if return_lse else result
    captured = captures.fill(chosen, problem, algorithm, workers)
    return (result, lse, captured) if return_lse else (result, captured)


@validate.own_keywords(validate.CALL_NAMES)
def attention_backward(
    grad_out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray, *,
    layout: str = "BHLD", mask: np.ndarray | None = None, is_causal: bool = False, offset: int | np.ndarray | None = None,
    key_padding_lengths: np.ndarray | None = None, key_ranges: KeyRanges | None = None,
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: np.ndarray | None = None, alibi: np.ndarray | None = None, dropout: float = 0.0, seed: int | None = None,
    need_bias_grad: bool = False, algorithm: str = "auto", num_threads: int | None = None, precision: str | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of `attention` with respect to q, k and v, and to sinks and an additive mask.

    Parameters
    ----------
    grad_out : (B, H, Lq, Dv) array
        Gradient of the loss with respect to the output, in `layout`.
    q, k, v : arrays
        As in `attention`.
    out, lse : arrays
        What ``attention(..., return_lse=True)`` returned for the same arguments.
    layout, mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout, seed
        As in `attention`.
    algorithm, num_threads, precision
        As in `attention`.
    need_bias_grad : bool
        Also return the gradient of the mask, which must be one of floats: a pass of its own, two products more than five, and
        after "blas" behind a backward pass of "tiled". That multiplies by vectors then: where it would be on matrix tiles the
        other gradients differ within rounding.

    Returns
    -------
    grad_q, grad_k, grad_v : arrays of the full shapes and the dtypes of q, k and v
        Fresh arrays, also where an input was a broadcast view; from 128 KB on three views of one piece of memory. A removed pair
        contributes exactly nothing.
    grad_sinks : (H,) array, where sinks were given
    grad_mask : array of the mask's own shape, with ``need_bias_grad=True``
        Summed over the axes that the mask is broadcast along, in double precision; no array of (B, H, Lq, Lk) is made unless the
        mask is one. 0 where it removes a pair.

    Raises
    ------
    ValueError, TypeError
        As `attention`; also for a grad_out, out or lse of the wrong shape or dtype.

    Notes
    -----
    With P = exp(S - lse): grad_v = Pᵀ grad_out, dP = grad_out vᵀ, dS = P ∘ (dP - rowsum(P ∘ dP)), grad_q = scale · dS k,
    grad_k = scale · dSᵀ q; grad_k and grad_v are summed over the query heads of a group, in the order of the heads. With dropout,
    grad_v is that of the weights as they were dropped, and dP of those. grad_sinks is the sum of
    -exp(sinks - lse) rowsum(P ∘ dP).

    exp(S - lse) errs by the rounding of lse: where that is large, P and rowsum(P ∘ dP) come from the sums of these scores, unless
    lse exceeds those by more than rounding, because it was taken over more keys.

    For half precision out has been rounded: "tiled" takes rowsum(P ∘ dP) from grad_out and out, with that rounding in it; "blas"
    adds it up anew.
    """
    rules = validate.rules_of(mask, is_causal, offset, key_padding_lengths, window, scale, softcap, algorithm, num_threads,
                              key_ranges, sinks, alibi, dropout, seed, precision)
    problem = validate.attention_problem(q, k, v, layout, rules)
    name, _ = choose(problem, algorithm, backward=True)
    if validate.flag("need_bias_grad", need_bias_grad) and problem.additive_mask is None:
        came = "no mask" if mask is None else "one of bool"
        raise ValueError(f"need_bias_grad needs a mask of {problem.element}, which is added to the scores, got {came}")
    B, H, Hkv, Lq, Lk, D, Dv = problem.shape
    dtype = problem.element

    def shape(heads: int, length: int, width: int) -> tuple[int, ...]:
        return (B, heads, length, width) if layout == "BHLD" else (B, length, heads, width)

    grad_out = validate.like("grad_out", grad_out, shape(H, Lq, Dv), dtype, layout)
    out = validate.like("out", out, shape(H, Lq, Dv), dtype, layout)
    lse = validate.lse_like("lse", lse, (B, H, Lq), dtype, layout)
    workers = threads.resolve(num_threads)
    grad_out, out = validate.usable(validate.bits(grad_out))[0], validate.usable(validate.bits(out))[0]
    lse = lse if lse.flags.c_contiguous and lse.flags.aligned else np.require(lse, None, ("C", "A"))
    grads = algorithms.gradients(problem, shape(H, Lq, D), shape(Hkv, Lk, D), shape(Hkv, Lk, Dv))
    grad_q, grad_k, grad_v = (_by_head(g, layout) for g in grads)
    grad_mask = None
    if need_bias_grad and problem.additive_mask is not None:
        grad_mask = np.empty(problem.additive_mask.shape, validate.as_array("mask", mask).dtype)
    grad_sinks = algorithms.backward(name, problem, _by_head(out, layout), lse,
                                     _by_head(grad_out, layout), grad_q, grad_k, grad_v, workers, grad_mask)
    if grad_sinks is not None:
        grad_sinks = validate.cast(grad_sinks, validate.as_array("sinks", sinks).dtype)
    return *grads, *(g for g in (grad_sinks, grad_mask) if g is not None)


def merge(out1: np.ndarray, lse1: np.ndarray, out2: np.ndarray, lse2: np.ndarray, *,
          layout: str = "BHLD") -> tuple[np.ndarray, np.ndarray]:
    """Attention over two sets of keys, from the attention over each: for keys that do not fit in memory together.

    Parameters
    ----------
    out1, out2 : (B, H, Lq, Dv) arrays of one dtype, (B, Lq, H, Dv) with ``layout="BLHD"``
        float32, float64, float16 or bfloat16. What `attention` returned for the same queries and each set of keys and values. Any
        strides.
    lse1, lse2 : (B, H, Lq) arrays of the dtype of out1, of float32 where that is of half precision
        The log-sum-exps that it returned with ``return_lse=True``.
    layout : {"BHLD", "BLHD"}
        Axis order of out1, out2 and the result.

    Returns
    -------
    out : array of the shape of out1
        (e¹ out1 + e² out2) / (e¹ + e²) with eⁿ = exp(lseₙ).
    lse : (B, H, Lq) array
        log(e¹ + e²). Both results are fresh arrays, to be merged with the next set of keys.

    Raises
    ------
    ValueError, TypeError
        For arrays whose shapes or dtypes do not fit together.

    Notes
    -----
    Where one lse is -inf (no key of that set may be attended) the result has the bits of the other side, whatever the empty
    side's out holds; where both are, out is 0 and lse -inf. Any other NaN or Inf reaches the result.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 10, 8))
    >>> halves = [fastmha.attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 6), slice(6, 10))]
    >>> out, lse = fastmha.merge(*halves[0], *halves[1])
    >>> np.allclose(out, fastmha.attention(q, k, v))
    True
    """
    validate.choice("layout", layout, validate.LAYOUTS)
    out1 = validate.heads("out1", out1, layout, True)
    element, dtype = out1.dtype, validate.computed(out1.dtype)
    B, H, Lq, _ = _by_head(out1, layout).shape
    lse1 = validate.lse_like("lse1", lse1, (B, H, Lq), element, layout, "out1")
    out2 = validate.like("out2", out2, out1.shape, element, layout, "out1")
    lse2 = validate.lse_like("lse2", lse2, (B, H, Lq), element, layout, "out1")
    out = np.empty(out1.shape, dtype)
    out1, out2 = validate.cast(out1, dtype), validate.cast(out2, dtype)
    x, y, to = (_by_head(z, layout) for z in (out1, out2, out))
    with np.errstate(all="ignore"):
        share1, share2, lse = shares(lse1, lse2)
        np.multiply(x, share1[..., None], out=to)
        to += y * share2[..., None]
    for empty, other_out, other_lse in ((lse2 == -np.inf, x, lse1), (lse1 == -np.inf, y, lse2)):
        if empty.any():
            np.copyto(to, other_out, where=empty[..., None])
            np.copyto(lse, other_lse, where=empty)
    np.copyto(to, 0, where=(lse == -np.inf)[..., None])
    return validate.cast(out, element), lse


@validate.own_keywords(validate.CALL_NAMES)
def plan(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, layout: str = "BHLD", mask: np.ndarray | None = None,
    is_causal: bool = False, offset: int | np.ndarray | None = None, key_padding_lengths: np.ndarray | None = None,
    key_ranges: KeyRanges | None = None, window: tuple[int | None, int | None] | None = None, scale: float | None = None,
    softcap: float | None = None, sinks: np.ndarray | None = None, alibi: np.ndarray | None = None, dropout: float = 0.0,
    seed: int | None = None, algorithm: str = "auto", return_lse: bool = False, capture: Capture | None = None,
    num_threads: int | None = None, precision: str | None = None, backward: bool = False,
) -> Plan:
    """What `attention` with these arguments would do: algorithm and reasons, tiles, work, copies, scratch, balance.

    Looks at shapes, strides and dtypes of q, k, v, never at their values. Parameters are those of `attention`;
    ``backward=True`` plans the forward and the backward pass together. `capture` is checked and otherwise ignored: the plan is
    that of the pass that computes the output. Raises what `attention` raises.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> q, k = np.ones((1, 8, 1, 64), np.float32), np.ones((1, 8, 512, 64), np.float32)
    >>> fastmha.plan(q, k, k).algorithm
    'decode'
    """
    rules = validate.rules_of(mask, is_causal, offset, key_padding_lengths, window, scale, softcap, algorithm, num_threads,
                              key_ranges, sinks, alibi, dropout, seed, precision)
    problem = validate.attention_problem(q, k, v, layout, rules, values=False)
    validate.flag("return_lse", return_lse)
    if capture is not None:
        captures.check(capture, problem)
    return make_plan(problem, algorithm, threads.resolve(num_threads), validate.flag("backward", backward))


def _by_head(x: np.ndarray, layout: str) -> np.ndarray:
    """x as (B, H, L, width)."""
    return x if layout == "BHLD" else x.transpose(0, 2, 1, 3)


# ------------------------------------------------------------------------------------------------ textbook functions

def softmax(x: np.ndarray, *, num_threads: int | None = None) -> np.ndarray:
    """Softmax over the last axis.

    Parameters
    ----------
    x : (..., n) array of float32, float64, float16 or bfloat16
        Any leading axes, any strides. -inf entries give exactly 0.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    (..., n) array of the dtype of x
        exp(x - max) / sum(exp(x - max)) row by row; a row of only -inf gives zeros.
    """
    x, dtype = _rows("x", x)
    y = np.empty(x.shape, x.dtype)
    if x.size:
        _core.softmax_rows(x.reshape(-1, x.shape[-1]), None, y.reshape(-1, x.shape[-1]), threads.resolve(num_threads))
    return validate.cast(y, dtype)


def softmax_backward(grad_output: np.ndarray, softmax_output: np.ndarray, *, num_threads: int | None = None) -> np.ndarray:
    """Gradient of `softmax` with respect to its input, from its output.

    Parameters
    ----------
    grad_output, softmax_output : (..., n) arrays of one dtype, float32, float64, float16 or bfloat16
        Gradient of the loss with respect to the softmax, and the softmax itself.
    num_threads : int, optional
        Threads for this call.

    Returns
    -------
    (..., n) array
        y ∘ (g - sum(g ∘ y)) row by row: the Jacobian diag(y) - y yᵀ times g.
    """
    (grad_output, of_grad), (softmax_output, dtype) = _rows("grad_output", grad_output), _rows("softmax_output", softmax_output)
    if of_grad != dtype:
        raise TypeError(f"grad_output has dtype {of_grad} but softmax_output has {dtype}: they must share one dtype")
    if grad_output.shape != softmax_output.shape:
        raise ValueError(f"grad_output has shape {grad_output.shape} but softmax_output has {softmax_output.shape}")
    grad = np.empty(softmax_output.shape, softmax_output.dtype)
    if grad.size:
        n = grad.shape[-1]
        _core.softmax_rows(grad_output.reshape(-1, n), softmax_output.reshape(-1, n), grad.reshape(-1, n),
                           threads.resolve(num_threads))
    return validate.cast(grad, dtype)


def _rows(name: str, x: Any) -> tuple[np.ndarray, np.dtype]:
    """x in the dtype in which it is computed, contiguous, and the dtype that it has."""
    x = validate.floats(name, x, half=True)
    if x.ndim == 0:
        raise ValueError(f"{name} must have at least one axis, got a scalar")
    return _operand(x), x.dtype


def _operand(x: np.ndarray) -> np.ndarray:
    """x contiguous, in the dtype in which it is computed."""
    return np.require(validate.cast(x, validate.computed(x.dtype)), None, ("C", "A"))


def weighted(problem: Problem, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """(out (B, H, Lq, Dv), weights (B, H, Lq, Lk)) with the weights in memory."""
    B, H, _, Lq, Lk, _, Dv = problem.shape
    out, weights = np.empty((B, H, Lq, Dv), problem.element), np.empty((B, H, Lq, Lk), problem.dtype)
    algorithms.forward(choose(problem, AUTO, weights=True)[0], problem, out, None, weights, workers)
    return out, validate.cast(weights, problem.element)


@validate.own_keywords(validate.TEXTBOOK_NAMES)
def scaled_dot_product_attention(Q: np.ndarray, K: np.ndarray, V: np.ndarray,
                                 mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Textbook attention with its weights: softmax(Q Kᵀ / sqrt(d)) V.

    Parameters
    ----------
    Q, K, V : (B, n, d), (B, m, d), (B, m, d_v) arrays, or (B, H, n, d) and so on
        Dtypes as in `attention`; the results have that of Q.
    mask : (n, m) or (B, n, m) array, or for 4-D input (n, m) or one that broadcasts to (B, H, n, m); optional
        bool: True = may not attend. Float: added to the scores.

    Returns
    -------
    output : (B, n, d_v) or (B, H, n, d_v) array
    weights : (B, n, m) or (B, H, n, m) array
        Rows sum to 1; a row with everything removed is 0.
    """
    arrays = [validate.floats(name, x, half=True) for name, x in (("Q", Q), ("K", K), ("V", V))]
    flat = arrays[0].ndim == 3
    for name, x in zip("QKV", arrays):
        if x.ndim not in (3, 4) or x.ndim != arrays[0].ndim:
            raise ValueError(f"{name} must have 3 axes (B, n, d) or 4 axes (B, H, n, d), as many as Q, got shape {x.shape}")
    validate.textbook(dict(zip("QKV", arrays)))
    if flat:
        arrays = [x[:, None] for x in arrays]
        mask = None if mask is None else validate.as_array("mask", mask)
        if mask is not None and mask.ndim > 2:
            shape = arrays[0].shape[0], *(x.shape[2] for x in arrays[:2])
            if mask.ndim != 3:
                raise ValueError(f"mask must have 2 axes (n_q, n_k) or 3 that broadcast to (B, n_q, n_k), got shape {mask.shape}")
            if any(n not in (1, most) for n, most in zip(mask.shape, shape)):
                raise ValueError(f"mask of shape {mask.shape} does not broadcast to (B, n_q, n_k) = {shape}")
            mask = mask[:, None]
    q, k, v = arrays
    problem = validate.attention_problem(q, k, v, "BHLD", Rules(mask))
    out, weights = weighted(problem, threads.resolve(None))
    return (out[:, 0], weights[:, 0]) if flat else (out, weights)


def split_heads(x: np.ndarray, num_heads: int) -> np.ndarray:
    """(B, L, d_model) as heads (B, H, L, D): a view, nothing moves in memory.

    Parameters
    ----------
    x : (B, L, d_model) array
    num_heads : int
        H; must divide d_model.

    Returns
    -------
    (B, H, L, d_model // H) view of x
        Head h holds the columns h·D to (h + 1)·D.
    """
    x = validate.as_array("x", x)
    if x.ndim != 3:
        raise ValueError(f"x must have 3 axes (B, L, d_model), got shape {x.shape}")
    num_heads = validate.integer("num_heads", num_heads, 1)
    B, L, d_model = x.shape
    if d_model % num_heads:
        raise ValueError(f"x has d_model {d_model} on axis 2, which num_heads {num_heads} does not divide")
    return x.reshape(B, L, num_heads, d_model // num_heads).transpose(0, 2, 1, 3)


def combine_heads(x: np.ndarray) -> np.ndarray:
    """Heads (B, H, L, D) as (B, L, H·D): the inverse of `split_heads`.

    Parameters
    ----------
    x : (B, H, L, D) array
        Any strides.

    Returns
    -------
    (B, L, H·D) array
        A view where x is a view made by `split_heads`, else a copy.
    """
    x = validate.as_array("x", x)
    if x.ndim != 4:
        raise ValueError(f"x must have 4 axes (B, H, L, D), got shape {x.shape}")
    B, H, L, D = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, L, H * D)


def _textbook_heads(projected: dict[str, Any], num_heads: int) -> list[np.ndarray]:
    """Heads (B, H, L, D) of projected queries, keys and values, checked under their own names."""
    arrays = {name: validate.floats(name, x, 3, "(B, L, d_model)", True) for name, x in projected.items()}
    num_heads = validate.integer("num_heads", num_heads, 1)
    for name, x in arrays.items():
        if x.shape[2] % num_heads:
            raise ValueError(f"{name} has d_model {x.shape[2]} on axis 2, which num_heads {num_heads} does not divide")
    validate.textbook(arrays)
    return [split_heads(x, num_heads) for x in arrays.values()]


@validate.own_keywords(validate.TEXTBOOK_NAMES)
def multi_head_attention_core(Q: np.ndarray, K: np.ndarray, V: np.ndarray, num_heads: int,
                              mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Multi-head attention on projected queries, keys and values: split heads, attend, combine heads.

    Parameters
    ----------
    Q, K, V : (B, Lq, d_model), (B, Lk, d_model), (B, Lk, d_v_model) arrays
        Dtypes as in `attention`, the results have that of Q; num_heads divides the widths.
    num_heads : int
    mask : array, optional
        (Lq, Lk), or 4 axes that broadcast to (B, H, Lq, Lk).

    Returns
    -------
    output : (B, Lq, d_v_model) array
    weights : (B, H, Lq, Lk) array
    """
    q, k, v = _textbook_heads({"Q": Q, "K": K, "V": V}, num_heads)
    problem = validate.attention_problem(q, k, v, "BHLD", Rules(mask))
    B, H, _, Lq, Lk, _, Dv = problem.shape
    output, weights = np.empty((B, Lq, H * Dv), problem.element), np.empty((B, H, Lq, Lk), problem.dtype)
    algorithms.forward(choose(problem, AUTO, weights=True)[0], problem, split_heads(output, num_heads), None, weights,
                       threads.resolve(None))
    return output, validate.cast(weights, problem.element)


@validate.own_keywords(validate.TEXTBOOK_NAMES | {"query": "it is q here", "key": "it is k here", "value": "it is v here"})
def multi_head_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, num_heads: int, weights: dict[str, np.ndarray],
                         mask: np.ndarray | None = None) -> np.ndarray:
    """Multi-head attention with its projections: (attention of (q W_Q, k W_K, v W_V)) W_O.

    Parameters
    ----------
    q, k, v : (B, Lq, d_model), (B, Lk, d_model), (B, Lk, d_model) arrays
        One dtype, with the weights: float32, float64, float16 or bfloat16. The latter two are computed in float32 up to the
        output.
    num_heads : int
    weights : dict
        W_Q, W_K, W_V (d_model, ·), W_O (·, d_out), and optionally biases b_Q, b_K, b_V, b_O; matrices are (in, out).
    mask : array, optional
        As in `multi_head_attention_core`.

    Returns
    -------
    (B, Lq, d_out) array
    """
    if not isinstance(weights, dict):
        raise TypeError(f"weights must be a dict, got {type(weights).__name__}")
    known = [p + s for p in ("W_", "b_") for s in "QKVO"]
    missing = [name for name in known[:4] if name not in weights]
    unknown = [name for name in weights if name not in known]
    if missing or unknown:
        said = f"missing {', '.join(missing)}" if missing else f"unknown {validate.cut(', '.join(map(validate.short, unknown)))}"
        raise ValueError(f"weights must hold W_Q, W_K, W_V, W_O and may hold b_Q, b_K, b_V, b_O: {said}")
    workers = threads.resolve(None)

    def project(name: str, x: Any, letter: str, dtype: np.dtype | None = None) -> np.ndarray:
        """In the dtype in which it is computed; dtype: that of the weights, if not x's."""
        x = validate.floats(name, x, 3, "(B, L, d_model)", True)
        dtype = x.dtype if dtype is None else dtype
        W = validate.floats(f'weights["W_{letter}"]', weights[f"W_{letter}"], 2, "(in, out)", True)
        validate.same_dtype(f'weights["W_{letter}"]', W, name, dtype)
        if W.shape[0] != x.shape[2]:
            raise ValueError(f'weights["W_{letter}"] has {W.shape[0]} rows but {name} has width {x.shape[2]}')
        bias = weights.get(f"b_{letter}")
        if bias is not None:
            bias = validate.floats(f'weights["b_{letter}"]', bias, 1, "(out,)", True)
            validate.same_dtype(f'weights["b_{letter}"]', bias, name, dtype)
            if bias.shape != (W.shape[1],):
                raise ValueError(f'weights["b_{letter}"] must have shape ({W.shape[1]},), got {bias.shape}')
            bias = _operand(bias)
        y = np.empty((*x.shape[:2], W.shape[1]), validate.computed(dtype))
        rows = x.shape[0] * x.shape[1]
        algorithms.product(_operand(x).reshape(rows, W.shape[0]), _operand(W), y.reshape(rows, W.shape[1]), workers, bias=bias)
        return y

    Q, K, V = (project(n, x, letter) for n, x, letter in (("q", q, "Q"), ("k", k, "K"), ("v", v, "V")))
    dtype, of_k, of_v = (validate.as_array(n, x).dtype for n, x in (("q", q), ("k", k), ("v", v)))
    if validate.is_half(dtype) or validate.is_half(of_k) or validate.is_half(of_v):      # their projections are float32
        validate.same_dtype("k", validate.as_array("k", k), "q", dtype)
        validate.same_dtype("v", validate.as_array("v", v), "q", dtype)
    if mask is not None:
        mask = validate.as_array("mask", mask)
        mask = validate.cast(mask, Q.dtype) if mask.dtype == dtype else mask
    q, k, v = _textbook_heads({"q W_Q": Q, "k W_K": K, "v W_V": V}, num_heads)
    problem = validate.attention_problem(q, k, v, "BHLD", Rules(mask))
    B, H, _, Lq, _, _, Dv = problem.shape
    concat = np.empty((B, Lq, H * Dv), problem.dtype)
    algorithms.forward(choose(problem, AUTO)[0], problem, split_heads(concat, num_heads), None, None, workers)
    return validate.cast(project("concat", concat, "O", dtype), dtype)
