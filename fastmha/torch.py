"""PyTorch's attention on these kernels: `scaled_dot_product_attention` with torch's own signature and meaning, and `patch`.

Tensors on the CPU in float32, float64, float16 and bfloat16 enter without a copy, whatever their strides, and gradients come
back, the mask's too. Needs the extra ``torch``: ``pip install "fastmha[torch]"``, for bfloat16 also the extra ``bfloat16``.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import lcm
from typing import Any
from warnings import warn

import numpy as np

from fastmha import _core, algorithms, capture, threads, validate
from fastmha._core import Problem
from fastmha.algorithms import AUTO
from fastmha.planning import choose
from fastmha.validate import CAUSAL, NO_RULES, Rules

try:
    import torch
except ImportError as _error:
    raise ImportError('fastmha.torch needs PyTorch: pip install "fastmha[torch]"') from _error

from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_overloaded_args, handle_torch_function, has_torch_function

__all__ = ["patch", "scaled_dot_product_attention"]


def _bfloat16() -> Any:
    """NumPy's type of that name, None without the package that has it."""
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return None
    return bfloat16


_BFLOAT16 = _bfloat16()
TYPES = {torch.float32, torch.float64, torch.float16} | ({torch.bfloat16} if _BFLOAT16 else set())
_MASK, _SINKS, _SEED = map(Rules._fields.index, ("mask", "sinks", "seed"))
_REAL = {Tensor, torch.nn.Parameter}
_STRIDED = torch.strided
_torchs_own: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
_said: set[str] = set()


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, fallback: bool = False,
) -> Tensor:
    """What `torch.nn.functional.scaled_dot_product_attention` computes, by `fastmha.attention`.

    Parameters
    ----------
    query : (..., H, L, E) tensor of float32, float64, float16 or bfloat16 on the CPU
        Any strides, 2 axes or more; nothing is copied where the last axis has stride 1. bfloat16 needs the package ml_dtypes:
        ``pip install "fastmha[bfloat16]"``.
    key : (..., H, S, E) tensor
        Axes before the last two broadcast to those of query, and the other way round.
    value : (..., H, S, Ev) tensor
    attn_mask : tensor, optional
        Broadcasts to (..., H, L, S). bool: **True = may attend**, as torch has it and the opposite of `fastmha.attention`.
        Float of query's dtype, or of float32 where that is of half precision: added to the scores; its gradient is computed where
        it requires one, in its own shape.
    dropout_p : float
        Probability with which a weight becomes 0, the others divided by 1 - p, at every call. The seed is drawn from torch's
        generator, so that `torch.manual_seed` fixes it; which weights are dropped is not what torch would drop.
    is_causal : bool
        Query i may attend keys j <= i, also where L and S differ; not together with a mask.
    scale : float, optional
        Default 1/sqrt(E).
    enable_gqa : bool
        The heads of query may be a multiple of those of key and value, which are not repeated in memory.
    fallback : bool
        Whether PyTorch computes what is not served here (other devices, dtypes and layouts), a warning saying so once for each
        reason. Otherwise that is an error.

    Returns
    -------
    (..., H, L, Ev) tensor of query's dtype
        A query that may attend no key gets zeros.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came, before anything is computed.

    Notes
    -----
    float16 and bfloat16 are computed in float32, and results and gradients rounded once at the end. torch's settings of precision
    say nothing here, `fastmha.set_precision` does. Under `torch.autocast` tensors are cast as for torch's own function.

    Gradients are computed once: those of gradients are refused, and so are derivatives forward (`torch.func.jvp`) and several at
    once by ``is_grads_batched=True`` or ``jacobian(vectorize=True)``, for which there are `torch.func.vmap` and
    `torch.func.jacrev`. Under `torch.compile` and `torch.func` the call is one operator, and what traces a program records it
    as that.
    """
    if has_torch_function((query, key, value, attn_mask)):      # what has a meaning of its own of it, as a Proxy of torch.fx
        return handle_torch_function(scaled_dot_product_attention, (query, key, value, attn_mask), query, key, value, attn_mask,
                                     dropout_p, is_causal, scale, enable_gqa, fallback=fallback)
    if torch.is_autocast_enabled("cpu"):
        query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    problem = None      # of the usual operands, about which nothing is to be asked
    if attn_mask is None and not torch.compiler.is_compiling():
        problem = Problem.of_tensors(query, key, value, enable_gqa)
    leading, q, k, v, mask = None, query, key, value, attn_mask
    if problem is None:
        reason = not_served(query, key, value, attn_mask)
        if reason:
            if not fallback:
                raise TypeError(f"{reason}; with fallback=True PyTorch computes it")
            if not torch.compiler.is_compiling() and reason not in _said:
                _said.add(reason)
                warn(f"fastmha.torch leaves a call to PyTorch: {reason}", stacklevel=2)
            return _torchs_own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        _check_shapes(query, key, value, attn_mask, enable_gqa)
        leading, q, k, v, mask = _in_four_axes(query, key, value, attn_mask, enable_gqa)
    if is_causal is not True and is_causal is not False and not isinstance(is_causal, (np.bool_, torch.SymBool)):
        raise TypeError(f"is_causal must be True or False, got {validate.short(is_causal)}")
    if type(dropout_p) is not float or not 0 <= dropout_p <= 1:
        dropout_p = _probability(dropout_p)
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal and attn_mask are given: PyTorch takes one of them; let the mask remove what lies ahead")
    if scale is not None and isinstance(scale, Tensor):     # a number, to torch
        scale = _number(scale)
    if scale is None and not dropout_p and (not is_causal or q.shape[2] == k.shape[2]):
        rules = CAUSAL if is_causal else NO_RULES
    else:
        rules = Rules(is_causal=is_causal, offset=0 if is_causal else None, scale=scale, dropout=dropout_p)
    out = attend(q, k, v, mask, None, rules, problem)
    return out if leading is None else out.reshape(leading + out.shape[-2:])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, rules: Rules,
           problem: Problem | None = None) -> Tensor:
    """(B, H, Lq, Dv), with gradients of all tensors, from (B, H, Lq, D), (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv) that `not_served`
    has nothing against; mask of 4 axes as torch means it; what else is to hold in rules, whose mask, sinks and seed are None.
    problem: of the three, without rules, where somebody has it."""
    if rules.dropout == 1:      # all weights are 0, to torch
        return attend(q, k, v, mask, sinks, rules._replace(dropout=0.0)) * 0
    seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64) if rules.dropout else None
    if torch.compiler.is_compiling():
        return torch.ops.fastmha.attention(q, k, v, mask, sinks, seed, *_flat(rules))[0]
    if torch._C._functorch.peek_interpreter_stack() is not None:        # inside a transform of torch.func
        return _Attention.apply(q, k, v, mask, sinks, seed, rules)[0]
    if forward_ad._current_level >= 0 and any(
            x is not None and forward_ad.unpack_dual(x).tangent is not None for x in (q, k, v, mask, sinks)):
        _no_tangents()
    if type(q) not in _REAL or _recorded():     # also a tensor that is a shape alone
        return torch.ops.fastmha.attention(q, k, v, mask, sinks, seed, *_flat(rules))[0]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad
                                    or (mask is not None and mask.requires_grad) or (sinks is not None and sinks.requires_grad)):
        return _Eager.apply(q, k, v, mask, sinks, seed, rules)
    return _forward(q, k, v, mask, sinks, seed, rules, False, problem)[0]


def weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, rules: Rules) -> Tensor:
    """(B, H, Lq, Lk), without gradients and before dropout; otherwise as `attend`."""
    if _recorded():
        raise NotImplementedError("fastmha.torch gives no weights to what traces a program: they would be constants of it")
    problem = _problem(q, k, v, mask, sinks, None, rules._replace(dropout=0.0))
    return _tensor(capture.fill(capture.choose(capture.Capture(), problem), problem, AUTO, threads.resolve(None)))


@contextmanager
def patch() -> Iterator[None]:
    """Inside it `torch.nn.functional.scaled_dot_product_attention` is the one above, with ``fallback=True``.

    So models that call it, `torch.nn.MultiheadAttention` among them, use these kernels unchanged; torch's fused path for encoder
    layers in inference, which calls no Python, is off meanwhile. What has imported the function by name keeps torch's. It holds
    for the whole process, not for one thread alone.

    Examples
    --------
    >>> import torch, fastmha.torch                             # doctest: +SKIP
    >>> with fastmha.torch.patch():                             # doctest: +SKIP
    ...     model(x)
    """
    def served(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
        tensors = query, key, value, attn_mask
        if has_torch_function(tensors) and _get_overloaded_args(tensors):       # they know torch's function, not this one
            return _torchs_own(*tensors, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, fallback=True)

    before, fast = torch.nn.functional.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    torch.nn.functional.scaled_dot_product_attention = served
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = before
        torch.backends.mha.set_fastpath_enabled(fast)


# -------------------------------------------------------------------------------------------------- what comes in

def not_served(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str | None:
    """Why PyTorch must compute it, if it must."""
    dtype: torch.dtype | None = None
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
        if dtype is None:
            dtype = x.dtype
        if x.dtype not in TYPES or not x.is_cpu or x.layout is not _STRIDED or x.is_nested or x.ndim < 2:
            if x.dtype is torch.bfloat16 and _BFLOAT16 is None:
                return f'{name} is a tensor of bfloat16, which needs the package ml_dtypes: pip install "fastmha[bfloat16]"'
            return (f"{name} must be a dense tensor of float32, float64, float16 or bfloat16 on the CPU with 2 axes or more, got "
                    f"{_described(x)}")
        if x.dtype is not dtype:
            raise TypeError(f"{name} has dtype {x.dtype} but query has {dtype}")
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"attn_mask must be a torch tensor, got {type(mask).__name__}")
        types = [torch.bool, *dict.fromkeys((dtype, computed(query)))]
        if mask.dtype not in types or not mask.is_cpu or mask.layout is not _STRIDED:
            return (f"attn_mask must be a dense tensor of {' or '.join(map(str, types)).removeprefix('torch.')} on the CPU, got "
                    f"{_described(mask)}")
    return None


def autocast(*tensors: Tensor | None) -> list[Any]:
    """What torch makes of the operands of its own function under `torch.autocast`."""
    dtype = torch.get_autocast_dtype("cpu")
    return [x.to(dtype) if isinstance(x, Tensor) and x.is_cpu and x.is_floating_point() and x.dtype is not torch.float64 else x
            for x in tensors]


def computed(x: Tensor) -> torch.dtype:
    """The dtype in which a tensor is computed, and that of its lse."""
    return torch.float32 if x.dtype.itemsize == 2 else x.dtype


def _described(x: Tensor) -> str:
    kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.").replace("strided", "dense")
    return f"a {kind} one of {x.dtype} with {x.ndim} axes on {x.device}"


def _number(scale: Tensor) -> float:
    if scale.ndim or scale.requires_grad:
        raise TypeError(f"scale must be a number, or a tensor of no axis and without a gradient, got {_described(scale)}")
    return float(scale.item())


def _probability(dropout_p: Any) -> float:
    number = isinstance(dropout_p, (int, float, np.integer, np.floating))
    if not number or not 0 <= dropout_p <= 1:
        raise (ValueError if number else TypeError)(f"dropout_p must be a number in [0, 1], got {validate.short(dropout_p)}")
    return float(dropout_p)


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.ndim > 2 else 1


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> None:
    """That shapes fit, in torch's names and axes."""
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key has width {key.shape[-1]} on axis -1 but query has {query.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value has length {value.shape[-2]} on axis -2 but key has {key.shape[-2]}")
    of_query = _heads(query)
    most = of_query
    for name, heads in (("key", _heads(key)), ("value", _heads(value))):
        if grouped and (of_query % heads if heads else of_query):
            raise ValueError(f"{name} has {heads} heads on axis -3 but query has {of_query}, which must be a multiple of them")
        if not grouped and heads != most and 1 not in (heads, most):
            more = f": enable_gqa=True lets query's be a multiple of {name}'s" if heads and of_query % heads == 0 else ""
            raise ValueError(f"{name} has {heads} heads on axis -3 but {'query' if most == of_query else 'key'} has {most}{more}")
        if not grouped and most == 1:
            most = heads
    batch: tuple[int, ...] = ()
    for name, x in (("query", query), ("key", key), ("value", value)):
        joined = _broadcast(batch, x.shape[:-3])
        if joined is None:
            raise ValueError(f"{name} has axes {tuple(x.shape[:-3])} before its heads, which do not broadcast to those of the "
                             f"others, {batch}")
        batch = joined
    if mask is not None:
        wanted = (*batch, *(() if max(query.ndim, key.ndim, value.ndim) == 2 else (most,)), query.shape[-2], key.shape[-2])
        if _broadcast(tuple(mask.shape), wanted) != wanted:
            raise ValueError(f"attn_mask of shape {tuple(mask.shape)} does not broadcast to (..., H, L, S) = {wanted}")


def _broadcast(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of both, or None."""
    axes = max(len(one), len(other))
    pairs = list(zip(((1,) * axes + tuple(one))[-axes:], ((1,) * axes + tuple(other))[-axes:], strict=True)) if axes else []
    return None if any(m != n and 1 not in (m, n) for m, n in pairs) else tuple(n if m == 1 else m for m, n in pairs)


def _in_four_axes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool
) -> tuple[tuple[int, ...] | None, Tensor, Tensor, Tensor, Tensor | None]:
    """The result's axes before the last two, where they are not two; views (B, H, length, width); the mask with 4 axes."""
    of_q, of_k, of_v = query.shape, key.shape, value.shape
    if len(of_q) == len(of_k) == len(of_v) == 4 and of_q[0] == of_k[0] == of_v[0] and of_k[1] == of_v[1] and (
            grouped or of_q[1] == of_k[1]):
        if mask is not None and mask.ndim != 4:
            mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        return None, query, key, value, mask
    of_key, of_value = _heads(key), _heads(value)
    if grouped and of_key != of_value and of_key and of_value:
        key, value = (x.repeat_interleave(lcm(of_key, of_value) // _heads(x), -3) for x in (key, value))
    axes = max(len(of_q), len(of_k), len(of_v))
    tensors = [x.reshape((1,) * (axes - x.ndim) + tuple(x.shape)) for x in (query, key, value)]
    heads = [x.shape[-3:-2] for x in tensors]
    if not (grouped and axes > 2):
        heads = [torch.broadcast_shapes(*heads)] * 3
    before = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    leading = before + heads[0]
    if mask is not None:
        mask = mask.reshape((1,) * (max(axes, 4) - mask.ndim) + tuple(mask.shape))
        if axes > 4:
            mask = mask.expand(*before, *mask.shape[-3:]).reshape(before.numel(), *mask.shape[-3:])
    q, k, v = (x.expand(*before, *h, *x.shape[-2:]).reshape(before.numel(), h.numel(), *x.shape[-2:])
               for x, h in zip(tensors, heads, strict=True))
    return tuple(leading), q, k, v, mask


# ------------------------------------------------------------------------------------------------------ what is computed

def _array(x: Tensor) -> np.ndarray:
    try:
        return x.detach().view(torch.int16).numpy().view(_BFLOAT16) if x.dtype is torch.bfloat16 else x.numpy(force=True)
    except RuntimeError:
        if not (x.is_neg() or x._is_zerotensor()):
            raise
        # A sign, or zeros, that are in no memory yet.
        return _array(torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x))


def _bind() -> None:
    """Let the kernels read tensors where they lie. A PyTorch without that table has them all made arrays first, which takes a
    small call as long as the rest of it."""
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if table is not None:
        _core.bind_tensors(Tensor, table, lambda x: validate.bits(_array(x)), None if _BFLOAT16 is None else np.dtype(_BFLOAT16))


_bind()


def _tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype.kind == "V" else torch.from_numpy(x)


def _recorded() -> bool:
    """Whether something beside autograd watches the operators that run, and is to see this one."""
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def _problem(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
             rules: Rules, problem: Problem | None = None) -> Problem:
    if mask is not None or sinks is not None or seed is not None:
        of_mask = None
        if mask is not None:
            of_mask = _array(mask)
            if mask.dtype is torch.bool:        # of what is repeated by a stride of 0, one
                of_mask = ~(of_mask[tuple(slice(0, 1) if s == 0 else slice(None) for s in of_mask.strides)]
                            if 0 in of_mask.strides else of_mask)
        own: list[Any] = list(rules)        # _replace takes longer
        own[_MASK], own[_SINKS] = of_mask, None if sinks is None else _array(sinks)
        own[_SEED] = None if seed is None else int(seed)
        rules = Rules(*own)
    problem = problem or Problem.of_tensors(q, k, v, True)
    # without a look at the values of a mask: it is torch's, and means what torch says
    if problem is not None:
        return validate.under_rules(problem, rules, values=False)
    return validate.attention_problem(_array(q), _array(k), _array(v), "BHLD", rules, values=False)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, seed: Tensor | None, rules: Rules,
             need_lse: bool, problem: Problem | None = None) -> tuple[Tensor, Tensor | None]:
    problem = _problem(q, k, v, mask, sinks, seed, rules, problem)
    B, H, _, Lq, _, _, Dv = problem.shape
    # as torch's own lies: what projects it next takes rows of all heads
    out = np.empty((B, Lq, H, Dv), problem.element).transpose(0, 2, 1, 3)
    lse = np.empty((B, H, Lq), problem.dtype) if need_lse else None
    algorithms.forward(choose(problem, AUTO)[0], problem, out, lse, None, threads.resolve(None))
    return _tensor(out), None if lse is None else torch.from_numpy(lse)


def _backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
              sinks: Tensor | None, seed: Tensor | None, rules: Rules, need_mask_grad: bool) -> list[Tensor]:
    """Gradients of q, k, v, then of the mask, if that is wanted, then of the sinks, if there are any."""
    problem = _problem(q, k, v, mask, sinks, seed, rules)
    by_length = [_by_length(x) for x in (q, k, v)]      # so do the gradients lie, which torch then adds up and reshapes
    grads = algorithms.empty_together([_swapped(x.shape) if s else x.shape for x, s in zip((q, k, v), by_length, strict=True)],
                                      problem.element)
    of_q, of_k, of_v = (x.transpose(0, 2, 1, 3) if s else x for x, s in zip(grads, by_length, strict=True))
    of_mask = np.empty(mask.shape, _array(mask).dtype) if need_mask_grad and mask is not None else None
    name, _ = choose(problem, AUTO, backward=True)
    of_out, out_array = (validate.usable(validate.bits(_array(x)))[0] for x in (grad_out, out))
    workers = threads.resolve(None)
    of_sinks = algorithms.backward(name, problem, out_array, _array(lse.contiguous()), of_out, of_q, of_k, of_v, workers, of_mask)
    if of_sinks is not None and sinks is not None:
        of_sinks = validate.cast(of_sinks, _array(sinks).dtype)
    return [_tensor(x) for x in (of_q, of_k, of_v, of_mask, of_sinks) if x is not None]


def _by_length(x: Tensor) -> bool:
    """Whether the heads of a token lie side by side."""
    return not x.is_contiguous() and x.stride(1) < x.stride(2)


def _swapped(shape: Sequence[int]) -> tuple[int, int, int, int]:
    return shape[0], shape[2], shape[1], shape[3]


def _joined(n: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...], tensors: int) -> list[Any]:
    """Arguments of a call that torch.func.vmap maps n times, as those of one: the axis joins the batch, in the first `tensors` of
    them and in the mask, which is the next. Sinks, the seed and the rules follow."""
    B = next(x.shape[0] if d is None else x.movedim(d, 0).shape[1] for x, d in zip(args, in_dims, strict=False))
    joined = list(args)
    for i, (x, d) in enumerate(zip(args, in_dims, strict=True)):
        if i > tensors or x is None:
            continue
        each = x.expand(n, *x.shape) if d is None else x.movedim(d, 0)
        if i < tensors or each.shape[1] != 1 or d is not None:
            joined[i] = each.expand(n, B, *each.shape[2:]).reshape(n * B, *each.shape[2:])
    if args[tensors + 1] is not None:
        raise NotImplementedError("fastmha.torch maps no sinks by torch.func.vmap")
    rules = args[tensors + 3]
    if rules.key_ranges is not None:
        joined[tensors + 3] = rules._replace(key_ranges=tuple(np.tile(x, n) for x in rules.key_ranges))
    return joined


def _each(function: Any, n: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """What torch.func.vmap maps n times, one call after the other: a draw of dropout counts the rows of its batch."""
    calls = [function.apply(*(x.select(d, i) if isinstance(x, Tensor) and d is not None else x
                              for x, d in zip(args, in_dims, strict=True))) for i in range(n)]
    results = tuple(map(torch.stack, zip(*calls, strict=True)))
    return results, (0,) * len(results)


def _split(n: int, results: Any) -> tuple[Any, Any]:
    return tuple(x.reshape(n, -1, *x.shape[1:]) for x in results), (0,) * len(results)


class _Eager(torch.autograd.Function):
    """What `attend` returns where no program is looked at or transformed: either costs many times a small call."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
                rules: Rules) -> Any:
        out, lse = _forward(q, k, v, mask, sinks, seed, rules, True)
        ctx.save_for_backward(q, k, v, mask, sinks, seed, out, lse)
        ctx.rules = rules
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        q, k, v, mask, sinks, seed, out, lse = ctx.saved_tensors
        if torch._C._functorch.is_legacy_batchedtensor(grad_out):
            raise NotImplementedError("fastmha.torch computes one gradient at a time: torch.autograd.grad(is_grads_batched=True) "
                                      "and jacobian(vectorize=True) ask for several; torch.func.vmap and torch.func.jacrev do")
        run = _Gradient.apply if torch.is_grad_enabled() else _backward      # with create_graph=True
        grads = run(grad_out, q, k, v, out, lse, mask, sinks, seed, ctx.rules, ctx.needs_input_grad[3])
        return (*_of_operands(grads, sinks), None, None)


class _Attention(torch.autograd.Function):
    """(out, lse), for torch.func."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
                rules: Rules) -> Any:
        if _recorded():
            return torch.ops.fastmha.attention(q, k, v, mask, sinks, seed, *_flat(rules))
        return _forward(q, k, v, mask, sinks, seed, rules, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:6], *output)
        ctx.rules = inputs[6]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> Any:
        q, k, v, mask, sinks, seed, out, lse = ctx.saved_tensors
        grads = _Gradient.apply(grad_out, q, k, v, out, lse, mask, sinks, seed, ctx.rules, ctx.needs_input_grad[3])
        return (*_of_operands(grads, sinks), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        if args[6].dropout:
            return _each(_Attention, info.batch_size, in_dims, args)
        return _split(info.batch_size, _Attention.apply(*_joined(info.batch_size, in_dims, args, 3)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _no_tangents()


def _of_operands(grads: Sequence[Tensor], sinks: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, mask and sinks from those that `_backward` gives."""
    of_mask = grads[3] if len(grads) == 5 or (len(grads) == 4 and sinks is None) else None
    return *grads[:3], of_mask, None if sinks is None else grads[-1]


class _Gradient(torch.autograd.Function):
    """What `_backward` gives. A function of its own, for torch.func."""

    @staticmethod
    def forward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
                sinks: Tensor | None, seed: Tensor | None, rules: Rules, need_mask_grad: bool) -> Any:
        given = grad_out, q, k, v, out, lse, mask, sinks, seed
        if _recorded():
            return tuple(torch.ops.fastmha.attention_backward(*given, *_flat(rules), need_mask_grad))
        return tuple(_backward(*given, rules, need_mask_grad))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refused(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        n, mask, wanted = info.batch_size, args[6], args[-1]
        if args[9].dropout:
            return _each(_Gradient, n, in_dims, args)
        joined = _joined(n, in_dims, args, 6)
        once = wanted and joined[6].shape[0] == 1 and n != 1      # one mask for all: the gradient of each is wanted
        if once:
            joined[6] = mask.expand(joined[0].shape[0], *mask.shape[1:]).contiguous()
        results, dims = _split(n, _Gradient.apply(*joined))
        if wanted and (mask.shape[0] if in_dims[6] is None else mask.movedim(in_dims[6], 0).shape[1]) == 1:
            results = (*results[:3], results[3].sum(1, keepdim=True))
        return results, dims


def _no_tangents() -> None:
    raise NotImplementedError("fastmha.torch has no derivatives forward: an operand has a tangent, of torch.func.jvp or of "
                              "torch.autograd.forward_ad; there are gradients (torch.func.vjp, backward)")


def _refused(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("fastmha.torch computes gradients, and none of those: create_graph=True has no second derivative here")


# --------------------------------------------------------------- as operators, for what looks at a program before it runs

_SCHEMA = ("Tensor? mask, Tensor? sinks, Tensor? seed, bool is_causal, int? offset, int? left, int? right, float? scale, "
           "float? softcap, float dropout")


def _flat(rules: Rules) -> tuple[Any, ...]:
    if rules.key_ranges is not None:
        raise NotImplementedError("fastmha.torch compiles no key_ranges: let a mask remove these keys")
    left, right = rules.window or (None, None)
    return rules.is_causal, rules.offset, left, right, rules.scale, rules.softcap, rules.dropout


def _from_flat(is_causal: bool, offset: int | None, left: int | None, right: int | None, scale: float | None,
               softcap: float | None, dropout: float) -> Rules:
    window = None if left is None and right is None else (left, right)
    return Rules(is_causal=is_causal, offset=offset, window=window, scale=scale, softcap=softcap, dropout=dropout)


@torch.library.custom_op("fastmha::attention", mutates_args=(),
                         schema=f"(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor, Tensor)")
def _operator(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, seed: Tensor | None,
              *flat: Any) -> tuple[Tensor, Tensor]:
    out, lse = _forward(q, k, v, mask, sinks, seed, _from_flat(*flat), True)
    assert lse is not None
    return out, lse


@torch.library.custom_op(
    "fastmha::attention_backward", mutates_args=(),
    schema=f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SCHEMA}, bool need_mask_grad) -> Tensor[]")
def _backward_operator(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
                       sinks: Tensor | None, seed: Tensor | None, *flat: Any) -> list[Tensor]:
    return _backward(grad_out, q, k, v, out, lse, mask, sinks, seed, _from_flat(*flat[:-1]), flat[-1])


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*_swapped(q.shape)[:3], v.shape[3])).transpose(1, 2), q.new_empty(q.shape[:3], dtype=computed(q))


@_backward_operator.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, sinks: Tensor | None,
      *more: Any) -> list[Tensor]:
    grads = [x.new_empty(_swapped(x.shape)).transpose(1, 2) if _by_length(x) else x.new_empty(x.shape) for x in (q, k, v)]
    return grads + [x.new_empty(x.shape) for x in (mask if more[-1] else None, sinks) if x is not None]


def _remembered(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.flat = inputs[6:]


def _differentiated(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> Any:
    q, k, v, mask, sinks, seed, out, lse = ctx.saved_tensors
    need_mask_grad = ctx.needs_input_grad[3]
    grads = torch.ops.fastmha.attention_backward(grad_out, q, k, v, out, lse, mask, sinks, seed, *ctx.flat, need_mask_grad)
    return (*_of_operands(grads, sinks), None, *[None] * len(ctx.flat))


_operator.register_autograd(_differentiated, setup_context=_remembered)
_backward_operator.register_autograd(_refused)
