"""``headwise look``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from . import errors
from .compare import LookPair, check_measured, read_plan, side_by_side
from .options import look_inputs as reading
from .options import look_outputs as writing
from .options import media, ranks
from .options.models import Dtype, ModelArgument, folder_of, load
from .options.table_width import remove_frame
from .options.texts import Text, cut_default_text, read_text
from .output import AsJson, console, progress, put

Against = Annotated[
    str | None,
    typer.Option(help="Another checkpoint, or a look's .json: show what changed from MODEL to it.", callback=folder_of),
]


def _look(  # private: a command has many options, and Python users call headwise.look.at instead
    model: ModelArgument = None,
    text: Text = None,
    file: Annotated[str | None, typer.Option(help="A text file to read instead (UTF-8); - is stdin.")] = None,
    image: media.Image = None,
    audio: media.Audio = None,
    target: media.TargetOption = None,
    pair: media.PairOption = None,
    corpus: Annotated[
        str | None, typer.Option(help="Many texts instead: a text file, a folder of *.txt and *.jsonl, or JSON Lines.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="With --corpus: the most tokens of a text; longer ones are cut.", show_default="the model's"),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(help="With --corpus: resume file; rerun the command to continue.", show_default=reading.STATE),
    ] = None,
    sentences: Annotated[
        str | None,
        typer.Option(
            help="Annotated sentences to read as well: a CoNLL-U file, or 'builtin' for those in the package."
        ),
    ] = None,
    needles: Annotated[
        bool, typer.Option("--needles", help="Hide needles in the text: finds retrieval heads.")
    ] = False,
    importance: Annotated[
        bool, typer.Option("--importance", help="Also compute each head's gradient importance and contribution.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Dtype = None,
    out: Annotated[
        list[str] | None,
        typer.Option(
            help="Output file; the extension selects the format: the report (.html), tables (.parquet, .csv), all of "
            "it (.json), the head card (.md), a figure (.svg, .png); repeat it for several files.",
            show_default=f"{writing.REPORT}; none with --json",
        ),
    ] = None,
    against: Against = None,
    kept: Annotated[
        str | None,
        typer.Option(
            help="With --against: a heads plan (JSON), which heads of MODEL it kept.",
            show_default="heads-plan.json in its folder",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print a line for every head, however many.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what each attention head of a model does on a text, a picture or a sound, and write a report to open."""
    beside = (image, audio, target, pair)
    measured = {"text": text, "file": file, "corpus": corpus, "sentences": sentences, "needles": needles}
    measured |= {"importance": importance, "image": image, "audio": audio, "target": target, "pair": pair}
    check_measured(model, against, {**measured, "dtype": dtype})
    more_options = reading.More(corpus, length, state, sentences, needles, importance, *beside)
    more, content = errors.together(lambda: _reading(more_options, text, file))
    names = errors.together(lambda: writing.destinations(out, as_json, against) if ranks.is_first() else [])
    plan = errors.together(lambda: read_plan(kept, against))
    result = side_by_side(
        model,
        against,
        lambda name: look_at(name, content, device, dtype, more),
        any_input=more.corpus is None,
        kept=plan,
    )
    if ranks.is_first():
        _put(result, names, as_json, every=every)


def _put(result: Any, names: Sequence[str], as_json: bool, *, every: bool) -> None:
    """Write the files; print JSON, or the tables and the names of the files, that of the report last."""
    lines = writing.write(result, names)
    if isinstance(result, LookPair):
        changes = result.changes
        if as_json:
            print(changes.to_json())
            return
        put(changes.table())
    elif as_json:
        print(result.to_json(maps=False))
        return
    else:
        _print_heads(result, every=every)
    print(*lines, sep="\n", end="\n" * bool(lines))


def _reading(more: reading.More, text: str | None, file: str | None) -> tuple[reading.More, str | None]:
    """Return the checked options, and the text if one is read."""
    more = reading.checked(more, text, file)
    return more, read_text(text, file) if reading.reads_text(more, text, file) else None


def look_at(model: str | None, text: str | None, device: str, dtype: str | None, more: reading.More) -> Any:
    """Return the look at the model's heads on the text, or on a corpus."""
    beside = reading.opened(more)
    with progress() as show:
        where = ranks.own_device(device)
        one = more.corpus is None
        loaded = errors.together(lambda: load(model, where, dtype, show, "headwise look", any_input=one))
        from headwise import look as looking

        name = loaded.name
        show("looking")
        if more.corpus is not None:
            return reading.look_over(loaded, more, name, show)
        text = text and cut_default_text(loaded, text)
        if more.beside or text is None or loaded.tokenizer is None or loaded.model.main_input_name != "input_ids":
            return reading.look_beside(loaded, text, more, beside, name, show)
        ids, tokens = loaded.encode(text)
        read = reading.readings(loaded, more, ids[0].tolist())
        seen = {"tokens": tokens, "delimiters": loaded.delimiters, "readings": read}
        result = looking.at(loaded.model, ids, **seen, name=name, progress=show)
        return reading.with_more(loaded, result, ids, read, more)


ROLE = 28
"""The minimum width of the last column, in characters: the longest role with its number."""
SPARE = ("next", "self", "dup", "delim", "moves", "largest", "distance", "entropy")
"""The columns that a narrow terminal omits, in this order; the files and --json have them."""


PIPE_LINES = 100
"""The lines that count as a screen where the output is no terminal."""


def _print_heads(result: Any, *, every: bool) -> None:
    """Print the roles with their best heads, then a line for each head if these fit the screen or `every` is true.

    The name of the model is made safe. In a narrow terminal the table of heads has no frame and fewer columns.
    """
    from dataclasses import replace

    from headwise.files.text import visible
    from headwise.look.views.tables import summary_table

    shown, look = console(), replace(result, model=visible(result.model, limit=100))
    summary = summary_table(look)
    put(summary)
    lines = summary.row_count + look.num_layers + len(look.heads) + 12
    if not every and lines > (shown.height if shown.is_terminal else PIPE_LINES):
        shown.print(f"{len(look.heads)} heads: --all prints a line for each")
        return
    table = look.table()
    if shown.measure(table, options=shown.options.update(width=1000)).maximum > shown.width:
        table = _narrow(look, shown)
    put(table, fitted=True)


def _narrow(look: Any, shown: Any) -> Any:
    """Return the table without a frame, with folded roles, and without the columns that do not fit."""
    from headwise.look.views.tables import rich_table

    table: Any = None
    for count in range(len(SPARE) + 1):
        table = rich_table(look, SPARE[:count])
        remove_frame(table)
        longest = max(len(cell) for cell in table.columns[-1].cells)
        whole = shown.measure(table, options=shown.options.update(width=1000)).maximum
        if whole - max(longest - ROLE, 0) <= shown.width:
            break
    table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
    return table
