"""Ground truths of looks: a model whose heads are what they are by construction, and a record checked by its matrix.

Its input at a place is (token one-hot, previous token one-hot, place one-hot, 1), so that a head's W_Q and W_K can
say in words what it attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.look import HeadRecord, Score

VOCABULARY, PLACES, DELIMITERS = 61, 173, (2, 3)
SHARP = 30.0
AHEAD = ("next-token", "offset+3")  # what only a model without a causal mask can play
NAMES = ("previous-token", "offset-3", "self", "first-token sink", "delimiter", "broad", "duplicate-token", "induction")


class Planted(nn.Module):
    """One layer, a head for each name; `ahead` lets queries see what comes after them."""

    def __init__(self, names: Sequence[str] = NAMES, *, ahead: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 1)  # tells the size of the vocabulary; its numbers are not used
        width = 2 * VOCABULARY + PLACES + 1
        self.mask = None if ahead else headwise.causal()
        self.attend = headwise.MultiHeadAttention(width, len(names), head_dim=width)
        self.token, self.before = range(VOCABULARY), range(VOCABULARY, 2 * VOCABULARY)
        self.place, self.one = range(2 * VOCABULARY, 2 * VOCABULARY + PLACES), width - 1
        with torch.no_grad():
            for h, name in enumerate(names):
                head = self.attend.head(h)
                head.W_Q.zero_()
                head.W_K.zero_()
                self.plant(name, head.W_Q, head.W_K)
                head.W_Q.mul_(SHARP * width**0.5)

    def plant(self, name: str, W_Q: Tensor, W_K: Tensor) -> None:
        token, before, place, one = self.token, self.before, self.place, self.one
        same = torch.arange(VOCABULARY)
        away = {"previous-token": -1, "self": 0, "next-token": 1}.get(name)
        away = int(name.removeprefix("offset")) if name.startswith("offset") else away
        if away is not None:
            i = torch.arange(max(0, -away), min(PLACES, PLACES - away))
            W_Q[place[0] + i, place[0] + i + away] = 1
            W_K[place[0] + i + away, place[0] + i + away] = 1
        elif name == "first-token sink":
            W_Q[one, one] = 1
            W_K[place[0], one] = 1
        elif name == "delimiter":
            W_Q[one, one] = 1
            W_K[torch.tensor(DELIMITERS), one] = 1
        elif name == "duplicate-token":
            W_Q[same, same] = 1  # the same token ...
            W_K[same, same] = 1
            i = torch.arange(PLACES) + place[0]
            W_Q[i, i] = 1  # ... at another place
            W_K[i, i] = -2
        elif name == "induction":
            W_Q[token[0] + same, same] = 1
            W_K[before[0] + same, same] = 1

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, width)."""
        B, T = ids.shape
        x = torch.zeros(B, T, self.attend.d_model, device=ids.device)
        batch, i = torch.arange(B)[:, None], torch.arange(T)[None]
        x[batch, i, ids] = 1
        x[batch, i[:, 1:], self.before[0] + ids[:, :-1]] = 1
        x[batch, i, self.place[0] + i] = 1
        x[..., self.one] = 1
        return self.attend(x, mask=self.mask)


def text(length: int = 97) -> list[int]:
    """Tokens with a delimiter every five places, starting with a BOS of its own."""
    make = torch.Generator().manual_seed(5)
    ids = torch.randint(4, VOCABULARY, (length,), generator=make)
    ids[4::5] = torch.randint(DELIMITERS[0], DELIMITERS[1] + 1, (len(ids[4::5]),), generator=make)
    ids[0] = 1
    return ids.tolist()


class Tiny(nn.Module):
    """A random model of two layers: token and place embeddings, residual attention."""

    def __init__(self, *, mask: headwise.Mask | None = None, heads: int = 3, kv_heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mask = mask
        self.embed, self.place = nn.Embedding(VOCABULARY, 24), nn.Embedding(PLACES, 24)
        self.drop = nn.Dropout(0.5)
        self.layers = nn.ModuleList(
            headwise.MultiHeadAttention(24, heads, num_kv_heads=kv_heads, head_dim=8) for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = x + layer(3 * x, mask=self.mask)
        return x


class Mixed(Tiny):
    """Layers that differ: two heads that look back and then as many as `heads`, under a mask of their own each."""

    def __init__(self, *masks: headwise.Mask | None, heads: int = 3) -> None:
        super().__init__()
        self.masks = masks
        self.layers[0] = headwise.MultiHeadAttention(24, 2)
        self.layers[1] = headwise.MultiHeadAttention(24, heads, head_dim=5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for layer, mask in zip(self.layers, self.masks, strict=True):
            x = x + layer(x, mask=mask)
        return x


class Twice(nn.Module):
    """One module called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(VOCABULARY, 12), headwise.MultiHeadAttention(12, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.attend(self.attend(self.embed(ids), mask=headwise.causal()), mask=headwise.causal())


def numbers(*scores: Score, **changed: Any) -> HeadRecord:
    """A record that has these scores."""
    values: dict[str, Any] = dict(
        module="a", call=0, layer=0, head=0, part="decoder", entropy=1.0, largest=0.5, distance=2.0,
        offsets=(0.0,) * 9, ahead=(), scores={score.name: score for score in scores}, queries=97, keys=97,
    )  # fmt: skip
    played = [score.name for score in scores if score.plays]
    states = {role.name for role in headwise.look.ROLES if role.state}
    values |= {"role": next((name for name in played if name not in states), "-")}
    values |= {"states": tuple(name for name in played if name in states)}
    return HeadRecord(**values | changed)


def played(name: str, value: float = 0.75, threshold: float = 0.5) -> Score:
    """A score that plays its role."""
    return Score(name, value, 0.01, threshold, 97, plays=True)


def check_against(head: HeadRecord, p: Tensor, marks: Tensor, *, tolerance: float = 2e-5) -> None:
    """A record against its float64 matrix p (T, S), in which 0 is what may not be attended.

    Rows that sum to less than 1 gave the rest to a sink column; rows of zeros are empty.
    """
    T, S = p.shape
    seen, mass = p > 0, p.sum(-1)
    alive = mass > 0
    has_sink = bool((mass[alive] < 0.999).any())
    sink = torch.where(alive, (1 - mass).clamp(min=0), 0.0) * has_sink
    entropy = -torch.xlogy(p, p).sum(-1) - torch.xlogy(sink, sink)
    share = torch.where(alive[:, None], p / mass[:, None], 0.0)
    away = (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs()
    n = seen.sum(-1)
    even = entropy / (n + has_sink).clamp(min=2, max=128).log()
    ahead = T == S and any(bool(seen.diagonal(k).any()) for k in range(1, 9))
    unable = 0 if ahead or T != S or not bool(marks.any()) else int(marks.nonzero()[0])
    want = {
        "entropy": entropy[alive].mean(),
        "largest": p.max(-1).values[alive].mean(),
        "distance": (share * away).sum(-1)[alive].mean(),
        "first-token sink": p[1:, 0].sum() / max(int(seen[1:, 0].sum()), 1),
        "delimiter": p[:, marks].sum() / max(int(alive.sum()) - unable, 1),
        "broad": even[n >= 8].mean() if bool((n >= 8).any()) else torch.zeros(()),
    }
    if head.part == "cross":
        assert (head.distance, head.offsets, head.ahead) == (None, (), ())
        del want["distance"]
    for name, exact in want.items():
        value = getattr(head, name) if hasattr(head, name) else head.value(name) or 0.0
        assert value == pytest.approx(float(exact), abs=tolerance, rel=tolerance), name
    if T == S and head.part != "cross":
        assert len(head.offsets) == 9 and len(head.ahead) == 8 * ahead
        masses = [*enumerate(head.offsets), *((-k, portion) for k, portion in enumerate(head.ahead, 1))]
        for k, portion in masses:
            there = p.diagonal(-k)[seen.diagonal(-k)]
            assert portion == pytest.approx(float(there.mean()) if len(there) else 0.0, abs=tolerance), k
        free = p.diagonal()[seen.diagonal() & (n > 1)]  # a query with one key has no choice
        assert (head.value("self") or 0.0) == pytest.approx(float(free.mean()) if len(free) else 0.0, abs=tolerance)
    rows, columns = (torch.nn.functional.one_hot(torch.arange(n) * min(n, 32) // n).double() for n in (T, S))
    exact_map = (rows.mT @ share @ columns) / (alive.double() @ rows).clamp(min=1)[:, None]
    assert torch.allclose(torch.tensor(head.map, dtype=torch.float64), exact_map, atol=tolerance + 1e-5)
