"""Operations and bytes of a layer: what `fastmha.analysis` counts on paper against what a process holds and how long it takes.

Each measurement is a process of its own, which this module runs with the work as its one argument (`python -m
fastmha.study.memory`). The works: "blas, weights", the score matrices materialised, as the textbook has them; "blas", the same
products, but only blocks of the scores exist at a time; "tiled", no scores; "…, training", forward and backward.
"""
from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fastmha import MultiHeadAttention, analysis, plan
from fastmha.study.answer import Answer, Found, Picture, Question, Record, Table, by, lines, of, spread, table
from fastmha.study.trial import Trial, interval
from fastmha.study.words import bytes_text

NAME = "memory"
DOMINATES = 64_000_000      # counted bytes from which stacks, kept scratch and the allocator's slack are a small part
TOLERANCE = 0.10
LARGEST_SHARE = 0.5         # of the free memory that a measurement may take
START_SECONDS = 0.5         # a process that imports NumPy and SciPy's BLAS
ROUGH_RATE = 1e11           # operations/s, only to plan
D_MODEL, HEADS = 768, 12
SCORES = ("scores", "grad_scores")      # components of the count that exist only where weights are asked for


@dataclass(frozen=True)
class Work:
    """One call of a layer without biases in float32, full attention: a forward, or with `training` a forward and a backward."""

    B: int
    L: int
    d_model: int
    H: int
    algorithm: str
    training: bool = False
    weights: bool = False       # need_weights=True

    @property
    def arm(self) -> str:
        """Such as "blas, weights" or "tiled, training"."""
        return self.algorithm + ", weights" * self.weights + ", training" * self.training

    @property
    def label(self) -> str:
        return f"B{self.B} L{self.L} d{self.d_model} H{self.H} {self.arm}"

    @property
    def flops(self) -> int:
        return analysis.count_flops(self.B, self.L, self.d_model, self.H, backward=self.training)

    @property
    def counted(self) -> dict[str, int]:
        """Bytes by component and in total, as the textbook has them."""
        return analysis.count_memory_bytes(self.B, self.L, self.d_model, self.H, algorithm=self.algorithm,
                                           backward=self.training)

    @property
    def held(self) -> int:
        """The counted bytes without the score matrices where only blocks of them exist."""
        counted = self.counted
        return counted["total"] - (0 if self.weights else sum(counted.get(name, 0) for name in SCORES))

    def least(self, num_threads: int) -> dict[str, float]:
        """As `Trial.least` states it: a process, and in it two calls."""
        parts = flop_parts(self.B, self.L, self.d_model, self.H, training=self.training)
        kind, single = f"{self.algorithm} {'backward' if self.training else 'forward'}", " 1T" * (num_threads == 1)
        return {"process": 1, "fresh": 2 * self.held, f"product{single}": 2 * parts["projections"],
                f"{kind}{single}": 2 * parts["attention"]}

    def scratch(self, num_threads: int) -> int:
        """Bytes in which the attention works, of all threads: not counted."""
        heads = np.broadcast_to(np.float32(0), (self.B, self.H, self.L, self.d_model // self.H))
        return plan(heads, heads, heads, algorithm=self.algorithm, backward=self.training, num_threads=num_threads).scratch_bytes


def flop_parts(B: int, L: int, d_model: int, H: int, *, training: bool = False) -> dict[str, int]:
    """The three terms of `analysis.count_flops`: "projections", "attention" (the products over the pairs), "softmax"."""
    projections, attention, softmax = 8 * B * L * d_model**2, 4 * B * L**2 * d_model, 5 * B * H * L**2
    if training:    # products: 2 per pair forward, 5 backward
        projections, attention, softmax = 3 * projections, attention // 2 * 7, 2 * softmax
    return {"projections": projections, "attention": attention, "softmax": softmax}


# ------------------------------------------------------------------------------------------------ one measurement

def free_bytes() -> int | None:
    """Memory that a new process may take without swapping; None where the system does not tell."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")      # a container's limit
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    if not found and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def measure(work: Work, num_threads: int, seconds: float) -> dict[str, Any]:
    """Run a work in a process of its own: "counted_bytes", "components" (counted), "held_bytes" (counted, of what the library
    holds), "scratch_bytes" (planned, not counted), "flops", and either "peak_bytes" and "seconds" {"best", "median", "low",
    "high", "calls"}, or "missing": why they could not be measured."""
    components = dict(work.counted)
    about = {"counted_bytes": components.pop("total"), "components": components, "held_bytes": work.held,
             "scratch_bytes": work.scratch(num_threads), "flops": work.flops}
    free = free_bytes()
    if free is not None and work.held > LARGEST_SHARE * free:
        return {**about, "missing": f"it needs {bytes_text(work.held)}, and {bytes_text(free)} of memory are free"}
    given = json.dumps({"work": asdict(work), "threads": num_threads, "seconds": seconds})
    # from the folder of this package, or a source tree in the current one would take its place
    done = subprocess.run([sys.executable, "-m", "fastmha.study.memory", given], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, cwd=Path(__file__).parents[2])
    if done.returncode == 0:
        return {**about, **json.loads(done.stdout)}
    said = done.stderr.strip().splitlines()
    if done.returncode < 0:
        said = [f"ended by {signal.Signals(-done.returncode).name}"]
    return {**about, "missing": f"its process failed: {said[-1] if said else f'exit status {done.returncode}'}"}


def resident(name: str) -> int:
    """"VmRSS", the resident bytes of this process, or "VmHWM", their peak. OSError where the system does not tell."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise OSError


def peak_so_far() -> int:
    """The peak of the resident bytes where it cannot be reset."""
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)


def trim() -> None:
    """Give freed memory that the C library keeps back to the system, where it can."""
    if sys.platform == "linux":
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)     # glibc
        if give_back is not None:
            give_back(0)


class Watch:
    """The peak of this process's resident memory above its state when the watch was made.

    Where the system can forget a peak (Linux), that of what came before `reset` is not in it. Elsewhere it is, in the peak
    and in the state: what is found is then too small by what earlier work had held and given back.
    """

    def __init__(self) -> None:
        trim()
        try:
            self._base, self._now = resident("VmRSS"), lambda: resident("VmHWM")
            self.reset()
        except OSError:
            self._base, self._now = peak_so_far(), peak_so_far

    def reset(self) -> None:
        """Let the peak begin here."""
        trim()
        if self._now is not peak_so_far:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak(self) -> int:
        return max(0, self._now() - self._base)


def work_here(work: Work, num_threads: int, seconds: float) -> dict[str, Any]:
    """Do the work in this process, which has done nothing before: the peak of the first call, and the time of later ones, at
    least one, for so many seconds; with no seconds that of the first."""
    try:
        # code, the pool's threads and BLAS's buffers are there once, not for this work
        prepared(Work(1, 64, 64, 4, work.algorithm, work.training, work.weights), num_threads)()
        watch = Watch()
    except ImportError:
        return {"missing": "this system does not tell the peak of a process's memory"}
    call = prepared(work, num_threads)
    watch.reset()
    times: list[float] = []
    while True:
        start = time.perf_counter()
        results = call()
        times.append(time.perf_counter() - start)
        del results
        if len(times) == 1:
            peak, end = watch.peak(), time.perf_counter() + seconds
        if not seconds or (len(times) > 1 and time.perf_counter() + times[-1] > end):
            break
    values = np.array(times[1:] or times)
    return {"peak_bytes": peak, "seconds": {"best": float(values.min()), **interval(values), "calls": len(values)}}


def prepared(work: Work, num_threads: int) -> Callable[[], tuple[Any, ...]]:
    """A call that returns what the count has as results: they are alive as long as the tuple is."""
    module = MultiHeadAttention(work.d_model, work.H, layout="strided", algorithm=work.algorithm, rng=0)
    generator = np.random.default_rng(1)
    shape = work.B, work.L, work.d_model
    X = generator.standard_normal(shape, np.float32)
    grad_output = generator.standard_normal(shape, np.float32) if work.training else None

    def call() -> tuple[Any, ...]:
        out = module.forward(X, need_weights=work.weights, training=work.training, num_threads=num_threads)
        return (out,) if grad_output is None else (out, module.backward(grad_output, num_threads=num_threads))

    return call


# lengths by arm, from the shortest to the longest; training steps and `blas` at fewer than they could be: they take seconds
QUICK = {"blas, weights": (512, 1024, 2048), "blas": (2048,), "tiled": (512, 1024, 2048, 4096), "blas, training": (2048,),
         "tiled, training": (2048,)}
FULL = {"blas, weights": (512, 1024, 2048, 4096), "blas": (512, 1024, 2048, 4096), "tiled": (512, 1024, 2048, 4096, 8192),
        "blas, training": (512, 1024, 2048), "tiled, training": (512, 1024, 2048, 4096)}
OTHERS = (Work(2, 2048, 512, 8, "blas", weights=True), Work(2, 4096, 512, 8, "tiled"),
          Work(2, 2048, 512, 8, "tiled", training=True))


def works(quick: bool) -> list[Work]:
    return [*(Work(1, L, D_MODEL, HEADS, arm.partition(",")[0], "training" in arm, "weights" in arm)
              for arm, lengths in (QUICK if quick else FULL).items() for L in lengths), *(() if quick else OTHERS)]


def trials(quick: bool, num_threads: int) -> list[Trial]:
    def trial(work: Work) -> Trial:
        spend = max(0.1, work.flops / ROUGH_RATE) if quick else max(0.5, 2 * work.flops / ROUGH_RATE)
        return Trial(NAME, work.label, {**asdict(work), "arm": work.arm, "threads": num_threads},
                     lambda seconds: measure(work, num_threads, max(0.001, seconds - START_SECONDS)), START_SECONDS + spend,
                     work.flops, work.least(num_threads))

    return [trial(work) for work in works(quick)]


ALGORITHMS, ARMS = ("blas", "tiled"), ("blas, weights", "blas", "tiled")       # on paper; in the pictures over the length


def answer(records: Sequence[Record], found: Found) -> Answer:
    measured, d_model, H = [r for r in records if "peak_bytes" in r], records[0]["factors"]["d_model"], records[0]["factors"]["H"]
    series = {arm: of_arm(measured, arm) for arm in ARMS}
    method = (
        "Counted: fastmha.analysis, every array of a layer once, float32, no bias, no mask. Measured: one call of "
        "MultiHeadAttention in a process of its own: the peak of its resident memory above what was resident before weights and "
        "input were made, after a tiny call that brings code, threads and BLAS's buffers into memory. Times are of later calls "
        "in the same process, the growth of the fastest, and contain the page faults of fresh memory, which every call of such "
        "sizes has.")
    limits = (f"Counts below {bytes_text(DOMINATES)} are not judged: scratch and the allocator's slack, a few MB, are no small "
              "part of them. The scratch of a training step by tiled is about 2 L D numbers per thread, so that many threads "
              "hold more above the count than two. The count of operations tells nothing about how fast each kind runs: those of "
              "the softmax are slower than those of products.")
    points = [{"group": r["factors"]["arm"], "dtype": "float32", "intensity": r["flops"] / r["counted_bytes"],
               "rate": r["flops"] / r["seconds"]["median"]} for r in measured if textbook(r)]
    roofline = Picture("memory_roofline", "Operations/s over counted operations a byte, every array counted once.", "roofline",
                       {"title": "The layer under the machine's roofs", "points": points})
    # from an eighth of the crossover to eight times it
    lengths = [max(1, int(analysis.crossover_length(d_model) * 2.0**n)) for n in range(-3, 4)]
    shapes, drawn = by(records, shape_text), {arm: own for arm, own in series.items() if own}
    return Answer(short_of(measured, series, d_model), method, limits, [
        *(memory_table(shape, list(filter(textbook, own))) for shape, own in shapes.items()),
        *(blocks_table(shape, [r for r in own if not textbook(r)]) for shape, own in shapes.items()),
        growth_table(drawn), analysis_table(d_model, H, lengths)], [
        *measured_pictures(drawn), *components_picture(measured), *([roofline] if points and found.get("limits") else []),
        *counted_pictures(d_model, H, lengths, found.get("limits"))])


def of_arm(records: Sequence[Record], arm: str) -> list[Record]:
    """Records of an arm by length, of the shape of the first."""
    shape = {name: records[0]["factors"][name] for name in ("B", "d_model", "H")} if records else {}
    return sorted(of(records, arm=arm, **shape), key=lambda r: r["factors"]["L"])


def lengths_of(records: Iterable[Record]) -> list[int]:
    return [r["factors"]["L"] for r in records]


def shape_text(record: Record) -> str:
    return "B {B}, d_model {d_model}, {H} heads".format(**record["factors"])


def textbook(record: Record) -> bool:
    """Whether the algorithm that ran holds all that is counted."""
    return bool(record["held_bytes"] == record["counted_bytes"])


def ratio(record: Record) -> float:
    return float(record["peak_bytes"] / record["counted_bytes"])


def off(record: Record) -> float:
    return abs(ratio(record) - 1)


def exponent(series: Sequence[Record], value: Callable[[Record], float]) -> float:
    """p of value ~ L**p between the two longest sequences."""
    a, b = series[-2:]
    if min(value(a), value(b)) <= 0:        # where the peak of earlier work could not be forgotten
        return math.nan
    return math.log(value(b) / value(a)) / math.log(b["factors"]["L"] / a["factors"]["L"])


# those of the parameters do not depend on the length
GROWTH: tuple[tuple[str, Callable[[Record], float]], ...] = (
    ("bytes counted", lambda r: r["held_bytes"] - r["components"]["weights"]),
    ("bytes measured", lambda r: r["peak_bytes"] - r["components"]["weights"]),
    ("operations", lambda r: r["flops"]), ("time", lambda r: r["seconds"]["best"]))


def short_of(measured: Sequence[Record], series: Mapping[str, Sequence[Record]], d_model: int) -> str:
    """Of the growth: the arm that materialises scores and the one that has none."""
    large = [r for r in measured if r["counted_bytes"] >= DOMINATES]
    judged, rest = list(filter(textbook, large)), [r for r in large if not textbook(r)]
    said = []
    if judged:
        worst, kept = max(judged, key=off), sum(off(r) <= TOLERANCE for r in judged)
        which = f"all {kept}" if kept == len(judged) else f"{kept} of {len(judged)}"
        said.append(f"The measured peak is within {TOLERANCE:.0%} of the count in {which} works of at least "
                    f"{bytes_text(DOMINATES)}; farthest off is {worst['label']}: {ratio(worst):.2f} times the count.")
    for arm, name in (("blas, weights", "blas with its weights"), ("tiled", "tiled")):
        if len(series[arm]) < 2:
            continue
        a, b = lengths_of(series[arm])[-2:]
        counted, peak, flops, seconds = (exponent(series[arm], value) for _, value in GROWTH)
        said.append(f"From L {a} to {b} the memory of {name}, less the parameters, grows as L^{peak:.2f} (counted {counted:.2f}) "
                    f"and its time as L^{seconds:.2f} (operations {flops:.2f}).")
    blas, tiled = ({r["factors"]["L"]: r["peak_bytes"] for r in series[arm]} for arm in ("blas, weights", "tiled"))
    if both := blas.keys() & tiled.keys():
        L = max(both)
        said.append(f"At L {L} blas with its weights holds {blas[L] / tiled[L]:.1f} times what tiled holds.")
    if rest:
        r = min(rest, key=ratio)
        said.append(f"Without being asked for weights blas keeps only blocks of its scores: {r['label']} held "
                    f"{bytes_text(r['peak_bytes'])} of the textbook's {bytes_text(r['counted_bytes'])}.")
    said.append("On paper the products over the pairs cost as much as the projections at L = 2 d_model: for d_model "
                f"{d_model} at {analysis.crossover_length(d_model)}.")
    return " ".join(said)


def row_name(record: Record) -> str:
    return "{arm}, L {L}".format(**record["factors"])


def bytes_of(name: str) -> Callable[[Record], str]:
    return lambda r: bytes_text(r[name]) if name in r else ""


def memory_table(shape: str, own: Sequence[Record]) -> Table:
    def verdict(r: Record) -> str:
        return r.get("missing") or ("small" if r["counted_bytes"] < DOMINATES else "yes" if off(r) <= TOLERANCE else "NO")

    return table(f"Peak memory, {shape}", own, {
        "": row_name, "counted": bytes_of("counted_bytes"), "measured": bytes_of("peak_bytes"),
        "ratio": lambda r: "" if "missing" in r else f"{ratio(r):.2f}", f"within {TOLERANCE:.0%}": verdict,
        "scratch": bytes_of("scratch_bytes")},
        f"small: counted below {bytes_text(DOMINATES)}, not judged. weights: the score matrices are asked for, and so "
        "materialised. training: forward and backward. scratch: planned, of all threads, not counted.")


def blocks_table(shape: str, own: Sequence[Record]) -> Table:
    return table(f"Peak memory of blas without weights, {shape}", own, {
        "": row_name, "textbook": bytes_of("counted_bytes"), "no scores": bytes_of("held_bytes"),
        "measured": bytes_of("peak_bytes"),
        "ratio": lambda r: r.get("missing") or f"{r['peak_bytes'] / r['held_bytes']:.2f}"},
        "Where nobody asks for weights, blas computes scores in blocks that stay in the caches and keeps none: textbook is the "
        "count with score matrices, no scores the count without; ratio: measured over the latter.")


def growth_table(series: Mapping[str, Sequence[Record]]) -> Table:
    """Over the series that have records."""
    steps = list(pairwise(sorted({L for records in series.values() for L in lengths_of(records)})))
    rows = []
    for arm, records in series.items():
        by_length = {r["factors"]["L"]: r for r in records}
        pairs = [[by_length[L] for L in step] if set(step) <= by_length.keys() else None for step in steps]
        rows += [(f"{arm}: {what}", *((pair and f"{exponent(pair, value):.2f}") or "" for pair in pairs))
                 for what, value in GROWTH if any(pairs)]
    shape = next((shape_text(records[0]) for records in series.values()), "")
    return Table(f"Growth of a forward pass with the length, p of L^p, {shape}", ("", *(f"{a}–{b}" for a, b in steps)), rows,
                 "1: linear, 2: quadratic. Bytes are those without the parameters, for blas without weights also without score "
                 "matrices; time is linear in L for the projections, quadratic for the rest.")


def analysis_table(d_model: int, H: int, lengths: Sequence[int]) -> Table:
    rows = []
    for L in lengths:
        parts = flop_parts(1, L, d_model, H)
        rows.append([str(L), *(f"{number / 1e9:.3g}" for number in parts.values()),
                     f"{1 - parts['projections'] / sum(parts.values()):.0%}",
                     *(f"{analysis.arithmetic_intensity(1, L, d_model, H, algorithm=name):.0f}" for name in ALGORITHMS)])
    return Table(f"Counted on paper: forward, B 1, d_model {d_model}, {H} heads, float32",
                 ["L", "projections", "attention", "softmax", "share", *ALGORITHMS], rows,
                 "GFLOP of the projections, of the products over the pairs and of the softmax; share of the latter two; "
                 "FLOP/byte with scores in memory (blas) and without (tiled).")


def over_length(name: str, caption: str, title: str, y: str, **panel: Any) -> list[Picture]:
    """Lines over the length of the sequence."""
    return lines(name, caption, [{"title": "", **panel}], title=title, x="sequence length L", y=y, x_log2=True, y_log=True)


def mark(length: int) -> tuple[int, str]:
    """Where attention and the projections have as many operations, whatever they take."""
    return length, f"L {length}: attention has as many operations as the projections"


def measured_pictures(series: Mapping[str, Sequence[Record]]) -> list[Picture]:
    if not series:
        return []
    shape = next(iter(series.values()))[0]
    held = [{"name": f"{arm}, {name}", "x": lengths_of(own), "y": [r[of] / 1e6 for r in own]}
            for arm, own in series.items() for name, of in (("counted", "held_bytes"), ("measured", "peak_bytes"))]
    taken = [spread(arm, lengths_of(own), [r["seconds"] for r in own]) for arm, own in series.items()]
    lengths = [L for own in series.values() for L in lengths_of(own)]
    length = analysis.crossover_length(shape["factors"]["d_model"])
    marks = [mark(length)] if min(lengths) <= length <= max(lengths) else []
    return [
        *over_length("memory_over_length", "Peak memory of a forward pass over the length of the sequence, both axes "
                     "logarithmic: counted, for blas without weights less the score matrices, and measured.",
                     f"Memory of a forward pass, {shape_text(shape)}, float32", "peak memory (MB)", series=held),
        *over_length("time_over_length", "Time of a forward pass over the length of the sequence, both axes logarithmic; the "
                     "mark is the length at which the products over the pairs have as many operations as the projections.",
                     f"Time of a forward pass, {shape_text(shape)}, float32", "time (s)", series=taken, marks=marks)]


def parts_of(record: Record) -> dict[str, Mapping[str, int]]:
    """Bars of a record: what is counted by component, without score matrices once more where they are not held, and the peak."""
    components, peak = record["components"], {"measured": record["peak_bytes"]}
    if textbook(record):
        return {"counted": components, "measured": peak}
    held = {name: number for name, number in components.items() if name not in SCORES}
    return {"textbook": components, "no scores": held, "measured": peak}


def components_picture(measured: Sequence[Record]) -> list[Picture]:
    """Of each arm the longest sequence that all of them have, else its own longest."""
    arms = {arm: {r["factors"]["L"]: r for r in of_arm(measured, arm)} for arm in by(measured, lambda r: r["factors"]["arm"])}
    arms = {arm: own for arm, own in arms.items() if own}
    shared = set.intersection(*map(set, arms.values())) if arms else set()
    bars = []
    for arm, own in arms.items():
        L = max(shared or own)
        for label, parts in parts_of(own[L]).items():
            bars.append({"label": label, "group": f"{arm}, L {L}",
                         "parts": [{"name": name, "value": n / 1e6} for name, n in parts.items()]})
    return [Picture("memory_by_component", "Counted bytes by component, and the measured peak below. blas without weights "
                    "computes its scores in blocks and keeps none: textbook is the count with score matrices, no scores the "
                    "count of what it holds, which the peak is to be compared with.", "stacked_bars", {
                        "title": f"Memory by component, {shape_text(measured[0])}, float32", "bars": bars, "x": "memory (MB)"})
            ] if bars else []


def counted_pictures(d_model: int, H: int, lengths: Sequence[int], limits: Mapping[str, float] | None) -> list[Picture]:
    """Operations and intensity, this one with the machine's own balance where its limits are known."""
    shape, length = f"B 1, d_model {d_model}, {H} heads", analysis.crossover_length(d_model)
    parts = [flop_parts(1, L, d_model, H) for L in lengths]
    balance: dict[str, Any] = {}
    if limits:
        ridge = limits["float32"] / limits["read"]
        balance = {"reference": ridge, "reference_name": f"this machine: {ridge:.1f} FLOP in the time of a byte read"}
    return [
        *over_length("flops_over_length", f"Operations of a forward pass by part, counted; at L = 2 d_model = {length} the "
                     "products over the pairs overtake the projections.", f"Operations of a forward pass, {shape}",
                     "operations (GFLOP)", marks=[mark(length)],
                     series=[{"name": name, "x": lengths, "y": [p[name] / 1e9 for p in parts]} for name in parts[0]]),
        *over_length("intensity_over_length", "Counted operations over counted bytes, every array once." + (
                     " The horizontal line is where this machine's arithmetic takes as long as its memory: above, arithmetic is "
                     "the limit." if limits else ""), f"Arithmetic intensity of a forward pass, {shape}, float32", "FLOP/byte",
                     series=[{"name": name, "x": lengths, "y": [analysis.arithmetic_intensity(1, L, d_model, H, algorithm=name)
                                                                for L in lengths]} for name in ALGORITHMS], **balance)]


QUESTION = Question(
    NAME, "Operations, bytes and the length of the sequence",
    "Where do the operations and the bytes of a layer go as sequences grow, and does a process hold and take what is counted on "
    "paper?", trials, answer)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(work_here(Work(**given["work"]), given["threads"], given["seconds"])))
