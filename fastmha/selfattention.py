"""SelfAttention: one head with free widths, on the same kernels as MultiHeadAttention."""
from __future__ import annotations

from typing import Any

import numpy as np

from fastmha import validate
from fastmha.module import AttentionModule
from fastmha.validate import KeyRanges, Rules

_NAMES = validate.MODULE_NAMES | dict.fromkeys(("num_heads", "num_kv_heads"), "fastmha.MultiHeadAttention has several heads") | {
    **dict.fromkeys(("head_dim", "dim_head"), "it is d_k here, d_v of the values"), "kdim": "it is d_k here",
    "vdim": "it is d_v here"}


class SelfAttention(AttentionModule):
    """One attention head with its projections, forward and backward.

    Parameters
    ----------
    d_model : int
        Width of the input.
    d_k, d_v : int
        Widths of queries and keys, and of values.
    d_out : int, optional
        Width of the output, default d_model.
    use_bias : bool
        Add b_Q, b_K, b_V, b_O (initially zero).
    dtype : float32, float64, float16 or bfloat16
    rng : int, numpy.random.Generator or None
    precision : {"highest", "high", "medium"}, optional
        As in `MultiHeadAttention`.

    Attributes
    ----------
    W_Q, W_K : (d_model, d_k) arrays
    W_V : (d_model, d_v) array
    W_O : (d_v, d_out) array
    b_Q, b_K : (d_k,), b_V : (d_v,), b_O : (d_out,) arrays, or None
    grad_W_Q, …, grad_b_O : arrays or None
        Written by `backward`.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> m = fastmha.SelfAttention(32, d_k=8, d_v=16, rng=0)
    >>> m.forward(np.ones((1, 5, 32)), is_causal=True).shape
    (1, 5, 32)
    """

    @validate.own_keywords(_NAMES)
    def __init__(self, d_model: int, d_k: int, d_v: int, d_out: int | None = None, *, use_bias: bool = True,
                 dtype: Any = np.float32, rng: Any = None, precision: str | None = None) -> None:
        sizes = {"d_model": d_model, "d_k": d_k, "d_v": d_v, "d_out": d_model if d_out is None else d_out}
        d_model, self.d_k, self.d_v, self.d_out = (validate.size(name, n) for name, n in sizes.items())
        super().__init__(d_model, 1, 1, self.d_k, self.d_v, self.d_out, validate.flag("use_bias", use_bias), dtype, "strided",
                         "auto", rng, precision=validate.precision_name(precision))

    @validate.own_keywords(validate.FORWARD_NAMES)
    def forward(self, X: np.ndarray, mask: np.ndarray | None = None, *, is_causal: bool = False,
                key_padding_lengths: np.ndarray | None = None, key_ranges: KeyRanges | None = None, need_weights: bool = False,
                training: bool = True) -> Any:
        """Attend.

        Parameters
        ----------
        X : (B, L, d_model) array of real numbers
            Kept by reference for backward.
        mask : array, optional
            (L, L), or 4 axes that broadcast to (B, 1, L, L): bool, True = may not attend, or of the module's dtype, added.
        is_causal, key_padding_lengths, key_ranges
            As in `fastmha.attention`.
        need_weights : bool
            Also return the attention weights.
        training : bool
            Keep what backward needs.

        Returns
        -------
        out : (B, L, d_out) array
        weights : (B, 1, L, L) array, with ``need_weights=True``
        """
        rules = Rules(mask, is_causal, None, key_padding_lengths, algorithm=self.algorithm, key_ranges=key_ranges,
                      precision=self.precision)
        return self._forward(X, rules, need_weights, training)

    def __repr__(self) -> str:
        return (f"SelfAttention(d_model={self.d_model}, d_k={self.d_k}, d_v={self.d_v}, d_out={self.d_out}, "
                f"use_bias={self.use_bias}, dtype={self.dtype}{self._said()})")
