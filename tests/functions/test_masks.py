"""The mask builders against masks written out by hand, and every message."""

import numpy as np
import pytest

from fastmha import masks


def as_ints(mask):
    assert mask.dtype == bool
    return mask.astype(int).tolist()


def test_causal_mask_blocks_the_strict_upper_triangle():
    assert as_ints(masks.create_causal_mask(3)) == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]


def test_causal_mask_of_unequal_lengths_begins_with_both_sequences_by_default():
    assert as_ints(masks.create_causal_mask(2, 4)) == [[0, 1, 1, 1], [0, 0, 1, 1]]
    assert as_ints(masks.create_causal_mask(3, 2)) == [[0, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (2, [[0, 0, 0, 1], [0, 0, 0, 0]]),
        (-1, [[1, 1, 1, 1], [0, 1, 1, 1]]),
        (-2, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        (3, [[0, 0, 0, 0], [0, 0, 0, 0]]),
        (10**30, [[0, 0, 0, 0], [0, 0, 0, 0]]),
        (-(10**30), [[1, 1, 1, 1], [1, 1, 1, 1]]),
        (np.int8(2), [[0, 0, 0, 1], [0, 0, 0, 0]]),
    ],
)
def test_offset_moves_the_diagonal_of_the_causal_mask(offset, expected):
    assert as_ints(masks.create_causal_mask(2, 4, offset=offset)) == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64, "float32", np.dtype("float64")])
def test_floating_causal_mask_is_the_additive_form_of_the_boolean_one(dtype):
    additive = masks.create_causal_mask(2, 3, offset=1, dtype=dtype)
    assert additive.dtype == np.dtype(dtype)
    assert additive.tolist() == [[0.0, 0.0, -np.inf], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_masks_of_empty_sequences_are_empty(shape):
    assert masks.create_causal_mask(*shape).shape == shape
    assert masks.create_attention_mask(*shape).shape == shape
    assert masks.create_attention_mask(*shape, key_padding_lengths=[0, 0]).shape == (2, 1, *shape)
    assert masks.create_causal_mask_with_cache(*shape, 0).shape == shape


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, np.uint8)])
def test_padding_mask_blocks_positions_from_the_length_on(kind):
    assert as_ints(masks.create_padding_mask(kind([0, 2, 3]), 3)) == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]


def test_padding_mask_of_an_empty_batch_or_of_empty_sequences_is_empty():
    assert masks.create_padding_mask([], 3).shape == (0, 3)
    assert masks.create_padding_mask([0, 0], 0).shape == (2, 0)


def test_attention_mask_without_lengths_has_two_axes():
    assert as_ints(masks.create_attention_mask(2)) == [[0, 1], [0, 0]]
    assert as_ints(masks.create_attention_mask(2, 3)) == [[0, 1, 1], [0, 0, 1]]
    assert as_ints(masks.create_attention_mask(2, 3, is_causal=False)) == [[0, 0, 0], [0, 0, 0]]


def test_attention_mask_with_lengths_blocks_what_either_mask_blocks():
    causal = masks.create_attention_mask(2, 3, key_padding_lengths=[1, 3])
    assert as_ints(causal) == [[[[0, 1, 1], [0, 1, 1]]], [[[0, 1, 1], [0, 0, 1]]]]
    free = masks.create_attention_mask(2, 3, is_causal=False, key_padding_lengths=[1, 3])
    assert as_ints(free) == [[[[0, 1, 1], [0, 1, 1]]], [[[0, 0, 0], [0, 0, 0]]]]


def test_new_queries_see_the_whole_cache_and_the_new_keys_up_to_their_own():
    assert as_ints(masks.create_causal_mask_with_cache(2, 5, 3)) == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert as_ints(masks.create_causal_mask_with_cache(2, 2, 0)) == as_ints(masks.create_causal_mask(2))
    assert as_ints(masks.create_causal_mask_with_cache(1, 3, 3)) == [[0, 0, 0]]


def test_rows_of_the_cache_mask_are_the_last_rows_of_the_whole_causal_mask():
    whole = masks.create_causal_mask(7)
    for cached in range(8):
        assert np.array_equal(masks.create_causal_mask_with_cache(7 - cached, 7, cached), whole[cached:])


def test_the_name_of_bfloat16_is_a_dtype_of_masks():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert masks.create_causal_mask(2, dtype="bfloat16").dtype == bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.create_causal_mask(-1), r"seq_len_q must be at least 0, got -1"),
        (lambda: masks.create_causal_mask(2, -3), r"seq_len_k must be at least 0, got -3"),
        (lambda: masks.create_attention_mask(-1), r"seq_len_q must be at least 0, got -1"),
        (lambda: masks.create_attention_mask(2, -3), r"seq_len_k must be at least 0, got -3"),
        (lambda: masks.create_causal_mask_with_cache(-1, 3, 1), r"seq_len_q must be at least 0, got -1"),
        (lambda: masks.create_causal_mask_with_cache(1, -3, 1), r"seq_len_k must be at least 0, got -3"),
        (lambda: masks.create_causal_mask_with_cache(1, 3, -1), r"cache_len must be from 0 to seq_len_k = 3, got -1"),
        (lambda: masks.create_causal_mask_with_cache(1, 3, 4), r"cache_len must be from 0 to seq_len_k = 3, got 4"),
        (lambda: masks.create_padding_mask([1], -1), r"max_len must be at least 0, got -1"),
        (lambda: masks.create_padding_mask([1, 4], 3), r"lengths must be from 0 to max_len = 3, got 4 in row 1"),
        (lambda: masks.create_padding_mask([-1, 2], 3), r"lengths must be from 0 to max_len = 3, got -1 in row 0"),
        (lambda: masks.create_padding_mask(2, 3), r"lengths must have one axis, \(B,\), got 0 axes of shape \(\)"),
        (
            lambda: masks.create_padding_mask([[1]], 3),
            r"lengths must have one axis, \(B,\), got 2 axes of shape \(1, 1",
        ),
        (
            lambda: masks.create_attention_mask(2, 3, key_padding_lengths=[0, 4]),
            r"key_padding_lengths must be from 0 to seq_len_k = 3, got 4 in row 1",
        ),
        (
            lambda: masks.create_attention_mask(2, key_padding_lengths=[[1]]),
            r"key_padding_lengths must have one axis, \(B,\), got 2 axes of shape \(1, 1\)",
        ),
    ],
)
def test_wrong_values_name_the_argument_and_what_came(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.create_causal_mask(2.0), r"seq_len_q must be an integer, got 2\.0"),
        (lambda: masks.create_causal_mask(True), r"seq_len_q must be an integer, got True"),
        (lambda: masks.create_causal_mask(2, "3"), r"seq_len_k must be an integer, got '3'"),
        (lambda: masks.create_causal_mask(2, offset=0.5), r"offset must be an integer, got 0\.5"),
        (lambda: masks.create_causal_mask(2, offset=[1, 2]), r"offset must be an integer, got \[1, 2\]"),
        (lambda: masks.create_causal_mask(2, dtype=np.int64), r"dtype must be bool, float32, .* or bfloat16, got <class '"),
        (
            lambda: masks.create_causal_mask(2, dtype="f4,,"),
            r"dtype must be bool, float32, float64, float16 or bfloat16, got 'f4,,'",
        ),
        (lambda: masks.create_causal_mask(2, dtype="real"), r"dtype must be bool, float32, .* or bfloat16, got 'real'"),
        (lambda: masks.create_causal_mask(2, dtype=None), r"dtype must be bool, float32, float64, float16 or bfloat16, got None"),
        (lambda: masks.create_attention_mask(2.0), r"seq_len_q must be an integer, got 2\.0"),
        (lambda: masks.create_causal_mask_with_cache(1, 3, 1.0), r"cache_len must be an integer, got 1\.0"),
        (lambda: masks.create_padding_mask([1], 3.0), r"max_len must be an integer, got 3\.0"),
        (lambda: masks.create_padding_mask([1.0], 3), r"lengths must hold integers, got dtype float64"),
        (lambda: masks.create_padding_mask([True], 3), r"lengths must hold integers, got dtype bool"),
        (
            lambda: masks.create_attention_mask(2, key_padding_lengths=[1.5]),
            r"key_padding_lengths must hold integers, got dtype float64",
        ),
    ],
)
def test_wrong_types_name_the_argument_and_what_came(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.filterwarnings("ignore:Creating an ndarray from ragged")  # before NumPy 1.24
def test_ragged_lengths_are_refused_by_name():
    with pytest.raises((TypeError, ValueError), match=r"lengths must (have one axis|hold integers)"):
        masks.create_padding_mask([[1], [1, 2]], 3)
