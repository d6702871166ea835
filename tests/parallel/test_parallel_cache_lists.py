"""`ShardedCache` against a plain Python list of keys (`list_cache.py`), where another cache would share its faults."""

from __future__ import annotations

import draw
import pytest
import ranks
import shard_lists
from shard_lists import Rolling

pytestmark = [pytest.mark.slow, pytest.mark.unchecked]


@pytest.mark.parametrize("world", [2, 3])
def test_drawn_schedules_give_what_lists_of_tokens_give(world: int) -> None:
    for wrong in ranks.pool(world).run(shard_lists.schedules, draw.drawn(range(12), str(world), most=4), world):
        assert wrong == []


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_keeps_what_the_first_of_two_queries_sees_at_every_edge_of_a_page(world: int) -> None:
    """Of a step of two tokens the second may be a rank's and the first another's: its window goes back one further."""
    cases = [Rolling(1, window, first, 1) for window, first in ((world, 0), (2 * world, 0), (3 * world - 1, 2))]
    cases.append(Rolling(1, 2 * 3 * world, 0, 3))
    for wrong in ranks.pool(world).run(shard_lists.page_edges, cases, 128 * world):
        assert wrong == {}


@pytest.mark.parametrize("world", [2, 3])
def test_ragged_rows_of_a_rolling_cache_see_what_lies_on_every_rank(world: int) -> None:
    """A short row sees tokens of a rank that has nothing of what the long ones see, and the other way round."""
    cases = [
        (Rolling(2, 3, 0, 16), [5, 16 * world + 20]),
        (Rolling(2, 3, 0, 16), [16 * world + 20, 5]),
        (Rolling(3, 7, 0, 5), [4, 61, 33]),
        (Rolling(3, 7, 2, 5), [61, 4, 33]),
    ]
    for wrong in ranks.pool(world).run(shard_lists.ragged, cases):
        assert wrong == {}


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_remembers_as_far_back_as_the_first(world: int) -> None:
    """Tokens that follow each other may all be those of a later rank."""
    cases = [(Rolling(1, 10, 0, 128, 128), 100), (Rolling(1, 5, 0, 3, 64), 2)]
    for wrong in ranks.pool(world).run(shard_lists.remembered, cases, 128 * world * 2 + 200, 29):
        assert wrong == []
