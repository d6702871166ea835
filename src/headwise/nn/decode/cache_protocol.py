"""The protocol of caches for modules, and a step that appends new keys and values and attends to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...ops.compiled_calls import outside_graphs
from ...ops.masks.constructors import causal, keep
from ...ops.masks.mask import Mask, as_mask
from ...ops.storage.layout import Cache
from ...shapes.arguments import check_tensor


@runtime_checkable
class ModuleCache(Cache, Protocol):
    """The keys and values of previous tokens: a cache of `headwise.cache`, or any object with these members.

    All members are required except `causal`, which defaults to True. Optional members:

    - `chunk`, the maximum number of tokens in one append, None or missing for any number; modules split longer inputs;
    - `keys`, (B, K, S, D), where the first ``lengths[b]`` keys of row b are valid; None or missing if the cache does
      not keep all tokens: then latent attention never uses its expanded form;
    - `value_dim`, V, so that another V than the module's is refused before anything is appended.
    - `batch`, B, and `positions`, the positions of the next tokens: used instead of `lengths`, which torch.compile
      would treat as constants.

    With `takes_steps` and `step`, as in `headwise.cache.KVCache`, a decode step is one call (nn/decode/fused_step.py).
    """

    lengths: list[int]
    """The number of tokens of each row."""
    causal: bool
    """True if queries do not attend to later keys; False for the memory of cross-attention."""

    def append(self, key: Tensor, value: Tensor | None = None, *, lengths: Sequence[int] | Tensor | None = None) -> Any:
        """Append tokens: key (B, K, T, D), value (B, K, T, V); `lengths` (B,) is the number of real tokens per row."""


def is_causal(cache: Any) -> bool:
    """Return whether queries attend to no later key of a cache."""
    return getattr(cache, "causal", True)


def chunk_of(cache: Any) -> int | None:
    """Return the maximum number of tokens in one append; None for any number."""
    return getattr(cache, "chunk", None)


def has_keys(cache: object) -> bool:
    """Return whether a cache has `keys`; they are not read, as that may copy them."""
    own = getattr(cache, "__dict__", {})
    return (own["keys"] if "keys" in own else getattr(type(cache), "keys", None)) is not None


def rows_of(cache: Any) -> int:
    """Return the rows B of a cache; `batch` is preferred, as torch.compile would treat the lengths as constants."""
    batch = getattr(cache, "batch", None)
    return batch if type(batch) is int else len(cache.lengths)


def positions_of(cache: ModuleCache, T: int, device: torch.device) -> Tensor:
    """Return the positions of T new tokens after the tokens of each row: (T,), or (B, T) if rows differ."""
    if hasattr(cache, "positions"):
        return cache.positions(T, device)
    seen = torch.tensor(cache.lengths, device=device)
    alike = len(set(cache.lengths)) == 1
    return torch.arange(T, device=device) + (seen[0] if alike else seen[:, None])


@outside_graphs
def keys_held(
    cache: Any, new: Tensor, mask: Mask | Tensor | None, lengths: Sequence[int] | None
) -> tuple[Tensor, Mask]:
    """Append new keys to a causal cache, and return all keys (B, K, S, D) and the mask for the new tokens.

    If the cache was empty, `new` itself is returned, not rounded to the dtype of the cache.
    """
    before, length = list(cache.lengths), new.shape[2]
    cache.append(new, lengths=lengths)
    keys = cache.keys if any(before) else new
    even = all(n == keys.shape[2] - length for n in before)
    rule = causal() if even else causal(offset=torch.tensor(before, device=new.device))
    if lengths is not None:
        real = torch.arange(length, device="cpu") < torch.as_tensor(lengths, device="cpu")[:, None]
        rule = rule & keep(real[:, None, :, None].to(new.device))
    return keys, rule & as_mask(mask)


def step(
    inner: Callable[..., Tensor],
    cache: ModuleCache,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    lengths: Sequence[int] | None = None,
    mask: Mask | Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Append keys and values to the cache, and return the output of `inner` for the queries, (B, H, T, V).

    For a cache with a limited `chunk` (a rolling one), append and attention run chunk by chunk.
    """
    if gate is not None:  # check before the cache changes
        check_tensor("gate", gate, "a float tensor (H,), (B, H), (B, H, T) or (B, H, T, V)")
    T = query.shape[2]
    chunk = chunk_of(cache)
    most = T if chunk is None else chunk
    whole = key is None or most >= T
    outs = []
    for first in [0] if whole else range(0, T, most):
        part = slice(None) if whole else slice(first, first + most)
        if key is not None:
            here = min(most, T - first)
            some = None if lengths is None else [min(max(n - first, 0), here) for n in lengths]
            cache.append(key[:, :, part], None if value is None else value[:, :, part], lengths=some)
        gated: dict[str, Any] = {}
        if gate is not None:
            gated["gate"] = gate[:, :, part] if gate.ndim > 2 else gate
        outs.append(inner(query[:, :, part], cache, None, mask=mask, **gated))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
