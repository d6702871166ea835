"""attn_implementation="headwise" on a model that cannot run on it: one clear error when the model is built."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import OUTSIDE, B, token_ids
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import nn
from transformers import PreTrainedModel

from headwise.hf import ModelError
from headwise.hf.models.support import attention_modules, require_consulted
from headwise.hf.validate import check_what_is_built, module_classes

TINY: dict[str, Any] = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=8)
ALL_OUTSIDE: dict[str, tuple[str, str, dict[str, Any]]] = OUTSIDE | {
    "canine": ("CanineModel", "CanineConfig", TINY),
    "ibert": ("IBertModel", "IBertConfig", TINY),
    "lilt": ("LiltModel", "LiltConfig", TINY | dict(channel_shrink_ratio=2)),
    "vitdet": ("VitDetModel", "VitDetConfig", TINY | dict(image_size=8, patch_size=4)),
    "wavlm": ("WavLMModel", "WavLMConfig", TINY),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {}),
}
"""model_type -> (model, config, sizes); some run their own attention without a word, some die of a KeyError."""
SIGLIP: dict[str, Any] = TINY | dict(image_size=12, patch_size=4)


def build(model: str, config: Any, name: str = "headwise") -> PreTrainedModel:
    return getattr(transformers, model)._from_config(config, attn_implementation=name)


@pytest.mark.parametrize("model_type", ALL_OUTSIDE)
def test_a_model_outside_the_interface_is_not_built(model_type: str) -> None:
    model, config, sizes = ALL_OUTSIDE[model_type]
    text = f"{model} (model_type '{model_type}') is not on transformers' attention interface, so its heads cannot be"
    with pytest.raises(ModelError, match=re.escape(text)) as caught:
        build(model, getattr(transformers, config)(**sizes))
    assert "\n" not in str(caught.value) and 'use attn_implementation="eager"' in str(caught.value)


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_other_names_are_built_as_ever(model_type: str) -> None:
    model, config, sizes = OUTSIDE[model_type]
    assert build(model, getattr(transformers, config)(**sizes), "eager").config._attn_implementation == "eager"


@pytest.mark.parametrize(("model", "config"), [("SamVisionModel", "SamVisionConfig"), ("SamModel", "SamConfig")])
def test_a_part_that_picks_its_attention_from_a_table_is_not_built(model: str, config: str) -> None:
    """Half on the interface: SAM's mask decoder is, its image encoder has classes by name, and none for ours."""
    sizes: dict[str, Any] = TINY | dict(image_size=16, patch_size=8, output_channels=8)
    text = r"SamVisionEncoder .* SamVisionLayer picks its attention from a table of its own, of 'eager', 'sdpa'; use"
    fields = sizes if model == "SamVisionModel" else dict(vision_config=sizes)
    with pytest.raises(ModelError, match=text):
        build(model, getattr(transformers, config)(**fields))


def test_a_part_beside_the_table_is_built() -> None:
    """GIT's language model has a table; its image encoder, in the same file, is on the interface."""
    config = transformers.GitConfig(**TINY, vision_config=SIGLIP, vocab_size=53)
    with pytest.raises(ModelError, match=r"GitModel \(model_type 'git'\) .* GitAttention picks its attention from a"):
        build("GitModel", config)
    from transformers.models.git.modeling_git import GitVisionModel

    vision = GitVisionModel._from_config(config.vision_config, attn_implementation="headwise")
    assert len(attention_modules(vision)) == 1


def test_what_was_built_with_another_name_may_be_switched() -> None:
    """Its attention is chosen by then; what is on the interface follows the name."""
    sizes: dict[str, Any] = TINY | dict(image_size=16, patch_size=8, output_channels=8, mlp_dim=8)
    model = build("SamModel", transformers.SamConfig(vision_config=sizes), "eager")
    model.set_attn_implementation("headwise")
    assert model.config._attn_implementation == "headwise"


def test_what_the_source_says_a_model_is_built_from() -> None:
    names = {part.__name__ for part in module_classes(transformers.LlamaModel)}
    assert {"LlamaModel", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm"} <= names
    assert "LlamaForCausalLM" not in names

    class Typed(transformers.LlamaModel):
        """Made at run time: a class without a file."""

    assert module_classes(Typed) == module_classes(transformers.LlamaModel) - {transformers.LlamaModel} | {Typed}
    assert module_classes(nn.Linear) == {nn.Linear}
    assert "GitSelfAttention" in {part.__name__ for part in module_classes(transformers.GitModel)}, "by way of a table"


def test_attention_that_no_implementation_reaches_is_told() -> None:
    """The rest of the model runs on headwise; told once, by the model that holds it."""
    text = (
        "SiglipVisionModel (model_type 'siglip_vision_model'): attention in code of its own, which no implementation "
        "reaches, is in SiglipMultiheadAttentionPoolingHead; all its other attention runs on headwise"
    )
    config = transformers.SiglipConfig(vision_config=SIGLIP, text_config=TINY | dict(vocab_size=53, eos_token_id=1))
    with pytest.warns(UserWarning) as record:
        model = build("SiglipModel", config)
    assert [str(warning.message) for warning in record] == [text]
    assert len(attention_modules(model)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("SiglipModel", config, "eager")
        build("SiglipVisionModel", transformers.SiglipVisionConfig(**SIGLIP, vision_use_head=False))


def test_a_model_without_attention_is_built() -> None:
    """As the backbone of a model that has some, say."""
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[8], depths=[1])
    assert build("ResNetModel", config).config._attn_implementation == "headwise"


def test_switching_to_a_model_that_picks_single_keys_is_refused() -> None:
    """transformers lets it be switched; at run time it would be refused for its arguments."""
    sizes = TINY | dict(num_key_value_heads=4, vocab_size=53, q_lora_rank=5, kv_lora_rank=5, first_k_dense_replace=1)
    heads = dict(qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, index_n_heads=2, index_head_dim=8)
    model = build("DeepseekV32Model", transformers.DeepseekV32Config(**sizes, **heads), "eager")
    with pytest.raises(ModelError, match=r"DeepseekV32Model .* it picks single keys for each query"):
        model.set_attn_implementation("headwise")
    assert model.config._attn_implementation == "eager"


def test_the_name_written_into_a_config_is_refused_at_the_first_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past transformers' own ways; by the text of the model's file, whatever our table of names holds."""
    model, config, sizes = OUTSIDE["luke"]
    built = build(model, getattr(transformers, config)(**sizes), "eager")
    built.config._attn_implementation = "headwise"
    for table in (None, {}):
        if table is not None:
            monkeypatch.setattr("headwise.hf.models.support.OUTSIDE", table)
        for arguments in (dict(input_ids=token_ids()), dict(input_ids=token_ids(), attention_mask=torch.ones(B, 11))):
            with pytest.raises(ModelError, match=r"Luke \(model_type 'luke'\) is not on transformers' attention"):
                built(**arguments)


def test_the_name_written_into_the_config_of_a_seam_is_refused_with_the_way() -> None:
    """Its modules have not been prepared: they would run transformers' attention, under our name."""
    config = transformers.BloomConfig(vocab_size=53, hidden_size=24, n_layer=1, n_head=4)
    built = build("BloomForCausalLM", config, "eager")
    built.config._attn_implementation = "headwise"
    text = r"Bloom \(model_type 'bloom'\): 'headwise' stands in its config, .*; call model.set_attn_implementation"
    with pytest.raises(ModelError, match=text):
        built(token_ids())
    built.set_attn_implementation("headwise")
    assert built(token_ids()).logits.isfinite().all()


def test_configs_of_models_on_the_interface_and_of_none_pass() -> None:
    for config in (transformers.LlamaConfig(), transformers.ResNetConfig(), None, 3):
        require_consulted(config)


def test_the_check_is_set_up_once() -> None:
    asks, ends = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.post_init
    check_what_is_built()
    importlib.reload(importlib.import_module("headwise.hf"))
    assert PreTrainedModel.get_correct_attn_implementation is asks and PreTrainedModel.post_init is ends


@pytest.mark.unchecked
def test_output_attentions_in_a_config_is_explained(tmp_path: Path) -> None:
    """transformers refuses it for all but eager, and would send the user there; headwise answers the call that asks."""
    sizes = TINY | dict(vocab_size=11)
    config, model = transformers.LlamaConfig, transformers.LlamaForCausalLM
    model(config(**sizes)).save_pretrained(tmp_path)
    ours, other = (model.from_pretrained(tmp_path, attn_implementation=name) for name in ("headwise", "sdpa"))

    def ways(name: str) -> list[Callable[[], object]]:
        return [
            lambda: config(**sizes, output_attentions=True, attn_implementation=name),
            lambda: model.from_pretrained(tmp_path, attn_implementation=name, output_attentions=True),
            lambda: setattr((ours if name == "headwise" else other).config, "output_attentions", True),
        ]

    refused = (ValueError, StrictDataclassClassValidationError)
    for way in ways("headwise"):
        with pytest.raises(refused, match=r"ask in the call, where .* model\(\.\.\., output_attentions=True\)"):
            way()
    for way in ways("sdpa"):
        with pytest.raises(refused, match="Please set it to 'eager' instead"):
            way()
    assert [x.shape for x in ours(torch.tensor([[1, 2, 3]]), output_attentions=True).attentions] == [(1, 4, 3, 3)]
