"""Choose the heads to remove in each layer, by name or by score, within the numbers that a class can load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ...plan.shape import short
from ...shapes.arguments import check_numbers
from ..layout.families import CheckpointLayout, Layer
from ..layout.head_axes import KeptHeads, Sizes

HeadScores = Mapping[tuple[str | int, int], float | int]
"""The score of each head, by (key of the layer, head)."""
Count = tuple[int, int]
"""(query heads, key-value heads) that a layer keeps."""


def parse_heads(text: str) -> list[tuple[str, int]]:
    """Parse heads as given on the command line: LAYER.HEAD, separated by commas.

    Raises:
        ValueError: a text of another form.

    Example:
        >>> parse_heads("0.1, encoder.3.7")
        [('0', 1), ('encoder.3', 7)]
    """
    heads = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*((?:encoder\.|cross\.)?\d{1,6})\.(\d{1,6})\s*", word)
        if match is None:
            raise ValueError(f"heads are LAYER.HEAD with commas between, such as 0.1,3.7; got {word.strip()[:40]!r}")
        heads.append((_plain(match[1]), int(match[2])))
    return heads


def _plain(key: str) -> str:
    """Return a layer's key without leading zeros."""
    role, _, index = key.rpartition(".")
    return f"{role}.{int(index)}" if role else str(int(index))


def named(
    family: CheckpointLayout, heads: str | Mapping[Any, Iterable[int]] | Iterable[tuple[Any, int]]
) -> dict[str, set[int]]:
    """Return the heads to remove by layer, checked; layers that lose none have an empty set."""
    if isinstance(heads, str):
        pairs: list[tuple[Any, Any]] = list(parse_heads(heads))
    elif isinstance(heads, Mapping):
        pairs = [(layer, head) for layer, some in heads.items() for head in _some(some)]
    else:
        pairs = [_pair(item) for item in _some(heads)]
    gone: dict[str, set[int]] = {layer.key: set() for layer in family.layers}
    for key, head in pairs:
        layer = family.layer(str(key))
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < layer.sizes.H:
            raise ValueError(f"layer {layer.key} has the heads 0 to {layer.sizes.H - 1}; got {short(head)}")
        if head in gone[layer.key]:
            raise ValueError(f"head {layer.key}.{head} is named twice; name each head once")
        gone[layer.key].add(head)
    return gone


def _some(heads: Any) -> list[Any]:
    if not isinstance(heads, Iterable) or isinstance(heads, (str, bytes)) or getattr(heads, "ndim", 1) == 0:
        raise TypeError(f"heads are '0.1,3.7', {{0: [1], 3: [7]}} or [(0, 1), (3, 7)]; got {type(heads).__name__}")
    return list(heads)


def _pair(item: Any) -> tuple[Any, Any]:
    if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 2:
        raise TypeError(f"heads are '0.1,3.7', {{0: [1], 3: [7]}} or [(0, 1), (3, 7)]; got {short(item)}")
    return item[0], item[1]


def checked_scores(family: CheckpointLayout, scores: HeadScores) -> HeadScores:
    """Return the scores by layer and head; raise ValueError unless every head of every layer has a finite one."""
    if not isinstance(scores, Mapping) or not all(isinstance(key, tuple) and len(key) == 2 for key in scores):
        raise TypeError(f"scores are numbers by (layer, head), or a function that gives them; got {short(scores)}")
    for (key, head), value in scores.items():
        if not (isinstance(value, float) and not math.isfinite(value)):  # the loop below reports non-finite scores
            check_numbers(**{f"the score of head {key}.{head}": value})
    known: dict[tuple[str | int, int], float | int] = {
        (str(layer), head): float(value) for (layer, head), value in scores.items()
    }
    for layer in family.layers:
        for head in range(layer.sizes.H):
            if not math.isfinite(known.get((layer.key, head), math.nan)):
                raise ValueError(
                    f"scores has a finite number for every (layer, head); head {head} of layer {layer.key} has "
                    f"{known.get((layer.key, head), 'none')}"
                )
    return known


# --- what stays of one layer ------------------------------------------------------------------------------------------


def kept_exactly(layer: Layer, gone: set[int]) -> KeptHeads:
    """Return the heads left after removing exactly `gone`; raise ValueError if key-value heads were read unevenly."""
    sizes, group = layer.sizes, layer.sizes.group
    query = [head for head in range(sizes.H) if head not in gone]
    read = [head // group for head in query]
    kv = list(dict.fromkeys(read))
    if not query or len({read.count(one) for one in kv}) != 1:
        raise ValueError(_uneven_groups(layer, gone))
    return KeptHeads(tuple(query), tuple(kv))


def best_kept(sizes: Sizes, count: Count, gone: set[int], score: Sequence[float | int]) -> KeptHeads | None:
    """Return the heads of a layer with the best scores, `count` of them, none from `gone`; None if too few are left.

    Whole groups are removed, and equally many heads of each remaining group. Of equal scores the first heads stay.
    """
    heads, kv_heads = count
    each, group = heads // kv_heads, sizes.group
    groups = []
    for kv in range(sizes.K):
        free = [head for head in range(kv * group, (kv + 1) * group) if head not in gone]
        best = sorted(sorted(free, key=lambda head: -score[head])[:each])
        if len(best) == each:
            groups.append((kv, best, sum(score[head] for head in best)))
    if len(groups) < kv_heads:
        return None
    chosen = sorted(sorted(groups, key=lambda entry: -entry[2])[:kv_heads])
    return KeptHeads(tuple(head for _, best, _ in chosen for head in best), tuple(kv for kv, _, _ in chosen))


def possible(sizes: Sizes) -> list[Count]:
    """Return all (query heads, key-value heads) that pruning can leave: most query heads first, then fewest keys."""
    counts = {(kv * each, kv) for kv in range(1, sizes.K + 1) for each in range(1, sizes.group + 1)}
    return sorted(counts, key=lambda count: (-count[0], count[1]))


def nearest(sizes: Sizes, counts: Iterable[Count], fraction: float | int) -> list[Count]:
    """Return the counts whose heads are nearest to the fraction; if two are equally near, the larger one."""
    wanted = Fraction(str(fraction)) * sizes.H
    counts = list(counts)
    far = min((abs(heads - wanted), -heads) for heads, _ in counts)
    return [count for count in counts if (abs(count[0] - wanted), -count[0]) == far]


# --- what stays of all layers -----------------------------------------------------------------------------------------


def choose(
    family: CheckpointLayout, counts: Mapping[str, Count], gone: Mapping[str, set[int]], scores: HeadScores
) -> dict[str, KeptHeads] | None:
    """Return the heads with the best scores in every layer, in the numbers of `counts`; None if too many must go."""
    kept: dict[str, KeptHeads] = {}
    for field, layers in family.counts.items():
        for together in _together(family, layers):
            sizes = together[0].sizes
            lost = set().union(*(gone[layer.key] for layer in together))
            score = [sum(scores[layer.key, head] for layer in together) for head in range(sizes.H)]
            best = best_kept(sizes, counts[field], lost, score)
            if best is None:
                return None
            kept |= {layer.key: best for layer in together}
    return kept


def _together(family: CheckpointLayout, layers: list[Layer]) -> list[list[Layer]]:
    """Return lists of layers that must keep the same heads; each other layer is in a list of its own."""
    shared = [[layer for layer in layers if layer.role == role] for role in family.same_heads]
    alone = [[layer] for layer in layers if layer.role not in family.same_heads]
    return [some for some in shared if some] + alone


def total(kept: Mapping[str, KeptHeads], scores: HeadScores) -> float | int:
    """Return the sum of the scores of all heads that stay."""
    return sum(scores[key, head] for key, some in kept.items() for head in some.query)


def exactly(family: CheckpointLayout, gone: Mapping[str, set[int]]) -> dict[str, KeptHeads]:
    """Return the heads left after removing exactly `gone`.

    Raises:
        ValueError: in one line, which more heads must be removed so that one config counts them all.
    """
    kept = {layer.key: kept_exactly(layer, gone[layer.key]) for layer in family.layers}
    for field, layers in family.counts.items():
        counts = {layer.key: len(kept[layer.key].query) for layer in layers}
        if len(set(counts.values())) > 1:
            raise ValueError(_uneven_layers(field, counts))
        groups = {layer.key: len(kept[layer.key].kv) for layer in layers}
        if len(set(groups.values())) > 1:
            listed = ", ".join(f"{key} keeps {number}" for key, number in list(groups.items())[:4])
            raise ValueError(
                f"one config counts the key-value heads of all layers, and layer {listed}; lose whole groups in every "
                f"layer or in none, {OR_ZERO}"
            )
        for together in _together(family, layers):
            odd = [layer for layer in together if kept[layer.key] != kept[together[0].key]]
            if odd:
                raise ValueError(_unequal(together, odd[0], gone))
    return kept


OR_ZERO = "or add zero=True, which keeps all sizes and writes zeros"


def _uneven_groups(layer: Layer, gone: set[int]) -> str:
    """Return the message that says why these heads of a layer cannot be removed."""
    sizes, group = layer.sizes, layer.sizes.group
    if len(gone) == sizes.H:
        return f"layer {layer.key} would lose all its {sizes.H} heads; leave one, {OR_ZERO}"
    left = [sum(head not in gone for head in range(kv * group, (kv + 1) * group)) for kv in range(sizes.K)]
    return (
        f"layer {layer.key} would keep {', '.join(map(str, left))} query heads of its {sizes.K} groups of {group}, and "
        f"every key-value head is read by equally many; lose whole groups, as many of each group, {OR_ZERO}"
    )


def _uneven_layers(field: str, counts: Mapping[str, int]) -> str:
    least = min(counts.values())
    more = [f"layer {key} must lose {n - least} more" for key, n in counts.items() if n > least]
    shown = ", ".join(more[:6]) + (f" and {len(more) - 6} further layers some more" if len(more) > 6 else "")
    return (
        f"one number, {field}, counts the heads of all these layers: {shown}; name them, choose them by score (--by), "
        f"{OR_ZERO}"
    )


def _unequal(together: list[Layer], odd: Layer, gone: Mapping[str, set[int]]) -> str:
    first = together[0]
    return (
        f"the layers {first.key} to {together[-1].key} share one table of position biases with a column a head, so all "
        f"must lose the same; layer {first.key} loses {sorted(gone[first.key])}, layer {odd.key} "
        f"{sorted(gone[odd.key])}; "
        f"name the same heads in each, {OR_ZERO}"
    )
