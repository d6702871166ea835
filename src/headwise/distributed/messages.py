"""Messages between ranks: receive buffers, pending messages, and their start on each backend."""

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
    """The shape, dtype and device of a tensor to receive from another rank."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device


class Pending:
    """Pending messages. `wait` returns the received tensors: rank -> tensor."""

    def __init__(self, comm: Any, operation: str) -> None:
        self.comm, self.operation = comm, operation
        self.works: list[tuple[int, Any, Any]] = []
        self.heard: dict[int, Tensor] = {}

    def wait(self) -> dict[int, Tensor]:
        """Wait until all messages are sent and received; return the received tensors.

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
    """Return whether the device's backend separates messages by tag: gloo does, NCCL uses the order of their start."""
    return device.type == "cpu"


def started(
    group: ProcessGroup, ops: list[Op], tag: int, failure: Callable[[int, Exception], Exception]
) -> list[tuple[int, Any, Any]]:
    """Start all sends and receives of a rank; return (rank, work, objects to keep alive) for each.

    On the CPU they are started one by one and separated by the tag. On other devices they are one batch: such a backend
    (NCCL) has no tags and runs operations in order, so two ranks that both receive before they send would deadlock. All
    ranks create their batches in the same order.

    Args:
        group: the process group.
        ops: the sends and receives.
        tag: the tag of the messages.
        failure: returns the error to raise if a message cannot be started, from its rank and the cause.
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
        except RuntimeError as error:  # gloo: the connection is already closed
            raise failure(rank, error) from error
    return begun
