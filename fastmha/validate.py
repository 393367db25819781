"""Every check of user input and every message, and the only copies made of user arrays. All errors end here.

The result of `attention_problem` is one `Problem`: arrays in the axis order (B, H, L, width) whatever the layout, last
axis with unit stride, aligned; masks with 4 axes; offsets and lengths per batch row.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from fastmha._core import Problem

LAYOUTS = ("BHLD", "BLHD")
FLOAT_TYPES = (np.dtype(np.float32), np.dtype(np.float64))
BLAS_INT_MAX = 2**31 - 1        # BLAS integers are C ints in every SciPy wheel
LARGEST = BLAS_INT_MAX - 64     # length or width: rows of scores are padded to whole vectors
_OFFSET_MAX = 2**59             # far below where i + offset + window could overflow 64 bits
_HEAD_AXIS = {"BHLD": 1, "BLHD": 2}
_LENGTH_AXIS = {"BHLD": 2, "BLHD": 1}
_AXES = {"BHLD": "(B, H, L, D)", "BLHD": "(B, L, H, D)"}


def as_array(name: str, x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except ValueError as error:     # rows of different length
        raise ValueError(f"{name} cannot be made an array: {error}") from None


def floats(name: str, x: Any, ndim: int | None = None, axes: str = "") -> np.ndarray:
    """x as an array of float32 or float64 (no cast), with `ndim` axes."""
    if type(x) is not np.ndarray:
        x = as_array(name, x)
    if x.dtype not in FLOAT_TYPES:
        came = x.dtype.str if x.dtype.kind == "f" else x.dtype
        raise TypeError(f"{name} must be float32 or float64 (native byte order), got {came}")
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes {axes}, got shape {x.shape}")
    return x


def same_dtype(name: str, x: np.ndarray, like: str, dtype: np.dtype) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype} but {like} has {dtype}: they must share one dtype")


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """value as an int; bool is not one."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def size(name: str, value: Any) -> int:
    """value as a width of a module: an int from 1 to what BLAS can take beside two more of its kind."""
    value = integer(name, value, 1)
    if value > LARGEST // 3:
        raise ValueError(f"{name} must be at most {LARGEST // 3}, got {value}")
    return value


def flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value in allowed:
        return value
    names = [f'"{a}"' for a in allowed]
    raise ValueError(f"{name} must be {', '.join(names[:-1])} or {names[-1]}, got {value!r}")


def usable(x: np.ndarray) -> tuple[np.ndarray, int]:
    """x, or a copy of it where its last axis is not unit-stride or it is unaligned, and the bytes copied.

    A broadcast B or H (stride 0) stays broadcast: only what lies in memory is copied.
    """
    if in_place(x):
        return x, 0
    copied = collapsed(x).copy()        # C order, and aligned where x was not
    return np.broadcast_to(copied, x.shape), copied.nbytes


def in_place(x: np.ndarray) -> bool:
    """Whether kernels can work on x where it lies: unit last stride, aligned."""
    return (x.strides[-1] == x.itemsize or x.shape[-1] <= 1 or x.size == 0) and x.flags.aligned


def collapsed(x: np.ndarray) -> np.ndarray:
    """x (B, H, L, width) with a broadcast B and H cut to length 1."""
    return x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.strides[:2])]


def heads(name: str, x: Any, layout: str) -> np.ndarray:
    return floats(name, x, 4, f'{_AXES[layout]} for layout "{layout}"')


def attention_problem(
    q: Any, k: Any, v: Any, layout: str, mask: Any, is_causal: bool, offset: Any, key_padding_lengths: Any, window: Any,
    scale: Any, softcap: Any,
) -> Problem:
    """Check the arguments of `fastmha.attention` and return them as one Problem."""
    if layout not in LAYOUTS:
        choice("layout", layout, LAYOUTS)
    q, k, v = heads("q", q, layout), heads("k", k, layout), heads("v", v, layout)
    if not q.dtype == k.dtype == v.dtype:
        same_dtype("k", k, "q", q.dtype)
        same_dtype("v", v, "q", q.dtype)
    head_axis, length_axis = _HEAD_AXIS[layout], _LENGTH_AXIS[layout]
    if layout == "BLHD":
        q, k, v = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    B, H, Lq, D = q.shape
    Bk, Hkv, Lk, Dk = k.shape
    Bv, Hv, Lv, _ = v.shape
    if Bk != B or Bv != B:
        name, got = ("k", Bk) if Bk != B else ("v", Bv)
        raise ValueError(f"{name} has batch size {got} on axis 0 but q has {B}")
    if Hv != Hkv:
        raise ValueError(f'v has {Hv} heads on axis {head_axis} of layout "{layout}" but k has {Hkv}')
    if Hkv != H and (Hkv == 0 or H % Hkv):
        raise ValueError(f'k has {Hkv} heads on axis {head_axis} of layout "{layout}" but q has {H}: '
                         "q's heads must be a multiple of k's")
    if Lv != Lk:
        raise ValueError(f'v has length {Lv} on axis {length_axis} of layout "{layout}" but k has {Lk}')
    if Dk != D:
        raise ValueError(f"k has width {Dk} on axis 3 but q has {D}")
    for name, what, n in (("q", "length", Lq), ("k", "length", Lk), ("q", "width", D), ("v", "width", v.shape[3])):
        if n > LARGEST:
            raise ValueError(f"{name} has {what} {n}: at most {LARGEST} is possible")
    q, copied = usable(q)
    k, copied_k = usable(k)
    v, copied_v = usable(v)
    bool_mask = additive_mask = None
    if mask is not None:
        mask = _mask(mask, q.dtype, (B, H, Lq, Lk))
        if mask.dtype == np.bool_:
            bool_mask = mask
        elif mask.flags.aligned:
            additive_mask = mask
        else:
            additive_mask = mask[tuple(slice(0, 1) if s == 0 else slice(None) for s in mask.strides)].copy()
            copied += additive_mask.nbytes
            additive_mask = np.broadcast_to(additive_mask, mask.shape)
    left, right = band(is_causal, window)
    offsets = None
    if right is None and window is None:
        if offset is not None:
            raise ValueError(f"offset is given ({offset!r}) but neither is_causal nor window, which it would shift")
    else:
        offsets = _offsets(offset, B, Lq, Lk)
    lengths = None
    if key_padding_lengths is not None:
        lengths = batch_lengths("key_padding_lengths", key_padding_lengths, B, Lk, "Lk")
    factor, cap = scaling(scale, softcap, D, q.dtype)
    problem = Problem(q, k, v, bool_mask, additive_mask, offsets, lengths, left, right, factor, cap)
    problem.layout, problem.bytes_copied = layout, copied + copied_k + copied_v
    return problem


def scaling(scale: Any, softcap: Any, D: int, dtype: np.dtype) -> tuple[float, float]:
    """The factor of the products, and the softcap or 0 for none."""
    if scale is None:
        scale = 1 / math.sqrt(D) if D else 1.0
    elif not _finite_real(scale, dtype):
        raise _wrong_number("scale", "a finite number or None", scale)
    if softcap is None:
        softcap = 0.0
    elif not _finite_real(softcap, dtype) or dtype.type(softcap) <= 0:
        raise _wrong_number("softcap", "a finite number > 0 or None", softcap)
    return float(scale), float(softcap)


def _finite_real(value: Any, dtype: np.dtype) -> bool:
    """Whether value is a number that stays finite in dtype."""
    if not isinstance(value, Real) or isinstance(value, (bool, np.bool_)):
        return False
    try:
        return abs(float(value)) <= float(np.finfo(dtype).max)
    except OverflowError:
        return False


def _wrong_number(name: str, expected: str, value: Any) -> Exception:
    kind = ValueError if isinstance(value, Real) and not isinstance(value, (bool, np.bool_)) else TypeError
    return kind(f"{name} must be {expected}, got {value!r}")


def _mask(mask: Any, dtype: np.dtype, shape: tuple[int, int, int, int]) -> np.ndarray:
    """mask with 4 axes, bool or of `dtype`, each axis of length 1 or the full one."""
    mask = as_array("mask", mask)
    if mask.dtype != np.bool_ and mask.dtype != dtype:
        raise TypeError(f"mask must be bool (True = may not attend) or {dtype} like q (added to the scores), got {mask.dtype}")
    if mask.ndim not in (2, 4):
        raise ValueError(
            f"mask must have 2 axes (Lq, Lk) or 4 that broadcast to (B, H, Lq, Lk), got shape {mask.shape}: index a padding "
            "mask (B, Lk) as mask[:, None, None, :] and a mask (B, Lq, Lk) as mask[:, None]"
        )
    wanted = shape[-mask.ndim:]
    if any(m not in (1, n) for m, n in zip(mask.shape, wanted)):
        axes = "(Lq, Lk)" if mask.ndim == 2 else "(B, H, Lq, Lk)"
        hint = ""
        if mask.ndim == 2 and mask.shape == (shape[0], shape[3]):
            hint = ": index a padding mask (B, Lk) as mask[:, None, None, :]"
        raise ValueError(f"mask of shape {mask.shape} does not broadcast to {axes} = {wanted}{hint}")
    return mask


def band(is_causal: Any, window: Any) -> tuple[int | None, int | None]:
    """(left, right) of the keys around the diagonal that a query may attend; None = unbounded."""
    left = right = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window must be None or a pair (left, right) of ints >= 0 or None, got {window!r}")
        sides = []
        for name, side in zip(("window[0] (left)", "window[1] (right)"), window):
            sides.append(None if side is None else min(integer(name, side, 0), _OFFSET_MAX))
        left, right = sides
    if is_causal is not False and flag("is_causal", is_causal):
        right = 0
    return left, right


def _offsets(offset: Any, B: int, Lq: int, Lk: int) -> np.ndarray:
    """offset as a (B,) int64 array."""
    if offset is None:
        if Lq != Lk:
            raise ValueError(
                f"offset must be given with is_causal or window where q has length {Lq} and k has length {Lk}: "
                f"0 lets query 0 see key 0, Lk - Lq = {Lk - Lq} lets the last query see the last key"
            )
        return np.zeros(B, np.int64)
    if type(offset) is int and -_OFFSET_MAX <= offset <= _OFFSET_MAX:
        same = np.empty(B, np.int64)
        same.fill(offset)
        return same
    values = as_array("offset", offset)
    if values.dtype.kind not in "iu":
        raise TypeError(f"offset must be an int or a (B,) array of ints, got {offset!r}")
    if values.ndim and values.shape != (B,):
        raise ValueError(f"offset must be an int or a (B,) = ({B},) array of ints, got shape {values.shape}")
    if values.size and (values.min() < -_OFFSET_MAX or values.max() > _OFFSET_MAX):
        raise ValueError(f"offset must lie within +-2**59, got {offset!r}")
    return np.full(B, values, np.int64)


def batch_lengths(name: str, lengths: Any, B: int, longest: int, longest_name: str) -> np.ndarray:
    """Lengths as a (B,) int64 array, each in [0, longest]."""
    values = as_array(name, lengths)
    if values.size == 0 and B == 0:
        return np.zeros(0, np.int64)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {values.dtype}")
    if values.shape != (B,):
        raise ValueError(f"{name} must have shape (B,) = ({B},), got {values.shape}")
    wrong = (values < 0) | (values > longest)
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(f"{name} must lie in [0, {longest_name}] = [0, {longest}], got {values[at]} at index {at}")
    return np.array(values, np.int64)


def selection(name: str, chosen: Any) -> int | slice | tuple[int, ...] | None:
    """Indices into an axis whose length is not known yet: None (all), an int, a slice, or a sequence of ints as a tuple."""
    if chosen is None:
        return None
    if isinstance(chosen, slice):
        for part in ("start", "stop", "step"):
            if getattr(chosen, part) is not None:
                integer(f"{name}.{part}", getattr(chosen, part))
        if chosen.step == 0:
            raise ValueError(f"{name}.step must not be 0")
        return chosen
    if isinstance(chosen, np.ndarray) and chosen.ndim != 1:
        raise ValueError(f"{name} must have one axis where it is an array, got shape {chosen.shape}")
    if isinstance(chosen, (Sequence, np.ndarray)) and not isinstance(chosen, (str, bytes)):
        return tuple(integer(f"{name}[{i}]", x) for i, x in enumerate(chosen))
    if isinstance(chosen, (bool, np.bool_)) or not isinstance(chosen, Integral):
        raise TypeError(f"{name} must be None, an int, a slice or a sequence of ints, got {chosen!r}")
    return int(chosen)


def positions(name: str, chosen: Any, n: int, what: str) -> np.ndarray:
    """What `selection` returned, on an axis of q of length n: int64 indices in [0, n)."""
    if chosen is None or isinstance(chosen, slice):
        return np.arange(*(chosen or slice(None)).indices(n), dtype=np.int64)
    several = isinstance(chosen, tuple)
    for i, x in enumerate(chosen if several else (chosen,)):
        if not -n <= x < n:
            raise ValueError(f"{name} must lie in [{-n}, {n}) as q has {n} {what}, got {x}{f' at index {i}' if several else ''}")
    indices = np.array(chosen, np.int64).reshape(-1)
    return np.where(indices < 0, indices + n, indices)


def output(out: Any, shape: tuple[int, ...], dtype: np.dtype, inputs: dict[str, Any]) -> np.ndarray:
    """Check `out=`: shape, dtype, writable, no overlap with an input or with itself."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    same_dtype("out", out, "q", dtype)
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    reach = out.itemsize - 1
    for stride, n in sorted((abs(s), n) for s, n in zip(out.strides, out.shape) if n > 1):
        if out.size and stride <= reach:
            raise ValueError(f"out overlaps itself: shape {out.shape}, strides {out.strides}")
        reach += stride * (n - 1)
    for name, x in inputs.items():
        if x is not None and _overlap(out, np.asarray(x)):
            raise ValueError(f"out overlaps {name} in memory")
    return out


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    if not np.may_share_memory(a, b):
        return False
    work: Any = 10**5       # NumPy's annotation has only 0 and -1
    try:
        return np.shares_memory(a, b, max_work=work)
    except getattr(np, "exceptions", np).TooHardError:
        return True     # too intricate to tell apart: refused


def like(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype, layout: str, of: str = "q") -> np.ndarray:
    """An array that must have the given shape and the dtype of `of`, such as grad_out, out and lse of the backward pass."""
    x = floats(name, x)
    same_dtype(name, x, of, dtype)
    if x.shape != shape:
        raise ValueError(f'{name} must have shape {shape} for layout "{layout}", got {x.shape}')
    return x


def real_array(name: str, x: Any, dtype: np.dtype, ndim: int, axes: str) -> np.ndarray:
    """x (real numbers) cast to a module's dtype, with unit last stride and aligned; itself where it already is that."""
    x = as_array(name, x)
    if x.dtype != dtype:
        if x.dtype.kind not in "fiub":
            raise TypeError(f"{name} must hold real numbers, got dtype {x.dtype}")
        if x.ndim == ndim:
            x = x.astype(dtype)
    if x.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes {axes}, got shape {x.shape}")
    return x


def textbook(arrays: dict[str, np.ndarray]) -> None:
    """Shapes of the textbook functions' Q, K, V, (B, n, d) or (B, H, n, d), under their own names."""
    (nq, Q), (nk, K), (nv, V) = arrays.items()
    for name, x in ((nk, K), (nv, V)):
        same_dtype(name, x, nq, Q.dtype)
        for axis, what in ((0, "batch size"), (1, "heads"))[: x.ndim - 2]:
            if x.shape[axis] != Q.shape[axis]:
                raise ValueError(f"{name} has {what} {x.shape[axis]} on axis {axis} but {nq} has {Q.shape[axis]}")
    if V.shape[-2] != K.shape[-2]:
        raise ValueError(f"{nv} has length {V.shape[-2]} on axis {V.ndim - 2} but {nk} has {K.shape[-2]}")
    if K.shape[-1] != Q.shape[-1]:
        raise ValueError(f"{nk} has width {K.shape[-1]} on axis {K.ndim - 1} but {nq} has {Q.shape[-1]}")
