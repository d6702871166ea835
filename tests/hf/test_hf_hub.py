"""Of a hub, config.json is fetched first, then what is read and no more; here the hub is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_folders import change, refused
from huggingface_hub.utils import filter_repo_objects

import headwise.hf as hf


@pytest.fixture
def hub(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of a hub that has the folder's model; nothing is in the local cache."""
    requests: list[Any] = []

    def one_file(name: str, file: str) -> str:
        requests.append((name, file))
        return str(model_folder / file)

    def all_files(name: str, **how: Any) -> str:
        if how.get("local_files_only"):
            raise FileNotFoundError(name)
        requests.append((name, how))
        return str(model_folder)

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", one_file)
    monkeypatch.setattr("huggingface_hub.snapshot_download", all_files)
    return requests


def test_of_a_hub_only_what_is_read_is_fetched(hub: list[Any]) -> None:
    """config.json first; then no code, no pickled weights, and nothing of folders inside."""
    loaded = hf.load("someone/small")
    assert loaded.name == "someone/small"
    (first, (name, how)) = hub
    assert first == ("someone/small", "config.json") and name == "someone/small"
    wanted = ("config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer.json", "vocab.txt")
    unwanted = ("pytorch_model.bin", "model.pt", "modeling_x.py", "model.h5", "onnx/model.safetensors", "x/config.json")
    files = list(filter_repo_objects([*wanted, *unwanted], **how))
    assert files == list(wanted)


def test_a_model_that_cannot_be_seen_is_not_fetched(hub: list[Any], model_folder: Path) -> None:
    change(model_folder, model_type="openai-gpt", architectures=["OpenAIGPTLMHeadModel"])
    refused(
        "someone/small", "OpenAIGPTLMHeadModel (model_type 'openai-gpt') is not on transformers' attention interface"
    )
    assert hub == [("someone/small", "config.json")]


def test_without_a_hub_it_is_asked_once(hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A download asks six times, 23 seconds long; a folder's name with a letter too many looks like a hub name."""
    urls: list[str] = []

    def nobody(url: str) -> None:
        urls.append(url)
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", nobody)
    refused("my-modle", "my-modle: no such folder, no such model in the local cache, and it could not be fetched (Conn")
    assert [url.endswith("/my-modle/resolve/main/config.json") for url in urls] == [True] and hub == []


def test_a_download_that_breaks_off(hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: (_ for _ in ()).throw(OSError("gone")))
    refused("someone/small", "someone/small: the download broke off (OSError); try again, or give a local folder")
