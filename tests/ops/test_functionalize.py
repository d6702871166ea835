"""torch.func.functionalize and make_fx: attention in every backend, masks and caches, right or with a line of ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draw import slow_except
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.ops.native.library import isas

B, H, K, T, S, D, V = 2, 6, 3, 7, 13, 5, 11
Attend = Callable[..., Any]
WAYS: dict[str, Callable[[Attend, tuple[Tensor, ...]], Tensor]] = {
    "functionalize": lambda f, x: functionalize(f)(*x),
    "make_fx": lambda f, x: make_fx(f)(*x)(*x),
}
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": headwise.causal,
    "lengths": lambda: headwise.lengths(torch.tensor([0, 9])),
    "function": lambda: headwise.rule(lambda b, h, i, j: (i + j) % 3 != 1),
    "slopes": lambda: headwise.alibi(headwise.alibi_slopes(H)),
    "bool": lambda: torch.rand(B, 1, T, S) > 0.3,
}
CACHES: dict[str, Callable[[], KVCache]] = {
    "static": lambda: StaticCache(B, K, D, V, capacity=29),
    "int8": lambda: StaticCache(B, K, D, V, capacity=29, dtype=torch.int8),
    "paged": lambda: PagedCache(PagePool(4, K, D, V), B),
    "rolling": lambda: RollingCache(B, K, D, V, window=5),
}


def tensors() -> tuple[Tensor, ...]:
    return torch.randn(B, H, T, D), torch.randn(B, K, S, D), torch.randn(B, K, S, V)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", slow_except(MASKS, ("none", "lengths", "function")))
@pytest.mark.parametrize("backend", ["auto", "native", "sdpa", "blocks", "reference"])
def test_attention(backend: str, name: str, way: str) -> None:
    if backend == "native" and not isas():
        pytest.skip("the native library is not built: make native")
    mask, x = MASKS[name](), tensors()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.attention(q, k, v, mask=mask, backend=backend)

    if backend == "native" and way == "make_fx" and name == "function":
        with pytest.raises(ValueError, match="map of tiles, which is not made while tracing"):
            WAYS[way](run, x)
    elif way == "functionalize" and backend in ("native", "sdpa"):
        with pytest.raises(ValueError, match=f"backend '{backend}' does not support this call: .*torch.func"):
            WAYS[way](run, x)
    else:
        torch.testing.assert_close(WAYS[way](run, x), run(*x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_made_inside(kind: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = CACHES[kind]().append(k, v)
        first = headwise.attention(q, cache)
        return first + headwise.attention(q[:, :, :1], cache.append(k[:, :, :1], v[:, :, :1]))

    x = tensors()
    for way in WAYS.values():
        torch.testing.assert_close(way(run, x), run(*x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_made_outside_says_what_to_do(kind: str) -> None:
    q, k, v = tensors()
    cache = CACHES[kind]().append(k, v)
    with pytest.raises(ValueError, match="make the cache inside"):
        functionalize(lambda k, v: cache.append(k, v).attend(q))(k, v)
    assert cache.lengths == [S] * B
