"""The study's folder: one process at a time, files replaced whole, damaged files set aside; with real processes."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_support import ABOUT, LIMITS, needs_extra

import fastmha
from fastmha.study import __main__ as command
from fastmha.study import folder, report, runner
from fastmha.study.trial import Trial

posix = pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")

# `fastmha study` in a process of its own, its measurements: "0", "1", … of so many seconds each, which find the process
STUDY = """
import os, sys, time
from fastmha.study import machine, pace, questions
from fastmha.study.answer import Question
from fastmha.study.trial import Trial

seconds, count, out = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
fake = Question("fake", "Title", "Is it?", lambda quick, threads: [
    Trial("fake", str(n), {}, lambda _: time.sleep(seconds) or {"by": os.getpid()}, seconds) for n in range(count)],
    lambda records, found: None)
questions.ALL, questions.NAMES = (fake,), ("fake",)
machine.limits = lambda threads: {"float32": 2e11, "float64": 1e11, "read": 2e10}
pace.calibrated = lambda *a: {"process": 0.1, "picture": 0.1}
from fastmha.__main__ import main
sys.exit(main(["study", "--quick", "--threads", "1", "--out", out]))
"""


class Process:
    """`STUDY` in a folder."""

    def __init__(self, out, seconds=0.1, count=8):
        package = os.pathsep.join(filter(None, (str(Path(fastmha.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        self.out = out
        # not from the folder that the tests run in: a clone's fastmha there would be imported, which has no compiled core
        self.process = subprocess.Popen([sys.executable, "-c", STUDY, str(seconds), str(count), str(out)], text=True, cwd=out,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": package})
        self.pid = self.process.pid

    def wait_for(self, records):
        """Until so many measurements are on disk."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if (self.out / "unfinished.jsonl").read_bytes().count(b'"by"') >= records:
                    return
            time.sleep(0.01)
        pytest.fail(f"no {records} measurements: {self.end()}")

    def end(self):
        """Exit status, and what it said."""
        out, error = self.process.communicate(timeout=120)
        return self.process.returncode, out, error


def measured(out):
    """label -> the process that measured it, from results that are whole."""
    return {record["label"]: record["by"] for record in runner.read(out / "results.json")["records"]}


# ------------------------------------------------------------------------------------------------ side by side

@needs_extra
def test_a_second_command_in_a_folder_is_refused_by_one_sentence_and_the_first_loses_nothing(tmp_path):
    first = Process(tmp_path, 0.5, 10)
    first.wait_for(2)
    status, _, error = Process(tmp_path).end()
    assert status == 2
    assert error.startswith(f"fastmha study: {tmp_path} is in use by process {first.pid} on ")
    assert error.endswith("): wait until that has ended, or give another --out\n")
    assert "(fastmha study --quick --threads 1 --out " in error
    assert error.count("\n") == 1
    assert first.end()[0] == 0
    assert measured(tmp_path) == {str(n): first.pid for n in range(10)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md", "results.json"]


@needs_extra
def test_of_commands_that_start_at_once_each_finishes_or_is_refused_and_one_finishes(tmp_path):
    several = [Process(tmp_path, 0.05, 6) for _ in range(4)]
    ends = {process.pid: process.end() for process in several}
    assert {status for status, _, _ in ends.values()} <= {0, 2}
    finished = {pid for pid, (status, _, _) in ends.items() if status == 0}
    assert finished
    assert all("is in use by" in error for status, _, error in ends.values() if status == 2)
    assert len(measured(tmp_path)) == 6
    assert set(measured(tmp_path).values()) <= finished
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md", "results.json"]


@needs_extra
@posix
def test_after_a_kill_the_folder_is_free_at_once_and_the_next_command_goes_on(tmp_path):
    killed = Process(tmp_path, 0.2, 6)
    killed.wait_for(2)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    assert (tmp_path / folder.LOCK).exists()
    second = Process(tmp_path, 0.01, 6)
    status, out, error = second.end()
    assert (status, error) == (0, "")
    assert "of 6 measurements were made before the interruption" in out
    found = measured(tmp_path)
    assert [found[label] for label in ("0", "1", "5")] == [killed.pid, killed.pid, second.pid]
    assert not (tmp_path / folder.LOCK).exists()


# ------------------------------------------------------------------------------------------------ the lock

def test_a_folder_is_held_until_the_end_however_it_comes(tmp_path):
    with folder.held(tmp_path, "one"), pytest.raises(folder.HeldError, match=f"process {os.getpid()} on .* \\(one, since "):
        folder.held(tmp_path, "two").__enter__()
    with pytest.raises(KeyError), folder.held(tmp_path, "three"):
        raise KeyError
    with folder.held(tmp_path, "four"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "garbage", "[]", "{}", '{"pid": "x", "host": 1, "command": 2, "since": 3}', "[" * 5000])
def test_whoever_holds_a_folder_need_not_be_named_to_be_respected(text, tmp_path):
    with folder.held(tmp_path, "one"):
        (tmp_path / folder.LOCK).write_text(text)
        with pytest.raises(folder.HeldError, match=f"^{tmp_path} is in use by another process: wait"):
            folder.held(tmp_path, "two").__enter__()


def test_what_a_dead_process_left_in_the_lock_file_does_not_hold_the_folder(tmp_path):
    (tmp_path / folder.LOCK).write_text('{"pid": 1, "host": "here", "command": "x", "since": "long ago"}')
    with folder.held(tmp_path, "one"):
        assert json.loads((tmp_path / folder.LOCK).read_text())["pid"] == os.getpid()


def test_the_lock_of_a_file_that_its_holder_removes_meanwhile_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    path, real, files = tmp_path / folder.LOCK, folder.lock, []
    path.write_text("of one that is about to end")

    def lock(file):
        files.append(os.fstat(file).st_ino)
        if len(files) == 1:
            path.rename(tmp_path / "gone")      # keeps its number
        return real(file)

    monkeypatch.setattr(folder, "lock", lock)
    with folder.held(tmp_path, "one"):
        assert path.stat().st_ino == files[-1] != files[0]


@posix
@pytest.mark.parametrize(("number", "expected"), [(errno.EWOULDBLOCK, False), (errno.EAGAIN, False), (errno.EACCES, False),
                                                  (errno.ENOLCK, None), (errno.ENOSYS, None), (errno.EOPNOTSUPP, None)])
def test_a_lock_that_another_has_is_told_from_a_file_system_without_locks(number, expected, tmp_path, monkeypatch):
    import fcntl

    def flock(file, how):
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "file").open("w") as file:
        assert folder.lock(file.fileno()) is expected


@pytest.mark.parametrize(("number", "expected"), [(None, True), (errno.EACCES, False), (errno.EINVAL, None)])
def test_windows_locks_a_byte_behind_the_text(number, expected, tmp_path, monkeypatch):
    locked = []

    def locking(file, how, count):
        locked.append((os.lseek(file, 0, os.SEEK_CUR), how, count))
        if number is not None:
            raise OSError(number, "no")

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    with (tmp_path / "file").open("w+") as file:
        with monkeypatch.context() as windows:
            windows.setattr(sys, "platform", "win32")
            assert folder.lock(file.fileno()) is expected
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 0
    assert locked == [(folder.LOCKED_BYTE, 2, 1)]


def test_without_locks_the_file_itself_is_one_and_a_file_left_behind_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "lock", lambda file: None)
    path = tmp_path / folder.LOCK
    with folder.held(tmp_path, "one"):
        before = path.read_bytes()
        with pytest.raises(folder.HeldError, match=rf"in use by process {os.getpid()} .*{path} says, and its file system has no "
                                                   r"locks .*: wait until it has ended, delete that file if it has, or give"):
            folder.held(tmp_path, "two").__enter__()
        assert path.read_bytes() == before
    assert not path.exists()
    path.write_bytes(before)        # as if it had been killed
    with pytest.raises(folder.HeldError, match="delete that file"):
        folder.held(tmp_path, "three").__enter__()
    path.unlink()
    with folder.held(tmp_path, "four"):
        pass


@needs_extra
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_written_is_one_sentence(number, tmp_path, capsys, monkeypatch):
    def refuse(path, *more, **options):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(folder.os, "open", refuse)
    assert command.main(["--quick", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"fastmha study: cannot write into {tmp_path}: {os.strerror(number)}\n".replace(
        "study:", "study")
    assert list(tmp_path.iterdir()) == []


@needs_extra
def test_a_lock_file_that_is_a_folder_is_one_sentence(tmp_path, capsys):
    (tmp_path / folder.LOCK).mkdir()
    assert command.main(["--quick", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"fastmha study cannot write into {tmp_path}: ")


# ------------------------------------------------------------------------------------------------ whole files

@pytest.mark.parametrize("reason", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=["full disk", "interrupted"])
def test_a_file_that_is_not_written_to_its_end_leaves_the_one_before_and_nothing_else(reason, tmp_path):
    path = tmp_path / "results.json"
    folder.replace_text(path, "before")
    def half():
        with folder.replacing(path) as partial:
            partial.write_text("hal")
            raise reason

    with pytest.raises(type(reason)):
        half()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("results.json", "before")]


def test_a_reader_sees_the_file_before_or_the_file_after(tmp_path, monkeypatch):
    path, seen = tmp_path / "results.json", []
    folder.replace_text(path, "before")
    fsync = os.fsync
    monkeypatch.setattr(folder.os, "fsync", lambda file: (fsync(file), seen.append(path.read_text())))
    folder.replace_text(path, "after")
    assert [*seen, path.read_text()] == ["before", "after"]


@needs_extra
def test_report_and_pictures_are_replaced_whole(tmp_path, monkeypatch):
    from fastmha.study import plots

    replaced, replacing = [], folder.replacing

    def noted(path):
        replaced.append(path.name)
        return replacing(path)

    monkeypatch.setattr(folder, "replacing", noted)
    monkeypatch.setattr(plots, "replacing", noted)
    runner.Store(tmp_path, ABOUT).finish([])
    found = {**runner.read(tmp_path / "results.json"), "limits": LIMITS}
    report.write(tmp_path, found, [], None)
    panel = {"title": "p", "series": [{"name": "s", "x": [1], "y": [1]}]}
    plots.lines(tmp_path / "picture.png", found, title="t", x="x", y="y", panels=[panel])
    assert replaced == ["unfinished.jsonl", "results.json", "report.html", "report.md", "picture.png"]


# ------------------------------------------------------------------------------------------------ damaged measurements

TRIALS = [Trial("fake", label, {"µ": label}, lambda seconds: {"value": [seconds, {"x": None}], "text": "ü\ud83d"}, 1.0)
          for label in "abcd"]


def unfinished(where, trials=TRIALS):
    """A store in a folder with the limits and the records of trials."""
    store = runner.Store(where, ABOUT)
    store.add({"limits": LIMITS})
    for trial in trials:
        store.add(trial.record())
    return store


def sealed(line):
    return runner._sealed(line).encode()


GOOD = {"question": "fake", "label": "e", "factors": {}}
DAMAGED = {
    "an empty file": (lambda lines: b"", "it is empty"),
    "binary garbage": (lambda lines: bytes(range(256)) * 20, "line 1 is no JSON: "),
    "garbage without a line's end": (lambda lines: b"\x00\x01\x02", "line 1 is no part of a measurement"),
    "zeros at the end": (lambda lines: b"".join(lines) + bytes(4096), "line 7 is no part of a measurement"),
    "half a line in the middle": (lambda lines: b"".join([*lines[:3], lines[3][:40], *lines[4:]]), "line 4 is no JSON: "),
    "half a line, ended": (lambda lines: b"".join([*lines[:3], lines[3][:40] + b"\n", *lines[4:]]), "line 4 is no JSON: "),
    "a changed number": (lambda lines: b"".join([*lines[:3], lines[3].replace(b"1.0", b"2.0"), *lines[4:]]),
                         "line 4 does not match its checksum"),
    "a changed head": (lambda lines: b"".join([lines[0].replace(b"avx2", b"avx3"), *lines[1:]]),
                       "line 1 does not match its checksum"),
    "no head": (lambda lines: b"".join(lines[1:]), "line 1 is not the head of a study"),
    "two heads": (lambda lines: b"".join([*lines, lines[0]]), "line 7 is not a measurement"),
    "a list": (lambda lines: b"".join([*lines, b"[]\n"]), "line 7 is no JSON object"),
    "null": (lambda lines: b"".join([*lines, b"null\n"]), "line 7 is no JSON object"),
    "a number for a head": (lambda lines: b"".join([b"3\n", *lines[1:]]), "line 1 is no JSON object"),
    "an object for a head": (lambda lines: b"".join([b"{}\n", *lines[1:]]), "line 1 does not match its checksum"),
    "a record of another shape": (lambda lines: b"".join([*lines, b'{"question": ["fake"], "label": {}}\n']),
                                  "line 7 does not match its checksum"),
    "a record of wrong types": (lambda lines: b"".join([*lines, b'{"question": 1, "label": 2, "factors": 3, "crc": "x"}\n']),
                                "line 7 does not match its checksum"),
    "limits of a wrong type": (lambda lines: b"".join([lines[0], b'{"limits": 5}\n', *lines[2:]]),
                               "line 2 does not match its checksum"),
    "an empty line": (lambda lines: b"\n".join(lines), "line 2 is no JSON: "),
    "a huge line": (lambda lines: b"".join([*lines, b'{"question": "' + b"x" * runner.LONGEST_LINE + b'"}\n']),
                    f"line 7 is longer than {runner.LONGEST_LINE} bytes"),
    "a huge line alone": (lambda lines: b"x" * (runner.LONGEST_LINE + 1), f"line 1 is longer than {runner.LONGEST_LINE} bytes"),
    "deep brackets": (lambda lines: b"".join([*lines, b"[" * 200_000 + b"\n"]), "line 7 is no JSON"),
    "a number of many digits": (lambda lines: b"".join([*lines, b'{"limits": ' + b"9" * 10_000 + b"}\n"]), "line 7 "),
    "another encoding": (lambda lines: b"".join(lines).decode().encode("utf-16"), "line 1 is not UTF-8: "),
    "Latin 1 in a record": (lambda lines: b"".join([*lines[:3], lines[3].replace(b"fake", b"f\xe4ke"), *lines[4:]]),
                            "line 4 is not UTF-8: "),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_part_is_kept_under_a_free_name_and_the_study_starts_afresh(name, tmp_path):
    path = unfinished(tmp_path).path
    damage, expected = DAMAGED[name]
    damaged = damage(path.read_bytes().splitlines(keepends=True))
    path.write_bytes(damaged)
    store = runner.Store(tmp_path, ABOUT)
    assert store.damage.startswith(f"{path} is damaged: {expected}")
    assert store.damage.endswith("; it is kept as unfinished.damaged.jsonl, and everything is measured anew")
    assert "\n" not in store.damage
    assert (tmp_path / "unfinished.damaged.jsonl").read_bytes() == damaged
    assert (store.records, store.limits) == ({}, {})
    runner.run(TRIALS, unfinished(tmp_path, []))
    again = runner.Store(tmp_path, ABOUT)
    assert again.damage == ""
    assert len(again.records) == len(TRIALS)


@pytest.mark.parametrize("kind", ["folder", "full folder", "link to nothing", pytest.param("pipe", marks=posix)])
def test_what_is_no_file_is_set_aside_like_a_damaged_one(kind, tmp_path):
    path = tmp_path / "unfinished.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to nothing":
        path.symlink_to(tmp_path / "nothing")
    else:
        path.mkdir()
        if kind == "full folder":
            (path / "file").write_text("kept")
    store = runner.Store(tmp_path, ABOUT)
    assert store.damage == f"{path} is no file; it is kept as unfinished.damaged.jsonl, and everything is measured anew"
    assert os.path.lexists(tmp_path / "unfinished.damaged.jsonl")
    assert kind != "full folder" or (tmp_path / "unfinished.damaged.jsonl" / "file").read_text() == "kept"
    store.add({"limits": LIMITS})
    assert runner.Store(tmp_path, ABOUT).limits == LIMITS


def test_each_damaged_file_gets_a_name_that_is_free(tmp_path):
    for number in range(3):
        (tmp_path / "unfinished.jsonl").write_text(f"damaged {number}\n")
        runner.Store(tmp_path, ABOUT)
    (tmp_path / "unfinished.damaged-4.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "unfinished.jsonl").write_text("damaged 3\n")
    runner.Store(tmp_path, ABOUT)
    names = ("unfinished.damaged.jsonl", *(f"unfinished.damaged-{n}.jsonl" for n in (2, 3, 5)))
    assert [(tmp_path / name).read_text() for name in names] == [f"damaged {n}\n" for n in range(4)]


@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_a_cut_last_line_is_dropped_and_nothing_else(cut, tmp_path):
    path = unfinished(tmp_path).path
    whole = path.read_bytes()
    assert len(whole.splitlines()[-1]) > 120
    path.write_bytes(whole[:-cut])
    store = runner.Store(tmp_path, ABOUT)
    assert store.damage == ""
    assert [label for _, label in store.records] == ["a", "b", "c"]
    store.add(TRIALS[3].record())
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["unfinished.jsonl"]


@st.composite
def damages(draw):
    """What happens to the bytes of a file: some are overwritten, taken out, put in or cut off."""
    how = draw(st.sampled_from(["overwrite", "take out", "put in", "cut", "swap lines", "lines of JSON", "anything"]))
    at, size = draw(st.floats(0, 1)), draw(st.integers(1, 60))
    text = draw(st.binary(min_size=1, max_size=60) | st.sampled_from([b"\n", b"{", b'"', b"\0" * 20, b"}\n{", b"\xff\xfe", b"1"]))
    json_lines = draw(st.lists(st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.sampled_from(["question", "label", "limits", "format", "factors", "crc", "x"]), inner, max_size=4), max_leaves=8),
        max_size=3))

    def damage(data):
        start = int(at * len(data))
        if how == "cut":
            return data[:start]
        if how == "swap lines":
            lines = data.splitlines(keepends=True)
            random.Random(size).shuffle(lines)
            return b"".join(lines)
        if how == "lines of JSON":
            lines = data.splitlines(keepends=True)
            place = int(at * (len(lines) + 1))
            return b"".join([*lines[:place], *(json.dumps(x).encode() + b"\n" for x in json_lines), *lines[place:]])
        if how == "anything":
            return text
        return data[:start] + (b"" if how == "take out" else text) + data[start + (0 if how == "put in" else size):]

    return damage


@settings(max_examples=300, deadline=None)
@given(damages())
def test_whatever_happens_to_a_part_the_study_goes_on_with_true_records_or_sets_it_aside(damage):
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        before = unfinished(where)
        damaged = damage(before.path.read_bytes())
        before.path.write_bytes(damaged)
        store = runner.Store(where, ABOUT)
        assert store.records.items() <= before.records.items()
        assert store.limits in ({}, LIMITS)
        kept = where / "unfinished.damaged.jsonl"
        assert kept.exists() == bool(store.damage)
        if store.damage:
            assert kept.read_bytes() == damaged
            assert "\n" not in store.damage
            assert (store.records, store.limits) == ({}, {})
        else:
            assert damaged.startswith(before.path.read_bytes()) or len(damaged) < len(sealed(store.head))
        unfinished(where, TRIALS)
        assert runner.Store(where, ABOUT).finish(TRIALS)["records"] == list(before.records.values())
        assert runner.read(where / "results.json")["records"] == list(before.records.values())


@needs_extra
def test_the_command_says_what_was_damaged_in_one_sentence_and_measures_all(tmp_path):
    (tmp_path / "unfinished.jsonl").write_bytes(b"\xff\n")
    status, out, error = Process(tmp_path, 0.01, 3).end()
    assert status == 0
    assert error == (f"fastmha study: {tmp_path / 'unfinished.jsonl'} is damaged: line 1 is not UTF-8: invalid start byte at "
                     "byte 0; it is kept as unfinished.damaged.jsonl, and everything is measured anew\n")
    assert "3 measurements" in out
    assert len(measured(tmp_path)) == 3
    assert (tmp_path / "unfinished.damaged.jsonl").read_bytes() == b"\xff\n"


def test_a_part_that_another_version_left_is_refused_and_kept(tmp_path):
    path = tmp_path / "unfinished.jsonl"
    path.write_bytes(sealed({**unfinished(tmp_path).head, "format": 4}) + sealed(GOOD))
    before = path.read_bytes()
    with pytest.raises(runner.OtherStudyError, match=f"{path} holds a part of a study that differs in format: give another "):
        runner.Store(tmp_path, ABOUT)
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------------------------ damaged results

DOCUMENT = Path(__file__).parents[2] / "docs" / "layouts"


def few_results():
    """Of the study in the documents: all that stands beside the records, and the first of each question."""
    found = json.loads((DOCUMENT / "results.json").read_text(encoding="utf-8"))
    firsts = {}
    for record in found["records"]:
        firsts.setdefault(record["question"], []).append(record)
    return {**found, "records": [record for own in firsts.values() for record in own[:2]]}


FEW = few_results()


@pytest.mark.parametrize(("damaged", "expected"), [
    (b"", "it is no JSON: Expecting value: line 1 column 1"), (b"\xff\xfe\x00", "it is not UTF-8: invalid start byte at byte 0"),
    (json.dumps(FEW).encode()[:5000], "it is no JSON: "), (b"[]", "it is no JSON object"), (b"[" * 200_000, "it is no JSON"),
    (b"{}", 'it has no "format"'), (b'{"format": "2"}', r'it has no "command"|"format" of it is not an integer'),
    (json.dumps({**FEW, "records": {}}).encode(), '"records" of it is not a list'),
    (json.dumps({**FEW, "records": [5]}).encode(), "record 1 is not an object"),
    (json.dumps({**FEW, "records": [*FEW["records"][:2], {"question": "heads", "label": 1, "factors": {}}]}).encode(),
     '"label" of record 3 is not a string'),
    (json.dumps({**FEW, "limits": {"read": "fast"}}).encode(), '"read" of "limits" of it is not a finite number'),
    (json.dumps({**FEW, "limits": {"read": float("nan")}}).encode(), '"read" of "limits" of it is not a finite number'),
    (json.dumps({**FEW, "threads": True}).encode(), '"threads" of it is not an integer'),
    (json.dumps({**FEW, "machine": {}}).encode(), '"machine" of it has no "cpu"'),
    (json.dumps({**FEW, "records": [{**FEW["records"][0], "arms": {"strided": {"median": None}}}]}).encode(),
     '"median" of "strided" of "arms" of record 1 is not a finite number'),
])
def test_damaged_results_are_refused_by_a_sentence_that_says_what_is_wrong(damaged, expected, tmp_path):
    path = tmp_path / "results.json"
    path.write_bytes(damaged)
    with pytest.raises(runner.DamagedError, match=f"^{path} is damaged: ({expected})") as caught:
        runner.read(path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == damaged


def test_results_that_are_no_file_or_too_long_are_refused(tmp_path, monkeypatch):
    with pytest.raises(runner.DamagedError, match=f"^{tmp_path} is no file$"):
        runner.read(tmp_path)
    monkeypatch.setattr(runner, "LARGEST_RESULTS", 10)
    (tmp_path / "results.json").write_text(json.dumps(FEW))
    with pytest.raises(runner.DamagedError, match=r"results\.json is damaged: it is longer than 10 bytes$"):
        runner.read(tmp_path / "results.json")


def places(value, path=()):
    """The paths of all values within a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def put(value, path, new):
    """The JSON value with another one at the path."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


PLACES = list(places(FEW))
VALUES = (st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3)
          | st.sampled_from([[], {}, [1], {"a": 1}]))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(PLACES) - 1), VALUES)
def test_a_document_is_made_from_damaged_results_or_left_with_one_sentence(place, value):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        document, said = Path(name) / "layouts.md", []
        document.write_text("<!-- study about -->\n<!-- end -->")
        (Path(name) / "layouts").mkdir()
        (Path(name) / "layouts" / "results.json").write_text(json.dumps(put(FEW, PLACES[place], value)), encoding="utf-8")
        patch.setattr(report, "draw", lambda *a: None)
        patch.setattr("builtins.print", lambda text, file: said.append(text))
        status = report.main(document)
        assert status in (0, 2)
        assert (document.read_text() == "<!-- study about -->\n<!-- end -->") == (status == 2)
        assert len(said) == (status == 2)
        for sentence in said:
            assert sentence.startswith(f"fastmha study: {Path(name) / 'layouts' / 'results.json'} ")
            assert "\n" not in sentence


def test_a_document_without_results_is_told_so(tmp_path, capsys):
    assert report.main(tmp_path / "layouts.md") == 2
    assert capsys.readouterr().err == (f"fastmha study: cannot read {tmp_path / 'layouts' / 'results.json'}: "
                                       f"{os.strerror(errno.ENOENT)}\n")
