"""Attention over sequences that are cut among ranks: keys and values travel round a ring, see docs/parallel.md.

At every step a rank has the keys and values of one rank, and the next ones are on their way while it works on them. What its
queries find in each is merged by lse. Positions are those of the whole sequence: a run of queries over a run of keys is one
problem of the core with an offset, lengths, a mask and draws that are shifted to it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from fastmha import _core, algorithms, threads, validate
from fastmha._core import Problem
from fastmha.cached import merge_into
from fastmha.parallel.together import Team
from fastmha.planning import choose, pairs
from fastmha.validate import KeyRanges, Rules

ORDERS = ("zigzag", "contiguous")
Runs = tuple[tuple[int, int], ...]


def ring_positions(length: int | Sequence[int], size: int, rank: int, order: str = "zigzag") -> Runs:
    """The positions of the whole sequence that a rank holds, in the order in which it holds them.

    Parameters
    ----------
    length : int or sequence of `size` ints
        Tokens of the whole sequence, cut as evenly as they can be; or how many each rank holds.
    size, rank : int
        Ranks of the ring, and one of them.
    order : {"zigzag", "contiguous"}
        "contiguous": rank after rank. "zigzag": each rank has a run from the front and one from the back, the longer one (by at
        most one token) in front. Of 4 ranks, which::

            contiguous   0 0 1 1 2 2 3 3
            zigzag       0 1 2 3 3 2 1 0

    Returns
    -------
    tuple of (start, stop)
        One run, or two with "zigzag"; either may be empty.

    Raises
    ------
    ValueError, TypeError
        For a length below 0, a rank outside [0, size), another order.

    Examples
    --------
    >>> from fastmha.parallel import ring_positions
    >>> [ring_positions(16, 4, rank) for rank in range(4)]
    [((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 8), (8, 10))]
    """
    size = validate.integer("size", size, 1)
    rank = validate.integer("rank", rank, 0, size - 1)
    validate.choice("order", order, ORDERS)
    held = ring_lengths(length, size, order)
    if order == "contiguous":
        start = sum(held[:rank])
        return ((start, start + held[rank]),)
    front = sum(-(-n // 2) for n in held[:rank])
    back = sum(held) - sum(n // 2 for n in held[:rank])
    return (front, front + -(-held[rank] // 2)), (back - held[rank] // 2, back)


def ring_lengths(length: int | Sequence[int], size: int, order: str, name: str = "length") -> list[int]:
    """How many tokens each rank holds, of a whole cut evenly or as given; see `ring_positions`."""
    if isinstance(length, (Sequence, np.ndarray)) and not isinstance(length, str):
        if len(length) != size:
            raise ValueError(f"{name} must be an int or one for each of {size} ranks, got {len(length)} of them")
        return [validate.integer(f"{name}[{r}]", n, 0) for r, n in enumerate(length)]
    total = validate.integer(name, length, 0)
    parts = size if order == "contiguous" else 2 * size
    chunks = [total // parts + (c < total % parts) for c in range(parts)]
    return chunks if order == "contiguous" else [a + b for a, b in zip(chunks[:size], reversed(chunks))]


@validate.own_keywords(validate.CALL_NAMES)
def ring_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, comm: Any, *, order: str = "zigzag", layout: str = "BHLD",
    mask: np.ndarray | None = None, is_causal: bool = False, offset: int | np.ndarray | None = None,
    key_padding_lengths: np.ndarray | None = None, key_ranges: KeyRanges | None = None,
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: np.ndarray | None = None, alibi: np.ndarray | None = None, dropout: float = 0.0, seed: int | None = None,
    algorithm: str = "auto", return_lse: bool = False, num_threads: int | None = None,
) -> Any:
    """`fastmha.attention` of a sequence of which every rank holds a slice; a collective call.

    Parameters
    ----------
    q, k, v : arrays
        This rank's queries, keys and values, with axes and strides as in `fastmha.attention`. B, heads, widths and the dtype are
        the same on all ranks; lengths are each rank's own and may be 0, those of q another than those of k.
    comm : mpi4py.MPI.Intracomm or Team
        The ranks of the ring, in order; its errors are returned from now on.
    order : {"zigzag", "contiguous"}
        Which positions of the whole sequence the slices are: `ring_positions` of the lengths of all ranks. "zigzag" gives every
        rank as many pairs where `is_causal` leaves one half of them.
    layout : {"BHLD", "BLHD"}
        As in `fastmha.attention`.
    mask : array of bool or of q's dtype, optional
        Of this rank's queries and **all** keys, by their positions: (Lq, total Lk), or 4 axes that broadcast to (B, H, Lq, total
        Lk). May differ from rank to rank.
    is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout, seed
        As in `fastmha.attention` for the whole sequence, and the same on all ranks. Draws of dropout are those of one process.
    algorithm, return_lse, num_threads
        As in `fastmha.attention`, each rank's own; "auto" chooses for each run of queries over a run of keys.

    Returns
    -------
    out : (B, H, Lq, Dv) array in the layout asked for
        Of this rank's queries.
    lse : (B, H, Lq) array, with ``return_lse=True``

    Raises
    ------
    ValueError, TypeError
        On the rank whose arguments are wrong, naming the argument; on all ranks if what must be the same differs.
    OtherRankError
        On the other ranks then, and where a rank fails in the middle.
    RuntimeError
        Where a message fails, because a rank has ended.

    Notes
    -----
    Equal to `fastmha.attention` to rounding, and not to the bit: each merge rounds, in the dtype of q. Partial results are merged
    in an order that follows from positions and the number of ranks alone, never from which message came first: from run to run
    and for any number of threads the bits are the same.

    A row is merged by lse, in the dtype of q. Where all its scores are one huge constant, such as a mask of -1e9 at every key,
    lse has lost the number of keys: each run then counts as much as the others, and gradients of such rows mean nothing.

    Each rank sends size - 1 messages of keys and values, and three small ones: lengths, and twice whether all ranks go on.
    """
    team = Team.of(comm)
    rules = Rules(mask, is_causal, offset, key_padding_lengths, window, scale, softcap, algorithm, num_threads, key_ranges, sinks,
                  alibi, dropout, seed)
    lengths, told = _all_lengths(team, q, k, layout), {"call": "ring_attention"}

    def prepare() -> Any:
        own = validate.attention_problem(q, k, v, layout)
        if (lengths < 0).any():
            return None         # a rank with arrays of other axes is about to say so
        ring = _Ring(team, own, order, rules, lengths, backward=False)
        told.update(ring.alike())
        B, H, _, Lq, _, _, Dv = ring.whole.shape
        out = np.zeros((B, H, Lq, Dv) if layout == "BHLD" else (B, Lq, H, Dv), ring.whole.dtype)
        lse = np.full((B, H, Lq), -np.inf, out.dtype)
        if ring.whole.sinks is not None:        # they join once, before any key
            lse[...] = ring.whole.sinks[:, None]
        return ring, out, lse, validate.flag("return_lse", return_lse)

    ring, out, lse, wanted = team.agree(prepare, lambda: told)
    heads = _by_head(out, layout)

    def attend(owner: int, keys: np.ndarray, sums: np.ndarray) -> None:
        for at, _, _, problem in ring.problems(owner, keys):
            side = np.empty((*lse[:, :, at].shape, heads.shape[3]), out.dtype)
            side_lse = np.empty(side.shape[:3], out.dtype)
            algorithms.forward(choose(problem, algorithm)[0], problem, side, side_lse, None, ring.workers)
            merge_into(heads[:, :, at], lse[:, :, at], side, side_lse)

    ring.travel(attend)
    return (out, lse) if wanted else out


@validate.own_keywords(validate.CALL_NAMES)
def ring_attention_backward(
    grad_out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray, comm: Any, *,
    order: str = "zigzag", layout: str = "BHLD", mask: np.ndarray | None = None, is_causal: bool = False,
    offset: int | np.ndarray | None = None, key_padding_lengths: np.ndarray | None = None, key_ranges: KeyRanges | None = None,
    window: tuple[int | None, int | None] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: np.ndarray | None = None, alibi: np.ndarray | None = None, dropout: float = 0.0, seed: int | None = None,
    need_bias_grad: bool = False, algorithm: str = "auto", num_threads: int | None = None,
) -> tuple[np.ndarray, ...]:
    """Gradients of `ring_attention`; a collective call.

    Parameters
    ----------
    grad_out : (B, H, Lq, Dv) array
        Gradient of the loss, which is the sum over all ranks, with respect to this rank's output, in `layout`.
    q, k, v, comm
        As in `ring_attention`.
    out, lse : arrays
        What ``ring_attention(..., return_lse=True)`` returned on this rank for the same arguments.
    order, layout, mask, is_causal, offset, key_padding_lengths, key_ranges, window, scale, softcap, sinks, alibi, dropout, seed
        As in `ring_attention`.
    need_bias_grad : bool
        Also return the gradient of this rank's mask, which must be one of floats; each rank's own choice.
    algorithm, num_threads
        As in `ring_attention`; "decode" has no backward pass.

    Returns
    -------
    grad_q, grad_k, grad_v : arrays of the shapes of q, k and v
        Of this rank's slices, over all queries and keys of all ranks.
    grad_sinks : (H,) array, where sinks were given
        Of all ranks, the same bits on each.
    grad_mask : array of the mask's own shape, with ``need_bias_grad=True``
        Summed over the axes that the mask is broadcast along, of this rank's queries.

    Raises
    ------
    ValueError, TypeError, OtherRankError, RuntimeError
        As `ring_attention`; also for a grad_out, out or lse of the wrong shape or dtype.

    Notes
    -----
    With the lse of the whole row each run of queries over a run of keys is one `fastmha.attention_backward`. The gradients of a
    rank's keys and values travel behind them, one step later, and come home at the end. They are added in the order of the ranks
    from that one on, those of queries in the order in which keys pass: by positions and the number of ranks alone, so that the
    bits are the same from run to run and for any number of threads.

    Each weight is exp(score - lse) with the lse that was given, and errs relatively by its rounding, eps · abs(lse): a run of
    keys does not know the sums of the others, which a single process falls back on where abs(lse) is large.

    Each rank sends size - 1 messages of keys and values, size of their gradients (none where it is alone), and the small
    ones of `ring_attention`; with sinks one more, of their gradient.
    """
    team = Team.of(comm)
    rules = Rules(mask, is_causal, offset, key_padding_lengths, window, scale, softcap, algorithm, num_threads, key_ranges, sinks,
                  alibi, dropout, seed)
    lengths, told = _all_lengths(team, q, k, layout), {"call": "ring_attention_backward"}

    def prepare() -> Any:
        own = validate.attention_problem(q, k, v, layout)
        if (lengths < 0).any():
            return None
        ring = _Ring(team, own, order, rules, lengths, backward=True)
        told.update(ring.alike())
        whole = ring.whole
        if validate.flag("need_bias_grad", need_bias_grad) and whole.additive_mask is None:
            came = "no mask" if mask is None else "one of bool"
            raise ValueError(f"need_bias_grad needs a mask of {whole.dtype}, which is added to the scores, got {came}")
        B, H, _, Lq, _, _, Dv = whole.shape
        shape = (B, H, Lq, Dv) if layout == "BHLD" else (B, Lq, H, Dv)
        of_out, result = (validate.usable(_by_head(validate.like(name, x, shape, whole.dtype, layout), layout))[0]
                          for name, x in (("grad_out", grad_out), ("out", out)))
        of_rows = validate.like("lse", lse, (B, H, Lq), whole.dtype, layout)
        grad_mask = np.zeros(whole.additive_mask.shape) if need_bias_grad and whole.additive_mask is not None else None
        grad_sinks = None if whole.sinks is None else _sink_gradient(whole.sinks, result, of_rows, of_out)
        return ring, of_out, result, of_rows, np.zeros(np.shape(q), whole.dtype), grad_sinks, grad_mask

    ring, of_out, result, of_rows, grad_q, grad_sinks, grad_mask = team.agree(prepare, lambda: told)
    whole = ring.whole
    by_head = _by_head(grad_q, layout)

    def attend(owner: int, keys: np.ndarray, sums: np.ndarray) -> None:
        sum_k, sum_v = ring.views(sums, owner)
        for at, of_keys, columns, problem in ring.problems(owner, keys):
            grads = [np.empty(x.shape, x.dtype) for x in (problem.q, problem.k, problem.v)]
            piece = None if grad_mask is None else np.empty(np.shape(problem.additive_mask), whole.dtype)
            algorithms.backward(choose(problem, algorithm, backward=True)[0], problem, result[:, :, at],
                                np.ascontiguousarray(of_rows[:, :, at]), of_out[:, :, at], grads[0], grads[1], grads[2],
                                ring.workers, piece)
            for to, grad in zip((by_head[:, :, at], sum_k[:, :, of_keys], sum_v[:, :, of_keys]), grads):
                to += grad
            if grad_mask is not None:
                _cut(grad_mask, at, columns)[...] += piece

    own = ring.travel(attend)
    grads = [grad_q, *(np.ascontiguousarray(_by_head(x, layout)) for x in ring.views(own, team.rank))]
    if grad_sinks is not None:
        grads.append(team.add(grad_sinks).astype(whole.dtype))
    return *grads, *(() if grad_mask is None else (grad_mask.astype(whole.dtype),))


class _Ring:
    """A call after the checks of this rank: its queries against the keys of all ranks as one problem, and what travels.

    q, k, v and the problem have the axes (B, heads, L, width). What travels is one flat array: keys, then values.
    """

    def __init__(self, team: Team, own: Problem, order: str, rules: Rules, lengths: np.ndarray, backward: bool) -> None:
        self.team, self.order = team, order
        of_q, of_k = lengths.T.tolist()
        self.runs_q = ring_positions(of_q, team.size, team.rank, order)
        self.runs_k = [ring_positions(of_k, team.size, rank, order) for rank in range(team.size)]
        self.lengths = of_k
        B, _, Hkv, _, _, D, Dv = own.shape
        total_q, total = sum(of_q), validate.integer("the length of k on all ranks", sum(of_k), 0, validate.LARGEST)
        _, right = validate.band(rules.is_causal, rules.window)
        if rules.offset is None and (right is not None or rules.window is not None or rules.alibi is not None):
            rules = rules._replace(offset=validate.offsets(None, B, total_q, total))
        all_k, all_v = (np.broadcast_to(np.zeros(width, own.dtype), (B, Hkv, total, width)) for width in (D, Dv))     # stand-ins
        # values are not looked at: a mask's slice may well remove everything, or what a whole one would be odd to
        self.whole = validate.attention_problem(own.q, all_k, all_v, "BHLD", rules, values=False)
        choose(self.whole, rules.algorithm, backward)
        self.workers = threads.resolve(rules.num_threads)
        # lse and out are of more keys than those of one run
        self.of_parts = self.whole.sinks is not None or sum(stop > start for runs in self.runs_k for start, stop in runs) > 1
        most = max(map(self._count, range(team.size)))
        self.room = np.empty((2 if team.size > 1 else 0, most), own.dtype)
        self.sums = np.empty(((3 if team.size > 1 else 1) if backward else 0, most), own.dtype)
        self.own = np.empty(self._count(team.rank), own.dtype)
        for to, x in zip(self.views(self.own, team.rank), (own.k, own.v)):
            to[...] = x
        self.moving: list[Any] = []

    def alike(self) -> dict[str, Any]:
        """What must be the same on all ranks, under the names of arguments."""
        whole = self.whole
        B, H, Hkv, _, _, D, Dv = whole.shape
        return {
            "q": f"{whole.dtype}, B {B}, H {H}, D {D}", "k": f"Hkv {Hkv}", "v": f"Dv {Dv}", "order": self.order,
            "is_causal and window": whole.window, "offset": in_words(whole.offset),
            "key_padding_lengths and key_ranges": f"{in_words(whole.key_starts)} to {in_words(whole.key_lengths)}",
            "scale": whole.scale, "softcap": whole.softcap, "sinks": in_words(whole.sinks), "alibi": in_words(whole.alibi),
            "dropout and seed": None if whole.draws is None else whole.draws[:2],
        }

    def _count(self, rank: int) -> int:
        B, _, Hkv, _, _, D, Dv = self.whole.shape
        return B * Hkv * self.lengths[rank] * (D + Dv)

    def views(self, flat: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) of a rank, or their gradients, in what travels."""
        B, _, Hkv, _, _, D, Dv = self.whole.shape
        L = self.lengths[rank]
        middle = B * Hkv * L * D
        return flat[:middle].reshape(B, Hkv, L, D), flat[middle:self._count(rank)].reshape(B, Hkv, L, Dv)

    def travel(self, work: Callable[[int, np.ndarray, np.ndarray], None]) -> np.ndarray:
        """work(owner, its keys and values, its gradients to be added to) while the next keys arrive, for the keys of every rank.

        Returns the gradients of this rank's keys and values from all ranks, where there is room for them.
        """
        team, size = self.team, self.team.size
        right, left = (team.rank + 1) % size, (team.rank - 1) % size
        keys = self.own
        failed: BaseException | None = None
        arriving: list[Any] = []
        gradients: list[Any] = []
        for step in range(size):
            owner = (team.rank - step) % size
            count, following = self._count(owner), self._count(owner - 1)
            if step + 1 < size:
                into = self.room[step % 2, :following]
                arriving = team.exchange(keys, right, into, left)
            self.moving = arriving + gradients
            mine = self.sums[2 if step else 0, :count] if len(self.sums) else keys[:0]
            mine[...] = 0
            try:
                if failed is None:
                    work(owner, keys, mine)
            except BaseException as error:      # the others wait for what this rank passes on
                failed = error
            if len(self.sums) and size > 1:
                total = self.sums[step % 2, :count]
                if step:        # what the ranks before this one have added up
                    team.wait(gradients)
                    total += mine
                gradients = team.exchange(total, right, self.sums[(step + 1) % 2, :following], left)
            team.wait(arriving)
            keys = into if step + 1 < size else keys
        team.wait(gradients)

        def outcome() -> np.ndarray:
            if failed is not None:
                raise failed
            return self.sums[size % 2 if size > 1 else 0, :self._count(team.rank)] if len(self.sums) else keys[:0]

        return team.agree(outcome)

    def problems(self, owner: int, keys: np.ndarray) -> Iterator[tuple[slice, slice, slice, Problem]]:
        """Each run of queries over each run of a rank's keys of which the rules leave a pair: the places of the queries, those of
        the keys in what this rank has and in the whole sequence, and the problem."""
        whole = self.whole
        k, v = self.views(keys, owner)
        at = 0
        for q0, q1 in self.runs_q:
            rows = slice(at, at + q1 - q0)
            place, at = 0, rows.stop
            for k0, k1 in self.runs_k[owner]:
                of_keys, columns = slice(place, place + k1 - k0), slice(k0, k1)
                place = of_keys.stop
                starts, ends = (None if x is None else np.clip(x - k0, 0, k1 - k0) for x in (whole.key_starts, whole.key_lengths))
                problem = Problem(
                    whole.q[:, :, rows], k[:, :, of_keys], v[:, :, of_keys], _cut(whole.bool_mask, rows, columns),
                    _cut(whole.additive_mask, rows, columns), None if whole.offset is None else whole.offset + (q0 - k0), starts,
                    ends, *whole.window, whole.scale, whole.softcap, None, whole.alibi,
                    None if whole.draws is None else (*whole.draws[:2], 0, 0, q0, k0))
                if pairs(problem).any():
                    self.team.progress(self.moving)
                    yield rows, of_keys, columns, problem.of_part() if self.of_parts else problem


def _all_lengths(team: Team, q: Any, k: Any, layout: Any) -> np.ndarray:
    """(size, 2) lengths of q and k of every rank, -1 where they are no arrays of 4 axes; one message, which checks nothing."""
    lengths = np.zeros((team.size, 2), np.int64)
    for i, x in enumerate((q, k)):
        try:
            lengths[team.rank, i] = _by_head(validate.heads("q", x, layout), layout).shape[2]
        except Exception:       # of whatever kind: the checks will raise it
            lengths[team.rank, i] = -1
    return team.add(lengths)


def _by_head(x: np.ndarray, layout: str) -> np.ndarray:
    """x as (B, H, L, width), or back."""
    return x if layout == "BHLD" else x.swapaxes(1, 2)


def _cut(mask: np.ndarray | None, rows: slice, columns: slice) -> Any:
    """The part of a mask for those queries and keys; an axis of length 1 stays."""
    if mask is None:
        return None
    of_queries, of_keys = (part if n > 1 else slice(None) for n, part in zip(mask.shape[-2:], (rows, columns)))
    return mask[..., of_queries, of_keys]


def in_words(x: np.ndarray | None) -> str:
    """The values of an array in few words."""
    if x is None or x.size <= 4:
        return "None" if x is None else str(x.tolist())
    return f"{x.size} values of digest {blake2b(x.tobytes(), digest_size=6).hexdigest()}"


def _sink_gradient(sinks: np.ndarray, out: np.ndarray, lse: np.ndarray, grad_out: np.ndarray) -> np.ndarray:
    """(H,) float64: of this rank's rows, with rowsum(P ∘ dP) = rowsum(out ∘ grad_out); rows of zeros have attended nothing."""
    with np.errstate(all="ignore"):
        delta = np.einsum("bhid,bhid->bhi", out, grad_out, dtype=np.float64)
    states = np.zeros((*lse.shape, _core.ROW_STATE))
    attended = out.any(axis=3)
    states[..., 0] = np.where(attended, lse, np.inf)
    states[..., 1] = attended
    states[..., 2] = np.where(attended, delta, 0)
    return algorithms.sink_gradient(sinks.astype(np.float64), states)
