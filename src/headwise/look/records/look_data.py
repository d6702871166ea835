"""The measured numbers of a look, without methods to show them; the views read this."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ...shapes.arguments import check_counts, check_flags, check_texts
from .axes import Axis
from .head import HeadMap, HeadRecord, map_from_dict
from .images import Picture
from .schema import Inside, check_fields, each, entries, fields_of
from .vectors import Neurons

FORMAT = 4
"""The version of the dictionary that `LookData.to_dict` writes and `Look.from_dict` reads."""


@dataclass(frozen=True)
class LookData:
    """The numbers of a `Look`, which adds tables and figures and documents the attributes."""

    model: str
    num_layers: int
    num_heads: int
    length: int
    tokens: tuple[str, ...]
    heads: tuple[HeadRecord, ...]
    kind: str
    seconds: float
    version: str
    maps: tuple[HeadMap, ...] = ()
    texts: int = 1
    neurons: tuple[Neurons, ...] = ()
    excerpts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    axes: tuple[Axis, ...] = ()
    pictures: tuple[Picture, ...] = ()
    moved: tuple[HeadMap, ...] = ()

    def __post_init__(self) -> None:
        for name in ("maps", "moved"):
            if (maps := getattr(self, name)) and len(maps) != len(self.heads):
                raise ValueError(
                    f"{name} run parallel to heads: got {len(maps)} maps for {len(self.heads)} heads; "
                    "give one map a head, or none"
                )

    def with_role(self, name: str) -> tuple[HeadRecord, ...]:
        """Return the heads that play a role, the highest score first."""
        check_texts(name=name)
        pairs = [(head.scores[name].value, head) for head in self.heads if name in head.scores]
        played = [(value, head) for value, head in pairs if head.scores[name].plays]
        return tuple(head for _, head in sorted(played, key=lambda pair: -pair[0]))

    def head(self, layer: int, head: int) -> HeadRecord:
        """Return the record of one head; raise IndexError if the model has no such head."""
        check_counts(layer=layer, head=head)
        for record in self.heads:
            if (record.layer, record.head) == (layer, head):
                return record
        raise IndexError(f"{self.title} has no head {layer}.{head}; layers and heads count from 0")

    def to_dict(self, *, maps: bool = True) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers; `maps` includes large maps, neurons and pictures."""
        check_flags(maps=maps)
        data: dict[str, Any] = {"format": FORMAT}
        for one in fields(self):
            if one.name not in ("heads", "maps", "neurons", "tokens", "axes", "pictures", "moved"):
                data[one.name] = getattr(self, one.name)
        data["tokens"] = list(self.tokens)
        data["heads"] = [head.to_dict() for head in self.heads]
        data["axes"] = [axis.to_dict() for axis in self.axes]
        if maps:
            data["pictures"] = [one.to_dict() for one in self.pictures]
            for name, kept in (("maps", self.maps), ("moved", self.moved)):
                data[name] = [{"rows": m.rows, "columns": m.columns, "data": m.base64()} for m in kept]
            data["neurons"] = [one.to_dict() for one in self.neurons]
        return data

    def to_json(self, *, maps: bool = True, indent: int | None = None) -> str:
        """Return the dictionary as JSON text; ``maps=False`` leaves out large maps, neurons and pictures."""
        if indent is not None:
            check_counts(0, 1000, indent=indent)
        return json.dumps(self.to_dict(maps=maps), indent=indent, allow_nan=False)

    def about(self) -> dict[str, Any]:
        """Return the fields that describe the measurement, without the heads."""
        names = ("model", "kind", "num_layers", "num_heads", "texts", "length", "version")
        return {name: getattr(self, name) for name in names}

    @property
    def title(self) -> str:
        """Model, size, kind, and the number of texts and tokens."""
        texts = f"{self.texts:,} texts, " if self.texts != 1 else ""
        shape = f"{self.num_layers} layers x {self.num_heads} heads"
        return f"{self.model}: {shape}, {self.kind}, {texts}{self.length} tokens"


def values_of(data: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the fields from the output of `LookData.to_dict`, checked.

    Raises:
        Damaged: a value is invalid; the message has its place.
    """
    values = fields_of(LookData, data)
    values["tokens"] = entries("tokens", data["tokens"])
    values["heads"] = each("heads", data["heads"], HeadRecord.from_dict)
    excerpts = data.get("excerpts", {})
    with Inside(excerpts, "excerpts"):
        values["excerpts"] = {name: {int(i): token for i, token in of.items()} for name, of in excerpts.items()}
    parts: dict[str, Callable[[dict[str, Any]], Any]] = {"maps": map_from_dict, "moved": map_from_dict}
    parts |= {"neurons": Neurons.from_dict, "axes": Axis.from_dict, "pictures": Picture.from_dict}
    for name, read in parts.items():
        values[name] = each(name, data.get(name, ()), read)
    check_fields(LookData, values)
    return values
