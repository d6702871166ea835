"""The manifest of a written folder: a sha256 of every file, and of every source file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .shards import as_json

MANIFEST = "headwise-manifest.json"
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
MAX_MANIFEST = 1 << 20
Digest = tuple[int, str]


@dataclass(frozen=True)
class Manifest:
    """The size in bytes and the sha256 of each written file and of each source file, by name.

    It holds no time and no path, so the same input gives the same manifest.
    """

    version: str
    files: Mapping[str, Digest]
    source: Mapping[str, Digest]

    def to_json(self) -> bytes:
        """Return the manifest as the JSON that is written into the folder."""
        tables = {"files": self.files, "source": self.source}
        rows = {
            key: {name: {"bytes": size, "sha256": digest} for name, (size, digest) in table.items()}
            for key, table in tables.items()
        }
        return as_json({"headwise": self.version, **rows})


def digest(pieces: Iterable[bytes]) -> Digest:
    """Return the size in bytes and the sha256 of a file that is given in pieces."""
    sha, size = hashlib.sha256(), 0
    for piece in pieces:
        sha.update(piece)
        size += len(piece)
    return size, sha.hexdigest()


def verify(folder: str | os.PathLike[str]) -> Manifest:
    """Read every file of a written folder again, and compare it with the folder's manifest.

    Files that the manifest does not name are ignored.

    Args:
        folder: A folder that `headwise.reshape.write.writer.write` wrote.

    Returns:
        The manifest.

    Raises:
        ValueError: there is no manifest, or a file is missing or has changed.
    """
    path = Path(folder)
    manifest = _read(path)
    for name, expected in manifest.files.items():
        try:
            if not FILE.fullmatch(name) or not stat.S_ISREG(os.lstat(path / name).st_mode):
                raise ValueError(f"{path}: {name[:80]!r} is no plain file of the folder; write the checkpoint anew")
            with open(path / name, "rb") as file:
                actual = digest(iter(lambda f=file: f.read(8 << 20), b""))  # type: ignore[misc]
        except OSError as error:
            raise ValueError(f"{path}: {name!r} cannot be read ({error.strerror}); write the checkpoint anew") from None
        if actual != expected:
            raise ValueError(f"{path}: {name!r} is not what was written: {actual} and not {expected}; write it anew")
    return manifest


def _read(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode) or os.lstat(path).st_size > MAX_MANIFEST:
            raise ValueError("no plain file, or too large")
        table = json.loads(path.read_bytes())
        files, source = (
            {str(name): (int(row["bytes"]), str(row["sha256"])) for name, row in table[key].items()}
            for key in ("files", "source")
        )
        return Manifest(str(table["headwise"]), files, source)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        what = type(error).__name__
        raise ValueError(f"{path}: no manifest that can be read ({what}); headwise wrote no such folder") from None
