"""(query, key) pairs that a mask allows: closed forms, exact for every length."""

from __future__ import annotations


def mask_pairs(
    first: int, count: int, keys: int, *, left: int | None = None, right: int | None = 0, chunk: int | None = None
) -> int:
    """Return the pairs of `count` queries, at the positions `first` onwards, with the keys that they may attend.

    Args:
        first: The position of the first query among the keys.
        count: Queries.
        keys: Keys; the last query is at most at the last key.
        left: Keys before its own that a query may attend; None for all.
        right: Keys after its own; 0 is causal, None is all.
        chunk: Keys before its own within chunks of this length only, in place of `left`.

    Example:
        >>> mask_pairs(0, 5, 5), mask_pairs(0, 5, 5, left=2), mask_pairs(3, 2, 5, chunk=4)
        (15, 12, 5)
    """
    if chunk is None:
        before = _keys_before(first, count, left)
    else:
        before = _in_chunks(first + count, chunk) - _in_chunks(first, chunk)
    after = _keys_before(keys - first - count, count, right)  # the same, counted from the last key
    return before + after + count


def _keys_before(first: int, count: int, left: int | None) -> int:
    """Return the pairs with keys before the query's own."""
    return _capped(first + count, left) - _capped(first, left)


def _capped(stop: int, cap: int | None) -> int:
    """Return ``sum(min(x, cap) for x in range(stop))``."""
    if cap is None or stop <= cap:
        return stop * (stop - 1) // 2
    return cap * (cap - 1) // 2 + (stop - cap) * cap


def _in_chunks(stop: int, chunk: int) -> int:
    """Return the pairs of the first `stop` positions with keys before their own, within chunks."""
    whole, rest = divmod(stop, chunk)
    return whole * _capped(chunk, None) + _capped(rest, None)
