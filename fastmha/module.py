"""What both modules are: one fused input projection, attention on views of its result, one output projection.

    X (B, L, d_model) --W_Q|W_K|W_V--> projected (B, L, H·D + Hkv·D + Hkv·Dv)
        heads are strided views of `projected`: nothing is transposed
    attention --> concat (B, L, H·Dv), each head written where it belongs: nothing is merged
    concat --W_O--> output (B, L, d_out)

The backward pass mirrors it: the attention's gradients are written into one buffer laid out like `projected`, so that
one product gives the gradient of the fused weights and one the sum of the three input gradients.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastmha import algorithms, threads, validate
from fastmha._core import Problem
from fastmha.plan import choose

_AXES = "(B, L, d_model)"


class Parameter:
    """A weight or bias by name: reading gives a view of the fused array, assigning copies into it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else module._view(self.name)

    def __set__(self, module: AttentionModule, value: Any) -> None:
        module._assign({self.name: value})


class Gradient:
    """The gradient of the parameter that the name behind "grad_" says; None before the first backward."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name.removeprefix("grad_")

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else module._gradient(self.name)

    def __set__(self, module: AttentionModule, value: Any) -> None:
        raise AttributeError(f"grad_{self.name} is written by backward and cannot be assigned")


@dataclass(frozen=True)
class _Kept:
    """What one training forward leaves for backward."""

    X: np.ndarray                       # (B, L, d_model)
    context: np.ndarray | None          # (B, Lk, d_model)
    problem: Problem                    # its q, k, v are views of projected
    projected: tuple[np.ndarray, ...]   # (Q|K|V,), or with a context (Q, K|V)
    concat: np.ndarray                  # (B, L, H·Dv)
    lse: np.ndarray                     # (B, H, L)
    weights: np.ndarray | None


class AttentionModule:
    """Fused parameters and the two passes for H query heads and Hkv key/value heads of widths D and Dv."""

    W_Q, W_K, W_V, W_O = Parameter(), Parameter(), Parameter(), Parameter()
    b_Q, b_K, b_V, b_O = Parameter(), Parameter(), Parameter(), Parameter()
    grad_W_Q, grad_W_K, grad_W_V, grad_W_O = Gradient(), Gradient(), Gradient(), Gradient()
    grad_b_Q, grad_b_K, grad_b_V, grad_b_O = Gradient(), Gradient(), Gradient(), Gradient()

    def __init__(self, d_model: int, H: int, Hkv: int, D: int, Dv: int, d_out: int, use_bias: bool, dtype: Any,
                 layout: str, algorithm: str, rng: Any) -> None:
        self.d_model, self.use_bias, self.layout, self.algorithm = d_model, use_bias, layout, algorithm
        self.dtype = _float_type(dtype)
        self._H, self._Hkv, self._D, self._Dv, self._d_out = H, Hkv, D, Dv, d_out
        widths = (H * D, Hkv * D, Hkv * Dv)
        ends = np.cumsum((0, *widths)).tolist()
        self._columns = {letter: slice(ends[i], ends[i + 1]) for i, letter in enumerate("QKV")}
        self._W_in, self._W_out = np.empty((d_model, ends[3]), self.dtype), np.empty((H * Dv, d_out), self.dtype)
        self._b_in = np.zeros(ends[3], self.dtype) if use_bias else None
        self._b_out = np.zeros(d_out, self.dtype) if use_bias else None
        self._grads: dict[str, np.ndarray] = {}
        self._kept: _Kept | None = None
        self._frozen = False
        self.grad_context: np.ndarray | None = None
        generator = np.random.default_rng(rng)
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            view = self._view(name)
            view[...] = generator.standard_normal(view.shape) * math.sqrt(2 / sum(view.shape))

    # ------------------------------------------------------------------------------------------------- parameters

    def _names(self) -> tuple[str, ...]:
        names = ("W_Q", "W_K", "W_V", "W_O")
        return (*names, "b_Q", "b_K", "b_V", "b_O") if self.use_bias else names

    def _part(self, arrays: dict[str, np.ndarray | None], name: str) -> Any:
        kind, letter = name.split("_")
        array = arrays[kind + ("_out" if letter == "O" else "_in")]
        return array if letter == "O" or array is None else array[..., self._columns[letter]]

    def _view(self, name: str) -> Any:
        return self._part({"W_in": self._W_in, "W_out": self._W_out, "b_in": self._b_in, "b_out": self._b_out}, name)

    def _gradient(self, name: str) -> Any:
        if not self._grads or (name[0] == "b" and not self.use_bias):
            return None
        return self._part(dict(self._grads), name)

    def _assign(self, values: dict[str, Any]) -> None:
        """Copy values into the named parameters: all of them, or none if one is wrong."""
        if self._frozen:
            raise ValueError(f"{next(iter(values))} cannot be assigned: the module is frozen, call unfreeze() first")
        checked = {}
        for name, value in values.items():
            view = self._view(name)
            if view is None:
                raise ValueError(f"{name} cannot be assigned: the module has no biases (use_bias=False)")
            array = validate.as_array(name, value)
            if array.dtype.kind not in "fiub":
                raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}")
            if array.shape != view.shape:
                raise ValueError(f"{name} must have shape {view.shape}, got {array.shape}")
            shared = any(np.may_share_memory(array, own) for own in self._arrays())
            checked[name] = array.copy() if shared else array
        for name, array in checked.items():
            self._view(name)[...] = array

    def parameters(self) -> dict[str, np.ndarray]:
        """Name -> parameter, views into the module: W_Q, W_K, W_V, W_O and with biases b_Q, b_K, b_V, b_O."""
        return {name: self._view(name) for name in self._names()}

    def gradients(self) -> dict[str, np.ndarray]:
        """Name of the parameter -> its gradient from the last backward, in the order of `parameters`."""
        if not self._grads:
            raise ValueError("there are no gradients yet: call forward and backward first")
        return {name: self._gradient(name) for name in self._names()}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all parameters, by name."""
        return {name: np.ascontiguousarray(view).copy() for name, view in self.parameters().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy all parameters in. ValueError (and nothing changed) if a name is missing, unknown, or a shape is wrong."""
        if not isinstance(state, dict):
            raise TypeError(f"state must be a dict, got {type(state).__name__}")
        missing = [name for name in self._names() if name not in state]
        unknown = [str(name) for name in state if name not in self._names()]
        if missing or unknown:
            said = [f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
            raise ValueError(f"state must hold {', '.join(self._names())}: {'; '.join(said)}")
        self._assign(state)

    @property
    def num_parameters(self) -> int:
        """How many numbers the parameters hold."""
        return sum(view.size for view in self.parameters().values())

    def _arrays(self) -> Iterator[np.ndarray]:
        return (a for a in (self._W_in, self._W_out, self._b_in, self._b_out) if a is not None)

    def freeze(self) -> None:
        """Make the parameters read-only, for inference: backward and assignment are errors until `unfreeze`."""
        self._frozen, self._kept = True, None
        for array in self._arrays():
            array.flags.writeable = False

    def unfreeze(self) -> None:
        """Make the parameters writable again."""
        self._frozen = False
        for array in self._arrays():
            array.flags.writeable = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}     # what a forward kept belongs to this object alone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name in ("_W_in", "_W_out", "_b_in", "_b_out"):     # pickles may bring memory that can never be writable
            array = getattr(self, name)
            if array is not None and not array.flags.owndata:
                setattr(self, name, array.copy())
        if self._frozen:
            self.freeze()

    # ------------------------------------------------------------------------------------------------- forward

    def _input(self, name: str, x: Any) -> np.ndarray:
        """x (B, L, d_model) in the module's dtype, as rows that BLAS takes."""
        x = validate.real_array(name, x, self.dtype, 3, _AXES)
        if x.shape[2] != self.d_model:
            raise ValueError(f"{name} has width {x.shape[2]} on axis 2 but the module has d_model {self.d_model}")
        return x if x.flags.c_contiguous and x.flags.aligned else np.require(x, None, ("C", "A"))

    def _pack(self) -> bool:
        return self.layout == "contiguous"

    def _forward(self, X: Any, context: Any, mask: Any, is_causal: Any, offset: Any, key_padding_lengths: Any, window: Any,
                 softcap: Any, need_weights: Any, training: Any, num_threads: Any) -> Any:
        need_weights, training = validate.flag("need_weights", need_weights), validate.flag("training", training)
        X = self._input("X", X)
        C = None if context is None else self._input("context", context)
        workers = threads.resolve(num_threads)
        B, L, _ = X.shape
        if C is not None and C.shape[0] != B:
            raise ValueError(f"context has batch size {C.shape[0]} on axis 0 but X has {B}")
        # projected is allocated first, so that everything about the call is checked before anything is computed
        q_end, v_end = self._columns["Q"].stop, self._columns["V"].stop
        if C is None:
            projected: tuple[np.ndarray, ...] = (np.empty((B, L, v_end), self.dtype),)
        else:
            projected = np.empty((B, L, q_end), self.dtype), np.empty((B, C.shape[1], v_end - q_end), self.dtype)
        q, k, v = self._heads(projected)
        problem = validate.attention_problem(q, k, v, "BHLD", mask, is_causal, offset, key_padding_lengths, window, None,
                                             softcap)
        name, _ = choose(problem, self.algorithm, weights=need_weights)
        blas = self.algorithm == "blas"
        if C is None:
            algorithms.product(_rows(X), self._W_in, _rows(projected[0]), workers, bias=self._b_in, blas=blas)
        else:
            for x, y, columns in ((X, projected[0], slice(0, q_end)), (C, projected[1], slice(q_end, v_end))):
                bias = None if self._b_in is None else self._b_in[columns]
                algorithms.product(_rows(x), self._W_in[:, columns], _rows(y), workers, bias=bias, blas=blas)
        concat = np.empty((B, L, self._H * self._Dv), self.dtype)
        lse = np.empty((B, self._H, L), self.dtype) if training else None
        weights = np.empty((B, self._H, L, k.shape[2]), self.dtype) if need_weights else None
        heads = _split(concat, self._H)
        algorithms.forward(name, problem, heads, lse, weights, workers, pack=self._pack())
        out = np.empty((B, L, self._d_out), self.dtype)
        algorithms.product(_rows(concat), self._W_out, _rows(out), workers, bias=self._b_out, blas=blas)
        if training and lse is not None:
            self._kept = _Kept(X, C, problem, projected, concat, lse, weights)
        return (out, weights) if need_weights else out

    def _heads(self, projected: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q (B, H, L, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv): views of the projections."""
        if len(projected) == 1 and self._Dv == self._D:
            heads = _split(projected[0], self._H + 2 * self._Hkv)
            return heads[:, :self._H], heads[:, self._H:self._H + self._Hkv], heads[:, self._H + self._Hkv:]
        Q, KV = projected[0], projected[-1]
        q_end = self._columns["Q"].stop
        start = q_end if len(projected) == 1 else 0
        middle = start + self._Hkv * self._D
        return (_split(Q[:, :, :q_end], self._H), _split(KV[:, :, start:middle], self._Hkv),
                _split(KV[:, :, middle:], self._Hkv))

    @property
    def intermediates(self) -> dict[str, np.ndarray]:
        """Views of what the last training forward kept: X, Q, K, V as heads, concat, lse, and A (B, H, L, Lk) if the
        weights were asked for. Empty if nothing is kept."""
        kept = self._kept
        if kept is None:
            return {}
        views = {"X": kept.X, "Q": kept.problem.q, "K": kept.problem.k, "V": kept.problem.v, "concat": kept.concat,
                 "lse": kept.lse}
        return views if kept.weights is None else {**views, "A": kept.weights}

    # ------------------------------------------------------------------------------------------------- backward

    def _gradient_buffers(self) -> dict[str, np.ndarray]:
        if not self._grads:
            arrays = {"W_in": self._W_in, "W_out": self._W_out, "b_in": self._b_in, "b_out": self._b_out}
            self._grads = {name: np.empty(a.shape, a.dtype) for name, a in arrays.items() if a is not None}
        return self._grads

    def backward(self, grad_output: np.ndarray, *, num_threads: int | None = None) -> np.ndarray:
        """Gradients of the last training forward.

        Parameters
        ----------
        grad_output : (B, L, d_out) array of real numbers
            Gradient of the loss with respect to the output.
        num_threads : int, optional
            Threads for this call.

        Returns
        -------
        grad_X : (B, L, d_model) array
            Also written: ``grad_W_Q`` … ``grad_b_O`` (overwritten, not accumulated) and, after a forward with a context,
            ``grad_context``. May be called again after one forward.

        Raises
        ------
        ValueError
            Without a kept forward, on a frozen module, or for a grad_output of another shape than the output.
        """
        if self._frozen:
            raise ValueError("backward needs a module that is not frozen: call unfreeze() and forward first")
        kept = self._kept
        if kept is None:
            raise ValueError("backward needs a forward with training=True (and without a cache) before it")
        B, L, _ = kept.X.shape
        g = validate.real_array("grad_output", grad_output, self.dtype, 3, "(B, L, d_out)")
        if g.shape != (B, L, self._d_out):
            raise ValueError(f"grad_output must have the output's shape {(B, L, self._d_out)}, got {g.shape}")
        g = np.require(g, None, ("C", "A"))
        workers = threads.resolve(num_threads)
        grads, blas = self._gradient_buffers(), self.algorithm == "blas"
        name, _ = choose(kept.problem, "auto" if self.algorithm == "decode" else self.algorithm, backward=True)
        # grad_W_O (H·Dv, d_out) <- concat.T @ grad_output
        algorithms.product(_rows(kept.concat), _rows(g), grads["W_out"], workers, trans_a=True, blas=blas)
        # grad_concat (B, L, H·Dv) <- grad_output @ W_O.T
        grad_concat = np.empty(kept.concat.shape, self.dtype)
        algorithms.product(_rows(g), self._W_out, _rows(grad_concat), workers, trans_b=True, blas=blas)
        grad_projected = tuple(np.empty(p.shape, self.dtype) for p in kept.projected)
        algorithms.backward(name, kept.problem, _split(kept.concat, self._H), kept.lse, _split(grad_concat, self._H),
                            *self._heads(grad_projected), workers, pack=self._pack())
        grad_X = np.empty(kept.X.shape, self.dtype)
        if kept.context is None:
            self._input_gradients(kept.X, grad_projected[0], slice(None), grad_X, workers)
            self.grad_context = None
        else:
            q_end = self._columns["Q"].stop
            self._input_gradients(kept.X, grad_projected[0], slice(0, q_end), grad_X, workers)
            self.grad_context = np.empty(kept.context.shape, self.dtype)
            self._input_gradients(kept.context, grad_projected[1], slice(q_end, None), self.grad_context, workers)
        if self.use_bias:
            _sum_rows(g, grads["b_out"])
        return grad_X

    def _input_gradients(self, x: np.ndarray, grad: np.ndarray, columns: slice, grad_x: np.ndarray, workers: int) -> None:
        """Gradients of x @ W[:, columns] + b[columns], given that of the result."""
        blas = self.algorithm == "blas"
        # grad_W (d_model, columns) <- x.T @ grad
        algorithms.product(_rows(x), _rows(grad), self._grads["W_in"][:, columns], workers, trans_a=True, blas=blas)
        # grad_x (B, L, d_model) <- grad @ W.T: over Q|K|V side by side this is the sum of three input gradients
        algorithms.product(_rows(grad), self._W_in[:, columns], _rows(grad_x), workers, trans_b=True, blas=blas)
        if self.use_bias:
            _sum_rows(grad, self._grads["b_in"][columns])


def _rows(x: np.ndarray) -> np.ndarray:
    """(B, L, width) as the matrix (B·L, width)."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _sum_rows(x: np.ndarray, out: np.ndarray) -> None:
    """out (width) <- the sum of all rows of x (B, L, width)."""
    with np.errstate(all="ignore"):     # inf - inf is NaN here as in every product, without a warning
        np.add.reduce(_rows(x), axis=0, out=out)


def _split(x: np.ndarray, num_heads: int) -> np.ndarray:
    """(B, L, H·D) as heads (B, H, L, D), a view."""
    B, L, width = x.shape
    return x.reshape(B, L, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def _float_type(dtype: Any) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must be float32 or float64, got {dtype!r}") from None
    if found not in validate.FLOAT_TYPES:
        raise TypeError(f"dtype must be float32 or float64, got {found}")
    return found
