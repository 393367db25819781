"""The mask builders: boolean arrays in which True means "may not attend".

Every mask made here has 2 axes (Lq, Lk) or 4 axes that broadcast to (B, H, Lq, Lk), or becomes one of these by the
indexing its docstring names, so that it can be given to any ``mask`` argument of the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fastmha import validate

__all__ = ["create_attention_mask", "create_causal_mask", "create_causal_mask_with_cache", "create_padding_mask"]

_MOST = 2**46       # elements of a mask


def _fits(rows_name: str, rows: int, columns_name: str, columns: int) -> None:
    if rows * columns > _MOST:
        raise ValueError(f"{rows_name} {rows} and {columns_name} {columns} make a mask beyond any memory")


def _blocked_after(name: str, lengths: ArrayLike, limit_name: str, limit: int) -> NDArray[np.bool_]:
    """(B, limit), True at the positions from each row's length on; the arguments' names serve the messages."""
    try:
        array = validate.as_array(name, lengths)
    except ValueError:  # ragged
        raise ValueError(f"{name} must have one axis, (B,), got {validate.short(lengths)}") from None
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, (B,), got {array.ndim} axes of shape {array.shape}")
    whole = validate.integers(name, lengths)
    if whole is None:
        raise TypeError(f"{name} must hold integers, got dtype {validate.cut(array.dtype)}")
    if not whole.size:
        return np.zeros((0, limit), bool)
    for row in np.flatnonzero((whole < 0) | (whole > limit)):
        raise ValueError(f"{name} must be from 0 to {limit_name} = {limit}, got {validate.short(int(whole[row]))} in row {row}")
    _fits(name, len(whole), limit_name, limit)
    return np.arange(limit) >= whole.astype(np.int64)[:, None]


def create_causal_mask(
    seq_len_q: int, seq_len_k: int | None = None, *, offset: int = 0, dtype: DTypeLike = bool
) -> NDArray[Any]:
    """Mask of the keys that lie in the future of each query.

    Query i may attend key j if and only if ``j <= i + offset``.

    Parameters
    ----------
    seq_len_q : int
        Number of queries, Lq.
    seq_len_k : int, optional
        Number of keys, Lk. Default: `seq_len_q`.
    offset : int, default 0
        Position of the first query among the keys; may be negative. The two usual choices for Lq != Lk are 0 (both
        sequences begin together) and ``seq_len_k - seq_len_q`` (both end together).
    dtype : dtype, default bool
        bool, float32, float64, float16 or bfloat16.

    Returns
    -------
    ndarray, shape (Lq, Lk)
        bool: True where query i may NOT attend key j. Floating: the additive form, -inf there and 0 elsewhere.

    Raises
    ------
    TypeError
        A length or the offset is not an integer, or `dtype` is none of these.
    ValueError
        A length is negative.

    Examples
    --------
    >>> create_causal_mask(2, 3).astype(int)
    array([[0, 1, 1],
           [0, 0, 1]])
    >>> create_causal_mask(2, 3, offset=1).astype(int)
    array([[0, 0, 1],
           [0, 0, 0]])
    """
    rows = validate.length("seq_len_q", seq_len_q)
    columns = rows if seq_len_k is None else validate.length("seq_len_k", seq_len_k)
    # Beyond these two ends nothing changes: all keys are blocked, or none is.
    diagonal = min(max(validate.integer("offset", offset), -rows), columns)
    kind = validate.element_type("dtype", dtype) if isinstance(dtype, str) and dtype == "bfloat16" else validate.dtype_of(dtype)
    if kind not in (np.dtype(bool), *validate.FLOAT_TYPES) and not validate.is_half(kind):
        raise TypeError(f"dtype must be bool, float32, float64, float16 or bfloat16, got {validate.short(dtype)}")
    _fits("seq_len_q", rows, "seq_len_k", columns)
    blocked = ~np.tri(rows, columns, diagonal, dtype=bool)
    if kind.kind == "b":
        return blocked
    additive = np.zeros(blocked.shape, kind)
    additive[blocked] = -np.inf
    return additive


def create_padding_mask(lengths: ArrayLike, max_len: int) -> NDArray[np.bool_]:
    """Mask of the positions past the end of each sequence of a padded batch.

    Parameters
    ----------
    lengths : array_like of int, shape (B,)
        Number of valid positions of each row, from 0 to `max_len`; they stand first.
    max_len : int
        Padded length, the number of keys Lk.

    Returns
    -------
    ndarray of bool, shape (B, max_len)
        True at padding. As an attention mask it is indexed ``mask[:, None, None, :]``, shape (B, 1, 1, Lk).

    Raises
    ------
    TypeError
        `max_len` or a length is not an integer.
    ValueError
        `lengths` has not exactly one axis, a length is negative or beyond `max_len`, or `max_len` is negative.

    Examples
    --------
    >>> create_padding_mask([1, 3], 3).astype(int)
    array([[0, 1, 1],
           [0, 0, 0]])
    """
    return _blocked_after("lengths", lengths, "max_len", validate.length("max_len", max_len))


def create_attention_mask(
    seq_len_q: int,
    seq_len_k: int | None = None,
    is_causal: bool = True,
    key_padding_lengths: ArrayLike | None = None,
) -> NDArray[np.bool_]:
    """Causal and padding mask in one.

    Parameters
    ----------
    seq_len_q : int
        Number of queries, Lq.
    seq_len_k : int, optional
        Number of keys, Lk. Default: `seq_len_q`.
    is_causal : bool, default True
        Query i sees key j only if ``j <= i``. This holds for Lq != Lk too: the offset is 0, both sequences begin
        together. For another offset combine `create_causal_mask` with `create_padding_mask`.
    key_padding_lengths : array_like of int, shape (B,), optional
        Number of valid keys of each row, from 0 to Lk.

    Returns
    -------
    ndarray of bool
        True = may NOT attend. Shape (Lq, Lk), or (B, 1, Lq, Lk) where `key_padding_lengths` is given.

    Raises
    ------
    TypeError
        A length is not an integer, or `is_causal` is not True or False.
    ValueError
        A length is negative, or `key_padding_lengths` has not exactly one axis or reaches beyond Lk.
    """
    rows = validate.length("seq_len_q", seq_len_q)
    columns = rows if seq_len_k is None else validate.length("seq_len_k", seq_len_k)
    _fits("seq_len_q", rows, "seq_len_k", columns)
    causal = validate.flag("is_causal", is_causal)
    blocked = create_causal_mask(rows, columns) if causal else np.zeros((rows, columns), bool)
    if key_padding_lengths is None:
        return blocked
    padding = _blocked_after("key_padding_lengths", key_padding_lengths, "seq_len_k", columns)
    return blocked | padding[:, None, None, :]


def create_causal_mask_with_cache(seq_len_q: int, seq_len_k: int, cache_len: int) -> NDArray[np.bool_]:
    """Causal mask of new queries over the cached keys followed by the new ones.

    New query i sees key j if and only if ``j <= i + cache_len``: the whole cache, the new keys before its own, and its
    own.

    Parameters
    ----------
    seq_len_q : int
        Number of new queries, Lq.
    seq_len_k : int
        Number of all keys, Lk, cached and new.
    cache_len : int
        How many of them are cached, from 0 to `seq_len_k`.

    Returns
    -------
    ndarray of bool, shape (Lq, Lk)
        True = may NOT attend.

    Raises
    ------
    TypeError
        An argument is not an integer.
    ValueError
        A length is negative, or `cache_len` is not from 0 to `seq_len_k`.

    Examples
    --------
    >>> create_causal_mask_with_cache(2, 5, 3).astype(int)
    array([[0, 0, 0, 0, 1],
           [0, 0, 0, 0, 0]])
    """
    columns = validate.length("seq_len_k", seq_len_k)
    cached = validate.integer("cache_len", cache_len)
    if not 0 <= cached <= columns:
        raise ValueError(f"cache_len must be from 0 to seq_len_k = {columns}, got {validate.short(cached)}")
    return create_causal_mask(seq_len_q, columns, offset=cached)
