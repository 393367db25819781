"""Attention of Hugging Face transformers on these kernels: `register`, then ``attn_implementation="fastmha"``.

Causality, windows and padding reach the kernels as what they are: no mask of L × L elements is made for them. Needs the extra
``transformers``: ``pip install "fastmha[transformers]"``.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from fastmha.validate import Rules

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
except ImportError as _error:
    raise ImportError('fastmha.transformers needs PyTorch and transformers 5.3 or newer: '
                      'pip install "fastmha[transformers]"') from _error

from torch import Tensor

from fastmha import torch as face

__all__ = ["register"]

_ours: set[str] = set()


def register(name: str = "fastmha") -> None:
    """Make these kernels an attention implementation of transformers, under a name of your choice.

    Afterwards ``AutoModel.from_pretrained(..., attn_implementation="fastmha")`` and ``model.set_attn_implementation("fastmha")``
    run every model on them that calls its attention through transformers' interface: on CPUs, in training and in generation, with
    any cache, padding on either side, sliding windows, softcap (Gemma 2), sinks (gpt-oss) and position biases that train (T5).

    Parameters
    ----------
    name : str
        Without "/", ":" and "|", which transformers reads as the names of kernels to load, and without "flash".

    Raises
    ------
    ValueError, TypeError
        For such a name, and for one that transformers has given to another implementation.

    Notes
    -----
    float16 and bfloat16 models are computed in float32 and rounded once at the end; bfloat16 from copies in float32 where the
    package ml_dtypes is missing. ``output_attentions=True`` in a call returns the weights, before dropout, without gradients.
    For patterns that are neither causality nor a window, masks are written out as for "sdpa", and under `torch.compile` as for
    "eager", which is also what models get that compute attention themselves.

    Examples
    --------
    >>> import fastmha.transformers                                                                 # doctest: +SKIP
    >>> fastmha.transformers.register()                                                             # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fastmha")           # doctest: +SKIP
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name or any(x in name for x in "/:|") or "flash" in name:
        raise ValueError('name must have none of "/", ":", "|" and "flash", by which transformers knows other kernels, '
                         f"got {name!r}")
    if name not in _ours and (name in AttentionInterface() or name in AttentionMaskInterface()):
        raise ValueError(f"name {name!r} is that of an implementation which transformers has already")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _ours.add(name)


# ------------------------------------------------------------------------------------------------------- masks, as rules

class Pattern(NamedTuple):
    """Which keys a query may attend: query i is at i + offset, keys as in `fastmha.attention`."""

    is_causal: bool
    window: tuple[int | None, int | None] | None
    offset: int | None
    key_ranges: tuple[np.ndarray, np.ndarray] | None    # (B,) each: where each batch row has one run of valid keys
    keys: Tensor | None                                 # (B, 1, 1, Lk), True = valid: where it has more


class Mask(torch.Tensor):
    """A mask (B, 1, Lq, Lk), True = may attend, that `attention` reads as a `Pattern`.

    It has the shape and the type of the one of "sdpa", and is written out as that one as soon as anything else looks at its
    elements. Added to something, compared in size or cast to floats it is the one of "eager": models that compute attention
    themselves read it so. Copies and views of it are such masks too; arithmetic that either one would answer is refused.
    """

    pattern: Pattern | None                 # None: what it says is written in it
    said: Mapping[str, Any]                 # what transformers said, to write it from
    elements: Tensor | None                 # as written, once it is

    @staticmethod
    def of(elements: Tensor, said: Mapping[str, Any], pattern: Pattern | None = None) -> Mask:
        mask = elements.as_subclass(Mask)
        mask.pattern, mask.said, mask.elements = pattern, said, elements if pattern is None else None
        return mask

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OUTSIDE:
                return func(*args, **kwargs)
            first = args[0] if args else None
            if func in _SAME and len(args) == 1 and not kwargs and isinstance(first, Mask) and _unwritten(first):
                return Mask.of(first.as_subclass(Tensor), first.said, first.pattern)
            if func in _EITHER:
                raise NotImplementedError(f"a mask of fastmha does not tell whether {func.__name__} takes it as one of bool or "
                                          "as one that is added: use another attn_implementation")
            if func in _ADDITIONS:
                return func(*_all(_added, args), **_all(_added, kwargs))
            result = func(*_all(written, args), **_all(written, kwargs))
            mask = first if isinstance(first, Mask) else next((x for x in _flat(args) if isinstance(x, Mask)), None)
            if func in _CASTS and isinstance(first, Mask) and result.is_floating_point():
                return _additive(written(first), result.dtype)
            if mask is None or (func not in _VIEWS and result is not mask.elements):
                return result
            return _all(lambda x: Mask.of(x, mask.said) if x.dtype is torch.bool else x, result, Tensor)


def _named(*names: str) -> set[Any]:
    """What torch and its tensors have under these names."""
    return {getattr(of, name) for of in (torch, Tensor) for name in names if hasattr(of, name)}


_OUTSIDE = {getattr(Tensor, name).__get__ for name in (       # what says nothing of the elements
    "shape", "ndim", "dtype", "device", "layout", "is_cpu", "is_cuda", "requires_grad", "is_nested", "is_sparse", "is_meta",
    "is_quantized",
)} | {Tensor.dim, Tensor.size, Tensor.numel, Tensor.__len__, Tensor.ndimension, Tensor.is_floating_point, Tensor.is_contiguous}
_SAME = {Tensor.clone, torch.clone, Tensor.detach, torch.detach, Tensor.cpu}
_CASTS = {Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.double, Tensor.bfloat16}
_VIEWS = _SAME | _CASTS | {getattr(Tensor, name).__get__ for name in ("T", "mT")} | _named(
    "__getitem__", "contiguous", "bool", "expand", "expand_as", "broadcast_to", "view", "view_as", "reshape", "reshape_as",
    "unsqueeze", "squeeze", "select", "narrow", "transpose", "swapaxes", "permute", "movedim", "flatten", "unflatten", "repeat",
    "repeat_interleave", "tile", "index_select", "split", "chunk", "unbind", "cat", "concat", "stack", "flip", "roll")
_ADDITIONS = _named(
    "add", "__add__", "__radd__", "add_", "__iadd__", "lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__")
_EITHER = _named(
    "sub", "subtract", "rsub", "__sub__", "__rsub__", "__isub__", "mul", "multiply", "__mul__", "__rmul__", "__imul__",
    "eq", "ne", "__eq__", "__ne__")


def _all(form: Callable[[Any], Any], x: Any, kind: type = Mask) -> Any:
    """x with what is of that kind in it in another form."""
    if isinstance(x, kind):
        return form(x)
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        return type(x)(_all(form, y, kind) for y in x)
    if isinstance(x, dict):
        return {key: _all(form, y, kind) for key, y in x.items()}
    return x


def _flat(args: Any) -> list[Any]:
    return [y for x in args for y in (_flat(x) if isinstance(x, (tuple, list)) else [x])]


def _unwritten(mask: Mask) -> bool:
    """Whether its pattern says all of it: nobody has written into its elements."""
    return mask.pattern is not None and (mask.elements is None or mask.elements._version == 0)


def written(mask: Mask) -> Tensor:
    """Its elements, True = may attend."""
    if mask.elements is None:
        with torch.inference_mode(False):       # where nothing counts what is written into a tensor
            mask.elements = _written_out(mask.said).clone()
    return mask.elements


def _added(mask: Mask) -> Tensor:
    return _additive(written(mask), mask.said.get("dtype", torch.float32))


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)


def _written_out(said: Mapping[str, Any]) -> Tensor:
    made = masking_utils.sdpa_mask(**{**said, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert made is not None     # nothing may be left out
    return made


def mask(**said: Any) -> Tensor | None:
    """What transformers calls once for each kind of layer of a model, with what "sdpa" and "eager" are told."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        # of floats: added or handed to `attention`, it is right
        return masking_utils.eager_mask(**{**said, "allow_is_bidirectional_skip": False})
    if said.get("config") is not None and not _asks(said["config"].__class__):
        return masking_utils.eager_mask(**said)
    pattern = _pattern(**said)
    if pattern is None:
        return Mask.of(_written_out(said), said)
    length = said["q_length"] if "q_length" in said else len(said["cache_position"])
    nothing = torch.zeros((), dtype=torch.bool)
    return Mask.of(nothing.expand(said["batch_size"], 1, int(length), int(said["kv_length"])), said, pattern)


@cache
def _asks(config: Any) -> bool:
    """Whether models of such a configuration are known to look their attention up: their files, beside its own, say so."""
    for of in config.__mro__:
        package = of.__module__.rpartition(".")[0]
        if package == "transformers":       # the base of all
            break
        files = [file for name, file in list(sys.modules.items()) if package and name.startswith(f"{package}.modeling_")]
        files += [own for own in (sys.modules.get(of.__module__),) if own is not None and hasattr(own, _LOOKED_UP)]
        if files:
            return all(hasattr(file, _LOOKED_UP) for file in files)
    return False


_LOOKED_UP = "ALL_ATTENTION_FUNCTIONS"      # the name by which they have transformers' table


def _pattern(*, batch_size: int, kv_length: int, mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
             q_offset: int | Tensor = 0, kv_offset: int = 0, attention_mask: Tensor | None = None,
             cache_position: Tensor | None = None, **_: Any) -> Pattern | None:
    """What a mask says as rules, or None where they cannot."""
    sides = _sides(mask_function)
    if sides is None or (attention_mask is not None and attention_mask.ndim != 2):
        return None
    left, right = sides
    is_causal = right == 0
    window = None if left is None and (is_causal or right is None) else (left, None if is_causal else right)
    first = q_offset if cache_position is None else cache_position[0]      # before transformers 5
    offset = int(first) - int(kv_offset) if is_causal or window is not None else None
    key_ranges = keys = None
    if attention_mask is not None:
        valid = attention_mask[:, kv_offset:kv_offset + kv_length].bool()
        if valid.shape[1] < kv_length:      # of a static cache: nothing is there yet
            valid = torch.nn.functional.pad(valid, (0, kv_length - valid.shape[1]))
        if not valid.all():
            key_ranges = _runs(valid.numpy())
            keys = valid[:, None, None, :] if key_ranges is None else None
    return Pattern(is_causal, window, offset, key_ranges, keys)


def _sides(function: Callable[..., Any]) -> tuple[int | None, int | None] | None:
    """How far to the left and to the right a pattern of transformers lets a query look; None if it is no such pattern."""
    if function is masking_utils.causal_mask_function:
        return None, 0
    if function is masking_utils.bidirectional_mask_function:
        return None, None
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    cells = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
    name = function.__qualname__.partition(".")[0]
    if name == "sliding_window_overlay" and set(cells) == {"sliding_window"}:
        return int(cells["sliding_window"]) - 1, None
    if name == "sliding_window_bidirectional_overlay" and set(cells) == {"sliding_window"}:
        return int(cells["sliding_window"]), int(cells["sliding_window"])
    if name == "and_masks" and set(cells) == {"mask_functions"}:
        parts = [_sides(part) for part in cells["mask_functions"]]
        sides = [part for part in parts if part is not None]
        if len(sides) == len(parts):
            left, right = (min((n for n in side if n is not None), default=None) for side in zip(*sides, strict=True))
            return left, right
    return None


def _runs(valid: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(starts, ends) of the valid keys (B, Lk) of each batch row; None where one has gaps."""
    count = valid.sum(1)
    starts = np.where(count > 0, valid.argmax(1), 0)
    ends = starts + count
    last = np.where(count > 0, valid.shape[1] - valid[:, ::-1].argmax(1), 0)
    return (starts, ends) if (last == ends).all() else None


# ---------------------------------------------------------------------------------------------------------- attention

def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    position_bias: Tensor | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a layer of a model calls: (B, Lq, H, Dv) from heads (B, H, Lq, D), (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv); and the
    weights (B, H, Lq, Lk), where ``output_attentions`` wants them."""
    for name in ("cache", "head_mask"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"fastmha serves no {name} of {type(module).__name__}: use another attn_implementation")
    if torch.is_autocast_enabled("cpu"):
        query, key, value = face.autocast(query, key, value)
    dtype = query.dtype
    Lq, Lk = query.shape[2], key.shape[2]
    if dtype is torch.bfloat16 and dtype not in face.TYPES:
        query, key, value = query.float(), key.float(), value.float()
    pattern, removed = _NOTHING, attention_mask
    if not torch.compiler.is_compiling() and isinstance(attention_mask, Mask):
        if not _unwritten(attention_mask):
            removed = written(attention_mask)[..., :Lk]
        else:
            assert attention_mask.pattern is not None
            pattern, removed = _fitting(attention_mask.pattern, attention_mask.shape, Lq, Lk), None
    elif attention_mask is not None:
        removed = attention_mask[..., :Lk]
    elif Lq > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):       # as "sdpa" reads no mask
        pattern = _CAUSAL
    if removed is None:
        removed = pattern.keys
    if removed is not None and removed.dtype is not torch.bool:
        removed = _added_to(query, removed)
    if position_bias is not None:
        removed = _biased(_added_to(query, position_bias[..., :Lk]), removed)
    if removed is not None and removed.ndim != 4:
        removed = removed.reshape((1,) * (4 - removed.ndim) + tuple(removed.shape))
    sinks = None if s_aux is None else _added_to(query, s_aux)
    rules = Rules(is_causal=pattern.is_causal, offset=pattern.offset, window=pattern.window, scale=scaling,
                  softcap=softcap or None, key_ranges=pattern.key_ranges, dropout=float(dropout))
    reason = face.not_served(query, key, value, removed)
    if reason:
        raise TypeError(f"{reason}: attn_implementation of {type(module).__name__} is fastmha's")
    out = face.attend(query, key, value, removed, sinks, rules).transpose(1, 2)
    weights = face.weights(query, key, value, removed, sinks, rules).to(dtype) if kwargs.get("output_attentions") else None
    return out.to(dtype), weights


_NOTHING = Pattern(False, None, None, None, None)
_CAUSAL = Pattern(True, None, 0, None, None)


def _fitting(pattern: Pattern, shape: tuple[int, ...], Lq: int, Lk: int) -> Pattern:
    """The pattern of a mask of that shape for so many queries and keys: of those keys that it counts beyond, none is there."""
    _, _, queries, keys = shape
    if queries != Lq or keys < Lk:
        raise ValueError(f"attention_mask is one of {queries} queries and {keys} keys, but there are {Lq} and {Lk}")
    if keys == Lk:
        return pattern
    ranges = None
    if pattern.key_ranges is not None:
        starts, ends = pattern.key_ranges
        ranges = np.minimum(starts, Lk), np.minimum(ends, Lk)
    return pattern._replace(key_ranges=ranges, keys=None if pattern.keys is None else pattern.keys[..., :Lk])


def _added_to(query: Tensor, x: Tensor) -> Tensor:
    """x in a dtype that may be added to the scores of query: its own, where it is one."""
    return x if x.dtype is query.dtype else x.to(face.computed(query))


def _biased(bias: Tensor, removed: Tensor | None) -> Tensor:
    """What is added to the scores: the bias, and where a mask removes a pair, -inf or what the mask adds."""
    if removed is None:
        return bias
    return torch.where(removed, bias, -torch.inf) if removed.dtype is torch.bool else bias.to(face.computed(bias)) + removed
