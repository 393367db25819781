"""What a question of the study comes to: sentences, tables and pictures, as data; `report` and `plots` show them."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastmha.study.trial import differs

Record = Mapping[str, Any]      # what `Trial.record` returned
Found = Mapping[str, Any]       # results.json: machine, limits, records


@dataclass(frozen=True)
class Table:
    """Cells are text, the first column names its row; `note` says what the columns are, with their units."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture that the function `kind` of `plots` draws from `data`, its keywords, into the file `name`.png."""

    name: str
    caption: str
    kind: str
    data: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """`short` answers the question in a sentence or two, from these measurements; `method` says how they were made;
    `limits` what they do not say."""

    short: str
    method: str
    limits: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


def of(records: Iterable[Record], **factors: Any) -> list[Record]:
    """The records with these factors."""
    return [r for r in records if all(r["factors"].get(name) == value for name, value in factors.items())]


def ratio_text(ratio: Mapping[str, float]) -> str:
    """A ratio with the half width of its interval: "0.93 ±0.02"; "=" before it where the interval holds 1."""
    return f"{'' if differs(ratio) else '= '}{ratio['median']:.2f} ±{(ratio['high'] - ratio['low']) / 2:.2f}"


def time_text(seconds: float) -> str:
    """Three digits: "1.23 ms", "45.6 µs"."""
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if seconds >= s), ("µs", 1e-6))
    value = seconds / scale
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def spread(name: str, x: Sequence[Any], intervals: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """A line for `plots.lines`: the medians of intervals over x, and their ends."""
    return {"name": name, "x": list(x), **{key: [i[end] for i in intervals] for key, end in (
        ("y", "median"), ("low", "low"), ("high", "high"))}}


def times_text(ratios: Iterable[Mapping[str, float]]) -> str:
    """What ratios over several cases come to, geometric mean and range: "1.04 (0.98 to 1.21; longer in 5, shorter in 1 of 12
    cases)", counting those whose interval leaves out 1."""
    each = list(ratios)
    if len(each) == 1:
        return f"{ratio_text(each[0])} (one case)"
    medians = [r["median"] for r in each]
    longer, shorter = (sum(differs(r) and (r["median"] > 1) == more for r in each) for more in (True, False))
    return (f"{geomean(medians):.2f} ({min(medians):.2f} to {max(medians):.2f}; longer in {longer}, shorter in {shorter} of "
            f"{len(each)} cases)")
