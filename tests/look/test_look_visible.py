"""Scores under masks that keep keys from queries, and the evidence that is shown for scores of one place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted import DELIMITERS, Tiny, text
from test_look_numbers import matrices
from torch import Tensor

import headwise
from headwise import look
from headwise.look.records.axes import NOWHERE
from headwise.look.records.head import HeadRecord
from headwise.look.roles import spatial_measures as placed
from headwise.look.roles import text_measures as links
from headwise.look.roles.measures import FAR, CallStatistics

T = 97


def chunked(size: int) -> Tensor:
    """Each query attends what of its chunk stands before it, as in Llama 4."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    return (j <= i) & (i // size == j // size)


def prefixed() -> Tensor:
    """A window of 11 behind a prefix of 2 that all attend."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    return (j <= i) & ((i - j < 11) | (j < 2))


KEPT = {"chunks": chunked(13), "window": chunked(T) & chunked(T).triu(-10), "prefix": prefixed(), "causal": chunked(T)}


def shares(kept: Tensor) -> Tensor:
    """Uniform attention, (T, T)."""
    return kept / kept.sum(-1, keepdim=True).double()


def heads_under(kept: Tensor) -> list[tuple[HeadRecord, Tensor]]:
    """Each head's record under the mask, with its float64 matrix (T, T)."""
    model = Tiny(mask=headwise.keep(kept))
    record = look.at(model, text(T), delimiters=DELIMITERS, repeats=None)
    ps = [p[0, h] for p in matrices(model, torch.tensor([text(T)])) for h in range(3)]
    return list(zip(record.heads, ps, strict=True))


@pytest.mark.parametrize("name", KEPT)
def test_offsets_count_the_queries_that_may_attend_them(name: str) -> None:
    kept = KEPT[name]
    for head, p in heads_under(kept):
        for k in (1, 3, 7):
            score, able = head.scores["previous-token" if k == 1 else f"offset-{k}"], int(kept.diagonal(-k).sum())
            assert score.count == able
            assert score.value == pytest.approx(float(p.diagonal(-k).sum()) / able, abs=2e-5)
            assert score.null == pytest.approx(float(shares(kept).diagonal(-k).sum()) / able, abs=2e-5)
        free = kept.sum(-1) > 1  # a query that may attend one key alone has no choice
        count = int(free.sum())
        near = sum(float((shares(kept) * free[:, None]).diagonal(-k).sum()) for k in range(FAR + 1))
        band = head.scores["local band"]
        assert band.count == count and band.null == pytest.approx(near / count, abs=2e-5) and band.null <= 1 + 1e-5
        mass = sum(float((p * free[:, None]).diagonal(-k).sum()) for k in range(FAR + 1))
        assert band.value == pytest.approx(mass / count, abs=2e-5)


@pytest.mark.parametrize("name", KEPT)
def test_the_chance_of_a_sink_counts_queries_that_may_attend_it(name: str) -> None:
    kept = KEPT[name]
    for head, p in heads_under(kept):
        best = p.argmax(-1)
        alphas = [float(p[k:, k][best[k:] == k].sum()) / (T - k) if 0 < k <= T / 2 else 0.0 for k in range(T)]
        k = max(range(T), key=alphas.__getitem__)
        score = head.scores["sink elsewhere"]
        assert score.value == pytest.approx(alphas[k], abs=2e-5)
        assert score.null == pytest.approx(float(shares(kept)[k:, k].sum()) / (T - k), abs=2e-5)


@pytest.mark.parametrize("name", KEPT)
def test_a_link_counts_the_queries_that_may_attend_it(name: str) -> None:
    """Of a window the first token is seen by a few queries alone: the others would make its sink look weak."""
    kept = KEPT[name]
    model = Tiny(mask=headwise.keep(kept))
    ids = text(T)
    classes = [[j for j in range(T) if j % 3 == i % 3 and j < i] for i in range(T)]
    reading = {"sentences": [look.Passage(ids, links={"same word class": classes})]}
    record = look.at(model, ids, delimiters=DELIMITERS, repeats=None, readings=reading)
    ps = [p[0, h] for p in matrices(model, torch.tensor([ids])) for h in range(3)]
    first = torch.zeros(T, T, dtype=torch.bool)
    first[1:, 0] = True
    linked = {"first-token sink": first, "same word class": torch.zeros_like(first)}
    for i, keys in enumerate(classes):
        linked["same word class"][i, [j for j in keys if j]] = True  # the first token is no key of a link
    for head, p in zip(record.heads, ps, strict=True):
        for role, there in linked.items():
            score, able = head.scores[role], int((there & kept).any(-1).sum())
            uniform = float((shares(kept) * there).sum()) / able
            assert score.count == able
            assert score.value == pytest.approx(float((p * there).sum()) / able, abs=2e-5)
            assert score.null is not None and uniform - 2e-5 <= score.null <= 1
        assert head.scores["first-token sink"].null == pytest.approx(
            float((shares(kept) * first).sum()) / int((first & kept).sum()), abs=2e-5
        )


def got(keys: list[int], largest: list[float], **scene: Any) -> CallStatistics:
    """What a pass gives, of which these functions read the largest weights alone."""
    made = object.__new__(CallStatistics)
    rows = SimpleNamespace(largest_key=torch.tensor([[keys]]), largest=torch.tensor([[largest]]))
    made.__dict__.update(rows=rows, scene=SimpleNamespace(**scene), kept={})
    return made


def shows(pairs: Any, one: CallStatistics) -> Any:
    """Whether the largest weight of each query is on a key that the score counts."""
    return pairs(one, one.rows.largest_key)


def test_evidence_of_a_far_offset_lies_at_that_offset() -> None:
    keys = [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 1, 1]  # 10 back four times of those far away: 10, 11, 12
    seen = shows(links.on_far_offset, got(keys, [0.5] * 16))
    assert seen.nonzero()[:, 2].tolist() == [10, 11, 12]
    assert not shows(links.on_far_offset, got([0] * 5, [0.5] * 5)).any()


def test_evidence_of_a_sink_lies_on_that_sink() -> None:
    keys = [0, 3, 2, 3, 3, 2, 5, 3, 3, 2, 3]
    seen = shows(links.on_other_sink, got(keys, [0.9] * 11))
    assert seen.nonzero()[:, 2].tolist() == [3, 4, 7, 8, 10]  # query 1 looks ahead at it


def test_evidence_of_a_patch_sink_lies_on_that_patch() -> None:
    cells = [NOWHERE, *((0, i // 3, i % 3) for i in range(9))]
    axis = SimpleNamespace(cells=tuple(cells), grids=((3, 3),))
    keys = [4, 4, 0, 4, 4, 4, 7, 7, 4, 4]
    seen = shows(placed.on_patch_sink, got(keys, [0.9] * 10, axes=(axis, axis)))
    assert seen.nonzero()[:, 2].tolist() == [1, 3, 5, 8, 9]  # query 0 is no patch, query 4 the patch itself
