"""Layer and RMS normalisation, forward and backward, on every instruction set.

The oracle has more digits: float64 for float32, NumPy's long double for float64. The bounds follow the roundings, u = eps / 2 of
each result, through the formulas to first order: see `bounds`.
"""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from support import dtypes, fails, rearranged, same_bits, unaligned

import fastmha
from fastmha import _core, reference

WIDER = {np.float32: np.float64, np.float64: np.longdouble}
NORMS = ["layer_norm", "rms_norm"]
norms = pytest.mark.parametrize("norm", NORMS)
with_residual = pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])


def mean(x):
    return x.mean(axis=-1, keepdims=True)


def bounds(norm, g, x, weight, bias, eps, residual, dtype):
    """How far y, grad_x, grad_weight and grad_bias may be from the exact results, an element each.

    A sum over n numbers is at least 4 sums of every 4th, with a few more to add these up: each is right to n / 4 + 8 roundings
    of the sum of sizes. The mean is corrected by the mean of the differences from it, so that it is right to roundings of these.
    """
    centered, n, rows = norm == "layer_norm", x.shape[-1], x.size // max(1, x.shape[-1])
    u, tiny = np.finfo(dtype).eps / 2, np.finfo(dtype).tiny
    k, summed = n / 4 + 10, min(rows, _core.SUMMED_ROWS) + rows / _core.SUMMED_ROWS + 4
    z = x if residual is None else x + residual
    of_z = np.zeros_like(z) if residual is None else u * np.abs(z)
    d, shift = (z - mean(z), k * u * mean(np.abs(z))) if centered else (z, 0)
    of_d = of_z + u * (np.abs(d) + shift)
    of_square = k * u * mean(d * d + shift * shift) + 2 * mean(np.abs(d) * of_d)
    if centered:
        of_d = of_d + mean(of_z) + k * u * mean(np.abs(d) + shift) + u * np.abs(d)
    variance = mean(d * d) + eps
    sigma = np.sqrt(variance)
    with np.errstate(all="ignore"):
        of_sigma = of_square / variance / 2 + 4 * u        # relative
        h = d / sigma
        of_h = of_d / sigma + np.abs(h) * of_sigma
        y = h * weight + (0 if bias is None else bias)
        of_y = np.abs(weight) * of_h + u * np.abs(h * weight) + u * np.abs(y)
        dz = g * weight
        m, share = mean(dz) if centered else 0, mean(dz * h)
        of_mean = k * u * mean(np.abs(dz)) if centered else 0
        of_share = (k + 2) * u * mean(np.abs(dz * h)) + mean(np.abs(dz) * of_h)
        inner = np.abs(dz) + np.abs(m) + np.abs(h * share)
        of_inner = of_mean + np.abs(h) * of_share + np.abs(share) * of_h + 4 * u * inner
        of_grad = of_inner / sigma + np.abs(dz - m - h * share) / sigma * (of_sigma + 2 * u)
    axes = tuple(range(x.ndim - 1))
    of_weight = (summed * u * np.abs(g * h) + np.abs(g) * of_h).sum(axis=axes)
    of_bias = (summed * u * np.abs(g)).sum(axis=axes)
    safety = 1.01       # what is of second order
    return [safety * b + tiny for b in (of_y, of_grad, of_weight, of_bias)]


def run(norm, functions, g, x, weight, bias, eps, residual, **keywords):
    """y, grad_x, grad_weight and for layer_norm with a bias grad_bias."""
    forward, backward = getattr(functions, norm), getattr(functions, f"{norm}_backward")
    if norm == "rms_norm":
        y = forward(x, weight, eps, residual=residual, **keywords)
        return y, *backward(g, x, weight, eps, residual=residual, **keywords)
    y = forward(x, weight, bias, eps, residual, **keywords)
    return y, *backward(g, x, weight, bias, eps, residual, **keywords)


def check(norm, g, x, weight, bias, eps, residual):
    dtype = x.dtype.type
    wide = [None if a is None else a.astype(WIDER[dtype]) for a in (g, x, weight, bias, residual)]
    *arrays, r = wide
    got = run(norm, fastmha, g, x, weight, bias, eps, residual)
    wanted = run(norm, reference, *arrays, eps, r)
    allowed = bounds(norm, *arrays, eps, r, dtype)
    assert len(got) == len(wanted) == (4 if norm == "layer_norm" and bias is not None else 3)
    for name, a, b, bound in zip(("y", "grad_x", "grad_weight", "grad_bias"), got, wanted, allowed):
        assert a.dtype == dtype, name
        assert a.shape == b.shape, name
        error = np.abs(a - b)
        beyond = ~(error <= bound)
        assert not beyond.any(), f"{name}: {error[beyond][0]:.3g} > {np.broadcast_to(bound, a.shape)[beyond][0]:.3g}"
    return got


def draw(rng, shape, dtype, residual=True):
    g, x, r = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    weight, bias = rng.standard_normal((2, shape[-1])).astype(dtype)
    return g, x, weight, bias, r if residual else None


@with_residual
@dtypes
@norms
def test_every_width_is_within_its_bounds(isa, dtype, norm, residual, rng):
    for n in [*range(1, 71), 127, 128, 129, 384, 768, 1000]:
        g, x, weight, bias, r = draw(rng, (1 + n % 4, n), dtype, residual)
        if n < 3:
            x = x * dtype(0.01)     # beside eps: two numbers are ±1, whatever they are, and their gradient cancels
        check(norm, g, x, weight, bias if n % 3 else None, 1e-5, r)


# Rows at which rounding has most to say.
ILL = {
    "far from 0": lambda x: x + 1000,
    "very far from 0": lambda x: x + 30000,
    "few of it": lambda x: np.where(np.arange(x.shape[-1]) == 3, 100, x / 100),
    "small": lambda x: x * 1e-4,
    "large": lambda x: x * 1e4,
}


@with_residual
@pytest.mark.parametrize("kind", ILL)
@dtypes
@norms
def test_ill_scaled_rows_are_within_their_bounds(isa, dtype, norm, kind, residual, rng):
    g, x, weight, bias, r = draw(rng, (5, 300), dtype, residual)
    x, r = (None if a is None else ILL[kind](a).astype(dtype) for a in (x, r))
    check(norm, g, x, weight, bias, 1e-5, r)


@dtypes
def test_the_mean_of_a_row_far_from_0_is_right_to_its_differences(isa, dtype, rng):
    """Not to the rounding of the mean itself, which were 200 of these."""
    x = (1000 + rng.standard_normal((20, 768))).astype(dtype)
    one, none = np.ones(768, dtype), np.zeros(768, dtype)
    exact = reference.layer_norm(x.astype(WIDER[dtype]), one, none)
    assert np.abs(fastmha.layer_norm(x, one, none) - exact).max() <= 6 * np.finfo(dtype).eps


@pytest.mark.parametrize("power", [-0.9, -0.6, 0.6, 0.9, 0.999])
@dtypes
@norms
def test_rows_whose_squares_over_or_underflow_are_right(isa, dtype, norm, power, rng):
    """Without eps the result does not depend on the size; grad_x is divided by it."""
    size = dtype(2.0) ** int(power * (126 if dtype == np.float32 else 1022))
    _, x, weight, bias, r = draw(rng, (4, 70), dtype)
    x, r = np.clip(x, -3, 3) / 4, np.clip(r, -3, 3) / 4
    g = rng.standard_normal((4, 70)).astype(dtype)
    for residual in (None, r):
        plain = run(norm, fastmha, g, x, weight, bias, 0, residual)
        scaled = run(norm, fastmha, g, x * size, weight, bias, 0, None if residual is None else residual * size)
        eps, tiny = np.finfo(dtype).eps, np.finfo(dtype).tiny
        for i, (a, b) in enumerate(zip(plain, scaled, strict=True)):
            b = b.astype(WIDER[dtype]) * (size if i == 1 else 1)
            lost = tiny * size if i == 1 and size > 1 else 0        # of what the size makes too small
            assert np.abs(a - b).max() <= 60 * eps * np.abs(a).max() + lost


@dtypes
def test_constant_rows_are_the_bias_at_any_size(isa, dtype):
    largest = np.finfo(dtype).max
    weight, bias = np.full(37, dtype(2)), np.arange(37, dtype=dtype)
    for value in (0, 1e-30, 0.1, 7.3, 1e10, largest / 3, largest, -largest):
        y = fastmha.layer_norm(np.full((2, 37), dtype(value)), weight, bias)
        assert np.abs(y - bias).max() <= 1e-3 * (np.abs(value) < 1e11) + 1e-30, value
        assert np.isfinite(fastmha.rms_norm(np.full((2, 37), dtype(value)), weight)).all()


@norms
def test_gradients_equal_central_differences(isa, norm, rng):
    g, x, weight, bias, r = draw(rng, (3, 2, 7), np.float64)
    grads = run(norm, fastmha, g, x, weight, bias, 1e-2, r)[1:]
    for array, grad in zip((x, weight, bias), grads):
        numeric = np.empty_like(array)
        for at in np.ndindex(array.shape):
            kept, sides = array[at], []
            for step in (1e-6, -1e-6):
                array[at] = kept + step
                sides.append((g * run(norm, fastmha, g, x, weight, bias, 1e-2, r)[0]).sum())
            array[at] = kept
            numeric[at] = (sides[0] - sides[1]) / 2e-6
        np.testing.assert_allclose(grad, numeric, rtol=1e-6, atol=1e-7)
    in_r = run(norm, fastmha, g, r, weight, bias, 1e-2, x)[1]
    assert np.abs(in_r - grads[0]).max() < 1e-14


@norms
def test_numbers_counted_by_hand(norm):
    x, weight, bias = np.array([[3.0, -1.0]]), np.array([2.0, 10.0]), np.array([0.5, 0.0])
    if norm == "layer_norm":        # mean 1, variance 4
        np.testing.assert_allclose(fastmha.layer_norm(x, weight, bias, 0.0), [[2.5, -10]])
        np.testing.assert_allclose(fastmha.layer_norm(x - 5, weight, None, 0.0, np.full((1, 2), 5.0)), [[2, -10]])
    else:                           # mean square 5
        np.testing.assert_allclose(fastmha.rms_norm(x, weight, 0.0), [[6 / 5**0.5, -10 / 5**0.5]])


@dtypes
def test_a_row_of_equal_numbers_without_eps_is_not_a_number_and_warns_of_nothing(isa, dtype):
    y = fastmha.layer_norm(np.ones((2, 4), dtype), np.ones(4, dtype), eps=0)
    assert np.isnan(y).all()
    assert np.isnan(fastmha.rms_norm(np.zeros((2, 4), dtype), np.ones(4, dtype), 0)).all()


# ------------------------------------------------------------------------------------------------------ memory and bits


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@dtypes
@norms
def test_what_is_no_number_stays_in_its_row_and_column(isa, dtype, norm, value, rng):
    g, x, weight, bias, r = draw(rng, (6, 37), dtype)
    clean = run(norm, fastmha, g, x, weight, bias, 1e-5, r)
    rest = np.arange(6) != 2
    for operand in range(3):
        arrays = [g.copy(), x.copy(), r.copy()]
        arrays[operand][2, 36] = value
        y, grad, grad_weight, *_ = run(norm, fastmha, arrays[0], arrays[1], weight, bias, 1e-5, arrays[2])
        assert same_bits(y[rest], clean[0][rest])
        assert same_bits(grad[rest], clean[1][rest])
        if operand:
            assert np.isnan(y[2]).any()
            assert np.isnan(grad_weight).any()
        else:
            assert same_bits(y, clean[0])
            assert same_bits(grad_weight[:36], clean[2][:36])
            assert not np.isfinite(grad_weight[36])


SHAPES = [(0,), (3, 0), (0, 5), (7,), (4, 1), (2, 3, 5), (3, 1, 2, 7), (5, 4, 7, 33), (2, 2, 3, 2, 2, 5), (300, 70)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtypes
@norms
def test_any_strides_give_the_same_bits(isa, dtype, norm, shape, rng):
    g, x, weight, bias, r = draw(rng, shape, dtype)
    wanted = run(norm, fastmha, g, x, weight, bias, 1e-5, r)
    assert wanted[0].shape == wanted[1].shape == shape
    assert all(a.shape == shape[-1:] for a in wanted[2:])
    for (name, a), (_, b), (_, c) in zip(rearranged(g), rearranged(x), rearranged(r), strict=True):
        for operands in ((a, b, c), (g, b, r), (a, x, c), (g, x, c)):
            got = run(norm, fastmha, operands[0], operands[1], np.repeat(weight, 3)[::3], unaligned(bias), 1e-5, operands[2])
            for p, q in zip(got, wanted, strict=True):
                assert same_bits(p, q), name
                assert p.flags.c_contiguous, name
        assert same_bits(b, x), name


def test_no_copy_is_made_of_rows_at_up_to_three_strides(monkeypatch):
    seen = []
    real = _core.norm_rows
    monkeypatch.setattr(_core, "norm_rows", lambda *operands: seen.append(operands[:5]) or real(*operands))
    weight = np.ones(8)
    for x in (
        np.ones((6, 12))[:, 2:10], np.ones((2, 3, 5, 8)).swapaxes(0, 2), np.ones((4, 5, 6, 9))[::-2, ::2, 1:, :8],
        np.broadcast_to(np.ones(8), (3, 7, 8)), np.ones((2, 2, 2, 2, 2, 9))[..., :8],
    ):
        y = fastmha.rms_norm(x, weight, residual=x)
        given, residual, _, _, to = seen.pop()
        assert np.shares_memory(given, x)
        assert np.shares_memory(residual, x)
        assert np.shares_memory(to, y)
        assert given.ndim <= 4
    fastmha.rms_norm(np.ones((6, 8, 3)).swapaxes(1, 2), weight)     # its last axis is not unit-stride
    assert seen.pop()[0].flags.c_contiguous
    fastmha.rms_norm(unaligned(np.ones((6, 8))), weight)
    assert seen.pop()[0].flags.aligned


@dtypes
@norms
def test_a_row_does_not_depend_on_its_place(isa, dtype, norm, rng):
    g, x, weight, bias, r = draw(rng, (70, 133), dtype)
    y, grad, *_ = run(norm, fastmha, g, x, weight, bias, 1e-5, r)
    for row in (0, 31, 32, 69):
        part = slice(row, row + 1)
        alone = run(norm, fastmha, g[part], x[part], weight, bias, 1e-5, r[part])
        assert same_bits(alone[0], y[part])
        assert same_bits(alone[1], grad[part])


@dtypes
@norms
def test_n_threads_agnosticism(isa, dtype, norm, rng):
    for shape in ((700, 130), (20000, 3), (3, 40000), (33, 1000)):
        operands = draw(rng, shape, dtype)
        one = run(norm, fastmha, *operands[:4], 1e-5, operands[4], num_threads=1)
        for threads in (2, 3, 7):
            for a, b in zip(run(norm, fastmha, *operands[:4], 1e-5, operands[4], num_threads=threads), one, strict=True):
                assert same_bits(a, b)


def test_work_for_one_thread_starts_no_other(tmp_path):
    """54 rows are two items of the backward pass, of 16200 numbers."""
    code = """
        import numpy as np, fastmha
        from fastmha import _core
        for rows in (54, 64):
            x = np.ones((rows, 300))
            fastmha.layer_norm(x, x[0], num_threads=2)
            fastmha.gelu(x, num_threads=2)
            fastmha.layer_norm_backward(x, x, x[0], num_threads=2)
            print(_core.pool_workers())
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.stdout.split() == ["0", "1"], ran.stderr


@dtypes
def test_sums_over_rows_are_of_32_rows_each_in_order(isa, dtype, rng):
    """grad_bias shows it: the sums of the specified order, exactly."""
    g, x, weight, bias, _ = draw(rng, (150, 21), dtype)
    total = np.zeros(21, dtype)
    for start in range(0, 150, _core.SUMMED_ROWS):
        part = np.zeros(21, dtype)
        for row in g[start : start + _core.SUMMED_ROWS]:
            part += row
        total += part
    assert same_bits(fastmha.layer_norm_backward(g, x, weight, bias)[2], total)


def test_without_rows_the_gradients_of_the_parameters_are_0():
    x, weight = np.ones((0, 5)), np.ones(5)
    grad_x, grad_weight, grad_bias = fastmha.layer_norm_backward(x, x, weight, weight)
    assert grad_x.shape == (0, 5)
    assert grad_weight.tolist() == grad_bias.tolist() == [0] * 5
    assert len(fastmha.layer_norm_backward(x, x, weight)) == 2


@with_residual
@norms
def test_in_place_and_into_given_memory(isa, norm, residual, rng):
    g, x, weight, bias, r = draw(rng, (5, 3, 45), np.float64, residual)
    y = run(norm, fastmha, g, x, weight, bias, 1e-5, r)[0]
    function = fastmha.rms_norm if norm == "rms_norm" else fastmha.layer_norm
    keywords = {"residual": r, "eps": 1e-5} | ({"bias": bias} if norm == "layer_norm" else {})
    for name, memory in rearranged(x):
        assert function(memory, weight, out=memory, **keywords) is memory, name
        assert same_bits(memory, y), name
    for name, memory in rearranged(np.zeros(x.shape)):
        assert function(x, weight, out=memory, **keywords) is memory, name
        assert same_bits(memory, y), name


@norms
def test_inputs_are_not_written(norm, rng):
    operands = [a.copy() for a in draw(rng, (40, 9), np.float32)]
    for a in operands:
        a.flags.writeable = False
    run(norm, fastmha, *operands[:4], 1e-5, operands[4])


# --------------------------------------------------------------------------------------------------------------- errors

X, W = np.ones((3, 4), np.float32), np.ones(4, np.float32)
MESSAGES = {
    "a number": (lambda: fastmha.layer_norm(np.float32(1), W), ValueError, r"^x must have at least one axis, got a scalar$"),
    "integers": (lambda: fastmha.rms_norm(np.ones((3, 4), int), W), TypeError, r"^x must be float32 or float64 .*got int64"),
    "weight, None": (lambda: fastmha.layer_norm(X, None), TypeError, r"^weight must be float32 or float64.*got None$"),
    "weight, dtype": (lambda: fastmha.layer_norm(X, W.astype(float)), TypeError, r"^weight has dtype float64 but x has float32"),
    "weight, shape": (lambda: fastmha.rms_norm(X, W[:3]), ValueError,
                      r"^weight must have shape \(4,\), as the last axis of x, got \(3,\)$"),
    "bias, shape": (lambda: fastmha.layer_norm(X, W, X), ValueError,
                    r"^bias must have shape \(4,\), as the last axis of x, got \(3, 4\)$"),
    "bias, dtype": (lambda: fastmha.layer_norm(X, W, W.astype(float)), TypeError, r"^bias has dtype float64 but x has float32"),
    "eps, type": (lambda: fastmha.layer_norm(X, W, W, "1e-5"), TypeError, r"^eps must be a finite number >= 0, got '1e-5'$"),
    "eps, bool": (lambda: fastmha.rms_norm(X, W, True), TypeError, r"^eps must be a finite number >= 0, got True$"),
    "eps, no float": (lambda: fastmha.layer_norm(X, W, W, 10**400), ValueError, r"^eps must be a finite number >= 0, got an int"),
    "eps, sign": (lambda: fastmha.rms_norm(X, W, -1e-6), ValueError, r"^eps must be a finite number >= 0, got -1e-06$"),
    "eps, nan": (lambda: fastmha.rms_norm_backward(X, X, W, np.nan), ValueError, r"^eps must be a finite number >= 0, got nan$"),
    "eps, inf": (lambda: fastmha.layer_norm_backward(X, X, W, W, np.inf), ValueError,
                 r"^eps must be a finite number >= 0, got inf$"),
    "residual, shape": (lambda: fastmha.layer_norm(X, W, residual=X[:1]), ValueError,
                        r"^residual must have the shape of x, \(3, 4\), got \(1, 4\)$"),
    "residual, dtype": (lambda: fastmha.rms_norm(X, W, residual=X.astype(float)), TypeError,
                        r"^residual has dtype float64 but x has float32"),
    "gradient, shape": (lambda: fastmha.layer_norm_backward(X[:2], X, W), ValueError,
                        r"^grad_output must have the shape of x, \(3, 4\), got \(2, 4\)$"),
    "gradient, dtype": (lambda: fastmha.rms_norm_backward(X.astype(float), X, W), TypeError,
                        r"^grad_output has dtype float64 but x has float32"),
    "threads": (lambda: fastmha.layer_norm(X, W, num_threads=0), ValueError, r"^num_threads must be at least 1, got 0$"),
    "out, shape": (lambda: fastmha.layer_norm(X, W, out=X[:2].copy()), ValueError,
                   r"^out must have shape \(3, 4\), got \(2, 4\)$"),
    "out, dtype": (lambda: fastmha.rms_norm(X, W, out=np.ones((3, 4))), TypeError, r"^out has dtype float64 but x has float32"),
    "out and residual": (lambda: fastmha.layer_norm(X.copy(), W, residual=X, out=X), ValueError,
                         r"^out overlaps residual in memory$"),
    "out and x in part": (lambda: fastmha.rms_norm(X[:2], W, out=X[1:]), ValueError, r"^out overlaps x in memory$"),
    "out and weight": (lambda: fastmha.layer_norm(X, X[0], out=X), ValueError, r"^out overlaps weight in memory$"),
    "out and bias": (lambda: fastmha.layer_norm(X, W, X[1], out=X), ValueError, r"^out overlaps bias in memory$"),
    "torch's names": (lambda: fastmha.layer_norm(X, normalized_shape=(4,)), TypeError,
                      r"^layer_norm has no keyword normalized_shape: the last axis of x is normalised$"),
    "other names": (lambda: fastmha.layer_norm(X, gamma=W, beta=W), TypeError,
                    r"^layer_norm has no keyword gamma: it is weight here; beta: it is bias here$"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    fails(*MESSAGES[name])
