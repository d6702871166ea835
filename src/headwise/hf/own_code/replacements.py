"""Replacements of model methods on headwise; `architectures.OWN_ATTENTION` contains their names.

The originals usually make T x S tensors of positions; the replacements make none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer
from typing_extensions import override

from ...ops.masks.constructors import relative
from ...ops.masks.indexing import RowIndex, index, rank4
from ...ops.masks.mask import Mask
from ...ops.masks.rule import Rule
from ...ops.tracing import without_numbers
from ...shapes import describe
from ..errors import ModelError
from .lazy_scores import Added
from .tracer import attentions_asked_for


@dataclass(frozen=True, eq=False)
class ByContent(Rule):
    """A rule that adds by_query[b, h, i, column] + by_key[b, h, j, column]; the column belongs to the distance i - j.

    The tables (B, H, T, P) and (B, H, S, P) contain the scores of each query and each key for each distance, computed
    from their content, so memory is linear in the lengths. `columns_*`: integer (T + S - 1,), for the distances 1 - S
    to T - 1.
    """

    by_query: Tensor | None
    by_key: Tensor | None
    columns_query: Tensor
    columns_key: Tensor

    restricts: ClassVar[bool] = False
    biases: ClassVar[bool] = True

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        i, j = rank4(i), rank4(j)
        terms = []
        for table, own, columns in ((self.by_query, i, self.columns_query), (self.by_key, j, self.columns_key)):
            if table is not None:
                b, h = (torch.arange(n, device=i.device) for n in table.shape[:2])
                terms.append(table[b.view(-1, 1, 1, 1), h.view(-1, 1, 1), own, columns[i - j + S - 1]])
        return sum(terms[1:], terms[0])

    @override
    def grid(self, T: int, S: int, rows: RowIndex, cols: RowIndex, device: torch.device | None) -> Tensor:
        i, j = index(rows, T, device), index(cols, S, device)
        apart = i[:, None] - j[None, :] + S - 1
        by_query = self._added(self.by_query, rows, self.columns_query, apart)
        by_key = self._added(self.by_key, cols, self.columns_key, apart.T)
        if by_query is None or by_key is None:
            return by_query if by_key is None else by_key.mT
        return by_query + by_key.mT

    @staticmethod
    def _added(table: Tensor | None, own: RowIndex, columns: Tensor, apart: Tensor) -> Any:
        """Return the bias (B, H, own, others) of one table."""
        if table is None:
            return None
        table = table if own is None else table[:, :, own]  # a slice makes no copy
        return table.gather(-1, columns[apart].expand(*table.shape[:2], -1, -1))

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        for table, n in ((self.by_query, T), (self.by_key, S)):
            if table is not None and table.shape[:3] != (B, H, n):
                raise ValueError(f"a bias by content has scores of (B, H, n) = {(B, H, n)}; got {describe(table)}")

    @property
    @override
    def learns(self) -> bool:
        return any(table is not None and table.requires_grad for table in (self.by_query, self.by_key))

    @override
    def computed_in(self, dtype: torch.dtype) -> ByContent:
        tables = [None if table is None else table.to(dtype) for table in (self.by_query, self.by_key)]
        return replace(self, by_query=tables[0], by_key=tables[1])


def no_positions(
    encoder: Any, hidden_states: Tensor, query_states: Tensor | None = None, relative_pos: Tensor | None = None
) -> Tensor | None:
    """Return the given distances without making the distances (1, T, T) between tokens."""
    return relative_pos


def padding_of_keys(encoder: Any, attention_mask: Tensor) -> Tensor:
    """Return a padding mask (B, T) as a mask of keys (B, 1, 1, T), instead of a (B, 1, T, T) tensor.

    transformers also hides all keys from padded queries and then averages over all keys; their output has no meaning.
    """
    return attention_mask.unsqueeze(1) if attention_mask.ndim != 2 else attention_mask[:, None, None]


def content_and_position(
    module: Any,
    query_layer: Tensor,
    key_layer: Tensor,
    relative_pos: Tensor | None,
    rel_embeddings: Tensor,
    scale_factor: int,
) -> Tensor:
    """Return the bias (B * H, T, T) of query content and key content by distance; both layers are (B * H, T, D).

    Sections 3.1 and 3.2 of He et al. 2021, arXiv 2006.03654.
    """
    H, (N, T, D), S = module.num_attention_heads, query_layer.shape, key_layer.shape[1]
    if relative_pos is not None or T != S:
        raise ValueError(
            f"{type(module).__name__} runs on headwise with one query a key and distances counted by tokens; got "
            f"{T} queries, {S} keys" + ("" if relative_pos is None else " and distances of its own")
        )
    span, file = module.pos_ebd_size, sys.modules[type(module).disentangled_attention_bias.__module__]
    buckets = torch.arange(1 - S, T, device=query_layer.device)
    if module.position_buckets > 0 and module.max_relative_positions > 0:
        most = module.max_relative_positions
        buckets = file.make_log_bucket_position(buckets, module.position_buckets, most).long()
    columns = (buckets + span).clamp(0, 2 * span - 1), (-buckets.flip(0) + span).clamp(0, 2 * span - 1)
    first, last = 0, 2 * span - 1
    if not without_numbers():  # keep only distances that occur; traced code cannot read the numbers
        first, last = (int(ends) for ends in torch.cat(columns).aminmax())
    embedded = rel_embeddings[first : last + 1]
    names = ("key_proj", "query_proj") if module.share_att_key else ("pos_key_proj", "pos_query_proj")
    scale = (D * scale_factor) ** -0.5
    tables: list[Tensor | None] = []
    for kind, name, x in (("c2p", names[0], query_layer), ("p2c", names[1], key_layer)):
        if kind in module.pos_att_type:
            of_position = getattr(module, name)(embedded).view(-1, H, D).permute(1, 2, 0)  # (H, D, P)
            tables.append(x.unflatten(0, (-1, H)) * scale @ of_position)
        else:
            tables.append(None)
    by_query, by_key = tables
    rule = ByContent(by_query, by_key, *(column - first for column in columns))
    return Added(Mask((rule,)), (N, T, S), query_layer.dtype, query_layer.device)


def bias_by_distance(encoder: Any, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Tensor:
    """Return the learned bias (B, H, T, T) for each head and distance, stored as a table."""
    B, T = x.shape[:2]
    apart = torch.arange(1 - T, T, device=x.device)
    table = encoder.relative_attention_bias(encoder.relative_position_bucket(apart, num_buckets=num_buckets)).T
    return Added(relative(table), (B, table.shape[0], T, T), table.dtype, x.device)


def bias_once(theirs: Callable[..., Any], module: Any, *args: Any, alibi: Tensor | None, **kwargs: Any) -> Any:
    """Run the module with an alibi bias of 0, because the mask contains the bias; "sdpa" also adds it only once."""
    return theirs(module, *args, alibi=None if alibi is None else torch.zeros_like(alibi), **kwargs)


def tells_attention(theirs: Callable[..., Any], block: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block that does not pass to its attention whether weights are to be returned."""
    with attentions_asked_for(bool(kwargs.get("output_attentions"))):
        return theirs(block, *args, **kwargs)


def without_static_cache(theirs: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise ModelError for a window that the code counts from the end of a static cache, which is not filled yet."""
    cache = kwargs.get("layer_past")
    layer = cache.layers[module.layer_id] if isinstance(cache, Cache) and cache.layers else None
    if module.attention_type == "local" and isinstance(layer, StaticLayer):
        raise ModelError(
            f"{type(module).__name__}: layer {module.layer_id} has a window, which its code counts from the end of a "
            "static cache, past the text; use transformers.DynamicCache() or headwise.hf.make_cache(model)"
        )
    return theirs(module, *args, **kwargs)
