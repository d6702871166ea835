"""`headwise plan`: what it prints where, how light it is, and one line with exit code 2 for whatever is wrong."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import CliRunner
from hostile import PAYLOADS

import headwise
from headwise import cli, plan

pytestmark = pytest.mark.unchecked
runner = CliRunner()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(headwise.__file__).parent.parent), "PYTHONIOENCODING": "ascii"}


def ran(*arguments: str) -> str:
    result = runner.invoke(cli.app, ["plan", *arguments])
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def refused(*arguments: str) -> str:
    result = runner.invoke(cli.app, ["plan", *arguments])
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("headwise: ") and line.isprintable() and "Traceback" not in line
    return line


def test_the_table_of_one_model() -> None:
    shown = ran("llama-3-8b", "--context", "8192", "--bandwidth", "3.35TB/s", "--flops", "990TF")
    for text in (
        "GQA, 8 KV heads (4 query heads each)",
        "41,943,040",
        "131,072 B",
        "8,030,261,248",
        "W_Q",
        "limited by",
        "exact:",
    ):
        assert text in shown
    assert "at 8,192 tokens" in shown and "131,072 tokens" not in shown


def test_json_is_all_there_is_on_stdout() -> None:
    report = json.loads(ran("deepseek-v3", "--context", "4096,8k", "--batch", "3", "--kv-dtype", "fp8", "--json"))
    assert report == json.loads(
        json.dumps(plan.of("deepseek-v3", context=(4096, 8192), batch=3, kv_dtype="fp8").to_dict())
    )
    assert report["bytes_per_token"] == 70_272 // 2 and report["contexts"][1]["cache_bytes"] == 3 * 8192 * 35_136


def test_models_side_by_side() -> None:
    shown = ran("gemma-3-27b", "deepseek-v3", "gpt-oss-20b", "--context", "1000")
    assert re.search(r"gemma-3-27b +[^ ] +deepseek-v3 +[^ ] +gpt-oss-20b", shown)
    shown = ran("gpt2", "gpt-3", "--context", "1000", "--bandwidth", "1TB/s")
    assert shown.count("One decoding step at 1,000 tokens") == 2 and "gpt-3: One decoding step" in shown
    models = json.loads(ran("gpt2", "gpt-3", "--json"))
    assert [one["name"] for one in models] == ["gpt2", "gpt-3"]


def test_the_list_of_cards() -> None:
    shown = ran("--list")
    assert all(name in shown for name in plan.cards())
    known = len(plan.known()["architectures"])
    assert f"{known} architectures of configs are known: albert, apertus, " in " ".join(shown.split())
    assert json.loads(ran("--list", "--json")) == plan.known()


def test_a_heads_plan_and_the_chart(tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text('{"layers": {"*": {"kv_heads": 2}}}')
    chart = tmp_path / "chart.svg"
    shown = ran("llama-3-8b", "--heads-plan", str(tmp_path / "heads.json"), "--svg", str(chart))
    assert "What the heads plan saves" in shown and "75.0%" in shown
    assert chart.read_text("utf8").startswith("<svg ")


def test_the_numbers_as_csv(tmp_path: Path) -> None:
    """A line for each config and context, the heads plan's after its model's; the same numbers as in JSON."""
    heads, file = tmp_path / "heads.json", tmp_path / "numbers.csv"
    heads.write_text('{"layers": {"*": {"kv_heads": 1}}}')
    configs = ["gpt2", "deepseek-v3", "bert-base"]
    ran(*configs, "--context", "100,300", "--csv", str(file))
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["name"], row["context"]) for row in rows] == [(name, n) for name in configs for n in ("100", "300")]
    assert not {"decode", "packing", "floors"} & set(rows[0])  # none of them has such numbers
    for plan_of in map(plan.of, configs):
        row = next(row for row in rows if row["name"] == plan_of.name)
        assert row["parameters_total"] == str(plan_of.parameters()["total"]) and row["heads_plan"] == "False"
    latent = plan.of("deepseek-v3", context=300).contexts[0]
    assert rows[3]["cache_bytes"] == str(latent.cache_bytes) and latent.decode_expanded is not None
    assert rows[3]["decode_expanded_total"] == str(latent.decode_expanded.total)
    assert rows[0]["decode_expanded_total"] == rows[4]["decode_total"] == ""  # no latents; an encoder
    ran("gpt2", "--context", "100", "--heads-plan", str(heads), "--csv", str(file))
    with file.open(newline="") as lines:
        before, after = csv.DictReader(lines)
    assert (before["heads_plan"], after["heads_plan"]) == ("False", "True")
    assert int(before["cache_bytes"]) == 12 * int(after["cache_bytes"])


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "torch_dtype": "float32"}')
    assert "124,439,808" in ran(str(tmp_path))


def test_help_and_its_example() -> None:
    shown = runner.invoke(cli.app, ["plan", "--help"], terminal_width=200).stdout
    example = re.search(r"Example: headwise (.*)", shown)
    assert example is not None
    assert runner.invoke(cli.app, shlex.split(example[1].strip(" │"))).exit_code == 0
    assert "plan" in runner.invoke(cli.app, ["--help"]).stdout


def test_what_is_wrong_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -1}')
    (tmp_path / "mamba.json").write_text('{"model_type": "mamba"}')
    assert "hidden_size is between 1 and 1000000; got -1" in refused(str(tmp_path))
    assert "architecture 'mamba' is not known" in refused(str(tmp_path / "mamba.json"))
    assert "no such file or folder" in refused("no-such-model")
    assert "give a config, or --list" in refused()
    numbers = [[f"--{name}", "9"] for name in ("context", "batch", "tensor", "context-ranks", "bandwidth", "flops")]
    files = [[f"--{name}", f"x.{name}"] for name in ("svg", "csv")]
    for more in (["gpt2"], *numbers, *files, ["--link", "50GB/s,2us"], ["--kv-dtype", "fp8"], ["--heads-plan", "x"]):
        assert "--list shows the cards; leave out the configs, and all options but" in refused("--list", *more)
    assert "context is whole numbers" in refused("gpt2", "--context", "many")
    assert "--batch is a whole number" in refused("gpt2", "--batch", "0")
    for length in ("0", "-1"):
        assert f"--context is a whole number between 1 and 10000000000; got {length}" in refused(
            "gpt2", f"--context={length}"
        )
    assert "--kv-dtype is one of" in refused("gpt2", "--kv-dtype", "int3")
    assert "bandwidth is a number between 1 and 1e100" in refused("gpt2", "--bandwidth", "fast")
    assert "flops is a number between 1 and 1e100" in refused("gpt2", "--flops", "nan")
    assert "heads plan 'none.json': cannot be read" in refused("gpt2", "--heads-plan", "none.json")
    assert "its folder does not exist" in refused("gpt2", "--svg", "none/chart.svg")
    assert "--svg chart.png: an SVG is written; end the name in .svg" in refused("gpt2", "--svg", "chart.png")
    assert "--csv numbers.txt: a CSV is written; end the name in .csv" in refused("gpt2", "--csv", "numbers.txt")
    assert "its folder does not exist" in refused("gpt2", "--csv", "none/numbers.csv")
    assert "leave out --heads-plan, --svg and --csv" in refused("gpt2", "--link", "1GB/s,1us", "--csv", "a.csv")
    assert "an encoder keeps no cache" in refused("bert-base", "--svg", str(tmp_path / "chart.svg"))
    assert not (tmp_path / "chart.svg").exists()


@pytest.mark.sweep
@pytest.mark.parametrize("payload", PAYLOADS[::4])
def test_hostile_arguments_are_told_harmlessly(payload: str, tmp_path: Path) -> None:
    refused(f"none/{payload}")
    refused("gpt2", "--context", payload or "x")
    refused("gpt2", "--heads-plan", f"none/{payload}")


def test_it_is_light_and_knows_ascii_terminals() -> None:
    """The whole command in a process of its own: no torch, no transformers, and a table a plain terminal can show."""
    code = "import sys; from headwise.cli import app; app(['plan', 'gpt-3'], standalone_mode=False); "
    code += "print([name for name in ('torch', 'transformers', 'numpy', 'jinja2') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii() and done.stdout.splitlines()[-1] == "[]"


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    folder: Any = tmp_path / "\x1b[31mred\x1b[0m[bold]"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    shown = ran(str(folder))
    assert "\x1b" not in shown and "\\x1b[31mred\\x1b[0m[bold]" in shown
