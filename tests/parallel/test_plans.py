"""Plans of a module on several ranks: no MPI."""
import math

import numpy as np
import pytest

from fastmha import MultiHeadAttention, analysis
from fastmha.parallel import Link, measured_rate, plan_shards
from fastmha.parallel.plans import cut_heads

LINK = Link(1e-6, 1e10)
HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (12, 3), (7, 7), (1, 1), (32, 8)]


@pytest.mark.parametrize(("H", "Hkv"), HEADS)
def test_every_head_is_on_one_rank_with_the_key_value_head_that_it_reads(H, Hkv):
    for ranks in range(1, H + 1):
        cuts = cut_heads(H, Hkv, ranks)
        assert [h for cut in cuts for h in range(H)[cut.heads]] == list(range(H))
        for cut in cuts:
            heads, kv_heads = range(H)[cut.heads], range(Hkv)[cut.kv_heads]
            # the n-th own head reads the own key/value head that the whole's rule names
            group = len(heads) // len(kv_heads)
            assert [kv_heads[n // group] for n in range(len(heads))] == [h // (H // Hkv) for h in heads]
        assert sorted(k for cut in cuts if cut.is_first for k in range(Hkv)[cut.kv_heads]) == list(range(Hkv))


@pytest.mark.parametrize(("H", "Hkv"), HEADS)
def test_ranks_differ_by_at_most_one_group_or_by_one_head_of_a_group(H, Hkv):
    for ranks in range(1, H + 1):
        numbers = [cut.heads.stop - cut.heads.start for cut in cut_heads(H, Hkv, ranks)]
        if ranks <= Hkv:
            assert max(numbers) - min(numbers) <= H // Hkv
        else:
            assert max(numbers) == math.ceil(H // Hkv / (ranks // Hkv))


def test_flops_of_the_ranks_are_those_of_the_whole_where_no_rank_repeats_another():
    for backward in (False, True):
        for ranks in (1, 3, 8):
            plan = plan_shards(2, 50, 64, 8, ranks, is_causal=True, backward=backward, flops_per_second=1e9, link=LINK)
            assert plan.flops == analysis.count_flops(2, 50, 64, 8, is_causal=True, backward=backward)
        repeated = plan_shards(2, 50, 64, 8, 8, num_kv_heads=2, flops_per_second=1e9, link=LINK)
        # each of two key/value heads is projected by four ranks: keys and values of 50 tokens, three times too often
        assert repeated.flops - analysis.count_flops(2, 50, 64, 8, n_kv_heads=2) == 3 * 2 * (2 * 2 * 50 * 64 * 2 * 8)
        assert "FLOPs more than without ranks" in str(repeated)


@pytest.mark.parametrize("use_bias", [False, True, "qkv", "out"])
def test_bytes_of_weights_on_one_rank_are_those_of_the_module(use_bias):
    module = MultiHeadAttention(24, 6, num_kv_heads=2, head_dim=5, use_bias=use_bias, dtype=np.float64, rng=0)
    plan = plan_shards(1, 8, 24, 6, 1, num_kv_heads=2, head_dim=5, use_bias=use_bias, dtype=np.float64, flops_per_second=1e9,
                       link=LINK)
    assert plan.ranks[0].held_bytes == sum(value.nbytes for value in module.parameters().values())
    assert (plan.ranks[0].messages, plan.ranks[0].bytes, plan.ranks[0].link_seconds) == (0, 0, 0)


def test_predicted_seconds_are_compute_of_the_busiest_rank_and_the_sums_behind_it():
    plan = plan_shards(4, 128, 64, 8, 3, flops_per_second=2e9, link=LINK)
    output = 4 * 128 * 64 * 4
    link = LINK.allreduce_seconds(24, 3) + LINK.allreduce_seconds(output, 3)
    assert plan.seconds == pytest.approx(plan.ranks[0].flops / 2e9 + link)
    assert plan.balance == pytest.approx(8 / 9, rel=1e-3)       # 3, 3 and 2 heads


def test_sums_in_slices_are_hidden_behind_the_products_but_for_the_last():
    given = {"flops_per_second": 1e9, "link": Link(1e-6, 1e7)}
    whole, sliced = plan_shards(1, 100, 64, 8, 2, **given), plan_shards(1, 100, 64, 8, 2, overlap_rows=30, **given)
    one = Link(1e-6, 1e7).allreduce_seconds(30 * 64 * 4, 2)
    product = 2 * 30 * 32 * 64 / 1e9
    assert product < one
    assert sliced.seconds == pytest.approx(sliced.ranks[0].compute_seconds + sliced.ranks[0].link_seconds - 3 * product)
    assert (whole.ranks[0].messages, sliced.ranks[0].messages) == (2, 6)        # one agreement more, and four sums
    assert sliced.ranks[0].bytes == whole.ranks[0].bytes + 24


def test_allreduce_takes_the_faster_of_whole_buffers_and_slices():
    link = Link(1e-6, 1e9)
    assert link.allreduce_seconds(10**6, 1) == 0
    assert link.allreduce_seconds(8, 8) == pytest.approx(3 * (1e-6 + 8e-9))
    assert link.allreduce_seconds(10**9, 8) == pytest.approx(6e-6 + 2 * 7 / 8)
    assert link.seconds(10**9) == pytest.approx(1 + 1e-6)


def test_receipt_has_a_line_for_each_rank_and_leaves_the_middle_of_many_out():
    few = str(plan_shards(1, 16, 64, 8, 3, flops_per_second=1e9, link=LINK)).splitlines()
    assert few[0] == "8 heads over 8 key/value heads dealt to 3 ranks: B 1, L 16, d_model 64, float32, forward"
    assert few[1] == "1 GF/s a rank; link 1 µs, 10 GB/s"
    assert [line.split()[0] for line in few[3:6]] == ["0", "1", "2"]
    assert "heads 3-5, key/value heads 3-5" in few[4]
    many = str(plan_shards(1, 16, 64, 64, 64, flops_per_second=1e9, link=LINK)).splitlines()
    assert len(many) == 3 + 17 + 1
    assert "48 ranks more" in many[11]


def test_measured_rate_is_that_of_a_run_here():
    rate = measured_rate(64, 64, 4, num_threads=1, seconds=0.01)
    assert 1e7 < rate < 1e13
    plan = plan_shards(1, 16, 64, 8, 2, backward=True, link=LINK)
    assert 1e7 < plan.flops_per_second < 1e13


@pytest.mark.parametrize(("changed", "kind", "message"), [
    ({"ranks": 9}, ValueError, "ranks must be at most one for each of the 8 heads, got 9"),
    ({"ranks": 0}, ValueError, "ranks must be at least 1, got 0"),
    ({"ranks": 2.0}, TypeError, "ranks must be an integer"),
    ({"num_kv_heads": 3}, ValueError, "n_heads must be a multiple of n_kv_heads"),
    ({"seq_len": -1}, ValueError, "seq_len must be at least 0"),
    ({"backward": 1}, TypeError, "backward must be"),
    ({"flops_per_second": 0}, ValueError, "flops_per_second must be a finite number > 0, got 0"),
    ({"flops_per_second": "fast"}, TypeError, "flops_per_second must be a finite number > 0, got 'fast'"),
    ({"use_bias": "all"}, ValueError, "use_bias must be"),
    ({"dtype": "float16"}, TypeError, "dtype must be float32 or float64"),
    ({"link": 1e9}, TypeError, "link must be a Link, got 1000000000.0"),
])
def test_wrong_argument_of_a_plan_is_named(changed, kind, message):
    given = {"batch_size": 1, "seq_len": 16, "d_model": 64, "num_heads": 8, "ranks": 2, "flops_per_second": 1e9, "link": LINK}
    with pytest.raises(kind, match=message):
        plan_shards(**{**given, **changed})


@pytest.mark.parametrize(("arguments", "kind", "message"), [
    ((-1e-6, 1e9), ValueError, "latency_seconds must be a finite number >= 0, got -1e-06"),
    ((0, 0), ValueError, "bytes_per_second must be a finite number > 0, got 0"),
    ((math.nan, 1e9), ValueError, "latency_seconds must be a finite number >= 0, got nan"),
    (("fast", 1e9), TypeError, "latency_seconds must be a finite number >= 0, got 'fast'"),
    ((0, True), TypeError, "bytes_per_second must be a finite number > 0, got True"),
])
def test_wrong_link_is_named(arguments, kind, message):
    with pytest.raises(kind, match=message):
        Link(*arguments)
