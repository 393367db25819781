"""Keys and values stored in another element type: "tiled" and "decode" convert them as they load.

A result has the bits of the same algorithm over the converted arrays: loading is all that differs. bfloat16 goes to the
kernels as uint16; its values are the upper halves of float32. Tiles have 192 keys, chunks 512, decode steps 64.
"""

import itertools

import numpy as np
import pytest
from support import Guard, assert_same, dtypes, guards, padded, same_bits

import fastmha
from fastmha import algorithms, validate
from fastmha.cached import as_taken

STORAGES = ("float16", "bfloat16", "other")
NAN_BITS = 0x7FFF       # of either half precision
storages = pytest.mark.parametrize("storage", STORAGES)
names = pytest.mark.parametrize("name", ["tiled", "weights", "decode"])


def stored(x, storage):
    """x as the kernels take it in the storage type."""
    if storage == "bfloat16":
        return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(all="ignore"):
        return x.astype(np.float16 if storage == "float16" else np.float64 if x.dtype == np.float32 else np.float32)


def converted(x, dtype):
    """What stored values are in the type of the computation, by NumPy."""
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def apart(x, layout="BHLD"):
    """A view of x (B, H, L, width) in the layout's order, rows and heads apart in memory that holds NaN elsewhere."""
    x = x if layout == "BHLD" else x.swapaxes(1, 2)
    inside = padded(x, NAN_BITS if x.dtype == np.uint16 else np.nan)
    return inside if layout == "BHLD" else inside.swapaxes(1, 2)


def draw(rng, dtype, storage, B=2, H=2, Hkv=1, Lq=3, Lk=65, D=16, Dv=16, layout="BHLD"):
    """q, and k, v as they are stored."""
    q = rng.standard_normal((B, H, Lq, D)).astype(dtype)
    k, v = (stored(rng.standard_normal((B, Hkv, Lk, width)).astype(dtype), storage) for width in (D, Dv))
    return [apart(x, layout) for x in (q, k, v)]


def make_problem(q, k, v, **keywords):
    return validate.attention_problem(q, k, v, "BHLD", validate.Rules(**keywords))


def attend(name, problem, threads=1):
    """out, lse and for "weights" the weights of "tiled"."""
    B, H, _, Lq, Lk, _, Dv = problem.shape
    out, lse = np.full((B, H, Lq, Dv), np.nan, problem.dtype), np.full((B, H, Lq), np.nan, problem.dtype)
    weights = np.full((B, H, Lq, Lk), np.nan, problem.dtype) if name == "weights" else None
    algorithms.forward("decode" if name == "decode" else "tiled", problem, out, lse, weights, threads)
    return [out, lse] if weights is None else [out, lse, weights]


def check(name, q, k, v, threads=(1,), message="", **keywords):
    """The bits over stored arrays are those over converted ones, and the stored arrays stay as they are."""
    plain = make_problem(q, converted(k, q.dtype), converted(v, q.dtype), **keywords)
    before = [x.tobytes() for x in (k, v)]
    expected = attend(name, plain)
    for count in threads:
        assert_same(attend(name, plain.with_heads(plain.q, k, v), count), expected, message)
    assert [x.tobytes() for x in (k, v)] == before
    return expected


# ---------------------------------------------------------------------------------------- the bits of converted arrays


@dtypes
@storages
@names
def test_every_length_has_the_bits_of_converted_arrays(isa, dtype, storage, name, rng):
    for n, Lk in enumerate((1, 7, 63, 64, 65, 191, 193, 255, 257, 512, 513, 700)):
        Lq = (1, 3, 5)[n % 3]
        check(name, *draw(rng, dtype, storage, Lq=Lq, Lk=Lk, D=9, Dv=8), message=Lk)


@dtypes
@storages
@names
def test_every_width_has_the_bits_of_converted_arrays(isa, dtype, storage, name, rng):
    for D, Dv in itertools.product((1, 5, 16, 33, 64, 70, 128), repeat=2):
        check(name, *draw(rng, dtype, storage, 1, 2, 1, 2, 66, D, Dv), message=(D, Dv))


@dtypes
@storages
@pytest.mark.parametrize("name", ["tiled", "weights"])
@pytest.mark.parametrize(("H", "Hkv", "Lq", "Lk"), [(1, 1, 70, 200), (3, 1, 43, 193), (4, 2, 65, 130)])
def test_many_rows_have_the_bits_of_converted_arrays(isa, dtype, storage, name, H, Hkv, Lq, Lk, rng):
    for D, Dv in ((5, 33), (64, 16)):
        check(name, *draw(rng, dtype, storage, 1, H, Hkv, Lq, Lk, D, Dv), message=(D, Dv))


def rules(dtype, rng):
    gone = rng.random((2, 6, 3, 530)) < 0.4
    gone[..., 70:300] = True
    gone[1, 2, 1] = True
    return {
        "causal": {"is_causal": True, "offset": 527},
        "causal, an offset per batch row": {"is_causal": True, "offset": np.array([0, 400])},
        "window": {"window": (70, 3), "offset": np.array([3, 520])},
        "lengths": {"key_padding_lengths": np.array([193, 0])},
        "ranges": {"key_ranges": (np.array([257, 1]), np.array([530, 400]))},
        "bool": {"mask": gone},
        "bool of keys": {"mask": gone[:, :1, :1]},
        "additive": {"mask": np.where(gone, -np.inf, rng.standard_normal(gone.shape)).astype(dtype)},
        "softcap": {"softcap": 2.0},
        "all": {
            "mask": gone, "is_causal": True, "offset": 500, "window": (400, 2), "softcap": 3.0, "scale": 0.7,
            "key_padding_lengths": np.array([530, 301]),
        },
    }  # fmt: skip


@dtypes
@storages
@names
def test_every_rule_has_the_bits_of_converted_arrays(isa, dtype, storage, name, rng):
    q, k, v = draw(rng, dtype, storage, 2, 6, 2, 3, 530, 16, 5, "BLHD")
    for rule, keywords in rules(dtype, rng).items():
        check(name, q, k, v, (1, 3), rule, **keywords)


@dtypes
@storages
@names
def test_any_strides_have_the_bits_of_converted_arrays(isa, dtype, storage, name, rng):
    q, k, v = draw(rng, dtype, storage, 2, 4, 2, 3, 210, 16, 9)
    for kind, change in {
        "rows backwards": lambda x: x[:, ::-1, ::-1],
        "every third row": lambda x: x[:, :, ::3],
        "broadcast heads": lambda x: np.broadcast_to(x[:, :1], x.shape),
        "broadcast rows": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
        "overlapping": lambda x: np.lib.stride_tricks.as_strided(
            np.ascontiguousarray(x), x.shape, [x.itemsize * s for s in (2, 1, 3, 1)]
        ),
    }.items():
        check(name, q, change(k), change(v), message=kind)


# ------------------------------------------------------------------------------------------------------- every value

halves = pytest.mark.parametrize("storage", ["float16", "bfloat16"])


def all_values(storage):
    """Every bit pattern of a half precision."""
    patterns = np.arange(2**16).astype(np.uint16)
    return patterns.view(np.float16) if storage == "float16" else patterns


@dtypes
@halves
@names
@pytest.mark.parametrize("width", [64, 1])
def test_the_only_key_gives_every_value_as_it_is(isa, dtype, storage, name, width):
    values = all_values(storage).reshape(-1, 64, 1, width)
    if width == 1:
        values = values[::3]    # every pattern has been seen in whole vectors
    q, k = np.zeros((len(values), 64, 1, 1), dtype), stored(np.zeros((len(values), 64, 1, 1), dtype), storage)
    wanted = converted(values, dtype)
    out, lse, *weights = check(name, q, k, values)
    assert np.array_equal(out, wanted, equal_nan=True)
    assert not lse.any()
    for x in weights:
        assert (x == 1).all()


@dtypes
@halves
@names
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "all"])
def test_a_row_with_one_key_among_many_gives_every_value_as_it_is(isa, dtype, storage, name, finite):
    values = all_values(storage).reshape(1, 16, 64, 64)
    wanted = converted(values, dtype)
    if finite:
        values = np.where(np.isfinite(wanted), values, values[0, 0, 0, 0])
        wanted = converted(values, dtype)
    q, k = np.zeros((1, 16, 64, 8), dtype), stored(np.zeros((1, 16, 64, 8), dtype), storage)
    out, lse, *_ = check(name, q, k, values, mask=~np.eye(64, dtype=bool))
    assert np.array_equal(out, wanted, equal_nan=True)
    assert not lse.any()


@dtypes
@halves
@names
@pytest.mark.parametrize(("D", "at"), [(1, 0), (17, 5), (17, 16)])
def test_a_score_is_every_finite_key_as_it_is(isa, dtype, storage, name, D, at):
    patterns = all_values(storage)
    wanted = converted(patterns, dtype)
    patterns = patterns[np.isfinite(wanted)].reshape(-1, 16)
    wanted = converted(patterns, dtype)
    k = np.zeros((*patterns.shape, 1, D), patterns.dtype)
    k[:, :, 0, at] = patterns
    q = np.full((*patterns.shape, 1, D), 1, dtype)
    out, lse, *_ = check(name, q, k, stored(np.ones((*patterns.shape, 1, 1), dtype), storage), scale=1.0)
    assert np.array_equal(lse[..., 0], np.where(np.abs(wanted) < np.finfo(dtype).smallest_normal, 0, wanted))
    assert (out == 1).all()


@dtypes
@halves
@names
@pytest.mark.parametrize("D", [1, 17, 64])
def test_keys_that_are_not_finite_reach_their_rows_as_converted_ones_do(isa, dtype, storage, name, D, rng):
    values = all_values(storage)
    special = values[~np.isfinite(converted(values, dtype))]
    q, k, v = draw(rng, dtype, storage, len(special) // 64, 2, 1, 2, 64, D, 3)
    k[:, 0, :, D // 2] = special[: len(k) * 64].reshape(len(k), 64)
    expected = check(name, q, k, v)
    assert np.isnan(expected[1]).any()
    for j in (0, 17, 63):                               # alone: Inf and -Inf apart, too
        check(name, q, k[:, :, j : j + 1], v[:, :, j : j + 1])


@names
def test_float64_rounds_to_the_nearest_float32_and_beyond_its_range_to_infinity(isa, name, rng):
    values = rng.standard_normal((4, 1, 1, 70)) * 10.0 ** rng.integers(-50, 50, (4, 1, 1, 70))
    values[..., :4] = 3.4028235e38, 3.4028236e38, 1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50
    q = np.zeros((4, 1, 1, 3), np.float32)
    out, wanted = check(name, q, np.zeros((4, 1, 1, 3)), values)[0], converted(values, np.float32)
    assert np.array_equal(out, np.where(np.abs(wanted) < np.finfo(np.float32).smallest_normal, 0, wanted))
    assert np.isinf(out).any()


# ---------------------------------------------------------------------------------------------------- firewall, rule 7


POISONS = {"NaN": np.nan, "Inf": np.inf, "-Inf": -np.inf}


def poison_of(kind, x):
    """The value as an element of a stored array."""
    value = np.float32([POISONS[kind]])
    return stored(value, "bfloat16")[0] if x.dtype == np.uint16 else value.astype(x.dtype)[0]


@dtypes
@storages
@names
def test_removed_keys_and_values_change_no_bit(isa, dtype, storage, name, rng):
    q, k, v = draw(rng, dtype, storage, 2, 6, 2, 3, 530, 6, 20)
    for rule, keywords in rules(dtype, rng).items():
        pairs = {x: y for x, y in keywords.items() if x not in ("softcap", "scale")}
        gone = np.broadcast_to(fastmha.reference.removed(3, 530, **pairs), (2, 6, 3, 530))
        plain = make_problem(q, converted(k, dtype), converted(v, dtype), **keywords)
        clean = attend(name, plain.with_heads(plain.q, k, v))
        nobody = gone.reshape(2, 2, -1, 530).all(axis=2)
        for kind in POISONS:
            k_dirty, v_dirty = k.copy(), v.copy()
            k_dirty[nobody], v_dirty[nobody] = poison_of(kind, k), poison_of(kind, v)
            assert_same(attend(name, plain.with_heads(plain.q, k_dirty, v_dirty)), clean, (rule, kind))
        for j, kind in zip((0, 64, 520), POISONS):      # some rows attend it
            k_dirty, v_dirty = k.copy(), v.copy()
            k_dirty[:, :, j], v_dirty[:, :, j] = poison_of(kind, k), poison_of(kind, v)
            for x, y in zip(attend(name, plain.with_heads(plain.q, k_dirty, v_dirty)), clean, strict=True):
                assert same_bits(x[gone[..., j]], y[gone[..., j]]), (rule, j)


@dtypes
@storages
@names
def test_an_attended_nan_reaches_exactly_its_rows(isa, dtype, storage, name, rng):
    q, k, v = draw(rng, dtype, storage, 2, 6, 2, 3, 530, 6, 5)
    gone = rng.random((2, 6, 3, 530)) < 0.5
    plain = make_problem(q, converted(k, dtype), converted(v, dtype), mask=gone)
    for j, operand in itertools.product((0, 63, 64, 191, 192, 511, 512, 529), "kv"):
        k_dirty, v_dirty = k.copy(), v.copy()
        dirty = k_dirty if operand == "k" else v_dirty
        dirty[1, 0, j] = poison_of("NaN", dirty)
        rows = np.zeros((2, 6, 3), bool)
        rows[1, :3] = ~gone[1, :3, :, j]
        out, lse, *_ = attend(name, plain.with_heads(plain.q, k_dirty, v_dirty))
        assert np.array_equal(np.isnan(out).all(axis=-1), rows), (j, operand)
        assert np.array_equal(np.isnan(out).any(axis=-1), rows), (j, operand)
        assert np.array_equal(np.isnan(lse), rows & (operand == "k")), (j, operand)


# -------------------------------------------------------------------------------------------------------- guard pages


@dtypes
@storages
@names
@guards
def test_no_load_leaves_the_stored_arrays(isa, dtype, storage, name, kind, rng):
    widths = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 70, 127)
    for n, Lk in enumerate((1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 63, 65, 129, 191, 193, 511, 513)):
        Lq = 1 + n % 3
        q, k, v = draw(rng, dtype, storage, 1, 2, 1 + n % 2, Lq, Lk, widths[n % 16], widths[5 * n % 16])
        keywords = ({}, {"is_causal": True, "offset": Lk - Lq}, {"mask": rng.random((Lq, Lk)) < 0.4})[n % 3]
        if n % 2:
            v = v.copy()
            v[0, 0, Lk - 1, -1] = poison_of("NaN", v)
        plain = make_problem(q, converted(k, dtype), converted(v, dtype), **keywords)
        expected = attend(name, plain)
        guard = Guard(kind)
        assert_same(attend(name, plain.with_heads(guard(q), guard(k), guard(v))), expected, Lk)


@storages
@names
@pytest.mark.parametrize("kind", ["end", "start"])
def test_no_load_leaves_stored_rows_of_any_width(isa, storage, name, kind, rng):
    for width in range(1, 71):
        q, k, v = draw(rng, np.float32, storage, 1, 1, 1, 1, 1 + width % 5, width, 71 - width)
        plain = make_problem(q, converted(k, np.float32), converted(v, np.float32))
        guard = Guard(kind)
        assert_same(attend(name, plain.with_heads(plain.q, guard(k), guard(v))), attend(name, plain), width)


# --------------------------------------------------------------------------------------------------------- KVCache


def cache_type(name):
    return pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else np.dtype(name).type


cache_types = pytest.mark.parametrize("stored_as", ["float16", "bfloat16", "float32", "float64"])


@dtypes
@cache_types
def test_arrays_go_to_algorithms_in_types_they_take(dtype, stored_as, rng):
    k, v = (rng.standard_normal((1, 2, 3, 4)).astype(cache_type(stored_as)) for _ in range(2))
    for x, y in zip(as_taken(k, v, np.dtype(dtype), "blas"), (k, v), strict=True):
        assert same_bits(x, y.astype(dtype))
    for name in ("tiled", "decode"):
        for x, y in zip(as_taken(k, v, np.dtype(dtype), name), (k, v), strict=True):
            assert x.dtype == (np.uint16 if stored_as == "bfloat16" else y.dtype)
            assert np.shares_memory(x, y)


@dtypes
@cache_types
@pytest.mark.parametrize("ring", [False, True], ids=["linear", "ring"])
def test_a_cache_gives_the_attention_over_its_converted_keys_and_values(isa, dtype, stored_as, ring, rng):
    cache = fastmha.KVCache(
        2, 2, 16, v_head_dim=5, dtype=cache_type(stored_as), **({"window": 40, "max_chunk": 3} if ring else {})
    )
    for _ in range(30):
        cache.append(rng.standard_normal((2, 2, 3, 16)).astype(dtype), rng.standard_normal((2, 2, 3, 5)).astype(dtype))
    q = rng.standard_normal((2, 4, 3, 16)).astype(dtype)
    k, v = cache.k.astype(dtype), cache.v.astype(dtype)
    keywords = {"is_causal": True, **({"window": (40, None)} if ring else {})}
    for algorithm in ("tiled", "decode", "blas", "auto"):
        got = cache.attend(q, algorithm=algorithm, return_lse=True, **keywords)
        wanted = fastmha.attention(q, k, v, algorithm=algorithm, offset=k.shape[2] - 3, return_lse=True, **keywords)
        for x, y in zip(got, wanted, strict=True):
            if ring or algorithm == "blas":     # a ring is read in two parts; BLAS may round otherwise at another address
                np.testing.assert_allclose(x, y, rtol=0, atol=200 * np.finfo(dtype).eps, err_msg=algorithm)
            else:
                assert same_bits(x, y), algorithm
    out, weights = cache.attend(q, need_weights=True, algorithm="tiled", **keywords)
    assert np.abs(weights.sum(axis=-1) - 1).max() <= 200 * np.finfo(dtype).eps
    assert np.abs(np.einsum("bhij,bhjd->bhid", weights, np.repeat(v, 2, axis=1)) - out).max() <= 200 * np.finfo(dtype).eps


@pytest.mark.parametrize("name", ["int16", "int32", "uint32", "int64", "longdouble", "complex64"])
@dtypes
def test_an_element_type_that_is_none_of_these_is_refused(dtype, name, rng):
    q, k, v = (x.astype(dtype) for x in draw(rng, dtype, "float16"))
    problem = make_problem(q, k, v)
    with pytest.raises(TypeError, match=rf"operands must be float32, .* or bfloat16 \(as uint16\), got {np.dtype(name)}"):
        problem.with_heads(q, k.astype(name), v.astype(name))
