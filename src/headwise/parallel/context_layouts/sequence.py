"""The split of a sequence over ranks, and its inverse: the tokens that each rank holds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh, ProcessGroup

from ...distributed.comm import Comm, eager
from ...distributed.errors import RankMismatch
from ...ops.masks.mask import Mask, as_mask
from ...plan.ranks.sharding import Stretch, TokenOrder, places, shard_ranges
from ...shapes.arguments import check_counts, check_tensor, shown
from .call import local_slices

ORDERS: tuple[TokenOrder, ...] = get_args(TokenOrder)
STRIPS = 32  # the number of strips of a rank's queries for which work is estimated


def check_order(order: object) -> None:
    """Raise ValueError for an unknown order."""
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(
            f"order is contiguous (rank r has one stretch) or zigzag (stretches r and 2 N - 1 - r of 2 N); got "
            f"{shown(order)}; order_for(mask, length, ranks) says which suits a mask"
        )


def held_places(lengths: list[int], order: TokenOrder, operation: str, what: str) -> tuple[tuple[Stretch, ...], ...]:
    """Return the stretches of each rank from the lengths; RankMismatch if the lengths do not fit the order."""
    world = len(lengths)
    if order == "contiguous":
        ends = [sum(lengths[:rank]) for rank in range(world + 1)]
        return tuple(((a, b),) for a, b in pairwise(ends))
    stretches = places(sum(lengths), world, order)
    expected = [sum(b - a for a, b in own) for own in stretches]
    if expected != lengths:
        rank = next(r for r in range(world) if expected[r] != lengths[r])
        raise RankMismatch(
            operation,
            rank,
            f"holds {lengths[rank]} {what} where zigzag gives it {expected[rank]} of {sum(lengths)}; split with "
            'split_sequence(x, order="zigzag"), or pass order="contiguous", which takes any lengths',
        )
    return stretches


def order_for(mask: Mask | Tensor | None, length: int, ranks: int) -> TokenOrder:
    """Return the order with the more even work between ranks under a mask, for as many queries as keys.

    It is "contiguous" unless its busiest rank has more than 1.1 times the work of the busiest rank in zigzag order:
    zigzag for causal attention, contiguous for a window or no mask. Work is estimated from the keys that strips of
    queries reach.

    >>> from headwise import causal, window
    >>> order_for(causal(), 1000, 4), order_for(causal() & window(64), 1000, 4), order_for(None, 1000, 4)
    ('zigzag', 'contiguous', 'contiguous')
    """
    check_counts(1, length=length, ranks=ranks)
    mask = as_mask(mask)

    def busiest(order: TokenOrder) -> int:
        return max(
            sum(_work(mask, rows, length, STRIPS // len(own)) for rows in own) for own in places(length, ranks, order)
        )

    if length < 2 * ranks:
        return "contiguous"
    return "zigzag" if busiest("contiguous") > 1.1 * busiest("zigzag") else "contiguous"


def _work(mask: Mask, rows: Stretch, length: int, strips: int) -> int:
    total = 0
    for a, b in shard_ranges(rows[1] - rows[0], strips):
        low, high = mask.reach(rows[0] + a, rows[0] + b, length, length)
        total += (high - low) * (b - a) if b > a else 0
    return total


@eager
def positions(
    length: int,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    order: TokenOrder = "contiguous",
    rank: int | None = None,
) -> Tensor:
    """Return the positions (n,) of a rank's tokens among all `length` tokens, on the CPU; this rank by default.

    Rotary embeddings take them as `positions`.
    """
    check_order(order)
    check_counts(length=length)
    comm = Comm.of(group)
    rank = comm.rank if rank is None else rank
    check_counts(0, comm.world - 1, rank=rank)
    own = places(length, comm.world, order)[rank]
    return torch.cat([torch.arange(a, b, device="cpu") for a, b in own])


def split_sequence(
    x: Tensor, group: ProcessGroup | DeviceMesh | None = None, *, order: TokenOrder = "contiguous", dim: int = 1
) -> Tensor:
    """Return this rank's tokens of a tensor that every rank has in full; for any length, as even as possible.

    Args:
        x: any tensor whose axis `dim` is the sequence.
        group: process group or mesh of one dimension; all processes by default.
        order: "contiguous", or "zigzag", which makes causal work even: see `order_for`.
        dim: the axis of tokens.
    """
    check_tensor("x", x)
    _check_dim(x, dim)
    return x.index_select(dim, positions(x.shape[dim], group, order=order).to(x.device))


@eager
def join_sequence(
    x: Tensor, group: ProcessGroup | DeviceMesh | None = None, *, order: TokenOrder = "contiguous", dim: int = 1
) -> Tensor:
    """Return all tokens in their order, on every rank: the inverse of `split_sequence`.

    Its gradient is the sum over the losses of all ranks, for this rank's tokens. If every rank computes the same loss
    of the whole sequence, divide the loss by the number of ranks.

    Raises:
        RankError, RankMismatch: ranks disagree, or one fails.
    """
    comm = Comm.of(group)
    with comm.before("join_sequence"):
        check_tensor("x", x)
        check_order(order)
        _check_dim(x, dim)
    moved = x.movedim(dim, 0)
    same = {"dtype": x.dtype, "order": order, "other sizes": tuple(moved.shape[1:]), "dim": dim % x.ndim}
    # Either all ranks run the backward pass or none; otherwise a rank would wait for the others.
    same["requires_grad"] = x.requires_grad and torch.is_grad_enabled()
    ranks = comm.agree("join_sequence", same, {"length": moved.shape[0]})
    stretches = held_places([own["length"] for own in ranks], order, "join_sequence", "tokens")
    return _Join.apply(comm, stretches, moved).movedim(0, dim)


def _check_dim(x: Tensor, dim: int) -> None:
    """Raise if `dim` is not an axis of the tensor."""
    if x.ndim == 0:
        raise ValueError("x has an axis of tokens; got a number, a tensor of shape ()")
    check_counts(-x.ndim, x.ndim - 1, dim=dim)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Comm, stretches: tuple[tuple[Stretch, ...], ...], x: Tensor) -> Tensor:
        lengths = [sum(b - a for a, b in own) for own in stretches]
        parts = comm.gather("join", x.contiguous(), [(n, *x.shape[1:]) for n in lengths])
        whole = x.new_empty((sum(lengths), *x.shape[1:]))
        for own, part in zip(stretches, parts, strict=True):
            for (a, b), at in local_slices(own):
                whole[a:b] = part[at]
        ctx.comm, ctx.stretches, ctx.name = comm, stretches, f"join_sequence, operation {comm.count}"
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        comm: Comm = ctx.comm
        comm.agree(f"backward of {ctx.name}", {})
        parts = [torch.cat([grad[a:b] for a, b in own]) for own in ctx.stretches]
        return None, None, comm.reduce_scatter("join backward", parts)
