"""The native kernel where numbers are large, tiny or strange: logits of 1e4, weights that are denormal, scale <= 0.

Its exponential must be exactly 0 far down, right in between (no cliff where a weight becomes denormal), 1 at the top.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from backends import attend, instructions, natives
from mask_cases import Sizes
from native_cases import answer_of, check, collected, native_dtypes
from torch import Tensor

import headwise
from headwise.ops.reference import reference
from headwise.testing import assert_same_bits, make_qkv

# The shape checker takes a third of the time of thousands of calls; it sees their kind in test_meaning.py.
pytestmark = pytest.mark.unchecked

eps32 = torch.finfo(torch.float32).eps
ROWS = {"decoding": 1, "a few rows": 3, "many rows": 37}
rows = pytest.mark.parametrize("T", ROWS.values(), ids=ROWS)


def with_logits(logits: Tensor, T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, 1, T, 8), k, v whose scores at scale 1 are these, exactly where the dtype has them; v is an identity."""
    S = len(logits)
    q, k = torch.zeros(1, 1, T, 8, dtype=dtype), torch.zeros(1, 1, S, 8, dtype=dtype)
    q[..., 3] = 1
    k[0, 0, :, 3] = logits.to(dtype)
    return q, k, torch.eye(S, dtype=dtype)[None, None]


def weights(backend: str, logits: Tensor, T: int, dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(weights (T, S), lse (T,), the scores that were met)."""
    q, k, v = with_logits(logits, T, dtype)
    out, lse = attend(backend, q, k, v, scale=1.0, return_lse=True, **options)
    return out[0, 0].double(), lse[0, 0].double(), k[0, 0, :, 3].double()


def close(ours: Tensor, right: Tensor, eps: float, floor: float) -> None:
    """To `eps` of the largest entry's own size, entry by entry relative, and below `floor` anything down to 0."""
    error = (ours - right).abs()
    allowed = eps * right.abs() + floor
    worst = int((error - allowed).argmax()) % right.shape[-1]
    assert bool((error <= allowed).all()), f"entry {worst}: {ours.flatten()[worst]:.6e}, {right.flatten()[worst]:.6e}"


@native_dtypes
@rows
def test_weights_fall_off_smoothly(backend: str, dtype: torch.dtype, T: int) -> None:
    """exp at every depth from 0 to -160, in steps of a quarter: relative to the weight itself, until it is denormal."""
    depth = -torch.arange(0, 160, 0.25)
    for shift in (0.0, 300.0, -300.0) if dtype != torch.bfloat16 else (0.0,):
        ours, lse, met = weights(backend, depth + shift, T, dtype)
        right = torch.softmax(met, 0)
        # A score's own rounding, times log2(e) and back, is in the exponent.
        eps = torch.finfo(dtype).eps + 4 * eps32 * (160 + abs(shift))
        close(ours, right.expand(T, -1), eps, max(torch.finfo(dtype).tiny, torch.finfo(torch.float32).tiny))
        close(lse, torch.logsumexp(met, 0).expand(T), eps32, 1e-5)


@native_dtypes
@rows
def test_logits_to_ten_thousand(backend: str, dtype: torch.dtype, T: int) -> None:
    """The top takes all; what ties shares; far below is 0, never NaN."""
    with collected() as attempt:
        for top in (1e2, 1e3, 1e4, 3e4):
            for logits in ([top, -top, 0.0], [-top] * 5, [top] * 4, [-top, 0.0, -top, 0.0], [top, top, -top, -top]):
                # 70 keys more, lower still: they lie in another tile
                full = torch.cat([torch.tensor(logits), torch.full((70,), -2 * top)])
                for order in (full, full.flip(0)):
                    ours, lse, met = weights(backend, order, T, dtype)
                    right, most = torch.softmax(met, 0).expand(T, -1), torch.logsumexp(met, 0).expand(T)
                    what = f"top {top}, {logits}"
                    attempt(what, close, ours, right, torch.finfo(dtype).eps, torch.finfo(dtype).tiny)
                    attempt(f"{what}, lse", close, lse + 4 * top, most + 4 * top, 2e-7, 0.0)


@native_dtypes
@rows
def test_masked_columns_are_exactly_zero(backend: str, dtype: torch.dtype, T: int) -> None:
    """By a bias of -inf, a finite one of -1e4 and the dtype's least: forbidden is 0; -1e4 is as good as."""
    S = 90
    logits = torch.linspace(-3, 3, S)
    out = torch.arange(S) % 3 == 0
    for lowest in (-math.inf, -1e4, torch.finfo(dtype).min):
        for mask in (headwise.bias(torch.zeros(S).masked_fill(out, lowest)),):
            ours, lse, met = weights(backend, logits, T, dtype, mask=mask)
            right = torch.softmax(met.masked_fill(out, -math.inf), 0)
            assert bool((ours[:, out] == 0).all())
            close(ours, right.expand(T, -1), 16 * eps32 if dtype == torch.float32 else torch.finfo(dtype).eps, 0.0)
            close(lse, torch.logsumexp(met.masked_fill(out, -math.inf), 0).expand(T), 1e-6, 0.0)


@natives
@rows
def test_a_finite_minus_infinity_everywhere_is_a_mean(backend: str, T: int) -> None:
    """finfo.min on all keys forbids nothing: equal scores, the mean of the values (a mask of -inf would give 0)."""
    q, k, v = make_qkv(1, 2, 1, T, 70, 8, 8)
    least = torch.finfo(torch.float32).min
    out = attend(backend, q, k, v, mask=headwise.bias(torch.full((70,), least)))
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-6)
    out, lse = attend(backend, q, k, v, mask=headwise.bias(torch.full((70,), -math.inf)), return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@native_dtypes
@rows
def test_tiny_values_and_weights(backend: str, dtype: torch.dtype, T: int) -> None:
    """Values of 1e-30 come out right; below the normal numbers a result may be 0; no mode of the CPU stays changed."""
    q, k, v = make_qkv(1, 2, 1, T, 70, 16, 16, dtype=dtype)
    small = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 1e-4}[dtype]
    wanted, _ = reference(q.double(), k.double(), (v * small).double())
    ours = attend(backend, q, k, v * small)
    torch.testing.assert_close(ours.double(), wanted, rtol=8 * torch.finfo(dtype).eps, atol=0.05 * small)
    if dtype == torch.float32:
        denormal = attend(backend, q, k, v * 1e-40)
        wanted, _ = reference(q.double(), k.double(), (v * 1e-40).double())
        torch.testing.assert_close(denormal.double(), wanted, rtol=0, atol=torch.finfo(dtype).tiny)
    assert float(torch.tensor(1e-40) * 0.5) != 0, "the call left a flush-to-zero mode behind"


@pytest.mark.sweep
@native_dtypes
@rows
def test_any_scale(backend: str, dtype: torch.dtype, T: int) -> None:
    """0 and negative too, under a causal mask, where a kernel that masks before it scales goes wrong."""
    n = Sizes(2, 4, 2, T, 70, 16, 24)
    with collected() as attempt:
        for scale in (0.0, -0.0, -0.5, -1e-30, 1e-30, 5.0, -5.0, 1e3):
            for kind in ("none", "causal", "lengths"):
                mask = {
                    "none": None,
                    "causal": headwise.causal(),
                    "lengths": headwise.lengths(torch.tensor([0, 66])),
                }[kind]
                qkv = make_qkv(*n, dtype=dtype, scale=0.1 if scale == 1e3 else 1.0)
                attempt(f"{scale}, {kind}", check, backend, answer_of(qkv, mask=mask, scale=scale))


@natives
@rows
def test_scores_that_overflow_are_honest(backend: str, T: int) -> None:
    """Finite inputs whose products are infinite: NaN or the right answer as by the definition, never a silent 0."""
    S, D, checked = 70, 8, 0
    with collected() as attempt:
        for high, low in ((1e25, 1e25), (1e25, -1e25), (3e38, 3e38), (-3e38, 3e38)):
            for where in (slice(None), slice(3, 4), slice(65, 66)):
                q, k, v = make_qkv(1, 2, 1, T, S, D, 8)
                q[:, :, 0], k[:, :, where] = high, low
                out, lse = attend(backend, q, k, v, return_lse=True)
                wanted, its = reference(q, k, v)
                # Where products of both signs come near the largest float, the order of summation decides: left out.
                terms = q.double()[:, :, :, None] * k.double().repeat_interleave(2, 1)[:, :, None]
                size, of_one_sign = terms.abs().sum(-1), terms.sum(-1).abs() == terms.abs().sum(-1)
                sure = ((size < 1e38) | (of_one_sign & (size > 1e39))).all(-1)
                what = f"{high} x {low} at {where}"
                attempt(what, assert_same_bits, out.isnan()[sure], wanted.isnan()[sure])
                attempt(f"{what}, lse", assert_same_bits, lse.isnan()[sure], its.isnan()[sure])
                checked += int(sure.sum())
                fine = sure & ~its.isnan()
                attempt(what, torch.testing.assert_close, out[fine], wanted[fine], rtol=1e-4, atol=1e-5)
                attempt(f"{what}, lse", torch.testing.assert_close, lse[fine], its[fine], rtol=1e-5, atol=1e-5)
    assert checked >= 16


@natives
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@rows
def test_scores_that_overflow_beside_some_that_do_not(backend: str, dtype: torch.dtype, T: int) -> None:
    """Keys whose score is -inf in float32 weigh nothing, whole ranges of them too; a row without others is NaN."""
    S, D = 2300, 8
    keys = torch.arange(S)
    lost = {
        "the first range": keys < 1024, "the last": keys >= 2048, "the middle": (keys >= 1024) & (keys < 2048),
        "all ranges but the last": keys < 2048, "all but one key": keys != 1500, "some of each": keys % 3 == 0,
        "all": keys >= 0,
    }  # fmt: skip
    q, k, v = make_qkv(1, 2, 1, T, S, D, 8)
    q[..., 0], k[..., 0] = 1e25, 0
    with collected() as attempt:
        for what, where in lost.items():
            k[0, 0, :, 0] = torch.where(where, -1e25, 0.0)
            qkv = [x.to(dtype) for x in (q, k, v)]
            options: dict[str, Any] = {"sinks": torch.tensor([0.5, -2.0])} if "range" in what else {}
            out, lse = attend(backend, *qkv, **options, return_lse=True)
            if bool(where.all()):
                attempt(what, assert_same_bits, out.isnan() & lse.isnan()[..., None], torch.ones_like(out).bool())
                continue
            kept = [qkv[0], *(x[:, :, ~where] for x in qkv[1:])]
            wanted, its = reference(*(x.double() for x in kept), **options)
            eps = 16 * torch.finfo(dtype).eps
            attempt(what, torch.testing.assert_close, out.double(), wanted, rtol=eps, atol=eps)
            attempt(f"{what}, lse", torch.testing.assert_close, lse.double(), its, rtol=1e-5, atol=1e-5)


@natives
@rows
@pytest.mark.parametrize("S", [70, 1100])
def test_a_sink_that_takes_all(backend: str, T: int, S: int) -> None:
    """Next to it the largest values come to 0, though their sum is beyond float32; a sink of -inf takes nothing."""
    q, k, v = make_qkv(1, 2, 1, T, S, 8, 8)
    out, lse = attend(backend, q, k, torch.full_like(v, 3e38), sinks=torch.tensor([300.0, 3e38]), return_lse=True)
    assert bool((out == 0).all())
    assert_same_bits(lse, torch.tensor([300.0, 3e38])[None, :, None].expand(1, 2, T))
    plain = attend(backend, q, k, v, return_lse=True)
    for x, y in zip(attend(backend, q, k, v, sinks=torch.tensor([-math.inf] * 2), return_lse=True), plain, strict=True):
        assert_same_bits(x, y)


@natives
@rows
def test_any_softcap(backend: str, T: int) -> None:
    """From the least to the greatest there is: near 0 all keys are alike, far above nothing is capped."""
    qkv = make_qkv(1, 2, 1, T, 70, 16, 24)
    with collected() as attempt:
        for softcap in (2.0**-100, 1e-20, 0.3, 20.0, 300.0, 4096.0, 1e20, 2.0**100):
            attempt(softcap, check, backend, answer_of(qkv, mask=headwise.causal(), softcap=softcap))


@natives
@rows
def test_the_gradient_below_any_softcap(backend: str, T: int) -> None:
    """Far above the scores it is that of no softcap, far below it no score has one."""
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 2, 1, T, 70, 16, 24))
    go = torch.randn(1, 2, T, 24)
    plain = torch.autograd.grad(attend(backend, q, k, v), (q, k, v), go)
    for softcap in (1e6, 1e20, 2.0**100):
        ours = torch.autograd.grad(attend(backend, q, k, v, softcap=softcap), (q, k, v), go)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    for softcap in (1e-6, 1e-20, 2.0**-100):
        dq, dk, dv = torch.autograd.grad(attend(backend, q, k, v, softcap=softcap), (q, k, v), go)
        assert float(dq.abs().max()) < 1e-4 and float(dk.abs().max()) < 1e-4
        mean = (go / 70).sum((1, 2), keepdim=True).expand_as(v)
        torch.testing.assert_close(dv, mean, rtol=1e-4, atol=1e-5)


@natives
@rows
def test_slopes_from_far_away(backend: str, T: int) -> None:
    """Distances to 2^40, beyond int32, with slopes so small that they still tell keys apart: forward and gradient."""
    q, k, v = make_qkv(1, 2, 1, T, 300, 8, 8)
    for offset in ((1 << 30) - 7, (1 << 30) + 200, 1 << 33, -(1 << 33), 1 << 40, -(1 << 40)):
        unit = 2.0 ** (5 - abs(offset).bit_length())  # scores within 32 of what they would be
        slopes = torch.tensor([unit, 0.3 * unit], requires_grad=True)
        wide = slopes.detach().double().requires_grad_()
        out, lse = attend(backend, q, k, v, mask=headwise.alibi(slopes, offset=offset), return_lse=True)
        wanted, its = reference(*(x.double() for x in (q, k, v)), mask=headwise.alibi(wide, offset=offset))
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse.double(), its, rtol=1e-6, atol=1e-4)
        (grad,), (right,) = (torch.autograd.grad(x.sum(), y) for x, y in ((lse, slopes), (its, wide)))
        torch.testing.assert_close(grad.double(), right, rtol=1e-4, atol=1.0)


@natives
@rows
def test_a_bias_is_rounded_to_float32(backend: str, T: int) -> None:
    """-1e300 of a float64 tensor is -inf there, which forbids: beside other keys, and where a row has no others."""
    q, k, v = make_qkv(1, 2, 1, T, 1100, 8, 8)
    for low in (torch.zeros(1100).masked_fill(torch.arange(1100) < 1030, -math.inf), torch.full((1100,), -math.inf)):
        fine = low.double().clamp(min=-1e300)
        one, other = (attend(backend, q, k, v, mask=headwise.bias(x), return_lse=True) for x in (fine, low))
        assert_same_bits(one[0], other[0])
        assert_same_bits(one[1], other[1])


@pytest.mark.sweep
@native_dtypes
@rows
def test_one_key_and_equal_keys_are_exact(backend: str, dtype: torch.dtype, T: int) -> None:
    """A weight of 1 and weights of 1/2^n leave nothing to round, at any height of the logits and any scale."""
    with collected() as attempt:
        for height in (0.1, 1.0, 7.3, 113.0):
            for scale in (None, 0.37, 1.9):
                q, k, v = make_qkv(2, 4, 2, T, 1, 40, 24, dtype=dtype, scale=height**0.5)
                one = attend(backend, q, k, v, scale=scale)
                attempt(f"one key, {height}, {scale}", assert_same_bits, one, v.repeat_interleave(2, 1).expand_as(one))
                last = attend(backend, *make_qkv(2, 4, 2, T, 70, 40, 24, dtype=dtype), mask=headwise.window(1))
                kept = make_qkv(2, 4, 2, T, 70, 40, 24, dtype=dtype)[2][:, :, 70 - T :].repeat_interleave(2, 1)
                attempt(f"window of one, {height}, {scale}", assert_same_bits, last, kept)
                for count in (2, 8, 64, 128):
                    same = k.expand(2, 2, count, 40)
                    ones = attend(backend, q, same, torch.ones(2, 2, count, 24, dtype=dtype), scale=scale)
                    attempt(f"{count} equal keys, {height}", assert_same_bits, ones, torch.ones_like(ones))


@native_dtypes
def test_statistics_know_no_height(backend: str, dtype: torch.dtype) -> None:
    """Those of rows, and what keys receive in a second pass: weights are made of the greatest score, not of the lse."""
    n = Sizes(1, 2, 2, 37, 131, 8, 8)
    q, k = torch.ones(1, n.H, n.T, n.D, dtype=dtype), torch.zeros(1, n.K, n.S, n.D, dtype=dtype)
    k[..., 3] = -torch.randint(0, 12, (n.S,), generator=torch.Generator().manual_seed(2)).to(dtype) / 2
    results = []
    for height in (0.0, 8192.0, -8192.0):
        k[..., 5] = height
        with instructions(backend):
            results.append(headwise.statistics(q, k, mask=headwise.causal(), scale=1.0, offsets=2))
    for high in results[1:]:
        for name in ("entropy", "largest", "largest_key", "distance", "offsets", "received", "pooled"):
            assert_same_bits(getattr(high, name), getattr(results[0], name), what=name)


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradients_at(backend: str, height: float, T: int, S: int, dtype: torch.dtype, by: str) -> list[Tensor]:
    """Of sinks, keys and values, and of what queries add below `height`, on which all scores stand."""
    source = torch.Generator().manual_seed(S)
    q, k = torch.ones(1, 2, T, 8, dtype=dtype), torch.zeros(1, 1, S, 8, dtype=dtype)
    k[0, 0, :, 3] = -torch.randint(0, 12, (S,), generator=source).to(dtype) / 2
    k[..., 5] = height if by == "keys" else 0
    v = torch.randint(-4, 5, (1, 1, S, 5), generator=source).to(dtype)
    mask = headwise.bias(torch.full((1, 1), height)) if by == "a bias" else None
    sinks = torch.tensor([height, height - 1.5], requires_grad=True)
    grad_out = torch.randint(-4, 5, (1, 2, T, 5), generator=source).to(dtype)
    with instructions(backend) as native:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = headwise.attention(*leaves, scale=1.0, mask=mask, sinks=sinks, return_lse=True, backend=native)
        grads = torch.autograd.grad([out, lse], [*leaves, sinks], [grad_out, torch.ones_like(lse)])
    return [grads[0][..., 3], *grads[1:]]


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("S", [7, 131, 1031])
@pytest.mark.parametrize("T", [1, 3, 37])
def test_gradients_know_no_height(backend: str, dtype: torch.dtype, T: int, S: int) -> None:
    """Scores that all stand 8192 higher have the same weights, and so the same gradients to the bit.

    An lse of 8192 in float32 is off by up to 5e-4, and so was every weight that was made of it.
    """
    plain = gradients_at(backend, 0.0, T, S, dtype, "keys")
    assert all(bool(x.any()) for x in plain)
    with collected() as attempt:
        for by in ("keys", "a bias"):
            for height in (64.0, 8192.0, -8192.0):
                high = gradients_at(backend, height, T, S, dtype, by)
                for name, x, y in zip(("query", "key", "value", "sinks"), high, plain, strict=True):
                    attempt(f"{name} at {height} by {by}", assert_same_bits, x, y)


@natives
def test_gradients_of_few_rows_and_very_many_keys_know_no_height(backend: str) -> None:
    """Here products of few rows are not kept but made twice."""
    plain, high = (gradients_at(backend, height, 2, 16411, torch.float32, "keys") for height in (0.0, 8192.0))
    for x, y in zip(high, plain, strict=True):
        assert_same_bits(x, y)


@native_dtypes
@pytest.mark.parametrize("T", [1, 3, 37])
def test_one_key_with_all_the_weight_leaves_scores_no_gradient(backend: str, dtype: torch.dtype, T: int) -> None:
    """As softmax's own gradient has it: P (dP - delta) is 0 there, not a rounding of dP times a long key."""
    q, k, v = make_qkv(1, 2, 2, T, 70, 40, 131, dtype=dtype)
    k[:, :, 66] = 8 * q[:, :, 0]
    q = q[:, :, :1].expand_as(q) * 8
    with instructions(backend) as native:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = headwise.attention(*leaves, scale=1.0, backend=native)
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        grads = torch.autograd.grad(out, leaves, grad_out)
    assert bool((grads[0] == 0).all()) and bool((grads[1] == 0).all())
    assert bool((grads[2][:, :, :66] == 0).all()) and bool(grads[2][:, :, 66].any())


@natives
@rows
def test_a_value_behind_a_mask_may_overflow(backend: str, T: int) -> None:
    """dO V^T of a key that nobody may attend is infinite: 0 times it is no NaN."""
    with collected() as attempt:
        for S in (11, 70):
            q, k, v = make_qkv(1, 2, 2, T, S, 16, 16)
            grads = []
            for hidden in (0.0, 3e38):
                v[:, :, 7] = hidden
                with instructions(backend) as native:
                    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                    out = headwise.attention(*leaves, mask=headwise.keep(torch.arange(S) != 7), backend=native)
                    grads.append(torch.autograd.grad(out, leaves, torch.full_like(out, 64.0)))
            for name, x, y in zip(("query", "key", "value"), *grads, strict=True):
                attempt(f"{S} keys, {name}", assert_same_bits, x, y)


def test_these_tests_can_fail() -> None:
    """A weight 1 % off deep down, and one that is flushed to 0 while it is no denormal, are seen."""
    right = torch.softmax(-torch.arange(0, 160, 0.25).double(), 0)
    for fault in (lambda w: w * (1 + 0.01 * (w < 1e-20)), lambda w: w * (w > 1e-30)):
        with pytest.raises(AssertionError, match="entry"):
            close(fault(right), right, 1e-4, torch.finfo(torch.float32).tiny)
