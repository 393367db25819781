"""Parameters of MultiHeadAttention: their views, states, seeds and copies, frozen modules, and inference, which keeps nothing."""

import copy
import math
import pickle
import threading

import numpy as np
import pytest
from module_support import ALL, D_MODEL, HEADS, NAMES, assert_same_bits, by_reference, module
from support import normal

import fastmha

# ------------------------------------------------------------------------------------------------------- training=False


def test_inference_keeps_nothing():
    m = module(use_bias=True)
    before = dict(m.__dict__)
    out = m.forward(normal(2, 5, D_MODEL), is_causal=True, training=False)
    assert m.__dict__ == before
    assert m.intermediates == {}
    with pytest.raises(ValueError, match="backward needs a forward"):
        m.backward(out)


@pytest.mark.parametrize("need_weights", [False, True])
def test_inference_gives_the_bits_of_training(need_weights):
    m, X = module(), normal(2, 5, D_MODEL)
    a, b = (m.forward(X, is_causal=True, need_weights=need_weights, training=t) for t in (True, False))
    for x, y in zip(a, b, strict=True) if need_weights else [(a, b)]:
        assert_same_bits(x, y)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_four_threads_share_a_module_at_inference(num_threads):
    m = module(dtype=np.float32, use_bias=True, num_kv_heads=2)
    inputs = [normal(2, 60 + 17 * i, D_MODEL, seed=i, dtype=np.float32) for i in range(4)]
    expected = [m.forward(X, is_causal=True, training=False) for X in inputs]
    wrong, start = [], threading.Barrier(4)

    def work(i):
        start.wait()
        for _ in range(20):
            try:
                out = m.forward(inputs[i], is_causal=True, training=False, num_threads=num_threads)
                assert_same_bits(out, expected[i])
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


# ----------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", ALL)
def test_writing_into_a_parameter_takes_effect(name):
    m, X = module(use_bias=True), normal(2, 5, D_MODEL)
    before = m.forward(X)
    getattr(m, name)[..., 1] += 0.5
    after = m.forward(X)
    np.testing.assert_allclose(after, by_reference(m, X)["output"], rtol=1e-12, atol=1e-12)
    if name == "b_K":  # shifts all scores of a query alike, which softmax ignores
        np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-12)
    else:
        assert np.abs(after - before).max() > 1e-3


@pytest.mark.parametrize("name", ALL)
def test_assigning_a_parameter_copies_it_in_and_takes_effect(name):
    m, X = module(use_bias=True), normal(2, 5, D_MODEL)
    others = {other: w.copy() for other, w in m.parameters().items() if other != name}
    view = getattr(m, name)
    value = normal(*view.shape, seed=8)
    setattr(m, name, value)
    np.testing.assert_array_equal(view, value)
    np.testing.assert_allclose(m.forward(X), by_reference(m, X)["output"], rtol=1e-12, atol=1e-12)
    value[...] = np.nan  # the module has its own copy
    assert np.isfinite(m.forward(X)).all()
    for other, w in others.items():
        np.testing.assert_array_equal(getattr(m, other), w)


def test_assignment_casts_real_numbers():
    m = module(dtype=np.float32)
    m.W_Q = np.arange(D_MODEL * D_MODEL).reshape(D_MODEL, D_MODEL).tolist()
    assert m.W_Q.dtype == np.float32
    assert m.W_Q[0, 3] == 3


def test_augmented_assignment_of_a_whole_parameter():
    m = module()
    before = m.W_K.copy()
    m.W_K += 1
    np.testing.assert_array_equal(m.W_K, before + 1)


def test_a_parameter_may_be_assigned_from_its_own_transpose():
    m = module()
    before = m.W_Q.copy()
    m.W_Q = m.W_Q.T
    np.testing.assert_array_equal(m.W_Q, before.T)


@pytest.mark.parametrize("use_bias", [False, True])
def test_parameters_and_gradients_are_ordered_views(use_bias):
    m = module(use_bias=use_bias)
    m.forward(normal(2, 5, D_MODEL))
    m.backward(normal(2, 5, D_MODEL))
    assert tuple(m.parameters()) == tuple(m.gradients()) == tuple(m.state_dict()) == NAMES[use_bias]
    for name, w in m.parameters().items():
        assert np.shares_memory(w, getattr(m, name))
    m.parameters()["W_V"][2, 3] = 7
    assert m.W_V[2, 3] == 7


def test_a_step_of_gradient_descent_lowers_the_loss():
    m, X, target = module(use_bias=True), normal(4, 6, D_MODEL), normal(4, 6, D_MODEL, seed=2)

    def loss():
        return ((m.forward(X) - target) ** 2).sum()

    losses = []
    for _ in range(5):
        losses.append(loss())
        m.backward(2 * (m.forward(X) - target))
        for name, w in m.parameters().items():
            w -= 1e-3 * m.gradients()[name]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_state_dict_is_a_copy_and_round_trips():
    m, other, X = module(use_bias=True), module(use_bias=True), normal(2, 5, D_MODEL)
    other.load_state_dict({name: np.zeros_like(w) for name, w in m.parameters().items()})
    state = m.state_dict()
    expected = m.forward(X)
    m.W_Q += 1
    other.load_state_dict(state)
    assert_same_bits(other.forward(X), expected)
    for name, w in state.items():
        assert w.flags.c_contiguous
        assert w.flags.owndata
        assert not np.shares_memory(w, getattr(m, name))


def test_loading_casts_to_the_modules_dtype():
    m = module(dtype=np.float32)
    m.load_state_dict(module(dtype=np.float64).state_dict())
    assert {w.dtype for w in m.parameters().values()} == {np.dtype(np.float32)}


def test_loading_the_modules_own_views_exchanged_exchanges_them():
    m = module()
    q, k = m.W_Q.copy(), m.W_K.copy()
    m.load_state_dict({**m.parameters(), "W_Q": m.W_K, "W_K": m.W_Q})
    np.testing.assert_array_equal(m.W_Q, k)
    np.testing.assert_array_equal(m.W_K, q)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("W_K"), "missing W_K"),
        (lambda s: s.update(W_R=1), "unknown W_R"),
        (lambda s: s.update(W_O=np.zeros((24, 23))), r"W_O must have shape \(24, 24\), got \(24, 23\)"),
        (lambda s: s.update(b_O=np.zeros((24, 1))), r"b_O must have shape \(24,\), got \(24, 1\)"),
    ],
)
def test_a_wrong_state_leaves_the_module_unchanged(change, message):
    m = module(use_bias=True)
    before = m.state_dict()
    state = {name: w + 1 for name, w in before.items()}
    change(state)
    with pytest.raises(ValueError, match=message):
        m.load_state_dict(state)
    for name, w in m.parameters().items():
        np.testing.assert_array_equal(w, before[name])


# --------------------------------------------------------------------------------------------------------------- freeze


def test_freezing_makes_parameters_read_only_until_unfreezing():
    m, X = module(use_bias=True), normal(2, 5, D_MODEL)
    expected = m.forward(X)
    m.freeze()
    assert_same_bits(m.forward(X), expected)
    for name, w in m.parameters().items():
        with pytest.raises(ValueError, match="read-only"):
            w[...] = 0
        with pytest.raises(ValueError, match=f"{name} cannot be assigned: the module is frozen"):
            setattr(m, name, w)
    with pytest.raises(ValueError, match="is frozen"):
        m.load_state_dict(m.state_dict())
    m.unfreeze()
    m.W_Q[0, 0] += 1
    m.b_V = np.zeros(D_MODEL)
    m.forward(X)
    assert m.backward(X).shape == X.shape


def test_freezing_forgets_what_a_forward_kept():
    m, X = module(), normal(2, 5, D_MODEL)
    m.forward(X)
    m.freeze()
    m.unfreeze()
    assert m.intermediates == {}
    with pytest.raises(ValueError, match="backward needs a forward"):
        m.backward(X)


def test_state_dict_of_a_frozen_module_is_writable():
    m = module()
    m.freeze()
    assert all(w.flags.writeable for w in m.state_dict().values())


# --------------------------------------------------------------------------------------------------------------- copies

DUPLICATES = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "oldest pickle": lambda m: pickle.loads(pickle.dumps(m, protocol=2)),
    "deepcopy": copy.deepcopy,
}
every_duplicate = pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES.keys())


@every_duplicate
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_a_copy_gives_the_same_bits_and_is_independent(duplicate, layout):
    m, X = module(use_bias=True, num_kv_heads=2, layout=layout), normal(2, 5, D_MODEL)
    m.forward(X)
    m.backward(X)
    other = duplicate(m)
    assert repr(other) == repr(m)
    assert_same_bits(other.forward(X, is_causal=True), m.forward(X, is_causal=True))
    assert_same_bits(other.backward(X), m.backward(X))
    for name, g in m.gradients().items():
        assert_same_bits(other.gradients()[name], g)
    expected = m.forward(X)
    other.W_Q += 1
    assert_same_bits(m.forward(X), expected)


@every_duplicate
def test_a_copys_parameters_are_still_views(duplicate):
    m, X = module(use_bias=True), normal(2, 5, D_MODEL)
    other = duplicate(m)
    for name in ALL:
        getattr(other, name)[..., 0] += 0.25
        np.testing.assert_allclose(other.forward(X), by_reference(other, X)["output"], rtol=1e-12, atol=1e-12)
    assert np.abs(other.forward(X) - m.forward(X)).max() > 1e-3


@every_duplicate
def test_a_copy_of_a_frozen_module_is_frozen(duplicate):
    m = module(use_bias=True)
    m.freeze()
    other = duplicate(m)
    assert not any(w.flags.writeable for w in other.parameters().values())
    with pytest.raises(ValueError, match="frozen"):
        other.W_Q = m.W_Q


@every_duplicate
@pytest.mark.parametrize("frozen_before", [False, True])
def test_a_copy_can_be_frozen_and_unfrozen(duplicate, frozen_before):
    m = module(use_bias=True)
    if frozen_before:
        m.freeze()
    other = duplicate(m)
    other.freeze()
    other.unfreeze()
    other.W_Q[0, 0] += 1
    other.b_O = np.zeros(D_MODEL)
    assert m.W_Q.flags.writeable is not frozen_before
    assert m.W_Q[0, 0] != other.W_Q[0, 0]


@every_duplicate
def test_a_copy_does_not_carry_what_a_forward_kept(duplicate):
    m, X = module(), normal(2, 5, D_MODEL)
    m.forward(X)
    other = duplicate(m)
    assert other.intermediates == {}
    with pytest.raises(ValueError, match="backward needs a forward"):
        other.backward(X)
    assert m.backward(X).shape == X.shape  # the original still has it


# ----------------------------------------------------------------------------------------------------------- repr, init


def test_repr_shows_the_configuration_and_evaluates_to_a_like_module():
    m = fastmha.MultiHeadAttention(64, 8, num_kv_heads=2, use_bias=True, dtype=np.float64, layout="contiguous")
    text = repr(m)
    parts = "MultiHeadAttention(", "d_model=64", "num_heads=8", "num_kv_heads=2", "use_bias=True", "float64"
    for part in (*parts, '"contiguous"'):
        assert part in text
    like = eval(text, {"MultiHeadAttention": fastmha.MultiHeadAttention, "float64": np.float64})
    assert repr(like) == text
    m.freeze()
    assert "frozen" in repr(m)


@pytest.mark.parametrize("num_kv_heads", [4, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_are_drawn_from_the_seed_in_the_order_q_k_v_o(num_kv_heads, dtype):
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=num_kv_heads, dtype=dtype, rng=7)
    generator = np.random.default_rng(7)
    for name in NAMES[False]:
        w = getattr(m, name)
        fan_in, fan_out = w.shape
        expected = generator.standard_normal((fan_in, fan_out)) * math.sqrt(2 / (fan_in + fan_out))
        np.testing.assert_array_equal(w, expected.astype(dtype), err_msg=name)


def test_float32_weights_are_the_rounded_float64_weights_of_the_same_seed():
    single, double = (fastmha.MultiHeadAttention(D_MODEL, HEADS, dtype=t, rng=3) for t in (np.float32, np.float64))
    for name, w in double.parameters().items():
        np.testing.assert_array_equal(single.parameters()[name], w.astype(np.float32))


def test_a_generator_is_drawn_from_and_none_differs_every_time():
    generator = np.random.default_rng(7)
    a, b = (fastmha.MultiHeadAttention(8, 2, rng=generator) for _ in range(2))
    np.testing.assert_array_equal(a.W_Q, fastmha.MultiHeadAttention(8, 2, rng=7).W_Q)
    assert not np.array_equal(a.W_Q, b.W_Q)
    assert not np.array_equal(fastmha.MultiHeadAttention(8, 2).W_Q, fastmha.MultiHeadAttention(8, 2).W_Q)


@pytest.mark.parametrize("name", NAMES[False])
def test_initial_weights_have_zero_mean_and_the_glorot_deviation(name):
    w = getattr(fastmha.MultiHeadAttention(256, 8, num_kv_heads=2, dtype=np.float64, rng=0), name)
    std = math.sqrt(2 / sum(w.shape))
    standard_error = 1 / math.sqrt(w.size)
    assert abs(w.mean()) < 5 * std * standard_error
    assert abs(w.std() / std - 1) < 5 * standard_error / math.sqrt(2)


def test_biases_begin_at_zero():
    m = fastmha.MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=2, use_bias=True, rng=0)
    for name in ALL[4:]:
        assert not getattr(m, name).any()
