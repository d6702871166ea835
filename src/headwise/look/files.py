"""Looks as files; the ending of the name selects the format, and the file is written atomically.

    .parquet  .csv     one row per head, the columns of `to_frame`
    .json              everything; `read` restores the look
    .md                the head card
    .svg  .png         a figure of the roles, layer by head

Comparisons of two looks, training curves, circuits and patching results are written the same way, in the formats
that they support.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..extras import missing_extra
from ..files.atomic_file import check_destination, get, put
from ..files.text import visible
from .result import Look
from .views import tables

PLOTS = ("plot_roles", "plot_formation", "plot_patching", "plot_circuits")
"""The methods that draw a figure; an object has one of them."""

ENDINGS = (".parquet", ".csv", ".json", ".md", ".svg", ".png")

MAX_FILE = 2_000_000_000
"""The most bytes of a look file that is read."""


def write(what: Any, path: str | os.PathLike[str]) -> int:
    """Write a look, a comparison, a curve or the result of patching; an existing file is replaced.

    Returns:
        The number of bytes written.

    Raises:
        TypeError: an object of another type.
        ValueError: the ending of the name is not one of its formats.
        MissingExtra: pyarrow (for .parquet) or Matplotlib (for figures) is not installed.
        OSError: the file cannot be written: no such folder, no permission, a full disk.

    >>> import pathlib, tempfile
    >>> from headwise import look
    >>> seen = look.Look("none", 0, 0, 0, (), (), "decoder", 0.0, "0")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = look.write(seen, pathlib.Path(folder, "heads.json"))
    ...     look.read(pathlib.Path(folder, "heads.json")) == seen
    True
    """
    ending = check(path, endings_of(what))
    content = _FORMS[ending](what, ending)
    put(content, path)
    return len(content)


def read(path: str | os.PathLike[str]) -> Look:
    """Return the look in a .json file.

    Raises:
        TypeError: not a path.
        OSError: the file cannot be read.
        ValueError: the file does not contain a look.
    """
    content = get(path, "a look", MAX_FILE + 1)
    shown = visible(str(os.fspath(path)))
    if len(content) > MAX_FILE:
        raise ValueError(f"{shown} has more than {MAX_FILE // 1_000_000} MB; a look is smaller")
    try:
        return Look.from_dict(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown} is no look: {error}; give what look.write or --json wrote") from None


def check(path: str | os.PathLike[str], endings: Sequence[str] = ENDINGS) -> str:
    """Return the ending of the name; raise the errors of `write` before the work is done."""
    check_destination(path)
    ending = Path(path).suffix.lower()
    if ending not in endings:
        raise ValueError(
            f"{visible(str(os.fspath(path)))} ends in none of {' '.join(endings)}; the end says what to write"
        )
    if ending == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise missing_extra("a .parquet file", "look", error) from None
    elif ending in (".svg", ".png"):
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise missing_extra("a figure", "look", error) from None
    return ending


def endings_of(what: object) -> tuple[str, ...]:
    """Return the file endings that an object supports, by the methods that it has."""
    ways: dict[str, tuple[str, ...]] = {".svg": PLOTS, ".png": PLOTS, ".json": ("to_json",), ".md": ("card",)}
    ways |= {".csv": ("rows",), ".parquet": ("rows",)}
    endings = tuple(ending for ending in ENDINGS if any(hasattr(what, way) for way in ways[ending]))
    if not endings:
        raise TypeError(f"a look, a comparison, a curve or a patching is written; got {type(what).__name__}")
    return endings


# --- the forms --------------------------------------------------------------------------------------------------------


def _parquet(what: Any, ending: str) -> bytes:
    import pyarrow
    import pyarrow.parquet

    columns = tables.columns(what.rows())
    table = pyarrow.table({name: pyarrow.array(values) for name, values in columns.items()})
    about = {b"headwise": json.dumps(what.about()).encode()}
    file = io.BytesIO()
    pyarrow.parquet.write_table(table.replace_schema_metadata(about), file)
    return file.getvalue()


def _csv(what: Any, ending: str) -> bytes:
    from ..plan.show.csv import csv_of

    return csv_of(what.rows()).encode("utf-8", "backslashreplace")


def _json(what: Any, ending: str) -> bytes:
    return what.to_json().encode() + b"\n"


def _card(what: Any, ending: str) -> bytes:
    return what.card().encode()


def _figure(what: Any, ending: str) -> bytes:
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "none"}):
        figure = next(getattr(what, name) for name in PLOTS if hasattr(what, name))()
        figure.savefig(file, format=ending[1:], dpi=150, metadata={"Date": None} if ending == ".svg" else None)
    return file.getvalue()


_FORMS = {".parquet": _parquet, ".csv": _csv, ".json": _json, ".md": _card, ".svg": _figure, ".png": _figure}
