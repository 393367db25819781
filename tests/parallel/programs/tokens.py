"""A cache whose tokens are dealt to ranks answers as one that holds them all."""
import itertools
import warnings

import numpy as np
from common import COMM, DTYPES, RANK, SIZE, Cases

import fastmha
from fastmha.parallel import OtherRankError, Team
from fastmha.parallel.together import AGREEMENT_BYTES
from fastmha.parallel.tokens import TokenCache

warnings.simplefilter("error")
cases = Cases()
rng = np.random.default_rng(13)
B, H, Hkv, D, Dv = 3, 4, 2, 6, 5
SINKS = np.array([0.5, -1.0, -np.inf, 2.0])
RULES = {
    "plain": {}, "causal": {"is_causal": True}, "window": {"window": (6, 0)}, "wide window": {"window": (20, None)},
    "ranges": {"key_ranges": ([3, 0, 9], [40, 5, 11])}, "scale and softcap": {"scale": 0.7, "softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "all": {"is_causal": True, "window": (9, 4), "key_ranges": (2, None), "softcap": 2.0, "sinks": SINKS},
}  # fmt: skip


def drawn(dtype, *shape):
    return rng.standard_normal(shape).astype(dtype)


def compare(what, cache, whole, q, **rules):
    """Sums of as many terms as there are tokens, in other orders; and weights that err by the rounding of lse, below 8 · eps."""
    if "sinks" in rules:
        rules["sinks"] = rules["sinks"].astype(q.dtype)
    got, expected = (c.attend(q, return_lse=True, **rules) for c in (cache, whole))
    empty = np.isneginf(expected[1])
    cases.true(np.array_equal(np.isneginf(got[1]), empty) and not got[0][empty].any(), f"{what}: empty rows")
    cases.close(got[0], expected[0], whole.length + 8, f"{what}: output", 3)
    cases.close(got[1][~empty], expected[1][~empty], whole.length + 8, f"{what}: lse", 8)
    cases.true(len(set(COMM.allgather(got[0].tobytes()))) == 1, f"{what}: other bits than on another rank")


for dtype, block in itertools.product(DTYPES, (1, 4, 64)):
    cache, whole = TokenCache(B, Hkv, D, COMM, v_head_dim=Dv, block=block, dtype=dtype), fastmha.KVCache(
        B, Hkv, D, v_head_dim=Dv, dtype=dtype)
    compare("nothing cached", cache, whole, drawn(dtype, B, H, 1, D))
    for n, lengths in ((9, None), (1, None), (17, [17, 0, 4]), (1, [1, 1, 0]), (12, [3, 12, 0])):
        k, v = drawn(dtype, B, Hkv, n, D), drawn(dtype, B, Hkv, n, Dv)
        for c in (cache, whole):
            c.append(k, v, lengths)
        cases.true(np.array_equal(cache.lengths, whole.lengths), "lengths")
        cases.true(np.array_equal(COMM.allreduce(cache.held), whole.lengths), "the ranks hold each token once")
        most = min(8, int(whole.lengths.min()))
        for (name, rules), Lq in itertools.product(RULES.items(), {1, 3, most}):
            compare(f"{name}, {Lq} queries, blocks of {block}", cache, whole, drawn(dtype, B, H, Lq, D), **rules)
    rows = np.array([3, 1, 0])
    compare("some rows", cache, whole, drawn(dtype, B, H, 3, D), lengths_new=rows, is_causal=True, sinks=SINKS)
    for c in (cache, whole):
        c.reset()
    compare("reset", cache, whole, drawn(dtype, B, H, 1, D))

# tokens are shared out evenly, to a block
cache = TokenCache(1, 1, 4, COMM, block=8, dtype="float16")
cache.append(*drawn(np.float32, 2, 1, 1, 100, 4))
cases.true(abs(int(cache.held[0]) - 100 / SIZE) <= 8, "shared out evenly")
query = drawn(np.float32, 1, 2, 1, 4)
cases.close(cache.attend(query), fastmha.attention(query, *(np.concatenate(COMM.allgather(x), axis=2).astype(np.float32)
                                                            for x in (cache._own.k, cache._own.v))), 120, "half precision", 3)

team = Team(COMM)
cache = TokenCache(B, Hkv, D, team)
cache.append(*drawn(np.float32, 2, B, Hkv, 20, D))
cases.true((team.messages, team.bytes) == (0, 0) if SIZE == 1 else (2, 2 * AGREEMENT_BYTES), "messages of what is stored")
before = team.messages, team.bytes
q = drawn(np.float32, B, H, 2, D)
cache.attend(q)
sent = team.messages - before[0], team.bytes - before[1]
cases.true(sent == ((0, 0) if SIZE == 1 else (3, AGREEMENT_BYTES + 4 * B * H * 2 * (D + 2))), f"a step sent {sent}")

k = drawn(np.float32, B, Hkv, 2, D)
for words, call in (
    ("v must have shape", lambda wrong: cache.append(k, k[:1] if wrong else k)),
    ("v has length 1 on axis 2 but k has 2", lambda wrong: cache.append(k, k[:, :, :1] if wrong else k)),
    ("lengths must lie in [0, n]", lambda wrong: cache.append(k, k, [3, 1, 1] if wrong else [2, 1, 1])),
    ("k has width 6 on axis 3 but q has 5", lambda wrong: cache.attend(q[..., :5] if wrong else q)),
    ("q has batch size 2 on axis 0 but the cache has 3", lambda wrong: cache.attend(q[:2] if wrong else q)),
    ("sinks must have shape (H,)", lambda wrong: cache.attend(q, sinks=np.ones(3 if wrong else 4, np.float32))),
    ("q has 21 new queries in row 0 but the cache holds only 20", lambda wrong: cache.attend(
        np.zeros((B, H, 21 if wrong else 2, D), np.float32), is_causal=True)),
):
    for culprit in {0, SIZE - 1}:
        with cases.raises(ValueError, words) if culprit == RANK else cases.raises(OtherRankError, words):
            call(culprit == RANK)
        cases.true(cache.length == 20 and cache.held.sum() == cache._own.lengths.sum(), "an error changed the cache")
for words, call in (
    ("k must be the same on all ranks, got", lambda wrong: cache.append(*2 * [k[:, :, wrong:]])),
    ("lengths must be the same on all ranks, got", lambda wrong: cache.append(k, k, [1, 2, wrong])),
    ("key_ranges must be the same on all ranks, got", lambda wrong: cache.attend(q, key_ranges=(wrong, None))),
):
    if SIZE > 1:
        with cases.raises(ValueError, words):
            call(int(RANK == 0))
        cases.true(cache.length == 20, "an error changed the cache")
with cases.raises(TypeError, "attend has no keyword mask: the columns of a rank are no run of positions"):
    cache.attend(q, mask=None)
cases.done()
