"""Attention over slices of a sequence is attention over the whole: forward and backward, under every rule."""
import itertools
import sys
import warnings
from pathlib import Path

import numpy as np
from common import COMM, DTYPES, RANK, SIZE, Cases

import fastmha
from fastmha import algorithms, reference
from fastmha.parallel import OtherRankError, Team
from fastmha.parallel.ring import ring_attention, ring_attention_backward, ring_positions
from fastmha.parallel.together import AGREEMENT_BYTES

sys.path.append(str(Path(__file__).resolve().parents[2]))
import support

warnings.simplefilter("error")
cases = Cases()
rng = np.random.default_rng(11)
B, H, Hkv, D, Dv = 2, 4, 2, 5, 3
Lq, Lk = 23, 30
# Lengths by rank of queries and of keys: even ones, and some with ranks that hold nothing.
LENGTHS = {
    "even": (Lq, Lk),
    "uneven": ([[23], [4, 19], [17, 0, 6], [9, 1, 0, 13]][SIZE - 1], [[30], [29, 1], [0, 13, 17], [2, 0, 25, 3]][SIZE - 1]),
    "one rank has all": ([0] * (SIZE - 1) + [Lq], [Lk] + [0] * (SIZE - 1)),
}
BLOCKED = rng.random((Lq, Lk)) < 0.3
BLOCKED[5] = True
ADDED = np.where(rng.random((B, H, Lq, Lk)) < 0.3, -np.inf, rng.standard_normal((B, H, Lq, Lk)))
SINKS, SLOPES = np.array([0.5, -1.0, -np.inf, 2.0]), np.array([0.5, 0.25, 0.0, -0.3])
PER_ROW = np.array([8, -3])
RULES = {
    "plain": {},
    "causal": {"is_causal": True, "offset": Lk - Lq},
    "causal, an offset per batch row": {"is_causal": True, "offset": PER_ROW},
    "causal from the first key": {"is_causal": True, "offset": -2},
    "window": {"window": (4, 2), "offset": PER_ROW},
    "window to the left": {"window": (3, None), "offset": 7},
    "padding": {"key_padding_lengths": np.array([17, 0])},
    "ranges": {"key_ranges": ([3, 9], [30, 11]), "key_padding_lengths": np.array([28, 30])},
    "bool mask of two axes": {"mask": BLOCKED},
    "bool mask per head": {"mask": np.isneginf(ADDED)},
    "additive mask": {"mask": ADDED, "need_bias_grad": True},
    "additive mask of two axes": {"mask": ADDED[0, 0], "need_bias_grad": True, "softcap": 2.0},
    "additive mask of keys": {"mask": ADDED[:, :1, :1], "need_bias_grad": True, "sinks": SINKS},
    "additive mask of queries": {"mask": ADDED[:1, :, :, 1:2], "need_bias_grad": True, "is_causal": True, "offset": 3},
    "scale and softcap": {"scale": 0.7, "softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "sinks and empty rows": {"sinks": SINKS, "key_padding_lengths": np.array([21, 0]), "mask": BLOCKED},
    "alibi": {"alibi": SLOPES, "offset": PER_ROW},
    "dropout": {"dropout": 0.3, "seed": 2**40 + 7},
    "dropout, causal, sinks": {"dropout": 0.5, "seed": 3, "sinks": SINKS, "is_causal": True, "offset": 7},
    "everything": {
        "mask": ADDED, "is_causal": True, "offset": PER_ROW + 6, "window": (13, 3), "key_ranges": ([3, 0], None), "scale": 1.3,
        "key_padding_lengths": np.array([30, 27]), "softcap": 3.0, "sinks": SINKS, "alibi": SLOPES, "dropout": 0.25, "seed": 11,
        "need_bias_grad": True,
    },
}  # fmt: skip


def at(order, lengths):
    """The positions of this rank, one by one."""
    return np.concatenate([np.arange(*run) for run in ring_positions(lengths, SIZE, RANK, order)])


def swapped(x, layout):
    return x if layout == "BHLD" else x.swapaxes(1, 2)


def cast(rules, dtype):
    given = {name: np.asarray(rules[name]) for name in ("mask", "sinks", "alibi") if name in rules}
    return rules | {name: x.astype(dtype) for name, x in given.items() if x.dtype != bool}


def forward_rules(rules):
    return {name: value for name, value in rules.items() if name != "need_bias_grad"}


def both(function, backward, q, k, v, g, *comm, **rules):
    out, lse = function(q, k, v, *comm, return_lse=True, **forward_rules(rules))
    return out, lse, *backward(g, q, k, v, out, lse, *comm, **rules)


def compare(what, dtype, order, lengths, layout, rules, arrays=None, **named):
    """This rank's slices of every result against the float64 reference, and against one process.

    Scores, sums and products round as in one process; each of the 2 · SIZE merges of a row rounds its lse and output once more,
    and so does each addition of a gradient: (1 + 2 · SIZE) times the bounds of one process.
    """
    q, k, v, g = arrays or (rng.standard_normal(shape).astype(dtype) for shape in
                            ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), (B, H, Lq, Dv)))
    rules = cast(rules, dtype)
    rows, keys = at(order, lengths[0]), at(order, lengths[1])
    mine = dict(rules)
    mask = rules.get("mask")
    if mask is not None and mask.shape[-2] > 1:
        mine["mask"] = mask[..., rows, :]
    arrays = [swapped(x[:, :, places], layout) for x, places in ((q, rows), (k, keys), (v, keys), (g, rows))]
    found = both(ring_attention, ring_attention_backward, *arrays, COMM, order=order, layout=layout, **mine, **named)
    wide, wide_rules = [x.astype(np.float64) for x in (q, k, v, g)], cast(rules, np.float64)
    exact = both(reference.attention, reference.attention_backward, *wide, **wide_rules)
    bounds = reference.error_bounds(*wide, dtype, **wide_rules)
    whole = both(fastmha.attention, fastmha.attention_backward, q, k, v, g, **rules, **named)
    names = ["out", "lse", "grad_q", "grad_k", "grad_v"]
    names += ["grad_sinks"] * ("sinks" in rules) + ["grad_mask"] * ("need_bias_grad" in rules)
    assert len(found) == len(names)
    for name, got, wanted, bound, one in zip(names, found, exact, bounds, whole):
        bound = np.broadcast_to(bound, wanted.shape) * (1 + 2 * SIZE)
        if name == "grad_mask" and mask.shape[-2] == 1:
            got = COMM.allreduce(got)
        elif name == "grad_mask":
            wanted, bound, one = wanted[..., rows, :], bound[..., rows, :], one[..., rows, :]
        elif name != "grad_sinks":
            places = keys if name in ("grad_k", "grad_v") else rows
            wanted, bound, one = wanted[:, :, places], bound[:, :, places], one[:, :, places]
            got = got if name == "lse" else swapped(got, layout)
        assert got.dtype == dtype
        assert got.shape == wanted.shape, f"{what}, {name}: {got.shape}, not {wanted.shape}"
        for other, allowed in ((wanted, bound), (one, 2 * bound)):
            finite = np.isfinite(other)
            assert np.array_equal(got[~finite], other[~finite].astype(dtype)), f"{what}, {name}: -inf at other places"
            beyond = np.abs(got[finite] - other[finite]) - allowed[finite]
            assert (beyond <= 0).all(), f"rank {RANK} of {SIZE}, {what}, {name}: beyond its bound by {beyond.max():.3g}"
    cases.count += 1


turn = itertools.count()
for (rule, rules), dtype, algorithm in itertools.product(RULES.items(), DTYPES, ("auto", "blas", "tiled")):
    n = next(turn)
    order, kind, layout = ("zigzag", "contiguous")[n % 2], list(LENGTHS)[n % 7 % 3], ("BHLD", "BLHD")[n % 5 % 2]
    what = f"{rule}, {np.dtype(dtype)}, {algorithm}, {order}, {kind}, {layout}"
    compare(what, dtype, order, LENGTHS[kind], layout, rules, algorithm=algorithm)

for kind, algorithm in itertools.product(support.ILL_SCALED, ("tiled", "blas")):
    arrays = support.draw_ill_scaled(kind, rng, B, H, Hkv, Lq, Lk)
    compare(f"{kind}, {algorithm}", np.float32, "zigzag", LENGTHS["even"], "BHLD", {"is_causal": True, "offset": 9}, arrays,
            algorithm=algorithm)

for dtype, order in itertools.product(DTYPES, ("zigzag", "contiguous")):       # a few queries of each rank over many keys
    q, k, v = (rng.standard_normal((B, n, length, D)).astype(dtype) for n, length in ((H, 7), (Hkv, 203), (Hkv, 203)))
    rules = {"is_causal": True, "offset": 196, "dropout": 0.4, "seed": 5, "sinks": SINKS.astype(dtype)}
    rows, keys = at(order, 7), at(order, 203)
    found = ring_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], COMM, order=order, algorithm="decode", **rules)
    cases.close(found, fastmha.attention(q, k, v, **rules)[:, :, rows], 203, "decode", 3)

# ------------------------------------------------------------------------------------------------- bits, messages, errors

def slices(dtype=np.float64, order="zigzag", length=26):
    """q, k, v and a gradient of the output of one sequence, and this rank's slices of them."""
    same = np.random.default_rng(5)
    whole = [same.standard_normal((B, n, length, D)).astype(dtype) for n in (H, Hkv, Hkv, H)]
    return whole, [x[:, :, at(order, length)] for x in whole]


CAUSAL = {"is_causal": True, "sinks": SINKS, "dropout": 0.2, "seed": 1}


def run(q, k, v, g, comm=COMM, **rules):
    return both(ring_attention, ring_attention_backward, q, k, v, g, comm, **rules)


for order, threads in itertools.product(("zigzag", "contiguous"), (1, 2, 3)):
    mine = slices(order=order)[1]
    first, again = run(*mine, order=order, **CAUSAL), run(*mine, order=order, num_threads=threads, **CAUSAL)
    cases.true(all(np.array_equal(x, y) for x, y in zip(first, again)), f"other bits with {threads} threads")
    cases.true(len(set(COMM.allgather(first[5].tobytes()))) == 1, "grad_sinks has other bits than on another rank")

if SIZE == 1:
    q, k, v, g = slices()[0]
    plain = both(fastmha.attention, fastmha.attention_backward, q, k, v, g)
    held = all(np.array_equal(x, y) for x, y in zip(run(q, k, v, g, order="contiguous"), plain))
    cases.true(held, "one rank has other bits than no ranks")
else:
    cases.count += 1

# a removed pair keeps NaN out, whether its run is computed or skipped
mine = slices()[1]
rules = {"key_ranges": ([3, 0], [20, 26]), "is_causal": True}
clean = run(*mine, **rules)
gone = ~((at("zigzag", 26) >= 3) & (at("zigzag", 26) < 20))
for x in mine[1:3]:
    x[0][:, gone] = np.nan
cases.true(all(np.array_equal(x, y) for x, y in zip(clean, run(*mine, **rules))), "a NaN at removed keys is seen")

q, k, v, g = slices(np.float32)[1]
sizes = [k.itemsize * B * Hkv * n * 2 * D for n in COMM.allgather(k.shape[2])]
travels = sum(sizes) - sizes[(RANK + 1) % SIZE]        # of every rank but the next one, whose keys end their way here
small = 16 * SIZE + 2 * AGREEMENT_BYTES
for backward in (False, True):
    team = Team(COMM)
    out, lse = ring_attention(q, k, v, team, return_lse=True, sinks=SINKS.astype(np.float32))
    expected = SIZE + 2, travels + small
    if backward:
        team = Team(COMM)
        ring_attention_backward(g, q, k, v, out, lse, team, sinks=SINKS.astype(np.float32))
        expected = 2 * SIZE + 3, travels + sum(sizes) + small + 8 * H
    if SIZE == 1:
        expected = 0, 0
    cases.true((team.messages, team.bytes) == expected, f"{team.messages} messages of {team.bytes} bytes, not {expected}")


def fails(kind, words, call, culprit=SIZE - 1):
    """The culprit raises this, the others say which rank did; all are ready for the next call."""
    with cases.raises(kind, words) if culprit == RANK else cases.raises(OtherRankError, f"rank {culprit} of {SIZE} raised"):
        call(culprit == RANK)


def attend(**others):
    return ring_attention(**{"q": q, "k": k, "v": v, "comm": COMM} | others)


fails(ValueError, "v has 2 heads on axis 1", lambda wrong: attend(k=np.ones((B, 3, 4, D), np.float32) if wrong else k))
fails(TypeError, "q must be float32, float64", lambda wrong: attend(q=q.astype(int) if wrong else q), culprit=0)
fails(TypeError, "v has dtype float64", lambda wrong: attend(v=v.astype(float) if wrong else v))
fails(ValueError, "k must have 4 axes", lambda wrong: attend(k=k[0] if wrong else k, mask=np.zeros((q.shape[2], 26), bool)))
fails(ValueError, "layout must be", lambda wrong: attend(layout="BDHL" if wrong else "BHLD"))
fails(ValueError, "mask of shape (2, 5)", lambda wrong: attend(mask=np.zeros((2, 5), bool) if wrong else None))
fails(ValueError, "algorithm must be", lambda wrong: attend(algorithm="fast" if wrong else "auto"))
fails(TypeError, "return_lse must be True or False", lambda wrong: attend(return_lse=1 if wrong else True), culprit=0)
fails(ValueError, "lse must have shape", lambda wrong: ring_attention_backward(g, q, k, v, out, lse[:1] if wrong else lse, COMM))
fails(ValueError, 'algorithm "decode" cannot serve this call: it has no backward pass', lambda wrong: ring_attention_backward(
    g, q, k, v, out, lse, COMM, algorithm="decode" if wrong else "auto"))
fails(ValueError, "need_bias_grad needs a mask", lambda wrong: ring_attention_backward(
    g, q, k, v, out, lse, COMM, need_bias_grad=wrong))


def fail_in_the_middle(wrong):
    kept = algorithms.forward

    def fail(*_):
        raise MemoryError("no more")

    if wrong:
        algorithms.forward = fail
    try:
        attend()
    finally:
        algorithms.forward = kept


fails(MemoryError, "no more", fail_in_the_middle)
for name, values in (("seed", (1, 2)), ("order", ("zigzag", "contiguous")), ("window", (None, (3, 3))), ("scale", (1.0, 2.0)),
                     ("sinks", np.float32([[0, 1, 2, 3], [0, 1, 2, 4]])), ("key_padding_lengths", ([20, 3], [20, 4]))):
    given = {"dropout": 0.5} if name == "seed" else {}
    if SIZE == 1:
        cases.count += 1
        continue
    with cases.raises(ValueError, "must be the same on all ranks, got"):
        attend(**given, **{name: values[int(RANK == SIZE - 1)]})
with cases.raises(ValueError, f"offset must be given with is_causal, window or alibi where q has length {2 * SIZE} and k has"):
    attend(q=q[:, :, :2], is_causal=True)
cases.close(attend(), fastmha.attention(*slices(np.float32)[0][:3])[:, :, at("zigzag", 26)], 100, "after errors")
cases.done()
