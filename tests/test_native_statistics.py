"""The native kernel's statistics: right at every size, for every mask, on every instruction set; the same bits always.

Answers are those of the definitions on the float64 matrix (`statistics_cases`), to 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import BEST, instructions, natives, needs_native
from mask_cases import FEW, MASKS, SIZES, TILED, Sizes, dense
from native_cases import answer_of, check_out, collected, dtypes
from statistics_cases import TOLERANCE, check, everything, extras, inputs
from test_invariance import threads
from torch import Tensor

import headwise
from headwise import Mask
from headwise.ops import statistics_native
from headwise.ops.statistics import RowStatistics, attention_statistics, row_statistics, statistics
from headwise.testing import STRIDES, assert_same_bits, make_qkv, poison, strided

pytestmark = needs_native
best = pytest.mark.parametrize("backend", BEST)


@pytest.fixture(autouse=True)
def never_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that went the other way would be tested for nothing."""
    monkeypatch.setattr("headwise.ops.statistics_blocks.measure", lambda asked: pytest.fail("not the kernel"))


def seen(mask: Mask | None, n: Sizes) -> Tensor:
    allowed = None if mask is None else mask.allowed(n.T, n.S)
    return everything(n) if allowed is None else allowed.expand(n.B, n.H, n.T, n.S)


def right(n: Sizes, dtype: torch.dtype, mask: Mask | None, pool: int = 5, **options: Any) -> None:
    query, key = inputs(n, dtype)
    check(n, query, key, seen(mask, n), pool=pool, mask=mask, **options)


# -- every size ------------------------------------------------------------------------------------------------------

LENGTHS = (*range(1, 131), 255, 256, 257)


@natives
@dtypes
def test_every_length(backend: str, dtype: torch.dtype) -> None:
    """Of queries, of keys, of both: tiles, blocks of rows, pairs of keys and bins end everywhere."""
    with instructions(backend), collected() as attempt:
        for n in LENGTHS:
            for T, S, pool in ((n, n, 7), (67, n, n), (n, 131, 32)):
                attempt((T, S, pool), right, Sizes(1, 2, 1, T, S, 5, 5), dtype, headwise.causal(), pool)


@natives
@dtypes
@pytest.mark.parametrize("S", [1023, 1024, 1025])
def test_a_thousand_keys(backend: str, dtype: torch.dtype, S: int) -> None:
    with instructions(backend), collected() as attempt:
        for T, mask in ((3, None), (61, headwise.causal()), (S, headwise.window(129, 3))):
            attempt(T, right, Sizes(1, 2, 1, T, S, 8, 8), dtype, mask, 32)


@natives
@dtypes
def test_every_head_dim(backend: str, dtype: torch.dtype) -> None:
    with instructions(backend), collected() as attempt:
        for D in (*range(1, 34), 63, 64, 65, 80, 96, 127, 128, 129, 160, 256, 257, 320, 576):
            attempt(D, right, Sizes(1, 2, 2, 19, 37, D, D), dtype, headwise.causal())


@natives
@dtypes
def test_primes_and_groups(backend: str, dtype: torch.dtype) -> None:
    sizes = [Sizes(3, 35, 7, 23, 61, 59, 3), Sizes(5, 3, 3, 47, 53, 11, 3), Sizes(2, 13, 1, 17, 257, 31, 3)]
    with instructions(backend), collected() as attempt:
        for n in sizes:
            for mask in (None, headwise.causal(), headwise.window(11, 4)):
                attempt((n, mask), right, n, dtype, mask, 13)


@natives
@dtypes
@pytest.mark.parametrize("pool", [1, 2, 3, 31, 97, 130, 131, 200])
def test_bins_of_any_number(backend: str, dtype: torch.dtype, pool: int) -> None:
    with instructions(backend), collected() as attempt:
        for T in (1, 67, 131):
            attempt(T, right, Sizes(1, 2, 1, T, 131, 8, 8), dtype, headwise.causal(), pool)


@natives
def test_seventy_thousand_heads(backend: str) -> None:
    with instructions(backend):
        n = Sizes(35_000, 2, 1, 2, 3, 2, 2)
        query, key = inputs(n)
        found = statistics(query, key, mask=headwise.causal())
        weights = headwise.weights(query.double(), key.double(), mask=headwise.causal())
        assert (found.largest - weights.amax(-1)).abs().max() <= TOLERANCE
        assert (found.received - weights.sum(2) / torch.tensor([2, 2, 1])).abs().max() <= TOLERANCE


@natives
@dtypes
def test_more_rows_than_are_added_up_in_float32(backend: str, dtype: torch.dtype) -> None:
    """What a key receives from thousands of rows, most of which give it little."""
    query, key = inputs(Sizes(1, 2, 1, 7001, 600, 8, 8), dtype)
    mask = headwise.window(301, 7, offset=-3000)
    with instructions(backend):
        found = statistics(query, key, mask=mask, pool=3)
    weights = headwise.weights(query.double(), key.double(), mask=mask)
    count = mask.dense(7001, 600).sum(-2)
    assert count.max() < 7001 and torch.equal(found.keys[0, 0] > 0, weights[0, 0].sum(-1) > 0.5)
    assert (found.received - weights.sum(2) / count.clamp(min=1)).abs().max() <= TOLERANCE


# -- every mask, every option ----------------------------------------------------------------------------------------


@natives
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(backend: str, name: str) -> None:
    with instructions(backend), collected() as attempt:
        for n in SIZES:
            query, key = inputs(n)
            attempt(n, check, n, query, key, dense(name, n)[0], mask=MASKS[name](n).mask)


@natives
@dtypes
@pytest.mark.parametrize("name", FEW)
def test_all_options_at_once_across_tiles(backend: str, dtype: torch.dtype, name: str) -> None:
    query, key = inputs(TILED, dtype)
    options: dict[str, Any] = {"scale": 0.7, "softcap": 3.0, "sinks": torch.tensor([0.5, 4.0])}
    with instructions(backend):
        check(TILED, query, key, dense(name, TILED)[0], mask=MASKS[name](TILED).mask, **options)


@natives
@dtypes
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-38, 30.0])
def test_any_scale(backend: str, dtype: torch.dtype, scale: float) -> None:
    n = Sizes(1, 2, 1, 19, 131, 7, 7)
    query, key = inputs(n, dtype)
    # A score carries roundings of its own size, whoever computes it.
    tolerance = max(TOLERANCE, abs(scale) * float(query.norm(dim=-1).max() * key.norm(dim=-1).max()) * 2**-22)
    with instructions(backend):
        check(n, query, key, seen(headwise.causal(), n), tolerance, mask=headwise.causal(), scale=scale)


@natives
@dtypes
def test_the_first_of_equal_keys_is_the_largest(backend: str, dtype: torch.dtype) -> None:
    n = Sizes(1, 2, 1, 61, 391, 6, 6)
    query, key = inputs(n, dtype)
    key = key[:, :, :23].repeat(1, 1, 17, 1)  # the same 23 keys over and over
    weights = headwise.weights(query.double(), key.double(), mask=headwise.causal())
    first = (weights >= weights.amax(-1, keepdim=True) * (1 - 1e-9)).int().argmax(-1)
    with instructions(backend):
        assert torch.equal(statistics(query, key, mask=headwise.causal()).largest_key, first)
        assert torch.equal(statistics(0 * query, key).largest_key, torch.zeros_like(first))


@natives
@dtypes
@pytest.mark.parametrize("name", ["causal", "window 3", "keep BHTS", "bias BHTS", "all kinds"])
def test_out_is_that_of_attention(backend: str, dtype: torch.dtype, name: str) -> None:
    """Within attention's own budget, and the statistics are those without a value, to the bit."""
    with instructions(backend), collected() as attempt:
        for n in (*SIZES, TILED, Sizes(2, 4, 2, 1, 1100, 16, 24)):
            qkv, mask = make_qkv(*n, dtype=dtype), MASKS[name](n).mask
            sinks = torch.linspace(-1, 1, n.H)
            out, found = attention_statistics(*qkv, mask=mask, sinks=sinks)
            attempt(n, check_out, out, answer_of(qkv, mask=mask, sinks=sinks))
            assert out.dtype == dtype and out.stride() == headwise.attention(*qkv).stride()
            alone = row_statistics(*qkv[:2], mask=mask, sinks=sinks)
            for field in NUMBERS:
                attempt(f"{n} {field}", assert_same_bits, getattr(found, field), getattr(alone, field))


NUMBERS = ("entropy", "largest", "largest_key", "distance", "keys", "sink", "offsets", "pooled", "pooled_rows", "rows")


@natives
@dtypes
def test_scores_that_overflow_are_honest(backend: str, dtype: torch.dtype) -> None:
    """An infinite score makes its row NaN, one of -inf has no weight, and other rows are as ever."""
    query, key = torch.ones(1, 1, 3, 4), torch.randn(1, 1, 150, 4)
    huge = torch.finfo(dtype).max
    query[0, 0, 1] = torch.tensor([huge, 0, 0, 0])
    key[0, 0, 7, 0], key[0, 0, 9, 0] = 4.0, -huge
    query, key = query.to(dtype), key.to(dtype)
    wide = headwise.weights(query.double(), key.double(), scale=1.0)
    with instructions(backend):
        found = statistics(query, key, scale=1.0)
    if dtype == torch.float16:  # nothing overflows in float32
        assert not found.entropy.isnan().any()
    else:
        assert torch.equal(found.entropy[0, 0].isnan(), torch.tensor([False, True, False]))
    assert (found.largest - wide.amax(-1))[0, 0, [0, 2]].abs().max() <= TOLERANCE
    assert found.keys.eq(150).all()


# -- the same bits ---------------------------------------------------------------------------------------------------


def every_number(found: RowStatistics) -> dict[str, Tensor]:
    told = {name: x for name, x in vars(found).items() if isinstance(x, Tensor)}
    told |= {f"feature {name}": x for name, x in found.features.items()}
    return told | {f"target {name}": x for name, x in found.targets.items()}


def same(ours: RowStatistics, theirs: RowStatistics, rows: Any = ...) -> None:
    for (name, x), y in zip(every_number(ours).items(), every_number(theirs).values(), strict=True):
        assert_same_bits(x, y[rows], what=name)


def asked_of(n: Sizes, query: Tensor, key: Tensor, mask: Mask | None) -> list[RowStatistics]:
    features, targets = extras(n)
    given: dict[str, Any] = {
        "mask": mask,
        "features": features,
        "targets": targets,
        "sinks": torch.linspace(-1, 1, n.H),
    }
    return [statistics(query, key, **given), row_statistics(query, key, **given)]


@natives
@dtypes
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


@natives
@dtypes
def test_a_thousand_times(backend: str, dtype: torch.dtype) -> None:
    n = Sizes(1, 2, 1, 70, 131, 16, 16)
    query, key = inputs(n, dtype)
    with instructions(backend):
        first = statistics(query, key, mask=headwise.causal())
        for _ in range(1000 if backend in BEST else 100):
            same(statistics(query, key, mask=headwise.causal()), first)


@natives
@dtypes
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


@natives
@dtypes
def test_any_strides(backend: str, dtype: torch.dtype) -> None:
    n = Sizes(2, 6, 3, 53, 67, 24, 20)
    given = dict(zip(("query", "key", "value"), make_qkv(*n, dtype=dtype), strict=True))
    with instructions(backend), collected() as attempt:
        for name, x in given.items():
            for pattern in STRIDES:
                odd = strided(x, pattern)
                ours, told = attention_statistics(**{**given, name: odd}, mask=headwise.causal())
                theirs, wanted = attention_statistics(**{**given, name: odd.contiguous()}, mask=headwise.causal())
                attempt((name, pattern), assert_same_bits, ours, theirs)
                attempt((name, pattern), same, told, wanted)
                if name != "value":
                    pair = {k: given[k] for k in ("query", "key")}
                    ours_, theirs_ = (statistics(**{**pair, name: y}) for y in (odd, odd.contiguous()))
                    attempt((name, pattern, "received"), same, ours_, theirs_)


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


@natives
@dtypes
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
            out, told = attention_statistics(q, k, v, mask=mask, features=spoilt)
            attempt((what, "out"), assert_same_bits, out, both[0])
            attempt(what, same, told, both[1])
            attempt((what, "received"), same, statistics(q, k, mask=mask), alone)


@natives
@dtypes
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
        found = statistics(q, k_bad, mask=mask, pool=131)
        for name in ("entropy", "largest", "distance", "sink"):
            assert torch.equal(getattr(found, name).isnan(), rows), name
            assert_same_bits(getattr(found, name)[~rows], getattr(clean, name)[~rows], what=name)
        assert torch.equal(found.pooled.isnan().any(-1), rows)
        assert torch.equal(found.received.isnan(), (seen(mask, n) & rows[..., None]).any(2))
        assert torch.equal(found.keys, clean.keys) and torch.equal(found.rows, clean.rows)

        out, told = attention_statistics(q, k, v_bad, mask=mask, pool=131)
        assert torch.equal(out.isnan().all(-1), rows) and torch.equal(out.isnan().any(-1), rows)
        for name in NUMBERS:
            assert_same_bits(getattr(told, name), getattr(clean, name), what=f"{name} beside a bad value")

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
        out, found = attention_statistics(query, key, key, mask=headwise.keep(torch.zeros(3, 5, dtype=torch.bool)))
        whole = statistics(query, key, mask=headwise.keep(torch.zeros(3, 5, dtype=torch.bool)))
    assert out.eq(0).all() and found.rows.eq(0).all() and found.largest_key.eq(-1).all() and whole.received.eq(0).all()
    for name in ("entropy", "largest", "distance", "keys", "sink", "offsets", "pooled", "pooled_rows"):
        assert getattr(found, name).eq(0).all(), name


def test_features_that_are_no_numbers_go_by_the_second_pass() -> None:
    query, key = inputs(Sizes(1, 2, 2, 9, 9, 4, 4))
    mask = headwise.lengths(torch.tensor([7]))
    hidden = torch.ones(9).masked_fill(torch.arange(9) >= 7, math.nan)
    found = row_statistics(query, key, mask=mask, features={"hidden": hidden, "met": 1 / hidden.roll(-1)})
    assert torch.allclose(found.features["hidden"], torch.ones(1, 2)) and found.features["met"].isnan().all()


# -- the operators ---------------------------------------------------------------------------------------------------

FAR = 1 << 40
RULES = (0.5, 0.0, None, -FAR, FAR, None, None, None, None)


def rows_op(**given: Any) -> Any:
    arguments: dict[str, Any] = {
        "query": torch.randn(2, 4, 5, 16), "key": torch.randn(2, 2, 7, 16), "value": torch.randn(2, 2, 7, 8),
        "picks": torch.zeros(1, 5, 3, dtype=torch.long), "slots": torch.tensor([0, 1, 1]), "sums": 2,
        "features": torch.randn(2, 7, 3), "bins": 4,
    }  # fmt: skip
    assert set(given) <= set(arguments)
    query, key, value, *rest = (arguments | given).values()
    return torch.ops.headwise.attend_statistics(query, key, value, *RULES, *rest)


def keys_op(**given: Any) -> Any:
    arguments: dict[str, Any] = {
        "query": torch.randn(2, 4, 5, 16), "key": torch.randn(2, 2, 7, 16), "top": torch.zeros(2, 4, 5),
        "largest": torch.ones(2, 4, 5),
    }  # fmt: skip
    assert set(given) <= set(arguments)
    return torch.ops.headwise.attend_received(*(arguments | given).values(), *RULES)


@pytest.mark.parametrize(
    ("given", "why"),
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
        ({"key": torch.randn(2, 2, 7, 15)}, "do not fit"),
        ({"key": torch.randn(2, 2, 7, 16).half(), "value": None}, "one dtype"),
    ],
)
def test_refused_by_the_pass_over_rows(given: dict[str, Any], why: str) -> None:
    rows_op()
    with pytest.raises(RuntimeError, match=why):
        rows_op(**given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"top": torch.zeros(2, 4, 6)}, r"top must be \(B, H, T\) and contiguous"),
        ({"top": torch.zeros(4, 5)}, "top must have 3 axes"),
        ({"largest": torch.zeros(2, 4, 5).double()}, "largest: a wrong dtype"),
        ({"largest": torch.zeros(2, 5, 4).mT}, r"largest must be \(B, H, T\) and contiguous"),
        ({"key": torch.randn(2, 3, 7, 16)}, "a multiple of key heads"),
    ],
)
def test_refused_by_the_pass_over_keys(given: dict[str, Any], why: str) -> None:
    keys_op()
    with pytest.raises(RuntimeError, match=why):
        keys_op(**given)


def test_picks_beyond_the_keys_are_nobodys() -> None:
    picks = torch.tensor([[-1, 99, -(1 << 62)]] * 5)[None]
    assert rows_op(picks=picks)[4].eq(statistics_native.UNSEEN).all()


def test_torch_knows_the_operators() -> None:
    """Their shapes without data, and that they change none of their inputs."""
    q, k, v = make_qkv(2, 4, 2, 5, 7, 16, 8)
    picks, slots = torch.zeros(1, 5, 3, dtype=torch.long), torch.tensor([0, 1, 1])
    utils = ("test_schema", "test_faketensor")
    for value in (v, None):
        arguments = (q, k, value, *RULES, picks, slots, 2, torch.randn(1, 7, 3), 4)
        torch.library.opcheck(torch.ops.headwise.attend_statistics.default, arguments, test_utils=utils)
    ends = torch.zeros(2, 4, 5), torch.ones(2, 4, 5)
    torch.library.opcheck(torch.ops.headwise.attend_received.default, (q, k, *ends, *RULES), test_utils=utils)


def test_what_the_kernel_does_not_take_goes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 and tensors without a number, whose statistics and output come from the other backends."""
    monkeypatch.undo()
    q, k, v = make_qkv(1, 2, 1, 5, 7, 4, 3, dtype=torch.float64)
    out, found = attention_statistics(q, k, v, mask=headwise.causal())
    assert out.dtype == found.entropy.dtype == torch.float64 and not hasattr(found, "received")
    assert torch.equal(out, headwise.attention(q, k, v, mask=headwise.causal()))
    assert torch.equal(found.entropy, statistics(q, k, mask=headwise.causal()).entropy)
    out, found = attention_statistics(q[:, :, :0].float(), k.float(), v.float())
    assert out.shape == (1, 2, 0, 3) and found.rows.eq(0).all()
