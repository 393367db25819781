"""Rule 8: the same bits from run to run, for any number of threads, and whatever the other batch rows are.

Instruction sets agree to rounding only; their bounds are those of `support.error_bounds`.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support import (
    DTYPES,
    ISAS,
    LAYOUTS,
    algorithms,
    all_dtypes,
    assert_close,
    assert_same,
    bits,
    draw,
    dtypes,
    error_bounds,
    in_float64,
    layouts,
    padded,
    run,
    same_bits,
    selected,
)

import fastmha
from fastmha import _core, reference, validate

# Few and many blocks of rows, an odd number of items, single rows; masks of every kind.
PROBLEMS = {
    "plain": ((3, 4, 2, 33, 33, 16, 16), {}),
    "several blocks": ((1, 3, 1, 70, 2050, 5, 4), {"is_causal": True, "offset": 1979}),
    "window and padding": (
        (3, 2, 2, 40, 50, 7, 9),
        {"window": (5, 3), "offset": [2, -4, 9], "key_padding_lengths": [50, 7, 0]},
    ),
    "softcap": ((3, 2, 1, 17, 18, 8, 8), {"softcap": 2.0, "scale": 0.7}),
    "key ranges": ((3, 4, 2, 70, 500, 5, 4), {"key_ranges": ([193, 499, 0], [401, 500, 0])}),
    "one query": ((3, 4, 4, 1, 65, 16, 16), {}),
    "sinks, alibi, dropout, a mask's gradient": (
        (3, 4, 2, 70, 200, 5, 4),
        {"sinks": np.array([1, -np.inf, 3, 0]), "alibi": np.array([0.5, 0, 1, -0.1]), "offset": [130, 5, -9], "dropout": 0.3,
         "seed": 7, "mask": np.linspace(-1, 1, 800).reshape(1, 4, 1, 200), "need_bias_grad": True},
    ),
    "width one": ((3, 2, 2, 9, 9, 1, 1), {"is_causal": True}),
}
problems = pytest.mark.parametrize("name", PROBLEMS)


def make(rng, name, dtype, layout="BHLD"):
    shape, keywords = PROBLEMS[name]
    scores = {key: keywords[key].astype(dtype) for key in ("sinks", "alibi", "mask") if key in keywords}
    return draw(rng, *shape, dtype=dtype, layout=layout), {"layout": layout, **keywords, **scores}


@all_dtypes
@algorithms
@problems
def test_n_threads_agnosticism(isa, dtype, algorithm, name, rng):
    arrays, keywords = make(rng, name, dtype)
    one = run(fastmha, *arrays, threads=1, algorithm=algorithm, **keywords)
    for threads in (2, 3, 7):
        assert_same(one, run(fastmha, *arrays, threads=threads, algorithm=algorithm, **keywords))


@pytest.mark.parametrize("rules", [{}, {"is_causal": True, "offset": 0}, {"window": (40, 10), "offset": 0}], ids=str)
@all_dtypes
@algorithms
def test_n_threads_agnosticism_of_nan(isa, dtype, algorithm, rules, rng):
    """Also of its sign, which a sum takes from one of its operands."""
    for Lq, Lk in ((61, 300), (300, 300), (64, 800)):       # gradients made where they are wanted; or written; runs of keys
        q, k, v, g = draw(rng, 1, 4, 2, Lq, Lk, 16, 16, dtype)
        k[0, 0, 40], v[0, 0, 100], v[0, 1, 7, 3], k[0, 1, 80, 5], k[0, 1, 90] = np.nan, np.inf, -np.inf, np.nan, -np.inf
        with np.errstate(all="ignore"):
            one = run(fastmha, q, k, v, g, threads=1, algorithm=algorithm, **rules)
            for threads in (2, 3, 7, 16):
                assert_same(one, run(fastmha, q, k, v, g, threads=threads, algorithm=algorithm, **rules))


@pytest.mark.parametrize("size", [1e-37, 3e-37, 1e-35])
@algorithms
def test_n_threads_agnosticism_where_sums_underflow(isa, algorithm, size, rng):
    """Also of the sign of 0, from run to run."""
    q, k, v, g = draw(rng, 1, 6, 2, 254, 191, 16, 16, np.float32)
    g *= np.float32(size)
    one = run(fastmha, q, k, v, g, threads=1, algorithm=algorithm, is_causal=True, offset=0)
    for threads in (2, 3, 7, 7, 16, 16):
        assert_same(one, run(fastmha, q, k, v, g, threads=threads, algorithm=algorithm, is_causal=True, offset=0))


@pytest.mark.parametrize("poisoned", range(4), ids=["q", "k", "v", "grad_out"])
@pytest.mark.parametrize("rules", [{}, {"is_causal": True, "offset": 200}, {"key_padding_lengths": [150]}], ids=str)
@all_dtypes
@algorithms
def test_n_threads_agnosticism_of_a_poisoned_row(isa, dtype, algorithm, rules, poisoned, rng):
    for Lq, Lk in ((8, 192), (61, 250), (192, 192)):
        for poison in (np.nan, -np.nan, np.inf):
            arrays = draw(rng, 1, 1, 1, Lq, Lk, 16, 16, dtype)
            arrays[poisoned][0, 0, 5] = poison
            with np.errstate(all="ignore"):
                one = run(fastmha, *arrays, threads=1, algorithm=algorithm, **rules)
                for threads in (2, 5, 16):
                    assert_same(one, run(fastmha, *arrays, threads=threads, algorithm=algorithm, **rules))


@pytest.mark.parametrize("rules", [{}, {"is_causal": True, "offset": 0}], ids=str)
@all_dtypes
@algorithms
def test_a_score_of_minus_infinity_has_no_weight_also_in_a_row_that_is_no_number(isa, dtype, algorithm, rules, rng):
    """Its keys get nothing of grad_v, whatever else is in their tile."""
    q, k, v, g = draw(rng, 1, 1, 1, 192, 192, 16, 16, dtype)
    q[0, 0, 100, 0] = np.inf
    with np.errstate(all="ignore"):
        below = np.isneginf(q[0, 0, 100, 0] * k[0, 0, :, 0])
        for threads in (1, 2, 5):
            grad_v = run(fastmha, q, k, v, g, threads=threads, algorithm=algorithm, **rules)[4]
            attended = np.arange(192) <= (100 if rules else 191)
            assert np.array_equal(np.isnan(grad_v[0, 0]).any(axis=-1), attended & ~below)


@all_dtypes
@algorithms
@problems
def test_the_same_bits_from_run_to_run(dtype, algorithm, name, rng):
    arrays, keywords = make(rng, name, dtype)
    first = run(fastmha, *arrays, algorithm=algorithm, **keywords)
    for _ in range(3):
        assert_same(first, run(fastmha, *[padded(x) for x in arrays], algorithm=algorithm, **keywords))


def with_weights(q, k, v):
    problem = validate.attention_problem(q, k, v, "BHLD")
    B, H, Lq, Lk, Dv = *q.shape[:3], k.shape[2], v.shape[3]
    out, weights = np.empty((B, H, Lq, Dv), problem.element), np.empty((B, H, Lq, Lk), problem.dtype)
    _core.tiled_forward(problem, out, None, weights, 1)
    return out, weights


RULES = {
    "plain": {},
    "band": {"is_causal": True, "offset": 300, "window": (200, None)},
    "padding": {"key_padding_lengths": [420, 77]},
    "one sequence's end": {"key_ranges": ([0, 400], None)},
}


@all_dtypes
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("distance", [1024, 3072, 4096])
def test_rows_that_share_few_sets_of_the_caches_have_the_bits_of_others(isa, dtype, distance, rules, rng):
    """Such rows are copied where a product of many others reads them again and again."""
    def apart(x):
        memory = np.full((*x.shape[:3], distance // x.itemsize), np.nan, x.dtype)
        memory[..., :x.shape[3]] = x
        return memory[..., :x.shape[3]]

    for D, Dv, Lq in ((64, 60, 70), (60, 64, 24), (48, 8, 23)):
        arrays = draw(rng, 2, 4, 2, Lq, 420, D, Dv, dtype)
        arrays[1][0, 1, 9, 5] = np.nan      # the firewall
        for threads in (1, 3):
            kept = run(fastmha, *arrays, threads=threads, algorithm="tiled", **RULES[rules])
            assert_same(kept, run(fastmha, *map(apart, arrays), threads=threads, algorithm="tiled", **RULES[rules]))
        assert_same(with_weights(*arrays[:3]), with_weights(*map(apart, arrays[:3])))


@all_dtypes
@pytest.mark.parametrize("function", ["softmax", "softmax_backward"])
def test_n_threads_agnosticism_of_the_row_functions(isa, dtype, function, rng):
    x = rng.standard_normal((700, 130)).astype(dtype)  # several items of the pool
    arguments = (x,) if function == "softmax" else (x, fastmha.softmax(x))
    one = getattr(fastmha, function)(*arguments, num_threads=1)
    for threads in (2, 3, 7):
        assert same_bits(one, getattr(fastmha, function)(*arguments, num_threads=threads))
    for row in (0, 126, 699):
        assert same_bits(one[row], getattr(fastmha, function)(*(a[row] for a in arguments)))


@all_dtypes
def test_n_threads_agnosticism_of_the_textbook_functions(dtype, rng):
    """They take the threads of `set_num_threads`."""
    x = rng.standard_normal((3, 40, 24)).astype(dtype)
    weights = {name: rng.standard_normal((24, 24)).astype(dtype) for name in ("W_Q", "W_K", "W_V", "W_O")}
    try:
        results = []
        for threads in (1, 2, 3, 7):
            fastmha.set_num_threads(threads)
            assert fastmha.get_num_threads() == threads
            results.append(
                [
                    fastmha.multi_head_attention(x, x, x, 4, weights),
                    *fastmha.multi_head_attention_core(x, x, x, 4),
                    *fastmha.scaled_dot_product_attention(x, x, x),
                ]
            )
    finally:
        fastmha.set_num_threads(None)
    for others in results[1:]:
        assert_same(results[0], others)


# ---------------------------------------------------------------------------------------------------- batch agnosticism


def row_of(keywords, b):
    """The keywords for batch row b alone."""
    per_row = {name for name in ("offset", "key_padding_lengths") if np.ndim(keywords.get(name))}
    if len(keywords.get("mask", ())) == BATCH:
        per_row.add("mask")
    own = {name: value[b : b + 1] if name in per_row else value for name, value in keywords.items()}
    if "key_ranges" in own:
        own["key_ranges"] = tuple(side if side is None else side[b : b + 1] for side in own["key_ranges"])
    return own


BATCH = 5
OF_BATCH = {
    "plain": lambda rng, dtype: {},
    "causal": lambda rng, dtype: {"is_causal": True, "offset": np.array([0, 3, -2, 20, 1])},
    "padding": lambda rng, dtype: {"key_padding_lengths": np.array([19, 3, 0, 12, 7])},
    "padding on the left": lambda rng, dtype: {"key_ranges": (np.array([0, 16, 19, 5, 1]), None)},
    "ranges, causal": lambda rng, dtype: {
        "key_ranges": (np.array([0, 16, 3, 5, 1]), np.array([1, 19, 3, 18, 9])), "is_causal": True, "offset": 2,
    },
    "boolean": lambda rng, dtype: {"mask": rng.random((BATCH, 4, 17, 19)) < 0.4},
    "additive": lambda rng, dtype: {"mask": np.where(rng.random((BATCH, 1, 17, 19)) < 0.4, -np.inf, 1).astype(dtype)},
    "softcap": lambda rng, dtype: {"softcap": 3.0},
    "sinks, alibi, a mask's gradient": lambda rng, dtype: {
        "sinks": np.array([1, -np.inf, 3, 0], dtype), "alibi": np.array([0.5, 0, 1, -0.1], dtype), "offset": np.arange(BATCH) - 2,
        "mask": rng.standard_normal((BATCH, 1, 17, 19)).astype(dtype), "need_bias_grad": True,
    },
}
of_batch = pytest.mark.parametrize("kind", OF_BATCH)


@all_dtypes
@algorithms
@of_batch
def test_batch_agnosticism_a_row_alone_and_in_a_batch(isa, dtype, algorithm, kind, rng):
    arrays = draw(rng, BATCH, 4, 2, 17, 19, 8, 5, dtype)
    keywords = {"algorithm": algorithm, **OF_BATCH[kind](rng, dtype)}
    together = run(fastmha, *arrays, **keywords)
    for b in range(BATCH):
        alone = run(fastmha, *(x[b : b + 1] for x in arrays), **row_of(keywords, b))
        assert_same([x[b : b + 1] for x in together if x.ndim > 1], [x for x in alone if x.ndim > 1])  # sinks are of all rows


@all_dtypes
@algorithms
@of_batch
def test_batch_agnosticism_whatever_the_other_rows_hold(dtype, algorithm, kind, rng):
    arrays = draw(rng, BATCH, 4, 2, 17, 19, 8, 5, dtype)
    keywords = {"algorithm": algorithm, **OF_BATCH[kind](rng, dtype)}
    clean = run(fastmha, *arrays, **keywords)
    size = 1e3 if dtype == np.float16 else 1e5
    for change in (lambda x: dtype(size) * x, lambda x: x * np.nan, lambda x: x * 0 + np.inf, lambda x: x * 0):
        changed = [padded(x) for x in arrays]
        for x in changed:
            x[[0, 1, 3, 4]] = change(x[[0, 1, 3, 4]])
        found = run(fastmha, *changed, **keywords)
        assert_same([x[2] for x in clean if x.ndim > 1], [x[2] for x in found if x.ndim > 1])


@all_dtypes
@algorithms
def test_batch_agnosticism_of_large_batches(dtype, algorithm, rng):
    """Neither the batch size nor the number of heads decides how a head is computed."""
    one = draw(rng, 1, 1, 1, 20, 20, 8, 8, dtype)
    many = [np.repeat(np.repeat(x, 40, axis=0), 3, axis=1) for x in one]
    for x, y in zip(
        run(fastmha, *[np.ascontiguousarray(x) for x in one], algorithm=algorithm),
        run(fastmha, *many, algorithm=algorithm),
        strict=True,
    ):
        assert np.array_equal(bits(y), np.broadcast_to(bits(x), y.shape))


@all_dtypes
def test_the_choice_of_algorithm_looks_at_neither_batch_nor_threads(dtype):
    x = np.zeros((1, 2, 30, 8), dtype)
    plans = [
        fastmha.plan(np.broadcast_to(x, (B, 2, 30, 8)), *[np.broadcast_to(x, (B, 2, 30, 8))] * 2, num_threads=threads)
        for B in (1, 2, 64)
        for threads in (1, 5)
    ]
    assert len({(p.algorithm, p.tile) for p in plans}) == 1


@dtypes
@layouts
@pytest.mark.parametrize("algorithm", ["tiled", "decode"])
@pytest.mark.parametrize(("Lq", "Lk", "D"), [(1, 1, 8), (2, 7, 20), (3, 30, 64)])
def test_short_heads_that_fill_any_cache_have_the_bits_of_one_alone(isa, dtype, algorithm, Lq, Lk, D, layout, rng):
    """While a thread is at work on one, it fetches one of those that come: where that lies and how many on goes by strides and
    threads, and the last ones have none."""
    times = 20 * 2**20 // (3 * 4 * (2 * Lq + Lk) * D * np.dtype(dtype).itemsize)     # more than any of the limits
    few = [np.ascontiguousarray(x) for x in draw(rng, 3, 4, 2, Lq, Lk, D, D, dtype, layout)]
    many = [np.repeat(x, times, axis=0) for x in few]

    def results(arrays, threads):
        if algorithm == "tiled":
            return run(fastmha, *arrays, threads=threads, algorithm=algorithm, layout=layout)
        return fastmha.attention(*arrays[:3], return_lse=True, num_threads=threads, algorithm=algorithm, layout=layout)

    for step in (1, -1):
        alone = results([x[:, ::step, ::step] for x in few], 1)
        for threads in (1, 2, 5):
            together = results([x[:, ::step, ::step] for x in many], threads)
            assert_same([np.repeat(x, times, axis=0) for x in alone], together)


# ---------------------------------------------------------------------------------------------------------------- heads


@all_dtypes
@algorithms
def test_heads_do_not_know_their_order(dtype, algorithm, rng):
    arrays = draw(rng, 2, 4, 4, 9, 11, 6, 5, dtype)
    order = [2, 0, 3, 1]
    out, lse, *grads = run(fastmha, *arrays, algorithm=algorithm)
    permuted = run(fastmha, *(padded(x[:, order]) for x in arrays), algorithm=algorithm)
    assert_same([x[:, order] for x in (out, lse, *grads)], permuted)


@all_dtypes
@algorithms
def test_groups_do_not_know_their_order_and_rows_not_their_place_in_the_group(dtype, algorithm, rng):
    q, k, v, g = draw(rng, 1, 6, 3, 8, 8, 4, 4, dtype)
    out, lse, grad_q, grad_k, grad_v = run(fastmha, q, k, v, g, algorithm=algorithm)
    heads, groups = [4, 5, 0, 1, 2, 3], [2, 0, 1]
    permuted = run(
        fastmha,
        *(padded(x[:, order]) for x, order in ((q, heads), (k, groups), (v, groups), (g, heads))),
        algorithm=algorithm,
    )
    assert_same([out[:, heads], lse[:, heads], grad_q[:, heads], grad_k[:, groups], grad_v[:, groups]], permuted)
    heads = [1, 0, 3, 2, 5, 4]  # within the groups: only the sums over them may round otherwise
    permuted = run(fastmha, padded(q[:, heads]), k, v, padded(g[:, heads]), algorithm=algorithm)
    assert_same([out[:, heads], lse[:, heads], grad_q[:, heads]], permuted[:3])


# ------------------------------------------------------------------------------------------------ agreement to rounding


@all_dtypes
@algorithms
@problems
def test_instruction_sets_agree_to_rounding(dtype, algorithm, name, rng):
    arrays, keywords = make(rng, name, dtype)
    wide, of_wide = in_float64(arrays, keywords)
    bounds = error_bounds(*wide, dtype, **of_wide)
    results = []
    for isa in ISAS:
        with selected(isa):
            results.append(run(fastmha, *arrays, algorithm=algorithm, **keywords))
    for others in results[1:]:
        assert_close(others, [x.astype(np.float64) for x in results[0]], bounds)


@all_dtypes
@algorithms
@pytest.mark.parametrize("shape", [(17, 19), (3, 1, 1, 19), (3, 4, 17, 19), (1, 4, 1, 19)])
def test_additive_and_boolean_masks_agree_bit_for_bit(isa, dtype, algorithm, shape, rng):
    arrays = draw(rng, 3, 4, 2, 17, 19, 6, 7, dtype)
    mask = rng.random(shape) < 0.4
    additive = np.where(mask, -np.inf, 0).astype(dtype)
    keywords = {"algorithm": algorithm, "softcap": 4.0}
    boolean = run(fastmha, *arrays, mask=mask, **keywords)
    assert_same(boolean, run(fastmha, *arrays, mask=additive, **keywords))
    assert_same(boolean, run(fastmha, *arrays, mask=np.repeat(additive, 2, axis=-1)[..., ::2], **keywords))
    assert_same(boolean, run(fastmha, *arrays, mask=np.broadcast_to(mask, (3, 4, 17, 19)), **keywords))


@all_dtypes
@algorithms
def test_bands_and_masks_that_say_the_same_agree_to_rounding(dtype, algorithm, rng):
    arrays = draw(rng, 2, 2, 2, 12, 15, 4, 4, dtype)
    for rules in ({"is_causal": True, "offset": 3}, {"window": (2, 4), "offset": 1}, {"key_padding_lengths": [4, 11]}):
        mask = np.broadcast_to(reference.removed(12, 15, **rules), (2, 1, 12, 15))
        bounds = error_bounds(*in_float64(arrays, {})[0], dtype, mask=mask)
        masked = [x.astype(np.float64) for x in run(fastmha, *arrays, mask=mask, algorithm=algorithm)]
        assert_close(run(fastmha, *arrays, algorithm=algorithm, **rules), masked, bounds)


@algorithms
def test_two_python_threads_at_once_give_the_same_bits(algorithm, rng):
    """Each with work of its own, both with threads of the pool."""
    cases = [
        make(rng, name, DTYPES[n % 2], LAYOUTS[n % 2]) for n, name in enumerate(PROBLEMS)
    ]

    def all_of_them(_):
        return [run(fastmha, *arrays, threads=2, algorithm=algorithm, **keywords) for arrays, keywords in cases]

    expected = all_of_them(None)
    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(all_of_them, range(8)):
            for x, y in zip(results, expected, strict=True):
                assert_same(x, y)
