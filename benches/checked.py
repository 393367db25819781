"""Calls of attention whose answers are checked: on some queries and some keys against `fastmha.reference` in float64."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from findings import agree

import fastmha
from fastmha import reference
from fastmha.study.cases import DIRECTIONS, Case
from fastmha.study.heads import Operands

SAMPLE = 32                 # queries and keys at either end that are checked


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `fastmha.attention` and its backward pass; `rules` are its keywords, `counted` those that
    say its work where they do not."""

    label: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    grad_out: np.ndarray
    rules: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "auto"
    counted: dict[str, Any] | None = None

    def under(self, label: str, counted: dict[str, Any] | None = None, **rules: Any) -> Call:
        """The same arrays under more rules."""
        return replace(self, label=label, rules={**self.rules, **rules}, counted=counted)

    def attend(self, threads: int, **more: Any) -> Any:
        return fastmha.attention(
            self.q, self.k, self.v, algorithm=self.algorithm, num_threads=threads, **self.rules, **more)

    def gradients(self, out: np.ndarray, lse: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return fastmha.attention_backward(
            self.grad_out, self.q, self.k, self.v, out, lse, algorithm=self.algorithm, num_threads=threads,
            **self.rules)

    def function(self, direction: str, threads: int) -> Callable[[], Any]:
        """What is timed."""
        if direction == "forward":
            return lambda: self.attend(threads)
        out, lse = self.attend(threads, return_lse=True)
        return lambda: self.gradients(out, lse, threads)

    def flops(self, direction: str) -> int:
        rules = self.rules if self.counted is None else self.counted
        forward = fastmha.plan(self.q, self.k, self.v, **rules).flops
        if direction == "forward":
            return forward
        return fastmha.plan(self.q, self.k, self.v, backward=True, **rules).flops - forward


def draw(label: str, B: int, H: int, L: int, D: int, dtype: str = "float32", *, Hkv: int | None = None,
         Lk: int | None = None, Dv: int | None = None, **rules: Any) -> Call:
    """A call on random arrays (B, H, L, D), with Hkv = H, Lk = Lq = L and Dv = D unless they are named."""
    rng = np.random.default_rng(0)
    Hkv, Lk, Dv = (H if Hkv is None else Hkv), (L if Lk is None else Lk), (D if Dv is None else Dv)
    shapes = (B, H, L, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), (B, H, L, Dv)
    q, k, v, grad_out = (rng.standard_normal(shape, np.dtype(dtype)) for shape in shapes)
    return Call(label, q, k, v, grad_out, rules)


def as_projected(label: str, of: Case) -> Call:
    """A call with layout "BLHD" on heads where a fused projection writes them."""
    o = Operands(of)
    q, k, v, grad_out = (x.transpose(0, 2, 1, 3) for x in (o.q, o.k, o.v, o.grad_out))
    return Call(label, q, k, v, grad_out, {"layout": "BLHD"})


def end(length: int, n: int, at: int) -> slice:
    """The first (at 0) or the last (at -1) n of `length`."""
    return slice(0, min(n, length)) if at == 0 else slice(max(0, length - n), length)


class Excerpt:
    """The first (at 0) or last (at -1) batch row and key/value head of a call with its group of query heads, and of
    those `queries` and `keys` at that end: arrays in float64 and the order (B, H, L, width), and the rules as they read
    there. None: all."""

    def __init__(self, call: Call, at: int, queries: int | None = None, keys: int | None = None) -> None:
        self.swap = call.rules.get("layout") == "BLHD"
        B, H, Lq, _ = self._by_head(call.q).shape
        Hkv, Lk = self._by_head(call.k).shape[1:3]
        self.b, self.kv, self.h = end(B, 1, at), end(Hkv, 1, at), end(H, H // Hkv, at)
        self.i, self.j = end(Lq, Lq if queries is None else queries, at), end(Lk, Lk if keys is None else keys, at)
        self.rules = {name: value for name, value in call.rules.items() if name != "layout"}
        if "is_causal" in self.rules or "window" in self.rules:
            self.rules["offset"] = self.rules.get("offset", 0) + self.i.start - self.j.start
        if "key_padding_lengths" in self.rules:
            self.rules["key_padding_lengths"] = np.clip(self.rules["key_padding_lengths"][self.b] - self.j.start, 0,
                                                        self.j.stop - self.j.start)
        if "mask" in self.rules:
            mask = self.rules["mask"]
            mask = mask[self.i, self.j] if mask.ndim == 2 else mask[self.b, :, :, self.j]
            self.rules["mask"] = mask if mask.dtype == bool else mask.astype(np.float64)

    def _by_head(self, x: np.ndarray) -> np.ndarray:
        return x.swapaxes(1, 2) if self.swap else x

    def of_queries(self, x: np.ndarray) -> np.ndarray:
        return self._by_head(x)[self.b, self.h, self.i].astype(np.float64)

    def of_keys(self, x: np.ndarray) -> np.ndarray:
        return self._by_head(x)[self.b, self.kv, self.j].astype(np.float64)

    def of_lse(self, lse: np.ndarray) -> np.ndarray:
        return lse[self.b, self.h, self.i].astype(np.float64)


def compare(call: Call, name: str, got: np.ndarray, wanted: np.ndarray) -> None:
    agree(f"{call.label}: {name}", got, wanted, str(call.q.dtype))


def check_forward(call: Call, out: np.ndarray, lse: np.ndarray) -> None:
    for at in (0, -1):
        e = Excerpt(call, at, queries=SAMPLE)
        q, k, v = e.of_queries(call.q), e.of_keys(call.k), e.of_keys(call.v)
        wanted, wanted_lse = reference.attention(q, k, v, return_lse=True, **e.rules)
        compare(call, "out", e.of_queries(out), wanted)
        compare(call, "lse", e.of_lse(lse), wanted_lse)


def check_backward(call: Call, out: np.ndarray, lse: np.ndarray, grads: Sequence[np.ndarray]) -> None:
    """grad_q on some queries and all keys; grad_k, grad_v on some keys and all queries, with the lse over all keys."""
    for at in (0, -1):
        for e, some in ((Excerpt(call, at, queries=SAMPLE), "q"), (Excerpt(call, at, keys=SAMPLE), "kv")):
            q, k, v, g = e.of_queries(call.q), e.of_keys(call.k), e.of_keys(call.v), e.of_queries(call.grad_out)
            wanted = reference.attention_backward(g, q, k, v, e.of_queries(out), e.of_lse(lse), **e.rules)
            for letter, got, expected in zip("qkv", grads, wanted, strict=True):
                if letter in some:
                    compare(call, f"grad_{letter}", (e.of_queries if letter == "q" else e.of_keys)(got), expected)


def check(call: Call, threads: int, directions: Sequence[str] = DIRECTIONS) -> None:
    """The answers of a call against the reference; see `check_backward` for what of them.

    Raises
    ------
    ArmsDisagreeError
    """
    out, lse = call.attend(threads, return_lse=True)
    check_forward(call, out, lse)
    if "backward" in directions:
        check_backward(call, out, lse, call.gradients(out, lse, threads))
