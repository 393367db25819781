"""What a bug report needs."""
from __future__ import annotations

import platform
import sys

import numpy as np
import scipy

from fastmha import _core, precision, threads, tuning


def show_config() -> None:
    """Print the versions, instruction sets, BLAS and thread counts that fastmha works with."""
    isa, width = _core.selected_isa()
    bound = threads.bind_blas() or "no setter found: products run under one lock"
    for name, value in (
        ("fastmha", f"{_version()} ({_core.__file__})"),
        ("Python", f"{platform.python_version()} {platform.python_implementation()}, {platform.platform()}"),
        ("NumPy", np.__version__),
        ("SciPy", scipy.__version__),
        ("CPU", f"{tuning.cpu_name()}, {platform.machine()}, {sys.byteorder}-endian"),
        ("kernels", f"{isa} ({8 * width}-bit vectors); runnable here: {', '.join(_core.runnable_isas())}"),
        ("tiles", f"{_on_tiles()}; precision of float32 products: {precision.get_precision()}"),
        ("tuning", tuning.source() or "defaults"),
        ("BLAS", f"scipy.linalg.cython_blas; threads: {bound}"),
        ("threads", f"{threads.get_num_threads()} per call, {_core.pool_workers()} alive in the pool"),
    ):
        print(f"{name + ':':<9}{value}")


def _on_tiles() -> str:
    if not _core.has_tiles():
        return "none"
    if tuning.current().least_on_tiles(2, "forward")[0] >= tuning.NEVER:
        return 'bfloat16, and float32 products where precision "medium" is permitted'
    return "half precision, and float32 products where a lower precision is permitted"


def _version() -> str:
    from fastmha import __version__

    return __version__
