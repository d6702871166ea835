"""`headwise look --corpus`, `--sentences`, `--needles`: what is read beside one text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import CliRunner

from headwise import cli
from headwise.cli.options import look_inputs as reading
from headwise.look import annotate

pytestmark = pytest.mark.unchecked


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["look", *arguments])


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.slow
def test_a_corpus_with_sentences_and_needles(here: Path) -> None:
    (here / "texts").mkdir()
    (here / "texts" / "a.txt").write_text("def f(x):\n    return x\n" * 40, "utf8")
    (here / "texts" / "b.jsonl").write_text('{"text": "The agent opened a pull request."}\n"def g(): pass"\n', "utf8")
    (here / "two.conllu").write_text(
        "# text = A dog\n1\tA\t_\tDET\t_\t_\t2\tdet\t_\t_\n2\tdog\t_\tNOUN\t_\t_\t0\troot\t_\t_\n\n", "utf8"
    )
    result = run("--corpus", "texts", "--length", "64", "--sentences", "two.conllu", "--needles", "--json")
    assert result.exit_code == 0, result.output
    seen = json.loads(result.stdout)
    assert seen["texts"] > 3 and seen["tokens"] == [] and seen["length"] > 200
    scores = seen["heads"][0]["scores"]
    assert scores["head to det"][3] == 1 and "retrieval" in scores and "induction" in scores
    assert scores["previous-token"][4] is not None  # an interval
    assert not (here / reading.STATE).exists()  # it came to its end


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--length", "7"), "--length applies to a corpus; give --corpus as well"),
        (("--state", "x"), "--state applies to a corpus; give --corpus as well"),
        (("--corpus", "none"), "--corpus none: no such file or folder"),
        (("--corpus", ".", "--text", "a"), "give --corpus, or one text with --text or --file, not both"),
        (("--corpus", ".", "--length", "1"), "--length is at least 2 tokens; got 1"),
    ],
)
def test_options_that_do_not_fit(here: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_what_cannot_be_read(here: Path) -> None:
    (here / "empty.txt").write_text(" \n", "utf8")
    assert "--corpus empty.txt: contains no text; give files with at least a few words" in refused(
        "--corpus", "empty.txt"
    )
    (here / "bad.jsonl").write_text("{\n", "utf8")
    assert 'bad.jsonl:1: not JSON; write an object a line, such as {"text": "..."}' in refused("--corpus", "bad.jsonl")
    (here / "bad.conllu").write_text("1\tIt\n", "utf8")
    assert "a word has 10 columns" in refused("--sentences", "bad.conllu")
    (here / "none.conllu").write_text("", "utf8")
    said = refused("--text", "def f(x): return x", "--sentences", "none.conllu")
    assert "--sentences none.conllu: contains no sentence" in said
    (here / reading.STATE).write_bytes(b"no state")
    (here / "good.txt").write_text("def f(x): return x", "utf8")
    line = "not the state of this look (it holds something else); remove it to begin anew, or give another path"
    assert line in refused("--corpus", "good.txt")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--sentences", "ours"), "--sentences ours: contains no sentence of at most 3 tokens; give other"),
        (("--needles",), "--needles: a text with a needle has at least 15 tokens, but the model supports 3 positions;"),
    ],
    ids=["sentences", "needles"],
)
def test_readings_that_no_position_is_left_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("headwise.hf.loading.model._max_positions", lambda _: 3)
    assert message in refused("--text", "a", *option)


@pytest.mark.slow
def test_what_heads_are_worth_and_the_tokens_around_evidence(here: Path) -> None:
    text = "def f(x):\n    return x\n" * 9
    result = run("--text", text, "--sentences", "ours", "--importance", "--out", "seen.json")
    assert result.exit_code == 0, result.output
    seen = json.loads((here / "seen.json").read_text("utf8"))
    extras = [head["extras"] for head in seen["heads"]]
    assert all(one["importance (gradient)"] >= 0 and one["writes (norm)"] > 0 for one in extras)
    for layer in range(4):  # normalised a layer, and the shares of a layer sum to 1
        of = [one for one, head in zip(extras, seen["heads"], strict=True) if head["layer"] == layer]
        assert sum(one["importance (gradient)"] ** 2 for one in of) == pytest.approx(1, abs=1e-3)
        assert sum(one["share of the layer"] for one in of) == pytest.approx(1, abs=1e-3)
    texts = "|".join("".join(one.text.split()) for one in annotate.ours())
    excerpts = [tokens for name, tokens in seen["excerpts"].items() if name.startswith("sentences ")]
    assert excerpts
    for tokens in excerpts:
        places = sorted(map(int, tokens))
        joined = "".join(tokens[str(i)].strip() + ("" if i + 1 in places else "\n") for i in places)
        assert all(run in texts for run in joined.replace("<s>", "").split("\n")), joined
