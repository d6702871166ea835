"""Attention written in drawn sequences of operations on scores: headwise computes it as written, or refuses.

Every order of scales, biases and masks is drawn. An operation that headwise carries over to the query, the scale or
the mask must be right after all that came before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import headwise.hf as hf
from headwise.hf.own_code.tracer import OwnAttention

B, H, T, S, D = 2, 3, 5, 7, 11


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


SEEN = torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(5)) > 0.3
SEEN[..., 0] = True
LOWEST = torch.finfo(torch.float32).min
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "times a number": lambda s: s * 0.3,
    "a number times": lambda s: 1.7 * s,
    "over a number": lambda s: s / 2.5,
    "times a number a head": lambda s: s * (drawn(H, 1, 1, seed=1).abs() + 0.2),
    "over a number a head": lambda s: s / (drawn(H, 1, 1, seed=2).abs() + 0.5),
    "times a number of each sign": lambda s: s * drawn(H, 1, 1, seed=3),
    "times a number a query": lambda s: s * (drawn(1, 1, T, 1, seed=4).abs() + 0.2),
    "over a number a row": lambda s: s / (drawn(B, 1, 1, 1, seed=9).abs() + 0.5),
    "times a number a key": lambda s: s * (drawn(1, 1, 1, S, seed=5).abs() + 0.2),
    "plus a number": lambda s: s + 0.7,
    "plus a number a key": lambda s: s + drawn(S, seed=6),
    "plus a number a head": lambda s: s + drawn(H, 1, 1, seed=7),
    "plus a matrix a head": lambda s: s + drawn(1, H, T, S, seed=8),
    "minus": lambda s: s - drawn(1, 1, T, S, seed=10),
    "a mask filled": lambda s: s.masked_fill(~SEEN, LOWEST),
    "a mask chosen": lambda s: torch.where(SEEN, s, torch.tensor(LOWEST)),
    "a mask added": lambda s: s + torch.where(SEEN, 0.0, LOWEST / 2),
    "in place": lambda s: s.mul_(0.5).add_(drawn(S, seed=11)),
}


class Written(nn.Module):
    """Attention with these operations between the product and the softmax."""

    num_heads = H

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        for name in self.names:
            scores = OPERATIONS[name](scores)
        return scores.softmax(-1) @ v


def check(names: list[str]) -> tuple[str | None, bool]:
    """What is wrong with the output or the gradients, and whether headwise computed them."""
    made: list[Tensor] = []
    q, k, v = (drawn(B, H, n, D, seed=n + 20).mul(0.5).requires_grad_() for n in (T, S, S))
    module = Written(names)
    try:
        OwnAttention(module).run(lambda *tensors: made.append(module(*tensors)), q, k, v)
        read = True
    except hf.ModelError:
        read = False
    [ours], theirs = made, module(q, k, v)
    if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
        return f"{names}: {float((ours - theirs).abs().max()):.2g}", read
    if not read:
        return None, read
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (ours, theirs)), strict=True):
        if not torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max())):
            return f"{names}: gradient {float((a - b).abs().max()):.2g}", read
    return None, read


@pytest.mark.parametrize("seed", range(3))
def test_drawn_sequences_are_computed_as_written(seed: int) -> None:
    make, wrong, read = random.Random(seed), [], 0
    for _ in range(40):
        text, was_read = check(make.sample(list(OPERATIONS), make.choice([2, 3, 3, 4])))
        wrong += [text] if text else []
        read += was_read
    assert wrong == [] and read >= 10


def test_every_two_operations_in_both_orders() -> None:
    few = [name for name in OPERATIONS if name not in ("a number times", "minus", "a mask chosen")]
    wrong = [text for a in few for b in few if a != b for text, _ in [check([a, b])] if text]
    assert wrong == []
