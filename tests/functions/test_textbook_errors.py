"""Rule 11 for the textbook functions: messages name the arguments and axes of their own signatures, and what came."""

import numpy as np
import pytest
from support import fails, repeated, zeros

import fastmha

B, H, LQ = 2, 4, 5
sdpa = fastmha.scaled_dot_product_attention
core = fastmha.multi_head_attention_core
mha = fastmha.multi_head_attention
x3, x4 = zeros(B, LQ, 8), zeros(B, H, LQ, 8)
good = {f"W_{letter}": zeros(8, 8) for letter in "QKVO"} | {f"b_{letter}": zeros(8) for letter in "QKVO"}


def without(name):
    return {key: value for key, value in good.items() if key != name}


TEXTBOOK = {
    "softmax of a number": (
        lambda: fastmha.softmax(np.float32(1)),
        ValueError,
        r"x must have at least one axis, got a scalar",
    ),
    "softmax of integers": (
        lambda: fastmha.softmax(np.arange(3)),
        TypeError,
        r"x must be float32, float64, float16 or bfloat16.*got int64",
    ),
    "softmax of another byte order": (
        lambda: fastmha.softmax(np.ones(3, np.dtype(float).newbyteorder("S"))),
        TypeError,
        r"x must be float32, float64, float16 or bfloat16 \(native byte order\), got [<>]f8",
    ),
    "softmax on no threads": (
        lambda: fastmha.softmax(x3, num_threads=0),
        ValueError,
        r"num_threads must be at least 1, got 0",
    ),
    "softmax_backward, shapes": (
        lambda: fastmha.softmax_backward(x3, x4),
        ValueError,
        r"grad_output has shape \(2, 5, 8\) but softmax_output has \(2, 4, 5, 8\)",
    ),
    "softmax_backward, dtypes": (
        lambda: fastmha.softmax_backward(x3, x3.astype(float)),
        TypeError,
        r"grad_output has dtype float32 but softmax_output has float64",
    ),
    "softmax_backward of integers": (
        lambda: fastmha.softmax_backward(np.arange(3), x3),
        TypeError,
        r"grad_output must be float32",
    ),
    "softmax_backward from integers": (
        lambda: fastmha.softmax_backward(x3, np.arange(3)),
        TypeError,
        r"softmax_output must be float32, float64, float16 or bfloat16",
    ),
    "softmax_backward of a number": (
        lambda: fastmha.softmax_backward(1.0, 1.0),
        ValueError,
        r"grad_output must have at least one",
    ),
    "sdpa of two axes": (
        lambda: sdpa(x3[0], x3[0], x3[0]),
        ValueError,
        r"Q must have 3 axes \(B, n, d\) or 4 axes \(B, H, n, d\).*got shape \(5, 8\)",
    ),
    "sdpa of three and four axes": (
        lambda: sdpa(x3, x4, x4),
        ValueError,
        r"K must have 3 axes.*as many as Q, got shape \(2, 4, 5, 8\)",
    ),
    "sdpa of integers": (lambda: sdpa(x3, x3, x3.astype(int)), TypeError, r"V must be float32"),
    "sdpa of a width": (lambda: sdpa(x3, x3[..., :3], x3), ValueError, r"[Kk] has width 3.*[Qq] has 8"),
    "sdpa of a length": (lambda: sdpa(x3, x3, x3[:, :3]), ValueError, r"[Vv] has length 3.*[Kk] has 5"),
    "sdpa of a batch": (lambda: sdpa(x3, x3[:1], x3[:1]), ValueError, r"[Kk] has batch size 1.*[Qq] has 2"),
    "sdpa, mask of another shape": (
        lambda: sdpa(x3, x3, x3, zeros(B, 3, LQ, dtype=bool)),
        ValueError,
        r"mask of shape \(2, .*3, 5\) does not broadcast",
    ),
    "sdpa, mask of integers": (
        lambda: sdpa(x3, x3, x3, zeros(LQ, LQ, dtype=int)),
        TypeError,
        r"mask must be bool.*got int64",
    ),
    "sdpa, mask of three axes for four": (
        lambda: sdpa(x4, x4, x4, zeros(B, LQ, LQ, dtype=bool)),
        ValueError,
        r"mask must have 2 axes.*or 4",
    ),
    "sdpa, mask of three axes that do not fit": (
        lambda: sdpa(x3, x3, x3, zeros(B + 1, LQ, LQ, dtype=bool)),
        ValueError,
        rf"^mask of shape \({B + 1}, {LQ}, {LQ}\) does not broadcast to \(B, n_q, n_k\) = \({B}, {LQ}, {LQ}\)$",
    ),
    "sdpa, mask of four axes for three": (
        lambda: sdpa(x3, x3, x3, zeros(B, 1, LQ, LQ, dtype=bool)),
        ValueError,
        r"^mask must have 2 axes \(n_q, n_k\) or 3 that",
    ),
    "sdpa of lengths beyond BLAS": (
        lambda: sdpa(*[repeated(1, 2**31, 4)] * 3),
        ValueError,
        r"[Qq] has length 2147483648.*at most",
    ),
    "core of two axes": (
        lambda: core(x3[0], x3, x3, 2),
        ValueError,
        r"Q must have 3 axes \(B, L, d_model\), got shape \(5, 8\)",
    ),
    "core of integers": (lambda: core(x3, x3.astype(int), x3, 2), TypeError, r"K must be float32"),
    "core of heads that do not divide": (
        lambda: core(x3, x3, x3, 3),
        ValueError,
        r"d_model 8.*num_heads 3 does not divide",
    ),
    "core of no heads": (lambda: core(x3, x3, x3, 0), ValueError, r"num_heads must be at least 1, got 0"),
    "core of half a head": (lambda: core(x3, x3, x3, 0.5), TypeError, r"num_heads must be an integer"),
    "core of dtypes": (lambda: core(x3, x3, x3.astype(float), 2), TypeError, r"[Vv] has dtype float64"),
    "core, mask": (
        lambda: core(x3, x3, x3, 2, zeros(B, LQ, dtype=bool)),
        ValueError,
        r"mask of shape \(2, 5\) does not.*mask\[:, None, None, :\]",
    ),
    "core of lengths beyond BLAS": (
        lambda: core(*[repeated(1, 2**31, 4)] * 3, 2),
        ValueError,
        r"[Qq] has length 2147483648.*at most",
    ),
    "split of two axes": (
        lambda: fastmha.split_heads(x3[0], 2),
        ValueError,
        r"x must have 3 axes \(B, L, d_model\), got shape \(5, 8\)",
    ),
    "split that does not divide": (
        lambda: fastmha.split_heads(x3, 3),
        ValueError,
        r"d_model 8 on axis 2.*num_heads 3 does not divide",
    ),
    "split into none": (lambda: fastmha.split_heads(x3, 0), ValueError, r"num_heads must be at least 1, got 0"),
    "split by a float": (lambda: fastmha.split_heads(x3, 2.0), TypeError, r"num_heads must be an integer, got 2\.0"),
    "combine of three axes": (
        lambda: fastmha.combine_heads(x3),
        ValueError,
        r"x must have 4 axes \(B, H, L, D\), got shape \(2, 5, 8\)",
    ),
    "mha, weight missing": (
        lambda: mha(x3, x3, x3, 2, without("W_K")),
        ValueError,
        r"weights must hold W_Q, W_K, W_V, W_O.*missing W_K",
    ),
    "mha, weight unknown": (
        lambda: mha(x3, x3, x3, 2, good | {"W_X": x3}),
        ValueError,
        r"weights must hold.*unknown 'W_X'",
    ),
    "mha, no weights": (lambda: mha(x3, x3, x3, 2, None), TypeError, r"\bweights\b"),
    "mha of two axes": (lambda: mha(x3, x3[0], x3, 2, good), ValueError, r"k must have 3 axes.*\(5, 8\)"),
    "mha of integers": (lambda: mha(x3, x3, x3.astype(int), 2, good), TypeError, r"v must be float32"),
    "mha, weight of one axis": (
        lambda: mha(x3, x3, x3, 2, good | {"W_V": zeros(8)}),
        ValueError,
        r'weights\["W_V"\] must have 2 axes \(in, out\), got shape \(8,\)',
    ),
    "mha, weight of other rows": (
        lambda: mha(x3, x3, x3, 2, good | {"W_K": zeros(9, 8)}),
        ValueError,
        r'weights\["W_K"\] has 9 rows but k has width 8',
    ),
    "mha, weight of another dtype": (
        lambda: mha(x3, x3, x3, 2, good | {"W_Q": np.zeros((8, 8))}),
        TypeError,
        r'weights\["W_Q"\] has dtype float64 but q has float32',
    ),
    "mha, output weight of other rows": (
        lambda: mha(x3, x3, x3, 2, good | {"W_O": zeros(9, 8)}),
        ValueError,
        r'weights\["W_O"\] has 9 rows',
    ),
    "mha, bias of another shape": (
        lambda: mha(x3, x3, x3, 2, good | {"b_O": zeros(9)}),
        ValueError,
        r'weights\["b_O"\] must have shape \(8,\), got \(9,\)',
    ),
    "mha, bias of two axes": (
        lambda: mha(x3, x3, x3, 2, good | {"b_Q": zeros(1, 8)}),
        ValueError,
        r'weights\["b_Q"\] must have 1 axes \(out,\), got shape \(1, 8\)',
    ),
    "mha, bias of another dtype": (
        lambda: mha(x3, x3, x3, 2, good | {"b_K": np.zeros(8)}),
        TypeError,
        r'weights\["b_K"\] has dtype float64 but k has float32',
    ),
    "mha of heads that do not divide": (
        lambda: mha(x3, x3, x3, 3, good),
        ValueError,
        r"d_model 8.*num_heads 3 does not divide",
    ),
    "mha, mask": (
        lambda: mha(x3, x3, x3, 2, good, zeros(3, LQ, dtype=bool)),
        ValueError,
        r"mask of shape \(3, 5\) does not broadcast to \(Lq, Lk\) = \(5, 5\)",
    ),
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_messages_of_the_textbook_functions(name):
    call, kind, message = TEXTBOOK[name]
    fails(call, kind, message)


OWN_NAMES = {
    "sdpa, length": (lambda: sdpa(x3, x3, x3[:, :3]), r"^V has length 3 on axis 1 .*but K has 5"),
    "sdpa, width": (lambda: sdpa(x3, x3[..., :3], x3), r"^K has width 3 on axis 2 .*but Q has 8"),
    "core, length": (lambda: core(x3, x3, x3[:, :3], 2), r"^V has length 3 on axis 1 .*but K has 5"),
    "core, width": (lambda: core(x3, x3[..., :6], x3, 2), r"^K has (width|d_model) 6 on axis 2 .*but Q has 8"),
    "core, heads": (lambda: core(x3, x3[..., :7], x3, 2), r"^K has d_model 7 on axis 2"),
}


@pytest.mark.parametrize("name", OWN_NAMES)
def test_textbook_messages_name_the_arguments_and_axes_of_their_own_signature(name):
    call, message = OWN_NAMES[name]
    fails(call, ValueError, message)


def test_set_num_threads():
    fails(lambda: fastmha.set_num_threads(0), ValueError, r"num_threads must be at least 1, got 0")
    fails(lambda: fastmha.set_num_threads("2"), TypeError, r"num_threads must be an integer, got '2'")
    before = fastmha.get_num_threads()
    fails(lambda: fastmha.set_num_threads(-1), ValueError, r"num_threads")
    assert fastmha.get_num_threads() == before
