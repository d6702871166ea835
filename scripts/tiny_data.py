"""What ``train_tiny.py`` trains on: the running interpreter's standard library sources, in sequences of three kinds."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
MAX_POSITIONS = 512
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
NUM_SPECIAL = 2
IGNORE = -100  # label that the cross entropy skips

# Never trained on: whole modules, so that the held-out loss is a loss on unseen code.
HELD_OUT = {
    "configparser.py", "csv.py", "fractions.py", "heapq.py", "queue.py", "sched.py", "shlex.py", "statistics.py",
    "textwrap.py", "json/__init__.py", "json/decoder.py", "json/encoder.py", "json/scanner.py", "json/tool.py",
}  # fmt: skip
# Test suites are repetitive; `encodings` is tables of numbers; the last two record how this machine was built.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
SKIPPED_STARTS = ("_sysconfigdata", "config-")


def stdlib_files() -> tuple[list[Path], list[Path]]:
    """The standard library's source files as ``(training, held_out)``, each sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    training: list[Path] = []
    held_out: list[Path] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or relative.as_posix().startswith(SKIPPED_STARTS):
            continue
        (held_out if relative.as_posix() in HELD_OUT else training).append(path)
    return training, held_out


def read(paths: list[Path]) -> list[str]:
    """The files' texts; a byte that is not UTF-8 becomes the replacement character."""
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of ``VOCAB_SIZE`` tokens that puts BOS before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts as one stream of ids, each text followed by EOS; shape ``(N,)``."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        stream += [*encoding.ids, EOS_ID]
    return torch.tensor(stream, dtype=torch.long)


def load_data(run: Path) -> tuple[Tokenizer, torch.Tensor, torch.Tensor]:
    """The tokenizer and the two streams, from the run's folder if they are there already."""
    tokenizer_file, streams_file = run / "tokenizer.json", run / "streams.pt"
    if not streams_file.exists():
        training, held_out = map(read, stdlib_files())
        tokenizer = train_tokenizer(training)
        tokenizer.save(str(tokenizer_file))
        save_atomically([encode(tokenizer, training), encode(tokenizer, held_out)], streams_file)
    training_stream, held_out_stream = torch.load(streams_file)
    return Tokenizer.from_file(str(tokenizer_file)), training_stream, held_out_stream


def save_atomically(value: Any, path: Path) -> None:
    """torch.save beside the file, then rename: no one ever reads half a file."""
    torch.save(value, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def repeat_to(segment: torch.Tensor, length: int) -> torch.Tensor:
    """The segment repeated until there are ``length`` tokens."""
    return segment.repeat(-(-length // len(segment)))[:length]


def make_sequence(stream: torch.Tensor, length: int, kind: str, rng: torch.Generator) -> tuple[torch.Tensor, int]:
    """One training sequence of ``length`` ids, and how many of its first ids cannot be predicted.

    ``kind``: "random" (a random segment, repeated), "repeated" (a piece of text, repeated) or "text". The period
    differs from sequence to sequence: a head that looks back at one fixed offset gains nothing.
    """
    body = length - 1
    if kind in ("random", "repeated"):
        period = int(torch.randint(8, body // 2, (), generator=rng))
        if kind == "random":
            segment = torch.randint(NUM_SPECIAL, VOCAB_SIZE, (period,), generator=rng)
            unpredictable = period + 1
        else:
            start = int(torch.randint(len(stream) - period, (), generator=rng))
            segment, unpredictable = stream[start : start + period], 1
        tokens = repeat_to(segment, body)
    else:
        start = int(torch.randint(len(stream) - body, (), generator=rng))
        tokens, unpredictable = stream[start : start + body], 1
    return torch.cat([torch.tensor([BOS_ID]), tokens]), unpredictable


def make_batch(
    stream: torch.Tensor, rows: int, length: int, shares: tuple[float, float], rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and labels of a step, each ``(rows, length)``; the first copy of random tokens has no loss.

    ``shares``: of the rows, how many are random segments and how many are text repeated; the others are plain text.
    """
    random, repeated = shares
    draws = torch.rand(rows, generator=rng).tolist()
    kinds = ["random" if draw < random else "repeated" if draw < random + repeated else "text" for draw in draws]
    sequences = [make_sequence(stream, length, kind, rng) for kind in kinds]
    ids = torch.stack([tokens for tokens, _ in sequences])
    labels = ids.clone()
    for row, (_, unpredictable) in enumerate(sequences):
        labels[row, :unpredictable] = IGNORE
    return ids, labels


def text_rows(stream: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Evenly spaced windows of the stream, each with BOS before it; shape ``(rows, length)``."""
    starts = torch.linspace(0, len(stream) - length, rows).long().tolist()
    bos = torch.tensor([BOS_ID])
    return torch.stack([torch.cat([bos, stream[start : start + length - 1]]) for start in starts])
