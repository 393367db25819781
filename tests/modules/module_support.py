"""What tests of MultiHeadAttention share: a module, the reference's answer for its weights, comparisons."""

import numpy as np
import pytest
from support import normal

import fastmha
from fastmha import reference

D_MODEL, HEADS = 24, 4
ALL = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
NAMES = {False: ALL[:4], True: ALL}
TOLERANCE = {np.float64: 1e-12, np.float32: 2e-5}
both_dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def module(d_model=D_MODEL, num_heads=HEADS, dtype=np.float64, use_bias=False, **keywords):
    """A module with biases that are not zero."""
    m = fastmha.MultiHeadAttention(d_model, num_heads, dtype=dtype, use_bias=use_bias, rng=0, **keywords)
    if use_bias:
        for i, name in enumerate(ALL[4:]):
            setattr(m, name, normal(*getattr(m, name).shape, seed=10 + i))
    return m


def by_reference(m, X, grad_output=None, context=None, dtype=np.float64, **keywords):
    """The specification's answer in `dtype` for the weights of m."""
    weights = {name: w.astype(dtype) for name, w in m.parameters().items()}
    if keywords.get("mask") is not None and keywords["mask"].dtype != bool:
        keywords["mask"] = keywords["mask"].astype(dtype)
    return reference.mha_forward_backward(
        X.astype(dtype), weights, m.num_heads, m.num_kv_heads, None if context is None else context.astype(dtype),
        None if grad_output is None else grad_output.astype(dtype), **keywords,
    )  # fmt: skip


def assert_close(actual, expected, dtype=np.float64, **keywords):
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], **keywords)


def as_bits(x):
    return np.ascontiguousarray(x).view(np.uint8)


def assert_same_bits(a, b):
    np.testing.assert_array_equal(as_bits(a), as_bits(b))
