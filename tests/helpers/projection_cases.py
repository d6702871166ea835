"""For tests: what may answer for a linear layer of a module in its place. Each changes the numbers that it gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer, as LoRA: it has no weight of its own."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        like = base.weight
        self.down = nn.Parameter(torch.randn(rank, base.in_features).to(like) / 2)
        self.up = nn.Parameter(torch.randn(base.out_features, rank).to(like) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class AdapterWithWeight(Adapter):
    """The same, which shows the weight of the layer that it is around, as PEFT's do."""

    @property
    def weight(self) -> nn.Parameter:
        return self.base.weight

    @property
    def bias(self) -> Any:
        return self.base.bias


class Subclass(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class Added(nn.Module):
    """A parametrization: the weight and something learned."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.randn_like(like) / 4)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.more


def _subclass(linear: nn.Linear) -> nn.Module:
    linear.__class__ = Subclass
    return linear


def _hooked(linear: nn.Linear) -> nn.Module:
    linear.register_forward_hook(lambda module, args, out: 1.5 * out)
    return linear


def _hooked_before(linear: nn.Linear) -> nn.Module:
    linear.register_forward_pre_hook(lambda module, args: (1.5 * args[0],))
    return linear


def _overridden(linear: nn.Linear) -> nn.Module:
    plain = linear.forward
    linear.forward = lambda x: 1.5 * plain(x)  # type: ignore[method-assign]
    return linear


def _parametrized(linear: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(linear, "weight", Added(linear.weight))


def _biased(linear: nn.Linear) -> nn.Module:
    linear.bias = nn.Parameter(torch.randn(linear.out_features))
    return linear


ANSWERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "adapter": Adapter,
    "adapter with a weight": AdapterWithWeight,
    "subclass": _subclass,
    "hook": _hooked,
    "hook before": _hooked_before,
    "forward of its own": _overridden,
    "parametrization": _parametrized,
}
"""Name -> what makes the projection answer otherwise; only a parametrization's weight still tells what it computes."""

BIASED = {"bias": _biased}
"""A layer that was built without bias and has one now."""


def answered(module: Any, name: str, answer: Callable[[nn.Linear], nn.Module]) -> Any:
    """A copy of a module in which something answers for the projection of that name."""
    module = copy.deepcopy(module)
    setattr(module, name, answer(getattr(module, name)))
    return module


def linear_like(projection: nn.Module, width: int) -> nn.Linear:
    """The plain linear layer that computes what a projection does, read from its calls."""
    with torch.no_grad():
        zero = projection(torch.zeros(1, width))
        rows = projection(torch.eye(width)) - zero
    plain = nn.Linear(width, rows.shape[1], bias=bool((zero != 0).any()))
    with torch.no_grad():
        plain.weight.copy_(rows.T)
        if plain.bias is not None:
            plain.bias.copy_(zero[0])
    return plain


@contextmanager
def no_change(*modules: nn.Module) -> Iterator[None]:
    """Within, no parameter or buffer of the modules changes."""
    before = [copy.deepcopy(module.state_dict()) for module in modules]
    yield
    for module, state in zip(modules, before, strict=True):
        assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())
