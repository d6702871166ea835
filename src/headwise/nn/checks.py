"""Checks of the modules' arguments, and the text of every error they raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..plan.shape import AttentionShape, check_size
from ..shapes import describe
from .latent_form import check_form

MemoryDim = int | tuple[int, int] | None


def check_sizes(
    memory: MemoryDim, d_model: int, num_heads: int, **sizes: Any
) -> tuple[AttentionShape, tuple[int, int]]:
    """A module's shape with its defaults filled in, and the widths of what keys and values come from.

    Raises TypeError for what is no int and ValueError for sizes that do not fit.
    """
    shape = AttentionShape.of(d_model, num_heads, **sizes)
    pair = memory if isinstance(memory, tuple) else (memory, memory)
    if len(pair) != 2 or (None in pair and memory is not None):
        raise ValueError(f"memory_dim is one width, or a pair (of the keys, of the values); got {memory}")
    for width in pair:
        check_size("memory_dim", width, optional=True)
    key_width, value_width = (d_model if width is None else width for width in pair)
    return shape, (key_width, value_width)


def check_input(x: Tensor, d_model: int) -> None:
    """The input of a module: (B, T, M)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a tensor (B, T, d_model); got {type(x).__name__}")
    if x.ndim != 3:
        raise ValueError(
            f"x is (B, T, d_model), batch first; got {describe(x)}; a single sequence becomes one by x[None]"
        )
    if x.shape[2] != d_model:
        raise ValueError(f"x is (B, T, d_model) with d_model = {d_model}; got {describe(x)}")


def check_memory(
    x: Tensor, memory: Tensor | Sequence[Tensor] | None, widths: tuple[int, int], required: bool
) -> tuple[Tensor, Tensor]:
    """What keys and values are projected from: `memory`, a pair of them, or `x` itself where no memory is required."""
    if memory is None:
        if required:
            raise ValueError(
                f"this module was built with memory_dim, so it attends to a memory (B, S, {widths[0]}) and never to x; "
                "call it as mha(x, memory)"
            )
        return x, x
    pair = (memory, memory) if isinstance(memory, Tensor) else tuple(memory)
    if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        raise TypeError("memory is one tensor (B, S, width), or a pair of them: (for the keys, for the values)")
    for part, name, width in zip(pair, ("keys", "values"), widths, strict=True):
        if part.ndim != 3 or part.shape[2] != width:
            raise ValueError(
                f"the memory of the {name} is (B, S, {width}); got {describe(part)}; memory_dim sets its width"
            )
        if part.shape[0] != x.shape[0]:
            raise ValueError(f"x and memory share the batch size: x B = {x.shape[0]}, memory B = {part.shape[0]}")
    if pair[0].shape[1] != pair[1].shape[1]:
        raise ValueError(
            f"keys and values come from memories of one length: got S = {pair[0].shape[1]} and {pair[1].shape[1]}"
        )
    return pair[0], pair[1]


def check_latent_call(x: Tensor, cache: Any, lengths: object, form: str) -> None:
    """What `LatentAttention` is called with; where it is refused, the cache has not changed."""
    check_form(form)
    if cache is None:
        if lengths is not None:
            raise ValueError(
                "lengths say what of x a cache is to take; without a cache, padding is hidden by "
                "mask=headwise.causal() & headwise.lengths(...)"
            )
        return
    missing = [name for name in ("lengths", "append", "attend") if not hasattr(cache, name)]
    if missing:
        raise TypeError(
            f"a cache for latent attention has lengths, append() and attend(); {type(cache).__name__} has no "
            f"{', '.join(missing)}"
        )
    if not getattr(cache, "causal", True):
        raise ValueError("latent attention attends to its own past, so its cache is causal; got one with causal=False")
    if len(cache.lengths) != x.shape[0]:
        raise ValueError(
            f"x and the cache share the batch size: x B = {x.shape[0]}, the cache has {len(cache.lengths)} rows"
        )
