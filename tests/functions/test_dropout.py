"""Dropout by a counter: what is drawn follows from the seed and the pair alone.

Against the float64 reference with the bounds of `support.error_bounds`. Values, and gradients of the output, that are an identity
show the weights themselves: forward the output is those that the values meet, backward grad_v those that are drawn again.
"""

import numpy as np
import pytest
import support
from support import (
    ISAS,
    LAYOUTS,
    NAMED,
    algorithms,
    all_dtypes,
    assert_close,
    assert_gradient,
    assert_same,
    bits,
    check,
    crossed,
    crossed_oracle,
    draw,
    dtypes,
    layouts,
    oracle,
    run,
    same_bits,
    selected,
)

import fastmha
from fastmha import algorithms as by_name
from fastmha import reference
from fastmha._core import Problem

with_decode = pytest.mark.parametrize("algorithm", [*NAMED, "decode"])
backwards = pytest.mark.parametrize("second", NAMED)
SEEDS = (0, 1, 2**32, 2**63 + 5, 2**64 - 1)


def of(*values, dtype=np.float64):
    return np.array(values, dtype)


def swapped(x, layout):
    return x if layout == "BHLD" else x.swapaxes(1, 2)


def identity(B, H, L, dtype, layout="BHLD"):
    return swapped(np.broadcast_to(np.eye(L, dtype=dtype), (B, H, L, L)).copy(), layout)


def weights_of(q, k, algorithm, layout="BHLD", **keywords):
    """What meets the values, (B, H, Lq, Lk), and lse."""
    B, Hkv, Lk = (k.shape[i] for i in ((0, 1, 2) if layout == "BHLD" else (0, 2, 1)))
    values = identity(B, Hkv, Lk, q.dtype, layout)
    out, lse = fastmha.attention(q, k, values, algorithm=algorithm, layout=layout, return_lse=True, **keywords)
    return swapped(out, layout), lse


# ----------------------------------------------------------------------------------------------------------- the oracle

RULES = {
    "plain": {},
    "causal": {"is_causal": True, "offset": np.array([167, -2])},
    "window": {"window": (5, 2), "offset": 40},
    "softcap": {"softcap": 2.0},
    "padding": {"key_padding_lengths": np.array([193, 0])},
    "ranges": {"key_ranges": ([191, 5], [200, 65])},
    "bool": {"mask": np.arange(200) % 3 == np.arange(33)[:, None] % 3},
    "everything": {"is_causal": True, "window": (150, None), "offset": 150, "softcap": 3.0, "key_ranges": ([3, 9], None),
                   "alibi": of(1, 0.25, 0, 0.5), "sinks": of(0.5, 1, -np.inf, 3)},
}  # fmt: skip


@all_dtypes
@algorithms
@layouts
@pytest.mark.parametrize("rule", RULES)
def test_weights_count_0_or_more_than_they_are(isa, dtype, algorithm, layout, rule, rng):
    arrays = draw(rng, 2, 4, 2, 33, 200, 5, 4, dtype, layout)
    keywords = {name: x.astype(dtype) if name in ("sinks", "alibi") else x for name, x in RULES[rule].items()}
    check(*arrays, dropout=0.3, seed=2**63 + 11, algorithm=algorithm, layout=layout, **keywords)


@all_dtypes
@with_decode
@backwards
@pytest.mark.parametrize("p", [1e-300, 1e-9, 2.0**-33, 0.5, 0.999, 1 - 2.0**-32, 1 - 2.0**-53])
def test_probabilities_of_every_size(isa, dtype, algorithm, second, p, rng):
    arrays = draw(rng, 2, 2, 1, 31, 65, 5, 4, dtype)
    keywords = {"dropout": p, "seed": 3}
    found = crossed(algorithm, second, *arrays, **keywords)
    assert_close(found, *(oracle if algorithm == second else crossed_oracle)(*arrays, dtype, **keywords))
    if p < 1e-20:
        assert_same(found, crossed(algorithm, second, *arrays))
    if p > 0.9999:      # one pair of 4 billion is kept
        assert not any(x.any() for x in (found[0], *found[2:]))
        assert same_bits(found[1], crossed(algorithm, second, *arrays)[1])


@with_decode
@backwards
@support.ill_scaled
def test_scores_of_every_size_in_every_pair_of_algorithms(algorithm, second, kind, rng):
    arrays = support.draw_ill_scaled(kind, rng, 2, 4, 2, 31, 210)
    keywords = {"dropout": 0.25, "seed": 8}
    found = crossed(algorithm, second, *arrays, **keywords)
    assert_close(found, *(oracle if algorithm == second else crossed_oracle)(*arrays, np.float32, **keywords))


@pytest.mark.parametrize("first", [*NAMED, "decode"])
@backwards
def test_backward_draws_again_what_was_drawn_forward(first, second, rng):
    """Central differences at one seed; another seed backward gives no gradient of this."""
    arrays = q, k, v, g = draw(rng, 2, 4, 2, 3, 7, 4, 3)
    keywords = {"dropout": 0.4, "seed": 2**40 + 3, "is_causal": True, "offset": 3}
    found = crossed(first, second, *arrays, **keywords)

    def loss():
        return (fastmha.attention(q, k, v, algorithm=first, **keywords) * g).sum()

    for gradient, x, name in zip(found[2:], arrays[:3], "qkv", strict=True):
        assert_gradient(gradient, loss, x, name)
    other = fastmha.attention_backward(g, q, k, v, *found[:2], algorithm=second, **{**keywords, "seed": 4})
    assert all(np.abs(x - y).max() > 0.01 for x, y in zip(found[2:], other, strict=True))


# ------------------------------------------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("seed", SEEDS)
@dtypes
def test_what_is_drawn_is_the_same_for_every_algorithm_instruction_set_and_layout(dtype, seed, rng):
    """The zeros are those pairs that `reference.kept` does not keep, and the others are scaled: forward and backward."""
    B, H, Hkv = 2, 4, 2
    p = 0.35
    for Lq, Lk in ((31, 67), (3, 193), (65, 5), (1, 1)):
        kept = reference.kept(seed, p, B, H, Lq, Lk)
        for layout in LAYOUTS:
            q, k, _, _ = draw(rng, B, H, Hkv, Lq, Lk, 5, 4, dtype, layout)
            plain = reference.attention_weights(*(x.astype(np.float64) for x in (q, k)), layout=layout)
            grad = identity(B, H, Lq, dtype, layout)
            for isa in ISAS:
                with selected(isa):
                    for algorithm in [*NAMED, "decode"] if Lq <= 32 else NAMED:
                        weights, lse = weights_of(q, k, algorithm, layout, dropout=p, seed=seed)
                        assert np.array_equal(weights != 0, kept)
                        assert np.abs(weights * (1 - p) / plain - kept).max() < 1000 * np.finfo(dtype).eps
                        assert same_bits(lse, weights_of(q, k, algorithm, layout)[1])
                        if algorithm != "decode":
                            zero, values = np.zeros_like(grad), np.zeros((*k.shape[:3], Lq), dtype)
                            again = fastmha.attention_backward(grad, q, k, values, zero, lse, layout=layout, dropout=p, seed=seed,
                                                               algorithm=algorithm)[2]
                            back = swapped(again, layout).swapaxes(2, 3)        # (B, Hkv, Lq, Lk): the sums of groups
                            groups = weights.reshape(B, Hkv, H // Hkv, Lq, Lk).sum(axis=2)
                            assert np.array_equal(back != 0, kept.reshape(B, Hkv, H // Hkv, Lq, Lk).any(axis=2))
                            assert np.abs(back - groups).max() < 100 * np.finfo(dtype).eps


@all_dtypes
@with_decode
def test_what_is_drawn_does_not_depend_on_threads(isa, dtype, algorithm, rng):
    arrays = draw(rng, 3, 2, 1, 31, 400, 5, 4, dtype)
    keywords = {"dropout": 0.5, "seed": 1}
    results = [crossed(algorithm, "tiled", *arrays, threads=n, **keywords) for n in (1, 2, 5)]
    for others in results[1:]:
        assert_same(results[0], others)


@all_dtypes
@with_decode
def test_what_is_drawn_does_not_depend_on_masks_lengths_and_other_rows(isa, dtype, algorithm, rng):
    B, H, Lq, Lk = 3, 2, 17, 200
    q, k, v, _ = draw(rng, B, H, 1, Lq, Lk, 5, 4, dtype)
    drawn = {"dropout": 0.5, "seed": 77}
    kept = reference.kept(77, 0.5, B, H, Lq, Lk)
    for rules in (
        {"key_padding_lengths": [199, 0, 33]},
        {"key_ranges": ([1, 2, 67], [200, 199, 130])},
        {"is_causal": True, "offset": [183, 5, -3]},
        {"window": (21, 6), "offset": 70},
        {"mask": rng.random((B, 1, Lq, Lk)) < 0.3},
        {"mask": np.where(rng.random((H, Lq, Lk))[None] < 0.3, -np.inf, 1).astype(dtype)},
    ):
        weights, _ = weights_of(q, k, algorithm, **drawn, **rules)
        assert np.array_equal(weights != 0, kept & ~reference.removed(Lq, Lk, **rules))
    whole = fastmha.attention(q, k, v, algorithm=algorithm, key_padding_lengths=[150, 7, 200], **drawn)
    first = fastmha.attention(q[:1], k[:1], v[:1], algorithm=algorithm, key_padding_lengths=[150], **drawn)
    assert same_bits(whole[:1], first)      # the batch row itself counts
    if algorithm != "blas":
        left = k[:, :, :150], v[:, :, :150]
        short = fastmha.attention(q, *left, algorithm=algorithm, key_padding_lengths=[150, 7, 100], **drawn)
        assert same_bits(whole[:2], short[:2])


@pytest.mark.parametrize("named", [*NAMED, "decode"])
@dtypes
def test_captured_weights_are_dropped_where_those_of_the_output_are(isa, dtype, named, rng):
    """Of all heads and rows, and of some."""
    B, H, Lq, Lk = 2, 4, 29, 70
    q, k, v, _ = draw(rng, B, H, 2, Lq, Lk, 5, 4, dtype)
    keywords = {"dropout": 0.4, "seed": 2**64 - 1, "key_ranges": ([3, 0], [70, 61])}
    kept = reference.kept(2**64 - 1, 0.4, B, H, Lq, Lk) & ~reference.removed(Lq, Lk, key_ranges=keywords["key_ranges"])
    wanted = reference.attention_weights(q.astype(np.float64), k.astype(np.float64), **keywords)
    for heads, rows in ((None, None), (2, 13), ([3, 0, 3], [28, 5]), (slice(1, 4, 2), slice(None, None, -9))):
        out, weights = fastmha.attention(q, k, v, algorithm=named, capture=fastmha.Capture(heads=heads, rows=rows), **keywords)
        h, i = (np.atleast_1d(np.arange(n)[slice(None) if chosen is None else chosen]) for n, chosen in ((H, heads), (Lq, rows)))
        at = np.ix_(range(B), h, i)
        assert np.array_equal(weights != 0, kept[at])
        assert np.abs(weights - wanted[at]).max() < 100 * np.finfo(dtype).eps
        assert same_bits(out, fastmha.attention(q, k, v, algorithm=named, **keywords))
    received = fastmha.attention(q, k, v, algorithm=named, capture=fastmha.Capture(reduce="sum_q"), **keywords)[1]
    assert np.abs(received - wanted.sum(axis=2)).max() < 1000 * np.finfo(dtype).eps


@algorithms
def test_the_mean_over_seeds_approaches_no_dropout(algorithm, rng):
    """Draws are independent: the mean of n errs by sqrt(p / (1 - p) sum_j P_ij² v_j² / n), here within 5 times that."""
    q, k, v, _ = draw(rng, 2, 2, 1, 20, 33, 5, 4)
    n, p = 600, 0.3
    exact = fastmha.attention(q, k, v, algorithm=algorithm)
    mean = sum(fastmha.attention(q, k, v, algorithm=algorithm, dropout=p, seed=s) for s in range(n)) / n
    weights = reference.attention_weights(q, k)
    deviation = np.sqrt(p / (1 - p) * (weights**2 @ np.repeat(v, 2, axis=1) ** 2) / n)
    assert (np.abs(mean - exact) < 5 * deviation).all()
    assert 0.9 < np.sqrt(np.mean(((mean - exact) / deviation) ** 2)) < 1.1


def test_each_seed_batch_row_head_query_and_key_draws_its_own(rng):
    """Of two that differ in one of them, one half of all draws agree at p = 1/2; the words of a seed all count."""
    q, k, _, _ = draw(rng, 2, 2, 2, 24, 64, 4, 4)

    def drawn(seed):
        return weights_of(q, k, "tiled", dropout=0.5, seed=seed)[0] != 0

    one = drawn(5)
    pairs = [(one, drawn(seed)) for seed in (6, 5 + 2**32, 5 + 2**63)]
    pairs += [(one[0], one[1]), (one[:, 0], one[:, 1]), (one[:, :, 1:], one[:, :, :-1]), (one[..., 1:], one[..., :-1]),
              (one[..., 4:], one[..., :-4])]  # fmt: skip
    for a, b in pairs:
        assert abs((a == b).mean() - 0.5) < 5 * 0.5 / np.sqrt(a.size)


@pytest.mark.parametrize("first", [(0, 0, 0, 1), (1, 2, 3, 4), (2, 0, 17, 2**33 + 7), (0, 1, 2**31 + 1, 194)])
@dtypes
@with_decode
def test_draws_of_a_slice_are_the_slice_of_the_draws(isa, dtype, algorithm, first, rng):
    """Forward, and what is drawn again backward: a slice of queries and keys is told where it begins."""
    B, H, Lq, Lk = 2, 2, 19, 230
    kept = reference.kept(2**40 + 3, 0.4, B, H, Lq, Lk, first=first)
    q, k, _, _ = draw(rng, B, H, H, Lq, Lk, 5, 4, dtype)
    rules = *(None,) * 7, 1.0, 0.0, None, None, (0.4, 2**40 + 3, *first)
    problem = Problem(q, k, identity(B, H, Lk, dtype), *rules)
    out, lse = np.empty((B, H, Lq, Lk), dtype), np.empty((B, H, Lq), dtype)
    by_name.forward(algorithm, problem, out, lse, None, 1)
    assert np.array_equal(out != 0, kept)
    if algorithm != "decode":
        problem = Problem(q, k, np.zeros((B, H, Lk, Lq), dtype), *rules)
        grads = [np.empty(x.shape, dtype) for x in (q, k, problem.v)]
        grad = identity(B, H, Lq, dtype)
        by_name.backward(algorithm, problem, np.zeros_like(grad), lse, grad, *grads, 1)
        assert np.array_equal(grads[2].swapaxes(2, 3) != 0, kept)


# ------------------------------------------------------------------------------------------------- what it is like


@all_dtypes
@with_decode
@backwards
def test_a_probability_of_0_gives_the_bits_of_no_dropout(isa, dtype, algorithm, second, rng):
    arrays = draw(rng, 2, 4, 2, 31, 210, 5, 4, dtype)
    plain = crossed(algorithm, second, *arrays, sinks=np.ones(4, dtype))
    none = {"dropout": 0}, {"dropout": 0.0, "seed": 5}, {"seed": 2**64 - 1}, {"dropout": np.float32(0), "seed": np.uint64(9)}
    for given in none:
        assert_same(plain, crossed(algorithm, second, *arrays, sinks=np.ones(4, dtype), **given))


def test_numbers_of_numpy_say_the_same(rng):
    arrays = draw(rng, 2, 2, 1, 9, 30, 5, 4)
    for algorithm in NAMED:
        first = run(fastmha, *arrays, dropout=0.25, seed=7, algorithm=algorithm)
        for p, seed in ((np.float32(0.25), np.uint8(7)), (np.float64(0.25), np.int64(7))):
            assert_same(first, run(fastmha, *arrays, dropout=p, seed=seed, algorithm=algorithm))


@all_dtypes
@with_decode
def test_empty_rows_are_zeros_and_give_no_gradient(isa, dtype, algorithm, rng):
    q, k, v, g = draw(rng, 2, 2, 1, 5, 30, 5, 4, dtype)
    g[0] = np.nan
    keywords = {"dropout": 0.5, "seed": 1, "key_padding_lengths": [0, 30]}
    for second in NAMED:
        found = crossed(algorithm, second, q, k, v, g, **keywords)
        assert np.isneginf(found[1][0]).all()
        for x in (found[0], *found[2:]):
            assert not bits(x[0]).any()


@all_dtypes
@with_decode
def test_removed_pairs_change_no_bit_and_dropped_pairs_are_attended_with_0(isa, dtype, algorithm, rng):
    """A NaN at a removed pair stays outside; one at a dropped pair reaches its row, as in the reference."""
    q, k, v, g = draw(rng, 2, 2, 1, 20, 300, 5, 4, dtype)
    gone = np.arange(300) % 5 == 2
    keywords = {"mask": np.broadcast_to(gone, (20, 300)), "dropout": 0.5, "seed": 12}
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_k[:, :, gone], dirty_v[:, :, gone] = np.nan, np.inf
    for second in NAMED:
        clean, dirty = (crossed(algorithm, second, q, x, y, g, **keywords) for x, y in ((k.copy(), v.copy()), (dirty_k, dirty_v)))
        assert_same(clean, dirty)
    v[0, 0, 0, 1] = np.nan      # dropped by about half of the rows, attended by all
    kept = reference.kept(12, 0.5, 2, 2, 20, 300)[0, :, :, 0]
    assert kept.any()
    assert not kept.all()
    out = fastmha.attention(q, k, v, algorithm=algorithm, **keywords)
    assert np.isnan(out[0, :, :, 1]).all()
    assert np.isnan(out).sum() == 40


@dtypes
@algorithms
def test_values_as_large_as_there_are_stay_finite_where_their_mean_is(isa, dtype, algorithm, rng):
    q, k, v, _ = draw(rng, 1, 2, 1, 20, 300, 5, 4, dtype)
    q[...] = 0
    v[...] = np.finfo(dtype).max * 0.4
    v[:, :, 1::2] *= -1
    for p in (0.1, 0.5, 0.9):
        keywords = {"dropout": p, "seed": 12}
        out = fastmha.attention(q, k, v, algorithm=algorithm, **keywords)
        wanted = reference.attention(*(x.astype(np.longdouble) for x in (q, k, v)), **keywords)
        assert np.abs(out - wanted).max() < 1e-4 * np.finfo(dtype).max


def test_the_choice_of_an_algorithm_does_not_look_at_it():
    for Lq, Lk in ((1, 4096), (1, 16), (64, 64)):
        q, k = np.broadcast_to(np.float32(0), (2, 4, Lq, 8)), np.broadcast_to(np.float32(0), (2, 2, Lk, 8))
        plans = [fastmha.plan(q, k, k, **given) for given in ({}, {"dropout": 0.5, "seed": 1})]
        assert len({(p.algorithm, str(p.reasons), p.tile, p.flops) for p in plans}) == 1


def test_no_rows_no_keys_no_heads_and_no_widths(rng):
    for sizes in ({"B": 0}, {"Lk": 0}, {"Lq": 0}, {"H": 0, "Hkv": 0}, {"D": 0}, {"Dv": 0}):
        for layout in LAYOUTS:
            arrays = draw(rng, **({"B": 2, "H": 2, "Hkv": 1, "Lq": 3, "Lk": 5, "D": 4, "Dv": 3} | sizes), layout=layout)
            for algorithm in NAMED:
                check(*arrays, dropout=0.5, seed=3, layout=layout, algorithm=algorithm)
