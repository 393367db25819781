"""Cases, heads, trials, machine and questions of the study: FLOPs and bytes against brute-force counts, arms that agree, time."""

import json
import re
from dataclasses import asdict

import numpy as np
import pytest

import fastmha
from fastmha import _core
from fastmha.study import cases, heads, machine, pace, questions, trial
from fastmha.study.cases import DIRECTIONS, Case, Run

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
