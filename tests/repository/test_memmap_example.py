"""The example with keys and values in files: any cut into pieces, what it prints, its exit status, nothing left behind."""

import sys

import numpy as np
import pytest
from support import script

import fastmha

example = script("examples", "memmap_attention")

TINY = ["--megabytes", "0.5", "--budget", "0.125", "--queries", "3", "--threads", "1"]


def nothing(done):
    """Where no progress is shown."""


@pytest.mark.parametrize("size", [1, 7, 64, 99, 100, 1000])
def test_pieces_of_any_size_make_attention_over_the_files(example, size, tmp_path, rng):
    keys, values, length = tmp_path / "k", tmp_path / "v", 100
    for path in (keys, values):
        example.write(path, length, size, rng, nothing)
    k, v = (np.fromfile(path, np.float32).reshape(1, length, example.KV_HEADS, example.WIDTH) for path in (keys, values))
    q = rng.standard_normal((1, 4, example.HEADS, example.WIDTH)).astype(np.float32)
    moved = []
    out, lse = example.attend(q, keys, values, length, size, moved.append)
    assert sum(moved) == length
    wanted, wanted_lse = fastmha.reference.attention(*(x.astype(float) for x in (q, k, v)), layout="BLHD", return_lse=True)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=2e-5)
    np.testing.assert_allclose(example.plain(q, 9, keys, values, length, size), wanted[0, :, 9], rtol=0, atol=1e-14)


def test_the_file_is_never_in_memory_as_a_whole(example, tmp_path, rng, monkeypatch):
    """Each call of attention sees at most a piece."""
    seen = []
    attention = fastmha.attention

    def spy(q, k, v, **keywords):
        seen.append(k.shape[1])
        return attention(q, k, v, **keywords)

    monkeypatch.setattr(fastmha, "attention", spy)
    assert example.main([*TINY, "--folder", str(tmp_path)]) == 0
    assert seen == [32] * 8


def test_script_prints_sizes_memory_speed_and_agreement(example, capsys, tmp_path):
    assert example.main([*TINY, "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["files", "pieces", "memory", "time", "agreement"]
    assert "1.0 MB: 256 keys and values" in printed[0]
    assert "8 of at most 0.1 MB" in printed[1]
    assert "GB/s" in printed[3]
    assert " below 1e-04" in printed[4]
    assert "NOT" not in printed[4]
    assert list(tmp_path.iterdir()) == []


def test_script_runs_without_rich_and_where_the_system_does_not_tell_memory(example, capsys, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(example, "memory", lambda field: None)
    assert example.main([*TINY, "--folder", str(tmp_path)]) == 0
    assert "memory     not told by this system" in capsys.readouterr().out


def test_script_fails_when_the_results_disagree(example, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "TOLERANCE", 0.0)
    assert example.main([*TINY, "--folder", str(tmp_path)]) == 1
    assert "NOT below" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_ends_with_one_sentence(example, capsys, tmp_path):
    assert example.main([*TINY, "--folder", str(tmp_path / "missing")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("The files cannot be written: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--megabytes", "0"], "--megabytes: invalid positive number value: '0'"),
        (["--budget", "nan"], "--budget: invalid positive number value: 'nan'"),
        (["--queries", "1.5"], "--queries: invalid positive integer value: '1.5'"),
        (["--threads", "0"], "--threads: invalid positive integer value: '0'"),
    ],
)
def test_wrong_arguments_are_named(example, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        example.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
