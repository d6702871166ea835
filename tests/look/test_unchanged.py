"""Layers before the first head that is replaced are not computed again, and the effects stay the same."""

from __future__ import annotations

import pytest
import torch
from hf_models import BY_NAME

from headwise import look
from headwise.look.interventions import gates

CLEAN, CORRUPTED = [1, 7, 23, 11, 5, 7, 31, 2], [1, 7, 23, 13, 5, 7, 31, 2]


def metric(output: object, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = output.logits  # type: ignore[attr-defined]
    return logits[:, -1, 3] - logits[:, -1, 5]


@pytest.mark.parametrize("name", ["GPT-2", "Llama GQA", "T5"])
def test_effects_are_those_of_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME[name].build()
    monkeypatch.setattr(gates, "ROWS", 3)
    found = []
    for many in (10**9, 2):  # all layers, then those that change
        monkeypatch.setattr(gates, "MANY", many)
        found.append((look.patch(model, CLEAN, CORRUPTED, metric), look.importance(model, CLEAN, by="zero")))
    (whole, lost), (changed, also_lost) = found
    for one, other in zip(whole.heads, changed.heads, strict=True):
        assert other.effect == pytest.approx(one.effect, abs=1e-4)
    for row, other_row in zip(lost.scores("zero"), also_lost.scores("zero"), strict=True):
        assert other_row == pytest.approx(row, abs=1e-5)
    assert not any("forward" in vars(part) for part in model.modules())


def test_layers_before_the_first_head_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["Llama GQA"].build()
    rows: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    monkeypatch.setattr(gates, "ROWS", 2)
    found = look.patch(model, CLEAN, CORRUPTED, metric)
    per_layer = sum(head.layer == 0 for head in found.heads)
    assert len(found.heads) >= gates.MANY and rows == [1, 1, 1, *[2] * (per_layer // 2)]
