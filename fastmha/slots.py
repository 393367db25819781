"""The slots of a cache: buffers for keys and values, how far each row is filled, ring arithmetic, and the way back.

A linear cache holds position p of a row in slot p. A ring (`window`) holds it in slot p % slots, with as many slots as
queries within the window can need. Lengths are kept as one int while all rows have the same, else as a (B,) array.

What a cache holds is one value, its `State`. A change prepares the next one where nobody looks, in fresh buffers or in slots
behind the lengths, and ends with one assignment; slots that are held are overwritten by `move_rows`, which makes the
assignment as well. So an exception at whatever point, from a signal too, finds the old state or the new one.
"""
from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastmha import validate
from fastmha._core import move_rows

_FIRST_SLOTS = 64
_MOST_BYTES = 2**62
Lengths: TypeAlias = int | np.ndarray
Pair: TypeAlias = tuple[np.ndarray, np.ndarray]             # keys and values
Move: TypeAlias = tuple[int, int, int, int, int, int]       # as `move_rows` takes it


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


class State(NamedTuple):
    """What a cache holds. Never changed but replaced, so that whoever has read it once has what belongs together."""
    k: np.ndarray               # (B, Hkv, slots, D)
    v: np.ndarray               # (B, Hkv, slots, Dv)
    filled: Lengths             # tokens of each row; in a ring counted from the first ever
    tops: Lengths | None        # of a truncated ring: the most that each row had, None where that is filled

    @property
    def slots(self) -> int:
        return self.k.shape[2]

    @property
    def most(self) -> Lengths:
        return self.filled if self.tops is None else self.tops


class Mark(NamedTuple):
    """Where a change began, for `Slots.roll_back`."""
    state: State
    lost: tuple[Pair, list[Move]] | None        # copies of what a ring loses by it, and the moves that bring it back


class Slots:
    """What a `KVCache` holds, and all that changes it; arguments have been checked.

    `capacity` None: the buffers are allocated with the first tokens and grow; with `window` it is window + max_chunk.
    """

    def __init__(self, batch_size: int, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: np.dtype,
                 capacity: int | None = None, window: int | None = None, max_chunk: int | None = None) -> None:
        self.batch_size, self.num_kv_heads, self.head_dim, self.v_head_dim = batch_size, num_kv_heads, head_dim, v_head_dim
        self.dtype, self.window, self.max_chunk = dtype, window, max_chunk
        self.grows = capacity is None
        self.state = State(*self.allocate(capacity or 0), 0, None)

    # ------------------------------------------------------------------------------------------------- lengths

    def rows(self, lengths: Lengths) -> np.ndarray:
        """Lengths as a new (B,) int64 array."""
        return np.full(self.batch_size, lengths, np.int64)

    def held(self, state: State) -> np.ndarray:
        """(B,) tokens that each row holds."""
        return self.rows(state.filled) - self.floors(state.most)

    def floors(self, tops: Lengths) -> Lengths:
        """The oldest position that each row of a ring still holds once its longest was `tops`."""
        return 0 if self.window is None else np.maximum(tops - self.state.slots, 0)

    def wrapped(self, tops: Lengths) -> bool:
        """Whether some row has lost tokens once its longest was `tops`."""
        return self.window is not None and longest(tops) > self.state.slots

    def view(self, state: State, buffer: np.ndarray) -> np.ndarray:
        """What is held of a buffer: a view, of a ring that has wrapped a copy, oldest first."""
        if self.wrapped(state.most):
            return self._ordered(state, buffer, self.held(state), 0)
        return buffer[:, :, :longest(state.filled)]

    def after(self, new: Lengths) -> Lengths:
        """The lengths with `new` tokens more; an error if there is no room for them."""
        state = self.state
        after = together(state.filled + new)
        if self.window is None:
            needed = longest(after)
            if not self.grows and needed > state.slots:
                raise ValueError(f"capacity is {state.slots} but a length of {needed} would be needed for the new tokens")
            if needed > validate.LARGEST:
                raise ValueError(f"a cache can hold at most {validate.LARGEST} tokens but a length of {needed} would be needed")
        return after

    # ------------------------------------------------------------------------------------------------- appending

    def store(self, k: np.ndarray, v: np.ndarray, new: Lengths, after: Lengths) -> None:
        """Append the first `new` of the tokens k, v, checked, which gives the lengths `after`."""
        state = self.state
        if self.window is not None:
            skip = 0
            if k.shape[2] > state.slots:        # tokens that it will keep of no row are not converted
                skip = max(0, int(np.min(new)) - state.slots)
                k, v = k[:, :, skip:], v[:, :, skip:]
            tops = None if state.tops is None else _unless_same(larger(state.tops, after), after)
            self._move((self._as_stored(k), self._as_stored(v)), self._ring_moves(state, new, skip),
                       State(state.k, state.v, after, tops))
            return
        buffers = state[:2] if longest(after) <= state.slots else self._grown(state, longest(after))
        if k.dtype == v.dtype == self.dtype:
            self._write(buffers, k, v, state.filled, new)
        else:
            with np.errstate(all="ignore"):     # what is beyond the range of a narrower dtype becomes inf
                self._write(buffers, k, v, state.filled, new)
        self.state = State(*buffers, after, None)

    def allocate(self, slots: int) -> Pair:
        rows = self.batch_size * self.num_kv_heads * max(slots, 1)
        if rows * max(self.head_dim, self.v_head_dim) * self.dtype.itemsize > _MOST_BYTES:
            raise ValueError(f"a cache of batch_size {self.batch_size}, num_kv_heads {self.num_kv_heads}, head_dim "
                             f"{self.head_dim}, v_head_dim {self.v_head_dim} and {max(slots, 1)} tokens per row is beyond any "
                             "memory")
        shape = self.batch_size, self.num_kv_heads, slots
        return np.empty((*shape, self.head_dim), self.dtype), np.empty((*shape, self.v_head_dim), self.dtype)

    def _grown(self, state: State, needed: int) -> Pair:
        """Larger buffers with what is held."""
        old = longest(state.filled)
        k, v = self.allocate(min(max(_FIRST_SLOTS, 2 * state.slots, needed), validate.LARGEST))
        k[:, :, :old], v[:, :, :old] = state.k[:, :, :old], state.v[:, :, :old]
        return k, v

    def _write(self, buffers: Pair, k: np.ndarray, v: np.ndarray, filled: Lengths, new: Lengths) -> None:
        """The first `new` tokens to the slots from `filled` on, which no row holds."""
        if isinstance(filled, int) and isinstance(new, int):
            for buffer, x in zip(buffers, (k, v)):
                buffer[:, :, filled:filled + new] = x[:, :, :new]
            return
        starts, counts = self.rows(filled), self.rows(new)
        if k.shape[2] == 1:
            rows = counts.nonzero()[0]
            slots = starts[rows]
            for buffer, x in zip(buffers, (k, v)):
                buffer[rows, :, slots] = x[rows, :, 0]
            return
        for b, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
            for buffer, x in zip(buffers, (k, v)):
                buffer[b, :, start:start + count] = x[b, :, :count]

    # what a ring holds is overwritten

    def _move(self, others: Pair, moves: list[Move], state: State) -> None:
        """Tokens between the rows of the buffers and of others, and then this state: all of it or nothing."""
        move_rows(self.state[:2], others, moves, self, "state", state)

    def _as_stored(self, x: np.ndarray) -> np.ndarray:
        """New tokens as they can be moved: in the storage dtype, with unit last stride."""
        if x.dtype != self.dtype:
            with np.errstate(all="ignore"):
                return x.astype(self.dtype, "C")
        return x if x.strides[3] == x.itemsize or x.shape[3] == 1 else x.copy()

    def _ring_moves(self, state: State, new: Lengths, skip: int = 0) -> list[Move]:
        """The first `new` tokens behind those of each row; where they exceed the ring, its length of the last. The others
        begin with token `skip`."""
        slots, B = state.slots, self.batch_size
        if isinstance(state.filled, int) and isinstance(new, int):
            spans: Any = [(0, B, state.filled, new)] if B else []
        else:
            starts, counts = self.rows(state.filled), self.rows(new)
            if longest(counts) == 1:
                rows = counts.nonzero()[0]
                return [(b, slot, B + b, 0, 1, 1) for b, slot in zip(rows.tolist(), (starts[rows] % slots).tolist())]
            spans = zip(range(B), repeat(1), starts.tolist(), counts.tolist())
        moves = []
        for b, rows, position, count in spans:
            at = max(0, count - slots)
            while at < count:
                slot = (position + at) % slots
                run = min(count - at, slots - slot)
                moves.append((b, slot, B + b, at - skip, rows, run))
                at += run
        return moves

    def mark(self, new: Lengths, after: Lengths) -> Mark:
        """To be taken before `new` tokens are stored, which gives the lengths `after`."""
        state = self.state
        if not self.wrapped(larger(state.most, after)):
            return Mark(state, None)
        moves = self._ring_moves(state, new)
        shape = self.batch_size, self.num_kv_heads, longest(new)
        aside = np.empty((*shape, self.head_dim), self.dtype), np.empty((*shape, self.v_head_dim), self.dtype)
        self._move(aside, [(source, at, target, to, rows, count) for target, to, source, at, rows, count in moves], state)
        return Mark(state, (aside, moves))

    def roll_back(self, mark: Mark) -> None:
        """Make it what it was at the mark."""
        if mark.lost is None:
            self.state = mark.state
        else:
            self._move(*mark.lost, mark.state)

    # ------------------------------------------------------------------------------------------------- rearranging

    def reset(self) -> None:
        """Forget all tokens; the memory is kept."""
        state = self.state
        self.state = State(state.k, state.v, 0, None)

    def truncate(self, wanted: Lengths) -> None:
        """Forget the tokens from position `wanted` on; an error where a ring has overwritten keys that are needed there."""
        state = self.state
        if self.batch_size == 0:
            self.state = State(state.k, state.v, wanted if isinstance(wanted, int) else state.filled, None)
            return
        filled = self.rows(state.filled)
        after = np.minimum(filled, wanted)
        tops = state.tops
        if self.window is not None and bool((after < filled).any()):
            floors = self.rows(self.floors(state.most))
            lost = (after < filled) & (after > 0) & (floors > np.maximum(after - self.window, 0))
            if lost.any():
                b = int(lost.argmax())
                raise ValueError(f"length {after[b]} is too far back for row {b}: a query there may attend keys from position "
                                 f"{max(0, after[b] - self.window)} on (window {self.window}), but the ring holds them only from "
                                 f"position {floors[b]} on")
            tops = _unless_same(np.where(after > 0, self.rows(state.most), 0), after)
        self.state = State(state.k, state.v, together(after), tops)

    def reorder(self, sources: np.ndarray) -> None:
        """Make row b what row ``sources[b]`` was."""
        B = self.batch_size
        if B == 0:
            return
        state = self.state
        used = self._used(state).tolist()
        copies = _copies(sources.tolist())
        shape = 1, self.num_kv_heads, max((used[source] for source, target in copies if target == B), default=0)
        aside = np.empty((*shape, self.head_dim), self.dtype), np.empty((*shape, self.v_head_dim), self.dtype)
        moves, opened = [], 0
        for source, target in copies:
            if target == B:
                opened = source
            moves.append((target, 0, source, 0, 1, used[opened if source == B else source]))
        filled = state.filled if isinstance(state.filled, int) else together(state.filled[sources])
        tops = None if state.tops is None else self.rows(state.tops)[sources]
        self._move(aside, moves, State(state.k, state.v, filled, tops))

    def _used(self, state: State) -> np.ndarray:
        """(B,) slots of each row that have been written, from slot 0 on."""
        return np.minimum(self.rows(state.most), state.slots)

    def _ordered(self, state: State, buffer: np.ndarray, keep: np.ndarray, room: int) -> np.ndarray:
        """The newest `keep` (B,) tokens of each row, oldest first, and room for more: (B, Hkv, largest keep + room, width)."""
        slots = buffer.shape[2]
        out = np.empty((*buffer.shape[:2], int(keep.max(initial=0)) + room, buffer.shape[3]), buffer.dtype)
        for b, (start, count) in enumerate(zip((self.rows(state.filled) - keep).tolist(), keep.tolist())):
            first = start % slots
            run = min(count, slots - first)
            out[b, :, :run], out[b, :, run:count] = buffer[b, :, first:first + run], buffer[b, :, :count - run]
        return out

    def linear(self, keep: np.ndarray, room: int) -> Slots:
        """The newest `keep` tokens of each row of a ring in slots that are none, with room for more."""
        other = Slots(self.batch_size, self.num_kv_heads, self.head_dim, self.v_head_dim, self.dtype)
        state = self.state
        k, v = self._ordered(state, state.k, keep, room), self._ordered(state, state.v, keep, room)
        other.state = State(k, v, together(keep) if self.batch_size else 0, None)
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = self.state
        n = int(self._used(state).max(initial=0))       # memory that was never written stays here
        kept = state.k[:, :, :n].copy(), state.v[:, :, :n].copy(), state.filled, state.tops
        return {**self.__dict__, "state": kept, "slots": state.slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: value for name, value in state.items() if name not in ("state", "slots")})
        kept = State(*state["state"])
        k, v = self.allocate(state["slots"])
        k[:, :, :kept.slots], v[:, :, :kept.slots] = kept.k, kept.v
        self.state = kept._replace(k=k, v=v)


def _copies(sources: list[int]) -> list[tuple[int, int]]:
    """Copies (source, target), one after the other, after which row b is what row sources[b] was; len(sources) is a spare row.

    A row is overwritten once nobody needs it; what is left then are cycles, each opened by one row set aside.
    """
    needed = [0] * len(sources)
    for target, source in enumerate(sources):
        needed[source] += source != target
    moves, spare = [], len(sources)
    pending = {target for target, source in enumerate(sources) if source != target}
    free = [target for target in sorted(pending) if not needed[target]]
    while free:
        target = free.pop()
        source = sources[target]
        moves.append((source, target))
        pending.discard(target)
        needed[source] -= 1
        if not needed[source] and source in pending:
            free.append(source)
    while pending:
        start = target = pending.pop()
        moves.append((start, spare))
        while sources[target] != start:
            moves.append((sources[target], target))
            target = sources[target]
            pending.discard(target)
        moves.append((spare, target))
    return moves


def _unless_same(tops: Lengths, filled: Lengths) -> Lengths | None:
    return None if np.all(tops == filled) else tops
