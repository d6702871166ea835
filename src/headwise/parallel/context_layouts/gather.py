"""Layout `gather`: every rank gets all keys and values, one key-value head at a time, for its own queries.

All-gather context parallelism (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2). Nothing is merged: each row uses
all its keys in one call, as in one process, so the result is bitwise equal for any number of ranks. The next head is
received during the computation of the current one. The backward pass gathers the keys again and reduce-scatters their
gradients in float32.

A rank holds two heads of all keys (the current one and the next). In the backward pass it holds one head, its gradients
and those of another stretch of queries. This memory does not fall with the number of ranks: bitwise equality needs all
keys of a head in one call, and this call also returns all their gradients. The backward pass therefore receives no head
in advance; the bytes sent grow with the length, but the computation grows with its square.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...distributed.messages import Pending, ReceiveBuffer
from ...plan.ranks.sharding import Stretch
from .block import Partial
from .call import ContextCall, local_slices
from .key_exchange import GradientSums, KVTensors, ReceivedKeys, Route, attended, queries_with_keys
from .merge import Merged

SPLIT = 1024
"""Keys that the native kernel sums separately if rows are few; cuts at multiples of it keep the sums equal."""


class Stages:
    """The gather of keys and values, head by head, for one rank of a call."""

    def __init__(self, call: ContextCall, shards: KVTensors) -> None:
        self.call, self.shards = call, shards
        self.widths, self.batch = [x.shape[3] for x in shards], shards[0].shape[0]
        self.others = [rank for rank in range(call.comm.world) if rank != call.comm.rank]
        self.strips = max(map(len, call.keys))  # the most stretches of a rank; each message has one
        self.spans = queries_with_keys(call, self._span)

    def _span(self, rows: Stretch) -> Stretch | None:
        """Return the keys that these queries are computed with."""
        span = self.call.reach(rows, (0, self.call.S))
        return None if span is None else (span[0] // SPLIT * SPLIT, span[1])

    def receive_all(self) -> Iterator[ReceivedKeys]:
        """Yield all keys, head by head, while the next head is received. The caller must clear each head's list."""
        following = self.bring(0)
        for stage in range(self.call.kv_heads):
            received, following = following, self.bring(stage + 1)
            yield self.taken(stage, received)

    def taken(self, stage: int, received: list[Any]) -> ReceivedKeys:
        """Return a head when it has arrived; empties the list from `bring`, so no other reference remains."""
        whole, pending = received
        received.clear()
        for one in pending:
            one.wait()
        return ReceivedKeys(
            [x.permute(1, 2, 0, 3) for x in whole[:, :, None].split(self.widths, dim=3)], (stage, stage + 1), 0
        )

    def bring(self, stage: int) -> list[Any]:
        """Start the messages of a head into one tensor (S, B, widths), where the keys of a stretch are contiguous."""
        if stage >= self.call.kv_heads:
            return []
        whole, keys = self.shards[0].new_empty((self.call.S, self.batch, sum(self.widths))), self.call.keys
        for (a, b), at in local_slices(keys[self.call.comm.rank]):
            for part, x in zip(whole[a:b].split(self.widths, dim=2), self.shards, strict=True):
                part.copy_(x[:, stage, at].transpose(0, 1))
        pending: list[Pending] = []
        for n in range(self.strips):
            parts = {rank: whole[slice(*own[n])] for rank, own in enumerate(keys) if n < len(own)}
            mine = parts.pop(self.call.comm.rank, None)
            sends = {} if mine is None else dict.fromkeys(self.others, mine)
            pending.append(self.call.comm.exchange("gather", sends, parts, step=stage * self.strips + n))
        return [whole, pending]

    def reduce(self, stage: int, low: int, grads: KVTensors, total: KVTensors) -> None:
        """Write the gradients of a head of this rank's keys into `total`: the sum over ranks, its own first.

        The messages go to one rank after another, and the next one is sent during the addition. So a rank holds the
        parts of two other ranks, not of all.
        """
        comm, me, N = self.call.comm, self.call.comm.rank, self.call.comm.world
        own = local_slices(self.call.keys[me])
        to = [x[:, stage : stage + 1, at] for x in total for _, at in own]
        counts, step = [x.numel() for x in to], self.strips * self.call.kv_heads + stage

        def share(rank: int) -> KVTensors:
            return [_from(x, a - low, b - low) for x in grads for a, b in self.call.keys[rank]]

        def start(away: int) -> tuple[int, Pending | None]:
            if away == N:
                return me, None
            target, source = (me + away) % N, (me - away) % N
            flat = torch.cat([x.reshape(-1) for x in share(target)])
            block = ReceiveBuffer((sum(counts),), flat.dtype, flat.device)
            return source, comm.exchange("gather backward", {target: flat}, {source: block}, step=step)

        following = start(1)
        for x, part in zip(to, share(me), strict=True):
            x.copy_(part)
        for away in range(1, N):
            (source, pending), following = following, start(away + 1)
            assert pending is not None
            for x, part in zip(to, pending.wait()[source].split(counts), strict=True):
                x += part.view_as(x)


def _from(x: Tensor, start: int, stop: int) -> Tensor:
    """Return the keys from `start` to `stop`, with 0 for those outside `x`."""
    n = x.shape[2]
    if start >= 0 and stop <= n:
        return x[:, :, start:stop]
    keys, (low, high) = x.new_zeros((*x.shape[:2], stop - start, x.shape[3])), (max(start, 0), min(stop, n))
    if low < high:
        keys[:, :, low - start : high - start] = x[:, :, low:high]
    return keys


def _forward(call: ContextCall, query: Tensor, shards: KVTensors, sinks: Tensor | None) -> Partial:
    merged = Merged(query, call.value_dim, query.dtype)  # each row has one part, with all its keys
    stages = Stages(call, shards)
    for received in stages.receive_all():
        for heads, rows, part in attended(call, query, received, stages.spans, sinks):
            merged.add(rows, part, heads)
        received.keys.clear()
    return merged.result(query.dtype)


def _backward(sums: GradientSums, shards: KVTensors) -> KVTensors:
    stages = Stages(sums.call, shards)
    total = [torch.zeros_like(x, dtype=sums.wide) for x in shards]
    for stage in range(sums.call.kv_heads):
        # No head is received in advance: it would need memory in addition to the gradients of this one.
        received = stages.taken(stage, stages.bring(stage))
        low, grads = 0, [x[:, :, :0].to(sums.wide) for x in received.keys]
        if stages.spans:
            low, grads = sums.of_keys(received, stages.spans)
        received.keys.clear()
        stages.reduce(stage, low, grads, total)
    return total


GATHER = Route(_forward, _backward, has_all=True)
