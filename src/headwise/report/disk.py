"""The file: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from .escape import visible
from .page import render

if TYPE_CHECKING:
    from headwise.look.records import Look


def write(look: Look, path: str | os.PathLike[str]) -> int:
    """Writes the report of a look; the file is there whole, or not at all.

    Args:
        look: what :func:`headwise.look.at` returned.
        path: the file to write; one that is there is replaced, a symbolic link is followed.

    Returns:
        The bytes written.

    Raises:
        FileNotFoundError: the folder does not exist.
        PermissionError: the folder may not be written.
        IsADirectoryError: the path is a folder.
        OSError: the path is a device or the like; or the disk is full.

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
    target = check_destination(path)
    content = render(look).encode()
    partial = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:  # an interrupt, too, must leave nothing half-written
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)
    return len(content)


def check_destination(path: str | os.PathLike[str]) -> Path:
    """The real path a report would be written to; raises what :func:`write` would, before the work is done.

    Raises:
        FileNotFoundError: the folder does not exist.
        PermissionError: the folder may not be written.
        IsADirectoryError: the path is a folder.
        OSError: the path is a device or the like.
    """
    shown = visible(os.fspath(path))
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {shown}: its folder does not exist; make it first, or give another path")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {shown}: it is a folder; give a file name, such as report.html in it")
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        raise OSError(f"cannot write {shown}: it is not a plain file; give the path of a plain or new file")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write {shown}: no permission to write in its folder; give another path")
    return target


def _sync_folder(folder: Path) -> None:
    """Makes the renaming last through a power cut, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
