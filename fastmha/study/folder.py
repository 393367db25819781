"""The folder of a study: held by one process at a time, files replaced whole, what cannot be read set aside.

Two studies at once would time each other, and the later would replace what the earlier found: the second is refused. The
system drops the lock with the process that holds it, however that ends. Where a file system has no locks, the lock file itself
is one, made by whoever finds none, and outlives a process that is killed.
"""
from __future__ import annotations

import errno
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

LOCK = "study.lock"
LOCKED_BYTE = 1 << 30       # far behind the text, which others read: a lock on Windows keeps them from what it covers
HELD = {errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK}


class HeldError(RuntimeError):
    """Another process uses the folder; the message says which, and what to do."""


class DamagedError(ValueError):
    """A file does not hold what was written there; the message names it and says what is wrong."""


@contextmanager
def held(folder: Path, command: str) -> Iterator[None]:
    """Hold a folder that exists, meanwhile for this process alone. Raises `HeldError`; OSError if no lock file can be made."""
    path = folder / LOCK
    file = _hold(path)
    try:
        about = {"pid": os.getpid(), "host": platform.node(), "command": command,
                 "since": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        os.truncate(file, 0)
        os.write(file, json.dumps(about).encode() + b"\n")
        yield
    finally:
        if sys.platform == "win32":     # no file that is open can be removed there
            os.close(file)
        with suppress(OSError):
            path.unlink()
        if sys.platform != "win32":     # before that nobody else gets the lock of a file that is about to go
            os.close(file)


def _hold(path: Path) -> int:
    """The lock file, open and locked."""
    while True:
        made = True
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            made = False
            try:
                file = os.open(path, os.O_RDWR)
            except FileNotFoundError:       # its holder has just removed it
                continue
        try:
            locked = lock(file)
            if locked and not _is(path, file):
                os.close(file)
                continue
            if not locked and not (locked is None and made):
                raise HeldError(_refusal(path, _holder(file), locked is None))
        except BaseException:
            os.close(file)
            raise
        return file


def lock(file: int) -> bool | None:
    """Lock an open file until it is closed or this process ends. False: another one has it. None: there are no locks here."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(file, LOCKED_BYTE, os.SEEK_SET)
            try:
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            finally:
                os.lseek(file, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in HELD else None
    return True


def _is(path: Path, file: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _holder(file: int) -> str:
    try:
        about = json.loads(os.read(file, 1 << 16))
        return " ".join(f"process {about['pid']:d} on {about['host']} ({about['command']}, since {about['since']})".split())
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return "another process"


def _refusal(path: Path, holder: str, no_locks: bool) -> str:
    if not no_locks:
        return f"{path.parent} is in use by {holder}: wait until that has ended, or give another --out"
    return (f"{path.parent} is in use by {holder} as {path} says, and its file system has no locks to tell whether that still "
            "runs: wait until it has ended, delete that file if it has, or give another --out")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to be written; it then takes the name in one step, so that `path` is never half written."""
    partial = path.with_suffix(".partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def replace_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(printable(text), encoding="utf-8")


def printable(text: object) -> str:
    """Text with escapes for what is no character: bytes of a path that are not UTF-8."""
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")


def set_aside(path: Path) -> Path:
    """Give whatever has the name `path` a free one beside it; returns that."""
    number, free = 1, path.with_name(f"{path.stem}.damaged{path.suffix}")
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")
    path.rename(free)
    return free
