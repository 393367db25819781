"""NumPy itself, without the kernels: `np.matmul` on strided heads against heads copied first, as the textbook advises.

The arms of "scores" and "output" are those of `heads`, with `np.ascontiguousarray` as the copy; "merge" is the output that must
end as (B, L, H·D): merged by ``transpose(0, 2, 1, 3).reshape(B, L, H * D)``, or in place, ``out=`` a view of the merged array.
NumPy's BLAS is held at one thread meanwhile: the threads of its pool spin for a while after a product, on the processors of
what is timed next.
"""
from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from fastmha import threads
from fastmha.study import cases
from fastmha.study.answer import Answer, Found, Picture, Question, Record, Table, by, of, ratios, table
from fastmha.study.cases import Case
from fastmha.study.operands import side_by_side
from fastmha.study.trial import LEAST_CALLS, LEAST_ROUNDS, TOLERANCE, Arms, Trial, agree, timed
from fastmha.study.words import geomean, ratio_of, sides, time_of

NAME = "numpy"
QUICK_SECONDS, FULL_SECONDS = 0.35, 1.0     # a trial
LOOP, COPY = 2.0, 1.25                      # over copy and product: from here on a loop of NumPy's own, up to here a copy
REST = 0.15                                 # seconds before each call where NumPy's BLAS cannot be held at one thread
FUSED, INTERLEAVED = "fused", "interleaved"
ARMS = {**dict.fromkeys(("scores", "output"), ("strided", "contiguous", "packed", "copy")),
        "merge": ("merged", "in place", "product", "merge copy")}
RATIOS = {
    **dict.fromkeys(("scores", "output"), (("strided", "contiguous"), ("strided", "packed"), ("copy", "contiguous"))),
    "merge": (("in place", "merged"), ("in place", "product"), ("merge copy", "merged"))}
FORMULAS = {"scores": "q @ k.swapaxes(-1, -2)", "output": "weights @ v", "merge": "weights @ v as (B, L, H·D)"}


@contextmanager
def one_blas_thread() -> Iterator[bool]:
    """Hold NumPy's BLAS at one thread and restore its number after; False where no function that sets it was found."""
    functions = blas_threads()
    if functions is None:
        yield False
        return
    getter, setter = functions
    before = getter()
    setter(1)
    try:
        yield True
    finally:
        setter(before)


def blas_threads() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """The functions that read and set the thread count of the BLAS that NumPy links, by the names that `threads` knows."""
    core = getattr(np, "_core", None) or np.core    # NumPy 1
    try:
        library = ctypes.CDLL(core._multiarray_umath.__file__)      # symbols of what it links against are found through it
    except OSError:
        return None
    for getter, setter in threads.BLAS_NAMES:
        if hasattr(library, getter) and hasattr(library, setter):
            get, put = getattr(library, getter), getattr(library, setter)
            get.restype, get.argtypes, put.restype, put.argtypes = ctypes.c_int, [], None, [ctypes.c_int]
            return get, put
    return None


def split(case: Case, layout: str, seed: int = 0) -> list[np.ndarray]:
    """q, k, v (B, H, L, D): views of one buffer (B, L, 3·H·D), a head's elements side by side or, interleaved, H apart."""
    buffer = np.random.default_rng(seed).standard_normal((case.B, case.Lq, 3 * case.H * case.D), np.dtype(case.dtype).type)
    if layout == FUSED:
        return side_by_side(buffer, (case.H,) * 3, case.D)
    return [part.reshape(case.B, case.Lq, case.D, case.H).transpose(0, 3, 1, 2) for part in np.split(buffer, 3, axis=-1)]


def weights_of(case: Case, seed: int = 1) -> np.ndarray:
    """Rows (B, H, L, L) that sum to 1, contiguous, as a softmax leaves them."""
    weights = np.random.default_rng(seed).random((case.B, case.H, case.Lq, case.Lq), np.dtype(case.dtype).type)
    weights /= weights.sum(-1, keepdims=True)
    return weights


def arms(case: Case, what: str, layout: str) -> tuple[Arms, dict[str, Callable[[], np.ndarray]]]:
    """What is timed, by name, and what of it to compare."""
    q, k, v = split(case, layout)
    weights = np.empty(0) if what == "scores" else weights_of(case)
    out = np.empty((case.B, case.H, case.Lq, case.Lq if what == "scores" else case.D), case.dtype)

    def scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return np.matmul(q, k.swapaxes(-1, -2), out=out)

    def product(v: np.ndarray) -> np.ndarray:
        return np.matmul(weights, v, out=out)

    if what == "merge":
        merged = np.empty((case.B, case.Lq, case.H * case.D), case.dtype)
        heads_of_merged = side_by_side(merged, (case.H,), case.D)[0]

        def merge(heads: np.ndarray) -> np.ndarray:
            return heads.transpose(0, 2, 1, 3).reshape(merged.shape)

        def in_place() -> np.ndarray:
            np.matmul(weights, v, out=heads_of_merged)
            return merged

        products = {"merged": lambda: merge(product(v)), "in place": in_place}
        return {**products, "product": lambda: product(v), "merge copy": lambda: merge(out)}, products

    operands = (q, k) if what == "scores" else (v,)
    multiply: Callable[..., np.ndarray] = scores if what == "scores" else product

    def copy() -> list[np.ndarray]:
        return [np.ascontiguousarray(x) for x in operands]

    before = copy()
    products = {"strided": lambda: multiply(*operands), "contiguous": lambda: multiply(*copy()),
                "packed": lambda: multiply(*before)}
    return {**products, "copy": copy}, products


def checked_arms(case: Case, what: str, layout: str) -> Arms:
    """The arms, once those that compute have given the same answer."""
    functions, products = arms(case, what, layout)
    agree(f"{layout} {case.label} {what}", {name: {what: product().copy()} for name, product in products.items()},
          TOLERANCE[case.dtype])
    return functions


def trial(case: Case, what: str, layout: str, seconds: float) -> Trial:
    flops = case.flops("forward") // 2      # one of the two products

    def measure(seconds: float) -> dict[str, Any]:
        with one_blas_thread() as held:
            return timed(lambda: checked_arms(case, what, layout), RATIOS[what], flops=flops, one_blas_thread=held,
                         before=None if held else lambda: time.sleep(REST))(seconds)

    if blas_threads() is None:
        seconds = max(seconds, LEAST_ROUNDS * len(ARMS[what]) * REST)
    weights = case.B * case.H * case.Lq * case.Lk * case.itemsize
    least = {"product 1T": 3 * LEAST_CALLS * flops * case.itemsize / 4, "fresh": 3 * weights}
    return Trial(NAME, f"{layout} {case.label} {what}", {**asdict(case), "what": what, "layout": layout}, measure, seconds,
                 3 * flops, least)


def trials(quick: bool, num_threads: int) -> list[Trial]:
    """Around the first centre lengths, widths, numbers of heads and the dtype, one at a time; few interleaved heads, which may
    take NumPy long."""
    seconds = QUICK_SECONDS if quick else FULL_SECONDS
    first = cases.CENTRES[0]
    shapes, small = [first, cases.case(8, 12, 128, 64), cases.case(1, 4, 2048, 64)], [cases.case(1, 4, 128, 64)]
    if not quick:
        shapes += [cases.case(1, 24, 512, 32), cases.case(1, 6, 512, 128), cases.case(1, 16, 512, 64), cases.case(1, 48, 512, 64),
                   cases.case(32, 12, 32, 64), cases.case(1, 12, 1024, 64)]
        small += [cases.case(1, 4, 256, 64), cases.case(1, 4, 128, 64, dtype="float64")]
    double = cases.case(1, 12, 512, 64, dtype="float64")
    found = [trial(case, what, FUSED, seconds) for case in (*shapes, double) for what in ("scores", "output", "merge")
             if not quick or case is first or what == "scores" or (what == "output" and case is shapes[1])]
    return found + [trial(case, what, INTERLEAVED, seconds) for case in small for what in ("scores", "output")]


def answer(records: Sequence[Record], found: Found) -> Answer:
    interleaved, merges = of(records, layout=INTERLEAVED), of(records, what="merge")
    fused = [r for r in of(records, layout=FUSED) if r not in merges]
    held = all(r["one_blas_thread"] for r in records)
    method = ("`np.matmul` with out= into memory that is there before, on random heads split from one buffer (B, L, 3·H·D): "
              "views (B, H, L, D) whose elements lie side by side (fused) or H apart (interleaved: reshape(B, L, D, H)). The "
              "arms were checked to agree, then run in turn. "
              + ("NumPy's BLAS was held at one thread." if held else
                 f"NumPy's BLAS chose its threads; before each call {REST} s passed, so that those of the call before had come "
                 "to rest."))
    limits = ("Products alone, no softmax; the textbook's result memory is fresh at each call, here it is reused. "
              + ("With more BLAS threads products take less and a copy, which NumPy makes with one, the same: its share grows."
                 if held else ""))
    tables = [_table(fused + interleaved, "scores", "Products on strided heads and on copied ones"),
              _table(merges, "merge", "The output as (B, L, H·D)")]
    bars = [bar for r in fused for bar in _bars(r)]
    picture = Picture("numpy", "Time of NumPy's product on strided heads, and on heads that it copies first, by its parts.",
                      "stacked_bars", {"title": "NumPy: strided heads against heads copied first", "bars": bars,
                                       "x": "time over that of the product on heads packed before", "reference": 1.0})
    return Answer(_short(fused, interleaved, merges), method, limits.strip(), tables, [picture] if bars else [])


def _means(records: Sequence[Record], ratio: str) -> str:
    """The geometric mean of a ratio, with its smallest and its largest."""
    values = [each["median"] for each in ratios(records, ratio)]
    return f"{geomean(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def _short(fused: Sequence[Record], interleaved: Sequence[Record], merges: Sequence[Record]) -> str:
    said = []
    if fused:
        slower, faster = sides(ratios(fused, "strided/contiguous"))
        said.append(f"Heads of a fused projection: np.matmul on the views is faster than copying first in {faster} of "
                    f"{len(fused)} products and slower in {slower}; it takes {_means(fused, 'strided/contiguous')} of that time, "
                    f"and {_means(fused, 'strided/packed')} of the time on heads packed before (geometric mean, extremes). "
                    f"The copy is {_means(fused, 'copy/contiguous')} of the time of copying and multiplying.")
    if interleaved:
        groups = sorted(by(interleaved, _verdict).items(), key=lambda group: (not group[0], "itself" in group[0]))
        parts = [f"in {len(group)} of {len(interleaved)} products np.matmul takes {_means(group, 'strided/packed')} times as "
                 f"long as on packed ones and {_means(group, 'strided/contiguous')} times as long as copying and multiplying, of "
                 f"which the copy is {_means(group, 'copy/contiguous')}{verdict}" for verdict, group in groups]
        said.append(f"Heads interleaved element by element, which BLAS cannot take: {'; '.join(parts)}.")
    if merges:
        said.append(f"Merging the heads of the output by transpose and reshape is {_means(merges, 'merge copy/merged')} of the "
                    "time of product and merge; writing into a view of the merged array instead takes "
                    f"{_means(merges, 'in place/merged')} of it, and {_means(merges, 'in place/product')} of the product alone.")
    return " ".join(said)


def _verdict(record: Record) -> str:
    """Whether NumPy copies what BLAS cannot take, or multiplies in a loop of its own."""
    over = record["ratios"]["strided/contiguous"]
    return (": the loss is not a copy but a loop of NumPy's own in place of BLAS" if over["low"] > LOOP else
            ": NumPy makes that copy itself, and its loss is no more" if over["high"] < COPY else "")


def _table(records: Sequence[Record], what: str, title: str) -> Table:
    names, overs = ARMS[what], [f"{a}/{b}" for a, b in RATIOS[what]]
    formulas = " and ".join(FORMULAS[w] for w in dict.fromkeys(r["factors"]["what"] for r in records))
    return table(title, records, {
        "case": lambda r: r["label"], **{name: time_of(name) for name in names},
        **{over: ratio_of(over) for over in overs}},
        f"{formulas}; median times of a call; ratios within a round, with half the width of their 95 % interval, “=” where it "
        "holds 1")


def _bars(record: Record) -> list[dict[str, Any]]:
    """A product on strided heads, and one that copies first in its parts, over the time on packed heads."""
    unit = record["arms"]["packed"]["median"]
    over = {name: {key: record["arms"][name][key] / unit for key in ("median", "low", "high")} for name in ARMS["scores"]}
    copy = over["copy"]["median"]
    parts = {"strided": {"product": over["strided"]["median"]},
             "contiguous": {"product": max(0.0, over["contiguous"]["median"] - copy), "copy": copy}}
    return [{"label": arm, "group": record["label"].removeprefix(f"{FUSED} "),
             "parts": [{"name": name, "value": value} for name, value in own.items()],
             "low": over[arm]["low"], "high": over[arm]["high"]} for arm, own in parts.items()]


QUESTION = Question(
    NAME, "NumPy's own products",
    "np.matmul on strided heads against heads made contiguous first, as the textbook advises: which is faster, and how much of "
    "the loss is the copy?", trials, answer)
