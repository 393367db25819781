"""Which algorithm runs, in which tiles, and why: pure functions of shapes, widths, dtype and kinds of mask.

Nothing here looks at values of q, k, v, at the batch size or at the number of threads where bits could depend on it
(a batch row's bits must not depend on its neighbours).
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastmha import _core, validate
from fastmha._core import Problem

ALGORITHMS = ("auto", "blas")
_SCORE_BLOCK_BYTES = 256 * 1024     # a block of scores that stays in a second-level cache beside the keys it meets
_MINIMUM_ROWS = 8


@dataclass(frozen=True)
class Plan:
    """What a call of `fastmha.attention` (or its backward) will do. `print` it for a receipt.

    Attributes
    ----------
    algorithm : str
        The algorithm that runs.
    reasons : dict of str to str
        Why this algorithm, and why not each other one.
    isa : str
        Instruction set of the kernels.
    threads : int
        Threads that may take part.
    tile : tuple of int
        (query rows, keys) of one block of scores.
    flops : int
        Floating-point operations of the products over the pairs that causality, window and padding lengths leave:
        2 · (D + Dv) a pair forward, 2 · (3 D + 2 Dv) more with `backward`.
    bytes_copied : int
        Bytes of q, k, v (and their like) that are copied before the kernels run.
    scratch_bytes : int
        Scratch memory of all threads.
    balance : float
        Predicted share of `threads` that is kept busy, in (0, 1]: total work over threads times the makespan of the
        items handed out in order.
    """

    algorithm: str
    reasons: dict[str, str]
    isa: str
    threads: int
    tile: tuple[int, int]
    flops: int
    bytes_copied: int
    scratch_bytes: int
    balance: float
    backward: bool = False
    shapes: str = field(default="", repr=False)

    def __str__(self) -> str:
        lines = [
            f"fastmha plan: {'forward + backward' if self.backward else 'forward'}, {self.shapes}",
            f"  algorithm   {self.algorithm}: {self.reasons[self.algorithm]}",
            *(f"  not {name:<7} {why}" for name, why in self.reasons.items() if name != self.algorithm),
            f"  kernels     {self.isa}, {self.threads} thread{'s' * (self.threads != 1)}, balance {self.balance:.0%}",
            f"  tile        {self.tile[0]} queries x {self.tile[1]} keys",
            f"  work        {self.flops / 1e9:.3g} GFLOP",
            f"  copied      {self.bytes_copied:,} bytes",
            f"  scratch     {self.scratch_bytes:,} bytes",
        ]
        return "\n".join(lines)


def choose(problem: Problem, algorithm: str) -> tuple[str, dict[str, str]]:
    """The algorithm for a problem, and the reasons for and against each."""
    if algorithm not in ALGORITHMS:
        validate.choice("algorithm", algorithm, ALGORITHMS)
    why = "named by the caller" if algorithm == "blas" else "the only algorithm so far"
    return "blas", {"blas": f"{why}; scores in blocks, products by BLAS"}


def blas_rows(Lq: int, Lk: int, itemsize: int) -> int:
    """Query rows in one block of scores of the "blas" algorithm."""
    rows = _SCORE_BLOCK_BYTES // (itemsize * max(1, Lk))
    return max(_MINIMUM_ROWS, rows // 16 * 16)


def needs_packing(x: np.ndarray) -> bool:
    """Whether BLAS cannot take the heads of x (B, H, L, width) where they lie: a row stride below the width (also zero
    and negative ones) or beyond a C int."""
    rows, width, stride = x.shape[2], x.shape[3], x.strides[2] // x.itemsize
    return rows > 1 and not width <= max(1, stride) <= validate.BLAS_INT_MAX


def product_slices(m: int, n: int, k: int) -> tuple[int, int]:
    """(rows, columns) of the slices in which the pool takes a product (m, k) @ (k, n): by the sizes alone."""
    rows = m if m <= 256 else 256
    columns = n
    if m <= 512 and n > 256:
        columns = max(256, -(-n // 4) // 64 * 64)
    return max(1, rows), max(1, columns)


def pairs(problem: Problem) -> np.ndarray:
    """(B, Lq) numbers of keys that causality, window and padding lengths leave to each query."""
    B, _, _, Lq, Lk, _, _ = problem.shape
    low, high = np.zeros((B, Lq), np.int64), np.full((B, Lq), Lk, np.int64)
    if problem.key_lengths is not None:
        high = np.minimum(high, problem.key_lengths[:, None])
    left, right = problem.window
    if problem.offset is not None:
        diagonal = np.arange(Lq)[None, :] + problem.offset[:, None]
        if left is not None:
            low = np.maximum(low, diagonal - left)
        if right is not None:
            high = np.minimum(high, diagonal + right + 1)
    return np.maximum(0, high - low)


def makespan(items: np.ndarray, threads: int) -> float:
    """When the last thread ends if items of these costs are handed out in order to whoever is free."""
    busy = np.zeros(max(1, threads))
    for cost in items:
        busy[busy.argmin()] += cost
    return float(busy.max())


def make_plan(problem: Problem, algorithm: str, threads: int, backward: bool) -> Plan:
    """The plan of a call; see `Plan`."""
    name, reasons = choose(problem, algorithm)
    validate.blas_sizes(problem)
    B, H, Hkv, Lq, Lk, D, Dv = problem.shape
    rows = min(blas_rows(Lq, Lk, problem.itemsize), max(1, Lq))
    work = pairs(problem)
    flops = int(work.sum()) * H * (2 * (D + Dv) + (2 * (3 * D + 2 * Dv) if backward else 0))
    copied = problem.bytes_copied
    for x in (problem.q, problem.k, problem.v):
        if needs_packing(x):
            copied += validate.collapsed(x).size * problem.itemsize
    starts = np.arange(0, max(Lq, 1), rows)
    blocks = np.add.reduceat(work, starts, axis=1) if work.size else np.zeros((B, len(starts)))
    if backward:
        items = np.repeat(blocks.sum(1) * (H // Hkv if Hkv else 0), Hkv)
    else:
        items = np.repeat(blocks[:, None, ::-1], H, axis=1).ravel()
    used = max(1, min(threads, len(items)))
    ideal, span = float(items.sum()) / max(1, threads), makespan(items, threads)
    per_thread = (2 * rows + 1 if backward else rows) * Lk + rows
    return Plan(
        algorithm=name, reasons=reasons, isa=_core.selected_isa()[0], threads=threads, tile=(rows, Lk), flops=flops,
        bytes_copied=copied, scratch_bytes=per_thread * problem.itemsize * used, balance=ideal / span if span else 1.0,
        backward=backward,
        shapes=f"{problem.dtype} B {B}, H {H}{f'/{Hkv}' if Hkv != H else ''}, L {Lq} x {Lk}, D {D}"
               f"{f'/{Dv}' if Dv != D else ''}, layout {problem.layout}",
    )
