"""Encoders with their own number of heads in each layer: what `prune` writes, and the classes that load it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
import transformers
from command_line import CliRunner
from draw import slow_except
from hf_folders import prove_here, quiet, written
from hf_models import Row
from reshape_models import FAMILIES, put

import headwise
from headwise import cli, hf, look, reshape
from headwise.hf.models import heads_by_layer
from headwise.plan.config.fields import architectures
from headwise.plan.model.heads_by_layer import NOTE

ENCODERS = [name for name, about in architectures().items() if about.get("heads_by_layer")]
HEADS = ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"]
UNEVEN = {0: [0, 3], 1: [2]}
LEFT = [2, 3]
IDS = torch.tensor([[5, 7, 11, 13, 17, 19, 23], [2, 3, 29, 31, 37, 41, 43]])
TEXT = "a b, c. d! e? f: g; h i a b c d e f. " * 2


def row_of(name: str, model: str | None = None, **sizes: Any) -> Row:
    """A tiny model of a family, as the plain encoder or with a head."""
    row = FAMILIES[name]
    stem = row.config.removesuffix("Config")
    return replace(row, model=stem + (model or "Model"), sizes=row.sizes | sizes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Folders with a tokenizer, written once: of a family, with a head."""
    made: dict[tuple[Any, ...], Path] = {}

    def of(name: str, model: str | None = None, **sizes: Any) -> Path:
        key = (name, model, *sizes.items())
        if key not in made:
            made[key] = written(row_of(name, model, **sizes), tmp_path_factory.mktemp("source") / "model")
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "sep_token": "[SEP]"}
            (made[key] / "tokenizer_config.json").write_text(json.dumps(settings))
        return made[key]

    yield of


def pruned(source: Path, destination: Path, heads: Any = UNEVEN) -> Path:
    """The folder that `prune` writes, proved in this process."""
    with hf.checkpoint(source) as opened:
        opened.prove = lambda folder, request, **_: prove_here(  # type: ignore[method-assign]
            folder, opened.config, [source / "model.safetensors"], request
        )
        reshape.prune(opened, destination, heads=heads)
    return destination


def loaded(auto: Any, folder: Path, **options: Any) -> Any:
    model, report = quiet(lambda: auto.from_pretrained(folder, output_loading_info=True, **options))
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


def test_which_families_there_are() -> None:
    assert ENCODERS == ["bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert"]
    families = hf.layouts()["families"]
    assert all(list(families[name]["layers"]) == ["encoder"] for name in ENCODERS), "the classes cut one stack"


CLASSES = [(name, HEADS[n % 3]) for n, name in enumerate(ENCODERS)]


@pytest.mark.parametrize(("name", "head"), slow_except(CLASSES, CLASSES[:3]))
def test_auto_classes_load_it_save_it_and_load_it_again(name: str, head: str, folder: Any, tmp_path: Path) -> None:
    """Every implementation of attention gives the same numbers, and the gradient of the gated original."""
    auto = getattr(transformers, head)
    source = folder(name, head.removeprefix("AutoModel") or None)
    result = pruned(source, tmp_path / "pruned")
    model = loaded(auto, result)
    assert type(model).__name__.startswith("Headwise") and isinstance(model, auto._model_mapping[type(model.config)])
    assert model.config.heads_by_layer == LEFT and model.config.num_attention_heads == 4
    expected = model(IDS)[0]
    for attention in ("eager", "sdpa", "headwise"):
        other = loaded(auto, result, attn_implementation=attention)
        assert (other(IDS)[0] - expected).abs().max() < 1e-5 * max(1, float(expected.detach().abs().max())), attention
        _same_gradient(other, loaded(auto, source, attn_implementation="eager"), name)
    quiet(lambda: model.save_pretrained(tmp_path / "again"))
    again = loaded(auto, tmp_path / "again")
    assert again.config.heads_by_layer == LEFT and torch.equal(again(IDS)[0], expected)
    assert json.loads((tmp_path / "again" / "config.json").read_text())[NOTE].startswith("pip install 'headwise[hf]'")


def _same_gradient(model: Any, original: Any, name: str) -> None:
    """Of each kept head's query weights, where the others of the original are switched off by their columns of W_O."""
    family = reshape.repair.calibration.family_in_memory(original, hf.layouts())
    for layer in family.layers:
        output = next(key for key, form in layer.tensors.items() if "o" in form.parts() and key.endswith("weight"))
        with torch.no_grad():
            for head in UNEVEN[layer.index]:
                original.get_parameter(output)[:, head * 7 : head * 7 + 7] = 0
    weights = [next(key for key, form in layer.tensors.items() if "q" in form.parts()) for layer in family.layers]
    gradients = []
    for one in (model, original):
        output = one(IDS)[0]
        gradients.append(torch.autograd.grad(output.square().sum(), [one.get_parameter(key) for key in weights]))
    for index, (ours, theirs) in enumerate(zip(*gradients, strict=True)):
        kept = theirs.unflatten(0, (4, 7))[[head for head in range(4) if head not in UNEVEN[index]]].flatten(0, 1)
        assert kept.abs().max() > 1e-3 and (ours - kept).abs().max() < 1e-4 * kept.abs().max(), (name, index)


@pytest.mark.slow
def test_a_new_process_loads_it_with_headwise_hf_and_without_it_names_what_is_missing(
    folder: Any, tmp_path: Path
) -> None:
    result = pruned(folder("bert", "ForSequenceClassification"), tmp_path / "pruned")
    expected = loaded(transformers.AutoModelForSequenceClassification, result)(IDS).logits
    code = """
import sys, torch, transformers
transformers.utils.logging.disable_progress_bar()
try:
    transformers.AutoModel.from_pretrained(sys.argv[1])
except ValueError as error:
    print(str(error).splitlines()[0])
import headwise.hf
model = transformers.AutoModelForSequenceClassification.from_pretrained(sys.argv[1])
print(model(torch.tensor(eval(sys.argv[2]))).logits.tolist())
print(type(transformers.AutoTokenizer.from_pretrained(sys.argv[1])).__name__)
"""
    done = fresh.run(code, str(result), str(IDS.tolist()), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    refusal, logits, tokenizer = done.stdout.splitlines()
    assert "model type `headwise_bert`" in refusal
    assert (torch.tensor(json.loads(logits)) - expected).abs().max() < 1e-6
    source = transformers.AutoTokenizer.from_pretrained(folder("bert", "ForSequenceClassification"))
    assert tokenizer == type(source).__name__
    assert "import headwise.hf" in json.loads((result / "config.json").read_text())[NOTE]
    assert "import headwise.hf" in (result / "README.md").read_text()


@pytest.mark.slow
def test_the_proof_runs_in_a_fresh_process(folder: Any, tmp_path: Path) -> None:
    with hf.checkpoint(folder("distilbert")) as opened:
        facts = reshape.prune(opened, tmp_path / "pruned", heads=UNEVEN, proof=reshape.Proof(speed=False))
    assert facts["counts"] == {"heads_by_layer": [[4, 4], LEFT]}
    assert facts["model_type"] == ["distilbert", "headwise_distilbert"]
    assert facts["proof"]["class"] == "HeadwiseDistilBertModel"
    text = (tmp_path / "pruned" / "RESHAPE.md").read_text()
    assert "as HeadwiseDistilBertModel, which headwise.hf registers, in a fresh process" in text
    assert "| heads_by_layer | [4, 4] | [2, 3] |" in text and "`import headwise.hf` before from_pretrained" in text


def test_what_was_pruned_is_pruned_again_read_planned_and_looked_at(folder: Any, tmp_path: Path) -> None:
    first = pruned(folder("bert"), tmp_path / "first")
    second = pruned(first, tmp_path / "second", {0: [1], 1: [0, 2]})  # of what is left: 1 2, and 0 1 3
    at_once = pruned(folder("bert"), tmp_path / "once", {0: [0, 2, 3], 1: [0, 2, 3]})
    model = loaded(transformers.AutoModel, second)
    assert model.config.heads_by_layer == [1, 1]
    assert torch.equal(model(IDS)[0], loaded(transformers.AutoModel, at_once)(IDS)[0])
    plan = headwise.plan.of(str(first))
    assert plan.parameters()["total"] == sum(p.numel() for p in loaded(transformers.AutoModel, first).parameters())
    assert [layer.num_heads for layer in plan.model.layers] == LEFT and plan.exact
    read = hf.load(first)
    assert read.kind == "encoder" and type(read.model).__name__ == "HeadwiseBertModel"
    record = look.at(read.model, IDS[0].tolist())
    assert [sum(head.layer == layer for head in record.heads) for layer in range(2)] == LEFT
    with hf.checkpoint(first) as opened, pytest.raises(ValueError, match="layer 0 would lose all its 2 heads; leave"):
        reshape.plan_prune(opened, heads="0.0,0.1")
    with hf.checkpoint(first) as opened:
        plan_zero = reshape.plan_prune(opened, heads="0.0,0.1", zero=True)
        assert plan_zero.target.config == opened.config
        half = reshape.plan_prune(opened, keep_fraction=0.5, scores=reshape.random_scores())
        assert half.target.config["heads_by_layer"] == [1, 2]
        with pytest.raises(ValueError, match="has no field for a number of key-value heads"):
            reshape.plan_regroup(opened, num_kv_heads=1)


def test_a_fraction_and_a_budget_take_as_many_heads_of_each_layer(folder: Any) -> None:
    with hf.checkpoint(folder("bert")) as opened:
        half = reshape.plan_prune(opened, keep_fraction=0.5, scores=reshape.random_scores())
        assert half.target.config["heads_by_layer"] == [2, 2]
        assert half.notes == ("0.5 of 4 (num_attention_heads) is 2; 2 stay in each layer",)
        size = half.facts()["weight_bytes"][1]
        budget = reshape.Budget((size + 1) / 1e6)
        within = reshape.plan_prune(opened, budget=budget, scores=reshape.random_scores())
        assert within.kept == half.kept and "allow 2 of 4 heads a layer" in within.notes[0]
        with pytest.raises(ValueError, match=r"is below .* MB, which weights and cache come to with the fewest heads"):
            reshape.plan_prune(opened, budget=reshape.Budget(0.001), scores=reshape.random_scores())
        same = reshape.plan_prune(opened, heads=[])
        assert same.target.model_type == "bert" and same.target.config == opened.config


def test_values_and_outputs_are_solved_anew_for_layers_of_different_numbers(folder: Any, tmp_path: Path) -> None:
    rows = [torch.randint(2, 53, (1, 31)) for _ in range(6)]
    model = hf.load(folder("bert")).model
    with hf.checkpoint(folder("bert")) as opened:
        plan = reshape.reconstruct(reshape.plan_prune(opened, heads=UNEVEN), model, rows)
        result = put(plan, tmp_path / "reconstructed")
        plain = put(reshape.plan_prune(opened, heads=UNEVEN), tmp_path / "plain")
    wanted = model(rows[0])[0]
    off = [(loaded(transformers.AutoModel, one)(rows[0])[0] - wanted).norm().item() for one in (plain, result)]
    assert off[1] < off[0]


@pytest.mark.parametrize("heads", [[2], [2, 5], [0, 1], [2, 3, 1], ["2", 3], [True, 2], 3])
def test_a_config_with_other_heads_is_refused_in_one_line(heads: Any, folder: Any, tmp_path: Path) -> None:
    result = pruned(folder("bert"), tmp_path / "pruned")
    config = json.loads((result / "config.json").read_text()) | {"heads_by_layer": heads}
    (result / "config.json").write_text(json.dumps(config))
    with pytest.raises(hf.ModelError) as caught:
        hf.load(result)
    assert "\n" not in str(caught.value) and "heads_by_layer" in str(caught.value)
    with pytest.raises(ValueError, match=r"heads_by_layer .* from 1 to 4, one for each of 2 layers"):
        headwise.plan.of(config)


def test_a_model_can_be_pickled_and_built_from_a_config(folder: Any) -> None:
    config = transformers.AutoConfig.for_model("headwise_bert", **row_of("bert").sizes, heads_by_layer=[1, 3])
    model = transformers.AutoModel.from_config(config).eval()
    assert [layer.attention.self.query.out_features for layer in model.encoder.layer] == [7, 21]
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(IDS)[0], model(IDS)[0])
    assert heads_by_layer.HeadwiseBertModel is type(model)
    every = transformers.AutoConfig.for_model("headwise_bert", **row_of("bert").sizes)
    whole = transformers.AutoModel.from_config(every)
    assert whole.config.heads_by_layer is None and whole.encoder.layer[0].attention.self.query.out_features == 28
    with pytest.raises(AttributeError, match="HeadwiseGPT2Model"):
        heads_by_layer.HeadwiseGPT2Model  # noqa: B018


# --- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["prune", *arguments])


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("by", ["importance", "ablation", "redundancy", "random"])
def test_the_command_ranks_heads_of_a_bare_encoder_and_of_classifiers(by: str, folder: Any) -> None:
    cases = [
        folder("roberta"),
        folder("roberta", "ForSequenceClassification", num_labels=3),
        folder("roberta", "ForSequenceClassification", num_labels=1),
        folder("roberta", "ForTokenClassification", num_labels=5),
    ]
    for source in cases:
        done = run(str(source), "--by", by, "--keep-fraction", "0.5", "--text", TEXT, "--dry-run", "--json")
        assert done.exit_code == 0, (source, done.output)
        report = json.loads(done.stdout)
        assert [len(heads) for heads in report["gone"].values()] == [2, 2]
        if by in ("importance", "ablation"):
            read = hf.load(source)
            criterion = {"importance": "gradient", "ablation": "zero"}[by]
            scores = look.importance(read.model, read.encode(TEXT)[0], by=criterion).scores(criterion)
            least = {str(n): sorted(sorted(range(4), key=row.__getitem__)[:2]) for n, row in enumerate(scores)}
            assert report["gone"] == least


@pytest.mark.unchecked
def test_the_command_writes_a_classifier_and_says_in_one_line_what_has_no_loss(folder: Any, tmp_path: Path) -> None:
    source, out = folder("bert", "ForSequenceClassification"), tmp_path / "out"
    done = run(str(source), "--keep-fraction", "0.5", "--text", TEXT, "--out", str(out), "--no-verify")
    assert done.exit_code == 0, done.output
    assert "written as headwise_bert" in done.output and "`import headwise.hf` before from_pretrained" in done.output
    assert type(loaded(transformers.AutoModelForSequenceClassification, out)).__name__.endswith("Classification")
    done = run(str(folder("bert", "ForQuestionAnswering")), "--keep-fraction", "0.5", "--text", TEXT, "--dry-run")
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert "the model gave QuestionAnsweringModelOutput" in done.output and "give loss=" in done.output


@pytest.mark.parametrize("name", ["albert", "mpnet"])
def test_an_encoder_that_is_not_served_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config = {"model_type": name, "hidden_size": 28, "num_attention_heads": 4, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match=f"how {name!r} stores its heads is not known; ") as caught:
        reshape.layout.families.family_of(config, [], hf.layouts())
    assert "\n" not in str(caught.value)
