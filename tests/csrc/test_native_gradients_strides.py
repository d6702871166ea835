"""The native backward reads any strides: each memory layout of each tensor gives the bits of the contiguous copy.

What lies in the gaps and around is NaN, or 1e30. Layouts are those of `test_native_strides`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from backends import instructions, natives
from draw import drawn
from gradient_cases import Case, Leaves, gradients
from mask_cases import Sizes
from native_cases import collected, native_dtypes
from test_native_strides import LAST, lay
from torch import Tensor

import headwise
from headwise.ops.native import backend as native
from headwise.ops.native import library
from headwise.testing import STRIDES, assert_same_bits

pytestmark = pytest.mark.unchecked

FORMS = {
    "a query": Sizes(2, 4, 2, 1, 70, 24, 20),
    "many rows": Sizes(2, 6, 3, 53, 67, 24, 20),
    "odd dims": Sizes(2, 2, 1, 19, 41, 11, 13),
}
forms = pytest.mark.parametrize("n", FORMS.values(), ids=FORMS)


def same(call: Callable[..., Leaves], odd: dict[str, Tensor]) -> None:
    """The call with odd tensors is the call with their contiguous copies, to the bit."""
    theirs = call(**{name: x.contiguous() for name, x in odd.items()})
    for name, x in call(**odd).items():
        assert_same_bits(x, theirs[name], what=f"gradient of {name}")
        assert not bool(x.isnan().any()), f"gradient of {name}: a gap was read"


def caller(backend: str, case: Case) -> Callable[..., Leaves]:
    leaves, (grad_out, grad_lse) = case.leaves(), case.upstream()

    def call(**change: Tensor) -> Leaves:
        arguments: dict[str, Any] = {**leaves, "grad_out": grad_out, "grad_lse": grad_lse, **change}
        lse = arguments["grad_lse"] if case.lse else None
        return gradients(backend, case, {name: arguments[name] for name in leaves}, arguments["grad_out"], lse)

    return call


@pytest.mark.sweep
@native_dtypes
@forms
def test_query_key_value_and_what_comes_back(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    case = Case(n, dtype, "causal")
    call = caller(backend, case)
    with collected() as attempt:
        arguments = {**case.leaves(), "grad_out": case.upstream()[0]}
        for name, pattern in drawn([*product(arguments, (*STRIDES, *LAST))]):
            attempt(f"{name}, {pattern}", same, call, {name: lay(arguments[name], pattern)})


@pytest.mark.sweep
@native_dtypes
@forms
def test_all_at_once(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Each with a layout of its own, and 1e30 in the gaps; without a mask."""
    case = Case(n, dtype)
    arguments = {**case.leaves(), "grad_out": case.upstream()[0]}
    every, slack = (*STRIDES, *LAST), min(1e30, torch.finfo(dtype).max)
    steps = ((1, 0), (2, 5), (3, 11), (5, 7))
    with collected() as attempt:
        for i in drawn(range(len(every))):
            odd = {
                name: lay(x, every[(i * step + shift) % len(every)], slack)
                for (name, x), (step, shift) in zip(arguments.items(), steps, strict=True)
            }
            attempt(f"{i}", same, caller(backend, case), odd)


@pytest.mark.sweep
@native_dtypes
@forms
def test_biases(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """In every layout and in every broadcast form of one; its gradient is that of the contiguous copy."""
    B, H, T, S = n.B, n.H, n.T, n.S
    with collected() as attempt:
        for shape in [(a, b, c, d) for a in (1, B) for b in (1, H) for c in (1, T) for d in (1, S)]:
            case = Case(n, dtype, "causal", bias=shape)
            patterns = (*STRIDES, *LAST) if shape == (B, H, T, S) else ("order 3012 and step 2",)
            for pattern in drawn(patterns):
                odd = lay(case.leaves()["bias"], pattern)
                attempt(f"{shape}, {pattern}", same, caller(backend, case), {"bias": odd})


@pytest.mark.sweep
@natives
@forms
def test_sinks_slopes_gates_and_the_gradient_of_lse(backend: str, n: Sizes) -> None:
    case = Case(n, mask="causal", sinks=True, slopes=(n.B, n.H), gate=True, lse=True)
    arguments = {**case.leaves(), "grad_lse": case.upstream()[1]}

    def spread(x: Tensor) -> Tensor:
        """Every third entry of a longer tensor."""
        wide = torch.full((*x.shape[:-1], 3 * x.shape[-1] + 2), math.nan, dtype=x.dtype)[..., 2:]
        return wide[..., ::3][..., : x.shape[-1]].copy_(x)

    call = caller(backend, case)
    with collected() as attempt:
        for name in ("sinks", "slopes", "gate", "grad_lse"):
            attempt(f"{name}, spread", same, call, {name: spread(arguments[name])})
            if arguments[name].ndim > 1:
                attempt(f"{name}, swapped", same, call, {name: arguments[name].mT.contiguous().mT})
            attempt(f"{name}, expanded", same, call, {name: arguments[name][:1].expand(arguments[name].shape)})
        attempt("all", same, call, {name: spread(arguments[name]) for name in ("sinks", "slopes", "gate", "grad_lse")})


def operator(backend: str, arguments: dict[str, Tensor]) -> Leaves:
    """`attend_backward` itself."""
    far = native.FAR
    with instructions(backend):
        grads = torch.ops.headwise.attend_backward(
            arguments["grad_out"], None, arguments["out"], arguments["ends"], False,
            arguments["query"], arguments["key"], arguments["value"],
            0.3, 0.0, None, -far, far, None, None, None, None, None, None, 0.0, None,
        )  # fmt: skip
    return dict(zip(("query", "key", "value"), grads, strict=True))


@native_dtypes
@forms
def test_the_operator_takes_what_the_forward_gave_in_any_layout(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    case, far = Case(n, dtype), native.FAR
    leaves = case.leaves()
    none = (-far, far, None, None, None, None, None, None)
    with instructions(backend):
        out, _, ends = torch.ops.headwise.attend_kept(*leaves.values(), 0.3, 0.0, None, *none, 0.0, None)
    arguments = {**leaves, "out": out, "ends": ends, "grad_out": case.upstream()[0]}

    def call(**change: Tensor) -> Leaves:
        return operator(backend, {**arguments, **change})

    with collected() as attempt:
        for pattern in ("order 0132", "order 3210", "step 2 in 2", "step 3 in 3", "odd offset", "rows padded by 3"):
            attempt(f"out, {pattern}", same, call, {"out": lay(out, pattern)})
        attempt("ends, odd offset", same, call, {"ends": lay(ends, "odd offset")})
    for wrong, what in (
        (ends.repeat_interleave(2, 2)[:, :, ::2], "ends must be contiguous"),
        (ends.mT.contiguous().mT, "ends must be contiguous"),
        (ends[:1], "ends must be (2, B, H, T), got "),
        (ends[0], "ends must have 4 axes"),
        (ends.double(), "ends"),
    ):
        if wrong.shape == ends.shape and wrong.is_contiguous() and wrong.dtype == ends.dtype:
            continue  # of one query
        with pytest.raises(RuntimeError, match=re.escape(what)):
            call(ends=wrong)


@native_dtypes
@forms
def test_what_comes_back_reaches_the_operator_with_contiguous_rows(
    monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype, n: Sizes
) -> None:
    """An expanded or a transposed gradient: the kernel would read it number by number. Others are not copied."""
    met: list[Tensor] = []

    def noting(grad_out: Tensor, *rest: Any) -> Any:
        met.append(grad_out)
        return attend_backward(grad_out, *rest)

    attend_backward = library.attend_backward
    monkeypatch.setattr(library, "attend_backward", noting)
    shape = (n.B, n.H, n.T, n.V)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    expanded = {
        "one number": numbers[:1, :1, :1, :1].expand(shape),
        "a number a row": numbers[..., :1].expand(shape),
        "a row a head": numbers[:, :, :1].expand(shape),
        "transposed": numbers.mT.contiguous().mT,
        "every second": numbers.repeat_interleave(2, 3)[..., ::2],
        "time first": numbers.transpose(1, 2).contiguous().transpose(1, 2),
    }
    with collected() as attempt:
        for options in ({}, {"mask": "causal"}, {"mask": "keep BHTS", "sinks": True, "gate": False, "dropout": 0.25}):
            call = caller(backend, Case(n, dtype, **options))
            for name, grad_out in expanded.items():
                attempt(f"{options}, {name}", same, call, {"grad_out": grad_out})
    assert all(x.stride(3) == 1 for x in met)
    assert n.T == 1 or any(x.stride(2) == 0 for x in met), "rows that need no copy are copied"


@native_dtypes
def test_gradients_lie_batch_time_head(backend: str, dtype: torch.dtype) -> None:
    """Their memory is (B, T, H, D), whatever the layout of what they belong to: a projection takes them as they are."""
    n = FORMS["many rows"]
    case = Case(n, dtype, "causal")
    for pattern in (None, "order 3210", "step 2 in 2"):
        leaves = {name: x if pattern is None else lay(x, pattern) for name, x in case.leaves().items()}
        for name, grad in gradients(backend, case, leaves, case.upstream()[0]).items():
            assert grad.transpose(1, 2).is_contiguous() and grad.storage_offset() == 0, name


@native_dtypes
def test_projections_as_they_come(backend: str, dtype: torch.dtype) -> None:
    """One projection (B, T, (H + K + K) * D), split and transposed: what a model hands over, and gets back."""
    n = Sizes(2, 6, 3, 53, 53, 24, 24)
    case = Case(n, dtype, "causal")
    fused = torch.cat([x.transpose(1, 2).flatten(2) for x in case.leaves().values()], 2)
    parts = fused.split([n.H * n.D, n.K * n.D, n.K * n.D], dim=2)
    leaves = dict(
        zip(("query", "key", "value"), (x.unflatten(2, (-1, n.D)).transpose(1, 2) for x in parts), strict=True)
    )
    assert not any(x.is_contiguous() for x in leaves.values())
    plain = gradients(backend, case, case.leaves(), case.upstream()[0])
    for name, x in gradients(backend, case, leaves, case.upstream()[0]).items():
        assert_same_bits(x, plain[name], what=name)


def test_a_gap_that_is_read_would_be_seen() -> None:
    """A backward that takes every tensor for a contiguous one reads gaps and neighbours."""
    case = Case(FORMS["many rows"], mask="causal")
    arguments = {**case.leaves(), "grad_out": case.upstream()[0]}

    def careless(**change: Tensor) -> Leaves:
        flat = {
            name: x.as_strided(x.shape, x.contiguous().stride()) if name in change else x
            for name, x in {**arguments, **change}.items()
        }
        leaves = {name: flat[name].detach().requires_grad_() for name in ("query", "key", "value")}
        out = headwise.attention(*leaves.values(), mask=headwise.causal(), backend="blocks")
        return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), flat["grad_out"]), strict=True))

    for name, x in arguments.items():
        for pattern in ("order 0213", "step 2 in 2", "order 3012 and step 2"):
            with pytest.raises(AssertionError):
                same(careless, {name: lay(x, pattern)})
