"""The keys and values of past tokens: head-major, as `fastmha.KVCache` keeps them, against length-major.

Every arm goes through as many layers as hold `TURN_BYTES`, each with a cache of its own, as the layers of a model do, so that
what it reads comes from memory. In each layer: decode, one query a head over Lk keys; step, one token's keys and values to the
next slot, then decode; append, `TOKENS` tokens one after the other; chunk, `CHUNK` tokens at once, as a prompt is taken up;
KVCache.append, as append, by the library's own call.

Long and short calls are not in one trial: a short one would pay for what a long one before it has evicted.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import numpy as np

from fastmha import algorithms
from fastmha.cache import KVCache
from fastmha.study.answer import Answer, Found, Picture, Question, Record, by, lines, of, ratios, spread, table
from fastmha.study.operands import problem
from fastmha.study.trial import LEAST_CALLS, Arms, Trial, checked, timed
from fastmha.study.words import geomean, rate_of, ratio_text, sides, time_text, times_text

NAME = "cache"
LAYOUTS = ("length-major", "head-major")        # compared: the first over the second
TOKENS, CHUNK, ROOM = 16, 128, 256      # tokens one by one, at once, and slots behind the keys, which appends take in turn
TURN_BYTES, MOST_LAYERS, LARGEST_LAYER = 64 << 20, 256, 256 << 20
HEADS = ((8, 2, 64), (32, 8, 128), (16, 16, 64), (32, 32, 128))     # H, Hkv, D


@dataclass(frozen=True)
class Shape:
    """B rows of a batch, H query heads on Hkv key/value heads of width D, Lk keys each; float32."""

    B: int
    H: int
    Hkv: int
    D: int
    Lk: int

    @property
    def label(self) -> str:
        return f"B{self.B} H{self.H}/{self.Hkv} D{self.D} Lk{self.Lk}"

    @property
    def layer_bytes(self) -> int:
        """Bytes of the keys and values that a layer's decoding reads."""
        return 2 * 4 * self.B * self.Hkv * self.Lk * self.D

    @property
    def layers(self) -> int:
        return max(1, min(MOST_LAYERS, -(-TURN_BYTES // self.layer_bytes)))

    @property
    def flops(self) -> int:
        """Operations of decoding one layer: two products."""
        return 4 * self.B * self.H * self.Lk * self.D


def head_major(shape: Shape, k: np.ndarray, v: np.ndarray) -> tuple[KVCache, np.ndarray, np.ndarray]:
    """A KVCache of Lk tokens and views (B, Hkv, capacity, D) of its buffers; k, v are (B, Hkv, capacity, D)."""
    cache = KVCache(shape.B, shape.Hkv, shape.D, capacity=k.shape[2])
    cache.append(k, v)
    buffers = cache.k, cache.v
    cache.truncate(shape.Lk)
    return cache, *buffers


def length_major(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views (B, Hkv, capacity, D) of buffers (B, capacity, Hkv, D) that hold the same."""
    B, Hkv, capacity, D = k.shape
    buffers = [np.empty((B, capacity, Hkv, D), k.dtype).swapaxes(1, 2) for _ in range(2)]
    for buffer, x in zip(buffers, (k, v)):
        buffer[...] = x
    return buffers[0], buffers[1]


def prepare(shape: Shape, work: str, num_threads: int) -> Arms:
    """The arms of decode and step, of append, or of chunk, by name, once their answers have been compared."""
    generator = np.random.default_rng(0)
    B, Hkv, D, Lk = shape.B, shape.Hkv, shape.D, shape.Lk
    q = generator.standard_normal((B, shape.H, 1, D), np.float32)
    numbers = generator.standard_normal(1_000_003, np.float32)      # a prime, repeated: no two rows of a head are alike
    k, v = np.resize(numbers, (2, B, Hkv, Lk + ROOM, D))
    new_k, new_v = generator.standard_normal((2, B, CHUNK, Hkv, D), np.float32).swapaxes(2, 3)    # where a projection writes them
    caches, pairs = [], {name: [] for name in LAYOUTS}      # type: ignore[var-annotated]
    for _ in range(shape.layers):
        cache, *buffers = head_major(shape, k, v)
        caches.append(cache)
        pairs["head-major"].append(buffers)
        pairs["length-major"].append(length_major(k, v))
    del k, v
    out = {name: np.zeros((B, shape.H, 1, D), np.float32) for name in LAYOUTS}

    def decode(name: str, step: bool) -> Callable[[], None]:
        target, turn, token_k, token_v = out[name], count(), new_k[:, :, :1], new_v[:, :, :1]
        layers = [(k, v, problem(q, k[:, :, :Lk], v[:, :, :Lk])) for k, v in pairs[name]]

        def run() -> None:
            slot = Lk + next(turn) % ROOM
            for k, v, read in layers:
                if step:
                    k[:, :, slot:slot + 1], v[:, :, slot:slot + 1] = token_k, token_v
                algorithms.forward("decode", read, target, None, None, num_threads)
        return run

    def append(name: str, each: int, tokens: int) -> Callable[[], None]:
        turn = count()

        def run() -> None:
            slot = Lk + next(turn) * tokens % ROOM
            for first in range(0, tokens, each):
                for k, v in pairs[name]:
                    k[:, :, slot + first:slot + first + each] = new_k[:, :, first:first + each]
                    v[:, :, slot + first:slot + first + each] = new_v[:, :, first:first + each]
        return run

    def library_append() -> None:
        for first in range(TOKENS):
            for cache in caches:
                if cache.length == cache.capacity:
                    cache.truncate(Lk)
                cache.append(new_k[:, :, first:first + 1], new_v[:, :, first:first + 1])

    kinds = ("decode", "step") if work == "decode" else (work,)
    make = {"decode": lambda name: decode(name, False), "step": lambda name: decode(name, True),
            "append": lambda name: append(name, 1, TOKENS), "chunk": lambda name: append(name, CHUNK, CHUNK)}
    arms = {f"{name} {kind}": make[kind](name) for kind in kinds for name in LAYOUTS}
    if work == "append":
        arms["KVCache.append"] = library_append
    for kind in kinds:      # what an arm wrote, from zeros, in the last layer; what it read is the same in all
        written = {f"{name} {kind}": {"out": out[name], **dict(zip("kv", (x[:, :, Lk:] for x in pairs[name][-1])))}
                   for name in LAYOUTS}
        if kind == "append":
            written["KVCache.append"] = written["head-major append"]
        checked(f"{shape.label} {kind}", arms, written, "float32", before=0)
    return arms


# ---------------------------------------------------------------------------------------------- trials

def trial(work: str, shape: Shape, threads: int, seconds: float) -> Trial:
    """"decode" (with "step"), "append" or "chunk"."""
    kinds = ("decode", "step") if work == "decode" else (work,)
    ratios = [(f"{LAYOUTS[0]} {kind}", f"{LAYOUTS[1]} {kind}") for kind in kinds]
    if work == "append":
        ratios.append(("KVCache.append", "head-major append"))
    flops = shape.flops * shape.layers if work == "decode" else 0
    measure = timed(lambda: prepare(shape, work, threads), ratios, flops=flops, bytes=shape.layer_bytes * shape.layers,
                    calls=shape.layers * (TOKENS if work == "append" else 1))
    factors = {"kind": work, **asdict(shape), "threads": threads, "dtype": "float32"}
    filled = 2 * shape.layers * (shape.layer_bytes + 8 * shape.B * shape.Hkv * ROOM * shape.D)       # in two layouts
    least = {"fresh": 2 * filled, "read": 4 * LEAST_CALLS * shape.layer_bytes * shape.layers * (work == "decode")}
    return Trial(NAME, f"{work} {shape.label} f32 {threads}T", factors, measure, seconds, 4 * flops, least)


def trials(quick: bool, num_threads: int) -> list[Trial]:
    """The trials of the quick or the full study with so many threads. Appending takes one thread, whatever there are."""
    if quick:
        short = [Shape(1, 32, 8, 128, 2048), Shape(1, 16, 16, 64, 2048), Shape(8, 32, 8, 128, 512)]
        return [*(trial("decode", Shape(1, H, Hkv, D, Lk), num_threads, 0.3) for H, Hkv, D in ((32, 8, 128), (16, 16, 64))
                  for Lk in (512, 2048, 8192)),
                trial("decode", short[-1], num_threads, 0.3), trial("decode", short[0], 1, 0.3),
                *(trial(work, shape, 1, 0.15) for work in ("append", "chunk") for shape in short)]
    found = []
    for H, Hkv, D in HEADS:
        for B, lengths, threads in ((1, (512, 1024, 2048, 4096, 8192, 16384), num_threads), (8, (512, 2048), num_threads),
                                    (1, (2048, 8192), 1)):
            found += [trial("decode", Shape(B, H, Hkv, D, Lk), threads, 0.6) for Lk in lengths
                      if Shape(B, H, Hkv, D, Lk).layer_bytes <= LARGEST_LAYER]
        found += [trial(work, Shape(B, H, Hkv, D, Lk), 1, 0.3) for work in ("append", "chunk")
                  for B, Lk in ((1, 512), (1, 2048), (1, 4096 - ROOM), (1, 4096), (8, 512))]
    return found


# ---------------------------------------------------------------------------------------------- answer

def _ratios(records: Sequence[Record], kind: str) -> list[Mapping[str, float]]:
    return ratios(records, f"{LAYOUTS[0]} {kind}/{LAYOUTS[1]} {kind}")


def _each(record: Record, arm: str) -> float:
    """Seconds of one layer; of an append, of one token."""
    return float(record["arms"][arm]["median"] / record["calls"])


def _share(decodes: Sequence[Record], appends: Sequence[Record]) -> float:
    """What part of a head-major step appending is, on average over the shapes for which both are known; NaN without one."""
    same = [(_each(a, "head-major append"), _each(d, "head-major step")) for a in appends
            for d in of(decodes, **{key: a["factors"][key] for key in ("B", "H", "Hkv", "D", "Lk")})]
    return geomean(append / step for append, step in same)


def _short(decodes: Sequence[Record], appends: Sequence[Record], chunks: Sequence[Record]) -> str:
    sentences = []
    if decodes:
        won, lost = sides(_ratios(decodes, "step"))
        winner = "Head-major wins" if won > lost else "Length-major wins" if lost > won else "Neither layout wins"
        sentences.append(f"{winner} a step of one append and one decode: head-major is faster in {won}, length-major in {lost} "
                         f"of {len(decodes)} cases.")
    parts = [f"{what} {times_text(_ratios(own, kind))}" for own, kind, what in (
        (decodes, "step", "the step"), (decodes, "decode", "decoding"), (appends, "append", "appending a token"),
        (chunks, "chunk", f"appending {CHUNK} tokens at once")) if own]
    sentences.append(f"Time length-major over head-major: {', '.join(parts)}.")
    share = _share(decodes, appends)
    if share == share:
        decides = ", so decoding decides" if share < 0.1 else ""
        sentences.append(f"Appending is {100 * share:.2g} % of a head-major step on average{decides}.")
    return " ".join(sentences)


def _label(record: Record) -> str:
    f = record["factors"]
    return f"B{f['B']} H{f['H']}/{f['Hkv']} D{f['D']}" + (f" {f['threads']}T" if f["kind"] == "decode" else "")


def answer(records: Sequence[Record], found: Found) -> Answer:
    """What the layout of a cache costs."""
    decodes, appends, chunks = (of(records, kind=kind) for kind in ("decode", "append", "chunk"))

    def ratio(kind: str) -> Callable[[Record], str]:
        return lambda r: ratio_text(_ratios([r], kind)[0])

    def time(arm: str) -> Callable[[Record], str]:
        return lambda r: time_text(_each(r, arm))

    case = {"case": _label, "Lk": lambda r: str(r["factors"]["Lk"])}
    tables = [table("Decoding over a cache", decodes, {
        **case, "decode": ratio("decode"), "step": ratio("step"), "decode head-major": time("head-major decode"),
        "GB/s": rate_of("head-major decode", "bytes")},
        "Decode, step: time length-major over head-major. Then time of a layer, and keys and values that it reads a second.")]
    for own, kind, title in ((appends, "append", "Appending a token"), (chunks, "chunk", f"Appending {CHUNK} tokens at once")):
        more = {"KVCache.append": time("KVCache.append")} if kind == "append" else {}
        tables.append(table(title, own, {**case, "length/head": ratio(kind), "head-major": time(f"head-major {kind}"),
                                         "length-major": time(f"length-major {kind}"), **more},
                            "Time length-major over head-major; then times per layer, keys and values."))
    method = (
        "float32. Head-major is (B, Hkv, capacity, D), the buffers of a fastmha.KVCache; length-major (B, capacity, Hkv, D). "
        f"Each call goes through up to {MOST_LAYERS} layers with a cache each, as many as hold {TURN_BYTES >> 20} MiB of keys "
        "and values, so that they come from memory. Appended is from where a fused projection writes, by NumPy assignment in "
        f"both, to the next of {ROOM} slots behind the keys; decoding reads the same Lk keys in every round, one query a head. "
        "KVCache.append does what assignment does, with its checks. Means are geometric.")
    cached = max(found.get("machine", {}).get("caches", {}).values(), default=0)
    limits = (
        f"Between two turns of a cache {2 * TURN_BYTES >> 20} MiB pass, less for very small ones"
        + (f"; the last cache here holds {cached >> 20} MiB" if cached else "")
        + ". An assignment in NumPy costs some time whatever it copies, which hides a part of the difference where a token is "
        f"small. The capacity is Lk + {ROOM}; head-major, where that is a power of two, the newest slots of all heads meet in "
        "the same cache sets.")
    return Answer(_short(decodes, appends, chunks), method, limits, [t for t in tables if t.rows])


def pictures(records: Sequence[Record], found: Found) -> list[Picture]:
    threads = found["threads"]
    decodes, named = of(records, kind="decode", threads=threads), f", {threads} thread{'s' * (threads > 1)}"
    panels = [_panel(title, own, kind) for own, kind, title in (
        (decodes, "step", f"step{named}"), (decodes, "decode", f"decode{named}"),
        (of(records, kind="append"), "append", "append a token"), (of(records, kind="chunk"), "chunk", f"append {CHUNK} tokens"))]
    return lines("cache", "Length-major over head-major, by the number of cached tokens; above 1, head-major is faster.", panels,
                 title="A KV cache: length-major over head-major", x="cached tokens Lk",
                 y="time length-major / time head-major", x_log2=True)


def _panel(title: str, records: Sequence[Record], work: str) -> dict[str, Any]:
    ordered = sorted(records, key=lambda r: r["factors"]["Lk"])
    series = by(ordered, lambda r: _label(r).partition(f" {r['factors']['threads']}T")[0])
    return {"title": title, "reference": 1.0, "series": [
        spread(name, [r["factors"]["Lk"] for r in own], _ratios(own, work)) for name, own in series.items()]}


QUESTION = Question(
    NAME, "The KV cache: head-major or length-major",
    "Keys and values of past tokens head by head or token by token: which is faster to append to, which to decode over?", trials,
    answer, pictures)
