"""Heads of a width of their own, contexts of their own widths, biases of some projections: MultiHeadAttention's free shapes."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
from support import normal, raises, same_bits

import fastmha
from fastmha import KVCache, MultiHeadAttention, algorithms, reference
from fastmha.algorithms import product_by_blas

B, L, LK = 2, 5, 7
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5}
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O")
BIASES = {False: (), True: ("b_Q", "b_K", "b_V", "b_O"), "qkv": ("b_Q", "b_K", "b_V"), "out": ("b_O",)}
SHAPES = {
    "head_dim": ((10, 4), {"head_dim": 3}),
    "head_dim, grouped, b_Q b_K b_V": ((6, 4), {"head_dim": 8, "num_kv_heads": 2, "use_bias": "qkv"}),
    "d_model, b_O": ((12, 4), {"use_bias": "out"}),
    "kdim = vdim": ((12, 4), {"kdim": 7, "vdim": 7, "use_bias": True}),
    "kdim, b_O": ((12, 4), {"kdim": 7, "num_kv_heads": 1, "use_bias": "out"}),
    "vdim": ((12, 4), {"vdim": 5}),
    "all": ((10, 4), {"head_dim": 5, "num_kv_heads": 2, "kdim": 7, "vdim": 3, "use_bias": "qkv"}),
    "kdim = vdim, head_dim, b_O": ((10, 2), {"head_dim": 16, "kdim": 9, "vdim": 9, "use_bias": "out"}),
}
CONTEXTS = ("none", "one", "pair")


def module(shape, dtype=np.float64, **keywords):
    """A module with biases that are not zero."""
    sizes, more = SHAPES[shape]
    m = MultiHeadAttention(*sizes, dtype=dtype, rng=0, **more, **keywords)
    for i, name in enumerate(BIASES[m.use_bias]):
        setattr(m, name, normal(*getattr(m, name).shape, seed=10 + i))
    return m


def takes(shape, context):
    widths = {SHAPES[shape][0][0] if n is None else n for n in (SHAPES[shape][1].get("kdim"), SHAPES[shape][1].get("vdim"))}
    return context == "pair" or (len(widths) == 1 and (context == "one" or widths == {SHAPES[shape][0][0]}))


def every_shape(*contexts):
    """All shapes with those kinds of context that they take."""
    cases = [(shape, context) for shape in SHAPES for context in contexts or CONTEXTS if takes(shape, context)]
    return pytest.mark.parametrize(("shape", "context"), cases, ids=[f"{shape}; {context}" for shape, context in cases])


def drawn(m, context, batch=B, length=L, length_k=LK):
    """X and what is given as context."""
    X = normal(batch, length, m.d_model, dtype=m.dtype)
    keys, values = (normal(batch, length_k, n, seed=i, dtype=m.dtype) for i, n in ((2, m.kdim), (3, m.vdim)))
    return X, {"none": None, "one": keys, "pair": (keys, values)}[context]


def composed(m, X, context, grad_output, **rules):
    """Output, weights and every gradient in plain float64 NumPy."""
    W = {name: w.astype(np.float64) for name, w in m.parameters().items()}
    b = {letter: W.get(f"b_{letter}", 0.0) for letter in "QKVO"}
    X, g = X.astype(np.float64), grad_output.astype(np.float64)
    keys, values = (X, X) if context is None else context if isinstance(context, tuple) else (context, context)
    source = {"Q": X, "K": keys.astype(np.float64), "V": values.astype(np.float64)}
    heads = {"Q": m.num_heads, "K": m.num_kv_heads, "V": m.num_kv_heads}
    if rules.get("mask") is not None and rules["mask"].dtype != bool:
        rules["mask"] = rules["mask"].astype(np.float64)
    q, k, v = (reference.split_heads(source[x] @ W[f"W_{x}"] + b[x], heads[x]) for x in "QKV")
    out, lse = reference.attention(q, k, v, return_lse=True, **rules)
    concat = reference.combine_heads(out)
    grads = reference.attention_backward(reference.split_heads(g @ W["W_O"].T, m.num_heads), q, k, v, out, lse, **rules)
    grads = {x: reference.combine_heads(grad) for x, grad in zip("QKV", grads)} | {"O": g}
    source["O"] = concat
    of = {f"W_{x}": np.einsum("bli,blj->ij", source[x], grads[x]) for x in "QKVO"}
    of |= {f"b_{x}": grads[x].sum((0, 1)) for x in "QKVO" if f"b_{x}" in W}
    through = {x: grads[x] @ W[f"W_{x}"].T for x in "QKV"}
    if context is None:
        of["X"] = through["Q"] + through["K"] + through["V"]
    else:
        of["X"] = through["Q"]
        of["context"] = (through["K"], through["V"]) if isinstance(context, tuple) else through["K"] + through["V"]
    return concat @ W["W_O"] + b["O"], reference.attention_weights(q, k, **rules), of


def assert_close(got, wanted, dtype, scale=1.0, message=""):
    np.testing.assert_allclose(got / scale, wanted / scale, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], err_msg=message)


def largest(x):
    return max(map(largest, x)) if isinstance(x, tuple) else float(np.abs(x).max(initial=0))


def assert_equals_composition(m, X, context, num_threads=None, need_weights=True, **rules):
    dtype, grad_output = m.dtype.type, normal(*X.shape, seed=99, dtype=m.dtype)
    wanted, weights_wanted, of = composed(m, X, context, grad_output, **rules)
    if need_weights:
        out, weights = m.forward(X, context=context, need_weights=True, num_threads=num_threads, **rules)
        assert_close(out, wanted, dtype)
        assert_close(weights, weights_wanted, dtype)
    inferred = m.forward(X, context=context, num_threads=num_threads, training=False, **rules)
    out = m.forward(X, context=context, num_threads=num_threads, **rules)
    assert same_bits(out, inferred)
    assert_close(out, wanted, dtype)
    scale = max(1.0, *map(largest, of.values()))
    grad_X = m.backward(grad_output, num_threads=num_threads)
    assert out.dtype == grad_X.dtype == m.dtype
    assert_close(grad_X, of.pop("X"), dtype, scale)
    grads_wanted = of.pop("context", None)
    if isinstance(context, tuple):
        assert isinstance(m.grad_context, tuple)
        for got, grad in zip(m.grad_context, grads_wanted, strict=True):
            assert_close(got, grad, dtype, scale)
    elif context is None:
        assert m.grad_context is None
    else:
        assert_close(m.grad_context, grads_wanted, dtype, scale)
    assert m.gradients().keys() == of.keys()
    for name, gradient in m.gradients().items():
        assert gradient.dtype == m.dtype
        assert_close(gradient, of[name], dtype, scale, name)


# --------------------------------------------------------------------------------------------- the plain composition


def rules_of(name, H, Lk):
    additive = np.where(normal(B, H, L, Lk, seed=5) > 1, -np.inf, normal(B, H, L, Lk, seed=4))
    return {
        "none": {},
        "causal": {"is_causal": True, "offset": Lk - L},
        "window": {"window": (2, 1), "offset": np.array([1, 0])},
        "padding": {"key_padding_lengths": np.array([Lk, 2])},
        "bool mask": {"mask": normal(L, Lk, seed=6) > 0.5},
        "additive mask, softcap": {"mask": additive, "softcap": 0.9},
        "together": {"mask": additive, "is_causal": True, "offset": np.array([1, 2]), "window": (3, None),
                     "key_padding_lengths": np.array([Lk - 1, 3]), "softcap": 2.0},
    }[name]  # fmt: skip


RULES = ("none", "causal", "window", "padding", "bool mask", "additive mask, softcap", "together")


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
@every_shape()
def test_equals_the_composition(shape, context, layout, rules):
    m = module(shape, layout=layout)
    X, given = drawn(m, context)
    assert_equals_composition(m, X, given, **rules_of(rules, m.num_heads, L if given is None else LK))


@pytest.mark.parametrize("algorithm", algorithms.ALGORITHMS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_shape()
def test_every_algorithm_and_dtype_equals_the_composition(shape, context, dtype, algorithm):
    turn = len(shape) + len(context) + len(algorithm)
    m = module(shape, dtype, algorithm=algorithm, layout=("strided", "contiguous", "auto")[turn % 3])
    X, given = drawn(m, context)
    rules = rules_of(("causal", "window", "padding")[turn // 3 % 3], m.num_heads, L if given is None else LK)
    assert_equals_composition(m, X, given, 1 + turn % 2, need_weights=algorithm != "decode", **rules)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_shape()
def test_lengths_that_take_several_blocks_equal_the_composition(shape, context, dtype):
    m = module(shape, dtype)
    X, given = drawn(m, context, 3, 130, 270)
    assert_equals_composition(m, X, given, num_threads=2, is_causal=True, offset=0)


@pytest.mark.parametrize("shape", ["head_dim", "head_dim, grouped, b_Q b_K b_V"])
def test_transform_qk_sees_heads_of_their_own_width(shape):
    m, seen = module(shape), []

    def stretch(q, k, positions):
        seen.append((q.shape, k.shape))
        return q * 2, k / 2

    stretch.backward = lambda grad_q, grad_k, positions: (grad_q * 2, grad_k / 2)
    X, _ = drawn(m, "none")
    expected, grads_expected = m.forward(X), [m.backward(X), *map(np.copy, m.gradients().values())]
    assert_close(m.forward(X, transform_qk=stretch), expected, np.float64)
    for got, wanted in zip([m.backward(X), *m.gradients().values()], grads_expected, strict=True):
        assert_close(got, wanted, np.float64)
    assert seen == [((B, m.num_heads, L, m.head_dim), (B, m.num_kv_heads, L, m.head_dim))]


@every_shape("one", "pair")
def test_bits_do_not_depend_on_the_number_of_threads(shape, context):
    m = module(shape, np.float32)
    X, given = drawn(m, context, 3, 70, 300)

    def results(num_threads):
        out, grad_X = m.forward(X, context=given, num_threads=num_threads), m.backward(X, num_threads=num_threads)
        grads = m.grad_context if context == "pair" else (m.grad_context,)
        return [out, grad_X, *grads, *map(np.copy, m.gradients().values())]

    expected = results(1)
    for num_threads in (2, 3):
        assert all(itertools.starmap(same_bits, zip(results(num_threads), expected, strict=True)))


# ---------------------------------------------------------------------------------------------------------- contexts


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if takes(shape, "one")])
def test_a_pair_of_one_array_twice_is_that_array(shape):
    m = module(shape)
    X, C = drawn(m, "one")
    expected, grad_X = m.forward(X, context=C), m.backward(X)
    grad_C, of = m.grad_context, {name: g.copy() for name, g in m.gradients().items()}
    assert_close(m.forward(X, context=(C, C)), expected, np.float64)
    assert_close(m.backward(X), grad_X, np.float64)
    assert_close(sum(m.grad_context), grad_C, np.float64)
    for name, g in m.gradients().items():
        assert_close(g, of[name], np.float64, message=name)


def test_widths_of_d_model_given_by_name_change_nothing():
    X, C = normal(B, L, 12), normal(B, LK, 12, seed=2)
    plain, named = (MultiHeadAttention(12, 4, dtype=float, rng=3, **more) for more in
                    ({}, {"head_dim": 3, "kdim": 12, "vdim": 12}))  # fmt: skip
    assert repr(plain) == repr(named)
    for context in (None, C):
        assert same_bits(plain.forward(X, context=context), named.forward(X, context=context))
        assert same_bits(plain.backward(X), named.backward(X))
    assert np.shares_memory(named.W_Q.base, named.W_V.base)


@pytest.mark.parametrize("kind", ["list", "int16", ">f8", "every second column", "read-only", "unaligned"])
def test_a_pair_of_any_real_arrays_is_taken(kind):
    m = module("all")
    X, pair = drawn(m, "pair")
    pair = tuple(np.round(4 * x) for x in pair)

    def other(x):
        if kind == "unaligned":
            memory = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
            memory[...] = x
            return memory
        if kind == "every second column":
            return np.repeat(x, 2, axis=2)[..., ::2]
        x = x.tolist() if kind == "list" else x.copy() if kind == "read-only" else x.astype(kind)
        if kind == "read-only":
            x.flags.writeable = False
        return x

    expected = m.forward(X, context=pair)
    assert same_bits(m.forward(X, context=tuple(map(other, pair))), expected)


@pytest.mark.parametrize(("batch", "length", "length_k"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
@every_shape("one", "pair")
def test_empty_contexts_give_the_output_bias_and_no_gradient(shape, context, layout, batch, length, length_k):
    m = module(shape, layout=layout)
    X, given = drawn(m, context)
    m.forward(X, context=given)
    m.backward(X)  # leaves numbers that must be overwritten
    X, given = drawn(m, context, batch, length, length_k)
    out, weights = m.forward(X, context=given, need_weights=True)
    assert weights.shape == (batch, m.num_heads, length, length_k)
    if not length_k:
        np.testing.assert_array_equal(out, np.broadcast_to(0.0 if m.b_O is None else m.b_O, out.shape))
    m.backward(out)
    for name, g in m.gradients().items():
        assert (name in ("W_O", "b_O") and out.size) or not g.any(), name
    for x, g in zip(given if context == "pair" else (given,), m.grad_context if context == "pair" else (m.grad_context,)):
        assert g.shape == x.shape
        assert not g.any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every_shape("one", "pair")
def test_a_projected_context_equals_the_context(shape, context, dtype):
    m = module(shape, dtype)
    X, given = drawn(m, context)
    rules = {"key_padding_lengths": np.array([LK, 3]), "is_causal": True, "offset": 1}
    cache = m.project_context(given)
    assert (cache.num_kv_heads, cache.head_dim, cache.length, cache.capacity) == (m.num_kv_heads, m.head_dim, LK, LK)
    assert_close(m.forward(X, context=cache, **rules), m.forward(X, context=given, **rules), dtype)


def test_the_layout_of_a_plan_is_what_a_context_of_two_widths_is_projected_in():
    m = MultiHeadAttention(96, 6, head_dim=32, kdim=40, vdim=24, rng=0)
    for length, length_k in ((3, 300), (300, 3), (0, 4)):
        X, given = drawn(m, "pair", 2, length, length_k)
        m.forward(X, context=given)
        found = m.plan(2, length, seq_len_k=length_k, backward=True)
        contiguous = m.intermediates["K"].strides[2] == 32 * 4
        assert found.layout == ("contiguous" if contiguous else "strided")


# --------------------------------------------------------------------------------------------------------- parameters


def shapes_of(m):
    H, Hkv, D = m.num_heads, m.num_kv_heads, m.head_dim
    weights = {"W_Q": (m.d_model, H * D), "W_K": (m.kdim, Hkv * D), "W_V": (m.vdim, Hkv * D), "W_O": (H * D, m.d_model)}
    biases = {"b_Q": (H * D,), "b_K": (Hkv * D,), "b_V": (Hkv * D,), "b_O": (m.d_model,)}
    return weights | {name: biases[name] for name in BIASES[m.use_bias]}


@every_shape("pair")
def test_parameters_have_their_shapes_in_their_order(shape, context):
    m = module(shape)
    expected = shapes_of(m)
    X, given = drawn(m, context)
    m.forward(X, context=given)
    m.backward(X)
    for arrays in (m.parameters(), m.gradients(), m.state_dict()):
        assert [(name, x.shape) for name, x in arrays.items()] == list(expected.items())
    assert m.num_parameters == sum(map(math.prod, expected.values()))
    for name in BIASES[True]:
        if name not in expected:
            assert getattr(m, name) is None
            assert getattr(m, f"grad_{name}") is None


@pytest.mark.parametrize("use_bias", BIASES)
def test_biases_that_are_not_there_are_zero(use_bias):
    X = normal(B, L, 12)
    full, some = (MultiHeadAttention(12, 4, use_bias=u, dtype=float, rng=0) for u in (True, use_bias))
    for i, name in enumerate(BIASES[use_bias]):
        b = normal(12, seed=20 + i)
        setattr(full, name, b)
        setattr(some, name, b)
    np.testing.assert_array_equal(full.forward(X), some.forward(X))
    np.testing.assert_array_equal(full.backward(X), some.backward(X))
    for name, g in some.gradients().items():
        np.testing.assert_array_equal(g, full.gradients()[name], err_msg=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_drawn_from_the_seed_in_the_order_q_k_v_o(shape):
    sizes, more = SHAPES[shape]
    m, generator = MultiHeadAttention(*sizes, rng=7, **more), np.random.default_rng(7)
    for name, (fan_in, fan_out) in itertools.islice(shapes_of(m).items(), 4):
        expected = generator.standard_normal((fan_in, fan_out)) * math.sqrt(2 / (fan_in + fan_out))
        np.testing.assert_array_equal(getattr(m, name), expected.astype(np.float32), err_msg=name)
    assert not any(getattr(m, name).any() for name in BIASES[m.use_bias])


@pytest.mark.parametrize(
    ("shape", "name"),
    [(shape, name) for shape, (_, more) in SHAPES.items() for name in (*WEIGHTS, *BIASES[more.get("use_bias", False)])],
)
def test_writing_into_a_parameter_and_assigning_to_it_take_effect(shape, name):
    m = module(shape)
    X, given = drawn(m, "pair")
    others = {other: w.copy() for other, w in m.parameters().items() if other != name}
    view = getattr(m, name)
    view[..., 0] += 0.5
    m.parameters()[name][..., 1] -= 0.5
    assert_close(m.forward(X, context=given), composed(m, X, given, X)[0], np.float64)
    value = normal(*view.shape, seed=8)
    setattr(m, name, value)
    np.testing.assert_array_equal(view, value)
    value[...] = np.nan  # the module has its own copy
    assert_close(m.forward(X, context=given), composed(m, X, given, X)[0], np.float64)
    wrong = (*view.shape[:-1], view.shape[-1] + 1)
    with raises(ValueError, f"{name} must have shape {view.shape}, got {wrong}"):
        setattr(m, name, np.zeros(wrong))
    for other, w in others.items():
        np.testing.assert_array_equal(getattr(m, other), w)


@every_shape("pair")
def test_gradients_by_name_are_views_that_the_next_backward_overwrites(shape, context):
    m = module(shape)
    X, given = drawn(m, context)
    m.forward(X, context=given)
    m.backward(X)
    views = {name: getattr(m, f"grad_{name}") for name in m.parameters()}
    m.backward(2 * X)
    for name, g in m.gradients().items():
        assert np.shares_memory(g, views[name])
        assert same_bits(g, views[name])


@pytest.mark.parametrize(
    ("use_bias", "name", "has"), [("qkv", "b_O", "b_Q, b_K, b_V"), ("out", "b_Q", "b_O"), ("out", "b_V", "b_O")]
)
def test_a_bias_that_is_not_there_cannot_be_assigned(use_bias, name, has):
    m = MultiHeadAttention(8, 2, use_bias=use_bias)
    with raises(ValueError, f'{name} cannot be assigned: the module has {has} (use_bias="{use_bias}")'):
        setattr(m, name, np.zeros(8))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_state_goes_into_a_like_module_and_into_no_other(shape):
    m = module(shape)
    sizes, more = SHAPES[shape]
    other = MultiHeadAttention(*sizes, dtype=float, rng=1, **more)
    state = m.state_dict()
    other.load_state_dict(state)
    X, given = drawn(m, "pair")
    assert same_bits(other.forward(X, context=given), m.forward(X, context=given))
    assert not any(np.shares_memory(w, getattr(m, name)) for name, w in state.items())
    held = ", ".join(BIASES[m.use_bias])
    wrong = next(name for name in ("b_O", "b_Q") if name not in state) if m.use_bias is not True else "b_R"
    with raises(ValueError, f"state must hold W_Q, W_K, W_V, W_O{held and ', ' + held}: unknown {wrong}"):
        m.load_state_dict({**state, wrong: np.zeros(8)})
    m.load_state_dict({**m.parameters(), "W_K": m.W_K[::-1], "W_V": m.W_V[:, ::-1]})  # of its own memory
    np.testing.assert_array_equal(m.W_K, state["W_K"][::-1])
    np.testing.assert_array_equal(m.W_V, state["W_V"][:, ::-1])


DUPLICATES = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "newest pickle": lambda m: pickle.loads(pickle.dumps(m, protocol=5)),  # brings a frozen module's memory as bytes
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_gives_the_same_bits_is_independent_and_its_parameters_are_views(shape, duplicate, frozen):
    m = module(shape)
    X, given = drawn(m, "pair")
    expected = m.forward(X, context=given)
    m.backward(X)
    if frozen:
        m.freeze()
    other = duplicate(m)
    assert repr(other) == repr(m)
    assert same_bits(other.forward(X, context=given), expected)
    for name, g in m.gradients().items():
        assert same_bits(other.gradients()[name], g)
    for name in m.parameters():
        if frozen:
            with raises(ValueError, f"{name} cannot be assigned: the module is frozen, call unfreeze() first"):
                setattr(other, name, m.parameters()[name])
            assert not getattr(other, name).flags.writeable
    other.unfreeze()
    for name in other.parameters():
        getattr(other, name)[..., 0] += 0.25
        assert_close(other.forward(X, context=given), composed(other, X, given, X)[0], np.float64)
    assert same_bits(m.forward(X, context=given), expected)


FROZEN = {
    "kdim = vdim": {"head_dim": 32, "kdim": 40, "vdim": 40, "use_bias": True},
    "kdim, vdim": {"head_dim": 32, "num_kv_heads": 2, "kdim": 40, "vdim": 70, "use_bias": "qkv"},
    "odd": {"head_dim": 7, "kdim": 33, "vdim": 5, "use_bias": "out"},
}


@pytest.mark.parametrize("keywords", FROZEN.values(), ids=FROZEN)
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_a_frozen_module_gives_the_output_of_one_that_is_not_from_packed_weights(keywords, layout):
    m = MultiHeadAttention(48, 4, layout=layout, rng=0, **keywords)
    X, given = drawn(m, "pair", 2, 40, 70)
    if m.kdim == m.vdim:
        given = given[0]
    expected = m.forward(X, context=given)
    m.freeze()
    if product_by_blas(2):
        assert m._packed == {}
    else:
        held = {"W_in": m.W_Q, "W_out": m.W_O, **{f"W_{letters}": W for letters, W in m._W_context.items()}}
        assert m._packed.keys() == held.keys()
        assert all(same_bits(m._packed[name].panels, algorithms.packed_weights(W)) for name, W in held.items())
    np.testing.assert_allclose(m.forward(X, context=given, training=False), expected, rtol=0, atol=1e-5)
    if not product_by_blas(2):
        assert same_bits(m.forward(X, context=given, training=False), expected)
    for w in m.parameters().values():
        with pytest.raises(ValueError, match="read-only"):
            w[...] = 0
    with raises(ValueError, "backward needs a module that is not frozen: call unfreeze() and forward first"):
        m.backward(X)
    m.unfreeze()
    assert m._packed == {}
    m.W_V[...] = 0
    assert not (m.forward(X, context=given, training=False) - (0 if m.b_O is None else m.b_O)).any()


# ---------------------------------------------------------------------------------------------------------- the words

TEXTS = {
    "d_model=64, num_heads=8, use_bias=False, ": {},
    "d_model=64, num_heads=8, head_dim=16, use_bias=False, ": {"head_dim": 16},
    'd_model=64, num_heads=8, use_bias="qkv", ': {"use_bias": "qkv", "head_dim": 8},
    'd_model=64, num_heads=8, num_kv_heads=2, head_dim=4, kdim=5, vdim=6, use_bias="out", ': {
        "num_kv_heads": 2, "head_dim": 4, "kdim": 5, "vdim": 6, "use_bias": "out"},
    "d_model=64, num_heads=7, head_dim=9, vdim=6, use_bias=True, ": {
        "num_heads": 7, "head_dim": 9, "kdim": 64, "vdim": 6, "use_bias": np.True_},
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_repr_adds_what_is_not_the_default_and_evaluates_to_a_like_module(text):
    m = MultiHeadAttention(64, **({"num_heads": 8} | TEXTS[text]))
    assert repr(m) == f'MultiHeadAttention({text}dtype=float32, layout="auto", algorithm="auto")'
    assert repr(eval(repr(m), {"MultiHeadAttention": MultiHeadAttention, "float32": np.float32})) == repr(m)


CONSTRUCTION = [
    ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
    ({"head_dim": 2.0}, TypeError, "head_dim must be an integer, got 2.0"),
    ({"head_dim": True}, TypeError, "head_dim must be an integer, got True"),
    ({"head_dim": 2**28}, ValueError, "head_dim must be at most 178956965 with num_heads 4, got 268435456"),
    ({"head_dim": 1, "num_heads": 10**9}, ValueError, "num_heads must be at most 715827861, got 1000000000"),
    ({"kdim": 0}, ValueError, "kdim must be at least 1, got 0"),
    ({"kdim": "4"}, TypeError, "kdim must be an integer, got '4'"),
    ({"kdim": 2**31}, ValueError, "kdim must be at most 715827861, got 2147483648"),
    ({"vdim": -3}, ValueError, "vdim must be at least 1, got -3"),
    ({"vdim": None, "kdim": 4.5}, TypeError, "kdim must be an integer, got 4.5"),
    ({"vdim": np.True_}, TypeError, "vdim must be an integer, got ..."),
    ({"use_bias": "QKV"}, ValueError, "use_bias must be True, False, \"qkv\" or \"out\", got 'QKV'"),
    ({"use_bias": None}, TypeError, 'use_bias must be True, False, "qkv" or "out", got None'),
    ({"use_bias": ["qkv"]}, TypeError, "use_bias must be True, False, \"qkv\" or \"out\", got ['qkv']"),
    (
        {"d_model": 2**28, "num_heads": 1, "head_dim": 2**28, "kdim": 5}, ValueError,
        "d_model 268435456 and kdim 5 make weights (268435456, 268435456), (5, 268435456), (268435456, 268435456) and "
        "(268435456, 268435456): beyond any memory",
    ),
    (
        {"d_model": 2**29, "num_heads": 1, "head_dim": 2**27}, ValueError,
        "d_model 536870912 and head_dim 134217728 make weights (536870912, 402653184) and (134217728, 536870912): beyond any "
        "memory",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "error", "message"), CONSTRUCTION, ids=[case[2] for case in CONSTRUCTION])
def test_construction_refuses(keywords, error, message):
    with raises(error, message):
        MultiHeadAttention(**{"d_model": 8, "num_heads": 4, **keywords})


def test_a_self_attention_has_all_biases_or_none():
    with raises(TypeError, "use_bias must be True or False, got 'qkv'"):
        fastmha.SelfAttention(8, 4, 4, use_bias="qkv")


X8, K5, V3 = normal(B, L, 8), normal(B, LK, 5, seed=2), normal(B, LK, 3, seed=3)
TWO, ONE, PLAIN = {"kdim": 5, "vdim": 3}, {"kdim": 5, "vdim": 5}, {}
FORWARD = [
    (TWO, {}, ValueError, "context must be given: keys and values are projected from kdim 5 and vdim 3, X has d_model 8"),
    ({"vdim": 3}, {}, ValueError, "context must be given: keys and values are projected from kdim 8 and vdim 3, X has d_model 8"),
    (ONE, {}, ValueError, "context must be given: keys and values are projected from kdim 5 and vdim 5, X has d_model 8"),
    (TWO, {"cache": KVCache(B, 4, 2)}, ValueError,
     "cache without a context needs a module whose kdim and vdim are its d_model 8, got kdim 5 and vdim 3"),
    (TWO, {"context": K5}, ValueError,
     "context must be a tuple (keys, values) of arrays of widths kdim 5 and vdim 3, got an array of shape (2, 7, 5)"),
    (TWO, {"context": [K5, V3]}, ValueError,
     "context must be a tuple (keys, values) of arrays of widths kdim 5 and vdim 3, got list"),
    (TWO, {"context": (K5,)}, ValueError, "context must be an array or a tuple (keys, values) of arrays, got a tuple of 1"),
    (TWO, {"context": (K5, V3, V3)}, ValueError,
     "context must be an array or a tuple (keys, values) of arrays, got a tuple of 3"),
    (TWO, {"context": (V3, K5)}, ValueError, "context[0] (keys) has width 3 on axis 2 but the module has kdim 5"),
    (TWO, {"context": (K5, K5)}, ValueError, "context[1] (values) has width 5 on axis 2 but the module has vdim 3"),
    (TWO, {"context": (K5, V3[0])}, ValueError, "context[1] (values) must have 3 axes (B, L, vdim), got shape (7, 3)"),
    (TWO, {"context": (K5, V3[:, :6])}, ValueError, "context[1] (values) has length 6 on axis 1 but context[0] (keys) has 7"),
    (TWO, {"context": (K5, V3[:1])}, ValueError, "context[1] (values) has batch size 1 on axis 0 but context[0] (keys) has 2"),
    (TWO, {"context": (K5[:1], V3[:1])}, ValueError, "context[0] (keys) has batch size 1 on axis 0 but X has 2"),
    (TWO, {"context": (K5, None)}, TypeError, "context[1] (values) must hold real numbers, got dtype object"),
    (ONE, {"context": X8}, ValueError, "context has width 8 on axis 2 but the module has kdim 5"),
    (ONE, {"context": K5[0]}, ValueError, "context must have 3 axes (B, L, kdim), got shape (7, 5)"),
    (ONE, {"context": K5[:1]}, ValueError, "context has batch size 1 on axis 0 but X has 2"),
    (PLAIN, {"context": K5}, ValueError, "context has width 5 on axis 2 but the module has d_model 8"),
    (PLAIN, {"context": (X8, K5)}, ValueError, "context[1] (values) has width 5 on axis 2 but the module has vdim 8"),
    (TWO, {"X": K5, "context": (K5, V3)}, ValueError, "X has width 5 on axis 2 but the module has d_model 8"),
    (TWO, {"context": (K5, V3), "is_causal": True}, ValueError, "offset must be given with is_causal, window or alibi ..."),
]  # fmt: skip


@pytest.mark.parametrize(("widths", "arguments", "error", "message"), FORWARD, ids=[case[3] for case in FORWARD])
def test_forward_refuses_and_changes_nothing(widths, arguments, error, message):
    m = MultiHeadAttention(8, 4, rng=0, **widths)
    good = None if widths is PLAIN else (np.ones((B, LK, m.kdim)), np.ones((B, LK, m.vdim)))
    m.forward(X8, context=good)
    before = dict(m.__dict__)
    with raises(error, message):
        m.forward(**{"X": X8, **arguments})
    assert m.__dict__ == before
    assert m.backward(X8).shape == X8.shape  # of the forward that went well


def test_projecting_a_context_refuses_the_widths_of_another_module():
    m = MultiHeadAttention(8, 4, rng=0, **TWO)
    with raises(ValueError, "C must be a tuple (keys, values) of arrays of widths kdim 5 and vdim 3, got an array of shape ..."):
        m.project_context(X8)
    with raises(ValueError, "C[0] (keys) has width 3 on axis 2 but the module has kdim 5"):
        m.project_context((V3, K5))
    with raises(ValueError, "C[1] (values) has length 2 on axis 1 but C[0] (keys) has 7"):
        m.project_context((K5, V3[:, :2]))


def test_a_plan_of_a_module_that_needs_a_context_needs_its_length():
    m = MultiHeadAttention(8, 4, rng=0, **TWO)
    with raises(ValueError, "seq_len_k must be given: keys and values come from a context with kdim 5 and vdim 3, X has ... 8"):
        m.plan(1, 5)
    with raises(ValueError, "seq_len_k must be at least 0, got -1"):
        m.plan(1, 5, seq_len_k=-1)
