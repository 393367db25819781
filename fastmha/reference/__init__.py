"""The specification of fastmha in plain NumPy: what every kernel must return, and the oracle of the tests.

Axis letters: ``B`` batch, ``Lq`` ``Lk`` lengths, ``H`` query heads, ``Hkv`` key/value heads, ``D`` key width, ``Dv``
value width. One line of mathematics per step, everything materialised, in the dtype of the inputs, or for inputs of float16
and bfloat16 in float64, rounded to theirs at the end. Valid inputs are assumed: the checks and their messages belong to the
functions of the same names in `fastmha`.

Its files: heads.py, attention on heads and its gradients, also of packed sequences; layers.py, what stands around it, from rows
of softmax to multi-head attention with its projections; bounds.py, how far rounding may take results.

Definitions used throughout:

* A pair (i, j) is *removed* by a boolean mask, by -inf in an additive mask, by causality, window or padding.
* A score of -inf, wherever it comes from, has probability exactly 0. A row of only -inf (or of no keys at all) has
  probabilities 0, output 0 and a log-sum-exp (lse) of -inf.
* A removed pair adds nothing to any sum, even if its operands are NaN or Inf. Any other NaN or Inf propagates.
* A sink is the score of one more key, of value 0, that every query of its head attends: it joins the denominator and lse, and is
  no pair: a row without pairs is empty, with the lse of its sink. A sink of -inf is none.
* A *dropped* pair keeps its share of the denominator and lse; its probability counts 0, its operands are multiplied by that 0.

Sources: Vaswani et al. 2017, "Attention Is All You Need", section 3.2; grouped heads: Ainslie et al. 2023, "GQA";
backward from the lse and ``delta``: Dao et al. 2022, "FlashAttention", appendix B; sinks: OpenAI 2025, "gpt-oss model card",
section 2.2; ALiBi: Press et al. 2022, "Train Short, Test Long"; the draws of dropout: Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3".
"""

from fastmha.reference.bounds import (
    error_bounds,
    product_error_bounds,
)
from fastmha.reference.heads import (
    attention,
    attention_backward,
    attention_packed,
    attention_packed_backward,
    attention_weights,
    kept,
    philox,
    removed,
)
from fastmha.reference.layers import (
    combine_heads,
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
    mha_forward_backward,
    multi_head_attention,
    multi_head_attention_core,
    rms_norm,
    rms_norm_backward,
    scaled_dot_product_attention,
    silu,
    silu_backward,
    softmax,
    softmax_backward,
    split_heads,
)

__all__ = [
    "attention", "attention_backward", "attention_packed", "attention_packed_backward", "attention_weights",
    "combine_heads", "error_bounds", "gelu", "gelu_backward", "kept", "layer_norm", "layer_norm_backward", "linear",
    "linear_backward", "mha_forward_backward", "multi_head_attention", "multi_head_attention_core", "philox",
    "product_error_bounds", "removed", "rms_norm", "rms_norm_backward", "scaled_dot_product_attention", "silu",
    "silu_backward", "softmax", "softmax_backward", "split_heads",
]
