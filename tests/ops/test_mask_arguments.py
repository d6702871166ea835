"""What the functions that make masks take, and what they refuse: every dtype, every kind of number, and the edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headwise

pytestmark = pytest.mark.unchecked
DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
)  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "causal": lambda n: headwise.causal(offset=n),
    "window": lambda n: headwise.window(n),
    "window on the right": lambda n: headwise.window(3, n),
    "window from": lambda n: headwise.window(3, offset=n),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keep_takes_bool_alone_and_bias_floats_alone(dtype: torch.dtype) -> None:
    tensor = torch.ones(5, 7, dtype=dtype)
    for make, taken in ((headwise.keep, (torch.bool,)), (headwise.bias, FLOATS)):
        if dtype in taken:
            make(tensor)
        else:
            with pytest.raises(TypeError, match=f"^{make.__name__}.* takes a (bool|float) tensor; got {dtype}"):
                make(tensor)


@pytest.mark.parametrize("axes", range(6))
def test_keep_takes_one_to_four_axes(axes: int) -> None:
    tensor = torch.ones((1,) * axes, dtype=torch.bool)
    if 1 <= axes <= 4:
        headwise.keep(tensor)
    else:
        with pytest.raises(ValueError, match="takes 1 to 4 axes"):
            headwise.keep(tensor)


@pytest.mark.parametrize("name", NUMBERS)
def test_positions_of_a_band_are_whole_numbers(name: str) -> None:
    make = NUMBERS[name]
    for number in (1, 2**40):
        make(number)
    for wrong in (True, False, 2.0, "3", [3], torch.tensor(2.0)):
        with pytest.raises((TypeError, ValueError)) as caught:
            make(wrong)
        assert isinstance(caught.value, TypeError), (name, wrong, caught.value)
    for far in (2**40 + 1, 2**70):
        with pytest.raises(ValueError, match=r"from -2\*\*40 to 2\*\*40"):
            make(far)


@pytest.mark.parametrize("number", [-(2**40), -(2**40) - 1])
def test_the_farthest_position_below_is_taken_and_the_next_is_not(number: int) -> None:
    if number == -(2**40):
        headwise.causal(offset=number)
    else:
        with pytest.raises(ValueError, match=r"from -2\*\*40 to 2\*\*40"):
            headwise.causal(offset=number)
