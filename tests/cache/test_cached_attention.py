"""KVCache.attend: over a linear cache, over a ring that wraps, over half precision, against the float64 reference.

The reference sees the whole history of one row at a time; memory that was never written is NaN.
"""


import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, HALVES, all_dtypes, all_isas, computed, dtypes, eps, halves, padded, raises, rows_alike, same_bits

import fastmha
from fastmha import KVCache, _core, reference

pytestmark = pytest.mark.usefixtures("poison")
B, HKV, D, DV = 2, 2, 4, 3
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}


def draw(rng, n, H=2, dtype=np.float64, batch=B):
    """q, k, v of n tokens."""
    return [rng.standard_normal((batch, heads, n, width)).astype(dtype) for heads, width in ((H, D), (HKV, D), (HKV, DV))]


def new(dtype=np.float64, **keywords):
    return KVCache(B, HKV, D, v_head_dim=DV, dtype=dtype, **keywords)


class History:
    """What each row has been given, and the reference's answer for its newest queries."""

    def __init__(self, storage=np.float64):
        self.rows, self.storage = [[np.zeros((1, HKV, 0, D)), np.zeros((1, HKV, 0, DV))] for _ in range(B)], storage

    def append(self, k, v, lengths):
        for b, row in enumerate(self.rows):
            for i, x in enumerate((k, v)):
                new = x[b : b + 1, :, : lengths[b]].astype(self.storage).astype(np.float64)
                row[i] = np.concatenate([row[i], new], axis=2)

    def answer(self, q, b, count, mask=None, **keywords):
        """(out, lse, weights) of the first `count` queries of row b."""
        k, v = self.rows[b]
        q = q[b : b + 1, :, :count].astype(np.float64)
        if keywords.get("is_causal") or keywords.get("window"):
            keywords["offset"] = k.shape[2] - count
        weights = reference.attention_weights(q, k, mask=mask, **keywords)
        return *reference.attention(q, k, v, mask=mask, return_lse=True, **keywords), weights


def assert_right(history, q, lengths, results, dtype, **keywords):
    """Rows that are valid against the reference, the others zero. Columns of weights end with the newest key. Of half precision,
    out is rounded once more."""
    out, lse, *weights = results
    for b, count in enumerate(lengths):
        wanted, wanted_lse, wanted_weights = history.answer(q, b, count, **keywords)
        tolerance = TOLERANCE[computed(dtype).type]
        close = {"rtol": tolerance, "atol": tolerance}
        found = out[b : b + 1, :, :count].astype(np.float64)
        np.testing.assert_allclose(found, wanted, tolerance + (eps(dtype) / 2 if dtype in HALVES else 0), tolerance)
        np.testing.assert_allclose(lse[b : b + 1, :, :count], wanted_lse, **close)
        assert (out[b, :, count:] == 0).all()
        assert np.isneginf(lse[b, :, count:]).all()
        for w in weights:
            total = wanted_weights.shape[-1]
            held = min(total, w.shape[-1])
            np.testing.assert_allclose(w[b : b + 1, :, :count, :held], wanted_weights[..., total - held :], **close)
            assert (w[b, :, :, held:] == 0).all()
            assert (w[b, :, count:] == 0).all()


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from([*DTYPES, *HALVES]), st.sampled_from([2, 6]),
    st.sampled_from([None, (0, 1), (1, 3), (3, 1), (5, 4), (2, 6)]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=9), st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_step_equals_the_reference_over_the_history(seed, dtype, H, ring, steps, ragged, causal):
    """Linear caches and rings, rows of one length and of several, any window within the ring's."""
    rng = np.random.default_rng(seed)
    cache, history = new(dtype, **(dict(zip(("window", "max_chunk"), ring, strict=True)) if ring else {})), History()
    for counts in steps:
        lengths = np.array(counts) if ragged else np.full(B, counts[0])
        if ring:
            lengths = np.minimum(lengths, ring[1])
        n = int(lengths.max())
        q, k, v = draw(rng, n, H, dtype)
        cache.append(k, v, lengths)
        history.append(k, v, lengths)
        keywords = {"is_causal": causal, "softcap": [None, 1.5][rng.integers(2)], "scale": [None, -0.3][rng.integers(2)]}
        if ring or rng.random() < 0.3:
            keywords["window"] = (int(rng.integers(0, ring[0] + 1 if ring else 4)), [None, 0, 2][rng.integers(3)])
        results = cache.attend(q, lengths_new=lengths if ragged else None, return_lse=True, **keywords)
        assert results[0].dtype == dtype
        assert_right(history, q, lengths, results, dtype, **keywords)


@all_dtypes
@pytest.mark.parametrize("algorithm", ["blas", "tiled", "decode"])
@pytest.mark.parametrize("ring", [False, True])
def test_every_algorithm(algorithm, ring, dtype, rng):
    cache, history = new(dtype, **({"window": 6, "max_chunk": 3} if ring else {})), History()
    for lengths in ([3, 3], [3, 1], [2, 3], [3, 0], [3, 3]):
        q, k, v = draw(rng, 3, 4, dtype)
        cache.append(k, v, lengths)
        history.append(k, v, lengths)
        keywords = {"window": (6, None), "is_causal": True}
        results = cache.attend(q, lengths_new=lengths, return_lse=True, algorithm=algorithm, **keywords)
        assert_right(history, q, lengths, results, dtype, **keywords)


@pytest.mark.parametrize("steps", [2, 3, 7])
@pytest.mark.parametrize("kind", ["bool", "additive", None])
@pytest.mark.parametrize("ring", [False, True])
def test_masks_and_weights_span_what_is_held_oldest_first(ring, kind, steps, rng):
    cache, history = new(**({"window": 4, "max_chunk": 2} if ring else {})), History()
    lengths = [2, 2]
    for _ in range(steps):
        q, k, v = draw(rng, 2)
        cache.append(k, v)
        history.append(k, v, lengths)
    total, held = cache.length, int(cache.held[0])
    mask = rng.random((2, total)) < 0.4
    if kind == "additive":
        mask = np.where(mask, -np.inf, rng.standard_normal((2, total)))
    keywords = {"window": (4, None), "is_causal": True}
    given = {} if kind is None else {"mask": mask[:, total - held :]}
    results = cache.attend(q, return_lse=True, need_weights=True, **keywords, **given)
    assert results[2].shape == (B, 2, 2, held)
    assert_right(history, q, lengths, results, np.float64, mask=mask if given else None, **keywords)
    out = cache.attend(q, **keywords, **given)
    np.testing.assert_allclose(out, results[0], rtol=1e-12, atol=1e-12)
    out, weights = cache.attend(q, need_weights=True, **keywords, **given)
    assert same_bits(out, results[0])
    assert same_bits(weights, results[2])


def test_weights_over_a_ring_whose_rows_hold_different_numbers_of_keys(rng):
    cache, history = new(window=4, max_chunk=2), History()
    for lengths in ([2, 1], [2, 0], [2, 1], [2, 1]):
        q, k, v = draw(rng, 2)
        cache.append(k, v, lengths)
        history.append(k, v, lengths)
    assert cache.held.tolist() == [6, 3]
    keywords = {"window": (3, 0)}
    results = cache.attend(q, lengths_new=lengths, return_lse=True, need_weights=True, **keywords)
    assert_right(history, q, lengths, results, np.float64, **keywords)


def test_after_truncating_a_ring_what_was_overwritten_is_not_seen(rng):
    cache, history = new(window=2, max_chunk=3), History()
    for start, counts in ((0, [3, 3]), (0, [3, 3]), (0, [1, 3]), (2, [2, 1]), (0, [3, 3]), (1, [1, 2]), (0, [3, 1])):
        if start:
            cache.truncate(cache.lengths - start)
            for row in history.rows:
                row[:] = [x[:, :, : x.shape[2] - start] for x in row]
        q, k, v = draw(rng, 3)
        cache.append(k, v, counts)
        history.append(k, v, counts)
        keywords = {"is_causal": True, "window": (2, None)}
        assert_right(history, q, counts, cache.attend(q, lengths_new=counts, return_lse=True, **keywords), np.float64, **keywords)
        weights = cache.attend(q, lengths_new=counts, need_weights=True, **keywords)[1]
        np.testing.assert_allclose(weights[0, :, : counts[0]].sum(-1), 1)


def half_dtypes():
    try:
        import ml_dtypes
    except ImportError:
        return [np.float16, pytest.param(None, id="bfloat16", marks=pytest.mark.skip(reason="needs ml_dtypes"))]
    return [np.float16, pytest.param(ml_dtypes.bfloat16, id="bfloat16")]


@all_dtypes
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("storage", half_dtypes())
def test_a_half_precision_cache_is_attention_over_the_rounded_keys_and_values(storage, ring, dtype, rng):
    cache, history = new(storage, **({"window": 4, "max_chunk": 2} if ring else {})), History(storage)
    for lengths in ([2, 2], [2, 1], [1, 2], [2, 2], [2, 2]):
        q, k, v = draw(rng, 2, 4, dtype)
        cache.append(k, v, lengths)
        history.append(k, v, lengths)
        keywords = {"is_causal": True, "window": (4, None)}
        results = cache.attend(q, lengths_new=lengths, return_lse=True, **keywords)
        assert results[0].dtype == dtype
        assert_right(history, q, lengths, results, dtype, **keywords)
    assert dtype in HALVES or not np.array_equal(cache.k[:, :, -1].astype(dtype), k[:, :, 1])


@all_dtypes
def test_the_bits_are_those_of_attention_over_the_views(dtype, rng):
    cache = new(dtype)
    q, k, v = draw(rng, 7, 4, dtype)
    cache.append(k, v, [7, 5])
    for keywords in ({}, {"is_causal": True}, {"window": (3, 1)}):
        offset = {"offset": cache.lengths - np.array([7, 5])} if keywords else {}
        expected = fastmha.attention(q, cache.k, cache.v, key_padding_lengths=cache.lengths, **keywords, **offset)
        expected[1, :, 5:] = 0
        assert same_bits(cache.attend(q, lengths_new=[7, 5], **keywords), expected)


@dtypes
def test_with_tiled_a_step_has_the_bits_of_its_rows_in_one_causal_call(dtype, rng):
    q, k, v = draw(rng, 200, 4, dtype)
    least = rows_alike(_core.selected_isa()[0], dtype, q.shape[1] // k.shape[1], 200)
    cache, start = new(dtype), 0
    whole = None
    outs = []
    for n in (60, 1, 1, 100, 3, 1, 34) if least == 1 else (60, least, 82 - least, least, 58 - least):
        cache.append(k[:, :, start : start + n], v[:, :, start : start + n])
        outs.append(cache.attend(q[:, :, start : start + n], is_causal=True, algorithm="tiled", return_lse=True))
        start += n
    whole = fastmha.attention(q, cache.k, cache.v, is_causal=True, algorithm="tiled", return_lse=True)
    for i in range(2):
        assert same_bits(np.concatenate([x[i] for x in outs], axis=2), whole[i])


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_of_a_ring_depend_neither_on_threads_nor_on_the_run(threads, rng):
    cache = new(np.float32, window=300, max_chunk=40)
    for _ in range(11):
        q, k, v = draw(rng, 40, 4, np.float32)
        cache.append(k, v)
    first = cache.attend(q, is_causal=True, window=(300, None), num_threads=1)
    assert same_bits(cache.attend(q, is_causal=True, window=(300, None), num_threads=threads), first)


@all_dtypes
@pytest.mark.parametrize("algorithm", ["blas", "tiled", "decode"])
@pytest.mark.parametrize("ring", [None, (300, 8), (700, 2)])
def test_the_bits_of_a_row_do_not_depend_on_its_company(ring, algorithm, dtype, rng):
    """Whether that is as long, shorter, longer, has wrapped or has not."""
    size = dict(zip(("window", "max_chunk"), ring, strict=True)) if ring else {}
    keywords = {"is_causal": True, "window": (ring[0], None) if ring else None, "algorithm": algorithm, "return_lse": True}
    both, n = new(dtype, **size), size.get("max_chunk", 8)
    alone = [KVCache(1, HKV, D, v_head_dim=DV, dtype=dtype, **size) for _ in range(B)]
    for i in range(160 if n == 8 else 500):
        q, k, v = draw(rng, n, 4, dtype)
        counts = [n, 0 if i % 3 == 1 or i == 110 else n]
        both.append(k, v, counts)
        for b, cache in enumerate(alone):
            cache.append(k[b : b + 1], v[b : b + 1], counts[b : b + 1])
        if i % 10 == 0 or 105 < i < 115:
            together = both.attend(q, lengths_new=counts, **keywords)
            for b, cache in enumerate(alone):
                own = cache.attend(q[b : b + 1], lengths_new=counts[b : b + 1], **keywords)
                assert same_bits(together[0][b], own[0][0])
                assert same_bits(together[1][b], own[1][0])


def test_merging_survives_large_differences_and_attended_infinities(rng):
    """A part whose weights vanish changes nothing; a NaN that may be attended reaches its row alone."""
    cache = new(window=3, max_chunk=1)
    for i in range(6):
        q, k, v = draw(rng, 1)
        k[...] = 300.0 * (i % 2)
        if i == 4:
            v[0, 0, 0, 1] = np.nan
        cache.append(k, v)
    q[...] = 100
    out = cache.attend(q, is_causal=True, window=(3, None))
    held_k, held_v = cache.k[:, :, -4:], cache.v[:, :, -4:]
    with np.errstate(invalid="ignore"):
        expected = reference.attention(q, held_k, held_v)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    assert np.isnan(out).sum() == 1


def test_scores_that_overflow_to_minus_infinity_leave_a_row_empty_in_both_parts(rng):
    cache = KVCache(1, 1, D, window=3)
    k, v = np.full((1, 1, 1, D), -1e30, np.float32), np.ones((1, 1, 1, D), np.float32)
    for _ in range(6):
        cache.append(k, v)
    out, lse = cache.attend(-k, window=(3, 0), return_lse=True)
    plain = fastmha.attention(-k, cache.k, cache.v, return_lse=True)
    assert np.array_equal(out, plain[0])
    assert np.array_equal(lse, plain[1])
    assert (out == 0).all()


def test_unaligned_and_strided_queries_of_no_batch_or_no_length(rng):
    cache = new()
    q, k, v = draw(rng, 3)
    cache.append(k, v)
    expected = cache.attend(q, is_causal=True)
    assert same_bits(cache.attend(padded(q), is_causal=True), expected)
    assert cache.attend(q[:, :, :0], is_causal=True).shape == (B, 2, 0, DV)
    empty = KVCache(0, HKV, D)
    assert empty.attend(np.zeros((0, 4, 2, D), np.float32)).shape == (0, 4, 2, D)
    assert (new().attend(q) == 0).all()  # nothing cached: empty rows


# ------------------------------------------------------------------------------------------------------------------ errors

Q = np.zeros((B, 2, 3, D))
ERRORS = [
    ({"q": Q[0]}, ValueError, 'q must have 4 axes (B, H, L, D) for layout "BHLD", got shape (2, 3, 4)'),
    ({"q": Q.astype(int)}, TypeError, "q must be float32, float64, float16 or bfloat16 (native byte order), got int64: ..."),
    ({"q": Q[:1]}, ValueError, "q has batch size 1 on axis 0 but the cache has 2"),
    ({"q": Q[:, :1]}, ValueError, 'k has 2 heads on axis 1 of layout "BHLD" but q has 1: ...'),
    ({"q": Q[..., :3]}, ValueError, "k has width 4 on axis 3 but q has 3"),
    ({"lengths_new": [3]}, ValueError, "lengths_new must have shape (B,) = (2,), got (1,)"),
    ({"lengths_new": [3, 4]}, ValueError, "lengths_new must lie in [0, Lq] = [0, 3], got 4 at index 1"),
    ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
    ({"is_causal": True, "q": np.zeros((B, 2, 7, D))}, ValueError, "q has 7 new queries in row 1 but the cache holds only 4 "
     "tokens there: their keys must have been appended"),
    ({"mask": np.zeros((3, 5), bool)}, ValueError, "mask of shape (3, 5) does not broadcast to (Lq, Lk) = (3, 6)"),
    ({"key_ranges": ([1, 2, 3], None)}, ValueError, "key_ranges[0] (starts) must have shape (B,) = (2,), got (3,)"),
    ({"window": 3}, TypeError, "window must be None or a pair (left, right) of ints >= 0 or None, got 3"),
    ({"scale": "1"}, TypeError, "scale must be a finite number or None, got '1'"),
    ({"softcap": 0}, ValueError, "softcap must be a finite number > 0 or None, got 0"),
    ({"algorithm": "fast"}, ValueError, "algorithm must be ... got 'fast'"),
    ({"algorithm": "decode", "need_weights": True}, ValueError,
     'algorithm "decode" cannot serve this call: it cannot return the weights'),
    ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
    ({"need_weights": None}, TypeError, "need_weights must be True or False, got None"),
    ({"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), ERRORS, ids=[c[2] for c in ERRORS])
def test_attend_refuses(arguments, error, message, rng):
    cache = new()
    cache.append(*draw(rng, 6)[1:], [6, 4])
    with raises(error, message):
        cache.attend(**{"q": Q, **arguments})


RING_ERRORS = [
    ({}, "window must have a left side of at most 2, the window of the cache, got None"),
    ({"window": (None, 0)}, "window must have a left side of at most 2, the window of the cache, got (None, 0)"),
    ({"window": (3, None)}, "window must have a left side of at most 2, the window of the cache, got (3, None)"),
    ({"window": (2, None), "key_ranges": (0, None)},
     "key_ranges cannot be given with a cache that is a ring, in which keys do not keep their places, got (0, None)"),
    ({"window": (2, None), "mask": np.zeros((2, 4), bool)},
     "mask cannot be laid over a ring whose rows hold different numbers of keys, here [4, 3]"),
    ({"window": (2, None), "q": np.zeros((B, 2, 3, D)), "lengths_new": [3, 1]},
     "q begins at position 3 of row 0 and may attend keys from position 1 on (window 2), but the ring holds them only from "
     "position 2 on"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), RING_ERRORS, ids=[c[1] for c in RING_ERRORS])
def test_attend_over_a_ring_refuses(arguments, message, rng):
    cache = new(window=2, max_chunk=2)
    for lengths in ([2, 2], [2, 0], [2, 1]):
        cache.append(*draw(rng, 2)[1:], lengths)
    with raises(ValueError, message):
        cache.attend(**{"q": Q[:, :, :2], **arguments})
    assert cache.attend(Q, window=(1, None)).shape == (B, 2, 3, DV)  # a narrower window may go further back


# ---------------------------------------------------------------------------------------- queries of half precision


@all_isas
@halves
@pytest.mark.parametrize("storage", ["float64", "float32", *HALVES], ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("window", [None, 64])
def test_chunks_of_half_precision_are_right_to_rounding_over_caches_of_every_type(isa, window, storage, dtype, rng):
    """Long enough for matrix tiles, which round probabilities of bfloat16 too; a share of the largest result."""
    share = 2e-2 if dtype is not np.float16 else 2e-3
    cache = KVCache(2, 2, 16, dtype=storage, **({"window": window, "max_chunk": 40} if window else {}))
    keys, values = np.zeros((2, 2, 2, 0, 16))
    keywords = {"is_causal": True, "window": (window, 0)} if window else {"is_causal": True}
    for n in (40, 1, 33, 40, 40):
        q, k, v = (rng.standard_normal((2, H, n, 16)).astype(dtype) for H in (4, 2, 2))
        cache.append(k, v)
        keys, values = (np.concatenate([x, y.astype(storage).astype(np.float64)], axis=2) for x, y in ((keys, k), (values, v)))
        offset = cache.length - n
        out, lse = cache.attend(q, return_lse=True, **keywords)
        wanted, wanted_lse = reference.attention(q.astype(np.float64), keys, values, offset=offset, return_lse=True, **keywords)
        assert np.abs(out.astype(np.float64) - wanted).max() <= share * np.abs(wanted).max()
        np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=1e-4)
        if not window and storage is dtype:
            assert same_bits(out, fastmha.attention(q, cache.k, cache.v, offset=offset, **keywords))
    assert window is None or cache.length > window + 40


@halves
@pytest.mark.parametrize("storage", ["float32", "float16", "float64", None])
def test_queries_of_half_precision_give_the_results_of_float32_rounded_once(isa, dtype, storage, rng):
    storage = dtype if storage is None else storage
    slopes = np.linspace(0.1, 0.3, 4).astype(np.float32)
    for window, room in ((None, {}), (6, {"window": 6, "max_chunk": 4})):
        cache = KVCache(2, 2, 8, v_head_dim=5, dtype=storage, **room)
        wraps = False
        for n, lengths in ((4, None), (4, [4, 2]), (1, None), (3, [0, 3]), (4, None)):
            q, k, v = (rng.standard_normal((2, H, n, width)).astype(dtype) for H, width in ((4, 8), (2, 8), (2, 5)))
            cache.append(k, v, lengths=lengths)
            wraps |= window is not None and cache.length > 6
            for rules in ({}, {"softcap": 2.0}, {"alibi": slopes}, {"sinks": slopes}, {"need_weights": True}):
                rules = {"is_causal": True, "return_lse": True, "lengths_new": lengths, **rules}
                rules |= {"window": (window, 0)} if window else {}
                found, wanted = cache.attend(q, **rules), cache.attend(q.astype(np.float32), **rules)
                assert found[0].dtype == dtype
                assert same_bits(found[0], wanted[0].astype(dtype))
                for x, y in zip(found[1:], wanted[1:], strict=True):
                    assert x.dtype == np.float32
                    assert same_bits(x, y)
        assert wraps == (window is not None)
