"""What the tests of caches share."""

import numpy as np
import pytest

from fastmha.slots import Slots


@pytest.fixture(scope="module")
def poison():
    """Buffers begin as NaN."""
    allocate = Slots.allocate

    def poisoned(self, slots):
        buffers = allocate(self, slots)
        for x in buffers:
            x.fill(np.nan)
        return buffers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slots, "allocate", poisoned)
        yield
