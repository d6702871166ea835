"""``headwise tour``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options.models import TINY, folder_of
from .options.texts import File, check_named, read_text


def tour(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A checkpoint folder, or tiny (the model in the package).", callback=folder_of, show_default=TINY
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text of the model when the page opens.")] = None,
    file: File = None,
    out: Annotated[str, typer.Option(help="The page to write.")] = "tour.html",
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Learn multi-head attention on one page in which the model runs: type, switch heads off, read what changes."""
    check_named("--out", out)
    from headwise.files.atomic_file import check_destination, put
    from headwise.files.text import visible
    from headwise.models import tiny_path
    from headwise.tour import read, render

    check_destination(out)
    if Path(out).suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"--out {out}: the tour is an HTML page; end the name in .html")
    content = read_text(text, file)
    if model is not None:
        check_named("MODEL", model, give="a checkpoint folder")
        if not Path(model).is_dir():
            raise typer.BadParameter(f"{model}: no such folder; headwise tour takes a checkpoint folder")
    folder = tiny_path() if model is None else Path(model)
    page = render(read(folder), content, packaged=folder == tiny_path()).encode()
    put(page, out)
    print(f"{visible(out)} ({len(page) / 1e6:,.1f} MB): open it in a browser")
    if open_it:
        import webbrowser

        webbrowser.open(Path(out).resolve().as_uri())
