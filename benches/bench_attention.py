"""Attention on strided heads against packed, contiguous ones, forward and backward, beside plain NumPy.

    pytest benches --benchmark-only --benchmark-group-by=group

The cases, the arms and their FLOPs are those of `fastmha.study`; here every case runs in both dtypes, with one thread
and with all. Answers are checked before anything is timed. The NumPy lines are `fastmha.reference`, the specification
in plain NumPy, with as many threads as NumPy's own BLAS takes.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import fastmha
from fastmha import reference
from fastmha.study import runner
from fastmha.study.cases import DIRECTIONS, QUICK, Case

SHAPES = list(dict.fromkeys(replace(case, dtype="float32", algorithm="blas") for case in QUICK))
CASES = [replace(case, dtype=dtype) for case in SHAPES for dtype in ("float32", "float64")]
THREADS = sorted({1, fastmha.get_num_threads()})
TOLERANCE = {"float32": 1e-4, "float64": 1e-11}     # of the largest element


@pytest.mark.benchmark(min_rounds=3, max_time=0.2, warmup=False, disable_gc=True)
@pytest.mark.parametrize(("arm", "threads"), [
    *(pytest.param(arm, n, id=f"{arm}-{n}") for n in THREADS for arm in ("strided", "contiguous")),
    pytest.param("numpy", None, id="numpy"),
])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label.replace(" ", "-"))      # lowest: varies slowest
def test_attention(benchmark: Any, case: Case, direction: str, arm: str, threads: int | None) -> None:
    operands = checked_operands(case)
    benchmark.group = f"{case.label} {direction}"
    benchmark.extra_info.update(
        case=case.label, direction=direction, arm=arm, threads=threads or "NumPy's BLAS", flops=case.flops(direction),
        bytes=case.operand_bytes(direction), bytes_packed=case.packed_bytes(direction) if arm == "contiguous" else 0)
    if arm == "numpy":
        benchmark(numpy_call(operands, direction))
        rest()
    else:
        benchmark(runner.arms(operands, direction, threads or 1)[arm])
    if benchmark.stats is not None:     # none with --benchmark-disable
        benchmark.extra_info["GFLOP/s"] = round(case.flops(direction) / benchmark.stats.stats.median / 1e9, 2)


def numpy_call(operands: runner.Operands, direction: str) -> Callable[[], Any]:
    o, rules = operands, operands.case.keywords
    if direction == "forward":
        return lambda: reference.attention(o.q, o.k, o.v, return_lse=True, **rules)
    out, lse = reference.attention(o.q, o.k, o.v, return_lse=True, **rules)
    return lambda: reference.attention_backward(o.grad_out, o.q, o.k, o.v, out, lse, **rules)


@lru_cache(maxsize=1)       # the benches of one case follow each other
def checked_operands(case: Case) -> runner.Operands:
    """The operands, once both arms have given NumPy's answers, forward and backward, with one thread and with all."""
    operands = runner.Operands(case)
    for direction in DIRECTIONS:
        expected = numpy_call(operands, direction)()
        for threads in THREADS:
            for arm in ("strided", "contiguous"):
                for array in operands.results(direction).values():
                    array[...] = np.nan
                runner.arms(operands, direction, threads)[arm]()
                for (name, got), wanted in zip(operands.results(direction).items(), expected, strict=True):
                    allowed = TOLERANCE[case.dtype] * np.abs(wanted).max()
                    np.testing.assert_allclose(got, wanted, rtol=0, atol=allowed, err_msg=f"{case.label} {arm} {name}")
    rest()
    return operands


def rest() -> None:
    """The threads of NumPy's BLAS keep spinning for a while after a product, on the cores that the next bench needs."""
    time.sleep(0.2)
