"""The mask object that takes the place of a (B, 1, T, S) tensor in a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as theirs

from ...ops.masks.constructors import bias
from ...ops.masks.mask import Mask
from ...ops.tracing import without_numbers
from ..distributed.split_batch import whole_batch
from ..models.architectures import FLOAT_MASKS
from ..models.own_attention import is_switched
from ..models.support import require_consulted
from .lazy_tensors import Lazy
from .mask_closures import Frame, MaskFunction, dense_mask, read_mask, read_padding
from .mask_functions import function_mask


class StructuralMask(Lazy):
    """A headwise mask that transformers carries from the place where masks are made to attention.

    A model can use it as the float tensor (B, 1, T, S) that "eager" attention gets: 0 where a query may attend, else
    the lowest number. That tensor is made only if the model itself computes with it. Attention reads `mask`.
    """

    mask: Mask

    def __new__(
        cls, mask: Mask, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> StructuralMask:
        """Make a mask of rules for a batch and lengths; shape is (B, 1, T, S)."""
        make = partial(_additive, mask, shape, dtype, torch.device(device))
        carrier: StructuralMask = cls._of(make, shape, dtype, device)
        carrier.mask = mask
        return carrier

    def __getitem__(self, index: Any) -> Tensor:
        """Index as any tensor; a slice of the rows makes only those (for models whose last layers run one query)."""
        rest = (*index[:2], *index[3:]) if isinstance(index, tuple) and len(index) == 4 else None
        if self._source.tensor is None and rest == (slice(None),) * 3 and isinstance(index[2], slice):
            rows = slice(*index[2].indices(self.shape[2]))
            return _additive(self.mask, self.shape, self.dtype, self.device, rows)
        return super().__getitem__(index)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Convert as any tensor: a new device gives a structural mask, and torch.bool gives `Hidden`."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype == torch.bool and not self.exposed:
            return Hidden(self.mask if device is None else self.mask.to(device), self.shape, device or self.device)
        if device in (None, self.device) or dtype not in (None, self.dtype) or self.exposed:
            return super().to(*args, **kwargs)
        return StructuralMask(self.mask.to(device), self.shape, self.dtype, device)

    def __lt__(self, other: Any) -> Tensor:
        """Compare as any tensor; a comparison with 0 or a negative number returns the hidden positions."""
        if self.exposed or not isinstance(other, (int, float)) or not torch.finfo(self.dtype).min < other <= 0:
            return super().__lt__(other)
        return self.to(torch.bool)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StructuralMask({self.mask}, shape={tuple(self.shape)})"


class Hidden(Lazy):
    """The positions that a structural mask hides, as a bool tensor (B, 1, T, S) for models: True = hidden."""

    mask: Mask

    def __new__(cls, mask: Mask, shape: Sequence[int], device: torch.device | str) -> Hidden:
        """Make the bool tensor for a mask and the shape of its structural mask."""
        carrier: Hidden = cls._of(partial(_hidden, mask, shape, torch.device(device)), shape, torch.bool, device)
        carrier.mask = mask
        return carrier

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation leaves out the function
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return a mask of rules and a bias if masked_fill writes the lowest number into a bias at these positions."""
        if function is torch.ops.aten.masked_fill.Scalar and isinstance(args[1], Hidden) and not args[1].exposed:
            x, hidden, value = args
            if x.ndim == 4 and x.is_floating_point() and value <= torch.finfo(x.dtype).min:
                shape = torch.broadcast_shapes(x.shape, hidden.shape)
                return StructuralMask(hidden.mask & bias(x), shape, x.dtype, x.device)
        return super().__torch_dispatch__(function, types, args, kwargs)


def _hidden(mask: Mask, shape: Sequence[int], device: torch.device) -> Tensor:
    allowed = mask.allowed(*shape[2:], device=device)
    hidden = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device) if allowed is None else ~allowed
    return hidden.expand(*shape)


def _additive(
    mask: Mask, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rows: slice | None = None
) -> Tensor:
    """Return the tensor (B, 1|H, T, S) that eager adds: 0 or a bias, and the lowest number; or only `rows` of T."""
    B, H, T, S = shape
    added, allowed = (of(T, S, rows=rows, device=device) for of in (mask.added, mask.allowed))
    full = torch.zeros((), dtype=dtype, device=device) if added is None else added.to(dtype)
    if allowed is not None:
        full = torch.where(allowed, full, torch.finfo(dtype).min)
    return full.expand(B, H, len(range(T)[rows or slice(None)]), S).contiguous()


def headwise_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction = theirs.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> StructuralMask | Tensor | None:
    """Make the mask for transformers, which calls this function of its AttentionMaskInterface by keywords.

    Usually returns a `StructuralMask`. None would leave open whether attention is causal and on which side it is
    aligned. Some cases need a plain tensor. The single query of a decode step with a static cache, which may be
    compiled, gets the float tensor (B, 1, 1, S) of "eager". While torch.compile or torch.export traces, or if tensors
    are fake, the result is that of "sdpa" (a bool tensor, or None where allowed), or that of "eager" for a model that
    computes with its mask.
    """
    config, device = options.get("config"), options.get("device", "cpu")
    traced = without_numbers() or torch.jit.is_tracing()
    step = isinstance(q_offset, Tensor) and q_length == 1
    if traced or step:
        is_float = not traced or getattr(config, "model_type", "") in FLOAT_MASKS or is_switched(config)
        if step or is_float:  # in a single step, most keys of a static cache are not filled yet
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
    if batch is not None:  # the tokens are split over processes, and the mask is that of all tokens
        q_length = kv_length = batch.tokens
        q_offset = kv_offset = 0
        attention_mask = batch.padding
    # int() also copies: the offset of a static cache is its live counter, which advances before the mask is read.
    frame = Frame(batch_size, q_length, int(kv_length), int(q_offset), int(kv_offset), device)
    mask = read_mask(mask_function, frame)
    if mask is None:
        mask = function_mask(mask_function, frame, use_vmap=use_vmap)
    if mask is None:
        mask = dense_mask(mask_function, frame, attention_mask, use_vmap=use_vmap)
    elif attention_mask is not None:
        mask = mask & read_padding(attention_mask, frame)
    return StructuralMask(mask, (batch_size, 1, q_length, frame.S), options.get("dtype", torch.float32), device)
