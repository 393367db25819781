"""The script benches/steps.py: its sections, its checks of answers, on tiny sizes; no speed."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from support import script

import fastmha
from fastmha.study.trial import ArmsDisagreeError

steps = script("benches", "steps")
RIVALS = ["fastmha", *(["torch"] if find_spec("torch") else [])]       # ours stands in for PyTorch, which is no test's need
SECTIONS = ["step", "half", "weights", "small", "layout"]


@pytest.fixture
def tiny(steps, monkeypatch):
    for name, value in {
        "COLD_BYTES": 40e3, "REST": 0, "TURNS": 2, "REPEATS": 1, "ROOM": 3, "HALF_CASES": ((4, 2, 16),), "HALF_KEYS": (20,),
        "LAYOUT_CASES": ((4, 2, 16),), "LAYOUT_LENGTHS": (20,), "LAYOUT_BATCHES": (1, 2),
        "WEIGHTS_CASES": (steps.Decoder(2, 32, 4, 2, 20),),
        "DECODERS": (steps.Decoder(2, 32, 4, 2, 20),), "has": lambda package: True, "RIVAL": "fastmha",
    }.items():
        monkeypatch.setattr(steps, name, value)


# ------------------------------------------------------------------------------------------------ what is timed

def test_copies_exceed_the_bytes_of_a_cold_call_and_one_fewer_do_not(steps):
    for nbytes in (1, 3e6, 50e6, 100e6, 101e6):
        copies = steps.copies_of(nbytes)
        assert copies * nbytes > steps.COLD_BYTES
        assert copies == 1 or (copies - 1) * nbytes <= steps.COLD_BYTES


@pytest.mark.parametrize("of", [(1, 32, 4, 2, 20), (2, 32, 2, 2, 9), (3, 8, 4, 1, 0)])
def test_the_wanted_answer_is_attention_over_past_and_new_token_written_out_by_head(steps, of):
    of = steps.Decoder(*of)
    o = {name: x.astype(np.float64) for name, x in of.operands().items()}
    q, k, v = (o["X"] @ o[name] for name in ("W_Q", "W_K", "W_V"))
    heads = np.empty((of.B, of.H, of.D))
    for b, h in np.ndindex(of.B, of.H):
        kv, part = h // (of.H // of.Hkv), slice(h * of.D, (h + 1) * of.D)
        kv_part = slice(kv * of.D, (kv + 1) * of.D)
        keys, values = np.vstack((o["k"][b, kv], k[b, :, kv_part])), np.vstack((o["v"][b, kv], v[b, :, kv_part]))
        weights = np.exp(keys @ q[b, 0, part] / np.sqrt(of.D))
        heads[b, h] = weights @ values / weights.sum()
    np.testing.assert_allclose(of.answer()[:, 0], heads.reshape(of.B, -1) @ o["W_O"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("library", RIVALS)
@pytest.mark.parametrize("of", [(1, 32, 4, 2, 20), (2, 32, 2, 2, 9)])
def test_an_arm_computes_the_step_on_each_copy_and_again_after_it_was_timed(steps, tiny, library, of):
    of = steps.Decoder(*of)
    arm = steps.ARMS[library](of, 1)
    assert of.copies == len(arm.copies) > 1
    wanted = of.answer()
    with arm.rules:
        for copies in (1, of.copies):
            times = arm.times(copies, 0)
            assert set(times) == set(arm.steps)
            assert all(0 < seconds < 60 for seconds in times.values())
            for answers in arm.answers().values():
                assert len(answers) == of.copies
                for answer in answers:
                    steps.agree(library, np.array(answer), wanted, "float32")


def test_a_timed_step_finds_the_cache_at_the_length_it_was_given(steps, tiny):
    of = steps.DECODERS[0]
    arm = steps.ARMS["fastmha"](of, 1)
    arm.times(of.copies, 0)
    assert [cache.length for _, cache in arm.copies] == [of.tokens] * of.copies


# ------------------------------------------------------------------------------------------------ answers

@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("section", ["step", "half", "weights", "layout"])
def test_a_wrong_answer_at_either_end_stops_a_section(steps, tiny, section, at, monkeypatch):
    def spoil(owner, name):
        function = getattr(owner, name)

        def changed(*arguments, **keywords):
            out = function(*arguments, **keywords).copy()
            out.flat[at] += 1
            return out
        monkeypatch.setattr(owner, name, changed)

    owner, name = {"step": (steps.Decoder, "answer"), "half": (fastmha.KVCache, "attend"), "layout": (fastmha, "attention"),
                   "weights": (fastmha.MultiHeadAttention, "forward")}[section]
    spoil(owner, name)
    with pytest.raises(ArmsDisagreeError, match=r" is off by "):
        steps.main(["--only", section, "--seconds", "0"])


@pytest.mark.parametrize("spoiled", ["forward", "projection", "output projection"])
def test_a_wrong_answer_stops_the_small_step(steps, tiny, spoiled, monkeypatch):
    product, outputs = steps.algorithms.product, {"projection": (1, 192), "output projection": (1, 64)}

    def changed(a, b, out, threads, **rules):
        product(a, b, out, threads, **rules)
        if not rules and out.shape == outputs[spoiled]:     # the module's own have rules
            out += 1

    if spoiled == "forward":
        monkeypatch.setattr(fastmha.MultiHeadAttention, "forward", lambda self, X, **rules: X)
    else:
        monkeypatch.setattr(steps.algorithms, "product", changed)
    with pytest.raises(ArmsDisagreeError, match=r"small step.* is off by "):
        steps.small_arms(1)


# ------------------------------------------------------------------------------------------------ sections

@pytest.mark.parametrize(("section", "threads"), [*((section, 1) for section in SECTIONS), ("step", 2)])
def test_a_section_prints_its_tables_and_writes_them(steps, tiny, section, threads, tmp_path, capsys):
    status = steps.main(["--only", section, "--seconds", "0", "--threads", str(threads), "--json", str(tmp_path / "steps.json")])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))
    assert found["command"].startswith(f"python benches/steps.py --only {section} ")
    assert list(found["sections"]) == [section]
    tables = found["sections"][section]
    lines = [line for table in tables for line in table["lines"]]
    for line in lines:
        assert f"  {line['what']} " in printed
        assert all(value > 0 for name, value in line["values"].items() if isinstance(value, float) and name != "beyond")
    floors = {"step": {1: "≥ 1.80", 2: "≥ 1.40"}[threads], "half": "≥ 1.60", "weights": "≥ 1.70", "small": "≤ 15.00",
              "layout": None}
    assert {line["floor"] for line in lines} == {floors[section]}
    assert all((line["met"] is None) == (line["floor"] is None) for line in lines)
    lengths = {"step": [2], "half": [1], "weights": [1], "small": [1], "layout": [2, 2, 2]}
    assert [len(table["lines"]) for table in tables] == lengths[section]
    missed = sum(line["met"] is False for line in lines)
    assert f"{missed} missed" in printed
    assert status == (1 if missed else 0)


def test_ratios_are_the_times_beside_them(steps, tiny):
    options = steps.options_of("", steps.SECTIONS).parse_args(["--seconds", "0"])
    for section, own, other, ratio in (
        ("step", "fastmha", "torch", "times as fast"), ("half", "float16", "float32", "float16 is"),
        ("layout", "head-major", "length-major", "length/head"),
    ):
        for table in steps.SECTIONS[section](options):
            for finding in table.findings:
                assert finding.values[ratio] == pytest.approx(finding.values[other] / finding.values[own])
    (table,) = steps.small(options)
    values = table.findings[0].values
    assert values["beyond"] == pytest.approx(values["step"] - values["products"])


def test_without_torch_its_section_says_so_and_misses_nothing(steps, tiny, monkeypatch, capsys):
    monkeypatch.setattr(steps, "has", lambda package: False)
    assert steps.main(["--only", "step", "--seconds", "0"]) == 0
    printed = capsys.readouterr().out
    assert "PyTorch is not installed, so there is nothing to compare with: `pip install torch` and run this again." in printed
    assert "0 floors met, 0 missed" in printed


def test_without_ml_dtypes_float16_alone_is_judged(steps, tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    (table,) = steps.half(steps.options_of("", steps.SECTIONS).parse_args(["--seconds", "0"]))
    assert "bfloat16 needs ml_dtypes, which is not installed" in str(table)
    assert [finding.judged for finding in table.findings] == [("float16 is",)]


@pytest.mark.parametrize("arguments", [["--only", "all"], ["--threads", "0"], ["--seconds", "-1"]], ids="=".join)
def test_wrong_arguments_end_with_usage(steps, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        steps.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")
