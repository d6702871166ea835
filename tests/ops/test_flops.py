"""What torch's FLOP counter counts of attention: two for each multiply and add over the pairs that are computed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import fresh
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headwise
from headwise.cache import PagedCache, PagePool, StaticCache, quantize
from headwise.ops.masks.mask import Mask
from headwise.ops.native.library import isas
from headwise.plan.model.layer import AttentionLayer

B, H, K, T, S, D, V = 2, 6, 3, 67, 131, 16, 11
native = pytest.mark.skipif(not isas(), reason="the native library is not built: make native")


def tensors(grad: bool = False, rows: int = T) -> tuple[torch.Tensor, ...]:
    shapes = (B, H, rows, D), (B, K, S, D), (B, K, S, V)
    return tuple(torch.randn(shape, requires_grad=grad) for shape in shapes)


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


PLAIN = 2 * B * H * T * S * (D + V)


@pytest.mark.parametrize("backend", ["auto", "native", "sdpa", "blocks", "reference"])
def test_every_backend_counts_the_same_of_a_plain_call(backend: str) -> None:
    if backend == "native" and not isas():
        pytest.skip("the native library is not built: make native")
    for grad in (False, True):
        q, k, v = torch.randn(B, H, T, D), torch.randn(B, K, S, D), torch.randn(B, K, S, D)
        q.requires_grad_(grad)
        run = partial(headwise.attention, q, k, v, backend=backend)
        assert (
            counted(run) == counted(partial(headwise.attention, q, k, v, backend="reference")) == 4 * B * H * T * S * D
        )


@native
def test_values_of_another_size() -> None:
    """The kernel computes them alone; other backends may add columns, and count them."""
    q, k, v = tensors()
    assert counted(lambda: headwise.attention(q, k, v)) == counted(lambda: headwise.attention(*tensors(True))) == PLAIN


@native
def test_a_gradient_is_two_and_a_half_times_as_much() -> None:
    """Of a square head: scores anew, and two products for each of the two of the forward pass."""
    q, k, v = (torch.randn(B, H, T, D, requires_grad=True) for _ in range(3))
    pairs = B * H * T * T
    for backend in ("native", "sdpa"):
        for mask, share in ((None, 1.0), (headwise.causal(), (T + 1) / (2 * T))):
            attend = partial(headwise.attention, q, k, v, backend=backend, mask=mask)
            assert counted(attend) == round(4 * share * pairs * D), (backend, mask)
            out = attend()
            assert counted(out.sum().backward) == round(10 * share * pairs * D), (backend, mask)
    q, k, v = tensors(grad=True)
    out, lse = headwise.attention(q, k, v, softcap=3.0, return_lse=True)
    assert counted((out.sum() + lse.sum()).backward) == 2 * B * H * T * S * (3 * D + 2 * V)


MASKS: dict[str, Callable[[], Mask]] = {
    "causal": headwise.causal,
    "window": lambda: headwise.window(9, 4),
    "first keys": lambda: headwise.window(9, first=5) & headwise.lengths(torch.tensor([53, 131])),
    "lengths": lambda: headwise.lengths(torch.tensor([3, 127])),
    "offsets": lambda: headwise.causal(offset=torch.tensor([-5, 41])),
    "keys from a start": lambda: (
        headwise.window(9, first=50) & headwise.lengths(torch.tensor([53, 97]), start=torch.tensor([31, 7]))
    ),
    "segments": lambda: headwise.segments(torch.arange(T)[None] // 23, torch.arange(S)[None] // 31),
    "blocks": lambda: headwise.blocks(17) & headwise.causal(),
}


@native
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("grad", [False, True])
def test_pairs_of_a_mask(name: str, grad: bool) -> None:
    mask, (q, k, v) = MASKS[name](), tensors(grad)
    allowed = mask.sized(B, H).allowed(T, S)
    assert allowed is not None
    pairs = int(allowed.expand(B, H, T, S).sum())
    assert 0 < pairs < B * H * T * S
    assert counted(lambda: headwise.attention(q, k, v, mask=mask)) == 2 * pairs * (D + V)


@native
def test_tiles_of_a_map() -> None:
    """A tile of 64 x 64 that is not empty is computed whole; and a mask that is a tensor leaves nothing out."""
    q, k, v = tensors()
    far = headwise.rule(lambda b, h, i, j: (j >= 70) & (j < 75) & (i != j))
    assert counted(lambda: headwise.attention(q, k, v, mask=far)) == 2 * B * H * T * 64 * (D + V)
    keep = torch.rand(B, 1, T, S) > 0.5
    assert counted(lambda: headwise.attention(q, k, v, mask=keep)) == PLAIN


@native
def test_it_is_what_the_planner_says() -> None:
    q, k, v = tensors()
    for window, mask in ((None, headwise.causal()), (29, headwise.window(29))):
        layer = AttentionLayer("self", 0, H * D, H, K, D, V, window=window)
        planned = 2 * B * layer.score_macs() * layer.pairs(T, S)
        assert counted(lambda mask=mask: headwise.attention(q, k, v, mask=mask)) == planned


@native
@torch.no_grad()
def test_caches_and_int8() -> None:
    q, k, v = tensors(rows=1)
    caches = [StaticCache(B, K, D, V, capacity=S), StaticCache(B, K, D, V, capacity=S, dtype=torch.int8)]
    caches += [PagedCache(PagePool(4, K, D, V), B)]  # type: ignore[list-item]
    for cache in caches:
        cache.append(k, v)
        assert counted(lambda cache=cache: headwise.attention(q, cache)) == 2 * B * H * S * (D + V)
    assert counted(lambda: headwise.attention(q, quantize(k), quantize(v))) == 2 * B * H * S * (D + V)


@native
def test_a_step_of_a_module_is_counted() -> None:
    mha = headwise.MultiHeadAttention(12, 6, num_kv_heads=2).eval()
    cache, x = StaticCache(1, 2, 2, capacity=9), torch.randn(1, 5, 12)
    with torch.no_grad():
        mha(x, cache=cache)
        projections = 2 * 12 * (12 + 4 + 4 + 12)
        assert counted(lambda: mha(x[:, :1], cache=cache)) == projections + 2 * 6 * 6 * 4
    assert cache.lengths == [6]


@native
def test_statistics() -> None:
    """Out, with a column of values for each feature."""
    q, k, v = tensors()
    pairs = B * H * sum(S - T + i + 1 for i in range(T))
    feature = {"even": (torch.arange(S) % 2 == 0).float().expand(B, S)}
    got = counted(lambda: headwise.attention_statistics(q, k, v, mask=headwise.causal(), features=feature))
    assert got == 2 * pairs * (D + V + 1)


def test_without_the_library() -> None:
    code = """
import torch, headwise
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(2, 4, 64, 16)
for backend in ("auto", "sdpa", "blocks", "reference"):
    with FlopCounterMode(display=False) as counter:
        headwise.attention(q, q, q, backend=backend)
    print(counter.get_total_flops())
"""
    ran = fresh.run(code, HEADWISE_NATIVE="0")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["2097152"] * 4
