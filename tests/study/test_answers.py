"""What the study says of heads, crossover and layers: from records whose times are known, and from arms that run."""

from dataclasses import replace

import numpy as np
import pytest

from fastmha.algorithms import blas_rows
from fastmha.study import cases, crossover, heads, layers, questions
from fastmha.study.cases import Case, Layer
from fastmha.study.trial import ArmsDisagreeError

FOUND = {"threads": 2, "limits": {"float32": 4e11, "float64": 2e11, "read": 4e10}}


def interval(value, width=0.0):
    return {"median": value, "low": value - width, "high": value + width}


def record(trial, strided, contiguous, packed, pack, width=0.0, **more):
    """A record of heads with these seconds."""
    times = {"strided": strided, "contiguous": contiguous, "packed": packed, "pack": pack}
    case = Case(**{name: trial.factors[name] for name in Case.__dataclass_fields__})
    direction = trial.factors["direction"]
    return {"question": "heads", "label": trial.label, "factors": trial.factors, "rounds": 5,
            "flops": case.flops(direction), "bytes": case.operand_bytes(direction),
            "packed_bytes": case.packed_bytes(direction), "row_bytes": case.row_bytes,
            "arms": {name: {"best": t, **interval(t)} for name, t in times.items()},
            "ratios": {"strided/contiguous": interval(strided / contiguous, width),
                       "strided/packed": interval(strided / packed, width), "pack/contiguous": interval(pack / contiguous)},
            **more}


def by_model(latency, bandwidth, noise=0.0):
    """Results of the full study on a machine that is the model."""
    generator, records = np.random.default_rng(1), []
    for trial in heads.trials(False, 2):
        f = trial.factors
        case = Case(**{name: f[name] for name in Case.__dataclass_fields__})
        kernel = case.flops(f["direction"]) / 2e11 / f["threads"]
        group = (case.algorithm, f["direction"])
        gained = latency[group] * crossover.visits(case) / f["threads"] if group in latency else 0.0
        pack = case.packed_bytes(f["direction"]) / bandwidth / f["threads"]
        strided = kernel + gained
        records.append(record(trial, strided, (kernel + pack) * (1 + noise * generator.standard_normal()), kernel, pack))
    return {**FOUND, "records": records}


LATENCY = {group: 1e-9 * (i + 1) for i, group in enumerate(crossover.GROUPS)}


# ------------------------------------------------------------------------------------------------ heads

def test_every_measurement_of_heads_is_in_one_table():
    found = by_model(LATENCY, 1e10)
    answer = heads.QUESTION.answered(found)
    maps, rest = answer.tables[:-1], answer.tables[-1]
    assert [table.title for table in maps] == [f'Length by width, "{name}", rows of d_model 1024' for name in ("tiled", "blas")]
    cells = sum(bool(cell) for table in maps for row in table.rows for cell in row[1:])
    assert cells + len(rest.rows) == len(found["records"])
    assert len({row[0] for row in rest.rows}) == len(rest.rows)
    for table in answer.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_the_sentence_on_heads_counts_winners_and_leaves_out_what_is_within_the_interval():
    a, b, c = [t for t in heads.trials(True, 2) if t.factors["algorithm"] == "tiled"][:3]
    found = {**FOUND, "records": [record(a, 1.0, 2.0, 0.9, 1.0), record(b, 3.0, 2.0, 2.0, 0.1),
                                  record(c, 1.0, 1.01, 1.0, 0.1, width=0.05)]}
    short = heads.QUESTION.answered(found).short
    assert "strided is faster in 1 of 3 cases, packing in 1, and 1 show no difference" in short
    assert f"packing gains most in {b.label}, 1.50" in short
    assert "faster on contiguous heads in 2 cases, slower in 0" in short


def test_a_case_named_cold_or_causal_is_not_on_the_map():
    found = by_model(LATENCY, 1e10)
    on_map = {r["label"] for r in found["records"] if heads.in_map(r)}
    picture = heads.QUESTION.answered(found).pictures[0]
    measured = sum(value is not None for panel in picture.data["panels"] for row in panel["values"] for value in row)
    plain = {r["label"] for r in found["records"] if r["label"] in on_map and r["factors"]["threads"] == 2
             and r["factors"]["dtype"] == "float32" and not r["factors"]["causal"] and not r["factors"]["cold"]}
    assert measured == len(plain) < len(on_map)


@pytest.mark.parametrize("question", [heads, crossover, layers])
def test_without_records_there_is_no_answer(question):
    assert question.QUESTION.answered({**FOUND, "records": []}) is None


# ------------------------------------------------------------------------------------------------ crossover

def test_visits_count_the_rows_that_blocks_of_queries_read():
    tiled = Case(1, 2, 2, 128, 300, 64, row=8192)
    assert crossover.visits(tiled) == 2 * (128 / 64) * 2 * 300              # heads, blocks, keys and values, their rows
    assert crossover.visits(replace(tiled, H=8)) == 2 * (4 * 128 / 64) * 2 * 300        # the rows of a group are stacked
    assert crossover.visits(replace(tiled, B=3)) == 3 * crossover.visits(tiled)
    assert crossover.visits(replace(tiled, row=1024)) == crossover.visits(tiled) / 4    # four rows per page
    blas = replace(tiled, algorithm="blas", Lq=512)
    assert crossover.visits(blas) == 2 * (512 / blas_rows(512, 300, 4)) * 2 * 300
    causal = Case(1, 1, 1, 128, 128, 64, causal=True, row=4096)
    assert crossover.visits(causal) == pytest.approx(2 * 2 * 128 * (129 / 256))


def test_the_model_finds_the_machine_that_it_describes():
    found = by_model(LATENCY, 1e10)
    records = crossover.usable(found["records"])
    solution = crossover.fit(records[::2])
    np.testing.assert_allclose(solution, [*LATENCY.values(), 1e-10], rtol=1e-6)
    error = crossover.errors(records[1::2], solution)
    assert error["high"] < 1e-9
    assert error["named"] == error["clear"] == len(records[1::2])


def test_the_model_is_tested_on_cases_that_it_was_not_fitted_on(monkeypatch):
    fitted, tested = [], []
    fit, errors = crossover.fit, crossover.errors
    monkeypatch.setattr(crossover, "fit", lambda records: fitted.extend(r["label"] for r in records) or fit(records))
    monkeypatch.setattr(crossover, "errors",
                        lambda records, solution: tested.append({r["label"] for r in records}) or errors(records, solution))
    found = by_model(LATENCY, 1e10, noise=0.02)
    answer = crossover.answer(found["records"], found)
    assert tested[0] == set(fitted)
    assert not tested[1] & set(fitted)
    assert abs(len(tested[1]) - len(fitted)) <= 1
    assert f"Fitted on {len(fitted)} cases, the model errs on the {len(tested[1])} others by 0.0" in answer.short


def test_the_crossover_of_the_model_is_where_its_terms_are_equal():
    solution = np.array([*LATENCY.values(), 1e-10])
    for D in (32, 64, 128):
        L = crossover.crossing(solution, "tiled", "forward", D)
        exact = 64 * 4 * D * 1e-10 / 1e-9           # latency · 2 L · L / 64 = 2 · 4 D · L / bandwidth
        assert exact < L <= exact + 16
    assert crossover.crossing(np.array([0, 0, 0, 0, 1e-10]), "tiled", "forward", 64) == np.inf


def test_the_measured_crossover_lies_between_neighbours_on_the_map():
    def line(*ratios):
        return [{"factors": {"algorithm": "tiled", "direction": "forward", "D": 64, "Lq": L},
                 "ratios": {"strided/contiguous": interval(ratio)}} for L, ratio in zip((64, 128, 256, 512), ratios)]

    for ratios, between in (((0.8, 0.9, 1.1, 1.2), (128, 256)), ((0.8, 1.1, 0.9, 1.2), (256, 512)), ((0.8, 0.9, 0.9, 0.9), None),
                            ((1.1, 1.1, 1.1, 1.1), None)):
        assert crossover.measured_crossing(line(*ratios), "tiled", "forward", 64) == between


# ------------------------------------------------------------------------------------------------ layers

def layer_record(layer, ratio, width=0.0, algorithm="auto"):
    trial = layers.trial(layer, "inference", 2, 0.0, algorithm)
    return {"question": "layers", "label": trial.label, "factors": trial.factors, "flops": 1,
            "arms": {"strided": interval(ratio), "contiguous": interval(1.0)},
            "ratios": {"strided/contiguous": interval(ratio, width)}}


LONG, SHORT = Layer(1, 512, 768, 12), Layer(32, 16, 512, 8)


def test_what_auto_costs_is_its_time_over_that_of_the_better_layout():
    by_blas = layers.product_by_blas(2)     # then auto is strided throughout
    records = [layer_record(LONG, 1.25), layer_record(LONG, 0.8), layer_record(SHORT, 0.5), layer_record(SHORT, 1.1)]
    wanted = [1.25, 1.0, 1.0, 1.1] if by_blas else [1.0, 1.25, 1.0, 1.1]
    assert [layers.costs(r)["median"] for r in records] == pytest.approx(wanted)
    line = layers.auto_line(records)
    assert "within 3% of the better in 2 of 4 (50%)" in line
    assert f"worst: {records[0 if by_blas else 1]['label']}, 1.25" in line


def test_a_cost_within_the_interval_is_none_and_beyond_it_what_is_sure():
    assert layers.costs(layer_record(SHORT, 1.1, 0.2))["sure"] == 1.0
    assert layers.costs(layer_record(SHORT, 1.1, 0.02))["sure"] == pytest.approx(1.08)
    if not layers.product_by_blas(2):
        assert layers.costs(layer_record(LONG, 0.9, 0.02))["sure"] == pytest.approx(1 / 0.92)


@pytest.mark.parametrize("what", layers.PASSES)
@pytest.mark.parametrize("layer", [Layer(2, 5, 8, 2), Layer(1, 7, 12, 4, 2, "float64", causal=True)], ids=lambda x: x.label)
def test_the_arms_of_a_layer_are_its_two_layouts(layer, what, monkeypatch):
    made, results = [], {}

    class Recorded(layers.MultiHeadAttention):
        def __init__(self, *arguments, **keywords):
            made.append(keywords["layout"])
            super().__init__(*arguments, **keywords)

    monkeypatch.setattr(layers, "MultiHeadAttention", Recorded)
    for name, arm in layers.arms(layer, what, 1).items():
        results[name] = arm()
    assert made == list(results) == ["strided", "contiguous"]
    np.testing.assert_allclose(results["strided"], results["contiguous"], rtol=1e-5, atol=1e-5)


def test_layers_that_disagree_are_not_timed(monkeypatch):
    monkeypatch.setattr(layers, "arms", lambda *a: {"strided": lambda: np.zeros(2), "contiguous": lambda: np.array([0, np.nan])})
    message = "B1 L512 d768 H12 D64 f32 inference 2T: result of the arms strided and contiguous"
    with pytest.raises(ArmsDisagreeError, match=message):
        layers.trial(LONG, "inference", 2, 0.0).measure(0.0)


def test_every_label_names_one_trial():
    for quick in (True, False):
        for question in (heads.QUESTION, layers.QUESTION):
            for threads in (1, 2):
                labels = [t.label for t in questions.trials([question], quick, threads)]
                assert len(set(labels)) == len(labels) > 5
    assert set(cases.quick()) < set(cases.full())
