"""The same meaning in the gradient: exact, nothing from what may not be attended, 0 for rows that attend nothing."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from backends import BEST, MUST, attend
from draw import drawn
from loops import inside
from mask_cases import FEW, LONG, MASKS, SHORT, SIZES, TILED, UNEQUAL, Sizes, as_tensor, dense
from test_interference import SIZED_POISONS, split_rows
from test_meaning import EMPTY_ROWS, EXTRAS, options_of
from torch import Tensor

import headwise
from headwise.testing import (
    POISONS,
    STRIDES,
    assert_close_like_torch,
    assert_same_bits,
    make_qkv,
    naive,
    oracle,
    poison,
    strided,
)

trains = pytest.mark.parametrize("backend", ["reference", "blocks", "sdpa", *BEST])  # auto is one; flex cannot on CPU
TORCH_FACTOR = 20.0  # torch's fused kernel on the CPU errs up to 16 times as much as torch written out (dV)
ORDERS = 3  # outputs of `naive`
Leaves = dict[str, Tensor]


def budget_of(backend: str) -> tuple[float, int]:
    """(factor on naive's error, ulps) of a gradient: where torch's fused backward runs, it sets the error.

    Given the native kernel's lse, which rounds another way than its own scores, it errs up to 23 times as much.
    """
    return (2.0, 1) if backend in MUST else (TORCH_FACTOR if backend == "sdpa" else 1.5 * TORCH_FACTOR, 4)


def upstream(n: Sizes, dtype: torch.dtype) -> Tensor:
    """The gradient that comes from behind."""
    made = torch.randn(n.B, n.H, n.T, n.V, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return made.to(dtype)


def gradients(function: Any, leaves: dict[str, Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    """What `function(**leaves)` hands back to each leaf."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out = function(**leaves)
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad_out), strict=True))


def leaves_of(n: Sizes, extra: str, dtype: torch.dtype, kind: str = "normal") -> tuple[Leaves, dict[str, Any]]:
    """(tensors that learn, the other options)."""
    options = options_of(extra, n, dtype)
    leaves = dict(zip(("query", "key", "value"), make_qkv(*n, dtype=dtype, kind=kind), strict=True))
    leaves |= {name: options.pop(name) for name in ("sinks", "gate") if name in options}
    return leaves, options


def naive_by_group(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, **options: Any) -> Tensor:
    """`naive` with the heads of a group in one axis, as "blocks" has them: one sum over all rows for a value."""
    (B, H, T, _), (K, S) = query.shape, key.shape[1:3]

    def fold(x: Tensor) -> Tensor:
        return x.unflatten(1, (K, H // K)).flatten(2, 3)

    rows = None if mask is None else fold(mask.expand(B, H, T, S))
    return naive(fold(query), key, value, mask=rows, **options)[0].unflatten(2, (H // K, T)).flatten(1, 2)


@cache
def exact_gradients(
    mask: str | None, n: Sizes, extra: str, dtype: torch.dtype, kind: str = "normal"
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """(float64 gradients, naive gradients `ORDERS` times and by group) from the mask's definition as a loop."""
    leaves, options = leaves_of(n, extra, dtype, kind)
    tensor = None if mask is None else as_tensor(mask, n)
    exact = gradients(
        lambda **x: oracle(**x, mask=tensor, **options)[0],
        {name: x.double() for name, x in leaves.items()},
        upstream(n, dtype).double(),
    )
    rough = [
        gradients(lambda order=order, **x: naive(**x, mask=tensor, **options)[order], leaves, upstream(n, dtype))
        for order in range(ORDERS)
    ]
    if not {"sinks", "gate"} & leaves.keys():  # these belong to heads
        rough.append(gradients(lambda **x: naive_by_group(**x, mask=tensor, **options), leaves, upstream(n, dtype)))
    return exact, rough


def check(
    backend: str,
    mask: str | None,
    n: Sizes,
    extra: str = "plain",
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "normal",
) -> None:
    leaves, options = leaves_of(n, extra, dtype, kind)
    made = None if mask is None else MASKS[mask](n).mask
    learning = {name: x.requires_grad_() for name, x in leaves.items()}
    out = attend(backend, **learning, mask=made, **options)
    if out is None:
        return
    ours = torch.autograd.grad(out, list(learning.values()), upstream(n, dtype))
    exact, rough = exact_gradients(mask, n, extra, dtype, kind)
    tallest = 0.0 if mask is None else float(dense(mask, n)[1].abs().max())  # a score is rounded as its bias is large
    largest = max(1.0, tallest) * torch.cat([x.flatten() for x in exact.values()])
    for (name, x), grad in zip(learning.items(), ours, strict=True):
        assert grad.dtype == dtype and grad.shape == x.shape
        naives = [r[name] for r in (rough if backend == "blocks" else rough[:ORDERS])]
        factor, ulps = budget_of(backend)
        what = f"{backend}, {mask}: gradient of {name}"
        assert_close_like_torch(grad, exact[name], naives, values=ulps * largest, factor=factor, what=what)


@pytest.mark.sweep
@trains
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_gradients_of_masks(backend: str, mask: str | None) -> None:
    for n in drawn((*SIZES, *UNEQUAL), f"{mask}"):
        check(backend, mask, n)


@trains
@pytest.mark.parametrize("mask", [None, "causal", "all kinds"])
def test_gradients_across_tiles(backend: str, mask: str | None) -> None:
    check(backend, mask, TILED)


@trains
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", [None, "causal", "all kinds"])
def test_gradients_of_options(backend: str, mask: str | None, extra: str) -> None:
    check(backend, mask, LONG, extra)


@trains
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mask", [None, "causal", "bias BHTS"])
def test_gradients_of_dtypes(backend: str, mask: str | None, dtype: torch.dtype) -> None:
    check(backend, mask, SHORT, dtype=dtype)


@pytest.mark.parametrize("backend", [*MUST, *BEST])
@pytest.mark.parametrize("shape", [(5, 7), (6, 1, 7), (2, 1, 5, 7), (2, 6, 5, 7), (1, 7), (7,)])
def test_gradients_of_a_bias(backend: str, shape: tuple[int, ...]) -> None:
    """Every broadcast form; an entry of -inf, and one that another rule forbids, gets exactly 0."""
    n = SHORT
    source = torch.Generator().manual_seed(8)
    learned = torch.randn(shape, generator=source)
    learned = learned.masked_fill(torch.rand(shape, generator=source) < 0.2, -math.inf)
    qkv, grad_out = make_qkv(*n), upstream(n, torch.float32)
    future = ~dense("causal", n)[0]

    def by_oracle(x: Tensor) -> Tensor:
        return oracle(*qkv, mask=x.expand(n.B, n.H, n.T, n.S).masked_fill(future, -math.inf))[0]

    (exact,) = gradients(by_oracle, {"x": learned.double()}, grad_out.double()).values()
    (ours,) = gradients(
        lambda x: attend(backend, *qkv, mask=headwise.causal() & headwise.bias(x)),
        {"x": learned},
        grad_out,
    ).values()
    assert bool((ours[learned == -math.inf] == 0).all())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", [*MUST, *BEST])
def test_gradients_of_slopes(backend: str) -> None:
    n = SHORT
    far = (torch.arange(n.T)[:, None] + n.S - n.T - torch.arange(n.S)).abs()
    qkv, grad_out, slopes = make_qkv(*n), upstream(n, torch.float32), headwise.alibi_slopes(n.H)
    (exact,) = gradients(
        lambda x: oracle(*qkv, mask=(-x[:, None, None] * far).expand(n.B, -1, -1, -1))[0],
        {"x": slopes.double()},
        grad_out.double(),
    ).values()
    ours = gradients(lambda x: attend(backend, *qkv, mask=headwise.alibi(x)), {"x": slopes}, grad_out)["x"]
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@trains
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_a_row_that_may_attend_nothing_gives_and_gets_nothing(backend: str, name: str) -> None:
    n, mask = SHORT, EMPTY_ROWS[name]
    empty = ~mask.allowed(n.T, n.S).expand(n.B, n.H, n.T, n.S).any(-1)  # type: ignore[union-attr]
    for extra in ("plain", "everything"):
        leaves, options = leaves_of(n, extra, torch.float32)
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        out = attend(backend, **leaves, mask=mask, **options)
        if out is None:
            continue
        loud = upstream(n, torch.float32).masked_fill(empty[..., None], 1e30)
        quiet = loud.masked_fill(empty[..., None], 0)
        for x, y, leaf in zip(
            torch.autograd.grad(out, list(leaves.values()), loud, retain_graph=True),
            torch.autograd.grad(out, list(leaves.values()), quiet),
            leaves,
            strict=True,
        ):
            if leaf != "gate":  # 0 * 1e30: the output was 0, so the gate's own gradient is 0 there
                assert_same_bits(x, y, what=f"gradient of {leaf}")
            assert bool(x.isfinite().all())
            if leaf == "query":
                assert bool((x[empty] == 0).all())


@pytest.mark.parametrize("backend", [*MUST, *BEST])
def test_the_gradient_through_lse(backend: str) -> None:
    n = LONG
    for extra in ("plain", "everything"):
        leaves, options = leaves_of(n, extra, torch.float32)
        made, tensor = headwise.causal(), as_tensor("causal", n)
        weight = torch.randn(n.B, n.H, n.T, generator=torch.Generator().manual_seed(9))

        def loss(pair: tuple[Tensor, Tensor], weight: Tensor = weight) -> Tensor:
            out, lse = pair
            return (out * upstream(n, out.dtype)).sum() + (lse.masked_fill(lse == -math.inf, 0) * weight).sum()

        one = torch.ones(())
        exact = gradients(
            lambda o=options, m=tensor, **x: loss(oracle(**x, mask=m, **o)),
            {name: x.double() for name, x in leaves.items()},
            one.double(),
        )
        ours = gradients(
            lambda o=options, m=made, **x: loss(attend(backend, **x, mask=m, return_lse=True, **o)),
            leaves,
            one,
        )
        for name, grad in ours.items():
            assert bool(grad.isfinite().all())
            torch.testing.assert_close(grad.double(), exact[name], rtol=1e-5, atol=1e-5)


# -- what may not be attended cannot influence, in the gradient either ---------------------------------------------


def all_gradients(backend: str, q: Tensor, k: Tensor, v: Tensor, mask: headwise.Mask, grad_out: Tensor) -> Any:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attend(backend, *leaves, mask=mask), leaves, grad_out)


@trains
@pytest.mark.parametrize("mask", ["causal_top_left", "lengths", "causal & lengths", "keep B11S", "window & window"])
def test_poison_that_nothing_attends(backend: str, mask: str) -> None:
    """Keys and values beyond every row's sight, NaN or not: no gradient changes a bit, and theirs is 0."""
    for n, what in SIZED_POISONS:
        q, k, v = make_qkv(*n)
        made, (sees, _) = MASKS[mask](n).mask, dense(mask, n)
        unseen = ~sees.unflatten(1, (n.K, -1)).any(2).any(2)[..., None]
        assert unseen.any() or n.S <= n.T
        clean = all_gradients(backend, q, k, v, made, upstream(n, torch.float32))
        for pair in ((poison(k, unseen, what), v), (k, poison(v, unseen, what))):
            ours = all_gradients(backend, q, *pair, made, upstream(n, torch.float32))
            for x, y in zip(ours, clean, strict=True):
                assert_same_bits(x, y)
            assert bool((ours[1].masked_select(unseen) == 0).all() and (ours[2].masked_select(unseen) == 0).all())


@trains
@pytest.mark.parametrize("mask", [*FEW, "lengths", "causal_top_left", "causal & lengths"])
def test_poison_that_some_rows_attend(backend: str, mask: str) -> None:
    """Rows that do not meet the poison keep every bit of their query's gradient; those that meet it show it.

    Nothing crosses to another batch row or another group of heads. A stated limit: within its own group a row that
    is NaN and counts in the loss makes the gradient of all keys and values NaN, also of those it may not attend.
    """
    n = LONG
    q, k, v = make_qkv(*n)
    made, (sees, _) = MASKS[mask](n).mask, dense(mask, n)
    grad_out = upstream(n, torch.float32)
    clean = all_gradients(backend, q, k, v, made, grad_out)
    source = torch.Generator().manual_seed(11)
    keys = torch.rand(n.B, n.K, n.S, generator=source) < 0.2
    rows = torch.rand(n.B, n.H, n.T, generator=source) < 0.2
    keys[1] = rows[1] = False
    keys[:, 1] = rows[:, n.H // n.K :] = False
    for what in POISONS[:2]:
        for name, arguments in {
            "key": (q, poison(k, keys[..., None], what), v, made, grad_out),
            "value": (q, k, poison(v, keys[..., None], what), made, grad_out),
            "query": (poison(q, rows[..., None], what), k, v, made, grad_out),
            "gradient": (q, k, v, made, poison(grad_out, rows[..., None], what)),
        }.items():
            bad_rows = split_rows(sees, keys)[0] if name in ("key", "value") else rows & sees.any(-1)
            bad_keys = bad_rows.unflatten(1, (n.K, -1)).any(2).any(2)[..., None].expand(n.B, n.K, n.S)
            ours = all_gradients(backend, *arguments)
            for x, y, bad in zip(ours, clean, (bad_rows, bad_keys, bad_keys), strict=True):
                assert_same_bits(x[~bad], y[~bad], what=f"{what} in {name}")
            assert bool(ours[0][bad_rows].isnan().all()), f"{what} in {name} does not show in the query's gradient"


@trains
def test_nan_rows_that_the_loss_leaves_out_do_no_harm(backend: str) -> None:
    """Padding whose keys and queries are both NaN: the loss looks at real rows alone, every gradient stays finite."""
    n = SHORT
    q, k, v = make_qkv(*n)
    real = torch.arange(n.T) < 3
    q, k, v = (
        poison(q, ~real[:, None]),
        poison(k, torch.arange(n.S)[:, None] >= 5),
        poison(v, torch.arange(n.S)[:, None] >= 5),
    )
    grad_out = upstream(n, torch.float32).masked_fill(~real[:, None], 0)
    for grad in all_gradients(backend, q, k, v, headwise.lengths(torch.tensor([5, 4])), grad_out):
        assert bool(grad.isfinite().all())


@trains
@inside("pattern", STRIDES)
def test_gradients_of_layouts(backend: str, pattern: str) -> None:
    """Any strides of inputs and of the incoming gradient; NaN in the gaps is not read."""
    n = SHORT
    qkv, grad_out = make_qkv(*n), upstream(n, torch.float32)
    for index in range(4):
        odd = [*qkv, grad_out]
        odd[index] = strided(odd[index], pattern)
        plain = [x.contiguous() for x in odd]
        ours, same = (all_gradients(backend, q, k, v, headwise.causal(), dout) for q, k, v, dout in (odd, plain))
        for x, y in zip(ours, same, strict=True):
            assert x.shape == y.shape
            torch.testing.assert_close(x, y, rtol=5e-6, atol=2e-6)


@pytest.mark.parametrize("sizes", [(B, 4, 2, T, S, 7, 2) for B, T, S in ((0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0))])
@pytest.mark.parametrize("backend", [*MUST, "sdpa", *BEST])
def test_gradients_of_nothing(backend: str, sizes: tuple[int, ...]) -> None:
    n = Sizes(*sizes)
    for mask in (None, headwise.causal()):
        qkv = make_qkv(*n, requires_grad=True)
        out = attend(backend, *qkv, mask=mask)
        if out is None:
            continue
        for x, grad in zip(qkv, torch.autograd.grad(out, qkv, upstream(n, torch.float32)), strict=True):
            assert_same_bits(grad, torch.zeros_like(x))


def test_only_what_asks_gets_a_gradient() -> None:
    for which in range(3):
        qkv = list(make_qkv(*SHORT))
        qkv[which].requires_grad_()
        headwise.attention(*qkv, mask=headwise.causal()).sum().backward()
        assert [x.grad is not None for x in qkv] == [i == which for i in range(3)]
    out = headwise.attention(*make_qkv(*SHORT))
    assert not out.requires_grad
