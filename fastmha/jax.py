"""JAX's face of these kernels: `attention` under `jax.jit`, `jax.grad` and `jax.vmap`, on the CPU.

Needs the extra ``jax``: ``pip install "fastmha[jax]"``.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fastmha import functional, planning, threads, validate
from fastmha._core import Problem
from fastmha.validate import Rules

try:
    import jax
    import jax.numpy as jnp
except ImportError as _error:
    raise ImportError('fastmha.jax needs JAX: pip install "fastmha[jax]"') from _error

__all__ = ["attention"]


def attention(q: Any, k: Any, v: Any, *, layout: str = "BHLD", mask: Any = None, is_causal: bool = False, offset: Any = None,
              key_padding_lengths: Any = None, key_ranges: Any = None, window: tuple[int | None, int | None] | None = None,
              scale: float | None = None, softcap: float | None = None, sinks: Any = None, alibi: Any = None,
              dropout: float = 0.0, seed: Any = None, algorithm: str = "auto", num_threads: int | None = None,
              precision: str | None = None) -> Any:
    """`fastmha.attention` on arrays of JAX.

    Parameters
    ----------
    q, k, v : (B, H, Lq, D), (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv) arrays of float32, float64, float16 or bfloat16
        They enter without a copy.
    layout, mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout
        As in `fastmha.attention`. What is no array is fixed when a function is traced: scale and softcap are none.
    seed : int or array of no axis, with `dropout`
        As in `fastmha.attention`; under `jax.jit` such as ``jax.random.bits(key)``.
    algorithm, num_threads, precision
        As in `fastmha.attention`.

    Returns
    -------
    (B, H, Lq, Dv) array in the layout asked for

    Raises
    ------
    ValueError, TypeError
        When it is traced, as `fastmha.attention`; what is wrong with the values of an array is an error of JAX's when it runs.

    Notes
    -----
    `jax.grad` and `jax.vjp` give the gradients of q, k, v, sinks and a mask of floats; alibi counts as a constant. There are
    neither derivatives forward (`jax.jvp`) nor gradients of gradients. Under `jax.vmap` the calls run one after the other.

    On one CPU, JAX waits forever for the operands of a callback if other programs are in flight: it copies them in the one thread
    that the callback holds. In a process of one CPU say ``jax.config.update("jax_cpu_enable_async_dispatch", False)`` before the
    first array is made.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fastmha.jax
    >>> q = k = v = jnp.ones((2, 8, 16, 64))
    >>> jax.jit(jax.grad(lambda q: fastmha.jax.attention(q, k, v, is_causal=True).sum()))(q).shape
    (2, 8, 16, 64)
    """
    rules = Rules(None, is_causal, offset, key_padding_lengths, window, scale, softcap, algorithm, num_threads, key_ranges, None,
                  alibi, dropout, seed, precision)
    validate.scaling(scale, softcap, 1, np.dtype(np.float64))       # an array's gradient would be missed
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        raise TypeError(f"seed must be an integer, got a key of JAX ({seed.dtype}): jax.random.bits(key) makes one of it")
    arrays = (jax.Array, np.ndarray)
    fixed = jax.tree.map(lambda x: None if isinstance(x, arrays) else x, rules)
    traced = jax.tree.map(lambda x: x if isinstance(x, arrays) else None, rules)
    return _attention((fixed, layout), *(x if x is None else jnp.asarray(x) for x in (q, k, v, mask, sinks)), traced)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(fixed: Any, *arrays: Any) -> Any:
    return _forward(fixed, *arrays)[0]


def _call(function: Any, fixed: Any, arrays: Any, traced: Any, mask: Any, sinks: Any, **more: Any) -> Any:
    rules, layout = fixed
    traced = jax.tree.map(lambda x: x if np.ndim(x) else np.asarray(x).item(), traced)
    rules = jax.tree.map(lambda x, y: x if y is None else y, rules, traced, is_leaf=lambda x: x is None)
    return function(*arrays, layout=layout, **rules._replace(mask=mask, sinks=sinks)._asdict(), **more)


def _problem(q: Any, k: Any, v: Any, layout: Any, backward: bool, **rules: Any) -> Problem:
    problem = validate.attention_problem(q, k, v, layout, Rules(**rules), values=False)
    planning.choose(problem, rules["algorithm"], backward)
    threads.resolve(rules["num_threads"])
    return problem


def _checked(fixed: Any, q: Any, k: Any, v: Any, mask: Any, sinks: Any, traced: Any, backward: bool) -> Problem:
    # arrays of their shapes, in no memory, tell what is wrong with all but the values
    like = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), (q, k, v, mask, sinks, traced))
    return _call(_problem, fixed, like[:3], like[5], like[3], like[4], backward=backward)


def _forward(fixed: Any, q: Any, k: Any, v: Any, mask: Any, sinks: Any, traced: Any) -> Any:
    problem = _checked(fixed, q, k, v, mask, sinks, traced, False)
    B, H, _, Lq, _, _, Dv = problem.shape
    shapes = (B, H, Lq, Dv) if fixed[1] == "BHLD" else (B, Lq, H, Dv), (B, H, Lq)
    out, lse = jax.pure_callback(
        lambda *x: _call(functional.attention, fixed, x[:3], *x[3:], return_lse=True),
        tuple(map(jax.ShapeDtypeStruct, shapes, (problem.element, problem.dtype))), q, k, v, traced, mask, sinks,
        vmap_method="sequential")
    return out, (q, k, v, out, lse, traced, mask, sinks)


def _backward(fixed: Any, kept: Any, grad_out: Any) -> Any:
    q, k, v, _, _, traced, mask, sinks = kept
    _checked(fixed, q, k, v, mask, sinks, traced, True)
    need = mask is not None and jnp.issubdtype(mask.dtype, jnp.floating)
    wanted = [q, k, v, *([] if sinks is None else [sinks]), *([mask] if need else [])]
    grads = jax.pure_callback(
        lambda *x: _call(functional.attention_backward, fixed, x[:6], *x[6:], need_bias_grad=need),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in wanted), grad_out, *kept, vmap_method="sequential")
    return (*grads[:3], grads[-1] if need else None, None if sinks is None else grads[3], None)


_attention.defvjp(_forward, _backward)
