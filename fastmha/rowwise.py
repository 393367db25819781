"""What stands around attention in a transformer: activations, layer normalisation and RMS normalisation, forward and backward."""
from __future__ import annotations

import sys
from numbers import Real
from typing import Any

import numpy as np

from fastmha import _core, threads, validate

_GELU = {"none": _core.ACTIVATIONS["gelu"], "tanh": _core.ACTIVATIONS["gelu_tanh"]}
_SILU = _core.ACTIVATIONS["silu"]
_NAMES = {
    "input": "it is x here", "inplace": "it is out=x here", "normalized_shape": "the last axis of x is normalised",
    "normalized_ndim": "the last axis of x is normalised", "epsilon": "it is eps here", "gamma": "it is weight here",
    "beta": "it is bias here",
}


@validate.own_keywords(_NAMES)
def gelu(x: np.ndarray, *, approximate: str = "none", out: np.ndarray | None = None,
         num_threads: int | None = None) -> np.ndarray:
    """The Gaussian error linear unit, x Φ(x) [1]_, of each number.

    Parameters
    ----------
    x : array of float32 or float64
        Any shape, any strides: only an array whose last axis is not unit-stride, that is not aligned, or whose leading axes lie
        at more than three strides, is copied.
    approximate : {"none", "tanh"}
        "none": Φ is the normal distribution function. "tanh": (1 + tanh(sqrt(2/π) (x + 0.044715 x³))) / 2 stands for it, as in
        GPT-2.
    out : array, optional
        Where to write the result. It may be x; otherwise it must not overlap it.
    num_threads : int, optional
        Threads for this call; default `fastmha.get_num_threads()`. The bits do not depend on it.

    Returns
    -------
    array of the shape of x
        0 at -inf, inf at inf, NaN at NaN.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came.

    Notes
    -----
    Right to a few units in the last place of the result, also where x is far below 0; with "tanh" to that times ``1 + |log Φ|``.
    Numbers below the smallest normal one of the dtype count as 0, as operands and as results.

    References
    ----------
    .. [1] Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> fastmha.gelu(np.array([-1.0, 0.0, 1.0])).round(4).tolist()
    [-0.1587, 0.0, 0.8413]
    """
    return _activation(_gelu(approximate), x, out, num_threads)


@validate.own_keywords(_NAMES)
def gelu_backward(grad_output: np.ndarray, x: np.ndarray, *, approximate: str = "none",
                  num_threads: int | None = None) -> np.ndarray:
    """Gradient of `gelu` with respect to x.

    Parameters
    ----------
    grad_output, x : arrays of one shape and dtype, float32 or float64
        Gradient of the loss with respect to the result, and what `gelu` was given. Strides as there.
    approximate, num_threads
        As in `gelu`.

    Returns
    -------
    array of the shape of x
        grad_output ∘ (Φ(x) + x φ(x)), φ the density; with "tanh" grad_output ∘ (s + 2 x s (1 - s) u'), u the argument of tanh and
        s = (1 + tanh u) / 2.

    Raises
    ------
    ValueError, TypeError
        As `gelu`; also for arrays whose shapes or dtypes do not fit together.
    """
    return _activation_backward(_gelu(approximate), grad_output, x, num_threads)


@validate.own_keywords(_NAMES)
def silu(x: np.ndarray, *, out: np.ndarray | None = None, num_threads: int | None = None) -> np.ndarray:
    """The sigmoid linear unit (swish), x / (1 + exp(-x)) [1]_, of each number.

    Parameters
    ----------
    x, out, num_threads
        As in `gelu`.

    Returns
    -------
    array of the shape of x
        0 at -inf, inf at inf, NaN at NaN; right to a few units in the last place.

    Raises
    ------
    ValueError, TypeError
        As `gelu`.

    References
    ----------
    .. [1] Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function approximation in reinforcement
       learning", 2018.
    """
    return _activation(_SILU, x, out, num_threads)


@validate.own_keywords(_NAMES)
def silu_backward(grad_output: np.ndarray, x: np.ndarray, *, num_threads: int | None = None) -> np.ndarray:
    """Gradient of `silu` with respect to x.

    Parameters
    ----------
    grad_output, x, num_threads
        As in `gelu_backward`.

    Returns
    -------
    array of the shape of x
        grad_output ∘ s (1 + x (1 - s)), s = 1 / (1 + exp(-x)).

    Raises
    ------
    ValueError, TypeError
        As `gelu_backward`.
    """
    return _activation_backward(_SILU, grad_output, x, num_threads)


@validate.own_keywords(_NAMES)
def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, eps: float = 1e-5,
               residual: np.ndarray | None = None, *, out: np.ndarray | None = None,
               num_threads: int | None = None) -> np.ndarray:
    """Layer normalisation over the last axis [1]_, of x or of x + residual.

    Parameters
    ----------
    x : (..., n) array of float32 or float64
        Any leading axes, strides as in `gelu`.
    weight : (n,) array of the dtype of x
    bias : (n,) array of the dtype of x, optional
    eps : float
        At least 0; added to the variance.
    residual : array of the shape and dtype of x, optional
        Added to x before all else.
    out : array, optional
        Where to write the result. It may be x; otherwise it must overlap no input.
    num_threads : int, optional
        Threads for this call; default `fastmha.get_num_threads()`. The bits do not depend on it.

    Returns
    -------
    (..., n) array
        (z - mean(z)) / sqrt(var(z) + eps) · weight + bias with z = x + residual; var is the mean of (z - mean(z))².

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came.

    Notes
    -----
    Mean and variance come from two passes over a row, in an order fixed by n, and are right for rows of any size, and where the
    mean is large beside the deviation. A NaN or Inf in a row makes that row NaN, and no other.

    References
    ----------
    .. [1] Ba, Kiros and Hinton, "Layer normalization", 2016, equations (3) and (4).

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> x = np.array([[1.0, 2.0, 3.0, 4.0]])
    >>> fastmha.layer_norm(x, np.ones(4), np.zeros(4)).round(3).tolist()
    [[-1.342, -0.447, 0.447, 1.342]]
    """
    return _norm(True, x, weight, bias, eps, residual, out, num_threads)


@validate.own_keywords(_NAMES)
def layer_norm_backward(
    grad_output: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, eps: float = 1e-5,
    residual: np.ndarray | None = None, *, num_threads: int | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of `layer_norm` with respect to x (and residual), weight and bias.

    Parameters
    ----------
    grad_output : array of the shape and dtype of x
        Gradient of the loss with respect to the result.
    x, weight, bias, eps, residual, num_threads
        As in `layer_norm`; of bias only whether there is one counts.

    Returns
    -------
    grad_x : array of the shape of x
        (g - mean(g) - h mean(g h)) / sqrt(var + eps) with g = grad_output · weight and h = (z - mean(z)) / sqrt(var + eps), whose
        statistics are computed anew. It is the gradient of residual as well.
    grad_weight : (n,) array
        The sum of grad_output · h over all rows: of 32 rows at a time, in their order, then of these sums in theirs.
    grad_bias : (n,) array, where there is a bias
        The sum of grad_output over all rows, likewise.

    Raises
    ------
    ValueError, TypeError
        As `layer_norm`; also for a grad_output of another shape or dtype.
    """
    return _norm_backward(True, grad_output, x, weight, bias, eps, residual, num_threads)


@validate.own_keywords(_NAMES)
def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6, *, residual: np.ndarray | None = None,
             out: np.ndarray | None = None, num_threads: int | None = None) -> np.ndarray:
    """Normalisation by the root of the mean square over the last axis [1]_, of x or of x + residual.

    Parameters
    ----------
    x, weight, eps, residual, out, num_threads
        As in `layer_norm`; eps is added to the mean square.

    Returns
    -------
    (..., n) array
        z / sqrt(mean(z²) + eps) · weight with z = x + residual. Of a row with NaN in it all is NaN; beside an Inf, which
        becomes NaN, what is finite becomes 0.

    Raises
    ------
    ValueError, TypeError
        As `layer_norm`.

    References
    ----------
    .. [1] Zhang and Sennrich, "Root mean square layer normalization", 2019, equation (4).
    """
    return _norm(False, x, weight, None, eps, residual, out, num_threads)


@validate.own_keywords(_NAMES)
def rms_norm_backward(
    grad_output: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float = 1e-6, *, residual: np.ndarray | None = None,
    num_threads: int | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of `rms_norm` with respect to x (and residual) and weight.

    Parameters
    ----------
    grad_output, x, weight, eps, residual, num_threads
        As in `layer_norm_backward`.

    Returns
    -------
    grad_x : array of the shape of x
        (g - h mean(g h)) / sqrt(mean(z²) + eps) with g = grad_output · weight and h = z / sqrt(mean(z²) + eps). It is the
        gradient of residual as well.
    grad_weight : (n,) array
        As in `layer_norm_backward`.

    Raises
    ------
    ValueError, TypeError
        As `layer_norm_backward`.
    """
    return _norm_backward(False, grad_output, x, weight, None, eps, residual, num_threads)


# ------------------------------------------------------------------------------------------------ what they share

def _gelu(approximate: Any) -> int:
    return _GELU[validate.choice("approximate", approximate, ("none", "tanh"))]


def _activation(kind: int, x: Any, out: Any, num_threads: int | None) -> np.ndarray:
    x = validate.floats("x", x)
    result = np.empty(x.shape, x.dtype) if out is None else _output(out, x, {"x": x})
    workers = threads.resolve(num_threads)
    target, (x, y) = _as_rows(result, [x], single=True)
    if x.size:
        _core.activation_rows(kind, None, x, y, workers)
    return _kept(result, target)


def _activation_backward(kind: int, grad_output: Any, x: Any, num_threads: int | None) -> np.ndarray:
    x = validate.floats("x", x)
    grad_output = _like_x("grad_output", grad_output, x)
    grad = np.empty(x.shape, x.dtype)
    workers = threads.resolve(num_threads)
    _, (grad_output, x, y) = _as_rows(grad, [grad_output, x], single=True)
    if x.size:
        _core.activation_rows(kind, grad_output, x, y, workers)
    return grad


def _norm(centered: bool, x: Any, weight: Any, bias: Any, eps: Any, residual: Any, out: Any,
          num_threads: int | None) -> np.ndarray:
    x, weight, bias, eps, residual = _norm_arguments(x, weight, bias, eps, residual)
    inputs = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    result = np.empty(x.shape, x.dtype) if out is None else _output(out, x, inputs)
    workers = threads.resolve(num_threads)
    target, operands = _as_rows(result, [x] if residual is None else [x, residual])
    if x.size:
        _core.norm_rows(operands[0], None if residual is None else operands[1], _line(weight), _line(bias), operands[-1], eps,
                        centered, workers)
    return _kept(result, target)


def _norm_backward(centered: bool, grad_output: Any, x: Any, weight: Any, bias: Any, eps: Any, residual: Any,
                   num_threads: int | None) -> tuple[np.ndarray, ...]:
    x, weight, bias, eps, residual = _norm_arguments(x, weight, bias, eps, residual)
    grad_output = _like_x("grad_output", grad_output, x)
    workers = threads.resolve(num_threads)
    n = x.shape[-1]
    grad_x, sums = np.empty(x.shape, x.dtype), np.zeros((1 if bias is None else 2, n), x.dtype)
    if x.size:
        _, operands = _as_rows(grad_x, [grad_output, x] if residual is None else [grad_output, x, residual])
        partials = np.empty((-(-(x.size // n) // _core.SUMMED_ROWS), sums.size), x.dtype)
        _core.norm_rows_backward(operands[0], operands[1], None if residual is None else operands[2], _line(weight),
                                 operands[-1], partials, sums, eps, centered, workers)
    return (grad_x, *sums)


def _norm_arguments(x: Any, weight: Any, bias: Any, eps: Any,
                    residual: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, float, np.ndarray | None]:
    x = validate.floats("x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a scalar")
    weight = _of_width("weight", weight, x)
    bias = None if bias is None else _of_width("bias", bias, x)
    residual = None if residual is None else _like_x("residual", residual, x)
    number = type(eps) is float or (isinstance(eps, Real) and not isinstance(eps, (bool, np.bool_)))
    if not number:
        raise TypeError(f"eps must be a finite number >= 0, got {validate.short(eps)}")
    if not 0 <= eps <= sys.float_info.max:
        raise ValueError(f"eps must be a finite number >= 0, got {validate.short(eps)}")
    return x, weight, bias, float(eps), residual


def _like_x(name: str, array: Any, x: np.ndarray) -> np.ndarray:
    array = validate.floats(name, array)
    validate.same_dtype(name, array, "x", x.dtype)
    if array.shape != x.shape:
        raise ValueError(f"{name} must have the shape of x, {x.shape}, got {array.shape}")
    return array


def _of_width(name: str, array: Any, x: np.ndarray) -> np.ndarray:
    array = validate.floats(name, array)
    validate.same_dtype(name, array, "x", x.dtype)
    if array.shape != x.shape[-1:]:
        raise ValueError(f"{name} must have shape {x.shape[-1:]}, as the last axis of x, got {array.shape}")
    return array


def _line(array: Any) -> Any:
    """weight or bias as the kernels take it."""
    if array is None or (array.flags.c_contiguous and array.flags.aligned):
        return array
    return np.require(array, None, ("C", "A"))      # slow to find out that there is nothing to do


def _output(out: Any, x: np.ndarray, inputs: dict[str, Any]) -> np.ndarray:
    """out after its checks: it may be x itself."""
    if out is x or (isinstance(out, np.ndarray) and out.strides == x.strides and _address(out) == _address(x)):
        inputs = {name: array for name, array in inputs.items() if name != "x"}
    return validate.output(out, x.shape, x.dtype, inputs, "x")


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _as_rows(y: np.ndarray, inputs: list[np.ndarray], single: bool = False) -> tuple[np.ndarray, list[np.ndarray]]:
    """Arrays of one shape, views where that can be, as the kernels count through their rows: all with the same at most 4 axes.

    Returns where the result will be, y or an array in its place, and [*inputs, that]. `single`: rows need not stay apart.
    """
    arrays = [*inputs, y]
    if not all(a.flags.c_contiguous and a.flags.aligned for a in arrays):
        merged = _merged(arrays)
        if merged is not None:
            return y, [a.reshape(merged) for a in arrays]
        arrays = [np.require(a, None, ("C", "A")) for a in inputs]
        arrays.append(y if y.flags.c_contiguous and y.flags.aligned else np.empty(y.shape, y.dtype))
    shape = (-1,) if single else (-1, y.shape[-1])
    return arrays[-1], [a.reshape(shape) for a in arrays] if y.size else arrays


def _merged(arrays: list[np.ndarray]) -> tuple[int, ...] | None:
    """The shape of these arrays with leading axes made one where they lie at one stride in all; None where a copy is needed."""
    *leading, n = arrays[0].shape or (1,)
    if arrays[0].size == 0 or not all(_core.in_place(a) for a in arrays):
        return None
    lengths: list[int] = []
    last: tuple[int, ...] = ()
    for axis, length in enumerate(leading):
        strides = tuple(a.strides[axis] for a in arrays)
        if length == 1:
            continue
        if lengths and all(before == stride * length for before, stride in zip(last, strides)):
            lengths[-1] *= length
        else:
            lengths.append(length)
        last = strides
    return (*lengths, n) if len(lengths) <= 3 else None


def _kept(result: np.ndarray, target: np.ndarray) -> np.ndarray:
    if target is not result:
        result[...] = target
    return result
