"""Which algorithm runs and why: pure functions of lengths, widths, groups, dtype and instruction set, and of what is asked for.

Nothing here looks at values of q, k, v or of a mask, at the batch size or at the number of threads where bits could depend on it
(a batch row's bits must not depend on its neighbours).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from fastmha import _core, tuning, validate
from fastmha._core import Problem
from fastmha.algorithms import ALGORITHMS, AUTO, BLAS, BY_NAME, DECODE, TILED, Algorithm, copied_for_blas
from fastmha.precision import how, parts_of
from fastmha.tuning import Tuning

ITEM = np.dtype([(name, np.intp) for name in ("b", "head", "row", "rows", "key", "keys")])      # of `_core.items`

OF_ONE_KEY: Mapping[str, str] = MappingProxyType({
    BLAS.name: "one key, whose weight is 1 whatever its score: gradients of the score are exactly 0 by its own sums of P and dP",
    TILED.name: "it leaves the rounding of two sums there",
    DECODE.name: "it has no backward pass",
})
ON_TILES: Mapping[str, str] = MappingProxyType({
    TILED.name: "its products run on matrix tiles", BLAS.name: "BLAS multiplies float32 by vectors",
    DECODE.name: "it multiplies by vectors: arithmetic is the limit, not memory",
})


@dataclass(frozen=True)
class Plan:
    """What a call of `fastmha.attention` (or its backward) will do. Print it for a receipt.

    Attributes
    ----------
    algorithm : str
        The algorithm that runs.
    reasons : dict of str to str
        Why this algorithm, and why not each other one.
    isa : str
        Instruction set of the kernels.
    threads : int
        Threads that may take part: one where the work is little.
    tile : tuple of int
        (query rows, keys) of one block of scores.
    flops : int
        Floating-point operations of the products over the pairs that causality, window, padding lengths and key ranges leave:
        2 · (D + Dv) per pair forward, 2 · (3 D + 2 Dv) more with `backward`.
    bytes_copied : int
        Bytes of q, k, v (and their like) that are copied before the kernels run: as the copies have them, of half precision
        for "blas" in float32.
    scratch_bytes : int
        Scratch memory of all threads.
    products : str
        Of what the products are: element types and parts, and the precision that was asked for.
    layout : str
        "contiguous" where the rows of each head of q, k and v follow each other without a gap, else "strided"; `layout_reason`
        says why it is so.
    balance : float
        Predicted share of `threads` that is kept busy, in (0, 1]: total work over threads times the makespan of the
        items handed out in order.
    backward : bool
        Whether this is the plan of the backward pass.
    shapes : str
        The call in words: its arrays' sizes, heads and rules.
    """

    algorithm: str
    reasons: dict[str, str]
    isa: str
    threads: int
    tile: tuple[int, int]
    flops: int
    bytes_copied: int
    scratch_bytes: int
    balance: float
    backward: bool = False
    shapes: str = field(default="", repr=False)
    products: str = "float32"
    layout: str = "strided"
    layout_reason: str = field(default="", repr=False)

    def __str__(self) -> str:
        lines = [
            f"fastmha plan: {'forward + backward' if self.backward else 'forward'}, {self.shapes}",
            f"  algorithm   {self.algorithm}: {self.reasons[self.algorithm]}",
            *(f"  not {name:<7} {why}" for name, why in self.reasons.items() if name != self.algorithm),
            f"  layout      {self.layout}: {self.layout_reason}",
            f"  kernels     {self.isa}, {self.threads} thread{'s' * (self.threads != 1)}, balance {self.balance:.0%}",
            f"  products    {self.products}",
            f"  tile        {self.tile[0]} queries x {self.tile[1]} keys",
            f"  work        {self.flops / 1e9:.3g} GFLOP",
            f"  copied      {self.bytes_copied:,} bytes",
            f"  scratch     {self.scratch_bytes:,} bytes",
        ]
        return "\n".join(lines)


def choose(problem: Problem, algorithm: str, backward: bool = False, weights: bool = False) -> tuple[str, Mapping[str, str]]:
    """The algorithm for a problem, and the reasons for and against each.

    Looks at lengths, the width of keys, groups, dtype and the instruction set, and whether a backward pass or the weights are
    wanted: not at masks, the batch size, threads or values.
    """
    _, H, Hkv, Lq, Lk, D, _ = problem.shape
    rows = Lq * (H // Hkv if Hkv else 0)
    if algorithm == AUTO and parts_of(problem, backward) > 0:
        return TILED.name, ON_TILES
    return choose_for(rows, Lk, D, problem.itemsize, problem.stored_size, algorithm, backward, weights)


def choose_for(rows: int, Lk: int, D: int, itemsize: int, stored: int, algorithm: str, backward: bool = False,
               weights: bool = False) -> tuple[str, Mapping[str, str]]:
    """`choose` for so many query rows per key/value head on Lk keys of width D, computed in items of so many bytes from keys that
    have so many."""
    if type(algorithm) is not str:      # what cannot be hashed would be an error of the cache's own
        validate.choice("algorithm", algorithm, ALGORITHMS)
    if algorithm == AUTO and backward and Lk == 1:
        return BLAS.name, OF_ONE_KEY
    of = tuning.current()
    least, of_key = of.decode_least(rows, itemsize, stored), D * itemsize
    pays = least is not None and of_key >= least[0] and Lk * of_key >= least[1]
    return _choose(rows, pays, least is not None, of, algorithm, backward, weights)


@lru_cache(maxsize=1024)
def _choose(rows: int, pays: bool, few: bool, of: Tuning, algorithm: str, backward: bool,
            weights: bool) -> tuple[str, Mapping[str, str]]:
    """`choose` for so many query rows per key/value head; whether "decode" pays there; whether it might for more keys; with these
    settings."""
    if algorithm not in ALGORITHMS:
        validate.choice("algorithm", algorithm, ALGORITHMS)
    unable = {name: _unable(record, rows, backward, weights) for name, record in BY_NAME.items()}
    if algorithm != AUTO:
        if unable[algorithm]:
            raise ValueError(f'algorithm "{algorithm}" cannot serve this call: {unable[algorithm]}')
        return algorithm, MappingProxyType({n: "named by the caller" if n == algorithm else f"{algorithm} was named by the caller"
                                            for n in (algorithm, *(n for n in BY_NAME if n != algorithm))})
    if pays and not unable[DECODE.name]:
        name, why = DECODE.name, f"{rows} query rows per key/value head: every key and value is read once, memory is the limit"
    elif not of.attention_by_blas:
        name, why = TILED.name, "scores never leave the caches, O(L) memory"
    else:
        name, why = BLAS.name, ("BLAS was measured to be faster here" if _core.fused_multiply_add() else
                                "the kernels have no fused multiply-add here, BLAS may")
    lanes = "few query rows leave its lanes empty" if name == DECODE.name else "slower than BLAS here"
    many = f"{rows} query rows per key/value head: arithmetic is the limit, not memory"
    small = f"for {rows} query rows per key/value head it needs more bytes of keys to pay"
    slower = {BLAS.name: "scores pass through memory between two products", TILED.name: lanes,
              DECODE.name: small if few else many}
    return name, MappingProxyType({name: why, **{n: unable[n] or slower[n] for n in BY_NAME if n != name}})


def _unable(record: Algorithm, rows: int, backward: bool, weights: bool) -> str:
    """Why an algorithm cannot serve a call with so many query rows per key/value head; empty if it can."""
    if backward and record.backward is None:
        return "it has no backward pass"
    if weights and not record.weights:
        return "it cannot return the weights"
    if record.most_rows is not None and rows > record.most_rows:
        return f"it takes at most {record.most_rows} query rows per key/value head (Lq * H / Hkv), got {rows}"
    return ""


def choose_layout(L: int, head_bytes: int, by_blas: bool) -> tuple[str, str]:
    """How a projection of L tokens per batch row should lay out heads of so many bytes per token, and why.

    "strided": side by side in rows (B, L, heads · D). "contiguous": by head, (B, heads, L, D), each by a product of its own.
    Neither changes what is computed, nor how much memory it takes. The measurements behind the rule: docs/layouts.md.
    """
    return _choose_layout(L, head_bytes, by_blas, tuning.current().contiguous)


@lru_cache(maxsize=1024)
def _choose_layout(L: int, head_bytes: int, by_blas: bool, least: tuple[int, int, int]) -> tuple[str, str]:
    """`choose_layout` from so many tokens, bytes of a token and head, and bytes of a head on."""
    tokens, of_token, of_head = least
    if by_blas:
        return "strided", "BLAS makes the projection, which costs it more by head than contiguous heads give back"
    if tokens > L:
        return "strided", f"{L} tokens per batch row, below {tokens}: a product for each head would be small"
    if head_bytes < of_token:
        return "strided", f"{head_bytes} bytes per token and head, below {of_token}: a product for each head would be narrow"
    if L * head_bytes < of_head:
        return "strided", f"heads of {L * head_bytes} bytes, below {of_head}: the caches hold them however they lie"
    return "contiguous", "a product for each head costs no more than one for all, and the kernels read heads from end to end"


def pairs(problem: Problem) -> np.ndarray:
    """(B, Lq) numbers of keys that causality, window, padding lengths and key ranges leave to each query."""
    low, high = _key_ranges(problem)
    return np.maximum(0, high - low)


def _key_ranges(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """(B, Lq) first keys that these leave to each query, and the ends; none where the end is not beyond the first."""
    B, _, _, Lq, Lk, _, _ = problem.shape
    low, high = np.zeros((B, Lq), np.int64), np.full((B, Lq), Lk, np.int64)
    if problem.key_starts is not None:
        low = np.maximum(low, problem.key_starts[:, None])
    if problem.key_lengths is not None:
        high = np.minimum(high, problem.key_lengths[:, None])
    left, right = problem.window
    if problem.offset is not None:
        diagonal = np.arange(Lq)[None, :] + problem.offset[:, None]
        if left is not None:
            low = np.maximum(low, diagonal - left)
        if right is not None:
            high = np.minimum(high, diagonal + right + 1)
    return low, high


def makespan(items: np.ndarray, threads: int, chains: np.ndarray | None = None) -> float:
    """When the last thread ends if items of these costs are handed out in order to whoever is free. Those of one chain, unless
    that is -1, wait for each other."""
    busy = np.zeros(max(1, threads))
    ready: Counter[int] = Counter()
    for cost, chain in zip(items.tolist(), (np.full(len(items), -1) if chains is None else chains).tolist(), strict=True):
        n = busy.argmin()
        busy[n] = max(busy[n], ready[chain]) + cost
        if chain >= 0:
            ready[chain] = busy[n]
    return float(busy.max())


_Pass = tuple[np.ndarray, "np.ndarray | None"]


def _together(problem: Problem, items: np.ndarray, threads: int, decode: bool = False) -> np.ndarray:
    """The costs of what a thread takes at a time, from those of items that are heads, where these are short; or of "decode"."""
    some = _core.taken_together(problem, len(items), threads, decode)
    return items if some == 1 else np.add.reduceat(items, np.arange(0, len(items), some))


def _passes(problem: Problem, name: str, backward: bool, threads: int, rows: int) -> tuple[list[_Pass], float]:
    """Relative costs of the items of each pass of a run, in the order in which they are handed out, and their chains; and what
    all would cost in one item a head."""
    B, H, Hkv, _, _, _, _ = problem.shape
    passes = [np.frombuffer(items, ITEM) for items in _core.items(problem, name, backward, rows, threads)]
    if BY_NAME[name] is DECODE:         # any chunk with keys to read as a whole one; to merge them is next to nothing
        chunks, heads = passes
        low, high = _key_ranges(problem)
        first, end = low.min(axis=1, initial=problem.shape[4])[chunks["b"]], high.max(axis=1, initial=0)[chunks["b"]]
        read = (chunks["key"] < end) & (chunks["key"] + chunks["keys"] > first)
        heads_of = np.minimum(_core.decode_neighbours(problem, threads), Hkv - chunks["head"])
        each = np.where(read, chunks["keys"].max(initial=0) * heads_of, 0)
        return [(_together(problem, each, threads, decode=True), None), (np.zeros(len(heads)), None)], float(each.sum())
    if BY_NAME[name] is TILED and not backward:
        of = _pairs_of_items(problem, passes[0])
        items, *merged = _costs_of_blocks(problem, of, *passes)
        first = items if merged or problem.parts else _together(problem, items, threads)
        chains = _chains(problem, passes[0]) if merged else None
        return [(first, chains), *((x, None) for x in merged)], float(of.sum())     # what is cut costs more: that is lost
    stacked = np.tile(pairs(problem), (1, H // Hkv if Hkv else 0))
    before = np.concatenate((np.zeros((B, 1), np.int64), stacked.cumsum(1)), axis=1)     # pairs of the rows before each
    costs = [before[items["b"], items["row"] + items["rows"]] - before[items["b"], items["row"]] for items in passes]
    return [(x, None) for x in costs], float(sum(x.sum() for x in costs))


def _chains(problem: Problem, items: np.ndarray) -> np.ndarray:
    """Of items of "tiled" forward: those with parts of a run of keys of the same rows have the same number, others -1."""
    size, rows, runs = _core.tile_sizes()[0] // 4, problem.shape[3] * problem.shape[1], -(-problem.shape[4] // _core.RUN_KEYS)
    end = np.minimum(items["key"] // _core.RUN_KEYS * _core.RUN_KEYS + _core.RUN_KEYS, problem.shape[4])
    whole = (items["key"] % _core.RUN_KEYS == 0) & (items["key"] + items["keys"] >= end)
    place = (items["b"] * problem.shape[2] + items["head"]) * (rows // size + 1) + items["row"] // size
    return np.where(whole, -1, place * runs + items["key"] // _core.RUN_KEYS)


def _costs_of_blocks(problem: Problem, of: np.ndarray, items: np.ndarray, merges: np.ndarray | None = None) -> list[np.ndarray]:
    """Of the items of "tiled" forward, of so many pairs, with what fewer rows and runs cost beside; and of those that merge."""
    _, H, Hkv, Lq, Lk, _, _ = problem.shape
    size, rows = _core.tile_sizes()[0], Lq * (H // Hkv) if Hkv else 0
    of_block = np.minimum(size, rows - items["row"] // size * size)
    fewer = np.where(items["rows"] > size // 4, _core.BLOCK_COSTS[size // 2], _core.BLOCK_COSTS[size // 4])
    in_runs = items["keys"] < Lk
    costs = of * np.where(items["rows"] == of_block, 1, fewer)
    costs += _core.RUN_COST * items["rows"] * in_runs
    if merges is None:
        return [costs]
    runs: Counter[tuple[int, int, int]] = Counter()         # of each of the fewest rows
    for b, h, row, many, _, _ in items[in_runs & (items["key"] % _core.RUN_KEYS == 0)].tolist():
        runs.update((b, h, at) for at in range(row, row + many, size // 4))
    left = np.array([runs[b, h, row] for b, h, row, _, _, _ in merges.tolist()])
    return [costs, _core.RUN_COST * left * merges["rows"]]


def _balance(problem: Problem, name: str, backward: bool, threads: int, rows: int) -> tuple[float, int]:
    """The share of the threads that is busy, and the most items of a pass."""
    if backward and BY_NAME[name] is TILED:
        B, H, Hkv, Lq, Lk, _, _ = problem.shape
        whole, keys, share, busy = _core.backward_split(problem, threads)
        Hkv *= _core.head_copies(problem)
        blocks = -(-Lq * (H // Hkv) // rows) if Hkv else 0
        if whole == B * Hkv:
            heads = np.repeat(pairs(problem).sum(axis=1), Hkv)
            taken = _together(problem, heads, threads)
            if len(taken) < len(heads) and heads.any():
                busy = heads.sum() / threads / makespan(taken, threads)
        return busy, max(whole, (B * Hkv - whole) * -(-Lk // keys) * (-(-blocks // share) if share else 1))
    passes, work = _passes(problem, name, backward, threads, rows)
    at_work = min(threads, _core.MOST_IN_BLAS) if BY_NAME[name].by_blas else threads
    span = sum(makespan(costs, at_work, chains) for costs, chains in passes if costs.any())
    return work / threads / span if work else 1.0, max(len(costs) for costs, _ in passes)


def _pairs_of_items(problem: Problem, items: np.ndarray) -> np.ndarray:
    """The pairs of each item, stacked rows on some keys."""
    B, H, Hkv, _, _, _, _ = problem.shape
    low, high = (np.tile(x, (1, H // Hkv if Hkv else 0)) for x in _key_ranges(problem))
    costs = np.zeros(len(items), np.float64)
    for key, keys in set(zip(items["key"].tolist(), items["keys"].tolist(), strict=True)):
        of = (items["key"] == key) & (items["keys"] == keys)
        left = np.maximum(0, np.clip(high, key, key + keys) - np.clip(low, key, key + keys))
        before = np.concatenate((np.zeros((B, 1), np.int64), left.cumsum(1)), axis=1)
        b, first, last = items["b"][of], items["row"][of], items["row"][of] + items["rows"][of]
        costs[of] = before[b, last] - before[b, first]
    return costs


def is_contiguous(x: np.ndarray) -> bool:
    """Whether the rows of each head of x (B, H, L, width) follow each other without a gap."""
    return x.shape[2] <= 1 or x.strides[2] == x.shape[3] * x.itemsize


def make_plan(problem: Problem, algorithm: str, threads: int, backward: bool, layout: tuple[str, str] | None = None) -> Plan:
    """The plan of a call; see `Plan`. With `backward` the balance and the scratch are those of the backward pass. `layout`: that
    of the heads and why, where they were not just given."""
    if layout is None:
        contiguous = all(map(is_contiguous, (problem.q, problem.k, problem.v)))
        layout = "contiguous" if contiguous else "strided", "heads are read where they lie"
    name, reasons = choose(problem, algorithm, backward)
    threads = _core.threads_of(problem, BY_NAME[name] is DECODE, backward, threads)
    B, H, Hkv, Lq, Lk, D, Dv = problem.shape
    record, copied = BY_NAME[name], problem.bytes_copied
    if record.by_blas:
        copied += sum(validate.collapsed(x).size * problem.itemsize for x in (problem.q, problem.k, problem.v)
                      if copied_for_blas(x, problem.dtype))
    rows, keys = record.tile(problem)
    scratch, shared = record.scratch(problem, backward, threads)
    types = str(problem.element) + f" (k, v {problem.stored})" * (problem.stored != problem.element)
    busy, items = _balance(problem, name, backward, threads, rows)
    used = max(1, min(threads, items))
    return Plan(
        algorithm=name, reasons=dict(reasons), isa=_core.selected_isa()[0], threads=threads, tile=(rows, keys),
        flops=int(pairs(problem).sum()) * H * (2 * (D + Dv) + (2 * (3 * D + 2 * Dv) if backward else 0)),
        bytes_copied=copied, scratch_bytes=scratch * used + shared, balance=busy,
        backward=backward, shapes=f"{types} B {B}, H {H}{f'/{Hkv}' if Hkv != H else ''}, L {Lq} x {Lk}, D {D}"
               f"{f'/{Dv}' if Dv != D else ''}, layout {problem.layout}",
        layout=layout[0], layout_reason=layout[1], products=how(problem, parts_of(problem, backward) if record is TILED else 0),
    )
