"""The measured numbers of a look, without methods to show them; the views read this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ...shapes.arguments import check_counts, check_flags, check_texts
from .axes import Axis
from .head import HeadMap, HeadRecord
from .images import Picture
from .schema import Damaged, plain
from .vectors import Neurons

FORMAT = 4
"""The version of the dictionary that `LookData.to_dict` writes and `Look.from_dict` reads."""

LARGE = ("maps", "moved", "neurons", "pictures")
"""The fields that ``maps=False`` leaves out."""


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
                raise Damaged(
                    f"run parallel to heads: got {len(maps)} maps for {len(self.heads)} heads; give one map a head, or "
                    "none",
                    name,
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
        names = [one.name for one in fields(self) if maps or one.name not in LARGE]
        return {"format": FORMAT, **{name: plain(getattr(self, name)) for name in names}}

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
        return f"{self.model}: {shape}, {self.kind}, {texts}{self.length} token{'s' * (self.length != 1)}"
