"""Ranks that fail or disagree, in the processes of `ranks.py`: what each of the others says."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import headwise
from headwise.parallel import Comm, context_parallel, join_sequence, ring, split_sequence

SLEEP = 60.0  # longer than any timeout here: who hangs is ended with its pool


def call(**options: Any) -> None:
    query = torch.randn(1, 2, 5, 4, requires_grad=True)
    arguments: dict[str, Any] = {"layout": "ring", "timeout": 3.0, **options}
    context_parallel(query, query, query, **arguments).sum().backward()


def die(rank: int, where: str) -> None:
    """One rank ends: before a call, or while others wait for its keys."""
    stop(rank, where, lambda *_: os._exit(7))


def hang(rank: int, where: str) -> None:
    """One rank stops to answer."""
    stop(rank, where, lambda *_: time.sleep(SLEEP))


def stop(rank: int, where: str, how: Any) -> None:
    if dist.get_rank() == rank:
        if where == "before":
            how()
        setattr(ring, {"within": "attend", "backward": "gradient"}[where], how)
    call()


def raises(rank: int, where: str) -> None:
    """One rank's own arguments are wrong, or its kernel fails."""
    if dist.get_rank() == rank and where == "within":

        def fail(*_: Any) -> None:
            raise MemoryError("planted: no memory")

        ring.attend = fail  # type: ignore[assignment]
    call(scale=float("nan") if dist.get_rank() == rank and where == "before" else None)


def disagree(on: str) -> None:
    """The second rank passes something else."""
    other = dist.get_rank() == 1
    query = torch.randn(1, 2, 5, 4)
    key, arguments = query, {"layout": "ring", "timeout": 3.0}
    if on == "shape" and other:
        query = key = torch.randn(1, 2, 5, 6)
    if on == "dtype" and other:
        query = key = query.bfloat16()
    if on == "mask":
        arguments["mask"] = headwise.window(3 if other else 4)
    if on == "numbers of a mask":
        arguments["mask"] = headwise.segments(torch.arange(5 * dist.get_world_size()) // (3 if other else 4))
    if on == "sinks":
        arguments["sinks"] = torch.full((2,), float(other))
    if on == "layout" and other:
        arguments["layout"] = "gather"
    if on == "order" and other:
        join_sequence(query)
    if on == "zigzag":
        query = key = split_sequence(torch.randn(1, 2, 13, 4), dim=2)
        arguments["order"] = "zigzag"
    if on == "gradients" and other:
        query.requires_grad_()
    context_parallel(query, key, key, **arguments)


def twice() -> None:
    """A call, one that fails, and one more: no further one is tried."""
    call()
    try:
        call(timeout=0.5 if dist.get_rank() else 3.0) if dist.get_rank() else time.sleep(2)
    except RuntimeError:
        call()


def short_message() -> list[str]:
    """Ranks that did not agree: the one would take a short message for a whole one, were sizes not agreed on first."""
    comm, said = Comm.of(timeout=3.0), []
    try:
        told = comm.agree("sizes", {"width": 3}, {"rows": comm.rank + 1})
        parts = comm.gather("sizes", torch.ones(comm.rank + 1, 3), [(one["rows"], 3) for one in told])
        said.append(str([tuple(part.shape) for part in parts]))
        comm.agree("sizes", {"width": 3 + comm.rank})
    except RuntimeError as error:
        said.append(str(error))
    return said


def counted() -> list[dict[str, int]]:
    """Bytes that each operation of `Comm` sends."""
    comm, found = Comm.of(), []

    def count(run: Any) -> None:
        comm.agree("count", {})
        before = dict(comm.sent)
        run()
        found.append({k: n - before.get(k, 0) for k, n in comm.sent.items() if n != before.get(k, 0)})

    x, world = torch.arange(6.0), comm.world
    count(lambda: comm.gather("gather", x, [(6,)] * world))
    count(lambda: comm.scatter("scatter", [x] * world, [(6,)] * world))
    count(lambda: comm.reduce_scatter("reduce", [x] * world))
    count(lambda: comm.all_reduce("all", x))
    assert comm.all_reduce("all", x, step=3).tolist() == (x * world).tolist()
    assert comm.reduce_scatter("reduce", [x.bfloat16()] * world, step=9).tolist() == (x * world).tolist()
    return found
