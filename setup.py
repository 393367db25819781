"""Builds fastmha._core, the one compiled module. Metadata is in pyproject.toml.

FASTMHA_CHECKED=1 builds with Cython's bounds checks and the address and undefined-behaviour sanitizers, for tests.
"""
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import Any

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError, PlatformError

CHECKED = os.environ.get("FASTMHA_CHECKED", "0") not in ("", "0")
UNIX = sys.platform != "win32"
# -g0: Python's own flags may ask for debug information, four times the size of the code
FLAGS = ["-O3", "-g0", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden", "-pthread", "-Wno-psabi"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
CHECKED_FLAGS = [       # optimised, the checks take ten times as long to compile
    "-O0", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=fast", "-pthread", "-Wno-psabi", "-DFMHA_CHECKED", *SANITIZE,
]


class BuildExt(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True       # what lies in build/ may be of the other kind of build, or of another compiler

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def compile_one(source: str, **options: Any) -> list[str]:
            began = time.perf_counter()
            objects = compile_all([source], **options)
            print(f"compiled {source} in {time.perf_counter() - began:.1f} s", flush=True)
            return objects

        def side_by_side(sources: list[str], **options: Any) -> list[str]:
            workers = min(len(sources), os.cpu_count() or 1)
            print(f"compiling {len(sources)} files, {workers} at a time", flush=True)
            with ThreadPoolExecutor(workers) as pool:
                parts = [pool.submit(compile_one, source, **options) for source in sources]
            return [name for part in parts for name in part.result()]

        self.compiler.compile = side_by_side
        try:
            super().build_extensions()
        except (CompileError, ExecError, LinkError, PlatformError, FileNotFoundError) as error:
            sys.exit(
                f"fastmha could not be compiled: {error}\nIt needs a C compiler and Python's headers. "
                "Debian, Ubuntu: apt-get install gcc python3-dev; Fedora: dnf install gcc python3-devel; "
                "macOS: xcode-select --install; Windows: the Visual Studio Build Tools with C++."
            )


# The instruction sets take longest: they start first.
SOURCES = sorted(glob("fastmha/csrc/*.c"), key=lambda name: (not os.path.basename(name).startswith(("avx", "amx")), name))
BUILD = os.path.join("build", "checked" if CHECKED else "release")
extension = Extension(
    "fastmha._core",
    [*SOURCES, "fastmha/_core.pyx"],
    depends=[*glob("fastmha/csrc/*.h"), *glob("fastmha/*.pxd"), *glob("fastmha/glue/*.pxi")],
    include_dirs=["fastmha"],
    extra_compile_args=(CHECKED_FLAGS if CHECKED else FLAGS) if UNIX else ["/std:c11", "/O2"],
    extra_link_args=(["-pthread"] + (SANITIZE if CHECKED else [])) if UNIX else [],
)
directives = {
    "language_level": 3, "boundscheck": CHECKED, "wraparound": CHECKED, "initializedcheck": CHECKED,
    "cdivision": not CHECKED, "freethreading_compatible": False, "auto_pickle": False, "autotestdict": False,
}
setup(
    ext_modules=cythonize([extension], build_dir=BUILD, compiler_directives=directives),
    cmdclass={"build_ext": BuildExt},
)
