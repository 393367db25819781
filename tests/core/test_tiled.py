"""What is special to "tiled": rows that do not know their company, two ways to one gradient, memory, far strides.

Blocks have 64 stacked rows of a group, tiles 192 keys from key 0 on; lengths here lie around both. That "tiled" is
right is for test_attention, test_firewall and test_gradients, which run it as they run "blas".
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import support
from numpy.lib.stride_tricks import as_strided
from support import (
    ISAS,
    assert_close,
    assert_same,
    bits,
    draw,
    dtypes,
    error_bounds,
    in_float64,
    padded,
    rows_alike,
    run,
    same_bits,
    selected,
)

import fastmha
from fastmha import _core, validate

EDGES = (63, 64, 65, 127, 129, 191, 192, 193, 383, 385)
RULES = {
    "plain": {},
    "causal": {"is_causal": True, "offset": 0},
    "causal, an offset per batch row": {"is_causal": True, "offset": np.array([-70, 130])},
    "window": {"window": (70, 5), "offset": np.array([3, 60])},
    "padding and softcap": {"key_padding_lengths": np.array([193, 0]), "softcap": 2.0},
}


def tiled(q, k, v, **keywords):
    """(out, lse) by the algorithm."""
    return fastmha.attention(q, k, v, algorithm="tiled", return_lse=True, **keywords)


check = partial(support.check, algorithm="tiled")


# ------------------------------------------------------------------------------------------------ lengths at tile edges


@dtypes
@pytest.mark.parametrize("L", EDGES)
def test_every_length_around_the_edges_of_blocks_and_tiles(isa, dtype, L, rng):
    check(*draw(rng, 1, 1, 1, L, L, 5, 8, dtype))
    check(*draw(rng, 1, 1, 1, L, L, 8, 3, dtype), is_causal=True)


@dtypes
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("Lq", "Lk"), [(63, 193), (65, 191), (129, 385), (192, 64), (1, 383), (3, 577)])
def test_lengths_that_differ(isa, dtype, rules, Lq, Lk, rng):
    keywords = dict(RULES[rules])
    if "key_padding_lengths" in keywords:
        keywords["key_padding_lengths"] = np.minimum(keywords["key_padding_lengths"], Lk)
    check(*draw(rng, 2, 2, 1, Lq, Lk, 6, 5, dtype), **keywords)


@dtypes
@pytest.mark.parametrize(("group", "Lq"), [(3, 1), (64, 1), (65, 1), (3, 43), (2, 63), (5, 13), (7, 30), (3, 65)])
def test_stacked_rows_that_cross_heads_within_a_block(isa, dtype, group, Lq, rng):
    arrays = draw(rng, 2, 2 * group, 2, Lq, 70, 5, 4, dtype)
    mask = rng.random((2, 2 * group, Lq, 70)) < 0.3
    check(*arrays, is_causal=True, offset=np.array([70 - Lq, 9]), mask=mask)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("shape", [(2, 6, 43, 200), (1, 6, 1, 200), (2, 1, 43, 1), (1, 6, 43, 1), (43, 200)])
def test_masks_by_head_on_blocks_that_cross_heads(isa, kind, shape, rng):
    mask = rng.random(shape) < 0.4
    if kind == "additive":
        mask = np.where(mask, -np.inf, rng.standard_normal(shape)).astype(np.float32)
    check(*draw(rng, 2, 6, 2, 43, 200, 5, 4, np.float32), mask=mask)


# ----------------------------------------------------------------------------------------------- rows and their company


@dtypes
@pytest.mark.parametrize(("D", "Dv"), [(1, 1), (5, 7), (16, 16), (33, 64)])
def test_causal_rows_alone_have_the_bits_they_have_among_all(isa, dtype, D, Dv, rng):
    q, k, v, _ = draw(rng, 1, 2, 2, 400, 400, D, Dv, dtype)
    out, lse = tiled(q, k, v, is_causal=True)
    n = rows_alike(isa, dtype, 1, 400)
    for i in (0, 1, 15, 31, 32, 63, 64, 65, 127, 190, 191, 192, 193, 255, 383, 384, 400 - n):
        alone = tiled(q[:, :, i : i + n], k, v, is_causal=True, offset=i)
        assert_same(alone, (out[:, :, i : i + n], lse[:, :, i : i + n]), i)


@dtypes
@pytest.mark.parametrize(("D", "Dv"), [(1, 3), (15, 16), (16, 64), (45, 8), (64, 64), (100, 31)])
@pytest.mark.parametrize("apart", [False, True])
def test_few_rows_have_the_bits_that_they_have_among_twelve(isa, dtype, D, Dv, apart, rng):
    """Lengths of keys around what is taken at a time; and an infinite key, alone among four, or the last of them."""
    q, k, v, _ = draw(rng, 1, 24, 2, 1, 430, D, Dv, dtype)
    if apart:
        k, v = (np.repeat(x, 2, axis=3)[..., : x.shape[3]] for x in (k, v))         # rows that do not follow each other
    k[0, 1, 190, D // 2] = k[0, 0, 23, D - 1] = np.inf       # a score of -inf, a weight of 0, where the query is negative there
    for rows in (1, 3, 4, 5, 7, 8, 9, 11):
        for Lk in (1, 2, 3, 4, 7, 8, 9, 11, 12, 13, 23, 24, 25, 31, 40, 191, 192, 193, 430):
            heads = [h for first in (0, 12) for h in range(first, first + rows)]
            few, many = (tiled(x, k[:, :, :Lk], v[:, :, :Lk]) for x in (q[:, heads], q))
            assert_same(few, [x[:, heads] for x in many])


@dtypes
@pytest.mark.parametrize("D", [1, 2, 3, 4, 6, 15, 17, 64, 100, 511, 512, 513])
def test_few_rows_agree_with_the_oracle(isa, dtype, D, rng):
    """Widths around fours and around the widest that is summed in fours."""
    for rows, Lk in ((2, 13), (5, 50), (8, 197), (9, 24), (12, 205)):
        for group in (1, rows):
            check(*draw(rng, 1, 2 * group, 2, rows // group, Lk, D, 5, dtype), is_causal=True, offset=Lk - rows)


@dtypes
def test_few_rows_of_wide_heads_have_the_bits_that_they_have_among_many(isa, dtype, rng):
    q, k, v, _ = draw(rng, 1, 40, 2, 1, 60, 520, 5, dtype)
    heads = [*range(5), *range(20, 25)]
    assert_same(tiled(q[:, heads], k, v), [x[:, heads] for x in tiled(q, k, v)])


@dtypes
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_rows_of_a_chunk_of_queries_have_the_bits_they_have_among_all(isa, dtype, softcap, rng):
    """A prompt taken in chunks, each with its offset, whatever their sizes, the last ones' too."""
    q, k, v, _ = draw(rng, 2, 4, 2, 300, 300, 8, 9, dtype)
    keywords = {"is_causal": True, "softcap": softcap}
    whole = tiled(q, k, v, **keywords)
    few = rows_alike(isa, dtype, 2, 300) == 1
    for size in (7 if few else 10, 29, 40, 64, 100, 193):
        parts = [
            tiled(q[:, :, i : i + size], k[:, :, : i + size], v[:, :, : i + size], offset=i, **keywords)
            for i in range(0, 300, size)
        ]
        assert_same([np.concatenate(x, axis=2) for x in zip(*parts, strict=True)], whole)


@dtypes
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Lk", [3, 40, 192, 193])
def test_what_is_not_finite_is_seen_where_the_only_tile_writes_the_results(isa, dtype, Lk, causal, rng):
    """One head, no row without keys, one tile, of 193 keys two: of one, the product writes out, whatever its stride."""
    q, k, v, _ = draw(rng, 2, 3, 3, 70, Lk, 9, 21, dtype)
    mask = np.zeros((70, Lk), bool)
    mask[1::2, 1] = True
    keywords = {"mask": mask, **({"is_causal": True, "offset": 2} if causal else {})}
    v[:, :, 1] = np.nan
    out = np.full((2, 3, 70, 50), 7, dtype)
    tiled(q, k, v, out=out[..., 3:24], **keywords)
    assert (out[..., :3] == 7).all()
    assert (out[..., 24:] == 7).all()
    assert np.isnan(out[:, :, ::2, 3:24]).all()
    v[:, :, 1] = 0
    assert same_bits(out[:, :, 1::2, 3:24], tiled(q, k, v, **keywords)[0][:, :, 1::2])
    v[:] = large = np.finfo(dtype).max / 4      # whose sums overflow before they are divided
    np.testing.assert_allclose(tiled(q, k, v, **keywords)[0] / large, np.ones_like(out[..., 3:24]), rtol=1e-5)


@dtypes
def test_a_softcap_leaves_rows_the_bits_that_they_have_beside_rows_of_large_scores(isa, dtype, rng):
    """Of scores that are all small tanh is made in another way; with one that is not, all are asked."""
    q, k, v, g = draw(rng, 1, 1, 1, 90, 300, 24, 9, dtype)
    small = np.arange(90) % 3 > 0
    q[:, :, ~small] *= dtype(100)
    keywords = {"softcap": 12.0, "scale": 0.2}
    whole = tiled(q, k, v, **keywords)
    grad_q = fastmha.attention_backward(g, q, k, v, *whole, algorithm="tiled", **keywords)[0]
    alone = tiled(q[:, :, small], k, v, **keywords)
    grad_q_alone = fastmha.attention_backward(g[:, :, small], q[:, :, small], k, v, *alone, algorithm="tiled", **keywords)[0]
    assert_same([*alone, grad_q_alone], [whole[0][:, :, small], whole[1][:, :, small], grad_q[:, :, small]])
    check(q, k, v, g, **keywords)


@dtypes
def test_keys_that_are_removed_may_as_well_not_be_there(isa, dtype, rng):
    q, k, v, _ = draw(rng, 1, 4, 2, 70, 600, 8, 8, dtype)
    for n in (1, 63, 191, 192, 193, 400):
        short = tiled(q, k[:, :, :n], v[:, :, :n])
        assert_same(short, tiled(q, k, v, key_padding_lengths=[n]))
        assert_same(short, tiled(q, k, v, mask=np.broadcast_to(np.arange(600) >= n, (70, 600))))


@dtypes
def test_a_window_in_a_long_row_of_keys_has_the_bits_of_its_tiles(isa, dtype, rng):
    """Tiles before the window are not visited: shifting everything by whole tiles changes no bit."""
    q, k, v, _ = draw(rng, 1, 2, 1, 40, 200, 8, 8, dtype)
    wanted = tiled(q, k, v, window=(30, 10), offset=60)
    for tiles in (1, 3):
        shifted = []
        for x in (k, v):
            longer = np.full((1, 1, 200 + 192 * tiles, 8), np.nan, dtype)
            longer[:, :, 192 * tiles :] = x
            shifted.append(longer)
        assert_same(wanted, tiled(q, *shifted, window=(30, 10), offset=60 + 192 * tiles))


def in_pages(x):
    """The same numbers, each row at the beginning of 4 KB of NaN."""
    pages = np.full((*x.shape[:-1], 4096 // x.itemsize), np.nan, x.dtype)
    pages[..., : x.shape[-1]] = x
    return pages[..., : x.shape[-1]]


@dtypes
@pytest.mark.parametrize("rules", RULES)
def test_heads_in_rows_of_whole_pages_have_the_bits_of_contiguous_ones(isa, dtype, rules, rng):
    """Rows that share few sets of the caches are copied for some products, not for others: the same numbers."""
    q, k, v, g = draw(rng, 2, 4, 2, 70, 200, 16, 16, dtype)

    def results(q, k, v, g):
        out, lse = tiled(q, k, v, **RULES[rules])
        gradients = fastmha.attention_backward(g, q, k, v, out, lse, algorithm="tiled", **RULES[rules])
        return out, lse, *gradients, *fastmha.scaled_dot_product_attention(q[:, :2], k, v)

    far = results(*map(in_pages, (q, k, v, g)))
    assert all(same_bits(x, y) for x, y in zip(far, results(q, k, v, g)))


GATHERED = {        # how k and v lie, rules
    "rows of whole pages": ("paged", {}),
    "causal": ("paged", {"is_causal": True, "offset": np.array([100, -30])}),
    "padding and softcap": ("paged", {"key_padding_lengths": np.array([400, 193]), "softcap": 2.0}),
    "a window beyond the first tile": ("paged", {"window": (20, 5), "offset": np.array([195, 150])}),
    "the same keys for all heads": ("shared k", {}),
    "the same values for all heads": ("shared v", {}),
    "widths of no whole vectors": ("odd", {"is_causal": True, "offset": 190}),
    "what is not finite where it is removed": ("poisoned", {"is_causal": True, "offset": 100}),
    "rows that attend all keys evenly": ("paged", {"mask": "padding rows"}),
    "tiny values": ("tiny", {}),
}


@dtypes
@pytest.mark.parametrize("name", GATHERED)
def test_blocks_that_find_keys_and_values_gathered_have_the_bits_of_blocks_that_read_them(isa, dtype, name, rng):
    """Of heads of several blocks a thread gathers rows that crowd the caches, or are no whole vectors, once for all of its
    blocks; where there are about as many threads as blocks, none does."""
    lie, rules = GATHERED[name]
    width = 5 if lie == "odd" else 16
    q, k, v, g = draw(rng, 2, 4, 2, 200, 400, width, 16 if lie == "paged" else width, dtype)
    if "mask" in rules:
        mask = np.zeros((1, 1, 200, 400), dtype)
        mask[..., :70, :] = np.finfo(dtype).min
        rules = {"mask": mask}
    if lie == "poisoned":
        k[:, :, 350:], v[:, :, 350:], v[0, 1, 120, 3] = np.nan, np.inf, np.inf
    if lie == "tiny":
        v *= np.finfo(dtype).tiny / 16
    if lie == "shared k":
        k = np.broadcast_to(in_pages(k[:, :1]), k.shape)
    if lie == "shared v":
        v = np.broadcast_to(in_pages(v[:, :1]), v.shape)

    def results(q, k, v, g, threads):
        return (*run(fastmha, q, k, v, g, algorithm="tiled", threads=threads, **rules),
                *fastmha.scaled_dot_product_attention(q[:, ::2], k, v, mask=rules.get("mask")))

    wanted = results(q, np.ascontiguousarray(k), np.ascontiguousarray(v), g, 8)
    for threads in (1, 2, 3):
        got = results(*(in_pages(x) if x.strides[1] else x for x in (q, k, v, g)), threads)
        assert_same(got, wanted, threads)


def empty(shape, dtype, at):
    """Memory that nobody has touched from so many bytes behind the start of a cache line on."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    memory = np.empty(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + at
    return memory[start : start + size].view(dtype).reshape(shape)


def beginning(x, at, apart=0):
    """The same numbers from there on, rows with so many elements of NaN between them."""
    wide = empty((*x.shape[:-1], x.shape[-1] + apart), x.dtype, at)
    wide.fill(np.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@dtypes
@pytest.mark.parametrize("width", [5, 16, 24])
@pytest.mark.parametrize("rules", RULES)
def test_where_in_a_cache_line_values_begin_does_not_change_the_bits(isa, dtype, rules, width, rng):
    """Those that do not begin at one are copied to where they do: tile by tile, or once for all blocks of a head."""
    q, k, v, g = draw(rng, 2, 4, 2, 140, 400, 16, width, dtype)
    v[0, 1, 250, 3] = np.inf

    def results(v, threads):
        return (*run(fastmha, q, k, v, g, algorithm="tiled", threads=threads, **RULES[rules]),
                *fastmha.scaled_dot_product_attention(q[:, ::2], k, v))

    wanted = results(beginning(v, 0, -width % 16), 8)
    for at, apart in ((16, 0), (48, 16), (0, 1), (v.itemsize, 0)):
        for threads in (1, 2, 8):
            assert_same(results(beginning(v, at, apart), threads), wanted, (at, apart, threads))


@pytest.mark.parametrize("Lk", [3, 16, 17])
@pytest.mark.parametrize("width", [97, 104])
def test_results_that_lie_far_away_have_the_bits_of_near_ones(isa, width, Lk, rng):
    """Of few keys the sums of some widths are written row by row, else by the product, panel by panel."""
    q, k, v, _ = draw(rng, 1, 1, 1, 6000, Lk, 4, width, np.float32)
    v[0, 0, 1, 5], v[0, 0, 2, 7] = np.finfo(np.float32).tiny / 32, np.nan
    assert q.shape[2] * width * 4 > 2**21
    whole = tiled(q, k, v, is_causal=True, offset=-70, num_threads=2)
    for first in range(0, 6000, 640):
        part = tiled(q[:, :, first : first + 640], k, v, is_causal=True, offset=first - 70)
        assert_same([x[:, :, first : first + 640] for x in whole], part, first)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("threads", [1, 2])
def test_packed_sequences_gather_keys_and_values_of_their_own(isa, dtype, threads, rng):
    lengths = [300, 0, 257, 513, 3]
    q, k, v = (in_pages(rng.standard_normal((sum(lengths), 2, 16)).astype(dtype)) for _ in range(3))
    got = fastmha.attention_packed(q, k, v, lengths, is_causal=True, algorithm="tiled", num_threads=threads)
    for n, end in zip(lengths, np.cumsum(lengths), strict=True):
        alone = (np.ascontiguousarray(x[None, end - n : end]) for x in (q, k, v))
        wanted = fastmha.attention(*alone, layout="BLHD", is_causal=True, algorithm="tiled", num_threads=8)
        assert same_bits(got[end - n : end], wanted[0]), n


@dtypes
def test_the_place_of_a_head_in_its_group_does_not_change_its_bits(isa, dtype, rng):
    q, k, v, _ = draw(rng, 1, 5, 1, 27, 200, 7, 6, dtype)
    together = tiled(q, k, v, is_causal=True, offset=100)
    for h in range(5):
        alone = tiled(q[:, h : h + 1], k, v, is_causal=True, offset=100)
        assert_same([x[:, h : h + 1] for x in together], alone)


# ---------------------------------------------------------------------------------------------------- the backward pass


def gradients(arrays, out, lse, split, threads, **keywords):
    """grad_q, grad_k, grad_v of heads that are whole or split, written into NaN."""
    q, k, v, g = arrays
    layout = keywords.pop("layout", "BHLD")
    problem = validate.attention_problem(q, k, v, layout, validate.Rules(**keywords))
    grads = [np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)]
    views = [x if layout == "BHLD" else x.swapaxes(1, 2) for x in (out, g, *grads)]
    _core.tiled_backward(problem, views[0], lse, views[1], *views[2:], None, split, threads)
    return grads


SPLIT_CASES = {
    "one tile": ((2, 2, 2, 33, 40, 6, 5), {}),
    "several tiles and blocks": ((1, 2, 1, 130, 400, 8, 8), {}),
    "causal": ((1, 3, 1, 150, 390, 5, 7), {"is_causal": True, "offset": 200}),
    "window": ((2, 2, 2, 100, 500, 16, 3), {"window": (60, 20), "offset": np.array([250, -40])}),
    "blocks before, between and behind those that attend a key": ((1, 3, 1, 260, 700, 8, 8), {"window": (40, 10), "offset": 100}),
    "padding": ((3, 4, 2, 65, 193, 4, 4), {"key_padding_lengths": [193, 64, 0], "softcap": 2.0}),
    "one row": ((1, 4, 1, 1, 385, 9, 16), {}),
    "one row with sums of its own": ((3, 2, 2, 1, 700, 9, 16), {"scale": 20.0, "key_padding_lengths": [700, 650, 130]}),
    "few rows with sums of their own": (
        (1, 2, 1, 2, 700, 8, 8), {"scale": 1e3, "window": (300, 20), "offset": 500, "softcap": 1e3},
    ),
    "without queries": ((1, 2, 1, 0, 50, 4, 4), {"is_causal": True, "offset": 0}),
    "without keys": ((1, 2, 1, 50, 0, 4, 4), {}),
    "peaked scores, whose sums decide": ((1, 2, 1, 300, 700, 8, 8), {"scale": 20.0}),
    "huge scores": ((1, 2, 2, 140, 400, 8, 8), {"scale": 1e4, "is_causal": True, "offset": 260}),
    "many tiles and blocks": ((1, 2, 1, 700, 2000, 8, 8), {"is_causal": True, "offset": 0}),
    "copies of a head": ((2, 8, 2, 300, 37, 6, 5), {}),
    "copies, causal, some rows without keys": ((1, 6, 1, 400, 95, 8, 8), {"is_causal": True, "offset": np.array([-100])}),
    "copies of several tiles": ((1, 16, 1, 130, 250, 8, 3), {"window": (90, 30), "offset": 60}),
    "copies, peaked scores, whose sums decide": ((1, 8, 1, 150, 100, 8, 8), {"scale": 20.0}),
    "copies, padding, a tiny scale": ((3, 8, 2, 256, 60, 4, 4), {"key_padding_lengths": [60, 7, 0], "scale": 1e-40}),
}
SPLITS = ((192, 0), (192, 1), (192, 2), (192, 8), (96, 0), (96, 2), (48, 0), (48, 1), (48, 8))     # keys, blocks


@dtypes
@pytest.mark.parametrize("name", SPLIT_CASES)
def test_heads_that_are_split_have_the_gradients_of_whole_ones_bit_for_bit(isa, dtype, name, rng):
    shape, keywords = SPLIT_CASES[name]
    keywords = {**keywords}
    arrays = draw(rng, *shape, dtype=dtype)
    out, lse = tiled(*arrays[:3], **keywords)
    whole = gradients(arrays, out, lse, "whole", 1, **keywords)
    for x in whole:
        assert np.isfinite(x).all()
    for split in ("whole", *SPLITS, None):
        for threads in (1, 3, 8):
            assert_same(whole, gradients(arrays, out, lse, split, threads, **keywords))
    assert_same(whole, fastmha.attention_backward(arrays[3], *arrays[:3], out, lse, algorithm="tiled", **keywords))


def lse_moved(lse, by):
    """As of an algorithm of other roundings, at the first of each seven rows."""
    moved = lse.copy()
    moved[..., ::7] += lse.dtype.type(by)
    return moved


@dtypes
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 1, 130, 400, 8, 8), (2, 2, 2, 65, 700, 6, 5), (1, 3, 1, 100, 193, 8, 8), (1, 4, 1, 1, 700, 9, 16),
        (1, 8, 2, 256, 60, 8, 8),
    ],
)
def test_heads_whose_rows_want_sums_of_their_own_after_all_keys_have_the_same_bits_whole_and_split(isa, dtype, shape, rng):
    """Where lse is not what the scores add up to, all is done again. The first row of each seven wants that here."""
    q, k, v, g = draw(rng, *shape, dtype=dtype)
    eps = np.finfo(dtype).eps
    out, lse = tiled(q, k, v)
    own = gradients((q, k, v, g), out, lse_moved(lse, -1e4 * eps), "whole", 1)
    right = gradients((q, k, v, g), out, lse, "whole", 1)
    for x, y in zip(own, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=300 * eps * np.abs(y).max())
    for by in (-1e4 * eps, -100 * eps):
        moved = lse_moved(lse, by)
        whole = gradients((q, k, v, g), out, moved, "whole", 1)
        for split in (*SPLITS, None):
            for threads in (1, 3):
                assert_same(whole, gradients((q, k, v, g), out, moved, split, threads))


def copies_of(shape):
    B, H, Hkv, Lq, Lk, D, Dv = shape
    q, k, v = np.empty((B, H, Lq, D), np.float32), np.empty((B, Hkv, Lk, D), np.float32), np.empty((B, Hkv, Lk, Dv), np.float32)
    return _core.head_copies(validate.attention_problem(q, k, v, "BHLD"))


def test_heads_have_copies_by_their_lengths_where_rows_are_many_and_keys_few():
    for B in (1, 7):
        for Hkv in (1, 3):
            of = {(group, Lq, Lk): copies_of((B, group * Hkv, Hkv, Lq, Lk, 8, 8)) for group, Lq, Lk in (
                (1, 5000, 5), (2, 511, 5), (2, 512, 5), (2, 512, 128), (2, 512, 129), (6, 200, 9), (6, 256, 9), (6, 256, 50),
                (7, 3584, 64), (32, 2048, 2048), (4, 0, 0), (4, 512, 0),
            )}  # fmt: skip
            assert list(of.values()) == [1, 1, 2, 2, 1, 2, 3, 3, 7, 8, 1, 4]


@support.all_dtypes
@pytest.mark.parametrize("name", [name for name in SPLIT_CASES if name.startswith("copies")])
def test_copies_of_heads_give_the_gradients(isa, dtype, name, rng):
    shape, keywords = SPLIT_CASES[name]
    assert copies_of(shape) > 1
    check(*draw(rng, *shape, dtype=dtype), **keywords)


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_of_heads_of_packed_sequences_have_the_bits_of_sequences_alone(isa, threads, rng):
    lengths, of_keys, bounds = [300, 4, 700, 257], [37, 9, 150, 250], []
    q, g = (rng.standard_normal((sum(lengths), 8, 8)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((sum(of_keys), 2, 8)).astype(np.float32) for _ in range(2))
    out, lse = fastmha.attention_packed(q, k, v, lengths, of_keys, return_lse=True)
    alone = []
    for end, L, end_k, Lk in zip(np.cumsum(lengths), lengths, np.cumsum(of_keys), of_keys, strict=True):
        part, of_k = slice(end - L, end), slice(end_k - Lk, end_k)
        heads = [x[s].swapaxes(0, 1)[None] for x, s in ((g, part), (q, part), (k, of_k), (v, of_k), (out, part))]
        bounds.append(copies_of((1, 8, 2, L, Lk, 8, 8)))
        own = fastmha.attention_backward(*heads, np.ascontiguousarray(lse[None, :, part]), algorithm="tiled")
        alone.append([x[0].swapaxes(0, 1) for x in own])
    assert bounds == [2, 1, 4, 1]
    found = fastmha.attention_packed_backward(g, q, k, v, out, lse, lengths, of_keys, algorithm="tiled", num_threads=threads)
    for x, parts in zip(found, zip(*alone, strict=True), strict=True):
        assert_same([x], [np.concatenate(parts)])


@support.all_dtypes
@pytest.mark.parametrize("rules", ["plain", "causal", "lengths and softcap"])
@pytest.mark.parametrize(("shape", "threads"), [((1, 1, 16), 1), ((2, 3, 17), 1), ((1, 2, 70), 4), ((1, 32, 64), 3)])
def test_one_key_gets_no_gradient_by_its_score(isa, dtype, rules, shape, threads, rng):
    """Its weight is 1 whatever the score is: grad_q and grad_k are 0, not what is left of two sums that ought to be equal."""
    B, H, Lq = shape
    keywords = {
        "plain": {},
        "causal": {"is_causal": True, "offset": 3},
        "lengths and softcap": {"key_padding_lengths": np.array([1, 0])[:B], "softcap": 2.0},
    }[rules]
    q, k, v, g = draw(rng, B, H, 1, Lq, 1, 27, 27, dtype=dtype)
    out, lse = fastmha.attention(q, k, v, return_lse=True, **keywords)
    for algorithm in ("tiled", "blas"):
        grad_q, grad_k, grad_v = fastmha.attention_backward(
            g, q, k, v, out, lse, algorithm=algorithm, num_threads=threads, **keywords
        )
        assert not grad_q.any()
        assert not grad_k.any()
        assert grad_v.any()


def test_sums_of_copies_are_at_most_a_fourth_as_many_as_the_gradient_of_q(isa):
    """By the scratch of two lengths of keys, one that allows as many copies and one that allows none."""
    q = np.empty((1, 32, 1024, 64), np.float32)
    few, more = (np.empty((1, 1, n, 64), np.float32) for n in (1024, 4097))
    assert _core.head_copies(validate.attention_problem(q, few, few, "BHLD")) == 8
    assert _core.head_copies(validate.attention_problem(q, more, more, "BHLD")) == 1
    with_copies, without = (
        sum(_core.tiled_scratch(validate.attention_problem(q, k, k, "BHLD"), True, 1)) for k in (few, more)
    )
    assert with_copies - without <= 2 * q.nbytes / 4


@pytest.mark.parametrize("by", [-1e-3, 1e-3])
def test_packed_heads_whose_rows_want_sums_of_their_own_have_the_bits_of_sequences_alone(isa, by, rng):
    """Beyond its rounding a smaller lse is no other than wrong; a larger one is that of more keys."""
    lengths = [70, 300, 1, 130]
    q, k, v, g = (rng.standard_normal((sum(lengths), 2, 8)).astype(np.float32) for _ in range(4))
    out, lse = fastmha.attention_packed(q, k, v, lengths, return_lse=True)
    moved = lse_moved(lse, by)
    alone = []
    for end, L in zip(np.cumsum(lengths), lengths, strict=True):
        part = slice(end - L, end)
        heads = (x[part].swapaxes(0, 1)[None] for x in (g, q, k, v, out))
        own = fastmha.attention_backward(*heads, np.ascontiguousarray(moved[None, :, part]), algorithm="tiled")
        alone.append([x[0].swapaxes(0, 1) for x in own])
    found = fastmha.attention_packed_backward(g, q, k, v, out, moved, lengths, algorithm="tiled", num_threads=3)
    for x, parts in zip(found, zip(*alone, strict=True), strict=True):
        assert_same([x], [np.concatenate(parts)])


SECTION_CASES = {
    "plain": {}, "causal": {"is_causal": True, "offset": 0}, "window": {"window": (40, 30), "offset": 0},
    "peaked scores, whose sums decide": {"scale": 1.0}, "huge scores": {"scale": 1e3},
}


@dtypes
@pytest.mark.parametrize("name", SECTION_CASES)
def test_long_heads_which_tiles_go_through_in_sections_have_the_gradients_of_split_ones_bit_for_bit(isa, dtype, name, rng):
    """Four megabytes of rows and more."""
    arrays = draw(rng, 1, 3, 1, 290, 250, 256, 250, dtype)
    out, lse = tiled(*arrays[:3], **SECTION_CASES[name])
    whole = gradients(arrays, out, lse, "whole", 1, **SECTION_CASES[name])
    for split in ((192, 0), (48, 2)):
        assert_same(whole, gradients(arrays, out, lse, split, 1, **SECTION_CASES[name]))


def test_only_long_heads_have_sums_of_all_keys_for_their_sections():
    for L, grows in ((100, 0), (5000, 1)):
        more, less = (
            _core.tiled_scratch(validate.attention_problem(np.empty((1, 1, L, 64), np.float32), k, k, "BHLD"), True, 1)[0]
            for k in (np.empty((1, 1, n, 64), np.float32) for n in (2000, 1000))
        )
        assert more - less == grows * 2 * 1000 * 64 * 4


@dtypes
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("poison", [None, np.nan, np.inf])
@pytest.mark.parametrize(("H", "Lq", "Lk"), [(4, 70, 300), (8, 260, 128)], ids=["heads", "copies"])
def test_heads_that_are_split_have_the_gradients_of_whole_ones_whatever_masks_and_values(
    isa, dtype, H, Lq, Lk, kind, poison, rng
):
    arrays = draw(rng, 2, H, 2, Lq, Lk, 5, 6, dtype)
    mask = rng.random((2, H, Lq, Lk)) < 0.5
    mask[0, 1, 5] = True
    if kind == "additive":
        mask = np.where(mask, -np.inf, 0.5).astype(dtype)
    if poison is not None:
        for x, at in zip(arrays, (3, Lk - 100, Lk - 10, 66), strict=True):
            x[1, 1, at, 2] = poison
    out, lse = tiled(*arrays[:3], mask=mask)
    whole = gradients(arrays, out, lse, "whole", 1, mask=mask)
    for split in SPLITS:
        assert_same(whole, gradients(arrays, out, lse, split, 3, mask=mask))


def test_gradients_of_fewer_heads_than_threads_have_the_bits_of_one_thread(rng):
    """With more threads than heads these are split."""
    q, k, v, g = draw(rng, 1, 2, 2, 200, 200, 8, 8, np.float32)
    out, lse = tiled(q, k, v)
    one = fastmha.attention_backward(g, q, k, v, out, lse, algorithm="tiled", num_threads=1)
    for threads in (2, 3, 7):
        assert_same(one, fastmha.attention_backward(g, q, k, v, out, lse, algorithm="tiled", num_threads=threads))


@dtypes
def test_additive_masks_of_zeros_change_no_bit(isa, dtype, rng):
    arrays = draw(rng, 1, 2, 1, 70, 200, 8, 5, dtype)
    plain = run(fastmha, *arrays, algorithm="tiled")
    for shape in ((70, 200), (1, 1, 1, 200), (1, 2, 70, 200)):
        assert_same(plain, run(fastmha, *arrays, algorithm="tiled", mask=np.zeros(shape, dtype)))
        assert_same(plain, run(fastmha, *arrays, algorithm="tiled", mask=np.zeros(shape, bool)))


@dtypes
def test_large_finite_values_average_finite_and_leave_other_columns_alone(isa, dtype, rng):
    """Sums that overflow are taken again; the columns that do not overflow and lse keep their bits."""
    q, k, v, _ = draw(rng, 1, 3, 1, 40, 400, 8, 5, dtype)
    plain = tiled(q, k, v)
    v[..., 2] = np.finfo(dtype).max / 2 * (1 + rng.random((1, 1, 400)).astype(dtype)) / 2
    out, lse = tiled(q, k, v)
    assert np.isfinite(out).all()
    assert v[..., 2].min() * 0.999 <= out[..., 2].min()
    assert out[..., 2].max() <= v[..., 2].max() * 1.001
    others = [0, 1, 3, 4]
    assert np.array_equal(bits(out[..., others]), bits(plain[0][..., others]))
    assert same_bits(lse, plain[1])


# --------------------------------------------------------------------------------------------------------------- memory


def scratch(L, Lk=None, *, algorithm, begins=0, **keywords):
    q, k = (empty((1, 1, n, 64), np.float32, begins) for n in (L, Lk or L))
    return fastmha.plan(q, k, k, algorithm=algorithm, num_threads=2, **keywords).scratch_bytes


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"softcap": 5.0}], ids=["full", "causal", "softcap"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_scratch_of_tiled_does_not_grow_with_the_square_of_the_length(isa, backward, keywords):
    """Beside it, backward, what a thread keeps of a tile for each block of a share: one to eight, as is best for a length."""
    _, keys, _, _ = _core.tile_sizes()
    shares = 2 * 7 * keys * 2 * 64 * 4 if backward else 0
    for L in (512, 2048, 16384, 2**20):
        one, two = (scratch(n, algorithm="tiled", backward=backward, **keywords) for n in (L, 2 * L))
        assert two <= 2 * one + 2**16 + shares
        if not backward:
            assert two == one
            assert scratch(L, algorithm="tiled", begins=16, **keywords) <= one + 2 * (2**22 + 2**10)    # values that are gathered
    assert scratch(16384, algorithm="tiled", backward=True) < 64 * 2**20


def test_scratch_of_decode_does_not_grow_with_the_square_of_the_length(isa):
    """Beside what the threads work in, a few numbers per row for every 512 keys."""
    for Lk in (512, 4096, 2**20):
        one, two = (scratch(4, n, algorithm="decode") for n in (Lk, 2 * Lk))
        assert two <= 2 * one + 2**16


def test_scratch_of_decode_does_not_grow_with_the_number_of_short_heads(isa):
    """What the only 512 keys of a head leave becomes its result at once."""
    def of(heads, keys):
        q, k = (np.empty((heads, 8, n, 64), np.float32) for n in (2, keys))
        return fastmha.plan(q, k, k, algorithm="decode", num_threads=2).scratch_bytes

    assert of(1000, 512) == of(1, 512) < 2**19
    assert of(100, 513) > of(1, 513)        # else a merging is to come, of all


# ---------------------------------------------------------------------------------------------------------- far strides


@pytest.fixture(scope="module")
def far(tmp_path_factory):
    """A function that places an array with `apart` elements between neighbours along an axis, in one sparse file."""
    path = tmp_path_factory.mktemp("far") / "sparse"
    memory = np.asarray(np.memmap(path, np.uint8, "w+", shape=(9 * 2**30,)))
    path.unlink()

    def place(x, apart, axis):
        strides = list(np.ascontiguousarray(x).strides)
        strides[axis] = apart * x.itemsize
        assert sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True)) + x.itemsize <= memory.size
        view = as_strided(memory[: memory.size // 8 * 8].view(x.dtype), x.shape, strides)
        view[...] = x
        return view

    return place


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "head", "row"])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("algorithm", ["tiled", "decode"])
def test_elements_beyond_2_to_the_31_are_found(isa, algorithm, axis, backwards, rng, far):
    """Each operand with neighbours 2**31 + 5 elements apart along one axis, forward and backward."""
    arrays = draw(rng, 2, 2, 2, 2, 2, 7, 9, np.float32)
    keywords = {"is_causal": True}

    def results(q, k, v, g, out=None):
        out, lse = fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True, out=out, **keywords)
        if algorithm == "decode":
            return out, lse
        return out, lse, *fastmha.attention_backward(g, q, k, v, out, lse, algorithm=algorithm, **keywords)

    expected = results(*arrays)
    step = slice(None, None, -1) if backwards else slice(None)
    turned = tuple(step if a == axis else slice(None) for a in range(4))
    for n in range(4):
        changed = list(arrays)
        changed[n] = far(arrays[n][turned], 2**31 + 5, axis)[turned]
        assert_same(expected, results(*changed))
    out = far(np.full_like(arrays[3], np.nan)[turned], 2**31 + 5, axis)[turned]
    assert_same(expected, results(*arrays, out=out))


def test_whole_blocks_of_rows_beyond_2_to_the_31(isa, rng, far):
    """Rows 2**25 + 16 elements apart: the later ones of a block, and of a tile, are more than 2**31 elements away."""
    arrays = draw(rng, 1, 1, 1, 66, 66, 4, 4, np.float32)
    expected = run(fastmha, *arrays, algorithm="tiled")
    for n in range(4):
        changed = list(arrays)
        changed[n] = far(arrays[n], 2**25 + 16, 2)
        assert_same(expected, run(fastmha, *changed, algorithm="tiled"))
        if n in (1, 2):
            q = arrays[0][:, :, :2]
            assert_same(
                fastmha.attention(q, *arrays[1:3], algorithm="decode", return_lse=True),
                fastmha.attention(q, *changed[1:3], algorithm="decode", return_lse=True),
            )


@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["batch", "head", "query", "key"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("algorithm", ["tiled", "decode"])
def test_masks_beyond_2_to_the_31_are_found(algorithm, kind, axis, rng, far):
    q, k, v, g = draw(rng, 2, 2, 2, 2, 2, 7, 9, np.float32)
    mask = np.zeros((2, 2, 2, 2), bool)
    mask[0, 1, 0, 1] = mask[1, 0, 1, 0] = mask[1, 1, 1, 1] = True
    if kind == "additive":
        mask = np.where(mask, -np.inf, 0.25).astype(np.float32)
    expected = fastmha.attention(q, k, v, mask=mask, algorithm=algorithm, return_lse=True)
    there = far(mask, 2**31 + 5, axis)
    assert_same(expected, fastmha.attention(q, k, v, mask=there, algorithm=algorithm, return_lse=True))
    if algorithm == "tiled":
        expected = run(fastmha, q, k, v, g, mask=mask, algorithm=algorithm)
        assert_same(expected, run(fastmha, q, k, v, g, mask=there, algorithm=algorithm))


# ------------------------------------------------------------------------------------------- the product of projections


@dtypes
@pytest.mark.parametrize("transposes", list(itertools.product([False, True], repeat=2)), ids=["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(
    "size",
    [(2, 3, 1), (5, 7, 3), (33, 65, 17), (13, 50, 255), (257, 9, 257), (3, 130, 600), (0, 3, 4), (3, 0, 4)],
)
def test_own_products_in_any_slices_are_right_and_have_one_set_of_bits(isa, dtype, transposes, size, rng):
    m, n, k = size
    a, b = padded(rng.standard_normal((m, k)).astype(dtype)), padded(rng.standard_normal((k, n)).astype(dtype))
    bias = rng.standard_normal(n).astype(dtype)
    wanted = a.astype(np.float64) @ b.astype(np.float64) + bias
    if transposes[0]:
        a = padded(a.T)
    if transposes[1]:
        b = padded(b.T)
    results = []
    for slices, threads in (((max(1, m), max(1, n)), 1), ((5, 16), 3), ((1, 3), 2), ((256, 64), 1)):
        around = np.full((m + 2, n + 3), np.nan, dtype)
        c = around[1:-1, 1:-2]
        _core.matmul_tiled(a, b, c, *transposes, bias, slices, threads)
        assert np.abs(c - wanted).max(initial=0) <= np.finfo(dtype).eps * (4 * k + 8) * 25
        results.append(c.copy())
        c[...] = np.nan
        assert np.isnan(around).all()
    for x in results[1:]:
        assert same_bits(x, results[0])


@dtypes
def test_own_products_over_nothing_are_the_bias(isa, dtype, rng):
    """As those of BLAS are."""
    bias = rng.standard_normal(9).astype(dtype)
    for function, factors in ((_core.matmul, (1.0, 0.0)), (_core.matmul_tiled, ())):
        c = np.full((5, 9), np.nan, dtype)
        function(np.empty((5, 0), dtype), np.empty((0, 9), dtype), c, False, False, *factors, bias, (5, 9), 1)
        assert same_bits(c, np.repeat(bias[None], 5, axis=0)), function.__name__


@dtypes
def test_attention_without_value_width_leaves_the_bias_of_the_output(isa, dtype, rng):
    x, square = rng.standard_normal((2, 3, 4)).astype(dtype), rng.standard_normal((4, 4)).astype(dtype)
    bias = rng.standard_normal(5).astype(dtype)
    weights = {"W_Q": square, "W_K": square, "W_V": square[:, :0], "W_O": np.empty((0, 5), dtype), "b_O": bias}
    out = fastmha.multi_head_attention(x, x, x, 2, weights)
    assert same_bits(out, np.ascontiguousarray(np.broadcast_to(bias, (2, 3, 5))))


# ------------------------------------------------------------------------------------------------ agreement to rounding


@dtypes
@pytest.mark.parametrize("rules", RULES)
def test_instruction_sets_agree_to_rounding_over_many_tiles(dtype, rules, rng):
    arrays = draw(rng, 2, 4, 2, 130, 400, 16, 16, dtype)
    bounds = error_bounds(*in_float64(arrays, {})[0], dtype, **RULES[rules])
    results = []
    for isa in ISAS:
        with selected(isa):
            results.append(run(fastmha, *arrays, algorithm="tiled", **RULES[rules]))
    for others in results[1:]:
        assert_close(others, [x.astype(np.float64) for x in results[0]], bounds)
