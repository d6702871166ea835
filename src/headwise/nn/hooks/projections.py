"""Whether the weight of a projection is all that a call of it computes.

Code that reads a weight instead of calling the module asks here first: adapters, hooks, subclasses and quantised
layers compute something else than their weight says.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module keeps the hooks that run before or after its call."""


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks of its own run before or after a call of the module."""
    own = vars(module)
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


def is_unmodified(module: nn.Module) -> bool:
    """Whether nothing listens to the calls of a part, or answers in its place."""
    return not (has_hooks(module) or "forward" in vars(module) or _has_any_global_hook())


def is_linear(projection: nn.Module) -> bool:
    """Whether its class computes ``x @ weight.T + bias``: `torch.nn.Linear`, also with a parametrized weight.

    >>> is_linear(nn.Linear(2, 3)), is_linear(nn.Bilinear(2, 3, 5))
    (True, False)
    """
    kind: Any = type(projection)
    itself = kind.forward is nn.Linear.forward and kind.__call__ is nn.Module.__call__
    return itself and "forward" not in vars(projection)


def plain_weight(projection: nn.Module, *, bias: bool = True) -> Tensor | None:
    """The weight (n, M), where a call of the projection computes ``x @ weight.T + bias`` and nothing else; or None.

    None for an adapter, a subclass with a forward of its own, a quantised layer, and where hooks are registered on the
    module; and for one with a bias, unless `bias` allows it. Hooks that are registered for all modules at once, such as
    those of profilers, do not count.

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
    """The projection in an error: its class, and that it has hooks."""
    return type(projection).__name__ + (
        " with hooks" if isinstance(projection, nn.Module) and has_hooks(projection) else ""
    )


def weight_of(name: str, projection: nn.Module, use: str) -> Tensor:
    """`plain_weight`, or a TypeError that says which projection `use` cannot read.

    Args:
        name: of the projection.
        projection: the module.
        use: what needs the weight, as the subject of the error's sentence: ``"head()"``.
    """
    weight = plain_weight(projection)
    if weight is None:
        raise TypeError(
            f"{use} reads the weight of {name}, which has to be a torch.nn.Linear without hooks; got "
            f"{description(projection)}, which may compute something else; merge adapters, remove hooks, and undo "
            "quantisation first"
        )
    return weight
