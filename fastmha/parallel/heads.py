"""A module whose heads are dealt to the ranks: columns of W_Q, W_K, W_V and rows of W_O [1]_.

    X, on every rank --own W_Q|W_K|W_V--> own heads --own W_O--> own share of the output --Allreduce--> output, on every rank

The backward pass mirrors it: each rank's share of grad_X, one Allreduce. Where several ranks hold one key/value head, the
gradients of its weights go through the same Allreduce.

References
----------
.. [1] Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""
from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NoReturn, TypeVar

import numpy as np

from fastmha import validate
from fastmha._core import Problem
from fastmha.cache import KVCache
from fastmha.multihead import MultiHeadAttention
from fastmha.parallel.plans import HeadCut, cut_heads
from fastmha.parallel.together import Team
from fastmha.validate import Rules

Result = TypeVar("Result")
# what each rank may give as it likes
_OWN_KEYWORDS = ("cache", "transform_qk", "num_threads")


class _Share(MultiHeadAttention):
    """A rank's heads. Its `forward` returns the sum of the shares of all ranks."""

    _one_by_one = True

    def __init__(self, whole: MultiHeadAttention, cut: HeadCut, team: Team, overlap_rows: int | None) -> None:
        super().__init__(whole.d_model, cut.heads.stop - cut.heads.start, num_kv_heads=cut.kv_heads.stop - cut.kv_heads.start,
                         head_dim=whole.head_dim, use_bias=whole.use_bias, kdim=whole.kdim, vdim=whole.vdim, dtype=whole.dtype,
                         layout=whole.layout, algorithm=whole.algorithm, rng=0, precision=whole.precision)
        self.cut, self.team, self.all_heads, self.overlap_rows = cut, team, whole.num_heads, overlap_rows
        self.alike: Callable[[], dict[str, Any]] | None = None
        self.agreed = False             # in this call
        self.mask_by_head = False       # in the forward that is kept

    def _forward(self, X: Any, rules: Rules, need_weights: Any, training: Any, *more: Any) -> Any:
        H, own = self.all_heads, self.cut.heads
        by_head = False
        if rules.mask is not None:
            mask = validate.as_array("mask", rules.mask)
            by_head = mask.ndim == 4 and mask.shape[1] != 1
            if by_head and mask.shape[1] != H:
                raise ValueError(f"mask must have 1 or all {H} heads of the module on axis 1, got shape {mask.shape}")
            rules = rules._replace(mask=mask[:, own] if by_head else mask)
        of_heads = {}
        for name in ("sinks", "alibi"):
            values = getattr(rules, name)
            if values is not None:
                of_heads[name] = validate.of_heads(name, values, H, self.dtype)[own]
        result = super()._forward(X, rules._replace(**of_heads), need_weights, training, *more)
        if training:
            self.mask_by_head = by_head
        return result

    def _problem(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, rules: Rules) -> Problem:
        p = super()._problem(q, k, v, rules)
        if p.draws is None:
            return p
        probability, seed, b, _, i, j = p.draws         # what is dropped depends on a head's number in the whole
        moved = Problem(p.q, p.k, p.v, p.bool_mask, p.additive_mask, p.offset, p.key_starts, p.key_lengths, *p.window, p.scale,
                        p.softcap, p.sinks, p.alibi, (probability, seed, b, self.cut.heads.start, i, j))
        moved.layout, moved.bytes_copied = p.layout, p.bytes_copied
        return moved

    def _project_out(self, concat: np.ndarray, workers: int, bias: bool = True, out: np.ndarray | None = None) -> np.ndarray:
        bias, rows = bias and self.team.rank == 0, self.overlap_rows
        if rows is not None and self.team.size > 1:
            return self._overlapped(concat, workers, bias, rows)
        out = super()._project_out(concat, workers, bias, out)
        # here and not behind the call: what raises now takes the new tokens out of a cache again
        self.agreed = True
        self.team.agree(lambda: None, self.alike)
        return self.team.add(out)

    def _overlapped(self, concat: np.ndarray, workers: int, bias: bool, n: int) -> np.ndarray:
        """The same, of n rows after the other: their sum is under way while the next ones are computed."""
        B, L, width = concat.shape
        rows, error = concat.reshape(1, B * L, width), None
        self.agreed = True
        out = self.team.agree(lambda: np.empty((1, B * L, self._d_out), self.dtype), self.alike)
        sums = []
        for start in range(0, B * L, n):
            some = out[:, start:start + n]
            if error is None:
                try:
                    super()._project_out(rows[:, start:start + n], workers, bias, some)
                except BaseException as raised:     # the others wait for every sum
                    error = raised
            sums.append(self.team.start_adding(some))
        self.team.wait(sums)
        self.team.agree(lambda: None if error is None else _raise(error))
        return out.reshape(B, L, self._d_out)


class ShardedAttention:
    """One rank's part of a `fastmha.MultiHeadAttention`, made by `shard`.

    `forward`, `backward`, `state_dict`, `load_state_dict`, `project_context` and `gather` are collective: every rank calls them,
    in the same order and with the same arguments, and an error on one rank is one on all (`OtherRankError` on the others). X,
    grad_output, masks and contexts are the whole ones, equal on all ranks; their shapes are compared, their items are not.

    Attributes
    ----------
    own : MultiHeadAttention
        The rank's heads with its columns of W_Q, W_K, W_V (b_Q, b_K, b_V), its rows of W_O, and b_O, which all ranks hold
        and the first one adds. Its weights may be read and assigned; key/value heads on several ranks are to stay equal, as
        they do where all apply `gradients` alike.
    heads, kv_heads : slice
        Which of the whole module's they are.
    num_heads, num_kv_heads : int
        Of the whole module.
    team : Team
        The ranks, with counts of messages and bytes.
    grad_context, grad_sinks, grad_mask
        As of a `fastmha.MultiHeadAttention`, the whole ones, on every rank.
    """

    def __init__(self, whole: MultiHeadAttention, team: Team, overlap_rows: int | None = None) -> None:
        self.team = team
        self.num_heads, self.num_kv_heads = whole.num_heads, whole.num_kv_heads
        cuts = cut_heads(whole.num_heads, whole.num_kv_heads, team.size)
        self.own = _Share(whole, cuts[team.rank], team, overlap_rows)
        self.heads, self.kv_heads = self.own.cut.heads, self.own.cut.kv_heads
        self._shapes = {name: value.shape for name, value in whole.parameters().items()}
        self.own.load_state_dict({name: value[self._place(name)] for name, value in whole.parameters().items()})
        self.grad_context: Any = None
        self.grad_sinks: np.ndarray | None = None
        self.grad_mask: np.ndarray | None = None

    def _place(self, name: str) -> tuple[slice, ...]:
        """Where the own parameter of that name lies in the whole one."""
        D, everything = self.own.head_dim, slice(None)
        if name == "b_O":
            return (everything,)
        heads = self.kv_heads if name[2] in "KV" else self.heads
        columns = slice(heads.start * D, heads.stop * D)
        return (columns,) if name[0] == "b" or name == "W_O" else (everything, columns)

    # ------------------------------------------------------------------------------------------------- passes

    def forward(self, X: np.ndarray, mask: np.ndarray | None = None, **keywords: Any) -> Any:
        """Attend; one agreement and one Allreduce of the output.

        Parameters
        ----------
        X, mask
            As in `fastmha.MultiHeadAttention.forward`.
        **keywords
            Its keywords, with sinks, alibi and a mask's axis of heads for all heads. A cache is the rank's own, ``KVCache(B,
            sharded.own.num_kv_heads, sharded.own.head_dim)``; if any rank fails, it is on all ranks as it was.

        Returns
        -------
        out : (B, L, d_model) array
            The same bits on all ranks.
        weights : (B, heads of this rank, L, Lk) array, with ``need_weights=True``

        Raises
        ------
        ValueError, TypeError
            As `fastmha.MultiHeadAttention.forward`; on all ranks, if X or a keyword differs among them.
        OtherRankError
            If another rank raised.
        """
        own = self.own

        def alike() -> dict[str, Any]:
            cache, context = keywords.get("cache"), keywords.get("context")
            given = {name: value for name, value in keywords.items() if name not in (*_OWN_KEYWORDS, "context")}
            return {"X.shape": np.shape(X), "mask": mask, **given, "context": _shapes(context),
                    "cache.lengths": None if cache is None else cache.lengths}

        own.alike, own.agreed = alike, False
        return self._heard(lambda: own.forward(X, mask, **keywords))

    def backward(self, grad_output: np.ndarray, **keywords: Any) -> np.ndarray:
        """Gradients of the last training forward; one agreement and one Allreduce, of grad_X and what else is a sum over ranks.

        Parameters
        ----------
        grad_output : (B, L, d_model) array of real numbers
            The whole gradient of the output, equal on all ranks.
        **keywords
            Those of `fastmha.MultiHeadAttention.backward`: need_bias_grad, num_threads.

        Returns
        -------
        grad_X : (B, L, d_model) array
            The same bits on all ranks. `gradients` are the own parameters'; after an error they are undefined.

        Raises
        ------
        ValueError, TypeError, OtherRankError
            As `forward`.
        """
        own, team = self.own, self.team
        replicated = [name for name in self._shapes if name[2] in "KV"] if team.size > self.num_kv_heads else []

        def shares() -> list[np.ndarray]:
            """What is summed, grad_X first: of what each rank has a part of its own, the others' are 0."""
            grad_X = own.backward(grad_output, **keywords)
            if team.size == 1:
                return [grad_X]
            context = own.grad_context if isinstance(own.grad_context, tuple) else (own.grad_context,)
            parts = [grad_X, *(grad for grad in context if grad is not None)]
            if own.grad_sinks is not None:
                parts.append(_placed(own.grad_sinks, (self.num_heads,), (self.heads,)))
            if own.grad_mask is not None:
                mask = own.grad_mask
                whole = (mask.shape[0], self.num_heads, *mask.shape[2:])
                parts.append(_placed(mask, whole, (slice(None), self.heads)) if own.mask_by_head else mask)
            parts += [_placed(own._gradient(name), self._shapes[name], self._place(name)) for name in replicated]
            return parts if len(parts) == 1 else [np.concatenate([part.ravel() for part in parts]), *parts]

        def alike() -> dict[str, Any]:
            given = {name: value for name, value in keywords.items() if name != "num_threads"}
            return {"grad_output.shape": np.shape(grad_output), "need_bias_grad": False, **given}

        summed, *parts = team.agree(shares, alike)
        team.add(summed)
        if parts:
            ends = np.cumsum([part.size for part in parts])
            parts = [run.reshape(part.shape) for run, part in zip(np.split(summed, ends[:-1]), parts)]
        else:
            parts = [summed]
        for name in reversed(replicated):
            own._gradient(name)[...] = parts.pop()[self._place(name)]
        self.grad_mask = None if own.grad_mask is None else own.grad_mask if team.size == 1 else parts.pop()
        self.grad_sinks = None if own.grad_sinks is None else own.grad_sinks if team.size == 1 else parts.pop()
        self.grad_context = own.grad_context
        if own.grad_context is not None and team.size > 1:
            self.grad_context = (parts[1], parts[2]) if isinstance(own.grad_context, tuple) else parts[1]
        return parts[0]

    def _heard(self, work: Callable[[], Result]) -> Result:
        """work(), in which all ranks agree once; where it fails before, the others are told."""
        try:
            return work()
        except BaseException as raised:
            error = raised
        if not self.own.agreed:
            self.team.agree(lambda: _raise(error))
        raise error

    def project_context(self, C: Any, *, num_threads: int | None = None) -> KVCache:
        """As `fastmha.MultiHeadAttention.project_context`, for the rank's own key/value heads; one agreement."""
        return self.team.agree(lambda: self.own.project_context(C, num_threads=num_threads), lambda: {"C": _shapes(C)})

    # ------------------------------------------------------------------------------------------------- parameters

    def parameters(self) -> dict[str, np.ndarray]:
        """Name -> the rank's part of the parameter, a view."""
        return self.own.parameters()

    def gradients(self) -> dict[str, np.ndarray]:
        """Name -> the gradient of the rank's part, equal on all ranks that hold it."""
        return self.own.gradients()

    def state_dict(self) -> dict[str, np.ndarray]:
        """The whole module's parameters, on every rank: what one module or any number of ranks can load. Collective."""
        return self._whole(self.parameters)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy the rank's part of the whole module's parameters in; if any rank fails, after the same checks on all of them."""
        def parts() -> dict[str, Any]:
            if not isinstance(state, dict):
                raise TypeError(f"state must be a dict, got {type(state).__name__}")
            taken = dict(state)
            for name, shape in self._shapes.items():
                if name in taken:
                    value = validate.reals(name, taken[name])
                    if value.shape != shape:
                        raise ValueError(f"{name} must have the whole module's shape {shape}, got {value.shape}")
                    taken[name] = value[self._place(name)]
            return taken

        self.team.agree(lambda: self.own.load_state_dict(parts()))

    def _whole(self, own: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Whole arrays, by one Allreduce, of the parts that own() returns on each rank; of equal parts the first rank's count."""
        def placed() -> np.ndarray:
            runs = []
            for name, part in own().items():
                holds = self.team.rank == 0 if name == "b_O" else name[2] not in "KV" or self.own.cut.is_first
                runs.append(_placed(part if holds else np.zeros((), part.dtype), self._shapes[name], self._place(name)).ravel())
            return np.concatenate(runs)

        summed = self.team.add(self.team.agree(placed))
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in self._shapes.values()])
        return {name: run.reshape(shape).copy()
                for (name, shape), run in zip(self._shapes.items(), np.split(summed, ends[:-1]))}

    def freeze(self) -> None:
        """As `fastmha.MultiHeadAttention.freeze`, of the rank's part."""
        self.own.freeze()

    def unfreeze(self) -> None:
        """As `fastmha.MultiHeadAttention.unfreeze`."""
        self.own.unfreeze()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ShardedAttention cannot be pickled or copied, its communicator belongs to this process: "
                        "gather(sharded) can")

    def __repr__(self) -> str:
        heads, kv_heads = (f"{run.start} to {run.stop - 1}" for run in (self.heads, self.kv_heads))
        return (f"<ShardedAttention: rank {self.team.rank} of {self.team.size}, heads {heads} of {self.num_heads}, "
                f"key/value heads {kv_heads} of {self.num_kv_heads}, {self.own!r}>")


def shard(module: MultiHeadAttention, comm: Any, *, overlap_rows: int | None = None) -> ShardedAttention:
    """The rank's part of a module whose heads are dealt to the ranks of a communicator. Collective.

    Parameters
    ----------
    module : MultiHeadAttention
        Equal on all ranks: drawn from one seed, or loaded from one file. It is copied from, not changed; its gradients and
        what it keeps for backward stay behind.
    comm : mpi4py.MPI.Intracomm or Team
        At most a rank for each head. Heads are dealt as evenly as they go, in whole groups; where ranks outnumber the key/value
        heads, each of these is held by the ranks that share out its group.
    overlap_rows : int, optional
        Sum the output in slices of so many of its B · L rows, each while the next one is projected, instead of as a whole. This
        pays where the link, not a CPU, does the sum: measure it (benches/parallel.py).

    Returns
    -------
    ShardedAttention

    Raises
    ------
    ValueError
        On all ranks: if there are more ranks than heads, or the modules differ.
    TypeError
        If module is no MultiHeadAttention, or one of half precision.
    OtherRankError
        If another rank raised.
    ImportError
        Without mpi4py, or where it finds no MPI library: ``pip install "fastmha[mpi]" mpich``.

    Examples
    --------
    >>> import numpy as np, fastmha
    >>> from fastmha.parallel import shard                                              # a program that runs on every rank
    >>> from mpi4py import MPI                                                          # doctest: +SKIP
    >>> sharded = shard(fastmha.MultiHeadAttention(64, 8, rng=0), MPI.COMM_WORLD)       # doctest: +SKIP
    >>> out = sharded.forward(np.ones((2, 10, 64)), is_causal=True)                     # doctest: +SKIP
    """
    team = Team.of(comm)

    def checked() -> ShardedAttention:
        if not isinstance(module, MultiHeadAttention):
            raise TypeError(f"module must be a MultiHeadAttention, got {type(module).__name__}")
        if module.dtype not in validate.FLOAT_TYPES:        # each rank's share would be rounded, and MPI knows no bfloat16
            raise TypeError(f"module must be of float32 or float64, got one of {module.dtype}")
        rows = None if overlap_rows is None else validate.integer("overlap_rows", overlap_rows, 1)
        return ShardedAttention(module, team, rows)

    def alike() -> dict[str, Any]:
        digest = blake2b(digest_size=8)
        for value in module.parameters().values():
            digest.update(np.ascontiguousarray(value).view(np.uint8).data)
        return {"module": repr(module), "overlap_rows": overlap_rows, "the digest of module's parameters": digest.hexdigest()}

    return team.agree(checked, alike)


def gather(sharded: ShardedAttention) -> MultiHeadAttention:
    """The whole module, on every rank, with its gradients where there are any. Collective.

    Parameters
    ----------
    sharded : ShardedAttention

    Returns
    -------
    MultiHeadAttention
        Not frozen; nothing is kept for backward.

    Raises
    ------
    TypeError
        If sharded is no ShardedAttention.
    """
    if not isinstance(sharded, ShardedAttention):
        raise TypeError(f"sharded must be a ShardedAttention, got {type(sharded).__name__}")
    own = sharded.own
    whole = MultiHeadAttention(own.d_model, sharded.num_heads, num_kv_heads=sharded.num_kv_heads, head_dim=own.head_dim,
                               use_bias=own.use_bias, kdim=own.kdim, vdim=own.vdim, dtype=own.dtype, layout=own.layout,
                               algorithm=own.algorithm, rng=0, precision=own.precision)
    whole.load_state_dict(sharded.state_dict())
    if own._grads:
        whole._gradient_buffers()
        for name, gradient in sharded._whole(sharded.gradients).items():
            whole._gradient(name)[...] = gradient
        whole.grad_context, whole.grad_sinks, whole.grad_mask = sharded.grad_context, sharded.grad_sinks, sharded.grad_mask
    return whole


def _placed(part: np.ndarray, shape: tuple[int, ...], place: tuple[slice, ...]) -> np.ndarray:
    """Zeros of that shape with part where it belongs."""
    whole = np.zeros(shape, part.dtype)
    whole[place] = part
    return whole


def _shapes(arrays: Any) -> Any:
    if isinstance(arrays, KVCache):
        return arrays.lengths
    return [np.shape(x) for x in arrays] if isinstance(arrays, tuple) else None if arrays is None else np.shape(arrays)


def _raise(error: BaseException) -> NoReturn:
    raise error
