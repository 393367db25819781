"""What the tests of the functions share: instruction sets, inputs in odd memory, a float64 oracle with error bounds."""

import importlib.util
import inspect
from contextlib import contextmanager

import numpy as np
import pytest

from fastmha import _core, reference
from fastmha.plan import ALGORITHMS

ISAS = _core.runnable_isas()
NAMED = [name for name in ALGORITHMS if name not in ("auto", "decode")]     # forward and backward, every call
DTYPES = (np.float32, np.float64)
LAYOUTS = ("BHLD", "BLHD")

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
algorithms = pytest.mark.parametrize("algorithm", NAMED)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@contextmanager
def selected(isa):
    """The kernels of one instruction set, and those of before afterwards."""
    before = _core.selected_isa()[0]
    _core.select_isa(isa)
    try:
        assert _core.selected_isa()[0] == isa
        yield isa
    finally:
        _core.select_isa(before)


@pytest.fixture(params=ISAS)
def isa(request):
    with selected(request.param):
        yield request.param


def padded(x):
    """x as the inside of a larger array that is NaN elsewhere: odd strides, and reading outside shows."""
    around = np.full([n + 3 for n in x.shape], np.nan, x.dtype)
    inside = around[tuple(slice(1, n + 1) for n in x.shape)]
    inside[...] = x
    return inside


def draw(rng, B=2, H=2, Hkv=None, Lq=5, Lk=None, D=4, Dv=None, dtype=np.float64, layout="BHLD"):
    """q, k, v and a gradient of the output, in padded memory."""
    Hkv, Lk, Dv = H if Hkv is None else Hkv, Lq if Lk is None else Lk, D if Dv is None else Dv
    arrays = [
        rng.standard_normal(shape) for shape in ((B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), (B, H, Lq, Dv))
    ]
    return [padded((x if layout == "BHLD" else x.swapaxes(1, 2)).astype(dtype)) for x in arrays]


def bits(x):
    """The bits of x, to compare NaN with NaN and to tell 0 from -0."""
    return np.ascontiguousarray(x).view(np.uint32 if x.dtype == np.float32 else np.uint64)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))


def run(functions, q, k, v, g, *, threads=None, **keywords):
    """out, lse, grad_q, grad_k, grad_v by `fastmha` or by `fastmha.reference`."""
    out, lse = functions.attention(q, k, v, return_lse=True, num_threads=threads, **keywords)
    return out, lse, *functions.attention_backward(g, q, k, v, out, lse, num_threads=threads, **keywords)


def in_float64(arrays, keywords):
    """The same arguments for the oracle."""
    mask = keywords.get("mask")
    if mask is not None and mask.dtype != bool:
        keywords = {**keywords, "mask": mask.astype(np.float64)}
    return [x.astype(np.float64) for x in arrays], keywords


def error_bounds(q, k, v, g, dtype, *, layout="BHLD", mask=None, scale=None, softcap=None, algorithm=None, **pairs):
    """Largest absolute errors that rounding may make in out, lse, grad_q, grad_k, grad_v (float64 arguments).

    A score s is off by some eps * |s|, which exp turns into a relative error; a sum of n terms adds less than n eps
    relative to the sum of their sizes; sums here have D, Dv, the keys of a row or the rows of a key as terms. The
    bounds are relative to the sizes of the terms, not of the result: softmax's backward cancels.
    """
    if layout == "BLHD":
        q, k, v, g = (x.swapaxes(1, 2) for x in (q, k, v, g))
    B, H, Lq, D = q.shape
    Lk, Dv = v.shape[2:]
    if 0 in (B, H, Lq, Lk):
        return [0.0] * 5
    group = H // k.shape[1]
    factor = abs(scale) if scale is not None else 1 / np.sqrt(D) if D else 1.0
    k_all, v_all = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.abs(q) @ np.abs(k_all).swapaxes(-1, -2) * factor
    if mask is not None and mask.dtype != bool:
        scores = scores + np.abs(np.where(np.isfinite(mask), mask, 0))
    weights = reference.attention_weights(q, k, mask=mask, scale=scale, softcap=softcap, **pairs)
    column = weights.sum(axis=-2).max() * group
    size_q, size_k, size_v, size_g = (float(np.abs(x).max(initial=0)) for x in (q, k, v, g))
    grad_weights = float((np.abs(g) @ np.abs(v_all).swapaxes(-1, -2)).max())
    eps = np.finfo(dtype).eps * (16 + D + Dv + np.log2(Lq + Lk) + 4 * scores.max())
    of_scores = 2 * grad_weights * factor
    return [eps * size_v, eps, eps * of_scores * size_k, eps * of_scores * size_q * column, eps * size_g * column]


RESULTS = ("out", "lse", "grad_q", "grad_k", "grad_v")


def assert_close(results, expected, bounds):
    """Each result within its bound of the oracle's, -inf at the same places."""
    for name, got, wanted, bound in zip(RESULTS, results, expected, bounds, strict=True):
        assert got.shape == wanted.shape, name
        finite = np.isfinite(wanted)
        assert np.array_equal(got[~finite], wanted[~finite].astype(got.dtype), equal_nan=True), name
        error = np.abs(got[finite].astype(np.float64) - wanted[finite]).max(initial=0)
        assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}"


def assert_drawable(picture):
    """What a question of the study wants drawn are keywords of its kind of picture; matplotlib must be there to look."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from fastmha.study import plots

    inspect.signature(getattr(plots, picture.kind)).bind(None, {}, **picture.data)
