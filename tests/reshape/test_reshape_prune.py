"""prune from folder to folder: what is written, what is proved before, and what is told of it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_folders import quiet, tokenizer
from reshape_models import FAMILIES, proved, saved
from safetensors.torch import load_file

from headwise import hf, models, plan
from headwise.hf.loading import verify_process as proving
from headwise.reshape import Proof, plan_prune, prune, random_scores
from headwise.reshape.write.readme import markdown, rows
from headwise.reshape.write.verify import planned, require

IDS = tuple(range(5, 45)) * 2


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof in this process, which has the libraries loaded."""

    def answer(self: hf.Checkpoint, folder: Path, request: Any, *, compare: bool = True) -> dict[str, Any]:
        weights = [str(self.folder / "model.safetensors")]
        source = {"config": dict(self.config), "weights": weights} if compare else None
        return quiet(lambda: proving.answer({**request, "folder": str(folder), "source": source}))

    monkeypatch.setattr(hf.Checkpoint, "prove", answer)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["BertForQuestionAnswering", "BertForPreTraining", "BertLMHeadModel"])
def test_models_with_other_outputs_are_proved_too(kind: str, tmp_path: Path) -> None:
    """Starts and ends of answers, two heads at once, and an encoder that says words and keeps no cache."""
    config = FAMILIES["bert"].build().config
    quiet(lambda: getattr(transformers, kind)._from_config(config).save_pretrained(tmp_path / "source"))
    with hf.checkpoint(tmp_path / "source") as opened:
        facts = prune(opened, tmp_path / "new", heads={0: [1], 1: [0, 3]}, zero=True, proof=Proof(speed=False))
    proof = facts["proof"]
    assert (proof["class"], proof["difference"], proof["cache_bytes"]) == (kind, 0.0, [None, None])


@pytest.mark.usefixtures("here")
def test_the_folder_tells_what_was_done_and_proved(tmp_path: Path) -> None:
    source = saved(FAMILIES["llama odd"], tmp_path / "source")
    (source / "LICENSE").write_text("mine")
    (source / "tokenizer.json").write_text(tokenizer())
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    done: list[tuple[int, int]] = []
    with hf.checkpoint(source) as opened:
        facts = prune(
            opened,
            tmp_path / "new",
            heads={0: [1], 1: [3]},
            proof=Proof(IDS, speed=False),
            progress=lambda *step: done.append(step),
            remark=lambda folder: f"In the end there is {sorted(path.name for path in folder.iterdir())[0]}.",
        )
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    names = {
        "LICENSE",
        "tokenizer.json",
        "RESHAPE.md",
        "config.json",
        "generation_config.json",
        "heads-plan.json",
        "headwise-manifest.json",
        "model.safetensors",
    }
    assert {path.name for path in (tmp_path / "new").iterdir()} == names
    assert facts["gone"] == {"0": [1], "1": [3]} and facts["counts"] == {"num_attention_heads": [4, 3]}
    assert facts["model_type"] == ["llama", "mistral"]
    proof, text = facts["proof"], (tmp_path / "new" / "RESHAPE.md").read_text()
    assert proof["class"] == "MistralForCausalLM" and proof["difference"] <= 1e-5 and proof["tokens"] == 60
    assert proof["tokenizer"] is True  # of another class of model, the same ids
    assert "| 0 | 1 |\n| 1 | 3 |" in text and "as MistralForCausalLM in a fresh process" in text
    assert "Written as mistral, which computes the same: llama requires d_model to be a multiple of" in text
    assert text.endswith("\n\nIn the end there is LICENSE.\n")
    heads = json.loads((tmp_path / "new" / "heads-plan.json").read_text())
    assert heads == {"layers": {"0": {"keep": [0, 2, 3]}, "1": {"keep": [0, 1, 2]}}}
    config = json.loads((source / "config.json").read_text())
    planned = plan.of(config, context=8192, kv_dtype="fp32", heads_plan=heads).planned
    assert planned.contexts[0].cache_bytes == facts["plan"][1]["cache_bytes"]
    for what, one, other in rows(facts):
        assert f"| {what} | {one} | {other} |" in text
    assert proof["parameters"] == [counted["parameters"] for counted in facts["plan"]]
    assert done[-1][0] == done[-1][1] and json.loads(json.dumps(facts)) == facts


@pytest.mark.usefixtures("here")
def test_losses_are_those_of_the_ungated_original_and_of_the_result(tmp_path: Path) -> None:
    source = saved(FAMILIES["mistral"], tmp_path / "source")
    with hf.checkpoint(source) as opened:
        facts = prune(opened, tmp_path / "new", heads={0: [1, 2], 1: [0, 3]}, proof=Proof(IDS, speed=False))
    row = torch.tensor([IDS[:60]])  # what the model has positions for; the rest is another row
    expected = []
    for folder in (source, tmp_path / "new"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        losses = [
            (float(model(ids, labels=ids).loss.detach()), ids.shape[1] - 1) for ids in (row, torch.tensor([IDS[60:]]))
        ]
        expected.append(sum(loss * n for loss, n in losses) / sum(n for _, n in losses))
    assert facts["proof"]["loss"] == pytest.approx(expected, rel=1e-4)
    assert abs(expected[0] - expected[1]) > 1e-3
    table = {row[0]: row[1:] for row in rows(facts)}
    assert table["perplexity"] == tuple(f"{math.exp(loss):.4g}" for loss in facts["proof"]["loss"])


@pytest.mark.usefixtures("here")
def test_the_loss_of_an_encoder_is_that_of_masked_words(tmp_path: Path) -> None:
    source = saved(FAMILIES["bert"], tmp_path / "source")
    with hf.checkpoint(source) as opened:
        facts = prune(opened, tmp_path / "new", heads={0: [1]}, zero=True, proof=Proof(IDS[:40], 3, speed=False))
        assert "loss" in facts["proof"]
    model = transformers.BertForMaskedLM.from_pretrained(source).eval()
    ids, hidden = torch.tensor([IDS[:40]]), torch.arange(40) % 7 == 3
    logits = model(ids.masked_fill(hidden, 3)).logits[0, hidden]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, hidden])
    assert facts["proof"]["loss"][0] == pytest.approx(float(expected.detach()), rel=1e-4)
    readme = (tmp_path / "new" / "README.md").read_text()
    assert readme.startswith("# Zeroed heads") and "not removed: it is as large and as slow" in readme
    assert "| 0 | 1 |" in (tmp_path / "new" / "RESHAPE.md").read_text()


@pytest.mark.usefixtures("here")
def test_a_result_that_differs_is_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(FAMILIES["mistral"], tmp_path / "source")
    from headwise.reshape.pruning.pruned_checkpoint import Pruning

    monkeypatch.setattr(Pruning, "gates", lambda self: [[1, 1, 0, 0], [1, 0, 0, 1]])  # others than those that went
    with hf.checkpoint(source) as opened, pytest.raises(ValueError, match="differs from the original with those heads"):
        prune(opened, tmp_path / "new", heads={0: [1, 2], 1: [1, 2]}, proof=Proof(speed=False))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
def test_the_proof_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    source, row = tmp_path / "source", FAMILIES["mixtral"]
    quiet(lambda: row.build().to(torch.bfloat16).save_pretrained(source, max_shard_size="9KB"))
    with hf.checkpoint(source) as opened:
        assert len([name for name in opened.inputs if name.endswith(".safetensors")]) > 2
        facts = prune(opened, tmp_path / "new", keep_fraction=0.5, scores=random_scores())
        assert {entry.dtype for entry in opened.tensors.values()} == {torch.bfloat16}
    seconds = facts["proof"]["seconds"]
    assert facts["proof"]["identical"] in (True, False) and facts["proof"]["difference"] <= 1e-5
    assert all(len(seconds[what]) == 2 and min(seconds[what]) > 0 for what in ("read", "write"))


@pytest.mark.parametrize(
    ("stdout", "text"),
    [
        (b'{"error": "OSError: no\\nfile"}', "transformers does not load or run the result: OSError: no file"),
        (b"", r"the process that loads the result ended with -9 \(last words\)"),
    ],
)
def test_a_process_that_fails_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: bytes, text: str
) -> None:
    requests: list[dict[str, Any]] = []

    def run(command: list[str], *, input: bytes, **_: Any) -> Any:
        requests.append(json.loads(input))
        return subprocess.CompletedProcess(command, -9, stdout, b"first\nlast words\n")

    monkeypatch.setattr(subprocess, "run", run)
    source = saved(FAMILIES["mistral"], tmp_path / "source")
    with hf.checkpoint(source) as opened, pytest.raises(hf.ModelError, match=text):
        prune(opened, tmp_path / "new", heads=[])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert (
        requests[0]["source"]["weights"] == [str(source / "model.safetensors")]
        and requests[0]["gates"] == [[1] * 4] * 2
    )


def test_without_a_proof_the_folder_says_so(tmp_path: Path) -> None:
    source = saved(FAMILIES["mistral"], tmp_path / "source")
    with hf.checkpoint(source) as opened:
        facts = prune(opened, tmp_path / "new", heads=[], proof=None)
    assert "proof" not in facts
    assert "Not verified: nobody loaded the result." in (tmp_path / "new" / "RESHAPE.md").read_text()
    old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "new"))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


def test_speech_images_and_pairs_are_timed_on_an_input_of_theirs(tmp_path: Path) -> None:
    for family in ("whisper", "vit", "t5"):
        source = saved(FAMILIES[family], tmp_path / family)
        with hf.checkpoint(source) as opened:
            gates = plan_prune(opened, heads=[], zero=True).gates()
        proof = proved(source, source, gates, speed=True)
        assert proof["identical"] and proof["seconds"].keys() == {"read"} and proof["cache_bytes"] == [None, None]
        assert any(row[0] == "prefill, 1 input (ms)" for row in rows(FACTS | {"proof": proof}))


FACTS: dict[str, Any] = {
    "model_type": ["a", "a"],
    "counts": {},
    "weight_bytes": [1, 1],
    "plan": [None, None],
    "context": 3,
}


@pytest.mark.unchecked
def test_the_report_tells_equal_bits_from_a_small_difference() -> None:
    proof = {"class": "Some", "transformers": "5", "identical": False, "difference": 2e-6, "largest": 3.0, "tokens": 7}
    facts = FACTS | {"done": "Done", "notes": [], "gone": {}, "proof": proof}
    line = "Its outputs on 7 tokens (float32, up to 3) are those of the original with these heads switched off, "
    assert f"{line}the largest difference being 2e-06." in markdown(facts, None).decode()  # type: ignore[arg-type]
    facts["proof"] = proof | {"identical": True, "difference": 0.0}
    assert f"{line}bit for bit." in markdown(facts, None).decode()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"missing": ["a.weight"]}, "is not what Some loads: 1 missing tensors, 'a.weight' first"),
        ({"unexpected": ["a", "b"]}, "2 unexpected tensors, 'a' first"),
        ({"tokenizer": False}, "under Some transformers makes other ids of a text than before"),
        ({"difference": 2e-5, "largest": 0.5}, "differs .* by 2e-05, and 1e-05 is allowed"),
        ({"difference": 4e-5, "largest": 3.0}, "by 4e-05, and 3e-05 is allowed"),
        ({"difference": math.nan, "largest": 3.0}, "by nan"),
        ({"difference": math.nan, "largest": math.nan}, "the original's outputs .* are not finite"),
        ({"difference": math.nan, "largest": math.inf}, "the original's outputs .* are not finite"),
    ],
)
def test_what_is_no_proof_ends_the_run(fields: dict[str, Any], text: str) -> None:
    whole = {"class": "Some", "missing": [], "unexpected": []}
    require(whole | {"difference": 1e-5, "largest": 0.5, "tokenizer": True})
    require(whole | {"tokenizer": None})
    with pytest.raises(ValueError, match=text):
        require(whole | fields)


@pytest.mark.unchecked
def test_what_is_planned_is_planned_at_a_number_of_tokens() -> None:
    config = {"model_type": "gpt2"}
    assert planned(config, 9) != planned(config, 8) and planned(config, 0) == planned(config, 1)
    assert planned({"model_type": "unheard of"}, 9) is None
    for context, kind in ((-1, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(kind, match="context is"):
            planned(config, context)


def test_a_proof_has_ids() -> None:
    assert Proof((1, 2), 3).request([[1, 0]]) == {"ids": [1, 2], "mask_id": 3, "speed": True, "gates": [[1, 0]]}
    assert Proof().request(None)["ids"] is None
    with pytest.raises((TypeError, ValueError)):
        Proof(mask_id=-1)


def test_a_tokenizer_that_another_class_reads_otherwise_is_seen(tmp_path: Path) -> None:
    """Of one kind of model transformers rebuilds the tokenizer by rules of its own."""
    try:
        shutil.copy(models.tiny_path() / "tokenizer.json", tmp_path)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    kinds = [transformers.LlamaConfig(), transformers.MistralConfig(), transformers.Qwen2Config()]
    for config, same in zip(kinds, (None, True, False), strict=True):
        config.save_pretrained(tmp_path)
        assert proving._same_ids(str(tmp_path), kinds[0], config) is same
    (tmp_path / "tokenizer.json").unlink()
    assert proving._same_ids(str(tmp_path), kinds[0], kinds[1]) is None
