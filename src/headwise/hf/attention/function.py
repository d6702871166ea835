"""The attention function that transformers calls for every model on its attention interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...cache.base import Stored
from ...nn.attention_mode import current_mode
from ...ops.attention import attention_of_part
from ...ops.masks.constructors import bias, causal
from ...ops.masks.key_positions import mask_at_positions
from ...ops.storage.layout import in_one_piece
from ...parallel.head_split.shards import HeadShards
from ..distributed.split_batch import whole_batch
from ..distributed.tensor_parallel import gather_heads, heads_here, own_keys, own_part
from ..errors import ModelError
from ..models.architectures import CACHE
from ..returned import Returned, attend_and_weigh, attentions_are_collected
from .call_mask import PACKING, is_causal_without_mask, mask_of, mask_of_call
from .lazy_tensors import KeptTokens, LazyKeys, from_model
from .probe_sessions import is_probed, record

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
_KNOWN = HARMLESS | PACKING


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
    shards = heads_here(module, query, key)
    if shards is None:
        check_heads(module, query, key)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout": dropout}
    if (batch := whole_batch()) is not None:
        _check_split_tokens(module, query, key, position_bias, output_attentions, kwargs)
        T = batch.tokens
        is_causal = is_causal_without_mask(module, attention_mask, is_causal, T)
        options["mask"] = causal() if is_causal else mask_of(module, attention_mask, T, T)
        return _attend_split_tokens(module, shards, query, key, value, options), None
    wanted = bool(output_attentions) or attentions_are_collected()
    returned = Returned(key.shape[2], query.dtype) if wanted else None
    if shards is None and returned is None and position_bias is None:
        out = _step(module, query, key, value, attention_mask, kwargs, options)
        if out is not None:
            return out.transpose(1, 2), None
    expired, places = (key.expired, key.places) if isinstance(key, LazyKeys) else (0, None)
    key, value = stored_pair(key, value, query.dtype)
    if shards is not None:
        _check_not_dropped(module, places)
        key, value = own_keys(module, shards, key, value, query.dtype)
        options["sinks"], position_bias = own_part(shards, s_aux), own_part(shards, position_bias)
    query, key, value = _one_batch(query, key, value)
    top_left = is_causal_without_mask(module, attention_mask, is_causal, query.shape[2])
    if top_left and places is None:
        key, value, position_bias = _up_to_last_query(query.shape[2], key, value, position_bias)
    options["mask"] = mask_of_call(
        module, attention_mask, query, key, causal_without_mask=top_left, expired=expired, packing=kwargs, places=places
    )
    if shards is None:
        if position_bias is not None:
            options["mask"] &= bias(position_bias)
        if places is not None:
            options["mask"] = mask_at_positions(options["mask"], *places, query)
        out, matrix = attend(module, query, key, value, returned=returned, **options)
    else:
        out, matrix = _attend_own_heads(module, shards, query, key, value, position_bias, returned, options)
    return out.transpose(1, 2).contiguous(), matrix


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
    """Compute attention, including the probes that are open on the model of this module.

    Returns out (B, H, T, V), and the weights if `returned` is given.
    """
    answer = None
    if is_probed(module):
        pair = {"key": in_one_piece(key, query.dtype), "value": in_one_piece(value, query.dtype)}
        answer = record(module, query=query, dropout=dropout, **pair, **options)
    return attend_and_weigh(query, key, value, answer, returned, dropout=dropout, backend=backend, **options)


def _step(
    module: nn.Module,
    query: Tensor,
    key: Stored,
    value: Stored,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Tensor | None:
    """Compute a decode step in one native call, which also appends the token; None for any other call."""
    if not (isinstance(key, LazyKeys) and isinstance(value, LazyKeys)):
        return None
    token, scale, softcap = key.token, options["scale"], options["softcap"]
    if (
        token is None
        or not (token is value.token and key.is_key and not value.is_key)
        or key.exposed
        or value.exposed
        or options["dropout"]
        or not (scale is None or type(scale) is float)
        or not (softcap is None or (type(softcap) is float and softcap > 0))
        or any(kwargs.get(name) is not None for name in PACKING)
        or is_probed(module)
    ):
        return None
    mask = mask_of(module, attention_mask, query.shape[2], key.shape[2])
    return token.step(query, mask, scale=scale, softcap=softcap, sinks=options["sinks"])


# -- heads and tokens that are split over ranks ------------------------------------------------------------------------


def _attend_own_heads(
    module: nn.Module,
    shards: HeadShards,
    query: Tensor,
    key: Stored,
    value: Stored,
    position_bias: Tensor | None,
    returned: Returned | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for the heads on this rank, as `attend`; probes get the heads of all ranks."""
    mask, dropout = options["mask"], options["dropout"]
    options = options | {"mask": mask if position_bias is None else mask & bias(position_bias)}
    answer = None
    if is_probed(module):
        tensors = query, in_one_piece(key, query.dtype), in_one_piece(value, query.dtype)
        whole = gather_heads(shards, tensors, sinks=options["sinks"], bias=position_bias)
        added = whole.pop("bias")
        whole["mask"] = mask if added is None else mask & bias(added)
        answer = record(module, **(options | whole))
        answer = None if answer is None else shards.group.parted(answer, 1)
    if dropout and answer is None:
        answer = attention_of_part(query, key, value, seed=shards.some.of_part(), **options)
    return attend_and_weigh(query, key, value, answer, returned, **options)


def _attend_split_tokens(
    module: nn.Module, shards: HeadShards | None, query: Tensor, key: Stored, value: Stored, options: dict[str, Any]
) -> Tensor:
    """Compute attention of this rank's queries over the tokens of all ranks; returns out (B, T, H, V)."""
    sharded = current_mode()
    assert sharded is not None, "context_parallel enters the whole batch and the split of its tokens together"
    pair = in_one_piece(key, query.dtype), in_one_piece(value, query.dtype)
    if shards is not None:
        pair = own_keys(module, shards, *pair, query.dtype)
        options |= {"sinks": own_part(shards, options["sinks"]), "some": shards.some}
    return sharded.attend(query, *pair, **options).transpose(1, 2).contiguous()


def _check_split_tokens(
    module: nn.Module, query: Tensor, key: Stored, position_bias: Tensor | None, attentions: Any, kwargs: dict[str, Any]
) -> None:
    """Raise ModelError for arguments and features that cannot be used when the tokens are split over processes."""
    wrong = [name for name in sorted(PACKING) if kwargs.get(name) is not None]
    wrong += ["position_bias"] if position_bias is not None else []
    wrong += ["output_attentions"] if attentions or attentions_are_collected() else []
    wrong += ["a probe"] if is_probed(module) else []
    wrong += ["a cache that holds tokens"] if key.shape[2] != query.shape[2] else []
    if wrong:
        raise ModelError(
            f"{type(module).__name__} runs on tokens split over processes, which does not go with {', '.join(wrong)}; "
            "leave that out, or run the model outside of context_parallel"
        )


def _check_not_dropped(module: nn.Module, places: KeptTokens | None) -> None:
    if places is not None:
        raise ModelError(
            f"{type(module).__name__} runs with its heads split over processes, and its cache has dropped tokens: "
            "each process would have its own; keep all tokens, or run the model in one process"
        )


def refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments that are not in `HARMLESS`, because they may change the result."""
    if kwargs.keys() <= _KNOWN:
        return
    unknown = [name for name, value in kwargs.items() if value is not None and name not in _KNOWN]
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


def stored_pair(key: Stored, value: Stored, dtype: torch.dtype) -> tuple[Stored, Stored]:
    """Return key and value for `attention`: both as the cache stores them, or both as tensors if one is a tensor."""
    pair = from_model(key), from_model(value)
    if isinstance(pair[0], Tensor) is isinstance(pair[1], Tensor):
        return pair
    return in_one_piece(pair[0], dtype), in_one_piece(pair[1], dtype)


def _one_batch(query: Tensor, key: Stored, value: Stored) -> tuple[Tensor, Stored, Stored]:
    """Expand tensors with a batch of 1 (learned queries, a shared prefix) to the batch of the others."""
    if not (isinstance(key, Tensor) and isinstance(value, Tensor)):
        return query, key, value
    if query.shape[0] == key.shape[0] == value.shape[0]:
        return query, key, value
    B = max(query.shape[0], key.shape[0])
    query, key, value = (x.expand(B, -1, -1, -1) if x.shape[0] == 1 else x for x in (query, key, value))
    return query, key, value


def _up_to_last_query(
    T: int, key: Stored, value: Stored, position_bias: Tensor | None
) -> tuple[Stored, Stored, Tensor | None]:
    """Cut off the keys after the last of T queries, which are the unused room of a static cache.

    transformers aligns causal attention without a mask at the top left. Pages and int8 have no unused room.
    """
    if isinstance(key, Tensor) and isinstance(value, Tensor) and key.shape[2] > T:
        key, value = key[:, :, :T], value[:, :, :T]
    return key, value, None if position_bias is None else position_bias[..., : key.shape[2]]
