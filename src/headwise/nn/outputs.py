"""Which module reads the heads of each attention module: its output projection."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..shapes.kinds import check_functions
from .probe import AttentionCall, probe
from .unwrap import require_whole, unwrap


def output_projections(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, str]:
    """The output projection of each attention module: the first that is called with its heads side by side.

    Found while the model runs, from the numbers alone: a module with a weight of two dimensions whose input is
    (B, T, H * V), the heads of the call as they left attention. Where something stands between (a norm, a gate), there
    is no such module, and no entry.

    Args:
        model: What `headwise.nn.probe` takes; of a wrapper, what it wraps.
        run: Called once with the model, to run it on any input.

    Returns:
        The qualified name of an attention module -> that of its output projection.

    Raises:
        TypeError, RuntimeError: as `headwise.nn.probe`; or `run` is no function.
        ValueError: the heads are dealt out to several processes, and so is what reads them.

    Example:
        >>> import headwise
        >>> layers = nn.Sequential(headwise.MultiHeadAttention(12, 3), headwise.MultiHeadAttention(12, 2))
        >>> output_projections(layers, lambda model: model(torch.randn(1, 5, 12)))
        {'0': '0.o_proj', '1': '1.o_proj'}
    """
    check_functions(run=run)
    model = unwrap(model)
    require_whole(model, "what reads its heads")
    running: list[tuple[str, Tensor]] = []  # the attention module that ran last, its heads side by side
    projections: dict[str, str] = {}

    def each(call: AttentionCall) -> Tensor:
        out = call.attend()
        running[:] = [(call.module, out.transpose(1, 2).flatten(2))]
        return out

    def before(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        for attention, side_by_side in running:
            x = args[0] if args else None
            if not isinstance(x, Tensor) or x.numel() != side_by_side.numel():
                continue
            if torch.equal(x.reshape(side_by_side.shape), side_by_side):
                projections.setdefault(attention, name)

    with ExitStack() as undo, torch.no_grad(), probe(model, each):
        for name, part in model.named_modules():
            if getattr(getattr(part, "weight", None), "ndim", 0) == 2:
                undo.callback(part.register_forward_pre_hook(partial(before, name)).remove)
        run(model)
    return projections
