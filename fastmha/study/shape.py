"""One shape of the reader's own, ``fastmha study --shape B,L,d_model,H``: what `fastmha.analysis` counts for such a layer, and
beside it the time and the memory that this machine takes.

Timed is a `MultiHeadAttention` without biases in float32, full attention, by "blas" and "tiled", with heads read where the fused
projection wrote them (strided) and packed first (contiguous). Its arms have given the same answer before their times count.
"""
from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastmha import MultiHeadAttention, analysis, threads
from fastmha.study import machine, memory
from fastmha.study.answer import Table
from fastmha.study.memory import Work
from fastmha.study.trial import TOLERANCE, ArmsDisagreeError, agree, interleave, interval
from fastmha.study.words import bytes_text, count_text, failed, time_text

if TYPE_CHECKING:
    from rich.console import Console

ALGORITHMS, LAYOUTS = ("blas", "tiled"), ("strided", "contiguous")
PASSES = {"forward": False, "training step": True}      # training step: forward and backward
PARTS = {"projections": "projections", "attention": "attention products", "softmax": "softmax"}
QUICK_SECONDS, FULL_SECONDS = 0.5, 2.0                  # of each pass
PATIENCE = 20.0                                         # seconds after which a pass ends with fewer than three rounds
JUDGED = 1_000_000                                      # counted bytes from which a measured ratio says anything


class Shape(NamedTuple):
    """B sequences of length L, a layer of width d_model with H heads."""

    B: int
    L: int
    d_model: int
    H: int

    def __str__(self) -> str:
        heads = f"{self.H} head{'s' * (self.H > 1)} of width {self.d_model // self.H}"
        return f"B {self.B}, L {self.L}, d_model {self.d_model}, {heads}"


def parse(text: str) -> Shape:
    """The value of ``--shape``. Raises `argparse.ArgumentTypeError`."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be four positive integers B,L,d_model,H such as 1,1024,768,12, got {text!r}")
    shape = Shape(*map(int, parts))
    if shape.d_model % shape.H:
        raise argparse.ArgumentTypeError(f"d_model must be a multiple of H, got {shape.d_model} and {shape.H}")
    return shape


def run(shape: Shape, num_threads: int | None, quick: bool, as_json: bool, command: str) -> int:
    """Count, measure and print. Returns the exit status: 1 if arms disagree, 2 if it cannot be done, 130 if interrupted."""
    needed, free = Work(*shape, "tiled", training=True).counted["total"], memory.free_bytes()
    if free is not None and needed > memory.LARGEST_SHARE * free:
        return failed(f"a training step of {shape} holds at least {bytes_text(needed)}, more than half of the free memory, "
                      f"{bytes_text(free)}", sign=" --shape: ")
    try:
        if as_json:
            print(json.dumps(examine(shape, num_threads, quick, command), indent=1, ensure_ascii=False))
            return 0
        from rich.console import Console

        with Console(stderr=True).status("measuring") as status:
            found = examine(shape, num_threads, quick, command, status.update)
        show(found, Console())
        return 0
    except (ArmsDisagreeError, KeyboardInterrupt) as error:
        return failed(str(error) or "interrupted", 1 if isinstance(error, ArmsDisagreeError) else 130, " --shape: ")


# ------------------------------------------------------------------------------------------------ what is found

def examine(shape: Shape, num_threads: int | None, quick: bool, command: str,
            report: Callable[[str], object] = lambda what: None) -> dict[str, Any]:
    """All about a shape, plain values for JSON; `report` is told what is being measured."""
    workers = threads.resolve(num_threads)
    report("measuring the limits of the machine")
    limits = machine.limits(workers)
    counted = {name: {algorithm: count(Work(*shape, algorithm, training), limits) for algorithm in ALGORITHMS}
               for name, training in PASSES.items()}
    module, seconds = MultiHeadAttention(shape.d_model, shape.H, rng=0), QUICK_SECONDS if quick else FULL_SECONDS
    plans = {name: module.plan(shape.B, shape.L, backward=training) for name, training in PASSES.items()}
    found: dict[str, Any] = {
        **machine.describe(workers, command), "limits": limits,
        "shape": {"B": shape.B, "L": shape.L, "d_model": shape.d_model, "H": shape.H, "dtype": "float32"},
        "flops": {name: memory.flop_parts(*shape, training=training) for name, training in PASSES.items()},
        "crossover_length": analysis.crossover_length(shape.d_model),
        "kv_cache_bytes": analysis.kv_cache_bytes(shape.B, shape.L, shape.H, shape.d_model // shape.H),
        "plan": {name: {what: getattr(plan, what) for what in ("algorithm", "reasons", "layout", "layout_reason")}
                 for name, plan in plans.items()},
        "counted": counted, "peaks": {}, "times": {},
    }
    for work in [Work(*shape, algorithm, training) for training in PASSES.values() for algorithm in ALGORITHMS] + [
            Work(*shape, "blas", weights=True)]:
        report(f"measuring the memory of {work.arm}")
        found["peaks"][work.arm] = {name: value for name, value in memory.measure(work, workers, 0).items()
                                    if name in ("peak_bytes", "held_bytes", "missing")}
    for name, training in PASSES.items():
        report(f"timing the {name}")
        flops = sum(found["flops"][name].values())
        found["times"][name] = {
            arm: {**times, "rate": flops / times["median"], "share_of_limit": flops / times["median"] / limits["float32"]}
            for arm, times in timings(shape, training, workers, seconds).items()}
    return found


def count(work: Work, limits: Mapping[str, float]) -> dict[str, Any]:
    """Bytes, FLOP/byte, and the time under the machine's roofs: max(operations / peak, bytes / bandwidth)."""
    total = work.counted["total"]
    compute, traffic = work.flops / limits["float32"], total / limits["read"]
    return {"bytes": work.counted, "intensity": work.flops / total, "roofline_seconds": max(compute, traffic),
            "bound": "arithmetic" if compute >= traffic else "memory"}


def timings(shape: Shape, training: bool, num_threads: int, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of a call of each arm, "algorithm, layout", run in rounds of turning order for so many seconds, once the answers
    have been compared; at least three rounds, or as many as `PATIENCE` has room for."""
    module = MultiHeadAttention(shape.d_model, shape.H, rng=0)
    generator = np.random.default_rng(1)
    X, grad_output = (generator.standard_normal(shape[:3], np.float32) for _ in range(2))

    def call(algorithm: str, layout: str) -> dict[str, np.ndarray]:
        module.algorithm, module.layout = algorithm, layout
        out = module.forward(X, training=training, num_threads=num_threads)
        return {"out": out, "grad_X": module.backward(grad_output, num_threads=num_threads)} if training else {"out": out}

    def answers(name: str) -> dict[str, np.ndarray]:
        found = arms[name]()
        # all as one: that of W_Q is 0 to rounding where there is one key
        return {**found, "gradients": np.concatenate([x.ravel() for x in module.gradients().values()])} if training else found

    arms = {f"{algorithm}, {layout}": partial(call, algorithm, layout) for algorithm in ALGORITHMS for layout in LAYOUTS}
    (first, *others), begin = arms, time.perf_counter()
    expected = answers(first)
    for name in others:
        agree(str(shape), {first: expected, name: answers(name)}, TOLERANCE["float32"])
    del expected
    least = min(3, math.ceil(PATIENCE / (time.perf_counter() - begin)))
    times = interleave(arms, seconds, lambda: None, least=least)        # one call right after the other
    return {name: {**interval(values), "best": float(values.min()), "calls": len(values)} for name, values in times.items()}


# ------------------------------------------------------------------------------------------------ what is shown

def show(found: Mapping[str, Any], console: Console) -> None:
    """The tables, in 80 columns."""
    from fastmha.study.report import print_table

    console.print("\n".join(head(found)), highlight=False, soft_wrap=True)
    for shown in (flops_table(found), bytes_table(found), *(times_table(found, name) for name in PASSES), choice_table(found)):
        print_table(console, shown)
        console.print()


def shape_of(found: Mapping[str, Any]) -> Shape:
    return Shape(*(found["shape"][name] for name in Shape._fields))


def head(found: Mapping[str, Any]) -> list[str]:
    """The shape, the machine, and the numbers that need no table."""
    shape, limits = shape_of(found), found["limits"]
    number, tokens = found["threads"], shape.B * shape.L
    parts = found["flops"]["forward"]
    larger = max(("projections", "attention"), key=parts.__getitem__)
    share = share_text(parts[larger] / sum(parts.values()))
    return [
        str(shape),
        "float32, no mask, no biases",
        f"{found['machine']['cpu']}, {found['kernels']['isa']}, {number} thread{'s' * (number != 1)}",
        f"  at most {limits['float32'] / 1e9:.0f} GFLOP/s, {limits['read'] / 1e9:.1f} GB/s; arithmetic is the limit above "
        f"{limits['float32'] / limits['read']:.1f} FLOP/byte",
        f"crossover length {found['crossover_length']} (2 d_model); at L {shape.L} {PARTS[larger]} are {share}",
        f"KV cache {bytes_text(found['kv_cache_bytes'])}: keys and values of {tokens} token{'s' * (tokens > 1)} in one layer",
        "",
    ]


def flops_table(found: Mapping[str, Any]) -> Table:
    passes = [found["flops"][name] for name in PASSES]
    total = [sum(parts.values()) for parts in passes]
    rows = [(text, *(cell for parts, whole in zip(passes, total)
                     for cell in (count_text(parts[name]), share_text(parts[name] / whole)))) for name, text in PARTS.items()]
    rows.append(("total", count_text(total[0]), "", count_text(total[1]), ""))
    return Table("Operations, counted", ("FLOP", "forward", "", "training step", ""), rows)


def bytes_table(found: Mapping[str, Any]) -> Table:
    columns = [(name, algorithm) for name in PASSES for algorithm in ALGORITHMS]
    cells = [found["counted"][name][algorithm] for name, algorithm in columns]
    peaks = [found["peaks"][Work(*shape_of(found), algorithm, PASSES[name]).arm] for name, algorithm in columns]
    components = dict.fromkeys(name for cell in cells for name in cell["bytes"] if name != "total")
    rows = [*((name, *(bytes_text(cell["bytes"][name]) if name in cell["bytes"] else "" for cell in cells))
              for name in (*components, "total")),
            ("without scores", *(bytes_text(peak["held_bytes"]) for peak in peaks)),
            ("measured peak", *("not measured" if "missing" in peak else bytes_text(peak["peak_bytes"]) for peak in peaks)),
            ("ratio", *("" if "missing" in peak or peak["held_bytes"] < JUDGED else
                        f"{peak['peak_bytes'] / peak['held_bytes']:.2f}" for peak in peaks)),
            ("FLOP/byte", *(f"{cell['intensity']:.{'0f' if cell['intensity'] >= 100 else '3g'}}" for cell in cells))]
    asked = found["peaks"]["blas, weights"]
    note = ("ratio: measured over the total without scores, which is what the library holds: blas keeps only blocks of "
            "its scores unless the weights are asked for; then its forward pass " + (
        f"was not measured: {asked['missing']}." if "missing" in asked else
        f"holds {bytes_text(asked['peak_bytes'])} of {bytes_text(asked['held_bytes'])} counted."))
    note += " FLOP/byte: operations over the total."
    why = sorted({peak["missing"] for peak in peaks if "missing" in peak})
    note += f" Not measured: {'; '.join(why)}." if why else ""
    if min(peak["held_bytes"] for peak in peaks) < memory.DOMINATES:
        note += f" Below {bytes_text(memory.DOMINATES)} scratch and the allocator's slack are no small part of what is measured."
    return Table("Bytes, counted and measured", ("", *(f"{algorithm} {name.partition(' ')[0]}" for name, algorithm in columns)),
                 rows, note)


def times_table(found: Mapping[str, Any], name: str) -> Table:
    rows = []
    for arm, times in found["times"][name].items():
        roof = found["counted"][name][arm.partition(",")[0]]["roofline_seconds"]
        spread = f"±{(times['high'] - times['low']) / 2 / times['median']:.0%}" if times["calls"] > 2 else ""
        rows.append((arm, time_text(times["median"]), spread, f"{times['rate'] / 1e9:.3g}", share_text(times["share_of_limit"]),
                     time_text(roof), f"{times['median'] / roof:.3g}"))
    calls = next(iter(found["times"][name].values()))["calls"]
    note = ("of limit: share of the machine's operations/s. roofline: the larger of counted operations at that limit and counted "
            "bytes (total) at the bandwidth. over: measured over roofline.")
    return Table(f"Time of a {'forward pass' if name == 'forward' else name}, median of {calls} call{'s' * (calls > 1)}",
                 ("", "median", "", "GFLOP/s", "of limit", "roofline", "over"), rows, "" if name == "forward" else note)


def choice_table(found: Mapping[str, Any]) -> Table:
    rows = []
    for name, plan in found["plan"].items():
        rows.append((name, plan["algorithm"], plan["reasons"][plan["algorithm"]]))
        rows += [("", f"not {other}", why) for other, why in plan["reasons"].items() if other != plan["algorithm"]]
    plan = found["plan"]["forward"]
    return Table('What algorithm="auto" and layout="auto" take', ("", "", "because"),
                 [*rows, ("layout", plan["layout"], plan["layout_reason"])])


def share_text(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "<1%"
