"""Attention over ranks is attention in one process: every mask, layout and option, forward and backward."""

import pytest
import ranks
from context_cases import GRADIENT, MODULE_MASKS, check, drawn, modules

WORLDS = {2: 150, 3: 110, 4: 60}


@pytest.mark.parametrize("world", WORLDS)
def test_drawn_calls_are_those_of_one_process(world: int) -> None:
    told = ranks.pool(world).run(check, drawn(world, WORLDS[world]))
    assert told == [[]] * world


@pytest.mark.parametrize("kind", ["mha", "latent", "absorbed"])
def test_modules_within_the_context_are_those_of_one_process(kind: str) -> None:
    calls = [
        (layout, order, mask, 23 if mask == "window" else None)
        for layout in ("ring", "gather", "ulysses")
        for order, mask in zip(("zigzag", "contiguous", "zigzag"), MODULE_MASKS, strict=True)
    ]
    for layout, order, mask, length in calls:
        for told in ranks.pool(3).run(modules, kind, layout, order, mask, length):
            told.pop("sent")
            assert max(told.values()) <= 2 * GRADIENT, (layout, order, mask, told)
