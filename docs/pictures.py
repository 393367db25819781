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


def _projected() -> np.ndarray:
    """Of the tokens: (1, L, H * D)."""
    return np.random.default_rng(0).standard_normal((1, len(TOKENS), HEADS * WIDTH))


def weights() -> Any:
    q = k = reference.split_heads(_projected(), HEADS)
    return plot.attention(reference.attention_weights(q, k, is_causal=True)[0], TOKENS, list(range(HEADS)))


def strided() -> Any:
    return plot.layout(reference.split_heads(_projected(), HEADS))


def contiguous() -> Any:
    return plot.layout(np.ascontiguousarray(reference.split_heads(_projected(), HEADS)))


PICTURES: dict[str, Callable[[], Any]] = {"weights": weights, "strided": strided, "contiguous": contiguous}
