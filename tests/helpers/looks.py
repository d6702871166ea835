"""Looks made by hand for the tests of the report and the command line: no model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import headwise
from headwise.look.records.head import NO_ROLE, HeadMap, HeadRecord
from headwise.look.records.scores import Evidence, Score
from headwise.look.records.vectors import vectors_of
from headwise.look.result import Look
from headwise.look.roles.catalog import ROLES
from headwise.nn.hooks.probe import AttentionCall

SENTENCE = " The quick fox saw the lazy dog.\n The quick fox saw the lazy cat, and the quick dog saw it too.\n"


def words(length: int) -> tuple[str, ...]:
    """Tokens of running text, as many as asked."""
    text: list[str] = []
    while len(text) < length:
        for word in SENTENCE.replace(".", " .").replace(",", " ,").split(" ")[1:]:
            text.extend(part for part in (word.rstrip("\n"), "\n" if word.endswith("\n") else "") if part)
    return tuple(w if w in ".,\n" else f" {w}" for w in text[:length])


def weights(kind: str, size: int, generator: np.random.Generator, *, encoder: bool) -> npt.NDArray[np.float64]:
    """An attention matrix of a kind: previous, sink, induction, self or broad; next, in an encoder."""
    logits = generator.normal(scale=0.7, size=(size, size))
    i, j = np.indices((size, size))
    strength = 6 + np.log(size)
    logits += (
        strength
        * {
            "previous": i - j == 1,
            "sink": j == 0,
            "induction": (i - j) % 11 == 10,
            "self": i == j,
            "next": j - i == 1,
            "broad": np.zeros((size, size)),
        }[kind]
    )
    logits[(j > i) & (not encoder)] = -np.inf
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    matrix: npt.NDArray[np.float64] = shares / shares.sum(axis=1, keepdims=True)
    return matrix


def codes(matrix: npt.NDArray[np.float64]) -> HeadMap:
    """A matrix of weights as the large map of a look."""
    rows, columns = matrix.shape
    return HeadMap(rows, columns, np.rint(255 * np.sqrt(matrix)).astype(np.uint8).tobytes())


ROLE_OF = {"previous": "previous-token", "sink": "first-token sink", "induction": "induction", "self": "self"}
ROLE_OF |= {"next": "next-token"}


def make_look(
    *,
    layers: int = 3,
    heads: int = 5,
    tokens: Sequence[str] | None = None,
    model: str = "synthetic/llama-3x5",
    seed: int = 0,
    encoder: bool = False,
) -> Look:
    """A look with clear roles, over the tokens (default: 41 words), the large map a cell a token."""
    generator = np.random.default_rng(seed)
    shown = tuple(words(41) if tokens is None else tokens)
    kinds = ("previous", "sink", "broad", "next" if encoder else "induction", "self")
    records, maps = [], []
    for layer in range(layers):
        for head in range(heads):
            kind = kinds[(layer * 2 + head) % len(kinds)]
            matrix = weights(kind, len(shown), generator, encoder=encoder)
            maps.append(codes(matrix))
            records.append(_record(layer, head, kind, matrix, float(generator.uniform(0.5, 0.95))))
    kind = "encoder" if encoder else "decoder"
    return Look(model, layers, heads, len(shown), shown, tuple(records), kind, 1.25, "0.1.0", tuple(maps))


STATES = {role.name for role in ROLES if role.state}
THRESHOLDS = {"previous-token": 0.5, "self": 0.5, "next-token": 0.5, "first-token sink": 0.3, "delimiter": 0.6}
THRESHOLDS |= {"induction": 0.4, "duplicate-token": 0.4, "broad": 0.783}


def _record(layer: int, head: int, kind: str, matrix: npt.NDArray[np.float64], score: float) -> HeadRecord:
    size = len(matrix)
    distance = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    ahead = bool(matrix[0, -1])
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = float(-np.nansum(matrix * np.log(matrix)) / size)
    values = {
        "previous-token": _mean(np.diag(matrix, -1)),
        "self": _mean(np.diag(matrix)),
        **({"next-token": _mean(np.diag(matrix, 1))} if ahead else {}),
        "first-token sink": _mean(matrix[1:, 0]),
        "delimiter": 0.031,
        "broad": min(entropy / np.log(max(size, 2)), 1.0),
        "duplicate-token": 0.04,
        "induction": score if kind == "induction" else 0.01,
    }
    named, state = ROLE_OF.get(kind), ROLE_OF.get(kind) in ("first-token sink", "broad")
    return HeadRecord(
        module=f"model.layers.{layer}.self_attn",
        call=0,
        layer=layer,
        head=head,
        part="encoder" if ahead else "decoder",
        entropy=entropy,
        largest=float(matrix.max(axis=1).mean()),
        distance=float((matrix * distance).sum() / size),
        offsets=tuple(_mean(np.diag(matrix, -k)) if k < size else 0.0 for k in range(9)),
        ahead=tuple(_mean(np.diag(matrix, k)) for k in range(1, 9) if ahead and k < size),
        scores={name: _score(name, value, ROLE_OF.get(kind), matrix) for name, value in values.items()},
        map=tuple(map(tuple, matrix[: min(size, 8), : min(size, 8)].tolist())),
        queries=size,
        keys=size,
        role=NO_ROLE if named is None or state else named,
        states=(named,) if named is not None and state else (),
    )


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else 0.0


def _score(name: str, value: float, role: str | None, matrix: npt.NDArray[np.float64]) -> Score:
    """The score; for the role that the head plays, with the three queries of the largest weights."""
    size = len(matrix)
    plays = name == role
    best = np.argsort(-matrix[size // 2 :].max(axis=1))[:3] + size // 2
    shown = tuple(Evidence(0, int(i), int(matrix[i].argmax()), round(float(matrix[i].max()), 4)) for i in best)
    null = None if name == "broad" else 0.021
    several = name in ("induction", "duplicate-token")
    low, high = (max(value - 0.03, 0.0), min(value + 0.02, 1.0)) if several else (None, None)
    return Score(name, value, null, THRESHOLDS[name], size - 1, low, high, plays, shown if plays else ())


def playing(record: HeadRecord, /, *scores: Score, **changes: Any) -> HeadRecord:
    """The head with these scores alone: of those it plays, the first is its role, the states stand apart."""
    played = [score.name for score in scores if score.plays]
    role = next((name for name in played if name not in STATES), NO_ROLE)
    states = tuple(name for name in played if name in STATES)
    return replace(record, scores={score.name: score for score in scores}, role=role, states=states, **changes)


def random_look(layers: int = 12, heads: int = 12, size: int = 128) -> Look:
    """The worst case for the size of a report: every byte of every map is random."""
    small = make_look(layers=layers, heads=heads, tokens=words(5))
    generator = np.random.default_rng(1)
    maps = tuple(HeadMap(size, size, generator.bytes(size * size)) for _ in small.heads)
    records = tuple(replace(head, queries=size, keys=size) for head in small.heads)
    return replace(small, heads=records, maps=maps, tokens=words(size), length=size)


def calls(
    layers: int, heads: int, tokens: int, *, groups: int = 2, dims: int = 7, values: int = 5
) -> list[AttentionCall]:
    """Causal calls on random vectors, a text of so many tokens."""
    draw = torch.Generator().manual_seed(tokens)
    made = []
    for layer in range(layers):
        sizes = ((heads, dims), (heads // groups, dims), (heads // groups, values))
        q, k, v = (2 * torch.randn(1, n, tokens, d, generator=draw) for n, d in sizes)
        made.append(AttentionCall(f"model.layers.{layer}.self_attn", layer, q, k, headwise.causal(), value=v))
    return made


def full_look(layers: int = 3, heads: int = 4, tokens: int = 29) -> tuple[Look, list[AttentionCall]]:
    """A look whose maps are those of random vectors, with all that a look may carry; and the calls themselves."""
    look = make_look(layers=layers, heads=heads, tokens=words(tokens))
    made = calls(layers, heads, tokens)
    maps = [codes(one.numpy()) for call in made for one in headwise.weights(call.query, call.key, **call.scoring)[0]]
    records = [
        replace(head, extras={"importance, gradient": 0.0123456 * i, "share of the stream": i / 7})
        for i, head in enumerate(look.heads)
    ]
    excerpts = {"copies 0": {place: f" r{place}" for place in range(tokens)}}
    parts = {"heads": tuple(records), "maps": tuple(maps), "neurons": tuple(map(vectors_of, made))}
    return replace(look, **parts, excerpts=excerpts), made
