"""``headwise trace``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .options.models import MODELS, folder_of, load
from .options.texts import cut_default_text, read_text
from .output import progress, show


def _trace(  # private: a command has many options; Python users call headwise.trace and headwise.look.walk
    model: Annotated[
        str | None, typer.Argument(help=f"Show the numbers of this model on a text: {MODELS}", callback=folder_of)
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text for the MODEL.", show_default="a short program")] = None,
    layer: Annotated[int | None, typer.Option(help="With MODEL: the layer.", show_default="0")] = None,
    head: Annotated[int | None, typer.Option(help="With MODEL: the query head.", show_default="0")] = None,
    query: Annotated[
        int | None, typer.Option(help="With MODEL: the position of the query.", show_default="-1, the last")
    ] = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Number of query heads.")] = None,
    num_kv_heads: Annotated[
        int | None, typer.Option(help="Number of key-value heads.", show_default="num_heads")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head.", show_default="d_model / num_heads")] = None,
    config: Annotated[
        str | None,
        typer.Option(
            callback=folder_of, help="Take the sizes from a config.json, its folder, a card, a hub name, or tiny."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Number of texts.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens per text.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Show every stage of multi-head attention: by sizes, or one head of a MODEL on a text with its own numbers."""
    places = {"layer": layer, "head": head, "query": query}
    if model is not None or text is not None:
        if config is not None or any(value is not None for value in (d_model, num_heads, num_kv_heads, head_dim)):
            raise typer.BadParameter("MODEL has its own sizes; leave out --d-model, --num-heads, --config and the like")
        _walk(model, text, {name: value for name, value in places.items() if value is not None}, as_json)
        return
    if any(value is not None for value in places.values()):
        raise typer.BadParameter("--layer, --head and --query are for a MODEL with --text")
    sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    if config is not None:
        if any(value is not None for value in (d_model, num_heads, *sizes.values())):
            raise typer.BadParameter("--config gives all sizes; leave out --d-model, --num-heads and the like")
        from headwise.plan import read_config

        sizes = read_config(config).arguments()
    elif d_model is None or num_heads is None:
        raise typer.BadParameter("give MODEL, such as tiny, or --d-model and --num-heads, or --config")
    else:
        sizes |= {"d_model": d_model, "num_heads": num_heads}
    from headwise.nn.hooks.trace import trace_shape

    result = trace_shape(**sizes, batch=batch, length=length)
    show(result.to_dict(), lambda _: result, as_json)


def _walk(model: str | None, text: str | None, places: dict[str, int], as_json: bool) -> None:
    """Print the walk through one head of a model on a text."""
    content = read_text(text, None)
    with progress() as tell:
        loaded = load(model, "cpu", None, tell, "headwise trace")
        from headwise.look.walk import walk

        ids, tokens = loaded.encode(cut_default_text(loaded, content))
        try:
            result = walk(loaded.model, ids, tokens=tokens, name=loaded.name, **places)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    show(result.to_dict(), lambda _: result, as_json)
