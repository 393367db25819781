"""Key ranges: keys before a start and from an end on are removed, for nothing where they fill whole blocks.

Against the float64 reference with the bounds of `support.error_bounds`. Tiles hold 192 keys, blocks 64 rows, chunks of "decode"
512 keys in parts of 256, sums of even and odd keys are apart: starts here lie around all of these.
"""

import numpy as np
import pytest
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    DTYPES,
    ISAS,
    LAYOUTS,
    NAMED,
    algorithms,
    all_dtypes,
    assert_close,
    assert_same,
    bits,
    check,
    draw,
    dtypes,
    layouts,
    oracle,
    run,
    same_bits,
    selected,
)

import fastmha
from fastmha import reference

STARTS = (0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 191, 192, 193, 199, 200)


def decode(q, k, v, **keywords):
    return fastmha.attention(q, k, v, algorithm="decode", return_lse=True, **keywords)


def check_decode(q, k, v, g, **keywords):
    assert_close(decode(q, k, v, **keywords), *(x[:2] for x in oracle(q, k, v, g, q.dtype, **keywords)))


# ----------------------------------------------------------------------------------------------------------- the oracle


@dtypes
@algorithms
@pytest.mark.parametrize("rules", [{}, {"is_causal": True, "offset": 130}, {"window": (70, 40), "offset": 65}, {"softcap": 2.0}])
def test_starts_around_the_edges_of_vectors_blocks_and_tiles(isa, dtype, algorithm, rules, rng):
    arrays = draw(rng, len(STARTS), 2, 1, 35, 200, 5, 4, dtype)
    check(*arrays, key_ranges=(np.array(STARTS), None), algorithm=algorithm, **rules)
    check(*arrays, key_ranges=(np.array(STARTS), np.sort(rng.integers(STARTS, 201))), algorithm=algorithm, **rules)


@dtypes
@pytest.mark.parametrize("Lq", [1, 3])
def test_starts_around_the_edges_of_the_chunks_of_decode(isa, dtype, Lq, rng):
    starts = np.array([0, 1, 63, 64, 255, 256, 257, 511, 512, 513, 767, 769, 1023, 1025, 1100])
    arrays = draw(rng, len(starts), 4, 2, Lq, 1100, 6, 5, dtype)
    check_decode(*arrays, key_ranges=(starts, None))
    check_decode(*arrays, key_ranges=(starts, np.minimum(starts + 3, 1100)))
    check_decode(*arrays, key_ranges=(starts, 1100), is_causal=True, offset=np.maximum(starts - 1, 512), window=(300, 0))


@dtypes
@algorithms
@layouts
def test_ranges_and_lengths_leave_what_both_leave(dtype, algorithm, layout, rng):
    arrays = draw(rng, 4, 2, 2, 9, 30, 8, 8, dtype, layout=layout)
    keywords = {"layout": layout, "algorithm": algorithm}
    found = check(*arrays, key_ranges=([3, 5, 20, 0], [30, 9, 25, 30]), key_padding_lengths=[17, 12, 8, 0], **keywords)
    assert_same(found, run(fastmha, *arrays, key_ranges=([3, 5, 8, 0], [17, 9, 8, 0]), **keywords))
    assert np.isneginf(found[1][2:]).all()


@algorithms
@support.ill_scaled
def test_scores_of_every_size(isa, algorithm, kind, rng):
    arrays = support.draw_ill_scaled(kind, rng, 2, 4, 2, 70, 210)
    check(*arrays, key_ranges=([193, 3], [210, 190]), algorithm=algorithm)
    check(*arrays, key_ranges=([5, 208], None), is_causal=True, offset=140, algorithm=algorithm)


LENGTHS = st.one_of(st.integers(1, 200), st.sampled_from([1, 2, 63, 64, 65, 191, 192, 193, 200]))
KINDS = ("none", "bool", "bool of keys", "additive", "additive of two axes")


def side(rng, given, B, Lk):
    """One side of key ranges: often within two keys of an edge of a block."""
    if given == "none":
        return None
    near = np.clip(rng.choice([0, 64, 128, 192, Lk // 2, Lk], B) + rng.integers(-2, 3, B), 0, Lk)
    return int(near[0]) if given == "one" else near


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([(1, 1), (2, 1), (6, 2), (3, 3)]), LENGTHS, LENGTHS,
    st.sampled_from(["none", "one", "each"]), st.sampled_from(["none", "one", "each"]), st.sampled_from(KINDS), st.booleans(),
    st.sampled_from([None, (0, 0), (5, None), (None, 3), (70, 64)]), st.booleans(), st.sampled_from([None, 2.0]),
    st.sampled_from(DTYPES), st.sampled_from(LAYOUTS), st.sampled_from(ISAS),
)  # fmt: skip
def test_they_compose_with_every_rule_and_threads_change_no_bit(
    seed, B, heads, Lq, Lk, starts, ends, kind, causal, window, padded, softcap, dtype, layout, isa
):
    rng = np.random.default_rng(seed)
    low, high = side(rng, starts, B, Lk), side(rng, ends, B, Lk)
    if low is not None and high is not None:
        low, high = np.minimum(low, high), np.maximum(low, high)
    keywords = {"layout": layout, "key_ranges": (low, high), "softcap": softcap}
    if causal or window is not None:
        keywords |= {"is_causal": causal, "window": window, "offset": rng.integers(-Lq, Lk + 1, B)}
    if padded:
        keywords["key_padding_lengths"] = rng.integers(0, Lk + 1, B)
    if kind != "none":
        gone = rng.random((B, heads[0], Lq, Lk)) < 0.3
        gone = {"bool of keys": gone[:, :1, :1], "additive of two axes": gone[0, 0]}.get(kind, gone)
        gone.flat[0] = False  # masks that remove everything warn
        additive = np.where(gone, -np.inf, rng.standard_normal(gone.shape)).astype(dtype)
        keywords["mask"] = gone if kind.startswith("bool") else additive
    arrays = draw(rng, B, *heads, Lq, Lk, 5, 3, dtype, layout)
    with selected(isa):
        for algorithm in NAMED:
            found = check(*arrays, algorithm=algorithm, **keywords)
            for threads in (1, 2, 5):
                assert_same(found, run(fastmha, *arrays, threads=threads, algorithm=algorithm, **keywords))
        if Lq * heads[0] // heads[1] <= 64:
            check_decode(*arrays, **keywords)
            for threads in (1, 2, 5):
                assert_same(decode(*arrays[:3], **keywords), decode(*arrays[:3], num_threads=threads, **keywords))


# ------------------------------------------------------------------------------------------------- what they are like


@algorithms
def test_each_way_to_say_a_range_gives_the_same_bits(algorithm, rng):
    arrays = draw(rng, 3, 2, 2, 9, 30, 8, 8, np.float32)
    one = run(fastmha, *arrays, key_ranges=([4, 4, 4], [30, 30, 30]), algorithm=algorithm)
    for ranges in ((4, None), [4, 30], (np.int32(4), None), (np.full(3, 4, np.uint8), [30] * 3), ((4, 4, 4), 30)):
        assert_same(one, run(fastmha, *arrays, key_ranges=ranges, algorithm=algorithm))
    lengths = run(fastmha, *arrays, key_padding_lengths=[3, 0, 30], algorithm=algorithm)
    for ranges in ((None, [3, 0, 30]), (0, np.array([3, 0, 30])), ([0, 0, 0], (3, 0, 30))):
        assert_same(lengths, run(fastmha, *arrays, key_ranges=ranges, algorithm=algorithm))
    whole = run(fastmha, *arrays, algorithm=algorithm)
    for ranges in ((None, None), (0, 30), (0, None), (None, [30] * 3)):
        assert_same(whole, run(fastmha, *arrays, key_ranges=ranges, algorithm=algorithm))


@all_dtypes
@pytest.mark.parametrize("algorithm", [*NAMED, "decode"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_no_bit_depends_on_keys_and_values_outside(isa, dtype, algorithm, poison, rng):
    """All of them poisoned at once, keys around the edges of blocks and chunks among them."""
    B, Lk, Lq = 4, 700, 3 if algorithm == "decode" else 70
    q, k, v, g = draw(rng, B, 2, 1, Lq, Lk, 5, 4, dtype)
    starts, ends = np.array([5, 193, 513, 300]), np.array([600, 700, 515, 300])
    outside = (np.arange(Lk) < starts[:, None]) | (np.arange(Lk) >= ends[:, None])
    dirty_k, dirty_v = k.copy(), v.copy()
    for x in (dirty_k, dirty_v):
        x.swapaxes(1, 2)[outside] = poison
    for rules in ({}, {"is_causal": True, "offset": 400, "window": (350, None)}):
        keywords = {"key_ranges": (starts, ends), **rules}
        if algorithm == "decode":
            assert_same(decode(q, k.copy(), v.copy(), **keywords), decode(q, dirty_k, dirty_v, **keywords))
            continue
        pairs = (k.copy(), v.copy()), (dirty_k, dirty_v)
        clean, dirty = (run(fastmha, q, *kv, g, algorithm=algorithm, **keywords) for kv in pairs)
        assert_same(clean, dirty)
        for x in dirty[3:]:
            assert not bits(x.swapaxes(1, 2)[outside]).any()  # +0, exactly


@dtypes
@pytest.mark.parametrize("algorithm", [*NAMED, "decode"])
def test_rows_without_keys_are_zeros_and_give_no_gradient(isa, dtype, algorithm, rng):
    q, k, v, g = draw(rng, 3, 2, 2, 4, 300, 5, 4, dtype)
    for ranges in ((300, None), (None, 0), ([0, 192, 300], [0, 192, 300])):
        out, lse = fastmha.attention(q, k, v, key_ranges=ranges, return_lse=True, algorithm=algorithm)
        assert not bits(out).any()
        assert np.isneginf(lse).all()
        if algorithm != "decode":
            for x in fastmha.attention_backward(g, q, k, v, out, lse, key_ranges=ranges, algorithm=algorithm):
                assert not bits(x).any()


@dtypes
@algorithms
@pytest.mark.parametrize("rules", [{}, {"is_causal": True}, {"window": (9, 2)}])
def test_a_batch_padded_on_the_left_equals_each_row_alone(isa, dtype, algorithm, rules, rng):
    L, lengths = 210, (210, 17, 150, 1)
    arrays = draw(rng, 4, 4, 2, L, L, 8, 5, dtype)
    starts = L - np.array(lengths)
    together = run(fastmha, *arrays, key_ranges=(starts, None), algorithm=algorithm, **rules)
    for b, start in enumerate(starts):
        alone = [x[b : b + 1, :, start:] for x in arrays]
        wanted, bounds = oracle(*alone, dtype, **rules)
        if not rules:  # queries in the padding attend the row's keys, too: without their gradients
            masked = [*arrays]
            masked[3] = arrays[3] * (np.arange(L)[:, None] >= start)
            own = run(fastmha, *(x[b : b + 1] for x in masked), key_ranges=([start], None), algorithm=algorithm)
        else:
            own = [x[b : b + 1] for x in together]
            if start and "is_causal" in rules:
                assert not bits(own[0][:, :, :start]).any()
        cut = [x[:, :, start:] for x in own]
        if "window" in rules and start:  # the two queries before the first key attend it
            cut, wanted, bounds = cut[:2], wanted[:2], bounds[:2]
        assert_close(cut, wanted, bounds)
        same = [x[b : b + 1] for x in together[:2]]
        assert_close([x[:, :, start:] for x in same], wanted[:2], bounds[:2])


def test_a_range_is_attention_over_its_keys_alone_to_rounding(rng):
    q, k, v, g = draw(rng, 1, 2, 2, 40, 450, 8, 8)
    for low, high in ((0, 450), (191, 449), (192, 193), (1, 450)):
        alone, bounds = oracle(q, k[:, :, low:high], v[:, :, low:high], g, np.float64)
        for algorithm in NAMED:
            found = run(fastmha, q, k, v, g, key_ranges=(low, high), algorithm=algorithm)
            assert_close([*found[:3], *(x[:, :, low:high] for x in found[3:])], alone, bounds)


# ----------------------------------------------------------------------------------------------------- plan and capture


def plan(Lq, Lk, **keywords):
    q, k = np.broadcast_to(np.float32(0), (2, 4, Lq, 8)), np.broadcast_to(np.float32(0), (2, 2, Lk, 8))
    return fastmha.plan(q, k, k, **keywords)


@pytest.mark.parametrize("backward", [False, True])
def test_the_plan_counts_the_pairs_that_are_left(backward):
    for rules in (
        {"key_ranges": ([0, 31], None)},
        {"key_ranges": (4, [4, 50])},
        {"key_ranges": ([3, 20], 40), "key_padding_lengths": [50, 10]},
        {"key_ranges": ([9, 45], None), "is_causal": True, "offset": [0, 20]},
        {"key_ranges": ([9, 45], [50, 46]), "window": (5, 2), "offset": 30},
    ):
        left = int((~np.broadcast_to(reference.removed(30, 50, **rules), (2, 4, 30, 50))).sum())
        products = 2 * (8 + 8) + backward * 2 * (3 * 8 + 2 * 8)
        assert plan(30, 50, backward=backward, **rules).flops == left * products


def test_the_balance_knows_the_work_that_ranges_leave():
    even = {"num_threads": 4, "algorithm": "decode"}
    assert plan(1, 4096, **even).balance == pytest.approx(1)
    assert plan(1, 4096, key_ranges=(4000, None), **even).balance == pytest.approx(1)  # the last chunk of each of four heads
    assert plan(1, 4096, key_ranges=([4096, 4000], None), **even).balance == pytest.approx(0.5)  # of two heads
    assert plan(1, 4096, key_ranges=(4096, None), **even).balance == 1
    for algorithm in NAMED:
        tiled = {"num_threads": 2, "algorithm": algorithm}
        assert plan(64, 512, **tiled).balance == pytest.approx(1)
        assert plan(64, 512, key_ranges=([512, 0], None), backward=algorithm == "blas", **tiled).balance == pytest.approx(1)
        uneven = plan(64, 512, key_ranges=([511, 0], None), **{**tiled, "num_threads": 3}).balance  # of four blocks
        assert (0.66 < uneven < 0.68) if algorithm == "blas" else (0.95 < uneven < 0.97)    # "tiled" cuts the last ones


def test_a_module_plans_with_ranges():
    m = fastmha.MultiHeadAttention(16, 2, rng=0)
    left = m.plan(3, 40, key_ranges=([0, 30, 40], None), is_causal=True)
    assert left.flops == 2 * 2 * (8 + 8) * (40 * 41 // 2 + 10 * 11 // 2)
    assert m.plan(3, 5, seq_len_k=40, key_ranges=(30, 35)).flops == 2 * 2 * (8 + 8) * 3 * 5 * 5


def test_the_choice_of_an_algorithm_does_not_look_at_ranges():
    for Lq, Lk in ((1, 4096), (1, 16), (64, 64)):
        plans = [plan(Lq, Lk, key_ranges=ranges) for ranges in (None, (Lk, None), (None, 1), ([0, Lk], [Lk, Lk]))]
        assert len({(p.algorithm, str(p.reasons), p.tile) for p in plans}) == 1


@algorithms
def test_captured_weights_are_those_of_the_keys_in_the_range(algorithm, rng):
    q, k, v, _ = draw(rng, 2, 4, 2, 40, 60, 8, 8)
    keywords = {"key_ranges": ([7, 60], [50, 60]), "is_causal": True, "offset": 20}
    out, weights = fastmha.attention(q, k, v, algorithm=algorithm, capture=fastmha.Capture(), **keywords)
    wanted = reference.attention_weights(q, k, **keywords)
    assert np.abs(weights - wanted).max() < 1e-14
    assert not weights[wanted == 0].any()
    assert same_bits(out, fastmha.attention(q, k, v, algorithm=algorithm, **keywords))


def test_no_rows_and_no_keys(rng):
    for sizes in ({"B": 0}, {"Lk": 0}, {"Lq": 0}, {"H": 0, "Hkv": 0}):
        arrays = draw(rng, **({"B": 2, "H": 2, "Hkv": 1, "Lq": 3, "Lk": 5} | sizes))
        B, Lk = arrays[1].shape[0], arrays[1].shape[2]
        for ranges in ((np.zeros(B, int), None), (Lk, None), (0, [Lk] * B)):
            for algorithm in NAMED:
                support.check(*arrays, key_ranges=ranges, algorithm=algorithm)
