"""Dropout of dealt heads, sums that are counted, and heads and tokens split together: equal to one process."""

import draw
import grid_cases
import pytest
import ranks
from grid_cases import Planned, Together

from headwise.plan.model.model import model_of
from headwise.plan.ranks.communication import Link
from headwise.plan.ranks.mesh import Grid, mesh_cost

pytestmark = [pytest.mark.slow, pytest.mark.unchecked]


@pytest.mark.parametrize("world", [2, 3])
def test_dropout_of_dealt_heads_is_that_of_one_process(world: int) -> None:
    """Key-value heads whole, parted and one; ranks with other seeds than the first."""
    cases = draw.drawn([("mha", 6), ("mha", 2), ("mha", 1), ("mla", 1)], str(world))
    for errors in ranks.pool(world).run(grid_cases.dropped, cases):
        assert max(errors.values()) <= 1, errors


def test_dropout_of_dtensors_is_that_of_one_process() -> None:
    for errors in ranks.pool(2).run(grid_cases.dropped_op):
        assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize("world", [2, 3])
def test_sums_over_heads_send_the_bytes_that_are_predicted(world: int) -> None:
    for counts in ranks.pool(world).run(grid_cases.counted):
        assert [counted for _, counted in counts] == [predicted for predicted, _ in counts]


TOGETHER = [
    Together("mha", "ring", 2),
    Together("mha", "gather", 6, mask="window"),
    Together("mha", "ulysses", 2, mask="documents"),
    Together("mha", "ring", 1, 0.3),
    Together("mha", "ring", 2, mask="documents"),
    Together("mha", "gather", 3, 0.3),
    Together("mha", "ulysses", 1, 0.3, "window"),
    Together("mla", "ring", 1, 0.3),
    Together("mla", "gather", 1, mask="documents"),
]


def test_heads_and_tokens_split_together_give_what_one_process_gives() -> None:
    for errors in ranks.pool(4).run(grid_cases.all_together, draw.drawn(TOGETHER)):
        assert errors == {}


def test_decoding_with_heads_and_tokens_split() -> None:
    for kind, K in (("mha", 2), ("mha", 1), ("mla", 1)):
        assert max(ranks.pool(4).run(grid_cases.decoded, kind, K)) <= 2e-6


@pytest.mark.parametrize(("name", "dropout"), [("Llama GQA", 0.3), ("gpt-oss sinks", 0.0)])
def test_a_model_with_heads_and_tokens_split_trains_as_in_one_process(name: str, dropout: float) -> None:
    for errors in ranks.pool(4).run(grid_cases.model_together, name, dropout):
        assert max(errors.values()) <= 3e-5, errors


PLANS = [
    Planned("mha", 6),
    Planned("mha", 2),
    Planned("mha", 1),
    Planned("mha", 2, window=7),
    Planned("mha", 2, chunk=8),
    Planned("mla"),
]


@pytest.mark.sweep
@pytest.mark.parametrize("case", PLANS, ids=["MHA", "GQA", "MQA", "window", "chunks", "latent"])
def test_a_plan_of_heads_and_tokens_is_what_ranks_send_and_hold(case: Planned) -> None:
    results = ranks.pool(4).run(grid_cases.planned, case)
    at = mesh_cost(model_of(case.config()), Grid(2, 2, Link(1e9)), grid_cases.TOKENS, batch=2, kv_dtype="fp32")
    [layer] = at.layers
    assert len(layer.costs) == 3
    for cost in layer.costs:
        forward, backward, *sums = map(max, *(each[cost.layout] for each in results))
        assert (cost.bytes, layer.backward[cost.layout]) == (forward, backward), cost.layout
        assert sums[0] == layer.tensor_bytes // 2  # the other half is that of the feed-forward layers
        assert sums[1] == sums[0] or case.kind == "mla"  # which sums the latents' gradients as well
    assert [each["auto"] for each in results] == [each[layer.choose.layout] for each in results]
    if case.chunk is None:
        between, summed = map(max, *(each["step"] for each in results))
        assert layer.decode_bytes == between + 2 * summed
        assert max(each["tokens"] for each in results) == 12
    if case.chunk is None and case.window is None:  # a rolling cache has room for whole pages
        assert at.cache_bytes == max(each["cache"] for each in results)


@pytest.mark.parametrize("K", [2, 4])
def test_a_plan_has_the_weights_that_a_rank_holds(K: int) -> None:
    """The projections to two key-value heads lie whole on each of four ranks."""
    for config, weight_bytes in ranks.pool(4).run(grid_cases.weights, K):
        assert mesh_cost(model_of(config), Grid(4, 1, Link(1e9)), 8).weight_bytes == weight_bytes


@pytest.mark.parametrize(("layout", "most"), [("ring", 1.15), ("ulysses", 1.08), ("gather", 1.4)])
def test_what_a_rank_holds_falls_with_their_number(layout: str, most: float) -> None:
    """Of two ranks and four, bytes of all together: as many, but for messages; and a head of all keys of a gather."""
    two, four = (world * max(ranks.pool(world).run(grid_cases.peak, layout, 2048)) for world in (2, 4))
    assert four <= most * two
