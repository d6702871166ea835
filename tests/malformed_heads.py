"""Good calls of what annotates text and of what builds models of known heads, for the test of malformed ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from malformed import PACKAGE, Call

from headwise.look import annotate
from headwise.testing import constructed

CONLLU = "1\tIt\t_\tPRON\t_\t_\t2\tnsubj\t_\t_\n2\tworks\t_\tVERB\t_\t_\t0\troot\t_\t_\n"


def of(function: Callable[..., Any], **arguments: Any) -> Call:
    return function, arguments


def told() -> annotate.Document:
    return annotate.parse(CONLLU)[0]


def tokenized(text: str, return_offsets_mapping: bool) -> dict[str, Any]:
    return {"input_ids": [1, 2, 3], "offset_mapping": [(0, 0), (0, 2), (2, 8)]}


@functools.cache
def planted() -> constructed.Constructed:
    return constructed.constructed([["self"]], places=7)[0]


ANNOTATE: dict[str, Callable[[], Call]] = {
    "aligned": lambda: of(annotate.aligned, source=told().sentences[0], offsets=[[0, 2], [2, 8]]),
    "parse": lambda: of(annotate.parse, text=CONLLU, name="a text"),
    "annotate.read": lambda: of(annotate.read, path=str(PACKAGE / "look/annotate/sentences.conllu")),
    "passages": lambda: of(annotate.passages, documents=[told()], tokenizer=tokenized, length=40),
}
CONSTRUCTED: dict[str, Callable[[], Call]] = {
    "constructed": lambda: of(
        constructed.constructed, layers=[["self"]], kind="decoder", vocabulary=29, places=7,
        tables=constructed.Tables(), rest="first", seed=1,
    ),
    "constructed_pair": lambda: of(
        constructed.constructed_pair, encoder=[["self"]], decoder=[["self"]], cross=[["broad"]], places=7, seed=1
    ),
    "random_model": lambda: of(constructed.random_model, seed=1, places=7),
    "targets": lambda: of(
        constructed.targets, job="self", ids=torch.tensor([1, 2, 3]), tables=constructed.Tables(), causal=True
    ),
    "Constructed.sample": lambda: of(planted().sample, length=5, seed=1),
    "Constructed.targets": lambda: of(planted().targets, layer=0, head=0, ids=torch.tensor([1, 2, 3])),
}  # fmt: skip
