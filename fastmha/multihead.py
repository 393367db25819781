"""MultiHeadAttention: H query heads, Hkv key/value heads, all of width D."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastmha import validate
from fastmha.algorithms import ALGORITHMS
from fastmha.cache import KVCache
from fastmha.module import AttentionModule, said
from fastmha.planning import Plan
from fastmha.validate import KeyRanges, Rules

LAYOUTS = ("strided", "contiguous", "auto")


class MultiHeadAttention(AttentionModule):
    """Multi-head attention with its projections, forward and backward.

    Parameters
    ----------
    d_model : int
        Width of input and output; a multiple of num_heads unless head_dim is given.
    num_heads : int
        H query heads.
    num_kv_heads : int, optional
        Hkv key/value heads, a divisor of num_heads; default num_heads. Fewer is grouped-query attention, 1 multi-query.
    head_dim : int, optional
        Width D of a head; default d_model / H.
    use_bias : bool, "qkv" or "out"
        Add b_Q, b_K, b_V, b_O (initially zero) to the projections; "qkv" the first three alone, "out" b_O alone.
    kdim, vdim : int, optional
        Widths of a context as keys and as values; default d_model. With another width every forward needs a context.
    dtype : float32, float64, float16 or bfloat16
        Of parameters, inputs (others of real numbers are cast) and outputs. In half precision the computation is in float32,
        with Q, K, V and the concatenated heads rounded between; weights that are returned and gradients are of float32.
        "bfloat16" needs the extra ``bfloat16``.
    layout : {"strided", "contiguous", "auto"}
        How projections write heads. "strided": side by side in rows, (B, L, heads · D). "contiguous": by head, (B, heads, L,
        D), by a product for each. Same results to rounding and the same memory; attention reads them where they lie. "auto"
        chooses by length and width: see `plan`.
    algorithm : {"auto", "blas", "tiled", "decode"}
        As in `fastmha.attention`; with "blas" the projections go through BLAS too.
    precision : {"highest", "high", "medium"}, optional
        Of products of float32, in the projections and in the attention, forward and backward; default `get_precision()` of
        each call.
    rng : int, numpy.random.Generator or None
        Weights are drawn from N(0, 2 / (fan_in + fan_out)) in the order W_Q, W_K, W_V, W_O [1]_.

    Attributes
    ----------
    W_Q : (d_model, H·D) array
    W_K, W_V : (kdim, Hkv·D) and (vdim, Hkv·D) arrays
    W_O : (H·D, d_model) array
        Weights are (in, out): a projection is ``X @ W_Q``. W_Q, W_K, W_V are column views of one fused matrix (with other kdim
        or vdim, W_K and W_V are of another, or held by themselves): writing into them and assigning to them (shape checked,
        copied in) both take effect.
    b_Q, b_K, b_V, b_O : arrays of the widths of the matrices, or None
    grad_W_Q, …, grad_b_O : arrays or None
        Written by `backward`.
    grad_context : array, pair of arrays or None
        Written by `backward` after a forward with a context; of its shape, for a pair (keys, values) a pair.
    grad_sinks, grad_mask : arrays or None
        Written by `backward` after a forward with sinks, and with ``need_bias_grad=True`` after one with a mask of floats.
    num_parameters : int
    intermediates : dict

    References
    ----------
    .. [1] Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> m = fastmha.MultiHeadAttention(64, 8, rng=0)
    >>> X = np.random.default_rng(1).standard_normal((2, 10, 64), dtype=np.float32)
    >>> Y = m.forward(X, is_causal=True)
    >>> grad_X = m.backward(2 * Y)          # of the loss (Y ** 2).sum()
    >>> grad_X.shape, m.grad_W_Q.shape
    ((2, 10, 64), (64, 64))

    The same output one token after the other, with the keys and values of past tokens kept in a cache:

    >>> cache = fastmha.KVCache(2, m.num_kv_heads, m.head_dim)
    >>> steps = [m.forward(X[:, i:i + 1], cache=cache, is_causal=True, training=False) for i in range(10)]
    >>> bool(np.allclose(np.concatenate(steps, axis=1), Y, atol=1e-5))
    True

    Heads of a width of their own over a context whose keys and values have two widths:

    >>> m = fastmha.MultiHeadAttention(64, 6, head_dim=16, kdim=24, vdim=40, use_bias="qkv", rng=0)
    >>> keys, values = np.ones((2, 7, 24)), np.ones((2, 7, 40))
    >>> m.forward(X, context=(keys, values)).shape, m.W_V.shape
    ((2, 10, 64), (40, 96))
    """

    @validate.own_keywords(validate.MODULE_NAMES)
    def __init__(self, d_model: int, num_heads: int, *, num_kv_heads: int | None = None, head_dim: int | None = None,
                 use_bias: bool | str = False, kdim: int | None = None, vdim: int | None = None, dtype: Any = np.float32,
                 layout: str = "auto", algorithm: str = "auto", rng: Any = None, precision: str | None = None) -> None:
        d_model = validate.size("d_model", d_model)
        num_heads = validate.integer("num_heads", num_heads, 1)
        if head_dim is None:
            if d_model % num_heads:
                raise ValueError("d_model must be a multiple of num_heads unless head_dim is given, "
                                 f"got d_model {d_model} and num_heads {num_heads}")
            head_dim = d_model // num_heads
        else:
            # all heads side by side are a width as d_model is one
            most = validate.LARGEST // 3 // validate.size("num_heads", num_heads)
            head_dim = validate.integer("head_dim", head_dim, 1, most, f" with num_heads {num_heads}")
        num_kv_heads = num_heads if num_kv_heads is None else validate.integer("num_kv_heads", num_kv_heads, 1)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, got {num_kv_heads}")
        kdim, vdim = (None if n is None else validate.size(name, n) for name, n in (("kdim", kdim), ("vdim", vdim)))
        validate.choice("layout", layout, LAYOUTS)
        validate.choice("algorithm", algorithm, ALGORITHMS)
        precision = validate.precision_name(precision)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        super().__init__(d_model, num_heads, num_kv_heads, head_dim, head_dim, d_model, _use_bias(use_bias), dtype, layout,
                         algorithm, rng, kdim, vdim, precision)

    @property
    def kdim(self) -> int:
        """Width of a context as keys."""
        return self._kdim

    @property
    def vdim(self) -> int:
        """Width of a context as values."""
        return self._vdim

    @validate.own_keywords(validate.FORWARD_NAMES)
    def forward(
        self, X: np.ndarray, mask: np.ndarray | None = None, *,
        context: np.ndarray | tuple[np.ndarray, np.ndarray] | KVCache | None = None, is_causal: bool = False,
        offset: int | np.ndarray | None = None, key_padding_lengths: np.ndarray | None = None,
        key_ranges: KeyRanges | None = None, window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
        sinks: np.ndarray | None = None, alibi: np.ndarray | None = None, dropout: float = 0.0, seed: int | None = None,
        cache: KVCache | None = None, need_weights: bool = False, training: bool = True, num_threads: int | None = None,
        transform_qk: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        X : (B, L, d_model) array of real numbers
            Cast to the module's dtype. Kept by reference for backward: do not write into it in between.
        mask : array, optional
            (L, Lk), or 4 axes that broadcast to (B, H, L, Lk): bool, True = may not attend, or of the module's dtype, added; in
            half precision also of float32. With a cache Lk counts all keys, cached and new (the longest row's); see the notes for
            a ring.
        context : (B, Lk, kdim) array, pair of arrays (B, Lk, kdim) and (B, Lk, vdim), or KVCache, optional
            Keys and values come from it instead of X (cross-attention); from the arrays of a tuple (keys, values) each from
            its own, which is the only way where kdim is not vdim. Those of a cache are taken as they are, each row's up
            to its length, and it does not change: see `project_context`.
        is_causal, offset, key_padding_lengths, key_ranges, window, softcap, sinks, alibi
            As in `fastmha.attention`, sinks and alibi of the module's dtype (half precision: of float32). With a cache, offset is
            the cached length of each row and cannot be given, and key_padding_lengths counts the valid new tokens of each row:
            only these are appended, and those behind attend nothing (their output is b_O, or 0). key_ranges counts all keys,
            those of the cache from 0 on as they lie there, then the new ones, and may lie beyond them: rows whose prompts were
            padded on the left take ``(starts, None)`` in every call. A cache that is a ring takes none.
        dropout, seed
            As in `fastmha.attention`, on the weights. Nothing is dropped with ``training=False``; not together with a cache.
        cache : KVCache, optional
            The new keys and values are appended to it, and the queries attend to all that it holds then. If anything is wrong
            it is as it was. Such a call keeps nothing for backward. A ring needs a window whose left side is at most its own,
            in every call.
        need_weights : bool
            Also return the attention weights, per head.
        training : bool
            Keep what backward needs. With False nothing of the module is changed, and threads may share it (not a cache).
        num_threads : int, optional
            Threads for this call.
        transform_qk : callable, optional
            Called as ``transform_qk(q, k, positions)`` after the projection, before keys are cached: q (B, H, L, D) and k
            (B, Hkv, L, D) are views that it may change, positions (B, L) int64 is the cached length of each row, without a
            cache `offset` or 0, plus 0 to L - 1. Returns q and k, of the same shapes and dtype. For `backward` it needs an
            attribute ``backward(grad_q, grad_k, positions) -> (grad_q, grad_k)``. Not together with context.

        Returns
        -------
        out : (B, L, d_model) array
        weights : (B, H, L, Lk) array, with ``need_weights=True``

        Raises
        ------
        ValueError, TypeError
            Naming the argument, what was expected and what came; nothing has been computed or changed then.

        Notes
        -----
        Over a ring that has wrapped, mask and weights have columns for the keys that it holds after the call, oldest first. X
        may be longer than its `max_chunk`: then they have columns for the up to `window` newest cached keys and for the new
        ones. A mask needs as many keys in each row.

        Examples
        --------
        Rotary positions, by complex factors exp(i · position · frequency):

        >>> import numpy as np, fastmha
        >>> frequencies = 100.0 ** -np.linspace(0, 1, 8)
        >>> def rotate(q, k, positions):
        ...     turn = np.exp(1j * positions[:, None, :, None] * frequencies).astype(np.complex64)
        ...     for x in (q, k):
        ...         turned = (x[..., :8] + 1j * x[..., 8:]) * turn
        ...         x[..., :8], x[..., 8:] = turned.real, turned.imag
        ...     return q, k
        >>> m = fastmha.MultiHeadAttention(64, 4, rng=0)
        >>> m.forward(np.ones((1, 5, 64)), is_causal=True, transform_qk=rotate).shape
        (1, 5, 64)
        """
        rules = Rules(mask, is_causal, offset, key_padding_lengths, window, None, softcap, self.algorithm, num_threads,
                      key_ranges, sinks, alibi, dropout, seed, self.precision)
        return self._forward(X, rules, need_weights, training, context, cache, transform_qk)

    def plan(self, batch_size: int, seq_len: int, *, seq_len_k: int | None = None, is_causal: bool = False,
             offset: int | np.ndarray | None = None, key_padding_lengths: np.ndarray | None = None,
             key_ranges: KeyRanges | None = None, window: tuple[int | None, int | None] | None = None,
             softcap: float | None = None, backward: bool = False, num_threads: int | None = None) -> Plan:
        """What the attention of a `forward` on (batch_size, seq_len, d_model) would do; print it for a receipt.

        Parameters
        ----------
        batch_size, seq_len : int
            B and L.
        seq_len_k : int, optional
            Lk of a context. Default: no context.
        backward : bool
            Plan the forward and the backward pass together.
        is_causal, offset, key_padding_lengths, key_ranges, window, softcap, num_threads
            As in `forward`.

        Returns
        -------
        Plan
            Its layout is the one that the projections write, or that of the keys and values where a context's differs from
            the queries'. Projections are not part of the plan.

        Examples
        --------
        >>> import fastmha
        >>> m = fastmha.MultiHeadAttention(768, 12, rng=0)
        >>> m.plan(1, 1024).layout, m.plan(32, 16).layout
        ('contiguous', 'strided')
        """
        rules = Rules(None, is_causal, offset, key_padding_lengths, window, None, softcap, self.algorithm, num_threads,
                      key_ranges, precision=self.precision)
        return self._make_plan(batch_size, seq_len, seq_len_k, rules, backward)

    def project_context(self, C: np.ndarray | tuple[np.ndarray, np.ndarray], *, num_threads: int | None = None) -> KVCache:
        """Project the keys and values of a context once, for many calls of ``forward(X, context=...)``.

        Parameters
        ----------
        C : (B, Lc, kdim) array of real numbers, or a pair of (B, Lc, kdim) and (B, Lc, vdim)
            As in `forward`, such as the output of an encoder.
        num_threads : int, optional
            Threads for this call.

        Returns
        -------
        KVCache
            Of length and capacity Lc, in the module's dtype. As a context it does not change; `backward` is an error after it.
        """
        return self._project_context(C, num_threads)

    def _own_widths(self) -> dict[str, int]:
        defaults = {"head_dim": self.d_model / self.num_heads, "kdim": self.d_model, "vdim": self.d_model}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    def __repr__(self) -> str:
        groups = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        widths = "".join(f", {name}={n}" for name, n in self._own_widths().items())
        return (f"MultiHeadAttention(d_model={self.d_model}, num_heads={self.num_heads}{groups}{widths}, "
                f"use_bias={said(self.use_bias)}, dtype={self.dtype}, "
                f'layout="{self.layout}", algorithm="{self.algorithm}"{self._said()})')


def _use_bias(value: Any) -> bool | str:
    if isinstance(value, str) and value in ("qkv", "out"):
        return str(value)
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f'use_bias must be True, False, "qkv" or "out", got {validate.short(value)}')


def mean_pool_kv_heads(module: MultiHeadAttention, num_kv_heads: int) -> MultiHeadAttention:
    """A module with fewer key/value heads, each the mean of the heads of a group [1]_.

    Parameters
    ----------
    module : MultiHeadAttention
        Not changed.
    num_kv_heads : int
        A divisor of module.num_kv_heads: ``module.num_kv_heads // num_kv_heads`` heads that follow each other are pooled.

    Returns
    -------
    MultiHeadAttention
        With the means of W_K and W_V (b_K and b_V) over each group and copies of the other parameters; not frozen.

    Raises
    ------
    ValueError, TypeError
        If module is none, or num_kv_heads does not divide its number.

    References
    ----------
    .. [1] Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints", 2023.

    Examples
    --------
    >>> import fastmha
    >>> fastmha.mean_pool_kv_heads(fastmha.MultiHeadAttention(64, 8, rng=0), 2).W_K.shape
    (64, 16)
    """
    if not isinstance(module, MultiHeadAttention):
        raise TypeError(f"module must be a MultiHeadAttention, got {type(module).__name__}")
    groups = validate.integer("num_kv_heads", num_kv_heads, 1)
    if module.num_kv_heads % groups:
        raise ValueError(f"num_kv_heads must divide the module's {module.num_kv_heads}, got {groups}")
    pooled = MultiHeadAttention(module.d_model, module.num_heads, num_kv_heads=groups, head_dim=module.head_dim,
                                use_bias=module.use_bias, kdim=module.kdim, vdim=module.vdim, dtype=module.dtype,
                                layout=module.layout, algorithm=module.algorithm, rng=0, precision=module.precision)
    state = module.state_dict()
    for name in state:
        if name[2] in "KV":
            by_head = state[name].reshape(*state[name].shape[:-1], groups, -1, module.head_dim)
            state[name] = by_head.mean(axis=-2, dtype=np.float64).reshape(*state[name].shape[:-1], -1)
    pooled.load_state_dict(state)
    return pooled
