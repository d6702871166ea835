"""Modules that step with a cache: the same as one pass over the whole text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise import LatentAttention, MultiHeadAttention
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.nn import InnerAttention, Rotary

B, T, M, H, K, D = 3, 23, 28, 6, 2, 8
WINDOW = 5


def module(**parts: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    parts = {"rotary": Rotary(D), "qk_norm": torch.nn.RMSNorm, "bias": True} | parts
    return MultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, **parts).eval()


CACHES: dict[str, Callable[[], KVCache]] = {
    "static": lambda: StaticCache(B, K, D, capacity=T),
    "paged": lambda: PagedCache(PagePool(6, K, D), B),
    "rolling": lambda: RollingCache(B, K, D, window=WINDOW, chunk=4),
    "rolling, first kept": lambda: RollingCache(B, K, D, window=WINDOW, first=2, chunk=4),
}


def mask_of(name: str) -> headwise.Mask:
    if not name.startswith("rolling"):
        return headwise.causal()
    return headwise.window(WINDOW, first=2 if "first" in name else 0)


@pytest.mark.parametrize("chunks", [[T], [1] * T, [11, 1, 1, 10]], ids=str)
@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_pieces_are_the_whole(name: str, chunks: list[int]) -> None:
    mha, x, cache = (
        module(inner=InnerAttention(softcap=3.0, sinks=torch.randn(H))),
        torch.randn(B, T, M),
        CACHES[name](),
    )
    gate = torch.rand(B, H, T)
    outs, at = [], 0
    for chunk in x.split(chunks, dim=1):
        out, returned = mha(chunk, cache=cache, gate=gate[:, :, at : at + chunk.shape[1]])
        assert returned is cache
        outs.append(out)
        at += chunk.shape[1]
    whole = mha(x, mask=mask_of(name), gate=gate)
    torch.testing.assert_close(torch.cat(outs, dim=1), whole, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_rows_of_uneven_length(name: str) -> None:
    """A padded prompt, then steps behind each row's real end: every row as if it were alone."""
    mha, counts = module(), [9, 4, 1]
    prompt, more = torch.randn(B, 9, M), torch.randn(B, 6, M)
    cache = CACHES[name]()
    first, _ = mha(prompt, cache=cache, lengths=counts)
    rest = torch.cat([mha(step, cache=cache)[0] for step in more.split(1, dim=1)], dim=1)
    for b, n in enumerate(counts):
        alone = mha(torch.cat([prompt[b, :n], more[b]])[None], mask=mask_of(name))[0]
        torch.testing.assert_close(torch.cat([first[b, :n], rest[b]]), alone, rtol=2e-5, atol=2e-6)


@torch.no_grad()
def test_cross_attention_keeps_its_memory() -> None:
    mha, memory, x = module(memory_dim=11, rotary=None), torch.randn(B, 7, 11), torch.randn(B, 4, M)
    cache = StaticCache(B, K, D, capacity=7, causal=False)
    first, _ = mha(x[:, :1], memory, cache=cache)
    calls: list[Tensor] = []
    mha.k_proj.register_forward_hook(lambda *given: calls.append(given[2]))
    rest, _ = mha(x[:, 1:], cache=cache)
    assert not calls and cache.length == 7
    torch.testing.assert_close(torch.cat([first, rest], dim=1), mha(x, memory), rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match="holds its memory already"):
        mha(x, memory, cache=cache)


@pytest.mark.parametrize("name", ["static", "paged", "rolling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@torch.no_grad()
def test_latent_attention(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mla = LatentAttention(M, H, kv_lora_rank=12, nope_dim=6, rope_dim=4, value_dim=7).eval()
    sizes: dict[str, Any] = {"shared": True, "dtype": dtype}
    cache: KVCache = {
        "static": lambda: StaticCache(B, 1, 16, 12, capacity=T, **sizes),
        "paged": lambda: PagedCache(PagePool(6, 1, 16, 12, **sizes), B),
        "rolling": lambda: RollingCache(B, 1, 16, 12, window=WINDOW, chunk=9, **sizes),
    }[name]()
    x = torch.randn(B, T, M)
    out = torch.cat([mla(chunk, cache=cache)[0] for chunk in x.split([9, 1, 1, 1, 9, 2], dim=1)], dim=1)
    whole = mla(x, mask=mask_of(name))
    tolerance = 2e-5 if dtype == torch.float32 else 0.05 * float(whole.std())  # int8 keeps two digits
    torch.testing.assert_close(out, whole, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_a_refused_step_changes_nothing() -> None:
    mha, cache = module(), StaticCache(B, K, D, capacity=4)
    mha(torch.randn(B, 3, M), cache=cache)
    with pytest.raises(ValueError, match="capacity 4 has no room for 5 tokens"):
        mha(torch.randn(B, 2, M), cache=cache)
    assert cache.lengths == [3] * B
