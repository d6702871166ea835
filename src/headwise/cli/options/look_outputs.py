"""Outputs of `headwise look`: the suffix of each name selects the report, a table, the head card or a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from .texts import check_named

REPORT = "headwise-report.html"
PAGES = (".html", ".htm")
TABLES = (".parquet", ".csv", ".json")
ENDINGS = (*PAGES, *TABLES, ".md", ".svg", ".png")


def destinations(out: Sequence[str] | None, as_json: bool, against: str | None) -> list[str]:
    """Return the files to write, after checking names, folders and required libraries before any model is read."""
    names = list(out) if out is not None else [] if as_json else [REPORT]
    endings = (*PAGES, *TABLES) if against is not None else ENDINGS
    for name in names:
        _check(name, endings)
    return names


def _check(name: str, endings: Sequence[str]) -> None:
    check_named("--out", name)
    from headwise import report

    report.check_destination(name)
    ending = Path(name).suffix.lower()
    if ending not in endings:
        raise typer.BadParameter(f"--out {name}: the ending selects what is written; use one of {' '.join(endings)}")
    if ending in PAGES:
        report.check_engine()
    else:
        from headwise.look import files

        files.check(name)


def write(what: Any, names: Sequence[str]) -> list[str]:
    """Write the files; return one line to print for each, the report last."""
    from headwise import report

    def page(name: str) -> int:
        if hasattr(what, "changes"):
            return report.write_comparison(what[0], what[1], name, kept=what.kept)
        return report.write(what, name)

    ordered = sorted(names, key=lambda name: Path(name).suffix.lower() in PAGES)
    return [written(getattr(what, "changes", what), name, partial(page, name)) for name in ordered]


def written(what: Any, name: str, page: Callable[[], int]) -> str:
    """Write a file, a page by `page`, and return the line to print."""
    from headwise.files.text import visible

    if Path(name).suffix.lower() in PAGES:
        size, then = page(), ": open it in a browser"
    else:
        from headwise.look import files

        size, then = files.write(what, name), ""
    return f"{visible(name)} ({size / 1000:,.0f} kB){then}"
