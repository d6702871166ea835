"""Search for the output projection of each attention module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...shapes.arguments import check_functions
from ..latent import LatentAttention
from .probe import AttentionCall, probe
from .projections import has_hooks
from .thread_hooks import in_this_thread
from .unwrap import require_whole, unwrap


def output_projections(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, str]:
    """Find the output projection of each attention module: the first module called with its concatenated heads.

    The search runs the model and compares numbers: the output projection has a 2-D weight, and its input equals the
    concatenated heads (B, T, H * V) of the attention call. If that module is inside one that is linear in the same
    input, such as an adapter, the outer module is returned. An attention module whose heads first pass through a norm
    or a gate has no entry.

    Args:
        model: Any model that `headwise.nn.probe` accepts; wrappers are removed.
        run: Called once with the model, to run it on any input.

    Returns:
        A dict from the qualified name of each attention module to that of its output projection.

    Raises:
        TypeError, RuntimeError: as `headwise.nn.probe`; or `run` is not callable.
        ValueError: the heads are split over several ranks.

    Example:
        >>> import headwise
        >>> layers = nn.Sequential(headwise.MultiHeadAttention(12, 3), headwise.MultiHeadAttention(12, 2))
        >>> output_projections(layers, lambda model: model(torch.randn(1, 5, 12)))
        {'0': '0.o_proj', '1': '1.o_proj'}
    """
    check_functions(run=run)
    model = unwrap(model)
    projections: dict[str, str] = {}

    def each(call: AttentionCall) -> Tensor:
        out = call.attend()
        search.next(call.module, out)
        return out

    with torch.no_grad(), probe(model, each), ProjectionSearch(model, projections.__setitem__) as search:
        run(model)
    return projections


class ProjectionSearch:
    """The search of `output_projections` as a context manager, for a pass of the model that has another purpose.

    Args:
        model: The model, without wrappers.
        found: Called as ``found(attention, projection)`` with two names, once for each attention module, right before
            the projection runs.
        by_place: Whether an input in the heads' memory is the heads. Otherwise it is compared, which makes the host
            wait for a GPU, and heads with a NaN, which equals nothing, have no projection.

    Raises:
        ValueError: the heads are split over several ranks.
    """

    def __init__(self, model: nn.Module, found: Callable[[str, str], None], *, by_place: bool = False) -> None:
        require_whole(model, "what reads its heads")
        self.model, self.found, self.by_place, self._undo = model, found, by_place, ExitStack()
        self._running: list[tuple[str, Tensor]] = []  # name and concatenated heads of the attention that ran last
        self._done: set[str] = set()

    def __enter__(self) -> ProjectionSearch:
        # A hook on kv_b_proj would prevent the absorbed form of latent attention, and kv_b_proj does not read heads.
        others = {id(part.kv_b_proj) for part in self.model.modules() if isinstance(part, LatentAttention)}
        for name, part in self.model.named_modules():
            if id(part) not in others and any(map(_has_matrix, part.modules())):
                hook = in_this_thread(partial(self._before, name, _has_matrix(part) and not has_hooks(part)))
                self._undo.callback(part.register_forward_pre_hook(hook, prepend=True).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def next(self, attention: str, out: Tensor) -> None:
        """Search for the projection of this attention module, whose heads are `out` (B, H, T, V)."""
        self._running[:] = [] if attention in self._done else [(attention, out.transpose(1, 2).flatten(2))]

    def _before(self, name: str, plain: bool, part: nn.Module, args: tuple[Any, ...]) -> None:
        for attention, side_by_side in list(self._running):
            x = args[0] if args else None
            if not isinstance(x, Tensor) or x.numel() != side_by_side.numel() or attention in self._done:
                continue
            heads = x.reshape(side_by_side.shape)
            same = (self.by_place and heads.is_set_to(side_by_side)) or torch.equal(heads, side_by_side)
            if same and (plain or (len(args) == 1 and _is_additive(part, x, self._running))):
                self._done.add(attention)
                self.found(attention, name)


def _has_matrix(part: nn.Module) -> bool:
    """Return whether a module has a 2-D weight itself; for quantised layers, `weight` is a method."""
    weight: Any = getattr(part, "weight", None)
    weight = weight() if callable(weight) and not any(True for _ in part.children()) else weight
    return getattr(weight, "ndim", 0) == 2


def _is_additive(part: nn.Module, x: Tensor, running: list[tuple[str, Tensor]]) -> bool:
    """Return whether the module computes a matrix product plus a constant, as adapters do in eval mode."""
    before, running[:] = list(running), []  # calls made by this check must not be recorded
    try:
        once, twice, nothing = part(x), part(2 * x), part(torch.zeros_like(x))
    except (RuntimeError, TypeError, ValueError):
        return False
    finally:
        running[:] = before
    if not all(isinstance(y, Tensor) and y.shape[:-1] == x.shape[:-1] for y in (once, twice, nothing)):
        return False
    largest = float(twice.detach().abs().max())
    tolerance = 64 * torch.finfo(once.dtype).eps * largest  # the rounding error of a sum of products
    return bool((twice - once - (once - nothing)).abs().max() <= tolerance)
