"""Which keys of a config are taken over: an allow-list, so that none can name code, kernels or further files."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import transformers
from transformers import PreTrainedConfig, modeling_rope_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..errors import ModelError
from ..models.architectures import UNDECLARED
from .folder import check_numbers

DROPPED = (
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "torchscript",
    "transformers_version",
)
CHOOSES = ("_implementation", "_map", "_plan", "_path", "_file", "kernels", "kernel_config", "remote_code")
"""How keys end that name code or further files."""

WORD = re.compile(r"[A-Za-z0-9_.+-]{1,80}")
SPECIAL = re.compile(r"[a-z_]{1,40}_token_id")
LABELS = ("id2label", "label2id")  # their keys are a user's words
ADDED_TOKEN = ("__type", "AddedToken")  # marks a special token; without it transformers refuses a tokenizer's settings


def known_keys(config_class: type[PreTrainedConfig]) -> set[str]:
    """The keys that a config class declares, or reads by name in its own file (old spellings); all others are dropped.

    So nothing in config.json can name code, kernels, further files or another attention implementation.
    """
    declared = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    source = inspect.getsource(inspect.getmodule(config_class) or config_class) + inspect.getsource(modeling_rope_utils)
    read = {"head_dim", *re.findall(r'"([a-z][a-z0-9_]*)"', source)}  # models read head_dim, declared or not
    read |= UNDECLARED.get(getattr(config_class, "model_type", ""), frozenset())
    return {key for key in declared | read if not chooses(key)} - {*DROPPED}


def chooses(key: str) -> bool:
    """Whether a key may name code or further files."""
    return key.startswith("_") or key.endswith(CHOOSES)


def harmless(value: Any) -> Any:
    """The same without keys that choose, however deep."""
    if isinstance(value, list):
        return [harmless(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item if key in LABELS else harmless(item)
        for key, item in value.items()
        if key in LABELS or not chooses(key) or (key, item) == ADDED_TOKEN
    }


def taken(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """config.json as it may be handed on: what the model's class in transformers knows, every size within bounds."""
    return _sizes(raw, class_of_config(raw["model_type"], where), where) | _words(raw, where)


def class_of_config(model_type: str, where: str) -> type[PreTrainedConfig]:
    """The class that transformers has for it."""
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    raise ModelError(
        f"{where}: transformers {transformers.__version__} knows no model_type {model_type[:60]!r}; headwise runs "
        "no code from a model folder, so upgrade transformers, or use a checkpoint in its own format"
    )


def _sizes(raw: dict[str, Any], config_class: Any, where: str) -> dict[str, Any]:
    """Of one config, and of those that it is made of."""
    check_numbers(raw, config_class.attribute_map, where)
    values = {}
    tokens = {key for key in raw if SPECIAL.fullmatch(key)}  # of any model; some read them from its config
    for key in sorted((known_keys(config_class) | tokens) & raw.keys()):
        inner = config_class.sub_configs.get(key)
        if inner is None or not isinstance(raw[key], dict):
            values[key] = raw[key] if key in LABELS else harmless(raw[key])
            continue
        if not hasattr(inner, "attribute_map"):  # AutoConfig: it is for the folder to say which
            inner = class_of_config(str(raw[key].get("model_type")), f"{where}: {key}")
        values[key] = _sizes(raw[key], inner, where) | _words(raw[key], where)
    return values


def _words(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """What names the model and its numbers; and `pruned_heads`, by which reshape refuses old checkpoints."""
    values = {key: raw[key] for key in ("pruned_heads",) if isinstance(raw.get(key), dict)}
    names = raw.get("architectures")
    if isinstance(names, list):
        values["architectures"] = [name for name in names if isinstance(name, str) and name.isidentifier()]
    for key in ("model_type", "dtype", "torch_dtype", "transformers_version"):
        text = raw.get(key)
        if isinstance(text, str):
            if not WORD.fullmatch(text):
                raise ModelError(f"{where}: {key} is {text[:40]!r}, and a plain word is needed; download the file anew")
            values[key] = text
    return values
