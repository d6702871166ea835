"""What a cache records of its last tokens: positions of ragged rows, the dtype of int8 keys, padding."""

import gc

import pytest
import torch
from backends import needs_native

import headwise
from headwise.cache import PagedCache, PagePool, StaticCache, quantize
from headwise.cache.page_pool import Pages


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


def test_pages_that_are_built_halfway_are_given_back_without_an_error() -> None:
    """As by a copy that fails: what a destructor raises is a warning, and warnings are errors."""
    half = Pages.__new__(Pages)
    del half
    gc.collect()


def test_a_pool_tells_its_sizes_and_its_free_pages() -> None:
    pool = PagePool(5, 2, 7, 3)
    cache = PagedCache(pool, 1).append(torch.randn(1, 2, 1, 7), torch.randn(1, 2, 1, 3))
    told = dict(part.split("=") for part in repr(pool).removeprefix("PagePool(").removesuffix(")").split(", "))
    sizes = {"num_pages": "5", "free": "4", "num_kv_heads": "2", "head_dim": "7", "value_dim": "3"}
    assert told.items() >= sizes.items() and told["page_size"] == str(pool.page_size) and len(cache.tables) == 1


def test_rows_of_no_numbers_cannot_be_quantised() -> None:
    with pytest.raises(ValueError, match=r"D is at least 1; got .*\(2, 3, 5, 0\)"):
        quantize(torch.zeros(2, 3, 5, 0))
