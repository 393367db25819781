"""One-token steps of generation over a KVCache: beside PyTorch, over half precision, with nothing cached, in two layouts.

    python benches/steps.py [--only SECTION] [--threads N] [--seconds S] [--json FILE]

    step        a module's step over a float32 cache, against the same step in PyTorch on preallocated tensors
    half        attention over a float16 or bfloat16 cache, against a float32 cache
    weights     a module's step over a cache of half precision, and with weights frozen in it too, against float32
    small       what a step with an empty cache costs beyond its two products
    layout      appending to a cache and decoding over it, head-major (B, Hkv, capacity, D) as KVCache keeps it, against
                length-major (B, capacity, Hkv, D)

"cold" calls take turns through as many copies of what they read as exceed 100 MB, as the layers of a model do; "warm" ones
read one copy again and again. How it is timed: rounds as in benches/limits.py; the best time counts, of a round through all
copies divided by their number. Before that, each arm's answers are checked against float64 NumPy.

In `step` either library runs in a process of its own, which may use N cores and N threads; they take turns, with a rest before
each, because idle threads of a pool spin for a while. The tokens that a step has added are forgotten (`truncate`) outside of
the timing. PyTorch (2.5 or later) is not needed: without it the times stand alone.

Exit status 1 if a floor is missed or an answer is wrong.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from findings import Finding, Floor, Section, Table, agree, best_times, options_of, repeated, report
from processes import REST, Process, has, serve

import fastmha
from fastmha import algorithms, reference
from fastmha.study import trial

COLD_BYTES = 100e6
ROOM = 64           # slots of a cache behind its tokens; also the long append


def copies_of(nbytes: int) -> int:
    """How many copies of that size exceed 100 MB."""
    return int(COLD_BYTES // nbytes) + 1


def through(copies: Sequence[Any], function: Callable[[Any], Any]) -> Callable[[], None]:
    def run() -> None:
        for copy in copies:
            function(copy)
    return run


# ---------------------------------------------------------------------------------------------- steps beside PyTorch

@dataclass(frozen=True)
class Decoder:
    """A module and its cache: B rows of `tokens` tokens before the step."""

    B: int
    d_model: int
    H: int
    Hkv: int
    tokens: int

    @property
    def label(self) -> str:
        return f"B{self.B} d_model{self.d_model} H{self.H} Hkv{self.Hkv} cached{self.tokens}"

    @property
    def D(self) -> int:
        return self.d_model // self.H

    @property
    def copies(self) -> int:
        """How many copies of weights and cached tokens exceed 100 MB."""
        weights = 2 * self.d_model * (self.H + self.Hkv) * self.D
        return copies_of(4 * (weights + 2 * self.B * self.Hkv * self.tokens * self.D))

    def operands(self) -> dict[str, np.ndarray]:
        """X (B, 1, d_model), the weights, and the keys and values (B, Hkv, tokens, D) of the past: the same in every process."""
        rng = np.random.default_rng(0)
        width, kv_width = self.H * self.D, self.Hkv * self.D
        shapes = {"W_Q": (self.d_model, width), "W_K": (self.d_model, kv_width), "W_V": (self.d_model, kv_width),
                  "W_O": (width, self.d_model)}
        made = {name: rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[0])) for name, shape in shapes.items()}
        made["X"] = rng.standard_normal((self.B, 1, self.d_model), np.float32)
        made.update({name: rng.standard_normal((self.B, self.Hkv, self.tokens, self.D), np.float32) for name in "kv"})
        return made

    def answer(self) -> np.ndarray:
        """(B, 1, d_model) of the step, in float64 by NumPy."""
        o = {name: x.astype(np.float64) for name, x in self.operands().items()}
        q, k, v = (fastmha.split_heads(o["X"] @ o[name], n)
                   for name, n in (("W_Q", self.H), ("W_K", self.Hkv), ("W_V", self.Hkv)))
        heads = reference.attention(q, np.concatenate((o["k"], k), axis=2), np.concatenate((o["v"], v), axis=2))
        return fastmha.combine_heads(heads) @ o["W_O"]


DECODERS = (Decoder(1, 2048, 32, 8, 4096), Decoder(8, 768, 12, 12, 1024))
STEP_FLOORS = {1: 1.8, 2: 1.4}      # threads -> times as fast as PyTorch
RIVAL = "torch"     # the library that runs as PyTorch
TURNS = 5


@dataclass(frozen=True)
class Arm:
    """Steps of one library by the name of how it attends. All leave the copy that they are given one token longer."""

    copies: list[Any]
    steps: dict[str, Callable[[Any], Any]]
    forget: Callable[[Any], None] = lambda copy: None
    rules: AbstractContextManager = field(default_factory=nullcontext)

    def answers(self) -> dict[str, list[Any]]:
        """Name -> the answer of each copy."""
        found: dict[str, list[Any]] = {name: [] for name in self.steps}
        for name, step in self.steps.items():
            for copy in self.copies:
                found[name].append(step(copy).tolist())
                self.forget(copy)
        return found

    def times(self, copies: int, seconds: float) -> dict[str, float]:
        """Name -> best seconds of a step, of rounds through so many copies."""
        best = dict.fromkeys(self.steps, math.inf)
        for name, step in self.steps.items():
            run, rounds = through(self.copies[:copies], step), 0
            end = time.perf_counter() + seconds / len(self.steps)
            while rounds < trial.LEAST_ROUNDS or time.perf_counter() < end:
                start = time.perf_counter()
                run()
                best[name] = min(best[name], (time.perf_counter() - start) / copies)
                for copy in self.copies[:copies]:
                    self.forget(copy)
                rounds += 1
        return best


def fastmha_arm(of: Decoder, threads: int) -> Arm:
    o = of.operands()
    copies = []
    for _ in range(of.copies):
        module = fastmha.MultiHeadAttention(of.d_model, of.H, num_kv_heads=of.Hkv)
        module.load_state_dict({name: o[name] for name in ("W_Q", "W_K", "W_V", "W_O")})
        module.freeze()
        cache = fastmha.KVCache(of.B, of.Hkv, of.D, capacity=of.tokens + ROOM)
        cache.append(o["k"], o["v"])
        copies.append((module, cache))

    def step(copy: Any) -> np.ndarray:
        module, cache = copy
        return module.forward(o["X"], cache=cache, is_causal=True, training=False, num_threads=threads)

    return Arm(copies, {"auto": step}, lambda copy: copy[1].truncate(of.tokens))


def torch_arm(of: Decoder, threads: int) -> Arm:
    """PyTorch on tensors with ROOM to spare: one fused projection, k and v written where they belong, its attention over the
    tokens so far, the output projection. All large tensors lie in memory of NumPy, which asks for huge pages, as ours do."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(threads)
    o = of.operands()
    X, (B, H, Hkv, D), position = torch.from_numpy(o["X"]), (of.B, of.H, of.Hkv, of.D), of.tokens
    copies = []
    for _ in range(of.copies):
        W_in = torch.from_numpy(np.concatenate([o[name].T for name in ("W_Q", "W_K", "W_V")]))
        W_out = torch.from_numpy(o["W_O"].T.copy())
        kv = [torch.from_numpy(np.zeros((B, Hkv, of.tokens + ROOM, D), np.float32)) for _ in "kv"]
        for buffer, name in zip(kv, "kv", strict=True):
            buffer[:, :, :position] = torch.from_numpy(o[name])
        copies.append((W_in, W_out, *kv))
    attend = functional.scaled_dot_product_attention

    def step_by(attention: Callable[[Any, Any, Any], Any]) -> Callable[[Any], Any]:
        def step(copy: Any) -> Any:
            W_in, W_out, k, v = copy
            heads = functional.linear(X, W_in).view(B, 1, H + 2 * Hkv, D).transpose(1, 2)
            k[:, :, position:position + 1], v[:, :, position:position + 1] = heads[:, H:H + Hkv], heads[:, H + Hkv:]
            concat = attention(heads[:, :H], k[:, :, :position + 1], v[:, :, :position + 1])
            return functional.linear(concat.transpose(1, 2).reshape(B, 1, H * D), W_out)
        return step

    ways: dict[str, Callable[[Any, Any, Any], Any]] = {"plain": attend} if Hkv == H else {
        "enable_gqa": lambda q, k, v: attend(q, k, v, enable_gqa=True),
        "heads as rows": lambda q, k, v: attend(q.reshape(B, Hkv, H // Hkv, D), k, v).reshape(B, H, 1, D)}
    return Arm(copies, {name: step_by(way) for name, way in ways.items()}, rules=torch.inference_mode())


ARMS = {"fastmha": fastmha_arm, "torch": torch_arm}


def step_lines(of: Decoder, libraries: Mapping[str, str], options: argparse.Namespace) -> list[Finding]:
    findings = []
    wanted = of.answer()
    with ExitStack() as stack:
        arms = {name: stack.enter_context(Process(__file__, [library, asdict(of)], options.threads))
                for name, library in libraries.items()}
        for name, arm in arms.items():
            for way, answers in arm.ask("answers").items():
                for answer in answers:
                    agree(f"{of.label}: {name} ({way})", np.array(answer), wanted, "float32")
        for label, copies in (("warm", 1), (f"cold ×{of.copies}", of.copies)):
            best: dict[str, dict[str, float]] = {name: {} for name in arms}
            for turn in range(TURNS):
                for name in list(arms)[::-1 if turn % 2 else 1]:
                    time.sleep(REST)
                    for way, seconds in arms[name].ask("times", copies, options.seconds / TURNS).items():
                        best[name][way] = min(best[name].get(way, math.inf), seconds)
            values: dict[str, Any] = {name: 1e3 * min(ways.values()) for name, ways in best.items()}
            floor = None
            if len(best) > 1:
                values["by"] = min(best["torch"], key=best["torch"].__getitem__)
                values["times as fast"] = values["torch"] / values["fastmha"]
                low = STEP_FLOORS.get(options.threads)
                floor = None if low is None else Floor(low=low)
            findings.append(Finding(f"{of.label} {label}", values, floor, ("times as fast",)))
    return findings


def step(options: argparse.Namespace) -> Iterator[Table]:
    found = has("torch")
    libraries = {"fastmha": "fastmha", **({"torch": RIVAL} if found else {})}
    findings = [line for of in DECODERS for line in step_lines(of, libraries, options)]
    note = ("Warm: one copy of weights and cache; cold: so many in turn. PyTorch under inference_mode, the fastest of its ways, "
            "which \"by\" names; its tensors lie in memory of NumPy, in huge pages where the system has them, "
            "as ours do." if found else
            "PyTorch is not installed, so there is nothing to compare with: `pip install torch` and run this again.")
    yield Table("One-token steps of a module, float32: ms a step", findings, note)


# ---------------------------------------------------------------------------------------------- half precision

HALF_CASES = ((32, 32, 128), (32, 8, 128), (8, 8, 64))      # H, Hkv, D
HALF_KEYS = (4096, 8192, 16384)
HALF_FLOOR = Floor(low=1.6)


def check_decode(what: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
    """One query's answers out (B, H, 1, D) for the first and the last row and key/value head, against the reference."""
    group = q.shape[1] // k.shape[1]
    for at, heads in ((0, slice(0, group)), (-1, slice(-group, None))):
        of_row = (x[at][None] for x in (q[:, heads], k[:, [at]], v[:, [at]]))
        wanted = reference.attention(*(x.astype(np.float64) for x in of_row))
        agree(what, out[at][None, heads], wanted, "float32")


def storage_types() -> list[str]:
    try:
        fastmha.KVCache(1, 1, 1, dtype="bfloat16")
    except ImportError:
        return ["float32", "float16"]
    return ["float32", "float16", "bfloat16"]


def half_line(H: int, Hkv: int, D: int, keys: int, dtypes: Sequence[str], options: argparse.Namespace) -> Finding:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, H, 1, D), np.float32)
    k, v = (rng.standard_normal((1, Hkv, keys, D), np.float32) for _ in "kv")
    label, caches = f"H{H} Hkv{Hkv} D{D} keys{keys}", {}
    for dtype in dtypes:
        first = fastmha.KVCache(1, Hkv, D, capacity=keys, dtype=dtype)
        caches[dtype] = [first, *(fastmha.KVCache(1, Hkv, D, capacity=keys, dtype=dtype)
                                  for _ in range(copies_of(first.nbytes) - 1))]
        for cache in caches[dtype]:
            cache.append(k, v)
            check_decode(f"{label} {dtype}", q, cache.k, cache.v, cache.attend(q, num_threads=options.threads))
    del k, v
    time.sleep(REST)        # the threads of NumPy's BLAS spin for a while after the reference's products
    best = best_times({dtype: through(copies, lambda cache: cache.attend(q, num_threads=options.threads))
                       for dtype, copies in caches.items()}, options.seconds)
    values = {dtype: 1e3 * seconds / len(caches[dtype]) for dtype, seconds in best.items()}
    ratios = {f"{dtype} is": values["float32"] / values[dtype] for dtype in dtypes[1:]}
    return Finding(label, {**values, **ratios}, HALF_FLOOR, tuple(ratios))


def half(options: argparse.Namespace) -> Iterator[Table]:
    dtypes = storage_types()
    findings = [half_line(*heads, keys, dtypes, options) for heads in HALF_CASES for keys in HALF_KEYS]
    note = "Cold. Right: how many times as fast as over the float32 cache."
    if "bfloat16" not in dtypes:
        note += " bfloat16 needs ml_dtypes, which is not installed: `pip install ml_dtypes` and run this again."
    yield Table("Attention of one float32 query over half precision, KVCache.attend, B1: ms a call", findings, note)


# ------------------------------------------------------------------------------ steps with weights of half precision

WEIGHTS_CASES = (Decoder(1, 2048, 32, 8, 4096), Decoder(1, 2048, 16, 16, 4096))
WEIGHTS_FLOOR = Floor(low=1.7)


def weights_line(of: Decoder, dtypes: Sequence[str], options: argparse.Namespace) -> Finding:
    """Of float32, then of each half precision of the cache, alone and of the weights too."""
    o, wanted, arms, read = of.operands(), of.answer(), {}, []
    for stored, half_too in (("float32", False), *((dtype, too) for dtype in dtypes[1:] for too in (False, True))):
        module = fastmha.MultiHeadAttention(of.d_model, of.H, num_kv_heads=of.Hkv)
        module.load_state_dict({name: o[name] for name in ("W_Q", "W_K", "W_V", "W_O")})
        cache = fastmha.KVCache(of.B, of.Hkv, of.D, capacity=of.tokens + ROOM, dtype=stored)
        cache.append(o["k"], o["v"])
        nbytes = module.num_parameters * (2 if half_too else 4) + cache.nbytes * of.tokens // cache.capacity
        pairs = [(module, cache), *((deepcopy(module), deepcopy(cache)) for _ in range(copies_of(nbytes) - 1))]

        def step(pair: Any) -> np.ndarray:
            module, cache = pair
            out = module.forward(o["X"], cache=cache, is_causal=True, training=False, num_threads=options.threads)
            cache.truncate(of.tokens)
            return out

        for pair in pairs:
            pair[0].freeze(weights=stored if half_too else None)
            difference, size = np.abs(step(pair) - wanted).max(), np.abs(wanted).max()
            if not difference <= (1e-4 if stored == "float32" else 2e-2) * size:
                raise trial.ArmsDisagreeError(f"{of.label} over {stored} is off by {difference:.1e} of {size:.1e}")
        arms[stored if half_too or stored == "float32" else f"{stored} cache"] = pairs
        read.append(nbytes / 1e6)
    time.sleep(REST)
    best = best_times({name: through(pairs, step) for name, pairs in arms.items()}, options.seconds)
    values: dict[str, Any] = {name: 1e3 * seconds / len(arms[name]) for name, seconds in best.items()}
    ratios = {f"{name} is": values["float32"] / values[name] for name in dtypes[1:]}
    return Finding(of.label, {**values, **ratios, "MB": ", ".join(f"{megabytes:.3g}" for megabytes in read)}, WEIGHTS_FLOOR,
                   tuple(ratios))


def weights(options: argparse.Namespace) -> Iterator[Table]:
    findings = [weights_line(of, storage_types(), options) for of in WEIGHTS_CASES]
    title = ('One-token steps of a module in float32: over a float32 cache, over one of half precision ("cache"), with frozen '
             "weights of half precision as well: ms a step")
    yield Table(title, findings,
                "Cold. Right: how many times as fast as with float32 in both; MB that a step reads, in the order of the times.")


# ---------------------------------------------------------------------------------------------- nothing cached

SMALL_FLOOR = Floor(high=15.0)
REPEATS = 200       # calls in one timed arm


def small_arms(threads: int) -> dict[str, Callable[[], Any]]:
    """A step and the reset after it, a reset alone, and the step's two products, after a look at their answers."""
    d_model, H = 64, 8
    module = fastmha.MultiHeadAttention(d_model, H, rng=0)
    state = module.state_dict()
    module.freeze()
    X = np.random.default_rng(1).standard_normal((1, 1, d_model), np.float32)
    cache = fastmha.KVCache(1, H, d_model // H, capacity=ROOM)
    W_in = np.concatenate([state[name] for name in ("W_Q", "W_K", "W_V")], axis=1)
    projected, concat, out = (np.empty((1, n), np.float32) for n in (3 * d_model, d_model, d_model))

    def forward() -> np.ndarray:
        return module.forward(X, cache=cache, is_causal=True, training=False, num_threads=threads)

    def step_and_reset() -> None:
        forward()
        cache.reset()

    def products() -> None:
        algorithms.product(X[0], W_in, projected, threads)
        algorithms.product(concat, state["W_O"], out, threads)

    concat[...] = X[0] @ state["W_V"]       # a token that sees itself alone has its own values
    exact = X.astype(np.float64)
    wanted = reference.multi_head_attention(exact, exact, exact, H, {name: W.astype(np.float64) for name, W in state.items()})
    agree("small step", forward(), wanted, "float32")
    cache.reset()
    products()
    agree("small step: products", out[None], wanted, "float32")
    agree("small step: products", projected, exact[0] @ W_in, "float32")
    return {"step": step_and_reset, "reset": cache.reset, "products": products}


def small(options: argparse.Namespace) -> Iterator[Table]:
    arms = small_arms(options.threads)
    time.sleep(REST)
    best = best_times({name: repeated(f, REPEATS) for name, f in arms.items()}, options.seconds)
    micro = {name: seconds / REPEATS * 1e6 for name, seconds in best.items()}
    micro["step"] -= micro.pop("reset")
    micro["beyond"] = micro["step"] - micro["products"]
    yield Table("A step with an empty cache, B1, d_model 64, 8 heads, float32: µs",
                [Finding("module step", micro, SMALL_FLOOR, ("beyond",))],
                "products: the two projections alone, on arrays allocated before. Each step is followed by a reset of the cache, "
                "whose time, measured alone, has been subtracted.")


# ---------------------------------------------------------------------------------------------- layouts of a cache

LAYOUT_CASES = ((32, 8, 128), (32, 32, 128), (12, 12, 64))      # H, Hkv, D
LAYOUT_LENGTHS, LAYOUT_BATCHES = (1024, 4096), (1, 8)


def layout_times(B: int, H: int, Hkv: int, D: int, L: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """Best seconds by layout: of an append of one token, of ROOM tokens, and of decoding."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, H, 1, D), np.float32)
    projected = rng.standard_normal((2, B, ROOM, Hkv, D), np.float32)
    copies: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"head-major": [], "length-major": []}
    for number in range(copies_of(2 * 4 * B * Hkv * L * D)):
        for name, pairs in copies.items():
            shape = (B, Hkv, L + ROOM, D) if name == "head-major" else (B, L + ROOM, Hkv, D)
            k, v = by_head(name, np.empty(shape, np.float32)), by_head(name, np.empty(shape, np.float32))
            if number or name == "length-major":
                k[...], v[...] = copies["head-major"][0]
            else:
                for x in (k, v):
                    rng.standard_normal(out=x, dtype=np.float32)
            pairs.append((k, v))

    def append(n: int) -> Callable[[Any], None]:
        new_k, new_v = (x[:, :n].swapaxes(1, 2) for x in projected)     # where a fused projection writes them

        def run(pair: Any) -> None:
            pair[0][:, :, L:L + n], pair[1][:, :, L:L + n] = new_k, new_v
        return run

    def decode(pair: Any) -> np.ndarray:
        return fastmha.attention(q, pair[0][:, :, :L], pair[1][:, :, :L], algorithm="decode", num_threads=options.threads)

    for name, pairs in copies.items():
        for pair in pairs:
            append(ROOM)(pair)
            append(1)(pair)
            what = f"{name} B{B} Hkv{Hkv} D{D} keys{L}"
            for x, new in zip(pair, projected, strict=True):
                agree(f"{what}: append", x[:, :, L:].swapaxes(1, 2), new, "float32")
            check_decode(what, q, pair[0][:, :, :L], pair[1][:, :, :L], decode(pair))
    time.sleep(REST)
    found = []
    for function in (append(1), append(ROOM), decode):
        best = best_times({name: through(pairs, function) for name, pairs in copies.items()}, options.seconds / 3)
        found.append({name: seconds / len(copies[name]) for name, seconds in best.items()})
    return found


def by_head(layout: str, x: np.ndarray) -> np.ndarray:
    """(B, Hkv, L, D) of either layout."""
    return x if layout == "head-major" else x.swapaxes(1, 2)


def layout(options: argparse.Namespace) -> Iterator[Table]:
    titles = {"Appending one token to all heads, keys and values: µs": 1e6,
              f"Appending {ROOM} tokens to all heads, keys and values: µs": 1e6,
              "Decoding one query of each head: ms": 1e3}
    findings: dict[str, list[Finding]] = {title: [] for title in titles}
    for H, Hkv, D in LAYOUT_CASES:
        for L in LAYOUT_LENGTHS:
            for B in LAYOUT_BATCHES:
                for (title, unit), best in zip(titles.items(), layout_times(B, H, Hkv, D, L, options), strict=True):
                    values = {name: unit * seconds for name, seconds in best.items()}
                    values["length/head"] = values["length-major"] / values["head-major"]
                    findings[title].append(Finding(f"B{B} H{H} Hkv{Hkv} D{D} keys{L}", values))
    for title, lines in findings.items():
        yield Table(f"Layout of a cache, float32. {title}", lines,
                    "Copies of over 100 MB in turn; appends write the same slots in each round. Right: the time in length-major "
                    "(B, capacity, Hkv, D) over that in head-major (B, Hkv, capacity, D).")


# ---------------------------------------------------------------------------------------------- the command

SECTIONS: dict[str, Section] = {"step": step, "half": half, "weights": weights, "small": small, "layout": layout}


def main(arguments: Sequence[str] | None = None) -> int:
    made = options_of(__doc__, SECTIONS)
    made.add_argument("--arm", type=json.loads, help=argparse.SUPPRESS)
    options = made.parse_args(arguments)
    if options.arm:
        library, of = options.arm
        arm = ARMS[library](Decoder(**of), options.threads)
        with arm.rules:
            serve(arm)
        return 0
    return report(SECTIONS, options, "benches/steps.py", sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
