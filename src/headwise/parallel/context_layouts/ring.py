"""Layout `ring`: queries stay on their rank; keys and values arrive piece by piece during the computation.

Ring Attention (Liu et al. 2023, arXiv 2310.01889): in step s rank r uses the keys of rank r - s. Here each owner sends
keys directly to the ranks that need them, and only the part that they need: a window is a halo, and keys that a mask
excludes are not sent. A message holds some heads of the keys that one rank needs from another. This limits the memory,
and ranks with equal work in a step also have equal work for each message.
The backward pass sends the keys again and uses the lse over all keys; gradients of keys and values are summed in
float32 and sent directly to their owner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ...distributed import messages
from ...distributed.messages import Pending, ReceiveBuffer
from ...plan.ranks.sharding import Stretch, heads_at_once
from .block import Partial
from .call import ContextCall
from .key_exchange import GradientSums, KVTensors, QueryBlock, ReceivedKeys, Route, attended, queries_with_keys
from .merge import Merged


class MessagePart(NamedTuple):
    """The content of one message: stretches of the keys of some heads."""

    parts: tuple[Stretch, ...]
    heads: Stretch


NO_KEYS = MessagePart((), (0, 0))


class Exchange(NamedTuple):
    """The pieces received and sent at the same time; `number` counts within a pair of ranks."""

    number: int
    source: int
    target: int
    comes: MessagePart
    goes: MessagePart


class RingMessages:
    """The messages of one rank of a call: the keys, the ranks and the order."""

    def __init__(self, call: ContextCall, shards: KVTensors) -> None:
        self.call, self.shards = call, shards
        self.widths, self.batch, self.dtype = [x.shape[3] for x in shards], shards[0].shape[0], shards[0].dtype
        self.device = shards[0].device
        me, N = call.comm.rank, call.comm.world
        self.mine = self.pieces(call.needed(me, me))
        # Without tags, messages are matched in the order in which ranks start them, so all ranks need equal turns.
        least = 0 if messages.has_tags(self.device) else call.kv_heads
        self.turns: list[Exchange] = []
        for step in range(1, N):
            source, target = (me - step) % N, (me + step) % N
            parts = self.pieces(call.needed(me, source)), self.pieces(call.needed(target, me))
            both = zip_longest(*parts, [NO_KEYS] * least, fillvalue=NO_KEYS)
            self.turns += [Exchange(n, source, target, comes, goes) for n, (comes, goes, *_) in enumerate(both)]

    def pieces(self, parts: list[Stretch]) -> list[MessagePart]:
        """Return the messages for these keys; the result is the same on the sending and on the receiving rank."""
        K, all_parts = self.call.kv_heads, tuple(parts)
        few = heads_at_once(K, self.numbers(MessagePart(all_parts, (0, 1))) * self.dtype.itemsize)
        return [MessagePart(all_parts, (h, min(h + few, K))) for h in range(0, K, few)] if parts else []

    def numbers(self, piece: MessagePart) -> int:
        """Return the number of elements of a piece."""
        first, last = piece.heads
        return sum(b - a for a, b in piece.parts) * (last - first) * self.batch * sum(self.widths)

    def own(self, piece: MessagePart, tensors: KVTensors) -> list[KVTensors]:
        """Return a piece of this rank's tensors, stretch by stretch."""
        stretches = self.call.keys[self.call.comm.rank]
        return [[x[:, slice(*piece.heads), self.call.mine(stretches, part)] for x in tensors] for part in piece.parts]

    def receive_all(self) -> Iterator[tuple[Exchange | None, MessagePart, list[KVTensors]]]:
        """Yield this rank's own keys, then those of other ranks, turn by turn, while the next ones are received.

        The caller must empty the list to release the keys before the turn after the next one starts.
        """
        following = self._bring(0)
        for piece in self.mine:
            yield None, piece, self.own(piece, self.shards)
        for n, turn in enumerate(self.turns):
            pending, following = following, self._bring(n + 1)
            assert pending is not None
            received = self.cut(pending.wait(), turn.source, turn.comes)
            pending = None  # Only `received` may hold a reference to the received keys.
            yield turn, turn.comes, received

    def _bring(self, number: int) -> Pending | None:
        """Start the messages of a turn: receive its keys and send own ones."""
        if number >= len(self.turns):
            return None
        turn = self.turns[number]
        sends = {turn.target: _row(self.own(turn.goes, self.shards))} if turn.goes.parts else {}
        receives = {turn.source: ReceiveBuffer((self.numbers(turn.comes),), self.dtype, self.device)}
        return self.call.comm.exchange("ring", sends, receives, step=2 * turn.number)

    def home(self, turn: Exchange, grads: list[KVTensors], wide: torch.dtype) -> Pending:
        """Start to send the gradients of a turn's keys to their owner and to receive those of own keys."""
        sends = {turn.source: _row(grads)} if turn.comes.parts else {}
        receives = {turn.target: ReceiveBuffer((self.numbers(turn.goes),), wide, self.device)}
        return self.call.comm.exchange("ring backward", sends, receives, step=2 * turn.number + 1)

    def cut(self, heard: dict[int, Tensor], rank: int, piece: MessagePart) -> list[KVTensors]:
        """Split a received message into the tensors of its piece."""
        heads = piece.heads[1] - piece.heads[0]
        shapes = [[(self.batch, heads, b - a, width) for width in self.widths] for a, b in piece.parts]
        flat = iter(heard[rank].split([math.prod(shape) for some in shapes for shape in some]))
        return [[next(flat).view(shape) for shape in some] for some in shapes]


def _row(parts: list[KVTensors]) -> Tensor:
    return torch.cat([x.reshape(-1) for part in parts for x in part])


def _received(
    call: ContextCall, piece: MessagePart, keys: list[KVTensors]
) -> Iterator[tuple[ReceivedKeys, list[QueryBlock]]]:
    """Yield the received keys stretch by stretch with the queries that use them; used keys are released."""
    for cols in piece.parts:
        spans = queries_with_keys(call, partial(call.reach, cols=cols))
        yield ReceivedKeys(keys.pop(0), piece.heads, cols[0]), spans


def _forward(call: ContextCall, query: Tensor, shards: KVTensors, sinks: Tensor | None) -> Partial:
    merged = Merged(query, call.value_dim)
    for _, piece, keys in RingMessages(call, shards).receive_all():
        for received, spans in _received(call, piece, keys):
            for heads, rows, part in attended(call, query, received, spans):
                merged.add(rows, part, heads)
            received.keys.clear()
    merged.finish(sinks)
    return merged.result(query.dtype)


def _gradient_of(sums: GradientSums, received: ReceivedKeys, spans: list[QueryBlock]) -> KVTensors:
    """Return the gradients of all received keys.

    A mask that is evaluated for these keys alone may allow fewer of them than for the whole stretch, or none.
    """
    low, some = sums.of_keys(received, spans) if spans else (received.first, [])
    if some and some[0].shape[2] == received.keys[0].shape[2]:
        return some
    whole = [torch.zeros_like(x, dtype=sums.wide) for x in received.keys]
    for to, grad in zip(whole, some, strict=False):
        to[:, :, low - received.first : low - received.first + grad.shape[2]] = grad
    return whole


def _backward(sums: GradientSums, shards: KVTensors) -> KVTensors:
    traffic = RingMessages(sums.call, shards)
    total = [torch.zeros_like(x, dtype=sums.wide) for x in shards]
    # Only the previous turn is pending; with more turns a rank would hold all sums in memory.
    home: tuple[MessagePart, int, Pending] | None = None

    def add(piece: MessagePart, grads: list[KVTensors]) -> None:
        for to, part in zip(traffic.own(piece, total), grads, strict=True):
            for x, grad in zip(to, part, strict=True):
                x += grad

    def take_home() -> None:
        if home is not None:
            piece, source, pending = home
            add(piece, traffic.cut(pending.wait(), source, piece))

    for turn, piece, keys in traffic.receive_all():
        grads: list[KVTensors] = []
        for received, spans in _received(sums.call, piece, keys):
            grads.append(_gradient_of(sums, received, spans))
            received.keys.clear()
        if turn is None:
            add(piece, grads)
            continue
        take_home()
        home = turn.goes, turn.target, traffic.home(turn, grads, sums.wide)
    take_home()
    return total


RING = Route(_forward, _backward, has_all=False)
