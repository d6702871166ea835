"""Commands at an encoder of words, which needs its tokenizer's mask token: what they print is what functions give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import CliRunner
from hf_folders import written
from hf_models import BY_NAME

from headwise import cli, hf
from headwise.look import ablate, importance

pytestmark = pytest.mark.unchecked  # Typer hands its commands a context of another class than it has them annotate
runner = CliRunner()
TEXT = "a b, c. d! e? f: g; h\n i\n" * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = written(BY_NAME["BERT"], tmp_path_factory.mktemp("bert") / "model")
    names = {"bos_token": "<s>", "sep_token": "[SEP]", "mask_token": "[SEP]"}
    (made / "tokenizer_config.json").write_text(json.dumps(names))
    return made


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Any:
    return hf.load(folder)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, encoder: Any) -> None:
    """The model is read once; other libraries are not silenced."""
    monkeypatch.setattr(cli.options.models, "quiet", lambda command: None)
    monkeypatch.setattr(hf, "load", lambda *_, **__: encoder)


def printed(*arguments: object) -> dict[str, Any]:
    done = runner.invoke(cli.app, [*map(str, arguments), "--text", TEXT, "--json"])
    assert done.exit_code == 0, done.output
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def plain(data: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(data))
    return read


def test_importance_and_ablation_mask_words_of_an_encoder(folder: Path, encoder: Any) -> None:
    ids, mask = encoder.encode(TEXT)[0], encoder.tokenizer.mask_token_id
    wanted = importance(encoder.model, ids, by=("zero",), mask_id=mask, name=encoder.name).to_dict()
    found = printed("importance", folder, "--by", "zero")
    assert {**found, "seconds": 0} == {**plain(wanted), "seconds": 0}
    lost = ablate(encoder.model, ids, [(1, 2)], mask_id=mask, decode=encoder.decode, name=encoder.name)
    assert printed("ablate", folder, "--heads", "1.2") == plain(lost.to_dict())
    other = importance(encoder.model, ids, by=("zero",), mask_id=mask + 3, name=encoder.name)
    assert other.loss != wanted["loss"], "another token in place of the words gives another loss"
