"""Training loops around attention over ranks: what one process does, or an error on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator

import context_training
import pytest
import ranks
import torch

pytestmark = [pytest.mark.slow, pytest.mark.unchecked]


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> Iterator[None]:
    yield
    ranks.renew()


@pytest.mark.parametrize("how", ["tensors", "dtensors", "processes"])
def test_a_gradient_that_no_rank_has_stays_none(how: str) -> None:
    """As in one process: an optimizer would decay its parameter, and its own averages."""
    assert ranks.pool(3).run(context_training.unused, how) == [[[3.0, 3.0], [3.0, 3.0], None]] * 3


def test_gradients_that_cannot_be_summed_are_refused_on_every_rank() -> None:
    sparse = (
        r"sum_gradients adds dense gradients; that of parameters\[1\], of shape \(5, 2\), has the layout torch.sparse"
    )
    one, other = ranks.pool(2).run(context_training.refused_gradients)
    assert re.match(f"RankError: sum_gradients: rank 1 raised: {sparse}", one["sparse"])
    assert re.match(f"TypeError: {sparse}", other["sparse"])
    for said in (one, other):
        assert said["frozen"].startswith("RankMismatch: ") and "on the choice of those that learn" in said["frozen"]
        assert said["names"] == "TypeError: parameters[0] is a tensor; got str" and said["nothing"] == "nothing"


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_that_parts_of_a_split_module_share_stay_shared(world: int) -> None:
    """Heads on one process each, and on several: whole key projections."""
    cases = [("key is value", 6), ("key is value", 1), ("query is key", 6), ("norms", 2), ("", 2)]
    assert ranks.pool(world).run(context_training.tied, cases) == [{}] * world


def test_split_modules_are_copied_keep_the_dtype_and_refuse_a_gradient_of_a_gradient() -> None:
    for said in ranks.pool(2).run(context_training.split_uses):
        assert said["twice"].startswith("RuntimeError: trying to differentiate twice a function that was marked")
        assert said["copies"] == [0.0, 0.0]
        assert said["dtypes"] == (torch.bfloat16, torch.bfloat16)


def test_what_is_frozen_stays_frozen() -> None:
    for said in ranks.pool(2).run(context_training.frozen):
        assert {name: pair for name, pair in said.items() if pair[0] != pair[1]} == {}
        assert {True, False} == {learns for learns, _ in said.values()}


def test_hooks_that_a_split_would_lose_are_refused() -> None:
    for said in ranks.pool(2).run(context_training.hooked):
        for name, part in (("forward", "o_proj"), ("before", "q_proj"), ("backward", "v_proj"), ("gradient", "k_proj")):
            assert said[name].startswith(f"ValueError: {part} or a parameter of it has hooks, which would be lost"), (
                said
            )
        assert said["accumulated"].startswith("ValueError: q_norm or a parameter of it has hooks")
        assert said["o_proj"].startswith("ValueError: q_proj.weight and o_proj.weight are one parameter; o_proj is cut")
        assert said["kept"] == "nothing"
        assert said["forward of its own"].startswith("ValueError: q_proj has a forward of its own, which would be lost")
        assert said["no plain norm"].startswith("TypeError: tensor_parallel replaces the torch.nn.RMSNorm of latent")
        assert said["no plain one"].startswith(
            "TypeError: tensor_parallel splits plain torch.nn.Linear projections; v_pr"
        )


def test_a_process_holds_no_memory_of_others() -> None:
    for memory, numbers in ranks.pool(2).run(context_training.parameter_bytes):
        assert memory == numbers


def test_whole_state_dicts_go_in_and_come_out() -> None:
    for far in ranks.pool(2).run(context_training.state_dicts):
        assert max(far) <= 1e-6


def test_a_batch_of_none_is_attended_by_ranks_too() -> None:
    shapes = [((0, 2, 3, 4), (0, 2, 3), (0, 2, 3, 4))] * 3
    assert ranks.pool(2).run(context_training.no_rows) == [[*shapes, (1, 2, 3, 4)]] * 2


def test_what_would_learn_of_a_sharded_cache_is_refused() -> None:
    refusal = "ValueError: a ShardedCache has no gradient: append and attend under torch.no_grad()"
    for said in ranks.pool(2).run(context_training.learning_cache):
        kept = {name: said.pop(name) for name in ("lengths", "no_grad")}
        assert said == dict.fromkeys(said, refusal) and kept == {"lengths": "[0] [0]", "no_grad": "nothing"}


@pytest.mark.parametrize("layout", ["ring", "gather", "ulysses"])
def test_a_loss_may_read_lse_alone(layout: str) -> None:
    for far in ranks.pool(2).run(context_training.of_lse, layout):
        assert max(far.values()) <= 5e-6


def test_a_fork_of_a_sharded_cache_goes_its_own_way() -> None:
    for far in ranks.pool(2).run(context_training.forked):
        assert max(far) <= 1e-6


CACHES = {
    "block": "RankMismatch: .* on the cache: rank 1 has block=2, ",
    "dtype": "RankMismatch: .* on the sizes: rank 1 has 2, 2, 8, 8, torch.int8, rank 0 has 2, 2, 8, 8, torch.float32; ",
    "kind": "RankMismatch: .* on the kind: rank 1 has RollingCache, rank 0 has StaticCache; ",
    "queries": r"RankMismatch: .* on the query: rank 1 has torch.float32, \(2, 4, 8\), 4, rank 0 has ",
    "scale": "RankMismatch: .* on the options: rank 1 has {'scale': 0.25, ",
    "return_lse": "RankMismatch: .* on the options: rank 1 has .*, return_lse=True, rank 0 has .*, return_lse=False; ",
    "heads": "ValueError: H is a multiple of K = 2 key-value heads; got H = 3",
    "option": "TypeError: a ShardedCache is attended with scale, softcap, sinks, .*; got seed",
    "own heads": "ValueError: of 4 query heads each of 2 ranks passes its own; got 1",
    "rows": r"ValueError: truncate keeps the first tokens of each row, at most what is there; got \[3\] for",
    "more": r"ValueError: truncate keeps the first tokens of each row, at most what is there; got \[6, 6\] for",
    "chunk": "ValueError: this ShardedCache takes at most chunk = 4 tokens at a time; got 5: ",
    "nothing": "nothing",
}


def test_sharded_caches_that_are_unlike_are_told_to_all() -> None:
    for said in ranks.pool(2).run(context_training.unlike_caches):
        assert said.keys() == CACHES.keys()
        assert {name: said[name] for name, text in CACHES.items() if not re.match(text, said[name])} == {}


@pytest.mark.parametrize("world", [2, 3])
def test_the_gradient_of_a_joined_sequence_is_the_sum_of_all_losses(world: int) -> None:
    for far in ranks.pool(world).run(context_training.joined):
        assert max(far.values()) <= 1e-6


@pytest.mark.parametrize("layout", ["ring", "gather", "ulysses"])
def test_latents_are_expanded_under_the_autocast_of_the_forward(layout: str) -> None:
    """In the backward as well, which runs outside of it."""
    for errors in ranks.pool(2).run(context_training.autocast, layout):
        assert all(ours <= 2 * one for one, ours in errors.values()), errors


UNLIKE = {
    "order": "RankMismatch: .* on the order: rank 1 has zigzag, rank 0 has contiguous; ",
    "dropout": "RankMismatch: .* on the options: rank 1 has .* dropout=0.25, ",
    "softcap": "RankMismatch: .* on the options: rank 1 has .* softcap=2.0, ",
    "return_lse": "RankMismatch: .* on the options: rank 1 has .* return_lse=True",
    "a mask that learns": r"RankMismatch: .* on the gradients: rank 1 has \[False, False, False, True, False, False\]",
    "an option": r"TypeError: context_parallel\(\) has no option backend",
    "a flag": "TypeError: return_lse is True or False; got 1",
    "sinks": r"ValueError: sinks are float logits, one a query head: \(H,\) = \(2,\); got float32 \(3,\)",
    "a mask of other lengths": r"ValueError: a mask tensor broadcasts to \(B, H, T, S\) = \(1, 2, 10, 10\) from ",
    "two vectors a token": r"ValueError: with an expansion, key is \(B, 1, S, E\), one vector a token; got \(1, 2, 5",
    "values beside vectors": "ValueError: an expansion makes keys and values of `key` alone: leave value out",
    "joined": "RankMismatch: join_sequence: .* on the order: rank 1 has zigzag, ",
    "joined widths": r"RankMismatch: join_sequence: .* on the other sizes: rank 1 has \(1, 2, 4\), rank 0 has ",
    "joined dtypes": "RankMismatch: join_sequence: .* on the dtype: rank 1 has torch.float64, ",
    "nothing": "nothing",
    "backward": "RankMismatch: backward of context_parallel, .* on the order: rank 1 ",
    "backward of joined": r"RankMismatch: backward of join_sequence, .* on the order: rank 1 has '.* operation \d+' ",
}


def test_what_ranks_do_otherwise_is_told_to_all() -> None:
    for said in ranks.pool(2).run(context_training.unlike):
        assert said.keys() == UNLIKE.keys()
        assert {name: said[name] for name, text in UNLIKE.items() if not re.match(text, said[name])} == {}
