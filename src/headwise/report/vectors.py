"""Queries, keys and values in the page: of the first tokens, for as many heads as fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headwise.look.records.head import HeadRecord
from headwise.look.records.vectors import ByteVectors, Neurons

from .deflate import squeezed

TOKENS = (64, 48, 32, 24, 16)
"""The numbers of tokens to try, from many to few: the first at which all heads fit, or the last with some heads."""

CallHead = tuple[int, int]
"""A call, by its index in the list, and one of its key-value heads."""


def packed(calls: Sequence[Neurons], heads: Sequence[HeadRecord], budget: int, *, weights: bool) -> dict[str, Any]:
    """Return the vectors in at most `budget` characters; ``weights`` adds the weights, which short texts have in maps.

    A group is a key-value head with its query heads: their queries, keys and values, each as steps and bytes, then the
    weights. In the worst case only the groups of the strongest roles are included, or none.
    """
    groups = _ordered(calls, heads)
    most = max(budget, 0) * 3 // 4
    tokens, text = TOKENS[-1], None
    for tokens in TOKENS:
        if sum(_size(calls, group, tokens, weights) for group in groups) <= 1.25 * most:  # deflate saves about a tenth
            text = squeezed(_bytes(calls, groups, tokens, weights), budget)
        if text is not None:
            break
    else:
        kept: list[CallHead] = []
        room = 0.99 * most
        for group in groups:
            room -= _size(calls, group, tokens, weights)
            if room < 0:
                break
            kept.append(group)
        groups = kept
        text = squeezed(_bytes(calls, groups, tokens, weights), budget) if groups else None
    return {
        "tokens": tokens,
        "weights": weights,
        "calls": [_described(call, tokens) for call in calls],
        "groups": groups if text else [],
        "data": text if groups and text else "",
    }


def _described(call: Neurons, tokens: int) -> dict[str, Any]:
    (H, T, D), (K, S, _) = call.query.shape, call.key.shape
    named = {name: getattr(call, name) for name in ("layer", "scale", "softcap", "biased", "gated", "sunk")}
    V = 0 if call.value is None else call.value.shape[2]
    return {**named, "group": H // K, "queries": min(T, tokens), "keys": min(S, tokens), "dims": D, "value": V}


def _ordered(calls: Sequence[Neurons], heads: Sequence[HeadRecord]) -> list[CallHead]:
    """Return all groups: those with a head of a strong role first, then in the order of layers."""
    strengths: dict[tuple[int, int], float] = {}
    for head in heads:
        for score in head.roles[:1]:
            if score.name == head.role:  # else it plays states alone
                strengths[head.layer, head.head] = score.value
    order = []
    for c, call in enumerate(calls):
        G = call.query.shape[0] // call.key.shape[0]
        for k in range(call.key.shape[0]):
            strength = max(strengths.get((call.layer, k * G + g), -1.0) for g in range(G))
            order.append((-strength, c, k))
    return [(c, k) for _, c, k in sorted(order)]


def _size(calls: Sequence[Neurons], group: CallHead, tokens: int, weights: bool) -> int:
    about = _described(calls[group[0]], tokens)
    G, T, S = about["group"], about["queries"], about["keys"]
    value = S * (about["value"] + 4) if about["value"] else 0
    return int(G * T * (about["dims"] + 4) + S * (about["dims"] + 4) + value + weights * G * T * S)


def _bytes(calls: Sequence[Neurons], groups: Sequence[CallHead], tokens: int, weights: bool) -> Iterator[bytes]:
    for c, k in groups:
        call = calls[c]
        G = call.query.shape[0] // call.key.shape[0]
        yield from _first(call.query, k * G, G, tokens)
        yield from _first(call.key, k, 1, tokens)
        if call.value is not None:
            yield from _first(call.value, k, 1, tokens)
        if weights:
            H, T, S = call.query.shape[0], call.query.shape[1], call.key.shape[1]
            codes = np.frombuffer(call.weights, np.uint8).reshape(H, T, S)
            yield codes[k * G : (k + 1) * G, :tokens, :tokens].tobytes()


def _first(rows: ByteVectors, head: int, count: int, tokens: int) -> Iterator[bytes]:
    """Yield steps and bytes of some heads' first tokens."""
    steps = np.frombuffer(rows.steps, "<f4").reshape(rows.shape[:2])
    data = np.frombuffer(rows.data, np.int8).reshape(rows.shape)
    yield steps[head : head + count, :tokens].tobytes()
    yield data[head : head + count, :tokens].tobytes()
