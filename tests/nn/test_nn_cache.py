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
from headwise.nn.decode.cache_protocol import ModuleCache, chunk_of, has_keys, is_causal

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
    mha.k_proj.register_forward_hook(lambda *arguments: calls.append(arguments[2]))
    rest, _ = mha(x[:, 1:], cache=cache)
    assert not calls and cache.length == 7
    torch.testing.assert_close(torch.cat([first, rest], dim=1), mha(x, memory), rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match="holds its memory already"):
        mha(x, memory, cache=cache)


@torch.no_grad()
def test_cross_attention_turns_its_queries_at_every_step() -> None:
    mha, memory, x = module(memory_dim=11), torch.randn(B, 7, 11), torch.randn(B, 4, M)
    places, of_memory = torch.tensor([5, 2, 11, 3]), torch.arange(7)
    cache = StaticCache(B, K, D, capacity=7, causal=False)
    outs = [mha(x[:, :1], memory, cache=cache, positions=(places[:1], of_memory))[0]]
    for i in range(1, 4):
        at = places[i : i + 1]
        outs.append(mha(x[:, i : i + 1], cache=cache, positions=(at, of_memory) if i == 1 else at)[0])
    expected = mha(x, memory, positions=(places, of_memory))
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=2e-5, atol=2e-6)


class Upcasting(torch.nn.Module):
    """A norm that gives float32 for whatever it gets, as many a model's own does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.float())


@torch.no_grad()
def test_a_norm_that_upcasts_leaves_the_dtype_as_it_was() -> None:
    mha = module(qk_norm=Upcasting).bfloat16()
    assert mha.q_norm is not None and mha.k_norm is not None
    mha.q_norm.float(), mha.k_norm.float()
    x = torch.randn(B, 5, M).bfloat16()
    out, cache = mha(x, cache=StaticCache(B, K, D, capacity=5, dtype=torch.bfloat16))
    whole = mha(x, mask=headwise.causal())
    assert out.dtype == whole.dtype == torch.bfloat16 and cache.length == 5
    torch.testing.assert_close(out, whole, rtol=2e-2, atol=2e-2)


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


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"mask": 3}, TypeError, "mask is a Mask"),
        ({"gate": 0.5}, TypeError, "gate is a float tensor"),
        ({"lengths": [9, 4, 99]}, ValueError, "from 0 to T = 23; got [9, 4, 99]"),
        ({"lengths": [9, 4, 1.5]}, TypeError, "lengths are whole numbers"),
        ({"lengths": [9, 4]}, ValueError, "lengths are (B,) = (3,) numbers"),
        ({"positions": torch.arange(2)}, ValueError, "positions are (T,) or (B, T)"),
    ],
)
@pytest.mark.parametrize("name", CACHES)
@torch.no_grad()
def test_what_is_wrong_is_said_before_the_cache_has_it(
    name: str, wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    """A rolling cache takes the tokens piece by piece: it would have the first ones by then."""
    mha, cache = module(), CACHES[name]()
    with pytest.raises(error) as caught:
        mha(torch.randn(B, T, M), cache=cache, **wrong)
    assert text in str(caught.value)
    assert cache.lengths == [0] * B


# -- what a module asks of a cache -------------------------------------------------------------------------------------


class Least:
    """A cache of one's own, with no more than a module requires."""

    def __init__(self) -> None:
        self.lengths, self.tokens = [0] * B, torch.empty(2, B, K, 0, D)

    def append(self, key: Tensor, value: Tensor | None = None, *, lengths: Any = None) -> None:
        assert value is not None and lengths is None
        self.tokens = torch.cat([self.tokens, torch.stack([key, value])], dim=3)
        self.lengths = [self.tokens.shape[3]] * B

    def attend(self, query: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
        rule = headwise.causal() if mask is None else headwise.causal() & mask
        return headwise.attention(query, *self.tokens, mask=rule, **options)


@pytest.mark.parametrize("name", CACHES)
def test_the_caches_are_what_modules_ask_for(name: str) -> None:
    cache = CACHES[name]()
    assert isinstance(cache, ModuleCache)
    rolling = name.startswith("rolling")
    assert (is_causal(cache), chunk_of(cache), has_keys(cache)) == (True, 4 if rolling else None, not rolling)
    assert cache.value_dim == D


@pytest.mark.unchecked
def test_what_a_cache_may_leave_out() -> None:
    class Keys(Least):
        keys = property(lambda self: pytest.fail("they may be a copy: nobody has asked for them"))

    least: Any = Least()
    keys: Any = Keys()
    assert (is_causal(least), chunk_of(least), has_keys(least)) == (True, None, False)
    assert has_keys(keys)
    least.keys = torch.zeros(1)
    assert has_keys(least)
    least.keys = None
    assert not has_keys(least)
    assert not is_causal(StaticCache(B, K, D, capacity=7, causal=False))


@pytest.mark.unchecked
@torch.no_grad()
def test_a_cache_of_ones_own() -> None:
    mha, x = module(), torch.randn(B, T, M)
    cache: Any = Least()
    out = torch.cat([mha(chunk, cache=cache)[0] for chunk in x.split([11, 1, 11], dim=1)], dim=1)
    torch.testing.assert_close(out, mha(x, mask=headwise.causal()), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["static", "paged", "rolling"])
def test_a_view_is_what_the_op_attends(name: str, dtype: torch.dtype) -> None:
    """With the columns of each row; under a window that the rows' own lengths do not show."""
    kinds: dict[str, Callable[[], KVCache]] = {
        "static": lambda: StaticCache(B, K, D, capacity=300, dtype=dtype),
        "paged": lambda: PagedCache(PagePool(9, K, D, dtype=dtype), B),
        "rolling": lambda: RollingCache(B, K, D, window=WINDOW, chunk=128, dtype=dtype),
    }
    cache = kinds[name]()
    for count in (128, 128, 30):
        cache.append(*torch.randn(2, B, K, count, D), lengths=[count, count, 17])
    assert cache.lengths == [286, 286, 51]
    query, columns = torch.randn(B, H, 1, D), cache.columns
    assert columns == (cache.lengths if name != "rolling" else [158, 158, 51])
    rule = headwise.lengths(torch.tensor(columns))
    if name == "rolling":
        rule = rule & headwise.window(WINDOW, offset=torch.tensor(columns) - 1)
    out = headwise.attention(query, *cache.view(), mask=rule)
    torch.testing.assert_close(out, headwise.attention(query, cache), rtol=1e-6, atol=1e-6)
