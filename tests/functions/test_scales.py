"""Any scale: scores up to 1e9, rows masked by one large finite constant, softcaps and scales at the ends of their type, operands
and results below the smallest normal number."""

import itertools

import numpy as np
import pytest
from support import NAMED, crossed_oracle, draw, dtypes, oracle, same_bits

import fastmha
from fastmha import reference

FORWARD = (*NAMED, "decode")
NAMES = ("grad_q", "grad_k", "grad_v")


def plain_gradients(q, k, v, g, mask, scale):
    """Attention's gradients in the textbook's steps, in the dtype of the operands; k and v have as many heads as q."""
    scale = q.dtype.type(scale)
    scores = (q @ k.swapaxes(-1, -2)) * scale
    if mask is not None:
        scores = scores + mask
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    grad_weights = g @ v.swapaxes(-1, -2)
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(axis=-1, keepdims=True)) * scale
    return grad_scores @ k, grad_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ g


def rounding_of_scores(q, k, g, scale, mask):
    """What the rounding of the scores alone may do to each gradient. Two algorithms sum a score in different orders; where it is
    added to a constant of another size, what is left of it is rounded to that constant's last place. A weight changes by as much
    as its score; each row's gradient of the scores is at most 2 |g| |v| of that; grad_q has that times |k|, grad_k times |q|."""
    eps = float(np.finfo(np.float32).eps)
    size = (np.abs(q).astype(np.float64) @ np.abs(k).swapaxes(-1, -2)).max(initial=0) * abs(scale)
    moved = min(1.0, eps * 2 * size)
    largest = {name: float(np.abs(x).max(initial=0)) for name, x in (("q", q), ("k", k), ("g", g))}
    rows = np.sqrt(q.shape[2])
    return [moved * largest["k"] * largest["g"] * 2 * scale, moved * largest["q"] * largest["g"] * 2 * scale * rows,
            moved * largest["g"] * rows]


SIZES = (1, 10, 30, 100, 1e3, 1e5, 1e9)
CONSTANTS = (None, 1e3, 1e5, 1e9, float(np.finfo(np.float32).max))


def masked_rows(rng, Lq, Lk, constant):
    """Half of the rows removed as users do it who have no boolean mask: a large negative number at every key."""
    if constant is None:
        return None
    return np.where(rng.random((Lq, 1)) < 0.5, np.float32(-constant), np.float32(0)) + np.zeros((1, Lk), np.float32)


LENGTHS = ((1, 200), (7, 64), (64, 100), (65, 260), (200, 200))
SCALES = [      # every two of the three meet
    (*LENGTHS[(a + b) % 5], size, constant) for a, size in enumerate(SIZES) for b, constant in enumerate(CONSTANTS)
]


@pytest.mark.parametrize(("Lq", "Lk", "size", "constant"), SCALES)
def test_gradients_err_at_any_scale_at_most_four_times_as_much_as_plain_numpy(isa, Lq, Lk, size, constant):
    """Beyond what the rounding of the scores may do to either; whichever algorithm ran forward."""
    rng = np.random.default_rng([Lq, int(size), int(constant or 0) % 1000])
    for _ in range(3):
        q, k, v, g = draw(rng, 1, 2, 2, Lq, Lk, 32, 16, np.float32)
        q *= np.float32(size)
        scale = 1 / np.sqrt(32)
        mask = masked_rows(rng, Lq, Lk, constant)
        wide = None if mask is None else mask.astype(np.float64)
        exact = plain_gradients(*(x.astype(np.float64) for x in (q, k, v, g)), wide, scale)
        if mask is not None:        # what is left of a score beside the constant: the oracle has to round it as well
            rows = mask[:, 0] != 0
            swallowed = plain_gradients(*(x.astype(np.float64) for x in (q[:, :, rows], k, v, g[:, :, rows])),
                                        rounded(q[:, :, rows], k, wide[rows], scale), 0)
            clear = plain_gradients(*(x.astype(np.float64) for x in (q[:, :, ~rows], k, v, g[:, :, ~rows])), None, scale)
            exact = [np.zeros(q.shape), clear[1], swallowed[2] + clear[2]]
            exact[0][:, :, ~rows] = clear[0]
        with np.errstate(all="ignore"):
            numpys = plain_gradients(q, k, v, g, mask, scale)
        allowed = rounding_of_scores(q, k, g, scale, mask)
        for forward, backward in itertools.product(FORWARD, NAMED):
            if forward == "decode" and Lq > 64:
                continue
            out, lse = fastmha.attention(q, k, v, mask=mask, algorithm=forward, return_lse=True)
            grads = fastmha.attention_backward(g, q, k, v, out, lse, mask=mask, algorithm=backward)
            for name, got, of_numpy, wanted, more in zip(NAMES, grads, numpys, exact, allowed, strict=True):
                if mask is not None and name != "grad_v":
                    part = (slice(None), slice(None), ~rows if name == "grad_q" else slice(None))
                    if name == "grad_k" and rows.any():
                        continue        # of masked rows it holds what is left of rounded scores times q
                    got, of_numpy, wanted = got[part], of_numpy[part], wanted[part]
                error = np.abs(got - wanted).max(initial=0)
                bound = 4 * np.abs(of_numpy - wanted).max(initial=0) + more + 1e-5 * np.abs(wanted).max(initial=0)
                assert error <= bound, f"{forward}, {backward}: {name} errs by {error:.3g}, bound {bound:.3g}"


CANCELLING = [      # rows, keys, width, deviation of q and k
    (1, 1, 256, 1.0), (1, 1, 256, 5.5), (3, 2, 72, 2.2), (16, 2, 256, 5.5), (2, 2, 256, 17.0), (40, 3, 128, 17.0),
    (65, 2, 72, 17.0), (3, 400, 72, 17.0), (130, 250, 64, 17.0),
]


@pytest.mark.parametrize(("Lq", "Lk", "D", "deviation"), CANCELLING)
def test_scores_that_are_small_sums_of_large_terms_cost_gradients_no_accuracy(isa, Lq, Lk, D, deviation):
    """Each pass adds the terms up in its own order, and lse, which is small, says nothing of how far these sums are apart.

    Keys are few, by their number or by a mask, so that nothing evens that out.
    """
    for seed in range(40):
        rng = np.random.default_rng([Lq, Lk, D, seed])
        q, k, v, g = draw(rng, 1, 2, 1, Lq, Lk, D, 8, np.float32)
        q *= np.float32(deviation)
        k *= np.float32(deviation)
        mask = np.ones((Lq, Lk), bool)
        mask[np.arange(Lq), rng.integers(Lk, size=Lq)] = mask[np.arange(Lq), rng.integers(Lk, size=Lq)] = False
        exact, same = (x[2:] for x in oracle(q, k, v, g, np.float32, mask=mask))
        crossed = crossed_oracle(q, k, v, g, np.float32, mask=mask)[1][2:]
        for forward, backward in itertools.product(FORWARD, NAMED):
            if forward == "decode" and Lq > 32:
                continue
            out, lse = fastmha.attention(q, k, v, mask=mask, algorithm=forward, return_lse=True)
            grads = fastmha.attention_backward(g, q, k, v, out, lse, mask=mask, algorithm=backward)
            bounds = same if forward == backward or Lq <= 16 else crossed
            for name, got, wanted, bound in zip(NAMES, grads, exact, bounds, strict=True):
                over = np.abs(got - wanted) - bound
                assert not (over > 0).any(), f"{forward}, {backward}, {seed}: {name} errs by {over.max():.3g} more than its bound"


@pytest.mark.parametrize("algorithm", NAMED)
def test_how_far_scores_may_round_is_not_told_by_a_key_that_is_removed(isa, algorithm, rng):
    """An lse that is larger than the sum of P by what such scores round is one of no more keys, whatever a removed one holds."""
    q, k, v, g = draw(rng, 1, 1, 1, 20, 9, 256, 8, np.float32)
    q, k = q * np.float32(17), k * np.float32(17)
    k[0, 0, 8] = 0
    mask = np.zeros((20, 9), bool)
    mask[:, 7] = True
    out, lse = fastmha.attention(q, k, v, mask=mask, return_lse=True)
    lse += np.float32(4e-4)
    found = []
    for removed in (0, np.nan, np.inf, 1e4):
        k[0, 0, 7] = removed
        found.append(fastmha.attention_backward(g, q, k, v, out, lse, mask=mask, algorithm=algorithm))
    for other in found[1:]:
        assert all(same_bits(x[..., :5, :], y[..., :5, :]) for x, y in zip(found[0], other, strict=True))


def rounded(q, k, mask, scale):
    """The scores beside a constant as float32 rounds them, as an additive mask for a scale of 0."""
    scores = (q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)) * scale
    return (scores.astype(np.float32) + mask.astype(np.float32)).astype(np.float64)


@dtypes
@pytest.mark.parametrize("constant", [1e3, 1e9, "largest"])
@pytest.mark.parametrize("Lq", [3, 70, 150])
def test_a_row_masked_by_a_constant_attends_all_its_keys_alike(isa, dtype, constant, Lq, rng):
    """Forward the output is the mean of the values; backward each key gets 1 / Lk of the row, and q and k nothing: lse, which has
    lost the number of keys, says otherwise."""
    constant = np.finfo(dtype).max if constant == "largest" else dtype(constant)
    Lk = 90
    q, k, v, g = draw(rng, 1, 2, 1, Lq, Lk, 16, 8, dtype)
    q[...] = 0
    mask = np.full((Lq, Lk), -constant, dtype)
    eps = 200 * np.finfo(dtype).eps
    for forward, backward in itertools.product(FORWARD, NAMED):
        if forward == "decode" and Lq > 32:
            continue
        out, lse = fastmha.attention(q, k, v, mask=mask, algorithm=forward, return_lse=True)
        grad_q, grad_k, grad_v = fastmha.attention_backward(g, q, k, v, out, lse, mask=mask, algorithm=backward)
        mean = np.broadcast_to(v.mean(axis=2, keepdims=True), out.shape)
        np.testing.assert_allclose(out, mean, rtol=0, atol=eps)
        expected = np.broadcast_to(g.sum(axis=(1, 2), keepdims=True) / Lk, grad_v.shape)
        np.testing.assert_allclose(grad_v, expected, rtol=0, atol=eps * np.abs(g).sum() / Lk)
        wide = [x.astype(np.float64) for x in (g, q, k, v, out, lse)]
        wanted = reference.attention_backward(*wide, mask=mask.astype(np.float64))
        np.testing.assert_allclose(grad_q, wanted[0], rtol=0, atol=eps)
        assert not grad_k.any()


@pytest.mark.parametrize("algorithm", FORWARD)
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_weights_of_few_rows_add_up_to_1_backward_however_long_these_are(isa, algorithm, rows, rng):
    """An lse of 10 is rounded by up to four times eps, and all weights of its row with it: more rows would even that out."""
    q, k, v, _ = draw(rng, 1, 2, 2, rows, 20000, 16, rows, np.float32)
    g = np.tile(np.eye(rows, dtype=np.float32), (1, 2, 1, 1))       # grad_v has the weights of row i in column i
    out, lse = fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True)
    weights = fastmha.attention_backward(g, q, k, v, out, lse, algorithm="tiled")[2].astype(np.float64)
    assert np.abs(weights.sum(axis=2) - 1).max() < 2 * np.finfo(np.float32).eps


def test_the_reference_takes_its_own_sums_too(rng):
    """In float32 its gradients of rows masked by a constant were Lk times as large."""
    q, k, v, g = draw(rng, 1, 1, 1, 4, 50, 8, 8, np.float32)
    mask = np.full((4, 50), np.finfo(np.float32).min)
    out, lse = reference.attention(q, k, v, mask=mask, return_lse=True)
    grad_v = reference.attention_backward(g, q, k, v, out, lse, mask=mask)[2]
    np.testing.assert_allclose(grad_v, np.broadcast_to(g.sum(axis=2, keepdims=True) / 50, grad_v.shape), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize(("Lq", "Lk"), [(5, 300), (130, 400)])
def test_an_lse_over_more_keys_than_these_is_taken_at_its_word(isa, size, Lq, Lk, rng):
    """Gradients of some of the keys, with out and lse of all: what a ring or a loop over blocks of keys does."""
    q, k, v, g = draw(rng, 1, 2, 2, Lq, Lk, 16, 16, np.float64)
    q *= size
    for forward, backward in itertools.product(NAMED, NAMED):
        out, lse = fastmha.attention(q, k, v, algorithm=forward, return_lse=True)
        whole = fastmha.attention_backward(g, q, k, v, out, lse, algorithm=backward)
        halves = [fastmha.attention_backward(g, q, k[:, :, s], v[:, :, s], out, lse, algorithm=backward)
                  for s in (slice(0, 100), slice(100, None))]
        together = [halves[0][0] + halves[1][0], *(np.concatenate([a, b], axis=2) for a, b in zip(*(h[1:] for h in halves)))]
        for name, got, wanted in zip(NAMES, together, whole, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12 * size**2 * (1 + np.abs(wanted).max()), err_msg=name)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_change_no_bit_of_gradients_at_any_scale(isa, threads, rng):
    """Whole heads, or two passes over the heads that are left over: rows that need own sums are found in either."""
    for size, constant in ((1, 1e9), (30, None), (1e3, None), (1e6, 1e4)):
        q, k, v, g = draw(rng, 1, 3, 3, 150, 230, 16, 8, np.float32)
        q *= np.float32(size)
        mask = masked_rows(rng, 150, 230, constant)
        for forward in NAMED:
            out, lse = fastmha.attention(q, k, v, mask=mask, algorithm=forward, return_lse=True)
            one, many = (fastmha.attention_backward(g, q, k, v, out, lse, mask=mask, algorithm="tiled", num_threads=n)
                         for n in (1, threads))
            assert all(same_bits(a, b) for a, b in zip(one, many, strict=True))


def test_rows_that_need_own_sums_change_no_bit_of_others(isa, rng):
    """The gradient of q at ordinary rows, whether or not rows of the same block are masked by a constant."""
    q, k, v, g = draw(rng, 1, 1, 1, 128, 200, 16, 16, np.float32)
    masks = [np.zeros((128, 200), np.float32) for _ in range(2)]
    masks[1][::3] = -1e9
    results = []
    for mask in masks:
        out, lse = fastmha.attention(q, k, v, mask=mask, algorithm="tiled", return_lse=True)
        results.append(fastmha.attention_backward(g, q, k, v, out, lse, mask=mask, algorithm="tiled")[0])
    ordinary = np.arange(128) % 3 != 0
    assert same_bits(results[0][:, :, ordinary], results[1][:, :, ordinary])


# ------------------------------------------------------------------------------------------------------ softcap and scale


@dtypes
@pytest.mark.parametrize("algorithm", FORWARD)
def test_softcap_may_have_any_positive_size(isa, dtype, algorithm, rng):
    q, k, v, g = draw(rng, 1, 2, 1, 9, 40, 8, 8, dtype)
    q[0, 0, 0] = 0          # scores of exactly 0, for which 0 / softcap must not be 0 / 0
    for exponent in (-400, -300, -50, -44, -39, -38, -10, 10, 37, 38, 39, 300, 308):
        check_softcap(q, k, v, g, exponent, algorithm)


def check_softcap(q, k, v, g, exponent, algorithm):
    softcap, dtype = float(f"1e{exponent}") or 5e-324, q.dtype
    out, lse = fastmha.attention(q, k, v, softcap=softcap, algorithm=algorithm, return_lse=True)
    # A cap far beyond the scores changes none of them, one far below leaves nothing of them.
    wide = [x.astype(np.float64) for x in (q, k, v, g)]
    keywords = {} if exponent > 0 else {"scale": 0.0}
    wanted, wanted_lse = reference.attention(*wide[:3], return_lse=True, **({"softcap": 1e10} if exponent == 10 else keywords))
    tolerance = 1e-5 if dtype == np.float32 else 1e-9
    np.testing.assert_allclose(out, wanted, rtol=0, atol=tolerance, err_msg=str(softcap))
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=tolerance, err_msg=str(softcap))
    if algorithm != "decode":
        grads = fastmha.attention_backward(g, q, k, v, out, lse, softcap=softcap, algorithm=algorithm)
        expected = reference.attention_backward(wide[3], *wide[:3], wanted, wanted_lse, **keywords)
        for name, got, exact in zip(NAMES, grads, expected, strict=True):
            assert np.isfinite(got).all(), softcap
            if exponent > 0 or name == "grad_v":
                np.testing.assert_allclose(got, exact, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("algorithm", FORWARD)
@pytest.mark.parametrize(("of_q", "of_k", "scale"), [
    (1e30, 1e-38, 1e10), (1e25, 1e-30, 1e5), (1e38, 1e-38, 1.0), (1e-30, 1.0, 1e30), (1e-38, 1e-5, 3e38), (1e15, 1e15, 1e-30),
    (1e20, 1e5, 1e-25), (1e18, 1e18, 1e-36)])
def test_finite_scores_of_operands_of_any_size_are_right(isa, algorithm, of_q, of_k, scale, rng):
    """scale * q overflows, or keys are subnormal, or the scale is: the scores are what they are."""
    q, k, v, g = draw(rng, 2, 2, 1, 20, 60, 12, 8, np.float32)
    q[1] *= np.float32(of_q)        # one batch row alone
    k[1] *= np.float32(of_k)
    other = fastmha.attention(q[:1], k[:1], v[:1], scale=scale, algorithm=algorithm)
    out, lse = fastmha.attention(q, k, v, scale=scale, algorithm=algorithm, return_lse=True)
    wide = [x.astype(np.float64) for x in (q, k, v, g)]
    wanted, wanted_lse = reference.attention(*wide[:3], scale=scale, return_lse=True)
    if np.abs(wide[0] @ wide[1].swapaxes(-1, -2)).max() > 3e38 and algorithm == "blas":
        return      # BLAS multiplies by the scale at the end, as NumPy does
    np.testing.assert_allclose(out[1], wanted[1], rtol=0, atol=2e-4)
    np.testing.assert_allclose(lse[1], wanted_lse[1], rtol=2e-5, atol=2e-5)
    assert same_bits(np.ascontiguousarray(out[:1]), other)


# ------------------------------------------------------------------------------------ below the smallest normal number


@dtypes
@pytest.mark.parametrize("algorithm", FORWARD)
@pytest.mark.parametrize("keys", [61, 1100])        # and several chunks of "decode"
@pytest.mark.parametrize("keywords", [
    {}, {"is_causal": True, "offset": 40}, {"key_padding_lengths": [30, 61]}, {"sinks": [1.0, 3.0]}], ids=str)
def test_values_below_the_smallest_normal_number_are_summed(isa, dtype, algorithm, keys, keywords, rng):
    """A row of results that small is right to the last place of the subnormal numbers, in any company."""
    q, k, v, _ = draw(rng, 2, 2, 1, 21, keys, 8, 24, dtype)
    if "sinks" in keywords:
        keywords = {"sinks": np.array(keywords["sinks"], dtype)}
    smallest = np.finfo(dtype).smallest_normal
    v *= smallest / 64
    exact = reference.attention(*(x.astype(np.longdouble) for x in (q, k, v)), **keywords)
    out = fastmha.attention(q, k, v, algorithm=algorithm, **keywords)
    error = np.abs(out.astype(np.longdouble) - exact).max()
    assert error <= 2 * np.finfo(dtype).smallest_subnormal
    assert "sinks" in keywords or (out != 0).mean() > 0.9
    v[:, :, 29] = np.nan        # all rows attend it
    seen = np.isnan(fastmha.attention(q, k, v, algorithm=algorithm, **keywords)).all(-1)
    assert seen.all()


@dtypes
@pytest.mark.parametrize("algorithm", FORWARD)
def test_a_tiny_row_does_not_depend_on_its_company(isa, dtype, algorithm, rng):
    """Rows that see tiny values alone have the same bits beside rows that see large ones."""
    q, k, v, _ = draw(rng, 1, 1, 1, 32, 32, 8, 8, dtype)
    v *= np.finfo(dtype).smallest_normal
    v[:, :, 16:] = 1
    mask = np.zeros((32, 32), bool)
    mask[:16, 16:] = True
    mask[16:, :16] = True
    together = fastmha.attention(q, k, v, mask=mask, algorithm=algorithm)
    v[:, :, 16:] = 0
    assert same_bits(together[:, :, :16], fastmha.attention(q, k, v, mask=mask, algorithm=algorithm)[:, :, :16])


@dtypes
@pytest.mark.parametrize("algorithm", FORWARD)
@pytest.mark.parametrize("Lk", [5, 70, 300, 1100])
@pytest.mark.parametrize("size", ["large", "tiny"])
def test_values_at_the_ends_of_their_type_beside_removed_ones(isa, dtype, algorithm, Lk, size, rng):
    """Values whose sums overflow, or are subnormal: the mean of what is attended, whose bits no removed one changes."""
    q, k, _, _ = draw(rng, 1, 2, 1, 16, Lk, 12, 9, dtype)
    info = np.finfo(dtype)
    value = info.max / dtype(1.5) if size == "large" else info.smallest_normal / 64
    mask = rng.random((16, Lk)) < 0.3
    mask[:, -1], mask[:, 2] = False, True
    mask[3] = True
    for place, rules in ((2, {"mask": mask}), (0, {"key_ranges": ([1], [Lk])}), (2, {"window": (0, Lk), "offset": 3})):
        v = np.full((1, 1, Lk, 9), value, dtype)
        found = []
        for removed in (value, np.nan, np.inf, 0, 1, info.max):
            v[:, :, place] = removed
            found.append(fastmha.attention(q, k, v, algorithm=algorithm, return_lse=True, **rules))
        out, lse = found[0]
        empty = np.isneginf(lse)
        assert not out[empty].any()
        np.testing.assert_allclose(out[~empty], value, rtol=64 * info.eps if size == "large" else 0,
                                   atol=0 if size == "large" else info.smallest_subnormal)
        for results in found[1:]:
            assert all(same_bits(x, y) for x, y in zip(found[0], results, strict=True))


@dtypes
@pytest.mark.parametrize("algorithm", FORWARD)
@pytest.mark.parametrize("Lk", [6, 70, 300, 1100])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_sums_that_overflow_do_not_depend_on_what_another_row_attends(isa, dtype, algorithm, Lk, softcap, rng):
    """Means of large values of both signs, beside ordinary columns and keys. Whether the first key, which one row attends, has
    large values, too, says how the others are found, and changes no bit of other rows."""
    q, k, v, _ = draw(rng, 2, 2, 1, 16, Lk, 12, 21, dtype)
    large, ordinary = np.finfo(dtype).max / 2, [0, 1, 19, 20]
    mask = rng.random((16, Lk)) < 0.3
    mask[1:, 0], mask[:, -1], mask[0, 0] = True, False, False
    v[..., 2:19] = np.where(rng.random((2, 1, Lk, 17)) < 0.9, large, -large)
    v[:, :, Lk // 2, 5:9] = 1
    rules = {"mask": mask, "algorithm": algorithm, "return_lse": True, "softcap": softcap}
    down = dtype(2) ** -64
    found = []
    for first in (large, 0, 1, np.finfo(dtype).tiny, np.nan, -np.inf):
        v[:, :, 0] = first
        found.append(fastmha.attention(q, k, v, **rules))
    v[:, :, 0] = 0
    lower, lse = fastmha.attention(q, k, v * down, **rules)
    out = found[1][0]
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[..., 2:19] * down, lower[..., 2:19], rtol=0, atol=64 * np.finfo(dtype).eps * large * down)
    assert same_bits(out[..., ordinary], lower[..., ordinary] / down)
    for others in found:
        assert same_bits(others[0][:, :, 1:], out[:, :, 1:])
        assert same_bits(others[1], lse)


@dtypes
@pytest.mark.parametrize("algorithm", FORWARD)
@pytest.mark.parametrize("values", [(1, 1, -2), (1, 2, -3, 0), (0.5, 0.5, -1, 1e-300)])
def test_large_values_may_cancel(isa, dtype, algorithm, values):
    """The sum is 0 where it is rounded, as in a row that is small throughout, which is computed again from larger values."""
    q, k, v = np.zeros((1, 1, 1, 4), dtype), np.zeros((1, 1, len(values), 4), dtype), np.zeros((1, 1, len(values), 1), dtype)
    v[0, 0, :, 0] = np.multiply(values, np.finfo(dtype).max / 16)
    out = fastmha.attention(q, k, v, algorithm=algorithm)
    assert abs(out.item()) <= 4 * np.finfo(dtype).eps * v.max()
