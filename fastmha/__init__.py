"""fastmha: fast multi-head attention on CPUs, on NumPy arrays, forward and backward.

The map. Python decides, Cython connects and calls BLAS, C computes rows and tiles::

    multihead.py  selfattention.py      the modules: thin faces of
            \\        /
            module.py                   fused parameters, forward, backward
             |    \\  at_once.py       where one call of the core is a whole forward, backward or step
             |    cache.py              KVCache: what a caller sees of the keys and values of past tokens
             |     |    \\
             |    cached.py \\           the attention of the newest queries over them; the step of a module
             |     |    \\    |
             |     |    slots.py        where they lie: buffers, lengths, ring arithmetic, mark and roll back
             |     |
             |     |    functional.py   attention, attention_backward, merge, plan, the textbook functions
             |     |     /    |   \\
             |    merging.py  |  capture.py     two sets of keys as one; weights of chosen heads and rows, by a second pass
             |     |          |    /
            planning.py   threads.py    which algorithm and why; how many threads, who limits BLAS
                |
           algorithms.py                a record of each algorithm: what it can do, blocks, packing, calls; products
                |
            precision.py                what precision of float32 products is permitted, and which of them matrix tiles take
                |
             tuning.py                  the settings of each instruction set: from which sizes on which way pays
                |
            validate.py                 the rules of a call, checks, the words of messages; arrays -> one Problem
                |
             _core.pyx                  pointers and strides, the loop over heads, the GIL released: one module, from glue/
             /      \\
       _blas.pxd    _kernels.pxd        the only door to BLAS; what Cython sees of csrc/
                        |
                    csrc/               kernels once per instruction set and dtype, the thread pool

    Every file may read those below it, none one above: what takes arguments checks them by validate.py.

    beside functional.py: packed.py, attention over sequences that lie end to end

    around attention: dense.py (linear, weights packed once) stands on algorithms.py, rowwise.py (activations, layer and RMS
    norms) on _core.pyx, both on threads.py and validate.py as functional.py does

    faces to other libraries, imported by nobody here: torch.py (torch's own function and its gradients, on algorithms.py,
    planning.py and validate.py), transformers.py on it, jax.py on functional.py; weights.py (files of weights) on module.py

    past one process, imported by nobody here: parallel/, by MPI, heads dealt to ranks on multihead.py, tokens on merging.py,
    cache.py and what functional.py stands on; its own map is in its `__init__`

    beside them: masks.py (mask builders), analysis.py (FLOPs, bytes), reference/ (the specification in plain NumPy),
    config.py (show_config), plot.py (pictures of weights and of memory), study/ (the memory-layout study and its command),
    tune.py (measures what tuning.py holds, as the study times)
"""
from __future__ import annotations

import os as _os

try:
    from fastmha import _core
except ImportError as _error:
    if "fastmha._core" not in str(_error) and "'_core'" not in str(_error):
        raise
    raise ImportError(
        f"fastmha is imported from {_os.path.dirname(__file__)}, which has no compiled core. In a clone, build it in place "
        "with `pip install -e .`, or install it with `pip install .` and run Python from another folder."
    ) from _error


def _choose_isa() -> None:
    """The best instruction set that runs here, or the one FASTMHA_ISA names."""
    runnable = _core.runnable_isas()
    forced = _os.environ.get("FASTMHA_ISA")
    if forced and forced not in runnable:
        from fastmha.validate import short

        raise ImportError(f"FASTMHA_ISA must be one of {', '.join(runnable)} on this machine, got {short(forced)}")
    _core.select_isa(forced or next(name for name in reversed(runnable) if name != "amx-emulated"))


_choose_isa()

from fastmha import analysis, reference  # noqa: E402
from fastmha.cache import KVCache  # noqa: E402
from fastmha.capture import Capture  # noqa: E402
from fastmha.config import show_config  # noqa: E402
from fastmha.dense import PackedWeights, linear, linear_backward, pack_weights  # noqa: E402
from fastmha.functional import (  # noqa: E402
    attention,
    attention_backward,
    combine_heads,
    merge,
    multi_head_attention,
    multi_head_attention_core,
    plan,
    scaled_dot_product_attention,
    softmax,
    softmax_backward,
    split_heads,
)
from fastmha.masks import (  # noqa: E402
    create_attention_mask,
    create_causal_mask,
    create_causal_mask_with_cache,
    create_padding_mask,
)
from fastmha.multihead import MultiHeadAttention, mean_pool_kv_heads  # noqa: E402
from fastmha.packed import attention_packed, attention_packed_backward  # noqa: E402
from fastmha.planning import Plan  # noqa: E402
from fastmha.precision import get_precision, set_precision  # noqa: E402
from fastmha.rowwise import (  # noqa: E402
    gelu,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    silu,
    silu_backward,
)
from fastmha.selfattention import SelfAttention  # noqa: E402
from fastmha.threads import get_num_threads, set_num_threads  # noqa: E402
from fastmha.validate import ConventionWarning  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "Capture", "ConventionWarning", "KVCache", "MultiHeadAttention", "PackedWeights", "Plan", "SelfAttention", "analysis",
    "attention", "attention_backward", "attention_packed", "attention_packed_backward", "combine_heads",
    "create_attention_mask", "create_causal_mask", "create_causal_mask_with_cache", "create_padding_mask", "gelu",
    "gelu_backward", "get_num_threads", "get_precision", "layer_norm", "layer_norm_backward", "linear", "linear_backward",
    "mean_pool_kv_heads", "merge", "multi_head_attention", "multi_head_attention_core", "pack_weights", "plan", "reference",
    "rms_norm", "rms_norm_backward", "scaled_dot_product_attention", "set_num_threads", "set_precision", "show_config",
    "silu", "silu_backward", "softmax", "softmax_backward", "split_heads",
]
