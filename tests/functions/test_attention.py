"""attention and attention_backward against the float64 reference, over shapes, masks and memory.

Tolerances are those of `reference.error_bounds`: what rounding alone can do, an element each. A key too many or too few is
off by thousands of times that.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from support import (
    DTYPES,
    HALVES,
    ISAS,
    LAYOUTS,
    NAMED,
    algorithms,
    all_dtypes,
    assert_close,
    check,
    crossed_oracle,
    draw,
    draw_ill_scaled,
    dtypes,
    every_isa,
    ill_scaled,
    layouts,
    oracle,
    padded,
    run,
    same_bits,
    selected,
    unaligned,
)

import fastmha
from fastmha import reference
from fastmha.algorithms import ALGORITHMS

LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129)


# --------------------------------------------------------------------------------------------------- lengths and widths


@all_dtypes
@algorithms
@pytest.mark.parametrize(("Lq", "other"), [*zip(LENGTHS, LENGTHS[7:] + LENGTHS[:7], strict=True)])
def test_every_length(isa, dtype, algorithm, Lq, other, rng):
    for Lk in (Lq, other):
        check(*draw(rng, 1, 2, 2, Lq, Lk, 8, 8, dtype), algorithm=algorithm)


@all_dtypes
@algorithms
@pytest.mark.parametrize(
    ("D", "Dv"), [(1, 1), (1, 5), (5, 1), (2, 3), (3, 2), (7, 16), (16, 7), (17, 31), (33, 64), (64, 65), (0, 3)]
)
def test_every_width(isa, dtype, algorithm, D, Dv, rng):
    check(*draw(rng, 2, 2, 1, 9, 11, D, Dv, dtype), algorithm=algorithm)


@all_dtypes
@algorithms
@pytest.mark.parametrize(("H", "Hkv"), [(1, 1), (3, 3), (4, 2), (6, 2), (5, 1)])
def test_grouped_heads_read_their_own_keys(dtype, algorithm, H, Hkv, rng):
    check(*draw(rng, 2, H, Hkv, 6, 7, 4, 3, dtype), algorithm=algorithm, is_causal=True, offset=1)


@all_dtypes
@algorithms
def test_many_blocks_of_rows(isa, dtype, algorithm, rng):
    """So many keys that the queries are taken in several blocks, the last one short."""
    arrays = draw(rng, 1, 2, 1, 67, 2050, 5, 6, dtype)
    check(*arrays, algorithm=algorithm, is_causal=True, offset=1985, window=(700, None))
    check(*arrays, algorithm=algorithm, softcap=3.0)


# ---------------------------------------------------------------------------------------------------------------- masks

B, H, LQ, LK = 3, 4, 9, 17


def masks(dtype):
    rng = np.random.default_rng(3)
    blocked = rng.random((B, H, LQ, LK)) < 0.4
    blocked[1, 2, 3] = True  # an empty row
    additive = np.where(blocked, -np.inf, rng.standard_normal(blocked.shape)).astype(dtype)
    wide = np.zeros((LQ, 2 * LK), bool)
    wide[:, ::2] = blocked[0, 0]
    return {
        "none": None,
        "bool of two axes": blocked[0, 0],
        "bool of four axes": blocked,
        "bool of keys, a view of zero strides": np.broadcast_to(blocked[:, :1, :1], (B, H, LQ, LK)),
        "bool of queries": blocked[:1, :, :, :1],
        "bool of heads": blocked[:1, :, :1, :1],
        "bool of one element": np.zeros((1, 1), bool),
        "bool with negative strides": blocked[::-1, ::-1, ::-1, ::-1],
        "bool with a step": wide[:, ::2],
        "bool in Fortran's order": np.asfortranarray(blocked),
        "additive of two axes": additive[1, 2],
        "additive of four axes": additive,
        "additive of keys, a view of zero strides": np.broadcast_to(additive[:, :1, :1], (B, H, LQ, LK)),
        "additive of queries": np.broadcast_to(additive[:1, :1, :, :1], (B, H, LQ, LK)),
        "additive with negative strides": additive[::-1, ::-1, ::-1, ::-1],
        "additive with a step": padded(np.repeat(additive, 2, axis=3))[..., ::2],
        "additive, unaligned": unaligned(additive),
        "additive, everything removed": np.full((LQ, LK), -np.inf, dtype),
        "additive, large": additive * dtype(100),
    }


BANDS = {
    "none": {},
    "causal": {"is_causal": True, "offset": 0},
    "causal to the end": {"is_causal": True, "offset": LK - LQ},
    "causal, first rows empty": {"is_causal": True, "offset": -4},
    "causal, all rows empty": {"is_causal": True, "offset": -LQ},
    "causal, offset beyond the keys": {"is_causal": True, "offset": LK + 3},
    "causal, an offset per batch row": {"is_causal": True, "offset": np.array([-3, 2, 30])},
    "window": {"window": (3, 2), "offset": 4},
    "window of one key": {"window": (0, 0), "offset": 1},
    "window to the left": {"window": (2, None), "offset": 5},
    "window to the right": {"window": (None, 1), "offset": 2},
    "window, some rows before and behind all keys": {"window": (2, 1), "offset": np.array([-6, 14, 3], np.int32)},
    "window wider than everything": {"window": (10**18, 10**18), "offset": 0},
    "causal window": {"is_causal": True, "window": (4, 7), "offset": np.array([8, 0, 3], np.uint8)},
    "padding": {"key_padding_lengths": np.array([LK, 5, 0])},
    "padding, causal, window": {"key_padding_lengths": [3, 17, 9], "is_causal": True, "window": (6, None), "offset": 8},
}
EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.8},
    "zero scale": {"scale": 0.0},
    "both": {"scale": 2, "softcap": np.float32(20)},
}


@all_dtypes
@algorithms
@pytest.mark.parametrize("kind", masks(np.float32))
def test_every_mask(isa, dtype, algorithm, kind, rng):
    check(*draw(rng, B, H, 2, LQ, LK, 5, 3, dtype), algorithm=algorithm, mask=masks(dtype)[kind])


@all_dtypes
@algorithms
@pytest.mark.parametrize("band", BANDS)
def test_every_band_and_padding(isa, dtype, algorithm, band, rng):
    check(*draw(rng, B, H, 2, LQ, LK, 5, 3, dtype), algorithm=algorithm, **BANDS[band])


TOGETHER = [      # every two of them meet
    (band, kind, extra)
    for a, band in enumerate(("none", "causal to the end", "padding, causal, window"))
    for b, kind in enumerate(("none", "bool of four axes", "additive of four axes", "additive with a step"))
    for c, extra in enumerate(EXTRAS)
    if (a + b + c) % 3 == 0
]


@all_dtypes
@algorithms
@pytest.mark.parametrize(("band", "kind", "extra"), TOGETHER)
def test_masks_bands_scale_and_softcap_together(isa, dtype, algorithm, band, kind, extra, rng):
    check(
        *draw(rng, B, H, 2, LQ, LK, 5, 3, dtype),
        algorithm=algorithm,
        mask=masks(dtype)[kind],
        **BANDS[band],
        **EXTRAS[extra],
    )


def test_offset_defaults_to_zero_where_lengths_agree(rng):
    q, k, v, _ = draw(rng, Lq=6)
    assert same_bits(fastmha.attention(q, k, v, is_causal=True), fastmha.attention(q, k, v, is_causal=True, offset=0))
    assert same_bits(fastmha.attention(q, k, v, window=(1, 1)), fastmha.attention(q, k, v, window=(1, 1), offset=0))


def test_a_window_without_limits_removes_nothing_wherever_it_begins(rng):
    q, k, v, _ = draw(rng, Lq=6, Lk=7)
    assert same_bits(fastmha.attention(q, k, v, window=(None, None), offset=3), fastmha.attention(q, k, v))


def test_auto_is_one_of_the_named_algorithms(rng):
    q, k, v, _ = draw(rng, Lq=6)
    chosen = fastmha.plan(q, k, v).algorithm
    assert chosen in ALGORITHMS[1:]
    assert same_bits(fastmha.attention(q, k, v), fastmha.attention(q, k, v, algorithm=chosen))


# ------------------------------------------------------------------------------------------------ own precision, rule 9


@every_isa
@algorithms
@ill_scaled
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"softcap": 5.0}], ids=["plain", "causal", "softcap"])
def test_float32_errs_within_the_bounds_of_the_error_analysis(isa, algorithm, kind, keywords, rng):
    arrays = draw_ill_scaled(kind, rng, 2, 4, 2, 65, 65, 64, 64)
    assert_close(run(fastmha, *arrays, algorithm=algorithm, **keywords), *oracle(*arrays, np.float32, **keywords))


@algorithms
@pytest.mark.parametrize("constant", [-1e4, -1e9, np.finfo(np.float32).min])
def test_rows_masked_by_one_finite_number_err_by_the_rounding_of_their_scores(isa, algorithm, constant, rng):
    """Half of the rows: their scores are lost beside it. In the others it only removes keys."""
    arrays = draw(rng, 2, 4, 2, 40, 70, 16, 16, np.float32)
    mask = np.where(np.arange(40)[:, None] % 2, np.float32(constant), np.where(np.arange(70) % 3, np.float32(constant), 0))
    expected, bounds = oracle(*arrays, np.float32, mask=mask.astype(np.float32))
    assert_close(run(fastmha, *arrays, algorithm=algorithm, mask=mask.astype(np.float32)), expected, bounds)
    size = np.abs(expected[0]).max()
    kept, lost = (bounds[0][:, :, start::2] for start in (0, 1))
    assert kept.max() < 1e-5 * size
    assert lost.max() > 1e-4 * size


@algorithms
def test_float64_is_float64_throughout(isa, algorithm, rng):
    """Errors of a few units in the sixteenth digit: no step is taken in float32."""
    arrays = draw(rng, 1, 2, 2, 33, 33, 16, 16)
    results = run(fastmha, *arrays, algorithm=algorithm, softcap=4.0)
    extended = [x.astype(np.longdouble) for x in arrays]
    for got, exact in zip(results, run(reference, *extended, softcap=4.0), strict=True):
        assert np.abs(got - exact).max() < 1e-13


# --------------------------------------------------------------------------------------------------------------- memory


def strange(kind, rng, shape, dtype):
    """An array of a shape, drawn, in strange memory."""
    x = rng.standard_normal(shape).astype(dtype)
    if kind == "contiguous":
        return x
    if kind == "padded":
        return padded(x)
    if kind == "Fortran":
        return np.asfortranarray(x)
    if kind.startswith("broadcast axis"):
        axis = int(kind[-1])
        return np.broadcast_to(x.take([0] if shape[axis] else [], axis), shape)
    if kind == "broadcast":
        return np.broadcast_to(dtype(0.7), shape)
    if kind.startswith("backwards axis"):
        return x[tuple(slice(None, None, -1) if axis == int(kind[-1]) else slice(None) for axis in range(4))]
    if kind == "backwards":
        return x[::-1, ::-1, ::-1, ::-1]
    if kind == "step":
        return np.repeat(x, 3, axis=3)[..., ::3]
    if kind == "complex part" and dtype in HALVES:
        return np.stack((x, x), axis=-1)[..., 1]
    if kind == "complex part":
        return (x + 1j * x).astype(np.result_type(dtype, np.complex64)).imag
    if kind == "overlapping":
        b, i, j, width = shape
        return (
            sliding_window_view(rng.standard_normal((b, i, max(j + width - 1, width))).astype(dtype), width, axis=2)[
                :, :, :j
            ]
            if width
            else x
        )
    if kind == "overlapping axes":
        steps = (2, 1, 3, 1)
        flat = rng.standard_normal(1 + sum(s * n for s, n in zip(steps, shape, strict=True))).astype(dtype)
        return as_strided(flat, shape, [s * flat.itemsize for s in steps])
    if kind == "unaligned":
        return unaligned(x)
    if kind == "read-only":
        x.flags.writeable = False
        return x
    assert kind == "field"
    records = np.zeros(shape, [("before", np.int8), ("x", dtype)])
    records["x"] = x
    return records["x"]


STRANGE = (
    "contiguous",
    "padded",
    "Fortran",
    "broadcast",
    *(f"broadcast axis {a}" for a in range(4)),
    "backwards",
    *(f"backwards axis {a}" for a in range(4)),
    "step",
    "complex part",
    "overlapping",
    "overlapping axes",
    "unaligned",
    "read-only",
    "field",
)


def shapes_of(layout, B, H, Hkv, Lq, Lk, D, Dv):
    """Shapes of q, k, v and the gradient of the output."""
    shapes = (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), (B, H, Lq, Dv)
    return shapes if layout == "BHLD" else [(b, length, h, d) for b, h, length, d in shapes]


@all_dtypes
@algorithms
@pytest.mark.parametrize("kind", STRANGE)
def test_any_strides(dtype, algorithm, kind, rng):
    for which, (D, Dv) in itertools.product(range(4), ((3, 4), (1, 1))):
        shapes = shapes_of("BHLD", 2, 4, 2, 5, 6, D, Dv)
        arrays = [strange(kind if n == which else "contiguous", rng, shape, dtype) for n, shape in enumerate(shapes)]
        check(*arrays, algorithm=algorithm)


@algorithms
@pytest.mark.parametrize("kind", STRANGE)
def test_all_inputs_strange_at_once(isa, algorithm, kind, rng):
    arrays = [strange(kind, rng, shape, np.float32) for shape in shapes_of("BHLD", 2, 4, 2, 20, 21, 17, 9)]
    check(*arrays, algorithm=algorithm, is_causal=True, offset=1)


def test_one_array_may_be_all_three(rng):
    x = draw(rng, Lq=7, D=5)[0]
    expected = fastmha.attention(x.copy(), x.copy(), x.copy())
    assert same_bits(fastmha.attention(x, x, x), expected)


def test_lists_are_arrays_of_float64():
    out = fastmha.attention([[[[1.0]]]], [[[[2.0], [3.0]]]], [[[[4.0], [4.0]]]])
    assert out.dtype == np.float64
    assert out == 4


@all_dtypes
@algorithms
@pytest.mark.parametrize("axes", ["B", "H", "Hkv H", "Lq", "Lk", "D", "Dv", "Lq Lk", "D Dv", "B H Hkv Lq Lk D Dv"])
def test_empty_axes(isa, dtype, algorithm, axes, rng):
    sizes = {"B": 2, "H": 4, "Hkv": 2, "Lq": 3, "Lk": 5, "D": 6, "Dv": 7} | dict.fromkeys(axes.split(), 0)
    arrays = draw(rng, **sizes, dtype=dtype)
    for keywords in ({}, {"is_causal": True, "offset": 1}, {"key_padding_lengths": [0] * sizes["B"]}, {"softcap": 1.0}):
        out, lse, _, grad_k, grad_v = check(*arrays, algorithm=algorithm, **keywords)
        fastmha.plan(*arrays[:3], algorithm=algorithm, backward=True, **keywords)
    if sizes["Lk"] == 0:
        assert not out.any()
        assert np.isneginf(lse).all()
    if sizes["Lq"] == 0 or sizes["H"] == 0:
        assert not grad_k.any()
        assert not grad_v.any()


def test_without_keys_width_the_keys_share_equally(rng):
    q, k, v, _ = draw(rng, D=0, Dv=3, Lq=2, Lk=4)
    np.testing.assert_allclose(
        fastmha.attention(q, k, v), np.broadcast_to(v.mean(2, keepdims=True), (2, 2, 2, 3)), atol=1e-15
    )


# ----------------------------------------------------------------------------------------------------------------- out=


@all_dtypes
@algorithms
@pytest.mark.parametrize(
    "kind",
    [
        "contiguous",
        "padded",
        "Fortran",
        "backwards",
        "backwards axis 1",
        "backwards axis 2",
        "step",
        "unaligned",
        "field",
        "complex part",
    ],
)
def test_out_is_written_and_returned(dtype, algorithm, kind, rng):
    q, k, v, g = draw(rng, 2, 4, 2, 5, 6, 3, 4, dtype)
    expected, expected_lse = fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True)
    out = strange(kind, rng, g.shape, dtype)
    assert fastmha.attention(q, k, v, algorithm=algorithm, out=out) is out
    assert same_bits(out, expected)
    out[...] = np.nan
    returned, lse = fastmha.attention(q, k, v, algorithm=algorithm, out=out, return_lse=True)
    assert returned is out
    assert same_bits(out, expected)
    assert same_bits(lse, expected_lse)


def test_out_writes_nothing_beside_itself(rng):
    q, k, v, g = draw(rng, 2, 2, 2, 5, 6, 3, 3)
    around = np.full((2, 2, 5, 6), np.nan)
    fastmha.attention(q, k, v, out=around[..., 1:4])
    assert np.isnan(around[..., [0, 4, 5]]).all()
    assert np.isfinite(around[..., 1:4]).all()
    assert g is not None


@pytest.mark.parametrize("Dv", [1, 2, 3])
def test_out_with_rows_backwards_writes_nothing_beside_itself(Dv, rng):
    q, k, v, _ = draw(rng, 2, 2, 2, 5, 6, 3, Dv)
    around = np.full((2, 2, 16, Dv), np.nan)
    out = around[:, :, 9:4:-1]
    fastmha.attention(q, k, v, out=out)
    assert np.isnan(around[:, :, 10:]).all()
    assert np.isnan(around[:, :, :5]).all()
    assert same_bits(out, fastmha.attention(q, k, v))


def test_out_may_interleave_with_the_inputs_in_one_buffer(rng):
    fused = rng.standard_normal((2, 300, 4, 8, 16))  # (B, L, q k v out, H, D)
    q, k, v, out = (fused[:, :, n] for n in range(4))
    expected = fastmha.attention(q.copy(), k.copy(), v.copy(), layout="BLHD")
    assert fastmha.attention(q, k, v, layout="BLHD", out=out) is out
    assert same_bits(out, expected)
    pairs = rng.standard_normal((1, 2, 40, 16, 2))
    x = pairs[..., 0].copy()
    fastmha.attention(pairs[..., 0], x, x, out=pairs[..., 1])
    assert same_bits(pairs[..., 0], x)
    assert same_bits(pairs[..., 1], fastmha.attention(x, x, x))


# ------------------------------------------------------------------------------------------ what is copied, and counted


def copied(q, k, v, **keywords):
    return fastmha.plan(q, k, v, algorithm="blas", **keywords).bytes_copied


@dtypes
@layouts
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("contiguous", 0),
        ("padded", 0),
        ("broadcast axis 0", 0),
        ("broadcast axis 1", 0),
        ("read-only", 0),
        ("backwards axis 0", 0),
        ("backwards axis 1", 0),
        ("backwards axis 3", 10),
        ("step", 10),
        ("unaligned", 10),
        ("field", 10),
        ("complex part", 10),
    ],
)
def test_plan_counts_the_bytes_copied(dtype, layout, kind, rows, rng):
    """rows: how many of the 2 * 5 rows of four heads are copied; layout-dependent kinds have their own tests."""
    if layout == "BLHD" and kind in ("broadcast axis 1", "backwards axis 1"):
        kind = kind.replace("1", "2")  # the head axis
    q, k, v, _ = (np.ascontiguousarray(x) for x in draw(rng, 2, 4, 4, 5, 5, 3, 3, dtype, layout))
    strange_q = strange(kind, rng, q.shape, dtype)
    expected = rows * 4 * 3 * q.itemsize
    assert copied(strange_q, k, v, layout=layout) == expected
    assert copied(q, strange_q, v, layout=layout) == expected
    assert copied(q, k, strange_q, layout=layout) == expected
    assert copied(strange_q, strange_q, strange_q, layout=layout) == 3 * expected


@dtypes
@layouts
@pytest.mark.parametrize(
    "kind",
    [
        "row backwards",
        "row repeated",
        "rows overlap",
        "last axis repeated",
        "last axis and rows backwards",
        "last axis backwards and rows repeated",
        "row of width one backwards",
        "row of width one repeated",
    ],
)
def test_plan_counts_heads_that_blas_cannot_take(dtype, layout, kind, rng):
    """Row strides that are negative, zero or below the width: each such array is copied once, in full."""
    x = rng.standard_normal((2, 4, 5, 3)).astype(dtype)
    full = 2 * 4 * 5 * 3 * x.itemsize
    x, expected = {
        "row backwards": lambda: (x[:, :, ::-1], full),
        "row repeated": lambda: (np.broadcast_to(x[:, :, :1], x.shape), full),
        "rows overlap": lambda: (sliding_window_view(rng.standard_normal((2, 4, 7)).astype(dtype), 3, axis=2), full),
        "last axis repeated": lambda: (np.broadcast_to(x[..., :1], x.shape), full),
        "last axis and rows backwards": lambda: (x[:, :, ::-1, ::-1], full),
        "row of width one backwards": lambda: (x[:, :, ::-1, :1], full // 3),
        "row of width one repeated": lambda: (np.broadcast_to(x[:, :, :1, :1], (2, 4, 5, 1)), full // 3),
        "last axis backwards and rows repeated": lambda: (np.broadcast_to(x[:, :, :1, ::-1], x.shape), full),
    }[kind]()
    plain = rng.standard_normal(x.shape).astype(dtype)
    if layout == "BLHD":
        x, plain = x.swapaxes(1, 2), plain.swapaxes(1, 2)
    assert copied(x, plain, plain, layout=layout) == expected
    assert copied(plain, x, x, layout=layout) == 2 * expected


@dtypes
def test_a_broadcast_batch_is_copied_once(dtype, rng):
    x = np.broadcast_to(rng.standard_normal((1, 1, 5, 6)).astype(dtype)[..., ::2], (7, 4, 5, 3))
    plain = np.ones((7, 4, 5, 3), dtype)
    assert copied(x, plain, plain) == 5 * 3 * x.itemsize


@dtypes
def test_masks_are_never_copied_but_where_unaligned_and_never_expanded(dtype, rng):
    x = np.ones((B, H, LQ, 4), dtype)
    y = np.ones((B, H, LK, 4), dtype)
    for kind, mask in masks(dtype).items():
        if "unaligned" not in kind:
            assert copied(x, y, y, mask=mask) == 0, kind
    mask = unaligned(np.zeros((B, 1, 1, LK), dtype))
    assert copied(x, y, y, mask=mask) == mask.nbytes
    assert copied(x, y, y, mask=np.broadcast_to(mask, (B, H, LQ, LK))) == mask.nbytes


@pytest.mark.parametrize("role", ["q", "k", "v", "grad_out", "out"])
def test_row_strides_beyond_a_c_int(role, rng, tmp_path):
    """Two rows, 2**31 + 5 elements apart, in a sparse file."""
    apart = 2**31 + 5
    flat = np.memmap(tmp_path / "sparse", np.float32, "w+", shape=(apart + 8,))
    far = as_strided(np.asarray(flat), (1, 1, 2, 8), (4, 4, 4 * apart, 4))
    arrays = dict(zip(("q", "k", "v", "grad_out"), draw(rng, 1, 1, 1, 2, 2, 8, 8, np.float32), strict=True))
    expected = run(fastmha, *arrays.values())
    if role == "out":
        q, k, v, _ = arrays.values()
        assert fastmha.attention(q, k, v, out=far) is far
        assert same_bits(far, expected[0])
        return
    far[...] = arrays[role]
    arrays[role] = far
    for a, b in zip(run(fastmha, *arrays.values()), expected, strict=True):
        assert same_bits(a, b)
    if role != "grad_out":
        q, k, v, _ = arrays.values()
        assert copied(q, k, v) == 2 * 8 * 4


# --------------------------------------------------------------------------------------------------- everything at once


@st.composite
def problems(draw_one):
    """Arguments of a call: shapes, strange memory, masks, bands, lengths, scale, softcap, threads."""
    rng = np.random.default_rng(draw_one(st.integers(0, 2**32)))
    length = st.one_of(st.integers(0, 5), st.sampled_from(LENGTHS[:11]))
    width = st.one_of(st.integers(0, 4), st.sampled_from((7, 8, 16, 17)))
    dtype, layout = draw_one(st.sampled_from(DTYPES)), draw_one(st.sampled_from(LAYOUTS))
    B, Hkv, group = draw_one(st.integers(0, 3)), draw_one(st.integers(0, 2)), draw_one(st.integers(1, 3))
    Lq, Lk, D, Dv = draw_one(length), draw_one(length), draw_one(width), draw_one(width)
    kinds = draw_one(st.tuples(*[st.sampled_from(STRANGE)] * 4))
    shapes = shapes_of(layout, B, Hkv * group, Hkv, Lq, Lk, D, Dv)
    arrays = [strange(kind, rng, shape, dtype) for kind, shape in zip(kinds, shapes, strict=True)]
    keywords = {
        "layout": layout,
        "algorithm": draw_one(st.sampled_from(NAMED)),
        "threads": draw_one(st.sampled_from((1, 2))),
    }
    kind = draw_one(st.sampled_from(("none", "bool", "additive")))
    if kind != "none":
        full = (B, Hkv * group, Lq, Lk)
        shape = [n if draw_one(st.booleans()) else 1 for n in full[-draw_one(st.sampled_from((2, 4))) :]]
        mask = rng.random(shape) < draw_one(st.sampled_from((0.1, 0.5, 0.9)))
        if kind == "additive":
            mask = np.where(mask, -np.inf, rng.standard_normal(shape)).astype(dtype)
        if draw_one(st.booleans()):
            mask = mask[tuple([slice(None, None, -1)] * mask.ndim)]
        if draw_one(st.booleans()):
            mask = np.broadcast_to(mask, full[-mask.ndim :])
        keywords["mask"] = mask
    causal = draw_one(st.booleans())
    window = draw_one(st.none() | st.tuples(st.none() | st.integers(0, 20), st.none() | st.integers(0, 20)))
    if causal or (window is not None and window != (None, None)):
        offset = st.integers(-10, 70)
        keywords |= {
            "is_causal": causal,
            "window": window,
            "offset": draw_one(
                offset | st.lists(offset, min_size=B, max_size=B).map(lambda values: np.array(values, np.int64))
            ),
        }
    if draw_one(st.booleans()):
        keywords["key_padding_lengths"] = np.array([draw_one(st.integers(0, Lk)) for _ in range(B)], np.int64)
    keywords["scale"] = draw_one(st.none() | st.floats(-2, 2, width=16))
    keywords["softcap"] = draw_one(st.none() | st.sampled_from((0.5, 3.0, 50.0)))
    return arrays, keywords


@pytest.mark.filterwarnings("ignore::fastmha.ConventionWarning")  # masks as they are drawn
@settings(max_examples=400, deadline=None, database=None)
@given(st.sampled_from(ISAS), problems())
def test_everything_at_once(isa, problem):
    arrays, keywords = problem
    threads = keywords.pop("threads")
    with selected(isa):
        results = check(*arrays, of=crossed_oracle, **keywords)      # of one row among so many problems scores may round apart
        again = run(fastmha, *arrays, threads=threads, **keywords)
    for a, b in zip(results, again, strict=True):
        assert same_bits(a, b)
