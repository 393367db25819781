"""Answers as text for the terminal, as Markdown, and as one HTML file that opens without a network."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fastmha.study.answer import Found

if TYPE_CHECKING:
    from rich.console import Console


def write(folder: Path, found: Found, asked: Sequence[ModuleType], console: Console | None) -> dict[str, Path]:
    """Draw the pictures of the answers, write report.html and report.md, print the tables to the console unless it is None.
    Returns what was written, by what it is."""
    raise NotImplementedError
