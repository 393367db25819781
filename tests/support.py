"""What tests share: instruction sets, inputs in odd and in guarded memory, a float64 oracle with error bounds, differences."""

import ctypes
import hashlib
import importlib.util
import inspect
import itertools
import mmap
import os
import pickle
import re
import sys
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import fastmha
from fastmha import _core, reference
from fastmha.algorithms import ALGORITHMS

TILE_ISAS = [name for name in _core.runnable_isas() if name.startswith(("avx512bf16", "amx"))]
ISAS = [name for name in _core.runnable_isas() if name not in TILE_ISAS]     # whose vectors those with matrix tiles have too
VECTOR_BYTES = {"baseline": 16, "avx2": 32, "avx512": 64, "avx512bf16": 64, "amx": 64, "amx-emulated": 16}
NAMED = [name for name in ALGORITHMS if name not in ("auto", "decode")]     # forward and backward, every call
DTYPES = (np.float32, np.float64)
try:
    from ml_dtypes import bfloat16
except ImportError:
    HALVES = (np.float16,)
else:
    HALVES = (np.float16, bfloat16)
LAYOUTS = ("BHLD", "BLHD")

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
halves = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.__name__)
all_dtypes = pytest.mark.parametrize("dtype", [*DTYPES, *HALVES], ids=lambda dtype: dtype.__name__)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
algorithms = pytest.mark.parametrize("algorithm", NAMED)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def computed(dtype):
    """What operands of a dtype are computed in."""
    return np.dtype(np.float32) if dtype in HALVES else np.dtype(dtype)


def eps(dtype):
    """From 1 to the next number of a dtype."""
    return 2.0**-7 if np.dtype(dtype).name == "bfloat16" else float(np.finfo(dtype).eps)


def normal(*shape, seed=1, dtype=np.float64):
    """An array drawn from the normal distribution; one seed, one array."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def repeated(*shape, dtype=np.float32):
    """A shape of any size in a few bytes."""
    return np.broadcast_to(dtype(1), shape)


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
all_isas = pytest.mark.parametrize("isa", [*ISAS, *TILE_ISAS], indirect=True)
tile_isas = pytest.mark.parametrize("isa", TILE_ISAS, indirect=True)


FEW_ROWS = 12       # stacked rows of a key/value head whose float32 scores AVX-512 sums in another order than those of more


def rows_alike(isa, dtype, group, Lq):
    """Of so many query rows of "tiled" the fewest that have the bits in a call by themselves that they have among all."""
    few = isa in ("avx512", "avx512bf16", "amx") and computed(dtype) == np.float32 and group * Lq > FEW_ROWS
    return FEW_ROWS // group + 1 if few else 1


@pytest.fixture(params=ISAS)
def isa(request):
    with selected(request.param):
        yield request.param


def padded(x, elsewhere=np.nan):
    """x as the inside of a larger array that is NaN elsewhere: odd strides, and reading outside shows."""
    around = np.full([n + 3 for n in x.shape], elsewhere, x.dtype)
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


class Pages:
    """Readable and writable memory between two pages that may not be touched."""

    PAGE, ROOM = mmap.PAGESIZE, 4 * 2**20       # whole pages, whatever their size

    def __init__(self):
        if sys.platform == "win32":
            pytest.skip("mprotect is POSIX")
        self.memory = mmap.mmap(-1, self.ROOM + 2 * self.PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for at in (start, start + self.PAGE + self.ROOM):
            self.protect(at, self.PAGE, 0)

    @staticmethod
    def protect(address, size, how):
        """Whole pages from an address on: `how` of mmap's PROT_ constants, 0 for no access."""
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert protect(address, size, how) == 0, os.strerror(ctypes.get_errno())

    def place(self, x, kind):
        """A copy of x with its last element right before the end, or its first right behind the start."""
        gap = 3 if kind.endswith("rows apart") and x.ndim > 1 else 0
        width = x.shape[-1] if x.ndim else 1
        strides, step = [], width + gap
        for n in x.shape[-2::-1]:
            strides.insert(0, step)
            step *= n
        strides.append(1)
        n = 1 + sum(s * (m - 1) for s, m in zip(strides, x.shape, strict=False)) if x.size else 0
        assert n * x.itemsize <= self.ROOM
        first = self.PAGE + (self.ROOM - n * x.itemsize if kind.startswith("end") else 0)
        flat = np.frombuffer(self.memory, x.dtype, n, first)
        if x.dtype.kind in "fV":
            flat[...] = np.nan
        view = as_strided(flat, x.shape, [s * x.itemsize for s in strides[: x.ndim]])
        view[...] = x
        return view


guards = pytest.mark.parametrize("kind", ["end", "end, rows apart", "start"])
_pages = []  # they live as long as the process: the kernels' arrays of a case, one after the other


class Guard:
    """Places the arrays of one case, each in pages of its own."""

    def __init__(self, kind):
        self.kind, self.used = kind, 0

    def __call__(self, x):
        if self.used == len(_pages):
            _pages.append(Pages())
        self.used += 1
        return _pages[self.used - 1].place(np.asarray(x), self.kind)

    def empty(self, shape, dtype):
        return self(np.full(shape, np.nan, dtype))


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
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits(a), bits(b))


def assert_same(results, expected, message=""):
    """The same arrays bit by bit."""
    for x, y in zip(results, expected, strict=True):
        assert same_bits(x, y), message


def run(functions, q, k, v, g, *, threads=None, **keywords):
    """The results of `results_of`, by `fastmha` or by `fastmha.reference`."""
    forward = {name: given for name, given in keywords.items() if name != "need_bias_grad"}
    out, lse = functions.attention(q, k, v, return_lse=True, num_threads=threads, **forward)
    return out, lse, *functions.attention_backward(g, q, k, v, out, lse, num_threads=threads, **keywords)


def in_float64(arrays, keywords):
    """The same arguments for the oracle: the numbers that the call's arrays hold."""
    scores = {name: np.asarray(keywords[name]) for name in ("mask", "sinks", "alibi") if keywords.get(name) is not None}
    wide = {name: x.astype(np.float64) for name, x in scores.items() if x.dtype != bool}
    return [x.astype(np.float64) for x in arrays], {**keywords, **wide}


def crossed(first, second, q, k, v, g, *, threads=None, **keywords):
    """The results of `results_of`, forward by one algorithm and backward by another."""
    forward = {name: given for name, given in keywords.items() if name != "need_bias_grad"}
    out, lse = fastmha.attention(q, k, v, return_lse=True, num_threads=threads, algorithm=first, **forward)
    return out, lse, *fastmha.attention_backward(g, q, k, v, out, lse, num_threads=threads, algorithm=second, **keywords)


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


def crossed_oracle(q, k, v, g, dtype, layout="BHLD", algorithm=None, **keywords):
    """`oracle` where one algorithm ran forward and another backward: scores round apart, and weights are exp(score - lse).

    So do those of few rows by one: sums along the width backward, along the rows forward; and BLAS has routines for one row.
    By no more than the rounding of lse, though: rows whose weights do not add up to 1 within that have sums of their own.
    delta, sum(dO * O), has what out errs by.
    """
    exact, bounds = oracle(q, k, v, g, dtype, layout=layout, **keywords)
    if not exact[0].size:
        return exact, bounds
    (q, k, v, g), keywords = in_float64((q, k, v, g), keywords)
    if layout == "BLHD":
        q, k, v, g = (x.swapaxes(1, 2) for x in (q, k, v, g))
    (B, H, Lq, D), (Hkv, Lk) = q.shape, k.shape[1:3]
    need, p, seed = (keywords.pop(name, None) for name in ("need_bias_grad", "dropout", "seed"))
    drawn = reference.kept(seed, p, B, H, Lq, Lk) / (1 - p) if p else 1.0
    factor = abs(1 / max(D, 1) ** 0.5 if keywords.get("scale") is None else keywords["scale"])
    size = np.ldexp(1.0, np.frexp(np.where(np.isfinite(exact[1]), np.minimum(np.abs(exact[1]), 256), 0))[1])
    eps = np.finfo(np.float64 if dtype == np.float64 else np.float32).eps
    apart = np.minimum(np.expm1(np.minimum(2 * bounds[1], 1)), (6 + size / 2) * eps)[..., None]     # of all weights of a row

    def fold(x):
        return x.reshape(B, Hkv, H // Hkv, *x.shape[2:]).sum(axis=2)

    weights = reference.attention_weights(q, k, **keywords)
    grad_weights = g @ np.repeat(v, H // Hkv, axis=1).swapaxes(2, 3) * drawn
    delta = (weights * np.abs(grad_weights)).sum(axis=3, keepdims=True)
    of_out = (np.abs(g) * (bounds[0] if layout == "BHLD" else bounds[0].swapaxes(1, 2))).sum(axis=3, keepdims=True)
    of_scores = weights * (apart * (np.abs(grad_weights) + 2 * delta) + of_out)
    more = [
        factor * of_scores @ np.repeat(np.abs(k), H // Hkv, axis=1),
        factor * fold(of_scores.swapaxes(2, 3) @ np.abs(q)),
        fold((apart * weights * drawn).swapaxes(2, 3) @ np.abs(g)),
    ]
    if layout == "BLHD":
        more = [x.swapaxes(1, 2) for x in more]
    if keywords.get("sinks") is not None:
        left = np.maximum(1 - weights.sum(axis=3, keepdims=True), 0)
        more.append((apart * left * 2 * delta).sum(axis=(0, 2, 3)))
    if need:
        shape = (1,) * (4 - keywords["mask"].ndim) + keywords["mask"].shape
        over = tuple(axis for axis, n in enumerate(shape) if n == 1)
        more.append(of_scores.sum(axis=over, keepdims=True).reshape(keywords["mask"].shape))
    return exact, [*bounds[:2], *(x + y for x, y in zip(bounds[2:], more, strict=True))]


def error_bounds(q, k, v, g, dtype, **keywords):
    """Largest difference between two computed results, anywhere in each of `results_of`: each errs."""
    call = call_of((q, k, v, g), dtype, keywords)
    if call not in _largest:
        _largest[call] = [2 * float(x.max(initial=0)) for x in reference.error_bounds(q, k, v, g, dtype, **keywords)]
    return _largest[call]


def weights_bound(q, k, dtype, layout="BHLD", **keywords):
    """Largest difference between two computed probabilities (behind dropout): the output for values that are the identity."""
    heads, length = (1, 2) if layout == "BHLD" else (2, 1)
    values = np.broadcast_to(np.eye(k.shape[length]), (len(k), k.shape[heads], k.shape[length], k.shape[length]))
    grad = np.zeros((len(q), q.shape[heads], q.shape[length], k.shape[length]))
    if layout == "BLHD":
        values, grad = values.swapaxes(1, 2), grad.swapaxes(1, 2)
    return error_bounds(q, k, values, grad, dtype, layout=layout, **keywords)[0]


RESULTS = ("out", "lse", "grad_q", "grad_k", "grad_v")


def results_of(keywords):
    """The names of the results of a call, forward and backward."""
    further = {"grad_sinks": keywords.get("sinks") is not None, "grad_mask": keywords.get("need_bias_grad")}
    return (*RESULTS, *(name for name, there in further.items() if there))


def assert_close(results, expected, bounds, names=(*RESULTS, "grad_sinks or grad_mask", "grad_mask")):
    """Each element within its bound of the oracle's, -inf at the same places."""
    assert len(results) <= len(names)
    for name, got, wanted, bound in zip(names, results, expected, bounds):
        assert got.shape == wanted.shape, name
        finite = np.isfinite(wanted)
        assert np.array_equal(got[~finite], wanted[~finite].astype(got.dtype), equal_nan=True), name
        error, allowed = np.abs(got[finite].astype(np.float64) - wanted[finite]), np.broadcast_to(bound, got.shape)[finite]
        beyond = ~(error <= allowed)  # also NaN
        excess = f"{name}: {beyond.sum()} of {beyond.size} errors beyond their bounds, the first "
        assert not beyond.any(), excess + f"{error[beyond][0]:.3g}, bound {allowed[beyond][0]:.3g}"


def check(q, k, v, g, of=oracle, **keywords):
    """Forward and backward against an oracle; inputs untouched, results fresh and of full shapes."""
    inputs = [q, k, v, g, *(keywords[name] for name in ("sinks", "alibi") if keywords.get(name) is not None)]
    before = [x.copy() for x in inputs]
    results = run(fastmha, q, k, v, g, **keywords)
    for x, kept in zip(inputs, before, strict=True):
        assert same_bits(x, kept)
    names = results_of(keywords)
    assert len(results) == len(names)
    assert_dtypes(results, names, q, k, keywords)
    for x in results:
        assert x.flags.c_contiguous
        assert x.flags.writeable
    for x, y in itertools.product(results, [*inputs, *results]):
        assert x is y or not np.may_share_memory(x, y)
    shapes = {"grad_sinks": np.shape(keywords.get("sinks")), "grad_mask": np.shape(keywords.get("mask"))}
    assert [x.shape for x in results[2:]] == [q.shape, k.shape, v.shape, *(shapes[name] for name in names[5:])]
    assert_close(results, *of(q, k, v, g, q.dtype, **keywords), names)
    return results


def assert_dtypes(results, names, q, k, keywords):
    """Those of the operands that they belong to; lse is what is computed in."""
    given = {"grad_sinks": keywords.get("sinks"), "grad_mask": keywords.get("mask"), "grad_k": k, "grad_v": k}
    for name, x in zip(names, results, strict=True):
        assert x.dtype == (computed(q.dtype) if name == "lse" else given.get(name, q).dtype), name


def difference(loss, x, at, step=1e-5):
    """Central difference of loss() by the element x[at], which is moved both ways and put back."""
    kept = x[at]
    x[at] = kept + step
    above = loss()
    x[at] = kept - step
    below = loss()
    x[at] = kept
    return (above - below) / (2 * step)


def assert_gradient(analytic, loss, x, name=""):
    """d loss() / d x is the central difference by every element, in float64."""
    numeric = np.empty(x.shape)
    for at in np.ndindex(x.shape):
        numeric[at] = difference(loss, x, at)
    assert analytic.shape == numeric.shape, name
    allowed = 1e-5 * np.maximum(np.abs(analytic), np.abs(numeric)) + 1e-8
    assert (np.abs(analytic - numeric) <= allowed).all(), f"{name}: {np.abs(analytic - numeric).max()}"


# Calls under every rule, so small that loops over single numbers can follow.
SMALL = (2, 4, 2, 3, 4, 3, 2)   # B, H, Hkv, Lq, Lk, D, Dv
BLOCKED = np.zeros((3, 4), bool)
BLOCKED[0, 2] = BLOCKED[2, 0] = BLOCKED[2, 3] = True
PER_HEAD = np.random.default_rng(5).random((2, 4, 3, 4)) < 0.3
ADDITIVE = np.where(PER_HEAD, -np.inf, np.random.default_rng(6).standard_normal((2, 4, 3, 4)))
EMPTY_ROW = np.zeros((1, 1, 3, 4), bool)
EMPTY_ROW[..., 1, :] = True
SMALL_CALLS = {
    "plain": {},
    "scale and softcap": {"scale": 0.7, "softcap": 1.5},
    "bool mask of two axes": {"mask": BLOCKED},
    "bool mask per head": {"mask": PER_HEAD},
    "bool mask of keys": {"mask": PER_HEAD[:, :1, :1]},
    "additive mask": {"mask": ADDITIVE, "softcap": 2.0},
    "additive mask of two axes": {"mask": ADDITIVE[0, 0]},
    "causal": {"is_causal": True, "offset": 0},
    "causal to the end": {"is_causal": True, "offset": 1},
    "causal, an offset per batch row": {"is_causal": True, "offset": np.array([1, -1])},
    "window": {"window": (1, 0), "offset": 1},
    "window to the right, an offset per batch row": {"window": (None, 1), "offset": np.array([-2, 1])},
    "window to the left": {"window": (1, None), "offset": 2},
    "padding": {"key_padding_lengths": np.array([3, 0])},
    "empty row": {"mask": EMPTY_ROW},
    "all together": {
        "mask": ADDITIVE, "is_causal": True, "offset": np.array([1, 2]), "window": (2, 3),
        "key_padding_lengths": np.array([4, 3]), "scale": 1.3, "softcap": 3.0,
    },
}  # fmt: skip
SINKS, SLOPES = np.array([0.5, -1.0, -np.inf, 2.0]), np.array([0.5, 0.25, 0.0, -0.3])
RULE_CALLS = {
    "sinks": {"sinks": SINKS},
    "sinks, softcap and empty rows": {"sinks": SINKS, "softcap": 1.5, "key_padding_lengths": np.array([3, 0])},
    "alibi": {"alibi": SLOPES, "offset": 1},
    "alibi, an offset per batch row": {"alibi": SLOPES, "offset": np.array([1, -1]), "is_causal": True},
    "dropout": {"dropout": 0.3, "seed": 2**40 + 7},
    "dropout and sinks": {"dropout": 0.5, "seed": 3, "sinks": SINKS, "window": (1, 1), "offset": 0},
    "gradient of the mask": {"mask": ADDITIVE, "softcap": 2.0, "need_bias_grad": True},
    "gradient of a mask of two axes": {"mask": ADDITIVE[0, 0], "need_bias_grad": True, "dropout": 0.2, "seed": 1},
    "gradient of a mask of keys": {"mask": ADDITIVE[:, :1, :1], "need_bias_grad": True, "sinks": SINKS},
    "gradient of a mask of queries": {"mask": ADDITIVE[:1, :, :, 1:2], "need_bias_grad": True, "sinks": SINKS},
    "all rules together": {
        **SMALL_CALLS["all together"], "sinks": SINKS, "alibi": SLOPES, "dropout": 0.25, "seed": 11, "need_bias_grad": True,
    },
}  # fmt: skip
every_rule_call = pytest.mark.parametrize("keywords", RULE_CALLS.values(), ids=RULE_CALLS)
every_case = pytest.mark.parametrize("keywords", SMALL_CALLS.values(), ids=SMALL_CALLS)


def draw_small(rng):
    """q, k, v and a gradient of the output, in memory without gaps."""
    return [np.ascontiguousarray(x) for x in draw(rng, *SMALL)]


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


def script(folder, name):
    """A fixture: the module of a script of the repository; without it beside the tests the file that asks is skipped."""
    path = Path(__file__).resolve().parents[1] / folder
    if not (path / f"{name}.py").exists():
        pytest.skip(f"the {folder} are not next to these tests", allow_module_level=True)

    @pytest.fixture(scope="module")
    def module():
        before = set(sys.modules)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(path)
            yield importlib.import_module(name)
        for own in {file.stem for file in path.glob("*.py")} - before:
            sys.modules.pop(own, None)

    return module


def assert_drawable(picture):
    """What a question of the study wants drawn are keywords of its kind of picture; matplotlib must be there to look."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from fastmha.study import plots

    inspect.signature(getattr(plots, picture.kind)).bind(None, {}, **picture.data)
