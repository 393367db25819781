"""Rows whose grad_out is 0 throughout, as those of padding are in training: nothing finite gets a gradient by them, and "tiled"
passes over them where they fill a vector of rows."""

import numpy as np
import pytest
from support import all_dtypes, assert_same, check, draw, dtypes, run

import fastmha

ROWS = {        # of 150
    "all": np.ones(150, bool), "the first ones": np.arange(150) < 70, "the last ones": np.arange(150) >= 40,
    "some": np.arange(150) % 3 > 0, "but a few": ~np.isin(np.arange(150), [3, 100]),
}   # fmt: skip
RULES = {
    "plain": {}, "causal": {"is_causal": True, "offset": 80}, "window": {"window": (30, 9), "offset": 40},
    "lengths": {"key_padding_lengths": [190, 230]}, "softcap": {"softcap": 2.0}, "dropout": {"dropout": 0.3, "seed": 7},
    "sinks": {"sinks": np.array([0.5, -np.inf, 2, -30])},
    "a boolean mask": {"mask": (np.arange(150)[:, None] + np.arange(230)) % 7 == 0},
    "an additive mask": {"mask": np.where(np.arange(230) < np.arange(150)[:, None], -1e4, 0.0)},
}   # fmt: skip


def idle(arrays, rows):
    q, k, v, g = arrays
    g = g.copy()
    g[0][..., ROWS[rows], :] = 0
    g[1][:2, ROWS[rows]] = -0.0
    return q, k, v, g


def given_to(rule, dtype):
    return {name: x.astype(dtype) if name in ("sinks", "mask") and x.dtype != bool else x for name, x in RULES[rule].items()}


def assert_oracle(arrays, rows, **given):
    results = check(*arrays, algorithm="tiled", **given)
    assert not results[2][0][:, ROWS[rows]].any()
    assert not results[2][1][:2, ROWS[rows]].any()
    return results


@all_dtypes
@pytest.mark.parametrize("rule", RULES)
def test_the_gradients_are_those_of_the_oracle_and_of_idle_rows_zeros(isa, dtype, rule, rng):
    assert_oracle(idle(draw(rng, 2, 4, 2, 150, 230, 17, 24, dtype), "the first ones"), "the first ones", **given_to(rule, dtype))


@dtypes
@pytest.mark.parametrize("rows", ROWS)
def test_idle_rows_anywhere_give_the_same_bits_for_any_number_of_threads(isa, dtype, rows, rng):
    arrays = idle(draw(rng, 2, 4, 2, 150, 230, 17, 24, dtype), rows)
    for rule in ("plain", "causal"):
        results = assert_oracle(arrays, rows, **RULES[rule])
        assert_same(run(fastmha, *arrays, threads=5, algorithm="tiled", **RULES[rule]), results)


@dtypes
@pytest.mark.parametrize(("of", "value"), [("q", np.nan), ("k", np.nan), ("v", np.nan), ("k", np.inf), ("v", np.inf)])
def test_what_is_not_finite_is_not_passed_over(isa, dtype, of, value, rng):
    """0 times it is NaN."""
    q, k, v, g = idle(draw(rng, 2, 4, 2, 150, 230, 8, 8, dtype), "the first ones")
    {"q": q, "k": k, "v": v}[of][:, :, 20, 3] = value
    with np.errstate(all="ignore"):
        results, wanted = (run(fastmha, q, k, v, g, algorithm=name) for name in ("tiled", "blas"))
    for x, y in zip(results, wanted, strict=True):
        assert np.array_equal(np.isnan(x), np.isnan(y))
    assert np.isnan(results[2][0, :, :70]).any()


@dtypes
def test_keys_that_idle_rows_alone_attend_get_zeros_and_those_of_padding_may_be_anything(isa, dtype, rng):
    q, k, v, g = idle(draw(rng, 2, 4, 2, 150, 230, 8, 8, dtype), "the first ones")
    k[:, :, 200:], v[:, :, 200:] = np.nan, np.inf
    rules = {"algorithm": "tiled", "key_padding_lengths": [200, 200], "window": (0, 0), "offset": 0}
    grad_q, grad_k, grad_v = run(fastmha, q, k, v, g, **rules)[2:5]
    assert np.isfinite(grad_q).all()
    assert not grad_k[0, :, :70].any()
    assert not grad_v[0, :, :70].any()
    assert grad_v[0, :, 70:150].any()
    assert not grad_k[:, :, 150:].any()
    assert not grad_v[:, :, 150:].any()


@dtypes
@pytest.mark.parametrize("of", ["mask", "sinks"])
def test_idle_rows_give_masks_and_sinks_nothing(isa, dtype, of, rng):
    arrays = idle(draw(rng, 2, 4, 2, 150, 230, 8, 8, dtype), "the first ones")
    mask = rng.standard_normal((2, 4, 150, 230)).astype(dtype)
    given = {"mask": mask, "need_bias_grad": True} if of == "mask" else {"sinks": np.ones(4, dtype)}
    results = check(*arrays, algorithm="tiled", **given)
    if of == "mask":
        assert not results[5][0][:, :70].any()
