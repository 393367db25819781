"""`transform_qk` of MultiHeadAttention: rotary positions with and without a cache, its gradient, what it may return."""


import numpy as np
import pytest
from support import difference, dtypes, normal, raises, same_bits

from fastmha import KVCache, MultiHeadAttention, reference

D_MODEL, HEADS, B, L = 16, 4, 2, 9
GROUPS = pytest.mark.parametrize("groups", [4, 2, 1])


def module(dtype=np.float64, groups=2, **keywords):
    m = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=groups, use_bias=True, dtype=dtype, rng=0, **keywords)
    m.b_Q, m.b_K = normal(*m.b_Q.shape, seed=2), normal(*m.b_K.shape, seed=3)
    return m


class Rotary:
    """x (B, H, L, D) as D / 2 complex numbers, each turned by position · frequency; the transpose turns back."""

    def __init__(self, in_place=False):
        self.in_place, self.seen = in_place, []

    def turn(self, x, positions, sign):
        half = x.shape[3] // 2
        angle = positions[:, None, :, None] * 10.0 ** -np.arange(half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(sign * 1j * angle)
        y = x if self.in_place else np.empty_like(x)
        y[..., :half], y[..., half:] = turned.real, turned.imag
        return y

    def __call__(self, q, k, positions):
        self.seen.append(positions.copy())
        return self.turn(q, positions, 1), self.turn(k, positions, 1)

    def backward(self, grad_q, grad_k, positions):
        return self.turn(grad_q, positions, -1), self.turn(grad_k, positions, -1)


def expected(m, X, **keywords):
    """The specification with rotated heads, in float64."""
    weights = {name: w.astype(np.float64) for name, w in m.parameters().items()}
    made = reference.mha_forward_backward(X.astype(np.float64), weights, m.num_heads, m.num_kv_heads)
    q, k = Rotary()(made["Q"], made["K"], np.tile(np.arange(X.shape[1]), (len(X), 1)))
    heads = reference.attention(q, k, made["V"], **keywords)
    return reference.combine_heads(heads) @ weights["W_O"] + weights["b_O"]


@dtypes
@GROUPS
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_rotary_positions_equal_the_specification_with_rotated_heads(layout, in_place, groups, dtype):
    m, X, rotary = module(dtype, groups, layout=layout), normal(B, L, D_MODEL, dtype=dtype), Rotary(in_place)
    out = m.forward(X, is_causal=True, transform_qk=rotary)
    np.testing.assert_allclose(out, expected(m, X, is_causal=True), atol={np.float32: 2e-5, np.float64: 1e-12}[dtype])
    assert not np.allclose(out, m.forward(X, is_causal=True), atol=1e-3)


@GROUPS
@pytest.mark.parametrize("ring", [{}, {"window": 4, "max_chunk": 2}])
@pytest.mark.parametrize("sizes", [[1] * L, [4, 1, 4], [2, 2, 5]])
def test_rotary_positions_in_chunks_through_a_cache_equal_the_whole(sizes, ring, groups):
    """Cached keys keep their rotation, as rows of different lengths keep their own positions."""
    m, X, keywords = module(groups=groups), normal(B, L, D_MODEL), {"is_causal": True, "window": (4, None)}
    whole = expected(m, X, **keywords)
    cache, rotary = KVCache(B, groups, 4, dtype=np.float64, **ring), Rotary()
    m.forward(X[:, :1], cache=cache, transform_qk=rotary, key_padding_lengths=[1, 0], **keywords)
    done = np.array([1, 0])
    for n in sizes:
        counts = np.minimum(n, L - done)
        x = np.zeros((B, n, D_MODEL))
        for b in range(B):
            x[b, : counts[b]] = X[b, done[b] : done[b] + counts[b]]
        out = m.forward(x, cache=cache, transform_qk=rotary, key_padding_lengths=counts, **keywords)
        assert np.array_equal(rotary.seen[-1], done[:, None] + np.arange(n))
        for b in range(B):
            np.testing.assert_allclose(out[b, : counts[b]], whole[b, done[b] : done[b] + counts[b]], atol=1e-12)
        done += counts


def test_positions_without_a_cache_are_the_offset_or_begin_at_0():
    m, X, rotary = module(), normal(B, 3, D_MODEL), Rotary()
    m.forward(X, transform_qk=rotary)
    m.forward(X, is_causal=True, offset=5, transform_qk=rotary)
    m.forward(X, window=(3, 3), offset=np.array([4, 1]), transform_qk=rotary)
    wanted = [[[0, 1, 2]] * 2, [[5, 6, 7]] * 2, [[4, 5, 6], [1, 2, 3]]]
    assert [p.tolist() for p in rotary.seen] == wanted
    assert {p.dtype for p in rotary.seen} == {np.dtype(np.int64)}


def test_shapes_of_what_is_transformed():
    shapes = []

    def look(q, k, positions):
        shapes.append((q.shape, k.shape, positions.shape))
        return q, k

    m, X = module(), normal(B, L, D_MODEL)
    plain = m.forward(X)
    assert same_bits(m.forward(X, transform_qk=look), plain)
    assert shapes == [((B, 4, L, 4), (B, 2, L, 4), (B, L))]


def test_it_may_return_views_of_what_it_was_given():
    m, X = module(groups=4), normal(B, L, D_MODEL)
    for views, copies in (
        (lambda q, k, p: (k, q), lambda q, k, p: (k.copy(), q.copy())),
        (lambda q, k, p: (q[..., ::-1], k[:, ::-1]), lambda q, k, p: (q[..., ::-1].copy(), k[:, ::-1].copy())),
    ):
        assert same_bits(m.forward(X, transform_qk=views), m.forward(X, transform_qk=copies))


# --------------------------------------------------------------------------------------------------------------- backward


@GROUPS
@pytest.mark.parametrize("in_place", [False, True])
def test_the_gradient_goes_back_through_it(groups, in_place):
    """Against central differences of sum(G * output) in X, W_Q, W_K, W_V and the biases."""
    m, X, G = module(groups=groups), normal(B, 5, D_MODEL), normal(B, 5, D_MODEL, seed=4)
    keywords = {"is_causal": True, "transform_qk": Rotary(in_place)}

    def loss():
        return float((G * m.forward(X, training=False, **keywords)).sum())

    m.forward(X, **keywords)
    grad_X = m.backward(G)
    assert same_bits(m.backward(G), grad_X)
    rng = np.random.default_rng(5)
    for x, grad in ((X, grad_X), *((getattr(m, name), g) for name, g in m.gradients().items())):
        for _ in range(6):
            at = tuple(rng.integers(n) for n in x.shape)
            assert grad[at] == pytest.approx(difference(loss, x, at, 1e-6), rel=1e-5, abs=1e-7)


def test_intermediates_are_what_attention_saw():
    m, X = module(), normal(B, L, D_MODEL)
    m.forward(X)
    made = {name: m.intermediates[name].copy() for name in "QKV"}
    m.forward(X, transform_qk=Rotary())
    q, k = Rotary()(made["Q"], made["K"], np.tile(np.arange(L), (B, 1)))
    for name, x in zip("QKV", (q, k, made["V"]), strict=True):
        np.testing.assert_allclose(m.intermediates[name], x, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------------- errors


X = normal(B, 3, D_MODEL)
KEY = "transform_qk must return k as an array of dtype float64 and shape (2, 2, 3, 4), got "
RETURNED = [
    (lambda q, k, p: None, "transform_qk must return a pair (q, k), got NoneType"),
    (lambda q, k, p: q, "transform_qk must return a pair (q, k), got ndarray"),
    (lambda q, k, p: (q, k, p), "transform_qk must return a pair (q, k), got tuple"),
    (lambda q, k, p: (q, None), KEY + "NoneType"),
    (lambda q, k, p: (q, k[:, :1]), KEY + "dtype float64 and shape (2, 1, 3, 4)"),
    (lambda q, k, p: (q, k.astype(np.float32)), KEY + "dtype float32 and shape (2, 2, 3, 4)"),
    (lambda q, k, p: (k, q), "transform_qk must return q as an array of dtype float64 and shape (2, 4, 3, 4), got dtype float64 "
     "and shape (2, 2, 3, 4)"),
]  # fmt: skip


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("transform", "message"), RETURNED, ids=[c[1] for c in RETURNED])
def test_what_it_returns_is_checked_before_anything_changes(transform, message, cached):
    m, cache = module(), KVCache(B, 2, 4, dtype=np.float64)
    m.forward(X)
    kept = dict(m.__dict__)
    with raises(TypeError, message):
        m.forward(X, transform_qk=transform, cache=cache if cached else None)
    assert m.__dict__ == kept
    assert cache.length == cache.capacity == 0


def test_it_must_be_callable_and_goes_without_a_context():
    m = module()
    with raises(TypeError, "transform_qk must be callable or None, got 3"):
        m.forward(X, transform_qk=3)
    for context in (X, m.project_context(X)):
        with raises(ValueError, "context and transform_qk cannot be given together"):
            m.forward(X, context=context, transform_qk=Rotary())


def test_backward_without_its_backward_says_so_and_changes_nothing():
    m = module()
    m.forward(X, transform_qk=Rotary())
    m.backward(X)
    before = {name: g.copy() for name, g in m.gradients().items()}
    m.forward(X, transform_qk=lambda q, k, positions: (q, k))
    with raises(ValueError, "backward needs transform_qk of the forward before it to have an attribute "
                            "backward(grad_q, grad_k, positions) -> (grad_q, grad_k), got one without"):  # fmt: skip
        m.backward(X)
    for name, g in m.gradients().items():
        assert same_bits(g, before[name])


def test_what_its_backward_returns_is_checked_before_gradients_change():
    class Wrong(Rotary):
        def backward(self, grad_q, grad_k, positions):
            return grad_q, grad_k[:1]

    m = module()
    m.forward(X)
    m.backward(X)
    before = {name: g.copy() for name, g in m.gradients().items()}
    m.forward(2 * X, transform_qk=Wrong())
    with raises(TypeError, "transform_qk.backward must return grad_k as an array of dtype float64 and shape (2, 2, 3, 4), got "
                           "dtype float64 and shape (1, 2, 3, 4)"):  # fmt: skip
        m.backward(X)
    for name, g in m.gradients().items():
        assert same_bits(g, before[name])
