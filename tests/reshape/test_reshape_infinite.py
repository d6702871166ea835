"""A config with a number that JSON has no word for: pruned, and proved against the original built from that config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hf_folders import quiet
from reshape_models import FAMILIES, saved

from headwise import hf
from headwise.hf.loading import verify_process as proving
from headwise.reshape import Proof, prune


@pytest.mark.parametrize("number", ["Infinity", "-Infinity"])
def test_a_config_with_an_infinite_number_is_proved(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof in this process, which has the libraries loaded."""

    def answer(self: hf.Checkpoint, folder: Path, request: Any, *, compare: bool = True) -> dict[str, Any]:
        weights = [str(self.folder / "model.safetensors")]
        source = {"config": dict(self.config), "weights": weights} if compare else None
        return quiet(lambda: proving.answer({**request, "folder": str(folder), "source": source}))

    monkeypatch.setattr(hf.Checkpoint, "prove", answer)
    source = saved(FAMILIES["llama odd"], tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["attention_dropout"] = {"__float__": number}
    (source / "config.json").write_text(json.dumps(config))
    with hf.checkpoint(source) as opened:
        facts = prune(opened, tmp_path / "new", heads={0: [1], 1: [3]}, proof=Proof(speed=False))
    assert facts["proof"]["difference"] <= 1e-5
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written["attention_dropout"] == {"__float__": number}
