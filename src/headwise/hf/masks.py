"""The mask that goes through a transformers model: an object in the place of a (B, 1, T, S) tensor."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import masking_utils as theirs

from ..ops.masks import Mask
from .architectures import OUTSIDE, TENSOR_MASKS
from .closures import Frame, MaskFunction, dense_mask, read_mask
from .errors import ModelError
from .interface import outside_text


class StructuralMask(BlockMask):
    """A headwise mask that transformers carries from where masks are made to where attention is computed.

    transformers lets exactly two kinds of thing through, tensors and flex attention's BlockMask, and asks them for
    `.shape`, `.ndim`, `.contiguous()`. This is a BlockMask by name alone: it holds no blocks, and whoever computes with
    it is told so. Only attention code outside transformers' attention interface does.
    """

    def __init__(self, mask: Mask, shape: tuple[int, int, int, int]) -> None:
        # The parent's own __init__ wants tensors of block indices, which nobody here reads.
        self.mask = mask
        self._shape = shape
        self.seq_lengths = shape[2:]

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, 1, T, S), as a dense mask would have it."""
        return self._shape

    @property
    def ndim(self) -> int:
        """4."""
        return len(self._shape)

    def contiguous(self) -> StructuralMask:
        """Itself: there is nothing to lay out."""
        return self

    def to(self, device: torch.device | str) -> StructuralMask:
        """The same mask on another device."""
        return StructuralMask(self.mask.to(device), self._shape)

    def __repr__(self) -> str:
        return f"StructuralMask({self.mask}, shape={self._shape})"

    __str__ = __repr__

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("indexing")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a headwise mask is no tensor and has no {name!r}; .mask.dense(T, S) makes one")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        cls._refuse(f"torch's {getattr(function, '__name__', function)}")

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise ModelError(
            f"the model itself computes with its attention mask ({what}), so it is not on transformers' attention "
            'interface, or not wholly, and attn_implementation="headwise" would be wrong; load it with "eager"'
        )


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
    which side). Where it must be a tensor it is one: while torch.compile or torch.export traces, what transformers' own
    "sdpa" gets (a bool tensor, or None where that may be); for the single query of a step with a static cache, which
    compiled code takes, (B, 1, 1, S); for a model that computes with its mask (B, 1, T, S).
    """
    config, device = options.get("config"), options.get("device", "cpu")
    model_type = getattr(config, "model_type", "")
    if model_type in OUTSIDE:  # they take the name without complaint and compute something else with it
        raise ModelError(outside_text(type(config).__name__.removesuffix("Config"), model_type, OUTSIDE[model_type]))
    if q_length is None:  # transformers before 5.4 passed the positions instead
        position = options.pop("cache_position")
        q_length, q_offset = position.shape[0], position[0]
    is_whole = model_type in TENSOR_MASKS or (isinstance(q_offset, Tensor) and q_length == 1)
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or is_whole:
        if is_whole:  # in a single step, most of a static cache's keys are not there yet
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return theirs.sdpa_mask(
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
    # int() also takes a copy: the offset of a static cache is its live counter, which moves on before the mask is read.
    frame = Frame(batch_size, q_length, int(kv_length), int(q_offset), int(kv_offset), device)
    mask = None if use_vmap else read_mask(mask_function, frame, attention_mask)
    if mask is None:
        mask = dense_mask(mask_function, frame, attention_mask, use_vmap=use_vmap)
    return StructuralMask(mask, (batch_size, 1, q_length, frame.S))
