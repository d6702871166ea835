"""The mask of an attention call, from the arguments by which transformers describes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...cache.base import Stored
from ...ops.masks.constructors import bias, causal, keep, lengths, segments
from ...ops.masks.mask import EVERYTHING, Mask
from ...ops.masks.rules import Band, Segments
from ..errors import ModelError
from ..models.architectures import CROSS_ATTENTION
from .lazy_tensors import KeptTokens
from .mask import StructuralMask

PACKING = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"})
"""Arguments that describe the sequences of a packed batch."""


def mask_of_call(
    module: nn.Module,
    attention_mask: Tensor | None,
    query: Tensor,
    key: Stored,
    *,
    causal_without_mask: bool,
    expired: int,
    packing: dict[str, Any],
    places: KeptTokens | None = None,
) -> Mask:
    """Return all that restricts a call: its mask argument, and the sequences of a packed batch.

    Args:
        module: The attention module, for error texts.
        attention_mask: transformers' mask argument.
        query: (B, H, T, D).
        key: (B, K, S, D); without the unused room of a static cache if `causal_without_mask`.
        causal_without_mask: True if the call has no mask and is causal; then query and key are aligned at the top left.
        expired: The number of first keys that a cache holds although they are before its sliding window.
        packing: The keyword arguments of the call; those in `PACKING` are read.
        places: The tokens that are left of a cache; the mask that is returned has all tokens, dropped ones, too.
    """
    T, S = query.shape[2], key.shape[2] if places is None else places.length
    if causal_without_mask:
        mask = causal(offset=0 if S < T else None)
    else:
        mask = mask_of(module, attention_mask, T, S)
        if expired:
            mask = _without_expired(mask, expired, query, key)
    return mask if PACKING.isdisjoint(packing) else _with_sequences(mask, packing, module, query, key)


def is_causal_without_mask(module: nn.Module, attention_mask: Tensor | None, is_causal: bool | None, T: int) -> bool:
    """Return True if transformers means causal attention by passing no mask; a single query attends all keys."""
    if attention_mask is not None or T <= 1:
        return False
    if is_causal is None:
        is_causal = getattr(module, "is_causal", CROSS_ATTENTION.search(type(module).__name__) is None)
    return bool(is_causal)


def mask_of(module: nn.Module, attention_mask: Tensor | None, T: int, S: int) -> Mask:
    """Convert transformers' mask argument for T queries and S keys; bool tensors keep, float tensors are added."""
    if attention_mask is None:
        return EVERYTHING
    if isinstance(attention_mask, StructuralMask) and attention_mask.shape[2:] == (1, S) and T > 1:
        attention_mask = attention_mask.plain().expand(-1, -1, T, -1)  # one row for all queries, as in eager
    if isinstance(attention_mask, StructuralMask):
        if attention_mask.shape[2:] != (T, S) and attention_mask.mask.parts:
            # Attention checks the sizes of a tensor. Rules have no sizes and would silently use other positions.
            T_made, S_made = attention_mask.shape[2:]
            raise ModelError(
                f"{type(module).__name__} attends {S} keys with {T} queries under a mask made for {T_made} queries and "
                f"{S_made} keys; the model changes their number on the way: run it with set_attn_implementation"
                '("eager")'
            )
        if not attention_mask.exposed:
            return attention_mask.mask
        attention_mask = attention_mask.plain()
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4:
        got = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
        raise ValueError(
            f"{type(module).__name__} passes an attention mask {got}; headwise takes what it registered for, or a "
            "(B, 1|H, T, S) bool or float tensor; give the model a (B, S) padding mask, or set_attn_implementation"
            '("eager")'
        )
    if attention_mask.dtype == torch.bool:
        return keep(attention_mask)
    if not attention_mask.is_floating_point():
        raise ValueError(
            f"{type(module).__name__} passes a 4-D attention mask of {attention_mask.dtype}; a bool tensor says what "
            "may be attended, a float tensor is added to the scores: convert it with .bool()"
        )
    return bias(without_lowest(attention_mask))


def without_lowest(added: Tensor) -> Tensor:
    """Replace the lowest finite number, by which models hide a key, with -inf in a tensor that is added to scores.

    With -inf, a row without keys gives 0; with a finite number, it gives a mean.
    """
    lowest = torch.finfo(added.dtype).min
    return added.masked_fill(added <= lowest, -torch.inf)


def _without_expired(mask: Mask, expired: int, query: Tensor, key: Stored) -> Mask:
    """Hide the first `expired` keys if the mask contains no window or chunk: some models rely on the cache for that.

    The caches of transformers drop tokens exactly at the sliding window; headwise's caches drop whole pages.
    """
    restricts = any(isinstance(part, Segments) or (isinstance(part, Band) and part.left) for part in mask.parts)
    if restricts:
        return mask
    stop, start = (torch.full((query.shape[0],), n, device=query.device) for n in (key.shape[2], expired))
    return mask & lengths(stop, start)


def _with_sequences(mask: Mask, arguments: dict[str, Any], module: nn.Module, query: Tensor, key: Stored) -> Mask:
    """Separate the sequences of a packed batch that `cu_seq_lens_*` (as for flash attention) or `seq_idx` describe."""
    packing = {name: arguments[name] for name in PACKING if arguments.get(name) is not None}
    if not packing:
        return mask
    segmented = [part for part in mask.parts if isinstance(part, Segments)]
    cached = packing.keys() == {"seq_idx"} and query.shape[2] != key.shape[2]
    if cached or (query.shape[0] != 1 and not segmented):
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(sorted(packing))} with query {tuple(query.shape)} and key "
            f"{tuple(key.shape)}: packed sequences come as one row (B = 1) and without a cache; pass position_ids "
            "alone with use_cache=False, or unpack the batch"
        )
    sequences = _sequences(packing, query, key)
    if not segmented:
        return mask & segments(*sequences)
    if not any(_is_kept_apart(part, sequences) for part in segmented):
        raise ValueError(
            f"{type(module).__name__} passes {', '.join(sorted(packing))} with a mask of chunks or sequences that do "
            "not end where these do (chunks are counted from the first token); pass position_ids that begin anew with "
            "each sequence, and use_cache=False: then the mask is made for each sequence"
        )
    return mask


def _sequences(packing: dict[str, Any], query: Tensor, key: Stored) -> tuple[Tensor, Tensor]:
    """Return the sequence number of each query (B, T) and of each key (B, S)."""
    if "cu_seq_lens_q" not in packing and "cu_seq_lens_k" not in packing:
        return (packing["seq_idx"].view(-1, query.shape[2]),) * 2
    ends_q = packing.get("cu_seq_lens_q", packing.get("cu_seq_lens_k"))
    ends_k = packing.get("cu_seq_lens_k", ends_q)
    return _sequence_of(ends_q, query.shape[2], query), _sequence_of(ends_k, key.shape[2], query)


def _is_kept_apart(part: Segments, sequences: tuple[Tensor, Tensor]) -> bool:
    """Return True if a new segment begins wherever a new sequence begins, and no segment number returns later."""
    for ids, sequence in zip((part.query_ids, part.key_ids), sequences, strict=True):
        step = ids.diff()
        if bool((step < 0).any()) or bool(((sequence.diff() != 0) & (step == 0)).any()):
            return False
    return True


def _sequence_of(ends: Any, length: int, query: Tensor) -> Tensor:
    """Return the sequence number of each position (B, length). `ends` is (n + 1,) and begins with 0."""
    at = torch.arange(query.shape[0] * length, device=query.device)
    return torch.searchsorted(ends[1:].to(at), at, right=True).view(-1, length)
