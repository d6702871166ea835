"""Read-only access to a checkpoint folder, tensor by tensor: no code is run and no file outside of it is opened."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...files.text import one_line
from ..errors import ModelError
from ..files.config_fields import harmless, taken
from ..files.folder import INDEX, SINGLE, Weights, find_weights, folder_config
from ..files.reader import check_named, fill, open_file, parse_json, read_bytes, read_part
from ..files.safetensors_header import TensorEntry
from .layouts import layouts
from .model import build
from .verify import prove

CONFIGS = (
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
DATA = (
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "USE_POLICY.md",
    "NOTICE",
    "NOTICE.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "normalizer.json",
    "sentencepiece.bpe.model",
    "source.spm",
    "spiece.model",
    "spm.model",
    "tekken.json",
    "target.spm",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
"""The files that a copy of a model includes. All others are left out: code, pickles, other formats, the model card."""

MAX_SETTINGS, MAX_DATA = 16 << 20, 256 << 20
NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
FORMATS = ("pt", "mlx")  # Both store matrices in torch's layout; in other formats they are transposed.
LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
Identity = tuple[int, int, int, int, int]


class Checkpoint:
    """A checkpoint folder that is open read-only; as a context manager it closes its files at the end.

    Attributes:
        folder: The path of the folder.
        config: The content of config.json without the keys that its config class in transformers does not use.
        dropped: The removed keys, sorted.
        tensors: Every tensor by name, with `dtype` and `shape`.
        files: The files of a copy besides config and weights: tokenizer, generation_config.json, licence.
        inputs: Every file that is read.
        layouts: The table of how known architectures store attention.
    """

    def __init__(self, folder: Path, raw: dict[str, Any], weights: Weights, before: Mapping[str, Identity]) -> None:
        self.folder = folder
        self.layouts = layouts()
        self.config: Mapping[str, Any] = taken(raw, f"{folder}/config.json")
        self.dropped = tuple(sorted(raw.keys() - self.config.keys()))
        self.tensors: Mapping[str, TensorEntry] = weights.entries
        self._shard_of = {name: shard for shard, table in weights.tensors.items() for name in table}
        self.files = tuple(name for name in sorted(CONFIGS + DATA) if os.path.lexists(folder / name))
        index = () if weights.index is None else (INDEX,)
        self.inputs = ("config.json", *index, *weights.files, *self.files)
        self._identity = before
        for name in self.files:
            _check_file(folder, name)
        with ExitStack() as stack:
            self._open = {name: stack.enter_context(open_file(folder, name)) for name in weights.files}
            self.check()
            self._closing = stack.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; after that no tensor can be read."""
        self._closing.close()

    def read(self, name: str) -> Tensor:
        """Return one tensor in new CPU memory; no other tensor is read.

        Raises:
            KeyError: The checkpoint has no such tensor.
            ModelError: The file cannot be read, or it changed after it was opened.
        """
        stored = self.tensors[name]
        shard = self._shard_of[name]
        self._check(shard, os.fstat(self._open[shard].fileno()))
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        if stored.size:
            memory = tensor.view(-1).view(torch.uint8).numpy().data
            fill(memory, self._open[shard], stored.start, f"{self.folder}/{shard}")
        return tensor

    def chunks(self, file: str) -> Iterator[bytes]:
        """Yield the bytes of one of `inputs` in pieces of 8 MiB."""
        with ExitStack() as stack:
            stream = self._open.get(file) or stack.enter_context(open_file(self.folder, file))
            self._check(file, os.fstat(stream.fileno()))
            size = os.fstat(stream.fileno()).st_size
            for start in range(0, size, 8 << 20):
                yield read_part(stream, start, min(8 << 20, size - start), f"{self.folder}/{file}")

    def copy(self, file: str) -> Iterator[bytes]:
        """Yield the bytes of one of `files` for a copy: settings files without the keys that can name code."""
        if file not in CONFIGS:
            yield from self.chunks(file)
            return
        content = b"".join(self.chunks(file))
        table = parse_json(content, f"{self.folder}/{file}")
        safe = harmless(table)
        yield content if safe == table else json.dumps(safe, indent=2, ensure_ascii=False).encode() + b"\n"

    def prove(self, folder: Path, request: Mapping[str, Any], *, compare: bool = True) -> dict[str, Any]:
        """Load a checkpoint that was made from this one in a fresh process, and compare both if `compare` is true.

        See `headwise.hf.loading.verify.prove`.
        """
        weights = [self.folder.resolve() / name for name in self._open]
        return prove(folder, self.config if compare else None, weights, request)

    def build(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> PreTrainedModel:
        """Return a text model of any architecture from its config and tensors: see `loading.model.build`."""
        return build(config, state)

    def check(self) -> None:
        """Raise ModelError unless every file is unchanged since the folder was opened."""
        for name in self.inputs:
            try:
                status = os.stat(self.folder / name)
            except OSError:
                raise _changed(self.folder, name) from None
            self._check(name, status)

    def _check(self, name: str, status: os.stat_result) -> None:
        if _identity(status) != self._identity.get(name):
            raise _changed(self.folder, name)


def checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint folder to read it tensor by tensor: config.json, safetensors and the other files of a copy.

    Every header is checked against the size of its file before memory is allocated. Nothing in the folder is run,
    pickles are refused, and no file outside of it is opened (except the blobs that links in the hub's cache point to).

    Args:
        folder: The folder that holds config.json and ``*.safetensors``.

    Returns:
        The open checkpoint; use it in a ``with`` statement.

    Raises:
        ModelError: The folder does not exist; files are missing, damaged, contradictory or not regular files; the
            checkpoint is quantised; a tensor has different dtypes in different layers.
        TypeError: `folder` is not a path.

    >>> import headwise.hf, headwise.models
    >>> with headwise.hf.checkpoint(headwise.models.tiny_path()) as opened:
    ...     print(opened.config["model_type"], len(opened.tensors), opened.files)
    ...     name = min(opened.tensors)
    ...     print(name, opened.tensors[name].shape, opened.read(name).dtype)
    llama 38 ('tokenizer.json', 'tokenizer_config.json')
    model.embed_tokens.weight (2048, 256) torch.float16
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"a checkpoint is opened by its path; got {type(folder).__name__}")
    path = Path(folder)
    check_named("checkpoint", os.fspath(folder), give="a folder with config.json and *.safetensors")
    if not os.path.isdir(path):  # Unlike Path.is_dir, it does not raise for an invalid name.
        raise ModelError(f"{folder}: no such folder; give one with config.json and *.safetensors")
    before = _identities(path)
    raw = folder_config(path)
    if os.path.lexists(path / "adapter_config.json"):
        raise ModelError(
            f"{path}: holds an adapter beside the model; merge it first (peft: model.merge_and_unload()) and save that"
        )
    weights = find_weights(path)
    _check_shards(path, weights)
    _check_index(path, weights)
    _check_dtypes(path, weights)
    return Checkpoint(path, raw, weights, before)


# -- consistency of the files -----------------------------------------------------------------------------------------


def _check_shards(folder: Path, weights: Weights) -> None:
    """Check that the folder holds one complete set of weight files and no other, in torch's layout."""
    names = sorted(os.listdir(folder))
    if weights.index is None and INDEX in names:
        raise ModelError(
            f"{folder}: holds both {SINGLE} and {INDEX}, and only one of them can be meant; remove what is old"
        )
    sets = {(m[1], m[3]) for name in weights.files if (m := NUMBERED.fullmatch(name))}
    stems = {stem for stem, _ in sets} | {"model"}  # The same weights in another format have another name.
    stray = [name for name in names if (m := NUMBERED.fullmatch(name)) and m[1] in stems and name not in weights.files]
    if stray:
        raise ModelError(
            f"{folder}: {stray[0]!r} belongs to no index; remove it, or get the index that names it: download anew"
        )
    for stem, total in sorted(sets):
        wanted = (f"{stem}-{n:05}-of-{total}.safetensors" for n in range(1, int(total) + 1))
        missing = next((name for name in wanted if name not in weights.files), None)
        if missing is not None:
            raise ModelError(f"{folder}: the index names no {missing!r}, so tensors are missing; download it anew")
    for name, metadata in weights.metadata.items():
        if metadata.get("format", "pt") not in FORMATS:
            raise ModelError(
                f"{folder}/{name}: written by {metadata['format'][:40]!r}, which stores weights in another layout; "
                "load it with transformers and save it anew"
            )


def _check_index(folder: Path, weights: Weights) -> None:
    """Check that each tensor is in the file that the index names, and that the files hold no other tensors."""
    for tensor, shard in (weights.index or {}).items():
        if tensor not in weights.tensors[shard]:
            raise ModelError(
                f"{folder}/{INDEX}: the tensor {tensor[:80]!r} should be in {shard!r}, and is not; download both anew"
            )
    if weights.index is not None:
        unnamed = sorted(weights.entries.keys() - weights.index.keys())
        if unnamed:
            raise ModelError(f"{folder}/{INDEX}: does not name the tensor {unnamed[0]!r}; download the model anew")


def _check_dtypes(folder: Path, weights: Weights) -> None:
    """Check that the same weight has one dtype in all layers; norms may be float32 while matrices are bfloat16.

    So no value is rounded here: a tensor is copied or cut as it is stored. Code that adds tensors of two dtypes has to
    choose the dtype of the sum.
    """
    first: dict[str, tuple[str, torch.dtype]] = {}
    for name, entry in weights.entries.items():
        other, dtype = first.setdefault(LAYER.sub("*", name), (name, entry.dtype))
        if dtype != entry.dtype:
            words = [str(x).removeprefix("torch.") for x in (dtype, entry.dtype)]
            raise ModelError(
                f"{folder}: mixed dtypes: {other!r} is {words[0]} and {name!r} is {words[1]}; "
                "load it with transformers in one dtype and save it"
            )


def _check_file(folder: Path, name: str) -> None:
    """Check that a file to copy is not too large and, if some of its keys are removed, that it is strict JSON."""
    if name in CONFIGS:
        parse_json(read_bytes(folder, name, MAX_SETTINGS), f"{folder}/{name}")
        return
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
    if size > MAX_DATA:
        raise ModelError(f"{folder}/{name}: {size} bytes, at most {MAX_DATA} are read; such a file describes no model")


# -- changes since opening --------------------------------------------------------------------------------------------


def _identities(folder: Path) -> dict[str, Identity]:
    """Return the identity of every file in the folder before any is read, so that later changes are detected."""
    identities = {}
    try:
        for name in os.listdir(folder):
            with suppress(OSError):  # A broken link raises.
                identities[name] = _identity(os.stat(folder / name))
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read ({one_line(error)}); check its permissions") from None
    return identities


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed(folder: Path, name: str) -> ModelError:
    return ModelError(f"{folder}/{name}: changed while it was read; run again when nothing writes to the folder")
