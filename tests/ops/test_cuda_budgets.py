"""What a call costs on CUDA: launches, bytes, the largest tensor; and what no backend may do in silence.

Figures are those of fake CUDA tensors, which a CPU build of torch has too. A budget is what the call does today:
whoever makes it cheaper lowers the number, in docs/gpu.md too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from draw import slow_except
from fake_cuda import fake_cuda
from pretend_cuda import pretend_cuda
from torch import Tensor
from triton_cases import HAS_TRITON, needs_triton

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.ops.backends import flex
from headwise.ops.masks import reads
from headwise.ops.masks.mask import Mask
from headwise.ops.row_blocks import row_blocks
from headwise.testing import make_qkv

pytestmark = pytest.mark.unchecked
H, K, D, LONG, PROMPT = 32, 8, 128, 32_768, 4_096
WHOLE = LONG * LONG


def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


def qkv(T: int, S: int, B: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return of(B, H, T, D, dtype=dtype), of(B, K, S, D, dtype=dtype), of(B, K, S, D, dtype=dtype)


class Budget(NamedTuple):
    """The most launches, and the most bytes as a multiple of reading keys and values once."""

    launches: int
    bytes: float


DECODE = {
    "plain": ({}, Budget(2, 1.04)),
    "softcap": ({"softcap": 30.0}, Budget(2, 1.04)),
    "lse": ({"return_lse": True}, Budget(2, 1.04)),
}


@needs_triton
@pytest.mark.parametrize("name", DECODE)
def test_decoding(name: str) -> None:
    options, budget = DECODE[name]
    with fake_cuda() as counted:
        q, k, v = qkv(1, LONG)
        with counted() as cost:
            headwise.attention(q, k, v, **options)
    assert cost.launches.total() <= budget.launches and not cost.from_host
    assert cost.bytes.total() <= budget.bytes * 2 * k.nbytes


Make = Callable[[int, torch.dtype], KVCache]
STATIC: Make = lambda B, dtype: StaticCache(B, K, D, capacity=PROMPT + 64, dtype=dtype, device="cuda")  # noqa: E731
PAGED: Make = lambda B, dtype: PagedCache(  # noqa: E731
    PagePool(B * (PROMPT // 128 + 2), K, D, dtype=dtype, device="cuda"), B
)
ROLLING: Make = lambda B, dtype: RollingCache(  # noqa: E731
    B, K, D, window=1024, chunk=2048, dtype=dtype, device="cuda"
)
STEPS: dict[str, tuple[Make, int, torch.dtype, Budget]] = {
    "static": (STATIC, 1, torch.bfloat16, Budget(3, 1.04)),
    "static, ragged": (STATIC, 8, torch.bfloat16, Budget(4, 1.05)),
    "static int8": (STATIC, 1, torch.int8, Budget(3, 1.11)),
    "paged": (PAGED, 1, torch.bfloat16, Budget(3, 1.07)),
    "paged, ragged": (PAGED, 8, torch.bfloat16, Budget(4, 1.08)),
    "paged int8": (PAGED, 1, torch.int8, Budget(3, 1.14)),
    "rolling": (ROLLING, 1, torch.bfloat16, Budget(3, 1.2)),
}


@needs_triton
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_a_cache(name: str) -> None:
    make, B, dtype, budget = STEPS[name]
    with fake_cuda() as counted:
        cache = make(B, dtype)
        _, k, v = qkv(0, cache.chunk or PROMPT, B)
        ragged: dict[str, Any] = {"lengths": [PROMPT - 7 * b for b in range(B)], "side": "left"} if B > 1 else {}
        cache.append(k, v, **ragged)
        q, k, v = qkv(1, 1, B)
        cache.append(k, v).attend(q)
        with counted() as cost:
            cache.append(k, v).attend(q)
    assert cost.launches.total() <= budget.launches and not cost.from_host
    stored = sum(min(n, max(cache.columns)) for n in cache.lengths) * K * D * 2 * dtype.itemsize
    assert cost.bytes.total() / stored <= budget.bytes


def _segments(n: int) -> Mask:
    return headwise.segments(of(n, dtype=torch.long)) & headwise.causal()


PREFILLS: dict[str, tuple[Callable[[int], Mask | None], int]] = {
    "no mask": (lambda n: None, 32),
    "causal": (lambda n: headwise.causal(), 55),
    "window": (lambda n: headwise.window(1024), 4),
    "lengths": (lambda n: headwise.lengths(of(1, dtype=torch.long)) & headwise.causal(), 4),
    "padding": (lambda n: headwise.lengths(of(1, dtype=torch.long)), 4),
    "segments": (_segments, 240),
    "alibi": (lambda n: headwise.causal() & headwise.alibi(of(H, dtype=torch.float32)), 12),
}


@needs_triton
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill(name: str) -> None:
    mask, launches = PREFILLS[name]
    with fake_cuda() as counted:
        q, k, v = qkv(8192, 8192)
        made = mask(8192)
        with counted() as cost:
            headwise.attention(q, k, v, mask=made)
    assert cost.launches.total() <= launches and not cost.from_host


MATRIX = [
    *((name, backend, torch.bfloat16) for name in PREFILLS for backend in ("auto", "flex")),
    *((name, "auto", torch.float32) for name in ("no mask", "causal")),
    *((name, "sdpa", torch.bfloat16) for name in ("no mask", "causal", "padding")),
    ("window", "blocks", torch.bfloat16),
]
DEAR = (("segments", "flex", torch.bfloat16), ("padding", "sdpa", torch.bfloat16))


@pytest.mark.parametrize(("name", "backend", "dtype"), slow_except(MATRIX, {*MATRIX} - {*DEAR}), ids=str)
def test_no_backend_builds_the_whole_matrix(name: str, backend: str, dtype: torch.dtype) -> None:
    """One head's T x S is 2 ** 30 elements here. Blocks run for a share of the rows: each block costs the same."""
    T = LONG if backend != "blocks" else 256
    with fake_cuda() as counted:
        q, k, v = qkv(T, LONG, dtype=dtype)
        with counted() as cost:
            headwise.attention(q, k, v, mask=PREFILLS[name][0](LONG), backend=backend)
    assert 0 < cost.largest < WHOLE


@needs_triton
@pytest.mark.parametrize("T", [2048, LONG])
def test_statistics_are_linear(T: int) -> None:
    """What they move beside queries, keys, values and output: at most 64 sums a row, of bins and features."""
    with fake_cuda() as counted:
        q, k, v = qkv(T, T)
        with counted() as cost:
            headwise.attention_statistics(q, k, v, mask=headwise.causal())
    assert cost.launches.total() <= 38 and not cost.from_host
    assert cost.bytes.total() <= 5 * 2 * (q.nbytes + k.nbytes) and cost.largest <= H * T * D


@pytest.mark.slow
def test_statistics_come_in_blocks_where_the_kernels_do_not_serve() -> None:
    with fake_cuda() as counted:
        q, k, v = qkv(2048, 2048)
        with counted() as cost:
            headwise.attention_statistics(q, k, v, mask=headwise.causal(), pool=100)
    assert cost.launches.total() <= 1182
    assert next(row_blocks(8192, 8192, "cuda")).stop == 8 * next(row_blocks(8192, 8192)).stop == 256


# --- SDPA: what only MATH would serve ---------------------------------------------------------------------------------

HALF, FULL_32 = torch.bfloat16, torch.float32
FUSED: list[tuple[str, tuple[int, ...], torch.dtype, Mask | None, str | None]] = [
    ("groups in bfloat16", (32, 8, 300, 300, 128, 128), HALF, None, None),
    ("groups in float32", (32, 8, 300, 300, 128, 128), FULL_32, None, "groups of query heads only in bfloat16"),
    ("heads of their own in float32", (8, 8, 300, 300, 128, 128), FULL_32, None, None),
    ("groups of 16 rows", (32, 8, 16, 300, 128, 128), FULL_32, None, None),
    ("groups of 17 rows", (32, 8, 17, 300, 128, 128), FULL_32, None, "groups of query heads only in bfloat16"),
    ("wide groups", (16, 1, 300, 300, 576, 512), HALF, None, "up to a head dim of 256"),
    ("wide heads", (16, 16, 300, 300, 576, 512), HALF, None, None),
    ("a bias", (8, 8, 300, 300, 64, 64), HALF, headwise.alibi(torch.ones(8)), "only in the query's dtype"),
    ("a bias in float32", (8, 8, 300, 300, 64, 64), FULL_32, headwise.alibi(torch.ones(8)), None),
]


@pytest.mark.parametrize("case", FUSED, ids=[case[0] for case in FUSED])
def test_sdpa_refuses_what_only_its_matrix_would_serve(case: Any) -> None:
    _, (heads, groups, T, S, d, width), dtype, mask, why = case
    with fake_cuda():
        q, k, v = (
            of(1, heads, T, d, dtype=dtype),
            of(1, groups, S, d, dtype=dtype),
            of(1, groups, S, width, dtype=dtype),
        )
        mask = None if mask is None else headwise.alibi(of(8, dtype=torch.float32))
        explained = headwise.explain(q, k, v, mask=mask)
        if why is None:
            assert headwise.explain(q, k, v, mask=mask, backend="sdpa").backend == "sdpa"
        else:
            assert why in explained.others["sdpa"]
            assert explained.backend == (
                "triton" if HAS_TRITON and max(d, width) <= 256 else "flex" if T >= flex.TILE else "blocks"
            )
            with pytest.raises(ValueError, match=why):
                headwise.attention(q, k, v, mask=mask, backend="sdpa")


def test_sdpa_has_no_groups_on_old_cards() -> None:
    with fake_cuda(major=7):
        q, k, v = qkv(300, 300)
        assert "from compute capability 8.0" in headwise.explain(q, k, v).others["sdpa"]
        assert headwise.explain(q[:, :K], k, v).backend == "sdpa"


def test_a_padding_mask_of_groups_comes_in_strips() -> None:
    """For groups it is MATH that takes a mask: one row of the mask for all queries would make T x S of it."""
    with fake_cuda() as counted:
        q, k, v = qkv(1024, 1024)
        mask = headwise.lengths(of(1, dtype=torch.long))
        with counted() as cost:
            headwise.attention(q, k, v, mask=mask, backend="sdpa")
        assert cost.launches["sdpa"] == 4
        with counted() as cost:
            headwise.attention(q[:, :K], k, v, mask=mask, backend="sdpa")
        assert cost.launches["sdpa"] == 1


# --- FlexAttention: the limit of torch.compile, and kept tiles --------------------------------------------------------


@pytest.mark.slow
def test_beyond_the_limit_of_compiling_flex_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its uncompiled version, which builds T x S, never stands in for it."""
    import torch._dynamo

    monkeypatch.setattr(flex, "_compiled_calls", calls := flex._CompiledCalls())
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    made = flex._compiled.__wrapped__()
    monkeypatch.setattr(flex, "_compiled", lambda: made)
    monkeypatch.setattr(flex, "_uncompiled", calls.run)  # the CPU, where dynamo runs too
    shapes = [make_qkv(1, 2, 1, T, T, 16, 16) for T in (17, 18, 19)]
    wanted = [headwise.attention(*x) for x in shapes]
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for x, out in zip(shapes[:2], wanted, strict=False):
            torch.testing.assert_close(headwise.attention(*x, backend="flex"), out, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match=r"at most 2 shapes and masks .*recompile_limit allows more; use 'auto'"):
            headwise.attention(*shapes[2], backend="flex")
        assert "at most 2 shapes" in headwise.explain(*shapes[2]).others["flex"]
        headwise.attention(*shapes[0], backend="flex")  # what is compiled stays
        monkeypatch.setattr(headwise.ops.attention, "_PREFERENCES", _preferring_flex())
        monkeypatch.setattr(headwise.ops.attention.native, "fast_path", lambda *_: None)
        calls.limit = None
        assert headwise.explain(*shapes[2]).backend == "flex"
        out = headwise.attention(*shapes[2])  # caught once
        torch.testing.assert_close(out, wanted[2], rtol=1e-4, atol=1e-5)
        assert headwise.explain(*shapes[2]).backend == "blocks"
        torch._dynamo.config.recompile_limit = 3
        assert headwise.explain(*shapes[2]).backend == "flex"
        headwise.attention(*shapes[2], backend="flex")
    torch._dynamo.reset()


def _preferring_flex() -> tuple[Any, ...]:
    known = headwise.ops.attention._PREFERENCES
    return (known[0]._replace(backend="flex", when=lambda c: True), known[-1])


def test_other_errors_of_flex_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with pretend_cuda():
        monkeypatch.setattr(flex, "_compiled", lambda: fail)
        q, k, v = (x.cuda() for x in make_qkv(1, 2, 1, 130, 130, 16, 16))
        with pytest.raises(RuntimeError, match="out of memory"):
            headwise.attention(q, k, v, mask=headwise.window(3), backend="flex")
        assert headwise.explain(q, k, v, mask=headwise.window(3), backend="flex").backend == "flex"


CONSTANT: list[Callable[[], Mask]] = [
    lambda: headwise.window(70),
    lambda: headwise.causal() & headwise.dilated(3),
    lambda: headwise.window(70, first=2) | headwise.prefix(5),
]


@pytest.mark.parametrize("make", slow_except(CONSTANT, CONSTANT[2:]))
def test_tiles_of_numbers_are_listed_once(make: Callable[[], Mask], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _count_tiles(monkeypatch)
    q, k, v = make_qkv(1, 2, 1, 150, 280, 16, 16)
    expected = headwise.attention(q, k, v, mask=make())
    for _ in range(3):  # each time a new mask
        torch.testing.assert_close(
            headwise.attention(q, k, v, mask=make(), backend="flex"), expected, rtol=1e-4, atol=1e-5
        )
    assert len(asked) == 1
    headwise.attention(q[:, :, 1:], k, v, mask=make(), backend="flex")
    assert len(asked) == 2, "another size"


def test_few_sizes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_kept", {})
    monkeypatch.setattr(reads, "KEPT", 3)
    for S in range(200, 205):
        reads.kept_for_rules(headwise.dilated(2).parts, 1, S, torch.device("cpu"), lambda rules, T, S, device: S)
    assert len(reads._kept) == 3


def test_tiles_of_tensors_are_listed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask means what its tensors hold at the call."""
    asked = _count_tiles(monkeypatch)
    q, k, v = make_qkv(1, 2, 1, 150, 280, 16, 16)
    ids = torch.zeros(1, dtype=torch.long)
    mask, odd = headwise.lengths(ids), headwise.rule(lambda b, h, i, j: (i + j + ids[0]) % 2 == 0)
    for n in (280, 100, 3):
        ids.fill_(n)
        for made in (mask, odd):
            out = headwise.attention(q, k, v, mask=made, backend="flex")
            torch.testing.assert_close(out, headwise.attention(q, k, v, mask=made), rtol=1e-4, atol=1e-5)
    assert len(asked) == 6


def _count_tiles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    asked: list[tuple[int, int]] = []
    tiles = Mask.tiles
    monkeypatch.setattr(reads, "_kept", {})
    monkeypatch.setattr(Mask, "tiles", lambda *a, **o: asked.append(a[1:3]) or tiles(*a, **o))
    return asked
