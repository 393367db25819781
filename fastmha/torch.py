"""PyTorch's attention on these kernels: `scaled_dot_product_attention` with torch's own signature and meaning, and `patch`.

Tensors on the CPU in float32 and float64 enter without a copy, whatever their strides, and gradients come back, the mask's too.
Needs the extra ``torch``: ``pip install "fastmha[torch]"``.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from warnings import warn

import numpy as np

from fastmha import algorithms, threads, validate
from fastmha._core import Problem
from fastmha.algorithms import AUTO
from fastmha.planning import choose
from fastmha.validate import Rules

try:
    import torch
except ImportError as _error:
    raise ImportError('fastmha.torch needs PyTorch: pip install "fastmha[torch]"') from _error

from torch import Tensor

__all__ = ["patch", "scaled_dot_product_attention"]

_TYPES = {torch.float32, torch.float64}
_torchs_own: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
_said: set[str] = set()


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, *, fallback: bool = False,
) -> Tensor:
    """What `torch.nn.functional.scaled_dot_product_attention` computes, by `fastmha.attention`.

    Parameters
    ----------
    query : (..., H, L, E) tensor of float32 or float64 on the CPU
        Any strides, 2 axes or more; nothing is copied where the last axis has stride 1.
    key : (..., H, S, E) tensor
        Axes before the last two broadcast to those of query, and the other way round.
    value : (..., H, S, Ev) tensor
    attn_mask : tensor, optional
        Broadcasts to (..., H, L, S). bool: **True = may attend**, as torch has it and the opposite of `fastmha.attention`.
        Float of query's dtype: added to the scores; its gradient is computed where it requires one, in its own shape.
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
    (..., H, L, Ev) tensor
        A query that may attend no key gets zeros.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came, before anything is computed.

    Notes
    -----
    Gradients are computed once: those of gradients are refused. Under `torch.compile` and `torch.func` the call is one operator.
    """
    reason = _not_served(query, key, value, attn_mask)
    if reason:
        if not fallback:
            raise TypeError(f"{reason}; with fallback=True PyTorch computes it")
        if not torch.compiler.is_compiling() and reason not in _said:
            _said.add(reason)
            warn(f"fastmha.torch leaves a call to PyTorch: {reason}", stacklevel=2)
        return _torchs_own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal and attn_mask are given: PyTorch takes one of them; let the mask remove what lies ahead")
    if not enable_gqa and query.ndim > 2 and query.shape[-3] != key.shape[-3] and 1 not in (query.shape[-3], key.shape[-3]):
        raise ValueError(f"key has {key.shape[-3]} heads on axis -3 but query has {query.shape[-3]}: enable_gqa=True lets "
                         "query's be a multiple of key's")
    leading, tensors, mask = _in_four_axes(query, key, value, attn_mask, enable_gqa)
    seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64) if dropout_p else None
    needs_grad = torch.is_grad_enabled() and (any(x.requires_grad for x in tensors) or (mask is not None and mask.requires_grad))
    if torch.compiler.is_compiling() or type(query) not in (Tensor, torch.nn.Parameter):    # also a tensor that is a shape alone
        out = torch.ops.fastmha.attention(*tensors, mask, is_causal, scale, float(dropout_p), seed)[0]
    elif needs_grad or torch._C._functorch.peek_interpreter_stack() is not None:    # inside a transform of torch.func
        out = _Attention.apply(*tensors, mask, is_causal, scale, float(dropout_p), seed)[0]
    else:
        out = _forward(*tensors, mask, is_causal, scale, float(dropout_p), seed, False)[0]
    return out if leading is None else out.reshape(leading + out.shape[-2:])


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

def _not_served(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str | None:
    """Why PyTorch must compute it, if it must."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
        if x.dtype not in _TYPES or x.device.type != "cpu" or x.layout is not torch.strided or x.is_nested or x.ndim < 2:
            return f"{name} must be a dense tensor of float32 or float64 on the CPU with 2 axes or more, got {_described(x)}"
        if x.dtype is not query.dtype:
            raise TypeError(f"{name} has dtype {x.dtype} but query has {query.dtype}")
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"attn_mask must be a torch tensor, got {type(mask).__name__}")
        if mask.dtype not in (torch.bool, query.dtype) or mask.device.type != "cpu" or mask.layout is not torch.strided:
            return f"attn_mask must be a dense tensor of bool or {query.dtype} on the CPU, got {_described(mask)}"
    return None


def _described(x: Tensor) -> str:
    return f"{'a nested tensor' if x.is_nested else x.layout} of {x.dtype} with {x.ndim} axes on {x.device}"


def _in_four_axes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool
) -> tuple[tuple[int, ...] | None, tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Views (B, H, length, width), the mask with 4 axes; and the result's axes before the last two, where they are not two."""
    tensors: tuple[Tensor, ...] = query, key, value
    if query.ndim == key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0] and (
            grouped or query.shape[1] == key.shape[1] == value.shape[1]):
        if mask is not None and mask.ndim != 4:
            mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        return None, (query, key, value), mask
    axes = max(x.ndim for x in tensors)
    tensors = tuple(x.reshape((1,) * (axes - x.ndim) + tuple(x.shape)) for x in tensors)
    heads = [x.shape[-3:-2] for x in tensors]
    if not (grouped and axes > 2):
        heads = [torch.broadcast_shapes(*heads)] * 3
    before = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    leading = before + heads[0]
    if mask is not None:
        mask = mask.reshape((1,) * (max(axes, 4) - mask.ndim) + tuple(mask.shape))
        if axes > 4:
            mask = mask.expand(*before, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    q, k, v = (x.expand(*before, *h, *x.shape[-2:]).reshape(before.numel(), h.numel(), *x.shape[-2:])
               for x, h in zip(tensors, heads, strict=True))
    return tuple(leading), (q, k, v), mask


# ------------------------------------------------------------------------------------------------------ what is computed

def _problem(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, dropout: float,
             seed: Tensor | None) -> Problem:
    of_mask = None
    if mask is not None:
        of_mask = mask.detach().numpy()
        if mask.dtype is torch.bool:        # of what is repeated by a stride of 0, one
            of_mask = ~of_mask[tuple(slice(0, 1) if s == 0 else slice(None) for s in of_mask.strides)]
    rules = Rules(mask=of_mask, is_causal=is_causal, offset=0 if is_causal else None, scale=scale, dropout=dropout,
                  seed=None if seed is None else int(seed))
    # without a look at the values of a mask: it is torch's, and means what torch says
    return validate.attention_problem(q.detach().numpy(), k.detach().numpy(), v.detach().numpy(), "BHLD", rules, values=False)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, dropout: float,
             seed: Tensor | None, need_lse: bool) -> tuple[Tensor, Tensor | None]:
    problem = _problem(q, k, v, mask, is_causal, scale, dropout, seed)
    B, H, _, Lq, _, _, Dv = problem.shape
    out = np.empty((B, H, Lq, Dv), problem.dtype)
    lse = np.empty((B, H, Lq), problem.dtype) if need_lse else None
    algorithms.forward(choose(problem, AUTO)[0], problem, out, lse, None, threads.resolve(None))
    return torch.from_numpy(out), None if lse is None else torch.from_numpy(lse)


def _backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, is_causal: bool,
              scale: float | None, dropout: float, seed: Tensor | None, need_mask_grad: bool) -> list[Tensor]:
    problem = _problem(q, k, v, mask, is_causal, scale, dropout, seed)
    B, H, Hkv, Lq, Lk, D, Dv = problem.shape
    grads = algorithms.empty_together([(B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv)], problem.dtype)
    grad_mask = np.empty(mask.shape, problem.dtype) if need_mask_grad and mask is not None else None
    of_out = validate.usable(grad_out.detach().numpy())[0]
    algorithms.backward(choose(problem, AUTO, backward=True)[0], problem, out.detach().numpy(), lse.detach().numpy(), of_out,
                        grads[0], grads[1], grads[2], threads.resolve(None), grad_mask)
    return [torch.from_numpy(x) for x in (*grads, *([] if grad_mask is None else [grad_mask]))]


def _joined(n: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...], tensors: int) -> list[Any]:
    """Arguments of a call that torch.func.vmap maps n times, as those of one: the axis joins the batch, in the first `tensors` of
    them and in the mask, which is the next."""
    B = next(x.shape[0] if d is None else x.movedim(d, 0).shape[1] for x, d in zip(args, in_dims, strict=False))
    joined = list(args)
    for i, (x, d) in enumerate(zip(args, in_dims, strict=True)):
        if i > tensors or x is None:
            continue
        each = x.expand(n, *x.shape) if d is None else x.movedim(d, 0)
        if i < tensors or each.shape[1] != 1 or d is not None:
            joined[i] = each.expand(n, B, *each.shape[2:]).reshape(n * B, *each.shape[2:])
    return joined


def _split(n: int, results: Any) -> tuple[Any, Any]:
    return tuple(x.reshape(n, -1, *x.shape[1:]) for x in results), (0,) * len(results)


class _Attention(torch.autograd.Function):
    """(out, lse), in eager mode, where an operator of torch.library would cost more than a small call."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, mask, *rules, seed = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, mask, *output, seed)
        ctx.rules = rules

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> Any:
        q, k, v, mask, out, lse, seed = ctx.saved_tensors
        grads = _Gradient.apply(grad_out, q, k, v, out, lse, mask, *ctx.rules, seed, ctx.needs_input_grad[3])
        return (*grads, *[None] * (8 - len(grads)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return _split(info.batch_size, _Attention.apply(*_joined(info.batch_size, in_dims, args, 3)))


class _Gradient(torch.autograd.Function):
    """Of q, k, v and, if it is wanted, the mask. A function of its own, for torch.func."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(_backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refused(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        n, mask, wanted = info.batch_size, args[6], args[-1]
        joined = _joined(n, in_dims, args, 6)
        once = wanted and joined[6].shape[0] == 1 and n != 1      # one mask for all: the gradient of each is wanted
        if once:
            joined[6] = mask.expand(joined[0].shape[0], *mask.shape[1:]).contiguous()
        results, dims = _split(n, _Gradient.apply(*joined))
        if wanted and (mask.shape[0] if in_dims[6] is None else mask.movedim(in_dims[6], 0).shape[1]) == 1:
            results = (*results[:3], results[3].sum(1, keepdim=True))
        return results, dims


def _refused(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("fastmha.torch computes gradients, and none of those: create_graph=True has no second derivative here")


# --------------------------------------------------------------- as operators, for what looks at a program before it runs

_RULES = "Tensor? mask, bool is_causal, float? scale, float dropout, Tensor? seed"


@torch.library.custom_op("fastmha::attention", mutates_args=(),
                         schema=f"(Tensor q, Tensor k, Tensor v, {_RULES}) -> (Tensor, Tensor)")
def _operator(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, dropout: float,
              seed: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = _forward(q, k, v, mask, is_causal, scale, dropout, seed, True)
    assert lse is not None
    return out, lse


@torch.library.custom_op(
    "fastmha::attention_backward", mutates_args=(),
    schema=f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_RULES}, bool need_mask_grad) -> Tensor[]")
def _backward_operator(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
                       is_causal: bool, scale: float | None, dropout: float, seed: Tensor | None,
                       need_mask_grad: bool) -> list[Tensor]:
    return _backward(grad_out, q, k, v, out.contiguous(), lse.contiguous(), mask, is_causal, scale, dropout, seed, need_mask_grad)


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rules: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3])


@_backward_operator.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
      *rules: Any) -> list[Tensor]:
    like = [q, k, v, *([mask] if rules[-1] and mask is not None else [])]
    return [x.new_empty(x.shape) for x in like]


def _differentiated(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> Any:
    q, k, v, mask, out, lse, seed = ctx.saved_tensors
    grads = torch.ops.fastmha.attention_backward(grad_out, q, k, v, out, lse, mask, *ctx.rules, seed, ctx.needs_input_grad[3])
    return (*grads, *[None] * (8 - len(grads)))


_operator.register_autograd(_differentiated, setup_context=_Attention.setup_context)
_backward_operator.register_autograd(_refused)

