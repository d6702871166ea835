"""The number of (query, key) pairs that a mask allows: closed forms, exact for every length."""

from __future__ import annotations


def mask_pairs(
    first: int, count: int, keys: int, *, left: int | None = None, right: int | None = 0, chunk: int | None = None
) -> int:
    """Return the number of pairs of `count` queries, at positions from `first` on, with the keys they may attend to.

    Args:
        first: The position of the first query among the keys.
        count: The number of queries.
        keys: The number of keys; the last query is not after the last key.
        left: The number of keys before its own that a query may attend to; None for all.
        right: The number of keys after its own; 0 is causal, None is all.
        chunk: Instead of `left`: the keys before its own in the same chunk of this length.

    Example:
        >>> mask_pairs(0, 5, 5), mask_pairs(0, 5, 5, left=2), mask_pairs(3, 2, 5, chunk=4)
        (15, 12, 5)
    """
    if chunk is None:
        before = _keys_before(first, count, left)
    else:
        before = _in_chunks(first + count, chunk) - _in_chunks(first, chunk)
    after = _keys_before(keys - first - count, count, right)  # the same formula, counted from the last key
    return before + after + count


def _keys_before(first: int, count: int, left: int | None) -> int:
    """Return the number of pairs with keys before the query's own."""
    return _capped(first + count, left) - _capped(first, left)


def _capped(stop: int, cap: int | None) -> int:
    """Return ``sum(min(x, cap) for x in range(stop))``."""
    if cap is None or stop <= cap:
        return stop * (stop - 1) // 2
    return cap * (cap - 1) // 2 + (stop - cap) * cap


def _in_chunks(stop: int, chunk: int) -> int:
    """Return the number of pairs of the first `stop` positions with keys before their own in the same chunk."""
    whole, rest = divmod(stop, chunk)
    return whole * _capped(chunk, None) + _capped(rest, None)
