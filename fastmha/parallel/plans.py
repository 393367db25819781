"""What a parallel call would hold, compute and send on each rank, and how long that would take, before anything runs."""
from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fastmha import analysis, validate
from fastmha.multihead import MultiHeadAttention
from fastmha.parallel.together import AGREEMENT_BYTES


@dataclass(frozen=True)
class Link:
    """What connects two ranks.

    Parameters
    ----------
    latency_seconds : float
        Of a message of no bytes.
    bytes_per_second : float
        Of a long one, in each direction at once.
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        validate.number("latency_seconds", "a finite number >= 0", self.latency_seconds, -5e-324)
        validate.number("bytes_per_second", "a finite number > 0", self.bytes_per_second, 0)

    def seconds(self, size: int) -> float:
        """For one message of that many bytes from one rank to another."""
        return self.latency_seconds + size / self.bytes_per_second

    def allreduce_seconds(self, size: int, ranks: int) -> float:
        """For the sum of a buffer of that many bytes over all ranks, by the faster of two algorithms [1]_.

        Recursive doubling sends the whole buffer log2(ranks) times; reduce-scatter and allgather send it about twice, in
        2 log2(ranks) messages.

        References
        ----------
        .. [1] Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
        """
        if ranks == 1:
            return 0.0
        steps = math.ceil(math.log2(ranks))
        scattered = 2 * steps * self.latency_seconds + 2 * (ranks - 1) / ranks * size / self.bytes_per_second
        return min(steps * self.seconds(size), scattered)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does.

    Attributes
    ----------
    rank : int
    heads : int
        Query heads that it computes.
    tokens : int
        Queries of each batch row that it computes.
    holds : str
        Which ones, in words.
    held_bytes : int
        Of its weights, or of its keys and values.
    flops : int
    messages, bytes : int
        As `Team` counts them: what the rank hands to MPI.
    compute_seconds, link_seconds : float
        By the measured rate and the stated link.
    """

    rank: int
    heads: int
    tokens: int
    holds: str
    held_bytes: int
    flops: int
    messages: int
    bytes: int
    compute_seconds: float
    link_seconds: float


@dataclass(frozen=True)
class ParallelPlan:
    """What all ranks do; ``print(plan)`` is a receipt.

    Attributes
    ----------
    what : str
        The call, in words.
    ranks : tuple of RankPlan
    seconds : float
        Predicted, from the first rank's start to the last one's end.
    flops_per_second : float
        Of one rank.
    link : Link
    """

    what: str
    ranks: tuple[RankPlan, ...]
    seconds: float
    flops_per_second: float
    link: Link

    @property
    def flops(self) -> int:
        """Of all ranks."""
        return sum(rank.flops for rank in self.ranks)

    @property
    def balance(self) -> float:
        """Mean FLOPs of a rank over the most: 1 is even."""
        most = max(rank.flops for rank in self.ranks)
        return self.flops / (most * len(self.ranks)) if most else 1.0

    def __str__(self) -> str:
        shown = self.ranks if len(self.ranks) <= 16 else (*self.ranks[:8], *self.ranks[-8:])
        rows = [("rank", "holds", "held bytes", "FLOPs", "messages", "bytes", "compute s", "link s")]
        rows += [(str(r.rank), r.holds, f"{r.held_bytes:,}", f"{r.flops:,}", f"{r.messages:,}", f"{r.bytes:,}",
                  f"{r.compute_seconds:.3g}", f"{r.link_seconds:.3g}") for r in shown]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(n) if i == 1 else cell.rjust(n) for i, (cell, n) in enumerate(zip(row, widths)))
                 for row in rows]
        if len(shown) < len(self.ranks):
            lines.insert(9, f"  ... {len(self.ranks) - 16} ranks more ...")
        return "\n".join([
            self.what,
            f"{self.flops_per_second / 1e9:.3g} GF/s a rank; link {self.link.latency_seconds * 1e6:.3g} µs, "
            f"{self.link.bytes_per_second / 1e9:.3g} GB/s", *lines,
            f"predicted {self.seconds:.3g} s; {self.flops:,} FLOPs, balance {self.balance:.3f}"])


class HeadCut(NamedTuple):
    """The query heads of a rank, the key/value heads that they read, and whether no earlier rank holds these."""

    heads: slice
    kv_heads: slice
    is_first: bool


def cut_heads(num_heads: int, num_kv_heads: int, ranks: int) -> list[HeadCut]:
    """Each rank's heads: whole groups, as evenly as they go; where ranks outnumber key/value heads, each of these goes to
    several ranks that share out its group. The first ranks have more."""
    if ranks > num_heads:
        raise ValueError(f"ranks must be at most one for each of the {num_heads} heads, got {ranks}")
    group = num_heads // num_kv_heads
    if ranks <= num_kv_heads:
        return [HeadCut(slice(start * group, stop * group), slice(start, stop), True)
                for start, stop in _evenly(0, num_kv_heads, ranks)]
    return [HeadCut(slice(start, stop), slice(n, n + 1), start == n * group)
            for n, (first, end) in enumerate(_evenly(0, ranks, num_kv_heads))
            for start, stop in _evenly(n * group, (n + 1) * group, end - first)]


def _evenly(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """start to stop in so many runs, the longer ones first."""
    least, more = divmod(stop - start, parts)
    ends = [start + n * least + min(n, more) for n in range(parts + 1)]
    return list(pairwise(ends))


def measured_rate(seq_len: int, d_model: int, num_heads: int, *, num_kv_heads: int | None = None, dtype: Any = np.float32,
                  backward: bool = False, num_threads: int | None = None, seconds: float = 0.3) -> float:
    """FLOP/s of this machine: the fastest of a few forward passes of a module, or of training steps.

    Parameters
    ----------
    seq_len, d_model, num_heads, num_kv_heads, dtype
        Of the module and its input, of one batch row.
    backward : bool
        Time a forward and a backward pass together.
    num_threads : int, optional
        Of each pass: what a rank is to use.
    seconds : float
        After which no further pass begins. There are at least two, and the first is not timed.

    Returns
    -------
    float
        By the count of `fastmha.analysis.count_flops`.
    """
    module = MultiHeadAttention(d_model, num_heads, num_kv_heads=num_kv_heads, dtype=dtype, rng=0)
    X = np.random.default_rng(1).standard_normal((1, validate.length("seq_len", seq_len), d_model)).astype(module.dtype)
    backward = validate.flag("backward", backward)
    flops = analysis.count_flops(1, seq_len, d_model, num_heads, n_kv_heads=num_kv_heads, backward=backward)
    begun, fastest = time.perf_counter(), math.inf
    while True:
        start = time.perf_counter()
        out = module.forward(X, training=backward, num_threads=num_threads)
        if backward:
            module.backward(out, num_threads=num_threads)
        now = time.perf_counter()
        if start > begun:
            fastest = min(fastest, now - start)
            if now - begun > seconds:
                return flops / fastest
        else:
            begun = start


def plan_shards(batch_size: int, seq_len: int, d_model: int, num_heads: int, ranks: int, *, num_kv_heads: int | None = None,
                head_dim: int | None = None, use_bias: bool | str = False, dtype: Any = np.float32, is_causal: bool = False,
                window: tuple[int | None, int | None] | None = None, backward: bool = False, overlap_rows: int | None = None,
                flops_per_second: float | None = None, link: Link) -> ParallelPlan:
    """What `shard` of such a module on so many ranks would hold, and its forward compute and send.

    Parameters
    ----------
    batch_size, seq_len : int
        B and L of X.
    d_model, num_heads, num_kv_heads, head_dim, use_bias, dtype
        Of the module.
    ranks : int
        At most num_heads.
    is_causal, window
        As in `fastmha.analysis.count_flops`, which counts the FLOPs.
    backward : bool
        Plan a forward and a backward pass together.
    overlap_rows : int, optional
        As in `shard`.
    flops_per_second : float, optional
        Of one rank; default: `measured_rate` of this machine at this length (at most 1024) and width, of one thread.
    link : Link
        Between any two ranks.

    Returns
    -------
    ParallelPlan
        Its seconds are those of the rank with the most FLOPs and of the messages after them; with overlap_rows the last product
        goes on during all sums but the last. Messages and bytes are those that `Team` counts.

    Raises
    ------
    ValueError, TypeError
        As `fastmha.MultiHeadAttention` and `fastmha.analysis.count_flops`, and if there are more ranks than heads.

    Examples
    --------
    >>> from fastmha.parallel import Link, plan_shards
    >>> plan = plan_shards(1, 512, 1024, 16, 4, flops_per_second=5e10, link=Link(2e-6, 1e10))
    >>> [rank.heads for rank in plan.ranks], plan.ranks[0].messages
    ([4, 4, 4, 4], 2)
    """
    kind, ranks = checked_for_plan(dtype, link), validate.integer("ranks", ranks, 1)
    validate.choice("use_bias", str(use_bias), ("True", "False", "qkv", "out"))
    backward = validate.flag("backward", backward)
    # checks the sizes as well
    whole = analysis.count_flops(batch_size, seq_len, d_model, num_heads, n_kv_heads=num_kv_heads, d_k=head_dim,
                                 is_causal=is_causal, window=window, backward=backward)
    Hkv, D = num_kv_heads or num_heads, head_dim or d_model // num_heads
    cuts = cut_heads(num_heads, Hkv, ranks)
    rate = _rate(flops_per_second, seq_len, d_model, num_heads, num_kv_heads, kind, backward)
    in_bias, out_bias = use_bias in (True, "qkv"), use_bias in (True, "out")
    rows, row_bytes = batch_size * seq_len, d_model * kind.itemsize
    slices = [rows]
    if overlap_rows is not None:
        overlap_rows = validate.integer("overlap_rows", overlap_rows, 1)
        slices = [min(overlap_rows, rows - start) for start in range(0, rows, overlap_rows)]
    sent = [AGREEMENT_BYTES, *(n * row_bytes for n in slices), *[AGREEMENT_BYTES] * (overlap_rows is not None)]
    if backward:
        # with grad_X, where ranks share key/value heads, the gradients of W_K, W_V, b_K and b_V
        sent += [AGREEMENT_BYTES, rows * row_bytes + 2 * Hkv * D * (d_model + in_bias) * kind.itemsize * (ranks > Hkv)]
    sent = sent if ranks > 1 else []
    link_seconds = sum(link.allreduce_seconds(size, ranks) for size in sent)
    hidden = 0.0
    if len(slices) > 1 and ranks > 1:
        # all sums but the last run beside products: of each pair the shorter one costs nothing
        product = 2 * slices[0] * (cuts[0].heads.stop - cuts[0].heads.start) * D * d_model / rate
        hidden = (len(slices) - 1) * min(product, link.allreduce_seconds(slices[0] * row_bytes, ranks))
    plans = []
    for rank, (heads, kv_heads, _) in enumerate(cuts):
        h, hkv = heads.stop - heads.start, kv_heads.stop - kv_heads.start
        weights = 2 * d_model * (h + hkv) * D + in_bias * (h + 2 * hkv) * D + out_bias * d_model
        flops = analysis.count_flops(batch_size, seq_len, d_model, h, n_kv_heads=hkv, d_k=D, is_causal=is_causal, window=window,
                                     backward=backward)
        plans.append(RankPlan(rank, h, seq_len, f"heads {_run(heads)}, key/value heads {_run(kv_heads)}", weights * kind.itemsize,
                              flops, len(sent), sum(sent), flops / rate, link_seconds))
    again = sum(plan.flops for plan in plans) - whole
    what = (f"{num_heads} heads over {Hkv} key/value heads dealt to {ranks} rank{'s' * (ranks > 1)}: B {batch_size}, "
            f"L {seq_len}, d_model {d_model}, {kind}, forward{' and backward' * backward}"
            f"{f'; {again:,} FLOPs more than without ranks' if again else ''}")
    return ParallelPlan(what, tuple(plans), max(plan.compute_seconds for plan in plans) + link_seconds - hidden, rate,
                        link)


def checked_for_plan(dtype: Any, link: Any) -> np.dtype:
    """The dtype, float32 or float64; the link is checked as well."""
    kind = validate.dtype_of(dtype)
    if kind not in validate.FLOAT_TYPES:
        raise TypeError(f"dtype must be float32 or float64, got {validate.short(dtype)}")
    if not isinstance(link, Link):
        raise TypeError(f"link must be a Link, got {validate.short(link)}")
    return kind


def _rate(flops_per_second: Any, seq_len: int, d_model: int, num_heads: int, num_kv_heads: int | None, dtype: np.dtype,
          backward: bool) -> float:
    """What was given, checked, or measured at this length and width, by one thread."""
    if flops_per_second is None:
        return measured_rate(max(1, min(seq_len, 1024)), d_model, num_heads, num_kv_heads=num_kv_heads, dtype=dtype,
                             backward=backward, num_threads=1)
    return validate.number("flops_per_second", "a finite number > 0", flops_per_second, 0)


def _run(heads: slice) -> str:
    return f"{heads.start}" if heads.stop - heads.start == 1 else f"{heads.start}-{heads.stop - 1}"
