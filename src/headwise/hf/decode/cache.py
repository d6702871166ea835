"""transformers caches that store keys and values in headwise caches; attention reads pages and int8 directly."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from typing_extensions import override

from ...cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from ...nn.hooks.unwrap import unwrap
from ...ops.compiled_calls import outside_graphs
from ...ops.storage.layout import in_one_piece
from ...ops.storage.paged import PAGE
from ..attention.lazy_tensors import to_model
from ..errors import ModelError
from ..models.support import NAME, caches_memory, require_interface, title

KINDS = ("static", "paged")
KEPT = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))  # not in 5.20
LENGTHS = ("max_position_embeddings", "max_target_positions", "max_seq_len")  # config names of the longest text


class FullLayer(CacheLayerMixin):
    """A layer that keeps every token, up to `max_length`; its cache is made at the first update."""

    is_sliding = False
    is_croppable = True

    def __init__(self, kind: str, max_length: int, dtype: torch.dtype | None) -> None:
        self.kind, self.max_length, self.dtype = kind, max_length, dtype
        self.cache: Any = None
        self.input_dtype = torch.float32  # dtype of the last tokens
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cache or f'{self.kind}, max_length={self.max_length}'})"

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return 0 if self.cache is None else int(self.cache.nbytes)

    @property
    def keys(self) -> Tensor | None:
        """Keys (B, K, S, D) for models and generation code that read a cache themselves; None while it is empty."""
        return self._for_model()[0]

    @keys.setter
    def keys(self, new: Tensor | None) -> None:
        self._refuse(new)

    @property
    def values(self) -> Tensor | None:
        """Values (B, K, S, V); None while the cache is empty."""
        return self._for_model()[1]

    @values.setter
    def values(self, new: Tensor | None) -> None:
        self._refuse(new)

    def _for_model(self, expired: int = 0) -> tuple[Any, Any]:
        if self.get_seq_length() == 0:
            return None, None
        key, value = self.cache.view()
        return to_model(key, self.input_dtype, expired), to_model(value, self.input_dtype, expired)

    def _refuse(self, new: Tensor | None) -> None:
        if new is not None:  # transformers sets None when a layer is made
            raise ValueError(
                "keys and values of a headwise cache come by update() and are changed by crop(), reorder_cache() and "
                "reset(), never replaced; use transformers.DynamicCache(config=model.config)"
            )

    # -- in and out ----------------------------------------------------------------------------------------------------

    @override
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the cache for key (B, K, T, D) and value (B, K, T, V) without adding tokens."""
        self.input_dtype = key_states.dtype
        dtype = self.input_dtype if self.dtype is None else self.dtype
        sizes = (*key_states.shape[:2], key_states.shape[3], value_states.shape[3])
        with torch.inference_mode(False):  # memory made in inference mode cannot be written to outside of it
            self.cache = self._new_cache(sizes, dtype, key_states.device)
        self.is_initialized = True

    def _new_cache(self, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        B, *per_row = sizes
        if self.kind == "static":
            return StaticCache(B, *per_row, capacity=self.max_length, dtype=dtype, device=device)
        return PagedCache(PagePool(B * self._pages, *per_row, dtype=dtype, device=device), B)

    @property
    def _pages(self) -> int:
        return -(-self.max_length // PAGE)

    @override
    @outside_graphs
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Add key (B, K, T, D) and value (B, K, T, V), and return those of all tokens in attention's form."""
        # Under autocast, a rotation may leave keys in float32 while values have a half dtype, which attention takes.
        key_states = key_states.to(value_states.dtype)
        self._check_room(key_states.shape[2])
        if self.cache is None or (self.get_seq_length() == 0 and not self._fits(key_states, value_states)):
            self.lazy_initialization(key_states, value_states)
        return self._append(key_states, value_states)

    def _append(self, key: Tensor, value: Tensor) -> tuple[Any, Any]:
        self.cache.append(key, value)
        self.input_dtype = key.dtype
        return self._for_model()

    def _check_room(self, count: int) -> None:
        length = self.get_seq_length() + count
        if length > self.max_length:
            raise ValueError(
                f"this cache has max_length = {self.max_length:,}, and the text comes to {length:,} tokens: "
                f"make_cache(model, max_length={length}), or more"
            )

    def _fits(self, key: Tensor, value: Tensor) -> bool:
        cache = self.cache
        sizes = (cache.batch, cache.num_kv_heads, cache.head_dim, cache.value_dim)
        dtype = key.dtype if self.dtype is None else self.dtype
        return sizes == (*key.shape[:2], key.shape[3], value.shape[3]) and cache.dtype == dtype

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @override
    def get_seq_length(self) -> int:
        """Return the number of tokens of a row so far, including padding."""
        return 0 if self.cache is None else int(self.cache.length)

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (S, position of the first key) after `query_length` more tokens."""
        return self.get_seq_length() + query_length, 0

    @override
    def get_max_length(self) -> int:
        """Return the number of tokens for which a row has room."""
        return self.max_length

    # -- changes -------------------------------------------------------------------------------------------------------

    @override
    def reset(self) -> None:
        """Empty the cache; the memory is kept for the next text of the same sizes."""
        if self.cache is not None:
            self.cache.release() if isinstance(self.cache, PagedCache) else self.cache.truncate(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their number is negative, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove; got {tokens_to_remove}")
        if tokens_to_remove < 0 and self.cache is not None:
            self.cache.truncate(max(self.get_seq_length() + tokens_to_remove, 0))

    @override
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row r by the earlier row beam_idx[r]."""
        if self.cache is None:
            return
        if isinstance(self.cache, PagedCache) and not isinstance(self.cache, RollingCache):
            lacking = len(beam_idx) * self._pages - self.cache.pool.num_pages
            if lacking > 0:
                self.cache.pool.grow(lacking)
        self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies of a row follow each other."""
        if self.cache is not None:
            self.reorder_cache(torch.arange(self.cache.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the chosen rows, given by their numbers or a bool tensor."""
        if self.cache is not None:
            self.reorder_cache(torch.arange(self.cache.batch, device="cpu")[indices.to("cpu")])


class SlidingLayer(FullLayer):
    """A layer whose queries attend `sliding_window` keys, including their own; expired pages are reused."""

    is_sliding = True

    def __init__(self, sliding_window: int, max_length: int, dtype: torch.dtype | None) -> None:
        super().__init__("rolling", max_length, dtype)
        self.sliding_window = sliding_window
        self.record_past = False

    @override
    def _new_cache(self, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        cache = RollingCache(*sizes, window=self.sliding_window, dtype=dtype, device=device)
        return cache.remember(PAGE) if self.record_past else cache

    def activate_past_recording(self) -> None:
        """Let `crop` remove a page of tokens (128) over several updates from now on, and not only the last update."""
        self.record_past = True
        if self.cache is not None:
            self.cache.remember(PAGE)

    @property
    def _expired(self) -> int:
        """The number of columns in the cache that no later token attends; only whole pages are dropped."""
        return max(int(self.cache.columns[0]) - self.sliding_window + 1, 0)

    @override
    def _append(self, key: Tensor, value: Tensor) -> tuple[Any, Any]:
        chunk = self.cache.chunk
        if key.shape[2] <= chunk:
            self.cache.append(key, value)
            self.input_dtype = key.dtype
            return self._for_model(max(self._expired - key.shape[2], 0))
        # These are more tokens than the cache takes in one append. Attention reads the old window and the new tokens.
        columns, expired = self.cache.settle().columns[0], self._expired
        both = [key, value]
        if columns:
            window = (in_one_piece(x, key.dtype)[:, :, expired:] for x in self.cache.view())
            both = [torch.cat([old, new], 2) for old, new in zip(window, both, strict=True)]
        for piece in zip(key.split(chunk, 2), value.split(chunk, 2), strict=True):
            self.cache.append(*piece)
        return both[0], both[1]

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.cache is None:
            return query_length, 0
        # Drop pages now: the mask is made before the update, and its columns must still be valid after it.
        columns, dropped = self.cache.settle().columns[0], self.cache.dropped[0]
        expired = self._expired if query_length > self.cache.chunk else 0
        return columns - expired + query_length, dropped + expired

    @override
    def get_max_length(self) -> int:
        """Return the window, as transformers does."""
        return self.sliding_window


class HeadwiseCache(Cache):
    """The transformers Cache that `make_cache` returns; headwise stores its layers.

    Attributes:
        nbytes: bytes of all keys, values and scales; 0 before the first token. Pages count when a row holds them.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and scales."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, FullLayer))


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
    dtype: torch.dtype | None = None,
) -> HeadwiseCache | HeadwiseEncoderDecoderCache:
    """Make a `transformers.Cache` of headwise, for `model.generate(..., cache=cache)` or any forward pass.

    Before transformers 5.24, the argument is called `past_key_values`.

    The model's config determines which layers keep all tokens and which keep a sliding window. A layer with a window
    never stores more than its window, for texts of any length. Memory is reserved at the first token, for the batch,
    heads and sizes of the tokens. One cache serves one text or batch of texts; `cache.reset()` prepares it for another.
    It is for inference: int8 has no gradient for keys and values, and a static cache cannot be differentiated over more
    than one update.

    Args:
        model: any transformers model that generates with a `DynamicCache`, or a wrapper of one, such as PEFT's.
        kind: `"static"` reserves `max_length` tokens for each row. `"paged"` uses pages of 128 tokens, which rows
            share while their tokens are equal, so that beam search copies at most one page instead of all tokens.
        max_length: tokens of a row, including the prompt; by default the most that the config allows.
        dtype: None for the model's own, or `torch.int8` with a scale for each token and head.

    Returns:
        A Cache with `nbytes`. Keys and values of a `"static"` cache in the model's dtype are plain tensors, for any
        attention implementation; only `attn_implementation="headwise"` reads pages, windows and int8.

    Raises:
        ModelError: the model has layers of another kind (recurrent states, sparse indices), or the cache needs
            headwise's attention and the model does not run it.
        TypeError: model is not a PreTrainedModel.
        ValueError: an unknown kind or dtype, or no max_length where the config names none.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, vocab_size=11)
        >>> model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="headwise")
        >>> cache = make_cache(model, "paged", dtype=torch.int8)
        >>> out = model.generate(torch.tensor([[3, 4, 5]]), cache=cache, max_new_tokens=7, min_new_tokens=7)
        >>> out.shape, cache.get_seq_length(), cache.nbytes    # the last token was not needed again
        (torch.Size([1, 10]), 9, 20480)
    """
    model = unwrap(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"make_cache takes a transformers PreTrainedModel; got {type(model).__name__}")
    if kind not in KINDS:
        raise ValueError(f'kind is "static" or "paged"; got {kind!r}')
    if dtype not in (None, torch.int8):
        raise ValueError(
            f"dtype is torch.int8, or None for that of the keys the model makes; got {dtype}; load the model in the "
            "dtype it is to run in"
        )
    theirs = DynamicCache(config=model.config).layers
    _require_kept(model, theirs)
    length = _max_length(model, max_length)
    layers = [_layer(layer, kind, length, dtype) for layer in theirs]
    if kind != "static" or dtype is not None or any(isinstance(layer, SlidingLayer) for layer in layers):
        _require_headwise(model, kind, dtype)
    cache = HeadwiseCache(layers=layers)
    if not (model.config.is_encoder_decoder or caches_memory(model)):
        return cache
    return HeadwiseEncoderDecoderCache(cache, DynamicCache())


def _layer(theirs: Any, kind: str, max_length: int, dtype: torch.dtype | None) -> Any:
    """Return the headwise layer for one of transformers; a DummyLayer (no attention, or another layer's keys) stays."""
    if isinstance(theirs, DynamicSlidingWindowLayer):
        return SlidingLayer(theirs.sliding_window, max_length, dtype)
    return FullLayer(kind, max_length, dtype) if isinstance(theirs, DynamicLayer) else theirs


def _require_kept(model: PreTrainedModel, layers: list[Any]) -> None:
    # The exact class is compared, because subclasses store more than keys and values.
    other = [(at, type(layer).__name__) for at, layer in enumerate(layers) if type(layer) not in KEPT]
    if other:
        at, name = other[0]
        raise ModelError(
            f"{title(model)}: layer {at} keeps a {name}, and headwise's caches keep keys and values of full and of "
            "sliding-window attention only; use transformers.DynamicCache(config=model.config)"
        )


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


def _require_headwise(model: PreTrainedModel, kind: str, dtype: torch.dtype | None) -> None:
    config = model.config.get_text_config(decoder=True)
    what = "int8" if dtype is not None else "pages" if kind == "paged" else "a sliding window's pages"
    decoder = model.get_decoder()  # a text model on the interface may be a part of a model that is not
    require_interface(type(decoder if isinstance(decoder, PreTrainedModel) else model), config.model_type)
    if config._attn_implementation != NAME:
        raise ModelError(
            f"{title(model)}: a cache that holds {what} is read by headwise's attention alone, and the model runs "
            f'{config._attn_implementation!r}; call model.set_attn_implementation("{NAME}") first'
        )
