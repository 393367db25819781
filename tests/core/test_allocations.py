"""Memory that is not to be had: the core's own allocations, each made to fail once, which the checked build does on demand."""

import re
from pathlib import Path

import numpy as np
import pytest
from support import same_bits

import fastmha
from fastmha import _core

pytestmark = pytest.mark.every_case     # what runs in the checked build alone

CHECKED = _core.fail_allocation(-1)
checked = pytest.mark.skipif(not CHECKED, reason="allocations fail on demand in the checked build alone")
rng = np.random.default_rng(0)
q, k, v, g = rng.standard_normal((4, 2, 2, 70, 12))
bad = v.copy()
bad[0, 0, 3] = np.nan                                   # the firewall's path
few = q[:, :, :2]
tiny = v * 1e-312
X = rng.standard_normal((2, 9, 16))
module = fastmha.MultiHeadAttention(16, 2, dtype=np.float64, rng=0)
out, lse = fastmha.attention(q, k, v, return_lse=True)
tokens = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (g, q, k, v, bad)]     # (70, 2, 12)
lengths = [9, 0, 60, 1]
packed_out, packed_lse = fastmha.attention_packed(*tokens[1:4], lengths, return_lse=True)


def forward(algorithm, values, queries=q, **keywords):
    return lambda n: fastmha.attention(queries, k, values, algorithm=algorithm, num_threads=n, **keywords)


def backward(algorithm, queries=q, **keywords):
    return lambda n: fastmha.attention_backward(g, queries, k, v, out, lse, algorithm=algorithm, num_threads=n, **keywords)


def packed(algorithm, values=3, **keywords):
    heads = tokens[1], tokens[2], tokens[values]
    return lambda n: fastmha.attention_packed(*heads, lengths, algorithm=algorithm, return_lse=True, num_threads=n, **keywords)


many_rows = [rng.standard_normal((1, 2, 512, 4)), *rng.standard_normal((2, 1, 1, 9, 4))]
many_rows = [many_rows[0], *many_rows, *fastmha.attention(*many_rows, return_lse=True)]


def packed_backward(algorithm, **keywords):
    given = *tokens[:4], packed_out, packed_lse, lengths
    return lambda n: fastmha.attention_packed_backward(*given, algorithm=algorithm, num_threads=n, **keywords)


CALLS = {
    "blas": forward("blas", v),
    "blas, NaN": forward("blas", bad, is_causal=True),
    "blas, subnormal": forward("blas", tiny),
    "blas, overflow": forward("blas", np.where(v > 0, 1.7e308, v)),
    "tiled": forward("tiled", v),
    "decode": forward("decode", v, few),
    "blas backward": backward("blas"),
    "blas backward, NaN": backward("blas", bad, is_causal=True),
    "tiled backward": backward("tiled"),
    "tiled backward, split": lambda n: backward("tiled")(3),
    "tiled backward, copies": lambda n: fastmha.attention_backward(*many_rows, algorithm="tiled", num_threads=n),
    "packed, blas": packed("blas", 4),
    "packed, tiled": packed("tiled"),
    "packed, decode": packed("decode"),
    "packed backward, blas": packed_backward("blas"),
    "packed backward, tiled": packed_backward("tiled"),
    "packed backward, tiled, split": lambda n: packed_backward("tiled")(3),
    "weights": lambda n: fastmha.scaled_dot_product_attention(q, k, v),
    "module": lambda n: module.forward(X, training=False, num_threads=n),
}


def arrays(result):
    return result if isinstance(result, tuple) else (result,)


@checked
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_each_failed_allocation_is_a_memory_error_and_the_next_call_is_right(isa, name, threads):
    """Leaks and memory freed twice are the address sanitizer's to find."""
    call = CALLS[name]
    wanted = arrays(call(threads))
    failed = 0
    got = None
    while got is None:
        _core.fail_allocation(failed)
        try:
            got = call(threads)
        except MemoryError:
            failed += 1
        finally:
            _core.fail_allocation(-1)
        for _ in range(2):
            assert all(same_bits(a, b) for a, b in zip(arrays(call(threads)), wanted, strict=True))
    assert all(same_bits(a, b) for a, b in zip(arrays(got), wanted, strict=True))
    assert failed


@pytest.mark.parametrize("size", [2**22, 2**23 - 4096, 2**40, 2**61])
def test_scratch_that_cannot_be_had_is_not_kept(size):
    """What is beyond any memory fails; smaller requests afterwards are served, also of the size that is kept between runs."""
    threads = 1 if size < 2**30 else 8
    for _ in range(3):
        if size < 2**30:
            _core.Scratch(size, threads)
        else:
            with pytest.raises(MemoryError, match="scratch"):
                _core.Scratch(size, threads)
        assert np.isfinite(fastmha.attention(q, k, v, algorithm="tiled")).all()


SMAPS, LARGE = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
UNTOLD = "this machine has no large pages, or does not tell of them"


def advised():
    """KiB of this process's memory for which the system was asked for large pages."""
    parts = re.findall(r"^Size: +(\d+) kB$.*?^VmFlags:([^\n]*)", SMAPS.read_text(), flags=re.MULTILINE | re.DOTALL)
    return sum(int(size) for size, flags in parts if "hg" in flags.split())


@pytest.mark.skipif(not LARGE.exists() or "VmFlags" not in SMAPS.read_text(), reason=UNTOLD)
def test_large_scratch_alone_is_asked_for_in_large_pages():
    before = advised()
    scratch = _core.Scratch(1 << 26, 1)
    assert advised() - before >= (1 << 16) - 8
    del scratch
    before = advised()
    scratch = _core.Scratch(1 << 16, 1)
    assert advised() == before
    del scratch
