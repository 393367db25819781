"""The store of the study's results: records on disk one by one, interruption, what is left to measure, parts of other studies."""

import json

import pytest
from study_support import ABOUT, LIMITS

from fastmha.study import machine, runner, trial


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
