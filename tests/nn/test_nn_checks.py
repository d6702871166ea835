"""What modules say of tensors that do not fit: each condition of a check alone, beside a call that it lets through."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.nn import rotate

pytestmark = pytest.mark.unchecked
X, COS = torch.ones(2, 3, 5, 7), torch.ones(5, 3)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (name, wrong)
        for name in ("x", "cos", "sin")
        for wrong in (torch.ones(5, 3, dtype=torch.long), torch.ones(()), torch.ones(5, 3, device="meta"))
        if name != "x" or wrong.device.type == "cpu"  # the device is that of x
    ],
    ids=str,
)
def test_rotate_names_the_tensor_that_is_none_of_floats_with_an_axis(name: str, wrong: Tensor) -> None:
    rotate(X, COS, COS)
    rotate(X[0, 0, 0, :6], COS[0], COS[0])  # one axis is enough
    arguments = {"x": X, "cos": COS, "sin": COS, name: wrong}
    with pytest.raises(ValueError, match=rf"^{name} is a float tensor \(\.\.\., n\) on the device of x; got "):
        rotate(**arguments)


@pytest.mark.parametrize("name", ["x", "cos", "sin"])
def test_rotate_names_what_is_no_tensor(name: str) -> None:
    arguments: dict[str, Any] = {"x": X, "cos": COS, "sin": COS, name: [1.0, 2.0]}
    with pytest.raises(TypeError, match=rf"^{name} "):
        rotate(**arguments)


class Both(nn.Linear):
    """A projection that gives two things, as some adapters do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_projection_that_gives_no_tensor_is_named(name: str) -> None:
    mha = headwise.MultiHeadAttention(14, 2)
    setattr(mha, name, Both(14, 14))
    with pytest.raises(TypeError, match=re.escape("what a projection gives")):
        mha(torch.ones(1, 3, 14))
