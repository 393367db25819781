"""Whatever is raised, at whatever bytecode of a change, the cache is then as it was or as the change would have left it.

Every bytecode that an operation runs in the package's own files raises once, by a trace function, after a random history.
"""

import copy
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastmha.cache
import fastmha.cached
import fastmha.merging
import fastmha.module
import fastmha.slots
from fastmha import KVCache, MultiHeadAttention, _core

B, HKV, D, DV = 3, 2, 3, 2
ROOMS = fastmha.slots, fastmha.merging, fastmha.cached, fastmha.cache, fastmha.module
FILES = {module.__file__ for module in ROOMS}


class Stop(KeyboardInterrupt):
    pass


def stopped(act, at):
    """act(), but bytecode number `at` of it raises: the frame in which it did, None if there are not so many, and the number
    at which a step begins to store."""
    seen, where, stores = 0, None, None

    def local(frame, event, _):
        nonlocal seen, where
        if event == "opcode":
            seen += 1
            if seen == at:
                where = frame
                raise Stop
        return local

    def trace(frame, *_):
        nonlocal stores
        if frame.f_code.co_filename not in FILES:
            return None
        if frame.f_code is fastmha.cached.Step.__enter__.__code__:
            stores = seen
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return local

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except Stop:
        pass
    finally:
        sys.settrace(before)
    return where, stores


def outcome(act):
    try:
        out = act()
    except ValueError as error:
        return str(error)
    return None if out is None else out.tobytes()


def snapshot(cache):
    """What it holds, and what it will then do: to which lengths it can go back, and the attention of the next token."""
    lengths, held, k, v = cache.lengths.tolist(), cache.held.tolist(), cache.k, cache.v
    linear = cache.window is None
    rows = [(k[b, :, :n].tobytes(), v[b, :, :n].tobytes()) for b, n in enumerate(lengths if linear else held)]
    back, ahead = copy.copy(cache), copy.copy(cache)
    window, ways = None, []
    if not linear:
        window, ways = (cache.window, None), [outcome(lambda n=n: back.truncate(n)) for n in range(cache.length, -1, -1)]
    new = np.ones((B, HKV, 1, cache.head_dim), cache.dtype), np.ones((B, HKV, 1, cache.v_head_dim), cache.dtype)
    q, keywords = np.ones((B, HKV, 1, cache.head_dim), np.float32), {"algorithm": "tiled", "num_threads": 1}
    step = outcome(lambda: ahead.append(*new)), outcome(lambda: ahead.attend(q, window=window, **keywords))
    return lengths, held, cache.length, cache.capacity, cache.nbytes, rows, ways, step, repr(cache)


def assert_one_of_two(cache, act, before_in=()):
    """Wherever act(cache) is stopped. Within frames of the functions `before_in` the cache must be as it was."""
    done, before = copy.copy(cache), snapshot(cache)
    _, stores = stopped(lambda: act(done), -1)
    after, at = snapshot(done), 0
    while True:
        at += 11 if stores and at + 11 < stores else 1      # checks and projections before a step stores: some of them do
        tried = copy.copy(cache)
        frame, _ = stopped(lambda tried=tried: act(tried), at)
        now = snapshot(tried)
        if frame is None:
            assert now == after
            assert at > 5  # the trace has seen it at work
            return
        place = f"{frame.f_code.co_name}, line {frame.f_lineno}, bytecode {at}"
        assert now == before or (now == after and frame.f_code not in before_in), place


# ------------------------------------------------------------------------------------------------------ the cache itself

KINDS = {
    "growing": {},
    "capacity": {"capacity": 60},
    "float16": {"dtype": np.float16},
    "ring": {"window": 3, "max_chunk": 4},
    "float16 ring": {"window": 2, "max_chunk": 3, "dtype": np.float16},
    "short ring": {"window": 0, "max_chunk": 1},
}


def tokens(rng, n, widths=(D, DV)):
    return [rng.standard_normal((B, HKV, n, width)).astype(np.float32) for width in widths]


def lived(kind, seed, widths=(D, DV)):
    """A cache after a random history."""
    rng = np.random.default_rng(seed)
    cache = KVCache(B, HKV, widths[0], v_head_dim=widths[1], **KINDS[kind])
    for _ in range(rng.integers(9)):
        what = rng.choice(["append", "append", "append", "truncate", "reorder"])
        if what == "append":
            n = rng.integers(1, (cache.max_chunk or 5) + 1)
            cache.append(*tokens(rng, n, widths), None if rng.random() < 0.5 else rng.integers(0, n + 1, B))
        elif what == "truncate":
            back = rng.integers(0, (cache.max_chunk or 5) + 1, B if rng.random() < 0.7 else 1)
            outcome(lambda back=back: cache.truncate(np.maximum(cache.lengths - back, 0)))
        else:
            cache.reorder(rng.integers(0, B, B))
    return cache, rng


def appending(cache, rng):
    """Some tokens of some rows, or as many as make it grow, in the storage dtype or in others, with any strides."""
    n = cache.max_chunk if cache.window is not None else 60 - cache.length if rng.random() < 0.3 else 5
    n = int(rng.integers(1, n + 1))
    k, v = tokens(rng, n)
    if rng.random() < 0.5:
        k, v = k.astype(np.float64), np.repeat(v, 2, axis=3)[..., ::2]
    lengths = None if rng.random() < 0.5 else rng.integers(0, n + 1, B)
    return lambda cache: cache.append(k, v, lengths)


def truncating(cache, rng):
    tried = copy.copy(cache)
    wanted = [np.maximum(cache.lengths - back, 0) for back in (rng.integers(0, 4, B), np.array([2, 0, 1]), 0)]
    length = next(x for x in wanted if outcome(lambda x=x: tried.truncate(x)) is None)
    return lambda cache: cache.truncate(length)


def reordering(cache, rng):
    indices = rng.integers(0, B, B) if rng.random() < 0.5 else rng.permutation(B)
    return lambda cache: cache.reorder(indices)


def resetting(cache, rng):
    return lambda cache: cache.reset()


@pytest.mark.parametrize("change", [appending, truncating, reordering, resetting])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_change_that_is_stopped_anywhere_has_happened_or_has_not(kind, change, seed):
    cache, rng = lived(kind, seed)
    assert_one_of_two(cache, change(cache, rng))


# --------------------------------------------------------------------------------------------------- steps of a module

M = MultiHeadAttention(4 * D, 4, num_kv_heads=HKV, use_bias=True, rng=0)
OF_ATTENTION = fastmha.cached.attend, fastmha.cached.Step.attend, fastmha.cached.merge_into, fastmha.merging.shares
INSIDE = {f.__code__ for f in (*OF_ATTENTION, M._project_out)}


def stepping(cache, rng, longest):
    """A forward over the cache, of up to so many tokens."""
    n = int(rng.integers(1, longest + 1))
    X = rng.standard_normal((B, n, 4 * D)).astype(np.float32)
    counts = rng.integers(0, n + 1, B) if rng.random() < 0.3 else np.full(B, n)
    keywords = {"key_padding_lengths": counts}
    if cache.window is not None:
        keywords["window"] = (cache.window, 0)
    elif rng.random() < 0.3:
        keywords["mask"] = rng.random((n, (cache.lengths + counts).max())) < 0.2
        keywords["mask"][:1, :1] = False    # all of a small one would be a warning
    if rng.random() < 0.3:
        keywords["need_weights"] = True
    if rng.random() < 0.3:
        keywords["transform_qk"] = lambda q, k, positions: (2 * q, 2 * k)
    return lambda cache: M.forward(X, cache=cache, is_causal=True, training=False, num_threads=1, **keywords)


@pytest.mark.parametrize("kind", ["growing", "ring", "float16 ring", "short ring"])
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_step_that_is_stopped_anywhere_has_happened_or_has_not_and_not_if_in_its_attention(kind, seed):
    cache, rng = lived(kind, seed, (D, D))
    assert_one_of_two(cache, stepping(cache, rng, cache.max_chunk or 5), before_in=INSIDE)


@pytest.mark.parametrize("kind", ["ring", "float16 ring", "short ring"])
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_so_with_more_tokens_than_a_ring_takes_at_a_time(kind, seed):
    cache, rng = lived(kind, seed, (D, D))
    assert_one_of_two(cache, stepping(cache, rng, 9), before_in=INSIDE)


# ----------------------------------------------------------------------------------------------------------- move_rows


class Owner:
    state = "before"


def pairs(rng, rows=(3, 2), slots=(6, 4), dtype=np.float32):
    """Two pairs of arrays of so many rows and slots."""
    return [tuple(rng.standard_normal((n, HKV, length, width)).astype(dtype) for width in (D, DV))
            for n, length in zip(rows, slots, strict=True)]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_moves_are_made_one_after_the_other_and_then_the_attribute_is_set(dtype, rng):
    buffers, others = pairs(rng, dtype=dtype)
    wide = [np.repeat(x.swapaxes(1, 2), 2, axis=1).swapaxes(1, 2)[::-1, :, ::-2] for x in buffers]  # unit stride at the end only
    for own in (buffers, tuple(wide)):
        rows, more = [[x.copy() for x in pair] for pair in (own, others)]
        moves = [(0, 1, 3, 0, 2, 4), (2, 0, 0, 1, 1, 2), (4, 2, 2, 1, 1, 2), (1, 0, 0, 0, 1, 0), (1, 5, 4, 3, 1, 1)]
        for target, to, source, at, n, count in moves:
            for x, y in zip(rows, more, strict=True):
                for b in range(n):
                    t, u = (x[target + b], target) if target < 3 else (y[target - 3 + b], target)
                    s = x[source + b] if source < 3 else y[source - 3 + b]
                    assert u != source
                    t[:, to : to + count] = s[:, at : at + count]
        owner = Owner()
        _core.move_rows(own, others, moves, owner, "state", "after")
        assert owner.state == "after"
        for x, y in zip((*own, *others), (*rows, *more), strict=True):
            assert np.array_equal(x, y)


def test_moves_take_bfloat16_and_rows_of_zero_stride(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    buffers, others = pairs(rng, dtype=ml_dtypes.bfloat16)
    others = tuple(np.broadcast_to(x[:1, :1, :1], x.shape) for x in others)
    _core.move_rows(buffers, others, [(0, 0, 3, 0, 2, 4)], Owner(), "state", None)
    for x, y in zip(buffers, others, strict=True):
        assert np.array_equal(x[:2, :, :4], y)


FIRST = (0, 0, 3, 0, 1, 4)  # one that can be made
OUTSIDE = [
    (2, 0, 3, 0, 2, 4), (0, 3, 3, 0, 1, 4), (0, 0, 3, 1, 1, 4), (0, 0, 5, 0, 1, 1), (-1, 0, 3, 0, 1, 1), (0, -1, 3, 0, 1, 1),
    (0, 0, 4, 0, 2, 1), (0, 0, 3, 0, -1, 1), (0, 0, 3, 0, 1, -1), (0, 0, 3, -1, 1, 1), (0, 0, 2**62, 0, 2**62, 1),
]  # fmt: skip


@pytest.mark.parametrize("move", OUTSIDE)
def test_a_move_beyond_the_rows_or_slots_is_refused_before_any_is_made(move, rng):
    buffers, others = pairs(rng)
    before, owner = copy.deepcopy(buffers), Owner()
    with pytest.raises(ValueError, match=rf"^moves\[1\] must stay within the rows and slots, got {re.escape(str(move))}$"):
        _core.move_rows(buffers, others, [FIRST, move], owner, "state", "after")
    assert owner.state == "before"
    assert all(map(np.array_equal, buffers, before))


def test_what_else_cannot_be_moved_is_refused_before_anything_is(rng):
    buffers, others = pairs(rng)
    before, owner = copy.deepcopy(buffers), Owner()
    shown = r"others\[1\] must be like buffers\[1\], float32 \(3, 2, 6, 2\), but for rows and slots, got "
    read_only = tuple(x.copy() for x in others)
    for x in read_only:
        x.flags.writeable = False
    for wrong, moves, error, message in (
        ((others[0], others[1].astype(np.int32)), [FIRST], ValueError, shown + r"int32 \(2, 2, 4, 2\)"),
        ((others[0], others[1][..., :1]), [FIRST], ValueError, shown + r"float32 \(2, 2, 4, 1\)"),
        ((others[0], others[1][:, :1]), [FIRST], ValueError, shown + r"float32 \(2, 1, 4, 2\)"),
        (read_only, [FIRST, (3, 0, 0, 0, 1, 1)], ValueError, ".*read-only"),
        (others, [FIRST, (0, 0, 3)], ValueError, ".*unpack"),
        (others, [FIRST, (0, 0, 3, 0, 1, "1")], TypeError, ".*"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            _core.move_rows(buffers, wrong, moves, owner, "state", "after")
        assert owner.state == "before"
        assert all(map(np.array_equal, buffers, before))
    _core.move_rows(buffers, read_only, [FIRST], owner, "state", "after")
    assert np.array_equal(buffers[0][0, :, :4], others[0][0])
