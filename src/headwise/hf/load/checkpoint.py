"""Opens a checkpoint folder to be read tensor by tensor: nothing in it is run, nothing outside of it is opened."""

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
from ..files.reader import check_named, fill, opened, parse_json, read_bytes, read_part
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
"""What belongs to a copy of a model, by name; all else stays behind: code, pickles, other formats, the model card."""

MAX_SETTINGS, MAX_DATA = 16 << 20, 256 << 20
NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
FORMATS = ("pt", "mlx")  # as torch has them; in others the matrices are transposed
LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
Identity = tuple[int, int, int, int, int]


class Checkpoint:
    """A checkpoint folder, opened read-only: a context manager that closes it.

    Attributes:
        folder: where it lies.
        config: config.json, less the keys that its class in transformers does not know.
        dropped: those keys.
        tensors: every tensor by name, with `dtype` and `shape`.
        files: the files beside config and weights that belong to a copy: tokenizer, generation_config.json, licence.
        inputs: every file that is read.
        layouts: how checkpoints of the known architectures store attention.
    """

    def __init__(self, folder: Path, raw: dict[str, Any], weights: Weights, before: Mapping[str, Identity]) -> None:
        self.folder = folder
        self.layouts = layouts()
        self.config: Mapping[str, Any] = taken(raw, f"{folder}/config.json")
        self.dropped = tuple(sorted(raw.keys() - self.config.keys()))
        self.tensors: Mapping[str, TensorEntry] = {
            name: entry for table in weights.tensors.values() for name, entry in table.items()
        }
        self._shard_of = {name: shard for shard, table in weights.tensors.items() for name in table}
        self.files = tuple(name for name in sorted(CONFIGS + DATA) if os.path.lexists(folder / name))
        index = () if weights.index is None else (INDEX,)
        self.inputs = ("config.json", *index, *weights.files, *self.files)
        self._identity = before
        for name in self.files:
            _check_file(folder, name)
        with ExitStack() as stack:
            self._open = {name: stack.enter_context(opened(folder, name)) for name in weights.files}
            self.check()
            self._closing = stack.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; no tensor can be read any more."""
        self._closing.close()

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in memory of its own; nothing else is read.

        Raises:
            KeyError: no such tensor.
            ModelError: the file cannot be read, or is not what it was when it was opened.
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
        """The bytes of one of `inputs`, in pieces of 8 MiB."""
        with ExitStack() as stack:
            stream = self._open.get(file) or stack.enter_context(opened(self.folder, file))
            self._check(file, os.fstat(stream.fileno()))
            size = os.fstat(stream.fileno()).st_size
            for start in range(0, size, 8 << 20):
                yield read_part(stream, start, min(8 << 20, size - start), f"{self.folder}/{file}")

    def copy(self, file: str) -> Iterator[bytes]:
        """The bytes of one of `files` as they may be handed on: settings without the keys that can name code."""
        if file not in CONFIGS:
            yield from self.chunks(file)
            return
        content = b"".join(self.chunks(file))
        table = parse_json(content, f"{self.folder}/{file}")
        safe = harmless(table)
        yield content if safe == table else json.dumps(safe, indent=2, ensure_ascii=False).encode() + b"\n"

    def prove(self, folder: Path, request: Mapping[str, Any], *, compare: bool = True) -> dict[str, Any]:
        """Loads what was made of this checkpoint in a fresh process, and compares it with this one if asked.

        See `headwise.hf.load.verify.prove`.
        """
        weights = [self.folder.resolve() / name for name in self._open]
        return prove(folder, self.config if compare else None, weights, request)

    def build(self, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> PreTrainedModel:
        """A model of its architecture, or of another one: see `headwise.hf.load.model.build`."""
        return build(config, state)

    def check(self) -> None:
        """Raises ModelError unless every file is what it was when the folder was opened."""
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
    """Opens a checkpoint folder to read it tensor by tensor: config.json, safetensors, and what belongs to a copy.

    Every header is checked against the size of its file before anything is allocated. Nothing in the folder is run,
    pickles are refused, and no file outside of it is opened (links of the hub's cache into its own blobs apart).

    Args:
        folder: the folder that holds config.json and ``*.safetensors``.

    Returns:
        The open checkpoint; use it in a ``with``.

    Raises:
        ModelError: no such folder; or files that are missing, damaged, contradict one another, or are no plain files; a
            quantised checkpoint; a tensor that has another dtype in another layer.
        TypeError: no path.

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
    if not os.path.isdir(path):  # unlike Path.is_dir, it raises nothing for a name that cannot be
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


# -- what must agree --------------------------------------------------------------------------------------------------


def _check_shards(folder: Path, weights: Weights) -> None:
    """One set of files: none of it missing, no second one beside it; and stored as torch does."""
    names = sorted(os.listdir(folder))
    if weights.index is None and INDEX in names:
        raise ModelError(
            f"{folder}: holds both {SINGLE} and {INDEX}, and only one of them can be meant; remove what is old"
        )
    sets = {(m[1], m[3]) for name in weights.files if (m := NUMBERED.fullmatch(name))}
    stems = {stem for stem, _ in sets} | {"model"}  # the same weights in another format have another name
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
    """Each tensor is in the file that the index names, and the files hold no other."""
    for tensor, shard in (weights.index or {}).items():
        if tensor not in weights.tensors[shard]:
            raise ModelError(
                f"{folder}/{INDEX}: the tensor {tensor[:80]!r} should be in {shard!r}, and is not; download both anew"
            )
    if weights.index is not None:
        unnamed = sorted(weights.shapes.keys() - weights.index.keys())
        if unnamed:
            raise ModelError(f"{folder}/{INDEX}: does not name the tensor {unnamed[0]!r}; download the model anew")


def _check_dtypes(folder: Path, weights: Weights) -> None:
    """The same weight of every layer has one dtype; norms in float32 beside matrices in bfloat16 are as they should be.

    So no number is ever rounded here: a tensor is copied or cut as it is stored. Who adds tensors of two dtypes decides
    in which.
    """
    first: dict[str, tuple[str, torch.dtype]] = {}
    for table in weights.tensors.values():
        for name, entry in table.items():
            other, dtype = first.setdefault(LAYER.sub("*", name), (name, entry.dtype))
            if dtype != entry.dtype:
                raise ModelError(
                    f"{folder}: mixed dtypes: {other!r} is {_word(dtype)} and {name!r} is {_word(entry.dtype)}; "
                    "load it with transformers in one dtype and save it"
                )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_file(folder: Path, name: str) -> None:
    """A file that is to be copied: not too large, and strict JSON if keys of it are looked at."""
    if name in CONFIGS:
        parse_json(read_bytes(folder, name, MAX_SETTINGS), f"{folder}/{name}")
        return
    with opened(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
    if size > MAX_DATA:
        raise ModelError(f"{folder}/{name}: {size} bytes, at most {MAX_DATA} are read; such a file describes no model")


# -- what must stay ---------------------------------------------------------------------------------------------------


def _identities(folder: Path) -> dict[str, Identity]:
    """What every file of the folder is now, before any is read: so what is read later is what was checked."""
    identities = {}
    try:
        for name in os.listdir(folder):
            with suppress(OSError):  # a link that leads nowhere
                identities[name] = _identity(os.stat(folder / name))
    except OSError as error:
        raise ModelError(f"{folder}: cannot be read ({one_line(error)}); check its permissions") from None
    return identities


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed(folder: Path, name: str) -> ModelError:
    return ModelError(f"{folder}/{name}: changed while it was read; run again when nothing writes to the folder")
