"""What is wrong on one rank is an error on all, nobody waits, and the next call works."""
import copy
import pickle

import numpy as np
from common import COMM, RANK, SIZE, Cases

import fastmha
from fastmha.parallel import OtherRankError, Team, gather, shard

cases = Cases()
LAST = SIZE - 1
X = np.random.default_rng(5).standard_normal((2, 6, 32)).astype(np.float32)
whole = fastmha.MultiHeadAttention(32, 4, num_kv_heads=2, rng=0)
sharded = shard(whole, COMM)


def fails(kind, words, work):
    """work(wrong) raises that kind on the last rank, where wrong is True; on the others that rank and the words are named."""
    if RANK == LAST:
        with cases.raises(kind, words):
            work(True)
    else:
        with cases.raises(OtherRankError, f"rank {LAST} of {SIZE} raised {kind.__name__}: ", words):
            work(False)


def differs(words, work):
    """work(wrong) raises a ValueError on all ranks."""
    if SIZE > 1:
        with cases.raises(ValueError, words):
            work(RANK == LAST)


def works():
    cases.close(sharded.forward(X, is_causal=True), whole.forward(X, is_causal=True), 100, "the call after an error")


fails(ValueError, "X has width 31", lambda wrong: sharded.forward(X[:, :, 1:] if wrong else X))
fails(ValueError, "X must have 3 axes", lambda wrong: sharded.forward(X[0] if wrong else X))
fails(TypeError, "X must", lambda wrong: sharded.forward(X.astype(complex) if wrong else X))
fails(TypeError, "causal", lambda wrong: sharded.forward(X, **({"causal": True} if wrong else {})))
fails(ValueError, "window", lambda wrong: sharded.forward(X, window=(-1, 0) if wrong else (1, 0)))
fails(ValueError, "mask must have 1 or all 4 heads of the module on axis 1, got shape (1, 2, 6, 6)",
      lambda wrong: sharded.forward(X, np.zeros((1, 2 if wrong else 4, 6, 6), bool)))
fails(ValueError, "sinks must have shape (H,) = (4,)",
      lambda wrong: sharded.forward(X, sinks=np.zeros(3 if wrong else 4, np.float32)))
fails(TypeError, "alibi", lambda wrong: sharded.forward(X, alibi=np.zeros(4, int if wrong else np.float32), is_causal=True))
works()
fails(ValueError, "grad_output must have the output's shape (2, 6, 32)", lambda wrong: sharded.backward(X[:, :5] if wrong else X))
fails(TypeError, "momentum", lambda wrong: sharded.backward(X, **({"momentum": 1} if wrong else {})))
cases.close(sharded.backward(X), whole.backward(X), 100, "a backward after an error")
if SIZE > 1:
    with cases.raises(ValueError if RANK == LAST else OtherRankError, "backward needs a forward with training=True"):
        sharded.own._kept = None if RANK == LAST else sharded.own._kept
        sharded.backward(X)
state = whole.state_dict()
fails(ValueError, "missing W_K", lambda wrong: sharded.load_state_dict(
    {name: value for name, value in state.items() if name != "W_K" or not wrong}))
fails(ValueError, "W_O must have the whole module's shape (32, 32), got (31, 32)", lambda wrong: sharded.load_state_dict(
    {**state, "W_O": state["W_O"][1:]} if wrong else state))
fails(TypeError, "state must be a dict", lambda wrong: sharded.load_state_dict([] if wrong else state))
sharded.load_state_dict(state)
fails(ValueError, "C has width 3", lambda wrong: sharded.project_context(X[:, :, :3] if wrong else X))
fails(TypeError, "module must be a MultiHeadAttention, got ", lambda wrong: shard(X if wrong else whole, COMM))
fails(TypeError, "module must be of float32 or float64, got one of float16",
      lambda wrong: shard(fastmha.MultiHeadAttention(32, 4, dtype=np.float16, rng=0) if wrong else whole, COMM))
works()

# valid on each rank, but not the same
differs("X.shape must be the same on all ranks, got (2, 6, 32) on rank", lambda wrong: sharded.forward(X[:, :4] if wrong else X))
differs("is_causal must be the same on all ranks, got ", lambda wrong: sharded.forward(X, is_causal=wrong))
differs("key_padding_lengths must be the same on all ranks", lambda wrong: sharded.forward(
    X, key_padding_lengths=np.array([6, 5 + wrong])))
differs("mask must be the same on all ranks", lambda wrong: sharded.forward(X, np.zeros((6, 6) if wrong else (1, 1, 6, 6), bool)))
differs("need_bias_grad must be the same", lambda wrong: (
    sharded.forward(X, np.zeros((6, 6), np.float32)), sharded.backward(X, need_bias_grad=wrong)))
differs("module must be the same on all ranks", lambda wrong: shard(fastmha.MultiHeadAttention(32, 4 + 4 * wrong, rng=0), COMM))
differs("the digest of module's parameters must be the same", lambda wrong: shard(
    fastmha.MultiHeadAttention(32, 4, rng=int(wrong)), COMM))
differs("ranks must be at most one for each of the 1 heads", lambda wrong: shard(fastmha.MultiHeadAttention(32, 1, rng=0), COMM))
works()

# a rank that fails in the middle, after the projections, and with a cache whose new tokens have been stored
rotate = {True: lambda q, k, positions: 1 / 0, False: lambda q, k, positions: (q, k)}
fails(ZeroDivisionError, "division by zero", lambda wrong: sharded.forward(X, transform_qk=rotate[wrong]))


def interrupted(q, k, positions):
    raise KeyboardInterrupt("in the middle")


fails(KeyboardInterrupt, "in the middle", lambda wrong: sharded.forward(X, transform_qk=interrupted if wrong else rotate[False]))
for ring in ({}, {"window": 3, "max_chunk": 6}):
    rules = {"window": (3, 0)} if ring else {"is_causal": True}
    cache, expected = (fastmha.KVCache(2, m.num_kv_heads, m.head_dim, **ring) for m in (sharded.own, whole))
    for _ in range(3):
        fails(ValueError, "cache has batch size 3", lambda wrong, cache=cache, rules=rules: sharded.forward(
            X, cache=fastmha.KVCache(3, cache.num_kv_heads, cache.head_dim) if wrong else cache, **rules))
        fails(ZeroDivisionError, "division by zero",
              lambda wrong, cache=cache, rules=rules: sharded.forward(X, cache=cache, transform_qk=rotate[wrong], **rules))
        differs("X.shape must be the same", lambda wrong, cache=cache, rules=rules: sharded.forward(
            X[:, :4] if wrong else X, cache=cache, **rules))
        cases.true(cache.length == expected.length, "the cache is as it was")
        cases.close(sharded.forward(X, cache=cache, **rules), whole.forward(X, cache=expected, **rules), 100, "the step after")

# with sums under way
sharded = shard(whole, COMM, overlap_rows=5)
product, calls = fastmha.module.algorithms.product, [0]


def fails_at_the_third(*args, **keywords):
    calls[0] += 1
    if calls[0] == 3:       # the second slice of the output
        raise MemoryError("of the third product")
    return product(*args, **keywords)


def with_the_third_product_failing(wrong):
    calls[0], fastmha.module.algorithms.product = 0, fails_at_the_third if wrong else product
    try:
        sharded.forward(X)
    finally:
        fastmha.module.algorithms.product = product


if SIZE > 1:
    fails(MemoryError, "of the third product", with_the_third_product_failing)
fails(ZeroDivisionError, "division by zero", lambda wrong: sharded.forward(X, transform_qk=rotate[wrong]))
fails(ValueError, "overlap_rows must be at least 1, got 0", lambda wrong: shard(whole, COMM, overlap_rows=0 if wrong else 1))
works()

# what no rank can do
with cases.raises(TypeError, "comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, got 3"):
    shard(whole, 3)
with cases.raises(TypeError, "sharded must be a ShardedAttention, got MultiHeadAttention"):
    gather(whole)
for duplicate in (copy.deepcopy, pickle.dumps):
    with cases.raises(TypeError, "a ShardedAttention cannot be pickled or copied"):
        duplicate(sharded)
with cases.raises(TypeError, "module must be a MultiHeadAttention, got ShardedAttention"):
    fastmha.mean_pool_kv_heads(sharded, 1)

# of several ranks that fail each raises its own error; without one all have what they computed
team = Team(COMM)
with cases.raises(ValueError, f"from {RANK}"):
    team.agree(lambda: int(f"from {RANK}"))
for failing in range(SIZE):         # and all ranks behind it
    kind, words = (ValueError, f"from {RANK}") if failing <= RANK else (OtherRankError, f"rank {failing} of {SIZE} raised ")
    with cases.raises(kind, words):
        team.agree(lambda failing=failing: int(f"from {RANK}") if failing <= RANK else None)
cases.true(team.agree(lambda: RANK) == RANK, "what work returns")
sums = team.add(np.arange(3.0) + RANK)
cases.true((sums == SIZE * np.arange(3.0) + SIZE * LAST / 2).all(), "sums")
cases.true((team.largest(np.array([RANK, -RANK])) == [LAST, 0]).all(), "largest")
arrived = np.empty(2)
team.wait(team.exchange(np.full(2, float(RANK)), (RANK + 1) % SIZE, arrived, (RANK - 1) % SIZE))
cases.true((arrived == (RANK - 1) % SIZE).all(), "exchange")
with cases.raises(RuntimeError, f"MPI failed on rank {RANK} of {SIZE}: another rank may have ended. It says: "):
    team.exchange(arrived, 0, arrived, SIZE)        # there is no such rank
cases.done()
