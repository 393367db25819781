"""A cache whose tokens are dealt to ranks, for contexts that outgrow one machine's memory; see docs/parallel.md.

Blocks of consecutive tokens go to the ranks in turn. Each rank attends what it holds, which lies in the order of positions, by a
`KVCache` of its own; two reductions make one softmax of it.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from fastmha import validate
from fastmha.cache import KVCache, new_lengths
from fastmha.parallel.ring import in_words
from fastmha.parallel.together import Team
from fastmha.validate import KeyRanges

_OF_POSITIONS = "the columns of a rank are no run of positions: key_ranges, window and is_causal say which keys count"
_NAMES = validate.CALL_NAMES | dict.fromkeys(("dropout", "dropout_p"), "a cache drops nothing") | dict.fromkeys(
    ("mask", "attn_mask", "attention_mask", "alibi"), _OF_POSITIONS)


class TokenCache:
    """Keys and values of past tokens, dealt to the ranks in blocks.

    Every method is collective: all ranks call it with the same arguments.

    Parameters
    ----------
    batch_size : int
        B.
    num_kv_heads, head_dim : int
        Hkv key/value heads of width D.
    comm : mpi4py.MPI.Intracomm or Team
        Its errors are returned from now on.
    v_head_dim : int, optional
        Width Dv of the values, default head_dim.
    block : int
        Tokens that go to one rank before the next one has its turn.
    dtype : float32, float64, float16 or bfloat16
        Of the storage, as of a `fastmha.KVCache`.

    Raises
    ------
    ValueError, TypeError, ImportError
        As `fastmha.KVCache`; on all ranks where they differ.
    OtherRankError
        Where another rank has raised.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> from fastmha.parallel import TokenCache, ring_positions             # a program that mpiexec starts on every rank:
    >>> from mpi4py import MPI                                              # doctest: +SKIP
    >>> cache = TokenCache(1, 2, 64, MPI.COMM_WORLD)                        # doctest: +SKIP
    >>> cache.append(k, v)                                                  # doctest: +SKIP
    >>> out = cache.attend(q, is_causal=True)                               # doctest: +SKIP
    """

    def __init__(self, batch_size: int, num_kv_heads: int, head_dim: int, comm: Any, *, v_head_dim: int | None = None,
                 block: int = 64, dtype: Any = np.float32) -> None:
        self._team = Team.of(comm)

        def prepare() -> tuple[KVCache, int]:
            return (KVCache(batch_size, num_kv_heads, head_dim, v_head_dim=v_head_dim, dtype=dtype),
                    validate.integer("block", block, 1, validate.LARGEST))

        self._own, self._block = self._team.agree(prepare, lambda: {
            "batch_size": batch_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim,
            "block": block, "dtype": validate.dtype_of(dtype)})
        self._lengths = np.zeros(self._own.batch_size, np.int64)

    @property
    def batch_size(self) -> int:
        """B."""
        return self._own.batch_size

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64 array, a copy: the tokens of each row on all ranks."""
        return self._lengths.copy()

    @property
    def length(self) -> int:
        """The largest of `lengths`."""
        return int(self._lengths.max(initial=0))

    @property
    def held(self) -> np.ndarray:
        """(B,) int64 array: the tokens of each row that this rank holds."""
        return self._own.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's two buffers."""
        return self._own.nbytes

    def append(self, k: np.ndarray, v: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Store n new tokens behind those of each row: of what all ranks are given each stores its own. One small message.

        Parameters
        ----------
        k : (B, Hkv, n, D) array of real floating numbers
            Any strides; cast to the storage dtype. The same on all ranks, of which only the shape is compared.
        v : (B, Hkv, n, Dv) array of real floating numbers
        lengths : (B,) array of int, optional
            Valid new tokens of each row, 0 to n, default n.

        Raises
        ------
        ValueError, TypeError
            For wrong shapes or dtypes, on all ranks for such as differ.
        OtherRankError
            Where another rank has raised. After any error the cache is as it was, on all ranks.
        """
        before = self._own.lengths
        new = np.zeros_like(before)

        def store() -> None:
            own = self._own
            given = own._new("k", k, own.head_dim), own._new("v", v, own.v_head_dim)
            n = given[0].shape[2]
            if given[1].shape[2] != n:
                raise ValueError(f"v has length {given[1].shape[2]} on axis 2 but k has {n}")
            new[...] = new_lengths(own, "lengths", lengths, n, "n")
            columns = np.arange(n)
            mine = (self._lengths[:, None] + columns) // self._block % self._team.size == self._team.rank
            mine &= columns < new[:, None]
            counts = mine.sum(axis=1)
            at = np.argsort(~mine, axis=1, kind="stable")[:, None, :counts.max(initial=0), None]
            mine_k, mine_v = (np.take_along_axis(x, at, axis=2) for x in given)
            own.append(mine_k, mine_v, counts)

        try:
            self._team.agree(store, lambda: {"k": np.shape(k), "v": np.shape(v), "lengths": in_words(new)})
        except BaseException:
            self._own.truncate(before)
            raise
        self._lengths += new

    def reset(self) -> None:
        """Forget all tokens; the memory is kept. Sends nothing."""
        self._own.reset()
        self._lengths[...] = 0

    @validate.own_keywords(_NAMES)
    def attend(
        self, q: np.ndarray, *, lengths_new: np.ndarray | None = None, is_causal: bool = False,
        key_ranges: KeyRanges | None = None, window: tuple[int | None, int | None] | None = None, scale: float | None = None,
        softcap: float | None = None, sinks: np.ndarray | None = None, algorithm: str = "auto", return_lse: bool = False,
        num_threads: int | None = None,
    ) -> Any:
        """Attention of the newest queries, whose keys have been appended, over all tokens of all ranks.

        Parameters
        ----------
        q : (B, H, Lq, D) array of float32 or float64
            Queries of the last Lq tokens of each row, the same on all ranks: the position of query i of row b is
            ``lengths[b] - Lq + i``.
        lengths_new : (B,) array of int, optional
            How many of the Lq queries of each row are valid; their positions are those from ``lengths[b] - lengths_new[b]`` on,
            and those behind attend nothing.
        is_causal, key_ranges, window, scale, softcap, sinks, algorithm
            As in `fastmha.KVCache.attend`, by the positions of all tokens.
        return_lse : bool
            Also return the log of the sum of exponentials of each row.
        num_threads : int, optional
            Threads of this rank.

        Returns
        -------
        out : (B, H, Lq, Dv) array, on every rank
        lse : (B, H, Lq) array, with ``return_lse=True``

        Raises
        ------
        ValueError, TypeError, OtherRankError, RuntimeError
            As `ring_attention`.

        Notes
        -----
        Three messages: whether all ranks go on, after their own softmax; the largest lse of each row, B · H · Lq numbers; and the
        sum of exp(lse - largest) and of the output times that, B · H · Lq · (Dv + 1). Equal to `fastmha.attention` over the whole
        cache to rounding. With several queries whose keys differ a mask (B, 1, Lq, tokens held) is made.
        """
        told: dict[str, Any] = {}

        def own_part() -> Any:
            wanted, given = validate.flag("return_lse", return_lse), validate.heads("q", q, "BHLD")
            B, H, Lq, _ = given.shape
            if self.batch_size != B:
                raise ValueError(f"q has batch size {B} on axis 0 but the cache has {self.batch_size}")
            new = np.zeros(B, np.int64) + new_lengths(self._own, "lengths_new", lengths_new, Lq, "Lq")
            low, high = self._key_ranges(new, Lq, validate.band(is_causal, window), key_ranges)
            ranges = f"{in_words(low)} to {in_words(high)}"
            rows = np.arange(Lq) < new[:, None]
            low, high = self._held_before(low), self._held_before(np.where(rows, high, low))
            first, end = low.min(axis=1, initial=validate.LARGEST), high.max(axis=1, initial=0)
            first = np.minimum(first, end)
            mask = None
            if ((low != first[:, None]) | (high != end[:, None])).any():       # floats: nobody asks what a slice's True means
                places = np.arange(self._own.length)
                gone = (places < low[..., None]) | (places >= high[..., None])
                mask = np.where(gone, -np.inf, 0).astype(given.dtype)[:, None]
            part = self._own.attend(given, mask=mask, key_ranges=(first, end), scale=scale, softcap=softcap, algorithm=algorithm,
                                    return_lse=True, num_threads=num_threads)
            joined = np.full(H, -np.inf, given.dtype) if sinks is None else validate.of_heads("sinks", sinks, H, given.dtype)
            told.update(q=f"{given.dtype} {given.shape}", lengths_new=in_words(new), is_causal=is_causal, window=window,
                        scale=scale, softcap=softcap, sinks=in_words(joined), key_ranges=ranges)
            return *part, joined[:, None], rows, wanted

        out, lse, joined, rows, wanted = self._team.agree(own_part, lambda: told)
        with np.errstate(all="ignore"):
            top = np.maximum(self._team.largest(lse.copy()), joined)
            shift = np.where(np.isneginf(top), 0, top)
            share = np.exp(lse - shift)[..., None]
            sums = self._team.add(np.concatenate((out * share, share), axis=3))
            total = sums[..., -1] + np.exp(joined - shift)
            out = sums[..., :-1] / np.where(total == 0, 1, total)[..., None]
            lse = np.where(rows[:, None], np.log(total) + shift, -np.inf)
        return (out, lse) if wanted else out

    def _held_before(self, positions: np.ndarray) -> np.ndarray:
        """How many tokens of lower positions this rank holds: where in its cache those from there on begin."""
        turn = self._block * self._team.size
        return positions // turn * self._block + np.clip(positions % turn - self._team.rank * self._block, 0, self._block)

    def _key_ranges(self, new: np.ndarray, Lq: int, band: tuple[int | None, int | None],
                    key_ranges: KeyRanges | None) -> tuple[np.ndarray, np.ndarray]:
        """(B, Lq) first positions that each query may attend, and the ends."""
        n = self._lengths[:, None]
        at = n - new[:, None] + np.arange(Lq)
        left, right = band
        if (left is not None or right is not None) and (self._lengths < new).any():
            b = int((self._lengths < new).argmax())
            raise ValueError(f"q has {new[b]} new queries in row {b} but the cache holds only {self._lengths[b]} tokens there: "
                             "their keys must have been appended")
        low, high = np.zeros_like(at), np.zeros_like(at) + n
        if left is not None:
            low = np.maximum(low, at - left)
        if right is not None:
            high = np.minimum(high, at + right + 1)
        if key_ranges is not None:
            starts, ends = validate.ranges(key_ranges, len(n), validate.LARGEST, "the longest possible")
            low = low if starts is None else np.maximum(low, starts[:, None])
            high = high if ends is None else np.minimum(high, ends[:, None])
        return np.minimum(low, high), high

    def __repr__(self) -> str:
        return f"TokenCache of {self._team.size} ranks, blocks of {self._block} tokens, with length {self.length}: {self._own!r}"
