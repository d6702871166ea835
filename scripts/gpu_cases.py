"""The cases of `scripts/gpu.py`: what is computed on an NVIDIA GPU, and the ways to do it, PyTorch's own among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import headwise
from headwise.cache import PagedCache, PagePool, StaticCache
from headwise.ops.triton import kernel_operators

Run = Callable[[], Any]


class Case(NamedTuple):
    """One row: what is computed, the least bytes and floating-point operations that it needs, and the ways to do it."""

    name: str
    bytes: int
    flops: int
    ways: dict[str, Callable[[], Run]]  # each makes its inputs, outside of what is timed


class Sizes(NamedTuple):
    """The heads of all cases, and what their lengths are divided by (more than 1 in tests)."""

    H: int = 32
    K: int = 8
    D: int = 128
    divisor: int = 1
    dtype: torch.dtype = torch.bfloat16

    def qkv(self, T: int, S: int, B: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((self.H, T), (self.K, S), (self.K, S))
        q, k, v = (torch.randn(B, heads, n, self.D, device="cuda", dtype=self.dtype) for heads, n in shapes)
        return q, k, v


def cases(sizes: Sizes) -> Iterator[Case]:
    """The rows of the table, smallest memory first within each kind."""
    pairs = 4 * sizes.H * sizes.D  # floating-point operations of one query and key, all heads
    rows = 2 * (sizes.H + sizes.K) * sizes.D * sizes.dtype.itemsize  # bytes of a token: q, k, v and the output
    n = 8192 // sizes.divisor
    yield Case(f"prefill {n} causal", n * rows, pairs * n * n // 2, _prefill(sizes, n, None))
    n, width = 16384 // sizes.divisor, 1024 // sizes.divisor
    yield Case(f"prefill {n} window {width}", n * rows, pairs * n * width, _prefill(sizes, n, width))
    n, length = 16384 // sizes.divisor, 512 // sizes.divisor
    yield Case(f"prefill {n} documents of {length}", n * rows, pairs * n * length // 2, _documents(sizes, n, length))
    n = 8192 // sizes.divisor
    yield Case(f"statistics {n} causal", n * rows, pairs * n * n // 2, _statistics(sizes, n))
    for S in (4096, 32768, 131072):
        for B in (1, 16) if S < 131072 else (1,):
            S_ = S // sizes.divisor
            held = 2 * B * S_ * sizes.K * sizes.D * sizes.dtype.itemsize
            yield Case(f"decode {S_} keys, batch {B}", held, pairs * B * S_, _decode(sizes, S_, B))
    S_ = 32768 // sizes.divisor
    for B in (1, 32):
        flops = 2 * 4 * sizes.H * B * S_ * (576 + 512)
        yield Case(f"latent decode {S_} keys, batch {B}", 2 * B * S_ * 576, flops, _latent(sizes, S_, B))


def _prefill(sizes: Sizes, n: int, window: int | None) -> dict[str, Callable[[], Run]]:
    def ours() -> Run:
        q, k, v = sizes.qkv(n, n)
        mask = headwise.causal() if window is None else headwise.window(window)
        return lambda: headwise.attention(q, k, v, mask=mask)

    def flex() -> Run:
        q, k, v = sizes.qkv(n, n)

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j < (window or n))

        tiles = create_block_mask(sees, None, None, n, n, device="cuda")
        return lambda: compiled_flex()(q, k, v, block_mask=tiles, enable_gqa=True)

    def kernel() -> Run:
        q, k, v = sizes.qkv(n, n)
        mask = headwise.causal() if window is None else headwise.window(window)
        return lambda: headwise.attention(q, k, v, mask=mask, backend="triton")

    ways = {"headwise": ours, "headwise triton": kernel, "flex": flex}
    if window is None:
        ways |= {
            f"sdpa {kernel.name.lower()}": partial(_sdpa, sizes, n, n, kernel, is_causal=True)
            for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
        }
    return ways


def _sdpa(sizes: Sizes, T: int, S: int, kernel: SDPBackend, **options: Any) -> Run:
    q, k, v = sizes.qkv(T, S)

    def run() -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    return run


@cache
def compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def graphed(run: Run) -> Run:
    """The same call as a CUDA graph, without the launches of the host."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _documents(sizes: Sizes, n: int, length: int) -> dict[str, Callable[[], Run]]:
    def ours() -> Run:
        q, k, v = sizes.qkv(n, n)
        mask = headwise.segments(torch.arange(n, device="cuda") // length) & headwise.causal()
        return lambda: headwise.attention(q, k, v, mask=mask)

    def flex() -> Run:
        q, k, v = sizes.qkv(n, n)

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i // length == j // length)

        tiles = create_block_mask(sees, None, None, n, n, device="cuda")
        return lambda: compiled_flex()(q, k, v, block_mask=tiles, enable_gqa=True)

    return {"headwise": ours, "flex": flex}


def _latent(sizes: Sizes, S: int, B: int) -> dict[str, Callable[[], Run]]:
    """MLA as DeepSeek's: query heads on one latent of 576 columns, of which the first 512 are the values."""
    heads = 4 * sizes.H  # 128, as DeepSeek's, at the default sizes

    def ours() -> Run:
        q = torch.randn(B, heads, 1, 576, device="cuda", dtype=sizes.dtype)
        k = torch.randn(B, 1, S, 576, device="cuda", dtype=sizes.dtype)
        return lambda: headwise.attention(q, k, k[..., :512])

    def folded() -> Run:
        q = torch.randn(B, 1, heads, 576, device="cuda", dtype=sizes.dtype)
        k = torch.randn(B, 1, S, 576, device="cuda", dtype=sizes.dtype)
        return lambda: scaled_dot_product_attention(q, k, k[..., :512].contiguous())

    def flex() -> Run:
        q = torch.randn(B, heads, 1, 576, device="cuda", dtype=sizes.dtype)
        k = torch.randn(B, 1, S, 576, device="cuda", dtype=sizes.dtype)
        return lambda: compiled_flex()(q, k, k[..., :512], enable_gqa=True)

    return {"headwise": ours, "sdpa folded": folded, "flex": flex}


def _statistics(sizes: Sizes, n: int) -> dict[str, Callable[[], Run]]:
    def ours() -> Run:
        q, k, v = sizes.qkv(n, n)
        return lambda: headwise.attention_statistics(q, k, v, mask=headwise.causal())

    def matrix() -> Run:
        """What a user writes without headwise: the whole matrix of one head after the other, and its entropy."""
        q, k, v = sizes.qkv(n, n)
        seen = torch.ones(n, n, dtype=torch.bool, device="cuda").tril()

        def run() -> list[Tensor]:
            sums = []
            for h in range(sizes.H):
                group = h * sizes.K // sizes.H
                scores = (q[0, h] @ k[0, group].mT).float() * sizes.D**-0.5
                p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                sums += [p.to(v.dtype) @ v[0, group], -torch.xlogy(p, p).sum(-1)]
            return sums

        return run

    def received() -> Run:
        q, k, _ = sizes.qkv(n, n)
        return lambda: headwise.statistics(q, k, mask=headwise.causal())

    return {"headwise": ours, "headwise, received": received, "whole matrix": matrix}


def _decode(sizes: Sizes, S: int, B: int) -> dict[str, Callable[[], Run]]:
    def dense() -> Run:
        q, k, v = sizes.qkv(1, S, B)
        return lambda: headwise.attention(q, k, v)

    def folded() -> Run:
        """Flash decoding through SDPA: the query heads of a group as rows, as our `sdpa` backend calls it."""
        q, k, v = sizes.qkv(1, S, B)
        rows = q.unflatten(1, (sizes.K, -1)).flatten(2, 3)
        return lambda: scaled_dot_product_attention(rows, k, v)

    def flex() -> Run:
        q, k, v = sizes.qkv(1, S, B)
        return lambda: compiled_flex()(q, k, v, enable_gqa=True)

    def cached(make: Callable[[], Any]) -> Run:
        store = make()
        _, k, v = sizes.qkv(1, S - 1, B)
        store.append(k, v)
        q, k, v = sizes.qkv(1, 1, B)

        def step() -> Tensor:
            out = store.append(k, v).attend(q)
            store.truncate(S - 1)
            return out

        return step

    def static(dtype: torch.dtype) -> StaticCache:
        return StaticCache(B, sizes.K, sizes.D, capacity=S, dtype=dtype, device="cuda")

    def paged(dtype: torch.dtype) -> PagedCache:
        return PagedCache(PagePool(B * (S // 128 + 1), sizes.K, sizes.D, dtype=dtype, device="cuda"), B)

    ways: dict[str, Callable[[], Run]] = {"headwise": dense, "headwise, graph": lambda: graphed(dense())}
    ways |= {"sdpa folded": folded, "flex": flex}
    for make in (static, paged):
        for dtype in (sizes.dtype, torch.int8):
            name = f"{make.__name__} {str(dtype).removeprefix('torch.')}"
            ways[name] = partial(cached, partial(make, dtype))
    return ways


def of_kernel(sizes: Sizes, kernel: str, n: int) -> Run:
    """A call that runs on one of the Triton kernels: `attend`, `statistics` or `decode`."""
    if kernel == "decode":
        q, k, v = sizes.qkv(1, n)
        return lambda: headwise.attention(q, k, v, backend="triton")
    q, k, v = sizes.qkv(n, n)
    if kernel == "statistics":
        return lambda: headwise.attention_statistics(q, k, v, mask=headwise.causal())
    return lambda: headwise.attention(q, k, v, mask=headwise.causal(), backend="triton")


def with_shape(run: Run, shape: tuple[int, ...]) -> Run:
    """The same call with another shape of the program in place of that of `shapes.json`."""

    def changed() -> Any:
        with mock.patch.object(kernel_operators, "shape_of", lambda *_: shape):
            return run()

    return changed
