"""Sinks, ALiBi, dropout and the gradient of a mask in modules, and sinks and ALiBi over caches, against what the functions do."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import NAMED, assert_gradient, assert_same, dtypes, normal, raises, same_bits

from fastmha import KVCache, MultiHeadAttention, SelfAttention, reference

B, L, LC, D_MODEL, HEADS = 2, 7, 5, 16, 4
SINKS, SLOPES = np.array([0.5, -1, 2, -np.inf]), np.array([1, 0.25, 0, -0.1])
MASK = normal(B, HEADS, L, L, seed=3)
MASK[:, :, 1, :2] = -np.inf
MASK[1, 0, 2] = -np.inf     # an empty row
RULES = {
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi": SLOPES},
    "dropout": {"dropout": 0.3, "seed": 2**63 + 1},
    "mask": {"mask": MASK},
    "all": {"sinks": SINKS, "alibi": SLOPES, "dropout": 0.3, "seed": 9, "mask": MASK, "is_causal": True, "softcap": 2.0},
}  # fmt: skip
layouts = pytest.mark.parametrize("layout", ["strided", "contiguous"])
rules = pytest.mark.parametrize("keywords", RULES.values(), ids=RULES)


def module(dtype=np.float64, groups=2, layout="auto", **keywords):
    m = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=groups, use_bias=True, dtype=dtype, layout=layout, rng=0, **keywords)
    for i, name in enumerate(("b_Q", "b_K", "b_V", "b_O")):
        view = m.parameters()[name]
        view[...] = normal(*view.shape, seed=20 + i)
    return m


def heads_of(m, X, C=None):
    """q, k, v (B, H, L, D), written out in float64."""
    p = {name: x.astype(np.float64) for name, x in m.parameters().items()}
    C = X if C is None else C
    made = ((x.astype(np.float64) @ p[f"W_{c}"] + p[f"b_{c}"]) for x, c in ((X, "Q"), (C, "K"), (C, "V")))
    return [x.reshape(*x.shape[:2], -1, m.d_model // m.num_heads).swapaxes(1, 2) for x in made]


def written_out(m, X, C=None, **keywords):
    """The output and the weights, in float64."""
    q, k, v = heads_of(m, X, C)
    p = {name: x.astype(np.float64) for name, x in m.parameters().items()}
    out = reference.combine_heads(reference.attention(q, k, v, **keywords)) @ p["W_O"] + p["b_O"]
    return out, reference.attention_weights(q, k, **keywords)


def cast(keywords, dtype):
    return {name: x.astype(dtype) if isinstance(x, np.ndarray) else x for name, x in keywords.items()}


# ------------------------------------------------------------------------------------------------------------- forward


@dtypes
@layouts
@rules
@pytest.mark.parametrize("algorithm", ["auto", *NAMED])
def test_forward_and_its_weights_are_those_of_the_reference(dtype, layout, keywords, algorithm):
    m, X = module(dtype, layout=layout, algorithm=algorithm), normal(B, L, D_MODEL, dtype=dtype)
    out, weights = m.forward(X, need_weights=True, **cast(keywords, dtype))
    for got, wanted in zip((out, weights), written_out(m, X, **keywords), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol={np.float32: 2e-5, np.float64: 1e-13}[dtype])
    np.testing.assert_allclose(m.forward(X, **cast(keywords, dtype)), out, rtol=0, atol=1000 * np.finfo(dtype).eps)


@layouts
@rules
def test_cross_attention_is_that_of_the_reference(layout, keywords):
    m, X, C = module(layout=layout), normal(B, L, D_MODEL), normal(B, LC, D_MODEL, seed=2)
    keywords = {name: x[..., :LC] if name == "mask" else x for name, x in keywords.items()}
    if "alibi" in keywords:
        keywords["offset"] = np.array([-2, 1])
    wanted = written_out(m, X, C, **keywords)[0]
    np.testing.assert_allclose(m.forward(X, context=C, **keywords), wanted, rtol=0, atol=1e-13)
    stored = m.project_context(C)
    np.testing.assert_allclose(m.forward(X, context=stored, **keywords), wanted, rtol=0, atol=1e-13)


def test_self_attention_takes_none_of_them():
    m, X = SelfAttention(D_MODEL, 4, 4, rng=0), normal(B, L, D_MODEL)
    for name in ("sinks", "alibi", "dropout", "seed"):
        with pytest.raises(TypeError, match=name):
            m.forward(X, **{name: 0})


def test_a_call_that_does_not_train_drops_nothing():
    m, X = module(), normal(B, L, D_MODEL)
    plain = m.forward(X, training=False)
    for given_rules in ({"dropout": 0.5, "seed": 3}, {"seed": 3}, {"dropout": 0.0}):
        assert same_bits(plain, m.forward(X, training=False, **given_rules))
    dropped = m.forward(X, dropout=0.5, seed=3)
    assert np.abs(dropped - plain).max() > 0.1
    with raises(ValueError, "seed must be given with dropout, ... got dropout 0.5 and no seed"):
        m.forward(X, training=False, dropout=0.5)
    with raises(ValueError, "dropout must be a number in [0, 1), got 1.5"):
        m.forward(X, training=False, dropout=1.5, seed=0)


def test_threads_and_packed_weights_change_no_bit_of_what_is_drawn():
    X = normal(B, L, D_MODEL, dtype=np.float32)
    for layout in ("strided", "contiguous"):
        m = module(np.float32, layout=layout)
        keywords = cast(RULES["all"], np.float32)
        results = []
        for threads in (1, 2, 5):
            out = m.forward(X, num_threads=threads, **keywords)
            grad = m.backward(np.ones_like(out), need_bias_grad=True, num_threads=threads)
            results.append([out, grad, m.grad_sinks, m.grad_mask, *m.gradients().values()])
        for others in results[1:]:
            assert_same(results[0], others)


# ------------------------------------------------------------------------------------------------------------ backward


def assert_gradients(m, X, context=None, **keywords):
    if context is not None:
        keywords["context"] = context
    grad_output = normal(*m.forward(X, **keywords).shape, seed=30)
    grad_X = m.backward(grad_output, need_bias_grad="mask" in keywords)
    found = {name: x.copy() for name, x in m.gradients().items()}
    of_sinks, of_mask, of_context = m.grad_sinks, m.grad_mask, m.grad_context

    def loss():
        return (m.forward(X, **keywords) * grad_output).sum()

    assert_gradient(grad_X, loss, X, "X")
    for name, gradient in found.items():
        if name != "W_V":       # as many loops as the others together
            assert_gradient(gradient, loss, m.parameters()[name], name)
    if context is not None:
        assert_gradient(of_context, loss, context, "context")
    assert (of_sinks is None) == ("sinks" not in keywords)
    assert (of_mask is None) == ("mask" not in keywords)
    if of_sinks is not None:
        assert of_sinks[3] == 0
        keywords["sinks"] = free = keywords["sinks"].copy()
        assert_gradient(of_sinks[:3], loss, free[:3], "sinks")
    if of_mask is not None:
        keywords["mask"] = mask = keywords["mask"].copy()
        left = mask != -np.inf
        assert of_mask.shape == mask.shape
        assert not of_mask[~left].any()
        values = mask[left]

        def loss_of_mask():
            mask[left] = values
            return loss()

        assert_gradient(of_mask[left], loss_of_mask, values, "mask")


@layouts
@rules
def test_every_gradient_is_the_central_difference(layout, keywords):
    assert_gradients(module(layout=layout), normal(B, L, D_MODEL), **keywords)


@rules
def test_every_gradient_with_a_context_is_the_central_difference(keywords):
    keywords = {name: x[:1, :, :, :LC] if name == "mask" else x for name, x in keywords.items()}
    if "alibi" in keywords:
        keywords["offset"] = 1
    assert_gradients(module(groups=1), normal(B, L, D_MODEL), normal(B, LC, D_MODEL, seed=2), **keywords)


class Turned:
    """A transform_qk with its transpose."""

    matrix = np.linalg.qr(normal(4, 4, seed=8))[0]

    def __call__(self, q, k, positions):
        matrix = self.matrix.astype(q.dtype)
        return q @ matrix, k @ matrix.T

    def backward(self, grad_q, grad_k, positions):
        return grad_q @ self.matrix.T, grad_k @ self.matrix


@layouts
def test_they_go_with_transform_qk(layout):
    assert_gradients(module(layout=layout), normal(B, L, D_MODEL), transform_qk=Turned(), **RULES["all"])


@pytest.mark.parametrize("shape", [(L, L), (1, 1, L, L), (B, 1, 1, L), (1, HEADS, 1, 1), (1, 1, 1, 1), (1, 1, L, 1)], ids=str)
def test_the_gradient_of_a_mask_is_in_its_shape_and_no_array_of_anyone_else(shape):
    m, X, mask = module(), normal(B, L, D_MODEL), normal(*shape, seed=5)
    out = m.forward(X, mask=mask)
    assert m.backward(np.ones_like(out)).shape == X.shape
    assert m.grad_mask is None
    m.backward(np.ones_like(out), need_bias_grad=True)
    q, k, v = heads_of(m, X)
    heads, lse = reference.attention(q, k, v, mask=mask, return_lse=True)
    g = np.ones_like(out) @ m.W_O.T
    g = g.reshape(B, L, HEADS, -1).swapaxes(1, 2)
    wanted = reference.attention_backward(g, q, k, v, heads, lse, mask=mask, need_bias_grad=True)[3]
    assert m.grad_mask.shape == shape
    np.testing.assert_allclose(m.grad_mask, wanted, rtol=0, atol=1e-12)
    first = m.grad_mask
    m.backward(2 * np.ones_like(out), need_bias_grad=True)
    assert not np.shares_memory(first, m.grad_mask)
    np.testing.assert_allclose(m.grad_mask, 2 * first, rtol=1e-12, atol=1e-12)


def test_gradients_of_an_earlier_call_do_not_stay():
    m, X = module(), normal(B, L, D_MODEL)
    assert m.grad_sinks is None
    assert m.grad_mask is None
    out = m.forward(X, sinks=SINKS, mask=MASK)
    m.backward(np.ones_like(out), need_bias_grad=True)
    assert m.grad_sinks.shape == (HEADS,)
    m.backward(np.ones_like(m.forward(X)))
    assert m.grad_sinks is None
    assert m.grad_mask is None


def test_lists_and_tuples_are_taken():
    m, X, grad = module(), normal(B, L, D_MODEL), normal(B, L, D_MODEL, seed=4)
    out = m.forward(X, sinks=SINKS, alibi=SLOPES)
    wanted = m.backward(grad)
    assert same_bits(out, m.forward(X, sinks=list(SINKS), alibi=tuple(SLOPES)))
    assert same_bits(wanted, m.backward(grad))


# ---------------------------------------------------------------------------------------------------- copies and messages


def test_a_copy_by_pickle_draws_the_same_and_has_no_gradients():
    m, X = module(), normal(B, L, D_MODEL)
    m.backward(np.ones_like(m.forward(X, **RULES["all"])), need_bias_grad=True)
    other = pickle.loads(pickle.dumps(m))
    assert same_bits(m.forward(X, **RULES["all"]), other.forward(X, **RULES["all"]))
    assert same_bits(m.backward(X, need_bias_grad=True), other.backward(X, need_bias_grad=True))
    assert_same((m.grad_sinks, m.grad_mask), (other.grad_sinks, other.grad_mask))


FORWARD = [
    ({"sinks": np.zeros(3)}, ValueError, "sinks must have shape (H,) = (4,), one for each query head, got (3,)"),
    ({"sinks": np.zeros(4, np.float32)}, TypeError, "sinks has dtype float32 but q has float64: they must share one dtype"),
    ({"alibi": np.zeros((4, 1))}, ValueError, "alibi must have shape (H,) = (4,), one for each query head, got (4, 1)"),
    ({"alibi": [1, 2, 3, 4]}, TypeError, "alibi must be float32, float64, float16 or bfloat16 ..., got int64: ..."),
    ({"alibi": SLOPES, "context": normal(B, LC, D_MODEL)}, ValueError,
     "offset must be given with is_causal, window or alibi where q has length 7 and k has length 5: ..."),
    ({"dropout": 0.5}, ValueError, "seed must be given with dropout, ...; got dropout 0.5 and no seed"),
    ({"dropout": False}, TypeError, "dropout must be a number in [0, 1), got False"),
    ({"dropout": np.zeros(2)}, TypeError, "dropout must be a number in [0, 1), got array([0., 0.])"),
    ({"dropout": True, "seed": 1}, TypeError, "dropout must be a number in [0, 1), got True"),
    ({"dropout": 0.5, "seed": -1}, ValueError, "seed must be at least 0, got -1"),
    ({"dropout": 0.5, "seed": 1.0}, TypeError, "seed must be an integer, got 1.0"),
    ({"dropout_p": 0.5}, TypeError, "MultiHeadAttention.forward has no keyword dropout_p: it is dropout here, with a seed"),
    ({"s_aux": 0.5}, TypeError, "MultiHeadAttention.forward has no keyword s_aux: it is sinks here, one for each query head"),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "error", "message"), FORWARD, ids=[case[2] for case in FORWARD])
def test_forward_says_what_it_does_not_take(keywords, error, message):
    with raises(error, message):
        module().forward(normal(B, L, D_MODEL), **keywords)


def test_backward_says_when_there_is_no_mask_of_floats():
    m, X = module(), normal(B, L, D_MODEL)
    for mask, came in ((None, "no mask"), (MASK > 1, "one of bool")):
        m.forward(X, mask=mask)
        with raises(ValueError, f"need_bias_grad needs a forward with a mask of floats, ..., got {came}"):
            m.backward(X, need_bias_grad=True)
        m.backward(X)
    with raises(TypeError, "need_bias_grad must be True or False, got 1"):
        m.backward(X, need_bias_grad=1)


def test_dropout_and_a_cache_cannot_be_given_together():
    m, X = module(), normal(B, L, D_MODEL)
    cache = KVCache(B, 2, 4, dtype=np.float64)
    with raises(ValueError, "dropout and cache cannot be given together: such a call keeps nothing for ..., got dropout 0.5"):
        m.forward(X, cache=cache, dropout=0.5, seed=1)
    assert cache.length == 0
    plain = m.forward(X, is_causal=True, training=False)
    assert np.abs(m.forward(X, cache=cache, is_causal=True, dropout=0.5, seed=1, training=False) - plain).max() < 1e-13
    for name in ("dropout", "dropout_p"):
        with raises(TypeError, f"KVCache.attend has no keyword {name}: a cache drops nothing"):
            cache.attend(normal(B, 4, 1, 4), **{name: 0.5})


# -------------------------------------------------------------------------------------------------------------- caches


@dtypes
@pytest.mark.parametrize("ring", [{}, {"window": 5, "max_chunk": 3}], ids=["linear", "ring"])
@pytest.mark.parametrize("algorithm", ["auto", *NAMED])
@pytest.mark.parametrize("transform", [None, Turned()], ids=["", "transform_qk"])
def test_step_by_step_over_a_cache_it_is_the_whole_call(dtype, ring, algorithm, transform):
    """Also with weights, for which a ring is copied in order."""
    n = 20
    m, X = module(dtype, algorithm=algorithm), normal(B, n, D_MODEL, dtype=dtype)
    keywords = cast({"sinks": SINKS, "alibi": SLOPES}, dtype) | {"is_causal": True, "transform_qk": transform}
    if ring:
        keywords["window"] = (5, 0)
    whole, weights = m.forward(X, need_weights=True, **keywords)
    for need in (False, True):
        cache = KVCache(B, 2, 4, dtype=dtype, **ring)
        done = 0
        for step in (1, 2, 1, 3, 3, 1, 7, 1, 1):     # one longer than the ring takes at once
            out = m.forward(X[:, done : done + step], cache=cache, need_weights=need, training=False, **keywords)
            out, *of_step = out if need else (out,)
            atol = {np.float32: 2e-5, np.float64: 1e-13}[dtype]
            np.testing.assert_allclose(out, whole[:, done : done + step], rtol=0, atol=atol)
            for w in of_step:
                seen = weights[:, :, done : done + step, : done + step]
                held = min(w.shape[3], seen.shape[3])
                np.testing.assert_allclose(w[..., w.shape[3] - held :], seen[..., seen.shape[3] - held :], rtol=0, atol=atol)
            done += step
        assert done == n


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from([None, (0, 1), (3, 1), (5, 4), (2, 6)]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=9), st.sampled_from([*NAMED, "decode"]),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_rows_of_several_lengths_over_caches_are_those_of_the_reference(seed, ring, steps, algorithm, causal, sunk, weights):
    """Linear caches and rings that wrap: sinks count once, distances are those of the positions."""
    rng = np.random.default_rng(seed)
    sizes = dict(zip(("window", "max_chunk"), ring, strict=True)) if ring else {}
    cache = KVCache(2, 2, 4, v_head_dim=3, dtype=np.float64, **sizes)
    rows = [[np.zeros((1, 2, 0, 4)), np.zeros((1, 2, 0, 3))] for _ in range(2)]
    keywords = {"alibi": SLOPES, "is_causal": causal} | ({"sinks": SINKS} if sunk else {})
    if ring:
        keywords["window"] = (int(rng.integers(0, ring[0] + 1)), None)
    need = weights and algorithm != "decode"
    for counts in steps:
        counts = np.minimum(counts, ring[1]) if ring else np.array(counts)
        n = max(counts.max(), 1)
        q, k, v = (rng.standard_normal((2, heads, n, width)) for heads, width in ((4, 4), (2, 4), (2, 3)))
        cache.append(k, v, lengths=counts)
        out, lse, *more = cache.attend(q, lengths_new=counts, algorithm=algorithm, return_lse=True, need_weights=need, **keywords)
        for b, count in enumerate(counts):
            rows[b] = [np.concatenate([old, new[b : b + 1, :, :count]], axis=2) for old, new in zip(rows[b], (k, v), strict=True)]
            at = {"offset": rows[b][0].shape[2] - count}
            own = q[b : b + 1, :, :count]
            wanted = reference.attention(own, *rows[b], return_lse=True, **keywords, **at)
            for got, exact in zip((out, lse), wanted, strict=True):
                np.testing.assert_allclose(got[b : b + 1, :, :count], exact, rtol=0, atol=1e-12)
            assert not out[b, :, count:].any()
            assert np.isneginf(lse[b, :, count:]).all()
            for w in more:
                exact = reference.attention_weights(own, rows[b][0], **keywords, **at)
                held = min(exact.shape[3], w.shape[3])
                exact = exact[..., exact.shape[3] - held :]
                np.testing.assert_allclose(w[b : b + 1, :, :count, :held], exact, rtol=0, atol=1e-12)


def test_alibi_over_a_cache_needs_queries_that_have_positions():
    cache = KVCache(1, 2, 4, dtype=np.float64)
    cache.append(normal(1, 2, 3, 4), normal(1, 2, 3, 4))
    with raises(ValueError, "q has 4 new queries in row 0 but the cache holds only 3 tokens there: ..."):
        cache.attend(normal(1, 4, 4, 4), alibi=SLOPES)
    assert cache.attend(normal(1, 4, 4, 4), sinks=SINKS).shape == (1, 4, 4, 4)


@pytest.mark.parametrize("sink", [-np.inf, 0.0, 30.0, 1e4])
def test_a_ring_that_has_wrapped_counts_a_sink_once(sink):
    """Whatever the sink beside the two parts' sums, which are merged by their lse."""
    sinks = np.full(4, sink)
    cache = KVCache(1, 2, 4, dtype=np.float64, window=5, max_chunk=2)
    k, v, q = (normal(1, heads, 19, 4, seed=s) for heads, s in ((2, 1), (2, 2), (4, 3)))
    for i in range(19):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        out, lse = cache.attend(q[:, :, i : i + 1], sinks=sinks, window=(5, 0), is_causal=True, return_lse=True)
        wanted = reference.attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], sinks=sinks, window=(5, 0), offset=i,
                                     return_lse=True)
        for got, exact in zip((out, lse), wanted, strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-13, atol=1e-13)
