"""`headwise.parallel.ShardedCache`: tokens dealt out to ranks, attended as one cache."""

from __future__ import annotations

import draw
import pytest
import ranks
import shard_cases
import torch
from shard_cases import Case

from headwise.cache import KVCache
from headwise.parallel.cache.ownership import TokenOwnership

pytestmark = [pytest.mark.slow, pytest.mark.unchecked]

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float64: 1e-14}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("own", [False, True], ids=["all heads", "own heads"])
def test_drawn_schedules_give_what_one_cache_gives(world: int, own: bool) -> None:
    seeds = [seed for kind in range(3) for seed in draw.drawn(range(kind, 9, 3), f"{world} {own} {kind}")]
    cases = [Case.drawn(100 * world + seed, world if own else 0) for seed in seeds]  # of each kind of cache
    results = ranks.pool(world).run(shard_cases.run_all, cases)
    wrong = []
    for n, (case, want) in enumerate(zip(cases, shard_cases.run_all(cases, False), strict=True)):
        for rank in range(world):
            heads = shard_cases.share_of(case, rank, world).heads if own else slice(None)
            for x, y in zip(want, results[rank][n], strict=True):
                x = x[:, heads]
                fine = x.isfinite()
                assert torch.equal(fine, y.isfinite()) and x.dtype == y.dtype, case
                scale = max(1.0, float(x[fine].abs().max())) if fine.any() else 1.0
                far = float((x[fine].double() - y[fine].double()).abs().max()) if fine.any() else 0.0
                if far > TOLERANCE[x.dtype] * scale:  # lse is float32 beside bfloat16
                    wrong.append((case, rank, far))
                    break
    assert not wrong, wrong


@pytest.mark.parametrize("kind", shard_cases.KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_memory_that_was_never_written_is_not_read(kind: type[KVCache], dtype: torch.dtype) -> None:
    """Rows of unlike lengths leave columns without a token: masked, whatever lies there."""
    assert not shard_cases.reads_what_was_never_written(kind, dtype, sharded=False)
    assert ranks.pool(2).run(shard_cases.reads_what_was_never_written, kind, dtype) == [False, False]


@pytest.mark.parametrize(("ranks_", "block"), [(1, 1), (2, 1), (3, 5), (4, 128)])
def test_every_token_has_one_rank(ranks_: int, block: int) -> None:
    """By the definition, token by token."""
    n = 3 * ranks_ * block + 7
    ownerships = [TokenOwnership(rank, ranks_, block) for rank in range(ranks_)]
    for ownership in ownerships:
        own = [place for place in range(n) if (place // block) % ranks_ == ownership.rank]
        assert [place for place in range(n) if ownership.owns(place)] == own
        assert ownership.place(torch.arange(len(own))).tolist() == own
        counts = [sum(place < end for place in own) for end in range(n + 1)]
        assert (
            [ownership.count(end) for end in range(n + 1)] == counts == ownership.counts(torch.arange(n + 1)).tolist()
        )
        for length in range(0, n - ranks_ * block, 3):
            spans = [counts[first + length] - counts[first] for first in range(n - length + 1)]
            assert max(spans) <= ownership.most(length)
    assert max(ownerships[0].most(length) for length in range(5)) <= 5


def test_what_a_window_does_not_see_is_not_sent_and_memory_is_shared() -> None:
    """301 tokens in blocks of 64 on three ranks: of the last three tokens all are rank 1's, which sends two thirds."""
    results = ranks.pool(3).run(shard_cases.sent, 301, 3, 64)
    assert [parts for parts, _, _ in results] == [0, 4 * 9 * 4, 0]
    assert [nbytes for _, nbytes, _ in results] == [2 * 2 * 200 * 8 * 4] * 3
    assert [tokens for _, _, tokens in results] == [101, 100, 100]
    results = ranks.pool(3).run(shard_cases.sent, 301, 66, 64)
    assert [parts for parts, _, _ in results] == [4 * 9 * 4, 4 * 9 * 4, 0], "the window lies on two blocks"


OPERATION = "attention to a ShardedCache: "
REFUSALS = {
    "full": "ValueError: a ShardedCache of capacity 7 has no room for 10 tokens: make it larger, or truncate() it",
    "pool": "the pool of 1 pages has 0 free, and 1 are needed",
    "lengths": f"RankMismatch: {OPERATION}rank 1 does not agree with rank 0 on the lengths: rank 1 has ",
    "rows": f"RankMismatch: {OPERATION}rank 1 does not agree with rank 0 on the rows of reorder(): rank 1 has ",
    "query": "this cache takes query (B, H, T, D) = (1, H, T, 8); got (1, 4, 5, 7)",
    "sinks": f"RankMismatch: {OPERATION}rank 1 does not agree with rank 0 on the sinks: rank 1 has ",
    "mask": f"RankMismatch: {OPERATION}rank 1 does not agree with rank 0 on the mask: rank 1 has ",
    "gradient": "ValueError: a ShardedCache has no gradient: append and attend under torch.no_grad()",
    "dropout": "ValueError: a ShardedCache is for inference: dropout is 0; got 0.1",
    "view": "ValueError: no rank has all tokens of a ShardedCache, so there is no view of them; `local` has [",
    "rolling mask": "ValueError: a rolling ShardedCache takes a further window() or causal() alone, for what",
    "rolled back": "ValueError: a rolling ShardedCache cannot go back from [804] to [300] tokens: of the 7",
    "own heads": "this cache takes key (B, K, T, D) = (1, 1, T, 8); got (1, 2, 5, 8)",
    "own mask": "ValueError: with own_heads a mask is the same for all heads; got one that has an axis of heads",
}
KEPT = {"pool": 250, "lengths": None, "rolled back": 804, "own heads": 0}


@pytest.mark.parametrize("which", REFUSALS)
def test_what_cannot_be_is_said_on_every_rank_and_changes_nothing(which: str) -> None:
    said = ranks.pool(2).run(shard_cases.refusals, which)
    for rank, (text, lengths, own) in enumerate(said):
        assert REFUSALS[which] in text, said
        kept = KEPT.get(which, 5)
        if kept is not None:
            assert (lengths, own) == ([kept], [TokenOwnership(rank, 2).count(kept)]), said


def test_modules_take_it_as_any_cache() -> None:
    for outputs in ranks.pool(3).run(shard_cases.modules):
        for sharded, alone in zip(outputs[::2], outputs[1::2], strict=True):
            assert torch.allclose(sharded, alone, atol=1e-6), float((sharded - alone).abs().max())


def test_a_rolling_cache_goes_back_as_far_as_it_remembers() -> None:
    assert max(max(far) for far in ranks.pool(3).run(shard_cases.back_and_forth)) < 1e-6
