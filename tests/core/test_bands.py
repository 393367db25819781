"""Bands and masks in "tiled": each vector of rows works on the keys its band leaves, masked tiles may be skipped whole.

Blocks have 64 stacked rows of a group, tiles 192 keys, vectors 2 to 16 rows, runs of keys whole granules of 16 or so, and a
boolean mask is read 32 at a time: windows, offsets and lengths here lie around all of them. Against the float64 reference,
with the bounds of `support.error_bounds`.
"""

import itertools

import numpy as np
import pytest
import support
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import (
    ISAS,
    assert_same,
    draw,
    dtypes,
    error_bounds,
    in_float64,
    rows_alike,
    run,
    same_bits,
    selected,
)

import fastmha
from fastmha import _core, reference, validate

SIDES = (0, 1, 5, 15, 16, 17, 63, 64, 127, 128, 200, None)
WINDOWS = [(SIDES[n % 12], SIDES[(n * 5 + n // 12) % 12]) for n in range(48)]
POISONS = (np.nan, np.inf)


def check(*arrays, **keywords):
    """Forward with lse, weights, and backward in one pass and in two against the oracle."""
    results = support.check(*arrays, algorithm="tiled", **keywords)
    wide, keywords_wide = in_float64(arrays, keywords)
    check_weights(*arrays[:3], results, error_bounds(*wide, arrays[0].dtype, **keywords_wide)[0], **keywords)
    return results


def check_weights(q, k, v, results, bound, **keywords):
    """out and lse of the call that also returns the weights, and the weights."""
    rules = {name: value for name, value in keywords.items() if name in validate.Rules._fields}
    problem = validate.attention_problem(q, k, v, "BHLD", validate.Rules(**rules))
    B, H, _, Lq, Lk, _, Dv = problem.shape
    out, lse, weights = (np.full(shape, np.nan, q.dtype) for shape in ((B, H, Lq, Dv), (B, H, Lq), (B, H, Lq, Lk)))
    _core.tiled_forward(problem, out, lse, weights, 1)
    (wide_q, wide_k), wide = in_float64([q, k], keywords)
    expected = reference.attention_weights(wide_q, wide_k, **wide)
    of_one = bound / max(float(np.abs(v).max(initial=0)), 1e-300)
    assert np.abs(weights - expected).max(initial=0) <= of_one
    assert not weights[np.broadcast_to(expected == 0, weights.shape) & removed_pairs(weights.shape, keywords)].any()
    np.testing.assert_allclose(out, results[0], rtol=0, atol=2 * bound)
    finite = np.isfinite(results[1])
    assert np.array_equal(lse[~finite], results[1][~finite])
    np.testing.assert_allclose(lse[finite], results[1][finite], rtol=0, atol=2 * of_one)


def removed_pairs(shape, keywords):
    pairs = {name: value for name, value in keywords.items() if name not in ("softcap", "scale")}
    return np.broadcast_to(reference.removed(*shape[2:], **pairs), shape)


# ----------------------------------------------------------------------------------------------------------------- bands


@dtypes
@pytest.mark.parametrize("part", range(4))
def test_windows_of_every_size(isa, dtype, part, rng):
    for n, window in enumerate(WINDOWS[part::4]):
        Lq, Lk = ((70, 70), (33, 210), (130, 65))[n % 3]
        offset = (0, Lk - Lq, np.array([7, Lk - Lq + 30]))[n // 3 % 3]
        check(*draw(rng, 2, 1, 1, Lq, Lk, 5, 4, dtype), window=window, offset=offset)


@dtypes
@pytest.mark.parametrize("offset", [-300, -70, -64, -17, -1, 0, 1, 15, 63, 190, 193, 260, 1000, 2**40, -(2**40)])
def test_offsets_before_and_beyond_all_keys(isa, dtype, offset, rng):
    arrays = draw(rng, 1, 2, 1, 67, 203, 5, 4, dtype)
    check(*arrays, window=(63, 16), offset=offset)
    check(*arrays, is_causal=True, offset=offset)


@dtypes
@pytest.mark.parametrize("offsets", [(0, 130), (-70, 400), (-20, 63), (191, 192)])
def test_offsets_that_differ_between_batch_rows(isa, dtype, offsets, rng):
    arrays = draw(rng, 2, 2, 2, 66, 210, 6, 5, dtype)
    for keywords in ({"is_causal": True}, {"window": (40, 3)}, {"is_causal": True, "window": (16, None)}):
        check(*arrays, offset=np.array(offsets), **keywords)


@dtypes
@pytest.mark.parametrize(("group", "Lq"), [(3, 5), (7, 3), (2, 31), (5, 13), (3, 43), (64, 1), (6, 11)])
def test_bands_that_jump_where_heads_meet_inside_a_vector_of_rows(isa, dtype, group, Lq, rng):
    arrays = draw(rng, 2, 2 * group, 2, Lq, 200, 5, 4, dtype)
    for window in ((0, 0), (16, 1), (100, 17)):
        check(*arrays, window=window, offset=np.array([200 - Lq, 50]))
    check(*arrays, is_causal=True, offset=np.array([3, 199 - Lq]))


@dtypes
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize(("H", "Lq", "Lk"), [(2, 70, 70), (3, 43, 205), (6, 5, 400)])
def test_causality_masks_lengths_and_softcap_together(isa, dtype, kind, H, Lq, Lk, rng):
    gone = rng.random((2, H, Lq, Lk)) < 0.3
    mask = gone if kind == "bool" else np.where(gone, -np.inf, rng.standard_normal(gone.shape)).astype(dtype)
    keywords = {"is_causal": True, "offset": np.array([Lk - Lq, 9]), "key_padding_lengths": np.array([Lk - 5, Lk // 2])}
    arrays = draw(rng, 2, H, 1, Lq, Lk, 5, 4, dtype)
    check(*arrays, mask=mask, **keywords)
    check(*arrays, mask=mask, softcap=2.0, window=(64, None), **keywords)


@dtypes
@pytest.mark.parametrize("poison", POISONS)
def test_keys_outside_the_bands_change_no_bit(isa, dtype, poison, rng):
    """Of no row's results, and of a row's own not where only the others of its vector attend them."""
    q, k, v, g = draw(rng, 1, 3, 1, 43, 400, 5, 4, dtype)
    for window, offset in (((20, 3), 250), ((0, 0), 100), ((130, 17), 357), ((5, 200), -20)):
        keywords = {"window": window, "offset": offset, "algorithm": "tiled"}
        clean = run(fastmha, q, k, v, g, **keywords)
        gone = reference.removed(43, 400, window=window, offset=offset)[0, 0]
        k_dirty, v_dirty = k.copy(), v.copy()
        k_dirty[:, :, gone.all(axis=0)] = v_dirty[:, :, gone.all(axis=0)] = poison
        assert_same(run(fastmha, q, k_dirty, v_dirty, g, **keywords), clean)
        for j in np.flatnonzero(~gone.all(axis=0))[[0, 3, -1]]:
            k_dirty, v_dirty = k.copy(), v.copy()
            k_dirty[:, :, j] = v_dirty[:, :, j] = poison
            results = run(fastmha, q, k_dirty, v_dirty, g, **keywords)
            for x, y in zip(results[:3], clean[:3], strict=True):
                assert same_bits(x[:, :, gone[:, j]], y[:, :, gone[:, j]]), (window, j)
            assert np.isnan(results[0][:, :, ~gone[:, j]]).all() or poison == np.inf


# ----------------------------------------------------------------------------------------------------------------- masks

LAID = {
    "every second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "every 33rd": lambda x: np.repeat(x, 33, axis=-1)[..., ::33],
    "reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "reversed rows": lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
    "Fortran": np.asfortranarray,
    "one column for all": lambda x: np.broadcast_to(x[..., 3:4], x.shape),
    "one row for all": lambda x: np.broadcast_to(x[:, :, 3:4], x.shape),
    "one head for all": lambda x: np.broadcast_to(x[:, 1:2], x.shape),
    "(Lq, Lk)": lambda x: x[0, 0],
}


@dtypes
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("laid", LAID)
def test_masks_that_lie_in_any_order(isa, dtype, kind, laid, rng):
    for H, Lq, Lk in ((2, 37, 95), (3, 5, 225)):
        gone = rng.random((2, H, Lq, Lk)) < 0.4
        gone[0, 0, 3, 3] = False
        mask = gone if kind == "bool" else np.where(gone, -np.inf, rng.standard_normal(gone.shape)).astype(dtype)
        check(*draw(rng, 2, H, 1, Lq, Lk, 5, 4, dtype), mask=LAID[laid](mask))


@dtypes
@pytest.mark.parametrize("Lk", [1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 95, 97, 191, 193, 223, 225, 385])
def test_boolean_masks_of_lengths_around_those_read_at_once(isa, dtype, Lk, rng):
    for Lq, share in ((1, 0.5), (9, 0.1), (65, 0.9)):
        check(*draw(rng, 1, 1, 1, Lq, Lk, 3, 4, dtype), mask=rng.random((Lq, Lk)) < share)


def holes(gone, which, rng):
    """Pairs removed from (B, H, Lq, Lk): those of whole tiles, and few of others."""
    gone[...] = False
    if which == "a whole tile":
        gone[..., 192:384] = True
    elif which == "the first and the last tile":
        gone[..., :192] = gone[..., 384:] = True
    elif which == "a whole tile of one block":
        gone[:, :, :64, 192:384] = True
    elif which == "all but one pair of each tile":
        gone[...] = True
        for start in range(0, gone.shape[-1], 192):
            gone[:, :, rng.integers(gone.shape[2]), start + rng.integers(min(192, gone.shape[-1] - start))] = False
    elif which == "one pair":
        gone[-1, -1, 5, 200] = True
    elif which == "all of some rows":
        gone[:, :, [0, 5, -1]] = True
    elif which == "all":
        gone[...] = True
    else:
        gone[..., 192:384], gone[0, 0, 7, 200] = True, False
    return gone


HOLES = (
    "a whole tile", "the first and the last tile", "a whole tile of one block", "all but one pair of each tile", "one pair",
    "all of some rows", "all", "a tile but for one pair of one head",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::fastmha.ConventionWarning")  # one of the masks removes everything
@dtypes
@pytest.mark.parametrize("which", HOLES)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_that_remove_whole_tiles_and_all_but_one_pair(isa, dtype, kind, which, rng):
    for H, Hkv, Lq in ((2, 2, 70), (3, 1, 9)):
        gone = holes(np.empty((2, H, Lq, 450), bool), which, rng)
        mask = gone if kind == "bool" else np.where(gone, -np.inf, rng.standard_normal(gone.shape)).astype(dtype)
        arrays = draw(rng, 2, H, Hkv, Lq, 450, 5, 4, dtype)
        results = check(*arrays, mask=mask)
        check(*arrays, mask=mask, is_causal=True, offset=np.array([450 - Lq, 200]), softcap=3.0)
        empty = gone.all(axis=-1)
        assert not results[0][empty].any()
        assert np.isneginf(results[1][empty]).all()
        assert not results[2][empty].any()


@pytest.mark.filterwarnings("ignore::fastmha.ConventionWarning")  # one of the masks removes everything
@dtypes
@pytest.mark.parametrize("which", HOLES)
@pytest.mark.parametrize("poison", POISONS)
def test_tiles_that_a_mask_removes_hold_what_they_like(isa, dtype, which, poison, rng):
    gone = holes(np.empty((1, 2, 70, 450), bool), which, rng)
    q, k, v, g = draw(rng, 1, 2, 1, 70, 450, 5, 4, dtype)
    nobody = gone.all(axis=(1, 2))
    k_dirty, v_dirty = k.copy(), v.copy()
    k_dirty[:, 0][nobody] = v_dirty[:, 0][nobody] = poison
    for mask in (gone, np.where(gone, -np.inf, 0).astype(dtype)):
        clean = run(fastmha, q, k, v, g, mask=mask, algorithm="tiled")
        assert_same(run(fastmha, q, k_dirty, v_dirty, g, mask=mask, algorithm="tiled"), clean)
        assert not clean[3][:, 0][nobody].any()
        assert not clean[4][:, 0][nobody].any()
        own_k, own_v = k.copy(), v.copy()       # and what one row does not attend, for that row
        own_k[:, 0, gone[0, 1, 5]] = own_v[:, 0, gone[0, 1, 5]] = poison
        for x, y in zip(run(fastmha, q, own_k, own_v, g, mask=mask, algorithm="tiled")[:3], clean[:3], strict=True):
            assert same_bits(x[:, 1, 5], y[:, 1, 5])


# -------------------------------------------------------------------------------------------------- rows and their company

sides = st.one_of(st.none(), st.sampled_from(SIDES[:-1]), st.integers(0, 250))
bands = st.fixed_dictionaries(
    {
        "Lq": st.integers(1, 140),
        "Lk": st.integers(1, 420),
        "group": st.integers(1, 3),
        "window": st.tuples(sides, sides),
        "is_causal": st.booleans(),
        "shift": st.integers(-250, 250),
        "mask": st.sampled_from(["none", "bool", "additive"]),
        "share": st.sampled_from([0.02, 0.5, 0.98]),
        "softcap": st.sampled_from([None, 2.0]),
        "seed": st.integers(0, 2**32 - 1),
    }
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::fastmha.ConventionWarning")  # rows alone may attend nothing
@dtypes
@pytest.mark.parametrize("which", ISAS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(band=bands)
@example(
    band={"Lq": 100, "Lk": 400, "group": 3, "window": (64, 17), "is_causal": False, "shift": 0, "mask": "bool", "share": 0.5,
          "softcap": None, "seed": 0}
)  # fmt: skip
def test_rows_alone_have_the_bits_they_have_among_all(which, dtype, band):
    rng = np.random.default_rng(band["seed"])
    Lq, Lk, group = band["Lq"], band["Lk"], band["group"]
    q, k, v, _ = draw(rng, 1, group, 1, Lq, Lk, 5, 7, dtype)
    gone = rng.random((1, group, Lq, Lk)) < band["share"]
    additive = np.where(gone, -np.inf, rng.standard_normal(gone.shape)).astype(dtype)
    mask = {"none": None, "bool": gone, "additive": additive}[band["mask"]]
    keywords = {"window": band["window"], "is_causal": band["is_causal"], "softcap": band["softcap"], "algorithm": "tiled"}
    offset = Lk - Lq + band["shift"]
    n = rows_alike(which, dtype, group, Lq)
    with selected(which):
        out, lse = fastmha.attention(q, k, v, mask=mask, offset=offset, return_lse=True, **keywords)
        for i in {0, 1, Lq // 2, 63, 64, Lq - n, int(rng.integers(Lq))} & set(range(Lq - n + 1)):
            rows = None if mask is None else mask[:, :, i : i + n]
            alone = fastmha.attention(q[:, :, i : i + n], k, v, mask=rows, offset=offset + i, return_lse=True, **keywords)
            assert_same(alone, (out[:, :, i : i + n], lse[:, :, i : i + n]), i)


@dtypes
@pytest.mark.parametrize("group", [2, 3])
def test_a_head_of_a_band_alone_has_the_bits_it_has_in_its_group(isa, dtype, group, rng):
    q, k, v, _ = draw(rng, 2, group, 1, 21, 230, 5, 4, dtype)
    for window, causal in itertools.product(((30, 2), (0, 0), (None, 17), (128, None)), (False, True)):
        keywords = {"window": window, "is_causal": causal, "offset": np.array([209, 40]), "algorithm": "tiled"}
        keywords["return_lse"] = True
        together = fastmha.attention(q, k, v, **keywords)
        for h in range(group):
            for x, y in zip(fastmha.attention(q[:, h : h + 1], k, v, **keywords), together, strict=True):
                assert same_bits(x, y[:, h : h + 1]), (window, h)
