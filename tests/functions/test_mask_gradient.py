"""The gradient of an additive mask: in the mask's own shape, summed over the axes that it is broadcast along.

Against the float64 reference with the bounds of `support.error_bounds`.
"""

import numpy as np
import pytest
import support
from support import (
    LAYOUTS,
    NAMED,
    algorithms,
    all_dtypes,
    assert_close,
    assert_gradient,
    assert_same,
    bits,
    check,
    crossed,
    crossed_oracle,
    draw,
    dtypes,
    oracle,
    run,
    same_bits,
)

import fastmha
from fastmha import reference

with_decode = pytest.mark.parametrize("algorithm", [*NAMED, "decode"])
backwards = pytest.mark.parametrize("second", NAMED)
SHAPES = ("Lq Lk", "1 1 Lq Lk", "B 1 1 Lk", "1 H Lq Lk", "B H Lq Lk", "1 H 1 1", "1 1 Lq 1", "1 1 1 1", "B 1 Lq 1", "1 H 1 Lk",
          "B H 1 1")  # fmt: skip
shapes = pytest.mark.parametrize("shape", SHAPES)


def of(*values, dtype=np.float64):
    return np.array(values, dtype)


def mask_of(rng, shape, dtype=np.float64, gone=0.3, B=2, H=4, Lq=33, Lk=200):
    sizes = {"B": B, "H": H, "Lq": Lq, "Lk": Lk, "1": 1}
    one = [sizes[name] for name in shape.split()]
    removed = (rng.random(one) < gone) & (np.prod(one) > 16)        # of the smallest none, which would be all
    return np.where(removed, -np.inf, rng.standard_normal(one)).astype(dtype)


def grad_mask(arrays, mask, algorithm="tiled", threads=None, **keywords):
    return run(fastmha, *arrays, mask=mask, need_bias_grad=True, algorithm=algorithm, threads=threads, **keywords)[-1]


# ----------------------------------------------------------------------------------------------------------- the oracle

RULES = {
    "plain": {},
    "causal": {"is_causal": True, "offset": np.array([167, -2])},
    "window": {"window": (5, 2), "offset": 40},
    "softcap": {"softcap": 2.0},
    "ranges": {"key_ranges": ([191, 5], [200, 65]), "key_padding_lengths": np.array([199, 0])},
    "everything": {"is_causal": True, "window": (150, None), "offset": 150, "softcap": 3.0, "key_ranges": ([3, 9], None),
                   "alibi": of(1, 0.25, 0, 0.5), "sinks": of(0.5, 1, -np.inf, 3), "dropout": 0.3, "seed": 4},
}  # fmt: skip


@algorithms
@pytest.mark.parametrize(("rule", "shape", "dtype"), [
    (rule, shape, dtype) for j, rule in enumerate(RULES) for i, shape in enumerate(SHAPES)
    for dtype in (np.float32, np.float64)[: 1 + (i + j) % 2]      # float64: half of the pairs
])  # fmt: skip
def test_it_has_the_masks_shape(dtype, algorithm, shape, rule, rng):
    arrays = draw(rng, 2, 4, 2, 33, 200, 5, 4, dtype)
    keywords = {name: x.astype(dtype) if name in ("sinks", "alibi") else x for name, x in RULES[rule].items()}
    check(*arrays, mask=mask_of(rng, shape, dtype), need_bias_grad=True, algorithm=algorithm, **keywords)


@all_dtypes
@algorithms
@pytest.mark.parametrize(("Lq", "Lk"), [(1, 1), (1, 193), (64, 64), (65, 191), (2, 385)])
def test_lengths_around_the_edges_of_blocks_and_tiles(isa, dtype, algorithm, Lq, Lk, rng):
    layout = LAYOUTS[Lk % 2]
    arrays = draw(rng, 2, 4, 2, Lq, Lk, 5, 4, dtype, layout)
    for shape in ("Lq Lk", "B H Lq Lk", "B 1 1 Lk", "1 1 Lq 1"):
        mask = mask_of(rng, shape, dtype, 0.3 * (Lk > 1), Lq=Lq, Lk=Lk)
        check(*arrays, mask=mask, need_bias_grad=True, algorithm=algorithm, layout=layout)


@with_decode
@backwards
@support.ill_scaled
def test_scores_of_every_size_in_every_pair_of_algorithms(algorithm, second, kind, rng):
    arrays = support.draw_ill_scaled(kind, rng, 2, 4, 2, 31, 210)
    for shape in ("B H Lq Lk", "1 H 1 1"):
        mask = mask_of(rng, shape, np.float32, Lq=31, Lk=210)
        found = crossed(algorithm, second, *arrays, mask=mask, need_bias_grad=True)
        expected = (oracle if algorithm == second else crossed_oracle)(*arrays, np.float32, mask=mask, need_bias_grad=True)
        assert_close(found, *expected)


@algorithms
@shapes
@pytest.mark.parametrize(
    "more", [{}, {"softcap": 1.5, "dropout": 0.4, "seed": 6, "sinks": of(1, 0, -np.inf, 2)}], ids=["", "more"]
)
def test_it_is_the_central_difference(algorithm, shape, more, rng):
    q, k, v, g = arrays = draw(rng, 2, 4, 2, 3, 5, 4, 3)
    mask = mask_of(rng, shape, Lq=3, Lk=5)
    left = mask != -np.inf
    found = grad_mask(arrays, mask, algorithm, is_causal=True, offset=2, **more)
    free = mask[left]

    def loss():
        mask[left] = free
        return (fastmha.attention(q, k, v, mask=mask, is_causal=True, offset=2, algorithm=algorithm, **more) * g).sum()

    assert_gradient(found[left], loss, free, shape)


# ------------------------------------------------------------------------------------------------- what it is like


@all_dtypes
@algorithms
@shapes
def test_it_is_0_where_the_mask_or_a_rule_removes(isa, dtype, algorithm, shape, rng):
    arrays = draw(rng, 2, 4, 2, 33, 200, 5, 4, dtype)
    rules = {"is_causal": True, "offset": 150, "key_ranges": ([3, 9], [199, 180])}
    mask = mask_of(rng, shape, dtype, 0.5)
    gone = np.broadcast_to(reference.removed(33, 200, mask, **rules), (2, 4, 33, 200))
    four = (1,) * (4 - mask.ndim) + mask.shape
    everywhere = gone.all(axis=tuple(a for a, n in enumerate(four) if n == 1), keepdims=True).reshape(mask.shape)
    found = grad_mask(arrays, mask, algorithm, **rules)
    assert not bits(found)[everywhere].any()
    assert (found[~everywhere] != 0).mean() > 0.9 or found.size < 9
    nothing = np.full_like(mask, -np.inf)
    for x in run(fastmha, *arrays, mask=nothing, need_bias_grad=True, algorithm=algorithm)[2:]:
        assert not bits(x).any()


@dtypes
@algorithms
@shapes
def test_it_is_the_sum_of_that_of_a_mask_for_each_pair_in_double_precision(dtype, algorithm, shape, rng):
    """To the last rounding: that of each pair is rounded before it is added."""
    arrays = draw(rng, 2, 4, 2, 70, 200, 5, 4, dtype)
    arrays[3] += 1
    mask = mask_of(rng, shape, dtype, Lq=70)
    mask[..., [0, -1]] = 0      # of keys alone it would be a range, with other products by BLAS
    whole = grad_mask(arrays, np.broadcast_to(mask, (2, 4, 70, 200)).copy(), algorithm).astype(np.float64)
    over = tuple(a for a, n in enumerate((1,) * (4 - mask.ndim) + mask.shape) if n == 1)
    wanted = whole.sum(axis=over).reshape(mask.shape)
    sizes = np.abs(whole).sum(axis=over).reshape(mask.shape)
    error = np.abs(grad_mask(arrays, mask, algorithm) - wanted)
    assert (error <= np.finfo(dtype).eps * np.abs(wanted) + 1e-14 * sizes).all()


@all_dtypes
@algorithms
def test_a_row_adds_up_to_0_or_to_what_its_sink_gets(dtype, algorithm, rng):
    """The softmax does not change with a constant along a row; with a sink, that is a key as well."""
    arrays = draw(rng, 2, 4, 2, 33, 200, 5, 4, dtype)
    mask = mask_of(rng, "B H Lq Lk", dtype)
    bound = oracle(*arrays, dtype, mask=mask, need_bias_grad=True)[1][5].sum(axis=3)
    assert (np.abs(grad_mask(arrays, mask, algorithm).astype(np.float64).sum(axis=3)) <= bound).all()
    sinks = of(0.5, 1, 2, 3, dtype=dtype)
    *_, of_sinks, of_mask = run(fastmha, *arrays, mask=mask, sinks=sinks, need_bias_grad=True, algorithm=algorithm)
    bounds = oracle(*arrays, dtype, mask=mask, sinks=sinks, need_bias_grad=True)[1][5:]
    error = np.abs(of_mask.astype(np.float64).sum(axis=(0, 2, 3)) + of_sinks)
    assert (error <= bounds[0] + bounds[1].sum(axis=(0, 2, 3))).all()


@all_dtypes
@algorithms
def test_asking_for_it_changes_no_other_bit(isa, dtype, algorithm, rng):
    arrays = draw(rng, 2, 4, 2, 70, 200, 5, 4, dtype)
    for more in ({}, {"sinks": of(0, 1, 2, -np.inf, dtype=dtype)}):
        mask = mask_of(rng, "1 H Lq Lk", dtype, Lq=70)
        plain = run(fastmha, *arrays, mask=mask, algorithm=algorithm, **more)
        assert_same(plain, run(fastmha, *arrays, mask=mask, need_bias_grad=True, algorithm=algorithm, **more)[:-1])
        assert_same(plain, run(fastmha, *arrays, mask=mask, need_bias_grad=np.True_, algorithm=algorithm, **more)[:-1])


@all_dtypes
@algorithms
@shapes
def test_threads_change_no_bit(isa, dtype, algorithm, shape, rng):
    arrays = draw(rng, 2, 4, 2, 129, 200, 5, 4, dtype)
    mask = mask_of(rng, shape, dtype, Lq=129)
    one = grad_mask(arrays, mask, algorithm, threads=1)
    for threads in (2, 5):
        assert same_bits(one, grad_mask(arrays, mask, algorithm, threads=threads))


# ------------------------------------------------------------------------------------------------------- the firewall


@all_dtypes
@algorithms
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_changes_no_bit_where_removed_and_arrives_where_attended(isa, dtype, algorithm, poison, rng):
    B, H, Hkv, Lq, Lk = 2, 4, 2, 33, 200
    clean = draw(rng, B, H, Hkv, Lq, Lk, 5, 4, dtype)
    mask = mask_of(rng, "B H Lq Lk", dtype)
    mask[1, :, 7] = -np.inf        # empty rows
    gone = mask == -np.inf
    first = run(fastmha, *clean, mask=mask, need_bias_grad=True, algorithm=algorithm)
    places = (0, (0, 1, 5)), (3, (0, 1, 5)), (1, (0, 0, 66)), (2, (0, 0, 66)), (2, (1, 1, 195)), (0, (1, 2, 7)), (3, (1, 2, 7))
    for which, (b, h, i) in places:
        arrays = [x.copy() for x in clean]
        arrays[which][b, h, i] = poison
        found = grad_mask(arrays, mask, algorithm)
        meets = np.zeros((B, H, Lq), bool)
        if which in (0, 3):
            meets[b, h, i] = not gone[b, h, i].all()
        else:
            meets[b, 2 * h : 2 * h + 2] = ~gone[b, 2 * h : 2 * h + 2, :, i]
        assert same_bits(found[~meets], first[-1][~meets])
        assert not bits(found)[gone].any()
        reached = ~np.isfinite(found)
        if np.isnan(poison):
            assert np.array_equal(reached, meets[..., None] & ~gone)
        if which in (2, 3):     # inf in q and k may be a score of -inf, of probability 0
            assert np.array_equal(reached.any(axis=3), meets)
        some = grad_mask(arrays, mask[:, :, :, :1], algorithm, key_ranges=(67, None))   # nobody attends key 66
        if which in (1, 2) and i == 66:
            assert same_bits(some, grad_mask(clean, mask[:, :, :, :1], algorithm, key_ranges=(67, None)))


# ------------------------------------------------------------------------------------------------------------- strides


@all_dtypes
@algorithms
def test_every_way_in_which_the_mask_may_lie_gives_the_same_bits(isa, dtype, algorithm, rng):
    arrays = draw(rng, 2, 4, 2, 9, 70, 5, 4, dtype)
    for shape in ("B H Lq Lk", "Lq Lk", "B 1 1 Lk"):
        mask = mask_of(rng, shape, dtype, Lq=9, Lk=70)
        first = run(fastmha, *arrays, mask=mask, need_bias_grad=True, algorithm=algorithm)
        locked = mask.copy()
        locked.flags.writeable = False
        for name, x in [*support.rearranged(mask), ("read-only", locked)]:
            found = run(fastmha, *arrays, mask=x, need_bias_grad=True, algorithm=algorithm)
            assert_same(first, found, (name, shape))
            assert found[-1].flags.c_contiguous


@all_dtypes
@algorithms
def test_the_others_may_lie_in_every_way(dtype, algorithm, rng):
    """The same bits; BLAS may round otherwise at another address, within the bounds."""
    arrays = [np.ascontiguousarray(x) for x in draw(rng, 2, 4, 2, 9, 70, 5, 4, dtype)]
    keywords = {"sinks": of(0, 1, 2, -np.inf, dtype=dtype), "alibi": of(1, 0.5, 0, 0.1, dtype=dtype), "offset": 61,
                "dropout": 0.2, "seed": 1}  # fmt: skip
    mask = mask_of(rng, "1 H Lq Lk", dtype, Lq=9, Lk=70)
    first = run(fastmha, *arrays, mask=mask, need_bias_grad=True, algorithm=algorithm, **keywords)
    for which in range(4):
        for name, x in support.rearranged(arrays[which]):
            moved = [*arrays[:which], x, *arrays[which + 1 :]]
            if algorithm == "blas":
                check(*moved, mask=mask, need_bias_grad=True, algorithm=algorithm, **keywords)
                continue
            found = run(fastmha, *moved, mask=mask, need_bias_grad=True, algorithm=algorithm, **keywords)
            assert_same(first, found, (name, which))


@all_dtypes
@algorithms
@shapes
def test_a_broadcast_view_gets_a_gradient_of_its_full_shape(dtype, algorithm, shape, rng):
    arrays = draw(rng, 2, 4, 2, 9, 70, 5, 4, dtype)
    mask = mask_of(rng, shape, dtype, Lq=9, Lk=70)
    view = np.broadcast_to(mask, (2, 4, 9, 70))
    found = grad_mask(arrays, view, algorithm)
    assert found.shape == view.shape
    assert same_bits(found, grad_mask(arrays, view.copy(), algorithm))


# ------------------------------------------------------------------------------------------------------------ the edges


def test_no_rows_no_keys_no_heads_and_no_widths(rng):
    for sizes in ({"B": 0}, {"Lk": 0}, {"Lq": 0}, {"H": 0, "Hkv": 0}, {"D": 0}, {"Dv": 0}):
        n = {"B": 2, "H": 2, "Hkv": 1, "Lq": 3, "Lk": 5, "D": 4, "Dv": 3} | sizes
        for layout in LAYOUTS:
            arrays = draw(rng, **n, layout=layout)
            for shape in SHAPES:
                mask = mask_of(rng, shape, gone=0, **{name: n[name] for name in ("B", "H", "Lq", "Lk")})
                for algorithm in NAMED:
                    found = check(*arrays, mask=mask, need_bias_grad=True, layout=layout, algorithm=algorithm)
                    assert found[-1].shape == mask.shape
                    assert not found[-1].any() or "D" in sizes


def test_rows_without_keys(rng):
    arrays = draw(rng, 2, 4, 2, 9, 70, 5, 4)
    for shape in SHAPES:
        mask = mask_of(rng, shape, Lq=9, Lk=70)
        for rules in ({"key_ranges": (70, None)}, {"is_causal": True, "offset": -9}, {"key_padding_lengths": [0, 0]}):
            for algorithm in NAMED:
                assert not bits(grad_mask(arrays, mask, algorithm, **rules)).any()
