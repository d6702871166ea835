"""Texts that contain a needle, which a retrieval head must find again."""

from __future__ import annotations

import random
from collections.abc import Sequence

from ...shapes.arguments import check_counts, whole_numbers
from ..roles.call_tokens import Passage


def needles(
    ids: Sequence[int],
    vocabulary: Sequence[int],
    *,
    count: int = 8,
    length: int = 7,
    around: int = 121,
    seed: int = 0,
) -> list[Passage]:
    """Return passages of a text, each with a needle at some depth and a copy of it at the end.

    A needle is `length` distinct tokens that the passage does not contain. In the copy, each token is linked to the
    needle's token that follows: a head that has its largest weight there retrieves it (Wu et al. 2024, arXiv
    2404.15574, where the model generates the needle; here it is given, token by token). Depths are spread evenly, so
    that no fixed distance leads to all needles.

    Args:
        ids: the token ids of a text; a short text is repeated.
        vocabulary: the ids from which needles are drawn.
        count: the number of passages.
        length: the number of tokens of a needle.
        around: the number of tokens of the text around it.
        seed: the seed of the draw.

    Raises:
        TypeError: the ids or counts are not integers.
        ValueError: there is no text, or fewer ids to draw from than a needle has tokens.

    Example:
        >>> [passage] = needles(range(9), range(50, 99), count=1, length=3, around=9)
        >>> len(passage.ids), passage.links["retrieval"][-3:]
        (15, [[2], [3], []])
    """
    check_counts(1, count=count, around=around)
    check_counts(2, length=length)
    check_counts(0, seed=seed)
    text = whole_numbers("ids", ids)
    if not text:
        raise ValueError("needles stand in a text, and this one has no token; give a longer text")
    hay = (text * (around // len(text) + 1))[:around]
    drawn_from = [i for i in whole_numbers("vocabulary", vocabulary) if i not in {*hay}]
    if len(drawn_from) < length:
        raise ValueError(
            f"a needle has {length} tokens that the text does not contain, and there are {len(drawn_from)} to draw "
            "from; give more ids, or a shorter text"
        )
    make = random.Random(seed)
    passages = []
    for n in range(count):
        needle = make.sample(drawn_from, length)
        depth = min(1 + n * around // count, around)
        row = [*hay[:depth], *needle, *hay[depth:], *needle]
        links: list[list[int]] = [[] for _ in row]
        for k in range(length - 1):
            links[around + length + k] = [depth + k + 1]
        passages.append(Passage(row, links={"retrieval": links}, text=n))
    return passages
