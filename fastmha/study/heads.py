"""Strided heads, as a fused projection writes them, against contiguous ones.

The operands lie as a fused projection writes them: q, k, v are views of one buffer (B, L, (H + 2·Hkv)·D), the output goes
into the merged (B, L, H·D) buffer, the gradients into one buffer like the first. The arms, on the same data:

    strided     the kernels on the heads where they lie
    contiguous  heads packed by the library's blocked copy, then the same kernels: a module with ``layout="contiguous"``.
                Forward k and v (queries are read once, into a block of the kernel), backward q and grad_out too
    packed      the same kernels on heads packed before the clock starts: what contiguous would cost if packing were free
    pack        those copies alone, with the allocation of their memory, which "contiguous" has as well
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise

import numpy as np

from fastmha import algorithms, validate
from fastmha.study import cases
from fastmha.study.cases import Case, Run
from fastmha.study.trial import Arms, Trial, agree, timed

NAME = "heads"
TITLE = "Strided or contiguous heads"
QUESTION = ("Heads as the fused projection writes them, (B, L, H, D), or packed first, (B, H, L, D): which is faster, "
            "for which shapes, and by how much?")
NEEDS: tuple[str, ...] = ()
ARMS = ("strided", "contiguous", "packed", "pack")
QUICK_SECONDS, FULL_SECONDS = 0.35, 1.0      # a trial
TOLERANCE = {"float32": 1e-4, "float64": 1e-12}    # of the largest element; at most the order of sums differs


class Operands:
    """Random operands of a case and buffers for its results, all views (B, heads, L, D) of fused buffers.

    Attributes
    ----------
    q, k, v, grad_out : arrays
        Standard normal.
    out, grad_q, grad_k, grad_v : arrays
        Where an arm writes; `lse` (B, H, Lq) is that of the forward pass from the start.
    problem : Problem
        q, k, v and the rules, validated.
    """

    def __init__(self, case: Case, num_threads: int = 1, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.case = case
        self.q, self.k, self.v = self._fused(generator)
        self.grad_q, self.grad_k, self.grad_v = self._fused(None)
        self.grad_out, self.out = (_heads(case, case.Lq, (case.H,), g)[0] for g in (generator, None))
        self.lse = np.empty((case.B, case.H, case.Lq), case.dtype)
        rules = {"is_causal": False, "offset": None, **case.keywords}
        self.problem = validate.attention_problem(self.q, self.k, self.v, "BHLD", None, rules["is_causal"],
                                                  rules["offset"], None, None, None, None)
        algorithms.forward(case.algorithm, self.problem, self.out, self.lse, None, num_threads)

    def _fused(self, generator: np.random.Generator | None) -> list[np.ndarray]:
        case = self.case
        if case.Lq == case.Lk:
            return _heads(case, case.Lq, (case.H, case.Hkv, case.Hkv), generator, case.row)
        return [*_heads(case, case.Lq, (case.H,), generator),
                *_heads(case, case.Lk, (case.Hkv, case.Hkv), generator, case.row)]

    def results(self, direction: str) -> dict[str, np.ndarray]:
        """The arrays that an arm writes, by name."""
        if direction == "forward":
            return {"out": self.out, "lse": self.lse}
        return {"grad_q": self.grad_q, "grad_k": self.grad_k, "grad_v": self.grad_v}


def _heads(case: Case, length: int, heads: Sequence[int], generator: np.random.Generator | None,
           row: int = 0) -> list[np.ndarray]:
    """Views (B, heads, length, D), side by side in the rows of one buffer (B, length, sum of heads · D, or row bytes)."""
    width = max(sum(heads) * case.D, row // case.itemsize)
    if generator is None:
        buffer = np.zeros((case.B, length, width), case.dtype)
    else:
        buffer = generator.standard_normal((case.B, length, width), np.dtype(case.dtype).type)
    ends = np.cumsum((0, *heads)).tolist()
    split = buffer[:, :, :ends[-1] * case.D].reshape(case.B, length, ends[-1], case.D)
    return [split[:, :, start:end].transpose(0, 2, 1, 3) for start, end in pairwise(ends)]


def arms(operands: Operands, direction: str, num_threads: int) -> dict[str, Callable[[], None]]:
    """What is timed, by name; each call computes the whole case and writes into the results of `operands`."""
    o, name = operands, operands.case.algorithm

    def pack() -> tuple:
        if direction == "forward":
            return algorithms.contiguous(o.problem, num_threads), o.grad_out
        q, k, v, grad_out = algorithms.packed(num_threads, o.q, o.k, o.v, o.grad_out)
        return o.problem.with_heads(q, k, v), grad_out

    def kernel(problem: algorithms.Problem, grad_out: np.ndarray) -> None:
        if direction == "forward":
            algorithms.forward(name, problem, o.out, o.lse, None, num_threads)
        else:
            algorithms.backward(name, problem, o.out, o.lse, grad_out, o.grad_q, o.grad_k, o.grad_v, num_threads)

    before = pack()
    return {"strided": lambda: kernel(o.problem, o.grad_out), "contiguous": lambda: kernel(*pack()),
            "packed": lambda: kernel(*before), "pack": lambda: pack() and None}


def checked_arms(operands: Operands, direction: str, num_threads: int) -> Arms:
    """The arms, once those that compute have given the same answer.

    Raises
    ------
    ArmsDisagreeError
    """
    case, functions, answers = operands.case, arms(operands, direction, num_threads), {}
    saved_lse = operands.lse.copy()
    for arm in ("strided", "contiguous", "packed"):
        for array in operands.results(direction).values():
            array[...] = np.nan         # what an arm leaves out shows
        functions[arm]()
        answers[arm] = {key: array.copy() for key, array in operands.results(direction).items()}
    operands.lse[...] = saved_lse
    agree(f"{case.label} {direction}", answers, TOLERANCE[case.dtype])
    return functions


def trial(run: Run, num_threads: int, seconds: float, question: str = NAME) -> Trial:
    case, direction, count = run.case, run.direction, run.threads or num_threads
    flops = case.flops(direction)
    measure = timed(
        lambda: checked_arms(Operands(case, count), direction, count),
        [("strided", "contiguous"), ("strided", "packed"), ("pack", "contiguous")], cold=run.cold,
        flops=flops, bytes=case.operand_bytes(direction), packed_bytes=case.packed_bytes(direction), row_bytes=case.row_bytes)
    label = f"{case.label} {direction} {count}T{' cold' * run.cold}"
    # six calls to check and warm up, and at least five rounds of three
    return Trial(question, label, {**asdict(case), "direction": direction, "threads": count, "cold": run.cold}, measure,
                 seconds, 3 * flops)


def trials(quick: bool, num_threads: int) -> list[Trial]:
    """The trials of the quick or the full study with so many threads."""
    runs, seconds = (cases.quick(), QUICK_SECONDS) if quick else (cases.full(), FULL_SECONDS)
    found = (trial(run, num_threads, seconds) for run in runs)
    return list({t.label: t for t in found}.values())      # with one thread, "one" and "all" are the same
