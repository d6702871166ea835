"""Safe reading of a model folder: only regular files inside the folder, with size limits and strict JSON."""

from __future__ import annotations

import os
import re
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from ...files.strict_json import parse_object
from ...files.text import one_line
from ..errors import ModelError

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
PIECE = 64 << 20
READ_ONLY = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""Flags to open a file without following links and without waiting for a pipe; Windows has only O_BINARY."""


def check_named(what: str, name: str | bytes, *, give: str) -> None:
    """Raise ModelError for an empty name, because Path("") is the current folder."""
    if not name:
        raise ModelError(f"the {what}'s name is empty; give {give}")


def inside(folder: Path, name: str) -> Path:
    """Return the real path of a regular file in the folder, or in the blobs of the local cache for a cached model."""
    if not NAME.fullmatch(name):
        raise ModelError(f"{folder}: {name[:80]!r} is no plain file name; get the folder anew")
    try:
        real = (folder / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # Before Python 3.13, circular links raise RuntimeError.
        if isinstance(error, OSError) and not os.path.lexists(folder / name):
            raise ModelError(f"{folder}: the file {name!r} is missing; download it anew") from None
        raise ModelError(f"{folder}: {name!r} leads nowhere ({one_line(error)}); download it anew") from None
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parent.parent / "blobs")
    if real.parent not in homes:
        raise ModelError(f"{folder}: {name!r} leads to {real}, outside of the model's folder; copy the file into it")
    if not real.is_file():  # This is checked before opening, because opening a device can have side effects.
        raise ModelError(f"{folder}/{name}: not a regular file; download it anew")
    return real


def open_file(folder: Path, name: str) -> FileIO:
    """Open a regular file of the folder read-only and return it; the caller closes it."""
    real = inside(folder, name)
    try:
        file = FileIO(os.open(real, READ_ONLY), "rb")
    except OSError as error:
        raise ModelError(f"{folder}/{name}: cannot be read ({one_line(error)}); check its permissions") from None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ModelError(f"{folder}/{name}: not a regular file; download it anew")


def read_bytes(folder: Path, name: str, limit: int) -> bytes:
    """Return the content of a regular file of the folder; raise ModelError if it has more than `limit` bytes."""
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ModelError(f"{folder}/{name}: {size} bytes, at most {limit} are read; such a file describes no model")
        return read_part(file, 0, size, f"{folder}/{name}")


def read_part(file: FileIO, start: int, size: int, where: str) -> bytes:
    """Return `size` bytes of an open file from byte `start` on."""
    content = bytearray(size)
    fill(memoryview(content), file, start, where)
    return bytes(content)


def fill(memory: memoryview, file: FileIO, start: int, where: str) -> None:
    """Fill the memory with the bytes of a file from `start` on; raise ModelError if the file ends too early."""
    try:
        file.seek(start)
        done = 0
        while done < len(memory):
            read = file.readinto(memory[done : done + PIECE])
            if not read:
                raise ModelError(f"{where}: ends before byte {start + len(memory):,}; it changed while it was read")
            done += read
    except OSError as error:
        raise ModelError(f"{where}: cannot be read ({one_line(error)}); check its disk") from None


def read_json(folder: Path, name: str, limit: int) -> dict[str, Any]:
    """Return the JSON object in a file of the folder: no NaN or Infinity, no repeated key, at most `limit` bytes."""
    return parse_json(read_bytes(folder, name, limit), f"{folder}/{name}")


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in `text`, as strictly as `read_json`; `where` names the source in errors."""
    try:
        return parse_object(text)
    except ValueError as error:
        raise ModelError(f"{where}: {error}; download the file anew") from None
