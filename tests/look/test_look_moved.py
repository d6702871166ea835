"""What the weights of each head move, in a look: against whole matrices, and where it is not known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hf_models import BY_NAME
from test_norm_weighted import TEXT, Reader, by_hand

import headwise
from headwise import look
from headwise.look.collect import moved as collect_moved
from headwise.look.records.head import HeadMap


@pytest.mark.parametrize("name", ["GPT-2", "Llama GQA"])
def test_against_whole_matrices(name: str) -> None:
    maps, lengths = by_hand(name)
    seen = look.at(BY_NAME[name].build(), TEXT)
    assert len(seen.moved) == len(seen.heads)
    for head, large, weights in zip(seen.heads, seen.moved, seen.maps, strict=True):
        moved = maps[head.layer][head.head] * lengths[head.layer][head.head]
        share = moved / moved.sum(1, keepdim=True)
        torch.testing.assert_close(torch.tensor(large.weights()), share.double().float(), atol=0.005, rtol=0)
        assert head.first_moved == pytest.approx(float(share[1:, 0].mean()), abs=1e-5)
        assert (large.rows, large.columns) == (weights.rows, weights.columns) and large != weights
    assert look.Look.from_dict(json.loads(seen.to_json())) == seen
    assert seen.rows()[3]["first_moved"] == seen.heads[3].first_moved


def test_pooled_maps_are_the_mass_of_their_keys() -> None:
    """A text of more tokens than a map has cells: rows still sum to 1, and the mean share of the first key is exact."""
    model, ids = Reader(), torch.arange(300) % 53
    seen = look.at(model, ids)
    exact = look.norm_weighted(model, ids)
    for head, large, one in zip(seen.heads, seen.moved, exact.heads, strict=True):
        assert large.rows == large.columns == 128
        assert [sum(row) for row in large.weights()] == pytest.approx([1.0] * 128, abs=0.05)
        assert head.first_moved == pytest.approx(one.first_moved, abs=1e-5)


class Bounded(Reader):
    """Scores under a cap, of a text whose tokens before the fifth may not attend."""

    def __init__(self) -> None:
        super().__init__()
        self.attend.inner = headwise.nn.InnerAttention(scale=3.0, softcap=1.5)
        self.attend.v_proj.weight.data[:, :5] *= 4

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.attend(self.embed(ids), mask=self.mask(ids.shape[1])) @ self.embed.weight.T

    def mask(self, T: int) -> torch.Tensor:
        return torch.ones(T, T, dtype=torch.bool).tril() & (torch.arange(T)[:, None] >= 5)


def test_a_share_is_of_the_rows_that_attend_under_the_cap_of_their_scores() -> None:
    torch.manual_seed(3)
    model, ids = Bounded(), torch.arange(1, 18)
    seen = look.at(model, ids)
    mha, T = model.attend, len(ids)
    with torch.no_grad():
        parts = (mha.q_proj, mha.k_proj, mha.v_proj)
        q, k, v = (part(model.embed(ids)).unflatten(-1, (3, -1)).transpose(0, 1) for part in parts)
        scores = (1.5 * (q @ k.mT * 3.0 / 1.5).tanh()).masked_fill(~model.mask(T), -torch.inf)
        written = v @ mha.o_proj.weight.T.unflatten(0, (3, -1))
        moved = scores[:, 5:].softmax(-1) * written.norm(dim=-1)[:, None]
        share = moved[..., 0] / moved.sum(-1)
    assert share.std() > 0.01
    for head in seen.heads:
        assert head.first_moved == pytest.approx(float(share[head.head].mean()), abs=1e-5)
    short = look.at(model, ids[:5], repeats=None)
    assert [head.first_moved for head in short.heads] == [None] * 3, "no row attends, so there is no mean"


GATE = torch.tensor([0.5, 1.0, 2.0])


class Gated(Reader):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.attend(self.embed(ids), mask=headwise.causal(), gate=GATE) @ self.embed.weight.T


def test_where_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate after the weights, a call that is too long, a look without large maps: no maps, and no number."""
    assert look.at(Reader(), TEXT).moved
    assert look.at(Reader(), TEXT, full_maps=False).heads[0].first_moved is None
    one_token = look.at(Reader(), [7], repeats=None)
    assert one_token.heads[0].first_moved is None and one_token.moved[0].weights() == ((1.0,),)
    gated = look.at(Gated(), TEXT)
    assert gated.maps and gated.moved == () and gated.heads[0].first_moved is None
    assert "moves" not in str(gated) and "moves" in str(look.at(Reader(), TEXT))
    monkeypatch.setattr(collect_moved, "SHORT", len(TEXT) - 1)
    assert look.at(Reader(), TEXT).moved == ()


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_values_that_are_not_finite_move_nothing_that_is_known(what: float) -> None:
    model = Reader()
    model.attend.v_proj.weight.data[0, 0] = what
    seen = look.at(model, TEXT)
    assert seen.maps and seen.moved == () and seen.heads[0].first_moved is None


def test_a_model_of_which_some_layers_are_known() -> None:
    class Both(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.before = headwise.MultiHeadAttention(12, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.before(self.embed(ids), mask=headwise.causal(), gate=GATE)
            return self.attend(x, mask=headwise.causal()) @ self.embed.weight.T

    seen = look.at(Both(), TEXT)
    assert [bool(large.data) for large in seen.moved] == [False] * 3 + [True] * 3
    assert [head.first_moved is None for head in seen.heads] == [True] * 3 + [False] * 3


def test_maps_run_parallel_to_heads() -> None:
    seen = look.at(Reader(), TEXT)
    with pytest.raises(ValueError, match="moved run parallel to heads: got 1 maps for 3 heads"):
        replace(seen, moved=(HeadMap(0, 0, b""),))
