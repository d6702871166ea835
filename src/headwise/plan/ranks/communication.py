"""The bytes that one attention call on several ranks sends in each layout, and its least time.

This is the only cost model of headwise: `headwise.parallel` checks its messages against it and uses it in `explain`;
``headwise plan`` sums it over layers. It is pure arithmetic, exact to the byte for any lengths and numbers of heads.

    call = MeshCall(queries=8192, keys=8192, heads=32, kv_heads=8, head_dim=128, value_dim=128, number_bytes=2)
    bytes_sent(call, "ring", 4)                     # bytes each of 4 ranks sends, forward
    bytes_sent(call, "ring", 4, backward=True)      # and backward
    for cost in layout_costs(call, 4, link=Link(50e9, 2e-6), flop_rate=1e14): ...      # the cheapest first

**Placement.** `places` gives the positions of queries and of the keys of the same tokens: one stretch per rank
(``contiguous``), or stretches r and 2N - 1 - r of 2N (``zigzag``: causal attention without a window, see `order_of`).
`shares` makes the first ``total % parts`` shares one longer, also for keys of tokens before the first query (a cache).
`head_shares` splits heads: each rank has whole groups, or a part of one group.

**Messages**, in numbers per token; e is `number_bytes`, p is `partial_bytes` (float32), KV is ``K (D + V)`` or the
size of the latent that replaces it:

- ``ring``: in step s rank r sends keys directly to rank r + s, only those that it needs (`keys_sent`): all without a
  mask, those to later ranks with a causal mask, a halo with a window or chunks. The backward pass sends the same again,
  and the float32 gradient of each received key (`remote_keys`) directly to its owner.
- ``gather``: an all-gather of KV; the backward pass repeats it and adds a reduce-scatter of float32 gradients.
- ``ulysses``: an all-to-all of queries and KV to the rank of their head, and of outputs back; in the backward pass
  output gradients to the heads, gradients back. A KV head on several ranks goes to each; if there are such heads, the
  gradients of keys and values return in float32, otherwise in e.
- `decode_sent`: one decode step on a cache sharded by token.
- `all_reduce`, `all_gather`, `reduce_scatter`: collectives, counted in the same way.

Another mask (a prefix, packed documents, a rule) sends no more than the causal or full mask that contains it.

**Sent bytes** are those that leave a rank for another rank: an all-gather sends its share to each other rank, a
reduce-scatter sends each other rank's share, an all-reduce is both. Headers and the exchange of sizes are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from ..shape import check_size, short
from .sharding import (
    FLOAT32,
    MeshCall,
    TokenOrder,
    head_shares,
    keys_by_rank,
    keys_sent,
    length,
    neighbours,
    order_of,
    places,
    remote_keys,
    shares,
)

ContextLayout = Literal["ring", "gather", "ulysses"]
LAYOUTS: tuple[ContextLayout, ...] = get_args(ContextLayout)
OVERLAPS = ("ring", "gather")  # layouts whose messages overlap with computation


@dataclass(frozen=True)
class Link:
    """The link from a rank to the others: bytes per second out of it, and seconds until a message arrives."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, count: float, messages: int) -> float:
        """Return the time in seconds of `count` bytes in so many `messages`, one after another.

        Example:
            >>> Link(50e9, 2e-6).seconds(1e9, 3)
            0.020006
        """
        return count / self.bandwidth + messages * self.latency


# --- bytes ------------------------------------------------------------------------------------------------------------


def all_gather(parts: Sequence[int]) -> tuple[int, ...]:
    """Return the amount that each rank sends in an all-gather: its own part to every other rank.

    Example:
        >>> all_gather([3, 3, 2])
        (6, 6, 4)
    """
    return tuple(part * (len(parts) - 1) for part in parts)


def reduce_scatter(parts: Sequence[int]) -> tuple[int, ...]:
    """Return the amount that each rank sends in a reduce-scatter: every part except its own.

    Example:
        >>> reduce_scatter([3, 3, 2])
        (5, 5, 6)
    """
    whole = sum(parts)
    return tuple(whole - part for part in parts)


def all_reduce(numbers: int, ranks: int) -> tuple[int, ...]:
    """Return the amount that each rank sends in an all-reduce: a reduce-scatter, then an all-gather.

    Example:
        >>> all_reduce(8, 4)                           # 2 (N - 1) / N of the numbers
        (12, 12, 12, 12)
    """
    parts = shares(numbers, ranks)
    return tuple(map(sum, zip(reduce_scatter(parts), all_gather(parts), strict=True)))


def bytes_sent(
    call: MeshCall, layout: ContextLayout, ranks: int, *, order: TokenOrder | None = None, backward: bool = False
) -> tuple[int, ...]:
    """Return the bytes that each rank sends in the forward pass of one call or, with `backward`, in its backward pass.

    Example:
        >>> call = MeshCall(queries=64, keys=64, heads=8, kv_heads=2, head_dim=16, value_dim=16)
        >>> bytes_sent(call, "gather", 4), bytes_sent(call, "ulysses", 4)
        ((6144, 6144, 6144, 6144), (9216, 9216, 9216, 9216))

    Raises:
        TypeError, ValueError: `ranks` is not an int of at least 1, or an unknown layout, or an unsuitable order.
    """
    check_size("ranks", ranks)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(LAYOUTS)}; got {short(layout)}")
    if order not in (None, *get_args(TokenOrder)):
        raise ValueError(f"order is contiguous or zigzag; got {short(order)}")
    order = order or order_of(call, ranks)
    if order == "zigzag" and order_of(call, ranks) != order:
        raise ValueError("zigzag is for causal attention without a window, with at least two queries per rank")
    return tuple(call.batch * count for count in _SENT[layout](call, ranks, order, backward))


def _ring(call: MeshCall, ranks: int, order: TokenOrder, backward: bool) -> list[int]:
    keys, e, kv = keys_sent(call, ranks, order), call.number_bytes, call.kv_numbers
    home = remote_keys(call, ranks, order) if backward else [0] * ranks
    return [n * kv * e + back * kv * FLOAT32 for n, back in zip(keys, home, strict=True)]


def _gather(call: MeshCall, ranks: int, order: TokenOrder, backward: bool) -> list[int]:
    keys, e, kv = keys_by_rank(call, ranks, order), call.number_bytes, call.kv_numbers
    home = reduce_scatter(keys) if backward else [0] * ranks
    return [n * kv * e + back * kv * FLOAT32 for n, back in zip(all_gather(keys), home, strict=True)]


def _ulysses(call: MeshCall, ranks: int, order: TokenOrder, backward: bool) -> list[int]:
    own = [sum(map(length, part)) for part in places(call.queries, ranks, order)]
    keys, e, D, V = keys_by_rank(call, ranks, order), call.number_bytes, call.head_dim, call.value_dim
    heads = head_shares(call.heads, call.kv_heads, ranks)
    per_kv = [call.latent if call.latent and share.heads else share.kv_heads * (D + V) for share in heads]
    owners = ranks if call.latent else -(-ranks // call.kv_heads)
    grad_bytes = FLOAT32 if owners > 1 else e
    per_rank, all_kv = [], sum(per_kv)
    for r, share in enumerate(heads):
        others, away = call.queries - own[r], call.keys - keys[r]
        if backward:
            there = own[r] * (call.heads - share.heads) * V
            per_rank.append((there + others * share.heads * D) * e + away * per_kv[r] * grad_bytes)
        else:
            there = own[r] * (call.heads - share.heads) * D + keys[r] * (all_kv - per_kv[r])
            per_rank.append((there + others * share.heads * V) * e)
    return per_rank


_SENT: dict[ContextLayout, Callable[[MeshCall, int, TokenOrder, bool], list[int]]] = {
    "ring": _ring,
    "gather": _gather,
    "ulysses": _ulysses,
}


def decode_sent(call: MeshCall, ranks: int, *, owners: int | None = None) -> tuple[int, ...]:
    """Return the bytes that each rank sends in a decode step on a cache with token n on rank n mod N.

    Rows (head, batch row, query) are split over the ranks, and each rank merges its own rows: the owners send it
    partial outputs and lse, and it sends the merged rows to all.

    Args:
        call: the call; the new tokens are its queries and the last of its keys.
        ranks: N.
        owners: the number of ranks (the first ones) with keys that the mask allows, fewer for a short window; all by
            default.

    Example:
        >>> call = MeshCall(queries=1, keys=64, heads=8, kv_heads=2, head_dim=16, value_dim=16)
        >>> decode_sent(call, 4)
        (600, 600, 600, 600)
    """
    check_size("ranks", ranks)
    owners = ranks if owners is None else owners
    check_size("owners", owners)
    if owners > ranks:
        raise ValueError(f"owners is at most ranks; got {owners} of {ranks}")
    rows, partial = call.batch * call.queries * call.heads, call.value_dim * call.partial_bytes + FLOAT32
    merged, e = shares(rows, ranks), call.value_dim * call.number_bytes
    return tuple((rows - own) * partial * (r < owners) + (ranks - 1) * own * e for r, own in enumerate(merged))


# --- time -------------------------------------------------------------------------------------------------------------


@cache
def pairs(
    call: MeshCall, ranks: int, layout: ContextLayout = "ring", order: TokenOrder | None = None
) -> tuple[int, ...]:
    """Return the number of (query, key) pairs times query heads that each rank computes."""
    if layout == "ulysses":
        return tuple(share.heads * call.pairs(call.queries) for share in head_shares(call.heads, call.kv_heads, ranks))
    own = places(call.queries, ranks, order or order_of(call, ranks))
    return tuple(call.heads * sum(call.pairs(stop) - call.pairs(start) for start, stop in part) for part in own)


def message_count(call: MeshCall, layout: ContextLayout, ranks: int, *, backward: bool = False) -> int:
    """Return the number of messages one after another on the longest path.

    N - 1 in a ring, one from each rank in the halo, log2 N in a gather, one in each all-to-all.
    """
    if ranks == 1:
        return 0
    if layout == "ring":
        one = neighbours(call, ranks) if call.bounded else ranks - 1
        return one * (1 + backward)
    if layout == "gather":
        return (ranks - 1).bit_length() * (1 + backward)
    return 2


@dataclass(frozen=True)
class LayoutCost:
    """The cost of one layout; each number is that of the rank with the most.

    Attributes:
        layout: The layout.
        order: The order of the queries.
        bytes: Bytes sent by the rank that sends most.
        messages: Messages one after another on the longest path.
        pairs: (query, key) pairs times heads of the rank that computes most.
        link_seconds: Time of the bytes and messages; None without a link.
        compute_seconds: Time of the pairs; None without a FLOP rate.
    """

    layout: ContextLayout
    order: TokenOrder
    bytes: int
    messages: int
    pairs: int
    link_seconds: float | None
    compute_seconds: float | None

    @property
    def seconds(self) -> float | None:
        """The least time: the longer of both if they overlap, else the sum; None if neither is known."""
        times = [time for time in (self.link_seconds, self.compute_seconds) if time is not None]
        if not times:
            return None
        return max(times) if self.layout in OVERLAPS else sum(times)


def layout_cost(
    call: MeshCall,
    layout: ContextLayout,
    ranks: int,
    *,
    link: Link | None = None,
    flop_rate: float | None = None,
    backward: bool = False,
) -> LayoutCost:
    """Return the cost of one layout. The backward pass computes five products per pair, the forward pass two.

    Example:
        >>> call = MeshCall(queries=8192, keys=8192, heads=32, kv_heads=8, head_dim=128, value_dim=128)
        >>> layout_cost(call, "ring", 4, link=Link(50e9, 2e-6)).bytes
        25165824
    """
    order = order_of(call, ranks)
    count = max(bytes_sent(call, layout, ranks, order=order, backward=backward))
    steps = message_count(call, layout, ranks, backward=backward)
    work = max(pairs(call, ranks, layout, order))
    products = 3 * call.head_dim + 2 * call.value_dim if backward else call.head_dim + call.value_dim
    return LayoutCost(
        layout,
        order,
        count,
        steps,
        work,
        None if link is None else link.seconds(count, steps),
        None if flop_rate is None else 2 * call.batch * work * products / flop_rate,
    )


def layout_costs(
    call: MeshCall, ranks: int, *, link: Link | None = None, flop_rate: float | None = None, backward: bool = False
) -> tuple[LayoutCost, ...]:
    """Return the cost of each layout, the cheapest first: by time, then by bytes."""
    costs = [layout_cost(call, layout, ranks, link=link, flop_rate=flop_rate, backward=backward) for layout in LAYOUTS]
    return tuple(sorted(costs, key=lambda cost: (cost.seconds or 0.0, cost.bytes)))
