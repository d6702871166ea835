"""`headwise look`: the files it writes, and two looks side by side."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import CliRunner
from planted import DELIMITERS, NAMES, Planted, text
from reports import Elements

from headwise import cli, look, models
from headwise.hf.loading import model as loading
from headwise.look import Look

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def before() -> Look:
    return look.at(Planted(), text(29), delimiters=DELIMITERS, name="before")


@pytest.fixture(scope="module")
def after() -> Look:
    return look.at(Planted([*NAMES[:2], "first-token sink", *NAMES[3:]]), text(29), delimiters=DELIMITERS, name="after")


@pytest.fixture
def here(before: Look, after: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the two looks as files; a model by name is the look before."""
    monkeypatch.chdir(tmp_path)
    look.write(before, "before.json")
    look.write(after, "after.json")
    monkeypatch.setattr(cli.look, "look_at", lambda *_: before)
    monkeypatch.setattr(loading, "checked", lambda *_, **__: None)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["look", *arguments])


def test_look_against_another(here: Path) -> None:
    result = run("model", "--against", "after.json", "--out", "c.csv")
    assert result.exit_code == 0, result.output
    assert "before against after: 1 of 8 heads changed role" in result.stdout
    assert "lost self; gained first-token sink" in result.stdout and "c.csv (" in result.stdout
    assert run("model", "--against", "after.json").exit_code == 0
    assert [path.name for path in here.glob("*.html")] == ["headwise-report.html"]
    result = run("before.json", "--against", "after.json", "--json")
    assert json.loads(result.stdout)["heads"][2]["before"] == ["self"]


def test_the_page_of_two_looks(here: Path) -> None:
    result = run("before.json", "--against", "after.json", "--out", "c.html", "--out", "c.csv")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("c.html (")
    sides = Elements(Path("c.html").read_text("utf8")).data["sides"]
    assert [side["model"] for side in sides] == ["before", "after"]


def test_roles_come_first_and_every_head_where_it_fits(
    here: Path, before: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run("model", "--out", "x.csv").stdout
    played = {score.name for head in before.heads for score in head.roles}
    assert all(name in shown for name in played) and "no role" in shown and "entropy" in shown
    monkeypatch.setattr(cli.look, "PIPE_LINES", 20)
    short = run("model", "--out", "x.csv", "--out", "x.html").stdout
    assert "entropy" not in short and "8 heads: --all prints a line for each" in short
    assert short.splitlines()[-1].startswith("x.html (")
    assert "entropy" in run("model", "--out", "x.csv", "--all").stdout


def test_look_against_a_pruned_one(here: Path, before: Look) -> None:
    heads = tuple(replace(before.heads[h], head=n) for n, h in enumerate((0, 3, 4)))
    look.write(replace(before, heads=heads, num_heads=3, maps=(), moved=()), "pruned.json")
    Path("plan.json").write_text('{"layers": {"0": {"keep": [0, 3, 4]}}}')
    result = run("model", "--against", "pruned.json", "--kept", "plan.json", "--json")
    assert result.exit_code == 0, result.output
    assert [head["head"] for head in json.loads(result.stdout)["heads"]] == [0, 3, 4]


def test_a_pruned_folder_tells_what_it_kept(here: Path) -> None:
    Path("pruned").mkdir()
    Path("pruned/heads-plan.json").write_text('{"layers": {"0": {"keep": [7, 6, 5, 4, 3, 2, 1, 0]}}}')
    result = run("model", "--against", "pruned", "--json")
    assert result.exit_code == 0, result.output
    assert [head["other_head"] for head in json.loads(result.stdout)["heads"]] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_everything_that_out_may_name(here: Path) -> None:
    names = ["h.parquet", "h.csv", "h.json", "h.md", "h.svg", "H.PNG"]
    result = run("model", *(word for name in names for word in ("--out", name)))
    assert result.exit_code == 0, result.output
    assert {path.name for path in here.iterdir()} == {"before.json", "after.json", *names}
    assert all(f"{name} (" in result.stdout for name in names)
    assert Path("h.md").read_text("utf-8").startswith("# Heads of `before`")


def test_wrong_names_are_one_line(here: Path) -> None:
    Path("no.json").write_text("{")
    for arguments, message in (
        (
            ["--out", "h.xlsx"],
            "--out h.xlsx: the ending selects what is written; use one of .html .htm .parquet .csv .json .md .svg .png",
        ),
        (
            ["--against", "after.json", "--out", "h.md"],
            "--out h.md: the ending selects what is written; use one of .html .htm .parquet .csv .json",
        ),
        (["--out", "none/h.csv"], "cannot write none/h.csv: its folder does not exist"),
        (["--kept", "plan.json"], "--kept says which heads the other model kept; give it with --against"),
        (["--against", "after.json", "--kept", "none.json"], "--kept none.json: cannot be read (No such file"),
        (["--against", "after.json", "--kept", "no.json"], "--kept no.json: not JSON; write"),
        (["--against", "no.json"], "no.json is no look"),
        (["--against", "none.json"], "cannot read none.json: No such file"),
        (["--against", "after.json", "--kept", "after.json"], "kept says by layer which heads are left"),
    ):
        result = run("model", *arguments)
        lines = result.stderr.strip().splitlines()
        assert (result.exit_code, len(lines)) == (2, 1) and message in lines[0], (arguments, result.stderr)


def test_what_is_to_be_measured_is_refused_beside_looks_that_are_made(here: Path) -> None:
    for option in (
        "--text abc",
        "--file x",
        "--corpus x",
        "--sentences ours",
        "--needles",
        "--importance",
        "--image x",
    ):
        name = option.split()[0]
        for looks in (["before.json"], ["before.json", "--against", "after.json"]):
            result = run(*looks, *option.split())
            assert result.exit_code == 2, (looks, option)
            assert f"{name} is for a model, and before.json is a finished look" in result.stderr, option
    for looks in (["before.json", "--against", "model"], ["model", "--against", "after.json"], ["model"]):
        assert run(*looks, "--text", "abc").exit_code == 0, looks


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where no file can be made and all may write")
def test_where_nothing_can_be_written_is_told_before_a_look(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(cli.look, "look_at", lambda *arguments: looked.append(arguments))
    for *arguments, name in (
        ("--out", "/proc/h.html"),
        ("--out", "h.csv", "--out", "/proc/h.json"),
        ("--against", "after.json", "--out", "/proc/h.csv"),
        ("--corpus", "before.json", "--state", "/proc/state"),
    ):
        result = run("model", *arguments, name)
        line = f"headwise: cannot write {name}: no file can be created in its folder (No such file or directory)"
        assert result.exit_code == 2 and result.stderr.startswith(line), (arguments, result.stderr)
    assert not looked and {path.name for path in here.iterdir()} == {"before.json", "after.json"}


def test_both_names_are_checked_before_a_model_is_looked_at(before: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(cli.look, "look_at", lambda name, *_: looked.append(name) or before)
    tiny = str(models.tiny_path())
    for arguments, message in (
        ((tiny, "--against", "no/such/folder"), "no/such/folder: no such folder; give one with config.json"),
        ((tiny, "--against", "none.json"), "cannot read none.json: No such file"),
        (("no/such/folder", "--against", tiny), "no/such/folder: no such folder"),
        ((tiny, "--against", str(Path(tiny).parent)), "no config.json, so no transformers checkpoint"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and message in result.stderr, (arguments, result.stderr)
        assert looked == []
    assert run(tiny, "--against", tiny).exit_code == 0
    assert looked == [tiny, tiny]
