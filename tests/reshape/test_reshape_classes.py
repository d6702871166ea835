"""Which class loads a result, and what its config must say so that it computes the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import inputs, logits
from reshape_models import FAMILIES, Made, decoder, saved
from safetensors.torch import load_file, save_file

from headwise import hf
from headwise.plan.config.fields import architectures
from headwise.reshape import plan_prune
from headwise.reshape.layout.families import family_of
from headwise.reshape.layout.target_class import target

LLAMA = dict(model_type="llama", sliding_window=None)
NONE_LEFT: dict[str, Any] = {"sliding_window": None}


def family(source: Made) -> Any:
    return family_of(source.config, source.tensors, source.layouts)


def llama(**config: Any) -> Made:
    """Four heads, 26 numbers wide: three heads do not divide it."""
    made = decoder(4, 4, model_type="llama", **config)
    made.config = {name: value for name, value in made.config.items() if name != "sliding_window"}
    return made


def test_where_the_heads_do_not_divide_another_class_stands_in_and_says_why() -> None:
    plan = plan_prune(llama(architectures=["LlamaForCausalLM"], rms_norm_eps=1e-7), heads="0.1,1.2")
    config = plan.target.config
    assert plan.target.why == "llama requires d_model to be a multiple of num_attention_heads, and 26 / 3 is not whole"
    assert (config["model_type"], config["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (3, 3, 5)
    assert config["sliding_window"] is None and config["rms_norm_eps"] == 1e-7
    assert not {"attention_bias", "mlp_bias"} & config.keys()


def test_what_the_new_class_has_by_nature_is_not_said() -> None:
    """Mistral has no field for biases, and a field that its class does not know would be taken for a mistake."""
    config = plan_prune(llama(attention_bias=False, mlp_bias=False), heads="0.1,1.2").target.config
    assert config["model_type"] == "mistral" and not {"attention_bias", "mlp_bias"} & config.keys()


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_where_that_class_has_no_biases_a_third_one_does(bias: str) -> None:
    config = plan_prune(llama(**{bias: True}), heads="0.1,1.2").target.config
    assert config["model_type"] == "granite" and config[bias] is True
    factors = {
        "attention_multiplier": 5**-0.5,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    }
    assert factors.items() <= config.items()


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("LlamaForCausalLM", "MistralForCausalLM"),
        ("LlamaModel", "MistralModel"),
        ("LlamaForSequenceClassification", "MistralForSequenceClassification"),
        ("SomethingElse", "SomethingElse"),
    ],
)
def test_the_class_keeps_its_head(name: str, becomes: str) -> None:
    assert plan_prune(llama(architectures=[name]), heads="0.1,1.2").target.config["architectures"] == [becomes]


def test_a_head_that_the_other_class_has_not_is_refused_by_name() -> None:
    """The config would name a class that there is none of, and transformers would load the model without its head."""
    made = llama(mlp_bias=True, architectures=["LlamaForSequenceClassification"])
    text = "mistral does so only with mlp_bias = False, .*; granite has no class with the head of LlamaForSequenceCl"
    with pytest.raises(ValueError, match=text):
        plan_prune(made, heads="0.1,1.2")
    assert plan_prune(made, heads={0: [0, 1], 1: [1, 2]}).target.model_type == "llama", "its own class has it"


def test_the_table_of_heads_is_what_transformers_has() -> None:
    """For each class that stands in for another: which of the other's heads it has, too."""
    families = hf.layouts()["families"]
    pairs = [(old, choice["class"]) for old, about in families.items() for choice in about.get("instead", ())]
    assert len(pairs) >= 3
    for old, new in pairs:
        before, after = (architectures()[name]["classes"]["config"].removesuffix("Config") for name in (old, new))
        heads = {
            name.removeprefix(before)
            for name in dir(transformers)
            if name.startswith((f"{before}For", f"{before}Double"))
        }
        known = {*architectures()[new].get("heads", ()), "ForCausalLM"}
        assert {head for head in heads if hasattr(transformers, after + head)} - known == set(), (old, new)
        assert all(hasattr(transformers, after + head) for head in known)


@pytest.mark.parametrize(("bias", "becomes"), [({}, "Mistral"), ({"mlp_bias": True}, "Granite")])
def test_what_a_config_leaves_to_the_old_class_stays_so_under_the_new(bias: dict[str, bool], becomes: str) -> None:
    shapes = llama().tensors
    made = Made(
        {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 26, "num_attention_heads": 4, "head_dim": 5}
        | bias,
        {},
    )
    made.tensors = shapes
    config = plan_prune(made, heads="0.1,1.2").target.config
    old, new = (
        {field.name: field.default for field in dataclasses.fields(getattr(transformers, f"{name}Config"))}
        for name in ("Llama", becomes)
    )
    for field in old.keys() & new.keys() - {"model_type", "num_attention_heads", "num_key_value_heads"}:
        if field not in made.config and old[field] != new[field]:
            assert config[field] == old[field], field


def test_of_a_model_with_towers_the_text_model_alone_gets_another_class() -> None:
    """What loads the whole stays: it makes its text model of whatever class the inner config names."""
    made = llama(rms_norm_eps=1e-7)
    inner = dict(made.config)
    made.layouts = {**made.layouts, "families": {**made.layouts["families"], "llava": {}}}
    made.config = {
        "model_type": "llava",
        "text_config": inner,
        "vision_config": {"hidden_size": 7},
    }
    goal = plan_prune(made, heads="0.1,1.2").target
    assert goal.model_type == goal.config["model_type"] == "llava" and "requires d_model to be a multiple" in goal.why
    assert goal.config["vision_config"] == {"hidden_size": 7}
    text = goal.config["text_config"]
    assert (text["model_type"], text["num_attention_heads"], text["head_dim"]) == ("mistral", 3, 5)
    assert text["rms_norm_eps"] == 1e-7 and "hidden_size" not in goal.config


def test_the_own_class_is_kept_where_it_loads() -> None:
    plan = plan_prune(llama(), heads={0: [0, 1], 1: [1, 2]})
    assert plan.target.model_type == "llama" and plan.target.why == "" and plan.target.config["head_dim"] == 5


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name in hf.layouts()["families"].keys() - {"electra", "gemma3"}
        if "states" not in architectures().get(name, {})
    ),
)  # the first rounds d_model / heads down, the other is gemma3_text inside; hybrid models are in test_hf_hybrid.py
def test_what_the_table_says_of_loading_is_what_transformers_does(name: str) -> None:
    """The class takes three heads of the four, at the same size of a head, or it refuses to be built."""
    row = next((row for key, row in FAMILIES.items() if key.split(" ")[0] == name))
    about = hf.layouts()["families"][name]
    fields = architectures().get(name) or about["fields"]
    names = fields.get("names", {})
    has_head_dim = fields.get("latent") or "head_dim" in names or "head_dim" in fields["defaults"]
    sizes = dict(row.sizes)
    heads = [key for key in ("num_attention_heads", "n_head", "n_heads", "num_heads") if key in sizes]
    heads += [
        key for key in ("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads") if key in sizes
    ]
    width = sizes.get("hidden_size") or sizes.get("n_embd") or sizes.get("dim") or sizes["d_model"]
    odd = 3 if width % 3 else 5
    sizes |= dict.fromkeys(heads, odd)
    if has_head_dim and "head_dim" not in names and not fields.get("latent"):
        sizes["head_dim"] = 6
    takes = bool(has_head_dim) and about.get("loads") != "divides"

    def build() -> Any:
        with torch.device("meta"):
            return getattr(transformers, row.model)(getattr(transformers, row.config)(**sizes))

    if takes:
        build()
    else:
        with pytest.raises(Exception, match=r"divisible|multiple|evenly"):
            build()


def test_one_key_value_head_makes_another_class_which_computes_the_same(tmp_path: Path) -> None:
    """For regrouping: all heads read one key and value, which the new class stores once, its matrices turned."""
    source = saved(FAMILIES["gpt2"], tmp_path / "source")
    tensors, D, M = load_file(source / "model.safetensors"), 7, 28
    for name, tensor in tensors.items():
        if "attn.c_attn" in name:  # the same keys and values in all heads
            tensor[..., M:] = torch.cat([tensor[..., M : M + D]] * 4 + [tensor[..., 2 * M : 2 * M + D]] * 4, -1)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with hf.checkpoint(source) as opened:
        known = family_of(opened.config, opened.tensors, opened.layouts)
        goal = target(known, {"n_head": (4, 1)})
    assert goal.why == "gpt2 has no field for a number of key-value heads"
    for name, tensor in tensors.items():
        if "attn.c_attn" in name:
            tensor = tensor[..., [*range(M + D), *range(2 * M, 2 * M + D)]]
        tensors[name] = (tensor.T if name.endswith(goal.transposed) else tensor).contiguous()
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "config.json").write_text(json.dumps(dict(goal.config)))
    save_file(tensors, tmp_path / "result" / "model.safetensors", metadata={"format": "pt"})
    before = transformers.GPT2LMHeadModel.from_pretrained(source).eval()
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "result").eval()
    assert type(after).__name__ == "GPTBigCodeForCausalLM"
    arguments = inputs(FAMILIES["gpt2"])
    torch.testing.assert_close(logits(after, arguments), logits(before, arguments), atol=1e-5, rtol=1e-5)


def test_what_stands_in_the_way_of_each_class_is_said() -> None:
    known = family(Made(dict(model_type="gpt2", n_head=4, n_embd=28, n_layer=1), gpt2_shapes()))
    with pytest.raises(ValueError, match="gpt_bigcode does so only with num_key_value_heads = 1, and it is 2"):
        target(known, {"n_head": (4, 2)})
    scaled = dict(model_type="gpt2", n_head=4, n_embd=28, n_layer=1, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ValueError, match="gpt_bigcode does so only with scale_attn_by_inverse_layer_idx = False, and"):
        target(family(Made(scaled, gpt2_shapes())), {"n_head": (4, 1)})


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    return {"h.0.attn.c_attn.weight": (28, 84), "h.0.attn.c_proj.weight": (28, 28)}


# --- layers that are not where they should be -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda made: made.config.update(model_type="mystral"),
            "how 'mystral' stores its heads is not known; did you mean m",
        ),
        (lambda made: made.config.update(model_type=3), "how 3 stores its heads is not known"),
        (
            lambda made: made.config.update(num_hidden_layers=3),
            "config.json counts 3 layers, and the weights hold 2 at .*: number 2 is missing",
        ),
        (
            lambda made: made.config.update(num_attention_heads=5, num_key_value_heads=5),
            "not of 5 query and 5 key-value",
        ),
        (lambda made: made.config.update(num_key_value_heads=3), "num_heads must be a multiple of num_kv_heads"),
        (
            lambda made: made.config.update(pruned_heads={"0": [1]}),
            "pruned_heads, as transformers up to version 4 wrote them, .* give the checkpoint that was not",
        ),
        (
            lambda made: made.tensors.pop("model.layers.0.self_attn.o_proj.weight"),
            "self_attn: the weights of its output are missing; get",
        ),
        (lambda made: made.tensors.clear(), r"there are no weights of attention where mistral has them \(layers"),
        (
            lambda made: add(made, "model.layers.1.self_attn.gate.weight"),
            "gate.weight: not a tensor that such a layer is known",
        ),
        (lambda made: add(made, "vision.layers.0.self_attn.q_proj.weight"), "two parts of the model have layers at"),
    ],
)
def test_a_checkpoint_that_is_not_as_the_table_says_is_refused(change: Any, text: str) -> None:
    made = decoder(4, 4)
    change(made)
    with pytest.raises(ValueError, match=text) as caught:
        plan_prune(made, heads="0.1,1.1")
    assert "\n" not in str(caught.value)


def add(made: Made, name: str) -> None:
    made.tensors[name] = made.tensors["model.embed_tokens.weight"]


def test_one_kv_head_is_another_form() -> None:
    made = Made(dict(model_type="gpt_bigcode", multi_query=False, n_head=4, n_embd=28, n_layer=1), gpt2_shapes())
    with pytest.raises(ValueError, match="multi_query = False: how such a checkpoint stores its heads is not known"):
        plan_prune(made, heads=[])


def test_a_missing_stack_is_told() -> None:
    shapes = {f"encoder.block.0.layer.0.SelfAttention.{part}.weight": (28, 28) for part in "qkvo"}
    with pytest.raises(ValueError, match=r"there are no weights of decoder.block.\{\}.layer.0.SelfAttention, which"):
        plan_prune(Made(dict(model_type="t5", d_model=28, d_kv=7, num_heads=4, num_layers=1), shapes), heads=[])


def test_a_text_model_that_is_not_there_is_told() -> None:
    for config in ({}, {"text_config": None}, {"text_config": [1]}):
        made = Made({"model_type": "gemma3"} | config, {})
        made.tensors = decoder(4, 4).tensors
        with pytest.raises(ValueError, match="has no text_config, where the text model's sizes are"):
            family(made)


def test_an_encoder_and_a_decoder_of_other_numbers_of_heads(tmp_path: Path) -> None:
    """Each stack's layers by its own field of the config: four heads of seven numbers, and two of fourteen."""
    with hf.checkpoint(saved(FAMILIES["bart"], tmp_path / "source", decoder_attention_heads=2)) as opened:
        known = family(opened)  # type: ignore[arg-type]
    sizes = {layer.key: (layer.sizes.H, layer.sizes.D) for layer in known.layers}
    assert sizes == {"encoder.0": (4, 7), "encoder.1": (4, 7), "0": (2, 14), "1": (2, 14), "cross.0": (2, 14)} | {
        "cross.1": (2, 14)
    }
    counts = {field: [layer.key for layer in layers] for field, layers in known.counts.items()}
    assert counts == {
        "encoder_attention_heads": ["encoder.0", "encoder.1"],
        "decoder_attention_heads": ["0", "1", "cross.0", "cross.1"],
    }
