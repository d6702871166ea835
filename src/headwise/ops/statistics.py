"""What a head did: the statistics of its attention matrix P, (B, H, T, S), without ever holding P.

A block of query rows is scored, folded into sums, and forgotten, so memory is O(T + S) while every number is exact.
"Row" means a query, "mass" a sum of weights. Two rules hold for all statistics:

- A row that may attend nothing contributes nothing: no mean counts it.
- With `sinks` the softmax has a further column that holds no key. Masses are of the keys alone, so they sum to less
  than 1; the rest is reported as `sink`. Entropy is that of the whole softmax, that column included. `distance` and
  `pooled` describe where the mass on the keys lies, so they are taken relative to it.

Position: query i stands at pos = i + S - T among the keys (bottom-right, as `causal()`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..shapes import check_options, check_query_key, describe
from .masks import Mask, fitted
from .scores import Block, compute_dtype, row_blocks, score_block


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """What `statistics` measured, in float32 (float64 for float64 inputs).

    Attributes:
        entropy: (B, H, T), nats: -sum P ln P of the row.
        largest: (B, H, T), the largest weight of the row; 0 where the row is empty.
        largest_key: (B, H, T) long, the key that has it; -1 where the row is empty.
        distance: (B, H, T), tokens: mean |pos - j| under the row's weights.
        keys: (B, H, T) long, how many keys the row may attend; 0 marks an empty row.
        sink: (B, H, T), mass that went to the sink column; 0 without `sinks`.
        offsets: (B, H, k + 1), mass on the key o places before pos, mean over the rows that may attend that key.
        features: name -> (B, H), sum_j P_ij f_j, mean over rows.
        targets: name -> (B, H), mass on the row's targets, mean over rows that have one.
        received: (B, H, S), mass that a key receives, mean over the rows that may attend it.
        pooled: (B, H, min(T, pool), min(S, pool)), the matrix in bins: columns are summed, rows averaged; a row of it
            sums to 1, or to 0 where its bin holds empty rows only. Index i of n falls into bin i * bins // n.
        pooled_rows: (B, H, min(T, pool)) long, how many rows each row of `pooled` is the mean of.
        rows: (B, H) long, non-empty rows.
    """

    entropy: Float[Tensor, "B H T"]
    largest: Float[Tensor, "B H T"]
    largest_key: Int[Tensor, "B H T"]
    distance: Float[Tensor, "B H T"]
    keys: Int[Tensor, "B H T"]
    sink: Float[Tensor, "B H T"]
    offsets: Float[Tensor, "B H O"]
    features: dict[str, Tensor]
    targets: dict[str, Tensor]
    received: Float[Tensor, "B H S"]
    pooled: Float[Tensor, "B H X Y"]
    pooled_rows: Int[Tensor, "B H X"]
    rows: Int[Tensor, "B H"]


def statistics(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    offsets: int = 8,
    features: Mapping[str, Tensor] | None = None,
    targets: Mapping[str, Tensor] | None = None,
    pool: int = 32,
) -> HeadStatistics:
    """Statistics of softmax(scale * Q K^T) for every head, exact, in O(T + S) memory.

    They are those of the matrix that `headwise.attention` would apply with the same `mask`, `scale`, `softcap`
    and `sinks`, to 1e-5; half dtypes are computed in float32. Nothing here is differentiable.

    Args:
        query: (B, H, T, D).
        key: (B, K, S, D); query head h reads key head h // (H / K).
        mask: what may be attended: a Mask, a bool tensor with True = attend, or a float bias.
        scale: multiplies the scores; D ** -0.5 by default.
        softcap: bounds scores by softcap * tanh(score / softcap).
        sinks: (H,) logits of a further softmax column.
        offsets: the largest offset k; masses are given for the keys 0, 1, ... k places before the query.
        features: name -> (S,) or (B, S), a number a key (bool, integer or float).
        targets: name -> (T, n) or (B, T, n) long, n keys a row, -1 = none; a key named twice counts twice.
        pool: most bins of the pooled map, per axis.

    Raises:
        TypeError: something is not a tensor of the right kind.
        ValueError: shapes, dtypes, devices or values do not fit; the text says which.

    Example:
        >>> import torch
        >>> from headwise.ops.masks import causal
        >>> q, k = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)       # uniform attention
        >>> found = statistics(q, k, mask=causal(), offsets=1)
        >>> found.entropy[0, 0].exp().tolist()                          # row i sees i + 1 keys
        [1.0, 2.0, 3.0, 4.0]
        >>> found.offsets[0, 0]        # (1 + 1/2 + 1/3 + 1/4) / 4 on itself, (1/2 + 1/3 + 1/4) / 3 on the one before
        tensor([0.5208, 0.3611])
    """
    check_query_key(query, key)
    check_options(query, scale, softcap, sinks, 0.0)
    (T, D), S = query.shape[2:], key.shape[2]
    scale = D**-0.5 if scale is None else scale
    mask = fitted(mask, query, key)
    if offsets < 0 or pool < 1:
        raise ValueError(f"statistics needs offsets >= 0 and pool >= 1; got offsets={offsets}, pool={pool}")
    features_, targets_ = _checked_features(features, query, S), _checked_targets(targets, query, S)
    with torch.no_grad():
        sums = _Sums(query, key, offsets, features_, targets_, pool)
        for rows in row_blocks(T, S):
            block = score_block(query, key, mask, rows, scale=scale, softcap=softcap)
            if block.scores_BHRC.shape[-1]:
                sums.add(block, sinks)
        return sums.result()


class _Sums:
    """The running sums; `add` folds in one block, `result` turns sums into means."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        offsets: int,
        features: dict[str, Tensor],
        targets: dict[str, Tensor],
        pool: int,
    ) -> None:
        (B, H, self.T, _), self.S = query.shape, key.shape[2]
        self.features, self.targets = features, targets
        self.bins = min(self.T, pool), min(self.S, pool)
        self.dtype, self.device = compute_dtype(query), query.device
        wide = self.dtype if query.device.type == "mps" else torch.float64  # MPS has no float64

        def zeros(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.zeros(B, H, *shape, dtype=dtype, device=query.device)

        self.entropy, self.largest, self.distance, self.sink = (zeros(self.T) for _ in range(4))
        self.largest_key = zeros(self.T, dtype=torch.long) - 1
        self.keys = zeros(self.T, dtype=torch.long)
        self.offsets, self.offset_rows = zeros(offsets + 1, dtype=wide), zeros(offsets + 1, dtype=torch.long)
        self.target_mass = {name: zeros(dtype=wide) for name in targets}
        self.target_rows = {name: zeros(dtype=torch.long) for name in targets}
        self.received, self.received_rows = zeros(self.S, dtype=wide), zeros(self.S, dtype=torch.long)
        column = torch.arange(self.S, device=query.device)[:, None] * self.bins[1] // max(self.S, 1)
        self.column_bins = (column == torch.arange(self.bins[1], device=query.device)).to(self.dtype)  # (S, bins)
        self.pooled, self.pooled_rows = zeros(*self.bins, dtype=wide), zeros(self.bins[0], dtype=torch.long)

    def add(self, block: Block, sinks: Tensor | None) -> None:
        """Fold in one block: its softmax first, then one small method a family of statistics."""
        r = block.rows
        n = _allowed_keys(block)
        alive = n > 0
        largest, where = block.scores_BHRC.max(-1)
        # The scores become z = s - top in place: z <= 0, so nothing overflows and the entropy's terms share a sign.
        logit = None if sinks is None else sinks.to(self.dtype).view(1, -1, 1)
        top = largest if logit is None else torch.maximum(largest, logit)
        top = top.masked_fill(~alive, 0.0)
        z_BHRC = block.scores_BHRC.sub_(top[..., None]).clamp_(min=-1e30)  # finite, for 0 * -inf is NaN
        p_BHRC = z_BHRC.exp()
        on_keys = p_BHRC.sum(-1)
        escaped = torch.zeros_like(on_keys) if logit is None else (logit - top).exp()
        total = (on_keys + escaped).masked_fill(~alive, 1.0)
        p_BHRC.div_(total[..., None])
        if block.allowed_BHRC is not None:
            p_BHRC.masked_fill_(~block.allowed_BHRC, 0.0)  # a NaN row is NaN only where it may attend
        mass, sink = on_keys / total, escaped / total
        entropy = total.log() - z_BHRC.mul_(p_BHRC).sum(-1)
        if logit is not None:
            entropy = entropy - sink * (logit - top).clamp(min=-1e30)

        self.keys[:, :, r] = n
        self.entropy[:, :, r] = entropy.masked_fill(~alive, 0.0)
        self.largest[:, :, r] = ((largest - top).exp() / total).masked_fill(~alive, 0.0)
        self.largest_key[:, :, r] = (where + block.keys.start).masked_fill(~alive, -1)
        self.sink[:, :, r] = sink.masked_fill(~alive, 0.0)
        self._add_positions(block, p_BHRC, mass)
        self._add_offsets(block, p_BHRC)
        self._add_targets(block, p_BHRC, alive)
        self._add_maps(block, p_BHRC, mass, alive)

    def _places(self, block: Block) -> tuple[Tensor, Tensor]:
        """pos (R, 1) of the block's queries among the keys, and its keys (1, C)."""
        pos = torch.arange(block.rows.start, block.rows.stop, device=self.device)[:, None] + (self.S - self.T)
        return pos, torch.arange(block.keys.start, block.keys.stop, device=self.device)[None]

    def _add_positions(self, block: Block, p_BHRC: Tensor, mass: Tensor) -> None:
        pos, keys = self._places(block)
        away = (p_BHRC * (pos - keys).abs().to(self.dtype)).sum(-1)
        self.distance[:, :, block.rows] = torch.where(mass == 0, 0.0, away / mass)

    def _add_offsets(self, block: Block, p_BHRC: Tensor) -> None:
        pos, _ = self._places(block)
        steps = torch.arange(self.offsets.shape[-1], device=self.device)
        keys = pos - steps
        held, seen = _gather(p_BHRC, block, keys.expand(1, 1, *keys.shape))
        self.offsets += held.sum(-2)
        self.offset_rows += seen.sum(-2)

    def _add_targets(self, block: Block, p_BHRC: Tensor, alive: Tensor) -> None:
        for name, j_BTn in self.targets.items():
            j_BRn = j_BTn[:, block.rows]
            held, _ = _gather(p_BHRC, block, j_BRn[:, None])
            has = alive & (j_BRn >= 0).any(-1)[:, None]
            self.target_mass[name] += held.sum((-1, -2))
            self.target_rows[name] += has.sum(-1)

    def _add_maps(self, block: Block, p_BHRC: Tensor, mass: Tensor, alive: Tensor) -> None:
        self.received[:, :, block.keys] += p_BHRC.sum(2)
        self.received_rows[:, :, block.keys] += _allowed_rows(block)
        bins, first, last = self.bins[0], block.rows.start, block.rows.stop
        weight_BHR = torch.where(mass == 0, 0.0, 1 / mass)
        # Bin by bin: one product with zeros outside of the bin would carry a row's NaN into its neighbours.
        for i in range(first * bins // self.T, (last - 1) * bins // self.T + 1):
            rows = slice(max(-(-i * self.T // bins) - first, 0), -(-(i + 1) * self.T // bins) - first)
            sums_BHC = (weight_BHR[:, :, None, rows] @ p_BHRC[:, :, rows]).squeeze(2)
            self.pooled[:, :, i] += sums_BHC @ self.column_bins[block.keys]
            self.pooled_rows[:, :, i] += (alive & (mass > 0))[:, :, rows].sum(-1)

    def result(self) -> HeadStatistics:
        """The means, rounded to the working dtype."""
        rows = (self.keys > 0).sum(-1)
        return HeadStatistics(
            entropy=self.entropy,
            largest=self.largest,
            largest_key=self.largest_key,
            distance=self.distance,
            keys=self.keys,
            sink=self.sink,
            offsets=self._mean(self.offsets, self.offset_rows),
            features={name: self._mean(self._feature(f_BS), rows) for name, f_BS in self.features.items()},
            targets={name: self._mean(mass, self.target_rows[name]) for name, mass in self.target_mass.items()},
            received=self._mean(self.received, self.received_rows),
            pooled=self._mean(self.pooled, self.pooled_rows[..., None]),
            pooled_rows=self.pooled_rows,
            rows=rows,
        )

    def _feature(self, f_BS: Tensor) -> Tensor:
        """sum_ij P_ij f_j: the mass that each key received over all rows, times its number."""
        product = self.received * f_BS[:, None].to(self.received.dtype)
        return product.masked_fill(self.received_rows == 0, 0.0).sum(-1)  # 0 * NaN of a key that nobody may attend

    def _mean(self, total: Tensor, count: Tensor) -> Tensor:
        return (total / count.clamp(min=1)).to(self.dtype)


def _allowed_keys(block: Block) -> Tensor:
    """(B, H, R) long: how many keys each row of the block may attend."""
    B, H, R, C = block.scores_BHRC.shape
    if block.allowed_BHRC is None:
        return torch.full((B, H, R), C, device=block.scores_BHRC.device)
    return block.allowed_BHRC.sum(-1).expand(B, H, R)


def _allowed_rows(block: Block) -> Tensor | int:
    """(B|1, H|1, C) long, or the number of rows: how many rows of the block may attend each key."""
    return block.scores_BHRC.shape[2] if block.allowed_BHRC is None else block.allowed_BHRC.sum(-2)


def _gather(p_BHRC: Tensor, block: Block, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Weights on chosen keys, (B, H, R, n), and whether the row may attend them.

    keys: (B|1, 1, R, n) long; those outside of the block's keys weigh 0.
    """
    B, H, R, C = p_BHRC.shape
    inside = (keys >= block.keys.start) & (keys < block.keys.stop)
    index = (keys - block.keys.start).clamp(0, C - 1).expand(B, H, R, keys.shape[-1])
    held = p_BHRC.gather(-1, index).masked_fill(~inside, 0.0)
    if block.allowed_BHRC is None:
        return held, inside.expand_as(held)
    return held, inside & block.allowed_BHRC.expand(p_BHRC.shape).gather(-1, index)


def _checked_features(features: Mapping[str, Tensor] | None, query: Tensor, S: int) -> dict[str, Tensor]:
    """Each feature as (B|1, S) on the query's device."""
    B = query.shape[0]
    out = {}
    for name, feature in (features or {}).items():
        if not isinstance(feature, Tensor):
            raise TypeError(
                f"feature {name!r} is a tensor (S,) or (B, S), a number a key; got {type(feature).__name__}"
            )
        if tuple(feature.shape) not in ((S,), (1, S), (B, S)) or feature.is_complex():
            raise ValueError(
                f"feature {name!r} is a number a key: (S,) or (B, S) with B = {B}, S = {S}; got {describe(feature)}"
            )
        out[name] = feature.to(query.device).expand(B, S)
    return out


def _checked_targets(targets: Mapping[str, Tensor] | None, query: Tensor, S: int) -> dict[str, Tensor]:
    """Each list of targets as (B, T, n) long on the query's device."""
    B, T = query.shape[0], query.shape[2]
    out = {}
    for name, keys in (targets or {}).items():
        if not isinstance(keys, Tensor) or keys.is_floating_point() or keys.dtype == torch.bool:
            got = describe(keys) if isinstance(keys, Tensor) else type(keys).__name__
            raise TypeError(f"targets {name!r} are key positions, an integer tensor (T, n) or (B, T, n); got {got}")
        if keys.ndim not in (2, 3) or keys.shape[-2] != T or keys.shape[:-2] not in ((), (1,), (B,)):
            raise ValueError(
                f"targets {name!r} list n keys a row: (T, n) or (B, T, n) with B = {B}, T = {T}; got {describe(keys)}"
            )
        if keys.numel() and (int(keys.min()) < -1 or int(keys.max()) >= S):
            raise ValueError(
                f"targets {name!r} are positions 0 <= j < S = {S}, or -1 for none; "
                f"got {int(keys.min())} to {int(keys.max())}"
            )
        out[name] = keys.to(query.device, torch.long).expand(B, T, keys.shape[-1])
    return out
