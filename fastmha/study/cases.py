"""The cases of the study and of the benches, with their operations and bytes, stated once.

A multiplication and an addition are two operations (FLOP). Counted are the products over the pairs (i, j) that
causality leaves, not the exponentials::

    forward     scores q kᵀ, output P v: 2 products of 2·D a pair
    backward    scores again, the gradients of P, q, k, v: 5 products
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

DIRECTIONS = ("forward", "backward")
FLOPS_PER_PAIR_AND_WIDTH = {"forward": 4, "backward": 10, "forward+backward": 14}


@dataclass(frozen=True)
class Case:
    """One attention: B rows of a batch, H query heads on Hkv key/value heads of width D, Lq queries, Lk keys.

    Causal cases with Lq != Lk end together: query i may attend key j iff j <= i + Lk - Lq.
    """

    B: int
    H: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    causal: bool = False
    dtype: str = "float32"
    algorithm: str = "blas"

    @property
    def shape(self) -> str:
        """The label without the dtype, such as "B1 H16/4 L512x1024 D64 causal"."""
        heads = f"H{self.H}" + (f"/{self.Hkv}" if self.Hkv != self.H else "")
        length = f"L{self.Lq}" + (f"x{self.Lk}" if self.Lk != self.Lq else "")
        return f"B{self.B} {heads} {length} D{self.D}" + " causal" * self.causal

    @property
    def label(self) -> str:
        """Names the case in tables, pictures and benches: the shape, f32 or f64, and the algorithm unless it is "blas"."""
        return f"{self.shape} f{8 * self.itemsize}" + f" {self.algorithm}" * (self.algorithm != "blas")

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def keywords(self) -> dict[str, Any]:
        """What `fastmha.attention` is told about causality."""
        return {"is_causal": True, "offset": self.Lk - self.Lq} if self.causal else {}

    @property
    def pairs(self) -> int:
        """Pairs (i, j) of one head that causality leaves."""
        if not self.causal:
            return self.Lq * self.Lk
        return sum(min(self.Lk, max(0, i + 1 + self.Lk - self.Lq)) for i in range(self.Lq))

    def flops(self, direction: str) -> int:
        """Operations of "forward", "backward" or "forward+backward"."""
        return FLOPS_PER_PAIR_AND_WIDTH[direction] * self.pairs * self.D * self.H * self.B

    def packed_bytes(self, direction: str) -> int:
        """Bytes that the contiguous layout copies first: q, k, v, and for backward also the output's gradient."""
        queries = self.B * self.H * self.Lq * self.D
        keys = self.B * self.Hkv * self.Lk * self.D
        return self.itemsize * (queries * (2 if direction == "backward" else 1) + 2 * keys)

    def operand_bytes(self, direction: str) -> int:
        """Bytes of all operands and results, each once: q, k, v, out, lse; for backward q, k, v, grad_out, lse and the
        three gradients."""
        queries = self.B * self.H * self.Lq * self.D
        keys = self.B * self.Hkv * self.Lk * self.D
        lse = self.B * self.H * self.Lq
        return self.itemsize * (lse + (3 * queries + 4 * keys if direction == "backward" else 2 * queries + 2 * keys))

    @property
    def row_bytes(self) -> int:
        """Bytes from one row of a key head to the next where a fused projection wrote it: Q|K|V side by side for
        Lq == Lk, else K|V."""
        heads = 2 * self.Hkv + (self.H if self.Lq == self.Lk else 0)
        return heads * self.D * self.itemsize


def case(B: int, H: int, L: int, D: int, *, Hkv: int | None = None, Lk: int | None = None, causal: bool = False,
         dtype: str = "float32") -> Case:
    """A case with Hkv = H and Lk = Lq = L unless they are named."""
    return Case(B, H, H if Hkv is None else Hkv, L, L if Lk is None else Lk, D, causal, dtype)


def by_both(*shapes: Case) -> tuple[Case, ...]:
    """Each case by "blas" and by "tiled"."""
    return tuple(replace(shape, algorithm=algorithm) for shape in shapes for algorithm in ("blas", "tiled"))


# A few shapes for a first look, and for the benches; from short to long.
QUICK = by_both(
    case(32, 8, 32, 64),
    case(8, 12, 128, 64),
    case(1, 12, 512, 64),                   # d_model 768
    case(1, 16, 512, 64),                   # d_model 1024: rows of 12 KiB, whole pages
    case(1, 16, 512, 64, Hkv=4),
    case(1, 16, 512, 64, causal=True),
    case(1, 16, 512, 64, dtype="float64"),
    case(1, 12, 128, 64, Lk=1024),
    case(1, 32, 256, 128),                  # d_model 4096: rows of 48 KiB
)

# The quick ones and more: widths, lengths, strides that are and are not whole pages.
FULL = QUICK + by_both(
    case(8, 12, 128, 64, dtype="float64"),
    case(8, 16, 128, 64),
    case(4, 8, 256, 128),
    case(4, 24, 256, 32),
    case(4, 32, 256, 32),
    case(1, 18, 512, 64),
    case(1, 12, 1024, 64),
    case(1, 12, 1024, 64, causal=True),
    case(1, 16, 1024, 64),
    case(1, 16, 1024, 128),
    case(1, 16, 2048, 64, causal=True),
    case(1, 32, 512, 128, Hkv=8, causal=True),
)
