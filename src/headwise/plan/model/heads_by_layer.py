"""Encoders whose layers have their own numbers of heads: how their configs differ from the original architecture's.

`headwise prune` writes such checkpoints, and `headwise.hf` registers the classes that load them. The config keeps the
original number of heads, which gives the size of a head, and lists the heads of each layer beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config.fields import Fields, architectures
from ..shape import short

PREFIX, CLASS_PREFIX = "headwise_", "Headwise"
FIELD, NOTE = "heads_by_layer", "loads_with"
HOW = "pip install 'headwise[hf]', and `import headwise.hf` before from_pretrained"
"""What the config says under `NOTE`, for a reader whose transformers does not know the model_type."""


def has_heads_by_layer(model_type: str) -> bool:
    """Return whether there are classes of this architecture that have their own number of heads in each layer."""
    return bool(architectures().get(model_type, {}).get("heads_by_layer"))


def base_type(model_type: object) -> str | None:
    """Return the original architecture of such a ``model_type``; None for any other."""
    if not isinstance(model_type, str) or not model_type.startswith(PREFIX):
        return None
    base = model_type.removeprefix(PREFIX)
    return base if has_heads_by_layer(base) else None


def by_layer_config(config: Mapping[str, Any], heads: Sequence[int]) -> dict[str, Any]:
    """The config of the same model with these numbers of heads, layer by layer; `config` may be such a one already."""
    base = base_type(config["model_type"]) or config["model_type"]
    made = {**config, "model_type": PREFIX + base, FIELD: list(heads), NOTE: HOW}
    if config.get("architectures"):
        made["architectures"] = [CLASS_PREFIX + name.removeprefix(CLASS_PREFIX) for name in config["architectures"]]
    return made


def original_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[int] | None]:
    """(the config under the original architecture, heads of each layer); the config itself and None for any other.

    Raises:
        ValueError: in one line: heads that are not a number for each layer, of 1 to the original number.
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
    """Return the heads of each layer; raise ValueError for something else than a number of 1 to `most` for each.

    >>> check_heads_by_layer([3, 0], 2, 4)
    Traceback (most recent call last):
    ValueError: heads_by_layer has a number of 1 to 4 for each of 2 layers; got [3, 0]
    """
    numbers = isinstance(heads, list) and all(type(n) is int and 1 <= n <= most for n in heads)
    if not isinstance(heads, list) or not numbers or len(heads) != layers:
        raise ValueError(f"{FIELD} has a number of 1 to {most} for each of {layers} layers; got {short(heads)}")
    return list(heads)
