"""What a look yields: plain frozen records that print, and that travel as JSON.

Nothing here holds a tensor, so a record can be compared, stored and sent. Every number is a Python float, int or
None; ``None`` means "not measured", never "zero".
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..shapes.kinds import MOST, check_counts, check_flags, check_numbers, check_texts, shown
from . import card, figures, notebook, tables
from .axes import Axis
from .fields import Damaged, Inside, check_fields, each, entries, fields_of, listed, one_error
from .neurons import Neurons
from .pictures import Picture
from .scores import Score

if TYPE_CHECKING:
    import pandas
    import rich.table
    from matplotlib.figure import Figure

FORMAT = 2
"""Version of the dictionary that :meth:`Look.to_dict` writes; :meth:`Look.from_dict` reads it and those before."""

NO_ROLE = "-"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


@dataclass(frozen=True)
class HeadRecord:
    """One head: what it did on the texts, and what it scored in each role.

    Attributes:
        module: qualified name of the attention module.
        call: how often that module had been called before in the same forward (0 unless layers share it).
        layer: running index of the attention call in the forward, from 0.
        head: index of the query head, from 0.
        part: ``"encoder"``, ``"decoder"`` or ``"cross"``: by where the queries of the call may look.
        entropy: mean entropy of a row, in nats.
        largest: mean of the largest weight of a row.
        distance: mean distance between a query and the keys it attends, in tokens; None in cross-attention, whose
            positions are of two texts.
        offsets: mean mass on the key 0, 1, ... k positions back, over the queries that may attend it; empty in
            cross-attention.
        ahead: mean mass on the key 1, 2, ... k positions ahead, as ``offsets``; empty where no query may attend any.
        scores: by role, what the head scored; a role that was not measured is missing.
        map: the pooled attention matrix, rows of queries; each row sums to 1, or to 0 where nothing was attended.
        queries: number of queries of the call, of the longest text.
        keys: number of keys of the call, of the longest text.
        extras: further numbers by name, such as importance by a criterion; see `Look.with_extras`.
        over: which of the look's `axes` its queries and its keys run over; empty where the look has one text alone.
    """

    module: str
    call: int
    layer: int
    head: int
    part: str
    entropy: float
    largest: float
    distance: float | None
    offsets: tuple[float, ...]
    ahead: tuple[float, ...]
    scores: Mapping[str, Score]
    map: tuple[tuple[float, ...], ...] = ()
    queries: int = 0
    keys: int = 0
    extras: Mapping[str, float] = field(default_factory=dict)
    over: tuple[int, ...] = ()

    @property
    def roles(self) -> tuple[Score, ...]:
        """The scores of the roles that the head plays, strongest first: by how far they went beyond the threshold."""
        played = [score for score in self.scores.values() if score.plays]
        return tuple(sorted(played, key=lambda score: (-score.strength, score.name)))

    @property
    def role(self) -> str:
        """Name of the strongest role, ``"-"`` where the head plays none."""
        return max(self.roles, key=lambda score: score.strength).name if self.roles else NO_ROLE

    def score(self, name: str) -> Score | None:
        """The score in a role by its name; None where it was not measured."""
        check_texts(name=name)
        return self.scores.get(name)

    def value(self, name: str) -> float | None:
        """The value of a score; None where it was not measured."""
        score = self.score(name)
        return None if score is None else score.value

    def mass_at(self, offset: int) -> float | None:
        """Mean mass on the key at an offset from the query, negative before it; None where it was not measured."""
        check_counts(-MOST, offset=offset)
        masses, k = (self.ahead, offset - 1) if offset > 0 else (self.offsets, -offset)
        return masses[k] if k < len(masses) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        data = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "scores"}
        return {**data, "scores": {name: score.to_list() for name, score in self.scores.items()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HeadRecord:
        """The record that `to_dict` (or JSON) wrote; ValueError where it is none."""
        with one_error("a head's record is", data):
            return cls._from_dict(data)

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> HeadRecord:
        values = fields_of(cls, data)
        for name in ("offsets", "ahead", "over"):
            values[name] = entries(name, data.get(name, ()) if name == "over" else data[name])
        with Inside(data["scores"], "scores"):
            values["scores"] = {name: _score(name, row) for name, row in data["scores"].items()}
        values["map"] = each("map", data["map"], listed)
        check_fields(cls, values)
        if len({*map(len, values["map"])}) > 1:
            raise Damaged("map", f"has rows of one length; got {sorted({*map(len, values['map'])})}")
        return cls(**values)


def _score(name: str, row: list[Any]) -> Score:
    with Inside(row, name):
        return Score.from_list(name, row)


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


def _map(data: dict[str, Any]) -> HeadMap:
    """The large map that `Look.to_dict` wrote."""
    return HeadMap(data["rows"], data["columns"], base64.b64decode(data["data"], validate=True))


@dataclass(frozen=True)
class Look:
    """What every head of a model did on a text: :func:`headwise.look.at` makes it.

    Printing it gives the table of heads; a notebook shows it as HTML.

    Attributes:
        model: name of the model.
        num_layers: number of attention calls in one forward.
        num_heads: number of query heads of a layer (of the widest, where they differ).
        length: number of tokens of the text, or of all texts together.
        tokens: the tokens as text, of a look at one text; empty for several. They come from the user's text: escape
            them wherever markup is read.
        heads: one record a head, by layer, then head.
        kind: ``"decoder"``, ``"encoder"`` or ``"encoder-decoder"``.
        seconds: what the look took.
        version: the version of headwise that looked.
        maps: the large maps, parallel to ``heads``; empty where the look kept none.
        texts: number of texts.
        neurons: queries, keys and values of the first tokens, a call each; empty where the look kept none.
        excerpts: tokens of what else was read, by ``"sentences 3"`` and position, around the evidence; may be empty.
        axes: what queries and keys run over, where that is more than one text: patches, frames, the decoder's text.
        pictures: what is behind the patches and the frames, as the model got it.
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
    texts: int = 1
    neurons: tuple[Neurons, ...] = ()
    excerpts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    axes: tuple[Axis, ...] = ()
    pictures: tuple[Picture, ...] = ()

    def __post_init__(self) -> None:
        if self.maps and len(self.maps) != len(self.heads):
            raise ValueError(
                f"maps run parallel to heads: got {len(self.maps)} maps for {len(self.heads)} heads; "
                "give one map a head, or none"
            )

    def with_role(self, name: str) -> tuple[HeadRecord, ...]:
        """The heads that play a role, the highest score first."""
        check_texts(name=name)
        pairs = [(head.scores[name].value, head) for head in self.heads if name in head.scores]
        played = [(value, head) for value, head in pairs if head.scores[name].plays]
        return tuple(head for _, head in sorted(played, key=lambda pair: -pair[0]))

    def head(self, layer: int, head: int) -> HeadRecord:
        """The record of one head; IndexError where the model has none of these numbers."""
        check_counts(layer=layer, head=head)
        for record in self.heads:
            if (record.layer, record.head) == (layer, head):
                return record
        raise IndexError(f"{tables.title(self)} has no head {layer}.{head}; layers and heads count from 0")

    def with_extras(self, **extras: Sequence[Sequence[float | None]]) -> Look:
        """The look with further numbers of each head, by name, a list of the heads' numbers for each layer.

        A number of None is left out. The report shows them beside the scores, files have a column for each.

        >>> from headwise.look.records import HeadRecord
        >>> head = HeadRecord("a", 0, 0, 0, "decoder", 1.0, 0.5, 2.0, (0.1,), (), {})
        >>> look = Look("m", 1, 1, 8, (), (head,), "decoder", 0.1, "0")
        >>> look.with_extras(importance=[[0.25]]).heads[0].extras
        {'importance': 0.25}

        Raises:
            TypeError: not lists of numbers.
            ValueError: not a number for each head, one that is not finite, or the name of another column.
        """
        taken = {name for head in self.heads for name in tables.flat(replace(head, extras={}))}
        for name, layers in extras.items():
            if name in taken:
                raise ValueError(f"{name} is a column of every look; give the numbers another name")
            rule = (
                f"{name} is a list of the heads' numbers for each layer, {self.num_layers} layers of {self.num_heads}"
            )
            if not _is_list(layers) or not all(map(_is_list, layers)):
                raise TypeError(f"{rule}; got {shown(layers)}")
            sizes, wanted = Counter({n: len(row) for n, row in enumerate(layers)}), Counter(h.layer for h in self.heads)
            if sizes != wanted:
                raise ValueError(f"{rule}; got {[len(row) for row in layers]}")
            for value in chain.from_iterable(layers):
                if value is not None:
                    check_numbers(**{name: value})
        heads = []
        for head in self.heads:
            values = {name: layers[head.layer][head.head] for name, layers in extras.items()}
            kept = {name: value for name, value in values.items() if value is not None}
            heads.append(replace(head, extras={**head.extras, **kept}))
        return replace(self, heads=tuple(heads))

    def to_dict(self, *, maps: bool = True) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers; ``maps``: whether large maps, neurons and pictures come."""
        check_flags(maps=maps)
        data: dict[str, Any] = {"format": FORMAT}
        for one in fields(self):
            if one.name not in ("heads", "maps", "neurons", "tokens", "axes", "pictures"):
                data[one.name] = getattr(self, one.name)
        data["tokens"] = list(self.tokens)
        data["heads"] = [head.to_dict() for head in self.heads]
        data["axes"] = [axis.to_dict() for axis in self.axes]
        if maps:
            data["pictures"] = [one.to_dict() for one in self.pictures]
            data["maps"] = [{"rows": m.rows, "columns": m.columns, "data": m.base64()} for m in self.maps]
            data["neurons"] = [one.to_dict() for one in self.neurons]
        return data

    def to_json(self, *, maps: bool = True, indent: int | None = None) -> str:
        """The dictionary as JSON text; ``maps=False`` leaves out large maps, neurons and pictures."""
        if indent is not None:
            check_counts(0, 1000, indent=indent)
        return json.dumps(self.to_dict(maps=maps), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Look:
        """The look that :meth:`to_dict` wrote.

        Raises:
            ValueError: the dictionary is of another format than this version reads, or incomplete.
        """
        number = data.get("format") if isinstance(data, dict) else data
        if type(number) is not int or number != FORMAT:
            raise ValueError(
                f"a look is read from format {FORMAT}, got {shown(number)}; write it again with this version"
            )
        with one_error("a look is", data):
            return cls._from_dict(data)

    @classmethod
    def _from_dict(cls, data: dict[str, Any]) -> Look:
        values = fields_of(cls, data)
        values["tokens"] = entries("tokens", data["tokens"])
        values["heads"] = each("heads", data["heads"], HeadRecord.from_dict)
        excerpts = data.get("excerpts", {})
        with Inside(excerpts, "excerpts"):
            values["excerpts"] = {name: {int(i): token for i, token in of.items()} for name, of in excerpts.items()}
        parts = {"maps": _map, "neurons": Neurons.from_dict, "axes": Axis.from_dict, "pictures": Picture.from_dict}
        for name, read in parts.items():
            values[name] = each(name, data.get(name, ()), read)
        check_fields(cls, values)
        with Inside(data.get("maps"), "maps"):  # as many as heads
            return cls(**values)

    def to_frame(self) -> pandas.DataFrame:
        """One row a head, one column a number: `headwise.look.tables.rows` says which.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return tables.frame(self)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `to_frame` as plain dictionaries."""
        return tables.rows(self)

    def about(self) -> dict[str, Any]:
        """What was looked at, without the heads."""
        names = ("model", "kind", "num_layers", "num_heads", "texts", "length", "version")
        return {name: getattr(self, name) for name in names}

    def card(self) -> str:
        """The head card: a page of Markdown, with the best heads of each role and what shows it."""
        return card.markdown(self)

    def plot_roles(self) -> Figure:
        """A Matplotlib figure of all heads by role; MissingExtra where Matplotlib is not installed."""
        return figures.plot_roles(self)

    def plot_head(self, layer: int, head: int) -> Figure:
        """A Matplotlib figure of one head: its map, and what it scored."""
        return figures.plot_head(self, layer, head)

    def table(self) -> rich.table.Table:
        """The table of heads for a Rich console."""
        return tables.rich_table(self)

    def __str__(self) -> str:
        return tables.text(self)

    def _repr_html_(self) -> str:
        return notebook.markup(self)
