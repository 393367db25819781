"""Attention of the newest queries over a KVCache: where its keys lie, in one part or in two, and the step of a module.

Lengths are one int while all rows have the same, else a (B,) int64 array.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fastmha import algorithms, validate
from fastmha._core import Problem
from fastmha.plan import choose

if TYPE_CHECKING:
    from fastmha.cache import KVCache

Lengths: TypeAlias = int | np.ndarray
Part: TypeAlias = tuple[Problem, slice, str]        # an attention over some slots, and its algorithm


def longest(lengths: Lengths) -> int:
    return lengths if isinstance(lengths, int) else int(lengths.max(initial=0))


def larger(a: Lengths, b: Lengths) -> Lengths:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def together(lengths: Lengths) -> Lengths:
    """Lengths as one int where all rows agree (there are some)."""
    if isinstance(lengths, int):
        return lengths
    first = int(lengths[0])
    return first if (lengths == first).all() else lengths


class Step:
    """New tokens of a module over a cache. Everything is checked on construction, before k and v have been computed::

        with step:              # stores k and v; if anything fails inside, the cache is as it was
            step.attend(...)

    At every moment the cache is as it was or holds the new tokens, whatever is raised.
    """

    def __init__(self, cache: KVCache, q: np.ndarray, k: np.ndarray, v: np.ndarray, new: Lengths, mask: Any, is_causal: Any,
                 window: Any, softcap: Any, algorithm: str, need_weights: bool) -> None:
        self.cache, self.over, self.new = cache, cache, new
        self.k, self.v = k, v
        self.after = after = cache._after(new)
        if cache.window is not None and cache.max_chunk is not None:
            window = ring_window(cache, window)
            tops = larger(cache._state.most, after)
            if q.shape[2] > cache.max_chunk or ((mask is not None or need_weights) and cache._wrapped(tops)):
                # what is held and the new tokens side by side in a cache for this call alone, then their end to the ring
                room = cache.window + np.maximum(0, cache.max_chunk - cache._rows(new))
                keep = np.minimum(cache.held, room)
                if mask is not None and bool((keep < cache.lengths).any()):
                    same_number(keep + new)
                after = together(keep + new) if cache.batch_size else q.shape[2]
                self.parts = prepare(cache, q, after, new, mask, is_causal, window, None, softcap, algorithm, need_weights,
                                     linear=True)
                self.over = cache._linear(keep, q.shape[2])
        if self.over is cache:
            self.parts = prepare(cache, q, after, new, mask, is_causal, window, None, softcap, algorithm, need_weights)
        self.total = longest(after)

    def __enter__(self) -> Step:
        cache = self.cache
        self.before = cache._state
        if self.over is not cache:
            self.over._store(self.k, self.v, self.new, self.over._after(self.new))
            return self
        self.lost = cache._set_aside(self.new, self.after)
        try:
            cache._store(self.k, self.v, self.new, self.after)
        except BaseException:
            self._undo()
            raise
        return self

    def attend(self, out: np.ndarray, weights: np.ndarray | None, workers: int) -> None:
        """out (B, H, L, Dv), weights (B, H, L, total) <- the attention of the new queries."""
        attend(self.over, self.parts, self.new, out, None, weights, workers)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.over is not self.cache:
            if kind is None:
                self.cache._store(self.k, self.v, self.new, self.after)
        elif kind is not None:
            self._undo()

    def _undo(self) -> None:
        if self.lost is None:
            self.cache._state = self.before
        else:
            self.cache._move(*self.lost, self.before)


# --------------------------------------------------------------------------------------------------------- attention

def ring_window(cache: KVCache, window: Any) -> tuple[int | None, int | None]:
    """window, which must not reach further back than the ring."""
    left, _ = validate.band(False, window)
    if left is None or left > (cache.window or 0):
        raise ValueError(f"window must have a left side of at most {cache.window}, the window of the cache, "
                         f"got {validate.short(window)}")
    return window


def same_number(held: np.ndarray) -> None:
    if held.size and (held != held[0]).any():
        raise ValueError(f"mask cannot be laid over a ring whose rows hold different numbers of keys, here {held.tolist()}")


def prepare(cache: KVCache, q: np.ndarray, after: Lengths, new: Lengths, mask: Any, is_causal: Any, window: Any, scale: Any,
            softcap: Any, algorithm: str, need_weights: bool, linear: bool = False) -> list[Part]:
    """The attention of the newest `new` queries at the lengths `after`, in storage order; all errors end here.

    Where there is no room for the keys yet, or they are of another dtype, the problems hold stand-ins of their shapes, which
    `attend` replaces. `linear`: they will not lie in the ring that `cache` is.
    """
    first = after - new
    spans = [(0, longest(after), None if isinstance(after, int) else after, first)]
    state = cache._state
    if cache.window is not None and not linear and longest(after) > state.slots:
        spans = _spans(after, first, state.slots)
    parts: list[Part] = []
    banded = is_causal is not False or window is not None
    B, heads = cache.batch_size, cache.num_kv_heads
    for start, stop, lengths, offset in spans:
        if not linear and stop <= state.slots and cache.dtype == q.dtype:
            k, v = state.k[:, :, start:stop], state.v[:, :, start:stop]
        else:
            k = _stand_in((B, heads, stop - start, cache.head_dim), q.dtype)
            v = _stand_in((B, heads, stop - start, cache.v_head_dim), q.dtype)
        problem = validate.attention_problem(q, k, v, "BHLD", mask, is_causal, offset if banded else None, lengths, window,
                                             scale, softcap)
        parts.append((problem, slice(start, stop), choose(problem, algorithm, weights=need_weights)[0]))
    return parts


def _spans(after: Lengths, first: Lengths, slots: int) -> list[tuple[int, int, Any, Lengths]]:
    """(start, stop, lengths, offset) of the two attentions over the slots of a ring of which a row has wrapped.

    The newest `newer` positions of a row, from `turn` on (a multiple of the slots), lie in its slots from 0 on: the first
    attention. The slots behind hold positions one turn older: the second. It takes the first slots for a turn older as well,
    but those positions lie before ``after - slots``, which no query's window reaches. So a row's slots are read in an order
    of its own, whatever the others hold.
    """
    if isinstance(after, int):
        turn: Lengths = (after - 1) // slots * slots
        newer, older = None, None
    else:
        turn = np.maximum(after - 1, 0) // slots * slots
        newer, older = after - turn, np.where(turn > 0, slots, 0)
    return [(0, longest(after - turn), newer, first - turn), (0, slots, older, first - turn + slots)]


def _stand_in(shape: tuple[int, int, int, int], dtype: np.dtype) -> np.ndarray:
    """An array of that shape which takes one row of memory."""
    return np.ndarray(shape, dtype, np.empty(shape[3], dtype), 0, (0, 0, 0, dtype.itemsize))


def as_taken(k: np.ndarray, v: np.ndarray, dtype: np.dtype, algorithm: str) -> tuple[np.ndarray, np.ndarray]:
    """Stored keys and values as an algorithm takes them with queries of `dtype`: "tiled" and "decode" convert as they load."""
    if k.dtype == dtype:
        return k, v
    if algorithm == "blas":
        with np.errstate(all="ignore"):
            return k.astype(dtype), v.astype(dtype)
    return (k.view(np.uint16), v.view(np.uint16)) if k.dtype.name == "bfloat16" else (k, v)


def attend(cache: KVCache, parts: list[Part], new: Lengths, out: np.ndarray, lse: np.ndarray | None,
           weights: np.ndarray | None, workers: int) -> None:
    """out (B, H, Lq, Dv), lse (B, H, Lq), weights <- what `prepare` has prepared; queries behind `new` attend nothing."""
    Lq = out.shape[2]
    sides, state = [], cache._state
    for i, (problem, span, name) in enumerate(parts):
        if problem.k.base is not state.k:
            problem = problem.with_heads(problem.q, *as_taken(state.k[:, :, span], state.v[:, :, span], problem.dtype, name))
        side = out if i == 0 else np.empty(out.shape, out.dtype)
        side_lse = lse if i == 0 and lse is not None else np.empty(out.shape[:3], out.dtype) if len(parts) > 1 else None
        algorithms.forward(name, problem, side, side_lse, weights, workers)
        sides.append((side, side_lse))
    if len(sides) > 1:
        _merge_into(*sides[0], *sides[1])
    if not isinstance(new, int) or new < Lq:
        behind = np.broadcast_to(np.arange(Lq) >= np.reshape(new, (-1, 1)), (out.shape[0], Lq))
        out.swapaxes(1, 2)[behind] = 0
        if lse is not None:
            lse.swapaxes(1, 2)[behind] = -np.inf
        if weights is not None:
            weights.swapaxes(1, 2)[behind] = 0


def _merge_into(out: np.ndarray, lse: Any, other: np.ndarray, other_lse: Any) -> None:
    """out, lse <- the attention over two sets of keys, of which each side has seen one; `other` is used up.

    lse = log(exp(lse) + exp(other_lse)), out = sum of exp(its lse - lse) times each side.
    """
    with np.errstate(all="ignore"):
        top = np.maximum(lse, other_lse)
        np.copyto(top, 0, where=np.isneginf(top))
        own, others = np.exp(lse - top), np.exp(other_lse - top)
        total = own + others
        np.add(top, np.log(total), out=lse)
        np.copyto(total, 1, where=total == 0)
        out *= (own / total)[..., None]
        other *= (others / total)[..., None]
        out += other
