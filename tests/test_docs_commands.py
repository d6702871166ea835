"""The `headwise ...` commands of the documentation run, page by page, with files of the names that they use."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hf_folders import prove_here
from pages import FENCE
from seen_folders import write_seen
from test_docs import PAGES, ROOT
from typer.testing import CliRunner

from headwise import cli, models
from headwise.look import annotate

pytestmark = pytest.mark.unchecked  # Typer hands its commands a context of another class than it has them annotate

SEEN = re.compile("path/to/(vit|clip|llava|wav2vec2|whisper|t5|bert)")
"""Models of pictures, sound, and pairs of texts: made where a page names one."""

SHORTER = {"--steps 200": "--steps 2"}
"""What of a command is made smaller, so that it takes seconds."""

TEXT = "The cat sat. It slept, and the dog saw it: a cat. " * 12


def commands(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the commands of a page without their comments, each with what the page says that it prints.

    What is printed is a block of text right behind a block of commands, and belongs to the last of these.
    """
    blocks: list[Any] = list(FENCE.finditer(text))
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        if block["language"] not in ("sh", "console", "bash"):
            continue
        lines = [line.strip().removeprefix("$ ") for line in block["body"].replace("\\\n", " ").splitlines()]
        found = [shlex.join(shlex.split(line, comments=True)) for line in lines if line.startswith("headwise ")]
        is_output = after is not None and after["language"] == "text" and after.start() < block.end() + 4
        for command in found:
            yield command, after["body"] if is_output and command is found[-1] else None


EVERY = {page: list(commands(page.read_text("utf8"))) for page in PAGES}
SHOWN = {page: listed for page, listed in EVERY.items() if listed}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files and checkpoints of the names that the pages use; the proof of a checkpoint is asked in this process."""
    monkeypatch.setattr(cli.loading, "quiet", lambda command: None)
    monkeypatch.setattr("headwise.hf.checkpoints.prove", prove_here)
    monkeypatch.chdir(tmp_path)
    for name in ("path/to/checkpoint", "path/to/model", "before", "after", "model", "pruned"):
        shutil.copytree(models.tiny_path(), tmp_path / name)
    shutil.copy(tmp_path / "model/config.json", tmp_path / "path/to/config.json")
    (tmp_path / "texts").mkdir()
    shutil.copy(Path(annotate.__file__).parent / "sentences.conllu", tmp_path / "treebank.conllu")
    (tmp_path / "notes.txt").write_text(TEXT)
    (tmp_path / "texts/a.txt").write_text(TEXT * 30)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (tmp_path / "plan.json").write_text(json.dumps({"layers": {"0": {"keep": list(range(8))}}}))
    return tmp_path


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_run_and_print_what_it_says(page: Path, folder: Path) -> None:
    runner = CliRunner()
    texts = " ".join(command for command, _ in SHOWN[page])
    if "path/to/encoder" in texts:
        (folder / "seen").mkdir()
        write_seen(folder / "seen")
        encoder = (folder / "seen/bert").rename(folder / "path/to/encoder")
        (encoder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    if SEEN.search(texts):
        write_seen(folder / "path/to")
        (folder / "path/to/p.png").rename("photo.png")
        (folder / "path/to/s.wav").rename("speech.wav")
    for command, says in SHOWN[page]:
        if "before.json" in command:
            seen = runner.invoke(cli.app, ["look", "model", "--out", "before.json", "--out", "after.json"])
            assert seen.exit_code == 0, seen.output
        for long, short in SHORTER.items():
            command = command.replace(long, short)
        words = shlex.split(command)[1:]
        for name, there in itertools.pairwise(words):
            if name == "--out" and Path(there).is_dir():
                shutil.rmtree(there)  # a page that reads it does not write it
        done = runner.invoke(cli.app, words)
        assert done.exit_code == 0, f"{command}\n{done.output}"
        if SEEN.search(command):
            assert (folder / "headwise-report.html").stat().st_size > 50_000, command
            (folder / "headwise-report.html").unlink()
        if says is not None:
            assert " ".join(says.split()) in " ".join(done.output.split())


def test_commands_are_found_and_excuses_are_needed() -> None:
    page = "```sh\n$ headwise plan a \\\n  --json  # why\nmake look\n```\n```python\nheadwise plan b\n```"
    assert list(commands(page)) == [("headwise plan a --json", None)]
    two = "```sh\nheadwise plan a\nheadwise plan b\n```\n\n```text\n5\n```\n```sh\nheadwise plan c\n```"
    assert list(commands(two)) == [("headwise plan a", None), ("headwise plan b", "5\n"), ("headwise plan c", None)]
    assert any(says for command, says in SHOWN[ROOT / "docs/reshape.md"])
    every = [command for listed in EVERY.values() for command, _ in listed]
    assert len(every) > 30
    assert all(any(long in command for command in every) for long in SHORTER)
    named = {named_by[1] for command in every if (named_by := SEEN.search(command))}
    assert len(named) == SEEN.pattern.count("|") + 1, "a model is made that no page names"
