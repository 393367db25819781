"""Ten small faults, one at a time in a scratch copy of the tree: which test finds each? Exit status 1 if one is found by none.

    python .ci/mutations.py                 # in an environment with fastmha's test extra and Cython; a C compiler
    python .ci/mutations.py stride ring     # the faults with these words in their names alone

The core of the copy has the kernels of the baseline alone and little optimisation: a fault in C takes some seconds to build.
The files that should find a fault run first, then the rest of the suite.
"""
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of phiopt: with -O2 gcc 12 breaks off at vectors of 64 bits of the baseline, with -O3 not.
FLAGS = ["-O2", "-fno-tree-phiopt", "-g0", "-w", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-fvisibility=hidden",
         "-pthread", "-Ifastmha"]
# The choice among instruction sets, as where there is the baseline alone.
DISPATCH = '#include "csrc/fastmha.h"\n#undef __x86_64__\n#include "csrc/dispatch.c"\n'
OTHERS = ["tests/core", "tests/functions", "tests/modules", "tests/cache"]
# Programs of their own: the instruction sets that this core has not, compilers, signals.
LEFT_OUT = [f"--ignore=tests/core/test_{name}.py" for name in ("fences", "pool_stress", "aarch64", "interrupts")]

# name: (file, what stands there once, the fault, the files that should find it)
FAULTS = {
    "causality, one key too many": (
        "csrc/fastmha.h", "diagonal + p->right + 1 < high) high = diagonal + p->right + 1;",
        "diagonal + p->right + 2 < high) high = diagonal + p->right + 2;", ["functions/test_attention.py"]),
    "a tile of one key, dropped": (
        "csrc/forward.inc.h", "start < last && !fmha_pool_stopped(); start += TILE_KEYS) {\n        /* Keys before j0",
        "start + (start > 0) < last && !fmha_pool_stopped(); start += TILE_KEYS) {\n        /* Keys before j0",
        ["core/test_tiled.py"]),
    "the stride of heads for that of rows": (
        "csrc/stored.inc.h", "h * x->stride[1] + i * x->stride[2]) *", "h * x->stride[1] + i * x->stride[1]) *",
        ["core/test_decode.py"]),
    "the sum of the third chunk, lost": (
        "csrc/decode.inc.h", "if (own == 0) continue;", "if (own == 0 || c == 2) continue;",
        ["core/test_decode.py"]),
    "the rest of a tiny scale, missing": (
        "csrc/fastmha.h", "*rest = tiny ? 1 / lift : 1;", "*rest = 1;", ["functions/test_scales.py"]),
    "another head's keys": (
        "glue/blas.pxi", "hkv = block.h // (p.H // p.Hkv)", "hkv = block.h % p.Hkv", ["functions/test_attention.py"]),
    "the firewall's careful path, left out": (
        "csrc/forward.inc.h", "careful = touched && (purpose & FMHA_NAME(careful));", "careful = 0;",
        ["functions/test_firewall.py"]),
    "the delta of the softmax's gradient, dropped": (
        "csrc/rows.inc.h", "VEC g = v_load_n(dy + j, cols - j, 0) - delta;", "VEC g = v_load_n(dy + j, cols - j, 0);",
        ["core/test_kernels.py"]),
    "the weights of a merge, swapped": (
        "merging.py", "return share1, share2, lse", "return share2, share1, lse",
        ["functions/test_merge.py"]),
    "a ring's slot, off by one": (
        "slots.py", "slot = (position + at) % slots", "slot = (position + at + 1) % slots", ["cache/test_cache.py"]),
}


def run(command, tree, **more):
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, **more)


def compiled(tree, source):
    """The object of one source."""
    target = tree / "objects" / (Path(source).stem + ".o")
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    done = run([*compiler, *FLAGS, f"-I{sysconfig.get_paths()['include']}", "-c", source, "-o", target], tree)
    if done.returncode:
        sys.exit(f"{source} does not compile:\n{done.stderr}")


def build(tree, changed=None):
    """The core, of which one file has changed, or all."""
    names = "baseline", "amx_emulated", "pool", "blas_threads", "split"
    sources = [*(f"fastmha/csrc/{name}.c" for name in names), "objects/dispatch.c"]
    if changed is not None and changed.endswith(".inc.h"):
        sources = sources[:1]
    else:
        done = run([sys.executable, "-m", "cython", "-3", "-X", "boundscheck=False", "-X", "wraparound=False", "-X",
                    "initializedcheck=False", "-X", "cdivision=True", "fastmha/_core.pyx", "-o", "objects/_core.c"], tree)
        if done.returncode:
            sys.exit(f"fastmha/_core.pyx does not compile:\n{done.stderr}")
        sources = [*(sources if changed is None or changed.endswith(".h") else []), "objects/_core.c"]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda source: compiled(tree, source), sources))
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    target = tree / "fastmha" / ("_core" + sysconfig.get_config_var("EXT_SUFFIX"))
    target.unlink(missing_ok=True)
    done = run([*compiler, "-shared", "-pthread", *sorted((tree / "objects").glob("*.o")), "-o", target], tree)
    if done.returncode:
        sys.exit(f"the core cannot be linked:\n{done.stderr}")


def failed(tree, arguments):
    """The first test that fails, or None."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FASTMHA_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(tree), "FASTMHA_ISA": "baseline", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = run([sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", *arguments], tree, env=environment,
                   timeout=3600)
    except subprocess.TimeoutExpired:
        return "none ends"
    if done.returncode == 0:
        return None
    names = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?)(?:\[| - |$)", done.stdout, flags=re.M)
    if not names and done.returncode > 0:
        sys.exit(f"pytest did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return names[0].removeprefix("tests/") if names else f"the process ended with status {done.returncode}"


def main(words):
    chosen = {name: fault for name, fault in FAULTS.items() if not words or any(word in name for word in words)}
    for name, (path, was, _, _) in chosen.items():
        if (ROOT / "fastmha" / path).read_text(encoding="utf-8").count(was) != 1:
            sys.exit(f"{name}: fastmha/{path} does not hold once: {was}")
    survivors = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        for part in ("fastmha", "tests", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            tree.mkdir(exist_ok=True)
            copy(ROOT / part, tree / part)
        for compiled_core in (tree / "fastmha").glob("_core*.so"):
            compiled_core.unlink()
        (tree / "objects").mkdir()
        (tree / "objects" / "dispatch.c").write_text(DISPATCH, encoding="utf-8")
        began = time.monotonic()
        build(tree)
        likely = sorted({f"tests/{name}" for *_, names in chosen.values() for name in names})
        if found := failed(tree, likely):
            sys.exit(f"without any fault, this fails: {found}")
        print(f"without a fault, {', '.join(likely)} pass ({time.monotonic() - began:.0f} s)", flush=True)
        clean = Path(scratch) / "clean"
        shutil.copytree(tree, clean)
        for name, (path, was, fault, names) in chosen.items():
            began, file = time.monotonic(), tree / "fastmha" / path
            file.write_text(file.read_text(encoding="utf-8").replace(was, fault), encoding="utf-8")
            if not path.endswith(".py"):
                build(tree, path)
            found = failed(tree, [f"tests/{x}" for x in names]) or failed(tree, ["-n", "auto", *OTHERS, *LEFT_OUT])
            print(f"{name} (fastmha/{path}): {found or 'SURVIVES'} ({time.monotonic() - began:.0f} s)", flush=True)
            if not found:
                survivors.append(name)
            for part in ("objects", "fastmha"):
                shutil.copytree(clean / part, tree / part, dirs_exist_ok=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
