"""``fastmha study``: options, progress bar, files. Also ``python -m fastmha.study``."""
from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastmha import threads
from fastmha.study import folder, machine, pace, questions, runner, shape
from fastmha.study.trial import ArmsDisagreeError, Trial
from fastmha.study.words import failed

if TYPE_CHECKING:
    from rich.console import Console

EXTRA = ("rich", "matplotlib")
FULL = (errno.ENOSPC, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC))
DESCRIPTION = "Measure what the memory layout of heads does to attention on this machine: tables, pictures, a report, JSON."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a look at each question, in under two minutes")
    parser.add_argument("--only", action="append", default=[], choices=questions.NAMES, metavar="QUESTION",
                        help=f"one question of {', '.join(questions.NAMES)}; may be given several times")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of each call (default: all usable CPUs)")
    parser.add_argument("--shape", type=shape.parse, metavar="B,L,d_model,H",
                        help="instead of the questions, one layer of this shape: operations and bytes on paper, time and memory "
                             "measured; writes no files")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    parser.add_argument("--out", type=Path, default=Path("fastmha-study"), metavar="DIR",
                        help="folder for results.json, pictures and report.html (default: %(default)s); an interrupted study "
                             "goes on from what it left there")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"      # argparse puts it into its message


def run(options: argparse.Namespace, command: str) -> int:
    """Measure, print the tables, save results, pictures and report. Returns the exit status: 1 if arms disagree, 2 if the
    extra is not installed or the folder cannot serve, 130 if it was interrupted."""
    begin = time.perf_counter()
    if options.shape is not None and options.only:
        return failed("takes either --shape or --only", sign=" ")
    needed = EXTRA if options.shape is None else () if options.json else EXTRA[:1]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return failed(f'needs {" and ".join(missing)}: pip install "fastmha[study]"', sign=" ")
    if options.shape is not None:
        return shape.run(options.shape, options.threads, options.quick, options.json, command)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return failed(f"cannot make the folder {options.out}: {error.strerror}", sign=" ")
    try:
        with folder.held(options.out, command):
            return study(options, folder.printable(command), begin)
    except folder.HeldError as error:
        return failed(str(error))
    except OSError as error:
        if error.filename is None and error.errno not in FULL:       # not about a file: a trial's own
            raise
        return failed(f"cannot write into {options.out}: {error.strerror}", sign=" ")


def study(options: argparse.Namespace, command: str, begin: float) -> int:
    """`run` in a folder that is there and held; what began at `begin` of `time.perf_counter`."""
    from rich.console import Console

    num_threads = threads.resolve(options.threads)
    asked = questions.chosen(options.only)
    trials = questions.trials(asked, options.quick, num_threads)
    talk = Console(stderr=options.json)
    store = None
    try:
        store = runner.Store(options.out, {**machine.describe(num_threads, command), "quick": options.quick})
        if store.damage:
            failed(store.damage)
        left = [t for t in trials if (t.question, t.label) not in store.records]
        if len(left) < len(trials):
            talk.print(f"{len(trials) - len(left)} of {len(trials)} measurements were made before the interruption",
                       highlight=False)
        with talk.status("measuring the machine"):
            runner.measure_limits(store)
            costs = pace.calibrated(num_threads, store.limits, store.about)
        budget = pace.Budget(
            left, costs, pace.QUICK_LIMIT if options.quick else None, after=pace.PICTURES * len(asked) * costs["picture"],
            spent=time.perf_counter() - begin + costs["process"], measured={question for question, _ in store.records})
        talk.print(announcement(left, budget), highlight=False)
        measure(left, store, talk, budget)
        found = store.finish(trials)
        from fastmha.study import report

        if options.json:
            print(json.dumps(found, indent=1))
        files = report.write(options.out, found, asked, None if options.json else talk)
    except (ArmsDisagreeError, runner.OtherStudyError) as error:
        return failed(str(error), 1 if isinstance(error, ArmsDisagreeError) else 2)
    except KeyboardInterrupt:
        if store is not None and not store.path.exists():
            return failed(f"interrupted; {store.results} holds the measurements, the report is not written", 130)
        return failed(f"interrupted; the same command goes on from what {options.out} holds", 130)
    for what, path in files.items():
        talk.print(f"{what}: {folder.printable(path)}", highlight=False, soft_wrap=True, markup=False)
    return 0


def announcement(trials: Sequence[Trial], budget: pace.Budget) -> str:
    """How many measurements, how much work, how long; and how many there is no time for."""
    seconds = budget.announced
    about = f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
    flops, dropped = sum(t.flops for t in budget.kept), len(trials) - len(budget.kept)
    return (f"{len(budget.kept)} measurements, at least {flops / 1e12:.1f} TFLOP, about {about} in all"
            + (f"; {dropped} more, the longest, only if there is time" if dropped else ""))


def measure(trials: Sequence[Trial], store: runner.Store, console: Console, budget: pace.Budget | None = None) -> None:
    """Run the trials for which there is time under a progress bar in planned seconds."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TaskProgressColumn(), TimeRemainingColumn()
    budget = budget or pace.Budget(trials)
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("limits of the machine", total=budget.planned)
        runner.run(trials, store, lambda trial, done: progress.update(
            bar, completed=done, description=f"{trial.question}: {trial.label}" if trial else "done"), budget)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m fastmha.study``"""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="fastmha study", description=DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args(given), shlex.join(["fastmha", "study", *given]))


if __name__ == "__main__":
    sys.exit(main())
