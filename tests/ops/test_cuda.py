"""The op on a GPU, where pretend CUDA (test_cuda_numbers.py) does not reach: gradients, half precision, compiled
FlexAttention, bits and memory. Skips where no GPU is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from backends import attend
from mask_cases import FEW, LONG, MASKS, SHORT, Sizes, as_tensor, dense
from onnx_cases import TOLERANCE, cases, error
from test_interference import split_rows
from test_meaning import EMPTY_ROWS, options_of
from torch import Tensor

import headwise
from headwise.testing import assert_same_bits, make_qkv, naive, oracle, poison

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.unchecked]
backends = pytest.mark.parametrize("backend", ["auto", "reference", "blocks", "sdpa"])
FLEX = (None, "causal", "window 3", "lengths start", "keep BHTS", "alibi", "all kinds")
WIDE = Sizes(2, 6, 3, 37, 71, 32, 16)  # head sizes that flex's fused kernel takes


@pytest.fixture(autouse=True, scope="module")
def exact_float32() -> Iterator[None]:
    """The budgets are float32's: TF32 rounds products to ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_gpu(n: Sizes, dtype: torch.dtype = torch.float32, grad: bool = False) -> tuple[Tensor, ...]:
    return make_qkv(*n, dtype=dtype, device="cuda", requires_grad=grad)


def gpu_options(extra: str, n: Sizes, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {k: v.cuda() if isinstance(v, Tensor) else v for k, v in options_of(extra, n, dtype).items()}


def close(ours: Tensor, exact: Tensor, rough: tuple[Tensor, ...], factor: float = 3.0) -> None:
    """As accurate as naive PyTorch on the CPU, up to the other order of a GPU's sums."""
    allowed = factor * max(float((x.double() - exact).abs().max()) for x in rough) + 1e-6
    assert float((ours.detach().cpu().double() - exact).abs().max()) <= allowed


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, *FEW])
def test_masks(backend: str, mask: str | None, dtype: torch.dtype) -> None:
    check(backend, mask, dtype)


@pytest.mark.parametrize("mask", FLEX)
def test_compiled_flex(mask: str | None) -> None:
    """Each mask is compiled anew; without the reset the limit of torch.compile would be met after eight."""
    torch._dynamo.reset()
    check("flex", mask, torch.float32)


@pytest.mark.parametrize("mask", FLEX[:5])
def test_gradients_of_compiled_flex(mask: str | None) -> None:
    torch._dynamo.reset()
    test_gradients("flex", mask)


def check(backend: str, mask: str | None, dtype: torch.dtype) -> None:
    n = WIDE
    cpu = make_qkv(*n, dtype=dtype)
    tensor = None if mask is None else as_tensor(mask, n)
    made = None if mask is None else MASKS[mask](n).mask.to("cuda")
    for extra in ("plain", "everything"):
        out = attend(backend, *on_gpu(n, dtype), mask=made, **gpu_options(extra, n, dtype))
        if out is None:
            continue
        assert out.device.type == "cuda" and out.dtype == dtype
        options = options_of(extra, n, dtype)
        close(out, oracle(*cpu, mask=tensor, **options)[0], naive(*cpu, mask=tensor, **options))


@backends
@pytest.mark.parametrize("mask", [None, *FEW])
def test_gradients(backend: str, mask: str | None) -> None:
    n = WIDE
    made = None if mask is None else MASKS[mask](n).mask.to("cuda")
    leaves = on_gpu(n, grad=True)
    out = attend(backend, *leaves, mask=made)
    if out is None:
        return
    exact_leaves = make_qkv(*n, dtype=torch.float64, requires_grad=True)
    exact = oracle(*exact_leaves, mask=None if mask is None else as_tensor(mask, n))[0]
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad(out, leaves, grad_out.cuda())
    for x, y in zip(ours, torch.autograd.grad(exact, exact_leaves, grad_out.double()), strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=2e-5)


@backends
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_a_row_that_may_attend_nothing(backend: str, name: str) -> None:
    n, mask = SHORT._replace(D=16, V=16), EMPTY_ROWS[name].to("cuda")
    empty = ~EMPTY_ROWS[name].allowed(n.T, n.S).expand(n.B, n.H, n.T, n.S).any(-1).cuda()  # type: ignore[union-attr]
    both = attend(backend, *on_gpu(n), mask=mask, return_lse=True)
    if both is not None:
        out, lse = both
        assert bool((out[empty] == 0).all() and out.isfinite().all())
        assert bool((lse[empty] == -math.inf).all() and lse[~empty].isfinite().all())


@backends
@pytest.mark.parametrize("mask", FEW)
@pytest.mark.parametrize("what", [math.nan, math.inf, 1e30])
def test_poisoned_keys_and_values(backend: str, mask: str, what: float) -> None:
    n = LONG._replace(D=16, V=16)
    q, k, v = on_gpu(n)
    made, sees = MASKS[mask](n).mask.to("cuda"), dense(mask, n)[0]
    keys = torch.rand(n.B, n.K, n.S, generator=torch.Generator().manual_seed(4)) < 0.3
    met = split_rows(sees, keys)[0].cuda()
    clean = attend(backend, q, k, v, mask=made)
    if clean is None:
        return
    where = keys[..., None].cuda()
    for pair in ((poison(k, where, what), v), (k, poison(v, where, what))):
        out = attend(backend, q, *pair, mask=made)
        assert_same_bits(out[~met], clean[~met])
        assert what == 1e30 or bool(out[met].isnan().all())


@backends
def test_onnx(backend: str) -> None:
    ran = 0
    for case in cases():
        (q, k, v), options = case.call()
        options["mask"] = None if options["mask"] is None else options["mask"].to("cuda")
        out = attend(backend, q.cuda(), k.cuda(), v.cuda(), **options)
        if out is not None:
            ran += 1
            assert error(case.joined(out).cpu(), case.outputs["Y"]) <= TOLERANCE[case.dtype], case.name
    assert ran == 93 or backend == "sdpa"


@backends
def test_no_quadratic_memory(backend: str) -> None:
    """The reference alone builds T x S: 256 MiB a head here."""
    if backend == "reference":
        return
    q, k, v = on_gpu(Sizes(1, 2, 1, 8192, 8192, 64, 64))
    mask = headwise.causal() & headwise.window(1000)
    attend(backend, q, k, v, mask=mask)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend(backend, q, k, v, mask=mask)
    assert torch.cuda.max_memory_allocated() - before < 1 << 26


@backends
def test_the_same_bits_alone_and_in_a_batch(backend: str) -> None:
    q, k, v = on_gpu(Sizes(5, 4, 2, 33, 65, 32, 32))
    whole = attend(backend, q, k, v, mask=headwise.causal())
    for b in range(5):
        row = slice(b, b + 1)
        assert_same_bits(attend(backend, q[row], k[row], v[row], mask=headwise.causal()), whole[row])


def test_explain_on_a_gpu() -> None:
    q, k, v = on_gpu(Sizes(1, 4, 2, 512, 512, 64, 64), torch.bfloat16)
    assert headwise.explain(q, k, v).backend == "sdpa"
    choice = headwise.explain(q, k, v, mask=headwise.window(64))
    assert choice.backend == "flex" and "tiles" in choice.why


def test_seventy_thousand_heads() -> None:
    """Beyond a GPU grid's 65535 blocks in one axis."""
    q, k, v = on_gpu(Sizes(35_000, 2, 1, 1, 3, 16, 16))
    out = headwise.attention(q, k, v)
    exact, _ = oracle(*(x[-1:].cpu() for x in (q, k, v)))
    torch.testing.assert_close(out[-1:].cpu().double(), exact, rtol=1e-5, atol=1e-5)
