"""Messages from rank to rank: what is to come, what is on its way, and how a backend starts them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Shape = tuple[int, ...]
Op = tuple[int, Any, Tensor]
"""The other rank, `dist.irecv` or `dist.isend`, and the bytes."""


class ReceiveBuffer(NamedTuple):
    """What is to come from another rank, and where it is to lie."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


class Pending:
    """Messages on their way. `wait` gives what came: rank -> tensor."""

    def __init__(self, comm: Any, operation: str) -> None:
        self.comm, self.operation = comm, operation
        self.works: list[tuple[int, Any, Any]] = []
        self.heard: dict[int, Tensor] = {}

    def wait(self) -> dict[int, Tensor]:
        """Everything has come and gone.

        Raises:
            RankError: a rank has ended, hangs or has raised.
        """
        until = time.monotonic() + self.comm.timeout - self.comm.grace
        while self.works:
            rank, work, _ = self.works[0]
            left = max(until - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                raise self.comm.failure(self.operation, rank, error) from error
            self.works.pop(0)
        return self.heard


def has_tags(device: torch.device) -> bool:
    """Whether messages from there are told apart by their tags: gloo's are, NCCL's come in the order of their start."""
    return device.type == "cpu"


def started(
    group: ProcessGroup, ops: list[Op], tag: int, failure: Callable[[int, Exception], Exception]
) -> list[tuple[int, Any, Any]]:
    """Starts what a rank sends and takes at once: (rank, work, what must live as long) each.

    On the CPU one by one, told apart by the tag. Elsewhere all as one batch: such a backend (NCCL) knows no tags and
    does one thing after another, so that two ranks which both take before they send would wait for each other. All
    ranks make their batches in one order.

    Args:
        failure: what to raise where a message cannot be started, from its rank and the error.
    """
    if ops and not has_tags(ops[0][2].device):
        try:
            works = dist.batch_isend_irecv([dist.P2POp(run, x, group=group, group_peer=rank) for rank, run, x in ops])
        except RuntimeError as error:
            raise failure(ops[0][0], error) from error
        return [(ops[0][0], work, ops) for work in works]
    begun: list[tuple[int, Any, Any]] = []
    for rank, run, x in ops:
        peer = {"group_src" if run is dist.irecv else "group_dst": rank}
        try:
            begun.append((rank, run(x, group=group, tag=tag, **peer), x))
        except RuntimeError as error:  # gloo: a connection that is closed already
            raise failure(rank, error) from error
    return begun
