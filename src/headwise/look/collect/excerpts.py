"""The tokens around the evidence of the additional readings, for display in a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..records.head import HeadRecord
from ..result import Look
from ..roles.call_tokens import Passage
from ..roles.catalog import ROLES

AROUND = 6
"""The number of tokens shown before and after a query or key of the evidence."""

Excerpts = dict[str, dict[int, str]]
"""Tokens by position, for each ``"reading text"`` such as ``"copies 0"``."""


def around(
    heads: Iterable[HeadRecord], readings: Mapping[str, Sequence[Passage]], name: Callable[[int], str]
) -> Excerpts:
    """Return the tokens around each piece of evidence from the readings; `name` returns the token of an id."""
    reads = {role.name: role.reads for role in ROLES}
    excerpts: Excerpts = {}
    for head in heads:
        for score in head.roles:
            kind = reads.get(score.name, "")
            passages = readings.get(kind, ())
            for one in score.evidence:
                if one.text < len(passages):
                    shown = excerpts.setdefault(f"{kind} {one.text}", {})
                    ids = passages[one.text].ids
                    for place in (one.query, one.key):
                        for near in range(max(place - AROUND, 0), min(place + AROUND + 1, len(ids))):
                            shown[near] = name(ids[near])
    return excerpts


def with_excerpts(look: Look, readings: Mapping[str, Sequence[Passage]], name: Callable[[int], str]) -> Look:
    """Return a look of these readings with the tokens around its evidence; `name` returns the token of an id."""
    return replace(look, excerpts={**look.excerpts, **around(look.heads, readings, name)})
