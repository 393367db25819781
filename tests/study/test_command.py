"""The command fastmha: what it prints and saves, how it ends when it is interrupted or refused, what it says of errors."""

import errno
import io
import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from study_support import ABOUT, EXTRA, LIMITS, LONG, full_answer, needs_extra, question

import fastmha
from fastmha.__main__ import main
from fastmha.study import __main__ as command
from fastmha.study import questions, report, runner, trial


def run_python(*arguments, tmp_path):
    """Python in a folder without the source tree, so that the installed package is the one that runs."""
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


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
