"""The base class of all caches: how tokens are appended, and which keys queries may attend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..ops.attention import attention
from ..ops.compiled_calls import methods_outside_graphs
from ..ops.masks.constructors import causal, lengths
from ..ops.masks.mask import EVERYTHING, Mask, as_mask
from ..ops.storage.layout import in_one_piece
from ..ops.storage.paged import Paged
from ..ops.storage.quantized import Quantized
from ..shapes.arguments import check_tensor
from .checks import check_append
from .compiled import append_in_graph, attend_in_graph, handle_of, in_graph
from .rows import Append, RowNumbers, Side, first_columns, real_queries
from .saved import Saved
from .steps import Steps

CacheT = TypeVar("CacheT", bound="KVCache")
CAUSAL = causal()  # one object, because a mask keeps what was found out about it
Stored: TypeAlias = Tensor | Quantized | Paged
"""Keys or values (B, K, S, n) in the form in which a cache stores them."""
IN_GRAPHS = ("append", "attend", "positions", "takes_steps")
"""Methods of caches that torch.compile traces: they put operators into the graph. Other methods run outside of it."""


class KVCache(Steps, RowNumbers, Saved, ABC):
    """Keys and values of the earlier tokens of an attention layer, for each row of a batch.

    Caches are updated in place; methods return self for chaining. A call that raises an error changes nothing.

    Other packages use only the public methods. `headwise.attention` calls `attend`. Modules read `lengths`, `causal`
    and `chunk`, and call `append` and then `attend`, or `step`; latent attention reads `keys`. Code that computes
    attention itself uses `view` and `columns`. A cache that stores its tokens elsewhere
    (`headwise.parallel.ShardedCache`) uses `check_query` and `rules`, and updates its rows with `set_lengths` and
    `set_rows`.

    Attributes:
        batch: rows B.
        num_kv_heads: K.
        head_dim: D of a key.
        value_dim: V of a value.
        dtype: of the stored numbers; torch.int8, int4 and int3 have a float32 scale for each token and head in
            addition.
        shared: the values are the first V columns of the keys (MLA's latent); `append` takes no values then.
        causal: queries attend no later key. False for cross-attention.
        lengths: the number of tokens that were appended to each row.
        chunk: the most tokens of one append; None for any number.
        handle: the tensor by which a graph of torch.compile finds the cache.
    """

    chunk: int | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        methods_outside_graphs(cls, IN_GRAPHS)

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
        self.handle = handle_of(self)
        self._lengths = [0] * batch
        self._last = Append(0, [0] * batch, "right")
        self._input_dtype = torch.float32  # dtype of the last tokens; `keys` of int8 are returned in it

    def __copy__(self: CacheT) -> CacheT:
        new = object.__new__(type(self))
        vars(new).update(vars(self), handle=handle_of(new))
        return new

    def __getstate__(self) -> dict[str, Any]:
        here_only = ("handle", "_kept_numbers")
        return {name: x for name, x in vars(self).items() if name not in here_only} | {"_last": tuple(self._last)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _last=Append(*state["_last"]), handle=handle_of(self))

    # -- abstract methods ----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of keys, values and scales, including reserved memory that is not used."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of keys and values."""

    @abstractmethod
    def view(self) -> tuple[Stored, Stored]:
        """Return keys and values up to the longest row's end, as `headwise.attention` takes them; nothing is copied.

        Row b attends its first ``columns[b]`` keys.
        """

    @abstractmethod
    def _make_room(self, counts: list[int]) -> None:
        """Raise an error, and change nothing, if the rows have no room for `counts` more tokens."""

    @abstractmethod
    def _write(self, key: Tensor, value: Tensor | None, counts: list[int], starts: list[int]) -> None:
        """Store `counts` tokens of each row, beginning with token `starts`."""

    @abstractmethod
    def truncate(self: CacheT, lengths: int | Sequence[int]) -> CacheT:
        """Roll back: row b keeps its first lengths[b] tokens (one number is valid for all rows).

        Raises TypeError for numbers that are not whole, ValueError for more tokens than a row has.
        """

    @abstractmethod
    def reorder(self: CacheT, rows: Tensor | Sequence[int]) -> CacheT:
        """Replace row r by the earlier row rows[r], as in beam search; the number of rows may change.

        Raises TypeError for numbers that are not whole, ValueError for a row that does not exist.
        """

    @abstractmethod
    def fork(self: CacheT) -> CacheT:
        """Return another cache with the same tokens; later changes of one cache do not affect the other."""

    def _rule(self, offset: Tensor | None) -> Mask:
        """Return the cache's rule; `offset` (B,) is the column of the first query, None if all rows end together."""
        return EVERYTHING if not self.causal else CAUSAL if offset is None else causal(offset=offset)

    # -- shared methods ------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:
        """Keys (B, K, S, D); row b has ``lengths[b]``. Pages and codes are copied. None if not all are stored."""
        return in_one_piece(self.view()[0], self._input_dtype)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens that were appended to each row."""
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def positions(self, T: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of T new tokens after the tokens of each row: (T,), or (B, T) if rows differ.

        In a graph of torch.compile, the result is always (B, T).
        """
        if in_graph(self):
            device = torch.device("cpu") if device is None else device
            return torch.ops.headwise.cache_positions(self.handle, self.batch, T, device)
        return self._positions(T, device)

    def _positions(self, T: int, device: torch.device | None) -> Tensor:
        new, same = torch.arange(T, device=device), len(set(self.lengths)) == 1
        return new + (self.lengths[0] if same else self._numbers_on("lengths", self.lengths, new.device)[:, None])

    @property
    def length(self) -> int:
        """The number of tokens of every row; raises ValueError if rows differ."""
        if len(set(self.lengths)) != 1:
            raise ValueError(f"rows of this cache have different lengths, {self.lengths}: use `lengths`")
        return self.lengths[0]

    def append(
        self: CacheT,
        key: Tensor,
        value: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        side: Side = "right",
    ) -> CacheT:
        """Add T tokens to each row; stored tokens are never copied.

        Args:
            key: (B, K, T, D) in the cache's dtype (any float dtype for int8).
            value: (B, K, T, V); None if values are shared with the keys.
            lengths: (B,) the number of real tokens among the T tokens of each row; all by default.
            side: the side of the padding: `"right"` after the real tokens, or `"left"` before them.

        Raises:
            TypeError: a dtype that is not the cache's, or not tensors; `lengths` that are not whole numbers.
            ValueError: sizes or a device that do not fit, no room, or a gradient that int8 would lose; the cache is
                unchanged.
        """
        if in_graph(self, key, value):
            append_in_graph(self, key, value, lengths, side)
            return self
        return self._append(key, value, lengths, side)

    def _append(self: CacheT, key: Tensor, value: Tensor | None, lengths: Any, side: Side) -> CacheT:
        T, counts = check_append(self, key, value, lengths, side)
        self._make_room(counts)
        starts = [T - count if side == "left" else 0 for count in counts]
        self._write(key, value, counts, starts)
        self.lengths = [have + count for have, count in zip(self.lengths, counts, strict=True)]
        self._last, self._input_dtype = Append(T, counts, side), key.dtype
        return self

    def attend(self, query: Tensor, *, mask: Mask | Tensor | None = None, **options: Any) -> Any:
        """Compute attention of queries to all keys in the cache: `headwise.attention(query, cache)`.

        The T queries are those of the last tokens of each row: query i of a row with n tokens attends its keys
        ``j <= i + n - T``. If the last `append` also had T tokens, some of them padding, queries of padding give 0.

        Args:
            query: (B, H, T, D).
            mask: a further rule, such as `window(1024)`; its positions are columns of the keys in the cache.
            options: `scale`, `softcap`, `sinks`, `gate`, `return_lse`, ... of `headwise.attention`.

        Returns:
            As `headwise.attention`: (B, H, T, V), with `return_lse` also (B, H, T).

        Raises:
            TypeError, ValueError: an empty cache, a query of other sizes, and what `headwise.attention` refuses.
        """
        if in_graph(self, query) and (result := attend_in_graph(self, query, mask, options)) is not None:
            return result
        return self._attend(query, mask, options)

    def _attend(self, query: Tensor, mask: Mask | Tensor | None, options: dict[str, Any]) -> Any:
        T, further = self.check_query(query), as_mask(mask)
        if T == 1 and (out := self._attend_newest(query, further, options)) is not None:
            return out
        key, value = self.view()
        return attention(query, key, value, mask=self._rules_at_columns(query, T, further), **options)

    def check_query(self, query: Tensor) -> int:
        """Return T of queries that fit the cache; raise TypeError or ValueError for other queries or an empty cache."""
        if not isinstance(query, Tensor) or query.is_nested:
            check_tensor("query", query, "a tensor (B, H, T, D)")
        if query.ndim != 4 or (query.shape[0], query.shape[3]) != (self.batch, self.head_dim):
            raise ValueError(
                f"this cache takes query (B, H, T, D) = ({self.batch}, H, T, {self.head_dim}"
                f"); got {tuple(query.shape)}; reorder() changes its rows"
            )
        if not (self._last.tokens or any(self.columns)):
            raise ValueError("the cache is empty; append keys and values first")
        return query.shape[2]

    def rules(self, T: int, columns: list[int], mask: Mask, device: torch.device) -> Mask:
        """Return the mask of T queries: the cache's rule and the caller's mask; queries of padding attend nothing."""
        counts, side = self._last.counts if self._last.tokens == T else [T] * self.batch, self._last.side
        first, offset, rules = first_columns(T, columns, counts, side), None, []
        if first is not None:
            offset = self._numbers_on("first columns", first, device)
            mask = mask.placed(offset)  # a causal query sees no key beyond its row
            rules = [] if self.causal else [lengths(self._numbers_on("columns", columns, device))]
        rules.append(self._rule(offset))
        if counts != [T] * len(counts):
            rules.append(real_queries(T, self._numbers_on("counts", counts, device), side))
        return reduce(and_, [*rules, mask if device.type == "cpu" else mask.to(device)])

    def set_lengths(self, lengths: list[int]) -> None:
        """Set the lengths of all rows, for `truncate`; if they change, the record of the last append is cleared."""
        if lengths != self.lengths:
            self._forget_after(lengths)
            self.lengths, self._last = lengths, Append(0, [0] * self.batch, "right")

    def set_rows(self, rows: list[int]) -> None:
        """Select and reorder the lengths of the rows, for `reorder`."""
        self._select_rows(rows)
        self.lengths = [self.lengths[r] for r in rows]
        self._last = self._last._replace(counts=[self._last.counts[r] for r in rows])
        self.batch = len(rows)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(batch={self.batch}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"value_dim={self.value_dim}, dtype={self.dtype}, lengths={self.lengths})"
        )


methods_outside_graphs(KVCache, IN_GRAPHS)
