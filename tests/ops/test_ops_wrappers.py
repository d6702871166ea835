"""What stands around every backend's kernel: padding to 16 bytes, gates in empty rows, fences, dense keys."""

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise.ops.backends.wrappers import aligned, fenced, gated
from headwise.ops.call import Call, Result
from headwise.ops.options import ScoreOptions

B, H, K, T, S = 2, 6, 3, 5, 7


def call_of(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **more: Any) -> Call:
    options = ScoreOptions.checked(query, key, mask, None, None, None)
    return Call(query, key, value, options._replace(**more))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_heads_are_padded_to_16_bytes_with_zeros_and_cut_again(dtype: torch.dtype) -> None:
    """Of every size: what a kernel gets is whole, as little as can be is added, and nothing of it comes out."""
    size = torch.finfo(dtype).bits // 8
    for D in range(1, 34):
        V = 34 - D
        seen: list[Call] = []

        def run(call: Call, seen: list[Call] = seen) -> Result:
            seen.append(call)
            return call.value[:, :1, :1].expand(B, H, T, -1) + 1, None

        x = [torch.ones(B, n, t, width, dtype=dtype) for n, t, width in ((H, T, D), (K, S, D), (K, S, V))]
        out, _ = aligned(run)(call_of(*x))
        for given, passed in zip(x, (seen[0].query, seen[0].key, seen[0].value), strict=True):
            width, whole = given.shape[-1], passed.shape[-1]
            assert whole * size % 16 == 0 and 0 <= (whole - width) * size < 16
            assert torch.equal(passed[..., :width], given) and not passed[..., width:].any()
        assert out.shape == (B, H, T, V) and torch.equal(out, torch.full_like(out, 2))


SHAPES = {"(H,)": (H,), "(B, H)": (B, H), "(B, H, T)": (B, H, T), "(B, H, T, V)": (B, H, T, 13)}


@pytest.mark.parametrize("incoming", [torch.nan, torch.inf, 3.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocks", "auto"])
def test_a_gate_learns_nothing_from_rows_that_may_attend_nothing(backend: str, shape: str, incoming: float) -> None:
    """The gradient is the sum over the other rows of the incoming one times the output without a gate."""
    query, key, value = torch.randn(B, H, T, 11), torch.randn(B, K, S, 11), torch.randn(B, K, S, 13)
    seen = torch.ones(B, 1, T, S, dtype=torch.bool)
    seen[0, 0, 1], seen[1, 0, 3:] = False, False
    alive = seen.any(-1, keepdim=True)
    gate = torch.randn(SHAPES[shape]).requires_grad_()
    grad = torch.randn(B, H, T, 13).masked_fill(~alive, incoming)
    out = headwise.attention(query, key, value, mask=headwise.keep(seen), gate=gate, backend=backend)
    [got] = torch.autograd.grad(out, gate, grad)
    plain = headwise.attention(query, key, value, mask=headwise.keep(seen), backend="reference")
    share = (plain * grad).masked_fill(~alive, 0.0)
    view = {1: (0, 2, 3), 2: (2, 3), 3: (3,), 4: ()}[gate.ndim]
    expected = share.sum(view) if view else share
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_gate_of_another_dtype_does_not_change_that_of_the_output() -> None:
    def run(call: Call) -> Result:
        return call.value[:, :1].expand(B, H, S, -1), None

    x = [torch.randn(B, n, S, 11).bfloat16() for n in (H, K, K)]
    gate = torch.rand(1, H, 1, 1)
    out, _ = gated(run)(call_of(*x, gate=gate))
    assert out.dtype == torch.bfloat16 and torch.equal(out, x[2][:, :1].expand(B, H, S, -1) * gate.bfloat16())


@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("learns", [False, True], ids=["plain", "gradient"])
def test_a_kernel_behind_the_fence_is_given_finite_numbers(place: str, learns: bool) -> None:
    """What is not finite is taken out before it, and shown in the rows that may attend it, in lse as in out."""
    names = ("query", "key", "value")
    x = {name: torch.randn(1, 1, T, 11) for name in names}
    x[place][0, 0, 2, 4] = torch.nan
    if learns:
        x["key"].requires_grad_()
    seen: list[Call] = []

    def run(call: Call) -> Result:
        seen.append(call)
        scores = call.query @ call.key.mT
        return scores.softmax(-1) @ call.value, scores.logsumexp(-1)

    mask = headwise.keep(torch.arange(T) != 2) if place != "query" else headwise.keep(torch.ones(1, T) > 0)
    calls = [call_of(*x.values(), mask), call_of(*x.values())]
    for number, call in enumerate(calls):
        out, lse = fenced(run)(call)
        final = seen[-1]
        assert all(tensor.isfinite().all() for tensor in (final.query, final.key, final.value))
        rows = [2] if place == "query" else [] if number == 0 else list(range(T))
        expected = torch.zeros(T, dtype=torch.bool)
        expected[rows] = True
        assert torch.equal(out[0, 0].isnan().any(-1), expected)
        assert lse is not None and torch.equal(lse[0, 0].isnan(), expected)


def test_dropout_is_drawn_once_behind_the_fence() -> None:
    """A second run would draw other weights: so values are looked at before, and the kernel runs once."""
    runs: list[int] = []

    def run(call: Call) -> Result:
        runs.append(1)
        return call.query @ call.key.mT @ call.value, None

    x = [torch.randn(1, 1, T, 11) for _ in range(3)]
    x[2][0, 0, 1] = torch.nan
    fenced(run)(call_of(*x, dropout=0.3))
    assert runs == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_keys_of_int8_give_the_query_its_own_dtype(dtype: torch.dtype) -> None:
    cache = headwise.cache.StaticCache(B, K, 11, 13, capacity=S, dtype=torch.int8)
    key, value = torch.randn(B, K, S, 11).to(dtype), torch.randn(B, K, S, 13).to(dtype)
    query, stored = torch.randn(B, H, T, 11).to(dtype), cache.append(key, value)
    for backend in ("reference", "sdpa", "blocks", "auto"):
        assert headwise.attention(query, stored, backend=backend).dtype == dtype
