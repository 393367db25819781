"""The plan: which algorithm, by lengths, widths, dtype and instruction set alone; why; and how even the work is."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from support import draw, dtypes, selected

import fastmha
from fastmha import _core, algorithms, reference, tuning, validate
from fastmha.algorithms import ALGORITHMS
from fastmha.planning import choose, choose_layout, makespan

NAMES = set(ALGORITHMS) - {"auto"}
# (B, H, L, D) of the measured grid.
SQUARES = [
    (32, 8, 16, 64),
    (1, 8, 128, 64),
    (8, 12, 128, 64),
    (4, 8, 512, 64),
    (1, 12, 1024, 64),
    (1, 8, 2048, 64),
    (1, 16, 1024, 128),
]


def plan(B=1, H=2, Hkv=None, Lq=9, Lk=None, D=8, Dv=None, dtype=np.float32, **keywords):
    """The plan for arrays of these sizes, whose memory nobody touches."""
    Hkv, Lk, Dv = Hkv or H, Lk or Lq, Dv or D
    shapes = (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv)
    return fastmha.plan(*(np.empty(shape, dtype) for shape in shapes), **keywords)


# ----------------------------------------------------------------------------------------------------------- the choice


@dtypes
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("H", "Hkv", "L"), [(1, 1, 1), (8, 1, 1), (9, 1, 1), (2, 2, 8), (2, 2, 65), (4, 2, 400)])
def test_the_choice_looks_at_neither_batch_nor_threads(isa, dtype, backward, H, Hkv, L):
    plans = [
        plan(B, H, Hkv, L, 70, dtype=dtype, backward=backward, num_threads=threads)
        for B in (1, 2, 64)
        for threads in (1, 2, 7, 128)
    ]
    assert len({(p.algorithm, p.tile, str(p.reasons)) for p in plans}) == 1


@dtypes
@pytest.mark.parametrize("Lq", [1, 30, 100])
def test_the_choice_looks_at_no_values(isa, dtype, Lq, rng):
    arrays = draw(rng, 2, 2, 2, Lq, 70, 8, 8, dtype)[:3]
    wanted = fastmha.plan(*arrays, num_threads=3)
    for value in (0, 1e30, np.nan, np.inf):
        for x in arrays:
            x[...] = value
        assert fastmha.plan(*arrays, num_threads=3) == wanted
    for mask in (np.zeros((Lq, 70), bool), np.ones((Lq, 70), bool)):
        assert fastmha.plan(*arrays, mask=mask, num_threads=3).algorithm == wanted.algorithm


@dtypes
def test_the_choice_does_not_change_from_call_to_call_and_layout_to_layout(isa, dtype):
    for Lq in (1, 8, 9, 64, 65, 512):
        heads = np.broadcast_to(dtype(0), (2, 4, Lq, 16))
        first = fastmha.plan(heads, heads, heads)
        assert fastmha.plan(heads, heads, heads) == first
        rows = heads.swapaxes(1, 2)
        assert fastmha.plan(rows, rows, rows, layout="BLHD").algorithm == first.algorithm


@dtypes
def test_the_choice_looks_at_lengths(isa, dtype):
    assert plan(Lq=1, Lk=4096, D=64, dtype=dtype).algorithm == "decode"
    assert plan(H=4, Hkv=1, Lq=1, Lk=4096, D=64, dtype=dtype).algorithm == "decode"
    wide = "tiled" if _core.fused_multiply_add() else "blas"
    assert plan(Lq=64, Lk=4096, dtype=dtype).algorithm == wide
    assert plan(Lq=4096, dtype=dtype).algorithm == wide
    # The rows of a whole group count, not those of one head.
    for Lq in (1, 2, 4, 8, 16, 33, 64, 65):
        alone = plan(H=1, Hkv=1, Lq=8 * Lq, Lk=600, dtype=dtype)
        group = plan(H=8, Hkv=1, Lq=Lq, Lk=600, dtype=dtype)
        assert alone.algorithm == group.algorithm


@pytest.mark.parametrize(("vectors", "most_of_half"), [("avx2", 8), ("avx512", 9)])
def test_four_rows_are_decoded_however_long_the_keys_and_more_where_these_are_of_half_precision(vectors, most_of_half):
    if vectors not in _core.runnable_isas():
        pytest.skip(f"this machine has no {vectors}")
    with selected(vectors):
        for dtype, most in ((np.float32, 4), (np.float64, 4), (np.float16, most_of_half)):
            for rows in range(1, 12):
                found = plan(H=rows, Hkv=1, Lq=1, Lk=10**6, D=128, dtype=dtype)
                assert found.algorithm == ("decode" if rows <= most else "tiled")
                assert "needs more bytes of keys" not in found.reasons["decode"]
        assert "needs more bytes of keys" in plan(Lq=4, Lk=1, D=128).reasons["decode"]


@dtypes
def test_many_short_sequences_are_not_decoded(isa, dtype):
    """What an item costs counts: only keys of some length pay for it, the more so the more rows there are; one row always."""
    wide = "tiled" if _core.fused_multiply_add() else "blas"
    assert plan(H=4096, Lq=8, D=64, dtype=dtype).algorithm == wide
    assert plan(B=64, H=8, Lq=3, D=16, dtype=dtype).algorithm == wide
    assert plan(B=1000, Lq=1, D=4, dtype=dtype).algorithm == ("decode" if _core.fused_multiply_add() else wide)
    for D in (8, 64, 128):
        for Lq in range(1, 9):
            chosen = [plan(Lq=Lq, Lk=Lk, D=D, dtype=dtype).algorithm == "decode" for Lk in (1, 5, 30, 200, 1000, 9000)]
            assert chosen == sorted(chosen)


def test_rows_of_float64_and_keys_of_half_precision_have_crossovers_of_their_own():
    settings = replace(tuning.current(), decode=((4, 64, 1024),), decode_float64=((2, 64, 1024),), decode_half=((5, 64, 1024),))
    for rows in range(1, 7):
        with tuning.using(settings):
            chosen = [plan(H=rows, Hkv=1, Lq=1, Lk=100, D=64, dtype=of).algorithm
                      for of in (np.float32, np.float64, np.float16)]
        assert [algorithm == "decode" for algorithm in chosen] == [rows <= 4, rows <= 2, rows <= 5]


@dtypes
def test_the_backward_pass_of_one_key_is_that_of_blas(isa, dtype):
    """It takes its own sums of P and dP, and so leaves exact zeros where the weight is 1 whatever the score."""
    assert plan(Lq=9, Lk=1, dtype=dtype, backward=True).algorithm == "blas"
    q, k, v, g = draw(np.random.default_rng(0), 2, 6, 2, 9, 1, 20, 7, dtype)
    out, lse = fastmha.attention(q, k, v, return_lse=True)
    grad_q, grad_k, _ = fastmha.attention_backward(g, q, k, v, out, lse)
    assert not grad_q.any()
    assert not grad_k.any()
    assert plan(Lq=9, Lk=2, dtype=dtype, backward=True).algorithm == ("tiled" if _core.fused_multiply_add() else "blas")


def test_decode_is_never_chosen_for_a_backward_pass(isa):
    for Lq in (1, 2, 8, 100):
        assert plan(Lq=Lq, Lk=200, backward=True).algorithm in ("tiled", "blas")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("H", "Lq"), [(1, 1), (4, 2), (1, 9), (2, 64), (8, 70), (8, 512), (1, 0)])
def test_reasons_name_every_algorithm(isa, algorithm, H, Lq, backward):
    q, k = np.zeros((1, H, Lq, 8), np.float32), np.zeros((1, 1, 600, 8), np.float32)
    if algorithm == "decode" and (backward or H * Lq > 64):
        with pytest.raises(ValueError, match='algorithm "decode" cannot serve this call: '):
            fastmha.plan(q, k, k, algorithm=algorithm, backward=backward)
        return
    made = fastmha.plan(q, k, k, algorithm=algorithm, backward=backward)
    assert made.algorithm == algorithm or algorithm == "auto"
    assert set(made.reasons) == NAMES
    for why in made.reasons.values():
        assert why.strip()
        assert "\n" not in why
    if algorithm != "auto":
        assert made.reasons[algorithm] == "named by the caller"


def test_a_name_that_is_none_is_refused(rng):
    q, k, v, _ = draw(rng)
    for function in (fastmha.plan, fastmha.attention):
        with pytest.raises(ValueError, match=r"algorithm must be .*, got 'flash'"):
            function(q, k, v, algorithm="flash")


def test_no_name_stands_for_another_below_validation(rng):
    q, k, v, _ = draw(rng)
    problem, out = validate.attention_problem(q, k, v, "BHLD"), np.zeros(q.shape)
    for name in ("flash", "auto"):
        with pytest.raises(KeyError):
            algorithms.forward(name, problem, out, None, None, 1)
    assert not out.any()


def test_what_calls_share_cannot_be_changed(rng):
    q, k, v, _ = draw(rng)
    problem = validate.attention_problem(q, k, v, "BHLD")
    for algorithm in ALGORITHMS:
        name, reasons = choose(problem, algorithm)
        with pytest.raises(TypeError):
            reasons[name] = ""
    with pytest.raises(TypeError):
        algorithms.BY_NAME["flash"] = algorithms.TILED
    fastmha.plan(q, k, v).reasons.clear()  # a caller's own
    assert fastmha.plan(q, k, v).reasons


# ---------------------------------------------------------------------------------------------------------- the receipt


@pytest.mark.parametrize(
    ("algorithm", "backward"),
    [(name, False) for name in ALGORITHMS] + [("auto", True), ("blas", True), ("tiled", True)],
)
def test_the_receipt_says_it_all(isa, algorithm, backward, capsys):
    rules = {"is_causal": True, "offset": 595}
    made = plan(3, 8, 2, 5, 600, 16, 9, algorithm=algorithm, backward=backward, num_threads=3, **rules)
    print(made)
    receipt = capsys.readouterr().out
    assert "forward + backward" in receipt if backward else "forward + backward" not in receipt
    for words in (
        "float32", "B 3", "H 8/2", "L 5 x 600", "D 16/9", "layout BHLD",
        f"{made.algorithm}: {made.reasons[made.algorithm]}", f"{isa}, 3 threads", f"balance {made.balance:.0%}",
        f"{made.tile[0]} queries x {made.tile[1]} keys", "GFLOP", f"{made.bytes_copied:,} bytes",
        f"{made.scratch_bytes:,} bytes",
    ):  # fmt: skip
        assert words in receipt
    for name in NAMES - {made.algorithm}:
        assert f"not {name}" in receipt
        assert made.reasons[name] in receipt
    assert max(map(len, receipt.splitlines())) < 130
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.threads = 1


@pytest.mark.parametrize("sizes", [{"B": 0}, {"H": 0, "Hkv": 0}, {"Lq": 0}, {"Lk": 0}, {"D": 0}, {"Dv": 0}])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_receipt_for_empty_arrays(isa, algorithm, sizes, rng):
    q, k, v, _ = draw(rng, **({"B": 2, "H": 4, "Hkv": 2, "Lq": 3, "Lk": 5, "D": 6, "Dv": 7} | sizes))
    made = fastmha.plan(q, k, v, algorithm=algorithm)
    assert 0 < made.balance <= 1
    assert str(made)


def test_flops_are_of_the_pairs_that_are_left():
    for rules in (
        {},
        {"is_causal": True, "offset": 4},
        {"is_causal": True, "offset": np.array([-3, 200])},
        {"window": (5, 2), "offset": np.array([-9, 14])},
        {"key_padding_lengths": np.array([0, 33])},
        {"key_padding_lengths": [40, 7], "window": (None, 3), "offset": 1, "is_causal": True},
    ):
        left = np.broadcast_to(~reference.removed(30, 50, **rules), (2, 4, 30, 50)).sum()
        assert plan(2, 4, 2, 30, 50, 8, 5, **rules).flops == left * 2 * (8 + 5)
        assert plan(2, 4, 2, 30, 50, 8, 5, backward=True, **rules).flops == left * (2 * (8 + 5) + 2 * (3 * 8 + 2 * 5))


# -------------------------------------------------------------------------------------------------------------- balance


def test_makespan_is_that_of_items_handed_out_in_order():
    for items, threads, wanted in (
        ([], 3, 0), ([5], 3, 5), ([1, 1, 1, 1], 2, 2), ([3, 3, 2, 2, 2], 2, 7), ([1, 1, 1, 1, 4], 2, 6),
        ([4, 1, 1, 1, 1], 2, 4), ([0, 0, 0], 2, 0), ([2, 2, 2], 1, 6),
    ):  # fmt: skip
        assert makespan(np.array(items, float), threads) == wanted


def test_items_of_one_chain_wait_for_each_other_in_a_makespan():
    cases = {(-1, -1, -1, -1): 4, (0, 0, 0, 0): 8, (0, 0, 1, 1): 6, (0, 1, 0, 1): 4, (2, -1, 2, 2): 6}
    for chains, wanted in cases.items():
        assert makespan(np.full(4, 2.0), 2, np.array(chains)) == wanted, chains


@pytest.mark.parametrize(
    ("algorithm", "backward"), [("blas", False), ("tiled", False), ("decode", False), ("blas", True), ("tiled", True)]
)
def test_balance_is_a_share_and_whole_with_one_thread(isa, algorithm, backward):
    for B, H, Hkv, Lq, Lk in ((1, 1, 1, 1, 1), (3, 4, 2, 7, 1300), (2, 3, 3, 64, 65)):
        for rules in ({}, {"is_causal": True, "offset": Lk - Lq}, {"is_causal": True, "offset": -Lq}):
            keywords = {"algorithm": algorithm, "backward": backward, **rules}
            assert plan(B, H, Hkv, Lq, Lk, num_threads=1, **keywords).balance == pytest.approx(1)
            for threads in (2, 3, 128):
                assert 0 < plan(B, H, Hkv, Lq, Lk, num_threads=threads, **keywords).balance <= 1 + 1e-12


@pytest.mark.parametrize("backward", [False, True])
def test_balance_counts_the_threads_that_wait_because_others_call_blas(backward):
    made = plan(1, 512, 512, 64, 64, algorithm="blas", backward=backward, num_threads=128)
    assert made.balance == pytest.approx(0.5)


def test_balance_is_a_share_where_a_mask_removes_the_first_and_last_keys():
    """Runs of keys that it removes are no items."""
    q, k = np.zeros((3, 2, 1, 16), np.float32), np.zeros((3, 2, 3521, 16), np.float32)
    for first, end in ((2242, 3521), (1000, 2000), (0, 800)):
        mask = np.ones((3, 1, 1, 3521), bool)
        mask[..., first:end] = False
        for threads in (1, 2, 4, 5, 8):
            assert 0 < fastmha.plan(q, k, k, mask=mask, algorithm="tiled", num_threads=threads).balance <= 1 + 1e-12


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SQUARES, ids=lambda shape: "x".join(map(str, shape)))
def test_work_is_within_a_tenth_of_evenly_spread_where_there_are_twelve_blocks_a_thread(isa, shape, causal, backward):
    """A block: 64 queries of a head. By the fused algorithm, which "auto" takes wherever there are vectors."""
    B, H, L, D = shape
    keywords = {"is_causal": causal, "algorithm": "tiled" if isa == "baseline" else "auto", "backward": backward}
    uneven = {}
    for threads in range(1, 129):
        if 12 * threads <= B * H * -(-L // 64):
            made = plan(B, H, H, L, L, D, num_threads=threads, **keywords)
            assert made.algorithm == "tiled"
            if made.balance < 1 / 1.1:
                uneven[threads] = round(made.balance, 3)
    assert uneven == {}


@pytest.mark.parametrize("backward", [False, True])
def test_short_heads_are_taken_several_at_a_time_and_the_balance_knows(backward):
    heads, groups = 130, 65     # by twos, so that one of two threads has 33 of these
    taken = plan(1, heads, heads, 16, 16, 64, num_threads=2, algorithm="tiled", backward=backward)
    assert taken.balance == pytest.approx(groups / 2 / 33)
    for each in ((1, heads, heads, 65, 65, 64), (1, heads, heads, 16, 4000, 64), (1, 126, 126, 16, 16, 64)):
        alone = plan(*each, num_threads=2, algorithm="tiled", backward=backward)
        assert alone.balance == pytest.approx(1)      # 65 or 63 items each


def split(B, H, Hkv, L, threads, quick=False, **rules):
    q, k = np.empty((B, H, L, 64), np.float32), np.empty((B, Hkv, L, 64), np.float32)
    return _core.backward_split(validate.attention_problem(q, k, k, "BHLD", validate.Rules(**rules)), threads, quick)


def test_heads_that_the_threads_share_evenly_are_whole():
    for heads, threads in ((8, 8), (16, 8), (24, 4), (5, 1)):
        whole, keys, share, busy = split(1, heads, heads, 1024, threads)
        assert (whole, keys, share) == (heads, 192, 0)
        assert busy == pytest.approx(1)


def test_heads_that_are_left_are_split_into_tiles_and_where_these_are_few_into_shares_of_blocks():
    whole, keys, _, busy = split(1, 5, 5, 3000, 4)
    assert (whole, keys) == (4, 192)
    assert busy > 0.98
    for rules in ({}, {"is_causal": True, "offset": 0}):
        whole, keys, share, busy = split(1, 8, 8, 2048, 64, **rules)
        assert whole == 0
        assert share in (1, 2, 4, 8)
        assert busy > 0.9


def test_where_tiles_are_too_long_parts_of_them_are_items():
    """One tile a head, and not as many blocks as threads: by whole tiles three of four threads are busy at most."""
    whole, keys, _, busy = split(3, 1, 1, 192, 4)
    assert (whole, keys) == (0, 48)
    assert busy > 0.9


def test_more_heads_are_split_than_are_left_where_these_alone_are_too_few_items():
    """Of 9 heads for 8 threads one is left, with two blocks and one tile."""
    whole, _, _, busy = split(1, 9, 9, 128, 8)
    assert whole == 0
    assert busy > 0.9


def test_shares_do_not_queue_for_the_sums_of_one_tile():
    """One head for 64 threads, which one tile at a time would keep 80 % busy."""
    assert split(1, 1, 1, 16384, 64)[-1] > 0.9


def test_sixteen_threads_are_busy_with_few_causal_heads():
    """By as many shares under way as there are threads: with fewer, each keeps sums of its own until its turn and adds them
    later, which leaves 0.90 and 0.89 busy at best."""
    for B, H, Hkv, L in ((3, 4, 2, 583), (1, 16, 8, 390)):
        assert split(B, H, Hkv, L, 16, is_causal=True, offset=0)[-1] > 0.92


def test_lengths_of_batch_rows_decide_how_heads_are_split():
    for lengths, whole in (([1024, 1024, 1024], 2), ([10, 1024, 1024], 3)):
        assert split(3, 1, 1, 1024, 2, key_padding_lengths=np.array(lengths))[0] == whole


def test_a_backward_pass_too_long_to_be_simulated_is_taken_to_be_even():
    for rules in ({}, {"is_causal": True, "offset": 0}):
        whole, keys, share, busy = split(1, 1, 1, 200_000, 64, **rules)
        assert (whole, keys) == (0, 192)
        assert share in (0, 8)
        assert 0.9 < busy <= 1


def test_a_quick_look_finds_all_where_there_is_little_to_look_at():
    for threads in (2, 3, 4):
        for shape in ((1, 5, 5, 3000), (3, 1, 1, 192), (2, 4, 2, 700)):
            assert split(*shape, threads, quick=True, is_causal=True) == split(*shape, threads, is_causal=True)


def test_a_quick_look_leaves_no_thread_without_work():
    """However little of it there is, for so many threads, and however long it would take to look at all ways."""
    for threads in (64, 192):
        for shape in ((1, 1, 1, 8192), (1, 2, 1, 2048), (3, 12, 4, 1000), (16, 16, 16, 512)):
            thorough, quick = split(*shape, threads)[-1], split(*shape, threads, quick=True)[-1]
            assert quick > 0.7 * thorough


def test_a_pass_looks_quickly_at_sizes_that_it_meets_for_the_first_time_and_thoroughly_the_second_time():
    B, H, L, D, threads = 3, 4, 781, 8, 192
    q = np.random.default_rng(0).standard_normal((B, H, L, D), np.float32)
    rules = {"is_causal": True, "num_threads": threads, "algorithm": "tiled"}

    def met():
        out, lse = fastmha.attention(q, q, q, return_lse=True, **rules)
        gradients = fastmha.attention_backward(out, q, q, q, out, lse, **rules)
        return (out, *gradients), _core.remembered_cuts()[-2:]

    first, looks = met()
    assert [left_out for _, left_out in looks] == [True, True]
    second, looks = met()
    assert [left_out for _, left_out in looks] == [False, False]
    assert looks[1][0]["balance"] == fastmha.plan(q, q, q, backward=True, **rules).balance
    assert all(map(np.array_equal, first, second))


def test_the_layout_of_a_projection_is_a_rule_of_lengths_and_widths():
    for L, head_bytes in ((256, 256), (512, 128), (4096, 512)):
        assert choose_layout(L, head_bytes, False)[0] == "contiguous"
    for L, head_bytes, by_blas, why in ((255, 512, False, "255 tokens per batch row, below 256"),
                                        (4096, 64, False, "64 bytes per token and head, below 128"),
                                        (511, 128, False, "heads of 65408 bytes, below 65536"),
                                        (4096, 512, True, "BLAS makes the projection")):
        layout, reason = choose_layout(L, head_bytes, by_blas)
        assert layout == "strided"
        assert reason.startswith(why)


def test_the_receipt_says_how_heads_lie():
    rows = np.zeros((1, 70, 3, 4, 16), np.float32)
    strided = [rows[:, :, i].swapaxes(1, 2) for i in range(3)]
    copies = [x.copy() for x in strided]
    for heads, layout in ((strided, "strided"), (copies, "contiguous"), ([copies[0], *strided[1:]], "strided")):
        found = fastmha.plan(*heads)
        assert found.layout == layout
        assert f"  layout      {layout}: heads are read where they lie\n" in str(found)
