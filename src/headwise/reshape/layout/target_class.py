"""Find the class of transformers that loads a model with other numbers of heads and computes the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...plan.config.fields import architectures
from ...plan.model.heads_by_layer import HOW, base_type, by_layer_config
from .families import CheckpointLayout, with_heads

Counts = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Target:
    """The class that loads the result.

    Attributes:
        model_type: `model_type` of the class.
        config: The whole config.json.
        why: Why it is not the original class; empty if it is.
        transposed: Suffixes of the names of weights that this class stores transposed.
    """

    model_type: str
    config: Mapping[str, Any]
    why: str = ""
    transposed: tuple[str, ...] = ()


def target(family: CheckpointLayout, counts: Counts) -> Target:
    """Return the class that loads these numbers of (query, key-value) heads, by the config's fields (`Family.counts`).

    Raises:
        ValueError: in one line: no class loads them, and why.
    """
    why = refusal(family, counts)
    if not why:
        return Target(family.model_type, family.whole(with_heads(family, counts)))
    if family.by_layer and all(heads == kv_heads for heads, kv_heads in counts.values()):
        config = by_layer_config(family.config, [counts[field][0] for field in family.counts])
        return Target(config["model_type"], config, f"{why}. To load it: {HOW}")
    reasons = []
    for choice in family.about.get("instead", ()):
        reason = _misfit(family, counts, choice)
        if not reason:
            return _instead(family, counts, choice, why)
        reasons.append(f"{choice['class']} {reason}")
    others = f"; {'; '.join(reasons)}" if reasons else ""
    raise ValueError(f"no class of transformers loads this: {why}{others}")


def loads(family: CheckpointLayout, counts: Counts) -> bool:
    """Return whether some class loads these numbers of heads."""
    try:
        target(family, counts)
    except ValueError:
        return False
    return True


def refusal(family: CheckpointLayout, counts: Counts) -> str:
    """Return why the model's own class does not load these numbers; empty if it does."""
    for field, layers in family.counts.items():
        sizes, (heads, kv_heads) = layers[0].sizes, counts[field]
        if (heads, kv_heads) == (sizes.H, sizes.K):
            continue
        if kv_heads not in (heads, sizes.K) and "num_key_value_heads" not in family.fields.defaults:
            return f"{family.model_type} has no field for a number of key-value heads"
        if heads != sizes.H and not family.has_head_dim and not base_type(family.model_type):
            return (
                f"{family.model_type} has no field for the size of a head and takes d_model / "
                f"{family.field_name(field)}, which is {family.d_model} / {heads} and not {sizes.D}"
            )
        if family.about.get("loads") == "divides" and family.d_model % heads:
            split = f"{family.d_model} / {heads} is not whole"
            return f"{family.model_type} requires d_model to be a multiple of {field}, and {split}"
    return ""


def _misfit(family: CheckpointLayout, counts: Counts, choice: Mapping[str, Any]) -> str:
    """Return why another class cannot replace the model's class; empty if it can."""
    about, fields = architectures()[choice["class"]], family.fields
    for name, value in choice.get("when", {}).items():
        actual = fields.config.get(name, fields.defaults.get(name, value))
        if actual != value:
            return f"does so only with {name} = {value}, and it is {actual}"
    head = _head_without_class(family, about)
    if head:
        return f"has no class with the head of {head}"
    for field, (heads, kv_heads) in counts.items():
        sizes = family.counts[field][0].sizes
        if kv_heads != choice.get("kv_heads", kv_heads):
            return f"does so only with num_key_value_heads = {choice['kv_heads']}, and it is {kv_heads}"
        takes_dim = "head_dim" in about["defaults"] or "head_dim" in about.get("names", {})
        if not takes_dim and heads * sizes.D != family.d_model:
            return f"has no field for the size of a head, and {heads} * {sizes.D} is not d_model = {family.d_model}"
    return ""


def _head_without_class(family: CheckpointLayout, about: Mapping[str, Any]) -> str:
    """Return the checkpoint's class if it has a task head that the other architecture lacks; otherwise an empty text.

    The text model of a multimodal model is not checked, because the task head belongs to the outer model.
    """
    old = family.fields.architecture["classes"]
    stem = old["config"].removesuffix("Config")
    for name in () if family.outer else family.config.get("architectures") or ():
        own = name.startswith(stem) and name not in (old["lm"], old["base"])
        if own and name.removeprefix(stem) not in about.get("heads", ()):
            return str(name)
    return ""


def _instead(family: CheckpointLayout, counts: Counts, choice: Mapping[str, Any], why: str) -> Target:
    """Return the same model as another class: its fields, defaults that differ between the classes, and set values."""
    [field] = family.counts
    sizes, (_, kv_heads) = family.counts[field][0].sizes, counts[field]
    old, new = family.fields.architecture, architectures()[choice["class"]]
    config = {**_defaults(family, new), **choice.get("defaults", {}), **with_heads(family, counts)}
    if "num_key_value_heads" in new["defaults"]:
        config["num_key_value_heads"] = kv_heads
    if "head_dim" in new["defaults"]:
        config["head_dim"] = sizes.D
    for name in choice.get("when", {}):  # the new class always has this value
        if name not in new["defaults"]:
            config.pop(name, None)
    config |= {name: _value(value, sizes.D) for name, value in choice["set"].items()}
    config["model_type"] = choice["class"]
    config["architectures"] = [
        _class(name, old["classes"], new["classes"]) for name in config.get("architectures") or []
    ]
    if not config["architectures"]:
        del config["architectures"]
    whole = family.whole(config)
    return Target(str(whole["model_type"]), whole, why, tuple(choice.get("transposed", ())))


def _defaults(family: CheckpointLayout, new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are missing in the config and have another default in the new class."""
    fields = family.fields
    return {
        name: value
        for name, value in fields.defaults.items()
        if name not in fields.config and new["defaults"].get(name, value) != value
    }


def _value(value: Any, dim: int) -> Any:
    """Return the value to set; "{D} ** -0.5" is computed from the head dim."""
    return dim**-0.5 if value == "{D} ** -0.5" else value


def _class(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the name of a model class, such as one with a task head, in the new architecture."""
    by_name = {old[kind]: new[kind] for kind in ("lm", "base")}
    before, after = old["config"].removesuffix("Config"), new["config"].removesuffix("Config")
    return by_name.get(name) or (after + name.removeprefix(before) if name.startswith(before) else name)
