"""Write a checkpoint folder, complete or not at all."""

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
CODE = (".py", ".pyc", ".so", ".sh")  # a folder of weights must not contain code
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
Bytes = bytes | memoryview


def kept(source: CheckpointSource, name: str) -> Planned:
    """Return an unchanged tensor of the source."""
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
    """Write config, weights, the source's `files` and a manifest into a folder; after an error no folder is left.

    The folder is written under a hidden name in the same directory, synced, checked, and renamed once. A killed run
    leaves the hidden folder, and the next run in the same directory removes it. Only one tensor is in memory, and
    whatever computing it needs.

    Args:
        destination: The folder; it must not exist, but its parent must.
        config: The content of config.json.
        tensors: The weights; each is computed when it is written, and dropped before the next.
        source: The checkpoint that the weights come from; it must not change meanwhile.
        extra: Further files by name; one of the source's `files` of that name is left out.
        check: Called with the finished folder under its hidden name. An exception ends the run and nothing is left; the
            files that it returns are added (a report of the check).
        progress: Called with the bytes done and the total bytes, for writing tensors and for hashing the source.

    Returns:
        The manifest, which is also in the folder.

    Raises:
        ValueError: the destination is the source or inside it; the source changed meanwhile; a tensor differs from its
            plan; an invalid file name.
        FileExistsError: the destination exists.
        FileNotFoundError: its parent does not exist.
        PermissionError: its parent is not writable.
        OSError: the disk is full or broken.
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
    """Return the further files; raise ValueError for a name that is taken, is not plain, or names code."""
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
    """A counter of the bytes written and then of the bytes hashed; it calls `tell` after each step."""

    def __init__(
        self, tell: Callable[[int, int], None] | None, shards: Sequence[Shard], source: CheckpointSource
    ) -> None:
        self.tell = tell
        sizes = (prod(entry.shape) * entry.dtype.itemsize for entry in source.tensors.values())
        self.done, self.total = 0, sum(shard.size for shard in shards) + sum(sizes)

    def add(self, size: int) -> None:
        """Count `size` more bytes; the total does not include headers and small files, so the count is capped at it."""
        self.done = min(self.done + size, self.total)
        if self.tell is not None:
            self.tell(self.done, self.total)

    def over(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the same pieces, and count each."""
        for piece in pieces:
            self.add(len(piece))
            yield piece


class Folder:
    """The hidden folder; its files are written one by one, and each is synced and hashed."""

    def __init__(self, path: Path, destination: str | os.PathLike[str], progress: ByteProgress) -> None:
        self.path, self.destination, self.progress = path, destination, progress
        self.files: dict[str, Digest] = {}
        self.lock: int | None = None

    @contextlib.contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Raise OSError from the system again with a line that says what to do; other errors pass unchanged."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(
                f"cannot write {os.fspath(self.destination)}: {error.strerror}; free some space, or give another path"
            ) from error

    def claim(self) -> None:
        """Create the folder and lock it."""
        with self.plain_errors():
            self.lock = claim(self.path)

    def put(self, name: str, pieces: Iterable[Bytes]) -> None:
        """Write and sync a new file."""
        sha, size = hashlib.sha256(), 0
        with self.plain_errors():
            descriptor = os.open(self.path / name, NEW, 0o666)
        try:
            for piece in pieces:  # errors from computing a piece are not errors of writing
                with self.plain_errors():
                    done = 0
                    while done < len(piece):
                        done += os.write(descriptor, piece[done:])
                sha.update(piece)
                size += len(piece)
                self.progress.add(len(piece))
                del piece  # frees its tensor before the next one is computed
            with self.plain_errors():
                os.fsync(descriptor)
        finally:
            with self.plain_errors():
                os.close(descriptor)
        self.files[name] = size, sha.hexdigest()

    def settle(self, target: Path) -> None:
        """Rename the folder to `target`."""
        with self.plain_errors():
            settle(self.path, target)

    def check(self) -> None:
        """Raise ValueError unless the folder holds exactly the files that were put; a check may have written there."""
        sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(self.path)}
        for name in sorted(sizes.keys() | self.files.keys()):
            if sizes.get(name) != (self.files[name][0] if name in self.files else None):
                raise ValueError(f"{self.path}: {name!r} is not as it was written; let nothing else write there")


@contextlib.contextmanager
def cleared(folder: Folder) -> Iterator[None]:
    """Remove the folder if the block raises; this includes an interrupt, which must not leave half-written files."""
    try:
        yield
    except BaseException:
        remove(folder.path)
        raise
    finally:
        if folder.lock is not None:
            os.close(folder.lock)
