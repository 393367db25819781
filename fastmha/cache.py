"""KVCache: the keys and values of past tokens, head-major, and the attention of the newest queries over them.

A linear cache holds position p of a row in slot p. A ring (`window=`) holds it in slot p % slots, with as many slots as
queries within the window can need. Lengths are kept as one int while all rows have the same, else as a (B,) array.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from fastmha import threads, validate
from fastmha.cached import Lengths, attend, longest, prepare, ring_window, same_number, together

_FIRST_SLOTS = 64
_MOST_BYTES = 2**62


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
    cache must not run at the same time.

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
        self.batch_size = validate.integer("batch_size", batch_size, 0)
        self.num_kv_heads = validate.integer("num_kv_heads", num_kv_heads, 1)
        self.head_dim = validate.size("head_dim", head_dim)
        self.v_head_dim = self.head_dim if v_head_dim is None else validate.size("v_head_dim", v_head_dim)
        self.dtype = _storage_type(dtype)
        slots = 0 if capacity is None else validate.integer("capacity", capacity, 0)
        if window is None:
            if max_chunk is not None:
                raise ValueError(f"max_chunk is given ({max_chunk!r}) but not window, which makes the ring that it belongs to")
            self.window = self.max_chunk = None
        else:
            if capacity is not None:
                raise ValueError(f"capacity and window cannot be given together, got {capacity!r} and {window!r}: a ring "
                                 "holds window + max_chunk tokens")
            self.window = validate.integer("window", window, 0)
            self.max_chunk = 1 if max_chunk is None else validate.integer("max_chunk", max_chunk, 1)
            slots = self.window + self.max_chunk
        self._grows = capacity is None and window is None
        self._k, self._v = self._allocate(slots)
        self._filled: Lengths = 0               # tokens of each row; in a ring counted from the first ever
        self._tops: Lengths | None = None       # of a truncated ring: the most that each row had, None where that is _filled

    # ------------------------------------------------------------------------------------------------- what it holds

    @property
    def length(self) -> int:
        """The largest of `lengths`."""
        return longest(self._filled)

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64 array, a copy: the tokens of each row; of a ring all that were appended, also those overwritten since."""
        return self._rows(self._filled)

    @property
    def held(self) -> np.ndarray:
        """(B,) int64 array: how many tokens each row holds, its newest; fewer than `lengths` in a ring that has wrapped."""
        return self._rows(self._filled) - self._floors()

    @property
    def capacity(self) -> int:
        """Tokens a row can hold without growing."""
        return self._k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the two buffers."""
        return self._k.nbytes + self._v.nbytes

    @property
    def k(self) -> np.ndarray:
        """(B, Hkv, length, D) view of the keys; of a ring that has wrapped a copy (B, Hkv, largest held, D), oldest first."""
        return self._ordered(self._k, self.held, 0) if self._wrapped() else self._k[:, :, :self.length]

    @property
    def v(self) -> np.ndarray:
        """(B, Hkv, length, Dv) view of the values; of a ring that has wrapped a copy (B, Hkv, largest held, Dv), oldest first."""
        return self._ordered(self._v, self.held, 0) if self._wrapped() else self._v[:, :, :self.length]

    def _rows(self, lengths: Lengths) -> np.ndarray:
        """Lengths as a new (B,) int64 array."""
        return np.full(self.batch_size, lengths, np.int64)

    def _floors(self, tops: Lengths | None = None) -> Lengths:
        """The oldest position that each row of a ring still holds once its longest was `tops`."""
        if self.window is None:
            return 0
        tops = (self._filled if self._tops is None else self._tops) if tops is None else tops
        return np.maximum(tops - self._k.shape[2], 0)

    def _wrapped(self, tops: Lengths | None = None) -> bool:
        """Whether some row has lost tokens, or would have at length `tops`."""
        return self.window is not None and bool(np.any(self._floors(tops)))

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
            it was then. So it is after the MemoryError of a cache that cannot grow.
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
        if np.may_share_memory(k, self._k) or np.may_share_memory(v, self._v):
            k, v = k.copy(), v.copy()
        self._store(k, v, new, after)

    def _new(self, name: str, x: Any, width: int) -> np.ndarray:
        """x as (B, Hkv, n, width) of a real floating dtype."""
        if type(x) is not np.ndarray:
            x = validate.as_array(name, x)
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
        return together(validate.batch_lengths(name, lengths, self.batch_size, n, longest))

    def _after(self, new: Lengths) -> Lengths:
        """The lengths with `new` tokens more; an error if there is no room for them."""
        after = together(self._filled + new)
        if self.window is None:
            needed = longest(after)
            if not self._grows and needed > self._k.shape[2]:
                raise ValueError(f"capacity is {self._k.shape[2]} but a length of {needed} would be needed for the new tokens")
            if needed > validate.LARGEST:
                raise ValueError(f"a cache can hold at most {validate.LARGEST} tokens but a length of {needed} would be needed")
        return after

    def _store(self, k: np.ndarray, v: np.ndarray, new: Lengths, after: Lengths) -> None:
        """Append the first `new` of the tokens k, v, checked, which gives the lengths `after`."""
        if self.window is None and longest(after) > self._k.shape[2]:
            self._grow(longest(after))
        if k.dtype == v.dtype == self.dtype:
            self._write(k, v, new)
        else:
            with np.errstate(all="ignore"):     # what is beyond the range of a narrower dtype becomes inf
                self._write(k, v, new)
        if self._tops is not None:
            tops = np.maximum(self._tops, after)
            self._tops = None if (tops == after).all() else tops
        self._filled = after

    def _allocate(self, slots: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.batch_size * self.num_kv_heads * slots
        if rows * max(self.head_dim, self.v_head_dim) * self.dtype.itemsize > _MOST_BYTES:
            raise ValueError(f"a cache of batch_size {self.batch_size}, num_kv_heads {self.num_kv_heads}, head_dim "
                             f"{self.head_dim}, v_head_dim {self.v_head_dim} and {slots} tokens a row is beyond any memory")
        shape = self.batch_size, self.num_kv_heads, slots
        return np.empty((*shape, self.head_dim), self.dtype), np.empty((*shape, self.v_head_dim), self.dtype)

    def _grow(self, needed: int) -> None:
        old = self.length
        k, v = self._allocate(min(max(_FIRST_SLOTS, 2 * self._k.shape[2], needed), validate.LARGEST))
        k[:, :, :old], v[:, :, :old] = self._k[:, :, :old], self._v[:, :, :old]
        self._k, self._v = k, v

    def _write(self, k: np.ndarray, v: np.ndarray, new: Lengths) -> None:
        filled = self._filled
        if type(filled) is int and type(new) is int:
            self._copy(slice(None), filled, new, k, v)
            return
        starts, counts = self._rows(filled), self._rows(new)
        if k.shape[2] == 1:
            rows = counts.nonzero()[0]
            slots = starts[rows] % self._k.shape[2]
            self._k[rows, :, slots], self._v[rows, :, slots] = k[rows, :, 0], v[rows, :, 0]
            return
        for b, (start, count) in enumerate(zip(starts.tolist(), counts.tolist())):
            self._copy(slice(b, b + 1), start, count, k, v)

    def _copy(self, rows: slice, position: int, count: int, k: np.ndarray, v: np.ndarray) -> None:
        """The first `count` tokens of k, v to `position` of these rows; where they exceed a ring, its length of the last."""
        slots = self._k.shape[2]
        at = max(0, count - slots)
        while at < count:
            slot = (position + at) % slots
            run = min(count - at, slots - slot)
            self._k[rows, :, slot:slot + run] = k[rows, :, at:at + run]
            self._v[rows, :, slot:slot + run] = v[rows, :, at:at + run]
            at += run

    # ------------------------------------------------------------------------------------------------- rearranging

    def reset(self) -> None:
        """Forget all tokens; the memory is kept."""
        self._filled, self._tops = 0, None

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
        if isinstance(length, (np.ndarray, list, tuple)):
            wanted = validate.batch_lengths("length", length, self.batch_size, self.length, "the cache's length")
        else:
            one = validate.integer("length", length, 0)
            if one > self.length:
                raise ValueError(f"length must be at most the cache's length {self.length}, got {one}")
            wanted = self._rows(one)
            if self.batch_size == 0:
                self._filled = one
        if self.batch_size == 0:
            return
        filled = self._rows(self._filled)
        after = np.minimum(filled, wanted)
        if self.window is not None and bool((after < filled).any()):
            floors = self._rows(self._floors())
            lost = (after < filled) & (after > 0) & (floors > np.maximum(after - self.window, 0))
            if lost.any():
                b = int(lost.argmax())
                raise ValueError(f"length {after[b]} is too far back for row {b}: a query there may attend keys from position "
                                 f"{max(0, after[b] - self.window)} on (window {self.window}), but the ring holds them only from "
                                 f"position {floors[b]} on")
            tops = np.where(after > 0, self._rows(self._filled if self._tops is None else self._tops), 0)
            self._tops = None if (tops == after).all() else tops
        self._filled = together(after)

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
        sources = validate.as_array("indices", indices)
        B = self.batch_size
        if sources.shape != (B,):
            raise ValueError(f"indices must have shape (B,) = ({B},), got {sources.shape}")
        if B == 0:
            return
        if sources.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got dtype {sources.dtype}")
        wrong = (sources < 0) | (sources >= B)
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(f"indices must lie in [0, B - 1] = [0, {B - 1}], got {sources[at]} at index {at}")
        used = self._used().tolist()
        moves = _moves(sources.tolist())
        longest = max((used[source] for source, target in moves if target < 0), default=0)
        aside = [np.empty((self.num_kv_heads, longest, x.shape[3]), x.dtype) for x in (self._k, self._v)]
        opened = 0
        for source, target in moves:
            if target < 0:
                opened = source
            n = used[opened if source < 0 else source]
            for x, spare in zip((self._k, self._v), aside):
                (spare if target < 0 else x[target])[:, :n] = (spare if source < 0 else x[source])[:, :n]
        self._filled = self._filled if isinstance(self._filled, int) else together(self._filled[sources])
        self._tops = None if self._tops is None else self._rows(self._tops)[sources]

    def _used(self) -> np.ndarray:
        """(B,) slots of each row that have been written, from slot 0 on."""
        return np.minimum(self._rows(self._filled if self._tops is None else self._tops), self._k.shape[2])

    def _ordered(self, buffer: np.ndarray, keep: np.ndarray, room: int) -> np.ndarray:
        """The newest `keep` (B,) tokens of each row, oldest first, and room for more: (B, Hkv, largest keep + room, width)."""
        slots = buffer.shape[2]
        out = np.empty((*buffer.shape[:2], int(keep.max(initial=0)) + room, buffer.shape[3]), buffer.dtype)
        for b, (start, count) in enumerate(zip((self.lengths - keep).tolist(), keep.tolist())):
            first = start % slots
            run = min(count, slots - first)
            out[b, :, :run], out[b, :, run:count] = buffer[b, :, first:first + run], buffer[b, :, :count - run]
        return out

    def _linear(self, keep: np.ndarray, room: int) -> KVCache:
        """The newest `keep` tokens of each row of a ring as a cache that is none, with room for more."""
        other = KVCache(self.batch_size, self.num_kv_heads, self.head_dim, v_head_dim=self.v_head_dim, dtype=self.dtype)
        other._k, other._v = self._ordered(self._k, keep, room), self._ordered(self._v, keep, room)
        other._filled = together(keep) if self.batch_size else 0
        return other

    def __getstate__(self) -> dict[str, Any]:
        n = int(self._used().max(initial=0))        # memory that was never written stays here
        return {**self.__dict__, "_k": self._k[:, :, :n].copy(), "_v": self._v[:, :, :n].copy(), "slots": self._k.shape[2]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        slots, k, v = state.pop("slots"), state.pop("_k"), state.pop("_v")
        self.__dict__.update(state)
        self._k, self._v = self._allocate(slots)
        self._k[:, :, :k.shape[2]], self._v[:, :, :v.shape[2]] = k, v

    def __repr__(self) -> str:
        values = f", v_head_dim={self.v_head_dim}" if self.v_head_dim != self.head_dim else ""
        ring = f", window={self.window}, max_chunk={self.max_chunk}" if self.window is not None else ""
        room = f", capacity={self.capacity}" if self.window is None else ""
        return (f"KVCache(batch_size={self.batch_size}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}{values}"
                f"{room}, dtype={self.dtype}{ring}) with length {self.length}")

    # ------------------------------------------------------------------------------------------------- attention

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
        filled, cache = self._filled, self
        if self.window is not None:
            window = ring_window(self, window)
        if is_causal is not False or window is not None:
            self._check_reach(new, window)
        if self._wrapped() and (mask is not None or need_weights):
            held = self.held
            if mask is not None:
                same_number(held)
            cache = self._linear(held, 0)
            filled = cache._filled
        parts = prepare(cache, q, filled, new, mask, is_causal, window, scale, softcap, algorithm, need_weights)
        workers = threads.resolve(num_threads)
        out = np.empty((B, H, Lq, self.v_head_dim), q.dtype)
        lse = np.empty((B, H, Lq), q.dtype) if return_lse else None
        weights = np.empty((B, H, Lq, longest(filled)), q.dtype) if need_weights else None
        attend(cache, parts, new, out, lse, weights, workers)
        result = (out, *(x for x in (lse, weights) if x is not None))
        return result if len(result) > 1 else out

    def _check_reach(self, new: Lengths, window: Any) -> None:
        """Whether the newest `new` queries have positions, and a ring still holds the keys that they may attend."""
        filled, counts = self._rows(self._filled), self._rows(new)
        first = filled - counts
        if (first < 0).any():
            b = int(first.argmin())
            raise ValueError(f"q has {counts[b]} new queries in row {b} but the cache holds only {filled[b]} tokens there: their "
                             "keys must have been appended")
        if self.window is not None:
            oldest, floors = np.maximum(first - window[0], 0), self._rows(self._floors())
            lost = (counts > 0) & (floors > oldest)
            if lost.any():
                b = int(lost.argmax())
                raise ValueError(f"q begins at position {first[b]} of row {b} and may attend keys from position {oldest[b]} on "
                                 f"(window {window[0]}), but the ring holds them only from position {floors[b]} on")


def _moves(sources: list[int]) -> list[tuple[int, int]]:
    """Copies (source, target), one after the other, after which row b is what row sources[b] was; -1 is a spare row.

    A row is overwritten once nobody needs it; what is left then are cycles, each opened by one row set aside.
    """
    needed = [0] * len(sources)
    for target, source in enumerate(sources):
        needed[source] += source != target
    moves = []
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
        moves.append((start, -1))
        while sources[target] != start:
            moves.append((sources[target], target))
            target = sources[target]
            pending.discard(target)
        moves.append((-1, target))
    return moves


def _storage_type(dtype: Any) -> np.dtype:
    if isinstance(dtype, str) and dtype == "bfloat16":
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            raise ImportError('dtype "bfloat16" needs the package ml_dtypes: pip install "fastmha[bfloat16]"') from None
        dtype = bfloat16
    try:
        found = np.dtype(object if dtype is None else dtype)    # np.dtype(None) would be float64
    except TypeError:
        found = np.dtype(object)
    if found.kind == "O":
        raise TypeError(f"dtype must be float32, float64, float16 or bfloat16, got {dtype!r}")
    if found not in (*validate.FLOAT_TYPES, np.dtype(np.float16)) and found.name != "bfloat16":
        raise TypeError(f"dtype must be float32, float64, float16 or bfloat16, got {found}")
    return found
