"""Checkpoints with pruned_heads, as transformers 4 wrote them, become ones that transformers 5 loads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import inputs, logits
from reshape_models import FAMILIES, Made, decoder, proved
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwise import hf
from headwise.reshape import migrate, plan_migrate, plan_prune, plan_regroup, prune_module

Heads = Mapping[int, Iterable[int]]
UNEVEN: Heads = {0: [1, 3], 1: [0]}


def old(family: str, heads: Heads, folder: Path, *, shrunken: bool = True) -> tuple[Path, Tensor]:
    """A checkpoint of transformers 4 whose heads were pruned, and what it computes."""
    row = FAMILIES[family]
    model = row.build()
    arguments = inputs(row, "none", masked=row.kind != "vision")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    pruned = {str(layer): list(some) for layer, some in heads.items()}
    (folder / "config.json").write_text(json.dumps(config | {"pruned_heads": pruned}))
    whole = load_file(folder / "model.safetensors")
    prune_module(model, heads, layouts=hf.layouts())
    if shrunken:
        model.save_pretrained(folder / "smaller")
        save_file(load_file(folder / "smaller" / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
        assert any(load_file(folder / "model.safetensors")[name].shape != whole[name].shape for name in whole)
    return folder, logits(model, arguments)


def output(family: str, folder: Path) -> Tensor:
    row, config = FAMILIES[family], transformers.AutoConfig.from_pretrained(folder)
    model, report = getattr(transformers, row.model).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"] and not hasattr(config, "pruned_heads")
    return logits(model.eval(), inputs(row, "none", masked=row.kind != "vision"))


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert", "gpt2"])
@pytest.mark.parametrize("shrunken", [True, False], ids=["shrunken", "filled"])
def test_missing_heads_come_back_as_zeros(family: str, shrunken: bool, tmp_path: Path) -> None:
    source, expected = old(family, UNEVEN, tmp_path / "old", shrunken=shrunken)
    with hf.checkpoint(source) as opened:
        facts = migrate(opened, tmp_path / "new", proof=None)
    assert "pruned_heads" not in json.loads((tmp_path / "new" / "config.json").read_text())
    torch.testing.assert_close(output(family, tmp_path / "new"), expected, atol=1e-5, rtol=1e-5)
    assert facts["gone"] == {"0": [1, 3], "1": [0]} and facts["change"] == "zeroed"
    assert facts["counts"] in ({"num_attention_heads": [4, 4]}, {"n_heads": [4, 4]}, {"n_head": [4, 4]})
    assert "came back as zeros" in (tmp_path / "new" / "README.md").read_text()
    assert "3 heads" in (tmp_path / "new" / "RESHAPE.md").read_text()
    if shrunken:  # without us it does not load, or not with these weights
        with pytest.raises(RuntimeError, match=r"size mismatch|ignore_mismatched_sizes"):
            getattr(transformers, FAMILIES[family].model).from_pretrained(source)


@pytest.mark.parametrize("shrunken", [True, False], ids=["shrunken", "filled"])
def test_where_a_class_counts_them_the_config_does(shrunken: bool, tmp_path: Path) -> None:
    source, expected = old("vit", {0: [1], 1: [3]}, tmp_path / "old", shrunken=shrunken)
    with hf.checkpoint(source) as opened:
        facts = migrate(opened, tmp_path / "new", proof=None)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["num_attention_heads"], config["head_dim"]) == (3, 7) and facts["change"] == "missing"
    torch.testing.assert_close(output("vit", tmp_path / "new"), expected, atol=1e-5, rtol=1e-5)
    assert not (tmp_path / "new" / "README.md").exists()


def test_uneven_layers_of_such_a_class_are_filled(tmp_path: Path) -> None:
    source, expected = old("vit", UNEVEN, tmp_path / "old")
    with hf.checkpoint(source) as opened:
        assert migrate(opened, tmp_path / "new", proof=None)["change"] == "zeroed"
    torch.testing.assert_close(output("vit", tmp_path / "new"), expected, atol=1e-5, rtol=1e-5)


def test_the_proof_loads_the_result(tmp_path: Path) -> None:
    source, _ = old("bert", UNEVEN, tmp_path / "old")
    with hf.checkpoint(source) as opened:
        facts = migrate(opened, tmp_path / "new", proof=None)
    proof = proved(None, tmp_path / "new", None)
    assert (
        proof["parameters"] == [None, facts["plan"][1]["parameters"]] and proof["missing"] == proof["unexpected"] == []
    )
    assert "difference" not in proof


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("pruned", "text"),
    [
        (None, "config.json has no pruned_heads, so there is nothing to migrate"),
        ({}, "config.json has no pruned_heads"),
        ({"0": [4]}, "layer 0 has the heads 0 to 3; got 4"),
        ({"7": [1]}, "no layer '7'; the layers are 0 to 1"),
        ({"0": 1}, "pruned_heads are lists of heads by layer; config.json has {'0': 1}"),
        ({"0": "12"}, "pruned_heads are lists of heads by layer"),
        ([1], "pruned_heads are lists of heads by layer"),
        ({"0": [1.0]}, "layer 0 has the heads 0 to 3; got 1.0"),
        ({"0": [True]}, "layer 0 has the heads 0 to 3; got True"),
        ({"0": [0, 1, 2, 3]}, "pruned_heads leaves layer 0 none of its 4 heads"),
    ],
)
def test_what_is_no_such_checkpoint_is_refused(pruned: object, text: str) -> None:
    made = decoder(4, 4)
    made.config["pruned_heads"] = pruned
    with pytest.raises(ValueError, match=text):
        plan_migrate(made)


@pytest.mark.parametrize("pruned", [None, {}, {"0": [], "1": []}, {"0": [1], "1": [2]}])
def test_no_command_sends_to_one_that_sends_back(pruned: dict[str, list[int]] | None) -> None:
    """What `migrate` has nothing to do for, the others take; what they do not, it makes one that they take."""
    made = decoder(4, 4, 6)
    made.config["pruned_heads"] = pruned
    reshapings = (lambda: plan_prune(made, heads="0.1,1.1"), lambda: plan_regroup(made, 2))
    if pruned:
        for reshaping in reshapings:
            with pytest.raises(ValueError, match=r"pruned_heads, which transformers no longer reads; .*migrate"):
                reshaping()
        done = plan_migrate(made)
        assert done.config["num_attention_heads"] == 4 - len(pruned["0"]) and "pruned_heads" not in done.config
        return
    with pytest.raises(ValueError, match=r"no pruned_heads, so there is nothing to migrate"):
        plan_migrate(made)
    assert all(reshaping() for reshaping in reshapings)


def test_tensors_of_neither_size_are_refused() -> None:
    made = decoder(4, 4)
    made.config["pruned_heads"] = {"0": [1]}
    made.tensors["model.layers.0.self_attn.q_proj.weight"] = decoder(2, 2).tensors[
        "model.layers.0.self_attn.q_proj.weight"
    ]
    with pytest.raises(ValueError, match=r"q_proj.weight is \(10, 26\): neither of 4 heads of 5 numbers, nor of the 3"):
        plan_migrate(made)


def test_shared_key_value_heads_were_never_pruned_so() -> None:
    made: Made = decoder(4, 2)
    made.config["pruned_heads"] = {"0": [1]}
    with pytest.raises(ValueError, match="pruned_heads beside shared key-value heads"):
        plan_migrate(made)
