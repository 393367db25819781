"""One thing to measure: arms that do the same work, timed side by side, or a count.

The arms of a trial are run in rounds, each round every arm once, in turning order, so that whatever else the machine does
meets all of them alike. A difference between two arms is the median of the ratios within a round, with a bootstrap
interval [1]_ of 95 %; where that interval holds 1, there is none.

References
----------
.. [1] Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LEAST_ROUNDS, MOST_ROUNDS = 5, 300
WARM_BELOW = 0.01       # seconds: shorter calls run once untimed before they are timed, or an arm would pay for the operands that
                        # another one has put into the caches in the place of its own
LEAST_CALLS = LEAST_ROUNDS + 1      # of an arm: its answer is compared before it is timed
RESAMPLES, CONFIDENCE = 1000, 0.95
TOLERANCE = {"float32": 1e-4, "float64": 1e-12}     # of the largest element: arms differ in the order of sums at most

Arms = Mapping[str, Callable[[], object]]


class ArmsDisagreeError(RuntimeError):
    """Two arms gave different answers: their times mean nothing."""


@dataclass(frozen=True)
class Trial:
    """What is measured, and for how long: `label` names the trial once within its question, `factors` are what is varied and what
    is held. `measure` is called with seconds to spend, `seconds` as planned, and returns what was found: see `timed`. `flops` are
    planned operations of every arm once, 0 where nothing is computed; `least` is what it does at least, however little time it is
    given: kinds of work, those of `pace.calibrated`, and amounts. Factors and findings are plain values for JSON.
    """

    question: str
    label: str
    factors: dict[str, Any]
    measure: Callable[[float], dict[str, Any]] = field(repr=False, compare=False)
    seconds: float
    flops: int = 0
    least: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)

    def record(self, seconds: float | None = None) -> dict[str, Any]:
        """Measure, for so many seconds or for those planned; the trial and what was found, for JSON."""
        found = self.measure(self.seconds if seconds is None else seconds)
        return {"question": self.question, "label": self.label, "factors": self.factors, **found}


def timed(prepare: Callable[[], Arms], ratios: Sequence[tuple[str, str]], *, cold: bool = False, places: int = 1,
          before: Callable[[], object] | None = None, **more: Any) -> Callable[[float], dict[str, Any]]:
    """The `measure` of a trial that times arms.

    Parameters
    ----------
    prepare : callable
        Makes operands and returns the arms by name, once their answers have been compared: raises `ArmsDisagreeError`.
    ratios : pairs of names
        Arms to compare: time of the first over time of the second.
    cold : bool
        Write through a buffer larger than the last-level cache before each call, so that operands come from memory.
    before : callable, optional
        Called before each call, untimed.
    places : int
        Prepare anew up to so often, as often as there is time: where memory comes to lie is part of what varies.
    more : values for JSON
        Such as flops and bytes of one call; copied into the findings.

    Returns
    -------
    callable
        seconds -> {"rounds", "places", "arms": {name: {"best", "median", "low", "high"}} in seconds, "ratios": {"a/b": {"median",
        "low", "high"}}, **more}; low and high are the ends of the interval of the median.
    """
    def measure(seconds: float) -> dict[str, Any]:
        parts: list[dict[str, np.ndarray]] = []
        begin = now = time.perf_counter()
        while not parts or (len(parts) < places and (now - begin) * (1 + 1 / len(parts)) < 1.5 * seconds):
            arms = prepare()
            warm_up(arms)
            parts.append(interleave(arms, seconds / places, flush if cold else before, MOST_ROUNDS // places))
            now = time.perf_counter()
        least = min(len(next(iter(part.values()))) for part in parts)
        times = {name: np.array([part[name][-least:] for part in parts]) for name in parts[0]}      # (places, rounds)
        return {"rounds": len(parts) * least, "places": len(parts), **more,
                "arms": {name: {"best": float(t.min()), **interval(t)} for name, t in times.items()},
                "ratios": {f"{a}/{b}": interval(times[a] / times[b]) for a, b in ratios}}

    return measure


def warm_up(arms: Arms) -> None:
    """Call each arm once, until one takes long: memory, pool and caches as in every later call, where that can be told."""
    for function in arms.values():
        start = time.perf_counter()
        function()
        if time.perf_counter() - start >= WARM_BELOW:
            return


def interleave(arms: Arms, seconds: float, before: Callable[[], object] | None = None, most: int = MOST_ROUNDS,
               least: int = LEAST_ROUNDS) -> dict[str, np.ndarray]:
    """Seconds of each call, by name: rounds of all arms in turning order, until `seconds` are used up and `least` were run, or
    `most`. `before` is called before each, untimed."""
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    for number in range(most):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if before is not None:
                before()
            elif times[name] and times[name][-1] < WARM_BELOW:
                arms[name]()
            start = time.perf_counter()
            arms[name]()
            times[name].append(time.perf_counter() - start)
        if number + 1 >= least and time.perf_counter() >= end:
            break
    return {name: np.array(values) for name, values in times.items()}


def interval(values: np.ndarray) -> dict[str, float]:
    """The median of values and the ends of its bootstrap interval, by percentiles; the same for the same values. Of values
    (places, rounds), places are drawn with all that varies between them, and rounds of each."""
    places, rounds = values.shape if values.ndim == 2 else (1, len(values))
    generator = np.random.default_rng(values.size)
    place = generator.integers(places, size=(RESAMPLES, places, 1))
    of_round = generator.integers(rounds, size=(RESAMPLES, places, rounds))
    medians = np.median(values.reshape(places, rounds)[place, of_round].reshape(RESAMPLES, -1), axis=1)
    low, high = np.quantile(medians, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)).tolist()
    return {"median": float(np.median(values)), "low": low, "high": high}


def differs(ratio: Mapping[str, float]) -> bool:
    """Whether an interval of a ratio leaves out 1."""
    return not ratio["low"] <= 1 <= ratio["high"]


_large: list[np.ndarray] = []


def flush() -> None:
    """Write through 64 MiB, or twice the last-level cache where the system tells its size: nothing else is cached then."""
    if not _large:
        from fastmha.study import machine

        _large.append(np.zeros(max(64 << 20, 2 * machine.last_level_bytes()), np.uint8))
    _large[0] += 1


def agree(label: str, answers: Mapping[str, Mapping[str, np.ndarray]], tolerance: float) -> None:
    """Raise `ArmsDisagreeError` unless all arms gave the answers of the first: each array within tolerance of its largest
    element. `answers` is arm -> name of the array -> array."""
    first, *others = answers
    for name, expected in answers[first].items():
        allowed = tolerance * float(np.abs(expected).max(initial=0))
        for arm in others:
            difference = float(np.abs(expected - answers[arm][name]).max(initial=0))
            if not difference <= allowed:       # also where either is NaN
                raise ArmsDisagreeError(f"{label}: {name} of the arms {first} and {arm} differ by {difference:.1e}, more than "
                                        f"{allowed:.1e}")


def checked(label: str, arms: Arms, results: Mapping[str, Mapping[str, np.ndarray]], dtype: str, before: float = np.nan) -> Arms:
    """The arms, once each that has results, the arrays that it writes, has given the same answer; what it leaves out shows as
    what was there `before`.

    Raises
    ------
    ArmsDisagreeError
    """
    answers = {}
    for name, arrays in results.items():
        for array in arrays.values():
            array[...] = before
        arms[name]()
        answers[name] = {key: array.copy() for key, array in arrays.items()}
    agree(label, answers, TOLERANCE[dtype])
    return arms
