"""Training through a cache: append, attend, append, attend, backward, beside the same keys in one piece."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.nn import LatentAttention, MultiHeadAttention, Rotary

B, H, K, D, V, M = 2, 6, 3, 7, 5, 13
PIECES = (4, 1, 3, 1)
CACHES: dict[str, Callable[..., KVCache]] = {
    "static": lambda **more: StaticCache(B, K, D, V, capacity=17, **more),
    "paged": lambda **more: PagedCache(PagePool(2 * B, K, D, V, **more), B),
    "rolling": lambda **more: RollingCache(B, K, D, V, window=5, first=1, **more),
}
RULES = {"static": headwise.causal(), "paged": headwise.causal(), "rolling": headwise.window(5, first=1)}


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    T = sum(PIECES)
    shapes = ((B, H, T, D), (B, K, T, D), (B, K, T, V))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def loss(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).square().sum()


def through(cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for qi, ki, vi in zip(*(x.split(PIECES, 2) for x in (q, k, v)), strict=True):
        outs.append(headwise.attention(qi, cache.append(ki, vi)))
    return torch.cat(outs, 2)


def close(one: Any, other: Any) -> None:
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * float(y.detach().abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", CACHES)
def test_gradients_through_appends(kind: str, dtype: torch.dtype) -> None:
    q, k, v = leaves(dtype)
    whole = headwise.attention(q, k, v, mask=RULES[kind])
    parts = through(CACHES[kind](dtype=dtype), q, k, v)
    close([parts], [whole])
    close(torch.autograd.grad(loss(parts), (q, k, v)), torch.autograd.grad(loss(whole), (q, k, v)))


@pytest.mark.parametrize("kind", CACHES)
def test_keys_without_a_gradient_and_steps_in_between(kind: str) -> None:
    """Queries alone learn; tokens that come later, with or without a recorded gradient, change nothing of it."""
    q, k, v = leaves(torch.float32)
    k, v = k.detach(), v.detach()
    cache, whole = CACHES[kind](), headwise.attention(q, k, v, mask=RULES[kind])
    parts = through(cache, q, k, v)
    with torch.no_grad():
        token = torch.randn(B, H, 1, D), torch.randn(B, K, 1, D), torch.randn(B, K, 1, V)
        assert not headwise.ops.native.library.isas() or (cache.takes_steps() and cache.step(*token) is not None)
        cache.append(*token[1:])
    close(torch.autograd.grad(loss(parts), q), torch.autograd.grad(loss(whole), q))


def test_tokens_without_a_gradient_leave_that_of_earlier_ones() -> None:
    """A token that is appended under no_grad, after a call whose gradient needs the keys, is a constant among them."""
    q, k, v = leaves(torch.float32)
    cache = CACHES["static"]().append(k[:, :, :4], v[:, :, :4])
    first = headwise.attention(q[:, :, :4], cache)
    with torch.no_grad():
        cache.append(k[:, :, 4:5], v[:, :, 4:5])
    outs = torch.cat([first, headwise.attention(q[:, :, 4:5], cache)], 2)
    parts = [torch.cat([x[:, :, :4], x[:, :, 4:5].detach()], 2) for x in (k, v)]
    whole = headwise.attention(q[:, :, :5], *parts, mask=RULES["static"])
    close(torch.autograd.grad(loss(outs), (q, k, v)), torch.autograd.grad(loss(whole), (q, k, v)))


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_is_emptied_trains_again(kind: str) -> None:
    q, k, v = leaves(torch.float32)
    cache = CACHES[kind]()
    found = []
    for _ in range(3):
        found.append(torch.autograd.grad(loss(through(cache, q, k, v)), (q, k, v)))
        cache.truncate(0)
    close(found[1], found[0])
    close(found[2], found[0])


@pytest.mark.parametrize("kind", CACHES)
def test_rows_that_are_reordered_and_forks(kind: str) -> None:
    q, k, v = leaves(torch.float32)
    head, tail = (x[:, :, :4] for x in (q, k, v)), (x[:, :, 4:5] for x in (q, k, v))
    (_, k0, v0), (q1, k1, v1) = head, tail
    cache = CACHES[kind]().append(k0, v0)
    other = cache.fork()
    other.append(k1.detach(), v1.detach())
    out = headwise.attention(q1, cache.reorder([1, 1]).append(k1, v1))
    whole = [torch.cat([x[[1, 1]], y], 2) for x, y in ((k0, k1), (v0, v1))]
    expected = headwise.attention(q1, *whole, mask=RULES[kind])
    close(torch.autograd.grad(loss(out), (q, k, v)), torch.autograd.grad(loss(expected), (q, k, v)))


@pytest.mark.parametrize("latent", [False, True])
def test_modules_train_through_a_cache(latent: bool) -> None:
    torch.manual_seed(2)
    module: Any = MultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, value_dim=V, rotary=Rotary(D, rotary_dim=4))
    cache = StaticCache(B, K, D, V, capacity=17)
    if latent:
        module = LatentAttention(M, 3, kv_lora_rank=6, nope_dim=5, rope_dim=2, value_dim=7)
        cache = StaticCache(B, 1, 8, 6, capacity=17, shared=True)
    x = torch.randn(B, sum(PIECES), M)
    found = []
    for cached in (True, False):
        module.zero_grad()
        parts = [module(piece, cache=cache)[0] for piece in x.split(PIECES, 1)] if cached else []
        out = torch.cat(parts, 1) if cached else module(x, mask=headwise.causal())
        loss(out).backward()
        found.append([p.grad.clone() for p in module.parameters()])
    close(*found)


def test_views_that_a_gradient_reads() -> None:
    """Keys that were looked at and then used by something else stay as they were."""
    q, k, v = leaves(torch.float32)
    cache = CACHES["static"]().append(k[:, :, :4], v[:, :, :4])
    key, value = cache.view()
    assert isinstance(key, Tensor)
    scores = (q[:, ::2, :4] @ key.mT).softmax(-1)
    cache.append(k[:, :, 4:], v[:, :, 4:])
    ours = torch.autograd.grad(loss(scores @ value), (q, k, v))
    theirs = torch.autograd.grad(loss((q[:, ::2, :4] @ k[:, :, :4].mT).softmax(-1) @ v[:, :, :4]), (q, k, v))
    close(ours, theirs)
