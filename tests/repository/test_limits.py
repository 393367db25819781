"""The script benches/limits.py: its floors, its ratios, its checks of answers, on tiny sizes; no speed."""

import json
import math
import re
import sys

import numpy as np
import pytest
from support import script

import fastmha
from fastmha.study.cases import case
from fastmha.study.trial import ArmsDisagreeError

limits = script("benches", "limits")


# ------------------------------------------------------------------------------------------------ floors and tables

def test_a_floor_judges_what_is_printed(limits):
    most, least, between = limits.Floor(high=1.08), limits.Floor(low=1.0), limits.Floor(3.6, 4.4)
    assert (str(most), str(least), str(between)) == ("≤ 1.08", "≥ 1.00", "3.6 – 4.4")
    assert most.holds(1.084)
    assert not most.holds(1.0, 1.086)
    assert least.holds(0.996)
    assert not least.holds(0.994)
    assert between.holds(4.0)
    assert not between.holds(3.5)
    assert not between.holds(4.5)
    assert not most.holds(math.nan)


def test_a_finding_is_met_by_its_judged_columns_alone(limits):
    values = {"a": 1.0, "b": 2.0}
    assert limits.Finding("", values, limits.Floor(high=1.5), ("a",)).met is True
    assert limits.Finding("", values, limits.Floor(high=1.5), ("a", "b")).met is False
    assert limits.Finding("", values).met is None


def test_a_table_shows_each_line_with_floor_and_verdict(limits):
    floor = limits.Floor(high=1.1)
    text = str(limits.Table("title", [
        limits.Finding("kept", {"a": 1.0}, floor, ("a",)),
        limits.Finding("missed", {"a": 1.5, "b": "x"}, floor, ("a",)),
        limits.Finding("plain", {"a": 1.0})], "note"))
    lines = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    assert lines == [["title"], ["floor", "a", "b", "met"], ["kept", "≤ 1.10", "1.00", "yes"],
                     ["missed", "≤ 1.10", "1.50", "x", "NO"], ["plain", "1.00"], ["note"]]


# ------------------------------------------------------------------------------------------------ rates

def test_time_for_the_same_work_and_share_of_a_rate_are_inverse(limits):
    plain, slow = {"forward": 10.0}, {"forward": 8.0}
    assert limits.time_per_work(slow, plain) == {"forward": 1.25}
    assert limits.share(slow, plain) == {"forward": 0.8}


def test_interpolated_rates_lie_on_the_line(limits):
    points = {64: {"forward": 10.0}, 80: {"forward": 20.0}}
    for x, rate in ((64, 10.0), (72, 15.0), (80, 20.0)):
        assert limits.interpolated(x, points) == {"forward": rate}


def test_two_widths_take_the_time_of_each_product_at_its_own_rate(limits):
    of_D, of_Dv = dict.fromkeys(limits.PASSES, 10.0), dict.fromkeys(limits.PASSES, 30.0)
    for pass_, of_width, of_value_width in (("forward", 1, 1), ("backward", 3, 2), (limits.BOTH, 4, 3)):
        work, value_work = of_width * 64, of_value_width * 128
        rate = (work + value_work) / (work / 10 + value_work / 30)
        assert limits.two_widths(64, 128, of_D, of_Dv)[pass_] == pytest.approx(rate)


def test_rates_count_the_pairs_that_are_left(limits, monkeypatch):
    monkeypatch.setattr(limits, "best_times", lambda functions, seconds: dict.fromkeys(functions, 2.0))
    calls = [limits.draw("all", 2, 2, 6, 4, Dv=3), limits.draw("half", 2, 2, 6, 4, Dv=3, is_causal=True),
             limits.draw("long", 2, 2, 6, 4, Dv=3, key_padding_lengths=np.array([6, 2])),
             limits.draw("near", 2, 2, 6, 4, Dv=3, window=(1, 0)), limits.draw("cross", 2, 2, 6, 4, Dv=3, Lk=9)]
    rates = limits.flop_rates(calls, limits.parser().parse_args(["--seconds", "0"]))
    for label, pairs in {"all": 2 * 36, "half": 2 * 21, "long": 36 + 12, "near": 2 * 11, "cross": 2 * 54}.items():
        forward, backward = 2 * pairs * 2 * (4 + 3), 2 * pairs * 2 * (3 * 4 + 2 * 3)
        assert rates[label] == {"forward": forward / 2, "backward": backward / 2, limits.BOTH: (forward + backward) / 4}


# ------------------------------------------------------------------------------------------------ answers

@pytest.fixture(params=["plain", "BLHD", "grouped", "rules", "boolean", "additive", "cross"])
def call(request, limits):
    rng = np.random.default_rng(2)
    if request.param == "BLHD":
        return limits.as_projected("BLHD", case(2, 3, 40, 5))
    return {
        "plain": limits.draw("plain", 2, 3, 40, 5),
        "grouped": limits.draw("grouped", 2, 6, 40, 5, "float64", Hkv=2, Dv=3, softcap=3.0),
        "rules": limits.draw("rules", 2, 2, 40, 5, is_causal=True, window=(35, None),
                             key_padding_lengths=np.array([39, 36])),
        "boolean": limits.draw("boolean", 2, 2, 40, 5, mask=rng.random((40, 40)) < 0.1),
        "additive": limits.draw("additive", 2, 2, 40, 5, "float64", mask=rng.standard_normal((40, 40))),
        "cross": limits.draw("cross", 2, 2, 40, 5, Lk=50, is_causal=True, offset=10),
    }[request.param]


@pytest.mark.parametrize("sample", [3, 32, 100])
def test_right_answers_pass_the_check(limits, call, sample, monkeypatch):
    monkeypatch.setattr(sys.modules["checked"], "SAMPLE", sample)       # excerpts shift offsets and cut masks and lengths
    limits.check(call, 1)


@pytest.mark.parametrize("spoiled", ["out", "lse", "grad_q", "grad_k", "grad_v"])
@pytest.mark.parametrize("at", [0, -1])
def test_a_wrong_answer_is_found_at_either_end(limits, call, spoiled, at, monkeypatch):
    names = ("out", "lse", "grad_q", "grad_k", "grad_v")

    def spoil(function, names):
        def changed(*arguments, **keywords):
            results = function(*arguments, **keywords)
            for name, result in zip(names, results, strict=True):
                if name == spoiled:
                    result.flat[at] += 1
            return results
        return changed

    monkeypatch.setattr(fastmha, "attention", spoil(fastmha.attention, names[:2]))
    monkeypatch.setattr(fastmha, "attention_backward", spoil(fastmha.attention_backward, names[2:]))
    with pytest.raises(ArmsDisagreeError, match=rf"{call.label}: (out|lse|grad_.) is off by "):
        limits.check(call, 1)


# ------------------------------------------------------------------------------------------------ sections

def test_memory_counts_inputs_outputs_and_what_lies_above(limits):
    found = limits.memory_of(64, 1)
    array, lse = 8 * 64 * 64 * 4, 8 * 64 * 4
    assert (found["inputs"], found["outputs"]) == (4 * array, 4 * array + lse)
    assert found["above"] == found["peak"] - found["resident"] - found["outputs"]
    assert found["scratch"] > 0


def test_balance_is_judged_while_each_thread_has_twelve_blocks(limits):
    assert limits.judged_threads(case(1, 12, 1024, 64)) == 16       # 192 blocks of 64 queries
    assert limits.judged_threads(case(1, 1, 64 * 11, 64)) == 0
    assert limits.judged_threads(case(64, 64, 1024, 64)) == 128
    line = limits.balance_line(case(1, 2, 64 * 12, 64), "forward")
    assert (line.values["judged to"], line.met) == ("2", True)
    assert line.values["4"].startswith("(")
    assert limits.balance_line(case(1, 1, 64, 64), "forward").met is None


@pytest.fixture
def tiny(limits, monkeypatch):
    for name, value in {
        "LENGTHS": (32,), "DECODE_KEYS": 20, "CROSS": (12, 40), "CROSS_SQUARE": 22, "GROWTH_LENGTHS": (8, 16),
        "CAUSAL_AT": 8, "QUERIES": ((1, 2), (9, 1)), "KEYS": (5,), "CROSSOVER_WIDTHS": (8,), "REPEATS": 1,
        "INPUT_LENGTH": 20, "COLD_BYTES": 100_000, "COLD_KEYS": 5, "STREAM_KEYS": 5, "STREAM_BYTES": (100_000, 200_000),
        "MANY_SHORT": ((2, 3, 3, 4, 4, 8), (5, 2, 1, 1, 3, 8)),
        "SQUARES": ((1, 2, 768, 8),), "SHARED": (("two heads", {"B": 1, "H": 2, "L": 40, "D": 8}),),
        "SHOWN_THREADS": (1, 2), "DECODES": ((1, 4, 2, 20, 8),),
    }.items():
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(limits.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize("section", ["cliffs", "inputs", "growth", "crossover", "balance", "threads", "calls"])
def test_a_section_prints_its_tables_and_writes_them(limits, tiny, section, tmp_path, capsys):
    status = limits.main(["--only", section, "--seconds", "0", "--json", str(tmp_path / "limits.json")])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "limits.json").read_text(encoding="utf-8"))
    assert found["command"].startswith(f"python benches/limits.py --only {section} ")
    assert list(found["sections"]) == [section]
    lines = [line for table in found["sections"][section] for line in table["lines"]]
    assert any(line["met"] is not None for line in lines)
    for line in lines:
        assert f"  {line['what']} " in printed
        assert (line["met"] is None) == (line["floor"] is None)
    missed = sum(line["met"] is False for line in lines)
    assert f"{missed} missed" in printed
    assert status == (1 if missed else 0)


@pytest.mark.parametrize("arguments", [
    ["--only", "all"], ["--threads", "0"], ["--seconds", "-1"], ["--seconds", "nan"]], ids="=".join)
def test_wrong_arguments_end_with_usage(limits, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        limits.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")
