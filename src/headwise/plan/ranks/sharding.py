"""The split of one attention call over ranks: queries, keys and heads of each rank, and the keys that others need."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

from ..costs.mask_pairs import mask_pairs
from ..shape import check_size

TokenOrder = Literal["contiguous", "zigzag"]
Stretch = tuple[int, int]
FLOAT32 = 4
MESSAGE = 1 << 18
"""The size in bytes below which latency dominates a message's cost; heads are sent one by one above it."""


@dataclass(frozen=True)
class MeshCall:
    """One attention call over all ranks together; the last query is aligned with the last key.

    Attributes:
        queries: T.
        keys: S, at least T: the keys before the first query are cached and are sharded, too.
        heads: H.
        kv_heads: K.
        head_dim: D.
        value_dim: V.
        number_bytes: e, the bytes of a number of queries, keys, values and outputs.
        batch: B.
        left: The number of keys before its own that a query attends to; None for all.
        right: The number of keys after its own: 0 is causal, None for all.
        chunk: The length of chunks within which queries attend; None without chunks.
        latent: Numbers per token of the latent that is sent instead of keys and values; None if these are sent.
        partial_bytes: p, the bytes of a number of a partial output.

    Raises:
        TypeError, ValueError: an invalid size, or sizes that do not fit together.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    number_bytes: int = 2
    batch: int = 1
    left: int | None = None
    right: int | None = 0
    chunk: int | None = None
    latent: int | None = None
    partial_bytes: int = FLOAT32

    def __post_init__(self) -> None:
        sizes = ("queries", "keys", "heads", "kv_heads", "head_dim", "value_dim", "number_bytes", "batch")
        for name in (*sizes, "partial_bytes", "chunk", "latent"):
            check_size(name, getattr(self, name), optional=name in ("chunk", "latent"))
        for name in ("left", "right"):
            reach = getattr(self, name)
            if reach != 0:
                check_size(name, reach, optional=True)
        if self.keys < self.queries:
            raise ValueError(f"keys is at least queries; got {self.keys} keys and {self.queries} queries")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads; got {self.heads} and {self.kv_heads}")
        if self.right not in (0, self.left) or (self.chunk is not None and (self.left, self.right) != (None, 0)):
            raise ValueError(
                "a mask is causal (right = 0), symmetric (right = left), or causal in chunks; "
                f"got left = {self.left}, right = {self.right}, chunk = {self.chunk}"
            )

    @property
    def cached(self) -> int:
        """The number of keys before the first query."""
        return self.keys - self.queries

    @property
    def bounded(self) -> bool:
        """True if a query attends only to keys within some distance, so that a halo is enough."""
        return self.left is not None or self.chunk is not None

    @property
    def kv_numbers(self) -> int:
        """The numbers sent for one token's keys and values."""
        return self.latent or self.kv_heads * (self.head_dim + self.value_dim)

    def seen(self, start: int, stop: int) -> Stretch:
        """Return the range of keys (of S) that the queries from `start` to `stop` (of T) attend to together.

        Example:
            >>> MeshCall(8, 8, 1, 1, 4, 4, left=2).seen(4, 6), MeshCall(8, 8, 1, 1, 4, 4, chunk=3).seen(4, 6)
            ((2, 6), (3, 6))
        """
        low, high = start + self.cached, stop + self.cached
        if self.chunk is not None:
            first = low // self.chunk * self.chunk
        else:
            first = 0 if self.left is None else max(0, low - self.left)
        return first, self.keys if self.right is None else min(self.keys, high + self.right)

    def pairs(self, stop: int) -> int:
        """Return the number of (query, key) pairs of the first `stop` queries."""
        return mask_pairs(self.cached, stop, self.keys, left=self.left, right=self.right, chunk=self.chunk)


# --- placement --------------------------------------------------------------------------------------------------------


@cache
def shares(total: int, parts: int) -> tuple[int, ...]:
    """Split `total` into `parts` shares; the first ones are longer by one.

    Example:
        >>> shares(11, 4)
        (3, 3, 3, 2)
    """
    each, over = divmod(total, parts)
    return (each + 1,) * over + (each,) * (parts - over)


@cache
def shard_ranges(total: int, parts: int) -> tuple[Stretch, ...]:
    """Return the (start, stop) of each of the shares of `shares`.

    Example:
        >>> shard_ranges(11, 4)
        ((0, 3), (3, 6), (6, 9), (9, 11))
    """
    each, over = divmod(total, parts)
    starts = [i * each + min(i, over) for i in range(parts + 1)]
    return tuple(pairwise(starts))


def order_of(call: MeshCall, ranks: int) -> TokenOrder:
    """Return the order of queries: zigzag for causal attention without a window, whose late queries have more keys.

    Example:
        >>> order_of(MeshCall(64, 64, 1, 1, 4, 4), 4), order_of(MeshCall(64, 64, 1, 1, 4, 4, left=7), 4)
        ('zigzag', 'contiguous')
    """
    even = call.right is None or call.bounded or call.queries < 2 * ranks
    return "contiguous" if even else "zigzag"


@cache
def places(queries: int, ranks: int, order: TokenOrder = "contiguous") -> tuple[tuple[Stretch, ...], ...]:
    """Return the stretches of queries of each rank.

    Example:
        >>> places(8, 2, "zigzag")
        (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """
    if order == "contiguous":
        return tuple((one,) for one in shard_ranges(queries, ranks))
    cut = shard_ranges(queries, 2 * ranks)
    return tuple((cut[r], cut[2 * ranks - 1 - r]) for r in range(ranks))


@cache
def keys_by_rank(call: MeshCall, ranks: int, order: TokenOrder | None = None) -> tuple[int, ...]:
    """Return the number of keys of each rank: those of its queries, and its share of the cached keys."""
    own = places(call.queries, ranks, order or order_of(call, ranks))
    old = shares(call.cached, ranks)
    return tuple(sum(b - a for a, b in own[r]) + old[r] for r in range(ranks))


class HeadShare(NamedTuple):
    """The heads of one rank: query heads and the key-value heads that they read, as (start, stop)."""

    query: Stretch
    kv: Stretch

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.query[1] - self.query[0]

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads; 0 if the rank has no query head."""
        return self.kv[1] - self.kv[0]


@cache
def head_shares(heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """Return the heads of each rank: whole groups, or a part of one group if there are more ranks than groups.

    Example:
        >>> [share.query for share in head_shares(6, 3, 2)], [share.kv for share in head_shares(4, 2, 4)]
        ([(0, 4), (4, 6)], [(0, 1), (0, 1), (1, 2), (1, 2)])
    """
    group = heads // kv_heads
    if ranks <= kv_heads:
        return tuple(HeadShare((a * group, b * group), (a, b)) for a, b in shard_ranges(kv_heads, ranks))
    result = []
    for kv, count in enumerate(shares(ranks, kv_heads)):
        for a, b in shard_ranges(group, count):
            result.append(HeadShare((kv * group + a, kv * group + b), (kv, kv + 1) if b > a else (kv, kv)))
    return tuple(result)


def heads_at_once(heads: int, head_bytes: int) -> int:
    """Return the number of key-value heads in one message of keys: one, or enough to reach `MESSAGE` bytes.

    Example:
        >>> heads_at_once(8, 100 << 10), heads_at_once(8, 1 << 20), heads_at_once(8, 100)
        (3, 1, 8)
    """
    return max(1, min(heads, -(-MESSAGE // max(1, head_bytes))))


# --- keys that others need --------------------------------------------------------------------------------------------


@cache
def remote_keys(call: MeshCall, ranks: int, order: TokenOrder | None = None) -> tuple[int, ...]:
    """Return the number of keys of other ranks that each rank's queries attend to.

    Example:
        >>> remote_keys(MeshCall(8, 8, 1, 1, 4, 4), 2, "contiguous"), remote_keys(MeshCall(8, 8, 1, 1, 4, 4, left=1), 4)
        ((0, 4), (0, 1, 1, 1))
    """
    order = order or order_of(call, ranks)
    if call.bounded:
        return tuple(sum(length(part) for _, part in _halo(call, ranks, r)) for r in range(ranks))
    own, old = places(call.queries, ranks, order), shares(call.cached, ranks)
    result = []
    for r in range(ranks):
        has = sum(length(part) for part in own[r])
        last = own[r][-1][1]  # a causal mask allows all keys up to the rank's last query
        seen = call.queries if call.right is None else last
        result.append(seen - has + call.cached - old[r] if has else 0)
    return tuple(result)


def neighbours(call: MeshCall, ranks: int) -> int:
    """Return the largest number of ranks from which one rank gets keys, under a bounded mask."""
    return max(len({owner for owner, _ in _halo(call, ranks, r)}) for r in {0, ranks // 2, ranks - 1})


def _halo(call: MeshCall, ranks: int, rank: int) -> list[tuple[int, Stretch]]:
    """Return (owner, keys) for all keys of other ranks that a rank needs under a bounded mask, counted over all S."""
    start, stop = shard_ranges(call.queries, ranks)[rank]
    if start == stop:
        return []
    low, high = call.seen(start, stop)
    cut, parts = _key_starts(call.queries, call.cached, ranks), []
    at = max(0, bisect_right(cut, low) - 1)
    while at < 2 * ranks and cut[at] < high:
        part = max(low, cut[at]), min(high, cut[at + 1])
        owner = at % ranks
        if part[1] > part[0] and owner != rank:
            parts.append((owner, part))
        at += 1
    return parts


@cache
def _key_starts(queries: int, cached: int, ranks: int) -> tuple[int, ...]:
    """Return the start of each stretch of keys: cached ones of ranks 0 to N - 1, then new ones; and the end."""
    old = [a for a, _ in shard_ranges(cached, ranks)]
    return (*old, *(cached + a for a, _ in shard_ranges(queries, ranks)), cached + queries)


@cache
def keys_sent(call: MeshCall, ranks: int, order: TokenOrder | None = None) -> tuple[int, ...]:
    """Return the number of keys that each rank sends: its own, once to each other rank that needs them.

    Example:
        >>> keys_sent(MeshCall(8, 8, 1, 1, 4, 4), 2, "contiguous"), keys_sent(MeshCall(8, 8, 1, 1, 4, 4), 2)
        ((4, 0), (2, 4))
    """
    order = order or order_of(call, ranks)
    if ranks == 1:
        return (0,)
    if call.bounded:
        counts = [0] * ranks
        for r in range(ranks):
            for owner, part in _halo(call, ranks, r):
                counts[owner] += length(part)
        return tuple(counts)
    own, old = places(call.queries, ranks, order), shares(call.cached, ranks)
    asking = min(call.queries, ranks)  # the number of ranks with queries, which are the first ones
    result = []
    for r in range(ranks):
        others = asking - (r < asking)
        count = others * old[r]
        if call.right is None:
            count += others * length(own[r][0])
        elif order == "zigzag":  # a causal mask: needed by the ranks with a later stretch
            count += others * length(own[r][0]) + r * length(own[r][1])
        else:
            count += max(0, asking - 1 - r) * length(own[r][0])
        result.append(count)
    return tuple(result)


def length(stretch: Stretch) -> int:
    """Return the number of tokens in a stretch."""
    return stretch[1] - stretch[0]
