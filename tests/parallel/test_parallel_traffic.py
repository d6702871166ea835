"""Who holds and sends what, and how even the work is, by counting pair by pair: `traffic_cases.py`."""

from __future__ import annotations

import draw
import pytest
import ranks
import torch
import traffic_cases

import headwise
from headwise.parallel import order_for


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_bytes_of_a_call_are_those_of_the_keys_that_others_see(world: int) -> None:
    cases = [traffic_cases.drawn(seed, world) for seed in draw.drawn(range(16), str(world), most=4)]
    for wrong in ranks.pool(world).run(traffic_cases.compare, cases):
        assert wrong == [], "\n".join(wrong)


EVEN = {
    "none": lambda n: None,
    "causal": lambda n: headwise.causal(),
    "window": lambda n: headwise.causal() & headwise.window(9),
    "blocks of 33": lambda n: headwise.causal() & headwise.blocks(33),
    "blocks of 50": lambda n: headwise.causal() & headwise.blocks(50),
}


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_order_is_that_in_which_the_busiest_rank_has_less_to_do(name: str, world: int) -> None:
    """Pairs counted one by one; `order_for` adds up strips, so that a few hundredths may go either way."""
    for n in range(2 * world, 200, 5):
        mask = EVEN[name](n)
        allowed = None if mask is None else mask.allowed(n, n)
        pairs = torch.full((n,), n) if allowed is None else allowed.expand(1, 1, n, n)[0, 0].sum(-1)
        busiest = {}
        for order in ("contiguous", "zigzag"):
            lengths = tuple(n // world + (rank < n % world) for rank in range(world))
            ranks_ = traffic_cases.stretches_of(n, world, order, lengths)
            busiest[order] = max(sum(int(pairs[i]) for part in own for i in part) for own in ranks_)
        ratio = busiest["contiguous"] / busiest["zigzag"]
        if ratio <= 1.02:
            assert order_for(mask, n, world) == "contiguous", (n, ratio)
        if ratio >= 1.2:
            assert order_for(mask, n, world) == "zigzag", (n, ratio)
