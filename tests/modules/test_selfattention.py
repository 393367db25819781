"""SelfAttention: one head with free widths, against the reference; shapes, defaults, copies, errors."""

import copy
import math
import pickle

import numpy as np
import pytest
from support import normal

import fastmha
from fastmha import reference

B, L, D_MODEL = 3, 6, 10
ALL = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5}
BLOCKED = np.random.default_rng(4).random((L, L)) < 0.3
BLOCKED[2] = True  # an empty row
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"key_padding_lengths": np.array([6, 3, 0])},
    "causal and padding": {"is_causal": True, "key_padding_lengths": np.array([6, 3, 1])},
    "causal, padding on the left": {"is_causal": True, "key_ranges": (np.array([0, 3, 6]), None)},
    "bool, two axes": {"mask": BLOCKED},
    "bool, four axes": {"mask": np.random.default_rng(5).random((B, 1, L, L)) < 0.3},
    "additive": {"mask": np.random.default_rng(6).standard_normal((L, L))},
}
WIDTHS = [(4, 7, 5), (7, 4, 13), (10, 10, 10), (1, 1, 1), (33, 2, 10)]
both_dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])
every_mask = pytest.mark.parametrize("keywords", MASKS.values(), ids=MASKS.keys())


def module(d_k=4, d_v=7, d_out=5, dtype=np.float64, **keywords):
    """A module whose biases, if any, are not zero."""
    m = fastmha.SelfAttention(D_MODEL, d_k, d_v, d_out, dtype=dtype, rng=0, **keywords)
    for i, name in enumerate(tuple(m.parameters())[4:]):
        setattr(m, name, normal(*getattr(m, name).shape, seed=10 + i))
    return m


@every_mask
@pytest.mark.parametrize(("d_k", "d_v", "d_out"), WIDTHS)
@pytest.mark.parametrize("use_bias", [False, True])
@both_dtypes
def test_equals_the_reference(keywords, d_k, d_v, d_out, use_bias, dtype):
    m = module(d_k, d_v, d_out, dtype, use_bias=use_bias)
    mask = keywords.get("mask")
    if mask is not None and mask.dtype != bool:
        keywords = {**keywords, "mask": mask.astype(dtype)}
    X, grad = normal(B, L, D_MODEL, dtype=dtype), normal(B, L, d_out, seed=2, dtype=dtype)
    expected = reference.mha_forward_backward(X, m.parameters(), 1, grad_output=grad, **keywords)
    out, weights = m.forward(X, need_weights=True, **keywords)
    got = {"output": out, "weights": weights, **m.intermediates, "grad_X": m.backward(grad)}
    got |= {"grad_" + name: g for name, g in m.gradients().items()}
    for name, x in got.items():
        if name in expected:
            assert x.dtype == dtype
            scale = max(1.0, float(np.abs(expected[name]).max())) if name.startswith("grad") else 1.0
            np.testing.assert_allclose(x / scale, expected[name] / scale, 0, TOLERANCE[dtype], err_msg=name)
    assert set(expected) - set(got) == set()
    np.testing.assert_allclose(m.forward(X, **keywords), out, TOLERANCE[dtype], TOLERANCE[dtype])


@pytest.mark.parametrize("length", [1, 2, 16, 128])
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_shapes(batch, length):
    m = module(d_k=3, d_v=8, d_out=6)
    X = normal(batch, length, D_MODEL)
    out, weights = m.forward(X, need_weights=True)
    assert out.shape == (batch, length, 6)
    assert weights.shape == (batch, 1, length, length)
    assert {name: x.shape for name, x in m.intermediates.items()} == {
        "X": X.shape,
        "Q": (batch, 1, length, 3),
        "K": (batch, 1, length, 3),
        "V": (batch, 1, length, 8),
        "concat": (batch, length, 8),
        "lse": (batch, 1, length),
        "A": (batch, 1, length, length),
    }
    assert m.backward(out).shape == X.shape
    assert {name: g.shape for name, g in m.gradients().items()} == {name: w.shape for name, w in m.parameters().items()}


def test_parameter_shapes_names_and_number():
    m = module(d_k=3, d_v=8, d_out=6)
    shapes = [(10, 3), (10, 3), (10, 8), (8, 6), (3,), (3,), (8,), (6,)]
    assert {name: w.shape for name, w in m.parameters().items()} == dict(zip(ALL, shapes, strict=True))
    assert tuple(m.parameters()) == ALL
    assert m.num_parameters == 30 + 30 + 80 + 48 + 3 + 3 + 8 + 6


def test_defaults_are_biases_of_zero_float32_and_the_width_of_the_input():
    m = fastmha.SelfAttention(D_MODEL, 4, 7, rng=0)
    assert tuple(m.parameters()) == ALL
    assert not any(getattr(m, name).any() for name in ALL[4:])
    assert {w.dtype for w in m.parameters().values()} == {np.dtype(np.float32)}
    assert m.W_O.shape == (7, D_MODEL)
    assert m.forward(normal(2, 3, D_MODEL)).dtype == np.float32
    assert fastmha.SelfAttention(D_MODEL, 4, 7, use_bias=False).b_Q is None


def test_scores_are_divided_by_the_square_root_of_d_k():
    m = fastmha.SelfAttention(1, 4, 1, use_bias=False, dtype=np.float64)
    m.W_Q = m.W_K = np.ones((1, 4))
    m.W_V = m.W_O = [[1]]
    # x = 1 and 0: q.k = 4 and 0, over sqrt(4): scores 2 and 0 for the first query, 0 and 0 for the second
    out, weights = m.forward([[[1], [0]]], need_weights=True)
    w = 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(weights[0, 0], [[w, 1 - w], [0.5, 0.5]], rtol=1e-14)
    np.testing.assert_allclose(out[0, :, 0], [w, 0.5], rtol=1e-14)


def test_weights_are_drawn_from_the_seed_in_the_order_q_k_v_o():
    m = fastmha.SelfAttention(D_MODEL, 4, 7, 5, dtype=np.float64, rng=7)
    generator = np.random.default_rng(7)
    for name in ALL[:4]:
        w = getattr(m, name)
        np.testing.assert_array_equal(w, generator.standard_normal(w.shape) * math.sqrt(2 / sum(w.shape)), err_msg=name)


def test_writing_into_or_assigning_parameters_takes_effect():
    m, X = module(), normal(B, L, D_MODEL)
    m.W_V[2, 3] += 0.5
    m.W_O = normal(7, 5, seed=3)
    expected = reference.mha_forward_backward(X, m.parameters(), 1)["output"]
    np.testing.assert_allclose(m.forward(X), expected, rtol=1e-12, atol=1e-12)


DUPLICATES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}


@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES.keys())
def test_copies_give_the_same_results_and_stay_modules(duplicate):
    m, X = module(), normal(B, L, D_MODEL)
    other = duplicate(m)
    np.testing.assert_array_equal(other.forward(X), m.forward(X))
    other.W_V[...] = 0
    everywhere = np.broadcast_to(other.b_V @ other.W_O + other.b_O, (B, L, 5))  # each position's value is b_V
    np.testing.assert_allclose(other.forward(X), everywhere, rtol=1e-12)
    assert m.W_V.all()


def test_state_dict_round_trips():
    m, other, X = module(), fastmha.SelfAttention(D_MODEL, 4, 7, 5, dtype=np.float64, rng=9), normal(B, L, D_MODEL)
    other.load_state_dict(m.state_dict())
    np.testing.assert_array_equal(other.forward(X), m.forward(X))


def test_repr_shows_the_configuration():
    m = fastmha.SelfAttention(10, d_k=4, d_v=7, d_out=5, use_bias=False, dtype=np.float64)
    text = repr(m)
    for part in ("SelfAttention(", "d_model=10", "d_k=4", "d_v=7", "d_out=5", "use_bias=False", "float64"):
        assert part in text
    assert repr(eval(text, {"SelfAttention": fastmha.SelfAttention, "float64": np.float64})) == text
    m.freeze()
    assert "frozen" in repr(m)


def test_inference_keeps_nothing():
    m, X = module(), normal(B, L, D_MODEL)
    np.testing.assert_array_equal(m.forward(X, training=False), m.forward(X))
    other = module()
    other.forward(X, training=False)
    assert other.intermediates == {}
    with pytest.raises(ValueError, match=r"backward needs a forward with training=True"):
        other.backward(X)


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["d_model", "d_k", "d_v", "d_out"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "{} must be at least 1, got 0"),
        (-3, ValueError, "{} must be at least 1, got -3"),
        (2.0, TypeError, r"{} must be an integer, got 2\.0"),
        (True, TypeError, "{} must be an integer, got True"),
        ("8", TypeError, "{} must be an integer, got '8'"),
    ],
)
def test_widths_are_positive_integers(name, value, error, message):
    sizes = {"d_model": 8, "d_k": 4, "d_v": 4, "d_out": 4, name: value}
    with pytest.raises(error, match=message.format(name)):
        fastmha.SelfAttention(**sizes)


def test_dtype_is_a_float():
    with pytest.raises(TypeError, match="dtype must be float32, float64, float16 or bfloat16, got int64"):
        fastmha.SelfAttention(8, 4, 4, dtype=np.int64)


def test_use_bias_is_a_flag():
    with pytest.raises(TypeError, match="use_bias must be True or False, got 1"):
        fastmha.SelfAttention(8, 4, 4, use_bias=1)


def test_input_has_three_axes():
    with pytest.raises(ValueError, match=r"X must have 3 axes \(B, L, d_model\), got shape \(6, 10\)"):
        module().forward(normal(L, D_MODEL))


def test_input_has_the_modules_width():
    with pytest.raises(ValueError, match="X has width 9 on axis 2 but the module has d_model 10"):
        module().forward(normal(B, L, 9))


def test_gradient_has_the_outputs_shape():
    m = module()
    m.forward(normal(B, L, D_MODEL))
    with pytest.raises(ValueError, match=r"grad_output must have the output's shape \(3, 6, 5\), got \(3, 6, 10\)"):
        m.backward(normal(B, L, D_MODEL))


def test_mask_has_one_head():
    message = r"mask of shape \(3, 2, 6, 6\) does not broadcast to \(B, H, Lq, Lk\) = \(3, 1, 6, 6\)"
    with pytest.raises(ValueError, match=message):
        module().forward(normal(B, L, D_MODEL), np.zeros((B, 2, L, L), bool))


def test_weights_have_their_own_shapes():
    with pytest.raises(ValueError, match=r"W_V must have shape \(10, 7\), got \(10, 4\)"):
        module().W_V = normal(10, 4)


@pytest.mark.parametrize("keyword", ["context", "window", "softcap", "offset"])
def test_what_one_head_does_not_take_is_refused_by_name(keyword):
    with pytest.raises(TypeError, match=keyword):
        module().forward(normal(B, L, D_MODEL), **{keyword: None})
