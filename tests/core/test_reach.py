"""How far away the keys of few rows are taken to be: by what has been read since they were; no bit depends on it."""

import numpy as np
import pytest
from support import all_dtypes, assert_same, draw

import fastmha
from fastmha import _core, validate


def decode(q, k, v, **keywords):
    return fastmha.attention(q, k, v, algorithm="decode", return_lse=True, **keywords)


REACHES = (0, 3 << 20, 5 << 22, 1e12)       # the second cache, the third, from memory just so, memory


@pytest.fixture
def read_before():
    """`_core.read_before`, which is as it was behind the test; heads go side by side from where they do elsewhere."""
    before = _core.neighbours_from(5 << 22), _core.read_before(-1)
    yield _core.read_before
    _core.neighbours_from(before[0])
    _core.read_before(before[1])


CASES = {       # B, H, Hkv, Lq, Lk, D, Dv
    "one row": ((2, 3, 3, 1, 700, 64, 64), {}),
    "short heads": ((9, 8, 8, 1, 60, 64, 64), {}),
    "few keys": ((5, 4, 4, 1, 9, 32, 32), {}),
    "groups of four": ((2, 12, 3, 1, 600, 128, 128), {}),
    "groups of five, odd widths": ((1, 15, 3, 1, 530, 20, 33), {}),
    "several passes": ((2, 9, 1, 1, 300, 64, 64), {}),
    "rows of many": ((1, 8, 4, 3, 270, 80, 80), {}),
    "a window": ((2, 8, 4, 2, 1100, 64, 64), {"window": (600, 0), "offset": 1000}),
    "lengths": ((2, 8, 8, 1, 1100, 64, 64), {"key_padding_lengths": np.array([700, 3])}),
    "twelve rows": ((1, 12, 2, 2, 400, 40, 40), {}),
}


@all_dtypes
@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("algorithm", ["decode", "tiled"])
def test_the_bits_are_the_same_wherever_keys_come_from(isa, dtype, algorithm, name, layout, read_before, fetched, rng):
    sizes, rules = CASES[name]
    keywords = {**rules, "algorithm": algorithm, "layout": layout, "return_lse": True}
    q, k, v = draw(rng, *sizes, dtype=dtype, layout=layout)[:3]
    results = []
    for reach in REACHES:
        read_before(reach)
        results += [fastmha.attention(q, k, v, num_threads=threads, **keywords) for threads in (1, 3)]
    for other in results[1:]:
        assert_same(other, results[0])


def keys(Lk, dtype=np.float32, heads=4):
    return np.zeros((1, heads, Lk, 64), dtype)


def reach(k):
    q = np.zeros((1, 4, 1, 64), k.dtype)
    return _core.reach_now(validate.attention_problem(q, k, k, "BHLD"))


def read(k):
    decode(np.zeros((1, 4, 1, 64), k.dtype), k, k, num_threads=1)


def test_keys_reach_as_far_as_what_was_read_since_they_were(read_before):
    """Each call's are its own and those of all calls in between."""
    layers = [keys(1024) for _ in range(3)]
    own = 2 * layers[0].nbytes
    for k in layers:
        read(k)
    assert [reach(k) for k in layers] == [3 * own, 2 * own, own]
    read(layers[1])
    read(layers[1])
    assert [reach(k) for k in layers] == [5 * own, own, 3 * own]


def test_other_keys_than_before_are_far_away_unless_they_are_few(read_before):
    many, few = keys(2825)[:, :, 777:], keys(1277)[:, :, 777:]      # from an address on that no other array has begun at
    assert reach(many) == np.inf
    assert reach(few) == 2 * few.nbytes


def test_few_keys_that_were_read_before_are_far_away_where_much_was_since(read_before):
    few, fewer, many = keys(300), keys(100), keys(40000)
    for k in (few, fewer, many):
        read(k)
    assert reach(few) == 2 * (few.nbytes + fewer.nbytes + many.nbytes)
    assert reach(fewer) == 2 * fewer.nbytes


def test_products_and_other_attention_are_read_as_well(isa, read_before, rng):
    k = keys(1024)
    read(k)
    x, W = rng.standard_normal((2, 64), np.float32), rng.standard_normal((64, 512), np.float32)
    fastmha.linear(x, W)
    assert reach(k) == 2 * k.nbytes + W.nbytes
    others = keys(100)
    fastmha.attention(np.zeros((1, 4, 100, 64), np.float32), others, others, algorithm="tiled")
    assert reach(k) == 2 * k.nbytes + W.nbytes + 2 * others.nbytes


def test_the_keys_of_many_layers_are_all_remembered(read_before):
    """However their addresses lie; those of more than 256 are not, the ones behind which most was read."""
    layers = np.zeros((300, 1, 4, 150, 64), np.float32)
    own = 2 * layers[0].nbytes
    for k in layers[:250]:
        read(k)
    assert [reach(k) for k in layers[:250]] == [(250 - n) * own for n in range(250)]
    for k in layers[250:]:
        read(k)
    assert reach(layers[43]) == own
    assert reach(layers[44]) == 256 * own


@pytest.mark.parametrize(("rows", "known"), [(12, True), (13, False)])
def test_keys_of_few_rows_are_remembered_by_tiled(rows, known, read_before):
    read_before(-1)
    k = keys(2048)
    q = np.zeros((1, 4, rows, 64), np.float32)
    for _ in range(2):
        fastmha.attention(q, k, k, algorithm="tiled")
    assert (reach(k) == 2 * k.nbytes) == known


def test_a_plan_does_not_count_as_reading(read_before):
    k = keys(1024)
    read(k)
    fastmha.plan(np.zeros((1, 4, 1, 64), np.float32), k, k)
    assert reach(k) == 2 * k.nbytes


def test_packed_sequences_reach_as_far_as_all_of_them(read_before, rng):
    """By the first key of all, and their bytes together."""
    q, k = np.zeros((3, 4, 64), np.float32), np.zeros((3 * 600, 4, 64), np.float32)
    fastmha.attention_packed(q, k, k, np.array([1, 1, 1]), np.array([600, 600, 600]), algorithm="decode")
    other = keys(1024)
    read(other)
    heads = k.reshape(1, 1800, 4, 64).swapaxes(1, 2)
    assert reach(heads) == 2 * (k.nbytes + other.nbytes)
