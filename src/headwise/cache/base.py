"""What all caches have in common: how tokens come in, and what queries may see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ..ops.attention import attention
from ..ops.masks.compose import Mask, as_mask
from ..ops.masks.make import causal, keep, lengths
from ..shapes.kinds import check_tensor
from .checks import check_append

Side = Literal["right", "left"]
CacheT = TypeVar("CacheT", bound="KVCache")


class KVCache(ABC):
    """Keys and values of the tokens that an attention layer has seen, row by row of a batch.

    State is explicit: a cache is handed in and handed back; each method that changes it returns it. Where a call is
    refused, nothing has changed.

    Attributes:
        batch: rows B.
        num_kv_heads: K.
        head_dim: D of a key.
        value_dim: V of a value.
        dtype: of what is kept; torch.int8 has a float32 scale a token and head beside it.
        shared: the values are the first V columns of the keys (MLA's latent); `append` takes no values then.
        causal: queries see no later key. False for cross-attention.
        lengths: tokens that each row has seen.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None,
        dtype: torch.dtype,
        *,
        shared: bool = False,
        causal: bool = True,
    ) -> None:
        self.batch, self.num_kv_heads, self.head_dim = batch, num_kv_heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.dtype, self.shared, self.causal = dtype, shared, causal
        self.lengths = [0] * batch
        # The last append: its tokens T, how many of them are real in each row, and on which side the others lie.
        self._last: tuple[int, list[int], Side] = (0, [0] * batch, "right")
        self._given = torch.float32  # the dtype in which tokens came, and that int8 is given back in

    # -- what a cache must do ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of keys, values and scales: what is reserved, whether used or not."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where keys and values lie."""

    @abstractmethod
    def _make_room(self, counts: list[int]) -> None:
        """Raises where the rows cannot take so many more tokens; changes nothing then."""

    @abstractmethod
    def _write(self, key: Tensor, value: Tensor | None, counts: list[int], starts: list[int]) -> None:
        """Keeps, of each row, `counts` tokens from `starts` on."""

    @abstractmethod
    def _held(self, length: int) -> tuple[Any, Any]:
        """Keys and values up to the longest row's end, in the order of the columns that `_columns` counts."""

    @abstractmethod
    def truncate(self: CacheT, lengths: int | Sequence[int]) -> CacheT:
        """Roll back: row b keeps its first lengths[b] tokens (one number for all rows)."""

    @abstractmethod
    def reorder(self: CacheT, rows: Tensor | Sequence[int]) -> CacheT:
        """Row r becomes what row rows[r] was: beam search; also more or fewer rows than before."""

    @abstractmethod
    def fork(self: CacheT) -> CacheT:
        """Another cache with the same tokens, that goes its own way from here."""

    def _columns(self) -> list[int]:
        """Columns of keys that each row has to attend."""
        return self.lengths

    def _extra(self, offset: Tensor | None) -> Mask | None:
        """A rule of the cache's own; `offset` (B,): the column of the first query, None where all end together."""
        return causal(offset=offset) if self.causal else None

    # -- what follows --------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of every row; ValueError where rows differ."""
        if len(set(self.lengths)) != 1:
            raise ValueError(f"rows of this cache have different lengths, {self.lengths}: ask `lengths`")
        return self.lengths[0]

    def append(
        self: CacheT,
        key: Tensor,
        value: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        side: Side = "right",
    ) -> CacheT:
        """Adds T tokens to each row; what is there is never copied.

        Args:
            key: (B, K, T, D) in the cache's dtype (any float dtype for int8).
            value: (B, K, T, V); None where values are shared with the keys.
            lengths: (B,) how many of the T tokens are real in each row; all by default.
            side: where the padding lies: `"right"` behind the real tokens, or `"left"` before them.

        Raises:
            TypeError: a dtype that is not the cache's, or no tensors; `lengths` that are no whole numbers.
            ValueError: sizes or a device that do not fit, or no room; the cache is unchanged.
        """
        T, counts = check_append(self, key, value, lengths, side)
        self._make_room(counts)
        starts = [T - count if side == "left" else 0 for count in counts]
        self._write(key, value, counts, starts)
        self.lengths = [have + count for have, count in zip(self.lengths, counts, strict=True)]
        self._last, self._given = (T, counts, side), key.dtype
        return self

    def attend(self, query: Tensor, *, mask: Mask | Tensor | None = None, **options: Any) -> Any:
        """Attention of queries to all that is held: `headwise.attention(query, cache)`.

        The T queries are those of the last tokens of each row: query i of a row with n tokens sees its keys
        ``j <= i + n - T``. Where the last `append` had T tokens too, some of them padding, queries of padding give 0.

        Args:
            query: (B, H, T, D).
            mask: what more is asked, such as `window(1024)`; places are counted among the keys that are held.
            options: `scale`, `softcap`, `sinks`, `gate`, `return_lse`, ... of `headwise.attention`.
        """
        if not isinstance(query, Tensor) or query.is_nested:
            check_tensor("query", query, "a tensor (B, H, T, D)")
        T = query.shape[2] if query.ndim == 4 else 0
        columns = self._columns()
        S = max(columns, default=0)
        if query.ndim != 4 or (query.shape[0], query.shape[3]) != (self.batch, self.head_dim):
            raise ValueError(
                f"a cache of {self.batch} rows is attended by query (B, H, T, D) = ({self.batch}, H, T, {self.head_dim}"
                f"); got {tuple(query.shape)}; reorder() gives it other rows"
            )
        if S == 0:
            raise ValueError("an empty cache has nothing to attend; append keys and values first")
        key, value = self._held(S)
        return attention(query, key, value, mask=self._mask(T, S, columns, as_mask(mask), query.device), **options)

    def _mask(self, T: int, S: int, columns: list[int], mask: Mask | None, device: torch.device) -> Mask | None:
        last, counts, side = self._last
        counts = counts if last == T else [T] * self.batch
        if all(n == S for n in columns) and (all(n == T for n in counts) or side == "left"):
            found, padded = self._extra(None), any(n != T for n in counts)
        else:
            first = [n - (T if side == "left" else count) for n, count in zip(columns, counts, strict=True)]
            offset = torch.tensor(first, device="cpu")
            found, padded = self._extra(offset), any(n != T for n in counts)
            ends = lengths(torch.tensor(columns, device="cpu"))
            found = ends if found is None else ends & found
            mask = None if mask is None else mask.placed(offset)
        if padded:
            i = torch.arange(T, device="cpu")
            n = torch.tensor(counts, device="cpu")[:, None]
            real = i >= T - n if side == "left" else i < n
            found = keep(real[:, None, :, None]) if found is None else found & keep(real[:, None, :, None])
        both = found if mask is None else mask if found is None else found & mask
        return both if both is None or device.type == "cpu" else both.to(device)

    def _shorten(self, lengths: list[int]) -> None:
        """What all caches know of their rows, for `truncate`: where tokens went, the last append is no more."""
        if lengths != self.lengths:
            self.lengths, self._last = lengths, (0, [0] * self.batch, "right")

    def _take_rows(self, rows: list[int]) -> None:
        """What all caches know of a row, for `reorder`."""
        last, counts, side = self._last
        self.lengths, self._last = [self.lengths[r] for r in rows], (last, [counts[r] for r in rows], side)
        self.batch = len(rows)

    def _twin(self: CacheT) -> CacheT:
        """Another cache with lengths of its own and all else in common, for `fork`."""
        new = copy(self)
        new.lengths = list(self.lengths)
        return new

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(batch={self.batch}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"value_dim={self.value_dim}, dtype={self.dtype}, lengths={self.lengths})"
        )
