"""layout="BLHD" is the call on transposed views: where the kernels see the same strides, to the bit. All else about it is for the
tests of "BHLD", which run in any strides."""

import itertools

import numpy as np
import pytest
from support import (
    NAMED,
    all_dtypes,
    assert_close,
    assert_same,
    draw,
    dtypes,
    error_bounds,
    in_float64,
    run,
    same_bits,
)

import fastmha
from fastmha import Capture

PROBLEMS = {
    "plain": ((2, 4, 2, 9, 17, 5, 3), {}),
    "one row of width one": ((3, 2, 1, 1, 6, 1, 1), {}),
    "few rows": ((2, 6, 2, 3, 130, 16, 8), {"is_causal": True, "offset": 127}),
    "several blocks": ((1, 3, 1, 70, 2050, 5, 4), {"is_causal": True, "offset": 1979}),
    "window and padding": (
        (3, 2, 2, 40, 50, 7, 9), {"window": (5, 3), "offset": [2, -4, 9], "key_padding_lengths": [50, 7, 0]},
    ),
    "boolean mask": ((2, 4, 2, 31, 65, 16, 16), {"mask": bool}),
    "additive mask, scale and softcap": ((2, 4, 2, 31, 65, 16, 16), {"mask": float, "scale": -0.8, "softcap": 2.0}),
    "without queries": ((2, 4, 2, 0, 5, 4, 3), {}),
    "without keys": ((2, 4, 2, 5, 0, 4, 3), {}),
    "without widths": ((2, 4, 2, 5, 6, 0, 0), {}),
}  # fmt: skip
problems = pytest.mark.parametrize("name", PROBLEMS)


def make(name, dtype, rng, layout="BLHD"):
    """q, k, v and a gradient of the output in padded memory, and keywords; what is removed is NaN."""
    shape, keywords = PROBLEMS[name]
    arrays, keywords = draw(rng, *shape, dtype=dtype, layout=layout), dict(keywords)
    if "mask" in keywords:
        B, H, _, Lq, Lk, *_ = shape
        gone = rng.random((B, H, Lq, Lk)) < 0.4
        gone[1, 2, 3] = gone[..., 7] = True     # an empty row, a key that nobody attends
        arrays[1][:, 7] = arrays[2][:, 7] = np.nan
        keywords["mask"] = gone if keywords["mask"] is bool else np.where(gone, -np.inf, 0.5).astype(dtype)
    return arrays, keywords


def turned(x):
    """The view in the other layout; lse has none."""
    return x if x.ndim == 3 else x.swapaxes(1, 2)


@all_dtypes
@pytest.mark.parametrize(
    ("algorithm", "name"), [x for x in itertools.product((*NAMED, "decode"), PROBLEMS) if x != ("decode", "several blocks")]
)
def test_the_output_has_the_bits_of_that_of_transposed_views(isa, dtype, algorithm, name, rng):
    (q, k, v, g), keywords = make(name, dtype, rng)
    keywords["algorithm"] = algorithm
    out, lse = fastmha.attention(q, k, v, layout="BLHD", return_lse=True, **keywords)
    assert out.flags.c_contiguous
    assert out.shape == g.shape
    target = np.full_like(g, np.nan)
    wanted, wanted_lse = fastmha.attention(*map(turned, (q, k, v)), out=turned(target), return_lse=True, **keywords)
    assert same_bits(out, turned(wanted))
    assert same_bits(lse, wanted_lse)
    into = np.full_like(g, np.nan)
    assert fastmha.attention(q, k, v, layout="BLHD", out=into, **keywords) is into
    assert same_bits(into, out)


@all_dtypes
@problems
def test_gradients_have_the_bits_of_those_of_transposed_views(isa, dtype, name, rng):
    """Of "tiled": where they are written changes nothing. BLAS may round otherwise to another stride; see the next test."""
    arrays, keywords = make(name, dtype, rng)
    keywords["algorithm"] = "tiled"
    out, lse, *grads = run(fastmha, *arrays, layout="BLHD", **keywords)
    q, k, v, g = arrays
    wanted = fastmha.attention_backward(*map(turned, (g, q, k, v, out)), lse, **keywords)
    assert all(x.flags.c_contiguous for x in grads)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
    assert_same(grads, [turned(x) for x in wanted])


@dtypes
@problems
@pytest.mark.parametrize("algorithm", NAMED)
def test_rows_that_lie_by_head_give_the_same_to_rounding(dtype, algorithm, name, rng):
    """Memory in the one order and in the other."""
    arrays, keywords = make(name, dtype, rng)
    by_row = run(fastmha, *arrays, layout="BLHD", algorithm=algorithm, **keywords)
    packed = [np.ascontiguousarray(turned(x)) for x in arrays]
    by_head = run(fastmha, *packed, algorithm=algorithm, **keywords)
    wide, rules = in_float64([np.nan_to_num(x) for x in packed], keywords)
    bounds = error_bounds(*wide, dtype, **rules)
    assert_close(list(map(turned, by_row)), [x.astype(np.float64) for x in by_head], bounds)


@all_dtypes
@problems
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_plan_is_that_of_transposed_views(dtype, name, backward, rng):
    (q, k, v, _), keywords = make(name, dtype, rng)
    plans = [fastmha.plan(q, k, v, layout="BLHD", backward=backward, **keywords),
             fastmha.plan(*map(turned, (q, k, v)), backward=backward, **keywords)]
    receipts = [str(plan) for plan in plans]
    assert "layout BLHD" in receipts[0]
    assert receipts[0].replace("layout BLHD", "layout BHLD") == receipts[1]


@all_dtypes
@pytest.mark.parametrize("name", ["few rows", "window and padding", "boolean mask"])
@pytest.mark.parametrize("reduce", [None, "sum_q"])
def test_captures_have_the_bits_of_those_of_transposed_views(dtype, name, reduce, rng):
    (q, k, v, _), keywords = make(name, dtype, rng)
    keywords["capture"] = Capture([1, 0], slice(1, None), reduce)
    captured = fastmha.attention(q, k, v, layout="BLHD", **keywords)[1]
    assert same_bits(captured, fastmha.attention(*map(turned, (q, k, v)), **keywords)[1])


def test_a_string_of_numpy_is_a_string():
    x = np.ones((1, 2, 3, 4))
    for keywords in ({"layout": np.str_("BLHD")}, {"algorithm": np.str_("blas")}, {"precision": np.str_("high")}):
        plain = {name: str(value) for name, value in keywords.items()}
        np.testing.assert_array_equal(fastmha.attention(x, x, x, **keywords), fastmha.attention(x, x, x, **plain))
