"""The questions of the study, in their order."""
from __future__ import annotations

from collections.abc import Collection, Sequence

from fastmha.study import counts, crossover, heads, kv_cache, layers, memory, projections, strides, textbook
from fastmha.study.answer import Question
from fastmha.study.trial import Trial

ALL = tuple(module.QUESTION for module in (heads, strides, projections, crossover, kv_cache, textbook, counts, layers, memory))
NAMES = tuple(question.name for question in ALL)


def chosen(only: Collection[str]) -> list[Question]:
    """The questions of these names; all where none is named."""
    return [question for question in ALL if not only or question.name in only]


def trials(questions: Sequence[Question], quick: bool, num_threads: int) -> list[Trial]:
    """The trials of these questions and of those that they need, in the order of `ALL`. Each once: with one thread, "one" and
    "all" are the same."""
    names = {name for question in questions for name in (question.name, *question.needs)}
    found = [t for question in ALL if question.name in names for t in question.trials(quick, num_threads)]
    return list({(t.question, t.label): t for t in found}.values())
