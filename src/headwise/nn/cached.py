"""A module's step with a cache: new keys and values go in, and queries attend to all that is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.masks.compose import Mask
from ..ops.storage.held import Held
from ..shapes.kinds import check_tensor


def positions_of(lengths: Sequence[int], T: int, device: torch.device) -> Tensor:
    """Where T new tokens stand: behind those that each row has seen; (T,), or (B, T) where rows differ."""
    seen = torch.tensor(lengths, device=device)
    alike = len(set(lengths)) == 1
    return torch.arange(T, device=device) + (seen[0] if alike else seen[:, None])


def step(
    inner: Callable[..., Tensor],
    cache: Held,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    lengths: Sequence[int] | None = None,
    mask: Mask | Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """(B, H, T, V): what `inner` gives for the queries, once their keys and values are in the cache.

    A cache that takes so many tokens at a time only (a rolling one) gets them, and is attended, piece by piece.
    """
    if gate is not None:  # refused before the cache has changed
        check_tensor("gate", gate, "a float tensor (H,), (B, H), (B, H, T) or (B, H, T, V)")
    T = query.shape[2]
    most = getattr(cache, "chunk", T)
    whole = key is None or most >= T
    outs = []
    for first in [0] if whole else range(0, T, most):
        part = slice(None) if whole else slice(first, first + most)
        if key is not None:
            here = min(most, T - first)
            some = None if lengths is None else [min(max(n - first, 0), here) for n in lengths]
            cache.append(key[:, :, part], None if value is None else value[:, :, part], lengths=some)
        gated: dict[str, Any] = {}
        if gate is not None:
            gated["gate"] = gate[:, :, part] if gate.ndim > 2 else gate
        outs.append(inner(query[:, :, part], cache, None, mask=mask, **gated))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
