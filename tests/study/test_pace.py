"""How long a study takes: announced, kept to within a limit, repetitions given up before cases. On clocks that are not real."""

import json
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_support import needs_extra

from fastmha.study import __main__ as command
from fastmha.study import cases, counts, heads, machine, memory, pace, questions, report, runner, trial
from fastmha.study.answer import Question
from fastmha.study.pace import Budget
from fastmha.study.trial import Trial

TWO_MINUTES, QUARTER = 120.0, 0.25

# about what `pace.calibrated` finds on two cores of a Xeon of 2.5 GHz: a slow machine
XEON = {"tiled forward": 1 / 95e9, "tiled backward": 1 / 120e9, "blas forward": 1 / 50e9, "blas backward": 1 / 50e9,
        "product": 1 / 95e9, "tiled forward 1T": 1 / 48e9, "tiled backward 1T": 1 / 60e9, "blas forward 1T": 1 / 25e9,
        "blas backward 1T": 1 / 25e9, "product 1T": 1 / 48e9, "read": 1 / 10e9, "fresh": 1 / 2e9, "process": 0.65, "picture": 0.4}


def machine_of(speed):
    return {kind: cost / speed for kind, cost in XEON.items()}


class World:
    """A clock that goes on by what trials take: `seconds`, or their least on a machine `slower` than it was measured to be, if
    that is more; each question by a factor of its own besides."""

    def __init__(self, slower=1.0, factors=(1.0,)):
        self.now, self.slower, self.factors, self.called = 1000.0, slower, list(factors), []
        self.of = {name: self.factors[n % len(self.factors)] for n, name in enumerate(questions.NAMES)}

    def clock(self):
        return self.now

    def trials(self, trials, costs):
        def measured(t):
            least = self.slower * self.of.get(t.question, 1.0) * sum(amount * costs[kind] for kind, amount in t.least.items())

            def measure(seconds):
                self.called.append((t, seconds))
                self.now += max(least, seconds + least / 3)
                return {"seconds": seconds}

            return replace(t, measure=measure)

        return [measured(t) for t in trials]


class Kept:
    """A store that keeps nothing on disk."""

    def __init__(self):
        self.records, self.limits, self.about = {}, {"read": 1.0}, {"threads": 2}

    def add(self, line):
        self.records[line["question"], line["label"]] = line


def study(world, trials, costs, limit=pace.QUICK_LIMIT, spent=6.0):
    """Run trials; returns budget, store and the seconds it took, all in all."""
    after = 2 * pace.PICTURES * len({t.question for t in trials}) * costs.get("picture", 0.0)
    ours, store = world.trials(trials, costs), Kept()
    begin = world.now - spent
    budget = Budget(ours, costs, limit, spent, after, clock=world.clock)
    runner.run(ours, store, budget=budget)
    return budget, store, world.now - begin + after * world.slower


@pytest.fixture(autouse=True)
def valgrind(monkeypatch):
    """As if it were there: counting misses is the longest of all questions."""
    monkeypatch.setattr(counts.shutil, "which", lambda name: f"/usr/bin/{name}")


def quick(threads=2):
    return questions.trials(questions.ALL, True, threads)


# ------------------------------------------------------------------------------------------------ the quick study

def test_on_the_slow_machine_the_quick_study_is_too_long_without_a_budget():
    budget = Budget(quick(), XEON)
    assert sum(map(budget.least, quick())) > pace.QUICK_LIMIT
    assert budget.announced > TWO_MINUTES


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.3, 1.7])
@pytest.mark.parametrize("speed", [0.7, 1.0, 1.5, 2.0, 4.0, 20.0])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_quick_study_takes_less_than_two_minutes(threads, speed, slower):
    _, store, seconds = study(World(slower), quick(threads), machine_of(speed))
    assert seconds < TWO_MINUTES
    assert {question for question, _ in store.records} == {t.question for t in quick()}


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("speed", [0.7, 1.0, 1.2, 1.5, 2.0, 4.0, 20.0])
def test_the_announced_time_is_right_within_a_quarter(speed, slower):
    budget, _, seconds = study(World(slower), quick(), machine_of(speed))
    assert abs(seconds / budget.announced - 1) < QUARTER


@settings(max_examples=60, deadline=None)
@given(st.floats(0.7, 8), st.floats(0.8, 1.25), st.lists(st.floats(0.6, 1.6), min_size=9, max_size=9))
def test_both_hold_where_each_question_is_slower_or_faster_than_thought(speed, slower, factors):
    """From 0.7 of the slow machine's speed on: at half of it the shortest trials and the pictures, which are never left out, may
    take 75 s where they prove twice as slow as announced, and no reserve is enough for the last of them."""
    budget, store, seconds = study(World(slower, factors), quick(), machine_of(speed))
    assert seconds < TWO_MINUTES
    assert abs(seconds / budget.announced - 1) < 1.2 * QUARTER
    assert len({question for question, _ in store.records}) == len({t.question for t in quick()})


def test_a_machine_that_is_fast_measures_all_for_as_long_as_was_planned():
    world = World()
    _, store, _ = study(world, quick(), machine_of(20.0))
    assert len(store.records) == len(quick())
    assert [seconds for _, seconds in world.called] == pytest.approx([t.seconds for t in quick()], rel=0.03)


def test_a_machine_that_proves_faster_than_announced_repeats_more():
    world = World(0.3)
    study(world, quick(), machine_of(2.5))
    assert all(seconds > 1.2 * t.seconds for t, seconds in world.called[-20:])


def test_trials_that_were_to_be_left_out_are_measured_where_there_is_time_after_all():
    world = World(0.5)
    _, store, _ = study(world, quick(), XEON)
    planned = Budget(quick(), XEON, pace.QUICK_LIMIT, 6.0, 10.0)
    assert len(planned.kept) < len(quick()) == len(store.records)


def test_a_study_without_a_limit_is_neither_shortened_nor_cut():
    world = World(5.0)
    _, store, _ = study(world, quick(), XEON, limit=None)
    assert len(store.records) == len(quick())
    assert [(t.label, seconds) for t, seconds in world.called] == [(t.label, t.seconds) for t in quick()]


# ------------------------------------------------------------------------------------------------ what is given up

def some(least, seconds=1.0, question="q"):
    return [Trial(question, str(n), {}, lambda s: {}, seconds, least={"u": amount}) for n, amount in enumerate(least)]


def test_repetitions_are_given_up_before_any_case_and_by_the_same_share():
    trials, world = some([1.0] * 10, 5.0), World()
    _, store, seconds = study(world, trials, {"u": 1.0}, limit=30.0, spent=0.0)
    assert len(store.records) == 10
    given = [s for _, s in world.called]
    assert max(given) < 5.0
    assert given == pytest.approx([30.0 / 10 - 1 / 3] * 10, rel=0.01)
    assert seconds == pytest.approx(30.0, rel=0.01)


def test_the_fewest_repetitions_stay_and_the_longest_cases_go_as_few_as_can_be():
    trials, world = some([3.0, 1.0, 9.0, 1.0, 8.0, 2.0]), World()
    _, store, seconds = study(world, trials, {"u": 1.0}, limit=15.01, spent=0.0)
    assert [label for _, label in store.records] == ["0", "1", "3", "4", "5"]      # without the 9
    assert seconds == pytest.approx(15.0, abs=0.02)     # each took its least
    assert trial.timed(lambda: {"a": lambda: None}, [])(0.0)["rounds"] == trial.LEAST_ROUNDS


def test_of_cases_as_long_as_each_other_the_later_goes():
    budget = Budget(some([5.0, 5.0, 5.0]), {"u": 1.0}, 11.0, clock=lambda: 0.0)
    assert [t.label for t in budget.kept] == ["0", "1"]


def test_the_shortest_of_each_question_stays_whatever_it_takes_and_the_announcement_says_so():
    trials = [*some([50.0, 40.0]), *some([70.0, 90.0], question="r")]
    budget = Budget(trials, {"u": 1.0}, 60.0, 5.0, 10.0, clock=lambda: 0.0)
    assert [(t.question, t.label) for t in budget.kept] == [("q", "1"), ("r", "0")]
    assert budget.announced == 5.0 + 40.0 + 70.0 + 10.0
    again = Budget(trials, {"u": 1.0}, 60.0, 5.0, 10.0, measured={"q"}, clock=lambda: 0.0)
    assert [(t.question, t.label) for t in again.kept] == [("r", "0")]


def test_imports_the_report_and_what_went_before_are_part_of_the_limit():
    trials = some([10.0] * 10)
    for spent, after, kept in ((0.0, 0.0, 10), (20.0, 0.0, 8), (0.0, 30.0, 7), (20.0, 30.0, 5)):
        budget = Budget(trials, {"u": 1.0}, 100.0, spent, after, clock=lambda: 0.0)
        assert len(budget.kept) == kept
        assert budget.announced == 100.0


def test_what_trials_take_corrects_what_is_expected_of_the_others_of_their_question_first():
    budget = Budget([*some([1.0] * 9), *some([1.0], question="r")], {"u": 1.0}, 100.0)
    trials = some([1.0] * 9)
    for t in trials[:6]:
        budget.took(t, 0.0, 3.0)
    (other,) = some([1.0], question="r")
    assert 2.3 < budget.least(trials[-1]) < 3.0
    assert 1.0 < budget.least(other) < budget.least(trials[-1])


def test_trials_whose_time_was_given_to_them_teach_nothing():
    budget = Budget(some([0.1] * 9, 2.0), {"u": 1.0}, 100.0)
    (t, *_) = some([0.1] * 9, 2.0)
    budget.took(t, 2.0, 2.03)
    assert budget.least(t) == pytest.approx(0.1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 3), st.sampled_from("qrs")), max_size=30), st.floats(10, 200),
       st.floats(0, 5), st.floats(0.5, 2), st.randoms(use_true_random=False))
def test_whatever_the_trials_each_is_measured_at_most_once_and_the_limit_is_kept(stated, limit, spent, slower, rng):
    trials = [Trial(q, str(n), {}, lambda s: {}, seconds, least={"u": least}) for n, (least, seconds, q) in enumerate(stated)]
    world = World(slower)
    world.of = {q: rng.uniform(0.8, 1.2) for q in "qrs"}
    _, store, seconds = study(world, trials, {"u": 1.0}, limit, spent)
    called = [t.label for t, _ in world.called]
    assert len(set(called)) == len(called) == len(store.records)
    assert {q for q, _ in store.records} == {t.question for t in trials}
    assert all(0 <= given <= pace.MOST_SHARE * t.seconds for t, given in world.called)
    took = [(t.question, slower * world.of[t.question] * t.least["u"] + pace.MOST_SHARE * t.seconds) for t in trials]
    must = sum(min(each for q, each in took if q == name) for name in dict(took))
    # one of each question is measured, and the last may take longer than was thought
    assert seconds <= limit + must + max((each for _, each in took), default=0.0)


def test_progress_goes_from_nothing_to_all_that_was_planned_and_never_back():
    world, seen = World(1.4), []
    ours = world.trials(quick(), XEON)
    budget = Budget(ours, XEON, pace.QUICK_LIMIT, 6.0, 10.0, clock=world.clock)
    runner.run(ours, Kept(), lambda t, done: seen.append(done), budget)
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] == budget.planned


# ------------------------------------------------------------------------------------------------ what is known before

@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_quick", [True, False])
def test_trials_state_their_least_in_kinds_of_work_that_are_measured(is_quick, threads):
    trials = questions.trials(questions.ALL, is_quick, threads)
    assert {kind for t in trials for kind in t.least} <= XEON.keys()
    assert all(t.least and min(t.least.values()) >= 0 < max(t.least.values()) for t in trials)


@needs_extra
def test_calibration_measures_each_kind_of_work_with_calls_of_its_own(monkeypatch):
    called, clock = Counter(), iter(np.arange(0, 1e6, 0.5))
    about = {**machine.describe(2, "fastmha study"), "quick": True}
    real = heads.arms

    def arms(operands, direction, num_threads):
        name = f"{operands.case.algorithm} {direction} {num_threads}T"
        return {"strided": lambda: called.update([name]) or real(operands, direction, num_threads)["strided"]()}

    monkeypatch.setattr(heads, "arms", arms)
    monkeypatch.setattr(cases, "case", lambda B, H, L, D: cases.Case(B, H, H, 64, 64, D))
    monkeypatch.setattr(memory, "measure", lambda work, threads, seconds: called.update(["process"]))
    monkeypatch.setattr(pace.time, "perf_counter", lambda: float(next(clock)))
    found = pace.calibrated(2, {"float32": 1e9, "float64": 1e9, "read": 1e10}, about)
    assert found.keys() == XEON.keys()
    flops = cases.Case(1, 4, 4, 64, 64, 64).flops("backward")
    assert (found["product"], found["product 1T"], found["read"], found["process"]) == (1e-9, 2e-9, 1e-10, 0.5)
    assert found["blas backward"] == found["tiled backward 1T"] == 0.5 / flops
    assert called.pop("process") == 1
    assert called == {f"{a} {d} {n}T": 4 for a in ("tiled", "blas") for d in cases.DIRECTIONS for n in (1, 2)}


@pytest.mark.parametrize(("took", "expected"), [(0.5, "abc"), (1.0, "a")])
def test_a_warm_up_ends_with_the_first_call_that_is_long(took, expected, monkeypatch):
    called, clock = [], iter(np.arange(0, 100) * took * trial.WARM_BELOW)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: float(next(clock)))
    trial.warm_up({name: (lambda name=name: called.append(name)) for name in "abc"})
    assert "".join(called) == expected


# ------------------------------------------------------------------------------------------------ the command

@pytest.fixture
def command_with(monkeypatch, tmp_path):
    """Runs `fastmha study --quick` with the trials of a question on a clock of its own; returns results and what was printed."""
    def run(trials, costs, limit, capsys):
        fake = Question("q", "Title", "Is it?", lambda quick, threads: trials, lambda records, found: None)
        monkeypatch.setattr(questions, "ALL", (fake,))
        monkeypatch.setattr(questions, "NAMES", ("q",))
        monkeypatch.setattr(machine, "limits", lambda threads: {"float32": 2e11, "float64": 1e11, "read": 2e10})
        monkeypatch.setattr(pace, "calibrated", lambda *a: {"process": 0.0, "picture": 0.0, **costs})
        monkeypatch.setattr(pace, "QUICK_LIMIT", limit)
        monkeypatch.setenv("COLUMNS", "400")
        assert command.main(["--quick", "--out", str(tmp_path / "out")]) == 0
        return runner.read(tmp_path / "out" / "results.json"), capsys.readouterr().out, tmp_path / "out"

    return run


@needs_extra
def test_the_report_says_which_cases_were_left_out_and_how_many(command_with, capsys):
    trials = some([1.0, 700.0, 1.0, 500.0])
    found, printed, out = command_with(trials, {"u": 1.0}, 100.0, capsys)
    assert found["left_out"] == [{"question": "q", "label": "1"}, {"question": "q", "label": "3"}]
    assert [r["label"] for r in found["records"]] == ["0", "2"]
    assert re.search(r"2 measurements, at least 0\.0 TFLOP, about .* in all; 2 more, the longest, only if there is time", printed)
    said = "Left out for lack of time"
    assert f"{said}: 2 (q: 1, 3)" in printed
    for name in ("report.html", "report.md"):
        text = (out / name).read_text(encoding="utf-8")
        assert said in text
        assert "2 (q: 1, 3)" in text
    assert not (out / "unfinished.jsonl").exists()


@needs_extra
def test_a_study_that_had_time_for_all_says_nothing_of_it(command_with, capsys):
    found, printed, out = command_with(some([0.0, 0.0]), {"u": 1.0}, 100.0, capsys)
    assert found["left_out"] == []
    assert "only if there is time" not in printed
    assert "Left out" not in printed + (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("seconds", "said"), [(8.4, "about 8 seconds in all"), (59.0, "about 59 seconds in all"),
                                               (105.0, "about 1.8 minutes in all"), (1400.0, "about 23.3 minutes in all")])
def test_the_announcement_is_right_to_a_few_per_cent_in_its_own_words(seconds, said):
    budget = Budget(some([0.0], seconds), {"u": 1.0})
    text = command.announcement(some([0.0], seconds), budget)
    assert text == f"1 measurements, at least 0.0 TFLOP, {said}"
    number, unit = re.search(r"about ([\d.]+) (seconds|minutes)", text).groups()
    assert abs(float(number) * {"seconds": 1, "minutes": 60}[unit] / seconds - 1) < 0.06


# ------------------------------------------------------------------------------------------------ answers from what is left

def subsets(records):
    """As a budget leaves records: some of each question, down to one."""
    generator = random.Random(0)
    for size in (1, 1, 1, 2, 3, 5, 8):
        yield generator.sample(records, min(size, len(records)))
    yield from ([record] for record in records[:60])


DOCUMENT = json.loads((report.Path(__file__).parents[2] / "docs" / "layouts" / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("question", questions.ALL, ids=lambda question: question.name)
def test_a_question_can_be_answered_from_any_part_of_its_records(question):
    own = [record for record in DOCUMENT["records"] if record["question"] == question.name]
    assert question.answered(DOCUMENT) is not None
    for part in subsets(own):
        found = {**DOCUMENT, "records": part}
        answer = question.answered(found)
        if answer is not None:
            assert question.title in report.markdown(found, [(question, answer)])


@needs_extra
@pytest.mark.parametrize("question", questions.ALL, ids=lambda question: question.name)
def test_what_is_left_of_a_question_can_be_drawn(question, tmp_path):
    one_of_each = {tuple(record["factors"].get(name) for name in ("kind", "arm", "algorithm", "what")): record
                   for record in DOCUMENT["records"] if record["question"] == question.name}
    for record in list(one_of_each.values())[:4]:
        found = {**DOCUMENT, "records": [record]}
        report.draw(tmp_path, found, [(question, question.answered(found))])
