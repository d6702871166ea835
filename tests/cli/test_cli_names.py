"""What an empty name and an environment without sense do to a command: one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CliRunner

import headwise
from headwise import cli, models
from headwise.cli.compare import _recorded as recorded
from headwise.cli.errors import with_options
from headwise.cli.output import console

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


def test_the_packaged_model_has_a_name(here: Path) -> None:
    """Each command that takes a model takes ``tiny``; a folder of that name is meant where there is one."""
    for arguments in (
        ["look", "tiny", "--json"],
        ["importance", "tiny", "--json", "--by", "gradient"],
        ["attribute", "tiny", "--text", "return x", "--answer", "x", "--wrong", "y", "--json"],
        ["trace", "tiny", "--json"],
        ["trace", "--config", "tiny", "--json"],
        ["prune", "tiny", "--keep-fraction", "0.5", "--by", "random", "--dry-run", "--json"],
        ["regroup", "tiny", "--kv-heads", "4", "--method", "mean", "--dry-run", "--json"],
        ["plan", "tiny", "--json"],
        ["tour", "tiny"],
    ):
        result = runner.invoke(cli.app, arguments)
        assert result.exit_code == 0, (arguments, result.output)
        if arguments[0] in ("look", "importance", "attribute"):
            assert json.loads(result.stdout)["model"] == "headwise tiny", arguments
    distill = refused("distill", "tiny", "--teacher", "tiny", "--steps", "1", "--out", "x", "--file", "none.txt")
    assert "--file none.txt: cannot be read" in distill
    (here / "tiny").mkdir()
    for command in (["look"], ["plan"], ["prune", "--keep-fraction", "0.5", "--dry-run"]):
        assert "config.json" in refused(command[0], "tiny", *command[1:])


def test_errors_name_options_and_ways_out(here: Path) -> None:
    for arguments, said in (
        ("trace --d-model 100 --num-heads 7", "--d-model must be a multiple of --num-heads: "),
        ("prune tiny --keep-fraction 2 --dry-run", "--keep-fraction is the fraction of the heads"),
        ("prune tiny --heads 0.1 --dry-run", "or add --zero, which keeps all sizes"),
        ("look --dtype f32", "--dtype is float32, bfloat16, float16 or float64; got 'f32'"),
        ("trace", "give MODEL, such as tiny, or --d-model and --num-heads, or --config"),
        ("foo", "No such command 'foo'; the commands are look, importance, "),
        ("look --layer 3", "No such option: --layer; see headwise look --help"),
        ("look --tex a", "No such option: --tex (did you mean --text?); see headwise look --help"),
        ("prune", "Missing argument 'model'; see headwise prune --help"),
    ):
        assert said in refused(*arguments.split()).replace("root ", "headwise "), arguments


def test_only_what_cannot_be_a_word_becomes_an_option() -> None:
    options = {"heads": "--heads", "kv_heads": "--kv-heads", "zero": "--zero", "text": "--text"}
    for said, shown in (
        ("heads is 3; kv_heads", "--heads is 3; --kv-heads"),
        ("heads of layer 1 are 0 to 7", "heads of layer 1 are 0 to 7"),
        ("the text and heads stay, num_kv_heads too", "the text and heads stay, num_kv_heads too"),
        ("add zero=True, or zero", "add --zero, or zero"),
        ("'kv_heads' of {'kv_heads': 2}, kv_heads=3", "'kv_heads' of {'kv_heads': 2}, kv_heads=3"),
    ):
        assert with_options(said, options) == shown
    assert with_options("heads is 3", {}) == "heads is 3"


def test_columns_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, width in (("97", 97), ("", 140), ("0", 140), ("wide", 140), ("9" * 9, 140)):
        monkeypatch.setenv("COLUMNS", said)
        assert console().width == width
