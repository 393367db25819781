"""NumPy's own products: arms that agree, the layouts they claim, BLAS threads restored, sentences that follow the records."""

import json

import numpy as np
import pytest

from fastmha.study import textbook
from fastmha.study.cases import case
from fastmha.study.textbook import FUSED, INTERLEAVED
from fastmha.study.trial import ArmsDisagreeError

TINY = [case(2, 3, 5, 4), case(1, 2, 6, 3, dtype="float64")]
tiny = pytest.mark.parametrize("case", TINY, ids=lambda case: case.label)
layouts = pytest.mark.parametrize("layout", [FUSED, INTERLEAVED])


def expected(case, what, layout):
    q, k, v = (x.astype(float) for x in textbook.split(case, layout))
    if what == "scores":
        return np.einsum("bhid,bhjd->bhij", q, k)
    output = np.einsum("bhij,bhjd->bhid", textbook.weights_of(case).astype(float), v)
    return output.transpose(0, 2, 1, 3).reshape(case.B, case.Lq, -1) if what == "merge" else output


@tiny
@layouts
@pytest.mark.parametrize("what", textbook.ARMS)
def test_every_arm_that_multiplies_gives_the_product(case, layout, what):
    functions, products = textbook.arms(case, what, layout)
    assert tuple(functions) == textbook.ARMS[what]
    for name, product in products.items():
        np.testing.assert_allclose(product(), expected(case, what, layout), rtol=1e-4, atol=1e-5, err_msg=name)
    textbook.checked_arms(case, what, layout)


@tiny
def test_heads_lie_as_their_layout_says(case):
    for x in textbook.split(case, FUSED):
        assert x.strides[1:] == (case.D * case.itemsize, 3 * case.H * case.D * case.itemsize, case.itemsize)
    for x in textbook.split(case, INTERLEAVED):
        assert x.strides[1:] == (case.itemsize, 3 * case.H * case.D * case.itemsize, case.H * case.itemsize)


def test_the_copy_arm_makes_the_copies_of_the_contiguous_arm():
    for what, copies in (("scores", 2), ("output", 1)):
        made = textbook.arms(TINY[0], what, FUSED)[0]["copy"]()
        assert len(made) == copies
        assert all(x.flags.c_contiguous and x.base is None for x in made)


def test_arms_that_disagree_are_not_timed(monkeypatch):
    copy = np.ascontiguousarray
    monkeypatch.setattr(np, "ascontiguousarray", lambda x: copy(x) + np.float32(1))
    with pytest.raises(ArmsDisagreeError, match="scores of the arms strided and contiguous"):
        textbook.checked_arms(TINY[0], "scores", FUSED)


@pytest.mark.skipif(textbook.blas_threads() is None, reason="NumPy's BLAS exports no function that sets its threads")
def test_blas_of_numpy_has_one_thread_within_and_its_own_number_after():
    get, put = textbook.blas_threads()
    before = get()
    put(2)
    try:
        own = get()         # 1 where the library was built without threads
        with textbook.one_blas_thread() as held:
            assert held
            assert get() == 1
        assert get() == own
        with pytest.raises(KeyError), textbook.one_blas_thread():
            raise KeyError
        assert get() == own
    finally:
        put(before)


def test_calls_are_apart_where_blas_cannot_be_held(monkeypatch):
    rests = []
    monkeypatch.setattr(textbook, "blas_threads", lambda: None)
    monkeypatch.setattr(textbook.time, "sleep", rests.append)
    record = textbook.trial(TINY[0], "scores", FUSED, 0.0).measure(0.0)
    assert record["one_blas_thread"] is False
    assert rests == [textbook.REST] * (record["rounds"] * len(textbook.ARMS["scores"]))


@pytest.mark.parametrize("what", textbook.ARMS)
def test_a_record_is_json_with_every_arm_and_ratio(what):
    record = json.loads(json.dumps(textbook.trial(TINY[0], what, FUSED, 0.0).record()))
    assert tuple(record["arms"]) == textbook.ARMS[what]
    assert set(record["ratios"]) == {f"{a}/{b}" for a, b in textbook.RATIOS[what]}
    assert record["flops"] == 2 * 2 * 3 * 5 * 5 * 4         # B · H · L · L · D multiply-adds


def test_trials_have_labels_of_their_own_and_the_quick_ones_are_among_all():
    quick, full = ([t.label for t in textbook.trials(quick, 2)] for quick in (True, False))
    assert len(set(full)) == len(full)
    assert set(quick) <= set(full)
    assert sum(t.seconds for t in textbook.trials(True, 2)) < 8


def record(what, layout, strided, copy=0.1):
    """Arms with these times, packed 1 s and exact."""
    if what == "merge":
        times = {"merged": 1 + copy, "in place": strided, "product": 1.0, "merge copy": copy}
    else:
        times = {"strided": strided, "contiguous": 1 + copy, "packed": 1.0, "copy": copy}
    return {"question": "numpy", "label": f"{layout} shape {what}", "factors": {"what": what, "layout": layout},
            "one_blas_thread": True, "arms": {n: dict.fromkeys(("best", "median", "low", "high"), t) for n, t in times.items()},
            "ratios": {f"{a}/{b}": dict.fromkeys(("median", "low", "high"), times[a] / times[b])
                       for a, b in textbook.RATIOS[what]}}


def test_the_answer_says_which_is_faster_from_the_records():
    fused = [record("scores", FUSED, 1.0), record("output", FUSED, 1.32), record("output", FUSED, 1.1)]
    found = textbook.QUESTION.answered({"records": fused})
    assert "faster than copying first in 1 of 3 products and slower in 1;" in found.short
    assert "The copy is 0.09 (0.09 to 0.09)" in found.short
    parts = [part for bar in found.pictures[0].data["bars"] for part in bar["parts"]]
    assert [p["value"] for p in parts[:3]] == pytest.approx([1.0, 1.0, 0.1])


@pytest.mark.parametrize(("strided", "says"), [(22.0, "a loop of NumPy's own"), (1.1, "NumPy makes that copy itself"), (1.8, "")])
def test_the_answer_tells_a_copy_from_a_loop(strided, says):
    short = textbook.QUESTION.answered({"records": [record("scores", INTERLEAVED, strided)]}).short
    assert f"takes {strided / 1.1:.2f} times as long as copying" in short or f"and {strided / 1.1:.2f} times as long" in short
    assert says in short
    assert bool(says) == ("loop" in short or "itself" in short)


def test_the_answer_speaks_of_the_merge_and_of_blas_that_was_not_held():
    merge = record("merge", FUSED, 1.0)
    found = textbook.QUESTION.answered({"records": [{**merge, "one_blas_thread": False}]})
    assert "by transpose and reshape is 0.09 of the time" in found.short
    assert "takes 0.91 of it, and 1.00 of the product alone" in found.short
    assert f"before each call {textbook.REST} s passed" in found.method
    assert len(found.tables) == 1
    assert not found.pictures
    assert textbook.QUESTION.answered({"records": []}) is None
