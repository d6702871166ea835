"""What a cache records of its last tokens: positions of ragged rows, the dtype of int8 keys, padding."""

import pytest
import torch
from backends import needs_native

import headwise
from headwise.cache import StaticCache


def test_positions_of_ragged_rows_continue_each_row() -> None:
    x = torch.randn(3, 2, 7, 5)
    cache = StaticCache(3, 2, 5, capacity=11).append(x, x, lengths=[7, 2, 5])
    assert cache.positions(2).tolist() == [[7, 8], [2, 3], [5, 6]]
    assert cache.truncate([2, 2, 2]).positions(2).tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keys_of_int8_have_the_dtype_of_the_last_tokens(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 3, 5)
    cache = (
        StaticCache(1, 2, 5, capacity=11, dtype=torch.int8).append(x.half(), x.half()).append(x.to(dtype), x.to(dtype))
    )
    assert cache.keys.dtype == dtype


@needs_native
def test_padding_before_a_step_does_not_hide_the_step() -> None:
    """A row whose last append was padding has a real query once a step has added its token."""
    cache = StaticCache(2, 2, 5, capacity=11)
    x = torch.randn(2, 2, 1, 5)
    with torch.no_grad():
        cache.append(x, x).append(x, x, lengths=[1, 0])
        assert cache.takes_steps()
        out = cache.step(x, x, x)
        assert out is not None and torch.equal(headwise.attention(x, cache), out)
