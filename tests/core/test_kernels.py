"""The kernels' own exp and tanh, and softmax forward and backward, on every instruction set.

Errors are in ulp (spacing of the dtype at the exact value) against an oracle of more digits: float64 for float32, NumPy's
long double for float64. Below the smallest normal number results are 0, and operands count as 0.
"""

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from support import VECTOR_BYTES, dtypes, padded, same_bits, unaligned

import fastmha
from fastmha import _core, reference

WIDER = {np.float32: np.float64, np.float64: np.longdouble}
LOWEST = {np.float32: -149, np.float64: -1074}  # exponents of the smallest number, digits, exponent of infinity
DIGITS = {np.float32: 24, np.float64: 53}
HIGHEST = {np.float32: 128, np.float64: 1024}
FUNCTIONS = {"exponential": np.exp, "hyperbolic_tangent": np.tanh}


def apply(name, x):
    y = np.empty_like(x)
    getattr(_core, name)(x, y)
    return y


def ulps(y, exact, dtype):
    """|y - exact| in ulp of exact; infinity counts as the number after the largest, what is below the smallest normal as 0."""
    wide = WIDER[dtype]
    smallest = wide(np.finfo(dtype).smallest_normal)
    assert not ((y != 0) & (np.abs(y) < smallest)).any()
    exact = np.where((np.abs(exact) < smallest) & (y == 0), 0, exact)
    exact = np.where((np.abs(exact) <= smallest * (1 + 2 * np.finfo(dtype).eps)) & (y == 0), 0, exact)
    infinity = np.ldexp(wide(1), HIGHEST[dtype])
    exact = np.clip(exact, -infinity, infinity)
    y = np.where(np.isinf(y), np.copysign(infinity, y), y.astype(wide))
    exponent = np.maximum(np.frexp(exact)[1] - DIGITS[dtype], LOWEST[dtype])
    return np.abs(np.ldexp(y - exact, -exponent))


def oracle(name, x, dtype):
    with np.errstate(all="ignore"):
        return FUNCTIONS[name](x.astype(WIDER[dtype]))


def test_a_selected_instruction_set_is_the_one_that_runs(isa):
    assert _core.selected_isa()[0] == isa
    assert _core.selected_isa()[1] == VECTOR_BYTES[isa]


def test_the_bound_notices_three_ulp():
    x = np.float32([-87, -50.0, 0.25, 88])
    exact = oracle("exponential", x, np.float32)
    off = exact.astype(np.float32)
    for _ in range(3):
        off = np.nextafter(off, np.float32(np.inf))
    assert (ulps(off, exact, np.float32) > 2).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_over_all_exponents_within_two_ulp(isa, name):
    """Every 257th of all floats; which ones falls differently in each binade."""
    for start in range(0, 2**32, 257 * 2**20):
        x = np.arange(start, min(start + 257 * 2**20, 2**32), 257, dtype=np.uint32).view(np.float32)
        x = x[np.isfinite(x) & (np.abs(x) > 2.0**-30) & (np.abs(x) < 2.0**8)]  # beyond: below, all of them alike
        if x.size:
            assert ulps(apply(name, x), oracle(name, x, np.float32), np.float32).max() <= 2


def edges(dtype):
    """Around 0, multiples of ln2 / 2, under- and overflow, the branch of tanh, and powers of two of every size."""
    points = [
        k * np.log(2) / 2 for k in range(-2160 if dtype == np.float64 else -310, 2060 if dtype == np.float64 else 260)
    ]
    points += [0.625, -0.625, np.log(2.0**-126), np.log(2.0**-149), np.log(2.0**-150), np.log(2.0**128)]
    points += [
        -708.3964185322641,
        -744.4400719213812,
        -745.1332191019411,
        709.782712893384,
        -103.97208,
        -87.33655,
        88.72284,
    ]
    points = np.array(points, dtype)
    integer = np.int32 if dtype == np.float32 else np.int64
    around = (points.view(integer)[:, None] + np.arange(-40, 41, dtype=integer))[np.abs(points) > 0]
    powers = np.ldexp(dtype(1), np.arange(LOWEST[dtype], HIGHEST[dtype]))
    return np.concatenate([around.ravel().view(dtype), powers, -powers, np.linspace(-1e-3, 1e-3, 5001, dtype=dtype)])


@dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_edges_within_two_ulp(isa, dtype, name):
    x = edges(dtype)
    with np.errstate(all="ignore"):
        assert ulps(apply(name, x), oracle(name, x, dtype), dtype).max() <= 2


@dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_random_arguments_within_two_ulp(isa, dtype, name, rng):
    for size in (1e-5, 0.3, 1, 20, 90, 750):
        x = rng.uniform(-size, size, 20000).astype(dtype)
        with np.errstate(all="ignore"):
            assert ulps(apply(name, x), oracle(name, x, dtype), dtype).max() <= 2


@dtypes
def test_special_arguments(isa, dtype):
    largest, smallest = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, largest, -largest, smallest, -smallest], dtype)
    assert np.array_equal(
        apply("exponential", x), dtype([1, 1, np.inf, 0, np.nan, np.nan, np.inf, 0, 1, 1]), equal_nan=True
    )
    assert not np.signbit(apply("exponential", x[[3, 7]])).any()
    assert np.array_equal(
        apply("hyperbolic_tangent", x), dtype([0, 0, 1, -1, np.nan, np.nan, 1, -1, 0, 0]), equal_nan=True
    )


@dtypes
def test_exp_is_0_below_the_smallest_normal_number(isa, dtype):
    """Subnormal probabilities would make peaked scores ten times as slow, for what no sum of float32 notices."""
    smallest = np.finfo(dtype).smallest_normal
    last = np.log(smallest.astype(WIDER[dtype])).astype(dtype)
    x = np.concatenate([np.linspace(1.3 * last, 0.99 * last, 30001, dtype=dtype), -np.geomspace(1, 1e30, 1001, dtype=dtype)])
    y, exact = apply("exponential", x), oracle("exponential", x, dtype)
    margin = 1 + 4 * np.finfo(dtype).eps
    assert (y[exact < smallest / margin] == 0).all()
    assert (y[exact > smallest * margin] >= smallest).all()


@dtypes
def test_both_ways_of_exp_have_the_same_bits(isa, dtype, rng):
    """Softmax has that of arguments up to 88, or 709, of vectors in step: beside a larger one they all go the other way."""
    largest = {np.float32: 88, np.float64: 709}[dtype]
    x = [rng.uniform(-size, size, 5000).astype(dtype) for size in (1, 20, 90, 750)]
    x = np.concatenate([edges(dtype), *x, [-np.inf, np.nan, -0.0]])
    x = x[~(x > largest)].astype(dtype)
    beside = np.full((x.size, 2), np.inf, dtype)
    beside[:, 0] = x
    assert same_bits(apply("exponential", x), apply("exponential", beside.ravel())[::2].copy())


def test_the_control_register_of_the_thread_is_as_it_was(isa):
    """NumPy goes on computing with subnormal numbers in the thread that called, and in one that comes after."""
    tiny = np.float32([1e-40])
    x = np.ones((1, 2, 70, 8), np.float32)
    for threads in (1, 3):
        for algorithm in ("blas", "tiled"):
            out, lse = fastmha.attention(x, x, x, algorithm=algorithm, num_threads=threads, return_lse=True)
            fastmha.attention_backward(x, x, x, x, out, lse, algorithm=algorithm, num_threads=threads)
            fastmha.softmax(x, num_threads=threads)
            apply("exponential", x)
            assert (tiny * np.float32(0.5) > 0).all()


@dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_does_not_depend_on_its_place(isa, dtype, name, rng):
    """Whole vectors and the rest behind them compute the same."""
    x = rng.uniform(-5, 5, 70).astype(dtype)
    whole = apply(name, x)
    for start in range(17):
        for length in (1, 2, 3, 7, 16, 33):
            part = np.ascontiguousarray(x[start : start + length])
            assert same_bits(apply(name, part), whole[start : start + length])


# -------------------------------------------------------------------------------------------------------------- softmax

SHAPES = [
    (0,),
    (1,),
    (2,),
    (3,),
    (7,),
    (8,),
    (9,),
    (15,),
    (16,),
    (17,),
    (31,),
    (33,),
    (64,),
    (65,),
    (129,),
    (1000,),
    (3, 0),
    (0, 5),
    (4, 1),
    (3, 17),
    (2, 3, 5),
    (2, 0, 3),
    (3, 1, 2, 7),
    (2, 2, 2, 2, 33),
    (300, 70),
]


def strided(x):
    """The same numbers in other memory."""
    yield "contiguous", x
    yield "Fortran", np.asfortranarray(x)
    yield "backwards", np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    yield "padded", padded(x)
    yield "step", np.repeat(x, 2, axis=-1)[..., ::2]
    yield "unaligned", unaligned(x)
    frozen = x.copy()
    frozen.flags.writeable = False
    yield "read-only", frozen


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_and_its_backward(isa, dtype, shape, rng):
    """To some eps: exp within 2 ulp of arguments that are off by an eps of their size; a sum of positive numbers."""
    x, g = 3 * rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape).astype(dtype)
    expected = reference.softmax(x.astype(np.float64))
    eps = np.finfo(dtype).eps
    for kind, strange in strided(x):
        kept = strange.copy()
        y = fastmha.softmax(strange)
        assert y.dtype == dtype, kind
        assert y.shape == shape, kind
        assert y.flags.c_contiguous, kind
        assert np.abs(y - expected).max(initial=0) <= 40 * eps, kind
        assert same_bits(strange, kept), kind
    y = fastmha.softmax(x)
    expected = reference.softmax_backward(g.astype(np.float64), y.astype(np.float64))
    for (kind, strange_g), (_, strange_y) in zip(strided(g), strided(y), strict=True):
        grad = fastmha.softmax_backward(strange_g, strange_y)
        assert grad.dtype == dtype, kind
        assert grad.shape == shape, kind
        assert np.abs(grad - expected).max(initial=0) <= 40 * eps, kind


@dtypes
def test_softmax_of_overlapping_and_broadcast_rows(isa, dtype, rng):
    x = sliding_window_view(rng.standard_normal(20).astype(dtype), 7)
    assert same_bits(fastmha.softmax(x), fastmha.softmax(x.copy()))
    x = np.broadcast_to(rng.standard_normal(7).astype(dtype), (4, 7))
    assert same_bits(fastmha.softmax(x), fastmha.softmax(x.copy()))
    x = np.broadcast_to(dtype(2), (4, 8))
    assert (fastmha.softmax(x) == 0.125).all()


@dtypes
def test_softmax_rows_sum_to_one_and_ignore_a_shift(isa, dtype, rng):
    x = rng.integers(-50, 50, (50, 77)).astype(dtype)
    y = fastmha.softmax(x)
    np.testing.assert_allclose(y.sum(axis=-1, dtype=np.float64), 1, rtol=20 * np.finfo(dtype).eps)
    assert same_bits(fastmha.softmax(x + dtype(1000)), y)  # integers: the shift is exact


@dtypes
def test_softmax_removes_minus_infinity_exactly(isa, dtype, rng):
    x = rng.standard_normal((6, 21)).astype(dtype)
    x[1:4, ::2] = -np.inf
    x[4] = -np.inf
    y = fastmha.softmax(x)
    assert not y[x == -np.inf].any()
    assert (y[x != -np.inf] > 0).all()
    np.testing.assert_allclose(y[:4].sum(axis=-1), 1, rtol=20 * np.finfo(dtype).eps)


@dtypes
def test_softmax_of_not_a_number_stays_in_its_row(isa, dtype, rng):
    x = rng.standard_normal((3, 19)).astype(dtype)
    clean = fastmha.softmax(x)
    x[1, 5] = np.nan
    y = fastmha.softmax(x)
    assert np.isnan(y[1]).all()
    assert same_bits(y[[0, 2]], clean[[0, 2]])


@dtypes
def test_softmax_backward_is_the_jacobian(isa, dtype, rng):
    x, g = rng.standard_normal(9).astype(dtype), rng.standard_normal(9).astype(dtype)
    y = fastmha.softmax(x)
    jacobian = np.diag(y) - np.outer(y, y)
    np.testing.assert_allclose(
        fastmha.softmax_backward(g, y), jacobian.astype(np.float64) @ g, atol=20 * np.finfo(dtype).eps
    )


def test_softmax_backward_by_central_differences(isa, rng):
    x, g, step = rng.standard_normal((4, 6)), rng.standard_normal((4, 6)), 1e-5
    grad = fastmha.softmax_backward(g, fastmha.softmax(x))
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        numeric = ((fastmha.softmax(up) - fastmha.softmax(down)) * g).sum() / (2 * step)
        assert abs(grad[place] - numeric) <= 1e-5 * max(abs(numeric), abs(grad[place])) + 1e-8
