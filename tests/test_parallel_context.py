"""Attention over ranks is attention in one process: every mask, layout and option, forward and backward."""

import pytest
import ranks
from context_cases import GRADIENT, all_modules, check, drawn

WORLDS = {2: 150, 3: 110, 4: 60}


@pytest.mark.parametrize("world", WORLDS)
def test_drawn_calls_are_those_of_one_process(world: int) -> None:
    told = ranks.pool(world).run(check, drawn(world, WORLDS[world]))
    assert told == [[]] * world


@pytest.mark.parametrize("kind", ["mha", "latent", "absorbed"])
def test_modules_within_the_context_are_those_of_one_process(kind: str) -> None:
    for told in ranks.pool(3).run(all_modules, kind):
        for case, errors in told.items():
            errors.pop("sent")
            assert max(errors.values()) <= 2 * GRADIENT, (case, errors)
