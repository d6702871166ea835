"""Checkpoints with fewer key-value heads: every family that has a field for them, loaded by transformers' own class."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_folders import quiet
from reshape_models import FAMILIES, Made, decoder
from torch import Tensor

from headwise import hf, reshape
from headwise.hf.loading import verify_process as proving
from headwise.plan import of
from headwise.reshape.layout.head_axes import Sizes, form
from headwise.reshape.layout.layer_weights import head_weights, layer_tensors
from headwise.reshape.layout.target_class import Target
from headwise.reshape.pruning.pruned_checkpoint import as_stored
from headwise.reshape.regrouping.merge import METHODS
from headwise.reshape.regrouping.regrouped_checkpoint import plan_regroup
from headwise.reshape.repair.calibration import family_in_memory, rows_of
from headwise.reshape.repair.reconstruct import reconstruct
from headwise.reshape.write.writer import Planned

KEEPS = [
    "llama",
    "llama GQA",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
]
KEEPS += ["granite", "cohere", "smollm3", "gpt_oss"]
REFUSES = ["deepseek_v3", "gpt_neox", "opt", "bert", "distilbert", "t5", "bart", "vit"]


class InMemory(Made):
    """A checkpoint that lies nowhere: the config and the tensors of a model."""

    def __init__(self, config: dict[str, Any], state: Mapping[str, Tensor]) -> None:
        self.config, self.layouts, self.state = config, hf.layouts(), dict(state)
        self.tensors = {name: SimpleNamespace(dtype=x.dtype, shape=tuple(x.shape)) for name, x in state.items()}

    def read(self, name: str) -> Tensor:
        return self.state[name].clone()

    def build(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Any:
        model = quiet(lambda: hf.loading.model.build(config, state))
        model.set_experts_implementation("eager")  # plain operations, in any sizes
        return model


def opened(family: str, *, alike: int | None = None) -> InMemory:
    """A tiny random checkpoint; with `alike` key-value heads n, n + alike, ... are the same."""
    model = quiet(FAMILIES[family].build)
    known = family_in_memory(model, hf.layouts())
    state = {name: part.detach() for name, part in model.state_dict().items()}
    for layer in known.layers if alike else ():
        weights = head_weights(known, layer, state.__getitem__)
        same = [head % alike for head in range(weights.num_kv_heads)]
        parts = {name: getattr(weights, name) for name in ("key", "value", "key_bias", "value_bias")}
        if weights.key_norm is not None and weights.key_norm.ndim == 2:
            parts["key_norm"] = weights.key_norm
        weights = replace(weights, **{name: part[same] for name, part in parts.items() if part is not None})
        state |= layer_tensors(known, layer, weights, state.__getitem__)
    return InMemory(model.config.to_dict(), state)


def outputs(source: InMemory, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return source.build(config, state)(input_ids=torch.arange(3, 26)[None] % 13, use_cache=False).logits


def result(plan: Any) -> dict[str, Tensor]:
    made = {one.name: one.make() for one in plan.tensors()}
    for one in plan.tensors():
        assert (tuple(made[one.name].shape), made[one.name].dtype) == (tuple(one.shape), one.dtype), one.name
    return made


def test_a_layer_that_is_not_finite_is_named() -> None:
    source = opened("mistral")
    source.state["model.layers.1.self_attn.v_proj.weight"][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^layer 1: the value projection holds NaN or infinity"):
        plan_regroup(source, 2)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_whose_text_is_not_finite_is_named(method: Any) -> None:
    """Weights beside attention spoil what heads are compared by: the text of the layers behind them."""
    source = opened("qwen2")
    model = source.build(source.config, source.state)
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data[0, 0] = torch.nan
    rows = [torch.arange(3, 20)[None], torch.arange(5, 22)[None]]
    with pytest.raises(ValueError, match=r"^layer 1: its queries on this text hold NaN or infinity, .* anew$"):
        plan_regroup(source, 1, method=method, model=model, rows=rows)


def test_which_heads_share_is_chosen_without_the_rows_that_are_held_out() -> None:
    """Every fifth row, or the last of fewer, says afterwards whether a reconstruction holds."""
    source = opened("qwen2")
    model = source.build(source.config, source.state)
    for count, held in ((7, 4), (3, 2)):
        rows = [torch.randint(3, 13, (1, 23 + 2 * n)) for n in range(count)]
        maps = []
        for changed in (None, held, 1):
            text = [torch.full_like(ids, 11) if n == changed else ids for n, ids in enumerate(rows)]
            plan = plan_regroup(source, 1, method="fitted", model=model, rows=text)
            maps.append([part for one in plan.merges.values() for part in (one.keys.write, one.values.write)])
        same, other = ([torch.equal(*pair) for pair in zip(maps[0], some, strict=True)] for some in maps[1:])
        assert all(same) and not any(other)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("family", KEEPS)
def test_heads_that_are_the_same_become_one(family: str) -> None:
    probe = opened(family)
    K = probe.config["num_key_value_heads"] or probe.config["num_attention_heads"]
    source = opened(family, alike=K // 2)
    wanted = outputs(source, source.config, source.state)
    groups = [[n, n + K // 2] for n in range(K // 2)]
    rows = [torch.randint(3, 13, (2, 61))]
    model = source.build(source.config, source.state)
    for method in METHODS:
        grouping = None if method in ("aligned", "fitted") else {str(n): groups for n in range(2)}
        plan = plan_regroup(source, K // 2, method=method, model=model, rows=rows, groups=grouping)
        assert plan.target.model_type == source.config["model_type"]
        assert plan.target.config["num_key_value_heads"] == K // 2
        assert {key: [list(group) for group in one.groups] for key, one in plan.merges.items()} == {
            "0": groups,
            "1": groups,
        }
        got = outputs(source, plan.target.config, result(plan))
        assert (got - wanted).abs().max() <= 2e-5 * max(1.0, float(wanted.abs().max())), method
        assert max(max(one.lost) for one in plan.merges.values()) < 1e-6


def test_a_model_without_a_field_for_it_goes_to_multi_query_in_another_class() -> None:
    source = opened("gpt2", alike=1)
    wanted = outputs(source, source.config, source.state)
    plan = plan_regroup(source, 1, method="mean")
    assert plan.target.model_type == "gpt_bigcode" and "head_dim" not in plan.target.config, "it has no such field"
    assert torch.allclose(outputs(source, plan.target.config, result(plan)), wanted, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"gpt2 has no field for a number of key-value heads; gpt_bigcode does so only"
    ):
        plan_regroup(opened("gpt2"), 2)


@pytest.mark.parametrize("family", REFUSES)
def test_what_no_class_loads_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"no class of transformers loads this|come out of one small vector already"):
        plan_regroup(opened(family), 2)


def test_a_layer_of_two_dtypes_is_computed_in_the_wider_and_stored_in_each_one_s_own() -> None:
    """Biases in float32 beside matrices in half precision: what is averaged is rounded once, when it is stored."""
    source = opened("llama biased")
    mixed = {name: part.half() if part.ndim == 2 else part for name, part in source.state.items()}
    made = result(plan_regroup(InMemory(source.config, mixed), 2, method="mean"))
    assert {name: part.dtype for name, part in made.items()} == {name: part.dtype for name, part in mixed.items()}
    name = "model.layers.1.self_attn.k_proj.weight"
    heads = mixed[name].float().unflatten(0, (4, 6))
    assert torch.equal(made[name], torch.stack([heads[:2].mean(0), heads[2:].mean(0)]).flatten(0, 1).half())


def test_as_many_as_there_are_is_the_same_to_the_last_bit() -> None:
    source = opened("qwen2")
    plan = plan_regroup(source, source.config["num_key_value_heads"])
    assert dict(plan.target.config) == source.config
    made = result(plan)
    assert all(torch.equal(made[name], part) for name, part in source.state.items())


def test_text_decides_and_reconstruction_helps_on_other_text() -> None:
    source = opened("llama")
    model = source.build(source.config, source.state)
    with torch.no_grad():
        for name, part in model.named_parameters():
            if "proj" in name:
                part.mul_(6)
    source = InMemory(source.config, {name: part.detach().clone() for name, part in model.state_dict().items()})
    rows = [torch.randint(3, 29, (4, 47)) for _ in range(5)]
    calls: list[tuple[str, int, int]] = []
    plan = plan_regroup(source, 2, method="aligned", model=model, rows=rows, progress=lambda *one: calls.append(one))
    reading = [("reading the text", n, 4) for n in range(1, 5)]  # the fifth row is left to check by
    assert calls == [*reading, ("choosing which heads share", 1, 2), ("choosing which heads share", 2, 2)]
    blind = plan_regroup(source, 2, method="aligned")
    assert sum(sum(one.lost) for one in plan.merges.values()) > 0 and blind.merges["0"].lost != plan.merges["0"].lost
    fixed = reconstruct(plan, model, rows, value_steps=2)
    for before, after in fixed.measured["errors"].values():  # on the rows that nothing was fitted to
        assert after < before
    old, new = result(plan), result(fixed)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed and all(name.endswith(("o_proj.weight", "v_proj.weight")) for name in changed)
    facts = fixed.facts()
    assert facts["losses"].keys() == {"original", "regrouped", "recovered", "tokens"}
    assert facts["counts"]["num_key_value_heads"] == [4, 2] and json.dumps(facts)


def test_a_folder_is_written_and_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision stays, the folder loads, RESHAPE.md tells; the proof is asked in this process."""

    def prove(folder: Path, config: Any, weights: Any, request: Any) -> dict[str, Any]:
        source = {"config": dict(config), "weights": list(map(str, weights))}
        return quiet(lambda: proving.answer({**request, "folder": str(folder), "source": source}))

    monkeypatch.setattr("headwise.hf.loading.checkpoint.prove", prove)
    source = tmp_path / "source"
    quiet(lambda: FAMILIES["mistral"].build().half().save_pretrained(source))
    with hf.checkpoint(source) as checkpoint:
        proof, written = reshape.Proof(tuple(range(3, 13)), speed=False), list[tuple[int, int]]()

        def tell(what: str, done: int, total: int) -> None:
            written.extend([(done, total)] if what == "writing" else [])

        facts = reshape.regroup(checkpoint, tmp_path / "new", 1, method="mean", proof=proof, progress=tell)
    assert written == sorted(written) and written[-1][0] == written[-1][1] == written[0][1]
    assert facts["proof"]["class"] == "MistralForCausalLM" and all(facts["proof"]["loss"])
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["num_key_value_heads"] == 1
    text = (tmp_path / "new" / "RESHAPE.md").read_text()
    assert "key-value heads became 1 in each layer: the mean of each group's keys and values." in text
    assert "| layer | heads that share | keys lost | values lost |" in text


def test_rows_of_fused_projections() -> None:
    sizes = Sizes(H=4, K=2, D=3, V=2)
    assert rows_of(form("(K v) M"), sizes, "v") == (0, 1, 2, 3)
    assert rows_of(form("M (H q | K k | K v)"), sizes, "v") == (18, 19, 20, 21)
    assert rows_of(form("(H (q | k | v)) M"), Sizes(H=2, K=2, D=3, V=2), "v") == (6, 7, 14, 15)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("kv_heads", "options", "kind", "text"),
    [
        (4, {}, ValueError, "mistral: 6 key-value heads share 1, 2, 3, 6 in equal groups; got num_kv_heads 4"),
        (0, {}, ValueError, "num_kv_heads is at least 1; got 0"),
        (True, {}, TypeError, "num_kv_heads is an int; got True"),
        (2, {"method": "median"}, ValueError, "method is one of first, mean, aligned, fitted; got 'median'"),
        (2, {"groups": {"0": [[0, 1], [2, 3]]}}, ValueError, "groups are of equal size and hold each of the 6"),
        (2, {"groups": {"7": [[0, 1, 2], [3, 4, 5]]}}, ValueError, "groups name layers, 0, 1; got '7'"),
        (2, {"groups": [[0, 1, 2], [3, 4, 5]]}, TypeError, "groups are lists of heads by layer, such as"),
    ],
)
def test_what_cannot_be_is_refused(kv_heads: Any, options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        plan_regroup(decoder(6, 6, D=6), kv_heads, **options)


@pytest.mark.unchecked
def test_reconstruction_needs_text_and_a_checkpoint_that_builds_models() -> None:
    plan = plan_regroup(decoder(6, 6, D=6), 2)
    with pytest.raises(TypeError, match=r"reconstruct\(\) needs a checkpoint opened with headwise.hf.checkpoint\(\)"):
        reconstruct(plan, torch.nn.Linear(2, 2), [])
    source = opened("llama")
    for rows in (5, torch.ones(2, 3, dtype=torch.long), "text"):
        with pytest.raises(TypeError, match=r"rows are a list of tensors of ids \(B, T\); got"):
            reconstruct(plan_regroup(source, 2), torch.nn.Linear(2, 2), rows)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows are 2 at least"):
        reconstruct(plan_regroup(source, 2), torch.nn.Linear(2, 2), [torch.ones(2, 3, dtype=torch.long)])
    with pytest.raises(TypeError, match="plan is a Pruning or a Regrouping, as plan_prune and plan_regroup make it"):
        reconstruct(source, torch.nn.Linear(2, 2), [])  # type: ignore[type-var]


def test_a_model_with_towers_is_counted_whole_before_and_after() -> None:
    """Before as after: of a model that reads pictures, too, only the text's heads share."""
    source = opened("gemma3")
    facts = plan_regroup(source, 1, method="mean").facts()
    before, after = (plan["parameters"] for plan in facts["plan"])
    assert before == of(source.config).parameters()["total"]
    text = source.config["text_config"]
    each = text["hidden_size"] * text["head_dim"] * (text["num_key_value_heads"] - 1)
    assert before - after == 2 * each * text["num_hidden_layers"]


def test_a_tensor_is_stored_as_its_class_has_it() -> None:
    matrix = torch.arange(35.0).view(5, 7)
    one = Planned("h.0.attn.c_proj.weight", matrix.dtype, (5, 7), lambda: matrix)
    for ends, expected in (((), matrix), (("mlp.c_proj.weight",), matrix), (("attn.c_proj.weight", "x"), matrix.T)):
        stored = as_stored(one, Target("any", {}, transposed=ends))
        assert stored.shape == tuple(expected.shape) and torch.equal(stored.make(), expected), ends
        assert stored.make().is_contiguous()
