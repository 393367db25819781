"""A module's passes without the interpreter between their steps: one call of the core for a forward, a backward or a cached step.

They are what `AttentionModule` does one step after the other, with the same bits, where it has no step of its own in between:
X alone is projected, heads lie side by side, and no product runs on matrix tiles; of half precision few tokens, forward. There,
what is asked of a shape once (the algorithm, how products are cut) is remembered by the module.
"""
from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from fastmha import algorithms, validate
from fastmha._core import Problem, projected_backward, projected_forward, projected_step
from fastmha.algorithms import AUTO, DECODE, TILED, Packed, own_slices, product_by_blas, product_slices
from fastmha.planning import choose, choose_for
from fastmha.precision import parts_of, parts_of_product, resolve
from fastmha.slots import Slots, State
from fastmha.tuning import current
from fastmha.validate import FLOAT_TYPES, MOST_BYTES, Rules

_SINGLE, _DOUBLE = FLOAT_TYPES
_MOST_KNOWN = 256       # shapes that a module remembers
_MOST_IN_HALF = 64      # rows of half precision, which one thread converts and rounds: of more that counts, and the steps do not
_Cut: TypeAlias = tuple[tuple[int, int], bool]      # of a product: slices, and whether by BLAS
Cuts: TypeAlias = tuple[_Cut, _Cut, _Cut, _Cut]     # of the products of a backward pass


class Module(Protocol):
    """What is asked of an `AttentionModule`."""

    d_model: int
    algorithm: str
    dtype: np.dtype
    precision: str | None
    _computed: np.dtype
    _H: int
    _Hkv: int
    _D: int
    _Dv: int
    _d_out: int
    _columns: dict[str, slice]
    _W_in: np.ndarray
    _W_out: np.ndarray
    _b_in: np.ndarray | None
    _b_out: np.ndarray | None
    _W_context: dict[str, np.ndarray]
    _in_half: dict[str, np.ndarray]
    _packed: dict[str, Packed]
    _known: dict[tuple[Any, ...], Any]
    _one_by_one: bool

    def _layout(self, L: int) -> tuple[str, str]: ...


class Passes(NamedTuple):
    """A forward from X alone: by "decode" or "tiled", and the cut of each product."""

    decode: bool
    first: _Cut
    second: _Cut


class Forward(NamedTuple):
    """What a forward leaves."""

    problem: Problem
    projected: np.ndarray               # (B, L, Q|K|V)
    concat: np.ndarray                  # (B, L, H·Dv)
    lse: np.ndarray | None              # (B, H, L)
    weights: np.ndarray | None          # (B, H, L, Lk)
    out: np.ndarray                     # (B, L, d_out)


def passes(m: Module, B: int, L: int, need_weights: bool, workers: int) -> Passes | None:
    """How a forward from X (B, L, d_model) alone is one call of the core; None where it is not."""
    if not (_is_half(m) or _plain(m)):
        return None
    key = B, L, need_weights, workers, current(), not m._in_half
    try:
        return m._known[key]
    except KeyError:
        cuts = _cuts(m, B, L, workers)
        name = None
        if cuts is not None and m._layout(L)[0] == "strided":
            name = _algorithm(m, L, L, need_weights)
        return _remember(m, key, None if cuts is None or name is None else Passes(name == DECODE.name, *cuts))


def forward(m: Module, X: np.ndarray, way: Passes, rules: Rules, need_weights: bool, training: bool,
            workers: int) -> Forward:
    """The module's forward from X (B, L, d_model) alone; all errors end before anything is computed."""
    B, L, _ = X.shape
    H, D, dtype = m._H, m._D, m.dtype
    projected = np.empty((B, L, m._columns["QKV"].stop), dtype)
    checked, copied = validate.checked_rules(rules, B, H, L, L, D, dtype)
    problem = _problem(m, projected, checked, None)
    problem.bytes_copied = copied
    concat, out = np.empty((B, L, H * m._Dv), dtype), np.empty((B, L, m._d_out), dtype)
    lse = np.empty((B, H, L), m._computed) if training else None
    weights = np.empty((B, H, L, L), m._computed) if need_weights else None
    bits = validate.bits
    projected_forward(problem, way.decode and not problem.parts, bits(X), _weight(m, "W_in", m._W_in, m._b_in, way.first),
                      bits(projected), bits(concat), lse, weights, _weight(m, "W_out", m._W_out, m._b_out, way.second), bits(out),
                      workers)
    return Forward(problem, projected, concat, lse, weights, out)


def _problem(m: Module, projected: np.ndarray, checked: tuple[Any, ...],
             cached: tuple[np.ndarray, np.ndarray, int] | None) -> Problem:
    """The attention of heads that lie side by side in (B, L, Q|K|V), on themselves or on cached keys and values (k, v, Lk)."""
    problem = Problem.side_by_side(validate.bits(projected), m._H, m._Hkv, m._D, m._Dv, checked, cached)
    problem.precision = m.precision
    if _is_half(m):
        problem.element = problem.stored = m.dtype
        problem.parts = parts_of(problem)
    return problem


def backward_cuts(m: Module, problem: Problem, B: int, L: int, workers: int) -> Cuts | None:
    """How a backward pass of X alone, without sinks, is one call of the core; None where it is not."""
    if not _plain(m):
        return None
    key = "backward", B, L, workers, current()
    try:
        return m._known[key]
    except KeyError:
        cuts = None
        if (not m._one_by_one and B * L > 0
                and choose(problem, algorithms.for_backward(m.algorithm), backward=True)[0] == TILED.name):
            (inner, d_out), (width, columns), rows = m._W_out.shape, m._W_in.shape, B * L
            cuts = (_cut(rows, inner, d_out, workers, trans_b=True), _cut(inner, d_out, rows, workers),
                    _cut(width, columns, rows, workers), _cut(rows, width, columns, workers, trans_b=True))
        return _remember(m, key, cuts)


def backward(m: Module, grad_out: np.ndarray, kept: Any, cuts: Cuts, grads: dict[str, np.ndarray],
             workers: int) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of X and of its projections; grads <- those of both weights."""
    (X,), (projected,), dtype = kept.sources, kept.projected, m.dtype
    grad_X, grad_projected, grad_concat = (np.empty(x.shape, dtype) for x in (X, projected, kept.concat))
    projected_backward(kept.problem, X, m._W_in, kept.concat, kept.lse, m._W_out, grad_out, grad_concat, grad_projected, grad_X,
                       grads["W_in"], grads["W_out"], cuts, workers)
    return grad_X, grad_projected


def step(m: Module, X: np.ndarray, slots: Slots, rules: Rules, need_weights: bool,
         workers: int) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Output and weights of new tokens over a cache, whose keys and values it gets; None, and nothing is done, where that is not
    one call of the core. Until it holds them it is as it was: they are written behind what it holds, and counted at the end."""
    B, L, _ = X.shape
    state = slots.state
    if (slots.window is not None or not isinstance(state.filled, int) or slots.dtype != m.dtype
            or rules.key_padding_lengths is not None or rules.key_ranges is not None or not (_is_half(m) or _plain(m))):
        return None
    key = "step", B, L, workers, current(), not m._in_half
    try:
        cuts = m._known[key]
    except KeyError:
        cuts = _remember(m, key, _cuts(m, B, L, workers))
    after = state.filled + L
    if cuts is None or after > state.slots:     # to grow, or to say that there is no room
        return None
    name = _algorithm(m, L, after, need_weights)
    if name is None:
        return None
    dtype = m.dtype
    placed = rules.is_causal is not False or rules.window is not None or rules.alibi is not None
    checked, _ = validate.checked_rules(rules.at(state.filled if placed else None, None), B, m._H, L, after, m._D, dtype)
    bits = validate.bits
    projected = np.empty((B, L, m._columns["QKV"].stop), dtype)
    problem = _problem(m, projected, checked, (bits(state.k), bits(state.v), after))
    concat, out = np.empty((B, L, m._H * m._Dv), dtype), np.empty((B, L, m._d_out), dtype)
    weights = np.empty((B, m._H, L, after), m._computed) if need_weights else None
    projected_step(problem, name == DECODE.name and not problem.parts, bits(X), _weight(m, "W_in", m._W_in, m._b_in, cuts[0]),
                   bits(projected), bits(concat), weights, _weight(m, "W_out", m._W_out, m._b_out, cuts[1]), bits(out), workers)
    slots.state = State(state.k, state.v, after, None)
    return out, weights


def _is_half(m: Module) -> bool:
    return m.dtype.itemsize == 2


def _plain(m: Module) -> bool:
    """Whether nothing is converted or rounded between the steps of a pass, and all products are by vectors."""
    return m.dtype == _DOUBLE or (m.dtype == _SINGLE and resolve(m.precision) == "highest")


def _cuts(m: Module, B: int, L: int, workers: int) -> tuple[_Cut, _Cut] | None:
    """The cuts of both products of (B, L) tokens; None where the module has steps of its own, or says what is wrong."""
    columns, inner, half = m._columns["QKV"].stop, m._H * m._Dv, bool(m._in_half)
    if (m._one_by_one or m._W_context or B * L == 0 or L > validate.LARGEST
            or B * L * max(columns, inner, m._d_out) * m.dtype.itemsize > MOST_BYTES):
        return None
    if _is_half(m):
        half = True
        products = (("W_in", m._W_in, m.d_model, columns), ("W_out", m._W_out, inner, m._d_out))
        of = validate.bits(np.empty(0, m.dtype)).dtype
        parts = (parts_of_product(of, validate.bits(m._in_half.get(held, W)).dtype, m.precision, B * L, k, n)
                 for held, W, k, n in products)
        if B * L > _MOST_IN_HALF or any(parts):
            return None
    return _cut(B * L, columns, m.d_model, workers, half), _cut(B * L, m._d_out, inner, workers, half)


def _cut(rows: int, columns: int, terms: int, workers: int, half: bool = False, trans_b: bool = False) -> _Cut:
    """How a product is cut, and whether BLAS takes it; half: the second operand is of half precision."""
    by_blas = product_by_blas(rows, trans_b) and not half
    return product_slices(rows, columns) if by_blas else own_slices(rows, columns, terms, workers), by_blas


def _algorithm(m: Module, L: int, Lk: int, need_weights: bool) -> str | None:
    """The algorithm of L tokens on Lk keys, None where it is not one of the core's alone, or cannot serve the call."""
    if m.algorithm not in (AUTO, TILED.name):
        return None
    name, _ = choose_for(L * (m._H // m._Hkv), Lk, m._D, m._computed.itemsize, m.dtype.itemsize, m.algorithm,
                         weights=need_weights)
    return name if name in (TILED.name, DECODE.name) else None


def _weight(m: Module, held: str, W: np.ndarray, bias: np.ndarray | None, cut: _Cut) -> tuple[Any, ...]:
    """A fused matrix with all that one product of the core takes."""
    if m._in_half:
        W = m._in_half[held]
    if bias is not None and _is_half(m):
        bias = bias.astype(m._computed)
    packed = m._packed.get(held)
    return validate.bits(W), None if packed is None else packed.panels, bias, *cut


def _remember(m: Module, key: tuple[Any, ...], found: Any) -> Any:
    if len(m._known) >= _MOST_KNOWN:
        m._known = {}
    m._known[key] = found
    return found
