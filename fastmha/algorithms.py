"""From a validated problem to a call of the compiled core: scratch sizes, packing, allocation. No checks, no arithmetic."""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fastmha import _core
from fastmha._core import Problem
from fastmha.plan import blas_rows, needs_packing, product_by_blas, product_slices, tiled_whole_heads

_LARGE_BYTES = 128 * 1024       # from where on glibc at first asks the system for memory of its own
_HEAD_ROWS = 256                # of a slice of a product that is written by heads


def empty_together(shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> list[np.ndarray]:
    """Arrays, large ones in one piece of memory: an allocator that gives large pieces back to the system at once, as glibc's
    does with several of one size, would cost a page fault every 4 KB of every call."""
    if sum(map(math.prod, shapes)) * dtype.itemsize < _LARGE_BYTES:
        return [np.empty(s, dtype) for s in shapes]
    ends = np.cumsum([math.prod(s) for s in shapes]).tolist()
    memory = np.empty(ends[-1], dtype)
    return [memory[end - math.prod(s):end].reshape(s) for s, end in zip(shapes, ends)]


def packed(threads: int, *heads: np.ndarray) -> list[np.ndarray]:
    """Copies of heads (B, H, L, width) with each head contiguous; broadcast batches and heads stay broadcast."""
    whole = [x[:1 if x.strides[0] == 0 else None, :1 if x.strides[1] == 0 else None] for x in heads]
    copies = empty_together([x.shape for x in whole], heads[0].dtype)
    for x, copy in zip(whole, copies):
        if copy.size:
            _core.pack_heads(x, copy, threads)
    return [np.broadcast_to(copy, x.shape) for copy, x in zip(copies, heads)]


def _for_blas(problem: Problem, threads: int) -> Problem:
    """The problem with those heads packed that BLAS cannot take where they lie."""
    old = problem.q, problem.k, problem.v
    new = [packed(threads, x)[0] if needs_packing(x) else x for x in old]
    if all(a is b for a, b in zip(new, old)):
        return problem
    return problem.with_heads(*new)


def blas_forward(problem: Problem, out: np.ndarray, lse: np.ndarray | None, weights: np.ndarray | None, threads: int) -> None:
    """out (B, H, Lq, Dv), lse (B, H, Lq), weights (B, H, Lq, Lk) <- attention."""
    _, _, _, Lq, Lk, _, _ = problem.shape
    rows = blas_rows(Lq, Lk, problem.itemsize)
    target = out
    if needs_packing(out):
        target = np.empty(out.shape, out.dtype)
    _core.blas_forward(_for_blas(problem, threads), target, lse, weights, rows, threads)
    if target is not out:
        out[...] = target


def blas_backward(problem: Problem, out: np.ndarray, lse: np.ndarray, grad_out: np.ndarray, grad_q: np.ndarray,
                  grad_k: np.ndarray, grad_v: np.ndarray, threads: int) -> None:
    """grad_q, grad_k, grad_v <- the gradients, each of the shape of its operand."""
    _, _, _, Lq, Lk, _, _ = problem.shape
    rows = blas_rows(Lq, Lk, problem.itemsize)
    if needs_packing(grad_out):
        grad_out = packed(threads, grad_out)[0]
    _core.blas_backward(_for_blas(problem, threads), out, lse, grad_out, grad_q, grad_k, grad_v, rows, threads)


def forward(name: str, problem: Problem, out: np.ndarray, lse: np.ndarray | None, weights: np.ndarray | None,
            threads: int) -> None:
    """out (B, H, Lq, Dv), lse (B, H, Lq), weights (B, H, Lq, Lk) <- attention by the named algorithm, weights not by
    "decode"."""
    if name == "blas":
        blas_forward(problem, out, lse, weights, threads)
    elif name == "tiled":
        _core.tiled_forward(problem, out, lse, weights, threads)
    else:
        _core.decode_forward(problem, out, lse, threads)


def backward(name: str, problem: Problem, out: np.ndarray, lse: np.ndarray, grad_out: np.ndarray, grad_q: np.ndarray,
             grad_k: np.ndarray, grad_v: np.ndarray, threads: int) -> None:
    """grad_q, grad_k, grad_v <- the gradients by the named algorithm; out is (B, H, Lq, Dv)."""
    if name == "blas":
        blas_backward(problem, out, lse, grad_out, grad_q, grad_k, grad_v, threads)
    else:
        _core.tiled_backward(problem, out, lse, grad_out, grad_q, grad_k, grad_v, tiled_whole_heads(problem, threads), threads)


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int, *, trans_a: bool = False, trans_b: bool = False,
            bias: np.ndarray | None = None, blas: bool = False, packed: np.ndarray | None = None) -> None:
    """out := op(a) @ op(b) (+ bias): matrices with unit last stride, in slices on the pool; by BLAS, or by the kernels' own
    product where `product_by_blas` says that is no slower; `packed`: b from `packed_weights`. out is a matrix, or the heads
    (B, heads, L, width) of the matrix (B · L, heads · width): then each head is written where it belongs."""
    if out.ndim == 4:
        m, slices = len(a), (max(1, min(out.shape[2], _HEAD_ROWS)), out.shape[3])
        if out.shape[3] % _core.PANEL_COLUMNS:
            packed = None
    else:
        m, n = out.shape
        slices = (m, n) if 0 < m <= 256 and 0 < n <= 256 else product_slices(m, n)
    if blas or product_by_blas(m):
        _core.matmul(a, b, out, trans_a, trans_b, 1.0, 0.0, bias, slices, threads)
    else:
        _core.matmul_tiled(a, b, out, trans_a, trans_b, bias, slices, threads, packed)


def packed_weights(b: np.ndarray) -> np.ndarray:
    """A copy of b (K, N) in the order in which the kernels' own product reads it."""
    lanes = _core.selected_isa()[1] // b.itemsize
    packed = np.empty(b.shape[0] * (-(-b.shape[1] // lanes) * lanes), b.dtype)
    _core.pack_weights(b, packed)
    return packed
