"""Attention of the newest queries over a cache's slots: where its keys lie, in one part or in two, and the step of a module."""
from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from fastmha import algorithms, validate
from fastmha._core import Problem
from fastmha.algorithms import BY_NAME
from fastmha.merging import shares
from fastmha.planning import choose
from fastmha.slots import Lengths, Slots, larger, longest, together
from fastmha.validate import Rules

Part: TypeAlias = tuple[Problem, slice, str]        # an attention over some slots, and its algorithm


class Step:
    """New tokens of a module over a cache. Everything is checked on construction, before k and v have been computed::

        with step:              # stores k and v; if anything fails inside, the cache is as it was
            step.attend(...)

    At every moment the cache is as it was or holds the new tokens, whatever is raised.
    """

    def __init__(self, slots: Slots, q: np.ndarray, k: np.ndarray, v: np.ndarray, new: Lengths, rules: Rules,
                 need_weights: bool) -> None:
        self.slots, self.over, self.new = slots, slots, new
        self.k, self.v = k, v
        self.after = after = slots.after(new)
        if slots.window is not None and slots.max_chunk is not None:
            check_ring(slots, rules.window, rules.key_ranges)
            tops = larger(slots.state.most, after)
            if q.shape[2] > slots.max_chunk or ((rules.mask is not None or need_weights) and slots.wrapped(tops)):
                # what is held and the new tokens side by side in slots for this call alone, then their end to the ring
                room = slots.window + np.maximum(0, slots.max_chunk - slots.rows(new))
                keep = np.minimum(slots.held(slots.state), room)
                if rules.mask is not None and bool((keep < slots.rows(slots.state.filled)).any()):
                    same_number(keep + new)
                after = together(keep + new) if slots.batch_size else q.shape[2]
                self.parts = prepare(slots, q, after, new, rules, need_weights, linear=True)
                self.over = slots.linear(keep, q.shape[2])
        if self.over is slots:
            self.parts = prepare(slots, q, after, new, rules, need_weights)
        self.total = longest(after)

    def __enter__(self) -> Step:
        if self.over is not self.slots:
            self.over.store(self.k, self.v, self.new, self.over.after(self.new))
            return self
        self.mark = self.slots.mark(self.new, self.after)
        try:
            self.slots.store(self.k, self.v, self.new, self.after)
        except BaseException:
            self.slots.roll_back(self.mark)
            raise
        return self

    def attend(self, out: np.ndarray, weights: np.ndarray | None, workers: int) -> None:
        """out (B, H, L, Dv), weights (B, H, L, total) <- the attention of the new queries."""
        attend(self.over, self.parts, self.new, out, None, weights, workers)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.over is not self.slots:
            if kind is None:
                self.slots.store(self.k, self.v, self.new, self.after)
        elif kind is not None:
            self.slots.roll_back(self.mark)


# --------------------------------------------------------------------------------------------------------- attention

def check_ring(slots: Slots, window: Any, key_ranges: Any) -> None:
    """Whether a ring can serve these rules: window reaches no further back, and no keys are named by where they lie."""
    if key_ranges is not None:
        raise ValueError("key_ranges cannot be given with a cache that is a ring, in which keys do not keep their places, got "
                         f"{validate.short(key_ranges)}")
    left, _ = validate.band(False, window)
    if left is None or left > (slots.window or 0):
        raise ValueError(f"window must have a left side of at most {slots.window}, the window of the cache, "
                         f"got {validate.short(window)}")


def check_reach(slots: Slots, new: Lengths, window: Any) -> None:
    """Whether the newest `new` queries have positions, and a ring still holds the keys that they may attend."""
    state = slots.state
    filled, counts = slots.rows(state.filled), slots.rows(new)
    first = filled - counts
    if (first < 0).any():
        b = int(first.argmin())
        raise ValueError(f"q has {counts[b]} new queries in row {b} but the cache holds only {filled[b]} tokens there: their "
                         "keys must have been appended")
    if slots.window is not None:
        oldest, floors = np.maximum(first - window[0], 0), slots.rows(slots.floors(state.most))
        lost = (counts > 0) & (floors > oldest)
        if lost.any():
            b = int(lost.argmax())
            raise ValueError(f"q begins at position {first[b]} of row {b} and may attend keys from position {oldest[b]} on "
                             f"(window {window[0]}), but the ring holds them only from position {floors[b]} on")


def same_number(held: np.ndarray) -> None:
    if held.size and (held != held[0]).any():
        raise ValueError(f"mask cannot be laid over a ring whose rows hold different numbers of keys, here {held.tolist()}")


def prepare(slots: Slots, q: np.ndarray, after: Lengths, new: Lengths, rules: Rules, need_weights: bool,
            linear: bool = False) -> list[Part]:
    """The attention of the newest `new` queries at the lengths `after`, in storage order; all errors end here. The offset and the
    padding lengths of the rules follow from these; their key ranges may lie beyond the keys that there are so far.

    Where there is no room for the keys yet, or they are of another dtype, the problems hold stand-ins of their shapes, which
    `attend` replaces. `linear`: they will not lie in the ring that `slots` are.
    """
    first = after - new
    spans = [(0, longest(after), None if isinstance(after, int) else after, first)]
    state = slots.state
    if slots.window is not None and not linear and longest(after) > state.slots:
        spans = _spans(after, first, state.slots)
    parts: list[Part] = []
    placed = rules.is_causal is not False or rules.window is not None or rules.alibi is not None
    B, heads = slots.batch_size, slots.num_kv_heads
    if rules.key_ranges is not None:
        sides = validate.ranges(rules.key_ranges, B, validate.LARGEST, "the longest possible")
        rules = rules._replace(key_ranges=tuple(None if x is None else np.minimum(x, longest(after)) for x in sides))
    for start, stop, lengths, offset in spans:
        if not linear and stop <= state.slots and slots.dtype == q.dtype:
            k, v = state.k[:, :, start:stop], state.v[:, :, start:stop]
        else:
            k = _stand_in((B, heads, stop - start, slots.head_dim), q.dtype)
            v = _stand_in((B, heads, stop - start, slots.v_head_dim), q.dtype)
        problem = validate.attention_problem(q, k, v, "BHLD", rules.at(offset if placed else None, lengths))
        if len(spans) > 1:
            rules = rules._replace(sinks=None)      # they count once
        parts.append((problem, slice(start, stop), choose(problem, rules.algorithm, weights=need_weights)[0]))
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
    """Stored keys and values as an algorithm takes them with queries of `dtype`: some convert as they load."""
    if k.dtype == dtype:
        return k, v
    name = k.dtype.name
    if name not in BY_NAME[algorithm].stored:
        return keys_and_values(k, v, dtype)
    return (k.view(np.uint16), v.view(np.uint16)) if name == "bfloat16" else (k, v)


def keys_and_values(k: np.ndarray, v: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Stored keys and values in `dtype`; themselves where they are."""
    if k.dtype == dtype:
        return k, v
    with np.errstate(all="ignore"):
        return k.astype(dtype), v.astype(dtype)


def attend(slots: Slots, parts: list[Part], new: Lengths, out: np.ndarray, lse: np.ndarray | None,
           weights: np.ndarray | None, workers: int) -> None:
    """out (B, H, Lq, Dv), lse (B, H, Lq), weights <- what `prepare` has prepared; queries behind `new` attend nothing."""
    Lq = out.shape[2]
    sides, state, computed = [], slots.state, validate.computed(out.dtype)
    apart = len(parts) > 1 and out.dtype != computed        # to be rounded once, when the sides are merged
    q = algorithms.converted(parts[0][0].q, computed, workers) if apart else parts[0][0].q
    for i, (problem, span, name) in enumerate(parts):
        if apart or problem.k.base is not state.k:
            problem = problem.with_heads(q, *as_taken(state.k[:, :, span], state.v[:, :, span], problem.dtype, name))
        side = out if i == 0 and not apart else np.empty(out.shape, computed)
        side_lse = lse if i == 0 and lse is not None else np.empty(out.shape[:3], computed) if len(parts) > 1 else None
        algorithms.forward(name, problem, side, side_lse, weights, workers)
        sides.append((side, side_lse))
    if len(sides) > 1:
        merge_into(*sides[0], *sides[1])
        if apart:
            out[...] = validate.cast(sides[0][0], out.dtype)
    if not isinstance(new, int) or new < Lq:
        behind = np.broadcast_to(np.arange(Lq) >= np.reshape(new, (-1, 1)), (out.shape[0], Lq))
        out.swapaxes(1, 2)[behind] = 0
        if lse is not None:
            lse.swapaxes(1, 2)[behind] = -np.inf
        if weights is not None:
            weights.swapaxes(1, 2)[behind] = 0


def merge_into(out: np.ndarray, lse: Any, other: np.ndarray, other_lse: Any) -> None:
    """out, lse <- the attention over two sets of keys, of which each side has seen one; `other` is used up."""
    with np.errstate(all="ignore"):
        own, others, lse[...] = shares(lse, other_lse)
        out *= own[..., None]
        other *= others[..., None]
        out += other
