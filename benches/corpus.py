"""examples/embed_corpus.py, killed at random moments and started again, beside runs that nothing stops.

    python benches/corpus.py --kills 10 --documents 20000

Generates documents by a seed and embeds them three times, each time by the command: in one process with all threads, without
Dask; on Dask; and on Dask while its whole process group gets SIGKILL at random moments. Rows are counted against the lines of the
texts, all files are compared byte for byte. Needs a POSIX system and what the example needs. Exit status: 0; 1 if anything
differs, or if the work was done before the last kill.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from embed_sentences import VARIED, positive  # noqa: E402

START = 1.5     # seconds, about, from a start of Dask's processes to their first row
LONGEST = 24    # words of a document; the shortest have none


def generate(folder: Path, documents: int, shards: int, seed: int) -> dict[str, int]:
    """Documents of words of the examples' sentences, in shards of random lengths; the documents of each shard."""
    rng, words = random.Random(seed), sorted(set(re.findall(r"\w+", " ".join(VARIED))))
    cuts = [0, *sorted(rng.choices(range(documents + 1), k=shards - 1)), documents]
    sizes = {f"shard-{i:04}.txt": end - start for i, (start, end) in enumerate(pairwise(cuts))}
    for name, size in sizes.items():
        lines = (" ".join(rng.choices(words, k=rng.randint(0, LONGEST))) for _ in range(size))
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return sizes


def run(
    texts: Path, arrays: Path, arguments: Sequence[str], life: float = math.inf, shards: float = math.inf,
) -> tuple[float, bool]:  # fmt: skip
    """The command in a process group of its own, killed after `life` seconds, or earlier once the index has so many shards.

    Returns its seconds, and whether it came to its end.

    Raises
    ------
    RuntimeError
        If it ends with an error of its own.
    """
    command = [sys.executable, str(EXAMPLES / "embed_corpus.py"), str(texts), str(arrays), *arguments]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:      # no pipe: what outlives the kill for a moment would hold it open
        process = subprocess.Popen(command, start_new_session=True, stdout=said, stderr=said)
        try:
            while math.isfinite(life) and process.poll() is None:
                if time.perf_counter() - began >= life or finished(arrays) >= shards:
                    return time.perf_counter() - began, False
                time.sleep(0.002)
            status = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            said.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {status}:\n{said.read()}")
    return time.perf_counter() - began, True


def finished(arrays: Path) -> int:
    """The shards of the index, which is whole whenever one looks."""
    index = arrays / "index.json"
    return len(json.loads(index.read_bytes())["shards"]) if index.exists() else 0


def differences(arrays: Path, expected: Path) -> list[str]:
    """Files that are not those of the other folder, byte for byte; the lock has no content."""
    here, there = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (arrays, expected))
    return [name for name in sorted({*here, *there} - {".lock"}) if here.get(name) != there.get(name)]


def wrong_rows(arrays: Path, sizes: dict[str, int]) -> list[str]:
    """Shards whose array has not a finite row for each line of the text."""
    made = {name: np.load(arrays / f"{Path(name).stem}.npy") for name in sizes}
    return [name for name, rows in made.items() if rows.shape != (sizes[name], 384) or not np.isfinite(rows).all()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=positive, default=20000, help="default: %(default)s")
    parser.add_argument("--shards", type=positive, default=80, help="text files that they lie in (default: %(default)s)")
    parser.add_argument("--kills", type=positive, default=10, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of documents and moments (default: %(default)s)")
    parser.add_argument("--workers", type=positive, help="of the runs on Dask, as the example's")
    parser.add_argument("--threads-per-worker", type=positive, help="likewise")
    options = parser.parse_args(arguments)
    given = {"--workers": options.workers, "--threads-per-worker": options.threads_per_worker}
    on_dask = [text for name, value in given.items() if value is not None for text in (name, str(value))]

    with tempfile.TemporaryDirectory() as folder:
        texts, one, unbroken, killed = (Path(folder) / name for name in ("texts", "one", "unbroken", "killed"))
        texts.mkdir()
        sizes = generate(texts, options.documents, options.shards, options.seed)
        print(f"{options.documents:,} documents of 0 to {LONGEST} words in {options.shards} files, seed {options.seed}")

        alone, _ = run(texts, one, ["--workers", "0"])
        print(f"one process without Dask       {alone:7.1f} s  {options.documents / alone:6.0f} documents per second", flush=True)
        whole, _ = run(texts, unbroken, on_dask)
        print(f"on Dask, unbroken              {whole:7.1f} s  {options.documents / whole:6.0f} documents per second, "
              f"{whole / alone:.2f} times the one process", flush=True)
        again, _ = run(texts, unbroken, on_dask)
        print(f"the same line again            {again:7.1f} s  all is found whole", flush=True)

        rng, began, kills, before = random.Random(options.seed), time.perf_counter(), 0, 0
        start = again + START
        while kills < options.kills:
            # Any moment from the start to a part of the work that is left, so that some is left for each kill. The moments
            # are of the speed of the unbroken run: where this one is faster, the shards that are finished end it.
            part = 0.8 * (options.shards - before) / (1 + options.kills - kills)
            work = max(0.0, whole - start) * part / options.shards
            seconds, ended = run(texts, killed, on_dask, rng.uniform(0, start + work), before + part)
            if ended:
                break
            kills, before = kills + 1, finished(killed)
            print(f"  kill {kills:2} after {seconds:5.1f} s, {before} of {options.shards} shards finished", flush=True)
        last, _ = run(texts, killed, on_dask)
        total = time.perf_counter() - began
        told = f"{options.shards - before} shards in the last run, {last:.1f} s"
        print(f"{f'on Dask, killed {kills} times':30} {total:7.1f} s  {told}")

        wrong = []
        for path in (one, unbroken, killed):
            wrong += [f"{path.name}: {name} has not a finite row per line" for name in wrong_rows(path, sizes)]
            wrong += [f"{path.name}: {name} is not the unbroken run's" for name in differences(path, unbroken)]
        if kills < options.kills:
            wrong.append(f"the work was done after {kills} kills")
        rows = sum(len(np.load(path, mmap_mode="r")) for path in killed.glob("*.npy"))
    print(f"rows                           {rows:,} of {options.documents:,}")
    print("\n".join(wrong) or "equal                          all files of the three runs, byte for byte")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
