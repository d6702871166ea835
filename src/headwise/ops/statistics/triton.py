"""Statistics from the Triton kernels: those of rows from the output's pass, those of keys from a second pass.

The kernels leave sums on the device. The divisions that make statistics of them run there too, or on the CPU for a
caller that reads them there: it launches half as much, and waits once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Sums(NamedTuple):
    """What the kernels leave on the device: numbers of rows and sums, from which `fields_of` makes statistics."""

    floats: Tensor  # (5, B, H, T): entropy, distance, sink, largest score, largest weight
    ints: Tensor  # (2, B, H, T): key with the largest weight, number of keys
    pooled: Tensor  # (bins, B, H, columns): sums over the rows of a bin, of the bins of keys, then of features
    rows_of_bins: Tensor  # (bins,)
    mass: Tensor  # (B, H, n): summed weights on the key at each offset, then on each place of the targets' lists
    seen: Tensor  # (B, H, offsets): the rows that may attend to the key
    listed: Tensor  # (B|1, T, places): whether a place of the targets' lists is a key
    of_keys: dict[str, Any]  # the fields that took a second pass


def sums_by_triton(request: Request, value: Tensor | None, *, received: bool) -> tuple[Tensor | None, Sums]:
    """Return out (None without a value), and sums on the device, of which `fields_of` makes the statistics."""
    (query, key, options), (bins_T, bins_S) = request[:3], request.bins
    T, S, dev = query.shape[2], key.shape[2], query.device
    rules = backend.rules_of(options, T, S, dev)
    # Features other than 0 and 1 use the mass that each key receives: a product with them would have to be exact.
    exact = {name: x for name, x in request.features.items() if x.dtype == torch.bool}
    second = received or len(exact) < len(request.features) or bins_S + len(exact) > COLUMNS
    exact = {} if second else exact
    columns, used = _columns(exact, S, bins_S, query), bins_S + len(exact)
    ops = torch.ops.headwise
    together = value is None or max(query.shape[3], value.shape[3]) <= ONE_PASS
    out, _, floats, ints, of_rows = ops.triton_attend(
        query, key, value if together else None, *rules, columns, used, bins_S, True
    )
    if not together:
        out, *_ = ops.triton_attend(query, key, value, *rules, None, 0, 0, False)
    # Rows are first here; the bins of queries are runs of them.
    edges = torch.arange(bins_T - 1, (T + 1) * bins_T, T, device=dev) // bins_T
    lengths = torch.diff(edges)
    pooled = torch.segment_reduce(of_rows, "sum", lengths=lengths, unsafe=True)
    of_keys: dict[str, Any] = {}
    if second:
        mass, seen = ops.triton_received(query, key, floats, *rules)
        of_keys = of_second_pass(request, mass, seen, (ints[1] > 0).sum(-1), received=received)
    sums = Sums(floats, ints, pooled, lengths, *_picked(request, floats, rules), of_keys)
    return None if value is None else out, sums


def fields_of(request: Request, sums: Sums) -> dict[str, Any]:
    """Return the fields of `RowStatistics`, plus `received` if it was requested, on the device of the sums."""
    entropy, distance, sink, _, largest = sums.floats
    largest_key, keys = sums.ints.long()
    alive, n, bins_S = keys > 0, len(request.offsets), request.bins[1]
    rows = alive.sum(-1)
    widths = [x.shape[-1] for x in request.targets.values()]
    targets = zip(request.targets, sums.mass[..., n:].split(widths, -1), sums.listed.split(widths, -1), strict=True)
    # The kernel's share of a faint row is 0.
    counted = alive.permute(2, 0, 1).float()
    per_bin = torch.segment_reduce(counted, "sum", lengths=sums.rows_of_bins, unsafe=True).movedim(0, 2)
    totals = sums.pooled.movedim(0, 2)  # (B, H, bins, columns)
    fields: dict[str, Any] = dict(
        entropy=entropy,
        largest=largest,
        largest_key=largest_key,
        distance=distance,
        keys=keys,
        sink=sink,
        offsets=mean(sums.mass[..., :n], sums.seen),
        targets={name: mean(x.sum(-1), (alive & known.any(-1)[:, None]).sum(-1)) for name, x, known in targets},
        rows=rows,
        pooled=totals[..., :bins_S] / per_bin[..., None].clamp(min=1),
        pooled_rows=per_bin.long(),
    )
    if not sums.of_keys:
        featured = mean(totals[..., bins_S:].sum(2, dtype=torch.float64), rows[..., None]).unbind(-1)
        fields["features"] = dict(zip(request.features, featured, strict=True))
    return fields | sums.of_keys


def _columns(features: dict[str, Tensor], S: int, bins: int, query: Tensor) -> Tensor:
    """Return columns of zeros and ones for each key: whether it lies in a bin, then the features, then padding."""
    B = query.shape[0] if features else 1
    bin_of = torch.arange(0, S * bins, bins, device=query.device) // S
    columns = query.new_zeros(B, S, power(bins + len(features)))
    columns.scatter_(2, bin_of[None, :, None].expand(B, -1, -1), 1.0)
    if features:
        columns[:, :, bins : bins + len(features)] = torch.stack([*features.values()], -1)
    return columns


def _picked(request: Request, floats: Tensor, rules: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return `mass`, `seen` and `listed` of `Sums`, from the weights on those keys."""
    query, key, parts, n = request.query, request.key, [*request.targets.values()], len(request.offsets)
    B, T, S, dev = query.shape[0], query.shape[2], key.shape[2], query.device
    if n or not parts:
        beside = torch.arange(S - T, S, device=dev)[:, None] + _offsets(request.offsets, dev)
        parts = [beside.expand(B if parts else 1, -1, -1), *parts]
    places = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    weights, seen = torch.ops.headwise.triton_picks(query, key, places, floats, *rules)
    return weights.sum(2, dtype=torch.float64), seen[..., :n].sum(2), places[..., n:] >= 0


def _offsets(offsets: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the offsets on the device; where they are a run, without a copy from the host."""
    n = len(offsets)
    step = offsets[1] - offsets[0] if n > 1 else 1
    if n and step and offsets == tuple(range(offsets[0], offsets[0] + step * n, step)):
        return torch.arange(offsets[0], offsets[0] + step * n, step, device=device)
    return torch.tensor(offsets, dtype=torch.long, device=device)
