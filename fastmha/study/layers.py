"""The layer as a whole: what the layout in which the projection writes heads does to `MultiHeadAttention`.

The arms are two modules with the same weights, ``layout="strided"``: one product for all heads, which lie side by side in
rows (B, L, heads · D), and ``layout="contiguous"``: a product for each head, into (B, heads, L, D). Neither packs anything.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np

from fastmha import analysis
from fastmha.algorithms import product_by_blas
from fastmha.multihead import MultiHeadAttention
from fastmha.planning import choose_layout
from fastmha.study import cases
from fastmha.study.answer import Answer, Found, Question, Record, by, lines, of, ratios, spread, table
from fastmha.study.cases import Layer
from fastmha.study.trial import LEAST_CALLS, TOLERANCE, Arms, Trial, agree, differs, timed
from fastmha.study.words import geomean, ratio_of, time_of

NAME = "layers"
PASSES = ("inference", "training")
QUICK_SECONDS, FULL_SECONDS = 0.5, 1.2
WITHIN = 1.03       # of the better layout


def arms(layer: Layer, what: str, num_threads: int, algorithm: str = "auto") -> dict[str, Callable[[], np.ndarray]]:
    """By layout: a forward without training, or a forward and a backward pass, with the output as its gradient."""
    X = np.random.default_rng(0).standard_normal((layer.B, layer.L, layer.d_model), np.dtype(layer.dtype).type)

    def arm(layout: str) -> Callable[[], np.ndarray]:
        m = MultiHeadAttention(layer.d_model, layer.H, num_kv_heads=layer.Hkv or None, dtype=layer.dtype, layout=layout,
                               algorithm=algorithm, rng=0)
        forward = partial(m.forward, X, is_causal=layer.causal, num_threads=num_threads)
        if what == "inference":
            return lambda: forward(training=False)
        return lambda: m.backward(forward(), num_threads=num_threads)

    return {layout: arm(layout) for layout in ("strided", "contiguous")}


def trial(layer: Layer, what: str, num_threads: int, seconds: float, algorithm: str = "auto") -> Trial:
    label = f"{layer.label} {what} {num_threads}T" + f" {algorithm}" * (algorithm != "auto")

    def checked() -> Arms:
        functions = arms(layer, what, num_threads, algorithm)
        agree(label, {name: {"result": function()} for name, function in functions.items()}, TOLERANCE[layer.dtype])
        return functions

    flops = analysis.count_flops(layer.B, layer.L, layer.d_model, layer.H, n_kv_heads=layer.Hkv or None, is_causal=layer.causal,
                                 backward=what == "training")
    calls = 2 * LEAST_CALLS
    tokens, pairs = layer.B * layer.L, layer.B * layer.L**2 * layer.d_model * (0.5 if layer.causal else 1.0)
    work = {"product": calls * 8 * tokens * layer.d_model**2 * (3 if what == "training" else 1),
            "tiled forward": calls * 4 * pairs, "tiled backward": calls * 10 * pairs * (what == "training")}
    single, wide = " 1T" * (num_threads == 1), np.dtype(layer.dtype).itemsize / 4
    return Trial(NAME, label, {**asdict(layer), "D": layer.D, "pass": what, "threads": num_threads, "algorithm": algorithm,
                              "by_blas": algorithm == "blas" or product_by_blas(2)},
                 timed(checked, [("strided", "contiguous")], flops=flops), seconds, 2 * flops,
                 {kind + single: wide * amount for kind, amount in work.items()})


def trials(quick: bool, num_threads: int) -> list[Trial]:
    seconds, layers = (QUICK_SECONDS, cases.QUICK_LAYERS) if quick else (FULL_SECONDS, cases.LAYERS)
    found = [trial(layer, what, num_threads, seconds) for layer in dict.fromkeys(layers) for what in PASSES]
    if not quick:
        centres = [Layer(1, L, 768, 12) for L in (128, 512, 1024)]
        found += [trial(layer, "inference", 1, seconds) for layer in centres]
        found += [trial(layer, what, num_threads, seconds, "blas") for layer in centres for what in PASSES]
    return found


def auto(record: Record) -> tuple[str, str]:
    """What ``layout="auto"`` chooses for the layer of a record, and why: by the rule, whatever was measured."""
    f = record["factors"]
    return choose_layout(f["L"], f["D"] * np.dtype(f["dtype"]).itemsize, f["by_blas"])


def costs(record: Record) -> dict[str, float]:
    """Time of auto's layout over that of the better one, as the interval of the ratio allows to say: "median", and "sure",
    which is 1 where the two do not differ and else the end of the interval that is kinder to auto."""
    ratio = record["ratios"]["strided/contiguous"]
    median, kind = ratio["median"], ratio["low"]
    if auto(record)[0] == "contiguous":
        median, kind = 1 / median, 1 / ratio["high"]
    return {"median": max(1.0, median), "sure": max(1.0, kind) if differs(ratio) else 1.0}


def auto_line(records: Sequence[Record]) -> str:
    """What "auto" costs against the better layout, and gains over always the one and always the other."""
    cost = [costs(r) for r in records]
    kept = sum(c["sure"] <= WITHIN for c in cost)
    worst = max(range(len(records)), key=lambda i: cost[i]["median"])
    over = [(r["ratios"]["strided/contiguous"]["median"], auto(r)[0]) for r in records]
    over_strided = geomean(x if layout == "contiguous" else 1.0 for x, layout in over)
    over_contiguous = geomean(1.0 if layout == "contiguous" else 1 / x for x, layout in over)
    return (f'"auto" takes {geomean(c["median"] for c in cost):.3f} of the time of the better layout (geometric mean of '
            f'{len(records)} layers); beyond the intervals it is within {WITHIN - 1:.0%} of the better in {kept} of '
            f'{len(records)} ({kept / len(records):.0%}); worst: {records[worst]["label"]}, {cost[worst]["median"]:.2f}. It is '
            f"{over_strided:.3f} times as fast as always strided, {over_contiguous:.3f} times as fast as always contiguous.")


def answer(records: Sequence[Record], found: Found) -> Answer:
    method = (" ".join(__doc__.split("\n\n", 1)[1].split()) + " The output of the forward pass is its own gradient. The rule "
              "behind \"auto\" is `fastmha.planning.choose_layout`.")
    limits = ("Self-attention; products by the library's own kernels but for the rows named blas. With other instruction sets, "
              "and on machines with other caches, the rule is the same and may be off.")
    layers = table("Layers", records, {
        "layer": lambda r: r["label"], "strided": time_of("strided"),
        "contiguous": time_of("contiguous"), "ratio": ratio_of("strided/contiguous"),
        "auto": lambda r: auto(r)[0], "its cost": lambda r: f"{costs(r)['median']:.2f}"},
        "median time per call; ratio: time strided over time contiguous within a round, with half its interval, = where there is "
        "none; last, the time of auto's layout over that of the better.")
    own = of(records, algorithm="auto", threads=found["threads"], dtype="float32", causal=False, Hkv=0, B=1, d_model=1024)
    own.sort(key=lambda r: (PASSES.index(r["factors"]["pass"]), r["factors"]["D"], r["factors"]["L"]))
    series = [spread(name, [r["factors"]["L"] for r in line], ratios(line, "strided/contiguous"))
              for name, line in by(own, lambda r: f"D {r['factors']['D']}, {r['factors']['pass']}").items() if len(line) > 1]
    return Answer(auto_line(records), method, limits, [layers], lines(
        "layer_over_length", "Above 1 the layer is faster where each head is written contiguous.",
        [{"title": "", "series": series, "reference": 1.0}],
        title="The whole layer, heads written side by side or by head, d_model 1024", x="L, tokens per batch row",
        y="time strided / time contiguous (no unit)", x_log2=True))


QUESTION = Question(
    NAME, 'The layer as a whole, and what "auto" chooses',
    "A projection can write heads side by side or each contiguous: which makes the whole layer faster, and does "
    'layout="auto" find it?', trials, answer)
