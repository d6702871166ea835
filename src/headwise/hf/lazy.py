"""Tensors that are made when somebody computes with them: masks on their way to attention, and what a cache lends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..ops.storage.held import in_one_piece
from ..ops.storage.int8 import Quantized
from ..ops.storage.paged import Paged

_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


@dataclass(eq=False)
class _Source:
    """How the tensor is made, and what has become of it; one for a lazy tensor and all its aliases."""

    make: Callable[[], Tensor]
    made: Tensor | None = None
    exposed: bool = False


class Lazy(Tensor):
    """A tensor of which there is only the size, dtype and device, until an operation wants its numbers.

    transformers' models see a tensor, in every respect: `isinstance`, `.shape`, `.dtype`, indexing, all of torch. Who
    knows the class reads off it what the tensor stands for, and makes none.
    """

    _source: _Source
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of a plain tensor

    @classmethod
    def _of(
        cls, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device(device))
        made._source = _Source(make)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done by then: what a tensor is cannot be changed afterwards."""

    @property
    def exposed(self) -> bool:
        """Whether the tensor was written to, or may be through a view: from then on it counts, and nothing else."""
        return self._source.exposed

    def plain(self) -> Tensor:
        """The tensor itself, made at the first call and then kept."""
        if self._source.made is None:
            with torch.inference_mode(False), torch.no_grad():
                self._source.made = self._source.make().contiguous()  # as a tensor that says nothing of strides
        return self._source.made

    def twin(self) -> Lazy:
        """Another one of the same source."""
        made: Lazy = self._of(self._source.make, self.shape, self.dtype, self.device)
        vars(made).update(vars(self))
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation leaves out the function
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _SAME:
            return args[0].twin()
        kwargs = kwargs or {}
        for at, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None:  # what it is given is written to, or handed out in a view
                for x in tree_leaves(args[at] if at < len(args) else kwargs.get(argument.name)):
                    if isinstance(x, Lazy):
                        x._source.exposed = True
        args, kwargs = tree_map(lambda x: x.plain() if isinstance(x, Lazy) else x, (args, kwargs))
        return function(*args, **kwargs)


class Lent(Lazy):
    """Keys or values (B, K, S, n) of a cache, which lie there in int8, in pages, or in both."""

    held: Quantized | Paged
    over: int
    """How many of the first columns a sliding window has left behind; a mask with a window says so too."""

    def __new__(cls, held: Quantized | Paged, dtype: torch.dtype, over: int = 0) -> Lent:
        """Of this dtype to whoever computes with it."""
        device = held.table.device if isinstance(held, Paged) else held.data.device
        made: Lent = cls._of(partial(in_one_piece, held, dtype), held.shape, dtype, device)
        made.held, made.over = held, over
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Lent({type(self.held).__name__}, shape={tuple(self.shape)}, dtype={self.dtype})"


def lent(x: Tensor | Quantized | Paged, dtype: torch.dtype, over: int = 0) -> Tensor:
    """What a cache holds, for a model's hands: a tensor of this dtype where it computes with it (MLA's latent, say)."""
    return x if isinstance(x, Tensor) else Lent(x, dtype, over)


def given_back(x: Tensor | Quantized | Paged) -> Tensor | Quantized | Paged:
    """What a model hands to attention, as it lies in the cache where the model has not computed with it."""
    if not isinstance(x, Lent):
        return x
    return x.plain() if x.exposed else x.held
