"""Rules 6 and 7: what is removed changes no bit, what is attended arrives, and rows without keys are zeros.

Bits are compared as integers, so NaN equals NaN and 0 differs from -0.
"""

import numpy as np
import pytest
from support import (
    RESULTS,
    algorithms,
    all_dtypes,
    assert_same,
    bits,
    draw,
    dtypes,
    padded,
    run,
    same_bits,
)

import fastmha
from fastmha import reference

B, H, HKV, LQ, LK = 2, 4, 2, 11, 13
GROUP = H // HKV


def boolean(rng):
    mask = rng.random((B, H, LQ, LK)) < 0.5
    mask[:, :, 4] = True  # an empty row
    mask[:, :, :, 7] = True  # a key that nobody attends
    return mask


def of_keys(x, step):
    """x in memory in which its last axis has a step."""
    return np.repeat(x, step, axis=-1)[..., ::step]


KINDS = {
    "boolean": lambda rng, dtype: {"mask": boolean(rng)},
    "boolean of two axes": lambda rng, dtype: {"mask": boolean(rng)[0, 0]},
    "boolean with a step": lambda rng, dtype: {"mask": of_keys(boolean(rng), 2)},
    "additive": lambda rng, dtype: {"mask": np.where(boolean(rng), -np.inf, 0.25).astype(dtype)},
    "additive with a step": lambda rng, dtype: {
        "mask": of_keys(np.where(boolean(rng), -np.inf, 0.25).astype(dtype), 3)
    },
    "causal": lambda rng, dtype: {"is_causal": True, "offset": 2},
    "causal with empty rows": lambda rng, dtype: {"is_causal": True, "offset": np.array([-3, 0])},
    "window": lambda rng, dtype: {"window": (2, 1), "offset": np.array([1, 4])},
    "padding": lambda rng, dtype: {"key_padding_lengths": np.array([6, 0])},
    "padding on the left": lambda rng, dtype: {"key_ranges": ([6, 13], None)},
    "ranges": lambda rng, dtype: {"key_ranges": (np.array([1, 4]), [7, 13])},
    "everything": lambda rng, dtype: {
        "mask": boolean(rng),
        "is_causal": True,
        "offset": 4,
        "window": (6, None),
        "key_padding_lengths": [12, 9],
    },
    "everything within ranges": lambda rng, dtype: {
        "mask": boolean(rng),
        "is_causal": True,
        "offset": 4,
        "window": (6, None),
        "key_ranges": ([1, 4], 11),
        "key_padding_lengths": [12, 9],
    },
}
EXTRAS = {"plain": {}, "softcap": {"softcap": 2.0}, "sinks, alibi, dropout": {"dropout": 0.3, "seed": 3}}
SINKS, SLOPES = np.array([1, -np.inf, 3, 0]), np.array([0.5, 0, 1, -0.1])   # of the last
kinds = pytest.mark.parametrize("kind", KINDS)
extras = pytest.mark.parametrize("extra", EXTRAS)
POISONS = (np.nan, np.inf, -np.inf)
poisons = pytest.mark.parametrize("poison", POISONS)


def extras_of(extra, rules, dtype, heads=H):
    """The rules with the extra ones."""
    if "dropout" not in EXTRAS[extra]:
        return {**rules, **EXTRAS[extra]}
    more = {"sinks": SINKS[:heads].astype(dtype), "alibi": SLOPES[:heads].astype(dtype), "offset": 1}
    bias = {"need_bias_grad": True} if "mask" in rules and rules["mask"].dtype != bool else {}
    return {**more, **bias, **rules, **EXTRAS[extra]}


def problem(rng, dtype, kind, extra):
    """Arguments of a call, and which pairs are removed, (B, H, Lq, Lk)."""
    arrays = draw(rng, B, H, HKV, LQ, LK, 5, 3, dtype)
    rules = KINDS[kind](rng, dtype)
    gone = np.broadcast_to(reference.removed(LQ, LK, **rules), (B, H, LQ, LK))
    assert gone.any()
    assert not gone.all()
    return arrays, extras_of(extra, rules, dtype), gone


def poisoned(x, b, h, i, poison):
    changed = padded(x)  # the strides of x: others may round otherwise
    changed[b, h, i] = poison
    return changed


def assert_unchanged(clean, dirty, rows, keys, place):
    """The bits of out, lse and grad_q where `rows` (B, H, Lq) is True, of grad_k and grad_v where `keys` (B, Hkv, Lk) is."""
    for name, x, y, where in zip(RESULTS, clean, dirty, (rows, rows, rows, keys, keys)):
        assert same_bits(x[where], y[where]), (name, place)


def poisonings(kind, places):
    """Every poison at two or more of the places, by turns: over the kinds, each at each."""
    turn = list(KINDS).index(kind)
    return [(POISONS[(n + turn) % 3], place) for n, place in enumerate(places)]


# ----------------------------------------------------------------------------------------- removed: not one bit changes


@all_dtypes
@algorithms
@kinds
@extras
def test_a_removed_key_and_value_change_no_bit_of_the_rows(dtype, algorithm, kind, extra, rng):
    (q, k, v, g), keywords, gone = problem(rng, dtype, kind, extra)
    clean = run(fastmha, q, k, v, g, algorithm=algorithm, **keywords)
    for poison, (b, n, j) in poisonings(kind, [(0, 0, 0), (0, 1, 7), (0, 0, LK - 1), (1, 1, 3), (1, 0, 8), (0, 1, 5)]):
        dirty = run(fastmha, q, poisoned(k, b, n, j, poison), poisoned(v, b, n, j, poison), g, algorithm=algorithm, **keywords)
        members = slice(n * GROUP, (n + 1) * GROUP)
        safe = np.ones((B, H, LQ), bool)
        safe[b, members] = gone[b, members, :, j]
        # A key's gradients come from its queries: they stay where none of these attends the poison.
        safe_keys = np.ones((B, HKV, LK), bool)
        attends = ~gone[b, members]  # (group, Lq, Lk)
        safe_keys[b, n] = ~(attends & attends[:, :, j, None]).any(axis=(0, 1))
        assert_unchanged(clean, dirty, safe, safe_keys, (b, n, j))
        if not attends[:, :, j].any():
            for x in dirty[3:5]:
                assert not bits(x)[b, n, j].any()  # +0, exactly


@all_dtypes
@algorithms
@kinds
@extras
def test_a_query_and_its_gradient_change_no_bit_of_the_keys_it_does_not_attend(dtype, algorithm, kind, extra, rng):
    (q, k, v, g), keywords, gone = problem(rng, dtype, kind, extra)
    clean = run(fastmha, q, k, v, g, algorithm=algorithm, **keywords)
    for which in ("q", "grad_out", "both"):
        for poison, (b, h, i) in poisonings(kind, [(0, 0, 0), (0, 3, 4), (1, 1, LQ - 1), (1, 2, 5)]):
            q_dirty = q if which == "grad_out" else poisoned(q, b, h, i, poison)
            g_dirty = g if which == "q" else poisoned(g, b, h, i, poison)
            dirty = run(fastmha, q_dirty, k, v, g_dirty, algorithm=algorithm, **keywords)
            others = np.ones((B, H, LQ), bool)
            others[b, h, i] = gone[b, h, i].all()  # an empty row belongs to nobody, not even to itself
            keys = np.ones((B, HKV, LK), bool)
            keys[b, h // GROUP] = gone[b, h, i]
            assert_unchanged(clean, dirty, others, keys, (which, b, h, i))


@all_dtypes
@algorithms
@pytest.mark.parametrize(("D", "Dv"), [(1, 1), (8, 1), (1, 8), (16, 33)])
@pytest.mark.parametrize("Lq", [1, 2, 17])
def test_the_firewall_holds_in_every_kind_of_product(isa, dtype, algorithm, D, Dv, Lq, rng):
    """Single rows and columns go through other BLAS functions than blocks do."""
    Lk = 19
    q, k, v, g = draw(rng, 2, 2, 1, Lq, Lk, D, Dv, dtype)
    mask = np.zeros((1, 1, Lq, Lk), bool)
    mask[..., ::3] = True
    keywords = {"algorithm": algorithm, "mask": mask}
    clean = run(fastmha, q, k, v, g, **keywords)
    for poison in POISONS:
        k_dirty, v_dirty = padded(k), padded(v)
        k_dirty[:, :, ::3] = poison
        v_dirty[:, :, ::3] = poison
        assert_same(clean, run(fastmha, q, k_dirty, v_dirty, g, **keywords))


@all_dtypes
@algorithms
@extras
def test_the_firewall_holds_between_blocks_of_rows(dtype, algorithm, extra, rng):
    """So many keys that the queries are taken in several blocks."""
    Lq, Lk = 70, 2050
    q, k, v, g = draw(rng, 1, 2, 1, Lq, Lk, 3, 2, dtype)
    keywords = {"algorithm": algorithm, **extras_of(extra, {"is_causal": True, "offset": 1000}, dtype, 2)}
    clean = run(fastmha, q, k, v, g, **keywords)
    k_dirty, v_dirty, q_dirty, g_dirty = (padded(x) for x in (k, v, q, g))
    k_dirty[:, :, 1040:], v_dirty[:, :, 1040:] = np.nan, np.inf
    dirty = run(fastmha, q, k_dirty, v_dirty, g, **keywords)
    for x, y in zip(clean[:3], dirty[:3], strict=True):
        assert same_bits(x[:, :, :40], y[:, :, :40])
        assert not np.isfinite(y[:, :, 40:]).any()
    assert same_bits(clean[3][:, :, 1070:], dirty[3][:, :, 1070:])
    q_dirty[:, :, :20], g_dirty[:, :, :20] = np.inf, np.nan
    dirty = run(fastmha, q_dirty, k, v, g_dirty, **keywords)
    for x, y in zip(clean[3:5], dirty[3:5], strict=True):
        assert same_bits(x[:, :, 1020:], y[:, :, 1020:])


@all_dtypes
@algorithms
def test_weights_of_removed_keys_are_zero_whatever_the_keys_hold(dtype, algorithm, rng):
    q, k, v, _ = draw(rng, 2, 2, 2, 4, 6, 3, 3, dtype)
    mask = np.zeros((4, 6), bool)
    mask[:, 2] = mask[1] = True
    clean = fastmha.scaled_dot_product_attention(q, k, v, mask)
    k_dirty, v_dirty = padded(k), padded(v)
    k_dirty[:, :, 2], v_dirty[:, :, 2] = np.nan, np.inf
    assert_same(clean, fastmha.scaled_dot_product_attention(q, k_dirty, v_dirty, mask))
    assert not clean[1][..., 2].any()
    assert not clean[1][:, :, 1].any()


# ------------------------------------------------------------------------------------------------- attended: it arrives


@all_dtypes
@algorithms
@kinds
@extras
def test_an_attended_nan_reaches_all_that_attend_it_and_nothing_else(dtype, algorithm, kind, extra, rng):
    clean, keywords, gone = problem(rng, dtype, kind, extra)
    b, h, i, n, j = 0, 1, 5, 0, 4  # query (b, h, i), key (b, n, j)
    for which, operand in enumerate(("q", "k", "v", "grad_out")):
        arrays = list(clean)
        arrays[which] = poisoned(clean[which], b, *((h, i) if operand in ("q", "grad_out") else (n, j)), np.nan)
        out, lse, grad_q, grad_k, grad_v, *_ = run(fastmha, *arrays, algorithm=algorithm, **keywords)
        rows = np.zeros((B, H, LQ), bool)  # the queries that meet it
        if operand in ("k", "v"):
            rows[b, n * GROUP : (n + 1) * GROUP] = ~gone[b, n * GROUP : (n + 1) * GROUP, :, j]
        else:
            rows[b, h, i] = not gone[b, h, i].all()
        keys = np.zeros((B, HKV, LK), bool)  # the keys that these attend
        for m in range(HKV):
            members = slice(m * GROUP, (m + 1) * GROUP)
            keys[:, m] = (rows[:, members, :, None] & ~gone[:, members]).any(axis=(1, 2))
        for name, x, reached in (
            ("out", out, rows),
            ("grad_q", grad_q, rows),
            ("grad_k", grad_k, keys),
            ("grad_v", grad_v, keys),
        ):
            if (name == "out" and operand == "grad_out") or (name == "grad_v" and operand == "v"):
                assert np.isfinite(x).all(), (operand, name)  # the output does not depend on its gradient, nor dv on v
            else:
                assert np.array_equal(np.isnan(x).all(axis=-1), reached), (operand, name)
                assert np.array_equal(np.isnan(x).any(axis=-1), reached), (operand, name)
        assert np.array_equal(np.isnan(lse), rows if operand in ("q", "k") else np.zeros_like(rows)), operand


@all_dtypes
@algorithms
@poisons
def test_one_poisoned_element_of_a_value_stays_in_its_column(dtype, algorithm, poison, rng):
    q, k, v, _ = draw(rng, 1, 2, 1, 6, 6, 4, 5, dtype)
    clean = fastmha.attention(q, k, v, is_causal=True, algorithm=algorithm)
    v[0, 0, 3, 2] = poison
    out = fastmha.attention(q, k, v, is_causal=True, algorithm=algorithm)
    reached = np.zeros(out.shape, bool)
    reached[:, :, 3:, 2] = True
    assert np.array_equal(out[reached], np.full(reached.sum(), poison, dtype), equal_nan=True)
    assert np.array_equal(bits(out)[~reached], bits(clean)[~reached])


@all_dtypes
@algorithms
@pytest.mark.parametrize("kind", ["boolean", "additive", "causal", "everything"])
def test_rows_alike_in_what_is_not_finite_reach_just_who_attends_them(isa, dtype, algorithm, kind, rng):
    arrays, keywords, gone = problem(rng, dtype, kind, "plain")
    special = np.array([[np.inf, 1, np.inf], [np.inf, 1, np.inf], [-np.inf, np.nan, 2], [np.inf, np.inf, np.inf], [1, 2, 3]])
    v = arrays[2]
    v[:] = special[rng.integers(len(special), size=v.shape[:-1])]
    out, _ = fastmha.attention(*arrays[:3], algorithm=algorithm, return_lse=True, **keywords)
    allowed = np.repeat(v, GROUP, axis=1)[:, :, None] * np.where(gone, np.nan, 1)[..., None]  # (B, H, Lq, Lk, Dv), removed: NaN
    up, down = (allowed == np.inf).any(axis=3), (allowed == -np.inf).any(axis=3)
    nan = (np.isnan(np.repeat(v, GROUP, axis=1)[:, :, None]) & ~gone[..., None]).any(axis=3) | (up & down)
    assert np.array_equal(np.isnan(out), nan)
    assert np.array_equal(out == np.inf, up & ~nan)
    assert np.array_equal(out == -np.inf, down & ~nan)

    arrays = draw(rng, B, H, HKV, LQ, LK, 5, 3, dtype)
    grad_out = arrays[3]
    grad_out[:] = special[rng.integers(len(special), size=grad_out.shape[:-1])]
    grad_v = run(fastmha, *arrays, algorithm=algorithm, **keywords)[4]
    allowed = grad_out[:, :, :, None] * np.where(gone, np.nan, 1)[..., None]
    allowed = allowed.reshape(B, HKV, GROUP, LQ, LK, 3)
    up, down = (allowed == np.inf).any(axis=(2, 3)), (allowed == -np.inf).any(axis=(2, 3))
    nan = (np.isnan(grad_out[:, :, :, None]) & ~gone[..., None]).reshape(allowed.shape).any(axis=(2, 3)) | (up & down)
    assert np.array_equal(np.isnan(grad_v), nan)
    assert np.array_equal(grad_v == np.inf, up & ~nan)
    assert np.array_equal(grad_v == -np.inf, down & ~nan)


@all_dtypes
@algorithms
def test_a_nan_in_an_additive_mask_is_the_users(dtype, algorithm, rng):
    q, k, v, _ = draw(rng, 1, 1, 1, 3, 4, 2, 2, dtype)
    mask = np.zeros((3, 4), dtype)
    clean = fastmha.attention(q, k, v, mask=mask, algorithm=algorithm)
    mask[1, 2] = np.nan
    out = fastmha.attention(q, k, v, mask=mask, algorithm=algorithm)
    assert np.isnan(out[0, 0, 1]).all()
    assert same_bits(out[0, 0, [0, 2]], clean[0, 0, [0, 2]])


# ----------------------------------------------------------------------------------------------------------- empty rows

EMPTY = {
    "boolean": lambda dtype: {"mask": np.arange(LQ)[:, None] % 3 == np.zeros(LK, int)},
    "additive": lambda dtype: {
        "mask": np.where(np.arange(LQ)[:, None] % 3 == np.zeros(LK, int), -np.inf, 0).astype(dtype)
    },
    "causal": lambda dtype: {"is_causal": True, "offset": -4},
    "window": lambda dtype: {"window": (1, 1), "offset": 8},
    "padding": lambda dtype: {"key_padding_lengths": [0, 5]},
    "two masks that remove everything only together": lambda dtype: {
        "mask": np.broadcast_to(np.arange(LK) < 6, (LQ, LK)),
        "key_padding_lengths": [6, 13],
    },
}


@dtypes
@algorithms
@pytest.mark.parametrize("kind", EMPTY)
@extras
def test_empty_rows_are_zero_and_contribute_no_gradient(isa, dtype, algorithm, kind, extra, rng):
    q, k, v, g = draw(rng, B, H, HKV, LQ, LK, 5, 3, dtype)
    keywords = {"algorithm": algorithm, **extras_of(extra, EMPTY[kind](dtype), dtype)}
    rules = EMPTY[kind](dtype)
    empty = np.broadcast_to(reference.removed(LQ, LK, **rules), (B, H, LQ, LK)).all(axis=-1)
    assert empty.any()
    assert not empty.all()
    clean = run(fastmha, q, k, v, g, **keywords)
    out, lse, grad_q, *_ = clean
    assert not bits(out)[empty].any()
    assert not bits(grad_q)[empty].any()
    sinks = keywords.get("sinks", np.full(H, -np.inf, dtype))
    assert np.array_equal(lse[empty], np.broadcast_to(sinks[:, None], lse.shape)[empty])
    assert np.isfinite(lse[~empty]).all()
    for poison in (np.nan, np.inf, 1e30):  # whatever the empty rows hold
        q_dirty, g_dirty = padded(q), padded(g)
        q_dirty[empty] = g_dirty[empty] = poison
        assert_same(clean, run(fastmha, q_dirty, k, v, g_dirty, **keywords))


@all_dtypes
@algorithms
def test_a_fully_masked_batch_row_beside_an_ordinary_one(isa, dtype, algorithm, rng):
    q, k, v, g = draw(rng, 2, 2, 2, 5, 5, 4, 4, dtype)
    mask = np.zeros((2, 1, 1, 5), bool)
    mask[0] = True
    results = run(fastmha, q, k, v, g, mask=mask, algorithm=algorithm)
    alone = run(fastmha, q[1:], k[1:], v[1:], g[1:], algorithm=algorithm)
    for x, y in zip(results, alone, strict=True):
        assert same_bits(x[1:], y)
    for x in (results[0], *results[2:]):
        assert not bits(x[0]).any()
    assert np.isneginf(results[1][0]).all()


@pytest.mark.filterwarnings("ignore::fastmha.ConventionWarning")  # as it is meant here
@all_dtypes
@algorithms
def test_everything_masked(isa, dtype, algorithm, rng):
    q, k, v, g = draw(rng, 2, 2, 2, 5, 5, 4, 4, dtype)
    out, lse, *grads = run(fastmha, q, k, v, g, mask=np.ones((5, 5), bool), algorithm=algorithm)
    assert np.isneginf(lse).all()
    for x in (out, *grads):
        assert not bits(x).any()


# -------------------------------------------------------------------------------------------------------- large numbers


@dtypes
@algorithms
@pytest.mark.parametrize("size", [30.0, 100.0, 1e4])
def test_scores_beyond_exp_stay_finite(isa, dtype, algorithm, size, rng):
    q, k, v, g = ((size * np.sign(x)).astype(dtype) for x in draw(rng, 2, 2, 2, 9, 9, 16, 4))
    scores = (q @ k.swapaxes(-1, -2)) / 4
    assert np.abs(scores).max() > 700
    for x in run(fastmha, q, k, v, g, algorithm=algorithm):
        assert np.isfinite(x).all()
    assert np.isfinite(fastmha.softmax(scores)).all()


@dtypes
@algorithms
def test_inputs_between_minus_100_and_100_stay_finite(isa, dtype, algorithm, rng):
    q, k, v, g = (rng.uniform(-100, 100, (2, 2, 33, 8)).astype(dtype) for _ in range(4))
    out, *rest = run(fastmha, q, k, v, g, is_causal=True, algorithm=algorithm)
    assert all(np.isfinite(x).all() for x in rest)
    low, high = (np.ufunc.accumulate(f, v, axis=2) for f in (np.minimum, np.maximum))
    slack = 64 * np.finfo(dtype).eps * 100
    assert (low - slack <= out).all()  # an average of the values that are attended
    assert (out <= high + slack).all()


@dtypes
@algorithms
def test_an_average_of_finite_values_is_finite(isa, dtype, algorithm, rng):
    """Also where the sum of the values, taken before it is divided, would not be."""
    q, k, v, _ = draw(rng, 1, 2, 1, 6, 9, 4, 3, dtype)
    v = (np.finfo(dtype).max * rng.uniform(0.5, 0.9, v.shape)).astype(dtype)
    out = fastmha.attention(q, k, v, algorithm=algorithm)
    assert np.isfinite(out).all()
    assert (out >= v.min() * (1 - 1e-5)).all()
    assert (out <= v.max() * (1 + 1e-5)).all()


def test_the_softmax_of_rows_of_minus_infinity_is_zero(isa):
    for dtype in (np.float32, np.float64):
        for n in (1, 2, 7, 8, 16, 17, 40):
            assert not bits(fastmha.softmax(np.full((3, n), -np.inf, dtype))).any()
