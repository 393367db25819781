"""``fastmha study``: options, progress bar, table, files. Also ``python -m fastmha.study``."""
from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastmha import threads
from fastmha.study import cases, runner

if TYPE_CHECKING:
    from rich.table import Table

EXTRA = ("rich", "matplotlib")
DESCRIPTION = "Time attention on strided heads against packed, contiguous ones on this machine, forward and backward."
QUICK_SECONDS, FULL_SECONDS = 25.0, 240.0      # of measuring, shared by all measurements


LEGEND = """\
strided, contig.  GFLOP/s at the median time
ratio             time strided / time contiguous within a round: median, and half
                  the distance of the quartiles; above 1 contiguous is faster
contig., pack     heads packed first, and the share of its time that this takes
row               KiB from one key to the next where the heads are strided
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the study."""
    parser.add_argument("--quick", action="store_true", help="a few shapes, in under a minute")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of each call (default: all usable CPUs)")
    parser.add_argument("--out", type=Path, default=Path("fastmha-study"), metavar="DIR",
                        help="folder for the results and the picture (default: %(default)s)")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"      # argparse puts it into its message


def run(options: argparse.Namespace, command: str) -> int:
    """Measure, print the table, save results and picture. Returns the exit status: 1 if the arms disagree, 2 if the
    extra is not installed or the folder cannot be written."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        print(f'fastmha study needs {" and ".join(missing)}: pip install "fastmha[study]"', file=sys.stderr)
        return 2
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fastmha.study import plots

    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"fastmha study cannot make the folder {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    num_threads = threads.resolve(options.threads)
    chosen, seconds = (cases.QUICK, QUICK_SECONDS) if options.quick else (cases.FULL, FULL_SECONDS)
    console = Console()
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                  console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(chosen) * len(cases.DIRECTIONS))
        started = 0

        def report(label: str) -> None:
            nonlocal started
            progress.update(bar, description=label, completed=started)
            started += 1

        try:
            measured = runner.run(chosen, num_threads, seconds, report)
        except runner.ArmsDisagreeError as error:
            progress.stop()
            print(f"fastmha study: {error}", file=sys.stderr)
            return 1
    found = runner.results(measured, num_threads, command)
    console.print(table(measured, found))
    console.print(LEGEND, highlight=False, soft_wrap=True)
    data, picture = options.out / "results.json", options.out / "strided_over_contiguous.png"
    try:
        runner.write_json(data, found)
        plots.ratio_picture(picture, measured, found)
    except OSError as error:
        print(f"fastmha study cannot write into {options.out}: {error.strerror}", file=sys.stderr)
        return 2
    console.print(f"Picture: {picture}\nResults: {data}", highlight=False, soft_wrap=True)
    return 0


def table(measured: Sequence[runner.Measurement], found: dict[str, Any]) -> Table:
    """The measurements as a table for the terminal: two rows a case, forward and backward, the algorithm in the second."""
    from rich import box
    from rich.table import Table

    count, isa = found["threads"], found["kernels"]["isa"]
    shown = Table(
        title=f"Strided against contiguous heads, {count} thread{'s' * (count != 1)}, {isa} kernels",
        box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    shown.add_column("case", no_wrap=True)
    shown.add_column("pass", no_wrap=True)
    for name in ("row", "strided", "contig.", "ratio", "pack"):
        shown.add_column(name, justify="right", no_wrap=True)
    for m in measured:
        first = m.direction == cases.DIRECTIONS[0]
        named = f"{m.case.shape} f{8 * m.case.itemsize}" if first else f"  {m.case.algorithm}"
        shown.add_row(named, m.direction, f"{m.case.row_bytes / 1024:g}" if first else "",
                      f"{m.gflops('strided'):.1f}", f"{m.gflops('contiguous'):.1f}",
                      f"{m.ratio:.2f} ±{(m.ratio_high - m.ratio_low) / 2:.2f}",
                      f"{m.median['pack'] / m.median['contiguous']:.0%}")
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m fastmha.study``"""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="fastmha study", description=DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args(given), shlex.join(["fastmha", "study", *given]))


if __name__ == "__main__":
    sys.exit(main())
