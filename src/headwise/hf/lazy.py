"""Keys and values on their way from a cache to attention: as they lie for ours, a tensor for whoever else computes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..ops.held import in_one_piece
from ..ops.int8 import Quantized
from ..ops.paged import Paged


def lent(x: Tensor | Quantized | Paged, dtype: torch.dtype) -> Any:
    """The same for a model's hands: a model that computes with it (MLA's latent, say) gets a tensor of this dtype."""
    if isinstance(x, Tensor):
        return x
    kind: Any = _LentPaged if isinstance(x, Paged) else _LentQuantized
    return kind(*(getattr(x, field.name) for field in fields(x)), dtype)


class _Lent:
    """Answers to everything of a tensor with a copy, which is made at the first question and then kept."""

    dtype: torch.dtype

    @cached_property
    def _tensor(self) -> Tensor:
        return in_one_piece(self, self.dtype)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of python ask for what a tensor has and this is not
            raise AttributeError(name)
        return getattr(self._tensor, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x._tensor if isinstance(x, _Lent) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _LentPaged(_Lent, Paged):
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _LentQuantized(_Lent, Quantized):
    dtype: torch.dtype
