"""Command lines drawn by the commands' own signatures: whatever stands in an option, the end is 0 or one line and 2."""

from __future__ import annotations

import functools
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hostile import PAYLOADS
from looks import make_look
from typer.testing import CliRunner

from headwise import cli, look, models

pytestmark = pytest.mark.unchecked
runner = CliRunner()
COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
PLAIN = {"look": {}, "trace": {"d_model": "6", "num_heads": "2"}, "plan": {"configs": "gpt2"}}
PLAIN |= {"importance": {}, "ablate": {"heads": "0.1"}, "circuits": {}}
EACH = {
    "look": 16,
    "trace": 16,
    "plan": 16,
    "importance": 3,
    "ablate": 3,
    "circuits": 3,
}  # few where look reads the same options

NUMBERS = ["0", "-1", "-999999999999999999", "9999999999999999999", "1e5", "nan", "inf", "-inf", "0x10", "1_000", " 7 "]
NUMBERS += ["\u0663", "1.5", "5e-99", "1e99E", "0,0", "1,,2", "9" * 400, "9" * 5000, "0." + "0" * 310 + "1"]
NUMBERS += ["9" * 300 + "TB/s"]
WORDS = ["-", "--", "none", "None", "true", "meta", "cuda", "cuda:99", "cpu:1", "lazy", "float8_e4m3fn", "load", "~"]
WORDS += ["gpt2,gpt2", ",", ".", "..", "--json", "", " ", "x" * 5000, "{}", "a\nb"]
PATHS = ["none/x", "folder", "folder/", "nothing", "bytes", "nul", "deep.json", "list.json", "link", "loop/x", "/"]
PATHS += ["/proc/self/mem", "/dev/null", "/dev/full", "/dev/zero", "x" * 300, "\U0001f642" * 60]
BYTES = ("\udcff", "a\udcff\udc80", "none/\udcff", "\udcff=1")  # as Python hands over what is no UTF-8
VALUES = (*NUMBERS, *WORDS, *PATHS, *BYTES, *PAYLOADS[::9])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    files = {"nothing": b"", "bytes": b"\xff\xfe{}", "nul": b"a\0b", "deep.json": b"[" * 200_000, "list.json": b"[1]"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere/x")
    (tmp_path / "loop").symlink_to("loop")
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(autouse=True)
def without_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded (once for the same arguments) and the text cut into tokens; only the look is made by hand."""
    import headwise.hf

    monkeypatch.setattr(headwise.hf, "load", functools.cache(headwise.hf.load))
    head = look.HeadImportance("a", 0, 0, 0, 0, 1.0, 1.0, 0.0, 0.0, 0.0)
    importance = look.Importance("a", 1, 3, 1.0, ("gradient", "zero", "mean", "contribution"), (head,), (), 0.0)
    monkeypatch.setattr(look, "at", lambda *_, **__: make_look(layers=1, heads=2))
    monkeypatch.setattr(look, "importance", lambda *_, **__: importance)
    monkeypatch.setattr(look, "circuits", lambda *_, **__: look.Circuits("a", (), {}, ()))
    monkeypatch.setattr(look, "ablate", lambda *_, **__: look.Ablation("a", "zero", 3, 1.0, 2.0, (), None, ()))
    monkeypatch.setattr(cli.loading, "quiet", lambda command: None)
    monkeypatch.setattr(models, "default_text", lambda: "a b")


def lines(command: str, each: int, dice: random.Random) -> Iterator[list[str]]:
    """Lines for each option of the command: a hostile value there, at times a flag or a second one beside it."""
    options = [option for option in COMMANDS[command].params if option.name != "help"]
    flags = [option.opts[0] for option in options if getattr(option, "is_flag", False)]
    valued = {option.name: option for option in options if option.opts[0] not in flags}
    for name in valued:
        for value in dice.sample(VALUES, each):
            chosen = dict(PLAIN[command]) | {name: value}
            if dice.random() < 0.3:
                chosen[dice.choice([*valued])] = dice.choice(VALUES)
            line = [dice.choice(flags)] if dice.random() < 0.3 else []
            for key, text in chosen.items():
                line += [text] if isinstance(valued[key], typer.core.TyperArgument) else [valued[key].opts[0], text]
            yield line


@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_stands_in_an_option(command: str, here: Path) -> None:
    for line in lines(command, EACH[command], random.Random(command)):
        result = runner.invoke(cli.app, [command, *line])
        seen = (line, result.exit_code, result.output[:999], result.exception)
        assert result.exit_code in (0, 2), seen
        assert len(result.stderr.splitlines()) == (result.exit_code == 2), seen
        assert result.stderr.rstrip("\n").isprintable() and "Traceback" not in result.output, seen
        assert result.exit_code == 0 or result.stdout == "", seen
        assert not [name for name in os.listdir() if name.endswith(".partial")], seen


def test_there_are_enough_lines_and_every_option_is_among_them() -> None:
    made = {command: [*lines(command, EACH[command], random.Random(command))] for command in COMMANDS}
    assert sum(map(len, made.values())) >= 300
    for command, some in made.items():
        words = {word for line in some for word in line}
        assert {option.opts[0] for option in COMMANDS[command].params if option.opts[0].startswith("--")} <= words
