"""`headwise regroup` and `headwise distill`: what they write and print, and one line for what a user gets wrong."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CliRunner
from hf_folders import prove_here, written
from hf_models import BY_NAME
from safetensors.torch import load_file

from headwise import cli, hf, models, reshape
from headwise.reshape.repair.distill import LossCurve
from headwise.reshape.repair.distilled_checkpoint import distill_facts, picture_of

pytestmark = pytest.mark.unchecked  # Typer hands its commands a context of another class than it has them annotate
runner = CliRunner()
TEXT = "a b, c. d! e? f: g; h\n i\n" * 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries are not silenced, and the proof is asked in this process."""

    monkeypatch.setattr(cli.options.models, "quiet", lambda command: None)
    monkeypatch.setattr("headwise.hf.loading.checkpoint.prove", prove_here)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model of four query and two key-value heads, and a text."""
    made = written(BY_NAME["Qwen2"], tmp_path_factory.mktemp("qwen"))
    (made.parent / "text.txt").write_text(TEXT)
    (made.parent / "short.txt").write_text(TEXT[:25])
    return made


def invoke(*arguments: object) -> Any:
    return runner.invoke(cli.app, [str(argument) for argument in arguments], terminal_width=200)


def test_regrouped_reconstructed_and_proved(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    command = ["regroup", folder, "--kv-heads", 1, "--file", folder.parent / "text.txt", "--reconstruct", "--out", out]
    done = invoke(*command, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["counts"]["num_key_value_heads"] == [2, 1] and facts["out"] == str(out)
    assert facts["losses"].keys() == {"original", "regrouped", "recovered", "tokens"} and all(facts["proof"]["loss"])
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 1
    assert load_file(out / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"].shape == (6, 28)
    text = (out / "RESHAPE.md").read_text()
    assert "| squared error of the attention's output | regrouped | recovered |" in text
    assert "## What the heads do" in text and "of 8 heads changed role" in text and facts["roles"]["same_text"]
    assert json.loads((out / "heads-plan.json").read_text())["layers"]["0"] == {"kv_heads": 1}
    assert sorted(os.listdir(tmp_path)) == ["new"]


def test_the_heads_plan_has_the_new_order_of_the_heads() -> None:
    """Four key-value heads with two query heads each: the first and the third share, and the second and the fourth."""
    with hf.checkpoint(models.tiny_path()) as opened:
        groups = {str(layer): [[0, 2], [1, 3], [4, 5], [6, 7]] for layer in range(4)}
        planned = reshape.plan_regroup(opened, 4, method="first", groups=groups)
        assert planned.heads_plan()["layers"]["1"] == {"keep": [0, 2, 1, 3, 4, 5, 6, 7], "kv_heads": 4}
        doubled = dataclasses.replace(planned.merges["1"], groups=((0, 2), (1, 3)))
        layer = dataclasses.replace(
            planned.family.layers[1], sizes=dataclasses.replace(planned.family.layers[1].sizes, K=4)
        )
        family = dataclasses.replace(planned.family, layers=(layer,))
        grouped = dataclasses.replace(planned, family=family, merges={"1": doubled}, num_kv_heads=2)
        assert grouped.heads_plan() == {"layers": {"1": {"keep": [0, 1, 4, 5, 2, 3, 6, 7], "kv_heads": 2}}}


def test_a_dry_run_shows_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    done = invoke("regroup", folder, "--kv-heads", 1, "--method", "mean", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "heads that share" in done.stdout and "0+1" in done.stdout and "num_key_value_heads" in done.stdout
    assert sorted(tmp_path.iterdir()) == before


def test_a_text_alone_chooses_the_groups_and_reconstructs_nothing(folder: Path) -> None:
    """The facts are those of the plan for this text; with --reconstruct, those of the reconstructed one."""
    command = ["regroup", folder, "--kv-heads", 1, "--file", folder.parent / "text.txt", "--dry-run", "--json"]
    plain, repaired = (json.loads(invoke(*command, *more).stdout) for more in ([], ["--reconstruct"]))
    loaded = hf.load(folder)
    ids = torch.tensor([loaded.tokenizer(TEXT).input_ids])
    with hf.checkpoint(folder) as source:
        planned = reshape.plan_regroup(source, 1, model=loaded.model, rows=ids.split(64, 1))
        wanted = json.loads(json.dumps(planned.facts()))
    assert plain["tables"] == wanted["tables"] and "recovered" not in str(plain)
    assert "recovered" in str(repaired)


@pytest.mark.slow
def test_distilled_and_started_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is stopped on the way: its state is there; the next start goes on, writes the folder and cleans up."""
    invoke("regroup", folder, "--kv-heads", 1, "--method", "first", "--out", tmp_path / "small", "--no-verify")
    command = ["distill", tmp_path / "small", "--teacher", folder, "--steps", 6, "--corpus", folder.parent / "text.txt"]
    command += ["--rows", 2, "--length", 9, "--lr", 0.01, "--every", 2, "--out", tmp_path / "distilled"]
    stopped = distill_facts

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.reshape.distill_facts", stop)
    assert invoke(*command).exit_code == 130
    assert sorted(os.listdir(tmp_path)) == ["distilled.distill-state", "small"]
    monkeypatch.setattr("headwise.reshape.distill_facts", stopped)
    done = invoke(*command, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert sorted(os.listdir(tmp_path)) == ["distilled", "small"]
    files = set(os.listdir(tmp_path / "distilled"))
    assert {"distill.json", "RESHAPE.md", "config.json", "model.safetensors", "tokenizer.json"} <= files
    curve = json.loads((tmp_path / "distilled" / "distill.json").read_text())
    assert len(curve["steps"]) == 6 and [point[0] for point in curve["held"]] == [0, 2, 4, 6]
    assert facts["curve"]["steps"] == curve["steps"]
    assert facts["proof"]["class"] == "Qwen2ForCausalLM" and facts["proof"]["missing"] == []
    assert "Verified: transformers" in (tmp_path / "distilled" / "RESHAPE.md").read_text()
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("small", "distilled"))
    assert old.keys() == new.keys()
    assert all(old[name].dtype == part.dtype and old[name].shape == part.shape for name, part in new.items())
    assert not torch.equal(old["model.layers.0.self_attn.q_proj.weight"], new["model.layers.0.self_attn.q_proj.weight"])


def test_the_curve_has_a_picture_where_matplotlib_is() -> None:
    pytest.importorskip("matplotlib")
    picture = picture_of(LossCurve([2.0, 1.0], [[0, 1.0, 3.0], [2, 0.5, 2.5]]))
    assert picture is not None and picture.startswith(b"\x89PNG")
    assert picture == picture_of(LossCurve([2.0, 1.0], [[0, 1.0, 3.0], [2, 0.5, 2.5]]))


def test_without_matplotlib_the_curve_is_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert picture_of(LossCurve([2.0], [])) is None


DISTILL = "distill FOLDER --teacher FOLDER --steps"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("regroup FOLDER --kv-heads 1", "give --out, the folder to write, or --dry-run"),
        ("regroup FOLDER --kv-heads 1 --out FOLDER", "already exists; give a new name"),
        ("regroup FOLDER --kv-heads 1 --reconstruct --dry-run", "--reconstruct needs a text; give"),
        (
            "regroup FOLDER --kv-heads 1 --reconstruct --file SHORT --dry-run",
            "--reconstruct fits on one part of the text and",
        ),
        ("regroup FOLDER --kv-heads 3 --dry-run", "2 key-value heads share 1, 2 in equal groups; got num_kv_heads 3"),
        ("regroup FOLDER --kv-heads 1 --method best --dry-run", "method is one of first, mean, aligned, fitted; got"),
        ("regroup FOLDER --kv-heads 1 --file TEXT --corpus TEXT --dry-run", "give one of --text, --file and --corpus"),
        ("regroup nowhere --kv-heads 1 --dry-run", "nowhere"),
        ("regroup FOLDER --kv-heads 1 --corpus gone --dry-run", "--corpus gone: no such file or folder"),
        ("regroup FOLDER --kv-heads 1 --out none/new", "cannot write none/new: its folder does not exist"),
        (f"{DISTILL} 1 --file TEXT --out none/new", "cannot write none/new: its folder does not exist"),
        (f"{DISTILL} 1 --file TEXT --out NEW --every 0", "--every is at least 1 step; got 0"),
        (f"{DISTILL} 1 --file TEXT --out NEW --text-weight -1", "--text-weight is a number of at least 0; got -1.0"),
        (f"{DISTILL} 1 --file TEXT --out NEW --text-weight nan", "--text-weight is a number of at least 0; got nan"),
        ("distill FOLDER --teacher no/such/one --steps 1 --file TEXT --out NEW", "no/such/one: no such folder"),
        (f"{DISTILL} 1 --file TEXT", "give --out, the folder"),
        (f"{DISTILL} 1 --out NEW", "give --file or --corpus, the text to train on"),
        (f"{DISTILL} 0 --corpus TEXT --out NEW", "steps is at least 1; got 0"),
        (f"{DISTILL} 1 --file gone --out NEW", "cannot be read"),
        (f"{DISTILL} 1 --corpus SHORT --out NEW --length 33", "a window is 33 tokens, and the text has"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(line: str, text: str, folder: Path, tmp_path: Path) -> None:
    names = {"FOLDER": folder, "TEXT": folder.parent / "text.txt", "NEW": tmp_path / "new"}
    names["SHORT"] = folder.parent / "short.txt"
    done = invoke(*(names.get(one, one) for one in line.split()))
    assert done.exit_code == 2, done.output
    message = done.stderr.strip()
    assert message.startswith("headwise: ") and text in message and "\n" not in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("regroup FOLDER --kv-heads 3 --file TEXT --dry-run", "2 key-value heads share 1, 2 in equal groups; got"),
        ("regroup FOLDER --kv-heads 0 --file TEXT --dry-run", "num_kv_heads is at least 1; got 0"),
        ("regroup FOLDER --kv-heads 1 --method best --file TEXT --dry-run", "method is one of first, mean, aligned"),
        (
            f"{DISTILL} 1 --corpus TEXT --out NEW --length 999",
            "--length 999: FOLDER supports 64 tokens; give at most that many",
        ),
        (f"{DISTILL} 1 --corpus TEXT --out NEW --length 1", "length is at least 2; got 1"),
        (f"{DISTILL} 1 --corpus TEXT --out NEW --rows 0", "rows is at least 1; got 0"),
        (f"{DISTILL} 1 --corpus SHORT --out NEW --length 33", "a window is 33 tokens, and the text has"),
        ("regroup FOLDER --kv-heads 1 --file TEXT --seed -1 --dry-run", "--seed is at least 0; got -1"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_read(
    line: str, text: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(hf, "load", lambda *args, **_: read.append(args))
    names = {"FOLDER": folder, "TEXT": folder.parent / "text.txt", "NEW": tmp_path / "new"}
    names["SHORT"] = folder.parent / "short.txt"
    done = invoke(*(names.get(one, one) for one in line.split()))
    assert done.exit_code == 2 and text.replace("FOLDER", str(folder)) in done.stderr, done.output
    assert not read and not list(tmp_path.iterdir())


def test_a_teacher_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    small = Path(__file__).parents[2] / "src" / "headwise" / "models" / "tiny"
    text = folder.parent / "text.txt"
    done = invoke(
        "distill", folder, "--teacher", small, "--steps", 1, "--corpus", text, "--out", tmp_path / "new", "--length", 9
    )
    assert done.exit_code == 2 and "both must be decoders with the same vocabulary" in done.stderr
