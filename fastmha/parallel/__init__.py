"""Attention over several processes, by MPI: heads dealt to ranks, or tokens.

Needs the extra ``mpi`` and an MPI library: ``pip install "fastmha[mpi]" mpich``. See docs/parallel.md::

    heads.py        shard, gather: a module whose heads are dealt to the ranks
    ring.py         ring_attention: each rank holds a slice of the queries, keys and values, keys travel round
    tokens.py       TokenCache: a cache whose tokens are dealt to the ranks
    plans.py  ring_plan.py      what each rank would hold, compute and send; no MPI
        together.py             Team: the ranks, errors that all hear of, counts of messages

`import fastmha` does not import it, and importing it does not import mpi4py: that is done by the first call.
"""
from fastmha.parallel.heads import ShardedAttention, gather, shard
from fastmha.parallel.plans import Link, ParallelPlan, RankPlan, measured_rate, plan_shards
from fastmha.parallel.ring import ring_attention, ring_attention_backward, ring_positions
from fastmha.parallel.ring_plan import RingTimes, plan_ring, simulate_ring
from fastmha.parallel.together import OtherRankError, Team
from fastmha.parallel.tokens import TokenCache

__all__ = [
    "Link", "OtherRankError", "ParallelPlan", "RankPlan", "RingTimes", "ShardedAttention", "Team", "TokenCache", "gather",
    "measured_rate", "plan_ring", "plan_shards", "ring_attention", "ring_attention_backward", "ring_positions", "shard",
    "simulate_ring",
]
