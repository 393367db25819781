"""The algorithms: what each is called and can do, and the calls of the compiled core: blocks, packing, allocation.

`BY_NAME` holds one constant record for each; who needs to know something about an algorithm asks its record. No checks of user
input, no arithmetic.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fastmha import _core, tuning, validate
from fastmha._core import Problem
from fastmha.precision import parts_of, parts_of_product, resolve

_SCORE_BLOCK_BYTES = 256 * 1024     # a block of scores that stays in a second-level cache beside the keys it meets
_MINIMUM_ROWS = 8
_BLOCK_ROWS, _TILE_KEYS, _CHUNK_KEYS, DECODE_ROWS_MAX = _core.tile_sizes()
_LARGE_BYTES = 128 * 1024       # from where on glibc at first asks the system for memory of its own
_HEAD_ROWS = 256                # of a slice of a product that is written by heads
_SLICE_TERMS = 2**31            # multiply-adds of a slice: some tens of milliseconds
_SINGLE, _DOUBLE = validate.FLOAT_TYPES
_LINE = 64                      # bytes of a cache line
_FEW_ROWS, _SOME_ROWS = 64, 256     # of the first operand of a product
_LEAST_ROWS, _LEAST_COLUMNS = 64, 128   # of a slice of a product, where threads want more of them
_TILE_ROWS = 512                # of a slice of a product on matrix tiles: what it reads of the other operand serves as many


def gradients(problem: Problem, of_q: tuple[int, ...], of_k: tuple[int, ...], of_v: tuple[int, ...]) -> list[np.ndarray]:
    """Arrays of these shapes for the gradients of q, k and v."""
    if problem.element == problem.stored:
        return empty_together([of_q, of_k, of_v], problem.element)
    return [np.empty(of_q, problem.element), *empty_together([of_k, of_v], problem.stored)]


def empty_together(shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> list[np.ndarray]:
    """Arrays, large ones in one piece of memory: an allocator that gives large pieces back to the system at once, as glibc's
    does with several of one size, would cost a page fault every 4 KB of every call."""
    sizes = [math.prod(s) for s in shapes]
    if sum(sizes) * dtype.itemsize < _LARGE_BYTES:
        return [np.empty(s, dtype) for s in shapes]
    ends = np.cumsum(sizes).tolist()
    memory = np.empty(ends[-1], dtype)
    return [memory[end - math.prod(s):end].reshape(s) for s, end in zip(shapes, ends)]


def packed(threads: int, *heads: np.ndarray, dtype: np.dtype | None = None) -> list[np.ndarray]:
    """Copies of heads (B, H, L, width) with each head contiguous, where they are of half precision in another dtype; broadcast
    batches and heads stay broadcast."""
    whole = [x[:1 if x.strides[0] == 0 else None, :1 if x.strides[1] == 0 else None] for x in heads]
    copies = empty_together([x.shape for x in whole], heads[0].dtype if dtype is None else dtype)
    for x, copy in zip(whole, copies):
        if copy.size:
            _core.pack_heads(x, copy, threads)
    return [np.broadcast_to(copy, x.shape) for copy, x in zip(copies, heads)]


def blas_rows(Lq: int, Lk: int, itemsize: int) -> int:
    """Query rows in one block of scores of the "blas" algorithm."""
    rows = _SCORE_BLOCK_BYTES // (itemsize * max(1, Lk))
    return max(_MINIMUM_ROWS, rows // 16 * 16)


def needs_packing(x: np.ndarray) -> bool:
    """Whether BLAS cannot take the heads of x (B, H, L, width) where they lie: a row stride below the width (also zero
    and negative ones) or beyond a C int."""
    rows, width, stride = x.shape[2], x.shape[3], x.strides[2] // x.itemsize
    return rows > 1 and width > 0 and not max(1, width) <= stride <= validate.BLAS_INT_MAX


def copied_for_blas(x: np.ndarray, dtype: np.dtype) -> bool:
    """Whether BLAS cannot take the heads of x where they lie, in a computation of that dtype."""
    return x.dtype != dtype or needs_packing(x)


def _for_blas(problem: Problem, threads: int) -> Problem:
    """The problem with those heads packed, or converted, that BLAS cannot take where they lie."""
    old = problem.q, problem.k, problem.v
    new = [_taken(x, problem.dtype, threads) for x in old]
    if all(a is b for a, b in zip(new, old)):
        return problem
    return problem.with_heads(*new)


def _taken(x: np.ndarray, dtype: np.dtype, threads: int) -> np.ndarray:
    return packed(threads, x, dtype=dtype)[0] if copied_for_blas(x, dtype) else x


def _blas_forward(problem: Problem, out: np.ndarray, lse: np.ndarray | None, weights: np.ndarray | None, threads: int) -> None:
    """out (B, H, Lq, Dv), lse (B, H, Lq), weights (B, H, Lq, Lk) <- attention."""
    _, _, _, Lq, Lk, _, _ = problem.shape
    rows = blas_rows(Lq, Lk, problem.itemsize)
    target = out
    if copied_for_blas(out, problem.dtype):
        target = np.empty(out.shape, problem.dtype)
    _core.blas_forward(_for_blas(problem, threads), target, lse, weights, rows, threads)
    if target is not out:
        _core.pack_heads(target, out, threads)


def _blas_backward(problem: Problem, out: np.ndarray, lse: np.ndarray, grad_out: np.ndarray, grad_q: np.ndarray,
                   grad_k: np.ndarray, grad_v: np.ndarray, states: np.ndarray | None, threads: int) -> None:
    """grad_q, grad_k, grad_v <- the gradients, each of the shape of its operand."""
    _, _, _, Lq, Lk, _, _ = problem.shape
    rows = blas_rows(Lq, Lk, problem.itemsize)
    dtype, grads = problem.dtype, (grad_q, grad_k, grad_v)
    if out.dtype != dtype:
        out = packed(threads, out, dtype=dtype)[0]
    of_q, of_k, of_v = targets = [x if x.dtype == dtype else np.empty(x.shape, dtype) for x in grads]
    grad_out = _taken(grad_out, dtype, threads)
    _core.blas_backward(_for_blas(problem, threads), out, lse, grad_out, of_q, of_k, of_v, states, rows, threads)
    for target, x in zip(targets, grads):
        if target is not x:
            _core.pack_heads(target, x, threads)


def _blas_tile(problem: Problem) -> tuple[int, int]:
    _, _, _, Lq, Lk, _, _ = problem.shape
    return min(blas_rows(Lq, Lk, problem.itemsize), max(1, Lq)), Lk


def _blas_scratch(problem: Problem, backward: bool, threads: int) -> tuple[int, int]:
    return _core.blas_scratch(problem, _blas_tile(problem)[0], backward), 0


def _tiled_forward(problem: Problem, out: np.ndarray, lse: np.ndarray | None, weights: np.ndarray | None, threads: int) -> None:
    problem.parts = parts_of(problem)
    _core.tiled_forward(problem, out, lse, weights, threads)


def _tiled_backward(problem: Problem, out: np.ndarray, lse: np.ndarray, grad_out: np.ndarray, grad_q: np.ndarray,
                    grad_k: np.ndarray, grad_v: np.ndarray, states: np.ndarray | None, threads: int,
                    by_vectors: bool = False) -> None:
    problem.parts = 0 if by_vectors else parts_of(problem, backward=True)
    _core.tiled_backward(problem, out, lse, grad_out, grad_q, grad_k, grad_v, states, None, threads)


def _tiled_tile(problem: Problem) -> tuple[int, int]:
    return _BLOCK_ROWS, _TILE_KEYS


def _tiled_scratch(problem: Problem, backward: bool, threads: int) -> tuple[int, int]:
    problem.parts = parts_of(problem, backward)
    return _core.tiled_scratch(problem, backward, threads)


def _decode_forward(problem: Problem, out: np.ndarray, lse: np.ndarray | None, weights: None, threads: int) -> None:
    _core.decode_forward(problem, out, lse, threads)


def _decode_tile(problem: Problem) -> tuple[int, int]:
    _, H, Hkv, Lq, _, _, _ = problem.shape
    return Lq * (H // Hkv if Hkv else 0), _CHUNK_KEYS


def _decode_scratch(problem: Problem, backward: bool, threads: int) -> tuple[int, int]:
    return _core.decode_scratch(problem, threads)


class Algorithm(NamedTuple):
    """What an algorithm is called, what it can do, and its functions."""

    name: str
    forward: Callable[..., None]                # (problem, out, lse, weights, threads), as `forward`
    backward: Callable[..., None] | None        # (…, grad_v, states, threads), as `backward`; or None
    weights: bool                               # whether forward can return the weights
    stored: tuple[str, ...]                     # dtypes of keys and values that forward converts as it loads them
    most_rows: int | None                       # most query rows per key/value head (Lq · H / Hkv) that it takes
    by_blas: bool                               # its products are BLAS's: heads may need packing; so are those of projections
    tile: Callable[[Problem], tuple[int, int]]                      # (query rows, keys) of one block of scores
    scratch: Callable[[Problem, bool, int], tuple[int, int]]        # (bytes of each thread, bytes that they share)


_ANY_STORED = ("float16", "bfloat16", "float32", "float64")
BLAS = Algorithm("blas", _blas_forward, _blas_backward, weights=True, stored=(), most_rows=None, by_blas=True,
                 tile=_blas_tile, scratch=_blas_scratch)
TILED = Algorithm("tiled", _tiled_forward, _tiled_backward, weights=True, stored=_ANY_STORED, most_rows=None, by_blas=False,
                  tile=_tiled_tile, scratch=_tiled_scratch)
DECODE = Algorithm("decode", _decode_forward, None, weights=False, stored=_ANY_STORED, most_rows=DECODE_ROWS_MAX, by_blas=False,
                   tile=_decode_tile, scratch=_decode_scratch)
BY_NAME: Mapping[str, Algorithm] = MappingProxyType({record.name: record for record in (BLAS, TILED, DECODE)})
AUTO = "auto"                           # the caller names none
ALGORITHMS = (AUTO, *BY_NAME)           # what a caller may say
BY_BLAS = frozenset(name for name, record in BY_NAME.items() if record.by_blas)


def forward(name: str, problem: Problem, out: np.ndarray, lse: np.ndarray | None, weights: np.ndarray | None,
            threads: int) -> None:
    """out (B, H, Lq, Dv), lse (B, H, Lq), weights (B, H, Lq, Lk) <- attention by the named algorithm, which must be able to; lse
    and weights of the computation's dtype."""
    BY_NAME[name].forward(problem, validate.bits(out), lse, weights, threads)


def backward(name: str, problem: Problem, out: np.ndarray, lse: np.ndarray, grad_out: np.ndarray, grad_q: np.ndarray,
             grad_k: np.ndarray, grad_v: np.ndarray, threads: int, grad_mask: np.ndarray | None = None) -> np.ndarray | None:
    """grad_q, grad_k, grad_v, and grad_mask in the additive mask's shape, <- the gradients by the named algorithm, which can;
    out is (B, H, Lq, Dv). Returns the gradient of the sinks, if there are any."""
    B, H, _, Lq, Lk, _, _ = problem.shape
    if problem.sinks is None and grad_mask is None:
        backward_of(name, problem, out, lse, grad_out, grad_q, grad_k, grad_v, None, threads)
        return None
    states = np.zeros((B, H, Lq, _core.ROW_STATE), problem.dtype)
    # The pass over the mask multiplies by vectors, and rounds scores as "tiled" does: so must what it knows of each row.
    by_vectors = {"by_vectors": True} if grad_mask is not None and name == TILED.name else {}
    backward_of(name, problem, out, lse, grad_out, grad_q, grad_k, grad_v, states, threads, **by_vectors)
    if grad_mask is not None:
        if 0 in (B, H, Lq, Lk):
            grad_mask[...] = 0
        else:
            of_tiled = states
            if name != TILED.name:
                of_tiled = np.zeros_like(states)
                spare = [np.empty(x.shape, x.dtype) for x in (grad_q, grad_k, grad_v)]
                backward_of(TILED.name, problem, out, lse, grad_out, spare[0], spare[1], spare[2], of_tiled, threads,
                            by_vectors=True)
            _core.mask_gradient(problem, validate.bits(grad_out), of_tiled, validate.bits(grad_mask), threads)
    return None if problem.sinks is None else sink_gradient(problem.sinks, states)


def backward_of(name: str, problem: Problem, out: np.ndarray, lse: np.ndarray, grad_out: np.ndarray, grad_q: np.ndarray,
                grad_k: np.ndarray, grad_v: np.ndarray, states: np.ndarray | None, threads: int, **by_vectors: bool) -> None:
    """grad_q, grad_k, grad_v <- the gradients, and states (B, H, Lq, ROW_STATE), zeros before, or None, <- what `sink_gradient`
    and the gradient of a mask are made of. by_vectors: of "tiled", never on matrix tiles."""
    run = BY_NAME[name].backward
    assert run is not None      # `planning.choose` has seen to it
    bits = validate.bits
    run(problem, bits(out), lse, bits(grad_out), bits(grad_q), bits(grad_k), bits(grad_v), states, threads, **by_vectors)


def sink_gradient(sinks: np.ndarray, states: np.ndarray) -> np.ndarray:
    """(H,): the sum of -P delta over batch rows and queries, where P is the weight of the sink."""
    shift, inverse, delta = (states[..., i].astype(np.float64) for i in range(_core.ROW_STATE))
    with np.errstate(all="ignore"):
        weights = np.exp(sinks[:, None] - shift) * inverse
        terms = np.where(weights == 0, 0, weights * delta)
        return np.subtract(0, np.add.reduce(terms, axis=(0, 2))).astype(sinks.dtype)


def for_backward(algorithm: str) -> str:
    """What a caller said, for a backward pass: that, or "auto" where it names an algorithm that has none."""
    record = BY_NAME.get(algorithm)
    return algorithm if record is None or record.backward is not None else AUTO


def for_weights(algorithm: str) -> str:
    """The algorithm that returns weights where a caller said this: the one named if it can, else "tiled"."""
    record = BY_NAME.get(algorithm)
    return algorithm if record is not None and record.weights else TILED.name


# ---------------------------------------------------------------------------------------------------------- products

def product_slices(m: int, n: int) -> tuple[int, int]:
    """(rows, columns) of the slices in which the pool takes a product with a result (m, n) by BLAS, whose bits may depend on
    them: by the sizes alone."""
    rows = m if m <= 256 else 256
    columns = n if m > 1024 or n <= 256 else max(256, -(-n // 256) * _core.PANEL_COLUMNS)
    return max(1, rows), max(1, columns)


@lru_cache(maxsize=4096)
def own_slices(m: int, n: int, k: int, threads: int) -> tuple[int, int]:
    """The same by the kernels' own product, whose bits do not: what is copied of a serves as many columns, and of b as many rows,
    as keep every thread busy to the end and leave an interrupt within reach."""
    rows = max(1, min(m, 1024, max(256, m // threads // 256 * 256)))
    while -(-m // rows) * -(-n // _LEAST_COLUMNS) < threads and rows > _LEAST_ROWS:
        rows = max(_LEAST_ROWS, rows // 2)
    most = max(_LEAST_COLUMNS, _SLICE_TERMS // (rows * max(1, k)) // _core.PANEL_COLUMNS * _core.PANEL_COLUMNS)
    if threads == 1 or n <= _LEAST_COLUMNS:
        return rows, max(1, min(n, most))
    # of few rows b is read from memory as rows of a slice: long ones arrive sooner; else a thread may be slower than others
    parts, each = -(-m // rows), 1 if m <= _FEW_ROWS else 2 if m <= _SOME_ROWS else 4
    widest = min(most, max(_LEAST_COLUMNS, -(-n * parts // threads // _core.PANEL_COLUMNS) * _core.PANEL_COLUMNS))
    ends = {w: -(-parts * -(-n // w) // threads) * w for w in range(_LEAST_COLUMNS, widest + 1, _core.PANEL_COLUMNS)}
    first = min(ends.values())
    even = [w for w, end in ends.items() if end == first]
    many = [w for w in even if parts * -(-n // w) >= each * threads]
    return rows, min(n, max(many or even))


def product_by_blas(m: int, trans_b: bool = False) -> bool:
    """Whether a product with m rows goes through BLAS, where that is at least as fast for all (`Tuning.products_by_blas`), and
    for a single row times a transposed matrix: its sums run along the rows as they lie (a gemv)."""
    return (trans_b and m == 1) or tuning.current().products_by_blas


class Packed(NamedTuple):
    """A weight in the orders in which products read it, where they do."""

    panels: np.ndarray | None       # by vectors; or
    tiles: np.ndarray | None        # on matrix tiles, bytes of so many
    parts: int                      # of the tiles


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int, *, trans_a: bool = False, trans_b: bool = False,
            bias: np.ndarray | None = None, blas: bool = False, packed: Packed | None = None,
            precision: str | None = None) -> None:
    """out := op(a) @ op(b) (+ bias): matrices with unit last stride, of float64, or each of float32 or half precision, summed in
    float32 and rounded once; in slices on the pool. By BLAS; on matrix tiles, where types and `precision` let it; or by the
    kernels' own product, where `product_by_blas` does not say that BLAS is no slower. `packed`: what `pack` made of b. out is a
    matrix, or the heads (B, heads, L, width) of the matrix (B · L, heads · width): then each head is written where it belongs."""
    m = len(a) if out.ndim == 4 else len(out)
    of, target = a.dtype, out
    if not (of is b.dtype is out.dtype and (of is _DOUBLE or (of is _SINGLE and resolve(precision) == "highest"))):
        a, b, out = validate.bits(a), validate.bits(b), validate.bits(out)
        bias = bias if bias is None else np.ascontiguousarray(validate.cast(bias, validate.computed(of)))
        parts = 0 if blas else parts_of_product(a.dtype, b.dtype, precision, m, a.shape[0 if trans_a else 1],
                                                b.shape[0 if trans_b else 1])
        tiles = packed.tiles if packed is not None and packed.parts == _parts(b, parts) else None
        if parts and _tile_product(a, b, out, threads, trans_a, trans_b, bias, parts, tiles):
            return
        a = converted(a, _SINGLE, threads) if a.dtype.itemsize == 2 else a
        target = np.empty(out.shape, _SINGLE) if out.dtype.itemsize == 2 else out
    if blas or (product_by_blas(m, trans_b) and b.dtype.itemsize != 2):
        b = converted(b, a.dtype, threads)
        slices = _head_slices(target) if target.ndim == 4 else product_slices(*target.shape)
        _core.matmul(a, b, target, trans_a, trans_b, 1.0, 0.0, bias, slices, threads)
    else:
        own_product(a, b, target, threads, trans_a=trans_a, trans_b=trans_b, bias=bias,
                    packed=None if packed is None else packed.panels)
    if target is not out:
        _core.pack_heads(_as_heads(target), _as_heads(out), threads)


def _tile_product(a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int, trans_a: bool, trans_b: bool,
                  bias: np.ndarray | None, parts: int, tiles: np.ndarray | None) -> bool:
    """`product` on matrix tiles; False, and out undefined, where some number is beyond what they take."""
    if out.ndim == 4:       # written side by side: slices of heads would have to begin with tiles
        B, heads, L, width = out.shape
        rows = np.empty((B * L, heads * width), _SINGLE)
        done = _tile_product(a, b, rows, threads, trans_a, trans_b, bias, parts, tiles)
        if done:
            _core.pack_heads(rows.reshape(B, L, heads, width).transpose(0, 2, 1, 3), out, threads)
        return done
    m, n = out.shape
    k = a.shape[0 if trans_a else 1]
    rows_of, columns = min(m, _TILE_ROWS), n
    if threads > 1:
        columns = -(-n // -(-4 * threads * rows_of // m))
    columns = max(32, min(columns, 4 * _SLICE_TERMS // (rows_of * k)))
    return _core.matmul_matrix(a, b, out, trans_a, trans_b, bias,
                               (-(-rows_of // 16) * 16, -(-columns // 32) * 32), threads, parts, tiles)


def _parts(x: np.ndarray, parts: int) -> int:
    """The parts of an operand of a product in so many: bfloat16 is one."""
    return min(parts, 1) if x.dtype.char == "H" else parts


def converted(x: np.ndarray, dtype: np.dtype, threads: int) -> np.ndarray:
    """A matrix, or heads, in a dtype of computation; itself where it has it."""
    if x.dtype == dtype:
        return x
    to = np.empty(x.shape, dtype)
    _core.pack_heads(_as_heads(x), _as_heads(to), threads)
    return to


def _as_heads(x: np.ndarray) -> np.ndarray:
    return x if x.ndim == 4 else x[None, None]


def own_product(a: np.ndarray, b: np.ndarray | None, out: np.ndarray, threads: int, *, trans_a: bool = False,
                trans_b: bool = False, bias: np.ndarray | None = None, packed: np.ndarray | None = None, activation: int = 0,
                residual: np.ndarray | None = None) -> None:
    """out := activation(op(a) @ op(b) + bias) + residual by the kernels' own product, else as `product`; b may be None where it
    is packed, and out heads where there is no residual."""
    if out.ndim == 4:
        slices = _head_slices(out)
        packed = None if out.shape[3] % _core.PANEL_COLUMNS else packed
    else:
        slices = own_slices(out.shape[0], out.shape[1], a.shape[0 if trans_a else 1], threads)
    _core.matmul_tiled(a, b, out, trans_a, trans_b, bias, slices, threads, packed, activation, residual)


def _head_slices(out: np.ndarray) -> tuple[int, int]:
    """(rows, columns) of the slices of a product whose result is heads (B, heads, L, width): of one head each."""
    return max(1, min(out.shape[2], _HEAD_ROWS)), out.shape[3]


def pack(b: np.ndarray, of_a: np.dtype, precision: str | None, threads: int) -> Packed | None:
    """b (K, N) as products read it whose first operand has many rows of a dtype; None: they read it where it lies."""
    b, of_a = validate.bits(b), validate.bits(np.empty(0, of_a)).dtype
    K, N = b.shape
    panels, tiles = None, None
    parts = _parts(b, parts_of_product(of_a, b.dtype, precision, 2**31, K, N))
    if parts:
        memory = np.empty(_core.tiles_bytes(N, K, parts) + _LINE, np.uint8)
        start = -memory.ctypes.data % _LINE
        tiles = memory[start:memory.size - _LINE + start]
        tiles = tiles if _core.pack_tiles(b, tiles, parts, threads) else None
    if tiles is None and not product_by_blas(2):       # half precision as float32: converted once, not at each product
        panels = packed_weights(b if b.dtype.itemsize != 2 else converted(b, _SINGLE, threads))
    return None if panels is tiles else Packed(panels, tiles, parts)


def packed_weights(b: np.ndarray) -> np.ndarray:
    """A copy of b (K, N) in the order in which the kernels' own product reads it."""
    vector = _core.selected_isa()[1]
    lanes = vector // b.itemsize
    memory = np.empty(b.shape[0] * (-(-b.shape[1] // lanes) * lanes) + lanes, b.dtype)
    start = -memory.ctypes.data % vector // b.itemsize      # a vector in two cache lines costs two
    packed = memory[start:memory.size - lanes + start]
    _core.pack_weights(b, packed)
    return packed
