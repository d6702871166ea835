"""Pruned, and solved anew on text: what attention gives out comes nearer to what it gave, and nothing else changes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_folders import quiet
from hf_models import VOCAB
from reshape_models import FAMILIES, decoder, saved

from headwise import hf
from headwise.hf.loading import verify_process as proving
from headwise.reshape import Proof, plan_prune, reconstruct, write_pruned
from headwise.reshape.repair.calibration import loss_of


def text(rows: int = 12, length: int = 60) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB - 1, (1, length), generator=draw) for _ in range(rows)]


@pytest.mark.parametrize("family", ["llama odd", "llama biased", "phi3"])
def test_what_was_solved_anew_is_nearer_to_the_original(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: hf.Checkpoint, folder: Path, request: Any, *, compare: bool = True) -> dict[str, Any]:
        source = {"config": dict(self.config), "weights": [str(self.folder / "model.safetensors")]}
        return quiet(lambda: proving.answer({**request, "folder": str(folder), "source": source}))

    monkeypatch.setattr(hf.Checkpoint, "prove", answer)  # in this process
    row, heads = FAMILIES[family], {0: [1, 2], 1: [0, 3]} if family == "phi3" else {0: [1], 1: [3]}
    original = row.build()
    with hf.checkpoint(saved(row, tmp_path / "source")) as opened:
        plain = plan_prune(opened, heads=heads)
        plan = quiet(lambda: reconstruct(plain, original, text()))
        assert plan.losses["tokens"] == 2 * 59 and plan.losses["recovered"] != plan.losses["pruned"]
        unsolved = {one.name: one.make() for one in plain.tensors()}
        for one in plan.tensors():
            same = torch.equal(one.make(), unsolved[one.name])
            assert same or one.name in plan.solved, one.name
            assert not (same and "o_proj.weight" in one.name), one.name  # values may be as good as they were
        facts = write_pruned(plan, tmp_path / "new", proof=Proof(speed=False))
        assert "difference" not in facts["proof"] and "solved anew on text" in " ".join(facts["notes"])
        changed, pruned = (
            opened.build(p.target.config, {t.name: t.make() for t in p.tensors()}) for p in (plan, plain)
        )
    assert loss_of(changed, text()[4::5]) == pytest.approx(plan.losses["recovered"], rel=1e-5), "as it was measured"
    report = (tmp_path / "new" / "RESHAPE.md").read_text()
    assert "that nothing was fitted to (nats/token): recovered" in report
    assert far(original, changed) < 0.95 * far(original, pruned)


def far(original: Any, other: Any) -> float:
    """The squared error of what the first attention layer gives out, on text that nothing was fitted to."""
    ids = torch.randint(2, VOCAB - 1, (3, 40), generator=torch.Generator().manual_seed(5))
    outputs: list[torch.Tensor] = []
    for model in (original, other):
        module = model.model.layers[0].self_attn
        hook = module.register_forward_hook(lambda module, inputs, out: outputs.append(out[0].detach()))
        with torch.no_grad():
            model(ids)
        hook.remove()
    return float((outputs[0] - outputs[1]).square().mean())


def test_a_model_without_a_head_for_words_has_no_loss() -> None:
    row = FAMILIES["llama odd"]
    model = row.build()
    assert loss_of(model.model, text(2)) is None
    known = loss_of(model, text(2))
    expected = [model(ids, labels=ids).loss.detach() for ids in text(2)]
    assert known is not None and abs(known - float(sum(expected)) / 2) < 1e-5


def test_what_cannot_be_solved_anew_is_refused() -> None:
    plan = plan_prune(decoder(4, 4), heads=[])
    with pytest.raises(
        TypeError, match=r"reconstruct\(\) needs a checkpoint opened with headwise\.hf\.checkpoint\(\); got Made"
    ):
        reconstruct(plan, torch.nn.Linear(1, 1), text())
    zeroed = plan_prune(decoder(4, 4), heads="0.1", zero=True)
    with pytest.raises(ValueError, match="zeroed heads stay 0, so nothing is solved for them"):
        reconstruct(zeroed, torch.nn.Linear(1, 1), text())


def test_a_model_that_cannot_say_all_words_of_a_text_has_no_loss_on_it() -> None:
    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            logits = torch.zeros(*input_ids.shape, 5)
            logits[..., 1] = 2.0
            return SimpleNamespace(logits=logits)

    ones = torch.ones(1, 4, dtype=torch.long)
    assert loss_of(Model(), [ones, 4 * ones]) == pytest.approx(math.log(4 + math.exp(2.0)) - 1)  # half at 2, half at 0
    assert loss_of(Model(), [5 * ones]) is None and loss_of(Model(), [ones, 6 * ones]) is None
