"""Attention weights of chosen heads and rows, or what they reduce to, by a second pass beside the one that computes the output.

The second pass takes blocks of neighbouring rows of a few heads as problems of their own, so that memory grows with what was
asked for and not with Lq · Lk.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastmha import algorithms, validate
from fastmha._core import Problem

REDUCTIONS = ("sum_q", "max", "entropy")
_BUFFER_BYTES = 4 * 2**20       # weights in memory at a time: enough work for the threads, little beside keys and values
_ROWS = 16                      # fewer rows than a vector has lanes cost as much as a vector: the least that a block may hold,
                                # and the gap between chosen rows up to which those between are computed, too


@dataclass(frozen=True)
class Capture:
    """Which attention weights `fastmha.attention` shall return beside its output, and what of them.

    Parameters
    ----------
    heads : None, int, slice or sequence of int
        Query heads: None = all. An int keeps its axis, with length 1. Negative indices count from the end, order and
        duplicates are kept.
    rows : None, int, slice or sequence of int
        Query rows, as `heads`.
    reduce : {None, "sum_q", "max", "entropy"}
        What is returned, of q's dtype, in either layout:

        * None: the weights, (B, n_heads, n_rows, Lk); zeros where a pair is removed and in empty rows.
        * "sum_q": their sum over the chosen rows, (B, n_heads, Lk): how much each key is attended to, as schemes that evict
          keys from a cache use it.
        * "max": the largest weight of each chosen row, (B, n_heads, n_rows); 0 for an empty row.
        * "entropy": -Σ w log w of each chosen row in nats, (B, n_heads, n_rows); 0 for an empty row.

    Raises
    ------
    ValueError, TypeError
        For what is no index or no reduction; and from `fastmha.attention` for an index out of range. Heads are named
        ``capture.heads``, rows ``capture.rows``.

    Notes
    -----
    A reduction holds some megabytes of weights at a time (16 rows of one head where those are more), never all of them.
    The weights are those of "blas" where that was named, else of "tiled", in rounding; a duplicate counts twice in "sum_q".

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> q = np.ones((1, 4, 100, 16), np.float32)
    >>> out, received = fastmha.attention(q, q, q, is_causal=True, capture=fastmha.Capture(rows=slice(-32, None), reduce="sum_q"))
    >>> received.shape      # how much the last 32 queries attend to each key
    (1, 4, 100)
    """

    heads: int | slice | Sequence[int] | np.ndarray | None = None
    rows: int | slice | Sequence[int] | np.ndarray | None = None
    reduce: str | None = None

    def __post_init__(self) -> None:
        # Kept as ints: what the caller does to a list afterwards has no effect.
        object.__setattr__(self, "heads", validate.selection("capture.heads", self.heads))
        object.__setattr__(self, "rows", validate.selection("capture.rows", self.rows))
        if self.reduce is not None and not (isinstance(self.reduce, str) and self.reduce in REDUCTIONS):
            raise ValueError(f'capture.reduce must be None, "sum_q", "max" or "entropy", got {validate.short(self.reduce)}')


class Chosen(NamedTuple):
    """A capture that fits a problem."""

    heads: np.ndarray       # indices, as asked for
    rows: np.ndarray
    reduce: str | None
    captured: np.ndarray    # the result in the computation's dtype, zeros until `fill`


def check(capture: Any, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the heads and of the rows that a capture chooses of a problem."""
    if not isinstance(capture, Capture):
        raise TypeError(f"capture must be a fastmha.Capture or None, got {type(capture).__name__}")
    _, H, _, Lq, _, _, _ = problem.shape
    return (validate.positions("capture.heads", capture.heads, H, "heads"),
            validate.positions("capture.rows", capture.rows, Lq, "rows"))


def choose(capture: Any, problem: Problem) -> Chosen:
    """Check a capture against the problem and allocate its result."""
    heads, rows = check(capture, problem)
    Lk = problem.shape[4]
    shape: tuple[int, ...] = problem.shape[0], len(heads)
    if capture.reduce != "sum_q":
        shape += (len(rows),)
    if capture.reduce in (None, "sum_q"):
        shape += (Lk,)
    return Chosen(heads, rows, capture.reduce, np.zeros(shape, problem.dtype))


def fill(chosen: Chosen, problem: Problem, algorithm: str, threads: int) -> np.ndarray:
    """The weights or their reduction, chosen.captured or a rounded copy of it; `algorithm`: what the caller said.

    Blocks of rows depend on the lengths alone and are added in their order: the bits of a batch row depend neither on the
    others nor on the threads.
    """
    heads, rows, reduce, captured = chosen
    B, H, Hkv, Lq, Lk, _, _ = problem.shape
    if captured.size == 0 or Lk == 0 or len(rows) == 0:
        return validate.cast(captured, problem.element)
    name = algorithms.for_weights(algorithm)
    fit = _BUFFER_BYTES // (Lk * problem.itemsize)
    most = max(_ROWS, fit // _ROWS * _ROWS)
    buffer = np.empty(min(max(fit, most), B * H * min(most, Lq)) * Lk, problem.dtype)
    for places, asked in _row_blocks(rows, most):
        first, last = int(asked[0]), int(asked[-1]) + 1
        picked = None if np.array_equal(asked, np.arange(first, last)) else asked - first
        pairs = max(1, fit // (last - first))       # of a batch row and a head
        for head, end in _head_runs(heads, H // Hkv, pairs):
            step = max(1, pairs // (end - head))
            to = [(int(i), int(heads[i]) - head) for i in np.flatnonzero((heads >= head) & (heads < end))]
            for b in range(0, B, step):
                batch = slice(b, min(b + step, B))
                shape = batch.stop - b, end - head, last - first, Lk
                weights = buffer[: shape[0] * shape[1] * shape[2] * Lk].reshape(shape)
                part = _part(problem, batch, slice(head, end), slice(first, last))
                algorithms.forward(name, part, np.empty((*shape[:3], 0), part.element), None, weights, threads)
                value = _reduced(weights if picked is None else weights[:, :, picked], reduce)
                for i, h in to:
                    if reduce == "sum_q":
                        captured[batch, i] += value[:, h]
                    else:
                        captured[batch, i][:, places] = value[:, h]
    return validate.cast(captured, problem.element)


def _row_blocks(rows: np.ndarray, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(places in `rows`, the rows there) in ascending order: at most so many, that lie within so many, with small gaps."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    ends = np.append(np.flatnonzero(np.diff(ordered) > _ROWS) + 1, len(rows))
    low = 0
    while low < len(rows):
        high = int(min(low + most, ends[np.searchsorted(ends, low, side="right")], np.searchsorted(ordered, ordered[low] + most)))
        yield order[low:high], ordered[low:high]
        low = high


def _head_runs(heads: np.ndarray, group: int, most: int) -> Iterator[tuple[int, int]]:
    """(first, behind the last) of runs of at most so many neighbouring heads that read one key/value head or one each."""
    unique = np.unique(heads).tolist()
    first = unique[0]
    for head, following in zip(unique, [*unique[1:], None]):
        if following != head + 1 or (group > 1 and following % group == 0) or following - first == most:
            yield first, head + 1
            first = following


def _part(problem: Problem, batch: slice, heads: slice, rows: slice) -> Problem:
    """Some batch rows, heads (of one group, or of groups of one) and neighbouring rows as a problem; all arrays are views.

    The values are cut to width 0: the weights do not need them.
    """
    _, H, Hkv, _, _, _, _ = problem.shape
    group = H // Hkv
    kv = slice(heads.start // group, (heads.stop - 1) // group + 1)

    def cut(mask: np.ndarray | None) -> Any:
        if mask is None:
            return None
        mask = mask if mask.ndim == 4 else mask[None, None]
        return mask[tuple(s if n > 1 else slice(None) for s, n in zip((batch, heads, rows), mask.shape))]

    offset = None if problem.offset is None else problem.offset[batch] + rows.start
    starts, lengths = (None if x is None else x[batch] for x in (problem.key_starts, problem.key_lengths))
    sinks, alibi = (None if x is None else x[heads] for x in (problem.sinks, problem.alibi))
    draws = problem.draws
    if draws is not None:       # the weights that multiply the values: as dropout leaves them
        draws = (*draws[:2], draws[2] + batch.start, draws[3] + heads.start, draws[4] + rows.start, draws[5])
    return Problem(problem.q[batch, heads, rows], problem.k[batch, kv], problem.v[batch, kv, :, :0], cut(problem.bool_mask),
                   cut(problem.additive_mask), offset, starts, lengths, *problem.window, problem.scale, problem.softcap, sinks,
                   alibi, draws)


def _reduced(weights: np.ndarray, reduce: str | None) -> np.ndarray:
    """Of weights (b, h, rows, Lk)."""
    if reduce is None:
        return weights
    if reduce == "sum_q":
        return weights.sum(axis=2)
    if reduce == "max":
        return weights.max(axis=3)
    terms = np.maximum(weights, np.finfo(weights.dtype).tiny)       # 0 log 0 = 0, and a NaN stays one
    np.log(terms, out=terms)
    terms *= weights
    return np.maximum(0 - terms.sum(axis=3), 0)                     # rounding can make the weight of a lone key exceed 1
