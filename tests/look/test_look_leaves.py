"""A look leaves the model's own numbers, whatever its layers compute; and what it prints stands under its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import look
from headwise.look.records.axes import Axis
from headwise.nn import (
    GatedMultiHeadAttention,
    InnerAttention,
    LatentAttention,
    MultiHeadAttention,
    Rotary,
    headwise_gate,
)

M, H, K, D = 24, 6, 3, 8
IDS = torch.tensor([[3, 9, 5, 11, 4, 8, 7, 2, 10, 6, 1]])
SIZES: dict[str, Any] = {"num_kv_heads": K, "head_dim": D}


class Layers(nn.Module):
    """Two layers of a kind, each added to its input, so that what one gives is what the next is given."""

    def __init__(self, make: Any, **call: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.call = nn.Embedding(13, M), call
        self.layers, self.head = nn.ModuleList(make() for _ in range(2)), nn.Linear(M, 13)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * 2
        for layer in self.layers:
            x = x + layer(x, mask=headwise.causal(), **self.call)
        out: Tensor = self.head(x)
        return out


def biased() -> MultiHeadAttention:
    return MultiHeadAttention(M, H, bias=True, **SIZES)


GATE = torch.rand(1, H, 1, D, generator=torch.Generator().manual_seed(1))
MODELS: dict[str, Any] = {
    "plain": lambda: Layers(biased),
    "sinks, softcap": lambda: Layers(
        lambda: MultiHeadAttention(M, H, inner=InnerAttention(sinks=torch.randn(H), softcap=2.0), **SIZES)
    ),
    "a gate of numbers": lambda: Layers(lambda: GatedMultiHeadAttention(M, H, **SIZES)),
    "a gate of heads": lambda: Layers(lambda: GatedMultiHeadAttention(M, H, gate=headwise_gate, **SIZES)),
    "a gate of the call": lambda: Layers(biased, gate=GATE),
    "both gates": lambda: Layers(lambda: GatedMultiHeadAttention(M, H, **SIZES), gate=GATE[..., 0, 0]),
    "latent": lambda: Layers(
        lambda: LatentAttention(M, H, kv_lora_rank=11, nope_dim=D, rope_dim=4, value_dim=5, rotary=Rotary(4))
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_its_own_numbers_while_it_is_looked_at(name: str) -> None:
    model = MODELS[name]().eval()
    seen: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        expected = model(IDS)
    hook = model.register_forward_hook(lambda _, args, out: seen.append((args[0], out)), with_kwargs=False)
    look.at(model, IDS[0], repeats=None)
    look.importance(model, [IDS[0].tolist()], by=("gradient", "contribution") if "gate" not in name else ("gradient",))
    hook.remove()
    same = [out for ids, out in seen if ids.shape == IDS.shape and torch.equal(ids, IDS)]
    assert len(same) >= 2
    for out in same:
        torch.testing.assert_close(out.detach(), expected, rtol=1e-4, atol=1e-5)


def test_the_columns_of_a_comparison_are_the_numbers_of_its_heads() -> None:
    models = [MODELS[name]().eval() for name in ("plain", "sinks, softcap")]
    compared = look.compare(
        *(look.at(model, IDS[0], repeats=None, name=name) for model, name in zip(models, "ab", strict=True))
    )
    changed = {f"{head.layer}.{head.head}": head for head in compared.heads}
    columns = {str(column.header): list(map(str, column.cells)) for column in compared.table().columns}
    assert all(len({head.moved, head.divergence, head.near}) == 3 for head in compared.heads)
    printed = str(compared).splitlines()[len(compared.summary()) :]
    assert printed[0].split()[:5] == ["head", "after", "moved", "JS", "near"]
    for n, place in enumerate(columns["head"]):
        head = changed[place]
        numbers = [f"{x:.3f}" for x in (head.moved, head.divergence, head.near)]
        assert [columns[name][n] for name in ("moved", "JS", "near")] == numbers, place
        assert columns["after"][n] == f"{head.other_layer}.{head.other_head}"
        assert printed[1 + n].split()[:5] == [place, columns["after"][n], *numbers]


def test_cells_lie_in_their_pictures() -> None:
    """The last row and column, and one beyond each; negative numbers; a picture that is not there."""
    grids = ((2, 3), (5, 4))
    for picture, (rows, columns) in enumerate(grids):
        for cell in ((picture, rows - 1, columns - 1), (picture, 0, 0), (-1, -1, -1)):
            assert Axis("picture", 1, cells=(cell,), grids=grids).cells == (cell,)
        for row, column in ((rows, 0), (0, columns), (-1, 0), (0, -1), (rows, columns)):
            with pytest.raises(ValueError, match=r"an axis's cells are \(picture, row, column\) in its grids"):
                Axis("picture", 1, cells=((picture, row, column),), grids=grids)
    for picture in (-1, 2):
        with pytest.raises(ValueError, match=r"an axis's cells"):
            Axis("picture", 1, cells=((picture, 0, 0),), grids=grids)
    for places in ((3,), (-1,), (0, 3)):
        with pytest.raises(ValueError, match=r"an axis of 3 places has no place"):
            Axis("text", 3, apart={"[CLS]": places})
    assert Axis("text", 3, apart={"[CLS]": (0, 2)}).apart == {"[CLS]": (0, 2)}
