"""The questions of the study, in their order. Each is a module with

    NAME, TITLE, QUESTION           its name for --only, its heading, what it asks
    trials(quick, num_threads)      what is measured for it; it may be nothing
    answer(found)                   sentences, tables and pictures from all results, or None where its records are missing
    NEEDS                           names of questions whose records it looks at besides its own
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from types import ModuleType

from fastmha.study import counts, crossover, heads, kv_cache, layers, memory, projections, strides, textbook
from fastmha.study.trial import Trial

ALL: tuple[ModuleType, ...] = (heads, strides, projections, crossover, kv_cache, textbook, counts, layers, memory)
NAMES = tuple(question.NAME for question in ALL)


def chosen(only: Collection[str]) -> list[ModuleType]:
    """The questions of these names; all where none is named."""
    return [question for question in ALL if not only or question.NAME in only]


def trials(questions: Sequence[ModuleType], quick: bool, num_threads: int) -> list[Trial]:
    """The trials of these questions and of those that they need, each once, in the order of `ALL`."""
    names = {name for question in questions for name in (question.NAME, *question.NEEDS)}
    return [t for question in ALL if question.NAME in names for t in question.trials(quick, num_threads)]
