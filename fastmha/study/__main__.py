"""``fastmha study``: options, progress bar, files. Also ``python -m fastmha.study``."""
from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fastmha import threads
from fastmha.study import machine, questions, runner
from fastmha.study.trial import ArmsDisagreeError, Trial

EXTRA = ("rich", "matplotlib")
DESCRIPTION = "Measure what the memory layout of heads does to attention on this machine: tables, pictures, a report, JSON."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the study."""
    parser.add_argument("--quick", action="store_true", help="a look at each question, in under two minutes")
    parser.add_argument("--only", action="append", default=[], choices=questions.NAMES, metavar="QUESTION",
                        help=f"one question of {', '.join(questions.NAMES)}; may be given several times")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of each call (default: all usable CPUs)")
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
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        return failed(f'needs {" and ".join(missing)}: pip install "fastmha[study]"')
    from rich.console import Console

    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return failed(f"cannot make the folder {options.out}: {error.strerror}")
    num_threads = threads.resolve(options.threads)
    asked = questions.chosen(options.only)
    trials = questions.trials(asked, options.quick, num_threads)
    talk = Console(stderr=options.json)
    try:
        store = runner.Store(options.out, {**machine.describe(num_threads, command), "quick": options.quick})
        flops, seconds = runner.planned(trials)
        talk.print(f"{len(trials)} measurements, at least {flops / 1e12:.1f} TFLOP, about {seconds / 60:.1f} minutes", highlight=False)
        kept = sum((t.question, t.label) in store.records for t in trials)
        if kept:
            talk.print(f"{kept} of them were measured before the interruption", highlight=False)
        measure(trials, store, talk)
        found = store.finish(trials)
        from fastmha.study import report

        if options.json:
            print(json.dumps(found, indent=1, ensure_ascii=False))
        files = report.write(options.out, found, asked, None if options.json else talk)
    except (ArmsDisagreeError, runner.OtherStudyError) as error:
        return failed(str(error), 1 if isinstance(error, ArmsDisagreeError) else 2, ": ")
    except OSError as error:
        return failed(f"cannot write into {options.out}: {error.strerror}")
    except KeyboardInterrupt:
        return failed(f"interrupted; the same command goes on from what {options.out} holds", 130, ": ")
    for what, path in files.items():
        talk.print(f"{what}: {path}", highlight=False, soft_wrap=True)
    return 0


def failed(sentence: str, status: int = 2, sign: str = " ") -> int:
    print(f"fastmha study{sign}{sentence}", file=sys.stderr)
    return status


def measure(trials: Sequence[Trial], store: runner.Store, console: object) -> None:
    """Run the trials under a progress bar in planned seconds."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:   # type: ignore[arg-type]
        bar = progress.add_task("limits of the machine", total=runner.planned(trials)[1])
        runner.run(trials, store, lambda trial, done: progress.update(
            bar, completed=done, description=f"{trial.question}: {trial.label}" if trial else "done"))


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m fastmha.study``"""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="fastmha study", description=DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args(given), shlex.join(["fastmha", "study", *given]))


if __name__ == "__main__":
    sys.exit(main())
