"""Random configs of models with towers, and the models transformers builds of them."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import transformers
from plan_models import random_config

from headwise.plan.config.fields import architectures
from headwise.plan.model.towers import known_towers

COMPOSITE = [name for name, about in architectures().items() if "text" in about and about["towers"]]
TEXTS = ["llama", "qwen2", "mistral"]  # of models that take any


def random_composite(name: str, dice: random.Random) -> dict[str, Any]:
    """A small valid config of a model with towers: its own fields, those of the text model and of each tower."""
    about = architectures()[name]
    spec = about["text"]
    kind = spec["type"]
    if spec.get("any"):
        kind = dice.choice(spec["any"] if isinstance(spec["any"], list) else [kind, *TEXTS])
    text = random_config(spec.get("as", {}).get(kind, kind), dice)
    if spec.get("as", {}).get(kind, kind) != kind:
        text = {key: value for key, value in text.items() if key not in ("layer_types", "tie_word_embeddings")}
        if "head_dim" not in spec["defaults"]:
            text.pop("head_dim", None)
        else:
            text = {key: value for key, value in text.items() if "window" not in key}
    config: dict[str, Any] = {spec["key"]: {**text, "model_type": kind, "pad_token_id": 0}}
    for key in about.get("uncounted", {}):
        config[key] = None
    for key, tower in about["towers"].items():
        config[key] = random_tower(tower["type"], dice)
    for field, default in about["defaults"].items():
        if isinstance(default, bool):
            config[field] = dice.random() < 0.5
        elif field == "vision_feature_layer":
            config[field] = dice.choice([-1, [0, 1], [-1]])
        else:
            config[field] = dice.randint(1, 9)
    return config


def random_tower(kind: str, dice: random.Random) -> dict[str, Any]:
    """A small valid config of a tower."""
    about = known_towers()[kind]
    standard = {own: usual for usual, own in about.get("names", {}).items()}
    back = {new: old for old, new in about.get("rename", {}).items()}
    heads = dice.choice([1, 2, 4])
    config: dict[str, Any] = {"model_type": kind}
    for field, default in about["defaults"].items():
        usual = standard.get(field, field)
        exact = {"hidden_size": heads * 4 * dice.randint(1, 3), "num_attention_heads": heads, "patch_size": 4}
        exact |= {"image_size": 4 * dice.randint(2, 5), "num_hidden_layers": dice.randint(1, 3), "mlp_ratio": 2}
        exact |= {"head_dim": 8, "num_key_value_heads": heads}
        if isinstance(default, bool):
            config[field] = dice.random() < 0.5
        elif field == "merge_kernel_size":
            config[field] = [dice.randint(1, 3), dice.randint(1, 3)]
        elif isinstance(default, list):
            config[field] = sorted({0, dice.randint(0, 2)})
        else:
            config[back.get(field, field)] = exact.get(usual, dice.randint(2, 9))
    return config


def composite_config(name: str, fields: dict[str, Any]) -> Any:
    """transformers' config of those fields."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name](**copy.deepcopy(fields))


def composite_model(name: str, config: Any) -> Any:
    """transformers' model with its towers, on the meta device."""
    kind = getattr(transformers, architectures()[name]["classes"]["lm"])
    with torch.device("meta"):
        return kind._from_config(config, attn_implementation="eager").eval()
