"""The walk through one head: its numbers are those of the definition, on drawn modules and on the packaged model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import look

T, M, H, K = 7, 24, 6, 3


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, M)
        self.first = headwise.MultiHeadAttention(M, H, num_kv_heads=K)
        self.second = headwise.MultiHeadAttention(M, H, num_kv_heads=K, bias=True)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        x = x + self.first(x, mask=headwise.causal())
        return self.second(x, mask=headwise.causal())


@pytest.mark.parametrize(("head", "query"), [(0, -1), (3, 2), (5, 4)])
def test_every_stage_is_that_of_the_definition(head: int, query: int) -> None:
    torch.manual_seed(5)
    model = Reader().double()
    ids = torch.tensor([[3, 5, 8, 13, 21, 34, 55]])
    found = look.walk(model, ids, layer=1, head=head, query=query)
    with torch.no_grad():
        x = model.embed(ids)[0]
        x = x + model.first(x[None], mask=headwise.causal())[0]
        part, i, D, shared = model.second, query % T, M // H, head // (H // K)
        q = part.q_proj(x).view(T, H, D)[i, head]
        k, v = (proj(x).view(T, K, D)[:, shared] for proj in (part.k_proj, part.v_proj))
        scores = k @ q / math.sqrt(D)
        weights = torch.softmax(scores[: i + 1], 0)
        mixed = weights @ v[: i + 1]
        written = part.o_proj.weight[:, head * D : (head + 1) * D] @ mixed
        whole = part(x[None], mask=headwise.causal())[0, i]
    close = {"rel": 1e-5, "abs": 1e-6}  # the walk keeps float32
    assert found.query == i and found.scale == pytest.approx(D**-0.5)
    for name, wanted in (("query", q), ("head", mixed), ("written", written), ("layer", whole)):
        assert found[name].values == pytest.approx(wanted.tolist(), **close), name
    assert [one.score for one in found.keys] == pytest.approx(scores.tolist(), **close)
    assert [one.weight for one in found.keys[: i + 1]] == pytest.approx(weights.tolist(), **close)
    assert [one.masked is None for one in found.keys] == [j > i for j in range(T)]
    assert found.keys[2].key == pytest.approx(k[2].tolist(), **close)
    assert found.keys[2].value == pytest.approx(v[2].tolist(), **close)
    assert "written" in str(found) and f"head 1.{head}" in str(found) and "more keys" not in str(found)


def test_what_does_not_exist_is_refused() -> None:
    model = Reader()
    for places, message in (
        ({"layer": 2}, "2 layers, 0 to 1; got layer 2"),
        ({"head": 6}, "6 heads, 0 to 5; got head 6"),
        ({"query": 3}, "3 tokens, 0 to 2; got query 3"),
    ):
        with pytest.raises(ValueError, match=message):
            look.walk(model, [1, 2, 3], **places)
    with pytest.raises(KeyError, match="there are query, head, written, layer"):
        look.walk(model, [1, 2, 3])["scores"]
