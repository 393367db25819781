"""The study of the KV cache's layout: both layouts hold and give the same, and what it says of measurements."""

import numpy as np
import pytest
from support import assert_drawable

import fastmha
from fastmha.study import kv_cache, questions, trial
from fastmha.study.kv_cache import layers, shape

SMALL = shape(2, 4, 2, 8, 40)


@pytest.fixture
def _few_layers(monkeypatch):
    monkeypatch.setattr(kv_cache, "MOST_LAYERS", 2)


def ratio(median, half=0.01):
    return {"median": median, "low": median - half, "high": median + half}


def record(work, Lk, each=1e-3, threads=2, **times):
    """What a trial would have found; `times`: the ratio of the layouts by kind of work."""
    found = kv_cache.trial(work, shape(1, 8, 2, 64, Lk), threads, 0)
    kinds = ("decode", "step") if work == "decode" else (work,)
    arms = ("KVCache.append", *(f"{name} {kind}" for name in kv_cache.LAYOUTS for kind in kinds))
    return {"question": kv_cache.NAME, "label": found.label, "factors": found.factors, "calls": 4, "bytes": 2**20,
            "arms": {name: ratio(4 * each) for name in arms},
            "ratios": {f"length-major {kind}/head-major {kind}": times.get(kind, ratio(1.0)) for kind in kinds}}


def answer(*records, threads=2):
    found = {"records": list(records), "threads": threads, "machine": {"caches": {"L3": 32 << 20}}, "limits": {}}
    return kv_cache.QUESTION.answered(found)


def test_the_layouts_hold_the_same_where_they_should():
    k, v = np.random.default_rng(0).standard_normal((2, 2, 3, 50, 8), np.float32)
    cache, *heads = kv_cache.head_major(shape(2, 3, 3, 8, 40), k, v)
    assert (cache.length, cache.capacity) == (40, 50)
    assert all(x.flags.c_contiguous and np.array_equal(x, y) for x, y in zip(heads, (k, v)))
    heads[0][0, 0, 7] = 5
    assert (cache.k[0, 0, 7] == 5).all()        # its own memory
    for x, y in zip(kv_cache.length_major(k, v), (k, v)):
        assert x.swapaxes(1, 2).flags.c_contiguous
        assert np.array_equal(x, y)


@pytest.mark.usefixtures("_few_layers")
@pytest.mark.parametrize("work", ["decode", "append", "chunk"])
def test_both_layouts_give_one_answer(work):
    arms = kv_cache.prepare(SMALL, work, 2)
    kinds = ("decode", "step") if work == "decode" else (work,)
    assert set(arms) >= {f"{name} {kind}" for name in kv_cache.LAYOUTS for kind in kinds}
    assert ("KVCache.append" in arms) == (work == "append")


@pytest.mark.usefixtures("_few_layers")
def test_appends_take_the_slots_behind_the_keys_in_turn_and_leave_the_keys(monkeypatch):
    caches = []
    make = kv_cache.head_major

    def kept(*arguments):
        caches.append(make(*arguments))
        return caches[-1]

    monkeypatch.setattr(kv_cache, "head_major", kept)
    arms = kv_cache.prepare(SMALL, "append", 1)
    assert len(caches) == 2
    for _, k, v in caches:
        before = k[:, :, :SMALL.Lk].copy(), v[:, :, :SMALL.Lk].copy()
        k[:, :, SMALL.Lk:] = v[:, :, SMALL.Lk:] = 0
        for _ in range(kv_cache.ROOM // kv_cache.TOKENS):
            arms["head-major append"]()
        assert k[:, :, SMALL.Lk:].all()
        assert v[:, :, SMALL.Lk:].all()
        arms["head-major append"]()
        arms["KVCache.append"]()
        assert all(np.array_equal(x[:, :, :SMALL.Lk], y) for x, y in zip((k, v), before))
    for _ in range(2 * kv_cache.ROOM // kv_cache.TOKENS):
        arms["KVCache.append"]()        # a full cache begins again behind its keys
    assert all(SMALL.Lk < cache.length <= cache.capacity for cache, _, _ in caches)


@pytest.mark.usefixtures("_few_layers")
@pytest.mark.parametrize(("work", "what"), [("decode", "k"), ("append", "v"), ("chunk", "v")])
def test_layouts_that_hold_different_numbers_are_refused(monkeypatch, work, what):
    right = kv_cache.length_major

    class Lossy(np.ndarray):
        """Drops what is written behind the keys."""

        def __setitem__(self, key, value):
            super().__setitem__(key, 0)

    def wrong(k, v):
        new_k, new_v = right(k, v)
        if what == "v":
            return new_k, new_v.view(Lossy)
        new_k[0, 0, 3] += 1
        return new_k, new_v

    monkeypatch.setattr(kv_cache, "length_major", wrong)
    with pytest.raises(trial.ArmsDisagreeError, match="head-major"):
        kv_cache.prepare(SMALL, work, 1)


def test_layers_hold_what_a_turn_needs_and_no_more_than_memory_allows():
    assert layers(shape(1, 32, 8, 128, 2048)) == 4
    assert layers(shape(1, 8, 2, 64, 512)) == 128
    assert layers(shape(1, 8, 2, 64, 64)) == kv_cache.MOST_LAYERS
    assert layers(shape(1, 32, 32, 128, 16384)) == 1
    for quick in (True, False):
        for t in kv_cache.trials(quick, 2):
            f = t.factors
            case = shape(f["B"], f["H"], f["Hkv"], f["D"], f["Lk"])
            layer_bytes = case.packed_bytes("forward")
            assert layer_bytes <= kv_cache.LARGEST_LAYER or f["kind"] != "decode"
            assert layer_bytes * layers(case) <= max(kv_cache.TURN_BYTES + layer_bytes, kv_cache.LARGEST_LAYER)


def test_flops_are_those_of_the_plan():
    case = shape(2, 8, 2, 16, 70)
    q, k = np.zeros((2, 8, 1, 16), np.float32), np.zeros((2, 2, 70, 16), np.float32)
    assert fastmha.plan(q, k, k).flops == case.flops("forward")
    assert 2 * k.nbytes == case.packed_bytes("forward")


def test_the_trials_are_named_once_and_fit_their_time():
    for quick, seconds in ((True, 6), (False, 40)):
        found = questions.trials([kv_cache.QUESTION], quick, 2)
        assert len({t.label for t in found}) == len(found)
        assert sum(t.seconds for t in found) <= seconds
        assert {t.factors["kind"] for t in found} == {"decode", "append", "chunk"}
    one = questions.trials([kv_cache.QUESTION], False, 1)
    assert len({t.label for t in one}) == len(one)


@pytest.mark.parametrize(("steps", "winner"), [((1.5, 1.4, 0.8), "Head-major wins"), ((0.8, 0.9, 1.0), "Length-major wins"),
                                               ((1.0, 1.0, 1.0), "Neither layout wins")])
def test_the_answer_names_the_layout_that_wins_a_step(steps, winner):
    records = [record("decode", 512 << i, step=ratio(step)) for i, step in enumerate(steps)]
    faster, slower = sum(step > 1 for step in steps), sum(step < 1 for step in steps)
    assert answer(*records).short.startswith(f"{winner} a step of one append and one decode: head-major is faster in {faster}, "
                                             f"length-major in {slower} of 3 cases.")


def test_the_answer_weighs_appending_against_decoding():
    decode = record("decode", 512, each=1e-3, step=ratio(1.4))
    few, many = (record("append", 512, each=each, threads=1, append=ratio(0.7)) for each in (2e-5, 5e-4))
    assert "Appending is 2 % of a head-major step on average, so decoding decides." in answer(decode, few).short
    assert "Appending is 50 % of a head-major step on average." in answer(decode, many).short
    assert "Appending is" not in answer(decode, record("append", 4096, threads=1)).short
    assert "appending a token = 1.00 ±0.01 (one case)" in answer(decode, record("append", 4096, threads=1)).short


def test_there_is_no_answer_without_records():
    assert answer() is None
    assert answer({"question": "heads", "factors": {}}) is None


@pytest.mark.usefixtures("_few_layers")
def test_answers_of_measured_trials_are_whole():
    shapes = ((40, 2), (20, 2), (20, 1))
    records = [kv_cache.trial("decode", shape(2, 4, 2, 8, Lk), threads, 0).record() for Lk, threads in shapes]
    records += [kv_cache.trial(work, SMALL, 1, 0).record() for work in ("append", "chunk")]
    assert [r["calls"] for r in records] == [2, 2, 2, 2 * kv_cache.TOKENS, 2]
    found = answer(*records)
    assert len(found.tables) == 3
    for table in found.tables:
        assert table.rows
        assert all(len(row) == len(table.columns) and all(row) for row in table.rows)
    (picture,) = found.pictures
    assert_drawable(picture)
    titles = [panel["title"] for panel in picture.data["panels"]]
    assert titles == ["step, 2 threads", "decode, 2 threads", "append a token", "append 128 tokens"]
    (series,) = picture.data["panels"][0]["series"]
    assert series["x"] == [20, 40]          # of all threads alone, in order
    assert all(low <= y <= high for low, y, high in zip(series["low"], series["y"], series["high"]))
