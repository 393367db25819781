"""Runs of keys of a tiled forward pass: a softmax each, merged in their order, in one item or in many, with the same bits.

A run is 768 keys, and many items are made of it where blocks of 64 rows are few for the threads: lengths here lie around both.
At the end of a pass a run is cut into tiles of 192 keys, each of which goes on from the one before.
"""

import numpy as np
import pytest
from support import all_dtypes, assert_close, draw, every_isa, oracle, rows_alike, same_bits

import fastmha
from fastmha import _core, planning
from fastmha.validate import Rules, attention_problem

RUN, TILE = 768, 192
SHAPES = [  # H, Hkv, Lq, Lk, D, Dv
    (1, 1, 1, RUN, 8, 8),
    (1, 1, 65, RUN + 1, 9, 8),
    (4, 1, 20, 2 * RUN, 16, 16),
    (2, 1, 40, 2500, 24, 17),
    (3, 3, 3, 2 * RUN + 1, 33, 40),
]
RULES = {
    "plain": lambda Lq, Lk: {},
    "causal": lambda Lq, Lk: {"is_causal": True, "offset": Lk - Lq},
    "causal from the first key": lambda Lq, Lk: {"is_causal": True, "offset": 0},
    "window that begins behind the first run": lambda Lq, Lk: {"window": (300, 5), "offset": Lk - Lq},
    "padding": lambda Lq, Lk: {"key_padding_lengths": np.array([Lk // 2 + 1])},
    "range between runs": lambda Lq, Lk: {"key_ranges": (np.array([RUN - 3]), np.array([Lk]))},
    "mask of a whole run": lambda Lq, Lk: {"mask": np.tile(np.arange(Lk) // RUN == 1, (Lq, 1))},
    "dropout": lambda Lq, Lk: {"dropout": 0.25, "seed": 5},
    "peaked scores": lambda Lq, Lk: {"scale": 40.0},
    "left padding": lambda Lq, Lk: {"is_causal": True, "offset": Lk - Lq, "key_ranges": (np.array([Lk // 3]), np.array([Lk]))},
    "left padding by a constant": lambda Lq, Lk: {"mask": np.where(np.arange(Lk) < Lk // 3, -1e4, np.zeros((Lq, 1)))},
}


def rules_of(name, Lq, Lk, dtype):
    """The rules of that name, an additive mask in a type that goes with dtype."""
    rules = RULES[name](Lq, Lk)
    if "mask" in rules and rules["mask"].dtype != bool:
        rules["mask"] = rules["mask"].astype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
    return rules


def forward(q, k, v, threads, **rules):
    return fastmha.attention(q, k, v, algorithm="tiled", return_lse=True, num_threads=threads, **rules)


@every_isa
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@all_dtypes
def test_runs_of_keys_agree_with_the_oracle_and_have_the_bits_of_one_item(shape, dtype, rules, isa, rng):
    H, Hkv, Lq, Lk, D, Dv = shape
    q, k, v, g = draw(rng, 1, H, Hkv, Lq, Lk, D, Dv, dtype)
    rules = rules_of(rules, Lq, Lk, dtype)
    whole = forward(q, k, v, 1, **rules)
    expected, bounds = oracle(q, k, v, g, q.dtype, **rules)
    assert_close(whole, expected[:2], bounds[:2])
    for threads in (2, 5):
        for x, y in zip(whole, forward(q, k, v, threads, **rules), strict=True):
            assert same_bits(x, y)


# how many blocks are whole, and whether the others are in runs of keys; rows of pieces, and how many of those become such; keys
# of pieces, of those that are of one run, or 0: all
ALL = 1 << 20
CUTS = [(0, runs, rows, ALL, keys) for rows in (16, 32, 64) for runs in (False, True) for keys in (0, 192)] + [
    (3, False, 16, ALL, 0), (1, False, 32, 1, 0), (5, True, 16, ALL, 0), (2, True, 32, ALL, 0), (0, True, 16, 4, 0),
    (0, True, 32, 1, 0), (1, True, 16, 3, 0), (2, False, 32, 3, 0), (3, False, 16, 2, 0), (1, True, 64, 0, 0),
    (2, True, 32, 5, 0), (0, True, 16, 7, 0), (0, True, 64, 3, 384), (1, True, 16, 5, 384), (0, False, 32, 7, 384),
    (2, True, 64, 2, 192)]  # fmt: skip
WHOLE = (ALL, False, 64, 0, 0)


def cut_forward(q, k, v, cut, threads, weights=False, **rules):
    """Out and lse, and the weights, of blocks that are cut like that."""
    problem = attention_problem(q, k, v, "BHLD", Rules(**{"offset": 0 if rules.get("is_causal") else None, **rules}))
    B, H, _, Lq, Lk, _, Dv = problem.shape
    real = np.float64 if problem.is_double else np.float32
    out, lse = np.full((B, H, Lq, Dv), 9, q.dtype), np.full((B, H, Lq), 9, real)
    of = np.full((B, H, Lq, Lk), 9, real) if weights else None
    _core.tiled_forward(problem, out, lse, of, threads, cut)
    return (out, lse, of) if weights else (out, lse)


@every_isa
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_of_any_rows_in_runs_or_whole_have_the_same_bits(dtype, rules, isa, rng):
    for H, Hkv, Lq, Lk, D, Dv in ((2, 1, 75, 2 * RUN + 50, 9, 8), (4, 2, 130, 200, 16, 5)):
        q, k, v, _ = draw(rng, 2, H, Hkv, Lq, Lk, D, Dv, dtype)
        of = rules_of(rules, Lq, Lk, dtype)
        if "key_padding_lengths" in of:
            of["key_padding_lengths"] = np.repeat(of["key_padding_lengths"], 2)
        if "key_ranges" in of:
            of["key_ranges"] = tuple(np.minimum(np.repeat(x, 2), Lk) for x in of["key_ranges"])
        whole = forward(q, k, v, 1, **of)
        for cut in CUTS:
            for threads in (1, 3):
                assert all(map(same_bits, whole, cut_forward(q, k, v, cut, threads, **of)))


@every_isa
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_of_any_rows_have_the_same_bits_with_weights_and_with_nan_and_infinity(dtype, isa, rng):
    q, k, v, _ = draw(rng, 1, 4, 2, 70, 2 * RUN + 5, 8, 6, dtype)
    rules = {"is_causal": True, "offset": RUN}
    whole = cut_forward(q, k, v, WHOLE, 1, weights=True, **rules)
    for cut in CUTS:
        assert all(map(same_bits, whole, cut_forward(q, k, v, cut, 3, weights=True, **rules)))
    v[0, 0, RUN + 40, 3], k[0, 1, RUN + 60, 0], q[0, 2, 33, 1] = np.inf, np.nan, -np.inf
    whole = cut_forward(q, k, v, WHOLE, 1, **rules)
    assert np.isnan(whole[0]).any()
    for cut in CUTS:
        assert all(map(same_bits, whole, cut_forward(q, k, v, cut, 3, **rules)))


def forward_items(q, k, threads, **rules):
    """The items of each pass of a forward pass of so many threads."""
    problem = attention_problem(q, k, k, "BHLD", Rules(**rules))
    return [np.frombuffer(x, planning.ITEM) for x in _core.items(problem, "tiled", False, 0, threads)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("threads", [8, 64, 192])
def test_parts_of_a_run_are_handed_out_in_order_each_once(threads, causal):
    """Each waits for the one before it: handed out first, nobody would ever work on that."""
    in_parts = 0
    shapes = ((1, 783, 780), (2, 1101, 1101), (3, 408, 3336), (20, 461, 461), (3, 111, 4662), (9, 135, 1876), (24, 99, 1369))
    for H, Lq, Lk in shapes:
        q, k = (np.broadcast_to(np.float32(0), (1, H, L, 64)) for L in (Lq, Lk))
        passes = forward_items(q, k, threads, is_causal=causal, offset=Lk - Lq if causal else None)
        met = np.zeros((H, -(-Lq // 16), Lk), np.int8)
        for _, h, row, rows, key, keys in passes[0].tolist():
            part = slice(row // 16, -(-(row + rows) // 16))
            assert not met[h, part, key : key + keys].any()
            assert met[h, part, key // RUN * RUN : key].all()
            met[h, part, key : key + keys] = 1
            in_parts += key % RUN > 0
        ends = np.minimum(Lk, np.arange(1, len(met[0]) + 1) * 16 + Lk - Lq) if causal else np.full(len(met[0]), Lk)
        assert all(met[:, n, : max(0, end)].all() for n, end in enumerate(ends))
    assert in_parts > 0


@pytest.mark.parametrize(
    ("threads", "shapes"),
    [(8, ((1, 673, 700), (1, 783, 780))), (64, ((6, 252, 2244), (1, 2107, 2107))), (192, ((4, 810, 3047), (33, 111, 4662)))],
)
def test_few_blocks_on_long_keys_are_cut_by_keys_as_well(threads, shapes):
    """About 4 to 7 tiles of 64 rows by 192 keys for each thread: by rows alone a tile is the least that can be given away."""
    for H, Lq, Lk in shapes:
        q, k = (np.broadcast_to(np.float32(0), (1, H, L, 64)) for L in (Lq, Lk))
        assert fastmha.plan(q, k, k, num_threads=threads, algorithm="tiled").balance > 0.89


def test_rows_that_attend_nothing_are_no_reason_to_leave_blocks_whole():
    """Causal queries before the first key: blocks are many for the threads, those with work are not."""
    for H, Lq, Lk in ((72, 3932, 346), (108, 3932, 346)):
        q, k = (np.broadcast_to(np.float32(0), (1, H, L, 64)) for L in (Lq, Lk))
        assert fastmha.plan(q, k, k, num_threads=64, algorithm="tiled", is_causal=True, offset=Lk - Lq).balance > 0.93


@pytest.mark.parametrize("causal", [False, True])
def test_many_threads_with_few_blocks_each_are_kept_busy_by_smaller_ones(causal):
    """Whole blocks would leave a third of them idle: 256 for 192 threads."""
    for B, H, L in ((4, 8, 512), (1, 16, 1024), (1, 8, 2048)):
        x = np.broadcast_to(np.float32(0), (B, H, L, 64))
        plan = fastmha.plan(x, x, x, num_threads=192, algorithm="tiled", is_causal=causal, offset=0 if causal else None)
        assert plan.balance > 0.83
        items = forward_items(x, x, 192, is_causal=causal, offset=0 if causal else None)[0]
        assert items["rows"].max() < 64 or len(items) > B * H * L // 64


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("threads", [2, 3, 8, 64])
def test_blocks_that_do_not_come_out_even_are_cut_smaller_at_the_end(threads, causal):
    """Whole blocks of 64 rows would leave up to a fifth idle: a few more than four for each thread, a ragged end of each head."""
    for H, L in ((4 * threads + max(1, threads // 10), 64), (1, 64 * (4 * threads + 1)), (threads + 1, 333)):
        x = np.broadcast_to(np.float32(0), (1, H, L, 64))
        plan = fastmha.plan(x, x, x, num_threads=threads, algorithm="tiled", is_causal=causal, offset=0 if causal else None)
        assert plan.balance > 0.93, (H, L)


@every_isa
@all_dtypes
def test_sinks_are_in_the_first_run_alone(dtype, isa, rng):
    q, k, v, g = draw(rng, 1, 2, 1, 30, 2 * RUN + 5, 16, 16, dtype)
    of = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    one_tile = [{"window": (20, 3), "offset": 2 * RUN - 45}, {"key_ranges": ([RUN + 10], [RUN + 100])}]
    for rules in ({}, {"window": (200, 0), "offset": 2 * RUN - 40}, *one_tile):
        rules["sinks"] = np.array([0.5, 3.0], of)
        whole, split = forward(q, k, v, 1, **rules), forward(q, k, v, 3, **rules)
        expected, bounds = oracle(q, k, v, g, q.dtype, **rules)
        assert_close(whole, expected[:2], bounds[:2])
        assert all(map(same_bits, whole, split))
        for cut in CUTS[3::4]:
            assert all(map(same_bits, whole, cut_forward(q, k, v, cut, 3, **rules)))


@every_isa
def test_rows_have_the_bits_they_have_alone_whatever_runs_their_block_meets(isa, rng):
    q, k, v, _ = draw(rng, 1, 1, 1, 64, 3 * RUN, 16, 16, np.float32)
    window = {"window": (400, 0)}
    out, lse = forward(q, k, v, 3, offset=RUN - 32, **window)       # rows on either side of the end of the first run
    n = rows_alike(isa, np.float32, 1, 64)
    for row in (0, 32 - n, 32, 64 - n):
        some, of_some = forward(q[:, :, row : row + n], k, v, 3, offset=RUN - 32 + row, **window)
        assert same_bits(some, out[:, :, row : row + n])
        assert same_bits(of_some, lse[:, :, row : row + n])


@every_isa
def test_nan_and_infinity_in_one_run_reach_the_rows_that_attend_them_alone(isa, rng):
    q, k, v, _ = draw(rng, 1, 1, 1, 70, 3 * RUN, 16, 16, np.float32)
    rules = {"is_causal": True, "offset": RUN}          # row i attends keys up to RUN + i
    clean = forward(q, k, v, 3, **rules)
    v[0, 0, RUN + 40, 3], k[0, 0, RUN + 60, 0] = np.inf, np.nan
    spoilt, whole = forward(q, k, v, 3, **rules), forward(q, k, v, 1, **rules)
    assert all(map(same_bits, spoilt, whole))
    assert same_bits(spoilt[0][:, :, :40], clean[0][:, :, :40])
    assert np.isinf(spoilt[0][0, 0, 40:60, 3]).all()
    assert np.isnan(spoilt[0][0, 0, 60:]).all()


def test_a_plan_knows_that_runs_of_keys_keep_threads_busy():
    q, k = np.empty((1, 1, 64, 64), np.float32), np.empty((1, 1, 100_000, 64), np.float32)
    busy = {n: fastmha.plan(q, k, k, num_threads=n, algorithm="tiled") for n in (1, 2, 8)}
    assert min(plan.balance for plan in busy.values()) > 0.9
    assert busy[8].scratch_bytes > 8 * busy[1].scratch_bytes        # what the runs leave
    by_runs, merged = forward_items(q, k, 8)
    assert (by_runs["rows"] * by_runs["keys"]).sum() == 64 * 100_000
    assert by_runs["keys"].max() == RUN
    assert merged["rows"].sum() == 64


@pytest.mark.parametrize(
    ("threads", "heads", "L", "causal", "busy"),
    [(64, 1, 3139, False, 0.92), (64, 1, 3139, True, 0.93), (64, 3, 2226, False, 0.95), (64, 3, 2226, True, 0.95),
     (8, 2, 1100, False, 0.97), (192, 1, 9003, False, 0.94), (192, 1, 9003, True, 0.94), (64, 2, 2985, False, 0.95),
     (64, 2, 2985, True, 0.94)],
)  # fmt: skip
def test_long_items_come_first_and_each_pair_is_in_one_of_them(threads, heads, L, causal, busy):
    """Runs of blocks of 64 rows, or blocks of 16 rows throughout, cost more, and whole blocks leave threads idle at the end."""
    x = np.broadcast_to(np.float32(0), (1, heads, L, 64))
    rules = {"is_causal": causal, "offset": 0 if causal else None}
    items, merged = forward_items(x, x, threads, **rules)
    work = planning._pairs_of_items(attention_problem(x, x, x, "BHLD", Rules(**rules)), items)
    assert work[-threads:].max() < work[: len(items) // 2].max()
    fewer = (items["rows"] < 64) & (items["row"] + items["rows"] < L)
    assert set(items["rows"][fewer]) <= {16, 32}
    assert not fewer.any() or not (items["rows"][fewer.argmax() :] == 64).any()
    met = np.zeros((heads, L, -(-L // TILE)), int)
    for item in items:
        tiles = slice(item["key"] // TILE, -(-(item["key"] + item["keys"]) // TILE))
        met[item["head"], item["row"] : item["row"] + item["rows"], tiles] += 1
    ends = np.arange(L) // TILE if causal else np.full(L, (L - 1) // TILE)
    assert met.max() == 1
    assert all((met[:, row, : tile + 1] == 1).all() for row, tile in enumerate(ends))
    runs = items[items["keys"] < L]
    assert set(runs["key"] % TILE) == {0}
    assert merged["rows"].sum() == runs["rows"][runs["key"] == 0].sum()
    assert fastmha.plan(x, x, x, num_threads=threads, algorithm="tiled", **rules).balance > busy
