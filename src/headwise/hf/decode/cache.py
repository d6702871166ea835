"""transformers caches that store keys and values in headwise caches; attention reads pages and int8 directly."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from typing_extensions import override

from ...nn.hooks.unwrap import unwrap
from ...ops.storage.packed import BITS
from ..errors import ModelError
from ..models.architectures import CACHE
from ..models.support import NAME, caches_memory, require_interface, title
from .cache_layers import FullLayer, SlidingLayer
from .hybrid_layers import HYBRID, STATES, hybrid_layer, state_bytes

KINDS = ("static", "paged")
DUMMY = getattr(cache_utils, "DummyLayer", DynamicLayer)  # not in 5.20
KEPT = (DynamicLayer, DynamicSlidingWindowLayer, DUMMY, *STATES, *HYBRID)
LENGTHS = ("max_position_embeddings", "max_target_positions", "max_seq_len")  # config names of the longest text


class HeadwiseCache(Cache):
    """The transformers Cache that `make_cache` returns; headwise stores its layers.

    Attributes:
        nbytes: bytes of all keys, values and scales; 0 before the first token. Pages count when a row holds them.
        state_nbytes: bytes of the states of recurrent layers and convolutions, which transformers keeps.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and scales."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, FullLayer))

    @property
    def state_nbytes(self) -> int:
        """Bytes of the states of recurrent layers and convolutions; 0 for most models."""
        return sum(map(state_bytes, self.layers))


class HeadwiseEncoderDecoderCache(EncoderDecoderCache):
    """A cache for encoder-decoder models: headwise stores the decoder's tokens, transformers the encoder's output."""

    @property
    def nbytes(self) -> int:
        """Bytes of the decoder's own keys, values and scales, without those of the encoder's output."""
        return int(self.self_attention_cache.nbytes)

    @override
    def check_dynamic_cache(self, method: str) -> None:
        """Accept every method: both parts support crop and row selection."""


def make_cache(
    model: nn.Module,
    kind: Literal["static", "paged"] = "static",
    *,
    max_length: int | None = None,
    bits: Literal[8, 4, 3] | None = None,
) -> HeadwiseCache | HeadwiseEncoderDecoderCache:
    """Make a `transformers.Cache` of headwise, for `model.generate(..., cache=cache)` or any forward pass.

    Before transformers 5.24, the argument is called `past_key_values`.

    The model's config determines which layers keep all tokens and which keep a sliding window. A layer with a window
    never stores more than its window, for texts of any length. In a hybrid model, the layers with attention are
    stored by headwise, and the states of recurrent layers and convolutions by transformers, in the same cache. Memory
    is reserved at the first token, for the batch, heads and sizes of the tokens. One cache serves one text or batch
    of texts; `cache.reset()` prepares it for another. It is for inference: codes have no gradient for keys and values,
    and a static cache cannot be differentiated over more than one update.

    Args:
        model: any transformers model that generates with a `DynamicCache`, or a wrapper of one, such as PEFT's.
        kind: `"static"` reserves `max_length` tokens for each row. `"paged"` uses pages of 128 tokens, which rows
            share while their tokens are equal, so that beam search copies at most one page instead of all tokens.
        max_length: tokens of a row, including the prompt; by default the most that the config allows.
        bits: None for keys and values in the model's dtype; 8, 4 or 3 for codes of so many bits with a scale for each
            token and head. 4 and 3 take head dims that are multiples of 8.

    Returns:
        A Cache with `nbytes`. Keys and values of a `"static"` cache in the model's dtype are plain tensors, for any
        attention implementation; only `attn_implementation="headwise"` reads pages, windows and codes.

    Raises:
        ModelError: the model has layers of another kind (sparse indices, compressed keys) or a cache class of its own,
            or the cache needs headwise's attention and the model does not run it.
        TypeError: model is not a PreTrainedModel.
        ValueError: an unknown kind or number of bits, or no max_length where the config names none.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, vocab_size=11)
        >>> model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="headwise")
        >>> cache = make_cache(model, "paged", bits=8)
        >>> out = model.generate(torch.tensor([[3, 4, 5]]), cache=cache, max_new_tokens=7, min_new_tokens=7)
        >>> out.shape, cache.get_seq_length(), cache.nbytes    # the last token was not needed again
        (torch.Size([1, 10]), 9, 20480)
    """
    model = unwrap(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"make_cache takes a transformers PreTrainedModel; got {type(model).__name__}")
    if kind not in KINDS:
        raise ValueError(f'kind is "static" or "paged"; got {kind!r}')
    dtypes: dict[int | None, torch.dtype | None] = {None: None, **{number: dtype for dtype, number in BITS.items()}}
    if isinstance(bits, bool) or bits not in dtypes:
        raise ValueError(f"bits is 8, 4 or 3, or None for the dtype of the keys that the model makes; got {bits!r}")
    dtype = dtypes[bits]
    theirs = DynamicCache(config=model.config).layers
    _require_kept(model, theirs)
    length = _max_length(model, max_length)
    layers = [_layer(layer, kind, length, dtype) for layer in theirs]
    if kind != "static" or dtype is not None or any(isinstance(layer, SlidingLayer) for layer in layers):
        _require_headwise(model, kind, bits)
    cache = HeadwiseCache(layers=layers)
    if not (model.config.is_encoder_decoder or caches_memory(model)):
        return cache
    return HeadwiseEncoderDecoderCache(cache, DynamicCache())


def _layer(theirs: Any, kind: str, max_length: int, dtype: torch.dtype | None) -> Any:
    """Return the headwise layer for one of transformers; one without keys and values of its own stays as it is."""
    if isinstance(theirs, HYBRID):
        return hybrid_layer(theirs, kind, max_length, dtype)
    if isinstance(theirs, DynamicSlidingWindowLayer):
        return SlidingLayer(theirs.sliding_window, max_length, dtype)
    return FullLayer(kind, max_length, dtype) if isinstance(theirs, DynamicLayer) else theirs


def _require_kept(model: PreTrainedModel, layers: list[Any]) -> None:
    own = _own_class(model)
    if own is not None:
        raise ModelError(
            f"{title(model)}: it takes a cache of its own class, {own}, which keeps more than headwise's caches do; "
            "call generate without a cache, and it makes one"
        )
    if layers and not any(isinstance(layer, DynamicLayer) for layer in layers):
        raise ModelError(
            f"{title(model)}: layer 0 keeps a {type(layers[0]).__name__}, and no layer has keys and values for "
            "headwise to keep; use transformers.DynamicCache(config=model.config)"
        )
    # The exact class is compared, because subclasses store more than keys and values.
    other = [(at, type(layer).__name__) for at, layer in enumerate(layers) if type(layer) not in KEPT]
    if other:
        at, name = other[0]
        raise ModelError(
            f"{title(model)}: layer {at} keeps a {name}, and headwise's caches keep keys and values of full and of "
            "sliding-window attention, beside the states of recurrent layers; use "
            "transformers.DynamicCache(config=model.config)"
        )


def _own_class(model: PreTrainedModel) -> str | None:
    """Return the name of the cache class that the model's own file defines and its forward declares, or None."""
    taken = inspect.signature(type(model.get_decoder()).forward).parameters.get(CACHE)
    declared = () if taken is None else get_args(taken.annotation)
    own = [one for one in declared if isinstance(one, type) and issubclass(one, Cache)]
    return next((one.__name__ for one in own if one.__module__ != Cache.__module__), None)


def _max_length(model: PreTrainedModel, max_length: int | None) -> int:
    """Return the caller's maximum length, or by default the longest text that the config allows."""
    if max_length is None:
        config = model.config.get_text_config(decoder=True)
        max_length = next((getattr(config, name) for name in LENGTHS if getattr(config, name, None)), None)
    if max_length is None:
        raise ValueError(f"{title(model)}: its config names no longest text; give make_cache a max_length")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise ValueError(f"max_length is a number of tokens, at least 1; got {max_length!r}")
    return max_length


def _require_headwise(model: PreTrainedModel, kind: str, bits: int | None) -> None:
    config = model.config.get_text_config(decoder=True)
    what = f"codes of {bits} bits" if bits is not None else "pages" if kind == "paged" else "a sliding window's pages"
    decoder = model.get_decoder()  # a text model on the interface may be a part of a model that is not
    require_interface(type(decoder if isinstance(decoder, PreTrainedModel) else model), config.model_type)
    if config._attn_implementation != NAME:
        raise ModelError(
            f"{title(model)}: a cache that holds {what} is read by headwise's attention alone, and the model runs "
            f'{config._attn_implementation!r}; call model.set_attn_implementation("{NAME}") first'
        )
