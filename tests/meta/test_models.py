"""The packaged model: that it loads as any checkpoint does, and that it really learned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.models import TINY, default_text, tiny_path

# Written for this test, so that no model has been trained on it; about 170 tokens.
SNIPPET = '''\
class Inventory:
    """Count the items of a small shop.

    Names are compared without regard to case. An item whose count falls to zero is forgotten.
    """

    def __init__(self, items=None):
        self.items = dict(items or {})

    def add(self, name, count=1):
        """Add count items called name, and return the new count."""
        if count < 0:
            raise ValueError("count must not be negative")
        key = name.lower()
        self.items[key] = self.items.get(key, 0) + count
        return self.items[key]

    def remove(self, name):
        """Remove the item called name. Raise KeyError if there is none."""
        del self.items[name.lower()]
'''


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_path())


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def attention_maps(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Every head's weights on one text, `(layers, heads, T, T)`."""
    return torch.stack(model(input_ids=ids[None], output_attentions=True).attentions)[:, 0]


def text_maps(model: Any, tokenizer: Any) -> torch.Tensor:
    return attention_maps(model, torch.tensor(tokenizer(SNIPPET)["input_ids"]))


def test_files_are_small_and_in_place() -> None:
    assert tiny_path() == TINY
    names = {path.name for path in TINY.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 12_000_000


def test_missing_weights_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import headwise.models

    monkeypatch.setattr(headwise.models, "TINY", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"needs model\.safetensors, but .* has none: reinstall headwise"):
        tiny_path()


def test_config_is_plain(model: Any) -> None:
    config = json.loads((TINY / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["model_type"] == "llama"
    assert config["dtype"] == "float16"
    assert config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 8, "MHA, so that it can be regrouped"
    assert config["num_hidden_layers"] == 4
    assert config["max_position_embeddings"] == 512
    assert not [key for key in config if key.startswith("_")]
    assert 3e6 < model.num_parameters() < 5e6


def test_loads_as_float16_by_default() -> None:
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tiny_path()).dtype == torch.float16


@pytest.mark.parametrize("text", ["", " ", SNIPPET, default_text(), "été 日本 \U0001f600\t\r\n\x00 end  "])
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    from tokenizers import Tokenizer

    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 0, "a first-token sink needs BOS"
    assert ids == Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_and_config_agree(tokenizer: Any, model: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (model.config.bos_token_id, model.config.eos_token_id)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.model_max_length == model.config.max_position_embeddings


def test_default_text_fits_a_report(tokenizer: Any) -> None:
    assert 100 <= len(tokenizer(default_text())["input_ids"]) <= 128


@torch.inference_mode()
def test_it_models_unseen_code(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor(tokenizer(SNIPPET)["input_ids"])[None]
    assert float(model(input_ids=ids, labels=ids).loss) < 3.2, "uniform guessing costs ln 2048 = 7.6 nats a token"


def test_a_previous_token_head(model: Any, tokenizer: Any) -> None:
    scores = text_maps(model, tokenizer).diagonal(offset=-1, dim1=-2, dim2=-1).mean(-1)
    assert float(scores.max()) > 0.5


def test_a_first_token_sink(model: Any, tokenizer: Any) -> None:
    scores = text_maps(model, tokenizer)[..., 8:, 0].mean(-1)
    assert float(scores.max()) > 0.3


def test_an_induction_head(model: Any) -> None:
    # The period differs from probe to probe, so that no head scores by looking back a fixed distance.
    scores = []
    for period in (23, 37, 64, 90, 120):
        segment = torch.randint(2, model.config.vocab_size, (period,), generator=torch.Generator().manual_seed(period))
        maps = attention_maps(model, torch.cat([torch.tensor([0]), segment, segment]))
        # A[i, i - period + 1] for i in the second copy, its first token left out.
        scores.append(maps.diagonal(offset=1 - period, dim1=-2, dim2=-1)[..., 3:].mean(-1))
    assert float(torch.stack(scores).mean(0).max()) > 0.4


def test_card_states_the_measured_numbers() -> None:
    record = json.loads((TINY / "loss_curve.json").read_text())
    card = (TINY / "README.md").read_text()
    final = record["final"]
    assert final["step"] == record["settings"]["steps"], "trained to the end"
    assert f"{final['held_out_loss']:.3f} nats" in card
    assert f"{final['step']} steps" in card
    for role, threshold in (("previous", 0.5), ("induction", 0.4), ("first", 0.3)):
        best = max(max(row) for row in final["heads"][role])
        assert best > threshold
        assert re.search(rf"\| {role}[^|]* \|.*\b{best:.2f}\b", card), f"the card lacks {role}'s {best:.2f}"
