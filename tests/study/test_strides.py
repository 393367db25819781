"""The study of row strides: where its heads lie, that only the stride changes, and what it says of measurements."""

import numpy as np
import pytest
from support import assert_drawable

from fastmha.study import cases, operands, questions, strides, trial
from fastmha.study.cases import Case
from fastmha.study.operands import Place

SMALL = Case(1, 4, 4, 12, 12, 64, algorithm="tiled")
PLACES = {"packed": Place("packed"), "row": Place(4096), "row+64": Place(4160), "small": Place(4096, False)}


def ratio(median, half=0.01):
    return {"median": median, "low": median - half, "high": median + half}


def padding_record(multiple, of, algorithm="tiled", L=512, direction="forward"):
    """What a trial of a row and its padded neighbours would have found: `of` the row's time over the padded one's."""
    found = next(t for t in strides.trials(False, 2) if t.factors["kind"] == "padding" and t.factors["multiple"] == multiple
                 and (t.factors["algorithm"], t.factors["Lq"], t.factors["direction"]) == (algorithm, L, direction))
    return {"question": strides.NAME, "label": found.label, "factors": found.factors,
            "caches": {"L1d": {"ways": 12, "sets": 64}, "L2": {"ways": 16, "sets": 1024}},
            "ratios": {**dict.fromkeys(("row/row+64", "row/row-64", "row/packed"), of),
                       **dict.fromkeys(("row+64/packed", "row-64/packed"), ratio(1.0))}}


def answer(*records):
    return strides.QUESTION.answered({"records": list(records), "threads": 2, "machine": {}, "limits": {}})


@pytest.mark.parametrize("huge", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_heads_lie_at_the_stride_and_begin_a_page(dtype, huge):
    case = Case(1, 2, 2, 5, 5, 8, dtype=dtype)
    for row in (4096, 4160):
        views = operands.lay(case, row, huge)[1]
        assert views[0].ctypes.data % 4096 == 0
        for number, x in enumerate(views):
            assert (x.shape, x.dtype) == ((1, 2, 5, 8), dtype)
            assert x.strides[1:] == (8 * x.itemsize, row, x.itemsize)
            assert x.ctypes.data - views[0].ctypes.data == number * 16 * x.itemsize
    assert all(x.flags.c_contiguous for x in operands.lay(case, "packed", huge)[1])


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
@pytest.mark.parametrize("algorithm", strides.ALGORITHMS)
def test_all_strides_give_one_answer(algorithm, direction):
    arms = operands.attention_arms(Case(**{**SMALL.__dict__, "algorithm": algorithm}), direction, PLACES, 1)
    assert list(arms) == list(PLACES)


def test_an_arm_that_computes_something_else_is_refused(monkeypatch):
    right = operands.algorithms.forward

    def wrong(name, problem, out, lse, weights, threads):
        right(name, problem, out, lse, weights, threads)
        if problem.q.strides[2] == 4160:
            out[0, 0, 3, 5] += 1e-2

    monkeypatch.setattr(operands.algorithms, "forward", wrong)
    with pytest.raises(trial.ArmsDisagreeError, match=r"out of the arms packed and row\+64"):
        operands.attention_arms(SMALL, "forward", PLACES, 1)


def test_a_stride_that_holds_the_sets_of_one_row_shares_them():
    for row, expected in ((4096, 1), (8192, 1), (12288, 1), (4160, 64), (4032, 64), (6144, 2), (4224, 32)):
        assert strides.sets_of_starts(row, 64) == expected == len({start // 64 % 64 for start in range(0, 4096 * row, row)})
    assert strides.sets_of_starts(32768, 1024) == 2


def test_the_trials_are_named_once_and_fit_their_time():
    for quick, seconds in ((True, 8), (False, 120)):
        found = questions.trials([strides.QUESTION], quick, 2)
        assert len({t.label for t in found}) == len(found)
        assert sum(t.seconds for t in found) <= seconds
        assert {t.question for t in found} == {strides.NAME}
        assert all(t.flops > 0 for t in found)
    one = questions.trials([strides.QUESTION], False, 1)
    assert len({t.label for t in one}) == len(one)


def test_a_trial_times_every_arm_of_its_kind():
    flops = SMALL.flops("forward")
    row, between, paged = (t.record() for t in (
        strides.padding(SMALL, "forward", 4096, 1, 0), strides.sweep(SMALL, (3072, 4160), 1, 0, 4096),
        strides.pages(SMALL, 4096, 1, 0)))
    assert set(row["arms"]) == {"packed", "row", "row+64", "row-64"}
    assert set(between["arms"]) == {"packed", "3072", "4160"}
    assert len(paged["arms"]) == 6
    assert row["flops"] == flops
    assert strides.padding(SMALL, "forward", 4096, 1, 0).flops == 4 * flops


def test_arms_lie_where_their_names_say(monkeypatch):
    def rows(trial):
        seen = {}

        def prepared(case, direction, places, threads):
            seen.update(places)
            return dict.fromkeys(places, lambda: None)

        monkeypatch.setattr(operands, "attention_arms", prepared)
        trial.measure(0)
        return {name: tuple(place) for name, place in seen.items()}

    expected = {"packed": ("packed", True), "row": (8192, True), "row+64": (8256, True)}
    assert rows(strides.padding(SMALL, "forward", 8192, 1, 0)) == {**expected, "row-64": (8128, True)}
    swept = {"packed": ("packed", True), "3072": (3072, True), "4160": (4160, True)}
    assert rows(strides.sweep(SMALL, (3072, 4160), 1, 0, 0)) == swept
    small = {f"{name}, 4 KiB pages": (row, False) for name, (row, _) in expected.items()}
    assert rows(strides.pages(SMALL, 8192, 1, 0)) == {**expected, **small}


def test_the_answer_names_the_largest_gain_of_padding():
    found = answer(padding_record(4096, ratio(1.05)), padding_record(8192, ratio(1.25)), padding_record(8192, ratio(1.0), "blas"))
    assert "time back in 2 of 3 cases, at most 20 % (tiled L512, 8192 bytes: 1.25 ±0.01)" in found.short
    assert '"blas" = 1.00 ±0.01 (one case)' in found.short
    cells = {row[0]: row for row in found.tables[0].rows}
    assert cells["8192"] == ["8192", "1 of 64", "8 of 1024", "1.25 ±0.01", "= 1.00 ±0.01"]
    assert cells["4096"][-1] == ""          # not measured
    assert "16 at 4096 bytes, 2 at 32768 bytes, 1024 at 4160 bytes" in found.method


def test_the_answer_says_so_where_padding_gives_nothing_back():
    found = answer(padding_record(4096, ratio(1.005)), padding_record(8192, ratio(0.9)))
    assert "no measurable time back in any of 2 cases" in found.short


def test_other_work_stands_in_a_table_of_its_own():
    found = answer(padding_record(4096, ratio(1.0)), padding_record(4096, ratio(1.5), direction="backward"))
    assert "any of 1 cases" in found.short
    (row,) = next(t for t in found.tables if t.title == "The same for other work").rows
    assert row == ["tiled L512 H4 D64 float32 backward 2T", "1.50 ±0.01"]


def test_there_is_no_answer_without_records():
    assert answer() is None
    assert answer({"question": "heads", "factors": {}}) is None


def test_answers_of_measured_trials_are_whole():
    base = Case(**{**SMALL.__dict__, "Lq": 8, "Lk": 8})
    records = [t.record() for t in (
        strides.padding(base, "forward", 4096, 2, 0), strides.padding(base, "backward", 4096, 2, 0),
        strides.sweep(base, (3072, 4096, 4160), 2, 0, 4096), strides.pages(base, 4096, 2, 0))]
    found = answer(*records)
    assert "4 KiB pages over huge ones" in found.short
    for table in found.tables:
        assert table.rows
        assert all(len(row) == len(table.columns) and all(row) for row in table.rows)
    whole, zoomed = found.pictures
    assert whole.name != zoomed.name
    for picture in found.pictures:
        assert_drawable(picture)
        (panel,) = picture.data["panels"]
        for series in panel["series"]:
            assert series["x"] == sorted(series["x"])
            assert {len(series[key]) for key in ("x", "y", "low", "high")} == {len(set(series["x"]))}
            assert np.isfinite(series["y"]).all()
    assert {s["name"]: s["x"] for s in whole.data["panels"][0]["series"]} == {
        "64 bytes less": [4096], "a multiple of 4096 bytes": [4096], "64 bytes more": [4096], "other strides": [3072]}
    assert [s["x"] for s in zoomed.data["panels"][0]["series"]] == [[4096, 4160]]


def test_each_stride_is_drawn_once_and_a_picture_around_a_centre_ends_with_its_sweep():
    """3072 is in the sweep of a quick look, too, and would leave most of that picture empty."""
    def swept(t):
        return {"question": t.question, "label": t.label, "factors": t.factors,
                "ratios": {f"{row}/packed": ratio(1 + row / 1e6) for row in t.factors["strides"]}}

    trials = [t for t in strides.trials(True, 2) if t.factors["kind"] == "sweep"]
    found = answer(padding_record(8192, ratio(1.2)), *map(swept, trials))
    whole, around = found.pictures
    assert around.name == "strides-8192"
    for series in around.data["panels"][0]["series"]:
        assert series["x"] == [8192 + step for step in strides.AROUND]
        assert series["y"] == [1 + x / 1e6 for x in series["x"]]
    (panel,) = whole.data["panels"]
    assert [x for s in panel["series"] for x in s["x"]] == [8192] * 3 + [3072]
    assert [s["y"] for s in panel["series"]] == [[1.0], [1.2], [1.0], [1 + 3072 / 1e6]]
