"""Queries and keys of all heads on every rank, and partial outputs brought together: each rank merges some rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..shapes import compute_dtype
from ..shapes.kinds import check_tensor
from .comm import Block, Comm
from .merge import Merged
from .rectangle import Partial


class Heads:
    """Who passes which heads.

    Args:
        comm: the ranks.
        kv_heads: K, of all ranks together.
        own: whether each passes its own heads, or all of them all.
    """

    def __init__(self, comm: Comm, kv_heads: int, own: bool) -> None:
        self.comm, self.kv_heads, self.own = comm, kv_heads, own

    def whole(self, key: Tensor, value: Tensor | None, same: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Keys and values of all heads, of those that each rank has."""
        error: Exception | None = None
        tensors = [key] if value is None else [key, value]
        try:
            for name, x in zip(("key", "value"), tensors, strict=False):
                check_tensor(name, x, "a tensor (B, K, T, n)")
                if x.ndim != 4 or x.shape[:3] != key.shape[:3]:
                    raise ValueError(f"a {name} is (B, K, T, n), with the heads of this rank; got {tuple(x.shape)}")
            B, _, T, _ = key.shape
            same = same | {"tokens": f"{(B, T)}, {[(x.shape[3], str(x.dtype)) for x in tensors]}"}
        except (TypeError, ValueError) as wrong:
            error = wrong
        own = {} if error is not None else {"K": key.shape[1]}
        told = self.comm.agree("append to a ShardedCache", same, own, error=error)
        shares = [one["K"] for one in told]
        parts = torch.cat(tensors, dim=-1)
        rest = (parts.shape[0], parts.shape[2], parts.shape[3])
        heard = self.comm.gather("cache keys", parts, [(rest[0], n, *rest[1:]) for n in shares])
        both = torch.cat(heard, dim=1)[:, self._first_of_each(shares)]
        return both[..., : key.shape[3]], None if value is None else both[..., key.shape[3] :]

    def _first_of_each(self, shares: list[int]) -> list[int]:
        """For each key-value head where it stands first among those that all ranks pass."""
        K, N = self.kv_heads, len(shares)
        if sum(shares) == K:
            return list(range(K))
        have = [rank * K // N for rank in range(N)]
        if shares != [1] * N or sorted({*have}) != list(range(K)):
            raise ValueError(
                f"ranks pass {shares} key-value heads, and the cache has {K}: their shares add up to {K}, in the order "
                f"of ranks, or rank r of {N} passes head r * {K} // {N} alone"
            )
        return [have.index(head) for head in range(K)]

    def queries(self, query: Tensor, shares: list[int]) -> Tensor:
        """(B, H, T, D) of all heads."""
        if not self.own:
            return query
        H, (B, _, T, D) = sum(shares), query.shape
        if H % self.kv_heads:
            raise ValueError(f"the ranks' query heads {shares} are a multiple of K = {self.kv_heads} key-value heads")
        return torch.cat(self.comm.gather("cache queries", query, [(B, n, T, D) for n in shares]), dim=1)

    def rows(self, query: Tensor, shares: list[int]) -> list[tuple[int, int]]:
        """Which of the rows H B T each rank merges: those of its own heads, or a share."""
        B, H, T, _ = query.shape
        sizes = [n * B * T for n in shares] if self.own else _even(H * B * T, self.comm.world)
        ends = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
        return list(pairwise(ends))

    def back(self, kept: Partial, query: Tensor, shares: list[int], with_lse: bool) -> tuple[Tensor, Tensor]:
        """(B, H, T, V) and (B, H, T) of the rows (1, n, 1, V) that each rank merged: its own heads, or all of them."""
        B, H, T, _ = query.shape
        V = kept.out.shape[-1]
        out, lse = kept.out.view(-1, V).to(query.dtype), kept.lse.view(-1, 1)
        if self.own:
            H = shares[self.comm.rank]
        else:
            ends = self.rows(query, shares)
            out = torch.cat(self.comm.gather("cache out", out, [(b - a, V) for a, b in ends], step=2))
            if with_lse:
                lse = torch.cat(self.comm.gather("cache out", lse, [(b - a, 1) for a, b in ends], step=3))
        lse = lse.view(H, B, T).transpose(0, 1) if with_lse else lse
        return out.view(H, B, T, V).transpose(0, 1), lse


def merged(
    heads: Heads,
    query: Tensor,
    value_dim: int,
    active: list[int],
    part: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    shares: list[int],
) -> Partial:
    """The rows that this rank merges, of the partial results (B, H, T, V), (B, H, T) of the active ranks.

    A row is a head, batch row and query; each goes to its merger with its lse, in the dtype of the merge.
    """
    comm, dtype, V = heads.comm, compute_dtype(query), value_dim
    ends = heads.rows(query, shares)
    first, last = ends[comm.rank]
    sends, heard = {}, {}
    if part is not None:
        both = torch.cat([part[0].to(dtype), part[1].to(dtype)[..., None]], dim=-1)
        flat = both.transpose(0, 1).reshape(-1, V + 1)
        sends = {rank: flat[a:b] for rank, (a, b) in enumerate(ends) if rank != comm.rank}
        heard[comm.rank] = flat[first:last]
    block = Block((last - first, V + 1), dtype)
    receives = {rank: block for rank in active if rank != comm.rank}
    heard |= comm.exchange("cache parts", sends, receives, step=1).wait()
    total = Merged(query.new_empty((1, last - first, 1, 1)), V)
    for rank in sorted(heard):
        x = heard[rank].view(1, last - first, 1, V + 1)
        total.add(slice(0, 1), Partial(x[..., :V], x[..., V], None))
    if sinks is not None:
        B, _, T, _ = query.shape
        each = sinks.repeat_interleave(B * T)
        total.finish(each if heads.own else each[first:last])
    return total.result(dtype)


def _even(number: int, parts: int) -> list[int]:
    return [number // parts + (part < number % parts) for part in range(parts)]
