"""KVCache: the keys and values of past tokens, head-major, and the attention of the newest queries over them.

A linear cache holds position p of a row in slot p. A ring (`window=`) holds it in slot p % slots, with as many slots as
queries within the window can need. Lengths are kept as one int while all rows have the same, else as a (B,) array.

What a cache holds is one value, its `State`. A change prepares the next one where nobody looks, in fresh buffers or in slots
behind the lengths, and ends with one assignment; slots that are held are overwritten by `move_rows`, which makes the
assignment as well. So an exception at whatever point, from a signal too, finds the old state or the new one.
"""
from __future__ import annotations

from itertools import repeat
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastmha import threads, validate
from fastmha._core import move_rows
from fastmha.cached import Lengths, attend, larger, longest, prepare, ring_window, same_number, together

_FIRST_SLOTS = 64
_MOST_BYTES = 2**62
Pair: TypeAlias = tuple[np.ndarray, np.ndarray]             # keys and values
Move: TypeAlias = tuple[int, int, int, int, int, int]       # as `move_rows` takes it


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


class KVCache:
    """Keys and values of past tokens, for generation token by token.

    Parameters
    ----------
    batch_size : int
        B.
    num_kv_heads, head_dim : int
        Hkv key/value heads of width D.
    v_head_dim : int, optional
        Width Dv of the values, default head_dim.
    capacity : int, optional
        Tokens a row can hold: more is an error. Without it the buffers are allocated with the first tokens, for 64 or as
        many as needed, and grow by doubling.
    dtype : float32, float64, float16 or bfloat16
        Of the storage; what is appended is cast to it (beyond its range: inf). bfloat16, also by name, needs the package
        ml_dtypes: ``pip install "fastmha[bfloat16]"``.
    window : int, optional
        Makes a ring: how many keys before its own position a query may attend. ``window + max_chunk`` tokens are held, the
        oldest are overwritten. Attention over it needs a window too, whose left side is at most this. Not together with
        capacity.
    max_chunk : int, optional
        Largest number of tokens in one `append` to a ring, default 1.

    Attributes
    ----------
    batch_size, num_kv_heads, head_dim, v_head_dim : int
    dtype : numpy.dtype
    window, max_chunk : int or None

    Notes
    -----
    Rows may have different lengths. What lies behind a row's length is undefined and never matters. Calls that change one
    cache must not run at the same time. A call that an exception ends, be it a MemoryError or a KeyboardInterrupt, leaves the
    cache as it was, or as the call would have left it, and never in between.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> rng = np.random.default_rng(0)
    >>> cache = fastmha.KVCache(1, 2, 16)
    >>> for step in range(5):
    ...     q, k, v = rng.standard_normal((3, 1, 2, 1, 16), dtype=np.float32)
    ...     cache.append(k, v)
    ...     out = cache.attend(q, is_causal=True)
    >>> cache.length, out.shape
    (5, (1, 2, 1, 16))
    """

    def __init__(self, batch_size: int, num_kv_heads: int, head_dim: int, *, v_head_dim: int | None = None,
                 capacity: int | None = None, dtype: Any = np.float32, window: int | None = None,
                 max_chunk: int | None = None) -> None:
        self.batch_size = _count("batch_size", batch_size, 0)
        self.num_kv_heads = _count("num_kv_heads", num_kv_heads, 1)
        self.head_dim = validate.size("head_dim", head_dim)
        self.v_head_dim = self.head_dim if v_head_dim is None else validate.size("v_head_dim", v_head_dim)
        self.dtype = _storage_type(dtype)
        slots = 0 if capacity is None else _count("capacity", capacity, 0)
        if window is None:
            if max_chunk is not None:
                raise ValueError(f"max_chunk is given ({validate.short(max_chunk)}) but not window, which makes the ring that it belongs to")
            self.window = self.max_chunk = None
        else:
            if capacity is not None:
                raise ValueError(f"capacity and window cannot be given together, got {validate.short(capacity)} and "
                                 f"{validate.short(window)}: a ring "
                                 "holds window + max_chunk tokens")
            self.window = _count("window", window, 0, validate.LARGEST - 1)
            self.max_chunk = 1 if max_chunk is None else _count("max_chunk", max_chunk, 1, validate.LARGEST - self.window,
                                                                f" beside window = {self.window}")
            slots = self.window + self.max_chunk
        self._grows = capacity is None and window is None
        self._state = State(*self._allocate(slots), 0, None)

    # ------------------------------------------------------------------------------------------------- what it holds

    @property
    def length(self) -> int:
        """The largest of `lengths`."""
        return longest(self._state.filled)

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64 array, a copy: the tokens of each row; of a ring all that were appended, also those overwritten since."""
        return self._rows(self._state.filled)

    @property
    def held(self) -> np.ndarray:
        """(B,) int64 array: how many tokens each row holds, its newest; fewer than `lengths` in a ring that has wrapped."""
        return self._held(self._state)

    @property
    def capacity(self) -> int:
        """Tokens a row can hold without growing."""
        return self._state.slots

    @property
    def nbytes(self) -> int:
        """Bytes of the two buffers."""
        state = self._state
        return state.k.nbytes + state.v.nbytes

    @property
    def k(self) -> np.ndarray:
        """(B, Hkv, length, D) view of the keys; of a ring that has wrapped a copy (B, Hkv, largest held, D), oldest first."""
        state = self._state
        return self._view(state, state.k)

    @property
    def v(self) -> np.ndarray:
        """(B, Hkv, length, Dv) view of the values; of a ring that has wrapped a copy (B, Hkv, largest held, Dv), oldest first."""
        state = self._state
        return self._view(state, state.v)

    def _view(self, state: State, buffer: np.ndarray) -> np.ndarray:
        if self._wrapped(state.most):
            return self._ordered(state, buffer, self._held(state), 0)
        return buffer[:, :, :longest(state.filled)]

    def _rows(self, lengths: Lengths) -> np.ndarray:
        """Lengths as a new (B,) int64 array."""
        return np.full(self.batch_size, lengths, np.int64)

    def _held(self, state: State) -> np.ndarray:
        return self._rows(state.filled) - self._floors(state.most)

    def _floors(self, tops: Lengths) -> Lengths:
        """The oldest position that each row of a ring still holds once its longest was `tops`."""
        return 0 if self.window is None else np.maximum(tops - self.capacity, 0)

    def _wrapped(self, tops: Lengths) -> bool:
        """Whether some row has lost tokens once its longest was `tops`."""
        return self.window is not None and longest(tops) > self.capacity

    # ------------------------------------------------------------------------------------------------- appending

    def append(self, k: np.ndarray, v: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Store the keys and values of n new tokens behind those of each row.

        Parameters
        ----------
        k : (B, Hkv, n, D) array of real floating numbers
            Any strides; cast to the storage dtype while it is copied.
        v : (B, Hkv, n, Dv) array of real floating numbers
        lengths : (B,) array of int, optional
            Valid new tokens of each row, 0 to n, default n. Those behind are not stored.

        Raises
        ------
        ValueError, TypeError
            For wrong shapes or dtypes, more tokens than `capacity` holds, or more than `max_chunk` of a ring; the cache is as
            it was then. So it is after a MemoryError.
        """
        k, v = self._new("k", k, self.head_dim), self._new("v", v, self.v_head_dim)
        n = k.shape[2]
        if v.shape[2] != n:
            raise ValueError(f"v has length {v.shape[2]} on axis 2 but k has {n}")
        new = self.new_lengths("lengths", lengths, n, "n")
        if self.max_chunk is not None and n > self.max_chunk:
            raise ValueError(f"k has length {n} on axis 2 but at most max_chunk = {self.max_chunk} tokens can be appended to "
                             "this ring at a time")
        after = self._after(new)
        state, overlap = self._state, np.may_share_memory
        if overlap(k, state.k) or overlap(v, state.v) or overlap(k, state.v) or overlap(v, state.k):
            k, v = k.copy(), v.copy()
        self._store(k, v, new, after)

    def _new(self, name: str, x: Any, width: int) -> np.ndarray:
        """x as (B, Hkv, n, width) of a real floating dtype."""
        if type(x) is not np.ndarray:
            x = _plain(name, x)
        if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
            raise TypeError(f"{name} must hold real floating numbers, got dtype {x.dtype}")
        if x.ndim != 4 or x.shape[:2] != (self.batch_size, self.num_kv_heads) or x.shape[3] != width:
            raise ValueError(f"{name} must have shape (B, Hkv, n, {'D' if name == 'k' else 'Dv'}) = ({self.batch_size}, "
                             f"{self.num_kv_heads}, n, {width}), got {x.shape}")
        return x

    def new_lengths(self, name: str, lengths: Any, n: int, longest: str) -> Lengths:
        """How many of n new tokens are valid."""
        if lengths is None or self.batch_size == 0:
            return n
        return together(_lengths(name, lengths, self.batch_size, n, longest))

    def _after(self, new: Lengths) -> Lengths:
        """The lengths with `new` tokens more; an error if there is no room for them."""
        state = self._state
        after = together(state.filled + new)
        if self.window is None:
            needed = longest(after)
            if not self._grows and needed > state.slots:
                raise ValueError(f"capacity is {state.slots} but a length of {needed} would be needed for the new tokens")
            if needed > validate.LARGEST:
                raise ValueError(f"a cache can hold at most {validate.LARGEST} tokens but a length of {needed} would be needed")
        return after

    def _store(self, k: np.ndarray, v: np.ndarray, new: Lengths, after: Lengths) -> None:
        """Append the first `new` of the tokens k, v, checked, which gives the lengths `after`."""
        state = self._state
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
        self._state = State(*buffers, after, None)

    def _allocate(self, slots: int) -> Pair:
        rows = self.batch_size * self.num_kv_heads * max(slots, 1)
        if rows * max(self.head_dim, self.v_head_dim) * self.dtype.itemsize > _MOST_BYTES:
            raise ValueError(f"a cache of batch_size {self.batch_size}, num_kv_heads {self.num_kv_heads}, head_dim "
                             f"{self.head_dim}, v_head_dim {self.v_head_dim} and {max(slots, 1)} tokens a row is beyond any "
                             "memory")
        shape = self.batch_size, self.num_kv_heads, slots
        return np.empty((*shape, self.head_dim), self.dtype), np.empty((*shape, self.v_head_dim), self.dtype)

    def _grown(self, state: State, needed: int) -> Pair:
        """Larger buffers with what is held."""
        old = longest(state.filled)
        k, v = self._allocate(min(max(_FIRST_SLOTS, 2 * state.slots, needed), validate.LARGEST))
        k[:, :, :old], v[:, :, :old] = state.k[:, :, :old], state.v[:, :, :old]
        return k, v

    def _write(self, buffers: Pair, k: np.ndarray, v: np.ndarray, filled: Lengths, new: Lengths) -> None:
        """The first `new` tokens to the slots from `filled` on, which no row holds."""
        if isinstance(filled, int) and isinstance(new, int):
            for buffer, x in zip(buffers, (k, v)):
                buffer[:, :, filled:filled + new] = x[:, :, :new]
            return
        starts, counts = self._rows(filled), self._rows(new)
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
        move_rows(self._state[:2], others, moves, self, "_state", state)

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
            starts, counts = self._rows(state.filled), self._rows(new)
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

    def _set_aside(self, new: Lengths, after: Lengths) -> tuple[Pair, list[Move]] | None:
        """Copies of what a ring loses where `new` tokens are stored, and the moves that bring it back; None if nothing."""
        state = self._state
        if not self._wrapped(larger(state.most, after)):
            return None
        moves = self._ring_moves(state, new)
        shape = self.batch_size, self.num_kv_heads, longest(new)
        aside = np.empty((*shape, self.head_dim), self.dtype), np.empty((*shape, self.v_head_dim), self.dtype)
        self._move(aside, [(source, at, target, to, rows, count) for target, to, source, at, rows, count in moves], state)
        return aside, moves

    # ------------------------------------------------------------------------------------------------- rearranging

    def reset(self) -> None:
        """Forget all tokens; the memory is kept."""
        state = self._state
        self._state = State(state.k, state.v, 0, None)

    def truncate(self, length: int | np.ndarray) -> None:
        """Forget the tokens from position `length` on, such as a draft that is refused.

        Parameters
        ----------
        length : int or (B,) array of int
            From 0 to `length`; a row that is shorter stays as it is.

        Raises
        ------
        ValueError, TypeError
            For a length outside that range; for a ring also where a query at position `length` could attend keys that have
            been overwritten. The cache is as it was then.
        """
        state = self._state
        most = longest(state.filled)
        if isinstance(length, (np.ndarray, list, tuple)):
            wanted: Lengths = _lengths("length", length, self.batch_size, most, "the cache's length")
        else:
            wanted = validate.integer("length", length, 0)
            if wanted > most:
                raise ValueError(f"length must be at most the cache's length {most}, got {wanted}")
        if self.batch_size == 0:
            self._state = State(state.k, state.v, wanted if isinstance(wanted, int) else state.filled, None)
            return
        filled = self._rows(state.filled)
        after = np.minimum(filled, wanted)
        tops = state.tops
        if self.window is not None and bool((after < filled).any()):
            floors = self._rows(self._floors(state.most))
            lost = (after < filled) & (after > 0) & (floors > np.maximum(after - self.window, 0))
            if lost.any():
                b = int(lost.argmax())
                raise ValueError(f"length {after[b]} is too far back for row {b}: a query there may attend keys from position "
                                 f"{max(0, after[b] - self.window)} on (window {self.window}), but the ring holds them only from "
                                 f"position {floors[b]} on")
            tops = _unless_same(np.where(after > 0, self._rows(state.most), 0), after)
        self._state = State(state.k, state.v, together(after), tops)

    def reorder(self, indices: np.ndarray) -> None:
        """Make row b what row ``indices[b]`` was, as a beam search does.

        Parameters
        ----------
        indices : (B,) array of int
            From 0 to B - 1; rows may be taken several times or not at all.

        Notes
        -----
        Only rows that change are copied, only as far as they are filled, in place; one row is set aside if rows change places.
        """
        B = self.batch_size
        sources = _lengths("indices", indices, B, B - 1, "B - 1")
        if B == 0:
            return
        state = self._state
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
        tops = None if state.tops is None else self._rows(state.tops)[sources]
        self._move(aside, moves, State(state.k, state.v, filled, tops))

    def _used(self, state: State) -> np.ndarray:
        """(B,) slots of each row that have been written, from slot 0 on."""
        return np.minimum(self._rows(state.most), state.slots)

    def _ordered(self, state: State, buffer: np.ndarray, keep: np.ndarray, room: int) -> np.ndarray:
        """The newest `keep` (B,) tokens of each row, oldest first, and room for more: (B, Hkv, largest keep + room, width)."""
        slots = buffer.shape[2]
        out = np.empty((*buffer.shape[:2], int(keep.max(initial=0)) + room, buffer.shape[3]), buffer.dtype)
        for b, (start, count) in enumerate(zip((self._rows(state.filled) - keep).tolist(), keep.tolist())):
            first = start % slots
            run = min(count, slots - first)
            out[b, :, :run], out[b, :, run:count] = buffer[b, :, first:first + run], buffer[b, :, :count - run]
        return out

    def _linear(self, keep: np.ndarray, room: int) -> KVCache:
        """The newest `keep` tokens of each row of a ring as a cache that is none, with room for more."""
        other = KVCache(self.batch_size, self.num_kv_heads, self.head_dim, v_head_dim=self.v_head_dim, dtype=self.dtype)
        state = self._state
        k, v = self._ordered(state, state.k, keep, room), self._ordered(state, state.v, keep, room)
        other._state = State(k, v, together(keep) if self.batch_size else 0, None)
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = self._state
        n = int(self._used(state).max(initial=0))       # memory that was never written stays here
        kept = state.k[:, :, :n].copy(), state.v[:, :, :n].copy(), state.filled, state.tops
        return {**self.__dict__, "_state": kept, "slots": state.slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: value for name, value in state.items() if name not in ("_state", "slots")})
        kept = State(*state["_state"])
        k, v = self._allocate(state["slots"])
        k[:, :, :kept.slots], v[:, :, :kept.slots] = kept.k, kept.v
        self._state = kept._replace(k=k, v=v)

    def __repr__(self) -> str:
        values = f", v_head_dim={self.v_head_dim}" if self.v_head_dim != self.head_dim else ""
        ring = f", window={self.window}, max_chunk={self.max_chunk}" if self.window is not None else ""
        room = f", capacity={self.capacity}" if self.window is None else ""
        return (f"KVCache(batch_size={self.batch_size}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}{values}"
                f"{room}, dtype={self.dtype}{ring}) with length {self.length}")

    # ------------------------------------------------------------------------------------------------- attention

    @validate.own_keywords(validate.CALL_NAMES)
    def attend(
        self, q: np.ndarray, *, lengths_new: np.ndarray | None = None, mask: np.ndarray | None = None, is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
        algorithm: str = "auto", return_lse: bool = False, need_weights: bool = False, num_threads: int | None = None,
    ) -> Any:
        """Attention of the newest queries, whose keys have been appended, over all that is cached.

        Parameters
        ----------
        q : (B, H, Lq, D) array of float32 or float64
            Queries of the last Lq tokens of each row: the position of query i of row b is ``lengths[b] - Lq + i``. H is a
            multiple of Hkv. Keys and values of another dtype are converted to that of q.
        lengths_new : (B,) array of int, optional
            For rows with different numbers of new tokens: how many of the Lq queries of each row are valid, 0 to Lq. They are
            the first ones, at the positions from ``lengths[b] - lengths_new[b]`` on; those behind attend nothing.
        mask : array, optional
            As in `fastmha.attention`. Its last axis spans the cached keys; of a ring those that are held, oldest first, of
            which every row must then have the same number.
        is_causal, window, scale, softcap, algorithm
            As in `fastmha.attention`. A ring needs a window whose left side is at most its own.
        return_lse, need_weights : bool
            Also return the log of the sum of exponentials of each row; the attention weights.
        num_threads : int, optional
            Threads for this call.

        Returns
        -------
        out : (B, H, Lq, Dv) array
            Over a linear cache of q's dtype it has the bits that `fastmha.attention` gives over `k` and `v`, with the
            position of the first query as offset.
        lse : (B, H, Lq) array, with ``return_lse=True``
        weights : (B, H, Lq, Lk) array, with ``need_weights=True``
            Lk is `length`, or of a ring that has wrapped the largest of `held`, columns oldest first.

        Raises
        ------
        ValueError, TypeError
            As `fastmha.attention`; also where causality or a window would need queries at positions before 0, or keys that a
            ring has overwritten.

        Notes
        -----
        A ring that has wrapped is read where it lies, in two parts whose results are merged by their lse; with a mask, or if
        weights are asked for, what it holds is copied in order first.
        """
        return_lse, need_weights = validate.flag("return_lse", return_lse), validate.flag("need_weights", need_weights)
        q = validate.heads("q", q, "BHLD")
        B, H, Lq, _ = q.shape
        if self.batch_size != B:
            raise ValueError(f"q has batch size {B} on axis 0 but the cache has {self.batch_size}")
        new = self.new_lengths("lengths_new", lengths_new, Lq, "Lq")
        state, cache = self._state, self
        filled = state.filled
        if self.window is not None:
            window = ring_window(self, window)
        is_causal = validate.flag("is_causal", is_causal)
        if is_causal or window is not None:
            self._check_reach(state, new, window)
        if self._wrapped(state.most) and (mask is not None or need_weights):
            held = self._held(state)
            if mask is not None:
                same_number(held)
            cache = self._linear(held, 0)
            filled = cache._state.filled
        parts = prepare(cache, q, filled, new, mask, is_causal, window, scale, softcap, algorithm, need_weights)
        workers = threads.resolve(num_threads)
        out = np.empty((B, H, Lq, self.v_head_dim), q.dtype)
        lse = np.empty((B, H, Lq), q.dtype) if return_lse else None
        weights = np.empty((B, H, Lq, longest(filled)), q.dtype) if need_weights else None
        attend(cache, parts, new, out, lse, weights, workers)
        result = (out, *(x for x in (lse, weights) if x is not None))
        return result if len(result) > 1 else out

    def _check_reach(self, state: State, new: Lengths, window: Any) -> None:
        """Whether the newest `new` queries have positions, and a ring still holds the keys that they may attend."""
        filled, counts = self._rows(state.filled), self._rows(new)
        first = filled - counts
        if (first < 0).any():
            b = int(first.argmin())
            raise ValueError(f"q has {counts[b]} new queries in row {b} but the cache holds only {filled[b]} tokens there: their "
                             "keys must have been appended")
        if self.window is not None:
            oldest, floors = np.maximum(first - window[0], 0), self._rows(self._floors(state.most))
            lost = (counts > 0) & (floors > oldest)
            if lost.any():
                b = int(lost.argmax())
                raise ValueError(f"q begins at position {first[b]} of row {b} and may attend keys from position {oldest[b]} on "
                                 f"(window {window[0]}), but the ring holds them only from position {floors[b]} on")


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


def _count(name: str, value: Any, minimum: int, maximum: int = validate.LARGEST, why: str = "") -> int:
    value = validate.integer(name, value, minimum)
    if value > maximum:
        raise ValueError(f"{name} must be at most {maximum}{why}, got {value}")
    return value


def _plain(name: str, x: Any) -> np.ndarray:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array, got a masked one, whose mask would be lost")
    return validate.as_array(name, x)


def _lengths(name: str, given: Any, B: int, most: int, most_name: str) -> np.ndarray:
    """`validate.batch_lengths`, where ints that no integer array can hold are told as what they are."""
    values = _plain(name, given)
    if values.dtype.kind in "fO" and values.shape == (B,):
        exact = np.asarray(given, object).tolist()
        if all(isinstance(x, Integral) for x in exact):
            for i, x in enumerate(exact):
                if not 0 <= x <= most:
                    raise ValueError(f"{name} must lie in [0, {most_name}] = [0, {most}], got {x} at index {i}")
    return validate.batch_lengths(name, values, B, most, most_name)


def _storage_type(dtype: Any) -> np.dtype:
    if isinstance(dtype, str) and dtype == "bfloat16":
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            raise ImportError('dtype "bfloat16" needs the package ml_dtypes: pip install "fastmha[bfloat16]"') from None
        dtype = bfloat16
    found = validate.dtype_of(dtype)
    if found.kind == "O":
        raise TypeError(f"dtype must be float32, float64, float16 or bfloat16, got {validate.short(dtype)}")
    if found not in (*validate.FLOAT_TYPES, np.dtype(np.float16)) and found.name != "bfloat16":
        raise TypeError(f"dtype must be float32, float64, float16 or bfloat16, got {found}")
    return found
