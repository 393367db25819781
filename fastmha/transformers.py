"""Attention of Hugging Face transformers on these kernels: `register`, then ``attn_implementation="fastmha"``.

Causality, windows and padding reach the kernels as what they are: no mask of L × L elements is made for them. Needs the extra
``transformers``: ``pip install "fastmha[transformers]"``.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
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
    Under `torch.compile`, and for patterns that are neither causality nor a window, masks are written out as for "sdpa".

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

    It has the shape and the type of the one of "sdpa", and becomes that one as soon as anything else looks at its elements.
    Added to something it is that of "eager": models that compute attention themselves add it to their scores.
    """

    pattern: Pattern | None                 # None: what it says is written in it
    said: Mapping[str, Any] | None          # what it is to be written from

    @staticmethod
    def of(elements: Tensor, pattern: Pattern | None = None, said: Mapping[str, Any] | None = None) -> Mask:
        mask = elements.as_subclass(Mask)
        mask.pattern, mask.said = pattern, said
        return mask

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OUTSIDE:
                return func(*args, **(kwargs or {}))
            form = _added if func in _ADDITIONS else written
            result = func(*_all(form, args), **_all(form, kwargs or {}))
            return Mask.of(result) if func is torch.Tensor.__getitem__ and result.dtype is torch.bool else result


_ADDITIONS = {torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__}
_OUTSIDE = {getattr(torch.Tensor, name).__get__ for name in (       # what says nothing of the elements
    "shape", "ndim", "dtype", "device", "layout", "is_cpu", "is_cuda", "requires_grad", "is_nested", "is_sparse", "is_meta",
    "is_quantized",
)} | {torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__, torch.Tensor.ndimension,
      torch.Tensor.is_floating_point, torch.Tensor.is_contiguous}


def _all(form: Callable[[Mask], Tensor], x: Any) -> Any:
    """x with each Mask in it in another form."""
    if isinstance(x, Mask):
        return form(x)
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        return type(x)(_all(form, y) for y in x)
    if isinstance(x, dict):
        return {key: _all(form, y) for key, y in x.items()}
    return x


def written(mask: Mask) -> Tensor:
    """Its elements, True = may attend."""
    return mask.as_subclass(Tensor) if mask.said is None else _written_out(mask.said)


def _added(mask: Mask) -> Tensor:
    return torch.zeros(mask.shape).masked_fill_(~written(mask), torch.finfo(torch.float32).min)


def _written_out(said: Mapping[str, Any]) -> Tensor:
    made = masking_utils.sdpa_mask(**{**said, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert made is not None     # nothing may be left out
    return made


def mask(**said: Any) -> Tensor:
    """What transformers calls once for each kind of layer of a model, with what "sdpa" is told."""
    if torch.compiler.is_compiling():
        return _written_out(said)
    pattern = _pattern(**said)
    if pattern is None:
        return Mask.of(_written_out(said))
    length = said["q_length"] if "q_length" in said else len(said["cache_position"])
    nothing = torch.zeros((), dtype=torch.bool)
    return Mask.of(nothing.expand(said["batch_size"], 1, int(length), int(said["kv_length"])), pattern, said)


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
    dtype = query.dtype
    Lq, Lk = query.shape[2], key.shape[2]
    if dtype is torch.bfloat16 and dtype not in face.TYPES:
        query, key, value = query.float(), key.float(), value.float()
    pattern, removed = _NOTHING, attention_mask
    if not torch.compiler.is_compiling() and isinstance(attention_mask, Mask):
        if attention_mask.pattern is None:
            removed = written(attention_mask)[..., :Lk]
        else:
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
