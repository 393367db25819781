"""Runs of keys of a tiled forward pass: a softmax each, merged in their order, in one item or in many, with the same bits.

A run is 768 keys, and many items are made of it where blocks of 64 rows are few for the threads: lengths here lie around both.
"""

import numpy as np
import pytest
from support import all_dtypes, assert_close, draw, every_isa, oracle, same_bits

import fastmha
from fastmha import _core

RUN = 768
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
}


def forward(q, k, v, threads, **rules):
    return fastmha.attention(q, k, v, algorithm="tiled", return_lse=True, num_threads=threads, **rules)


@every_isa
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@all_dtypes
def test_runs_of_keys_agree_with_the_oracle_and_have_the_bits_of_one_item(shape, dtype, rules, isa, rng):
    H, Hkv, Lq, Lk, D, Dv = shape
    q, k, v, g = draw(rng, 1, H, Hkv, Lq, Lk, D, Dv, dtype)
    rules = RULES[rules](Lq, Lk)
    whole = forward(q, k, v, 1, **rules)
    expected, bounds = oracle(q, k, v, g, q.dtype, **rules)
    assert_close(whole, expected[:2], bounds[:2])
    for threads in (2, 5):
        for x, y in zip(whole, forward(q, k, v, threads, **rules), strict=True):
            assert same_bits(x, y)


@every_isa
@all_dtypes
def test_sinks_are_in_the_first_run_alone(dtype, isa, rng):
    q, k, v, g = draw(rng, 1, 2, 1, 30, 2 * RUN + 5, 16, 16, dtype)
    of = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    for rules in ({}, {"window": (200, 0), "offset": 2 * RUN - 40}):
        rules["sinks"] = np.array([0.5, 3.0], of)
        whole, split = forward(q, k, v, 1, **rules), forward(q, k, v, 3, **rules)
        expected, bounds = oracle(q, k, v, g, q.dtype, **rules)
        assert_close(whole, expected[:2], bounds[:2])
        assert all(map(same_bits, whole, split))


@every_isa
def test_a_row_has_the_bits_it_has_alone_whatever_runs_its_block_meets(isa, rng):
    q, k, v, _ = draw(rng, 1, 1, 1, 64, 3 * RUN, 16, 16, np.float32)
    window = {"window": (400, 0)}
    out, lse = forward(q, k, v, 3, offset=RUN - 32, **window)       # rows on either side of the end of the first run
    for row in (0, 31, 32, 63):
        one, of_one = forward(q[:, :, row : row + 1], k, v, 3, offset=RUN - 32 + row, **window)
        assert same_bits(one[0, 0, 0], out[0, 0, row])
        assert same_bits(of_one[0, 0, 0], lse[0, 0, row])


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
    items = _core.items(fastmha.validate.attention_problem(q, k, k, "BHLD", fastmha.validate.Rules()), "tiled", False, 0, 8)
    assert [len(x) // 48 for x in items] == [-(-100_000 // RUN), 1]
