"""``headwise prune`` and ``headwise migrate``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import console, progress
from .texts import read_text

if TYPE_CHECKING:
    import rich.table

MEASURED = ("importance", "ablation", "redundancy")
CRITERIA = {"importance": "gradient", "ablation": "zero"}
"""What --by calls the criteria of `headwise.look.importance`."""
ROW, SHORTEST, TOKENS = 256, 4, 65_536  # tokens that are read at once: at most, at least; and in all

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
            help="What ranks heads: importance, ablation, redundancy or random.",
            show_default="importance, but with --heads none",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text to rank by, and to compare losses on.")] = None,
    file: Annotated[str | None, typer.Option(help="A text file instead (UTF-8); - is stdin.")] = None,
    corpus: Annotated[
        str | None, typer.Option(help=f"A file or folder of texts, or JSON Lines, instead; {TOKENS:,} tokens are read.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For --by random.")] = 0,
    out: Out = None,
    zero: Annotated[
        bool, typer.Option("--zero", help="Write zeros instead: any heads, any model, the same size.")
    ] = False,
    recover: Annotated[
        bool, typer.Option("--recover", help="Solve W_O and the values anew on the text, in closed form.")
    ] = False,
    dry_run: DryRun = False,
    verify: Verify = True,
    as_json: AsJson = False,
) -> None:
    """Take attention heads out of a checkpoint; stock transformers loads the result, proved equal to gated heads."""
    _check_out(out, dry_run)
    if recover and (text, file, corpus) == (None,) * 3:
        raise typer.BadParameter(
            "--recover needs a text to fit to; give --file, some thousand words of the model's kind"
        )
    if context is not None and budget_mb is None:
        raise typer.BadParameter("--context is for --budget-mb; leave it out")
    ways = {"heads": heads, "keep_fraction": keep_fraction, "budget_mb": budget_mb}
    if sum(value is not None for value in ways.values()) != 1:
        raise typer.BadParameter("give one of --heads, --keep-fraction and --budget-mb")
    by = by if by is not None or heads is not None else "importance"
    if by is not None and by not in ("random", *MEASURED):
        raise typer.BadParameter(f"--by is {', '.join(MEASURED)} or random; got {by[:60]!r}")
    with progress() as show:
        show("loading the libraries")
        hf = _libraries("headwise prune")
        from headwise import reshape

        folder, _ = hf.hub.find_folder(model, lambda _: None)
        with hf.checkpoint(folder) as source:
            texts = _texts(text, file, corpus) if (text, file, corpus) != (None,) * 3 or by in MEASURED else None
            loaded, rows, scores = _read(hf, folder, texts, by, seed, show)
            wish: dict[str, Any] = {"heads": heads, "keep_fraction": keep_fraction, "scores": scores, "zero": zero}
            if budget_mb is not None:
                wish["budget"] = reshape.Budget(budget_mb, context or 0)
            plan = reshape.plan_prune(source, **wish)
            if recover:
                show("solving anew")
                plan = reshape.mend(plan, loaded.model, _tensors(rows), progress=show)
            if dry_run or out is None:
                facts = plan.facts(context or 8192)
            else:
                show("writing")
                roles = Roles(hf, loaded, rows[0], show) if verify and loaded is not None else None
                mask_id = None if loaded is None else loaded.mask_id
                proof = reshape.Proof(tuple(i for row in rows for i in row), mask_id) if verify else None
                facts = reshape.write_pruned(plan, out, proof=proof, progress=show, remark=roles)
                facts |= {} if roles is None else {"roles": roles.told}
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
                facts = reshape.migrate(source, out, proof=proof, progress=show)
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


def _tensors(rows: list[list[int]]) -> list[Any]:
    """The rows as tensors (1, T)."""
    import torch

    return [torch.tensor([row]) for row in rows]


class Roles:
    """What each head does before and after, for the end of RESHAPE.md."""

    def __init__(self, hf: Any, loaded: Any, row: list[int], show: Any) -> None:
        self.hf, self.before, self.row, self.show = hf, loaded, row, show
        self.told: dict[str, Any] = {}

    def __call__(self, folder: Path) -> str:
        """The comparison of the original with what is in the folder, as Markdown."""
        from headwise import look
        from headwise.reshape.report import PLAN

        plan = json.loads((folder / PLAN).read_bytes()) if (folder / PLAN).exists() else None
        self.show("comparing roles")
        named = (("before", self.before), ("after", self.hf.load(folder)))
        seen = [look.at(one.model, self.row, delimiters=one.delimiters, name=name) for name, one in named]
        compared = look.compare(seen[0], seen[1], kept=plan)
        self.told = compared.to_dict()
        return f"## What the heads do\n\n```text\n{compared}\n```"


def _read(
    hf: Any, folder: Path, texts: Iterable[str] | None, by: str | None, seed: int, show: Any
) -> tuple[Any, list[list[int]], Any]:
    """The model and the texts' tokens in rows, where there are texts; and what each head is worth."""
    from headwise import look, reshape

    scores: Any = reshape.random_scores(seed) if by == "random" else None
    if texts is None:
        return None, [], scores
    show("reading the model")
    loaded = hf.load(folder)
    rows = _rows(hf, loaded, texts)
    show(f"ranking heads by {by}")
    if by in CRITERIA:
        found = look.importance(loaded.model, rows, by=CRITERIA[by], mask_id=loaded.mask_id, seed=seed, progress=show)
        scores = reshape.by_call(found.scores(CRITERIA[by]))
    elif by == "redundancy":
        twins = look.redundancy(loaded.model, rows[0], progress=show).heads
        scores = reshape.by_call(
            reshape.by_twins(((twin.layer, twin.head), twin.output, twin.output_of) for twin in twins)
        )
    return loaded, rows, scores


def _texts(text: str | None, file: str | None, corpus: str | None) -> Iterable[str]:
    """The texts of the options."""
    if corpus is None:
        return [read_text(text, file)]
    if text is not None or file is not None:
        raise typer.BadParameter("give one of --text, --file and --corpus")
    from headwise.look.corpus import documents

    return documents(corpus)


def _rows(hf: Any, loaded: Any, contents: Iterable[str]) -> list[list[int]]:
    """The tokens of texts in rows that the model takes; an end is left out where it is too short to learn from."""
    length = min(ROW, loaded.max_positions or ROW)
    rows: list[list[int]] = []
    for content in contents:
        ids, _ = hf.tokens.encode(loaded.tokenizer, content, None)
        rows += [ids[start : start + length] for start in range(0, len(ids), length)]
        if sum(map(len, rows)) >= TOKENS:
            break
    long = [row for row in rows[: TOKENS // length] if len(row) >= SHORTEST]
    if not long:
        raise typer.BadParameter(f"the text has less than {SHORTEST} tokens; give a longer one")
    return long


# --- what is shown ----------------------------------------------------------------------------------------------------


def _print(facts: dict[str, Any], out: str | None, as_json: bool) -> None:
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
