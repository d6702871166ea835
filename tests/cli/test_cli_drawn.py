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
from command_line import CliRunner
from draw import SHARE
from hostile import PAYLOADS
from looks import make_look

from headwise import cli, look, models, reshape
from headwise.look.collect.resume import load
from headwise.reshape.repair.distill import LossCurve

pytestmark = [pytest.mark.slow, pytest.mark.unchecked]
runner = CliRunner()
COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
PLAIN = {"look": {}, "trace": {"d_model": "6", "num_heads": "2"}, "plan": {"configs": "gpt2"}}
PLAIN |= {"redundancy": {}, "attribute": {"text": "a b c", "answer": "x", "wrong": "y"}}
PLAIN |= {"patch": {"clean": "return x", "corrupt": "return y", "answer": "x", "wrong": "y"}}
PLAIN |= {"importance": {}, "ablate": {"heads": "0.1"}, "circuits": {}, "tour": {}}
TINY = str(Path(models.__file__).parent / "tiny")
PLAIN |= {
    "prune": {"model": TINY, "keep_fraction": "0.5", "by": "random", "out": "new"},
    "regroup": {"model": TINY, "kv_heads": "4", "out": "new"},
    "distill": {"folder": TINY, "teacher": TINY, "steps": "7", "length": "3", "file": "text.txt", "out": "new"},
}
# What else an option needs, or (None) what must not stand beside it.
BESIDE: dict[tuple[str, str], dict[str, str | None]] = {
    ("look", "length"): {"corpus": "text.txt"},
    ("look", "state"): {"corpus": "text.txt"},
    ("look", "kept"): {"against": "seen.json"},
    ("prune", "heads"): {"keep_fraction": None, "by": None},
    ("prune", "budget_mb"): {"keep_fraction": None},
    ("prune", "context"): {"keep_fraction": None, "budget_mb": "9"},
    ("prune", "by"): {"text": "a b c d e"},
    ("distill", "corpus"): {"file": None},
}
EACH = {"look": 16, "trace": 16, "plan": 16} | dict.fromkeys(PLAIN.keys() - {"look", "trace", "plan"}, 3)

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
    monkeypatch.setattr("webbrowser.open", lambda *_: True)
    files = {
        "text.txt": b"a b c d e",
        "seen.json": make_look(layers=4, heads=8).to_json().encode(),
        "nothing": b"",
        "bytes": b"\xff\xfe{}",
        "nul": b"a\0b",
        "deep.json": b"[" * 200_000,
        "list.json": b"[1]",
    }
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
    seen, places = make_look(layers=4, heads=8), [(layer, head) for layer in range(4) for head in range(8)]
    worth = tuple(look.HeadImportance("a", 0, *place, 0, 1.0, 1.0, 0.0, 0.0, 0.0) for place in places)
    importance = look.Importance("a", 1, 3, 1.0, ("gradient", "zero", "mean", "contribution"), worth, (), 0.0)
    writes = tuple(look.HeadWrites("a", *place, *[0.5] * 6) for place in places)
    twins = tuple(look.SimilarHead(*place, 0.5, (0, 0), 0.5, (0, 0)) for place in places)
    monkeypatch.setattr(look, "at", lambda *_, **__: seen)
    monkeypatch.setattr(look, "over", functools.partial(looked_over, seen))
    monkeypatch.setattr(look, "importance", lambda *_, **__: importance)
    monkeypatch.setattr(look, "redundancy", lambda *_, **__: look.Redundancy("a", 3, 3, 0.1, twins, (), ()))
    monkeypatch.setattr(look, "circuits", lambda *_, **__: look.Circuits("a", (), {}, writes))
    patched = tuple(look.HeadPatch(*place, None, 0.5) for place in places)
    patching = look.Patching("a", "x - y", 1.0, 0.0, ("a", "b"), ("a", "c"), patched)
    added = look.Attribution("a", "x", "y", ("a", "b"), 1.0, tuple(look.HeadLogit(*p, 0.5) for p in places), 0.0)
    monkeypatch.setattr(look, "patch", lambda *_, **__: patching)
    monkeypatch.setattr(look, "attribute", lambda *_, **__: added)
    monkeypatch.setattr(look, "ablate", lambda *_, **__: look.Ablation("a", "zero", 3, 1.0, 2.0, (), None, ()))
    monkeypatch.setattr(cli.options.models, "quiet", lambda command: None)
    monkeypatch.setattr(models, "default_text", lambda: "a b")


def looked_over(seen: look.Look, model: Any, texts: Any, *, state: str, **_: Any) -> look.Look:
    """What `look.over` does with its texts and its state, without the model."""
    assert all(texts)
    if Path(state).exists():
        load(state, "another")
    return seen


@pytest.fixture(autouse=True)
def without_the_reshaping(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would change is planned; no model is run or trained, and no folder written."""
    plan = reshape.plan_regroup

    def regrouping(source: Any, kv_heads: int, *, method: Any, seed: int, **_: Any) -> reshape.Regrouping:
        return plan(source, kv_heads, method=method, seed=seed)

    monkeypatch.setattr(reshape, "reconstruct", lambda plan, *_, **__: plan)
    monkeypatch.setattr(reshape, "write_pruned", lambda plan, *_, **__: plan.facts())
    monkeypatch.setattr(reshape, "plan_regroup", regrouping)
    monkeypatch.setattr(
        reshape, "regroup", lambda source, out, *some, **wish: regrouping(source, *some, **wish).facts()
    )
    monkeypatch.setattr(reshape, "distill", lambda *_, **__: LossCurve([0.5], [[0, 0.5, 1.5]]))
    monkeypatch.setattr(reshape, "write_distilled", lambda source, student, out, facts, **_: facts)
    monkeypatch.setattr(cli.regroup, "_accelerator", lambda: None)


@pytest.fixture(autouse=True)
def without_the_whole_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus at the root of the file system is none: to walk it takes minutes."""
    within = Path.rglob

    def files(self: Path, pattern: str) -> Iterator[Path]:
        return iter(()) if self.resolve() == Path("/") else within(self, pattern)

    monkeypatch.setattr(Path, "rglob", files)


def lines(command: str, each: int, dice: random.Random) -> Iterator[list[str]]:
    """A line for each flag; and for each option a hostile value there, at times a flag or a second one beside it."""
    options = [option for option in COMMANDS[command].params if option.name != "help"]
    flags = [option.opts[0] for option in options if getattr(option, "is_flag", False)]
    valued = {option.name: option for option in options if option.opts[0] not in flags}
    for flag in [word for option in options if option.opts[0] in flags for word in option.opts + option.secondary_opts]:
        yield [flag, *line_of(valued, PLAIN[command])]
    for name in valued:
        for value in dice.sample(VALUES, each):
            chosen = dict(PLAIN[command]) | BESIDE.get((command, name), {}) | {name: value}
            if dice.random() < 0.3:
                chosen[dice.choice([*valued])] = dice.choice(VALUES)
            line = [dice.choice(flags)] if dice.random() < 0.3 else []
            if getattr(valued[name], "multiple", False) and dice.random() < 0.5:
                line += [valued[name].opts[0], dice.choice(["b.csv", *VALUES])]
            yield line + line_of(valued, chosen)


def line_of(valued: dict[str, Any], chosen: dict[str, Any]) -> list[str]:
    """The words of some options; of None there are none."""
    line: list[str] = []
    for key, text in chosen.items():
        if text is not None:
            line += [text] if isinstance(valued[key], typer.core.TyperArgument) else [valued[key].opts[0], text]
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_stands_in_an_option(command: str, here: Path) -> None:
    ends = set()
    for line in lines(command, -(-EACH[command] // SHARE), random.Random(command)):
        result = runner.invoke(cli.app, [command, *line])
        seen = (line, result.exit_code, result.output[:999], result.exception)
        assert result.exit_code in (0, 2), seen
        ends.add(result.exit_code)
        assert len(result.stderr.splitlines()) == (result.exit_code == 2), seen
        assert result.stderr.rstrip("\n").isprintable() and "Traceback" not in result.output, seen
        assert result.exit_code == 0 or result.stdout == "", seen
        assert not [name for name in os.listdir() if name.endswith(".partial")], seen
    assert SHARE > 1 or ends == {0, 2}, "every line fails for another reason than what is drawn"


def test_there_are_enough_lines_and_every_option_is_among_them() -> None:
    made = {command: [*lines(command, EACH[command], random.Random(command))] for command in COMMANDS}
    assert sum(map(len, made.values())) >= 300
    for command, some in made.items():
        words = {word for line in some for word in line}
        assert {option.opts[0] for option in COMMANDS[command].params if option.opts[0].startswith("--")} <= words
