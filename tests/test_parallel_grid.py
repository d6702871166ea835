"""Dropout of dealt heads, sums that are counted, and heads and tokens split together: equal to one process."""

import grid_cases
import pytest
import ranks
from grid_cases import Together

pytestmark = pytest.mark.unchecked


@pytest.mark.parametrize("world", [2, 3])
def test_dropout_of_dealt_heads_is_that_of_one_process(world: int) -> None:
    """Key-value heads whole, parted and one; ranks with other seeds than the first."""
    for told in ranks.pool(world).run(grid_cases.dropped, [("mha", 6), ("mha", 2), ("mha", 1), ("mla", 1)]):
        assert max(told.values()) <= 1, told


def test_dropout_of_dtensors_is_that_of_one_process() -> None:
    for told in ranks.pool(2).run(grid_cases.dropped_op):
        assert max(told.values()) <= 1e-6, told


@pytest.mark.parametrize("world", [2, 3])
def test_sums_over_heads_send_the_bytes_that_are_predicted(world: int) -> None:
    for told in ranks.pool(world).run(grid_cases.counted):
        assert [counted for _, counted in told] == [predicted for predicted, _ in told]


TOGETHER = [
    Together("mha", "ring", 2),
    Together("mha", "gather", 6, mask="window"),
    Together("mha", "ulysses", 2, mask="documents"),
    Together("mha", "ring", 1, 0.3),
    Together("mha", "ring", 2, mask="documents"),
    Together("mha", "gather", 1, 0.3),
    Together("mha", "ulysses", 1, 0.3, "window"),
    Together("mla", "ring", 1, 0.3),
    Together("mla", "gather", 1, mask="documents"),
]


def test_heads_and_tokens_split_together_give_what_one_process_gives() -> None:
    for told in ranks.pool(4).run(grid_cases.all_together, TOGETHER):
        assert told == {}


def test_decoding_with_heads_and_tokens_split() -> None:
    for K in (2, 1):
        assert max(ranks.pool(4).run(grid_cases.decoded, K)) <= 2e-6


def test_a_model_with_heads_and_tokens_split_trains_as_in_one_process() -> None:
    for told in ranks.pool(4).run(grid_cases.model_together):
        assert max(told.values()) <= 3e-5, told


@pytest.mark.parametrize(("layout", "most"), [("ring", 1.15), ("ulysses", 1.08), ("gather", 1.4)])
def test_what_a_rank_holds_falls_with_their_number(layout: str, most: float) -> None:
    """Of two ranks and four, bytes of all together: as many, but for messages; and a head of all keys of a gather."""
    two, four = (world * max(ranks.pool(world).run(grid_cases.peak, layout, 2048)) for world in (2, 4))
    assert four <= most * two
