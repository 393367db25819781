"""How long a study takes on this machine, and what a limit leaves of it.

A trial states what it does at least, in amounts of a few kinds of work (`Trial.least`). What a unit of each takes here is
measured before anything is announced (`calibrated`), and corrected by what the trials then take, question by question. A study
with a limit gives up repetitions first: every trial gets the same share of the seconds that were planned for it, down to none,
where the fewest rounds remain that an interval needs. If that is not enough, the longest trials are left out, as few as can be,
and the shortest of each question stays.
"""
from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastmha.study.trial import Trial

QUICK_LIMIT = 105.0         # seconds, all in all: two minutes, and a reserve for what goes wrong after the last correction
MOST_SHARE = 2.0            # of the planned seconds, where a machine proves faster than it was announced to be
KNOWN = 3.0                 # seconds of trials that weigh as much as what was measured before
PICTURES = 2                # a question has about so many
FRESH_BYTES = 64 << 20


def calibrated(num_threads: int, limits: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that a unit of each kind of work takes here, with `limits` of `machine.limits` and `about` of `machine.describe`.

    "tiled forward", "tiled backward", "blas forward", "blas backward", "product": an operation in float32; the same with " 1T"
    behind: with one thread; "read": a byte out of memory; "fresh": a byte of memory that is new to the process, written;
    "process": to start one that imports this library; "picture": to draw one.
    """
    from fastmha.study import cases, heads, memory, plots

    found = {"product": 1 / limits["float32"], "product 1T": num_threads / limits["float32"], "read": 1 / limits["read"],
             "fresh": _median(lambda: np.ones(FRESH_BYTES, np.uint8)) / FRESH_BYTES}
    shape = cases.case(1, 4, 1024, 64)
    for algorithm in ("tiled", "blas"):
        operands = heads.Operands(replace(shape, algorithm=algorithm), num_threads)
        for direction in cases.DIRECTIONS:
            for count, kind in ((num_threads, ""), (1, " 1T")):
                arm = heads.arms(operands, direction, count)["strided"]
                found[f"{algorithm} {direction}{kind}"] = _median(arm) / shape.flops(direction)
    start = time.perf_counter()
    memory.measure(memory.Work(1, 64, 64, 4, "tiled"), num_threads, 0.0)
    found["process"] = time.perf_counter() - start
    line = {"name": "line", "x": [1, 2, 3], "y": [1, 2, 3], "low": [1, 2, 3], "high": [1, 2, 3]}
    with tempfile.TemporaryDirectory(prefix="fastmha-study-") as folder:
        draw = partial(plots.lines, Path(folder) / "picture.png", about, title="title", x="x", y="y", panels=[
            {"title": "panel", "series": [line], "reference": 1.0}] * 2)
        found["picture"] = _median(draw, calls=1)
    return found


def _median(function: Callable[[], object], calls: int = 3) -> float:
    """Seconds of a call, after a first one, which finds memory and fonts."""
    function()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


class Budget:
    """Which trial is next, and how long it may take.

    `costs`, what `calibrated` returned: without it a trial takes the seconds that are planned. `limit`, seconds, all in all:
    without it nothing is shortened or left out. `spent`, `after`: seconds that passed before, and that what follows the last
    trial will take. `measured`, questions with records already: even their last trial may be left out. `announced` is how many
    seconds it will take, all in all, `kept` the trials for which there seems to be time.
    """

    def __init__(self, trials: Sequence[Trial], costs: Mapping[str, float] | None = None, limit: float | None = None,
                 spent: float = 0.0, after: float = 0.0, measured: Collection[str] = (),
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self.costs, self.limit, self.after, self.clock = costs or {}, limit, after, clock
        self.begin, self.measured = clock() - spent, set(measured)
        self.expected: Counter[str] = Counter()         # by question and in all, "": what trials should have taken at least
        self.taken: Counter[str] = Counter()            # and took
        self.kept = self._kept(trials)
        whole = spent + after + sum(self.seconds(t, 1.0) for t in self.kept)
        if limit is not None and whole > limit:
            whole = max(limit, spent + after + sum(map(self.least, self.kept)))
        self.announced = whole
        self.planned = whole - spent - after
        self._behind = 0.0

    def least(self, trial: Trial) -> float:
        """Seconds that a trial takes at least, as far as is known."""
        slower = (KNOWN * self._slower() + self.taken[trial.question]) / (KNOWN + self.expected[trial.question])
        return slower * self._stated(trial)

    def _slower(self) -> float:
        """How many times as long as they should trials took, all together."""
        return (KNOWN + self.taken[""]) / (KNOWN + self.expected[""])

    def _stated(self, trial: Trial) -> float:
        return sum(amount * self.costs.get(kind, 0.0) for kind, amount in trial.least.items())

    def seconds(self, trial: Trial, share: float) -> float:
        """Seconds that a trial takes which is given a share of those planned: a third of what it does at least is not timed."""
        least = self.least(trial)
        return max(least, share * trial.seconds + least / 3)

    def _room(self, until: float) -> float:
        return self.begin + until - self.after * max(1.0, self._slower()) - self.clock()

    def _kept(self, left: Sequence[Trial]) -> list[Trial]:
        """The trials for which there is time if each takes no longer than it must: the longest are dropped, the later first."""
        if self.limit is None:
            return list(left)
        least = list(map(self.least, left))
        order = sorted(range(len(left)), key=lambda i: (least[i], i))
        shortest = {left[i].question: i for i in reversed(order)}
        stay = {i for question, i in shortest.items() if question not in self.measured}
        over = sum(least) - self._room(self.limit)
        dropped = set()
        for i in reversed(order):
            if over > 0 and i not in stay:
                dropped.add(i)
                over -= least[i]
        return [t for i, t in enumerate(left) if i not in dropped]

    def _share(self, kept: Sequence[Trial]) -> float:
        """Of the planned seconds: with it the trials end when it was announced."""
        room = self._room(self.announced)
        low, high = 0.0, MOST_SHARE
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(self.seconds(t, middle) for t in kept) > room else (middle, high)
        return low

    def next(self, left: Sequence[Trial]) -> tuple[Trial | None, float]:
        """The next of the trials that are left, and the seconds to measure it; None where there is time for none."""
        self.kept = self._kept(left)
        if not self.kept:
            return None, 0.0
        share = 1.0 if self.limit is None else self._share(self.kept)
        return self.kept[0], share * self.kept[0].seconds

    def took(self, trial: Trial, given: float, seconds: float) -> None:
        """Learn from what a trial took that was given so many seconds: nothing where these decided."""
        self.measured.add(trial.question)
        least = self.least(trial)
        if max(least, seconds) > 1.1 * (given + least / 3):
            for name in ("", trial.question):
                self.expected[name] += self._stated(trial)      # type: ignore[assignment]
                self.taken[name] += seconds                     # type: ignore[assignment]

    def behind(self, left: Sequence[Trial]) -> float:
        """Of the `planned` seconds those that are behind, for a progress bar: never fewer than before."""
        ahead = sum(self.seconds(t, 1.0) for t in left) if self.limit is None else self._room(self.announced)
        self._behind = min(self.planned, max(self._behind, self.planned - ahead)) if left else self.planned
        return self._behind
