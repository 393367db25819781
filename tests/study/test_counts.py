"""Counts of the study: callgrind's files read right, the child's arms, one real run, and answers without."""

import io
import json
import shutil
import sys
from dataclasses import asdict

import numpy as np
import pytest

from fastmha.study import counts, heads
from fastmha.study.cases import DIRECTIONS, Case

CASE = Case(1, 1, 1, 8, 6, 4, row=64)
scripts_run = pytest.mark.skipif(sys.platform == "win32", reason="the stand-ins are scripts")
SQUARE = Case(2, 2, 1, 6, 6, 8, dtype="float64", algorithm="blas")
KERNELS = "/site-packages/fastmha/_core.cpython-311-x86_64-linux-gnu.so"
FILE = f"""# callgrind format
version: 1
desc: I1 cache: 32768 B, 64 B, 8-way associative
desc: D1 cache: 49152 B, 64 B, 12-way associative
desc: LL cache: 1048576 B, 64 B, 16-way associative
events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw
ob={KERNELS}
fl=tiles.c
fn=forward
0 100 40 20 1 7 3 1 2 1
calls=4 0
0 999 999 999 999 999 999 999 999 999
0 10
cob=/usr/lib/libc.so.6
cfn=memcpy
calls=1 0
0 50 20 20 0 5 6 0 1 2
ob=/usr/lib/libpython3.11.so.1.0
fn=eval
0 1000 300 200 9 80 70 1 60 50
ob=/usr/lib/libc.so.6
fn=memcpy
0 50 20 20 0 5 6 0 1 2
ob=/site-packages/numpy/_core/_multiarray_umath{counts.sysconfig.get_config_var("EXT_SUFFIX")}
fn=ufunc
0 7 1
totals: 1167 361 240 10 92 79 2 63 53
"""


# ------------------------------------------------------------------------------------------------ what valgrind writes

def test_counts_are_those_of_kernels_and_libraries_without_the_interpreter():
    assert counts.counted(FILE) == {"instructions": 160, "D1_misses": 21, "LL_misses": 6, "interpreter_instructions": 1007}


@pytest.mark.parametrize(("old", "new", "message"), [
    ("totals: 1167", "totals: 1168", "do not add up"),
    ("desc: LL cache: 1048576 B", "desc: LL cache: 536870912 B", "another cache was simulated"),
    ("events: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw", "events: Ir", "no cache misses"),
])
def test_a_file_that_is_not_what_was_asked_for_is_refused(old, new, message):
    text = FILE.replace(old, new)
    with pytest.raises(ValueError, match=message):
        counts.counted(text[:text.index("totals:")] if new == "events: Ir" else text)


@pytest.mark.parametrize(("path", "interpreter"), [
    (KERNELS, False), ("/x/libscipy_openblas-6cdc3b4a.so", False), ("/x/libmkl_core.so.2", False), ("/lib/libc.so.6", False),
    ("/usr/bin/python3.12", True), ("/lib/ld-linux-x86-64.so.2", True), ("/lib/libpython3.12.so.1.0", True),
    ("/x/math" + counts.sysconfig.get_config_var("EXT_SUFFIX"), True), ("/x/_multiarray_umath.abi3.so", True),
])
def test_objects_of_the_interpreter_are_told_from_libraries(path, interpreter):
    assert counts.of_interpreter(path) == interpreter


# ------------------------------------------------------------------------------------------------ the child

@pytest.mark.parametrize("case", [CASE, SQUARE], ids=lambda case: case.label)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_arm_of_the_child_gives_the_answer_of_the_strided_one(case, direction):
    usual, on_lines = operands = [heads.Operands(case, on_lines=on_lines) for on_lines in (False, True)]
    functions = counts.prepared(operands, direction)
    assert set(functions) == set(counts.ARMS)
    functions["strided"]()
    expected = {name: array.copy() for name, array in usual.results(direction).items()}
    for arm in ("strided on lines", "packed on lines"):
        for name, array in on_lines.results(direction).items():
            array[...] = np.nan if name != "lse" else array
        functions[arm]()
        for name, array in on_lines.results(direction).items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6, err_msg=f"{arm} {name}")


def test_operands_on_lines_keep_their_strides_and_numbers_and_start_on_a_cache_line():
    usual, moved = (heads.Operands(Case(1, 1, 1, 5, 5, 16, row=256), on_lines=on_lines) for on_lines in (False, True))
    for name in ("q", "k", "v", "grad_q", "out"):
        old, new = getattr(usual, name), getattr(moved, name)
        assert new.strides == old.strides
        assert new.ctypes.data % counts.LINE == 0       # heads of one line
    np.testing.assert_array_equal(moved.k, usual.k)
    assert moved.problem.k.ctypes.data == moved.k.ctypes.data


def test_the_child_answers_each_command_once_it_is_done(monkeypatch):
    called, answers = [], io.StringIO()
    monkeypatch.setattr(counts, "prepared", lambda operands, direction: {
        "packed": lambda: called.append((operands[0].case.algorithm, direction, answers.getvalue().count("\n")))})
    blas = {**asdict(CASE), "algorithm": "blas"}
    commands = [[asdict(CASE), "forward"], ["packed", 2], [blas, "backward"], ["packed", 1]]
    counts.work([json.dumps(command) + "\n" for command in commands], answers)
    assert called == [("tiled", "forward", 1)] * 2 + [("blas", "backward", 3)]
    assert all(0 <= int(line) < counts.LINE for line in answers.getvalue().splitlines())
    assert answers.getvalue().count("\n") == len(commands)


@pytest.mark.parametrize("isa", ["avx512", "avx512bf16", "amx"])
def test_under_valgrind_nothing_runs_on_avx512(isa, monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "SkylakeX")
    monkeypatch.setattr(counts._core, "selected_isa", lambda: (isa, 64))
    variables = counts.environment()
    assert (variables["FASTMHA_ISA"], variables["OPENBLAS_CORETYPE"]) == ("avx2", "Haswell")
    monkeypatch.setattr(counts._core, "selected_isa", lambda: ("baseline", 16))
    variables = counts.environment()
    assert variables["FASTMHA_ISA"] == "baseline"
    assert "OPENBLAS_CORETYPE" not in variables


# ------------------------------------------------------------------------------------------------ runs

def measured(case, callgrind):
    return counts.trial(case, "forward", callgrind, twice=("pack",), last=True).record()


@pytest.mark.skipif(not (shutil.which("valgrind") and shutil.which("vgdb")), reason="valgrind is not installed")
def test_counts_under_valgrind_follow_the_work():
    record = json.loads(json.dumps(measured(Case(1, 1, 1, 32, 256, 32, row=4096), counts.Callgrind())))
    if "missing" in record:
        pytest.skip(record["missing"])      # such as a container in which no process may be traced
    found = record["counts"]
    assert tuple(found) == counts.ARMS
    vector_steps = record["madds"] // 8
    assert vector_steps < found["packed"]["instructions"] < 20 * record["madds"]
    assert found["pack"]["instructions"] < found["packed"]["instructions"] / 5
    assert found["contiguous"]["instructions"] > found["packed"]["instructions"]
    for arm in ("strided", "packed"):       # caches were empty, so that each line was missed once at least
        assert found[arm]["LL_misses"] > 0.9 * 2 * 256 * 32 * 4 / counts.LINE
        assert found[arm]["D1_misses"] >= found[arm]["LL_misses"]
        assert found[arm]["D1_per_madd"] == found[arm]["D1_misses"] / record["madds"]
    assert record["again"]["pack"]["instructions"] == pytest.approx(found["pack"]["instructions"], rel=0.1)
    assert record["valgrind"].startswith("valgrind-")


@pytest.mark.parametrize("program", ["valgrind", "vgdb"])
def test_a_machine_without_valgrind_says_so_and_nothing_fails(program, monkeypatch):
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else which(name) or f"/bin/{name}")
    callgrind = counts.Callgrind()
    records = [measured(case, callgrind) for case in (CASE, SQUARE)]
    assert [r["missing"] for r in records] == [f"{program} is not installed"] * 2
    found = counts.QUESTION.answered({"records": records})
    assert f"Not counted on this machine: {program} is not installed." in found.short
    assert not found.pictures


@scripts_run
def test_a_child_that_fails_is_reported_with_its_last_line_and_not_started_again(tmp_path, monkeypatch):
    script = tmp_path / "valgrind"
    script.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo valgrind-0 && exit\necho x >> {tmp_path}/starts\n"
                      "read line\necho first >&2\necho cannot map the stack >&2\nexit 3\n")
    script.chmod(0o755)
    (tmp_path / "vgdb").symlink_to(script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    callgrind = counts.Callgrind()
    missing = [measured(case, callgrind)["missing"] for case in (CASE, SQUARE)]
    assert missing == ["Python under valgrind-0 failed: cannot map the stack"] * 2
    assert (tmp_path / "starts").read_text() == "x\n"


# ------------------------------------------------------------------------------------------------ answer

def record(row, algorithm, strided, packed):
    """A record whose arms have D1 misses as given and a tenth of them in LL."""
    each = {"strided": strided, "packed": packed, "contiguous": packed + 10, "pack": 10, "strided on lines": strided / 2,
            "packed on lines": packed / 2}
    arms = {arm: {"instructions": 8000, "D1_misses": n, "LL_misses": n / 10 if row % 4096 else n, "D1_per_madd": n / 1e4,
                  "LL_per_madd": n / 1e5} for arm, n in each.items()}
    return {"question": "counts", "label": f"row{row} {algorithm}", "factors": {"algorithm": algorithm}, "counts": arms,
            "again": {"pack": {**arms["pack"], "D1_misses": 11}}, "madds": 10000, "least_lines": 50, "row_bytes": row,
            "line_offset": 16}


def test_the_answer_compares_strided_with_packed_by_algorithm_and_row():
    records = [record(12288, "tiled", 300, 200), record(9216, "tiled", 240, 200), record(12288, "blas", 200, 200)]
    found = counts.QUESTION.answered({"records": records})
    assert "“tiled” misses D1 1.20 to 1.50 times as often on packed" not in found.short
    assert "on strided heads “tiled” misses D1 1.20 to 1.50 times as often as on packed ones" in found.short
    assert "on strided heads “blas” misses D1 1.00 times as often" in found.short
    assert "LL is missed 1.50 times as often with such rows and 1.20 times with others by “tiled”." in found.short
    assert "(16 bytes after one where NumPy placed them), “tiled” misses D1 on strided heads 0.50 times as often" in found.short
    assert "The instructions differ by at most 0 %" in found.short
    assert "“pack” differed by at most 0 % in instructions, 10 % in misses of D1" in found.method
    first = found.tables[0]
    assert first.rows[0] == ["row12288 tiled", "30.00", "21.00", "20.00", "1.00", "15.00", "10.00", "5.00"]
    values = found.pictures[0].data["panels"][0]["rows"][0]["values"]
    assert [v["value"] for v in values] == pytest.approx([30, 21, 20, 1, 15, 10])


def test_there_is_no_answer_without_records():
    assert counts.QUESTION.answered({"records": []}) is None


def test_trials_have_labels_of_their_own_and_the_quick_ones_are_among_all():
    quick, full = ([t.label for t in counts.trials(quick, 2)] for quick in (True, False))
    assert len(set(full)) == len(full)
    assert set(quick) <= set(full)
