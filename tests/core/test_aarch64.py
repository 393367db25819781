"""The kernels without Python, see kernels_alone.c: on this machine, and on aarch64, built by a cross compiler and run by an
emulator, where both are. On a machine of that architecture every other test is of it, and that one is left out.
"""

import ast
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "fastmha" / "csrc"
COMPILER = ("aarch64-linux-gnu-gcc", "aarch64-linux-musl-gcc", "aarch64-unknown-linux-gnu-gcc")
NATIVE = ("cc", "gcc", "clang")
EMULATOR = ("qemu-aarch64", "qemu-aarch64-static")


def tool(*command):
    """Run it without what a sanitized Python has preloaded."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def found(names, what):
    for name in names:
        if shutil.which(name):
            return name
    pytest.skip(f"this machine has no {what}: none of {', '.join(names)} on PATH")


def flags():
    """Those of setup.py, which has none for an architecture."""
    for statement in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "FLAGS":
            return ast.literal_eval(statement.value)
    raise AssertionError("setup.py has no FLAGS")


@pytest.fixture
def emulator():
    return found(EMULATOR, "emulator of aarch64")


@pytest.fixture
def sources():
    if missing := [path for path in (ROOT / "setup.py", CSRC / "baseline.c") if not path.exists()]:
        pytest.skip(f"needs the C sources, not only the installed package: no {missing[0]}")


@pytest.fixture
def compiler(sources):
    if platform.machine().lower() in ("aarch64", "arm64"):
        pytest.skip("this machine has no other architecture: all tests are of aarch64 here")
    return found(COMPILER, "cross compiler for aarch64")


def built(compiler, flags, tmp_path, link=(), silent=True):
    """The program of kernels_alone.c with the sources of the kernels that it calls; silent: none of these may give a warning."""
    def compile_one(source):
        to = tmp_path / f"{source.stem}.o"
        made = tool(compiler, *flags, "-std=gnu11", "-Wall", "-Wextra", f"-I{CSRC}", "-c", str(source), "-o", str(to))
        # A loop that is not unrolled is no fault of the source.
        warnings = [line for line in made.stderr.splitlines() if "warning:" in line and "ignoring loop annotation" not in line]
        assert made.returncode == 0, made.stderr
        assert not (silent and warnings), made.stderr
        return str(to)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        sources = [path for path in CSRC.glob("*.c") if not path.name.startswith(("avx", "amx.c"))]
        objects = list(pool.map(compile_one, [*sources, HERE / "kernels_alone.c"]))
    program = tmp_path / "kernels_alone"
    linked = tool(compiler, *link, "-pthread", "-o", str(program), *objects, "-lm")
    assert linked.returncode == 0, linked.stderr
    return program


def assert_right(ran):
    assert ran.returncode == 0, "\n".join(line for line in ran.stdout.splitlines() if not line.startswith("ok")) + ran.stderr
    assert ran.stdout.endswith("\n0 wrong\n")
    for kind in ("float32", "float64", "float16", "bfloat16", "bfloat16 on tiles", "float32 on tiles, two parts"):
        assert f"ok    {kind} backward, turns, grad_v, Lq 70" in ran.stdout


def test_kernels_on_aarch64_fuse_and_agree_with_plain_loops_whatever_the_threads(compiler, emulator, tmp_path):
    ran = tool(emulator, str(built(compiler, flags(), tmp_path, ["-static"])))
    assert_right(ran)
    for kind in ("float32", "float64"):
        assert f"ok    {kind} products are fused as FMHA_BASELINE_FUSES says: 1 of 1" in ran.stdout


def test_the_same_program_agrees_on_this_machine(sources, tmp_path):
    """Without optimisation, which the kernels need long for, and the suite has other tests of."""
    compiler = found(NATIVE, "C compiler")
    plain = [*(flag for flag in flags() if flag != "-O3"), "-DFMHA_BASELINE_ALONE"]
    assert_right(tool(str(built(compiler, plain, tmp_path, silent=False))))     # any compiler: it may warn
