"""From which length on packing pays, and a model of it.

Packing costs a copy of every packed byte. It gains at every visit that a block of queries pays to a row of keys or values:
rows that are a page or more apart cannot be fetched ahead across pages, ask for a translation each and compete for few cache
sets. So for times over threads::

    strided - contiguous = latency · visits - bytes / bandwidth

with one latency for each algorithm and direction, and one bandwidth. Rows that are less than a page apart count as that part
of a visit. Both sides grow with the number of heads, the first with L², the second with L · D: they meet at a length that
grows with D and with nothing else.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from fastmha import _core
from fastmha.algorithms import blas_rows
from fastmha.study import heads
from fastmha.study.answer import Answer, Found, Question, Record, Table, lines, of, ratios, spread
from fastmha.study.cases import DIRECTIONS, Case
from fastmha.study.trial import differs

NAME = "crossover"
PAGE = 4096
GROUPS = tuple((name, direction) for name in ("tiled", "blas") for direction in DIRECTIONS)


def visits(case: Case) -> float:
    """Rows of k and v that blocks of queries read where they lie, as if each were a page away from the last."""
    tiled = case.algorithm == "tiled"
    rows = _core.tile_sizes()[0] if tiled else blas_rows(case.Lq, case.Lk, case.itemsize)
    stacked, of_heads = (case.Lq * (case.H // case.Hkv), case.Hkv) if tiled else (case.Lq, case.H)
    blocks = max(1.0, stacked / rows) * case.pairs / max(1, case.Lq * case.Lk)
    return case.B * of_heads * 2 * case.Lk * blocks * min(1.0, case.row_bytes / PAGE)


def terms(record: Record) -> np.ndarray:
    """What the latencies of `GROUPS` and the inverse bandwidth are multiplied with, over the time of the strided arm: the model
    of 1 - contiguous / strided is linear in them."""
    f = record["factors"]
    case = Case(**{name: f[name] for name in Case.__dataclass_fields__})
    row = np.zeros(len(GROUPS) + 1)
    row[GROUPS.index((f["algorithm"], f["direction"]))] = visits(case)
    row[-1] = -record["packed_bytes"]
    return row / f["threads"] / record["arms"]["strided"]["median"]


def gain(record: Record) -> float:
    """The share of the strided arm's time that packing saves; negative where it costs."""
    return 1 - 1 / float(record["ratios"]["strided/contiguous"]["median"])


def usable(records: Sequence[Record]) -> list[Record]:
    """The records of `heads` that the model is about, in a fixed order that mixes them."""
    records = [r for r in records if (r["factors"]["algorithm"], r["factors"]["direction"]) in GROUPS
               and not r["factors"]["cold"] and r["factors"]["Lq"] == r["factors"]["Lk"]]
    return [records[i] for i in np.random.default_rng(0).permutation(len(records))]


def fit(records: Sequence[Record]) -> np.ndarray:
    """Seconds a visit by group, and seconds per byte: least squares without negative ones."""
    return nnls(np.array([terms(r) for r in records]), np.array([gain(r) for r in records]))[0]


def errors(records: Sequence[Record], solution: np.ndarray) -> dict[str, Any]:
    """How the model does on records: the median and the 90th percentile of |predicted - measured| gain, and how many of the
    clear winners it names."""
    predicted, measured = np.array([terms(r) @ solution for r in records]), np.array([gain(r) for r in records])
    wrong = np.abs(predicted - measured)
    clear = np.array([differs(r["ratios"]["strided/contiguous"]) for r in records], bool)
    right = (predicted > 0) == (measured > 0)
    return {"cases": len(records), "median": float(np.median(wrong)), "high": float(np.quantile(wrong, 0.9)),
            "clear": int(clear.sum()), "named": int((clear & right).sum())}


def crossing(solution: np.ndarray, name: str, direction: str, D: int) -> float:
    """The length at which the model's two terms are equal, for float32 heads of the map of `heads`; inf: never."""
    latency = solution[GROUPS.index((name, direction))]
    for L in range(16, 65536, 16):
        case = Case(1, 1, 1, L, L, D, algorithm=name, row=3 * 1024 * 4)
        if latency * visits(case) > solution[-1] * case.packed_bytes(direction):
            return float(L)
    return np.inf


def measured_crossing(records: Sequence[Record], name: str, direction: str, D: int) -> tuple[float, float] | None:
    """The lengths between which the ratio of the map first passes 1 for good: (last below, first above); None without both."""
    line = sorted((r["factors"]["Lq"], r["ratios"]["strided/contiguous"]["median"]) for r in records
                  if r["factors"]["algorithm"] == name and r["factors"]["direction"] == direction and r["factors"]["D"] == D)
    below = [L for L, ratio in line if ratio < 1]
    above = [L for L, ratio in line if ratio >= 1 and (not below or max(below) < L)]
    return (max(below), min(above)) if below and above else None


def answer(records: Sequence[Record], found: Found) -> Answer | None:
    """None where the records are few for so many terms."""
    mixed = usable(records)     # every other one is fitted
    if len(mixed) < 2 * (len(GROUPS) + 1):
        return None
    solution = fit(mixed[::2])
    error = {"fitted": errors(mixed[::2], solution), "tested": errors(mixed[1::2], solution)}
    e = error["tested"]
    grid = sorted(of(filter(heads.in_map, mixed), threads=found["threads"], dtype="float32", causal=False),
                  key=lambda r: r["factors"]["Lq"])
    widths = sorted({r["factors"]["D"] for r in grid})
    rows, panels, agreeing, known = [], [], 0, 0
    for name, direction in GROUPS:
        series: list[dict[str, Any]] = []
        for D in widths:
            line = of(grid, algorithm=name, direction=direction, D=D)
            x = [r["factors"]["Lq"] for r in line]
            if len(line) > 1:
                series += [spread(f"D {D}", x, ratios(line, "strided/contiguous")),
                           {"name": f"D {D}, model", "x": x, "y": [float(1 / (1 - terms(r) @ solution)) for r in line]}]
            between, at = measured_crossing(grid, name, direction, D), crossing(solution, name, direction, D)
            if between:
                known += 1
                agreeing += between[0] / 2 <= at <= between[1] * 2
            rows.append([f"{name} {direction} D {D}", f"{between[0]} – {between[1]}" if between else "none measured",
                         f"{at:.0f}" if np.isfinite(at) else "never"])
        panels.append({"title": f"{name}, {direction}", "series": series, "reference": 1.0})
    gains = ", ".join(f"{1e9 * seconds:.1f} ns a visit ({' '.join(group)})" for group, seconds in zip(GROUPS, solution))
    bandwidth = 1 / solution[-1] / 1e9 if solution[-1] else np.inf
    short = (f"Packing gains {gains} and costs a copy at {bandwidth:.1f} GB/s per thread. Fitted on {error['fitted']['cases']} "
             f"cases, the model errs on the {e['cases']} others by {e['median']:.3f} of the strided time (median; 90 %: "
             f"{e['high']:.3f}) and names {e['named']} of {e['clear']} clear winners. ")
    if known:
        short += f"It puts the crossover within a factor of two of the measured one in {agreeing} of {known} lines."
    halves = [[half, str(x["cases"]), f"{x['median']:.3f}", f"{x['high']:.3f}", f"{x['named']} of {x['clear']}"]
              for half, x in error.items()]
    tables = [Table("The model's error", ("cases", "number", "median error", "90 %", "clear winners named"), halves,
                    "error: |predicted - measured| of 1 - contiguous / strided, a share of the strided time; clear: the interval "
                    "leaves out 1"),
              Table("Crossover", ("heads of d_model 1024", "measured between L", "model"), rows,
                    "lengths; float32; measured: the neighbours on the map between which the ratio passes 1")]
    method = " ".join(__doc__.split("\n\n", 1)[1].replace("::", ":").split()) + (
        " The cases of `heads` with as many queries as keys, warm, are shuffled; every other one is fitted by least squares.")
    limits = ("The bandwidth is that of a blocked copy from and to whatever cache holds the operands: larger for short calls. "
              "Cache sets are not in the model: see the strides.")
    return Answer(short, method, limits, tables, lines(
        "crossover", "Where a line passes 1, packing begins to pay.", panels,
        title="Time strided over time contiguous, packing included, and the model of it", x="L, queries and keys",
        y="time strided / time contiguous (no unit)", x_log2=True))


QUESTION = Question(
    NAME, "The crossover, and a model of it", "From which length on does packing heads pay, and does that length follow a model?",
    lambda quick, num_threads: [],      # the model is one of the times of `heads`
    answer, needs=(heads.NAME,))
