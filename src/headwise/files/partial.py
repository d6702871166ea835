"""Hidden names and locks of files and folders during a write.

A process holds the lock of the file or folder that it writes, and the system releases the lock if the process is
killed. So an incomplete file or folder with a free lock has no owner, and the next run removes it. It could be removed
between its creation and its locking; `is_there` detects this, and it is then created again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks, so files of killed runs stay
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None


def hidden_name(target: Path, ending: str) -> Path:
    """Return a new name next to the target: ``.NAME.0123456789abcdef.ending``, with at most 50 characters of the name.

    So it does not exceed the maximum length of a name, even with 4-byte characters.
    """
    return target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.{ending}")


def hidden_names(target: Path | None, ending: str) -> re.Pattern[str]:
    """Return a pattern for the hidden names of a target, or of any target if it is None."""
    name = r".{1,50}" if target is None else re.escape(target.name[:50])
    return re.compile(rf"\.{name}\.[0-9a-f]{{16}}\.{re.escape(ending)}", re.DOTALL)


def lock(descriptor: int) -> None:
    """Take the lock of an open file or folder; it is held until the descriptor is closed."""
    if HAS_LOCKS:
        with contextlib.suppress(OSError):  # the file system has no locks, so no process gets one
            fcntl.flock(descriptor, fcntl.LOCK_EX)


def is_there(descriptor: int, path: Path) -> bool:
    """Return whether the path still refers to the open file or folder."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def sync(folder: Path) -> None:
    """Flush the names in a folder to disk, if the system can sync folders."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders; elsewhere a folder may be writable and not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def clear(folder: Path, names: re.Pattern[str], remove: Callable[[str], object]) -> None:
    """Call `remove` with the path of each entry of the folder whose name matches and whose lock is free."""
    if not HAS_LOCKS:
        return
    with contextlib.suppress(OSError):  # the folder may be writable but not readable
        for entry in [entry for entry in os.scandir(folder) if names.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):  # another user's, removed already, or locked by its writer
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(entry.path)
                finally:
                    os.close(descriptor)
