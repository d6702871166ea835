"""``headwise plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options.models import folder_of
from .options.texts import check_named
from .output import AsJson, show

CONTEXT = "8192,131072"


def _plan(  # private: a command has many options, and Python users call headwise.plan.of instead
    configs: Annotated[
        list[str] | None,
        typer.Argument(help="A config.json, a checkpoint folder, a card, a hub name in the local cache, or tiny."),
    ] = None,
    context: Annotated[str, typer.Option(help="Context lengths in tokens, separated by commas.")] = CONTEXT,
    batch: Annotated[int, typer.Option(help="Number of texts in the batch.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="Dtype of the cache: bf16, fp16, fp32, fp8, int8.")] = "bf16",
    heads_plan: Annotated[
        str | None, typer.Option(help="A JSON file with the heads to keep or merge in each layer.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Memory bandwidth, such as 3.35TB/s.")] = None,
    flops: Annotated[str | None, typer.Option(help="FLOPs per second, such as 990TF.")] = None,
    tensor: Annotated[int, typer.Option(help="Ranks that share heads and feed-forward layers; needs --link.")] = 1,
    context_ranks: Annotated[int, typer.Option(help="Ranks that share a text's tokens; needs --link.")] = 1,
    link: Annotated[
        str | None, typer.Option(help="The link between ranks, such as 50GB/s,2us: plan over ranks.")
    ] = None,
    list_cards: Annotated[bool, typer.Option("--list", help="Show the cards and architectures, and exit.")] = False,
    svg: Annotated[str | None, typer.Option(help="Write a chart of cache against context to this file.")] = None,
    csv: Annotated[
        str | None, typer.Option(help="Write the numbers to this file, one line per config and context.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what the attention of a model costs, from its config alone: parameters, cache, operations, time."""
    from headwise import plan as planning
    from headwise.files.atomic_file import put

    if list_cards:
        options = (context, batch, kv_dtype, heads_plan, bandwidth, flops, tensor, context_ranks, link, svg, csv)
        if configs or options != (CONTEXT, 1, "bf16", *(None,) * 3, 1, 1, *(None,) * 3):
            raise typer.BadParameter("--list shows the cards; leave out the configs, and all options but --json")
        show(planning.known(), planning.card_list, as_json)
        return
    if not configs:
        raise typer.BadParameter("give a config, or --list to see the cards")
    several = len(configs) > 1
    for kind, name in (("svg", svg), ("csv", csv)):
        _check(kind, name)
    check_named("--heads-plan", heads_plan)
    speeds = {"bandwidth": bandwidth, "flops": flops}
    lengths = planning.contexts(context)
    if link is None and (tensor, context_ranks) != (1, 1):
        raise typer.BadParameter("--tensor and --context-ranks need --link, such as --link 50GB/s,2us")
    if link is not None:
        if several or (heads_plan, svg, csv) != (None,) * 3:
            raise typer.BadParameter("--link plans one model over ranks; leave out --heads-plan, --svg and --csv")
        from headwise.plan.ranks.rank_plan import check_grid

        check_grid(tensor, context_ranks, lengths[-1], batch, names=("tensor", "context-ranks", "context", "batch"))
        over_ranks = planning.over(
            folder_of(configs[0]),
            link,
            tensor=tensor,
            ranks=context_ranks,
            tokens=lengths[-1],
            batch=batch,
            kv_dtype=kv_dtype,
            bandwidth=bandwidth,
            flops=flops,
        )
        show(over_ranks.to_dict(), lambda _: over_ranks, as_json)
        return
    plans = [
        planning.of(folder_of(config), context=lengths, batch=batch, kv_dtype=kv_dtype, heads_plan=heads_plan, **speeds)
        for config in configs
    ]
    for name, content in ((svg, planning.svg), (csv, planning.csv)):
        if name is not None:
            put(content(plans).encode("utf-8", "backslashreplace"), name)
    if several:
        show([one.to_dict() for one in plans], lambda _: planning.side_by_side(plans), as_json)
    else:
        show(plans[0].to_dict(), lambda _: plans[0], as_json)


def _check(kind: str, name: str | None) -> None:
    """Raise an error before planning if the file cannot be written or has the wrong suffix."""
    if name is None:
        return
    check_named(f"--{kind}", name)
    from headwise.report import check_destination

    check_destination(name)
    if Path(name).suffix.lower() != f".{kind}":
        article = "an" if kind == "svg" else "a"
        raise typer.BadParameter(f"--{kind} {name}: {article} {kind.upper()} is written; end the name in .{kind}")
