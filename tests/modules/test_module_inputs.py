"""What MultiHeadAttention takes and keeps: any numbers in any memory, empty inputs, intermediates, large scores, every plan."""

import numpy as np
import pytest
from module_support import D_MODEL, HEADS, assert_close, assert_same_bits, both_dtypes, by_reference, module
from support import normal, unaligned

import fastmha

# --------------------------------------------------------------------------------------------------------------- inputs


KINDS = ("int64", "uint8", "bool", "float16", "float32", "float64", "longdouble", ">f4", ">f8", ">i2")


@pytest.mark.parametrize("kind", KINDS)
@both_dtypes
def test_real_inputs_are_cast(kind, dtype):
    m = module(dtype=dtype)
    X = np.abs(np.round(4 * normal(2, 5, D_MODEL))).astype(kind)
    assert_same_bits(m.forward(X), m.forward(X.astype(dtype)))
    assert_same_bits(m.forward(X, context=X[:, :2]), m.forward(X.astype(dtype), context=X[:, :2].astype(dtype)))


def test_lists_are_taken_as_arrays():
    m, X = module(), normal(2, 5, D_MODEL)
    assert_same_bits(m.forward(X.tolist()), m.forward(X))


def variants(X):
    """X in other memory: the same numbers."""
    frozen = X.copy()
    frozen.flags.writeable = False
    return {
        "read-only": frozen,
        "unaligned": unaligned(X),
        "every second column": np.repeat(X, 2, axis=2)[..., ::2],
        "reversed": np.ascontiguousarray(X[:, ::-1, ::-1])[:, ::-1, ::-1],
        "transposed": np.ascontiguousarray(X.transpose(2, 1, 0)).transpose(2, 1, 0),
        "Fortran": np.asfortranarray(X),
        "part of a larger array": np.pad(X, ((0, 0), (0, 3), (2, 1)))[:, :-3, 2:-1],
    }


@pytest.mark.parametrize("kind", variants(np.zeros((2, 2, 2))))
@both_dtypes
def test_inputs_of_any_strides_work_and_are_not_written(kind, dtype):
    m = module(dtype=dtype)
    X = normal(2, 5, D_MODEL, dtype=dtype)
    expected, grad_expected = m.forward(X, is_causal=True), m.backward(X)
    other = variants(X)[kind]
    assert_same_bits(m.forward(other, is_causal=True), expected)
    assert_same_bits(m.backward(other), grad_expected)
    assert_same_bits(m.forward(X, context=other, is_causal=True), m.forward(X, context=X, is_causal=True))
    np.testing.assert_array_equal(other, X)


def test_a_broadcast_input_works():
    m, row = module(), normal(1, 1, D_MODEL)
    X = np.broadcast_to(row, (3, 4, D_MODEL))
    assert_same_bits(m.forward(X), m.forward(X.copy()))


def test_matching_input_is_kept_by_reference():
    m, X = module(), normal(2, 5, D_MODEL)
    m.forward(X)
    assert np.shares_memory(m.intermediates["X"], X)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_empty_inputs_give_empty_outputs_and_zero_gradients(batch, length, use_bias, layout):
    m, X = module(use_bias=use_bias, layout=layout), np.zeros((batch, length, D_MODEL))
    m.forward(normal(2, 3, D_MODEL))
    m.backward(normal(2, 3, D_MODEL))  # leaves numbers that must be overwritten
    out, weights = m.forward(X, is_causal=True, need_weights=True)
    assert out.shape == X.shape
    assert weights.shape == (batch, HEADS, length, length)
    assert m.backward(out).shape == X.shape
    for name, g in m.gradients().items():
        np.testing.assert_array_equal(g, 0, err_msg=name)


def test_an_empty_context_gives_the_output_bias():
    m, X = module(use_bias=True), normal(2, 5, D_MODEL)
    out, weights = m.forward(X, context=np.zeros((2, 0, D_MODEL)), need_weights=True)
    np.testing.assert_array_equal(out, np.broadcast_to(m.b_O, out.shape))
    assert weights.shape == (2, HEADS, 5, 0)
    np.testing.assert_array_equal(m.backward(X), 0)
    assert m.grad_context.shape == (2, 0, D_MODEL)
    for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O"):
        np.testing.assert_array_equal(m.gradients()[name], 0, err_msg=name)
    np.testing.assert_allclose(m.grad_b_O, X.sum((0, 1)), rtol=1e-13)


def test_rows_with_everything_removed_give_the_output_bias_and_no_gradient():
    m, X = module(use_bias=True), normal(3, 5, D_MODEL)
    out, weights = m.forward(X, key_padding_lengths=np.array([5, 0, 2]), need_weights=True)
    np.testing.assert_array_equal(out[1], np.broadcast_to(m.b_O, (5, D_MODEL)))
    np.testing.assert_array_equal(weights[1], 0)
    np.testing.assert_array_equal(m.intermediates["lse"][1], -np.inf)
    np.testing.assert_array_equal(m.backward(X)[1], 0)


# -------------------------------------------------------------------------------------------------------- intermediates


@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_intermediates_are_views_of_one_projection(layout):
    m, X = module(layout=layout, num_kv_heads=2), normal(2, 5, D_MODEL)
    m.forward(X)
    kept, again = m.intermediates, m.intermediates
    assert set(kept) == {"X", "Q", "K", "V", "concat", "lse"}  # A only where it was asked for
    row = (24 + 12 + 12) * 8
    one_head, next_row = (6 * 8, row) if layout == "strided" else (5 * 6 * 8, 6 * 8)
    for name in "QKV":
        assert kept[name].base is not None
        assert kept[name].strides == (5 * row, one_head, next_row, 8)
    for name, x in kept.items():
        assert np.shares_memory(x, again[name])
    address = {name: kept[name].__array_interface__["data"][0] for name in "QKV"}
    assert address["K"] - address["Q"] == 4 * one_head
    assert address["V"] - address["K"] == 2 * one_head


def test_intermediates_are_the_steps_from_input_to_output():
    m, X = module(use_bias=True), normal(2, 5, D_MODEL)
    out, weights = m.forward(X, need_weights=True)
    kept = m.intermediates
    np.testing.assert_array_equal(kept["A"], weights)
    np.testing.assert_allclose(fastmha.combine_heads(kept["Q"]), X @ m.W_Q + m.b_Q, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(fastmha.combine_heads(kept["A"] @ kept["V"]), kept["concat"], rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(kept["concat"] @ m.W_O + m.b_O, out, rtol=1e-13, atol=1e-13)


# -------------------------------------------------------------------------------------------------------------- numbers


@both_dtypes
def test_initial_weights_over_512_positions_do_not_vanish(dtype):
    """The initial scores have a deviation near 1: no key gets all and none gets nothing."""
    m = fastmha.MultiHeadAttention(64, 4, dtype=dtype, rng=0)
    _, weights = m.forward(normal(1, 512, 64, dtype=dtype), need_weights=True)
    assert weights.min() > 1e-8
    effective_keys = 1 / (weights.astype(np.float64) ** 2).sum(-1)
    assert np.median(effective_keys) > 512 / 8


@both_dtypes
@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_beyond_700_stay_finite(dtype, is_causal):
    """exp(710) overflows float64 and exp(89) float32: only differences from the row's peak are exponentiated."""
    m = module(8, 2, dtype=dtype)
    m.W_Q = m.W_K = 30 * np.eye(8)
    X = np.round(8 * normal(2, 6, 8)).astype(dtype) / 4
    m.forward(X)
    scores = m.intermediates["Q"] @ m.intermediates["K"].swapaxes(-1, -2) / 2
    assert scores.max() > 700
    out, weights = m.forward(X, is_causal=is_causal, need_weights=True)
    expected = by_reference(m, X, X, is_causal=is_causal)
    assert_close(out, expected["output"], dtype)
    assert_close(weights, expected["weights"], dtype)
    assert np.isfinite(m.backward(X)).all()
    assert all(np.isfinite(g).all() for g in m.gradients().values())


@both_dtypes
def test_inputs_of_plus_minus_100_stay_finite(dtype):
    m = module(64, 4, dtype=dtype)
    X = np.random.default_rng(0).uniform(-100, 100, (2, 20, 64)).astype(dtype)
    assert np.isfinite(m.forward(X, is_causal=True)).all()
    assert np.isfinite(m.backward(X)).all()
    assert all(np.isfinite(g).all() for g in m.gradients().values())


# ----------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 1), (3, 300)])
def test_a_plan_is_made_for_every_shape_that_forward_takes(shape):
    m = module(64, 4, num_kv_heads=2)
    X = normal(*shape, 64)
    m.forward(X, is_causal=True)
    assert m.plan(*shape, is_causal=True, backward=True).layout == m._layout(shape[1])[0]
    found = m.plan(*shape, seq_len_k=400, offset=7, is_causal=True, num_threads=1)
    assert (found.layout, found.threads) == (m._layout(400)[0], 1)
