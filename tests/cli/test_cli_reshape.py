"""`headwise prune`: what they print where, and one line with exit code 2 for what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import CliRunner
from hf_folders import answer_here, tokenizer
from reshape_models import FAMILIES, saved

from headwise import cli, hf, models

pytestmark = pytest.mark.unchecked
runner = CliRunner()


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The commands silence other libraries for good, as they may in a process of their own; here others follow."""
    from transformers.utils import logging

    def answer(self: hf.Checkpoint, folder: Path, request: Any, *, compare: bool = True) -> dict[str, Any]:
        source = {"config": dict(self.config), "weights": [str(self.folder / "model.safetensors")]} if compare else None
        return answer_here(folder, source, request)

    monkeypatch.setattr(hf.Checkpoint, "prove", answer)  # in this process, which has the libraries loaded
    level = logging.get_verbosity()
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def tiny() -> str:
    try:
        return str(models.tiny_path())
    except FileNotFoundError as error:
        pytest.skip(str(error))


def ran(*arguments: str, unstable: bool = False) -> str:
    """The command's output; of a ranking by gradient on a short text, one line of warning beside it."""
    result = runner.invoke(cli.app, list(arguments))
    assert result.exit_code == 0, (result.stderr, result.exception)
    warnings = [line.split(" (")[0] for line in result.stderr.splitlines()]
    assert warnings == ["headwise: warning: the ranking by gradient is unstable"] * unstable, result.stderr
    return result.stdout


def refused(*arguments: str) -> str:
    result = runner.invoke(cli.app, list(arguments))
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("headwise: ") and line.isprintable() and "Traceback" not in line
    return line.removeprefix("headwise: ")


def test_prune_by_importance_writes_a_folder_and_tells(tiny: str, tmp_path: Path) -> None:
    words = ["--text", "The cat sat on the mat. " * 9]
    text = ran("prune", tiny, "--keep-fraction", "0.5", *words, "--out", str(tmp_path / "new"))
    assert "16 of 32 heads are removed." in text
    assert "0.5 of 8 (num_attention_heads) is 4; 4 stay in each layer" in text
    assert "perplexity" in text and "RESHAPE.md in it has the details" in text
    with hf.checkpoint(tmp_path / "new") as opened:
        assert opened.config["num_attention_heads"] == 4
    report = (tmp_path / "new" / "RESHAPE.md").read_text()
    assert "loss (nats/token)" in report and "switched off" in report
    assert "before against after: " in report.partition("## What the heads do")[2]
    # the same again, bit by bit
    ran("prune", tiny, "--keep-fraction", "0.5", *words, "--out", str(tmp_path / "again"), "--no-verify")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("new", "again"))
    assert one == other


def test_json_is_one_object_with_the_facts_and_the_proof(tiny: str, tmp_path: Path) -> None:
    out = str(tmp_path / "new")
    facts = json.loads(
        ran("prune", tiny, "--heads", "0.1,1.2,2.3,3.4", "--text", "the cat sat " * 9, "--out", out, "--json")
    )
    assert facts["out"] == out and facts["model_type"] == ["llama", "mistral"]
    assert facts["gone"] == {"0": [1], "1": [2], "2": [3], "3": [4]}
    assert facts["proof"]["difference"] <= 1e-5 * max(1.0, facts["proof"]["largest"])
    assert facts["proof"]["parameters"][1] == facts["plan"][1]["parameters"]
    assert facts["proof"]["loss"][0] > 0
    assert facts["roles"]["gone"] == [[0, 1], [1, 2], [2, 3], [3, 4]] and len(facts["roles"]["heads"]) == 28


@pytest.mark.parametrize("by", ["importance", "ablation", "redundancy", "random"])
def test_a_dry_run_tells_and_writes_nothing(tiny: str, tmp_path: Path, by: str) -> None:
    before = sorted(tmp_path.iterdir())
    arguments = ["prune", tiny, "--keep-fraction", "0.75", "--by", by, "--text", "The cat sat on the mat. " * 4]
    facts = json.loads(ran(*arguments, "--dry-run", "--json", unstable=by == "importance"))
    assert [len(heads) for heads in facts["gone"].values()] == [2] * 4 and "proof" not in facts and facts["out"] is None
    assert facts["plan"][0]["parameters"] > facts["plan"][1]["parameters"]
    assert sorted(tmp_path.iterdir()) == before


def test_random_heads_are_the_seeds(tiny: str) -> None:
    gone = [
        json.loads(
            ran("prune", tiny, "--keep-fraction", "0.5", "--by", "random", "--seed", seed, "--dry-run", "--json")
        )
        for seed in ("1", "1", "2")
    ]
    assert gone[0] == gone[1] != gone[2]


@pytest.mark.slow
def test_a_corpus_is_read_in_rows_to_a_limit(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "The cat sat."}\n' + json.dumps("So did the dog. " * 90) + "\n")
    (tmp_path / "b.txt").write_text("a")
    with hf.checkpoint(tiny):
        loaded = hf.load(tiny)
    rows = cli.options.reshape.rows_of(hf, loaded, cli.options.reshape.texts_of(None, None, str(tmp_path)))
    lengths = [len(row) for row in rows]  # of the short text, of the long one; that of one word is left out
    assert 4 <= lengths[0] < 10 and lengths[1:-1] == [256] * (len(rows) - 2) and len(rows) > 3
    many = cli.options.reshape.rows_of(hf, loaded, iter(["So did the dog. " * 5000] * 99))
    assert 65_000 < sum(map(len, many)) <= 65_536
    wish = ["--keep-fraction", "0.5", "--corpus", str(tmp_path), "--dry-run", "--json"]
    facts = json.loads(ran("prune", tiny, *wish, unstable=True))
    assert len(facts["gone"]) == 4


def test_reconstruction_is_measured_on_text_that_nothing_was_fitted_to(tmp_path: Path) -> None:
    source = saved(FAMILIES["llama odd"], tmp_path / "source")
    (source / "tokenizer.json").write_text(tokenizer())
    arguments = [
        "prune",
        str(source),
        "--heads",
        "0.1,1.2",
        "--text",
        "a b, c. d! e? f: g; h\n i\n" * 20,
        "--reconstruct",
    ]
    losses = json.loads(ran(*arguments, "--dry-run", "--json"))["losses"]
    assert losses.keys() == {"original", "pruned", "recovered", "tokens"} and losses["pruned"] != losses["recovered"]


def test_heads_that_are_named_are_ranked_by_nothing(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    monkeypatch.setattr(cli.output.Progress, "__call__", lambda self, what, total=None: steps.append(what))
    ran("prune", tiny, "--heads", "0.1,1.2,2.3,3.4", "--text", "the cat sat " * 9, "--dry-run")
    assert "reading the model" in steps and not [step for step in steps if "ranking" in str(step)]


def test_named_heads_and_the_worst_by_score(tiny: str) -> None:
    text = ran("prune", tiny, "--heads", "2.5", "--by", "random", "--dry-run")
    assert "more heads that go, the worst by score, so that one number counts all layers: 0." in text


def test_a_budget_counts_the_cache_of_a_context(tiny: str) -> None:
    facts = json.loads(
        ran("prune", tiny, "--budget-mb", "40", "--context", "8192", "--by", "random", "--dry-run", "--json")
    )
    assert facts["context"] == 8192 and facts["counts"]["num_attention_heads"][1] < 8
    assert "40 MB allow" in facts["notes"][1]


def test_zeroed_heads_say_so_everywhere(tiny: str, tmp_path: Path) -> None:
    text = ran("prune", tiny, "--heads", "0.1,0.2", "--zero", "--out", str(tmp_path / "new"))
    assert "as large and as slow" in text and "heads zeroed" in text
    for name in ("README.md", "RESHAPE.md"):
        assert "as large and as slow" in (tmp_path / "new" / name).read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--heads", "0.1"], "give --out, the folder to write, or --dry-run"),
        (["--heads", "0.1", "--out", "."], "--out .: already exists"),
        (["--dry-run"], "give one of --heads, --keep-fraction and --budget-mb"),
        (["--heads", "0.1", "--keep-fraction", "0.5", "--dry-run"], "give one of --heads"),
        (["--heads", "0.1", "--context", "9", "--dry-run"], "--context is for --budget-mb"),
        (
            ["--keep-fraction", "0.5", "--by", "luck", "--dry-run"],
            "--by is importance, ablation, redundancy or random; got",
        ),
        (
            ["--keep-fraction", "0.5", "--by", "random", "--text", "a b c", "--reconstruct", "--dry-run"],
            "tokens are one row of 256; give a",
        ),
        (["--heads", "0.1", "--reconstruct", "--dry-run"], "--reconstruct needs a text; give --file"),
        (["--heads", "x", "--dry-run"], "heads are LAYER.HEAD with commas between"),
        (["--heads", "0.8", "--dry-run"], "layer 0 has the heads 0 to 7; got 8"),
        (["--heads", "0.1", "--dry-run"], "layer 1 must lose 1 more, layer 2 must lose 1 more"),
        (["--keep-fraction", "2", "--by", "random", "--dry-run"], "above 0 and at most 1; got 2.0"),
        (["--keep-fraction", "0.5", "--text", "a", "--dry-run"], "the text has fewer than 4 tokens"),
        (
            ["--keep-fraction", "0.5", "--text", "a", "--corpus", ".", "--dry-run"],
            "give one of --text, --file and --corpus",
        ),
        (["--keep-fraction", "0.5", "--corpus", "/nowhere", "--dry-run"], "/nowhere"),
        (["--keep-fraction", "0.5", "--file", "/nowhere", "--dry-run"], "--file /nowhere: cannot be read"),
        (["--budget-mb", "0.1", "--by", "random", "--dry-run"], "a budget of 0.1 MB (1,000,000 bytes each) is below"),
        (["--budget-mb", "-1", "--by", "random", "--dry-run"], "a budget is a number of megabytes above 0"),
    ],
)
def test_what_is_wrong_ends_in_one_line(tiny: str, arguments: list[str], text: str) -> None:
    assert text in refused("prune", tiny, *arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--keep-fraction", "2", "--dry-run"], "above 0 and at most 1; got 2.0"),
        (["--budget-mb", "-1", "--dry-run"], "a budget is a number of megabytes above 0"),
        (["--heads", "0.8", "--by", "ablation", "--dry-run"], "layer 0 has the heads 0 to 7; got 8"),
        (["--keep-fraction", "0.5", "--out", "none/new"], "cannot write none/new: its folder does not exist"),
        pytest.param(
            ["--keep-fraction", "0.5", "--out", "/proc/new"],
            "cannot write /proc/new: no folder can be created in its folder (No such file or directory)",
            marks=pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nothing can be made"),
        ),
        (["--keep-fraction", "0.5", "--corpus", "/none", "--dry-run"], "--corpus /none: no such file or folder"),
        (
            ["--keep-fraction", "0.5", "--target", " ", "--dry-run"],
            "--target: the text is empty; give at least a few words",
        ),
        (
            ["--heads", "0.1", "--zero", "--reconstruct", "--text", "a b c", "--dry-run"],
            "--reconstruct does not change zeroed heads",
        ),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_read(
    tiny: str, arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(hf, "load", lambda *args, **_: read.append(args))
    assert text in refused("prune", tiny, *arguments)
    assert not read


@pytest.mark.parametrize("command", [["prune", "--heads", "0.0,1.0"], ["regroup", "--kv-heads", "1"]])
def test_where_nothing_can_be_written_is_told_in_our_words(command: list[str], tmp_path: Path) -> None:
    source = str(saved(FAMILIES["llama"], tmp_path / "source"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, text in (("x" * 300, "File name too long; give another path"), ("link", "already exists; give a new")):
        line = refused(command[0], source, *command[1:], "--out", str(tmp_path / name))
        assert text in line and "Errno" not in line and line.startswith(("cannot write", "--out"))
    assert sorted(os.listdir(tmp_path)) == ["link", "source"]


def test_folders_that_are_none_are_told(tmp_path: Path) -> None:
    assert "no such folder" in refused("prune", str(tmp_path / "none"), "--heads", "0.1", "--dry-run")
    source = saved(FAMILIES["gpt2"], tmp_path / "gpt2")
    assert "no class of transformers loads this: gpt2 has no field" in refused(
        "prune", str(source), "--heads", "0.1,1.1", "--dry-run"
    )
