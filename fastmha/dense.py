"""The dense layer: `linear` on the kernels' own product, its backward pass, and weights packed once."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastmha import _core, algorithms, threads, validate

_ACTIVATIONS = tuple(name for name in _core.ACTIVATIONS if name is not None)
_NAMES = {"input": "it is x here", "weight": "it is W here, (in, out)", "bias": "it is b here"}


class PackedWeights:
    """Weights in the order in which the kernels' own product reads them; made by `pack_weights`.

    Attributes
    ----------
    shape : (K, N)
        Of the weights that were packed.
    dtype : dtype
        float32 or float64.
    isa : str
        Instruction set for whose vectors they are packed.
    nbytes : int
        What they hold: K times N rounded up to whole vectors.
    memory : array
        That, read-only.
    """

    __slots__ = ("isa", "memory", "shape")

    def __init__(self, W: np.ndarray) -> None:
        self.shape: tuple[int, int] = (W.shape[0], W.shape[1])
        self.isa, _ = _core.selected_isa()
        self.memory = algorithms.packed_weights(W)
        self.memory.setflags(write=False)

    @property
    def dtype(self) -> np.dtype:
        return self.memory.dtype

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def __repr__(self) -> str:
        return f"PackedWeights(shape={self.shape}, dtype={self.dtype}, isa={self.isa!r})"

    def __reduce__(self) -> Any:
        raise TypeError("PackedWeights hold the order of one instruction set: keep the weights, and pack them again")


def pack_weights(W: np.ndarray) -> PackedWeights:
    """A copy of weights in the order in which `linear` reads them, for weights that serve many calls.

    Parameters
    ----------
    W : (K, N) array of float32 or float64
        Any strides; what is written into W afterwards does not reach the copy.

    Returns
    -------
    PackedWeights
        What `linear` takes as its `W`; the results have the same bits as with W itself.

    Raises
    ------
    ValueError, TypeError
        For a W of another number of axes or another dtype.
    """
    W = _weights(W)
    return PackedWeights(W if _core.in_place(W) and _in_rows(W) else W.copy())


@validate.own_keywords(_NAMES)
def linear(
    x: np.ndarray, W: np.ndarray | PackedWeights, b: np.ndarray | None = None, *, activation: str | None = None,
    residual: np.ndarray | None = None, out: np.ndarray | None = None, num_threads: int | None = None,
) -> np.ndarray:
    """A dense layer: activation(x W + b) + residual.

    Parameters
    ----------
    x : (..., K) array of float32 or float64
        Any leading axes. Rows that lie at one distance of each other, of at least K elements, are read where they are; any other
        array is copied once.
    W : (K, N) array of x's dtype, or PackedWeights
        Weights, (in, out). The transpose of a (N, K) array, as torch keeps its weights, is read where it lies too.
    b : (N,) array of x's dtype, optional
        Bias.
    activation : {"gelu", "gelu_tanh", "relu", "silu"}, optional
        Applied to x W + b in the product's last pass, while the result is in the caches.
    residual : (..., N) array of x's dtype, optional
        Added after the activation, in the same pass.
    out : (..., N) array, optional
        Where to write the result; must not overlap an input.
    num_threads : int, optional
        Threads for this call; default `fastmha.get_num_threads()`. The bits do not depend on it.

    Returns
    -------
    (..., N) array

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came, before anything is computed.

    Notes
    -----
    Each element is summed over K in blocks of 384 in their order: a row's bits depend on that row alone, not on the other rows
    or on their number. K = 0 gives activation(b) + residual.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> rng = np.random.default_rng(0)
    >>> x, W, b = rng.standard_normal((2, 5, 8)), rng.standard_normal((8, 3)), np.ones(3)
    >>> np.allclose(fastmha.linear(x, W, b, activation="relu"), np.maximum(x @ W + b, 0))
    True
    """
    x, W, b, kind = _checked(x, W, b, activation)
    if isinstance(W, PackedWeights) and W.isa != _core.selected_isa()[0]:
        raise ValueError(f'W is packed for "{W.isa}" but the instruction set is "{_core.selected_isa()[0]}": pack it again')
    N = W.shape[1]
    shape = (*x.shape[:-1], N)
    if residual is not None:
        residual = validate.floats("residual", residual)
        validate.same_dtype("residual", residual, "x", x.dtype)
        if residual.shape != shape:
            raise ValueError(f"residual must have the result's shape {shape}, got {residual.shape}")
    workers = threads.resolve(num_threads)
    if out is None:
        result = out = np.empty(shape, x.dtype)
    else:
        read = {"x": x, "W": W.memory if isinstance(W, PackedWeights) else W, "b": b, "residual": residual}
        result = validate.output(out, shape, x.dtype, read, "x")
    y = _matrix(result)
    if y.size:
        weights, transposed, packed = _where_it_lies(W)
        algorithms.own_product(_matrix(x), weights, y, workers, trans_b=transposed, packed=packed, bias=b, activation=kind,
                               residual=None if residual is None else _matrix(residual))
    if not np.may_share_memory(y, result):
        result[...] = y.reshape(shape)
    return out


@validate.own_keywords(_NAMES)
def linear_backward(
    grad_out: np.ndarray, x: np.ndarray, W: np.ndarray, b: np.ndarray | None = None, *, activation: str | None = None,
    num_threads: int | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of `linear` with respect to x, W and b; that of its residual is grad_out itself.

    Parameters
    ----------
    grad_out : (..., N) array
        Gradient of the loss with respect to the result.
    x, W, b, activation
        As in `linear`. W is the array itself, not packed.
    num_threads : int, optional
        Threads for this call; the bits do not depend on it.

    Returns
    -------
    grad_x : (..., K) array
    grad_W : (K, N) array
    grad_b : (N,) array, where b was given

    Raises
    ------
    ValueError, TypeError
        As `linear`; also for packed weights, and for a grad_out of another shape or dtype.

    Notes
    -----
    With z = x W + b and g = grad_out · activation'(z): grad_x = g Wᵀ, grad_W = xᵀ g, grad_b = the sum of g over the rows. With an
    activation z is computed again; a program that has the memory to keep z calls `linear` without one, then `gelu` or `silu` and
    their backward functions.
    """
    x, W, b, kind = _checked(x, W, b, activation)
    if isinstance(W, PackedWeights):
        raise TypeError("W must be the array of the weights for a backward pass, got PackedWeights")
    K, N = W.shape
    shape = (*x.shape[:-1], N)
    grad_out = validate.floats("grad_out", grad_out)
    validate.same_dtype("grad_out", grad_out, "x", x.dtype)
    if grad_out.shape != shape:
        raise ValueError(f"grad_out must have the result's shape {shape}, got {grad_out.shape}")
    workers = threads.resolve(num_threads)
    rows, g = _matrix(x), _matrix(grad_out)
    weights, transposed, _ = _where_it_lies(W)
    if kind and g.size:
        z = np.empty(g.shape, x.dtype)
        algorithms.own_product(rows, weights, z, workers, trans_b=transposed, bias=b)
        _core.activation_rows(kind, g, z, z, workers)
        g = z
    grad_x, grad_W = np.empty(x.shape, x.dtype), np.empty((K, N), x.dtype)
    # grad_x (M, K) <- g (M, N) @ W^T
    algorithms.own_product(g, weights, grad_x.reshape(len(g), K), workers, trans_b=not transposed)
    # grad_W (K, N) <- x^T @ g
    algorithms.own_product(rows, g, grad_W, workers, trans_a=True)
    if b is None:
        return grad_x, grad_W
    with np.errstate(all="ignore"):
        return grad_x, grad_W, np.add.reduce(g, axis=0)


def _matrix(x: np.ndarray) -> np.ndarray:
    """x (..., width) as (rows, width) with unit last stride, aligned, and rows at least their width apart; a copy where it does
    not lie so."""
    y = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return y if _core.in_place(y) and _in_rows(y) else y.copy()


def _checked(x: Any, W: Any, b: Any, activation: Any) -> tuple[np.ndarray, Any, np.ndarray | None, int]:
    """x, W (an array or PackedWeights) and b that fit together, and the activation's number."""
    x = validate.floats("x", x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got a scalar")
    if not isinstance(W, PackedWeights):
        W = _weights(W)
    validate.same_dtype("W", W, "x", x.dtype)
    K, N = W.shape
    if x.shape[-1] != K:
        raise ValueError(f"x has width {x.shape[-1]} on its last axis but W has {K} rows")
    if b is not None:
        b = validate.floats("b", b)
        validate.same_dtype("b", b, "x", x.dtype)
        if b.shape != (N,):
            raise ValueError(f"b must have shape ({N},), got {b.shape}")
        b = np.require(b, None, ("C", "A"))
    if activation is not None:
        validate.choice("activation", activation, _ACTIVATIONS)
    return x, W, b, _core.ACTIVATIONS[activation]


def _in_rows(x: np.ndarray) -> bool:
    """Whether the rows of a matrix lie one behind the other."""
    return x.shape[0] <= 1 or x.strides[0] >= x.shape[1] * x.itemsize


def _weights(W: Any) -> np.ndarray:
    W = validate.floats("W", W, 2, "(K, N)")
    for axis in (0, 1):
        if W.shape[axis] > validate.LARGEST:
            raise ValueError(f"W has {W.shape[axis]} elements on axis {axis}: at most {validate.LARGEST} is possible")
    return W


def _where_it_lies(W: np.ndarray | PackedWeights) -> tuple[np.ndarray | None, bool, np.ndarray | None]:
    """W as the product takes it, a copy where it lies neither as it is nor as its transpose; whether that is its transpose; what
    is packed."""
    if isinstance(W, PackedWeights):
        return None, False, W.memory
    if _core.in_place(W) and _in_rows(W):
        return W, False, None
    if _core.in_place(W.T) and _in_rows(W.T):
        return W.T, True, None
    return W.copy(), False, None
