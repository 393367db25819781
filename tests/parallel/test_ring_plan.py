"""The plan and the simulation of a ring: pure counts, without MPI. programs/ring_plan.py compares messages with those sent."""
import itertools
import re

import numpy as np
import pytest

import fastmha
from fastmha import analysis
from fastmha.parallel.plans import Link
from fastmha.parallel.ring import ring_positions
from fastmha.parallel.ring_plan import pairs_by_step, plan_ring, simulate_ring

LINK = Link(2e-6, 1e10)
SIZES = {"flops_per_second": 5e10, "link": LINK}
BANDS = {
    "all": {}, "causal": {"is_causal": True}, "left": {"window": (7, None)}, "both": {"window": (5, 3)},
    "causal window": {"is_causal": True, "window": (9, 2)}, "wide": {"window": (1000, 1000)},
}  # fmt: skip
bands = pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
orders = pytest.mark.parametrize("order", ["zigzag", "contiguous"])


@orders
def test_ranks_hold_each_position_once_as_evenly_as_runs_allow(order):
    for length, size in itertools.product((0, 1, 5, 16, 33), (1, 2, 3, 4, 7)):
        runs = [ring_positions(length, size, rank, order) for rank in range(size)]
        held = sorted(j for rank in runs for run in rank for j in range(*run))
        assert held == list(range(length))
        lengths = [sum(stop - start for start, stop in rank) for rank in runs]
        assert max(lengths) - min(lengths) <= (1 if order == "contiguous" else 2)
        assert runs == [ring_positions(lengths, size, rank, order) for rank in range(size)]


@orders
def test_lengths_of_each_rank_are_kept(order):
    lengths = [3, 0, 8, 1]
    runs = [ring_positions(lengths, 4, rank, order) for rank in range(4)]
    assert [sum(stop - start for start, stop in rank) for rank in runs] == lengths
    assert sorted(j for rank in runs for run in rank for j in range(*run)) == list(range(12))


def test_wrong_positions_are_errors_that_name_the_argument():
    for words, args in (("rank must be at most 3, got 4", (8, 4, 4)), ("size must be at least 1, got 0", (8, 0, 0)),
                        ("length must be at least 0, got -1", (-1, 2, 0)), ("length[1] must be at least 0", ([1, -1], 2, 0)),
                        ("length must be an int or one for each of 3 ranks, got 2 of them", ([1, 2], 3, 0)),
                        ('order must be "zigzag" or "contiguous", got \'line\'', (8, 2, 0, "line"))):
        with pytest.raises(ValueError, match=re.escape(words)):
            ring_positions(*args)
    with pytest.raises(TypeError, match=re.escape("length must be an integer, got 2.5")):
        ring_positions(2.5, 2, 0)


@bands
@orders
def test_pairs_of_each_step_are_those_that_one_by_one_are_left(band, order):
    for lengths in ([9, 9, 9], [0, 5, 13, 2], [17]):
        left, right = fastmha.validate.band(band.get("is_causal", False), band.get("window"))
        i, j = np.mgrid[:sum(lengths), :sum(lengths)]
        kept = np.ones(i.shape, bool) if left is None else j >= i - left
        kept &= True if right is None else j <= i + right
        size = len(lengths)
        at = [np.concatenate([np.arange(*run) for run in ring_positions(lengths, size, r, order)]) for r in range(size)]
        expected = [[kept[np.ix_(at[r], at[r - s])].sum() for s in range(size)] for r in range(size)]
        assert pairs_by_step(lengths, order, left, right).tolist() == expected


@bands
@orders
@pytest.mark.parametrize("backward", [False, True])
def test_flops_of_all_ranks_are_those_of_one_process(band, order, backward):
    B, L, H, Hkv, D = 2, 37, 6, 2, 8
    q, k = np.zeros((B, H, L, D), np.float32), np.zeros((B, Hkv, L, D), np.float32)
    whole = fastmha.plan(q, k, k, backward=backward, **band).flops
    layer = analysis.count_flops(B, L, H * D, H, n_kv_heads=Hkv, backward=backward, **band)
    projections = analysis.count_flops(B, L, H * D, H, n_kv_heads=Hkv, backward=backward, window=(0, 0))
    pair = (10 + 4) * D + 10 if backward else 4 * D + 5
    for ranks in (1, 2, 3, 5):
        plan = plan_ring(B, L, H, D, ranks, num_kv_heads=Hkv, order=order, backward=backward, **band, **SIZES)
        assert plan.flops == whole
        pairs = plan.flops // (((10 + 4) if backward else 4) * D)
        assert layer - projections == (pairs - B * H * L) * pair
        assert sum(rank.tokens for rank in plan.ranks) == L


@pytest.mark.parametrize("ranks", [4, 64, 1024])
def test_zigzag_balances_causal_work_to_one_per_cent_and_contiguous_does_not(ranks):
    plans = {order: plan_ring(1, 1 << 18, 8, 64, ranks, is_causal=True, order=order, **SIZES)
             for order in ("zigzag", "contiguous")}
    flops = {order: [rank.flops for rank in plan.ranks] for order, plan in plans.items()}
    assert max(flops["zigzag"]) < 1.01 * min(flops["zigzag"])
    assert plans["zigzag"].balance > 0.99
    assert plans["contiguous"].balance < 0.6 + 0.1 * (ranks == 4)
    assert plans["zigzag"].seconds < 0.75 * plans["contiguous"].seconds


@orders
@pytest.mark.parametrize("band", [{}, {"is_causal": True}, {"window": (512, 0)}], ids=["all", "causal", "window"])
@pytest.mark.parametrize("backward", [False, True])
def test_no_simulated_time_is_below_the_bound_of_compute_or_link(order, band, backward):
    for ranks, link in itertools.product((1, 2, 5, 64), (LINK, Link(1e-4, 1e8), Link(0, 1e12))):
        times = simulate_ring(1, 1 << 15, 8, 64, ranks, order=order, backward=backward, flops_per_second=5e10, link=link, **band)
        assert times.seconds >= max(times.compute_seconds, times.link_seconds) * (1 - 1e-12)
        assert 0 < times.busy <= 1 + 1e-12
        if ranks == 1:
            assert times.link_seconds == 0
            assert times.busy == pytest.approx(1)


def test_a_link_that_costs_next_to_nothing_leaves_even_work_busy():
    times = simulate_ring(1, 1 << 15, 8, 64, 64, flops_per_second=5e10, link=Link(0, 1e18))
    assert times.busy == pytest.approx(1)
    assert times.seconds == pytest.approx(times.compute_seconds)


def test_a_slow_link_is_all_that_counts_and_each_message_is_waited_for():
    """Without compute: size - 1 messages one after another, and backward one of keys and one of gradients at each step."""
    link = Link(1.0, 1e12)
    small = 3 * link.allreduce_seconds(24, 8)
    forward = simulate_ring(1, 64, 1, 8, 8, flops_per_second=1e30, link=link).seconds
    assert forward == pytest.approx(7 + small, rel=1e-6)
    both = simulate_ring(1, 64, 1, 8, 8, backward=True, flops_per_second=1e30, link=link).seconds
    assert both == pytest.approx(7 + 15 + 2 * small, rel=1e-6)


def test_steps_wait_for_the_slowest_neighbour_where_work_is_uneven():
    """Two ranks, contiguous and causal: the second one's first step holds up nobody, its second waits for no message."""
    L, rate = 1 << 12, 1e9
    times = simulate_ring(1, L, 1, 64, 2, order="contiguous", is_causal=True, flops_per_second=rate, link=Link(0, 1e18))
    half = L // 2
    assert times.seconds == pytest.approx((half * (half + 1) // 2 + half * half) * 4 * 64 / rate)
    assert times.busy == pytest.approx((L * (L + 1) // 2) / 2 / (half * (half + 1) // 2 + half * half))


def test_a_plan_prints_what_each_rank_holds():
    text = str(plan_ring(1, 4096, 8, 64, 4, num_kv_heads=2, is_causal=True, **SIZES))
    assert "4096 tokens dealt to 4 ranks (zigzag): B 1, H 8/2, D 64, float32, causal, forward" in text
    assert "positions 0-511, 3584-4095" in text


@pytest.mark.parametrize("function", [plan_ring, simulate_ring])
def test_errors_of_plans_name_the_argument(function):
    good = {"batch_size": 1, "seq_len": 64, "num_heads": 4, "head_dim": 8, "ranks": 2, **SIZES}
    for error, words, wrong in (
        (ValueError, "ranks must be at least 1, got 0", {"ranks": 0}),
        (ValueError, "seq_len must be at least 0, got -3", {"seq_len": -3}),
        (ValueError, "num_heads must be a multiple of num_kv_heads, got 4 and 3", {"num_kv_heads": 3}),
        (ValueError, 'order must be "zigzag" or "contiguous"', {"order": "line"}),
        (ValueError, "flops_per_second must be a finite number > 0, got 0", {"flops_per_second": 0}),
        (TypeError, "dtype must be float32 or float64, got 'int8'", {"dtype": "int8"}),
        (TypeError, "link must be a Link, got 5", {"link": 5}),
        (TypeError, "window must be None or a pair", {"window": 5}),
        (TypeError, "is_causal must be True or False, got 1", {"is_causal": 1}),
        (TypeError, "backward must be True or False, got 1", {"backward": 1}),
    ):
        with pytest.raises(error, match=re.escape(words)):
            function(**(good | wrong))
