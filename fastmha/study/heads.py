"""Strided heads, as a fused projection writes them, against contiguous ones."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from fastmha import _core, algorithms
from fastmha.study import cases
from fastmha.study.answer import Answer, Found, Picture, Question, Record, Table, of, ratios, table
from fastmha.study.cases import DIRECTIONS, Case, Run
from fastmha.study.operands import problem, side_by_side
from fastmha.study.trial import LEAST_CALLS, Arms, Trial, checked, timed
from fastmha.study.words import mean_text, median_text, rate_of, ratio_of, sides, span_text

NAME = "heads"
ARMS = ("strided", "contiguous", "packed", "pack")
QUICK_SECONDS, FULL_SECONDS = 0.35, 1.0      # a trial
LINE = 64               # bytes of a cache line
PLACES = 5              # where operands and copies lie in memory, tried in a trial


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

    def __init__(self, case: Case, num_threads: int = 1, place: int | None = None, on_lines: bool = False) -> None:
        generator = np.random.default_rng(0)
        self.case, self.places, self.on_lines = case, None if place is None else np.random.default_rng(place), on_lines
        self.q, self.k, self.v = self._fused(generator)
        self.grad_q, self.grad_k, self.grad_v = self._fused(None)
        self.grad_out, self.out = (self._heads(case.Lq, (case.H,), g)[0] for g in (generator, None))
        self.lse = np.empty((case.B, case.H, case.Lq), case.dtype)
        self.problem = problem(self.q, self.k, self.v, **case.keywords)
        algorithms.forward(case.algorithm, self.problem, self.out, self.lse, None, num_threads)

    def _fused(self, generator: np.random.Generator | None) -> list[np.ndarray]:
        case = self.case
        if case.Lq == case.Lk:
            return self._heads(case.Lq, (case.H, case.Hkv, case.Hkv), generator, case.row)
        return [*self._heads(case.Lq, (case.H,), generator), *self._heads(case.Lk, (case.Hkv, case.Hkv), generator, case.row)]

    def _heads(self, length: int, heads: Sequence[int], generator: np.random.Generator | None, row: int = 0) -> list[np.ndarray]:
        """Views (B, heads, length, D), side by side in the rows of one buffer (B, length, sum of heads · D, or row bytes)."""
        case = self.case
        buffer = self.empty((case.B, length, max(sum(heads) * case.D, row // case.itemsize)))
        buffer[...] = 0
        if generator is not None:
            generator.standard_normal(out=buffer, dtype=buffer.dtype.type)
        return side_by_side(buffer, heads, case.D)

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array where NumPy puts it, with a `place` at any multiple of 16 bytes within two pages from there, or on a line."""
        if self.places is None and not self.on_lines:
            return np.empty(shape, self.case.dtype)
        size, room = math.prod(shape) * self.case.itemsize, np.empty(math.prod(shape) * self.case.itemsize + 8192, np.uint8)
        start = -room.ctypes.data % LINE if self.places is None else int(self.places.integers(512)) * 16
        return room[start:start + size].view(self.case.dtype).reshape(shape)

    def results(self, direction: str) -> dict[str, np.ndarray]:
        """The arrays that an arm writes, by name."""
        if direction == "forward":
            return {"out": self.out, "lse": self.lse}
        return {"grad_q": self.grad_q, "grad_k": self.grad_k, "grad_v": self.grad_v}


def arms(operands: Operands, direction: str, num_threads: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name; each call computes the whole case and writes into the results of `operands`."""
    o, name = operands, operands.case.algorithm

    heads = (o.k, o.v) if direction == "forward" else (o.k, o.v, o.q, o.grad_out)
    copies = [o.empty(x.shape) for x in heads]
    k, v, q, grad_out = (*copies, o.q, o.grad_out) if direction == "forward" else copies
    packed = o.problem.with_heads(q, k, v)

    def pack() -> None:
        for x, copy in zip(heads, copies):
            _core.pack_heads(x, copy, num_threads)

    def kernel(problem: algorithms.Problem, grad_out: np.ndarray) -> None:
        if direction == "forward":
            algorithms.forward(name, problem, o.out, o.lse, None, num_threads)
        else:
            algorithms.backward(name, problem, o.out, o.lse, grad_out, o.grad_q, o.grad_k, o.grad_v, num_threads)

    def contiguous() -> None:
        pack()
        kernel(packed, grad_out)

    pack()
    return {"strided": lambda: kernel(o.problem, o.grad_out), "contiguous": contiguous,
            "packed": lambda: kernel(packed, grad_out), "pack": pack}


def checked_arms(operands: Operands, direction: str, num_threads: int) -> Arms:
    """The arms, once those that compute have given the same answer."""
    results = dict.fromkeys(("strided", "contiguous", "packed"), operands.results(direction))
    case = operands.case
    return checked(f"{case.name} {direction}", arms(operands, direction, num_threads), results, case.dtype)


def trial(run: Run, num_threads: int, seconds: float) -> Trial:
    case, direction, count = run.case, run.direction, run.threads or num_threads
    flops = case.flops(direction)
    places = itertools.count()
    measure = timed(
        lambda: checked_arms(Operands(case, count, next(places)), direction, count),
        [("strided", "contiguous"), ("strided", "packed"), ("pack", "contiguous")], cold=run.cold, places=PLACES,
        flops=flops, bytes=case.operand_bytes(direction), packed_bytes=case.packed_bytes(direction), row_bytes=case.row_bytes)
    return Trial(NAME, f"{case.name} {direction} {count}T{' cold' * run.cold}",
                 {**asdict(case), "direction": direction, "threads": count, "cold": run.cold}, measure, seconds, 3 * flops,
                 {**case.least(direction, 3 * LEAST_CALLS, count), "fresh": 4 * case.operand_bytes(direction)})


def trials(quick: bool, num_threads: int) -> list[Trial]:
    runs, seconds = (cases.quick(), QUICK_SECONDS) if quick else (cases.full(), FULL_SECONDS)
    return [trial(run, num_threads, seconds) for run in runs]


def answer(records: Sequence[Record], found: Found) -> Answer:
    long = [r for r in records if r["factors"]["algorithm"] != "decode"]
    grid = [r for r in of(long, threads=found["threads"], cold=False, causal=False, dtype="float32") if in_map(r)]
    tables = [_map_table(grid, name) for name in ("tiled", "blas") if len(_axes(of(grid, algorithm=name))[0]) > 2]
    mapped, maps = set(), []
    if tables:
        mapped = {r["label"] for r in grid}
        maps = [_map_picture(grid, "contiguous", "packing included"), _map_picture(grid, "packed", "packing not included")]
    title = "One factor at a time, and decode" if tables else "Cases"
    tables.append(table(title, [r for r in records if r["label"] not in mapped], {
        "case": lambda r: r["label"], "strided": rate_of("strided", digits=1), "contiguous": rate_of("contiguous", digits=1),
        "strided / contiguous": ratio_of("strided/contiguous"), "strided / packed": ratio_of("strided/packed"),
        "pack": lambda r: f"{r['ratios']['pack/contiguous']['median']:.0%}"},
        "GFLOP/s at the median time; ratios of times within a round with half their intervals, = where there is no difference: "
        "above 1 contiguous is faster; pack: share of the contiguous arm's time that packing takes. T: threads."))
    points = [{"group": f"{r['factors']['algorithm']}, {r['factors']['direction']}", "dtype": r["factors"]["dtype"],
               "intensity": r["flops"] / r["bytes"], "rate": r["flops"] / r["arms"]["strided"]["median"]}
              for r in of(records, threads=max(r["factors"]["threads"] for r in records))]
    roofline = Picture("roofline", "All cases with all threads, strided heads, beside what the machine can do at best.",
                       "roofline", {"title": "Operations per second over operations per byte", "points": points})
    return Answer(_short(long, of(records, algorithm="decode")), " ".join(_METHOD.split()), " ".join(_LIMITS.split()), tables,
                  [*maps, *_bars(long, found), roofline])


_METHOD = """
Operands lie as a fused projection writes them. Four arms on the same data: "strided", the kernels on the heads where they lie;
"contiguous", heads packed by a blocked copy and then the same kernels; "packed", the kernels on heads packed beforehand; "pack",
the copies alone, into memory that is kept from call to call. Forward keys and values are packed (the kernels read each query
once, into a block of their own), backward also queries and the output's gradient. The answers of the arms are compared before
anything is timed; then rounds of all arms in turning order; medians, with bootstrap intervals of 95 %. Where there is time,
operands are made anew up to five times, at other addresses, and the intervals hold that variation too. A call of less than 10 ms
runs once untimed before each timed one, so that its operands are in the caches; in the cases named cold, 64 MiB or more are
written through before each call instead."""
_LIMITS = """
One machine, its neighbours unknown. Where the memory of the copies is asked for anew in each call, packing may cost page faults
as well. "decode" reads each key once, so that packing for one call can only lose; what it gains from heads that are packed
already is the question of the cache. From length 2048 on the map holds a quarter of the heads of its row, which changes neither
stride nor work per head."""


def _short(long: Sequence[Record], decode: Sequence[Record]) -> str:
    times = span_text(r["median"] for r in ratios(decode, "strided/packed")) if decode else ""
    said = [f'"decode" on strided keys takes {times} of its time on contiguous ones.'] if decode else []
    if long:
        included, kernel = ratios(long, "strided/contiguous"), ratios(long, "strided/packed")
        (contiguous, strided), (faster, slower) = sides(included), sides(kernel)
        most, gain = max(((r["label"], ratio["median"]) for r, ratio in zip(long, included)), key=lambda pair: pair[1])
        said.insert(0, (
            f"Where heads must be packed first, leaving them strided is faster in {strided} of {len(long)} cases, packing in "
            f"{contiguous}, and {len(long) - strided - contiguous} show no difference (geometric mean of strided over contiguous "
            f"{mean_text(included)}); packing gains most in {most}, {gain:.2f}. The kernels alone are faster on contiguous heads "
            f"in {faster} cases, slower in {slower} (geometric mean {mean_text(kernel)}): it is the copy that costs, and short "
            "sequences cannot earn it back."))
    return " ".join(said)


def in_map(r: Record) -> bool:
    f = r["factors"]
    case = cases.length_by_width(f["Lq"], f["D"])
    return f["B"] == 1 and f["Lq"] == f["Lk"] and (case.H, case.Hkv, case.row) == (f["H"], f["Hkv"], f["row"])


def _axes(grid: Sequence[Record]) -> tuple[list[int], list[int]]:
    return sorted({r["factors"]["Lq"] for r in grid}), sorted({r["factors"]["D"] for r in grid})


def _map_table(grid: Sequence[Record], algorithm: str) -> Table:
    lengths, widths = _axes(of(grid, algorithm=algorithm))
    columns = [(direction, D) for direction in DIRECTIONS for D in widths]
    rows = [[str(L), *("".join(
        f"{median_text(r['ratios']['strided/contiguous'])} | {median_text(r['ratios']['strided/packed'])}"
        for r in of(grid, algorithm=algorithm, direction=direction, Lq=L, D=D)) for direction, D in columns)] for L in lengths]
    return Table(f'Length by width, "{algorithm}", rows of d_model 1024', (
        "L", *(f"{direction} D {D}" for direction, D in columns)), rows,
        "time strided / contiguous, packing included | strided / packed, packing not included; above 1 contiguous heads are "
        "faster; = no difference beyond the interval")


def _map_picture(grid: Sequence[Record], arm: str, what: str) -> Picture:
    panels = []
    lengths, widths = _axes(grid)
    for algorithm, direction in itertools.product(("tiled", "blas"), DIRECTIONS):
        cells = {(r["factors"]["Lq"], r["factors"]["D"]): r["ratios"][f"strided/{arm}"]
                 for r in of(grid, algorithm=algorithm, direction=direction)}
        measured = [[cells.get((L, D)) for D in widths] for L in lengths]
        panels.append({"title": f"{algorithm}, {direction}", "columns": list(map(str, widths)), "rows": list(map(str, lengths)),
                       "values": [[q and q["median"] for q in row] for row in measured],
                       "texts": [["" if q is None else median_text(q) for q in row] for row in measured]})
    caption = f"Above 1 contiguous heads are faster, {what}; = no difference beyond the interval."
    return Picture(f"strided_over_{arm}", caption, "heat_maps", {
        "title": f"Time on strided heads over time on contiguous ones, {what}", "panels": panels,
        "x": "D, width of a head (items)", "y": "L, queries and keys", "shade": "time strided / time contiguous (no unit)"})


def _bars(long: Sequence[Record], found: Found) -> list[Picture]:
    shown = of(long, algorithm="tiled", direction="forward", threads=found["threads"], dtype="float32", causal=False, cold=False,
               D=64)
    shown = sorted((r for r in shown if r["factors"]["Lq"] == r["factors"]["Lk"]), key=lambda r: (r["factors"]["Lq"], r["label"]))
    bars = []
    for r in shown:
        whole = r["arms"]["strided"]["median"]
        pack = r["ratios"]["pack/contiguous"]["median"] * r["arms"]["contiguous"]["median"] / whole
        label = r["label"].removesuffix(f" f32 tiled forward {found['threads']}T")
        kernel = r["arms"]["contiguous"]["median"] / whole - pack
        bars += [{"label": "strided", "group": label, "parts": [{"name": "kernel", "value": 1.0}]},
                 {"label": "contiguous", "group": label, "parts": [{"name": "kernel", "value": kernel},
                                                                   {"name": "pack", "value": pack}]}]
    return [Picture("pack_and_kernel", "What packing costs, and what it gains in the kernel.", "stacked_bars", {
        "title": 'Packing and kernel, "tiled", forward, float32, D 64', "bars": bars, "reference": 1.0,
        "x": "time / time of the strided arm (no unit)"})] if bars else []


QUESTION = Question(
    NAME, "Strided or contiguous heads",
    "Heads as the fused projection writes them, (B, L, H, D), or packed first, (B, H, L, D): which is faster, for which shapes, "
    "and by how much?", trials, answer)
