"""The command ``fastmha``, also ``python -m fastmha``."""
from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from fastmha import __version__, show_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="fastmha", description="Multi-head attention on CPUs for NumPy arrays.")
    parser.add_argument("--version", action="version", version=f"fastmha {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    of_study = commands.add_parser("study", help="time head layouts on this machine")
    commands.add_parser("config", help="print versions, kernels, BLAS and threads, for a bug report")
    of_tune = commands.add_parser("tune", help="measure the settings of this machine, for FASTMHA_TUNING")
    named = next((name for name in given if name in commands.choices), "")
    if named == "tune":
        from fastmha import tune  # only here, as the study below

        of_tune.description = tune.DESCRIPTION
        tune.add_arguments(of_tune)
        return tune.run(parser.parse_args(given))
    if named != "study":
        parser.parse_args(given)        # ends here but for "config"
        try:
            show_config()
        except ValueError as error:     # a variable of the environment
            parser.error(str(error))
        return 0
    from fastmha.study import __main__ as study  # only here: the other commands need nothing of it

    of_study.description = study.DESCRIPTION
    study.add_arguments(of_study)
    return study.run(parser.parse_args(given), shlex.join(["fastmha", *given]))


if __name__ == "__main__":
    sys.exit(main())
