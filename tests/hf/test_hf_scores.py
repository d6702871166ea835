"""Attention as code writes it in operations of torch, and what headwise reads of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import headwise.hf as hf
from headwise.cache import quantize
from headwise.hf.attention.lazy_tensors import LazyKeys, LazyView
from headwise.hf.own_code.tracer import OwnAttention


class Written(nn.Module):
    """Attention as `code` writes it, of queries, keys and values (B, H, T, D)."""

    num_heads = 3

    def __init__(self, code: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.code(q, k, v)


def flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


LEARNED = torch.tensor([0.7, -1.3, 0.2]).view(3, 1, 1)
SEEN = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(5)) > 0.3
SEEN[..., 0] = True
LOWEST = torch.finfo(torch.float32).min
ADDED = torch.where(SEEN, 0.0, LOWEST)
CODES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k, v: torch.matmul((q @ k.mT / 3).softmax(-1), v),
    "scaled from the left": lambda q, k, v: (0.3 * (q @ k.mT)).softmax(dim=3) @ v,
    "in place": lambda q, k, v: (q @ k.mT).div_(2).add_(LEARNED).softmax(-1) @ v,
    "bmm": lambda q, k, v: torch.bmm(torch.bmm(flat(q), flat(k).mT).softmax(-1), flat(v)).unflatten(0, (2, 3)),
    "baddbmm": lambda q, k, v: torch.bmm(
        torch.baddbmm(LEARNED.repeat(2, 5, 7), flat(q), flat(k).mT, beta=0.5, alpha=0.25).softmax(-1), flat(v)
    ).unflatten(0, (2, 3)),
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
    "bias before the scale": lambda q, k, v: ((q @ k.mT + torch.arange(7.0)) * 0.3).softmax(-1) @ v,
    "a scale a head": lambda q, k, v: (q @ k.mT * LEARNED).softmax(-1) @ v,
    "masked_fill": lambda q, k, v: (q @ k.mT).masked_fill(~SEEN, LOWEST).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(SEEN, q @ k.mT, torch.tensor(-1e4)).softmax(-1) @ v,
    "minus": lambda q, k, v: (q @ k.mT - 1e4 * (~SEEN).float()).softmax(-1) @ v,
    "at least": lambda q, k, v: (
        torch.max(q @ k.mT + torch.where(SEEN, 0.0, LOWEST), torch.tensor(LOWEST)).softmax(-1) @ v
    ),
    "other dtypes": lambda q, k, v: (q @ k.mT).double().softmax(-1).to(q.dtype) @ v,
    "half the way made": lambda q, k, v: (q @ k.mT - (q @ k.mT).amax(-1, keepdim=True)).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", CODES)
def test_scores_are_told_what_happens_to_them(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, n, 11, generator=generator, requires_grad=True) for n in (5, 7, 7))
    module = Written(CODES[name])
    theirs = module(q, k, v)
    ours = OwnAttention(module).run(module, q, k, v)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


UNREAD: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "another function": lambda q, k, v: (q @ k.mT).tanh().softmax(-1) @ v,
    "softmax over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "weights that are changed": lambda q, k, v: ((q @ k.mT).softmax(-1) * SEEN) @ v,
    "a negative scale": lambda q, k, v: (-1.0 * (q @ k.mT)).softmax(-1) @ v,
    "no softmax": lambda q, k, v: (q @ k.mT) @ v,
    "at least a number that scores reach": lambda q, k, v: torch.max(q @ k.mT, torch.tensor(-0.5)).softmax(-1) @ v,
    "a window of numbers that hide nothing": lambda q, k, v: (q @ k.mT).masked_fill(~SEEN, 0.0).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_understood_is_computed_as_written_and_refused(name: str) -> None:
    """Never silently: the module ran, and its attention was not headwise's."""
    q, k, v = (torch.randn(2, 3, n, 11) for n in (5, 7, 7))
    module, made = Written(UNREAD[name]), []
    with pytest.raises(hf.ModelError, match="Written ran without a product of queries and keys that headwise can read"):
        OwnAttention(module).run(lambda *tensors: made.append(module(*tensors)), q, k, v)
    torch.testing.assert_close(made[0], module(q, k, v), rtol=0, atol=0)


def test_the_dtype_of_weights_is_that_of_their_softmax() -> None:
    """As the code has it; a model may ask."""
    q, k, v = (torch.randn(2, 3, n, 11) for n in (5, 7, 7))
    dtypes: list[torch.dtype] = []

    def code(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = nn.functional.softmax(q @ k.mT, dim=-1, dtype=torch.float64)
        dtypes.append(weights.dtype)
        return weights.to(v.dtype) @ v

    OwnAttention(module := Written(code)).run(module, q, k, v)
    assert dtypes == [torch.float64]


def test_what_is_done_in_place_is_done_once_where_scores_are_made() -> None:
    q, k, v = (torch.randn(2, 3, n, 11) for n in (5, 7, 7))
    made: list[Tensor] = []

    def code(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        scores /= 3
        scores += LEARNED
        made.append(scores.tanh())
        return scores.softmax(-1) @ v

    module = Written(code)
    OwnAttention(module).run(module, q, k, v)
    module(q, k, v)
    assert torch.equal(made[0], made[1])


def test_keys_of_a_cache_may_be_turned_and_made() -> None:
    """Where the code does more with them than multiply, they are the tensor."""
    stored = quantize(torch.randn(2, 3, 7, 11))
    keys = LazyKeys(stored, torch.float32)
    for flat in (False, True):
        view = LazyView(keys, turned=True, flat=flat)
        plain = keys.plain().flatten(0, 1) if flat else keys.plain()
        assert view.shape == plain.mT.shape and torch.equal(view + 0.0, plain.mT)


def test_keys_of_a_cache_that_a_model_writes_to_are_its_own() -> None:
    q, keys = torch.randn(2, 3, 5, 11), LazyKeys(quantize(torch.randn(2, 3, 7, 11)), torch.float32)
    keys.mul_(2.0)
    module = Written(lambda q, k, v: (q @ k.transpose(2, 3)).softmax(-1) @ v)
    ours = OwnAttention(module).run(module, q, keys, keys)
    torch.testing.assert_close(ours, module(q, keys.plain(), keys.plain()), rtol=1e-5, atol=1e-5)
