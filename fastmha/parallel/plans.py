"""What a parallel call would hold, compute and send on each rank, and how long that would take, before anything runs."""
from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


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
        for name, least in (("latency_seconds", "at least 0"), ("bytes_per_second", "above 0")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not (value > 0 or (value == 0 and least == "at least 0")):
                raise ValueError(f"{name} must be {least}, got {value!r}")

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
        raise ValueError(f"comm must have at most a rank for each of the {num_heads} heads, got {ranks} ranks")
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
