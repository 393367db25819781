"""One key, whose weight is 1: rows are copies of its value, without scores where nobody asks for lse."""

import numpy as np
import pytest
from support import assert_same, draw, dtypes

import fastmha
from fastmha.algorithms import DECODE_ROWS_MAX

# B, H, Hkv, Lq: rows of one head, of several, and of several blocks of 64
SHAPES = [(1, 1, 1, 1), (3, 2, 2, 1), (2, 8, 2, 1), (2, 2, 1, 3), (2, 1, 1, 64), (1, 4, 2, 33), (2, 2, 2, 130)]
ALGORITHMS = ("tiled", "decode", "blas")
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)


def calls(shapes):
    """Each shape by each algorithm that takes so many rows of a group."""
    served = [(name, (B, H, Hkv, Lq)) for B, H, Hkv, Lq in shapes for name in ALGORITHMS
              if name != "decode" or H // Hkv * Lq <= DECODE_ROWS_MAX]
    return pytest.mark.parametrize(("algorithm", "shape"), served, ids=str)


NUMBERS = {
    "nan": lambda info: np.nan, "another nan": lambda info: -info.dtype.type(np.nan),
    "inf": lambda info: np.inf, "-inf": lambda info: -np.inf, "largest": lambda info: info.max / 2,
    "tiny": lambda info: info.tiny * 8, "subnormal": lambda info: info.smallest_subnormal * 5, "zeros": lambda info: 0.0,
    "minus zeros": lambda info: -0.0,
}


def drawn(rng, shape, D, Dv, dtype):
    return draw(rng, *shape, 1, D, Dv, dtype)[:3]


def assert_as_computed(algorithm, q, k, v, **rules):
    """Returns the rows."""
    out = fastmha.attention(q, k, v, algorithm=algorithm, **rules)
    computed, _ = fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True, **rules)
    assert_same([out], [computed])
    return out


@dtypes
@calls(SHAPES)
@pytest.mark.parametrize(("D", "Dv"), [(1, 1), (7, 70), (64, 64), (67, 16), (20, 19), (0, 5), (5, 0)])
def test_rows_are_the_value(isa, dtype, algorithm, shape, D, Dv, rng):
    _, H, Hkv, Lq = shape
    q, k, v = drawn(rng, shape, D, Dv, dtype)
    out = assert_as_computed(algorithm, q, k, v)
    np.testing.assert_array_equal(out, np.repeat(v, H // Hkv, axis=1).repeat(Lq, axis=2))


@dtypes
@calls([(2, 2, 2, 1), (2, 4, 2, 1), (2, 2, 1, 5), (2, 1, 1, 70)])
@pytest.mark.parametrize("case", NUMBERS)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_any_numbers_are_as_computed(isa, dtype, algorithm, operand, case, shape, rng):
    """In one row alone, in all places or in some: the other heads are copies."""
    value = dtype(NUMBERS[case](np.finfo(dtype)))
    for places in (slice(None), slice(None, None, 7), slice(-1, None)):
        q, k, v = drawn(rng, shape, 20, 19, dtype)
        {"q": q, "k": k, "v": v}[operand][1, -1, -1, places] = value
        assert_as_computed(algorithm, q, k, v)


@dtypes
@pytest.mark.parametrize("algorithm", ["tiled", "decode"])
def test_scores_beyond_numbers_of_finite_operands(isa, dtype, algorithm, rng):
    """Their weight is none: q times k is infinite, or what it is multiplied by makes it so."""
    large = np.sqrt(np.finfo(dtype).max)
    some = large / 2.0 ** (40 if dtype == np.float64 else 10)       # its square times 20 is not huge
    for of_q, of_k, scale in ((1, 1, 1.0), (8 * large, large, 1.0), (-8 * large, large, 1.0), (1, large, float(large) * 8),
                              (some, some, 2.0**100), (some, some, -(2.0**100))):
        q, k, v = drawn(rng, (2, 2, 1, 2), 20, 19, dtype)
        q[0] = np.abs(q[0]) * dtype(of_q)
        k[0] = np.abs(k[0]) * dtype(of_k)
        assert_as_computed(algorithm, q, k, v, scale=scale)


@dtypes
@algorithms
@pytest.mark.parametrize("rules", [
    {"is_causal": True, "offset": 0}, {"is_causal": True, "offset": -2}, {"window": (1, 0), "offset": 0},
    {"key_padding_lengths": [0, 1]}, {"key_ranges": [[0, 1], [1, 1]]}, {"scale": -3.0}, {"scale": 0.0}, {"softcap": 2.0},
    {"sinks": True}, {"mask": True}, {"alibi": True, "offset": 0}, {"dropout": 0.5, "seed": 3},
], ids=lambda rules: "-".join(rules))
def test_rules_are_kept(isa, dtype, algorithm, rules, rng):
    q, k, v = drawn(rng, (2, 4, 2, 4), 20, 19, dtype)
    rules = dict(rules)
    if "sinks" in rules:
        rules["sinks"] = rng.standard_normal(4).astype(dtype)
    if "mask" in rules:
        rules["mask"] = rng.random((2, 4, 4, 1)) < 0.5
    if "alibi" in rules:
        rules["alibi"] = rng.random(4).astype(dtype)
    assert_as_computed(algorithm, q, k, v, **rules)


@dtypes
@pytest.mark.parametrize("algorithm", ["tiled", "decode"])
@pytest.mark.parametrize("shape", [(2, 4, 2, 1), (2, 4, 2, 5)], ids=str)
def test_any_strides_and_nothing_beside_the_rows(isa, dtype, algorithm, shape, rng):
    B, H, Hkv, Lq = shape
    q, k, v = drawn(rng, shape, 20, 19, dtype)
    wanted = np.repeat(v, H // Hkv, axis=1).repeat(Lq, axis=2)
    memory = np.full((B, Lq, H, 24), 7, dtype)
    q_wide = np.empty((B, Lq, H, 40), dtype)
    q_rows = q_wide[..., ::2].transpose(0, 2, 1, 3)
    q_rows[...] = q
    out = memory[..., 2:21].transpose(0, 2, 1, 3)
    fastmha.attention(q_rows, k, v, out=out, algorithm=algorithm)
    np.testing.assert_array_equal(out, wanted)
    assert (memory[..., :2] == 7).all()
    assert (memory[..., 21:] == 7).all()
    back = np.empty((B, H, Lq, 19), dtype)[:, ::-1, ::-1]
    np.testing.assert_array_equal(fastmha.attention(q[:, :, ::-1], k, v, out=back, algorithm=algorithm), wanted)
