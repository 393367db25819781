"""All rules of a call crossed at random: every algorithm forward with every one backward, against the float64 reference.

Lengths lie around the edges of blocks (64 rows), tiles (192 keys) and runs (768 keys). The bits must not depend on the threads.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    DTYPES,
    HALVES,
    ISAS,
    LAYOUTS,
    NAMED,
    assert_close,
    assert_same,
    crossed_oracle,
    draw,
    oracle,
    results_of,
    selected,
)

import fastmha

LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([1, 2, 63, 64, 65, 191, 192, 193, 200]))
KEYS = st.one_of(LENGTHS, st.sampled_from([767, 769, 1000, 1540]))
WIDTHS = st.sampled_from([1, 3, 5, 8, 16, 17])
HEADS = st.sampled_from([(1, 1), (2, 1), (6, 2), (3, 3)])
SHAPES = ("Lq Lk", "1 1 Lq Lk", "B 1 1 Lk", "1 H Lq Lk", "B H Lq Lk", "1 H 1 1", "1 1 Lq 1", "B 1 Lq 1", "1 1 1 1", "view")
MASKS = st.one_of(st.none(), st.tuples(st.sampled_from(["bool", "additive", "additive", "additive"]), st.sampled_from(SHAPES)))


def mask_of(rng, kind, shape, sizes, dtype):
    """A mask that removes some pairs, of float or bool."""
    one = [1 if name == "1" else sizes[name] for name in ("B 1 1 Lk" if shape == "view" else shape).split()]
    gone = rng.random(one) < 0.3
    gone.flat[0] = False    # masks that remove everything warn
    mask = gone if kind == "bool" else np.where(gone, -np.inf, rng.standard_normal(one)).astype(dtype)
    return np.broadcast_to(mask, [sizes[name] for name in ("B", "H", "Lq", "Lk")]) if shape == "view" else mask


def rules_of(rng, names, mask, sizes, dtype):
    """Arguments of a call: those that are named."""
    B, H, Lq, Lk = sizes.values()
    low = rng.integers(0, Lk + 1, B)
    every = {
        "sinks": lambda: {"sinks": np.where(rng.random(H) < 0.2, -np.inf, rng.normal(0, 3, H)).astype(dtype)},
        "alibi": lambda: {"alibi": (rng.choice([1.0, 0.0, -0.5, 1.0], H) * 2.0 ** -rng.integers(0, 8, H)).astype(dtype)},
        "dropout": lambda: {"dropout": rng.choice([0.1, 0.5, 0.9, 1e-9, 0.999]), "seed": int(rng.integers(2**63)) * 2 + 1},
        "is_causal": lambda: {"is_causal": True},
        "window": lambda: {"window": [(0, 0), (5, None), (None, 3), (70, 64), (9, 2)][rng.integers(5)]},
        "key_padding_lengths": lambda: {"key_padding_lengths": rng.integers(0, Lk + 1, B)},
        "key_ranges": lambda: {"key_ranges": (low, np.maximum(low, rng.integers(0, Lk + 1, B)))},
        "softcap": lambda: {"softcap": 2.0},
        "scale": lambda: {"scale": rng.choice([-0.3, 0.7, 0.0])},
    }
    rules = {key: value for name in every if name in names for key, value in every[name]().items()}
    if {"is_causal", "window", "alibi"} & rules.keys() and (Lq != Lk or "offset" in names):
        rules["offset"] = rng.integers(-Lq, Lk + 1, B) if B > 1 else int(rng.integers(-5, Lk + 1))
    if mask is not None:
        rules["mask"] = mask_of(rng, *mask, sizes, dtype)
        if mask[0] == "additive" and "need_bias_grad" in names:
            rules["need_bias_grad"] = True
    return rules


NAMES = (
    "sinks", "alibi", "dropout", "is_causal", "window", "offset", "key_padding_lengths", "key_ranges", "softcap", "scale",
    "need_bias_grad",
)  # fmt: skip
ANY = st.tuples(*(st.booleans() for _ in NAMES)).map(lambda chosen: {name for name, there in zip(NAMES, chosen) if there})


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 3), HEADS, LENGTHS, KEYS, WIDTHS, WIDTHS, ANY, MASKS,
    st.sampled_from((*DTYPES, *HALVES)), st.sampled_from(LAYOUTS), st.sampled_from(ISAS),
)  # fmt: skip
def test_every_rule_with_every_other_in_every_pair_of_algorithms(seed, B, heads, Lq, Lk, D, Dv, names, mask, dtype, layout, isa):
    rng = np.random.default_rng(seed)
    arrays = q, k, v, g = draw(rng, B, *heads, Lq, Lk, D, Dv, dtype, layout)
    keywords = {"layout": layout, **rules_of(rng, names, mask, {"B": B, "H": heads[0], "Lq": Lq, "Lk": Lk}, dtype)}
    forward = {name: given for name, given in keywords.items() if name != "need_bias_grad"}
    (exact, bounds), (_, further) = (of(*arrays, dtype, **keywords) for of in (oracle, crossed_oracle))
    expected = results_of(keywords)
    few = Lq * heads[0] // heads[1] <= 64
    with selected(isa):
        for first in [*NAMED, "decode"] if few else NAMED:
            out, lse = fastmha.attention(q, k, v, algorithm=first, return_lse=True, **forward)
            assert_close((out, lse), exact, bounds)
            for threads in (1, 2, 5):
                again = fastmha.attention(q, k, v, algorithm=first, return_lse=True, num_threads=threads, **forward)
                assert_same((out, lse), again)
            for second in NAMED:
                grads = fastmha.attention_backward(g, q, k, v, out, lse, algorithm=second, **keywords)
                assert len(grads) == len(expected) - 2
                assert_close(grads, exact[2:], (bounds if first == second else further)[2:], expected[2:])
                for threads in (1, 2, 5):
                    again = fastmha.attention_backward(g, q, k, v, out, lse, algorithm=second, num_threads=threads, **keywords)
                    assert_same(grads, again)
