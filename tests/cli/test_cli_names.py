"""What an empty name and an environment without sense do to a command: one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import headwise
from headwise import cli, models
from headwise.cli.compare import _recorded as recorded

pytestmark = pytest.mark.unchecked
runner = CliRunner()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*arguments: str) -> str:
    result = runner.invoke(cli.app, list(arguments))
    assert result.exit_code == 2 and result.stdout == "", (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    "arguments",
    [
        ["look", "--corpus"],
        ["look", "--file"],
        ["look", "--image"],
        ["look", "--audio"],
        ["look", "--sentences"],
        ["look", "--corpus", "texts", "--state"],
        ["look", "--against", "x", "--kept"],
        ["plan", "gpt2", "--heads-plan"],
        ["plan", "gpt2", "--csv"],
        ["prune", "x", "--keep-fraction", "0.5", "--dry-run", "--corpus"],
        ["regroup", "x", "--kv-heads", "1", "--dry-run", "--corpus"],
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-1]}",
)
def test_an_option_of_a_path_has_a_name(arguments: list[str], here: Path) -> None:
    (here / "texts").mkdir()
    (here / "a.txt").write_text("a b c d e f g h")  # what --corpus "" read: the folder one stands in
    arguments = [str(models.tiny_path()) if argument == "x" else argument for argument in arguments]
    assert f"headwise: {arguments[-1]}: the name is empty; give a file" in refused(*arguments, "")


def test_a_corpus_has_a_name(here: Path) -> None:
    (here / "a.txt").write_text("a b c d e f g h")
    assert [*headwise.look.documents(".")] == ["a b c d e f g h"]
    with pytest.raises(ValueError, match=r"^path: the name is empty; give a file or a folder$"):
        next(headwise.look.documents(""))


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_what_torchrun_says_is_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ("abc", "", "-1", "1.5", "9" * 50):
        monkeypatch.setenv(name, said)
        assert f"headwise: {name} is a whole number of at least " in refused("plan", "gpt2")
    monkeypatch.setenv(name, "1")
    assert runner.invoke(cli.app, ["plan", "gpt2"]).exit_code == 0


def test_two_models_are_there_before_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one model alone, and of the one in the package, there is nothing to find out first."""
    names: list[str] = []
    monkeypatch.setattr("headwise.cli.compare.quiet", lambda command: None)  # it silences other libraries for good
    monkeypatch.setattr("headwise.hf.loading.model.checked", lambda name, **_: names.append(name))
    for model, against, expected in ((None, None, []), ("a", None, []), (None, "b", ["b"]), ("a", "b", ["a", "b"])):
        names.clear()
        assert recorded(model, against=against, any_input=False) == [None, None]
        assert names == expected, (model, against)
