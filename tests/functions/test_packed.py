"""Sequences that lie end to end: each gets the bits that it gets alone, and no padding is computed or stored.

Against `fastmha.attention` over each sequence, bit by bit, and against the float64 reference with the bounds of
`support.error_bounds`. Tiles hold 192 keys, blocks 64 rows, chunks of "decode" 512 keys: lengths here lie around all of these.
"""

import cProfile
import pstats
import tracemalloc

import numpy as np
import pytest
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    DTYPES,
    ISAS,
    NAMED,
    Guard,
    all_dtypes,
    assert_close,
    assert_same,
    bits,
    dtypes,
    every_isa,
    guards,
    halves,
    padded,
    raises,
    rearranged,
    repeated,
    same_bits,
    selected,
    tile_isas,
)

import fastmha
from fastmha import _core, reference, tune, tuning

ALL = ("auto", *NAMED)  # forward and backward
everywhere = pytest.mark.parametrize("algorithm", [*ALL, "decode"])
EDGES = (0, 1, 2, 63, 64, 65, 0, 191, 192, 193, 7)


# ------------------------------------------------------------------------------------------- a call, and the same in parts


def draw(rng, lengths_q, lengths_k=None, H=2, Hkv=None, D=5, Dv=4, dtype=np.float64):
    """q, k, v and a gradient of the output, (tokens, heads, width), in padded memory."""
    total_q, total_k = sum(lengths_q), sum(lengths_q if lengths_k is None else lengths_k)
    Hkv = H if Hkv is None else Hkv
    shapes = (total_q, H, D), (total_k, Hkv, D), (total_k, Hkv, Dv), (total_q, H, Dv)
    return [padded(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def run(functions, q, k, v, g, lengths_q, lengths_k=None, *, threads=None, **keywords):
    """out and lse, and the gradients where the algorithm has some."""
    lengths = (lengths_q, lengths_k)
    out, lse = functions.attention_packed(q, k, v, *lengths, return_lse=True, num_threads=threads, **keywords)
    if keywords.get("algorithm") == "decode":
        return out, lse
    return out, lse, *functions.attention_packed_backward(g, q, k, v, out, lse, *lengths, num_threads=threads, **keywords)


def places(lengths):
    return [slice(int(end - n), int(end)) for n, end in zip(lengths, np.cumsum(lengths, dtype=int), strict=True)]


def each(arrays, lengths_q, lengths_k, keywords):
    """The arrays (rows, tokens, heads, width), the keywords and the row of each sequence, for `fastmha.attention`: with dropout
    it is the last of as many rows as its number says."""
    offset = keywords.get("offset")
    offsets = np.broadcast_to(0 if offset is None else offset, len(lengths_q))
    for s, (rows, keys) in enumerate(zip(places(lengths_q), places(lengths_k), strict=True)):
        own = {**keywords, "layout": "BLHD"}
        if offset is not None:
            own["offset"] = int(offsets[s])
        row = s if keywords.get("dropout") else 0
        parts = [x[at] for x, at in zip(arrays, (rows, keys, keys, rows), strict=True)]
        yield [np.broadcast_to(x, (row + 1, *x.shape)) for x in parts], own, row


def joined(parts):
    """The results of each sequence end to end: (tokens, heads, width), and lse (heads, tokens)."""
    return [np.concatenate(xs, axis=int(n == 1)) for n, xs in enumerate(zip(*parts, strict=True))]


def one_by_one(q, k, v, g, lengths_q, lengths_k=None, *, threads=None, **keywords):
    """What `run` gives but for the gradient of sinks, by `fastmha.attention` over each sequence."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    parts = []
    for arrays, own, row in each((q, k, v, g), lengths_q, lengths_k, keywords):
        if keywords.get("algorithm") == "decode":
            results = fastmha.attention(*arrays[:3], return_lse=True, num_threads=threads, **own)
        else:
            results = support.run(fastmha, *arrays, threads=threads, **own)
        parts.append([x[row] for x in results[:5]])
    return joined(parts)


def oracle(q, k, v, g, lengths_q, lengths_k, **keywords):
    """Exact results, and the bounds of those computed: of each sequence its own, of the gradient of sinks their sum."""
    exact = run(reference, *support.in_float64((q, k, v, g), keywords)[0], lengths_q, lengths_k,
                **{**support.in_float64((), keywords)[1], "algorithm": "auto"})  # fmt: skip
    parts, of_sinks = [], 0
    for arrays, own, row in each((q, k, v, g), lengths_q, lengths_k, keywords):
        bounds = support.oracle(*arrays, q.dtype, **own)[1]
        parts.append([np.broadcast_to(x, (row + 1, *shape))[row] for x, shape in zip(bounds, shapes_of(arrays), strict=False)])
        if len(bounds) > 5:
            of_sinks = of_sinks + bounds[5]
    return exact, [*joined(parts), of_sinks]


def shapes_of(arrays):
    q, k, v, g = (x.shape[1:] for x in arrays)
    return g, (q[1], q[0]), q, k, v


def check(q, k, v, g, lengths_q, lengths_k=None, bounded=True, **keywords):
    """The bits of each sequence alone and the oracle's numbers; inputs untouched, results fresh and of full shapes."""
    inputs = [q, k, v, g, *(x for name in ("sinks", "alibi") if (x := keywords.get(name)) is not None)]
    before = [x.copy() for x in inputs]
    results = run(fastmha, q, k, v, g, lengths_q, lengths_k, **keywords)
    assert_same(inputs, before)
    names = (*support.RESULTS, "grad_sinks")
    support.assert_dtypes(results, names[: len(results)], q, k, keywords)
    for x in results:
        assert x.flags.writeable
        assert x.flags.c_contiguous
        assert not any(np.may_share_memory(x, y) for y in (*inputs, *results) if y is not x)
    assert [x.shape for x in results[:5]] == [g.shape, g.shape[1::-1], q.shape, k.shape, v.shape][: len(results)]
    assert len(results) == (2 if keywords.get("algorithm") == "decode" else 5 + (keywords.get("sinks") is not None))
    lengths_k = lengths_q if lengths_k is None else lengths_k
    assert_same(results[:5], one_by_one(q, k, v, g, lengths_q, lengths_k, **keywords))
    if bounded:
        exact, bounds = oracle(q, k, v, g, lengths_q, lengths_k, **keywords)
        assert_close(results, exact[: len(results)], bounds[: len(results)])
    return results


def assert_same_but_for_blas(algorithm, results, expected):
    """The same bits; BLAS may round otherwise at another address or with other strides."""
    if algorithm != "blas" and (algorithm != "auto" or _core.fused_multiply_add()):
        assert_same(results, expected)
        return
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1000 * support.eps(x.dtype))


# ----------------------------------------------------------------------------------------------------------- the oracle


@every_isa
@dtypes
@pytest.mark.parametrize("rules", [{}, {"is_causal": True}, {"window": (70, 40)}, {"softcap": 2.0}], ids=str)
def test_lengths_around_the_edges_of_vectors_blocks_and_tiles(isa, dtype, rules, rng):
    arrays = draw(rng, EDGES, H=2, Hkv=1, dtype=dtype)
    for algorithm in ALL:
        check(*arrays, EDGES, algorithm=algorithm, **rules)


@every_isa
@all_dtypes
def test_other_lengths_of_keys_than_of_queries(isa, dtype, rng):
    lengths_q, lengths_k = (3, 0, 70, 1, 130, 0, 9), (200, 5, 0, 191, 64, 0, 1)
    arrays = draw(rng, lengths_q, lengths_k, H=4, Hkv=2, dtype=dtype)
    for algorithm in ALL:
        check(*arrays, lengths_q, lengths_k, algorithm=algorithm)
        check(*arrays, lengths_q, lengths_k, algorithm=algorithm, is_causal=True, offset=np.subtract(lengths_k, lengths_q))


@every_isa
@all_dtypes
def test_few_queries_on_keys_around_the_edges_of_chunks(isa, dtype, rng):
    lengths_q, lengths_k = (1, 2, 0, 1, 3, 1, 16, 1), (512, 511, 9, 513, 1025, 0, 70, 1)
    arrays = draw(rng, lengths_q, lengths_k, H=4, Hkv=1, D=6, dtype=dtype)
    rules = {"is_causal": True, "offset": np.subtract(lengths_k, 1), "sinks": arrays[0][0, :, 0].copy()}
    for own in ({}, rules):
        check(*arrays, lengths_q, lengths_k, algorithm="decode", **own)


@pytest.mark.parametrize("algorithm", ALL)
@pytest.mark.parametrize("n", [1, 64, 512])
def test_one_sequence(isa, algorithm, n, rng):
    arrays = draw(rng, [n], dtype=np.float32)
    results = check(*arrays, [n], algorithm=algorithm, is_causal=True)
    assert_same(results[:2], (x[0] for x in support.run(fastmha, *(x[None] for x in arrays), layout="BLHD", is_causal=True,
                                                        algorithm=algorithm)[:2]))  # fmt: skip


@all_dtypes
@everywhere
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_no_sequence_and_none_with_tokens(isa, dtype, algorithm, lengths, rng):
    arrays = draw(rng, lengths, dtype=dtype)
    sinks = np.zeros(2, dtype)
    for given_k in (None, np.array(lengths, np.int32)):
        results = run(fastmha, *arrays, lengths, given_k, is_causal=True, sinks=sinks, algorithm=algorithm)
        assert [x.shape for x in results] == [(0, 2, 4), (2, 0), (0, 2, 5), (0, 2, 5), (0, 2, 4), (2,)][: len(results)]
        assert all(x.dtype == dtype and not bits(x).any() for x in results[5:])


@everywhere
def test_any_axis_may_be_empty(isa, algorithm, rng):
    lengths = (2, 0, 1)
    for sizes in ({"H": 0}, {"D": 0}, {"Dv": 0}, {"D": 0, "Dv": 0}):
        arrays = draw(rng, lengths, **sizes)
        check(*arrays, lengths, algorithm=algorithm)
    arrays = draw(rng, lengths, (0, 0, 0))
    check(*arrays, lengths, (0, 0, 0), algorithm=algorithm)
    arrays = draw(rng, (0, 0, 0), lengths)
    results = check(*arrays, (0, 0, 0), lengths, algorithm=algorithm)
    assert not any(bits(x).any() for x in results)


@everywhere
def test_many_short_sequences(algorithm, rng):
    lengths = rng.integers(0, 8, 2000)
    arrays = draw(rng, lengths, H=4, Hkv=2, dtype=np.float32)
    alone = one_by_one(*arrays, lengths, is_causal=True, algorithm=algorithm)
    for threads in (1, 3):
        assert_same(run(fastmha, *arrays, lengths, is_causal=True, algorithm=algorithm, threads=threads), alone)


@everywhere
def test_short_sequences_that_fill_any_cache_have_the_bits_that_each_has_alone(algorithm, rng):
    """While a thread is at work on one, it fetches heads of the sequence that comes; where there is none, or none of its size,
    nothing."""
    lengths = rng.integers(0, 33, 800)
    if algorithm != "decode":
        lengths[[100, 300]] = 90, 500
    arrays = draw(rng, lengths, H=4, Hkv=2, D=64, Dv=64, dtype=np.float32)
    alone = one_by_one(*arrays, lengths, is_causal=True, algorithm=algorithm)
    for threads in (1, 2, 5):
        together = run(fastmha, *arrays, lengths, is_causal=True, algorithm=algorithm, threads=threads)
        assert_same_but_for_blas(algorithm, together, alone)


@pytest.mark.parametrize(("threads", "group"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_decoded_sequences_that_come_from_memory_have_the_bits_that_each_has_alone(isa, threads, group, neighbours, rng):
    """One by one, a head is begun beside the head before, and not beside the last one of another sequence."""
    queries, keys = [1, 2, 1], [11000, 11300, 700]
    shapes = (sum(queries), 4 * group, 64), (sum(keys), 4, 64), (sum(keys), 4, 64)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    together = fastmha.attention_packed(q, k, v, queries, keys, algorithm="decode", num_threads=threads)
    for end, Lq, end_k, Lk in zip(np.cumsum(queries), queries, np.cumsum(keys), keys, strict=True):
        part, of_k = slice(end - Lq, end), slice(end_k - Lk, end_k)
        own = [x[s].swapaxes(0, 1)[None] for x, s in ((q, part), (k, of_k), (v, of_k))]
        alone = fastmha.attention(*own, algorithm="decode", num_threads=1)
        assert_same([together[part]], [alone[0].swapaxes(0, 1)])


@pytest.mark.parametrize("algorithm", ALL)
@support.ill_scaled
def test_scores_of_every_size(isa, algorithm, kind, rng):
    lengths = (70, 1, 195, 0, 5)
    arrays = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in support.draw_ill_scaled(kind, rng, 1, 4, 2, sum(lengths))]
    check(*arrays, lengths, algorithm=algorithm)


LENGTHS = st.lists(st.one_of(st.integers(0, 70), st.sampled_from([0, 1, 63, 64, 65, 191, 192, 193])), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32), LENGTHS, st.sampled_from(["same", "shuffled", "other"]),
    st.sampled_from([(1, 1), (2, 1), (6, 2), (3, 3)]), st.booleans(),
    st.sampled_from([None, (0, 0), (5, None), (None, 3), (70, 64)]), st.sampled_from(["none", "one", "each"]),
    st.sampled_from([None, 0.3]), st.sampled_from([None, 2.0]), st.booleans(), st.booleans(),
    st.sampled_from([0.0, 0.0, 0.3]), st.sampled_from(DTYPES), st.sampled_from(ISAS),
)  # fmt: skip
def test_every_rule_within_each_sequence_and_threads_change_no_bit(
    seed, lengths_q, kind, heads, causal, window, offset, scale, softcap, sinks, alibi, dropout, dtype, isa
):
    rng = np.random.default_rng(seed)
    of_other = {"same": lengths_q, "shuffled": rng.permutation(lengths_q), "other": rng.integers(0, 200, len(lengths_q))}
    lengths_k = of_other[kind].tolist() if kind != "same" else None
    arrays = draw(rng, lengths_q, lengths_k, *heads, 5, 3, dtype)
    keywords = {"is_causal": causal, "window": window, "scale": scale, "softcap": softcap}
    if sinks:
        keywords["sinks"] = rng.standard_normal(heads[0]).astype(dtype)
    if alibi:
        keywords["alibi"] = rng.random(heads[0]).astype(dtype)
    if (causal or window is not None or alibi) and (offset != "none" or lengths_k is not None):
        keywords["offset"] = 3 if offset == "one" else rng.integers(-20, 150, len(lengths_q))
    if dropout:
        keywords |= {"dropout": dropout, "seed": seed}
    with selected(isa):
        for algorithm in ALL:
            found = check(*arrays, lengths_q, lengths_k, algorithm=algorithm, **keywords)
            for threads in (1, 2, 5):
                assert_same(found, run(fastmha, *arrays, lengths_q, lengths_k, threads=threads, algorithm=algorithm, **keywords))
        if max(lengths_q) * heads[0] // heads[1] <= 64:
            found = check(*arrays, lengths_q, lengths_k, algorithm="decode", **keywords)
            for threads in (1, 2, 5):
                assert_same(found, run(fastmha, *arrays, lengths_q, lengths_k, threads=threads, algorithm="decode", **keywords))


@pytest.mark.parametrize("algorithm", ALL)
def test_gradients_are_central_differences(algorithm, rng):
    lengths_q, lengths_k = (3, 0, 1, 4), (2, 1, 3, 4)
    q, k, v, g = draw(rng, lengths_q, lengths_k, H=4, Hkv=2, D=3, Dv=2)
    sinks, alibi = rng.standard_normal(4), rng.random(4)
    keywords = {
        "sinks": sinks, "alibi": alibi, "softcap": 2.0, "window": (2, 1), "offset": [0, 1, 2, 0], "dropout": 0.2, "seed": 7,
    }  # fmt: skip

    def loss():
        return float((g * fastmha.attention_packed(q, k, v, lengths_q, lengths_k, algorithm=algorithm, **keywords)).sum())

    grads = run(fastmha, q, k, v, g, lengths_q, lengths_k, algorithm=algorithm, **keywords)[2:]
    for name, grad, x in zip(("q", "k", "v", "sinks"), grads, (q, k, v, sinks), strict=True):
        support.assert_gradient(grad, loss, x, name)


# ------------------------------------------------------------------------------------------------- a sequence and the others


@every_isa
@all_dtypes
@everywhere
def test_no_bit_depends_on_another_sequence_whatever_it_holds(isa, dtype, algorithm, rng):
    lengths_q, lengths_k = (7, 16, 0, 1, 9), (70, 193, 4, 300, 9)
    arrays = [x.copy() for x in draw(rng, lengths_q, lengths_k, H=2, Hkv=1, dtype=dtype)]
    keywords = {"algorithm": algorithm, "is_causal": True, "offset": np.subtract(lengths_k, lengths_q), "softcap": 3.0}
    clean = run(fastmha, *arrays, lengths_q, lengths_k, **keywords)
    for s, (rows, keys) in enumerate(zip(places(lengths_q), places(lengths_k), strict=True)):
        dirty = [x.copy() for x in arrays]
        for n, (x, at) in enumerate(zip(dirty, (rows, keys, keys, rows), strict=True)):
            x[at] = (np.nan, np.inf, -np.inf)[(s + n) % 3]
        found = run(fastmha, *dirty, lengths_q, lengths_k, **keywords)
        for n, (x, y) in enumerate(zip(found, clean, strict=True)):
            axis, at = int(n == 1), keys if n > 2 else rows
            assert same_bits(np.delete(x, at, axis), np.delete(y, at, axis))
        if lengths_q[s]:
            assert np.isnan(found[0][rows]).any()


@everywhere
def test_neither_number_nor_order_of_sequences_changes_a_bit(isa, algorithm, rng):
    lengths_q, lengths_k = rng.integers(0, 17, 9), rng.integers(0, 600, 9)
    arrays = draw(rng, lengths_q, lengths_k, H=4, Hkv=2, dtype=np.float32)
    offset = rng.integers(-5, 100, 9)
    keywords = {"algorithm": algorithm, "window": (90, 60), "sinks": np.ones(4, np.float32)}
    whole = run(fastmha, *arrays, lengths_q, lengths_k, offset=offset, **keywords)
    for _ in range(4):
        order = rng.permutation(9)[: rng.integers(1, 10)]
        rows, keys = (np.concatenate([np.arange(sum(n[:s]), sum(n[: s + 1])) for s in order]) for n in (lengths_q, lengths_k))
        some = [x[at] for x, at in zip(arrays, (rows, keys, keys, rows), strict=True)]
        found = run(fastmha, *some, lengths_q[order], lengths_k[order], offset=offset[order], threads=2, **keywords)
        wanted = (whole[0][rows], whole[1][:, rows], *(x[at] for x, at in zip(whole[2:5], (rows, keys, keys), strict=False)))
        assert_same(found[:5], wanted)


@pytest.mark.parametrize("algorithm", ALL)
def test_sequences_of_one_length_are_a_batch(isa, algorithm, rng):
    """Also what dropout draws: the number of a sequence is that of a batch row."""
    arrays = draw(rng, [33] * 4, H=4, Hkv=2, dtype=np.float32)
    keywords = {"algorithm": algorithm, "is_causal": True, "dropout": 0.4, "seed": 3, "sinks": np.ones(4, np.float32)}
    found = run(fastmha, *arrays, [33] * 4, **keywords)
    batch = support.run(fastmha, *(x.reshape(4, 33, *x.shape[1:]) for x in arrays), layout="BLHD", **keywords)
    assert_same(found[:1] + found[2:5], (batch[n].reshape(found[n].shape) for n in (0, 2, 3, 4)))
    assert same_bits(found[1].reshape(4, 4, 33), batch[1].swapaxes(0, 1).copy())
    assert same_bits(found[5], batch[5])


@all_dtypes
@pytest.mark.parametrize("rules", [{}, {"is_causal": True, "softcap": 2.0}, {"dropout": 0.2, "seed": 1}], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_long_sequence_beside_short_ones_is_split_among_threads_with_the_same_bits(isa, dtype, rules, sinks, rng, monkeypatch):
    lengths = (5, 400, 0, 30, 1, 9)
    arrays = draw(rng, lengths, H=2, Hkv=1, dtype=dtype)
    split, run_of_core = [], _core.packed_backward

    def watched(problem, table, *rest):
        split.append(table[:, [4, 5]].tolist())
        run_of_core(problem, table, *rest)

    monkeypatch.setattr(_core, "packed_backward", watched)
    keywords = {"algorithm": "tiled", **rules, **({"sinks": arrays[0][0, :, 0].copy()} if sinks else {})}
    one = run(fastmha, *arrays, lengths, threads=1, **keywords)
    assert_same(one[:5], one_by_one(*arrays, lengths, threads=1, **keywords))
    for threads in (2, 3, 8):
        assert_same(one, run(fastmha, *arrays, lengths, threads=threads, **keywords))
    whole = [[s, 1] for s in (1, 3, 5, 0, 4, 2)]
    assert split == [whole] + 3 * [[[1, 0], *whole[1:]]]


@tile_isas
@halves
@pytest.mark.parametrize("rules", [{}, {"is_causal": True, "softcap": 2.0}, {"dropout": 0.2, "seed": 1}, {"window": (70, 40)}],
                         ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_sequences_on_matrix_tiles_have_the_bits_that_each_has_alone(isa, dtype, rules, sinks, rng, monkeypatch):
    lengths = (5, 400, 0, 70, 1, 33, 64, 200)
    arrays = draw(rng, lengths, H=4, Hkv=2, D=40, Dv=24, dtype=dtype)
    keywords = {**rules, **({"sinks": arrays[0][0, :, 0].astype(np.float32)} if sinks else {})}
    parts = 2 if dtype is np.float16 else 1
    seen = {}

    def watched(name):
        function = getattr(_core, name)

        def call(problem, table, *rest):
            seen[name, problem.parts] = sorted(table[:, 4].tolist())
            function(problem, table, *rest)

        monkeypatch.setattr(_core, name, call)

    watched("packed_forward")
    watched("packed_backward")
    with tuning.using(tune.on_tiles_always(tuning.current())):
        one = run(fastmha, *arrays, lengths, threads=1, **keywords)
        assert_same(one[:5], one_by_one(*arrays, lengths, threads=1, **keywords))
        for threads in (2, 8):
            assert_same(one, run(fastmha, *arrays, lengths, threads=threads, **keywords))
    assert seen["packed_forward", parts] == seen["packed_backward", parts] == [1, 3, 5, 6, 7]


@tile_isas
def test_what_is_not_finite_stays_in_its_sequence_on_matrix_tiles(isa, rng):
    lengths = (70, 100, 64)
    q, k, v, g = draw(rng, lengths, D=32, Dv=32, dtype=np.float16)
    with tuning.using(tune.on_tiles_always(tuning.current())):
        clean = run(fastmha, q, k, v, g, lengths, threads=2)
        q[80, 0, 3], k[90, 1, 2], v[100, 0, 1] = np.nan, np.inf, np.nan
        with np.errstate(all="ignore"):
            dirty = run(fastmha, q, k, v, g, lengths, threads=2)
            assert_same(dirty, one_by_one(q, k, v, g, lengths, threads=2))
    for n, (x, y) in enumerate(zip(clean, dirty, strict=True)):
        x, y = (np.moveaxis(z, int(n == 1), 0) for z in (x, y))
        assert_same([x[:70], x[170:]], [y[:70], y[170:]])
        assert not np.isfinite(y[70:170].astype(np.float32)).all()


def test_auto_chooses_for_each_sequence_and_the_longest_run_first(rng, monkeypatch):
    if not _core.fused_multiply_add():
        pytest.skip("everything is blas without fused multiply-add")
    lengths_q, lengths_k = (1, 40, 1, 20, 0, 90), (2000, 40, 3000, 1, 700, 90)
    arrays = draw(rng, lengths_q, lengths_k, D=64, dtype=np.float32)
    runs, run_of_core = [], _core.packed_forward

    def watched(problem, table, out, lse, decode, workers):
        runs.append((decode, table[:, 4].tolist()))
        run_of_core(problem, table, out, lse, decode, workers)

    monkeypatch.setattr(_core, "packed_forward", watched)
    check(*arrays, lengths_q, lengths_k, bounded=False)
    assert dict(runs[:2]) == {True: [2, 0, 4], False: [5, 1, 3]}
    lengths = zip(lengths_q, lengths_k, lengths_k, strict=True)
    alone = [fastmha.plan(*(repeated(1, 2, n, 64) for n in own)).algorithm for own in lengths]
    assert [s for s, name in enumerate(alone) if name == "decode"] == sorted(dict(runs)[True])


def test_defaults_are_those_of_attention(rng):
    arrays = draw(rng, (4, 9))
    first = run(fastmha, *arrays, (4, 9), is_causal=True)
    for keywords in (
        {"lengths_k": (4, 9)}, {"offset": 0}, {"offset": np.zeros(2, np.uint8)}, {"lengths_k": np.array([4, 9], np.uint16)},
        {"scale": 5**-0.5}, {"window": (None, 0)}, {"algorithm": "auto"}, {"dropout": 0.0, "seed": 3},
    ):  # fmt: skip
        assert_same(first, run(fastmha, *arrays, (4, 9), is_causal=True, **keywords))
    out = fastmha.attention_packed(*arrays[:3], [4, 9], is_causal=True)
    assert same_bits(out, first[0])
    big_endian = np.array([4, 9], ">i8")
    assert_same(fastmha.attention_packed(*arrays[:3], big_endian, is_causal=np.True_, return_lse=np.True_), first[:2])


# ----------------------------------------------------------------------------------------------------------- memory


@every_isa
@all_dtypes
@guards
@pytest.mark.parametrize("poison", [False, True], ids=["finite", "NaN"])
def test_nothing_outside_the_arrays_is_touched(isa, dtype, kind, poison, rng):
    """Each array ends at, or starts behind, a page that may not be touched; so does what is passed as out."""
    of_tiles, of_chunks = ((1, 70, 0, 7, 65), (3, 200, 5, 0, 64)), ((3, 1, 16), (513, 40, 1))
    for lengths_q, lengths_k in (of_tiles, of_chunks, ((0, 17), (9, 17)), ((9, 0), (5, 0))):
        arrays = [x.copy() for x in draw(rng, lengths_q, lengths_k, H=4, Hkv=2, D=7, Dv=9, dtype=dtype)]
        if poison:
            for x in arrays:
                x[0, 0, -1] = x[-1, -1, -1] = np.nan
        offset, per_head = np.subtract(lengths_k, lengths_q), np.abs(arrays[0][0, :, 0])
        rules = {"is_causal": True, "offset": offset, "sinks": per_head, "alibi": per_head}
        for algorithm in (*NAMED, *["decode"] * (max(lengths_q) <= 32)):
            for keywords in ({}, rules, {"dropout": 0.2, "seed": 1, "softcap": 2.0}):
                guard = Guard(kind)
                near = {name: guard(x) if isinstance(x, np.ndarray) else x for name, x in keywords.items()}
                q, k, v, g, of_q, of_k = map(guard, (*arrays, np.array(lengths_q), np.array(lengths_k)))
                out = guard.empty(g.shape, dtype)
                wanted = run(fastmha, *arrays, lengths_q, lengths_k, algorithm=algorithm, **keywords)
                near |= {"algorithm": algorithm, "num_threads": 2}
                result, lse = fastmha.attention_packed(q, k, v, of_q, of_k, return_lse=True, out=out, **near)
                assert result is out
                results = [out, lse]
                if algorithm != "decode":
                    results += fastmha.attention_packed_backward(g, q, k, v, out, guard(lse), of_q, of_k, **near)
                assert_same_but_for_blas(algorithm, results, wanted)


@all_dtypes
@everywhere
def test_arrays_may_lie_in_every_way(isa, dtype, algorithm, rng):
    lengths_q, lengths_k = (3, 0, 16, 1), (70, 2, 0, 193)
    arrays = [x.copy() for x in draw(rng, lengths_q, lengths_k, H=4, Hkv=2, D=6, Dv=3, dtype=dtype)]
    wanted = run(fastmha, *arrays, lengths_q, lengths_k, algorithm=algorithm)
    for ways in zip(*map(rearranged, arrays), strict=True):
        placed = [x for _, x in ways]
        for x in placed:
            x.flags.writeable = False
        found = run(fastmha, *placed, lengths_q, lengths_k, algorithm=algorithm)
        assert_same_but_for_blas(algorithm, found, wanted)
    for way, lse in rearranged(wanted[1]):
        if algorithm != "decode":
            lse.flags.writeable = False
            made = arrays[3], *arrays[:3], wanted[0], lse
            assert_same(fastmha.attention_packed_backward(*made, lengths_q, lengths_k, algorithm=algorithm), wanted[2:], way)


@everywhere
def test_views_of_a_fused_projection_are_read_where_they_lie(isa, algorithm, rng):
    lengths, (H, Hkv, D) = (9, 0, 16, 1), (4, 2, 8)
    fused = rng.standard_normal((26, (H + 2 * Hkv) * D))
    q, k, v = (x.reshape(26, -1, D) for x in np.split(fused, [H * D, (H + Hkv) * D], axis=1))
    assert all(np.shares_memory(x, fused) for x in (q, k, v))
    g = rng.standard_normal((26, H, D))
    found = check(q, k, v, g, lengths, algorithm=algorithm, is_causal=True)
    copies = run(fastmha, q.copy(), k.copy(), v.copy(), g, lengths, algorithm=algorithm, is_causal=True)
    assert_same_but_for_blas(algorithm, found, copies)


@everywhere
def test_keys_of_one_head_broadcast_are_those_of_each(isa, algorithm, rng):
    q, k, v, g = draw(rng, (5, 16), (40, 3), H=4, Hkv=1)
    k4, v4 = (np.broadcast_to(x, (43, 4, x.shape[2])) for x in (k, v))
    found = check(q, k4, v4, g, (5, 16), (40, 3), algorithm=algorithm)
    assert_same(found, run(fastmha, q, k4.copy(), v4.copy(), g, (5, 16), (40, 3), algorithm=algorithm))


@everywhere
@all_dtypes
def test_out_is_written_wherever_it_lies(isa, dtype, algorithm, rng):
    lengths = (3, 0, 16, 9)
    q, k, v, _ = draw(rng, lengths, dtype=dtype)
    wanted = fastmha.attention_packed(q, k, v, lengths, algorithm=algorithm)
    for _, out in rearranged(np.full(wanted.shape, np.nan, dtype)):
        assert fastmha.attention_packed(q, k, v, lengths, algorithm=algorithm, out=out) is out
        assert same_bits(np.ascontiguousarray(out), wanted)
    around = np.full((30, 2, 7), np.nan, dtype)
    inside = around[1:-1, :, 2:6]
    fastmha.attention_packed(q, k, v, lengths, algorithm=algorithm, out=inside)
    assert same_bits(inside.copy(), wanted)
    around[1:-1, :, 2:6] = np.nan
    assert np.isnan(around).all()


def test_memory_is_that_of_the_tokens(rng):
    """A padded batch would take 56 times as much; nor does any thread have scratch for a whole sequence that is split."""
    lengths = [3000] + 63 * [5]
    q, k, v, g = (rng.standard_normal((sum(lengths), h, 16), np.float32) for h in (8, 1, 1, 8))
    for algorithm in ("tiled", "blas"):
        tracemalloc.start()
        try:
            results = run(fastmha, q, k, v, g, lengths, threads=8, algorithm=algorithm)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak - sum(x.nbytes for x in results) < 8 * q.nbytes, algorithm


def test_python_does_nothing_for_each_sequence(rng):
    """Its calls are as many for 3000 sequences as for 30."""
    counts = {}
    for n in (30, 3000):
        lengths = np.arange(n) % 10
        arrays = draw(rng, lengths, dtype=np.float32)
        for algorithm in ("tiled", "decode"):
            keywords = {"algorithm": algorithm, "is_causal": True, "sinks": np.ones(2, np.float32), "dropout": 0.1, "seed": 1}
            run(fastmha, *arrays, lengths, threads=2, **keywords)
            profile = cProfile.Profile()
            profile.runcall(run, fastmha, *arrays, lengths, threads=2, **keywords)
            counts[n, algorithm] = pstats.Stats(profile).total_calls
    for algorithm in ("tiled", "decode"):
        assert abs(counts[3000, algorithm] - counts[30, algorithm]) < 30, counts


# --------------------------------------------------------------------------------------------------------- messages

TQ, TK, S, H, HKV, D, DV = 7, 9, 3, 4, 2, 3, 5
LENGTHS_Q, LENGTHS_K = (3, 0, 4), (2, 6, 1)


def good():
    q, k, v, g = draw(np.random.default_rng(0), LENGTHS_Q, LENGTHS_K, H, HKV, D, DV, np.float32)
    return {"q": q, "k": k, "v": v, "lengths_q": LENGTHS_Q, "lengths_k": LENGTHS_K}, g


def attend(**changes):
    """attention_packed of good arguments, some of them changed; nothing is written before everything is checked."""
    arguments, g = good()
    out = np.full(g.shape, 7, g.dtype)
    try:
        return fastmha.attention_packed(**{**arguments, "out": out, **changes})
    finally:
        assert (out == 7).all()


def backward(**changes):
    arguments, g = good()
    arguments |= {"grad_out": g, "out": g.copy(), "lse": np.zeros((H, TQ), np.float32)}
    return fastmha.attention_packed_backward(**{**arguments, **changes})


zeros = support.zeros
HUGE, LONG = 2**50, repeated(2**60, 1, 1)
EMPTY = {"q": zeros(0, H, D), "k": zeros(0, HKV, D), "v": zeros(0, HKV, DV), "lengths_q": [], "lengths_k": []}
SHARED = {
    "q of four axes": ({"q": zeros(1, TQ, H, D)}, ValueError, "q must have 3 axes (tokens, H, D), got shape (1, 7, 4, 3)"),
    "k of two axes": ({"k": zeros(TK, D)}, ValueError, "k must have 3 axes (tokens, H, D), got shape (9, 3)"),
    "v of float16": ({"v": zeros(TK, HKV, DV, dtype=np.float16)}, TypeError,
                     "v has dtype float16 but q has float32: they must share one dtype"),
    "q nothing": ({"q": None}, TypeError, "q must be float32, float64, float16 or bfloat16 (native byte order), got None"),
    "q masked": ({"q": np.ma.zeros((TQ, H, D))}, TypeError, "q is a masked array, whose mask would be lost: pass q.filled(...)"),
    "k of another dtype": ({"k": zeros(TK, HKV, D, dtype=np.float64)}, TypeError,
                           "k has dtype float64 but q has float32: they must share one dtype"),
    "v of another dtype": ({"v": zeros(TK, HKV, DV, dtype=np.float64)}, TypeError,
                           "v has dtype float64 but q has float32: they must share one dtype"),
    "width": ({"k": zeros(TK, HKV, 8)}, ValueError, "k has width 8 on axis 2 but q has 3"),
    "length of v": ({"v": zeros(8, HKV, DV)}, ValueError, "v has length 8 on axis 0 but k has 9"),
    "heads of v": ({"v": zeros(TK, 4, DV)}, ValueError, "v has 4 heads on axis 1 but k has 2"),
    "heads of q": ({"q": zeros(TQ, 5, D)}, ValueError,
                   "k has 2 heads on axis 1 but q has 5: q's heads must be a multiple of k's"),
    "no heads of k": ({"k": zeros(TK, 0, D), "v": zeros(TK, 0, DV)}, ValueError,
                      "k has 0 heads on axis 1 but q has 4: q's heads must be a multiple of k's"),
    "tokens of other arrays": ({"q": zeros(H, TQ, D)}, ValueError, "k has 2 heads on axis 1 but q has 7: ..."),
    "too many tokens": ({"q": repeated(HUGE, H, D)}, ValueError, f"q has length {HUGE}: at most 2147483583 is possible"),
    "too many keys": ({"k": repeated(HUGE, HKV, D), "v": repeated(HUGE, HKV, DV)}, ValueError,
                      f"k has length {HUGE}: at most 2147483583 is possible"),
    "sums beyond 64 bits": ({"q": LONG, "k": LONG, "v": LONG, "lengths_q": [2**60] * 9, "lengths_k": None}, ValueError,
                            f"q has length {2**60}: at most 2147483583 is possible"),
    "too many sequences": ({"lengths_q": repeated(2**31, dtype=np.int64)}, ValueError,
                           "lengths_q has length 2147483648: at most 2147483583 is possible"),
    "lengths of two axes": ({"lengths_q": [[3], [4]]}, ValueError, "lengths_q must have shape (S,), got (2, 1)"),
    "a number": ({"lengths_q": 7}, ValueError, "lengths_q must have shape (S,), got ()"),
    "no lengths_q": ({"lengths_q": None}, TypeError, "lengths_q must be a (S,) array of ints, got None"),
    "ragged": ({"lengths_q": [[3], [4, 1]]}, ValueError, "lengths_q cannot be made an array: ..."),
    "lengths masked": ({"lengths_q": np.ma.array([3, 0, 4])}, TypeError,
                       "lengths_q is a masked array, whose mask would be lost: pass lengths_q.filled(...)"),
    "lengths of floats": ({"lengths_q": [3.0, 0, 4]}, TypeError, "lengths_q must be integers, got dtype float64"),
    "lengths of bool": ({"lengths_q": np.ones(7, bool)}, TypeError, "lengths_q must be integers, got dtype bool"),
    "lengths_k of floats": ({"lengths_k": np.ones(3, np.float32)}, TypeError, "lengths_k must be integers, got dtype float32"),
    "negative": ({"lengths_q": [3, -1, 5]}, ValueError, "lengths_q must lie in [0, tokens] = [0, 7], got -1 at index 1"),
    "longer than all": ({"lengths_k": [0, 0, 10]}, ValueError, "lengths_k must lie in [0, tokens] = [0, 9], got 10 at index 2"),
    "beyond 64 bits": ({"lengths_k": [9, 0, 2**64]}, ValueError,
                       "lengths_k must lie in [0, tokens] = [0, 9], got 18446744073709551616 at index 2"),
    "unsigned": ({"lengths_q": np.array([2**64 - 1, 1, 7], np.uint64)}, ValueError,
                 "lengths_q must lie in [0, tokens] = [0, 7], got 18446744073709551615 at index 0"),
    "too few": ({"lengths_q": [3, 0, 3]}, ValueError, "lengths_q must add up to the 7 tokens of q, got 6"),
    "too many": ({"lengths_k": [2, 6, 2]}, ValueError, "lengths_k must add up to the 9 tokens of k, got 10"),
    "sums of small integers": ({"q": zeros(260, H, D), "lengths_q": np.array([252, 1, 251], np.uint8)}, ValueError,
                               "lengths_q must add up to the 260 tokens of q, got 504"),
    "other sequences": ({"lengths_k": [2, 7]}, ValueError, "lengths_k must have shape (S,) = (3,) as lengths_q, got (2,)"),
    "no sequences": ({"lengths_q": []}, ValueError, "lengths_q must add up to the 7 tokens of q, got 0"),
    "no lengths_k": ({"lengths_k": None}, ValueError,
                     "lengths_k must be given where k has other tokens than q, got lengths 9 of k and 7 of q on axis 0"),
    "causal without offset": ({"is_causal": True}, ValueError,
                              "offset must be given with is_causal, window or alibi where sequence 0 has 3 queries and 2 keys: "
                              "0 lets query 0 see key 0, lengths_k - lengths_q lets the last query see the last key"),
    "window without offset": ({"window": (1, 1), "lengths_q": [2, 4, 1], "lengths_k": [2, 6, 1]}, ValueError,
                              "offset must be given ...where sequence 1 has 4 queries and 6 keys: ..."),
    "alibi without offset": ({"alibi": zeros(H)}, ValueError,
                             "offset must be given ...where sequence 0 has 3 queries and 2 keys: ..."),
    "offset alone": ({"offset": 3}, ValueError,
                     "offset is given (3) but none of is_causal, window and alibi, which it would shift"),
    "offsets of other sequences": ({"is_causal": True, "offset": [0, 1]}, ValueError,
                                   "offset must be an int or a (S,) = (3,) array of ints, got shape (2,)"),
    "offset of floats": ({"is_causal": True, "offset": 0.5}, TypeError, "offset must be an int or a (S,) array of ints, got 0.5"),
    "offset too far": ({"window": (1, 1), "offset": [0, 2**61 + 1, 0]}, ValueError, "offset must lie within +-2**61, got ..."),
    "is_causal": ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
    "window": ({"window": 3, "offset": 0}, TypeError, "window must be None or a pair (left, right) of ints >= 0 or None, got 3"),
    "scale": ({"scale": "1"}, TypeError, "scale must be a finite number or None, got '1'"),
    "softcap": ({"softcap": 0}, ValueError, "softcap must be a finite number > 0 or None, got 0"),
    "sinks of other heads": ({"sinks": zeros(2)}, ValueError,
                             "sinks must have shape (H,) = (4,), one for each query head, got (2,)"),
    "alibi of another dtype": ({"alibi": zeros(H, dtype=np.float64), "offset": 0}, TypeError,
                               "alibi has dtype float64 but q has float32: ..."),
    "dropout": ({"dropout": 1, "seed": 3}, ValueError, "dropout must be a number in [0, 1), got 1"),
    "no seed": ({"dropout": 0.1}, ValueError, "seed must be given with dropout, ...got dropout 0.1 and no seed"),
    "algorithm": ({"algorithm": "flash"}, ValueError, 'algorithm must be "auto", "blas", "tiled" or "decode", got \'flash\''),
    "algorithm of no sequence": ({**EMPTY, "algorithm": 3}, ValueError,
                                 'algorithm must be "auto", "blas", "tiled" or "decode", got 3'),
    "threads": ({"num_threads": 0}, ValueError, "num_threads must be at least 1, got 0"),
}  # fmt: skip
FORWARD = {
    "queries of decode": ({"q": zeros(107, H, D), "lengths_q": [33, 0, 74], "algorithm": "decode"}, ValueError,
                          'algorithm "decode" cannot serve this call: it takes at most 64 query rows per ..., got 66'),
    "return_lse": ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
    "out of another shape": ({"out": zeros(H, TQ, DV)}, ValueError, "out must have shape (7, 4, 5), got (4, 7, 5)"),
    "out of another dtype": ({"out": zeros(TQ, H, DV, dtype=np.float64)}, TypeError,
                             "out has dtype float64 but q has float32: ..."),
    "out a list": ({"out": []}, TypeError, "out must be a NumPy array, got list"),
    "out read-only": ({"out": np.broadcast_to(np.float32(0), (TQ, H, DV))}, ValueError,
                      "out must be writable, got a read-only array"),
}  # fmt: skip
BACKWARD = {
    "decode": ({"algorithm": "decode"}, ValueError, 'algorithm "decode" cannot serve this call: it has no backward pass'),
    "decode of no sequence": ({**EMPTY, "algorithm": "decode"}, ValueError,
                              'algorithm "decode" cannot serve this call: it has no backward pass'),
    **{
        f"{name} {kind}": ({name: x}, error, message)
        for name, shape in (("grad_out", (7, 4, 5)), ("out", (7, 4, 5)), ("lse", (4, 7)))
        for kind, x, error, message in (
            ("of another shape", zeros(*shape[::-1]), ValueError, f"{name} must have shape {shape}, got {shape[::-1]}"),
            ("of a batch", zeros(1, *shape), ValueError, f"{name} must have shape {shape}, got {(1, *shape)}"),
            ("of another dtype", zeros(*shape, dtype=np.float64), TypeError, f"{name} has dtype float64 but q has float32: ..."),
            ("of integers", zeros(*shape, dtype=int), TypeError, f"{name} must be float32 or float64 ...got int64: ..."),
            ("nothing", None, TypeError, f"{name} must be float32 or float64 (native byte order), got None..."),
        )
    },
}  # fmt: skip
PACKED_ALONE = "each sequence has its keys alone: lengths_k says how many"
NO_MASK = "no mask is laid over sequences of different lengths; fastmha.attention takes one"
KEYWORDS = {
    **dict.fromkeys(("key_padding_lengths", "key_value_seq_lengths", "key_ranges"), PACKED_ALONE),
    **dict.fromkeys(("key_padding_mask", "attention_mask"), PACKED_ALONE),
    **dict.fromkeys(("mask", "attn_mask", "bias", "attn_bias", "need_bias_grad"), NO_MASK),
    **dict.fromkeys(("cu_seqlens_q", "cu_seq_q", "cu_seqlens"), "lengths_q are the lengths themselves here, np.diff of these"),
    **dict.fromkeys(("cu_seqlens_k", "cu_seq_k"), "lengths_k are the lengths themselves here, np.diff of these"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_q", "max_k"), "the lengths alone say it"),
    "layout": "arrays are (tokens, H, D)", "capture": "fastmha.attention takes it, for one sequence",
    "causal": "it is is_causal here", "softmax_scale": "it is scale here", "query": "it is q here",
    "window_size": "it is window here, a pair (left, right) in which None is unbounded",
    "dropout_p": "it is dropout here, with a seed", "alibi_slopes": "it is alibi here, one slope for each query head",
}  # fmt: skip


@pytest.mark.parametrize("call", [attend, backward])
@pytest.mark.parametrize("name", SHARED)
def test_what_both_refuse(call, name):
    changes, error, message = SHARED[name]
    with raises(error, message):
        call(**changes)


@pytest.mark.parametrize("name", FORWARD)
def test_what_forward_refuses(name):
    changes, error, message = FORWARD[name]
    with raises(error, message):
        attend(**changes)


@pytest.mark.parametrize("name", BACKWARD)
def test_what_backward_refuses(name):
    changes, error, message = BACKWARD[name]
    with raises(error, message):
        backward(**changes)


@pytest.mark.parametrize("call", [attend, backward])
@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_of_other_libraries_are_told(call, name):
    function = "attention_packed" if call is attend else "attention_packed_backward"
    with raises(TypeError, f"{function} has no keyword {name}: {KEYWORDS[name]}"):
        call(**{name: None})


@pytest.mark.parametrize("name", ["q", "k", "v", "lengths_q", "lengths_k", "offset", "sinks", "alibi"])
def test_out_that_overlaps_an_input_is_refused(name):
    memory = np.zeros(2 * TQ * H * 8, np.float32)
    own = {"q": (TQ, H, D), "k": (TK, HKV, D), "v": (TK, HKV, DV), "sinks": (H,), "alibi": (H,)}
    if name in own:
        x = memory[: np.prod(own[name])].reshape(own[name])
    else:
        x = memory.view(np.int64)[:S]
        x[:] = LENGTHS_K if name == "lengths_k" else LENGTHS_Q
    before = memory.copy()
    with raises(ValueError, f"out overlaps {name} in memory"):
        attend(**{"is_causal": True, "offset": 0, name: x, "out": memory[: TQ * H * DV].reshape(TQ, H, DV)})
    assert same_bits(memory, before)


def test_out_that_overlaps_itself_is_refused():
    out = np.lib.stride_tricks.as_strided(np.zeros(200, np.float32), (TQ, H, DV), (16, 4, 4))
    with raises(ValueError, "out overlaps itself: shape (7, 4, 5), strides (16, 4, 4)"):
        attend(out=out)


def test_good_arguments_are_good():
    """What the calls above change is all that is wrong with them."""
    arguments, g = good()
    out, lse = fastmha.attention_packed(**arguments, return_lse=True)
    assert out.shape == g.shape
    assert [x.shape for x in backward(out=out, lse=lse)] == [(TQ, H, D), (TK, HKV, D), (TK, HKV, DV)]
