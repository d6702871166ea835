"""The report as a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headwise.files.atomic_file import check_destination, put

from .page import render

if TYPE_CHECKING:
    from headwise.look.result import Look


def write(look: Look, path: str | os.PathLike[str]) -> int:
    """Write the report of a look; the file is written atomically.

    Args:
        look: the result of :func:`headwise.look.at`.
        path: the file to write; an existing file is replaced, a symbolic link is followed.

    Returns:
        The number of bytes written.

    Raises:
        TypeError: not a look, or not a path.
        FileNotFoundError: the folder does not exist.
        PermissionError: the folder is not writable.
        IsADirectoryError: the path is a folder.
        OSError: the path is a device or similar, or the disk is full.

    >>> import pathlib, tempfile
    >>> import headwise.report
    >>> from headwise.look import Look
    >>> look = Look(model="none", num_layers=0, num_heads=0, length=0, tokens=(), heads=(), kind="decoder",
    ...             seconds=0.0, version="0")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "report.html")
    ...     headwise.report.write(look, path) == path.stat().st_size
    True
    """
    check_destination(path)
    content = render(look).encode()
    put(content, path)
    return len(content)
