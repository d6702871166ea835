"""The matrix of a linear module as (inputs, outputs), also if it is stored transposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks.projections import is_linear


@dataclass(frozen=True, eq=False)
class Matrix:
    """The matrix of ``y = x W + b`` in a module with a `weight` and maybe a `bias`, such as `torch.nn.Linear`.

    Attributes:
        module: The module.
        by_rows: True if each row of the stored weight makes one number of y, as in `torch.nn.Linear`; False if each
            column does, as in transformers' Conv1D.
    """

    module: nn.Module
    by_rows: bool

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Matrix:
        """Return the matrix of a module; raise TypeError for a module that holds no such matrix."""
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
            raise TypeError(
                f"the matrix of {name!r} is solved anew, and {type(module).__name__} has no weight of two axes in "
                "floating point; merge adapters first, and load without quantisation"
            )
        if is_linear(module):  # hooks are allowed, because headwise itself adds some to read the module
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
                y = module.forward(x)  # forward() skips hooks, such as those of headwise
                expected = weight[0] if bias is None else weight[0] + bias
        except RuntimeError as error:  # the input has another width
            raise TypeError(f"{other} ({error}); merge adapters first") from None
        if y.shape[-1] != weight.shape[1] or not torch.allclose(y[0], expected):
            raise TypeError(f"{other}; merge adapters first")
        return cls(module, False)

    @property
    def W(self) -> Tensor:
        """The weight as (n, m), a view of the stored tensor."""
        weight: Any = self.module.weight
        stored: Tensor = weight.detach()
        return stored.T if self.by_rows else stored

    @property
    def b(self) -> Tensor | None:
        """The bias (m,), a view of the stored tensor, or None."""
        bias = getattr(self.module, "bias", None)
        return None if bias is None else bias.detach()
