"""The settings of the machine: defaults, files with an error for each wrong one, and the command that measures them."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
from support import raises, selected

import fastmha
from fastmha import _core, tune, tuning
from fastmha.__main__ import main

PLAIN = {name: dataclasses.asdict(of) for name, of in tuning.DEFAULTS.items()}


@pytest.fixture
def unread(monkeypatch):
    """As before the first use."""
    monkeypatch.setattr(tuning, "_tables", None)
    monkeypatch.setattr(tuning, "_source", None)
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    return monkeypatch


def written(path, isa, cpu=None, **changed):
    """A file of settings, the defaults but for those that are changed."""
    of = dataclasses.replace(tuning.DEFAULTS[isa], **changed)
    path.write_text(tuning.text_of(tuning.cpu_name() if cpu is None else cpu, {isa: of}), "utf-8")
    return path


def python(code, cwd, **environment):
    inherited = {name: value for name, value in os.environ.items() if name not in ("FASTMHA_ISA", tuning.VARIABLE)}
    return subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], cwd=cwd, env=inherited | environment,
                          capture_output=True, text=True, timeout=60)  # fmt: skip


def algorithm(rows, Lk, D):
    x = np.broadcast_to(np.float32(0), (1, 1, rows, D)), *np.broadcast_to(np.float32(0), (2, 1, 1, Lk, D))
    return fastmha.plan(*x).algorithm


# ----------------------------------------------------------------------------------------------------- which settings


def test_every_instruction_set_has_defaults_and_they_are_used_without_the_variable(unread):
    assert set(_core.runnable_isas()) <= set(tuning.DEFAULTS)
    for isa in _core.runnable_isas():
        with selected(isa):
            assert tuning.current() is tuning.DEFAULTS[isa]
            assert tuning.current().products_by_blas is not _core.fused_multiply_add()
    assert tuning.source() is None


def test_a_file_changes_the_plan_of_a_call_in_its_instruction_set_alone(unread, tmp_path):
    path = written(tmp_path / "t.json", "avx2", decode=[[16, 64, 0]], contiguous=[7, 4, 8])
    assert algorithm(16, 300, 32) != "decode"
    unread.setattr(tuning, "_tables", None)
    unread.setenv(tuning.VARIABLE, str(path))
    for isa in _core.runnable_isas():
        with selected(isa):
            assert (algorithm(16, 300, 32) == "decode") == (isa == "avx2")
            layout, why = fastmha.planning.choose_layout(7, 4, False)
            assert layout == "contiguous" if isa == "avx2" else why.startswith("7 tokens per batch row, below 256")
    assert tuning.source() == str(path)


def test_the_file_is_read_once(unread, tmp_path):
    path = written(tmp_path / "t.json", "baseline", decode=[])
    unread.setenv(tuning.VARIABLE, str(path))
    with selected("baseline"):
        first = tuning.current()
        path.write_text("{", "utf-8")
        assert tuning.current() is first
        assert first.decode == ()
        assert algorithm(1, 4096, 64) != "decode"


def test_settings_of_another_cpu_are_left_alone_and_a_warning_says_so(unread, tmp_path):
    path = written(tmp_path / "t.json", "baseline", cpu="Z80", decode=[])
    unread.setenv(tuning.VARIABLE, str(path))
    with selected("baseline"), pytest.warns(RuntimeWarning) as caught:
        assert tuning.current() is tuning.DEFAULTS["baseline"]
    assert str(caught[0].message) == (
        f"FASTMHA_TUNING: {path} was measured on 'Z80', this is {tuning.cpu_name()!r}: the defaults are used")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.source() is None      # once is enough


def test_the_bits_of_a_call_are_those_of_every_process_with_the_file(tmp_path):
    path = written(tmp_path / "t.json", "baseline", decode=[[4, 4, 0]], attention_by_blas=True, contiguous=[2, 4, 8])
    code = """
        import hashlib, numpy as np, fastmha
        q, k = (np.random.default_rng(0).standard_normal((1, 2, n, 16), np.float32) for n in (4, 700))
        x = np.random.default_rng(1).standard_normal((2, 40, 32), np.float32)
        m = fastmha.MultiHeadAttention(32, 2, rng=0)
        print(fastmha.plan(q, k, k).algorithm, m.plan(2, 40).layout)
        print(hashlib.sha256(fastmha.attention(q, k, k).tobytes() + m.forward(x).tobytes()).hexdigest())
        fastmha.show_config()
    """
    runs = [python(code, tmp_path, FASTMHA_ISA="baseline", FASTMHA_TUNING=str(path), FASTMHA_NUM_THREADS=threads)
            for threads in ("1", "2", "1")]
    assert all(ran.returncode == 0 for ran in runs), runs[0].stderr
    assert len({"".join(ran.stdout.splitlines()[:2]) for ran in runs}) == 1
    assert runs[0].stdout.startswith("decode ")
    assert f"tuning:  {path}\n" in runs[0].stdout


# -------------------------------------------------------------------------------------------------------- wrong files

KEYS = "decode, decode_float64, decode_half, one_part_forward, one_part_backward, two_parts_forward, two_parts_backward, " \
       "one_part_products, two_parts_products, contiguous, attention_by_blas, products_by_blas"


def put(key, value):
    """A file with one thing changed, by its path of keys."""
    found = {"format": 3, "cpu": tuning.cpu_name(), "settings": json.loads(json.dumps({"avx2": PLAIN["avx2"]}))}
    *path, last = key
    at = found
    for name in path:
        at = at[name]
    at[last] = value
    return json.dumps(found)


def of(name, value):
    return put(("settings", "avx2", name), value)


WRONG = {
    "no JSON": ("{", " must be JSON: ..."),
    "deep": ("[" * 100_000, " must be JSON: ..."),
    "long": (" " * ((1 << 20) + 1), " must be a file of `fastmha tune`, got more than 1048576 bytes"),
    "no object": ("[1]", ": the file must be an object with format, cpu, settings, got [1]"),
    "no settings": ('{"format": 3, "cpu": "x"}',
                    ": the file must be an object with format, cpu, settings, got an object with format, cpu"),
    "format": (put(("format",), 1), ": format must be 3, got 1"),
    "truth": (put(("format",), True), ": format must be 3, got True"),
    "cpu": (put(("cpu",), None), ": cpu must be the name of a CPU, got None"),
    "list": (put(("settings",), []), ": settings must be an object, got []"),
    "isa": (put(("settings", "sse9"), {}),
            ": a key of settings must be one of baseline, avx2, avx512, avx512bf16, amx, amx-emulated, got 'sse9'"),
    "empty": (put(("settings", "avx2"), {}), f": settings.avx2 must be an object with {KEYS}, got an object with nothing"),
    "more": (of("tea", 1), f": settings.avx2 must be an object with {KEYS}, got an object with {KEYS}, tea"),
    "steps": (of("decode", 8), ": settings.avx2.decode must be a list of steps, got 8"),
    "step": (of("decode", [[1, 64]]), ": settings.avx2.decode[0] must be [rows, bytes of a key, bytes of all keys], got [1, 64]"),
    "bytes": (of("decode", [[1, -1, 0]]), ": settings.avx2.decode[0] (bytes of a key) must be an integer of at least 0, got -1"),
    "order": (of("decode", [[2, 64, 0], [1, 64, 0]]),
              ": settings.avx2.decode must be steps of ascending rows, got [[2, 64, 0], [1, 64, 0]]"),
    "half": (of("contiguous", [1.5, 2, 3]), ": settings.avx2.contiguous (tokens) must be an integer of at least 1, got 1.5"),
    "below a tile": (of("one_part_forward", [8, 32]),
                     ": settings.avx2.one_part_forward (rows) must be an integer of at least 16, got 8"),
    "no rows": (of("one_part_products", [0, 32]),
                ": settings.avx2.one_part_products (rows) must be an integer of at least 1, got 0"),
    "keys": (of("two_parts_forward", [64, True]),
             ": settings.avx2.two_parts_forward (keys) must be an integer of at least 32, got True"),
    "number": (of("products_by_blas", 1), ": settings.avx2.products_by_blas must be true or false, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_an_error_that_names_file_key_and_what_came_at_every_call(unread, tmp_path, name):
    content, message = WRONG[name]
    path = tmp_path / "t.json"
    path.write_text(content, "utf-8")
    unread.setenv(tuning.VARIABLE, str(path))
    for _ in range(2):      # nothing half-read is left behind
        with raises(ValueError, f"FASTMHA_TUNING: {path}{message}"):
            algorithm(1, 10, 8)


def test_a_file_that_is_not_there_is_an_error(unread, tmp_path):
    unread.setenv(tuning.VARIABLE, str(tmp_path / "none.json"))
    with raises(ValueError, f"FASTMHA_TUNING: {tmp_path / 'none.json'} cannot be read: No such file or directory"):
        tuning.current()


@pytest.mark.parametrize("isa", tuning.DEFAULTS)
def test_settings_that_are_written_read_back(tmp_path, isa):
    cpu, settings = tuning.read(written(tmp_path / "t.json", isa), "it")
    assert cpu == tuning.cpu_name()
    assert {name: dataclasses.asdict(found) for name, found in settings.items()} == {isa: PLAIN[isa]}


# --------------------------------------------------------------------------------------------------------- the command


def setting(default, others, above=lambda least, shape: shape[0] >= least):
    return tune.Setting("least", default, others, [(n,) for n in (8, 4, 2, 1)], None, above, None)


def test_a_setting_changes_where_that_pays_by_more_than_five_percent():
    pays = [(2.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, 3.0)]      # of the shapes 8, 4, 2, 1: from 4 on
    verdict = tune.judged(setting(16, [8, 4, 2, 1]), pays)
    assert verdict.value == 4
    assert verdict.pays == pytest.approx(2**0.5)
    little = [(1.04, 1.0)] * 4
    assert tune.judged(setting(16, [8, 4, 2, 1]), little).value == 16
    assert tune.judged(setting(1, [8, 4, 2, 16]), little).pays == 1
    assert tune.judged(setting(3, [4]), pays).value == 3        # the default among equals


@pytest.mark.parametrize("isa", _core.runnable_isas())
def test_every_setting_has_shapes_on_both_sides_and_values_that_a_file_may_hold(isa, tmp_path):
    default = tuning.DEFAULTS[isa]
    named = set()
    with selected(isa):
        asked, has_tiles = list(tune.settings(default)), _core.has_tiles()
    for of in asked:
        named.add(of.name.partition("[")[0])
        assert {of.above(value, shape) for value in [of.default, *of.others] for shape in of.shapes} == {False, True}
        for value in of.others:
            path = tmp_path / "t.json"
            path.write_text(tuning.text_of("x", {isa: of.put(default, value)}), "utf-8")
            assert tuning.read(path, "it")[1][isa] is not None
    assert named == {field.name for field in dataclasses.fields(tuning.Tuning)} - (set() if has_tiles else set(tuning.OF_TILES))


def test_the_command_writes_a_file_that_reads_back_and_keeps_other_instruction_sets(unread, tmp_path, capsys):
    path, before = written(tmp_path / "t.json", "avx2", decode=[]), _core.selected_isa()
    assert main(["tune", "--isa", "baseline", "--seconds", "1e-9", "--out", str(path)]) == 0
    said = capsys.readouterr().out
    cpu, settings = tuning.read(path, "it")
    assert cpu == tuning.cpu_name()
    assert set(settings) == {"baseline", "avx2"}
    assert settings["avx2"].decode == ()
    for name in ("attention_by_blas", "products_by_blas", "contiguous", "decode[3]"):
        assert f"\n{name} " in said
    assert f"FASTMHA_TUNING={path} uses these settings" in said
    assert _core.selected_isa() == before
    unread.setenv(tuning.VARIABLE, str(path))
    with selected("baseline"):
        assert dataclasses.asdict(tuning.current()) == dataclasses.asdict(settings["baseline"])


def test_the_command_writes_over_nothing_but_settings_of_this_cpu(tmp_path, capsys):
    path = tmp_path / "t.json"
    path.write_text("my thesis", "utf-8")
    assert main(["tune", "--out", str(path)]) == 2
    assert f"fastmha tune: --out: {path} must be JSON" in capsys.readouterr().err
    assert path.read_text("utf-8") == "my thesis"
    assert main(["tune", "--out", str(written(path, "avx2", cpu="Z80"))]) == 2
    assert f"fastmha tune: --out: {path} was measured on 'Z80', this is" in capsys.readouterr().err
    assert main(["tune", "--out", str(tmp_path / "none" / "t.json")]) == 2
    assert f"fastmha tune: --out: there is no folder {tmp_path / 'none'}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--isa", "sse9"], ["--seconds", "0"], ["--seconds", "inf"], ["--seconds", "x"]])
def test_the_command_refuses_what_it_cannot_measure(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["tune", *arguments])
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err
