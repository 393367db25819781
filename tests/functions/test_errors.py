"""Rules 10 and 11 for attention, its gradient and its plan: every message names the argument, what was expected, what came."""

import math
from fractions import Fraction

import numpy as np
import pytest
from support import draw, fails, layouts, repeated, same_bits, zeros

import fastmha

B, H, HKV, LQ, LK, D, DV = 2, 4, 2, 5, 6, 3, 7


def arrays(layout=None):
    """Good ones, in the layout if it is one."""
    layout = layout if layout in ("BHLD", "BLHD") else "BHLD"
    return draw(np.random.default_rng(0), B, H, HKV, LQ, LK, D, DV, np.float32, layout)


def attend(**changes):
    """attention of good arguments, some of them changed; `out` is given, so that we see whether it was written."""
    q, k, v, g = arrays(changes.get("layout"))
    arguments = {"q": q, "k": k, "v": v, "out": np.full(g.shape, 7, g.dtype)} | changes
    before = arguments["out"].copy() if isinstance(arguments["out"], np.ndarray) else None
    try:
        return fastmha.attention(**arguments)
    finally:
        if before is not None:
            assert same_bits(arguments["out"], before)  # nothing is written before everything is checked


def plan(**changes):
    q, k, v, _ = arrays(changes.get("layout"))
    return fastmha.plan(**({"q": q, "k": k, "v": v} | changes))


def backward(**changes):
    q, k, v, g = arrays(changes.get("layout"))
    good = {"grad_out": g, "q": q, "k": k, "v": v, "out": g, "lse": zeros(B, H, LQ)}
    return fastmha.attention_backward(**(good | changes))


# -------------------------------------------------------------------------- what attention, its backward and plan share

SHARED = {
    "q of three axes": (
        {"q": zeros(B, LQ, D)},
        ValueError,
        r"q must have 4 axes \(B, H, L, D\).*got shape \(2, 5, 3\)",
    ),
    "k of five axes": ({"k": zeros(1, B, HKV, LK, D)}, ValueError, r"k must have 4 axes.*\(1, 2, 2, 6, 3\)"),
    "v a number": ({"v": np.float32(3)}, ValueError, r"v must have 4 axes.*got shape \(\)"),
    "layout is told": (
        {"layout": "BLHD", "q": zeros(B, LQ, D)},
        ValueError,
        r'q must have 4 axes \(B, L, H, D\) for layout "BLHD"',
    ),
    "integers": (
        {"q": zeros(B, H, LQ, D, dtype=np.int64)},
        TypeError,
        r"q must be float32, float64, float16 or bfloat16.*got int64: cast it to float32, q\.astype\(np\.float32\)$",
    ),
    "booleans": ({"v": zeros(B, HKV, LK, DV, dtype=bool)}, TypeError, r"v must be float32, .* or bfloat16.*got bool"),
    "half precision": (
        {"k": zeros(B, HKV, LK, D, dtype=np.float16)},
        TypeError,
        r"v has dtype float32 but k has float16: they must share one dtype$",
    ),
    "complex": (
        {"k": zeros(B, HKV, LK, D, dtype=np.complex64)},
        TypeError,
        r"k must be float32, float64, float16 or bfloat16.*got complex64",
    ),
    "nothing": ({"q": None}, TypeError, r"q must be float32, float64, float16 or bfloat16.*got None"),
    "objects": ({"q": zeros(B, H, LQ, D, dtype=object)}, TypeError, r"q must be float32, .* or bfloat16.*got object"),
    "a list of integers": (
        {"q": [[[[1, 2, 3]]]]},
        TypeError,
        r"q must be float32.*got int64: cast it to float32, np\.asarray\(q, np\.float32\)$",
    ),
    "byte order": (
        {"q": zeros(B, H, LQ, D, dtype=np.dtype(np.float32).newbyteorder("S"))},
        TypeError,
        r"q must be float32, float64, float16 or bfloat16 \(native byte order\), got [<>]f4",
    ),
    "mixed k": (
        {"k": zeros(B, HKV, LK, D, dtype=np.float64)},
        TypeError,
        r"k has dtype float64 but q has float32: they must share one dtype",
    ),
    "mixed v": ({"v": zeros(B, HKV, LK, DV, dtype=np.float64)}, TypeError, r"v has dtype float64 but q has float32"),
    "batch of k": ({"k": zeros(3, HKV, LK, D)}, ValueError, r"k has batch size 3 on axis 0 but q has 2"),
    "batch of v": ({"v": zeros(1, HKV, LK, DV)}, ValueError, r"v has batch size 1 on axis 0 but q has 2"),
    "heads of k": (
        {"k": zeros(B, 3, LK, D), "v": zeros(B, 3, LK, DV)},
        ValueError,
        r'k has 3 heads on axis 1 of layout "BHLD" but q has 4: q\'s heads must be a multiple of k\'s',
    ),
    "more heads in k than in q": (
        {"k": zeros(B, 8, LK, D), "v": zeros(B, 8, LK, DV)},
        ValueError,
        r"k has 8 heads.*but q has 4: q's heads must be a multiple of k's$",
    ),
    "no heads in k": ({"k": zeros(B, 0, LK, D), "v": zeros(B, 0, LK, DV)}, ValueError, r"k has 0 heads.*but q has 4"),
    "heads of v": ({"v": zeros(B, H, LK, DV)}, ValueError, r'v has 4 heads on axis 1 of layout "BHLD" but k has 2'),
    "heads in the other layout": (
        {"layout": "BLHD", "v": zeros(B, LK, H, DV)},
        ValueError,
        r'v has 4 heads on axis 2 of layout "BLHD" but k has 2',
    ),
    "length of v": (
        {"v": zeros(B, HKV, LK + 1, DV)},
        ValueError,
        r'v has length 7 on axis 2 of layout "BHLD" but k has 6',
    ),
    "length in the other layout": (
        {"layout": "BLHD", "v": zeros(B, LK + 1, HKV, DV)},
        ValueError,
        r'v has length 7 on axis 1 of layout "BLHD" but k has 6',
    ),
    "width of k": ({"k": zeros(B, HKV, LK, D + 1)}, ValueError, r"k has width 4 on axis 3 but q has 3"),
    "layout unknown": ({"layout": "LBHD"}, ValueError, r"""layout must be "BHLD" or "BLHD", got 'LBHD'"""),
    "q and k in the other layout": (
        {"q": zeros(B, 3, 8, D), "k": zeros(B, 6, 8, D), "v": zeros(B, 6, 8, DV)},
        ValueError,
        r'k has 6 heads on axis 1 of layout "BHLD" but q has 3: .* multiple of k\'s: they would fit layout "BLHD"$',
    ),
    "q and k in the other of the layouts": (
        {"layout": "BLHD", "q": zeros(B, 4, 3, D), "k": zeros(B, 2, 6, D), "v": zeros(B, 2, 6, DV)},
        ValueError,
        r'k has 6 heads on axis 2 of layout "BLHD" but q has 3: .* they would fit layout "BHLD"$',
    ),
    "layout a list": ({"layout": ["BHLD"]}, ValueError, r"""layout must be "BHLD" or "BLHD", got \['BHLD'\]"""),
    "layout an array": ({"layout": np.array(["BHLD"])}, ValueError, r'layout must be "BHLD" or "BLHD", got array'),
    "layout not a name": ({"layout": None}, ValueError, r'layout must be "BHLD" or "BLHD", got None'),
    "algorithm unknown": ({"algorithm": "magic"}, ValueError, r"""algorithm must be "auto".*"blas".*got 'magic'"""),
    "algorithm not a name": ({"algorithm": 3}, ValueError, r"algorithm must be .*got 3"),
    "algorithm a list": ({"algorithm": ["tiled"]}, ValueError, r"algorithm must be .*got \['tiled'\]"),
    "algorithm an array": ({"algorithm": np.array("tiled")}, ValueError, r"algorithm must be .*got array"),
    "algorithm a set": ({"algorithm": {"tiled"}}, ValueError, r"algorithm must be .*got \{'tiled'\}"),
    # masks
    "mask of one axis": (
        {"mask": zeros(LK, dtype=bool)},
        ValueError,
        r"mask must have 2 axes \(Lq, Lk\) or 4.*got shape \(6,\)",
    ),
    "mask of three axes": (
        {"mask": zeros(B, LQ, LK, dtype=bool)},
        ValueError,
        r"got shape \(2, 5, 6\): index.*\(B, Lk\) as mask\[:, None, None, :\].*\(B, Lq, Lk\) as mask\[:, None\]",
    ),
    "mask of another shape": (
        {"mask": zeros(LQ, LK + 1, dtype=bool)},
        ValueError,
        r"mask of shape \(5, 7\) does not broadcast to \(Lq, Lk\) = \(5, 6\)",
    ),
    "mask of four axes": (
        {"mask": zeros(B, 3, 1, LK, dtype=bool)},
        ValueError,
        r"mask of shape \(2, 3, 1, 6\) does not broadcast to \(B, H, Lq, Lk\) = \(2, 4, 5, 6\)",
    ),
    "mask per key/value head": (
        {"mask": zeros(B, HKV, LQ, LK, dtype=bool)},
        ValueError,
        r"mask of shape \(2, 2, 5, 6\) does not",
    ),
    "a padding mask": (
        {"mask": zeros(B, LK, dtype=bool)},
        ValueError,
        r"mask of shape \(2, 6\) does not.*index a padding mask \(B, Lk\) as mask\[:, None, None, :\]",
    ),
    "mask of integers": (
        {"mask": zeros(LQ, LK, dtype=np.int8)},
        TypeError,
        r"mask must be bool \(True = may not attend\) or float32 like q.*got int8",
    ),
    "mask of another float": (
        {"mask": zeros(LQ, LK, dtype=np.float64)},
        TypeError,
        r"mask must be bool.*or float32.*got float64",
    ),
    "mask of another byte order": (
        {"mask": zeros(LQ, LK, dtype=np.dtype(np.float32).newbyteorder("S"))},
        TypeError,
        r"mask must be bool.*or float32.*got [<>]f4",
    ),
    # causal, window, offset
    "is_causal a number": ({"is_causal": 1}, TypeError, r"is_causal must be True or False, got 1"),
    "is_causal an array": ({"is_causal": np.array([True])}, TypeError, r"is_causal must be True or False, got array"),
    "offset for nothing": ({"offset": 2}, ValueError, r"offset is given \(2\) but none of is_causal, window and alibi"),
    "offset missing": (
        {"is_causal": True},
        ValueError,
        r"offset must be given.*q has length 5 and k has length 6: 0 lets.*Lk - Lq = 1 lets",
    ),
    "offset missing for a window": (
        {"window": (1, 1)},
        ValueError,
        r"offset must be given with is_causal, window or alibi.*Lk - Lq = 1",
    ),
    "offset of another length": (
        {"is_causal": True, "offset": [1, 2, 3]},
        ValueError,
        r"offset must be.*\(B,\) = \(2,\).*shape \(3,\)",
    ),
    "offset of two axes": (
        {"is_causal": True, "offset": [[1], [2]]},
        ValueError,
        r"offset must be.*\(B,\).*got shape \(2, 1\)",
    ),
    "offset a float": (
        {"is_causal": True, "offset": 1.0},
        TypeError,
        r"offset must be an int or a \(B,\) array of ints, got 1\.0",
    ),
    "offset a truth value": ({"is_causal": True, "offset": True}, TypeError, r"offset must be an int.*got True"),
    "offset too large": (
        {"is_causal": True, "offset": 2**61 + 1},
        ValueError,
        r"offset must lie within \+-2\*\*61, got 2305843009213693953",
    ),
    "offset beyond 64 bits": (
        {"is_causal": True, "offset": 2**70},
        ValueError,
        r"offset must lie within \+-2\*\*61, got 1180591620717411303424",
    ),
    "offset of 5000 digits": (
        {"is_causal": True, "offset": 10**5000},
        ValueError,
        r"offset must lie within \+-2\*\*61, got an integer of 16610 bits",
    ),
    "offsets beyond 64 bits": (
        {"is_causal": True, "offset": [0, 2**70]},
        ValueError,
        r"offset must lie within \+-2\*\*61, got \[0, 1180591620717411303424\]",
    ),
    "offsets that int64 does not hold beside each other": (
        {"is_causal": True, "offset": [2**63, -1]},
        ValueError,
        r"offset must lie within \+-2\*\*61, got \[9223372036854775808, -1\]",
    ),
    "offset unsigned and no int64": (
        {"is_causal": True, "offset": np.array([2**63, 0], np.uint64)},
        ValueError,
        r"offset must lie within \+-2\*\*61, got array\(\[9223372036854775808, +0\]",
    ),
    "offsets of which one is none": (
        {"is_causal": True, "offset": [0, None]},
        TypeError,
        r"offset must be an int or a \(B,\) array of ints, got \[0, None\]",
    ),
    "offset too small": ({"is_causal": True, "offset": np.array([0, -(2**62)])}, ValueError, r"offset must lie within"),
    "offset unsigned and too large": (
        {"is_causal": True, "offset": np.array([0, 2**64 - 1], np.uint64)},
        ValueError,
        r"offset must lie within",
    ),
    "window one number": (
        {"window": 3, "offset": 0},
        TypeError,
        r"window must be None or a pair \(left, right\).*got 3",
    ),
    "window of three": (
        {"window": (1, 2, 3), "offset": 0},
        TypeError,
        r"window must be None or a pair.*got \(1, 2, 3\)",
    ),
    "window a float": ({"window": 3.0, "offset": 0}, TypeError, r"window must be None or a pair.*got 3\.0"),
    "window an array": ({"window": np.array([1, 2]), "offset": 0}, TypeError, r"window must be None or a pair.*got array"),
    "window of huge negative": (
        {"window": (0, -(10**5000)), "offset": 0},
        ValueError,
        r"window\[1\] \(right\) must be at least 0, got an integer of 16610 bits: None leaves",
    ),
    "window negative to the left": (
        {"window": (-1, 0), "offset": 0},
        ValueError,
        r"window\[0\] \(left\) must be at least 0, got -1: None leaves a side unbounded$",
    ),
    "window negative to the right": (
        {"window": (0, -2), "offset": 0},
        ValueError,
        r"window\[1\] \(right\) must be at least 0, got -2",
    ),
    "window of floats": (
        {"window": (1.0, None), "offset": 0},
        TypeError,
        r"window\[0\] \(left\) must be an integer, got 1\.0",
    ),
    "window of truth values": (
        {"window": (1, True), "offset": 0},
        TypeError,
        r"window\[1\] \(right\) must be an integer, got True",
    ),
    # padding lengths
    "lengths negative": (
        {"key_padding_lengths": [3, -1]},
        ValueError,
        r"key_padding_lengths must lie in \[0, Lk\] = \[0, 6\], got -1 at index 1",
    ),
    "lengths too long": (
        {"key_padding_lengths": [7, 1]},
        ValueError,
        r"key_padding_lengths must lie in.*got 7 at index 0",
    ),
    "lengths unsigned and too long": (
        {"key_padding_lengths": np.array([1, 2**64 - 1], np.uint64)},
        ValueError,
        r"key_padding_lengths must lie in.*got 18446744073709551615 at index 1",
    ),
    "lengths beyond 64 bits": (
        {"key_padding_lengths": [1, 2**70]},
        ValueError,
        r"key_padding_lengths must lie in \[0, Lk\] = \[0, 6\], got 1180591620717411303424 at index 1",
    ),
    "lengths floats": (
        {"key_padding_lengths": [1.0, 2.0]},
        TypeError,
        r"key_padding_lengths must be integers, got dtype float64",
    ),
    "lengths truth values": (
        {"key_padding_lengths": [True, False]},
        TypeError,
        r"key_padding_lengths must be integers, got dtype bool",
    ),
    "lengths a mask": (
        {"key_padding_lengths": zeros(B, LK, dtype=int)},
        ValueError,
        r"key_padding_lengths must have shape \(B,\) = \(2,\), got \(2, 6\)",
    ),
    "lengths one number": (
        {"key_padding_lengths": 3},
        ValueError,
        r"key_padding_lengths must have shape \(B,\) = \(2,\), got \(\)",
    ),
    # key ranges
    "ranges no pair": (
        {"key_ranges": [1, 2, 3]},
        TypeError,
        r"^key_ranges must be None or a pair \(starts, ends\), each a \(B,\) array of ints, an int or None, got \[1, 2, 3\]$",
    ),
    "ranges one array": (
        {"key_ranges": zeros(2, B, dtype=int)},
        TypeError,
        r"key_ranges must be None or a pair \(starts, ends\), each .*, got array\(",
    ),
    "ranges crossed": (
        {"key_ranges": ([0, 4], [6, 3])},
        ValueError,
        r"^key_ranges must have no start beyond its end, got 4 and 3 at index 1$",
    ),
    "ranges crossed, of numbers": (
        {"key_ranges": (2, 1)},
        ValueError,
        r"key_ranges must have no start beyond its end, got 2 and 1 at index 0",
    ),
    "starts beyond the keys": (
        {"key_ranges": ([0, 7], None)},
        ValueError,
        r"^key_ranges\[0\] \(starts\) must lie in \[0, Lk\] = \[0, 6\], got 7 at index 1$",
    ),
    "ends negative": (
        {"key_ranges": (None, [-1, 3])},
        ValueError,
        r"key_ranges\[1\] \(ends\) must lie in \[0, Lk\] = \[0, 6\], got -1 at index 0",
    ),
    "starts beyond 64 bits": (
        {"key_ranges": ([0, 2**70], None)},
        ValueError,
        r"key_ranges\[0\] \(starts\) must lie in \[0, Lk\] = \[0, 6\], got 1180591620717411303424 at index 1",
    ),
    "one start beyond the keys": (
        {"key_ranges": (7, None)},
        ValueError,
        r"^key_ranges\[0\] \(starts\) must be at most 6 = Lk, got 7$",
    ),
    "one end negative": (
        {"key_ranges": (None, np.int64(-1))},
        ValueError,
        r"^key_ranges\[1\] \(ends\) must be at least 0, got -1$",
    ),
    "one start a truth value": (
        {"key_ranges": (True, None)},
        TypeError,
        r"^key_ranges\[0\] \(starts\) must be an integer, got True$",
    ),
    "one end a float": (
        {"key_ranges": (None, 3.0)},
        TypeError,
        r"^key_ranges\[1\] \(ends\) must be integers, got dtype float64$",
    ),
    "starts floats": (
        {"key_ranges": ([1.0, 2.0], None)},
        TypeError,
        r"key_ranges\[0\] \(starts\) must be integers, got dtype float64",
    ),
    "starts of another batch": (
        {"key_ranges": ([1, 2, 3], None)},
        ValueError,
        r"key_ranges\[0\] \(starts\) must have shape \(B,\) = \(2,\), got \(3,\)",
    ),
    # numbers
    "scale NaN": ({"scale": math.nan}, ValueError, r"scale must be a finite number or None, got nan"),
    "scale infinite": ({"scale": np.float32(np.inf)}, ValueError, r"scale must be a finite number or None, got .*inf"),
    "scale a name": ({"scale": "auto"}, TypeError, r"scale must be a finite number or None, got 'auto'"),
    "scale an array": ({"scale": np.ones(2)}, TypeError, r"scale must be a finite number or None, got array"),
    "scale a truth value": ({"scale": True}, TypeError, r"scale must be a finite number or None, got True"),
    "scale complex": ({"scale": 1j}, TypeError, r"scale must be a finite number or None, got 1j"),
    "scale beyond floats": ({"scale": 10**400}, ValueError, r"scale must be a finite number.*which is beyond float32"),
    "scale beyond float32": ({"scale": 1e39}, ValueError, r"scale must be .*None, got 1e\+39, which is beyond float32"),
    "softcap zero": ({"softcap": 0}, ValueError, r"softcap must be a finite number > 0 or None, got 0"),
    "softcap negative": ({"softcap": -1.5}, ValueError, r"softcap must be a finite number > 0 or None, got -1.5"),
    "softcap NaN": ({"softcap": math.nan}, ValueError, r"softcap must be a finite number > 0 or None, got nan"),
    "softcap a name": ({"softcap": "1"}, TypeError, r"softcap must be a finite number > 0 or None, got '1'"),
    "softcap infinite": ({"softcap": math.inf}, ValueError, r"softcap must be a finite number > 0 or None, got inf"),
    "softcap a truth value": ({"softcap": True}, TypeError, r"softcap must be a finite number > 0 or None, got True"),
    "softcap minus what floats do not hold": ({"softcap": -(10**400)}, ValueError, r"softcap must be a finite number > 0"),
    # sinks, alibi, dropout; q has 4 heads
    "sinks per key/value head": (
        {"sinks": zeros(HKV)},
        ValueError,
        r"^sinks must have shape \(H,\) = \(4,\), one for each query head, got \(2,\)$",
    ),
    "sinks one number": ({"sinks": np.float32(1)}, ValueError, r"^sinks must have shape \(H,\) = \(4,\).*, got \(\)$"),
    "sinks of two axes": ({"sinks": zeros(1, H)}, ValueError, r"^sinks must have shape \(H,\) = \(4,\).*, got \(1, 4\)$"),
    "sinks of another float": (
        {"sinks": zeros(H, dtype=np.float64)},
        TypeError,
        r"^sinks has dtype float64 but q has float32: they must share one dtype$",
    ),
    "sinks of integers": (
        {"sinks": [0, 0, 0, 0]},
        TypeError,
        r"^sinks must be float32, .* or bfloat16.*got int64: cast it to float32, np\.asarray\(sinks, np\.float32\)$",
    ),
    "sinks a name": ({"sinks": "learned"}, TypeError, r"^sinks must be float32, float64, float16 or bfloat16 .*got <U7"),
    "sinks masked": ({"sinks": np.ma.ones(H, np.float32)}, TypeError, r"^sinks is a masked array, whose mask would be lost"),
    "alibi per key/value head": (
        {"alibi": zeros(HKV), "offset": 0},
        ValueError,
        r"^alibi must have shape \(H,\) = \(4,\), one for each query head, got \(2,\)$",
    ),
    "alibi a mask": (
        {"alibi": zeros(1, H, LQ, LK), "offset": 0},
        ValueError,
        r"^alibi must have shape \(H,\) = \(4,\), .*, got \(1, 4, 5, 6\)$",
    ),
    "alibi of another float": (
        {"alibi": zeros(H, dtype=np.float64), "offset": 0},
        TypeError,
        r"^alibi has dtype float64 but q has float32: they must share one dtype$",
    ),
    "alibi a truth value": ({"alibi": True, "offset": 0}, TypeError, r"^alibi must be float32, .* or bfloat16 .*got bool"),
    "offset missing for alibi": (
        {"alibi": zeros(H)},
        ValueError,
        r"^offset must be given with is_causal, window or alibi where q has length 5 and k has length 6: .*Lk - Lq = 1 lets",
    ),
    "dropout one": ({"dropout": 1, "seed": 0}, ValueError, r"^dropout must be a number in \[0, 1\), got 1$"),
    "dropout that is one as a double": (
        {"dropout": Fraction(10**30 - 1, 10**30), "seed": 0},
        ValueError,
        r"^dropout must be a number in \[0, 1\), got Fraction\(",
    ),
    "dropout negative": ({"dropout": -0.1, "seed": 0}, ValueError, r"^dropout must be a number in \[0, 1\), got -0\.1$"),
    "dropout in percent": ({"dropout": 10, "seed": 0}, ValueError, r"^dropout must be a number in \[0, 1\), got 10$"),
    "dropout NaN": ({"dropout": math.nan, "seed": 0}, ValueError, r"^dropout must be a number in \[0, 1\), got nan$"),
    "dropout infinite": ({"dropout": math.inf, "seed": 0}, ValueError, r"^dropout must be a number in \[0, 1\), got inf$"),
    "dropout a truth value": ({"dropout": True, "seed": 0}, TypeError, r"^dropout must be a number in \[0, 1\), got True$"),
    "dropout false": ({"dropout": False, "seed": 0}, TypeError, r"^dropout must be a number in \[0, 1\), got False$"),
    "dropout a name": ({"dropout": "0.1", "seed": 0}, TypeError, r"^dropout must be a number in \[0, 1\), got '0\.1'$"),
    "dropout nothing": ({"dropout": None}, TypeError, r"^dropout must be a number in \[0, 1\), got None$"),
    "dropout an array": ({"dropout": np.zeros(2), "seed": 0}, TypeError, r"^dropout must be a number in \[0, 1\), got array"),
    "seed missing": (
        {"dropout": 0.1},
        ValueError,
        r"^seed must be given with dropout, an int from 0 to 2\*\*64 - 1, .*; got dropout 0\.1 and no seed$",
    ),
    "seed negative": ({"dropout": 0.1, "seed": -1}, ValueError, r"^seed must be at least 0, got -1$"),
    "seed of 65 bits": ({"dropout": 0.1, "seed": 2**64}, ValueError, r"^seed must be below 2\*\*64, got 18446744073709551616$"),
    "seed a float": ({"dropout": 0.1, "seed": 1.0}, TypeError, r"^seed must be an integer, got 1\.0$"),
    "seed a truth value": ({"dropout": 0.1, "seed": True}, TypeError, r"^seed must be an integer, got True$"),
    "seed a generator": ({"dropout": 0.1, "seed": np.random.default_rng(0)}, TypeError, r"^seed must be an integer, got Gene"),
    "seed for nothing": ({"seed": "x"}, TypeError, r"^seed must be an integer, got 'x'$"),
    "threads none": ({"num_threads": 0}, ValueError, r"num_threads must be at least 1, got 0"),
    "threads negative": ({"num_threads": -2}, ValueError, r"num_threads must be at least 1, got -2"),
    "threads a float": ({"num_threads": 2.0}, TypeError, r"num_threads must be an integer, got 2\.0"),
    "threads a truth value": ({"num_threads": True}, TypeError, r"num_threads must be an integer, got True"),
    # sizes beyond BLAS: broadcast views of one number; nothing of their size may be allocated to find out
    "length of q beyond BLAS": (
        {"q": repeated(B, H, 2**31, D)},
        ValueError,
        r"q has length 2147483648.*at most 21474835\d\d",
    ),
    "length of k beyond BLAS": (
        {"k": repeated(B, HKV, 2**31, D), "v": repeated(B, HKV, 2**31, DV)},
        ValueError,
        r"k has length 2147483648.*at most",
    ),
    "width of q beyond BLAS": (
        {"q": repeated(B, H, LQ, 2**45), "k": repeated(B, HKV, LK, 2**45)},
        ValueError,
        r"q has width 35184372088832.*at most",
    ),
    "width of v beyond BLAS": ({"v": repeated(B, HKV, LK, 2**45)}, ValueError, r"v has width 35184372088832.*at most"),
}


@pytest.mark.parametrize("call", [attend, plan, backward])
@pytest.mark.parametrize("name", SHARED)
def test_messages_that_attention_its_plan_and_its_gradient_share(call, name):
    changes, kind, message = SHARED[name]
    if name == "length of q beyond BLAS":
        changes = {**changes, "is_causal": True, "offset": 0}  # nor may the plan count pairs row by row
    fails(lambda: call(**changes), kind, message)


BIAS_GRADIENT = {
    "no mask": ({}, ValueError, r"^need_bias_grad needs a mask of float32, which is added to the scores, got no mask$"),
    "a mask of bool": (
        {"mask": zeros(LQ, LK, dtype=bool)},
        ValueError,
        r"^need_bias_grad needs a mask of float32, which is added to the scores, got one of bool$",
    ),
    "a number": ({"mask": zeros(LQ, LK), "need_bias_grad": 1}, TypeError, r"^need_bias_grad must be True or False, got 1$"),
    "a name": ({"need_bias_grad": "mask"}, TypeError, r"^need_bias_grad must be True or False, got 'mask'$"),
}


@pytest.mark.parametrize("name", BIAS_GRADIENT)
def test_a_gradient_of_a_mask_needs_one_of_floats(name):
    changes, kind, message = BIAS_GRADIENT[name]
    fails(lambda: backward(**{"need_bias_grad": True, **changes}), kind, message)


FOREIGN = {
    "dropout_p": "dropout_p: it is dropout here, with a seed",
    "attention_dropout": "attention_dropout: it is dropout here, with a seed",
    "alibi_slopes": "alibi_slopes: it is alibi here, one slope for each query head",
    "s_aux": "s_aux: it is sinks here, one for each query head",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("call", [attend, plan, backward])
def test_keywords_of_other_libraries_are_told_their_names_here(call, name):
    fails(lambda: call(**{name: 0.0}), TypeError, rf"has no keyword {FOREIGN[name]}$")


def test_out_may_overlap_neither_sinks_nor_slopes():
    memory = np.zeros(B * H * LQ * DV, np.float32)
    out = memory.reshape(B, H, LQ, DV)
    part = memory[3 : 3 + H]
    fails(lambda: attend(out=out, sinks=part), ValueError, r"out overlaps sinks in memory")
    fails(lambda: attend(out=out, alibi=part, offset=0), ValueError, r"out overlaps alibi in memory")


def test_the_good_arguments_are_good():
    q, k, v, g = arrays()
    out, lse = fastmha.attention(q, k, v, return_lse=True)
    assert plan().algorithm
    assert backward(out=out, lse=lse)[0].shape == q.shape
    assert np.isfinite(fastmha.attention(q, k, v, out=g)).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "key_padding_lengths", "offset", "sinks", "alibi"])
def test_ragged_lists_are_named(name):
    fails(lambda: attend(**{"is_causal": name == "offset", name: [[1], [1, 2]]}), ValueError, rf"\b{name}\b")


def test_offset_is_counted_from_zero_only_where_lengths_agree():
    q, k, v, _ = draw(np.random.default_rng(0), Lq=4, Lk=4)
    fastmha.attention(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match="offset must be given"):
        fastmha.attention(q[:, :, :3], k, v, is_causal=True)


def test_a_plan_needs_a_true_or_false_backward():
    fails(lambda: plan(backward=1), TypeError, r"backward must be True or False, got 1")


@pytest.mark.parametrize("call", [attend, plan])
@pytest.mark.parametrize("value", ["no", 0, 1, None, [], np.array([True])], ids=repr)
def test_return_lse_is_true_or_false(call, value):
    fails(lambda: call(return_lse=value), TypeError, r"return_lse must be True or False, got ")


def test_numpys_truth_values_are_some():
    q, k, v, _ = arrays()
    assert isinstance(fastmha.attention(q, k, v, return_lse=np.True_), tuple)
    assert isinstance(fastmha.attention(q, k, v, return_lse=np.False_), np.ndarray)


# ----------------------------------------------------------------------------------------------------------------- out=


@layouts
def test_out_of_the_wrong_shape(layout):
    other = "BLHD" if layout == "BHLD" else "BHLD"
    fails(
        lambda: attend(layout=layout, out=np.full(arrays(other)[3].shape, 7, np.float32)),
        ValueError,
        r"out must have shape \(2, [45], [45], 7\), got \(2, [45], [45], 7\)",
    )


OUT = {
    "not an array": (lambda: [1.0], TypeError, r"out must be a NumPy array, got list"),
    "of another dtype": (lambda: np.full((B, H, LQ, DV), 7.0), TypeError, r"out has dtype float64 but q has float32"),
    "of another width": (
        lambda: np.full((B, H, LQ, D), 7, np.float32),
        ValueError,
        r"out must have shape \(2, 4, 5, 7\), got \(2, 4, 5, 3\)",
    ),
    "repeated": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(LQ * DV, np.float32), (B, H, LQ, DV), (0, 0, 4 * DV, 4)),
        ValueError,
        r"out overlaps itself",
    ),
    "with rows that overlap": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(4000, np.float32), (B, H, LQ, DV), (800, 200, 20, 4)),
        ValueError,
        r"out overlaps itself",
    ),
    "with elements that overlap": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(4000, np.float32), (B, H, LQ, DV), (800, 200, 20, 2)),
        ValueError,
        r"out overlaps itself",
    ),
}


@pytest.mark.parametrize("name", OUT)
def test_out_that_cannot_be_written(name):
    make, kind, message = OUT[name]
    fails(lambda: attend(out=make()), kind, message)


def test_out_that_is_read_only():
    out = np.full((B, H, LQ, DV), 7, np.float32)
    out.flags.writeable = False
    fails(lambda: attend(out=out), ValueError, r"out must be writable, got a read-only array")


@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_out_that_overlaps_an_input(name):
    x = np.ones((2, 2, 4, 4), np.float32)
    inputs = {"q": x.copy(), "k": x.copy(), "v": x.copy(), "mask": x.copy()}
    before = {key: value.copy() for key, value in inputs.items()}
    fails(lambda: fastmha.attention(**inputs, out=inputs[name]), ValueError, rf"out overlaps {name} in memory")
    buffer = np.ones((2, 2, 4, 5), np.float32)
    inputs[name] = buffer[..., 1:]
    fails(lambda: fastmha.attention(**inputs, out=buffer[..., :-1]), ValueError, rf"out overlaps {name} in memory")
    inputs[name] = before[name]
    assert (buffer == 1).all()
    assert all(same_bits(inputs[key], before[key]) for key in inputs)


def test_out_that_overlaps_an_input_given_as_another_kind_of_buffer():
    x = np.ones((2, 2, 4, 4), np.float32)
    fails(lambda: fastmha.attention(memoryview(x), x.copy(), x.copy(), out=x), ValueError, r"out overlaps q in memory")


def test_out_that_overlaps_offsets_or_lengths():
    buffer = np.zeros(2 * 4 * 4, np.float64)
    x, out = np.ones((2, 1, 4, 4)), buffer.reshape(2, 1, 4, 4)
    fails(
        lambda: fastmha.attention(x, x, x, key_padding_lengths=buffer[:2].view(np.int64), out=out),
        ValueError,
        r"out overlaps key_padding_lengths in memory",
    )
    fails(
        lambda: fastmha.attention(x, x, x, key_ranges=(buffer[:2].view(np.int64), 3), out=out),
        ValueError,
        r"out overlaps key_ranges\[0\] \(starts\) in memory",
    )


# ------------------------------------------------------------------------------------------------------------- backward

BACKWARD = {
    "gradient of three axes": (
        {"grad_out": zeros(B, LQ, DV)},
        ValueError,
        r"grad_out must have shape \(2, 4, 5, 7\).*got \(2, 5, 7\)",
    ),
    "gradient in the other layout": (
        {"grad_out": zeros(B, LQ, H, DV)},
        ValueError,
        r'grad_out must have shape \(2, 4, 5, 7\) for layout "BHLD", got \(2, 5, 4, 7\)',
    ),
    "gradient of integers": (
        {"grad_out": zeros(B, H, LQ, DV, dtype=int)},
        TypeError,
        r"grad_out must be float32 or float64.*int64",
    ),
    "lse of four axes": (
        {"lse": zeros(B, H, LQ, 1)},
        ValueError,
        r"lse must have shape \(2, 4, 5\).*got \(2, 4, 5, 1\)",
    ),
    "lse by rows": ({"lse": zeros(B, LQ, H)}, ValueError, r"lse must have shape \(2, 4, 5\).*got \(2, 5, 4\)"),
    "no gradient": ({"grad_out": None}, TypeError, r"grad_out must be float32 or float64.*got None$"),
    "lse of objects": (
        {"lse": zeros(B, H, LQ, dtype=object)},
        TypeError,
        r"lse must be float32 or float64.*got object: attention\(\.\.\., return_lse=True\) returns it$",
    ),
    **{
        case: ({name: zeros(B, H, LQ, D)}, ValueError, rf"{name} must have shape \(2, 4, 5, 7\).*got \(2, 4, 5, 3\)")
        for case, name in (("gradient of q's width", "grad_out"), ("out of another shape", "out"))
    },
    **{
        f"{word} of another dtype": (
            {name: zeros(*shape, dtype=np.float64)}, TypeError, rf"{name} has dtype float64 but q has float32",
        )
        for word, name, shape in (
            ("gradient", "grad_out", (B, H, LQ, DV)), ("out", "out", (B, H, LQ, DV)), ("lse", "lse", (B, H, LQ)),
        )
    },
    **{
        f"no {name}": (
            {name: None},
            TypeError,
            rf"{name} must be float32 or float64.*got None: attention\(\.\.\., return_lse=True\) returns it$",
        )
        for name in ("lse", "out")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
def test_messages_of_the_backward_pass(name):
    changes, kind, message = BACKWARD[name]
    fails(lambda: backward(**changes), kind, message)
