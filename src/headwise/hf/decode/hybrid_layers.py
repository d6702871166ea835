"""Cache layers of hybrid models: transformers keeps the states, headwise the keys and values of the same layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from typing_extensions import override

from .cache_layers import FullLayer, SlidingLayer

STATES: tuple[type, ...] = (LinearAttentionLayer,)
"""Layers with a state and without attention; they stay as transformers makes them."""

HYBRID: tuple[type, ...] = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""Layers with both."""


class _StatesBeside(LinearAttentionLayer):
    """The states of a layer that also has attention; the class beside it keeps the keys and values."""

    keeper: type[FullLayer] = FullLayer
    is_compileable = False

    @override
    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        if keys_and_values:
            self.keeper.lazy_initialization(self, *keys_and_values)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        self.keeper.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        self.keeper.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        self.keeper.crop(self, tokens_to_remove)

    def get_max_length(self) -> int:
        return int(self.keeper.get_max_length(self))


class HybridFullLayer(_StatesBeside, FullLayer):
    """A layer with a state and full attention."""

    def __init__(self, kind: str, max_length: int, dtype: torch.dtype | None, number_of_states: int) -> None:
        FullLayer.__init__(self, kind, max_length, dtype)
        LinearAttentionLayer.__init__(self, number_of_states)


class HybridSlidingLayer(_StatesBeside, SlidingLayer):
    """A layer with a state and a sliding window of attention."""

    keeper = SlidingLayer

    def __init__(self, sliding_window: int, max_length: int, dtype: torch.dtype | None, number_of_states: int) -> None:
        SlidingLayer.__init__(self, sliding_window, max_length, dtype)
        LinearAttentionLayer.__init__(self, number_of_states)

    def activate_past_recording(self) -> None:
        """Let `crop` remove tokens over several updates from now on."""
        SlidingLayer.activate_past_recording(self)


def hybrid_layer(theirs: Any, kind: str, max_length: int, dtype: torch.dtype | None) -> Any:
    """Return the layer that keeps what `theirs` keeps, with its keys and values in a headwise cache."""
    states = theirs.number_of_states
    if isinstance(theirs, DynamicSlidingWindowLayer):
        return HybridSlidingLayer(theirs.sliding_window, max_length, dtype, states)
    return HybridFullLayer(kind, max_length, dtype, states)


def state_bytes(layer: Any) -> int:
    """Return the bytes of the states of a layer; 0 for a layer without any, and before the first token."""
    if not isinstance(layer, LinearAttentionLayer):
        return 0
    states = [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return sum(state.nbytes for state in states if state is not None)
