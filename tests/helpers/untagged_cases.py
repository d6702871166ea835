"""Messages of a backend that knows no tags, as NCCL: recorded in the processes of `ranks.py`, which have gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import headwise
from headwise import parallel
from headwise.cache import StaticCache
from headwise.distributed import comm, messages
from headwise.parallel import ShardedCache

Batch = list[tuple[str, int, int]]
"""send or receive, the other rank, bytes: what a rank starts at once."""
MASKS: dict[str, Any] = {
    "causal": headwise.causal,
    "window": lambda: headwise.causal() & headwise.window(9),
    "full": lambda: None,
    "documents": lambda: headwise.causal() & headwise.segments(torch.tensor([0] * 5 + [1] * 21 + [2] * 5)),
}
ORDERS = (("zigzag", "causal"), ("contiguous", "causal"), ("contiguous", "window"), ("zigzag", "documents"))
CASES = [(layout, order, mask) for layout in ("ring", "gather", "ulysses") for order, mask in ORDERS]
CASES.append(("ring", "uneven", "full"))  # few tokens, but for the last rank: messages of unlike numbers


@contextmanager
def untagged(record: list[Batch] | None) -> Iterator[None]:
    """Within, messages are those of a backend without tags: only recorded, or (None) sent that way."""
    tags, start = messages.has_tags, messages.started

    def recorded(group: Any, ops: Any, tag: int, failure: Any) -> Any:
        assert record is not None
        if ops:
            record.append([("receive" if run is dist.irecv else "send", rank, x.numel()) for rank, run, x in ops])
        messages.has_tags = tags
        try:
            return start(group, ops, tag, failure)
        finally:
            messages.has_tags = lambda _: False

    messages.has_tags = lambda _: False
    if record is not None:
        comm.started = recorded  # type: ignore[attr-defined]
    try:
        yield
    finally:
        messages.has_tags, comm.started = tags, start  # type: ignore[attr-defined]


def trained(layout: Any, order: Any, mask: str) -> list[Tensor]:
    """out and gradients of this rank's tokens: heads in messages of their own."""
    make, few = torch.Generator().manual_seed(3), []
    for heads in (4, 2, 2):
        x = torch.randn(1, heads, 31, 8, generator=make)
        if order == "uneven":
            last = dist.get_rank() == dist.get_world_size() - 1
            part = x[:, :, 4 * dist.get_rank() : None if last else 4 * dist.get_rank() + 4]
        else:
            part = parallel.split_sequence(x, order=order, dim=2)
        few.append(part.clone().requires_grad_())
    order = "contiguous" if order == "uneven" else order
    out = parallel.context_parallel(few[0], few[1], few[2], mask=MASKS[mask](), layout=layout, order=order)
    out.sum().backward()
    return [out.detach(), *(x.grad for x in few if x.grad is not None)]


@torch.no_grad()
def stepped() -> list[Tensor]:
    """A cache whose tokens are shared, of which a window is on few ranks."""
    cache = ShardedCache(StaticCache, 1, 2, 8, capacity=40, block=8)
    make = torch.Generator().manual_seed(3)
    x = torch.randn(1, 2, 30, 8, generator=make)
    cache.append(x, x)
    query = torch.randn(1, 4, 1, 8, generator=make)
    out: Tensor = headwise.attention(query, cache, mask=headwise.window(5))
    return [out]


def calls() -> dict[Any, Any]:
    """Name -> what runs, of each kind of call."""
    return {case: partial(trained, *case) for case in CASES} | {"step": stepped}


def recorded() -> dict[Any, list[Batch]]:
    """What this rank starts in each call, in its order."""
    batches: dict[Any, list[Batch]] = {}
    undo = messages_of_one_head()
    for name, run in calls().items():
        with untagged(batches.setdefault(name, [])):
            run()
    undo()
    return batches


def sent() -> dict[Any, bool]:
    """Whether calls whose messages have no tags give the bits of those whose messages have."""
    equal = {}
    for name, run in calls().items():
        want = run()
        with untagged(None):
            equal[name] = all(map(torch.equal, run(), want))
    return equal


def messages_of_one_head() -> Any:
    """Makes messages of a ring have one head each, as those of long texts have; returns what undoes it."""
    from headwise.parallel.context_layouts import ring

    before = ring.heads_at_once
    ring.heads_at_once = lambda heads, size: 1 if size > 300 else heads

    def undo() -> None:
        ring.heads_at_once = before

    return undo


def stuck(ranks: list[list[Batch]]) -> str:
    """Why ranks that do one batch after another would not end; empty where they do."""
    left = [[list(batch) for batch in own] for own in ranks]
    while True:
        moved = False
        for a, own in enumerate(left):
            while own and not own[0]:
                own.pop(0)
                moved = True
            for kind, b, size in list(own[0]) if own else ():
                theirs = left[b][0] if kind == "send" and left[b] else []
                matches = [one for one in theirs if one[:2] == ("receive", a)]
                if matches:
                    if matches[0][2] != size:
                        return f"rank {a} sends {size} bytes to rank {b}, which takes {matches[0][2]}"
                    own[0].remove((kind, b, size))
                    theirs.remove(matches[0])
                    moved = True
        if not any(left):
            return ""
        if not moved:
            return f"ranks wait for each other: {[own[0] if own else None for own in left]}"
