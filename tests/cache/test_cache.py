"""KVCache as a store: what it holds after appending, truncating and reordering, and what it refuses.

Memory that the cache allocates is filled with NaN here, so that reading what was never written shows.
"""

import copy
import itertools
import pickle
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import padded, raises, same_bits

import fastmha
import fastmha.cache
import fastmha.slots
from fastmha import KVCache

pytestmark = pytest.mark.usefixtures("poison")
B, HKV, D, DV = 3, 2, 4, 5


def tokens(n, seed=0, batch=B, dtype=np.float32):
    """Keys and values of n new tokens."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((batch, HKV, n, width)).astype(dtype) for width in (D, DV)]


def new(batch=B, dtype=np.float32, **keywords):
    return KVCache(batch, HKV, D, v_head_dim=DV, dtype=dtype, **keywords)


class Model:
    """The same with lists: the (k, v) of every token that each row ever had, of which a ring holds the last."""

    def __init__(self, slots=None):
        self.rows, self.slots, self.tops = [[] for _ in range(B)], slots, [0] * B

    def append(self, k, v, lengths=None):
        for b in range(B):
            n = k.shape[2] if lengths is None else int(lengths[b])
            self.rows[b] += [(k[b, :, i], v[b, :, i]) for i in range(n)]
            self.tops[b] = max(self.tops[b], len(self.rows[b]))

    def floor(self, b):
        return 0 if self.slots is None else max(0, self.tops[b] - self.slots)

    def truncate(self, lengths):
        for b, length in enumerate(lengths):
            del self.rows[b][length:]
            self.tops[b] = self.tops[b] if self.rows[b] else 0

    def reorder(self, indices):
        self.rows, self.tops = [list(self.rows[i]) for i in indices], [self.tops[i] for i in indices]


def assert_holds(cache, model):
    """Lengths, and bit for bit the tokens that are held."""
    lengths = [len(row) for row in model.rows]
    assert cache.lengths.dtype == np.int64
    assert cache.lengths.tolist() == lengths
    assert cache.length == max(lengths)
    floors = [model.floor(b) for b in range(B)]
    held = [length - floor for length, floor in zip(lengths, floors, strict=True)]
    assert cache.held.tolist() == held
    k, v = cache.k, cache.v
    longest = max(held) if any(floors) else max(lengths)
    assert k.shape == (B, HKV, longest, D)
    assert v.shape == (B, HKV, longest, DV)
    for b, row in enumerate(model.rows):
        for i, (key, value) in enumerate(row[floors[b]:]):
            assert same_bits(k[b, :, i], key)
            assert same_bits(v[b, :, i], value)


# ------------------------------------------------------------------------------------------------ sequences of operations

counts = st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=B, max_size=B))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 5), counts),
        st.tuples(st.just("truncate"), st.lists(st.floats(0, 1), min_size=B, max_size=B), st.booleans()),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, B - 1), min_size=B, max_size=B), st.just(None)),
        st.tuples(st.sampled_from(["reset", "copy"]), st.just(None), st.just(None)),
    ),
    max_size=12,
)  # fmt: skip


def rewound(cache, model, shares, together):
    """The lengths to truncate to, as shares of what there is; in a ring not so far back that it would be refused."""
    wanted = []
    for b, share in enumerate(shares):
        length = len(model.rows[b])
        least = 0 if not model.floor(b) else min(length, model.floor(b) + cache.window)
        wanted.append(length - round(share * (length - least)))
    if together:
        at = max(wanted)
        wanted = [min(len(row), at) for row in model.rows]
        return at, wanted
    return np.array(wanted), wanted


@settings(max_examples=150, deadline=None)
@given(operations, st.sampled_from(["grows", "capacity", (0, 1), (3, 1), (4, 5), (2, 3)]))
def test_it_holds_what_a_list_would(steps, kind):
    ring = isinstance(kind, tuple)
    cache = new(window=kind[0], max_chunk=kind[1]) if ring else new(capacity=60 if kind == "capacity" else None)
    model = Model(sum(kind) if ring else None)
    for seed, (operation, what, more) in enumerate(steps):
        if operation == "append":
            n = min(what, kind[1]) if ring else what
            k, v = tokens(n, seed)
            lengths = None if more is None else np.minimum(more, n)
            cache.append(k, v, lengths)
            model.append(k, v, lengths)
        elif operation == "truncate":
            length, lengths = rewound(cache, model, what, more)
            cache.truncate(length)
            model.truncate(lengths)
        elif operation == "reorder":
            cache.reorder(what)
            model.reorder(what)
        elif operation == "reset":
            cache.reset()
            model.truncate([0] * B)
        else:
            cache = pickle.loads(pickle.dumps(cache))
        assert_holds(cache, model)


def test_reordering_equals_indexing_with_rows_of_different_lengths():
    lengths = np.array([7, 0, 3, 9])
    k, v = tokens(9, batch=4)
    for indices in itertools.product(range(4), repeat=4):
        cache = new(batch=4)
        cache.append(k, v, lengths)
        cache.reorder(np.array(indices, np.uint8))
        assert cache.lengths.tolist() == lengths[list(indices)].tolist()
        for b, source in enumerate(indices):
            assert same_bits(cache.k[b, :, :lengths[source]], k[source, :, :lengths[source]]), indices
            assert same_bits(cache.v[b, :, :lengths[source]], v[source, :, :lengths[source]]), indices


def test_reordering_takes_memory_for_one_row_at_most_and_none_without_cycles():
    cache = KVCache(8, 2, 64, capacity=4096)
    k = np.zeros((8, 2, 1000, 64), np.float32)
    cache.append(k, k)
    row = 2 * k[0].nbytes
    for indices, limit in (([0, 0, 0, 0, 1, 1, 1, 1], row // 10), ([1, 2, 3, 4, 5, 6, 7, 0], row * 1.2)):
        tracemalloc.start()
        cache.reorder(indices)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < limit


def test_k_and_v_are_views_until_a_ring_has_wrapped():
    cache = new()
    cache.append(*tokens(3))
    cache.k[0, 0, 1, 2] = 7
    assert cache.k[0, 0, 1, 2] == 7
    ring = new(window=2, max_chunk=2)
    for i in range(3):
        ring.append(*tokens(2, i))
        assert np.shares_memory(ring.k, ring._slots.state.k) == (i < 2)


def test_lengths_are_a_copy():
    cache = new()
    cache.append(*tokens(2), [1, 2, 0])
    cache.lengths[0] = 9
    assert cache.lengths.tolist() == [1, 2, 0]


# ------------------------------------------------------------------------------------------------------------------ memory


def test_it_grows_by_doubling_from_64_or_from_what_is_needed():
    cache, seen = new(), []
    assert cache.capacity == cache.nbytes == 0
    for i, n in enumerate([1, 63, 1, 64, 200, 1]):
        cache.append(*tokens(n, i))
        seen.append(cache.capacity)
    assert seen == [64, 64, 128, 256, 512, 512]
    assert cache.nbytes == 512 * B * HKV * (D + DV) * 4
    big = new()
    big.append(*tokens(100))
    assert big.capacity == 100


def test_a_given_capacity_is_kept_and_more_leaves_the_cache_as_it_was():
    cache, model = new(capacity=5), Model()
    k, v = tokens(4)
    cache.append(k, v, [1, 4, 3])
    model.append(k, v, [1, 4, 3])
    for lengths in (None, [0, 2, 0]):
        with pytest.raises(ValueError, match=r"^capacity is 5 but a length of [68] would be needed for the new tokens$"):
            cache.append(*tokens(4, 1), lengths)
        assert_holds(cache, model)
    cache.append(*tokens(4, 2), [4, 1, 2])
    assert cache.lengths.tolist() == [5, 5, 5]
    assert cache.capacity == 5


def test_failure_to_allocate_leaves_the_cache_as_it_was(monkeypatch):
    cache, model = new(), Model()
    k, v = tokens(60)
    cache.append(k, v)
    model.append(k, v)

    def fail(self, slots):
        raise MemoryError

    monkeypatch.setattr(fastmha.slots.Slots, "allocate", fail)
    with pytest.raises(MemoryError):
        cache.append(*tokens(10, 1))
    assert_holds(cache, model)


def test_appending_a_token_allocates_nothing_proportional_to_the_cache():
    for keywords in ({"capacity": 20000}, {"window": 20000}):
        cache, n = KVCache(1, 4, 32, **keywords), 0
        k = np.ones((1, 4, 1, 32), np.float32)
        cache.append(k, k)
        tracemalloc.start()
        while n < 5:
            cache.append(k.astype(np.float64), k)
            n += 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20000


def test_appending_in_another_dtype_takes_no_copy_of_all_new_tokens():
    k = np.ones((1, 2, 20000, 16))
    cache = KVCache(1, 2, 16, capacity=20000)
    tracemalloc.start()
    cache.append(k, k)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < k.nbytes // 8


def test_new_tokens_of_any_strides_and_from_the_cache_itself():
    k, v = tokens(6)
    cache = new()
    cache.append(padded(k)[:, :, ::-1], v.swapaxes(1, 2).copy().swapaxes(1, 2)[:, :, ::-1])
    assert same_bits(cache.k, k[:, :, ::-1])
    assert same_bits(cache.v, v[:, :, ::-1])
    ring, (k, v) = new(window=4, max_chunk=4), tokens(8)
    for start in (0, 4):
        ring.append(k[:, :, start:start + 4], v[:, :, start:start + 4])
    old = ring.k[:, :, 4:], ring.v[:, :, 4:]
    ring.truncate(6)
    ring.append(*old)  # slots 6, 7, 0, 1 <- slots 4 to 7
    assert same_bits(ring.k[:, :, -4:], k[:, :, 4:])
    assert same_bits(ring.v[:, :, -4:], v[:, :, 4:])


@pytest.mark.parametrize("keywords", [{}, {"capacity": 20}, {"window": 4, "max_chunk": 4}])
@pytest.mark.parametrize("lengths", [None, [2, 4, 1]])
def test_its_own_views_are_appended_as_they_were_also_crosswise(keywords, lengths):
    for first, second in (("k", "v"), ("v", "k"), ("k", "k")):
        cache, plain = (KVCache(B, HKV, D, **keywords) for _ in range(2))
        for one in (cache, plain):
            rng = np.random.default_rng(0)
            for counts in (None, [4, 1, 3]):
                one.append(*rng.standard_normal((2, B, HKV, 4, D)), counts)
            one.truncate([6, 4, 5])
        views = [getattr(cache, name)[:, :, start:start + 4] for name, start in ((first, 2), (second, 1))]
        assert views[0].base is not None
        assert views[1].base is not None
        plain.append(*(view.copy() for view in views), lengths)
        cache.append(*views, lengths)
        assert cache.lengths.tolist() == plain.lengths.tolist()
        assert cache.held.tolist() == plain.held.tolist()
        for b, n in enumerate(cache.held):
            assert same_bits(cache.k[b, :, :n], plain.k[b, :, :n])
            assert same_bits(cache.v[b, :, :n], plain.v[b, :, :n])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_independent_and_holds_the_same(duplicate):
    for keywords in ({"capacity": 9}, {}, {"window": 2, "max_chunk": 3}):
        cache = new(**keywords)
        for i in range(2):
            cache.append(*tokens(3, i), [3, 1, 2])
        other = duplicate(cache)
        assert repr(other) == repr(cache)
        assert other.nbytes == cache.nbytes
        kept = cache.k.copy()
        other.append(*tokens(1))
        other.reset()
        assert np.array_equal(cache.k, kept, equal_nan=True)
        assert cache.lengths.tolist() == [6, 2, 4]


def test_a_pickle_holds_no_memory_that_was_never_written():
    cache = KVCache(1, 2, 8, capacity=100000)
    k = np.ones((1, 2, 3, 8), np.float32)
    cache.append(k, k)
    assert len(pickle.dumps(cache)) < 2000


def test_empty_batches_and_empty_appends_work():
    cache = new(batch=0)
    cache.append(*tokens(2, batch=0))
    cache.append(*tokens(2, batch=0), np.zeros(0, int))
    cache.reorder(np.zeros(0, int))
    cache.truncate(1)
    assert cache.lengths.shape == (0,)
    ring = new(batch=0, window=2, max_chunk=2)
    for n in (1, 2, 2, 1):
        ring.append(*tokens(n, batch=0))
    assert ring.k.shape == (0, HKV, 0, D)
    cache = new()
    cache.append(*tokens(0))
    assert cache.k.shape == (B, HKV, 0, D)
    assert cache.length == 0


# ------------------------------------------------------------------------------------------------------------------ dtypes


def storage_dtypes():
    yield from (np.float64, np.float32, np.float16)
    try:
        import ml_dtypes
    except ImportError:
        yield pytest.param(None, id="bfloat16", marks=pytest.mark.skip(reason="needs ml_dtypes"))
    else:
        yield pytest.param(ml_dtypes.bfloat16, id="bfloat16")


@pytest.mark.parametrize("source", [np.float16, np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("dtype", list(storage_dtypes()))
def test_tokens_are_rounded_to_the_storage_dtype_and_beyond_it_infinite(source, dtype):
    for n in (1, 3):
        k, v = tokens(n, dtype=source)
        if source != np.float16:
            k[0, 0, 0, 0] = 1e30
        for lengths in (None, [n, 0, n]):
            cache = new(dtype=dtype)
            cache.append(k, v, lengths)
            with np.errstate(over="ignore"):
                assert cache.k.dtype == dtype
                assert np.array_equal(cache.k[0], k[0].astype(dtype))
                assert np.array_equal(cache.v[2], v[2].astype(dtype))
            cache.reorder([2, 1, 0])
            other = pickle.loads(pickle.dumps(cache))
            assert other.dtype == dtype
            assert np.array_equal(other.v[2], v[0].astype(dtype))


def test_bfloat16_by_name():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert new(dtype="bfloat16").dtype == ml_dtypes.bfloat16


def test_bfloat16_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with raises(ImportError, 'dtype "bfloat16" needs the package ml_dtypes: pip install "fastmha[bfloat16]"'):
        new(dtype="bfloat16")


# ------------------------------------------------------------------------------------------------------------------ errors


CONSTRUCTION = [
    ((-1, 2, 4), {}, ValueError, "batch_size must be at least 0, got -1"),
    ((1.0, 2, 4), {}, TypeError, "batch_size must be an integer, got 1.0"),
    ((1, 0, 4), {}, ValueError, "num_kv_heads must be at least 1, got 0"),
    ((1, 2, 0), {}, ValueError, "head_dim must be at least 1, got 0"),
    ((1, 2, 4), {"v_head_dim": 0}, ValueError, "v_head_dim must be at least 1, got 0"),
    ((1, 2, 4), {"capacity": -1}, ValueError, "capacity must be at least 0, got -1"),
    ((1, 2, 4), {"capacity": "9"}, TypeError, "capacity must be an integer, got '9'"),
    ((1, 2, 4), {"window": (3, None)}, TypeError, "window must be an integer, got (3, None)"),
    ((1, 2, 4), {"window": -1}, ValueError, "window must be at least 0, got -1"),
    ((1, 2, 4), {"window": 3, "max_chunk": 0}, ValueError, "max_chunk must be at least 1, got 0"),
    ((1, 2, 4), {"max_chunk": 3}, ValueError,
     "max_chunk is given (3) but not window, which makes the ring that it belongs to"),
    ((1, 2, 4), {"window": 3, "capacity": 9}, ValueError,
     "capacity and window cannot be given together, got 9 and 3: a ring holds window + max_chunk tokens"),
    ((1, 2, 4), {"dtype": np.int32}, TypeError, "dtype must be float32, float64, float16 or bfloat16, got int32"),
    ((1, 2, 4), {"dtype": ">f4"}, TypeError, "dtype must be float32, float64, float16 or bfloat16, got >f4"),
    ((1, 2, 4), {"dtype": "half-full"}, TypeError, "dtype must be float32, float64, float16 or bfloat16, got 'half-full'"),
    ((1, 2, 4), {"dtype": None}, TypeError, "dtype must be float32, float64, float16 or bfloat16, got None"),
    ((2**20, 2**20, 4), {"capacity": 2**30}, ValueError, "a cache of batch_size 1048576, num_kv_heads 1048576, head_dim 4, "
     "v_head_dim 4 and 1073741824 tokens per row is beyond any memory"),
    ((2**30, 2**30, 4), {}, ValueError, "a cache of batch_size 1073741824, num_kv_heads 1073741824, head_dim 4, v_head_dim 4 "
     "and 1 tokens per row is beyond any memory"),
    ((2**62, 2, 4), {}, ValueError, "batch_size must be at most 2147483583, got 4611686018427387904"),
    ((np.uint64(2**64 - 1), 2, 4), {}, ValueError, "batch_size must be at most 2147483583, got 18446744073709551615"),
    ((1, 2**62, 4), {}, ValueError, "num_kv_heads must be at most 2147483583, got 4611686018427387904"),
    ((1, 2, 2**70), {}, ValueError, f"head_dim must be at most 715827861, got {2**70}"),
    ((1, 2, 4), {"capacity": 2**70}, ValueError, f"capacity must be at most 2147483583, got {2**70}"),
    ((1, 2, 4), {"window": 2**31}, ValueError, "window must be at most 2147483582, got 2147483648"),
    ((1, 2, 4), {"window": 2**31 - 70, "max_chunk": 8}, ValueError,
     "max_chunk must be at most 5 beside window = 2147483578, got 8"),
    ((True, 2, 4), {}, TypeError, "batch_size must be an integer, got True"),
    ((1, None, 4), {}, TypeError, "num_kv_heads must be an integer, got None"),
    ((1, 2, 4), {"window": 3, "max_chunk": True}, TypeError, "max_chunk must be an integer, got True"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "keywords", "error", "message"), CONSTRUCTION, ids=[c[3] for c in CONSTRUCTION])
def test_construction_refuses(sizes, keywords, error, message):
    with raises(error, message):
        KVCache(*sizes, **keywords)


K, V = tokens(3)
APPEND = [
    ({"k": K.astype(int)}, TypeError, "k must hold real floating numbers, got dtype int64"),
    ({"v": V * 1j}, TypeError, "v must hold real floating numbers, got dtype complex64"),
    ({"k": None}, TypeError, "k must hold real floating numbers, got dtype object"),
    ({"k": [[1.0], [2.0, 3.0]]}, ValueError, "k cannot be made an array: ..."),
    ({"k": K[0]}, ValueError, "k must have shape (B, Hkv, n, D) = (3, 2, n, 4), got (2, 3, 4)"),
    ({"k": K[:1]}, ValueError, "k must have shape (B, Hkv, n, D) = (3, 2, n, 4), got (1, 2, 3, 4)"),
    ({"k": K[:, :1]}, ValueError, "k must have shape (B, Hkv, n, D) = (3, 2, n, 4), got (3, 1, 3, 4)"),
    ({"v": K}, ValueError, "v must have shape (B, Hkv, n, Dv) = (3, 2, n, 5), got (3, 2, 3, 4)"),
    ({"v": V[:, :, :2]}, ValueError, "v has length 2 on axis 2 but k has 3"),
    ({"lengths": [1, 2]}, ValueError, "lengths must have shape (B,) = (3,), got (2,)"),
    ({"lengths": 2}, ValueError, "lengths must have shape (B,) = (3,), got ()"),
    ({"lengths": [1.0, 2.0, 3.0]}, TypeError, "lengths must be integers, got dtype float64"),
    ({"lengths": [1, 4, 0]}, ValueError, "lengths must lie in [0, n] = [0, 3], got 4 at index 1"),
    ({"lengths": [1, 2, -1]}, ValueError, "lengths must lie in [0, n] = [0, 3], got -1 at index 2"),
    ({"lengths": [1, 2**63, 1]}, ValueError, "lengths must lie in [0, n] = [0, 3], got 9223372036854775808 at index 1"),
    ({"lengths": np.ma.array([1, 2, 3])}, TypeError,
     "lengths is a masked array, whose mask would be lost: pass lengths.filled(...)"),
    ({"k": np.ma.array(K)}, TypeError, "k is a masked array, whose mask would be lost: pass k.filled(...)"),
    ({"v": np.ma.array(V)}, TypeError, "v is a masked array, whose mask would be lost: pass v.filled(...)"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), APPEND, ids=[c[2] for c in APPEND])
def test_append_refuses_and_leaves_the_cache_as_it_was(arguments, error, message):
    cache, model = new(), Model()
    cache.append(K, V, [3, 1, 2])
    model.append(K, V, [3, 1, 2])
    with raises(error, message):
        cache.append(**{"k": K, "v": V, **arguments})
    assert_holds(cache, model)


def test_a_ring_refuses_more_than_its_chunk():
    cache, model = new(window=4, max_chunk=2), Model(6)
    with raises(ValueError, "k has length 3 on axis 2 but at most max_chunk = 2 tokens can be appended to this ring at a time"):
        cache.append(K, V)
    assert_holds(cache, model)


CHANGES = [
    ("truncate", 4, ValueError, "length must be at most 3, the cache's length, got 4"),
    ("truncate", -1, ValueError, "length must be at least 0, got -1"),
    ("truncate", 1.0, TypeError, "length must be an integer, got 1.0"),
    ("truncate", None, TypeError, "length must be an integer, got None"),
    ("truncate", [1, 2], ValueError, "length must have shape (B,) = (3,), got (2,)"),
    ("truncate", [1, 4, 1], ValueError, "length must lie in [0, the cache's length] = [0, 3], got 4 at index 1"),
    ("reorder", [0, 1], ValueError, "indices must have shape (B,) = (3,), got (2,)"),
    ("reorder", 1, ValueError, "indices must have shape (B,) = (3,), got ()"),
    ("reorder", [0.0, 1.0, 2.0], TypeError, "indices must be integers, got dtype float64"),
    ("reorder", [0, 3, 1], ValueError, "indices must lie in [0, B - 1] = [0, 2], got 3 at index 1"),
    ("reorder", [0, 1, -1], ValueError, "indices must lie in [0, B - 1] = [0, 2], got -1 at index 2"),
    ("truncate", 2**70, ValueError, f"length must be at most 3, the cache's length, got {2**70}"),
    ("truncate", True, TypeError, "length must be an integer, got True"),
    ("truncate", "2", TypeError, "length must be an integer, got '2'"),
    *((method, argument, error, f"{name} {message}") for method, name, limit in (
        ("truncate", "length", "the cache's length] = [0, 3]"), ("reorder", "indices", "B - 1] = [0, 2]"))
      for argument, error, message in (
        ([1, 2**70, 0], ValueError, f"must lie in [0, {limit}, got {2**70} at index 1"),
        ([1, 2**63, -2], ValueError, f"must lie in [0, {limit}, got {2**63} at index 1"),
        ([-2**70, 2**70, 0], ValueError, f"must lie in [0, {limit}, got {-2**70} at index 0"),
        (np.array([1, 2, 2**64 - 1], np.uint64), ValueError, f"must lie in [0, {limit}, got {2**64 - 1} at index 2"),
        ([True, False, True], TypeError, "must be integers, got dtype bool"),
        ([None] * 3, TypeError, "must be integers, got dtype object"),
        (["0", "1", "2"], TypeError, "must be integers, got dtype <U1"),
        ([0, 1, 1.5], TypeError, "must be integers, got dtype float64"),
        ([[0], [1, 2]], ValueError, "cannot be made an array: ..."),
        (np.ma.array([0, 1, 2], mask=[0, 1, 0]), TypeError, "is a masked array, whose mask would be lost: pass ..."),
    )),
    ("reorder", None, TypeError, "indices must be integers, got dtype object"),
    ("reorder", "012", TypeError, "indices must be integers, got dtype <U3"),
    ("reorder", 2**70, ValueError, "indices must have shape (B,) = (3,), got ()"),
    ("reorder", True, TypeError, "indices must be integers, got dtype bool"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "argument", "error", "message"), CHANGES, ids=[f"{c[0]} {c[1]}" for c in CHANGES])
def test_truncate_and_reorder_refuse_and_leave_the_cache_as_it_was(method, argument, error, message):
    cache, model = new(), Model()
    cache.append(K, V, [3, 1, 2])
    model.append(K, V, [3, 1, 2])
    with raises(error, message):
        getattr(cache, method)(argument)
    assert_holds(cache, model)


def test_a_ring_refuses_to_go_back_to_where_it_has_overwritten_what_would_be_needed():
    cache, model = new(window=2, max_chunk=2), Model(4)
    for i in range(5):
        k, v = tokens(1, i)
        cache.append(k, v, [1, 1, i < 2])
        model.append(k, v, [1, 1, i < 2])
    for length in (2, [5, 2, 0]):  # 4 slots hold positions 1 to 4
        with raises(ValueError, f"length 2 is too far back for row {int(length != 2)}: a query there may attend keys from "
                                "position 0 on (window 2), but the ring holds them only from position 1 on"):  # fmt: skip
            cache.truncate(length)
        assert_holds(cache, model)
    cache.truncate(3)
    model.truncate([3, 3, 2])
    assert_holds(cache, model)
    cache.truncate([3, 0, 1])  # nothing is needed at position 0
    model.truncate([3, 0, 1])
    assert_holds(cache, model)


# ------------------------------------------------------------------------------------------------------------------- repr


def test_repr_shows_the_configuration():
    cache = KVCache(2, 4, 8, capacity=16)
    assert repr(cache) == "KVCache(batch_size=2, num_kv_heads=4, head_dim=8, capacity=16, dtype=float32) with length 0"
    ring = KVCache(2, 4, 8, v_head_dim=3, window=16, dtype="float16")
    assert repr(ring) == (
        "KVCache(batch_size=2, num_kv_heads=4, head_dim=8, v_head_dim=3, dtype=float16, window=16, max_chunk=1) with length 0"
    )
