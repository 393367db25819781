"""What the tests of caches share."""

import numpy as np
import pytest

from fastmha import cache, slots


class Poisoned:
    """NumPy, but what `empty` gives is NaN."""

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def empty(shape, dtype=np.float64):
        return np.full(shape, np.nan, dtype)


@pytest.fixture(scope="module")
def poison():
    """What the cache allocates is filled with NaN: reading what was never written shows."""
    with pytest.MonkeyPatch.context() as patch:
        for room in (slots, cache):
            patch.setattr(room, "np", Poisoned())
        yield
