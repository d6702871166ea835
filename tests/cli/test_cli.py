"""The command line: what it prints where, and one line with exit code 2 for whatever a user gets wrong."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CliRunner
from hostile import PAYLOADS
from looks import make_look

import headwise
from headwise import cli, hf, models
from headwise.ops.native import library

pytestmark = pytest.mark.unchecked  # Typer hands its commands a context of another class than it has them annotate
runner = CliRunner()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(headwise.__file__).parent.parent), "OMP_NUM_THREADS": "1"}


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "headwise", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **{"env": ENVIRONMENT, **options})


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command silences other libraries for good, as it may in its own process; here others follow."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


@pytest.fixture
def tiny() -> Path:
    try:
        return models.tiny_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command without the model: the look is made by hand."""
    look = make_look(layers=2, heads=3, model="\x1b[31mred\x1b[0m [bold]not bold[/bold]")
    monkeypatch.setattr(cli.look, "look_at", lambda *_: look)
    return look


# --- what works -----------------------------------------------------------------------------------------------------


def test_look_at_the_packaged_model(tiny: Path, here: Path) -> None:
    result = runner.invoke(cli.app, ["look"])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "4 layers x 8 heads" in result.stdout
    assert "previous-token" in result.stdout and "induction" in result.stdout
    assert re.search(r"headwise-report\.html \(\d+ kB\): open it in a browser", result.stdout)
    assert 100_000 < (here / "headwise-report.html").stat().st_size < 1_000_000
    assert [path.name for path in here.iterdir()] == ["headwise-report.html"]


def test_json_is_all_there_is_on_stdout(tiny: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "text.txt").write_bytes("\ufeffna\u00efve \u65e5\u672c \U0001f642, again na\u00efve".encode())
    result = runner.invoke(cli.app, ["look", str(tiny), "--file", "text.txt", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert capfd.readouterr() == ("", ""), "nor does anything else write, past Python's streams"
    report = json.loads(result.stdout)
    assert report["num_layers"] * report["num_heads"] == len(report["heads"]) == 32
    text = "".join(report["tokens"]).replace("\ufffd", "").removeprefix("<s>")
    assert text == "na\u00efve \u65e5\u672c \U0001f642, again na\u00efve"
    assert not list(here.glob("*.html"))


def test_json_and_out_give_both(looked: Any, here: Path) -> None:
    result = runner.invoke(cli.app, ["look", "--json", "--out", "r.html"])
    assert result.exit_code == 0, (result.exception, result.stderr)
    assert json.loads(result.stdout)["model"] == looked.model
    assert (here / "r.html").exists()


def test_the_table_cannot_steer_the_terminal(looked: Any, here: Path) -> None:
    result = runner.invoke(cli.app, ["look", "--out", "r\u202e.html"])
    assert result.exit_code == 0
    assert "\\x1b[31mred\\x1b[0m [bold]not bold[/bold]" in result.stdout
    assert "\x1b" not in result.stdout and "\u202e" not in result.stdout


def test_a_narrow_terminal_leaves_out_columns_and_breaks_no_word(
    looked: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width, gone in (
        (140, ""),
        (80, "no room for next, self, dup"),
        (60, "no room for next, self, dup, delim, largest, distance"),
    ):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = runner.invoke(cli.app, ["look", "--out", "x.json"]).stdout
        lines = [line for line in shown.splitlines() if " layers x " not in line and "no room" not in line]
        assert max(map(len, lines)) <= width  # titles and captions are not wrapped in a pipe
        assert re.sub(" +", " ", gone) in re.sub(" +", " ", shown) and bool(gone) is ("no room" in shown), (
            width,
            shown,
        )
        assert all(str(score) in shown for head in looked.heads for score in head.roles), (width, shown)


def test_text_from_stdin(looked: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cli.look, "look_at", lambda model, text, *_: (seen.append(text), looked)[1])
    assert runner.invoke(cli.app, ["look", "--file", "-"], input="from a pipe").exit_code == 0
    assert seen == ["from a pipe"]


def test_trace_prints_the_shapes_a_learner_expects() -> None:
    result = runner.invoke(cli.app, ["trace", "--d-model", "512", "--num-heads", "4", "--batch", "4"])
    assert result.exit_code == 0, result.output
    shapes = ["[4, 16, 512]", "[4, 16, 4, 128]", "[4, 4, 16, 128]", "[4, 4, 16, 16]"]
    places = [result.stdout.index(shape) for shape in shapes]
    assert places == sorted(places)
    assert f"{4 * 512**2:,}" in result.stdout


def test_trace_of_a_config(tmp_path: Path) -> None:
    config: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "has no model_type" in refused("trace", "--config", str(tmp_path))
    config |= {"model_type": "llama", "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = runner.invoke(cli.app, ["trace", "--config", str(tmp_path), "--length", "7", "--json"])
    assert result.exit_code == 0, result.output
    shapes = {stage["name"]: stage["shape"] for stage in json.loads(result.stdout)["stages"]}
    assert (shapes["q_heads"], shapes["k_heads"]) == ([1, 6, 7, 5], [1, 2, 7, 5])


def test_trace_of_a_card() -> None:
    """--config takes the names that `headwise plan` takes."""
    result = runner.invoke(cli.app, ["trace", "--config", "llama-3-8b", "--length", "7", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["parameter_count"] == 2 * 4096 * (4096 + 8 * 128)
    assert "'deepseek-v3': latent attention cannot be described" in refused("trace", "--config", "deepseek-v3")


def test_version_and_help() -> None:
    leaves = runner.invoke(cli.app, ["--version", "plan", "gpt2"])  # it prints the versions, and exits
    assert leaves.exit_code == 0 and leaves.stdout == runner.invoke(cli.app, ["--version"]).stdout
    for arguments in ([], ["--help"]):
        result = runner.invoke(cli.app, arguments)
        assert result.exit_code == 0
        assert "look" in result.stdout and "trace" in result.stdout and "Example:" in result.stdout
    for command in ("look", "trace", "prune"):
        help_text = runner.invoke(cli.app, [command, "--help"]).stdout
        assert "Example: headwise" in help_text and "<str>" in help_text and "bool" not in help_text


def test_version() -> None:
    """Backend, instruction set and versions."""
    versions = dict(line.split(maxsplit=1) for line in runner.invoke(cli.app, ["--version"]).stdout.splitlines())
    assert versions["headwise"] == headwise.__version__ and versions["torch"].startswith(f"{torch.__version__}, ")
    assert versions["numpy"] == importlib.metadata.version("numpy") and versions["python"] == platform.python_version()
    trouble = library.error_for()
    if trouble:
        assert versions["backend"] == f"sdpa; not native: {trouble}"
    else:
        used, *others = re.split(r" \(this CPU also runs |, |\)$", versions["backend"].removeprefix("native, "))
        assert used == torch.ops.headwise.isa() and sorted([used, *filter(None, others)]) == sorted(library.isas())


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; from headwise.cli import app; app(['look', '--help'], standalone_mode=False); "
    code += "print([name for name in ('torch', 'transformers', 'jinja2', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_example_in_each_help_runs(looked: Any, tiny: Path, here: Path) -> None:
    """Parsed and run up to the model; the files they name are made here."""
    (here / "notes.txt").write_text("some notes")
    for command in ([], ["look"], ["trace"]):
        shown = runner.invoke(cli.app, [*command, "--help"], terminal_width=200).stdout
        example = re.search(r"Example: headwise (.*)", shown)
        assert example is not None
        import shlex

        line = example[1].strip(" │").replace("path/to/checkpoint", str(tiny))
        assert runner.invoke(cli.app, shlex.split(line)).exit_code == 0, line


@pytest.mark.slow
def test_the_default_text_is_cut_to_the_model_and_a_user_s_own_is_not(
    tiny: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has 129 tokens, and a model of 128 places is common."""
    loaded = dataclasses.replace(hf.load(tiny), max_positions=17, name="a\x1bb")
    monkeypatch.setattr(hf, "load", lambda *_, **options: loaded)
    for command in ("look", "circuits", "importance"):
        result = runner.invoke(cli.app, [command, "small", "--json"])
        assert result.exit_code == 0, (command, result.stderr)
        assert json.loads(result.stdout)
        cut, *others = result.stderr.splitlines()
        assert cut == (
            "headwise: note: a\\x1bb supports 17 tokens, so the default text is cut (39 of 405 characters); "
            "--text or --file replaces it"
        )
        unstable = ["headwise: warning: the ranking by gradient is unstable"] if command == "importance" else []
        assert [line.split(" (")[0] for line in others] == unstable
        assert "tokens, and the model takes 17; give a shorter text" in refused(
            command, "small", "--text", models.default_text() + " "
        )
    loaded = dataclasses.replace(loaded, max_positions=1)
    assert "tokens, and the model takes 1; give a shorter text" in refused("look", "small")


# --- what is wrong --------------------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    """Runs the command, holds what every refusal must keep, and returns its one line."""
    result = runner.invoke(cli.app, list(arguments))
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("headwise: ") and "Traceback" not in lines[0]
    assert lines[0].isprintable()
    return lines[0]


def checkpoint(folder: Path, model_type: str, weights: str) -> Path:
    folder.mkdir()
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 11}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "intermediate_size": 5, **sizes}))
    (folder / weights).write_bytes(b"\x80\x04K\x01.")
    return folder


def test_a_model_that_cannot_be_looked_at(here: Path) -> None:
    assert "no such folder" in refused("look", "./nowhere", "--text", "a")
    assert "no such folder" in refused("look", "\x1b[2J", "--text", "a")
    (here / "empty").mkdir()
    assert "config.json" in refused("look", "empty", "--text", "a")
    assert "safetensors" in refused(
        "look", str(checkpoint(here / "pickled", "llama", "pytorch_model.bin")), "--text", "a"
    )
    assert "bloom" in refused("look", str(checkpoint(here / "bloom", "bloom", "model.safetensors")), "--text", "a")
    assert not list(here.glob("*.html"))


def test_a_text_that_cannot_be_looked_at(here: Path, tiny: Path) -> None:
    assert "empty" in refused("look", "--text", " \n")
    assert "not both" in refused("look", "--text", "a", "--file", "b")
    assert "512" in refused("look", "--text", "word " * 3000)
    assert "cannot be read" in refused("look", "--file", "none.txt")
    assert "cannot be read" in refused("look", "--file", ".")
    for name, content, reason in (
        ("binary", b"\xff\xfe\x00\x01", "not UTF-8 text (byte 0)"),
        ("nul", b"abc\0def", "NUL bytes"),
        ("nothing", b"", "empty"),
        ("bom", b"\xef\xbb\xbf", "empty"),
    ):
        (here / name).write_bytes(content)
        assert reason in refused("look", "--file", name)
    assert "not UTF-8 text (byte 1); convert it first" in refused("look", "--text", "a\udcff")
    assert "half of a surrogate pair" in refused("look", "--text", "a\ud800\udcff")
    assert "half of a surrogate pair" in refused("look", "--text", "a\ud800")
    pair = ("--text", "a b", "--answer", "a\udcff", "--wrong", "b")
    assert "--answer: not UTF-8 text (byte 1); convert it first" in refused("attribute", *pair)
    assert not list(here.glob("*.html"))


def test_a_file_too_large_is_not_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.options.texts, "MAX_FILE", 1_000_000)
    (here / "large").write_bytes(b"a" * 1_000_001)
    assert "more than 1 MB" in refused("look", "--file", "large")


def test_a_place_that_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before the work: no model is read, nothing is planned."""
    for module, name in ((cli.look, "look_at"), (headwise.plan, "of")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("the work was done first"))
    assert "its folder does not exist" in refused("look", "--out", "none/r.html")
    assert "it is a folder" in refused("look", "--out", ".")
    assert "not a regular file" in refused("look", "--out", os.devnull)
    assert "not a regular file" in refused("plan", "gpt2", "--svg", "/dev/full")
    assert "it is a folder" in refused("plan", "gpt2", "--svg", ".")
    assert "its folder does not exist" in refused("look", "--json", "--out", "none/r.html")


def test_options_that_make_no_sense(tiny: Path, here: Path) -> None:
    assert "'cuda:99'" in refused("look", "--device", "cuda:99")
    assert "'nonsense'" in refused("look", "--device", "nonsense")
    assert "'meta' cannot be used here (it holds shapes, and no numbers" in refused("look", "--device", "meta")
    assert "cannot be used here" in refused("look", "--device", "\udcff")
    assert "'int8'" in refused("look", "--dtype", "int8")
    assert "--nonsense" in refused("look", "--nonsense")
    assert "argument" in refused("look", "a", "b")
    assert "'polish'" in refused("polish")
    assert "--text" in refused("look", "--text")
    assert "or --d-model and --num-heads, or --config" in refused("trace")
    assert "--config gives all sizes" in refused("trace", "--config", "x", "--d-model", "3")
    assert "--d-model must be a multiple of --num-heads" in refused("trace", "--d-model", "7", "--num-heads", "2")
    line = refused("trace", "--d-model", "seven", "--num-heads", "2")
    assert "'--d-model'" in line and "'seven'" in line
    assert len(refused("plan", "gpt2", "--batch", "x" * 5000)) < 200
    assert refused("plan") == "headwise: give a config, or --list to see the cards"
    assert "'none': no such file or folder, no card" in refused("trace", "--config", "none")
    assert "batch" in refused("trace", "--d-model", "6", "--num-heads", "2", "--batch", "0")
    sizes = ("--d-model", "9000000000000000000", "--num-heads", "1")
    assert "--d-model is at most 1,000,000,000,000,000; got a larger number" in refused("trace", *sizes)


@pytest.mark.parametrize("command", ["look", "importance", "circuits", "plan", "prune", "regroup", "distill"])
def test_an_empty_name_is_not_the_folder_one_stands_in(command: str, tiny: Path, here: Path) -> None:
    """As a shell gives of a variable that is not set; a Path would make "." of it, which here holds a model."""
    for file in tiny.iterdir():
        shutil.copy(file, here)
    (here / "text.txt").write_text("a b c d e f g h " * 99)
    more = {"prune": "--keep-fraction 0.5 --by random", "regroup": "--kv-heads 4", "plan": ""}
    more |= {"distill": f"--teacher {tiny} --steps 1 --file text.txt"}
    options = more.get(command, "--text abc").split()
    out = ["--out", "new"] if command in ("prune", "regroup", "distill") else []
    line = refused(command, "", *options, *out)
    assert re.search("^headwise: the (model|config|checkpoint)'s name is empty; give", line)
    assert "the config's name is empty; give a config.json" in refused("trace", "--config", "")
    if out:
        line = refused(command, str(tiny), *options, "--out", "")
        assert "--out: the name is empty; give the folder to write" in line
    elif command in ("look", "plan"):
        option = "--out" if command == "look" else "--svg"
        named = [] if command == "look" else ["gpt2"]
        assert f"{option}: the name is empty; give a file" in refused(command, *named, option, "")


@pytest.mark.sweep
@pytest.mark.parametrize("payload", PAYLOADS[::5])
def test_hostile_arguments_are_told_harmlessly(payload: str, here: Path) -> None:
    refused("look", "--out", f"none/{payload}/r.html")
    refused("look", "--file", f"none/{payload}")
    refused(f"--{payload or 'x'}")
    refused("trace", "--config", f"none/{payload}")


def test_an_interrupt_that_python_wraps_is_one() -> None:
    """In the making of a class, while a library is imported, it comes out as the cause of a RuntimeError."""
    error = RuntimeError("Error calling __set_name__ on 'Field' instance")
    error.__cause__ = KeyboardInterrupt()
    assert cli.errors.message_of(error) == ("interrupted", cli.errors.INTERRUPTED)
    assert cli.errors.message_of(RuntimeError("x"))[1] == cli.errors.DEFECT
