"""Scores that rank heads for pruning: random, from a list by layer and head, or from redundancy."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from ...shapes.arguments import check_counts, check_numbers, shown
from ..layout.families import Layer
from .selection import HeadScores

Scorer = Callable[[tuple[Layer, ...]], HeadScores]
"""A function from the layers to a score for every (key of the layer, head). The lowest scores go first."""
NearestHead = tuple[tuple[int, int], float | None, tuple[int, int] | None]
"""A head as (layer, head), the distance to its nearest head, and that head; None for both if there is none."""


def random_scores(seed: int = 0) -> Scorer:
    """Return a scorer that draws numbers from `seed`, as the baseline for other scores.

    Raises TypeError or ValueError if the seed is not an int of at least 0.

    Example:
        >>> import headwise.hf, headwise.models
        >>> from headwise import reshape
        >>> with headwise.hf.checkpoint(headwise.models.tiny_path()) as opened:
        ...     plan = reshape.plan_prune(opened, keep_fraction=0.5, scores=reshape.random_scores(seed=1))
        >>> sum(map(len, plan.gone.values()))
        16
    """
    check_counts(0, seed=seed)

    def score(layers: tuple[Layer, ...]) -> HeadScores:
        draw = random.Random(seed)
        return {(layer.key, head): draw.random() for layer in layers for head in range(layer.sizes.H)}

    return score


def by_call(values: Sequence[Sequence[float | int]]) -> Scorer:
    """Return a scorer for numbers ``[layer][head]``, with layers in the order in which they attend in a forward pass.

    `headwise.look.importance` returns such numbers. An encoder attends before its decoder, and in each decoder layer
    self-attention runs before cross-attention.

    Args:
        values: One row per layer, one number per head; the heads with the lowest numbers are removed first.

    Returns:
        A scorer for `scores=` of `prune` and `plan_prune`.

    Raises:
        TypeError: not a list of lists.
        ValueError: other sizes than the model's, raised when the scorer is called.

    Example:
        >>> import headwise.hf, headwise.models
        >>> from headwise import reshape
        >>> rows = [[0, 1, 2, 3, 4, 5, 6, 7]] * 4  # of each layer the first heads are worth least
        >>> with headwise.hf.checkpoint(headwise.models.tiny_path()) as opened:
        ...     plan = reshape.plan_prune(opened, keep_fraction=0.75, scores=reshape.by_call(rows))
        >>> plan.gone["0"]
        [0, 1]
    """
    rule = "scores have a row a layer, a number a head"
    if not _is_list(values) or not all(map(_is_list, values)):
        raise TypeError(f"{rule}; got {shown(values)}")

    def score(layers: tuple[Layer, ...]) -> HeadScores:
        order = in_order(layers)
        sizes = [layer.sizes.H for layer in order]
        if [len(row) for row in values] != sizes:
            raise ValueError(
                f"{rule}; the model has {len(sizes)} layers of {sizes[0]} heads, "
                f"the scores {len(values)} of {', '.join(map(str, sorted({len(row) for row in values})))}"
            )
        return {
            (layer.key, head): value for layer, row in zip(order, values, strict=True) for head, value in enumerate(row)
        }

    return score


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def in_order(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers in the order in which they attend in a forward pass."""
    return sorted(layers, key=lambda layer: (layer.role != "encoder", layer.index, layer.role == "cross"))


def by_twins(twins: Iterable[NearestHead]) -> list[list[float]]:
    """Return scores ``[layer][head]`` for `by_call` that are low for redundant heads; one of two similar heads stays.

    The score of a head is its distance (0 to 1) to the nearest head, plus 1 if that head is removed earlier.

    Args:
        twins: ((layer, head), distance, nearest) for each head, as `headwise.look.redundancy` measures it; None for
            both if a head has no nearest.

    Raises:
        TypeError, ValueError: not such a list, or an empty one.

    Example:
        >>> by_twins([((0, 0), 0.1, (0, 1)), ((0, 1), 0.1, (0, 0)), ((0, 2), 0.7, (0, 0))])
        [[0.1, 1.1, 1.7]]
    """
    rule = "twins are ((layer, head), distance or None, nearest or None), a head each"
    try:
        twins = [(place, distance, nearest) for place, distance, nearest in twins]
    except (TypeError, ValueError):
        raise TypeError(f"{rule}; got {shown(twins)}") from None
    if not twins or not all(isinstance(place, tuple) and len(place) == 2 for place, _, _ in twins):
        raise ValueError(f"{rule}, one at least; got {shown(twins)}")
    for (layer, head), distance, _ in twins:
        check_counts(layer=layer, head=head)
        if distance is not None:
            check_numbers(distance=distance)
    known = {place: (1.0 if distance is None else distance, nearest) for place, distance, nearest in twins}
    gone: set[tuple[int, int]] = set()
    worth: dict[tuple[int, int], float] = {}
    for place, (distance, nearest) in sorted(known.items(), key=lambda entry: (entry[1][0], entry[0])):
        stands_for = nearest in gone
        worth[place] = distance + stands_for
        if not stands_for:
            gone.add(place)
    rows: list[list[float]] = [[] for _ in range(1 + max(layer for layer, _ in worth))]
    for layer, head in sorted(worth):
        rows[layer].append(worth[layer, head])
    return rows
