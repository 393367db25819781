"""The only place where thread counts and the limits on BLAS's threads are decided.

fastmha runs its items on a pool of its own and meanwhile holds SciPy's BLAS at one thread (counted over all callers,
restored by the last). The setter is a C function that OpenBLAS and MKL export under several names; where none is found,
products run one after the other under one lock, threaded as BLAS likes.
"""
from __future__ import annotations

import atexit
import ctypes
import math
import os
from pathlib import Path, PurePosixPath

from fastmha import _core, validate

# (getter, setter) pairs of the process-wide thread count; the first pair that SciPy's BLAS exports is taken.
BLAS_NAMES = (
    ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
    ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
)
_MOST = 1024                    # threads of one call; more than any item list needs
_chosen: int | None = None      # by set_num_threads
_default: int | None = None     # from the environment and the machine, read once


def set_num_threads(num_threads: int | None) -> None:
    """Set the number of threads for all calls that do not name one; None goes back to the default.

    The default is FASTMHA_NUM_THREADS, else OMP_NUM_THREADS, else the number of CPUs this process may use: by its affinity, and
    by its control group's share of their time, as a container has one.

    Parameters
    ----------
    num_threads : int or None
        At least 1; more than 1024 is 1024.

    Raises
    ------
    ValueError, TypeError
        If it is not a positive integer.
    """
    global _chosen, _default
    if num_threads is None:
        _chosen = _default = None
    else:
        _chosen = min(validate.integer("num_threads", num_threads, 1), _MOST)


def get_num_threads() -> int:
    """The number of threads of calls that do not name one.

    Returns
    -------
    int
        What `set_num_threads` set, else the default.
    """
    return resolve(None)


def resolve(num_threads: int | None) -> int:
    """The threads of one call: its own argument, else set_num_threads(), else the default."""
    global _default
    if num_threads is not None:
        return min(validate.integer("num_threads", num_threads, 1), _MOST)
    if _chosen is not None:
        return _chosen
    if _default is None:
        _default = min(_environment_threads(), _MOST)
    return _default


def _environment_threads() -> int:
    own = os.environ.get("FASTMHA_NUM_THREADS")
    if own:
        wanted = _positive(own)
        if wanted is None:
            raise ValueError(f"FASTMHA_NUM_THREADS must be a positive integer, got {validate.short(own)}")
        return wanted
    shared = _positive(os.environ.get("OMP_NUM_THREADS", "").split(",")[0])     # "4,2" is for nested regions
    if shared is not None:
        return shared
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, _granted_cpus())


def _granted_cpus(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """The CPUs whose time this process's control groups grant it, as `docker run --cpus=2` does; with more threads all of them
    would be stopped for a part of each period. Begun ones count; a great number where nothing is limited, or not Linux."""
    granted = float(_MOST)
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return _MOST
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):       # a group has no more than those above it
            folder = root / controllers / str(group).lstrip("/")
            try:
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if quota != "max" and int(quota) > 0:
                    granted = min(granted, int(quota) / int(period))
            except (OSError, ValueError, ZeroDivisionError):
                continue
    return max(1, math.ceil(granted))


def _positive(text: str) -> int | None:
    """The positive integer that text is, None where it is none (or has more digits than any number of threads)."""
    digits = text.strip()
    return int(digits) or None if digits.isdecimal() and len(digits) <= 18 else None


def bind_blas() -> str | None:
    """Find the functions that read and set SciPy's BLAS thread count; returns the setter's name, None if there is none.

    Before the first product by BLAS the core does: nothing else needs SciPy's BLAS, whose import takes a while.
    """
    from scipy.linalg import cython_blas

    try:
        library = ctypes.CDLL(cython_blas.__file__)     # symbols of what it links against are found through it
    except OSError:
        library = None
    for getter, setter in BLAS_NAMES:
        if library is not None and hasattr(library, getter) and hasattr(library, setter):
            addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in (getter, setter)]
            _core.bind_blas_threads(*addresses)
            return setter
    _core.bind_blas_threads(0, 0)
    return None


atexit.register(_core.pool_shutdown)
