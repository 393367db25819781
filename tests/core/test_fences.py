"""No instruction of AVX stands outside its fence, and the C compiles with clang as with gcc.

A CPU without AVX2 runs everything but the functions named fmha_avx2_*, fmha_avx512_*, fmha_avx512bf16_* and fmha_amx_*, one
without AVX-512 all but the latter three, and one without its bfloat16 all but the last two: a single such instruction
elsewhere (in the choice among them, in the pool) would end the process there.
"""

import ast
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from fastmha import _core

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "fastmha" / "csrc"
SOURCES = sorted(CSRC.glob("*.c"))
FENCED = ("avx2", "avx512", "avx512bf16", "amx")
# What only AVX has: all its mnemonics begin with v, also on xmm registers.
AVX = re.compile(r"^(v\w+|k(mov|and|or|xor|not|add|shift|unpck|test)\w*)$|%[yz]mm\d|%xmm(1[6-9]|2\d|3[01])|%k[0-7]\b")
AVX512 = re.compile(r"^k(mov|and|or|xor|not|add|shift|unpck|test)\w*$|%zmm\d|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]\b")
BFLOAT = re.compile(r"^v(dpbf16ps|cvtne(2ps2|ps2)bf16[xyz]?)$")

needs_disassembly = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("objdump") is None,
    reason="needs an x86-64 machine and objdump",
)


def tool(*command):
    """Run it without what a sanitized Python has preloaded. A file of kernels may take a slow machine minutes to compile."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)


def instructions(path):
    """(function, mnemonic, operands) of every instruction."""
    listing = tool("objdump", "-d", "--no-show-raw-insn", str(path))
    assert listing.returncode == 0, listing.stderr
    function = ""
    for line in listing.stdout.splitlines():
        if line.startswith(" "):
            words = line.partition("\t")[2].partition("#")[0].split(maxsplit=1)
            if words:
                yield function, words[0], words[1] if len(words) > 1 else ""
        elif header := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            function = header[1].lstrip("_")


def fenced(function, isas):
    return any(function.startswith(f"fmha_{isa}_") for isa in isas) and not function.startswith("fmha_amx_emulated_")


@cache
def forbidden(function):
    """What must not be in a function."""
    fences = (AVX, FENCED), (AVX512, FENCED[1:]), (BFLOAT, FENCED[2:])
    return [pattern for pattern, isas in fences if not fenced(function, isas)]


def strays(listing):
    """Instructions where they must not be."""
    return [f"{function}: {mnemonic} {operands}" for function, mnemonic, operands in listing
            if any(pattern.search(mnemonic) or pattern.search(operands) for pattern in forbidden(function))]


# --------------------------------------------------------------------------------------------- the built module, or objects


def has_names():
    """Whether the built module has kept the names of its functions; a stripped one has not."""
    return b"fmha_baseline_softmax_block_32" in Path(_core.__file__).read_bytes()


def command_of(kind):
    """A compiler as a list of words: the one that builds extensions, or clang."""
    if not SOURCES or not (ROOT / "setup.py").exists():
        pytest.skip("needs the C sources and setup.py, not only the installed package")
    if os.name != "posix":
        pytest.skip("the flags are those of gcc and clang")
    names = ("clang",) if kind == "clang" else (sysconfig.get_config_var("CC") or "", "cc", "gcc", "clang")
    for name in names:
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    pytest.skip(f"no C compiler on PATH: {kind}")


def flags():
    """Those of setup.py without optimisation: the fences are the same, the wait is shorter."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "FLAGS":
            return ["-fPIC", *("-O0" if flag == "-O3" else flag for flag in ast.literal_eval(node.value))]
    raise AssertionError("setup.py has no FLAGS")


def objects_of(kind, directory):
    """Object files of all sources; clang must have nothing to say."""
    command, strict = command_of(kind), ["-Wall", "-Wextra", "-Werror"] if kind == "clang" else []
    for source in SOURCES:
        target = directory / f"{source.stem}.o"
        compiled = tool(*command, *flags(), *strict, "-c", str(source), "-o", str(target))
        assert compiled.returncode == 0, compiled.stderr
        yield target


CLANG = ["clang"] * (shutil.which("clang") is not None)
BUILT = "the built module"


@needs_disassembly
@pytest.mark.parametrize("kind", [BUILT if has_names() else "the default compiler", *CLANG])
def test_no_avx_outside_its_fences(kind, tmp_path):
    paths = [_core.__file__] if kind == BUILT else objects_of(kind, tmp_path)
    listing = [instruction for path in paths for instruction in instructions(path)]
    functions = {function for function, _, _ in listing}
    assert {"fmha_isa_runs", "fmha_pool_run"} <= functions
    assert ("PyInit__core" in functions) == (kind == BUILT)
    assert strays(listing) == []
    # The fenced functions are what is seen, and full of such instructions.
    for isa, register in (("avx2", "%ymm"), ("avx512", "%zmm"), ("avx512bf16", "%zmm")):
        inside = [operands for function, _, operands in listing if fenced(function, [isa])]
        assert sum(register in operands for operands in inside) > 1000


@needs_disassembly
@pytest.mark.parametrize(
    ("instruction", "name", "stray"),
    [
        ("vaddps\t%xmm1,%xmm2,%xmm3", "fmha_pool_run", True),
        ("vaddps\t%ymm1,%ymm2,%ymm3", "fmha_baseline_softmax_32", True),
        ("vaddps\t%ymm1,%ymm2,%ymm3", "fmha_avx2_softmax_32", False),
        ("vaddps\t%zmm1,%zmm2,%zmm3", "fmha_avx2_softmax_32.constprop.0", True),
        ("vaddps\t%xmm17,%xmm2,%xmm3", "fmha_avx2_softmax_32", True),
        ("kmovw\t%eax,%k1", "fmha_avx2_softmax_32", True),
        ("vaddps\t%zmm1,%zmm2,%zmm3", "fmha_avx512_softmax_32.part.0", False),
        ("vdpbf16ps\t%zmm1,%zmm2,%zmm3", "fmha_avx512_softmax_32", True),
        ("vcvtne2ps2bf16\t%zmm1,%zmm2,%zmm3", "fmha_avx512bf16_softmax_32", False),
        ("addps\t%xmm1,%xmm2", "fmha_baseline_softmax_32", False),
    ],
)
def test_the_check_sees_what_it_must(instruction, name, stray):
    mnemonic, _, operands = instruction.partition("\t")
    assert bool(strays([(name, mnemonic, operands)])) is stray


@pytest.mark.parametrize("kind", ["the default compiler", *CLANG])
def test_the_sources_raise_no_warning(kind):
    command = command_of(kind)
    for source in SOURCES:
        checked = tool(*command, *flags(), "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source))
        assert checked.returncode == 0, checked.stderr
