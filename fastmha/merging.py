"""Attention over two sets of keys, from the attention over each: the formula."""
from __future__ import annotations

import numpy as np


def shares(lse1: np.ndarray, lse2: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """exp(lse1 - lse), exp(lse2 - lse) and lse = log(exp(lse1) + exp(lse2)); 0, 0 and -inf where both are -inf.

    The output over both sets of keys is share1 · out1 + share2 · out2. NumPy's warnings are the caller's to hush.
    """
    top = np.maximum(lse1, lse2)
    np.copyto(top, 0, where=np.isneginf(top))
    share1, share2 = np.exp(lse1 - top), np.exp(lse2 - top)
    total = share1 + share2
    lse = np.log(total)
    lse += top
    np.copyto(total, 1, where=total == 0)
    share1 /= total
    share2 /= total
    return share1, share2, lse
