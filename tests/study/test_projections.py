"""The study of projections: where products write, where heads lie, and what it says of measurements."""

import numpy as np
import pytest
from support import assert_drawable

import fastmha
from fastmha.study import cases, operands, projections, questions, trial
from fastmha.study.cases import Case

SMALL = Case(1, 2, 2, 12, 12, 64, algorithm="tiled")


def ratio(median, half=0.01):
    return {"median": median, "low": median - half, "high": median + half}


def layer_record(L, **times):
    """What a trial of the layer would have found; arms that are not named take as long as the first."""
    first, *others = projections.LAYERS
    found = projections.layer(Case(1, 12, 12, L, L, 64, algorithm="tiled"), 2, 0)
    return {"question": projections.NAME, "label": found.label, "factors": found.factors, "flops": 1e9,
            "arms": {name: ratio(1e-3) for name in projections.LAYERS},
            "ratios": {f"{other}/{first}": times.get(other.replace(" ", "_"), ratio(1.0)) for other in others}}


def answer(*records):
    return projections.QUESTION.answered({"records": list(records), "threads": 2, "machine": {}, "limits": {}})


def test_heads_lie_as_the_products_write_them():
    L, H, D = 6, 3, 4
    rows = np.arange(3 * L * H * D, dtype=np.float32).reshape(L, 3 * H * D)
    for layout, start in (("side by side", lambda i, h: i * H * D + h * D), ("interleaved", lambda i, h: h * 3 * D + i * D)):
        whole, views = operands.lay(Case(1, H, H, L, L, D), layout)
        whole[...] = rows.ravel()
        for i, x in enumerate(views):
            assert x.shape == (1, H, L, D)
            for h in range(H):
                assert np.array_equal(x[0, h], rows[:, start(i, h):start(i, h) + D])
    views = operands.lay(Case(1, H, H, L, L, D), "separate")[1]
    assert {x.strides[1:3] for x in views} == {(4 * D, 4 * H * D)}
    assert all(x.flags.c_contiguous for x in operands.lay(Case(1, H, H, L, L, D), "packed")[1])


@pytest.mark.parametrize("blas", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
def test_one_product_and_three_give_one_answer(tokens, blas):
    assert tuple(projections.product_arms(tokens, 24, 2, blas)) == projections.PRODUCTS


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
@pytest.mark.parametrize("algorithm", ["tiled", "blas"])
def test_attention_gives_one_answer_wherever_the_heads_lie(algorithm, direction):
    places = {layout: operands.Place(layout) for layout in projections.LAYOUTS}
    arms = operands.attention_arms(Case(**{**SMALL.__dict__, "algorithm": algorithm}), direction, places, 2)
    assert tuple(arms) == projections.LAYOUTS


def test_the_layer_computes_the_attention_of_its_projection(monkeypatch):
    seen = {}
    monkeypatch.setattr(projections, "checked", lambda label, arms, results, dtype: seen.update(results) or arms)
    generator = np.random.default_rng(0)
    d = SMALL.H * SMALL.D
    x, w = generator.standard_normal((SMALL.Lq, d), np.float32), generator.standard_normal((d, 3 * d), np.float32)
    q, k, v = (fastmha.split_heads((x @ part)[None] / np.sqrt(d, dtype=np.float32), SMALL.H) for part in np.split(w, 3, axis=1))
    expected = fastmha.attention(q, k, v)
    for name, run in projections.layer_arms(SMALL, 1).items():
        seen[name]["out"][...] = np.nan
        run()
        np.testing.assert_allclose(seen[name]["out"], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_an_arm_that_computes_something_else_is_refused(monkeypatch):
    right = projections.algorithms.product

    def wrong(a, b, out, threads, **more):
        right(a, b, out, threads, **more)
        if out.flags.c_contiguous and out.shape == (3, 8):
            out[2, 5] += 1e-2

    monkeypatch.setattr(projections.algorithms, "product", wrong)
    with pytest.raises(trial.ArmsDisagreeError, match="Q of the arms one product and three arrays"):
        projections.product_arms(3, 8, 1)


def test_the_trials_are_named_once_and_fit_their_time():
    for quick, seconds in ((True, 9), (False, 90)):
        found = questions.trials([projections.QUESTION], quick, 2)
        assert len({t.label for t in found}) == len(found)
        assert sum(t.seconds for t in found) <= seconds
        assert {t.factors["kind"] for t in found} == {"product", "attention", "layer"}
    one = questions.trials([projections.QUESTION], False, 1)
    assert len({t.label for t in one}) == len(one)


def test_flops_of_a_trial_are_those_of_all_its_arms():
    assert projections.product(5, 768, 1, 0).flops == 3 * 2 * 5 * 768 * 3 * 768
    assert projections.attention(SMALL, "backward", 1, 0).flops == 4 * SMALL.flops("backward")
    assert projections.layer(SMALL, 1, 0).flops == 6 * (6 * 12 * 128 * 128 + SMALL.flops("forward"))


def test_the_answer_names_a_winner_only_where_one_is_measurably_faster_in_most_cases():
    none = answer(layer_record(128, three_arrays=ratio(0.8)), layer_record(512, three_arrays=ratio(0.995)))
    assert none.short.startswith("One product with Q, K and V side by side is enough")
    assert "at most 20 % are won, by three arrays at L128 d768 tiled forward 2T." in none.short
    evened_out = answer(layer_record(128, three_arrays=ratio(0.98)), layer_record(512, three_arrays=ratio(0.98)),
                        layer_record(1024, three_arrays=ratio(1.1)))
    assert evened_out.short.startswith("One product with Q, K and V side by side is enough")
    assert "are won" not in answer(layer_record(128, packed=ratio(1.1))).short
    some = answer(layer_record(128, three_arrays=ratio(0.8), packed=ratio(0.9)), layer_record(512, three_arrays=ratio(0.8)))
    assert "three arrays wins in more than half of the 2 cases, by 20 % on average" in some.short
    assert "packed 0.95 (0.90 to 1.00; longer in 0, shorter in 1 of 2 cases)" in some.short


def test_there_is_no_answer_without_records():
    assert answer() is None
    assert answer({"question": "heads", "factors": {}}) is None


def test_answers_of_measured_trials_are_whole():
    found = answer(projections.product(3, 24, 2, 0).record(), projections.attention(SMALL, "forward", 2, 0).record(),
                   projections.layer(SMALL, 2, 0).record())
    assert len(found.tables) == 3
    for table in found.tables:
        assert table.rows
        assert all(len(row) == len(table.columns) and all(row) for row in table.rows)
    (picture,) = found.pictures
    assert_drawable(picture)
    assert [len(panel["rows"][0]["values"]) for panel in picture.data["panels"]] == [2, 3, 5]
    for panel in picture.data["panels"]:
        for value in panel["rows"][0]["values"]:
            assert value["low"] <= value["value"] <= value["high"]
