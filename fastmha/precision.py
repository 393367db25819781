"""The precision of float32 products that a caller permits, and which products matrix tiles take, as bfloat16 parts."""
from __future__ import annotations

import os
from functools import lru_cache

import numpy as np

from fastmha import _core, tuning, validate
from fastmha._core import Problem
from fastmha.validate import PRECISIONS

_PARTS = {"highest": 0, "high": 2, "medium": 1}         # of a float32 operand
_SCALE_MOST = 2.0**30                                   # of a scale that goes into exponents of base 2; and its inverse the least
_chosen: str | None = None      # by set_precision
_default: str | None = None     # from the environment, read once


def set_precision(name: str | None) -> None:
    """Set the precision of float32 products for all calls and modules that do not name one; None goes back to the default.

    It is permission, never an order: where the machine has nothing faster, the computation is more exact than asked for, and
    `fastmha.plan` says what is done. float64 is float64 always. The default is FASTMHA_PRECISION, else "highest".

    Parameters
    ----------
    name : {"highest", "high", "medium"} or None
        "highest": float32 throughout. "high": operands may be taken as two bfloat16 parts, three products: about 16 bits.
        "medium": as one bfloat16 part, 8 bits. Sums and the softmax are of float32 in any case.

    Raises
    ------
    ValueError
        If it is none of these.
    """
    global _chosen, _default
    if name is None:
        _chosen = _default = None
    else:
        _chosen = validate.choice("name", name, PRECISIONS)


def get_precision() -> str:
    """The precision of float32 products in calls and modules that do not name one.

    Returns
    -------
    str
        What `set_precision` set, else the default.
    """
    return resolve(None)


def resolve(precision: str | None) -> str:
    """The precision of one call: its own argument, else `set_precision`'s, else the default."""
    global _default
    if precision is not None:
        return precision
    if _chosen is not None:
        return _chosen
    if _default is None:
        given = os.environ.get("FASTMHA_PRECISION") or "highest"
        if given not in PRECISIONS:
            names = ", ".join(PRECISIONS)
            raise ValueError(f"FASTMHA_PRECISION must be one of {names}, got {validate.short(given)}")
        _default = given
    return _default


def parts_of(problem: Problem, backward: bool = False) -> int:
    """The bfloat16 parts of what "tiled" multiplies on matrix tiles, forward or backward; 0: it multiplies by vectors. By types,
    lengths, the scale and the kernels in use alone."""
    parts = _permitted(problem)
    if parts == 0:                              # most calls end here
        return 0
    _, H, Hkv, Lq, Lk, _, _ = problem.shape
    return _where_they_pay(problem, parts, Lq * (H // Hkv) if Hkv else 0, Lk, backward)


def parts_for(problem: Problem, rows: int, keys: int, backward: bool) -> int:
    """The same of so many query rows per key/value head on so many keys, with the problem's types, widths and scale."""
    return _where_they_pay(problem, _permitted(problem), rows, keys, backward)


def _permitted(problem: Problem) -> int:
    """The parts where types and precision permit any and there are tiles, whatever the lengths."""
    return _parts_of_types(problem.types, resolve(problem.precision)) if _core.has_tiles() else 0


def _where_they_pay(problem: Problem, parts: int, rows: int, keys: int, backward: bool) -> int:
    """So many parts, or 0 where lengths are too short for them, a width is 0, or the scale is beyond them."""
    if parts == 0:
        return 0
    least = tuning.current().least_on_tiles(parts, "backward" if backward else "forward")
    if rows < least[0] or keys < least[1]:      # most small calls end here
        return 0
    _, _, _, _, _, D, Dv = problem.shape
    return parts if D > 0 and Dv > 0 and 1 / _SCALE_MOST <= abs(problem.scale) <= _SCALE_MOST else 0


@lru_cache(maxsize=64)
def _parts_of_types(types: str, precision: str) -> int:
    """The parts of operands of such types (their letters, that of bfloat16 as uint16's), where a precision permits any."""
    return 0 if "d" in types else _PARTS[precision] if "f" in types else 2 if "e" in types else 1


def parts_of_product(of_a: np.dtype, of_b: np.dtype, precision: str | None, m: int, k: int, n: int) -> int:
    """The bfloat16 parts in which a product (m, k) @ (k, n) of such types (bfloat16 as uint16) is taken on matrix tiles; 0: by
    vectors."""
    parts = _parts_of_types(of_a.char + of_b.char, resolve(precision)) if _core.has_tiles() else 0
    if parts == 0:
        return 0
    rows, terms = tuning.current().least_on_tiles(parts, "products")
    if "f" in (of_a.char, of_b.char):       # twice the bytes to read for the same products
        rows = max(rows, tuning.TILE[0])
    return parts if m >= rows and k >= terms and n >= terms else 0


def how(problem: Problem, parts: int) -> str:
    """What a receipt says of the products of "tiled"."""
    asked = resolve(problem.precision)
    if problem.is_double:
        return "float64"
    if parts == 0:
        return "float32" if asked == "highest" else f'float32 ("{asked}" would permit less: nothing faster for this call here)'
    operands = "bfloat16" if parts == 1 else "two bfloat16 parts of each operand"
    return f"{operands} on matrix tiles, summed in float32" + (f' (precision "{asked}")' if problem.types[0] == "f" else "")
