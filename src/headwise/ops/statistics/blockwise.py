"""Statistics in plain torch ops, one block of query rows at a time: every device and dtype, memory O(T + S)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...shapes import compute_dtype
from ..autocast import without_autocast
from ..row_blocks import ScoreBlock, row_blocks, score_block
from ..tracing import is_symbol
from .means import feature_mass, mean
from .request import Request


def measure_in_blocks(request: Request) -> dict[str, Any]:
    """Compute the fields of `HeadStatistics`."""
    query, key, options = request.query, request.key, request.options
    sums = _Sums(request)
    with without_autocast(query.device.type):
        for rows in row_blocks(query.shape[2], key.shape[2], query.device.type):
            block = score_block(query, key, options, rows)
            if block.scores_BHRC.shape[-1]:
                sums.add(block, options.sinks)
        return sums.result()


class _Sums:
    """The running sums: `add` adds one block, `result` turns the sums into means."""

    def __init__(self, request: Request) -> None:
        query, targets = request.query, request.targets
        (B, H, self.T, _), self.S = query.shape, request.key.shape[2]
        self.features, self.targets, self.bins = request.features, targets, request.bins
        self.dtype, self.device = compute_dtype(query), query.device
        wide = self.dtype if query.device.type == "mps" else torch.float64  # MPS has no float64

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(B, H, *shape, dtype=dtype, device=query.device)

        self.entropy, self.largest, self.distance, self.sink = (zeros(self.T) for _ in range(4))
        self.largest_key = zeros(self.T, dtype=torch.long) - 1
        self.keys = zeros(self.T, dtype=torch.long)
        self.steps = torch.tensor(request.offsets, dtype=torch.long, device=query.device)
        self.offsets, self.offset_rows = (zeros(len(request.offsets), dtype=d) for d in (wide, torch.long))
        self.target_mass = {name: zeros(dtype=wide) for name in targets}
        self.target_rows = {name: zeros(dtype=torch.long) for name in targets}
        self.received, self.received_rows = zeros(self.S, dtype=wide), zeros(self.S, dtype=torch.long)
        column = torch.arange(self.S, device=query.device)[:, None] * self.bins[1] // max(self.S, 1)
        self.column_bins = (column == torch.arange(self.bins[1], device=query.device)).to(self.dtype)  # (S, bins)
        self.pooled, self.pooled_rows = zeros(*self.bins, dtype=wide), zeros(self.bins[0], dtype=torch.long)

    def add(self, block: ScoreBlock, sinks: Tensor | None) -> None:
        """Add one block: first its softmax, then one method for each group of statistics."""
        r = block.rows
        n = _allowed_keys(block)
        alive = n > 0
        largest, where = block.scores_BHRC.max(-1)
        # In place, scores become z = s - top: z <= 0, so nothing overflows and all terms of the entropy have one sign.
        logit = None if sinks is None else sinks.to(self.dtype).view(1, -1, 1)
        top = largest if logit is None else torch.maximum(largest, logit)
        top = top.masked_fill(~alive, 0.0)
        z_BHRC = block.scores_BHRC.sub_(top[..., None]).clamp_(min=-1e30)  # finite, because 0 * -inf is NaN
        p_BHRC = z_BHRC.exp()
        on_keys = p_BHRC.sum(-1)
        escaped = torch.zeros_like(on_keys) if logit is None else (logit - top).exp()
        total = (on_keys + escaped).masked_fill(~alive, 1.0)
        p_BHRC.div_(total[..., None])
        if block.allowed_BHRC is not None:
            p_BHRC.masked_fill_(~block.allowed_BHRC, 0.0)  # a NaN row is NaN only on the keys that it may attend to
        mass, sink = on_keys / total, escaped / total
        # A mass below the normal numbers counts as 0, as in the native kernel: 1 / mass would be infinite.
        mass.masked_fill_(mass < torch.finfo(mass.dtype).tiny, 0.0)
        entropy = total.log() - z_BHRC.mul_(p_BHRC).sum(-1)
        if logit is not None:
            entropy = entropy - sink * (logit - top).clamp(min=-1e30)

        self.keys[:, :, r] = n
        self.entropy[:, :, r] = entropy.masked_fill(~alive, 0.0)
        self.largest[:, :, r] = ((largest - top).exp() / total).masked_fill(~alive, 0.0)
        self.largest_key[:, :, r] = (where + _first(block.keys)).masked_fill(~alive, -1)
        self.sink[:, :, r] = sink.masked_fill(~alive, 0.0)
        self._add_positions(block, p_BHRC, mass)
        self._add_offsets(block, p_BHRC)
        self._add_targets(block, p_BHRC, alive)
        self._add_maps(block, p_BHRC, mass, alive)

    def _places(self, block: ScoreBlock) -> tuple[Tensor, Tensor]:
        """Return pos (R, 1) of the block's queries among the keys, and its keys (1, C)."""
        R, C = block.scores_BHRC.shape[2:]
        i, j = (torch.arange(n, device=self.device) for n in (R, C))
        return (i + _first(block.rows))[:, None] + (self.S - self.T), (j + _first(block.keys))[None]

    def _add_positions(self, block: ScoreBlock, p_BHRC: Tensor, mass: Tensor) -> None:
        pos, keys = self._places(block)
        away = (p_BHRC * (pos - keys).abs().to(self.dtype)).sum(-1)
        self.distance[:, :, block.rows] = torch.where(mass == 0, 0.0, away / mass)

    def _add_offsets(self, block: ScoreBlock, p_BHRC: Tensor) -> None:
        pos, _ = self._places(block)
        keys = pos + self.steps
        weights, seen = _gather(p_BHRC, block, keys.expand(1, 1, *keys.shape))
        self.offsets += weights.sum(-2)
        self.offset_rows += seen.sum(-2)

    def _add_targets(self, block: ScoreBlock, p_BHRC: Tensor, alive: Tensor) -> None:
        for name, j_BTn in self.targets.items():
            j_BRn = j_BTn[:, block.rows]
            weights, _ = _gather(p_BHRC, block, j_BRn[:, None])
            has = alive & (j_BRn >= 0).any(-1)[:, None]
            self.target_mass[name] += weights.sum((-1, -2))
            self.target_rows[name] += has.sum(-1)

    def _add_maps(self, block: ScoreBlock, p_BHRC: Tensor, mass: Tensor, alive: Tensor) -> None:
        self.received[:, :, block.keys] += p_BHRC.sum(2)
        self.received_rows[:, :, block.keys] += _allowed_rows(block)
        bins, first, R = self.bins[0], _first(block.rows), block.scores_BHRC.shape[2]
        whole = is_symbol(self.T)  # one block of all rows: no end of a bin has to be cut off
        hit = range(bins) if whole else range(first * bins // self.T, (first + R - 1) * bins // self.T + 1)
        weight_BHR = torch.where(mass == 0, 0.0, 1 / mass)
        # Bin by bin: one product with zeros outside of the bin would carry a row's NaN into its neighbours.
        for i in hit:
            start, stop = -(-i * self.T // bins) - first, -(-(i + 1) * self.T // bins) - first
            start, stop = (start, stop) if whole else (max(start, 0), min(stop, R))
            # By `narrow`: torch.compile takes a size that stands in a slice for a constant.
            share, weight, full = (x.narrow(2, start, stop - start) for x in (p_BHRC, weight_BHR, alive & (mass > 0)))
            sums_BHC = (weight[:, :, None] @ share).squeeze(2)
            self.pooled[:, :, i] += sums_BHC @ self.column_bins[block.keys]
            self.pooled_rows[:, :, i] += full.sum(-1)

    def result(self) -> dict[str, Any]:
        """Return the means, rounded to the compute dtype."""
        rows = (self.keys > 0).sum(-1)
        features = {name: feature_mass(x, self.received, self.received_rows) for name, x in self.features.items()}
        return dict(
            entropy=self.entropy,
            largest=self.largest,
            largest_key=self.largest_key,
            distance=self.distance,
            keys=self.keys,
            sink=self.sink,
            offsets=mean(self.offsets, self.offset_rows, self.dtype),
            features={name: mean(total, rows, self.dtype) for name, total in features.items()},
            targets={name: mean(mass, self.target_rows[name], self.dtype) for name, mass in self.target_mass.items()},
            received=mean(self.received, self.received_rows, self.dtype),
            pooled=mean(self.pooled, self.pooled_rows[..., None], self.dtype),
            pooled_rows=self.pooled_rows,
            rows=rows,
        )


def _first(pick: slice) -> int:
    """Return the first index of a slice, which has none if the axis is a symbol of torch.compile."""
    return pick.start or 0


def _allowed_keys(block: ScoreBlock) -> Tensor:
    """Return how many keys each row of the block may attend to, (B, H, R) long."""
    B, H, R, C = block.scores_BHRC.shape
    if block.allowed_BHRC is None:
        return torch.full((B, H, R), C, device=block.scores_BHRC.device)
    return block.allowed_BHRC.sum(-1).expand(B, H, R)


def _allowed_rows(block: ScoreBlock) -> Tensor | int:
    """Return how many rows of the block may attend to each key: (B|1, H|1, C) long, or the number of rows."""
    return block.scores_BHRC.shape[2] if block.allowed_BHRC is None else block.allowed_BHRC.sum(-2)


def _gather(p_BHRC: Tensor, block: ScoreBlock, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights on the given keys, (B, H, R, n), and whether the row may attend to them.

    keys: (B|1, 1, R, n) long; keys outside of the block have weight 0.
    """
    B, H, R, C = p_BHRC.shape
    first = _first(block.keys)
    inside = (keys >= first) & (keys < first + C)
    index = (keys - first).clamp(0, C - 1).expand(B, H, R, keys.shape[-1])
    weights = p_BHRC.gather(-1, index).masked_fill(~inside, 0.0)
    if block.allowed_BHRC is None:
        return weights, inside.expand_as(weights)
    return weights, inside & block.allowed_BHRC.expand(p_BHRC.shape).gather(-1, index)
