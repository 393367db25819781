"""The only door to BLAS: c := alpha * op(a) @ op(b) + beta * c (+ bias), row-major, in slices, against float64."""

import itertools

import numpy as np
import pytest
from support import dtypes, same_bits

from fastmha import _core

SIZES = [
    (5, 7, 3),
    (1, 7, 3),
    (5, 1, 3),
    (5, 7, 1),
    (1, 1, 9),
    (1, 8, 1),
    (6, 1, 1),
    (1, 1, 1),
    (33, 65, 17),
    (130, 70, 257),
    (0, 7, 3),
    (5, 0, 3),
    (5, 7, 0),
    (1, 7, 0),
    (5, 1, 0),
    (0, 0, 0),
]
both = pytest.mark.parametrize(
    "transposes", list(itertools.product([False, True], repeat=2)), ids=["NN", "NT", "TN", "TT"]
)


def matrix(rng, rows, columns, dtype, padding):
    """A matrix whose rows are followed by `padding` NaN."""
    memory = np.full((rows + 1, columns + padding), np.nan, dtype)
    inside = memory[:rows, :columns]
    inside[...] = rng.standard_normal((rows, columns))
    return inside


def operands(rng, m, n, k, dtype, transposes, padding):
    trans_a, trans_b = transposes
    a = matrix(rng, *((k, m) if trans_a else (m, k)), dtype, padding)
    b = matrix(rng, *((n, k) if trans_b else (k, n)), dtype, 2 * padding)
    op_a, op_b = (a.T if trans_a else a), (b.T if trans_b else b)
    return a, b, op_a.astype(np.float64) @ op_b.astype(np.float64)


def bound(expected, k, dtype):
    """k products and sums of numbers of size up to 5, each rounded."""
    return np.finfo(dtype).eps * (4 * k + 8) * 25


@dtypes
@both
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_products_in_any_slices(dtype, transposes, padding, beta, rng):
    cuts = (
        (1.0, False, None, 1),
        (-0.5, True, (2, 3), 2),
        (2.0, False, (4, None), 1),
        (1.0, True, (1, 1), 2),
        (1.0, False, (1000, 1000), 2),
        (1.0, True, (1, 1000), 1),
        (1.0, True, (1000, 1), 1),
    )
    for (m, n, k), (alpha, biased, slices, threads) in itertools.product(SIZES, cuts):
        a, b, product = operands(rng, m, n, k, dtype, transposes, padding)
        with_bias = rng.standard_normal(n).astype(dtype) if biased else None
        slices = (max(m, 1), max(n, 1)) if slices is None else (slices[0], slices[1] or max(n, 1))
        if m * n > 500 and slices in ((1, 1), (2, 3)):
            slices = (50, 33)
        memory = np.full((m + 1, n + padding + 1), 99, dtype)
        c = memory[:m, :n]
        c[...] = np.nan if beta == 0 else rng.standard_normal((m, n))
        expected = alpha * product + (0 if beta == 0 else c.astype(np.float64)) + (with_bias if biased else 0)
        _core.matmul(a, b, c, *transposes, alpha, beta, with_bias, slices, threads)
        assert np.abs(c - expected).max(initial=0) <= bound(expected, k, dtype), (m, n, k, slices)
        assert (memory[m:] == 99).all()  # nothing is written beside c
        assert (memory[:, n:] == 99).all()


@dtypes
@both
def test_operands_stay_as_they_are(dtype, transposes, rng):
    a, b, _ = operands(rng, 6, 5, 4, dtype, transposes, 2)
    copies = a.copy(), b.copy()
    a.flags.writeable = b.flags.writeable = False
    _core.matmul(a, b, np.empty((6, 5), dtype), *transposes, 1.0, 0.0, None, (4, 2), 2)
    assert same_bits(a, copies[0])
    assert same_bits(b, copies[1])


@dtypes
@both
def test_n_threads_agnosticism(dtype, transposes, rng):
    """The bits follow from the slices, not from who computes them."""
    a, b, _ = operands(rng, 90, 70, 50, dtype, transposes, 1)
    results = []
    for threads in (1, 2, 3, 7):
        c = np.empty((90, 70), dtype)
        _core.matmul(a, b, c, *transposes, 1.0, 0.0, None, (16, 32), threads)
        results.append(c)
    for c in results[1:]:
        assert same_bits(results[0], c)


@dtypes
@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (4, 6)])
def test_not_a_number_stays_in_its_rows(dtype, shape, rng):
    m, n = shape
    a, b, product = operands(rng, m, n, 3, dtype, (False, False), 0)
    c = np.empty((m, n), dtype)
    a[0, 1] = np.nan
    _core.matmul(a, b, c, False, False, 1.0, 0.0, None, (m, n), 1)
    assert np.isnan(c[0]).all()
    np.testing.assert_allclose(c[1:], product[1:], atol=1e-5)
