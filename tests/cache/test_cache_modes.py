"""Appending to caches and attending them while torch is in a mode: the numbers are those of plain calls.

The native kernel has ways of its own for a step and for int8, which see neither tangents nor batched tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import headwise
from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache, quantize

B, H, K, D, V = 2, 6, 3, 8, 5


class Passing(TorchDispatchMode):
    """Run each operator as it is, and count them."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def dispatch() -> Iterator[None]:
    with Passing() as mode:
        yield
    assert mode.seen


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "forward AD": forward_ad.dual_level,
    "dispatch": dispatch,
    "gradients": torch.enable_grad,
    "inference": torch.inference_mode,
}


def caches(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "static": StaticCache(B, K, D, V, capacity=19, dtype=dtype),
        "rolling": RollingCache(B, K, D, V, window=7, dtype=dtype),
        "paged": PagedCache(PagePool(5, K, D, V, dtype=dtype), B),
    }


def lived(cache: Any) -> list[Tensor]:
    """The outputs of a prompt of unequal rows and of four steps."""
    made = torch.Generator().manual_seed(1)
    outs = []
    for T in (6, 1, 1, 3, 1):
        q, k, v = (torch.randn(B, heads, T, n, generator=made) for heads, n in ((H, D), (K, D), (K, V)))
        cache.append(k, v, lengths=[T, T - 1] if T == 6 else None)
        outs.append(headwise.attention(q, cache, scale=0.5))
    return outs


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["static", "rolling", "paged"])
def test_a_cache_made_and_filled_in_inference_mode_goes_on_outside_of_it(name: str, dtype: torch.dtype) -> None:
    k, v, q = (torch.randn(B, heads, 9, n) for heads, n in ((K, D), (K, V), (H, D)))
    outs = []
    for mode in ("inference", "plain"):
        with MODES[mode]():
            cache = caches(dtype)[name].append(k[:, :, :5], v[:, :, :5])
            other = cache.fork().reorder([1, 0])
        for one in (cache, other):
            one.append(k[:, :, 5:8], v[:, :, 5:8]).truncate(7).append(k[:, :, 8:], v[:, :, 8:])
            outs.append(headwise.attention(q[:, :, 8:], one))
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])


@torch.no_grad()
@pytest.mark.parametrize("mode", list(MODES)[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_a_life_in_a_mode_has_the_numbers_of_a_plain_one(dtype: torch.dtype, mode: str) -> None:
    for name, cache in caches(dtype).items():
        with MODES[mode]():
            outs = lived(cache)
        for step, (ours, plain) in enumerate(zip(outs, lived(caches(dtype)[name]), strict=True)):
            torch.testing.assert_close(ours, plain, msg=lambda text, at=(name, step): f"{at}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["static", "rolling", "paged"])
def test_tangents_go_through_a_cache(name: str, dtype: torch.dtype) -> None:
    """As through one call on all keys and values; of int8, their scales have tangents."""
    T, cut = 6, 4
    tensors = [torch.randn(B, heads, T, n) for heads, n in ((H, D), (K, D), (K, V))]
    with forward_ad.dual_level():
        q, k, v = (forward_ad.make_dual(x, torch.randn_like(x)) for x in tensors)
        cache = caches(dtype)[name]
        parts = []
        for span in (slice(0, cut), slice(cut, cut + 1), slice(cut + 1, T)):
            cache.append(k[:, :, span], v[:, :, span])
            parts.append(headwise.attention(q[:, :, span], cache))
        if dtype == torch.int8:
            k, v = (quantize(x).dequantize(torch.float32) for x in (k, v))
        mask = headwise.causal() & headwise.window(7) if name == "rolling" else headwise.causal()
        whole = headwise.attention(q, k, v, mask=mask, backend="reference")
        for ours, theirs in zip(
            forward_ad.unpack_dual(torch.cat(parts, 2)), forward_ad.unpack_dual(whole), strict=True
        ):
            assert ours is not None and theirs is not None
            torch.testing.assert_close(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("name", ["static", "rolling", "paged"])
def test_a_step_of_batched_queries_is_that_of_each(name: str) -> None:
    """Under vmap, which gives the operators tensors that the kernel cannot read."""
    cache = caches(torch.float32)[name]
    lived(cache)
    queries = torch.randn(4, B, H, 1, D)
    made = torch.vmap(lambda query: headwise.attention(query, cache))(queries)
    for ours, query in zip(made, queries, strict=True):
        torch.testing.assert_close(ours, headwise.attention(query, cache))
    slopes = torch.func.jacrev(lambda query: headwise.attention(query, cache)[0, 0, 0, 0])(queries[0])
    assert slopes[0, 0].abs().max() > 0 and not slopes[1:].any() and not slopes[0, 1:].any()
