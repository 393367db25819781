"""The dense layer: its sums within their bounds in every instruction set, its last pass and its gradients to the bit."""

import itertools
import pickle

import numpy as np
import pytest
from support import (
    ISAS,
    assert_gradient,
    assert_same,
    dtypes,
    every_isa,
    normal,
    padded,
    raises,
    rearranged,
    same_bits,
    selected,
)

import fastmha
from fastmha import _core, reference

ACTIVATIONS = (None, *(name for name in _core.ACTIVATIONS if name))
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
sizes = pytest.mark.parametrize(
    "size", [(1, 1, 1), (1, 300, 7), (2, 3, 65), (7, 257, 64), (13, 70, 130), (16, 64, 33), (17, 513, 96), (70, 33, 257),
             (300, 40, 65)]
)


def operands(m, K, N, dtype, seed=0):
    """x, W, b and one more array of the result's shape."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(dtype) for s in ((m, K), (K, N), (N,), (m, N))]


def transposed(W):
    """The same weights as torch keeps them."""
    return np.ascontiguousarray(W.T).T


def assert_product(got, a, b, bias=0.0):
    """a @ b + bias within the bound of the sum and two more roundings; for float64 the oracle errs as well."""
    dtype = got.dtype
    a, b, bias = (np.asarray(x, np.float64) for x in (a, b, bias))
    wanted = a @ b + bias
    bound = reference.product_error_bounds(a, b, dtype) + np.finfo(dtype).eps * (np.abs(a @ b) + np.abs(bias))
    assert got.shape == wanted.shape
    assert (np.abs(got - wanted) <= bound * (1 + (dtype == np.float64))).all()


@every_isa
@dtypes
@sizes
def test_every_sum_is_within_its_bound_however_the_weights_lie(isa, dtype, size):
    x, W, b, _ = operands(*size, dtype)
    for weights in (W, transposed(W), fastmha.pack_weights(W)):
        got = fastmha.linear(x, weights, b)
        assert got.dtype == dtype
        assert got.flags.c_contiguous
        assert_product(got, x, W, b)
    assert_product(fastmha.linear(x, W), x, W)


@every_isa
@dtypes
@activations
@sizes
def test_the_last_pass_has_the_bits_of_separate_steps(isa, dtype, activation, size):
    x, W, b, residual = operands(*size, dtype)
    z = fastmha.linear(x, W, b)
    steps = {None: lambda z: z, "gelu": fastmha.gelu, "gelu_tanh": lambda z: fastmha.gelu(z, approximate="tanh"),
             "relu": lambda z: np.maximum(z, 0), "silu": fastmha.silu}
    y = steps[activation](z)
    assert same_bits(fastmha.linear(x, W, b, activation=activation), y)
    assert same_bits(fastmha.linear(x, W, b, activation=activation, residual=residual), y + residual)
    assert same_bits(fastmha.linear(x, W, residual=residual), fastmha.linear(x, W) + residual)


@every_isa
@dtypes
@activations
def test_a_row_has_the_same_bits_whatever_lies_around_it(isa, dtype, activation):
    """By itself or among any number of rows, on any number of threads, whatever way the weights lie."""
    for K, N in ((70, 33), (300, 130), (513, 64)):
        x, W, b, residual = operands(150, K, N, dtype)
        expected = fastmha.linear(x, W, b, activation=activation, residual=residual, num_threads=1)
        for weights, threads in itertools.product((W, transposed(W), padded(W), fastmha.pack_weights(W)), (1, 2, 5)):
            for rows in (slice(0, 150), slice(3, 4), slice(5, 14), slice(20, 36), slice(40, 57)):
                got = fastmha.linear(x[rows], weights, b, activation=activation, residual=residual[rows], num_threads=threads)
                assert same_bits(got, expected[rows]), (K, N, threads, rows)


@dtypes
def test_arrays_of_any_strides_give_the_same_bits(isa, dtype):
    given = [normal(*s, seed=i, dtype=dtype) for i, s in enumerate([(3, 4, 40), (40, 19), (19,), (3, 4, 19)])]

    def result(x, W, b, residual, **keywords):
        return fastmha.linear(x, W, b, activation="relu", residual=residual, **keywords)

    expected = result(*given)
    assert expected.shape == (3, 4, 19)
    for i, operand in enumerate(given):
        for way, other in rearranged(operand):
            other.flags.writeable = False
            assert same_bits(result(*given[:i], other, *given[i + 1:]), expected), (i, way)
            assert same_bits(np.ascontiguousarray(other), operand), (i, way)
    for way, out in rearranged(np.zeros_like(expected)):
        assert result(*given, out=out) is out
        assert same_bits(np.ascontiguousarray(out), expected), way
    row, W = normal(40, seed=9, dtype=dtype), given[1]
    assert same_bits(fastmha.linear(np.broadcast_to(row, (6, 40)), W), np.repeat(fastmha.linear(row, W)[None], 6, axis=0))
    for way, weights in (("transposed", transposed(W)), *rearranged(W)):
        assert same_bits(fastmha.pack_weights(weights).memory, fastmha.pack_weights(W).memory), way
    grad, x = given[3], given[0]
    grads = fastmha.linear_backward(grad, x, W, given[2], activation="silu")
    for way, other in rearranged(grad):
        assert_same(fastmha.linear_backward(other, x, W, given[2], activation="silu"), grads, way)


@dtypes
def test_only_the_output_is_written(isa, dtype):
    for m, N in ((3, 17), (40, 33), (300, 65)):
        x, W, b, residual = operands(m, 20, N, dtype)
        around = np.full((m + 2, N + 3), np.nan, dtype)
        fastmha.linear(x, W, b, activation="silu", residual=residual, out=around[1:-1, 1:-2])
        assert np.isfinite(around[1:-1, 1:-2]).all()
        around[1:-1, 1:-2] = np.nan
        assert np.isnan(around).all()


@dtypes
def test_empty_axes_and_single_rows_work(isa, dtype):
    _, W, b, _ = operands(1, 5, 3, dtype)
    assert fastmha.linear(np.zeros((0, 5), dtype), W, b).shape == (0, 3)
    assert fastmha.linear(np.zeros((2, 0, 5), dtype), fastmha.pack_weights(W), b).shape == (2, 0, 3)
    assert fastmha.linear(np.zeros(5, dtype), W).shape == (3,)
    assert fastmha.linear(np.zeros((4, 5), dtype), W[:, :0]).shape == (4, 0)
    for weights in (W[:0], fastmha.pack_weights(W[:0])):
        nothing = fastmha.linear(np.zeros((2, 0), dtype), weights, b, activation="relu", residual=np.ones((2, 3), dtype))
        assert same_bits(nothing, np.repeat((np.maximum(b, 0) + dtype(1))[None], 2, axis=0))
    for shape in ((0, 5), (2, 0, 5), (5,)):
        x = np.zeros(shape, dtype)
        grads = fastmha.linear_backward(np.ones((*shape[:-1], 3), dtype), x, W, b, activation="gelu")
        assert [g.shape for g in grads] == [shape, (5, 3), (3,)]
    assert not fastmha.linear_backward(np.ones((0, 3), dtype), np.zeros((0, 5), dtype), W)[1].any()


@dtypes
@activations
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(isa, dtype, activation, poison):
    for m in (5, 40):
        x, W, b, residual = operands(m, 30, 70, dtype)
        expected = fastmha.linear(x, W, b, activation=activation, residual=residual)
        x[2, 7] = poison
        with np.errstate(all="raise"):
            got = fastmha.linear(x, W, b, activation=activation, residual=residual)
        others = np.arange(m) != 2
        assert same_bits(got[others], expected[others])
        wanted = reference.linear(x, W, b, activation=activation, residual=residual)[2]
        assert np.array_equal(np.isfinite(got[2]), np.isfinite(wanted))


@every_isa
@dtypes
@sizes
def test_gradients_are_within_the_bounds_of_their_sums(isa, dtype, size):
    x, W, b, grad = operands(*size, dtype, seed=1)
    grads = fastmha.linear_backward(grad, x, W, b)
    for weights in (transposed(W), padded(W)):
        assert_same(fastmha.linear_backward(grad, padded(x), weights, b, num_threads=2), grads)
    assert_product(grads[0], grad, W.T)
    assert_product(grads[1], x.T, grad)
    assert_product(grads[2][None], np.ones((1, len(x))), grad)
    assert_same(fastmha.linear_backward(grad, x, W), grads[:2])


@every_isa
@dtypes
@activations
@sizes
def test_gradients_with_an_activation_are_those_of_separate_steps(isa, dtype, activation, size):
    x, W, b, grad = operands(*size, dtype, seed=1)
    z = fastmha.linear(x, W, b)
    steps = {None: lambda g: g, "gelu": lambda g: fastmha.gelu_backward(g, z), "silu": lambda g: fastmha.silu_backward(g, z),
             "gelu_tanh": lambda g: fastmha.gelu_backward(g, z, approximate="tanh"), "relu": lambda g: np.where(z > 0, g, g * 0)}
    expected = fastmha.linear_backward(steps[activation](grad), x, W, b)
    for weights in (W, transposed(W)):
        assert_same(fastmha.linear_backward(grad, x, weights, b, activation=activation), expected)


@activations
@pytest.mark.parametrize("shape", [(4,), (2, 3), ()])
def test_the_specification_agrees(activation, shape):
    x, grad, residual = normal(*shape, 6), normal(*shape, 5, seed=2), normal(*shape, 5, seed=3)
    W, b = normal(6, 5, seed=4), normal(5, seed=5)
    for bias in (b, None):
        ours, wanted = (of.linear(x, W, bias, activation=activation, residual=residual) for of in (fastmha, reference))
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-14)
        grads = fastmha.linear_backward(grad, x, W, bias, activation=activation)
        for one, other in zip(grads, reference.linear_backward(grad, x, W, bias, activation=activation), strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)


@activations
def test_gradients_agree_with_central_differences(activation):
    x, W, b, residual = operands(4, 6, 5, np.float64, seed=2)
    grad = normal(4, 5, seed=3)

    def loss():
        return float((fastmha.linear(x, W, b, activation=activation, residual=residual) * grad).sum())

    for array, gradient in zip((x, W, b), fastmha.linear_backward(grad, x, W, b, activation=activation), strict=True):
        assert_gradient(gradient, loss, array)
    assert_gradient(grad, loss, residual, "residual")


# ------------------------------------------------------------------------------------------------------------- messages


def test_bad_arguments_are_named_with_what_came():
    x, W, b, residual = operands(4, 6, 5, np.float32)
    packed = fastmha.pack_weights(W)

    def both(error, message, *arguments, **keywords):
        with raises(error, message):
            fastmha.linear(*arguments, **keywords)
        with raises(error, message):
            fastmha.linear_backward(residual, *arguments, **keywords)

    both(ValueError, "x must have at least one axis, got a scalar", np.float32(1), W)
    both(TypeError, "x must be float32 or float64 (native byte order), got int64...", np.zeros((4, 6), int), W)
    both(ValueError, "W must have 2 axes (K, N), got shape (5,)", x, b)
    both(TypeError, "W has dtype float64 but x has float32: they must share one dtype", x, W.astype(float))
    both(ValueError, "x has width 5 on its last axis but W has 6 rows", x[:, 1:], W)
    both(ValueError, "b must have shape (5,), got (4,)", x, W, b[1:])
    both(TypeError, "b has dtype float64 but x has float32: they must share one dtype", x, W, b.astype(float))
    both(ValueError, 'activation must be "gelu", "gelu_tanh", "relu" or "silu", got \'swish\'', x, W, activation="swish")
    both(ValueError, 'activation must be "gelu", "gelu_tanh", "relu" or "silu", got [\'gelu\']', x, W, activation=["gelu"])
    both(ValueError, "num_threads must be at least 1, got 0", x, W, num_threads=0)
    with raises(TypeError, "W has dtype float32 but x has float64: they must share one dtype"):
        fastmha.linear(x.astype(float), packed)
    with raises(ValueError, "residual must have the result's shape (4, 5), got (5,)"):
        fastmha.linear(x, W, residual=b)
    with raises(TypeError, "residual has dtype float64 but x has float32: they must share one dtype"):
        fastmha.linear(x, W, residual=residual.astype(float))
    with raises(ValueError, "out must have shape (4, 5), got (5, 5)"):
        fastmha.linear(x, W, out=np.zeros((5, 5), np.float32))
    with raises(TypeError, "out has dtype float64 but x has float32: they must share one dtype"):
        fastmha.linear(x, W, out=np.zeros((4, 5)))
    wide, kept = np.zeros((4, 6), np.float32), residual.copy()
    for name, out, given in (("x", wide[:, :5], {"x": wide}), ("residual", kept, {"x": x, "residual": kept})):
        with raises(ValueError, f"out overlaps {name} in memory"):
            fastmha.linear(W=W, out=out, **given)
    with raises(TypeError, "linear has no keyword weight: it is W here, (in, out); bias: it is b here"):
        fastmha.linear(x, weight=W, bias=b)
    with raises(ValueError, "grad_out must have the result's shape (4, 5), got (4, 6)"):
        fastmha.linear_backward(x, x, W)
    with raises(TypeError, "grad_out has dtype float64 but x has float32: they must share one dtype"):
        fastmha.linear_backward(residual.astype(float), x, W)
    with raises(TypeError, "W must be the array of the weights for a backward pass, got PackedWeights"):
        fastmha.linear_backward(residual, x, packed)


def test_packed_weights_say_what_they_are_and_keep_to_one_instruction_set():
    W = normal(6, 5)
    packed = fastmha.pack_weights(W)
    isa = _core.selected_isa()[0]
    assert repr(packed) == f"PackedWeights(shape=(6, 5), dtype=float64, isa='{isa}')"
    assert packed.nbytes >= W.nbytes
    kept = packed.memory.copy()
    W[...] = 0
    assert same_bits(packed.memory, kept)
    with raises(TypeError, "PackedWeights hold the order of one instruction set: keep the weights, and pack them again"):
        pickle.dumps(packed)
    for other in ISAS:
        if other != isa:
            message = f'W is packed for "{isa}" but the instruction set is "{other}": pack it again'
            with selected(other), raises(ValueError, message):
                fastmha.linear(np.ones(6), packed)


@pytest.mark.parametrize(("tokens", "K", "N"), [(0, 3, 4), (5, 0, 4), (5, 3, 0), (5, 0, 0)])
def test_gradients_of_nothing(tokens, K, N):
    arrays = np.ones((tokens, 2, N)), np.ones((tokens, 2, K)), np.ones((K, N)), np.ones(N)
    for functions in (fastmha, fastmha.reference):
        grad_x, grad_W, grad_b = functions.linear_backward(*arrays)
        assert (grad_x.shape, grad_W.shape, grad_b.shape) == (arrays[1].shape, (K, N), (N,))
        assert (grad_x == N).all()
        assert (grad_W == 2 * tokens).all()
