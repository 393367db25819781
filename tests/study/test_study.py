"""The study: FLOPs and bytes against brute-force counts, arms that agree, timing, interruption, report, pictures, command."""

import base64
import errno
import importlib.util
import io
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from html.parser import HTMLParser

import numpy as np
import pytest

import fastmha
from fastmha import _core
from fastmha.__main__ import main
from fastmha.study import __main__ as command
from fastmha.study import cases, heads, machine, pace, questions, report, runner, trial
from fastmha.study.answer import Answer, Picture, Question, Table
from fastmha.study.cases import DIRECTIONS, Case, Run
from fastmha.study.trial import Trial

TINY = [
    Case(2, 3, 3, 5, 5, 4),
    Case(1, 4, 2, 6, 6, 3, causal=True, dtype="float64"),
    Case(2, 2, 1, 3, 7, 5, causal=True),
    Case(1, 2, 2, 7, 3, 4, causal=True, dtype="float64"),       # the first queries see no key
    Case(3, 1, 1, 1, 4, 2),
    Case(2, 4, 2, 70, 70, 3, causal=True, algorithm="blas"),
    Case(1, 2, 2, 6, 6, 4, row=160),                            # some heads of a wider projection
]
tiny = pytest.mark.parametrize("case", TINY, ids=lambda case: case.label)
directions = pytest.mark.parametrize("direction", DIRECTIONS)
EXTRA = [name for name in command.EXTRA if importlib.util.find_spec(name) is None]
needs_extra = pytest.mark.skipif(bool(EXTRA), reason=f'{", ".join(EXTRA)} not installed: pip install "fastmha[study]"')


def run_python(*arguments, tmp_path):
    """Python in a folder without the source tree, so that the installed package is the one that runs."""
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


# ------------------------------------------------------------------------------------------------ cases

def allowed_pairs(case):
    """The pairs of one head, one by one, from the rule itself."""
    return [(i, j) for i in range(case.Lq) for j in range(case.Lk) if not case.causal or j <= i + case.Lk - case.Lq]


@tiny
def test_flops_of_a_case_match_a_count_product_by_product(case):
    multiply_adds = {"forward": 0, "backward": 0}
    for _ in range(case.B * case.H):
        for _ in allowed_pairs(case):
            multiply_adds["forward"] += case.D      # the score q_i . k_j
            multiply_adds["forward"] += case.D      # out_i += p v_j
            multiply_adds["backward"] += case.D     # the score again
            multiply_adds["backward"] += case.D     # the gradient of p: grad_out_i . v_j
            multiply_adds["backward"] += case.D     # grad_q_i += s k_j
            multiply_adds["backward"] += case.D     # grad_k_j += s q_i
            multiply_adds["backward"] += case.D     # grad_v_j += p grad_out_i
    for direction in DIRECTIONS:
        assert case.flops(direction) == 2 * multiply_adds[direction]
    assert case.flops("forward+backward") == sum(2 * n for n in multiply_adds.values())


@pytest.mark.parametrize("case", dict.fromkeys([*TINY, *(run.case for run in cases.full())]), ids=lambda case: case.label)
def test_flops_of_a_case_are_those_of_the_plan(case):
    q = np.broadcast_to(np.zeros((), case.dtype), (case.B, case.H, case.Lq, case.D))
    k = np.broadcast_to(np.zeros((), case.dtype), (case.B, case.Hkv, case.Lk, case.D))
    assert fastmha.plan(q, k, k, **case.keywords).flops == case.flops("forward")
    assert fastmha.plan(q, k, k, **case.keywords, backward=True).flops == case.flops("forward+backward")


@tiny
def test_bytes_of_a_case_are_those_of_its_arrays(case):
    o = heads.Operands(case)
    keys, queries = o.k.nbytes + o.v.nbytes, o.q.nbytes
    assert case.packed_bytes("forward") == keys
    assert case.packed_bytes("backward") == keys + queries + o.grad_out.nbytes
    assert case.operand_bytes("forward") == queries + keys + o.out.nbytes + o.lse.nbytes
    assert case.operand_bytes("backward") == 2 * (queries + keys) + o.grad_out.nbytes + o.lse.nbytes


def test_labels_name_one_case_each():
    assert Case(1, 16, 4, 512, 1024, 64, causal=True, dtype="float64").name == "B1 H16/4 L512x1024 D64 causal f64 tiled"
    assert Case(1, 2, 2, 8, 8, 4, algorithm="blas", row=4096).name == "B1 H2 L8 D4 row4096 f32 blas"
    several = {run.case for run in cases.full()}
    assert len({case.name for case in several}) == len(several)


def test_the_quick_study_of_heads_is_part_of_the_full_one():
    assert cases.full()[:len(cases.quick())] == cases.quick()


# ------------------------------------------------------------------------------------------------ heads

@tiny
def test_operands_lie_as_a_fused_projection_writes_them(case):
    o = heads.Operands(case)
    assert {x.strides[2] for x in (o.k, o.v, o.grad_k, o.grad_v)} == {case.row_bytes}
    assert case.Lq != case.Lk or o.q.strides[2] == case.row_bytes
    for x in (o.q, o.k, o.v, o.out, o.grad_out):
        assert x.strides[1:] == (case.D * case.itemsize, x.strides[2], case.itemsize)
        assert x.dtype == case.dtype


@tiny
def test_arms_give_the_answers_of_the_public_functions(case):
    o = heads.Operands(case)
    out, lse = fastmha.attention(o.q, o.k, o.v, return_lse=True, **case.keywords)
    grads = fastmha.attention_backward(o.grad_out, o.q, o.k, o.v, out, lse, **case.keywords)
    expected = {"out": out, "lse": lse, **dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True))}
    for direction in DIRECTIONS:
        for arm in ("strided", "contiguous", "packed"):
            for array in o.results(direction).values():
                array[...] = np.nan
            heads.arms(o, direction, 2)[arm]()
            for name, got in o.results(direction).items():
                np.testing.assert_allclose(got, expected[name], rtol=1e-5, atol=1e-5, err_msg=f"{arm} {name}")


@directions
def test_the_pack_arm_copies_the_bytes_that_the_case_states(direction, monkeypatch):
    case, copied, pack_heads = TINY[2], [], _core.pack_heads

    def counted(x, out, threads):
        copied.append(x.nbytes)
        pack_heads(x, out, threads)

    functions = heads.arms(heads.Operands(case), direction, 1)
    monkeypatch.setattr(_core, "pack_heads", counted)
    functions["pack"]()
    assert sum(copied) == case.packed_bytes(direction)


@pytest.mark.parametrize(("direction", "wrong"), [("forward", "out"), ("forward", "lse"), ("backward", "grad_k")])
@pytest.mark.parametrize("value", [1.0, np.nan])
@pytest.mark.parametrize("arm", ["contiguous", "packed"])
def test_arms_that_disagree_are_not_timed(direction, wrong, value, arm, monkeypatch):
    real = heads.arms

    def spoiled(operands, direction, threads):
        functions = real(operands, direction, threads)
        right = functions[arm]

        def spoil():
            right()
            operands.results(direction)[wrong].flat[0] += value

        return {**functions, arm: spoil}

    monkeypatch.setattr(heads, "arms", spoiled)
    monkeypatch.setattr(trial, "interleave", lambda *a: pytest.fail("timed"))
    message = f"B2 H3 L5 D4 f32 tiled {direction}: {wrong} of the arms strided and {arm} differ by "
    with pytest.raises(trial.ArmsDisagreeError, match=message):
        heads.trial(Run(TINY[0], direction), 1, 0.0).record()


@directions
def test_a_record_of_heads_says_what_was_varied_and_what_was_found(direction):
    case = TINY[1]
    planned = heads.trial(Run(case, direction), 2, 0.0)
    record = planned.record()
    assert json.loads(json.dumps(record)) == record
    assert (record["question"], record["label"]) == ("heads", f"{case.name} {direction} 2T")
    assert record["factors"] == {**asdict(case), "direction": direction, "threads": 2, "cold": False}
    assert record["flops"] == case.flops(direction) == planned.flops / 3
    assert record["packed_bytes"] == case.packed_bytes(direction)
    assert set(record["arms"]) == set(heads.ARMS)


# ------------------------------------------------------------------------------------------------ trial

def test_rounds_run_every_arm_once_in_turning_order():
    called = []
    functions = {name: (lambda name=name: called.append(name)) for name in "abc"}
    times = trial.interleave(functions, 0.0, lambda: called.append("-"))
    assert "".join(called) == "-a-b-c-b-c-a-c-a-b-a-b-c-b-c-a"
    assert [len(values) for values in times.values()] == [trial.LEAST_ROUNDS] * 3


def test_rounds_end_when_the_time_is_used_up_or_there_are_enough(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(clock))
    assert trial.LEAST_ROUNDS < len(trial.interleave({"a": lambda: None}, 30)["a"]) < 30     # two looks a round
    assert len(trial.interleave({"a": lambda: None}, 10**6)["a"]) == trial.MOST_ROUNDS


def test_a_timed_trial_keeps_best_median_and_the_ratio_within_rounds(monkeypatch):
    times = {"a": np.array([4.0, 2.0, 9.0]), "b": np.array([2.0, 2.0, 3.0])}
    monkeypatch.setattr(trial, "interleave", lambda arms, seconds, before, most: times)
    called = []
    arms = {name: (lambda name=name: called.append(name)) for name in "ab"}
    found = trial.timed(lambda: arms, [("a", "b")], flops=7)(0.0)
    assert called == ["a", "b"]         # each once before the clock starts
    assert (found["rounds"], found["flops"]) == (3, 7)
    assert (found["arms"]["a"]["best"], found["arms"]["a"]["median"]) == (2.0, 4.0)
    ratio = found["ratios"]["a/b"]      # of 2, 1, 3
    assert (ratio["low"], ratio["median"], ratio["high"]) == (1.0, 2.0, 3.0)


def test_a_trial_of_several_places_prepares_anew_while_there_is_time(monkeypatch):
    prepared = []

    def prepare():
        prepared.append(None)
        return {"a": lambda: None}

    found = trial.timed(prepare, [], places=4)(1.0)
    assert (len(prepared), found["places"], found["rounds"]) == (4, 4, trial.MOST_ROUNDS)
    clock = iter(range(10**6))
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(clock))
    assert trial.timed(prepare, [], places=4)(1.0)["places"] == 1


def test_an_interval_holds_what_differs_from_place_to_place():
    generator = np.random.default_rng(0)
    noise = 1e-3 * generator.standard_normal((5, 50))
    apart = np.array([[0.9], [0.95], [1.0], [1.05], [1.1]]) + noise
    together = trial.interval(apart.ravel() - np.repeat([-0.1, -0.05, 0, 0.05, 0.1], 50))
    between = trial.interval(apart)
    assert together["high"] - together["low"] < 0.002
    assert between["low"] < 0.96
    assert between["high"] > 1.04
    assert trial.interval(noise[0]) == trial.interval(noise[:1])


def test_operands_at_another_place_hold_the_same_numbers():
    addresses = set()
    for place in (None, 0, 1, 2):
        o = heads.Operands(TINY[0], 1, place)
        addresses.add(o.k.ctypes.data % 4096)
        for name in ("q", "k", "v", "grad_out", "lse"):
            np.testing.assert_array_equal(getattr(o, name), getattr(heads.Operands(TINY[0]), name))
    assert len(addresses) >= 3


@pytest.mark.parametrize("cold", [False, True])
def test_caches_are_emptied_before_each_call_of_a_cold_trial_only(cold, monkeypatch):
    called = []
    monkeypatch.setattr(trial, "flush", lambda: called.append("flush"))
    trial.timed(lambda: {"a": lambda: called.append("a")}, [], cold=cold)(0.0)
    assert called == ["a", *["flush", "a"] * trial.LEAST_ROUNDS] if cold else ["a"] * (trial.LEAST_ROUNDS + 1)


def test_emptying_the_caches_writes_more_than_the_last_of_them_holds(monkeypatch):
    monkeypatch.setattr(trial, "_large", [])
    monkeypatch.setattr(machine, "last_level_bytes", lambda: 40 << 20)
    trial.flush()
    trial.flush()
    (buffer,) = trial._large
    assert buffer.nbytes == 80 << 20
    assert buffer.min() == buffer.max() == 2


def test_an_interval_holds_the_true_median_about_as_often_as_it_says(rng):
    intervals = [trial.interval(rng.standard_normal(60)) for _ in range(150)]
    assert all(i["low"] <= i["median"] <= i["high"] for i in intervals)
    assert 0.85 <= np.mean([i["low"] <= 0 <= i["high"] for i in intervals]) <= 1
    assert np.median([i["high"] - i["low"] for i in intervals]) < 1


def test_an_interval_of_the_same_values_is_the_same(rng):
    values = rng.standard_normal(30)
    assert trial.interval(values) == trial.interval(values.copy())
    assert trial.interval(np.full(5, 3.0)) == {"median": 3.0, "low": 3.0, "high": 3.0}


@pytest.mark.parametrize(("low", "high", "expected"), [(0.9, 1.1, False), (1.0, 1.1, False), (1.01, 1.1, True), (0.8, 0.9, True)])
def test_arms_differ_where_the_interval_leaves_out_1(low, high, expected):
    assert trial.differs({"low": low, "high": high, "median": 1.0}) is expected


def test_answers_may_differ_by_the_tolerance_of_their_largest_element():
    base = np.array([100.0, 1.0])
    trial.agree("x", {"a": {"out": base}, "b": {"out": base + np.array([0, 0.9])}}, 0.01)
    with pytest.raises(trial.ArmsDisagreeError, match=r"x: out of the arms a and b differ by 1\.1e\+00, more than 1\.0e\+00"):
        trial.agree("x", {"a": {"out": base}, "b": {"out": base + np.array([0, 1.1])}}, 0.01)
    trial.agree("x", {"a": {"out": base[:0]}, "b": {"out": base[:0]}}, 0.01)


# ------------------------------------------------------------------------------------------------ machine

def test_the_machine_is_described_in_plain_values():
    about = machine.describe(3, "fastmha study --quick")
    assert json.loads(json.dumps(about)) == about
    assert (about["command"], about["threads"]) == ("fastmha study --quick", 3)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", about["date"])
    assert about["machine"]["cpu"]
    assert about["machine"]["cpus_usable"] >= 1
    assert about["versions"]["fastmha"] == fastmha.__version__
    assert {"python", "numpy", "scipy"} < about["versions"].keys()
    assert about["kernels"]["vector_bytes"] in (16, 32, 64)


def test_caches_that_the_system_tells_have_names_and_bytes():
    found = machine.caches()
    assert all(re.fullmatch(r"L1d|L[2-9]", name) and size >= 1024 for name, size in found.items())
    assert machine.last_level_bytes() == max(found.values(), default=0)


def test_limits_are_operations_and_bytes_over_the_best_time(monkeypatch):
    monkeypatch.setattr(machine, "last_level_bytes", lambda: 0)
    called = []
    monkeypatch.setattr(machine, "_best", lambda function, seconds: called.append(function()) or 2.0)
    assert machine.limits(2) == {"float32": 768.0**3, "float64": 768.0**3, "read": 64 << 20}
    assert len(called) == 5     # products of the kernels and of BLAS in two dtypes, and the reading


def test_the_best_time_is_the_least_after_a_first_call(monkeypatch):
    ticks = iter([0.0, 0.0, 1.0, 4.0, 4.0, 5.0, 7.0, 50.0])     # the first; then for each round: look, start, stop
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks))
    called = []
    assert machine._best(lambda: called.append(0), 45.0) == 2.0
    assert len(called) == 3


# ------------------------------------------------------------------------------------------------ questions

@pytest.mark.parametrize("question", questions.ALL, ids=lambda question: question.name)
def test_a_question_has_its_texts_and_trials_with_a_label_each(question):
    assert question.title
    assert question.question.endswith("?")
    assert set(question.needs) <= set(questions.NAMES)
    for quick in (True, False):
        trials = [t for t in questions.trials([question], quick, 2) if t.question == question.name]
        assert len({t.label for t in trials}) == len(trials)
        for t in trials:
            assert json.loads(json.dumps(t.factors)) == t.factors


@pytest.mark.parametrize("question", questions.ALL, ids=lambda question: question.name)
def test_a_question_without_records_has_no_answer(question):
    about = {**machine.describe(1, "fastmha study"), "quick": True}
    assert question.answered({**about, "limits": {"float32": 2e9, "float64": 1e9, "read": 1e9}, "records": []}) is None


def test_all_questions_have_names_of_their_own():
    assert len(set(questions.NAMES)) == len(questions.ALL)
    assert questions.chosen([]) == list(questions.ALL)
    assert questions.chosen(["heads"]) == [heads.QUESTION]


def test_the_quick_study_is_planned_for_less_than_its_limit():
    assert sum(t.seconds for t in questions.trials(questions.ALL, True, 2)) < pace.QUICK_LIMIT < 120


# ------------------------------------------------------------------------------------------------ the store

ABOUT = {"command": "fastmha study", "date": "2025-01-02T03:04:05+00:00", "quick": True, "threads": 2,
         "machine": {"cpu": "A CPU", "cpus_usable": 2, "caches": {"L1d": 49152, "L3": 32 << 20}, "system": "Linux",
                     "architecture": "x86_64"},
         "versions": {"fastmha": "1.0", "python": "3.11"}, "kernels": {"isa": "avx2", "vector_bytes": 32}}
LIMITS = {"float32": 200e9, "float64": 100e9, "read": 20e9}
FOUND = {**ABOUT, "limits": LIMITS, "records": []}


class Measurements:
    """Trials of the question "fake" that note what was called; `fail` maps a label to what to raise."""

    def __init__(self, labels="abc"):
        self.called, self.fail = [], {}
        self.trials = [Trial("fake", label, {"µ": label}, self.measure(label), 1.0, 10**12) for label in labels]

    def measure(self, label):
        def measure(seconds):
            self.called.append(label)
            if label in self.fail:
                raise self.fail[label]
            return {"seconds": seconds, "value": f"of {label}"}

        return measure


@pytest.fixture
def measurements(monkeypatch):
    monkeypatch.setattr(machine, "limits", lambda threads: dict(LIMITS))
    monkeypatch.setattr(pace, "calibrated", lambda *a: {"process": 1.0, "picture": 0.5})
    return Measurements()


def test_results_hold_the_records_in_the_order_of_their_trials(measurements, tmp_path):
    store = runner.Store(tmp_path, ABOUT)
    runner.run(measurements.trials[::-1], store)
    found = store.finish(measurements.trials)
    assert measurements.called == ["c", "b", "a"]
    assert [r["label"] for r in found["records"]] == ["a", "b", "c"]
    assert found["records"][0] == {"question": "fake", "label": "a", "factors": {"µ": "a"}, "seconds": 1.0, "value": "of a"}
    assert (found["limits"], found["quick"], found["threads"]) == (LIMITS, True, 2)
    assert runner.read(tmp_path / "results.json") == found
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_results_have_a_line_a_record(measurements, tmp_path):
    store = runner.Store(tmp_path, ABOUT)
    runner.run(measurements.trials, store)
    store.finish(measurements.trials)
    lines = (tmp_path / "results.json").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line.strip().rstrip(","))["label"] for line in lines if '"label"' in line] == ["a", "b", "c"]


def test_results_without_records_are_json_too(tmp_path):
    found = runner.Store(tmp_path, ABOUT).finish([])
    assert found["records"] == []
    assert runner.read(tmp_path / "results.json") == found


def test_results_of_another_format_are_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=f"format 1, this version reads {runner.FORMAT}"):
        runner.read(tmp_path / "results.json")


def test_a_record_is_on_disk_before_the_next_is_measured(measurements, tmp_path):
    store, seen = runner.Store(tmp_path, ABOUT), []
    runner.run(measurements.trials, store,
               lambda t, done: seen.append((t and t.label, done, len(store.path.read_text().splitlines()))))
    assert seen == [("a", 0.0, 2), ("b", 1.0, 3), ("c", 2.0, 4), (None, 3.0, 5)]      # a line for the head, one for limits


@pytest.mark.parametrize("reason", [KeyboardInterrupt, MemoryError, trial.ArmsDisagreeError])
def test_an_interrupted_study_goes_on_with_what_is_left(reason, measurements, tmp_path, monkeypatch):
    measurements.fail["b"] = reason()
    with pytest.raises(reason):
        runner.run(measurements.trials, runner.Store(tmp_path, ABOUT))
    assert not (tmp_path / "results.json").exists()
    measurements.fail.clear()
    monkeypatch.setattr(machine, "limits", lambda threads: pytest.fail("measured again"))
    store = runner.Store(tmp_path, {**ABOUT, "command": "fastmha study --out x", "date": "later"})
    runner.run(measurements.trials, store)
    assert measurements.called == ["a", "b", "b", "c"]
    assert [r["label"] for r in store.finish(measurements.trials)["records"]] == ["a", "b", "c"]


@pytest.mark.parametrize("cut", [1, 2, 10, 60])
def test_a_last_line_cut_by_a_kill_is_measured_again(cut, measurements, tmp_path):
    store = runner.Store(tmp_path, ABOUT)
    runner.run(measurements.trials, store)
    whole = store.path.read_bytes()
    assert len(whole.splitlines()[-1]) > 60
    store.path.write_bytes(whole[:-cut])
    again = runner.Store(tmp_path, ABOUT)
    assert [label for _, label in again.records] == ["a", "b"]
    runner.run(measurements.trials, again)
    assert measurements.called == ["a", "b", "c", "c"]
    assert store.path.read_bytes() == whole
    assert [r["label"] for r in again.finish(measurements.trials)["records"]] == ["a", "b", "c"]


def test_a_head_cut_by_a_kill_starts_afresh(measurements, tmp_path):
    store = runner.Store(tmp_path, ABOUT)
    head = store.path.read_bytes()
    store.path.write_bytes(head[:20])
    assert runner.Store(tmp_path, ABOUT).records == {}
    assert store.path.read_bytes() == head


@pytest.mark.parametrize(("name", "value"), [("threads", 1), ("quick", False), ("kernels", {}), ("versions", {}),
                                             ("machine", {})])
def test_a_part_of_another_study_is_refused_and_kept(name, value, measurements, tmp_path):
    store = runner.Store(tmp_path, ABOUT)
    runner.run(measurements.trials, store)
    before = store.path.read_bytes()
    with pytest.raises(runner.OtherStudyError, match=name):
        runner.Store(tmp_path, {**ABOUT, name: value})
    assert store.path.read_bytes() == before


# ------------------------------------------------------------------------------------------------ pictures

LONG = "B1 H16/4 L512x1024 D64 causal row12288 f32 tiled"
ARMS = ("strided", "contiguous, packing included", "packed before the clock starts")


def label(row):
    return f"{LONG if row % 3 == 0 else LONG[:22]} {row}"


def heat(panels, rows, missing=True):
    columns = [str(64 << i) for i in range(7)]
    value = [[[None if missing and (p + r + c) % 9 == 4 else 0.6 * 1.12 ** ((5 * p + 3 * r + c) % 9) for c in range(7)]
              for r in range(rows)] for p in range(panels)]
    return {"title": "Strided over contiguous", "x": "length L (rows)", "y": "case",
            "shade": "time strided / time contiguous (no unit)",
            "panels": [{"title": f"tiled, part {p}", "columns": columns, "rows": [str(64 * r) for r in range(rows)],
                        "values": value[p], "texts": [["" if v is None else f"= {v:.2f}" for v in row] for row in value[p]]}
                       for p in range(panels)]}


def stacked(panels, rows):
    return {"title": "Where the time goes", "x": "time (ms)", "reference": 1.0 if panels > 1 else None,
            "bars": [{"label": ARMS[r % 2], "group": label(r // 2),
                      "low": 0.9 + r % 3, "high": 1.1 + r % 3,
                      "parts": [{"name": name, "value": 0.1 + 0.3 * ((r + i) % 3)} for i, name in enumerate(ARMS)]}
                     for r in range(rows)]}


def side(panels, rows):
    return {"title": "Strided over contiguous", "x": "time / time of strided (no unit; median of the ratios)", "reference": 1.0,
            "panels": [{"title": f"part {p}", "rows": [
                {"label": label(r), "values": [{"name": name, "value": (v := 0.5 + 0.1 * ((p + r + 3 * i) % 11)), "low": 0.95 * v,
                                                "high": 1.05 * v} for i, name in enumerate(ARMS[:1 + panels % 3])]}
                for r in range(rows)]} for p in range(panels)]}


def curves(panels, rows):
    xs = [3072 + 640 * i for i in range(rows)] if rows > 8 else [512 << i for i in range(rows)]
    return {"title": "Time over the stride", "x": "bytes from one row to the next (bytes)", "y": "time / time packed (no unit)",
            "x_log2": True, "y_log": panels > 1,
            "panels": [{"title": f"part {p}", "reference": 1.0,
                        "marks": [(xs[0], "3072"), (xs[-1], "equal at 1536")],
                        "series": [{"name": name, "x": xs, "y": (y := [1 + 0.3 * ((i + j) % 4) for j in range(rows)]),
                                    "low": [0.9 * v for v in y], "high": [1.2 * v for v in y]} for i, name in enumerate(ARMS)]}
                       for p in range(panels)]}


def roofs(panels, rows):
    return {"title": "Speed against the roofs",
            "points": [{"group": f"{ARMS[p % 3]} {p}", "dtype": dtype, "intensity": 0.5 * 1.3**r, "rate": 1e9 * (p + 1) * (r + 1)}
                       for p in range(panels) for r in range(rows) for dtype in ("float32", "float64")]}


KINDS = {"heat_maps": heat, "stacked_bars": stacked, "bars": side, "lines": curves, "roofline": roofs}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """Draws a kind of picture; returns its figure, drawn, and the path of its PNG."""
    plots = pytest.importorskip("fastmha.study.plots", reason='needs matplotlib: pip install "fastmha[study]"',
                                exc_type=ImportError)
    figures, Figure = [], plots.Figure
    monkeypatch.setattr(plots, "Figure", lambda *a, **more: figures.append(Figure(*a, **more)) or figures[-1])

    def draw(kind, data, found=FOUND):
        path = tmp_path / "picture.png"
        getattr(plots, kind)(path, found, **data)
        return figures[-1], path

    return draw


def texts(figure):
    """The texts that are seen."""
    panels = [*figure.axes, *(child for axes in figure.axes for child in axes.child_axes)]
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in panels:
        found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            found += [tick.label1 if tick.label1.get_visible() else tick.label2 for tick in axis.get_major_ticks()
                      if low <= tick.get_loc() <= high]
    return [text for text in found if text.get_visible() and text.get_text()]


@needs_extra
@pytest.mark.parametrize(("panels", "rows"), [(1, 3), (4, 3), (1, 40), (2, 7)])
@kinds
def test_texts_of_a_picture_lie_within_it_and_not_on_each_other(kind, panels, rows, draw):
    title = "Where it goes, for each of the shapes that were measured here and in each of both directions, one after another"
    found = {**FOUND, "command": f"fastmha study --quick --threads 2 --out {'/a/folder/that/lies/deep' * 8}",
             "machine": {**FOUND["machine"], "cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"}}
    figure, _ = draw(kind, {**KINDS[kind](panels, rows), "title": title}, found)
    renderer = figure.canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(figure)
             if text.get_rotation() in (0, 90)]       # the box of an inclined one is larger than it
    assert len(boxes) > 8
    width, height = figure.canvas.get_width_height()
    for name, box in boxes:
        assert box.x0 >= -1, name
        assert box.y0 >= -1, name
        assert box.x1 <= width + 1, name
        assert box.y1 <= height + 1, name
    for at, (name, box) in enumerate(boxes):
        for other, beside in boxes[at + 1:]:
            x = min(box.x1, beside.x1) - max(box.x0, beside.x0)
            y = min(box.y1, beside.y1) - max(box.y0, beside.y0)
            assert min(x, y) <= 2, f"{name!r} and {other!r} overlap by {x:.0f} x {y:.0f} pixels"


@needs_extra
@kinds
def test_a_picture_is_a_png_of_readable_size_and_heat_maps_alone_have_colours(kind, draw):
    from matplotlib.image import imread

    figure, path = draw(kind, KINDS[kind](2, 3))
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = imread(path)[..., :3]
    assert (np.ptp(pixels, axis=-1).max() > 0) == (kind == "heat_maps")
    assert pixels.shape[1::-1] == figure.canvas.get_width_height()
    assert 800 <= pixels.shape[1] <= 1300


@needs_extra
@pytest.mark.parametrize("kind", ["heat_maps", "stacked_bars", "bars"])
def test_a_picture_grows_with_its_rows(kind, draw):
    small, _ = draw(kind, KINDS[kind](1, 3))
    large, _ = draw(kind, KINDS[kind](1, 40))
    assert large.get_size_inches()[1] > small.get_size_inches()[1] + 30 * 0.25


@needs_extra
@kinds
def test_the_footer_says_how_and_where_it_was_measured(kind, draw):
    figure, _ = draw(kind, KINDS[kind](1, 3), {**FOUND, "command": "fastmha study --out $HOME/$x"})
    said = " ".join(text.get_text() for text in figure.texts).replace(r"\$", "$")
    for part in ("fastmha study --out $HOME/$x", "A CPU", "2 threads", "avx2", "fastmha 1.0", "2025-01-02"):
        assert part in said


@needs_extra
@kinds
def test_axes_name_units(kind, draw):
    figure, _ = draw(kind, KINDS[kind](2, 3))
    named = [text.replace("\n", " ") for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel()) if text]
    assert named
    for text in named:
        assert re.search(r"\(.*\)", text) or text == "case"


@needs_extra
@pytest.mark.parametrize("missing", [True, False])
def test_cells_that_were_not_measured_are_hatched_and_the_legend_says_so(missing, draw):
    data = heat(2, 3, missing)
    figure, _ = draw("heat_maps", data)
    hatched = [patch for axes in figure.axes for patch in axes.patches if patch.get_hatch()]
    assert len(hatched) == sum(v is None for p in data["panels"] for row in p["values"] for v in row)
    assert bool(hatched) is missing
    said = [t.get_text() for legend in figure.legends for t in legend.get_texts()]
    assert said == ["between values below 1.00 and others", *["not measured"] * missing]


@needs_extra
def test_texts_of_cells_have_contrast_and_shades_part_at_the_centre_with_and_without_colours(draw):
    figure, _ = draw("heat_maps", heat(1, 7, missing=False))
    axes = figure.axes[0]
    (image,) = axes.get_images()
    shades = []
    for text in axes.texts:
        column, row = map(int, text.get_position())
        colour = image.cmap(image.norm(image.get_array()[row, column]))
        light, dark = sorted([luminance(colour), {"white": 1.0, "black": 0.0}[text.get_color()]], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
        shades.append((float(text.get_text().split()[1]), *colour[:3], luminance(colour)))
    below, above = ([shade for shade in sorted(shades) if (shade[0] < 1) == side] for side in (True, False))
    assert all(blue > red for _, red, _, blue, _ in below)
    assert all(red > blue for _, red, _, blue, _ in above)
    assert [s[-1] for s in below] == sorted(s[-1] for s in below)               # from dark to pale, and on to a middle grey
    assert [s[-1] for s in above] == sorted((s[-1] for s in above), reverse=True)
    assert above[-1][-1] - below[0][-1] > 0.25


@needs_extra
def test_a_line_runs_between_cells_on_either_side_of_the_centre(draw):
    values = [[0.9, 1.0, None], [0.8, 0.95, 0.9]]
    panel = {"title": "t", "columns": list("abc"), "rows": list("de"), "values": values,
             "texts": [[str(v or "") for v in row] for row in values]}
    figure, _ = draw("heat_maps", {**heat(1, 1), "panels": [panel]})
    edges = {(*line.get_xdata(), *line.get_ydata()) for line in figure.axes[0].lines}
    assert edges == {(0.5, 0.5, -0.5, 0.5), (0.5, 1.5, 0.5, 0.5)}


def luminance(colour):
    """As the contrast of the Web Content Accessibility Guidelines takes it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


@needs_extra
@pytest.mark.parametrize(("ratios", "full"), [([0.9, 1.2, np.nan], 1.2), ([0.9, 1.1], 1 / 0.9), ([1.001], 1.1), ([0.3, 1], 1.25)])
def test_shades_are_full_at_the_ratio_farthest_from_1_but_noise_stays_pale_and_one_far_off_leaves_some(ratios, full):
    from fastmha.study import plots

    assert np.exp(plots._span(np.array(ratios))) == pytest.approx(full)


@needs_extra
def test_fills_and_strokes_are_told_apart_without_colours():
    from fastmha.study import plots

    assert len({(fill["facecolor"], fill["hatch"]) for fill in plots.FILLS}) == len(plots.FILLS) >= 10
    assert len({stroke["marker"] for stroke in plots.STROKES}) == len(plots.STROKES) >= 8
    assert len({stroke["linestyle"] for stroke in plots.STROKES[:3]}) == 3


def look(handle):
    """What a swatch of a legend looks like."""
    from matplotlib.lines import Line2D

    if isinstance(handle, Line2D):
        fill = handle.get_fillstyle(), str(handle.get_markerfacecolor())
        return handle.get_color(), str(handle._unscaled_dash_pattern), str(handle.get_marker()), *fill
    return handle.get_facecolor(), handle.get_hatch()


@needs_extra
def test_no_two_swatches_of_the_documents_pictures_are_alike_and_every_name_is_there(monkeypatch):
    from fastmha.study import plots

    found = runner.read(report.Path(__file__).parents[2] / "docs" / "layouts" / "results.json")
    pictures = [p for q in questions.ALL for p in q.answered(found).pictures]
    kept = {}
    monkeypatch.setattr(plots, "_save", lambda figure, path, found, title, handles: kept.update({path: (figure, handles)}))
    for picture in pictures:
        getattr(plots, picture.kind)(picture.name, found, **picture.data)
    assert len(kept) == len(pictures) > 15
    for picture in pictures:
        _, handles = kept[picture.name]
        looks = [look(handle) for handle in handles]
        assert len(set(looks)) == len(looks), picture.name
        said = {handle.get_label().replace("\n", " ") for handle in handles}
        for bar in picture.data.get("bars", ()):
            assert {part["name"] for part in bar["parts"]} <= said
        for panel in picture.data.get("panels", ()):
            assert {series["name"] for series in panel.get("series", ())} <= said
            if picture.kind == "lines" and "reference" in panel:
                assert panel.get("reference_name", "reference 1") in said, picture.name


@needs_extra
def test_a_horizontal_line_is_named_in_the_legend(draw):
    data = curves(2, 3)
    data["panels"][1].update(reference=2.5, reference_name="half of it")
    figure, _ = draw("lines", data)
    assert [t.get_text() for legend in figure.legends for t in legend.get_texts()] == [*ARMS, "reference 1", "half of it"]


@needs_extra
@pytest.mark.parametrize("log", [False, True])
def test_whiskers_that_would_lie_on_each_other_stand_beside_each_other_near_their_place(log, draw):
    xs = [1024, 2048, 4096]
    series = [{"name": name, "x": xs, "y": (y := [1 + 0.01 * i] * 3), "low": [v - 0.1 for v in y], "high": [v + 0.1 for v in y]}
              for i, name in enumerate("abc")]
    without = {"name": "without", "x": xs, "y": [1.0] * 3}
    alone = {**series[0], "name": "alone", "x": [1500], **{key: [1.0] for key in ("y", "low", "high")}}
    panel = {"title": "t", "series": [*series, without, alone]}
    figure, _ = draw("lines", {**curves(1, 3), "panels": [panel], "x_log2": log, "y_log": False})
    axes = figure.axes[0]
    places = [line.get_xdata() for line, *_ in axes.containers]
    pixels = [axes.transData.transform(np.stack((x, np.ones(len(x))), axis=1))[:, 0] / figure.dpi for x in places]
    true = axes.transData.transform(np.stack((xs, np.ones(3)), axis=1))[:, 0] / figure.dpi
    for at in range(3):
        a, b, c = (pixels[i][at] for i in range(3))
        assert 0.03 < b - a < 0.1
        assert 0.03 < c - b < 0.1
        assert b == pytest.approx(true[at], abs=1e-6)
    assert places[3].tolist() == pytest.approx(xs)
    assert places[4].tolist() == pytest.approx([1500])


@needs_extra
def test_points_stay_at_their_place_where_no_whisker_hides_another(draw):
    xs = [512, 1024]
    series = [{"name": str(y), "x": xs, "y": [y] * 2, "low": [y - 0.1] * 2, "high": [y + 0.1] * 2} for y in (1.0, 2.0, 3.0)]
    figure, _ = draw("lines", {**curves(1, 3), "panels": [{"title": "t", "series": series}]})
    assert [line.get_xdata().tolist() for line, *_ in figure.axes[0].containers] == [xs] * 3


@needs_extra
def test_panels_have_one_scale_where_they_are_to_be_compared(draw):
    data = curves(2, 3)
    data["panels"][1]["series"] = [{"name": "high", "x": [512, 1024], "y": [50.0, 60.0]}]
    limits = {same: [axes.get_ylim() for axes in draw("lines", {**data, "same_y": same})[0].axes[:2]] for same in (True, False)}
    assert limits[True][0] == limits[True][1]
    assert limits[False][0] != limits[False][1]


@needs_extra
def test_bars_start_at_the_reference_and_whiskers_span_the_interval(draw):
    figure, _ = draw("bars", side(1, 3))
    axes = figure.axes[0]
    data = [bar for row in side(1, 3)["panels"][0]["rows"] for bar in row["values"]]
    assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches] == [
        pytest.approx((1.0, bar["value"])) for bar in data]
    whiskers = {tuple(line.get_xdata()) for line in axes.lines}
    assert {(bar["low"], bar["high"]) for bar in data} <= whiskers


@needs_extra
def test_parts_of_a_bar_follow_one_another_those_below_0_to_the_left(draw):
    parts = [{"name": "a", "value": 2.0}, {"name": "b", "value": -1.0}, {"name": "c", "value": 3.0}]
    figure, _ = draw("stacked_bars", {"title": "t", "x": "ms (ms)", "bars": [{"group": "g", "label": "bar", "parts": parts}]})
    axes = figure.axes[0]
    assert [(p.get_x(), p.get_x() + p.get_width()) for p in axes.patches] == [(0.0, 2.0), (0.0, -1.0), (2.0, 5.0)]
    assert [text.get_text() for text in axes.texts] == ["4.00"]


@needs_extra
def test_roofs_are_the_limits_of_the_machine(draw):
    figure, _ = draw("roofline", roofs(1, 3))
    axes = figure.axes[0]
    lines = [(line.get_xdata(), line.get_ydata()) for line in axes.lines]
    assert {200.0, 100.0} <= {y[0] for x, y in lines if len(y) == 2 and y[0] == y[1]}
    (x, y), = [(x, y) for x, y in lines if len(y) == 2 and y[0] != y[1]]
    assert np.array(y) / np.array(x) == pytest.approx(20.0)     # GB/s
    assert x[1] == pytest.approx(10.0)                          # FLOP/byte where the two meet
    said = {text.get_text() for text in axes.texts}
    assert said == {"fastest float32 product: 200 GFLOP/s", "fastest float64 product: 100 GFLOP/s", "read from memory: 20.0 GB/s"}


# ------------------------------------------------------------------------------------------------ report

HARD = 'a|b <i>1 & 2</i> "q" x_y _z_ 2*3*4'
SOME = Table("Ratios", ["case", "GFLOP/s strided", "strided / contiguous", "faster"],
             [[LONG, "123.4", "= 1.00 ±0.02", "neither"], [HARD, "1,234", "0.93 ±0.02", "strided | not"], ["x", "–", "", ""]],
             "GFLOP/s at the median time.")
WIDE = Table("Many columns", ["case", *(f"with {n} threads" for n in range(14))],
             [[LONG, *(f"{100.25 + n} ±0.1" for n in range(14))] for _ in range(2)])


def question(answer, name="fake", trials=()):
    """A question whose answer, with its pictures, is the same or what a function makes of all results, whatever was measured."""
    class Fake(Question):
        def answered(self, found):
            return answer(found) if callable(answer) else answer

    return Fake(name, f"Title of {name}", f"Is it so, {name} & <all>?", lambda quick, threads: list(trials), None)


def full_answer(kinds=tuple(KINDS)):
    pictures = [Picture(f"{kind}_picture", f"Caption of {kind}: {HARD}", kind, KINDS[kind](1, 3)) for kind in kinds]
    return Answer(f"Short: {HARD}", "Method one.\n\nMethod two.", "Limits <here>.", [SOME, WIDE], pictures)


class Page(HTMLParser):
    """Tags with attributes and the text of an HTML file; asserts that tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def of(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a report with every kind of picture, its HTML and what was returned."""
    if EXTRA:
        pytest.skip(f'{", ".join(EXTRA)} not installed: pip install "fastmha[study]"')
    folder = tmp_path_factory.mktemp("report")
    files = report.write(folder, FOUND, [question(full_answer()), question(None, "other")], None)
    return folder, Page((folder / "report.html").read_text(encoding="utf-8")), files


def test_a_report_is_pictures_html_and_markdown(written):
    folder, _, files = written
    assert files == {"Results": folder / "results.json", "Report": folder / "report.html", "Pictures": folder}
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["report.html", "report.md", *(f"{kind}_picture.png" for kind in KINDS)])


def test_the_html_report_refers_to_nothing_outside_itself(written):
    folder, page, _ = written
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "script", "iframe", "object", "base"})
    for _, attributes in page.tags:
        assert attributes.get("href", "#").startswith("#")
        assert attributes.get("src", "data:").startswith("data:image/png;base64,") or "src" not in attributes
        assert not attributes.keys() & {"srcset", "style", "action", "poster"}
    assert not re.search(r"url\(|@import|https?:", re.sub(r"base64,[^\"]*", "", text))
    drawn = [base64.b64decode(image["src"].partition(",")[2]) for image in page.of("img")]
    assert drawn == [(folder / f"{kind}_picture.png").read_bytes() for kind in KINDS]


def test_the_html_report_has_language_charset_title_and_texts_for_pictures(written):
    _, page, _ = written
    assert page.of("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in page.of("meta")
    assert len(page.of("title")) == len(page.of("h1")) == 1
    assert [image["alt"] for image in page.of("img")] == [make(1, 3)["title"] for make in KINDS.values()]
    assert {link["href"] for link in page.of("a")} == {f"#{s['id']}" for s in page.of("section")} == {"#fake", "#other"}


def test_the_html_report_shows_every_text_as_it_is(written):
    folder, page, _ = written
    for expected in ("Title of fake", "Is it so, fake & <all>?", f"Short: {HARD}", "Method one.", "Method two.", "Limits <here>.",
                     f"Caption of bars: {HARD}", "Ratios", "GFLOP/s at the median time.", "Title of other", "Not measured.",
                     *(cell for table in (SOME, WIDE) for row in table.rows for cell in row)):
        assert expected in page.text
    assert page.of("i") == []
    assert "@media print" in (folder / "report.html").read_text(encoding="utf-8")


def test_reports_say_where_and_how_was_measured(written):
    folder, page, _ = written
    for text in (page.text, (folder / "report.md").read_text(encoding="utf-8")):
        for expected in ("fastmha study", "2025-01-02T03:04:05", "A CPU", "2 usable", "L1d 48 KiB, L3 32 MiB", "2 threads, avx2",
                         "fastmha 1.0, python 3.11", "200 GFLOP/s in float32, 100 GFLOP/s in float64", "20 GB/s"):
            assert expected in text


@needs_extra
def test_reports_explain_names_of_cases_and_ratios_before_the_first_of_them(tmp_path):
    from rich.console import Console

    out = io.StringIO()
    found = {**FOUND, "left_out": [{"question": "fake", "label": LONG}]}
    report.write(tmp_path, found, [question(full_answer([]))], Console(file=out, width=2000))
    html, marked = ((tmp_path / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    for text in (Page(html).text, marked, out.getvalue()):
        explained = text.index("Cases are named by their shape: B batch rows, H heads (H16/4: 16 query heads")
        assert explained < text.index("Short: a|b")
        assert explained < text.index(LONG)
        assert "no difference was found" in text[explained:text.index(LONG)]


def test_numbers_stand_to_the_right(written):
    _, page, _ = written
    assert report.numbers(SOME) == [False, True, True, False]
    kinds = [cell.get("class") for cell in page.of("td")]
    assert kinds.count("n") == 3 * 2 + 2 * 14
    assert report.markdown_table(SOME).splitlines()[1] == "| --- | ---: | ---: | --- |"


def test_a_markdown_table_has_its_cells_whatever_they_hold():
    lines = report.markdown_table(SOME).splitlines()
    assert len(lines) == 2 + len(SOME.rows)
    for line in lines:
        assert len(re.split(r"(?<!\\)\|", line)) == len(SOME.columns) + 2
    assert lines[2] == f"| {LONG} | 123.4 | = 1.00 ±0.02 | neither |"
    assert lines[3].startswith(r'| a\|b &lt;i>1 &amp; 2&lt;/i> "q" x_y \_z\_ 2\*3\*4 | 1,234 |')


def test_the_markdown_report_holds_the_sentences_and_links_the_pictures_beside_it(written):
    folder, _, _ = written
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == ["Title of fake", "Title of other"]
    assert re.findall(r"^!\[[^\]]+\]\((.*)\)$", text, re.M) == [f"{kind}_picture.png" for kind in KINDS]
    for expected in (report.markdown_table(SOME), report.markdown_table(WIDE), "Method one.\n\nMethod two.", "Limits &lt;here>.",
                     "Not measured."):
        assert expected in text


@needs_extra
@pytest.mark.parametrize("width", [80, 60, 200])
def test_the_tables_fit_the_terminal_with_every_number_whole(width, tmp_path):
    from rich.console import Console

    out = io.StringIO()
    report.write(tmp_path, FOUND, [question(full_answer([])), question(None, "other")], Console(file=out, width=width))
    printed = out.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    for table in (SOME, WIDE):
        for row in table.rows:
            for number, cell in zip(report.numbers(table), row, strict=True):
                assert not number or cell in printed
    for expected in ("Title of fake", "Short: a|b <i>1 & 2</i>", "Ratios", SOME.note, "Title of other", "Not measured."):
        assert expected in printed


@needs_extra
def test_markup_in_texts_is_no_markup_of_the_terminal(tmp_path):
    from rich.console import Console

    out = io.StringIO()
    answer = Answer("[bold]short[/bold]", "m", "l", [Table("[red]t", ["[b]c"], [["[/]"]], "[i]n")])
    report.write(tmp_path, FOUND, [question(answer)], Console(file=out, width=80))
    for text in ("[bold]short[/bold]", "[red]t", "[b]c", "[/]", "[i]n"):
        assert text in out.getvalue()


@needs_extra
def test_an_answer_that_fails_is_not_swallowed(tmp_path):
    with pytest.raises(ZeroDivisionError):
        report.write(tmp_path, FOUND, [question(lambda found: 1 / 0)], None)


# ------------------------------------------------------------------------------------------------ the command

def test_version_is_printed(tmp_path):
    assert run_python("-m", "fastmha", "--version", tmp_path=tmp_path) == (0, f"fastmha {fastmha.__version__}\n", "")


def test_config_prints_what_show_config_does(capsys):
    fastmha.show_config()
    expected = capsys.readouterr().out
    assert main(["config"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("missing", [("rich",), ("matplotlib",), ("rich", "matplotlib")], ids="+".join)
def test_without_the_extra_one_sentence_names_it(missing, tmp_path):
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
    if EXTRA:       # what this environment lacks anyway
        missing = tuple(name for name in command.EXTRA if name in missing or name in EXTRA)
    code = f"{hide}; from fastmha.__main__ import main; sys.exit(main(['study', '--quick', '--out', 'made']))"
    status, out, error = run_python("-c", code, tmp_path=tmp_path)
    assert (status, out) == (2, "")
    assert error == f'fastmha study needs {" and ".join(missing)}: pip install "fastmha[study]"\n'
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["study", "--threads", "0"], ["study", "--threads", "many"]])
def test_wrong_arguments_end_with_usage_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: fastmha")


def test_a_question_that_there_is_not_is_told_those_that_there_are(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["study", "--only", "nothing"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "nothing" in error
    for name in questions.NAMES:
        assert name in error.splitlines()[-1]


@pytest.fixture
def study(measurements, monkeypatch, tmp_path):
    """Runs `fastmha study` with the questions "fake", whose measurements are counted, and "other"; in tmp_path/out."""
    first = question(lambda found: full_answer(["bars"]) if found["records"] else None, trials=measurements.trials)
    monkeypatch.setattr(questions, "ALL", (first, question(None, "other")))
    monkeypatch.setattr(questions, "NAMES", ("fake", "other"))
    monkeypatch.setenv("COLUMNS", "80")

    def run(*options, entry=lambda given: main(["study", *given])):
        return entry([*options, "--out", str(tmp_path / "out")])

    run.out = tmp_path / "out"
    return run


@needs_extra
@pytest.mark.parametrize("entry", [lambda given: main(["study", *given]), command.main], ids=["fastmha study", "fastmha.study"])
def test_the_study_prints_answers_and_saves_results_report_and_pictures(entry, study, capsys, measurements):
    assert study("--quick", "--threads", "1", entry=entry) == 0
    printed = capsys.readouterr().out
    seconds = re.search(r"3 measurements, at least 3.0 TFLOP, about (\d+) seconds in all\n", printed)[1]
    assert 6 <= int(seconds) < 60       # a start, three trials, four pictures, and what has passed
    for expected in ("Title of fake", "Ratios", "Title of other", "Not measured.", "Report: ", "Results: ", "Pictures: "):
        assert expected in printed
    found = runner.read(study.out / "results.json")
    assert found["command"].startswith("fastmha study --quick --threads 1 --out ")
    assert (found["threads"], found["quick"], found["limits"]) == (1, True, LIMITS)
    assert measurements.called == [r["label"] for r in found["records"]] == ["a", "b", "c"]
    assert {path.name for path in study.out.iterdir()} == {
        "results.json", "report.html", "report.md", "bars_picture.png"}


@needs_extra
def test_only_the_questions_asked_for_are_measured_and_reported(study, capsys, measurements):
    assert study("--only", "other") == 0
    printed = capsys.readouterr().out
    assert measurements.called == []
    assert "Title of other" in printed
    assert "Title of fake" not in printed
    assert "#fake" not in (study.out / "report.html").read_text(encoding="utf-8")


@needs_extra
def test_json_is_all_that_stdout_gets_when_it_is_asked_for(study, capsys):
    assert study("--json") == 0
    printed = capsys.readouterr()
    assert printed.out.isascii()
    assert json.loads(printed.out) == runner.read(study.out / "results.json")
    assert "Report: " in printed.err
    assert "Title of fake" not in printed.err
    assert (study.out / "report.html").exists()


@needs_extra
def test_a_study_that_is_interrupted_says_so_and_goes_on_where_it_was(study, capsys, measurements):
    measurements.fail["b"] = KeyboardInterrupt()
    assert study() == 130
    assert capsys.readouterr().err == f"fastmha study: interrupted; the same command goes on from what {study.out} holds\n"
    assert [path.name for path in study.out.iterdir()] == ["unfinished.jsonl"]
    measurements.fail.clear()
    assert study() == 0
    printed = capsys.readouterr().out
    assert "1 of 3 measurements were made before the interruption" in printed
    assert "2 measurements, at least 2.0 TFLOP" in printed
    assert measurements.called == ["a", "b", "b", "c"]
    assert not (study.out / "unfinished.jsonl").exists()


@needs_extra
def test_a_report_that_is_interrupted_leaves_the_results(study, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "write", interrupted)
    assert study() == 130
    assert capsys.readouterr().err == (f"fastmha study: interrupted; {study.out / 'results.json'} holds the measurements, "
                                       "the report is not written\n")
    assert len(runner.read(study.out / "results.json")["records"]) == 3


@needs_extra
def test_a_finished_study_measures_afresh(study, measurements):
    assert study() == 0
    assert study() == 0
    assert measurements.called == [*"abcabc"]


@needs_extra
@pytest.mark.parametrize("others", [("--threads", "1", "--quick"), ("--threads", "2")], ids=["threads", "quick"])
def test_the_part_of_a_study_with_other_options_is_one_sentence(others, study, capsys, measurements):
    measurements.fail["b"] = KeyboardInterrupt()
    study("--threads", "2", "--quick")
    before = (study.out / "unfinished.jsonl").read_bytes()
    capsys.readouterr()
    assert study(*others) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fastmha study: {study.out / 'unfinished.jsonl'} holds a part of a study that differs in ")
    assert error.count("\n") == 1
    assert (study.out / "unfinished.jsonl").read_bytes() == before


@needs_extra
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["study", "--quick", "--out", str(tmp_path / "file")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fastmha study cannot make the folder {tmp_path / 'file'}: ")
    assert error.count("\n") == 1


@needs_extra
@pytest.mark.parametrize("name", ["unfinished.partial", "results.partial", "report.partial", "report.html"])
def test_a_file_that_cannot_be_written_is_one_sentence(name, study, capsys):
    (study.out / name).mkdir(parents=True)
    assert study() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fastmha study cannot write into {study.out}: ")
    assert error.count("\n") == 1


@needs_extra
def test_a_full_disk_is_one_sentence(study, capsys, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runner.os, "fsync", full)
    assert study() == 2
    assert capsys.readouterr().err == f"fastmha study cannot write into {study.out}: No space left on device\n"


@needs_extra
def test_what_the_machine_refuses_a_trial_is_not_blamed_on_the_folder(study, measurements):
    measurements.fail["a"] = OSError("no huge pages")
    with pytest.raises(OSError, match="no huge pages"):
        study()


@needs_extra
def test_arms_that_disagree_end_the_study_with_status_1_and_keep_the_rest(study, capsys, measurements):
    measurements.fail["b"] = trial.ArmsDisagreeError("they differ")
    assert study() == 1
    assert capsys.readouterr().err == "fastmha study: they differ\n"
    assert len((study.out / "unfinished.jsonl").read_text().splitlines()) == 3


@needs_extra
def test_an_answer_that_fails_leaves_the_results(study, measurements, monkeypatch):
    monkeypatch.setattr(questions, "ALL", (question(lambda found: 1 / 0, trials=measurements.trials),))
    with pytest.raises(ZeroDivisionError):
        study()
    assert len(runner.read(study.out / "results.json")["records"]) == 3


@needs_extra
def test_a_bar_names_the_measurement_and_the_time_left(measurements, tmp_path):
    from rich.console import Console

    out = io.StringIO()
    long = [replace(t, label=f"{LONG} {n}", measure=lambda seconds: time.sleep(0.15) or {})
            for n, t in enumerate(measurements.trials * 2)]
    command.measure(long, runner.Store(tmp_path, ABOUT), Console(file=out, force_terminal=True, width=80, color_system=None))
    seen = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out.getvalue())
    assert "fake: B1 H16/4 " in seen
    assert re.search(r"\b[1-9]\d% 0:00:0\d", seen)
    assert max(map(len, re.split(r"[\r\n]", seen))) <= 80
