"""The matrix of a linear module, whichever way round it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks.projections import is_linear


@dataclass(frozen=True, eq=False)
class Matrix:
    """``y = x W + b`` of a module with a `weight` and maybe a `bias`, such as `torch.nn.Linear`.

    Attributes:
        module: The module.
        by_rows: Whether each row of the stored weight makes one number of y, as in `torch.nn.Linear`; else each column
            does, as in transformers' Conv1D.
    """

    module: nn.Module
    by_rows: bool

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Matrix:
        """Raise TypeError for a module that holds no such matrix."""
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
            raise TypeError(
                f"the matrix of {name!r} is solved anew, and {type(module).__name__} has no weight of two axes in "
                "floating point; merge adapters first, and load without quantisation"
            )
        if is_linear(module):  # whatever hooks it has: our own read it
            if not isinstance(weight, nn.Parameter):
                raise TypeError(
                    f"the matrix of {name!r} is solved anew, and its weight is computed from others "
                    "(torch.nn.utils.parametrize); remove its parametrization first"
                )
            return cls(module, True)
        other = f"{name!r} ({type(module).__name__}) computes other than x W + b of its weight and bias"
        if isinstance(module, nn.Linear):
            raise TypeError(f"{other}; merge adapters first")
        x = torch.zeros(1, weight.shape[0], dtype=weight.dtype, device=weight.device)
        x[0, 0] = 1.0
        try:
            with torch.no_grad():
                y = module.forward(x)  # past hooks, such as our own
                expected = weight[0] if bias is None else weight[0] + bias
        except RuntimeError as error:  # of another width
            raise TypeError(f"{other} ({error}); merge adapters first") from None
        if y.shape[-1] != weight.shape[1] or not torch.allclose(y[0], expected):
            raise TypeError(f"{other}; merge adapters first")
        return cls(module, False)

    @property
    def W(self) -> Tensor:
        """(n, m), a view of what is stored."""
        weight: Any = self.module.weight
        stored: Tensor = weight.detach()
        return stored.T if self.by_rows else stored

    @property
    def b(self) -> Tensor | None:
        """(m,), a view of what is stored, or None."""
        bias = getattr(self.module, "bias", None)
        return None if bias is None else bias.detach()
