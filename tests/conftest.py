"""Fixtures, and the instruction sets that they run through; all else that tests share is in support.py."""

import pytest

pytest.register_assert_rewrite("support")

from support import isa, rng  # noqa: E402, F401
