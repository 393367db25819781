"""What users of other libraries run into: inverted masks, foreign names and arrays, and values at the limits."""

import inspect
import math
import warnings
from fractions import Fraction
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support import HALVES, algorithms, draw, fails, same_bits

import fastmha
from fastmha import ConventionWarning, reference, threads, validate

X = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
Q = np.random.default_rng(1).standard_normal((2, 4, 5, 8)).astype(np.float32)


# ----------------------------------------------------------------------------------------------- what came, in few words


class NoRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.mark.parametrize("value", [
    list(range(10_000)), [[0] * 1000] * 1000, "x" * 10_000, 10**5000, [10**5000], -(10**5000), np.zeros(900), np.zeros((99, 99)),
    {i: i for i in range(10_000)}, Fraction(1, 10**900), NoRepr(), np.dtype([(f"f{i}", "f4") for i in range(99)]),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_came_is_shown_in_one_line_of_80_characters(value):
    assert 0 < len(validate.short(value)) <= 80
    assert "\n" not in validate.short(value)
    message = fails(lambda: fastmha.attention(Q, Q, Q, is_causal=value), TypeError, "^is_causal must be True or False, got ")
    assert len(str(message)) < 130


@pytest.mark.parametrize("value", [3, -1.5, "name", None, (1, 2, 3), [0, None], {"a": 1}, 2**70, np.float32(2)], ids=repr)
def test_what_is_short_is_shown_as_it_is(value):
    assert validate.short(value) == repr(value)


# ------------------------------------------------------------------------------------- what is refused beside attention

analysis = fastmha.analysis
BESIDE = {
    "mask, is_causal": (
        lambda: fastmha.create_attention_mask(2, is_causal="no"), TypeError,
        "^is_causal must be True or False, got 'n"),
    "mask, huge length": (
        lambda: fastmha.create_causal_mask(2**31), ValueError,
        "^seq_len_q must be at most 2147483583, got 21474836"),
    "mask, length of 5000 digits": (
        lambda: fastmha.create_causal_mask(10**5000), ValueError,
        "^seq_len_q must be at most 2147483583, got an integer of 16610 bits$"),
    "mask, no memory": (
        lambda: fastmha.create_causal_mask(2**30, 2**30), ValueError,
        "^seq_len_q 1073741824 and seq_len_k 1073741824 make a mask beyond any memory$"),
    "mask, both, no memory": (
        lambda: fastmha.create_attention_mask(2**30, 2**30, False), ValueError,
        "^seq_len_q 1073741824 and seq_len_k 107"),
    "padding, no memory": (
        lambda: fastmha.create_padding_mask(np.broadcast_to(1, 2**30), 2**30), ValueError,
        "^lengths 1073741824 and max_len 107"),
    "padding, lengths beyond 64 bits": (
        lambda: fastmha.create_padding_mask([1, 2**70], 3), ValueError,
        "^lengths must be from 0 to max_len = 3, got 118059162071"),
    "padding, objects": (
        lambda: fastmha.create_padding_mask([1, None], 3), TypeError,
        "^lengths must hold integers, got dtype object$"),
    "mask, dtype": (
        lambda: fastmha.create_causal_mask(2, dtype="x" * 9999), TypeError,
        "^dtype must be bool, float32, float64, float16 or bfloat16, got 'xxx.{75,99}$"),
    "mask, a dtype that is parsed": (
        lambda: fastmha.create_causal_mask(2, dtype="f4,,"), TypeError,
        "^dtype must be bool, float32, float64, float16 or bfloat16, got 'f4,,'$"),
    "flops, is_causal": (
        lambda: analysis.count_flops(1, 1, 8, 2, is_causal=1), TypeError,
        "^is_causal must be True or False, got 1$"),
    "flops, backward": (
        lambda: analysis.count_flops(1, 1, 8, 2, backward="no"), TypeError,
        "^backward must be True or False, got 'no"),
    "flops, window": (
        lambda: analysis.count_flops(1, 1, 8, 2, window=[0] * 9999), TypeError,
        "^window must be a pair .{9,90}$"),
    "flops, size": (
        lambda: analysis.count_flops(1, [0] * 9999, 8, 2), TypeError,
        "^seq_len must be an integer, got .{9,90}$"),
    "flops, negative": (
        lambda: analysis.count_flops(-(10**5000), 1, 8, 2), ValueError,
        "^batch_size must be at least 0, got an integer of 16610 bits$"),
    "flops, heads": (
        lambda: analysis.count_flops(1, 1, 10**5000, 3), ValueError,
        r"^d_model must be below 2\*\*63, got an integer of 16610 bits$"),
    "bytes, backward": (
        lambda: analysis.count_memory_bytes(1, 1, 8, 2, backward=0), TypeError,
        "^backward must be True or False, got 0$"),
    "bytes, algorithm": (
        lambda: analysis.count_memory_bytes(1, 1, 8, 2, algorithm=["blas"]), ValueError,
        r"^algorithm must be \"blas\" or .*, got \['blas"),
    "bytes, an array of algorithms": (
        lambda: analysis.count_memory_bytes(1, 1, 8, 2, algorithm=np.array(["blas", "tiled"])), ValueError,
        "^algorithm must be "),
    "bytes, a dtype that is parsed": (
        lambda: analysis.count_memory_bytes(1, 1, 8, 2, "f4,,"), TypeError,
        "^dtype must be float32 or float64, got 'f4,,'$"),
    "cache, an array for a dtype": (
        lambda: analysis.kv_cache_bytes(1, 1, 1, 1, 1, np.array(["a", "b"])), TypeError,
        "^dtype must be float32, float64, float16 or b"),
    "capture, too many": (
        lambda: fastmha.Capture(rows=np.broadcast_to(1, 2**40)), ValueError,
        "^capture.rows must have at most 2147483583 indices, got 10"),
    "capture, reduce": (
        lambda: fastmha.Capture(reduce=["sum_q"] * 9999), ValueError,
        '^capture.reduce must be None, "sum_q".{9,150}$'),
    "split, not an array": (lambda: fastmha.split_heads([[1], [1, 2]], 1), ValueError, "^x cannot be made an array: "),
    "combine, not an array": (lambda: fastmha.combine_heads([[1], [1, 2]]), ValueError, "^x cannot be made an array: "),
    "sdpa, ragged mask": (
        lambda: fastmha.scaled_dot_product_attention(X, X, X, [[1], [1, 2]]), ValueError,
        "^mask cannot be made an array: "),
    "sdpa, length": (
        lambda: fastmha.scaled_dot_product_attention(*[np.broadcast_to(np.float32(1), (1, 2**31, 4))] * 3), ValueError,
        "^Q has length 2147483648: at most 2147483583 is possible$"),
    "mha, unknown weights": (
        lambda: fastmha.multi_head_attention(X, X, X, 2, dict.fromkeys(["W_Q", "W_K", "W_V", "W_O", *range(9999)])), ValueError,
        r"^weights must hold .*: unknown 0, 1, 2, .{60,75}\.\.\.$"),
    "threads": (lambda: fastmha.set_num_threads([1] * 9999), TypeError, "^num_threads must be an integer, got .{9,90}$"),
    "merge, nothing": (
        lambda: fastmha.merge(Q, None, Q, Q[..., 0]), TypeError,
        r"^lse1 must be .*got None: attention\(\.\.\., return_lse=True\) returns"),
    "merge, layout": (
        lambda: fastmha.merge(Q, Q, Q, Q, layout=["BHLD"]), ValueError,
        '^layout must be "BHLD" or "BLHD", got \\['),
    "module, dtype": (
        lambda: fastmha.MultiHeadAttention(8, 2, dtype=[0] * 9999), TypeError,
        r"^dtype must be float32, float64, float16 or bfloat16, got \[0, 0, .{9,80}$"),
    "module, transform_qk": (
        lambda: m.forward(X, transform_qk=[0] * 9999), TypeError,
        r"^transform_qk must be callable or None, got \[0, 0, .{9,80}$"),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_other_functions_name_what_they_refuse(name):
    call, kind, message = BESIDE[name]
    assert len(str(fails(call, kind, message))) < 250


# ------------------------------------------------------------------------------------------------------ arrays of others

OPERANDS = {"q": (2, 4, 5, 8), "k": (2, 4, 5, 8), "v": (2, 4, 5, 8), "mask": (5, 5)}


def attend(**changes):
    return fastmha.attention(**({"q": Q, "k": Q, "v": Q} | changes))


def go_back(**changes):
    out, lse = fastmha.attention(Q, Q, Q, return_lse=True)
    return fastmha.attention_backward(**({"grad_out": Q, "q": Q, "k": Q, "v": Q, "out": out, "lse": lse} | changes))


@pytest.mark.parametrize("name", [*OPERANDS, "out", "key_padding_lengths", "offset"])
def test_a_masked_array_is_refused_because_its_mask_would_be_lost(name):
    given = {"key_padding_lengths": [5, 5], "offset": [0, 0]}.get(name, np.zeros(OPERANDS.get(name, Q.shape), np.float32))
    masked = np.ma.masked_array(given)
    changes = {name: masked, "is_causal": name == "offset"}
    fails(lambda: attend(**changes), TypeError, rf"^{name} is a masked array, whose mask.*: pass {name}\.filled\(\.\.\.\)$")


@pytest.mark.parametrize("name", ["grad_out", "out", "lse", "q", "k", "v"])
def test_the_gradient_refuses_masked_arrays(name):
    masked = np.ma.masked_array(np.zeros(Q.shape[:3] if name == "lse" else Q.shape, np.float32))
    fails(lambda: go_back(**{name: masked}), TypeError, rf"^{name} is a masked array, .*{name}\.filled")


MASKED = np.ma.masked_array(Q)
OTHER_MASKED = {
    "softmax": (lambda: fastmha.softmax(MASKED), "x"),
    "softmax_backward": (lambda: fastmha.softmax_backward(Q, MASKED), "softmax_output"),
    "merge": (lambda: fastmha.merge(Q, Q[..., 0], MASKED, Q[..., 0]), "out2"),
    "split_heads": (lambda: fastmha.split_heads(np.ma.masked_array(X), 2), "x"),
    "combine_heads": (lambda: fastmha.combine_heads(MASKED), "x"),
    "sdpa": (lambda: fastmha.scaled_dot_product_attention(X, np.ma.masked_array(X), X), "K"),
    "sdpa, mask": (
        lambda: fastmha.scaled_dot_product_attention(X, X, X, np.ma.masked_array(np.zeros((2, 5, 5), bool))), "mask"),
    "core": (lambda: fastmha.multi_head_attention_core(X, X, np.ma.masked_array(X), 2), "V"),
    "padding mask": (lambda: fastmha.create_padding_mask(np.ma.masked_array([1, 2]), 3), "lengths"),
    "assignment": (lambda: setattr(fastmha.MultiHeadAttention(8, 2, rng=0), "W_Q", np.ma.ones((8, 8))), "W_Q"),
    "grad_output": (lambda: trained().backward(np.ma.masked_array(X)), "grad_output"),
}  # fmt: skip


def trained():
    m = fastmha.MultiHeadAttention(8, 2, rng=0)
    m.forward(X)
    return m


@pytest.mark.parametrize("name", OTHER_MASKED)
def test_masked_arrays_are_refused_everywhere(name):
    call, argument = OTHER_MASKED[name]
    fails(call, TypeError, rf"^{argument} is a masked array")


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_is_a_mask_of_two_axes():
    mask = np.triu(np.ones((5, 5), bool), 1)
    assert same_bits(attend(mask=np.asmatrix(mask)), attend(mask=mask))
    fails(lambda: attend(q=np.asmatrix(Q[0, 0])), ValueError, r"q must have 4 axes .* got shape \(5, 8\)")


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_operand_of_half_precision_says_what_the_others_are(name):
    wrong, right = {"q": "kq", "k": "vk", "v": "vq"}[name]
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for half in (np.float16, bfloat16):
        fails(lambda: attend(**{name: Q.astype(half)}), TypeError,  # noqa: B023
              rf"^{wrong} has dtype \w+ but {right} has \w+: they must share one dtype$")


def test_half_precision_where_it_is_not_taken_says_how_to_cast():
    fails(lambda: fastmha.linear(Q.astype(np.float16)[0, 0], np.ones((8, 8), np.float16)), TypeError,
          r"^x must be .*got float16: cast it to float32, x\.astype\(np\.float32\)$")


@pytest.mark.parametrize("half", HALVES, ids=lambda dtype: dtype.__name__)
def test_a_module_casts_half_precision_as_any_real_numbers(half):
    m, x = fastmha.MultiHeadAttention(8, 2, rng=0), X.astype(half)
    assert same_bits(m.forward(x), m.forward(x.astype(np.float32)))
    m.W_Q = np.full((8, 8), 1 / 3).astype(half)
    assert set(m.W_Q.flat) == {np.float32(np.array(1 / 3).astype(half))}


def test_lists_of_integers_say_how_to_cast():
    fails(lambda: attend(v=Q.astype(int).tolist()), TypeError, r"^v must be .*got int64: .*np\.asarray\(v, np\.float32\)$")


class Raises:
    def __init__(self, error):
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no array today"), ValueError("no array today"), KeyError("no array today")],
                         ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_what_fails_to_become_an_array_is_named_and_keeps_its_cause(name, error):
    kind = ValueError if isinstance(error, ValueError) else TypeError
    raised = fails(lambda: attend(**{name: Raises(error)}), kind, rf"^{name} cannot be made an array: .*no array today")
    assert raised.__cause__ is error


def test_what_runs_out_of_memory_says_so():
    with pytest.raises(MemoryError):
        attend(q=Raises(MemoryError("none")))


class Tensor:
    """What of a tensor matters here: with grad it refuses to become an array, as torch's does; with bfloat16 it cannot."""

    def __init__(self, array, requires_grad=False, dtype="torch.float32"):
        self.array, self.requires_grad, self.dtype = array, requires_grad, dtype

    def __array__(self, dtype=None, copy=None):
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if "bfloat16" in self.dtype:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


def test_tensors_that_require_grad_say_what_to_pass():
    for name in ("q", "k", "v", "mask"):
        tensor = Tensor(np.zeros(OPERANDS[name], np.float32), requires_grad=True)
        raised = fails(lambda: attend(**{name: tensor}), TypeError,  # noqa: B023
                       rf"^{name} is a torch tensor that requires grad: pass {name}\.detach\(\)$")
        assert isinstance(raised.__cause__, RuntimeError)
    tensor = Tensor(np.zeros((2, 4, 5, 8), np.float32), requires_grad=True)
    fails(lambda: go_back(grad_out=tensor), TypeError, r"^grad_out is a torch tensor.*: pass grad_out\.detach\(\)$")
    fails(lambda: fastmha.MultiHeadAttention(8, 2, rng=0).forward(Tensor(X, requires_grad=True)), TypeError,
          r"^X is a torch tensor that requires grad: pass X\.detach\(\)$")
    fails(lambda: attend(k=Tensor(Q, dtype="torch.bfloat16")), TypeError,
          r"^k is a tensor of bfloat16, which NumPy does not have: pass k\.float\(\)$")


def test_tensors_without_grad_are_taken_as_arrays():
    q, mask = Tensor(Q), Tensor(np.triu(np.ones((5, 5), bool), 1))
    assert same_bits(attend(q=q, k=q, v=q, mask=mask), attend(mask=mask.array))


# -------------------------------------------------------------------------------------------------------- foreign names

m = fastmha.MultiHeadAttention(8, 2, rng=0)
one = fastmha.SelfAttention(8, 4, 4, rng=0)
NAMES = {
    "attention, attn_mask": (lambda: attend(attn_mask=None),
                             "attention has no keyword attn_mask: it is mask here, where True = may NOT attend"),
    "attention, attention_mask": (lambda: attend(attention_mask=None),
                                  r"no keyword attention_mask: it is mask .*\(attention_mask == 0\)\[:, None, None, :\]"),
    "attention, dropout_p": (lambda: attend(dropout_p=0.0), "no keyword dropout_p: it is dropout here, with a seed"),
    "attention, enable_gqa": (lambda: attend(enable_gqa=True), "no keyword enable_gqa: fewer heads .* are grouped without"),
    "attention, key_padding_mask": (
        lambda: attend(key_padding_mask=None), r"no keyword key_padding_mask: .*key_padding_lengths.*"
        r"mask=key_padding_mask\[:, None, None, :\], where True = may NOT attend"),
    "attention, query": (lambda: fastmha.attention(query=Q, key=Q, value=Q),
                         "attention has no keyword query: it is q here; key: it is k here; value: it is v here"),
    "attention, need_weights": (lambda: attend(need_weights=True), r"need_weights: .*capture=fastmha\.Capture\(\)"),
    "attention, causal": (lambda: attend(causal=True), "causal: it is is_causal here"),
    "attention, softmax_scale": (lambda: attend(softmax_scale=1.0), "softmax_scale: it is scale here"),
    "attention, window_size": (lambda: attend(window_size=(-1, 0)), r"window_size: it is window here.* None is unbounded"),
    "attention_backward, attn_mask": (lambda: go_back(attn_mask=None), "attention_backward has no keyword attn_mask: it is mask"),
    "plan, attn_mask": (lambda: fastmha.plan(Q, Q, Q, attn_mask=None), "plan has no keyword attn_mask: it is mask here"),
    "sdpa, attn_mask": (lambda: fastmha.scaled_dot_product_attention(X, X, X, attn_mask=None),
                        "scaled_dot_product_attention has no keyword attn_mask: it is mask here"),
    "sdpa, query": (lambda: fastmha.scaled_dot_product_attention(query=X, key=X, value=X), "query: it is Q here; key: it is K"),
    "sdpa, is_causal": (lambda: fastmha.scaled_dot_product_attention(X, X, X, is_causal=True),
                        r"no keyword is_causal: fastmha\.attention takes it"),
    "core, key_padding_mask": (lambda: fastmha.multi_head_attention_core(X, X, X, 2, key_padding_mask=None),
                               r"key_padding_mask: it is mask=key_padding_mask\[:, None, None, :\] here"),
    "sdpa, key_padding_mask": (lambda: fastmha.scaled_dot_product_attention(X, X, X, key_padding_mask=None),
                               r"key_padding_mask: it is mask=key_padding_mask\[:, None, None, :\] .*3 axes, \[:, None, :\]"),
    "mha, attn_mask": (lambda: fastmha.multi_head_attention(X, X, X, 2, {}, attn_mask=None), "has no keyword attn_mask"),
    "module, embed_dim": (lambda: fastmha.MultiHeadAttention(embed_dim=8, num_heads=2),
                          "MultiHeadAttention has no keyword embed_dim: it is d_model here"),
    "module, bias": (lambda: fastmha.MultiHeadAttention(8, 2, bias=True), "no keyword bias: it is use_bias here"),
    "module, dim_head": (lambda: fastmha.MultiHeadAttention(8, 2, dim_head=4), "no keyword dim_head: it is head_dim here"),
    "module, batch_first": (lambda: fastmha.MultiHeadAttention(8, 2, batch_first=True), r"batch_first: .*\(B, L, d_model\)"),
    "SelfAttention, head_dim": (lambda: fastmha.SelfAttention(8, 4, 4, head_dim=4, dim_head=4),
                                "head_dim: it is d_k here, d_v of the values; dim_head: it is d_k here, d_v of the values"),
    "SelfAttention, kdim": (lambda: fastmha.SelfAttention(8, 4, 4, kdim=4, vdim=4), "kdim: it is d_k here; vdim: it is d_v here"),
    "module, dropout": (lambda: fastmha.MultiHeadAttention(8, 2, dropout=0.1), "dropout: it is dropout of forward, with a seed"),
    "SelfAttention, embed_dim": (lambda: fastmha.SelfAttention(embed_dim=8, d_k=4, d_v=4), "SelfAttention has no keyword embed"),
    "SelfAttention, bias": (lambda: fastmha.SelfAttention(8, 4, 4, bias=True), "bias: it is use_bias here"),
    "SelfAttention, num_heads": (lambda: fastmha.SelfAttention(8, 4, 4, num_heads=2), "num_heads: fastmha.MultiHeadAttention"),
    "forward, attn_mask": (lambda: m.forward(X, attn_mask=None), r"MultiHeadAttention\.forward has no keyword attn_mask: it is"),
    "forward, key_padding_mask": (lambda: m.forward(X, key_padding_mask=None), r"key_padding_lengths here, or mask=key_padding"),
    "forward, query": (lambda: m.forward(query=X, key=X, value=X), "no keyword query: it is X here; key: .*context"),
    "forward, past_key_values": (lambda: m.forward(X, past_key_values=None), "past_key_values: it is cache here"),
    "one forward, attention_mask": (lambda: one.forward(X, attention_mask=None), r"SelfAttention\.forward has no keyword atten"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_keyword_of_another_library_is_told_its_name_here(name):
    call, message = NAMES[name]
    raised = fails(call, TypeError, message)
    assert raised.__suppress_context__      # not below a message of the interpreter about the same


@pytest.mark.parametrize("call", [
    lambda **k: attend(**k), lambda **k: fastmha.plan(Q, Q, Q, **k), lambda **k: m.forward(X, **k),
    lambda **k: fastmha.MultiHeadAttention(8, 2, **k), lambda **k: fastmha.SelfAttention(8, 4, 4, **k),
    lambda **k: fastmha.scaled_dot_product_attention(X, X, X, **k),
])  # fmt: skip
def test_any_other_unknown_keyword_is_the_interpreters_error(call):
    fails(lambda: call(is_casual=True), TypeError, r"got an unexpected keyword argument 'is_casual'")
    fails(lambda: call(is_casual=True, nonsense=1), TypeError, r"got an unexpected keyword argument 'is_casual'")


WRAPPED = ("attention", "attention_backward", "plan", "scaled_dot_product_attention", "multi_head_attention_core",
           "multi_head_attention", "MultiHeadAttention", "MultiHeadAttention.forward", "SelfAttention", "SelfAttention.forward")


@pytest.mark.parametrize("path", WRAPPED)
def test_signatures_name_their_own_keywords_alone(path):
    kinds = {p.kind for p in inspect.signature(attrgetter(path)(fastmha)).parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def test_an_error_inside_of_a_call_is_not_taken_for_a_foreign_name():
    def fail(q, k, positions):
        raise TypeError("mine")

    fails(lambda: m.forward(X, transform_qk=fail), TypeError, "^mine$")


# ------------------------------------------------------------------------------------------------------ windows, offsets

BIG = (2**59, 2**60, 2**61)
FAR = [(sign * offset, d) for sign in (1, -1) for offset in BIG for d in (-2, 0, 3)]
SIDES = (2**59 - 1, 2**59, 2**60 - 1, 2**60, 2**60 + 1, 2**61, 2**62 - 1, 2**62, 2**62 + 1, 2**63, 2**70)


def exact(side):
    """As the reference takes it."""
    return None if side is not None and side >= 2**62 else side


def assert_right(Lq=5, Lk=7, algorithm="auto", backward=True, **rules):
    q, k, v, g = draw(np.random.default_rng(3), 2, 2, 1, Lq, Lk)
    expected_rules = rules | {"window": tuple(exact(side) for side in rules["window"])} if rules.get("window") else rules
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **expected_rules)
    out, lse = fastmha.attention(q, k, v, return_lse=True, algorithm=algorithm, **rules)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-12)
    kept = ~reference.removed(Lq, Lk, **expected_rules)
    assert fastmha.plan(q, k, v, **rules).flops == np.broadcast_to(kept, (2, 1, Lq, Lk)).sum() * 2 * 2 * (4 + 4)
    if backward:
        grads = fastmha.attention_backward(g, q, k, v, out, lse, algorithm=algorithm, **rules)
        for got, wanted in zip(grads, reference.attention_backward(g, q, k, v, expected, expected_lse, **expected_rules)):
            np.testing.assert_allclose(got, wanted, atol=1e-12)
    _, weights = fastmha.attention(q, k, v, capture=fastmha.Capture(), algorithm=algorithm, **rules)
    np.testing.assert_allclose(weights, reference.attention_weights(q, k, **expected_rules), atol=1e-12)
    return out


@algorithms
@pytest.mark.parametrize(("offset", "d"), FAR, ids=lambda x: f"{x:#x}")
def test_a_window_that_ends_where_a_far_offset_begins_keeps_the_keys_it_reaches(algorithm, offset, d):
    side = abs(offset) + d
    for window in ((side, 0), (side, None), (side, side)) if offset > 0 else ((0, side), (None, side), (side, side)):
        assert_right(algorithm=algorithm, window=window, offset=offset)


@algorithms
@pytest.mark.parametrize("side", SIDES, ids=lambda side: f"{side:#x}")
def test_sides_of_any_size_beside_any_offset(algorithm, side):
    for offset in (0, 3, *BIG, *(-o for o in BIG), np.array([2**61, -(2**61)]), np.array([2**60 + 1, 2**59])):
        for window in ((side, side), (side, None), (None, side), (side, 0), (0, side)):
            assert_right(algorithm=algorithm, backward=False, window=window, offset=offset)


@pytest.mark.parametrize("offset", [2**61, -(2**61)])
def test_an_unbounded_side_removes_nothing_at_any_offset(offset):
    q, k, v, _ = draw(np.random.default_rng(3), 2, 2, 1, 5, 7)
    everything = fastmha.attention(q, k, v)
    for window in ((None, None), (2**62, 2**62), (2**70, None), (None, np.uint64(2**63))):
        assert same_bits(fastmha.attention(q, k, v, window=window, offset=offset), everything)
    nothing = fastmha.attention(q, k, v, window=(None, None), is_causal=True, offset=-(2**61))
    assert not nothing.any()
    assert same_bits(fastmha.attention(q, k, v, is_causal=True, offset=2**61), everything)


def test_offsets_end_at_2_to_the_61():
    q, k, v, _ = draw(np.random.default_rng(3))
    for sign in (1, -1):
        fastmha.attention(q, k, v, is_causal=True, offset=sign * 2**61)
        fails(lambda: fastmha.attention(q, k, v, is_causal=True, offset=sign * (2**61 + 1)), ValueError,  # noqa: B023
              rf"^offset must lie within \+-2\*\*61, got {sign * (2**61 + 1)}$")


def test_a_module_takes_far_offsets_and_windows():
    expected = m.forward(X, window=(2, 0), is_causal=True, training=False)
    assert same_bits(m.forward(X, window=(2 + 2**60, 0), offset=2**60, training=False)[:, :0], expected[:, :0])
    far = m.forward(X, window=(2**61 + 2, None), offset=2**61, training=False)
    near = m.forward(X, window=(2, None), offset=0, training=False)
    np.testing.assert_allclose(far, near, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------- softcap


@pytest.mark.parametrize("softcap", [
    5e-324, 1e-320, 1e-46, 1e-39, 1e38, 1e39, 1.7e308, 10**400, 2**1024, Fraction(1, 10**400), Fraction(10**400), np.float16(2),
    np.longdouble(3), np.int8(1)], ids=lambda x: f"{type(x).__name__} {validate.short(x)[:20]}")  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_positive_finite_softcap_is_taken(softcap, dtype):
    x = Q.astype(dtype)
    assert fastmha.plan(x, x, x, softcap=softcap).algorithm
    _, cap = validate.scaling(None, softcap, 8, x.dtype)
    assert 0 < cap < math.inf


# ------------------------------------------------------------------------------------------------------------ environment

LONG = "9" * 5000


@pytest.mark.parametrize("value", [LONG, "-" + LONG, "x" * 5000, "²" * 5000])
def test_a_variable_of_ours_that_is_no_number_is_named_in_few_words(monkeypatch, value):
    monkeypatch.setenv("FASTMHA_NUM_THREADS", value)
    monkeypatch.setattr(threads, "_default", None)
    monkeypatch.setattr(threads, "_chosen", None)
    message = fails(fastmha.get_num_threads, ValueError, r"^FASTMHA_NUM_THREADS must be a positive integer, got '.*\.\.\..*'$")
    assert len(str(message)) < 150


@pytest.mark.parametrize("value", [LONG, LONG + ",2", "x" * 5000, "-1", "²"])
def test_openmps_variable_that_is_no_number_is_ignored(monkeypatch, value):
    monkeypatch.delenv("FASTMHA_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.setattr(threads, "_default", None)
    default = fastmha.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    monkeypatch.setattr(threads, "_default", None)
    assert fastmha.get_num_threads() == default


def test_leading_zeros_and_many_threads_are_numbers(monkeypatch):
    for value, expected in (("0003", 3), ("1000000000000", 1024)):
        monkeypatch.setenv("FASTMHA_NUM_THREADS", value)
        monkeypatch.setattr(threads, "_chosen", None)
        monkeypatch.setattr(threads, "_default", None)
        assert fastmha.get_num_threads() == expected


@pytest.mark.parametrize("value", [LONG, "x" * 5000])
def test_an_instruction_set_of_5000_letters_is_named_in_few_words(monkeypatch, value):
    monkeypatch.setenv("FASTMHA_ISA", value)
    with pytest.raises(ImportError, match=r"^FASTMHA_ISA must be one of .* on this machine, got '.*\.\.\..*'$") as caught:
        fastmha._choose_isa()
    assert len(str(caught.value)) < 200


# ------------------------------------------------------------------------------------------------------- inverted masks

LOWER = np.tri(5, 5, dtype=bool)
INVERTED = {
    "torch's causal mask": LOWER,
    "with four axes": LOWER[None, None],
    "for each row and head": np.broadcast_to(LOWER, (2, 4, 5, 5)),
    "copied for each row and head": np.broadcast_to(LOWER, (2, 4, 5, 5)).copy(),
    "in Fortran order": np.asfortranarray(LOWER),
    "of every second element": np.repeat(np.repeat(LOWER, 2, 0), 2, 1)[::2, ::2],
    "for more keys, both begin together": np.tri(5, 7, dtype=bool),
    "for more keys, both end together": np.tri(5, 7, 2, dtype=bool),
    "for fewer keys": np.tri(5, 3, dtype=bool),
    "of two": np.tri(2, 2, dtype=bool),
}
EVERYTHING = {
    "ones": np.ones((5, 5), bool),
    "of four axes": np.ones((2, 4, 5, 5), bool),
    "broadcast": np.broadcast_to(np.True_, (2, 4, 5, 5)),
    "one element": np.ones((1, 1), bool),
    "a row": np.ones((1, 5), bool),
    "a column": np.ones((5, 1), bool),
    "padding alone": np.ones((2, 1, 1, 5), bool),
}
RIGHT = {
    "a causal mask": ~LOWER,
    "a causal mask of four axes": ~LOWER[None, None],
    "that of a cache": fastmha.create_causal_mask_with_cache(5, 7, 2),
    "nothing removed": np.zeros((5, 5), bool),
    "a first row that is padding": np.array([[1] * 5] + [[0] * 5] * 4, bool),
    "all but one pair": np.eye(5, dtype=bool)[::-1] | np.ones((5, 5), bool) & ~np.eye(5, k=2, dtype=bool),
    "all but the last": np.arange(25).reshape(5, 5) < 24,
    "a lower triangle without its diagonal": np.tri(5, 5, -1, dtype=bool),
    "a lower triangle and one more": LOWER | (np.arange(25).reshape(5, 5) == 1),
    "a lower triangle but one": LOWER & (np.arange(25).reshape(5, 5) != 5),
    "a lower triangle for one head of two": np.stack([LOWER, ~LOWER])[None],
    "keys before the diagonal of a window": np.tri(5, 5, -3, dtype=bool),
    "left padding": np.array([1, 1, 0, 0, 0], bool)[None, None, None, :],
    "right padding": np.array([0, 0, 0, 1, 1], bool)[None, None, None, :],
    "a single query": np.array([[True, False, False, False, False]]),
    "a single key": np.array([[True], [True], [False]]),
    "a float": np.where(LOWER, -np.inf, 0).astype(np.float32),
    "no query": np.zeros((0, 5), bool),
    "no key": np.zeros((5, 0), bool),
}


def operands(mask):
    Lq, Lk = mask.shape[-2:]
    B, H = mask.shape[:2] if mask.ndim == 4 else (1, 1)
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, H, L, 4), dtype=np.float32) for L in (Lq, Lk, Lk)]


@pytest.mark.parametrize("name", INVERTED)
def test_a_mask_that_is_true_where_torch_attends_is_warned_of(name):
    mask = INVERTED[name]
    with pytest.warns(ConventionWarning, match=r"^mask is True on and below the diagonal alone.*True = may NOT.*pass ~mask"):
        fastmha.attention(*operands(mask), mask=mask)


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_mask_that_removes_everything_is_warned_of(name):
    mask = EVERYTHING[name]
    with pytest.warns(ConventionWarning, match=r"^mask removes every key from every query: True = may NOT attend.*pass ~mask"):
        out = fastmha.attention(*operands(mask), mask=mask)
    assert not out.any()


@pytest.mark.parametrize("name", RIGHT)
def test_masks_as_they_are_meant_here_are_no_reason_to_warn(name):
    mask = RIGHT[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastmha.attention(*operands(mask), mask=mask)
        fastmha.scaled_dot_product_attention(*operands(mask), mask)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(mask=npst.arrays(bool, st.tuples(*[st.integers(1, 2)] * 2, *[st.integers(1, 4)] * 2)),
       kind=st.sampled_from(["drawn", "lower", "one less", "all", "all but one"]), at=st.integers(0, 10**6))
def test_a_warning_comes_for_these_masks_and_for_no_other(mask, kind, at):
    lower = np.broadcast_to(np.tri(*mask.shape[-2:], dtype=bool), mask.shape)
    mask = {"drawn": mask, "lower": lower, "one less": lower, "all": mask | True, "all but one": mask | True}[kind].copy()
    if kind in ("one less", "all but one"):
        mask.flat[at % mask.size] ^= True
    rows, keys = mask.shape[-2:]
    bare = [np.tri(rows, keys, d, dtype=bool) for d in (0, max(0, keys - rows))]
    triangle = min(rows, keys) > 1 and any((mask == tri).all() for tri in bare)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fastmha.attention(*operands(mask), mask=mask)
    assert len(seen) == int(triangle or bool(mask.all()))
    assert all(w.category is ConventionWarning for w in seen)


cache = fastmha.KVCache(2, 2, 4)
cache.append(Q[:, :2, :, :4], Q[:, :2, :, :4])
CALLERS = {
    "attention": lambda mask: fastmha.attention(Q, Q, Q, mask=mask),
    "attention with keywords": lambda mask: fastmha.attention(Q, Q, Q, mask=mask, return_lse=True, algorithm="tiled"),
    "attention_backward": lambda mask: fastmha.attention_backward(Q, Q, Q, Q, Q, Q[..., 0], mask=mask),
    "scaled_dot_product_attention": lambda mask: fastmha.scaled_dot_product_attention(X, X, X, mask),
    "multi_head_attention_core": lambda mask: fastmha.multi_head_attention_core(X, X, X, 2, mask),
    "MultiHeadAttention": lambda mask: m.forward(X, mask),
    "SelfAttention": lambda mask: one.forward(X, mask),
    "forward with a cache": lambda mask: m.forward(X, mask, cache=fastmha.KVCache(2, 2, 4)),
    "attend": lambda mask: cache.attend(Q[:, :2, :, :4], mask=mask),
}


@pytest.mark.parametrize("mask", [LOWER, np.ones((5, 5), bool)], ids=["inverted", "everything"])
@pytest.mark.parametrize("name", CALLERS)
def test_the_warning_points_at_the_caller_and_says_how_to_silence_it(name, mask):
    call = CALLERS[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(mask)
    assert [w.category for w in seen] == [ConventionWarning]
    assert (seen[0].filename, seen[0].lineno) == (__file__, call.__code__.co_firstlineno)
    assert 'warnings.filterwarnings("ignore", category=fastmha.ConventionWarning)' in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=fastmha.ConventionWarning)
        call(mask)


def test_a_warning_that_is_an_error_comes_before_anything_is_computed_or_kept():
    out, fresh = np.full(Q.shape, 7, np.float32), fastmha.KVCache(2, 2, 4)
    for call in (lambda: attend(mask=LOWER, out=out), lambda: trained().forward(X, LOWER, cache=fresh)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ConventionWarning):
                call()
    assert (out == 7).all()
    assert fresh.length == 0


def test_a_plan_does_not_look_at_the_values_of_a_mask():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastmha.plan(Q, Q, Q, mask=np.ones((5, 5), bool))


def test_masks_that_keep_key_0_for_query_0_are_not_looked_at_further(monkeypatch):
    monkeypatch.setattr(validate, "_look_for_convention", lambda mask: pytest.fail("looked at"))
    for mask in (~LOWER, np.zeros((2, 1, 1, 5), bool), np.array([0, 0, 0, 1, 1], bool)[None, None, None, :]):
        attend(mask=mask)


def test_masks_beyond_a_size_are_not_compared(monkeypatch):
    monkeypatch.setattr(validate, "_MOST_LOOKED_AT", 24)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(mask=LOWER)
        attend(mask=np.ones((5, 5), bool))
    with pytest.warns(ConventionWarning):
        attend(mask=np.broadcast_to(np.ones((1, 5), bool), (5, 5)))  # 5 in memory


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_grouped_heads_of_equal_lengths_are_no_reason_to_warn(layout):
    q, k = np.ones((2, 8, 128, 16), np.float32), np.ones((2, 4, 128, 16), np.float32)
    if layout == "BLHD":
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastmha.attention(q, k, k, layout=layout)
