"""Attention over keys and values that lie in files larger than the memory one wants to spend on them.

    python examples/memmap_attention.py
    python examples/memmap_attention.py --megabytes 4096 --budget 64 --folder /somewhere/with/space

Writes random keys and values to two files, (Lk, Hkv, D) float32 each, maps them piece by piece, attends to each piece
with ``fastmha.attention(..., return_lse=True)`` and combines the pieces with ``fastmha.merge``: never more than one piece is
in memory. Prints how much memory that took beside the size of the files, the time and the bytes of keys and values read
per second (files just written are mostly in the system's file cache: a disk is slower), and how far the result is from
plain float64 on a sample of heads. Shows its progress where rich is installed. Exit status: 0; 1 if that distance is not
below 1e-4 of the largest value; 2 if the arguments are wrong or the files cannot be written.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

import fastmha

HEADS, KV_HEADS, WIDTH = 32, 8, 64
MEGABYTE = 2**20
ROW_BYTES = KV_HEADS * WIDTH * 4  # of one key or one value in its file
SAMPLE = (0, HEADS // 2 + 1, HEADS - 1)  # the query heads that are checked
TOLERANCE = 1e-4  # of the largest value: float32 rounding of the scores and of one lse a piece stays well below this


@contextmanager
def bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Calls of what this yields, with a count, move a progress bar; there is none without rich or a terminal."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield lambda done: None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, advance=done)


def pieces(length: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the pieces of an axis."""
    for start in range(0, length, size):
        yield start, min(start + size, length)


def write(path: Path, length: int, size: int, rng: np.random.Generator, advance: Callable[[int], None]) -> None:
    """A file of standard normal numbers, (length, KV_HEADS, WIDTH), written piece by piece."""
    with path.open("wb") as file:
        for start, stop in pieces(length, size):
            rng.standard_normal((stop - start, KV_HEADS, WIDTH), dtype=np.float32).tofile(file)
            advance(stop - start)


def mapped(path: Path, start: int, stop: int) -> np.ndarray:
    """Rows of a file as (1, rows, KV_HEADS, WIDTH); its pages leave memory with the array."""
    rows = np.memmap(path, np.float32, "r", offset=start * ROW_BYTES, shape=(stop - start, KV_HEADS, WIDTH))
    return rows[None]


def attend(
    q: np.ndarray,
    keys: Path,
    values: Path,
    length: int,
    size: int,
    advance: Callable[[int], None],
    num_threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (1, Lq, H, D) over all rows of two files, `size` of them at a time: out (1, Lq, H, D), lse (1, H, Lq)."""
    out = np.zeros_like(q)
    lse = np.full((1, q.shape[2], q.shape[1]), -np.inf, q.dtype)  # of no keys: merge leaves the other side as it is
    for start, stop in pieces(length, size):
        k, v = mapped(keys, start, stop), mapped(values, start, stop)
        part = fastmha.attention(q, k, v, layout="BLHD", return_lse=True, num_threads=num_threads)
        out, lse = fastmha.merge(out, lse, *part, layout="BLHD")
        del k, v
        advance(stop - start)
    return out, lse


def plain(q: np.ndarray, head: int, keys: Path, values: Path, length: int, size: int) -> np.ndarray:
    """One head of the same in float64, (Lq, D): all scores, one softmax, one weighted sum."""
    kv_head = head // (HEADS // KV_HEADS)
    scores = [
        q[0, :, head].astype(np.float64) @ mapped(keys, *ends)[0, :, kv_head].T.astype(np.float64)
        for ends in pieces(length, size)
    ]
    weights = np.concatenate(scores, axis=1) / math.sqrt(WIDTH)
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    out = np.zeros((q.shape[1], WIDTH))
    for start, stop in pieces(length, size):
        out += weights[:, start:stop] @ mapped(values, start, stop)[0, :, kv_head].astype(np.float64)
    return out


def memory(field: str) -> int | None:
    """Bytes of VmRSS (resident now) or VmHWM (most that ever were) of this process, where the system tells."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def forget_peak() -> None:
    """Start VmHWM anew, where the system lets a process do so; else it counts from the start of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


positive.__name__ = "positive number"  # argparse puts it into its message


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


count.__name__ = "positive integer"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Attention over keys and values in files larger than a memory budget.")
    parser.add_argument("--megabytes", type=positive, default=256, help="size of each of two files (default: %(default)s)")
    parser.add_argument(
        "--budget", type=positive, default=32, help="megabytes of keys and values in memory (default: %(default)s)"
    )
    parser.add_argument("--queries", type=count, default=16, help="query rows of each head (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write the files (default: the system's temporary folder)")
    parser.add_argument("--threads", type=count, help="threads of fastmha")
    options = parser.parse_args(arguments)

    length = max(1, int(options.megabytes * MEGABYTE) // ROW_BYTES)
    size = max(1, int(options.budget * MEGABYTE) // (2 * ROW_BYTES))
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, options.queries, HEADS, WIDTH), dtype=np.float32)
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            return run(q, Path(folder), length, size, rng, options.threads)
    except OSError as error:
        print(f"The files cannot be written: {error}", file=sys.stderr)
        return 2


def run(q: np.ndarray, folder: Path, length: int, size: int, rng: np.random.Generator, num_threads: int | None) -> int:
    """Write, attend, check, print; returns the exit status."""
    keys, values = folder / "keys.f32", folder / "values.f32"
    with bar("writing", 2 * length) as advance:
        for path in (keys, values):
            write(path, length, size, rng, advance)
    files = keys.stat().st_size + values.stat().st_size
    n = -(-length // size)
    print(f"files      {files / MEGABYTE:.1f} MB: {length:,} keys and values of {KV_HEADS} heads of width {WIDTH}, float32")
    print(f"pieces     {n} of at most {2 * size * ROW_BYTES / MEGABYTE:.1f} MB")

    with bar("attending", length) as advance:
        forget_peak()
        start, began = memory("VmRSS"), time.perf_counter()
        out, _ = attend(q, keys, values, length, size, advance, num_threads)
        seconds, peak = time.perf_counter() - began, memory("VmHWM")
    if start is None or peak is None:
        print("memory     not told by this system")
    else:
        grown = max(0, peak - start)
        print(f"memory     {grown / MEGABYTE:.1f} MB at most above the start, {grown / files:.1%} of the files")
    print(f"time       {seconds:.3f} s for {q.shape[1]} queries of {HEADS} heads, {files / seconds / 1e9:.2f} GB/s")

    worst = largest = 0.0
    with bar("checking", len(SAMPLE)) as advance:
        for head in SAMPLE:
            expected = plain(q, head, keys, values, length, size)
            worst = max(worst, float(np.abs(out[0, :, head] - expected).max()))
            largest = max(largest, float(np.abs(expected).max()))
            advance(1)
    agrees = worst < TOLERANCE * largest  # False for NaN as well
    verdict = "below" if agrees else "NOT below"
    print(f"agreement  largest difference from plain float64 {worst:.1e} of {largest:.1e} (heads {', '.join(map(str, SAMPLE))}), "
          f"{verdict} {TOLERANCE:.0e} of it")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
