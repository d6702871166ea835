"""The mask that goes through a transformers model: an object in the place of a (B, 1, T, S) tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as theirs

from ..ops.masks.compose import Mask
from .architectures import FLOAT_MASKS
from .closures import Frame, MaskFunction, dense_mask, read_mask, read_padding
from .functions import function_mask
from .interface import require_consulted
from .lazy import Lazy
from .whole import whole_batch


class StructuralMask(Lazy):
    """A headwise mask that transformers carries from where masks are made to where attention is computed.

    To a model it is the float tensor (B, 1, T, S) that "eager" attention gets: 0 where a query may attend, the lowest
    number where not. That tensor is made only where the model itself computes with it. Attention reads `mask`.
    """

    mask: Mask

    def __new__(
        cls,
        mask: Mask,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> StructuralMask:
        """A mask of rules, for a batch and lengths: shape (B, 1, T, S)."""
        make = partial(_additive, mask, shape, dtype, torch.device(device))
        carrier: StructuralMask = cls._of(make, shape, dtype, device)
        carrier.mask = mask
        return carrier

    def __getitem__(self, index: Any) -> Tensor:
        """As of any tensor; some of the rows are made alone, a copy (models whose last layers run one query ask so)."""
        rest = (*index[:2], *index[3:]) if isinstance(index, tuple) and len(index) == 4 else None
        if self._source.tensor is None and rest == (slice(None),) * 3 and isinstance(index[2], slice):
            return self.rows(index[2])
        return super().__getitem__(index)

    def rows(self, rows: slice) -> Tensor:
        """Some rows of the tensor."""
        return _additive(self.mask, self.shape, self.dtype, self.device, slice(*rows.indices(self.shape[2])))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As of any tensor; on another device it is still a structural mask."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device in (None, self.device) or dtype not in (None, self.dtype) or self.exposed:
            return super().to(*args, **kwargs)
        return StructuralMask(self.mask.to(device), self.shape, self.dtype, device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StructuralMask({self.mask}, shape={tuple(self.shape)})"


def _additive(
    mask: Mask, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rows: slice | None = None
) -> Tensor:
    """(B, 1, T, S) of 0 and the lowest number, as transformers' eager attention adds it; or some rows T of it."""
    B, _, T, S = shape
    allowed = mask.allowed(T, S, rows=rows, device=device)
    if allowed is None:
        return torch.zeros(B, 1, len(range(T)[rows or slice(None)]), S, dtype=dtype, device=device)
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.where(allowed, zero, torch.finfo(dtype).min).expand(B, -1, -1, -1).contiguous()


def headwise_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction = theirs.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> StructuralMask | Tensor | None:
    """The mask function registered with transformers' AttentionMaskInterface; transformers calls it by keywords.

    Gives a `StructuralMask`, always: with None the attention function would have to guess (causal or not, aligned on
    which side). Where it must be a plain tensor it is one: for the single query of a step with a static cache, which
    compiled code takes, the float tensor (B, 1, 1, S) that "eager" gets; while torch.compile or torch.export traces,
    what "sdpa" gets (a bool tensor, or None where that may be), or "eager" for a model that computes with its mask.
    """
    config, device = options.get("config"), options.get("device", "cpu")
    if q_length is None:  # transformers before 5.4 passed the positions instead
        position = options.pop("cache_position")
        q_length, q_offset = position.shape[0], position[0]
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    step = isinstance(q_offset, Tensor) and q_length == 1
    if traced or step:
        is_float = not traced or getattr(config, "model_type", "") in FLOAT_MASKS
        if step or is_float:  # in a single step, most of a static cache's keys are not there yet
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return (theirs.eager_mask if is_float else theirs.sdpa_mask)(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            **options,
        )
    require_consulted(config)
    batch = whole_batch()
    if batch is not None:  # its tokens are split over processes: the mask is that of all
        q_length = kv_length = batch.tokens
        q_offset = kv_offset = 0
        attention_mask = batch.padding
    # int() also takes a copy: the offset of a static cache is its live counter, which moves on before the mask is read.
    frame = Frame(batch_size, q_length, int(kv_length), int(q_offset), int(kv_offset), device)
    mask = read_mask(mask_function, frame)
    if mask is None:
        mask = function_mask(mask_function, frame, use_vmap=use_vmap)
    if mask is None:
        mask = dense_mask(mask_function, frame, attention_mask, use_vmap=use_vmap)
    elif attention_mask is not None:
        mask = mask & read_padding(attention_mask, frame)
    return StructuralMask(mask, (batch_size, 1, q_length, frame.S), options.get("dtype", torch.float32), device)
