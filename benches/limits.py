"""What must hold beside the speed of the plain cases, each with its floor and whether it is met.

    python benches/limits.py [--only SECTION] [--threads N] [--seconds S] [--json FILE]

    memory      peak memory of a long forward and backward pass above its inputs and outputs, in a process of its own
    cliffs      masks, layouts, odd widths and lengths, grouped heads, against the plain call of the same work
    inputs      what the values cost: peaked scores, padding constants, subnormal, huge, NaN and Inf, against ordinary ones
    growth      the time when the length doubles, and of causal against full
    crossover   the times of the algorithms over a grid and for many short sequences, and what the choice of "auto" costs
                over the best of them
    balance     the share of the threads that the plan predicts to be busy; nothing is timed
    threads     the time of one thread over that of all, of calls with few rows, heads or tokens, and of plain ones
    half        modules of half precision on few tokens, against float32 (bfloat16 where the package ml_dtypes is there)
    calls       what a tiny call costs beyond its arithmetic

How it is timed: the arms of one comparison take turns, in turning order, for about `--seconds` (at least three rounds);
each arm's best time counts; ratios are taken within one comparison only, and judged as they are printed. Before that,
each arm's answers are checked against `fastmha.reference` in float64, on some queries and some keys. Operations are
those of `fastmha.plan`: what causality, windows and lengths leave; a mask given as an array saves none, unless a line says
what it spells out.

Exit status 1 if a floor is missed or an answer is wrong.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from checked import Call, as_projected, check, check_backward, check_forward, compare, draw
from findings import Finding, Floor, Table, best_times, options_of, repeated, report, shown

import fastmha
from fastmha import _core, reference, validate
from fastmha.algorithms import DECODE_ROWS_MAX, blas_rows, own_slices, product_by_blas, product_slices
from fastmha.planning import choose
from fastmha.study.__main__ import positive
from fastmha.study.cases import DIRECTIONS, Case, case

try:
    import resource
except ImportError:         # not on Windows
    resource = None         # type: ignore[assignment]

BOTH = "forward+backward"
PASSES = (*DIRECTIONS, BOTH)
DTYPES = ("float32", "float64")
Rates = Mapping[str, float]     # pass -> work per second


# ---------------------------------------------------------------------------------------------- times and rates

def measure(calls: Sequence[Call], options: argparse.Namespace,
            directions: Sequence[str] = DIRECTIONS) -> dict[tuple[str, str], float]:
    """Best seconds by (label, direction): the calls checked first, then interleaved, one direction after the other."""
    for call in calls:
        check(call, options.threads, directions)
    time.sleep(0.2)         # the threads of NumPy's BLAS spin for a while after the reference's products
    best = {}
    for direction in directions:
        times = best_times({c.label: c.function(direction, options.threads) for c in calls}, options.seconds)
        best.update({(label, direction): seconds for label, seconds in times.items()})
    return best


def flop_rates(calls: Sequence[Call], options: argparse.Namespace) -> dict[str, Rates]:
    """Operations per second of each call, forward, backward, and of one after the other."""
    best = measure(calls, options)
    found: dict[str, Rates] = {}
    for call in calls:
        work = {d: call.flops(d) for d in DIRECTIONS}
        seconds = {d: best[call.label, d] for d in DIRECTIONS}
        found[call.label] = {**{d: work[d] / seconds[d] for d in DIRECTIONS},
                             BOTH: sum(work.values()) / sum(seconds.values())}
    return found


def time_per_work(rates: Rates, plain: Rates) -> dict[str, float]:
    """Time over the plain call's for the same work."""
    return {p: plain[p] / rates[p] for p in rates}


def share(rates: Rates, expected: Rates) -> dict[str, float]:
    return {p: rates[p] / expected[p] for p in rates}


def interpolated(x: float, points: dict[float, Rates]) -> dict[str, float]:
    """Rates at x on the straight line between two points."""
    (a, low), (b, high) = points.items()
    return {p: low[p] + (high[p] - low[p]) * (x - a) / (b - a) for p in low}


def two_widths(D: int, Dv: int, of_D: Rates, of_Dv: Rates) -> dict[str, float]:
    """Rates expected for keys of width D and values of width Dv: each product at the rate of its width.

    Forward one product of each width; backward three of D (scores, grad_q, grad_k), two of Dv (grad_v, grad_weights).
    """
    products = {"forward": (1, 1), "backward": (3, 2), BOTH: (4, 3)}
    return {p: (n * D + m * Dv) / (n * D / of_D[p] + m * Dv / of_Dv[p]) for p, (n, m) in products.items()}


# ---------------------------------------------------------------------------------------------- cliffs

LENGTHS = (512, 1024)
WIDTHS = (64, 72, 80, 96, 112, 128)     # the first and the last are only neighbours
DECODE_KEYS = 8192                      # 34 MB of keys and values in float32, 201 MB all arms together
COLD_BYTES, COLD_KEYS = 120_000_000, 2048      # of all keys and values, beyond any cache; of a head
COLD_SHAPES = ((8, 8, 64), (8, 8, 80), (8, 8, 128), (32, 8, 64), (32, 8, 128), (64, 8, 64))     # query heads, heads, width
SHORT_BYTES, SHORT_KEYS = 67_000_000, (4096, 1024, 512, 256, 140, 64)
STREAM_KEYS, STREAM_WIDTHS, STREAM_BYTES = 1000, (20, 40, 64, 80, 128, 256), (8_000_000, 24_000_000, 130_000_000)
CROSS, CROSS_SQUARE = (448, 1500), 816  # about equally many pairs


def with_rates(rates: Rates, ratios: dict[str, float]) -> dict[str, Any]:
    """The columns of a line: ratios, then GF/s in whole numbers."""
    return {**ratios, "GF/s fwd": f"{rates['forward'] / 1e9:.0f}", "bwd": f"{rates['backward'] / 1e9:.0f}"}


def rule_calls(L: int, dtype: str) -> list[tuple[Call, str, Floor | None]]:
    """(call, label of the plain call it is held against, floor of its time for the same work)."""
    rng, width = np.random.default_rng(1), 64
    plain = draw("plain", 2, 4, L, width, dtype)
    wide = draw("plain, 16 heads", 1, 16, L, width, dtype)
    lengths = np.array([L - L // 10, L // 2 + 5])
    padding = (np.arange(L) >= lengths[:, None])[:, None, None, :]
    counted = {"key_padding_lengths": lengths}
    later = np.triu(np.ones((L, L), bool), 1)
    rules: list[tuple[str, float, dict[str, Any]]] = [
        ("boolean mask (Lq, Lk), 10 % removed", 1.20, {"mask": rng.random((L, L)) < 0.1}),
        ("additive mask (Lq, Lk)", 1.25, {"mask": rng.standard_normal((L, L), np.dtype(dtype))}),
        ("padding lengths 90 %, 51 %", 1.10, counted),
        ("the same, a boolean mask of keys", 1.10, {"mask": padding, "counted": counted}),
        ("the same, -1e9 added", 1.20, {"mask": np.where(padding, -1e9, 0).astype(dtype), "counted": counted}),
        ("causality, a boolean mask (Lq, Lk)", 1.25, {"mask": later, "counted": {"is_causal": True}}),
        ("the same, -inf added", 1.30, {"mask": np.where(later, -np.inf, 0).astype(dtype), "counted": {"is_causal": True}}),
        *((f"window {w}", 1.10, {"window": w}) for w in ((L // 2, 0), (L // 4, L // 4), (127, 0))),
        ("softcap 30", 1.35, {"softcap": 30.0}),
    ]
    return [
        (plain, plain.label, None),
        (as_projected("BLHD", case(2, 4, L, width, dtype=dtype)), plain.label, Floor(high=1.08)),
        (wide, wide.label, None),
        (as_projected("BLHD, 16 heads (rows of whole pages)", case(1, 16, L, width, dtype=dtype)), wide.label,
         Floor(high=1.08)),
        *((plain.under(label, **more), plain.label, Floor(high=high)) for label, high, more in rules),
    ]


def rule_table(L: int, dtype: str, options: argparse.Namespace) -> Table:
    arms = rule_calls(L, dtype)
    rates = flop_rates([call for call, _, _ in arms], options)
    return Table(f"Cliffs, {dtype}, L {L}, D 64: time over the plain call's, per pair left", [
        Finding(call.label, with_rates(rates[call.label], time_per_work(rates[call.label], rates[against])), floor)
        for call, against, floor in arms])


def shape_calls(L: int, dtype: str) -> list[Call]:
    return [
        *(draw(f"D {D}", 2, 4, L, D, dtype) for D in (32, *WIDTHS)),
        draw(f"L {L - 16}", 2, 4, L - 16, 64, dtype),
        draw(f"L {L - 3}", 2, 4, L - 3, 64, dtype),
        *(draw(f"D 64, Dv {Dv}", 2, 4, L, 64, dtype, Dv=Dv) for Dv in (32, 128)),
        draw("8 heads", 1, 8, L, 64, dtype),
        draw("8 heads on 1 key/value head", 1, 8, L, 64, dtype, Hkv=1),
    ]


def shape_table(L: int, dtype: str, options: argparse.Namespace) -> Table:
    near, no_fewer = Floor(low=0.85), Floor(low=1.0)
    rates = flop_rates(shape_calls(L, dtype), options)
    expected: dict[str, tuple[Rates, Floor]] = {}
    for low, D, high in zip(WIDTHS[:-2], WIDTHS[1:-1], WIDTHS[2:], strict=True):
        expected[f"D {D}"] = interpolated(D, {n: rates[f"D {n}"] for n in (low, high)}), near
    expected[f"L {L - 3}"] = interpolated(L - 3, {L - 16: rates[f"L {L - 16}"], L: rates["D 64"]}), near
    for Dv in (32, 128):
        expected[f"D 64, Dv {Dv}"] = two_widths(64, Dv, rates["D 64"], rates[f"D {Dv}"]), near
    expected["8 heads on 1 key/value head"] = rates["8 heads"], no_fewer
    return Table(f"Cliffs, {dtype}, L {L}: GF/s over what the neighbours predict", [
        Finding(label, with_rates(rates[label], share(rates[label], wanted)), floor)
        for label, (wanted, floor) in expected.items()],
        "Neighbours: of D and L the next multiples of 16, interpolated (72: 64 and 80); of Dv, products of widths D "
        "and Dv at their own rates; of one key/value head, as many as query heads.")


def cross_table(dtype: str, options: argparse.Namespace) -> Table:
    (Lq, Lk), L = CROSS, CROSS_SQUARE
    low, high = Lk // 16 * 16, -(-Lk // 16) * 16
    calls = [draw(f"{Lq} x {n}", 1, 8, Lq, 64, dtype, Lk=n) for n in dict.fromkeys((low, Lk, high))]
    calls.append(draw(f"{L} x {L}", 1, 8, L, 64, dtype))
    rates = flop_rates(calls, options)
    this, floor = rates[f"{Lq} x {Lk}"], Floor(low=0.85)
    neighbours = interpolated(Lk, {n: rates[f"{Lq} x {n}"] for n in (low, high)})
    return Table(f"Cliffs, {dtype}, cross-attention {Lq} x {Lk}, D 64: GF/s", [
        Finding(f"over {Lq} x {low} and {high}, interpolated", with_rates(this, share(this, neighbours)), floor),
        Finding(f"over {L} x {L}, about equal pairs", with_rates(this, share(this, rates[f'{L} x {L}'])), floor)])


def decode_table(options: argparse.Namespace) -> Table:
    calls = [draw(f"{H} query heads on 8, {dtype}", 1, H, 1, 64, dtype, Hkv=8, Lk=DECODE_KEYS)
             for dtype in DTYPES for H in (8, 64)]
    best = measure(calls, options, ("forward",))
    rate = {c.label: (c.k.nbytes + c.v.nbytes) / best[c.label, "forward"] for c in calls}
    plain, grouped, plain64, grouped64 = (c.label for c in calls)
    pairs = [(plain, plain, None), (grouped, plain, Floor(low=1.0)), (plain64, plain, Floor(low=0.85)),
             (grouped64, plain64, Floor(low=1.0))]
    return Table(f"Cliffs, decode, 1 query, Lk {DECODE_KEYS}, D 64: GB/s of keys and values", [
        Finding(label, {"over": against, "forward": rate[label] / rate[against], "GB/s": f"{rate[label] / 1e9:.1f}"},
                floor, ("forward",)) for label, against, floor in pairs],
        "Each arm has keys and values of its own, so that their turns push each other out of the caches.")


def streams_table(options: argparse.Namespace) -> Table:
    findings = []
    for dtype in DTYPES:
        for D in STREAM_WIDTHS:
            rates = {}
            for size in STREAM_BYTES:
                H = size // (2 * STREAM_KEYS * D * np.dtype(dtype).itemsize)
                call = draw(f"D {D}, {dtype}, {size / 1e6:.0f} MB", 1, H, 1, D, dtype, Lk=STREAM_KEYS)
                check(call, options.threads, ("forward",))
                best = best_times({"forward": call.function("forward", options.threads)}, options.seconds)
                rates[f"{size / 1e6:.0f} MB"] = f"{(call.k.nbytes + call.v.nbytes) / best['forward'] / 1e9:.1f}"
            findings.append(Finding(f"D {D}, {dtype}", rates))
    return Table(f"Decode, 1 query, heads of {STREAM_KEYS} keys, by the bytes of all keys and values: GB/s of these", findings,
                 "Each arm is timed alone: what the caches hold of its keys and values stays there.")


def cold_table(options: argparse.Namespace) -> Table:
    findings = []
    for dtype in DTYPES:
        for H, Hkv, D in COLD_SHAPES:
            label = f"{H} query heads on {Hkv}, D {D}, {dtype}"
            size = 2 * Hkv * COLD_KEYS * D * np.dtype(dtype).itemsize
            calls = [draw(label, 1, H, 1, D, dtype, Hkv=Hkv, Lk=COLD_KEYS) for _ in range(-(-COLD_BYTES // size))]
            check(calls[0], options.threads, ("forward",))
            turns = cycle([call.function("forward", options.threads) for call in calls])
            arms = {"cold": lambda turns=turns: next(turns)(), "hot": calls[0].function("forward", options.threads)}
            rates = {name: size / best_times({name: arm}, options.seconds)[name] for name, arm in arms.items()}
            findings.append(Finding(label, {name: f"{rate / 1e9:.1f}" for name, rate in rates.items()}))
    return Table(f"Decode, 1 query, heads of {COLD_KEYS} keys: GB/s of keys and values", findings,
                 f"Cold: the calls go through {COLD_BYTES / 1e6:.0f} MB of keys and values, as those of a model's layers do. "
                 "Hot: all calls have the same ones.")


def short_heads_table(options: argparse.Namespace) -> Table:
    """Heads of a batch's short sequences against long ones of as many bytes in all."""
    findings = []
    for H, Hkv, D in ((8, 8, 64), (32, 8, 64), (32, 8, 128), (64, 8, 128)):
        rates = {}
        for Lk in SHORT_KEYS:
            B = max(1, round(SHORT_BYTES / (8 * Hkv * Lk * D)))
            call = draw(f"{H} query heads on {Hkv}, D {D}, Lk {Lk}", B, H, 1, D, Hkv=Hkv, Lk=Lk)
            best = measure([call], options, ("forward",))
            rates[Lk] = (call.k.nbytes + call.v.nbytes) / best[call.label, "forward"]
            floor = None if Lk == SHORT_KEYS[0] else Floor(low=0.6 if Lk < 256 else 0.8)
            of_long = {"GB/s": f"{rates[Lk] / 1e9:.1f}", "forward": rates[Lk] / rates[SHORT_KEYS[0]]}
            findings.append(Finding(call.label, of_long, floor, ("forward",)))
    return Table(f"Decode, 1 query, {SHORT_BYTES / 1e6:.0f} MB of keys and values: GB/s over those of heads of {SHORT_KEYS[0]}",
                 findings, "All calls of an arm have the same keys and values.")


def side_by_side_table(options: argparse.Namespace) -> Table:
    """Heads in rows of all heads against the same heads one after the other, from memory."""
    findings = []
    for H, Hkv, D, Lk in ((8, 8, 128, 4096), (32, 8, 128, 4096), (12, 12, 64, 512), (32, 32, 128, 300), (32, 8, 128, 128)):
        B = max(1, round(SHORT_BYTES / (8 * Hkv * Lk * D)))
        by_head = draw(f"{H} query heads on {Hkv}, D {D}, Lk {Lk}", B, H, 1, D, Hkv=Hkv, Lk=Lk)
        arrays = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (by_head.q, by_head.k, by_head.v, by_head.grad_out))
        by_token = Call(f"{by_head.label}, BLHD", *arrays, {"layout": "BLHD"})
        best = measure([by_head, by_token], options, ("forward",))
        times = [best[call.label, "forward"] for call in (by_token, by_head)]
        rate = (by_head.k.nbytes + by_head.v.nbytes) / times[0]
        cells = {"GB/s": f"{rate / 1e9:.1f}", "forward": times[0] / times[1]}
        findings.append(Finding(by_head.label, cells, Floor(high=1.7), ("forward",)))
    return Table(f"Decode, 1 query, {SHORT_BYTES / 1e6:.0f} MB of keys and values (B, L, H, D): time over that of (B, H, L, D)",
                 findings, "All calls of an arm have the same keys and values.")


def cliffs(options: argparse.Namespace) -> Iterator[Table]:
    for dtype in DTYPES:
        for L in LENGTHS:
            yield rule_table(L, dtype, options)
            yield shape_table(L, dtype, options)
        yield cross_table(dtype, options)
    yield decode_table(options)
    yield streams_table(options)
    yield cold_table(options)
    yield short_heads_table(options)
    yield side_by_side_table(options)


# ---------------------------------------------------------------------------------------------- memory

MEMORY_LENGTH = 16384


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """The resident size now; where the system does not tell, the peak so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak_bytes()
    return pages * resource.getpagesize()


def memory_of(length: int, threads: int) -> dict[str, int]:
    """Bytes of one forward and backward pass; for a process that has done nothing else.

    The inputs are written before the resident size is taken. The outputs (out, lse, three gradients) are allocated by
    the calls, written in full and alive at the peak, and counted by their nbytes: `above` = peak - resident - outputs.
    Where the peak lies before the calls, `above` is too large, never too small.
    """
    call = draw("memory", 1, 8, length, 64)
    resident = resident_bytes()
    out, lse = call.attend(threads, return_lse=True)
    grads = call.gradients(out, lse, threads)
    peak, outputs = peak_bytes(), sum(x.nbytes for x in (out, lse, *grads))
    scratch = fastmha.plan(call.q, call.k, call.v, num_threads=threads, backward=True).scratch_bytes
    check_forward(call, out, lse)
    check_backward(call, out, lse, grads)
    inputs = sum(x.nbytes for x in (call.q, call.k, call.v, call.grad_out))
    return {"inputs": inputs, "outputs": outputs, "resident": resident, "peak": peak,
            "above": peak - resident - outputs, "scratch": scratch}


def memory(options: argparse.Namespace) -> Iterator[Table]:
    if resource is None:
        yield Table("Memory: not measured, the system does not tell the peak", [])
        return
    command = [sys.executable, __file__, "--memory-of", str(MEMORY_LENGTH), "--threads", str(options.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = {name: n / 1e6 for name, n in json.loads(done.stdout).items()}
    yield Table(f"Memory, forward + backward, B1 H8 L{MEMORY_LENGTH} D64 float32, in MB", [
        Finding("peak above inputs and outputs", {
            "above": found["above"], "inputs": found["inputs"], "outputs": found["outputs"],
            "scratch by the plan": found["scratch"]}, Floor(high=64.0), ("above",))],
        "In a fresh process: ru_maxrss after both calls, less the resident size before them with the inputs written, "
        "less the nbytes of the outputs (out, lse, three gradients), all alive at the end. These are the first calls "
        "of the process: stacks of threads and the like are in it.")


# ---------------------------------------------------------------------------------------------- inputs

INPUT_LENGTH = 512
PEAKED, FINITE, SPECIAL, SPECIAL_MASKED = (Floor(high=high) for high in (1.1, 2.0, 3.0, 6.0))


def input_arms(ordinary: Call) -> list[tuple[Call, Floor]]:
    """The same call on other values, and what it may take of the ordinary one's time."""
    L, dtype = ordinary.q.shape[2], ordinary.q.dtype
    limits = np.finfo(dtype)
    special = SPECIAL_MASKED if ordinary.rules else SPECIAL
    subnormal = {name: getattr(ordinary, name) * limits.smallest_normal / 64 for name in ("q", "k", "v", "grad_out")}
    one_nan = ordinary.v.copy()
    one_nan[:, :, L // 2] = np.nan
    large = np.sign(ordinary.v) * limits.max / dtype.type(4)

    def on(label: str, **values: Any) -> Call:
        return replace(ordinary, label=label, **values)

    arms = [
        *((on(f"scores of deviation {size}", q=ordinary.q * dtype.type(size)), PEAKED) for size in (20, 30)),
        (on("scores of deviation 1000", q=ordinary.q * dtype.type(1000)), FINITE),
        *((on(f"{name} subnormal", **{name: subnormal[name]}), FINITE) for name in "qkv"),
        (on("all subnormal", **subnormal), FINITE),
        (on("q and k huge", q=ordinary.q * dtype.type(1e15), k=ordinary.k * dtype.type(1e15)), FINITE),
        (on("v tiny", v=ordinary.v * limits.smallest_normal * 4), FINITE),
        (on("v so large that sums overflow", v=large), FINITE),
        (on("the same but for its first key", v=np.concatenate((ordinary.v[:, :, :1], large[:, :, 1:]), axis=2)), FINITE),
        (on("v NaN at one key", v=one_nan), special),
        *((on(f"all {value}", **{name: np.full_like(x, value) for name, x in subnormal.items()}), special)
          for value in (np.nan, np.inf)),
        *((on(f"v {value}", v=np.full_like(ordinary.v, value)), special) for value in (np.nan, np.inf)),
    ]
    if "mask" not in ordinary.rules:
        constant = np.zeros((L, L), dtype)
        constant[: L // 3] = limits.min
        arms.append((on("a third of the rows masked by finfo.min", rules={**ordinary.rules, "mask": constant}), FINITE))
    return arms


def idle_rows(ordinary: Call) -> Call:
    """As training has it where the last half of the sequences is padding."""
    grad_out = ordinary.grad_out.copy()
    grad_out[:, :, grad_out.shape[2] // 2 :] = 0
    return replace(ordinary, label="grad_out 0 at the last half of the rows", grad_out=grad_out)


def inputs(options: argparse.Namespace) -> Iterator[Table]:
    for dtype in DTYPES:
        for algorithm in ("tiled", "blas"):
            for kind, rules in (("plain", {}), ("causal", {"is_causal": True}),
                                ("mask", {"mask": np.random.default_rng(1).random((INPUT_LENGTH, INPUT_LENGTH)) < 0.1})):
                ordinary = replace(draw("ordinary", 1, 4, INPUT_LENGTH, 64, dtype, **rules), algorithm=algorithm)
                check(ordinary, options.threads)
                arms, idle = input_arms(ordinary), idle_rows(ordinary)
                check(idle, options.threads)
                timed = (ordinary, idle, *(c for c, _ in arms))
                best = {d: best_times({c.label: c.function(d, options.threads) for c in timed}, options.seconds)
                        for d in DIRECTIONS}
                of_idle = {"backward": best["backward"][idle.label] / best["backward"]["ordinary"]}
                yield Table(f"Inputs, {dtype}, {algorithm}, {kind}, L {INPUT_LENGTH} D 64: time over the ordinary values'", [
                    *(Finding(call.label, {d: best[d][call.label] / best[d]["ordinary"] for d in DIRECTIONS}, floor)
                      for call, floor in arms),
                    Finding(idle.label, of_idle, Floor(high=0.7 if algorithm == "tiled" else 1.1), ("backward",))])
        ordinary = replace(draw("ordinary", 1, 8, 4, 64, dtype, Lk=8 * INPUT_LENGTH), algorithm="decode")
        check(ordinary, options.threads, ("forward",))
        arms = [(c, f) for c, f in input_arms(ordinary) if "rows" not in c.label]
        timed = (ordinary, *(c for c, _ in arms))
        best_of = best_times({c.label: c.function("forward", options.threads) for c in timed}, options.seconds)
        yield Table(f"Inputs, {dtype}, decode, 4 queries, Lk {8 * INPUT_LENGTH}: time over the ordinary values'", [
            Finding(call.label, {"forward": best_of[call.label] / best_of["ordinary"]}, floor, ("forward",))
            for call, floor in arms])


# ---------------------------------------------------------------------------------------------- growth

GROWTH_LENGTHS = (2048, 4096, 8192)
CAUSAL_AT = 4096


def growth(options: argparse.Namespace) -> Iterator[Table]:
    heads, doubling, half = 2 * options.threads, Floor(3.6, 4.4), Floor(high=0.56)
    kinds: dict[str, dict[str, Any]] = {"full": {}, "causal": {"is_causal": True}}
    calls = [draw(f"{kind} {L}", 1, heads, L, 64, **rules) for L in GROWTH_LENGTHS for kind, rules in kinds.items()]
    best = measure(calls, options)
    steps = list(pairwise(GROWTH_LENGTHS))
    where = f"B1 H{heads} D64 float32"
    yield Table(f"Growth, {where}: the time over that of half the length", [
        Finding(f"{kind}, {direction}", {
            **{f"{b} / {a}": best[f"{kind} {b}", direction] / best[f"{kind} {a}", direction] for a, b in steps},
            **{f"ms at {L}": f"{best[f'{kind} {L}', direction] * 1e3:.1f}" for L in GROWTH_LENGTHS}},
            doubling, [f"{b} / {a}" for a, b in steps])
        for kind in kinds for direction in DIRECTIONS])
    yield Table(f"Growth, {where}: causal over full", [
        Finding(direction, {
            f"L {L}": best[f"causal {L}", direction] / best[f"full {L}", direction] for L in GROWTH_LENGTHS},
            half, [f"L {CAUSAL_AT}"]) for direction in DIRECTIONS],
        f"The floor is that of L {CAUSAL_AT}.")


# ---------------------------------------------------------------------------------------------- crossover

QUERIES = ((1, 1), (1, 4), (4, 1), (1, 8), (8, 1), (3, 4), (16, 1), (4, 8), (64, 1), (256, 1))     # Lq, group
KEYS = (16, 128, 1024, 4096)
CROSSOVER_WIDTHS = (64, 128)
AUTO_COSTS = Floor(high=1.10)


def crossover_line(Lq: int, group: int, Lk: int, D: int, direction: str, options: argparse.Namespace) -> Finding:
    decodes = direction == "forward" and Lq * group <= DECODE_ROWS_MAX
    drawn = draw("", 1, 8 * group, Lq, D, Hkv=8, Lk=Lk)
    calls = [replace(drawn, label=name, algorithm=name) for name in ("blas", "tiled", "decode")[:3 if decodes else 2]]
    best = {name: seconds for (name, _), seconds in measure(calls, options, (direction,)).items()}
    auto, _ = choose(problem_of(drawn.q, drawn.k, drawn.v), "auto", backward=direction == "backward")
    micro = {name: f"{best[name] * 1e6:.1f}" if name in best else "" for name in ("blas", "tiled", "decode")}
    return Finding(f"Lk {Lk}, {Lq * group} rows ({Lq} x {group})", {
        **micro, "best": min(best, key=best.__getitem__), "auto": auto,
        "auto over best": best[auto] / min(best.values())}, AUTO_COSTS, ("auto over best",))


# B, H, Hkv, Lq, Lk, D
MANY_SHORT = ((1, 4096, 4096, 8, 8, 64), (200_000, 1, 1, 1, 1, 8), (20_000, 1, 1, 1, 1, 64), (512, 8, 8, 3, 3, 160),
              (64, 14, 2, 1, 5, 64), (64, 8, 2, 2, 67, 64), (1000, 8, 8, 1, 20, 64), (256, 16, 16, 4, 40, 32),
              (9, 6, 2, 1, 74, 54), (2, 8, 8, 1, 500, 20), (16, 12, 12, 1, 100, 80), (16, 32, 8, 1, 1, 128))
MANY_COSTS = Floor(high=1.20)


def many_line(shape: tuple[int, ...], dtype: str, options: argparse.Namespace) -> Finding:
    B, H, Hkv, Lq, Lk, D = shape
    drawn = draw("", B, H, Lq, D, dtype, Hkv=Hkv, Lk=Lk)
    calls = [replace(drawn, label=name, algorithm=name) for name in ("blas", "tiled", "decode")]
    best = {name: seconds for (name, _), seconds in measure(calls, options, ("forward",)).items()}
    auto, _ = choose(problem_of(drawn.q, drawn.k, drawn.v), "auto")
    return Finding(f"B {B}, H {H}{'' if Hkv == H else f'/{Hkv}'}, L {Lq} x {Lk}, D {D}", {
        **{name: f"{best[name] * 1e3:.3f}" for name in best}, "best": min(best, key=best.__getitem__), "auto": auto,
        "auto over best": best[auto] / min(best.values())}, MANY_COSTS, ("auto over best",))


def crossover(options: argparse.Namespace) -> Iterator[Table]:
    for dtype in DTYPES:
        yield Table(f"Many short attentions, forward, {dtype}: ms a call", [
            many_line(shape, dtype, options) for shape in MANY_SHORT])
    for direction in DIRECTIONS:
        for D in CROSSOVER_WIDTHS:
            lines = [crossover_line(Lq, group, Lk, D, direction, options) for Lk in KEYS for Lq, group in QUERIES]
            yield Table(f"Crossover, {direction}, D {D}, float32, 8 key/value heads: µs per call", lines,
                        "rows: Lq x query heads per key/value head. Keys and values stay in the caches where they fit.")


# ---------------------------------------------------------------------------------------------- balance

# B, H, L, D; and of one query B, H, Hkv, Lk, D
SQUARES = ((32, 8, 16, 64), (1, 8, 128, 64), (8, 12, 128, 64), (4, 8, 512, 64), (1, 12, 1024, 64), (1, 8, 2048, 64),
           (1, 16, 1024, 128))
DECODES = ((1, 32, 32, 4096, 128), (1, 32, 8, 4096, 128), (8, 32, 8, 1024, 128), (16, 12, 12, 512, 64))
SHOWN_THREADS = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCKS_A_THREAD, BLOCK = 12, 64
BALANCED = Floor(low=1 / 1.1)       # a makespan within 10 % of perfect


def judged_threads(of: Case) -> int:
    """The most threads, up to 128, for which the case holds at least twelve blocks of 64 queries per thread."""
    return min(SHOWN_THREADS[-1], of.B * of.H * of.Lq // (BLOCK * BLOCKS_A_THREAD))


def balance_line(of: Case, direction: str) -> Finding:
    shapes = (of.B, of.H, of.Lq, of.D), (of.B, of.Hkv, of.Lk, of.D)
    q, k = (np.empty(shape, of.dtype) for shape in shapes)         # never read
    judged = range(1, judged_threads(of) + 1)
    curve = {n: fastmha.plan(q, k, k, num_threads=n, backward=direction == "backward", **of.keywords).balance
             for n in {*judged, *SHOWN_THREADS}}
    cells: dict[str, Any] = {str(n): shown(curve[n]) if n in judged else f"({shown(curve[n])})" for n in SHOWN_THREADS}
    if not judged:
        return Finding(f"{of.shape}, {direction}", cells)
    worst = min(judged, key=curve.__getitem__)
    return Finding(f"{of.shape}, {direction}", {**cells, "judged to": str(judged[-1]), "worst": curve[worst],
                                                "at": str(worst)}, BALANCED, ("worst",))


def balance(options: argparse.Namespace) -> Iterator[Table]:
    squares = [case(B, H, L, D, causal=causal) for B, H, L, D in SQUARES for causal in (False, True)]
    decodes = [case(B, H, 1, D, Hkv=Hkv, Lk=Lk) for B, H, Hkv, Lk, D in DECODES]
    findings = [balance_line(of, direction) for of in squares for direction in DIRECTIONS]
    findings += [balance_line(of, "forward") for of in decodes]
    yield Table("Balance by the plan: the share of 1 to 128 threads that is busy", findings,
                f"Judged for all numbers of threads that leave each {BLOCKS_A_THREAD} blocks of {BLOCK} queries or "
                "more; the others in parentheses.")


# ---------------------------------------------------------------------------------------------- threads

SHARED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain: 8 heads, L 1024", {"B": 1, "H": 8, "L": 1024, "D": 64}),
    ("one head, L 2048", {"B": 1, "H": 1, "L": 2048, "D": 64}),
    ("one head, L 2048, causal", {"B": 1, "H": 1, "L": 2048, "D": 64, "is_causal": True}),
    ("three heads, L 1024", {"B": 1, "H": 3, "L": 1024, "D": 64}),
    ("64 rows against 100,000 keys", {"B": 1, "H": 1, "L": 64, "D": 64, "Lk": 100_000}),
    ("one token, 32 heads on one, 40,000 keys", {"B": 1, "H": 32, "L": 1, "D": 64, "Hkv": 1, "Lk": 40_000}),
    ("one token, 8 heads, 8192 keys", {"B": 1, "H": 8, "L": 1, "D": 64, "Lk": 8192}),
    ("64 sequences of 24 tokens", {"B": 64, "H": 8, "L": 24, "D": 64}),
)
SHARE = 0.8         # of the threads, in how many times as fast they are


def threads_table(dtype: str, direction: str, options: argparse.Namespace) -> Table:
    findings = []
    for label, shape in SHARED:
        call = draw(label, dtype=dtype, **shape)
        check(call, options.threads, (direction,))
        best = best_times({"1": call.function(direction, 1), "all": call.function(direction, options.threads)}, options.seconds)
        findings.append(Finding(label, {"times as fast": best["1"] / best["all"], "ms": f"{best['all'] * 1e3:.3f}"},
                                Floor(low=SHARE * options.threads), ("times as fast",)))
    return Table(f"{options.threads} threads beside one, {dtype}, {direction}", findings)


def shared(options: argparse.Namespace) -> Iterator[Table]:
    for dtype in DTYPES:
        for direction in DIRECTIONS:
            yield threads_table(dtype, direction, options)


# ---------------------------------------------------------------------------------------------- tiny calls

REPEATS = 200       # calls in one timed arm


def core_attention(problem: _core.Problem, out: np.ndarray, lse: np.ndarray | None, threads: int) -> Callable[[], None]:
    """The compiled call that `auto` ends in, and nothing else."""
    name, _ = choose(problem, "auto")
    if name == "decode":
        return lambda: _core.decode_forward(problem, out, lse, threads)
    if name == "tiled":
        return lambda: _core.tiled_forward(problem, out, lse, None, threads)
    rows = blas_rows(problem.shape[3], problem.shape[4], problem.itemsize)
    return lambda: _core.blas_forward(problem, out, lse, None, rows, threads)


def core_product(a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int) -> Callable[[], None]:
    """The compiled call of one projection, and nothing else."""
    if product_by_blas(out.shape[0]):
        return lambda: _core.matmul(a, b, out, False, False, 1.0, 0.0, None, product_slices(*out.shape), threads)
    return lambda: _core.matmul_tiled(a, b, out, False, False, None, own_slices(*out.shape, len(b), threads), threads)


def problem_of(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> _core.Problem:
    return validate.attention_problem(q, k, v, "BHLD")


def tiny_attention(threads: int) -> dict[str, Callable[[], Any]]:
    """`attention` and its arithmetic, after a look at their answers."""
    call = draw("tiny attention", 2, 8, 10, 8)
    check(call, threads, ("forward",))
    out = np.empty_like(call.q)
    arithmetic = core_attention(problem_of(call.q, call.k, call.v), out, None, threads)
    arithmetic()
    compare(call, "arithmetic", out, call.attend(threads))
    return {"call": lambda: fastmha.attention(call.q, call.k, call.v, num_threads=threads), "arithmetic": arithmetic}


def tiny_module(training: bool, threads: int) -> dict[str, Callable[[], Any]]:
    """A module's forward and its arithmetic (projection, attention, projection), after a look at their answers."""
    B, L, d_model, H = 2, 10, 64, 8
    module = fastmha.MultiHeadAttention(d_model, H, rng=0)
    X = np.random.default_rng(1).standard_normal((B, L, d_model), np.float32)
    state = module.state_dict()
    W_in, W_out = np.concatenate([state[name] for name in ("W_Q", "W_K", "W_V")], axis=1), state["W_O"]
    projected, concat, out = (np.empty((B * L, n), np.float32) for n in (3 * d_model, d_model, d_model))
    heads = [fastmha.split_heads(x.reshape(B, L, d_model), H) for x in (*np.split(projected, 3, axis=1), concat)]
    lse = np.empty((B, H, L), np.float32) if training else None
    steps = (core_product(X.reshape(B * L, d_model), W_in, projected, threads),
             core_attention(problem_of(*heads[:3]), heads[3], lse, threads),
             core_product(concat, W_out, out, threads))

    def arithmetic() -> None:
        for step in steps:
            step()

    arithmetic()
    wanted = reference.multi_head_attention(X.astype(np.float64), X.astype(np.float64), X.astype(np.float64), H,
                                            {name: W.astype(np.float64) for name, W in state.items()})
    this = draw("tiny module", 1, 1, 1, 1)
    compare(this, "forward", module.forward(X, training=training), wanted)
    compare(this, "arithmetic", out.reshape(B, L, d_model), wanted)
    return {"call": lambda: module.forward(X, training=training, num_threads=threads), "arithmetic": arithmetic}


def calls(options: argparse.Namespace) -> Iterator[Table]:
    findings = []
    for label, high, arms in (
        ("attention", 8.0, tiny_attention(options.threads)),
        ("module forward, training=False", 20.0, tiny_module(False, options.threads)),
        ("module forward, training=True", 20.0, tiny_module(True, options.threads)),
    ):
        best = best_times({name: repeated(f, REPEATS) for name, f in arms.items()}, options.seconds)
        micro = {name: seconds / REPEATS * 1e6 for name, seconds in best.items()}
        micro["beyond"] = micro["call"] - micro["arithmetic"]
        findings.append(Finding(label, micro, Floor(high=high), ("beyond",)))
    yield Table("Calls, B2 H8 L10 D8 float32 (module: d_model 64, 8 heads, no bias): µs per call", findings,
                "arithmetic: the compiled calls alone (attention: one; module: projection, attention, projection), on "
                "problems and arrays prepared before; that they read array headers, allocate scratch and go through "
                "the pool is in it. beyond: the rest, which is checks, the choice of the algorithm, views, and the "
                "allocation of results and of what lies between.")


# ---------------------------------------------------------------------------------------------- half precision

HALF_TOKENS = (1, 4, 8, 16, 64, 256)
HALF_WIDTHS = (512, 768, 1024, 2048)
HALF_BOUND = 3e-2           # of the largest number, eight roundings to bfloat16
BFLOAT16_ARMS = ("bfloat16", "bfloat16 packed") if find_spec("ml_dtypes") else ()


def half_arms(d_model: int, tokens: int, threads: int) -> dict[str, Callable[[], Any]]:
    """The forward of a module on few tokens by dtype, after a look at the answers; "packed" is frozen, its weights are packed."""
    X = np.random.default_rng(0).standard_normal((1, tokens, d_model), np.float32)
    arms: dict[str, Callable[[], Any]] = {}
    outs = {}
    for name in ("float32", "float16", *BFLOAT16_ARMS):
        dtype = validate.element_type("dtype", name.split()[0])
        given = X.astype(dtype)
        module = fastmha.MultiHeadAttention(d_model, d_model // 64, dtype=dtype, rng=0)
        if name.endswith("packed"):
            module.freeze()
        arms[name] = lambda module=module, X=given: module.forward(X, training=False, num_threads=threads)
        outs[name] = arms[name]().astype(np.float32)
        if np.abs(outs[name] - outs["float32"]).max() > HALF_BOUND * np.abs(outs["float32"]).max():
            raise SystemExit(f"{name}, d_model {d_model}, {tokens} tokens: the answer is not that of float32")
    return arms


def half(options: argparse.Namespace) -> Iterator[Table]:
    # elsewhere numbers of half precision are converted, which costs what reading half of the bytes gives
    floor = Floor(high=1.0) if _core.has_tiles() and BFLOAT16_ARMS else None
    for d_model in HALF_WIDTHS:
        findings = []
        for tokens in HALF_TOKENS:
            best = best_times(half_arms(d_model, tokens, options.threads), options.seconds)
            ratios = {name: seconds / best["float32"] for name, seconds in best.items() if name != "float32"}
            findings.append(Finding(f"{tokens} tokens", {"float32, ms": f"{best['float32'] * 1e3:.3f}", **ratios}, floor,
                                    BFLOAT16_ARMS))
        yield Table(f"Half precision, module forward, d_model {d_model}: time over float32's", findings)


# ---------------------------------------------------------------------------------------------- the command

SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Table]]] = {
    "memory": memory,       # first: a child may inherit the peak of a parent that has grown
    "cliffs": cliffs, "inputs": inputs, "growth": growth, "crossover": crossover, "balance": balance, "threads": shared,
    "half": half, "calls": calls,
}


def parser() -> argparse.ArgumentParser:
    made = options_of(__doc__, SECTIONS)
    made.add_argument("--memory-of", type=positive, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of, options.threads)))
        return 0
    return report(SECTIONS, options, "benches/limits.py", sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
