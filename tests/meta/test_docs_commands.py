"""The `headwise ...` commands of the documentation run, page by page, with files of the names that they use."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CliRunner
from hf_folders import prove_here
from pages import FENCE
from seen_folders import write_seen
from test_docs import PAGES, ROOT

from headwise import cli, models
from headwise.look import annotate

# Typer hands its commands a context of another class than it has them annotate.
pytestmark = [pytest.mark.slow, pytest.mark.unchecked]

SEEN = re.compile("path/to/(vit|clip|llava|wav2vec2|whisper|t5|bert)")
"""Models of pictures, sound, and pairs of texts: made where a page names one."""

PACKAGED = "src/headwise/models/tiny"
"""Where a clone has the packaged model."""

SHORTER = {"--steps 200": "--steps 2"}
"""What of a command is made smaller, so that it takes seconds."""

TEXT = "The cat sat. It slept, and the dog saw it: a cat. " * 12


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a page, without its comment, and the lines that the page says it prints.

    A block of `sh` has commands alone. In a block of `console` a command follows `$ `, and what it prints follows it.
    """
    for block in FENCE.finditer(text):
        lines = block["body"].replace("\\\n", " ").splitlines()
        if block["language"] == "sh":
            for line in lines:
                if line.strip().startswith("headwise "):
                    yield without_comment(line), []
        elif block["language"] == "console":
            starts = [i for i, line in enumerate(lines) if line.startswith("$ headwise ")]
            for start, end in itertools.pairwise([*starts, len(lines)]):
                yield without_comment(lines[start].removeprefix("$ ")), lines[start + 1 : end]


def without_comment(line: str) -> str:
    return shlex.join(shlex.split(line, comments=True))


def words(line: str) -> list[str]:
    """Return the words of a printed line, without the frame of a table."""
    return re.sub("[│┃]", " ", line).split()


def not_printed(shown: list[str], output: str) -> list[str]:
    """Return the lines that a page shows and a command did not print, in their order.

    A page may leave lines out, and columns of a table, as a narrow terminal does: so the words of a line must occur in
    this order in a printed line that comes after those of the line before.
    """
    printed = iter(output.splitlines())
    shown = [line for line in shown if line != "..."]  # where lines are left out
    return [line for line in shown if not any(in_order(words(line), words(other)) for other in printed)]


def in_order(some: list[str], of: list[str]) -> bool:
    """Return whether the words `some` occur in `of`, in their order."""
    rest = iter(of)
    return all(word in rest for word in some)


EVERY = {page: list(commands(page.read_text("utf8"))) for page in PAGES}
SHOWN = {page: listed for page, listed in EVERY.items() if listed}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files and checkpoints of the names that the pages use; the proof of a checkpoint is asked in this process."""
    monkeypatch.setattr(cli.options.models, "quiet", lambda command: None)
    monkeypatch.setattr("headwise.hf.loading.checkpoint.prove", prove_here)
    monkeypatch.chdir(tmp_path)
    for name in ("path/to/checkpoint", "path/to/model", "before", "after", "model", "pruned", PACKAGED):
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
    for command, shown in SHOWN[page]:
        if "before.json" in command:
            seen = runner.invoke(cli.app, ["look", "model", "--out", "before.json", "--out", "after.json"])
            assert seen.exit_code == 0, seen.output
        for long, short in SHORTER.items():
            command = command.replace(long, short)
        arguments = shlex.split(command)[1:]
        for name, there in itertools.pairwise(arguments):
            if name == "--out" and Path(there).is_dir():
                shutil.rmtree(there)  # a page that reads it does not write it
        done = runner.invoke(cli.app, arguments)
        assert done.exit_code == 0, f"{command}\n{done.output}"
        assert not_printed(shown, done.output) == [], f"{command}\n{done.output}"
        if SEEN.search(command):
            assert (folder / "headwise-report.html").stat().st_size > 50_000, command
            (folder / "headwise-report.html").unlink()


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        (["head  role", "2  broad 0.9"], []),  # a column and a line are left out
        (["3  broad 0.9"], ["3  broad 0.9"]),
        (["2  broad 0.8"], ["2  broad 0.8"]),
        (["2  broad 0.9", "head role"], ["head role"]),  # another order
        (["0.9 broad"], ["0.9 broad"]),
    ],
)
def test_a_page_that_shows_what_was_not_printed_is_reported(shown: list[str], missing: list[str]) -> None:
    assert not_printed(shown, "┃ head ┃ mass ┃ role ┃\n│ 1 │ 0.1 │ - │\n│ 2 │ 0.3 │ broad 0.9 │") == missing


def test_commands_are_found_and_excuses_are_needed() -> None:
    page = "```sh\nheadwise plan a \\\n  --json  # why\nmake look\n```\n```python\nheadwise plan b\n```"
    assert list(commands(page)) == [("headwise plan a --json", [])]
    page = "```console\n$ headwise plan a\n5\nheadwise x\n$ headwise plan b\n```"
    assert list(commands(page)) == [("headwise plan a", ["5", "headwise x"]), ("headwise plan b", [])]
    assert {page.name for page, listed in SHOWN.items() if any(shown for _, shown in listed)} == {
        "README.md",
        "quickstart.md",
        "reshape.md",
    }
    every = [command for listed in EVERY.values() for command, _ in listed]
    assert len(every) > 30
    assert all(any(long in command for command in every) for long in SHORTER)
    named = {named_by[1] for command in every if (named_by := SEEN.search(command))}
    assert len(named) == SEEN.pattern.count("|") + 1, "a model is made that no page names"
