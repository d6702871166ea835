"""Tokenizers, and the ids of punctuation in a vocabulary.

A tokenizer.json is untrusted: it may hold a pattern that backtracks forever, or a rule that makes a gigabyte of a
letter. The library that runs it is native code: no signal and no other thread can stop it, its panics bypass Python's
stderr, and the cost of a pattern cannot be read from the file. So a separate process with limits on time and memory
first tokenizes each text. Only texts that finish there are then tokenized in this process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from ...files.text import one_line
from ..errors import ModelError
from ..files.reader import parse_json, read_bytes, read_json
from . import tokenizer_process as alone

MAX_TOKENIZER = 256 << 20
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", ".model", ".tiktoken")
MARKS = (".", ",", ";", ":", "!", "?", "\n")
IN_A_TEXT = {text: mark for mark in MARKS for text in (f"a{mark}", f"a {mark}", f"a{mark}b")}

SECONDS, MEMORY = 10, 2 << 30
"""The limits of CPU time (seconds) and memory (bytes) of a tokenizer; reading 256,000 entries takes a tenth of them."""

A_TOKEN = 16
"""The first check of a long text reads this many characters per position of the model; prose has 3 to 5 per token."""


def load_tokenizer(folder: Path, config: PreTrainedConfig) -> Any:
    """Return the folder's tokenizer, from tokenizer.json if it exists, otherwise from vocabulary files.

    tokenizer.json is read without AutoTokenizer, which rebuilds it by the config's model_type and for some models gives
    other ids. Code that the tokenizer's files name is never run.
    """
    if not any(path.name.endswith(VOCABULARIES) for path in folder.iterdir()):
        raise ModelError(f"{folder}: no tokenizer; put the model's tokenizer.json beside config.json")
    try:
        if (folder / "tokenizer.json").exists():
            source = read_bytes(folder, "tokenizer.json", MAX_TOKENIZER)
            parse_json(source, f"{folder}/tokenizer.json")
            _rehearse(source, [*IN_A_TEXT], decode=True)
            read = tokenizers.Tokenizer.from_buffer(source)  # the library opens only files whose path is valid UTF-8
            return PreTrainedTokenizerFast(tokenizer_object=read, **_special_tokens(folder))
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), config=config, local_files_only=True, trust_remote_code=False
        )
        if tokenizer.is_fast:
            _rehearse(tokenizer.backend_tokenizer.to_str().encode(), [*IN_A_TEXT], decode=True)
        return tokenizer
    except ModelError:
        raise
    except Exception as error:  # The tokenizers library raises plain Exception.
        raise ModelError(
            f"{folder}: no tokenizer that can be read ({one_line(error)}); put its tokenizer.json beside config.json"
        ) from None


def _special_tokens(folder: Path) -> dict[str, Any]:
    tokens: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file).exists():
            table = read_json(folder, file, MAX_TOKENIZER)
            for name in SPECIAL:
                token = table.get(name)
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str):
                    tokens[name] = token
    return tokens


def delimiters(tokenizer: Any, vocabulary: int) -> tuple[int, ...]:
    """Return the sorted ids of punctuation, line ends and the separator (after Clark et al. 2019, arXiv 1906.04341)."""
    marks = {tokenizer.sep_token_id}
    for text, mark in IN_A_TEXT.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        marks |= {i for i in ids if tokenizer.decode([i]).strip(" ") == mark}
    return tuple(sorted(i for i in marks if i is not None and 0 <= i < vocabulary))


def bos_id(tokenizer: Any, vocabulary: int) -> int | None:
    """Return the id that begins a text: BOS, or else CLS; None if the tokenizer has neither."""
    for token in (tokenizer.bos_token_id, tokenizer.cls_token_id):
        if token is not None and 0 <= token < vocabulary:
            return int(token)
    return None


def encode(tokenizer: Any, text: str, max_positions: int | None) -> tuple[list[int], tuple[str, ...]]:
    """Return the ids of a text and the piece of the text for each id; the joined pieces give the text again."""
    _refuse_long(tokenizer, text, max_positions)
    fast = tokenizer.is_fast
    encoded = tokenizer(text, return_offsets_mapping=fast)
    ids = encoded["input_ids"]
    if not ids:
        raise ModelError("the text has no tokens for this model; give another text")
    names = tokenizer.convert_ids_to_tokens(ids)
    pieces, done = [], 0
    for (_, stop), name in zip(encoded["offset_mapping"] if fast else [(0, 0)] * len(ids), names, strict=True):
        # Byte tokens of one character all have the character's offsets, so the first one gets the whole character.
        pieces.append(text[done:stop] if stop > done else "\ufffd" if stop else name)
        done = max(done, stop)
    return ids, tuple(pieces)


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Return, for each text, its ids and the (start, end) character offsets of each id."""
    if not texts:
        return []
    if not tokenizer.is_fast:
        raise ModelError("the tokenizer does not tell which characters a token covers; give a tokenizer.json")
    _rehearse(tokenizer.backend_tokenizer.to_str().encode(), [*texts])
    read = tokenizer([*texts], return_offsets_mapping=True, verbose=False)
    return [*zip(read["input_ids"], read["offset_mapping"], strict=True)]


def beginning(tokenizer: Any, text: str, max_positions: int) -> str:
    """Return the beginning of a text, in whole words, that fits in `max_positions` tokens; empty if no word fits."""
    stops = [word.end() for word in re.finditer(r"\S+", text)]
    counts = _counts(tokenizer, [text[:stop] for stop in stops])
    return text[: max((stop for stop, count in zip(stops, counts, strict=True) if count <= max_positions), default=0)]


def _refuse_long(tokenizer: Any, text: str, max_positions: int | None) -> None:
    """Raise ModelError if the text has more tokens than the model takes, without reading all of a far too long text.

    A text is refused if its beginning alone has more than twice as many tokens as the model takes. The rest can
    complete the last word and so remove a few of these tokens, but not half of them.
    """
    if max_positions is None:
        _counts(tokenizer, [text])
        return
    start = text[: A_TOKEN * max_positions]
    [count] = _counts(tokenizer, [start])
    what = "the text has"
    if count > 2 * max_positions and len(text) > len(start):
        what = f"the first {len(start):,} of {len(text):,} characters are"
    elif len(text) > len(start):
        [count] = _counts(tokenizer, [text])
    if count > max_positions:
        raise ModelError(f"{what} {count:,} tokens, and the model takes {max_positions:,}; give a shorter text")


def _counts(tokenizer: Any, texts: list[str]) -> list[int]:
    """Return the number of tokens of each text."""
    if not tokenizer.is_fast:  # A tokenizer in plain Python can be interrupted, so it runs here.
        return [len(tokenizer(text)["input_ids"]) for text in texts]
    return _rehearse(tokenizer.backend_tokenizer.to_str().encode(), texts)


def _rehearse(source: bytes, texts: list[str], *, decode: bool = False) -> list[int]:
    """Return the number of tokens of each text, counted by a tokenizer.json in a separate process (`alone`).

    Raises:
        ModelError: The tokenizer took too much time or memory, or failed on a text.
        ValueError: The tokenizer.json cannot be read.
    """
    header = json.dumps({"texts": texts, "decode": decode}).encode()
    site = Path(tokenizers.__file__).parents[1]
    command = [sys.executable, "-I", "-S", alone.__file__, str(site), str(SECONDS), str(MEMORY)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    many = f"{max(map(len, texts)):,} characters"
    anew = "download tokenizer.json anew, or give another model or text"
    try:  # The timeout is for systems without a CPU limit. It is long, so that a busy machine does not reach it.
        answer: dict[str, Any] = json.loads(
            subprocess.run(
                command,
                input=header + b"\n" + source,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=12 * SECONDS,
                env=environment,
            ).stdout
        )
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        raise ModelError(
            f"the tokenizer takes more than {SECONDS} s, or {MEMORY >> 30} GB, for a text of {many}; {anew}"
        ) from None
    if "unreadable" in answer:
        raise ValueError(answer["unreadable"])
    if "failed" in answer:
        raise ModelError(f"the tokenizer fails on a text of {many} ({one_line(ValueError(answer['failed']))}); {anew}")
    return answer["counts"]
