"""Run attention code that does not use transformers' interface.

While such a module runs, a product of queries and keys returns `LazyScores`, a tensor with only a size. The next
operations on it (scale, mask, bias, softmax, dropout) are recorded (`recorded_ops.py`), and the product with the values
runs headwise's attention with all of them. Any other operation on scores computes them, as the model's code would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...ops.statistics.weights import weights
from ...ops.storage.layout import in_one_piece
from ..attention.lazy_tensors import Lazy, from_model
from ..errors import ModelError
from ..returned import attentions_are_collected
from .lazy_scores import LazyScores
from .recorded_ops import IN_PLACE, STEPS, Tracer

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
"""Attribute names for the number of heads in modules."""
_asked_for: ContextVar[bool] = ContextVar("headwise_attentions_asked_for", default=False)


@contextmanager
def attentions_asked_for(on: bool) -> Iterator[None]:
    """Set whether weights are requested, for modules that get no argument for it."""
    before = _asked_for.set(on)
    try:
        yield
    finally:
        _asked_for.reset(before)


class OwnAttention(TorchFunctionMode):
    """A torch function mode that runs an attention module with every product of queries and keys as `LazyScores`."""

    def __init__(self, module: nn.Module, wanted: bool = False) -> None:
        counts = [getattr(module, name, None) for name in HEADS]
        heads = next((n for n in counts if isinstance(n, int)), None)
        self.running = Tracer(module, heads, wanted)
        super().__init__()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's own code; returned attentions are the weights, computed if the caller requested them."""
        with self:
            result = function(*args, **kwargs)
        module = self.running.module
        if not self.running.calls:
            raise ModelError(
                f"{type(module).__name__} ran without a product of queries and keys that headwise can read, so "
                "its attention did not run on headwise; switch back by model.set_attn_implementation('eager')"
            )
        return tree_map(lambda x: self._returned(x) if isinstance(x, LazyScores) else x, result)

    def _returned(self, scores: LazyScores) -> Tensor:
        chain = scores.chain
        if not chain.weighted:
            return scores.replay()
        made = self.running.weights.get(chain)
        if made is not None:  # out was computed from these weights if they carry a gradient
            same = made.dtype == scores.dtype and made.shape == scores.shape
            return made if same else made.detach().to(scores.dtype).reshape(scores.shape)
        key = in_one_piece(from_model(chain.key), chain.query.dtype)
        make = partial(_weights, chain.query, key, chain.options(), scores.shape, scores.dtype)
        # No output was computed from these weights, so they have no gradient.
        return make().detach() if self.running.wanted else Lazy._of(make, scores.shape, scores.dtype, scores.device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle every torch operation inside of the module."""
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        step = STEPS.get(func)
        known = step is not None and (not kwargs or _takes(step, frozenset(kwargs)))
        result = step(self.running, *args, **kwargs) if step and known else NotImplemented
        if result is NotImplemented:
            args, kwargs = _made(args), _made(kwargs)
            return func(*args, **kwargs)
        if isinstance(result, LazyScores) and func in IN_PLACE and isinstance(args[0], LazyScores):
            return args[0].become(result)
        return result


@cache
def _takes(step: Callable[..., Any], keywords: frozenset[str]) -> bool:
    parameters = inspect.signature(step).parameters
    return keywords <= parameters.keys() or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def asks_for_weights(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call of a module, or an outer caller, requests attentions."""
    if attentions_are_collected() or _asked_for.get():
        return True
    names = list(inspect.signature(forward).parameters)[1:]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("output_attentions"))


def _made(x: Any) -> Any:
    """Return the arguments with lazy scores replaced by computed tensors."""
    if not _holds_scores(x):
        return x
    return tree_map(lambda leaf: leaf.replay() if isinstance(leaf, LazyScores) else leaf, x)


def _holds_scores(x: Any) -> bool:
    # This runs for every operation of a module. Arguments of torch are tuples, lists and dicts, and this recursion
    # takes a tenth of the time of torch's tree_leaves.
    if isinstance(x, (tuple, list)):
        return any(map(_holds_scores, x))
    return any(map(_holds_scores, x.values())) if isinstance(x, dict) else isinstance(x, LazyScores)


def _weights(query: Tensor, key: Tensor, options: dict[str, Any], shape: Any, dtype: torch.dtype) -> Tensor:
    return weights(query, key, **options).to(dtype).reshape(shape)


_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point),
}
"""Operations on the metadata of scores, which do not compute the scores."""
