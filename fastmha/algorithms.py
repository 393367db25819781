"""From a validated problem to a call of the compiled core: scratch sizes, packing, allocation. No checks, no arithmetic."""
from __future__ import annotations

import numpy as np

from fastmha import _core
from fastmha._core import Problem
from fastmha.plan import blas_rows, needs_packing, product_by_blas, product_slices, tiled_whole_heads


def packed(x: np.ndarray, threads: int) -> np.ndarray:
    """A copy of heads x (B, H, L, width) with each head contiguous; broadcast batches and heads stay broadcast."""
    B, H, L, width = x.shape
    b, h = (1 if x.strides[0] == 0 else B), (1 if x.strides[1] == 0 else H)
    out = np.empty((b, h, L, width), x.dtype)
    if out.size:
        _core.pack_heads(x[:b, :h], out, threads)
    return np.broadcast_to(out, x.shape)


def _for_blas(problem: Problem, pack: bool, threads: int) -> Problem:
    """The problem with its heads packed: all of them, or those that BLAS cannot take where they lie."""
    old = problem.q, problem.k, problem.v
    new = [packed(x, threads) if pack or needs_packing(x) else x for x in old]
    if all(a is b for a, b in zip(new, old)):
        return problem
    return problem.with_heads(*new)


def blas_forward(problem: Problem, out: np.ndarray, lse: np.ndarray | None, weights: np.ndarray | None, threads: int,
                 pack: bool = False) -> None:
    """out (B, H, Lq, Dv), lse (B, H, Lq), weights (B, H, Lq, Lk) <- attention; `pack` is the contiguous layout."""
    _, _, _, Lq, Lk, _, _ = problem.shape
    rows = blas_rows(Lq, Lk, problem.itemsize)
    target = out
    if needs_packing(out):
        target = np.empty(out.shape, out.dtype)
    _core.blas_forward(_for_blas(problem, pack, threads), target, lse, weights, rows, threads)
    if target is not out:
        out[...] = target


def blas_backward(problem: Problem, out: np.ndarray, lse: np.ndarray, grad_out: np.ndarray, grad_q: np.ndarray,
                  grad_k: np.ndarray, grad_v: np.ndarray, threads: int, pack: bool = False) -> None:
    """grad_q, grad_k, grad_v <- the gradients, each of the shape of its operand."""
    _, _, _, Lq, Lk, _, _ = problem.shape
    rows = blas_rows(Lq, Lk, problem.itemsize)
    if pack or needs_packing(grad_out):
        grad_out = packed(grad_out, threads)
    _core.blas_backward(_for_blas(problem, pack, threads), out, lse, grad_out, grad_q, grad_k, grad_v, rows, threads)


def forward(name: str, problem: Problem, out: np.ndarray, lse: np.ndarray | None, weights: np.ndarray | None, threads: int,
            pack: bool = False) -> None:
    """out (B, H, Lq, Dv), lse (B, H, Lq), weights (B, H, Lq, Lk) <- attention by the named algorithm, weights not by
    "decode"; `pack` is the contiguous layout."""
    if name == "blas":
        blas_forward(problem, out, lse, weights, threads, pack)
        return
    if pack:
        problem = problem.with_heads(*(packed(x, threads) for x in (problem.q, problem.k, problem.v)))
    if name == "tiled":
        _core.tiled_forward(problem, out, lse, weights, threads)
    else:
        _core.decode_forward(problem, out, lse, threads)


def backward(name: str, problem: Problem, out: np.ndarray, lse: np.ndarray, grad_out: np.ndarray, grad_q: np.ndarray,
             grad_k: np.ndarray, grad_v: np.ndarray, threads: int, pack: bool = False) -> None:
    """grad_q, grad_k, grad_v <- the gradients by the named algorithm; out is (B, H, Lq, Dv)."""
    if name == "blas":
        blas_backward(problem, out, lse, grad_out, grad_q, grad_k, grad_v, threads, pack)
        return
    if pack:
        problem = problem.with_heads(*(packed(x, threads) for x in (problem.q, problem.k, problem.v)))
        grad_out = packed(grad_out, threads)
    _core.tiled_backward(problem, out, lse, grad_out, grad_q, grad_k, grad_v,
                         tiled_whole_heads(problem, threads), threads)


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int, *, trans_a: bool = False, trans_b: bool = False,
            bias: np.ndarray | None = None, blas: bool = False, packed: np.ndarray | None = None) -> None:
    """out := op(a) @ op(b) (+ bias): matrices with unit last stride, in slices on the pool; by BLAS, or by the kernels' own
    product where `product_by_blas` says that is no slower; `packed`: b from `packed_weights`."""
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
