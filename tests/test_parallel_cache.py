"""`headwise.parallel.ShardedCache`: tokens dealt out to ranks, attended as one cache."""

from __future__ import annotations

import pytest
import ranks
import shard_cases
import torch
from shard_cases import Case

pytestmark = pytest.mark.unchecked

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.int8: 1e-6}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("own", [False, True], ids=["all heads", "own heads"])
def test_drawn_schedules_give_what_one_cache_gives(world: int, own: bool) -> None:
    cases = [Case.drawn(100 * world + seed, own) for seed in range(24)]
    told = ranks.pool(world).run(shard_cases.run_all, cases)
    wrong = []
    for n, (case, want) in enumerate(zip(cases, shard_cases.run_all(cases, False), strict=True)):
        for rank in range(world):
            heads = shard_cases.heads_of(case, rank, world)[0] if own else slice(None)
            for x, y in zip(want, told[rank][n], strict=True):
                x = x[:, heads]
                fine = x.isfinite()
                assert torch.equal(fine, y.isfinite()), case
                scale = max(1.0, float(x[fine].abs().max())) if fine.any() else 1.0
                far = float((x[fine].double() - y[fine].double()).abs().max()) if fine.any() else 0.0
                if far > TOLERANCE[case.dtype] * scale:
                    wrong.append((case, rank, far))
                    break
    assert not wrong, wrong
