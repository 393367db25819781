"""Where operands lie: heads in a layout, and attention on the same heads that lie elsewhere."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fastmha import algorithms, validate
from fastmha.study.cases import Case
from fastmha.study.machine import memory
from fastmha.study.trial import Arms, checked


class Place(NamedTuple):
    """Where the heads of an arm lie: a layout as `lay` knows it, in huge pages or in small ones."""

    layout: str | int
    huge: bool = True


def side_by_side(buffer: np.ndarray, heads: Sequence[int], D: int) -> list[np.ndarray]:
    """Views (B, heads, L, D), one for each number of heads, that follow each other in the rows of a buffer (B, L, items)."""
    ends = np.cumsum((0, *heads)).tolist()
    split = buffer[:, :, :ends[-1] * D].reshape(*buffer.shape[:2], ends[-1], D)
    return [split[:, :, start:end].transpose(0, 2, 1, 3) for start, end in pairwise(ends)]


def lay(of: Case, layout: str | int, huge: bool = True) -> tuple[np.ndarray, list[np.ndarray]]:
    """Memory for q, k and v of a case, whole, and the views (1, H, L, D) of the three.

    Layouts: "side by side", rows of q, k and v after one another; a number, the same with so many bytes from row to row;
    "interleaved", (H, 3, D) in a row; "separate", three arrays of rows; "packed", each head contiguous.
    """
    L, H, D = of.Lq, of.H, of.D
    row = layout if isinstance(layout, int) else 3 * H * D * of.itemsize
    whole = memory(L * row, huge).view(of.dtype)
    if layout == "interleaved":
        views = whole.reshape(L, H, 3, D).transpose(2, 1, 0, 3)
    elif layout == "separate":
        views = whole.reshape(3, L, H, D).transpose(0, 2, 1, 3)
    elif layout == "packed":
        views = whole.reshape(3, H, L, D)
    else:
        return whole, side_by_side(whole.reshape(1, L, -1), (H, H, H), D)
    return whole, [view[None] for view in views]


def merged(of: Case) -> np.ndarray:
    """Zeros: a view (1, H, L, D) of a merged buffer (1, L, H·D)."""
    return side_by_side(np.zeros((1, of.Lq, of.H * of.D), of.dtype), (of.H,), of.D)[0]


def problem(q: np.ndarray, k: np.ndarray, v: np.ndarray, is_causal: bool = False, offset: Any = None) -> algorithms.Problem:
    """The attention of heads (B, heads, L, D), validated."""
    return validate.attention_problem(q, k, v, "BHLD", validate.Rules(is_causal=is_causal, offset=offset))


def attention_arms(of: Case, direction: str, places: Mapping[str, Place], num_threads: int) -> Arms:
    """An arm for each place, heads with the same numbers, once their answers have been compared. The output is merged in all;
    backward, the gradients lie as the operands do."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal((3, 1, of.H, of.Lq, of.D), np.dtype(of.dtype).type)
    out, grad_out, lse = merged(of), merged(of), np.empty((1, of.H, of.Lq), of.dtype)
    grad_out[...] = generator.standard_normal(out.shape, values.dtype.type)

    def arm(place: Place) -> tuple[Callable[[], None], dict[str, np.ndarray]]:
        heads = lay(of, *place)[1]
        for view, value in zip(heads, values):
            view[...] = value
        q, k, v = heads
        what = problem(q, k, v)

        def forward() -> None:
            algorithms.forward(of.algorithm, what, out, lse, None, num_threads)

        if direction == "forward":
            return forward, {"out": out, "lse": lse}
        grad_q, grad_k, grad_v = lay(of, *place)[1]
        forward()       # backward reads its out and lse

        def backward() -> None:
            algorithms.backward(of.algorithm, what, out, lse, grad_out, grad_q, grad_k, grad_v, num_threads)

        return backward, {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}

    made = {name: arm(place) for name, place in places.items()}
    return checked(f"{of.name} {direction}", {name: function for name, (function, _) in made.items()},
                   {name: results for name, (_, results) in made.items()}, of.dtype)
