"""float16 and bfloat16: computed in float32, rounded once at the end. So every result is that of float32 operands of the same
numbers, rounded, bit by bit; how far that is from the exact one, the other files ask."""

import itertools

import numpy as np
import pytest
from support import (
    HALVES,
    LAYOUTS,
    NAMED,
    assert_close,
    assert_same,
    check,
    draw,
    dtypes,
    eps,
    every_isa,
    halves,
    in_float64,
    oracle,
    raises,
    rearranged,
)
from test_rules_at_random import NAMES, rules_of

import fastmha
from fastmha import Capture, _core, validate

LARGEST = {"float16": 65504.0, "bfloat16": float(np.float32(3.3895314e38))}
stored_types = pytest.mark.parametrize("stored", HALVES, ids=lambda dtype: dtype.__name__)


def wide(x):
    return x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype in HALVES else x


def assert_rounded(results, of_float32, by_blas=False):
    """The same numbers rounded, NaN for NaN; BLAS may round its products otherwise where they lie otherwise."""
    for x, y in zip(results, of_float32, strict=True):
        if by_blas:
            with np.errstate(invalid="ignore"):
                x, y = x.astype(np.float64), y.astype(np.float64)
            np.testing.assert_allclose(x, y, rtol=2 * eps(results[0].dtype), atol=1e-4)
            continue
        with np.errstate(over="ignore"):
            y = y.astype(x.dtype)
        assert np.array_equal(x, y, equal_nan=True)
        assert np.array_equal(np.signbit(x[x == 0]), np.signbit(y[x == 0]))


# --------------------------------------------------------------------------------------------------------- conversions


def converted(x, dtype):
    """x (n,) in another dtype, by the kernels."""
    x = np.ascontiguousarray(x)[None, None, None]
    out = np.empty(x.shape, dtype)
    _core.pack_heads(validate.bits(x), validate.bits(out), 1)
    return out[0, 0, 0]


@np.errstate(all="ignore")      # as one that signals is looked at
@dtypes
@stored_types
def test_every_number_of_half_precision_is_loaded_and_stored_as_it_is(isa, dtype, stored):
    x = np.arange(2**16, dtype=np.uint16).view(stored)
    for part in (x, x[:-3]):
        loaded = converted(part, dtype)
        wanted = part.astype(dtype)
        usual = ~(np.abs(wanted) < 2.0**-126) | (wanted == 0)       # not float32's subnormal ones, which may count as 0
        assert np.array_equal(loaded[usual], wanted[usual], equal_nan=True)
        back = converted(wanted, stored)
        assert np.array_equal(back[usual], part[usual], equal_nan=True)
        assert np.array_equal(np.signbit(back[usual]), np.signbit(part[usual]))


@np.errstate(all="ignore")
@dtypes
@stored_types
def test_numbers_between_two_of_half_precision_become_the_nearest(isa, dtype, stored):
    """Ties the even one, beyond the largest infinity, and once: of float64 not by way of a float32 that is rounded itself."""
    x = np.arange(2**15, dtype=np.uint16).view(stored).astype(np.float64)
    x = x[np.isfinite(x) & (x >= 2.0**-126)]
    low, high = x, np.append(x[1:], x[-1] + (x[-1] - x[-2]))
    first = converted(x[:1], stored).view(np.uint16)[0]
    even = (np.arange(len(x)) + first) % 2 == 0
    ends = np.append(x[1:], np.inf)
    near = 2.0**-10 if dtype is np.float32 else 2.0**-28        # of the tie
    for sign, (share, upward) in itertools.product((1, -1), ((0.5, ~even), (0.5 - near, False), (0.5 + near, True))):
        between = (sign * (low + share * (high - low))).astype(dtype)
        assert np.array_equal(converted(between, stored), (sign * np.where(upward, ends, low)).astype(stored))


# ------------------------------------------------------------------------------------------------ the bits of float32


MASKED = [(kind, shape) for kind in ("additive", "bool") for shape in ("B H Lq Lk", "1 1 Lq Lk", "B 1 1 Lk", "1 1 Lq 1", "view")]


@every_isa
@halves
@pytest.mark.parametrize("n", range(24))
def test_every_result_is_that_of_float32_rounded_once(isa, dtype, n):
    rng = np.random.default_rng(n)
    B, (H, Hkv) = 1 + n % 2, ((1, 1), (4, 2), (6, 2), (3, 3))[n % 4]
    Lq, Lk, D, Dv = (int(rng.choice(x)) for x in ((1, 3, 17, 64, 70), (5, 63, 192, 200, 513), (1, 8, 33, 64), (1, 16, 17, 80)))
    layout = LAYOUTS[n % 2]
    q, k, v, g = draw(rng, B, H, Hkv, Lq, Lk, D, Dv, dtype, layout)
    names = {name for name in NAMES if rng.random() < 0.4}
    mask = MASKED[n % len(MASKED)] if n % 3 else None
    rules = {"layout": layout, **rules_of(rng, names, mask, {"B": B, "H": H, "Lq": Lq, "Lk": Lk}, dtype)}
    if n % 4 == 3:
        for x in (q, k, v, g):
            x.flat[rng.integers(x.size, size=2)] = rng.choice([np.nan, np.inf, -np.inf], 2)
    forward = {name: given for name, given in rules.items() if name != "need_bias_grad"}
    of_forward, of_rules = ({name: wide(x) for name, x in given.items()} for given in (forward, rules))
    for algorithm in [*NAMED, "decode"] if Lq * H // Hkv <= 64 else NAMED:
        how = {"algorithm": algorithm, "return_lse": True}
        out, lse = fastmha.attention(q, k, v, **forward, **how)
        assert out.dtype == dtype
        assert lse.dtype == np.float32
        assert_rounded((out, lse), fastmha.attention(*map(wide, (q, k, v)), **of_forward, **how), algorithm == "blas")
        if algorithm == "decode":
            continue
        grads = fastmha.attention_backward(g, q, k, v, out, lse, algorithm=algorithm, **rules)
        arrays = (wide(x) for x in (g, q, k, v, out))
        wanted = fastmha.attention_backward(*arrays, lse, algorithm=algorithm, **of_rules)
        assert_rounded(grads, wanted, algorithm == "blas")


@halves
def test_weights_and_their_reductions_are_those_of_float32_rounded_once(isa, dtype, rng):
    q, k, v, _ = draw(rng, 2, 4, 2, 17, 40, 8, 5, dtype)
    for reduce in (None, "sum_q", "max", "entropy"):
        call = {"capture": Capture([3, 0], slice(2, None, 3), reduce), "is_causal": True, "offset": 23}
        assert_rounded(fastmha.attention(q, k, v, **call), fastmha.attention(*map(wide, (q, k, v)), **call))
        assert fastmha.attention(q, k, v, **call)[1].dtype == dtype


@halves
def test_textbook_functions_give_float32_results_rounded_once(isa, dtype, rng):
    x, y = (rng.standard_normal((2, 9, 24)).astype(dtype)[:, ::-1] for _ in range(2))
    mask = rng.standard_normal((9, 9)).astype(dtype)
    W = {f"W_{letter}": (rng.standard_normal((24, 24)) / 5).astype(dtype) for letter in "QKVO"}
    W["b_O"] = rng.standard_normal(24).astype(dtype)
    calls = (
        lambda of: fastmha.softmax(of(x)),
        lambda of: fastmha.softmax_backward(of(x), of(y)),
        lambda of: fastmha.scaled_dot_product_attention(of(x), of(y), of(y), of(mask)),
        lambda of: fastmha.multi_head_attention_core(of(x), of(y), of(y), 4, of(mask)),
        lambda of: fastmha.multi_head_attention(of(x), of(y), of(y), 4, {name: of(w) for name, w in W.items()}, of(mask)),
    )
    for call in calls:
        results, of_float32 = (x if isinstance(x, tuple) else (x,) for x in (call(lambda x: x), call(wide)))
        assert all(x.dtype == dtype for x in results)
        assert_rounded(results, of_float32)


@halves
def test_packed_and_merged_results_are_those_of_float32_rounded_once(isa, dtype, rng):
    lengths = [5, 0, 70, 1]
    q, k, v, g = (rng.standard_normal((76, heads, 8)).astype(dtype) for heads in (4, 2, 2, 4))
    sinks = rng.standard_normal(4).astype(dtype)
    for algorithm in NAMED:
        rules = {"is_causal": True, "algorithm": algorithm}
        out, lse = fastmha.attention_packed(q, k, v, lengths, sinks=sinks, return_lse=True, **rules)
        wanted = fastmha.attention_packed(*map(wide, (q, k, v)), lengths, sinks=wide(sinks), return_lse=True, **rules)
        assert_rounded((out, lse), wanted, algorithm == "blas")
        grads = fastmha.attention_packed_backward(g, q, k, v, out, lse, lengths, sinks=sinks, **rules)
        arrays = (wide(x) for x in (g, q, k, v, out))
        wanted = fastmha.attention_packed_backward(*arrays, lse, lengths, sinks=wide(sinks), **rules)
        assert_rounded(grads, wanted, algorithm == "blas")
    sides = [fastmha.attention(*(x[None, :9] for x in (q, k, v)), return_lse=True, layout="BLHD", key_ranges=r)
             for r in ((0, 4), (4, 9))]
    merged = fastmha.merge(*sides[0], *sides[1], layout="BLHD")
    assert merged[0].dtype == dtype
    assert_rounded(merged, fastmha.merge(*(wide(x) for side in sides for x in side), layout="BLHD"))


# ----------------------------------------------------------------------------------------------------- types that meet


@every_isa
@dtypes
@stored_types
def test_queries_of_float_attend_keys_and_values_of_half_precision(isa, dtype, stored, rng):
    """Results belong to their operands: grad_k and grad_v are rounded to the type of k and v, out and grad_q are not."""
    q, k, v, g = draw(rng, 2, 4, 2, 17, 200, 9, 16, dtype)
    k, v = k.astype(stored), v.astype(stored)
    keywords = {"is_causal": True, "offset": 150, "softcap": 3.0}
    exact, bounds = oracle(q, k, v, g, dtype, **keywords)
    half = [eps(stored) / 2 * (np.abs(x) + bound) + 2.0**-25 for x, bound in zip(exact[3:], bounds[3:], strict=True)]
    bounds = [*bounds[:3], *(x + y for x, y in zip(bounds[3:], half, strict=True))]
    for algorithm in NAMED:
        out, lse = fastmha.attention(q, k, v, return_lse=True, algorithm=algorithm, **keywords)
        grads = fastmha.attention_backward(g, q, k, v, out, lse, algorithm=algorithm, **keywords)
        assert [x.dtype for x in (out, lse, *grads)] == [dtype] * 3 + [np.dtype(stored)] * 2
        assert_close((out, lse, *grads), exact, bounds)
    assert_close(fastmha.attention(q, k, v, return_lse=True, algorithm="decode", **keywords), exact[:2], bounds[:2])


@halves
@pytest.mark.parametrize("algorithm", [*NAMED, "decode"])
@pytest.mark.parametrize("shape", [(2, 1, 9, 70), (9, 70), (2, 1, 1, 70), (1, 4, 9, 1)], ids=str)
def test_an_additive_mask_is_of_the_operands_type_or_float32(isa, dtype, algorithm, shape, rng):
    q, k, v, g = draw(rng, 2, 4, 2, 9, 70, 8, 5, dtype)
    mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape)).astype(dtype)
    results = [fastmha.attention(q, k, v, mask=m, return_lse=True, algorithm=algorithm) for m in (mask, wide(mask))]
    assert_same(*results)
    for _, lying in rearranged(mask):
        assert_same(fastmha.attention(q, k, v, mask=lying, return_lse=True, algorithm=algorithm), results[0])
    if algorithm != "decode":
        for m in (mask, wide(mask)):
            check(q, k, v, g, mask=m, algorithm=algorithm, need_bias_grad=True)


@halves
def test_sinks_and_slopes_are_of_the_operands_type_or_float32(dtype, rng):
    arrays = draw(rng, 2, 4, 2, 9, 9, 8, 5, dtype)
    sinks, alibi = (rng.standard_normal(4).astype(dtype) for _ in range(2))
    found = [check(*arrays, sinks=of(sinks), alibi=of(alibi)) for of in (lambda x: x, wide)]
    assert_same(found[0][:5], found[1][:5])


@halves
@pytest.mark.parametrize("algorithm", NAMED)
@pytest.mark.parametrize("constant", [-1e4, "largest"])
def test_keys_behind_a_large_constant_count_nothing(isa, dtype, algorithm, constant, rng):
    """As padding is often written; where it is laid over a whole row, all keys count alike."""
    q, k, v, g = draw(rng, 2, 4, 2, 70, 200, 8, 5, dtype)
    constant = -LARGEST[np.dtype(dtype).name] if constant == "largest" else constant
    mask = np.where(rng.random((2, 1, 70, 200)) < 0.3, constant, 0).astype(dtype)
    mask[:, :, 7] = constant
    check(q, k, v, g, mask=mask, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", NAMED)
def test_what_is_too_large_for_float16_is_infinite(isa, algorithm, rng):
    """And what is computed on the way may be: products of the largest numbers are finite in float32."""
    q, k, v, g = (np.sign(x) * np.float16(6e4) for x in draw(rng, 1, 2, 2, 20, 30, 16, 8, np.float16))
    out, lse = fastmha.attention(q, k, v, return_lse=True, algorithm=algorithm)
    assert np.isfinite(out).all()
    assert np.abs(lse).max() > 1e9
    grads = fastmha.attention_backward(np.abs(g), q, k, v, out, lse, algorithm=algorithm)
    assert not any(np.isnan(x).any() for x in grads)
    assert np.isinf(grads[2]).any()


@halves
@pytest.mark.parametrize("algorithm", NAMED)
def test_results_below_the_smallest_normal_number_keep_their_digits(isa, dtype, algorithm, rng):
    """float16's are numbers like others to float32; a row of bfloat16's, throughout as small, is computed apart."""
    q, k, v, _ = draw(rng, 1, 2, 1, 9, 40, 8, 5, np.float32)
    v *= np.float32(1e-6 if dtype is np.float16 else 1e-38)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    out = fastmha.attention(q, k, v, algorithm=algorithm).astype(np.float64)
    (q, k, v), _ = in_float64((q, k, v), {})
    wanted = fastmha.attention(q, k, v)
    least = 2.0**-24 if dtype is np.float16 else 2.0**-133
    assert np.abs(out).max() > 0
    assert (np.abs(out - wanted) <= 0.51 * least + eps(dtype) / 1.9 * np.abs(wanted)).all()


# ------------------------------------------------------------------------------------------------------ plan and errors


@halves
def test_plan_counts_what_blas_converts_and_nothing_elsewhere(dtype, rng):
    q, k, v, _ = draw(rng, 2, 4, 2, 9, 30, 8, 16, dtype)
    k = np.broadcast_to(k[:1], k.shape)
    for algorithm, copied in (("tiled", 0), ("decode", 0), ("blas", 4 * (q.size + k.size // 2 + v.size))):
        plan = fastmha.plan(q, k, v, algorithm=algorithm)
        assert plan.bytes_copied == copied
        assert f"{np.dtype(dtype).name} B 2" in str(plan)
    plan = fastmha.plan(q.astype(np.float64), k, v, algorithm="blas")
    assert plan.bytes_copied == 8 * (k.size // 2 + v.size)
    assert f"float64 (k, v {np.dtype(dtype).name}) B 2" in str(plan)


def test_one_name_serves_all_dtypes_in_auto(isa, rng):
    """By vectors the algorithm is chosen by what is computed: the same for half precision as for float32."""
    for Lq, Lk in ((1, 5000), (70, 70), (4, 300)):
        chosen = {fastmha.plan(*draw(rng, 1, 4, 4, Lq, Lk, 64, 64, dtype)[:3]).algorithm for dtype in (np.float32, *HALVES)}
        assert len(chosen) == 1


@halves
def test_types_that_do_not_go_together_are_named(dtype, rng):
    q, k, v, g = draw(rng, 2, 2, 2, 5, 5, 4, 4, dtype)
    name = np.dtype(dtype).name
    other = {"float16": "bfloat16", "bfloat16": "float16"}[name]
    out, lse = fastmha.attention(q, k, v, return_lse=True)
    share = ": they must share one dtype"
    for arrays, message in (
        ((q, wide(k), v), f"k has dtype float32 but q has {name}{share}"),
        ((q, k, wide(v)), f"v has dtype float32 but q has {name}{share}"),
        ((wide(q), k, wide(v)), f"v has dtype float32 but k has {name}{share}"),
        ((wide(q), wide(k), v), f"v has dtype {name} but q has float32{share}"),
    ):
        with raises(TypeError, message):
            fastmha.attention(*arrays)
    with raises(TypeError, f"mask must be bool ... or float32 or {name} like q (added to the scores), got float64"):
        fastmha.attention(q, k, v, mask=np.zeros((5, 5)))
    with raises(TypeError, f"sinks has dtype float64 but q has {name}{share}"):
        fastmha.attention(q, k, v, sinks=np.zeros(2))
    with raises(TypeError, f"out has dtype float32 but q has {name}{share}"):
        fastmha.attention(q, k, v, out=np.empty(g.shape, np.float32))
    with raises(TypeError, f"lse has dtype float64 but q has {name}: their lse is float32"):
        fastmha.attention_backward(g, q, k, v, out, lse.astype(np.float64))
    with raises(TypeError, f"grad_out has dtype float32 but q has {name}{share}"):
        fastmha.attention_backward(wide(g), q, k, v, out, lse)
    with raises(TypeError, f"lse1 has dtype float64 but out1 has {name}: their lse is float32"):
        fastmha.merge(out, lse.astype(np.float64), out, lse)
    if len(HALVES) == 2:
        with raises(TypeError, f"k has dtype {other} but q has {name}{share}"):
            fastmha.attention(q, k.astype(HALVES[other != "float16"]), v)
        with raises(TypeError, f"v has dtype {other} but k has {name}{share}"):
            fastmha.attention(wide(q), k, v.astype(HALVES[other != "float16"]))
