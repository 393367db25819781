"""The keys and values of past tokens: head-major, as `fastmha.KVCache` keeps them, against length-major.

Every arm goes through as many layers as hold `TURN_BYTES`, each with a cache of its own, as the layers of a model do, so that
what it reads comes from memory. In each layer: decode, one query per head over Lk keys; step, one token's keys and values to the
next slot, then decode; append, `TOKENS` tokens one after the other; chunk, `CHUNK` tokens at once, as a prompt is taken up;
KVCache.append, as append, by the library's own call.

Long and short calls are not in one trial: a short one would pay for what a long one before it has evicted.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np

from fastmha import algorithms
from fastmha.cache import KVCache
from fastmha.study.answer import Answer, Found, Question, Record, by, lines, of, ratios, spread, table
from fastmha.study.cases import Case
from fastmha.study.operands import problem
from fastmha.study.trial import LEAST_CALLS, Arms, Trial, checked, timed
from fastmha.study.words import geomean, rate_of, ratio_of, sides, time_text, times_text

NAME = "cache"
LAYOUTS = ("length-major", "head-major")        # compared: the first over the second
KINDS = {"decode": ("decode", "step"), "append": ("append",), "chunk": ("chunk",)}      # of a trial
TOKENS, CHUNK, ROOM = 16, 128, 256      # tokens one by one, at once, and slots behind the keys, which appends take in turn
TURN_BYTES, MOST_LAYERS, LARGEST_LAYER = 64 << 20, 256, 256 << 20
FACTORS = ("B", "H", "Hkv", "D", "Lk")
HEADS = ((8, 2, 64), (32, 8, 128), (16, 16, 64), (32, 32, 128))     # H, Hkv, D


def shape(B: int, H: int, Hkv: int, D: int, Lk: int) -> Case:
    """B rows of a batch, H query heads on Hkv key/value heads of width D, Lk keys each; one query, float32."""
    return Case(B, H, Hkv, 1, Lk, D, algorithm="decode")


def label(case: Case) -> str:
    return f"B{case.B} H{case.H}/{case.Hkv} D{case.D} Lk{case.Lk}"


def layers(case: Case) -> int:
    """How many take `TURN_BYTES` of keys and values to decode."""
    return max(1, min(MOST_LAYERS, -(-TURN_BYTES // case.packed_bytes("forward"))))


def head_major(case: Case, k: np.ndarray, v: np.ndarray) -> tuple[KVCache, np.ndarray, np.ndarray]:
    """A KVCache of Lk tokens and views (B, Hkv, capacity, D) of its buffers; k, v are (B, Hkv, capacity, D)."""
    cache = KVCache(case.B, case.Hkv, case.D, capacity=k.shape[2])
    cache.append(k, v)
    buffers = cache.k, cache.v
    cache.truncate(case.Lk)
    return cache, *buffers


def length_major(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """Views (B, Hkv, capacity, D) of buffers (B, capacity, Hkv, D) that hold the same."""
    return tuple(x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (k, v))


def prepare(case: Case, work: str, num_threads: int) -> Arms:
    """The arms of `KINDS`, by name, once their answers have been compared."""
    generator = np.random.default_rng(0)
    B, Hkv, D, Lk = case.B, case.Hkv, case.D, case.Lk
    q = generator.standard_normal((B, case.H, 1, D), np.float32)
    numbers = generator.standard_normal(1_000_003, np.float32)      # a prime, repeated: no two rows of a head are alike
    k, v = np.resize(numbers, (2, B, Hkv, Lk + ROOM, D))
    new_k, new_v = generator.standard_normal((2, B, CHUNK, Hkv, D), np.float32).swapaxes(2, 3)    # where a projection writes them
    caches, pairs = [], {name: [] for name in LAYOUTS}      # type: ignore[var-annotated]
    for _ in range(layers(case)):
        cache, *buffers = head_major(case, k, v)
        caches.append(cache)
        pairs["head-major"].append(buffers)
        pairs["length-major"].append(length_major(k, v))
    del k, v
    out = {name: np.zeros((B, case.H, 1, D), np.float32) for name in LAYOUTS}

    def decode(name: str, step: bool) -> Callable[[], None]:
        target, turn, token_k, token_v = out[name], count(), new_k[:, :, :1], new_v[:, :, :1]
        each = [(k, v, problem(q, k[:, :, :Lk], v[:, :, :Lk])) for k, v in pairs[name]]

        def run() -> None:
            slot = Lk + next(turn) % ROOM
            for k, v, read in each:
                if step:
                    k[:, :, slot:slot + 1], v[:, :, slot:slot + 1] = token_k, token_v
                algorithms.forward("decode", read, target, None, None, num_threads)
        return run

    def append(name: str, each: int) -> Callable[[], None]:
        turn, tokens = count(), max(each, TOKENS)

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

    make = {"decode": partial(decode, step=False), "step": partial(decode, step=True), "append": partial(append, each=1),
            "chunk": partial(append, each=CHUNK)}
    arms = {f"{name} {kind}": make[kind](name) for kind in KINDS[work] for name in LAYOUTS}
    if work == "append":
        arms["KVCache.append"] = library_append
    for kind in KINDS[work]:      # what an arm wrote, from zeros, in the last layer; what it read is the same in all
        written = {f"{name} {kind}": {"out": out[name], **dict(zip("kv", (x[:, :, Lk:] for x in pairs[name][-1])))}
                   for name in LAYOUTS}
        if kind == "append":
            written["KVCache.append"] = written["head-major append"]
        checked(f"{label(case)} {kind}", arms, written, "float32", before=0)
    return arms


def trial(work: str, case: Case, threads: int, seconds: float) -> Trial:
    ratios = [(f"{LAYOUTS[0]} {kind}", f"{LAYOUTS[1]} {kind}") for kind in KINDS[work]]
    if work == "append":
        ratios.append(("KVCache.append", "head-major append"))
    number, nbytes = layers(case), layers(case) * case.packed_bytes("forward")
    flops = case.flops("forward") * number if work == "decode" else 0
    measure = timed(lambda: prepare(case, work, threads), ratios, flops=flops, bytes=nbytes,
                    calls=number * (TOKENS if work == "append" else 1))
    factors = {"kind": work, **{name: getattr(case, name) for name in FACTORS}, "threads": threads, "dtype": case.dtype}
    filled = 2 * (nbytes + 8 * number * case.B * case.Hkv * ROOM * case.D)       # in two layouts
    least = {"fresh": 2 * filled, "read": 4 * LEAST_CALLS * nbytes * (work == "decode")}
    return Trial(NAME, f"{work} {label(case)} f32 {threads}T", factors, measure, seconds, 4 * flops, least)


def trials(quick: bool, num_threads: int) -> list[Trial]:
    """Appending takes one thread, whatever there are."""
    if quick:
        short = [shape(1, 32, 8, 128, 2048), shape(1, 16, 16, 64, 2048), shape(8, 32, 8, 128, 512)]
        return [*(trial("decode", shape(1, H, Hkv, D, Lk), num_threads, 0.3) for H, Hkv, D in ((32, 8, 128), (16, 16, 64))
                  for Lk in (512, 2048, 8192)),
                trial("decode", short[-1], num_threads, 0.3), trial("decode", short[0], 1, 0.3),
                *(trial(work, case, 1, 0.15) for work in ("append", "chunk") for case in short)]
    found = []
    for H, Hkv, D in HEADS:
        for B, lengths, threads in ((1, (512, 1024, 2048, 4096, 8192, 16384), num_threads), (8, (512, 2048), num_threads),
                                    (1, (2048, 8192), 1)):
            found += [trial("decode", shape(B, H, Hkv, D, Lk), threads, 0.6) for Lk in lengths
                      if shape(B, H, Hkv, D, Lk).packed_bytes("forward") <= LARGEST_LAYER]
        found += [trial(work, shape(B, H, Hkv, D, Lk), 1, 0.3) for work in ("append", "chunk")
                  for B, Lk in ((1, 512), (1, 2048), (1, 4096 - ROOM), (1, 4096), (8, 512))]
    return found


def _over(kind: str) -> str:
    return f"{LAYOUTS[0]} {kind}/{LAYOUTS[1]} {kind}"


def _each(record: Record, arm: str) -> float:
    """Seconds of one layer; of an append, of one token."""
    return float(record["arms"][arm]["median"] / record["calls"])


def _share(decodes: Sequence[Record], appends: Sequence[Record]) -> float:
    """What part of a head-major step appending is, on average over the shapes for which both are known; NaN without one."""
    same = [(_each(a, "head-major append"), _each(d, "head-major step")) for a in appends
            for d in of(decodes, **{key: a["factors"][key] for key in FACTORS})]
    return geomean(append / step for append, step in same)


def _short(decodes: Sequence[Record], appends: Sequence[Record], chunks: Sequence[Record]) -> str:
    sentences = []
    if decodes:
        won, lost = sides(ratios(decodes, _over("step")))
        winner = "Head-major wins" if won > lost else "Length-major wins" if lost > won else "Neither layout wins"
        sentences.append(f"{winner} a step of one append and one decode: head-major is faster in {won}, length-major in {lost} "
                         f"of {len(decodes)} cases.")
    parts = [f"{what} {times_text(ratios(own, _over(kind)))}" for own, kind, what in (
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
    decodes, appends, chunks = (of(records, kind=kind) for kind in KINDS)

    def time(arm: str) -> Callable[[Record], str]:
        return lambda r: time_text(_each(r, arm))

    case = {"case": _label, "Lk": lambda r: str(r["factors"]["Lk"])}
    tables = [table("Decoding over a cache", decodes, {
        **case, "decode": ratio_of(_over("decode")), "step": ratio_of(_over("step")),
        "decode head-major": time("head-major decode"), "GB/s": rate_of("head-major decode", "bytes")},
        "Decode, step: time length-major over head-major. Then time of a layer, and keys and values that it reads per second.")]
    for own, kind, title in ((appends, "append", "Appending a token"), (chunks, "chunk", f"Appending {CHUNK} tokens at once")):
        more = {"KVCache.append": time("KVCache.append")} if kind == "append" else {}
        tables.append(table(title, own, {**case, "length/head": ratio_of(_over(kind)), "head-major": time(f"head-major {kind}"),
                                         "length-major": time(f"length-major {kind}"), **more},
                            "Time length-major over head-major; then times per layer, keys and values."))
    method = (
        "float32. Head-major is (B, Hkv, capacity, D), the buffers of a fastmha.KVCache; length-major (B, capacity, Hkv, D). "
        f"Each call goes through up to {MOST_LAYERS} layers with a cache each, as many as hold {TURN_BYTES >> 20} MiB of keys "
        "and values, so that they come from memory. Appended is from where a fused projection writes, by NumPy assignment in "
        f"both, to the next of {ROOM} slots behind the keys; decoding reads the same Lk keys in every round, one query per head. "
        "KVCache.append does what assignment does, with its checks. Means are geometric.")
    cached = max(found.get("machine", {}).get("caches", {}).values(), default=0)
    limits = (
        f"Between two turns of a cache {2 * TURN_BYTES >> 20} MiB pass, less for very small ones"
        + (f"; the last cache here holds {cached >> 20} MiB" if cached else "")
        + ". An assignment in NumPy costs some time whatever it copies, which hides a part of the difference where a token is "
        f"small. The capacity is Lk + {ROOM}; head-major, where that is a power of two, the newest slots of all heads meet in "
        "the same cache sets.")
    threads = found["threads"]
    in_all, named = of(decodes, threads=threads), f", {threads} thread{'s' * (threads > 1)}"
    panels = []
    for title, own, kind in ((f"step{named}", in_all, "step"), (f"decode{named}", in_all, "decode"),
                             ("append a token", appends, "append"), (f"append {CHUNK} tokens", chunks, "chunk")):
        series = by(sorted(own, key=lambda r: r["factors"]["Lk"]), lambda r: _label(r).partition(f" {threads}T")[0])
        panels.append({"title": title, "reference": 1.0, "series": [
            spread(name, [r["factors"]["Lk"] for r in line], ratios(line, _over(kind))) for name, line in series.items()]})
    return Answer(_short(decodes, appends, chunks), method, limits, tables, lines(
        "cache", "Length-major over head-major, by the number of cached tokens; above 1, head-major is faster.", panels,
        title="A KV cache: length-major over head-major", x="cached tokens Lk", y="time length-major / time head-major",
        x_log2=True))


QUESTION = Question(
    NAME, "The KV cache: head-major or length-major",
    "Keys and values of past tokens head by head or token by token: which is faster to append to, which to decode over?", trials,
    answer)
