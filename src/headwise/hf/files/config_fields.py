"""The allow-list of config keys, so that no key can name code, kernels or further files."""

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
"""The endings of keys that name code or further files."""

WORD = re.compile(r"[A-Za-z0-9_.+-]{1,80}")
SPECIAL = re.compile(r"[a-z_]{1,40}_token_id")
LABELS = ("id2label", "label2id")  # Users choose the keys of these tables.
MARKS = (("__type", "AddedToken"), ("__float__", "Infinity"), ("__float__", "-Infinity"), ("__float__", "NaN"))
"""Pairs that transformers writes and needs: the mark of a special token, and numbers that JSON does not have."""


def known_keys(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the keys that a config class declares or reads by name in its own file (old spellings).

    All other keys are dropped, so config.json cannot name code, kernels, further files or an attention implementation.
    """
    declared = {field.name for field in fields(config_class)} | set(config_class.attribute_map)
    source = inspect.getsource(inspect.getmodule(config_class) or config_class) + inspect.getsource(modeling_rope_utils)
    read = {"head_dim", *re.findall(r'"([a-z][a-z0-9_]*)"', source)}  # Models read head_dim even if it is undeclared.
    read |= UNDECLARED.get(getattr(config_class, "model_type", ""), frozenset())
    return {key for key in declared | read if not chooses(key)} - {*DROPPED}


def chooses(key: str) -> bool:
    """Return whether a key may name code or further files."""
    return key.startswith("_") or key.endswith(CHOOSES)


def harmless(value: Any) -> Any:
    """Return the JSON value without keys that may name code or further files, at any depth."""
    if isinstance(value, list):
        return [harmless(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item if key in LABELS else harmless(item)
        for key, item in value.items()
        if key in LABELS or not chooses(key) or (key, item) in MARKS
    }


def with_numbers(value: Any) -> Any:
    """Return a JSON value with the numbers, such as infinity, that transformers writes as ``{"__float__": ...}``."""
    if isinstance(value, list):
        return [with_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value.items())) in MARKS[1:]:
        return float(value["__float__"])
    return {key: with_numbers(item) for key, item in value.items()}


def taken(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return config.json with only the keys that its config class uses; raise ModelError for sizes out of bounds."""
    return _sizes(raw, class_of_config(raw["model_type"], where), where) | _words(raw, where)


def class_of_config(model_type: str, where: str) -> type[PreTrainedConfig]:
    """Return the config class of transformers for a model_type; raise ModelError if there is none."""
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    raise ModelError(
        f"{where}: transformers {transformers.__version__} knows no model_type {model_type[:60]!r}; headwise runs "
        "no code from a model folder, so upgrade transformers, or use a checkpoint in its own format"
    )


def _sizes(raw: dict[str, Any], config_class: Any, where: str) -> dict[str, Any]:
    """Return the allowed keys of a config and of its sub-configs, after a check of their sizes."""
    check_numbers(raw, config_class.attribute_map, where)
    values = {}
    tokens = {key for key in raw if SPECIAL.fullmatch(key)}  # Some models read undeclared token ids from the config.
    for key in sorted((known_keys(config_class) | tokens) & raw.keys()):
        inner = config_class.sub_configs.get(key)
        if inner is None or not isinstance(raw[key], dict):
            values[key] = raw[key] if key in LABELS else harmless(raw[key])
            continue
        if not hasattr(inner, "attribute_map"):  # AutoConfig: the folder names the model_type.
            inner = class_of_config(str(raw[key].get("model_type")), f"{where}: {key}")
        values[key] = _sizes(raw[key], inner, where) | _words(raw[key], where)
    return values


def _words(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the keys that name the model and its dtype, and `pruned_heads`, for which reshape refuses checkpoints."""
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
