"""The attention of a module whose heads are split over ranks: dropout and messages know which heads these are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...nn.attention_mode import AttentionMode, Expand
from ...ops.attention import attention, attention_of_part
from ...ops.sharding.heads import Group, drawn, seed_of_part


class LocalHeads(NamedTuple):
    """The heads of a module on this rank.

    Attributes:
        total: Number of all query heads of the module.
        first: Index of the first head on this rank.
        group: The ranks over which the heads are split.
    """

    total: int
    first: int
    group: Group

    def seed(self) -> int:
        """Return the dropout seed of all heads, the same on all ranks of the group."""
        return self.group.first_of(drawn())

    def of_part(self) -> Tensor:
        """Return the dropout seed of the heads on this rank."""
        return seed_of_part(self.seed(), self.total, self.first)


@dataclass(frozen=True)
class HeadsMode:
    """An `AttentionMode` for the heads of this rank; `outer` is the mode around it, in which tokens are split."""

    some: LocalHeads
    outer: AttentionMode | None

    def check(self, inner: nn.Module, cache: object) -> None:
        """Check the call in the outer mode."""
        if self.outer is not None:
            self.outer.check(inner, cache)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of the outer mode."""
        assert self.outer is not None
        return self.outer.positions(tokens)

    def attend(self, query: Tensor, key: Any, value: Tensor | None, **options: Any) -> Tensor:
        """Compute the heads of this rank; dropout keeps the weights that it keeps with all heads in one process."""
        if self.outer is not None:
            return self.outer.attend(query, key, value, some=self.some, **options)
        if options.get("dropout"):
            return attention_of_part(query, key, value, seed=self.some.of_part(), **options)
        return attention(query, key, value, **options)

    def attend_expanded(
        self,
        query: Tensor,
        vectors: Tensor,
        expand: Expand,
        tensors: tuple[Tensor, ...],
        value_dim: int,
        **options: Any,
    ) -> Tensor:
        """Compute the same with the keys and values that `expand` makes."""
        if self.outer is not None:
            return self.outer.attend_expanded(query, vectors, expand, tensors, value_dim, some=self.some, **options)
        return self.attend(query, *expand(vectors, 0, query.shape[1]), **options)
