"""Folders that are written whole or not at all: beside their destination under a hidden name, then renamed."""

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
from .partial import HAS_LOCKS, is_there, lock

ENDING = "headwise-partial"
SPARE = 1 << 20  # bytes for manifest, index and what the file system itself needs


def check_new_folder(destination: str | os.PathLike[str], source: Path, size: int | None) -> Path:
    """Return the real path of a folder of so many bytes that is to be made; raise if it cannot be, before any work.

    Where the size is not known yet, nothing is said of room.

    Raises:
        TypeError: no path.
        ValueError: no name of a folder; or it is the source, or lies in it.
        FileExistsError: something is there.
        FileNotFoundError: its parent does not exist.
        PermissionError: its parent may not be written.
        OSError: not enough room on the disk.
    """
    if not isinstance(destination, (str, os.PathLike)):
        raise TypeError(f"a checkpoint is written to a path; got {type(destination).__name__}")
    path = Path(destination)
    if path.name in ("", "..") or "\0" in str(path):
        raise ValueError(f"cannot write {str(path)!r}: it names no folder to be made; give one, such as ./smaller")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: its folder does not exist; make it first, or give another path")
    target = path.parent.resolve() / path.name
    _check_name(path, target)
    if any(os.path.samefile(folder, source) for folder in (target, *target.parents) if folder.exists()):
        raise ValueError(f"cannot write {path}: it is the source, or lies in it, which is only read; give another path")
    if os.path.lexists(target):
        raise FileExistsError(
            f"cannot write {path}: it exists, and nothing is overwritten; remove it or give another path"
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write {path}: no permission to write in its folder; give another path")
    free = shutil.disk_usage(target.parent).free
    if size is not None and free < size + SPARE:
        raise OSError(
            f"cannot write {path}: {size + SPARE:,} bytes are needed and {free:,} are free; make room, or give another "
            "path"
        )
    return target


def _check_name(path: Path, target: Path) -> None:
    """Raise OSError for a name that cannot be, such as one that is too long."""
    try:
        os.lstat(target)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise type(error)(f"cannot write {path}: {error.strerror}; give another path") from error


def try_folder(target: Path) -> None:
    """Make a folder beside the target and removes it: permissions do not tell all (a disk that is only read, /proc).

    Raises:
        OSError: it cannot be made.
    """
    partial = hidden_name(target)
    with ended_in_order():
        try:
            partial.mkdir()
        except OSError as error:
            raise type(error)(
                f"cannot write {target}: no folder can be made in its folder ({error.strerror}); give another path"
            ) from error
        finally:
            remove(partial)


# -- the hidden folder ------------------------------------------------------------------------------------------------


def hidden_name(target: Path) -> Path:
    """Return a new name beside the target."""
    return hidden.hidden_name(target, ENDING)


def claim(partial: Path) -> int | None:
    """Make the folder and take its lock, held until the descriptor is closed; None where there are no locks."""
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
    """Remove the folder, as far as the system lets it; what it does not is cleared by the next run."""
    shutil.rmtree(partial, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove the half-written folders in a folder that nobody writes any more."""
    hidden.clear(folder, hidden.hidden_names(None, ENDING), lambda path: remove(Path(path)))


def settle(partial: Path, target: Path) -> None:
    """Give the folder its name, for good: a power cut after this leaves it whole.

    Raises:
        FileExistsError: something has that name by now.
        OSError: as the system says; or the folder has its name, and the disk would not confirm it.
    """
    sync(partial)
    try:
        os.rename(partial, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(
                f"cannot write {target}: another run was faster, and nothing is overwritten; give another path"
            ) from error
        raise
    try:
        sync(target.parent)
    except OSError as error:
        raise OSError(
            f"{target} is written and whole, but the disk does not confirm its name ({error.strerror}); "
            "check the disk, then that the folder is there"
        ) from error


def sync(folder: Path) -> None:
    """Make the names in a folder last, where the system lets folders be synced."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folder; elsewhere one may be written and not read
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


# -- signals ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """What ends the process from outside (SIGTERM, SIGHUP) is an exception, as Ctrl-C is, so that all is cleared."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [number for number in names if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, _end)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
