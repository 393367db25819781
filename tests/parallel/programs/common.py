"""What the programs share. Each runs on every rank of a communicator and asserts there; rank 0 prints how many cases held."""
import contextlib
import re

import numpy as np
import pytest
from mpi4py import MPI

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
DTYPES = np.float32, np.float64


class Cases:
    """Counts what held; an assertion that fails ends all ranks (`python -m mpi4py`)."""

    def __init__(self):
        self.count = 0

    def close(self, got, expected, depth, what, size=None):
        """|got - expected| within the rounding of sums of `depth` terms: depth · eps · size.

        size: what the terms are like, where they cancel; else the largest expected item. Both sides sum the same terms in
        other orders, and each may be off by that much.
        """
        got, expected = np.asarray(got), np.asarray(expected)
        assert got.shape == expected.shape, f"{what}: shape {got.shape}, not {expected.shape}"
        assert got.dtype == expected.dtype, f"{what}: {got.dtype}, not {expected.dtype}"
        bound = depth * np.finfo(expected.dtype).eps * (float(np.abs(expected).max(initial=0)) if size is None else size)
        worst = float(np.abs(got - expected).max(initial=0))
        assert worst <= bound, f"rank {RANK} of {SIZE}, {what}: {worst:.3g} above {bound:.3g}"
        self.count += 1

    def true(self, held, what):
        assert held, f"rank {RANK} of {SIZE}: {what}"
        self.count += 1

    @contextlib.contextmanager
    def raises(self, kind, *words):
        """That kind of error, not one of its subclasses, with all these words."""
        with pytest.raises(kind, match="".join(f"(?=.*{re.escape(some)})" for some in words)) as raised:
            yield
        assert raised.type is kind, f"rank {RANK} of {SIZE}: {raised.type}"
        self.count += 1

    def done(self):
        """After all ranks have come here."""
        counts = COMM.gather(self.count)
        if RANK == 0:
            assert len(set(counts)) == 1, f"cases by rank: {counts}"
            print(f"ok {self.count} cases", flush=True)
