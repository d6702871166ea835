"""Annotation: what is read from CoNLL-U and from spaCy, what is refused, and the word of each token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("conllu", reason="the extra [look] is not installed")

from headwise.extras import MissingExtra
from headwise.look import annotate
from headwise.look.annotate import Document, Mention, Sentence, Word, aligned
from headwise.look.annotate import conllu as treebank


def lines(*rows: str) -> str:
    """CoNLL-U from rows "ID FORM UPOS HEAD DEPREL MISC", comments as they are."""
    made = []
    for row in rows:
        if row and not row.startswith("#"):
            number, form, upos, head, relation, misc = row.split(" ")
            row = "\t".join([number, form, "_", upos, "_", "_", head, relation, "_", misc])
        made.append(row)
    return "\n".join(made) + "\n"


DONT = lines(
    "# newdoc id = first",
    "# sent_id = 1",
    "1-2 Don't _ _ _ _",
    "1 Do AUX 3 aux _",
    "2 n't PART 3 advmod _",
    "3 go VERB 0 root SpaceAfter=No",
    "4 ! PUNCT 3 punct _",
    "",
    "# a comment without a value",
    "1-2 au _ _ _ _",
    "1 à ADP 3 case _",
    "2 le DET 3 det _",
    "2.1 it PRON _ _ Entity=(e9-thing-1)",
    "3 lac NOUN 0 root _",
    "",
    "# newdoc",
    "1 So ADV _ _ SpaceAfter=No",
)


def test_words_and_their_places() -> None:
    first, second = annotate.parse(DONT)
    assert (first.name, second.name) == ("first", "")
    assert first.text == "Don't go! au lac" and second.text == "So"
    dont, lac = first.sentences
    assert dont.words == (
        Word("Do", 0, 2, "AUX", 2, "aux"),
        Word("n't", 2, 5, "PART", 2, "advmod"),
        Word("go", 6, 8, "VERB", None, "root"),
        Word("!", 8, 9, "PUNCT", 2, "punct"),
    )
    assert [(w.text, w.start, w.end) for w in lac.words] == [("à", 0, 2), ("le", 0, 2), ("lac", 3, 6)]
    assert dont.notes == {"newdoc id": "first", "sent_id": "1"} and lac.notes == {} and lac.mentions == ()
    assert second.sentences[0].words == (Word("So", 0, 2, "ADV", None, ""),)
    whole = first.joined()
    assert whole.text == first.text and [w.head for w in whole.words] == [2, 2, None, 2, 6, 6, None]
    assert all(whole.text[w.start : w.end] == w.text for w in whole.words if w.text not in ("à", "le"))


def test_the_text_says_where_the_words_are() -> None:
    [document] = annotate.parse(lines("# text = a  b\tc", "1 a X 0 root _", "2 b X 1 dep _", "3 c X 1 dep _"))
    assert [(w.start, w.end) for w in document.sentences[0].words] == [(0, 1), (3, 4), (5, 6)]
    joined = lines("1 a X 0 root SpaceAfter=No", "2 b X 1 dep SpaceAfter=No", "", "1 c X 0 root _")
    assert annotate.parse(joined)[0].text == "abc"
    for ending in ("\r\n", "\n"):
        for begin in ("", "\ufeff", "\n\n"):
            assert annotate.parse(begin + joined.replace("\n", ending))[0].text == "abc"
    assert annotate.parse("") == annotate.parse("\n\n") == ()


MENTIONS = {
    "one": (["(e1-person-1)", "_", "_", "_"], [("e1", (0,), "person")]),
    "several words": (["_", "(e1-x-1", "_", "e1)"], [("e1", (1, 2, 3), "x")]),
    "nested": (
        ["(e1-x-1(e2-y-1)", "_", "(e3--", "e3)e1)"], [("e1", (0, 1, 2, 3), "x"), ("e2", (0,), "y"), ("e3", (2, 3), "")]
    ),
    "of one entity": (["(e1-x-1", "(e1-x-1)", "e1)", "_"], [("e1", (0, 1, 2), "x"), ("e1", (1,), "x")]),
    "side by side": (["(e1-x-1", "e1)(e2-x-1", "e2)", "(e1"], None),
    "in two parts": (["(e1[1/2]-x-1", "e1[1/2])", "_", "(e1[2/2]-x-1)"], [("e1", (0, 1, 3), "x")]),
    "no fields": (["(e1", "e1)", "_", "(e1)"], [("e1", (0, 1), ""), ("e1", (3,), "")]),
}  # fmt: skip


@pytest.mark.parametrize("case", MENTIONS)
def test_mentions(case: str) -> None:
    brackets, want = MENTIONS[case]
    rows = [f"{i} w X {0 if i == 1 else 1} dep {b if b == '_' else 'Entity=' + b}" for i, b in enumerate(brackets, 1)]
    if want is None:
        with pytest.raises(
            ValueError, match="line 4: a mention of 'e1' does not end in its sentence; close its bracket"
        ):
            annotate.parse(lines(*rows))
        return
    [document] = annotate.parse(lines(*rows))
    assert document.sentences[0].mentions == tuple(Mention(*mention) for mention in want)
    assert all((m.first, m.last) == (m.words[0], m.words[-1]) for m in document.sentences[0].mentions)


def test_mentions_beside_empty_nodes_and_in_other_orders() -> None:
    rows = ["1 a X 0 root _", "1.1 _ _ _ _ Entity=(e1-x-1", "2 b X 1 dep Entity=e1)(e2-x-1", "2.1 _ _ _ _ Entity=e2)"]
    mentions = annotate.parse(lines(*rows))[0].sentences[0].mentions
    assert mentions == (Mention("e1", (1,), "x"), Mention("e2", (1,), "x"))
    older = lines(
        "# global.Entity = entity-GRP-minspan", "1 a X 0 root Entity=(person-7-1", "2 b X 1 dep Entity=person-7)"
    )
    assert annotate.parse(older)[0].sentences[0].mentions == (Mention("7", (0, 1), "person"),)
    alone = annotate.parse(lines("# global.Entity = entity-GRP-minspan", "1 a X 0 root Entity=(cat)"))
    assert alone[0].sentences[0].mentions == (Mention("cat", (0,), "cat"),)


def test_the_head_of_a_mention() -> None:
    words = (Word("the", 0, 3, head=1), Word("dog", 4, 7, head=2), Word("ran", 8, 11))
    sentence = Sentence("the dog ran", words, (Mention("e1", (0, 1)), Mention("e2", (0,))))
    assert [sentence.head_of(m) for m in sentence.mentions] == [1, 0]


def test_our_sentences_are_there() -> None:
    documents = annotate.ours()
    assert documents[0].text == "The agent opened a pull request because its tests were green."
    parser = next(d for d in documents if d.name == "parser")
    assert len(parser.sentences) == 3 and parser.text.endswith(
        "the bug. Then it changed two lines, and the test passed."
    )
    agent = [m for m in parser.joined().mentions if m.entity == "e1"]
    assert [" ".join(parser.joined().words[i].text for i in m.words) for m in agent] == ["The agent", "It", "it"]


# --- what is refused --------------------------------------------------------------------------------------------------

WRONG = {
    "1\ta\t_\tX\t_\t_\t0\troot\t_": "line 1: a word has 10 columns with tabs between them, got 9; write _ for a column",
    "1 a X 0 root _": "line 1: a word has 10 columns .*, got 1;",
    lines("1 a X 0 root _", "", "1 b X 0 root _").replace("b\t_", "b\t"): "line 3: a column is neither empty nor",
    lines("1 a X 0 root _").replace("a", "a  a"): "line 1: a column is neither empty nor holds two spaces in a row",
    lines("x a X 0 root _"): "line 1: Failed parsing field 'id': 'x' is not a valid ID; see https://univ",
    lines("_ a X 0 root _"): "line 1: ID is 1, 2, ..., a range such as 1-2, or 1.1 for an empty node; got _; see",
    lines("1 a X one root _"): "line 1: Failed parsing field 'head': 'one' is not a valid value .*; see",
    lines("1 a X " + "9" * 5000 + " root _"): "line 1: Exceeds the limit .*; see https",
    lines("# text = a", "2 a X 0 root _"): "line 2: words are counted 1, 2, 3, ...; got 2 where 1 is due",
    lines(
        "1 a X 2 root _"
    ): "line 1: HEAD is 0 for the root, or another of the 1 words; got 2 for word 1; write _ where",
    lines("1 a X 1 root _"): "line 1: HEAD is 0 .*; got 1 for word 1",
    lines(
        "# sent_id = 1", "# text = b a", "1 a X 0 root _"
    ): "line 3: the words make up '# text', in order; got 'a' where it goes on with 'b a'; correct one",
    lines("1-2 ab _ _ _ _"): "line 1: a range of words stands before its words; 'ab' has none",
    "\n\n# text = a\n\n": "line 3: a sentence has a line for each word, and these are comments alone; delete them",
    lines("1 a X 0 root Entity=e1)"): "line 1: a bracket of Entity closes 'e1', which is not open; open it before",
    lines(
        "1 a X 0 root Entity=(e1[2/3]-x-1)"
    ): r"line 1: parts of a mention come in order; got 'e1\[2/3\]' behind 0 parts",
    lines("1 a X 0 root Entity=(e1-x"): "line 1: a mention of 'e1' does not end in its sentence; close its bracket",
    lines("1 a X 0 root Entity=(e1[1/2]-x-1)"): r"line 1: a mention of 'e1\[...\]' does not end in its sentence",
    lines(
        "1 a X 0 root Entity=e1"
    ): r"line 1: Entity is brackets such as \(e1-person-2, e1\) or \(e1-person-1\); got 'e1'",
    lines("1 a X 0 root Entity=((e1-x-1)"): "line 1: Entity is brackets such as",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_wrong_line_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"^some.conllu, {WRONG[text]}") as caught:
        annotate.parse(text, name="some.conllu")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_sizes_are_capped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a.conllu"
    file.write_text(lines(*(f"{i} w X 0 root _" for i in range(1, 5))), "utf8")
    monkeypatch.setattr(treebank, "MAX_WORDS", 3)
    with pytest.raises(ValueError, match=r"a.conllu, line 1: a sentence has at most 3 words, got 4; split it"):
        annotate.read(file)
    monkeypatch.setattr(treebank, "MAX_SIZE", 50)
    with pytest.raises(ValueError, match=r"a.conllu: annotation is read up to 0 MB, and the file is larger; split it"):
        annotate.read(file)
    with pytest.raises(ValueError, match="CoNLL-U: annotation is read up to 0 MB, and this is longer; split it"):
        annotate.parse("#" * 51)
    monkeypatch.setattr("headwise.look.annotate.coreference.MAX_MENTIONED", 3)
    monkeypatch.setattr(treebank, "MAX_SIZE", 5000)
    with pytest.raises(ValueError, match="line 2: the mentions of a sentence hold at most 3 words; split it"):
        annotate.parse(lines("1 a X 0 root Entity=(a(b", "2 a X 1 dep Entity=a)b)"))


@pytest.mark.unchecked
def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"none.conllu'\) cannot be read \(No such file or directory\); give the path of a"
    ):
        annotate.read(tmp_path / "none.conllu")
    with pytest.raises(ValueError, match=r"'\\x00' cannot be read \(embedded null byte\); give the path"):
        annotate.read("\0")
    file = tmp_path / "latin.conllu"
    file.write_bytes(lines("# text = a", "1 a X 0 root _").replace("1\ta", "1\té").encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.conllu, line 2: CoNLL-U is UTF-8 text, and this is not; convert the"):
        annotate.read(file)
    with pytest.raises(TypeError, match="read takes the path of a CoNLL-U file; got 7"):
        annotate.read(7)  # type: ignore[arg-type]
    file.write_bytes(b"\xef\xbb\xbf" + lines("1 a X 0 root _").encode())
    assert annotate.read(file)[0].text == "a"


def test_the_library_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "conllu", None)
    with pytest.raises(MissingExtra, match=r"reading CoNLL-U needs .*conllu.*pip install .*'headwise\[look\]'"):
        annotate.ours()


# --- from spaCy -------------------------------------------------------------------------------------------------------


class Doc:
    """What a spaCy Doc shows of itself: tokens that know their heads, sentences, span groups."""

    def __init__(self, text: str, rows: list[tuple[str, str, int, str]], sentences: list[int], **spans: Any) -> None:
        self.text, self.ends, self.spans, self.tokens = text, sentences, spans, []
        place = 0
        for i, (form, pos, _, relation) in enumerate(rows):
            place = text.index(form, place)
            token = SimpleNamespace(i=i, text=form, idx=place, pos_=pos, dep_=relation, is_space=form.isspace())
            self.tokens.append(token)
            place += len(form)
        for token, row in zip(self.tokens, rows, strict=True):
            token.head = self.tokens[row[2]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tokens)

    @property
    def sents(self) -> Iterator[list[Any]]:
        starts = [0, *self.ends]
        for first, end in zip(starts, self.ends, strict=False):
            yield self.tokens[first:end]


def test_from_spacy() -> None:
    rows = [
        ("It", "PRON", 1, "nsubj"), ("ran", "VERB", 1, "ROOT"), (".", "PUNCT", 1, "punct"), ("\n", "SPACE", 2, "dep"),
        ("The", "DET", 5, "det"), ("dog", "NOUN", 6, "nsubj"), ("slept", "VERB", 6, "ROOT"),
    ]  # fmt: skip
    clusters = [SimpleNamespace(start=0, end=1), SimpleNamespace(start=4, end=6)]
    doc = Doc(" It ran. \nThe dog slept", rows, [4, 7], coref_clusters_1=clusters, other=clusters)
    document = annotate.from_spacy(doc, name="news")
    first, second = document.sentences
    assert (document.name, first.text, first.after, second.text) == ("news", "It ran.", " \n", "The dog slept")
    assert first.words == (
        Word("It", 0, 2, "PRON", 1, "nsubj"),
        Word("ran", 3, 6, "VERB", None, "root"),
        first.words[2],
    )
    assert second.words[1] == Word("dog", 4, 7, "NOUN", 2, "nsubj")
    assert first.mentions == (Mention("coref_clusters_1", (0,)),)
    assert second.mentions == (Mention("coref_clusters_1", (0, 1)),)
    assert document.text == "It ran. \nThe dog slept" and document.joined().words[4].head == 5
    assert all(document.text[w.start : w.end] == w.text for w in document.joined().words)


@pytest.mark.unchecked
def test_what_is_no_parsed_document_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"from_spacy takes a spaCy Doc; got 'It ran.'; call the pipeline first: nlp\(text\)"
    ):
        annotate.from_spacy("It ran.")

    class Bare(Doc):
        @property
        def sents(self) -> Iterator[list[Any]]:
            raise ValueError("[E030] Sentence boundaries unset.\nYou can add ...")

    with pytest.raises(
        ValueError, match=r"no sentence boundaries \(\[E030\] Sentence boundaries unset.\); add a parser"
    ):
        annotate.from_spacy(Bare("a", [("a", "X", 0, "ROOT")], []))


# --- the word of each token -------------------------------------------------------------------------------------------


def made(text: str) -> Sentence:
    """A sentence whose words are the text's, at single spaces and before marks."""
    words, place = [], 0
    for form in text.replace(",", " ,").replace(".", " .").split():
        place = text.index(form, place)
        words.append(Word(form, place, place + len(form)))
        place += len(form)
    return Sentence(text, tuple(words))


def test_tokens_find_their_words() -> None:
    sentence = made("The quick dog, ran.")  # The 0-3, quick 4-9, dog 10-13, "," 13-14, ran 15-18, . 18-19
    cases = {
        (0, 3): 0, (3, 9): 1, (4, 9): 1, (4, 6): 1, (6, 9): 1, (9, 14): 2, (13, 14): 3, (13, 15): 3, (14, 15): None,
        (0, 0): None, (19, 19): None, (8, 12): 2, (8, 10): 1, (0, 19): 1, (12, 14): 2, (17, 19): 4,
    }  # fmt: skip
    assert dict(zip(cases, aligned(sentence, list(cases)), strict=True)) == cases
    assert aligned(sentence, []) == ()


def test_words_written_as_one_share_their_tokens() -> None:
    _, lac = annotate.parse(DONT)[0].sentences
    assert aligned(lac, [(0, 1), (1, 2), (2, 6)]) == (0, 0, 2)


def test_tokens_of_a_document() -> None:
    document = Document((made("It ran."), made("A dog.")))
    assert aligned(document, [(0, 2), (2, 6), (6, 7), (7, 9), (9, 13), (13, 14)]) == (0, 1, 2, 3, 4, 5)


@pytest.mark.unchecked
def test_offsets_of_another_text_are_refused() -> None:
    sentence = made("A dog.")
    with pytest.raises(
        ValueError, match="token 1 covers the characters 4 to 7, but the text has 6; tokenize the text of"
    ):
        aligned(sentence, [(0, 1), (4, 7)])
    with pytest.raises(ValueError, match="token 0 covers the characters 3 to 2"):
        aligned(sentence, [(3, 2)])
    for wrong in (5, (1,), ("0", 1), (0, True), None):
        with pytest.raises(
            TypeError, match=r"offsets are pairs of ints, .* for token 0; call the tokenizer with return_off"
        ):
            aligned(sentence, [wrong])
    with pytest.raises(
        TypeError, match=r"aligned takes a Sentence or a Document of headwise.look.annotate; got 'A dog.'"
    ):
        aligned("A dog.", [(0, 1)])


TEXT = "Zoë's naïve 🐕 dog, and the unhappiness of 東京."
WORDS = ["Zoë's", "naïve", "🐕", "dog", ",", "and", "the", "unhappiness", "of", "東京", "."]


def trained(kind: str) -> Any:
    """A small tokenizer of each kind, on a few words: so that most of the text falls into pieces."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra [hf] is not installed")
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

    corpus = ["the dog and the happiness of the dog", "and un happy of naive the dogs"] * 3
    if kind.startswith("byte-level"):
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.post_processor = processors.ByteLevel(trim_offsets="trimmed" in kind)
        trainer: Any = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "word pieces":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]", "[CLS]", "[SEP]"])
    else:
        made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False, byte_fallback=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        special = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, limit_alphabet=20)
    made.train_from_iterator(corpus, trainer)
    if kind == "word pieces":
        marks = [(name, made.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
        made.post_processor = processors.BertProcessing(*marks)
    return made


@pytest.mark.parametrize("kind", ["byte-level", "byte-level trimmed", "word pieces", "sentence pieces"])
def test_the_tokens_of_every_kind_of_tokenizer(kind: str) -> None:
    sentence = made(TEXT)
    assert [w.text for w in sentence.words] == WORDS
    encoding = trained(kind).encode(TEXT)
    at = aligned(sentence, encoding.offsets)
    assert [w for w in at if w is not None] == sorted(w for w in at if w is not None)
    assert set(at) - {None} == set(range(len(WORDS)))  # each word has a token
    special = {i for i, token in enumerate(encoding.tokens) if token in ("[CLS]", "[SEP]", "▁", "Ġ")}
    assert {i for i, word in enumerate(at) if word is None} <= special
    if kind != "word pieces":  # which knows no dog
        cut = [token for token, word in zip(encoding.tokens, at, strict=True) if word == WORDS.index("🐕")]
        assert len(cut) >= 3  # a character of four bytes
    else:
        assert at[0] is None and at[-1] is None
    pieces = [token for token, word in zip(encoding.tokens, at, strict=True) if word == WORDS.index("unhappiness")]
    spelled = "".join(piece.strip("Ġ▁#") for piece in pieces)
    assert spelled == "unhappiness" and len(pieces) > 1
