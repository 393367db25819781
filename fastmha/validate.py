"""Checks of arguments: those of a call of `attention` as a whole, the words of messages, and what the other files check with.

What only the textbook functions, modules, caches, captures and masks take is checked where they stand, with the functions here;
below them nothing raises on user input. Here are also the only copies made of user arrays.

The result of `attention_problem` is one `Problem`: arrays in the axis order (B, H, L, width) whatever the layout, last
axis with unit stride, aligned; masks with 4 axes; offsets and lengths per batch row.
"""
from __future__ import annotations

import inspect
import math
import operator
import reprlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from numbers import Integral, Real
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import numpy as np

from fastmha import _core
from fastmha._core import Problem

LAYOUTS = ("BHLD", "BLHD")
PRECISIONS = ("highest", "high", "medium")
FLOAT_TYPES = (np.dtype(np.float32), np.dtype(np.float64))
_FLOATS = frozenset(FLOAT_TYPES)         # to look one up takes a tenth of the time of comparing it with two that it is not
_HALF_TYPES = ("float16", "bfloat16")    # names: NumPy has no dtype of the second's
BLAS_INT_MAX = 2**31 - 1        # BLAS integers are C ints in every SciPy wheel
LARGEST = BLAS_INT_MAX - 64     # length or width: rows of scores are padded to whole vectors
MOST_BYTES = 2**47              # of one array: what a process can address
UNBOUNDED = 2**62               # as FMHA_UNBOUNDED: from here on a side of a window removes nothing at any offset
_OFFSET_MAX = 2**61             # i + offset + a side below UNBOUNDED stays within 64 bits
_MOST_LOOKED_AT = 2**24         # elements of a mask that is looked at in full for being meant the other way
_HEAD_AXIS = {"BHLD": 1, "BLHD": 2}
_LENGTH_AXIS = {"BHLD": 2, "BLHD": 1}
_AXES = {"BHLD": '(B, H, L, D) for layout "BHLD"', "BLHD": '(B, L, H, D) for layout "BLHD"'}
KEY_RANGES = ("key_ranges[0] (starts)", "key_ranges[1] (ends)")
_CPU_DEVICES = (1, 3, 11, 13)       # of DLPack: the CPU, and memory of CUDA and ROCm that it reads in place
_RETURNED = ("out", "lse", "out1", "lse1", "out2", "lse2")      # arguments that attention has made
KeyRanges: TypeAlias = tuple[int | np.ndarray | None, int | np.ndarray | None]        # starts, ends
_P = ParamSpec("_P")
_R = TypeVar("_R")


class ConventionWarning(UserWarning):
    """An argument that is valid, but looks as if it were meant by another library's convention."""


class Rules(NamedTuple):
    """What a caller says about a call beside its arrays, as it came; see `fastmha.attention`. `attention_problem` checks it, but
    for the algorithm (`planning.choose`) and the threads (`threads.resolve`)."""

    mask: Any = None
    is_causal: Any = False
    offset: Any = None                  # these four first and in this order: `at`
    key_padding_lengths: Any = None
    window: Any = None
    scale: Any = None
    softcap: Any = None
    algorithm: Any = "auto"
    num_threads: Any = None
    key_ranges: Any = None
    sinks: Any = None
    alibi: Any = None
    dropout: Any = 0.0
    seed: Any = None
    precision: Any = None

    def at(self, offset: Any, key_padding_lengths: Any) -> Rules:
        """These rules with another offset and other padding lengths; `_replace` would cost a step of few microseconds more."""
        return Rules(self.mask, self.is_causal, offset, key_padding_lengths, *self[4:])


NO_RULES, CAUSAL = Rules(), Rules(is_causal=True)        # these very ones are known without a look at what is in them


def rules_of(mask: Any, is_causal: Any, offset: Any, key_padding_lengths: Any, window: Any, scale: Any, softcap: Any,
             algorithm: Any, num_threads: Any, key_ranges: Any, sinks: Any, alibi: Any, dropout: Any, seed: Any,
             precision: Any) -> Rules:
    """`Rules`, or one of those above where it says the same of a problem: tiny calls would spend much of their time on more."""
    if (mask is offset is key_padding_lengths is window is scale is softcap is key_ranges is sinks is alibi is seed is precision
            is None and type(dropout) is float and dropout == 0 and (is_causal is False or is_causal is True)):
        return CAUSAL if is_causal else NO_RULES
    return Rules(mask, is_causal, offset, key_padding_lengths, window, scale, softcap, algorithm, num_threads, key_ranges, sinks,
                 alibi, dropout, seed, precision)


# ----------------------------------------------------------------------------------------------------- what came, in words

class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 12

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"an integer of {x.bit_length()} bits"


_REPR = _Repr()


def short(value: Any) -> str:
    """repr(value) on one line, of at most 80 characters."""
    text = _REPR.repr(value)
    return cut(" ".join(text.split()) if "\n" in text else text)


def cut(text: Any) -> str:
    """str(text), of which at most 80 characters."""
    text = str(text)
    return text if len(text) <= 80 else text[:77] + "..."


# ------------------------------------------------------------------------------------------- what other libraries call it

_MASK = "it is mask here, where True = may NOT attend, or floats are added to the scores"
_LENGTHS = "the valid keys of each batch row are key_padding_lengths here"
_WINDOW = "it is window here, a pair (left, right) in which None is unbounded"
_DROPOUT = "it is dropout here, with a seed"
_SHARED_NAMES = {
    "attn_mask": _MASK, "bias": _MASK, "attn_bias": _MASK,
    "attention_mask": f"{_MASK}; one of (B, Lk) that is 1 for valid keys is mask=(attention_mask == 0)[:, None, None, :]",
    "key_padding_mask": f"{_LENGTHS}, or mask=key_padding_mask[:, None, None, :], where True = may NOT attend",
    "dropout_p": _DROPOUT, "attention_dropout": _DROPOUT, "causal": "it is is_causal here",
    "alibi_slopes": "it is alibi here, one slope for each query head", "s_aux": "it is sinks here, one for each query head",
    "window_size": _WINDOW, "sliding_window": _WINDOW, "local_window_size": _WINDOW,
    "soft_cap": "it is softcap here", "logits_soft_cap": "it is softcap here",
    "enable_gqa": "fewer heads of k and v than of q are grouped without being asked to",
}
CALL_NAMES = _SHARED_NAMES | {
    "query": "it is q here", "key": "it is k here", "value": "it is v here", "softmax_scale": "it is scale here",
    "sm_scale": "it is scale here", "key_value_seq_lengths": _LENGTHS,
    "need_weights": "attention(..., capture=fastmha.Capture()) returns the weights",
}
TEXTBOOK_NAMES = CALL_NAMES | {
    "query": "it is Q here", "key": "it is K here", "value": "it is V here",
    "key_padding_mask": "it is mask=key_padding_mask[:, None, None, :] here (where all operands have 3 axes, [:, None, :] as "
                        "well), True = may NOT attend",
    "need_weights": "the weights are returned always",
    **dict.fromkeys(("is_causal", "scale", "key_padding_lengths", "key_ranges", "window", "softcap", "sinks", "alibi", "dropout"),
                    "fastmha.attention takes it"),
}
FORWARD_NAMES = _SHARED_NAMES | {
    "query": "it is X here", "key": "keys and values come from context", "value": "keys and values come from context",
    "hidden_states": "it is X here", "encoder_hidden_states": "it is context here", "past_key_value": "it is cache here",
    "past_key_values": "it is cache here", "layer_past": "it is cache here", "output_attentions": "it is need_weights here",
    "average_attn_weights": "the weights are those of each head: average them with .mean(axis=1)",
}
MODULE_NAMES = {
    **dict.fromkeys(("embed_dim", "hidden_size", "n_embd", "dim"), "it is d_model here"), "bias": "it is use_bias here",
    **dict.fromkeys(("n_heads", "n_head", "nhead", "heads", "num_attention_heads"), "it is num_heads here"),
    **dict.fromkeys(("n_kv_heads", "num_key_value_heads"), "it is num_kv_heads here"),
    "dim_head": "it is head_dim here", "dropout": "it is dropout of forward, with a seed",
    "batch_first": "arrays are always (B, L, d_model)", "device": "everything is computed on the CPU",
    **dict.fromkeys(("add_bias_kv", "add_zero_attn"), "there is no such key here"),
    **dict.fromkeys(("causal", "is_causal"), "it is is_causal of forward"),
}


def own_keywords(names: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A function that says what is meant where it is given a keyword of these names, which other libraries have."""
    # A wrapper, not **kwargs: `embed_dim=` leaves d_model missing, which fails before any **kwargs could be looked at, and the
    # signature stays its own. It costs 0.15 us, with one keyword 0.3, with six 0.6; the smallest attention 3 us.
    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        foreign = names.keys() - inspect.signature(function).parameters.keys()

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except TypeError:
                said = "; ".join(f"{name}: {names[name]}" for name in kwargs if name in foreign)
                if said:
                    raise TypeError(f"{function.__qualname__.removesuffix('.__init__')} has no keyword {said}") from None
                raise
        return call
    return decorate


# ------------------------------------------------------------------------------------------------------------------ arrays

def as_array(name: str, x: Any) -> np.ndarray:
    """x as an array, not a copy where it offers memory that the CPU reads, by `__array__` or `__dlpack__`."""
    if type(x) is np.ndarray:
        return x
    not_masked(name, x)
    by_dlpack = hasattr(type(x), "__dlpack__")
    if by_dlpack and _elsewhere(x):
        raise TypeError(f"{name} lies in memory of another device ({cut(getattr(x, 'device', 'not the CPU'))}): pass one on the "
                        f"CPU, such as {name}.cpu()")
    try:
        return np.from_dlpack(x) if by_dlpack and not hasattr(type(x), "__array__") else np.asarray(x)
    except MemoryError:
        raise
    except Exception as error:      # rows of different length, or whatever the object's own conversion raises
        if getattr(x, "requires_grad", False):
            raise TypeError(f"{name} is a torch tensor that requires grad: pass {name}.detach()") from error
        if "bfloat16" in str(getattr(x, "dtype", "")):
            raise TypeError(f"{name} is a tensor of bfloat16, which NumPy does not have: pass {name}.float()") from error
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{name} cannot be made an array: {cut(error)}") from error


def _elsewhere(x: Any) -> bool:
    """Whether x says that its memory is another device's alone; the conversion of some is a silent copy."""
    try:
        return int(x.__dlpack_device__()[0]) not in _CPU_DEVICES
    except Exception:       # such as ValueError of torch for a device that DLPack has no number for: its conversion says why
        return False


def not_masked(name: str, x: Any) -> None:
    if isinstance(x, np.ndarray) and isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost: pass {name}.filled(...)")


def floats(name: str, x: Any, ndim: int | None = None, axes: str = "", half: bool = False) -> np.ndarray:
    """x as an array of float32 or float64, with `half` also of float16 or bfloat16 (no cast), with `ndim` axes."""
    given = x
    if type(x) is not np.ndarray:
        x = as_array(name, x)
    if x.dtype not in _FLOATS and not (half and is_half(x.dtype)):
        types, came = "float32, float64, float16 or bfloat16" if half else "float32 or float64", cut(x.dtype)
        came = "None" if given is None else came
        raise TypeError(f"{name} must be {types} (native byte order), got {came}{_how_to_cast(name, x, given)}")
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes {axes}, got shape {x.shape}")
    return x


def _how_to_cast(name: str, x: np.ndarray, given: Any) -> str:
    if x.dtype.kind == "O" and name in _RETURNED:
        return ": attention(..., return_lse=True) returns it"
    if x.dtype.kind not in "fiub" and x.dtype.name != "bfloat16":
        return ""
    call = f"{name}.astype(np.float32)" if given is x else f"np.asarray({name}, np.float32)"
    return f": cast it to float32, {call}"


@lru_cache(maxsize=64)      # NumPy puts a name together anew each time
def is_half(dtype: np.dtype) -> bool:
    """Whether it is float16 or bfloat16."""
    return dtype.itemsize == 2 and dtype.isnative and dtype.name in _HALF_TYPES


def computed(dtype: np.dtype) -> np.dtype:
    """The dtype in which operands of a dtype are computed, and that of their lse."""
    return dtype if dtype in _FLOATS else FLOAT_TYPES[0]


def bits(x: np.ndarray) -> np.ndarray:
    """x as the core takes it: of bfloat16, which the buffer protocol has no letter for, a view as uint16."""
    return x.view(np.uint16) if x.dtype.kind == "V" else x


def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x in a dtype, itself where it has it: converted exactly, or rounded to nearest; too large for float16 it is infinite."""
    with np.errstate(all="ignore"):
        return x.astype(dtype, copy=False)


def reals(name: str, x: Any) -> np.ndarray:
    """x as an array of real numbers."""
    x = as_array(name, x)
    if x.dtype.kind not in "fiub" and not is_half(x.dtype):
        raise TypeError(f"{name} must hold real numbers, got dtype {cut(x.dtype)}")
    return x


def dtype_of(value: Any) -> np.dtype:
    """The dtype that value names, object where it names none."""
    try:
        return np.dtype(object if value is None else value)     # np.dtype(None) would be float64
    except Exception:       # of many kinds: NumPy parses strings, and asks objects for their dtype
        return np.dtype(object)


def element_type(name: str, dtype: Any) -> np.dtype:
    """The dtype of four that `dtype` names; of a string "bfloat16" that of ml_dtypes."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            raise ImportError(f'{name} "bfloat16" needs the package ml_dtypes: pip install "fastmha[bfloat16]"') from None
        dtype = bfloat16
    found = dtype_of(dtype)
    if found not in _FLOATS and not is_half(found):
        came = short(dtype) if found.kind == "O" else cut(found)
        raise TypeError(f"{name} must be float32, float64, float16 or bfloat16, got {came}")
    return found


def same_dtype(name: str, x: np.ndarray, like: str, dtype: np.dtype) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{name} has dtype {x.dtype} but {like} has {dtype}: they must share one dtype")


def integer(name: str, value: Any, minimum: int | None = None, maximum: int = 2**63 - 1, why: str = "") -> int:
    """value as an int, where it has a minimum (sizes and counts) one up to `maximum`; bool is none."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {short(value)}") from None
    if minimum is not None and not minimum <= number <= maximum:
        above = f"at most {maximum}{why}" if maximum < 2**63 - 1 else f"below 2**{maximum.bit_length()}"
        raise ValueError(f"{name} must be {f'at least {minimum}' if number < minimum else above}, got {short(number)}")
    return number


def size(name: str, value: Any) -> int:
    """value as a width of a module: an int from 1 to what BLAS can take beside two more of its kind."""
    return integer(name, value, 1, LARGEST // 3)


def length(name: str, value: Any) -> int:
    """value as a length: an int from 0 to what BLAS can take."""
    return integer(name, value, 0, LARGEST)


def flag(name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {short(value)}")


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    names = [f'"{a}"' for a in allowed]
    raise ValueError(f"{name} must be {', '.join(names[:-1])} or {names[-1]}, got {short(value)}")


def precision_name(value: Any) -> str | None:
    """The name of a precision, or None."""
    return None if value is None else choice("precision", value, PRECISIONS)


def usable(x: np.ndarray) -> tuple[np.ndarray, int]:
    """x, or a copy of it where its last axis is not unit-stride or it is unaligned, and the bytes copied.

    A broadcast B or H (stride 0) stays broadcast: only what lies in memory is copied.
    """
    if _core.in_place(x):
        return x, 0
    copied = collapsed(x).copy()        # C order, and aligned where x was not
    return np.broadcast_to(copied, x.shape), copied.nbytes


def collapsed(x: np.ndarray) -> np.ndarray:
    """x (B, H, L, width) with a broadcast B and H cut to length 1."""
    return x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.strides[:2])]


def heads(name: str, x: Any, layout: str, half: bool = False) -> np.ndarray:
    return floats(name, x, 4, _AXES[layout], half)


def attention_problem(q: Any, k: Any, v: Any, layout: str, rules: Rules = NO_RULES, values: bool = True) -> Problem:
    """Check the arguments of `fastmha.attention` and return them as one Problem; with `values` also look at those of a mask."""
    if type(layout) is not str or layout not in LAYOUTS:
        choice("layout", layout, LAYOUTS)
    return under_rules(Problem.of_heads(q, k, v, layout == "BLHD") or _heads_of_bfloat16(q, k, v, layout)
                       or _other_heads(q, k, v, layout), rules, values)


def under_rules(problem: Problem, rules: Rules, values: bool = True) -> Problem:
    """A problem that has none yet, under these."""
    B, H, _, Lq, Lk, D, _ = problem.shape
    if rules is CAUSAL and Lq == Lk:
        return problem.causal()
    if rules is not NO_RULES:
        checked, copied = checked_rules(rules, B, H, Lq, Lk, D, problem.element, values)
        problem.under(checked)
        problem.bytes_copied += copied
        problem.precision = precision_name(rules.precision)
    return problem


def _heads_of_bfloat16(q: Any, k: Any, v: Any, layout: str) -> Problem | None:
    """The same of arrays of bfloat16; None where they are not that, or are none of its."""
    if not type(q) is type(k) is type(v) is np.ndarray or q.dtype.kind != "V" or not q.dtype == k.dtype == v.dtype:
        return None
    return Problem.of_heads(bits(q), bits(k), bits(v), layout == "BLHD", q.dtype) if is_half(q.dtype) else None


def _other_heads(q: Any, k: Any, v: Any, layout: str) -> Problem:
    """What these leave: of two types, or copied where it has to be, or an error that says what is wrong."""
    q, k, v = heads("q", q, layout, True), heads("k", k, layout, True), heads("v", v, layout, True)
    element, stored = q.dtype, k.dtype
    if not element == stored == v.dtype:
        mixed_dtypes(element, k, v)
    if element not in _FLOATS or stored not in _FLOATS:
        q, k, v = bits(q), bits(k), bits(v)
    head_axis, length_axis = _HEAD_AXIS[layout], _LENGTH_AXIS[layout]
    if layout == "BLHD":
        q, k, v = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    B, H, Lq, D = q.shape
    Bk, Hkv, Lk, Dk = k.shape
    Bv, Hv, Lv, Dv = v.shape
    if Bk != B or Bv != B:
        name, got = ("k", Bk) if Bk != B else ("v", Bv)
        raise ValueError(f"{name} has batch size {got} on axis 0 but q has {B}")
    if Hv != Hkv:
        raise ValueError(f'v has {Hv} heads on axis {head_axis} of layout "{layout}" but k has {Hkv}')
    if Hkv != H and (Hkv == 0 or H % Hkv):
        # as heads of the other layout: Lq of them in q, Lk in k
        other = "" if Lv != Lk or Lk == 0 or Lq % Lk else f': they would fit layout "{LAYOUTS[layout == "BHLD"]}"'
        raise ValueError(f'k has {Hkv} heads on axis {head_axis} of layout "{layout}" but q has {H}: '
                         f"q's heads must be a multiple of k's{other}")
    if Lv != Lk:
        raise ValueError(f'v has length {Lv} on axis {length_axis} of layout "{layout}" but k has {Lk}')
    if Dk != D:
        raise ValueError(f"k has width {Dk} on axis 3 but q has {D}")
    if Lq > LARGEST or Lk > LARGEST or D > LARGEST or Dv > LARGEST:
        name, what, n = next(x for x in (("q", "length", Lq), ("k", "length", Lk), ("q", "width", D), ("v", "width", Dv))
                             if x[2] > LARGEST)
        raise ValueError(f"{name} has {what} {n}: at most {LARGEST} is possible")
    copied = copied_k = copied_v = 0
    if not (_core.in_place(q) and _core.in_place(k) and _core.in_place(v)):
        (q, copied), (k, copied_k), (v, copied_v) = usable(q), usable(k), usable(v)
    problem = Problem(q, k, v, *[None] * 7, *scaling(None, None, D, element))
    problem.layout, problem.bytes_copied = str(layout), copied + copied_k + copied_v
    problem.element, problem.stored = element, stored
    return problem


def checked_rules(rules: Rules, B: int, H: int, Lq: int, Lk: int, D: int, element: np.dtype,
                  values: bool = True) -> tuple[tuple[Any, ...], int]:
    """What a `Problem` takes behind q, k and v for such queries, and the bytes of a mask that were copied; with `values` also
    look at those of a mask."""
    mask, is_causal, offset, key_padding_lengths, window, scale, softcap, _, _, key_ranges, sinks, alibi, dropout, seed, _ = rules
    bool_mask = additive_mask = left = right = places = starts = lengths = draws = None
    copied = 0
    if mask is not None:
        mask = bits(_mask(mask, element, (B, H, Lq, Lk)))
        if mask.dtype.kind == "b":
            bool_mask = mask
            # masks that are meant the other way remove key 0 from query 0, those for here seldom do
            if values and mask.size and mask.item(0):
                _look_for_convention(mask)
        elif mask.flags.aligned:
            additive_mask = mask
        else:
            additive_mask = mask[tuple(slice(0, 1) if s == 0 else slice(None) for s in mask.strides)].copy()
            copied = additive_mask.nbytes
            additive_mask = np.broadcast_to(additive_mask, mask.shape)
    if is_causal is not False or window is not None:
        left, right = band(is_causal, window)
    if sinks is not None:
        sinks = of_heads("sinks", sinks, H, element)
    if alibi is not None:
        alibi = of_heads("alibi", alibi, H, element)
    if type(dropout) is not float or dropout != 0 or seed is not None:
        draws = drawing(dropout, seed)
    if right is None and window is None and alibi is None:
        if offset is not None:
            raise ValueError(f"offset is given ({short(offset)}) but none of is_causal, window and alibi, which it would shift")
    else:
        places = offsets(offset, B, Lq, Lk)
    if key_padding_lengths is not None:
        lengths = batch_lengths("key_padding_lengths", key_padding_lengths, B, Lk, "Lk")
    if key_ranges is not None:
        starts, lengths = _within(lengths, *ranges(key_ranges, B, Lk, "Lk"))
    factor, cap = scaling(scale, softcap, D, element)
    return (bool_mask, additive_mask, places, starts, lengths, left, right, factor, cap, sinks, alibi, draws), copied


def mixed_dtypes(of_q: np.dtype, k: np.ndarray, v: np.ndarray) -> None:
    """Whether k and v may have other dtypes than q: both one of half precision where q is float32 or float64."""
    if not (is_half(k.dtype) and of_q in _FLOATS):
        same_dtype("k", k, "q", of_q)
    same_dtype("v", v, "k" if k.dtype != of_q else "q", k.dtype)


def of_heads(name: str, values: Any, H: int, dtype: np.dtype) -> np.ndarray:
    """values, of q's dtype or that of the computation, as a contiguous (H,) array of the latter."""
    values = floats(name, values, half=True)
    if values.dtype != computed(dtype):
        same_dtype(name, values, "q", dtype)
    if values.shape != (H,):
        raise ValueError(f"{name} must have shape (H,) = ({H},), one for each query head, got {values.shape}")
    return np.require(cast(values, computed(dtype)), None, ("C", "A"))


def drawing(dropout: Any, seed: Any) -> tuple[float, int, int, int, int, int] | None:
    """(probability, seed, and the numbers of the first batch row, head, query and key in the draws), None where nothing drops."""
    real = isinstance(dropout, Real) and not isinstance(dropout, (bool, np.bool_))
    if not real:
        raise TypeError(f"dropout must be a number in [0, 1), got {short(dropout)}")
    if not 0 <= dropout < 1 or float(dropout) == 1:
        raise ValueError(f"dropout must be a number in [0, 1), got {short(dropout)}")
    if seed is None and dropout == 0:
        return None
    if seed is None:
        raise ValueError("seed must be given with dropout, an int from 0 to 2**64 - 1, another one for each call that is to draw "
                         f"anew; got dropout {short(dropout)} and no seed")
    number = integer("seed", seed, 0, 2**64 - 1)
    return (float(dropout), number, 0, 0, 0, 0) if float(dropout) > 0 else None


def scaling(scale: Any, softcap: Any, D: int, element: np.dtype) -> tuple[float, float]:
    """The factor of the products of operands of a dtype, and the softcap or 0 for none."""
    if scale is None:
        scale = 1 / math.sqrt(D) if D else 1.0
    else:
        given, scale = scale, number("scale", "a finite number or None", scale, -math.inf)
        dtype = computed(element)
        if abs(scale) > float(np.finfo(dtype).max):
            raise ValueError(f"scale must be a finite number or None, got {short(given)}, which is beyond {dtype}")
    if softcap is None:
        return scale, 0.0
    # every positive number has its meaning, also where it is none of a double: there the nearest double stands for it
    softcap = number("softcap", "a finite number > 0 or None", softcap, 0)
    return scale, min(max(softcap, 5e-324), sys.float_info.max)


def number(name: str, expected: str, value: Any, above: float) -> float:
    """value, a finite real number, as a double; +-inf where it is beyond those."""
    real = isinstance(value, Real) and not isinstance(value, (bool, np.bool_))
    if not real:
        raise TypeError(f"{name} must be {expected}, got {short(value)}")
    if not above < value < math.inf:
        raise ValueError(f"{name} must be {expected}, got {short(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _mask(mask: Any, dtype: np.dtype, shape: tuple[int, int, int, int]) -> np.ndarray:
    """mask with 4 axes, bool, of `dtype` or of that of the computation, each axis of length 1 or the full one."""
    mask = as_array("mask", mask)
    if mask.dtype.kind != "b" and mask.dtype != dtype and mask.dtype != computed(dtype):
        types, came = dtype if dtype in FLOAT_TYPES else f"float32 or {dtype}", cut(mask.dtype)
        raise TypeError(f"mask must be bool (True = may not attend) or {types} like q (added to the scores), got {came}")
    if mask.ndim not in (2, 4):
        raise ValueError(
            f"mask must have 2 axes (Lq, Lk) or 4 that broadcast to (B, H, Lq, Lk), got shape {mask.shape}: index a padding "
            "mask (B, Lk) as mask[:, None, None, :] and a mask (B, Lq, Lk) as mask[:, None]"
        )
    wanted = shape[-mask.ndim:]
    for m, n in zip(mask.shape, wanted):
        if m in (1, n):
            continue
        axes = "(Lq, Lk)" if mask.ndim == 2 else "(B, H, Lq, Lk)"
        hint = ""
        if mask.ndim == 2 and mask.shape == (shape[0], shape[3]):
            hint = ": index a padding mask (B, Lk) as mask[:, None, None, :]"
        raise ValueError(f"mask of shape {mask.shape} does not broadcast to {axes} = {wanted}{hint}")
    return mask


def _look_for_convention(mask: np.ndarray) -> None:
    """Warn where a boolean mask (of at least one element) looks as if True meant "may attend"; a few elements tell most masks."""
    mask = mask[tuple(slice(0, 1) if s == 0 else slice(None) for s in mask.strides)]
    rows, keys = mask.shape[-2:]
    first = mask[(0,) * (mask.ndim - 2)]
    if mask.size > _MOST_LOOKED_AT:
        return
    if first[0, -1]:
        if first[-1, -1] and mask.all():
            _warn("mask removes every key from every query: True = may NOT attend here. If True is meant as may attend, pass "
                  "~mask.")
    elif rows > 1 and keys > 1 and first[-1, 0] and any(
            (mask == np.tri(rows, keys, diagonal, bool)).all() for diagonal in {0, max(0, keys - rows)}):
        _warn("mask is True on and below the diagonal alone, which leaves each query only the keys after its own: True = may NOT "
              "attend here, the inverse of torch's scaled_dot_product_attention. If True is meant as may attend, pass ~mask, or "
              "is_causal=True.")


def _warn(message: str) -> None:
    """A ConventionWarning at the place outside the package that called into it."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fastmha":
        level, frame = level + 1, frame.f_back
    warnings.warn(f'{message} To silence this: warnings.filterwarnings("ignore", category=fastmha.ConventionWarning)',
                  ConventionWarning, stacklevel=level)


def band(is_causal: Any, window: Any) -> tuple[int | None, int | None]:
    """(left, right) of the keys around the diagonal that a query may attend; None = unbounded."""
    left = right = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window must be None or a pair (left, right) of ints >= 0 or None, got {short(window)}")
        left, right = _side("window[0] (left)", window[0]), _side("window[1] (right)", window[1])
    if is_causal is not False and flag("is_causal", is_causal):
        right = 0
    return left, right


def _side(name: str, side: Any) -> int | None:
    """One side of a window; None = unbounded."""
    whole = isinstance(side, Integral)
    if side is None or (whole and side >= UNBOUNDED):
        return None
    if whole and side < 0:
        raise ValueError(f"{name} must be at least 0, got {short(int(side))}: None leaves a side unbounded")
    return integer(name, side)


def offsets(offset: Any, B: int, Lq: int, Lk: int, axis: str = "B") -> np.ndarray:
    """offset as a (B,) int64 array."""
    if offset is None:
        if Lq != Lk:
            raise ValueError(
                f"offset must be given with is_causal, window or alibi where q has length {Lq} and k has length {Lk}: "
                f"0 lets query 0 see key 0, Lk - Lq = {Lk - Lq} lets the last query see the last key"
            )
        return np.zeros(B, np.int64)
    if type(offset) is int and -_OFFSET_MAX <= offset <= _OFFSET_MAX:
        same = np.empty(B, np.int64)
        same.fill(offset)
        return same
    values = integers("offset", offset)
    if values is None:
        raise TypeError(f"offset must be an int or a ({axis},) array of ints, got {short(offset)}")
    if values.ndim and values.shape != (B,):
        raise ValueError(f"offset must be an int or a ({axis},) = ({B},) array of ints, got shape {values.shape}")
    if values.size and (values.min() < -_OFFSET_MAX or values.max() > _OFFSET_MAX):
        raise ValueError(f"offset must lie within +-2**61, got {short(offset)}")
    return np.full(B, values, np.int64)


def integers(name: str, x: Any) -> np.ndarray | None:
    """x as an array of integers, as objects where NumPy has no type for them all; None where it holds others."""
    values = as_array(name, x)
    if values.dtype.kind in "iu" or values.size == 0:
        return values
    if values.dtype.kind == "O" or (values is not x and values.dtype.kind == "f"):
        # Python ints beyond 64 bits, or beyond int64 beside negative ones
        exact = np.asarray(x, object)
        if all(isinstance(i, Integral) and not isinstance(i, (bool, np.bool_)) for i in exact.flat):
            return exact
    return None


def batch_lengths(name: str, lengths: Any, B: int, longest: int, longest_name: str) -> np.ndarray:
    """Lengths as a (B,) int64 array, each in [0, longest]."""
    values = integers(name, lengths)
    if values is None:
        raise TypeError(f"{name} must be integers, got dtype {cut(as_array(name, lengths).dtype)}")
    if values.size == 0 and B == 0:
        return np.zeros(0, np.int64)
    if values.shape != (B,):
        raise ValueError(f"{name} must have shape (B,) = ({B},), got {values.shape}")
    listed = values.tolist()        # of a few lengths, the usual ones, Python finds the least and the largest sooner than NumPy
    if listed and not 0 <= min(listed) <= max(listed) <= longest:
        at = next(b for b, length in enumerate(listed) if not 0 <= length <= longest)
        raise ValueError(f"{name} must lie in [0, {longest_name}] = [0, {longest}], got {short(listed[at])} at index {at}")
    return np.array(values, np.int64)


def ranges(key_ranges: Any, B: int, most: int, most_name: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Starts and ends of the valid keys as (B,) int64 arrays, each from 0 to `most`; None: 0, and to the end."""
    if not isinstance(key_ranges, (tuple, list)) or len(key_ranges) != 2:
        raise TypeError("key_ranges must be None or a pair (starts, ends), each a (B,) array of ints, an int or None, got "
                        f"{short(key_ranges)}")
    starts, ends = (_range_side(name, side, B, most, most_name) for name, side in zip(KEY_RANGES, key_ranges))
    if starts is not None and ends is not None and (starts > ends).any():
        b = int((starts > ends).argmax())
        raise ValueError(f"key_ranges must have no start beyond its end, got {starts[b]} and {ends[b]} at index {b}")
    return starts, ends


def _range_side(name: str, side: Any, B: int, most: int, most_name: str) -> np.ndarray | None:
    if side is None:
        return None
    if isinstance(side, Integral):
        return np.full(B, integer(name, side, 0, most, f" = {most_name}"), np.int64)
    return batch_lengths(name, side, B, most, most_name)


def _within(lengths: np.ndarray | None, starts: np.ndarray | None, ends: np.ndarray | None) -> Any:
    """Key ranges within padding lengths, none with a start beyond its end."""
    if ends is None:
        ends = lengths
    elif lengths is not None:
        ends = np.minimum(ends, lengths)
    return starts if starts is None or ends is None else np.minimum(starts, ends), ends


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
        if len(chosen) > LARGEST:
            raise ValueError(f"{name} must have at most {LARGEST} indices, got {len(chosen)}")
        return tuple(integer(f"{name}[{i}]", x) for i, x in enumerate(chosen))
    if isinstance(chosen, (bool, np.bool_)) or not isinstance(chosen, Integral):
        raise TypeError(f"{name} must be None, an int, a slice or a sequence of ints, got {short(chosen)}")
    return int(chosen)


def positions(name: str, chosen: Any, n: int, what: str) -> np.ndarray:
    """What `selection` returned, on an axis of q of length n: int64 indices in [0, n)."""
    if chosen is None or isinstance(chosen, slice):
        return np.arange(*(chosen or slice(None)).indices(n), dtype=np.int64)
    several = isinstance(chosen, tuple)
    for i, x in enumerate(chosen if several else (chosen,)):
        if not -n <= x < n:
            raise ValueError(f"{name} must lie in [{-n}, {n}) as q has {n} {what}, got {short(x)}"
                             f"{f' at index {i}' if several else ''}")
    indices = np.array(chosen, np.int64).reshape(-1)
    return np.where(indices < 0, indices + n, indices)


def output(out: Any, shape: tuple[int, ...], dtype: np.dtype, inputs: dict[str, Any], of: str = "q") -> np.ndarray:
    """Check `out=`: shape, dtype, writable, no overlap with an input or with itself."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    not_masked("out", out)
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    same_dtype("out", out, of, dtype)
    flags = out.flags
    if not flags.writeable:
        raise ValueError("out must be writable, got a read-only array")
    if not flags.c_contiguous:      # which has one place for each element
        reach = out.itemsize - 1
        for stride, n in sorted((abs(s), n) for s, n in zip(out.strides, out.shape) if n > 1):
            if out.size and stride <= reach:
                raise ValueError(f"out overlaps itself: shape {out.shape}, strides {out.strides}")
            reach += stride * (n - 1)
    for name, x in inputs.items():
        if x is not None and _overlap(out, as_array(name, x)):
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


def like(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype, layout: str | None, of: str = "q") -> np.ndarray:
    """An array that must have the given shape and the dtype of `of`, such as grad_out, out and lse of the backward pass."""
    x = floats(name, x, half=is_half(dtype))
    same_dtype(name, x, of, dtype)
    if x.shape != shape:
        of_layout = "" if layout is None else f' for layout "{layout}"'
        raise ValueError(f"{name} must have shape {shape}{of_layout}, got {x.shape}")
    return x


def lse_like(name: str, lse: Any, shape: tuple[int, ...], dtype: np.dtype, layout: str | None, of: str = "q") -> np.ndarray:
    """The same for an lse of results of `dtype`: float32 where they are of half precision."""
    if not is_half(dtype):
        return like(name, lse, shape, dtype, layout, of)
    lse = floats(name, lse)
    if lse.dtype != computed(dtype):
        raise TypeError(f"{name} has dtype {lse.dtype} but {of} has {dtype}: their lse is {computed(dtype)}")
    return like(name, lse, shape, computed(dtype), layout, of)


def real_array(name: str, x: Any, dtype: np.dtype, ndim: int, axes: str) -> np.ndarray:
    """x (real numbers) cast to a module's dtype, with unit last stride and aligned; itself where it already is that."""
    x = as_array(name, x)
    if x.dtype != dtype:
        x = reals(name, x)
        if x.ndim == ndim:
            x = cast(x, dtype)
    if x.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes {axes}, got shape {x.shape}")
    return x


def textbook(arrays: dict[str, np.ndarray]) -> None:
    """Shapes of the textbook functions' Q, K, V, (B, n, d) or (B, H, n, d), under their own names."""
    (nq, Q), (nk, K), (nv, V) = arrays.items()
    for name, x in arrays.items():
        for axis, what in ((-2, "length"), (-1, "width")):
            if x.shape[axis] > LARGEST:
                raise ValueError(f"{name} has {what} {x.shape[axis]}: at most {LARGEST} is possible")
    for name, x in ((nk, K), (nv, V)):
        same_dtype(name, x, nq, Q.dtype)
        for axis, what in ((0, "batch size"), (1, "heads"))[: x.ndim - 2]:
            if x.shape[axis] != Q.shape[axis]:
                raise ValueError(f"{name} has {what} {x.shape[axis]} on axis {axis} but {nq} has {Q.shape[axis]}")
    if V.shape[-2] != K.shape[-2]:
        raise ValueError(f"{nv} has length {V.shape[-2]} on axis {V.ndim - 2} but {nk} has {K.shape[-2]}")
    if K.shape[-1] != Q.shape[-1]:
        raise ValueError(f"{nk} has width {K.shape[-1]} on axis {K.ndim - 1} but {nq} has {Q.shape[-1]}")
