"""Derivatives of every order, forward mode, vmap; and dropout: what is random obeys the definition too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BEST, MUST, NATIVE, attend
from draw import slow_except
from mask_cases import SHORT, Sizes
from torch import Tensor

import headwise
from headwise.testing import assert_same_bits, make_qkv

TINY = Sizes(1, 2, 1, 2, 3, 3, 2)
HIGHER: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": headwise.causal()},
    "empty row": {"mask": headwise.causal(offset=-1)},
    "softcap and scale": {"softcap": 0.8, "scale": 0.5},
}


def inputs64(n: Sizes) -> tuple[Tensor, ...]:
    return make_qkv(*n, dtype=torch.float64, requires_grad=True)


# torch's forward-mode AD of its own operations still uses torch.jit.script
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@forward_mode
@pytest.mark.parametrize("backend", slow_except(MUST, ("reference", "blocks")))  # `auto` is the reference here
@pytest.mark.parametrize("name", HIGHER)
def test_gradcheck(backend: str, name: str) -> None:
    torch.autograd.gradcheck(
        lambda *x: headwise.attention(*x, backend=backend, **HIGHER[name]), inputs64(TINY), check_forward_ad=True
    )


@pytest.mark.parametrize("name", HIGHER)
@pytest.mark.parametrize("backend", slow_except(MUST, ("reference", "blocks")))
def test_gradgradcheck(backend: str, name: str) -> None:
    torch.autograd.gradgradcheck(lambda *x: headwise.attention(*x, backend=backend, **HIGHER[name]), inputs64(TINY))


@forward_mode
def test_gradcheck_of_sinks_gate_bias_slopes_and_lse() -> None:
    n = TINY
    made = {"sinks": (n.H,), "gate": (n.B, n.H, n.T), "bias": (n.T, n.S), "slopes": (n.H,)}
    extra = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in made.values()]

    def both(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, gate: Tensor, bias: Tensor, slopes: Tensor) -> Any:
        mask = headwise.causal() & headwise.bias(bias) & headwise.alibi(slopes)
        return headwise.attention(q, k, v, mask=mask, sinks=sinks, gate=gate, softcap=2.0, return_lse=True)

    torch.autograd.gradcheck(both, (*inputs64(n), *extra), check_forward_ad=True)
    torch.autograd.gradgradcheck(both, (*inputs64(n), *extra))


def test_double_backward_of_float32() -> None:
    """On the reference path it is exact; on torch's fused kernel it is a clear error, never a wrong number."""

    def penalty(dtype: torch.dtype, **options: Any) -> Tensor:
        q, k, v = make_qkv(*SHORT, dtype=dtype, requires_grad=True)
        out = headwise.attention(q, k, v, mask=headwise.causal(), **options)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), k)[0]

    exact = penalty(torch.float64)
    for backend in ("reference", "blocks"):
        torch.testing.assert_close(penalty(torch.float32, backend=backend).double(), exact, rtol=1e-4, atol=1e-4)
    try:
        torch.testing.assert_close(penalty(torch.float32).double(), exact, rtol=1e-4, atol=1e-4)
    except (RuntimeError, NotImplementedError) as refusal:
        assert "not implemented" in str(refusal)


@pytest.mark.parametrize("backend", [*MUST, *BEST])
@pytest.mark.parametrize("name", ["one tensor", "values are columns of the keys", "keys and a bias of the query"])
def test_double_backward_of_what_is_made_of_one_another(name: str, backend: str) -> None:
    """The key may be the query, or made of it: each path counts once."""

    def grads(create_graph: bool) -> list[Tensor]:
        q, k, _ = make_qkv(1, 2, 1, 5, 5, 7, 7, requires_grad=True)
        mask = headwise.causal()
        if name == "one tensor":
            out = attend(backend, q, q, q, mask=mask)
        elif name == "values are columns of the keys":
            out = attend(backend, q, k, k[..., :3], mask=mask)
        else:
            out = attend(backend, q, k + q[:, :1].sin(), k, mask=mask & headwise.bias(q[..., :5].cos()))
        return list(torch.autograd.grad(out.square().sum(), [q, k], create_graph=create_graph, materialize_grads=True))

    for again, once in zip(grads(True), grads(False), strict=True):
        torch.testing.assert_close(again, once, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [*MUST, *BEST])
@pytest.mark.parametrize("name", [*HIGHER, "sinks"])
def test_double_backward_has_the_options_of_the_call(name: str, backend: str) -> None:
    options = HIGHER.get(name, {"sinks": torch.tensor([0.3, -0.7])})
    drawn = make_qkv(1, 2, 1, 5, 7, 3, 11)

    def second(backend: str, dtype: torch.dtype) -> list[Tensor]:
        cast = {key: x.to(dtype) if isinstance(x, Tensor) else x for key, x in options.items()}
        q, k, v = (x.to(dtype).requires_grad_() for x in drawn)
        out = attend(backend, q, k, v, **cast)
        grads = torch.autograd.grad(out.square().sum(), [q, k, v], create_graph=True)
        return list(torch.autograd.grad(sum(x.square().sum() for x in grads), [q, k, v]))

    for ours, exact in zip(second(backend, torch.float32), second("reference", torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vmap", "is_grads_batched"])
@pytest.mark.parametrize("backend", [*MUST, *BEST])
def test_many_gradients_at_once_are_the_loop(backend: str, name: str) -> None:
    """As `torch.autograd.functional.jacobian(vectorize=True)` asks for them."""
    q, k, v = make_qkv(*SHORT, requires_grad=True)
    bias = torch.randn(SHORT.T, SHORT.S, requires_grad=True)
    for mask, leaves in ((headwise.causal(), [q, v]), (headwise.causal() & headwise.bias(bias), [k, bias])):
        out, lse = attend(backend, q, k, v, mask=mask, return_lse=True)
        ups = [torch.randn(3, *x.shape) for x in (out, lse)]

        def back(*up: Tensor, outputs: Any = (out, lse), leaves: Any = leaves, **batched: bool) -> tuple[Tensor, ...]:
            return torch.autograd.grad(outputs, leaves, up, retain_graph=True, **batched)

        at_once = torch.func.vmap(back)(*ups) if name == "vmap" else back(*ups, is_grads_batched=True)
        for ours, theirs in zip(at_once, zip(*(back(*up) for up in zip(*ups, strict=True)), strict=True), strict=True):
            assert not ours.requires_grad
            torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-4, atol=1e-5)
    plain = attend(backend, q, k, v)
    [ours] = torch.autograd.grad(plain, q, torch.stack([plain, 2 * plain]).detach(), is_grads_batched=True)
    torch.testing.assert_close(ours[1], 2 * ours[0])


@forward_mode
@pytest.mark.parametrize("name", HIGHER)
def test_jvp_is_the_directional_derivative(name: str) -> None:
    n = SHORT
    primals, tangents = make_qkv(*n, dtype=torch.float64), make_qkv(*n, dtype=torch.float64, seed=1)

    def run(*x: Tensor) -> Tensor:
        return headwise.attention(*x, **HIGHER[name])

    out, along = torch.func.jvp(run, primals, tangents)
    torch.testing.assert_close(out, run(*primals))
    step = 1e-6
    ahead, behind = (run(*(x + s * t for x, t in zip(primals, tangents, strict=True))) for s in (step, -step))
    torch.testing.assert_close(along, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", HIGHER)
def test_vmap_is_the_loop(name: str) -> None:
    stack = [torch.stack(x) for x in zip(*(make_qkv(*SHORT, seed=s) for s in range(3)), strict=True)]
    ours = torch.func.vmap(lambda *x: headwise.attention(*x, **HIGHER[name]))(*stack)
    loop = torch.stack([headwise.attention(*x, **HIGHER[name]) for x in zip(*stack, strict=True)])
    torch.testing.assert_close(ours, loop, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("backend", MUST)
def test_torch_func_grad_of_each_sample(backend: str) -> None:
    """Of every leaf that may learn, and beside rows that attend nothing."""
    n = SHORT
    shapes = ((n.H,), (n.B, n.H, n.T), (n.T, n.S), (n.H,))
    samples = [(*make_qkv(*n, seed=s), *(torch.randn(shape) for shape in shapes)) for s in range(3)]

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, gate: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        mask = headwise.causal(offset=-1) & headwise.bias(bias) & headwise.alibi(slopes)
        return headwise.attention(q, k, v, mask=mask, sinks=sinks, gate=gate, backend=backend).square().sum()

    run = torch.func.grad(loss, argnums=tuple(range(7)))
    loop = [torch.stack(x) for x in zip(*(run(*x) for x in samples), strict=True)]
    at_once = torch.func.vmap(run)(*(torch.stack(x) for x in zip(*samples, strict=True)))
    for ours, theirs in zip(at_once, loop, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# -- dropout -------------------------------------------------------------------------------------------------------


FIFTY = Sizes(2, 3, 1, 50, 70, 4, 70)  # V = S: an identity as values reads the weights off


def dropped(backend: str, p: float, seed: int = 0, n: Sizes = FIFTY) -> tuple[Tensor, Tensor]:
    """(weights after dropout, weights), read off an identity as values."""
    q, k, _ = make_qkv(*n)
    identity = torch.eye(n.S).expand(n.B, n.K, n.S, n.S)
    torch.manual_seed(seed)
    mask = headwise.causal()
    return attend(backend, q, k, identity, mask=mask, dropout=p), headwise.weights(q, k, mask=mask)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("backend", [*MUST, *NATIVE])
def test_dropout_zeroes_a_fraction_and_keeps_the_expectation(backend: str, p: float) -> None:
    ours, whole = dropped(backend, p)
    seen = whole > 0
    gone = (ours == 0) & seen
    count = int(seen.sum())
    assert abs(float(gone.sum()) / count - p) < 5 * (p * (1 - p) / count) ** 0.5  # five standard deviations
    torch.testing.assert_close(ours[~gone], (whole / (1 - p))[~gone], rtol=1e-5, atol=1e-6)  # after softmax: no new sum
    assert bool((ours[~seen] == 0).all())
    heads = {tuple(places.nonzero()[:, 0].tolist()) for places in gone.flatten(0, 1).flatten(1)}
    assert len(heads) == gone.shape[0] * gone.shape[1], "two heads drop alike"


@pytest.mark.parametrize("backend", [*MUST, *NATIVE])
def test_dropout_follows_the_seed(backend: str) -> None:
    assert_same_bits(dropped(backend, 0.3, seed=5)[0], dropped(backend, 0.3, seed=5)[0])
    assert not torch.equal(dropped(backend, 0.3, seed=5)[0], dropped(backend, 0.3, seed=6)[0])
    assert_same_bits(dropped(backend, 0.0, seed=5)[0], dropped(backend, 0.0, seed=6)[0])


@pytest.mark.parametrize(
    "n", [Sizes(2, 3, 1, 50, 70, 4, 70), Sizes(1, 1, 1, 600, 1030, 4, 1030)], ids=["one block", "many"]
)
@pytest.mark.parametrize("backend", [*MUST, *BEST])
def test_backward_drops_what_forward_dropped(backend: str, n: Sizes) -> None:
    """With an identity as values, out is the dropped weights P, and the gradient of the values is P^T dO."""
    q, k, _ = make_qkv(*n)
    v = torch.eye(n.S).expand(n.B, n.K, n.S, n.S).contiguous().requires_grad_()
    out = attend(backend, q.requires_grad_(), k, v, dropout=0.4)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (grad,) = torch.autograd.grad(out, v, grad_out)
    expected = (out.mT @ grad_out).unflatten(1, (n.K, -1)).sum(2)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_dropout_by_torchs_kernel_is_refused_on_the_cpu() -> None:
    assert attend("sdpa", *make_qkv(*SHORT), dropout=0.1) is None
