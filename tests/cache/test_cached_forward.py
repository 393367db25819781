"""MultiHeadAttention with a cache, with a projected context, and with pooled key/value heads.

A sequence taken in chunks through a cache equals the same sequence at once; memory that was never written is NaN.
"""

import copy
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import HALVES, dtypes, halves, normal, raises, same_bits

import fastmha
from fastmha import KVCache, MultiHeadAttention, algorithms, reference

pytestmark = pytest.mark.usefixtures("poison")
D_MODEL, HEADS, GROUPS, B, L = 24, 4, 2, 3, 12
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5}


def module(dtype=np.float64, num_kv_heads=GROUPS, **keywords):
    m = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=num_kv_heads, use_bias=True, dtype=dtype, rng=0, **keywords)
    for i, name in enumerate(("b_Q", "b_K", "b_V", "b_O")):
        setattr(m, name, normal(*getattr(m, name).shape, seed=10 + i))
    return m


def cache_of(m, batch=B, **keywords):
    return KVCache(batch, m.num_kv_heads, m.head_dim, **{"dtype": m.dtype, **keywords})


def expected(m, X, **keywords):
    """Output and weights of the whole sequence by the specification, in float64."""
    weights = {name: w.astype(np.float64) for name, w in m.parameters().items()}
    found = reference.mha_forward_backward(X.astype(np.float64), weights, m.num_heads, m.num_kv_heads, **keywords)
    return found["output"], found["weights"]


def assert_close(actual, wanted, dtype=np.float64):
    np.testing.assert_allclose(actual, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def state_of(cache):
    return cache.lengths, cache.held, cache.capacity, cache.k.copy(), cache.v.copy()


def assert_same_state(state, cache):
    """NaN stands where a row has nothing."""
    for a, b in zip(state, state_of(cache), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("is_causal", [False, True])
def test_numpys_booleans_are_booleans(is_causal):
    m, X = module(), normal(B, 5, D_MODEL)
    out, wanted = (m.forward(X, cache=cache_of(m), is_causal=x, training=False) for x in (np.bool_(is_causal), is_causal))
    assert np.array_equal(out, wanted)


# ------------------------------------------------------------------------------------------------- half precision

@halves
@pytest.mark.parametrize("storage", ["float64", "float32", *HALVES], ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("ring", [None, 6])
@pytest.mark.parametrize("algorithm", ["auto", "blas", "tiled", "decode"])
def test_a_module_of_half_precision_steps_over_caches_of_every_type(algorithm, ring, storage, dtype):
    """Against the same parameters in float64: what is projected, stored and returned is rounded; a share of the largest."""
    share = 2e-2 if "bfloat16" in (np.dtype(dtype).name, np.dtype(storage).name) else 2e-3
    m, exact = module(dtype, algorithm=algorithm), module()
    exact.load_state_dict({name: w.astype(np.float64) for name, w in m.state_dict().items()})
    room, rules = ({"window": ring, "max_chunk": 3}, {"window": (ring, 0)}) if ring else ({}, {})
    cache, exact_cache = cache_of(m, dtype=storage, **room), cache_of(exact, **room)
    X = normal(B, 20, D_MODEL, dtype=dtype)
    for start, stop, lengths in ((0, 5, None), (5, 6, None), (6, 9, [3, 0, 2]), (9, 12, None), (12, 16, [1, 4, 4])):
        keywords = {"is_causal": True, "training": False, "key_padding_lengths": lengths, **rules}
        keywords["need_weights"] = algorithm != "decode" and start % 2 == 0
        out = m.forward(X[:, start:stop], cache=cache, **keywords)
        wanted = exact.forward(X[:, start:stop].astype(np.float64), cache=exact_cache, **keywords)
        if keywords["need_weights"]:
            (out, weights), (wanted, wanted_weights) = out, wanted
            assert weights.dtype == np.float32
            np.testing.assert_allclose(weights, wanted_weights, rtol=0, atol=share)
        assert out.dtype == dtype
        assert np.abs(out.astype(np.float64) - wanted).max() <= share * np.abs(wanted).max()
        assert cache.lengths.tolist() == exact_cache.lengths.tolist()


# ---------------------------------------------------------------------------------------------- cached equals uncached

chunks = st.lists(st.tuples(*[st.integers(0, 7)] * B), min_size=1, max_size=8)


@settings(max_examples=120, deadline=None)
@given(
    chunks, st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from([np.float32, np.float64]),
    st.sampled_from([None, (3, None), (2, 1), (None, 0)]), st.sampled_from([None, (3, 1), (3, 4), (5, 2), (9, 9)]),
    st.booleans(), st.sampled_from(["strided", "contiguous"]),
)  # fmt: skip
def test_chunks_through_a_cache_equal_the_whole_sequence(steps, ragged, groups, dtype, window, ring, need_weights, layout):
    """Rows of one length and of several, grouped heads, windows, rings shorter and longer than the chunks."""
    m = module(dtype, groups, layout=layout)
    if ring and (window is None or window[0] is None):
        window = (ring[0], None)
    lengths = np.sum(steps, axis=0) if ragged else np.full(B, sum(step[0] for step in steps))
    X = normal(B, int(lengths.max(initial=0)), D_MODEL, dtype=dtype)
    keywords = {"is_causal": True, "window": window, "softcap": 2.0}
    whole, _ = expected(m, X, key_padding_lengths=lengths, **keywords)
    cache = cache_of(m, **(dict(zip(("window", "max_chunk"), ring, strict=True)) if ring else {}))
    done = np.zeros(B, int)
    for step in steps:
        counts = np.array(step) if ragged else np.full(B, step[0])
        n = int(counts.max())
        x = np.full((B, n, D_MODEL), np.nan, dtype)
        for b in range(B):
            x[b, : counts[b]] = X[b, done[b] : done[b] + counts[b]]
        padding = {"key_padding_lengths": counts} if ragged else {}
        out = m.forward(x, cache=cache, training=False, need_weights=need_weights, **padding, **keywords)
        if need_weights:
            out, weights = out
            assert weights.shape[:3] == (B, HEADS, n)
        for b in range(B):
            assert_close(out[b, : counts[b]], whole[b, done[b] : done[b] + counts[b]], dtype)
            assert_close(out[b, counts[b] :], np.broadcast_to(m.b_O, (n - counts[b], D_MODEL)), dtype)
            if need_weights:
                assert_close(weights[b, :, : counts[b]].sum(-1), np.ones((HEADS, counts[b])), dtype)
                assert (weights[b, :, counts[b] :] == 0).all()
        done += counts
        assert cache.lengths.tolist() == done.tolist()


@dtypes
@pytest.mark.parametrize("chunk", [9, 4])
@pytest.mark.parametrize("storage", [None, np.float16])
@pytest.mark.parametrize("rules", [{}, {"window": (4, None), "softcap": 2.0}])
def test_generation_from_prompts_padded_on_the_left_equals_that_of_each_row_alone(dtype, chunk, storage, rules):
    """The prompt at once and in chunks, of which the first may hold nothing but padding; then tokens, some rows at rest."""
    m, prompt = module(dtype), 9
    starts = np.array([0, 6, 8])
    X = normal(B, prompt + 4, D_MODEL, dtype=dtype)
    for b, start in enumerate(starts):
        X[b, :start] = np.nan
    keywords, padding = {"is_causal": True, "training": False, **rules}, {"key_ranges": (starts, None)}
    tolerance = np.float32 if storage else dtype
    left, own = cache_of(m, dtype=storage or dtype), [cache_of(m, 1, dtype=storage or dtype) for _ in range(B)]
    found = [m.forward(X[:, i : i + chunk][:, : prompt - i], cache=left, **padding, **keywords)
             for i in range(0, prompt, chunk)]  # fmt: skip
    whole = np.concatenate(found, axis=1)
    for b, start in enumerate(starts):
        alone = m.forward(X[b : b + 1, start:prompt], cache=own[b], **keywords)
        assert_close(whole[b : b + 1, start:], alone, tolerance)
        assert_close(whole[b, :start], np.broadcast_to(m.b_O, (start, D_MODEL)), dtype)
    for i in range(4):
        counts = np.array([1, 1, 1]) if i != 2 else np.array([1, 0, 1])
        new = X[:, prompt + i : prompt + i + 1]
        y, weights = m.forward(new, cache=left, key_padding_lengths=counts, need_weights=True, **padding, **keywords)
        for b, start in enumerate(starts):
            assert not weights[b, :, :, :start].any()
            if counts[b]:
                assert_close(y[b : b + 1], m.forward(new[b : b + 1], cache=own[b], **keywords), tolerance)


@dtypes
def test_ranges_over_a_cache_are_those_of_attention_over_its_views(dtype, rng):
    m = module(dtype)
    cache, X = cache_of(m), normal(B, 7, D_MODEL, dtype=dtype)
    m.forward(X, cache=cache, training=False, key_padding_lengths=[7, 5, 2])
    q = rng.standard_normal((B, HEADS, 1, 6)).astype(dtype)
    for ranges in (([0, 3, 7], None), (1, [7, 6, 4]), (None, 20), ([2, 9, 0], [6, 10, 0])):
        cut = tuple(side if side is None else np.minimum(side, 7) for side in ranges)
        wanted = fastmha.attention(q, cache.k, cache.v, key_padding_lengths=cache.lengths, key_ranges=cut)
        assert same_bits(cache.attend(q, key_ranges=ranges), wanted)


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_the_mask_and_the_weights_span_all_keys(step, kind):
    m, X = module(), normal(B, L, D_MODEL)
    mask = np.random.default_rng(2).random((B, HEADS, L, L)) < 0.3
    if kind == "additive":
        mask = np.where(mask, -np.inf, normal(B, HEADS, L, L, seed=3))
    whole, whole_weights = expected(m, X, mask=mask, is_causal=True)
    cache = cache_of(m)
    for i in range(0, L, step):
        j = min(i + step, L)
        out, weights = m.forward(X[:, i:j], mask[:, :, i:j, :j], cache=cache, is_causal=True, need_weights=True)
        assert_close(out, whole[:, i:j])
        assert_close(weights, whole_weights[:, :, i:j, :j])


@pytest.mark.filterwarnings("ignore::fastmha.ConventionWarning")  # a step attends nothing
@pytest.mark.parametrize("step", [1, 2, 5])
def test_over_a_ring_they_span_what_it_holds_and_of_a_longer_chunk_the_window_before_it(step):
    m, X, window, max_chunk = module(), normal(B, L, D_MODEL), 3, 2
    mask = np.random.default_rng(2).random((L, L)) < 0.3
    whole, whole_weights = expected(m, X, mask=mask, is_causal=True, window=(3, None))
    cache = cache_of(m, window=window, max_chunk=max_chunk)
    for i in range(0, L, step):
        j = min(i + step, L)
        n = j - i
        first = i - min(i, window + max(0, max_chunk - n))
        out, weights = m.forward(X[:, i:j], mask[i:j, first:j], cache=cache, is_causal=True, window=(3, None), need_weights=True)
        assert_close(out, whole[:, i:j])
        assert_close(weights, whole_weights[:, :, i:j, first:j])
        assert n > max_chunk or weights.shape[3] == cache.held[0]


def test_without_causality_new_queries_see_all_keys():
    m, X = module(), normal(B, L, D_MODEL)
    for keywords in ({}, {"window": (4, 1)}):
        whole, _ = expected(m, X, **keywords)
        for ring in ({}, {"window": 4, "max_chunk": 2}) if keywords else ({},):
            cache = cache_of(m, **ring)
            m.forward(X[:, :5], cache=cache, **keywords)
            assert_close(m.forward(X[:, 5:], cache=cache, **keywords), whole[:, 5:])


@dtypes
@pytest.mark.parametrize("algorithm", ["auto", "blas", "tiled"])
def test_every_algorithm(algorithm, dtype):
    m, X = module(dtype, algorithm=algorithm), normal(B, L, D_MODEL, dtype=dtype)
    whole, _ = expected(m, X, is_causal=True)
    cache = cache_of(m)
    parts = [m.forward(x, cache=cache, is_causal=True) for x in np.split(X, [1, 2, 9], axis=1)]
    assert_close(np.concatenate(parts, axis=1), whole, dtype)


@pytest.mark.parametrize(("half", "eps"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_half_precision_caches_are_off_by_their_rounding(half, eps):
    if half == "bfloat16":
        pytest.importorskip("ml_dtypes")
    m, X = module(np.float32), normal(B, L, D_MODEL, dtype=np.float32)
    whole, _ = expected(m, X, is_causal=True)
    cache = cache_of(m, dtype=half)
    out = np.concatenate([m.forward(X[:, i : i + 3], cache=cache, is_causal=True) for i in range(0, L, 3)], axis=1)
    error = np.abs(out - whole).max()
    assert 1e-6 < error < 8 * eps * np.abs(whole).max()


@pytest.mark.parametrize("ring", [{}, {"window": 4, "max_chunk": 2}])
def test_truncated_and_reordered_rows_go_on_as_fresh_ones(ring):
    m, X = module(), normal(B, L, D_MODEL)
    keywords = {"is_causal": True, "window": (4, None), "training": False}
    cache = cache_of(m, **ring)
    for i in range(0, 8, 2):
        m.forward(X[:, i : i + 2], cache=cache, **keywords)
    cache.truncate([7, 6, 7])
    order = [2, 2, 1]
    cache.reorder(order)
    x = normal(B, 2, D_MODEL, seed=5)
    out = m.forward(x, cache=cache, **keywords)
    for b, source in enumerate(order):
        past = X[source : source + 1, : [7, 6, 7][source]]
        whole, _ = expected(m, np.concatenate([past, x[b : b + 1]], axis=1), is_causal=True, window=(4, None))
        assert_close(out[b : b + 1], whole[:, -2:])


def test_weights_over_a_truncated_ring_span_what_it_holds():
    m, X = module(), normal(B, L, D_MODEL)
    keywords = {"is_causal": True, "window": (4, None), "need_weights": True}
    cache = cache_of(m, window=4, max_chunk=2)
    for i in range(0, 7, 1):
        m.forward(X[:, i : i + 1], cache=cache, **keywords)  # 6 slots hold positions 1 to 6
    cache.truncate(5)
    _, weights = m.forward(X[:, 5:6], cache=cache, **keywords)
    assert cache.held.tolist() == [5] * B
    assert_close(weights, expected(m, X, is_causal=True, window=(4, None))[1][:, :, 5:6, 1:6])


# ---------------------------------------------------------------------------------------- failures and what is kept

X3 = normal(B, 3, D_MODEL, dtype=np.float32)
ERRORS = [
    ({"cache": {}}, TypeError, "cache must be a KVCache, got dict"),
    ({"cache": KVCache(2, 2, 6)}, ValueError, "cache has batch size 2 but X has 3 on axis 0"),
    ({"cache": KVCache(3, 4, 6)}, ValueError, "cache has num_kv_heads 4 but the module has 2"),
    ({"cache": KVCache(3, 2, 5)}, ValueError, "cache has head_dim 5 but the module has 6"),
    ({"cache": KVCache(3, 2, 6, v_head_dim=4)}, ValueError, "cache has v_head_dim 4 but the module has 6"),
    ({"cache": KVCache(3, 2, 6, capacity=2)}, ValueError, "capacity is 2 but a length of 3 would be needed for the new tokens"),
    ({"cache": KVCache(3, 2, 6, window=4)}, ValueError,
     "window must have a left side of at most 4, the window of the cache, got None"),
    ({"cache": KVCache(3, 2, 6, window=4), "window": (5, 0)}, ValueError,
     "window must have a left side of at most 4, the window of the cache, got (5, 0)"),
    ({"offset": 0}, ValueError, "offset and cache cannot be given together: it is the cached length of each row, got 0"),
    ({"context": X3}, ValueError, "context and cache cannot be given together"),
    ({"context": KVCache(3, 2, 6)}, ValueError, "context and cache cannot be given together"),
    ({"key_padding_lengths": [1, 2, 4]}, ValueError, "key_padding_lengths must lie in [0, L] = [0, 3], got 4 at index 2"),
    ({"key_padding_lengths": [1, 2]}, ValueError, "key_padding_lengths must have shape (B,) = (3,), got (2,)"),
    ({"key_ranges": ([0, -1, 0], None)}, ValueError,
     "key_ranges[0] (starts) must lie in [0, the longest possible] = [0, 2147483583], got -1 at index 1"),
    ({"key_ranges": (None, 2**31)}, ValueError,
     "key_ranges[1] (ends) must be at most 2147483583 = the longest possible, got 2147483648"),
    ({"key_ranges": (9, 8)}, ValueError, "key_ranges must have no start beyond its end, got 9 and 8 at index 0"),
    ({"key_ranges": 3}, TypeError, "key_ranges must be None or a pair (starts, ends), each ... got 3"),
    ({"cache": KVCache(3, 2, 6, window=4), "window": (4, 0), "key_ranges": (1, None)}, ValueError,
     "key_ranges cannot be given with a cache that is a ring, in which keys do not keep their places, got (1, None)"),
    ({"mask": np.zeros((3, 3), bool)}, ValueError, "mask of shape (3, 3) does not broadcast to (Lq, Lk) = (3, 7)"),
    ({"mask": np.zeros((3, 7))}, TypeError, "mask must be bool ... got float64"),
    ({"X": X3[:, :, :5]}, ValueError, "X has width 5 on axis 2 but the module has d_model 24"),
    ({"is_causal": None}, TypeError, "is_causal must be True or False, got None"),
    ({"window": (1, -1)}, ValueError, "window[1] (right) must be at least 0, got -1: None ..."),
    ({"softcap": -1}, ValueError, "softcap must be a finite number > 0 or None, got -1"),
    ({"need_weights": 1}, TypeError, "need_weights must be True or False, got 1"),
    ({"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), ERRORS, ids=[c[2] for c in ERRORS])
def test_a_refused_call_changes_neither_cache_nor_module(arguments, error, message):
    m = module(np.float32)
    cache = arguments.get("cache", cache_of(m))
    if "cache" not in arguments:
        m.forward(normal(B, 4, D_MODEL), cache=cache, training=False)
    m.forward(X3)
    before, kept = state_of(cache) if isinstance(cache, KVCache) else None, dict(m.__dict__)
    with raises(error, message):
        m.forward(**{"X": X3, "cache": cache, **arguments})
    assert m.__dict__ == kept
    if before:
        assert_same_state(before, cache)


def test_a_ring_with_rows_of_different_lengths_refuses_a_mask():
    m = module(np.float32)
    cache = cache_of(m, window=2, max_chunk=2)
    m.forward(X3[:, :2], cache=cache, window=(2, 0))
    m.forward(X3[:, :2], cache=cache, window=(2, 0), key_padding_lengths=[2, 1, 0])
    before = state_of(cache)
    with raises(ValueError, "mask cannot be laid over a ring whose rows hold different numbers of keys, here [4, 4, 3]"):
        m.forward(X3[:, :1], np.zeros((1, 4), bool), cache=cache, window=(2, 0))
    assert_same_state(before, cache)


@pytest.mark.parametrize("ring", [{}, {"capacity": 20}, {"window": 2, "max_chunk": 2}])
@pytest.mark.parametrize("fails", ["forward", "product", "transform_qk"])
@pytest.mark.parametrize("length", [2, 3])
def test_a_failure_on_the_way_leaves_the_cache_as_it_was(ring, fails, length, monkeypatch):
    m, X = module(), normal(B, 10, D_MODEL)
    keywords = {"is_causal": True, "window": (2, None), "training": False}
    m._one_by_one = True  # test_at_once.py has the failure of a step that is one call of the core
    cache = cache_of(m, **ring)
    for i in range(0, 6, 2):
        m.forward(X[:, i : i + 2], cache=cache, **keywords)
    other = copy.deepcopy(cache)
    calls, real = [], getattr(algorithms, fails, None)

    def fail(*arguments, **more):
        calls.append(1)
        if fails == "product" and len(calls) == 1:
            return real(*arguments, **more)  # the input projection; the output projection comes after the keys are stored
        raise MemoryError

    with monkeypatch.context() as patch:
        if real:
            patch.setattr(algorithms, fails, fail)
        with pytest.raises(MemoryError):
            m.forward(X[:, 6 : 6 + length], cache=cache, **keywords, **({} if real else {"transform_qk": fail}))
    assert calls
    assert cache.lengths.tolist() == [6] * B
    assert cache.held.tolist() == [4 if ring.get("window") else 6] * B
    assert_same_state(state_of(other), cache)
    for i in range(6, 10, 2):
        assert same_bits(m.forward(X[:, i : i + 2], cache=cache, **keywords), m.forward(X[:, i : i + 2], cache=other, **keywords))


def test_a_cached_call_keeps_nothing_and_backward_says_so():
    m, X = module(), normal(B, L, D_MODEL)
    cache = cache_of(m)
    m.forward(X)
    kept = m.intermediates
    m.forward(X, cache=cache, training=False)
    assert m.intermediates.keys() == kept.keys()
    m.forward(X, cache=cache)
    assert m.intermediates == {}
    with raises(ValueError, "backward needs a forward with training=True (and without a cache) before it: the last one had a "
                            "cache"):  # fmt: skip
        m.backward(X)


def test_a_step_allocates_nothing_proportional_to_the_cache():
    m = MultiHeadAttention(64, 4, rng=0)
    x = normal(1, 1, 64, dtype=np.float32)
    for keywords, window in (({"capacity": 20000}, None), ({"window": 20000, "max_chunk": 8}, (20000, 0))):
        cache = cache_of(m, 1, **keywords)
        k = np.ones((1, 4, 8, 16), np.float32)
        for _ in range(2499 if window is None else 2510):  # almost full; wrapped
            cache.append(k, k)
        for _ in range(2):
            tracemalloc.start()
            m.forward(x, cache=cache, is_causal=True, window=window, training=False, num_threads=1)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < cache.nbytes // 64  # the kernels' scratch for one thread, as with a cache of any length


def test_a_cache_and_its_copy_give_the_same_bits():
    m, X = module(), normal(B, L, D_MODEL)
    cache = cache_of(m)
    m.forward(X[:, :7], cache=cache, key_padding_lengths=[7, 3, 0])
    other = copy.deepcopy(cache)
    a, b = (m.forward(X[:, 7:], cache=c, is_causal=True, num_threads=n) for c, n in ((cache, 1), (other, 2)))
    assert same_bits(a, b)


def test_empty_inputs():
    m = module()
    cache = cache_of(m)
    assert m.forward(normal(B, 0, D_MODEL), cache=cache, is_causal=True).shape == (B, 0, D_MODEL)
    m.forward(normal(B, 3, D_MODEL), cache=cache, key_padding_lengths=[0, 0, 0])
    assert cache.length == 0
    for keywords in ({}, {"window": 2, "max_chunk": 1}):
        none = cache_of(m, 0, **keywords)
        window = (2, None) if keywords else None
        assert m.forward(normal(0, 3, D_MODEL), cache=none, window=window, is_causal=True).shape == (0, 3, D_MODEL)


# --------------------------------------------------------------------------------------------------- projected context


@dtypes
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("keywords", [
    {}, {"key_padding_lengths": np.array([7, 0, 3])}, {"is_causal": True, "offset": np.array([1, 0, 2])}, {"softcap": 1.5},
    {"mask": np.random.default_rng(3).random((B, 1, L, 7)) < 0.4}, {"window": (3, 2), "offset": 0, "need_weights": True},
])  # fmt: skip
def test_a_projected_context_equals_the_context(keywords, groups, dtype):
    m, X, C = module(dtype, groups), normal(B, L, D_MODEL, dtype=dtype), normal(B, 7, D_MODEL, seed=2, dtype=dtype)
    plain = m.forward(X, context=C, **keywords)
    cache = m.project_context(C)
    assert (cache.length, cache.capacity, cache.dtype) == (7, 7, dtype)
    for _ in range(2):
        again = m.forward(X, context=cache, **keywords)
        for a, b in zip(again, plain, strict=True) if keywords.get("need_weights") else [(again, plain)]:
            assert a.dtype == dtype
            assert_close(a, b, dtype)
    assert cache.length == 7


def test_a_context_of_rows_of_different_lengths_masks_what_is_behind():
    m, X, C = module(), normal(B, L, D_MODEL), normal(B, 7, D_MODEL, seed=2)
    whole, cache, lengths = m.project_context(C), cache_of(m), [7, 2, 4]
    cache.append(whole.k, whole.v, lengths)
    assert_close(m.forward(X, context=cache), m.forward(X, context=C, key_padding_lengths=lengths))
    given = np.array([3, 3, 3])
    assert_close(m.forward(X, context=cache, key_padding_lengths=given),
                 m.forward(X, context=C, key_padding_lengths=np.minimum(given, lengths)))  # fmt: skip


def test_backward_after_a_projected_context_says_why_not():
    m, X = module(), normal(B, L, D_MODEL)
    m.forward(X)
    m.forward(X, context=m.project_context(X))
    with raises(ValueError, "backward needs a forward whose context is an array: that of the last one was a KVCache, which does "
                            "not know what it was projected from"):  # fmt: skip
        m.backward(X)
    assert m.intermediates == {}


def test_a_projected_context_of_no_length_gives_the_output_bias():
    m = module()
    out = m.forward(normal(B, 2, D_MODEL), context=m.project_context(normal(B, 0, D_MODEL)))
    assert_close(out, np.broadcast_to(m.b_O, out.shape))


CONTEXT_ERRORS = [
    (KVCache(2, 2, 6), ValueError, "context has batch size 2 but X has 3 on axis 0"),
    (KVCache(3, 2, 3), ValueError, "context has head_dim 3 but the module has 6"),
    (KVCache(3, 2, 6, window=3), ValueError, "context must be a cache that holds all its keys, got a ring with window 3"),
]


@pytest.mark.parametrize(("context", "error", "message"), CONTEXT_ERRORS, ids=[c[2] for c in CONTEXT_ERRORS])
def test_a_context_that_does_not_fit_is_refused(context, error, message):
    with raises(error, message):
        module().forward(normal(B, 2, D_MODEL), context=context)


def test_projecting_a_context_checks_it():
    with raises(ValueError, "C has width 5 on axis 2 but the module has d_model 24"):
        module().project_context(normal(B, 7, 5))
    with raises(ValueError, "num_threads must be at least 1, got 0"):
        module().project_context(normal(B, 7, D_MODEL), num_threads=0)


def test_ranges_of_a_context_are_those_of_the_keys_that_it_was_projected_from():
    m, X, C = module(), normal(B, 2, D_MODEL), normal(B, 7, D_MODEL, seed=2)
    for ranges in (([0, 6, 7], None), (2, [7, 2, 5])):
        for lengths in (None, [7, 6, 3]):
            rules = {"key_ranges": ranges, "key_padding_lengths": lengths}
            assert_close(m.forward(X, context=m.project_context(C), **rules), m.forward(X, context=C, **rules))
    with raises(ValueError, "key_ranges[0] (starts) must lie in [0, Lk] = [0, 7], got 8 at index 1"):
        m.forward(X, context=m.project_context(C), key_ranges=([1, 8, 2], None))


def test_padding_lengths_of_a_context_are_checked():
    m = module()
    with raises(ValueError, "key_padding_lengths must lie in [0, Lk] = [0, 7], got 8 at index 1"):
        m.forward(normal(B, 2, D_MODEL), context=m.project_context(normal(B, 7, D_MODEL)), key_padding_lengths=[1, 8, 2])


# ----------------------------------------------------------------------------------------------- pooled key/value heads


@dtypes
@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, 1), (2, 1), (4, 4)])
def test_pooled_heads_are_the_means_of_their_groups(before, after, dtype):
    m = module(dtype, before, algorithm="tiled", layout="contiguous")
    pooled = fastmha.mean_pool_kv_heads(m, after)
    assert repr(pooled) == repr(module(dtype, after, algorithm="tiled", layout="contiguous"))
    ratio, width = before // after, m.head_dim
    for name, w in m.parameters().items():
        own = getattr(pooled, name)
        if name[2] in "QO":
            assert same_bits(own, w)
            continue
        for g in range(after):
            group = [w[..., h * width : (h + 1) * width] for h in range(g * ratio, (g + 1) * ratio)]
            np.testing.assert_allclose(own[..., g * width : (g + 1) * width], np.mean(group, axis=0), rtol=1e-6, atol=1e-7)


def test_pooling_equal_heads_changes_no_output_and_the_module_is_untouched():
    m, X = module(num_kv_heads=4), normal(B, L, D_MODEL)
    for name in ("W_K", "W_V", "b_K", "b_V"):
        w = getattr(m, name)
        w[...] = np.concatenate([w[..., :6], w[..., :6], w[..., 12:18], w[..., 12:18]], axis=-1)
    m.freeze()
    before = m.state_dict()
    pooled = fastmha.mean_pool_kv_heads(m, 2)
    assert_close(pooled.forward(X), m.forward(X))
    for name, w in m.state_dict().items():
        assert same_bits(w, before[name])
    pooled.W_Q = X[0, :1].T * X[0, :1]  # not frozen


@pytest.mark.parametrize(("groups", "error", "message"), [
    (3, ValueError, "num_kv_heads must divide the module's 4, got 3"),
    (8, ValueError, "num_kv_heads must divide the module's 4, got 8"),
    (0, ValueError, "num_kv_heads must be at least 1, got 0"),
    (2.0, TypeError, "num_kv_heads must be an integer, got 2.0"),
])  # fmt: skip
def test_pooling_refuses(groups, error, message):
    with raises(error, message):
        fastmha.mean_pool_kv_heads(module(num_kv_heads=4), groups)


def test_pooling_something_else():
    with raises(TypeError, "module must be a MultiHeadAttention, got SelfAttention"):
        fastmha.mean_pool_kv_heads(fastmha.SelfAttention(8, 2, 2), 1)


# ------------------------------------------------------------------------------------------------ widths of their own

WIDTHS = {
    "head_dim, b_Q b_K b_V": {"head_dim": 9, "use_bias": "qkv"},
    "head_dim, b_O": {"head_dim": 4, "use_bias": "out"},
    "kdim = vdim": {"kdim": 10, "vdim": 10},
    "kdim, vdim": {"head_dim": 5, "kdim": 10, "vdim": 7, "use_bias": "qkv"},
}


def wide(name, dtype=np.float64, **keywords):
    m = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=GROUPS, dtype=dtype, rng=0, **WIDTHS[name], **keywords)
    for i, bias in enumerate(sorted(m.parameters().keys() - {"W_Q", "W_K", "W_V", "W_O"})):
        setattr(m, bias, normal(*getattr(m, bias).shape, seed=10 + i))
    return m


@dtypes
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", ["head_dim, b_Q b_K b_V", "head_dim, b_O"])
def test_chunks_of_heads_of_their_own_width_equal_the_whole_sequence(name, ring, dtype):
    m, X = wide(name, dtype), normal(B, L, D_MODEL, dtype=dtype)
    rules = {"is_causal": True, "window": (4, None) if ring else None}
    wanted, weights_wanted = expected(m, X, **rules)
    cache, at = cache_of(m, **({"window": 4, "max_chunk": 3} if ring else {})), 0
    for n in (3, 1, 2, 1, 1, 3, 1):
        out, weights = m.forward(X[:, at : at + n], cache=cache, need_weights=True, **rules)
        assert_close(out, wanted[:, at : at + n], dtype)
        if not ring:
            assert_close(weights, weights_wanted[:, :, at : at + n, : at + n], dtype)
        at += n


@pytest.mark.parametrize("name", ["kdim = vdim", "kdim, vdim"])
def test_a_module_whose_context_has_its_own_widths_appends_nothing_to_a_cache(name):
    m, lengths = wide(name), [1, 4, 2]
    cache = cache_of(m)
    cache.append(*[normal(B, GROUPS, 4, m.head_dim, seed=i) for i in (1, 2)], lengths)
    state = [x.copy() for x in state_of(cache)[3:]]
    with raises(ValueError, "cache without a context needs a module whose kdim and vdim are its d_model 24, "
                            f"got kdim {m.kdim} and vdim {m.vdim}"):
        m.forward(normal(B, 2, D_MODEL), cache=cache)
    assert list(cache.lengths) == lengths
    for x, y in zip(state, state_of(cache)[3:]):
        np.testing.assert_array_equal(x, y)


@dtypes
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", WIDTHS)
def test_a_projected_pair_equals_the_pair(name, frozen, dtype):
    m, X = wide(name, dtype), normal(B, 5, D_MODEL, dtype=dtype)
    pair = tuple(normal(B, 40, n, seed=n, dtype=dtype) for n in (m.kdim, m.vdim))
    wanted = m.forward(X, context=pair, key_padding_lengths=[40, 3, 17])
    if frozen:
        m.freeze()
    cache = m.project_context(pair)
    assert_close(m.forward(X, context=cache, key_padding_lengths=[40, 3, 17]), wanted, dtype)
    assert cache.length == 40


def test_a_step_with_a_context_that_was_projected_needs_no_kdim():
    """One token after the other over an encoder's keys and values, as a decoder of another width takes them."""
    m, X = wide("kdim, vdim"), normal(B, L, D_MODEL)
    pair = normal(B, 6, 10, seed=2), normal(B, 6, 7, seed=3)
    cache = m.project_context(pair)
    steps = [m.forward(X[:, i : i + 1], context=cache, training=False) for i in range(L)]
    assert_close(np.concatenate(steps, axis=1), m.forward(X, context=pair))


@pytest.mark.parametrize("name", WIDTHS)
def test_pooling_keeps_widths_and_biases(name):
    m = wide(name)
    pooled = fastmha.mean_pool_kv_heads(m, 1)
    assert repr(pooled) == repr(m).replace("num_kv_heads=2", "num_kv_heads=1")
    for letter, source in (("K", m.kdim), ("V", m.vdim)):
        by_head = getattr(m, f"W_{letter}").reshape(source, GROUPS, m.head_dim)
        assert_close(getattr(pooled, f"W_{letter}"), by_head.mean(axis=1))
    for same in ("W_Q", "W_O"):
        np.testing.assert_array_equal(getattr(pooled, same), getattr(m, same))
