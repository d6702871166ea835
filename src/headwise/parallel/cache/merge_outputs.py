"""Exchange of heads for a sharded cache, and the merge of the ranks' partial outputs: each rank merges some rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...distributed.comm import Comm
from ...distributed.messages import ReceiveBuffer
from ...ops.sharding.heads import Share
from ...plan.ranks.sharding import shard_ranges
from ...shapes import compute_dtype
from ..context_layouts.block import Partial
from ..context_layouts.merge import Merged
from .ownership import select_tokens


class HeadExchange:
    """The exchange of queries, keys and outputs between ranks.

    Args:
        comm: the ranks.
        share: the heads of this rank if each rank passes only its own; None if every rank passes all heads.
    """

    def __init__(self, comm: Comm, share: Share | None) -> None:
        self.comm, self.share = comm, share

    def exchange_tokens(self, tensors: list[Tensor], picks: list[list[list[int]]]) -> list[Tensor]:
        """Return this rank's tokens with all heads: each rank sends every other rank the tokens of that rank.

        A head that several ranks have is sent by the first of them.
        """
        assert self.share is not None
        widths = [x.shape[3] for x in tensors]
        have = [self._first_to_have(rank) for rank in range(self.comm.world)]
        both = torch.cat(tensors, dim=-1)[:, have[self.comm.rank]]
        parts = [select_tokens(both, its) for its in picks]
        B, n, width = both.shape[0], len(picks[self.comm.rank][0]), sum(widths)
        heard = self.comm.scatter("cache keys", parts, [(B, len(heads), n, width) for heads in have])
        return list(torch.cat(heard, dim=1).split(widths, dim=-1))

    def _first_to_have(self, rank: int) -> list[int]:
        """Return the indices of a rank's key-value heads that no lower rank has, each head once."""
        assert self.share is not None
        before = [key for other in range(rank) for key in self.share.of_rank(other).keys]
        keys = self.share.of_rank(rank).keys
        return [n for n, key in enumerate(keys) if key not in before and key not in keys[:n]]

    def queries(self, query: Tensor) -> Tensor:
        """Return the queries of all heads, (B, H, T, D)."""
        if self.share is None:
            return query
        return torch.cat(self.comm.gather("cache queries", query, [tuple(query.shape)] * self.comm.world), dim=1)

    def rows(self, query: Tensor) -> tuple[tuple[int, int], ...]:
        """Return the range of the H B T rows that each rank merges: the rows of its own heads, or an even share."""
        B, H, T, _ = query.shape
        return shard_ranges(H * B * T, self.comm.world)

    def back(self, kept: Partial, query: Tensor, with_lse: bool) -> tuple[Tensor, Tensor]:
        """Return out (B, H, T, V) and lse (B, H, T) from the rows (1, n, 1, V) that every rank merged.

        With `share` these are the rank's own heads, otherwise all heads.
        """
        B, H, T, _ = query.shape
        V = kept.out.shape[-1]
        out, lse = kept.out.view(-1, V).to(query.dtype), kept.lse.view(-1, 1)
        if self.share is not None:
            H = self.share.count
        else:
            ends = self.rows(query)
            out = torch.cat(self.comm.gather("cache out", out, [(b - a, V) for a, b in ends], step=2))
            if with_lse:
                lse = torch.cat(self.comm.gather("cache out", lse, [(b - a, 1) for a, b in ends], step=3))
        lse = lse.view(H, B, T).transpose(0, 1) if with_lse else lse
        return out.view(H, B, T, V).transpose(0, 1), lse


def merged(
    heads: HeadExchange,
    query: Tensor,
    value_dim: int,
    active: list[int],
    part: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
) -> Partial:
    """Merge the partial results (B, H, T, V) and (B, H, T) of the active ranks for the rows of this rank.

    A row is one head, batch row and query. Each row is sent with its lse to the rank that merges it, in the dtype of
    the merge.
    """
    comm, dtype, V = heads.comm, compute_dtype(query), value_dim
    ends = heads.rows(query)
    first, last = ends[comm.rank]
    sends, heard = {}, {}
    if part is not None:
        both = torch.cat([part[0].to(dtype), part[1].to(dtype)[..., None]], dim=-1)
        flat = both.transpose(0, 1).reshape(-1, V + 1)
        sends = {rank: flat[a:b] for rank, (a, b) in enumerate(ends) if rank != comm.rank}
        heard[comm.rank] = flat[first:last]
    block = ReceiveBuffer((last - first, V + 1), dtype, query.device)
    receives = {rank: block for rank in active if rank != comm.rank}
    heard |= comm.exchange("cache parts", sends, receives, step=1).wait()
    total = Merged(query.new_empty((1, last - first, 1, 1)), V)
    for rank in sorted(heard):
        x = heard[rank].view(1, last - first, 1, V + 1)
        total.add(slice(0, 1), Partial(x[..., :V], x[..., V], None))
    if sinks is not None:
        B, _, T, _ = query.shape
        each = sinks.repeat_interleave(B * T)
        total.finish(each if heads.share is not None else each[first:last])
    return total.result(dtype)
