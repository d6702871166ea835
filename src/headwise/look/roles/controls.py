"""What the controls of links draw: other keys for a query, other queries for a key; seeded by the shape alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .call_tokens import CallTokens


def shuffled(links: Tensor, scene: CallTokens) -> Tensor:
    """As many keys a query, drawn from those that it may attend by its position; seeded by the shape alone."""
    draw = torch.Generator().manual_seed(links.numel())
    last = torch.full((links.shape[1],), scene.keys.shape[1] - 1, device="cpu")
    if scene.ahead is False:
        last = torch.arange(links.shape[1], device="cpu").clamp(max=scene.keys.shape[1] - 1)
    drawn = (torch.rand(links.shape, generator=draw, dtype=torch.float32, device="cpu") * (last + 1)[:, None]).long()
    return torch.where(links >= 0, drawn, -1)


def other_queries(links: Tensor, scene: CallTokens) -> Tensor:
    """(B, T): for each linked query another one of its text that may attend its links; itself where there is none."""
    draw = torch.Generator().manual_seed(links.numel())
    T = links.shape[1]
    first = links.amax(-1) + 1 if scene.ahead is False else torch.zeros(links.shape[:2], dtype=torch.long, device="cpu")
    room = (T - 1 - first).clamp(min=0)  # of the T - first queries that may, one is the query itself
    drawn = first + (torch.rand(room.shape, generator=draw, dtype=torch.float32, device="cpu") * room).long()
    drawn = drawn + (drawn >= torch.arange(T, device="cpu")).long()
    return torch.where(room > 0, drawn.clamp(max=T - 1), torch.arange(T, device="cpu"))
