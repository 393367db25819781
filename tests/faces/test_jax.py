"""fastmha.jax: the bits of fastmha.attention, gradients by differences, under jit, grad and vmap; errors where it is traced."""

import os
import subprocess
import sys

import numpy as np
import pytest
from support import ADDITIVE, RULE_CALLS, SLOPES, SMALL_CALLS, draw_small, fails, rng  # noqa: F401

jax = pytest.importorskip("jax", reason='needs jax: pip install "fastmha[jax]"')

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import fastmha  # noqa: E402
import fastmha.jax as face  # noqa: E402

CALLS = {
    name: {key: value for key, value in keywords.items() if key != "need_bias_grad"}
    for name, keywords in (SMALL_CALLS | RULE_CALLS).items()
} | {"key ranges": {"key_ranges": (np.array([1, 0]), 3)}, "the other layout": {"layout": "BLHD"}}
every_call = pytest.mark.parametrize("keywords", CALLS.values(), ids=CALLS)


@pytest.fixture(autouse=True)
def _float64():
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def operands(rng, request):  # noqa: F811
    """q, k, v and a gradient of the output, of NumPy."""
    arrays = draw_small(rng)
    keywords = getattr(getattr(request.node, "callspec", None), "params", {}).get("keywords", {})
    return [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays] if keywords.get("layout") == "BLHD" else arrays


def differentiable(keywords):
    """The names of what has a gradient beside q, k and v."""
    return [name for name in ("mask", "sinks") if name in keywords and keywords[name].dtype.kind == "f"]


@every_call
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, jnp.bfloat16], ids=lambda dtype: np.dtype(dtype).name)
def test_the_bits_of_attention_and_of_its_gradients(keywords, dtype, operands):
    *qkv, g = (x.astype(dtype) for x in operands)
    of_rows = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
    floats = {"mask": dtype, "sinks": of_rows, "alibi": of_rows}
    keywords = {name: x.astype(floats[name]) if name in floats and x.dtype.kind == "f" else x for name, x in keywords.items()}
    names = differentiable(keywords)
    out, lse = fastmha.attention(*qkv, return_lse=True, **keywords)
    grads = fastmha.attention_backward(g, *qkv, out, lse, need_bias_grad="mask" in names, **keywords)

    def call(q, k, v, *more):
        return face.attention(q, k, v, **keywords | dict(zip(names, more, strict=True)))

    for function in (call, jax.jit(call)):
        ours, pull = jax.vjp(function, *map(jnp.asarray, (*qkv, *(keywords[name] for name in names))))
        assert isinstance(ours, jax.Array)
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, out)
        by_name = dict(zip(("q", "k", "v", *names), pull(jnp.asarray(g)), strict=True))
        expected = dict(zip(("q", "k", "v", *sorted(names, reverse=True)), grads, strict=True))       # sinks, then the mask
        for name, gradient in by_name.items():
            np.testing.assert_array_equal(gradient, expected[name])


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_differences(compiled, operands):
    q, k, v, _ = map(jnp.asarray, operands)
    mask, sinks = jnp.asarray(np.where(np.isinf(ADDITIVE), 0.5, ADDITIVE)[:1]), jnp.asarray([0.5, -1.0, 0.0, 2.0])

    def call(q, k, v, mask, sinks):
        return face.attention(q, k, v, mask=mask, sinks=sinks, is_causal=True, offset=np.array([1, 0]), softcap=2.0, alibi=SLOPES,
                              dropout=0.3, seed=7)

    check_grads(jax.jit(call) if compiled else call, (q, k, v, mask, sinks), order=1, modes=["rev"])


def test_arrays_that_are_traced(operands):
    q, k, v, _ = operands
    lengths, offset, seed = np.array([3, 2]), np.array([1, 0]), 2**32 - 5

    @jax.jit
    def call(q, lengths, offset, seed):
        return face.attention(q, k, v, key_padding_lengths=lengths, offset=offset, is_causal=True, dropout=0.4, seed=seed)

    np.testing.assert_array_equal(
        call(q, lengths, offset, jnp.uint32(seed)),
        fastmha.attention(q, k, v, key_padding_lengths=lengths, offset=offset, is_causal=True, dropout=0.4, seed=seed))
    assert not np.array_equal(call(q, lengths, offset, jnp.uint32(1)), call(q, lengths, offset, jnp.uint32(2)))


def test_vmap_is_one_call_after_the_other(operands):
    q, k, v, g = map(jnp.asarray, operands)
    many = jnp.stack([q, 2 * q, -q])
    outs = jax.vmap(lambda q: face.attention(q, k, v))(many)
    grads = jax.vmap(jax.grad(lambda q: (face.attention(q, k, v) * g).sum()))(many)
    for i, one in enumerate(many):
        np.testing.assert_array_equal(outs[i], face.attention(one, k, v))
        np.testing.assert_array_equal(grads[i], jax.grad(lambda q: (face.attention(q, k, v) * g).sum())(one))


def test_several_large_calls_of_one_program_end():
    x = jnp.ones((2, 8, 512, 64), jnp.float32)
    step = jax.jit(jax.grad(lambda x: sum(face.attention(x + i, x, x).sum() for i in range(4))))
    for _ in range(3):
        assert np.isfinite(step(x)).all()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not let processes choose their CPUs")
def test_on_one_cpu_calls_in_flight_end_where_jax_is_told_to_wait_for_each(tmp_path):
    """As the notes of `attention` say; without the setting JAX waits forever."""
    assert 'jax.config.update("jax_cpu_enable_async_dispatch", False)' in face.attention.__doc__
    program = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax
import jax.numpy as jnp
import fastmha.jax
jax.config.update("jax_cpu_enable_async_dispatch", False)
x = jnp.ones((4, 8, 256, 64))
step = jax.jit(jax.grad(lambda x: (fastmha.jax.attention(x * 2, x + 1, x * 3) ** 2).sum()))
jax.block_until_ready([step(x + i) for i in range(10)])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=tmp_path)


@pytest.mark.parametrize(("keywords", "error", "message"), [
    ({"mask": np.zeros((3, 5), bool)}, ValueError, r"^mask of shape \(3, 5\) does not broadcast to \(Lq, Lk\) = \(3, 4\)$"),
    ({"is_causal": True}, ValueError, r"^offset must be given with is_causal, "),
    ({"scale": np.ones(())}, TypeError, r"^scale must be a finite number or None, got array\(1.\)$"),
    ({"dropout": 0.5}, ValueError, r"^seed must be given with dropout, "),
    ({"sinks": np.zeros(4, np.float32)}, TypeError, r"^sinks has dtype float32 but q has float64: they must share one dtype$"),
    ({"layout": "LBHD"}, ValueError, r"""^layout must be "BHLD" or "BLHD", got 'LBHD'$"""),
])
def test_errors_are_raised_where_it_is_traced(keywords, error, message, operands):
    for transform in (lambda f: f, jax.jit):
        fails(lambda: transform(lambda q, k, v: face.attention(q, k, v, **keywords))(*operands[:3]), error, message)  # noqa: B023


@pytest.mark.parametrize(("keywords", "error", "match"), [
    ({"algorithm": "nope"}, ValueError, 'algorithm must be "auto", "blas", "tiled" or "decode", got \'nope\''),
    ({"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
    ({"dropout": 0.5, "seed": jax.random.key(0)}, TypeError, r"seed must be an integer, got a key of JAX .*jax\.random\.bits"),
])
def test_what_is_wrong_with_a_call_is_said_when_it_is_traced(operands, keywords, error, match):
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda *x: face.attention(*x, **keywords), *operands[:3])


def test_an_algorithm_without_gradients_says_so_when_they_are_traced(operands):
    assert face.attention(*operands[:3], algorithm="decode").shape
    with pytest.raises(ValueError, match='"decode" cannot serve this call: it has no backward pass'):
        jax.eval_shape(jax.grad(lambda *x: face.attention(*x, algorithm="decode").sum()), *operands[:3])


def test_what_is_wrong_with_values_is_said_when_it_runs(operands):
    lengths = np.array([1, 9])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"key_padding_lengths must lie in .*, got 9 at index 1"):
        jax.block_until_ready(face.attention(*operands[:3], key_padding_lengths=lengths))


def test_what_is_not_there_is_refused(operands):
    q, k, v, _ = map(jnp.asarray, operands)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: face.attention(q, k, v), (q,), (q,))
    with pytest.raises(ValueError, match="Pure callbacks do not support JVP"):
        jax.grad(lambda q: jax.grad(lambda q: face.attention(q, k, v).sum())(q).sum())(q)
    with pytest.raises(TypeError, match=r"scale must be a finite number or None, got .*Trace"):
        jax.grad(lambda scale: face.attention(q, k, v, scale=scale).sum())(0.5)
