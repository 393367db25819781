"""Runs trials, keeps what they found from one interruption to the next, and writes the results as JSON."""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastmha.study import machine
from fastmha.study.trial import Trial

FORMAT = 2
UNFINISHED, RESULTS = "unfinished.jsonl", "results.json"
_SAME = ("machine", "versions", "kernels", "threads")      # what must not change between two parts of a study


class OtherStudyError(RuntimeError):
    """The folder holds a part of another study."""


def planned(trials: Sequence[Trial]) -> tuple[int, float]:
    """Operations of every arm once, and seconds."""
    return sum(t.flops for t in trials), sum(t.seconds for t in trials)


class Store:
    """The records of a study in a folder: a line each as soon as it is measured, so that an interrupted study goes on.

    Parameters
    ----------
    folder : Path
        Must exist.
    about : dict
        What `machine.describe` returned, and "quick". Lines measured under other conditions are refused.

    Raises
    ------
    OtherStudyError
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.path, self.results = folder / UNFINISHED, folder / RESULTS
        self.about, self.records, self.limits = about, {}, {}   # type: ignore[var-annotated]
        key = {name: about[name] for name in (*_SAME, "quick")}
        lines = self._lines()
        if not lines:
            self.path.write_text(json.dumps({"format": FORMAT, **key}) + "\n", encoding="utf-8")
        elif lines[0] != {"format": FORMAT, **key}:
            differing = [name for name in key if lines[0].get(name) != key[name]]
            what = " and ".join(differing or ["format"]).replace("quick", "--quick")
            raise OtherStudyError(f"{self.path} holds a part of a study that differs in {what}: give another --out, or delete it")
        for line in lines[1:]:
            self._take(line)

    def _lines(self) -> list[dict[str, Any]]:
        """The whole lines of the file; an interruption may have cut the last."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def _take(self, line: dict[str, Any]) -> None:
        if "limits" in line:
            self.limits = line["limits"]
        else:
            self.records[line["question"], line["label"]] = line

    def add(self, line: dict[str, Any]) -> None:
        """Keep a record, or {"limits": ...}: on disk before this returns."""
        whole = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("ab") as file:
            if whole and not whole.endswith(b"\n"):
                file.truncate(whole.rfind(b"\n") + 1)
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def finish(self, order: Iterable[Trial]) -> dict[str, Any]:
        """Write the results, the records in the order of their trials, and drop the unfinished part."""
        found = {"format": FORMAT, **self.about, "limits": self.limits,
                 "units": {"arms": "seconds a call", "ratios": "time of the first arm over time of the second, within a round",
                           "low, high": "ends of the 95 % bootstrap interval of the median", "flops": "operations a call",
                           "limits": "operations/s of the fastest product; read: bytes/s from memory"},
                 "records": [self.records[t.question, t.label] for t in order if (t.question, t.label) in self.records]}
        lines = [json.dumps(record, ensure_ascii=False) for record in found["records"]]
        text = json.dumps({**found, "records": []}, indent=1, ensure_ascii=False)
        body = text.replace('"records": []', '"records": [\n  ' + ",\n  ".join(lines) + "\n ]") if lines else text
        partial = self.results.with_suffix(".partial")
        partial.write_text(body + "\n", encoding="utf-8")
        partial.replace(self.results)
        self.path.unlink()
        return found


def run(trials: Sequence[Trial], store: Store, report: Callable[[Trial | None, float], None] = lambda trial, done: None) -> None:
    """Measure the trials that the store does not have yet, after the machine's limits.

    `report` is called before each with the trial and the planned seconds of those behind it, and with None at the end.
    """
    if not store.limits:
        store.add({"limits": machine.limits(store.about["threads"])})
    done = 0.0
    for trial in trials:
        report(trial, done)
        if (trial.question, trial.label) not in store.records:
            store.add(trial.record())
        done += trial.seconds
    report(None, done)


def read(path: Path) -> dict[str, Any]:
    """Results as `Store.finish` wrote them."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} has format {found.get('format')}, this version reads {FORMAT}")
    return dict(found)
