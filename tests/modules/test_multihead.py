"""MultiHeadAttention: shapes, the hand-worked example, agreement with the reference, bits, forward and backward."""

import math

import numpy as np
import pytest
from module_support import D_MODEL, HEADS, NAMES, assert_close, assert_same_bits, both_dtypes, by_reference, module
from support import assert_close as assert_close_by_element
from support import normal, oracle

import fastmha
from fastmha import algorithms, reference
from fastmha.algorithms import product_by_blas
from fastmha.planning import choose_layout


def assert_same_as_reference(m, X, context=None, num_threads=None, **keywords):
    """Output, weights, what is kept and every gradient."""
    dtype = m.dtype.type
    grad_output = normal(*X.shape, seed=99, dtype=dtype)
    expected = by_reference(m, X, grad_output, context, **keywords)
    out, weights = m.forward(X, context=context, need_weights=True, num_threads=num_threads, **keywords)
    kept = m.intermediates
    grad_X = m.backward(grad_output, num_threads=num_threads)
    assert out.dtype == weights.dtype == grad_X.dtype == m.dtype
    assert_close(out, expected["output"], dtype)
    assert_close(weights, expected["weights"], dtype)
    for name in ("Q", "K", "V", "concat", "lse"):
        assert_close(kept[name], expected[name], dtype, err_msg=name)
    # without weights the kernels write elsewhere
    assert_close(m.forward(X, context=context, num_threads=num_threads, **keywords), expected["output"], dtype)
    scale = max(1.0, max(float(np.abs(expected["grad_" + name]).max(initial=0)) for name in m.parameters()))
    assert_close(grad_X / scale, expected["grad_X"] / scale, dtype)
    for name, gradient in m.gradients().items():
        assert gradient.dtype == m.dtype
        assert_close(gradient / scale, expected["grad_" + name] / scale, dtype, err_msg=name)
    if context is None:
        assert m.grad_context is None
    else:
        assert_close(m.grad_context / scale, expected["grad_context"] / scale, dtype)


# --------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("length", [1, 2, 16, 128])
@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("num_kv_heads", [None, 2])
def test_shapes_of_output_and_intermediates(batch, length, num_kv_heads):
    m = module(dtype=np.float32, num_kv_heads=num_kv_heads)
    X = normal(batch, length, D_MODEL, dtype=np.float32)
    out, weights = m.forward(X, need_weights=True)
    assert out.shape == (batch, length, D_MODEL)
    assert weights.shape == (batch, HEADS, length, length)
    width, groups = D_MODEL // HEADS, num_kv_heads or HEADS
    assert {name: x.shape for name, x in m.intermediates.items()} == {
        "X": (batch, length, D_MODEL),
        "Q": (batch, HEADS, length, width),
        "K": (batch, groups, length, width),
        "V": (batch, groups, length, width),
        "concat": (batch, length, D_MODEL),
        "lse": (batch, HEADS, length),
        "A": (batch, HEADS, length, length),
    }
    assert m.backward(out).shape == X.shape
    assert {name: g.shape for name, g in m.gradients().items()} == {name: w.shape for name, w in m.parameters().items()}


def test_weights_take_one_number_for_each_query_key_pair_and_head():
    m = module()
    m.forward(normal(3, 7, D_MODEL), need_weights=True)
    assert m.intermediates["A"].size == 3 * HEADS * 7**2


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("use_bias", [False, True])
def test_parameter_shapes_and_num_parameters(num_kv_heads, use_bias):
    m = module(num_kv_heads=num_kv_heads, use_bias=use_bias)
    kv = num_kv_heads * 6
    matrices = [(24, 24), (24, kv), (24, kv), (24, 24)]
    biases = [(24,), (kv,), (kv,), (24,)] if use_bias else []
    assert [w.shape for w in m.parameters().values()] == matrices + biases
    # 24*24 + 2*24*kv + 24*24, and biases 24 + 2*kv + 24
    assert m.num_parameters == 1152 + 48 * kv + (48 + 2 * kv if use_bias else 0)


# -------------------------------------------------------------------------------------------------------------- by hand

HAND_X = [[[1, 0, -1, 0.5], [0.5, 1, 0, -0.5]]]
HAND_WEIGHTS = {
    "W_Q": [[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0]],
    "W_K": [[0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 1]],
    "W_V": [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]],
    "W_O": np.eye(4),
}


def test_hand_worked_example():
    """Two heads of width 2, two positions.

        Q = [[1.5, 0, -1, 1], [0, 1, 1, 0.5]]     K = [[0, 0, 1.5, 0.5], [1, 0.5, 0, 0.5]]
        V = [[1.5, 0.5, 0, -1], [0, 0.5, 1, 0]]

    Products q.k of head 0 (columns 0, 1): [[0, 1.5], [0, 0.5]]; of head 1: [[-1, 0.5], [1.75, 0.25]]. The scores are
    these over sqrt(2), and a row with two keys gives key 0 the weight 1 / (1 + exp(second score - first score)).
    """
    m = fastmha.MultiHeadAttention(4, 2, dtype=np.float64)
    m.load_state_dict(HAND_WEIGHTS)
    out, weights = m.forward(HAND_X, need_weights=True)

    def first(difference):
        return 1 / (1 + math.exp(difference / math.sqrt(2)))

    a, b = first(1.5 - 0), first(0.5 - 0)  # head 0, queries 0 and 1
    c, d = first(0.5 - -1), first(0.25 - 1.75)  # head 1
    np.testing.assert_allclose(
        weights, [[[[a, 1 - a], [b, 1 - b]], [[c, 1 - c], [d, 1 - d]]]], rtol=1e-15, atol=1e-15
    )  # fmt: skip
    # head 0: w * [1.5, 0.5] + (1 - w) * [0, 0.5] = [1.5 w, 0.5]; head 1: w * [0, -1] + (1 - w) * [1, 0] = [1 - w, -w]
    exact = [[[1.5 * a, 0.5, 1 - c, -c], [1.5 * b, 0.5, 1 - d, -d]]]
    np.testing.assert_allclose(out, exact, rtol=1e-15, atol=1e-15)
    np.testing.assert_allclose(out, [[[0.386, 0.5, 0.743, -0.257], [0.619, 0.5, 0.257, -0.743]]], rtol=0, atol=5e-4)

    kept = m.intermediates
    np.testing.assert_array_equal(reference.combine_heads(kept["Q"]), [[[1.5, 0, -1, 1], [0, 1, 1, 0.5]]])
    np.testing.assert_array_equal(reference.combine_heads(kept["K"]), [[[0, 0, 1.5, 0.5], [1, 0.5, 0, 0.5]]])
    np.testing.assert_array_equal(reference.combine_heads(kept["V"]), [[[1.5, 0.5, 0, -1], [0, 0.5, 1, 0]]])
    # lse of head 0, query 0: log(exp(0) + exp(1.5 / sqrt 2))
    assert kept["lse"][0, 0, 0] == pytest.approx(math.log(1 + math.exp(1.5 / math.sqrt(2))), rel=1e-15)


def test_hand_worked_example_backward():
    """Of the loss out[0, 0, 0] = 1.5 w with w the weight of key 0 in head 0, query 0: dw/ds = w (1 - w) [1, -1]."""
    m = fastmha.MultiHeadAttention(4, 2, dtype=np.float64)
    m.load_state_dict(HAND_WEIGHTS)
    m.forward(HAND_X)
    m.backward([[[1, 0, 0, 0], [0, 0, 0, 0]]])
    w = 1 / (1 + math.exp(1.5 / math.sqrt(2)))
    ds = 1.5 * w * (1 - w) / math.sqrt(2)  # times [1, -1], of the products q.k
    x0, x1 = np.array(HAND_X[0])
    grad_Q, grad_K, grad_V = np.zeros((3, 4, 4))
    grad_Q[:, :2] = np.outer(x0, ds * (np.array([0, 0]) - [1, 0.5]))  # keys of head 0
    grad_K[:, :2] = np.outer(ds * x0 - ds * x1, [1.5, 0])  # the query
    grad_V[:, 0] = w * x0 + (1 - w) * x1
    grad_O = np.zeros((4, 4))
    grad_O[:, 0] = [1.5 * w, 0.5, 1 - w, -w]  # concat of query 0
    for name, expected in (("W_Q", grad_Q), ("W_K", grad_K), ("W_V", grad_V), ("W_O", grad_O)):
        np.testing.assert_allclose(m.gradients()[name], expected, rtol=1e-14, atol=1e-15, err_msg=name)


# --------------------------------------------------------------------------------------------------------- equivalences


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_one_head_equals_self_attention(is_causal, use_bias):
    many = module(12, 1, use_bias=use_bias)
    one = fastmha.SelfAttention(12, 12, 12, use_bias=use_bias, dtype=np.float64)
    one.load_state_dict(many.state_dict())
    X, grad = normal(3, 7, 12), normal(3, 7, 12, seed=2)
    (a, weights_a), (b, weights_b) = (m.forward(X, is_causal=is_causal, need_weights=True) for m in (many, one))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights_a, weights_b, rtol=0, atol=1e-12)
    np.testing.assert_allclose(many.backward(grad), one.backward(grad), rtol=0, atol=1e-12)
    for name in NAMES[use_bias]:
        np.testing.assert_allclose(many.gradients()[name], one.gradients()[name], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_separate_projections_per_head_equal_the_fused_one(num_kv_heads):
    m = module(use_bias=True, num_kv_heads=num_kv_heads)
    X, width = normal(2, 5, D_MODEL), D_MODEL // HEADS
    out = np.zeros((2, 5, D_MODEL)) + m.b_O
    for h in range(HEADS):
        q_columns = slice(h * width, (h + 1) * width)
        g = h // (HEADS // num_kv_heads)
        kv_columns = slice(g * width, (g + 1) * width)
        head = fastmha.SelfAttention(D_MODEL, width, width, use_bias=True, dtype=np.float64)
        head.W_Q, head.b_Q = m.W_Q[:, q_columns], m.b_Q[q_columns]
        head.W_K, head.b_K = m.W_K[:, kv_columns], m.b_K[kv_columns]
        head.W_V, head.b_V = m.W_V[:, kv_columns], m.b_V[kv_columns]
        head.W_O = m.W_O[q_columns]
        out += head.forward(X)  # its b_O is zero
    np.testing.assert_allclose(m.forward(X), out, rtol=1e-12, atol=1e-12)


def test_grouped_heads_equal_full_heads_with_repeated_weights():
    grouped, full = module(num_kv_heads=2), module()
    for name in ("W_K", "W_V"):
        per_head = getattr(grouped, name).reshape(D_MODEL, 2, 1, 6).repeat(2, axis=2)
        setattr(full, name, per_head.reshape(D_MODEL, D_MODEL))
    full.W_Q, full.W_O = grouped.W_Q, grouped.W_O
    X = normal(2, 5, D_MODEL)
    np.testing.assert_allclose(grouped.forward(X), full.forward(X), rtol=1e-12, atol=1e-12)
    grad = normal(2, 5, D_MODEL, seed=2)
    np.testing.assert_allclose(grouped.backward(grad), full.backward(grad), rtol=1e-12, atol=1e-12)
    summed = full.grad_W_K.reshape(D_MODEL, 2, 2, 6).sum(2).reshape(D_MODEL, 12)
    np.testing.assert_allclose(grouped.grad_W_K, summed, rtol=1e-12, atol=1e-12)


def test_context_equal_to_x_is_self_attention():
    m = module(use_bias=True)
    X, grad = normal(2, 5, D_MODEL), normal(2, 5, D_MODEL, seed=2)
    alone, grad_alone = m.forward(X), m.backward(grad)
    np.testing.assert_allclose(m.forward(X, context=X), alone, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(m.backward(grad) + m.grad_context, grad_alone, rtol=1e-12, atol=1e-12)


@both_dtypes
def test_weights_sum_to_one_per_head(dtype):
    m = module(dtype=dtype, num_kv_heads=2)
    X, lengths = normal(3, 33, D_MODEL), np.array([33, 5, 1])
    _, weights = m.forward(X, is_causal=True, key_padding_lengths=lengths, need_weights=True)
    assert weights.shape == (3, HEADS, 33, 33)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=0, atol={np.float32: 1e-6, np.float64: 1e-14}[dtype])
    assert (weights >= 0).all()
    assert not np.allclose(weights[:, 0], weights[:, 1])  # per head, never averaged


# -------------------------------------------------------------------------------------------------------- the reference

B, L, LK = 3, 6, 9
BLOCKED = np.random.default_rng(4).random((L, L)) < 0.3
PER_HEAD = np.random.default_rng(5).random((B, HEADS, L, L)) < 0.4
PER_HEAD[1, 2, 3] = True  # an empty row
ADDITIVE = np.where(np.random.default_rng(6).random((B, 1, L, L)) < 0.3, -np.inf, normal(B, 1, L, L, seed=7))
MASKS = {
    "none": {},
    "bool, two axes": {"mask": BLOCKED},
    "bool, per head, an empty row": {"mask": PER_HEAD},
    "bool, keys alone": {"mask": PER_HEAD[:, :1, :1]},
    "additive, two axes": {"mask": normal(L, L, seed=8)},
    "additive with -inf": {"mask": ADDITIVE},
    "causal": {"is_causal": True},
    "causal, one offset": {"is_causal": True, "offset": 2},
    "causal, offset per batch row": {"is_causal": True, "offset": np.array([0, 3, -2])},
    "window": {"window": (2, 1)},
    "window to the left, causal": {"window": (2, None), "is_causal": True},
    "window, offset per batch row": {"window": (1, 1), "offset": np.array([1, 0, -1])},
    "softcap": {"softcap": 0.7},
    "padding": {"key_padding_lengths": np.array([6, 2, 0])},
    "padding on the left": {"is_causal": True, "key_ranges": (np.array([0, 4, 6]), None)},
    "all together": {
        "mask": ADDITIVE, "is_causal": True, "offset": np.array([1, 0, 2]), "window": (3, None), "softcap": 2.0,
        "key_padding_lengths": np.array([6, 4, 5]),
    },
}  # fmt: skip
every_mask = pytest.mark.parametrize("keywords", MASKS.values(), ids=MASKS.keys())


def in_dtype(keywords, dtype):
    """The case with an additive mask cast to the module's dtype."""
    mask = keywords.get("mask")
    return keywords if mask is None or mask.dtype == bool else {**keywords, "mask": mask.astype(dtype)}


@every_mask
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@both_dtypes
def test_equals_the_reference(keywords, num_kv_heads, dtype):
    m = module(dtype=dtype, use_bias=True, num_kv_heads=num_kv_heads)
    assert_same_as_reference(m, normal(B, L, D_MODEL, dtype=dtype), **in_dtype(keywords, dtype))


@every_mask
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("layout", ["strided", "contiguous", "auto"])
def test_every_layout_and_thread_count_equals_the_reference(keywords, layout, num_threads):
    m = module(use_bias=True, num_kv_heads=2, layout=layout)
    assert_same_as_reference(m, normal(B, L, D_MODEL), num_threads=num_threads, **keywords)


CROSS = {
    "none": {},
    "causal": {"is_causal": True, "offset": LK - L},
    "window, offset per batch row": {"window": (2, 2), "offset": np.array([3, 0, 1])},
    "padding": {"key_padding_lengths": np.array([9, 4, 1])},
    "key ranges": {"key_ranges": (np.array([0, 4, 8]), np.array([1, 4, 9]))},
    "additive": {"mask": normal(B, HEADS, L, LK, seed=3)},
}


@pytest.mark.parametrize("keywords", CROSS.values(), ids=CROSS.keys())
@pytest.mark.parametrize("layout", ["strided", "contiguous"])
@pytest.mark.parametrize("use_bias", [False, True])
@both_dtypes
def test_cross_attention_equals_the_reference(keywords, layout, use_bias, dtype):
    m = module(dtype=dtype, use_bias=use_bias, num_kv_heads=2, layout=layout)
    X, context = normal(B, L, D_MODEL, dtype=dtype), normal(B, LK, D_MODEL, seed=2, dtype=dtype)
    assert_same_as_reference(m, X, context, **in_dtype(keywords, dtype))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 300), (2, 257), (5, 64)])
def test_lengths_that_take_several_blocks_equal_the_reference(batch, length):
    m = module(48, 3, use_bias=True)
    assert_same_as_reference(m, normal(batch, length, 48), is_causal=True, num_threads=2)


def gap(x):
    """Items between the end of a row of a head (B, heads, L, width) and the next row."""
    return x.strides[2] // x.itemsize - x.shape[3]


@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_projections_write_heads_in_the_layout_and_no_layout_copies_them(monkeypatch, layout):
    monkeypatch.setattr(fastmha._core, "pack_heads", lambda *a: pytest.fail("heads were copied"))
    for context in (None, normal(2, LK, D_MODEL, seed=2)):
        m, X = module(num_kv_heads=2, layout=layout), normal(2, 5, D_MODEL)
        m.forward(X, context=context)
        q, k, v = (m.intermediates[name] for name in "QKV")
        if layout == "contiguous":
            assert gap(q) == gap(k) == gap(v) == 0
        else:
            assert gap(q) == (7 if context is None else 3) * q.shape[3]
            assert gap(k) == gap(v) == (7 if context is None else 3) * k.shape[3]
        m.backward(X)


@pytest.mark.parametrize("algorithm", ["auto", "blas"])
@pytest.mark.parametrize(("d_model", "heads"), [(512, 8), (512, 4), (256, 8), (96, 3)])
def test_auto_layout_is_the_rule_of_the_plan(d_model, heads, algorithm):
    m = module(d_model, heads, algorithm=algorithm)
    for L in (2, 255, 256, 300):
        m.forward(normal(1, L, d_model))
        by_blas = algorithm == "blas" or product_by_blas(2)
        layout, why = choose_layout(L, d_model // heads * m.dtype.itemsize, by_blas)
        assert all((gap(m.intermediates[name]) == 0) is (layout == "contiguous") for name in "QKV")
        found = m.plan(1, L)
        assert (found.layout, found.layout_reason) == (layout, why)
        assert f"layout      {layout}: {why}" in str(found)


def test_layouts_give_the_same_bits_where_the_kernels_multiply():
    if product_by_blas(2):
        pytest.skip("BLAS multiplies here, and sums in an order that depends on the sizes")
    X, results = normal(3, 300, 128), []
    for layout in ("strided", "contiguous"):
        m = module(128, 4, num_kv_heads=2, use_bias=True, layout=layout)
        out = m.forward(X, is_causal=True)
        results.append([out, m.backward(X), *m.gradients().values()])
    for strided, contiguous in zip(*results, strict=True):
        np.testing.assert_array_equal(strided, contiguous)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("d_model", "heads"), [(256, 4), (256, 8), (192, 2), (40, 5), (21, 3)])
@pytest.mark.parametrize("shape", [(1, 300), (3, 257), (2, 17), (5, 1)])
def test_heads_written_by_the_projection_equal_the_reference(shape, d_model, heads, frozen):
    m = module(d_model, heads, use_bias=True, layout="contiguous")
    X = normal(*shape, d_model)
    expected = module(d_model, heads, use_bias=True, layout="strided").forward(X)
    if frozen:
        m.freeze()
    np.testing.assert_allclose(m.forward(X, training=False, num_threads=2), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("algorithm", ["auto", "blas"])
def test_every_algorithm_equals_the_reference(algorithm):
    assert_same_as_reference(module(algorithm=algorithm), normal(2, 5, D_MODEL), is_causal=True)


def test_odd_widths_equal_the_reference():
    assert_same_as_reference(module(21, 3, use_bias=True), normal(2, 5, 21), is_causal=True)


def test_boolean_and_additive_masks_agree():
    m, X = module(), normal(B, L, D_MODEL)
    additive = np.where(PER_HEAD, -np.inf, 0.0)
    np.testing.assert_allclose(m.forward(X, PER_HEAD), m.forward(X, additive), rtol=1e-14, atol=1e-14)


def test_causality_and_its_mask_agree():
    m, X = module(), normal(B, L, D_MODEL)
    masked = m.forward(X, fastmha.create_causal_mask(L))
    np.testing.assert_allclose(m.forward(X, is_causal=True), masked, rtol=1e-13, atol=1e-14)


def assert_product(got, a, b, bias=0):
    """a @ b + bias in float32, of the float32 numbers that a, b and bias are."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    bound = reference.product_error_bounds(a, b, np.float32)
    assert got.dtype == np.float32
    assert (np.abs(got - (a @ b + bias)) <= bound + np.finfo(np.float32).eps * (np.abs(bias) + np.abs(got))).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("algorithm", ["blas", "tiled"])
def test_float32_errs_within_the_bounds_of_the_error_analysis_in_every_step(seed, is_causal, algorithm, monkeypatch):
    """Each step against the exact result of what it was given by the step before it: nothing happens between them."""
    m = fastmha.MultiHeadAttention(64, 4, num_kv_heads=2, use_bias=True, algorithm=algorithm, rng=seed)
    for i, name in enumerate("QKVO"):
        setattr(m, "b_" + name, normal(*getattr(m, "b_" + name).shape, seed=seed + i))
    m._one_by_one = True  # test_at_once.py: the same bits
    X, grad = normal(2, 65, 64, seed=seed, dtype=np.float32), normal(2, 65, 64, seed=seed + 50, dtype=np.float32)
    backward, steps = algorithms.backward, []
    monkeypatch.setattr(algorithms, "backward", lambda *arguments: (backward(*arguments), steps.append(arguments)))
    out, grad_X, of = m.forward(X, is_causal=is_causal), m.backward(grad), m.gradients()
    kept, ((_, _, _, _, grad_concat, *grads, _, _),) = m.intermediates, steps
    q, k, v = (kept[name] for name in "QKV")
    heads = reference.split_heads(kept["concat"], 4), kept["lse"], *grads
    assert_close_by_element(heads, *oracle(q, k, v, grad_concat, np.float32, is_causal=is_causal))

    def rows(x):
        return x.reshape(-1, x.shape[-1])

    for name, x, grad_x in zip("QKV", (q, k, v), grads):
        x, grad_x = rows(reference.combine_heads(x)), rows(reference.combine_heads(grad_x))
        assert_product(x, rows(X), getattr(m, "W_" + name), getattr(m, "b_" + name))
        assert_product(of["W_" + name], rows(X).T, grad_x)
        assert_product(of["b_" + name], np.ones(len(grad_x)), grad_x)
    assert_product(rows(out), rows(kept["concat"]), m.W_O, m.b_O)
    assert_product(of["W_O"], rows(kept["concat"]).T, rows(grad))
    assert_product(of["b_O"], np.ones(130), rows(grad))
    assert_product(rows(reference.combine_heads(grad_concat)), rows(grad), m.W_O.T)
    side_by_side = np.concatenate([rows(reference.combine_heads(x)) for x in grads], axis=1)
    assert_product(rows(grad_X), side_by_side, np.concatenate([m.W_Q, m.W_K, m.W_V], axis=1).T)


def test_float64_is_float64_throughout():
    m, X = module(use_bias=True), normal(2, 40, D_MODEL)
    assert np.abs(m.forward(X) - by_reference(m, X)["output"]).max() < 1e-14


# --------------------------------------------------------------------------------------------------- independence, bits


@both_dtypes
def test_batch_rows_are_independent_to_rounding(dtype):
    m = module(dtype=dtype, use_bias=True)
    X, grad = normal(5, 9, D_MODEL, dtype=dtype), normal(5, 9, D_MODEL, seed=2, dtype=dtype)
    together, grad_together = m.forward(X, is_causal=True), m.backward(grad)
    for b in range(5):
        assert_close(m.forward(X[b : b + 1], is_causal=True), together[b : b + 1], dtype)
        assert_close(m.backward(grad[b : b + 1]), grad_together[b : b + 1], dtype)


def test_nothing_of_another_batch_row_reaches_a_row():
    m, X = module(), normal(3, 5, D_MODEL)
    expected = m.forward(X)
    X[1] = np.nan
    out = m.forward(X)
    np.testing.assert_allclose(out[[0, 2]], expected[[0, 2]], rtol=1e-13, atol=1e-13)
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("layout", ["strided", "contiguous"])
@both_dtypes
def test_bits_depend_neither_on_the_run_nor_on_the_number_of_threads(layout, dtype):
    m = module(96, 6, dtype=dtype, use_bias=True, num_kv_heads=3, layout=layout)
    X, grad = normal(3, 270, 96, dtype=dtype), normal(3, 270, 96, seed=2, dtype=dtype)
    results = []
    for num_threads in (1, 2, 2, 3, 7):
        out = m.forward(X, is_causal=True, num_threads=num_threads)
        grad_X = m.backward(grad, num_threads=num_threads)
        results.append([out, grad_X, *(g.copy() for g in m.gradients().values())])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_same_bits(a, b)


def test_asking_for_weights_changes_the_output_within_rounding_only():
    m, X = module(dtype=np.float32), normal(2, 40, D_MODEL, dtype=np.float32)
    out, _ = m.forward(X, need_weights=True)
    assert_close(out, m.forward(X), np.float32)


# ------------------------------------------------------------------------------------------------- forward and backward


def test_backward_twice_gives_the_same_and_does_not_accumulate():
    m = module(use_bias=True)
    m.forward(normal(2, 5, D_MODEL))
    grad = normal(2, 5, D_MODEL, seed=2)
    first, gradients = m.backward(grad), {name: g.copy() for name, g in m.gradients().items()}
    second = m.backward(grad)
    assert_same_bits(first, second)
    for name, g in m.gradients().items():
        assert_same_bits(g, gradients[name])


def test_a_second_forward_and_backward_overwrites_the_gradients():
    m, fresh = module(use_bias=True), module(use_bias=True)
    m.forward(normal(4, 9, D_MODEL, seed=3), is_causal=True)
    m.backward(normal(4, 9, D_MODEL, seed=4))
    for one in (m, fresh):
        one.forward(normal(2, 5, D_MODEL))
        one.backward(normal(2, 5, D_MODEL, seed=2))
    for name, g in m.gradients().items():
        assert_same_bits(g, fresh.gradients()[name])


def test_gradient_names_are_attributes_and_views_of_one_another():
    m = module(use_bias=True)
    assert m.grad_W_Q is None
    assert m.grad_b_O is None
    m.forward(normal(2, 5, D_MODEL))
    m.backward(normal(2, 5, D_MODEL, seed=2))
    for name, g in m.gradients().items():
        assert np.shares_memory(getattr(m, "grad_" + name), g)
        assert_same_bits(getattr(m, "grad_" + name), g)


def test_gradients_of_biases_are_none_without_biases():
    m = module()
    m.forward(normal(2, 5, D_MODEL))
    m.backward(normal(2, 5, D_MODEL))
    assert m.b_Q is None
    assert m.grad_b_Q is None


def test_backward_is_linear_in_its_argument():
    m = module(use_bias=True)
    m.forward(normal(2, 5, D_MODEL))
    g, h = normal(2, 5, D_MODEL, seed=2), normal(2, 5, D_MODEL, seed=3)
    a, b = m.backward(g), m.backward(h)
    np.testing.assert_allclose(m.backward(2 * g - h), 2 * a - b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["list", "integers", "float32", "strided", "read-only"])
def test_backward_takes_any_real_gradient(kind):
    m = module()
    m.forward(normal(2, 5, D_MODEL))
    g = np.round(4 * normal(2, 5, D_MODEL, seed=2))
    expected = m.backward(g)
    frozen = g.copy()
    frozen.flags.writeable = False
    other = {"list": g.tolist(), "integers": g.astype(np.int8), "float32": g.astype(np.float32),
             "strided": np.repeat(g, 2, axis=2)[..., ::2], "read-only": frozen}[kind]  # fmt: skip
    assert_same_bits(m.backward(other), expected)


def test_only_the_last_training_forward_counts():
    m, fresh = module(), module()
    m.forward(normal(2, 5, D_MODEL, seed=5))
    X, grad = normal(2, 7, D_MODEL), normal(2, 7, D_MODEL, seed=2)
    m.forward(X)
    m.forward(normal(2, 5, D_MODEL, seed=6), training=False)  # keeps and changes nothing
    fresh.forward(X)
    assert_same_bits(m.backward(grad), fresh.backward(grad))


def test_backward_after_self_attention_forgets_the_gradient_of_a_context():
    m, X = module(), normal(2, 5, D_MODEL)
    m.forward(X, context=normal(2, 3, D_MODEL))
    m.backward(X)
    assert m.grad_context.shape == (2, 3, D_MODEL)
    m.forward(X)
    m.backward(X)
    assert m.grad_context is None
