"""`headwise importance`, `ablate` and `circuits`: what they print, and one line for what a user gets wrong."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import CliRunner

import headwise.hf as hf
from headwise import cli, models, report
from headwise.look import LogitDifference, ablate, at, attribute, circuits, importance, patch, redundancy, write

pytestmark = pytest.mark.unchecked  # Typer hands its commands a context of another class than it has them annotate
runner = CliRunner()
PATCH = "--clean 'return x' --answer x --wrong y"
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
        assert re.search(rf"{what} │ +{loss:.4f}", shown), what
    assert f"{lost.places[0].position} {tiny.decode(int(ids[0, lost.places[0].position]))!r}" in shown


def test_importance_is_what_the_function_gives(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(TEXT)
    ids, _ = tiny.encode(TEXT)
    expected = importance(tiny.model, ids, by=("zero", "gradient"), name="headwise tiny").to_dict()
    command = ["importance", "--by", "zero, gradient", "--file", str(tmp_path / "notes.txt")]
    data = json.loads(runner.invoke(cli.app, [*command, "--json"]).stdout)
    assert {**data, "seconds": 0} == {**json.loads(json.dumps(expected)), "seconds": 0}
    shown = runner.invoke(cli.app, command, terminal_width=200).stdout
    rows = re.findall(r"│ +(\d) │ +(\d) │ +[\d.]+ │ +[\d.]+ │ +(-?[\d.]+) │", shown)
    assert len(rows) == 32 and [float(row[2]) for row in rows] == sorted((float(row[2]) for row in rows), reverse=True)


@pytest.mark.slow
def test_circuits_are_what_the_function_gives(tiny: Any, tmp_path: Path) -> None:
    ids, _ = tiny.encode(TEXT)
    expected = circuits(tiny.model, ids, name="headwise tiny")
    path = tmp_path / "circuits.json"
    done = runner.invoke(cli.app, ["circuits", "--text", TEXT, "--roles", "none", "--json", "--out", str(path)])
    assert json.loads(done.stdout) == json.loads(path.read_text()) == json.loads(expected.to_json())
    shown = runner.invoke(cli.app, ["circuits", "--text", TEXT, "--roles", "none"], terminal_width=200).stdout
    one = next(one for one in expected.compositions if one.kind == "k")
    row = rf"keys +│ +{one.reader[0]}\.{one.reader[1]} │ +{one.writer[0]}\.{one.writer[1]} │ {one.value:.3f} │"
    assert re.search(row, shown), shown
    assert len(re.findall(r"│ +\d │ +\d │ +[\d.]+ │ +-?[\d.]+ │", shown)) == 32


@pytest.mark.slow
def test_circuits_name_heads_by_the_roles_of_a_look(tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ids, _ = tiny.encode(TEXT)
    look = at(tiny.model, ids, delimiters=tiny.delimiters)
    write(look, tmp_path / "look.json")
    expected = circuits(tiny.model, ids, name="headwise tiny").with_roles(look)
    command = ["circuits", "--text", TEXT]
    files = ["--roles", str(tmp_path / "look.json"), "--out", str(tmp_path / "graph.svg")]
    for more in ([], files):  # a look of its own, and one of a file
        done = runner.invoke(cli.app, [*command, *more, "--json"])
        assert done.exit_code == 0 and json.loads(done.stdout) == json.loads(expected.to_json())
    shown = runner.invoke(cli.app, [*command, *files], terminal_width=200).stdout
    one = next(one for one in expected.compositions if one.kind == "k")
    reader, writer = ("{}.{}".format(*head) for head in (one.reader, one.writer))
    row = rf"{reader} │ {expected.roles[reader]} +│ +{writer} │ {expected.roles[writer]} +│ +K │ +{one.value:.3f}"
    assert re.search(row, shown), shown
    drawn = (tmp_path / "graph.svg").read_text()
    assert reader in drawn and expected.roles[writer] in drawn and "through keys" in drawn
    page = tmp_path / "circuits.html"
    done = runner.invoke(cli.app, [*command, *files[:2], "--out", str(page)], terminal_width=200)
    assert done.exit_code == 0 and page.read_text() == report.render_circuits(expected)
    assert "circuits.html" in done.stdout and "open it in a browser" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("positions", [[], ["--positions"]])
def test_patching_is_what_the_function_gives(positions: list[str], tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    texts = ["def f(x):\n    return x", "def f(y):\n    return y"]
    answer, wrong = (tiny.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("x", "y"))
    ids = [tiny.encode(text)[0] for text in texts]
    metric = LogitDifference(answer, wrong)
    options = {"heads": [(3, 1), (2, 1)], "positions": bool(positions), "decode": tiny.decode, "name": "headwise tiny"}
    expected = patch(tiny.model, *ids, metric, **options)
    command = [
        "patch",
        "--clean",
        texts[0],
        "--corrupt",
        texts[1],
        "--answer",
        "x",
        "--wrong",
        "y",
        "--heads",
        "3.1,2.1",
    ]
    out = tmp_path / "patch.svg"
    done = runner.invoke(cli.app, [*command, *positions, "--json", "--out", str(out)])
    assert done.exit_code == 0 and json.loads(done.stdout) == json.loads(expected.to_json())
    assert out.read_text().startswith("<?xml") and "patch.svg" in done.stderr
    shown = runner.invoke(cli.app, [*command, *positions], terminal_width=200).stdout
    page = tmp_path / "patch.html"
    done = runner.invoke(cli.app, [*command, *positions, "--out", str(page)])
    assert done.exit_code == 0 and page.read_text() == report.render_effects(expected)
    best = expected.best(1)[0]
    assert "headwise tiny: logit of 'x' minus 'y'" in shown and f"{best.effect:+.3f} │" in shown


def test_redundancy_is_what_the_function_gives(tiny: Any) -> None:
    ids = tiny.encode(TEXT)[0]
    expected = redundancy(tiny.model, ids, threshold=0.37, name="headwise tiny")
    command = ["redundancy", "--text", TEXT, "--threshold", "0.37"]
    assert json.loads(runner.invoke(cli.app, [*command, "--json"]).stdout) == json.loads(expected.to_json())
    shown = runner.invoke(cli.app, command, terminal_width=200).stdout
    assert all("{}.{}".format(*head) in shown for head in expected.patterns[0])


def test_attribution_is_what_the_function_gives(tiny: Any, tmp_path: Path) -> None:
    answer, wrong = (tiny.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("x", "y"))
    ids = tiny.encode("return x")[0]
    expected = attribute(tiny.model, ids, answer, wrong, decode=tiny.decode, name="headwise tiny")
    command = ["attribute", "--text", "return x", "--answer", "x", "--wrong", "y"]
    assert json.loads(runner.invoke(cli.app, [*command, "--json"]).stdout) == json.loads(expected.to_json())
    shown = runner.invoke(cli.app, [*command, "--out", str(tmp_path / "a.html")], terminal_width=200).stdout
    assert (tmp_path / "a.html").read_text() == report.render_effects(expected)
    assert "direct logit of 'x' minus 'y'" in shown and f"together {expected.difference:+.3f}" in shown


def test_a_mask_token_is_for_encoders_alone(tiny: Any) -> None:
    assert tiny.kind == "decoder" and tiny.mask_id is None
    import dataclasses

    assert dataclasses.replace(tiny, kind="encoder").mask_id == tiny.tokenizer.mask_token_id
    assert tiny.decode(int(tiny.encode("cat")[0][0, -1])) in "cat"


@pytest.mark.slow
def test_the_example_in_each_help_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text(TEXT)
    for command in ("importance", "ablate", "circuits", "patch", "attribute", "redundancy"):
        shown = runner.invoke(cli.app, [command, "--help"], terminal_width=200).stdout
        example = re.search(r"Example: headwise (.*)", shown, re.DOTALL)
        assert example is not None
        assert runner.invoke(cli.app, shlex.split(example[1].strip(" │\n"))).exit_code == 0, example[1]


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
        ("circuits --roles nothing.json", "nothing.json"),
        ("circuits --roles ''", "--roles: the name is empty; give a look as .json, or none"),
        ("circuits --out graph.txt", "ends in none of .html .svg .png .json"),
        ("redundancy --threshold 1.7", "threshold is a distance from 0 to 1; got 1.7"),
        ("redundancy --text x", "heads are compared on one text of at least 4 tokens; got 2; give a longer text"),
        (f"patch {PATCH} --corrupt 'a b c d'", "both have as many tokens; got "),
        (f"patch {PATCH} --corrupt 'return y' --heads 2", "--heads takes layer.head with commas"),
        (f"patch {PATCH} --corrupt ' '", "--corrupt: the text is empty"),
        (f"patch {PATCH} --corrupt 'return y' --out patch.txt", "ends in none of .html .svg .png .json"),
        (f"patch {PATCH} --corrupt 'return y' --wrong 'y = 17'", "--wrong takes one token, and 'y = 17' is "),
        (f"patch {PATCH} --corrupt 'return y' --wrong ''", "--wrong: the token is empty; give one with the space"),
        (f"patch {PATCH} --corrupt 'return y' --wrong x", "are two tokens to compare; both are 'x'; change one"),
        ("attribute --text 'return x' --answer x --wrong x", "are two tokens to compare; both are 'x'; change one"),
        (f"patch {PATCH} --corrupt 'return x'", "so there is no difference to restore"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.app(shlex.split(arguments))
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and text in err and err.count("\n") == 1
