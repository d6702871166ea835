"""Masks of numbers in a compiled call of a cache. Not collected by name: test_cache_edges.py runs this in a process of
its own, without the shape checker, whose wrappers the compiler cannot trace."""

from collections.abc import Callable

import pytest
import torch

import headwise
from headwise import Mask
from headwise.cache import StaticCache
from headwise.testing import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own, of several kinds
B, H, K, D, S, T = 2, 6, 3, 8, 13, 5

# Each number is 0 once: the end and the shift of a band, its first keys, and the shift of what repeats.
MASKS = {
    "right end": headwise.window(4, 0),
    "shift of a band": headwise.causal(offset=0),
    "no first keys": headwise.window(3, 2, first=0),
    "first keys": headwise.window(3, 2, first=2),
    "shift of steps": headwise.dilated(3, offset=0),
    "shift of blocks": headwise.blocks(4, offset=0),
    "shift of slopes": headwise.alibi(headwise.alibi_slopes(H), offset=0),
    "places of their own": headwise.dilated(3) & headwise.window(7, None),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MASKS)
def test_a_compiled_call_reads_the_numbers_of_a_mask(name: str) -> None:
    torch.compiler.reset()
    key, query = torch.randn(B, K, S, D), torch.randn(B, H, T, D)
    cache = StaticCache(B, K, D, capacity=17, causal=False).append(key, key)

    def call(query: torch.Tensor) -> torch.Tensor:
        return headwise.attention(query, cache, mask=MASKS[name])

    made = torch.compile(call, backend="eager", fullgraph=True)(query)
    assert_same_bits(made, call(query))
    expected = headwise.attention(query, key, key, mask=MASKS[name], backend="reference")
    torch.testing.assert_close(made, expected)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["reference", "blocks", "auto"])
def test_a_compiled_call_gives_its_output_in_the_order_of_memory_that_the_graph_knows(backend: str) -> None:
    """(B, T, H, V), so that heads are joined without a copy, whatever the backend gives."""
    torch.compiler.reset()
    key, query = torch.randn(B, K, S, D), torch.randn(B, H, T, D)
    cache = StaticCache(B, K, D, capacity=17).append(key, key)

    def call(query: torch.Tensor, join: bool) -> torch.Tensor:
        out, lse = headwise.attention(query, cache, backend=backend, return_lse=True)
        return torch.cat([out, lse[..., None]], -1) if not join else out.transpose(1, 2).view(B, T, H * D)

    for join in (True, False):
        made = torch.compile(call, backend="eager", fullgraph=True)(query, join)
        whole = headwise.attention(query, cache, backend=backend)
        torch.testing.assert_close(
            made if join else made[..., :-1], whole.transpose(1, 2).flatten(2) if join else whole
        )


@torch.no_grad()
def test_a_compiled_block_builds_bands_and_rules_of_its_sizes() -> None:
    """In one graph for all sizes: a band of half the keys joined with others, and a rule of a function."""
    torch.compiler.reset()
    masks = {
        "joined": lambda T: headwise.causal() & headwise.window(T // 2),
        "one side": lambda T: headwise.window(T // 2) & headwise.window(None, T // 3),
        "rule": lambda T: headwise.rule(lambda b, h, i, j: (j <= i) & ((i - j) % 3 < 2)),
    }
    for mask in masks.values():

        def call(query: torch.Tensor, key: torch.Tensor, mask: Callable[[int], Mask] = mask) -> torch.Tensor:
            return headwise.attention(query, key, key, mask=mask(query.shape[2]))

        compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
        for size in (7, 11, 23):
            query, key = torch.randn(B, H, size, D), torch.randn(B, K, size, D)
            expected = headwise.attention(query, key, key, mask=mask(size), backend="reference")
            torch.testing.assert_close(compiled(query, key), expected)
