"""Layout `ulysses`: one all-to-all gives each rank some heads of all tokens, another returns the outputs.

DeepSpeed Ulysses (Jacobs et al. 2023, arXiv 2309.14509). In between, a rank computes the attention of its heads as in
one process, with the same bits. The number of heads need not be divisible: each rank has whole groups or a part of one
group (`headwise.plan.ranks.sharding.head_shares`), and some ranks have one more than others, or none. A key-value head
that several ranks read goes to each of them; its gradients are summed in float32, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...distributed.messages import Pending, ReceiveBuffer
from ...plan.ranks.sharding import HeadShare, Stretch, head_shares
from ...shapes import compute_dtype
from .block import Block, merge_blocks, options_of
from .call import ContextCall, leaves_of, local_slices

HeadRanges = tuple[Stretch, ...]
"""The heads of each rank."""


class HeadShares:
    """The heads and tokens of each rank: all heads of its own tokens, or its own heads of all tokens."""

    def __init__(
        self,
        call: ContextCall,
        stretches: tuple[tuple[Stretch, ...], ...],
        heads: HeadRanges,
        total: int,
        *,
        shared: bool = False,
    ) -> None:
        self.call, self.stretches, self.heads, self.total = call, stretches, heads, total
        self.shared = shared  # Several ranks may have the same head, and its gradient is then a sum.
        self.lengths = [sum(b - a for a, b in own) for own in stretches]
        me = call.comm.rank
        self.own, self.mine = self.lengths[me], heads[me]

    def to_heads(self, x: Tensor) -> Move:
        """Return the move of own tokens with all heads to the ranks that have these heads."""
        shapes = [(x.shape[0], self.mine[1] - self.mine[0], n, x.shape[3]) for n in self.lengths]
        return Move(lambda: [x[:, a:b] for a, b in self.heads], shapes)

    def to_tokens(self, x: Tensor) -> Move:
        """Return the move of all tokens with own heads to the ranks that have these tokens, wide if sums are made."""
        wide = compute_dtype(x) if self.shared else x.dtype
        shapes = [(x.shape[0], b - a, self.own, x.shape[3]) for a, b in self.heads]
        return Move(
            lambda: [torch.cat([x[:, :, a:b].to(wide) for a, b in own], dim=2) for own in self.stretches], shapes
        )

    def all_tokens(self, parts: Sequence[Tensor]) -> Tensor:
        """Return own heads of all tokens, in the order of tokens."""
        B, h, _, width = parts[0].shape
        whole = parts[0].new_empty((B, h, sum(self.lengths), width))
        for own, part in zip(self.stretches, parts, strict=True):
            for (a, b), at in local_slices(own):
                whole[:, :, a:b] = part[:, :, at]
        return whole

    def all_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """Return all heads of own tokens; a head that several ranks had is their sum."""
        B, _, n, width = parts[0].shape
        whole = parts[0].new_zeros((B, self.total, n, width))
        for (a, b), part in zip(self.heads, parts, strict=True):
            whole[:, a:b] += part
        return whole


def swap(call: ContextCall, kind: str, step: int, moves: Sequence[Move]) -> Iterator[list[Tensor]]:
    """Run the all-to-all of several tensors and yield, for each, the parts from every rank.

    The next tensor is sent meanwhile, but only one: a rank holds two tensors twice, not all of them.
    """
    comm = call.comm

    def post(n: int) -> tuple[list[Tensor], Pending | None]:
        if n == len(moves):
            return [], None
        parts, shapes = moves[n].cut(), moves[n].shapes
        others = [rank for rank in range(comm.world) if rank != comm.rank]
        receives = {rank: ReceiveBuffer(shapes[rank], parts[rank].dtype, parts[rank].device) for rank in others}
        return parts[comm.rank : comm.rank + 1], comm.exchange(
            kind, {rank: parts[rank] for rank in others}, receives, step=4 * step + n
        )

    following = post(0)
    for n in range(len(moves)):
        (own, pending), following = following, post(n + 1)
        assert pending is not None
        heard = pending.wait()
        yield [own[0] if rank == comm.rank else heard.pop(rank) for rank in range(comm.world)]


class Move(NamedTuple):
    """A tensor to send: the function that cuts it for each rank, and the shapes of the parts from each rank."""

    cut: Callable[[], list[Tensor]]
    shapes: Sequence[tuple[int, ...]]


def exchanged(
    call: ContextCall, kind: str, splits: Sequence[HeadShares], tensors: Sequence[Tensor], *, to_heads: bool
) -> tuple[Tensor, ...]:
    """Return each tensor after an all-to-all by its `HeadShares`."""
    pairs = list(zip(splits, tensors, strict=True))
    if to_heads:
        received = swap(call, kind, 0, [split.to_heads(x) for split, x in pairs])
        return tuple(split.all_tokens(parts) for split, parts in zip(splits, received, strict=True))
    received = swap(call, kind, 1, [split.to_tokens(x) for split, x in pairs])
    return tuple(split.all_heads(parts).to(x.dtype) for (split, x), parts in zip(pairs, received, strict=True))


class HeadSwap(torch.autograd.Function):
    """The exchange from own tokens of all heads to own heads of all tokens (`to_heads`), or back."""

    @staticmethod
    def forward(ctx: Any, call: ContextCall, splits: Sequence[HeadShares], to_heads: bool, *tensors: Tensor) -> Any:
        """Return each tensor after the exchange."""
        ctx.call, ctx.splits, ctx.to_heads = call, splits, to_heads
        return exchanged(call, "ulysses", splits, tensors, to_heads=to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the gradients back."""
        call: ContextCall = ctx.call
        if not ctx.to_heads:  # the first messages of a backward pass
            call.comm.agree(f"backward of {call.name}", {})
        back = exchanged(call, "ulysses backward", ctx.splits, grads, to_heads=not ctx.to_heads)
        return None, None, None, *back


def ulysses(
    call: ContextCall, query: Tensor, key: Tensor, value: Tensor | None, sinks: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return out and, if requested, lse of this rank's queries over the keys of all ranks."""
    world = call.comm.world
    groups = call.heads if call.expansion is not None else call.kv_heads
    shares = head_shares(call.heads, groups, world)
    of_queries = HeadShares(call, call.queries, tuple(share.query for share in shares), call.heads)
    if call.expansion is None:
        assert value is not None
        shared = world > call.kv_heads
        of_keys = HeadShares(call, call.keys, tuple(share.kv for share in shares), call.kv_heads, shared=shared)
        q, k, v = HeadSwap.apply(call, [of_queries, of_keys, of_keys], True, query, key, value)
    else:  # The vectors of the expansion go to every rank that has a head.
        every: HeadRanges = tuple((0, 1 if share.heads else 0) for share in shares)
        of_vectors = HeadShares(call, call.keys, every, 1, shared=world > 1)
        q, k = HeadSwap.apply(call, [of_queries, of_vectors], True, query, key)
        v = None
    with call.comm.telling():
        out, lse = _own_heads(call, shares[call.comm.rank], q, k, v, sinks)
    if not return_lse:
        return HeadSwap.apply(call, [of_queries], False, out)[0], None
    out, lse = HeadSwap.apply(call, [of_queries, of_queries], False, out, lse[..., None])
    return out, lse[..., 0]


def _own_heads(
    call: ContextCall, share: HeadShare, query: Tensor, key: Tensor, value: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the attention of some heads over all tokens, with its autograd graph."""
    first, last = share.query
    if not share.heads:  # A rank without heads still needs a graph, because it takes part in the backward exchange.
        ways = [x for x in (query, key, value, sinks, *leaves_of(call.mask)) if x is not None and x.is_floating_point()]
        nothing = torch.stack([x.sum().to(query.dtype) for x in ways]).sum()
        out = query.new_zeros((query.shape[0], 0, query.shape[2], call.value_dim)) + nothing
        return out, out[..., 0].to(compute_dtype(query))
    if call.expansion is not None:
        key, value = call.expansion.function(key, first, last)
    assert value is not None
    at = Block((0, call.T), (0, call.S), (first, last))
    call = call.with_leaves(query, [])
    options = options_of(call, at, None if sinks is None else sinks[first:last])
    return merge_blocks(call, at, options, query, key, value)
