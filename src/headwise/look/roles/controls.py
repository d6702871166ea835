"""Random draws for the controls of links: other keys for a query, other queries for a key; seeded by shape only."""

from __future__ import annotations

import torch
from torch import Tensor

from .call_tokens import CallTokens


def shuffled(links: Tensor, scene: CallTokens) -> Tensor:
    """Return as many keys per query, drawn from those at allowed positions; seeded by the shape only."""
    draw = torch.Generator().manual_seed(links.numel())
    last = torch.full((links.shape[1],), scene.keys.shape[1] - 1, device="cpu")
    if scene.ahead is False:
        last = torch.arange(links.shape[1], device="cpu").clamp(max=scene.keys.shape[1] - 1)
    drawn = (torch.rand(links.shape, generator=draw, dtype=torch.float32, device="cpu") * (last + 1)[:, None]).long()
    return torch.where(links >= 0, drawn, -1)


def other_queries(links: Tensor, scene: CallTokens) -> Tensor:
    """Return for each linked query another one that may attend to its links, (B, T); itself if there is none."""
    draw = torch.Generator().manual_seed(links.numel())
    T = links.shape[1]
    first = links.amax(-1) + 1 if scene.ahead is False else torch.zeros(links.shape[:2], dtype=torch.long, device="cpu")
    room = (T - 1 - first).clamp(min=0)  # one of the T - first possible queries is the query itself
    drawn = first + (torch.rand(room.shape, generator=draw, dtype=torch.float32, device="cpu") * room).long()
    drawn = drawn + (drawn >= torch.arange(T, device="cpu")).long()
    return torch.where(room > 0, drawn.clamp(max=T - 1), torch.arange(T, device="cpu"))
