"""``headwise prune`` and ``headwise migrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import console, progress
from .texts import read_text

if TYPE_CHECKING:
    import rich.table

CRITERIA = {"importance": "gradient", "ablation": "zero"}
"""What --by calls the criteria of `headwise.look.importance`."""
PIECE = 2000  # characters of a text that are read at once, at most

Out = Annotated[str | None, typer.Option(help="The folder to write; it must not exist.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Load the result anew and compare, first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")]


def _prune(  # private, for a command has as many options as its users need, and no one calls it from Python
    model: Annotated[str, typer.Argument(help="A checkpoint folder or hub name.")],
    heads: Annotated[
        str | None, typer.Option(help="The heads that go: LAYER.HEAD with commas, such as 0.1,3.7.")
    ] = None,
    keep_fraction: Annotated[float | None, typer.Option(help="The part of each layer's heads that stays.")] = None,
    budget_mb: Annotated[
        float | None, typer.Option(help="Megabytes for weights and, with --context, the cache.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens that the cache of --budget-mb holds.")] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="What ranks heads: importance, ablation or random.", show_default="importance, but with --heads none"
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text to rank by, and to compare losses on.")] = None,
    file: Annotated[str | None, typer.Option(help="A text file instead (UTF-8); - is stdin.")] = None,
    seed: Annotated[int, typer.Option(help="For --by random.")] = 0,
    out: Out = None,
    zero: Annotated[
        bool, typer.Option("--zero", help="Write zeros instead: any heads, any model, the same size.")
    ] = False,
    dry_run: DryRun = False,
    verify: Verify = True,
    as_json: AsJson = False,
) -> None:
    """Take attention heads out of a checkpoint; stock transformers loads the result, proved equal to gated heads."""
    _check_out(out, dry_run)
    if context is not None and budget_mb is None:
        raise typer.BadParameter("--context is for --budget-mb; leave it out")
    ways = {"heads": heads, "keep_fraction": keep_fraction, "budget_mb": budget_mb}
    if sum(value is not None for value in ways.values()) != 1:
        raise typer.BadParameter("give one of --heads, --keep-fraction and --budget-mb")
    by = by if by is not None or heads is not None else "importance"
    if by is not None and by not in ("random", *CRITERIA):
        raise typer.BadParameter(f"--by is {', '.join(CRITERIA)} or random; got {by[:60]!r}")
    with progress() as show:
        show("loading the libraries")
        hf = _libraries("headwise prune")
        from headwise import reshape

        folder, _ = hf.hub.find_folder(model, lambda _: None)
        with hf.checkpoint(folder) as source:
            rows, mask_id, scores = _read(hf, folder, text, file, by, seed, show)
            wish: dict[str, Any] = {"heads": heads, "keep_fraction": keep_fraction, "scores": scores, "zero": zero}
            if budget_mb is not None:
                wish["budget"] = reshape.Budget(budget_mb, context or 0)
            if dry_run or out is None:
                facts = reshape.plan_prune(source, **wish).facts(context or 8192)
            else:
                proof = reshape.Proof(tuple(i for row in rows for i in row), mask_id) if verify else None
                show("writing")
                facts = reshape.prune(source, out, **wish, proof=proof, progress=lambda done, total: show(done, total))
    _print(facts, None if dry_run else out, as_json)


def _migrate(
    folder: Annotated[str, typer.Argument(help="A checkpoint folder whose config.json has pruned_heads.")],
    out: Out = None,
    dry_run: DryRun = False,
    verify: Verify = True,
    as_json: AsJson = False,
) -> None:
    """Make an old checkpoint with pruned_heads, which transformers no longer loads, one that it does."""
    _check_out(out, dry_run)
    with progress() as show:
        show("loading the libraries")
        hf = _libraries("headwise migrate")
        from headwise import reshape

        with hf.checkpoint(folder) as source:
            if dry_run or out is None:
                facts = reshape.plan_migrate(source).facts()
            else:
                show("writing")
                proof = reshape.Proof() if verify else None
                facts = reshape.migrate(source, out, proof=proof, progress=lambda done, total: show(done, total))
    _print(facts, None if dry_run else out, as_json)


def _check_out(out: str | None, dry_run: bool) -> None:
    if out is None and not dry_run:
        raise typer.BadParameter("give --out, the folder to write, or --dry-run to see what would change")
    if out is not None and Path(out).exists():
        raise typer.BadParameter(f"--out {out}: is there already; give a new name, or remove it")


def _libraries(command: str) -> Any:
    from .loading import quiet

    quiet(command)
    from headwise import hf

    return hf


def _read(
    hf: Any, folder: Path, text: str | None, file: str | None, by: str | None, seed: int, show: Any
) -> tuple[list[list[int]], int | None, Any]:
    """The text's tokens in rows, the id of the mask, and what each head is worth."""
    from headwise import look, reshape

    scores: Any = reshape.random_scores(seed) if by == "random" else None
    if by in (None, "random") and text is None and file is None:
        return [], None, scores
    content = read_text(text, file)
    show("reading the model")
    loaded = hf.load(folder)
    rows = _rows(loaded, content)
    mask_id = loaded.mask_id
    if by in CRITERIA:
        show(f"ranking heads by {by}")
        found = look.importance(
            loaded.model, rows, by=CRITERIA[by], mask_id=mask_id, seed=seed, progress=show_steps(show)
        )
        scores = _named(found.scores(CRITERIA[by]))
    return rows, mask_id, scores


def show_steps(show: Any) -> Any:
    """Progress as `look` tells it."""
    return lambda done, total: show(done, total)


def _rows(loaded: Any, content: str) -> list[list[int]]:
    """The tokens of a text in pieces that the model takes; those too short to learn from are left out."""
    size = min(PIECE, loaded.max_positions or PIECE)
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    rows = [loaded.encode(piece)[0][0].tolist() for piece in pieces if piece.strip()]
    long = [row for row in rows if len(row) >= 3]
    if not long:
        raise typer.BadParameter("the text has too few tokens; give a longer one")
    return long


def _named(layers: list[list[float]]) -> dict[tuple[str, int], float]:
    """Scores by the key of a layer, from the order in which the layers of a model with one stack attend."""
    return {(str(layer), head): value for layer, heads in enumerate(layers) for head, value in enumerate(heads)}


# --- what is shown ----------------------------------------------------------------------------------------------------


def _print(facts: dict[str, Any], out: str | None, as_json: bool) -> None:
    import json

    from headwise.report.escape import visible

    if as_json:
        print(json.dumps(facts | {"out": out}, allow_nan=False))
        return
    for note in facts["notes"]:
        print(visible(note, limit=600))
    shown = console()
    if facts["gone"]:
        shown.print(_heads(facts))
    shown.print(_table(facts))
    if out is not None:
        print(f"{visible(out)}: {facts['done'].lower()}; RESHAPE.md in it has the details")


def _heads(facts: dict[str, Any]) -> rich.table.Table:
    from rich.table import Table

    table = Table("layer", f"heads that {facts['verb']}")
    for layer, heads in facts["gone"].items():
        table.add_row(layer, ", ".join(map(str, heads)))
    return table


def _table(facts: dict[str, Any]) -> rich.table.Table:
    """Before and after, as in RESHAPE.md."""
    from rich.table import Table

    from headwise.reshape.report import rows

    table = Table("", "before", "after")
    for row in rows(facts):
        table.add_row(*row)
    return table
