"""Statistics from the native kernel: each row's from the pass that makes the output, each key's from a second pass.

Here they become means over rows, by sums in float64.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..call import Call, refusal
from ..native import backend as native
from ..native.lowering import lowered
from .request import Asked


def serves(asked: Asked, value: Tensor | None) -> bool:
    """Whether the kernel takes the call: what `native` takes, and no torch.compile, which sees through torch ops."""
    value = asked.key if value is None else value
    call = Call(asked.query, asked.key, value, asked.mask, asked.scale, asked.softcap, asked.sinks, 0.0, False)
    return not torch.compiler.is_compiling() and refusal(native.LIMITS, call) is None


def measure(asked: Asked, value: Tensor | None, *, received: bool) -> tuple[Tensor, dict[str, Any]]:
    """out, of V = 0 without a value, and the fields of `RowStatistics`, with `received` of `HeadStatistics`."""
    query, key, targets = asked.query, asked.key, asked.targets
    rules = _rules(asked)
    picks, slots = _picks(asked)
    finite = all(not x.is_floating_point() or bool(x.isfinite().all()) for x in asked.features.values())
    second = received or not finite  # 0 times NaN is NaN: there the masses that keys receive serve
    columns = None if second or not asked.features else torch.stack([*asked.features.values()], -1).float()
    R, C = asked.bins
    out, _, numbers, places, picked, binned, featured = torch.ops.headwise.attend_statistics(
        query, key, value, *rules, picks, slots, len(asked.offsets) + len(targets), columns, C
    )
    entropy, distance, sink, mass, top, largest = numbers
    largest_key, keys = places
    alive = keys > 0
    rows = alive.sum(-1)
    beside, aimed = picked[..., : len(asked.offsets)], picked[..., len(asked.offsets) :]
    found: dict[str, Any] = dict(
        entropy=entropy,
        largest=largest,
        largest_key=largest_key,
        distance=distance,
        keys=keys,
        sink=sink,
        offsets=_mean(_held(beside, -2), (beside != UNSEEN).sum(-2)),
        targets={
            name: _mean(_held(aimed[..., n], -1), (alive & (x >= 0).any(-1)[:, None]).sum(-1))
            for n, (name, x) in enumerate(targets.items())
        },
        rows=rows,
    )
    found["pooled"], found["pooled_rows"] = _pooled(binned, alive & (mass > 0), R)
    if second:
        given, seen = torch.ops.headwise.attend_received(query, key, top, largest, *rules)
        found["features"] = {name: _mean(_feature(x, given, seen), rows) for name, x in asked.features.items()}
        if received:
            found["received"] = _mean(given, seen)
    else:
        sums = featured.sum(-2, dtype=torch.float64).unbind(-1)
        found["features"] = {name: _mean(x, rows) for name, x in zip(asked.features, sums, strict=True)}
    return out, found


UNSEEN = -1.0  # in place of a weight: the row may attend none of the slot's keys


def _rules(asked: Asked) -> tuple[Any, ...]:
    """What stands between scores and weights, as the operators take it."""
    sinks = None if asked.sinks is None else asked.sinks.float().contiguous()
    softcap = 0.0 if asked.softcap is None else asked.softcap
    masks = lowered(asked.mask, asked.query.shape[2], asked.key.shape[2])
    return asked.scale, softcap, sinks, *masks


def _picks(asked: Asked) -> tuple[Tensor, Tensor]:
    """(B|1, T, n) long, the keys whose weights are wanted, -1 = none; (n,) long, the sum that each column goes into.

    First the offsets, a sum each; then the targets, a sum a name.
    """
    T, S = asked.query.shape[2], asked.key.shape[2]
    pos, away = torch.arange(T, device="cpu") + (S - T), torch.tensor(asked.offsets, dtype=torch.long, device="cpu")
    beside = (pos + away[:, None]).clamp(min=-1).mT  # and those beyond the last key are nobody's
    steps = torch.arange(len(away), device="cpu")
    slots = [steps, *(torch.full((x.shape[-1],), len(steps) + n) for n, x in enumerate(asked.targets.values()))]
    if not asked.targets:
        return beside[None], steps
    B = asked.query.shape[0]
    return torch.cat([beside.expand(B, -1, -1), *asked.targets.values()], -1), torch.cat(slots)


def _held(picked: Tensor, dim: int) -> Tensor:
    """The sum of the weights along an axis, without those that stand for none."""
    return picked.sum(dim, dtype=torch.float64) - UNSEEN * (picked == UNSEEN).sum(dim)


def _pooled(binned: Tensor, counted: Tensor, R: int) -> tuple[Tensor, Tensor]:
    """The map (B, H, R, C) from the rows' bins (B, H, T, C): means over the rows that count, and how many those are."""
    T = binned.shape[2]
    ends = [-(-i * T // R) for i in range(R + 1)]
    pairs = list(pairwise(ends))
    sums = torch.stack([binned[:, :, a:b].sum(2, dtype=torch.float64) for a, b in pairs], 2)
    rows = torch.stack([counted[:, :, a:b].sum(2) for a, b in pairs], 2)
    return _mean(sums, rows[..., None]), rows


def _feature(x_BS: Tensor, given_BHS: Tensor, seen_BHS: Tensor) -> Tensor:
    """sum_ij P_ij f_j: the mass that each key received over all rows, times its number."""
    product = given_BHS * x_BS[:, None].to(given_BHS.dtype)
    return product.masked_fill(seen_BHS == 0, 0.0).sum(-1)  # 0 * NaN of a key that nobody may attend


def _mean(total: Tensor, count: Tensor) -> Tensor:
    return (total / count.clamp(min=1)).float()
