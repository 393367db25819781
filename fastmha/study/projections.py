"""The projections of Q, K and V: as one product or as three, and where in the rows of the result the heads lie.

Products of tokens X (M, d) and weights, M the tokens of all batch rows:

    one product     X @ W with W (d, 3d) into one buffer (M, 3d)
    three products  with the columns of a W like that, into the columns of a buffer like that
    three arrays    with three weights (d, d), into three arrays (M, d)

Attention on heads of the same numbers:

    side by side    rows of 3d, head h of q at h·D, those of k and v d and 2d further: what X @ (W_Q | W_K | W_V) writes
    interleaved     rows of 3d, q, k and v of head h together from 3·h·D on, (H, 3, D): the same product with W's columns permuted
    separate        three arrays, rows of d
    packed          each head contiguous

And both together, forward: product or products, then attention where they wrote; "packed" packs keys and values in between,
"one product a head" takes the fused matrix head by head, and writes each contiguous.
Each arm has weights of its own, as warm as those of the others.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastmha import algorithms, validate
from fastmha.study.answer import Answer, Found, Picture, Record, Table, geomean, of, ratio_text, time_text, times_text
from fastmha.study.cases import Case, case
from fastmha.study.heads import least
from fastmha.study.machine import memory
from fastmha.study.trial import LEAST_CALLS, TOLERANCE, Arms, Trial, agree, timed

NAME = "projections"
TITLE = "One projection or three, and the order of the heads"
QUESTION = ("Q, K and V by one product with a fused matrix or by three products? And in a row of the result Q | K | V side by "
            "side, or interleaved per head, (H, 3, D)?")
NEEDS: tuple[str, ...] = ()
D = 64
TOKENS, D_MODELS = (1, 16, 128, 512, 2048), (768, 1024, 2048)
PRODUCTS = ("one product", "three products", "three arrays")
LAYOUTS = ("side by side", "interleaved", "separate", "packed")
LAYERS = ("side by side", "interleaved", "three products", "three arrays", "packed", "one product a head")
_PLANNED_FLOPS = 1e11       # a second, to plan trials in which five rounds take longer than the others


def _matrix(generator: np.random.Generator, rows: int, columns: int, dtype: str) -> np.ndarray:
    found = memory(rows * columns * np.dtype(dtype).itemsize).view(dtype).reshape(rows, columns)
    generator.standard_normal(out=found, dtype=found.dtype.type)
    return found


def _copy(x: np.ndarray) -> np.ndarray:
    found = memory(x.nbytes).view(x.dtype).reshape(x.shape)
    found[...] = x
    return found


# ---------------------------------------------------------------------------------------------- the products

def columns(fused: np.ndarray) -> list[np.ndarray]:
    """The three views (rows, d) of a matrix (rows, 3d)."""
    d = fused.shape[1] // 3
    return [fused[:, i * d:(i + 1) * d] for i in range(3)]


def product_arms(tokens: int, d: int, num_threads: int, blas: bool = False, dtype: str = "float32") -> Arms:
    """The arms of the products, once their answers have been compared."""
    generator = np.random.default_rng(0)
    x, w = _matrix(generator, tokens, d, dtype), _matrix(generator, d, 3 * d, dtype)
    w /= np.sqrt(d, dtype=w.dtype)
    size = 3 * tokens * d * w.itemsize
    fused, parts = (memory(size).view(dtype).reshape(tokens, 3 * d) for _ in range(2))
    arrays = memory(size).view(dtype).reshape(3, tokens, d)
    of_parts, of_arrays = columns(_copy(w)), [_copy(part) for part in columns(w)]

    def products(weights: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        for weight, out in zip(weights, outs):
            algorithms.product(x, weight, out, num_threads, blas=blas)

    arms = {"one product": lambda: products([w], [fused]), "three products": lambda: products(of_parts, columns(parts)),
            "three arrays": lambda: products(of_arrays, list(arrays))}
    results = {"one product": columns(fused), "three products": columns(parts), "three arrays": list(arrays)}
    by_name = {name: dict(zip("QKV", found)) for name, found in results.items()}
    _compare(f"projection of {tokens} tokens, d_model {d}", arms, by_name, dtype)
    return arms


def _compare(label: str, arms: Arms, results: Mapping[str, Mapping[str, np.ndarray]], dtype: str) -> None:
    """Call each arm once on results that are NaN before, and compare them."""
    answers = {}
    for name, arrays in results.items():
        for array in arrays.values():
            array[...] = np.nan         # what an arm leaves out shows
        arms[name]()
        answers[name] = {key: array.copy() for key, array in arrays.items()}
    agree(label, answers, TOLERANCE[dtype])


# ---------------------------------------------------------------------------------------------- attention

def lay(layout: str, of: Case) -> tuple[np.ndarray, list[np.ndarray]]:
    """Memory for q, k and v in a layout, whole, and the views (1, H, L, D) of the three."""
    L, H = of.Lq, of.H
    whole = memory(3 * L * H * of.D * of.itemsize).view(of.dtype)
    if layout == "side by side":
        views = whole.reshape(L, 3, H, of.D).transpose(1, 2, 0, 3)
    elif layout == "interleaved":
        views = whole.reshape(L, H, 3, of.D).transpose(2, 1, 0, 3)
    elif layout == "separate":
        views = whole.reshape(3, L, H, of.D).transpose(0, 2, 1, 3)
    else:
        views = whole.reshape(3, H, L, of.D)
    return whole, [view[None] for view in views]


def _merged(of: Case) -> np.ndarray:
    """A view (1, H, L, D) of a merged buffer (L, H·D)."""
    return np.zeros((of.Lq, of.H, of.D), of.dtype).transpose(1, 0, 2)[None]


def _problem(views: Sequence[np.ndarray]) -> algorithms.Problem:
    q, k, v = views
    return validate.attention_problem(q, k, v, "BHLD")


def attention_arms(of: Case, direction: str, num_threads: int) -> Arms:
    """The arms of attention on heads in four layouts, once their answers have been compared."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal((3, 1, of.H, of.Lq, of.D), np.dtype(of.dtype).type)
    grad_out, out = _merged(of), _merged(of)
    grad_out[...] = generator.standard_normal(out.shape, values.dtype.type)
    lse = np.empty((1, of.H, of.Lq), of.dtype)

    def arm(layout: str) -> tuple[Callable[[], None], dict[str, np.ndarray]]:
        views = lay(layout, of)[1]
        for view, value in zip(views, values):
            view[...] = value
        problem, (grad_q, grad_k, grad_v) = _problem(views), lay(layout, of)[1]

        def forward() -> None:
            algorithms.forward(of.algorithm, problem, out, lse, None, num_threads)

        if direction == "forward":
            return forward, {"out": out, "lse": lse}
        forward()       # backward reads its out and lse
        return (lambda: algorithms.backward(of.algorithm, problem, out, lse, grad_out, grad_q, grad_k, grad_v, num_threads),
                {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v})

    made = {layout: arm(layout) for layout in LAYOUTS}
    arms = {layout: function for layout, (function, _) in made.items()}
    _compare(f"{of.name} {direction}", arms, {layout: results for layout, (_, results) in made.items()}, of.dtype)
    return arms


def layer_arms(of: Case, num_threads: int) -> Arms:
    """The arms of product and attention together, once their answers have been compared."""
    generator = np.random.default_rng(0)
    L, H, d = of.Lq, of.H, of.H * of.D
    x, w = _matrix(generator, L, d, of.dtype), _matrix(generator, d, 3 * d, of.dtype)
    w /= np.sqrt(d, dtype=w.dtype)
    out, lse = _merged(of), np.empty((1, H, L), of.dtype)

    def arm(name: str) -> Callable[[], None]:
        others = {"interleaved": "interleaved", "three arrays": "separate", "one product a head": "packed"}
        layout = others.get(name, "side by side")
        whole, views = lay(layout, of)
        problem = _problem(views)
        if name == "three arrays":
            pairs = [(_copy(part), array) for part, array in zip(columns(w), whole.reshape(3, L, d))]
        elif name == "three products":
            pairs = list(zip(columns(_copy(w)), columns(whole.reshape(L, 3 * d))))
        elif name == "one product a head":
            pairs = [(_copy(w), whole.reshape(1, 3 * H, L, of.D))]
        elif name == "interleaved":
            pairs = [(_copy(w.reshape(d, 3, H, of.D).transpose(0, 2, 1, 3)).reshape(d, 3 * d), whole.reshape(L, 3 * d))]
        else:
            pairs = [(_copy(w), whole.reshape(L, 3 * d))]

        def run() -> None:
            for weight, target in pairs:
                algorithms.product(x, weight, target, num_threads)
            ready = problem
            if name == "packed":
                ready = problem.with_heads(problem.q, *algorithms.packed(num_threads, problem.k, problem.v))
            algorithms.forward(of.algorithm, ready, out, lse, None, num_threads)
        return run

    arms = {name: arm(name) for name in LAYERS}
    _compare(f"layer {of.name}", arms, {name: {"out": out, "lse": lse} for name in LAYERS}, of.dtype)
    return arms


# ---------------------------------------------------------------------------------------------- trials

def _trial(kind: str, label: str, factors: Mapping[str, Any], names: Sequence[str], prepare: Callable[[], Arms], flops: int,
           seconds: float, work: Mapping[str, float]) -> Trial:
    """`work`: of one arm, called once."""
    first, *others = names
    seconds = max(seconds, 5 * len(names) * flops / _PLANNED_FLOPS)
    measure = timed(prepare, [(other, first) for other in others], flops=flops)
    return Trial(NAME, f"{kind} {label}", {"kind": kind, **factors}, measure, seconds, len(names) * flops,
                 {name: LEAST_CALLS * len(names) * amount for name, amount in work.items()})


def product(tokens: int, d: int, threads: int, seconds: float, blas: bool = False) -> Trial:
    factors = {"tokens": tokens, "d_model": d, "threads": threads, "blas": blas, "dtype": "float32"}
    return _trial("product", f"M{tokens} d{d} f32 {threads}T{' blas' * blas}", factors, PRODUCTS,
                  lambda: product_arms(tokens, d, threads, blas), 2 * tokens * d * 3 * d, seconds, _products(tokens, d, threads))


def _products(tokens: int, d: int, threads: int) -> dict[str, float]:
    return {f"product{' 1T' * (threads == 1)}": 2 * tokens * d * 3 * d}


def _factors(of: Case, direction: str, threads: int) -> dict[str, Any]:
    return {"L": of.Lq, "d_model": of.H * of.D, "D": of.D, "algorithm": of.algorithm, "direction": direction, "threads": threads,
            "dtype": of.dtype}


def attention(of: Case, direction: str, threads: int, seconds: float) -> Trial:
    return _trial("attention", f"{of.name} {direction} {threads}T", _factors(of, direction, threads), LAYOUTS,
                  lambda: attention_arms(of, direction, threads), of.flops(direction), seconds, least(of, direction, 1, threads))


def layer(of: Case, threads: int, seconds: float) -> Trial:
    d = of.H * of.D
    return _trial("layer", f"{of.name} {threads}T", _factors(of, "forward", threads), LAYERS, lambda: layer_arms(of, threads),
                  2 * of.Lq * d * 3 * d + of.flops("forward"), seconds,
                  {**_products(of.Lq, d, threads), **least(of, "forward", 1, threads)})


def _case(d: int, L: int, algorithm: str) -> Case:
    of = case(1, d // D, L, D)
    return Case(**{**of.__dict__, "algorithm": algorithm})


def trials(quick: bool, num_threads: int) -> list[Trial]:
    """The trials of the quick or the full study with so many threads."""
    if quick:
        return [*(product(tokens, 768, num_threads, 0.25) for tokens in TOKENS),
                *(product(tokens, 1024, num_threads, 0.25) for tokens in (1, 512)),
                product(512, 768, num_threads, 0.25, blas=True),
                *(attention(_case(768, L, name), "forward", num_threads, 0.25) for name in ("tiled", "blas") for L in (128, 512)),
                attention(_case(768, 1024, "tiled"), "forward", num_threads, 0.25),
                attention(_case(1024, 512, "tiled"), "forward", num_threads, 0.25),
                *(attention(_case(768, 512, name), "backward", num_threads, 0.25) for name in ("tiled", "blas")),
                *(layer(_case(d, L, "tiled"), num_threads, 0.3) for d, L in ((768, 128), (768, 512), (1024, 512)))]
    both = [(_case(d, L, name), direction) for d in (768, 1024) for L in (128, 512, 1024, 2048) for name in ("tiled", "blas")
            for direction in ("forward", "backward") if direction == "forward" or L <= 1024]
    found = [*(product(tokens, d, num_threads, 0.8) for d in D_MODELS for tokens in TOKENS),
             product(512, 768, num_threads, 0.8, blas=True),
             *(product(tokens, 768, 1, 0.5) for tokens in (1, 16, 512)),
             *(attention(of, direction, num_threads, 0.9) for of, direction in both),
             *(layer(_case(d, L, "tiled"), num_threads, 1.2) for d in (768, 1024) for L in (128, 512, 1024, 2048))]
    return list({t.label: t for t in found}.values())      # with one thread, "one" and "all" are the same


# ---------------------------------------------------------------------------------------------- answer

def _ratios(records: Sequence[Record], ratio: str) -> list[Mapping[str, float]]:
    return [r["ratios"][ratio] for r in records]


def _against(records: Sequence[Record], names: Sequence[str]) -> str:
    """The times of all others over the first, in words."""
    first, *others = names
    return ", ".join(f"{other} {times_text(_ratios(records, f'{other}/{first}'))}" for other in others)


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
        ratios = _ratios(layers, f"{other}/{first}")
        faster = [(ratio["median"], other, record) for ratio, record in zip(ratios, layers) if ratio["high"] < 1]
        mean = geomean(ratio["median"] for ratio in ratios)
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


def answer(found: Found) -> Answer | None:
    """What the projections cost and the layouts they leave; None without its records."""
    records = [r for r in found["records"] if r["question"] == NAME]
    if not records:
        return None
    products, attentions, layers = (of(records, kind=kind) for kind in ("product", "attention", "layer"))
    tables, panels = [], []
    for title, own, names in (("One product or three", products, PRODUCTS), ("Attention on what they leave", attentions, LAYOUTS),
                              ("Projection and attention together", layers, LAYERS)):
        if own:
            tables.append(_table(title, own, names))
            panels.append(_panel(title, own, names))
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
    caption = "Time over that of one product, Q, K and V side by side; whiskers: 95 % intervals."
    picture = Picture("projections", caption, "bars", {
        "title": "Projections and the order of heads", "panels": panels, "x": "time / time of one product, side by side",
        "reference": 1.0})
    return Answer(_short(products, attentions, layers), method, limits, tables, [picture])


def _label(record: Record) -> str:
    f = record["factors"]
    if f["kind"] == "product":
        return f"M{f['tokens']} d{f['d_model']} {f['threads']}T{' blas' * f['blas']}"
    return f"L{f['L']} d{f['d_model']} {f['algorithm']} {f['direction']} {f['threads']}T"


def _table(title: str, records: Sequence[Record], names: Sequence[str]) -> Table:
    first, *others = names
    rows = [[_label(r), time_text(r["arms"][first]["median"]), f"{r['flops'] / r['arms'][first]['median'] / 1e9:.0f}",
             *(ratio_text(r["ratios"][f"{other}/{first}"]) for other in others)] for r in records]
    return Table(title, ["case", first, "GFLOP/s", *others], rows, f"Time and speed, {first}; then times over it.")


def _panel(title: str, records: Sequence[Record], names: Sequence[str]) -> dict[str, Any]:
    first, *others = names
    rows = [{"label": _label(r), "values": [{"name": other, "value": ratio["median"], "low": ratio["low"], "high": ratio["high"]}
                                            for other, ratio in ((o, r["ratios"][f"{o}/{first}"]) for o in others)]}
            for r in records]
    return {"title": title, "rows": rows}
