"""The cases of the study and of the benches, with their operations and bytes, stated once.

    CENTRES     two shapes around which one factor at a time is varied
    quick, full the cases about heads, for `fastmha study` and for benches/bench_layouts.py

A multiplication and an addition are two operations (FLOP). Counted are the products over the pairs (i, j) that
causality leaves, not the exponentials::

    forward     scores q kᵀ, output P v: 2 products of 2·D per pair
    backward    scores again, the gradients of P, q, k, v: 5 products
"""
from __future__ import annotations

from collections.abc import Iterable
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
    algorithm: str = "tiled"
    row: int = 0            # bytes from one row of the heads to the next, where that is more than `row_bytes` of the heads alone

    @property
    def shape(self) -> str:
        """The label without the dtype, such as "B1 H16/4 L512x1024 D64 causal"."""
        heads = f"H{self.H}" + (f"/{self.Hkv}" if self.Hkv != self.H else "")
        length = f"L{self.Lq}" + (f"x{self.Lk}" if self.Lk != self.Lq else "")
        row = f" row{self.row}" if self.row else ""
        return f"B{self.B} {heads} {length} D{self.D}" + " causal" * self.causal + row

    @property
    def label(self) -> str:
        """The shape and the dtype, such as "B1 H16 L512 D64 f32"."""
        return f"{self.shape} f{8 * self.itemsize}"

    @property
    def name(self) -> str:
        """Names the case in tables, pictures and benches: its label and the algorithm."""
        return f"{self.label} {self.algorithm}"

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
        """Bytes that the contiguous layout copies first: k, v, and for backward also q and the output's gradient."""
        queries = self.B * self.H * self.Lq * self.D
        keys = self.B * self.Hkv * self.Lk * self.D
        return self.itemsize * (2 * keys + (2 * queries if direction == "backward" else 0))

    def operand_bytes(self, direction: str) -> int:
        """Bytes of all operands and results, each once: q, k, v, out, lse; for backward q, k, v, grad_out, lse and the
        three gradients."""
        queries = self.B * self.H * self.Lq * self.D
        keys = self.B * self.Hkv * self.Lk * self.D
        lse = self.B * self.H * self.Lq
        return self.itemsize * (lse + (3 * queries + 4 * keys if direction == "backward" else 2 * queries + 2 * keys))

    def least(self, direction: str, calls: float, num_threads: int) -> dict[str, float]:
        """So many calls of a kernel as `Trial.least` states them."""
        if self.algorithm == "decode":
            return {"read": calls * self.operand_bytes(direction)}
        return {f"{self.algorithm} {direction}{' 1T' * (num_threads == 1)}": calls * self.flops(direction) * self.itemsize / 4}

    @property
    def row_bytes(self) -> int:
        """Bytes from one row of a key head to the next where a fused projection wrote it: Q|K|V side by side for
        Lq == Lk, else K|V; `row` where the heads are some of those of a wider projection."""
        heads = 2 * self.Hkv + (self.H if self.Lq == self.Lk else 0)
        return self.row or heads * self.D * self.itemsize


def case(B: int, H: int, L: int, D: int, *, Hkv: int | None = None, Lk: int | None = None, causal: bool = False,
         dtype: str = "float32", algorithm: str = "tiled", row: int = 0) -> Case:
    """A case with Hkv = H and Lk = Lq = L unless they are named."""
    return Case(B, H, H if Hkv is None else Hkv, L, L if Lk is None else Lk, D, causal, dtype, algorithm, row)


@dataclass(frozen=True)
class Run:
    """A case in one direction with so many threads (0: all that the study may use); `cold`: operands come from memory."""

    case: Case
    direction: str
    threads: int = 0
    cold: bool = False


CENTRES = (case(1, 12, 512, 64), case(1, 16, 1024, 64))       # d_model 768 and 1024: rows of 9 KiB, and of 12, three whole pages
WIDTHS, LENGTHS, D_MODELS = (32, 64, 128), (64, 128, 256, 512, 1024, 2048, 4096), (768, 1024, 1152, 1536, 2048, 4096)
_ROW = 3 * 1024 * 4         # bytes of a row of Q|K|V side by side, d_model 1024, float32


def length_by_width(L: int, D: int) -> Case:
    """A cell of the map over lengths and widths: heads of the fused projection of d_model 1024, from length 2048 on a quarter
    of them, lest one cell take as long as all others."""
    return case(1, 1024 // D, L, D) if L < 2048 else case(1, 256 // D, L, D, row=_ROW)


def _both(shapes: Iterable[Case], **more: Any) -> list[Run]:
    """Each case by "blas" and by "tiled", forward and backward."""
    return [Run(replace(shape, algorithm=name), direction, **more)
            for shape in shapes for name in ("blas", "tiled") for direction in DIRECTIONS]


def quick() -> list[Run]:
    """A look at each factor."""
    first, second = CENTRES
    return [
        *_both([case(32, 8, 32, 64), case(8, 12, 128, 64), first, case(1, 12, 2048, 64), case(1, 4, 2048, 64, row=_ROW),
                case(1, 8, 2048, 32, row=_ROW), replace(second, Lq=512, Lk=512, Hkv=4)]),
        *_both([first], threads=1),
        *_both([replace(first, causal=True), replace(first, dtype="float64")]),
        Run(case(1, 16, 1, 64, Lk=2048, algorithm="decode"), "forward"),
    ]


def full() -> list[Run]:
    """One factor at a time: the lengths and widths of heads, d_model, and around the centres the others."""
    first, second = CENTRES
    around = [replace(centre, **change) for centre in CENTRES
              for change in ({"dtype": "float64"}, {"causal": True}, {"Hkv": centre.H // 4})]
    runs = [
        *_both(length_by_width(L, D) for D in WIDTHS for L in LENGTHS),
        *_both(case(1, d // 64, 512, 64) for d in D_MODELS),
        *_both(case(1, 4, 2048, 64, row=3 * d * 4) for d in D_MODELS if d != 1024),
        *_both([*around, second, case(1, 32, 256, 128), case(1, 12, 128, 64, Lk=1024)]),
        *_both([case(1, 12, L, 64) for L in (128, 512, 2048)] + [length_by_width(L, 64) for L in (128, 512, 2048)], threads=1),
        *_both([first], cold=True),
        *(Run(case(1, H, 1, D, Hkv=Hkv, Lk=Lk, algorithm="decode"), "forward")
          for H, Hkv, D in ((16, 16, 64), (16, 4, 64), (8, 8, 128)) for Lk in (512, 2048, 8192)),
    ]
    return [run for run in dict.fromkeys([*quick(), *runs])
            if run.case.algorithm != "blas" or run.case.Lk < 4096]      # a minute for what shows at half the length


@dataclass(frozen=True)
class Layer:
    """A `MultiHeadAttention` on B sequences of L tokens; Hkv 0: as many key/value heads as query heads."""

    B: int
    L: int
    d_model: int
    H: int
    Hkv: int = 0
    dtype: str = "float32"
    causal: bool = False

    @property
    def label(self) -> str:
        heads = f"H{self.H}" + (f"/{self.Hkv}" if self.Hkv else "")
        kind = f"f{8 * np.dtype(self.dtype).itemsize}" + " causal" * self.causal
        return f"B{self.B} L{self.L} d{self.d_model} {heads} D{self.D} {kind}"

    @property
    def D(self) -> int:
        return self.d_model // self.H


QUICK_LAYERS = (Layer(32, 16, 512, 8), Layer(1, 256, 768, 12), Layer(1, 512, 1024, 16), Layer(1, 1024, 768, 12),
                Layer(1, 1024, 1024, 32), Layer(1, 1024, 512, 64))
LAYERS = (
    *QUICK_LAYERS,
    *(Layer(1, L, 1024, 1024 // D) for D in WIDTHS for L in (64, 128, 256, 512, 1024, 2048)),
    *(Layer(1, L, 768, 12) for L in (64, 128, 192, 512, 2048)),
    *(Layer(B, L, 512, 8) for B, L in ((32, 32), (16, 64), (8, 128), (8, 256), (4, 300), (4, 512))),
    *(Layer(1, 512, d, d // 64) for d in (1152, 1536, 2048)),
    *(Layer(1, 512, 512, 512 // D) for D in (8, 16)),
    *(Layer(1, L, 1024, 16, dtype="float64") for L in (128, 512, 1024)),
    Layer(1, 1024, 1024, 16, 4), Layer(1, 1024, 1024, 16, causal=True),
)
