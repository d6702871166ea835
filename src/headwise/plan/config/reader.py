"""The JSON of a config.json or a heads plan: untrusted input, one object in a regular file of at most 1 MB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...files.strict_json import parse_object

MAX_BYTES = 1_000_000


def parse(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises ValueError for anything else."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("is not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror or type(error).__name__})") from None
    if len(raw) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes, so it is not the config.json of a model")
    return parse_object(raw)
