"""A run over many texts with several processes: each reads some of the batches, the first has all sums.

All processes iterate over every text and form the same batches, so the number of processes does not change a bit of a
forward pass; the sums are integers, so their order does not matter either.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ...distributed.workers import Processes
from ...files.atomic_file import check_destination
from ..inputs import ids as inputs
from ..roles.call_tokens import Passage
from ..roles.catalog import TEXT
from .forward import OnProgress, Reader, batches
from .resume import load, pack, save, unpack
from .sums import LayerTally

DIGEST = 32


@dataclass
class Shared:
    """One process's reader and the shared progress of all processes.

    If a state is kept, only the reader of the first process has sums between two blocks.
    """

    reader: Reader
    processes: Processes
    about: str  # the fingerprint of the run, which is the same in all processes
    state: str | os.PathLike[str] | None = None  # the file in which the first process saves the sums
    progress: OnProgress | None = None  # called by the first process
    done: int = 0  # the number of texts read by all processes
    length: int = 0  # the number of tokens in them
    saves: bool = False  # whether the first process saves a state and so needs all sums after each block
    loads: list[int] = field(init=False)  # the number of tokens that each process has passed through the model

    def __post_init__(self) -> None:
        self.loads = [0] * self.processes.size

    def begin(self) -> None:
        """Continue from a saved state of this run, which may come from another number of processes."""

        def join(abouts: Iterator[bytes]) -> bytes:
            for rank, about in enumerate(abouts):
                if about != self.about.encode():
                    raise ValueError(
                        f"rank {rank} looks at another corpus, model, version or options than rank 0; start all "
                        "processes alike, on the same files"
                    )
            if self.state is not None:
                if Path(self.state).exists():
                    self.reader.tallies, self.done, self.length = load(self.state, self.about)
                check_destination(self.state)
            return json.dumps([self.done, self.length, self.state is not None]).encode()

        self.done, self.length, self.saves = json.loads(self.processes.exchange(self.about.encode, join))

    def block(self, texts: Callable[[], list[list[int]]], batch: int) -> bool:
        """Read the next texts, each process its batches; return False at the end, when all sums are merged."""
        rows: list[list[int]] = []

        def work() -> bytes:
            rows.extend(texts())
            facts = self.reader.facts
            for row in rows:
                inputs.check_fits(row, facts.vocabulary, facts.positions)
            for some in batches((Passage(row, text=self.done + n) for n, row in enumerate(rows)), batch):
                if self.mine(some):
                    self.reader.read(some, TEXT)
            digest = hashlib.sha256(json.dumps(rows).encode()).digest()
            return digest + (self._handed_over() if self.saves or not rows else b"")

        def join(parts: Iterator[bytes]) -> bytes:
            self._merge(parts)
            if rows and self.state is not None:
                save(self.state, self.about, self.reader.tallies, self.done + len(rows), self.length + _length(rows))
            if rows and self.progress is not None:
                self.progress(self.done + len(rows), 0)
            return json.dumps([[tally.place, tally.heads] for tally in self.reader.tallies]).encode()

        layers = json.loads(self.processes.exchange(work, join))
        self.done += len(rows)
        self.length += _length(rows)
        if not rows and not self.processes.first:  # a process without a batch also needs the layers
            self.reader.tallies = [LayerTally(place, heads) for place, heads in layers]
        return bool(rows)

    def finish(self, more: Callable[[], object]) -> None:
        """Run `more`, in which each process reads the batches that are `mine`; then share the sums with all."""

        def work() -> bytes:
            more()
            return bytes(DIGEST) + self._handed_over()

        def join(parts: Iterator[bytes]) -> bytes:
            self._merge(parts)
            return pack(self.about, self.reader.tallies) if self.processes.size > 1 else b""

        sums = self.processes.exchange(work, join)
        if not self.processes.first:
            self.reader.tallies = unpack(sums, self.about)[0]

    def mine(self, passages: Sequence[Passage]) -> bool:
        """Return whether this process reads a batch: the one with the fewest tokens does. Call it for each batch."""
        rank = self.loads.index(min(self.loads))
        self.loads[rank] += _length([passage.ids for passage in passages])
        return rank == self.processes.rank

    def _handed_over(self) -> bytes:
        """Return the sums of this process and reset them; the first process keeps its sums."""
        if self.processes.first:
            return b""
        packed = pack(self.about, self.reader.tallies)
        self.reader.tallies = [LayerTally(tally.place, tally.heads) for tally in self.reader.tallies]
        return packed

    def _merge(self, parts: Iterator[bytes]) -> None:
        """Add the sums of the other processes to those of the first."""
        ours = next(parts)[:DIGEST]
        for rank, part in enumerate(parts, 1):
            if part[:DIGEST] != ours:
                raise ValueError(
                    f"rank {rank} has read other texts than rank 0 after the first {self.done}; give all processes the "
                    "same corpus"
                )
            if len(part) > DIGEST:
                others = unpack(part[DIGEST:], self.about)[0]
                mine = self.reader.tallies
                for tally, other in zip(mine, others, strict=False):
                    tally.merge(other)
                mine += others[len(mine) :]


def check_whole(model: nn.Module, processes: Processes) -> None:
    """Raise ValueError if the processes that share texts each hold a part of the weights: they read texts together."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")  # not imported: nothing is split
    if processes.size == 1 or distributed is None:
        return
    ranks = {*dist.get_process_group_ranks(processes.group)}
    for name, weight in model.named_parameters():
        if isinstance(weight, distributed.DTensor):
            mesh = weight.device_mesh
            for dim, placement in enumerate(weight.placements):
                together = ranks & {*dist.get_process_group_ranks(mesh.get_group(dim))}
                if placement.is_shard() and len(together) > 1:
                    raise ValueError(
                        f"group is of processes that have the model each; of {name} ranks {sorted(together)} have a "
                        "part each, and read all texts together: give the other dimension of their mesh, such as "
                        'mesh["data"].get_group(), or leave group out'
                    )


def _length(rows: Sequence[Sequence[int]]) -> int:
    return sum(map(len, rows))
