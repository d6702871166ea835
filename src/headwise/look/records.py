"""What a look yields: plain frozen records that print, and that travel as JSON.

Nothing here holds a tensor, so a record can be compared, stored and sent. Every number is a Python float, int or
None; ``None`` means "not measured", never "zero".
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from ..extras import missing_extra
from ..shapes.kinds import MOST, check_counts, check_flags, check_texts, shown

if TYPE_CHECKING:
    import pandas
    import rich.table

FORMAT = 1
"""Version of the dictionary that :meth:`Look.to_dict` writes; :meth:`Look.from_dict` refuses others."""

_NO_ROLE = "-"


@dataclass(frozen=True)
class RoleScore:
    """A role that a head plays.

    Attributes:
        name: the role, such as ``"previous-token"`` or ``"induction"``.
        score: the measured number, between 0 and 1.
        threshold: the least score that counts, from ``source``.
        source: where the definition comes from.
        baseline: the score that uniform attention gets on the same tokens; a role needs twice this much as well.
    """

    name: str
    score: float
    threshold: float
    source: str
    baseline: float = 0.0


@dataclass(frozen=True)
class HeadRecord:
    """One head: what it did on the text, and on repeated random tokens.

    Attributes:
        module: qualified name of the attention module.
        call: how often that module had been called before in the same forward (0 unless layers share it).
        layer: running index of the attention call in the forward, from 0.
        head: index of the query head, from 0.
        entropy: mean entropy of a row, in nats.
        largest: mean of the largest weight of a row.
        distance: mean distance between a query and the keys it attends, in tokens.
        sink: mean mass on the first key, over the queries after the first.
        delimiter: mean mass on delimiter keys (the first key is not counted among them); 0 where none is known.
        self_mass: mean mass on the query's own position, ``offsets[0]``.
        offsets: mean mass on the key 0, 1, ... k positions back, over the queries that may attend it.
        duplicate: mean mass on earlier copies of the query's own token; None where it was not measured.
        induction: mean mass on the tokens that followed those copies; None where it was not measured.
        roles: the roles it plays, strongest first.
        map: the pooled attention matrix, rows of queries; each row sums to 1, or to 0 where nothing was attended.
        evenness: mean of entropy / ln(number of keys, at most 128) over rows of 8 keys or more; 1 is uniform.
        queries: number of queries of the call.
        keys: number of keys of the call.
        ahead: mean mass on the key 1, 2, ... k positions ahead, as ``offsets``; empty where no query may attend any.
    """

    module: str
    call: int
    layer: int
    head: int
    entropy: float
    largest: float
    distance: float
    sink: float
    delimiter: float
    self_mass: float
    offsets: tuple[float, ...]
    duplicate: float | None
    induction: float | None
    roles: tuple[RoleScore, ...]
    map: tuple[tuple[float, ...], ...]
    evenness: float = 0.0
    queries: int = 0
    keys: int = 0
    ahead: tuple[float, ...] = ()

    @property
    def role(self) -> str:
        """Name of the strongest role, ``"-"`` where the head plays none."""
        return self.roles[0].name if self.roles else _NO_ROLE

    def score(self, name: str) -> RoleScore | None:
        """The score of a role by its name; None where the head does not play it."""
        check_texts(name=name)
        return next((role for role in self.roles if role.name == name), None)

    def mass_at(self, offset: int) -> float | None:
        """Mean mass on the key at an offset from the query, negative before it; None where it was not measured."""
        check_counts(-MOST, offset=offset)
        masses, k = (self.ahead, offset - 1) if offset > 0 else (self.offsets, -offset)
        return masses[k] if k < len(masses) else None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HeadRecord:
        """The record that ``dataclasses.asdict`` (or JSON) wrote; ValueError where it is none."""
        if isinstance(data, dict):
            with suppress(TypeError, KeyError, AttributeError):
                return cls._from_dict(data)
        raise ValueError(f"a head's record is read from what asdict() or to_dict() wrote; got {shown(data)}")

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> HeadRecord:
        values = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        values["offsets"], values["ahead"] = tuple(data["offsets"]), tuple(data.get("ahead", ()))
        values["roles"] = tuple(RoleScore(**role) for role in data["roles"])
        values["map"] = tuple(tuple(row) for row in data["map"])
        return cls(**values)


@dataclass(frozen=True)
class HeadMap:
    """The large map of one head, a byte a cell.

    A byte is ``round(255 * sqrt(weight))``: the root keeps small weights apart (1 / 128 becomes 23, not 2), and is
    what a colour scale wants anyhow.

    Attributes:
        rows: number of (pooled) queries.
        columns: number of (pooled) keys.
        data: the bytes, row after row.
    """

    rows: int
    columns: int
    data: bytes

    def __post_init__(self) -> None:
        check_counts(rows=self.rows, columns=self.columns)
        if not isinstance(self.data, bytes):
            raise TypeError(f"a map's data is bytes, one a cell; got {shown(self.data)}")
        if len(self.data) != self.rows * self.columns:
            raise ValueError(
                f"a map of {self.rows} x {self.columns} cells needs {self.rows * self.columns} bytes, got "
                f"{len(self.data)}; give one byte a cell"
            )

    def weights(self) -> tuple[tuple[float, ...], ...]:
        """The weights, to within 0.004 near 1 and less below: half a step of a byte.

        >>> HeadMap(rows=1, columns=2, data=bytes([255, 0])).weights()
        ((1.0, 0.0),)
        """
        values = [(byte / 255) ** 2 for byte in self.data]
        return tuple(tuple(values[i * self.columns : (i + 1) * self.columns]) for i in range(self.rows))

    def base64(self) -> str:
        """The bytes as base64 text, for JSON and for a page."""
        return base64.b64encode(self.data).decode("ascii")


@dataclass(frozen=True)
class Look:
    """What every head of a model did on a text: :func:`headwise.look.at` makes it.

    Printing it gives the table of heads; a notebook shows it as HTML.

    Attributes:
        model: name of the model.
        num_layers: number of attention calls in one forward.
        num_heads: number of query heads of a layer (of the widest, where they differ).
        length: number of tokens of the text.
        tokens: the tokens as text. They come from the user's text: escape them wherever markup is read.
        heads: one record a head, by layer, then head.
        kind: ``"decoder"``, ``"encoder"`` or ``"encoder-decoder"``.
        seconds: what the look took.
        version: the version of headwise that looked.
        maps: the large maps, parallel to ``heads``; empty where the look kept none.
    """

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

    def __post_init__(self) -> None:
        if self.maps and len(self.maps) != len(self.heads):
            raise ValueError(
                f"maps run parallel to heads: got {len(self.maps)} maps for {len(self.heads)} heads; "
                "give one map a head, or none"
            )

    def with_role(self, name: str) -> tuple[HeadRecord, ...]:
        """The heads that play a role, the highest score first."""
        check_texts(name=name)
        pairs = [(head.score(name), head) for head in self.heads]
        scored = [(role.score, head) for role, head in pairs if role is not None]
        return tuple(head for _, head in sorted(scored, key=lambda pair: -pair[0]))

    def to_dict(self, *, maps: bool = True) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers; ``maps`` says whether the large maps come along (base64)."""
        check_flags(maps=maps)
        data: dict[str, Any] = {"format": FORMAT}
        for field in fields(self):
            if field.name not in ("heads", "maps", "tokens"):
                data[field.name] = getattr(self, field.name)
        data["tokens"] = list(self.tokens)
        data["heads"] = [asdict(head) for head in self.heads]
        if maps:
            data["maps"] = [{"rows": m.rows, "columns": m.columns, "data": m.base64()} for m in self.maps]
        return data

    def to_json(self, *, maps: bool = False, indent: int | None = None) -> str:
        """The dictionary as JSON text; without the large maps unless asked."""
        if indent is not None:
            check_counts(0, 1000, indent=indent)
        return json.dumps(self.to_dict(maps=maps), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Look:
        """The look that :meth:`to_dict` wrote.

        Raises:
            ValueError: the dictionary is of another format than this version reads.
        """
        number = data.get("format") if isinstance(data, dict) else data
        if not isinstance(number, int) or number != FORMAT:
            raise ValueError(
                f"a look is read from format {FORMAT}, got {shown(number)}; write it again with this version"
            )
        with suppress(TypeError, KeyError, AttributeError):
            return cls._from_dict(data)
        raise ValueError("a look is read from what to_dict() wrote; a field is missing or of another kind")

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Look:
        values = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        values["tokens"] = tuple(data["tokens"])
        values["heads"] = tuple(HeadRecord.from_dict(head) for head in data["heads"])
        values["maps"] = tuple(
            HeadMap(m["rows"], m["columns"], base64.b64decode(m["data"])) for m in data.get("maps", ())
        )
        return cls(**values)

    def to_frame(self) -> pandas.DataFrame:
        """One row a head, one column a number; places as ``offset_0`` ... ``offset_k`` and ``ahead_1`` ... ``ahead_k``.

        Raises:
            MissingExtra: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise missing_extra("to_frame()", "look", error) from None
        return pandas.DataFrame([_flat(head) for head in self.heads])

    def table(self) -> rich.table.Table:
        """The table of heads for a Rich console."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self._title()), header_style="bold")
        for i, name in enumerate(_COLUMNS):
            table.add_column(name, justify="left" if i == len(_COLUMNS) - 1 else "right", no_wrap=True)
        layer = None
        for head in self.heads:
            if layer is not None and head.layer != layer:
                table.add_section()
            layer = head.layer
            style = "" if head.roles else "dim"
            table.add_row(*(Text(cell) for cell in _cells(head)), style=style)
        return table

    def __str__(self) -> str:
        rows = [_COLUMNS, *(_cells(head) for head in self.heads)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS) - 1)]
        lines = (
            "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
        )
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(_cells(head), "td") for head in self.heads)
        return f"<table><caption>{html.escape(self._title())}</caption>{row(_COLUMNS, 'th')}{body}</table>"

    def _title(self) -> str:
        return f"{self.model}: {self.num_layers} layers x {self.num_heads} heads, {self.kind}, {self.length} tokens"


_COLUMNS = (
    "layer",
    "head",
    "entropy",
    "largest",
    "distance",
    "sink",
    "prev",
    "self",
    "next",
    "delim",
    "dup",
    "induct",
    "role",
)


def _cells(head: HeadRecord) -> Sequence[str]:
    masses = (
        head.sink, head.mass_at(-1), head.self_mass, head.mass_at(1), head.delimiter, head.duplicate, head.induction
    )  # fmt: skip
    roles = ", ".join(f"{role.name} {role.score:.2f}" for role in head.roles) or _NO_ROLE
    return (
        str(head.layer),
        str(head.head),
        f"{head.entropy:.2f}",
        f"{head.largest:.2f}",
        f"{head.distance:.1f}",
        *("-" if mass is None else f"{mass:.2f}" for mass in masses),
        roles,
    )


def _flat(head: HeadRecord) -> dict[str, Any]:
    several = ("map", "offsets", "ahead")
    row = {field.name: getattr(head, field.name) for field in fields(head) if field.name not in several}
    row["roles"] = ", ".join(role.name for role in head.roles)
    row["role"] = head.role
    row.update({f"offset_{k}": mass for k, mass in enumerate(head.offsets)})
    row.update({f"ahead_{k}": mass for k, mass in enumerate(head.ahead, 1)})
    return row
