"""The native kernel's statistics: the same bits always, what may not be attended, and what the operators refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import BEST, instructions, natives, needs_native
from draw import drawn
from mask_cases import MASKS, Sizes
from native_cases import collected, native_dtypes
from statistics_cases import NUMBERS, extras, inputs, seen
from test_invariance import threads
from test_native_sizes import far_apart
from torch import Tensor

import headwise
from headwise import Mask
from headwise.ops.statistics import RowStatistics, attention_statistics, row_statistics, statistics
from headwise.testing import STRIDES, assert_same_bits, make_qkv, poison, strided

# Thousands of calls, of which the shape checker would take a third of the time; it sees such in test_statistics.py.
pytestmark = [needs_native, pytest.mark.unchecked]
best = pytest.mark.parametrize("backend", BEST)


@pytest.fixture(autouse=True)
def never_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that went the other way would be tested for nothing."""
    monkeypatch.setattr(
        "headwise.ops.statistics.blockwise.measure_in_blocks", lambda request: pytest.fail("not the kernel")
    )


# -- the same bits ---------------------------------------------------------------------------------------------------


def every_number(result: RowStatistics) -> dict[str, Tensor]:
    numbers = {name: x for name, x in vars(result).items() if isinstance(x, Tensor)}
    numbers |= {f"feature {name}": x for name, x in result.features.items()}
    return numbers | {f"target {name}": x for name, x in result.targets.items()}


def all_bits(result: RowStatistics) -> Tensor:
    """Of all its numbers, in a row: to compare them one by one takes as long as to compute them."""
    return torch.cat([x.flatten().view(torch.uint8) for x in every_number(result).values()])


def same(ours: RowStatistics, theirs: RowStatistics, rows: Any = ...) -> None:
    for (name, x), y in zip(every_number(ours).items(), every_number(theirs).values(), strict=True):
        assert_same_bits(x, y[rows], what=name)


def asked_of(n: Sizes, query: Tensor, key: Tensor, mask: Mask | None) -> list[RowStatistics]:
    features, targets = extras(n)
    options: dict[str, Any] = {
        "mask": mask,
        "features": features,
        "targets": targets,
        "sinks": torch.linspace(-1, 1, n.H),
    }
    return [statistics(query, key, **options), row_statistics(query, key, **options)]


@native_dtypes
def test_any_number_of_threads(backend: str, dtype: torch.dtype) -> None:
    n = Sizes(2, 6, 2, 211, 307, 40, 24)
    query, key = inputs(n, dtype)
    masks = {name: MASKS[name](n).mask for name in ("causal", "window 3", "keep TS", "alibi")}
    with instructions(backend), collected() as attempt:
        for name, mask in masks.items():
            with threads(1):
                one = asked_of(n, query, key, mask)
            for count in (2, 3, 4, 8):
                with threads(count):
                    for ours, theirs in zip(asked_of(n, query, key, mask), one, strict=True):
                        attempt((name, count), same, ours, theirs)


@native_dtypes
def test_a_thousand_times(backend: str, dtype: torch.dtype) -> None:
    n = Sizes(1, 2, 1, 70, 131, 16, 16)
    query, key = inputs(n, dtype)
    with instructions(backend):
        first = statistics(query, key, mask=headwise.causal())
        same(statistics(query, key, mask=headwise.causal()), first)
        wanted = all_bits(first)
        for _ in drawn(range(1000 if backend in BEST else 100)):
            assert torch.equal(all_bits(statistics(query, key, mask=headwise.causal())), wanted)


@native_dtypes
@pytest.mark.parametrize("T", [1, 67])
def test_a_row_alone_is_the_row_in_the_batch(backend: str, dtype: torch.dtype, T: int) -> None:
    n = Sizes(3, 4, 2, T, 131, 24, 24)
    query, key = inputs(n, dtype)
    mask = headwise.causal()
    with instructions(backend):
        whole = statistics(query, key, mask=mask)
        for b in range(n.B):
            same(statistics(query[b : b + 1], key[b : b + 1], mask=mask), whole, slice(b, b + 1))
        pair = statistics(query[:, 2:], key[:, 1:], mask=mask)
        same(pair, whole, (slice(None), slice(2, None)))


@native_dtypes
def test_any_strides(backend: str, dtype: torch.dtype) -> None:
    n = Sizes(2, 6, 3, 53, 67, 24, 20)
    plain = dict(zip(("query", "key", "value"), make_qkv(*n, dtype=dtype), strict=True))

    def results(name: str, x: Tensor) -> tuple[Tensor, RowStatistics, RowStatistics | None]:
        """out and the statistics beside it; those with what keys receive, where x is not the value."""
        qkv = {**plain, name: x}
        out, rows = attention_statistics(**qkv, mask=headwise.causal())
        return out, rows, None if name == "value" else statistics(qkv["query"], qkv["key"])

    with instructions(backend), collected() as attempt:
        usual = results("query", plain["query"])  # most layouts keep the values, and so all results
        for name, x in plain.items():
            for pattern in drawn(STRIDES):
                odd = strided(x, pattern)
                ours = results(name, odd)
                theirs = usual if torch.equal(odd, x) else results(name, odd.contiguous())
                attempt((name, pattern), assert_same_bits, ours[0], theirs[0])
                attempt((name, pattern), same, ours[1], theirs[1])
                if name != "value":
                    attempt((name, pattern, "received"), same, ours[2], theirs[2])


@natives
def test_offsets_beyond_2_to_the_31(backend: str) -> None:
    """Of query, key and value along any axis: the same bits as near by."""
    near = dict(zip(("query", "key", "value"), make_qkv(2, 4, 2, 13, 19, 8, 8), strict=True))
    with instructions(backend), collected() as attempt:
        out, expected = attention_statistics(**near, mask=headwise.causal())
        whole = statistics(near["query"], near["key"], mask=headwise.causal())
        for name, x in near.items():
            for dim in range(4):
                far = {**near, name: far_apart(x, dim)}
                ours, result = attention_statistics(**far, mask=headwise.causal())
                attempt((name, dim), assert_same_bits, ours, out)
                attempt((name, dim), same, result, expected)
                sums = statistics(far["query"], far["key"], mask=headwise.causal())
                attempt((name, dim, "received"), same, sums, whole)


# -- what may not be attended, and what may --------------------------------------------------------------------------

POISONS = (math.nan, math.inf, -math.inf, 1e4, 1e30)
N = Sizes(2, 4, 2, 67, 131, 24, 17)
HIDDEN = torch.arange(N.S) >= 101
HIDES: dict[str, Callable[[], Mask]] = {
    "lengths": lambda: headwise.lengths(torch.tensor([101, 101])),
    "keep": lambda: headwise.keep(~HIDDEN & (torch.rand(N.T, N.S, generator=torch.Generator().manual_seed(1)) > 0.3)),
    "bias": lambda: headwise.bias(torch.zeros(N.S).masked_fill(HIDDEN, -math.inf).view(1, 1, 1, -1)),
    "segments": lambda: headwise.segments(torch.zeros(N.T, dtype=torch.long), HIDDEN.long()),
    "causal": lambda: headwise.causal(offset=N.S - N.T - 30),
}


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("name", HIDES)
def test_what_may_not_be_attended_changes_no_bit(backend: str, dtype: torch.dtype, name: str) -> None:
    qkv, mask = make_qkv(*N, dtype=dtype), HIDES[name]()
    features = {"f": torch.linspace(0, 1, N.S)}
    hidden = HIDDEN[:, None].expand(N.B, N.K, N.S, 1)
    assert not bool((seen(mask, N) & HIDDEN).any())
    with instructions(backend), collected() as attempt:
        both, alone = attention_statistics(*qkv, mask=mask, features=features), statistics(*qkv[:2], mask=mask)
        for what in POISONS:
            q, k, v = qkv[0], poison(qkv[1], hidden, what), poison(qkv[2], hidden, what)
            spoilt = {"f": features["f"].masked_fill(HIDDEN, what)} if math.isfinite(what) else features
            out, result = attention_statistics(q, k, v, mask=mask, features=spoilt)
            attempt((what, "out"), assert_same_bits, out, both[0])
            attempt(what, same, result, both[1])
            attempt((what, "received"), same, statistics(q, k, mask=mask), alone)


@native_dtypes
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_shows_where_it_may_be_attended(backend: str, dtype: torch.dtype, what: float) -> None:
    """In a key: in the rows that may attend it. In a value: in their output alone. In a query: in its own row."""
    n, mask = Sizes(1, 2, 1, 67, 131, 24, 17), headwise.window(40)
    q, k, v = make_qkv(*n, dtype=dtype)
    rows = (seen(mask, n)[..., 99]).expand(1, 2, 67)
    assert rows.any() and not rows.all()
    with instructions(backend):
        clean = statistics(q, k, mask=mask, pool=131)
        k_bad, v_bad = k.clone(), v.clone()
        k_bad[0, 0, 99, 3], v_bad[0, 0, 99, 3] = what, what
        result = statistics(q, k_bad, mask=mask, pool=131)
        for name in ("entropy", "largest", "distance", "sink"):
            assert torch.equal(getattr(result, name).isnan(), rows), name
            assert_same_bits(getattr(result, name)[~rows], getattr(clean, name)[~rows], what=name)
        assert torch.equal(result.pooled.isnan().any(-1), rows)
        assert torch.equal(result.received.isnan(), (seen(mask, n) & rows[..., None]).any(2))
        assert torch.equal(result.keys, clean.keys) and torch.equal(result.rows, clean.rows)

        out, other = attention_statistics(q, k, v_bad, mask=mask, pool=131)
        assert torch.equal(out.isnan().all(-1), rows) and torch.equal(out.isnan().any(-1), rows)
        for name in NUMBERS:
            assert_same_bits(getattr(other, name), getattr(clean, name), what=f"{name} beside a bad value")

        q_bad = q.clone()
        q_bad[0, 1, 30, 5] = what
        own = torch.zeros_like(rows)
        own[0, 1, 30] = True
        spoilt = statistics(q_bad, k, mask=mask, pool=131)
        assert torch.equal(spoilt.entropy.isnan(), own) and torch.equal(spoilt.pooled.isnan().any(-1), own)
        assert torch.equal(spoilt.received.isnan(), (seen(mask, n) & own[..., None]).any(2))


@natives
def test_a_row_that_attends_nothing_tells_nothing(backend: str) -> None:
    query, key = torch.full((1, 2, 3, 4), math.nan), torch.randn(1, 1, 5, 4)
    with instructions(backend):
        out, result = attention_statistics(query, key, key, mask=headwise.keep(torch.zeros(3, 5, dtype=torch.bool)))
        whole = statistics(query, key, mask=headwise.keep(torch.zeros(3, 5, dtype=torch.bool)))
    assert (
        out.eq(0).all() and result.rows.eq(0).all() and result.largest_key.eq(-1).all() and whole.received.eq(0).all()
    )
    for name in ("entropy", "largest", "distance", "keys", "sink", "offsets", "pooled", "pooled_rows"):
        assert getattr(result, name).eq(0).all(), name


def test_features_that_are_no_numbers_go_by_the_second_pass() -> None:
    query, key = inputs(Sizes(1, 2, 2, 9, 9, 4, 4))
    mask = headwise.lengths(torch.tensor([7]))
    hidden = torch.ones(9).masked_fill(torch.arange(9) >= 7, math.nan)
    result = row_statistics(query, key, mask=mask, features={"hidden": hidden, "met": 1 / hidden.roll(-1)})
    assert torch.allclose(result.features["hidden"], torch.ones(1, 2)) and result.features["met"].isnan().all()


# -- the operators ---------------------------------------------------------------------------------------------------

FAR = 1 << 40
RULES = (0.5, 0.0, None, -FAR, FAR, None, None, None, None, None, None)


def rows_op(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "query": torch.randn(2, 4, 5, 16), "key": torch.randn(2, 2, 7, 16), "value": torch.randn(2, 2, 7, 8),
        "picks": torch.zeros(1, 5, 3, dtype=torch.long), "slots": torch.tensor([0, 1, 1]), "sums": 2,
        "features": torch.randn(2, 7, 3), "bins": 4, "query_bins": 3,
    }  # fmt: skip
    assert set(changes) <= set(arguments)
    query, key, value, *rest = (arguments | changes).values()
    return torch.ops.headwise.attend_statistics(query, key, value, *RULES, *rest)


def keys_op(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "query": torch.randn(2, 4, 5, 16), "key": torch.randn(2, 2, 7, 16), "top": torch.zeros(2, 4, 5),
        "largest": torch.ones(2, 4, 5),
    }  # fmt: skip
    assert set(changes) <= set(arguments)
    return torch.ops.headwise.attend_received(*(arguments | changes).values(), *RULES)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"picks": torch.zeros(1, 5, 3)}, "picks must be int64"),
        ({"picks": torch.zeros(5, 3, dtype=torch.long)}, "picks must have 3 axes"),
        ({"picks": torch.zeros(3, 5, 3, dtype=torch.long)}, r"picks must be \(B or 1, T, n\), got \(3, 5, 3\)"),
        ({"picks": torch.zeros(1, 4, 3, dtype=torch.long)}, "picks must be"),
        ({"slots": None}, "picks need slots"),
        ({"slots": torch.tensor([0, 1])}, "one for each column of picks"),
        ({"slots": torch.tensor([0, 1, 2])}, "slots must lie between 0 and sums - 1"),
        ({"slots": torch.tensor([0, 1, -1])}, "slots must lie between"),
        ({"slots": torch.zeros(6, dtype=torch.long)[::2]}, "slots must be contiguous"),
        ({"sums": -1}, "sums must lie between"),
        ({"sums": 1 << 40}, "sums must lie between"),
        ({"features": torch.randn(2, 7, 3).double()}, "features: a wrong dtype"),
        ({"features": torch.randn(7, 3)}, "features must have 3 axes"),
        ({"features": torch.randn(2, 6, 3)}, "features must be"),
        ({"features": torch.randn(2, 3, 7).mT}, "rows of features must be contiguous"),
        ({"bins": -1}, "bins must lie between 0 and the number of keys"),
        ({"bins": 8}, "bins must lie between 0 and the number of keys"),
        ({"query_bins": 0}, "query_bins must lie between 1 and the number of queries"),
        ({"query_bins": 6}, "query_bins must lie between 1 and the number of queries"),
        ({"key": torch.randn(2, 2, 7, 15)}, "do not fit"),
        ({"key": torch.randn(2, 2, 7, 16).half(), "value": None}, "one dtype"),
    ],
)
def test_refused_by_the_pass_over_rows(changes: dict[str, Any], why: str) -> None:
    rows_op()
    with pytest.raises(RuntimeError, match=why):
        rows_op(**changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"top": torch.zeros(2, 4, 6)}, r"top must be \(B, H, T\) and contiguous"),
        ({"top": torch.zeros(4, 5)}, "top must have 3 axes"),
        ({"largest": torch.zeros(2, 4, 5).double()}, "largest: a wrong dtype"),
        ({"largest": torch.zeros(2, 5, 4).mT}, r"largest must be \(B, H, T\) and contiguous"),
        ({"key": torch.randn(2, 3, 7, 16)}, "a multiple of key heads"),
    ],
)
def test_refused_by_the_pass_over_keys(changes: dict[str, Any], why: str) -> None:
    keys_op()
    with pytest.raises(RuntimeError, match=why):
        keys_op(**changes)


def test_picks_beyond_the_keys_are_nobodys() -> None:
    picks = torch.tensor([[-1, 99, -(1 << 62)]] * 5)[None]
    assert rows_op(picks=picks, features=None)[4].eq(0).all()


def test_picks_beside_those_that_are_nobodys() -> None:
    """A key far beyond the last changes nothing for another row of the block, whatever is left of it in 32 bits."""
    query, key, _ = make_qkv(2, 4, 2, 5, 300, 16, 8)
    picks = torch.tensor([7, 130, 200, 299, 1])[None, :, None].expand(1, 5, 3).contiguous()
    call = {"query": query, "key": key, "value": None, "features": None, "slots": torch.tensor([0, 0, 1])}
    for far in (1 << 32, (1 << 32) + 150, (1 << 31) - 1, 1 << 31, -(1 << 32), 300, -1):
        for row in range(5):
            other, none = picks.clone(), picks.clone()
            other[:, row], none[:, row] = far, -1
            ours, wanted = rows_op(picks=other, **call)[4], rows_op(picks=none, **call)[4]
            assert_same_bits(ours, wanted, what=f"{far}")
            assert ours[..., :2].gt(0).all() and ours[..., 2:].eq(4).all()


def test_torch_knows_the_operators() -> None:
    """Their shapes without data, and that they change none of their inputs."""
    q, k, v = make_qkv(2, 4, 2, 5, 7, 16, 8)
    picks, slots = torch.zeros(1, 5, 3, dtype=torch.long), torch.tensor([0, 1, 1])
    utils = ("test_schema", "test_faketensor")
    for value in (v, None):
        arguments = (q, k, value, *RULES, picks, slots, 2, torch.randn(1, 7, 3), 4, 3)
        torch.library.opcheck(torch.ops.headwise.attend_statistics.default, arguments, test_utils=utils)
    ends = torch.zeros(2, 4, 5), torch.ones(2, 4, 5)
    torch.library.opcheck(torch.ops.headwise.attend_received.default, (q, k, *ends, *RULES), test_utils=utils)


def test_what_the_kernel_does_not_take_goes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 and tensors without a number, whose statistics and output come from the other backends."""
    monkeypatch.undo()
    q, k, v = make_qkv(1, 2, 1, 5, 7, 4, 3, dtype=torch.float64)
    out, result = attention_statistics(q, k, v, mask=headwise.causal())
    assert out.dtype == result.entropy.dtype == torch.float64 and not hasattr(result, "received")
    assert torch.equal(out, headwise.attention(q, k, v, mask=headwise.causal()))
    assert torch.equal(result.entropy, statistics(q, k, mask=headwise.causal()).entropy)
    out, result = attention_statistics(q[:, :, :0].float(), k.float(), v.float())
    assert out.shape == (1, 2, 0, 3) and result.rows.eq(0).all()
