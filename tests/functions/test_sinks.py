"""Sinks: logits of heads that join the denominators of the softmax alone.

Against the float64 reference with the bounds of `support.error_bounds`, and against keys of value 0, which they stand for.
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


RULES = {
    "plain": {},
    "causal": {"is_causal": True, "offset": np.array([3, -2])},
    "window": {"window": (5, 2), "offset": 40},
    "softcap": {"softcap": 2.0},
    "padding": {"key_padding_lengths": np.array([193, 0])},
    "ranges": {"key_ranges": ([191, 5], [200, 65])},
    "bool": {"mask": np.arange(200) % 3 == np.arange(33)[:, None] % 3},
    "everything": {"is_causal": True, "window": (150, None), "offset": 150, "softcap": 3.0, "key_ranges": ([3, 9], None),
                   "dropout": 0.2, "seed": 5, "alibi": of(0.5, 0.25, 0.0, 1.0)},
}  # fmt: skip
rules = pytest.mark.parametrize("rule", RULES)


# ----------------------------------------------------------------------------------------------------------- the oracle


@all_dtypes
@algorithms
@rules
def test_they_join_the_denominator_and_the_lse(isa, dtype, algorithm, rule, rng):
    arrays = draw(rng, 2, 4, 2, 33, 200, 5, 4, dtype)
    keywords = {name: x.astype(dtype) if name == "alibi" else x for name, x in RULES[rule].items()}
    check(*arrays, sinks=of(1, -2, 30, -np.inf, dtype=dtype), algorithm=algorithm, **keywords)


@dtypes
@with_decode
@backwards
@support.ill_scaled
def test_scores_of_every_size_in_every_pair_of_algorithms(dtype, algorithm, second, kind, rng):
    arrays = [x.astype(dtype) for x in support.draw_ill_scaled(kind, rng, 2, 4, 2, 31, 210)]
    top = np.float64(np.einsum("bhid,bhjd->bhij", arrays[0].astype(float), np.repeat(arrays[1], 2, 1).astype(float)).max() / 2)
    for sinks in (of(0, 3, -np.inf, -5), of(top, 0.9 * top, top + 3, -top)):  # beside scores that are as large
        check_crossed(arrays, algorithm, second, sinks=sinks.astype(dtype))


@dtypes
@with_decode
@backwards
@pytest.mark.parametrize("size", [20.0, 200.0, 3e4, 1e7])
def test_rows_whose_lse_is_huge(isa, dtype, algorithm, second, size, rng):
    """By an additive mask of one large number, above 0 or below, with sinks that matter beside it."""
    arrays = draw(rng, 1, 2, 1, 7, 200, 5, 4, dtype)
    for shift in (size, -size):
        mask = np.full((1, 1, 7, 1), shift, dtype)
        for sinks in (of(shift, shift + 2), of(shift + 6, -np.inf), of(-np.inf, 0)):
            check_crossed(arrays, algorithm, second, mask=mask, sinks=sinks.astype(dtype))


@pytest.mark.parametrize("first", [*NAMED, "decode"])
@backwards
def test_their_gradients_are_central_differences(first, second, rng):
    arrays = q, k, v, g = draw(rng, 2, 4, 2, 3, 5, 4, 3)
    mask = np.where(rng.random((2, 1, 3, 5)) < 0.3, -np.inf, 0.5)
    mask[1, 0, 1] = -np.inf     # an empty row
    sinks = of(0.7, -1.0, 2.0, -np.inf)
    keywords = {"mask": mask, "sinks": sinks, "softcap": 2.0, "dropout": 0.3, "seed": 11}
    found = crossed(first, second, *arrays, **keywords)

    def loss():
        return (fastmha.attention(q, k, v, algorithm=first, **keywords) * g).sum()

    assert np.abs(found[5][:3]).min() > 1e-3
    assert_gradient(found[5][:3], loss, sinks[:3], "sinks")
    assert not bits(found[5])[3]
    for gradient, x, name in zip(found[2:], arrays, "qkv"):
        assert_gradient(gradient, loss, x, name)


# ------------------------------------------------------------------------------------------------- what they are like


@all_dtypes
@with_decode
@layouts
def test_minus_infinity_gives_the_bits_of_none(isa, dtype, algorithm, layout, rng):
    arrays = q, k, v, g = draw(rng, 2, 4, 2, 31, 210, 5, 4, dtype, layout)
    keywords = {"layout": layout, "key_ranges": ([0, 210], None)}
    none, sinks = np.full(4, -np.inf, dtype), np.array([-np.inf, 1, -np.inf, 2], dtype)
    plain, empty, some = ({} if s is None else {"sinks": s} for s in (None, none, sinks))
    more = {"algorithm": algorithm, "return_lse": True, **keywords}
    out, *others = (fastmha.attention(*arrays[:3], **more, **s) for s in (plain, empty, some))
    assert_same(out, others[0])
    heads = (slice(None), slice(None, None, 2)) if layout == "BHLD" else (slice(None), slice(None), slice(None, None, 2))
    assert same_bits(out[0][heads], others[1][0][heads])
    assert same_bits(out[1][:, ::2], others[1][1][:, ::2])
    for second in NAMED:
        more = {"algorithm": second, **keywords}
        without, *further = (fastmha.attention_backward(g, q, k, v, *out, **more, **s) for s in (plain, empty))
        assert_same(without, further[0][:3])
        assert not bits(further[0][3]).any()


@dtypes
@algorithms
@pytest.mark.parametrize("dropped", [{}, {"dropout": 0.3, "seed": 2}], ids=["", "dropout"])
def test_a_sink_is_one_more_key_of_that_score_and_of_value_0(isa, dtype, algorithm, dropped, rng):
    B, H, Lq, Lk = 2, 3, 40, 193
    q, k, v, g = draw(rng, B, H, H, Lq, Lk, 5, 4, dtype)
    sinks, wider = of(0.5, 3, -2, dtype=dtype), [np.concatenate([x, np.zeros_like(x[:, :, :1])], axis=2) for x in (k, v)]
    mask = rng.standard_normal((B, H, Lq, Lk)).astype(dtype)
    last = np.broadcast_to(sinks[:, None, None], (B, H, Lq, 1))
    found = run(fastmha, q, k, v, g, mask=mask, sinks=sinks, need_bias_grad=True, algorithm=algorithm, **dropped)
    more = {"mask": np.concatenate([mask, last], axis=3), "need_bias_grad": True, **dropped}
    wanted = list(run(fastmha, q, *wider, g, algorithm=algorithm, **more))
    exact, bounds = (list(x) for x in oracle(q, *wider, g, dtype, **more))
    for x in (wanted, exact, bounds):
        x[3:5] = [x[3][:, :, :Lk], x[4][:, :, :Lk]]
        x[5:] = [x[5][..., Lk].sum(axis=(0, 2)), x[5][..., :Lk]]
    bounds[5] = bounds[5] + Lq * B * np.finfo(dtype).eps * np.abs(wanted[5])
    assert_close(found, exact, bounds)
    assert_close(found, [x.astype(np.float64) for x in wanted], [2 * x for x in bounds])


@dtypes
@with_decode
def test_an_empty_row_is_zeros_with_the_sink_for_its_lse_and_without_gradients(isa, dtype, algorithm, rng):
    sinks = of(0.3, -4, 1e3, -np.inf, dtype=dtype)
    for Lq, Lk, empty in ((9, 30, np.arange(9) % 3 == 1), (2, 700, np.array([True, False])), (1, 5, np.array([True]))):
        q, k, v, g = draw(rng, 2, 4, 2, Lq, Lk, 5, 4, dtype)
        mask = np.where(empty[:, None], -np.inf, rng.standard_normal((Lq, Lk))).astype(dtype)
        out, lse = fastmha.attention(q, k, v, mask=mask, sinks=sinks, algorithm=algorithm, return_lse=True)
        assert not bits(out[:, :, empty]).any()
        assert np.array_equal(lse[:, :, empty], np.broadcast_to(sinks[:, None], (2, 4, empty.sum())))
        for second in NAMED:
            keywords = {"mask": mask, "sinks": sinks, "need_bias_grad": True, "algorithm": second}
            clean = fastmha.attention_backward(g, q, k, v, out, lse, **keywords)
            assert not bits(clean[0][:, :, empty]).any()
            assert not bits(clean[4])[empty].any()
            if empty.all():
                assert not any(bits(x).any() for x in clean)
            for poison in (np.nan, np.inf, 1e30):
                dirty_q, dirty_g = q.copy(), g.copy()
                dirty_q[:, :, empty] = dirty_g[:, :, empty] = poison
                dirty = fastmha.attention_backward(dirty_g, dirty_q, k, v, out, lse, **keywords)
                assert_same(clean, dirty)


@dtypes
@with_decode
@pytest.mark.parametrize("rule", [{"key_padding_lengths": [0, 0]}, {"key_ranges": (5, 5)}, {"window": (0, 0), "offset": 10**6},
                                  {"is_causal": True, "offset": -(2**50)}], ids=str)  # fmt: skip
def test_rows_without_keys_add_nothing_whatever_the_sink(isa, dtype, algorithm, rule, rng):
    q, k, v, g = draw(rng, 2, 4, 2, 3, 300, 5, 4, dtype)
    g[:] = np.nan
    sinks = of(0, 1e3, -1e30, -np.inf, dtype=dtype)
    out, lse = fastmha.attention(q, k, v, sinks=sinks, algorithm=algorithm, return_lse=True, **rule)
    assert not bits(out).any()
    assert np.array_equal(lse, np.broadcast_to(sinks[:, None], (2, 4, 3)))
    for second in NAMED:
        for x in fastmha.attention_backward(g, q, k, v, out, lse, sinks=sinks, algorithm=second, **rule):
            assert not bits(x).any()


@dtypes
@with_decode
@backwards
@pytest.mark.parametrize("large", [1e3, 1e30])
def test_beside_a_sink_so_large_all_weights_vanish(isa, dtype, algorithm, second, large, rng):
    arrays = draw(rng, 2, 2, 1, 31, 210, 5, 4, dtype)
    sinks = np.full(2, large, dtype)
    found = check_crossed(arrays, algorithm, second, sinks=sinks)
    assert np.array_equal(found[1], np.full((2, 2, 31), large, dtype))
    for x in (found[0], *found[2:]):
        assert not x.any()


@pytest.mark.parametrize("Lk", [5, 300, 900])       # in a tile, in several, in runs of these
@all_dtypes
@with_decode
def test_a_sink_that_is_no_number_is_the_users(isa, dtype, algorithm, Lk, rng):
    """NaN, and +inf, make NaN of the rows of their heads that are not empty, and change no bit of the others."""
    q, k, v, _ = draw(rng, 2, 4, 2, 3, Lk, 5, 4, dtype)
    rule = {"key_padding_lengths": [Lk, 0], "algorithm": algorithm, "return_lse": True}
    clean = fastmha.attention(q, k, v, sinks=of(1, 2, 3, 4, dtype=dtype), **rule)
    out, _ = fastmha.attention(q, k, v, sinks=of(1, np.nan, 3, np.inf, dtype=dtype), **rule)
    assert np.isnan(out[0, 1::2]).all()
    assert same_bits(out[:, ::2], clean[0][:, ::2])
    assert not bits(out[1]).any()


@all_dtypes
@with_decode
def test_the_firewall_holds_beside_sinks(isa, dtype, algorithm, rng):
    q, k, v, g = draw(rng, 2, 2, 1, 20, 300, 5, 4, dtype)
    gone = np.arange(300) % 5 == 2
    keywords = {"mask": np.broadcast_to(gone, (20, 300)), "sinks": of(1, 3, dtype=dtype)}
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_k[:, :, gone], dirty_v[:, :, gone] = np.nan, np.inf
    for second in NAMED:
        clean, dirty = (crossed(algorithm, second, q, x, y, g, **keywords) for x, y in ((k.copy(), v.copy()), (dirty_k, dirty_v)))
        assert_same(clean, dirty)
    arrays = q, k, v, g
    for which, at in ((0, (0, 1, 5)), (3, (0, 1, 5))):      # what is attended reaches the sink of that head alone
        poisoned = [x.copy() for x in arrays]
        poisoned[which][at] = np.nan
        for second in NAMED:
            *_, grad_sinks = crossed(algorithm, second, *poisoned, **keywords)
            assert np.array_equal(np.isnan(grad_sinks), [False, True])


@all_dtypes
@with_decode
def test_every_way_in_which_they_may_lie_gives_the_same_bits(dtype, algorithm, rng):
    arrays = draw(rng, 2, 4, 2, 9, 30, 5, 4, dtype)
    sinks = of(1, -2, 0.5, 3, dtype=dtype)
    locked = sinks.copy()
    locked.flags.writeable = False
    first = crossed(algorithm, "tiled", *arrays, sinks=sinks)
    for name, x in [*support.rearranged(sinks), ("read-only", locked), ("a list", None)]:
        if x is not None:
            assert_same(first, crossed(algorithm, "tiled", *arrays, sinks=x), name)
    same = crossed(algorithm, "tiled", *arrays, sinks=np.broadcast_to(sinks[:1], (4,)))
    assert_same(same, crossed(algorithm, "tiled", *arrays, sinks=np.full(4, sinks[0])))


@algorithms
def test_captured_weights_add_up_to_what_the_sink_leaves(algorithm, rng):
    q, k, v, _ = draw(rng, 2, 4, 2, 40, 60, 8, 8)
    sinks = of(1, 5, -3, -np.inf)
    out, lse, weights = fastmha.attention(q, k, v, sinks=sinks, algorithm=algorithm, return_lse=True, capture=fastmha.Capture())
    assert np.abs(weights - reference.attention_weights(q, k, sinks=sinks)).max() < 1e-14
    assert np.abs(weights.sum(axis=3) - (1 - np.exp(sinks[:, None] - lse))).max() < 1e-13
    assert same_bits(out, fastmha.attention(q, k, v, sinks=sinks, algorithm=algorithm))
    capture = fastmha.Capture(heads=[3, 1], rows=slice(5, 30))
    _, some = fastmha.attention(q, k, v, sinks=sinks, algorithm=algorithm, capture=capture)
    assert np.abs(some - weights[:, [3, 1], 5:30]).max() < 1e-14


def test_the_choice_of_an_algorithm_does_not_look_at_them():
    for Lq, Lk in ((1, 4096), (1, 16), (64, 64)):
        q, k = np.broadcast_to(np.float32(0), (2, 4, Lq, 8)), np.broadcast_to(np.float32(0), (2, 2, Lk, 8))
        plans = [fastmha.plan(q, k, k, **given) for given in ({}, {"sinks": np.zeros(4, np.float32)})]
        assert len({(p.algorithm, str(p.reasons), p.tile, p.flops) for p in plans}) == 1


def test_no_rows_no_keys_no_heads_and_no_widths(rng):
    for sizes in ({"B": 0}, {"Lk": 0}, {"Lq": 0}, {"H": 0, "Hkv": 0}, {"D": 0}, {"Dv": 0}):
        for layout in LAYOUTS:
            arrays = draw(rng, **({"B": 2, "H": 2, "Hkv": 1, "Lq": 3, "Lk": 5, "D": 4, "Dv": 3} | sizes), layout=layout)
            sinks = of(1, -2)[: sizes.get("H", 2)]
            for algorithm in NAMED:
                found = check(*arrays, sinks=sinks, layout=layout, algorithm=algorithm)
                if "Lk" in sizes:
                    assert np.array_equal(found[1], np.broadcast_to(sinks[:, None], (2, 2, 3)))
                    assert not bits(found[5]).any()
