"""Bytes between ranks: the closed forms against every token sent one at a time, by the definitions of the docstring."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mask_cases
import pytest
import torch

from headwise import Mask, blocks, causal, window
from headwise.parallel.context_layouts.layout_costs import explain, mesh_call_of
from headwise.plan.ranks import communication as links
from headwise.plan.ranks.communication import LAYOUTS, Link, bytes_sent, decode_sent, layout_cost, layout_costs
from headwise.plan.ranks.sharding import (
    MeshCall,
    head_shares,
    keys_by_rank,
    keys_sent,
    order_of,
    places,
    remote_keys,
    shard_ranges,
    shares,
)

pytestmark = pytest.mark.unchecked
SIZES: dict[str, Any] = dict(heads=6, kv_heads=3, head_dim=5, value_dim=7, number_bytes=2)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"right": None},
    "window": {"left": 4},
    "wide": {"left": 17},
    "both": {"left": 3, "right": 3},
    "chunk": {"chunk": 6},
}


def sees(call: MeshCall, i: int, j: int) -> bool:
    """Whether query i sees key j, by the definition."""
    at = i + call.cached
    if call.chunk is not None and j // call.chunk != at // call.chunk:
        return False
    near = call.left is None or at - j <= call.left
    return near and (call.right is None or j - at <= call.right)


def cases() -> Iterator[tuple[MeshCall, int, str]]:
    """Masks, lengths and numbers of ranks, where every rank has a query."""
    dice = random.Random(3)
    for mask in MASKS.values():
        for ranks in (1, 2, 3, 5):
            for cached in (0, dice.randint(1, 19)):
                queries = dice.randint(2 * ranks, 31)
                call = MeshCall(queries, queries + cached, **SIZES, **mask)
                for order in {"contiguous", order_of(call, ranks)}:
                    yield call, ranks, order


def owners(call: MeshCall, ranks: int, order: Any) -> tuple[list[int], list[int]]:
    """The rank of each query and of each key."""
    of_query = [0] * call.queries
    for r, part in enumerate(places(call.queries, ranks, order)):
        for start, stop in part:
            of_query[start:stop] = [r] * (stop - start)
    old = [r for r, (a, b) in enumerate(shard_ranges(call.cached, ranks)) for _ in range(a, b)]
    return of_query, old + of_query


def differences(what: Callable[[MeshCall, int, str], tuple[Any, Any]]) -> list[str]:
    """The cases whose two numbers differ."""
    faults = []
    for call, ranks, order in cases():
        ours, slow = what(call, ranks, order)
        if ours != slow:
            faults.append(f"{ranks} ranks, {order}, {call}: {ours}, one at a time {slow}")
    return faults


def test_keys_that_others_see_are_counted_one_at_a_time() -> None:
    def both(call: MeshCall, ranks: int, order: Any) -> tuple[Any, Any]:
        of_query, of_key = owners(call, ranks, order)
        seen = {(r, j) for i, r in enumerate(of_query) for j, k in enumerate(of_key) if k != r and sees(call, i, j)}
        counts = Counter(r for r, _ in seen)
        return remote_keys(call, ranks, order), tuple(counts[r] for r in range(ranks))

    assert differences(both) == []


def test_keys_go_to_each_rank_that_sees_them() -> None:
    def both(call: MeshCall, ranks: int, order: Any) -> tuple[Any, Any]:
        of_query, of_key = owners(call, ranks, order)
        counts = [0] * ranks
        for j, owner in enumerate(of_key):
            counts[owner] += len({r for i, r in enumerate(of_query) if r != owner and sees(call, i, j)})
        return keys_sent(call, ranks, order), tuple(counts)

    assert differences(both) == []


def test_the_work_of_each_rank_is_counted_pair_by_pair() -> None:
    def both(call: MeshCall, ranks: int, order: Any) -> tuple[Any, Any]:
        of_query, of_key = owners(call, ranks, order)
        seen = [(r, k) for i, r in enumerate(of_query) for j, k in enumerate(of_key) if sees(call, i, j)]
        by_query = Counter(r for r, _ in seen)
        ours = [links.pairs(call, ranks, "ring", order)]
        slow = [tuple(6 * by_query[r] for r in range(ranks))]
        heads = [share.heads for share in head_shares(6, 3, ranks)]
        ours.append(links.pairs(call, ranks, "ulysses"))
        slow.append(tuple(count * len(seen) for count in heads))
        return ours, slow

    assert differences(both) == []


def test_an_all_to_all_is_counted_number_by_number() -> None:
    """Each query head of each token goes to the rank of the head, each key-value head to all that read it."""
    for ranks in (1, 2, 3, 4, 5, 6, 8):
        call = MeshCall(29, 29 + 11, **SIZES)
        of_query, of_key = owners(call, ranks, "zigzag")
        of_head = head_shares(6, 3, ranks)
        there, back = [0] * ranks, [0] * ranks
        grads_there, grads_back = [0] * ranks, [0] * ranks
        for h in range(6):
            [rank] = [r for r, share in enumerate(of_head) if share.query[0] <= h < share.query[1]]
            assert of_head[rank].kv[0] <= h // 2 < of_head[rank].kv[1]
            for owner in of_query:
                if owner != rank:
                    there[owner] += 2 * 5
                    back[rank] += 2 * 7
                    grads_there[owner] += 2 * 7
                    grads_back[rank] += 2 * 5
        for k in range(3):
            readers = [r for r, share in enumerate(of_head) if share.kv[0] <= k < share.kv[1]]
            for owner in of_key:
                for r in readers:
                    if r != owner:
                        there[owner] += 2 * (5 + 7)
                        grads_back[r] += (2 if ranks <= 3 else 4) * (5 + 7)
        assert bytes_sent(call, "ulysses", ranks) == tuple(map(sum, zip(there, back, strict=True)))
        assert bytes_sent(call, "ulysses", ranks, backward=True) == tuple(
            map(sum, zip(grads_there, grads_back, strict=True))
        )


def test_heads_are_cut_into_whole_groups_or_into_parts_of_one() -> None:
    for heads, kv_heads in ((8, 8), (8, 4), (12, 3), (8, 1), (7, 7), (6, 2)):
        for ranks in range(1, 14):
            shares = head_shares(heads, kv_heads, ranks)
            assert len(shares) == ranks
            assert [h for share in shares for h in range(*share.query)] == list(range(heads))
            for share in shares:
                read = {h * kv_heads // heads for h in range(*share.query)}
                assert read == set(range(*share.kv)) and share.heads == len(range(*share.query))
    assert [share.kv[0] for share in head_shares(8, 2, 8)] == [r * 2 // 8 for r in range(8)]


def test_the_bytes_of_a_layout_are_its_numbers_times_their_size() -> None:
    call = MeshCall(31, 31, **SIZES, batch=3)
    kv = 3 * (5 + 7)
    ring = keys_sent(call, 4)
    assert bytes_sent(call, "ring", 4) == tuple(3 * 2 * kv * n for n in ring)
    home = remote_keys(call, 4)
    assert bytes_sent(call, "ring", 4, backward=True) == tuple(
        3 * kv * (2 * n + 4 * back) for n, back in zip(ring, home, strict=True)
    )
    own = keys_by_rank(call, 4)
    assert sum(own) == 31
    assert bytes_sent(call, "gather", 4) == tuple(3 * 2 * kv * 3 * n for n in own)
    assert bytes_sent(call, "gather", 4, backward=True) == tuple(3 * kv * (2 * 3 * n + 4 * (31 - n)) for n in own)
    latent = MeshCall(32, 32, **SIZES, latent=11)
    assert bytes_sent(latent, "gather", 4) == (8 * 3 * 11 * 2,) * 4
    assert bytes_sent(latent, "ulysses", 2)[0] == 2 * (16 * 3 * 5 + 16 * 11 + 16 * 3 * 7) - 2 * 16 * (4 - 3) * (5 - 7)
    # On the way back gradients of latent vectors come from all ranks, and are summed in float32.
    assert bytes_sent(latent, "ulysses", 2, backward=True)[0] == 2 * (16 * 2 * 7 + 16 * 4 * 5) + 4 * 16 * 11


def test_the_formulas_of_the_field_are_met_where_all_divides() -> None:
    """Facts of issue 16: ring and gather (N-1) T/N 2K D e; all-to-all (N-1)/N T/N (2H + 2 max(K, N)) D e."""
    T, H, K, D, e = 64, 8, 4, 16, 2
    for N in (2, 4, 8):
        call = MeshCall(T, T, H, K, D, D, e, right=None)
        assert (
            set(bytes_sent(call, "ring", N)) == set(bytes_sent(call, "gather", N)) == {(N - 1) * T // N * 2 * K * D * e}
        )
        assert set(bytes_sent(call, "ulysses", N)) == {(N - 1) * (T // N) * (2 * H + 2 * max(K, N)) * D * e // N}
        assert set(links.all_reduce(T * 96, N)) == {2 * (N - 1) * T * 96 // N}
        window = MeshCall(T, T, H, K, D, D, e, left=5)
        assert max(bytes_sent(window, "ring", N)) == 5 * 2 * K * D * e  # whatever N
    causal = MeshCall(T, T, H, K, D, D, e)
    assert bytes_sent(causal, "ring", 4)[3] == 3 * T // 4 * 2 * K * D * e


def test_a_decoded_token_merges_partial_outputs() -> None:
    call = MeshCall(1, 101, 8, 2, 16, 12, 2, batch=3)
    parts, merged = 18 * (12 * 4 + 4), 3 * 6 * 12 * 2  # of 24 rows six are each rank's
    assert decode_sent(call, 4) == (parts + merged,) * 4
    assert decode_sent(call, 4, owners=1) == (parts + merged, *(merged,) * 3)


def test_prices_are_sorted_by_time_and_overlap_where_they_may() -> None:
    call = MeshCall(8192, 8192, 32, 8, 128, 128)
    costs = layout_costs(call, 4, link=Link(50e9, 2e-6), flop_rate=1e14)
    assert [cost.seconds for cost in costs] == sorted(cost.seconds or 0 for cost in costs)
    assert {cost.layout for cost in costs} == set(LAYOUTS)
    ring = layout_cost(call, "ring", 4, link=Link(50e9, 2e-6), flop_rate=1e14)
    assert ring.link_seconds == ring.bytes / 50e9 + 3 * 2e-6 and ring.messages == 3
    assert ring.compute_seconds == 2 * ring.pairs * 256 / 1e14 and ring.seconds == max(
        ring.link_seconds, ring.compute_seconds
    )
    around = layout_cost(call, "ulysses", 4, link=Link(50e9, 2e-6), flop_rate=1e14)
    assert around.seconds == (around.link_seconds or 0) + (around.compute_seconds or 0)
    back = layout_cost(call, "ring", 4, link=Link(50e9, 2e-6), flop_rate=1e14, backward=True)
    assert back.compute_seconds == 2 * back.pairs * 5 * 128 / 1e14
    many = [layout_cost(replace(call, batch=3), name, 4, link=Link(50e9), flop_rate=1e14) for name in LAYOUTS]
    alone = [layout_cost(call, name, 4, link=Link(50e9), flop_rate=1e14) for name in LAYOUTS]
    for three, one in zip(many, alone, strict=True):
        assert three.compute_seconds == pytest.approx(3 * (one.compute_seconds or 0), rel=1e-12)
        assert three.link_seconds == pytest.approx(3 * (one.link_seconds or 0), rel=1e-12)
    assert layout_cost(call, "ring", 4).seconds is None and layout_cost(call, "ring", 1).bytes == 0
    assert layout_costs(call, 4)[0].bytes == min(cost.bytes for cost in layout_costs(call, 4))


def test_explained_layouts_are_sorted_by_time_where_there_is_a_link() -> None:
    """On a link of 1 ms the three messages of `ring` cost more than the bytes of `ulysses`."""
    query, key = (torch.empty(1, heads, 64, 128, device="meta") for heads in (32, 8))
    orders = [
        [cost.layout for cost in explain(query, key, key, ranks=4, mask=causal(), link=link).costs]
        for link in (None, Link(50e9, 1e-3))
    ]
    assert orders == [["ring", "gather", "ulysses"], ["gather", "ulysses", "ring"]]


def test_explained_is_what_auto_takes_whatever_the_link() -> None:
    """It goes by the bytes of a forward; backward another layout sends fewest."""
    query, key = (torch.empty(1, heads, 512, 128, device="meta") for heads in (32, 32))
    explained = [
        explain(query, key, key, ranks=2, mask=causal(), link=link, backward=backward)
        for link in (None, Link(50e9, 1e-3))
        for backward in (False, True)
    ]
    assert [one.layout for one in explained] == ["ring", "ulysses", "ring", "ulysses"]
    assert {one.auto for one in explained} == {"ring"}
    assert all("; `auto` takes ring" in str(one) for one in explained)


def test_zigzag_makes_causal_work_even() -> None:
    """As issue 16's facts say: the busiest of 8 has 1.875 times the mean in one stretch, 1.0 in zigzag."""
    call = MeshCall(8192, 8192, 1, 1, 4, 4)
    mean = call.pairs(8192) / 8
    assert round(max(links.pairs(call, 8, order="contiguous")) / mean, 3) == 1.875
    assert round(max(links.pairs(call, 8)) / mean, 3) == 1.0
    window = MeshCall(8192, 8192, 1, 1, 4, 4, left=511)
    assert round(max(links.pairs(window, 8)) / (window.pairs(8192) / 8), 2) == 1.03


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: MeshCall(0, 5, 4, 2, 8, 8), "queries is at least 1; got 0"),
    (lambda: MeshCall(5, 4, 4, 2, 8, 8), "keys is at least queries; got 4 keys and 5 queries"),
    (lambda: MeshCall(5, 5, 4, 3, 8, 8), "heads must be a multiple of kv_heads; got 4 and 3"),
    (
        lambda: MeshCall(5, 5, 4, 2, 8, 8, left=2, right=1),
        "a mask is causal (right = 0), symmetric (right = left), or",
    ),
    (lambda: MeshCall(5, 5, 4, 2, 8, 8, left=-1), "left is at least 1; got -1"),
    (
        lambda: bytes_sent(MeshCall(5, 5, 4, 2, 8, 8), "star", 2),
        "layout is one of ring, gather, ulysses; got 'star'",
    ),  # type: ignore[arg-type]
    (lambda: bytes_sent(MeshCall(5, 5, 4, 2, 8, 8), "ring", 0), "ranks is at least 1; got 0"),
    (lambda: bytes_sent(MeshCall(5, 5, 4, 2, 8, 8), "ring", 2, order="x"), "order is contiguous or zigzag; got 'x'"),  # type: ignore[arg-type]
    (
        lambda: bytes_sent(MeshCall(5, 5, 4, 2, 8, 8, left=2), "ring", 2, order="zigzag"),
        "zigzag is for causal attention without",
    ),
    (lambda: decode_sent(MeshCall(1, 5, 4, 2, 8, 8), 2, owners=3), "owners is at most ranks; got 3 of 2"),
]


@pytest.mark.parametrize(("call", "text"), WRONG, ids=[text[:30] for _, text in WRONG])
def test_what_cannot_be_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(text)


def test_shares_of_nothing_and_of_less_than_one_each() -> None:
    assert shares(0, 3) == (0, 0, 0) and shares(2, 3) == (1, 1, 0)
    call = MeshCall(2, 2, **SIZES)
    assert order_of(call, 3) == "contiguous"
    assert keys_sent(call, 3) == (1, 0, 0) and remote_keys(call, 3) == (0, 1, 0)


@pytest.mark.parametrize(
    ("mask", "bounds"),
    [
        (causal(), (None, 0, None)),
        (window(3), (2, 0, None)),
        (window(3, offset=2), (2, 0, None)),  # where the queries stand anyhow
        (window(3, offset=1), (None, None, None)),
        (window(3, offset=12), (None, None, None)),
        (window(1), (1, 0, None)),
        (window(3, 1), (2, 2, None)),  # as wide on both sides
        (window(6) & window(4), (3, 0, None)),
        (blocks(4) & causal(), (None, 0, 4)),
        (blocks(4, offset=2) & window(3), (None, 0, 4)),
        (blocks(4, offset=12) & causal(), (None, 0, None)),
        (blocks(4), (None, None, None)),
    ],
    ids=str,
)
def test_a_priced_call_contains_what_its_mask_allows(mask: Mask, bounds: tuple[int | None, ...]) -> None:
    """Five queries behind two keys."""
    call = mesh_call_of(mask, 5, 7, heads=2, kv_heads=1, head_dim=3, value_dim=3)
    assert (call.left, call.right, call.chunk) == bounds


def test_messages_one_after_another() -> None:
    """Of one rank none; N - 1 in a ring or as many as a halo reaches, log2 N in a gather, one in each all-to-all."""
    call = MeshCall(64, 64, 4, 2, 10, 10)
    halo = replace(call, left=9)
    for ranks, ring, gather, there in ((1, 0, 0, 0), (2, 1, 1, 2), (5, 4, 3, 2), (8, 7, 3, 2)):
        assert [links.message_count(call, "ring", ranks, backward=more) for more in (False, True)] == [ring, 2 * ring]
        assert links.message_count(call, "gather", ranks) == gather
        assert links.message_count(call, "ulysses", ranks) == there
        assert links.message_count(halo, "ring", ranks) == min(ranks - 1, 2 if ranks == 8 else 1)


@pytest.mark.parametrize("name", mask_cases.MASKS)
def test_every_mask_has_a_price(name: str) -> None:
    """Also where a tensor places each row of the batch: then it is that of a mask that contains it."""
    for n in (mask_cases.SHORT, mask_cases.SQUARE):
        query, key = (torch.empty(n.B, heads, length, n.D, device="meta") for heads, length in ((n.H, n.T), (n.K, n.S)))
        assert explain(query, key, key, ranks=2, mask=mask_cases.MASKS[name](n).mask).costs


def test_offsets_at_the_end_cost_what_none_cost() -> None:
    query = torch.empty(2, 4, 64, 8, device="meta")
    for make in (lambda at: window(4, offset=at), lambda at: causal() & blocks(8, offset=at)):
        offsets = (None, torch.tensor([0, 0]), torch.tensor([3, 5]), torch.tensor([0, 0], device="meta"))
        whole, same, apart, unknown = (explain(query, query, query, ranks=2, mask=make(x)).costs for x in offsets)
        assert same == whole and unknown == apart and min(x.bytes for x in apart) > min(x.bytes for x in whole)
