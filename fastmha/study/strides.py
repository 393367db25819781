"""The stride of the fused row: where it is a multiple of 4096 bytes, and a cache line more or less.

Memory is asked for in huge pages, whatever the stride, because buffers of other sizes would otherwise lie in pages of other
sizes; arms "…, 4 KiB pages" ask for the opposite.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fastmha.study import cases, operands
from fastmha.study.answer import Answer, Found, Picture, Question, Record, Table, by, lines, of, ratios, spread, table
from fastmha.study.cases import Case
from fastmha.study.heads import LINE
from fastmha.study.machine import geometry
from fastmha.study.operands import Place
from fastmha.study.trial import LEAST_CALLS, Trial, timed
from fastmha.study.words import mean_text, ratio_of, ratio_text, times_text

NAME = "strides"
MULTIPLES, QUICK_MULTIPLES = (4096, 8192, 12288, 16384, 24576, 32768, 49152), (4096, 8192, 12288, 32768)
CENTRES = (8192, 12288)                                     # of the finer sweeps
AROUND = (-512, -256, -192, -128, -64, 0, 64, 128, 192, 256, 512)
BETWEEN = (3072, 3584, 4608, 5120, 6144, 7168, 9216, 10240, 14336, 20480)      # of the coarse one; 3072 is q, k, v and no gap
SMALL_PAGES = ", 4 KiB pages"
ALGORITHMS, LENGTHS = ("tiled", "blas"), (512, 1024)
PAGE = 4096
PADDING = "row/row+64"
BASE = cases.case(1, 4, 512, 64)       # q, k, v take 3072 bytes of a row, so that rows of 4096 are possible


def sets_of_starts(row: int, sets: int) -> int:
    """In how many of the sets of a cache rows start that lie `row` bytes, whole lines, apart."""
    return sets // math.gcd(row // LINE, sets)


def _trial(kind: str, case: Case, direction: str, places: Mapping[str, Place], ratios: Sequence[tuple[str, str]], threads: int,
           seconds: float, what: str, **factors: Any) -> Trial:
    flops = case.flops(direction)
    measure = timed(lambda: operands.attention_arms(case, direction, places, threads), ratios, flops=flops, caches=geometry())
    rows = [place.layout for place in places.values() if isinstance(place.layout, int)]
    work = {**case.least(direction, LEAST_CALLS * len(places), threads), "fresh": case.Lq * sum(rows)}
    return Trial(NAME, f"{kind} {case.name} {direction} {threads}T {what}",
                 {"kind": kind, **asdict(case), "direction": direction, "threads": threads, **factors}, measure, seconds,
                 len(places) * flops, work)


def padding(case: Case, direction: str, multiple: int, threads: int, seconds: float) -> Trial:
    """Rows of a multiple of 4096 bytes, and a line more and less."""
    rows = {"row": multiple, "row+64": multiple + LINE, "row-64": multiple - LINE}
    places = {"packed": Place("packed"), **{name: Place(row) for name, row in rows.items()}}
    ratios = [("row", "row+64"), ("row", "row-64"), ("row", "packed"), ("row+64", "packed"), ("row-64", "packed")]
    return _trial("padding", case, direction, places, ratios, threads, seconds, f"row{multiple}", multiple=multiple)


def sweep(case: Case, strides: Sequence[int], threads: int, seconds: float, around: int) -> Trial:
    """Many strides; `around`: the one in their middle, 0 where they lie between the multiples."""
    places = {"packed": Place("packed"), **{str(row): Place(row) for row in strides}}
    return _trial("sweep", case, "forward", places, [(str(row), "packed") for row in strides], threads, seconds,
                  f"around {around}" if around else "between", around=around, strides=list(strides))


def pages(case: Case, multiple: int, threads: int, seconds: float) -> Trial:
    """The same rows in huge pages and in small ones."""
    rows: dict[str, str | int] = {"packed": "packed", "row": multiple, "row+64": multiple + LINE}
    places = {name + ending: Place(row, not ending) for ending in ("", SMALL_PAGES) for name, row in rows.items()}
    ratios = [*((name + SMALL_PAGES, name) for name in rows), ("row", "row+64"), ("row" + SMALL_PAGES, "row+64" + SMALL_PAGES)]
    return _trial("pages", case, "forward", places, ratios, threads, seconds, f"row{multiple}", multiple=multiple)


def trials(quick: bool, num_threads: int) -> list[Trial]:
    series = [replace(BASE, Lq=L, Lk=L, algorithm=name) for L in LENGTHS for name in ALGORITHMS]
    if quick:
        return [*(padding(case, "forward", multiple, num_threads, 0.2) for case in series for multiple in QUICK_MULTIPLES),
                *(sweep(case, (3072, *(8192 + step for step in AROUND)), num_threads, 0.4, 8192) for case in series),
                *(pages(case, 8192, num_threads, 0.4) for case in series[-2:])]
    others = [(replace(case, **change), direction, threads) for case in series[:2] for change, direction, threads in (
        ({}, "backward", num_threads), ({"H": 8, "Hkv": 8, "D": 32}, "forward", num_threads),
        ({"H": 2, "Hkv": 2, "dtype": "float64"}, "forward", num_threads), ({}, "forward", 1))]
    return [
        *(padding(case, "forward", multiple, num_threads, 1.2) for case in series for multiple in MULTIPLES),
        *(padding(case, direction, multiple, threads, 0.7) for case, direction, threads in others for multiple in MULTIPLES),
        *(sweep(case, [centre + step for step in AROUND], num_threads, 2.5, centre) for case in series for centre in CENTRES),
        *(sweep(case, BETWEEN, num_threads, 1.5, 0) for case in series),
        *(pages(case, multiple, num_threads, 1.5) for case in series[-2:] for multiple in (4096, 8192, 32768)),
    ]


def _series(record: Record) -> str:
    return f"{record['factors']['algorithm']} L{record['factors']['Lq']}"


def _base(records: Iterable[Record], found: Found) -> list[Record]:
    return of(records, direction="forward", dtype=BASE.dtype, D=BASE.D, threads=found["threads"])


def _sets_text(caches: Mapping[str, Mapping[str, int]]) -> str:
    """What strides do in the caches whose geometry is known; the third level is shared, and hashed in most CPUs."""
    found = []
    for name, cache in caches.items():
        ways, sets = cache["ways"], cache["sets"]
        if not sets & (sets - 1) and name != "L3":
            starts = ", ".join(f"{sets_of_starts(row, sets)} at {row} bytes" for row in (4096, 32768, 4096 + LINE))
            found.append(f"{name} has {sets} sets of {ways} lines: rows start in {starts}. ")
    return "".join(found)


def _short(base: Sequence[Record], paged: Sequence[Record]) -> str:
    helped = [r for r in base if r["ratios"][PADDING]["low"] > 1]
    first = f"no measurable time back in any of {len(base)} cases"
    if helped:
        most = max(helped, key=lambda r: r["ratios"][PADDING]["median"])
        worst = most["ratios"][PADDING]
        first = (f"time back in {len(helped)} of {len(base)} cases, at most {100 * (1 - 1 / worst['median']):.0f} % "
                 f"({_series(most)}, {most['factors']['multiple']} bytes: {ratio_text(worst)})")
    own = [(name, records) for name in ALGORITHMS if (records := of(base, algorithm=name))]
    times = ", ".join(f'"{name}" {times_text(ratios(records, PADDING))}' for name, records in own)
    means = ", ".join(f'"{name}" {mean_text(ratios(records, "row/packed"))}, padded {mean_text(ratios(records, "row+64/packed"))}'
                      for name, records in own)
    said = (f"Padding a row of a multiple of 4096 bytes by one cache line gives {first}. Time of such rows over padded ones: "
            f"{times}. Over packed heads, on average: {means}.")
    if not paged:
        return said
    means = ", ".join(f"{name} {mean_text(ratios(paged, f'{name}{SMALL_PAGES}/{name}'))}" for name in ("row", "row+64", "packed"))
    return f"{said} Time in 4 KiB pages over huge ones, where TLB entries would tell, on average: {means}."


def answer(records: Sequence[Record], found: Found) -> Answer | None:
    """What strides cost; None without records of rows at a multiple of 4096 bytes."""
    padded, paged = of(records, kind="padding"), of(records, kind="pages")
    base = _base(padded, found)
    if not base:
        return None
    caches = base[0].get("caches", {})
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
    tables = [_padding_table(base, caches), _packed_table(base), _others_table([r for r in padded if r not in base]),
              _pages_table(paged)]
    sweeps = _base(of(records, kind="sweep"), found)
    pictures = _whole_picture(base, sweeps)
    for centre in sorted({r["factors"]["around"] for r in sweeps} - {0}):
        pictures += _picture_around(centre, of(sweeps, around=centre))
    return Answer(_short(base, paged), method, limits, tables, pictures)


def _multiples(records: Sequence[Record]) -> list[int]:
    return sorted({r["factors"]["multiple"] for r in records})


def _cells(columns: Iterable[Sequence[Record]], ratio: str, multiple: int) -> list[str]:
    """A ratio at a multiple of 4096 bytes, "" where it was not measured."""
    return [next(map(ratio_text, ratios(of(own, multiple=multiple), ratio)), "") for own in columns]


def _padding_table(base: Sequence[Record], caches: Mapping[str, Mapping[str, int]]) -> Table:
    columns, known = by(base, _series), {name: caches[name]["sets"] for name in ("L1d", "L2") if name in caches}
    rows = [[str(multiple), *(f"{sets_of_starts(multiple, sets)} of {sets}" for sets in known.values()),
             *_cells(columns.values(), PADDING, multiple)] for multiple in _multiples(base)]
    return Table("What a cache line of padding gives back", ["row, bytes", *(f"{name} sets" for name in known), *columns], rows,
                 'Time at this stride over time at 64 bytes more; "sets": in how many of its sets the rows of a head start.')


def _packed_table(base: Sequence[Record]) -> Table:
    columns = by(base, _series)
    rows = [[str(multiple + step), *_cells(columns.values(), f"{arm}/packed", multiple)]
            for multiple in _multiples(base) for arm, step in (("row-64", -LINE), ("row", 0), ("row+64", LINE))]
    return Table("Rows of a stride against packed heads", ["row, bytes", *columns], rows,
                 "Time over that of packed heads; forward, float32.")


def _others_table(others: Sequence[Record]) -> Table:
    multiples = _multiples(others)
    lines = by(others, lambda r: "{} H{H} D{D} {dtype} {direction} {threads}T".format(_series(r), **r["factors"]))
    rows = [[name, *(cell for multiple in multiples for cell in _cells([own], PADDING, multiple))] for name, own in lines.items()]
    return Table("The same for other work", ["case", *map(str, multiples)], rows,
                 "Time at the stride in the heading, bytes, over time at 64 bytes more.")


def _pages_table(paged: Sequence[Record]) -> Table:
    return table("4 KiB pages against huge ones", paged, {
        "case": lambda r: f"{_series(r)} row {r['factors']['multiple']}",
        **{arm: ratio_of(f"{arm}{SMALL_PAGES}/{arm}") for arm in ("row", "row+64", "packed")},
        "row/row+64, huge": ratio_of(PADDING), "row/row+64, 4 KiB": ratio_of(f"row{SMALL_PAGES}/row+64{SMALL_PAGES}")},
        "Time in 4 KiB pages over time in huge pages; right: what padding gives back in either.")


_AXES = {"x": "bytes from one row to the next", "y": "time / time of packed heads"}
_WHAT = f"forward, float32, {BASE.H} heads of width {BASE.D}"


def _swept(sweeps: Iterable[Record], near: bool) -> dict[int, Mapping[str, float]]:
    """Ratios by stride: of the strides near the centre of their sweep, or of the others."""
    found = {}
    for r in sweeps:
        for ratio, value in r["ratios"].items():
            row = int(ratio.partition("/")[0])
            if (abs(row - r["factors"]["around"]) <= max(AROUND)) == near:
                found[row] = value
    return dict(sorted(found.items()))


def _whole_picture(base: Sequence[Record], sweeps: Sequence[Record]) -> list[Picture]:
    """A panel for each algorithm and length. The strides near the centre of a sweep have pictures of their own: here they would
    be one heap."""
    panels = []
    for key, own in by(base, _series).items():
        multiples = _multiples(own)
        series = [spread(name, multiples, [next(iter(ratios(of(own, multiple=m), f"{arm}/packed"))) for m in multiples])
                  for arm, name in (("row-64", f"{LINE} bytes less"), ("row", f"a multiple of {PAGE} bytes"),
                                    ("row+64", f"{LINE} bytes more"))]
        others = _swept([r for r in sweeps if _series(r) == key], near=False)
        if others:
            series.append(spread("other strides", list(others), list(others.values())))
        panels.append({"title": key, "series": series, "reference": 1.0})
    return lines("strides", f"The time over that of packed heads, by the stride of the rows, {_WHAT}. At a multiple of {PAGE} "
                 f"bytes three points stand beside each other: rows of {LINE} bytes less, of the multiple, and of {LINE} bytes "
                 "more.",
                 panels, title="Time over packed heads, by the stride of the rows", x_log2=True, same_y=True, **_AXES)


def _picture_around(centre: int, sweeps: Iterable[Record]) -> list[Picture]:
    series = [spread(key, list(near), list(near.values())) for key, own in by(sweeps, _series).items()
              if (near := _swept(own, near=True))]
    panel = {"title": _WHAT, "series": series, "reference": 1.0, "marks": [(centre, str(centre))]}
    return lines(f"strides-{centre}", f"The same around {centre} bytes, in steps of a few cache lines; points of one stride "
                 "stand beside each other.", [panel],
                 title=f"Time over packed heads, by the stride of the rows around {centre} bytes", **_AXES)


QUESTION = Question(
    NAME, "Power-of-two strides and padding",
    "Where do cache sets and TLB pages alias when the rows of the heads lie a multiple of 4096 bytes apart, and how much does "
    "padding the row by one cache line give back?", trials, answer)
