"""What a look says of each head, computed again from whole attention matrices by the definitions of docs/roles.md.

Loops over queries and keys, which share no code with `headwise.look` but the draws of its controls: `test_look_draws`
checks those by themselves.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from look_matrices import Call, Matrix

from headwise.look import Passage, Vocabulary
from headwise.look.roles.controls import other_queries, shuffled


class Found(NamedTuple):
    """One head on one text: sums over queries, two controls, and the queries that show the role with their keys."""

    total: float
    count: int
    null: float | None = None
    against: float | None = None
    shows: Sequence[tuple[int, int]] = ()
    detail: str = ""
    mass: float | None = None


def table(rows: list[list[list[int]]], width: int) -> torch.Tensor:
    """(B, T, width), -1 where a list is shorter."""
    return torch.tensor([[[*keys, *[-1] * (width - len(keys))] for keys in one] for one in rows])


# --- roles of places --------------------------------------------------------------------------------------------------


def choosing(call: Call, b: int) -> list[int]:
    """The queries that may attend to two keys at least: the weights of the others are forced."""
    return [i for i, row in enumerate(call.seen[b]) if int(row.sum()) > 1]


def at_offset(call: Call, b: int, h: int, offset: int) -> Found:
    """Mean of A[i, i + offset] over the queries that may attend that key, and another."""
    p, T = call.p[b, h], call.p.shape[2]
    able = [i for i in choosing(call, b) if 0 <= i + offset < T and call.seen[b, i, i + offset]]
    shows = [(i, i + offset) for i in able if p[i].argmax() == i + offset]
    null = sum(call.even[b, i, i + offset] for i in able)
    return Found(sum(p[i, i + offset] for i in able), len(able), null, shows=shows)


def local_band(call: Call, b: int, h: int) -> Found:
    """Mean of the mass on |i - j| <= 8; 0 where a single offset has more than half."""
    p, T = call.p[b, h], call.p.shape[2]
    total = null = 0.0
    shows = []
    for i in choosing(call, b):
        for j in range(max(i - 8, 0), min(i + 9, T)):
            total, null = total + p[i, j], null + call.even[b, i, j]
        if abs(int(p[i].argmax()) - i) <= 8:
            shows.append((i, int(p[i].argmax())))
    ones = [at_offset(call, b, h, k) for k in range(-8, 9)]
    single = any(one.count and one.total / one.count > 0.5 for one in ones)
    return Found(0.0 if single else total, len(choosing(call, b)), null, shows=shows)


def far_offset(call: Call, b: int, h: int, place: int | None = None) -> Found:
    """Share of the queries whose largest weight lies at one distance of more than 8: the most frequent, or `place`."""
    p, T = call.p[b, h], call.p.shape[2]
    best = [int(row.argmax()) for row in p]
    counts = Counter(best[i] - i for i in range(T) if abs(best[i] - i) > 8)
    if not counts:
        return Found(0.0, math.ceil(T / 2), 0.0)
    offset = max(counts, key=counts.__getitem__) if place is None else place
    able = sum(0 <= i + offset < T and bool(call.seen[b, i, i + offset]) for i in range(T))
    others = torch.randperm(T, generator=torch.Generator().manual_seed(T)).tolist()
    null = float(sum(best[others[i]] - i == offset for i in range(T)))
    shows = [(i, best[i]) for i in range(T) if best[i] - i == offset]
    return Found(counts[offset], max(able, math.ceil(T / 2)), null, shows=shows, detail=f"{offset:+}")


def sink_elsewhere(call: Call, b: int, h: int) -> Found:
    """The key k, 0 < k <= T / 2, that most weight lies on, of the queries i >= k whose largest weight it has."""
    p, T = call.p[b, h], call.p.shape[2]
    alphas = {k: sum(p[i, k] for i in range(k, T) if p[i].argmax() == k) / (T - k) for k in range(1, T // 2 + 1)}
    k = max(alphas, key=alphas.__getitem__)
    null = sum(call.even[b, i, k] for i in range(k, T)) / (T - k)
    shows = [(i, k) for i in range(k, T) if p[i].argmax() == k]
    return Found(alphas[k] * (T - 1), T - 1, null * (T - 1), shows=shows, detail=f"key {k}")


def on_ids(call: Call, b: int, h: int, ids: frozenset[int]) -> Found:
    """Mean mass on the keys j > 0 of these ids, of the queries from the first of them on; of all where they may look
    ahead."""
    p, (T, S) = call.p[b, h], call.p.shape[2:]
    marks = [j for j in range(1, S) if call.keys[b][j] in ids]
    if not marks:
        return Found(0.0, 0, 0.0)
    first = marks[0] if call.part == "decoder" else 0
    rows = range(first, T)
    shows = [(i, int(p[i].argmax())) for i in range(T) if p[i].argmax() in marks]
    total, null = (sum(float(m[i, j]) for i in rows for j in marks) for m in (p, call.even[b]))
    return Found(total, len(rows), null, shows=shows)


def broad(call: Call, b: int, h: int) -> Found:
    """Mean of entropy over the logarithm of the number of keys (at most 128), of queries with at least 8 keys."""
    total, count = 0.0, 0
    for i, row in enumerate(call.p[b, h]):
        keys = int(call.seen[b, i].sum())
        if keys >= 8:
            total += min(-sum(w * math.log(w) for w in row if w > 0) / math.log(min(keys, 128)), 1.0)
            count += 1
    return Found(total, count)


# --- roles of links ---------------------------------------------------------------------------------------------------


def mass_on(call: Call, b: int, matrix: Matrix, links: list[list[int]]) -> tuple[float, int]:
    """The sum of a matrix over linked pairs, and how many queries may attend a key that they are linked to."""
    total = sum(float(matrix[i, j]) for i, keys in enumerate(links) for j in keys)
    return total, sum(any(call.seen[b, i, j] for j in keys) for i, keys in enumerate(links))


def on_links(call: Call, b: int, h: int, links: list[list[int]], against: list[list[int]] | None) -> Found:
    """Mean mass on linked keys; held against uniform attention, and against the same head on other links."""
    p = call.p[b, h]
    total, count = mass_on(call, b, p, links)
    null, _ = mass_on(call, b, call.even[b], links)
    shows = [(i, int(p[i].argmax())) for i, keys in enumerate(links) if p[i].argmax() in keys]
    if against is None:
        return Found(total, count, null, shows=shows)
    other, queries = mass_on(call, b, p, against)
    return Found(total, count, null, other / max(queries, 1) * count, shows)


def listed(links: torch.Tensor) -> list[list[list[int]]]:
    """Tables of links as lists."""
    return [[[j for j in keys if j >= 0] for keys in one] for one in links.tolist()]


def shuffled_links(call: Call, rows: list[list[list[int]]], width: int) -> list[list[list[int]]]:
    """The control that draws another key for each link."""
    return listed(shuffled(table(rows, width), call.scene))


def first_key(call: Call) -> list[list[list[int]]]:
    """Key 0, for every query but the first."""
    return [[[0] if i else [] for i in range(call.p.shape[2])] for _ in call.queries]


def copies(call: Call, name: str, special: frozenset[int]) -> list[list[list[int]]]:
    """Other places of the query's token among the random ones, or the places after them (never of a copy's first)."""
    out = []
    for b, ids in enumerate(call.queries):
        source = list(call.passages[b].ids)
        opener = next(i for i in source[1:] if i not in special)
        rows: list[list[int]] = [[] for _ in ids]
        for i, token in enumerate(ids):
            if token in special or token not in source:
                continue
            others = [j for j, one in enumerate(ids) if one == token and (j < i or (j > i and call.part == "encoder"))]
            if name == "duplicate-token":
                rows[i] = others
            elif call.part == "decoder" and token != opener:
                rows[i] = [j + 1 for j in others if j + 1 < i]
        out.append(rows)
    return out


def aligned(call: Call, shift: int) -> list[list[list[int]]]:
    """A decoder that reads the encoder's text one place later: the key of the token it reads, or `shift` further on."""
    T, S = call.p.shape[2:]
    return [[[i - 1 + shift] if 0 <= i - 1 + shift < S else [] for i in range(T)] for _ in call.queries]


def choice(call: Call, b: int, h: int, name: str, special: frozenset[int]) -> tuple[list[int], list[int]]:
    """The key that each query attends most, of the candidates, or of all but its own, first and special ones; else -1.

    Behind it the queries that have two candidates at least.
    """
    p, T = call.p[b, h], call.p.shape[2]
    candidates = call.linked("mentions") if name == "coreference" else None
    best, free = [], []
    for i in range(T):
        if name == "coreference":
            among = [] if candidates is None else candidates[b][i]
        else:
            among = [j for j in range(1, T) if j != i and call.keys[b][j] not in special]
        among = [j for j in among if call.seen[b, i, j]]
        best.append(max(sorted(among), key=lambda j: float(p[i, j]), default=-1))
        free += [i] if len(among) > 1 else []
    return best, free


def usual_distance(passages: Sequence[Passage], name: str, *, earlier: bool) -> int:
    """Query minus key: the distance that most linked queries have; of equals the nearer, then the earlier."""
    counts: Counter[int] = Counter()
    for passage in passages:
        for i, keys in enumerate(passage.links.get(name, ())):
            counts.update(i - j for j in keys if i != j and (i > j or not earlier))
    return min(counts, key=lambda d: (-counts[d], abs(d), -d)) if counts else 0


def argmax(call: Call, b: int, h: int, name: str, special: frozenset[int], every: Sequence[Passage]) -> Found | None:
    """Share of linked queries that choose a linked key."""
    links = call.linked(name)
    if links is None or call.part == "cross":
        return None
    best, free = choice(call, b, h, name, special)
    rows = [i for i in free if links[b][i]]
    shows = [(i, best[i]) for i in rows if best[i] in links[b][i]]
    mass = sum(float(call.p[b, h, i, j]) for i, j in shows)
    if name == "coreference":
        nearest, mentions = call.linked("nearest noun"), call.linked("mentions")
        null = 0 if nearest is None else sum(any(j in links[b][i] for j in nearest[b][i]) for i in rows)
        by_chance = sum(len(links[b][i]) / max(len(mentions[b][i]) if mentions else 1, 1) for i in rows)
        return Found(len(shows), len(rows), null, by_chance, shows, mass=mass)
    usual = usual_distance(every, name, earlier=call.part == "decoder")
    null = sum(i - usual in links[b][i] for i in rows)
    others = other_queries(table(links, call.width(name)), call.scene)[b].tolist()
    elsewhere = sum(best[others[i]] in links[b][i] for i in rows)
    return Found(len(shows), len(rows), null, elsewhere, shows, mass=mass)


# --- all roles of a call ----------------------------------------------------------------------------------------------

OFFSETS = {"previous-token": -1, "self": 0, "next-token": 1}
OFFSETS |= {f"offset-{k}": -k for k in range(2, 9)} | {f"offset+{k}": k for k in range(2, 9)}


def of_text(call: Call, words: Vocabulary) -> Iterator[tuple[str, Callable[[int, int], Found]]]:
    """Roles that are read on a text."""
    if call.part != "cross":
        for name, offset in OFFSETS.items():
            yield name, lambda b, h, offset=offset: at_offset(call, b, h, offset)  # type: ignore[misc]
        yield "local band", lambda b, h: local_band(call, b, h)
        yield "far offset", lambda b, h: far_offset(call, b, h)
        if call.p.shape[2] > 16:
            yield "sink elsewhere", lambda b, h: sink_elsewhere(call, b, h)
    elif call.moved == (1, 0):
        for name, shift in (("alignment", 0), ("alignment, next", 1)):
            rows = aligned(call, shift)
            other = shuffled_links(call, rows[:1], 1) * len(rows)  # one table for all texts
            yield name, lambda b, h, rows=rows, other=other: on_links(call, b, h, rows[b], other[b])  # type: ignore[misc]
    yield "first-token sink", lambda b, h: on_links(call, b, h, first_key(call)[b], None)
    marks = {
        "delimiter": words.delimiters, "punctuation": words.punctuation, "special tokens": words.special,
        "[SEP]": words.separators, "full stop": words.stops, "comma": words.commas,
    }  # fmt: skip
    for name, ids in marks.items():
        yield name, lambda b, h, ids=ids: on_ids(call, b, h, ids)  # type: ignore[misc]
    yield "broad", lambda b, h: broad(call, b, h)


def of_copies(call: Call, avoided: frozenset[int]) -> Iterator[tuple[str, Callable[[int, int], Found]]]:
    """Roles that are read on random tokens repeated."""
    for name in ("duplicate-token", "induction"):
        rows = copies(call, name, avoided)
        width = max(len(keys) for one in rows for keys in one)
        if call.part == "cross" or not width:
            continue
        other = shuffled_links(call, rows, width)
        yield name, lambda b, h, rows=rows, other=other: on_links(call, b, h, rows[b], other[b])  # type: ignore[misc]


def of_links(
    call: Call, words: Vocabulary, every: Sequence[Passage]
) -> Iterator[tuple[str, Callable[[int, int], Found | None]]]:
    """Roles that are read on annotated sentences and on needles."""
    classes = call.linked("same word class")
    if classes is not None:
        again = [
            [[j for j in keys if call.keys[b][j] == call.queries[b][i]] for i, keys in enumerate(one)]
            for b, one in enumerate(classes)
        ]
        yield "same word class", lambda b, h: on_links(call, b, h, classes[b], again[b])
    for name in dict.fromkeys(name for passage in call.passages for name in passage.links):
        if " to " in name or name in ("retrieval", "coreference"):
            yield name, lambda b, h, name=name: argmax(call, b, h, name, words.special, every)  # type: ignore[misc]


@dataclass
class Sums:
    """A head in a role over all texts; `weights` of (text, query, key) are those of the pairs that show it."""

    by_text: dict[int, Found] = field(default_factory=dict)
    weights: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def add(self, text: int, found: Found, p: Matrix) -> None:
        """A text, with the matrix (T, S) that it was found in."""
        self.by_text[text] = found
        shown = found.shows if found.total > 0 else ()
        self.weights |= {(text, i, j): float(p[i, j]) for i, j in shown}

    @property
    def count(self) -> int:
        return sum(one.count for one in self.by_text.values())

    @property
    def value(self) -> float:
        return sum(one.total for one in self.by_text.values()) / max(self.count, 1)

    @property
    def null(self) -> float | None:
        """The larger control."""
        if any(one.null is None for one in self.by_text.values()):
            return None
        controls = [sum(getattr(one, name) or 0.0 for one in self.by_text.values()) for name in ("null", "against")]
        return max(controls) / max(self.count, 1)

    @property
    def mass(self) -> float | None:
        """The mean weight on right choices; None for roles that are no choice."""
        masses = [one.mass for one in self.by_text.values()]
        return None if None in masses else sum(mass or 0.0 for mass in masses) / max(self.count, 1)

    def interval(self) -> tuple[float, float] | None:
        """The middle 95 % of the values of 400 samples, each of as many texts, drawn with replacement."""
        texts = [one for _, one in sorted(self.by_text.items()) if one.count]
        if len(texts) < 2:
            return None
        samples = np.random.default_rng(0).multinomial(len(texts), [1 / len(texts)] * len(texts), size=400)
        values = []
        for times in samples:
            total = sum(n * one.total for n, one in zip(times, texts, strict=True))
            values.append(total / max(sum(n * one.count for n, one in zip(times, texts, strict=True)), 1))
        low, high = np.percentile(values, [2.5, 97.5])
        return float(low), float(high)


Expected = dict[tuple[int, int], dict[str, Sums]]
"""By layer and head, then by role."""


def gathered(
    passes: Sequence[Sequence[Call]], roles: Callable[[Call], Iterator[tuple[str, Callable[[int, int], Any]]]]
) -> Expected:
    """The roles of all calls (in the order of layers) of some forward passes."""
    out: Expected = defaultdict(lambda: defaultdict(Sums))
    for calls in passes:
        for layer, call in enumerate(calls):
            for name, role in roles(call):
                for b, passage in enumerate(call.passages):
                    for h in range(call.p.shape[1]):
                        found = role(b, h)
                        if found is not None:
                            out[layer, h][name].add(passage.text, found, call.p[b, h])
    return out
