"""Tokenizers, and what of a vocabulary is punctuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from .errors import ModelError, one_line
from .folder import read_json

MAX_TOKENIZER = 256 << 20
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", ".model", ".tiktoken")
MARKS = (".", ",", ";", ":", "!", "?", "\n")


def load_tokenizer(folder: Path, config: PreTrainedConfig) -> Any:
    """The folder's tokenizer, from tokenizer.json where there is one, or from vocabulary files else.

    tokenizer.json is read as it is: transformers' AutoTokenizer rebuilds it by the config's model_type, which gives
    other ids for some. The tokenizer's own code, if it names any, is never run.
    """
    if not any(path.name.endswith(VOCABULARIES) for path in folder.iterdir()):
        raise ModelError(f"{folder}: no tokenizer; put the model's tokenizer.json beside config.json")
    try:
        if (folder / "tokenizer.json").exists():
            read_json(folder / "tokenizer.json", MAX_TOKENIZER)
            return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **_special_tokens(folder))
        return AutoTokenizer.from_pretrained(str(folder), config=config, local_files_only=True, trust_remote_code=False)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(
            f"{folder}: no tokenizer that can be read ({one_line(error)}); put its tokenizer.json beside config.json"
        ) from None


def _special_tokens(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file).exists():
            table = read_json(folder / file, MAX_TOKENIZER)
            for name in SPECIAL:
                token = table.get(name)
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str):
                    found[name] = token
    return found


def delimiters(tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    """Ids of punctuation, line ends and the separator, in order (after Clark et al. 2019, arXiv 1906.04341)."""
    found = {tokenizer.sep_token_id}
    for mark in MARKS:
        for text in (f"a{mark}", f"a {mark}", f"a{mark}b"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            found |= {i for i in ids if tokenizer.decode([i]).strip(" ") == mark}
    return tuple(sorted(i for i in found if i is not None and 0 <= i < vocabulary))


def bos_id(tokenizer: Any, vocabulary: int) -> int | None:
    """The id that begins a text: BOS, or CLS."""
    for token in (tokenizer.bos_token_id, tokenizer.cls_token_id):
        if token is not None and 0 <= token < vocabulary:
            return int(token)
    return None


def encode(tokenizer: Any, text: str, max_positions: int | None) -> tuple[list[int], tuple[str, ...]]:
    """The ids of a text, and for each the piece of the text it stands for: joined, they are the text again."""
    fast = tokenizer.is_fast
    encoded = tokenizer(text, return_offsets_mapping=fast)
    ids = encoded["input_ids"]
    if not ids:
        raise ModelError("the text has no tokens for this model; give another text")
    if max_positions is not None and len(ids) > max_positions:
        raise ModelError(
            f"the text has {len(ids):,} tokens, and the model takes {max_positions:,}; give a shorter text"
        )
    names = tokenizer.convert_ids_to_tokens(ids)
    pieces, done = [], 0
    for (_, stop), name in zip(encoded["offset_mapping"] if fast else [(0, 0)] * len(ids), names, strict=True):
        # Pieces of one character (bytes) have all its offsets: the first is shown as the character.
        pieces.append(text[done:stop] if stop > done else "\ufffd" if stop else name)
        done = max(done, stop)
    return ids, tuple(pieces)
