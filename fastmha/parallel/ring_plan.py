"""What `ring_attention` would hold, compute and send on each rank, and its schedule run through without running it. No MPI."""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastmha import validate
from fastmha.functional import attention, attention_backward, plan
from fastmha.parallel.plans import Link, ParallelPlan, RankPlan, checked_for_plan
from fastmha.parallel.ring import ring_lengths, ring_positions
from fastmha.parallel.together import AGREEMENT_BYTES


@dataclass(frozen=True)
class RingTimes:
    """What `simulate_ring` found.

    Attributes
    ----------
    ranks : int
    order : str
    seconds : float
        From the start of all ranks to the end of the last one.
    busy : float
        Share of that time in which ranks compute, the mean over ranks.
    compute_seconds : float
        Of the rank that computes longest: a bound of `seconds`.
    link_seconds : float
        Of the messages of keys, values and gradients from the rank that sends longest: a bound as well.
    """

    ranks: int
    order: str
    seconds: float
    busy: float
    compute_seconds: float
    link_seconds: float


def pairs_by_step(lengths: Sequence[int], order: str, left: int | None, right: int | None) -> np.ndarray:
    """(ranks, ranks) int64: how many (i, j) with i - left <= j <= i + right each rank has at each step of the ring.

    At step s rank r has the keys of rank r - s. As `fastmha.analysis` counts them, but for a million of runs at once.
    """
    size = len(lengths)
    runs = np.array([ring_positions(lengths, size, rank, order) for rank in range(size)], np.int64)      # (ranks, runs, 2)
    owners = (np.arange(size)[:, None] - np.arange(size)) % size
    count = np.zeros((size, size), np.int64)
    for of_q in runs.transpose(1, 0, 2):                # a run of the queries of each rank, and one of the keys at each step
        q0, q1 = of_q.T[:, :, None]
        for of_k in runs.transpose(1, 0, 2):
            k0, k1 = of_k[owners].transpose(2, 0, 1)
            n = k1 - k0

            def up_to(bound: int, first: Any = q0, end: Any = q1, start: Any = k0, n: Any = n) -> Any:
                """Pairs with j <= i + bound: a row has i + bound + 1 - start keys, within 0 and n."""
                return _sum_below(end + bound + 1 - start, n) - _sum_below(first + bound + 1 - start, n)

            count += (q1 - q0) * n if right is None else up_to(right)
            count -= 0 if left is None else up_to(-left - 1)
    return count


def _sum_below(end: np.ndarray, most: np.ndarray) -> np.ndarray:
    """The sum over m < end of m clipped to [0, most]."""
    inside = np.clip(end, 0, most)
    return inside * (inside - 1) // 2 + np.maximum(end - most, 0) * most


def simulate_ring(batch_size: int, seq_len: int | Sequence[int], num_heads: int, head_dim: int, ranks: int, *,
                  num_kv_heads: int | None = None, order: str = "zigzag", is_causal: bool = False,
                  window: tuple[int | None, int | None] | None = None, dtype: Any = np.float32, backward: bool = False,
                  flops_per_second: float, link: Link) -> RingTimes:
    """Run through the schedule of `ring_attention` (with `backward` and its gradients) rank by rank and step by step.

    Parameters
    ----------
    batch_size, num_heads, head_dim, num_kv_heads
        B, H, D = Dv and Hkv (default H).
    seq_len : int or sequence of ints
        Tokens of the whole sequence, or those that each rank holds.
    ranks, order
        As in `ring_positions`.
    is_causal, window
        Which pairs are left, with offset 0.
    dtype : float32 or float64
    backward : bool
        A forward pass and then a backward pass.
    flops_per_second : float
        Of one rank.
    link : Link
        From each rank to the next one.

    Returns
    -------
    RingTimes

    Raises
    ------
    ValueError, TypeError
        Naming the argument.

    Notes
    -----
    A message begins when both its ends have come to it and what went before it on its link is through, and takes
    ``link.seconds``. A rank goes to the next step when its work of this one is done and its message has gone and the one before
    it has come. Merging is not counted, and MPI is taken to move messages while a rank computes.
    """
    ring = _Sizes(batch_size, seq_len, num_heads, head_dim, ranks, num_kv_heads, order, is_causal, window, dtype, backward, link)
    return ring.simulate(validate.number("flops_per_second", "a finite number > 0", flops_per_second, 0))


def plan_ring(batch_size: int, seq_len: int | Sequence[int], num_heads: int, head_dim: int, ranks: int, *,
              num_kv_heads: int | None = None, order: str = "zigzag", is_causal: bool = False,
              window: tuple[int | None, int | None] | None = None, sinks: bool = False, dtype: Any = np.float32,
              backward: bool = False, flops_per_second: float | None = None, link: Link) -> ParallelPlan:
    """What `ring_attention` on so many ranks would hold, compute and send.

    Parameters
    ----------
    batch_size, seq_len, num_heads, head_dim, ranks, num_kv_heads, order, is_causal, window, dtype, backward, link
        As in `simulate_ring`.
    sinks : bool
        Whether there are any: backward, their gradient is one message more.
    flops_per_second : float, optional
        Of one rank; default: measured here, by one thread at this length (at most 1024).

    Returns
    -------
    ParallelPlan
        Its seconds are those of `simulate_ring`; messages and bytes those that `Team` counts; FLOPs those of `fastmha.plan`.

    Raises
    ------
    ValueError, TypeError
        Naming the argument.

    Examples
    --------
    >>> from fastmha.parallel import Link, plan_ring
    >>> plan = plan_ring(1, 4096, 8, 64, 4, is_causal=True, flops_per_second=5e10, link=Link(2e-6, 1e10))
    >>> plan.ranks[0].holds, round(plan.balance, 3)
    ('positions 0-511, 3584-4095', 1.0)
    """
    ring = _Sizes(batch_size, seq_len, num_heads, head_dim, ranks, num_kv_heads, order, is_causal, window, dtype, backward, link)
    sinks = validate.flag("sinks", sinks)
    rate = (ring.measured_rate() if flops_per_second is None else
            validate.number("flops_per_second", "a finite number > 0", flops_per_second, 0))
    times = ring.simulate(rate)
    size, held = ring.size, ring.held_bytes
    plans = []
    for rank, flops in enumerate(ring.flops):
        sent = sum(held) - held[(rank + 1) % size]      # the keys of the next rank end their way here
        messages, total = size + 2, sent + ring.small_bytes
        if backward:
            messages, total = messages + 2 * size + 2 + sinks, total + sent + sum(held) + ring.small_bytes + 8 * num_heads * sinks
        if size == 1:
            messages = total = 0
        runs = ", ".join(f"{start}-{stop - 1}" for start, stop in ring_positions(ring.lengths, size, rank, order) if stop > start)
        plans.append(RankPlan(rank, num_heads, ring.lengths[rank], f"positions {runs}" if runs else "nothing", held[rank], flops,
                              messages, total, flops / rate, sum(map(link.seconds, ring.sent(rank)))))
    rules = f"{', causal' * bool(is_causal)}{f', window {window}' if window is not None else ''}"
    what = (f"{sum(ring.lengths)} tokens dealt to {size} rank{'s' * (size > 1)} ({order}): B {batch_size}, H {num_heads}"
            f"{f'/{ring.Hkv}' if ring.Hkv != num_heads else ''}, D {head_dim}, {ring.dtype}{rules}, "
            f"forward{' and backward' * backward}")
    return ParallelPlan(what, tuple(plans), times.seconds, rate, link)


class _Sizes:
    """A ring after checks."""

    def __init__(self, batch_size: Any, seq_len: Any, num_heads: Any, head_dim: Any, ranks: Any, num_kv_heads: Any, order: Any,
                 is_causal: Any, window: Any, dtype: Any, backward: Any, link: Any) -> None:
        self.dtype, self.link, self.order = checked_for_plan(dtype, link), link, order
        self.B, self.D = validate.length("batch_size", batch_size), validate.size("head_dim", head_dim)
        self.H = validate.integer("num_heads", num_heads, 1)
        self.Hkv = self.H if num_kv_heads is None else validate.integer("num_kv_heads", num_kv_heads, 1)
        if self.H % self.Hkv:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.H} and {self.Hkv}")
        self.size = validate.integer("ranks", ranks, 1)
        self.backward = validate.flag("backward", backward)
        validate.choice("order", order, ("zigzag", "contiguous"))
        self.lengths = ring_lengths(seq_len, self.size, order, "seq_len")
        left, right = validate.band(is_causal, window)
        self.pairs = pairs_by_step(self.lengths, order, left, right)
        self.per_pair = [self.B * self.H * n * self.D for n in (4, 10)[:1 + self.backward]]      # FLOPs, forward and backward
        self.flops = [n * sum(self.per_pair) for n in self.pairs.sum(axis=1).tolist()]           # of each rank
        self.held_bytes = [self.B * self.Hkv * n * 2 * self.D * self.dtype.itemsize for n in self.lengths]
        self.small_bytes = 16 * self.size + 2 * AGREEMENT_BYTES

    def sent(self, rank: int) -> list[int]:
        """Bytes of each message of keys and values, and of gradients, that a rank sends."""
        if self.size == 1:
            return []
        keys = self.held_bytes[:]
        del keys[(rank + 1) % self.size]
        return keys + (keys + self.held_bytes) * self.backward

    def measured_rate(self) -> float:
        """FLOP/s of `fastmha.attention` here, on one thread: the fastest of three."""
        length = max(1, min(sum(self.lengths), 1024))
        rng = np.random.default_rng(1)
        q = rng.standard_normal((1, self.H, length, self.D)).astype(self.dtype)
        k = rng.standard_normal((1, self.Hkv, length, self.D)).astype(self.dtype)
        times = []
        for _ in range(4):      # the first warms up
            start = time.perf_counter()
            out, lse = attention(q, k, k, return_lse=True, num_threads=1)
            if self.backward:
                attention_backward(out, q, k, k, out, lse, num_threads=1)
            times.append(time.perf_counter() - start)
        return plan(q, k, k, backward=self.backward).flops / min(times[1:])

    def simulate(self, rate: float) -> RingTimes:
        """The schedule: times of all ranks at once, step by step."""
        small = sum(self.link.allreduce_seconds(n, self.size) for n in (16 * self.size, AGREEMENT_BYTES, AGREEMENT_BYTES))
        seconds = sum(small + self._pass(self.pairs * (flops / rate), i > 0) for i, flops in enumerate(self.per_pair))
        busy = sum(self.flops) / rate / self.size / seconds if seconds else 1.0
        link = max(sum(map(self.link.seconds, self.sent(rank))) for rank in range(self.size))
        return RingTimes(self.size, self.order, seconds, busy, max(self.flops) / rate, link)

    def _pass(self, work: np.ndarray, gradients: bool) -> float:
        """When the last rank ends; work: seconds of each rank at each step."""
        size = self.size
        of_message = np.array([self.link.seconds(n) for n in self.held_bytes])      # by whose keys they are
        ranks = np.arange(size)
        now, free = np.zeros(size), np.zeros(size)      # of each rank, and of the link to it from the one before
        back = np.zeros(size)                           # when the gradients have come that were sent last

        def sent(ready: np.ndarray, owners: np.ndarray) -> np.ndarray:
            """When that which each rank receives, keys of these or their gradients, has arrived."""
            np.maximum(np.maximum(ready, np.roll(ready, 1)), free, out=free)
            free[:] += of_message[owners]
            return free.copy()

        for step in range(size):
            arrived = sent(now, (ranks - step - 1) % size) if step + 1 < size else now
            done = now + work[:, step]
            if gradients and size > 1:
                done = np.maximum(done, np.maximum(back, np.roll(back, -1))) if step else done
                back = sent(done, (ranks - step - 1) % size)
            now = np.maximum(done, np.maximum(arrived, np.roll(arrived, -1)))
        return float(np.maximum(now, back).max())
