"""A question of the study and what it comes to: sentences, tables and pictures, as data; `report` and `plots` show them."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fastmha.study.trial import Trial

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


class Question(NamedTuple):
    """One question of the study.

    Attributes
    ----------
    name, title, question : str
        For ``--only``, the heading, and what is asked.
    trials : callable
        (quick, num_threads) -> what is measured for it; it may be nothing.
    answer : callable
        (records, found) -> the answer from its records, of which there is one at least, and all results; None where they do not
        suffice.
    needs : names
        Of questions whose records are among its own.
    """

    name: str
    title: str
    question: str
    trials: Callable[[bool, int], Sequence[Trial]]
    answer: Callable[[Sequence[Record], Found], Answer | None]
    needs: Sequence[str] = ()

    def answered(self, found: Found) -> Answer | None:
        """The answer from all results, without tables that are empty; None without its records."""
        records = [r for r in found["records"] if r["question"] in (self.name, *self.needs)]
        said = self.answer(records, found) if records else None
        return said and replace(said, tables=[t for t in said.tables if t.rows])


def of(records: Iterable[Record], **factors: Any) -> list[Record]:
    return [r for r in records if all(r["factors"].get(name) == value for name, value in factors.items())]


def ratios(records: Iterable[Record], ratio: str) -> list[Mapping[str, float]]:
    return [r["ratios"][ratio] for r in records]


def by(records: Iterable[Record], name: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Records in groups by what `name` says of them, in the order in which they come."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(name(record), []).append(record)
    return found


def table(title: str, records: Iterable[Record], cells: Mapping[str, Callable[[Record], str]], note: str = "") -> Table:
    """A row for each record; `cells`: what stands below each heading."""
    return Table(title, list(cells), [[cell(r) for cell in cells.values()] for r in records], note)


def spread(name: str, x: Sequence[Any], intervals: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """A line for `plots.lines`: the medians of intervals over x, and their ends."""
    return {"name": name, "x": list(x), **{key: [i[end] for i in intervals] for key, end in (
        ("y", "median"), ("low", "low"), ("high", "high"))}}


def lines(name: str, caption: str, panels: Sequence[Mapping[str, Any]], **data: Any) -> list[Picture]:
    """The picture of these panels of lines, those without a line left out; none where nothing is left."""
    shown = [panel for panel in panels if panel["series"]]
    return [Picture(name, caption, "lines", {**data, "panels": shown})] if shown else []


def bar(name: str, ratio: Mapping[str, float]) -> dict[str, Any]:
    """A bar for `plots.bars`: the median of an interval, and its ends."""
    return {"name": name, "value": ratio["median"], "low": ratio["low"], "high": ratio["high"]}
