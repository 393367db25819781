"""What the benches print: tables of findings, each beside its floor and whether it is met, and the command that prints them."""
from __future__ import annotations

import argparse
import json
import math
import shlex
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import fastmha
from fastmha import _core
from fastmha.study import machine, trial
from fastmha.study.__main__ import positive
from fastmha.study.cases import DIRECTIONS

# ---------------------------------------------------------------------------------------------- floors and tables

@dataclass(frozen=True)
class Floor:
    """What a number must lie in. It is judged as it is printed, with two digits behind the point."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if self.low > -math.inf and self.high < math.inf:
            return f"{self.low:g} – {self.high:g}"
        return f"≥ {self.low:.2f}" if self.high == math.inf else f"≤ {self.high:.2f}"

    def holds(self, *values: float) -> bool:
        return all(round(self.low, 2) <= round(value, 2) <= round(self.high, 2) for value in values)


@dataclass(frozen=True)
class Finding:
    """One line of a table; the columns `judged` must keep the floor."""

    what: str
    values: dict[str, Any]
    floor: Floor | None = None
    judged: Sequence[str] = DIRECTIONS

    @property
    def met(self) -> bool | None:
        return None if self.floor is None else self.floor.holds(*(self.values[name] for name in self.judged))


@dataclass(frozen=True)
class Table:
    title: str
    findings: list[Finding]
    note: str = ""
    digits: int = 2

    def __str__(self) -> str:
        columns = list(dict.fromkeys(name for f in self.findings for name in f.values))
        lines = [["", "floor", *columns, "met"]]
        for f in self.findings:
            cells = (shown(f.values.get(name), self.digits) for name in columns)
            lines.append([f.what, "" if f.floor is None else str(f.floor), *cells,
                          {None: "", True: "yes", False: "NO"}[f.met]])
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        rows = ("  ".join(cell.rjust(width) if i else cell.ljust(width)
                          for i, (cell, width) in enumerate(zip(line, widths, strict=True))) for line in lines)
        notes = textwrap.wrap(self.note, 116)
        return "\n".join([self.title, *(f"  {line}".rstrip() for line in (*rows, *notes)), ""])

    def as_json(self) -> dict[str, Any]:
        lines = [{"what": f.what, "values": f.values, "floor": None if f.floor is None else str(f.floor), "met": f.met}
                 for f in self.findings]
        return {"title": self.title, "note": self.note, "lines": lines}


def shown(value: Any, digits: int = 2) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


Section: TypeAlias = Callable[[argparse.Namespace], Iterator[Table]]


# ---------------------------------------------------------------------------------------------- answers and times

def agree(what: str, got: np.ndarray, wanted: np.ndarray, dtype: str) -> None:
    """Whether `got`, computed in `dtype`, is what was wanted, in float64; `what` opens the message.

    Raises
    ------
    ArmsDisagreeError
    """
    allowed = trial.TOLERANCE[dtype] * float(np.abs(wanted).max(initial=0))
    difference = float(np.abs(got - wanted).max(initial=0))
    if not difference <= allowed:       # also where either is NaN
        raise trial.ArmsDisagreeError(f"{what} is off by {difference:.1e}, more than {allowed:.1e}")


def best_times(functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    return {name: float(times.min()) for name, times in trial.interleave(functions, seconds).items()}


def repeated(function: Callable[[], Any], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            function()
    return run


# ---------------------------------------------------------------------------------------------- the command

def seconds_of(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError
    return seconds


seconds_of.__name__ = "number of seconds"       # argparse puts it into its message


def options_of(description: str | None, sections: Collection[str]) -> argparse.ArgumentParser:
    """The options that all benches have."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--only", choices=sections, help="one section (default: all)")
    made.add_argument("--threads", type=positive, default=1, metavar="N", help="threads of each call (default: 1)")
    made.add_argument("--seconds", type=seconds_of, default=1.0, metavar="S",
                      help="of each comparison, at least three rounds (default: 1)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the tables there as well")
    return made


def as_json(tables: dict[str, list[Table]], options: argparse.Namespace, command: str) -> dict[str, Any]:
    return {**machine.describe(options.threads, command), "seconds": options.seconds,
            "sections": {name: [table.as_json() for table in made] for name, made in tables.items()}}


def report(sections: Mapping[str, Section], options: argparse.Namespace, script: str, arguments: Sequence[str]) -> int:
    """Print the tables of the sections asked for and write them; the exit status, 1 if a floor is missed."""
    print(f"fastmha {fastmha.__version__}, {_core.selected_isa()[0]} kernels, {machine.cpu_name()}, threads of a call: "
          f"{options.threads}\n", flush=True)
    tables: dict[str, list[Table]] = {}
    for name in [options.only] if options.only else sections:
        tables[name] = []
        for table in sections[name](options):
            print(table, flush=True)
            tables[name].append(table)
    verdicts = [finding.met for made in tables.values() for table in made for finding in table.findings]
    print(f"{verdicts.count(True)} floors met, {verdicts.count(False)} missed")
    if options.json:
        found = as_json(tables, options, shlex.join(["python", script, *arguments]))
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if False in verdicts else 0
