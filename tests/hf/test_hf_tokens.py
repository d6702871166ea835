"""What look takes from a tokenizer: where a text begins, what is punctuation, and which piece each id stands for."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from headwise.hf import ModelError, load
from headwise.hf.loading.tokenizer import bos_id, delimiters, encode
from headwise.models import tiny_path


class Letters:
    """A tokenizer of letters, whose ids are their numbers; `wide` ones beyond the vocabulary."""

    is_fast = True
    sep_token_id: int | None = 3
    bos_token_id: int | None = None
    cls_token_id: int | None = None

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The same tokens, for the process that counts them."""
        backend = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="a"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        return backend

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def __call__(self, text: str, return_offsets_mapping: bool = False) -> dict[str, Any]:
        encoding: dict[str, Any] = {"input_ids": [ord(letter) for letter in text]}
        return encoding | ({"offset_mapping": [(i, i + 1) for i in range(len(text))]} if return_offsets_mapping else {})

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"<{chr(i)}>" for i in ids]


@pytest.mark.parametrize(
    ("bos", "cls", "expected"),
    [(5, 7, 5), (None, 7, 7), (None, None, None), (0, 7, 0), (99, 7, 7), (-1, None, None), (None, 11, None)],
)
def test_what_begins_a_text(bos: int | None, cls: int | None, expected: int | None) -> None:
    """BOS, or CLS; an id that the model does not have is none."""
    assert bos_id(SimpleNamespace(bos_token_id=bos, cls_token_id=cls), 11) == expected


def test_delimiters_are_ids_of_the_model() -> None:
    tokenizer = Letters()
    assert delimiters(tokenizer, 200) == tuple(sorted([3, *map(ord, ".,;:!?\n")]))
    assert delimiters(tokenizer, 46) == (3, 10, 33, 44), "a full stop is 46, one too many"
    tokenizer.sep_token_id = None
    assert delimiters(tokenizer, 34) == (10, 33)


def test_pieces_joined_are_the_text() -> None:
    ids, pieces = encode(Letters(), "a b.", 4)
    assert ids == [97, 32, 98, 46] and pieces == ("a", " ", "b", ".")
    with pytest.raises(ModelError, match="the text has 5 tokens, and the model takes 4; give a shorter text"):
        encode(Letters(), "a b.c", 4)
    assert len(encode(Letters(), "abc" * 500, None)[0]) == 1500
    with pytest.raises(ModelError, match="the text has no tokens for this model; give another text"):
        encode(Letters(), "", 4)


def test_a_slow_tokenizer_names_its_tokens() -> None:
    tokenizer = Letters()
    tokenizer.is_fast = False
    assert encode(tokenizer, "ab", None)[1] == ("<a>", "<b>")


@pytest.mark.unchecked
def test_what_is_no_text_or_id_is_refused() -> None:
    tiny = load(tiny_path())
    for call, wrong, message in (
        (tiny.encode, 3, "text is a text; got 3"),
        (tiny.encode, ["a"], "text is a text; got ['a']"),
        (tiny.encode_all, "abc", "texts are a list of texts; got 'abc'"),
        (tiny.encode_all, 3, "texts are a list of texts; got 3"),
        (tiny.encode_all, ["a", b"b"], "text is a text; got b'b'"),
        (tiny.decode, "a", "token is an int; got 'a'"),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            call(wrong)  # type: ignore[operator]
    with pytest.raises(ValueError, match="token is at least 0; got -1"):
        tiny.decode(-1)
    assert tiny.decode(50) == tiny.decode(torch.tensor(50)) == "Q"  # type: ignore[arg-type]
