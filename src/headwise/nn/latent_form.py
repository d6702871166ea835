"""Which of its two forms latent attention computes in: the one with fewer multiply-adds."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Literal, get_args

from ..plan.layer import AttentionLayer, Latent
from ..plan.shape import check_size

Form = Literal["expanded", "absorbed"]
Choice = Literal["auto", "expanded", "absorbed"]


def latent_layer(
    d_model: int,
    num_heads: int,
    *,
    q_lora_rank: int | None,
    kv_lora_rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
) -> AttentionLayer:
    """The sizes of one layer of latent attention, as the planner counts them.

    Raises:
        TypeError: a size is no int.
        ValueError: a size below 1.
    """
    sizes = {"d_model": d_model, "num_heads": num_heads, "q_lora_rank": q_lora_rank, "kv_lora_rank": kv_lora_rank}
    sizes |= {"nope_dim": nope_dim, "rope_dim": rope_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        check_size(name, size, optional=name == "q_lora_rank")
    latent = Latent(kv_lora_rank, rope_dim, q_lora_rank)
    return AttentionLayer("self", 0, d_model, num_heads, num_heads, nope_dim + rope_dim, value_dim, latent=latent)


def form_macs(layer: AttentionLayer, queries: int, keys: int) -> dict[Form, int]:
    """Multiply-adds of each form for the last `queries` of `keys` tokens, causal; what both forms do is left out.

    With H heads, rank C, and nope, rope and value dims N, R, V: *expanded* makes keys and values of all S keys anew,
    ``S H C (N + V)``, and then pays ``H (N + R + V)`` a pair. *Absorbed* carries T queries into the latent space and
    their outputs back, ``T H C (N + V)``, and pays ``H (2 C + R)`` a pair.

    Example:
        >>> layer = latent_layer(
        ...     7168, 128, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
        >>> macs = form_macs(layer, queries=1, keys=4096)
        >>> macs["expanded"] // macs["absorbed"]
        117
    """
    expansion, score, token, pair = _prices(layer)
    pairs = queries * keys - queries * (queries - 1) // 2
    return {"expanded": expansion * keys + score * pairs, "absorbed": token * queries + pair * pairs}


def cheaper_form(layer: AttentionLayer, queries: int, held: Iterable[int]) -> Form:
    """The form with fewer multiply-adds where each row appends `queries` tokens to those it holds.

    One form serves the whole batch, so the rows' costs are added up. A tie goes to the expanded form, whose pairs are
    the smaller ones as a rule.

    Args:
        layer: The sizes, from `latent_layer`.
        queries: New tokens T of each row.
        held: Tokens that each row holds already.

    Example:
        >>> layer = latent_layer(
        ...     7168, 128, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
        >>> cheaper_form(layer, queries=4096, held=[0]), cheaper_form(layer, queries=1, held=[4096])
        ('expanded', 'absorbed')
        >>> [cheaper_form(layer, queries=chunk, held=[32768]) for chunk in (128, 170, 171, 512)]
        ['absorbed', 'absorbed', 'expanded', 'expanded']
    """
    total: dict[Form, int] = {"expanded": 0, "absorbed": 0}
    for tokens in held:
        for form, macs in form_macs(layer, queries, tokens + queries).items():
            total[form] += macs
    return "absorbed" if total["absorbed"] < total["expanded"] else "expanded"


def check_form(form: str) -> None:
    """Raise ValueError for a form that there is not."""
    if form not in get_args(Choice):
        raise ValueError(f'form is "auto", "expanded" or "absorbed"; got {form!r}; "auto" takes the cheaper one')


@cache
def _prices(layer: AttentionLayer) -> tuple[int, int, int, int]:
    """Multiply-adds: (a key expanded, a pair), (a query absorbed, a pair)."""
    return (layer.expansion_macs(), layer.score_macs(), *layer.absorbed_macs())
