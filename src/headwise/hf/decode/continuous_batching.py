"""transformers' continuous batching (`generate_batch`) with headwise's attention.

There are two ways to do it, because transformers accepts "paged|eager", "sdpa" and any name with "flash" in it. For
"paged|eager", headwise would have to replace transformers' own function for every model of the process, and would get a
float mask of all queries by all keys of all requests. A new name with "flash" in it is an additional entry of the
registry. Only models that are switched to it use it, and it gets no mask: lengths say which queries and keys belong to
which request. Besides the registry, it depends on one attribute of a config, which `probe` also writes. Therefore
headwise registers a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache

from ...nn.hooks.unwrap import unwrap
from ...ops.attention import attention
from ...ops.masks.constructors import causal, lengths, window
from ...ops.masks.mask import Mask
from ...ops.storage.paged import PAGE, Paged
from ..attention.function import check_heads, headwise_attention, refuse_unknown
from ..attention.mask import StructuralMask
from ..errors import ModelError
from ..models.support import attention_modules, configs, refuse_own_code, require_interface, title

NAME = "headwise_flash"
"""transformers requires "flash" in the name; a 2 or 3 after it would select the kernels of flash attention."""

_BATCHING = frozenset(
    {
        "block_table",  # for the kernels of flash attention; None without them
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",  # always True
        "logits_indices",  # for the unembedding
        "logits_processor_args",
        "read_index",
        "write_index",
    }
)


@contextmanager
def serving(model: nn.Module) -> Iterator[nn.Module]:
    """Run headwise's attention in `model.generate_batch` and other continuous batching inside of the with block.

    Each request is causal on its own tokens, with the model's windows, softcaps and sinks; the generated tokens equal
    those of `attn_implementation="sdpa"`. For layers without a window, keys and values are read from transformers'
    pages if their size is a multiple of 128 tokens (the default is 256); with smaller pages each step makes a copy.
    After the block, the model has its previous attention; other models never change. Stop your own manager before the
    block ends.

    Args:
        model: a transformers decoder on the CPU whose attention is on transformers' interface, or a wrapper.

    Yields:
        The model, without its wrapper.

    Raises:
        ModelError: the model does not generate in batches, or its attention is not on the interface.
        TypeError: model is not a PreTrainedModel.
        ValueError: the model is on another device than the CPU.

    Example:
        >>> from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
        >>> from transformers.generation import ContinuousBatchingConfig
        >>> sizes = dict(hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=11)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> how = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1)
        >>> room = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
        >>> with serving(model):
        ...     out = model.generate_batch([[1, 2, 3], [4, 5]], generation_config=how, continuous_batching_config=room)
        >>> [len(answer.generated_tokens) for answer in out.values()]
        [3, 3]
    """
    served: Any = unwrap(model)
    _require_served(served)
    with ExitStack() as undo:
        # A manager that is kept has buffers only for this kind of batch, without masks, so it is destroyed at the end.
        undo.callback(served.destroy_cached_continuous_batching_manager)
        for config in configs(served):
            undo.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation)
            config._attn_implementation_internal = NAME
        # Since transformers 5.24, a layer passes its keys to the cache; before that, its attention function does.
        undo.callback(served.register_forward_pre_hook(_leave_caching_to_attention, with_kwargs=True).remove)
        yield served


def _leave_caching_to_attention(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Let the cache of a batch return new keys and values unchanged, and pass the cache to the attention function."""
    cache = kwargs.get("cache")
    if isinstance(cache, PagedAttentionCache):
        cache.update = partial(_passed_on, cache)


def _passed_on(
    cache: PagedAttentionCache, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    kwargs["cache"] = cache
    return key_states, value_states


def _require_served(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"headwise.hf.serving takes a transformers PreTrainedModel; got {type(model).__name__}")
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            require_interface(type(part), part.config.model_type)
    refuse_own_code(model, "headwise.hf.serving")
    if not hasattr(model, "generate_batch") or model.config.is_encoder_decoder or not attention_modules(model):
        raise ModelError(
            f"{title(model)} has no continuous batching in transformers, which is for decoders with a head that "
            "predicts tokens; load it with AutoModelForCausalLM, or call generate()"
        )
    if model.device.type != "cpu":
        raise ValueError(
            f"{title(model)} is on {model.device}; headwise.hf.serving is for the CPU: on other devices use "
            'attn_implementation="flash_attention_2" or "sdpa"'
        )


@torch.compiler.disable  # writes to views of the cache and branches on lengths, as transformers' own function does
def batched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for continuous batching; this function is registered with transformers' AttentionInterface.

    query (1, H, T, D), key (1, K, T, D) and value (1, K, T, V) are the new tokens of all requests, one request after
    another. `cache` contains the earlier tokens of each request. Returns out (1, T, H, V) and None. A call without
    `cache` is an ordinary forward pass, as with attn_implementation="headwise".
    """
    if cache is None:
        options = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "s_aux": s_aux, **kwargs}
        return headwise_attention(module, query, key, value, attention_mask, **options)
    if not (attention_mask is None or isinstance(attention_mask, StructuralMask)):
        # A mask that `headwise_mask` made covers only the new tokens and adds nothing to the lengths. A tensor is made
        # by the model itself.
        raise ModelError(
            f"{type(module).__name__} computes a mask of its own, which continuous batching has no room for: call "
            "generate(), with headwise.hf.make_cache if you like"
        )
    refuse_unknown(module, {name: x for name, x in kwargs.items() if name not in _BATCHING})
    check_heads(module, query, key)
    _check_room(module, cache.layer_to_allocator[module.layer_idx], key, value)
    keys = _Keys(cache, module.layer_idx, key, value, kwargs)
    ends = kwargs["cu_seq_lens_q"].tolist()
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[3])
    options = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout": dropout}
    spans = [(r, start, stop) for r, (start, stop) in enumerate(pairwise(ends)) if start < stop]
    # Requests with one new token are the rows of one batch, because separate calls would be small.
    steps = [(r, start) for r, start, stop in spans if stop - start == 1]
    if steps:
        requests, at = (torch.tensor(x, device="cpu") for x in zip(*steps, strict=True))
        k, v, mask = keys.of_rows(requests)
        rows = query[0, :, at].transpose(0, 1)[:, :, None]
        out[at] = attention(rows, k, v, mask=mask, **options)[:, :, 0]
    for r, start, stop in spans:
        if stop - start > 1:
            k, v, mask = keys.of_one(r)
            out[start:stop] = attention(query[:, :, start:stop], k, v, mask=mask, **options)[0].transpose(0, 1)
    return out[None], None


def _check_room(module: nn.Module, kept: Any, key: Tensor, value: Tensor) -> None:
    """Check that key and value fit transformers' pages, which the config defines; latent attention has other sizes."""
    room = getattr(kept, "num_key_value_heads", key.shape[1]), getattr(kept, "head_dim", key.shape[3])
    if any((x.shape[1], x.shape[3]) != room for x in (key, value)):
        raise ModelError(
            f"{type(module).__name__} passes key {tuple(key.shape)} and value {tuple(value.shape)}, and transformers' "
            f"pages hold {room[0]} heads of {room[1]}, for both: latent attention has no continuous batching; call "
            "generate(), with headwise.hf.make_cache if you like"
        )


class _Keys:
    """All keys and values of a batch's requests in one layer, including the new ones.

    If a request has earlier tokens, transformers' `cache.update` writes the new tokens and gathers all tokens of all
    requests, in each layer of each step. For layers without a window, this class reads the pages directly, as flash
    attention does, and gathers nothing.
    """

    def __init__(self, cache: Any, layer: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        kept = cache.layer_to_allocator[layer]
        self.window = getattr(kept, "sliding_window", None)
        self.ends = kwargs["cu_seq_lens_k"][kept.layer_type].to(torch.int64)
        self.read = kwargs["read_index"][kept.index]
        self.page = int(kept.tokens_per_page)
        self.in_pages = bool(kept.supports_block_table and self.read.numel() and self.page % PAGE == 0)
        if self.in_pages:
            write, pages = kwargs["write_index"][kept.index], kept.get_cache_for_block_table(layer)
            for old, new in zip(pages, (key, value), strict=True):
                old.view(-1, *old.shape[2:]).index_copy_(0, write, new[0].transpose(0, 1))
            self.key, self.value = (x.transpose(1, 2) for x in pages)
        else:
            self.key, self.value = PagedAttentionCache.update(cache, key, value, layer, kwargs)

    def of_rows(self, requests: Tensor) -> tuple[Tensor | Paged, Tensor | Paged, Mask]:
        """Return key, value and mask of several requests; each is a row with a single query that attends all keys."""
        start, stop = self.ends[requests], self.ends[requests + 1]
        if self.in_pages:
            return *self._paged(start, stop), lengths(stop - start)
        key, value = (x.expand(len(requests), -1, -1, -1) for x in (self.key, self.value))
        return key, value, lengths(stop, start)

    def of_one(self, request: int) -> tuple[Tensor | Paged, Tensor | Paged, Mask]:
        """Return key, value and mask of one request, whose queries are its last tokens."""
        start, stop = (int(x) for x in self.ends[request : request + 2])
        mask = causal() if self.window is None else window(self.window)
        if self.in_pages:
            return *self._paged(self.ends[request, None], self.ends[request + 1, None]), mask
        return self.key[:, :, start:stop], self.value[:, :, start:stop], mask

    def _paged(self, start: Tensor, stop: Tensor) -> tuple[Paged, Paged]:
        """Return pages of requests; `read` contains the place in the pages of each token, one request after another."""
        longest = int((stop - start).max())
        firsts = start[:, None] + torch.arange(0, longest, self.page, device="cpu")
        table = self.read[firsts.minimum(stop[:, None] - 1)] // self.page  # after a row's end, any page is valid
        return Paged(self.key, table, longest), Paged(self.value, table, longest)
