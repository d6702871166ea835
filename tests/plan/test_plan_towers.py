"""Models that take pictures or sound: every tower counted by its own part of the config, equal to transformers'."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from plan_models import counted
from tower_models import COMPOSITE, composite_config, composite_model, random_composite, random_tower

from headwise import plan
from headwise.plan.config.fields import architectures
from headwise.plan.model.model import model_of
from headwise.plan.model.towers import known_towers, tower_of

pytestmark = pytest.mark.unchecked


@pytest.mark.parametrize("name", COMPOSITE)
def test_parameters_of_all_towers_are_those_of_the_model(name: str) -> None:
    for seed in range(2):
        fields = random_composite(name, random.Random(seed))
        real = composite_model(name, composite_config(name, fields))
        ours = model_of({**fields, "model_type": name})
        assert ours.total_parameters() == sum(p.numel() for p in real.parameters()), (seed, fields)
        assert ours.towers and all(tower.parameter_count() > 0 for tower in ours.towers)


@pytest.mark.parametrize("name", ["clip_vision_model", "siglip_vision_model", "qwen2_audio_encoder"])
def test_operations_of_a_picture_are_the_products_that_run(name: str) -> None:
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    for seed in range(3):
        fields = random_tower(name, random.Random(seed)) | ({"vision_use_head": False} if "siglip" in name else {})
        tower, unknown, _ = tower_of({"tower": fields}, "tower", {"type": name})
        config = CONFIG_MAPPING[name](**fields)
        real = MODEL_MAPPING[type(config)]._from_config(config, attn_implementation="eager").eval()
        if "audio" in name:
            inputs = torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions)
        else:
            inputs = torch.randn(1, config.num_channels, config.image_size, config.image_size)
        with counted() as seen:
            real(inputs)
        assert tower.flops() == seen.flops and unknown == []


def test_tokens_that_are_not_fixed_have_no_operations() -> None:
    result = plan.of({"model_type": "qwen2_vl"})
    [tower] = result.model.towers
    assert tower.tokens is None and tower.flops() is None and result.to_dict()["towers"][0]["flops"] is None
    assert f"of which vision {tower.parameter_count():,}: 32 layers of 16 heads" in " ".join(
        str(result).replace("│", " ").split()
    )


def test_text_fields_may_lie_beside_the_towers() -> None:
    """As published Qwen2-VL configs have them."""
    text = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "intermediate_size": 10, "vocab_size": 50}  # fmt: skip
    vision = {"depth": 1, "embed_dim": 8, "num_heads": 2, "hidden_size": 24}
    flat = {"model_type": "qwen2_vl", "vision_config": vision, "image_token_id": 3}
    inside = model_of({**flat, "text_config": {**text, "model_type": "qwen2_vl_text"}})
    beside = model_of({**flat, **text})
    assert (beside.layers, beside.others, beside.towers) == (inside.layers, inside.others, inside.towers)
    assert beside.notes == inside.notes == ()
    real = composite_model("qwen2_vl", composite_config("qwen2_vl", {**text, "vision_config": vision}))
    assert beside.total_parameters() == sum(p.numel() for p in real.parameters())


def test_the_text_model_s_counts_are_its_own() -> None:
    """Cache and operations are the text model's; its towers add parameters alone."""
    fields = random_composite("gemma3", random.Random(7))
    whole = model_of({**fields, "model_type": "gemma3"})
    text = model_of({**fields["text_config"], "tie_word_embeddings": fields["tie_word_embeddings"]})
    assert whole.layers == text.layers and whole.others == text.others
    assert whole.active_parameters() == text.active_parameters()
    assert whole.total_parameters() - text.total_parameters() == whole.tower_parameters() > 0
    base = {**fields, "model_type": "gemma3", "architectures": ["Gemma3Model"], "tie_word_embeddings": False}
    head = {**base, "architectures": ["Gemma3ForConditionalGeneration"]}
    size = fields["text_config"]["vocab_size"] * fields["text_config"]["hidden_size"]
    assert model_of(head).total_parameters() - model_of(base).total_parameters() == size
    other = model_of({**base, "architectures": ["Gemma3ForSequenceClassification"]})
    assert other.notes[0].startswith("the head of 'Gemma3ForSequence")


def test_towers_are_told_as_their_config_has_them() -> None:
    fields = {"model_type": "llava", "text_config": {"model_type": "llama"}, "odd": 1}
    model = model_of({**fields, "vision_config": {"model_type": "clip_vision_model", "stranger": 2}})
    assert model.notes == ("unknown fields, which are assumed to change no count: 'vision_config.stranger', 'odd'",)
    assert set(plan.known()["architectures"]) >= set(COMPOSITE)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llava", "vision_config": {"model_type": "dinov9"}}, "vision_config has the architecture 'dinov9"),
    ({"model_type": "llava", "vision_config": 3}, "vision_config is an object; got 3"),
    ({"model_type": "llava", "text_config": {"model_type": "gemma3"}}, "text_config has the architecture 'gemma3'; "),
    ({"model_type": "paligemma", "text_config": {"model_type": "llama"}}, "text_config has the architecture 'llama'; "),
    ({"model_type": "llava", "vision_feature_layer": []}, "vision_feature_layer names no layer"),
    ({"model_type": "llava", "vision_config": {"image_size": [336, 336]}}, "image_size is a whole number; got [336"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_a_tower_that_is_not_modelled_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        model_of(config)
    assert str(caught.value).startswith(text)


def test_every_tower_belongs_to_a_model() -> None:
    used = {spec["type"] for name in COMPOSITE for spec in architectures()[name]["towers"].values()}
    assert used == set(known_towers())


def test_a_head_that_is_never_tied() -> None:
    """Qwen2-Audio's class ties nothing, whatever its config says."""
    tied, untied = (
        {**random_composite("qwen2_audio", random.Random(1)), "tie_word_embeddings": x} for x in (True, False)
    )
    sizes = [model_of({**fields, "model_type": "qwen2_audio"}).total_parameters() for fields in (tied, untied)]
    real = composite_model("qwen2_audio", composite_config("qwen2_audio", tied))
    assert sizes == [sum(p.numel() for p in real.parameters())] * 2


@pytest.mark.parametrize("name", ["llava", "llava_next", "mistral3"])
def test_both_matrices_of_a_projector_have_a_bias(name: str) -> None:
    with_bias, without = (
        model_of({"model_type": name, "multimodal_projector_bias": bias}).total_parameters() for bias in (True, False)
    )
    assert with_bias - without == 2 * model_of({"model_type": name}).layers[0].d_model
