"""Operations and bytes against counts made by hand, and every message."""

import math

import numpy as np
import pytest

from fastmha import KVCache, analysis

count_flops = analysis.count_flops
count_memory_bytes = analysis.count_memory_bytes


def test_plain_flops_equal_a_hand_count():
    # 8*B*L*d**2 = 8*1*2*16 = 256; 4*B*L**2*d = 4*4*4 = 64; 5*B*h*L**2 = 5*2*4 = 40
    assert count_flops(1, 2, 4, 2) == 256 + 64 + 40
    # 8*2*128*512**2 = 536870912; 4*2*128**2*512 = 67108864; 5*2*8*128**2 = 1310720
    assert count_flops(2, 128, 512, 8) == 536870912 + 67108864 + 1310720


@pytest.mark.parametrize("backward", [False, True])
def test_matrix_products_cost_the_same_for_every_number_of_heads(backward):
    softmax = (10 if backward else 5) * 3 * 20**2
    products = {count_flops(3, 20, 24, h, backward=backward) - softmax * h for h in (1, 2, 3, 4, 6, 8, 12, 24)}
    assert len(products) == 1


def test_training_step_equals_a_hand_count():
    # projections 3 * 256 = 768; products over the pairs 64 forward and 2*2*4*(3*2 + 2*2) = 160 backward; softmax 2 * 40
    assert count_flops(1, 2, 4, 2, backward=True) == 768 + 64 + 160 + 80


def test_grouped_heads_project_fewer_keys_and_values():
    # Q 2*2*4*4 = 64, K 2*2*4*2 = 32, V 32, O 64; the pairs as without groups: 64 + 40
    assert count_flops(1, 2, 4, 2, n_kv_heads=1) == 64 + 32 + 32 + 64 + 64 + 40


def test_free_head_widths_equal_a_hand_count():
    # Q and K 2*2*4*(2*3) = 96 each, V and O 2*2*4*(2*2) = 64 each; pairs 2*2*4*(3 + 2) = 80; softmax 40
    assert count_flops(1, 2, 4, 2, d_k=3, d_v=2) == 96 + 96 + 64 + 64 + 80 + 40
    # backward, twice the projections, 2*2*4*(3*3 + 2*2) = 208, and 40
    assert count_flops(1, 2, 4, 2, d_k=3, d_v=2, backward=True) == 3 * 320 + 80 + 208 + 80


def test_value_width_defaults_to_the_key_width():
    assert count_flops(1, 2, 4, 3, d_k=5) == count_flops(1, 2, 4, 3, d_k=5, d_v=5)


def test_cross_attention_projects_keys_and_values_from_the_other_sequence():
    # Q and O 2*2*4*4 = 64 each, K and V 2*3*4*4 = 96 each; 6 pairs: 2*2*6*4 = 96, softmax 5*2*6 = 60
    assert count_flops(1, 2, 4, 2, seq_len_k=3) == 64 + 64 + 96 + 96 + 96 + 60


def test_causal_flops_count_the_triangle():
    # 6 of 9 pairs: 8*3*16 = 384; 2*2*6*4 = 96; 5*2*6 = 60
    assert count_flops(1, 3, 4, 2, is_causal=True) == 384 + 96 + 60


def pairs_counted(seq_len_q, seq_len_k, **keywords):
    with_pairs = count_flops(1, seq_len_q, 1, 1, seq_len_k=seq_len_k, **keywords)
    projections = 2 * (seq_len_q + seq_len_k) * 2
    assert (with_pairs - projections) % 9 == 0  # 2*(dk + dv) + 5 for each pair
    return (with_pairs - projections) // 9


@pytest.mark.parametrize(
    ("lengths", "keywords", "expected"),
    [
        ((3, 3), {"is_causal": True}, 1 + 2 + 3),
        ((2, 4), {"is_causal": True}, 3 + 4),
        ((4, 2), {"is_causal": True}, 0 + 0 + 1 + 2),
        ((4, 4), {"window": (1, 0)}, 1 + 2 + 2 + 2),
        ((4, 4), {"window": (0, 2)}, 3 + 3 + 2 + 1),
        ((4, 4), {"window": (0, 0)}, 4),
        ((4, 4), {"window": (None, None)}, 16),
        ((4, 4), {"window": (2, 5), "is_causal": True}, 1 + 2 + 3 + 3),
        ((10**9, 10**9), {"is_causal": True}, 500000000500000000),
    ],
)
def test_only_remaining_pairs_are_counted(lengths, keywords, expected):
    assert pairs_counted(*lengths, **keywords) == expected


def test_remaining_pairs_equal_an_enumeration():
    bounds = (None, 0, 1, 3, 9)
    for rows in range(6):
        for columns in range(6):
            for left in bounds:
                for right in bounds:
                    for is_causal in (False, True):
                        expected = sum(
                            (left is None or j >= i + columns - rows - left)
                            and (right is None or j <= i + columns - rows + right)
                            and (not is_causal or j <= i + columns - rows)
                            for i in range(rows)
                            for j in range(columns)
                        )
                        assert pairs_counted(rows, columns, window=(left, right), is_causal=is_causal) == expected


def test_flops_are_exact_integers_beyond_64_bits():
    assert count_flops(10**6, 10**6, 10**6, 1) == 8 * 10**24 + 4 * 10**24 + 5 * 10**18


def test_memory_equals_a_hand_count():
    assert count_memory_bytes(1, 2, 4, 2) == {
        "weights": 256,  # 4 * 4 * 4 items of 4 bytes
        "input": 32,  # 2 * 4
        "qkv": 96,  # 3 * 2 * 4
        "scores": 32,  # 2 heads * 2 * 2
        "concat": 32,
        "output": 32,
        "total": 480,
    }


def test_tiled_memory_has_one_number_a_row_and_no_scores():
    assert count_memory_bytes(1, 2, 4, 2, algorithm="tiled") == {
        "weights": 256, "input": 32, "qkv": 96, "lse": 16, "concat": 32, "output": 32, "total": 464,
    }  # fmt: skip


def test_backward_memory_adds_a_gradient_of_each_array():
    assert count_memory_bytes(1, 2, 4, 2, backward=True) == {
        "weights": 256, "input": 32, "qkv": 96, "scores": 32, "concat": 32, "output": 32,
        "grad_weights": 256, "grad_input": 32, "grad_qkv": 96, "grad_scores": 32, "grad_concat": 32, "grad_output": 32,
        "total": 960,
    }  # fmt: skip
    tiled = count_memory_bytes(1, 2, 4, 2, algorithm="tiled", backward=True)
    assert tiled["delta"] == 16
    assert not {"scores", "grad_scores", "grad_lse"} & set(tiled)
    assert tiled["total"] == 928


def test_float64_takes_twice_the_memory_of_float32():
    single, double = (count_memory_bytes(2, 5, 12, 3, dtype, backward=True) for dtype in ("float32", "float64"))
    assert double == {name: 2 * count for name, count in single.items()}


def test_memory_of_grouped_heads_and_free_widths_equals_a_hand_count():
    # h*dk = 4*3 = 12, hkv*(dk + dv) = 2*(3 + 5) = 16, h*dv = 4*5 = 20; 7 columns of input, 2*3 = 6 tokens, 8 bytes
    memory = count_memory_bytes(2, 3, 7, 4, "float64", n_kv_heads=2, d_k=3, d_v=5)
    assert memory["weights"] == 7 * (12 + 16 + 20) * 8
    assert memory["qkv"] == 6 * 28 * 8
    assert memory["scores"] == 2 * 4 * 9 * 8
    assert memory["concat"] == 6 * 20 * 8
    assert memory["input"] == memory["output"] == 6 * 7 * 8


def test_only_scores_grow_with_the_square_of_the_length():
    short, long = (count_memory_bytes(1, length, 8, 2) for length in (100, 200))
    assert long["scores"] == 4 * short["scores"]
    assert all(long[name] == 2 * short[name] for name in ("input", "qkv", "concat", "output"))
    tiled = [count_memory_bytes(1, length, 8, 2, algorithm="tiled")["total"] for length in (0, 100, 200)]
    assert tiled[2] - tiled[1] == tiled[1] - tiled[0]


def test_arithmetic_intensity_is_flops_per_byte():
    assert analysis.arithmetic_intensity(1, 2, 4, 2) == 360 / 480
    assert analysis.arithmetic_intensity(1, 2, 4, 2, "float64", algorithm="tiled") == 360 / 928
    assert analysis.arithmetic_intensity(1, 2, 4, 2, backward=True) == 1072 / 960
    # 192 + 104 operations; 48 weights and 2*(4 + 8 + 4 + 4) + 8 items
    assert analysis.arithmetic_intensity(1, 2, 4, 2, n_kv_heads=1) == 296 / (4 * (48 + 40 + 8))
    # 440 operations; 4*(16 + 4) weights and 2*(4 + 16 + 4 + 4) + 8 items
    assert analysis.arithmetic_intensity(1, 2, 4, 2, d_k=3, d_v=2) == 440 / (4 * (80 + 56 + 8))


def test_tiled_intensity_grows_with_length_past_the_bound_of_materialised_scores():
    blas, tiled = (analysis.arithmetic_intensity(1, 2**16, 512, 8, algorithm=name) for name in ("blas", "tiled"))
    # long sequences: (4*d + 5*h) operations per pair against h scores of 4 bytes
    assert math.isclose(blas, (4 * 512 + 5 * 8) / (4 * 8), rel_tol=0.05)
    assert tiled > 10 * blas


def test_cache_bytes_equal_a_hand_count():
    assert analysis.kv_cache_bytes(1, 1, 1, 1) == 8
    assert analysis.kv_cache_bytes(2, 3, 4, 5, dtype="float64") == 2 * 2 * 3 * 4 * 5 * 8
    assert analysis.kv_cache_bytes(1, 4096, 8, 128, 32) == 1073741824
    for half in ("float16", "f2", np.float16, "bfloat16"):
        assert analysis.kv_cache_bytes(2, 3, 4, 5, dtype=half) == 2 * 2 * 3 * 4 * 5 * 2


def test_cache_bytes_are_those_that_a_cache_takes():
    for dtype in ("float64", "float32", "float16"):
        assert analysis.kv_cache_bytes(2, 30, 4, 8, dtype=dtype) == KVCache(2, 4, 8, capacity=30, dtype=dtype).nbytes


def test_cache_bytes_in_bfloat16_by_its_type():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert analysis.kv_cache_bytes(2, 3, 4, 5, dtype=ml_dtypes.bfloat16) == 2 * 2 * 3 * 4 * 5 * 2


def test_pair_products_reach_the_projections_at_the_crossover_length():
    for width in (1, 64, 512):
        length = analysis.crossover_length(width)
        assert length == 2 * width
        assert 4 * length**2 * width >= 8 * length * width**2
        assert 4 * (length - 1) ** 2 * width < 8 * (length - 1) * width**2 or length - 1 == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_flops(-1, 2, 4, 2), r"batch_size must be at least 0, got -1"),
        (lambda: count_flops(1, -2, 4, 2), r"seq_len must be at least 0, got -2"),
        (lambda: count_flops(1, 2, 0, 2), r"d_model must be at least 1, got 0"),
        (lambda: count_flops(1, 2, 4, 0), r"n_heads must be at least 1, got 0"),
        (lambda: count_flops(1, 2, 4, 2, n_kv_heads=0), r"n_kv_heads must be at least 1, got 0"),
        (lambda: count_flops(1, 2, 4, 2, d_k=0), r"d_k must be at least 1, got 0"),
        (lambda: count_flops(1, 2, 4, 2, d_v=-1), r"d_v must be at least 1, got -1"),
        (lambda: count_flops(1, 2, 4, 2, seq_len_k=-1), r"seq_len_k must be at least 0, got -1"),
        (lambda: count_flops(1, 2, 4, 2, window=(-1, 0)), r"window\[0\] must be at least 0, got -1"),
        (lambda: count_flops(1, 2, 4, 2, window=(0, -2)), r"window\[1\] must be at least 0, got -2"),
        (lambda: count_flops(1, 2, 5, 2), r"d_model must be a multiple of n_heads unless d_k is given, got 5 and 2"),
        (lambda: count_flops(1, 2, 6, 3, n_kv_heads=2), r"n_heads must be a multiple of n_kv_heads, got 3 and 2"),
        (lambda: count_memory_bytes(1, -2, 4, 2), r"seq_len must be at least 0, got -2"),
        (lambda: count_memory_bytes(1, 2, 5, 2), r"d_model must be a multiple of n_heads unless d_k is given"),
        (
            lambda: count_memory_bytes(1, 2, 4, 2, algorithm="auto"),
            r'algorithm must be "blas" or "tiled", got \'auto\'',
        ),
        (lambda: analysis.arithmetic_intensity(1, 2, 4, 2, algorithm="x"), r'algorithm must be "blas" or "tiled"'),
        (lambda: analysis.arithmetic_intensity(-1, 2, 4, 2), r"batch_size must be at least 0, got -1"),
        (lambda: analysis.kv_cache_bytes(-1, 2, 3, 4), r"batch_size must be at least 0, got -1"),
        (lambda: analysis.kv_cache_bytes(1, -2, 3, 4), r"seq_len must be at least 0, got -2"),
        (lambda: analysis.kv_cache_bytes(1, 2, 0, 4), r"n_kv_heads must be at least 1, got 0"),
        (lambda: analysis.kv_cache_bytes(1, 2, 3, 0), r"head_dim must be at least 1, got 0"),
        (lambda: analysis.kv_cache_bytes(1, 2, 3, 4, 0), r"n_layers must be at least 1, got 0"),
        (lambda: analysis.crossover_length(0), r"d_model must be at least 1, got 0"),
    ],
)
def test_wrong_values_name_the_argument_and_what_came(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_flops(1.0, 2, 4, 2), r"batch_size must be an integer, got 1\.0"),
        (lambda: count_flops(1, True, 4, 2), r"seq_len must be an integer, got True"),
        (lambda: count_flops(1, 2, 4, "2"), r"n_heads must be an integer, got '2'"),
        (lambda: count_flops(1, 2, 4, 2, window=3), r"window must be a pair \(left, right\), got 3"),
        (lambda: count_flops(1, 2, 4, 2, window=(1, 2, 3)), r"window must be a pair \(left, right\), got \(1, 2, 3\)"),
        (lambda: count_flops(1, 2, 4, 2, window=(0.5, 0)), r"window\[0\] must be an integer, got 0\.5"),
        (lambda: count_memory_bytes(1, 2, 4, 2, "int32"), r"dtype must be float32 or float64, got 'int32'"),
        (lambda: count_memory_bytes(1, 2, 4, 2, "real"), r"dtype must be float32 or float64, got 'real'"),
        (lambda: count_memory_bytes(1, 2, 4, 2, None), r"dtype must be float32 or float64, got None"),
        (lambda: analysis.arithmetic_intensity(1, 2, 4, 2, "f2"), r"dtype must be float32 or float64, got 'f2'"),
        (lambda: analysis.kv_cache_bytes(1, 2, 3, 4, dtype="i2"),
         r"dtype must be float32, float64, float16 or bfloat16, got 'i2'"),
        (lambda: analysis.kv_cache_bytes(1, 2, 3, 4, dtype=None),
         r"dtype must be float32, float64, float16 or bfloat16, got None"),
        (lambda: count_memory_bytes(1, 2, 4, 2, "bfloat16"), r"dtype must be float32 or float64, got 'bfloat16'"),
        (lambda: analysis.kv_cache_bytes(1, 2, 3, 4.0), r"head_dim must be an integer, got 4\.0"),
        (lambda: analysis.crossover_length(512.0), r"d_model must be an integer, got 512\.0"),
    ],
)
def test_wrong_types_name_the_argument_and_what_came(call, message):
    with pytest.raises(TypeError, match=message):
        call()
