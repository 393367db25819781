"""Heads that are plain arrays are read in one step of the core: the same problems as by the checks one after the other, and none
of what these refuse or copy."""

import numpy as np
import pytest
import support
from support import all_dtypes, layouts

import fastmha
from fastmha import _core, validate

ATTRIBUTES = (
    "shape", "types", "dtype", "itemsize", "element_size", "stored_size", "is_double", "element", "stored", "parts",
    "scale", "softcap", "window", "layout", "bytes_copied", "precision", "bool_mask", "additive_mask", "offset", "key_starts",
    "key_lengths", "sinks", "alibi", "draws",
)  # fmt: skip


def draw(dtype, layout="BHLD", B=2, H=4, Hkv=2, Lq=5, Lk=5, D=8, Dv=6):
    rng = np.random.default_rng(0)
    shapes = (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv)
    shapes = shapes if layout == "BHLD" else [(b, n, h, w) for b, h, n, w in shapes]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def at_once(arrays, layout="BHLD"):
    """The problem, or None where the checks one after the other are left with it."""
    return _core.Problem.of_heads(*arrays, layout == "BLHD") or validate._heads_of_bfloat16(*arrays, layout)


def assert_same_problem(one, other):
    for name in ATTRIBUTES:
        np.testing.assert_equal(getattr(one, name), getattr(other, name), err_msg=name)
    for x, y in zip((one.q, one.k, one.v), (other.q, other.k, other.v), strict=True):
        assert x.dtype == y.dtype
        assert (x.shape, x.strides) == (y.shape, y.strides)
        assert x.ctypes.data == y.ctypes.data


@all_dtypes
@layouts
def test_plain_heads_make_the_problem_that_the_checks_make(dtype, layout):
    for sizes in ({}, {"Lq": 1, "Lk": 1}, {"Lq": 1, "D": 1, "Dv": 1}, {"B": 1, "H": 1, "Hkv": 1, "Lk": 9}, {"Hkv": 4}):
        arrays = draw(dtype, layout, **sizes)
        views = [x[::-1] for x in arrays], [x[:, ::-1] for x in arrays], [np.broadcast_to(x[:1], x.shape) for x in arrays]
        for each in (arrays, *views):
            made = at_once(each, layout)
            assert_same_problem(made, validate._other_heads(*each, layout))


@all_dtypes
@layouts
def test_causality_from_the_start_needs_no_look_at_the_rules(dtype, layout):
    arrays = draw(dtype, layout)
    known = validate.attention_problem(*arrays, layout, validate.CAUSAL)
    looked_at = validate.attention_problem(*arrays, layout, validate.Rules(is_causal=np.bool_(True), offset=np.array([0, 0])))
    assert_same_problem(known, looked_at)
    assert known.window == (None, 0)
    with pytest.raises(ValueError, match="offset must be given with is_causal"):
        validate.attention_problem(*draw(dtype, Lk=6), "BHLD", validate.CAUSAL)


def test_offsets_of_0_that_are_kept_cannot_be_written_to():
    for B in (2, 1000):
        offset = validate.attention_problem(*draw(np.float32, B=B), "BHLD", validate.CAUSAL).offset
        assert offset.shape == (B,)
        assert not offset.flags.writeable
        assert not offset.any()


class Sub(np.ndarray):
    pass


def unaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:]
    y = memory.view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


NOT_PLAIN = {
    "a list": lambda x: x.tolist(),
    "a subclass": lambda x: x.view(Sub),
    "integers": lambda x: x.astype(int),
    "the other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "another dtype": lambda x: x.astype(np.float16 if x.dtype != np.float16 else np.float32),
    "bits": lambda x: x.astype(np.float16).view(np.uint16),
    "three axes": lambda x: x[0],
    "every second item": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "items backwards": lambda x: x[..., ::-1],
    "one item": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "not aligned": unaligned,
    "another batch": lambda x: x.repeat(2, 0),
    "three heads": lambda x: x[:, :1].repeat(3, 1),
    "another length": lambda x: x[:, :, 1:],
    "another width": lambda x: x[..., 1:],
    "empty": lambda x: x[:0],
    "None": lambda x: None,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_whatever_is_not_plain_is_left_to_the_checks(kind, dtype):
    for place in range(3):
        arrays = draw(dtype)
        arrays[place] = NOT_PLAIN[kind](arrays[place])
        if (kind, place) in (("another length", 0), ("another width", 2)):
            continue  # which is allowed
        assert at_once(arrays) is None


def test_bits_of_half_precision_are_no_half_precision():
    for half in support.HALVES:
        arrays = draw(half)
        assert at_once(arrays) is not None
        for dtype in (np.uint16, np.int16, "V2"):
            assert at_once([x.view(dtype) for x in arrays]) is None
        with pytest.raises(TypeError, match="q must be float32, float64, float16 or bfloat16"):
            fastmha.attention(*[x.view(np.uint16) for x in arrays])
