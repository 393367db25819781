"""The picture of the study. Readable in black and white; units on every axis. Needs matplotlib."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fastmha.study.cases import DIRECTIONS
from fastmha.study.runner import Measurement

_STRIDED: dict[str, Any] = {"facecolor": "white", "hatch": "////"}
_CONTIGUOUS: dict[str, Any] = {"facecolor": "0.45"}
_NEITHER: dict[str, Any] = {"facecolor": "white"}


def ratio_picture(path: Path, measured: Sequence[Measurement], found: dict[str, Any]) -> None:
    """Time of strided over contiguous for each case, forward and backward side by side, as a PNG.

    Bars start at 1, where both take the same time; to the right of it contiguous is faster, to the left strided. The
    whiskers span the quartiles over the rounds; where they lie on both sides of 1, the bar claims neither.
    """
    cases = list(dict.fromkeys(m.case for m in measured))
    figure = Figure(figsize=(11, 2.4 + 0.42 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(DIRECTIONS), sharex=True, sharey=True)
    low = min(1, *(m.ratio_low for m in measured))
    high = max(1, *(m.ratio_high for m in measured))
    margin = max(0.05, 0.06 * (high - low))
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        for m in measured:
            if m.direction != direction:
                continue
            row = cases.index(m.case)
            panel.barh(row, m.ratio - 1, left=1, height=0.62, edgecolor="black", linewidth=0.8,
                       **_style(m))
            panel.plot([m.ratio_low, m.ratio_high], [row, row], color="black", linewidth=1.6, solid_capstyle="butt",
                       marker="|", markersize=7)
            panel.text(1.02, row, f"{m.ratio:.2f}", transform=panel.get_yaxis_transform(), va="center", fontsize=9)
        panel.axvline(1, color="black", linewidth=1)
        panel.set_title(direction, fontsize=11)
        panel.set_xlabel("time strided / time contiguous, packing included\n"
                         "(no unit; median of the ratios within a round)")
        panel.set_xlim(low - margin, high + margin)
        panel.grid(axis="x", color="0.85", linewidth=0.6)
        panel.set_axisbelow(True)
    panels[0].set_yticks(range(len(cases)), [c.label for c in cases], fontsize=9)
    panels[0].set_ylabel("case: B batch, H heads (query/key), L length, D head width")
    panels[0].invert_yaxis()
    figure.legend(title="Attention on strided heads against heads packed first", title_fontsize=12, handles=[
        Patch(edgecolor="black", label="strided faster", **_STRIDED),
        Patch(edgecolor="black", label="contiguous faster, packing included", **_CONTIGUOUS),
        Patch(edgecolor="black", label="quartiles on both sides of 1", **_NEITHER),
    ], loc="outside upper center", ncols=3, frameon=False)
    count = found["threads"]
    figure.supxlabel(f"{found['command']}   ·   {found['machine']['cpu']}, {count} thread{'s' * (count != 1)}, "
                     f"{found['kernels']['isa']}   ·   fastmha {found['versions']['fastmha']}, {found['date'][:10]}",
                     fontsize=8, color="0.3")
    figure.savefig(path, dpi=150)


def _style(m: Measurement) -> dict[str, Any]:
    if m.ratio_low <= 1 <= m.ratio_high:
        return _NEITHER
    return _CONTIGUOUS if m.ratio > 1 else _STRIDED
