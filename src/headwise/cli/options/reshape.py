"""Shared parts of the commands that write checkpoints: options, rows of tokens, the comparison of roles, tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ..output import put_table
from .media import read_image, read_sound
from .texts import check_corpus, check_named, read_text

ROW, SHORTEST, TOKENS = 256, 4, 65_536  # tokens: the most per row, the fewest per row, and the most in all

LEGEND = (
    "`moved` is the distance between the attention patterns of a head before and after, from 0 (equal) to 1 (no key in "
    "common): total variation, mean over queries. `JS` is their Jensen-Shannon divergence in bits. `near` is the total "
    "variation between the mean weights by distance, from 8 tokens back to 8 ahead."
)
"""The columns of a comparison of looks."""

OutOption = Annotated[str | None, typer.Option(help="The folder to write; it must not exist.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")]
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Verify the result against the original before moving it to --out.")
]
Reconstruct = Annotated[
    bool, typer.Option("--reconstruct", help="Fit W_O and the values to the original on the text, in closed form.")
]


def check_out(out: str | None, dry_run: bool) -> None:
    """Raise BadParameter if there is no folder to write, or if it exists."""
    if out is None and not dry_run:
        raise typer.BadParameter("give --out, the folder to write, or --dry-run to see what would change")
    check_named("--out", out, give="the folder to write")
    if out is not None and os.path.lexists(out):
        raise typer.BadParameter(f"--out {out}: already exists; give a new name, or remove it")


def check_has_text(reconstruct: bool, *texts: str | None) -> None:
    """Raise BadParameter if --reconstruct has no text to fit on."""
    if reconstruct and not any(text is not None for text in texts):
        raise typer.BadParameter(
            "--reconstruct needs a text; give --file with a few thousand words like the training text"
        )


def check_place(out: str | None, source: Any) -> None:
    """Raise the errors that writing would raise, before anything is measured or trained."""
    if out is not None:
        from headwise.files.atomic_folder import check_new_folder, try_folder

        try_folder(check_new_folder(out, source.folder, None))


def libraries(command: str) -> Any:
    """Return `headwise.hf`, with transformers silenced."""
    from .models import quiet

    quiet(command)
    from headwise import hf

    return hf


def tensors(rows: list[list[int]]) -> list[Any]:
    """Return the rows as tensors (1, T)."""
    import torch

    return [torch.tensor([row]) for row in rows]


class Roles:
    """A comparison of the roles of heads before and after, for the end of RESHAPE.md."""

    def __init__(self, hf: Any, loaded: Any, row: Any, show: Any) -> None:
        self.hf, self.before, self.row, self.show = hf, loaded, row, show
        self.record: dict[str, Any] = {}

    def __call__(self, folder: Path) -> str:
        """Return the comparison of the original with the model in the folder, as Markdown."""
        from headwise import look
        from headwise.reshape.write.readme import PLAN

        plan = json.loads((folder / PLAN).read_bytes()) if (folder / PLAN).exists() else None
        self.show("comparing roles")
        named = (("before", self.before), ("after", self.hf.load(folder, any_input=True)))
        marks = None if self.before.tokenizer is None else self.before.delimiters
        seen = [look.at(one.model, self.row, delimiters=marks, name=name) for name, one in named]
        compared = look.compare(seen[0], seen[1], kept=plan)
        self.record = compared.to_dict()
        return f"## What the heads do\n\n{LEGEND}\n\n```text\n{compared}\n```"


class Beside(NamedTuple):
    """The opened inputs of a model in addition to texts, or in their place."""

    image: Any = None
    sound: Any = None
    target: str | None = None

    @classmethod
    def opened(
        cls, image: str | None, audio: str | None, target: str | None, *, corpus: str | None, reconstruct: bool
    ) -> Beside | None:
        """Return the inputs that the options name; None without such options."""
        named = [("image", image), ("audio", audio), ("target", target)]
        options = [f"--{name}" for name, value in named if value is not None]
        if not options:
            return None
        for other, there in (("--corpus", corpus is not None), ("--reconstruct", reconstruct)):
            if there:
                raise typer.BadParameter(f"{other} works only with texts; give it without {options[0]}")
        if target is not None and not target.strip():
            raise typer.BadParameter("--target: the text is empty; give at least a few words")
        return cls(None if image is None else read_image(image), None if audio is None else read_sound(audio), target)

    def values(self, hf: Any, loaded: Any, texts: Iterable[str]) -> dict[str, Any]:
        """Return the model's inputs from its processor, for these inputs and the first text, if there is one."""
        text = next(iter(texts), None)
        return hf.prepared(loaded, text, image=self.image, sound=self.sound, target=self.target).values


def texts_of(text: str | None, file: str | None, corpus: str | None, beside: Beside | None = None) -> Iterable[str]:
    """Return the texts of the options; none if a picture or a sound is read and no text is named."""
    if (text, file, corpus) == (None,) * 3 and beside is not None and (beside.image, beside.sound) != (None, None):
        return []
    if corpus is None:
        return [read_text(text, file)]
    if text is not None or file is not None:
        raise typer.BadParameter("give one of --text, --file and --corpus")
    check_corpus(corpus)
    from headwise.look.collect.corpus import documents

    return documents(corpus)


def rows_of(hf: Any, loaded: Any, contents: Iterable[str], *, reconstruct: bool = False) -> list[list[int]]:
    """Return the tokens of the texts in rows that the model takes; rows below `SHORTEST` tokens are left out."""
    length = min(ROW, loaded.max_positions or ROW)
    rows: list[list[int]] = []
    for content in contents:
        ids, _ = hf.loading.tokenizer.encode(loaded.tokenizer, content, None)
        rows += [ids[start : start + length] for start in range(0, len(ids), length)]
        if sum(map(len, rows)) >= TOKENS:
            break
    long = [row for row in rows[: TOKENS // length] if len(row) >= SHORTEST]
    if not long:
        raise typer.BadParameter(f"the text has fewer than {SHORTEST} tokens; give a longer one")
    if reconstruct and len(long) < 2:
        raise typer.BadParameter(
            f"--reconstruct fits on one part of the text and checks on the rest, but {sum(map(len, rows))} tokens are "
            f"one row of {length}; give a longer text, such as a few thousand words like the training text"
        )
    return long


# --- what is shown ----------------------------------------------------------------------------------------------------


def print_facts(facts: dict[str, Any], out: str | None, as_json: bool) -> None:
    """Print the changes: notes and tables, or everything as JSON."""
    from headwise.files.text import visible
    from headwise.reshape.write.readme import rows

    if as_json:
        print(json.dumps(facts | {"out": out}, allow_nan=False))
        return
    for note in facts["notes"]:
        print(visible(note, limit=600))
    if facts["gone"]:
        gone = [(layer, ", ".join(map(str, heads))) for layer, heads in facts["gone"].items()]
        put_table(("layer", f"heads {facts['change']}"), gone)
    put_table(("", "before", "after"), rows(facts))
    if out is not None:
        print(f"{visible(out)}: {facts['done'].lower()}; RESHAPE.md in it has the details")
