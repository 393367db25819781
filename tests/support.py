"""What the tests of the functions share: instruction sets, inputs in odd memory, a float64 oracle with error bounds."""

import hashlib
import importlib.util
import inspect
import itertools
import pickle
import re
from collections import OrderedDict
from contextlib import contextmanager

import numpy as np
import pytest

import fastmha
from fastmha import _core, reference
from fastmha.algorithms import ALGORITHMS

ISAS = _core.runnable_isas()
VECTOR_BYTES = {"baseline": 16, "avx2": 32, "avx512": 64}
NAMED = [name for name in ALGORITHMS if name not in ("auto", "decode")]     # forward and backward, every call
DTYPES = (np.float32, np.float64)
LAYOUTS = ("BHLD", "BLHD")

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
algorithms = pytest.mark.parametrize("algorithm", NAMED)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def normal(*shape, seed=1, dtype=np.float64):
    """An array drawn from the normal distribution; one seed, one array."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def raises(error, message):
    """`pytest.raises` of the whole message; "..." stands for any text."""
    return pytest.raises(error, match=f"^{re.escape(message).replace(re.escape('...'), '.*')}$")


def fails(call, kind, message):
    """The error of a call: of this very type, its text somewhere as the pattern says."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert caught.type is kind, caught.value
    assert re.search(message, str(caught.value)), f"{message!r} is not in {caught.value!s}"
    return caught.value


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


every_isa = pytest.mark.parametrize("isa", ISAS, indirect=True)  # above the others: one operands' instruction sets in a row


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


def unaligned(x):
    """x at an address that is no multiple of its size."""
    memory = np.empty(x.nbytes + 1, np.uint8)[1:]
    view = memory.view(x.dtype).reshape(x.shape) if x.size else x
    view[...] = x
    assert not view.flags.aligned or not x.size
    return view


def rearranged(x):
    """The same numbers in other writable memory: every way in which an array may lie."""
    yield "padded", padded(x)
    yield "Fortran", np.asfortranarray(x)
    yield "backwards", np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    yield "last rows first", np.ascontiguousarray(x[::-1])[::-1]
    yield "step", np.repeat(x, 2, axis=-1)[..., ::2]
    yield "every other row", np.repeat(x, 2, axis=0)[::2]
    axis = max(0, x.ndim - 2)
    yield "axes exchanged", np.ascontiguousarray(x.swapaxes(0, axis)).swapaxes(0, axis)
    yield "unaligned", unaligned(x)


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


def assert_same(results, expected, message=""):
    """The same arrays bit by bit."""
    for x, y in zip(results, expected, strict=True):
        assert same_bits(x, y), message


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


def call_of(arrays, dtype, keywords):
    """A digest of what determines exact results and bounds."""
    return hashlib.sha256(pickle.dumps((arrays, np.dtype(dtype).str, {**keywords, "algorithm": None}))).digest()


_oracle, _largest = OrderedDict(), {}  # calls, for the other instruction sets and algorithms that get the same operands


def oracle(q, k, v, g, dtype, **keywords):
    """Exact results and the bounds of those computed in dtype, by element; in float64 twice, because the oracle errs as well."""
    arrays, keywords = in_float64((q, k, v, g), keywords)
    call = call_of(arrays, dtype, keywords)
    if call not in _oracle:
        bounds = reference.error_bounds(*arrays, dtype, **keywords)
        _oracle[call] = run(reference, *arrays, **keywords), [bound * (1 + (dtype == np.float64)) for bound in bounds]
        while sum(x.nbytes for entry in _oracle.values() for results in entry for x in results) > 64 << 20:
            _oracle.popitem(last=False)
    _oracle.move_to_end(call)
    return _oracle[call]


def error_bounds(q, k, v, g, dtype, **keywords):
    """Largest difference between two computed results, anywhere in out, lse, grad_q, grad_k, grad_v: each errs."""
    call = call_of((q, k, v, g), dtype, keywords)
    if call not in _largest:
        _largest[call] = [2 * float(x.max(initial=0)) for x in reference.error_bounds(q, k, v, g, dtype, **keywords)]
    return _largest[call]


def weights_bound(q, k, dtype, layout="BHLD", **keywords):
    """Largest difference between two computed probabilities: they are the output for values that are the identity."""
    heads, length = (1, 2) if layout == "BHLD" else (2, 1)
    values = np.broadcast_to(np.eye(k.shape[length]), (len(k), k.shape[heads], k.shape[length], k.shape[length]))
    grad = np.zeros((len(q), q.shape[heads], q.shape[length], k.shape[length]))
    if layout == "BLHD":
        values, grad = values.swapaxes(1, 2), grad.swapaxes(1, 2)
    return error_bounds(q, k, values, grad, dtype, layout=layout, **keywords)[0]


RESULTS = ("out", "lse", "grad_q", "grad_k", "grad_v")


def assert_close(results, expected, bounds):
    """Each element within its bound of the oracle's, -inf at the same places."""
    for name, got, wanted, bound in zip(RESULTS, results, expected, bounds):
        assert got.shape == wanted.shape, name
        finite = np.isfinite(wanted)
        assert np.array_equal(got[~finite], wanted[~finite].astype(got.dtype), equal_nan=True), name
        error, allowed = np.abs(got[finite].astype(np.float64) - wanted[finite]), np.broadcast_to(bound, got.shape)[finite]
        beyond = ~(error <= allowed)  # also NaN
        excess = f"{name}: {beyond.sum()} of {beyond.size} errors beyond their bounds, the first "
        assert not beyond.any(), excess + f"{error[beyond][0]:.3g}, bound {allowed[beyond][0]:.3g}"


def check(q, k, v, g, **keywords):
    """Forward and backward against the oracle; inputs untouched, results fresh and of full shapes."""
    inputs = [q, k, v, g]
    before = [x.copy() for x in inputs]
    results = run(fastmha, *inputs, **keywords)
    for x, kept in zip(inputs, before, strict=True):
        assert same_bits(x, kept)
    for x in results:
        assert x.dtype == q.dtype
        assert x.flags.c_contiguous
        assert x.flags.writeable
    for x, y in itertools.product(results, [*inputs, *results]):
        assert x is y or not np.may_share_memory(x, y)
    assert [x.shape for x in results[2:]] == [q.shape, k.shape, v.shape]
    assert_close(results, *oracle(*inputs, q.dtype, **keywords))
    return results


# Operands at which rounding has most to say: scores in the hundreds, values and keys far from 0, sizes at both ends.
ILL_SCALED = {
    "unit": lambda q, k, v, g: (q, k, v, g),
    "peaked": lambda q, k, v, g: (q * 25, k, v, g),
    "scores x900": lambda q, k, v, g: (q * 30, k * 30, v * 30, g),
    "scores to 1e9": lambda q, k, v, g: (q * 3e4, k * 3e4, v, g),
    "offset 100": lambda q, k, v, g: (q + 100, k + 100, v + 100, g + 100),
    "values offset 100": lambda q, k, v, g: (q, k, v + 100, g),
    "keys offset 100": lambda q, k, v, g: (q, k + 100, v, g),
    "tiny": lambda q, k, v, g: (q * 1e-18, k * 1e-18, v * 1e-30, g),
    "values near the largest float": lambda q, k, v, g: (q, k, np.sign(v) * 3e38, g * 1e-8),
}
ill_scaled = pytest.mark.parametrize("kind", ILL_SCALED)


def draw_ill_scaled(kind, rng, *shape, layout="BHLD"):
    """q, k, v and a gradient of the output, in float32."""
    return [x.astype(np.float32) for x in ILL_SCALED[kind](*draw(rng, *shape, dtype=np.float32, layout=layout))]


def assert_drawable(picture):
    """What a question of the study wants drawn are keywords of its kind of picture; matplotlib must be there to look."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from fastmha.study import plots

    inspect.signature(getattr(plots, picture.kind)).bind(None, {}, **picture.data)
