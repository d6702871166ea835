"""Statistics over many texts: read in blocks, summed exactly, and saved on request so that a second run continues."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from ...distributed.workers import Processes
from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.unwrap import unwrap
from ...shapes.arguments import check_counts, check_paths, shown
from ..inputs import ids as inputs
from ..inputs.repeated_tokens import Repeats
from ..result import Look
from ..roles.call_tokens import Passage, Vocabulary
from ..roles.catalog import ROLES
from .forward import OnProgress, Reader
from .resume import fingerprint, of_model
from .text import BATCH, REPEATS, Ids, look_of, read_more
from .workers import Shared, check_whole

BLOCK = 256
"""The texts read between two saves; those of equal length share a forward pass."""


def over(
    model: nn.Module,
    texts: Iterable[Ids],
    *,
    words: Vocabulary | None = None,
    name: str | None = None,
    batch: int = BATCH,
    repeats: Repeats | None = REPEATS,
    readings: Mapping[str, Sequence[Passage]] | None = None,
    state: str | os.PathLike[str] | None = None,
    progress: OnProgress | None = None,
    group: dist.ProcessGroup | None = None,
) -> Look:
    """Measure every attention head of a model over many texts, as `at` does for one text.

    Texts are read one block at a time. Texts of equal length share a forward pass; nothing is padded. The sums over
    texts are integers, so their order and grouping do not change the result by a single bit.

    Args:
        model: as for `at`.
        texts: the token ids of each text, in any form that `at` takes.
        words: the classes of ids: delimiters, punctuation, special. The default is the special ids of the model's
            configuration, and no others.
        name: the name of the model.
        batch: the most tokens of one forward pass; a longer text gets its own pass.
        repeats: the settings of the random tokens; None skips that pass.
        readings: as for `at`.
        state: a file that stores the sums after each 256 texts. If it exists, its texts are skipped: after an
            interrupt, call again with the same texts. The file is never removed. It is refused if the model's name,
            configuration or weights, the version, the words, the readings or the first text differ.
        progress: called as ``progress(done, 0)`` with the number of texts read.
        group: processes that share the texts, such as ``torch.distributed.group.WORLD``: each calls this with the same
            model, texts and options, and gets the same look, bit for bit that of one process. Only the first process
            reads and writes `state`, which is valid for any number of processes, and calls `progress`. With None this
            process reads all texts itself, whatever groups exist. The processes of a tensor-parallel model must read
            the same texts: the group is the other dimension of their mesh.

    Raises:
        TypeError, ValueError: as for `at`; also if there is no text, if the state is of another model or other options,
            or if the processes were called with different arguments. An error in one process is raised in all.
        OSError: `state` cannot be written.
        ConnectionError: a process of the group has ended, or does not answer within the group's timeout.

    Example:
        >>> import headwise
        >>> from headwise.testing.constructed import constructed
        >>> model, _ = constructed([["previous-token"]])
        >>> seen = headwise.look.over(model, [[1, 2, 3, 5], [1, 13, 21], [1, 34, 55, 8]])
        >>> seen.texts, seen.length, seen.heads[0].role, seen.heads[0].scores["previous-token"].count
        (3, 11, 'previous-token', 8)
    """
    started = time.perf_counter()
    model = unwrap(model)
    processes = Processes.of(group)

    def begin() -> tuple[Reader, Iterator[Ids], Mapping[str, Sequence[Passage]], str]:
        inputs.check_reads_text(model)
        inputs.check_options(name, 1, False, repeats, progress)
        check_counts(1, batch=batch)
        check_whole(model, processes)
        _check_settings(words, state)
        first, stream = _opened(texts)
        row = inputs.as_row(first)
        facts = inputs.IdFacts.of(model, row)
        known = Vocabulary(special=frozenset(facts.special.values())) if words is None else words
        reader = Reader(model, facts, known, ROLES, (32, 0))
        others = inputs.checked_readings(readings, reader.facts)
        weights = of_model(model) if state is not None or processes.size > 1 else ""  # else not compared
        about = fingerprint(name or inputs.model_name(model), repeats, reader.words, others, row, weights)
        return reader, stream, others, about

    reader, stream, others, about = processes.together(begin)
    shared = Shared(reader, processes, about, state, progress)
    shared.begin()
    stream = itertools.islice(stream, shared.done, None)
    with in_eval_mode_without_grad(model):
        while shared.block(lambda: [inputs.as_row(ids) for ids in itertools.islice(stream, BLOCK)], batch):
            pass
        shared.finish(lambda: read_more(reader, repeats, others, shared.mine))
    return look_of(reader, name, started, length=shared.length, tokens=(), texts=shared.done)


def _check_settings(words: object, state: object) -> None:
    if words is not None and not isinstance(words, Vocabulary):
        raise TypeError(f"words is a headwise.look.Vocabulary or None; got {shown(words)}")
    if state is not None:
        check_paths(state=state)


def _opened(texts: Iterable[Ids]) -> tuple[Ids, Iterator[Ids]]:
    """Return the first text, and an iterator over all of them; raise an error if there is none."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable) or getattr(texts, "ndim", 1) == 0:
        raise TypeError(f"texts are token ids, a list for each text; got {shown(texts)}; look.at reads one text")
    stream = iter(texts)
    first = next(stream, None)
    if first is None:
        raise ValueError("look.over needs at least one text; got none")
    return first, itertools.chain([first], stream)


def documents(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the texts of a corpus: a text file, JSON Lines, or the ``*.txt`` and ``*.jsonl`` files below a folder.

    Each line of JSON Lines is an object with its text under ``"text"``, or a string. Files are sorted by name, so the
    order is the same on every system. Empty texts are left out.

    Raises:
        TypeError: not a path.
        FileNotFoundError: the path does not exist.
        ValueError: a device, a folder without texts, a line that is not JSON or has no text, or bytes that are not
            UTF-8.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "b.txt").write_text("two"), (Path(folder) / "a.txt").write_text("one")
        ...     list(documents(folder))
        ['one', 'two']
    """
    check_paths(path=path)
    where = Path(path)
    if where.is_dir():
        files = sorted(file for file in where.rglob("*") if file.suffix in (".txt", ".jsonl") and file.is_file())
        if not files:
            raise ValueError(f"{where}: no *.txt and no *.jsonl below it; give a folder of texts")
        for file in files:
            yield from documents(file)
        return
    if where.is_char_device() or where.is_block_device():  # reading it may never end
        raise ValueError(f"{where}: a device, and a corpus is a file or a folder of texts; give one of these")
    try:
        if where.suffix == ".jsonl":
            with where.open(encoding="utf-8-sig") as lines:
                some = (_text_of(line, f"{where}:{number}") for number, line in enumerate(lines, 1) if line.strip())
                yield from (text for text in some if text.strip())
        elif (text := where.read_text(encoding="utf-8-sig")).strip():
            yield text
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start}); convert it first") from None


def _text_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f'{where}: not JSON; write an object a line, such as {{"text": "..."}}') from None
    text = entry.get("text") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise ValueError(f'{where}: no "text" in it that is a string; write an object a line with its text there')
    return text


def cut(ids: Sequence[int], most: int, opener: int | None = None) -> Iterator[list[int]]:
    """Yield a long text in parts of at most `most` tokens, each with `opener` first if the text begins with it.

    >>> [*cut([0, 5, 6, 7, 8, 9], 4, opener=0)]
    [[0, 5, 6, 7], [0, 8, 9]]
    """
    check_counts(2, most=most)
    begins = opener is not None and len(ids) > 0 and ids[0] == opener
    start: list[int] = [ids[0]] if begins else []
    rest = list(ids[len(start) :])
    step = most - len(start)
    for place in range(0, max(len(rest), 1), step):
        yield [*start, *rest[place : place + step]]
