"""What both modules are: one fused input projection, attention on views of its result, one output projection.

    X (B, L, d_model) --W_Q|W_K|W_V--> projected (B, L, H·D + Hkv·D + Hkv·Dv)
        heads are strided views of `projected`: nothing is transposed
    attention --> concat (B, L, H·Dv), each head written where it belongs: nothing is merged
    concat --W_O--> output (B, L, d_out)

A context has its own product, K|V, or two where keys and values come from two arrays. W_K and W_V of its widths are held beside
W_Q: as one where they have one width.

The backward pass mirrors it: the attention's gradients are written into one buffer laid out like `projected`, so
that one product gives the gradient of the fused weights and one the sum of the three input gradients.

With a cache the keys and values are appended to it and the attention is over all that it holds (`cache.step`); a cache as
context stands for keys and values that were projected before.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fastmha import algorithms, at_once, threads, validate
from fastmha._core import Problem
from fastmha.algorithms import BY_BLAS, Packed, product_by_blas
from fastmha.cache import KVCache, step
from fastmha.cached import keys_and_values
from fastmha.planning import Plan, choose, choose_layout, make_plan
from fastmha.precision import parts_of_product
from fastmha.validate import Rules

# what is projected together from X alone, from X and a context, from X, keys and values: by the number of arrays
_TOGETHER = ((), ("QKV",), ("Q", "KV"), ("Q", "K", "V"))
_BIASES: dict[bool | str, tuple[str, ...]] = {
    False: (), True: ("b_Q", "b_K", "b_V", "b_O"), "qkv": ("b_Q", "b_K", "b_V"), "out": ("b_O",)}
_HALF = ("bfloat16", "float16")     # what weights may be frozen as


class Parameter:
    """A weight or bias by name: reading gives a view of the array that holds it, assigning copies into it."""

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


class _Kept(NamedTuple):
    """What one training forward leaves for backward."""

    sources: tuple[np.ndarray, ...]     # (X,), or with a context (X, C) or (X, keys, values): (B, L, width)
    problem: Problem                    # its q, k, v are views of projected
    projected: tuple[np.ndarray, ...]   # (Q|K|V,), (Q, K|V) or (Q, K, V): (B, L, columns), or heads (B, heads, L, D)
    concat: np.ndarray                  # (B, L, H·Dv)
    lse: np.ndarray                     # (B, H, L)
    weights: np.ndarray | None
    transform_qk: Callable | None
    positions: np.ndarray | None        # (B, L)


_NOTHING_KEPT = "backward needs a forward with training=True (and without a cache) before it"
_CACHE_KEEPS_NOTHING = f"{_NOTHING_KEPT}: the last one had a cache"
_CONTEXT_KEEPS_NOTHING = ("backward needs a forward whose context is an array: that of the last one was a KVCache, which "
                          "does not know what it was projected from")


class AttentionModule:
    """Fused parameters and the two passes for H query heads and Hkv key/value heads of widths D and Dv."""

    W_Q, W_K, W_V, W_O = Parameter(), Parameter(), Parameter(), Parameter()
    b_Q, b_K, b_V, b_O = Parameter(), Parameter(), Parameter(), Parameter()
    grad_W_Q, grad_W_K, grad_W_V, grad_W_O = Gradient(), Gradient(), Gradient(), Gradient()
    grad_b_Q, grad_b_K, grad_b_V, grad_b_O = Gradient(), Gradient(), Gradient(), Gradient()
    _one_by_one = False         # whether a subclass has steps of its own between those of a forward

    def __init__(self, d_model: int, H: int, Hkv: int, D: int, Dv: int, d_out: int, use_bias: bool | str, dtype: Any,
                 layout: str, algorithm: str, rng: Any, kdim: int | None = None, vdim: int | None = None,
                 precision: str | None = None) -> None:
        self.d_model, self.use_bias, self.layout, self.algorithm = d_model, use_bias, layout, algorithm
        self.dtype, self.precision = validate.element_type("dtype", dtype), precision
        self._computed = validate.computed(self.dtype)
        generator = _generator(rng)
        self._H, self._Hkv, self._D, self._Dv, self._d_out = H, Hkv, D, Dv, d_out
        self._kdim, self._vdim = d_model if kdim is None else kdim, d_model if vdim is None else vdim
        self._columns = self._side_by_side()
        rows = {"QKV": d_model, "Q": d_model, "KV": self._kdim, "K": self._kdim, "V": self._vdim}
        together = _TOGETHER[1 if self._kdim == self._vdim == d_model else 2 if self._kdim == self._vdim else 3]
        shapes = [(rows[letters], self._width(letters)) for letters in together]
        if max(m * n for m, n in [*shapes, (H * Dv, d_out)]) * self.dtype.itemsize > validate.MOST_BYTES:
            named = [f"d_model {d_model}", *(f"{name} {n}" for name, n in self._own_widths().items())]
            raise ValueError(f"{_listed(named)} make{'s' * (len(named) == 1)} weights {_listed([*shapes, (H * Dv, d_out)])}: "
                             "beyond any memory")
        # Q|K|V; or Q, and by their letters K|V, or K and V
        self._W_in, *others = (np.empty(shape, self.dtype) for shape in shapes)
        self._W_context: dict[str, np.ndarray] = dict(zip(together[1:], others))
        self._W_out = np.empty((H * Dv, d_out), self.dtype)
        self._b_in = np.zeros(self._width("QKV"), self.dtype) if "b_Q" in _BIASES[use_bias] else None
        self._b_out = np.zeros(d_out, self.dtype) if "b_O" in _BIASES[use_bias] else None
        self._grads: dict[str, np.ndarray] = {}
        self._kept: _Kept | str | None = None       # a str says why nothing is kept
        self._frozen = False
        # by name as in `_arrays`: weights as products of many rows read them, and what products take in their place
        self._packed: dict[str, Packed] = {}
        self._in_half: dict[str, np.ndarray] = {}
        self._known: dict[tuple[Any, ...], Any] = {}
        self.grad_context: np.ndarray | tuple[np.ndarray, np.ndarray] | None = None
        self.grad_sinks: np.ndarray | None = None
        self.grad_mask: np.ndarray | None = None
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            view = self._view(name)
            view[...] = validate.cast(generator.standard_normal(view.shape) * math.sqrt(2 / sum(view.shape)), self.dtype)

    # ------------------------------------------------------------------------------------------------- parameters

    def _side_by_side(self) -> dict[str, slice]:
        """The columns of Q, K and V, and of those that are projected together, in a row of Q|K|V."""
        ends = np.cumsum((0, self._H * self._D, self._Hkv * self._D, self._Hkv * self._Dv)).tolist()
        start, end = dict(zip("QKV", ends)), dict(zip("QKV", ends[1:]))
        return {letters: slice(start[letters[0]], end[letters[-1]]) for letters in ("Q", "K", "V", "KV", "QKV")}

    def _said(self) -> str:
        """What a repr adds that is not as by default."""
        precision = f', precision="{self.precision}"' if self.precision is not None else ""
        half = next((f" in {W.dtype}" for W in self._in_half.values()), "")
        return precision + f", frozen{half}" * self._frozen

    def _width(self, letters: str) -> int:
        columns = self._columns[letters]
        return columns.stop - columns.start

    def _own_widths(self) -> dict[str, int]:
        """The widths that do not follow from d_model, by the caller's names."""
        return {}

    def _names(self) -> tuple[str, ...]:
        return ("W_Q", "W_K", "W_V", "W_O", *_BIASES[self.use_bias])

    def _arrays(self) -> dict[str, np.ndarray]:
        """What holds the parameters: W_in, W_out, b_in and b_out, and W_KV, or W_K and W_V, where W_in is W_Q alone."""
        arrays = {"W_in": self._W_in, "W_out": self._W_out, "b_in": self._b_in, "b_out": self._b_out,
                  **{f"W_{letters}": W for letters, W in self._W_context.items()}}
        return {name: array for name, array in arrays.items() if array is not None}

    def _part(self, arrays: dict[str, np.ndarray], name: str) -> Any:
        """The parameter of that name in what holds them, or its gradient; also "W_KV", "b_QKV". None: there is none."""
        kind, letters = name.split("_")
        array = arrays.get(f"{kind}_out" if letters == "O" else name)
        if array is not None or letters == "O":
            return array
        columns, held = self._columns[letters], "in"
        if kind == "W" and "W_KV" in arrays and letters in "KV":
            q_end = self._columns["Q"].stop
            columns, held = slice(columns.start - q_end, columns.stop - q_end), "KV"
        array = arrays.get(f"{kind}_{held}")
        return None if array is None else array[..., columns]

    def _view(self, name: str) -> Any:
        return self._part(self._arrays(), name)

    def _gradient(self, name: str) -> Any:
        return self._part(self._grads, name) if self._grads else None

    def _assign(self, values: dict[str, Any]) -> None:
        """Copy values into the named parameters: all of them, or none if one is wrong."""
        if self._frozen:
            raise ValueError(f"{next(iter(values))} cannot be assigned: the module is frozen, call unfreeze() first")
        checked = {}
        for name, value in values.items():
            view = self._view(name)
            if view is None:
                raise ValueError(f"{name} cannot be assigned: the module has {', '.join(_BIASES[self.use_bias]) or 'no biases'} "
                                 f"(use_bias={said(self.use_bias)})")
            array = validate.reals(name, value)
            if array.shape != view.shape:
                raise ValueError(f"{name} must have shape {view.shape}, got {array.shape}")
            shared = any(np.may_share_memory(array, own) for own in self._arrays().values())
            checked[name] = array.copy() if shared else array
        for name, array in checked.items():
            self._view(name)[...] = validate.cast(array, self.dtype)

    def parameters(self) -> dict[str, np.ndarray]:
        """Name -> parameter, views into the module: W_Q, W_K, W_V, W_O and of b_Q, b_K, b_V, b_O those that there are."""
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
            said = [f"{what} {validate.cut(', '.join(names))}"
                    for what, names in (("missing", missing), ("unknown", unknown)) if names]
            raise ValueError(f"state must hold {', '.join(self._names())}: {'; '.join(said)}")
        self._assign(state)

    @property
    def num_parameters(self) -> int:
        """How many numbers the parameters hold."""
        return sum(view.size for view in self.parameters().values())

    def freeze(self, weights: str | None = None) -> None:
        """Make the parameters read-only, for inference: backward and assignment are errors until `unfreeze`.

        A copy of the weights is kept in the order in which products of many rows read them, where BLAS does not do them: of half
        precision in float32, or in bfloat16 for matrix tiles.

        Parameters
        ----------
        weights : {None, "bfloat16", "float16"}
            Products take the weights rounded to this half precision, and a step of few tokens reads half of float32's bytes.
            Inputs, outputs and sums are what they were, and so are the parameters, which are kept. "bfloat16" needs the extra
            ``bfloat16``.

        Raises
        ------
        ValueError
            For another name, in a module of float64, or if a weight is beyond the largest number of that type. The module is as
            it was.
        """
        in_half = {} if weights is None else self._rounded(weights)
        self.unfreeze()
        self._frozen, self._kept, self._in_half = True, None, in_half
        if self.algorithm not in BY_BLAS:
            workers = threads.resolve(None)
            for name, W in self._arrays().items():
                packed = algorithms.pack(in_half.get(name, W), self.dtype, self.precision, workers) if W.ndim == 2 else None
                if packed is not None:
                    self._packed[name] = packed
        for array in self._arrays().values():
            array.flags.writeable = False

    def _rounded(self, weights: str) -> dict[str, np.ndarray]:
        validate.choice("weights", weights, _HALF)
        if self.dtype == np.float64:
            raise ValueError(f"weights must be None in a module of float64, got {validate.short(weights)}")
        dtype, rounded = validate.element_type("weights", weights), {}
        for name, W in self._arrays().items():
            if W.ndim == 2:
                rounded[name] = validate.cast(W, dtype)
                large = np.isinf(rounded[name]) & np.isfinite(W)
                if large.any():
                    raise ValueError(f"weights {weights!r} cannot hold {float(W[large][0]):g}, the size of a weight")
        return rounded

    def unfreeze(self) -> None:
        """Make the parameters writable again."""
        self._frozen, self._packed, self._in_half = False, {}, {}
        for array in self._arrays().values():
            array.flags.writeable = True

    def __getstate__(self) -> dict[str, Any]:
        # what a forward kept belongs to this object alone, the order of packed weights to this machine
        in_half = next((W.dtype.name for W in self._in_half.values()), None)
        return {**self.__dict__, "_kept": None, "_packed": {}, "_known": {}, "_in_half": in_half}

    def __setstate__(self, state: dict[str, Any]) -> None:
        in_half = state["_in_half"]
        self.__dict__.update({**state, "_packed": {}, "_known": {}, "_in_half": {}})
        self._columns = self._side_by_side()
        for name in ("_W_in", "_W_out", "_b_in", "_b_out"):     # pickles may bring memory that can never be writable
            array = getattr(self, name)
            if array is not None and not array.flags.owndata:
                setattr(self, name, array.copy())
        self._W_context = {letters: W if W.flags.owndata else W.copy() for letters, W in self._W_context.items()}
        if self._frozen:
            self.freeze(in_half)

    # ------------------------------------------------------------------------------------------------- forward

    def __call__(self, *args: NoReturn, **kwargs: NoReturn) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is not called itself: call its forward, m.forward(X)")

    def _input(self, name: str, x: Any, width: int, what: str = "d_model") -> np.ndarray:
        """x (B, L, width) in the module's dtype, as rows that BLAS takes."""
        x = validate.real_array(name, x, self.dtype, 3, f"(B, L, {what})")
        if x.shape[2] != width:
            raise ValueError(f"{name} has width {x.shape[2]} on axis 2 but the module has {what} {width}")
        return x if x.flags.c_contiguous and x.flags.aligned else np.require(x, None, ("C", "A"))

    def _context(self, name: str, C: Any) -> tuple[np.ndarray, ...]:
        """(C,), or of a pair (keys, values), as `_input` makes them."""
        if not isinstance(C, tuple):
            if self._kdim != self._vdim:
                came = f"an array of shape {C.shape}" if isinstance(C, np.ndarray) else type(C).__name__
                raise ValueError(f"{name} must be a tuple (keys, values) of arrays of widths {self._kv_widths()}, got {came}")
            return (self._input(name, C, self._kdim, "kdim" if self._W_context else "d_model"),)
        if len(C) != 2:
            raise ValueError(f"{name} must be an array or a tuple (keys, values) of arrays, got a tuple of {len(C)}")
        of_keys, of_values = f"{name}[0] (keys)", f"{name}[1] (values)"
        keys, values = self._input(of_keys, C[0], self._kdim, "kdim"), self._input(of_values, C[1], self._vdim, "vdim")
        for axis, what in ((0, "batch size"), (1, "length")):
            if keys.shape[axis] != values.shape[axis]:
                raise ValueError(f"{of_values} has {what} {values.shape[axis]} on axis {axis} but {of_keys} has "
                                 f"{keys.shape[axis]}")
        return keys, values

    def _kv_widths(self) -> str:
        """Of a context, in words."""
        return f"kdim {self._kdim} and vdim {self._vdim}"

    def _layout(self, L: int) -> tuple[str, str]:
        """The layout of heads that are projected from L tokens per batch row, and why."""
        if self._Dv != self._D:
            return "strided", "heads of two widths lie side by side"
        if self.layout != "auto":
            return self.layout, "named by the caller"
        by_blas = self.algorithm in BY_BLAS
        layout = choose_layout(L, self._D * self.dtype.itemsize, by_blas or product_by_blas(2))
        if layout[0] == "contiguous":
            of = validate.bits(self._W_in).dtype
            if parts_of_product(of, of, self.precision, L, self.d_model, self._D):
                return "strided", "products on matrix tiles take all heads together"
        return layout

    def _buffer(self, B: int, L: int, letters: str) -> np.ndarray:
        """For the projection of (B, L) rows to Q, K, V or several: (B, L, columns), or contiguous heads (B, heads, L, D)."""
        columns = self._width(letters)
        if B * L * columns * self.dtype.itemsize > validate.MOST_BYTES:
            raise ValueError(f"batch_size {B} and a length of {L} tokens are beyond any memory: projections of {columns} columns")
        by_head = self._layout(L)[0] == "contiguous"
        return np.empty((B, columns // self._D, L, self._D) if by_head else (B, L, columns), self.dtype)

    def _make_plan(self, batch_size: Any, seq_len: Any, seq_len_k: Any, rules: Rules, backward: Any) -> Plan:
        B, L = validate.integer("batch_size", batch_size, 0), validate.length("seq_len", seq_len)
        if seq_len_k is None:
            if self._W_context:
                raise ValueError(f"seq_len_k must be given: keys and values come from a context with {self._kv_widths()}, X has "
                                 f"d_model {self.d_model}")
            lengths = [L]
        else:
            lengths = [L, validate.length("seq_len_k", seq_len_k)]
        q, k, v = self._heads([self._buffer(B, n, letters) for n, letters in zip(lengths, _TOGETHER[len(lengths)])])
        problem = validate.attention_problem(q, k, v, "BHLD", rules)
        backward = validate.flag("backward", backward)
        return make_plan(problem, algorithms.for_backward(rules.algorithm) if backward else rules.algorithm,
                         threads.resolve(rules.num_threads), backward, self._layout(lengths[-1]))

    def _forward(self, X: Any, rules: Rules, need_weights: Any, training: Any, context: Any = None, cache: Any = None,
                 transform_qk: Any = None) -> Any:
        need_weights, training = validate.flag("need_weights", need_weights), validate.flag("training", training)
        if validate.flag("is_causal", rules.is_causal) is not rules.is_causal:      # NumPy's own
            rules = rules._replace(is_causal=bool(rules.is_causal))
        if type(rules.dropout) is not float or rules.dropout != 0 or rules.seed is not None:
            draws = validate.drawing(rules.dropout, rules.seed)
            if cache is not None and training and draws is not None:
                raise ValueError("dropout and cache cannot be given together: such a call keeps nothing for backward, got "
                                 f"dropout {validate.short(rules.dropout)}")
            if not training:
                rules = rules._replace(dropout=0.0, seed=None)
        X = self._input("X", X, self.d_model)
        if transform_qk is not None and not callable(transform_qk):
            raise TypeError(f"transform_qk must be callable or None, got {validate.short(transform_qk)}")
        if context is not None and not (cache is None and transform_qk is None):
            raise ValueError(f"context and {'transform_qk' if cache is None else 'cache'} cannot be given together")
        workers = threads.resolve(rules.num_threads)
        if cache is not None:
            return self._forward_cached(X, cache, rules, need_weights, training, workers, transform_qk)
        if context is None and transform_qk is None:
            way = at_once.passes(self, X.shape[0], X.shape[1], need_weights, workers)
            if way is not None:
                done = at_once.forward(self, X, way, rules, need_weights, training, workers)
                if done.lse is not None:
                    self._kept = _Kept((X,), done.problem, (done.projected,), done.concat, done.lse, done.weights, None, None)
                return (done.out, done.weights) if need_weights else done.out
        stored = context if isinstance(context, KVCache) else None
        given = () if context is None or stored is not None else self._context("context", context)
        if context is None and self._W_context:
            raise ValueError(f"context must be given: keys and values are projected from {self._kv_widths()}, X has d_model "
                             f"{self.d_model}")
        B, L, _ = X.shape
        if given and given[0].shape[0] != B:
            name = "context" if len(given) == 1 else "context[0] (keys)"
            raise ValueError(f"{name} has batch size {given[0].shape[0]} on axis 0 but X has {B}")
        # projected is allocated first, so that everything about the call is checked before anything is computed
        sources = (X, *given)
        together = _TOGETHER[len(sources)] if stored is None else ("Q",)
        projected = tuple([self._buffer(B, x.shape[1], letters) for x, letters in zip(sources, together)])
        if stored is not None:
            q = projected[0] if projected[0].ndim == 4 else _split(projected[0], self._H)
            k, v, lengths = self._stored("context", stored, B, rules.key_padding_lengths)
            rules = rules.at(rules.offset, lengths)
        else:
            q, k, v = self._heads(projected)
        problem = self._problem(q, k, v, rules)
        name, _ = choose(problem, rules.algorithm, weights=need_weights)
        for x, letters, out in zip(sources, together, projected):
            self._project(x, letters, out, workers)
        positions = None
        if transform_qk is not None:
            positions = _positions(0 if problem.offset is None else problem.offset, B, L)
            _transform(transform_qk, q, k, positions)
        concat = np.empty((B, L, self._H * self._Dv), self.dtype)
        lse = np.empty((B, self._H, L), self._computed) if training else None
        weights = np.empty((B, self._H, L, k.shape[2]), self._computed) if need_weights else None
        algorithms.forward(name, problem, _split(concat, self._H), lse, weights, workers)
        out = self._project_out(concat, workers)
        if training and lse is not None:
            self._kept = (_CONTEXT_KEEPS_NOTHING if stored is not None else
                          _Kept(sources, problem, projected, concat, lse, weights, transform_qk, positions))
        return (out, weights) if need_weights else out

    def _problem(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, rules: Rules) -> Problem:
        """The checked attention of a forward without a cache."""
        return validate.attention_problem(q, k, v, "BHLD", rules)

    def _forward_cached(self, X: np.ndarray, cache: Any, rules: Rules, need_weights: bool, training: bool, workers: int,
                        transform_qk: Any) -> Any:
        if rules.offset is not None:
            raise ValueError("offset and cache cannot be given together: it is the cached length of each row, got "
                             f"{validate.short(rules.offset)}")
        if self._W_context:
            raise ValueError(f"cache without a context needs a module whose kdim and vdim are its d_model {self.d_model}, "
                             f"got {self._kv_widths()}")
        B, L, _ = X.shape
        self._check_cache("cache", cache, B)
        if transform_qk is None:
            done = at_once.step(self, X, cache._slots, rules, need_weights, workers)
            if done is not None:
                if training:
                    self._kept = _CACHE_KEEPS_NOTHING
                return done if need_weights else done[0]
        projected = np.empty((B, L, self._width("QKV")), self.dtype)
        q, k, v = self._heads((projected,))
        tokens = step(cache, q, k, v, rules, need_weights)
        concat = np.empty((B, L, self._H * self._Dv), self.dtype)
        weights = np.empty((B, self._H, L, tokens.total), self._computed) if need_weights else None
        self._project(X, "QKV", projected, workers)
        if transform_qk is not None:
            _transform(transform_qk, q, k, _positions(cache.lengths, B, L))
        with tokens:
            tokens.attend(_split(concat, self._H), weights, workers)
            out = self._project_out(concat, workers)
        if training:
            self._kept = _CACHE_KEEPS_NOTHING
        return (out, weights) if need_weights else out

    def _project(self, x: np.ndarray, letters: str, out: np.ndarray, workers: int) -> None:
        """out (B, L, columns), or as heads (B, heads, L, D), <- x (B, L, width) @ W + b of Q, K, V or several side by side."""
        held = "W_in" if letters == ("Q" if self._W_context else "QKV") else f"W_{letters}"
        bias = None if self._b_in is None else self._b_in[self._columns[letters]]
        algorithms.product(_rows(x), self._weights(letters), out if out.ndim == 4 else _rows(out), workers, bias=bias,
                           blas=self.algorithm in BY_BLAS, packed=self._packed.get(held), precision=self.precision)

    def _weights(self, letters: str) -> np.ndarray:
        """W of Q, K, V or several side by side, as products take it."""
        if self._W_context:
            return self._part(self._in_half or self._arrays(), f"W_{letters}")
        return self._in_half.get("W_in", self._W_in)[:, self._columns[letters]]

    def _project_out(self, concat: np.ndarray, workers: int, bias: bool = True, out: np.ndarray | None = None) -> np.ndarray:
        """(B, L, d_out) <- concat (B, L, H·Dv) @ W_O + b_O; without `bias` no b_O."""
        if out is None:
            out = np.empty((*concat.shape[:2], self._d_out), self.dtype)
        algorithms.product(_rows(concat), self._in_half.get("W_out", self._W_out), _rows(out), workers,
                           bias=self._b_out if bias else None, blas=self.algorithm in BY_BLAS, packed=self._packed.get("W_out"),
                           precision=self.precision)
        return out

    def _check_cache(self, name: str, cache: Any, B: int) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"{name} must be a KVCache, got {type(cache).__name__}")
        has, own = (B, cache.num_kv_heads, cache.head_dim, cache.v_head_dim), (cache.batch_size, self._Hkv, self._D, self._Dv)
        if has != own:
            if cache.batch_size != B:
                raise ValueError(f"{name} has batch size {cache.batch_size} but X has {B} on axis 0")
            at = [x != y for x, y in zip(has, own)].index(True)
            what = ("", "num_kv_heads", "head_dim", "v_head_dim")[at]
            raise ValueError(f"{name} has {what} {has[at]} but the module has {own[at]}")

    def _stored(self, name: str, stored: KVCache, B: int, key_padding_lengths: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        """k, v and padding lengths of a cache that stands for a context."""
        self._check_cache(name, stored, B)
        if stored.window is not None:
            raise ValueError(f"{name} must be a cache that holds all its keys, got a ring with window {stored.window}")
        lengths, length = stored.lengths, stored.length
        if key_padding_lengths is not None:
            lengths = np.minimum(lengths, validate.batch_lengths("key_padding_lengths", key_padding_lengths, B, length, "Lk"))
        return *keys_and_values(stored.k, stored.v, self.dtype), lengths if (lengths < length).any() else None

    def _project_context(self, C: Any, num_threads: Any) -> KVCache:
        sources = self._context("C", C)
        workers = threads.resolve(num_threads)
        B, Lc, _ = sources[0].shape
        cache = KVCache(B, self._Hkv, self._D, v_head_dim=self._Dv, capacity=Lc, dtype=self.dtype)
        projected = []
        for x, letters in zip(sources, _TOGETHER[1 + len(sources)][1:]):
            projected.append(np.empty((B, Lc, self._width(letters)), self.dtype))
            self._project(x, letters, projected[-1], workers)
        k_end = self._width("K")
        K, V = projected if len(projected) == 2 else (projected[0][:, :, :k_end], projected[0][:, :, k_end:])
        cache.append(_split(K, self._Hkv), _split(V, self._Hkv))
        return cache

    def _heads(self, projected: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q (B, H, L, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv): views of the projections (Q|K|V,), (Q, K|V) or (Q, K, V)."""
        if len(projected) == 3:
            q, k, v = (p if p.ndim == 4 else _split(p, heads) for p, heads in zip(projected, (self._H, self._Hkv, self._Hkv)))
            return q, k, v
        if self._Dv == self._D:
            by_head = [p if p.ndim == 4 else _split(p, p.shape[2] // self._D) for p in projected]
            start = self._H if len(projected) == 1 else 0
            KV = by_head[-1]
            return by_head[0][:, :self._H], KV[:, start:start + self._Hkv], KV[:, start + self._Hkv:]
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
        if not isinstance(kept, _Kept):
            return {}
        views = {"X": kept.sources[0], "Q": kept.problem.q, "K": kept.problem.k, "V": kept.problem.v, "concat": kept.concat,
                 "lse": kept.lse}
        return views if kept.weights is None else {**views, "A": kept.weights}

    # ------------------------------------------------------------------------------------------------- backward

    def _gradient_buffers(self) -> dict[str, np.ndarray]:
        if not self._grads:
            self._grads = {name: np.empty(a.shape, self._computed) for name, a in self._arrays().items()}
        return self._grads

    def backward(self, grad_output: np.ndarray, *, need_bias_grad: bool = False, num_threads: int | None = None) -> np.ndarray:
        """Gradients of the last training forward.

        Parameters
        ----------
        grad_output : (B, L, d_out) array of real numbers
            Gradient of the loss with respect to the output, cast to the module's dtype.
        need_bias_grad : bool
            Also the gradient of the forward's mask, which must have been one of floats.
        num_threads : int, optional
            Threads for this call.

        Returns
        -------
        grad_X : (B, L, d_model) array
            Of float32 in a module of half precision, as are all the gradients. Also written: ``grad_W_Q`` … ``grad_b_O``
            (overwritten, not accumulated) and, after a forward with a context, ``grad_context``, a pair where that was a pair,
            ``grad_sinks`` after one with sinks, and ``grad_mask`` with `need_bias_grad`, in the mask's dtype, else None. May be
            called again after one forward. A `transform_qk` of the forward is gone back through by its attribute ``backward``.

        Raises
        ------
        ValueError
            Without a kept forward, on a frozen module, for a grad_output of another shape than the output, with `need_bias_grad`
            after a forward without a mask of floats, or after a forward with a `transform_qk` that has no ``backward``.
        """
        if self._frozen:
            raise ValueError("backward needs a module that is not frozen: call unfreeze() and forward first")
        kept = self._kept
        if not isinstance(kept, _Kept):
            raise ValueError(kept or _NOTHING_KEPT)
        if kept.transform_qk is not None and not callable(getattr(kept.transform_qk, "backward", None)):
            raise ValueError("backward needs transform_qk of the forward before it to have an attribute "
                             "backward(grad_q, grad_k, positions) -> (grad_q, grad_k), got one without")
        mask = kept.problem.additive_mask
        if validate.flag("need_bias_grad", need_bias_grad) and mask is None:
            raise ValueError("need_bias_grad needs a forward with a mask of floats, which is added to the scores, got "
                             f"{'no mask' if kept.problem.bool_mask is None else 'one of bool'}")
        B, L, _ = kept.sources[0].shape
        g = validate.real_array("grad_output", grad_output, self.dtype, 3, "(B, L, d_out)")
        if g.shape != (B, L, self._d_out):
            raise ValueError(f"grad_output must have the output's shape {(B, L, self._d_out)}, got {g.shape}")
        g = g if g.flags.c_contiguous and g.flags.aligned else np.require(g, None, ("C", "A"))
        workers = threads.resolve(num_threads)
        grads, blas = self._gradient_buffers(), self.algorithm in BY_BLAS
        if (len(kept.sources) == 1 and kept.projected[0].ndim == 3 and kept.problem.sinks is None and kept.transform_qk is None
                and not need_bias_grad):
            cuts = at_once.backward_cuts(self, kept.problem, B, L, workers)
            if cuts is not None:
                grad_X, grad_QKV = at_once.backward(self, g, kept, cuts, grads, workers)
                self.grad_sinks = self.grad_mask = self.grad_context = None
                for x, name in ((grad_QKV, "b_in"), (g, "b_out")):
                    if name in grads:
                        _sum_rows(x, grads[name], workers)
                return grad_X
        name, _ = choose(kept.problem, algorithms.for_backward(self.algorithm), backward=True)
        # grad_concat (B, L, H·Dv), by head where q, k, v are, <- grad_output @ W_O.T
        contiguous = kept.projected[0].ndim == 4
        grad_concat = np.empty((B, self._H, L, self._Dv) if contiguous else kept.concat.shape, self.dtype)
        algorithms.product(_rows(g), self._W_out, grad_concat if contiguous else _rows(grad_concat), workers, trans_b=True,
                           blas=blas, precision=self.precision)
        # the gradients of the projections lie side by side whatever the layout: two products over their columns follow
        together = _TOGETHER[len(kept.sources)]
        grad_projected = [np.empty((*x.shape[:2], self._width(letters)), self.dtype)
                          for x, letters in zip(kept.sources, together)]
        grad_q, grad_k, grad_v = self._heads(grad_projected)
        grad_mask = None
        if need_bias_grad and mask is not None:
            grad_mask = np.empty(mask.shape, self.dtype if mask.dtype.itemsize == 2 else mask.dtype)
        grad_sinks = algorithms.backward(name, kept.problem, _split(kept.concat, self._H), kept.lse,
                                         grad_concat if contiguous else _split(grad_concat, self._H), grad_q, grad_k, grad_v,
                                         workers, grad_mask)
        if kept.transform_qk is not None and kept.positions is not None:
            _transform(kept.transform_qk, grad_q, grad_k, kept.positions, backward=True)
        # grad_W_O (H·Dv, d_out) <- concat.T @ grad_output
        algorithms.product(_rows(kept.concat), _rows(g), grads["W_out"], workers, trans_a=True, blas=blas,
                           precision=self.precision)
        grad_X, *grad_C = [self._input_gradients(*of, workers) for of in zip(kept.sources, grad_projected, together)]
        self.grad_sinks, self.grad_mask = grad_sinks, grad_mask
        self.grad_context = (grad_C[0], grad_C[1]) if len(grad_C) == 2 else grad_C[0] if grad_C else None
        if self._b_out is not None:
            _sum_rows(g, grads["b_out"], workers)
        return grad_X

    def _input_gradients(self, x: np.ndarray, grad: np.ndarray, letters: str, workers: int) -> np.ndarray:
        """The gradient of x, and those of W and b, where x @ W + b are Q, K, V or several side by side; grad: of the result."""
        blas = self.algorithm in BY_BLAS
        # grad_W (width, columns) <- x.T @ grad
        algorithms.product(_rows(x), _rows(grad), self._gradient(f"W_{letters}"), workers, trans_a=True, blas=blas,
                           precision=self.precision)
        # grad_x (B, L, width) <- grad @ W.T: over Q|K|V side by side this is the sum of three input gradients
        grad_x = np.empty(x.shape, self._computed)
        algorithms.product(_rows(grad), self._weights(letters), _rows(grad_x), workers, trans_b=True, blas=blas,
                           precision=self.precision)
        if self._b_in is not None:
            _sum_rows(grad, self._gradient(f"b_{letters}"), workers)
        return grad_x


def _positions(start: Any, B: int, L: int) -> np.ndarray:
    """(B, L) int64: start (an int or (B,)) + 0 to L - 1."""
    positions = np.empty((B, L), np.int64)
    np.add(np.reshape(start, (-1, 1)), np.arange(L), out=positions)
    return positions


def _transform(transform_qk: Any, q: np.ndarray, k: np.ndarray, positions: np.ndarray, backward: bool = False) -> None:
    """q, k <- what transform_qk makes of them, or of their gradients its backward; checked before either is written."""
    name, of = ("transform_qk.backward", "grad_") if backward else ("transform_qk", "")
    given = (q, k)
    made = (transform_qk.backward if backward else transform_qk)(q, k, positions)
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise TypeError(f"{name} must return a pair ({of}q, {of}k), got {type(made).__name__}")
    for letter, x, own in zip("qk", made, given):
        if not isinstance(x, np.ndarray) or x.dtype != own.dtype or x.shape != own.shape:
            came = f"dtype {x.dtype} and shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
            raise TypeError(f"{name} must return {of}{letter} as an array of dtype {own.dtype} and shape {own.shape}, got {came}")
    if made[1] is not k and np.may_share_memory(made[1], q):
        made = made[0], made[1].copy()
    for x, own in zip(made, given):
        if x is not own:
            own[...] = x


def _rows(x: np.ndarray) -> np.ndarray:
    """(B, L, width) as the matrix (B·L, width)."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _sum_rows(x: np.ndarray, out: np.ndarray, workers: int) -> None:
    """out (width) <- the sum of all rows of x (B, L, width), in out's dtype."""
    rows = algorithms.converted(validate.bits(_rows(x)), out.dtype, workers)
    with np.errstate(all="ignore"):     # inf - inf is NaN here as in every product, without a warning
        np.add.reduce(rows, axis=0, out=out)


def _split(x: np.ndarray, num_heads: int) -> np.ndarray:
    """(B, L, H·D) as heads (B, H, L, D), a view."""
    B, L, width = x.shape
    return x.reshape(B, L, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def _listed(things: Sequence[Any]) -> str:
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last


def said(use_bias: bool | str) -> str:
    return f'"{use_bias}"' if isinstance(use_bias, str) else str(use_bias)


def _generator(rng: Any) -> np.random.Generator:
    try:
        seeds: Any = rng
        if isinstance(rng, (list, tuple, np.ndarray)):      # NumPy would follow a list that holds itself until the stack ends
            found = validate.integers("rng", rng)
            seeds = None if found is None else [int(seed) for seed in found.flat]
        if isinstance(rng, (bool, np.bool_)) or (seeds is None and rng is not None):
            raise TypeError
        return np.random.default_rng(seeds)
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"rng must be a seed (ints >= 0), a numpy.random.Generator or None, got {validate.short(rng)}") from None
