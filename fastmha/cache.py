"""KVCache: the keys and values of past tokens, head-major, and the attention of the newest queries over them.

What a caller sees: arguments are checked here, what is held lies in `slots.Slots`, the attention is `cached`'s.
"""
from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from fastmha import threads, validate
from fastmha.cached import Step, attend, check_reach, check_ring, prepare, same_number
from fastmha.slots import Lengths, Slots, longest, together
from fastmha.validate import KeyRanges, Rules


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
        batch_size = validate.length("batch_size", batch_size)
        num_kv_heads = validate.integer("num_kv_heads", num_kv_heads, 1, validate.LARGEST)
        head_dim = validate.size("head_dim", head_dim)
        v_head_dim = head_dim if v_head_dim is None else validate.size("v_head_dim", v_head_dim)
        dtype = validate.element_type("dtype", dtype)
        slots = None if capacity is None else validate.length("capacity", capacity)
        if window is None:
            if max_chunk is not None:
                raise ValueError(f"max_chunk is given ({validate.short(max_chunk)}) but not window, which makes the ring that it "
                                 "belongs to")
        else:
            if capacity is not None:
                raise ValueError(f"capacity and window cannot be given together, got {validate.short(capacity)} and "
                                 f"{validate.short(window)}: a ring holds window + max_chunk tokens")
            window = validate.integer("window", window, 0, validate.LARGEST - 1)
            max_chunk = 1 if max_chunk is None else validate.integer(
                "max_chunk", max_chunk, 1, validate.LARGEST - window, f" beside window = {window}")
            slots = window + max_chunk
        self._slots = Slots(batch_size, num_kv_heads, head_dim, v_head_dim, dtype, slots, window, max_chunk)

    # ------------------------------------------------------------------------------------------------- what it holds

    @property
    def batch_size(self) -> int:
        """B."""
        return self._slots.batch_size

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self._slots.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width D of the keys."""
        return self._slots.head_dim

    @property
    def v_head_dim(self) -> int:
        """Width Dv of the values."""
        return self._slots.v_head_dim

    @property
    def dtype(self) -> np.dtype:
        """Of the storage."""
        return self._slots.dtype

    @property
    def window(self) -> int | None:
        """How far before its own position a query over a ring may attend; None of a linear cache."""
        return self._slots.window

    @property
    def max_chunk(self) -> int | None:
        """Largest number of tokens in one `append` to a ring; None of a linear cache."""
        return self._slots.max_chunk

    @property
    def length(self) -> int:
        """The largest of `lengths`."""
        return longest(self._slots.state.filled)

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64 array, a copy: the tokens of each row; of a ring all that were appended, also those overwritten since."""
        return self._slots.rows(self._slots.state.filled)

    @property
    def held(self) -> np.ndarray:
        """(B,) int64 array: how many tokens each row holds, its newest; fewer than `lengths` in a ring that has wrapped."""
        return self._slots.held(self._slots.state)

    @property
    def capacity(self) -> int:
        """Tokens a row can hold without growing."""
        return self._slots.state.slots

    @property
    def nbytes(self) -> int:
        """Bytes of the two buffers."""
        state = self._slots.state
        return state.k.nbytes + state.v.nbytes

    @property
    def k(self) -> np.ndarray:
        """(B, Hkv, length, D) view of the keys; of a ring that has wrapped a copy (B, Hkv, largest held, D), oldest first."""
        state = self._slots.state
        return self._slots.view(state, state.k)

    @property
    def v(self) -> np.ndarray:
        """(B, Hkv, length, Dv) view of the values; of a ring that has wrapped a copy (B, Hkv, largest held, Dv), oldest first."""
        state = self._slots.state
        return self._slots.view(state, state.v)

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
        slots = self._slots
        k, v = self._new("k", k, slots.head_dim), self._new("v", v, slots.v_head_dim)
        n = k.shape[2]
        if v.shape[2] != n:
            raise ValueError(f"v has length {v.shape[2]} on axis 2 but k has {n}")
        new = new_lengths(self, "lengths", lengths, n, "n")
        if slots.max_chunk is not None and n > slots.max_chunk:
            raise ValueError(f"k has length {n} on axis 2 but at most max_chunk = {slots.max_chunk} tokens can be appended to "
                             "this ring at a time")
        after = slots.after(new)
        state, overlap = slots.state, np.may_share_memory
        if overlap(k, state.k) or overlap(v, state.v) or overlap(k, state.v) or overlap(v, state.k):
            k, v = k.copy(), v.copy()
        slots.store(k, v, new, after)

    def _new(self, name: str, x: Any, width: int) -> np.ndarray:
        """x as (B, Hkv, n, width) of a real floating dtype."""
        slots = self._slots
        if type(x) is not np.ndarray:
            x = validate.as_array(name, x)
        if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
            raise TypeError(f"{name} must hold real floating numbers, got dtype {x.dtype}")
        if x.ndim != 4 or x.shape[:2] != (slots.batch_size, slots.num_kv_heads) or x.shape[3] != width:
            raise ValueError(f"{name} must have shape (B, Hkv, n, {'D' if name == 'k' else 'Dv'}) = ({slots.batch_size}, "
                             f"{slots.num_kv_heads}, n, {width}), got {x.shape}")
        return x

    # ------------------------------------------------------------------------------------------------- rearranging

    def reset(self) -> None:
        """Forget all tokens; the memory is kept."""
        self._slots.reset()

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
        slots = self._slots
        most = longest(slots.state.filled)
        if isinstance(length, (np.ndarray, list, tuple)):
            slots.truncate(validate.batch_lengths("length", length, slots.batch_size, most, "the cache's length"))
        else:
            slots.truncate(validate.integer("length", length, 0, most, ", the cache's length"))

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
        B = self._slots.batch_size
        self._slots.reorder(validate.batch_lengths("indices", indices, B, B - 1, "B - 1"))

    def __copy__(self) -> KVCache:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _slots=copy(self._slots))
        return other

    def __repr__(self) -> str:
        values = f", v_head_dim={self.v_head_dim}" if self.v_head_dim != self.head_dim else ""
        ring = f", window={self.window}, max_chunk={self.max_chunk}" if self.window is not None else ""
        room = f", capacity={self.capacity}" if self.window is None else ""
        return (f"KVCache(batch_size={self.batch_size}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}{values}"
                f"{room}, dtype={self.dtype}{ring}) with length {self.length}")

    # ------------------------------------------------------------------------------------------------- attention

    @validate.own_keywords(validate.CALL_NAMES | dict.fromkeys(("dropout", "dropout_p"), "a cache drops nothing"))
    def attend(
        self, q: np.ndarray, *, lengths_new: np.ndarray | None = None, mask: np.ndarray | None = None, is_causal: bool = False,
        key_ranges: KeyRanges | None = None, window: tuple[int | None, int | None] | None = None, scale: float | None = None,
        softcap: float | None = None, sinks: np.ndarray | None = None, alibi: np.ndarray | None = None, algorithm: str = "auto",
        return_lse: bool = False, need_weights: bool = False, num_threads: int | None = None,
    ) -> Any:
        """Attention of the newest queries, whose keys have been appended, over all that is cached.

        Parameters
        ----------
        q : (B, H, Lq, D) array of float32, float64, float16 or bfloat16
            Queries of the last Lq tokens of each row: the position of query i of row b is ``lengths[b] - Lq + i``. H is a
            multiple of Hkv. Keys and values of another dtype are converted to that of q, or to float32 where q is of half
            precision; then out is rounded to it once, lse and weights are of float32.
        lengths_new : (B,) array of int, optional
            For rows with different numbers of new tokens: how many of the Lq queries of each row are valid, 0 to Lq. They are
            the first ones, at the positions from ``lengths[b] - lengths_new[b]`` on; those behind attend nothing.
        mask : array, optional
            As in `fastmha.attention`. Its last axis spans the cached keys; of a ring those that are held, oldest first, of
            which every row must then have the same number.
        is_causal, key_ranges, window, scale, softcap, sinks, alibi, algorithm
            As in `fastmha.attention`; key_ranges counts the cached keys, from 0 on as they lie, and may lie beyond them. A
            ring takes none, and needs a window whose left side is at most its own.
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
            As `fastmha.attention`; also where causality, a window or alibi would need queries at positions before 0, or keys that
            a ring has overwritten.

        Notes
        -----
        A ring that has wrapped is read where it lies, in two parts whose results are merged by their lse; with a mask, or if
        weights are asked for, what it holds is copied in order first.
        """
        return_lse, need_weights = validate.flag("return_lse", return_lse), validate.flag("need_weights", need_weights)
        q = validate.heads("q", q, "BHLD", half=True)
        B, H, Lq, _ = q.shape
        slots = self._slots
        if slots.batch_size != B:
            raise ValueError(f"q has batch size {B} on axis 0 but the cache has {slots.batch_size}")
        new = new_lengths(self, "lengths_new", lengths_new, Lq, "Lq")
        if slots.window is not None:
            check_ring(slots, window, key_ranges)
        is_causal = validate.flag("is_causal", is_causal)
        if is_causal or window is not None or alibi is not None:
            check_reach(slots, new, window)
        if slots.wrapped(slots.state.most) and (mask is not None or need_weights):
            held = slots.held(slots.state)
            if mask is not None:
                same_number(held)
            slots = slots.linear(held, 0)
        filled = slots.state.filled
        rules = Rules(mask, is_causal, None, None, window, scale, softcap, algorithm, num_threads, key_ranges, sinks, alibi)
        parts = prepare(slots, q, filled, new, rules, need_weights)
        workers = threads.resolve(num_threads)
        out = np.empty((B, H, Lq, slots.v_head_dim), q.dtype)
        computed = validate.computed(q.dtype)
        lse = np.empty((B, H, Lq), computed) if return_lse else None
        weights = np.empty((B, H, Lq, longest(filled)), computed) if need_weights else None
        attend(slots, parts, new, out, lse, weights, workers)
        result = (out, *(x for x in (lse, weights) if x is not None))
        return result if len(result) > 1 else out


# ---------------------------------------------------------------------------------------------------------- for modules

def new_lengths(cache: KVCache, name: str, lengths: Any, n: int, most_name: str) -> Lengths:
    """How many of n new tokens are valid."""
    if lengths is None or cache.batch_size == 0:
        return n
    return together(validate.batch_lengths(name, lengths, cache.batch_size, n, most_name))


def step(cache: KVCache, q: np.ndarray, k: np.ndarray, v: np.ndarray, rules: Rules, need_weights: bool) -> Step:
    """The step of a module with these new tokens; the padding lengths of the rules count the valid ones of each row."""
    new = new_lengths(cache, "key_padding_lengths", rules.key_padding_lengths, q.shape[2], "L")
    return Step(cache._slots, q, k, v, new, rules, need_weights)
