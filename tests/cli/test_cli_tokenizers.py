"""tokenizer.json from a stranger: patterns that backtrack, rules that grow a text; and texts that are too long."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from test_cli import as_it_was, here, refused, tiny
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers import models as kinds
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import headwise.hf as hf
from headwise.hf.loading import tokenizer as tokens

pytestmark = pytest.mark.unchecked
FIXTURES = (as_it_was, here, tiny)
BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def replaced(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def written(folder: Path, **parts: Any) -> Path:
    """A folder with the tokenizer of three words, and those parts of it as given."""
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, ".": 2}, "unk_token": "[UNK]"}
    table = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": words,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(table | parts))
    return folder


def made(model: Any, **parts: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of that model, in memory; a word for each space-separated part."""
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **parts)


WORDS = kinds.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")

# --- what the file may do ---------------------------------------------------------------------------------------------


def test_a_pattern_that_backtracks_is_told_in_one_line(
    tiny: Path, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library panics: a PanicException that is no Exception, after its own print to stderr."""
    shutil.copytree(tiny, here / "model")
    table = json.loads((tiny / "tokenizer.json").read_text())
    (here / "model" / "tokenizer.json").write_text(json.dumps(table | {"pre_tokenizer": BACKTRACKS}))
    line = refused("look", "model", "--text", "a" * 40 + "!")
    assert line == (
        "headwise: the tokenizer fails on a text of 41 characters (Onig: Regex search error: retry-limit-in-match "
        "over); download tokenizer.json anew, or give another model or text"
    )
    assert capfd.readouterr() == ("", "")


GROWS = {
    "before": {"type": "Prepend", "prepend": "x" * 10_000_000},
    "each letter": replaced("[a-z]", "y" * 1_000_000),
    "little by little": {"type": "Sequence", "normalizers": [replaced("[a-z]", "yyyyy")] * 5},
}


@pytest.mark.parametrize("how", GROWS)
def test_rules_that_grow_a_text_are_refused_at_once(how: str, tmp_path: Path) -> None:
    with pytest.raises(
        hf.ModelError, match=r"fails on a text of 3 characters \(its rules make [\d,]{5,} characters of"
    ):
        tokens.load_tokenizer(written(tmp_path, normalizer=GROWS[how]), None)


def test_rules_that_grow_it_as_unicode_does_are_none_of_those(tmp_path: Path) -> None:
    tokenizer = tokens.load_tokenizer(written(tmp_path, normalizer={"type": "NFKD"}), None)
    assert len(tokens.encode(tokenizer, "\ufdfa" * 999, None)[0]) == 3 * 999 + 1  # 18 characters each, in 4 words


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MEMORY", 300 << 20)
    rule = {"type": "Sequence", "normalizers": [replaced("a", "a" * 100)] * 5}
    with pytest.raises(hf.ModelError) as caught:
        tokens.load_tokenizer(written(tmp_path, normalizer=rule), None)
    assert str(caught.value) == (
        "the tokenizer takes more than 10 s, or 0 GB, for a text of 3 characters; download tokenizer.json anew, or "
        "give another model or text"
    )


def slow(length: int) -> tuple[PreTrainedTokenizerFast, str]:
    """A word whose pieces are looked for at every length, and none is there."""
    return made(kinds.WordPiece({"[UNK]": 0}, unk_token="[UNK]", max_input_chars_per_word=10**9)), "b" * length


@pytest.mark.parametrize("clock", [False, True])
def test_time_is_bounded(clock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processor's time, and by the clock where the system knows no such limit."""
    monkeypatch.setattr(tokens, "SECONDS", 1)
    if clock:
        real = tokens.subprocess.run
        without = lambda command, **how: real([*command[:5], "99", command[6]], **how | {"timeout": 1})  # noqa: E731
        monkeypatch.setattr(tokens.subprocess, "run", without)
    start = time.monotonic()
    with pytest.raises(hf.ModelError, match=r"the tokenizer takes more than 1 s, or 2 GB, for a text of 300,000 char"):
        tokens.encode(*slow(300_000), None)
    assert time.monotonic() - start < 60, "and not minutes"
    assert tokens.encode(*slow(50), None)[0] == [0]


def test_texts_come_out_as_ever(tmp_path: Path) -> None:
    pad = {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]"}
    padded = {"strategy": {"Fixed": 10**12}, "direction": "Right", **pad}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    for parts in ({}, {"padding": padded}, {"truncation": cut}):
        tokenizer = tokens.load_tokenizer(written(tmp_path, **parts), None)
        assert tokens.encode(tokenizer, "a. b", 4) == ([1, 2, 0], ("a", ".", " b"))
        assert tokens.delimiters(tokenizer, 3) == (2,)


def test_a_decoder_is_tried_too(tmp_path: Path) -> None:
    """What it makes of an id decides whether that is a delimiter; special tokens are no exception."""
    word = "a" * 30 + "!"
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    after = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": word, "type_id": 0}}],
        "pair": [],
        "special_tokens": {word: {"id": word, "ids": [3], "tokens": [word]}},
    }
    folder = written(
        tmp_path,
        added_tokens=[{"id": 3, "content": word, "special": True, **flags}],
        post_processor=after,
        decoder={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
    )
    with pytest.raises(hf.ModelError, match=r"fails on a text of 3 characters \(Onig"):
        tokens.load_tokenizer(folder, None)


def test_vocabulary_files_are_tried_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vocab.txt").write_text("")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: slow(0)[0])
    assert tokens.load_tokenizer(tmp_path, None).is_fast
    bad = slow(0)[0]
    bad.backend_tokenizer.normalizer = normalizers.Prepend("x" * 99_999)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: bad)
    with pytest.raises(hf.ModelError, match="its rules make 100,00"):
        tokens.load_tokenizer(tmp_path, None)


# --- how long a text may be -------------------------------------------------------------------------------------------


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long the texts were that were cut into tokens."""
    real, lengths = tokens._counts, []
    monkeypatch.setattr(tokens, "_counts", lambda made, texts: (lengths.extend(map(len, texts)), real(made, texts))[1])
    return lengths


def test_a_text_far_too_long_is_refused_by_its_beginning(tried: list[int]) -> None:
    with pytest.raises(hf.ModelError) as caught:
        tokens.encode(made(WORDS), "a " * 2_500_000, 7)
    assert str(caught.value) == (
        "the first 112 of 5,000,000 characters are 56 tokens, and the model takes 7; give a shorter text"
    )
    assert tried == [112]


@pytest.mark.parametrize(
    ("words", "length", "maximum"), [(7, 16, None), (8, 16, 8), (7, 17, None), (8, 17, 8), (3, 99, None)]
)
def test_a_text_of_long_words_is_read_to_its_end(
    words: int, length: int, maximum: int | None, tried: list[int]
) -> None:
    """Its beginning has no more than twice the tokens that the model takes, so the end decides."""
    text = " ".join(["x" * (length - 1)] * words) + " "
    if maximum is None:
        assert len(tokens.encode(made(WORDS), text, 7)[0]) == words
    else:
        with pytest.raises(
            hf.ModelError, match=f"the text has {maximum} tokens, and the model takes 7; give a shorter"
        ):
            tokens.encode(made(WORDS), text, 7)
    assert tried == [112, words * length][: 2 if words * length > 112 else 1]


@pytest.mark.parametrize("count", [14, 15])
def test_twice_too_many_is_where_the_beginning_decides(count: int, tried: list[int]) -> None:
    beginning = "a " * (count - 1) + "x" * (112 - 2 * (count - 1))
    with pytest.raises(hf.ModelError, match="the first 112 of 114" if count == 15 else f"the text has {count + 1} tok"):
        tokens.encode(made(WORDS), beginning + " a", 7)
    assert tried == ([112] if count == 15 else [112, 114])


def test_a_text_of_no_tokens_and_one_that_just_fits() -> None:
    with pytest.raises(hf.ModelError, match="the text has no tokens for this model; give another text"):
        tokens.encode(made(WORDS), " " * 999, 7)
    assert tokens.encode(made(WORDS), "a " * 7, 7)[0] == [1] * 7
    assert len(tokens.encode(made(WORDS), "a " * 9999, None)[0]) == 9999


class Slow:
    """A tokenizer in Python: it knows no offsets."""

    is_fast = False

    def __call__(self, text: str, return_offsets_mapping: bool = False) -> dict[str, list[int]]:
        assert not return_offsets_mapping
        return {"input_ids": [1] * len(text.split())}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["a"] * len(ids)


def test_a_tokenizer_in_python_is_run_as_it_is(tried: list[int]) -> None:
    assert tokens.encode(Slow(), "a b", 7) == ([1, 1], ("a", "a"))
    with pytest.raises(hf.ModelError, match="the first 112 of 2,000 characters are 56 tokens"):
        tokens.encode(Slow(), "a " * 1000, 7)
    assert tried == [3, 112]


def test_a_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(hf.ModelError, match="fails on a text of 3 characters"):
        tokens.encode(made(WORDS), "a \ud800", 7)
