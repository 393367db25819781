"""One layer of the reader's own shape: what is counted, what is measured, errors before anything is computed."""

import importlib.util
import io
import json

import pytest

from fastmha import analysis
from fastmha.__main__ import main
from fastmha.study import memory, shape
from fastmha.study.memory import Work
from fastmha.study.shape import Shape

LIMITS = {"float32": 1e11, "float64": 5e10, "read": 1e10}
needs_rich = pytest.mark.skipif(importlib.util.find_spec("rich") is None,
                                reason='rich not installed: pip install "fastmha[study]"')


@pytest.fixture
def at_once(monkeypatch):
    """No limits and peaks are measured, each arm is called a few times."""
    monkeypatch.setattr(shape.machine, "limits", lambda num_threads: LIMITS)
    monkeypatch.setattr(shape.memory, "measure", lambda work, num_threads, seconds: {
        "held_bytes": work.held, "peak_bytes": 2 * work.held, "seconds": {}})
    monkeypatch.setattr(shape, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(shape, "FULL_SECONDS", 0.0)


def run(*arguments):
    return main(["study", "--shape", *arguments])


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,4,5", "1,2,x,4", "0,1,8,1", "1,1,8,-1", "1,1.5,8,1", "", "²,1,8,1"])
def test_what_are_not_four_positive_integers_is_an_error_of_the_command_line(text, capsys):
    with pytest.raises(SystemExit) as status:
        run(text)
    assert status.value.code == 2
    assert f"argument --shape: must be four positive integers B,L,d_model,H such as 1,1024,768,12, got {text!r}" in (
        capsys.readouterr().err)


def test_d_model_that_heads_do_not_divide_is_an_error_of_the_command_line(capsys):
    with pytest.raises(SystemExit):
        run("1,5,10,3")
    assert "d_model must be a multiple of H, got 10 and 3" in capsys.readouterr().err


def test_shape_is_read_with_spaces():
    assert shape.parse(" 2, 5,12 ,3") == Shape(2, 5, 12, 3)


@needs_rich
def test_a_shape_too_large_is_a_sentence_before_anything_is_computed(monkeypatch, capsys):
    monkeypatch.setattr(memory, "free_bytes", lambda: 24_000_000_000)
    monkeypatch.setattr(shape, "examine", lambda *a, **k: pytest.fail("something was computed"))
    assert run("64,65536,4096,32") == 2
    assert capsys.readouterr().err == (
        "fastmha study --shape: a training step of B 64, L 65536, d_model 4096, 32 heads of width 128 holds at least 826 GB, "
        "more than half of the free memory, 24.0 GB\n")


@pytest.mark.parametrize("text", ["1,1,8,1", "2,20,12,3"])
def test_json_has_the_counts_of_the_analysis_and_what_was_measured(at_once, capsys, text):
    assert run(text, "--json", "--threads", "1", "--quick") == 0
    found, of = json.loads(capsys.readouterr().out), shape.parse(text)
    assert found["shape"] == {**of._asdict(), "dtype": "float32"}
    assert found["crossover_length"] == 2 * of.d_model
    assert found["kv_cache_bytes"] == 2 * of.B * of.L * of.d_model * 4
    for name, training in (("forward", False), ("training step", True)):
        flops = analysis.count_flops(*of, backward=training)
        assert sum(found["flops"][name].values()) == flops
        for algorithm in ("blas", "tiled"):
            counted = found["counted"][name][algorithm]
            total = analysis.count_memory_bytes(*of, algorithm=algorithm, backward=training)
            assert counted["bytes"] == total
            assert counted["roofline_seconds"] == max(flops / LIMITS["float32"], total["total"] / LIMITS["read"])
            assert found["peaks"][Work(*of, algorithm, training).arm]["peak_bytes"] == 2 * Work(*of, algorithm, training).held
        assert set(found["times"][name]) == {"blas, strided", "blas, contiguous", "tiled, strided", "tiled, contiguous"}
        for times in found["times"][name].values():
            assert times["calls"] == 3
            assert times["share_of_limit"] == pytest.approx(flops / times["median"] / LIMITS["float32"])
    assert found["plan"]["training step"]["reasons"]["decode"] == "it has no backward pass"
    assert found["threads"] == 1


@needs_rich
@pytest.mark.parametrize("text", ["1,1,8,1", "3,40,24,4"])
def test_tables_fit_in_80_columns_and_say_what_was_found(at_once, text):
    from rich.console import Console

    of = shape.parse(text)
    found, sheet = shape.examine(of, 1, True, "fastmha study"), io.StringIO()
    found["machine"]["cpu"] = "A CPU"
    shape.show(found, Console(width=80, file=sheet))
    lines = sheet.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == str(of)
    components = found["counted"]["training step"]["blas"]["bytes"]
    for name in (*components, "measured peak", "FLOP/byte", "tiled, contiguous", "layout"):
        assert any(line.startswith(name) for line in lines), name
    assert any("decode" in line for line in lines)


@needs_rich
def test_what_could_not_be_measured_is_said(at_once, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr(shape.memory, "measure", lambda *a: {"held_bytes": 1, "missing": "too large here"})
    sheet = io.StringIO()
    shape.show(shape.examine(Shape(1, 4, 8, 2), 1, True, ""), Console(width=300, file=sheet))
    assert "Not measured: too large here." in sheet.getvalue()


def test_arms_that_disagree_end_with_status_1(at_once, monkeypatch, capsys):
    monkeypatch.setattr(shape, "TOLERANCE", {"float32": 0.0})
    assert run("1,40,64,2", "--json") == 1
    assert "out of the arms blas, strided and" in capsys.readouterr().err


def test_without_rich_tables_are_refused_and_json_works(at_once, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run("1,4,8,2") == 2
    assert capsys.readouterr().err == 'fastmha study needs rich: pip install "fastmha[study]"\n'
    assert run("1,4,8,2", "--json") == 0


def test_interrupted_is_status_130(at_once, monkeypatch, capsys):
    def interrupted(*a):
        raise KeyboardInterrupt

    monkeypatch.setattr(shape, "timings", interrupted)
    assert run("1,4,8,2", "--json") == 130
    assert "interrupted" in capsys.readouterr().err


def test_peaks_are_measured_in_processes(monkeypatch):
    monkeypatch.setattr(shape.machine, "limits", lambda num_threads: LIMITS)
    monkeypatch.setattr(shape, "timings", lambda *a: {})
    found = shape.examine(Shape(1, 4, 8, 2), 1, True, "")
    assert set(found["peaks"]) == {"blas", "tiled", "blas, training", "tiled, training", "blas, weights"}
    assert all("peak_bytes" in peak or "does not tell" in peak["missing"] for peak in found["peaks"].values())
