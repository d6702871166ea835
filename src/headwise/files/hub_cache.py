"""Lookup of models in the local Hugging Face hub cache, without its library and without the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
COMMIT = re.compile(r"[0-9a-f]{40}")


def cached_snapshot(name: str) -> Path | None:
    """Return the folder of a model's ``main`` revision in the local cache; None if there is none.

    The cache is ``HF_HUB_CACHE``, else ``HF_HOME/hub``, else ``huggingface/hub`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    if not HUB_NAME.fullmatch(name) or ".." in name:
        return None
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    folder = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"), "models--" + name.replace("/", "--"))
    try:
        commit = (folder / "refs" / "main").read_text("ascii")[:41].strip()
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and (snapshot / "config.json").is_file() else None
