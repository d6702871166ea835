"""Layout `ring`: queries stay, keys and values come by, a piece at a time, while what is there is attended.

Ring Attention (Liu et al. 2023, arXiv 2310.01889): in step s rank r attends the keys of rank r - s. Here they go
straight from their owner to those whose queries may see them, and only the part that they may: a window is a halo, what
a mask rules out does not travel. A message has some heads of what one rank needs of another: little is held of
what travels, and ranks that are as busy as each other with a step are so with each of its messages.
Backward the same once more, by the lse over all keys; gradients of keys and values are summed in float32 and go
straight home.
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
from .key_exchange import GradientSums, KVTensors, QueryBlock, ReceivedKeys, Route, attended, met
from .merge import Merged


class Piece(NamedTuple):
    """Stretches of the keys of some heads: what one message has."""

    parts: tuple[Stretch, ...]
    heads: Stretch


class Exchange(NamedTuple):
    """What comes and what goes at the same time; None for nothing. `number` counts within a pair of ranks."""

    number: int
    source: int
    target: int
    comes: Piece | None
    goes: Piece | None


class Traffic:
    """Who sends which keys to whom in which order, for one rank of a job."""

    def __init__(self, job: ContextCall, shards: KVTensors) -> None:
        self.job, self.shards = job, shards
        self.widths, self.batch, self.dtype = [x.shape[3] for x in shards], shards[0].shape[0], shards[0].dtype
        self.device = shards[0].device
        me, N = job.comm.rank, job.comm.world
        self.mine = self.pieces(job.needed(me, me))
        # Without tags messages are taken in the order in which ranks start them: all ranks have the same turns then.
        least = 0 if messages.has_tags(self.device) else job.kv_heads
        self.turns: list[Exchange] = []
        for step in range(1, N):
            source, target = (me - step) % N, (me + step) % N
            parts = self.pieces(job.needed(me, source)), self.pieces(job.needed(target, me))
            both = zip_longest(*parts, [None] * least)
            self.turns += [Exchange(n, source, target, comes, goes) for n, (comes, goes, *_) in enumerate(both)]

    def pieces(self, parts: list[Stretch]) -> list[Piece]:
        """How keys are cut into messages: alike on the rank that sends them and on the one that gets them."""
        K, all_parts = self.job.kv_heads, tuple(parts)
        few = heads_at_once(K, self.numbers(Piece(all_parts, (0, 1))) * self.dtype.itemsize)
        return [Piece(all_parts, (h, min(h + few, K))) for h in range(0, K, few)] if parts else []

    def numbers(self, piece: Piece) -> int:
        """How many numbers it has."""
        first, last = piece.heads
        return sum(b - a for a, b in piece.parts) * (last - first) * self.batch * sum(self.widths)

    def own(self, piece: Piece, tensors: KVTensors) -> list[KVTensors]:
        """A piece of what this rank holds, stretch by stretch."""
        stretches = self.job.keys[self.job.comm.rank]
        return [[x[:, slice(*piece.heads), self.job.mine(stretches, part)] for x in tensors] for part in piece.parts]

    def coming(self) -> Iterator[tuple[Exchange | None, Piece | None, list[KVTensors]]]:
        """This rank's own keys, then those of others, turn by turn: those of the next are on their way meanwhile.

        Who takes them empties the list, and so lets go of them, before those after the next are on their way.
        """
        following = self._bring(0)
        for piece in self.mine:
            yield None, piece, self.own(piece, self.shards)
        for n, turn in enumerate(self.turns):
            pending, following = following, self._bring(n + 1)
            assert pending is not None
            came = self.cut(pending.wait(), turn.source, turn.comes)
            pending = None  # nothing but `came` holds what came
            yield turn, turn.comes, came

    def _bring(self, number: int) -> Pending | None:
        """Starts the messages of a turn: its keys come, own ones go."""
        if number >= len(self.turns):
            return None
        turn = self.turns[number]
        sends = {} if turn.goes is None else {turn.target: _row(self.own(turn.goes, self.shards))}
        receives = (
            {}
            if turn.comes is None
            else {turn.source: ReceiveBuffer((self.numbers(turn.comes),), self.dtype, self.device)}
        )
        return self.job.comm.exchange("ring", sends, receives, step=2 * turn.number)

    def home(self, turn: Exchange, grads: list[KVTensors], wide: torch.dtype) -> Pending:
        """Starts the gradients of a turn's keys on their way to their owner; those of own keys come."""
        sends = {} if turn.comes is None else {turn.source: _row(grads)}
        receives = (
            {} if turn.goes is None else {turn.target: ReceiveBuffer((self.numbers(turn.goes),), wide, self.device)}
        )
        return self.job.comm.exchange("ring backward", sends, receives, step=2 * turn.number + 1)

    def cut(self, heard: dict[int, Tensor], rank: int, piece: Piece | None) -> list[KVTensors]:
        """A message of a rank as it was before it was sent."""
        if piece is None:
            return []
        heads = piece.heads[1] - piece.heads[0]
        shapes = [[(self.batch, heads, b - a, width) for width in self.widths] for a, b in piece.parts]
        flat = iter(heard[rank].split([math.prod(shape) for some in shapes for shape in some]))
        return [[next(flat).view(shape) for shape in some] for some in shapes]


def _row(parts: list[KVTensors]) -> Tensor:
    return torch.cat([x.reshape(-1) for part in parts for x in part])


def _came(
    job: ContextCall, piece: Piece | None, keys: list[KVTensors]
) -> Iterator[tuple[ReceivedKeys, list[QueryBlock]]]:
    """What came, stretch by stretch, and who meets it; what has been attended is let go."""
    if piece is not None:
        for cols in piece.parts:
            yield ReceivedKeys(keys.pop(0), piece.heads, cols[0]), met(job, partial(job.reach, cols=cols))


def _forward(job: ContextCall, query: Tensor, shards: KVTensors, sinks: Tensor | None) -> Partial:
    merged = Merged(query, job.value_dim)
    for _, piece, keys in Traffic(job, shards).coming():
        for came, spans in _came(job, piece, keys):
            for heads, rows, part in attended(job, query, came, spans):
                merged.add(rows, part, heads)
            came.keys.clear()
    merged.finish(sinks)
    return merged.result(query.dtype)


def _backward(sums: GradientSums, shards: KVTensors) -> KVTensors:
    traffic = Traffic(sums.job, shards)
    total = [torch.zeros_like(x, dtype=sums.wide) for x in shards]
    home: tuple[Piece | None, int, Pending] | None = None  # of the turn before: with more, a rank would hold all sums

    def add(piece: Piece, grads: list[KVTensors]) -> None:
        for to, part in zip(traffic.own(piece, total), grads, strict=True):
            for x, grad in zip(to, part, strict=True):
                x += grad

    def take_home() -> None:
        if home is not None:
            piece, source, pending = home
            came = traffic.cut(pending.wait(), source, piece)
            if piece is not None:
                add(piece, came)

    for turn, piece, keys in traffic.coming():
        grads: list[KVTensors] = []
        for came, spans in _came(sums.job, piece, keys):
            grads.append(sums.of_keys(came, spans)[1])
            came.keys.clear()
        if turn is None:
            assert piece is not None
            add(piece, grads)
            continue
        take_home()
        home = turn.goes, turn.target, traffic.home(turn, grads, sums.wide)
    take_home()
    return total


RING = Route(_forward, _backward, has_all=False)
