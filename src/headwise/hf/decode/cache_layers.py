"""The layers of headwise's caches for transformers: full attention, and a sliding window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from ...cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from ...cache.base import CAUSAL
from ...ops.compiled_calls import outside_graphs
from ...ops.storage.layout import in_one_piece
from ...ops.storage.paged import PAGE
from ..attention.lazy_tensors import KeptTokens, LazyKeys, NewToken, to_model


class FullLayer(CacheLayerMixin):
    """A layer that keeps every token, up to `max_length`; its cache is made at the first update."""

    is_sliding = False
    is_croppable = True

    def __init__(self, kind: str, max_length: int, dtype: torch.dtype | None) -> None:
        self.kind, self.max_length, self.stored_dtype = kind, max_length, dtype
        self._cache: Any = None
        self._token: NewToken | None = None  # the last token of a decode step, until something reads the cache
        self.input_dtype = torch.float32  # dtype of the last tokens
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cache or f'{self.kind}, max_length={self.max_length}'})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cache": self.cache, "_token": None}

    @property
    def cache(self) -> Any:
        """The cache with all tokens, also one that waited for its query; None before the first update."""
        if self._token is not None:
            self._token.append()
            self._token = None
        return self._cache

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
        how = self.input_dtype, expired, self._places()
        return to_model(key, *how), to_model(value, *how)

    def _places(self) -> KeptTokens | None:
        """Return which tokens are left, if some of the cache's were dropped by score."""
        return KeptTokens(self.cache.column_positions(), self.get_seq_length()) if any(self.cache.dropped) else None

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
        dtype = self.input_dtype if self.stored_dtype is None else self.stored_dtype
        sizes = (*key_states.shape[:2], key_states.shape[3], value_states.shape[3])
        self._cache = self._new_cache(sizes, dtype, key_states.device)
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
        if self._takes_step(key, value):
            return self._with_token(key, value)
        self.cache.append(key, value)
        self.input_dtype = key.dtype
        return self._for_model()

    def _takes_step(self, key: Tensor, value: Tensor) -> bool:
        """Return True if the cache can take this token together with the attention of its query.

        Only attention reads codes and pages, so the model cannot read them before it. Plain tensors it can.
        """
        return (
            key.shape[2] == 1
            and (self.kind != "static" or self.stored_dtype is not None)
            and type(key) is type(value) is Tensor
            and self._fits(key, value)
            and self.cache.takes_steps(CAUSAL)
        )

    def _with_token(self, key: Tensor, value: Tensor, expired: int = 0) -> tuple[LazyKeys, LazyKeys]:
        self._token, self.input_dtype = NewToken(self.cache, key, value), key.dtype
        how = max(self._cache.columns) + 1, expired
        return LazyKeys.of_token(self._token, True, *how), LazyKeys.of_token(self._token, False, *how)

    def _check_room(self, count: int) -> None:
        length = self._held() + count
        if length > self.max_length:
            raise ValueError(
                f"this cache has max_length = {self.max_length:,}, and the text comes to {length:,} tokens: "
                f"make_cache(model, max_length={length}), or more"
            )

    def _held(self) -> int:
        """Return the number of tokens that the longest row has, without dropped ones."""
        return 0 if self.cache is None else max(self.cache.columns)

    def _fits(self, key: Tensor, value: Tensor) -> bool:
        cache = self.cache
        sizes = (cache.batch, cache.num_kv_heads, cache.head_dim, cache.value_dim)
        dtype = key.dtype if self.stored_dtype is None else self.stored_dtype
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

    @override
    def _held(self) -> int:
        return self.get_seq_length()

    @override
    def _places(self) -> None:
        return None  # a window drops its own tokens, and `expired` says so

    @property
    def _expired(self) -> int:
        """The number of columns in the cache that no later token attends; only whole pages are dropped."""
        return max(int(self.cache.columns[0]) - self.sliding_window + 1, 0)

    @override
    def _append(self, key: Tensor, value: Tensor) -> tuple[Any, Any]:
        chunk = self.cache.chunk
        if key.shape[2] <= chunk:
            if self._takes_step(key, value):
                self.cache.settle()  # as `append` does: the columns after it are those of the mask
                return self._with_token(key, value, self._expired)
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
