"""Statistics from the Triton kernels: those of rows from the output's pass, those of keys from a second pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import Call, refusal
from ..triton import triton_backend as backend
from ..triton.launch import power
from .means import mean, of_second_pass
from .request import Request

DEVICES = ("cuda",)
COLUMNS = 64
"""The most bins of keys and features together: the kernel keeps a sum of each for each row."""


ONE_PASS = 64
"""Up to this head dim one pass computes output and statistics; with more it would lack registers, and there are two."""


def serves(request: Request, value: Tensor | None) -> bool:
    """Return whether the kernels support the call: the limits of the backend, and room for its sums."""
    call = Call(request.query, request.key, request.key if value is None else value, request.options)
    return call.device_type in DEVICES and request.bins[1] <= COLUMNS and refusal(backend.LIMITS, call) is None


def measure_by_triton(
    request: Request, value: Tensor | None, *, received: bool
) -> tuple[Tensor | None, dict[str, Any]]:
    """Return out (None without a value) and the fields of `RowStatistics`, plus `received` if it is requested."""
    (query, key, options), (bins_T, bins_S) = request[:3], request.bins
    T, S, dev = query.shape[2], key.shape[2], query.device
    rules = backend.rules_of(options, T, S, dev)
    # Others than 0 and 1 use the mass that each key receives: a product with them would have to be exact.
    exact = {name: x for name, x in request.features.items() if x.dtype == torch.bool}
    second = received or len(exact) < len(request.features) or bins_S + len(exact) > COLUMNS
    columns = _columns({} if second else exact, S, bins_S, query)
    used = bins_S if second else bins_S + len(exact)
    ops = torch.ops.headwise
    together = value is None or max(query.shape[3], value.shape[3]) <= ONE_PASS
    out, _, floats, ints, sums = ops.triton_attend(
        query, key, value if together else None, *rules, columns, used, bins_S, True
    )
    if not together:
        out, *_ = ops.triton_attend(query, key, value, *rules, None, 0, 0, False)
    entropy, distance, sink, _, largest = floats
    largest_key, keys = ints.long()
    alive = keys > 0
    rows = alive.sum(-1)
    fields: dict[str, Any] = dict(
        entropy=entropy, largest=largest, largest_key=largest_key, distance=distance, keys=keys, sink=sink, rows=rows
    )
    fields |= _picked(request, floats, rules, alive)
    # Rows are first here; the bins of queries are runs of them. The kernel's share of a faint row is 0.
    edges = torch.arange(bins_T + 1, device=dev) * T
    lengths = torch.diff((edges + bins_T - 1) // bins_T)
    totals = torch.segment_reduce(sums, "sum", lengths=lengths, unsafe=True).movedim(0, 2)  # (B, H, bins, columns)
    counted = alive.permute(2, 0, 1).float()
    per_bin = torch.segment_reduce(counted, "sum", lengths=lengths, unsafe=True).movedim(0, 2)
    fields["pooled"] = totals[..., :bins_S] / per_bin[..., None].clamp(min=1)
    fields["pooled_rows"] = per_bin.long()
    if second:
        mass, seen = ops.triton_received(query, key, floats, *rules)
        fields |= of_second_pass(request, mass, seen, rows, received=received)
    else:
        featured = mean(totals[..., bins_S:].sum(2, dtype=torch.float64), rows[..., None]).unbind(-1)
        fields["features"] = dict(zip(exact, featured, strict=True))
    return None if value is None else out, fields


def _columns(features: dict[str, Tensor], S: int, bins: int, query: Tensor) -> Tensor:
    """Return columns of zeros and ones for each key: whether it lies in a bin, then the features, then padding."""
    device = query.device
    bin_of = torch.arange(S, device=device) * bins // S
    columns = (bin_of[:, None] == torch.arange(power(bins + len(features)), device=device)).to(query.dtype)[None]
    if features:
        columns = columns.repeat(next(iter(features.values())).shape[0], 1, 1)
        columns[:, :, bins : bins + len(features)] = torch.stack([*features.values()], -1)
    return columns


def _picked(request: Request, floats: Tensor, rules: tuple[Any, ...], alive: Tensor) -> dict[str, Any]:
    """Return `offsets` and `targets`, from the weights on those keys."""
    query, key, targets = request.query, request.key, request.targets
    (B, _, T, _), S, dev, n = query.shape, key.shape[2], query.device, len(request.offsets)
    offsets = _offsets(request.offsets, dev)
    places = ((torch.arange(T, device=dev) + (S - T))[:, None] + offsets)[None]
    if targets:
        places = torch.cat([places.expand(B, -1, -1), *targets.values()], -1)
    weights, seen = torch.ops.headwise.triton_picks(query, key, places, floats, *rules)
    mass = weights.sum(2, dtype=torch.float64)
    of_targets = mass[..., n:].split([x.shape[-1] for x in targets.values()], -1)
    return {
        "offsets": mean(mass[..., :n], seen[..., :n].sum(2)),
        "targets": {
            name: mean(part.sum(-1), (alive & (x >= 0).any(-1)[:, None]).sum(-1))
            for (name, x), part in zip(targets.items(), of_targets, strict=True)
        },
    }


def _offsets(offsets: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the offsets on the device; where they are a run, without a copy from the host."""
    n = len(offsets)
    step = offsets[1] - offsets[0] if n > 1 else 1
    if n and step and offsets == tuple(range(offsets[0], offsets[0] + step * n, step)):
        return torch.arange(offsets[0], offsets[0] + step * n, step, device=device)
    return torch.tensor(offsets, dtype=torch.long, device=device)
