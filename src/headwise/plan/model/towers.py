"""The towers of a multimodal model: encoders of images or sound, and their connectors to the text model."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.fields import Fields
from ..shape import short
from .feed_forward import feed_forward
from .layer import AttentionLayer
from .parts import Part, linear, parameters, repeated, table, vector
from .single_stack import norm_size, plain_layer

STREAM = "tower"  # The tokens of the text do not use these parts.


@dataclass(frozen=True)
class Tower:
    """One encoder of a multimodal model.

    Attributes:
        name: The name in the config, such as ``vision_config``.
        model_type: Its architecture.
        layers: Its attention layers.
        others: All its other parts, including its connector to the text model.
        tokens: Tokens of one image or piece of sound if the config fixes them; else None.
    """

    name: str
    model_type: str
    layers: tuple[AttentionLayer, ...]
    others: tuple[Part, ...]
    tokens: int | None

    def parts(self) -> list[Part]:
        """Return every part, attention first."""
        return [part for layer in self.layers for part in layer.parts()] + list(self.others)

    def parameter_count(self) -> int:
        """Return the number of parameters of all parts."""
        return parameters(self.parts())

    def flops(self) -> int | None:
        """Return the FLOPs of one image or piece of sound, up to the last layer; None if its tokens are not fixed."""
        if self.tokens is None:
            return None
        times = {"mlp": self.tokens, "patches": self.tokens, "conv1": 2 * self.tokens, "conv2": self.tokens}
        times["patches"] -= any(part.name == "class_token" for part in self.others)
        macs = sum(part.macs * times.get(part.name, 0) for part in self.others)
        for layer in self.layers:
            macs += sum(part.macs for part in layer.parts()) * self.tokens
            macs += layer.score_macs() * layer.pairs(self.tokens, self.tokens)
        return 2 * macs

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as a dict for JSON."""
        return {
            "name": self.name,
            "model_type": self.model_type,
            "layers": len(self.layers),
            "num_heads": self.layers[0].num_heads,
            "d_model": self.layers[0].d_model,
            "parameters": self.parameter_count(),
            "tokens": self.tokens,
            "flops": self.flops(),
        }


@functools.cache
def known_towers() -> dict[str, dict[str, Any]]:
    """Return the entries of `towers.json` by ``model_type``, with the names of `fields.architectures` and others.

    ``patch``: the patch embedding: its ``bias``, ``time`` (the field with frames per patch); ``positions``: ``grid``,
    or the field with their number; ``class_token``; ``before`` and ``after``: norms around the layers; ``pool``: the
    flag of an attention pooling head; ``merge``: how neighbouring patches are merged; ``adapter``; ``sound``:
    convolutions; ``rename``: a map from field names of this tower to the usual names.
    """
    return json.loads((Path(__file__).parent / "towers.json").read_bytes())


def tower_of(config: Mapping[str, Any], key: str, spec: Mapping[str, Any]) -> tuple[Tower, list[str], Fields]:
    """Return the tower that a config's `key` describes, its unknown fields, and its fields.

    Raises:
        ValueError: a tower of an unknown architecture, or a field with an invalid value.
    """
    inner = config.get(key)
    inner = spec.get("missing", {}) if inner is None else inner
    if not isinstance(inner, Mapping):
        raise ValueError(f"{key} is an object; got {short(inner)}")
    kind = inner.get("model_type", spec["type"])
    kind = spec.get("old", {}).get(kind, kind) if isinstance(kind, str) else kind
    about = known_towers().get(kind) if isinstance(kind, str) else None
    if about is None:
        raise ValueError(f"{key} has the architecture {short(kind)}; supported are {', '.join(known_towers())}")
    rename: dict[str, str] = about.get("rename", {})
    fields = Fields({rename.get(str(name), str(name)): value for name, value in inner.items()}, about)
    one = plain_layer(fields, "encoder")
    layers = tuple(replace(one, index=i) for i in range(fields.size("num_hidden_layers")))
    others = tuple(replace(part, stream=STREAM) for part in _others(fields, len(layers)))
    return Tower(key, kind, layers, others, _tokens(fields)), fields.unknown(), fields


def _tokens(fields: Fields) -> int | None:
    about = fields.architecture
    if "sound" in about:
        return fields.size(about["sound"]["positions"])
    return _grid(fields) if about.get("positions") == "grid" else None


def _grid(fields: Fields) -> int:
    image, patch = fields.size("image_size"), fields.size("patch_size")
    return (image // patch) ** 2 + bool(fields.architecture.get("class_token"))


def _others(fields: Fields, layers: int) -> Iterator[Part]:
    about, width = fields.architecture, fields.size("hidden_size")
    if "sound" in about:
        yield linear("conv1", "embedding", 3 * fields.size(about["sound"]["channels"]), width, bias=True)
        yield linear("conv2", "embedding", 3 * width, width, bias=True)
        yield table("positions", fields.size(about["sound"]["positions"]), width)
    if "patch" in about:
        times = fields.size(about["patch"]["time"]) if "time" in about["patch"] else 1
        cells = (about["patch"].get("channels") or fields.size("num_channels")) * fields.size("patch_size") ** 2 * times
        yield linear("patches", "embedding", cells, width, bias=about["patch"]["bias"])
    if about.get("class_token"):
        yield vector("class_token", "embedding", width)
    if about.get("positions"):
        yield table("positions", _position_rows(fields, about["positions"]), width)
    inner = fields.size("intermediate_size") if "times" not in about else width * fields.size(about["times"])
    gated = about.get("mlp", "gated") == "gated"
    for _ in range(layers):
        yield feed_forward("mlp", width, inner, gated=gated, bias=fields.choice("mlp_bias"), stream=STREAM)
        yield vector("norms", "norm", about.get("layer_norms", 2) * norm_size(fields, width))
    for norm in ("before", "after"):
        if about.get(norm):
            yield vector(f"norm_{norm}", "norm", norm_size(fields, width))
    if fields.choice("pool"):
        yield from _pool(fields, width, inner)
    if "merge" in about:
        yield from _merge(fields, about["merge"], width)
    if "adapter" in about:
        middle, out = (fields.size(name) for name in about["adapter"])
        yield linear("adapter", "embedding", inner, middle)
        yield linear("adapter", "embedding", out, out)


def _position_rows(fields: Fields, positions: str | list[str]) -> int:
    """Return the rows of the table of positions: the cells of the image, a field, or a product of fields."""
    if positions == "grid":
        return _grid(fields)
    if isinstance(positions, str):
        return fields.size(positions) * int(fields.architecture.get("position_tables", 1))
    return math.prod(fields.size(name) for name in positions)


def _pool(fields: Fields, width: int, inner: int) -> Iterator[Part]:
    """Yield a learned query that attends to all patches, and a feed-forward layer."""
    yield vector("probe", "head", width)
    yield linear("pool", "head", width, 4 * width, bias=True)
    yield vector("pool_norm", "head", norm_size(fields, width))
    yield feed_forward("pool_mlp", width, inner, gated=False, bias=True, stream=STREAM)


def _merge(fields: Fields, about: dict[str, str], width: int) -> Iterator[Part]:
    """Yield two matrices that merge concatenated neighbours; further ones take hidden layers to the text model."""
    wide, out = width * fields.size("spatial_merge_size") ** 2, fields.size(about["out"])
    one = [linear("merger", "embedding", wide, wide, bias=True), linear("merger", "embedding", wide, out, bias=True)]
    yield from one
    yield vector("merger_norm", "norm", norm_size(fields, width))
    if "deep" in about:
        deep = len(fields.numbers(about["deep"]) or [])
        yield from (repeated(part, deep, deep) for part in one)
        yield vector("merger_norm", "norm", deep * norm_size(fields, wide))


# --- between tower and text -------------------------------------------------------------------------------------------


def connector(fields: Fields, tower: Fields, text_width: int) -> tuple[Part, ...]:
    """Return the connector of a tower to the text model, from the architecture's ``connector``."""
    about = fields.architecture.get("connector")
    if about is None:
        return ()
    parts = _CONNECTORS[about["kind"]](fields, about, tower, text_width)
    return tuple(replace(part, stream=STREAM) for part in parts)


def _mlp(fields: Fields, about: dict[str, Any], tower: Fields, text: int) -> Iterator[Part]:
    """Yield two matrices; the outputs of the selected layers are concatenated."""
    called, taken = fields.raw(about["layers"])
    count = len(taken) if isinstance(taken, list) else 1
    if count == 0:
        raise ValueError(f"{called} names no layer")
    width, bias = tower.size("hidden_size"), fields.flag(about["bias"])
    if "merge" in about:
        yield vector("connector_norm", "norm", width)
        yield linear("patch_merger", "embedding", width * fields.size(about["merge"]) ** 2, width)
    yield linear("connector", "embedding", width * count, text, bias=bias)
    yield linear("connector", "embedding", text, text, bias=bias)
    if about.get("newline"):
        yield vector("newline", "embedding", text)


def _matrix(fields: Fields, about: dict[str, Any], tower: Fields, text: int) -> Iterator[Part]:
    """Yield one matrix, with a norm before it or concatenated neighbours if the architecture has them."""
    width = tower.size(about["from"])
    if about.get("norm"):
        yield vector("connector_norm", "norm", width)
    times = fields.size(about["side"]) ** 2 if "side" in about else 1
    out = fields.size(about["to"]) if "to" in about else text
    yield linear("connector", "embedding", width * times, out, bias=about.get("bias", False))


def _merged(fields: Fields, about: dict[str, Any], tower: Fields, text: int) -> Iterator[Part]:
    """Yield a norm, and two matrices on concatenated neighbours."""
    wide = tower.size("hidden_size") * math.prod(tower.numbers(about["side"], length=2) or [])
    yield vector("connector_norm", "norm", 2 * fields.size(about["norm"]))
    yield linear("connector", "embedding", wide, wide, bias=True)
    yield linear("connector", "embedding", wide, text, bias=True)


_CONNECTORS: dict[str, Callable[[Fields, dict[str, Any], Fields, int], Iterator[Part]]] = {
    "mlp": _mlp,
    "matrix": _matrix,
    "merged": _merged,
}
