"""Instructions and cache misses of the arms of `heads`, counted in a simulation that no other process disturbs.

A child process runs under valgrind's callgrind with a simulated cache of stated size (the model of cachegrind; of the two
only callgrind can be switched on for single calls). It starts, builds the operands and makes the arms with the simulation
off. For each count the parent switches it on, caches empty, through ``vgdb``, lets the child call one arm once, and has the
counts written. Counted is what the kernels, the BLAS library and the C library do; not what the interpreter and NumPy do.
"""
from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import fastmha
from fastmha import _core
from fastmha.study import cases, heads
from fastmha.study.answer import Answer, Found, Picture, Question, Record, Table, bar, by, table
from fastmha.study.cases import Case
from fastmha.study.heads import LINE
from fastmha.study.trial import Trial
from fastmha.study.words import span_text

NAME = "counts"
ARMS = ("strided", "contiguous", "packed", "pack", "strided on lines", "packed on lines")
CACHES = {"D1": (49152, 12, LINE), "LL": (1048576, 16, LINE)}       # bytes, ways, bytes of a line
KNOWN_ISAS = ("baseline", "avx2", "amx-emulated")                   # to valgrind
PATIENCE = 300.0                # seconds until a child that does not answer is given up
DOOR = 60.0                     # the same of ``vgdb``, which has next to nothing to do, and may wait for ever
STARTS_A_SECOND = 3.0           # processes that start, without valgrind, in a planned second of a trial and in its share of the
                                # child's start
_MADDS_PER_SECOND = 17e6        # under callgrind, about: each fused multiply-add is a function call there
ENTRY = "from fastmha.study.counts import work; import sys; work(sys.stdin, sys.stdout)"


class MissingError(Exception):
    """The machine does not allow a count; the message says why."""


# -------------------------------------------------------------------------------------------------- the child

def work(commands: Iterable[str], answers: TextIO) -> None:
    """Follow commands, a line of JSON each: [case, direction] makes operands and arms, [arm, calls] calls one. The answer to
    each is a line: how many bytes after the start of a cache line the rows of the strided keys start."""
    operands: list[heads.Operands] = []
    functions: Mapping[str, Callable[[], object]] = {}
    for line in commands:
        first, second = json.loads(line)
        if isinstance(first, dict):
            case = Case(**first)
            if not operands or replace(operands[0].case, algorithm=case.algorithm) != case:
                operands = [heads.Operands(case, on_lines=on_lines) for on_lines in (False, True)]
            for each in operands:
                each.case = case
            functions = prepared(operands, second)
        else:
            function = functions[first]
            for _ in range(second):
                function()
        answers.write(f"{operands[0].k.ctypes.data % LINE}\n")
        answers.flush()


def prepared(operands: Sequence[heads.Operands], direction: str) -> dict[str, Callable[[], None]]:
    """The arms of `heads` in NumPy's memory, and two of them once more on rows that start on a cache line, as those need not."""
    usual, on_lines = (heads.arms(each, direction, 1) for each in operands)
    return {**usual, **{f"{name} on lines": on_lines[name] for name in ("strided", "packed")}}


def environment() -> dict[str, str]:
    """Variables of the child: one thread, and under valgrind, which knows no AVX-512, the kernels and BLAS without it."""
    package = str(Path(fastmha.__file__).parent.parent)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
                 "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "FASTMHA_ISA": isa()}
    variables.pop("OPENBLAS_CORETYPE", None)
    return {**variables, "OPENBLAS_CORETYPE": "Haswell"} if isa() == "avx2" else variables


def isa() -> str:
    selected = _core.selected_isa()[0]
    return selected if selected in KNOWN_ISAS else "avx2"


# -------------------------------------------------------------------------------------------------- valgrind

class Callgrind:
    """The child under valgrind, started by the first count and shared by all: it takes seconds to start. `counts` raises
    `MissingError`, again and again once nothing can be counted."""

    def __init__(self) -> None:
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.missing = ""
        self.version = ""

    def start(self) -> None:
        if self.missing:
            raise MissingError(self.missing)
        for program in ("valgrind", "vgdb"):
            if shutil.which(program) is None:
                raise MissingError(f"{program} is not installed")
        done = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, timeout=PATIENCE)
        self.version = done.stdout.strip()
        self.folder = tempfile.TemporaryDirectory(prefix="fastmha-counts-")
        self.path = Path(self.folder.name)
        options = ["-q", "--tool=callgrind", "--instr-atstart=no", "--cache-sim=yes", "--dump-line=no", "--compress-strings=no",
                   "--compress-pos=no", f"--callgrind-out-file={self.path / 'counts'}", f"--vgdb-prefix={self.path / 'vgdb'}",
                   *(f"--{name}={','.join(map(str, size))}" for name, size in CACHES.items())]
        self.log = (self.path / "log").open("w+b")
        atexit.register(self.close)     # a study that was interrupted may come to no last count
        self.child = subprocess.Popen(["valgrind", *options, sys.executable, "-c", ENTRY], stdin=subprocess.PIPE, text=True,
                                      stdout=subprocess.PIPE, stderr=self.log, env=environment(), cwd=self.path)

    def counts(self, case: Case, direction: str, arms: Sequence[str]) -> tuple[int, list[dict[str, int]]]:
        """Where in a cache line the rows of the strided keys of a case start, and what one call of each arm counts, from empty
        caches."""
        try:
            if self.folder is None:
                self.start()
            offset = self._ask([asdict(case), direction])
            return offset, [self._count(arm) for arm in arms]
        except (OSError, ValueError, subprocess.SubprocessError, MissingError) as error:
            self.missing = str(error) if isinstance(error, MissingError) else f"{type(error).__name__}: {error}"
            self.close()
            raise MissingError(self.missing) from error

    def _count(self, arm: str) -> dict[str, int]:
        self._tell("instrumentation on")
        self._ask([arm, 1])
        self._tell("dump", "instrumentation off")
        written, = self.path.glob("counts.*")       # the file without a number is written at the end
        text = written.read_text(encoding="utf-8")
        written.unlink()
        return counted(text)

    def _ask(self, command: list[Any]) -> int:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()
        ready, _, _ = select.select([self.child.stdout], [], [], PATIENCE)
        reply = self.child.stdout.readline().strip() if ready else ""
        if not reply.isdigit():
            self.log.seek(0)
            last = self.log.read().decode(errors="replace").strip().splitlines()[-1:] or ["no answer"]
            raise MissingError(f"Python under {self.version} failed: {last[0]}")
        return int(reply)

    def _tell(self, *commands: str) -> None:
        arguments = [part for command in commands for part in ("-c", *command.split())]
        done = subprocess.run(["vgdb", f"--pid={self.child.pid}", f"--vgdb-prefix={self.path / 'vgdb'}", "--max-invoke-ms=1",
                               *arguments], capture_output=True, text=True, timeout=DOOR)
        if done.returncode:
            raise MissingError(f"vgdb cannot reach Python under {self.version}: {(done.stderr or done.stdout).strip()[-200:]}")

    def close(self) -> None:
        """End the child; the next count starts another."""
        if self.folder is None:
            return
        if self.missing:
            self.child.kill()
        self.child.communicate()
        self.log.close()
        self.folder.cleanup()
        self.folder = None
        atexit.unregister(self.close)


def of_interpreter(path: str) -> bool:
    """Whether an object of the process is Python, NumPy, another extension module than the kernels', or the loader."""
    name = Path(path).name
    modules = (sysconfig.get_config_var("EXT_SUFFIX") or ".so", ".abi3.so")
    return name.startswith(("libpython", "python", "ld-")) or (name.endswith(modules) and not name.startswith("_core"))


def counted(text: str) -> dict[str, int]:
    """Sum the counts in a file of callgrind over the objects that are not the interpreter's: "instructions", "D1_misses",
    "LL_misses" (of data, reads and writes), and "interpreter_instructions", left out."""
    events: list[str] = []
    sums: Counter[str] = Counter()
    every: Counter[str] = Counter()
    kernels = called = False
    for line in text.splitlines():
        if line.startswith("events:"):
            events = line.split()[1:]
        elif line.startswith("desc:") and any(line.startswith(f"desc: {name} cache:") for name in CACHES):
            name = line.split()[1]
            if line.partition("cache:")[2].split()[0] != str(CACHES[name][0]):
                raise ValueError(f"another cache was simulated: {line}")
        elif line.startswith("ob="):
            kernels = not of_interpreter(line[3:])
        elif line.startswith("calls="):
            called = True                       # the next line is what the callee took, counted where the callee stands
        elif line[:1].isdigit():
            costs = dict(zip(events, map(int, line.split()[1:])))       # zeros at the end are left out
            if not called:
                every.update(costs)
                if kernels:
                    sums.update(costs)
            called = False
        elif line.startswith("totals:"):
            total = dict(zip(events, map(int, line.split()[1:])))
            if total != {event: every[event] for event in total}:
                raise ValueError(f"the counts of callgrind do not add up to {line}")
    if "DLmw" not in events:
        raise ValueError("callgrind wrote no cache misses")
    return {"instructions": sums["Ir"], "D1_misses": sums["D1mr"] + sums["D1mw"], "LL_misses": sums["DLmr"] + sums["DLmw"],
            "interpreter_instructions": every["Ir"] - sums["Ir"]}


def trial(case: Case, direction: str, callgrind: Callgrind, *, twice: Sequence[str], last: bool) -> Trial:
    madds = case.flops(direction) // 2

    def measure(seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = {"madds": madds, "row_bytes": case.row_bytes,
                                 "least_lines": case.operand_bytes(direction) // LINE}
        try:
            offset, each = callgrind.counts(case, direction, (*ARMS, *twice))
            found |= {"counts": {arm: {**c, "D1_per_madd": c["D1_misses"] / madds, "LL_per_madd": c["LL_misses"] / madds}
                                 for arm, c in zip(ARMS, each)},
                      "again": dict(zip(twice, each[len(ARMS):])),
                      "cache": {name: dict(zip(("bytes", "ways", "line"), size)) for name, size in CACHES.items()},
                      "line_offset": offset, "isa": isa(), "valgrind": callgrind.version}
            if last:
                callgrind.close()
        except MissingError as error:
            found["missing"] = str(error)
        return found

    runs = sum(arm != "pack" for arm in (*ARMS, *twice)) + 1
    seconds, starts = 0.1, 0.0
    if shutil.which("valgrind") and shutil.which("vgdb"):
        seconds = 1.5 + runs * madds / _MADDS_PER_SECOND
        starts = STARTS_A_SECOND * seconds
    return Trial(NAME, f"{case.name} {direction}", {**asdict(case), "direction": direction}, measure, seconds,
                 len(ARMS) * madds * 2, {"process": starts})


def trials(quick: bool, num_threads: int) -> list[Trial]:
    """Heads in rows of three pages, and of 9 KiB; keys of one head of 128 KiB and more, beyond the first-level cache."""
    callgrind = Callgrind()
    runs = [(cases.case(1, 1, 128, 64, Lk=Lk, row=row, algorithm=name), direction)
            for direction, Lk in (("forward", 512), ("backward", 512), ("forward", 2048))
            for row in (12288, 9216) for name in ("tiled", "blas")]
    if quick:
        runs = runs[:3]
    return [trial(case, direction, callgrind, twice=("pack",) if quick else ("strided", "pack"), last=number == len(runs) - 1)
            for number, (case, direction) in enumerate(runs)]


def answer(records: Sequence[Record], found: Found) -> Answer:
    counted_here = [r for r in records if "counts" in r]
    method = ("One call of each arm of `heads` with one thread, on operands as a fused projection writes them, in a process "
              "under valgrind's callgrind, its simulation switched on, caches empty, for that call alone; counted is what the "
              "kernels, BLAS and the C library do, not the interpreter. "
              f"Simulated are a data cache D1 of {_size('D1')}, and as LL a stand-in for a second-level cache, {_size('LL')}: "
              "both load a line that is written, drop the line longest unused, and prefetch nothing. A multiply-add is two of "
              "the operations that the study counts elsewhere. NumPy's memory need not start on a cache line: “on lines” are the "
              "same arms in buffers that do.")
    limits = ("Misses are not time: prefetchers hide those of long runs of lines, and the simulation knows neither prefetchers "
              "nor pages (TLB misses are not counted), neither other threads nor the last-level cache. Where the memory of a "
              "process comes to lie changes misses by some per cent. Kernels and BLAS run without AVX-512, which valgrind does "
              "not know.")
    if not counted_here:
        reason = next((r["missing"] for r in records if "missing" in r), "nothing was measured")
        return Answer(f"Not counted on this machine: {reason}.", method, limits)
    panels = [{"title": f"{cache}: {_size(cache)}", "rows": [
        {"label": r["label"], "values": [
            bar(arm, dict.fromkeys(("median", "low", "high"), _each(r, arm, cache))) for arm in ARMS]} for r in counted_here]}
        for cache in CACHES]
    return Answer(_short(counted_here), f"{method} {_repeat_sentence(counted_here)}", limits,
                  [_table(counted_here, "D1", "first-level"), _table(counted_here, "LL", "second-level")],
                  [Picture("counts", "Misses of the simulated caches, one call from empty caches.", "bars", {
                      "title": "Cache misses by arm", "panels": panels, "x": "misses per 1000 multiply-adds"})])


def _size(cache: str) -> str:
    size, ways, line = CACHES[cache]
    return f"{size >> 10} KiB, {ways} ways of {line}-byte lines"


def _each(record: Record, arm: str, cache: str) -> float:
    """Misses per 1000 multiply-adds."""
    return float(1000 * record["counts"][arm][f"{cache}_per_madd"])


def _span(records: Sequence[Record], what: str, arm: str = "strided", other: str = "packed") -> str:
    """How many times as many an arm has as another one."""
    return span_text(r["counts"][arm][what] / max(1, r["counts"][other][what]) for r in records)


def _short(records: Sequence[Record]) -> str:
    misses, rows, moved = [], [], []
    for name, group in by(records, lambda r: r["factors"]["algorithm"]).items():
        misses.append(f"on strided heads “{name}” misses D1 {_span(group, 'D1_misses')} times as often as on packed ones, LL "
                      f"{_span(group, 'LL_misses')} times")
        moved.append(f"“{name}” misses D1 on strided heads {_span(group, 'D1_misses', 'strided on lines', 'strided')} times as "
                     f"often, {_span(group, 'D1_misses', 'strided on lines', 'packed on lines')} times as often as on packed "
                     "ones moved likewise")
        paged, other = ([r for r in group if (r["row_bytes"] % 4096 == 0) == whole] for whole in (True, False))
        if paged and other:
            rows.append(f"{_span(paged, 'LL_misses')} times as often with such rows and {_span(other, 'LL_misses')} times with "
                        f"others by “{name}”")
    shared = ("Rows a whole number of 4 KiB pages apart share few sets of a cache: on strided heads, compared with packed ones, "
              f"LL is missed {'; '.join(rows)}. ") if rows else ""
    offsets = " or ".join(map(str, sorted({r["line_offset"] for r in records})))
    most = max(abs(r["counts"]["strided"]["instructions"] / max(1, r["counts"]["packed"]["instructions"]) - 1) for r in records)
    differ = (f"differ by at most {100 * most:.2g} %: the same work, other lines" if most < 0.01
              else f"are {_span(records, 'instructions')} times as many")
    return (f"In the simulated caches, {'; '.join(misses)}. {shared}Where rows start on a cache line ({offsets} bytes after one "
            f"where NumPy placed them), {'; '.join(moved)}. The instructions {differ}.")


def _repeat_sentence(records: Sequence[Record]) -> str:
    worst = {what: max((abs(again[what] - r["counts"][arm][what]) / max(1, r["counts"][arm][what])
                        for r in records for arm, again in r["again"].items()), default=0.0)
             for what in ("instructions", "D1_misses", "LL_misses")}
    arms = sorted({arm for r in records for arm in r["again"]})
    return "" if not arms else (
        f"Counted a second time, {' and '.join(f'“{arm}”' for arm in arms)} differed by at most "
        f"{100 * worst['instructions']:.2g} % in instructions, {100 * worst['D1_misses']:.2g} % in misses of D1 and "
        f"{100 * worst['LL_misses']:.2g} % of LL.")


def _table(records: Sequence[Record], cache: str, level: str) -> Table:
    def misses(arm: str) -> Callable[[Record], str]:
        return lambda r: f"{_each(r, arm, cache):.2f}"

    return table(f"Misses of {cache} per 1000 multiply-adds", records, {
        "case": lambda r: r["label"], **{arm: misses(arm) for arm in ARMS},
        "operands": lambda r: f"{1000 * r['least_lines'] / r['madds']:.2f}"},
        f"{level} data cache, simulated: {_size(cache)}; “operands”: lines of {LINE} bytes of all operands and results, each "
        "once; “row”: bytes from one row of a head to the next")


QUESTION = Question(
    NAME, "Cache misses, counted",
    "Do strided heads miss the caches more often than packed ones, and by how much, where no clock is asked?", trials, answer)
