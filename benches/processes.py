"""Arms of a comparison in processes of their own, which may use so many cores: no library sees another's threads or memory."""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

REST = 0.25         # seconds before an arm's turn: idle threads of a pool spin for a while


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextmanager
def cores(number: int) -> Iterator[None]:
    """Processes started inside may use that many cores, where the system lets one say so."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(own)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class Process:
    """``python script --threads N --arm JSON``, which answers a line of JSON, a method and its arguments, with a line of JSON."""

    def __init__(self, script: str, arm: Sequence[Any], threads: int) -> None:
        self.name = str(arm[0])
        command = [sys.executable, script, "--threads", str(threads), "--arm", json.dumps(arm)]
        with cores(threads):
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.communicate()      # its input ends, then it does

    def ask(self, method: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the process of {self.name} has ended before its answer")
        return json.loads(line)


def serve(arm: Any) -> None:
    """The other end of a Process: the methods of `arm`."""
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(arm, method)(*arguments)), flush=True)
