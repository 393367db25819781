"""Numbers in sentences and tables, and the sentence of a failure. A ratio is an interval: {"median", "low", "high"}."""
from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastmha.study.trial import differs

Ratio = Mapping[str, float]
Record = Mapping[str, Any]


def median_text(ratio: Ratio) -> str:
    """A ratio: "0.93"; "=" before it where its interval holds 1."""
    return f"{'' if differs(ratio) else '= '}{ratio['median']:.2f}"


def ratio_text(ratio: Ratio) -> str:
    """The same with the half width of its interval: "0.93 ±0.02"."""
    return f"{median_text(ratio)} ±{(ratio['high'] - ratio['low']) / 2:.2f}"


def sides(ratios: Iterable[Ratio]) -> tuple[int, int]:
    """How many are above 1, and how many below, of those whose interval leaves 1 out."""
    apart = [r["median"] > 1 for r in ratios if differs(r)]
    return sum(apart), len(apart) - sum(apart)


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Three digits in the first unit that the value reaches, else in the last."""
    scale, unit = next((u for u in units if value >= u[0]), units[-1])
    value /= scale
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def time_text(seconds: float) -> str:
    """"1.23 ms", "45.6 µs"."""
    return scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def bytes_text(number: float) -> str:
    """"1.61 GB", "37.7 MB"."""
    return scaled(number, ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))) if number >= 1e3 else f"{number:.0f} bytes"


def count_text(number: float) -> str:
    """"1.61 G"."""
    return scaled(number, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))) if number >= 1e3 else f"{number:.0f}"


def ratio_of(ratio: str) -> Callable[[Record], str]:
    return lambda record: ratio_text(record["ratios"][ratio])


def time_of(arm: str) -> Callable[[Record], str]:
    return lambda record: time_text(record["arms"][arm]["median"])


def rate_of(arm: str, what: str = "flops", digits: int = 0) -> Callable[[Record], str]:
    """What a call does over the median time of an arm, in units of 1e9 per second."""
    return lambda record: f"{record[what] / record['arms'][arm]['median'] / 1e9:.{digits}f}"


def span_text(values: Iterable[float]) -> str:
    """"1.02 to 1.36", or one number where they agree."""
    texts = [f"{value:.2f}" for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def mean_text(ratios: Iterable[Ratio]) -> str:
    return f"{geomean(r['median'] for r in ratios):.2f}"


def times_text(ratios: Iterable[Ratio]) -> str:
    """What ratios over several cases come to, geometric mean and range: "1.04 (0.98 to 1.21; longer in 5, shorter in 1 of 12
    cases)", counting those whose interval leaves out 1."""
    each = list(ratios)
    if len(each) == 1:
        return f"{ratio_text(each[0])} (one case)"
    medians, (longer, shorter) = [r["median"] for r in each], sides(each)
    return (f"{mean_text(each)} ({min(medians):.2f} to {max(medians):.2f}; longer in {longer}, shorter in {shorter} of "
            f"{len(each)} cases)")


def failed(sentence: str, status: int = 2, sign: str = ": ", command: str = "study") -> int:
    """Say why the study, or another command, ends, and return its exit status."""
    print(f"fastmha {command}{sign}{sentence}", file=sys.stderr)
    return status
