"""A hash of every result of many random problems, for changes that must not change a bit.

    python .ci/bits.py before.json          # on the one commit
    python .ci/bits.py after.json before.json       # on the other, same machine: exit status 1 if a hash differs

Functions with every algorithm that serves the problem, both dtypes, every instruction set that runs here, 1, 2 and 5 threads;
steps over caches; modules forward and backward. Problems are drawn from fixed seeds.
"""
import copy
import hashlib
import json
import sys
import warnings

import numpy as np

import fastmha
from fastmha import _core

PROBLEMS, CACHES, MODULES, THREADS = 500, 60, 40, (1, 2, 5)


def digest(*arrays):
    found = hashlib.sha256()
    for x in arrays:
        found.update(f"{x.dtype}{x.shape}".encode())
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()[:20]


def problem(seed):
    """Arrays (q, k, v, grad_out) and keywords."""
    rng = np.random.default_rng(seed)
    dtype = (np.float32, np.float64)[seed % 2]
    Hkv, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 1, 2, 4]))
    B, H = int(rng.choice([0, 1, 2, 3], p=[0.03, 0.4, 0.4, 0.17])), Hkv * group
    Lq = int(rng.choice([0, 1, 2, 7, 16, 33, 65, 130, 200], p=[0.02, 0.2, 0.1, 0.13, 0.15, 0.15, 0.1, 0.1, 0.05]))
    others = [0, 1, 5, 64, 193, 300, 700, 1100]
    Lk = Lq if rng.random() < 0.5 else int(rng.choice(others, p=[0.02, 0.1, 0.18, 0.2, 0.2, 0.15, 0.1, 0.05]))
    D, Dv = (int(rng.choice([1, 3, 8, 16, 24, 33, 64, 80])) for _ in range(2))
    layout = ("BHLD", "BLHD")[int(rng.integers(2))]
    size = float(rng.choice([1, 1, 1, 10, 1e3, 1e-30]))

    def normal(heads, length, width, size=1.0):
        shape = (B, heads, length, width) if layout == "BHLD" else (B, length, heads, width)
        return (size * rng.standard_normal(shape)).astype(dtype)

    arrays = [normal(H, Lq, D, size), normal(Hkv, Lk, D), normal(Hkv, Lk, Dv), normal(H, Lq, Dv)]
    if rng.random() < 0.1:
        arrays[int(rng.integers(4))].flat[::7] = rng.choice([np.nan, np.inf, 1e-42])
    rules = {"layout": layout}
    if rng.random() < 0.4:
        rules["is_causal"] = True
    if rng.random() < 0.25:
        rules["window"] = [(3, None), (None, 2), (70, 0), (0, 0)][int(rng.integers(4))]
    if "is_causal" in rules or "window" in rules:
        rules["offset"] = Lk - Lq if rng.random() < 0.7 else rng.integers(-3, 9, B)
    if rng.random() < 0.2:
        rules["key_padding_lengths"] = rng.integers(0, Lk + 1, B)
    if rng.random() < 0.3:
        gone = rng.random([(Lq, Lk), (B, 1, 1, Lk), (B, H, Lq, Lk)][int(rng.integers(3))]) < 0.3
        low = [-np.inf, -1e4, np.finfo(dtype).min][seed % 3]
        rules["mask"] = gone if rng.random() < 0.5 else np.where(gone, low, 0.5).astype(dtype)
    if rng.random() < 0.15:
        rules["softcap"] = 5.0
    if rng.random() < 0.15:
        rules["scale"] = 0.3
    return arrays, rules


def functions(found, isa):
    for seed in range(PROBLEMS):
        (q, k, v, grad_out), rules = problem(seed)
        for algorithm in ("auto", "blas", "tiled", "decode"):
            for threads in THREADS:
                key = f"{isa} function {seed} {algorithm} {threads}"
                how = {"algorithm": algorithm, "num_threads": threads, **rules}
                try:
                    out, lse = fastmha.attention(q, k, v, return_lse=True, **how)
                except ValueError:
                    found[key] = "refused"
                    continue
                found[key] = digest(out, lse)
                if algorithm != "decode":
                    found[key + " backward"] = digest(*fastmha.attention_backward(grad_out, q, k, v, out, lse, **how))


def caches(found, isa):
    for seed in range(CACHES):
        rng = np.random.default_rng([1, seed])
        dtype = (np.float32, np.float64)[seed % 2]
        module = fastmha.MultiHeadAttention(24, 4, num_kv_heads=int(rng.choice([1, 2, 4])), dtype=dtype, rng=seed)
        B = int(rng.integers(1, 4))
        ring = {"window": 20, "max_chunk": 8} if seed % 3 == 0 else {}
        stored = dtype if seed % 4 else np.float16
        cache = fastmha.KVCache(B, module.num_kv_heads, module.head_dim, dtype=stored, **ring)
        for step in range(12):
            L = int(rng.choice([1, 1, 1, 3, 8]))
            x = rng.standard_normal((B, L, 24)).astype(dtype)
            rules = {"window": (20, 0)} if ring else {"is_causal": True}
            if rng.random() < 0.3:
                rules["key_padding_lengths"] = rng.integers(0, L + 1, B)
            for threads in THREADS:
                own = copy.deepcopy(cache)
                out = module.forward(x, cache=own, training=False, num_threads=threads, **rules)
                held = [x[b, :, :n] for b, n in enumerate(own.lengths) for x in (own.k, own.v) if not ring]
                found[f"{isa} cache {seed} {step} {threads}"] = digest(out, own.lengths, *held)
            cache = own
            if rng.random() < 0.2:
                cache.reorder(rng.integers(0, B, B))
            if not ring and rng.random() < 0.2:
                cache.truncate(np.maximum(cache.lengths - 2, 0))


def modules(found, isa):
    for seed in range(MODULES):
        rng = np.random.default_rng([2, seed])
        dtype = (np.float32, np.float64)[seed % 2]
        layout, algorithm = ("strided", "contiguous", "auto")[seed % 3], ("auto", "blas", "tiled")[seed // 3 % 3]
        module = fastmha.MultiHeadAttention(32, 4, num_kv_heads=int(rng.choice([2, 4])), use_bias=bool(seed % 2), dtype=dtype,
                                            layout=layout, algorithm=algorithm, rng=seed)
        x = rng.standard_normal((int(rng.integers(1, 4)), int(rng.choice([1, 5, 40])), 32)).astype(dtype)
        rules = {"is_causal": True} if seed % 2 else {"mask": rng.random((x.shape[1],) * 2) < 0.2}
        for threads in THREADS:
            out = module.forward(x, num_threads=threads, **rules)
            grad_x = module.backward(out)
            found[f"{isa} module {seed} {threads}"] = digest(out, grad_x, *module.gradients().values())
            found[f"{isa} module {seed} {threads} weights"] = digest(*module.forward(x, need_weights=True, training=False,
                                                                                     num_threads=threads, **rules))


def main(to, before=None):
    found = {}
    warnings.simplefilter("ignore")
    for isa in _core.runnable_isas():
        _core.select_isa(isa)
        for part in (functions, caches, modules):
            part(found, isa)
    with open(to, "w") as file:
        json.dump(found, file, indent=0)
    print(f"{len(found)} results, {sum(x == 'refused' for x in found.values())} of them refusals")
    if before is None:
        return 0
    with open(before) as file:
        old = json.load(file)
    changed = [key for key in sorted(old.keys() | found.keys()) if old.get(key) != found.get(key)]
    print(f"{len(changed)} differ from {before}", *changed[:20], sep="\n")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
