"""The kernels' own product: weights that are packed once, few rows, and the frozen modules that keep packed weights.

b is packed in panels of columns, K in blocks of 384; up to 16 rows take b where it lies, 8 rows of it at a time; the pool's
slices have 256 rows. Sizes here lie around all of them.
"""

import copy
import itertools
import pickle

import numpy as np
import pytest
from support import HALVES, Guard, assert_same, bits, dtypes, eps, guards, padded, same_bits

import fastmha
from fastmha import _core, algorithms, validate
from fastmha.algorithms import own_slices, product_by_blas

ROWS = (*range(1, 41), 64, 257, 300)
DEPTHS = (1, 7, 383, 384, 385, 900)
COLUMNS = (1, 15, 16, 17, 63, 64, 65, 130, 1100)
stored_types = pytest.mark.parametrize("stored", HALVES, ids=lambda dtype: dtype.__name__)
FEW = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 25, 31, 32, 33)


def draw(rng, m, n, k, dtype):
    """a, b and a bias."""
    return [rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n), n)]


def panels(b):
    """What `algorithms.product` takes for packed weights."""
    return algorithms.Packed(algorithms.packed_weights(b), None, 0)


def own(a, b, n, bias=None, packed=None, threads=1, slices=None, trans_a=False):
    """op(a) @ b (+ bias) by the kernels' own product, nothing beside it written."""
    m = a.shape[1] if trans_a else a.shape[0]
    around = np.full((m + 2, n + 3), np.nan, a.dtype)
    c = around[1:-1, 1:-2]
    slices = slices or own_slices(m, n, len(b), threads)
    _core.matmul_tiled(a, b, c, trans_a, False, bias, slices, threads, packed)
    result = c.copy()
    c[...] = np.nan
    assert np.isnan(around).all()
    return result


def assert_product(c, a, b, bias=None):
    """Within rounding of float64: a sum of K terms errs by at most K eps of the sum of their sizes."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    wanted, size = a @ b, np.abs(a) @ np.abs(b)
    if bias is not None:
        wanted, size = wanted + bias, size + np.abs(bias)
    assert (np.abs(c - wanted) <= np.finfo(c.dtype).eps * (2 + a.shape[1]) * size).all()


# ------------------------------------------------------------------------------------------------------ packed weights


@dtypes
@pytest.mark.parametrize("k", DEPTHS)
def test_packed_weights_give_the_bits_of_those_that_are_not(isa, dtype, k, rng):
    rows = itertools.cycle(ROWS)
    for n in COLUMNS:
        for m in itertools.islice(rows, 5):
            a, b, bias = draw(rng, m, n, k, dtype)
            packed = algorithms.packed_weights(b)
            a, b = padded(a), padded(b)
            for added, threads in ((None, 1), (bias, 3)):
                expected = own(a, b, n, added)
                assert_product(expected, a, b, added)
                assert same_bits(own(a, b, n, added, packed, threads), expected), (m, n)
                results = [np.full((m, n), np.nan, dtype) for _ in range(2)]
                algorithms.product(a, b, results[0], threads, bias=added)
                algorithms.product(a, b, results[1], threads, bias=added, packed=panels(b))
                assert same_bits(*results), (m, n)
                if not product_by_blas(m):
                    assert same_bits(results[0], expected), (m, n)


@dtypes
def test_packed_weights_give_the_bits_for_every_number_of_rows(isa, dtype, rng):
    for m, (n, k) in itertools.product(ROWS, ((65, 257), (300, 9))):
        a, b, bias = draw(rng, m, n, k, dtype)
        expected = own(a, b, n, bias)
        assert_product(expected, a, b, bias)
        assert same_bits(own(a, b, n, bias, algorithms.packed_weights(b), 3), expected), (m, n)
        assert same_bits(own(a, b, n) + bias, expected), (m, n)     # added last, wherever that is done


@dtypes
@pytest.mark.parametrize(("n", "k"), [(1, 385), (130, 900), (600, 391), (1500, 391), (4200, 65), (8300, 400)])
def test_a_row_has_the_bits_by_itself_that_it_has_among_others(isa, dtype, n, k, rng):
    """Both sides of the bytes and of the columns from which on a single row is added to in longer streams."""
    a, b, bias = draw(rng, 20, n, k, dtype)
    expected = own(a, b, n, bias)
    assert_product(expected, a, b, bias)
    for rows in (1, 2, 3, 7):
        assert same_bits(own(a[:rows], b, n, bias), expected[:rows]), rows
        assert same_bits(own(a[:rows].T.copy(), b, n, bias, trans_a=True), expected[:rows]), rows


@dtypes
@pytest.mark.parametrize(("m", "n"), [(17, 260), (64, 513), (65, 1025), (257, 1030), (300, 2113)])
def test_blocks_of_columns_give_the_bits_of_packed_weights_from_operands_turned_round(isa, dtype, m, n, rng):
    """Both sides of the rows and columns from which on more is packed at a time, whole blocks and their rests, K in two."""
    a, b, bias = draw(rng, m, n, 391, dtype)
    slices = m, n       # one, so that its blocks are those of the product
    expected = own(a, b, n, bias, algorithms.packed_weights(b), slices=slices)
    assert_product(expected, a, b, bias)
    for trans_a, trans_b in itertools.product((False, True), repeat=2):
        c = np.full((m, n), np.nan, dtype)
        x, y = padded(a.T.copy() if trans_a else a), padded(b.T.copy() if trans_b else b)
        _core.matmul_tiled(x, y, c, trans_a, trans_b, bias, slices, 1)
        assert same_bits(c, expected), (trans_a, trans_b)


@dtypes
def test_packed_weights_are_what_is_read_beyond_few_rows(isa, dtype, rng):
    """Of b itself nothing is read then: without this the tests above show nothing."""
    a, b, _ = draw(rng, 20, 130, 70, dtype)
    assert same_bits(own(a, np.full_like(b, np.nan), 130, packed=algorithms.packed_weights(b)), own(a, b, 130))


@dtypes
def test_columns_of_wider_weights_are_packed_as_a_copy_of_them_is(isa, dtype, rng):
    for width in (1, 17, 65, 130):
        wide = rng.standard_normal((40, 200)).astype(dtype)
        for start in (0, 5):
            part = wide[:, start : start + width]
            assert same_bits(algorithms.packed_weights(part), algorithms.packed_weights(part.copy()))


@dtypes
def test_packed_weights_of_no_size(isa, dtype):
    for k, n in ((0, 5), (5, 0), (0, 0)):
        b, bias = np.empty((k, n), dtype), np.arange(n).astype(dtype)
        packed = panels(b)
        assert packed.panels.size == 0
        for m in (3, 20):
            a, c = np.ones((m, k), dtype), np.full((m, n), np.nan, dtype)
            algorithms.product(a, b, c, 1, bias=bias, packed=packed)
            assert np.array_equal(c, np.broadcast_to(bias, (m, n)))


# ------------------------------------------------------------------------------------------------------------ few rows


@dtypes
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("m", FEW)
def test_few_rows_are_right(isa, dtype, trans_a, m, rng):
    for k, n in itertools.product((1, 7, 8, 9, 16, 17, 383, 384, 385, 900), (1, 3, 15, 16, 17, 65, 130)):
        a, b, bias = draw(rng, m, n, k, dtype)
        given_a = padded(a.T if trans_a else a)
        for added in (None, bias):
            assert_product(own(given_a, padded(b), n, added, trans_a=trans_a), a, b, added)


@dtypes
@pytest.mark.parametrize("trans_a", [False, True])
def test_few_rows_have_the_bits_of_the_same_rows_among_many(isa, dtype, trans_a, rng):
    for k, n in ((1, 9), (17, 65), (383, 16), (384, 130), (384, 64), (385, 9), (385, 64), (900, 65), (900, 1128)):
        a, b, bias = draw(rng, 40, n, k, dtype)
        together = own(a.T.copy() if trans_a else a, b, n, bias, trans_a=trans_a)
        for start, stop in ((0, 1), (1, 4), (4, 20), (20, 37), (39, 40), (1, 33), (5, 29)):
            rows = a[start:stop].T.copy() if trans_a else a[start:stop]
            assert same_bits(own(rows, b, n, bias, trans_a=trans_a), together[start:stop]), (k, n, start)


@dtypes
def test_few_rows_on_threads_and_in_slices_have_one_set_of_bits(isa, dtype, rng):
    for m in (1, 5, 16, 32):
        a, b, bias = draw(rng, m, 1100, 257, dtype)
        expected = own(a, b, 1100, bias, slices=(m, 1100))
        for slices, threads in (((m, 64), 1), ((m, 320), 3), ((3, 17), 3)):
            assert same_bits(own(a, b, 1100, bias, threads=threads, slices=slices), expected)


@pytest.mark.parametrize("stored", [np.float32, np.float64, *HALVES], ids=lambda stored: stored.__name__)
def test_few_rows_have_these_bits_wherever_in_a_cache_line_their_matrix_begins(isa, stored, rng):
    """Rows that lie alike are read from their first whole vector on; also where they end before it."""
    dtype = np.float64 if stored == np.float64 else np.float32
    for width, columns in ((64, 64), (128, 128), (64, 5), (64, 30), (1088, 1080)):
        k = 390 if width < 1000 else 24
        b = rng.standard_normal((k, width)).astype(stored)
        memory = np.empty(b.size + 64, b.dtype)
        a = rng.standard_normal((17, k)).astype(dtype)
        expected = own(a, np.ascontiguousarray(b[:, :columns]).astype(dtype), columns, slices=(17, columns))
        for begins in (*range(17), 31):
            x = memory[begins : begins + b.size].reshape(b.shape)
            x[...] = b
            for m in (1, 2, 3, 4, 6, 8, 9, 17):
                got = own(a[:m], validate.bits(x)[:, :columns], columns, slices=(m, columns))
                assert same_bits(got, expected[:m]), (width, columns, begins, m)


@dtypes
def test_a_single_row_has_these_bits_whoever_fetches_its_matrix(isa, dtype, fetched, rng):
    """Of more than 1 MB: less stays with some columns."""
    for k, n in ((391, 1003), (260, 1088), (1, 300_000), (9, 40_001)):
        a, b, bias = draw(rng, 5, n, k, dtype)
        together = own(a, b, n, bias, slices=(5, n))
        assert_product(together, a, b, bias)
        for row in (0, 4):
            assert same_bits(own(a[row : row + 1], b, n, bias, slices=(1, n)), together[row : row + 1]), (k, n)


def test_slices_keep_every_thread_busy_to_the_end():
    """The share of the threads' time that the slices fill, each of which takes a time like its size."""
    for m, n, threads in ((1, 768, 2), (24, 768, 2), (128, 768, 2), (256, 768, 2), (128, 2304, 2), (128, 256, 2), (1024, 768, 8),
                          (512, 768, 48), (4096, 3072, 96), (128, 1000, 3)):
        rows, columns = own_slices(m, n, 768, threads)
        assert columns == n or columns % _core.PANEL_COLUMNS == 0
        slices = -(-m // rows) * -(-n // columns)
        assert slices >= threads
        assert m * n / (-(-slices // threads) * rows * columns * threads) > 0.85, (m, n, threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_slices_of_any_product_are_some_and_leave_an_interrupt_within_reach(threads):
    for m, n, k in itertools.product((0, 1, 63, 300, 10**6), (0, 1, 127, 129, 5000, 10**6), (0, 1, 768, 10**6)):
        rows, columns = own_slices(m, n, k, threads)
        assert 1 <= rows <= max(m, 1)
        assert 1 <= columns <= max(n, 1)
        assert rows * columns * k <= 2**31 or columns <= 128


@dtypes
@pytest.mark.parametrize("m", [1, 3, 16, 17])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_flows_as_it_does_in_numpy(isa, dtype, m, poison, rng):
    for k, n in ((9, 17), (257, 33)):
        a, b, bias = draw(rng, m, n, k, dtype)
        clean = own(a, b, n, bias)
        for which in ("a", "b", "both"):
            x, y = a.copy(), b.copy()
            reached = np.zeros((m, n), bool)
            if which != "b":
                x[m // 2, k - 1] = poison
                reached[m // 2] = True
            if which != "a":
                y[k // 2, n - 1] = poison
                reached[:, n - 1] = True
            with np.errstate(invalid="ignore"):
                wanted = x @ y + bias
            for packed in (None, algorithms.packed_weights(y)):
                c = own(x, y, n, bias, packed)
                assert np.array_equal(c[reached], wanted[reached], equal_nan=True)
                assert np.array_equal(bits(c)[~reached], bits(clean)[~reached])


# ------------------------------------------------------------------------------------------- operands of half precision


@stored_types
@pytest.mark.parametrize("k", [1, 8, 383, 385, 900])
def test_weights_of_half_precision_give_the_bits_of_the_same_numbers_in_float32(isa, stored, k, rng):
    rows = itertools.cycle((*range(1, 19), 24, 25, 32, 33, 40, 257))
    for n in COLUMNS:
        for m in itertools.islice(rows, 4):
            a, b, bias = draw(rng, m, n, k, np.float32)
            half = b.astype(stored)
            expected = own(a, padded(half.astype(np.float32)), n, bias)
            assert same_bits(own(a, validate.bits(padded(half)), n, bias, threads=3), expected), (m, n)
            turned, c = validate.bits(padded(half.T.copy())), np.empty((m, n), np.float32)
            _core.matmul_tiled(a, turned, c, False, True, bias, (m, n), 1)
            assert_product(c, a, half, bias)


@stored_types
def test_products_of_any_types_are_those_of_float32_rounded_once(isa, stored, rng):
    for m, n, k in ((1, 33, 40), (5, 64, 9), (40, 130, 70)):
        a, b, bias = draw(rng, m, n, k, np.float32)
        for of_a, of_b, of_c in itertools.product((np.float32, stored), repeat=3):
            x, y, added = a.astype(of_a), b.astype(of_b), bias.astype(of_b)
            c, wide = np.empty((m, n), of_c), np.empty((m, n), np.float32)
            algorithms.product(x, y, c, 2, bias=added)
            algorithms.product(*(z.astype(np.float32) for z in (x, y)), wide, 2, bias=added.astype(np.float32))
            if m > 1 and not product_by_blas(m):
                assert same_bits(c, wide.astype(of_c))
            np.testing.assert_allclose(c.astype(float), wide, rtol=eps(of_c), atol=1e-5)


@guards
@stored_types
def test_products_of_weights_of_half_precision_stay_inside(isa, stored, kind, rng):
    for m, n, k in itertools.product((1, 7, 16, 17, 32), (1, 7, 15, 16, 17, 33, 65, 129), (1, 8, 9, 257)):
        a, b, bias = draw(rng, m, n, k, np.float32)
        b = b.astype(stored)
        expected = own(a, validate.bits(b), n, bias)
        for trans_b in (False, True):
            guard = Guard(kind)
            given = guard(a), guard(validate.bits(b.T.copy() if trans_b else b)), guard.empty((m, n), np.float32)
            _core.matmul_tiled(*given, False, trans_b, bias, (m, n), 1)
            if trans_b:
                assert_product(given[2], a, b, bias)
            else:
                assert same_bits(given[2], expected)


# --------------------------------------------------------------------------------------------------------- guard pages


@dtypes
@guards
def test_products_of_packed_weights_and_few_rows_stay_inside(isa, dtype, kind, rng):
    for m, n in itertools.product((1, 2, 7, 8, 16, 17, 24, 32, 33), (1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 129)):
        for k in (1, 8, 9, 257):
            a, b, bias = draw(rng, m, n, k, dtype)
            expected = own(a, b, n, bias)
            guard, flat = Guard(kind), Guard("start" if kind == "start" else "end")
            a, b, c = guard(a), guard(b), guard.empty((m, n), dtype)
            flat.used = guard.used
            packed = flat.empty(algorithms.packed_weights(b).shape, dtype)
            _core.pack_weights(b, packed)
            for x in (None, packed):
                c[...] = np.nan
                _core.matmul_tiled(a, b, c, False, False, bias, (m, n), 1, x)
                assert same_bits(c, expected), (m, n, k)


# ------------------------------------------------------------------------------------------------------ frozen modules

MODULES = {
    "heads": lambda dtype, **own: fastmha.MultiHeadAttention(64, 4, use_bias=True, dtype=dtype, rng=0, **own),
    "odd heads": lambda dtype, **own: fastmha.MultiHeadAttention(70, 10, num_kv_heads=5, dtype=dtype, rng=0, **own),
    "one head": lambda dtype, **own: fastmha.SelfAttention(33, 17, 9, 21, dtype=dtype, rng=0),
}
modules = pytest.mark.parametrize("kind", MODULES)


def outputs(m):
    """Of rows in every number that products distinguish, alone and in a batch."""
    rng = np.random.default_rng(7)
    return [m.forward(rng.standard_normal((B, L, m.d_model)).astype(m.dtype), is_causal=True, training=False)
            for B, L in ((1, 1), (2, 1), (1, 16), (1, 17), (3, 40), (1, 257))]


def assert_outputs(results, expected, exact=True):
    """The same bits where the kernels' own product takes both."""
    for x, y in zip(results, expected, strict=True):
        if exact and not product_by_blas(2):
            assert same_bits(x, y)
        np.testing.assert_allclose(x, y, rtol=0, atol=1000 * np.finfo(y.dtype).eps)


def assert_packed(m):
    """The packed copies are those of the weights as they are."""
    if product_by_blas(2):
        assert m._packed == {}
        return
    assert m._packed.keys() == {"W_in", "W_out"}
    assert_same([packed.panels for packed in m._packed.values()], map(algorithms.packed_weights, (m._W_in, m._W_out)))


@dtypes
@modules
def test_a_frozen_module_gives_the_output_of_one_that_is_not(isa, dtype, kind, rng):
    m = MODULES[kind](dtype)
    expected = outputs(m)
    m.freeze()
    assert_packed(m)
    assert_outputs(outputs(m), expected)


@dtypes
def test_a_frozen_module_with_a_context_or_a_cache_gives_the_output_of_one_that_is_not(isa, dtype, rng):
    m = MODULES["odd heads"](dtype)
    X, context = (rng.standard_normal((2, L, 70)).astype(dtype) for L in (20, 35))

    def results():
        cache = fastmha.KVCache(2, 5, 7, dtype=dtype)
        steps = [m.forward(X[:, i:j], cache=cache, is_causal=True) for i, j in ((0, 17), (17, 18), (18, 20))]
        return [m.forward(X, context=context, training=False), m.forward(X, context=m.project_context(context)), *steps]

    expected = results()
    m.freeze()
    assert_outputs(results(), expected)


@dtypes
@modules
def test_weights_changed_after_unfreeze_are_those_that_count(isa, dtype, kind, rng):
    m, other = MODULES[kind](dtype), MODULES[kind](dtype)
    m.freeze()
    before = outputs(m)
    m.unfreeze()
    assert m._packed == {}
    for x in (m, other):
        x.W_Q[...] *= 2
        x.W_V = x.W_V + 1
        x.W_O[0] = 3
    expected = outputs(other)
    for x, y in zip(expected, before, strict=True):
        assert not np.allclose(x, y)
    assert_outputs(outputs(m), expected)
    m.freeze()
    assert_packed(m)
    assert_outputs(outputs(m), expected)


@dtypes
@modules
def test_freezing_twice_is_freezing_once(isa, dtype, kind, rng):
    m = MODULES[kind](dtype)
    m.freeze()
    expected = outputs(m)
    m.freeze()
    assert_packed(m)
    assert_outputs(outputs(m), expected)
    m.unfreeze()
    assert m._packed == {}
    m.W_Q[0, 0] = 1


@dtypes
@modules
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_of_a_frozen_module_pack_anew(isa, dtype, kind, how, rng):
    m = MODULES[kind](dtype)
    m.freeze()
    expected = outputs(m)
    assert m.__getstate__()["_packed"] == {}
    other = pickle.loads(pickle.dumps(m)) if how == "pickle" else copy.deepcopy(m)
    assert_packed(m)
    assert_packed(other)
    if not product_by_blas(2):
        for x, y in zip(m._packed.values(), other._packed.values(), strict=True):
            assert not np.shares_memory(x.panels, y.panels)
    assert_outputs(outputs(other), expected)
    other.unfreeze()
    other.W_O[...] = 0
    other.freeze()
    assert_outputs(outputs(m), expected)


@dtypes
def test_a_pickle_of_a_frozen_module_is_no_larger(isa, dtype):
    m = MODULES["heads"](dtype)
    loose = len(pickle.dumps(m))
    m.freeze()
    assert len(pickle.dumps(m)) <= loose + 100


@dtypes
def test_algorithm_blas_keeps_no_packed_weights(isa, dtype, rng):
    m = MODULES["heads"](dtype, algorithm="blas")
    expected = outputs(m)
    m.freeze()
    assert m._packed == {}
    assert_outputs(outputs(m), expected, exact=False)
    assert pickle.loads(pickle.dumps(m))._packed == {}
