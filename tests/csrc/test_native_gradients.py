"""The native kernel's gradient as torch sees it: by which means, of which order, through its operators' checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import MUST, instructions, natives, needs_native
from gradient_cases import SEED, Case, textbook
from loops import inside
from mask_cases import MASKS, SHORT, Sizes
from native_cases import rules_of
from torch import Tensor

import headwise
from headwise.ops.native import backend as native
from headwise.ops.reference import reference_weights
from headwise.testing import STRIDES, assert_same_bits, make_qkv, oracle, strided

WHY = "headwise's own kernel, also for the gradient; gradients of gradients are computed by the reference"


@needs_native
def test_explain_says_by_which_means_the_gradient_goes() -> None:
    qkv, learned = make_qkv(*SHORT, requires_grad=True), torch.zeros(5, 7, requires_grad=True)
    options: list[dict[str, Any]] = [{}, {"mask": headwise.causal()}, {"softcap": 2.0}, {"dropout": 0.1}]
    options += [{"mask": headwise.bias(learned)}, {"sinks": torch.zeros(6)}, {"return_lse": True}]
    assert {headwise.explain(*qkv, **each).why for each in options} == {WHY}


@needs_native
def test_the_gradient_is_one_call_of_the_kernel_and_that_of_a_gradient_none() -> None:
    def called(create_graph: bool) -> list[str]:
        leaves = make_qkv(*SHORT, requires_grad=True)
        out = headwise.attention(*leaves, mask=headwise.causal())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            torch.autograd.grad(out.sum(), leaves, create_graph=create_graph)
        return [event.name for event in seen.events() if event.name.startswith("headwise::")]

    assert called(False) == ["headwise::attend_backward"] and called(True) == []


@needs_native
@pytest.mark.parametrize("extra", [{}, {"softcap": 1.5}, {"sinks": torch.linspace(-1, 1, 6)}])
def test_dropout_in_the_gradient_is_that_of_the_forward(extra: dict[str, Any]) -> None:
    """Of query and key too: as autograd finds it through the definition, dropping what the seed drops."""
    n, mask = SHORT, headwise.window(4)
    leaves = make_qkv(*n, requires_grad=True)
    torch.manual_seed(6)
    ours = headwise.attention(*leaves, mask=mask, dropout=0.4, **extra)
    torch.manual_seed(6)
    seed = torch.randint(1 << 62, (1,))
    kept = torch.ops.headwise.dropout_keep(seed, 0.4, n.B, n.H, 0, n.T, n.S)
    weights = reference_weights(leaves[0], leaves[1], mask=mask, **extra)[0] * kept / 0.6
    plain = weights @ leaves[2].repeat_interleave(2, 1)
    torch.testing.assert_close(ours, plain, rtol=2e-6, atol=1e-6)
    grads = (torch.autograd.grad(out.square().sum(), leaves) for out in (ours, plain))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@needs_native
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale_with_a_square_causal_mask(scale: float) -> None:
    """torch's forward masks first and scales then, which is wrong for these; its backward does not."""
    n = Sizes(2, 4, 2, 37, 37, 8, 8)
    grads = []
    for backend in ("native", "reference"):
        leaves = make_qkv(*n, requires_grad=True)
        out = headwise.attention(*leaves, mask=headwise.causal(), scale=scale, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@needs_native
@pytest.mark.parametrize("pattern", STRIDES)
def test_gradients_beside_masks_of_any_layout(pattern: str) -> None:
    n, added = SHORT, torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(1))
    grads = []
    for tensor in (strided(added, pattern), strided(added, pattern).contiguous()):
        leaves = make_qkv(*n, requires_grad=True)
        grads.append(torch.autograd.grad(headwise.attention(*leaves, mask=tensor).square().sum(), leaves))
    for x, y in zip(*grads, strict=True):
        assert_same_bits(x, y)


@needs_native
def test_a_gradient_through_the_lse_alone() -> None:
    leaves = dict(zip(("query", "key", "value"), make_qkv(*SHORT, requires_grad=True), strict=True))
    _, lse = headwise.attention(**leaves, mask=headwise.causal(), return_lse=True)
    ours = torch.autograd.grad(lse.sum(), list(leaves.values()))
    doubles = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    exact = torch.autograd.grad(
        oracle(**doubles, mask=headwise.causal().dense(SHORT.T, SHORT.S))[1].sum(),
        list(doubles.values()),
        allow_unused=True,
    )
    assert bool((ours[2] == 0).all())
    for x, y in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)


def penalty(backend: str, dtype: torch.dtype, case: Case) -> list[Tensor]:
    """The gradient of the size of a gradient, for every leaf."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in case.leaves().items()}
    torch.default_generator.manual_seed(SEED)
    qkv = [leaves[name] for name in ("query", "key", "value")]
    out, lse = headwise.attention(*qkv, **case.options(leaves), return_lse=True, backend=backend)
    grad_out, grad_lse = (x.to(dtype) for x in case.upstream())
    loss = (out * out * grad_out).sum() + (lse.masked_fill(lse == -torch.inf, 0) * grad_lse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in grads), list(leaves.values())))  # type: ignore[arg-type]


@pytest.mark.sweep
@needs_native
@pytest.mark.parametrize("name", [None, *MASKS])
@inside("extra", ["plain", "softcap", "everything", "bias", "slopes"])
def test_the_gradient_of_a_gradient_is_the_definitions(name: str | None, extra: str) -> None:
    n = SHORT
    options: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 1.5},
        "everything": {"softcap": 1.5, "sinks": True, "gate": True},
        "bias": {"bias": (n.H, n.T, n.S)},
        "slopes": {"slopes": (n.B, n.H)},
    }
    case = Case(n, mask=name, **options.get(extra, {}))
    native, naive = (penalty(backend, torch.float32, case) for backend in ("native", "reference"))
    for x, y, exact in zip(native, naive, penalty("reference", torch.float64, case), strict=True):
        # Large terms may cancel, so an element's own size says nothing: the definition in float32 shows the rounding.
        allowed = 4 * (y - exact).abs().max() + 8 * torch.finfo(torch.float32).eps * exact.abs().max()
        torch.testing.assert_close(x.double(), exact, rtol=0, atol=float(allowed))


BANDS = [None, headwise.causal(), headwise.causal(offset=1), headwise.causal_top_left(), headwise.window(3, 2)]


@needs_native
@pytest.mark.parametrize("mask", BANDS, ids=str)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_a_band_and_nothing_else(mask: headwise.Mask | None, scale: float | None) -> None:
    """Such a call has a way of its own to autograd: the same bits as beside an lse, and as often as one likes."""
    leaves = make_qkv(*SHORT, requires_grad=True)
    out = headwise.attention(*leaves, mask=mask, scale=scale)
    beside, _ = headwise.attention(*leaves, mask=mask, scale=scale, return_lse=True)
    assert_same_bits(out, beside)
    grads, theirs = (torch.autograd.grad(x.square().sum(), leaves, retain_graph=True) for x in (out, beside))
    for x, y in zip(grads, theirs, strict=True):
        assert_same_bits(x, y)
    again = [torch.autograd.grad(x.square().sum(), leaves, create_graph=True) for x in (out, beside)]
    for x, y in zip(again[0], grads, strict=True):  # by the definition, and by the kernel
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    sizes = [sum(g.square().sum() for g in way) for way in again]
    for x, y in zip(*(torch.autograd.grad(size, leaves) for size in sizes), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(x, y)
    some = headwise.attention(leaves[0].detach(), leaves[1], leaves[2].detach(), mask=mask, scale=scale)
    assert_same_bits(torch.autograd.grad(some.square().sum(), [leaves[1]])[0], grads[1])


@needs_native
@pytest.mark.parametrize("mask", [None, "causal"])
def test_the_gradient_of_a_gradient_drops_what_the_forward_dropped(mask: str | None) -> None:
    case = Case(SHORT, mask=mask, dropout=0.375)
    leaves = {name: x.double().requires_grad_() for name, x in case.leaves().items()}
    out, lse = textbook(case, leaves, torch.float64)
    grad_out, grad_lse = (x.double() for x in case.upstream())
    grads = torch.autograd.grad(
        (out * out * grad_out).sum() + (lse * grad_lse).sum(), list(leaves.values()), create_graph=True
    )
    total = sum(g.square().sum() for g in grads)
    wanted = torch.autograd.grad(total, list(leaves.values()))  # type: ignore[arg-type]
    for x, exact in zip(penalty("native", torch.float32, case), wanted, strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=2e-4, atol=2e-4)


@needs_native
def test_gradients_reach_masks_sinks_and_gates_in_their_own_dtypes() -> None:
    learned = {
        "bias": torch.zeros(6, 1, 7, dtype=torch.bfloat16),
        "slopes": torch.ones(2, 6, dtype=torch.float64),
        "sinks": torch.zeros(6, dtype=torch.float16),
        "gate": torch.ones(2, 6, dtype=torch.float64),
    }
    leaves = {name: x.requires_grad_() for name, x in learned.items()}
    mask = headwise.keep(torch.ones(5, 7, dtype=torch.bool)) & headwise.bias(leaves["bias"])
    mask = mask & headwise.alibi(leaves["slopes"])
    out = headwise.attention(*make_qkv(*SHORT), mask=mask, sinks=leaves["sinks"], gate=leaves["gate"])
    for leaf, grad in zip(leaves.values(), torch.autograd.grad(out.square().sum(), list(leaves.values())), strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype) and bool(grad.any())


@needs_native
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_draws_the_same_again(reentrant: bool) -> None:
    qkv = make_qkv(*SHORT, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.attention(q, k, v, dropout=0.5)

    grads = []
    for plain in (True, False):
        torch.manual_seed(3)
        out = run(*qkv) if plain else torch.utils.checkpoint.checkpoint(run, *qkv, use_reentrant=reentrant)
        out.square().sum().backward()
        grads.append([x.grad for x in qkv])
        for x in qkv:
            x.grad = None
    for x, y in zip(*grads, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("backend", MUST)
def test_training_under_autocast_leaves_the_backward_alone(backend: str) -> None:
    """A backward inside of autocast computes in float32 as one outside of it does."""
    qkv = make_qkv(*SHORT, requires_grad=True)
    out = headwise.attention(*qkv, softcap=2.0, backend=backend)
    outside = torch.autograd.grad(out.sum(), qkv, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(out.sum(), qkv)
    for x, y in zip(inside, outside, strict=True):
        assert backend != "auto" or torch.equal(x, y)
        assert x.dtype == torch.float32


@natives
@pytest.mark.parametrize("T", [1, 3, 37])
def test_a_sink_that_takes_all(backend: str, T: int) -> None:
    """Keys then weigh less than any float32, the sink 1: what comes back to the lse goes to it alone."""
    for S in (7, 70):
        q, k, v = make_qkv(1, 2, 1, T, S, 8, 8, requires_grad=True)
        sinks = torch.tensor([100.0, 300.0], requires_grad=True)
        with instructions(backend) as name:
            out, lse = headwise.attention(q, k, v, sinks=sinks, return_lse=True, backend=name)
            grads = torch.autograd.grad([out, lse], [q, k, v, sinks], [torch.ones_like(out), torch.full_like(lse, 3.0)])
        assert float(torch.cat([x.flatten() for x in grads[:3]]).abs().max()) < 1e-37
        assert grads[3].tolist() == [3.0 * T, 3.0 * T]


# -- torch's own checks of operators -------------------------------------------------------------------------------


def operator_calls() -> dict[str, tuple[str, tuple[Any, ...]]]:
    n = Sizes(2, 4, 2, 5, 7, 16, 24)
    qkv, far = make_qkv(*n), native.FAR
    names = ("causal & lengths", "segments (B,)", "keep BHTS", "alibi (B,)")
    mask = headwise.Mask(tuple(part for name in names for part in MASKS[name](n).mask.parts))
    rules, none = rules_of(mask, n.T, n.S)[3:], (-far, far, None, None, None, None, None, None)
    learning = make_qkv(*n, requires_grad=True)
    bias, slopes, sinks = (torch.rand(shape, requires_grad=True) for shape in ((1, 4, 5, 7), (1, 4), (4,)))
    diagonals = torch.rand(1, 4, n.T + n.S - 1, requires_grad=True)
    learned = (-far, far, None, None, [bias], [slopes, torch.tensor([2])], None, [diagonals])
    fixed = (-far, far, None, None, [bias.detach()], [slopes.detach(), torch.tensor([2])], None, [diagonals.detach()])
    seed, gate = torch.tensor([5]), torch.rand(2, 4, 1, 1).expand(2, 4, 5, 24)
    halves = tuple(x.bfloat16() for x in qkv)
    out, lse, ends = torch.ops.headwise.attend_kept(*qkv, 0.3, 0.0, None, *none, 0.0, None)
    back = (torch.randn_like(out), None, out, ends), (torch.randn_like(out), torch.randn_like(lse), out, ends)
    return {
        "attend": ("attend", (*qkv, 0.3, -far, 3)),
        "attend bfloat16": ("attend", (*halves, 0.3, -3, far)),
        "attend_full": ("attend_full", (*qkv, 0.3, 0.0, None, *none, None, 0.0, None)),
        "attend_full, all": ("attend_full", (*halves, 0.3, 2.0, sinks.detach(), *rules, gate, 0.3, seed)),
        "attend_kept, all": ("attend_kept", (*halves, 0.3, 2.0, sinks.detach(), *rules, 0.3, seed)),
        "attend_train": ("attend_train", (*learning, 0.3, 0.0, None, *none, 0.0, None)),
        "attend_train, all": ("attend_train", (*learning, 0.3, 2.0, sinks, *learned, 0.3, seed)),
        "attend_train, rules": ("attend_train", (*learning, 0.3, 0.0, sinks, *rules, 0.0, None)),
        "attend_backward": ("attend_backward", (*back[0], False, *qkv, 0.3, 0.0, sinks.detach(), *fixed, 0.0, None)),
        "attend_backward, all": ("attend_backward", (*back[1], True, *qkv, 0.3, 2.0, None, *fixed, 0.3, seed)),
        "dropout_keep": ("dropout_keep", (seed, 0.2, 2, 4, 1, 3, 7)),
    }


OPERATOR_CALLS = """attend; attend bfloat16; attend_full; attend_full, all; attend_kept, all; attend_train;
attend_train, all; attend_train, rules; attend_backward; attend_backward, all; dropout_keep"""


@needs_native
@pytest.mark.unchecked
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", [name.strip() for name in OPERATOR_CALLS.split(";")])
def test_opcheck(name: str) -> None:
    """Schema, aliasing, autograd registration, fake tensors (shapes and strides), and ahead-of-time tracing."""
    operator, args = operator_calls()[name]
    result = torch.library.opcheck(getattr(torch.ops.headwise, operator).default, args)
    assert set(result.values()) == {"SUCCESS"}
