"""`headwise importance`, `ablate` and `circuits`: what they print, and one line for what a user gets wrong."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headwise.hf as hf
from headwise import cli, models
from headwise.look import ablate, circuits, importance

pytestmark = pytest.mark.unchecked  # Typer hands its commands a context of another class than it has them annotate
runner = CliRunner()
TEXT = "def f(x):\n    return x\n\ndef f(x):\n    return x\n"


@pytest.fixture(scope="module")
def tiny() -> Any:
    return hf.load(models.tiny_path())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    """The model is read once; other libraries are not silenced."""
    monkeypatch.setattr(cli.options.models, "quiet", lambda command: None)
    monkeypatch.setattr(hf, "load", lambda *_, **__: tiny)


def test_ablation_is_what_the_function_gives(tiny: Any) -> None:
    ids, _ = tiny.encode(TEXT)
    expected = ablate(tiny.model, ids, [(2, 1), (1, 2)], by="mean", decode=tiny.decode, name="headwise tiny")
    done = runner.invoke(cli.app, ["ablate", "--heads", "2.1, 1.2", "--by", "mean", "--text", TEXT, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout) == json.loads(expected.to_json())
    shown = runner.invoke(cli.app, ["ablate", "--heads", "2.1,1.2", "--text", TEXT], terminal_width=200).stdout
    assert "headwise tiny: heads off by zero" in shown.replace("\n", " ") and "where the next token changed" in shown
    lost = ablate(tiny.model, ids, [(2, 1), (1, 2)])
    for what, loss in (("none", lost.before), ("2.1", lost.heads[0].loss), ("all of them", lost.after)):
        assert re.search(rf"{what} │ {loss:.4f}", shown), what
    assert f"{lost.places[0].position} {tiny.decode(int(ids[0, lost.places[0].position]))!r}" in shown


def test_importance_is_what_the_function_gives(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(TEXT)
    ids, _ = tiny.encode(TEXT)
    expected = importance(tiny.model, ids, by=("zero", "gradient"), name="headwise tiny").to_dict()
    command = ["importance", "--by", "zero, gradient", "--file", str(tmp_path / "notes.txt")]
    data = json.loads(runner.invoke(cli.app, [*command, "--json"]).stdout)
    assert {**data, "seconds": 0} == {**json.loads(json.dumps(expected)), "seconds": 0}
    shown = runner.invoke(cli.app, command, terminal_width=200).stdout
    rows = re.findall(r"│ +(\d) │ +(\d) │ +[\d.]+ │ +(-?[\d.]+) │", shown)
    assert len(rows) == 32 and [float(row[2]) for row in rows] == sorted((float(row[2]) for row in rows), reverse=True)


def test_circuits_are_what_the_function_gives(tiny: Any) -> None:
    ids, _ = tiny.encode(TEXT)
    expected = circuits(tiny.model, ids, name="headwise tiny")
    done = runner.invoke(cli.app, ["circuits", "--text", TEXT, "--json"])
    assert json.loads(done.stdout) == json.loads(expected.to_json())
    shown = runner.invoke(cli.app, ["circuits", "--text", TEXT], terminal_width=200).stdout
    one = next(one for one in expected.compositions if one.kind == "k")
    row = rf"keys +│ +{one.reader[0]}\.{one.reader[1]} │ +{one.writer[0]}\.{one.writer[1]} │ {one.value:.3f} │"
    assert re.search(row, shown), shown
    assert len(re.findall(r"│ +\d │ +\d │ +[\d.]+ │ +-?[\d.]+ │", shown)) == 32


def test_a_mask_token_is_for_encoders_alone(tiny: Any) -> None:
    assert tiny.kind == "decoder" and tiny.mask_id is None
    import dataclasses

    assert dataclasses.replace(tiny, kind="encoder").mask_id == tiny.tokenizer.mask_token_id
    assert tiny.decode(int(tiny.encode("cat")[0][0, -1])) in "cat"


def test_the_example_in_each_help_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(TEXT)
    for command in ("importance", "ablate", "circuits"):
        shown = runner.invoke(cli.app, [command, "--help"], terminal_width=200).stdout
        example = re.search(r"Example: headwise (.*)", shown)
        assert example is not None
        assert runner.invoke(cli.app, shlex.split(example[1].strip(" │"))).exit_code == 0, example[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("ablate --heads 2", "--heads takes layer.head with commas, such as 3.1,2.4; got '2'"),
        ("ablate --heads 1.2,", "--heads takes layer.head with commas, such as 3.1,2.4; got '1.2,'"),
        ("ablate --heads 1.-2", "--heads takes layer.head with commas, such as 3.1,2.4; got '1.-2'"),
        ("ablate --heads 1.²", "--heads takes layer.head with commas"),
        ("ablate --heads 1.8", "heads of layer 1 are 0 to 7; got head 1.8"),
        ("ablate --heads 4.0", "layers of this model are 0 to 3; got head 4.0"),
        ("ablate --heads 1.2,1.2", "--heads names each head once; got '1.2,1.2'"),
        ("ablate --heads 1.2 --by half", "--by takes zero or mean; got 'half'"),
        ("ablate --heads 1.2 --text ''", "the text is empty"),
        ("importance --by zero,half", "--by takes gradient, zero, mean, contribution, with commas; got 'zero,half'"),
        ("importance --by zero,mean,zero", "--by names each criterion once; got 'zero,mean,zero'"),
        ("ablate", "Missing option '--heads'"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.app(shlex.split(arguments))
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and text in err and err.count("\n") == 1
