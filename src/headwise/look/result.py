"""The result of a look: the measured numbers, and the methods that print and draw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..shapes.arguments import check_numbers, shown
from .records.look_data import FORMAT, LookData
from .records.schema import record
from .views import figures, notebook, tables
from .views import model_card as card

if TYPE_CHECKING:
    import pandas
    import rich.table
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look(LookData):
    """The scores and statistics of every head of a model on a text, as :func:`headwise.look.at` returns them.

    Printing it gives the table of heads; a notebook shows it as HTML.

    Attributes:
        model: name of the model.
        num_layers: number of attention calls in one forward pass.
        num_heads: number of query heads of a layer (of the widest layer if they differ).
        length: number of tokens of the text, or of all texts together.
        tokens: the tokens as text, for a look at one text; empty for several. They come from the user's text: escape
            them in any markup.
        heads: one record per head, by layer, then head.
        kind: ``"decoder"``, ``"encoder"``, ``"encoder-decoder"`` or ``"encoder and decoder"``.
        seconds: the duration of the measurement.
        version: the version of headwise that measured.
        maps: the large maps, parallel to ``heads``; empty if none were kept.
        texts: number of texts.
        neurons: queries, keys and values of the first tokens, one record per call; empty if none were kept.
        excerpts: tokens around the evidence of additional readings, by ``"sentences 3"`` and position; may be empty.
        axes: the axes of queries and keys, if they are more than one text: patches, frames, the decoder's text.
        pictures: the pictures and sounds, as the model received them.
        moved: the large maps by what the weights move, parallel to ``maps``: weight times length of what the head
            writes from the key, as a share of the row. Empty if none were kept; without cells where it is not known.
    """

    def with_extras(self, **extras: Sequence[Sequence[float | None]]) -> Look:
        """Return the look with additional numbers of each head, by name: for each layer a list with a number per head.

        A number of None is left out. The report shows them with the scores, and files have a column for each.

        >>> from headwise.look.records.head import HeadRecord
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

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Look:
        """Return the look from the output of :meth:`to_dict`.

        Raises:
            ValueError: the dictionary has another format than this version reads, or is incomplete.
        """
        number = data.get("format") if isinstance(data, dict) else data
        if type(number) is not int or number != FORMAT:
            raise ValueError(
                f"a look is read from format {FORMAT}, got {shown(number)}; write it again with this version"
            )
        return record(cls, data, "a look is")

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas frame with one row per head and one column per number, as in `rows`.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return tables.frame(self)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `to_frame` as plain dictionaries."""
        return tables.rows(self)

    def card(self) -> str:
        """Return the head card: a page of Markdown with the best heads of each role and their evidence."""
        return card.markdown(self)

    def plot_roles(self) -> Figure:
        """Return a Matplotlib figure of all heads by role; raise MissingExtra if Matplotlib is not installed."""
        return figures.plot_roles(self)

    def plot_head(self, layer: int, head: int) -> Figure:
        """Return a Matplotlib figure of one head: its map and its scores."""
        return figures.plot_head(self, layer, head)

    def table(self) -> rich.table.Table:
        """Return the table of heads for a Rich console."""
        return tables.rich_table(self)

    def __str__(self) -> str:
        return tables.text(self)

    def _repr_html_(self) -> str:
        return notebook.markup(self)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
