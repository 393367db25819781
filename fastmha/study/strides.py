"""The stride of the fused row: where it is a multiple of 4096 bytes, and a cache line more or less.

The work of all arms of a trial is the same: heads with the same numbers, at rows that lie further apart or closer. Arms:

    packed          each head contiguous, the control
    row             q, k, v side by side in rows of the stride, a multiple of 4096 bytes; gradients in rows of the same stride
    row+64, row-64  the same rows, a cache line (64 bytes) further apart or closer
    3072, 3136, …   rows of that stride, in the finer sweeps

The output lies merged, in rows of H·D, in all arms. Memory begins at a page and is asked for in huge pages, whatever the
stride, because buffers of other sizes would otherwise lie in pages of other sizes; arms "…, 4 KiB pages" ask for the opposite.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fastmha import algorithms, validate
from fastmha.study import cases
from fastmha.study.answer import Answer, Found, Picture, Record, Table, geomean, of, ratio_text, times_text
from fastmha.study.cases import Case
from fastmha.study.heads import least
from fastmha.study.machine import geometry, memory
from fastmha.study.trial import LEAST_CALLS, TOLERANCE, Arms, Trial, agree, timed

NAME = "strides"
TITLE = "Power-of-two strides and padding"
QUESTION = ("Where do cache sets and TLB pages alias when the rows of the heads lie a multiple of 4096 bytes apart, and how much "
            "does padding the row by one cache line give back?")
NEEDS: tuple[str, ...] = ()
LINE = 64       # bytes
MULTIPLES, QUICK_MULTIPLES = (4096, 8192, 12288, 16384, 24576, 32768, 49152), (4096, 8192, 12288, 32768)
CENTRES = (8192, 12288)                                     # of the finer sweeps
AROUND = (-512, -256, -192, -128, -64, 0, 64, 128, 192, 256, 512)
BETWEEN = (3072, 3584, 4608, 5120, 6144, 7168, 9216, 10240, 14336, 20480)      # of the coarse one; 3072 is q, k, v and no gap
SMALL_PAGES = ", 4 KiB pages"
ALGORITHMS, LENGTHS = ("tiled", "blas"), (512, 1024)
PADDING = "row/row+64"


# ---------------------------------------------------------------------------------------------- operands

def three(case: Case, row: int, huge: bool = True) -> list[np.ndarray]:
    """Three views (1, H, L, D) in one memory: side by side in rows of `row` bytes, or each contiguous where that is 0."""
    width = case.H * case.D
    if row == 0:
        found = memory(3 * case.Lq * width * case.itemsize, huge).view(case.dtype)
        return list(found.reshape(3, 1, case.H, case.Lq, case.D))
    rows = memory(case.Lq * row, huge).view(case.dtype).reshape(case.Lq, row // case.itemsize)
    return [rows[:, i * width:(i + 1) * width].reshape(case.Lq, case.H, case.D).transpose(1, 0, 2)[None] for i in range(3)]


@dataclass(frozen=True)
class Place:
    """Where the heads of an arm lie: rows of `row` bytes, 0 for packed."""

    row: int
    huge: bool = True


def prepare(case: Case, direction: str, places: Mapping[str, Place], num_threads: int) -> Arms:
    """The arms by name, once their answers have been compared."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal((3, 1, case.H, case.Lq, case.D), np.dtype(case.dtype).type)
    merged = (case.Lq, case.H, case.D)
    grad_out = generator.standard_normal(merged, values.dtype.type).transpose(1, 0, 2)[None]
    out, lse = np.empty(merged, values.dtype).transpose(1, 0, 2)[None], np.empty((1, case.H, case.Lq), values.dtype)

    def arm(place: Place) -> tuple[Callable[[], None], dict[str, np.ndarray]]:
        q, k, v = three(case, place.row, place.huge)
        for x, value in zip((q, k, v), values):
            x[...] = value
        problem = validate.attention_problem(q, k, v, "BHLD")

        def forward() -> None:
            algorithms.forward(case.algorithm, problem, out, lse, None, num_threads)

        if direction == "forward":
            return forward, {"out": out, "lse": lse}
        grad_q, grad_k, grad_v = three(case, place.row, place.huge)
        forward()       # backward reads its out and lse
        return (lambda: algorithms.backward(case.algorithm, problem, out, lse, grad_out, grad_q, grad_k, grad_v, num_threads),
                {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v})

    functions, answers = {}, {}
    for name, place in places.items():
        functions[name], results = arm(place)
        for array in results.values():
            array[...] = np.nan         # what an arm leaves out shows
        functions[name]()
        answers[name] = {key: array.copy() for key, array in results.items()}
    agree(f"{case.name} {direction}", answers, TOLERANCE[case.dtype])
    return functions


def sets_of_starts(row: int, sets: int) -> int:
    """In how many of the sets of a cache rows start that lie `row` bytes, whole lines, apart."""
    return sets // math.gcd(row // LINE, sets)


# ---------------------------------------------------------------------------------------------- trials

BASE = cases.case(1, 4, 512, 64)       # q, k, v take 3072 bytes of a row, so that rows of 4096 are possible


def _trial(kind: str, case: Case, direction: str, places: Mapping[str, Place], ratios: Sequence[tuple[str, str]], threads: int,
           seconds: float, what: str, **factors: Any) -> Trial:
    flops = case.flops(direction)
    measure = timed(lambda: prepare(case, direction, places, threads), ratios, flops=flops, caches=geometry())
    work = {**least(case, direction, LEAST_CALLS * len(places), threads),
            "fresh": sum(case.Lq * place.row for place in places.values())}
    return Trial(NAME, f"{kind} {case.name} {direction} {threads}T {what}",
                 {"kind": kind, **asdict(case), "direction": direction, "threads": threads, **factors}, measure, seconds,
                 len(places) * flops, work)


def padding(case: Case, direction: str, multiple: int, threads: int, seconds: float) -> Trial:
    """Rows of a multiple of 4096 bytes, and a line more and less."""
    places = {"packed": Place(0), "row": Place(multiple), "row+64": Place(multiple + LINE), "row-64": Place(multiple - LINE)}
    ratios = [("row", "row+64"), ("row", "row-64"), ("row", "packed"), ("row+64", "packed"), ("row-64", "packed")]
    return _trial("padding", case, direction, places, ratios, threads, seconds, f"row{multiple}", multiple=multiple)


def sweep(case: Case, strides: Sequence[int], threads: int, seconds: float, around: int) -> Trial:
    """Many strides; `around`: the one in their middle, 0 where they lie between the multiples."""
    places = {"packed": Place(0), **{str(row): Place(row) for row in strides}}
    return _trial("sweep", case, "forward", places, [(str(row), "packed") for row in strides], threads, seconds,
                  f"around {around}" if around else "between", around=around, strides=list(strides))


def pages(case: Case, multiple: int, threads: int, seconds: float) -> Trial:
    """The same rows in huge pages and in small ones."""
    rows = {"packed": 0, "row": multiple, "row+64": multiple + LINE}
    places = {name + ending: Place(row, not ending) for ending in ("", SMALL_PAGES) for name, row in rows.items()}
    ratios = [*((name + SMALL_PAGES, name) for name in rows), ("row", "row+64"), ("row" + SMALL_PAGES, "row+64" + SMALL_PAGES)]
    return _trial("pages", case, "forward", places, ratios, threads, seconds, f"row{multiple}", multiple=multiple)


def trials(quick: bool, num_threads: int) -> list[Trial]:
    """The trials of the quick or the full study with so many threads."""
    series = [replace(BASE, Lq=L, Lk=L, algorithm=name) for L in LENGTHS for name in ALGORITHMS]
    if quick:
        return [*(padding(case, "forward", multiple, num_threads, 0.2) for case in series for multiple in QUICK_MULTIPLES),
                *(sweep(case, (3072, *(8192 + step for step in AROUND)), num_threads, 0.4, 8192) for case in series),
                *(pages(case, 8192, num_threads, 0.4) for case in series[-2:])]
    short = series[:len(ALGORITHMS)]
    others = [(replace(case, **change), direction, threads) for case in short for change, direction, threads in (
        ({}, "backward", num_threads), ({"H": 8, "Hkv": 8, "D": 32}, "forward", num_threads),
        ({"H": 2, "Hkv": 2, "dtype": "float64"}, "forward", num_threads), ({}, "forward", 1))]
    found = [
        *(padding(case, "forward", multiple, num_threads, 1.2) for case in series for multiple in MULTIPLES),
        *(padding(case, direction, multiple, threads, 0.7) for case, direction, threads in others for multiple in MULTIPLES),
        *(sweep(case, [centre + step for step in AROUND], num_threads, 2.5, centre) for case in series for centre in CENTRES),
        *(sweep(case, BETWEEN, num_threads, 1.5, 0) for case in series),
        *(pages(case, multiple, num_threads, 1.5) for case in series[-2:] for multiple in (4096, 8192, 32768)),
    ]
    return list({t.label: t for t in found}.values())      # with one thread, "one" and "all" are the same


# ---------------------------------------------------------------------------------------------- answer

def _series(record: Record) -> str:
    return f"{record['factors']['algorithm']} L{record['factors']['Lq']}"


def _variation(record: Record) -> str:
    f = record["factors"]
    return f"{_series(record)} H{f['H']} D{f['D']} {f['dtype']} {f['direction']} {f['threads']}T"


def _is_base(record: Record, threads: int) -> bool:
    f = record["factors"]
    return (f["direction"], f["dtype"], f["D"], f["threads"]) == ("forward", BASE.dtype, BASE.D, threads)


def _sets_text(caches: Mapping[str, Mapping[str, int]]) -> str:
    """What strides do in the caches whose geometry is known."""
    found = []
    for name, cache in caches.items():
        ways, sets = cache["ways"], cache["sets"]
        if sets & (sets - 1) or name == "L3":       # shared, and hashed in most CPUs
            continue
        starts = ", ".join(f"{sets_of_starts(row, sets)} at {row} bytes" for row in (4096, 32768, 4096 + LINE))
        found.append(f"{name} has {sets} sets of {ways} lines: rows start in {starts}. ")
    return "".join(found)


def _short(base: Sequence[Record], paged: Sequence[Record]) -> str:
    helped = [r for r in base if r["ratios"][PADDING]["low"] > 1]
    if helped:
        most = max(helped, key=lambda r: r["ratios"][PADDING]["median"])
        worst = most["ratios"][PADDING]
        first = (f"time back in {len(helped)} of {len(base)} cases, at most {100 * (1 - 1 / worst['median']):.0f} % "
                 f"({_series(most)}, {most['factors']['multiple']} bytes: {ratio_text(worst)})")
    else:
        first = f"no measurable time back in any of {len(base)} cases"
    sentences = [f"Padding a row of a multiple of 4096 bytes by one cache line gives {first}."]
    own = {name: of(base, algorithm=name) for name in ALGORITHMS}
    text = ", ".join(f'"{name}" {times_text(r["ratios"][PADDING] for r in records)}' for name, records in own.items() if records)
    sentences.append(f"Time of such rows over padded ones: {text}.")
    text = ", ".join(f'"{name}" {_mean(records, "row/packed")}, padded {_mean(records, "row+64/packed")}'
                     for name, records in own.items() if records)
    sentences.append(f"Over packed heads, on average: {text}.")
    if paged:
        text = ", ".join(f"{name} {_mean(paged, f'{name}{SMALL_PAGES}/{name}')}" for name in ("row", "row+64", "packed"))
        sentences.append(f"Time in 4 KiB pages over huge ones, where TLB entries would tell, on average: {text}.")
    return " ".join(sentences)


def _mean(records: Iterable[Record], ratio: str) -> str:
    return f"{geomean(r['ratios'][ratio]['median'] for r in records):.2f}"


def answer(found: Found) -> Answer | None:
    """What strides cost; None without records of rows at a multiple of 4096 bytes."""
    records = [r for r in found["records"] if r["question"] == NAME]
    padded, sweeps, paged = (of(records, kind=kind) for kind in ("padding", "sweep", "pages"))
    base = [r for r in padded if _is_base(r, found["threads"])]
    if not base:
        return None
    caches = base[0].get("caches", {})
    tables = [_padding_table(base, caches), _packed_table(base)]
    others = [r for r in padded if r not in base]
    if others:
        tables.append(_others_table(others))
    if paged:
        tables.append(_pages_table(paged))
    method = (
        f"{BASE.H} heads of width {BASE.D} in float32 (the full study also 8 of 32, and 2 of 64 in float64), one batch row; q, k "
        "and v side by side in the first 3072 bytes of each row, and only the distance of the rows changes. \"packed\" is each "
        "head contiguous. The output is merged and the same in all arms; backward, the gradients lie at the stride of the "
        "operands. Memory begins at a page and is asked for in huge pages. Means are geometric. A row that is a multiple of 4096 "
        "bytes leaves the lowest 12 bits of an address as they are, and these choose the set of a first-level cache of 64 sets "
        "of 64 bytes: all rows of a head meet in the few sets of one row, and no more rows are held than a set has ways. A line "
        f"more a row spreads them over all sets. {_sets_text(caches)}A TLB entry serves a page: from 4096 bytes on each row "
        "lies on a 4 KiB page of its own or more, padded or not, so that 64 rows need 64 entries or more; in huge pages of 2 MiB "
        "they need a few.")
    limits = (
        "Operands are as warm as the other arms of a round leave them. A second-level cache is indexed by physical addresses: in "
        "4 KiB pages its sets follow from where the system put the pages, which differs from run to run. Huge pages are asked "
        "for; whether the system gave them is not checked. What is left between padded and packed rows is pages and prefetching "
        "together; counters that would tell them apart are not read. One interval in twenty leaves out 1 by chance.")
    pictures = [_picture("strides", "The time over that of packed heads, by the stride of the rows.", base, [*padded, *sweeps],
                         None, found["threads"])]
    for centre in sorted({r["factors"]["around"] for r in sweeps} - {0}):
        pictures.append(_picture(f"strides-{centre}", f"The same around {centre} bytes, in steps of a few cache lines.", base,
                                 of(sweeps, around=centre), centre, found["threads"]))
    return Answer(_short(base, paged), method, limits, tables, pictures)


def _cell(records: Sequence[Record], ratio: str, **factors: Any) -> str:
    found = of(records, **factors)
    return ratio_text(found[0]["ratios"][ratio]) if found else ""


def _columns(records: Sequence[Record]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((r["factors"]["algorithm"], r["factors"]["Lq"]) for r in records))


def _multiples(records: Sequence[Record]) -> list[int]:
    return sorted({r["factors"]["multiple"] for r in records})


def _padding_table(base: Sequence[Record], caches: Mapping[str, Mapping[str, int]]) -> Table:
    columns, known = _columns(base), [name for name in ("L1d", "L2") if name in caches]
    rows = [[str(multiple),
             *(f"{sets_of_starts(multiple, caches[name]['sets'])} of {caches[name]['sets']}" for name in known),
             *(_cell(base, PADDING, algorithm=name, Lq=L, multiple=multiple) for name, L in columns)]
            for multiple in _multiples(base)]
    heading = ["row, bytes", *(f"{name} sets" for name in known), *(f"{name} L{L}" for name, L in columns)]
    return Table("What a cache line of padding gives back", heading, rows,
                 'Time at this stride over time at 64 bytes more; "sets": in how many of its sets the rows of a head start.')


def _packed_table(base: Sequence[Record]) -> Table:
    columns = _columns(base)
    rows = [[str(multiple + step),
             *(_cell(base, f"{arm}/packed", algorithm=name, Lq=L, multiple=multiple) for name, L in columns)]
            for multiple in _multiples(base) for arm, step in (("row-64", -LINE), ("row", 0), ("row+64", LINE))]
    return Table("Rows of a stride against packed heads", ["row, bytes", *(f"{name} L{L}" for name, L in columns)], rows,
                 "Time over that of packed heads; forward, float32.")


def _others_table(others: Sequence[Record]) -> Table:
    multiples = _multiples(others)
    names = list(dict.fromkeys(_variation(r) for r in others))
    rows = [[name, *(_cell([r for r in others if _variation(r) == name], PADDING, multiple=multiple) for multiple in multiples)]
            for name in names]
    return Table("The same for other work", ["case", *map(str, multiples)], rows,
                 "Time at the stride in the heading, bytes, over time at 64 bytes more.")


def _pages_table(paged: Sequence[Record]) -> Table:
    arms = ("row", "row+64", "packed")
    rows = [[f"{_series(r)} row {r['factors']['multiple']}",
             *(ratio_text(r["ratios"][f"{arm}{SMALL_PAGES}/{arm}"]) for arm in arms),
             ratio_text(r["ratios"][PADDING]), ratio_text(r["ratios"][f"row{SMALL_PAGES}/row+64{SMALL_PAGES}"])] for r in paged]
    return Table("4 KiB pages against huge ones", ["case", *arms, "row/row+64, huge", "row/row+64, 4 KiB"], rows,
                 "Time in 4 KiB pages over time in huge pages; right: what padding gives back in either.")


def _picture(name: str, caption: str, base: Sequence[Record], records: Iterable[Record], centre: int | None,
             threads: int) -> Picture:
    points: dict[str, dict[int, Mapping[str, float]]] = {}
    for r in (r for r in records if _is_base(r, threads)):
        at = points.setdefault(_series(r), {})
        for ratio, value in r["ratios"].items():
            arm, _, control = ratio.partition("/")
            if control == "packed":
                row = int(arm) if arm.isdigit() else r["factors"]["multiple"] + int(arm.removeprefix("row") or 0)
                at.setdefault(row, value)
    series = [{"name": key, "x": sorted(at), "y": [at[x]["median"] for x in sorted(at)],
               "low": [at[x]["low"] for x in sorted(at)], "high": [at[x]["high"] for x in sorted(at)]}
              for key, at in points.items()]
    marks = [(row, str(row)) for row in _multiples(base)] if centre is None else [(centre, str(centre))]
    return Picture(name, caption, "lines", {
        "title": "Time over packed heads, by the stride of the rows", "x": "bytes from one row to the next",
        "y": "time / time of packed heads", "x_log2": centre is None,
        "panels": [{"title": "forward, float32, 4 heads of width 64", "series": series, "reference": 1.0, "marks": marks}]})
