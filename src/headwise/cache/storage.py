"""The tensors of a cache: numbers in the model's dtype, or codes with a scale for each token and head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from ..ops.native.append import AppendSpan, append_codes
from ..ops.native.decode_step import CacheStep
from ..ops.storage.packed import BITS, encoded, kernel_rotation, packed_width
from ..ops.storage.quantized import Quantized
from ..ops.triton.appending import append_on_device
from .huge_pages import on_huge_pages, reserve
from .quantize import rounded
from .saved import Saved


class Store(Saved):
    """Keys (N, K, L, D) and values (N, K, L, V), and their scales (N, K, L) if they are quantised.

    Codes of 4 and 3 bits are packed, so that a row has D * bits / 8 bytes. If `shared` is True, the values are the
    first V columns of the keys, as in MLA.
    """

    def __init__(
        self,
        size: tuple[int, int, int],
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        shared: bool,
        device: torch.device | str | None,
    ) -> None:
        self.value_dim, self.shared, self.bits = value_dim, shared, BITS.get(dtype, 0)
        if 0 < self.bits < 8:
            dtype, head_dim, value_dim = torch.uint8, *(packed_width(n, self.bits) for n in (head_dim, value_dim))
        self.key = reserve((*size, head_dim), dtype, device)
        self.value = None if shared else reserve((*size, value_dim), dtype, device)
        self.key_scale = self.value_scale = None
        if self.bits:
            self.key_scale = reserve(size, torch.float32, device)
            self.value_scale = None if shared else reserve(size, torch.float32, device)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, including memory that is not used."""
        return sum(x.nbytes for x in self._tensors().values())

    def quantize(self, key: Tensor, value: Tensor | None, spans: Iterable[AppendSpan]) -> bool:
        """Write spans of (B, K, T, n) to a store of codes in one native call; if it returns False, use `put`."""
        if self.key_scale is None:
            return False
        return append_codes(key, value, (self.key, self.key_scale, self.value, self.value_scale), spans)

    def append(self, key: Tensor, value: Tensor | None, **places: Any) -> bool:
        """Write tokens (B, K, T, n) in one kernel launch on a GPU; if it returns False, use `put`."""
        if 0 < self.bits < 8:
            return False
        storage = (self.key, self.value, self.key_scale, self.value_scale)
        return append_on_device(key, value, storage, **places)

    def storage(self, table: Tensor | None, places: list[int]) -> CacheStep:
        """Return the store in the form of a decode step, whose tokens are written to the columns `places`."""
        step = CacheStep(self.key, self.value, self.key_scale, self.value_scale, table, places, self.value_dim)
        if self.bits in (0, 8):
            return step
        head_dim = self.key.shape[3] * 8 // self.bits
        V = self.value_dim
        return step._replace(rotations=(kernel_rotation(head_dim), kernel_rotation(V), kernel_rotation(V, back=True)))

    def put(self, where: Any, key: Tensor, value: Tensor | None) -> None:
        """Write tokens at an index of (N, K, L)."""
        for name, x in (("key", key), ("value", value)):
            if x is None:
                continue
            to, scales = getattr(self, name), getattr(self, f"{name}_scale")
            if torch._is_functional_tensor(x) and not torch._is_functional_tensor(to):
                raise ValueError(
                    "torch.func.functionalize does not support a cache that was made outside of the function: make "
                    "the cache inside, or cache.fork() of a StaticCache or RollingCache, or leave functionalize out"
                )
            if scales is None:
                to[where] = x
            else:
                to[where], scales[where] = rounded(x) if self.bits == 8 else encoded(x, self.bits)

    def compact(self, index: Tensor) -> None:
        """Move the tokens at `index` (N, K|1, n) of each entry to its front."""
        for x in self._tensors().values():
            x[:, :, : index.shape[2]] = taken(x, index)

    @property
    def requires_grad(self) -> bool:
        """True if tokens with a gradient were written."""
        return any(x.requires_grad for x in self._tensors().values())

    def continued(self, length: int) -> Store:
        """Return another store with the same first tokens of each entry; gradients flow through the copy."""
        new = copy(self)
        for name, x in self._tensors().items():
            to = reserve(x.shape, x.dtype, x.device)
            if length:
                with torch.enable_grad():
                    to[:, :, :length] = x[:, :, :length]
            setattr(new, name, to)
        return new

    def detached(self) -> Store:
        """Return a store with the same memory, without the gradients of written tokens."""
        new = copy(self)
        vars(new).update({name: x.detach() for name, x in self._tensors().items()})
        return new

    def on_huge_pages(self) -> Store:
        """Request huge pages for all tensors, and return this store; each new page is resident as a whole."""
        for x in self._tensors().values():
            on_huge_pages(x)
        return self

    def copied(self, entries: Sequence[int] | None = None, more: int = 0) -> Store:
        """Return another store with copies of the given entries of N (all by default), and room for `more` entries."""
        new = copy(self)
        for name, x in self._tensors().items():
            kept = len(x) if entries is None else len(entries)
            to = reserve((kept + more, *x.shape[1:]), x.dtype, x.device)
            on_huge_pages(to)
            if entries is None:
                to[:kept] = x
            else:
                for at, entry in enumerate(entries):
                    to[at] = x[entry]
            setattr(new, name, to)
        return new

    def view(self, length: int | None = None) -> tuple[Any, Any]:
        """Return keys and values up to a length, as `headwise.attention` takes them; nothing is copied."""
        part = slice(None) if length is None else slice(length)
        key: Any = self.key[:, :, part]
        value: Any = key[..., : self.value_dim] if self.value is None else self.value[:, :, part]
        if self.key_scale is not None:
            scale = self.key_scale[:, :, part]
            key = Quantized(key, scale, self.bits)
            value = Quantized(value, scale if self.value_scale is None else self.value_scale[:, :, part], self.bits)
        return key, value


def taken(x: Tensor, index: Tensor) -> Tensor:
    """Return a copy of the tokens of x (N, K, L) or (N, K, L, n) at the places `index` (N, K|1, m) of L."""
    at = index.to(x.device).expand(*x.shape[:2], -1)
    x = x.clone() if x.requires_grad else x  # the gradient of `gather` needs its input, which is written to next
    return x.gather(2, at if x.ndim == 3 else at[..., None].expand(-1, -1, -1, x.shape[3]))
