"""The calls that most models are made of, beside the same by PyTorch, ONNX Runtime and plain NumPy.

    python benches/peers.py [--only SECTION] [--threads N] [--seconds S] [--json FILE]

    attention   short sequences and long ones, causal and full, forward and with gradients, float32 and float64
    decode      one query on a long cache, and one of each of many short ones, grouped heads, from memory
    layers      a layer of multi-head attention with its projections, forward and with all gradients

Each library runs in a process of its own, which may use N cores and N threads; they take turns, with a rest before each, the
best time counts. Before that, their answers are compared. A library that has several ways to say a call is timed by the one that
is fastest here. Calls of "decode" go through CACHED bytes of keys and values, as those of a model's layers do. PyTorch and ONNX
Runtime (packages ``torch``, ``onnx`` and ``onnxruntime``) are not needed: without them their columns are missing.

Exit status 1 if an answer is wrong.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from findings import Finding, Section, Table
from models import Call, command, measured, torch_of
from processes import has

import fastmha

CACHED = 120_000_000
SHORT = {"B": 32, "H": 8, "Hkv": 8, "Lq": 16, "Lk": 16, "D": 64, "causal": False, "gradients": False, "dtype": "float32"}
LONG = SHORT | {"B": 1, "H": 12, "Hkv": 12, "Lq": 1024, "Lk": 1024}
ATTENTION = {
    "32 x 8 heads of 16 tokens": SHORT,
    "12 heads of 1024 tokens, causal": LONG | {"causal": True},
    "the same, forward + backward": LONG | {"causal": True, "gradients": True},
    "full, forward + backward, float64": LONG | {"gradients": True, "dtype": "float64"},
}
STEP = SHORT | {"H": 32, "Hkv": 8, "Lq": 1, "D": 128}
DECODE = {
    "one query on 8192 keys, 32 heads on 8": STEP | {"B": 1, "Lk": 8192},
    "one query on 256 keys, 64 sequences, 32 heads on 8": STEP | {"B": 64, "Lk": 256},
}
LAYER = {"B": 8, "L": 128, "d_model": 768, "H": 12, "gradients": False}
LAYERS = {"B 8, L 128, d_model 768": LAYER, "the same, forward + backward": LAYER | {"gradients": True}}


def normal(shape: Sequence[int], seed: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(of: dict[str, Any]) -> tuple[list[tuple[np.ndarray, ...]], np.ndarray]:
    """(q, k, v) of each call in turn, and grad_out."""
    queries, keys = (of["B"], of["H"], of["Lq"], of["D"]), (of["B"], of["Hkv"], of["Lk"], of["D"])
    many = max(1, CACHED // (8 * int(np.prod(keys)))) if of["Lq"] == 1 else 1
    made = [tuple(normal(shape, 3 * n + i, of["dtype"]) for i, shape in enumerate((queries, keys, keys))) for n in range(many)]
    return made, normal(queries, 3, of["dtype"])


def fastest(calls: Sequence[Call]) -> Call:
    """Of ways to say one call. All make as many calls, so that what comes next is with the same operands."""
    def taken(call: Call) -> float:
        best = np.inf
        for _ in range(3):
            began = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - began)
        return float(best)
    return min(calls, key=taken)


def in_turn(function: Any, arguments: Sequence[Any]) -> Call:
    """Calls with each in turn; the first one of all is with the first."""
    turns = cycle(arguments)
    return lambda: function(*next(turns))


# ------------------------------------------------------------------------------------------------------------ attention

def of_fastmha(of: dict[str, Any], threads: int) -> list[Call]:
    arrays, g = operands(of)
    rules = {"is_causal": of["causal"], "num_threads": threads}

    def both(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
        out, lse = fastmha.attention(q, k, v, return_lse=True, **rules)
        return out, *fastmha.attention_backward(g, q, k, v, out, lse, **rules)

    return [in_turn(both if of["gradients"] else lambda q, k, v: (fastmha.attention(q, k, v, **rules),), arrays)]


def of_torch(of: dict[str, Any], threads: int) -> list[Call]:
    torch = torch_of(threads)
    arrays, g = operands(of)
    tensors = [tuple(torch.from_numpy(x) for x in each) for each in arrays]
    own, grad = torch.nn.functional.scaled_dot_product_attention, torch.from_numpy(g)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with torch.inference_mode():
            return (own(q, k, v, is_causal=of["causal"], enable_gqa=of["H"] != of["Hkv"]).numpy(),)

    def folded(q: Any, k: Any, v: Any) -> Any:
        with torch.inference_mode():
            rows = q.reshape(of["B"], of["Hkv"], -1, of["D"])       # one query: the heads of a group are rows
            return (own(rows, k, v).reshape(q.shape).numpy(),)

    def both(*leaves: Any) -> Any:
        out = own(*leaves, is_causal=of["causal"])
        return [x.detach().numpy() for x in (out, *torch.autograd.grad(out, leaves, grad))]

    if of["gradients"]:
        return [in_turn(both, [tuple(x.requires_grad_() for x in each) for each in tensors])]
    ways = [forward] + [folded] * (of["H"] != of["Hkv"] and of["Lq"] == 1)
    return [in_turn(way, tensors) for way in ways]


def session(operator: str, domain: str, version: int, names: Sequence[str], attributes: dict[str, Any], threads: int,
            weights: dict[str, np.ndarray] | None = None, tail: Sequence[Any] = ()) -> Any:
    """Of a graph of one operator, and what stands behind it, from the inputs named to "out"."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    weights = weights or {}
    first = helper.make_node(operator, list(names), ["mid" if tail else "out"], domain=domain, **attributes)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in weights]
    graph = helper.make_graph([first, *tail], "g", inputs, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
                              [numpy_helper.from_array(x, name) for name, x in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version), helper.make_opsetid("com.microsoft", 1)],
                              ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def of_onnxruntime(of: dict[str, Any], threads: int) -> list[Call]:
    arrays, _ = operands(of)
    names = ("q", "k", "v")
    standard = session("Attention", "", 23, names, {"is_causal": int(of["causal"])}, threads)
    calls = [in_turn(lambda *x: standard.run(None, dict(zip(names, x, strict=True))), arrays)]
    if of["H"] == of["Hkv"]:        # its older operator, on (B, L, H * D)
        attributes = {"num_heads": of["H"], "unidirectional": int(of["causal"])}
        older = session("MultiHeadAttention", "com.microsoft", 21, names, attributes, threads)
        shape = (of["B"], of["Lq"], of["H"], of["D"])

        def merged(x: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(of["B"], x.shape[2], -1)

        def run(*x: np.ndarray) -> Any:
            return (older.run(None, dict(zip(names, x, strict=True)))[0].reshape(shape).transpose(0, 2, 1, 3),)

        calls.append(in_turn(run, [tuple(merged(x) for x in each) for each in arrays]))
    return calls


def softmax(scores: np.ndarray) -> np.ndarray:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def of_numpy(of: dict[str, Any], threads: int) -> list[Call]:       # the threads of its BLAS are the process's cores
    arrays, _ = operands(of)
    scale, removed = of["D"] ** -0.5, np.triu(np.ones((of["Lq"], of["Lk"]), bool), 1)

    def call(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
        scores = (q.reshape(of["B"], of["Hkv"], -1, of["D"]) * q.dtype.type(scale)) @ k.swapaxes(-1, -2)
        if of["causal"]:
            scores[..., removed] = -np.inf
        return ((softmax(scores) @ v).reshape(q.shape),)
    return [in_turn(call, arrays)]


# --------------------------------------------------------------------------------------------------------------- layers

def weights_of(of: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, W of Q, K and V side by side, W of the output, grad_out."""
    width, tokens = of["d_model"], (of["B"], of["L"], of["d_model"])
    W_in, W_out = normal((width, 3 * width), 1), normal((width, width), 2)
    return normal(tokens, 0), W_in * np.float32(width**-0.5), W_out * np.float32(width**-0.5), normal(tokens, 3)


def layer_of_fastmha(of: dict[str, Any], threads: int) -> list[Call]:
    fastmha.set_num_threads(threads)
    x, W_in, W_out, g = weights_of(of)
    width = of["d_model"]
    calls: list[Call] = []
    for frozen in (False,) if of["gradients"] else (False, True):
        m = fastmha.MultiHeadAttention(width, of["H"])
        for n, name in enumerate(("W_Q", "W_K", "W_V")):
            setattr(m, name, W_in[:, n * width : (n + 1) * width])
        m.W_O = W_out
        if frozen:
            m.freeze()

        def call(m: Any = m) -> Any:
            if not of["gradients"]:
                return (m.forward(x, training=False),)
            out = m.forward(x)
            return out, m.backward(g), np.concatenate([m.grad_W_Q, m.grad_W_K, m.grad_W_V], axis=1), m.grad_W_O
        calls.append(call)
    return calls


def layer_of_torch(of: dict[str, Any], threads: int) -> list[Call]:
    torch = torch_of(threads)
    x, W_in, W_out, g = (torch.from_numpy(np.ascontiguousarray(y)) for y in weights_of(of))
    leaves, sizes = (x, W_in, W_out), (of["B"], of["L"], 3, of["H"], of["d_model"] // of["H"])

    def layer() -> Any:
        q, k, v = (x @ W_in).view(sizes).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).reshape(x.shape) @ W_out

    def forward() -> Any:
        with torch.inference_mode():
            return (layer().numpy(),)

    def both() -> Any:
        out = layer()
        return [y.detach().numpy() for y in (out, *torch.autograd.grad(out, leaves, g))]

    if of["gradients"]:
        for y in leaves:
            y.requires_grad_()
    return [both if of["gradients"] else forward]


def layer_of_onnxruntime(of: dict[str, Any], threads: int) -> list[Call]:
    from onnx import helper

    x, W_in, W_out, _ = weights_of(of)
    weights = {"W_in": W_in, "b_in": np.zeros(W_in.shape[1], np.float32), "W_out": W_out}
    run = session("Attention", "com.microsoft", 21, ("x", "W_in", "b_in"), {"num_heads": of["H"]}, threads, weights,
                  [helper.make_node("MatMul", ["mid", "W_out"], ["out"])])
    return [lambda: run.run(None, {"x": x})]


def layer_of_numpy(of: dict[str, Any], threads: int) -> list[Call]:
    x, W_in, W_out, _ = weights_of(of)
    width = of["d_model"] // of["H"]

    def call() -> Any:
        q, k, v = (x @ W_in).reshape(of["B"], of["L"], 3, of["H"], width).transpose(2, 0, 3, 1, 4)
        out = softmax((q * np.float32(width**-0.5)) @ k.swapaxes(-1, -2)) @ v
        return (out.swapaxes(1, 2).reshape(x.shape) @ W_out,)
    return [call]


# -------------------------------------------------------------------------------------------------------------- sections

ATTENTION_OF = {"fastmha": of_fastmha, "torch": of_torch, "onnxruntime": of_onnxruntime, "numpy": of_numpy}
LAYER_OF = {"fastmha": layer_of_fastmha, "torch": layer_of_torch, "onnxruntime": layer_of_onnxruntime, "numpy": layer_of_numpy}


def made(name: str, of: dict[str, Any], threads: int) -> Call:
    return fastest((LAYER_OF if "d_model" in of else ATTENTION_OF)[name](of, threads))


def libraries(of: dict[str, Any]) -> list[str]:
    """Those that are installed and have such a call: plain NumPy and ONNX Runtime's inference have no gradients."""
    found = ["fastmha"] + ["torch"] * has("torch")
    if of["gradients"]:
        return found
    return found + ["onnxruntime"] * (has("onnxruntime") and has("onnx")) + ["numpy"]


def table(title: str, cases: dict[str, dict[str, Any]], options: argparse.Namespace) -> Table:
    findings = []
    for what, of in cases.items():
        found = {name: seconds for name, (seconds, _) in measured(libraries(of), of, options, script=__file__, turns=3).items()}
        values: dict[str, Any] = {f"{name} ms": 1e3 * seconds for name, seconds in found.items()}
        own = found.pop("fastmha")
        findings.append(Finding(what, {**values, "times as fast as the best": min(found.values()) / own} if found else values))
    return Table(title, findings)


def attention(options: argparse.Namespace) -> Iterator[Table]:
    yield table("Attention, heads of width 64, float32 unless it says float64", ATTENTION, options)


def decode(options: argparse.Namespace) -> Iterator[Table]:
    yield table("Decoding, heads of width 128, float32", DECODE, options)


def layers(options: argparse.Namespace) -> Iterator[Table]:
    yield table("Layers of 12 heads, float32", LAYERS, options)


SECTIONS: dict[str, Section] = {"attention": attention, "decode": decode, "layers": layers}


def main(arguments: Sequence[str] | None = None) -> int:
    return command(__doc__, SECTIONS, "benches/peers.py", made, arguments)


if __name__ == "__main__":
    sys.exit(main())
