"""ALiBi: a score loses its head's slope times the distance of its query from its key.

Against the float64 reference with the bounds of `support.error_bounds`, and against additive masks of the same numbers.
"""

import numpy as np
import pytest
import support
from support import (
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
)

import fastmha
from fastmha import reference

with_decode = pytest.mark.parametrize("algorithm", [*NAMED, "decode"])
backwards = pytest.mark.parametrize("second", NAMED)


def of(*values, dtype=np.float64):
    return np.array(values, dtype)


def check_crossed(arrays, first, second, **keywords):
    results = crossed(first, second, *arrays, **keywords)
    expected = (oracle if first == second else crossed_oracle)(*arrays, arrays[0].dtype, **keywords)
    assert_close(results, *expected, support.results_of(keywords))
    return results


def as_mask(slopes, Lq, Lk, offset=0):
    """The same numbers, (H, Lq, Lk) or with an offset for each batch row (B, H, Lq, Lk), in the dtype of the slopes."""
    place = np.arange(Lq)[:, None] + np.reshape(offset, (*np.shape(offset), 1, 1, 1)) - np.arange(Lk)
    return (-slopes[:, None, None] * np.abs(place)).astype(slopes.dtype)


# ----------------------------------------------------------------------------------------------------------- the oracle

RULES = {
    "plain": {"offset": 0},
    "to the end": {"offset": 167},
    "causal": {"is_causal": True, "offset": np.array([167, -2])},
    "window": {"window": (5, 2), "offset": 40},
    "softcap": {"softcap": 2.0, "offset": np.array([-7, 300])},
    "padding": {"key_padding_lengths": np.array([193, 0]), "offset": 3},
    "ranges": {"key_ranges": ([191, 5], [200, 65]), "offset": np.array([0, 9])},
    "bool": {"mask": np.arange(200) % 3 == np.arange(33)[:, None] % 3, "offset": 5},
    "everything": {"is_causal": True, "window": (150, None), "offset": 150, "softcap": 3.0, "key_ranges": ([3, 9], None),
                   "dropout": 0.2, "seed": 5, "sinks": of(0.5, 1, -np.inf, 3)},
}  # fmt: skip


@all_dtypes
@algorithms
@layouts
@pytest.mark.parametrize("rule", RULES)
def test_scores_lose_slope_times_distance(isa, dtype, algorithm, layout, rule, rng):
    arrays = draw(rng, 2, 4, 2, 33, 200, 5, 4, dtype, layout)
    keywords = {name: x.astype(dtype) if name == "sinks" else x for name, x in RULES[rule].items()}
    check(*arrays, alibi=of(0.5, 2.0**-8, 0, -0.1, dtype=dtype), algorithm=algorithm, layout=layout, **keywords)


@with_decode
@backwards
@support.ill_scaled
def test_scores_of_every_size_in_every_pair_of_algorithms(algorithm, second, kind, rng):
    arrays = support.draw_ill_scaled(kind, rng, 2, 4, 2, 31, 210)
    for slopes in (of(1, 0.5, 2.0**-8, 0), of(1e3, 1e-30, -1, -30)):
        check_crossed(arrays, algorithm, second, alibi=slopes.astype(np.float32), offset=[179, 0])


@pytest.mark.parametrize("first", [*NAMED, "decode"])
@backwards
def test_gradients_beside_it_are_central_differences(first, second, rng):
    arrays = q, k, v, g = draw(rng, 2, 4, 2, 3, 5, 4, 3)
    keywords = {"alibi": of(0.7, 0.1, 2.0, -0.3), "offset": np.array([2, -1]), "softcap": 2.0, "sinks": of(1, 0, -1, 0.5)}
    found = crossed(first, second, *arrays, **keywords)

    def loss():
        return (fastmha.attention(q, k, v, algorithm=first, **keywords) * g).sum()

    for gradient, x, name in zip(found[2:], (*arrays[:3], keywords["sinks"]), ("q", "k", "v", "sinks"), strict=True):
        assert_gradient(gradient, loss, x, name)


# ------------------------------------------------------------------------------------------------- what it is like


@all_dtypes
@algorithms
def test_it_is_the_additive_mask_of_these_numbers(isa, dtype, algorithm, rng):
    slopes, offset = of(0.5, 2.0**-5, 1, -0.25, dtype=dtype), np.array([160, -3])      # the products are exact
    arrays = draw(rng, 2, 4, 2, 40, 193, 5, 4, dtype)
    for rules in ({}, {"is_causal": True}, {"window": (70, 9)}):
        found = run(fastmha, *arrays, alibi=slopes, offset=offset, algorithm=algorithm, **rules)
        other = {**rules, "offset": offset} if rules else {}
        mask = as_mask(slopes, 40, 193, offset)
        wanted, bounds = oracle(*arrays, dtype, mask=mask, **other)
        assert_close(found, wanted, bounds)
        same = run(fastmha, *arrays, mask=mask, algorithm=algorithm, **other)
        assert_close(found, [x.astype(np.float64) for x in same], [2 * x for x in bounds])


@all_dtypes
@with_decode
@layouts
def test_slopes_of_0_give_the_bits_of_none(isa, dtype, algorithm, layout, rng):
    arrays = q, k, v, g = draw(rng, 2, 4, 2, 31, 210, 5, 4, dtype, layout)
    rules = {"layout": layout, "key_ranges": ([0, 210], None)}
    flat = {"alibi": np.zeros(4, dtype), "offset": 7}
    out, again = (fastmha.attention(*arrays[:3], algorithm=algorithm, return_lse=True, **rules, **given) for given in ({}, flat))
    assert_same(out, again)
    for second in NAMED:
        without, beside = (
            fastmha.attention_backward(g, q, k, v, *out, algorithm=second, **rules, **given) for given in ({}, flat)
        )
        assert_same(without, beside)


@with_decode
@dtypes
@pytest.mark.parametrize("offset", [0, 2**22 - 3, 2**22 + 2, 2**24 - 7, 2**24 + 1, 2**53 - 5, 2**53 + 3, 2**60 + 1])
def test_a_distance_is_an_integer_that_is_rounded_once(isa, dtype, algorithm, offset, rng):
    """With one key for each batch row the lse is its score: where the products are 0, minus slope times distance."""
    B, Lq, Lk = 70, 5, 70
    q, k, v, g = draw(rng, B, 3, 1, Lq, Lk, 5, 4, dtype)
    q[...] = 0
    slopes = of(1, 2.0**-20, 0.3, dtype=dtype)
    keys = np.arange(B)
    for sign in (1, -1):
        keywords = {"alibi": slopes, "offset": sign * offset, "key_ranges": (keys, keys + 1)}
        out, lse = fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True, **keywords)
        apart = [[abs(i + sign * offset - j) for i in range(Lq)] for j in range(B)]     # ints of Python
        wanted = -slopes[:, None] * np.array(apart, object).astype(np.int64).astype(dtype)[:, None]
        assert np.array_equal(lse, wanted)
        assert same_bits(out, np.broadcast_to(v[keys, :, keys][:, :, None], out.shape).copy())
        for second in NAMED:
            grads = fastmha.attention_backward(g, q, k, v, out, lse, algorithm=second, **keywords)
            assert np.isfinite(grads[0]).all()
            inside = grads[2][keys, 0, keys]
            assert np.abs(inside - g.sum(axis=(1, 2))).max() < 100 * np.finfo(dtype).eps


@all_dtypes
@algorithms
@pytest.mark.parametrize(("offset", "slope"), [(2**24 + 1, 1e-2), (-(2**24) - 5, 3e-4), (2**60 + 1, 1e-16), (-(2**61), 1e-18)])
def test_far_from_the_keys_it_is_within_the_bounds(isa, dtype, algorithm, offset, slope, rng):
    arrays = draw(rng, 2, 2, 1, 33, 200, 5, 4, dtype)
    check(*arrays, alibi=of(slope, -slope, dtype=dtype), offset=offset, algorithm=algorithm)


@with_decode
def test_keys_beyond_what_floats_count_exactly_in_vectors(isa, algorithm):
    Lk = 2**22 + 70
    q, k = np.zeros((1, 1, 3, 1), np.float32), np.zeros((1, 1, Lk, 1), np.float32)
    for low in (2**22 - 4, 2**22, Lk - 1):
        keywords = {"alibi": of(0.5, dtype=np.float32), "offset": 5, "key_ranges": (low, low + 1), "algorithm": algorithm}
        _, lse = fastmha.attention(q, k, k, return_lse=True, **keywords)
        assert np.array_equal(lse[0, 0], [-0.5 * (low - 5 - i) for i in range(3)])


@dtypes
@with_decode
def test_rows_without_keys_are_empty_all_the_same(isa, dtype, algorithm, rng):
    q, k, v, g = draw(rng, 2, 2, 1, 3, 300, 5, 4, dtype)
    g[0] = np.nan
    keywords = {"alibi": of(1, -1e30, dtype=dtype), "offset": 2**50, "key_padding_lengths": [0, 300]}
    out, lse = fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True, **keywords)
    assert not bits(out[0]).any()
    assert np.isneginf(lse[0]).all()
    for second in NAMED:
        for x in fastmha.attention_backward(g, q, k, v, out, lse, algorithm=second, **keywords):
            assert not bits(x[0]).any()


@all_dtypes
@with_decode
def test_the_firewall_holds_beside_alibi(isa, dtype, algorithm, rng):
    q, k, v, g = draw(rng, 2, 2, 1, 20, 300, 5, 4, dtype)
    gone = np.arange(300) % 5 == 2
    keywords = {"mask": np.broadcast_to(gone, (20, 300)), "alibi": of(0.5, -0.1, dtype=dtype), "offset": [280, 0]}
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_k[:, :, gone], dirty_v[:, :, gone] = np.nan, np.inf
    for second in NAMED:
        pairs = (k.copy(), v.copy()), (dirty_k, dirty_v)
        clean, dirty = (crossed(algorithm, second, q, *kv, g, **keywords) for kv in pairs)
        assert_same(clean, dirty)


@all_dtypes
@with_decode
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_slope_that_is_no_number_stays_in_its_head(dtype, algorithm, poison, rng):
    q, k, v, _ = draw(rng, 2, 4, 2, 3, 300, 5, 4, dtype)
    rule = {"algorithm": algorithm, "offset": 297, "return_lse": True}
    clean = fastmha.attention(q, k, v, alibi=of(1, 2, 3, 4, dtype=dtype), **rule)
    out, _ = fastmha.attention(q, k, v, alibi=of(1, poison, 3, 4, dtype=dtype), **rule)
    assert np.isnan(out[:, 1]).any()
    others = [0, 2, 3]
    assert same_bits(out[:, others], clean[0][:, others])


@all_dtypes
@with_decode
def test_every_way_in_which_they_may_lie_gives_the_same_bits(dtype, algorithm, rng):
    arrays = draw(rng, 2, 4, 2, 9, 30, 5, 4, dtype)
    slopes = of(1, -0.2, 0.5, 0.3, dtype=dtype)
    locked = slopes.copy()
    locked.flags.writeable = False
    first = crossed(algorithm, "tiled", *arrays, alibi=slopes, offset=3)
    for name, x in [*support.rearranged(slopes), ("read-only", locked)]:
        assert_same(first, crossed(algorithm, "tiled", *arrays, alibi=x, offset=3), name)
    for offset in (np.array([3, 3]), [3, 3], np.int8(3), np.uint64(3)):
        assert_same(first, crossed(algorithm, "tiled", *arrays, alibi=slopes, offset=offset))


@dtypes
@algorithms
def test_token_by_token_over_a_cache_it_is_the_whole_call(isa, dtype, algorithm, rng):
    """And each step has the bits of attention at its offset, whichever algorithm takes the step."""
    L, slopes = 70, of(0.5, 2.0**-5, 0, 1, dtype=dtype)
    arrays = q, k, v, _ = draw(rng, 2, 4, 2, L, L, 5, 4, dtype)
    sinks = of(0, 1, -1, -np.inf, dtype=dtype)
    wanted, bounds = oracle(*arrays, dtype, alibi=slopes, is_causal=True, sinks=sinks)
    for step in (algorithm, "decode"):
        cache = fastmha.KVCache(2, 2, 5, v_head_dim=4, dtype=dtype)
        for i in range(L):
            cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
            keywords = {"alibi": slopes, "sinks": sinks, "algorithm": step, "return_lse": True}
            got = cache.attend(q[:, :, i : i + 1], **keywords)
            assert_close(got, *([x[:, :, i : i + 1] for x in of_all[:2]] for of_all in (wanted, bounds)))
            assert_same(got, fastmha.attention(q[:, :, i : i + 1], cache.k, cache.v, offset=i, **keywords))


@algorithms
def test_captured_weights_are_those_of_its_scores(algorithm, rng):
    q, k, v, _ = draw(rng, 2, 4, 2, 40, 60, 8, 8)
    keywords = {"alibi": of(1, 0.5, -0.1, 0), "offset": [20, -5]}
    out, weights = fastmha.attention(q, k, v, algorithm=algorithm, capture=fastmha.Capture(), **keywords)
    assert np.abs(weights - reference.attention_weights(q, k, **keywords)).max() < 1e-13
    assert same_bits(out, fastmha.attention(q, k, v, algorithm=algorithm, **keywords))
    capture = fastmha.Capture(heads=[2, 1], rows=slice(17, 38, 5))
    _, some = fastmha.attention(q, k, v, algorithm=algorithm, capture=capture, **keywords)
    assert np.abs(some - weights[:, [2, 1], 17:38:5]).max() < 1e-14


def test_the_offset_is_0_where_lengths_agree(rng):
    arrays = draw(rng, 2, 2, 1, 9, 9, 5, 4)
    slopes = of(0.5, 1)
    for algorithm in NAMED:
        assert_same(*(run(fastmha, *arrays, alibi=slopes, algorithm=algorithm, **at) for at in ({}, {"offset": 0})))


def test_no_rows_no_keys_no_heads_and_no_widths(rng):
    for sizes in ({"B": 0}, {"Lk": 0}, {"Lq": 0}, {"H": 0, "Hkv": 0}, {"D": 0}, {"Dv": 0}):
        for layout in LAYOUTS:
            arrays = draw(rng, **({"B": 2, "H": 2, "Hkv": 1, "Lq": 3, "Lk": 5, "D": 4, "Dv": 3} | sizes), layout=layout)
            for algorithm in NAMED:
                check(*arrays, alibi=of(1, -2)[: sizes.get("H", 2)], offset=2, layout=layout, algorithm=algorithm)
