"""MultiHeadAttention: H query heads, Hkv key/value heads, of width D = d_model / H."""
from __future__ import annotations

from typing import Any

import numpy as np

from fastmha import validate
from fastmha.module import AttentionModule
from fastmha.plan import ALGORITHMS

LAYOUTS = ("strided", "contiguous", "auto")


class MultiHeadAttention(AttentionModule):
    """Multi-head attention with its projections, forward and backward.

    Parameters
    ----------
    d_model : int
        Width of input and output; a multiple of num_heads.
    num_heads : int
        H query heads of width D = d_model / H.
    num_kv_heads : int, optional
        Hkv key/value heads, a divisor of num_heads; default num_heads. Fewer is grouped-query attention, 1 multi-query.
    use_bias : bool
        Add b_Q, b_K, b_V, b_O (initially zero) to the projections.
    dtype : float32 or float64
        Of parameters and computation; inputs of other real dtypes are cast.
    layout : {"strided", "contiguous", "auto"}
        "strided": attention reads the heads where the fused projection wrote them. "contiguous": heads are packed first,
        each contiguous. Same results to rounding. "auto" chooses; at present always "strided".
    algorithm : {"auto", "blas", "tiled", "decode"}
        As in `fastmha.attention`; with "blas" the projections go through BLAS too.
    rng : int, numpy.random.Generator or None
        Weights are drawn from N(0, 2 / (fan_in + fan_out)) in the order W_Q, W_K, W_V, W_O [1]_.

    Attributes
    ----------
    W_Q : (d_model, H·D) array
    W_K, W_V : (d_model, Hkv·D) arrays
    W_O : (H·D, d_model) array
        Weights are (in, out): a projection is ``X @ W_Q``. W_Q, W_K, W_V are column views of one fused matrix: writing
        into them and assigning to them (shape checked, copied in) both take effect.
    b_Q, b_K, b_V, b_O : arrays of the widths of the matrices, or None
    grad_W_Q, …, grad_b_O : arrays or None
        Written by `backward`.
    grad_context : (B, Lk, d_model) array or None
        Written by `backward` after a forward with a context.
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
    """

    def __init__(self, d_model: int, num_heads: int, *, num_kv_heads: int | None = None, use_bias: bool = False,
                 dtype: Any = np.float32, layout: str = "auto", algorithm: str = "auto", rng: Any = None) -> None:
        d_model = validate.size("d_model", d_model)
        num_heads = validate.integer("num_heads", num_heads, 1)
        if d_model % num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads, got d_model {d_model} and num_heads {num_heads}")
        num_kv_heads = num_heads if num_kv_heads is None else validate.integer("num_kv_heads", num_kv_heads, 1)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads {num_heads}, got {num_kv_heads}")
        validate.choice("layout", layout, LAYOUTS)
        validate.choice("algorithm", algorithm, ALGORITHMS)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, d_model // num_heads
        super().__init__(d_model, num_heads, num_kv_heads, self.head_dim, self.head_dim, d_model,
                         validate.flag("use_bias", use_bias), dtype, layout, algorithm, rng)

    def forward(
        self, X: np.ndarray, mask: np.ndarray | None = None, *, context: np.ndarray | None = None, is_causal: bool = False,
        offset: int | np.ndarray | None = None, key_padding_lengths: np.ndarray | None = None,
        window: tuple[int | None, int | None] | None = None, softcap: float | None = None, need_weights: bool = False,
        training: bool = True, num_threads: int | None = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        X : (B, L, d_model) array of real numbers
            Cast to the module's dtype. Kept by reference for backward: do not write into it in between.
        mask : array, optional
            (L, Lk), or 4 axes that broadcast to (B, H, L, Lk): bool, True = may not attend, or of the module's dtype, added.
        context : (B, Lk, d_model) array, optional
            Keys and values come from it instead of X (cross-attention).
        is_causal, offset, key_padding_lengths, window, softcap
            As in `fastmha.attention`.
        need_weights : bool
            Also return the attention weights, per head.
        training : bool
            Keep what backward needs. With False nothing is kept or changed, and threads may share the module.
        num_threads : int, optional
            Threads for this call.

        Returns
        -------
        out : (B, L, d_model) array
        weights : (B, H, L, Lk) array, with ``need_weights=True``

        Raises
        ------
        ValueError, TypeError
            Naming the argument, what was expected and what came; nothing has been computed or changed then.
        """
        return self._forward(X, context, mask, is_causal, offset, key_padding_lengths, window, softcap, need_weights, training,
                             num_threads)

    def __repr__(self) -> str:
        groups = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        return (f"MultiHeadAttention(d_model={self.d_model}, num_heads={self.num_heads}{groups}, use_bias={self.use_bias}, "
                f'dtype={self.dtype}, layout="{self.layout}", algorithm="{self.algorithm}"{", frozen" * self._frozen})')
