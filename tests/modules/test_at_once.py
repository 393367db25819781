"""A module's forward in one call of the core, against its single steps."""

import copy
import pickle

import numpy as np
import pytest
import support

import fastmha
from fastmha import _core, at_once, planning, precision, validate

ELEMENTS = (*support.DTYPES, *support.HALVES)
SHAPES = ((1, 1), (1, 2), (2, 10), (3, 17), (2, 70), (1, 300), (5, 1))
MODULES = {
    "plain": {},
    "biases": {"use_bias": True},
    "b_O": {"use_bias": "out"},
    "b_Q, b_K, b_V": {"use_bias": "qkv"},
    "groups": {"num_kv_heads": 2, "use_bias": True},
    "one group": {"num_kv_heads": 1},
    "wide heads": {"head_dim": 40, "num_kv_heads": 2},
    "odd heads": {"head_dim": 5},
    "strided": {"layout": "strided"},
    "contiguous": {"layout": "contiguous"},
    "tiled": {"algorithm": "tiled"},
    "blas": {"algorithm": "blas"},
}


def rules(B, L, dtype):
    """Keywords of forward by name; what is drawn is the same in every call."""
    rng = np.random.default_rng(1)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "shifted window": {"window": (3, 1), "offset": 2},
        "boolean mask": {"mask": rng.random((B, 1, L, L)) < 0.3},
        "additive mask": {"mask": rng.standard_normal((L, L)).astype(dtype)},
        "lengths": {"key_padding_lengths": rng.integers(0, L + 1, B)},
        "ranges": {"key_ranges": (rng.integers(0, L // 2 + 1, B), None), "is_causal": True},
        "softcap, sinks, alibi": {
            "softcap": 2.0, "sinks": np.linspace(-1, 1, 4).astype(dtype), "alibi": np.linspace(0, 1, 4).astype(dtype)},
        "dropout": {"dropout": 0.3, "seed": 5},
    }  # fmt: skip


def pair(dtype=np.float32, d_model=24, **keywords):
    """Two modules of the same numbers, of which the second takes its steps one by one."""
    m = fastmha.MultiHeadAttention(d_model, 4, dtype=dtype, rng=0, **keywords)
    for bias in (m.b_Q, m.b_K, m.b_V, m.b_O):
        if bias is not None:
            bias[...] = np.linspace(-1, 1, bias.size)
    stepwise = copy.deepcopy(m)
    stepwise._one_by_one = True
    return m, stepwise


def assert_same(one, other):
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def everything(m, X, training, **keywords):
    """Output, weights where they are asked for, what is kept, and the gradients."""
    out = m.forward(X, training=training, **keywords)
    results = list(out) if isinstance(out, tuple) else [out]
    if training:
        results += m.intermediates.values()
        if not m._frozen:
            results += [m.backward(results[0]), *m.gradients().values()]
    return results


@support.all_isas
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("kind", MODULES)
def test_one_call_has_the_bits_of_single_steps(isa, kind, dtype):
    m, stepwise = pair(dtype, **MODULES[kind])
    for B, L in SHAPES:
        X = np.random.default_rng(L).standard_normal((B, L, 24)).astype(dtype)
        for training in (False, True):
            for num_threads in (1, 3):
                call = {"training": training, "num_threads": num_threads}
                assert_same(everything(m, X, **call), everything(stepwise, X, **call))
                call["need_weights"] = True
                assert_same(everything(m, X, **call), everything(stepwise, X, **call))


@support.every_isa
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("rule", rules(1, 1, np.float32))
def test_one_call_has_the_bits_of_single_steps_under_every_rule(isa, rule, dtype):
    m, stepwise = pair(dtype, num_kv_heads=2, use_bias=True)
    for B, L in ((2, 10), (3, 1), (1, 90)):
        X = np.random.default_rng(L).standard_normal((B, L, 24)).astype(dtype)
        for training in (False, True):
            call = {"training": training, "num_threads": 2, **rules(B, L, dtype)[rule]}
            assert_same(everything(m, X, **call), everything(stepwise, X, **call))


@support.all_isas
@pytest.mark.parametrize("weights", [None, "unpacked", *(np.dtype(half).name for half in support.HALVES)])
def test_one_call_has_the_bits_of_single_steps_with_frozen_weights(isa, weights):
    m, stepwise = pair(use_bias=True, d_model=64)
    X = np.random.default_rng(0).standard_normal((2, 33, 64), dtype=np.float32)
    before = m.forward(X, training=False)
    for each in (m, stepwise):
        each.freeze(weights if weights != "unpacked" else None)
        if weights == "unpacked":
            each._packed = {}
    for L in (1, 2, 33):
        assert_same([m.forward(X[:, :L], training=False)], [stepwise.forward(X[:, :L], training=False)])
        assert_same([m.forward(X[:1, :L], training=False)], [stepwise.forward(X[:1, :L], training=False)])
    m.unfreeze()
    assert_same([m.forward(X, training=False)], [before])


@support.every_isa
def test_one_call_has_the_bits_of_single_steps_with_two_widths_of_heads(isa):
    m = fastmha.SelfAttention(24, 5, 11, 7, rng=0)
    stepwise = copy.deepcopy(m)
    stepwise._one_by_one = True
    for L in (1, 9, 80):
        X = np.random.default_rng(L).standard_normal((2, L, 24), dtype=np.float32)
        for training in (False, True):
            call = {"training": training, "is_causal": True, "need_weights": True}
            assert_same(everything(m, X, **call), everything(stepwise, X, **call))


def test_a_plain_forward_is_one_call_of_the_core(monkeypatch):
    """Or the tests above would compare single steps with themselves."""
    calls = []
    run = _core.projected_forward
    monkeypatch.setattr("fastmha.at_once.projected_forward", lambda *operands: (calls.append(1), run(*operands)))
    m, stepwise = pair()
    X = np.ones((2, 3, 24), np.float32)
    for each in (m, stepwise):
        each.forward(X, is_causal=True)
        each.forward(X[:, :1], training=False)
    assert len(calls) == (2 if _core.fused_multiply_add() else 0)


@pytest.mark.parametrize("dtype", support.HALVES)
@pytest.mark.parametrize("tokens", [5, 64, 65])
def test_a_plain_forward_of_few_tokens_of_half_precision_is_one_call_of_the_core(dtype, tokens, monkeypatch):
    calls = []
    for name in ("projected_forward", "projected_step"):
        run = getattr(_core, name)
        monkeypatch.setattr(f"fastmha.at_once.{name}", lambda *operands, run=run: (calls.append(1), run(*operands)))
    monkeypatch.setattr("fastmha._core.has_tiles", bool)
    m, _ = pair(dtype)
    X = np.ones((1, tokens, 24), dtype)
    m.forward(X, is_causal=True)
    m.forward(X, cache=fastmha.KVCache(1, 4, 6, capacity=65, dtype=dtype), is_causal=True)
    assert len(calls) == (2 if _core.fused_multiply_add() and tokens <= 64 else 0)


@support.all_isas
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_the_algorithm_is_that_of_single_steps(isa, dtype):
    for keywords in ({"num_kv_heads": 1, "head_dim": D} for D in (8, 16, 32, 64)):
        m, _ = pair(dtype, **keywords)
        for L, Lk in ((L, Lk) for L in (1, 2, 3) for Lk in (1, 4, 9, 20, 50, 120, 600)):
            q, k = np.zeros((1, 4, L, m.head_dim), dtype), np.zeros((1, 1, Lk, m.head_dim), dtype)
            problem = validate.attention_problem(q, k, k, "BHLD")
            name = None if precision.parts_of(problem) else at_once._algorithm(m, L, Lk, False)
            assert name in (None, planning.choose(problem, "auto")[0])


def test_a_changed_precision_or_instruction_set_is_seen_by_the_next_call():
    m, _ = pair(d_model=64)
    X = np.random.default_rng(0).standard_normal((2, 40, 64), dtype=np.float32)
    for isa in support.ISAS:
        with support.selected(isa):
            for name in ("highest", "medium", "highest"):
                fastmha.set_precision(name)
                try:
                    fresh, _ = pair(d_model=64)
                    assert_same([m.forward(X, training=False)], [fresh.forward(X, training=False)])
                finally:
                    fastmha.set_precision(None)


def test_what_is_remembered_of_shapes_stays_small_and_out_of_pickles():
    m, _ = pair()
    X = np.ones((1, 700, 24), np.float32)
    for L in range(1, 700):
        m.forward(X[:, :L], training=False)
    assert 0 < len(m._known) <= 256
    assert not pickle.loads(pickle.dumps(m))._known


@pytest.mark.parametrize("training", [False, True])
def test_after_an_error_the_kept_forward_is_the_one_before(training):
    m, _ = pair()
    X = np.ones((2, 3, 24), np.float32)
    grad = m.backward(m.forward(X))
    with pytest.raises(ValueError, match="mask of shape"):
        m.forward(X, mask=np.zeros((5, 5), bool), training=training)
    np.testing.assert_array_equal(m.backward(m.forward(X, training=False)), grad)


# ------------------------------------------------------------------------------------------------------------ backward, steps


def test_a_plain_backward_is_one_call_of_the_core(monkeypatch):
    calls = []
    run = _core.projected_backward
    monkeypatch.setattr("fastmha.at_once.projected_backward", lambda *operands: (calls.append(1), run(*operands)))
    for each in pair(use_bias=True):
        each.backward(each.forward(np.ones((2, 3, 24), np.float32), is_causal=True))
    assert len(calls) == (1 if _core.fused_multiply_add() else 0)


STEPS = {
    "causal": {"is_causal": True},
    "none": {},
    "window": {"window": (4, 0)},
    "softcap, sinks, alibi": {
        "softcap": 2.0, "sinks": np.linspace(-1, 1, 4), "alibi": np.linspace(0, 1, 4), "is_causal": True},
}  # fmt: skip


def steps(m, dtype, cache, rule, **keywords):
    """Output and weights of tokens that come in several parts, and what the cache holds then."""
    X = np.random.default_rng(3).standard_normal((cache.batch_size, 40, m.d_model)).astype(dtype)
    rule = {name: x.astype(dtype) if isinstance(x, np.ndarray) else x for name, x in STEPS[rule].items()}
    results = []
    for start, end in ((0, 20), (20, 21), (21, 22), (22, 37), (37, 40)):
        out = m.forward(X[:, start:end], cache=cache, training=False, **rule, **keywords)
        results += out if isinstance(out, tuple) else [out]
    return [*results, cache.k, cache.v, cache.lengths]


@support.all_isas
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("rule", STEPS)
def test_a_step_in_one_call_has_the_bits_of_single_steps(isa, rule, dtype):
    for keywords in ({"num_kv_heads": 2, "use_bias": True}, {"head_dim": 32, "num_kv_heads": 1}, {"algorithm": "tiled"}):
        m, stepwise = pair(dtype, **keywords)
        for B, capacity in ((1, 40), (3, 40), (2, None)):
            for call in ({"num_threads": 1}, {"num_threads": 3, "need_weights": True}):
                one, other = (fastmha.KVCache(B, m.num_kv_heads, m.head_dim, capacity=capacity, dtype=dtype) for _ in range(2))
                assert_same(steps(m, dtype, one, rule, **call), steps(stepwise, dtype, other, rule, **call))


def test_a_plain_step_is_one_call_of_the_core(monkeypatch):
    calls = []
    run = _core.projected_step
    monkeypatch.setattr("fastmha.at_once.projected_step", lambda *operands: (calls.append(1), run(*operands)))
    for each in pair():
        steps(each, np.float32, fastmha.KVCache(2, 4, 6, capacity=40), "causal")
    assert len(calls) == (5 if _core.fused_multiply_add() else 0)


@pytest.mark.parametrize("stored", [np.float16, np.float64])
def test_a_step_over_a_cache_of_another_dtype_is_right(stored):
    """It is none of one call: what is stored is rounded first."""
    m, _ = pair()
    one, other = fastmha.KVCache(2, 4, 6, capacity=40, dtype=stored), fastmha.KVCache(2, 4, 6, capacity=40)
    for x, y in zip(steps(m, np.float32, one, "causal"), steps(m, np.float32, other, "causal")):
        np.testing.assert_allclose(x, y, atol=0.02)


def test_a_step_that_fails_leaves_the_cache_as_it_was(monkeypatch):
    def fails(*operands):
        _core.projected_step(*operands)
        raise KeyboardInterrupt

    monkeypatch.setattr("fastmha.at_once.projected_step", fails)
    m, _ = pair()
    cache = fastmha.KVCache(2, 4, 6, capacity=8)
    before = np.random.default_rng(0).standard_normal((2, 4, 3, 6), dtype=np.float32)
    cache.append(before, before)
    X = np.ones((2, 2, 24), np.float32)
    if _core.fused_multiply_add():
        with pytest.raises(KeyboardInterrupt):
            m.forward(X, cache=cache)
    with pytest.raises(ValueError, match="capacity is 8 but a length of 9"):
        m.forward(X.repeat(3, 1), cache=cache)
    with pytest.raises(ValueError, match="mask of shape"):
        m.forward(X, cache=cache, mask=np.zeros((2, 4), bool))
    assert cache.length == 3
    np.testing.assert_array_equal(cache.k, before)
    np.testing.assert_array_equal(cache.v, before)
