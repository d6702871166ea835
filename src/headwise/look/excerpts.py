"""The tokens around evidence in what was read beside the text, so that a report can show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .records import Look
from .roles import ROLES
from .scene import Passage

AROUND = 6
"""Tokens shown before a query or key of the evidence, and after it."""


def with_excerpts(look: Look, readings: Mapping[str, Sequence[Passage]], names: Sequence[str]) -> Look:
    """The look with the tokens around each piece of evidence from the readings, by what the tokenizer calls its ids.

    Args:
        look: what `at` or `over` gave with these readings.
        readings: the passages by their kind.
        names: what each id is called, in order.
    """
    reads = {role.name: role.reads for role in ROLES}
    found: dict[str, dict[int, str]] = {}
    for head in look.heads:
        for score in head.roles:
            kind = reads.get(score.name, "")
            passages = readings.get(kind, ())
            for one in score.evidence:
                if one.text < len(passages):
                    shown = found.setdefault(f"{kind} {one.text}", {})
                    ids = passages[one.text].ids
                    for place in (one.query, one.key):
                        for near in range(max(place - AROUND, 0), min(place + AROUND + 1, len(ids))):
                            shown[near] = names[ids[near]]
    return replace(look, excerpts=found)
