"""``headwise prune``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import media
from .options.models import RequiredModel
from .options.reshape import (
    TOKENS,
    Beside,
    DryRun,
    OutOption,
    Reconstruct,
    Roles,
    Verify,
    check_has_text,
    check_out,
    check_place,
    libraries,
    print_facts,
    rows_of,
    tensors,
    texts_of,
)
from .options.texts import File, cut_default_text
from .output import AsJson, progress, warn_unstable

MEASURED = ("importance", "ablation", "redundancy")
CRITERIA = {"importance": "gradient", "ablation": "zero"}
"""The criteria of `headwise.look.importance` for the values of --by."""


def _prune(  # private: a command has many options, and Python users call headwise.reshape.prune instead
    model: RequiredModel,
    heads: Annotated[
        str | None, typer.Option(help="The heads to remove: LAYER.HEAD, separated by commas, such as 0.1,3.7.")
    ] = None,
    keep_fraction: Annotated[float | None, typer.Option(help="The fraction of heads to keep in each layer.")] = None,
    budget_mb: Annotated[
        float | None, typer.Option(help="Megabytes for the weights and, with --context, the cache.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="With --budget-mb: the tokens in the cache.")] = None,
    by: Annotated[
        str | None,
        typer.Option(
            help="How heads are ranked: importance (by gradient, for long texts), ablation (each head in turn), "
            "redundancy or random.",
            show_default="importance; with --heads nothing is ranked",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The text on which heads are ranked and losses are compared.")
    ] = None,
    file: File = None,
    corpus: Annotated[
        str | None,
        typer.Option(help=f"Many texts instead: a file, a folder, or JSON Lines; {TOKENS:,} tokens are read."),
    ] = None,
    image: media.Image = None,
    audio: media.Audio = None,
    target: media.TargetOption = None,
    seed: Annotated[
        int, typer.Option(help="Seed for --by random, and for the masked words with --by importance and ablation.")
    ] = 0,
    out: OutOption = None,
    zero: Annotated[
        bool,
        typer.Option("--zero", help="Set the heads to zero instead: works for any heads of any model; the size stays."),
    ] = False,
    reconstruct: Reconstruct = False,
    dry_run: DryRun = False,
    verify: Verify = True,
    as_json: AsJson = False,
) -> None:
    """Remove attention heads of a checkpoint; transformers loads the result.

    The result is checked against the original with the same heads switched off. An encoder may keep a
    different number of heads in each layer; transformers loads it after headwise.hf is imported.
    """
    check_out(out, dry_run)
    check_has_text(reconstruct, text, file, corpus)
    by = _criterion(by, heads, keep_fraction, budget_mb, context)
    beside = Beside.opened(image, audio, target, corpus=corpus, reconstruct=reconstruct)
    if reconstruct and zero:
        raise typer.BadParameter("--reconstruct does not change zeroed heads; give --zero or --reconstruct, not both")
    with progress() as show:
        show("loading the libraries")
        hf = libraries("headwise prune")
        from headwise import reshape

        folder, _ = hf.files.hub.find_folder(model, lambda _: None)
        with hf.checkpoint(folder) as source:
            check_place(out, source)
            reads = beside is not None or (text, file, corpus) != (None,) * 3 or by in MEASURED
            texts = texts_of(text, file, corpus, beside) if reads else None
            request: dict[str, Any] = {"heads": heads, "keep_fraction": keep_fraction, "zero": zero}
            if budget_mb is not None:
                request["budget"] = reshape.Budget(budget_mb, context or 0)
            else:  # raise errors of the request before the ranking is measured
                reshape.plan_prune(source, **request, scores=None if by is None else reshape.random_scores(seed))
            loaded, rows, scores = _read(hf, folder, texts, beside, by, seed, show, reconstruct=reconstruct)
            plan = reshape.plan_prune(source, **request, scores=scores)
            if reconstruct:
                show("reconstructing")
                plan = reshape.reconstruct(plan, loaded.model, tensors(rows), progress=show)
            if dry_run or out is None:
                facts = plan.facts(context or 8192)
            else:
                facts = _write(hf, plan, out, loaded, rows, show, verify=verify)
    print_facts(facts, None if dry_run else out, as_json)


def _write(hf: Any, plan: Any, out: Any, loaded: Any, rows: Any, show: Any, *, verify: bool) -> dict[str, Any]:
    """Write the pruned checkpoint and return its facts, with the roles before and after if a model was loaded."""
    from headwise import reshape

    show("writing")
    roles = Roles(hf, loaded, rows[0], show) if verify and loaded is not None else None
    proof = _proof(reshape, loaded, rows) if verify else None
    facts = reshape.write_pruned(plan, out, proof=proof, progress=show, remark=roles)
    return facts | ({} if roles is None else {"roles": roles.record})


def _criterion(
    by: str | None, heads: str | None, keep_fraction: float | None, budget_mb: float | None, context: int | None
) -> str | None:
    """Return the criterion that ranks the heads, or None if they are named; refuse options that exclude each other."""
    if context is not None and budget_mb is None:
        raise typer.BadParameter("--context is for --budget-mb; give both, or neither")
    if sum(way is not None for way in (heads, keep_fraction, budget_mb)) != 1:
        raise typer.BadParameter("give one of --heads, --keep-fraction and --budget-mb")
    if by is not None and by not in ("random", *MEASURED):
        raise typer.BadParameter(f"--by is {', '.join(MEASURED)} or random; got {by[:60]!r}")
    return by if by is not None or heads is not None else "importance"


def _proof(reshape: Any, loaded: Any, rows: list[Any]) -> Any:
    """Return the proof, with the texts if only texts were read."""
    texts = [row for row in rows if isinstance(row, list)]
    return reshape.Proof(tuple(i for row in texts for i in row), loaded.mask_id if texts else None)


def _read(
    hf: Any,
    folder: Path,
    texts: Iterable[str] | None,
    beside: Beside | None,
    by: str | None,
    seed: int,
    show: Any,
    *,
    reconstruct: bool,
) -> tuple[Any, list[Any], Any]:
    """Return the model, its inputs (rows of tokens, or the output of its processor), and the scores of its heads.

    Without an input, the model is None and there are no rows.
    """
    from headwise import look, reshape

    scores: Any = reshape.random_scores(seed) if by == "random" else None
    if texts is None:
        return None, [], scores
    show("reading the model")
    loaded = hf.load(folder, any_input=True)
    if beside is None and loaded.model.main_input_name == "input_ids":
        rows: list[Any] = rows_of(hf, loaded, texts, reconstruct=reconstruct)
        read: Any = rows
    else:
        read = (beside or Beside()).values(hf, loaded, (cut_default_text(loaded, text) for text in texts))
        rows = [read]
    if by is not None:
        show(f"ranking heads by {by}")
    if by in CRITERIA:
        mask_id = None if loaded.tokenizer is None else loaded.mask_id
        importance = look.importance(loaded.model, read, by=CRITERIA[by], mask_id=mask_id, seed=seed, progress=show)
        warn_unstable(importance.stability)
        scores = reshape.by_call(importance.scores(CRITERIA[by]))
    elif by == "redundancy":
        twins = look.redundancy(loaded.model, rows[0], progress=show).heads
        scores = reshape.by_call(
            reshape.by_twins(((twin.layer, twin.head), twin.output, twin.output_of) for twin in twins)
        )
    return loaded, rows, scores
