"""Statistics from the native kernel: those of rows from the output pass, those of keys from a second pass.

The kernel sums over rows in float64; this module turns the sums into means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import Call, refusal
from ..native import backend as native
from ..native.mask_arguments import lowered
from ..native.picked_keys import is_picked
from ..tracing import without_numbers
from .means import mean, of_second_pass
from .request import Request


def serves(request: Request, value: Tensor | None) -> bool:
    """Return whether the kernel supports the call: the limits of `native`, and no tracing (the code reads numbers)."""
    call = Call(request.query, request.key, request.key if value is None else value, request.options)
    # Statistics of picked keys would need a map of T x S bits; plain operations have one block of it at a time.
    return not without_numbers() and not is_picked(request.options.mask) and refusal(native.LIMITS, call) is None


def measure_natively(request: Request, value: Tensor | None, *, received: bool) -> tuple[Tensor, dict[str, Any]]:
    """Return out (V = 0 without a value) and the fields of `RowStatistics`, plus `received` if it is requested."""
    query, key, targets = request.query, request.key, request.targets
    rules = lowered(request.options, query.shape[2], key.shape[2])
    picks, slots = _picks(request)
    finite = all(not x.is_floating_point() or bool(x.isfinite().all()) for x in request.features.values())
    second = received or not finite  # because 0 times NaN is NaN, such features use the mass that each key receives
    columns = None if second or not request.features else torch.stack([*request.features.values()], -1).float()
    n, sums = len(request.offsets), len(request.offsets) + len(targets)
    out, _, numbers, places, totals, pooled = torch.ops.headwise.attend_statistics(
        query, key, value, *rules, picks, slots, sums, columns, request.bins[1], request.bins[0]
    )
    entropy, distance, sink, _, top, largest = numbers
    largest_key, keys = places
    alive = keys > 0
    rows, mass, seen = alive.sum(-1), totals[..., :sums], totals[..., sums : 2 * sums]
    fields: dict[str, Any] = dict(
        entropy=entropy,
        largest=largest,
        largest_key=largest_key,
        distance=distance,
        keys=keys,
        sink=sink,
        offsets=mean(mass[..., :n], seen[..., :n]),
        targets={
            name: mean(mass[..., n + i], (alive & (x >= 0).any(-1)[:, None]).sum(-1))
            for i, (name, x) in enumerate(targets.items())
        },
        rows=rows,
        pooled=mean(pooled[..., :-1], pooled[..., -1:]),
        pooled_rows=pooled[..., -1].long(),
    )
    if second:
        mass, seen = torch.ops.headwise.attend_received(query, key, top, largest, *rules)
        fields |= of_second_pass(request, mass, seen, rows, received=received)
    else:
        featured = totals[..., 2 * sums :].unbind(-1)
        fields["features"] = {name: mean(x, rows) for name, x in zip(request.features, featured, strict=True)}
    return out, fields


def _picks(request: Request) -> tuple[Tensor, Tensor]:
    """Return the keys whose weights are summed, (B|1, T, n) long, -1 = none, and the sum of each column, (n,) long.

    The offsets come first, with one sum each; then the targets, with one sum per name.
    """
    T, S = request.query.shape[2], request.key.shape[2]
    pos, away = torch.arange(T, device="cpu") + (S - T), torch.tensor(request.offsets, dtype=torch.long, device="cpu")
    beside = (pos + away[:, None]).clamp(min=-1).mT  # the kernel ignores offsets beyond the last key
    steps = torch.arange(len(away), device="cpu")
    slots = [
        steps,
        *(torch.full((x.shape[-1],), len(steps) + n, device="cpu") for n, x in enumerate(request.targets.values())),
    ]
    if not request.targets:
        return beside[None], steps
    B = request.query.shape[0]
    return torch.cat([beside.expand(B, -1, -1), *request.targets.values()], -1), torch.cat(slots)
