"""Memory and operations: counts by part, peaks of a process against them, sentences computed from records."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import assert_drawable

from fastmha import analysis
from fastmha.study import memory
from fastmha.study.memory import Work

forgets_peaks = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of a process is forgotten here")
SHAPES = [(1, 1, 8, 1), (2, 5, 12, 3), (3, 64, 96, 8)]


def record_of(work, peak=None, seconds=1.0, **more):
    """What a trial of this work would record."""
    components = dict(work.counted)
    total = components.pop("total")
    measured = {} if peak is None else {
        "peak_bytes": peak, "seconds": {"best": seconds, "median": seconds, "low": seconds, "high": seconds, "calls": 1}}
    return {"question": memory.NAME, "label": work.label, "factors": {**memory.asdict(work), "arm": work.arm, "threads": 2},
            "counted_bytes": total, "components": components, "held_bytes": work.held, "scratch_bytes": 1000,
            "flops": work.flops, **measured, **more}


def records_as_counted(off=1.0):
    """Of the full study, every peak `off` times what is held, time as operations."""
    return [record_of(w, int(off * w.held), w.flops / 1e11) for w in memory.works(quick=False)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [False, True])
def test_parts_of_the_operations_sum_to_the_count(shape, training):
    assert sum(memory.flop_parts(*shape, training=training).values()) == analysis.count_flops(*shape, backward=training)


@pytest.mark.parametrize("quick", [False, True])
def test_trials_are_named_once_and_fit_their_time(quick):
    trials = memory.trials(quick, 2)
    assert len({t.label for t in trials}) == len(trials)
    assert sum(t.seconds for t in trials) < (10 if quick else 60)
    json.dumps([t.factors for t in trials])


@pytest.mark.parametrize("algorithm", ["blas", "tiled"])
@pytest.mark.parametrize("training", [False, True])
def test_held_bytes_leave_out_only_score_matrices_that_nobody_asked_for(algorithm, training):
    work = Work(2, 100, 64, 4, algorithm, training)
    scores = 4 * 2 * 4 * 100**2 * (1 + training) if algorithm == "blas" else 0
    assert work.held == work.counted["total"] - scores
    everything = analysis.count_memory_bytes(2, 100, 64, 4, algorithm=algorithm)["total"]
    assert Work(2, 100, 64, 4, algorithm, weights=True).held == everything


WATCH = """
import numpy as np
from fastmha.study import memory

watch = memory.Watch()
earlier = np.ones(64 << 20, np.uint8)
before = watch.peak()
del earlier
watch.reset()
held = np.ones(16 << 20, np.uint8)
print(before, watch.peak(), held.size)
"""


@forgets_peaks
def test_watch_sees_what_is_held_at_once_and_forgets_what_was_before(tmp_path):
    """In a process of its own: of a large one the system may take back pages in between."""
    done = subprocess.run([sys.executable, "-c", WATCH], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    before, peak, _ = map(int, done.stdout.split())
    assert before >= 60 << 20
    assert 12 << 20 <= peak <= 32 << 20


@forgets_peaks
@pytest.mark.parametrize("work", [Work(2, 1024, 512, 8, "blas", weights=True), Work(2, 2560, 512, 8, "tiled"),
                                  Work(2, 1536, 512, 8, "tiled", training=True)], ids=lambda work: work.label)
def test_measured_peak_is_that_counted(work):
    found = memory.measure(work, 2, 0)
    assert found["counted_bytes"] >= memory.DOMINATES
    assert found["peak_bytes"] == pytest.approx(found["counted_bytes"], rel=memory.TOLERANCE)
    assert found["seconds"]["best"] > 0


@forgets_peaks
def test_blas_keeps_no_score_matrices_that_nobody_asked_for():
    found = memory.measure(Work(2, 1024, 512, 8, "blas"), 2, 0)
    assert found["peak_bytes"] < found["counted_bytes"] / 2
    assert found["peak_bytes"] >= found["held_bytes"]


def test_later_calls_are_timed_without_the_first(monkeypatch):
    clock = iter(np.cumsum([0, 9, 0] + [0, 1, 0] * 10).tolist())      # before a call, behind it, and the look at the end
    monkeypatch.setattr(memory.time, "perf_counter", lambda: next(clock))
    found = memory.work_here(Work(1, 4, 8, 2, "tiled"), 1, 3.5)
    assert found["seconds"]["median"] == 1
    assert found["seconds"]["calls"] == 3


def test_work_that_does_not_fit_is_missing_and_starts_no_process(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 10_000_000)
    monkeypatch.setattr(memory.subprocess, "run", lambda *a, **k: pytest.fail("a process was started"))
    found = memory.measure(Work(1, 1024, 512, 8, "tiled"), 1, 0)
    assert "peak_bytes" not in found
    assert found["missing"] == "it needs 16.8 MB, and 10.0 MB of memory are free"


@pytest.mark.parametrize(("status", "stderr", "said"), [
    (-9, "", "its process failed: ended by SIGKILL"), (3, "", "its process failed: exit status 3"),
    (1, "Traceback\nMemoryError: no memory", "its process failed: MemoryError: no memory")])
@pytest.mark.skipif(sys.platform == "win32", reason="no signals end processes there")
def test_work_whose_process_fails_is_missing_and_says_why(monkeypatch, status, stderr, said):
    monkeypatch.setattr(memory.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, status, "", stderr))
    assert memory.measure(Work(1, 8, 8, 1, "tiled"), 1, 0)["missing"] == said


def test_where_no_peak_is_told_the_work_is_missing(monkeypatch):
    monkeypatch.setattr(memory, "resident", lambda name: (_ for _ in ()).throw(OSError))
    monkeypatch.setitem(sys.modules, "resource", None)
    assert "does not tell" in memory.work_here(Work(1, 8, 8, 1, "tiled"), 1, 0)["missing"]


# ------------------------------------------------------------------------------------------------ the answer

def answered(records, **more):
    return memory.QUESTION.answered({"records": records, "limits": {"float32": 1e11, "read": 1e10}, "threads": 2, **more})


def table(answer, start):
    return next(t for t in answer.tables if t.title.startswith(start))


def test_no_records_no_answer():
    assert answered([]) is None
    assert answered([{**record_of(Work(1, 8, 8, 1, "tiled")), "question": "heads"}]) is None


def test_answer_says_that_all_agree_only_where_they_do():
    works = [r for r in records_as_counted() if r["counted_bytes"] >= memory.DOMINATES and memory.textbook(r)]
    good, bad = answered(records_as_counted(1.02)), answered(records_as_counted(1.2))
    assert f"in all {len(works)} works" in good.short
    assert f"in 0 of {len(works)} works" in bad.short
    assert {row[4] for row in table(good, "Peak memory, B 1").rows} == {"small", "yes"}
    assert {row[4] for row in table(bad, "Peak memory, B 1").rows} == {"small", "NO"}


def test_growth_is_that_of_the_records():
    rows = {row[0]: row[1:] for row in table(answered(records_as_counted()), "Growth").rows}
    assert rows["tiled: bytes measured"] == ("1.00",) * 4
    assert rows["tiled: time"] == rows["tiled: operations"]
    assert rows["blas, weights: bytes counted"][-1] == ""       # not measured at the longest
    L = memory.analysis.crossover_length(768) * 2**20
    a, b = (record_of(Work(1, n, 768, 12, "blas", weights=True), 1) for n in (L, 2 * L))
    assert memory.exponent([a, b], memory.GROWTH[0][1]) == pytest.approx(2, abs=1e-3)
    assert math.isnan(memory.exponent([a, b], memory.GROWTH[1][1]))        # a peak below the parameters tells no growth


def test_blas_without_weights_is_reported_against_both_counts():
    rows = table(answered(records_as_counted()), "Peak memory of blas").rows
    assert ["blas" in row[0] and row[4] for row in rows] == ["1.00"] * len(rows)
    assert all(row[1] != row[2] for row in rows)


def test_crossover_and_counts_stand_in_the_answer_even_if_nothing_was_measured():
    found = answered([record_of(Work(1, 512, 768, 12, "tiled"), missing="it needs too much")], limits={})
    assert "for d_model 768 at 1536" in found.short
    assert "it needs too much" in table(found, "Peak memory").rows[0]
    row = next(r for r in table(found, "Counted on paper").rows if r[0] == "1536")
    assert row[1] == row[2] == "7.25"
    assert {p.name for p in found.pictures} == {"flops_over_length", "intensity_over_length"}


@pytest.mark.parametrize("limits", [{}, {"float32": 1e11, "read": 1e10}])
def test_pictures_fit_the_functions_that_draw_them(limits):
    pictures = answered(records_as_counted(), limits=limits).pictures
    assert len({p.name for p in pictures}) == len(pictures) == 5 + bool(limits)
    for picture in pictures:
        assert_drawable(picture)
        json.dumps(picture.data)


def test_components_picture_has_the_counted_parts_and_the_peak():
    picture = next(p for p in answered(records_as_counted(1.1)).pictures if p.name == "memory_by_component")
    by_group = {}
    for bar in picture.data["bars"]:
        by_group.setdefault(bar["group"], []).append(sum(part["value"] for part in bar["parts"]))
    counted, measured = by_group["tiled, L 2048"]
    assert counted == pytest.approx(Work(1, 2048, 768, 12, "tiled").counted["total"] / 1e6)
    assert measured == pytest.approx(1.1 * counted)


def test_a_peak_stands_below_the_count_of_what_is_held():
    """Where score matrices are counted that nobody holds, another bar is without them."""
    picture = next(p for p in answered(records_as_counted()).pictures if p.name == "memory_by_component")
    by_group = {}
    for bar in picture.data["bars"]:
        by_group.setdefault(bar["group"], {})[bar["label"]] = sum(part["value"] for part in bar["parts"])
    assert {tuple(own) for own in by_group.values()} == {("counted", "measured"), ("textbook", "no scores", "measured")}
    for group, own in by_group.items():
        assert list(own.values())[-2] == pytest.approx(own["measured"]), group
        assert ("textbook" in own) == (group in ("blas, L 2048", "blas, training, L 2048"))
    assert by_group["blas, L 2048"]["textbook"] > 5 * by_group["blas, L 2048"]["no scores"]
    assert "textbook is the count with score matrices" in picture.caption


def test_a_mark_says_what_is_equal_there_and_promises_no_crossing():
    """In the picture of times no lines cross at it."""
    pictures = {p.name: p for p in answered(records_as_counted()).pictures}
    for name in ("time_over_length", "flops_over_length"):
        assert pictures[name].data["panels"][0]["marks"] == [
            (1536, "L 1536: attention has as many operations as the projections")]
    parts = {s["name"]: s["y"][s["x"].index(1536)] for s in pictures["flops_over_length"].data["panels"][0]["series"]}
    assert parts["attention"] == parts["projections"]


def test_the_balance_of_the_machine_has_a_name():
    panel = next(p for p in answered(records_as_counted()).pictures if p.name == "intensity_over_length").data["panels"][0]
    assert (panel["reference"], panel["reference_name"]) == (10, "this machine: 10.0 FLOP in the time of a byte read")


@forgets_peaks
def test_the_process_imports_this_package_and_not_one_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "fastmha").mkdir()
    (tmp_path / "fastmha" / "__init__.py").write_text("raise ImportError('another')")
    monkeypatch.chdir(tmp_path)
    assert "peak_bytes" in memory.measure(Work(1, 8, 8, 2, "tiled"), 1, 0)
