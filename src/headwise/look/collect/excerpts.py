"""The tokens around evidence in what was read beside the text, so that a report can show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..records.head import HeadRecord
from ..result import Look
from ..roles.call_tokens import Passage
from ..roles.catalog import ROLES

AROUND = 6
"""Tokens shown before a query or key of the evidence, and after it."""

Excerpts = dict[str, dict[int, str]]
"""By ``"reading text"``, such as ``"copies 0"``: tokens by their place."""


def around(
    heads: Iterable[HeadRecord], readings: Mapping[str, Sequence[Passage]], name: Callable[[int], str]
) -> Excerpts:
    """Return the tokens around each piece of evidence from the readings.

    Args:
        heads: the records.
        readings: the passages by their kind.
        name: what an id is called.
    """
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


def with_excerpts(look: Look, readings: Mapping[str, Sequence[Passage]], names: Sequence[str]) -> Look:
    """The look with the tokens around each piece of evidence from the readings, by what the tokenizer calls its ids.

    Args:
        look: what `at` or `over` gave with these readings.
        readings: the passages by their kind.
        names: what each id is called, in order.
    """
    return replace(look, excerpts={**look.excerpts, **around(look.heads, readings, names.__getitem__)})
