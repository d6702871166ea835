"""The caches that modules take, and a step with one: new keys and values go in, and queries attend to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...ops.compiled_calls import outside_graphs
from ...ops.masks.constructors import causal, keep
from ...ops.masks.mask import Mask, as_mask
from ...ops.storage.layout import Cache
from ...shapes.arguments import check_tensor


@runtime_checkable
class ModuleCache(Cache, Protocol):
    """Keys and values of the tokens so far: the caches of `headwise.cache`, and any other object with these members.

    These are required (but for `causal`, True where it is missing). A module reads more if they are there:

    - `chunk`, the most tokens of one append, None or missing for any number: a module cuts longer inputs itself;
    - `keys`, (B, K, S, D), of which row b has its first ``lengths[b]``; None or missing where not all tokens are kept:
      then latent attention never takes its expanded form;
    - `value_dim`, V, so that another V than the module's is refused before anything is appended.
    - `batch`, B, and `positions`, where the next tokens stand: asked in place of `lengths`, which a graph of
      torch.compile would hold fast.

    And where it has `takes_steps` and `step`, as `headwise.cache.KVCache`, a token a row is one call (`nn/steps.py`).
    """

    lengths: list[int]
    """Tokens of each row."""
    causal: bool
    """Queries see no later key; False for the memory of cross-attention."""

    def append(self, key: Tensor, value: Tensor | None = None, *, lengths: Sequence[int] | Tensor | None = None) -> Any:
        """Adds tokens: key (B, K, T, D), value (B, K, T, V); `lengths` (B,): how many of them are real in each row."""


class Traits(NamedTuple):
    """What a cache may leave out, with what is meant then; see `ModuleCache`."""

    causal: bool
    chunk: int | None
    has_keys: bool
    value_dim: int | None


def cache_traits(cache: ModuleCache) -> Traits:
    """The optional members of a cache; `keys` is not fetched, for that may copy them."""
    return Traits(
        causal=getattr(cache, "causal", True),
        chunk=getattr(cache, "chunk", None),
        has_keys=_has_keys(cache),
        value_dim=getattr(cache, "value_dim", None),
    )


def rows_of(cache: Any) -> int:
    """Rows B of a cache: its `batch`, where it has one, for a graph of torch.compile is not to read its lengths."""
    batch = getattr(cache, "batch", None)
    return batch if type(batch) is int else len(cache.lengths)


def _has_keys(cache: object) -> bool:
    own = getattr(cache, "__dict__", {})
    return (own["keys"] if "keys" in own else getattr(type(cache), "keys", None)) is not None


def positions_of(cache: ModuleCache, T: int, device: torch.device) -> Tensor:
    """Where T new tokens stand: behind those that each row has seen; (T,), or (B, T) where rows differ."""
    if hasattr(cache, "positions"):
        positions: Tensor = cache.positions(T, device)
        return positions
    seen = torch.tensor(cache.lengths, device=device)
    alike = len(set(cache.lengths)) == 1
    return torch.arange(T, device=device) + (seen[0] if alike else seen[:, None])


@outside_graphs
def keys_held(
    cache: Any, new: Tensor, mask: Mask | Tensor | None, lengths: Sequence[int] | None
) -> tuple[Tensor, Mask]:
    """The keys (B, K, S, D) of a causal cache with the new ones appended, and the mask under which new tokens attend.

    Into an empty cache go the new ones alone, and they come back unrounded, whatever the dtype of the cache.
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
    """(B, H, T, V): what `inner` gives for the queries, once their keys and values are in the cache.

    A cache that takes so many tokens at a time only (a rolling one) gets them, and is attended, piece by piece.
    """
    if gate is not None:  # refused before the cache has changed
        check_tensor("gate", gate, "a float tensor (H,), (B, H), (B, H, T) or (B, H, T, V)")
    T = query.shape[2]
    chunk = cache_traits(cache).chunk
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
