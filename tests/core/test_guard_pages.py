"""No kernel touches an element outside its arrays: they end exactly at an unreadable page, or start right behind one.

The kernels run in the test process itself: one element read or written past an end kills it, and a pytest that dies is
the failure. `test_the_guard_works` proves in processes of their own that it would.
"""

import itertools
import mmap
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import support
from support import (
    HALVES,
    Guard,
    Pages,
    all_dtypes,
    assert_same,
    computed,
    dtypes,
    eps,
    guards,
    run,
    same_bits,
)

import fastmha
from fastmha import _core, algorithms, validate

# ------------------------------------------------------------------------------------------------------------ the guard

@pytest.mark.parametrize("how", ["Python", "a kernel"])
@pytest.mark.parametrize("kind", ["end", "start"])
def test_the_guard_works(kind, how, tmp_path):
    """One element further and the process dies."""
    code = f"""
        import resource, sys
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.path.insert(0, {os.path.dirname(support.__file__)!r})
        import numpy as np
        from numpy.lib.stride_tricks import as_strided
        from support import Guard
        from fastmha import _core
        x = Guard({kind!r})(np.zeros(67, np.float32))
        _core.exponential(x, np.empty_like(x))
        longer = as_strided(x, (68,), (4,)) if {kind!r} == "end" else as_strided(x[66:], (68,), (-4,))[::-1]
        print(longer[1:-1].sum(), flush=True)
        if {how!r} == "Python":
            print(longer.sum())
        else:
            _core.exponential(longer, np.empty(68, np.float32))
    """
    environment = dict(os.environ)
    environment["ASAN_OPTIONS"] = ":".join(filter(None, [environment.get("ASAN_OPTIONS"), "handle_segv=0"]))
    package = str(Path(fastmha.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ran.stdout == "0.0\n", ran.stderr
    assert ran.returncode in (-signal.SIGSEGV, -signal.SIGBUS)


# ------------------------------------------------------------------------------------------------------- the algorithms


def rules_of(n, B, H, Lq, Lk, dtype, rng):
    """Keywords of the n-th kind of call."""
    gone = rng.random((B, H, Lq, Lk)) < 0.4
    additive = np.where(gone, -np.inf, 0.5).astype(dtype)
    of_heads = {name: rng.standard_normal(H).astype(dtype) for name in ("sinks", "alibi")} | {"dropout": 0.3, "seed": n}
    kinds = (
        {},
        {"is_causal": True, "offset": Lk - Lq},
        {"mask": gone},
        {"mask": additive, "softcap": 3.0},
        {"mask": gone[:, :1, :1]},
        {"mask": additive[:, :1, :1]},
        {"mask": gone[:1, :, :, :1]},
        {"mask": additive[0, 0], "is_causal": True, "offset": 2},
        {"key_padding_lengths": rng.integers(0, Lk + 1, B)},
        {"window": (3, 1), "offset": Lk - Lq},
        {"softcap": 2.0, "key_ranges": ([Lk // 2, 0][:B], None)},
        {"mask": gone[0, 0], "key_padding_lengths": rng.integers(0, Lk + 1, B), "softcap": 2.0},
        {"mask": additive, "offset": 2, "is_causal": True, **of_heads},
        {"mask": additive[:1, :, :1], "offset": Lk - Lq, "softcap": 2.0, **of_heads},
    )
    return kinds[n % len(kinds)]


def case(rng, guard, n, H, Hkv, Lq, Lk, D, Dv, dtype, layout, poison):
    """Every algorithm on guarded arrays, with guarded results, against the same on ordinary ones."""
    B = 1 + n % 2
    shapes = (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), (B, H, Lq, Dv)
    arrays = [rng.standard_normal(s).astype(dtype) for s in shapes]
    if poison:
        for x, at in zip(arrays, (Lq - 1, Lk // 2, Lk - 1, 0), strict=True):
            x[0, 0, at, x.shape[-1] - 1] = np.nan
    if layout == "BLHD":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    keywords = {"layout": layout, **rules_of(n, B, H, Lq, Lk, dtype, rng)}
    guarded = {k: guard(x) if isinstance(x, np.ndarray) else x for k, x in keywords.items()}
    q, k, v, g = (guard(x) for x in arrays)
    problem = validate.attention_problem(q, k, v, guarded.pop("layout"), validate.Rules(**guarded))

    def by_head(x):
        return x if layout == "BHLD" else x.swapaxes(1, 2)

    out, grads = guard.empty(g.shape, dtype), [guard.empty(x.shape, dtype) for x in (q, k, v)]
    # lse and weights are contiguous in any case.
    own = Guard("start" if guard.kind == "start" else "end")
    own.used = guard.used
    wide = computed(dtype)
    lse, weights = own.empty((B, H, Lq), wide), own.empty((B, H, Lq, Lk), wide)
    bias = {"need_bias_grad": True} if "sinks" in keywords else {}
    grad_mask = own.empty(problem.additive_mask.shape, dtype) if bias else None
    states = own.empty((B, H, Lq, _core.ROW_STATE), wide)
    plain = [x.copy() for x in arrays]
    slack = 8 * eps(dtype) if dtype in HALVES else 0    # of numbers of size 8, rounded otherwise
    for name in ("tiled", "blas"):
        expected = run(fastmha, *plain, algorithm=name, **keywords, **bias)
        algorithms.forward(name, problem, by_head(out), lse, weights, 1)
        algorithms.forward(name, problem, by_head(out), lse, None, 1)
        of_sinks = algorithms.backward(name, problem, by_head(out), lse, by_head(g), *(by_head(x) for x in grads), 1, grad_mask)
        results = (out, lse, *grads, *((validate.cast(of_sinks, dtype), grad_mask) if bias else ()))
        if name == "tiled":
            assert_same(results, expected)
            of_out, of_g, *of_grads = (validate.bits(by_head(x)) for x in (out, g, *grads))
            for split in ((192, 0), (192, 1), (192, 8), (48, 0), (48, 1)):
                _core.tiled_backward(problem, of_out, lse, of_g, *of_grads, states, split, 1)
        for x, y in zip(results, expected, strict=True):  # by BLAS: another address may round otherwise
            np.testing.assert_allclose(x.astype(wide), y.astype(wide), rtol=0, atol=1000 * np.finfo(wide).eps + slack)
    if Lq * H // Hkv <= 64:
        expected = fastmha.attention(*plain[:3], algorithm="decode", return_lse=True, **keywords)
        algorithms.forward("decode", problem, by_head(out), lse, None, 1)
        assert same_bits(out, expected[0])
        assert same_bits(lse, expected[1])


@pytest.mark.filterwarnings("ignore::fastmha.ConventionWarning")  # masks of one key
@all_dtypes
@guards
@pytest.mark.parametrize("poison", [False, True], ids=["finite", "NaN"])
def test_attention_of_every_length_stays_inside(isa, dtype, kind, poison, rng):
    widths = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33)
    for L in range(1, 71):
        Lq = (L, 1, 2, 70 - L // 2)[L % 4]
        layout = ("BHLD", "BLHD")[L % 3 == 0]
        D, Dv = widths[L % 14], widths[5 * L % 13]
        case(rng, Guard(kind), L, 2, 1 + L % 2, Lq, L, D, Dv, dtype, layout, poison)


@dtypes
@guards
@pytest.mark.parametrize("poison", [False, True], ids=["finite", "NaN"])
def test_attention_of_every_width_stays_inside(isa, dtype, kind, poison, rng):
    for D in range(1, 68):
        Lq, Lk = (1, 3, 5, 33)[D % 4], (9, 17, 64, 65, 33)[D % 5]
        case(rng, Guard(kind), D, 2, 1, Lq, Lk, D, 68 - D, dtype, "BHLD", poison)
        case(rng, Guard(kind), D + 5, 2, 2, Lq, Lk, 1 + 7 * D % 67, D, dtype, "BLHD", poison)


@pytest.mark.filterwarnings("ignore::fastmha.ConventionWarning")  # masks of one key
@all_dtypes
@guards
def test_attention_around_the_edges_of_tiles_and_chunks_stays_inside(isa, dtype, kind, rng):
    lengths = (64, 191), (63, 192), (65, 193), (1, 511), (2, 513), (129, 385), (3, 575), (31, 127)
    for n, (Lq, Lk) in enumerate(lengths):
        case(rng, Guard(kind), n, 2, 1, Lq, Lk, 5, 7, dtype, "BHLD", n % 2 == 1)
        case(rng, Guard(kind), n + 3, 3, 1, Lq, Lk, 16, 8, dtype, "BLHD", n % 2 == 0)


@all_dtypes
@pytest.mark.parametrize("start", [512, 513, 640, 767])
def test_blocks_of_keys_before_the_start_of_a_range_are_not_read(isa, dtype, start, rng):
    """The first 512 keys and values lie in pages that may not be touched; of half precision "blas" converts whole heads."""
    q, g = (rng.standard_normal((1, 2, 3, 16)).astype(dtype) for _ in range(2))
    kv = []
    for _ in range(2):
        memory = Pages().memory
        x = np.frombuffer(memory, dtype, 770 * 16, Pages.PAGE).reshape(1, 1, 770, 16)
        x[...] = rng.standard_normal(x.shape)
        kv.append((memory, x, x.copy()))
    k, v = (x for _, x, _ in kv)
    rules = {"key_ranges": (start, None)}, {"key_ranges": (start, 768), "is_causal": True, "offset": 760}
    names = ("tiled", "decode") if dtype in HALVES else ("tiled", "blas", "decode")
    calls = [{"algorithm": name, **keywords} for name in names for keywords in rules]
    wanted = [both(q, *(x for _, _, x in kv), g, **keywords) for keywords in calls]
    size = 512 * 16 * q.itemsize // Pages.PAGE * Pages.PAGE
    assert size >= Pages.PAGE
    for _, x, _ in kv:
        Pages.protect(x.ctypes.data, size, 0)
    found = [both(q, k, v, g, **keywords) for keywords in calls]
    for _, x, _ in kv:
        Pages.protect(x.ctypes.data, size, mmap.PROT_READ | mmap.PROT_WRITE)
    for results, expected in zip(found, wanted, strict=True):
        for x, y in zip(results, expected, strict=True):
            assert same_bits(x, y)


def both(q, k, v, g, algorithm, **keywords):
    """out, lse and the gradients, where the algorithm has some."""
    if algorithm == "decode":
        return fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True, **keywords)
    return run(fastmha, q, k, v, g, algorithm=algorithm, **keywords)


# --------------------------------------------------------------------------------------------- products and row kernels


@dtypes
@guards
@pytest.mark.parametrize("transposes", list(itertools.product([False, True], repeat=2)), ids=["NN", "NT", "TN", "TT"])
def test_products_stay_inside(isa, dtype, kind, transposes, rng):
    sizes = [(n, 1 + 5 * n % 67, 1 + 11 * n % 67) for n in range(1, 68)]
    sizes += [(3, 5, 255), (5, 3, 256), (2, 9, 257), (255, 3, 2), (256, 17, 5), (257, 2, 9), (2, 129, 3)]
    for m, n, k in sizes:
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        bias = rng.standard_normal(n).astype(dtype)
        wanted = a.astype(np.float64) @ b + bias
        guard = Guard(kind)
        c, bias = guard.empty((m, n), dtype), guard(bias)
        a, b = (guard(x.T if t else x) for x, t in zip((a, b), transposes, strict=True))
        for slices in ((m, n), (7, 20)):
            _core.matmul_tiled(a, b, c, *transposes, bias, slices, 1)
            assert np.abs(c - wanted).max() <= np.finfo(dtype).eps * (4 * k + 8) * 25
            _core.matmul(a, b, c, *transposes, 1.0, 0.0, bias, slices, 1)
            assert np.abs(c - wanted).max() <= np.finfo(dtype).eps * (4 * k + 8) * 25


@dtypes
@pytest.mark.parametrize("kind", ["end", "start"])
def test_row_kernels_stay_inside(isa, dtype, kind, rng):
    for n in range(1, 71):
        rows = 1 + n % 3
        x, g = rng.standard_normal((rows, n)).astype(dtype), rng.standard_normal((rows, n)).astype(dtype)
        guard = Guard(kind)
        guarded, y, dx = guard(x), guard.empty(x.shape, dtype), guard.empty(x.shape, dtype)
        _core.softmax_rows(guarded, None, y, 1)
        assert same_bits(y, fastmha.softmax(x))
        _core.softmax_rows(guard(g), y, dx, 1)
        assert same_bits(dx, fastmha.softmax_backward(g, y.copy()))
        for function in (_core.exponential, _core.hyperbolic_tangent):
            ours, plain = guard.empty(n, dtype), np.empty(n, dtype)
            function(guard(x[0]), ours)
            function(x[0], plain)
            assert same_bits(ours, plain)
        for activation in _core.ACTIVATIONS.values():
            plain = np.empty_like(x)
            for gradient in (None, g):
                _core.activation_rows(activation, None if gradient is None else guard(g), guarded, dx, 1)
                _core.activation_rows(activation, gradient, x, plain, 1)
                assert same_bits(dx, plain)
        weight, bias, sums = guard(g[0]), guard(x[0]), guard.empty((2, n), dtype)
        for centered, residual in itertools.product([False, True], repeat=2):
            r, plain_r = (guard(g), g) if residual else (None, None)
            _core.norm_rows(guarded, r, weight, bias, dx, 1e-5, centered, 1)
            _core.norm_rows(x, plain_r, g[0], x[0].copy(), plain, 1e-5, centered, 1)
            assert same_bits(dx, plain)
            partials, plain_sums = guard.empty((1, 2 * n), dtype), np.empty((2, n), dtype)
            _core.norm_rows_backward(guard(g), guarded, r, weight, dx, partials, sums, 1e-5, centered, 1)
            _core.norm_rows_backward(g, x, plain_r, g[0], plain, np.empty((1, 2 * n), dtype), plain_sums, 1e-5, centered, 1)
            assert same_bits(dx, plain)
            assert same_bits(sums[: 1 + centered], plain_sums[: 1 + centered])


@all_dtypes
@guards
def test_packing_stays_inside(isa, dtype, kind, rng):
    for L, width in ((1, 1), (3, 7), (63, 5), (64, 16), (65, 17), (70, 33)):
        x = rng.standard_normal((2, L, 3, width)).astype(dtype)
        guard = Guard(kind)
        packed, wide = x.swapaxes(1, 2).copy(), computed(dtype)
        out = guard.empty(packed.shape, wide)
        _core.pack_heads(validate.bits(guard(x)).swapaxes(1, 2), out, 1)
        assert same_bits(out, packed.astype(wide))
        back = guard.empty(packed.shape, dtype)
        _core.pack_heads(out, validate.bits(back), 1)
        assert same_bits(back, packed)
