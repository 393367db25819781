"""The machine that a study ran on: names, cache sizes, and what it can do at best: products and memory."""
from __future__ import annotations

import mmap
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from fastmha import __version__, _core, algorithms, threads
from fastmha.tuning import cpu_name

HUGE_PAGE = 2 << 20     # bytes


def _data_caches(*wanted: str) -> dict[str, list[str]]:
    """"L1d", "L2", "L3" -> what the system says of the data caches that the first CPU sees; empty where it does not tell."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with suppress(OSError):
            level, kind, *values = ((index / name).read_text().strip() for name in ("level", "type", *wanted))
            if kind != "Instruction":
                found[f"L{level}{'d' if kind == 'Data' else ''}"] = values
    return found


def caches() -> dict[str, int]:
    return {name: int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]] for name, (size,) in _data_caches("size").items()
            if size[:-1].isdigit() and size[-1] in "KMG"}


def geometry() -> dict[str, dict[str, int]]:
    """Name -> {"ways", "sets"} of the data caches with lines of 64 bytes."""
    told = _data_caches("coherency_line_size", "ways_of_associativity", "number_of_sets")
    return {name: {"ways": int(ways), "sets": int(sets)} for name, (line, ways, sets) in told.items()
            if line == "64" and ways.isdigit() and sets.isdigit() and int(ways) and int(sets)}


def last_level_bytes() -> int:
    return max(caches().values(), default=0)


def describe(num_threads: int, command: str) -> dict[str, Any]:
    """What a reader needs to judge a measurement, for JSON."""
    isa, vector_bytes = _core.selected_isa()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"cpu": cpu_name(), "cpus_usable": cpus, "caches": caches(), "system": platform.platform(),
                    "architecture": platform.machine()},
        "versions": {"fastmha": __version__, "python": platform.python_version(), "numpy": np.__version__,
                     "scipy": scipy.__version__},
        "kernels": {"isa": isa, "vector_bytes": vector_bytes, "blas_thread_setter": threads.bind_blas()},
        "threads": num_threads,
    }


def limits(num_threads: int, seconds: float = 1.0) -> dict[str, float]:
    """What this machine can do at best, measured: "float32" and "float64", operations/s of the fastest product of square
    matrices, the kernels' own or BLAS; "read", bytes/s out of a buffer larger than the last-level cache."""
    found: dict[str, float] = {}
    share = seconds / 3
    for dtype in (np.float32, np.float64):
        n = 768
        a, b, out = np.ones((3, n, n), dtype)
        best = min(_best(partial(algorithms.product, a, b, out, num_threads, blas=blas), share / 2) for blas in (False, True))
        found[np.dtype(dtype).name] = 2 * n**3 / best
    return {**found, "read": _read_speed(num_threads, share)}


def _best(function: Callable[[], object], seconds: float) -> float:
    function()
    best, end = np.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return float(best)


def _read_speed(num_threads: int, seconds: float) -> float:
    """Bytes/s that so many threads read, each its own part of one buffer: the maximum of its numbers."""
    buffer = np.ones(max(128 << 20, 4 * last_level_bytes()) // 4, np.float32)
    parts = np.array_split(buffer, num_threads)

    def read_all() -> None:
        readers = [threading.Thread(target=part.max) for part in parts[1:]]
        for reader in readers:
            reader.start()
        parts[0].max()
        for reader in readers:
            reader.join()

    return buffer.nbytes / _best(read_all, seconds)


def memory(nbytes: int, huge: bool = True) -> np.ndarray:
    """Bytes, zero, from the start of a page on: in huge pages or in the smallest, where the system can be asked (Linux)."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    block = mmap.mmap(-1, nbytes + HUGE_PAGE, **private)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):     # a kernel without huge pages
            block.madvise(advice)
    whole = np.frombuffer(block, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start:start + nbytes]
