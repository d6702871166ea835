"""Models whose weights are on the meta device: loaded when a module is called (offloaded), or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import look

IDS = [3, 5, 8, 13, 21, 34, 55]


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 24)
        self.layers = nn.ModuleList(headwise.MultiHeadAttention(24, 6, num_kv_heads=3) for _ in range(2))
        self.head = nn.Linear(24, 97)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, mask=headwise.causal())
        return self.head(x)


def offload(model: nn.Module) -> nn.Module:
    """Keep the weights of each module on the meta device except while it runs, as accelerate's hooks do."""
    for part in model.modules():
        kept = {name: weight.detach() for name, weight in part.named_parameters(recurse=False)}
        if kept:
            _hook(part, kept)
    return model


def _hook(part: nn.Module, kept: dict[str, Tensor]) -> None:
    def load(*_: Any) -> None:
        for name, weight in kept.items():
            setattr(part, name, nn.Parameter(weight))

    def unload(*_: Any) -> None:
        for name, weight in kept.items():
            setattr(part, name, nn.Parameter(weight.to("meta")))

    unload()
    part.register_forward_pre_hook(load)
    part.register_forward_hook(unload)


READERS: dict[str, Any] = {
    "at": look.at,
    "walk": look.walk,
    "ablate": lambda model, ids: look.ablate(model, ids, [(0, 1)]),
    "importance": look.importance,
}


@pytest.mark.parametrize("name", READERS)
def test_an_offloaded_model_gives_the_numbers_of_the_loaded_one(name: str) -> None:
    torch.manual_seed(4)
    model, read = Causal(), READERS[name]
    wanted, found = read(model, IDS), read(offload(model), IDS)
    assert {**vars(found), "seconds": 0} == {**vars(wanted), "seconds": 0}


@pytest.mark.parametrize("name", READERS)
def test_a_model_without_numbers_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Causal are on the meta device and hold no numbers; load them first"):
        READERS[name](Causal().to("meta"), IDS)
