"""Atomic files: written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .partial import HAS_LOCKS, clear, hidden_name, hidden_names, is_there, lock, sync
from .text import visible

ENDING = "partial"


def put(content: bytes, path: str | os.PathLike[str]) -> None:
    """Write a file atomically, as `writing` does.

    Raises:
        OSError: as for `check_destination`; or the disk is full.
    """
    if not isinstance(content, bytes):
        raise TypeError(f"a file's content is bytes; got {type(content).__name__}; encode a text with .encode()")
    with writing(path) as file:
        file.write(content)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], what: str = "") -> Iterator[BinaryIO]:
    """Open a hidden file in the same folder for writing, and rename it at the end, so that the write is atomic.

    Incomplete files of killed runs in that folder are removed first. `what` describes the content in error messages.

    Raises:
        OSError: as for `check_destination`; or the disk is full.
    """
    target = _place(path)
    clear(target.parent, hidden_names(target, ENDING), os.unlink)
    partial, descriptor = _claim(target, path)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not HAS_LOCKS:
                file.close()  # Windows cannot rename an open file; on other systems the lock is held until the rename
            os.replace(partial, target)
    except BaseException as error:  # an interrupt must not leave an incomplete file either
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            name, why = visible(os.fspath(path)) + (what and f", {what}"), error.strerror or type(error).__name__
            raise OSError(f"cannot write {name}: {why}; free some space, or give another path") from error
        raise
    with contextlib.suppress(OSError):  # the file is written; only its name may be lost in a power failure
        sync(target.parent)


def get(path: str | os.PathLike[str], what: str, most: int = -1) -> bytes:
    """Return at most `most` bytes of a file; `what` describes the content in error messages.

    Raises:
        TypeError: the argument is not a path.
        OSError: the file cannot be read.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{what} is read from a path; got {type(path).__name__}")
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError as error:
        name = visible(str(os.fspath(path)))
        raise type(error)(f"cannot read {name}: {error.strerror or type(error).__name__}") from error


def check_destination(path: str | os.PathLike[str]) -> Path:
    """Return the real path that a file would be written to; raise the errors of `put` before the work starts.

    A file is created in its folder and removed, because permissions are not enough (a read-only disk, /proc).

    Raises:
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: the path is a folder.
        OSError: the path is a device or another special file; or no file can be created in its folder.
    """
    target = _place(path)
    partial, descriptor = _claim(target, path)
    os.close(descriptor)
    partial.unlink(missing_ok=True)  # another run may have removed it
    return target


def _place(path: str | os.PathLike[str]) -> Path:
    """Return the real path of a plain file or of a new file."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"a file is written to a path; got {type(path).__name__}")
    shown = visible(str(os.fspath(path)))
    if not shown:
        raise FileNotFoundError("cannot write: the name of the file is empty; give one")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {shown}: its folder does not exist; create it, or give another path")
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return target
    except OSError as error:  # the name is too long, or a folder has no search permission
        raise type(error)(f"cannot write {shown}: {error.strerror}; give another path") from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"cannot write {shown}: it is a folder; give a file name, such as report.html in it")
    if not stat.S_ISREG(mode):
        raise OSError(f"cannot write {shown}: it is not a regular file; give the path of a regular or new file")
    return target


def _claim(target: Path, path: str | os.PathLike[str]) -> tuple[Path, int]:
    """Return a new hidden file next to the target, open and locked; errors name the path as the caller gave it."""
    while True:
        partial = hidden_name(target, ENDING)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            shown, why = visible(str(os.fspath(path))), error.strerror or type(error).__name__
            raise type(error)(
                f"cannot write {shown}: no file can be created in its folder ({why}); give another path"
            ) from error
        lock(descriptor)
        if not HAS_LOCKS or is_there(descriptor, partial):
            return partial, descriptor
        os.close(descriptor)
