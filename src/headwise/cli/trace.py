"""``headwise trace``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .output import show


def trace(
    d_model: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Number of query heads.")] = None,
    num_kv_heads: Annotated[
        int | None, typer.Option(help="Number of key-value heads.", show_default="num_heads")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head.", show_default="d_model / num_heads")] = None,
    config: Annotated[
        str | None, typer.Option(help="Take the sizes from a config.json, its folder, a card, or a hub name.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Number of texts.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens per text.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Show every stage of multi-head attention with its shape, the parameters, and what W_O changes."""
    sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    if config is not None:
        if any(value is not None for value in (d_model, num_heads, *sizes.values())):
            raise typer.BadParameter("--config gives all sizes; leave out --d-model, --num-heads and the like")
        from headwise.plan import read_config

        sizes = read_config(config).arguments()
    elif d_model is None or num_heads is None:
        raise typer.BadParameter("give --d-model and --num-heads, or --config")
    else:
        sizes |= {"d_model": d_model, "num_heads": num_heads}
    from headwise.nn.hooks.trace import trace_shape

    result = trace_shape(**sizes, batch=batch, length=length)
    show(result.to_dict(), lambda _: result, as_json)
