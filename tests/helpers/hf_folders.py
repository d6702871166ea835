"""Model folders as a user, or an attacker, might have them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hf_models import VOCAB, Row
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import headwise.hf as hf
from headwise.hf.loading import verify_process as proving


@functools.cache
def tokenizer() -> str:
    """A byte-level BPE of the rows' vocabulary size, as the text of a tokenizer.json."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<s>", "[SEP]"], show_progress=False)
    made.train_from_iterator(["a b, c. d! e? f: g; h\n i\n"] * 3, trainer)
    return made.to_str(pretty=True)


def written(row: Row, folder: Path) -> Path:
    """A whole checkpoint of the row's model."""
    quiet(lambda: row.build().save_pretrained(folder))
    (folder / "tokenizer.json").write_text(tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "sep_token": {"content": "[SEP]"}}))
    return folder


def quiet(do: Callable[[], Any]) -> Any:
    transformers.utils.logging.disable_progress_bar()
    try:
        return do()
    finally:
        transformers.utils.logging.enable_progress_bar()


def prove_here(folder: Path, config: Any, weights: Any, request: Any) -> dict[str, Any]:
    """The proof of a checkpoint, asked in this process, which has the libraries loaded."""
    source = {"config": dict(config), "weights": list(map(str, weights))}
    return answer_here(folder, source, request)


def answer_here(folder: Path, source: Any, request: Any) -> dict[str, Any]:
    return quiet(lambda: proving.answer({**request, "speed": False, "folder": str(folder), "source": source}))


def change(folder: Path, **fields: Any) -> None:
    """Write fields into config.json; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def refused(folder: Path | str, text: str, **how: Any) -> None:
    """load() raises ModelError with this text, in one line."""
    with pytest.raises(hf.ModelError, match=re.escape(text)) as caught:
        hf.load(folder, **how)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert isinstance(caught.value, ValueError)
