"""The tools can fail: every oracle, comparator and trap is shown a planted fault and must see it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from mask_cases import SHORT, Sizes, as_tensor
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headwise.testing import (
    KINDS,
    POISONS,
    STRIDES,
    accuracy,
    assert_close_like_torch,
    assert_same_bits,
    largest_tensor,
    make_qkv,
    naive,
    oracle,
    poison,
    strided,
    ulp,
)

N = SHORT


def test_oracle_agrees_with_torch_where_torch_is_right() -> None:
    for dtype in (torch.float64, torch.float32):
        q, k, v = make_qkv(*N, dtype=dtype)
        mask = as_tensor("keep BHTS", N)
        theirs = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        seen = mask.any(-1)
        torch.testing.assert_close(oracle(q, k, v, mask=mask)[0][seen], theirs.double()[seen], rtol=1e-5, atol=1e-5)


def test_oracle_by_hand() -> None:
    """Two keys, scores log 3 and 0: weights 3/4 and 1/4; a sink of logit log 4 takes half; a gate halves; lse known."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([math.log(3), 0.0]).view(1, 1, 2, 1)
    v = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1)
    out, lse = oracle(q, k, v)
    assert out.item() == pytest.approx(5.0) and lse.item() == pytest.approx(math.log(4))
    out, lse = oracle(q, k, v, sinks=torch.tensor([math.log(4)]), gate=torch.tensor([0.5]))
    assert out.item() == pytest.approx(1.25) and lse.item() == pytest.approx(math.log(8))
    out, lse = oracle(q, k, v, mask=torch.tensor([False, True]))
    assert (out.item(), lse.item()) == (8.0, 0.0)
    out, lse = oracle(q, k, v, mask=torch.tensor([-math.inf, -math.inf]))
    assert (out.item(), lse.item()) == (0.0, -math.inf)
    assert oracle(q, k, v, softcap=1e-9)[0].item() == pytest.approx(6.0)
    assert oracle(q, k, v, scale=0.0)[0].item() == pytest.approx(6.0)


def test_oracle_reads_only_what_is_attended_and_shows_what_is() -> None:
    q, k, v = make_qkv(*N, dtype=torch.float64)
    mask = torch.arange(N.S) < 4
    hidden, shown = poison(v, ~mask[:, None]), poison(v, torch.arange(N.S)[:, None] == 2)
    assert_same_bits(oracle(q, k, hidden, mask=mask)[0], oracle(q, k, v, mask=mask)[0])
    assert bool(oracle(q, k, shown, mask=mask)[0].isnan().all())


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one entry off": lambda x: x + 1e-3 * torch.eye(x.shape[-2], x.shape[-1]),
    "one NaN": lambda x: x.masked_fill(torch.arange(x.numel()).view_as(x) == 7, math.nan),
    "one infinity": lambda x: x.masked_fill(torch.arange(x.numel()).view_as(x) == 7, math.inf),
    "rows swapped": lambda x: x.flip(2),
    "heads swapped": lambda x: x.roll(1, 1),
    "batch swapped": lambda x: x.flip(0),
    "scaled": lambda x: x * 1.0001,
    "all zero": torch.zeros_like,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_comparison_sees_faults(fault: str, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(*N, dtype=dtype)
    exact, rough = oracle(q, k, v)[0], naive(q, k, v)
    assert_close_like_torch(exact.to(dtype), exact, rough, values=v)
    if dtype != torch.float32 and fault in ("one entry off", "scaled"):
        return  # below a half's rounding
    with pytest.raises(AssertionError, match=r"output: ours .*, naive .*, rounding floor .*; budget .* worst at \("):
        assert_close_like_torch(FAULTS[fault](exact.to(dtype)), exact, rough, values=v)


def test_half_is_held_to_rounding_and_not_to_naive() -> None:
    """Twice the rounding error fails, although naive half-precision PyTorch errs more."""
    q, k, v = make_qkv(1, 2, 2, 64, 64, 32, 32, dtype=torch.bfloat16)
    exact, rough = oracle(q, k, v)[0], naive(q, k, v)
    step = accuracy(exact.to(q.dtype), exact, rough, values=v)
    assert step.budget == 1.5 * step.floor + step.ulp and step.naive > 0
    worse = (exact + step.ulp + 2 * step.floor).to(q.dtype)
    with pytest.raises(AssertionError):
        assert_close_like_torch(worse, exact, rough, values=v)


def test_the_budget_is_the_documented_one() -> None:
    exact = torch.tensor([1.0, -3.0], dtype=torch.float64)
    ours, rough = (exact + 5e-6).float(), (exact + 4e-6).float()
    seen = accuracy(ours, exact, rough)
    assert seen.ulp == 2**-22 == ulp(3.0, torch.float32)
    assert seen.budget == pytest.approx(1.25 * seen.naive + 2**-22) and seen.ours <= seen.budget
    assert accuracy(ours, exact, rough, factor=2.0).budget == pytest.approx(2 * seen.naive + 2**-22)
    assert accuracy(ours, exact, rough, values=torch.tensor([100.0])).ulp == 2**-17
    assert accuracy(ours, exact, [rough, exact.float() + 1]).naive == pytest.approx(1.0)
    assert seen.where in ((0,), (1,))


def test_equal_infinities_are_no_error_and_unequal_ones_are() -> None:
    exact = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert accuracy(exact.float(), exact, exact.float()).ours == 0
    for wrong in ([math.inf, 1.0], [math.nan, 1.0], [-1e30, 1.0]):
        assert accuracy(torch.tensor(wrong), exact, exact.float()).ours == math.inf


@pytest.mark.unchecked
def test_comparisons_that_make_no_sense_are_refused() -> None:
    x = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="shapes differ"):
        accuracy(torch.zeros(4), x, torch.zeros(3))
    with pytest.raises(ValueError, match=r"exact is float64; got torch.float32, torch.float32, torch.float32"):
        accuracy(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="so there is no budget"):
        accuracy(torch.zeros(3), x, torch.full((3,), math.nan))


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0078125]).bfloat16()),
    ],
)
def test_same_bits_sees_one_bit(ours: Tensor, other: Tensor) -> None:
    assert_same_bits(ours, ours.clone())
    with pytest.raises(AssertionError):
        assert_same_bits(ours, other)


def test_every_nan_has_the_same_bits_and_every_whole_number_its_own() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 5], dtype=torch.int32)
    assert_same_bits(nans.view(torch.float32), nans[[1, 0, 2]].view(torch.float32))
    assert_same_bits(nans, nans.clone())
    with pytest.raises(AssertionError, match=r"2 of 3 entries differ .* first at \(0,\): 2143289344 and 2143289345"):
        assert_same_bits(nans, nans[[1, 0, 2]])


def test_inputs_are_the_same_everywhere_and_differ_by_seed_and_kind() -> None:
    """Frozen: a change of these numbers is a change of every test that uses them."""
    q, k, v = make_qkv(1, 1, 1, 1, 1, 2, 1)
    torch.testing.assert_close(torch.cat([q.flatten(), k.flatten(), v.flatten()]), torch.tensor(FROZEN))
    made = {kind: make_qkv(*N, kind=kind) for kind in KINDS}
    assert len({float(k.sum()) for _, k, _ in made.values()}) == len(KINDS)
    assert not torch.equal(make_qkv(*N)[0], make_qkv(*N, seed=1)[0])
    torch.testing.assert_close(make_qkv(*N, scale=3.0)[0], 3 * make_qkv(*N)[0])
    with pytest.raises(ValueError, match="kind is one of normal, outlier, sink, duplicates, got 'real'"):
        make_qkv(*N, kind="real")


FROZEN = [1.5409961, -0.2934289, -2.1787894, 0.5684313, -1.0845224]


def test_inputs_are_what_their_kind_says() -> None:
    n = Sizes(2, 4, 2, 16, 32, 16, 8)
    q, k, _ = make_qkv(*n, kind="outlier")
    channels = k.abs().amax((0, 1, 2))
    assert float(channels.max()) > 20 * float(channels.median())
    q, k, v = make_qkv(*n, kind="sink")
    weights = torch.softmax(q @ k.repeat_interleave(2, 1).mT / 4, -1)
    assert float(weights[..., 0].mean()) > 0.9 and float(v[:, :, 0].abs().max()) < 0.1
    _, k, _ = make_qkv(*n, kind="duplicates")
    assert float((k[:, :, 0] - k[:, :, 3]).abs().max()) < 0.01 < float((k[:, :, 0] - k[:, :, 1]).abs().max())


def test_poison_goes_where_it_is_told() -> None:
    x = torch.ones(2, 3, dtype=torch.float16)
    for what in POISONS:
        bad = poison(x, torch.tensor([True, False, False]), what)
        assert bool((bad[:, 1:] == 1).all()) and not bool((bad[:, 0] == 1).any()) and bool((x == 1).all())
    assert torch.isfinite(poison(x, torch.tensor(True), 1e30)).all()  # 1e30 means huge, not infinite, in halves too


def test_layouts_keep_values_and_surround_them_with_slack() -> None:
    x = make_qkv(2, 3, 1, 5, 1, 7, 1)[0]
    for pattern in STRIDES:
        odd = strided(x, pattern)
        memory = torch.as_strided(odd, (odd.untyped_storage().nbytes() // 4,), (1,), 0)
        assert bool(memory.isnan().any()) and bool(memory[0].isnan()) and bool(memory[-1].isnan())
    with pytest.raises(ValueError, match=r"pattern is one of headwise\.testing\.STRIDES"):
        strided(x, "diagonal")


def test_the_largest_tensor_is_seen_in_forward_and_backward() -> None:
    q, k, v = make_qkv(1, 1, 1, 40, 50, 2, 2, requires_grad=True)
    with largest_tensor() as seen:
        torch.softmax(q @ k.mT, -1)
    assert seen.numel == 2000
    out = torch.softmax(q @ k.mT, -1) @ v
    with largest_tensor() as seen:
        out.sum().backward()
    assert seen.numel >= 2000
    with largest_tensor() as seen:
        torch.ones(1, 7).expand(1000, 7)
    assert seen.numel == 7
