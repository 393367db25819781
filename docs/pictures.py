"""The pictures of the pages, drawn by `fastmha.plot` while these are built: each function returns a matplotlib Figure.

A page asks for one by a comment, ``<!-- picture NAME: what it shows -->``.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastmha import plot, reference

TOKENS = ["the", "cat", "sat", "on", "the", "mat"]
HEADS, WIDTH = 4, 8
PAGE = 4096


def _projected() -> np.ndarray:
    """Of the tokens: (1, L, H * D)."""
    return np.random.default_rng(0).standard_normal((1, len(TOKENS), HEADS * WIDTH))


def _at_a_page(x: np.ndarray) -> np.ndarray:
    """x from the begin of a page on, so that its picture is the same each time."""
    memory = np.empty(x.nbytes + PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    held = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    held[...] = x
    return held


def weights() -> Any:
    q = k = reference.split_heads(_projected(), HEADS)
    return plot.attention(reference.attention_weights(q, k, is_causal=True)[0], TOKENS, list(range(HEADS)))


def strided() -> Any:
    return plot.layout(reference.split_heads(_at_a_page(_projected()), HEADS), "BHLD")


def contiguous() -> Any:
    return plot.layout(_at_a_page(reference.split_heads(_projected(), HEADS)), "BHLD")


PICTURES: dict[str, Callable[[], Any]] = {"weights": weights, "strided": strided, "contiguous": contiguous}
