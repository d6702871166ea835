"""Who has what when one attention call is spread over ranks: queries, keys, heads, and what others must send."""

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
"""Bytes below which a message costs by its number rather than by its length; above, keys travel head by head."""


@dataclass(frozen=True)
class MeshCall:
    """One attention call over all ranks together; the last query lies at the last key.

    Attributes:
        queries: T.
        keys: S, at least T: those before the first query were cached, and are sharded, too.
        heads: H.
        kv_heads: K.
        head_dim: D.
        value_dim: V.
        number_bytes: e, of a number of queries, keys, values and outputs.
        batch: B.
        left: Keys before its own that a query sees; None for all.
        right: Keys after its own: 0 is causal, None for all.
        chunk: Keys are seen within stretches of that many alone; None where there are no stretches.
        latent: Numbers a token that stand for its keys and values and travel instead; None where those travel.
        partial_bytes: p, of a number of a partial output.

    Raises:
        TypeError, ValueError: a size that is none, or sizes that do not fit.
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
                "a mask is causal (right = 0), both ways alike (right = left), or causal in chunks; "
                f"got left = {self.left}, right = {self.right}, chunk = {self.chunk}"
            )

    @property
    def cached(self) -> int:
        """Keys before the first query."""
        return self.keys - self.queries

    @property
    def bounded(self) -> bool:
        """Whether a query sees no key farther than some distance: then a halo is enough."""
        return self.left is not None or self.chunk is not None

    @property
    def kv_numbers(self) -> int:
        """Numbers that one token's keys and values take when they travel."""
        return self.latent or self.kv_heads * (self.head_dim + self.value_dim)

    def seen(self, start: int, stop: int) -> Stretch:
        """Return the keys, of all S, that the queries from `start` to `stop` (of T) see together.

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
        """(query, key) pairs of the first `stop` queries."""
        return mask_pairs(self.cached, stop, self.keys, left=self.left, right=self.right, chunk=self.chunk)


# --- who has what -----------------------------------------------------------------------------------------------------


@cache
def shares(total: int, parts: int) -> tuple[int, ...]:
    """`total` cut into that many shares, the first ones longer by one.

    Example:
        >>> shares(11, 4)
        (3, 3, 3, 2)
    """
    each, over = divmod(total, parts)
    return (each + 1,) * over + (each,) * (parts - over)


@cache
def shard_ranges(total: int, parts: int) -> tuple[Stretch, ...]:
    """Return the places of those shares: (start, stop) each.

    Example:
        >>> stretches(11, 4)
        ((0, 3), (3, 6), (6, 9), (9, 11))
    """
    each, over = divmod(total, parts)
    starts = [i * each + min(i, over) for i in range(parts + 1)]
    return tuple(pairwise(starts))


def order_of(call: MeshCall, ranks: int) -> TokenOrder:
    """Return how queries are placed: zigzag where attention is causal without bound, for then late queries see more.

    Example:
        >>> order_of(MeshCall(64, 64, 1, 1, 4, 4), 4), order_of(MeshCall(64, 64, 1, 1, 4, 4, left=7), 4)
        ('zigzag', 'contiguous')
    """
    even = call.right is None or call.bounded or call.queries < 2 * ranks
    return "contiguous" if even else "zigzag"


@cache
def places(queries: int, ranks: int, order: TokenOrder = "contiguous") -> tuple[tuple[Stretch, ...], ...]:
    """Return the stretches of queries that each rank has.

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
    """Return keys that each rank has: those of its queries, and its share of the cached."""
    own = places(call.queries, ranks, order or order_of(call, ranks))
    old = shares(call.cached, ranks)
    return tuple(sum(b - a for a, b in own[r]) + old[r] for r in range(ranks))


class HeadShare(NamedTuple):
    """The heads of one rank: query heads and the key-value heads they read, as (start, stop)."""

    query: Stretch
    kv: Stretch

    @property
    def heads(self) -> int:
        """How many query heads."""
        return self.query[1] - self.query[0]

    @property
    def kv_heads(self) -> int:
        """How many key-value heads; 0 where the rank has no query head."""
        return self.kv[1] - self.kv[0]


@cache
def head_shares(heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """Return the heads of each rank: whole groups; where there are more ranks than groups, each a part of one group.

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
    """Return how many of the key-value heads one message of keys has: one, or as many as take `MESSAGE` bytes together.

    Example:
        >>> heads_at_once(8, 100 << 10), heads_at_once(8, 1 << 20), heads_at_once(8, 100)
        (3, 1, 8)
    """
    return max(1, min(heads, -(-MESSAGE // max(1, head_bytes))))


# --- keys that others see ---------------------------------------------------------------------------------------------


@cache
def remote_keys(call: MeshCall, ranks: int, order: TokenOrder | None = None) -> tuple[int, ...]:
    """Return keys of other ranks that each rank's queries see.

    Example:
        >>> needed(MeshCall(8, 8, 1, 1, 4, 4), 2, "contiguous"), needed(MeshCall(8, 8, 1, 1, 4, 4, left=1), 4)
        ((0, 4), (0, 1, 1, 1))
    """
    order = order or order_of(call, ranks)
    if call.bounded:
        return tuple(sum(length(part) for _, part in _halo(call, ranks, r)) for r in range(ranks))
    own, old = places(call.queries, ranks, order), shares(call.cached, ranks)
    result = []
    for r in range(ranks):
        has = sum(length(part) for part in own[r])
        last = own[r][-1][1]  # causal: all before the last of its queries
        seen = call.queries if call.right is None else last
        result.append(seen - has + call.cached - old[r] if has else 0)
    return tuple(result)


def neighbours(call: MeshCall, ranks: int) -> int:
    """From how many ranks the one with most of them gets keys, under a bounded mask."""
    return max(len({owner for owner, _ in _halo(call, ranks, r)}) for r in {0, ranks // 2, ranks - 1})


def _halo(call: MeshCall, ranks: int, rank: int) -> list[tuple[int, Stretch]]:
    """(owner, keys) for all that a rank sees of others under a bounded mask, keys counted over all S."""
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
    """Where each stretch of keys starts: the cached ones of ranks 0 to N - 1, then the new ones; and the end."""
    old = [a for a, _ in shard_ranges(cached, ranks)]
    return (*old, *(cached + a for a, _ in shard_ranges(queries, ranks)), cached + queries)


@cache
def keys_sent(call: MeshCall, ranks: int, order: TokenOrder | None = None) -> tuple[int, ...]:
    """Return keys that each rank sends, its own, once to each other rank that sees them.

    Example:
        >>> shown(MeshCall(8, 8, 1, 1, 4, 4), 2, "contiguous"), shown(MeshCall(8, 8, 1, 1, 4, 4), 2)
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
    asking = min(call.queries, ranks)  # ranks with queries: the first
    result = []
    for r in range(ranks):
        others = asking - (r < asking)
        count = others * old[r]
        if call.right is None:
            count += others * length(own[r][0])
        elif order == "zigzag":  # causal: seen by those with a later stretch
            count += others * length(own[r][0]) + r * length(own[r][1])
        else:
            count += max(0, asking - 1 - r) * length(own[r][0])
        result.append(count)
    return tuple(result)


def length(stretch: Stretch) -> int:
    """Return how many tokens a stretch has."""
    return stretch[1] - stretch[0]
