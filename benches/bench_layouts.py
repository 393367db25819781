"""What the layout of heads costs: the cases of `fastmha study --quick` under pytest-benchmark.

    pytest benches/bench_layouts.py --benchmark-only
    pytest benches/bench_layouts.py --benchmark-only --benchmark-autosave
    pytest-benchmark compare --group-by=group --histogram=layouts

A group is one case: heads, with an arm for strided, contiguous (packing included) and packed ones (packing not included)
and plain NumPy beside them; or a whole layer whose projection writes heads side by side (strided) or each contiguous.
Cases, arms and FLOPs are those of `fastmha.study`. Answers are checked before anything is timed. NumPy is
`fastmha.reference`, the specification, with as many threads as NumPy's own BLAS takes.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

import fastmha
from fastmha import reference
from fastmha.study import cases, heads, layers
from fastmha.study.cases import Layer, Run
from fastmha.study.trial import Arms, agree

THREADS = fastmha.get_num_threads()
RUNS = list(dict.fromkeys(run for run in cases.quick() if run.threads in (0, 1)))
TOLERANCE = {"float32": 1e-4, "float64": 1e-11}     # of the largest element
timing = pytest.mark.benchmark(min_rounds=5, max_time=0.3, warmup=True, warmup_iterations=1, disable_gc=True)


def id_of(value: Any) -> str:
    if isinstance(value, Run):
        return f"{value.case.name}-{value.direction}-{value.threads or THREADS}T".replace(" ", "-")
    return value.label.replace(" ", "-") if isinstance(value, Layer) else str(value)


@timing
@pytest.mark.parametrize("arm", ["strided", "contiguous", "packed", "numpy"])
@pytest.mark.parametrize("run", RUNS, ids=id_of)        # lowest: varies slowest
def test_heads(benchmark: Any, run: Run, arm: str) -> None:
    case, threads = run.case, run.threads or THREADS
    benchmark.group = f"{case.name} {run.direction} {threads}T"
    benchmark.extra_info.update(arm=arm, threads="NumPy's BLAS" if arm == "numpy" else threads, flops=case.flops(run.direction),
                                bytes=case.operand_bytes(run.direction), bytes_packed=case.packed_bytes(run.direction))
    benchmark(checked_heads(run, threads)[arm])
    if arm == "numpy":
        rest()
    add_rate(benchmark, case.flops(run.direction))


@timing
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
@pytest.mark.parametrize("what", layers.PASSES)
@pytest.mark.parametrize("layer", cases.QUICK_LAYERS, ids=id_of)
def test_layers(benchmark: Any, layer: Layer, what: str, layout: str) -> None:
    trial = layers.trial(layer, what, THREADS, 0.0)
    benchmark.group = trial.label
    benchmark.extra_info.update(layout=layout, threads=THREADS, flops=trial.flops // 2)
    benchmark(checked_layers(layer, what)[layout])
    add_rate(benchmark, trial.flops // 2)


@lru_cache(maxsize=1)       # the benches of one case follow each other
def checked_heads(run: Run, threads: int) -> Arms:
    """The arms and NumPy's, once all have given NumPy's answers."""
    case, direction = run.case, run.direction
    operands = heads.Operands(case, threads)
    arms, by_numpy = heads.checked_arms(operands, direction, threads), numpy_call(operands, direction)
    expected = dict(zip(operands.results(direction), by_numpy(), strict=True))
    arms["strided"]()
    agree(f"{case.name} {direction}", {"numpy": expected, "strided": operands.results(direction)}, TOLERANCE[case.dtype])
    rest()
    return {**arms, "numpy": by_numpy}


@lru_cache(maxsize=1)
def checked_layers(layer: Layer, what: str) -> Arms:
    arms = layers.arms(layer, what, THREADS)
    agree(layer.label, {name: {"result": arm()} for name, arm in arms.items()}, TOLERANCE[layer.dtype])
    return arms


def numpy_call(o: heads.Operands, direction: str) -> Callable[[], Any]:
    rules = o.case.keywords
    if direction == "forward":
        return lambda: reference.attention(o.q, o.k, o.v, return_lse=True, **rules)
    out, lse = reference.attention(o.q, o.k, o.v, return_lse=True, **rules)
    return lambda: reference.attention_backward(o.grad_out, o.q, o.k, o.v, out, lse, **rules)


def add_rate(benchmark: Any, flops: int) -> None:
    if benchmark.stats is not None:     # none with --benchmark-disable
        benchmark.extra_info["GFLOP/s"] = round(flops / benchmark.stats.stats.median / 1e9, 2)


def rest() -> None:
    """The threads of NumPy's BLAS keep spinning for a while after a product, on the cores that the next bench needs."""
    time.sleep(0.2)
