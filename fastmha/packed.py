"""Attention over sequences that lie end to end: no padding is computed or stored.

Each sequence is a problem of its own on views of the packed arrays, with the algorithm that `fastmha.attention` would choose for
it. Those that run by the same one of the kernels' own algorithms, on matrix tiles or by vectors, are one run of the pool, the
longest first.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fastmha import _core, algorithms, threads, validate
from fastmha._core import Problem
from fastmha.algorithms import AUTO, BLAS, DECODE, TILED
from fastmha.planning import choose_for
from fastmha.precision import parts_for
from fastmha.validate import Rules

_AXES = "(tokens, H, D)"
_LENGTHS_SAY = "each sequence has its keys alone: lengths_k says how many"
_NAMES = validate.CALL_NAMES | {
    **dict.fromkeys(("key_padding_lengths", "key_value_seq_lengths", "key_ranges", "key_padding_mask", "attention_mask"),
                    _LENGTHS_SAY),
    **dict.fromkeys(("mask", "attn_mask", "bias", "attn_bias", "need_bias_grad"),
                    "no mask is laid over sequences of different lengths; fastmha.attention takes one"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seq_q", "cu_seqlens"), "lengths_q are the lengths themselves here, np.diff of these"),
    **dict.fromkeys(("cu_seqlens_k", "cu_seq_k"), "lengths_k are the lengths themselves here, np.diff of these"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_q", "max_k"), "the lengths alone say it"),
    "layout": f"arrays are {_AXES}", "capture": "fastmha.attention takes it, for one sequence",
}


class _Way(NamedTuple):
    """How sequences are computed."""

    algorithm: str
    parts: int                  # on matrix tiles, as many; 0: by vectors


class _Packed(NamedTuple):
    """Sequences after their checks."""

    problem: Problem            # over all tokens, (1, heads, tokens, width); its offset is of each sequence
    starts_q: np.ndarray        # (S,) int64
    lengths_q: np.ndarray
    starts_k: np.ndarray
    lengths_k: np.ndarray
    alike: bool                 # whether all have the same lengths
    ways: np.ndarray | None     # (S,) the way of each, an index into those taken; None: there is one
    ways_taken: list[_Way]


@validate.own_keywords(_NAMES)
def attention_packed(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths_q: np.ndarray, lengths_k: np.ndarray | None = None, *,
    is_causal: bool = False, offset: int | np.ndarray | None = None, window: tuple[int | None, int | None] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: np.ndarray | None = None, alibi: np.ndarray | None = None,
    dropout: float = 0.0, seed: int | None = None, algorithm: str = "auto", return_lse: bool = False,
    out: np.ndarray | None = None, num_threads: int | None = None, precision: str | None = None,
) -> Any:
    """Attention of sequences of different lengths that lie end to end, each over its own keys.

    Parameters
    ----------
    q : (total_q, H, D) array of float32, float64, float16 or bfloat16
        Queries of the first sequence, then those of the second, and so on. Any strides, as in `attention`.
    k, v : (total_k, Hkv, D) and (total_k, Hkv, Dv) arrays of a dtype as in `attention`
        Keys and values. Query head h reads key/value head ``h // (H // Hkv)``.
    lengths_q : (S,) array of int
        Queries of each sequence; they add up to total_q. Any may be 0.
    lengths_k : (S,) array of int, optional
        Keys of each sequence; they add up to total_k. Default lengths_q.
    is_causal, window, scale, softcap, sinks, alibi, dropout, seed
        As in `attention`, within each sequence. In the draws of dropout the number of the sequence is that of the batch row.
    offset : int or (S,) array of int, optional
        Position of a sequence's query 0 among its keys. Default 0 where every sequence has as many keys as queries.
    algorithm, num_threads, precision
        As in `attention`; "auto" chooses for each sequence.
    return_lse : bool
        Also return the log of the sum of exponentials of each row.
    out : (total_q, H, Dv) array of q's dtype, optional
        Where to write the output; must not overlap an input.

    Returns
    -------
    out : (total_q, H, Dv) array
        Of each sequence the bits that `attention` gives over it alone.
    lse : (H, total_q) array, with ``return_lse=True``

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came, before anything is computed.

    Examples
    --------
    Sequences of 5, 2 and 9 tokens, 2 heads:

    >>> import numpy as np, fastmha
    >>> q = k = v = np.random.default_rng(0).standard_normal((16, 2, 8))
    >>> out = fastmha.attention_packed(q, k, v, [5, 2, 9], is_causal=True)
    >>> of_second = fastmha.attention(*(x[None, 5:7] for x in (q, k, v)), is_causal=True, layout="BLHD")
    >>> out.shape, bool((out[5:7] == of_second).all())
    ((16, 2, 8), True)
    """
    rules = Rules(None, is_causal, offset, None, window, scale, softcap, algorithm, num_threads, None, sinks, alibi, dropout,
                  seed, precision)
    packed = _checked(q, k, v, lengths_q, lengths_k, rules, backward=False)
    return_lse = validate.flag("return_lse", return_lse)
    workers = threads.resolve(num_threads)
    problem = packed.problem
    _, H, _, total, _, _, Dv = problem.shape
    if out is None:
        result = target = np.empty((total, H, Dv), problem.element)
    else:
        inputs = {"q": q, "k": k, "v": v, "lengths_q": lengths_q, "lengths_k": lengths_k, "offset": offset, "sinks": sinks,
                  "alibi": alibi}
        result = target = validate.output(out, (total, H, Dv), problem.element, inputs)
        if not _core.in_place(validate.bits(result)):
            target = np.empty((total, H, Dv), problem.element)
    lse = np.empty(H * total, problem.dtype) if return_lse else None
    out4 = _heads(validate.bits(target))
    for (name, problem.parts), table in _runs(packed, workers):
        if name != BLAS.name:
            _core.packed_forward(problem, table, out4, lse, name == DECODE.name, workers)
            continue
        for part, at, _ in _one_by_one(packed, table):
            own = None if lse is None else lse[H * at.start:H * at.stop].reshape(1, H, at.stop - at.start)
            algorithms.forward(name, part, out4[:, :, at], own, None, workers)
    if target is not result:
        result[...] = target
    return result if lse is None else (result, lse[_places(packed)])


@validate.own_keywords(_NAMES)
def attention_packed_backward(
    grad_out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray, lengths_q: np.ndarray,
    lengths_k: np.ndarray | None = None, *, is_causal: bool = False, offset: int | np.ndarray | None = None,
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: np.ndarray | None = None, alibi: np.ndarray | None = None, dropout: float = 0.0, seed: int | None = None,
    algorithm: str = "auto", num_threads: int | None = None, precision: str | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of `attention_packed`.

    Parameters
    ----------
    grad_out : (total_q, H, Dv) array
        Gradient of the loss with respect to the output.
    q, k, v, lengths_q, lengths_k
        As in `attention_packed`.
    out, lse : (total_q, H, Dv) and (H, total_q) arrays
        What ``attention_packed(..., return_lse=True)`` returned for the same arguments.
    is_causal, offset, window, scale, softcap, sinks, alibi, dropout, seed, algorithm, num_threads, precision
        As in `attention_packed`.

    Returns
    -------
    grad_q, grad_k, grad_v : arrays of the shapes of q, k and v
        Of each sequence the bits that `attention_backward` gives for it alone.
    grad_sinks : (H,) array, where sinks were given

    Raises
    ------
    ValueError, TypeError
        As `attention_packed`; also for a grad_out, out or lse of the wrong shape or dtype.
    """
    rules = Rules(None, is_causal, offset, None, window, scale, softcap, algorithm, num_threads, None, sinks, alibi, dropout,
                  seed, precision)
    packed = _checked(q, k, v, lengths_q, lengths_k, rules, backward=True)
    problem = packed.problem
    _, H, Hkv, total, total_k, D, Dv = problem.shape
    dtype, element = problem.dtype, problem.element
    grad_out = validate.like("grad_out", grad_out, (total, H, Dv), element, None)
    out = validate.like("out", out, (total, H, Dv), element, None)
    lse = validate.lse_like("lse", lse, (H, total), element, None)
    workers = threads.resolve(num_threads)
    grads = algorithms.gradients(problem, (total, H, D), (total_k, Hkv, D), (total_k, Hkv, Dv))
    grad_q, grad_k, grad_v = (_heads(validate.bits(x)) for x in grads)
    grad_out, out = (validate.usable(_heads(validate.bits(x)))[0] for x in (grad_out, out))
    places = _places(packed)
    flat = np.empty(H * total, dtype)
    flat[places] = lse
    state = _core.ROW_STATE
    states = np.zeros(H * total * state, dtype)         # what nothing needs is not touched
    for (name, problem.parts), table in _runs(packed, workers, backward=True):
        if name != BLAS.name:
            needed = None if sinks is None else states
            _core.packed_backward(problem, table, out, flat, grad_out, grad_q, grad_k, grad_v, needed, workers)
            continue
        for part, at, of_k in _one_by_one(packed, table):
            rows, shape = slice(H * at.start, H * at.stop), (1, H, at.stop - at.start)
            own = None if sinks is None else states[state * rows.start:state * rows.stop].reshape(*shape, state)
            algorithms.backward_of(name, part, out[:, :, at], flat[rows].reshape(shape), grad_out[:, :, at], grad_q[:, :, at],
                                   grad_k[:, :, of_k], grad_v[:, :, of_k], own, workers)
    if problem.sinks is None:
        return tuple(grads)
    of_sinks = algorithms.sink_gradient(problem.sinks, states.reshape(-1, state)[places][None])
    return *grads, validate.cast(of_sinks, validate.as_array("sinks", sinks).dtype)


def _heads(x: np.ndarray) -> np.ndarray:
    """(tokens, heads, width) as (1, heads, tokens, width)."""
    return x.transpose(1, 0, 2)[None]


def _checked(q: Any, k: Any, v: Any, lengths_q: Any, lengths_k: Any, rules: Rules, backward: bool) -> _Packed:
    q, k, v = (validate.floats(name, x, 3, _AXES, True) for name, x in (("q", q), ("k", k), ("v", v)))
    for name, x, other, y, axis, what in (("k", k, "q", q, 2, "width"), ("v", v, "k", k, 0, "length")):
        if x.shape[axis] != y.shape[axis]:
            raise ValueError(f"{name} has {what} {x.shape[axis]} on axis {axis} but {other} has {y.shape[axis]}")
    H, Hkv, Hv = (x.shape[1] for x in (q, k, v))
    if Hv != Hkv:
        raise ValueError(f"v has {Hv} heads on axis 1 but k has {Hkv}")
    if Hkv != H and (Hkv == 0 or H % Hkv):
        raise ValueError(f"k has {Hkv} heads on axis 1 but q has {H}: q's heads must be a multiple of k's")
    placed = validate.flag("is_causal", rules.is_causal) or rules.window is not None or rules.alibi is not None
    # what has no axis of sequences is checked over all tokens, as one sequence: below their sums are within 64 bits
    whole = validate.attention_problem(_heads(q), _heads(k), _heads(v), "BHLD", rules.at(0 if placed else rules.offset, None),
                                       values=False)
    of_q = _lengths("lengths_q", lengths_q, None, "q", len(q))
    if lengths_k is None:
        of_k = of_q
        if len(k) != len(q):
            raise ValueError("lengths_k must be given where k has other tokens than q, got lengths "
                             f"{len(k)} of k and {len(q)} of q on axis 0")
    else:
        of_k = _lengths("lengths_k", lengths_k, len(of_q), "k", len(k))
    offsets = None
    if placed:
        if rules.offset is None and (of_q != of_k).any():
            s = int((of_q != of_k).argmax())
            raise ValueError(f"offset must be given with is_causal, window or alibi where sequence {s} has {of_q[s]} queries "
                             f"and {of_k[s]} keys: 0 lets query 0 see key 0, lengths_k - lengths_q lets the last query see the "
                             "last key")
        offsets = validate.offsets(rules.offset, len(of_q), 0, 0, "S")
    base = len(k) + 1
    pairs = (of_q * base + of_k).tolist()       # one number for both lengths
    ways = {pair: _way(whole, pair // base, pair % base, rules.algorithm, backward) for pair in dict.fromkeys(pairs)}
    if not ways:
        _way(whole, 0, 0, rules.algorithm, backward)        # its errors
    taken = list(dict.fromkeys(ways.values()))
    way_of_each = None
    if len(taken) > 1:
        numbers = {pair: taken.index(way) for pair, way in ways.items()}
        way_of_each = np.array([numbers[pair] for pair in pairs], np.int64)
    problem = Problem(whole.q, whole.k, whole.v, None, None, offsets, None, None, *whole.window,
                      whole.scale, whole.softcap, whole.sinks, whole.alibi, whole.draws)
    problem.element, problem.stored = whole.element, whole.stored
    starts_q = of_q.cumsum() - of_q
    starts_k = starts_q if of_k is of_q else of_k.cumsum() - of_k
    return _Packed(problem, starts_q, of_q, starts_k, of_k, len(ways) == 1, way_of_each, taken)


def _way(whole: Problem, Lq: int, Lk: int, algorithm: str, backward: bool) -> _Way:
    """How a sequence of so many queries and keys is computed, with types, heads, widths and scale of the whole."""
    _, H, Hkv, _, _, D, _ = whole.shape
    rows = Lq * (H // Hkv) if Hkv else 0
    parts = parts_for(whole, rows, Lk, backward)
    if algorithm == AUTO and parts > 0:
        return _Way(TILED.name, parts)
    name, _ = choose_for(rows, Lk, D, whole.itemsize, whole.stored_size, algorithm, backward)
    return _Way(name, parts if name == TILED.name else 0)


def _lengths(name: str, lengths: Any, S: int | None, of: str, total: int) -> np.ndarray:
    """lengths as (S,) int64; their sum is the number of tokens."""
    if lengths is None:
        raise TypeError(f"{name} must be a (S,) array of ints, got None")
    values = validate.as_array(name, lengths)
    if values.ndim != 1 or (S is not None and len(values) != S):
        shape = "(S,)" if S is None else f"(S,) = ({S},) as lengths_q"
        raise ValueError(f"{name} must have shape {shape}, got {values.shape}")
    if len(values) > validate.LARGEST:
        raise ValueError(f"{name} has length {len(values)}: at most {validate.LARGEST} is possible")
    checked = validate.batch_lengths(name, lengths, len(values), total, "tokens")
    if checked.sum() != total:
        raise ValueError(f"{name} must add up to the {total} tokens of {of}, got {checked.sum()}")
    return checked


def _runs(packed: _Packed, workers: int, backward: bool = False) -> Iterator[tuple[_Way, np.ndarray]]:
    """Of each way its sequences as the core takes them: a table of first query, queries, first key, keys, number, and key/value
    heads that are taken whole by a backward pass, and on matrix tiles."""
    Hkv = packed.problem.shape[2]
    columns = packed.starts_q, packed.lengths_q, packed.starts_k, packed.lengths_k
    for number, way in enumerate(packed.ways_taken):
        at: Any = np.arange(len(packed.lengths_q)) if packed.ways is None else np.flatnonzero(packed.ways == number)
        work = (packed.lengths_q[at] + 1) * (packed.lengths_k[at] + 1)
        if not packed.alike:
            order = (-work).argsort(kind="stable")
            at, work = at[order], work[order]
        table = np.empty((len(at), 6), np.int64)
        for n, column in enumerate(columns):
            table[:, n] = column[at]
        table[:, 4] = at
        table[:, 5] = Hkv
        # a head is split into many items, with the same bits, where it alone would keep one thread busy for long
        if workers > 1 and (backward or way.parts > 0):
            table[work * (2 * workers) > work.sum() * Hkv, 5] = 0
        yield way, table


def _one_by_one(packed: _Packed, table: np.ndarray) -> Iterator[tuple[Problem, slice, slice]]:
    """Each sequence as a problem, with the places of its queries and of its keys."""
    whole = packed.problem
    for q0, Lq, k0, Lk, s, _ in table.tolist():
        at, of_k = slice(q0, q0 + Lq), slice(k0, k0 + Lk)
        draws = None if whole.draws is None else (*whole.draws[:2], s, *whole.draws[3:])
        offset = None if whole.offset is None else whole.offset[s:s + 1]
        yield (Problem(whole.q[:, :, at], whole.k[:, :, of_k], whole.v[:, :, of_k], None, None, offset, None, None, *whole.window,
                       whole.scale, whole.softcap, whole.sinks, whole.alibi, draws), at, of_k)


def _places(packed: _Packed) -> np.ndarray:
    """(H, total_q): where the number of a head and a query lies among those (heads, queries) of each sequence, end to end."""
    H, lengths = packed.problem.shape[1], packed.lengths_q
    starts, own = np.repeat(packed.starts_q, lengths), np.repeat(lengths, lengths)
    return H * starts + np.arange(len(starts)) - starts + np.arange(H)[:, None] * own
