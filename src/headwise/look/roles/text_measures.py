"""Measures of single roles: links of queries to keys, and sums over rows. `roles.catalog` defines the roles."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..inputs.repeated_tokens import targets
from .call_tokens import CallTokens, padded
from .measures import FAR, CallStatistics, ScoreSums, device_of_mask

FEW_KEYS = 8
"""The fewest keys of a row for `broad`: on few keys any row is even; two at 0.7 and 0.3 are already "88 % even"."""

CLARK_KEYS = 128
"""The length of the texts on which Clark et al. called an entropy above 3.8 nats broad."""


def first(scene: CallTokens) -> Tensor:
    """Return key 0 for every query except the first, which has only this key in self-attention: (1, T, 1)."""
    links = torch.zeros(1, scene.queries.shape[1], 1, dtype=torch.long, device="cpu")
    links[:, 0] = -1
    return links


def copies(name: str, scene: CallTokens) -> Tensor | None:
    """Return the links to earlier copies of a token, or to their next tokens (`repeated_tokens.targets`)."""
    drawn = [passage.copies for passage in scene.passages]
    if scene.ahead is None or not scene.known or None in drawn:
        return None
    rows = [replace(one, ids=ids) for one, ids in zip(drawn, scene.queries.tolist(), strict=True) if one]
    return padded([targets(one, ahead=scene.ahead)[name] for one in rows])


def aligned(shift: int, scene: CallTokens) -> Tensor | None:
    """Return the links of a decoder's query to the encoder's key of the same token, or `shift` later."""
    if not scene.cross or not scene.known or scene.moved != (1, 0):
        return None
    T, S = scene.queries.shape[1], scene.keys.shape[1]
    keys = torch.arange(T, device="cpu") - 1 + shift
    return torch.where((keys >= 0) & (keys < S), keys, -1)[None, :, None]


def broad(got: CallStatistics) -> ScoreSums:
    """Return the entropy over the logarithm of the number of choices, at most 128, for rows of at least 8 keys."""
    rows = got.rows
    choices = (rows.keys + int(got.call.sinks is not None)).clamp(max=CLARK_KEYS)
    enough = rows.keys >= FEW_KEYS
    ratio = (rows.entropy / choices.log()).clamp(max=1.0)
    return ScoreSums(torch.where(enough, ratio, 0.0).double().sum(-1), enough.double().sum(-1), None)


def far_offset(got: CallStatistics) -> ScoreSums | None:
    """Return the sums of the offset, beyond those with their own roles, at which most rows have their largest weight.

    The count is of the rows that may attend to the key at that offset, but at least half of all rows: with few rows a
    single one would be enough.
    """
    if got.scene.cross:
        return None
    filled, T = got.rows.largest_key >= 0, got.rows.largest_key.shape[2]
    _, place = _far(got)
    most = on_far_offset(got, got.rows.largest_key).sum(-1)
    rows = torch.arange(T, device=device_of_mask(got.call))[:, None]
    keys = rows + (T - place)[..., None, None].to(rows.device)
    able = got.allowed(rows[None, None], keys.clamp(0, T - 1)) & (keys >= 0) & (keys < T)
    count = torch.maximum(able.sum((2, 3)).cpu(), (filled.sum(-1) + 1) // 2)
    drawn = got.rows.largest_key[..., torch.randperm(T, generator=torch.Generator().manual_seed(T), device="cpu")]
    chance = (torch.arange(T, device="cpu") - drawn == (place - T)[..., None]) & filled & (most > 0)[..., None]
    sums = most.double(), count.double(), chance.double().sum(-1)
    return ScoreSums(*sums, detail=lambda b, h: f"{T - int(place[b, h]):+}")


def on_far_offset(got: CallStatistics, keys: Tensor) -> Tensor:
    """Return whether the key of each query is at the head's own far offset, (B, H, T) bool."""
    most, place = _far(got)
    return (keys >= 0) & (got.back(keys) == (place - keys.shape[2])[..., None]) & (most > 0)[..., None]


def _far(got: CallStatistics) -> tuple[Tensor, Tensor]:
    """Return the count of rows with their largest weight at the most frequent far offset, and T + that: (B, H)."""

    def make() -> tuple[Tensor, Tensor]:
        distance = got.back(got.rows.largest_key)
        far = torch.where((got.rows.largest_key >= 0) & (distance.abs() > FAR), distance, 0)
        B, H, T = far.shape
        counts = torch.zeros(B, H, 2 * T, dtype=torch.long, device="cpu").scatter_add(2, far + T, (far != 0).long())
        most, place = counts.max(-1)
        return most, place

    return got.once("far", make)


LEAST_ROWS = 16
"""The fewest queries of a text for one of its keys to count as a sink."""


def other_sink(got: CallStatistics) -> ScoreSums | None:
    """Return alpha_k of the key k > 0 with the most weight, from the rows whose largest weight is on it.

    Only keys in the first half count: a late key has few queries, and they are its neighbors.
    """
    if got.scene.cross or got.scene.among is not None:
        return None
    T = got.rows.entropy.shape[2]
    if T <= LEAST_ROWS:
        return None
    alpha = _sinks(got)
    value, place = alpha.max(-1)
    device = device_of_mask(got.call)
    rows, keys = torch.arange(T, device=device)[:, None], place[..., None, None].to(device)
    seen = got.allowed(rows[None, None], keys)[..., 0].cpu()
    shares = torch.where(seen, 1 / got.rows.keys.double().clamp(min=1), 0.0)
    level = shares.flip(-1).cumsum(-1).flip(-1)
    chance = level.gather(2, place[..., None])[..., 0] / (T - place).double()
    count = torch.full_like(value, T - 1)
    return ScoreSums(value * count, count, chance * count, detail=lambda b, h: f"key {int(place[b, h])}")


def on_other_sink(got: CallStatistics, keys: Tensor) -> Tensor:
    """Return whether the key of each query is the head's own sink, at or before the query, (B, H, T) bool."""
    return (keys > 0) & (got.back(keys) >= 0) & (keys == _sinks(got).argmax(-1, keepdim=True))


def _sinks(got: CallStatistics) -> Tensor:
    """Return alpha_k of each key in the first half, from the rows whose largest weight is on it: (B, H, T)."""

    def make() -> Tensor:
        keys, T = got.rows.largest_key, got.rows.largest_key.shape[2]
        rows = torch.arange(T, device="cpu")
        behind = (keys > 0) & (keys <= rows)
        largest = torch.where(behind, got.rows.largest.double(), 0.0)
        alpha = torch.zeros_like(largest).scatter_add(2, keys.clamp(min=0), largest)
        queries = (T - rows).double()
        return torch.where(2 * queries >= T, alpha / queries, 0.0)

    return got.once("sinks", make)


def same_token(links: Tensor, scene: CallTokens) -> Tensor:
    """Return the links to copies of the query's own token."""
    keys = scene.keys[:, None].expand(-1, links.shape[1], -1).gather(2, links.clamp(min=0))
    return torch.where((keys == scene.queries[..., None]) & (links >= 0), links, -1)


def named(name: str, scene: CallTokens) -> Tensor:
    """Return the links of this name, an empty one for each query if there are none."""
    links = scene.links(name)
    return torch.full((*scene.queries.shape, 1), -1, device="cpu") if links is None else links
