"""How close to the exact answer: forward and gradients, across tile edges, head sizes, dtypes, logits of any size.

The bar is PyTorch written out in the same dtype (fp32), mere rounding (halves), twice PyTorch's gradients; see
`headwise.testing.assert_close_like_torch`. `python tests/ops/test_accuracy.py` prints what the errors are.
"""

from __future__ import annotations

import math
import statistics
from functools import cache

import pytest
import torch
from backends import BEST, NATIVE, attend
from mask_cases import Sizes
from test_meaning_backward import budget_of, gradients
from torch import Tensor

import headwise
from headwise.cache import StaticCache
from headwise.testing import Accuracy, accuracy, assert_close_like_torch, assert_same_bits, make_qkv, naive, oracle

# (T, S) around the edges of tiles of 16, 32, 64 and 128; head sizes from 1 to 256, not multiples of 8 among them.
SHAPES = [
    Sizes(1, 2, 1, 1, 1, 1, 1),
    Sizes(2, 4, 2, 1, 97, 64, 64),
    Sizes(1, 3, 3, 15, 17, 3, 5),
    Sizes(1, 2, 1, 16, 31, 8, 40),
    Sizes(1, 2, 2, 31, 33, 17, 16),
    Sizes(1, 4, 1, 33, 64, 128, 128),
    Sizes(1, 1, 1, 63, 65, 32, 32),
    Sizes(1, 2, 1, 65, 63, 80, 72),
    Sizes(1, 2, 2, 64, 129, 256, 256),
    Sizes(1, 1, 1, 129, 257, 64, 64),
    Sizes(1, 1, 1, 40, 1030, 24, 20),
]
# (kind of input, factor on queries and keys): logits of standard deviation 1, 16, and one-hot rows
INPUTS = [("normal", 1.0), ("normal", 4.0), ("outlier", 1.0), ("sink", 1.0), ("duplicates", 2.0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ("reference", "blocks", "sdpa")
shapes = pytest.mark.parametrize("n", SHAPES, ids=[f"{n.T}x{n.S}x{n.D}" for n in SHAPES])
backends = pytest.mark.parametrize("backend", [*BACKENDS, *NATIVE])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def inputs(n: Sizes, dtype: torch.dtype, which: int) -> tuple[Tensor, Tensor, Tensor]:
    kind, scale = INPUTS[which]
    return make_qkv(*n, dtype=dtype, kind=kind, scale=scale, seed=which)


def causal(n: Sizes) -> Tensor:
    return torch.ones(n.T, n.S, dtype=torch.bool).tril(n.S - n.T)


@cache
def answers(n: Sizes, dtype: torch.dtype, which: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    qkv = inputs(n, dtype, which)
    return oracle(*qkv, mask=causal(n))[0], naive(*qkv, mask=causal(n))


@cache
def gradient_answers(n: Sizes, dtype: torch.dtype, which: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    leaves = dict(zip(("query", "key", "value"), inputs(n, dtype, which), strict=True))
    grad_out = make_qkv(n.B, n.H, 1, n.T, 1, n.V, 1, dtype=dtype, seed=9)[0]
    doubles = {name: x.double() for name, x in leaves.items()}
    exact = gradients(lambda **x: oracle(**x, mask=causal(n))[0], doubles, grad_out.double())
    rough = [
        gradients(lambda order=order, **x: naive(**x, mask=causal(n))[order], leaves, grad_out) for order in range(3)
    ]
    return exact, rough


@pytest.mark.sweep
@backends
@dtypes
@shapes
def test_forward(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    for which in range(len(INPUTS)):
        qkv = inputs(n, dtype, which)
        exact, rough = answers(n, dtype, which)
        ours = attend(backend, *qkv, mask=headwise.causal())
        what = f"{backend} {INPUTS[which]}"
        assert_close_like_torch(ours, exact, rough, values=qkv[2], factor=factor_of(backend, n, dtype), what=what)


def factor_of(backend: str, n: Sizes, dtype: torch.dtype) -> float | None:
    """On naive's error, where it is not the usual one. `test_native_accuracy` holds many rows to the usual one."""
    if dtype != torch.float32 or backend not in NATIVE:
        return None
    if n.B * n.H * n.T <= 8:  # the largest error of a handful of rows is luck, ours and naive's
        return 2.0
    if n.D >= 256:  # a score is one chain of D products; on Intel's CPUs torch's library adds shorter chains
        return 1.5
    return 1.5 if backend == "native-baseline" else None  # no fused multiply-add; naive, on this CPU's best, has it


@pytest.mark.sweep
@pytest.mark.parametrize("backend", [*BACKENDS, *BEST])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@shapes
def test_gradients(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    for which in (0, 1, 3):
        exact, rough = gradient_answers(n, dtype, which)
        largest = torch.cat([x.flatten() for x in exact.values()])
        for name, grad in our_gradients(backend, n, dtype, which).items():
            factor, ulps = budget_of(backend)
            naives = [r[name] for r in rough]
            what = f"{backend} {INPUTS[which]}: gradient of {name}"
            assert_close_like_torch(grad, exact[name], naives, values=ulps * largest, factor=factor, what=what)


def our_gradients(backend: str, n: Sizes, dtype: torch.dtype, which: int) -> dict[str, Tensor]:
    leaves = dict(zip(("query", "key", "value"), inputs(n, dtype, which), strict=True))
    grad_out = make_qkv(n.B, n.H, 1, n.T, 1, n.V, 1, dtype=dtype, seed=9)[0]
    return gradients(lambda **x: attend(backend, **x, mask=headwise.causal()), leaves, grad_out)


@backends
def test_one_key_and_equal_keys_are_exact(backend: str) -> None:
    """A weight of 1, and weights of 1/2^n, leave nothing to round."""
    q, k, v = make_qkv(2, 4, 2, 3, 1, 7, 5)
    assert torch.equal(attend(backend, q, k, v), v.repeat_interleave(2, 1).expand(2, 4, 3, 5))
    ones = torch.ones(1, 1, 8, 4)
    assert torch.equal(attend(backend, ones, ones, ones), ones)


@backends
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_logits_do_not_overflow(backend: str, dtype: torch.dtype) -> None:
    """Named cases of others: fp16 inputs of 256 (their product is infinite in fp16), bf16 values of 133120."""
    x = torch.full((1, 1, 4, 64), 256.0, dtype=dtype)
    assert torch.equal(attend(backend, x, x, torch.ones_like(x)), torch.ones_like(x))
    if dtype == torch.bfloat16:
        big = torch.full((1, 1, 4, 64), 133120.0, dtype=dtype)
        assert torch.equal(attend(backend, big, big, big), big)


@pytest.mark.parametrize("backend", ["reference", "blocks", *NATIVE])
@pytest.mark.parametrize("height", [-300.0, 80.0, 300.0])
def test_huge_sinks_do_not_overflow(backend: str, height: float) -> None:
    """exp(300) is infinite in float32: the sink takes part in the maximum that is subtracted."""
    n = Sizes(1, 2, 1, 3, 5, 4, 4)
    qkv, sinks = make_qkv(*n), torch.full((n.H,), height)
    out, lse = attend(backend, *qkv, sinks=sinks, return_lse=True)
    exact, its = oracle(*qkv, sinks=sinks)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), its, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        headwise.weights(*qkv[:2], sinks=sinks).sum(-1).double(), 1 - torch.exp(height - its), rtol=1e-5, atol=1e-6
    )


@backends
def test_a_band_of_minus_infinity(backend: str) -> None:
    """pytorch#127055: a dense 600 x 600 band of -inf once gave NaN."""
    q, k, v = make_qkv(1, 1, 1, 600, 600, 8, 8)
    i, j = torch.arange(600)[:, None], torch.arange(600)
    band = torch.zeros(600, 600).masked_fill((i - j).abs() > 50, -math.inf)
    dense = attend(backend, q, k, v, mask=headwise.bias(band))
    structural = attend(backend, q, k, v, mask=headwise.window(51, 50))
    torch.testing.assert_close(dense, structural, rtol=1e-5, atol=1e-6)
    assert bool(dense.isfinite().all())


# -- the precision of biases, and numbers at the ends of float32 ------------------------------------------------------

ATTEND = ("auto", "reference", "blocks", "sdpa", "flex", *BEST)
everywhere = pytest.mark.parametrize("backend", [*ATTEND, "the rest"])


def results(backend: str, q: Tensor, k: Tensor, v: Tensor, mask: headwise.Mask) -> list[Tensor]:
    """All that a mask with biases has a part in: the output by one backend, or what is no attention."""
    if backend != "the rest":
        return [attend(backend, q, k, v, mask=mask)]
    (B, K, S, D), V = k.shape, v.shape[3]
    cache = StaticCache(B, K, D, V, capacity=S, dtype=k.dtype, causal=False)
    attended = cache.append(k, v).attend(q, mask=mask)
    result = headwise.statistics(q, k, mask=mask, offsets=2, pool=3)
    numbers = (
        result.entropy,
        result.largest,
        result.distance,
        result.offsets,
        result.pooled,
        result.received,
        result.keys,
    )
    return [attended, headwise.weights(q, k, mask=mask), headwise.top_keys(q, k, 3, mask=mask).weights, *numbers]


@pytest.mark.unchecked
@everywhere
def test_biases_of_half_a_dtype_are_added_in_float32(backend: str) -> None:
    """Slopes times distance, and one bias plus another: the bits of the same numbers given as float32."""
    n = Sizes(1, 2, 1, 3, 31, 8, 8)
    q, k, v = make_qkv(*n)
    slopes = torch.tensor([1e-5, 0.3]).half()
    one, two = (100 * torch.randn(n.T, n.S, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    pairs = [
        (headwise.alibi(slopes, offset=70_000), headwise.alibi(slopes.float(), offset=70_000)),
        (headwise.bias(one) & headwise.bias(two), headwise.bias(one.float()) & headwise.bias(two.float())),
    ]
    i, j = torch.arange(n.T)[:, None], torch.arange(n.S)[None]
    for coarse, fine in pairs:
        for x, y in zip(*(results(backend, q, k, v, mask) for mask in (coarse, fine)), strict=True):
            assert_same_bits(x, y)
        for x, y in ((coarse.at(i, j, 3, 31)[1], fine.at(i, j, 3, 31)[1]), (coarse.added(3, 31), fine.added(3, 31))):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.unchecked
@everywhere
def test_half_slopes_reach_far(backend: str) -> None:
    """65,536 is infinite in float16, and 0 times that is NaN."""
    q, k, v = make_qkv(1, 1, 1, 1, 70_000, 8, 8)
    plain = results(backend, q, k, v, headwise.bias(torch.zeros(1)))
    for x, y in zip(results(backend, q, k, v, headwise.alibi(torch.zeros(1).half())), plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["auto", "reference", "blocks", "sdpa", "the rest"])
def test_slopes_of_float32_are_exact_in_float64(backend: str) -> None:
    n = Sizes(1, 2, 1, 3, 31, 8, 8)
    q, k, v = make_qkv(*n, dtype=torch.float64)
    slopes = torch.tensor([0.1, 1 / 3])
    away = (torch.arange(n.T)[:, None] + n.S - n.T - torch.arange(n.S)).abs()
    exact = headwise.bias(-slopes.double()[:, None, None] * away.double())
    for x, y in zip(*(results(backend, q, k, v, mask) for mask in (headwise.alibi(slopes), exact)), strict=True):
        assert_same_bits(x, y)
    rough = headwise.attention(q, k, v, mask=headwise.bias(-slopes[:, None, None] * away))
    assert not torch.equal(rough, headwise.attention(q, k, v, mask=exact))


@pytest.mark.parametrize("backend", ["auto", "reference", "blocks", "the rest"])
def test_biases_of_float32_are_added_in_float64(backend: str) -> None:
    """A sum of two that is rounded to float32 first is off by up to 1e-7."""
    q, k, v = make_qkv(1, 2, 1, 3, 31, 8, 8, dtype=torch.float64)
    one, other = torch.randn(2, 3, 31), torch.randn(31).bfloat16()
    exact = headwise.bias(one.double() + other.double())
    for x, y in zip(
        *(results(backend, q, k, v, mask) for mask in (headwise.bias(one) & headwise.bias(other), exact)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


@pytest.mark.unchecked
@everywhere
def test_a_bias_finer_than_the_scores_is_rounded_to_their_precision(backend: str) -> None:
    """In float32 -1e300 is -inf, which forbids: such a row is empty. In float64 it is a number like any other."""
    n = Sizes(1, 2, 1, 3, 7, 8, 8)
    low = torch.zeros(n.T, n.S, dtype=torch.float64)
    low[1] = -1e300
    q, k, v = make_qkv(*n)
    masks = (headwise.bias(low), headwise.bias(low.float()))
    for x, y in zip(*(results(backend, q, k, v, mask) for mask in masks), strict=True):
        assert_same_bits(x, y)
    assert bool((results(backend, q, k, v, masks[0])[0][:, :, 1] == 0).all())
    if backend in BACKENDS:
        wide = attend(backend, *(x.double() for x in (q, k, v)), mask=low)
        torch.testing.assert_close(wide[:, :, 1], v.double().mean(2).expand(-1, 2, -1))


@pytest.mark.unchecked
@everywhere
def test_the_lowest_bias_is_a_number(backend: str) -> None:
    """Many write their masks with float32's lowest number.

    A row of nothing else is not empty: scores are lost in it, and the values' mean is left.
    """
    n = Sizes(1, 2, 1, 3, 7, 8, 8)
    low = torch.zeros(n.T, n.S)
    low[1], low[2, 3:] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    q, k, v = make_qkv(*n)
    out = results(backend, q, k, v, headwise.bias(low))[0]
    torch.testing.assert_close(out[:, :, 1], v.mean(2).expand(-1, 2, -1), rtol=1e-6, atol=1e-6)
    kept = results(backend, q, k, v, headwise.keep(low == 0))[0]
    torch.testing.assert_close(out[:, :, 2], kept[:, :, 2], rtol=1e-6, atol=1e-6)


@pytest.mark.unchecked
@pytest.mark.parametrize("backend", ATTEND)
def test_scales_and_softcaps_at_their_bounds(backend: str) -> None:
    """2**100 and 2**-100 are right; large and small queries bring the scores back to where they show."""
    n = Sizes(2, 4, 2, 5, 67, 16, 8)
    for scale, softcap in ((2.0**100, None), (2.0**-100, None), (0.5, 2.0**100), (0.5, 2.0**-100), (2.0**100, 2.0)):
        q, k, v = make_qkv(*n)
        size = 1.0 if abs(math.log2(scale)) < 99 else 2.0 ** (-0.5 * math.log2(scale))
        options = {"scale": scale} if softcap is None else {"scale": scale, "softcap": softcap}
        out = attend(backend, q * size, k * size, v, **options)
        if out is None:
            assert backend == "sdpa" and softcap
            continue
        qkv = (q * size, k * size, v)
        exact, rough = oracle(*qkv, **options)[0], naive(*qkv, **options)
        assert_close_like_torch(out, exact, rough, values=4 * v, what=f"scale {scale}, softcap {softcap}")


def survey() -> None:
    """Print, by backend and dtype, our largest error beside naive PyTorch's, rounding's and the budget."""
    for backend in (*BACKENDS, *NATIVE):
        for dtype in DTYPES:
            seen: list[Accuracy] = []
            for n in SHAPES:
                for which in range(len(INPUTS)):
                    qkv = inputs(n, dtype, which)
                    exact, rough = answers(n, dtype, which)
                    seen.append(accuracy(attend(backend, *qkv, mask=headwise.causal()), exact, rough, values=qkv[2]))
            show(f"{backend:19} {str(dtype)[6:]:9} out", seen)
        for dtype in DTYPES[:2]:
            for name in ("query", "key", "value"):
                seen = []
                for n in SHAPES:
                    for which in (0, 1, 3):
                        right, naives = gradient_answers(n, dtype, which)
                        ours = our_gradients(backend, n, dtype, which)[name]
                        seen.append(accuracy(ours, right[name], [x[name] for x in naives], factor=2.0))
                show(f"{backend:19} {str(dtype)[6:]:9} gradient of {name}", seen)


def show(what: str, seen: list[Accuracy]) -> None:
    to_naive = [a.ours / a.naive for a in seen if a.naive]
    to_floor = [a.ours / a.floor for a in seen if a.floor]
    of_budget = max(a.ours / a.budget for a in seen if a.budget)
    print(
        f"{what:40} / naive: median {statistics.median(to_naive):.2f} max {max(to_naive):.2f}   "
        f"/ rounding: median {statistics.median(to_floor):.2f} max {max(to_floor):.2f}   "
        f"of budget at most {of_budget:.2f}   worst {max(a.ours for a in seen):.2e}"
    )


if __name__ == "__main__":
    survey()
