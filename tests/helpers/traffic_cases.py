"""What ranks send, counted pair by pair on tiny sizes, from the matrix of what each query may see."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import headwise
from headwise.ops.masks import Mask
from headwise.parallel import Comm, context_parallel

B, D, V = 2, 5, 3
MASKS: dict[str, Any] = {
    "none": lambda: Mask(()),
    "causal": lambda: headwise.causal(),
    "causal from the top": lambda: headwise.causal(offset=0),
    "window": lambda: headwise.causal() & headwise.window(4),
    "both ways": lambda: headwise.window(3, 2),
    "one to come": lambda: headwise.window(1, 6),
    "far back": lambda: headwise.window(30, offset=-9),
}
"""Rules whose reach is exact: of a stretch of queries, the keys from the first that one sees to the last."""


class Case(NamedTuple):
    """One call; the lengths are those of each rank's queries and keys."""

    mask: str
    heads: tuple[int, int]
    order: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    lse: bool


def drawn(seed: int, world: int) -> Case:
    make = random.Random(f"{seed} {world}")
    kv, group = make.choice([(1, 3), (2, 3), (3, 2), (5, 1)])
    order = make.choice(["contiguous", "zigzag"])
    T = make.choice([7, 11, 19, 23])
    S = T + make.choice([0, 0, 6, 13])
    if order == "zigzag":
        lengths = [tuple(sum(map(len, own)) for own in stretches_of(n, world, order, ())) for n in (T, S)]
    else:
        cuts = [sorted(make.randrange(n + 1) for _ in range(world - 1)) for n in (T, S)]
        ends = [[0, *cut, n] for cut, n in zip(cuts, (T, S), strict=True)]
        lengths = [tuple(b - a for a, b in itertools.pairwise(one)) for one in ends]
    return Case(make.choice([*MASKS]), (kv * group, kv), order, *lengths, make.random() < 0.5)


def stretches_of(n: int, world: int, order: str, lengths: tuple[int, ...]) -> list[list[list[int]]]:
    """The places of each rank, stretch by stretch, dealt out one at a time."""
    if order == "contiguous":
        places = iter(range(n))
        return [[[next(places) for _ in range(count)]] for count in lengths]
    sizes = [n // (2 * world) + (part < n % (2 * world)) for part in range(2 * world)]
    places = iter(range(n))
    parts = [[next(places) for _ in range(size)] for size in sizes]
    return [[parts[rank], parts[2 * world - 1 - rank]] for rank in range(world)]


def heads_of(total: int, kv: int, world: int) -> list[tuple[list[int], list[int]]]:
    """The query heads of each rank, and the key-value heads that they read, where ranks take whole groups first."""
    group = total // kv
    if world <= kv:
        sizes = [kv // world + (rank < kv % world) for rank in range(world)]
        groups = iter(range(kv))
        dealt = [[next(groups) for _ in range(size)] for size in sizes]
        return [([g * group + m for g in own for m in range(group)], own) for own in dealt]
    own: list[tuple[list[int], list[int]]] = []
    for g in range(kv):
        ranks = world // kv + (g < world % kv)
        members = iter(range(group))
        for rank in range(ranks):
            size = group // ranks + (rank < group % ranks)
            heads = [g * group + next(members) for _ in range(size)]
            own.append((heads, [g] if heads else []))
    return own


def seen_hull(allowed: Tensor, rows: list[list[int]], keys: list[int]) -> int:
    """How many keys of a stretch lie from the first to the last that some query of a rank sees."""
    seen = [j for j in keys if any(bool(allowed[i, j]) for own in rows for i in own)]
    return max(seen) - min(seen) + 1 if seen else 0


def expected(case: Case, world: int, rank: int) -> dict[str, tuple[int, int]]:
    """Of each layout the bytes that a rank sends forward and backward, in float32."""
    T, S, (H, K) = sum(case.queries), sum(case.keys), case.heads
    allowed = MASKS[case.mask]().allowed(T, S)
    allowed = torch.ones(T, S, dtype=torch.bool) if allowed is None else allowed.expand(1, 1, T, S)[0, 0]
    rows = stretches_of(T, world, case.order, case.queries)
    cols = stretches_of(S, world, case.order, case.keys)
    others = [other for other in range(world) if other != rank]
    out = sum(seen_hull(allowed, rows[other], part) for other in others for part in cols[rank])
    home = sum(seen_hull(allowed, rows[rank], part) for other in others for part in cols[other])
    of_keys = B * K * (D + V) * 4
    own_q, own_k = (sum(map(len, side[rank])) for side in (rows, cols))
    heads = heads_of(H, K, world)
    to_heads = sum(own_q * len(heads[other][0]) * D + own_k * len(heads[other][1]) * (D + V) for other in others)
    to_tokens = sum(sum(map(len, rows[other])) * len(heads[rank][0]) for other in others)
    back = 0
    for other in others:
        theirs_q, theirs_k = (sum(map(len, side[other])) for side in (rows, cols))
        back += theirs_q * len(heads[rank][0]) * D + theirs_k * len(heads[rank][1]) * (D + V)
    upstream = sum(own_q * len(heads[other][0]) for other in others)
    width = V + case.lse
    return {
        "ring": (out * of_keys, (out + home) * of_keys),
        "gather": (own_k * len(others) * of_keys, (own_k * len(others) + S - own_k) * of_keys),
        "ulysses": (B * 4 * (to_heads + to_tokens * width), B * 4 * (back + upstream * width)),
    }


def counted(case: Case) -> dict[str, tuple[int, int]]:
    """The same as the ranks count it."""
    comm, rank, (H, K) = Comm.of(), dist.get_rank(), case.heads
    make, result = torch.Generator().manual_seed(rank), {}
    for layout in ("ring", "gather", "ulysses"):
        q, k, v = (
            torch.randn(B, heads, n, width, generator=make).requires_grad_()
            for heads, n, width in ((H, case.queries[rank], D), (K, case.keys[rank], D), (K, case.keys[rank], V))
        )
        before = _data(comm)
        options: dict[str, Any] = {"mask": MASKS[case.mask](), "layout": layout, "order": case.order}
        out = context_parallel(q, k, v, return_lse=case.lse, **options)
        forward = _data(comm) - before
        loss = sum(x.masked_fill(x == -torch.inf, 0.0).sum() for x in out) if case.lse else out.sum()
        torch.autograd.backward(loss)
        result[layout] = (forward, _data(comm) - before - forward)
    return result


def _data(comm: Comm) -> int:
    sent: Counter[str] = comm.sent
    return sum(count for kind, count in sent.items() if kind != "agree")


def compare(cases: list[Case]) -> list[str]:
    """Where the bytes differ."""
    wrong = []
    for case in cases:
        theirs, ours = expected(case, dist.get_world_size(), dist.get_rank()), counted(case)
        if theirs != ours:
            wrong.append(f"{case}: {ours} sent, {theirs} needed")
    return wrong
