"""Norm-weighted attention against transformers' own eager weights and the vectors that each key would write."""

from __future__ import annotations

import pytest
import torch
from hf_models import BY_NAME
from torch import Tensor

import headwise
from headwise.look import norm_weighted, norm_weighted_map

TEXT = [1, 7, 23, 11, 5, 7, 31, 2, 47, 23, 11]
VALUES = {"GPT-2": "transformer.h.{}.attn.c_attn", "Llama GQA": "model.layers.{}.self_attn.v_proj"}
OUTPUTS = {"GPT-2": "transformer.h.{}.attn.c_proj", "Llama GQA": "model.layers.{}.self_attn.o_proj"}


@torch.no_grad()
def by_hand(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """The eager weights (H, T, T), and |v_j W_O| (H, T) of each layer."""
    model = BY_NAME[name].build().eval()
    config, values = model.config, {}
    hooks = [
        model.get_submodule(VALUES[name].format(n)).register_forward_hook(
            lambda *x, n=n: values.update({n: x[2][0].chunk(3, -1)[2] if name == "GPT-2" else x[2][0]})  # type: ignore[misc]
        )
        for n in range(config.num_hidden_layers)
    ]
    maps = [P[0] for P in model(torch.tensor([TEXT]), output_attentions=True).attentions]
    for hook in hooks:
        hook.remove()
    H, lengths = config.num_attention_heads, []
    for n in range(config.num_hidden_layers):
        matrix = model.get_submodule(OUTPUTS[name].format(n)).weight
        blocks = (matrix if name == "GPT-2" else matrix.mT).chunk(H)
        v = values[n].unflatten(-1, (-1, blocks[0].shape[0]))  # (T, K, V)
        K = v.shape[1]
        lengths.append(torch.stack([(v[:, h * K // H] @ blocks[h]).norm(dim=-1) for h in range(H)]))
    return maps, lengths


@pytest.mark.parametrize("name", VALUES)
def test_against_whole_matrices(name: str) -> None:
    maps, lengths = by_hand(name)
    model = BY_NAME[name].build()
    found = norm_weighted(model, TEXT)
    assert len(found.heads) == sum(map(len, maps))
    for one in found.heads:
        P, moved = maps[one.layer][one.head], maps[one.layer][one.head] * lengths[one.layer][one.head]
        assert one.first == pytest.approx(float(P[1:, 0].mean()), abs=1e-5)
        assert one.first_moved == pytest.approx(float((moved[:, 0] / moved.sum(1))[1:].mean()), abs=1e-5)
        assert one.moved == pytest.approx(float(moved[1:].sum(1).mean()), rel=1e-4)
    ours = norm_weighted_map(model, torch.tensor([TEXT]), 1, 2)
    torch.testing.assert_close(ours[0], maps[1][2], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[1], maps[1][2] * lengths[1][2], atol=1e-5, rtol=1e-4)
    assert found.scores("first_moved")[1][2] == next(x.first_moved for x in found.heads if (x.layer, x.head) == (1, 2))


class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = torch.nn.Embedding(53, 12), headwise.MultiHeadAttention(12, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.attend(self.embed(ids), mask=headwise.causal()) @ self.embed.weight.T


def test_a_sink_without_a_value_moves_nothing() -> None:
    model = Reader()
    before = norm_weighted(model, TEXT)
    with torch.no_grad():
        first = model.embed.weight[TEXT[0]]
        weight = model.attend.v_proj.weight  # made blind to the first token
        weight -= torch.outer(weight @ first, first) / first.square().sum()
    after = norm_weighted(model, TEXT)
    for one, other in zip(after.heads, before.heads, strict=True):
        assert one.first == pytest.approx(other.first, abs=1e-6) and one.first > 0.01
        assert one.first_moved == pytest.approx(0, abs=1e-5) and other.first_moved > 0.01


@pytest.mark.parametrize(
    ("ids", "place", "text"),
    [
        ([7], (0, 0), "a text of at least 2 tokens; got 1"),
        (TEXT, (0, 99), r"and no head 0\.99"),
        (TEXT, (99, 0), r"and no head 99\.0"),
    ],
)
def test_what_does_not_fit_is_refused(ids: list[int], place: tuple[int, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        norm_weighted_map(BY_NAME["Llama GQA"].build(), ids, *place)


def test_what_no_head_writes_is_refused() -> None:
    model = Reader()
    with pytest.raises(ValueError, match="the numbers are first, first_moved and moved; got 'second'"):
        norm_weighted(model, TEXT).scores("second")
    model.attend.o_proj = torch.nn.Sequential(torch.nn.Tanh(), model.attend.o_proj)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"no module reads the heads of 'attend' side by side .*no W_O a head"):
        norm_weighted(model, TEXT)


def test_the_table_lists_the_heads_whose_first_token_has_the_largest_weight() -> None:
    found = norm_weighted(BY_NAME["GPT-2"].build(), TEXT)
    ranked = sorted(found.heads, key=lambda one: one.first, reverse=True)
    assert [one.first for one in ranked] != [one.first for one in found.heads]
    rows = [*zip(*(column.cells for column in found.table(most=3).columns), strict=True)]
    assert rows == [
        (f"{one.layer}", f"{one.head}", *(f"{number:.3f}" for number in (one.first, one.first_moved, one.moved)))
        for one in ranked[:3]
    ]
    lines = str(found).splitlines()
    assert len(lines) > len(found.heads) and any(f"{ranked[-1].moved:.3f}" in line for line in lines)
