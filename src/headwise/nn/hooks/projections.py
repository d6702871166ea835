"""Check that a projection computes only ``x @ weight.T + bias``.

Code that reads a weight instead of calling the module must check this first: adapters, hooks, subclasses and quantised
layers may compute something else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module stores the hooks that run before or after its call."""


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module itself has hooks that run before or after a call."""
    own = vars(module)
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


def is_intercepted(module: nn.Module) -> bool:
    """Return whether the module itself has hooks that run before or after a call, or a forward set on the instance."""
    return has_hooks(module) or "forward" in vars(module)


def is_unmodified(module: nn.Module) -> bool:
    """Return whether a module has no hooks, global ones included, and no forward set on the instance."""
    return not (is_intercepted(module) or _has_any_global_hook())


def is_linear(projection: nn.Module) -> bool:
    """Return whether the class computes ``x @ weight.T + bias``: `torch.nn.Linear`, also with a parametrized weight.

    >>> is_linear(nn.Linear(2, 3)), is_linear(nn.Bilinear(2, 3, 5))
    (True, False)
    """
    kind: Any = type(projection)
    itself = kind.forward is nn.Linear.forward and kind.__call__ is nn.Module.__call__
    return itself and "forward" not in vars(projection)


def plain_weight(projection: nn.Module, *, bias: bool = True) -> Tensor | None:
    """Return the weight (n, M) if the projection computes only ``x @ weight.T + bias``; else None.

    None for an adapter, a subclass with its own forward, a quantised layer, a module with hooks, and, unless `bias` is
    True, a module with a bias. Global hooks, such as those of profilers, are ignored.

    >>> projection = nn.Linear(2, 3)
    >>> plain_weight(projection) is projection.weight
    True
    >>> handle = projection.register_forward_hook(lambda module, args, out: 2 * out)
    >>> plain_weight(projection) is None
    True
    """
    if not is_linear(projection) or has_hooks(projection) or not (bias or projection.bias is None):
        return None
    weight: Any = projection.weight
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None


def description(projection: nn.Module) -> str:
    """Return the projection's class name for an error, with a note if it has hooks."""
    return type(projection).__name__ + (
        " with hooks" if isinstance(projection, nn.Module) and has_hooks(projection) else ""
    )


def weight_of(name: str, projection: nn.Module, use: str) -> Tensor:
    """Return `plain_weight`, or raise a TypeError that names the projection.

    Args:
        name: Name of the projection.
        projection: The module.
        use: The code that needs the weight, as the subject of the error's sentence: ``"head()"``.
    """
    weight = plain_weight(projection)
    if weight is None:
        raise TypeError(
            f"{use} reads the weight of {name}, which has to be a torch.nn.Linear without hooks; got "
            f"{description(projection)}, which may compute something else; merge adapters, remove hooks, and undo "
            "quantisation first"
        )
    return weight
