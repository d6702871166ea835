"""``headwise importance``, ``headwise ablate``, ``headwise redundancy`` and ``headwise circuits``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from .options.look_outputs import written
from .options.models import Dtype, ModelArgument, load
from .options.texts import File, Text, check_named, cut_default_text, read_text
from .output import progress, put, show, warn_unstable

Device = Annotated[str, typer.Option(help="The device: cpu, cuda, cuda:1 or mps.")]
PAGE = ".html"
SCREEN, LISTED = 64, 24  # of a model with more heads than fit a screen, so many are listed
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]


def importance(
    model: ModelArgument = None,
    by: Annotated[
        str,
        typer.Option(help="Criteria, separated by commas: gradient, zero, mean, contribution; the first one sorts."),
    ] = "gradient,zero",
    text: Text = None,
    file: File = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Show how much each attention head of a model matters for its loss on a text."""
    content = read_text(text, file)
    from headwise.look.interventions.importance import CRITERIA

    names = [name.strip() for name in by.split(",")]
    if any(name not in CRITERIA for name in names):
        raise typer.BadParameter(f"--by takes {', '.join(CRITERIA)}, with commas; got {by!r}")
    if len(set(names)) < len(names):
        raise typer.BadParameter(f"--by names each criterion once; got {by!r}")

    def work(loaded: Any, ids: Any, show: Callable[..., object]) -> Any:
        from headwise.look import importance

        return importance(loaded.model, ids, by=names, mask_id=loaded.mask_id, name=loaded.name, progress=show)

    result = measured("importance", model, device, dtype, on_text(work, content))
    show(result.to_dict(), lambda _: result.table(by=names[0]), as_json)
    warn_unstable(result.stability)


def ablate(
    heads: Annotated[str, typer.Option(help="Heads as LAYER.HEAD, separated by commas, such as 3.1,2.4.")],
    model: ModelArgument = None,
    by: Annotated[str, typer.Option(help="The output of an ablated head: zero, or mean (its mean over the text).")] = (
        "zero"
    ),
    text: Text = None,
    file: File = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Show what a model loses without some of its heads, and what it predicts instead."""
    pairs = pairs_of(heads)
    if by not in ("zero", "mean"):
        raise typer.BadParameter(f"--by takes zero or mean; got {by!r}")
    content = read_text(text, file)

    def work(loaded: Any, ids: Any, show: Callable[..., object]) -> Any:
        from headwise.look import ablate

        options = {"by": by, "mask_id": loaded.mask_id, "decode": loaded.decode, "name": loaded.name}
        return ablate(loaded.model, ids, pairs, progress=show, **options)

    result = measured("ablate", model, device, dtype, on_text(work, content))
    show(result.to_dict(), lambda _: result, as_json)


def redundancy(
    model: ModelArgument = None,
    threshold: Annotated[float, typer.Option(help="The largest distance within a cluster, 0 (equal) to 1.")] = 0.1,
    text: Text = None,
    file: File = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Show which heads of a model do the same on a text: attend alike, or give the same output."""
    content = read_text(text, file)

    def work(loaded: Any, ids: Any, show: Callable[..., object]) -> Any:
        from headwise.look import redundancy

        return redundancy(loaded.model, ids, threshold=threshold, name=loaded.name, progress=show)

    result = measured("redundancy", model, device, dtype, on_text(work, content))
    show(result.to_dict(), lambda _: result, as_json)


def circuits(
    model: ModelArgument = None,
    roles: Annotated[
        str | None,
        typer.Option(help="A look as .json that names the heads, or none.", show_default="a look at the text"),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Write a page (.html), the graph (.svg, .png) or the record (.json).")
    ] = None,
    text: Text = None,
    file: File = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Show which heads of a model read what earlier heads wrote, and what each head writes for the next token."""
    content = read_text(text, file)
    check_out(out, (PAGE, ".svg", ".png", ".json"))
    named = None
    if roles is not None and roles != "none":
        check_named("--roles", roles, give="a look as .json, or none")
        from headwise.look import read

        named = read(roles)

    def work(loaded: Any, ids: Any, show: Callable[..., object]) -> Any:
        from headwise.look import at, circuits

        found = circuits(loaded.model, ids, name=loaded.name, progress=show)
        if roles == "none":
            return found
        if named is not None:
            return found.with_roles(named)
        show("looking at the roles of its heads")
        look = at(loaded.model, ids, delimiters=loaded.delimiters, full_maps=False, progress=show)
        return found.with_roles(look)

    result = measured("circuits", model, device, dtype, on_text(work, content))
    if as_json:
        print(result.to_json())
    else:
        put(result.table())
        many = len(result.heads) > SCREEN
        put(result.heads_table(most=LISTED if many else None))
        if many:
            put(f"{len(result.heads)} heads, of which these {LISTED} write the most; --json and --out x.json have all")
    write_out(result, out, as_json)


def check_out(out: str | None, endings: Sequence[str]) -> None:
    """Raise an error if the file of ``--out`` cannot be written in one of these formats."""
    if out is not None:
        check_named("--out", out)
        from headwise.look import files

        if files.check(out, endings) == PAGE:
            from headwise import report

            report.check_engine()


def write_out(result: Any, out: str | None, as_json: bool) -> None:
    """Write the file of ``--out``, if any, and print its name; on stderr if stdout has JSON."""
    if out is not None:
        from headwise import report

        write: Callable[..., int] = report.write_circuits if hasattr(result, "compositions") else report.write_effects
        typer.echo(written(result, out, lambda: write(result, out)), err=as_json)


def pairs_of(heads: str) -> list[tuple[int, int]]:
    """Parse heads such as ``3.1,2.4`` into pairs (layer, head).

    Raises:
        BadParameter: the text has another form.
    """
    pairs = [part.strip().split(".") for part in heads.split(",")]
    if any(len(pair) != 2 or not all(n.isascii() and n.isdigit() and len(n) < 10 for n in pair) for pair in pairs):
        raise typer.BadParameter(f"--heads takes layer.head with commas, such as 3.1,2.4; got {heads!r}")
    named = [(int(layer), int(head)) for layer, head in pairs]
    if len(set(named)) < len(named):
        raise typer.BadParameter(f"--heads names each head once; got {heads!r}")
    return named


def measured(
    command: str, model: str | None, device: str, dtype: str | None, work: Callable[[Any, Callable[..., object]], Any]
) -> Any:
    """Return the result of `work` for the loaded model, with a model name that is safe to print."""
    from headwise.files.text import visible

    with progress() as show:
        loaded = load(model, device, dtype, show, f"headwise {command}")
        show("measuring")
        result = work(loaded, show)
    return replace(result, model=visible(result.model, limit=100))


def on_text(work: Callable[[Any, Any, Callable[..., object]], Any], content: str) -> Callable[[Any, Any], Any]:
    """Return `work` with the ids of a text as its second argument, for `measured`."""
    return lambda loaded, show: work(loaded, loaded.encode(cut_default_text(loaded, content))[0], show)
