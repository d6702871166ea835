"""Tiny random models of every architecture that transformers knows: what becomes of a config, by rules kept as data.

`hf_table_rules.json` has the rules. ``sizes`` caps whole numbers by the name of the field; ``models`` has what single
model types need beside that, each with its reason, and holds wherever a config of that type stands in another.
"""

from __future__ import annotations

import importlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import getattribute_from_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

RULES: dict[str, Any] = json.loads((Path(__file__).parent / "hf_table_rules.json").read_text("utf8"))
LAYERS, MOST_LAYERS = 2, 4
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "depth", "decoder_layers")
NOT_CARRIED = {
    "architectures", "id2label", "label2id", "label_names", "num_labels", "out_features", "stage_names", "dtype",
    "per_layer_config", "transformers_version", "model_type", "rope_theta",
}  # fmt: skip
"""Fields of `to_dict` that the config works out anew."""
TOKENS = re.compile(r"(.+?)_(token_id|token_index|index)$")
FIRST_MARK = 100
"""Ids of tokens with a meaning to the model (an image's place, say) begin here; texts are drawn from below."""
MOST_PARAMETERS = 30_000_000
EXPERTS = {"experts_implementation": "eager"}
"""The others have no float64."""


# -- which architectures ----------------------------------------------------------------------------------------------


@cache
def classes() -> dict[str, str]:
    """model_type -> the class that `AutoModel` builds, or the first other auto class where `AutoModel` has none."""
    tables = sorted(name for name in vars(modeling_auto) if re.fullmatch(r"MODEL_.*_NAMES", name))
    tables.sort(key=lambda name: (name != "MODEL_MAPPING_NAMES", "CAUSAL_LM" not in name, "PRETRAINING" in name, name))
    chosen: dict[str, str] = {}
    for table in tables:
        for model_type, names in getattr(modeling_auto, table).items():
            first = names if isinstance(names, str) else names[0]
            if model_type in CONFIG_MAPPING_NAMES and first is not None:
                chosen.setdefault(model_type, first)
    return dict(sorted(chosen.items()))


def parts() -> list[str]:
    """Model types that no auto class builds alone: towers and decoders inside of other models."""
    return sorted(CONFIG_MAPPING_NAMES.keys() - classes().keys())


# -- configs ----------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """Every architecture, and the variants of some that the rules name."""
    return [*classes(), *RULES["variants"]]


def special(name: str) -> dict[str, Any]:
    """What one model type, or a variant of one, needs beside the rules."""
    variant = RULES["variants"].get(name, {})
    case: dict[str, Any] = RULES["models"].get(variant.get("of", name), {})
    return case | variant | {"config": case.get("config", {}) | variant.get("config", {})}


def model_type_of(name: str) -> str:
    """A variant's model type; else the name itself."""
    kind: str = RULES["variants"].get(name, {}).get("of", name)
    return kind


def tiny_config(name: str) -> PreTrainedConfig:
    """The config of an architecture, small."""
    cls, case = CONFIG_MAPPING[model_type_of(name)], special(name)
    start = case.get("start", {})
    return cls(**merged(start | smaller(cls(**start)), case["config"]))


def smaller(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments that make a config of the same kind small."""
    fields = config.to_dict()
    layers = {name: fields[name] for name in LAYER_COUNTS if isinstance(fields.get(name), int)}
    stages = fields.get("out_indices") if "stage_names" in fields else None
    most = max([LAYERS, len(stages or ()), *(len(set(map(str, x))) for x in per_layer(fields, layers))])
    count = min(most, MOST_LAYERS)
    changed: dict[str, Any] = {}
    if stages:
        cut = any(value > count for value in layers.values())
        changed["out_indices"] = list(range(count - len(stages) + 1, count + 1)) if cut else list(stages)
    for name, value in fields.items():
        if value is None and name in RULES["nones"]:
            changed[name] = RULES["nones"][name]
        if name in NOT_CARRIED or name in changed or name.startswith("_") or value is None or isinstance(value, bool):
            continue
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig):
            changed[name] = {"model_type": inner.model_type} | smaller(inner) if inner.model_type else smaller(inner)
        elif isinstance(value, dict):
            if name in ("rope_parameters", "rope_scaling"):
                sections = "mrope_section" in (type(config).ignore_keys_at_rope_validation or ())
                changed[name] = rotation(value, fields, sections)
        elif TOKENS.match(name):
            changed[name] = token_id(name, value)
        elif isinstance(value, int):
            small = smaller_size(name, value)
            if small is not None:
                changed[name] = max(small, count) if name in layers and value >= count else small
        elif isinstance(value, list | tuple) and value:
            changed |= smaller_list(name, list(value), set(layers.values()), count)
    if {"qk_rope_head_dim", "kv_lora_rank"} <= fields.keys():
        changed.pop("head_dim", None)
        changed.pop("qk_head_dim", None)
        if "num_attention_heads" in changed and "num_key_value_heads" in changed:
            changed["num_key_value_heads"] = changed["num_attention_heads"]
    return merged(changed, special(config.model_type).get("config", {}))


def merged(changed: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The arguments with those of a special case put in; None there takes one out."""
    whole = dict(changed)
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(whole.get(name), dict):
            whole[name] = merged(whole[name], value)
        elif value == "default":
            whole.pop(name, None)
        else:
            whole[name] = value
    return whole


def rotation(value: dict[str, Any], fields: dict[str, Any], sections: bool) -> dict[str, Any]:
    """The parameters of rotations with sections that sum to half of what is rotated of a head."""
    changed = {k: rotation(v, fields, sections) if isinstance(v, dict) else v for k, v in value.items()}
    if isinstance(changed.get("mrope_section"), list) or (sections and "rope_type" in changed):
        part = changed.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
        half = int(RULES["nones"]["head_dim"] * part) // 2
        third = half // 3
        changed["mrope_section"] = [half - 2 * third, third, third][: len(changed.get("mrope_section", [1, 1, 1]))]
    return changed


def per_layer(fields: dict[str, Any], layers: dict[str, int]) -> list[list[Any]]:
    """The lists that say something of each layer."""
    lists = [x for x in fields.values() if isinstance(x, list | tuple) and len(x) in layers.values()]
    return [list(x) for x in lists if len(x) > MOST_LAYERS and all(isinstance(y, str | bool) for y in x)]


def smaller_size(name: str, value: int) -> int | None:
    """What a whole number becomes; None: it stays."""
    for pattern, most in RULES["sizes"]:
        if re.fullmatch(pattern, name):
            return min(value, most)
    return None


def smaller_list(name: str, value: list[Any], old: set[int], count: int) -> dict[str, Any]:
    if len(value) in old and len(value) > LAYERS:
        distinct = [x for i, x in enumerate(value) if x not in value[:i]]
        return {name: (distinct + value)[:count] if len(distinct) > 1 else value[:count]}
    for pattern, becomes in RULES["lists"].items():
        if re.fullmatch(pattern, name):
            if isinstance(becomes, list):
                return {name: becomes}
            return {name: [min(x, becomes) if isinstance(x, int) else x for x in value]}
    return {}


def token_id(name: str, value: Any) -> Any:
    """Ids that fit the small vocabulary: the same name has the same id in every part of a model."""
    if isinstance(value, list):
        return [token_id(name, value[0])] if value else value
    if not isinstance(value, int) or value < 0:
        return value
    stem = TOKENS.match(name).group(1)
    known = ["pad", "bos", "eos", *RULES["tokens"]]
    if stem == "decoder_start":
        return 1
    if stem not in known:
        return min(value, 3)
    at = known.index(stem)
    return at if at < 3 else FIRST_MARK + at - 3


# -- models -----------------------------------------------------------------------------------------------------------


def model_class(name: str) -> type[PreTrainedModel]:
    model_type = model_type_of(name)
    module = importlib.import_module(f"transformers.models.{model_type_to_module_name(model_type)}")
    return getattribute_from_module(module, special(name).get("class", classes()[model_type]))


def build(name: str) -> PreTrainedModel:
    """A tiny random model on eager attention, in evaluation mode."""
    config, cls = tiny_config(name), model_class(name)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(config, attn_implementation="eager", **EXPERTS).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(3)
    model = cls._from_config(tiny_config(name), attn_implementation="eager", **EXPERTS).eval()
    stir(model)
    return model


def build_like(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The same model, built on headwise."""
    cls = model_class(name)
    ours = cls._from_config(tiny_config(name), attn_implementation="headwise", **EXPERTS).eval()
    ours.load_state_dict(model.state_dict())
    return ours


def stir(model: nn.Module) -> None:
    """Weights of unit gain in place of the timid ones of an initialisation; vectors (norms, biases, sinks) moved."""
    done: set[int] = set()
    with torch.no_grad():
        for module in model.modules():
            conv = isinstance(module, nn.modules.conv._ConvNd)
            for weight in module.parameters(recurse=False):
                if id(weight) in done or not weight.is_floating_point():
                    continue
                done.add(id(weight))
                if weight.ndim > 1:
                    weight.normal_(std=(weight[0].numel() if conv else weight.shape[-1]) ** -0.5)
                else:
                    weight.add_(0.2 * torch.randn_like(weight))
