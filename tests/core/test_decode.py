"""The "decode" algorithm (few query rows, many keys, forward only) against the float64 reference, and its guarantees.

Keys are taken in chunks of 512 and 64 at a time, so the lengths here lie around both; rows are those of all heads of a
group. Tolerances are those of `reference.error_bounds`, as in test_attention.
"""

import itertools

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from support import (
    ISAS,
    RESULTS,
    all_dtypes,
    all_isas,
    assert_close,
    assert_dtypes,
    assert_same,
    bits,
    draw,
    draw_ill_scaled,
    dtypes,
    error_bounds,
    every_isa,
    halves,
    ill_scaled,
    in_float64,
    oracle,
    padded,
    same_bits,
    selected,
    unaligned,
)

import fastmha
from fastmha import _core, reference, validate
from fastmha.algorithms import DECODE_ROWS_MAX

LENGTHS = (1, 2, 3, 15, 17, 31, 63, 64, 65, 127, 129, 511, 512, 513, 1500)


def decode(q, k, v, **keywords):
    """(out, lse) by the algorithm."""
    return fastmha.attention(q, k, v, algorithm="decode", return_lse=True, **keywords)


def check(q, k, v, g, **keywords):
    """Out and lse against the oracle, inputs untouched."""
    before = [x.copy() for x in (q, k, v)]
    results = decode(q, k, v, **keywords)
    for x, kept in zip((q, k, v), before, strict=True):
        assert same_bits(x, kept)
    assert_dtypes(results, RESULTS[:2], q, k, keywords)
    for x in results:
        assert x.flags.c_contiguous
    expected, bounds = oracle(q, k, v, g, q.dtype, **keywords)
    assert_close(results, expected[:2], bounds[:2])
    return results


# --------------------------------------------------------------------------------------------------- lengths and widths


@dtypes
@pytest.mark.parametrize("Lk", LENGTHS)
def test_every_length_of_keys(isa, dtype, Lk, rng):
    for Lq, H, Hkv in ((1, 1, 1), (2, 3, 1), (5, 8, 1), (3, 4, 2)):
        check(*draw(rng, 2, H, Hkv, Lq, Lk, 9, 8, dtype))


@dtypes
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("Lq", range(1, 6))
def test_every_number_of_rows(isa, dtype, group, Lq, rng):
    check(*draw(rng, 1, 2 * group, 2, Lq, 67, 8, 5, dtype), is_causal=True, offset=67 - Lq)


@dtypes
def test_as_many_rows_as_it_takes(isa, dtype, rng):
    for H, Lq in ((1, 64), (64, 1), (8, 8), (3, 21)):
        assert H * Lq <= DECODE_ROWS_MAX
        check(*draw(rng, 1, H, 1, Lq, 70, 5, 4, dtype), is_causal=True, offset=6)


@all_dtypes
@pytest.mark.parametrize("D", [0, 1, 2, 7, 16, 17, 33, 64, 65])
def test_every_width(isa, dtype, D, rng):
    for Dv in (0, 1, 3, 8, 16, 31, 64):
        check(*draw(rng, 1, 2, 1, 2, 70, D, Dv, dtype))


# ---------------------------------------------------------------------------------------------------------------- masks

B, H, HKV, LQ, LK = 3, 6, 2, 3, 530


def mask_of(kind, dtype, rng):
    """A boolean or additive mask (B, H, Lq, Lk) or a broadcast of one; one row of it is empty."""
    gone = rng.random((B, H, LQ, LK)) < 0.4
    gone[1, 2, 1] = True
    gone[..., 70:135] = True  # whole steps of keys in which nothing is attended
    additive = np.where(gone, -np.inf, rng.standard_normal(gone.shape)).astype(dtype)
    return {
        "none": None,
        "bool": gone,
        "bool of keys": gone[:, :1, :1],
        "bool, a step and backwards": np.repeat(gone, 2, axis=-1)[::-1, :, ::-1, ::2],
        "additive": additive,
        "additive of two axes": additive[0, 0],
        "additive of queries": additive[:1, :, :, :1],
        "additive, a step and backwards": np.repeat(additive, 2, axis=-1)[:, ::-1, :, ::2],
    }[kind]


RULES = {
    "plain": {},
    "causal": {"is_causal": True, "offset": LK - LQ},
    "causal, an offset per batch row": {"is_causal": True, "offset": np.array([-2, 63, 600])},
    "causal, all rows empty": {"is_causal": True, "offset": -LQ},
    "window": {"window": (70, 5), "offset": np.array([60, 515, -3])},
    "window beyond the keys": {"window": (2, 1), "offset": np.array([-9, 2000, 529])},
    "padding": {"key_padding_lengths": np.array([LK, 0, 65])},
    "padding on the left": {"key_ranges": (np.array([LK - 1, 0, 65]), None)},
    "ranges": {"key_ranges": ([256, 511, 513], np.array([512, 513, 513]))},
    "everything": {
        "key_padding_lengths": [513, 64, 0],
        "is_causal": True,
        "window": (300, None),
        "offset": np.array([512, 40, 7]),
        "softcap": 2.5,
        "scale": -0.7,
    },
    "everything within ranges": {
        "key_ranges": ([255, 41, 1], 520),
        "key_padding_lengths": [513, 64, 7],
        "is_causal": True,
        "window": (300, None),
        "offset": np.array([512, 40, 7]),
        "softcap": 2.5,
    },
}


MASKS = [      # every rule with each kind; what lies or repeats otherwise with none and with all of them
    *((kind, rules) for kind in ("none", "bool", "additive") for rules in RULES),
    *((kind, rules) for kind in ("bool of keys", "bool, a step and backwards", "additive of two axes", "additive of queries",
                                 "additive, a step and backwards") for rules in ("plain", "everything")),
]  # fmt: skip


FEW_KEYS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 63, 64, 65)  # one row of a head on up to 64 keys is done at once


@dtypes
@pytest.mark.parametrize("Lk", FEW_KEYS)
@pytest.mark.parametrize("D", [1, 7, 16, 33, 64, 67])
def test_one_row_of_a_head_on_few_keys(isa, dtype, D, Lk, rng):
    check(*draw(rng, 2, 3, 3, 1, Lk, D, 68 - D, dtype))


@dtypes
@pytest.mark.parametrize("Lk", FEW_KEYS)
def test_one_row_on_few_keys_has_the_bits_of_chunks(isa, dtype, Lk, rng):
    """Which it goes through under a mask that is not of the keys alone."""
    for D, Dv in ((5, 70), (64, 64), (67, 1), (130, 33)):
        q, k, v, _ = draw(rng, 2, 3, 3, 1, Lk, D, Dv, dtype)
        assert_same(decode(q, k, v), decode(q, k, v, mask=np.zeros((2, 3, 1, Lk), bool)))


@dtypes
@pytest.mark.parametrize("Lk", [1, 5, 20, 64])
@ill_scaled
def test_one_row_on_few_keys_at_any_scale(isa, dtype, kind, Lk, rng):
    check(*(x.astype(dtype) for x in draw_ill_scaled(kind, rng, 2, 3, 3, 1, Lk)))


@dtypes
@pytest.mark.parametrize("Lk", [1, 5, 20, 64])
@pytest.mark.parametrize("case", ["nan", "inf", "-inf", "largest", "tiny", "zeros", "subnormal"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_one_row_on_few_keys_of_any_numbers_is_what_it_is_under_a_mask(isa, dtype, operand, case, Lk, rng):
    """One that removes nothing, and is not of the keys alone: such rows go through chunks."""
    info = np.finfo(dtype)
    numbers = {"largest": info.max / 2, "tiny": info.tiny * 8, "zeros": 0.0, "subnormal": info.smallest_subnormal * 5}
    value = numbers.get(case, case)
    for all_of in (False, True):
        q, k, v, _ = draw(rng, 2, 2, 2, 1, Lk, 20, 19, dtype)
        x = {"q": q, "k": k, "v": v}[operand]
        if all_of:
            x[...] = np.sign(x) * dtype(value)
        else:
            x[1, 0, 0, ::7] = dtype(value)
        expected = decode(q, k, v, mask=np.zeros((2, 2, 1, Lk), bool))
        for got, wanted in zip(decode(q, k, v), expected, strict=True):
            most = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
            np.testing.assert_allclose(got, wanted, rtol=8 * info.eps, atol=64 * info.eps * most)


@dtypes
@pytest.mark.parametrize("side_by_side", [False, True], ids=["", "side by side"])
@pytest.mark.parametrize("chunks", list(itertools.product(("tiny", "subnormal", "zero", "ordinary"), repeat=2)), ids="-".join)
def test_chunks_of_tiny_values_beside_others(isa, dtype, chunks, side_by_side, rng):
    """Those whose values are all tiny are raised at once, and are done again where another chunk has others. What a removed key
    holds, of whatever size, changes no bit of rows that do not attend it."""
    if dtype == np.float64 and np.finfo(np.longdouble).minexp >= np.finfo(dtype).minexp:
        pytest.skip("this machine has no wider type for the reference")
    info, Lk = np.finfo(dtype), 900
    q, k, v, _ = draw(rng, 1, 8, 4, 2, Lk, 16, 24, dtype)
    sizes = {"tiny": info.smallest_normal / info.eps / 1000, "subnormal": info.smallest_normal / 3, "zero": 0, "ordinary": 1}
    for n, size in enumerate(chunks):
        v[:, :, n * 512 : (n + 1) * 512] *= dtype(sizes[size])
    mask = np.zeros((2, Lk), bool)
    mask[:, [0, 7, 515, 899]] = True
    mask[1, 512:] = True
    wide = np.longdouble if dtype == np.float64 else np.float64
    with np.errstate(all="ignore"):
        exact = reference.attention(*(x.astype(wide) for x in (q, k, v)), mask=mask)
    if side_by_side:
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v))
    before = _core.neighbours_from(0 if side_by_side else np.inf)
    try:
        assert (_core.decode_neighbours(validate.attention_problem(q, k, v, "BHLD"), 1) > 1) == side_by_side
        out, lse = decode(q, k, v, mask=mask)
        bound = 400 * info.eps * np.abs(exact).max(axis=-1, keepdims=True) + info.smallest_subnormal
        assert (np.abs(out.astype(wide) - exact) <= bound).all()
        for place, value in itertools.product((0, 7, 515, 899), (np.nan, 1, info.max, info.smallest_subnormal, 0)):
            other = v.copy(order="K")
            other[:, :, place] = value
            for got, wanted in zip(decode(q, k, other, mask=mask), (out, lse), strict=True):
                assert same_bits(got, wanted), (place, value)
    finally:
        _core.neighbours_from(before)


@dtypes
@pytest.mark.parametrize("Dv", [0, 5])
def test_one_row_on_few_keys_whose_scores_are_beyond_numbers(isa, dtype, Dv, rng):
    q, k, v, _ = draw(rng, 1, 1, 1, 1, 9, 4, Dv, dtype)
    q[...] = 1
    for value, wanted in ((-np.inf, -np.inf), (np.inf, np.nan), (np.nan, np.nan)):
        k[...] = value
        out, lse = decode(q, k, v)
        np.testing.assert_array_equal(lse, np.full_like(lse, wanted))
        np.testing.assert_array_equal(out, np.full_like(out, 0 if np.isinf(wanted) else np.nan))


@every_isa
def test_one_row_of_huge_queries_on_few_subnormal_keys(isa, rng):
    """Such keys count as 0 elsewhere."""
    q, k, v, g = draw(rng, 2, 2, 2, 1, 9, 20, 19, np.float32)
    q *= np.finfo(np.float32).max / 8
    k *= np.finfo(np.float32).tiny / 16
    wide, _ = in_float64((q, k, v, g), {})
    np.testing.assert_allclose(decode(q, k, v)[0], reference.attention(*wide[:3]), rtol=0, atol=1e-5)


@dtypes
@pytest.mark.parametrize(("kind", "rules"), MASKS)
def test_all_masks_together(isa, dtype, kind, rules, rng):
    check(*draw(rng, B, H, HKV, LQ, LK, 6, 5, dtype), mask=mask_of(kind, dtype, rng), **RULES[rules])


@all_dtypes
def test_softcap_and_scale(isa, dtype, rng):
    for extra in ({"softcap": 1.5}, {"scale": -0.8}, {"scale": 0.0}, {"scale": 2, "softcap": 20.0}):
        check(*draw(rng, 2, 4, 2, 2, 130, 7, 6, dtype), **extra)


@all_dtypes
def test_empty_rows_are_zeros_and_minus_infinity(isa, dtype, rng):
    q, k, v, _ = draw(rng, 2, 4, 2, 2, 600, 6, 5, dtype)
    mask = np.zeros((1, 4, 2, 1), bool)
    mask[0, 1, 0] = True
    for keywords, empty in (
        ({"mask": mask}, np.broadcast_to(mask[..., 0], (2, 4, 2))),
        ({"key_padding_lengths": [0, 600]}, np.broadcast_to([[[True]], [[False]]], (2, 4, 2))),
        ({"is_causal": True, "offset": -1}, np.broadcast_to([True, False], (2, 4, 2))),
    ):
        out, lse = decode(q, k, v, **keywords)
        assert not bits(out)[empty].any()
        assert np.array_equal(np.isneginf(lse), empty)
        assert np.isfinite(out).all()


# --------------------------------------------------------------------------------------------------------------- memory


def steps(x):
    return np.repeat(x, 3, axis=3)[..., ::3]


STRANGE = {
    "Fortran": np.asfortranarray,
    "backwards": lambda x: x[::-1, ::-1, ::-1, ::-1],
    "rows backwards": lambda x: x[:, :, ::-1],
    "broadcast batch": lambda x: np.broadcast_to(x[:1], x.shape),
    "broadcast heads": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "broadcast rows": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
    "broadcast width": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "step": steps,
    "unaligned": unaligned,
    "overlapping": lambda x: as_strided(np.ascontiguousarray(x), x.shape, [x.itemsize * s for s in (2, 1, 3, 1)]),
}


@all_dtypes
@pytest.mark.parametrize("kind", STRANGE)
def test_any_strides(dtype, kind, rng):
    for D, Dv in ((8, 16), (5, 1)):
        arrays = draw(rng, 2, 4, 2, 2, 70, D, Dv, dtype)
        for which in ([0], [1], [2], [0, 1, 2]):
            changed = [STRANGE[kind](x) if n in which else x for n, x in enumerate(arrays)]
            check(*changed)


@all_dtypes
def test_out_of_any_strides_is_written_and_nothing_beside_it(isa, dtype, rng):
    for Dv in (1, 5, 16):
        q, k, v, g = draw(rng, 2, 4, 2, 2, 70, 8, Dv, dtype)
        expected, _ = decode(q, k, v)
        around = np.full([n + 2 for n in g.shape], np.nan, dtype)
        out = around[1:-1, 1:-1, -2:0:-1, 1:-1]
        assert fastmha.attention(q, k, v, algorithm="decode", out=out) is out
        assert same_bits(out, expected)
        out[...] = np.nan
        assert np.isnan(around).all()


@all_dtypes
@pytest.mark.parametrize("axes", ["B", "H", "Hkv H", "Lq", "Lk", "D", "Dv", "Lq Lk", "D Dv", "B H Hkv Lq Lk D Dv"])
def test_empty_axes(isa, dtype, axes, rng):
    sizes = {"B": 2, "H": 4, "Hkv": 2, "Lq": 3, "Lk": 65, "D": 6, "Dv": 7} | dict.fromkeys(axes.split(), 0)
    arrays = draw(rng, **sizes, dtype=dtype)
    for keywords in ({}, {"is_causal": True, "offset": 1}, {"key_padding_lengths": [0] * sizes["B"]}, {"softcap": 1.0}):
        out, lse = check(*arrays, **keywords)
        fastmha.plan(*arrays[:3], algorithm="decode", **keywords)
    if sizes["Lk"] == 0:
        assert not bits(out).any()
        assert np.isneginf(lse).all()


# ------------------------------------------------------------------------------------------------------------- firewall


POISONS = (np.nan, np.inf, -np.inf)


@dtypes
@pytest.mark.parametrize("rules", [name for name in RULES if name != "plain"])
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_removed_keys_and_values_change_no_bit(isa, dtype, kind, rules, rng):
    q, k, v, _ = draw(rng, B, H, HKV, LQ, LK, 6, 5, dtype)
    keywords = {"mask": mask_of(kind, dtype, rng), **RULES[rules]}
    pairs = {name: value for name, value in keywords.items() if name not in ("softcap", "scale")}
    gone = np.broadcast_to(reference.removed(LQ, LK, **pairs), (B, H, LQ, LK))
    clean = decode(q, k, v, **keywords)
    # First all keys that no row of the group attends, then a key that some rows attend.
    nobody = gone.reshape(B, HKV, -1, LK).all(axis=2)
    for poison in POISONS:
        k_dirty, v_dirty = padded(k), padded(v)
        k_dirty[nobody] = v_dirty[nobody] = poison
        assert_same(clean, decode(q, k_dirty, v_dirty, **keywords))
    for j, poison in itertools.product((0, 64, 520), POISONS):
        k_dirty, v_dirty = padded(k), padded(v)
        k_dirty[:, :, j] = v_dirty[:, :, j] = poison
        for x, y in zip(clean, decode(q, k_dirty, v_dirty, **keywords), strict=True):
            assert np.array_equal(bits(x)[gone[..., j]], bits(y)[gone[..., j]])


@all_dtypes
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("operand", ["k", "v", "q"])
def test_an_attended_nan_reaches_exactly_its_rows(isa, dtype, operand, extra, rng):
    arrays = draw(rng, B, H, HKV, LQ, LK, 6, 5, dtype)
    gone = rng.random((B, H, LQ, LK)) < 0.5
    b, h, n = 1, 4, 1
    for j in (0, 63, 64, 511, 512, LK - 1):
        q, k, v, _ = (padded(x) for x in arrays)
        rows = np.zeros((B, H, LQ), bool)
        if operand == "q":
            q[b, h, 2, 3] = np.nan
            rows[b, h, 2] = True
        else:
            (k if operand == "k" else v)[b, n, j] = np.nan
            rows[b, n * 3 : n * 3 + 3] = ~gone[b, n * 3 : n * 3 + 3, :, j]
        out, lse = decode(q, k, v, mask=gone, **extra)
        assert np.array_equal(np.isnan(out).all(axis=-1), rows)
        assert np.array_equal(np.isnan(out).any(axis=-1), rows)
        assert np.array_equal(np.isnan(lse), rows & (operand != "v"))


@all_dtypes
@pytest.mark.parametrize("poison", POISONS)
def test_one_poisoned_element_of_a_value_stays_in_its_column(isa, dtype, poison, rng):
    """In its place all over, and every other element keeps its bits, also those of the rows that attend it."""
    q, k, v, _ = draw(rng, 1, 2, 1, 2, 600, 6, 7, dtype)
    mask = np.zeros((2, 600), bool)
    mask[0, 77] = True
    clean = decode(q, k, v, mask=mask)
    v[0, 0, 77, 4] = poison
    out, lse = decode(q, k, v, mask=mask)
    reached = np.zeros(out.shape, bool)
    reached[:, :, 1, 4] = True
    assert np.array_equal(out[reached], np.full(2, poison, dtype), equal_nan=True)
    assert np.array_equal(np.isfinite(out), ~reached)
    assert same_bits(out[:, :, 0], clean[0][:, :, 0])
    assert np.array_equal(bits(out)[~reached], bits(clean[0])[~reached])
    assert same_bits(lse, clean[1])


@dtypes
def test_lse_does_not_depend_on_the_values(isa, dtype, rng):
    q, k, v, _ = draw(rng, 1, 2, 1, 2, 600, 6, 7, dtype)
    _, lse = decode(q, k, v)
    for size in (0, np.finfo(dtype).max / 2, np.inf, np.nan):
        assert same_bits(decode(q, k, np.full_like(v, size))[1], lse)


@dtypes
@pytest.mark.parametrize("Lk", [1, 9, 64, 65, 513, 1500])
def test_an_average_of_large_finite_values_is_finite(isa, dtype, Lk, rng):
    """Also where the sum of the values, taken before it is divided, would not be."""
    q, k, v, _ = draw(rng, 1, 3, 1, 2, Lk, 8, 5, dtype)
    largest = 2e38 if dtype == np.float32 else 1.2e308
    v[...] = largest * np.sign(v)
    v[..., 0] = largest
    out, lse = decode(q, k, v)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    np.testing.assert_allclose(out[..., 0], largest, rtol=1e-5)
    wide = reference.attention(*(x.astype(np.longdouble) for x in (q, k)), v.astype(np.longdouble) / largest)
    np.testing.assert_allclose((out / largest).astype(np.float64), wide.astype(np.float64), rtol=0, atol=1e-5)


@dtypes
def test_scores_beyond_exp_stay_finite(isa, dtype, rng):
    for size in (30.0, 1e4):
        q, k, v, _ = ((size * np.sign(x)).astype(dtype) for x in draw(rng, 2, 2, 2, 2, 600, 16, 4))
        for x in decode(q, k, v):
            assert np.isfinite(x).all()


# ----------------------------------------------------------------------------------------------------------------- bits

PROBLEMS = {
    "one row": ((3, 2, 2, 1, 1500, 16, 16), {}),
    "groups": ((2, 6, 2, 3, 700, 7, 9), {"is_causal": True, "offset": 640}),
    "masks": (
        (3, 4, 2, 2, 1100, 8, 5),
        {"window": (600, 3), "offset": [900, -4, 700], "key_padding_lengths": [1100, 7, 0], "softcap": 2.0},
    ),
    "few keys": ((3, 4, 4, 2, 9, 5, 3), {}),
    "one row on few keys": ((3, 4, 4, 1, 40, 20, 19), {}),
    # so many chunks that one thread takes several at a time; keys and values of the first are read in turns
    "chunks": ((8, 8, 4, 1, 2100, 64, 64), {}),
    "chunks of three rows": (
        (8, 6, 2, 1, 2100, 16, 48),
        {"window": (1300, 3), "offset": 2050, "key_padding_lengths": list(range(2100, 500, -200))},
    ),
    "chunks of seven rows": ((8, 7, 1, 1, 1300, 40, 192), {"softcap": 2.0}),
}
problems = pytest.mark.parametrize("name", PROBLEMS)


@all_dtypes
@problems
def test_n_threads_agnosticism(isa, dtype, name, rng):
    shape, keywords = PROBLEMS[name]
    q, k, v, _ = draw(rng, *shape, dtype=dtype)
    one = decode(q, k, v, num_threads=1, **keywords)
    for threads in (2, 3, 7):
        assert_same(one, decode(q, k, v, num_threads=threads, **keywords))


@all_dtypes
@problems
def test_the_same_bits_from_run_to_run(isa, dtype, name, rng):
    shape, keywords = PROBLEMS[name]
    arrays = draw(rng, *shape, dtype=dtype)[:3]
    first = decode(*arrays, **keywords)
    for _ in range(3):
        assert_same(first, decode(*[padded(x) for x in arrays], **keywords))
    # Where the rows lie does not matter either.
    assert_same(first, decode(*[np.ascontiguousarray(x) for x in arrays], **keywords))


@all_dtypes
@problems
def test_batch_agnosticism_a_row_alone_and_in_a_batch(isa, dtype, name, rng):
    shape, keywords = PROBLEMS[name]
    arrays = draw(rng, *shape, dtype=dtype)[:3]
    together = decode(*arrays, **keywords)
    for b in range(shape[0]):
        own = {n: value[b : b + 1] if isinstance(value, list) else value for n, value in keywords.items()}
        assert_same([x[b : b + 1] for x in together], decode(*(x[b : b + 1] for x in arrays), **own))


# Bytes of all keys and values, by which goes how far ahead is fetched, and by which loops rows are read: one head stays below the
# first limit (the widest groups of float64 below the second), each of these lies beyond one more. A broadcast view counts as many
# as it shows.
TOTALS = 1 << 21, 3 << 23, 1 << 26


@all_dtypes
@pytest.mark.parametrize("D", [4, 8, 16, 20, 24, 32, 40, 48, 56, 64, 80, 128, 256])
def test_heads_that_fill_any_cache_have_the_bits_of_one_alone(isa, dtype, D, fetched, rng):
    for Lk in (200, 611):
        q, k, v = (np.ascontiguousarray(x) for x in draw(rng, 1, 1, 1, 1, Lk, D, D, dtype)[:3])
        alone = decode(q, k, v)
        for total in TOTALS:
            heads = total // (2 * k.nbytes) + 2
            many = [np.broadcast_to(x, (heads, *x.shape[1:])) for x in (q, k, v)]
            for keys, values in (many[1:], [np.broadcast_to(padded(x), y.shape) for x, y in zip((k, v), many[1:], strict=True)]):
                assert_same([np.broadcast_to(x, (heads, *x.shape[1:])) for x in alone], decode(many[0], keys, values))


@all_dtypes
@pytest.mark.parametrize(
    ("rows", "D", "Dv", "keywords"),
    [
        (2, 64, 64, {}), (3, 16, 48, {"window": (300, 3), "offset": 650}), (4, 128, 128, {}), (7, 40, 192, {"softcap": 2.0}),
        (8, 64, 64, {}), (2, 72, 176, {}), (4, 20, 320, {}),
    ],
)
def test_groups_that_fill_any_cache_have_the_bits_of_one_alone(isa, dtype, rows, D, Dv, keywords, fetched, rng):
    q, k, v = (np.ascontiguousarray(x) for x in draw(rng, 1, rows, 1, 1, 700, D, Dv, dtype)[:3])
    alone = decode(q, k, v, num_threads=1, **keywords)
    for total, threads in zip(TOTALS, (1, 3, 1), strict=True):
        heads = total // (k.nbytes + v.nbytes) + 2
        many = [np.broadcast_to(x, (heads, *x.shape[1:])) for x in (q, k, v)]
        together = decode(*many, num_threads=threads, **keywords)
        assert_same([np.broadcast_to(x, (heads, *x.shape[1:])) for x in alone], together)


def from_memory(q, k, v, heads):
    """So many batch rows, views of q, k, v (1, heads, length, width), that count as more bytes than any cache holds."""
    rows = TOTALS[-1] // (k.nbytes + v.nbytes) + heads
    return [np.broadcast_to(x, (rows, *x.shape[1:])) for x in (q, k, v)]


@all_dtypes
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("rows", "Lk", "D", "Dv"),
    [(1, 200, 64, 64), (4, 77, 128, 128), (3, 256, 40, 72), (2, 700, 32, 32), (6, 300, 64, 20), (1, 1100, 96, 96)],
)
def test_heads_begun_beside_the_head_before_have_the_bits_of_one_alone(isa, dtype, rows, Lk, D, Dv, threads, fetched, rng):
    """Heads that differ follow each other; so do batch rows that attend other keys, some of them none."""
    q, k, v = draw(rng, 1, 3 * rows, 3, 1, Lk, D, Dv, dtype)[:3]
    many = from_memory(q, k, v, 3)
    starts = np.resize([0, 3, 140, 0, 60], len(many[0]))
    ends = np.resize([Lk, Lk - 1, Lk - 20, 5, Lk - 16, 0, 64], len(many[0]))
    for name, ranges in {"all keys": None, "some": (np.minimum(starts, ends), ends), "ends": (None, ends)}.items():
        together = decode(*many, key_ranges=ranges, num_threads=threads)
        for b in range(min(35, len(ends))):         # 35 ranges differ
            own = ranges and tuple(x if x is None else x[b : b + 1] for x in ranges)
            for h in range(3):
                queries = slice(h * rows, (h + 1) * rows)
                alone = decode(q[:, queries], k[:, h : h + 1], v[:, h : h + 1], key_ranges=own, num_threads=1)
                assert_same([x[b : b + 1, queries] for x in together], alone, name)


@dtypes
@pytest.mark.parametrize("unusual", ["a NaN in a key", "an infinite value", "huge queries", "tiny values"])
def test_a_head_that_is_computed_otherwise_leaves_the_next_as_it_is(isa, dtype, unusual, rng):
    """Its chunks are made anew, with care or raised, or the next one's scores are lifted: none is made beside another then."""
    q, k, v = draw(rng, 1, 4, 4, 1, 300, 64, 64, dtype)[:3]
    mask = np.zeros((1, 4, 1, 300), dtype=bool)
    mask[0, 1, 0, 7] = True
    if unusual == "a NaN in a key":
        k[0, 1, [7, 9]] = np.nan
    elif unusual == "an infinite value":
        v[0, 1, 9] = np.inf
    elif unusual == "huge queries":
        q[0, 1] *= np.finfo(dtype).max / 16
    else:
        v[0, 1] *= np.finfo(dtype).tiny
    with np.errstate(invalid="ignore", over="ignore"):
        together = decode(*from_memory(q, k, v, 4), mask=mask, num_threads=1)
        for h in range(4):
            alone = decode(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1], mask=mask[:, h : h + 1], num_threads=1)
            for b in (0, 1, 17):
                assert_same([x[b : b + 1, h : h + 1] for x in together], alone)


NEIGHBOURS = {
    # of B, H, Hkv, Lq, Lk, D, Dv; where B is larger, three threads have items of several heads, too
    "one row": ((2, 8, 8, 1, 1100, 64, 64), {}),
    "groups, a short step": ((2, 24, 6, 1, 700, 256, 256), {}),
    "several rows, odd widths": ((2, 10, 5, 2, 530, 33, 40), {}),
    "more heads than an item has": ((2, 33, 33, 1, 140, 80, 80), {}),
    "values of parts of vectors": ((2, 12, 4, 1, 600, 16, 7), {}),
    "one chunk": ((12, 8, 4, 1, 509, 128, 128), {}),
    "lengths and sinks": (
        (2, 8, 8, 1, 1100, 64, 64), {"key_padding_lengths": np.array([700, 0]), "sinks": np.linspace(-1, 3, 8)},
    ),
    "window": ((2, 8, 4, 2, 1100, 64, 64), {"window": (600, 0), "offset": 1000}),
    "softcap": ((7, 8, 8, 1, 700, 64, 64), {"softcap": 2.0}),
}


UNUSUAL = ("huge", "nan", "inf", "tiny", "large")


@all_dtypes
@pytest.mark.parametrize(
    ("name", "unusual"),
    [*((name, None) for name in NEIGHBOURS), *itertools.product(("one row", "groups, a short step", "window"), UNUSUAL)],
)
def test_heads_decoded_side_by_side_have_the_bits_of_contiguous_ones(isa, dtype, name, unusual, rng):
    """Of (B, L, H, D), by items of several heads, whatever is in one of them, as one after the other, and as in (B, H, L, D)."""
    (B, H, Hkv, Lq, Lk, D, Dv), keywords = NEIGHBOURS[name]
    q, k, v = draw(rng, B, H, Hkv, Lq, Lk, D, Dv, dtype=dtype, layout="BLHD")[:3]
    if unusual == "huge":
        q[1, 0, -1] = np.finfo(np.float16).max if dtype == np.float16 else 1e35
    elif unusual in ("nan", "inf"):
        v[0, Lk // 2, 1, 3] = float(unusual)
    elif unusual:
        size = {"tiny": 2.0**-14 if dtype == np.float16 else 1e-37, "large": 6e4 if dtype == np.float16 else 3e38}[unusual]
        v[:, :, 1] = np.where(v[:, :, 1].astype(np.float64) > 0, size, -size).astype(dtype)
    if "sinks" in keywords:
        keywords = keywords | {"sinks": keywords["sinks"].astype(np.float64 if dtype == np.float64 else np.float32)}
    mask = np.zeros((B, 1, 1, Lk), bool)
    mask[:, :, :, Lk // 2] = unusual in ("nan", "inf")
    with np.errstate(all="ignore"):
        found = [decode(q, k, v, layout="BLHD", num_threads=threads, mask=mask, **keywords) for threads in (1, 3)]
        contiguous = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
        out, lse = decode(*contiguous, num_threads=1, mask=mask, **keywords)
        before = _core.neighbours_from(np.inf)
        try:
            alone = decode(q, k, v, layout="BLHD", num_threads=1, mask=mask, **keywords)
        finally:
            assert _core.neighbours_from(before) == np.inf
    for results in (*found, alone):
        assert_same(results, (out.swapaxes(1, 2), lse))


def test_heads_are_decoded_side_by_side_where_every_thread_has_items():
    """Also in the plan; half as many heads where threads share these evenly. Not contiguous heads, nor near ones, nor where few
    have many rows."""
    q, k = np.empty((1, 1, 32, 128), np.float32), np.empty((1, 4096, 8, 128), np.float32)
    before = _core.neighbours_from(2**25), _core.read_before(0)
    try:
        def heads(q, k, threads=1, layout="BLHD"):
            return _core.decode_neighbours(validate.attention_problem(q, k, k, layout), threads)

        assert [heads(q, k, threads) for threads in (1, 2, 3, 4, 7, 64)] == [8, 8, 4, 8, 1, 1]
        assert heads(q, k[:, :4095]) == 1                                       # below 32 MB
        assert heads(q.swapaxes(1, 2), np.empty((1, 8, 4096, 128), np.float32), layout="BHLD") == 1
        two = np.empty((1, 16384, 2, 128), np.float32)
        assert [heads(np.empty((1, 1, H, 128), np.float32), two) for H in (2, 8, 10, 32)] == [2, 2, 1, 1]
        assert heads(np.empty((1, 1, 32, 64), np.float32), np.empty((1, 8192, 32, 64), np.float32)) == 16
        assert heads(np.empty((1, 1, 34, 64), np.float32), np.empty((1, 8192, 34, 64), np.float32)) == 12
        for threads, many in ((1, 8), (2, 8), (3, 16), (4, 8), (64, 64)):
            items = _core.items(validate.attention_problem(q, k, k, "BLHD"), "decode", False, 0, threads)[0]
            assert len(items) == many * 6 * np.dtype(np.intp).itemsize
            planned = fastmha.plan(q, k, k, layout="BLHD", num_threads=threads)
            assert (planned.algorithm, planned.balance) == ("decode", 1 if threads != 3 else 16 / 18)
    finally:
        _core.neighbours_from(before[0])
        _core.read_before(before[1])


@all_dtypes
def test_batch_agnosticism_whatever_the_other_rows_hold(isa, dtype, rng):
    arrays = draw(rng, 3, 4, 2, 2, 600, 8, 5, dtype)[:3]
    clean = decode(*arrays)
    for factor in (1e5, np.nan, np.inf, 0):
        changed = [padded(x) for x in arrays]
        for x in changed:
            with np.errstate(over="ignore"):
                x[[0, 2]] *= np.asarray(factor).astype(dtype)
        with np.errstate(invalid="ignore"):
            assert_same([x[1] for x in clean], [x[1] for x in decode(*changed)])


@dtypes
def test_the_other_heads_of_a_group_do_not_change_a_heads_bits(isa, dtype, rng):
    for H, D, Dv in ((8, 16, 16), (7, 33, 5)):
        q, k, v, _ = draw(rng, 1, H, 1, 1, 700, D, Dv, dtype)
        together = decode(q, k, v)
        for h in range(H):
            assert_same([x[:, h : h + 1] for x in together], decode(q[:, h : h + 1], k, v))


@all_dtypes
@problems
def test_instruction_sets_agree_to_rounding(dtype, name, rng):
    shape, keywords = PROBLEMS[name]
    arrays = draw(rng, *shape, dtype=dtype)
    bounds = error_bounds(*in_float64(arrays, {})[0], dtype, **keywords)[:2]
    results = []
    for isa in ISAS:
        with selected(isa):
            results.append(decode(*arrays[:3], **keywords))
    for others in results[1:]:
        for x, y, bound in zip(others, results[0], bounds, strict=True):
            same = x == y  # also -inf
            assert np.abs(np.where(same, 0, x) - np.where(same, 0, y)).max() <= bound


@all_dtypes
def test_decode_and_tiled_agree_to_rounding(isa, dtype, rng):
    arrays = draw(rng, 2, 4, 2, 3, 600, 16, 9, dtype)
    keywords = {"is_causal": True, "offset": 590}
    tiled = fastmha.attention(*arrays[:3], algorithm="tiled", return_lse=True, **keywords)
    bounds = error_bounds(*in_float64(arrays, {})[0], dtype, **keywords)[:2]
    for x, y, bound in zip(decode(*arrays[:3], **keywords), tiled, bounds, strict=True):
        assert np.abs(x.astype(np.float64) - y).max() <= bound


# ------------------------------------------------------------------------------------------------ own precision, rule 9


@every_isa
@pytest.mark.parametrize("Lk", [65, 600])
@ill_scaled
@pytest.mark.parametrize("keywords", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
def test_float32_errs_within_the_bounds_of_the_error_analysis(isa, kind, Lk, keywords, rng):
    arrays = draw_ill_scaled(kind, rng, 2, 8, 2, 2, Lk, 64, 64)
    expected, bounds = oracle(*arrays, np.float32, **keywords)
    assert_close(decode(*arrays[:3], **keywords), expected[:2], bounds[:2])


# ------------------------------------------------------------------------------------------------------ lse and its use


@dtypes
def test_lse_is_the_natural_logarithm_of_the_sum_of_exponentials(isa, dtype, rng):
    q, k, v, _ = draw(rng, 1, 2, 2, 3, 1100, 4, 4, dtype)
    scores = (q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)) / 2
    _, lse = decode(q, k, v)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(axis=-1)), rtol=0, atol=200 * np.finfo(dtype).eps)


@all_dtypes
def test_the_backward_pass_takes_what_decode_returned(isa, dtype, rng):
    q, k, v, g = draw(rng, 2, 4, 2, 2, 130, 8, 5, dtype)
    out, lse = decode(q, k, v)
    grads = fastmha.attention_backward(g, q, k, v, out, lse)
    assert_close((out, lse, *grads), *oracle(q, k, v, g, dtype))


@all_isas
@halves
@pytest.mark.parametrize("kind", ["none", "additive"])
@pytest.mark.parametrize("rules", [*RULES, "sinks", "alibi"])
def test_few_rows_of_half_precision_are_decoded_under_every_rule_and_nothing_is_copied(isa, rules, kind, dtype, rng):
    of_heads = np.linspace(-0.1, 0.3, 2).astype(dtype)
    keywords = {"sinks": {"sinks": of_heads}, "alibi": {"alibi": of_heads, "offset": LK - LQ}, **RULES}[rules]
    mask = mask_of(kind, dtype, rng)
    if mask is not None:
        keywords = {**keywords, "mask": mask if mask.ndim == 2 else mask[:, :2]}
    q, k, v, g = draw(rng, B, 2, 2, LQ, LK, 33, 20, dtype)
    plan = fastmha.plan(q, k, v, **keywords)
    assert (plan.algorithm, plan.bytes_copied, plan.products) == ("decode", 0, "float32")
    assert_same(fastmha.attention(q, k, v, return_lse=True, **keywords), check(q, k, v, g, **keywords))


def test_auto_decodes_few_rows(isa, rng):
    for H, Lq in ((1, 1), (3, 1), (1, 2), (1, 3)):
        q, k, v, _ = draw(rng, 2, H, 1, Lq, 300, 64, 8)
        assert fastmha.plan(q, k, v).algorithm == "decode"
        assert same_bits(fastmha.attention(q, k, v), decode(q, k, v)[0])


# --------------------------------------------------------------------------------------------------------------- errors


def test_the_backward_pass_names_the_algorithm_it_does_not_have(rng):
    q, k, v, g = draw(rng, 1, 1, 1, 1, 9)
    out, lse = decode(q, k, v)
    with pytest.raises(ValueError, match=r'algorithm "decode" cannot serve this call: it has no backward pass'):
        fastmha.attention_backward(g, q, k, v, out, lse, algorithm="decode")
    with pytest.raises(ValueError, match=r'algorithm "decode" cannot serve this call: it has no backward pass'):
        fastmha.plan(q, k, v, algorithm="decode", backward=True)


@pytest.mark.parametrize(("H", "Hkv", "Lq", "rows"), [(1, 1, 65, 65), (13, 1, 5, 65), (130, 2, 1, 65), (2, 2, 66, 66)])
def test_too_many_rows_are_refused_and_counted(H, Hkv, Lq, rows, rng):
    q, k, v, _ = draw(rng, 1, H, Hkv, Lq, 9)
    message = (
        r'algorithm "decode" cannot serve this call: it takes at most 64 query rows per key/value head '
        rf"\(Lq \* H / Hkv\), got {rows}"
    )
    for function in (fastmha.attention, fastmha.plan):
        with pytest.raises(ValueError, match=message):
            function(q, k, v, algorithm="decode")
