"""Atomic folders: written under a hidden name next to their destination, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from . import partial as hidden
from .partial import HAS_LOCKS, is_there, lock, sync
from .text import is_utf8

ENDING = "headwise-partial"
SPARE = 1 << 20  # bytes for the manifest, the index and the file system


def check_new_folder(destination: str | os.PathLike[str], source: Path, size: int | None) -> Path:
    """Return the real path of a new folder of `size` bytes; raise an error before any work if it cannot be created.

    If the size is None, free space is not checked.

    Raises:
        TypeError: the destination is not a path.
        ValueError: the path has no folder name, or is not UTF-8; or it is the source or is inside it.
        FileExistsError: the path already exists.
        FileNotFoundError: its parent does not exist.
        PermissionError: its parent is not writable.
        OSError: there is not enough space on the disk.
    """
    if not isinstance(destination, (str, os.PathLike)):
        raise TypeError(f"a checkpoint is written to a path; got {type(destination).__name__}")
    path = Path(destination)
    if path.name in ("", "..") or "\0" in str(path):
        raise ValueError(f"cannot write {str(path)!r}: it does not name a new folder; give one, such as ./smaller")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: its folder does not exist; create it, or give another path")
    target = path.parent.resolve() / path.name
    _check_name(path, target)
    if not is_utf8(target):
        raise ValueError(
            f"cannot write {path}: the path is not valid UTF-8, and the safetensors library opens no other; give "
            "another path"
        )
    if any(os.path.samefile(folder, source) for folder in (target, *target.parents) if folder.exists()):
        raise ValueError(
            f"cannot write {path}: it is the source folder or inside it, and that is never changed; give another"
        )
    if os.path.lexists(target):
        raise FileExistsError(
            f"cannot write {path}: it already exists, and nothing is overwritten; remove it or give another path"
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write {path}: no permission to write in its folder; give another path")
    free = shutil.disk_usage(target.parent).free
    if size is not None and free < size + SPARE:
        raise OSError(
            f"cannot write {path}: {size + SPARE:,} bytes are needed and {free:,} are free; free some space, or give "
            "another path"
        )
    return target


def _check_name(path: Path, target: Path) -> None:
    """Raise OSError for a name that is not possible, such as one that is too long."""
    try:
        os.lstat(target)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise type(error)(f"cannot write {path}: {error.strerror}; give another path") from error


def try_folder(target: Path) -> None:
    """Create and remove a folder next to the target, because permissions are not enough (a read-only disk, /proc).

    Raises:
        OSError: the folder cannot be created.
    """
    partial = hidden_name(target)
    with ended_in_order():
        try:
            partial.mkdir()
        except OSError as error:
            raise type(error)(
                f"cannot write {target}: no folder can be created in its folder ({error.strerror}); give another path"
            ) from error
        finally:
            remove(partial)


# -- the hidden folder ------------------------------------------------------------------------------------------------


def hidden_name(target: Path) -> Path:
    """Return a new hidden name next to the target."""
    return hidden.hidden_name(target, ENDING)


def claim(partial: Path) -> int | None:
    """Create the folder and return its lock, held until the descriptor is closed; None if the system has no locks."""
    while True:
        partial.mkdir()
        if not HAS_LOCKS:
            return None
        try:
            descriptor = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue
        lock(descriptor)
        if is_there(descriptor, partial):
            return descriptor
        os.close(descriptor)


def remove(partial: Path) -> None:
    """Remove the folder as far as possible; the next run removes the rest."""
    shutil.rmtree(partial, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove the incomplete folders in a folder that no process is writing."""
    hidden.clear(folder, hidden.hidden_names(None, ENDING), lambda path: remove(Path(path)))


def settle(partial: Path, target: Path) -> None:
    """Rename the folder to its final name and sync it, so that it is complete even after a power loss.

    Raises:
        FileExistsError: another folder or file has that name now.
        OSError: an error of the system; or the folder has its name, but the disk did not confirm it.
    """
    sync(partial)
    try:
        os.rename(partial, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(
                f"cannot write {target}: another run has created it; nothing is overwritten; give another path"
            ) from error
        raise
    try:
        sync(target.parent)
    except OSError as error:
        raise OSError(
            f"{target} is written completely, but the disk did not confirm its name ({error.strerror}); "
            "check the disk, then that the folder exists"
        ) from error


# -- signals ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into exceptions, like Ctrl-C, so that incomplete files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    defaults = [number for number in names if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in defaults:
            signal.signal(number, _end)
        yield
    finally:
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
