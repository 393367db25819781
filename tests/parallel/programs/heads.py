"""A module on several ranks is the module on one: forward, backward, gather, caches. Argument: a folder for files."""

import numpy as np
from common import COMM, DTYPES, Cases

import fastmha
from fastmha.parallel import gather, shard

cases = Cases()
rng = np.random.default_rng(7)
B, L, Lc = 2, 11, 7
D_MODEL = 48


def drawn(shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def pair(dtype, H=8, Hkv=8, **keywords):
    """A module, its biases not 0, and its shard."""
    whole = fastmha.MultiHeadAttention(D_MODEL, H, num_kv_heads=Hkv, dtype=dtype, rng=3, **keywords)
    for name, value in whole.parameters().items():
        if name[0] == "b":
            value[...] = drawn(value.shape, dtype)
    return whole, shard(whole, COMM)


def passes(whole, sharded, what, need_bias_grad=False, **rules):
    """Forward and backward of both, every result and gradient compared."""
    depth = 4 * (D_MODEL + L)       # two products of up to 48 terms and a sum over keys
    X, grad = drawn((B, L, D_MODEL), whole.dtype), drawn((B, L, D_MODEL), whole.dtype)
    out, weights = whole.forward(X, need_weights=True, **rules)
    whole.forward(X, **rules)
    own, own_weights = sharded.forward(X, need_weights=True, **rules)
    cases.close(own, out, depth, f"{what}: output with weights")
    cases.close(own_weights, weights[:, sharded.heads], depth, f"{what}: weights")
    own = sharded.forward(X, **rules)
    cases.close(own, out, depth, f"{what}: output")
    cases.true((COMM.bcast(own) == own).all(), f"{what}: other bits than on rank 0")
    whole_X = whole.backward(grad, need_bias_grad=need_bias_grad)
    own_X = sharded.backward(grad, need_bias_grad=need_bias_grad)
    cases.close(own_X, whole_X, depth, f"{what}: grad_X")
    restored = gather(sharded)
    for name, gradient in whole.gradients().items():
        # a bias of the keys moves all scores of a row alike: its gradient is 0 but for rounding
        size = float(np.abs(whole.grad_W_K).max()) if name == "b_K" else None
        cases.close(restored.gradients()[name], gradient, depth + B * L * 4, f"{what}: grad_{name}", size)
    for name in ("grad_context", "grad_sinks", "grad_mask"):
        expected, got = getattr(whole, name), getattr(sharded, name)
        assert (expected is None) == (got is None), f"{what}: {name}"
        for one, other in zip(expected, got) if isinstance(expected, tuple) else [(expected, got)]:
            if one is not None:
                cases.close(other, one, depth + B * L * 4, f"{what}: {name}")


mask = rng.random((B, 8, L, L)) < 0.3
for dtype in DTYPES:
    for H, Hkv in ((8, 8), (8, 2), (8, 4), (4, 1)):
        whole, sharded = pair(dtype, H, Hkv, use_bias=True)
        passes(whole, sharded, f"{H} heads over {Hkv}, {dtype.__name__}", is_causal=True)
        restored = gather(sharded)
        for name, value in whole.parameters().items():
            cases.true((restored.parameters()[name] == value).all(), f"{name} gathered")
    for algorithm in ("blas", "tiled"):
        for layout in ("strided", "contiguous"):
            whole, sharded = pair(dtype, Hkv=2, algorithm=algorithm, layout=layout)
            passes(whole, sharded, f"{algorithm} {layout}", window=(4, 1), offset=1)
    whole, sharded = pair(dtype, Hkv=2, use_bias="out")
    passes(whole, sharded, "bool mask by head", mask=mask, key_padding_lengths=np.array([L, 5]), softcap=5.0)
    passes(whole, sharded, "bool mask of all heads", mask=mask[:, :1])
    passes(whole, sharded, "float mask by head", need_bias_grad=True, mask=drawn((1, 8, L, L), dtype))
    passes(whole, sharded, "float mask of all heads", need_bias_grad=True, mask=drawn((B, 1, L, L), dtype))
    passes(whole, sharded, "float mask (L, L)", need_bias_grad=True, mask=drawn((L, L), dtype))
    passes(whole, sharded, "sinks and alibi", sinks=drawn(8, dtype), alibi=np.linspace(0.1, 1, 8).astype(dtype), is_causal=True)
    passes(whole, sharded, "all at once", need_bias_grad=True, sinks=drawn(8, dtype), mask=drawn((B, 8, L, L), dtype),
           key_ranges=([0, 2], [L, 9]), is_causal=True)
    passes(whole, sharded, "dropout", dropout=0.4, seed=11)
    whole, sharded = pair(dtype, Hkv=2, use_bias=True)
    for rows in (1, 5, 22, 100):
        passes(whole, shard(whole, COMM, overlap_rows=rows), f"sums of {rows} rows", is_causal=True)
    whole, sharded = pair(dtype, Hkv=4, use_bias=True, head_dim=5)
    passes(whole, sharded, "a context", context=drawn((B, Lc, D_MODEL), dtype))
    whole, sharded = pair(dtype, Hkv=2, use_bias="qkv", kdim=20, vdim=30)
    context = drawn((B, Lc, 20), dtype), drawn((B, Lc, 30), dtype)
    passes(whole, sharded, "keys and values of two widths", context=context)
    X = drawn((B, 3, D_MODEL), dtype)
    cases.close(sharded.forward(X, context=sharded.project_context(context), training=False),
                whole.forward(X, context=context), 200, "a context projected before")

# caches: each rank has those of its own key/value heads
for dtype in DTYPES:
    for Hkv, rows in ((8, None), (2, 3)):
        whole, _ = pair(dtype, Hkv=Hkv, use_bias=True)
        sharded = shard(whole, COMM, overlap_rows=rows)
        for ring in ({}, {"window": 4, "max_chunk": 3}):
            rules = {"window": (4, 0)} if ring else {"is_causal": True}
            caches = [fastmha.KVCache(B, m.num_kv_heads, m.head_dim, dtype=dtype, **ring) for m in (whole, sharded.own)]
            for step, n in enumerate((3, 1, 5, 1, 1, 2)):
                X = drawn((B, n, D_MODEL), dtype)
                lengths = {"key_padding_lengths": np.array([n, n - 1])} if n > 1 else {}
                out = whole.forward(X, cache=caches[0], **rules, **lengths)
                own = sharded.forward(X, cache=caches[1], **rules, **lengths)
                cases.close(own, out, 400, f"step {step} over a {'ring' if ring else 'cache'} of {Hkv} heads")
            cases.true((caches[0].lengths == caches[1].lengths).all(), "lengths of the cache")
        sharded.freeze()
        whole.freeze()
        X = drawn((B, L, D_MODEL), dtype)
        cases.close(sharded.forward(X, training=False), whole.forward(X, training=False), 400, "frozen")
        with cases.raises(ValueError, "backward needs a module that is not frozen"):
            sharded.backward(X)

cases.done()
