"""Programs on 1 to 4 ranks: each asserts on every rank and says how many cases held. Without MPI they are skipped."""
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
BENCH = Path(__file__).parents[2] / "benches" / "parallel.py"
RANKS = 1, 2, 3, 4
# how many cases a program has on 1, 2, 3 and 4 ranks
CASES = {
    "heads": (638, 638, 638, 638), "plans": (130, 130, 130, 130), "wrong": (61, 78, 79, 80), "ring": (184, 184, 184, 184),
    "ring_plan": (96, 96, 96, 96), "tokens": (3031, 3051, 3051, 3051),
}
SECONDS = 240       # of a program where four ranks share a CPU; one that hangs would take for ever


def why_not():
    if shutil.which("mpiexec") is None:
        return "there is no mpiexec here"
    probe = subprocess.run([sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, text=True)
    return f"mpi4py cannot be imported: {probe.stderr.strip().splitlines()[-1]}" if probe.returncode else None


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


# as root, and more ranks than CPUs, where the library is Open MPI
ENVIRONMENT = {
    **os.environ, "FASTMHA_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def mpiexec(ranks, program, *args):
    """The program on so many ranks, each of one thread."""
    # an error that nobody catches ends all ranks: mpi4py's own way to run a program
    command = ["mpiexec", "-n", str(ranks), sys.executable, "-m", "mpi4py", str(PROGRAMS / f"{program}.py"), *map(str, args)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("program", CASES)
def test_program_holds_on_every_rank(program, ranks):
    done = mpiexec(ranks, program)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[-2:] == [f"ok {CASES[program][ranks - 1]} cases", ""], done.stdout


@pytest.mark.parametrize(("saving", "loading"), [(3, 2), (2, 4), (1, 3), (4, 1)])
def test_parameters_saved_by_some_ranks_load_on_another_number_of_them(saving, loading, tmp_path):
    assert mpiexec(saving, "states", "save", tmp_path / "whole.npz").stdout == "ok 0 cases\n"
    done = mpiexec(loading, "states", "load", tmp_path / "whole.npz")
    assert done.stdout == "ok 10 cases\n", done.stderr[-4000:]


def test_bench_counts_on_every_rank_the_messages_and_bytes_that_were_planned():
    command = [sys.executable, BENCH, "--ranks", "1,3", "--seconds", "0"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("\n14 of 14 calls sent on every rank what was planned\n")


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize(("how", "words"), [("killed", "ends here"), ("raises", "LookupError: of this rank alone")])
def test_rank_that_ends_ends_the_others_with_a_message(how, words, ranks):
    start = time.monotonic()
    done = mpiexec(ranks, "killed", how)
    assert time.monotonic() - start < 10
    assert done.returncode != 0
    assert words in done.stderr
    assert "went on" not in done.stdout
    # who runs the ranks says which one ended, and how
    assert re.search(r"(?i)killed|signal|abort", done.stdout + done.stderr.replace(words, ""))


def test_without_mpi4py_the_first_call_names_the_extra(tmp_path):
    hidden = "import sys; sys.modules['mpi4py'] = None\n"
    program = hidden + "import fastmha.parallel as p, fastmha\np.shard(fastmha.MultiHeadAttention(8, 2, rng=0), None)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert re.search(r'ImportError: fastmha.parallel needs mpi4py and an MPI library.*: pip install "fastmha\[mpi\]" mpich',
                     done.stderr)


def test_importing_fastmha_or_its_parallel_part_starts_no_mpi(tmp_path):
    program = ("import sys, fastmha; assert 'fastmha.parallel' not in sys.modules\n"
               "import fastmha.parallel; assert 'mpi4py' not in sys.modules; print('ok')")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "ok\n", done.stderr
