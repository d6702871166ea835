"""Ranks that fail or disagree, in the processes of `ranks.py`: what each of the others says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import headwise
from headwise.parallel import Comm, context_parallel, join_sequence, split_sequence
from headwise.parallel.context_layouts import key_exchange as stay

TIMEOUT = 4.0  # seconds; who hangs does so for longer, and is back for the next case
HANGS = 7.0


def call(**options: Any) -> None:
    query = torch.randn(1, 2, 5, 4, requires_grad=True)
    arguments: dict[str, Any] = {"layout": "ring", "timeout": TIMEOUT, **options}
    context_parallel(query, query, query, **arguments).sum().backward()


def last_words(run: Callable[[], Any]) -> tuple[str, float]:
    """The error of a call, and after how many seconds it came."""
    start = time.monotonic()
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def fail(how: str, where: str) -> tuple[str, float]:
    """Rank 1 of a group of its own fails: before a call, or while others wait for its keys, or in its backward."""
    group = dist.new_group()  # of no use afterwards
    call(group=group, timeout=30.0)
    names = {"within": "attend", "backward": "gradient"}
    kept = {name: getattr(stay, name) for name in names.values()}

    def act(*arguments: Any, **options: Any) -> Any:
        if how == "dies":
            os._exit(7)
        if how == "raises":
            raise MemoryError("planted: no memory")
        time.sleep(HANGS)
        return kept[names[where]](*arguments, **options) if where in names else None

    if dist.get_rank() == 1:
        if where == "before":
            last_words(act)
        else:
            setattr(stay, names[where], act)
    try:
        return last_words(lambda: call(group=group))
    finally:
        for name, function in kept.items():
            setattr(stay, name, function)


def die(where: str) -> None:
    """Rank 1 ends; what the others say is raised, for `ranks.py` to tell."""
    text, _ = fail("dies", where)
    raise AssertionError(text)


def die_late() -> None:
    """Rank 1 ends while rank 2 waits for rank 0, which comes later still, sees the end and sends nothing."""
    group = dist.new_group()
    call(group=group, timeout=30.0)
    time.sleep({0: 2.0, 1: 1.0, 2: 0.0}[dist.get_rank()])
    if dist.get_rank() == 1:
        os._exit(7)
    raise AssertionError(last_words(lambda: call(group=group))[0])


def wrong_argument() -> str:
    """Rank 1's own arguments are wrong."""
    return last_words(lambda: call(scale=float("nan") if dist.get_rank() == 1 else None, timeout=30.0))[0]


def used_again() -> tuple[str, str]:
    """What is said when a group is used that has failed."""
    group, said = dist.new_group(), []
    for _ in range(2):
        said.append(last_words(lambda: call(group=group, timeout=0.5) if dist.get_rank() else None)[0])
    return said[0], said[1]


def disagree(on: str) -> None:
    """Rank 1 passes something else."""
    other = dist.get_rank() == 1
    query = torch.randn(1, 2, 5, 4)
    arguments: dict[str, Any] = {"layout": "ring"}
    if on == "shape" and other:
        query = torch.randn(1, 2, 5, 6)
    if on == "dtype" and other:
        query = query.bfloat16()
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
        query = split_sequence(torch.randn(1, 2, 16, 4), dim=2)
        arguments["order"] = "zigzag"
    if on == "gradients" and other:
        query.requires_grad_()
    context_parallel(query, query, query, **arguments)


def disagreements(names: Sequence[str]) -> dict[str, str]:
    """What is said to each disagreement; the group goes on."""
    return {on: last_words(partial(disagree, on))[0] for on in names}


def short_message() -> list[str]:
    """Ranks that did not agree: the one would take a short message for a whole one, were sizes not agreed on first."""
    comm, said = Comm.of(), []
    try:
        answers = comm.agree("sizes", {"width": 3}, {"rows": comm.rank + 1})
        parts = comm.gather("sizes", torch.ones(comm.rank + 1, 3), [(one["rows"], 3) for one in answers])
        said.append(str([tuple(part.shape) for part in parts]))
        comm.agree("sizes", {"width": 3 + comm.rank})
    except RuntimeError as error:
        said.append(str(error))
    return said


def counted() -> list[dict[str, int]]:
    """Bytes that each operation of `Comm` sends."""
    comm, counts = Comm.of(), []

    def count(run: Any) -> None:
        comm.agree("count", {})
        before = dict(comm.sent)
        run()
        counts.append({k: n - before.get(k, 0) for k, n in comm.sent.items() if n != before.get(k, 0)})

    x, world = torch.arange(6.0), comm.world
    count(lambda: comm.gather("gather", x, [(6,)] * world))
    count(lambda: comm.scatter("scatter", [x] * world, [(6,)] * world))
    count(lambda: comm.reduce_scatter("reduce", [x] * world))
    count(lambda: comm.all_reduce("all", x))
    assert comm.all_reduce("all", x, step=3).tolist() == (x * world).tolist()
    assert comm.reduce_scatter("reduce", [x.bfloat16()] * world, step=9).tolist() == (x * world).tolist()
    return counts
