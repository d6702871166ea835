"""What tests of statistics share: features and targets of each kind, the definitions on the whole float64 matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from mask_cases import Sizes
from torch import Tensor

from headwise import Mask
from headwise.ops.reference import reference_weights
from headwise.ops.statistics import RowStatistics, row_statistics, statistics
from headwise.testing import make_qkv

# What a pass over the rows tells, but for features and targets.
NUMBERS = ("entropy", "largest", "largest_key", "distance", "keys", "sink", "offsets", "pooled", "pooled_rows", "rows")
OFFSETS = (0, -1, 2, -3, 1, 5, -7)  # both ways, in no order
TOLERANCE = 1e-5  # what the statistics promise, against the float64 matrix


def inputs(n: Sizes, dtype: torch.dtype = torch.float32, kind: str = "normal") -> tuple[Tensor, Tensor]:
    query, key, _ = make_qkv(*n, dtype=dtype, kind=kind)
    return query, key


@lru_cache(maxsize=512)  # the sizes of one test, for every instruction set
def extras(n: Sizes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Features of each kind and targets with rows that have none, two, or the same key as another row."""
    make = torch.Generator().manual_seed(7)
    features = {
        "first": torch.arange(n.S) == 0,
        "real (B, S)": torch.randn(n.B, n.S, generator=make),
        "integer": torch.arange(n.S) % 3,
    }
    targets = {
        "two": torch.randint(-1, n.S, (n.B, n.T, 2), generator=make),
        "few": torch.where(torch.arange(n.T) % 3 == 1, torch.arange(n.T) % n.S, -1)[:, None],
        "none": torch.full((n.T, 3), -1),
    }
    targets["empty list"] = torch.zeros(n.B, n.T, 0, dtype=torch.long)
    return features, targets


Definitions = tuple[dict[str, Tensor | dict[str, Tensor]], Tensor, Tensor]


def mean(total: Tensor, count: Tensor) -> Tensor:
    return torch.where(count > 0, total / count.clamp(min=1), 0.0)


def expected(
    p: Tensor, seen: Tensor, sink: Tensor, offsets: Sequence[int], pool: int, n: Sizes
) -> dict[str, Tensor | dict[str, Tensor]]:
    """The definitions, written on the whole matrix p (B, H, T, S); `seen` says what may be attended."""
    T, S = p.shape[2:]
    features, targets = extras(n)
    alive = seen.any(-1)
    pos, j = torch.arange(T)[:, None] + S - T, torch.arange(S)[None]
    on_keys = p.sum(-1)
    share = torch.where(on_keys[..., None] > 0, p / on_keys.clamp(min=1e-300)[..., None], 0.0)
    away = [(p.diagonal(o + S - T, -2, -1), seen.diagonal(o + S - T, -2, -1)) for o in offsets]  # where j - pos == o
    rows_in = torch.nn.functional.one_hot(torch.arange(T) * min(T, pool) // T, min(T, pool)).double()
    keys_in = torch.nn.functional.one_hot(torch.arange(S) * min(S, pool) // S, min(S, pool)).double()
    per_bin = alive.double() @ rows_in
    want: dict[str, Tensor | dict[str, Tensor]] = {
        "entropy": -(torch.xlogy(p, p).sum(-1) + torch.xlogy(sink, sink)),
        "largest": p.max(-1).values,
        "distance": (share * (pos - j).abs()).sum(-1),
        "keys": seen.sum(-1),
        "sink": sink,
        "offsets": torch.stack([mean(mass.sum(-1), count.sum(-1)) for mass, count in away], -1),
        "received": mean(p.sum(-2), seen.sum(-2)),
        "pooled": mean(rows_in.mT @ share @ keys_in, per_bin[..., None]),
        "pooled_rows": per_bin,
        "rows": alive.sum(-1),
    }
    want["features"] = {
        name: mean((p * f.double().view(-1, 1, 1, S)).sum((-1, -2)), alive.sum(-1)) for name, f in features.items()
    }
    aims: dict[str, Tensor] = {}
    for name, keys in targets.items():
        lists = keys.expand(n.B, *keys.shape[-2:])
        hits = torch.zeros(n.B, T, S + 1, dtype=torch.float64)
        hits = hits.scatter_add(-1, lists + 1, torch.ones_like(lists, dtype=torch.float64))[:, None, :, 1:]
        has = alive & (lists >= 0).any(-1)[:, None]
        aims[name] = mean((p * hits).sum((-1, -2)), has.sum(-1))
    want["targets"] = aims
    return want


def worst(result: RowStatistics, want: dict[str, Tensor | dict[str, Tensor]]) -> dict[str, float]:
    """The largest error of each statistic, relative where numbers exceed 1; shapes must agree."""
    errors = {}
    for name, truth in want.items():
        ours = getattr(result, name)
        pairs = [(ours, truth)] if isinstance(truth, Tensor) else [(ours[key], truth[key]) for key in truth]
        for mine, exact in pairs:
            assert mine.shape == exact.shape, (name, mine.shape, exact.shape)
            off = (mine.double() - exact).abs() / exact.double().abs().clamp(min=1)
            errors[name] = max(errors.get(name, 0.0), float(off.nan_to_num(nan=math.inf).max()) if off.numel() else 0.0)
    return errors


def check(
    n: Sizes,
    query: Tensor,
    key: Tensor,
    allowed: Tensor,
    tolerance: float = TOLERANCE,
    pool: int = 5,
    **options: Any,
) -> None:
    """Statistics against the float64 matrix of the same (rounded) inputs; with and without the second pass."""
    truth = definitions(n, query, key, allowed, tolerance, pool, **options)
    compare(n, query, key, truth, tolerance, pool, **options)


def definitions(
    n: Sizes, query: Tensor, key: Tensor, allowed: Tensor, tolerance: float, pool: int, **options: Any
) -> Definitions:
    """What the definitions make of the float64 matrix; which keys may pass for the largest, which may be attended."""
    sinks = options.pop("sinks", None)
    wide = None if sinks is None else sinks.double()
    p, _ = reference_weights(query.double(), key.double(), sinks=wide, **options)
    sink = (1 - p.sum(-1)).masked_fill(~allowed.any(-1), 0.0) if sinks is not None else torch.zeros_like(p[..., 0])
    largest = p >= p.max(-1, keepdim=True).values - tolerance  # ties may go either way
    return expected(p, allowed, sink, OFFSETS, pool, n), largest, allowed


def compare(
    n: Sizes, query: Tensor, key: Tensor, truth: Definitions, tolerance: float, pool: int, **options: Any
) -> None:
    """Statistics against their definitions; with and without the second pass."""
    want, largest, allowed = truth
    features, targets = extras(n)
    request = {**options, "features": features, "targets": targets}
    result = statistics(query, key, offsets=OFFSETS, pool=pool, **request)
    errors = worst(result, want)
    assert max(errors.values()) <= tolerance, errors
    top = result.largest_key
    assert torch.equal(top == -1, ~allowed.any(-1))
    assert largest.gather(-1, top.clamp(min=0)[..., None]).all()
    assert result.entropy.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    rows = row_statistics(query, key, offsets=OFFSETS, pool=pool, **request)
    errors = worst(rows, {name: x for name, x in want.items() if name != "received"})
    assert max(errors.values()) <= tolerance, ("one pass", errors)


def everything(n: Sizes) -> Tensor:
    return torch.ones(n.B, n.H, n.T, n.S, dtype=torch.bool)


def seen(mask: Mask | None, n: Sizes) -> Tensor:
    """What may be attended, (B, H, T, S)."""
    allowed = None if mask is None else mask.allowed(n.T, n.S)
    return everything(n) if allowed is None else allowed.expand(n.B, n.H, n.T, n.S)
