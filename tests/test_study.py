"""The study: FLOPs and bytes against brute-force counts, arms that agree, complete results, the command line."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

import fastmha
from fastmha import algorithms
from fastmha.__main__ import main
from fastmha.study import __main__ as command
from fastmha.study import cases, runner
from fastmha.study.cases import DIRECTIONS, Case

TINY = [
    Case(2, 3, 3, 5, 5, 4),
    Case(1, 4, 2, 6, 6, 3, causal=True, dtype="float64"),
    Case(2, 2, 1, 3, 7, 5, causal=True),
    Case(1, 2, 2, 7, 3, 4, causal=True, dtype="float64"),       # the first queries see no key
    Case(3, 1, 1, 1, 4, 2),
    Case(2, 4, 2, 70, 70, 3, causal=True, algorithm="tiled"),
]
tiny = pytest.mark.parametrize("case", TINY, ids=lambda case: case.label)
directions = pytest.mark.parametrize("direction", DIRECTIONS)
EXTRA = [name for name in command.EXTRA if importlib.util.find_spec(name) is None]
needs_extra = pytest.mark.skipif(bool(EXTRA), reason=f'{", ".join(EXTRA)} not installed: pip install "fastmha[study]"')


def run_python(*arguments, tmp_path):
    """Python in a folder without the source tree, so that the installed package is the one that runs."""
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


# ------------------------------------------------------------------------------------------------ cases

def allowed_pairs(case):
    """The pairs of one head, one by one, from the rule itself."""
    return [(i, j) for i in range(case.Lq) for j in range(case.Lk) if not case.causal or j <= i + case.Lk - case.Lq]


@tiny
def test_flops_of_a_case_match_a_count_product_by_product(case):
    multiply_adds = {"forward": 0, "backward": 0}
    for _ in range(case.B * case.H):
        for _ in allowed_pairs(case):
            multiply_adds["forward"] += case.D      # the score q_i . k_j
            multiply_adds["forward"] += case.D      # out_i += p v_j
            multiply_adds["backward"] += case.D     # the score again
            multiply_adds["backward"] += case.D     # the gradient of p: grad_out_i . v_j
            multiply_adds["backward"] += case.D     # grad_q_i += s k_j
            multiply_adds["backward"] += case.D     # grad_k_j += s q_i
            multiply_adds["backward"] += case.D     # grad_v_j += p grad_out_i
    for direction in DIRECTIONS:
        assert case.flops(direction) == 2 * multiply_adds[direction]
    assert case.flops("forward+backward") == sum(2 * n for n in multiply_adds.values())


@pytest.mark.parametrize("case", [*TINY, *cases.FULL], ids=lambda case: case.label)
def test_flops_of_a_case_are_those_of_the_plan(case):
    q = np.broadcast_to(np.zeros((), case.dtype), (case.B, case.H, case.Lq, case.D))
    k = np.broadcast_to(np.zeros((), case.dtype), (case.B, case.Hkv, case.Lk, case.D))
    assert fastmha.plan(q, k, k, **case.keywords).flops == case.flops("forward")
    assert fastmha.plan(q, k, k, **case.keywords, backward=True).flops == case.flops("forward+backward")


@tiny
def test_bytes_of_a_case_are_those_of_its_arrays(case):
    o = runner.Operands(case)
    inputs = o.q.nbytes + o.k.nbytes + o.v.nbytes
    assert case.packed_bytes("forward") == inputs
    assert case.packed_bytes("backward") == inputs + o.grad_out.nbytes
    assert case.operand_bytes("forward") == inputs + o.out.nbytes + o.lse.nbytes
    assert case.operand_bytes("backward") == 2 * inputs + o.grad_out.nbytes + o.lse.nbytes


@tiny
def test_operands_lie_as_a_fused_projection_writes_them(case):
    o = runner.Operands(case)
    rows = {x.strides[2] for x in (o.k, o.v, o.grad_k, o.grad_v)}
    assert rows == {case.row_bytes}
    assert case.Lq != case.Lk or o.q.strides[2] == case.row_bytes
    for x in (o.q, o.k, o.v, o.out, o.grad_out):
        assert x.strides[1:] == (case.D * case.itemsize, x.strides[2], case.itemsize)
        assert x.dtype == case.dtype


def test_labels_name_one_case_each():
    labels = [case.label for case in cases.FULL]
    assert len(set(labels)) == len(labels)
    assert Case(1, 16, 4, 512, 1024, 64, causal=True, dtype="float64").label == "B1 H16/4 L512x1024 D64 causal f64"
    assert Case(1, 2, 2, 8, 8, 4, algorithm="tiled").label == "B1 H2 L8 D4 f32 tiled"


def test_the_quick_study_is_part_of_the_full_one():
    assert cases.FULL[:len(cases.QUICK)] == cases.QUICK


# ------------------------------------------------------------------------------------------------ runner

@tiny
def test_arms_give_the_answers_of_the_public_functions(case):
    o = runner.Operands(case)
    out, lse = fastmha.attention(o.q, o.k, o.v, return_lse=True, **case.keywords)
    grads = fastmha.attention_backward(o.grad_out, o.q, o.k, o.v, out, lse, **case.keywords)
    expected = {"out": out, "lse": lse, **dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True))}
    for direction in DIRECTIONS:
        for arm in ("strided", "contiguous"):
            for array in o.results(direction).values():
                array[...] = np.nan
            runner.arms(o, direction, 2)[arm]()
            for name, got in o.results(direction).items():
                np.testing.assert_allclose(got, expected[name], rtol=1e-5, atol=1e-5, err_msg=f"{arm} {name}")


@directions
def test_the_pack_arm_copies_the_bytes_that_the_case_states(direction, monkeypatch):
    case, copied = TINY[2], []

    def counted(x, threads):
        copied.append(x.nbytes)
        return packed(x, threads)

    packed = algorithms.packed
    monkeypatch.setattr(algorithms, "packed", counted)
    runner.arms(runner.Operands(case), direction, 1)["pack"]()
    assert sum(copied) == case.packed_bytes(direction)


@pytest.mark.parametrize(("direction", "wrong"), [("forward", "out"), ("forward", "lse"), ("backward", "grad_k")])
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_arms_that_disagree_are_not_timed(direction, wrong, value, monkeypatch):
    real = runner.arms

    def spoiled(operands, direction, threads):
        functions = real(operands, direction, threads)
        contiguous = functions["contiguous"]

        def spoil():
            contiguous()
            operands.results(direction)[wrong].flat[0] += value

        return {**functions, "contiguous": spoil}

    monkeypatch.setattr(runner, "arms", spoiled)
    monkeypatch.setattr(runner, "interleave", lambda *a: pytest.fail("timed"))
    with pytest.raises(runner.ArmsDisagreeError, match=f"B2 H3 L5 D4 f32 {direction}: {wrong} of the strided and the "):
        runner.measure(runner.Operands(TINY[0]), direction, 1, 0.0)


def test_rounds_run_every_arm_once_in_turning_order():
    called = []
    functions = {name: (lambda name=name: called.append(name)) for name in "abc"}
    times = runner.interleave(functions, 0.0)
    assert "".join(called) == "abcbcacab"
    assert [len(values) for values in times.values()] == [runner.LEAST_ROUNDS] * 3


def test_rounds_end_when_the_time_is_used_up_or_there_are_enough(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(clock))
    assert runner.LEAST_ROUNDS < len(runner.interleave({"a": lambda: None}, 30)["a"]) < 30     # two looks a round
    assert len(runner.interleave({"a": lambda: None}, 10**6)["a"]) == runner.MOST_ROUNDS


@directions
def test_a_measurement_keeps_best_median_and_the_ratio_within_rounds(direction, monkeypatch):
    times = {"strided": np.array([4.0, 2.0, 9.0]), "contiguous": np.array([2.0, 2.0, 3.0]), "pack": np.ones(3)}
    monkeypatch.setattr(runner, "interleave", lambda functions, seconds: times)
    m = runner.measure(runner.Operands(TINY[0]), direction, 1, 0.0)
    assert (m.rounds, m.best["strided"], m.median["strided"]) == (3, 2.0, 4.0)
    assert (m.ratio_low, m.ratio, m.ratio_high) == (1.5, 2.0, 2.5)      # of 2, 1, 3
    assert m.gflops("strided") == TINY[0].flops(direction) / 4e9


def measured_tiny():
    labels = []
    measured = runner.run(TINY[:2], 1, 0.0, labels.append)
    assert labels == [f"{case.label} {direction}" for case in TINY[:2] for direction in DIRECTIONS]
    return measured


def test_results_survive_json_and_say_where_and_how_they_were_measured(tmp_path):
    found = runner.results(measured_tiny(), 1, "fastmha study --quick")
    runner.write_json(tmp_path / "results.json", found)
    read = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert read == found
    assert read["command"] == "fastmha study --quick"
    assert read["threads"] == 1
    assert read["versions"]["fastmha"] == fastmha.__version__
    assert {"python", "numpy", "scipy"} < read["versions"].keys()
    assert read["machine"]["cpu"]
    assert read["machine"]["cpus_usable"] >= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", read["date"])
    assert len(read["measurements"]) == 4
    for m in read["measurements"]:
        case = Case(**m["case"])
        assert asdict(case) == m["case"]
        assert m["label"] == case.label
        assert m["flops"] == case.flops(m["direction"])
        assert m["best_seconds"].keys() == m["median_seconds"].keys() == set(runner.ARMS)
        assert all(0 < m["best_seconds"][arm] <= m["median_seconds"][arm] for arm in runner.ARMS)
        low, high = m["strided_over_contiguous"]["quartiles"]
        assert 0 < low <= m["strided_over_contiguous"]["median"] <= high


# ------------------------------------------------------------------------------------------------ the command

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


@pytest.fixture
def short_study(monkeypatch):
    monkeypatch.setattr(cases, "QUICK", (*TINY[:2], replace(TINY[0], B=1)))
    monkeypatch.setattr(command, "QUICK_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "100")


@needs_extra
@pytest.mark.parametrize("entry", [lambda a: main(["study", *a]), command.main], ids=["fastmha study", "fastmha.study"])
def test_the_study_prints_a_table_and_saves_results_and_a_picture(entry, short_study, tmp_path, capsys):
    assert entry(["--quick", "--threads", "1", "--out", str(tmp_path / "a" / "b")]) == 0
    printed = capsys.readouterr().out
    for case in cases.QUICK:
        assert case.label in printed
    assert "1 thread," in printed
    found = json.loads((tmp_path / "a" / "b" / "results.json").read_text(encoding="utf-8"))
    assert found["command"].startswith("fastmha study --quick --threads 1 --out ")
    assert len(found["measurements"]) == 2 * len(cases.QUICK)
    assert (tmp_path / "a" / "b" / "strided_over_contiguous.png").read_bytes().startswith(b"\x89PNG")


@needs_extra
def test_the_table_fits_a_terminal_of_80_columns(monkeypatch, capsys):
    from rich.console import Console

    monkeypatch.setattr(runner, "interleave", lambda functions, seconds: dict.fromkeys(functions, np.full(3, 0.1)))
    longest = Case(32, 16, 4, 512, 512, 128, causal=True, algorithm="tiled")
    operands = runner.Operands(replace(longest, B=1, H=4, Lq=8, Lk=8, D=4))
    measured = [replace(runner.measure(operands, direction, 1, 0.0), case=longest) for direction in DIRECTIONS]
    Console(width=80).print(command.table(measured, runner.results(measured, 1, "")))
    printed = capsys.readouterr().out
    assert f"{longest.shape} f32" in printed
    assert "  tiled" in printed
    assert "…" not in printed


@needs_extra
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["study", "--quick", "--out", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith(f"fastmha study cannot make the folder {tmp_path / 'file'}: ")


@needs_extra
def test_arms_that_disagree_end_the_study_with_status_1(short_study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "check", lambda *a: (_ for _ in ()).throw(runner.ArmsDisagreeError("they differ")))
    assert main(["study", "--quick", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "fastmha study: they differ\n"
    assert not list(tmp_path.iterdir())
