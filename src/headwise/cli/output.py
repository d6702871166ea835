"""What a run shows: tables or JSON on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .options.ranks import speaks

if TYPE_CHECKING:
    import rich.console


def show(result: Any, table: Callable[[Any], Any], as_json: bool) -> None:
    """The JSON of a result, or its table."""
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        put(table(result))


def put(what: Any) -> None:
    """Print a table, or what prints as some; nothing in them is cut."""
    from rich.table import Table

    from .options.table_width import fit, parts

    for part in parts(what, console()):
        shown = console()  # each has its width
        if isinstance(part, Table):
            fit(part, shown)
        shown.print(part)


def console() -> rich.console.Console:
    """Where tables go; a pipe has no width, so nothing is cut there."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 140)


class Progress:
    """A progress bar on stderr that appears once two seconds have passed; nothing where stderr is no terminal.

    Of several processes the one that speaks has it.
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
        self.bar = Bar(*columns, console=console, transient=True, disable=not (console.is_terminal and speaks()))
        self.task = self.bar.add_task("", total=None)
        self.timer = threading.Timer(2.0, self.bar.start)
        self.timer.daemon = True

    def __call__(self, what: str | int, total: int | None = None) -> None:
        """A new step by its name, or how much of it is done."""
        if isinstance(what, str):
            self.bar.update(self.task, description=what, total=total)
        else:
            self.bar.update(self.task, completed=what, total=total)


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """The bar, for as long as the work takes."""
    bar = Progress()
    bar.timer.start()
    try:
        yield bar
    finally:
        bar.timer.cancel()
        bar.timer.join()
        bar.bar.stop()
