"""What the library brings to models of torch and transformers, beside their own attention.

    python benches/faces.py [--only SECTION] [--threads N] [--seconds S] [--json FILE]

    models      two layers of Llama, Mistral, Gemma 2, gpt-oss and BERT of random weights on 2048 and 4096 tokens, forward, with
                attn_implementation "fastmha", "eager" and, where transformers lets them, "sdpa": seconds and peak memory
    weights     one layer of eight, in bfloat16, from a .safetensors file by fastmha.weights, beside the whole file by safetensors
    calls       what a tiny call costs through fastmha.attention, PyTorch's own function and fastmha.torch, in one process

In "models" and "weights" each implementation runs in a process of its own, as in benches/models.py, and their answers are
compared. Needs the extras ``torch`` and ``transformers``, and ``weights`` and ``bfloat16`` for the second.

Exit status 1 if a floor is missed or an answer is wrong.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from findings import Finding, Floor, Section, Table, best_times, repeated
from models import Call, command, line, measured, torch_of
from processes import has

WIDTH = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
         "max_position_embeddings": 8192, "initializer_range": 0.05, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = WIDTH | {"num_key_value_heads": 4}
WINDOWED = GROUPED | {"sliding_window": 1024, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 1024},
    "gemma2": WINDOWED | {"query_pre_attn_scalar": 64},
    "gpt_oss": WINDOWED | {"sliding_window": 128, "num_local_experts": 2, "num_experts_per_tok": 1},
    "bert": WIDTH,
}  # fmt: skip
LENGTHS = 2048, 4096
IMPLEMENTATIONS = "fastmha", "eager", "sdpa"
REFUSED = {("gemma2", "sdpa"), ("gpt_oss", "sdpa")}     # by transformers: no softcap and no sinks there
CALLS = 200         # in a row
LAYERS, WIDE = 8, 2048


def make(implementation: str, of: dict[str, Any], threads: int) -> Call:
    torch = torch_of(threads)
    import transformers

    import fastmha.transformers

    fastmha.set_num_threads(threads)
    fastmha.transformers.register()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(of["model"], **MODELS[of["model"]])
    model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
    ids = torch.randint(3, WIDTH["vocab_size"], (1, of["L"]), generator=torch.Generator().manual_seed(0))

    def call() -> tuple[np.ndarray]:
        with torch.inference_mode():
            return (model(ids, use_cache=False)[0].numpy(),) if of["model"] != "bert" else (model(ids)[0].numpy(),)

    return call


def models(options: argparse.Namespace) -> Iterator[Table]:
    if not has("transformers"):
        yield Table("Models of transformers", [], "transformers is not installed: `pip install \"fastmha[transformers]\"`.")
        return
    findings = []
    for length in LENGTHS:
        for name in MODELS:
            arms = [x for x in IMPLEMENTATIONS if (name, x) not in REFUSED]
            found = measured(arms, {"model": name, "L": length}, options, script=__file__, turns=3)
            findings.append(line(f"{name} L{length}", found, Floor(low=1.0)))
    yield Table("Models of transformers, two layers, forward, float32", findings,
                "Both layers with all their products; Gemma 2 and gpt-oss have no sdpa in transformers.")


def write_layers(path: Path, d_model: int) -> None:
    """The attention of LAYERS layers with the names of Llama, in bfloat16."""
    import ml_dtypes
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    names = [f"model.layers.{i}.self_attn.{x}_proj.weight" for i in range(LAYERS) for x in "qkvo"]
    save_file({name: (0.02 * rng.standard_normal((d_model, d_model), np.float32)).astype(ml_dtypes.bfloat16) for name in names},
              path)


def load(implementation: str, of: dict[str, Any], threads: int) -> Call:
    """The weights of layer 1 into a module."""
    import fastmha.weights

    fastmha.set_num_threads(threads)
    module = fastmha.MultiHeadAttention(of["d_model"], 16, rng=0)
    prefix = "model.layers.1.self_attn."
    if implementation == "fastmha":
        def call() -> tuple[np.ndarray, ...]:
            fastmha.weights.load(of["file"], module, prefix)
            return module.W_Q, module.W_O
    else:
        import ml_dtypes  # noqa: F401      (whose bfloat16 safetensors asks NumPy for)
        from safetensors.numpy import load_file

        def call() -> tuple[np.ndarray, ...]:
            every = load_file(of["file"])
            module.load_state_dict({f"W_{x.upper()}": every[f"{prefix}{x}_proj.weight"].T.astype(np.float32) for x in "qkvo"})
            return module.W_Q, module.W_O

    return call


def weights(options: argparse.Namespace) -> Iterator[Table]:
    if not has("safetensors") or not has("ml_dtypes"):
        yield Table("Weights", [], "safetensors is not installed: `pip install \"fastmha[weights,bfloat16]\"`.")
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layers.safetensors"
        write_layers(path, WIDE)
        found = measured(["fastmha", "whole file"], {"file": str(path), "d_model": WIDE}, options, script=__file__)
    yield Table("One layer's weights from a file of eight", [line(f"d_model {WIDE}, bfloat16", found, None)])


def calls(options: argparse.Namespace) -> Iterator[Table]:
    if not has("torch"):
        yield Table("Tiny calls", [], "PyTorch is not installed: `pip install \"fastmha[torch]\"`.")
        return
    torch = torch_of(options.threads)
    import fastmha.torch

    fastmha.set_num_threads(options.threads)
    own, ours = torch.nn.functional.scaled_dot_product_attention, fastmha.torch.scaled_dot_product_attention
    tensors = [torch.randn(1, 1, 4, 8) for _ in range(3)]
    arrays, leaves = [x.numpy() for x in tensors], [x.clone().requires_grad_() for x in tensors]

    def both(f: Any) -> None:
        out = f(*leaves)
        out.backward(out.detach())

    timed = {
        "fastmha.attention": lambda: fastmha.attention(*arrays),
        "torch": lambda: own(*tensors), "fastmha.torch": lambda: ours(*tensors),
        "torch with gradients": lambda: both(own), "fastmha.torch with gradients": lambda: both(ours),
    }  # fmt: skip
    best = {name: 1e6 * seconds / CALLS for name, seconds in
            best_times({name: repeated(f, CALLS) for name, f in timed.items()}, options.seconds).items()}
    over = best["fastmha.torch"] - best["fastmha.attention"]
    yield Table("A call of 4 queries on 4 keys of width 8", [
        *(Finding(name, {"us": us}) for name, us in best.items()),
        Finding("fastmha.torch beyond fastmha.attention", {"us": over}, Floor(high=5.0), ["us"])])


SECTIONS: dict[str, Section] = {"models": models, "weights": weights, "calls": calls}


def call_of(name: str, of: dict[str, Any], threads: int) -> Call:
    return (make if "model" in of else load)(name, of, threads)


def main(arguments: Sequence[str] | None = None) -> int:
    return command(__doc__, SECTIONS, "benches/faces.py", call_of, arguments)


if __name__ == "__main__":
    sys.exit(main())
