"""What several ranks take, and what they send beside what was planned; or, with --model, what 2 to 1024 of them would take.

    python benches/parallel.py [--ranks 1,2,4] [--threads N] [--seconds S]
    python benches/parallel.py --model [--rate FLOP/s]

Prints Markdown. Each number of ranks is a run of mpiexec, in which all ranks begin each call together and the slowest one
counts; the median of the calls is shown. Answers are compared with those of one process. Messages and bytes are those of the
rank that sends most. Needs the extra ``mpi`` and an MPI library, but for --model.

Exit status 1 if an answer is wrong, or if on any rank messages or bytes are not those that were planned.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from findings import agree, seconds_of

import fastmha
from fastmha.analysis import count_flops
from fastmha.parallel import Link, RankPlan, Team, TokenCache, measured_rate, plan_ring, plan_shards, ring_positions, shard
from fastmha.parallel import ring_attention as ring_forward
from fastmha.parallel import ring_attention_backward as ring_backward
from fastmha.parallel.together import AGREEMENT_BYTES
from fastmha.study import machine
from fastmha.study.__main__ import positive

L, D_MODEL, H, D = 1024, 512, 8, 64         # of the module
RING, CACHED, BLOCK = 2048, 8192, 64        # tokens of the ring and of the caches
ARMS = {
    "forward": f"module, forward: L {L}, d_model {D_MODEL}, H {H}",
    "overlap": "the same with overlap_rows=256",
    "training": "module, forward and backward",
    "ring": f"ring, forward: L {RING}, H {H}, D {D}, zig-zag",
    "ring-training": "ring, forward and backward",
    "step": f"module, one token over a cache of {CACHED}, by heads",
    "token-step": f"TokenCache, one query over {CACHED} tokens",
}

# ------------------------------------------------------------------------------------------------- on every rank


def measured_link(team: Team) -> Link:
    """Between ranks 0 and 1, as messages go to and fro; of one rank: any."""
    if team.size == 1:
        return Link(1e-6, 1e10)
    comm, times = team.comm, []
    for size in (8, 1 << 22):
        there, here = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        rounds = 30
        for n in range(rounds + 3):
            if n == 3:
                comm.Barrier()
                start = perf_counter()
            if team.rank == 0:
                comm.Send(there, 1)
                comm.Recv(here, 1)
            elif team.rank == 1:
                comm.Recv(here, 0)
                comm.Send(there, 0)
        times.append((perf_counter() - start) / rounds / 2)
    latency, longer = (float(x) for x in comm.bcast(times))
    return Link(latency, (1 << 22) / max(longer - latency, 1e-9))


def on_rank(threads: int, seconds: float) -> None:
    """All arms; rank 0 prints a line of JSON for each."""
    from mpi4py import MPI

    fastmha.set_num_threads(threads)
    team, rng = Team(MPI.COMM_WORLD), np.random.default_rng(0)
    link, causal = measured_link(team), {"is_causal": True}
    # all ranks compute at once, as they will
    rate = measured_rate(L, D_MODEL, H, backward=True, num_threads=threads)
    sizes = {"flops_per_second": rate, "link": link, "ranks": team.size}
    whole = fastmha.MultiHeadAttention(D_MODEL, H, rng=1)
    X = rng.standard_normal((1, L, D_MODEL), dtype=np.float32)
    sharded, overlapping = shard(whole, team), shard(whole, team, overlap_rows=256)
    q, k, v, grad = rng.standard_normal((4, 1, H, RING, D), dtype=np.float32)
    at = np.concatenate([np.arange(*run) for run in ring_positions(RING, team.size, team.rank)])
    mine = [np.ascontiguousarray(x[:, :, at]) for x in (q, k, v, grad)]
    past = rng.standard_normal((2, 1, H, CACHED, D), dtype=np.float32)
    own, all_heads = fastmha.KVCache(1, sharded.own.num_kv_heads, D), fastmha.KVCache(1, H, D)
    own.append(*past[:, :, sharded.kv_heads])
    all_heads.append(*past)
    tokens = TokenCache(1, H, D, team, block=BLOCK)
    tokens.append(*past)
    small, token = rng.standard_normal((1, H, 1, D), dtype=np.float32), X[:, :1]

    def training(module: Any) -> np.ndarray:
        module.forward(X, **causal)
        return module.backward(X)

    def step(module: Any, cache: fastmha.KVCache) -> np.ndarray:
        try:
            return module.forward(token, cache=cache, training=False, **causal)
        finally:
            cache.truncate(CACHED)

    def ring_training(of: list[np.ndarray], attend: Callable, backward: Callable, *comm: Any) -> np.ndarray:
        out, lse = attend(*of[:3], *comm, return_lse=True, **causal)
        return backward(of[3], *of[:3], out, lse, *comm, **causal)[1]

    # a call on the ranks, what it should give here, what was planned
    everything, module, ring = [q, k, v, grad], (1, L, D_MODEL, H), (1, RING, H, D)
    sent = [AGREEMENT_BYTES, 4 * H, 4 * H * (D + 1)] if team.size > 1 else []
    arms: dict[str, tuple[Callable[[], np.ndarray], Callable[[], np.ndarray], RankPlan, float | None]] = {}

    def arm(name: str, call: Callable[[], np.ndarray], expected: Callable[[], np.ndarray], plan: Any) -> None:
        arms[name] = call, expected, plan.ranks[team.rank], plan.seconds

    arm("forward", lambda: sharded.forward(X, **causal), lambda: whole.forward(X, **causal),
        plan_shards(*module, **sizes, **causal))
    arm("overlap", lambda: overlapping.forward(X, **causal), lambda: whole.forward(X, **causal),
        plan_shards(*module, overlap_rows=256, **sizes, **causal))
    arm("training", lambda: training(sharded), lambda: training(whole), plan_shards(*module, backward=True, **sizes, **causal))
    arm("ring", lambda: ring_forward(*mine[:3], team, **causal),
        lambda: fastmha.attention(q, k, v, **causal)[:, :, at], plan_ring(*ring, **sizes, **causal))
    arm("ring-training", lambda: ring_training(mine, ring_forward, ring_backward, team),
        lambda: ring_training(everything, fastmha.attention, fastmha.attention_backward)[:, :, at],
        plan_ring(*ring, backward=True, **sizes, **causal))
    arm("step", lambda: step(sharded, own), lambda: step(whole, all_heads), plan_shards(1, 1, D_MODEL, H, **sizes))
    # the FLOPs of a step are no measure of its seconds: it reads its weights and keys once
    arms["step"] = (*arms["step"][:3], None)
    arms["token-step"] = (lambda: tokens.attend(small), lambda: all_heads.attend(small), RankPlan(
        team.rank, H, 1, "", 0, 0, len(sent), sum(sent), 0.0, 0.0), None)
    for name, (call, expected, planned, predicted) in arms.items():
        agree(f"{name} on rank {team.rank} of {team.size}", call(), expected(), "float32")
        before = team.messages, team.bytes
        if name == "overlap":
            before = overlapping.team.messages, overlapping.team.bytes
        call()
        counted = team.messages - before[0], team.bytes - before[1]
        times: list[float] = []
        while len(times) < 3 or sum(times) < seconds:       # the same numbers on all ranks
            team.comm.Barrier()
            start = perf_counter()
            call()
            times.append(team.comm.allreduce(perf_counter() - start, MPI.MAX))
        of_ranks = team.comm.gather((counted, (planned.messages, planned.bytes)))
        if team.rank == 0:
            most = max(of_ranks, key=lambda pair: pair[0][1])
            print(json.dumps({"arm": name, "ranks": team.size, "seconds": median(times), "predicted": predicted,
                              "counted": most[0], "planned": most[1], "equal": all(a == b for a, b in of_ranks),
                              "rate": rate, "link": [link.latency_seconds, link.bytes_per_second]}), flush=True)


# ------------------------------------------------------------------------------------------------- tables


def measured(ranks: list[int], threads: int, seconds: float) -> int:
    """Run them all and print the table; the exit status."""
    environment = {
        **os.environ, "FASTMHA_NUM_THREADS": str(threads), "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }  # fmt: skip
    found = []
    for n in ranks:
        command = ["mpiexec", "-n", str(n), sys.executable, "-m", "mpi4py", __file__, "--on-rank", "--threads", str(threads),
                   "--seconds", str(seconds)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    cpus = len(os.sched_getaffinity(0))
    print(f"{machine.cpu_name()}, {cpus} CPU{'s' * (cpus > 1)} for all ranks, {threads} thread"
          f"{'s' * (threads > 1)} a rank. " + "; ".join(
              f"{r['ranks']} ranks: {r['rate'] / 1e9:.3g} GF/s each, link {r['link'][0] * 1e6:.3g} µs and "
              f"{r['link'][1] / 1e9:.3g} GB/s" for r in found if r["arm"] == "forward" and r["ranks"] > 1) + ".\n")
    print("| call | ranks | ms | beside one rank | predicted ms | messages | planned | bytes | planned |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, what in ARMS.items():
        rows = [r for r in found if r["arm"] == name]
        for r in rows:
            predicted = "" if r["predicted"] is None else f"{r['predicted'] * 1e3:.3g}"
            beside = rows[0]["seconds"] / r["seconds"]
            print(f"| {what if r is rows[0] else ''} | {r['ranks']} | {r['seconds'] * 1e3:.3g} | {beside:.2f} | {predicted} | "
                  f"{r['counted'][0]} | {r['planned'][0]} | {r['counted'][1]:,} | {r['planned'][1]:,} |")
    print(f"\n{sum(r['equal'] for r in found)} of {len(found)} calls sent on every rank what was planned")
    return 0 if found and all(r["equal"] for r in found) else 1


LINKS = {"200 Gb/s, 2 µs": Link(2e-6, 2.4e10), "25 Gb/s, 20 µs": Link(2e-5, 3e9)}
LENGTHS = 2048, 16384, 131072, 1048576
WIDE, WIDE_HEADS, RANKS = 4096, 32, tuple(2**n for n in range(1, 11))


def modelled(rate: float) -> None:
    """One layer's forward pass, by plans: nothing runs."""
    def alone(length: int, *_: Any) -> float:
        return count_flops(1, length, WIDE, WIDE_HEADS, is_causal=True) / rate

    def by_heads(length: int, ranks: int, link: Link) -> float | None:
        return None if ranks > WIDE_HEADS else plan_shards(1, length, WIDE, WIDE_HEADS, ranks, is_causal=True,
                                                           flops_per_second=rate, link=link).seconds

    def by_tokens(length: int, ranks: int, link: Link) -> float:
        """Each rank projects its own tokens, with all the weights, and the ring attends; its plan counts products alone."""
        ring = plan_ring(1, length, WIDE_HEADS, WIDE // WIDE_HEADS, ranks, is_causal=True, flops_per_second=rate, link=link)
        return ring.seconds + (alone(length) - ring.flops / rate) * -(-length // ranks) / length

    print(f"d_model {WIDE}, H {WIDE_HEADS}, B 1, float32, causal, forward; {rate / 1e9:.3g} GF/s a rank.\n")
    for name, link in LINKS.items():
        print(f"Link of {name}: seconds by heads / by tokens, the least in bold\n")
        print("| ranks |" + "".join(f" L {length:,} |" for length in LENGTHS))
        print("|--:|" + "--:|" * len(LENGTHS))
        print("| 1 |" + "".join(f" {alone(length):.3g} |" for length in LENGTHS))
        for ranks in RANKS:
            cells = []
            for length in LENGTHS:
                both = by_heads(length, ranks, link), by_tokens(length, ranks, link)
                least = min(alone(length), *(x for x in both if x is not None))
                cells.append(" / ".join("–" if x is None else f"**{x:.3g}**" if x == least else f"{x:.3g}" for x in both))
            print(f"| {ranks} | " + " | ".join(cells) + " |")
        print()
    lengths = [2**n for n in range(0, 21)]

    def first(better: Callable[..., Any], compared: Callable[..., Any], ranks: int, link: Link) -> str:
        if ranks > WIDE_HEADS and by_heads in (better, compared):
            return "–"
        return next((f"{n:,}" for n in lengths if better(n, ranks, link) < compared(n, ranks, link)), "never")

    print("From which length on (powers of two up to 1,048,576)\n")
    print("| link | ranks | heads beat one rank | tokens beat one rank | tokens beat heads |\n|---|--:|--:|--:|--:|")
    for name, link in LINKS.items():
        for ranks in (2, 8, 32, 128, 1024):
            print(f"| {name} | {ranks} | {first(by_heads, alone, ranks, link)} | {first(by_tokens, alone, ranks, link)} | "
                  f"{first(by_tokens, by_heads, ranks, link)} |")


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--ranks", default="1,2,4", metavar="N,…", help="numbers of ranks, the first to compare with (1,2,4)")
    options.add_argument("--threads", type=positive, default=1, metavar="N", help="threads of each rank (default: 1)")
    options.add_argument("--seconds", type=seconds_of, default=1.0, metavar="S", help="of each call on each number of ranks (1)")
    options.add_argument("--model", action="store_true", help="the tables for 2 to 1024 ranks, from measured compute")
    options.add_argument("--rate", type=float, metavar="FLOP/s", help="of a rank, with --model (default: measured)")
    options.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.on_rank:
        on_rank(given.threads, given.seconds)
        return 0
    if given.model:
        modelled(given.rate or measured_rate(2048, 1024, 8, num_threads=given.threads))
        return 0
    return measured([int(n) for n in given.ranks.split(",")], given.threads, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
