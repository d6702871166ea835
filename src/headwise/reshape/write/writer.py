"""Writes a checkpoint folder: whole, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...files.atomic_folder import check_new_folder, claim, clear, ended_in_order, hidden_name, remove, settle
from ..layout.protocol import CheckpointSource
from .manifest import FILE, MANIFEST, Digest, Manifest, digest
from .shards import Planned as Planned
from .shards import Shard, as_json, index, plan_shards

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
PIECE = 8 << 20
CODE = (".py", ".pyc", ".so", ".sh")  # never in a folder of weights
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
Bytes = bytes | memoryview


def kept(source: CheckpointSource, name: str) -> Planned:
    """Return a tensor of the source as it is."""
    entry = source.tensors[name]
    return Planned(name, entry.dtype, entry.shape, lambda: source.read(name))


def write(
    destination: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    tensors: Sequence[Planned],
    source: CheckpointSource,
    extra: Mapping[str, bytes] | None = None,
    check: Callable[[Path], Mapping[str, bytes] | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Write config, weights, the source's `files` and a manifest into a folder that is there whole, or not at all.

    It is written beside the destination under a hidden name, synced, checked, and renamed once. A run that is killed
    leaves that hidden folder, and the next run in the same place removes it. The memory it takes is that of one tensor
    and of what making it takes.

    Args:
        destination: the folder; it must not exist, its parent must.
        config: what becomes config.json.
        tensors: the weights; each is made when its turn comes, and dropped before the next.
        source: where they come from; it must not change meanwhile.
        extra: further files by name; one of the source's `files` of that name is left out.
        check: called with the finished folder under its hidden name. What it raises ends the run, and nothing is left;
            what it returns are further files (a report of the check).
        progress: called with the bytes done and the bytes in all, of tensors to be written and of tensors to be hashed.

    Returns:
        The manifest, which also lies in the folder.

    Raises:
        ValueError: the destination is the source, or lies in it; the source changed meanwhile; a tensor is not what was
            planned; a name that is no file's.
        FileExistsError: the destination exists.
        FileNotFoundError: its parent does not.
        PermissionError: its parent may not be written.
        OSError: the disk is full, or broken.
    """
    shards = plan_shards(tensors)
    settings = {CONFIG: as_json(config)} | ({INDEX: index(shards)} if len(shards) > 1 else {})
    taken = {*settings, MANIFEST, *(shard.name for shard in shards)}
    further = settings | _checked(extra, taken)
    size = sum(len(shard.header) + shard.size for shard in shards) + sum(map(len, further.values()))
    size += sum(os.stat(source.folder / name).st_size for name in source.files if name not in further)
    target = check_new_folder(destination, source.folder, size)
    source.check()
    clear(target.parent)
    folder = Folder(hidden_name(target), destination, ByteProgress(progress, shards, source))
    with ended_in_order(), cleared(folder):
        folder.claim()
        for name, content in further.items():
            folder.put(name, [content])
        for name in source.files:
            if name not in further:
                folder.put(name, source.copy(name))
        for shard in shards:
            folder.put(shard.name, _pieces(shard))
        inputs = {name: digest(folder.progress.over(source.chunks(name))) for name in source.inputs}
        for name, content in _checked(check and check(folder.path), {*folder.files, MANIFEST}).items():
            folder.put(name, [content])
        manifest = Manifest(__version__, dict(sorted(folder.files.items())), dict(sorted(inputs.items())))
        folder.put(MANIFEST, [manifest.to_json()])
        folder.check()
        source.check()
        folder.settle(target)
    return manifest


def _checked(files: Mapping[str, bytes] | None, taken: set[str]) -> dict[str, bytes]:
    """Further files, if their names are free and no code's."""
    for name, content in (files or {}).items():
        if not FILE.fullmatch(name) or name.endswith(CODE):
            raise ValueError(f"{name[:80]!r} is no name of a file beside weights: a plain name, and no code")
        if name in taken:
            raise ValueError(f"the file {name!r} is written already; give another name")
        if not isinstance(content, bytes):
            raise TypeError(f"a file's content is bytes; got {type(content).__name__} for {name!r}")
    return dict(files or {})


def _pieces(shard: Shard) -> Iterator[Bytes]:
    """Yield the bytes of a file, with one tensor at a time in memory."""
    yield shard.header
    for tensor in shard.tensors:
        yield from _bytes(tensor)


def _bytes(planned: Planned) -> Iterator[Bytes]:
    made = planned.make()
    if made.dtype != planned.dtype or tuple(made.shape) != planned.shape:
        raise ValueError(
            f"the tensor {planned.name!r} was planned as {planned.dtype} {planned.shape}, and made as {made.dtype} "
            f"{tuple(made.shape)}; a plan and its making must agree"
        )
    if not planned.size:
        return
    flat = made.detach().cpu().contiguous().view(-1).view(torch.uint8)
    del made
    memory = flat.numpy().data
    for start in range(0, len(memory), PIECE):
        yield memory[start : start + PIECE]


# -- the folder that is written ---------------------------------------------------------------------------------------


class ByteProgress:
    """Counts bytes, of tensors to be written and then of those to be hashed, and tells."""

    def __init__(
        self, tell: Callable[[int, int], None] | None, shards: Sequence[Shard], source: CheckpointSource
    ) -> None:
        self.tell = tell
        sizes = (prod(entry.shape) * entry.dtype.itemsize for entry in source.tensors.values())
        self.done, self.total = 0, sum(shard.size for shard in shards) + sum(sizes)

    def add(self, size: int) -> None:
        """So many bytes more; headers and small files beyond the total are not counted."""
        self.done = min(self.done + size, self.total)
        if self.tell is not None:
            self.tell(self.done, self.total)

    def over(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the same pieces, each counted."""
        for piece in pieces:
            self.add(len(piece))
            yield piece


class Folder:
    """The hidden folder, which files are put into one by one, each synced and hashed."""

    def __init__(self, path: Path, destination: str | os.PathLike[str], progress: ByteProgress) -> None:
        self.path, self.destination, self.progress = path, destination, progress
        self.files: dict[str, Digest] = {}
        self.lock: int | None = None

    @contextlib.contextmanager
    def plain_errors(self) -> Iterator[None]:
        """What the system says, in a line that tells what to do; texts of ours stay as they are."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(
                f"cannot write {os.fspath(self.destination)}: {error.strerror}; make room, or give another path"
            ) from error

    def claim(self) -> None:
        """Make it and locks it."""
        with self.plain_errors():
            self.lock = claim(self.path)

    def put(self, name: str, pieces: Iterable[Bytes]) -> None:
        """Write a new file, and sync it."""
        sha, size = hashlib.sha256(), 0
        with self.plain_errors():
            descriptor = os.open(self.path / name, NEW, 0o666)
        try:
            for piece in pieces:  # what goes wrong in making one is not ours to tell
                with self.plain_errors():
                    done = 0
                    while done < len(piece):
                        done += os.write(descriptor, piece[done:])
                sha.update(piece)
                size += len(piece)
                self.progress.add(len(piece))
                del piece  # it holds the tensor that it is of, and the next is about to be made
            with self.plain_errors():
                os.fsync(descriptor)
        finally:
            with self.plain_errors():
                os.close(descriptor)
        self.files[name] = size, sha.hexdigest()

    def settle(self, target: Path) -> None:
        """Give it its name."""
        with self.plain_errors():
            settle(self.path, target)

    def check(self) -> None:
        """Raise ValueError unless it holds what was put into it, and no more: a check may have written there."""
        sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(self.path)}
        for name in sorted(sizes.keys() | self.files.keys()):
            if sizes.get(name) != (self.files[name][0] if name in self.files else None):
                raise ValueError(f"{self.path}: {name!r} is not as it was written; let nothing else write there")


@contextlib.contextmanager
def cleared(folder: Folder) -> Iterator[None]:
    """Without the folder, if the work in it does not end well; an interrupt, too, must leave nothing half-written."""
    try:
        yield
    except BaseException:
        remove(folder.path)
        raise
    finally:
        if folder.lock is not None:
            os.close(folder.lock)
