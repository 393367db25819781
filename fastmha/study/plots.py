"""The pictures of the study, each kind once: readable in black and white, units on every axis. Needs matplotlib.

Every function writes a PNG and takes what it draws as plain data; `found` is the results, whose command, machine, threads,
kernels and date stand below each picture.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Found = Mapping[str, Any]


def heat_maps(path: Path, found: Found, *, title: str, panels: Sequence[Mapping[str, Any]], x: str, y: str, shade: str,
              centre: float = 1.0) -> None:
    """Maps side by side on one scale of greys around `centre`. A panel: {"title", "columns": texts, "rows": texts, "values":
    rows of numbers or None where nothing was measured, "texts": the same with what each cell says}. `x`, `y`, `shade`: what
    the axes and the shade mean, with units."""
    raise NotImplementedError


def stacked_bars(path: Path, found: Found, *, title: str, bars: Sequence[Mapping[str, Any]], x: str,
                 reference: float | None = None) -> None:
    """Horizontal bars of parts. A bar: {"label", "parts": [{"name", "value"}, ...]}, with "low" and "high" of its whole
    where known; an equal "group" draws bars together."""
    raise NotImplementedError


def bars(path: Path, found: Found, *, title: str, panels: Sequence[Mapping[str, Any]], x: str,
         reference: float | None = None) -> None:
    """Horizontal bars beside each other with whiskers. A panel: {"title", "rows": [{"label", "values": [{"name", "value",
    "low", "high"}, ...]}, ...]}; bars of one name have one hatch. They start at `reference` where it is given, else at 0."""
    raise NotImplementedError


def lines(path: Path, found: Found, *, title: str, panels: Sequence[Mapping[str, Any]], x: str, y: str, x_log2: bool = False,
          y_log: bool = False) -> None:
    """Lines with their spread. A panel: {"title", "series": [{"name", "x": [...], "y": [...], "low": [...], "high": [...]}]}
    (low and high may be missing), with "reference": a horizontal line, "marks": [(x, text)] vertical ones."""
    raise NotImplementedError


def roofline(path: Path, found: Found, *, title: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Operations/s over operations a byte, with the roofs of found["limits"]. A point: {"group", "dtype", "intensity" in
    FLOP/byte, "rate" in FLOP/s}; a group has one marker."""
    raise NotImplementedError
