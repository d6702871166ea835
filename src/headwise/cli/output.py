"""Output of a command: tables or JSON on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options.ranks import is_first

if TYPE_CHECKING:
    import rich.console

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")]
STABLE = 0.5
"""The rank correlation between halves of a text under which a ranking by gradient is reported as unstable."""


def show(result: Any, table: Callable[[Any], Any], as_json: bool) -> None:
    """Print the result as JSON, or as its table."""
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        put(table(result))


def put(what: Any, *, fitted: bool = False) -> None:
    """Print a table, or a record that prints as tables; no text is cut, and titles are not wrapped in a pipe.

    Args:
        what: A Rich renderable, or a text.
        fitted: Whether the widths of the columns are set; else they are made to fit the terminal.
    """
    from rich.table import Table

    from headwise.plan.show.printed import is_line, parts

    from .options.table_width import fit

    for part in parts(what, console()):
        shown = console()  # `fit` may change the width of its console
        if isinstance(part, Table) and not fitted:
            fit(part, shown)
        shown.print(part, soft_wrap=is_line(part) and not shown.is_terminal)


def put_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table of texts."""
    from rich.table import Table

    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    put(table)


def warn_unstable(stability: float | None) -> None:
    """Print a warning on stderr if one half of a text ranks the heads by gradient unlike the other half."""
    if stability is not None and stability < STABLE and is_first():
        print(
            "headwise: warning: the ranking by gradient is unstable (its two halves of the text correlate by "
            f"{stability:.2f}, under {STABLE}); give a longer text, some thousand words of the model's kind, or "
            "rank by ablation",
            file=sys.stderr,
        )


def console() -> rich.console.Console:
    """Return a console on stdout; for a pipe its width is the variable COLUMNS, or else 140."""
    from rich.console import Console

    said = os.environ.get("COLUMNS", "")
    piped = int(said) if said.isascii() and said.isdigit() and 0 < int(said) < 10_000 else 140
    return Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else piped)


class Progress:
    """A progress bar on stderr that appears after two seconds; nothing if stderr is not a terminal.

    Of several processes only one shows it.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True, markup=False)
        self.bar = Bar(*columns, console=console, transient=True, disable=not (console.is_terminal and is_first()))
        self.task = self.bar.add_task("", total=None)
        self.timer = threading.Timer(2.0, self.bar.start)
        self.timer.daemon = True

    def __call__(self, what: str | int, total: int | None = None) -> None:
        """Begin a step by its name, or set how much of the step is done."""
        if isinstance(what, str):
            self.bar.update(self.task, description=what, total=total)
        else:
            self.bar.update(self.task, completed=what, total=total)


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """Yield a progress bar that is shown during the with block."""
    bar = Progress()
    bar.timer.start()
    try:
        yield bar
    finally:
        bar.timer.cancel()
        bar.timer.join()
        bar.bar.stop()
