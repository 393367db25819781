"""gelu, silu and relu, forward and backward, on every instruction set.

The oracle has more digits: float64 for float32, NumPy's long double for float64. With a = |x| and Q the tail P(-a),
x P(x) = max(x, 0) - a Q and the slope is d or 1 - d with d = Q - a P'. Hence the bounds, in eps: each of a Q, Q and a P' is a few
roundings (the fit, the exponential within 2 ulp, a division, some products) of its own size, times its log where the argument of
the exponential is itself a rounded number; then there is one rounding of the result.
"""

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from scipy import special
from support import DTYPES, dtypes, fails, normal, padded, rearranged, same_bits

import fastmha
from fastmha import _core, reference

WIDER = {np.float32: np.float64, np.float64: np.longdouble}
CUBIC = 0.044715
KINDS = ["gelu", "gelu_tanh", "relu", "silu"]
kinds = pytest.mark.parametrize("kind", KINDS)
PUBLIC = {
    "gelu": (fastmha.gelu, fastmha.gelu_backward, {}),
    "gelu_tanh": (fastmha.gelu, fastmha.gelu_backward, {"approximate": "tanh"}),
    "silu": (fastmha.silu, fastmha.silu_backward, {}),
}
public = pytest.mark.parametrize("kind", PUBLIC)


def forward(kind, x, **keywords):
    """By the public function, for relu by the core."""
    if kind in PUBLIC:
        function, _, own = PUBLIC[kind]
        return function(x, **own, **keywords)
    y = np.empty(x.shape, x.dtype)
    _core.activation_rows(_core.ACTIVATIONS[kind], None, x, y, 1)
    return y


def backward(kind, g, x, **keywords):
    if kind in PUBLIC:
        _, function, own = PUBLIC[kind]
        return function(g, x, **own, **keywords)
    grad = np.empty(x.shape, x.dtype)
    _core.activation_rows(_core.ACTIVATIONS[kind], g, x, grad, 1)
    return grad


# ---------------------------------------------------------------------------------------------------- oracle and bounds


def bell(a):
    """exp(-a²/2), without the error of a², a²/2 times as large."""
    high = a.astype(np.float32).astype(a.dtype)
    return np.exp(-high * high / 2) * np.exp(-(a - high) * (a + high) / 2)


def normal_tail(a):
    """Φ(-a) and φ(a) in long double: 1/2 - φ(a) Σ a^(2k+1) / (2k+1)!! near 0, beyond by Laplace's continued fraction."""
    small = np.minimum(a, 1.25)
    term = total = small
    for k in range(1, 40):
        term = term * small * small / (2 * k + 1)
        total = total + term
    large, fraction = np.maximum(a, 1.25), np.zeros_like(a)
    for k in range(300, 0, -1):
        fraction = k / (large + fraction)
    root = np.sqrt(2 * np.pi) if a.dtype == np.float64 else np.sqrt(8 * np.arctan(np.longdouble(1)))
    return np.where(a < 1.25, 0.5 - bell(small) * total / root, bell(large) / (large + fraction) / root), bell(a) / root


def parts(kind, a):
    """Q, P' and -log(Q / (1 - Q)) as far as its rounding counts, for a >= 0 in the oracle's dtype."""
    if kind == "gelu":
        return (special.ndtr(-a), bell(a) / np.sqrt(2 * np.pi), 0) if a.dtype == np.float64 else (*normal_tail(a), 0)
    rate = 1
    odds = a
    if kind == "gelu_tanh":
        root = 2 * np.sqrt(2 / (4 * np.arctan(a.dtype.type(1))))
        cubic = a.dtype.type(CUBIC)     # 0.044715 in double, also for the oracle of that
        odds, rate = root * (a + cubic * a**3), root * (1 + 3 * cubic * a * a)
    w = np.exp(-odds)
    return w / (1 + w), rate * w / (1 + w) ** 2, odds if kind == "gelu_tanh" else 0


def oracle(kind, x, dtype):
    """(y, its bound, slope, its bound)"""
    eps, tiny = np.finfo(dtype).eps, np.finfo(dtype).tiny
    x = x.astype(WIDER[dtype])
    if kind == "relu":
        return np.maximum(x, 0), 0, (x > 0).astype(x.dtype), 0
    a = np.minimum(np.abs(x), 2000)  # beyond, there is no tail
    with np.errstate(all="ignore"):
        q, density, odds = parts(kind, a)
        inner, d = 8 + 3 * odds, q - a * density
        y, slope = np.maximum(x, 0) - a * q, np.where(x < 0, d, 1 - d)
        bound = eps * (inner * a * q + np.maximum(x, 0)) + tiny
        return y, bound, slope, eps * (inner * (q + a * density) + (x > 0)) + tiny


def grid(dtype):
    """All exponents, both signs; the interesting range densely; each float's neighbours around the ends of the tails."""
    powers = np.geomspace(np.finfo(dtype).tiny, np.finfo(dtype).max / 2, 4000)
    ends = [-5.5, -9, -10, -13.2, -14.2, -21, -22, -37.5, -38.5, -87.3, -88.7, -92, -104, -170, -708, -715, -745]
    around = [np.linspace(e - 0.3, e + 0.3, 301) for e in ends]
    x = np.concatenate([powers, -powers, np.linspace(-40, 40, 8001), np.linspace(-1, 1, 4001), *around]).astype(dtype)
    return x[~((x != 0) & (np.abs(x) < np.finfo(dtype).tiny))]


ORACLE = {(kind, dtype): (grid(dtype), oracle(kind, grid(dtype), dtype)) for kind in KINDS for dtype in DTYPES}


@dtypes
@kinds
def test_values_and_slopes_are_within_their_bounds_far_into_the_tails(isa, dtype, kind):
    x, (y, bound, slope, slope_bound) = ORACLE[kind, dtype]
    error = np.abs(forward(kind, x) - y)
    assert not (beyond := ~(error <= bound)).any(), (x[beyond][:4], error[beyond][:4])
    error = np.abs(backward(kind, np.ones_like(x), x) - slope)
    assert not (beyond := ~(error <= slope_bound)).any(), (x[beyond][:4], error[beyond][:4])


@dtypes
def test_the_exact_gelu_has_no_error_that_grows_into_the_left_tail(isa, dtype):
    """8 eps of the result wherever that is normal: without care the rounding of x²/2 alone were 40 there (float64: 350)."""
    x = -np.linspace(1, 12.9 if dtype == np.float32 else 37.4, 20001).astype(dtype)
    y, exact = fastmha.gelu(x), oracle("gelu", x, dtype)[0]
    assert (np.abs(exact) > np.finfo(dtype).tiny).all()
    assert (np.abs(y / exact - 1) <= 8 * np.finfo(dtype).eps).all()


def test_the_oracle_knows_the_normal_tail():
    """scipy.special rounds a²/2, and has 15 digits beside that."""
    a = np.linspace(0, 37, 5000)
    tail, density = normal_tail(a.astype(np.longdouble))
    rounded = np.finfo(float).eps * (4 + a * a)
    assert (np.abs(special.ndtr(-a) / tail - 1) <= rounded).all()
    assert (np.abs(np.exp(-a * a / 2) / np.sqrt(2 * np.pi) / density - 1) <= rounded).all()


@pytest.mark.parametrize("size", [0.1, 1, 3, 30])
@dtypes
@kinds
def test_random_numbers_times_gradients_equal_the_reference(isa, dtype, kind, size, rng):
    x, g = (size * rng.standard_normal((7, 333))).astype(dtype), rng.standard_normal((7, 333)).astype(dtype)
    y, bound, slope, slope_bound = oracle(kind, x, dtype)
    assert (np.abs(forward(kind, x) - y) <= bound).all()
    eps, tiny = np.finfo(dtype).eps, np.finfo(dtype).tiny
    assert (np.abs(backward(kind, g, x) - g * slope) <= np.abs(g) * (slope_bound + eps * np.abs(slope)) + tiny).all()


@public
def test_the_reference_is_the_oracle(kind):
    """It has fewer digits in the tails: 1e-14 absolutely."""
    x, (y, _, slope, _) = ORACLE[kind, np.float64]
    x, y, slope = (v[np.abs(x) < 50] for v in (x, y, slope))
    name, keywords = PUBLIC[kind][0].__name__, PUBLIC[kind][2]
    np.testing.assert_allclose(getattr(reference, name)(x, **keywords), y.astype(float), rtol=1e-14, atol=1e-14)
    gradient = getattr(reference, f"{name}_backward")(np.full_like(x, 2), x, **keywords)
    np.testing.assert_allclose(gradient, 2 * slope.astype(float), rtol=1e-13, atol=1e-13)


@public
def test_the_reference_keeps_float32_and_its_limits(kind):
    name, keywords = PUBLIC[kind][0].__name__, PUBLIC[kind][2]
    x = np.float32([-np.inf, -1, 0, np.inf, np.nan])
    y = getattr(reference, name)(x, **keywords)
    assert y.dtype == np.float32
    assert np.array_equal(y[[0, 2, 3, 4]], np.float32([0, 0, np.inf, np.nan]), equal_nan=True)
    slope = getattr(reference, f"{name}_backward")(np.ones_like(x), x, **keywords)
    assert slope.dtype == np.float32
    assert np.array_equal(slope[[0, 2, 3, 4]], np.float32([0, 0.5, 1, np.nan]), equal_nan=True)


@dtypes
@kinds
def test_limits_and_numbers_that_are_none(isa, dtype, kind):
    largest, smallest = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    x = np.array([-np.inf, -largest, -smallest, -0.0, 0.0, smallest, largest, np.inf, np.nan, -np.nan] * 3, dtype)
    wanted = dtype([0, 0, 0, 0, 0, 0, largest, np.inf, np.nan, np.nan] * 3)
    assert np.array_equal(forward(kind, x), wanted, equal_nan=True)
    half = 0 if kind == "relu" else 0.5
    wanted = dtype([0, 0, half, half, half, 1 if kind == "relu" else half, 1, 1, np.nan, np.nan] * 3)
    slope = backward(kind, np.ones_like(x), x)
    if kind == "relu":      # at a subnormal number, which counts as 0
        slope[5::10] = 1
    assert np.array_equal(slope, wanted, equal_nan=True)


@dtypes
def test_relu_is_exact_and_no_activation_is_the_identity(isa, dtype, rng):
    x, g = rng.standard_normal((2, 70)).astype(dtype)
    assert np.array_equal(forward("relu", x), np.maximum(x, 0))
    assert np.array_equal(backward("relu", g, x), g * (x > 0))
    assert same_bits(forward(None, x), x)
    assert same_bits(backward(None, g, x), g)


@dtypes
@kinds
def test_what_is_no_number_stays_in_its_place(isa, dtype, kind, rng):
    x, g = rng.standard_normal((2, 67)).astype(dtype)
    y, grad = forward(kind, x), backward(kind, g, x)
    for place in (0, 17, 66):
        for value in (np.nan, np.inf, -np.inf):
            other, other_g = x.copy(), g.copy()
            other[place] = other_g[place] = value
            rest = np.arange(67) != place
            assert same_bits(forward(kind, other)[rest], y[rest])
            assert same_bits(backward(kind, g, other)[rest], grad[rest])
            assert same_bits(backward(kind, other_g, x)[rest], grad[rest])


@public
def test_gradients_equal_central_differences(isa, kind, rng):
    x, g, step = 2 * rng.standard_normal((5, 9)), rng.standard_normal((5, 9)), 1e-6
    numeric = g * (forward(kind, x + step) - forward(kind, x - step)) / (2 * step)
    np.testing.assert_allclose(backward(kind, g, x), numeric, rtol=1e-7, atol=1e-8)


# ------------------------------------------------------------------------------------------------------ memory and bits


SHAPES = [(0,), (3, 0), (0, 5), (7,), (4, 1), (2, 3, 5), (3, 1, 2, 7), (2, 3, 2, 2, 33), (2, 2, 3, 2, 2, 5), (300, 70)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtypes
@public
def test_any_strides_give_the_same_bits(isa, dtype, kind, shape):
    x, g = normal(*shape, seed=1, dtype=dtype), normal(*shape, seed=2, dtype=dtype)
    y, grad = forward(kind, x), backward(kind, g, x)
    assert y.shape == grad.shape == shape
    assert y.dtype == grad.dtype == dtype
    for (name, other), (_, other_g) in zip(rearranged(x), rearranged(g), strict=True):
        results = forward(kind, other), backward(kind, other_g, other), backward(kind, g, other)
        for result, wanted in zip(results, (y, grad, grad), strict=True):
            assert same_bits(result, wanted), name
            assert result.flags.c_contiguous, name
        assert same_bits(other, x), name


@public
def test_broadcast_and_overlapping_arrays_and_numbers(kind):
    row = normal(9)
    for x in (np.broadcast_to(row, (4, 3, 9)), sliding_window_view(row, 4), np.broadcast_to(row[2], (5, 6))):
        assert same_bits(forward(kind, x), forward(kind, x.copy()))
    one = forward(kind, row[1])
    assert one.shape == ()
    assert same_bits(one, forward(kind, row)[1])
    assert backward(kind, row[0], row[1]).shape == ()
    unaligned = np.zeros(16, np.uint8)[1:9].view(np.float64).reshape(())
    unaligned[...] = row[1]
    assert same_bits(forward(kind, unaligned), one)
    assert same_bits(backward(kind, unaligned, unaligned), backward(kind, row[1], row[1]))


@dtypes
@kinds
def test_a_value_does_not_depend_on_its_place(isa, dtype, kind):
    x, g = normal(140, dtype=dtype), normal(140, seed=3, dtype=dtype)
    y, grad = forward(kind, x), backward(kind, g, x)
    for n in range(1, 71):
        part = slice(n % 7, n % 7 + n)
        assert same_bits(forward(kind, x[part]), y[part])
        assert same_bits(backward(kind, g[part], x[part]), grad[part])


@dtypes
@public
def test_n_threads_agnosticism(dtype, kind):
    for x in (normal(100_003, dtype=dtype), normal(3000, 41, dtype=dtype), padded(normal(9, 700, 17, dtype=dtype))):
        one = forward(kind, x, num_threads=1), backward(kind, x, x, num_threads=1)
        for threads in (2, 3, 7):
            assert same_bits(forward(kind, x, num_threads=threads), one[0])
            assert same_bits(backward(kind, x, x, num_threads=threads), one[1])


@public
def test_in_place_and_into_given_memory(kind):
    shape = (5, 3, 21)
    x = normal(*shape)
    y = forward(kind, x)
    for name, memory in rearranged(x):
        assert forward(kind, memory, out=memory) is memory, name
        assert same_bits(memory, y), name
    for name, memory in rearranged(np.zeros(shape)):
        assert forward(kind, x, out=memory) is memory, name
        assert same_bits(memory, y), name
    around = np.full((7, 5, 25), -1.0)
    forward(kind, x, out=around[1:6, 1:4, 2:23])
    assert same_bits(around[1:6, 1:4, 2:23], y)
    around[1:6, 1:4, 2:23] = -1
    assert (around == -1).all()
    again = x.copy()
    view = again[:]
    assert forward(kind, view, out=again) is again
    assert same_bits(again, y)


# --------------------------------------------------------------------------------------------------------------- errors

X = np.ones((3, 4), np.float32)
MESSAGES = {
    "integers": (lambda: fastmha.gelu(np.arange(3)), TypeError, r"^x must be float32 or float64 .*got int64"),
    "masked": (lambda: fastmha.silu(np.ma.ones(3)), TypeError, r"^x is a masked array"),
    "approximate": (lambda: fastmha.gelu(X, approximate="erf"), ValueError,
                    r'^approximate must be "none" or "tanh", got \'erf\'$'),
    "approximate, backward": (lambda: fastmha.gelu_backward(X, X, approximate=None), ValueError, r"^approximate .*got None$"),
    "threads": (lambda: fastmha.gelu(X, num_threads=0), ValueError, r"^num_threads must be at least 1, got 0$"),
    "threads, backward": (lambda: fastmha.silu_backward(X, X, num_threads=1.5), TypeError, r"^num_threads must be an integer"),
    "out, type": (lambda: fastmha.gelu(X, out=[1.0]), TypeError, r"^out must be a NumPy array, got list$"),
    "out, dtype": (lambda: fastmha.gelu(X, out=np.ones((3, 4))), TypeError, r"^out has dtype float64 but x has float32"),
    "out, shape": (lambda: fastmha.silu(X, out=np.ones((4, 3), np.float32)), ValueError,
                   r"^out must have shape \(3, 4\), got \(4, 3\)$"),
    "out, overlap": (lambda: fastmha.gelu(X[:2], out=X[1:]), ValueError, r"^out overlaps x in memory$"),
    "out, reversed": (lambda: fastmha.gelu(X[0], out=X[0, ::-1]), ValueError, r"^out overlaps x in memory$"),
    "out, itself": (lambda: fastmha.gelu(X, out=np.broadcast_to(X[:1], (3, 4))), ValueError,
                    r"^out must be writable, got a read-only array$"),
    "gradient, dtype": (lambda: fastmha.gelu_backward(X.astype(float), X), TypeError,
                        r"^grad_output has dtype float64 but x has float32"),
    "gradient, shape": (lambda: fastmha.silu_backward(X[:2], X), ValueError,
                        r"^grad_output must have the shape of x, \(3, 4\), got \(2, 4\)$"),
    "gradient of None": (lambda: fastmha.gelu_backward(None, X), TypeError,
                         r"^grad_output must be float32 or float64.*got None$"),
    "torch's names": (lambda: fastmha.gelu(input=X), TypeError, r"^gelu has no keyword input: it is x here$"),
    "torch's inplace": (lambda: fastmha.silu(X, inplace=True), TypeError, r"^silu has no keyword inplace: it is out=x here$"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    fails(*MESSAGES[name])


def test_a_failed_call_writes_nothing():
    out = X.copy()
    fails(lambda: fastmha.gelu(X, out=out, num_threads=0), ValueError, "num_threads")
    assert same_bits(out, X)
