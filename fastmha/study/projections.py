"""The projections of Q, K and V: as one product or as three, and where in the rows of the result the heads lie.

Products of tokens X (M, d) and weights, M the tokens of all batch rows:

    one product     X @ W with W (d, 3d) into one buffer (M, 3d)
    three products  with the columns of a W like that, into the columns of a buffer like that
    three arrays    with three weights (d, d), into three arrays (M, d)

Attention on heads of the same numbers, in the layouts of `operands.lay`: "side by side" is what X @ (W_Q | W_K | W_V) writes,
"interleaved" the same product with W's columns permuted. And both together, forward: product or products, then attention where
they wrote; "packed" packs keys and values in between, "one product a head" takes the fused matrix head by head, and writes each
contiguous.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastmha import algorithms
from fastmha.study import operands
from fastmha.study.answer import Answer, Found, Picture, Question, Record, bar, of, ratios, table
from fastmha.study.cases import DIRECTIONS, Case, case
from fastmha.study.machine import memory
from fastmha.study.trial import LEAST_CALLS, Arms, Trial, checked, timed
from fastmha.study.words import geomean, rate_of, ratio_of, ratio_text, time_of, times_text

NAME = "projections"
D = 64
TOKENS, D_MODELS = (1, 16, 128, 512, 2048), (768, 1024, 2048)
PRODUCTS = ("one product", "three products", "three arrays")
LAYOUTS = ("side by side", "interleaved", "separate", "packed")
LAYERS = ("side by side", "interleaved", "three products", "three arrays", "packed", "one product a head")
KINDS = (("product", "One product or three", PRODUCTS), ("attention", "Attention on what they leave", LAYOUTS),
         ("layer", "Projection and attention together", LAYERS))
_PLANNED_FLOPS = 1e11       # per second, to plan trials in which five rounds take longer than the others


def _copy(x: np.ndarray) -> np.ndarray:
    """Of its own, from the start of a page on."""
    found = memory(x.nbytes).view(x.dtype).reshape(x.shape)
    found[...] = x
    return found


def _tokens_and_weights(tokens: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """X (tokens, d) and W (d, 3d) in float32."""
    generator = np.random.default_rng(0)
    x, w = generator.standard_normal((tokens, d), np.float32), generator.standard_normal((d, 3 * d), np.float32)
    return _copy(x), _copy(w / np.sqrt(d, dtype=np.float32))


def _pairs(name: str, w: np.ndarray, whole: np.ndarray, tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights of its own for an arm, and where in its memory their products go."""
    if name == "three arrays":
        return [(_copy(part), array) for part, array in zip(np.split(w, 3, axis=1), whole.reshape(3, tokens, -1))]
    rows = whole.reshape(tokens, -1)
    pair = _copy(w), rows
    return list(zip(*(np.split(x, 3, axis=1) for x in pair))) if name == "three products" else [pair]


def product_arms(tokens: int, d: int, num_threads: int, blas: bool = False) -> Arms:
    """The arms of the products, once their answers have been compared."""
    x, w = _tokens_and_weights(tokens, d)
    pairs = {name: _pairs(name, w, memory(tokens * w[0].nbytes).view(w.dtype), tokens) for name in PRODUCTS}

    def arm(name: str) -> Callable[[], None]:
        def run() -> None:
            for weight, out in pairs[name]:
                algorithms.product(x, weight, out, num_threads, blas=blas)
        return run

    results = {name: dict(zip("QKV", np.split(own[0][1], 3, axis=1) if len(own) == 1 else [out for _, out in own]))
               for name, own in pairs.items()}
    return checked(f"projection of {tokens} tokens, d_model {d}", {name: arm(name) for name in PRODUCTS}, results, "float32")


def layer_arms(of: Case, num_threads: int) -> Arms:
    """The arms of product and attention together, once their answers have been compared."""
    L, H, d = of.Lq, of.H, of.H * of.D
    x, w = _tokens_and_weights(L, d)
    out, lse = operands.merged(of), np.empty((1, H, L), of.dtype)

    def arm(name: str) -> Callable[[], None]:
        others = {"interleaved": "interleaved", "three arrays": "separate", "one product a head": "packed"}
        whole, views = operands.lay(of, others.get(name, "side by side"))
        q, k, v = views
        problem = operands.problem(q, k, v)
        own = w.reshape(d, 3, H, of.D).transpose(0, 2, 1, 3).reshape(d, 3 * d) if name == "interleaved" else w
        pairs = [(_copy(w), whole.reshape(1, 3 * H, L, of.D))] if name == "one product a head" else _pairs(name, own, whole, L)

        def run() -> None:
            for weight, target in pairs:
                algorithms.product(x, weight, target, num_threads)
            ready = problem.with_heads(q, *algorithms.packed(num_threads, k, v)) if name == "packed" else problem
            algorithms.forward(of.algorithm, ready, out, lse, None, num_threads)
        return run

    return checked(f"layer {of.name}", {name: arm(name) for name in LAYERS},
                   {name: {"out": out, "lse": lse} for name in LAYERS}, of.dtype)


def _trial(kind: str, label: str, factors: Mapping[str, Any], names: Sequence[str], prepare: Callable[[], Arms], flops: int,
           seconds: float, work: Mapping[str, float]) -> Trial:
    """`work`: of one arm, called once."""
    first, *others = names
    seconds = max(seconds, 5 * len(names) * flops / _PLANNED_FLOPS)
    measure = timed(prepare, [(other, first) for other in others], flops=flops)
    return Trial(NAME, f"{kind} {label}", {"kind": kind, **factors}, measure, seconds, len(names) * flops,
                 {name: LEAST_CALLS * len(names) * amount for name, amount in work.items()})


def _products(tokens: int, d: int, threads: int) -> dict[str, float]:
    return {f"product{' 1T' * (threads == 1)}": 2 * tokens * d * 3 * d}


def _factors(of: Case, direction: str, threads: int) -> dict[str, Any]:
    return {"L": of.Lq, "d_model": of.H * of.D, "D": of.D, "algorithm": of.algorithm, "direction": direction, "threads": threads,
            "dtype": of.dtype}


def product(tokens: int, d: int, threads: int, seconds: float, blas: bool = False) -> Trial:
    factors = {"tokens": tokens, "d_model": d, "threads": threads, "blas": blas, "dtype": "float32"}
    return _trial("product", f"M{tokens} d{d} f32 {threads}T{' blas' * blas}", factors, PRODUCTS,
                  lambda: product_arms(tokens, d, threads, blas), 2 * tokens * d * 3 * d, seconds, _products(tokens, d, threads))


def attention(of: Case, direction: str, threads: int, seconds: float) -> Trial:
    places = {layout: operands.Place(layout) for layout in LAYOUTS}
    return _trial("attention", f"{of.name} {direction} {threads}T", _factors(of, direction, threads), LAYOUTS,
                  lambda: operands.attention_arms(of, direction, places, threads), of.flops(direction), seconds,
                  of.least(direction, 1, threads))


def layer(of: Case, threads: int, seconds: float) -> Trial:
    d = of.H * of.D
    return _trial("layer", f"{of.name} {threads}T", _factors(of, "forward", threads), LAYERS, lambda: layer_arms(of, threads),
                  2 * of.Lq * d * 3 * d + of.flops("forward"), seconds,
                  {**_products(of.Lq, d, threads), **of.least("forward", 1, threads)})


def trials(quick: bool, num_threads: int) -> list[Trial]:
    names = ("tiled", "blas")
    if quick:
        forward = [(768, L, name) for name in names for L in (128, 512)] + [(768, 1024, "tiled"), (1024, 512, "tiled")]
        return [*(product(tokens, 768, num_threads, 0.25) for tokens in TOKENS),
                *(product(tokens, 1024, num_threads, 0.25) for tokens in (1, 512)),
                product(512, 768, num_threads, 0.25, blas=True),
                *(attention(case(1, d // D, L, D, algorithm=name), "forward", num_threads, 0.25) for d, L, name in forward),
                *(attention(case(1, 12, 512, D, algorithm=name), "backward", num_threads, 0.25) for name in names),
                *(layer(case(1, d // D, L, D), num_threads, 0.3) for d, L in ((768, 128), (768, 512), (1024, 512)))]
    lengths = [(d, L) for d in (768, 1024) for L in (128, 512, 1024, 2048)]
    return [*(product(tokens, d, num_threads, 0.8) for d in D_MODELS for tokens in TOKENS),
            product(512, 768, num_threads, 0.8, blas=True),
            *(product(tokens, 768, 1, 0.5) for tokens in (1, 16, 512)),
            *(attention(case(1, d // D, L, D, algorithm=name), direction, num_threads, 0.9) for d, L in lengths for name in names
              for direction in DIRECTIONS if direction == "forward" or L <= 1024),
            *(layer(case(1, d // D, L, D), num_threads, 1.2) for d, L in lengths)]


def _against(records: Sequence[Record], names: Sequence[str]) -> str:
    """The times of all others over the first, in words."""
    first, *others = names
    return ", ".join(f"{other} {times_text(ratios(records, f'{other}/{first}'))}" for other in others)


def _short(products: Sequence[Record], attentions: Sequence[Record], layers: Sequence[Record]) -> str:
    sentences = []
    if layers:
        sentences.append(f"{_winner(layers)} Time of projection and attention together over that of one product with Q, K and V "
                         f"{LAYERS[0]}: {_against(layers, LAYERS)}.")
    if products:
        most = max(products, key=lambda r: r["ratios"]["three products/one product"]["median"])
        sentences.append(f"The projection alone, over one product: {_against(products, PRODUCTS)}; three products lose most at "
                         f"{_label(most)} ({ratio_text(most['ratios']['three products/one product'])}).")
    if attentions:
        sentences.append(f"Attention alone, over heads {LAYOUTS[0]}: {_against(attentions, LAYOUTS)}.")
    return " ".join(sentences)


def _winner(layers: Sequence[Record]) -> str:
    """Which way from tokens to attention's output wins, where one does: in most cases, and by half a per cent on average."""
    first, *others = LAYERS
    means, gains = {}, []
    for other in others:
        over = ratios(layers, f"{other}/{first}")
        faster = [(ratio["median"], other, record) for ratio, record in zip(over, layers) if ratio["high"] < 1]
        mean = geomean(ratio["median"] for ratio in over)
        if 2 * len(faster) > len(layers) and mean <= 0.995:
            means[other] = mean
        gains += faster
    if means:
        best = min(means, key=means.__getitem__)
        return (f"Over one product with Q, K and V {first}, {best} wins in more than half of the {len(layers)} cases, by "
                f"{100 * (1 - means[best]):.0f} % on average.")
    least, other, record = min(gains, key=lambda gain: gain[0], default=(1.0, "", None))
    most = "" if record is None or least > 0.995 else (
        f"; at most {100 * (1 - least):.0f} % are won, by {other} at {_label(record)}")
    return (f"One product with Q, K and V {first} is enough: no other way is faster both on average and in more than half of the "
            f"{len(layers)} cases{most}.")


def answer(records: Sequence[Record], found: Found) -> Answer:
    own = [of(records, kind=kind) for kind, _, _ in KINDS]
    method = (
        f"Heads of width {D}, float32, one batch row; M tokens, d_model d. Products by the library's own kernels, as modules run "
        "them (one token, and machines without fused multiply-add: by BLAS), a case by BLAS beside them. All arms have weights "
        "and buffers of their own with the same numbers, which begin at a page; their answers are compared. Attention writes a "
        "merged output in all; backward, the gradients lie as the operands do. Together, \"packed\" copies keys and values after "
        "one product. Means are geometric.")
    limits = (
        "Weights are as warm as a round of all arms leaves them: small ones stay in the last cache, as in a loop over one layer, "
        "not over many. The output projection and the backward pass of the projections are left out: where the heads lie does "
        "not change their work.")
    tables, panels = [], []
    for each, (_, title, (first, *others)) in zip(own, KINDS):
        tables.append(table(title, each, {
            "case": _label, first: time_of(first), "GFLOP/s": rate_of(first),
            **{other: ratio_of(f"{other}/{first}") for other in others}},
            f"Time and speed, {first}; then times over it."))
        if each:
            panels.append({"title": title, "rows": [{"label": _label(r), "values": [
                bar(other, r["ratios"][f"{other}/{first}"]) for other in others]} for r in each]})
    return Answer(_short(*own), method, limits, tables, [Picture(
        "projections", "Time over that of one product, Q, K and V side by side; whiskers: 95 % intervals.", "bars", {
            "title": "Projections and the order of heads", "panels": panels, "x": "time / time of one product, side by side",
            "reference": 1.0})])


def _label(record: Record) -> str:
    f = record["factors"]
    case = f"M{f['tokens']} d{f['d_model']}" if f["kind"] == "product" else "L{L} d{d_model} {algorithm} {direction}".format(**f)
    return f"{case} {f['threads']}T{' blas' * f.get('blas', False)}"


QUESTION = Question(
    NAME, "One projection or three, and the order of the heads",
    "Q, K and V by one product with a fused matrix or by three products? And in a row of the result Q | K | V side by side, or "
    "interleaved per head, (H, 3, D)?", trials, answer)
