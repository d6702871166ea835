"""Tensors that are made when a model computes with them: masks on their way to attention, and keys of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...ops.storage.int8 import Quantized
from ...ops.storage.layout import in_one_piece
from ...ops.storage.paged import Paged

_AUTOCAST = reduce(
    or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        for name in dir(torch._C.DispatchKey)
        if name.startswith("Autocast")
    ),
)
"""Steps that stay left out where they are: not left out, they would compute in half precision."""
_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


@dataclass(eq=False)
class _Source:
    """How the tensor is made, and the tensor once it is made; shared by a lazy tensor and its aliases."""

    make: Callable[[], Tensor]
    tensor: Tensor | None = None
    exposed: bool = False


class Lazy(Tensor):
    """A tensor of which there is only the size, dtype and device, until an operation reads its numbers.

    transformers' models see a tensor, in every respect: `isinstance`, `.shape`, `.dtype`, indexing, all of torch. Code
    that knows the class reads the mask or the stored keys behind it, and no tensor is made.
    """

    _source: _Source
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of a plain tensor

    @classmethod
    def _of(
        cls, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Any:
        lazy: Any = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device(device))
        lazy._source = _Source(make)
        return lazy

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing to do: `__new__` has made the tensor."""

    @property
    def exposed(self) -> bool:
        """Whether the tensor was written to, or may be through a view: from then on its numbers are the truth."""
        return self._source.exposed

    def plain(self) -> Tensor:
        """The tensor itself, made at the first call and then kept."""
        if self._source.tensor is None:
            with _as_outside_of_dispatch(), torch.inference_mode(False), torch.no_grad():
                self._source.tensor = (
                    self._source.make().contiguous()
                )  # contiguous, as a wrapper without strides must be
        return self._source.tensor

    def twin(self) -> Lazy:
        """Another one of the same source."""
        twin: Lazy = self._of(self._source.make, self.shape, self.dtype, self.device)
        vars(twin).update(vars(self))
        return twin

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation leaves out the function
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _SAME:
            return args[0].twin()
        kwargs = kwargs or {}
        for at, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None:  # the operation writes to the argument, or returns a view of it
                for x in tree_leaves(args[at] if at < len(args) else kwargs.get(argument.name)):
                    if isinstance(x, Lazy):
                        x._source.exposed = True
        args, kwargs = tree_map(lambda x: x.plain() if isinstance(x, Lazy) else x, (args, kwargs))
        return function(*args, **kwargs)


def _as_outside_of_dispatch() -> Any:
    """Lets operations take all their steps: inside of `__torch_dispatch__` torch leaves out those of torch.vmap.

    A mask function of one pair is evaluated by that.
    """
    left_out = torch._C._dispatch_tls_local_exclude_set() & _AUTOCAST
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)


class LazyKeys(Lazy):
    """Keys or values (B, K, S, n) of a cache that stores them in int8, in pages, or in both."""

    stored: Quantized | Paged
    expired: int
    """How many of the first columns a sliding window has passed; a mask with a window says so too."""

    def __new__(cls, stored: Quantized | Paged, dtype: torch.dtype, expired: int = 0) -> LazyKeys:
        """`dtype`: of the tensor, where a model computes with it."""
        device = stored.table.device if isinstance(stored, Paged) else stored.data.device
        keys: LazyKeys = cls._of(partial(in_one_piece, stored, dtype), stored.shape, dtype, device)
        keys.stored, keys.expired = stored, expired
        return keys

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyKeys({type(self.stored).__name__}, shape={tuple(self.shape)}, dtype={self.dtype})"


class LazyView(Lazy):
    """Keys or values of a cache as a model's own code turns them to multiply: (.., n, S), heads beside the batch."""

    keys: LazyKeys
    turned: bool
    flat: bool

    def __new__(cls, keys: LazyKeys, turned: bool, flat: bool) -> LazyView:
        """`turned`: the last two axes are exchanged; `flat`: the first two are one."""
        B, K, S, n = keys.shape
        shape = ((B * K,) if flat else (B, K)) + ((n, S) if turned else (S, n))

        def make() -> Tensor:
            x = keys.plain().flatten(0, 1) if flat else keys.plain()
            return x.transpose(-1, -2) if turned else x

        view: LazyView = cls._of(make, shape, keys.dtype, keys.device)
        view.keys, view.turned, view.flat = keys, turned, flat
        return view


def to_model(x: Tensor | Quantized | Paged, dtype: torch.dtype, expired: int = 0) -> Tensor:
    """What a cache stores, as the tensor of this dtype that a model expects (and MLA's computes with)."""
    return x if isinstance(x, Tensor) else LazyKeys(x, dtype, expired)


def from_model(x: Tensor | Quantized | Paged) -> Tensor | Quantized | Paged:
    """What a model passes to attention, in the form the cache stores it where the model has not written to it."""
    if not isinstance(x, LazyKeys):
        return x
    return x.plain() if x.exposed else x.stored
