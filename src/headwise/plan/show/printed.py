"""How results are printed: the title and the caption of a table are lines of their own.

Rich wraps the title of a table to the width of the table, so that the title of a narrow table takes several lines.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

TITLE, CAPTION = "table.title", "table.caption"


class Printed:
    """A result that prints as its tables."""

    @abstractmethod
    def _tables(self) -> Iterable[RenderableType]: ...

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        yield from self._tables()

    def __str__(self) -> str:
        return plain(self)


def number_table(
    title: str, columns: Iterable[str], *, left: Collection[str] = (), caption: str | None = None
) -> Table:
    """Return a Rich table without rows; columns are aligned to the right, but those in `left`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, TITLE), caption=caption)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def plain(result: Any) -> str:
    """Return the text that `print` shows for a plan or another Rich renderable: its tables without colour."""
    from rich.console import Console

    options = {"color_system": None, "force_terminal": False, "legacy_windows": False, "markup": False}
    console = Console(width=120, highlight=False, emoji=False, **options)  # type: ignore[arg-type]
    with console.capture() as text:
        for part in parts(result, console):
            console.print(part)
    return "\n".join(line.rstrip() for line in text.get().rstrip().splitlines())


def parts(what: Any, shown: Console) -> Iterator[Any]:
    """Yield what Rich prints, in order: titles, tables without one, captions, texts.

    Groups and records that print as tables are split.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if isinstance(what, Group):
        for one in what.renderables:
            yield from parts(one, shown)
    elif isinstance(what, Table):
        table = copy(what)
        table.title = table.caption = None
        if what.title:
            yield _line(what.title, TITLE)
        yield table
        if what.caption:
            yield _line(what.caption, CAPTION)
    elif isinstance(what, Text | str) or not hasattr(what, "__rich_console__"):
        yield what
    else:
        for one in what.__rich_console__(shown, shown.options):
            yield from parts(one, shown)


def is_line(part: Any) -> bool:
    """Return whether a part is a title or a caption."""
    return getattr(part, "style", None) in (TITLE, CAPTION)


def _line(said: Any, style: str) -> Any:
    from rich.text import Text

    return Text(str(said), style)
