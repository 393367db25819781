"""The arms of the study, and how they are timed.

The operands lie as a fused projection writes them: q, k, v are views of one buffer (B, L, (H + 2·Hkv)·D), the output
goes into the merged (B, L, H·D) buffer, the gradients into one buffer like the first. The arms, on the same data:

    strided     the kernels on the heads where they lie
    contiguous  each operand packed by the library's blocked copy, each head contiguous, then the same kernels
    pack        those copies alone, with the allocation of their memory, which the contiguous arm has as well

"contiguous" is what a module with ``layout="contiguous"`` does. Each round runs every arm once, and the order turns
from round to round, so that whatever else the machine does meets all arms alike.
"""
from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from fastmha import __version__, _core, algorithms, threads, validate
from fastmha.study.cases import DIRECTIONS, Case

ARMS = ("strided", "contiguous", "pack")
LEAST_ROUNDS, MOST_ROUNDS = 3, 500
TOLERANCE = {"float32": 1e-4, "float64": 1e-12}    # of the largest element; at most the order of sums differs


class ArmsDisagreeError(RuntimeError):
    """Two arms gave different answers: their times mean nothing."""


class Operands:
    """Random operands of a case and buffers for its results, all views (B, heads, L, D) of fused buffers.

    Attributes
    ----------
    q, k, v, grad_out : arrays
        Standard normal.
    out, grad_q, grad_k, grad_v : arrays
        Where an arm writes; `lse` (B, H, Lq) is that of the forward pass from the start.
    problem : Problem
        q, k, v and the rules, validated.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.case = case
        self.q, self.k, self.v = self._fused(generator)
        self.grad_q, self.grad_k, self.grad_v = self._fused(None)
        self.grad_out, self.out = (_heads(case, case.Lq, (case.H,), g)[0] for g in (generator, None))
        self.lse = np.empty((case.B, case.H, case.Lq), case.dtype)
        rules = {"is_causal": False, "offset": None, **case.keywords}
        self.problem = validate.attention_problem(self.q, self.k, self.v, "BHLD", None, rules["is_causal"],
                                                  rules["offset"], None, None, None, None)
        algorithms.forward(case.algorithm, self.problem, self.out, self.lse, None, threads.resolve(None))

    def _fused(self, generator: np.random.Generator | None) -> list[np.ndarray]:
        case = self.case
        if case.Lq == case.Lk:
            return _heads(case, case.Lq, (case.H, case.Hkv, case.Hkv), generator)
        return [*_heads(case, case.Lq, (case.H,), generator), *_heads(case, case.Lk, (case.Hkv, case.Hkv), generator)]

    def results(self, direction: str) -> dict[str, np.ndarray]:
        """The arrays that an arm writes, by name."""
        if direction == "forward":
            return {"out": self.out, "lse": self.lse}
        return {"grad_q": self.grad_q, "grad_k": self.grad_k, "grad_v": self.grad_v}


def _heads(case: Case, length: int, heads: Sequence[int], generator: np.random.Generator | None) -> list[np.ndarray]:
    """Views (B, heads, length, D), side by side in one buffer (B, length, sum of heads · D)."""
    shape = (case.B, length, sum(heads), case.D)
    if generator is None:
        buffer = np.zeros(shape, case.dtype)
    else:
        buffer = generator.standard_normal(shape, np.float64 if case.dtype == "float64" else np.float32)
    ends = np.cumsum((0, *heads)).tolist()
    return [buffer[:, :, start:end].transpose(0, 2, 1, 3) for start, end in pairwise(ends)]


def arms(operands: Operands, direction: str, num_threads: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name; each call computes the whole case and writes into the results of `operands`."""
    o = operands

    def forward(pack: bool) -> None:
        algorithms.forward(o.case.algorithm, o.problem, o.out, o.lse, None, num_threads, pack=pack)

    def backward(pack: bool) -> None:
        algorithms.backward(o.case.algorithm, o.problem, o.out, o.lse, o.grad_out, o.grad_q, o.grad_k, o.grad_v, num_threads,
                            pack=pack)

    run = forward if direction == "forward" else backward
    packed = (o.q, o.k, o.v) if direction == "forward" else (o.q, o.k, o.v, o.grad_out)

    def pack_alone() -> None:
        _ = [algorithms.packed(x, num_threads) for x in packed]     # all alive at once, as the kernels need them

    return {"strided": lambda: run(False), "contiguous": lambda: run(True), "pack": pack_alone}


def check(operands: Operands, direction: str, num_threads: int) -> None:
    """Run the arms that compute, and compare their answers; also warms up caches, pool and memory.

    Raises
    ------
    ArmsDisagreeError
    """
    case = operands.case
    saved_lse = operands.lse.copy()
    answers = []
    for name in ("strided", "contiguous"):
        for array in operands.results(direction).values():
            array[...] = np.nan         # what an arm leaves out shows
        arms(operands, direction, num_threads)[name]()
        answers.append({key: array.copy() for key, array in operands.results(direction).items()})
    operands.lse[...] = saved_lse
    for name, strided in answers[0].items():
        contiguous = answers[1][name]
        allowed = TOLERANCE[case.dtype] * float(np.abs(strided).max(initial=0))
        difference = float(np.abs(strided - contiguous).max(initial=0))
        if not difference <= allowed:       # also where either is NaN
            raise ArmsDisagreeError(f"{case.label} {direction}: {name} of the strided and the contiguous arm differ by "
                                    f"{difference:.1e}, more than {allowed:.1e}")


def interleave(functions: dict[str, Callable[[], None]], seconds: float) -> dict[str, np.ndarray]:
    """Seconds of each call, by name: rounds of all functions in turning order, until `seconds` are used up."""
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    for number in range(MOST_ROUNDS):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - start)
        if number + 1 >= LEAST_ROUNDS and time.perf_counter() >= end:
            break
    return {name: np.array(values) for name, values in times.items()}


@dataclass(frozen=True)
class Measurement:
    """Times of the arms of one case in one direction.

    `best` and `median` are seconds by arm. `ratio` is strided / contiguous, taken within each round: its median, and
    its quartiles `ratio_low` and `ratio_high`. Above 1 the contiguous arm, packing included, is the faster one.
    """

    case: Case
    direction: str
    threads: int
    rounds: int
    best: dict[str, float]
    median: dict[str, float]
    ratio: float
    ratio_low: float
    ratio_high: float

    def gflops(self, arm: str) -> float:
        """GFLOP/s of an arm that computes, at its median time."""
        return self.case.flops(self.direction) / self.median[arm] / 1e9

    def as_json(self) -> dict[str, Any]:
        case, direction = self.case, self.direction
        return {
            "label": case.label, "case": asdict(case), "direction": direction, "threads": self.threads,
            "flops": case.flops(direction), "operand_bytes": case.operand_bytes(direction),
            "packed_bytes": case.packed_bytes(direction), "row_bytes": case.row_bytes, "rounds": self.rounds,
            "best_seconds": self.best, "median_seconds": self.median,
            "gflops": {arm: self.gflops(arm) for arm in ("strided", "contiguous")},
            "strided_over_contiguous": {"median": self.ratio, "quartiles": [self.ratio_low, self.ratio_high]},
        }


def measure(operands: Operands, direction: str, num_threads: int, seconds: float) -> Measurement:
    """Check the answers of the arms, then time them for about `seconds`, at least three rounds."""
    check(operands, direction, num_threads)
    times = interleave(arms(operands, direction, num_threads), seconds)
    low, middle, high = np.quantile(times["strided"] / times["contiguous"], (0.25, 0.5, 0.75)).tolist()
    return Measurement(
        operands.case, direction, num_threads, len(times["strided"]),
        {name: float(values.min()) for name, values in times.items()},
        {name: float(np.median(values)) for name, values in times.items()}, middle, low, high)


def run(cases: Sequence[Case], num_threads: int, seconds: float,
        report: Callable[[str], None] = lambda label: None) -> list[Measurement]:
    """Measure all cases, forward and backward, in about `seconds` altogether.

    What a measurement leaves of its share goes to those that follow. `report` is called with the label of each
    measurement before it starts.
    """
    end = time.perf_counter() + seconds
    left = len(cases) * len(DIRECTIONS)
    measured = []
    for case in cases:
        operands = Operands(case)
        for direction in DIRECTIONS:
            report(f"{case.label} {direction}")
            measured.append(measure(operands, direction, num_threads, (end - time.perf_counter()) / left))
            left -= 1
    return measured


def results(measured: Sequence[Measurement], num_threads: int, command: str) -> dict[str, Any]:
    """Everything that a reader needs to judge the measurements, ready for JSON."""
    isa, vector_bytes = _core.selected_isa()
    return {
        "format": 1,
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_name(), "cpus_usable": usable_cpus(), "system": platform.platform(),
                    "architecture": platform.machine()},
        "versions": {"fastmha": __version__, "python": platform.python_version(), "numpy": np.__version__,
                     "scipy": scipy.__version__},
        "kernels": {"isa": isa, "vector_bytes": vector_bytes, "blas_thread_setter": threads.blas_setter},
        "threads": num_threads,
        "units": {"seconds": "s per call", "gflops": "1e9 operations/s at the median time",
                  "strided_over_contiguous": "time ratio within a round; above 1 contiguous (pack + kernel) is faster"},
        "measurements": [m.as_json() for m in measured],
    }


def write_json(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def cpu_name() -> str:
    """The CPU as the system calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
