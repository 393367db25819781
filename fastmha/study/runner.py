"""Runs trials, keeps what they found from one interruption to the next, and writes the results as JSON."""
from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastmha.study import machine
from fastmha.study.folder import DamagedError, replace_text, set_aside
from fastmha.study.pace import Budget
from fastmha.study.trial import Trial

FORMAT = 2
UNFINISHED, RESULTS = "unfinished.jsonl", "results.json"
UNFINISHED_FORMAT = 3
LONGEST_LINE, LARGEST_RESULTS = 1 << 22, 1 << 28        # bytes: hundreds of times what there is to write
_SAME = ("machine", "versions", "kernels", "threads")      # what must not change between two parts of a study


class OtherStudyError(RuntimeError):
    """The folder holds a part of another study."""


class Store:
    """The records of a study in a folder that exists and is held (`folder.held`): a line each as soon as it is measured, so that
    an interrupted study goes on. Each line ends with a checksum of itself; a file with one that is wrong is set aside, and the
    study starts afresh: `damage` says what was wrong, and the name that the file has now.

    `about` is what `machine.describe` returned, and "quick": `OtherStudyError` where lines were measured under other conditions.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.path, self.results = folder / UNFINISHED, folder / RESULTS
        self.about, self.records, self.limits, self.damage = about, {}, {}, ""   # type: ignore[var-annotated]
        self.head = {"format": UNFINISHED_FORMAT, **{name: about[name] for name in (*_SAME, "quick")}}
        lines: list[dict[str, Any]] = []
        try:
            lines, size = self._lines()
        except DamagedError as error:
            kept = set_aside(self.path)
            self.damage = f"{error}; it is kept as {kept.name}, and everything is measured anew"
        if not lines:
            replace_text(self.path, _sealed(self.head))
            return
        if lines[0] != self.head:
            differing = [name for name in self.head if lines[0].get(name) != self.head[name]]
            what = " and ".join(differing or ["format"]).replace("quick", "--quick")
            raise OtherStudyError(f"{self.path} holds a part of a study that differs in {what}: give another --out, or delete it")
        os.truncate(self.path, size)
        for line in lines[1:]:
            self._take(line)

    def _lines(self) -> tuple[list[dict[str, Any]], int]:
        """The whole lines of the file, and their bytes; an interruption may have cut the last. Raises `DamagedError`."""
        if not os.path.lexists(self.path):
            return [], 0
        if not self.path.is_file():
            raise DamagedError(f"{self.path} is no file")
        lines: list[dict[str, Any]] = []
        size = 0
        with self.path.open("rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                where = f"{self.path} is damaged: line {number}"
                if len(text) > LONGEST_LINE:
                    raise DamagedError(f"{where} is longer than {LONGEST_LINE} bytes")
                if not text.endswith(b"\n"):
                    if not ((text.isascii() and b'{"'.startswith(text[:2])) if lines else
                            _sealed(self.head).encode().startswith(text)):
                        raise DamagedError(f"{where} is no part of a measurement")
                    return lines, size
                lines.append(_opened(text, where, head=number == 1))
                size += len(text)
        if not lines:
            raise DamagedError(f"{self.path} is damaged: it is empty")
        return lines, size

    def _take(self, line: dict[str, Any]) -> None:
        if "limits" in line:
            self.limits = line["limits"]
        else:
            self.records[line["question"], line["label"]] = line

    def add(self, line: dict[str, Any]) -> None:
        """Keep a record, or {"limits": ...}: on disk before this returns."""
        with self.path.open("ab") as file:
            file.write(_sealed(line).encode())
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def finish(self, order: Iterable[Trial]) -> dict[str, Any]:
        """Write the results, the records in the order of their trials, and drop the unfinished part. Trials without a record
        are named in "left_out"."""
        trials = {(t.question, t.label): self.records.get((t.question, t.label)) for t in order}
        found = {"format": FORMAT, **self.about, "limits": self.limits,
                 "units": {"arms": "seconds per call", "ratios": "time of the first arm over time of the second, within a round",
                           "low, high": "ends of the 95 % bootstrap interval of the median", "flops": "operations per call",
                           "limits": "operations/s of the fastest product; read: bytes/s from memory"},
                 "left_out": [{"question": question, "label": label} for (question, label), r in trials.items() if r is None],
                 "records": [record for record in trials.values() if record is not None]}
        lines = [json.dumps(record, ensure_ascii=False) for record in found["records"]]
        text = json.dumps({**found, "records": []}, indent=1, ensure_ascii=False)
        body = text.replace('"records": []', '"records": [\n  ' + ",\n  ".join(lines) + "\n ]") if lines else text
        replace_text(self.results, body + "\n")
        self.path.unlink(missing_ok=True)
        return found


def _sealed(line: dict[str, Any]) -> str:
    """A line of JSON that ends with the checksum of what is before."""
    text = json.dumps(line)
    return f'{text[:-1]}, "crc": {zlib.crc32(text.encode())}}}\n'


def _opened(text: bytes, where: str, head: bool) -> dict[str, Any]:
    """What was sealed. Raises `DamagedError`."""
    line = _parsed(text, where)
    line.pop("crc", None)
    if _sealed(line).encode() != text:
        raise DamagedError(f"{where} does not match its checksum")
    if not ("format" in line if head else "limits" in line or {"question", "label"} <= line.keys()):
        raise DamagedError(f"{where} is not {'the head of a study' if head else 'a measurement'}")
    return line


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object. Raises `DamagedError`."""
    try:
        found = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DamagedError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise DamagedError(f"{where} is no JSON: {error}") from error
    except (ValueError, RecursionError) as error:       # a number of thousands of digits; thousands of brackets
        raise DamagedError(f"{where} is no JSON that was written here: {error}") from error
    if not isinstance(found, dict):
        raise DamagedError(f"{where} is no JSON object")
    return found


def measure_limits(store: Store) -> None:
    """Measure what the machine can do at best, unless the store knows."""
    if not store.limits:
        store.add({"limits": machine.limits(store.about["threads"])})


def run(trials: Sequence[Trial], store: Store, report: Callable[[Trial | None, float], None] = lambda trial, done: None,
        budget: Budget | None = None) -> None:
    """Measure the trials that the store does not have yet, after the machine's limits; of these, what the budget has time for.

    `report` is called before each with the trial and the planned seconds of those behind it, and with None at the end.
    """
    budget = budget or Budget(trials)
    measure_limits(store)
    left = [t for t in trials if (t.question, t.label) not in store.records]
    while True:
        trial, seconds = budget.next(left)
        report(trial, budget.behind(left if trial else []))
        if trial is None:
            return
        start = budget.clock()
        store.add(trial.record(seconds))
        budget.took(trial, seconds, budget.clock() - start)
        left.remove(trial)


# ------------------------------------------------------------------------------------------------ results

NUMBERS = {...: float}
SHAPE: dict[Any, Any] = {
    "format": int, "command": str, "date": str, "threads": int,
    "machine": {"cpu": str, "cpus_usable": int, "caches": {...: int}, "system": str, "architecture": str},
    "versions": {"fastmha": str, ...: str}, "kernels": {"isa": str}, "limits": NUMBERS,
    "records": [{"question": str, "label": str, "factors": {}}],
}
TIMED = {"arms": {...: NUMBERS}, "ratios": {...: NUMBERS}}
KINDS = {str: "a string", int: "an integer", float: "a finite number", dict: "an object", list: "a list"}


def read(path: Path) -> dict[str, Any]:
    """Results as `Store.finish` wrote them. Raises `DamagedError`, a ValueError, if the file does not hold such results, and
    ValueError if they have another format."""
    if path.exists() and not path.is_file():
        raise DamagedError(f"{path} is no file")
    if path.stat().st_size > LARGEST_RESULTS:
        raise DamagedError(f"{path} is damaged: it is longer than {LARGEST_RESULTS} bytes")
    found = _parsed(path.read_bytes(), f"{path} is damaged: it")
    if type(found.get("format")) is int and found["format"] != FORMAT:
        raise ValueError(f"{path} has format {found['format']}, this version reads {FORMAT}")
    fault = unlike(found, SHAPE, "it")
    for number, record in enumerate(() if fault else found["records"], 1):
        timed = {name: shape for name, shape in TIMED.items() if name in record}
        fault = fault or unlike(record, timed, f"record {number}")
    if fault:
        raise DamagedError(f"{path} is damaged: {fault}")
    return found


def unlike(value: Any, shape: Any, name: str) -> str:
    """What in a JSON value, called `name`, is not of a shape, "" where all is: a type, [the shape of each element], or {key:
    shape} of the keys that must be there, ... for all others."""
    kind = type(shape) if isinstance(shape, (dict, list)) else shape
    right = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    if not right or (kind is float and not math.isfinite(value)):
        return f"{name} is not {KINDS[kind]}"
    inner: list[tuple[Any, Any, str]] = []
    if isinstance(shape, list):
        inner = [(each, shape[0], f"record {number}") for number, each in enumerate(value, 1)]
    elif isinstance(shape, dict):
        missing = [key for key in shape if key is not ... and key not in value]
        if missing:
            return f'{name} has no "{missing[0]}"'
        inner = [(each, shape.get(key, shape.get(...)), f'"{key}" of {name}') for key, each in value.items()]
    return next(filter(None, (unlike(*each) for each in inner if each[1] is not None)), "")
