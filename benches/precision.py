"""What half precision and lower precisions of float32 products give in time and cost in error, attention forward and backward,
beside PyTorch's on the same numbers (where it is installed). A Markdown table, of one thread. Errors are the largest against
float64, of what the operands hold, over the largest entry.

    python benches/precision.py [--seconds 0.5]
"""
from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import fastmha
from fastmha import reference

SHAPES = ((4, 8, 512, 64, False), (1, 8, 1024, 64, True), (1, 8, 1024, 128, False))       # B, H, L, D, causal
KINDS = (("float32", "highest"), ("float32", "high"), ("float32", "medium"), ("float16", None), ("bfloat16", None))


def best(call: Callable[[], Any], seconds: float) -> float:
    call()
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest


def errors(results: list[np.ndarray], exact: list[np.ndarray]) -> str:
    found = [np.abs(x.astype(np.float64) - y).max() / np.abs(y).max() for x, y in zip(results, exact, strict=True)]
    return f"{found[0]:.0e} {max(found[1:]):.0e}"


def in_torch(arrays: list[np.ndarray], causal: bool, precision: str | None,
             seconds: float) -> tuple[float, list[np.ndarray]] | None:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(precision or "highest")
    wide = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, x.dtype.name)) for x in arrays]
    q, k, v = (x.requires_grad_() for x in wide[:3])

    def step() -> list[torch.Tensor]:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return [out, *torch.autograd.grad(out, (q, k, v), wide[3])]

    return best(step, seconds), [x.detach().float().numpy() for x in step()]


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines())
    told = {name.strip(): text.strip() for name, text in lines.items()}
    return f"{told.get('model name', platform.processor())}, family {told.get('cpu family')} model {told.get('model')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    seconds = parser.parse_args().seconds
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        bfloat16 = None
    print(f"{cpu()}, one thread; forward and backward, ms; largest errors of out and of the gradients\n")
    print("| | operands | products | fastmha | errors | PyTorch | errors |\n|---|---|---|---|---|---|---|")
    for B, H, L, D, causal in SHAPES:
        rng = np.random.default_rng(0)
        drawn = [rng.standard_normal((B, H, L, D)) for _ in range(4)]
        for name, precision in KINDS:
            if name == "bfloat16" and bfloat16 is None:
                continue
            q, k, v, g = arrays = [x.astype(bfloat16 if name == "bfloat16" else name) for x in drawn]
            rules: dict[str, Any] = {"is_causal": causal, "num_threads": 1, "precision": precision}

            def step(q: Any = q, k: Any = k, v: Any = v, g: Any = g, rules: Any = rules) -> list[np.ndarray]:
                out, lse = fastmha.attention(q, k, v, return_lse=True, **rules)
                return [out, *fastmha.attention_backward(g, q, k, v, out, lse, **rules)]

            q64, k64, v64, g64 = (x.astype(np.float64) for x in arrays)
            out, lse = reference.attention(q64, k64, v64, is_causal=causal, return_lse=True)
            exact = [out, *reference.attention_backward(g64, q64, k64, v64, out, lse, is_causal=causal)]
            theirs = in_torch(arrays, causal, precision, seconds)
            other = "" if theirs is None else f"{1e3 * theirs[0]:.2f} | {errors(theirs[1], exact)}"
            products = fastmha.plan(q, k, v, **rules).products.split(" (")[0]
            print(f"| B{B} H{H} L{L} D{D}{' causal' if causal else ''} | {name}{f', {precision}' if precision else ''} "
                  f"| {products} | {1e3 * best(step, seconds):.2f} | {errors(step(), exact)} | {other} |", flush=True)


if __name__ == "__main__":
    main()
