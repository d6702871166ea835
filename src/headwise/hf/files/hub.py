"""The local folder of a model that is given by its path or its hub name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...files.hub_cache import HUB_NAME, cached_snapshot
from ..errors import ModelError
from .folder import PICKLES
from .reader import check_named

WANTED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]


def find_folder(name_or_path: str | Path, check: Callable[[Path], object]) -> tuple[Path, str]:
    """Return (folder, name to show). An existing folder has priority, then the local cache, then the hub.

    Before the weights are downloaded, `check` is called with a folder that holds config.json alone; it may raise.
    """
    name = str(name_or_path)
    check_named("model", name, give="a checkpoint folder, or a hub name such as 'org/model'")
    path = Path(name).expanduser()
    if path.is_dir():
        return path, path.resolve().name if name in (".", "..") else name
    if path.exists():
        raise ModelError(f"{name}: a file, and a model is a folder with config.json and *.safetensors; give the folder")
    if isinstance(name_or_path, Path) or not HUB_NAME.fullmatch(name):
        raise ModelError(
            f"{name}: no such folder; give one with config.json and *.safetensors, or a hub name such as 'org/model'"
        )
    return _cached(name) or _fetched(name, check), name


def _cached(name: str) -> Path | None:
    """Return the model's folder in the local cache; None if it is missing or has no weights and must be downloaded."""
    folder = cached_snapshot(name)
    if folder is None or not any(path for pattern in ("*.safetensors", *PICKLES) for path in folder.glob(pattern)):
        return None
    return folder


def _fetched(name: str, check: Callable[[Path], object]) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))  # Without a hub, a download retries for 23 seconds.
        first = Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # All causes (offline, wrong name, gated, proxy) give the same message.
        raise ModelError(
            f"{name}: no such folder, no such model in the local cache, and it could not be fetched "
            f"({type(error).__name__}); connect, log in if the model is gated, or give a local folder"
        ) from None
    check(first.parent)
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=["*/*"]))
    except Exception as error:
        raise ModelError(
            f"{name}: the download broke off ({type(error).__name__}); try again, or give a local folder"
        ) from None
