"""What the tests of the native backward share: a case, its gradients in float64 and by naive PyTorch, their budgets.

A budget is twice naive's largest error, and what the case's own numbers give: a rounding of the root of the sum of
squares of all terms that meet in one entry, in float32 times the largest score, which is what the terms are rounded by.
Naive's largest error is luck where a case has few entries; that sum is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from backends import instructions
from mask_cases import MASKS, Sizes
from torch import Tensor

import headwise
from headwise import Mask
from headwise.testing import make_qkv

SEED = 6  # of dropout
Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A call and what learns in it: query, key, value, and what is named here."""

    n: Sizes
    dtype: torch.dtype = torch.float32
    mask: str | None = None  # of `mask_cases.MASKS`
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    gate: bool = False
    bias: tuple[int, ...] | None = None  # its shape
    bias_dtype: torch.dtype | None = None  # the case's, if None
    slopes: tuple[int, ...] | None = None
    offset: int | None = None  # of the slopes
    dropout: float = 0.0  # a fraction that float32 holds exactly
    lse: bool = False  # the loss looks at it, too
    kind: str = "normal"
    size: float = 1.0  # of queries and keys

    def leaves(self) -> Leaves:
        return dict(_leaves(self))

    @cache  # noqa: B019  cases are few
    def upstream(self) -> tuple[Tensor, Tensor]:
        """What comes from behind: of out, in its dtype, and of lse, float32."""
        n, source = self.n, torch.Generator().manual_seed(7)
        grad_out = torch.randn(n.B, n.H, n.T, n.V, generator=source, dtype=torch.float64).to(self.dtype)
        return grad_out, torch.randn(n.B, n.H, n.T, generator=source)

    def fixed(self) -> Mask | None:
        return None if self.mask is None else MASKS[self.mask](self.n).mask

    def options(self, leaves: Leaves) -> dict[str, Any]:
        """Of `headwise.attention`, beside query, key, value and backend."""
        rules = [] if self.mask is None else list(self.fixed().parts)  # type: ignore[union-attr]
        if "bias" in leaves:
            rules += headwise.bias(leaves["bias"]).parts
        if "slopes" in leaves:
            rules += headwise.alibi(leaves["slopes"], offset=self.offset).parts
        arguments: dict[str, Any] = {name: leaves[name] for name in ("sinks", "gate") if name in leaves}
        return {
            "mask": Mask(tuple(rules)) if rules else None,
            "scale": self.scale,
            "softcap": self.softcap,
            "dropout": self.dropout,
            **arguments,
        }

    def kept(self) -> Tensor | None:
        """What dropout keeps of the weights, (B, H, T, S)."""
        if self.dropout == 0:
            return None
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed keeps the stack, for CUDA: slow
        n, seed = self.n, torch.randint(1 << 62, (1,))
        return torch.ops.headwise.dropout_keep(seed, self.dropout, n.B, n.H, 0, n.T, n.S)


@cache
def _leaves(case: Case) -> Leaves:
    n, source = case.n, torch.Generator().manual_seed(sum(case.n))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    qkv = make_qkv(*n, dtype=case.dtype, kind=case.kind, scale=case.size)
    leaves = dict(zip(("query", "key", "value"), qkv, strict=True))
    if case.sinks:
        leaves["sinks"] = draw(n.H).to(case.dtype)
    if case.gate:
        leaves["gate"] = (draw(n.B, n.H, n.T, n.V) + 1).to(case.dtype)
    if case.bias is not None:
        leaves["bias"] = draw(*case.bias).to(case.bias_dtype or case.dtype)
    if case.slopes is not None:
        leaves["slopes"] = (draw(*case.slopes).abs() / n.S).float()
    return leaves


def gradients(
    backend: str, case: Case, leaves: Leaves, grad_out: Tensor, grad_lse: Tensor | None = None, **change: Any
) -> Leaves:
    """What `headwise.attention` hands back to each leaf, forward and backward on the same instruction set."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    options = {**case.options(leaves), **change}
    with instructions(backend) as name:
        torch.default_generator.manual_seed(SEED)
        qkv = (leaves[x] for x in ("query", "key", "value"))
        out, lse = headwise.attention(*qkv, **options, return_lse=True, backend=name)
        outs, upstream = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
        grads = torch.autograd.grad(outs, list(leaves.values()), upstream)
    return dict(zip(leaves, grads, strict=True))


def of_case(backend: str, case: Case, **change: Any) -> Leaves:
    grad_out, grad_lse = case.upstream()
    return gradients(backend, case, case.leaves(), grad_out, grad_lse if case.lse else None, **change)


# -- the definition ----------------------------------------------------------------------------------------------------


def rules_of(case: Case, leaves: Leaves, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What may be attended (bool), and what is added to the scores, both (B, H, T, S)."""
    n, fixed = case.n, case.fixed()
    full = (n.B, n.H, n.T, n.S)
    allowed, added = torch.ones(full, dtype=torch.bool), torch.zeros(full, dtype=dtype)
    if fixed is not None:
        its, more = fixed.allowed(n.T, n.S), fixed.added(n.T, n.S)
        allowed = allowed if its is None else allowed & its
        added = added if more is None else added + more.to(dtype)
    if "bias" in leaves:
        allowed, added = allowed & (leaves["bias"] != -math.inf), added + leaves["bias"].to(dtype)
    if "slopes" in leaves:
        added = added - leaves["slopes"].to(dtype)[..., None, None] * away(case).to(dtype)
    return allowed, added


def away(case: Case) -> Tensor:
    """The distance that ALiBi counts, (T, S)."""
    n = case.n
    offset = n.S - n.T if case.offset is None else case.offset
    return (torch.arange(n.T)[:, None] + offset - torch.arange(n.S)).abs()


def weights_of(case: Case, leaves: Leaves, dtype: torch.dtype, order: int = 0) -> tuple[Tensor, Tensor]:
    """Weights (B, H, T, S) before dropout and lse, in one dtype; `order`: where the scale goes, as in `naive`."""
    n = case.n
    q, k = leaves["query"].to(dtype), leaves["key"].to(dtype).repeat_interleave(n.H // n.K, 1)
    scale = n.D**-0.5 if case.scale is None else case.scale
    half, sign = abs(scale) ** 0.5, math.copysign(1, scale)
    products = (lambda: (q @ k.mT) * scale, lambda: (q * scale) @ k.mT, lambda: (q * half * sign) @ (k * half).mT)
    scores = products[order]()
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    allowed, added = rules_of(case, leaves, dtype)
    scores = scores + added.masked_fill(~allowed, 0.0)
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | empty), -math.inf)  # an empty row's softmax is thrown away below
    if "sinks" in leaves:
        scores = torch.cat([scores, leaves["sinks"].to(dtype).view(1, n.H, 1, 1).expand(n.B, n.H, n.T, 1)], -1)
    weights = torch.softmax(scores, -1)[..., : n.S].masked_fill(~allowed, 0)
    return weights, torch.logsumexp(scores, -1).masked_fill(empty[..., 0], 0)  # which then has no gradient


def textbook(case: Case, leaves: Leaves, dtype: torch.dtype, order: int = 0) -> tuple[Tensor, Tensor]:
    """out and lse, written out."""
    weights, lse = weights_of(case, leaves, dtype, order)
    if case.dropout > 0:
        weights = weights * (case.kept() / (1 - case.dropout)).to(dtype)  # type: ignore[operator]
    out = weights @ leaves["value"].to(dtype).repeat_interleave(case.n.H // case.n.K, 1)
    return (out * leaves["gate"].to(dtype) if "gate" in leaves else out), lse


def written_out(
    case: Case,
    dtype: torch.dtype,
    order: int = 0,
    fault: Callable[[Leaves], Leaves] | None = None,
) -> Leaves:
    """The gradients through `textbook`, by autograd. `fault` changes the leaves beforehand, to plant an error."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in case.leaves().items()}
    grad_out, grad_lse = (x.to(dtype) for x in case.upstream())
    out, lse = textbook(case, leaves if fault is None else fault(leaves), dtype, order)
    outs, upstream = ([out, lse], [grad_out, grad_lse]) if case.lse else ([out], [grad_out])
    grads = torch.autograd.grad(outs, list(leaves.values()), upstream, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


# -- budgets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answer:
    """By leaf: the gradient in float64, naive's three in the case's dtype, and the slack of its budget."""

    case: Case
    exact: Leaves
    slack: dict[str, float]

    @cached_property
    def rough(self) -> list[Leaves]:
        return [written_out(self.case, self.case.dtype, order) for order in range(3)]


@cache
def answer(case: Case) -> Answer:
    exact = written_out(case, torch.float64)
    tallest = tallest_score(case) if case.dtype == torch.float32 else 1.0
    spread = {name: float(x.amax()) for name, x in spreads(case).items()}
    eps = torch.finfo(case.dtype).eps
    slack = {name: eps * x * max(1.0, tallest) for name, x in spread.items()}
    return Answer(case, exact, slack)


def tallest_score(case: Case) -> float:
    leaves = case.leaves()
    tops = [leaves[name].double().norm(dim=-1).max() for name in ("query", "key")]
    return float(tops[0] * tops[1]) * abs(case.n.D**-0.5 if case.scale is None else case.scale)


def spreads(case: Case) -> Leaves:
    """For each entry of a gradient the root of the sum of squares of its terms, each as large as what it is made of.

    The scores' gradient is P * (dP - delta): a difference, whose rounding follows the size of dP and of delta.
    """
    n, leaves = case.n, {name: x.double() for name, x in case.leaves().items()}
    grad_out, grad_lse = (x.double().abs() for x in case.upstream())
    q, k, v = (leaves[name].abs() for name in ("query", "key", "value"))
    k, v = (x.repeat_interleave(n.H // n.K, 1) for x in (k, v))
    weights, lse = weights_of(case, leaves, torch.float64)
    kept = case.kept()
    up = torch.ones(()) if kept is None else kept.double() / (1 - case.dropout)
    dout = grad_out * leaves["gate"].abs() if case.gate else grad_out
    dweights = (dout @ v.mT) * up
    delta = (weights * dweights).sum(-1) + (grad_lse if case.lse else 0.0)
    terms = (weights * (dweights + delta[..., None])).square()  # of the scores' gradient
    scale = (n.D**-0.5 if case.scale is None else abs(case.scale)) ** 2
    group = lambda x: x.unflatten(1, (n.K, -1)).sum(2)  # noqa: E731
    sums = {
        "query": scale * terms @ k.square(),
        "key": scale * group(terms.mT @ q.square()),
        "value": group((weights * up).square().mT @ dout.square()),
        "gate": ((weights * up).square() @ v.square()) * grad_out.square(),
    }
    if case.sinks:
        sums["sinks"] = (torch.exp(leaves["sinks"][:, None] - lse) * delta).square().sum((0, 2))
    if case.bias is not None:
        sums["bias"] = terms.sum_to_size((1,) * (4 - len(case.bias)) + case.bias)
    if case.slopes is not None:
        sums["slopes"] = (
            (terms * away(case).square()).sum((2, 3)).sum_to_size((1,) * (2 - len(case.slopes)) + case.slopes)
        )
    return {name: sums[name].sqrt() for name in leaves}


def check(backend: str, case: Case) -> None:
    """Each gradient within its budget, in its leaf's dtype and shape."""
    compare(of_case(backend, case), answer(case), case.leaves())


def compare(ours: Leaves, wanted: Answer, leaves: Leaves) -> None:
    assert ours.keys() == leaves.keys()
    for name, grad in ours.items():
        assert grad.dtype == leaves[name].dtype and grad.shape == leaves[name].shape, (
            f"{name}: {grad.dtype} {grad.shape}"
        )
        exact = wanted.exact[name]
        error = far(grad, exact)
        if error <= wanted.slack[name]:
            continue  # without naive's answers, which take longer than all the rest
        naive = max(far(x[name], exact) for x in wanted.rough)
        assert math.isfinite(naive), f"the yardstick of {name} is broken"
        budget = 2 * naive + wanted.slack[name]
        assert error <= budget, (
            f"gradient of {name}: error {error:.3e}, naive's {naive:.3e}, budget {budget:.3e} "
            f"(the largest entry is {float(exact.abs().max()):.3e})"
        )


def far(x: Tensor, exact: Tensor) -> float:
    """The largest distance; infinite where one has a NaN or an infinity."""
    return float((x.double() - exact).abs().nan_to_num(nan=math.inf, posinf=math.inf).max())
