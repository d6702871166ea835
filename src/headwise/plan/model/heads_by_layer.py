"""Configs of encoders whose layers have different numbers of heads, and their difference from the original configs.

`headwise prune` writes such checkpoints, and `headwise.hf` registers the classes that load them. The config keeps the
original number of heads, which determines the head dim, and lists the number of heads of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config.fields import Fields, architectures
from ..shape import short

PREFIX, CLASS_PREFIX = "headwise_", "Headwise"
FIELD, NOTE = "heads_by_layer", "loads_with"
HOW = "pip install 'headwise[hf]', and `import headwise.hf` before from_pretrained"
"""The text under `NOTE` in the config, for readers whose transformers does not have the model_type."""


def has_heads_by_layer(model_type: str) -> bool:
    """Return whether classes of this architecture exist in which each layer has its own number of heads."""
    return bool(architectures().get(model_type, {}).get("heads_by_layer"))


def base_type(model_type: object) -> str | None:
    """Return the original architecture of such a ``model_type``; None for any other."""
    if not isinstance(model_type, str) or not model_type.startswith(PREFIX):
        return None
    base = model_type.removeprefix(PREFIX)
    return base if has_heads_by_layer(base) else None


def by_layer_config(config: Mapping[str, Any], heads: Sequence[int]) -> dict[str, Any]:
    """Return the config with these numbers of heads for each layer; `config` may already be such a config."""
    base = base_type(config["model_type"]) or config["model_type"]
    made = {**config, "model_type": PREFIX + base, FIELD: list(heads), NOTE: HOW}
    if config.get("architectures"):
        made["architectures"] = [CLASS_PREFIX + name.removeprefix(CLASS_PREFIX) for name in config["architectures"]]
    return made


def original_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[int] | None]:
    """Return the config of the original architecture and the heads of each layer; or the config itself and None.

    Raises:
        ValueError: a one-line message: `heads_by_layer` is not a number from 1 to the original one for each layer.
    """
    base = base_type(config.get("model_type"))
    if base is None:
        return config, None
    inner = {name: value for name, value in config.items() if name not in (FIELD, NOTE)} | {"model_type": base}
    names = config.get("architectures")
    if isinstance(names, list):
        inner["architectures"] = [name.removeprefix(CLASS_PREFIX) if isinstance(name, str) else name for name in names]
    fields = Fields(inner, architectures()[base])
    most, layers, heads = fields.size("num_attention_heads"), fields.size("num_hidden_layers"), config.get(FIELD)
    return inner, [most] * layers if heads is None else check_heads_by_layer(heads, layers, most)


def check_heads_by_layer(heads: object, layers: int, most: int) -> list[int]:
    """Return the number of heads of each layer; raises ValueError if any is not between 1 and `most`.

    >>> check_heads_by_layer([3, 0], 2, 4)
    Traceback (most recent call last):
    ValueError: heads_by_layer is a list of numbers from 1 to 4, one for each of 2 layers; got [3, 0]
    """
    numbers = isinstance(heads, list) and all(type(n) is int and 1 <= n <= most for n in heads)
    if not isinstance(heads, list) or not numbers or len(heads) != layers:
        raise ValueError(
            f"{FIELD} is a list of numbers from 1 to {most}, one for each of {layers} layers; got {short(heads)}"
        )
    return list(heads)
