"""The native backward means what the definition means: every mask, option and dtype, on every instruction set."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from backends import NATIVE, instructions, natives, needs_native
from draw import drawn
from gradient_cases import Case, Leaves, answer, check, compare, gradients, of_case, textbook, written_out
from mask_cases import FEW, LONG, MASKS, SHORT, SQUARE, TILED, Sizes, as_tensor
from native_cases import collected, dtypes, native_dtypes
from torch import Tensor

import headwise
from headwise.testing import assert_same_bits, oracle

pytestmark = pytest.mark.unchecked  # thousands of calls: the shape checker would take most of the time

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": -0.3},
    "zero scale": {"scale": 0.0},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "gate": {"gate": True},
    "lse": {"lse": True},
    "dropout": {"dropout": 0.375},
    "sinks and lse": {"sinks": True, "lse": True},
    "everything": {"scale": 0.9, "softcap": 1.3, "sinks": True, "gate": True, "lse": True, "dropout": 0.25},
}
ROWS = Sizes(2, 4, 2, 53, 70, 24, 20)  # more than a block of 48 rows in a group
forms = pytest.mark.parametrize("n", [SHORT, TILED, ROWS], ids=["short", "tiled", "rows"])


def run(backend: str, cases: dict[str, Case]) -> None:
    with collected() as attempt:
        for name in drawn([*cases]):
            attempt(name, check, backend, cases[name])


@native_dtypes
def test_masks(backend: str, dtype: torch.dtype) -> None:
    sizes = (SHORT, LONG, SQUARE, TILED)
    run(backend, {f"{name} {n}": Case(n, dtype, name) for name in (None, *MASKS) for n in sizes})


@native_dtypes
@forms
def test_options(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    masks = (None, "causal", "window 3", "all kinds")
    run(backend, {f"{name}, {m}": Case(n, dtype, m, **OPTIONS[name]) for name in OPTIONS for m in masks})


@native_dtypes
@forms
def test_a_bias_of_every_broadcast_form(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Summed over the axes along which it is broadcast; beside masks, dropout and a softcap."""
    shapes: list[tuple[int, ...]] = list(product((1, n.B), (1, n.H), (1, n.T), (1, n.S)))
    shapes += [(n.T, n.S), (n.S,), (1, n.S), (n.T, 1), (n.H, 1, 1), (n.H, n.T, n.S), (1, n.T, n.S)]
    cases = {f"{shape}": Case(n, dtype, "causal", bias=shape) for shape in shapes}
    for shape in ((n.B, n.H, n.T, n.S), (n.H, 1, 1), (n.S,), (n.B, 1, 1, 1)):
        cases[f"{shape}, all kinds"] = Case(n, dtype, "all kinds", bias=shape)
        cases[f"{shape}, everything"] = Case(n, dtype, "window 3 2", bias=shape, **OPTIONS["everything"])
    run(backend, cases)


@natives
@forms
def test_a_bias_of_another_dtype(backend: str, n: Sizes) -> None:
    """The gradient has the bias's own dtype, whatever the queries are."""
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    with collected() as attempt:
        for dtype, its in product(floats[:3], floats):
            case = Case(n, dtype, "causal", bias=(n.H, n.T, n.S), bias_dtype=its)
            rough = answer(replace(case, bias_dtype=None))
            ours = of_case(backend, case)
            assert ours["bias"].dtype == its
            coarser = max((dtype, its), key=lambda x: torch.finfo(x).eps)
            exact = written_out(case, torch.float64)["bias"]
            budget = rough.slack["bias"] + 2 * torch.finfo(coarser).eps * float(exact.abs().max())
            attempt(f"{dtype} and {its}", _near, ours["bias"], exact, budget)


def _near(x: Tensor, exact: Tensor, budget: float) -> None:
    error = float((x.double() - exact).abs().max())
    assert error <= budget, f"error {error:.3e}, budget {budget:.3e}"


@native_dtypes
@forms
def test_slopes(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Of one row for all or of each row of the batch, from any offset; beside a bias that learns."""
    cases = {}
    for shape, offset, mask in product([(n.H,), (1, n.H), (n.B, n.H)], [None, 0, -3, 7], [None, "causal", "lengths"]):
        cases[f"{shape} {offset} {mask}"] = Case(n, dtype, mask, slopes=shape, offset=offset)
    cases["with a bias"] = Case(n, dtype, "causal", slopes=(n.H,), bias=(n.T, n.S))
    cases["with everything"] = Case(n, dtype, "causal", slopes=(n.B, n.H), bias=(n.H, 1, n.S), **OPTIONS["everything"])
    run(backend, cases)


@natives
@pytest.mark.parametrize("order", [1, -1])
def test_several_biases_and_slopes_at_once(backend: str, order: int) -> None:
    """Each gets its own gradient, whatever stands between them."""
    n, source = TILED, torch.Generator().manual_seed(3)
    shapes = [(n.T, n.S), (n.H, 1, 1), (1, 1, 1, n.S)]
    leaves = [torch.randn(shape, generator=source).requires_grad_() for shape in shapes]
    slopes = [(torch.rand(n.H, generator=source) / n.S).requires_grad_() for _ in range(2)]
    case = Case(n)
    grad_out, _ = case.upstream()

    def grads(backend: str, dtype: torch.dtype) -> list[Tensor]:
        rules = [headwise.bias(x.to(dtype)) for x in leaves] + [headwise.alibi(x.to(dtype)) for x in slopes]
        rules += [headwise.keep(torch.rand(n.T, n.S, generator=torch.Generator().manual_seed(1)) > 0.3)]
        mask = headwise.Mask(tuple(part for rule in rules[::order] for part in rule.parts))
        first = gradients_through(backend, case, mask, dtype, grad_out)
        return list(torch.autograd.grad(first, [*leaves, *slopes], grad_out.to(dtype)))

    exact = grads("reference", torch.float64)
    for x, y in zip(grads(backend, torch.float32), exact, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


def gradients_through(backend: str, case: Case, mask: headwise.Mask, dtype: torch.dtype, grad_out: Tensor) -> Tensor:
    with instructions(backend) as name:
        return headwise.attention(*(x.to(dtype) for x in list(case.leaves().values())[:3]), mask=mask, backend=name)


@native_dtypes
def test_a_forbidden_entry_of_a_bias_gets_exactly_nothing(backend: str, dtype: torch.dtype) -> None:
    """Where it is -inf, and where another rule forbids; also where all that share the entry are forbidden."""
    for n in (SHORT, TILED):
        case = Case(n, dtype, "causal", bias=(n.B, n.H, n.T, n.S), sinks=True)
        leaves = case.leaves()
        closed = torch.rand(leaves["bias"].shape, generator=torch.Generator().manual_seed(2)) < 0.3
        leaves["bias"] = leaves["bias"].masked_fill(closed, -math.inf)
        future = ~headwise.causal().dense(n.T, n.S)
        grad = gradients(backend, case, leaves, case.upstream()[0])["bias"]
        nothing = closed | future
        assert bool((grad[nothing] == 0).all()) and bool(grad[~nothing].any()) and bool(grad.isfinite().all())
        last = replace(case, mask="lengths", bias=(n.S,), n=n._replace(B=2))
        ours = of_case(backend, last)["bias"]
        seen = MASKS["lengths"](last.n).mask.dense(n.T, n.S).flatten(0, 2).any(0)
        assert bool((ours[~seen] == 0).all()) and bool(ours[seen].any())


@native_dtypes
def test_groups_and_unlike_head_dims(backend: str, dtype: torch.dtype) -> None:
    """One key head for several query heads sums their gradients; values wider and narrower than keys."""
    cases = {}
    for G, K, T, (D, V) in product((1, 2, 3, 5, 8, 16), (1, 3), (1, 3, 17), ((16, 16), (8, 40), (33, 7))):
        n = Sizes(2, G * K, K, T, 37, D, V)
        cases[f"{n}"] = Case(n, dtype, "causal", sinks=True)
    run(backend, cases)


@native_dtypes
@pytest.mark.parametrize("dropout", [0.125, 0.5, 0.9375])
def test_dropout(backend: str, dtype: torch.dtype, dropout: float) -> None:
    """What the forward dropped, by the seed: the gradient is that of these very weights."""
    sizes = [SHORT, TILED, ROWS, Sizes(2, 4, 1, 1, 131, 16, 8), Sizes(1, 2, 1, 5, 1030, 8, 8)]
    cases = {}
    for n, mask in product(sizes, (None, "causal", "keep HTS")):
        cases[f"{n} {mask}"] = Case(n, dtype, mask, dropout=dropout)
        cases[f"{n} {mask}, more"] = Case(
            n, dtype, mask, dropout=dropout, sinks=True, softcap=2.0, lse=True, bias=(n.S,)
        )
    run(backend, cases)


@native_dtypes
@pytest.mark.parametrize("kind", ["outlier", "sink", "duplicates"])
def test_inputs_like_real_ones(backend: str, dtype: torch.dtype, kind: str) -> None:
    run(backend, {f"{n} {m}": Case(n, dtype, m, kind=kind) for n in (TILED, ROWS) for m in (None, "causal")})


@native_dtypes
@pytest.mark.parametrize("size", [0.1, 4.0, 10.0])
def test_small_and_large_scores(backend: str, dtype: torch.dtype, size: float) -> None:
    run(backend, {f"{n}": Case(n, dtype, "causal", size=size) for n in (SHORT, TILED, ROWS)})


@native_dtypes
@pytest.mark.parametrize("name", ["LONG", "bound to nothing"])
def test_rows_that_may_attend_nothing(backend: str, dtype: torch.dtype, name: str) -> None:
    """They give and get exactly nothing, whatever comes from behind; no other gradient changes a bit."""
    n = LONG if name == "LONG" else ROWS
    for mask in FEW if n == LONG else ("window far", "lengths start", "keep B1T1"):
        case = Case(n, dtype, mask, sinks=True, bias=(n.T, n.S), lse=True)
        leaves = case.leaves()
        allowed = MASKS[mask](n).mask.allowed(n.T, n.S).expand(n.B, n.H, n.T, n.S)  # type: ignore[union-attr]
        empty = ~allowed.any(-1)
        assert empty.any() or mask in ("causal", "segments (B,)", "keep BHTS", "bias BHTS", "lengths start"), mask
        quiet, lse = (x.masked_fill(empty.view(*x.shape[:3], *[1] * (x.ndim - 3)), 0) for x in case.upstream())
        wanted = gradients(backend, case, leaves, quiet, lse)
        for loud in (1e4, math.nan, math.inf):
            ours = gradients(
                backend, case, leaves, quiet.masked_fill(empty[..., None], loud), lse.masked_fill(empty, loud)
            )
            for leaf, x in ours.items():
                assert_same_bits(x, wanted[leaf], what=f"{mask}, {loud}: gradient of {leaf}")
                assert bool(x.isfinite().all())
            assert bool((ours["query"][empty] == 0).all())


@natives
def test_only_what_asks_gets_a_gradient(backend: str) -> None:
    """And it is the same, to the bit, as when all ask."""
    case = Case(TILED, mask="causal", sinks=True, bias=(67, 131), slopes=(2,), lse=True)
    leaves, (grad_out, grad_lse) = case.leaves(), case.upstream()
    every = gradients(backend, case, leaves, grad_out, grad_lse)
    for one in leaves:
        tensors = {name: x.detach().requires_grad_(name == one) for name, x in leaves.items()}
        with instructions(backend) as name:
            qkv = (tensors[x] for x in ("query", "key", "value"))
            outs = headwise.attention(*qkv, **case.options(tensors), return_lse=True, backend=name)
            (grad,) = torch.autograd.grad(outs, tensors[one], [grad_out, grad_lse])
        assert_same_bits(grad, every[one], what=one)


# -- that these tests can fail -----------------------------------------------------------------------------------------


def test_the_textbook_is_the_oracle() -> None:
    """The float64 answers of these tests beside the definition row by row."""
    for name in (None, "causal", "bias BHTS", "all kinds", "window far"):
        case = Case(SHORT, mask=name, sinks=True, gate=True, softcap=0.7, scale=-0.4)
        leaves = {x: y.double().requires_grad_() for x, y in case.leaves().items()}
        out, _ = oracle(**leaves, mask=None if name is None else as_tensor(name, SHORT), softcap=0.7, scale=-0.4)
        grads = torch.autograd.grad(out, list(leaves.values()), case.upstream()[0].double(), materialize_grads=True)
        for x, y in zip(written_out(case, torch.float64).values(), grads, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


FAULTS: dict[str, Any] = {
    "a key is not seen": lambda x: {**x, "key": torch.cat([x["key"][:, :, 1:2], x["key"][:, :, 1:]], 2)},
    "the scale": lambda x: {**x, "query": x["query"] * 1.03},
    "delta forgotten": None,
    "a sink forgotten": lambda x: {**x, "sinks": x["sinks"] - 100},
    "slopes forgotten": lambda x: {**x, "slopes": x["slopes"] * 0},
    "a row of the bias": lambda x: {**x, "bias": torch.cat([x["bias"][1:2], x["bias"][1:]])},
}


@needs_native
@dtypes
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(dtype: torch.dtype, name: str) -> None:
    case = Case(TILED, dtype, "causal", sinks=True, bias=(67, 131), slopes=(2,))
    fault = FAULTS[name]
    if fault is None:  # the gradient as if the softmax summed to nothing: P * dP
        leaves = {x: y.double().requires_grad_() for x, y in case.leaves().items()}
        out, _ = without_total(case, leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), case.upstream()[0].double(), materialize_grads=True)
        wrong: Leaves = dict(zip(leaves, grads, strict=True))
    else:
        wrong = written_out(case, torch.float64, fault=fault)
    leaves = case.leaves()
    with pytest.raises(AssertionError, match="gradient of"):
        compare({x: y.to(leaves[x].dtype) for x, y in wrong.items()}, answer(case), leaves)


def without_total(case: Case, leaves: Leaves) -> tuple[Tensor, Tensor]:
    """out with a softmax whose denominator is taken for a constant."""
    _, lse = textbook(case, leaves, torch.float64)
    plain = {x: y for x, y in leaves.items() if x != "sinks"}
    _, own = textbook(case, plain, torch.float64)
    out, _ = textbook(case, plain, torch.float64)
    return out * torch.exp(own - lse.detach())[..., None], lse


def test_every_instruction_set_takes_part() -> None:
    assert not NATIVE or {"native-baseline"} <= set(NATIVE)
