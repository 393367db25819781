"""Modules of half precision, a lower precision of float32 products, and weights frozen in half precision.

What a half-precision module computes is known to rounding: Q, K, V, the concatenated heads and the output are rounded to 8 or 11
bits. Bounds are multiples of that eps of an array's largest entry."""

import copy
import pickle

import numpy as np
import pytest
from support import HALVES, all_dtypes, all_isas, assert_same, eps, halves, raises, same_bits, tile_isas

import fastmha
from fastmha import KVCache, MultiHeadAttention, SelfAttention, algorithms, tuning

FORWARD, BACKWARD = 6, 12       # eps
WEIGHTS = pytest.mark.parametrize("weights", [dtype.__name__ for dtype in HALVES])


def draw(m, *shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(m.dtype)


def with_biases(m, seed=0):
    rng = np.random.default_rng(seed)
    for name, parameter in m.parameters().items():
        if name.startswith("b"):
            parameter[...] = rng.standard_normal(parameter.shape).astype(parameter.dtype)
    return m


def in_float64(m):
    """The same numbers in a module that computes in float64."""
    other = MultiHeadAttention(m.d_model, m.num_heads, num_kv_heads=m.num_kv_heads, head_dim=m.head_dim, kdim=m.kdim, vdim=m.vdim,
                               use_bias=m.use_bias, dtype=np.float64)
    other.load_state_dict({name: x.astype(np.float64) for name, x in m.state_dict().items()})
    return other


def results(m, X, g, need_bias_grad=False, **rules):
    """Output, weights and every gradient."""
    out, weights = m.forward(X, need_weights=True, **rules)
    grad_X = m.backward(g, need_bias_grad=need_bias_grad)
    found = {"out": out, "weights": weights, "grad_X": grad_X, **{f"grad_{name}": x.copy() for name, x in m.gradients().items()}}
    context = m.grad_context if isinstance(m.grad_context, tuple) else (m.grad_context,)
    found |= {f"context {i}": x for i, x in enumerate(context) if x is not None}
    return found | {name: x for name, x in (("grad_mask", m.grad_mask), ("grad_sinks", m.grad_sinks)) if x is not None}


def assert_near(found, exact, unit):
    for name, x in found.items():
        bound = (FORWARD if name in ("out", "weights") else BACKWARD) * unit
        size = np.abs(exact[name]).max()
        if name[-1] in "QK":        # of scores, whose gradient may be a difference of large numbers, or 0 but for rounding
            size = max(size, np.abs(exact["grad_W_V"]).max() / 4)
        assert np.abs(x.astype(np.float64) - exact[name]).max() <= bound * max(size, 1e-3), name


def rules_of(name, m, B, L, Lk):
    rng = np.random.default_rng(5)
    computed = np.float32
    return {
        "plain": {}, "causal": {"is_causal": True}, "lengths": {"key_padding_lengths": [Lk // 2] * B},
        "removed": {"mask": rng.random((B, 1, L, Lk)) < 0.3},
        "added": {"mask": rng.standard_normal((1, m.num_heads, L, Lk)).astype(m.dtype), "need_bias_grad": True},
        "added in float32": {"mask": rng.standard_normal((L, Lk)).astype(computed), "need_bias_grad": True},
        "others": {"softcap": 5.0, "sinks": np.linspace(-1, 1, m.num_heads).astype(computed), "window": (9, 4),
                   "alibi": np.linspace(0.1, 0.2, m.num_heads).astype(computed)},
        "dropout": {"dropout": 0.25, "seed": 3},
    }[name]


RULES = ("plain", "causal", "lengths", "removed", "added", "added in float32", "others", "dropout")


@all_isas
@halves
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
@pytest.mark.parametrize("rule", RULES)
def test_a_module_of_half_precision_is_right_to_its_rounding(isa, dtype, layout, rule):
    for B, L in ((1, 1), (2, 5), (1, 17), (2, 40), (1, 70)):
        for algorithm, bias in (("auto", True), ("blas", False), ("tiled", "qkv")):
            m = with_biases(MultiHeadAttention(48, 6, num_kv_heads=2, use_bias=bias, dtype=dtype, layout=layout,
                                               algorithm=algorithm, rng=L))
            exact = in_float64(m)
            X, g = draw(m, B, L, 48), draw(m, B, L, 48, seed=1)
            rules = rules_of(rule, m, B, L, L)
            wide = {name: x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype != bool else x
                    for name, x in rules.items()}
            found = results(m, X, g, **rules)
            assert found["out"].dtype == m.W_Q.dtype == m.W_O.dtype == dtype
            assert found["grad_X"].dtype == found["weights"].dtype == m.grad_W_Q.dtype == np.float32
            assert m.intermediates["lse"].dtype == np.float32
            if "grad_mask" in found:
                assert found["grad_mask"].dtype == rules["mask"].dtype
            assert_near(found, results(exact, X.astype(np.float64), g.astype(np.float64), **wide), eps(dtype))


@all_isas
@halves
def test_contexts_of_half_precision_are_right_to_rounding(isa, dtype):
    for kdim, vdim, Lk in ((None, None, 40), (24, 24, 33), (24, 40, 7)):
        m = with_biases(MultiHeadAttention(48, 4, head_dim=16, kdim=kdim, vdim=vdim, use_bias=True, dtype=dtype, rng=0))
        X, g = draw(m, 2, 20, 48), draw(m, 2, 20, 48, seed=1)
        keys, values = draw(m, 2, Lk, m.kdim, seed=2), draw(m, 2, Lk, m.vdim, seed=3)
        context = keys if kdim == vdim else (keys, values)
        wide = keys.astype(np.float64) if kdim == vdim else (keys.astype(np.float64), values.astype(np.float64))
        exact = results(in_float64(m), X.astype(np.float64), g.astype(np.float64), context=wide)
        assert_near(results(m, X, g, context=context), exact, eps(dtype))
        stored = m.project_context(context)
        assert stored.dtype == dtype
        found = m.forward(X, context=stored, training=False)
        assert np.abs(found.astype(np.float64) - exact["out"]).max() <= FORWARD * eps(dtype) * np.abs(exact["out"]).max()


@halves
def test_one_head_of_half_precision_is_right_to_rounding(dtype):
    m, exact = (SelfAttention(33, 17, 9, 21, dtype=kind, rng=0) for kind in (dtype, np.float64))
    exact.load_state_dict({name: x.astype(np.float64) for name, x in m.state_dict().items()})
    X, g = draw(m, 2, 30, 33), draw(m, 2, 30, 21, seed=1)
    found = results(m, X, g, is_causal=True)
    assert_near(found, results(exact, X.astype(np.float64), g.astype(np.float64), is_causal=True), eps(dtype))


@halves
def test_parameters_are_the_rounded_ones_of_float32_and_keep_their_type(dtype):
    m, wide = (MultiHeadAttention(16, 2, use_bias=True, dtype=kind, rng=3) for kind in (dtype, np.float64))
    assert np.array_equal(m.W_Q, wide.W_Q.astype(dtype))
    m.W_K = np.full((16, 16), 1 / 3)
    assert m.W_K.dtype == dtype
    assert set(m.W_K.flat) == {np.array(1 / 3).astype(dtype)[()]}
    X = draw(m, 1, 4, 16)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert other.dtype == dtype
        assert same_bits(other.forward(X, training=False), m.forward(X, training=False))
    assert same_bits(m.forward(X.astype(np.float64)), m.forward(X))
    assert f"dtype={np.dtype(dtype).name}" in repr(m)


@all_isas
@all_dtypes
def test_bits_are_the_same_for_every_number_of_threads(isa, dtype):
    m = with_biases(MultiHeadAttention(64, 4, use_bias=True, dtype=dtype, precision="high", rng=0))
    X, g = draw(m, 3, 700, 64), draw(m, 3, 700, 64, seed=1)
    kept = []
    for num_threads in (1, 2, 3):
        out = m.forward(X, is_causal=True, num_threads=num_threads)
        grad_X = m.backward(g, num_threads=num_threads)
        kept.append([out, grad_X, *(x.copy() for x in m.gradients().values())])
    assert_same(kept[0], kept[1])
    assert_same(kept[0], kept[2])


@tile_isas
@halves
def test_what_is_not_finite_or_too_large_flows_as_in_float32(isa, dtype):
    for bad in (np.nan, np.inf, 3e38 if np.dtype(dtype).name == "bfloat16" else 6e4):
        m, wide = (MultiHeadAttention(64, 4, dtype=kind, rng=0) for kind in (dtype, np.float32))
        wide.load_state_dict({name: x.astype(np.float32) for name, x in m.state_dict().items()})
        X = draw(m, 2, 40, 64)
        X[1, 7] = bad
        found, wanted = m.forward(X, is_causal=True), wide.forward(X.astype(np.float32), is_causal=True)
        assert np.isfinite(found[0].astype(np.float32)).all()
        assert np.isfinite(found[1, :7].astype(np.float32)).all()
        with np.errstate(all="ignore"):
            assert np.array_equal(np.isnan(found.astype(np.float32)), np.isnan(wanted)) or np.isfinite(bad)


# ---------------------------------------------------------------------------------------------------------- precision


@tile_isas
@pytest.mark.parametrize(("precision", "parts", "unit"), [("high", 2, 2.0**-15), ("medium", 1, 2.0**-7)])
def test_a_permitted_precision_is_taken_by_every_product_if_it_pays_and_keeps_its_bound(isa, precision, parts, unit):
    pays = tuning.current().least_on_tiles(parts, "products")[0] < tuning.NEVER
    m, highest = (MultiHeadAttention(64, 4, num_kv_heads=2, precision=p, rng=0) for p in (precision, None))
    X, g = draw(m, 2, 50, 64), draw(m, 2, 50, 64, seed=1)
    found, most = (results(x, X, g, is_causal=True) for x in (m, highest))
    assert_near(found, results(in_float64(m), X.astype(np.float64), g.astype(np.float64), is_causal=True), unit)
    for name, x in found.items():
        assert same_bits(x, most[name]) is not pays, name


def test_a_precision_that_nothing_is_faster_at_changes_no_bit(isa):
    m, highest = (MultiHeadAttention(64, 4, precision=p, rng=0) for p in ("medium", None))
    X, g = draw(m, 2, 50, 64), draw(m, 2, 50, 64, seed=1)
    found, most = (results(x, X, g) for x in (m, highest))
    assert_same(found.values(), most.values())


@tile_isas
def test_the_precision_set_for_all_is_that_of_modules_that_name_none(isa):
    named, other = (MultiHeadAttention(64, 4, precision=p, rng=0) for p in ("medium", None))
    X = draw(named, 2, 50, 64)
    fastmha.set_precision("medium")
    try:
        assert same_bits(named.forward(X), other.forward(X))
    finally:
        fastmha.set_precision(None)
    assert not same_bits(named.forward(X), other.forward(X))


@tile_isas
def test_a_plan_names_the_precision_of_the_module(isa):
    m = MultiHeadAttention(64, 4, precision="medium", rng=0)
    assert "matrix tiles" in m.plan(2, 50).products
    assert m.plan(2, 50).layout == "strided"
    assert 'precision="medium"' in repr(m)
    assert "precision" not in repr(MultiHeadAttention(64, 4))


def test_a_precision_must_be_one_of_three():
    with raises(ValueError, 'precision must be "highest", "high" or "medium", got \'low\''):
        MultiHeadAttention(64, 4, precision="low")
    with raises(ValueError, 'precision must be "highest", "high" or "medium", got 16'):
        SelfAttention(64, 4, 4, precision=16)


# ---------------------------------------------------------------------------------------------------- weights in half


def outputs(m, **rules):
    """Of rows in every number that products distinguish, alone and in a batch."""
    return [m.forward(draw(m, B, L, m.d_model, seed=L), is_causal=True, training=False)
            for B, L in ((1, 1), (2, 1), (1, 16), (1, 17), (3, 40), (1, 257))]


def rounded(m, weights):
    """A module of the same type whose weights, not biases, have been rounded to a half precision."""
    other = copy.deepcopy(m)
    for name, x in m.parameters().items():
        if name.startswith("W"):
            setattr(other, name, x.astype(algorithms.validate.element_type("weights", weights)).astype(np.float32))
    return other


@all_isas
@WEIGHTS
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_frozen_weights_in_half_precision_are_those_of_a_module_with_rounded_weights(isa, weights, layout):
    for d_model, own in ((64, {"use_bias": True}), (70, {"head_dim": 9, "num_kv_heads": 2})):
        m = with_biases(MultiHeadAttention(d_model, 4, layout=layout, rng=0, **own))
        before = {name: x.copy() for name, x in m.parameters().items()}
        expected, exact = outputs(rounded(m, weights)), outputs(m)
        m.freeze(weights=weights)
        found = outputs(m)
        for x, y, z in zip(found, expected, exact, strict=True):
            assert x.dtype == np.float32
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)
            assert not np.allclose(x, z, rtol=0, atol=2e-5)
        assert_same(before.values(), m.parameters().values())
        assert weights in repr(m)
        for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            assert_same(outputs(other), found)
            assert repr(other) == repr(m)
        m.freeze()
        assert_same(outputs(m), exact)
        m.freeze(weights=weights)
        m.unfreeze()
        assert_same(outputs(m), exact)
        assert weights not in repr(m)


@WEIGHTS
def test_steps_and_contexts_take_the_weights_in_half_precision_too(weights):
    m = MultiHeadAttention(48, 4, num_kv_heads=2, rng=0)
    X, context = draw(m, 2, 20, 48), draw(m, 2, 35, 48, seed=1)

    def found(m):
        cache = KVCache(2, 2, 12)
        steps = [m.forward(X[:, i:j], cache=cache, is_causal=True, training=False) for i, j in ((0, 17), (17, 18), (18, 20))]
        contexts = context, m.project_context(context)
        return [*(m.forward(X, context=x, training=False) for x in contexts), *steps]

    expected = found(rounded(m, weights))
    m.freeze(weights=weights)
    for x, y in zip(found(m), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@all_isas
@halves
@WEIGHTS
def test_a_module_of_half_precision_may_be_frozen(isa, dtype, weights):
    m = MultiHeadAttention(64, 4, dtype=dtype, rng=0)
    expected = outputs(m)
    m.freeze()
    assert_same(outputs(m), expected)
    m.freeze(weights=weights)
    for x, y in zip(outputs(m), expected, strict=True):
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=0, atol=0.05)


def test_weights_must_name_a_half_precision_that_holds_them():
    m = MultiHeadAttention(16, 2, rng=0)
    with raises(ValueError, 'weights must be "bfloat16" or "float16", got \'float32\''):
        m.freeze(weights="float32")
    with raises(ValueError, "weights must be None in a module of float64, got 'float16'"):
        MultiHeadAttention(16, 2, dtype=np.float64).freeze(weights="float16")
    m.W_O[2, 3] = 1e6
    with raises(ValueError, "weights 'float16' cannot hold 1e+06, the size of a weight"):
        m.freeze(weights="float16")
    m.W_O[2, 3] = 0      # nothing has been frozen
