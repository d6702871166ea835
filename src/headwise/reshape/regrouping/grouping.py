"""Choose which key-value heads share one: groups of equal size whose heads differ least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ...shapes import check_head_counts
from ..layout.head_weights import check_chosen

Groups = tuple[tuple[int, ...], ...]
MOST_PARTITIONS = 20_000  # up to this number all are tried; 12 heads in pairs have 10,395
STARTS = 8  # starting orders of the search, if there are more partitions


def contiguous(num_kv_heads: int, groups: int) -> Groups:
    """Return groups of neighbouring heads, the usual order of grouped-query attention: heads 0 and 1, 2 and 3, ..."""
    check_head_counts(num_kv_heads, groups)
    size = num_kv_heads // groups
    return tuple(tuple(range(first, first + size)) for first in range(0, num_kv_heads, size))


def check_groups(groups: Sequence[Sequence[int]], num_kv_heads: int) -> Groups:
    """Check that groups have equal size and hold each head once; return them as tuples, or raise ValueError."""
    made = tuple(tuple(check_chosen("the heads of a group", group, num_kv_heads)) for group in groups)
    if len({len(group) for group in made}) != 1 or sorted(h for group in made for h in group) != list(
        range(num_kv_heads)
    ):
        raise ValueError(
            f"groups are of equal size and hold each of the {num_kv_heads} key-value heads once; got {made}; "
            "leave groups out to have them made"
        )
    return made


def grouped(differ: Float[Tensor, "K K"], groups: int, seed: int = 0) -> Groups:
    """Return groups of equal size with the smallest sum of differences within groups.

    Up to `MOST_PARTITIONS`, all partitions are tried. Otherwise heads are grouped greedily from several orders drawn by
    `seed`, and then swapped between groups as long as that reduces the sum.
    """
    K = differ.shape[0]
    check_head_counts(K, groups)
    size = K // groups
    d = ((differ + differ.T) / 2).tolist()
    if partitions(K, size) <= MOST_PARTITIONS:
        best: Sequence[Sequence[int]] = min(_all(list(range(K)), size), key=lambda made: cost(d, made))
    else:
        rng = torch.Generator().manual_seed(seed)
        orders = [list(range(K)), *(torch.randperm(K, generator=rng, device="cpu").tolist() for _ in range(STARTS - 1))]
        best = min((_swapped(d, _greedy(d, order, size)) for order in orders), key=lambda made: cost(d, made))
    return tuple(sorted(tuple(sorted(group)) for group in best))


def cost(d: list[list[float]], groups: Sequence[Sequence[int]]) -> float:
    """Return the sum of the differences within groups."""
    return sum(d[i][j] for group in groups for n, i in enumerate(group) for j in group[:n])


def partitions(K: int, size: int) -> int:
    """Return the number of ways to divide K heads into groups of that size."""
    return math.factorial(K) // (math.factorial(size) ** (K // size) * math.factorial(K // size))


def _all(heads: list[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield every way to group the heads; the first head's group comes first."""
    from itertools import combinations

    if not heads:
        yield []
        return
    for others in combinations(heads[1:], size - 1):
        group = (heads[0], *others)
        rest = [head for head in heads if head not in group]
        for groups in _all(rest, size):
            yield [group, *groups]


def _greedy(d: list[list[float]], order: list[int], size: int) -> list[list[int]]:
    """Return groups made in order: the next head begins a group and takes its nearest remaining heads."""
    left, groups = list(order), []
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            near = min(left, key=lambda head: sum(d[head][member] for member in group))
            left.remove(near)
            group.append(near)
        groups.append(group)
    return groups


def _swapped(d: list[list[float]], groups: list[list[int]]) -> list[list[int]]:
    """Return the groups after swaps of heads between two groups, until no swap reduces the sum of differences."""

    def ties(head: int, group: list[int], without: int) -> float:
        return sum(d[head][member] for member in group if member != without)

    better = True
    while better:
        better = False
        for n, one in enumerate(groups):
            for other in groups[:n]:
                for a in range(len(one)):
                    for b in range(len(other)):
                        i, j = one[a], other[b]
                        now = ties(i, one, i) + ties(j, other, j)
                        if ties(j, one, i) + ties(i, other, j) < now - 1e-12 * abs(now):
                            one[a], other[b], better = j, i, True
    return groups
