"""Hidden names and locks of files and folders that are being written.

A process that writes one holds its lock until it is done, and the system releases the lock of a process that is killed.
So a half-written file or folder whose lock can be had belongs to nobody, and is removed by the next run. It could be
removed between its making and its locking; `is_there` tells, and then it is made again.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no locks, so what a killed run left behind stays
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None


def hidden_name(target: Path, ending: str) -> Path:
    """Return a new name beside the target: ``.NAME.0123456789abcdef.ending``, with at most 50 characters of the name.

    So it is no longer than a name may be, even with characters of four bytes.
    """
    return target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.{ending}")


def hidden_names(target: Path | None, ending: str) -> re.Pattern[str]:
    """Return a pattern of the hidden names of a target; of any target if it is None."""
    name = r".{1,50}" if target is None else re.escape(target.name[:50])
    return re.compile(rf"\.{name}\.[0-9a-f]{{16}}\.{re.escape(ending)}", re.DOTALL)


def lock(descriptor: int) -> None:
    """Take the lock of an open file or folder, which is held until the descriptor is closed."""
    if HAS_LOCKS:
        with contextlib.suppress(OSError):  # a file system without locks: nobody else gets one, either
            fcntl.flock(descriptor, fcntl.LOCK_EX)


def is_there(descriptor: int, path: Path) -> bool:
    """Return whether the path still leads to what is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def clear(folder: Path, names: re.Pattern[str], remove: Callable[[str], object]) -> None:
    """Call `remove` with the path of each entry of the folder that has such a name and whose lock is free."""
    if not HAS_LOCKS:
        return
    with contextlib.suppress(OSError):  # a folder that may be written but not read
        for entry in [entry for entry in os.scandir(folder) if names.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):  # another user's, gone already, or locked: it is being written
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(entry.path)
                finally:
                    os.close(descriptor)
