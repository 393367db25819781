"""What the modules refuse: each message names the argument, what was expected and what came."""

from functools import partial

import numpy as np
import pytest
import support
from module_support import ALL, module
from support import raises

import fastmha
from fastmha import MultiHeadAttention

B, L, D_MODEL = 2, 3, 8


normal = partial(support.normal, dtype=np.float32)
X = normal(B, L, D_MODEL)
CONTEXT = normal(B, 5, D_MODEL)


@pytest.fixture
def m():
    return MultiHeadAttention(D_MODEL, 4, num_kv_heads=2, use_bias=True, rng=0)


# ------------------------------------------------------------------------------------------------------- construction

CONSTRUCTION = [
    ((10, 4), {}, ValueError, "d_model must be a multiple of num_heads unless head_dim is given, got d_model 10 and num_heads 4"),
    ((8, 16), {}, ValueError, "d_model must be a multiple of num_heads unless head_dim is given, got d_model 8 and num_heads 16"),
    ((0, 1), {}, ValueError, "d_model must be at least 1, got 0"),
    ((8.0, 1), {}, TypeError, "d_model must be an integer, got 8.0"),
    (("8", 1), {}, TypeError, "d_model must be an integer, got '8'"),
    ((8, 0), {}, ValueError, "num_heads must be at least 1, got 0"),
    ((8, -2), {}, ValueError, "num_heads must be at least 1, got -2"),
    ((8, True), {}, TypeError, "num_heads must be an integer, got True"),
    ((8, None), {}, TypeError, "num_heads must be an integer, got None"),
    ((8, 4), {"num_kv_heads": 3}, ValueError, "num_kv_heads must divide num_heads 4, got 3"),
    ((8, 4), {"num_kv_heads": 8}, ValueError, "num_kv_heads must divide num_heads 4, got 8"),
    ((8, 4), {"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1, got 0"),
    ((8, 4), {"num_kv_heads": 2.0}, TypeError, "num_kv_heads must be an integer, got 2.0"),
    ((8, 4), {"use_bias": "yes"}, ValueError, 'use_bias must be True, False, "qkv" or "out", got \'yes\''),
    ((8, 4), {"dtype": np.int32}, TypeError, "dtype must be float32, float64, float16 or bfloat16, got int32"),
    ((8, 4), {"dtype": np.longdouble}, TypeError, f"dtype must be float32, float64, float16 or bfloat16, got {np.dtype('g')}"),
    ((8, 4), {"dtype": ">f4"}, TypeError, "dtype must be float32, float64, float16 or bfloat16, got >f4"),
    ((8, 4), {"dtype": None}, TypeError, "dtype must be float32, float64, float16 or bfloat16, got None"),
    ((8, 4), {"dtype": "nonsense"}, TypeError, "dtype must be float32, float64, float16 or bfloat16, got 'nonsense'"),
    ((8, 4), {"layout": "BHLD"}, ValueError, 'layout must be "strided", "contiguous" or "auto", got \'BHLD\''),
    ((8, 4), {"layout": None}, ValueError, 'layout must be "strided", "contiguous" or "auto", got None'),
    ((8, 4), {"layout": ["auto"]}, ValueError, 'layout must be "strided", "contiguous" or "auto", got [\'auto\']'),
    ((8, 4), {"algorithm": "fast"}, ValueError, "algorithm must be ... got 'fast'"),
    ((8, 4), {"algorithm": ["tiled"]}, ValueError, "algorithm must be ... got ['tiled']"),
    ((8, 4), {"use_bias": 1}, TypeError, 'use_bias must be True, False, "qkv" or "out", got 1'),
    ((8, 4), {"dtype": "f4,,"}, TypeError, "dtype must be float32, float64, float16 or bfloat16, got 'f4,,'"),
    ((10**5000, 4), {}, ValueError, "d_model must be at most 715827861, got an integer of 16610 bits"),
    ((8, 4), {"rng": -1}, ValueError, "rng must be a seed (ints >= 0), a numpy.random.Generator or None, got -1"),
    ((8, 4), {"rng": "seed"}, TypeError, "rng must be a seed (ints >= 0), ... got 'seed'"),
    ((8, 4), {"rng": True}, TypeError, "rng must be a seed (ints >= 0), ... got True"),
    ((8, 4), {"rng": [1, 2.5]}, TypeError, "rng must be a seed (ints >= 0), ... got [1, 2.5]"),
    ((2**29, 1), {}, ValueError, "d_model 536870912 makes weights (536870912, 1610612736) and ...: beyond any memory"),
]


@pytest.mark.parametrize(("sizes", "keywords", "error", "message"), CONSTRUCTION, ids=[c[3] for c in CONSTRUCTION])
def test_construction(sizes, keywords, error, message):
    with raises(error, message):
        MultiHeadAttention(*sizes, **keywords)


def test_a_module_too_large_for_any_memory_names_the_size():
    with pytest.raises(ValueError, match="d_model"):
        MultiHeadAttention(2**40, 1)


def test_seeds_are_those_of_numpy():
    for seed in (7, np.int64(7), [1, 2**70], np.array([3, 4]), np.random.SeedSequence(5)):
        expected = np.random.default_rng(seed).standard_normal((8, 8)) * np.sqrt(2 / 16)
        np.testing.assert_array_equal(MultiHeadAttention(8, 4, dtype=float, rng=seed).W_Q, expected)


def test_a_list_that_holds_itself_is_no_seed():
    seed = []
    seed.append(seed)
    with raises(ValueError, "rng must be a seed (ints >= 0), a numpy.random.Generator or None, got [[..."):
        MultiHeadAttention(8, 4, rng=seed)


def test_a_self_attention_names_what_it_refuses():
    with raises(TypeError, "use_bias must be True or False, got 'no'"):
        fastmha.SelfAttention(8, 4, 4, use_bias="no")
    with raises(TypeError, "need_weights must be True or False, got 1"):
        fastmha.SelfAttention(8, 4, 4, rng=0).forward(X, need_weights=1)


def test_a_plan_beyond_any_memory_names_its_sizes(m):
    with raises(ValueError, "batch_size 1099511627776 and a length of 1099 tokens are beyond any memory..."):
        m.plan(2**40, 1099)
    with raises(ValueError, "seq_len must be at most 2147483583, got 4294967296"):
        m.plan(1, 2**32)


def test_a_plan_names_the_argument_that_is_wrong():
    m = module(64, 4)
    for arguments, message in (({"batch_size": -1, "seq_len": 3}, "batch_size must be at least 0, got -1"),
                               ({"batch_size": 1, "seq_len": -2}, "seq_len must be at least 0, got -2"),
                               ({"batch_size": 1, "seq_len": 3, "seq_len_k": -3}, "seq_len_k must be at least 0, got -3")):
        with pytest.raises(ValueError, match=message):
            m.plan(**arguments)
    with pytest.raises(TypeError, match=r"seq_len must be an integer, got 2\.5"):
        m.plan(1, 2.5)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "SelfAttention"])
def test_a_module_that_is_called_says_what_to_call(name):
    m = getattr(fastmha, name)(8, 4, *([4] if name == "SelfAttention" else []), rng=0)
    for arguments in ((X,), (X, X, X)):
        with raises(TypeError, f"a {name} is not called itself: call its forward, m.forward(X)"):
            m(*arguments)


# ------------------------------------------------------------------------------------------------------------ forward

FORWARD = [
    ({"X": X[0]}, ValueError, "X must have 3 axes (B, L, d_model), got shape (3, 8)"),
    ({"X": X[None]}, ValueError, "X must have 3 axes (B, L, d_model), got shape (1, 2, 3, 8)"),
    ({"X": 1.0}, ValueError, "X must have 3 axes (B, L, d_model), got shape ()"),
    ({"X": normal(B, L, 9)}, ValueError, "X has width 9 on axis 2 but the module has d_model 8"),
    ({"X": X.astype(complex)}, TypeError, "X must hold real numbers, got dtype complex128"),
    ({"X": X.astype(object)}, TypeError, "X must hold real numbers, got dtype object"),
    ({"X": X.astype(str)}, TypeError, "X must hold real numbers, got dtype <U..."),
    ({"X": None}, TypeError, "X must hold real numbers, got dtype object"),
    ({"X": np.zeros((B, L, D_MODEL), "M8[s]")}, TypeError, "X must hold real numbers, got dtype datetime64[s]"),
    ({"X": [[1, 2], [3]]}, ValueError, "...X..."),
    ({"context": CONTEXT[0]}, ValueError, "context must have 3 axes (B, L, d_model), got shape (5, 8)"),
    ({"context": CONTEXT[:1]}, ValueError, "context has batch size 1 on axis 0 but X has 2"),
    ({"context": normal(B, 5, 7)}, ValueError, "context has width 7 on axis 2 but the module has d_model 8"),
    ({"context": CONTEXT * 1j}, TypeError, "context must hold real numbers, got dtype complex64"),
    ({"mask": np.zeros((4, 4), bool)}, ValueError, "mask of shape (4, 4) does not broadcast to (Lq, Lk) = (3, 3)"),
    (
        {"mask": np.zeros((B, L), bool)}, ValueError,
        "mask of shape (2, 3) does not broadcast to (Lq, Lk) = (3, 3): index a padding mask (B, Lk) as "
        "mask[:, None, None, :]",
    ),
    (
        {"mask": np.zeros((3, 1, L, L), bool)}, ValueError,
        "mask of shape (3, 1, 3, 3) does not broadcast to (B, H, Lq, Lk) = (2, 4, 3, 3)",
    ),
    (
        {"mask": np.zeros((B, 2, L, L), bool)}, ValueError,  # 2 is the number of key/value heads
        "mask of shape (2, 2, 3, 3) does not broadcast to (B, H, Lq, Lk) = (2, 4, 3, 3)",
    ),
    (
        {"mask": np.zeros((L, L), bool), "context": CONTEXT}, ValueError,
        "mask of shape (3, 3) does not broadcast to (Lq, Lk) = (3, 5)",
    ),
    (
        {"mask": np.zeros((B, L, L), bool)}, ValueError,
        "mask must have 2 axes (Lq, Lk) or 4 that broadcast to (B, H, Lq, Lk), got shape (2, 3, 3): index a padding "
        "mask (B, Lk) as mask[:, None, None, :] and a mask (B, Lq, Lk) as mask[:, None]",
    ),
    ({"mask": np.zeros(L, bool)}, ValueError, "mask must have 2 axes (Lq, Lk) or 4 ... got shape (3,)..."),
    ({"mask": np.zeros((L, L), int)}, TypeError, "mask must be bool (True = may not attend) or float32 ... got int64"),
    ({"mask": np.zeros((L, L))}, TypeError, "mask must be bool (True = may not attend) or float32 ... got float64"),
    ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
    ({"is_causal": None}, TypeError, "is_causal must be True or False, got None"),
    (
        {"is_causal": True, "context": CONTEXT}, ValueError,
        "offset must be given with is_causal, window or alibi where q has length 3 and k has length 5: 0 lets query 0 see "
        "key 0, Lk - Lq = 2 lets the last query see the last key",
    ),
    ({"window": (1, 1), "context": CONTEXT}, ValueError, "offset must be given with is_causal, window or alibi where ..."),
    ({"offset": 1}, ValueError, "offset is given (1) but none of is_causal, window and alibi, which it would shift"),
    ({"is_causal": True, "offset": 1.5}, TypeError, "offset must be an int or a (B,) array of ints, got 1.5"),
    ({"is_causal": True, "offset": True}, TypeError, "offset must be an int or a (B,) array of ints, got True"),
    (
        {"is_causal": True, "offset": [0, 1, 2]}, ValueError,
        "offset must be an int or a (B,) = (2,) array of ints, got shape (3,)",
    ),
    ({"is_causal": True, "offset": 2**62}, ValueError, "offset must lie within +-2**61, got 4611686018427387904"),
    ({"window": 3}, TypeError, "window must be None or a pair (left, right) of ints >= 0 or None, got 3"),
    ({"window": (1, 2, 3)}, TypeError, "window must be None or a pair (left, right) ... got (1, 2, 3)"),
    ({"window": (-1, 0)}, ValueError, "window[0] (left) must be at least 0, got -1: None leaves a side unbounded"),
    ({"window": (0, 1.5)}, TypeError, "window[1] (right) must be an integer, got 1.5"),
    ({"key_padding_lengths": [4, 1]}, ValueError, "key_padding_lengths must lie in [0, Lk] = [0, 3], got 4 at index 0"),
    ({"key_padding_lengths": [1, -1]}, ValueError, "key_padding_lengths must ... = [0, 3], got -1 at index 1"),
    ({"key_padding_lengths": [1]}, ValueError, "key_padding_lengths must have shape (B,) = (2,), got (1,)"),
    ({"key_padding_lengths": 3}, ValueError, "key_padding_lengths must have shape (B,) = (2,), got ()"),
    ({"key_padding_lengths": [1.0, 2.0]}, TypeError, "key_padding_lengths must be integers, got dtype float64"),
    ({"softcap": 0}, ValueError, "softcap must be a finite number > 0 or None, got 0"),
    ({"softcap": -1.0}, ValueError, "softcap must be a finite number > 0 or None, got -1.0"),
    ({"softcap": np.inf}, ValueError, "softcap must be a finite number > 0 or None, got inf"),
    ({"softcap": "1"}, TypeError, "softcap must be a finite number > 0 or None, got '1'"),
    ({"need_weights": None}, TypeError, "need_weights must be True or False, got None"),
    ({"training": 0}, TypeError, "training must be True or False, got 0"),
    ({"training": "no"}, TypeError, "training must be True or False, got 'no'"),
    ({"need_weights": 1}, TypeError, "need_weights must be True or False, got 1"),
    ({"is_causal": True, "offset": 10**5000}, ValueError, "offset must lie within +-2**61, got an integer of 16610 bits"),
    ({"mask": np.ma.masked_array(np.zeros((L, L), bool))}, TypeError, "mask is a masked array, whose mask would be lost: ..."),
    (
        {"X": np.ma.masked_array(X)}, TypeError,
        "X is a masked array, whose mask would be lost: pass X.filled(...)",
    ),
    ({"context": np.ma.masked_array(CONTEXT)}, TypeError, "context is a masked array, ... pass context.filled(...)"),
    ({"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
    ({"num_threads": 1.0}, TypeError, "num_threads must be an integer, got 1.0"),
    ({"num_threads": True}, TypeError, "num_threads must be an integer, got True"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), FORWARD, ids=[case[2] for case in FORWARD])
def test_forward_and_its_failure_changes_nothing(m, arguments, error, message):
    m.forward(X)
    before, grad = dict(m.__dict__), normal(B, L, D_MODEL)
    with raises(error, message):
        m.forward(**{"X": X, **arguments})
    assert m.__dict__ == before
    np.testing.assert_array_equal(m.intermediates["X"], X)
    assert m.backward(grad).shape == X.shape  # of the forward that went well


# ----------------------------------------------------------------------------------------------------------- backward


def test_backward_without_forward(m):
    with raises(ValueError, "backward needs a forward with training=True (and without a cache) before it"):
        m.backward(X)


def test_backward_after_a_forward_that_is_not_training(m):
    m.forward(X, training=False)
    with raises(ValueError, "backward needs a forward with training=True (and without a cache) before it"):
        m.backward(X)


def test_backward_of_a_frozen_module(m):
    m.forward(X)
    m.freeze()
    with raises(ValueError, "backward needs a module that is not frozen: call unfreeze() and forward first"):
        m.backward(X)
    m.forward(X)
    with raises(ValueError, "backward needs a module that is not frozen: call unfreeze() and forward first"):
        m.backward(X)


BACKWARD = [
    (X[:1], ValueError, "grad_output must have the output's shape (2, 3, 8), got (1, 3, 8)"),
    (X[:, :, :4], ValueError, "grad_output must have the output's shape (2, 3, 8), got (2, 3, 4)"),
    (X[0], ValueError, "grad_output must have 3 axes (B, L, d_out), got shape (3, 8)"),
    (1.0, ValueError, "grad_output must have 3 axes (B, L, d_out), got shape ()"),
    (X * 1j, TypeError, "grad_output must hold real numbers, got dtype complex64"),
    (None, TypeError, "grad_output must hold real numbers, got dtype object"),
    ([[1, 2], [3]], ValueError, "...grad_output..."),
]


@pytest.mark.parametrize(("grad_output", "error", "message"), BACKWARD, ids=[case[2] for case in BACKWARD])
def test_gradient_of_another_shape_or_kind_leaves_the_gradients(m, grad_output, error, message):
    m.forward(X)
    m.backward(X)
    before = {name: g.copy() for name, g in m.gradients().items()}
    with raises(error, message):
        m.backward(grad_output)
    for name, g in m.gradients().items():
        np.testing.assert_array_equal(g, before[name])


def test_backward_checks_num_threads(m):
    m.forward(X)
    with raises(ValueError, "num_threads must be at least 1, got 0"):
        m.backward(X, num_threads=0)


def test_gradients_before_any_backward(m):
    m.forward(X)
    with raises(ValueError, "there are no gradients yet: call forward and backward first"):
        m.gradients()


@pytest.mark.parametrize("name", ALL)
def test_assigning_a_gradient(m, name):
    with raises(AttributeError, f"grad_{name} is written by backward and cannot be assigned"):
        setattr(m, f"grad_{name}", getattr(m, name))


def test_infinite_gradients_go_through_without_a_warning(m):
    """inf - inf in the sum of a bias's gradient is NaN, as in every product; a warning would be an error here."""
    m.forward(X)
    grad = np.ones_like(X)
    grad[0], grad[1] = np.inf, -np.inf
    m.backward(grad)
    assert np.isnan(m.grad_b_O).all()
    assert np.isnan(m.grad_W_O).any()


# --------------------------------------------------------------------------------------------------------- parameters


def assert_refused(m, assign, error, message):
    """An error, and not one parameter changed."""
    before = m.state_dict()
    with raises(error, message):
        assign()
    for name, w in m.parameters().items():
        np.testing.assert_array_equal(w, before[name])


@pytest.mark.parametrize("name", ALL)
def test_weights_of_another_shape(m, name):
    shape = getattr(m, name).shape
    wrong = (*shape[:-1], shape[-1] + 1)
    message = f"{name} must have shape {shape}, got {wrong}"
    assert_refused(m, lambda: setattr(m, name, np.zeros(wrong)), ValueError, message)


@pytest.mark.parametrize("value", [1.0, np.zeros(8), np.zeros((1, 8)), np.zeros((8, 4))])
def test_weights_are_not_broadcast(m, value):
    message = f"W_Q must have shape (8, 8), got {np.shape(value)}"
    assert_refused(m, lambda: setattr(m, "W_Q", value), ValueError, message)


def test_transposed_weights(m):
    assert_refused(m, lambda: setattr(m, "W_K", m.W_K.T), ValueError, "W_K must have shape (8, 4), got (4, 8)")


@pytest.mark.parametrize(
    ("value", "what"),
    [(np.zeros((8, 8), complex), "complex128"), (np.zeros((8, 8), object), "object"), (None, "object"), ("x", "<U1")],
    ids=["complex", "object", "None", "str"],
)
def test_weights_that_are_not_real(m, value, what):
    message = f"W_Q must hold real numbers, got dtype {what}"
    assert_refused(m, lambda: setattr(m, "W_Q", value), TypeError, message)


def test_ragged_weights(m):
    assert_refused(m, lambda: setattr(m, "W_Q", [[1, 2], [3]]), ValueError, "...W_Q...")


@pytest.mark.parametrize("name", ALL[4:])
def test_biases_of_a_module_without_biases(name):
    plain = MultiHeadAttention(D_MODEL, 4)
    with raises(ValueError, f"{name} cannot be assigned: the module has no biases (use_bias=False)"):
        setattr(plain, name, np.zeros(D_MODEL))


@pytest.mark.parametrize("name", ALL)
def test_assignment_to_a_frozen_module(m, name):
    value = np.zeros_like(getattr(m, name))
    m.freeze()
    message = f"{name} cannot be assigned: the module is frozen, call unfreeze() first"
    assert_refused(m, lambda: setattr(m, name, value), ValueError, message)


def test_loading_into_a_frozen_module(m):
    state = {name: w + 1 for name, w in m.state_dict().items()}
    m.freeze()
    assert_refused(m, lambda: m.load_state_dict(state), ValueError, "...the module is frozen, call unfreeze() first")


HOLD = "state must hold W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O: "
STATES = [
    (lambda s: s.pop("b_K"), ValueError, HOLD + "missing b_K"),
    (lambda s: (s.pop("W_Q"), s.pop("W_O")), ValueError, HOLD + "missing W_Q, W_O"),
    (lambda s: s.update(extra=1), ValueError, HOLD + "unknown extra"),
    (lambda s: s.update(q=s.pop("W_Q")), ValueError, HOLD + "missing W_Q; unknown q"),
    (lambda s: s.update({3: 4}), ValueError, HOLD + "unknown 3"),
    (lambda s: s.update(b_O=np.zeros(9)), ValueError, "b_O must have shape (8,), got (9,)"),
    (lambda s: s.update(b_O=1j * np.zeros(8)), TypeError, "b_O must hold real numbers, got dtype complex128"),
]


@pytest.mark.parametrize(("change", "error", "message"), STATES, ids=[s[2] for s in STATES])
def test_loading_a_wrong_state_changes_nothing(m, change, error, message):
    state = {name: w + 1 for name, w in m.state_dict().items()}
    change(state)
    assert_refused(m, lambda: m.load_state_dict(state), error, message)


def test_loading_ten_thousand_unknown_names_says_few_of_them(m):
    state = m.state_dict() | {f"layer.{i}": 0 for i in range(10_000)}
    with pytest.raises(ValueError, match=r"unknown layer\.0, layer\.1, .*\.\.\.$") as caught:
        m.load_state_dict(state)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("state", [None, 3, [1, 2]])
def test_loading_what_is_not_a_dict(m, state):
    assert_refused(m, lambda: m.load_state_dict(state), TypeError, "...state...")


def test_loading_biases_into_a_module_without():
    plain = MultiHeadAttention(D_MODEL, 4)
    state = MultiHeadAttention(D_MODEL, 4, use_bias=True).state_dict()
    with raises(ValueError, "state must hold W_Q, W_K, W_V, W_O: unknown b_Q, b_K, b_V, b_O"):
        plain.load_state_dict(state)


# ------------------------------------------------------------------------------------------------------------ threads


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "num_threads must be at least 1, got 0"),
        (-1, ValueError, "num_threads must be at least 1, got -1"),
        (2.0, TypeError, "num_threads must be an integer, got 2.0"),
        ("2", TypeError, "num_threads must be an integer, got '2'"),
        (True, TypeError, "num_threads must be an integer, got True"),
    ],
)
def test_set_num_threads(value, error, message):
    before = fastmha.get_num_threads()
    with raises(error, message):
        fastmha.set_num_threads(value)
    assert fastmha.get_num_threads() == before
