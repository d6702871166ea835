"""Attention over ranks is attention in one process: every mask, layout and option, forward and backward."""

import pytest
import ranks
from context_cases import check, drawn

WORLDS = {2: 150, 3: 110, 4: 60}


@pytest.mark.parametrize("world", WORLDS)
def test_drawn_calls_are_those_of_one_process(world: int) -> None:
    told = ranks.pool(world).run(check, drawn(world, WORLDS[world]))
    assert told == [[]] * world
