"""Lazy tensors: masks and cached keys that become plain tensors only when a model computes with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...cache.base import Stored
from ...cache.paged import PagedCache
from ...cache.static import StaticCache
from ...ops.compiled_calls import methods_outside_graphs
from ...ops.masks.mask import Mask
from ...ops.native.decode_step import runs_plain
from ...ops.storage.layout import in_one_piece
from ...ops.storage.paged import Paged
from ...ops.storage.quantized import Quantized

_AUTOCAST = reduce(
    or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        for name in dir(torch._C.DispatchKey)
        if name.startswith("Autocast")
    ),
)
"""Dispatch keys that stay excluded; if they were included, operations would compute in half precision."""
_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


@dataclass(eq=False)
class _Source:
    """The function that makes the tensor, and the tensor once it is made; shared by a lazy tensor and its aliases."""

    make: Callable[[], Tensor]
    tensor: Tensor | None = None
    exposed: bool = False


class Lazy(Tensor):
    """A tensor with only a size, dtype and device until an operation reads its numbers.

    To transformers' models it is a normal tensor for `isinstance`, `.shape`, `.dtype`, indexing and all torch
    operations. Code that checks for the class reads the mask or the stored keys directly, and no tensor is made.
    """

    _source: _Source
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as in a plain tensor

    @classmethod
    def _of(
        cls, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Any:
        lazy: Any = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device(device))
        lazy._source = _Source(make)
        return lazy

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: `__new__` has made the tensor."""

    @property
    def exposed(self) -> bool:
        """True if the tensor was written to, or may be through a view; then only its own numbers are valid."""
        return self._source.exposed

    def plain(self) -> Tensor:
        """Return the plain tensor; it is made at the first call and then kept."""
        if self._source.tensor is None:
            with _as_outside_of_dispatch(), torch.inference_mode(False), torch.no_grad():
                self._source.tensor = (
                    self._source.make().contiguous()
                )  # contiguous, because a wrapper without strides must be
        return self._source.tensor

    def twin(self) -> Lazy:
        """Return another lazy tensor of the same source."""
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
    """Let operations run all dispatch steps: inside of `__torch_dispatch__`, torch excludes the steps of torch.vmap.

    A mask function for a single pair is evaluated with torch.vmap.
    """
    left_out = torch._C._dispatch_tls_local_exclude_set() & _AUTOCAST
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)


class KeptTokens(NamedTuple):
    """Where the tokens are that a cache still has, if some were dropped by score."""

    positions: Tensor  # int64 (B, K|1, columns), -1 past a row's end
    length: int  # the number of all tokens, for which masks are made


class LazyKeys(Lazy):
    """Keys or values (B, K, S, n) of a cache that stores them in codes or in pages, or that lacks some tokens."""

    expired: int
    """The number of first columns that are before the sliding window; a mask with a window hides them, too."""
    places: KeptTokens | None
    token: NewToken | None
    """The last token, if the cache may not have it yet."""
    is_key: bool
    _stored: Stored | None

    def __new__(
        cls, stored: Stored, dtype: torch.dtype, expired: int = 0, places: KeptTokens | None = None
    ) -> LazyKeys:
        """Make lazy keys; `dtype` is the dtype of the tensor that a model computes with."""
        held = stored.table if isinstance(stored, Paged) else stored.data if isinstance(stored, Quantized) else stored
        keys: LazyKeys = cls._of(partial(in_one_piece, stored, dtype), stored.shape, dtype, held.device)
        keys._stored, keys.expired, keys.places, keys.token, keys.is_key = stored, expired, places, None, True
        return keys

    @classmethod
    def of_token(cls, token: NewToken, is_key: bool, length: int, expired: int) -> LazyKeys:
        """Make the keys or the values of a cache with a new token, `length` in all."""
        new = token.key if is_key else token.value
        shape = (*new.shape[:2], length, new.shape[3])
        keys: LazyKeys = cls._of(partial(_with_token, token, is_key), shape, new.dtype, new.device)
        keys._stored, keys.expired, keys.places, keys.token, keys.is_key = None, expired, None, token, is_key
        return keys

    @property
    def stored(self) -> Stored:
        """The keys or values as the cache stores them, with the new token."""
        if self._stored is None:
            assert self.token is not None
            self._stored = self.token.view()[0 if self.is_key else 1]
        return self._stored

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyKeys({type(self.stored).__name__}, shape={tuple(self.shape)}, dtype={self.dtype})"


class NewToken:
    """The token of a decode step, which a cache takes in the same native call in which its query attends.

    Whatever reads the cache before that call appends the token first, as if it had been appended at once. Until then,
    nothing else may change the cache.
    """

    def __init__(self, cache: StaticCache | PagedCache, key: Tensor, value: Tensor) -> None:
        """Wait with key (B, K, 1, D) and value (B, K, 1, V), which `cache.append` and `cache.step` take now."""
        self.cache, self.key, self.value = cache, key, value
        self._view: Callable[[], tuple[Stored, Stored]] | None = None

    def append(self) -> None:
        """Append the token to the cache, if it waits."""
        if self._view is None:
            self.cache.append(self.key, self.value)
            self._view = self.cache.view_on_demand()

    def view(self) -> tuple[Stored, Stored]:
        """Return keys and values that end with this token, as the cache stores them."""
        self.append()
        assert self._view is not None
        return self._view()

    def step(self, query: Tensor, mask: Mask, **options: Any) -> Tensor | None:
        """Return the output (B, H, 1, V) of the token's query; None, without any change, if it must be appended first.

        Args:
            query: (B, H, 1, D).
            mask: as for the `step` of caches.
            options: scale, softcap and sinks, as for the `step` of caches.
        """
        if self._view is not None or not runs_plain():
            return None
        out = self.cache.step(query, self.key, self.value, mask=mask, **options)
        if out is not None:
            self._view = self.cache.view_on_demand()
        return out


methods_outside_graphs(NewToken)


def _with_token(token: NewToken, is_key: bool) -> Tensor:
    return in_one_piece(token.view()[0 if is_key else 1], token.key.dtype)


class LazyView(Lazy):
    """Keys or values of a cache reshaped by a model's own code: last axes swapped, batch and heads joined, or both."""

    keys: LazyKeys
    turned: bool
    flat: bool

    def __new__(cls, keys: LazyKeys, turned: bool, flat: bool) -> LazyView:
        """Make a view. `turned`: the last two axes are exchanged; `flat`: the first two axes are joined."""
        B, K, S, n = keys.shape
        shape = ((B * K,) if flat else (B, K)) + ((n, S) if turned else (S, n))

        def make() -> Tensor:
            x = keys.plain().flatten(0, 1) if flat else keys.plain()
            return x.transpose(-1, -2) if turned else x

        view: LazyView = cls._of(make, shape, keys.dtype, keys.device)
        view.keys, view.turned, view.flat = keys, turned, flat
        return view


def to_model(x: Stored, dtype: torch.dtype, expired: int = 0, places: KeptTokens | None = None) -> Tensor:
    """Return what a cache stores as the tensor of this dtype that a model expects."""
    return x if isinstance(x, Tensor) and places is None else LazyKeys(x, dtype, expired, places)


def from_model(x: Stored) -> Stored:
    """Return the stored form of what a model passes to attention, or the tensor if the model has written to it."""
    if not isinstance(x, LazyKeys):
        return x
    return x.plain() if x.exposed else x.stored
