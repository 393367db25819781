"""The thread pool and the BLAS thread count under stress, in C alone: see pool_stress.c."""

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "fastmha" / "csrc"
SOURCES = [HERE / "pool_stress.c", CSRC / "pool.c", CSRC / "blas_threads.c"]
PROBE = "#include <pthread.h>\nint main(void) { pthread_mutex_t m; return pthread_mutex_init(&m, 0); }\n"


@pytest.fixture(scope="module")
def compiler():
    """The command of a C compiler, as a list."""
    if os.name != "posix":
        pytest.skip("the pool has threads only where there are pthreads")
    if missing := [source for source in SOURCES if not source.exists()]:
        pytest.skip(f"needs the C sources, not only the installed package: no {missing[0]}")
    for command in (sysconfig.get_config_var("CC") or "", "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    pytest.skip("no C compiler on PATH")


def build(compiler, flags, sources, program):
    command = [*compiler, "-std=gnu11", "-Wall", "-Wextra", "-pthread", f"-I{CSRC}", *flags]
    return subprocess.run([*command, "-o", program, *sources], capture_output=True, text=True, timeout=120)


def way_to_run(compiler, flags, directory):
    """What to put before a program built with these flags so that it runs here: ThreadSanitizer may need ASLR off."""
    source, program = directory / "probe.c", directory / "probe"
    source.write_text(PROBE)
    if (built := build(compiler, flags, [source], program)).returncode:
        pytest.skip(f"this compiler cannot build with {' '.join(flags)}: {built.stderr[-200:]}")
    for prefix in ([], ["setarch", platform.machine(), "-R"]):
        if prefix and not shutil.which(prefix[0]):
            continue
        if subprocess.run([*prefix, program], capture_output=True, timeout=60).returncode == 0:
            return prefix
    pytest.skip(f"programs built with {' '.join(flags)} do not run here")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-O2"], id="optimised"),
        pytest.param(["-O1", "-g", "-fsanitize=thread"], id="thread-sanitizer"),
    ],
)
def test_pool_runs_each_item_once_without_races_or_lost_wakeups(compiler, flags, tmp_path):
    prefix = way_to_run(compiler, flags, tmp_path)
    program = tmp_path / "pool_stress"
    built = build(compiler, flags, SOURCES, program)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([*prefix, program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ThreadSanitizer" not in ran.stderr, ran.stderr
    assert "after shutdown runs are serial" in ran.stdout


def test_pool_without_threads_is_serial(compiler, tmp_path):
    source, program = tmp_path / "serial.c", tmp_path / "serial"
    source.write_text(
        '#include "pool.h"\n'
        "static void add(void *sum, ptrdiff_t item, int worker) { *(ptrdiff_t *)sum += item + worker; }\n"
        "int main(void) { ptrdiff_t sum = 0; int took_part = fmha_pool_run(add, &sum, 10, 4); fmha_pool_shutdown();\n"
        "    return !(took_part == 1 && sum == 45 && fmha_pool_workers() == 0); }\n"
    )
    built = build(compiler, ["-O2", "-DFMHA_NO_THREADS"], [source, CSRC / "pool.c"], program)
    assert built.returncode == 0, built.stderr
    assert subprocess.run([program], timeout=60).returncode == 0
