"""Prints the kernels of NumPy's OpenBLAS that this CPU runs besides those chosen by default, as OPENBLAS_CORETYPE takes them; why
there are none goes to standard error."""
import os
import platform
import subprocess
import sys

import numpy as np

from fastmha import _core

NEEDS = {"Nehalem": "baseline", "Haswell": "avx2", "Zen": "avx2", "SkylakeX": "avx512"}     # a set that fastmha has, too


def chosen(core: str | None) -> str:
    """The kernels that NumPy's OpenBLAS loads when asked for these."""
    asked = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"} | {"OPENBLAS_VERBOSE": "2"}
    ran = subprocess.run(
        [sys.executable, "-c", "import numpy"], env=asked | ({} if core is None else {"OPENBLAS_CORETYPE": core}),
        capture_output=True, text=True, check=True,
    )
    named = [line.partition(":")[2].strip() for line in (ran.stderr + ran.stdout).splitlines() if line.startswith("Core:")]
    return named[0].lower() if named else ""


blas = str(np.__config__.CONFIG["Build Dependencies"]["blas"]["name"]) if hasattr(np.__config__, "CONFIG") else "unknown"
seen = {chosen(None)}
if platform.machine().lower() not in ("x86_64", "amd64"):
    print(f"kernels of OpenBLAS can be chosen on x86-64, not on {platform.machine()}", file=sys.stderr)
elif "openblas" not in blas or seen == {""}:
    print(f"NumPy's BLAS is {blas}, whose kernels cannot be chosen by OPENBLAS_CORETYPE", file=sys.stderr)
else:
    for name, isa in NEEDS.items():
        if isa in _core.runnable_isas() and (core := chosen(name)) not in seen:     # a build may have one for several names
            seen.add(core)
            print(name)
    if len(seen) == 1:
        print(f"this CPU runs only the kernels {seen.pop()} of OpenBLAS", file=sys.stderr)
