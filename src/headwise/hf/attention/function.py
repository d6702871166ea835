"""The attention function that transformers calls for every model on its attention interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...cache.base import Stored
from ...nn.attention_mode import current_mode
from ...ops.attention import attention_of_part
from ...ops.masks.constructors import bias, causal, keep, lengths, segments
from ...ops.masks.mask import EVERYTHING, Mask
from ...ops.masks.rules import Band, Segments
from ...ops.storage.layout import in_one_piece
from ...parallel.head_split.shards import HeadShards
from ..distributed.split_batch import WholeBatch, whole_batch
from ..distributed.tensor_parallel import heads_here, own_keys, own_part, together
from ..errors import ModelError
from ..models.architectures import CACHE, CROSS_ATTENTION
from ..returned import Returned, attend_and_weigh
from .lazy_tensors import LazyKeys, from_model
from .mask import StructuralMask
from .probe_sessions import record, watched

HARMLESS = frozenset(
    {
        CACHE,  # the key and value tensors already contain the cached tokens
        "cache_position",
        "deterministic",  # requests a reproducible backward pass from flash attention
        "encoder_attention_mask",  # for the cross-attention, which gets it as its attention_mask
        "encoder_hidden_states",
        "grid_thw",  # sizes of images; the sequences of a packed batch give the same information
        "input_ids",
        "logits_to_keep",
        "max_length_k",  # max_length_* repeat the information of cu_seq_lens_*
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "pixel_values",
        "position_ids",  # query and key are already rotated
        "return_dict",
        "shift_labels",
        "sliding_window",  # the mask already contains it, and models count this number differently
        "use_cache",
    }
)
"""Arguments that reach an attention function and do not change its result. `refuse_unknown` raises for any other."""


def headwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Stored,
    value: Stored,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for transformers; this function is registered with its AttentionInterface.

    query (B, H, T, D), key (B, K, S, D) and value (B, K, S, V) come after rotation and cache. Returns out (B, T, H, V)
    and the weights (B, H, T, S), or None if the caller did not request attentions. If the weights carry a gradient, out
    is computed from them, as "eager" does. A query that may attend no key gives 0. A cache of `make_cache` passes key
    and value in pages or int8; probes and weights use copies of them. Only the mask restricts attention:
    `sliding_window` is not read. Raises ValueError for an unknown argument.
    """
    refuse_unknown(module, kwargs)
    heads = heads_here(module, query, key)
    here = None if heads is None else heads.dealt
    if here is None:
        check_heads(module, query, key)
    batch, sharded = whole_batch(), current_mode()
    if batch is not None and sharded is not None:
        mask = _mask_of_whole(module, attention_mask, batch, is_causal)
        _check_split(module, query, key, position_bias, output_attentions, kwargs)
        pair = in_one_piece(key, query.dtype), in_one_piece(value, query.dtype)
        split: dict[str, Any] = {"mask": mask, "scale": scaling, "softcap": softcap, "dropout": dropout, "sinks": s_aux}
        if heads is not None and here is not None:
            pair = own_keys(module, here, *pair) if heads.gathered else pair
            split |= {"sinks": own_part(here, s_aux), "some": here.some}
        return sharded.attend(query, *pair, **split).transpose(1, 2).contiguous(), None
    keys_passed, expired = key.shape[2], key.expired if isinstance(key, LazyKeys) else 0
    key, value = _stored(key, value, query.dtype)
    if here is not None:
        if heads is not None and heads.gathered:
            pair = in_one_piece(key, query.dtype), in_one_piece(value, query.dtype)
            key, value = own_keys(module, here, *pair)
        s_aux, position_bias = own_part(here, s_aux), own_part(here, position_bias)
    if isinstance(key, Tensor) and isinstance(value, Tensor):
        query, key, value = _one_batch(query, key, value)
    if attention_mask is None and _is_causal(module, is_causal, query.shape[2]):
        # Without a mask, transformers aligns causal attention at the top left. Keys after the last query are unused
        # room of a static cache. Pages and int8 have no such room.
        if isinstance(key, Tensor) and isinstance(value, Tensor):
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : key.shape[2]]
        mask = causal(offset=0 if key.shape[2] < query.shape[2] else None)
    else:
        mask = _without_expired(mask_of(module, attention_mask, query.shape[2], key.shape[2]), expired, query, key)
    mask = _with_sequences(mask, kwargs, module, query, key)
    without = mask
    if position_bias is not None:
        mask = mask & bias(position_bias)
    options: dict[str, Any] = {
        "mask": mask,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
    }
    answer = None
    if watched(module):
        triple = query, in_one_piece(key, query.dtype), in_one_piece(value, query.dtype)
        answer = _recorded(module, here, triple, without, position_bias, options | {"dropout": dropout})
    wanted = bool(output_attentions) or attentions_are_collected()
    returned = Returned(keys_passed, query.dtype) if wanted else None
    if here is not None and dropout and answer is None:
        answer = attention_of_part(query, key, value, seed=here.some.of_part(), dropout=dropout, **options)
    out, matrix = attend_and_weigh(query, key, value, answer, returned, dropout=dropout, **options)
    return out.transpose(1, 2).contiguous(), matrix


def _recorded(
    module: nn.Module,
    here: HeadShards | None,
    triple: tuple[Tensor, Tensor, Tensor],
    without: Mask,
    position_bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor | None:
    """Return the replacement of the attention output by probes, which get all heads even if this rank has only some."""
    if here is None:
        return record(module, **dict(zip(("query", "key", "value"), triple, strict=True)), **options)
    whole = together(here, triple, sinks=options["sinks"], bias=position_bias)
    if (added := whole.pop("bias")) is not None:
        without = without & bias(added)
    answer = record(module, **(options | whole | {"mask": without}))
    return None if answer is None else here.group.parted(answer, 1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Stored,
    value: Stored,
    dropout: float,
    backend: str = "auto",
    returned: Returned | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for a module's own code, including the probes that are open on its model.

    Returns out (B, H, T, V), and the weights if `returned` is given.
    """
    key, value = _stored(key, value, query.dtype)
    answer = None
    if watched(module):
        pair = {"key": in_one_piece(key, query.dtype), "value": in_one_piece(value, query.dtype)}
        answer = record(module, query=query, dropout=dropout, **pair, **options)
    return attend_and_weigh(query, key, value, answer, returned, dropout=dropout, backend=backend, **options)


def _mask_of_whole(module: nn.Module, attention_mask: Tensor | None, batch: WholeBatch, is_causal: bool | None) -> Mask:
    """Return the mask of all tokens of a split batch."""
    if attention_mask is None:
        return causal() if _is_causal(module, is_causal, batch.tokens) else EVERYTHING
    return mask_of(module, attention_mask, batch.tokens, batch.tokens)


def _check_split(
    module: nn.Module,
    query: Tensor,
    key: Stored,
    position_bias: Tensor | None,
    attentions: Any,
    kwargs: dict[str, Any],
) -> None:
    """Raise ModelError for arguments and features that cannot be used when the tokens are split over processes."""
    wrong = [name for name in sorted(_SEQUENCES) if kwargs.get(name) is not None]
    wrong += ["position_bias"] if position_bias is not None else []
    wrong += ["output_attentions"] if attentions or attentions_are_collected() else []
    wrong += ["a probe"] if watched(module) else []
    wrong += ["a cache that holds tokens"] if key.shape[2] != query.shape[2] else []
    if wrong:
        raise ModelError(
            f"{type(module).__name__} runs on tokens split over processes, which does not go with {', '.join(wrong)}; "
            "leave that out, or run the model outside of context_parallel"
        )


def refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments that are not in `HARMLESS`, because they may change the result."""
    unknown = [name for name, value in kwargs.items() if value is not None and name not in HARMLESS | _SEQUENCES]
    if unknown:
        names = ", ".join(repr(name) for name in sorted(unknown))
        raise ValueError(
            f"{type(module).__name__} passes {names} to its attention function, which headwise does not know and which "
            'may change the result; run this model with model.set_attn_implementation("eager"), or leave the argument '
            "out if it came from your own call"
        )


def check_heads(module: nn.Module, query: Tensor, key: Stored) -> None:
    """Check that the number of query heads for each key-value head is that of the model.

    Tensor parallelism gives each process some of the heads. If it gathers keys and values but not queries, K still
    divides H, but the queries would use the wrong keys. Some models repeat their keys for all heads; they pass as many
    query heads and key-value heads as the config has.
    """
    groups, config = getattr(module, "num_key_value_groups", None), getattr(module, "config", None)
    H, K, heads = query.shape[1], key.shape[1], getattr(config, "num_attention_heads", None)
    if not isinstance(groups, int) or not isinstance(heads, int) or K * groups == H or H == K == heads:
        return
    raise ModelError(
        f"{type(module).__name__} passes {H} query heads and {K} key-value heads, and the model has {groups} query "
        f"heads to a key-value head ({heads} in all), so queries would read the wrong keys; under tensor parallelism "
        'split q, k and v alike ("colwise" each, over a number of processes that divides the key-value heads)'
    )


def _stored(key: Stored, value: Stored, dtype: torch.dtype) -> tuple[Stored, Stored]:
    """Return key and value for `attention`: both as the cache stores them, or both as tensors if one is a tensor."""
    pair = from_model(key), from_model(value)
    if isinstance(pair[0], Tensor) is isinstance(pair[1], Tensor):
        return pair
    return in_one_piece(pair[0], dtype), in_one_piece(pair[1], dtype)


def _one_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Expand tensors with a batch of 1 (learned queries, a shared prefix) to the batch of the others."""
    B = max(query.shape[0], key.shape[0])
    query, key, value = (x.expand(B, -1, -1, -1) if x.shape[0] == 1 else x for x in (query, key, value))
    return query, key, value


def _is_causal(module: nn.Module, is_causal: bool | None, T: int) -> bool:
    """Return True if transformers means causal attention by passing no mask; a single query attends all keys."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", CROSS_ATTENTION.search(type(module).__name__) is None)
    return T > 1 and bool(is_causal)


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
    if not expired or restricts:
        return mask
    stop, start = (torch.full((query.shape[0],), n, device=query.device) for n in (key.shape[2], expired))
    return mask & lengths(stop, start)


_SEQUENCES = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"})


def _with_sequences(mask: Mask, kwargs: dict[str, Any], module: nn.Module, query: Tensor, key: Stored) -> Mask:
    """Separate the sequences of a packed batch that `cu_seq_lens_*` (as for flash attention) or `seq_idx` describe."""
    packing = {name: kwargs[name] for name in _SEQUENCES if kwargs.get(name) is not None}
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


def attentions_are_collected() -> bool:
    """Return True if an outer caller requested attentions; most models pass the request only through this collector."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # private API: versions without it pass output_attentions as an argument
        return False
    wanted = _active_collector.get()
    return bool(wanted) and any("attentions" in key for key in wanted)
