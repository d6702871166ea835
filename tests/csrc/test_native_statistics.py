"""The native kernel's statistics: right at every size, for every mask, on every instruction set.

Answers are those of the definitions on the float64 matrix (`statistics_cases`), to 1e-5.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from backends import BEST, instructions, natives, needs_native
from draw import drawn
from mask_cases import FEW, MASKS, SIZES, TILED, Sizes, dense
from native_cases import answer_of, check_out, collected, native_dtypes
from statistics_cases import NUMBERS, TOLERANCE, Definitions, check, compare, definitions, inputs, seen
from torch import Tensor

import headwise
from headwise import Mask
from headwise.ops.statistics import attention_statistics, row_statistics, statistics
from headwise.testing import assert_same_bits, make_qkv

# Thousands of calls, of which the shape checker would take a third of the time; it sees such in test_statistics.py.
pytestmark = [needs_native, pytest.mark.unchecked]
best = pytest.mark.parametrize("backend", BEST)


@pytest.fixture(autouse=True)
def never_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that went the other way would be tested for nothing."""
    monkeypatch.setattr(
        "headwise.ops.statistics.blockwise.measure_in_blocks", lambda request: pytest.fail("not the kernel")
    )


def right(n: Sizes, dtype: torch.dtype, mask: Mask | None, pool: int = 5, **options: Any) -> None:
    query, key = inputs(n, dtype)
    check(n, query, key, seen(mask, n), pool=pool, mask=mask, **options)


# -- every size ------------------------------------------------------------------------------------------------------

LENGTHS = (*range(1, 131), 255, 256, 257)
# Of one alone, the other as long as two tiles: every length to the end of the first tile, then the ends of the others.
EDGES = (*range(1, 67), 95, 96, 97, *range(126, 131), 255, 256, 257)


@functools.lru_cache(maxsize=3 * len(LENGTHS))
def case(n: Sizes, dtype: torch.dtype, mask: Mask | None, pool: int) -> tuple[Tensor, Tensor, Definitions]:
    """Inputs and answers, the same for every instruction set; their tests come one after another."""
    query, key = inputs(n, dtype)
    return query, key, definitions(n, query, key, seen(mask, n), TOLERANCE, pool, mask=mask)


def right_again(n: Sizes, dtype: torch.dtype, mask: Mask | None, pool: int) -> None:
    query, key, truth = case(n, dtype, mask, pool)
    compare(n, query, key, truth, TOLERANCE, pool, mask=mask)


@native_dtypes
def test_every_length(backend: str, dtype: torch.dtype) -> None:
    """Of queries, of keys, of both: tiles, blocks of rows, pairs of keys and bins end everywhere."""
    with instructions(backend), collected() as attempt:
        for n in drawn(LENGTHS):
            for T, S, pool in ((n, n, 7), (67, n, n), (n, 131, 32))[: 3 if n in EDGES else 1]:
                attempt((T, S, pool), right_again, Sizes(1, 2, 1, T, S, 5, 5), dtype, headwise.causal(), pool)


@pytest.mark.slow
@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("S", [1023, 1024, 1025])
def test_a_thousand_keys(backend: str, dtype: torch.dtype, S: int) -> None:
    with instructions(backend), collected() as attempt:
        for T, mask in (
            (3, None),
            (61, headwise.causal()),
            (S, headwise.window(129, 3)),
            (S, headwise.window(70, first=130)),
        ):
            attempt(T, right_again, Sizes(1, 2, 1, T, S, 8, 8), dtype, mask, 32)


@native_dtypes
def test_every_head_dim(backend: str, dtype: torch.dtype) -> None:
    with instructions(backend), collected() as attempt:
        for D in drawn((*range(1, 34), 63, 64, 65, 80, 96, 127, 128, 129, 160, 256, 257, 320, 576)):
            attempt(D, right, Sizes(1, 2, 2, 19, 37, D, D), dtype, headwise.causal())


@native_dtypes
def test_primes_and_groups(backend: str, dtype: torch.dtype) -> None:
    sizes = [Sizes(3, 35, 7, 23, 61, 59, 3), Sizes(5, 3, 3, 47, 53, 11, 3), Sizes(2, 13, 1, 17, 257, 31, 3)]
    with instructions(backend), collected() as attempt:
        for n in sizes:
            for mask in (None, headwise.causal(), headwise.window(11, 4)):
                attempt((n, mask), right, n, dtype, mask, 13)


@pytest.mark.sweep
@native_dtypes
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
        result = statistics(query, key, mask=headwise.causal())
        weights = headwise.weights(query.double(), key.double(), mask=headwise.causal())
        assert (result.largest - weights.amax(-1)).abs().max() <= TOLERANCE
        assert (result.received - weights.sum(2) / torch.tensor([2, 2, 1])).abs().max() <= TOLERANCE


@functools.cache  # for every instruction set
def received_by_few(dtype: torch.dtype) -> tuple[Tensor, Tensor, headwise.Mask, Tensor, Tensor]:
    """Query, key and mask of thousands of rows of which a key has hundreds; each row's weights; their means by key."""
    query, key = inputs(Sizes(1, 2, 1, 7001, 600, 8, 8), dtype)
    mask = headwise.window(301, 7, offset=-3000)
    weights = headwise.weights(query.double(), key.double(), mask=mask)
    count = mask.dense(7001, 600).sum(-2)
    assert count.max() < 7001
    return query, key, mask, weights[0, 0].sum(-1), weights.sum(2) / count.clamp(min=1)


@native_dtypes
def test_more_rows_than_are_added_up_in_float32(backend: str, dtype: torch.dtype) -> None:
    """What a key receives from thousands of rows, most of which give it little."""
    query, key, mask, sums, means = received_by_few(dtype)
    with instructions(backend):
        result = statistics(query, key, mask=mask, pool=3)
    assert torch.equal(result.keys[0, 0] > 0, sums > 0.5)
    assert (result.received - means).abs().max() <= TOLERANCE


# -- every mask, every option ----------------------------------------------------------------------------------------


@pytest.mark.sweep
@natives
@pytest.mark.parametrize("name", [name for name in MASKS if "picked" not in name])
def test_every_mask(backend: str, name: str) -> None:
    """Of picked keys, plain operations give the statistics."""
    with instructions(backend), collected() as attempt:
        for n in SIZES:
            query, key = inputs(n)
            attempt(n, check, n, query, key, dense(name, n)[0], mask=MASKS[name](n).mask)


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("name", FEW)
def test_all_options_at_once_across_tiles(backend: str, dtype: torch.dtype, name: str) -> None:
    query, key = inputs(TILED, dtype)
    options: dict[str, Any] = {"scale": 0.7, "softcap": 3.0, "sinks": torch.tensor([0.5, 4.0])}
    with instructions(backend):
        check(TILED, query, key, dense(name, TILED)[0], mask=MASKS[name](TILED).mask, **options)


@native_dtypes
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-30, 30.0])
def test_any_scale(backend: str, dtype: torch.dtype, scale: float) -> None:
    n = Sizes(1, 2, 1, 19, 131, 7, 7)
    query, key = inputs(n, dtype)
    # A score carries roundings of its own size, whoever computes it.
    tolerance = max(TOLERANCE, abs(scale) * float(query.norm(dim=-1).max() * key.norm(dim=-1).max()) * 2**-22)
    with instructions(backend):
        check(n, query, key, seen(headwise.causal(), n), tolerance, mask=headwise.causal(), scale=scale)


@natives
@pytest.mark.parametrize(("left", "first", "offset"), [(1, 5, -2), (3, 7, -4), (2, 40, -9), (2, 40, 30)])
def test_first_keys_behind_the_end_are_not_counted(backend: str, left: int, first: int, offset: int) -> None:
    """A window that keeps its first keys in sight, and a diagonal before which some of these lie."""
    n = Sizes(1, 2, 1, 61, 61, 6, 6)
    mask = headwise.window(left, first=first) & headwise.causal(offset=offset)
    with instructions(backend):
        check(n, *inputs(n), seen(mask, n), mask=mask)


@native_dtypes
def test_the_first_of_equal_keys_is_the_largest(backend: str, dtype: torch.dtype) -> None:
    n = Sizes(1, 2, 1, 61, 391, 6, 6)
    query, key = inputs(n, dtype)
    key = key[:, :, :23].repeat(1, 1, 17, 1)  # the same 23 keys over and over
    weights = headwise.weights(query.double(), key.double(), mask=headwise.causal())
    first = (weights >= weights.amax(-1, keepdim=True) * (1 - 1e-9)).int().argmax(-1)
    with instructions(backend):
        assert torch.equal(statistics(query, key, mask=headwise.causal()).largest_key, first)
        assert torch.equal(statistics(0 * query, key).largest_key, torch.zeros_like(first))


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("name", ["causal", "window 3", "keep BHTS", "bias BHTS", "all kinds"])
def test_out_is_that_of_attention(backend: str, dtype: torch.dtype, name: str) -> None:
    """Within attention's own budget, and the statistics are those without a value, to the bit."""
    with instructions(backend), collected() as attempt:
        for n in (*SIZES, TILED, Sizes(2, 4, 2, 1, 1100, 16, 24)):
            qkv, mask = make_qkv(*n, dtype=dtype), MASKS[name](n).mask
            sinks = torch.linspace(-1, 1, n.H)
            out, result = attention_statistics(*qkv, mask=mask, sinks=sinks)
            attempt(n, check_out, out, answer_of(qkv, mask=mask, sinks=sinks))
            assert out.dtype == dtype and out.stride() == headwise.attention(*qkv).stride()
            alone = row_statistics(*qkv[:2], mask=mask, sinks=sinks)
            for field in NUMBERS:
                attempt(f"{n} {field}", assert_same_bits, getattr(result, field), getattr(alone, field))


@natives
def test_sinks_of_any_size(backend: str) -> None:
    """One that takes nothing, and one that takes all: then nothing is told of where the rest lies."""
    n = Sizes(1, 3, 1, 19, 131, 6, 6)
    query, key = inputs(n)
    sinks = torch.tensor([-math.inf, 300.0, 3e38])
    for mask in (headwise.causal(), headwise.bias(torch.full((131,), -3e38))):
        with instructions(backend):
            result, plain = (row_statistics(query, key, mask=mask, sinks=x, pool=5) for x in (sinks, None))
        assert torch.equal(result.entropy[:, 0], plain.entropy[:, 0]) and bool((result.sink[:, 0] == 0).all())
        assert torch.equal(result.pooled[:, 0], plain.pooled[:, 0]) and torch.equal(result.keys, plain.keys)
        for x, what in ((result.entropy, 0), (result.distance, 0), (result.largest, 0), (result.sink, 1)):
            assert bool((x[:, 1:] == what).all()), x[:, 1:]
        assert bool((result.pooled[:, 1:] == 0).all())


@natives
@pytest.mark.parametrize("masked", [False, True], ids=["bands", "bias"])
def test_a_row_that_lost_all_its_scores_is_no_empty_one(backend: str, masked: bool) -> None:
    """They are -inf in float32: its numbers are NaN, and yet it attends something, a key among its own."""
    query, key = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 131, 4)
    query[0, 0, 1] = -3e38
    with instructions(backend):
        result = row_statistics(query, key, mask=headwise.bias(torch.zeros(131)) if masked else None)
    assert torch.equal(result.entropy.isnan().flatten(), torch.tensor([False, True, False]))
    assert int(result.keys[0, 0, 1]) >= 1 and 0 <= int(result.largest_key[0, 0, 1]) < 131
    assert bool((result.keys[0, 0, ::2] == 131).all())


@natives
def test_a_target_whose_own_score_is_nan_shows(backend: str) -> None:
    """A bias makes it NaN: the row may attend it, so the mean of its mass is NaN; a forbidden one is left out."""
    query, key, bias = torch.randn(1, 1, 3, 5), torch.randn(1, 1, 7, 5), torch.zeros(3, 7)
    bias[1, 2] = math.nan
    with instructions(backend):
        result = row_statistics(query, key, mask=headwise.bias(bias), targets={"two": torch.full((3, 1), 2)})
    assert result.targets["two"].isnan().all()


@native_dtypes
def test_scores_that_overflow_are_honest(backend: str, dtype: torch.dtype) -> None:
    """An infinite score makes its row NaN, one of -inf has no weight, and other rows are as ever."""
    query, key = torch.ones(1, 1, 3, 4), torch.randn(1, 1, 150, 4)
    huge = torch.finfo(dtype).max
    query[0, 0, 1] = torch.tensor([huge, 0, 0, 0])
    key[0, 0, 7, 0], key[0, 0, 9, 0] = 4.0, -huge
    query, key = query.to(dtype), key.to(dtype)
    wide = headwise.weights(query.double(), key.double(), scale=1.0)
    with instructions(backend):
        result = statistics(query, key, scale=1.0)
    if dtype == torch.float16:  # nothing overflows in float32
        assert not result.entropy.isnan().any()
    else:
        assert torch.equal(result.entropy[0, 0].isnan(), torch.tensor([False, True, False]))
    assert (result.largest - wide.amax(-1))[0, 0, [0, 2]].abs().max() <= TOLERANCE
    assert result.keys.eq(150).all()
