"""Choice between the two forms of latent attention: the one with fewer multiply-adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ..plan.model.layer import AttentionLayer, Latent
from ..plan.shape import check_size
from ..shapes.arguments import check_counts
from .decode.cache_protocol import ModuleCache, chunk_of, has_keys
from .hooks.projections import description

LatentForm = Literal["expanded", "absorbed"]
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
    """Return one layer of latent attention for `headwise.plan`.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1.
    """
    sizes = {"d_model": d_model, "num_heads": num_heads, "q_lora_rank": q_lora_rank, "kv_lora_rank": kv_lora_rank}
    sizes |= {"nope_dim": nope_dim, "rope_dim": rope_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        check_size(name, size, optional=name == "q_lora_rank")
    heads = nope_dim + rope_dim + value_dim
    check_counts(1, **{"num_heads * (nope_dim + rope_dim + value_dim)": num_heads * heads})
    latent = Latent(kv_lora_rank, rope_dim, q_lora_rank)
    return AttentionLayer("self", 0, d_model, num_heads, num_heads, nope_dim + rope_dim, value_dim, latent=latent)


@dataclass(frozen=True)
class FormCosts:
    """Multiply-adds of the two forms, without the operations that both have in common.

    With H heads, rank C, and nope, rope and value dims N, R, V: *expanded* recomputes keys and values of all S tokens,
    ``S H C (N + V)``, and needs ``H (N + R + V)`` per query-key pair. *Absorbed* projects T queries to the latent
    space and the results back, ``T H C (N + V)``, and needs ``H (2 C + R)`` per pair.

    Attributes:
        expanded_key: Multiply-adds of the expanded form per key.
        expanded_pair: Multiply-adds of the expanded form per query-key pair.
        absorbed_query: Multiply-adds of the absorbed form per query.
        absorbed_pair: Multiply-adds of the absorbed form per query-key pair.

    Example:
        >>> costs = FormCosts.of(latent_layer(
        ...     7168, 128, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128))
        >>> macs = costs.macs(queries=1, keys=4096)
        >>> macs["expanded"] // macs["absorbed"]
        117
        >>> costs.cheaper(queries=4096, held=[0]), costs.cheaper(queries=1, held=[4096])
        ('expanded', 'absorbed')
        >>> [costs.cheaper(queries=chunk, held=[32768]) for chunk in (128, 170, 171, 512)]
        ['absorbed', 'absorbed', 'expanded', 'expanded']
    """

    expanded_key: int
    expanded_pair: int
    absorbed_query: int
    absorbed_pair: int

    @classmethod
    def of(cls, layer: AttentionLayer) -> FormCosts:
        """Return the costs of a layer."""
        return cls(layer.expansion_macs(), layer.score_macs(), *layer.absorbed_macs())

    def macs(self, queries: int, keys: int) -> dict[LatentForm, int]:
        """Return the multiply-adds of each form for the last `queries` of `keys` tokens, causal."""
        check_counts(queries=queries, keys=keys)
        pairs = queries * keys - queries * (queries - 1) // 2
        return {
            "expanded": self.expanded_key * keys + self.expanded_pair * pairs,
            "absorbed": self.absorbed_query * queries + self.absorbed_pair * pairs,
        }

    def cheaper(self, queries: int, held: Sequence[int]) -> LatentForm:
        """Return the form with fewer multiply-adds if the rows have `held` tokens and append `queries` more.

        The whole batch uses one form, so the costs of the rows are added. If they are equal, it is the expanded form.
        Every decode step calls this, so the sums of `macs` over the rows are computed without a loop.
        """
        rows = len(held)
        keys = sum(held) + queries * rows
        pairs = queries * keys - queries * (queries - 1) // 2 * rows
        expanded = self.expanded_key * keys + self.expanded_pair * pairs
        absorbed = self.absorbed_query * queries * rows + self.absorbed_pair * pairs
        return "absorbed" if absorbed < expanded else "expanded"


def why_absorbed(cache: ModuleCache, new: int, stored: Sequence[int], *, masked: bool, padded: bool) -> str:
    """Return why `new` tokens after `stored` cached tokens cannot use the expanded form; empty if they can."""
    chunk = chunk_of(cache)
    if not has_keys(cache):
        return f"{type(cache).__name__} has no keys to read"
    if any(getattr(cache, "dropped", ())):
        return f"{type(cache).__name__} has dropped tokens"
    if chunk is not None and new > chunk:
        return f"{type(cache).__name__} takes {chunk} tokens at a time"
    if masked and any(stored) and (padded or len(set(stored)) > 1):
        return (
            f"a mask has its place in every row alike, while the rows hold {list(stored)} tokens"
            f"{' and get different numbers of new ones' if padded else ''}"
        )
    return ""


def no_matrix(kv_b_proj: nn.Module, what: str) -> str:
    """Return the error text for `what`, which needs the weight of a kv_b_proj that is not a plain linear layer."""
    return (
        f"{what} multiplies by the weight of kv_b_proj, which has to be a torch.nn.Linear without bias and hooks; got "
        f"{description(kv_b_proj)}, which may compute something else; merge adapters and remove hooks, or take "
        'form="expanded", with a cache that has keys'
    )
