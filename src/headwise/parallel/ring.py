"""Layout `ring`: queries stay, keys and values come by, a piece at a time, while what is there is attended.

Ring Attention (Liu et al. 2023, arXiv 2310.01889): in step s rank r attends the keys of rank r - s. Here they go
straight from their owner to those whose queries may see them, and only the part that they may: a window is a halo, what
a mask rules out does not travel. A message has one stretch of some heads, so that little is held of what travels.
Backward the same once more, by the lse over all keys; gradients of keys and values are summed in float32 and go
straight home.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.comm import Block, Pending
from ..plan.places import Stretch, heads_at_once
from .job import Job
from .merge import Merged
from .rectangle import Partial
from .stay import Came, Layout, Met, Sums, Travellers, attended, met


class Piece(NamedTuple):
    """Some keys of some heads: what one message has."""

    cols: Stretch
    heads: Stretch


class Turn(NamedTuple):
    """What comes and what goes at the same time; None for nothing. `number` counts within a pair of ranks."""

    number: int
    source: int
    target: int
    comes: Piece | None
    goes: Piece | None


class Traffic:
    """Who sends which keys to whom in which order, for one rank of a job."""

    def __init__(self, job: Job, held: Travellers) -> None:
        self.job, self.held = job, held
        self.widths, self.batch, self.dtype = [x.shape[3] for x in held], held[0].shape[0], held[0].dtype
        me, N = job.comm.rank, job.comm.world
        self.mine = self.pieces(job.needed(me, me))
        self.turns: list[Turn] = []
        for step in range(1, N):
            source, target = (me - step) % N, (me + step) % N
            both = zip_longest(self.pieces(job.needed(me, source)), self.pieces(job.needed(target, me)))
            self.turns += [Turn(n, source, target, *pair) for n, pair in enumerate(both)]

    def pieces(self, parts: list[Stretch]) -> list[Piece]:
        """How keys are cut into messages: alike on the rank that sends them and on the one that gets them."""
        found, K = [], self.job.kv_heads
        for part in parts:
            few = heads_at_once(K, self.numbers(Piece(part, (0, 1))) * self.dtype.itemsize)
            found += [Piece(part, (h, min(h + few, K))) for h in range(0, K, few)]
        return found

    def numbers(self, piece: Piece) -> int:
        """How many numbers it has."""
        (a, b), (first, last) = piece
        return (b - a) * (last - first) * self.batch * sum(self.widths)

    def own(self, piece: Piece, tensors: Travellers) -> Travellers:
        """A piece of what this rank holds."""
        at = self.job.mine(self.job.keys[self.job.comm.rank], piece.cols)
        return [x[:, slice(*piece.heads), at] for x in tensors]

    def coming(self) -> Iterator[tuple[Turn | None, Piece | None, Travellers]]:
        """This rank's own keys, then those of others, turn by turn: those of the next are on their way meanwhile.

        Who takes them clears the list, and so lets go of them, before those after the next are on their way.
        """
        following = self._bring(0)
        for piece in self.mine:
            yield None, piece, self.own(piece, self.held)
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
        sends = {} if turn.goes is None else {turn.target: _row(self.own(turn.goes, self.held))}
        receives = {} if turn.comes is None else {turn.source: Block((self.numbers(turn.comes),), self.dtype)}
        return self.job.comm.exchange("ring", sends, receives, step=2 * turn.number)

    def home(self, turn: Turn, grads: Travellers, wide: torch.dtype) -> Pending:
        """Starts the gradients of a turn's keys on their way to their owner; those of own keys come."""
        sends = {} if turn.comes is None else {turn.source: _row(grads)}
        receives = {} if turn.goes is None else {turn.target: Block((self.numbers(turn.goes),), wide)}
        return self.job.comm.exchange("ring backward", sends, receives, step=2 * turn.number + 1)

    def cut(self, heard: dict[int, Tensor], rank: int, piece: Piece | None) -> Travellers:
        """A message of a rank as it was before it was sent."""
        if piece is None:
            return []
        (a, b), (first, last) = piece
        shapes = [(self.batch, last - first, b - a, width) for width in self.widths]
        parts = heard[rank].split([self.numbers(piece) * width // sum(self.widths) for width in self.widths])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _row(tensors: Travellers) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _met(job: Job, piece: Piece) -> list[Met]:
    return met(job, lambda rows: job.reach(rows, piece.cols))


def _forward(job: Job, query: Tensor, held: Travellers, sinks: Tensor | None) -> Partial:
    merged = Merged(query, job.value_dim)
    for _, piece, keys in Traffic(job, held).coming():
        if piece is not None:
            came = Came(keys, piece.heads, piece.cols[0])
            for heads, rows, part in attended(job, query, came, _met(job, piece)):
                merged.add(rows, part, heads)
            del came
        keys.clear()
    merged.finish(sinks)
    return merged.result(query.dtype)


def _backward(sums: Sums, held: Travellers) -> Travellers:
    traffic = Traffic(sums.job, held)
    total = [torch.zeros_like(x, dtype=sums.wide) for x in held]
    home: tuple[Piece | None, int, Pending] | None = None  # of the turn before: with more, a rank would hold all sums

    def add(piece: Piece, grads: Travellers) -> None:
        for x, grad in zip(traffic.own(piece, total), grads, strict=True):
            x += grad

    def take_home() -> None:
        if home is not None:
            piece, source, pending = home
            came = traffic.cut(pending.wait(), source, piece)
            if piece is not None:
                add(piece, came)

    for turn, piece, keys in traffic.coming():
        grads: Travellers = []
        if piece is not None:
            _, grads = sums.of_keys(Came(keys, piece.heads, piece.cols[0]), _met(sums.job, piece))
        keys.clear()
        if turn is None:
            assert piece is not None
            add(piece, grads)
            continue
        take_home()
        home = turn.goes, turn.target, traffic.home(turn, grads, sums.wide)
    take_home()
    return total


RING = Layout(_forward, _backward, has_all=False)
