"""How far the native kernel's gradients are from the exact ones, largest and root mean square; beside PyTorch's.

Held: each gradient at most twice the error of naive PyTorch in the same dtype (autograd through the textbook), largest
and mean square. The largest has an ulp of the largest entry as slack. Sizes are large enough that no entry is luck.
And the same at any height of the logits: naive's weights of a row add up to 1 whatever the scores, and so must ours,
which no lse in float32 would give (at 1e4 it is off by 5e-4).
The table, with torch's fused backward beside it: `python tests/csrc/test_native_gradients_accuracy.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from backends import NATIVE, instructions
from gradient_cases import Case, Leaves, answer, gradients, written_out
from mask_cases import Sizes
from native_cases import DTYPES, dtypes, native_dtypes
from test_native_accuracy import Error, error
from torch import Tensor

import headwise
from headwise.testing import ulp

pytestmark = pytest.mark.unchecked

FULL, GROUPED = Sizes(1, 2, 2, 256, 256, 64, 64), Sizes(1, 8, 2, 130, 260, 128, 128)
REGIMES = {
    "full D 64": Case(FULL),
    "causal D 64": Case(FULL, mask="causal"),
    "causal GQA D 128": Case(GROUPED, mask="causal"),
    "full D 80": Case(Sizes(1, 2, 1, 160, 257, 80, 80)),
    "full D 256": Case(Sizes(1, 2, 2, 128, 257, 256, 256)),
    "D 192, V 128": Case(Sizes(1, 4, 4, 128, 256, 192, 128), mask="causal"),
    "2048 queries": Case(Sizes(1, 1, 1, 2048, 128, 64, 64)),
    "2048 keys": Case(Sizes(1, 1, 1, 128, 2048, 64, 64)),
    "window 3": Case(FULL, mask="window 3"),
    "softcap": Case(FULL, softcap=5.0, size=2.0),
    "sinks": Case(FULL, mask="causal", sinks=True),
    "bias": Case(FULL, mask="causal", bias=(2, 256, 256)),
    "bias a key": Case(FULL, mask="causal", bias=(256,)),
    "slopes": Case(FULL, mask="causal", slopes=(2,)),
    "lse": Case(FULL, lse=True),
    "dropout": Case(FULL, dropout=0.25),
    "everything": Case(FULL, mask="causal", softcap=5.0, sinks=True, bias=(2, 1, 256), dropout=0.25, lse=True),
    "logits 16 times": Case(FULL, size=4.0),
    "outlier channel": Case(FULL._replace(B=8), kind="outlier"),
    "sink key": Case(FULL._replace(B=4), kind="sink"),
    "duplicate keys": Case(FULL._replace(B=2), kind="duplicates"),
    **{f"{T} queries": Case(Sizes(8, 8, 2, T, 700, 64, 64)) for T in (1, 4, 8)},
}
regimes = pytest.mark.parametrize("name", REGIMES)


@cache
def answers(name: str, dtype: torch.dtype) -> tuple[Leaves, dict[str, Error]]:
    """(exact gradients, naive's worst error) by leaf."""
    case = replace(REGIMES[name], dtype=dtype)
    exact = written_out(case, torch.float64)
    rough = [written_out(case, dtype, order) for order in range(3)]
    each = {leaf: [error([x[leaf]], [exact[leaf]]) for x in rough] for leaf in exact}
    return exact, {leaf: Error(max(e.most for e in es), max(e.rms for e in es)) for leaf, es in each.items()}


def measured(backend: str, name: str, dtype: torch.dtype) -> dict[str, Error]:
    case, exact = replace(REGIMES[name], dtype=dtype), answers(name, dtype)[0]
    grad_out, grad_lse = case.upstream()
    ours = gradients(backend, case, case.leaves(), grad_out, grad_lse if case.lse else None)
    return {leaf: error([ours[leaf]], [exact[leaf]]) for leaf in exact}


def faults(ours: dict[str, Error], name: str, dtype: torch.dtype) -> list[str]:
    """The gradients whose error is beyond its budget."""
    exact, rough = answers(name, dtype)
    messages = []
    for leaf, its in ours.items():
        step = ulp(float(exact[leaf].abs().max()), dtype)
        slack = 0.0
        if exact[leaf].numel() < 100:  # of a few entries (sinks, slopes) naive's errors are luck
            slack = step = answer(replace(REGIMES[name], dtype=dtype)).slack[leaf]
        if its.rms > 2 * rough[leaf].rms + slack or its.most > 2 * rough[leaf].most + step:
            messages.append(f"{leaf}: ours {its}, naive {rough[leaf]}")
    return messages


@pytest.mark.sweep
@native_dtypes
@regimes
def test_gradients(backend: str, dtype: torch.dtype, name: str) -> None:
    messages = faults(measured(backend, name, dtype), name, dtype)
    assert not messages, f"{name}: " + "; ".join(messages)


@dtypes
def test_a_small_error_would_be_seen(dtype: torch.dtype) -> None:
    """Scores rounded a little more, or a delta of the rounded output's half, lie outside."""
    name = "full D 64"
    by = 1e-5 if dtype == torch.float32 else 3e-2
    case, exact = replace(REGIMES[name], dtype=dtype), answers(name, dtype)[0]
    wrong = written_out(case, torch.float64, fault=lambda x: {**x, "query": x["query"] * (1 + by)})
    assert faults({leaf: error([wrong[leaf].to(dtype)], [exact[leaf]]) for leaf in exact}, name, dtype)


# -- large logits ------------------------------------------------------------------------------------------------------

# Few rows and many, few keys and many tiles of them, and keys that the forward splits; `draws` of each, in turn.
SHAPES = {
    "few rows": (Sizes(3, 4, 2, 2, 131, 31, 29), 5),  # 4 of a head: few on every instruction set
    "a query, 7 keys": (Sizes(1, 2, 2, 1, 7, 129, 129), 19),
    "7 queries, 7 keys": (Sizes(1, 2, 2, 7, 7, 129, 129), 11),
    "7 keys": (Sizes(1, 2, 1, 53, 7, 129, 127), 3),
    "many rows": (Sizes(1, 2, 1, 97, 131, 29, 31), 3),
    "split keys": (Sizes(1, 1, 1, 11, 1279, 17, 19), 3),
}
HEIGHTS = (1.0, 8.0, 9.0, 100.0, 1e4)  # 9: queries and keys times 3
ORDERS = 9  # of naive's sums: at 1e4 one draw decides, and there its error is 1.5e-3 to 1.8e-2 as the order has it


def naive_gradients(qkv: Sequence[Tensor], grad_out: Tensor, scale: float, order: int) -> tuple[Tensor, ...]:
    q, k, v = leaves = tuple(x.detach().requires_grad_() for x in qkv)
    G = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    D = q.shape[3]
    drawn = torch.randperm(D, generator=torch.Generator().manual_seed(order))
    columns = torch.arange(D) if order == 0 else torch.arange(D).flip(0) if order == 2 else drawn
    scores = (q * scale) @ k.mT if order == 1 else (q[..., columns] @ k[..., columns].mT) * scale
    return torch.autograd.grad(torch.softmax(scores, -1) @ v, leaves, grad_out)


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_any_size(backend: str, dtype: torch.dtype, name: str, height: float) -> None:
    """Drawn queries and keys whose scores have this standard deviation. Also where one key has all the weight."""
    if dtype == torch.float16 and height > 1e3:
        return  # naive's own products overflow
    n, draws = SHAPES[name]
    ours: list[list[Tensor]] = [[], [], []]
    exact: list[list[Tensor]] = [[], [], []]
    rough: list[list[list[Tensor]]] = [[[], [], []] for _ in range(ORDERS)]
    for draw in range(draws):
        source = torch.Generator().manual_seed(draw)
        shapes = ((n.B, n.H, n.T, n.D), (n.B, n.K, n.S, n.D), (n.B, n.K, n.S, n.V), (n.B, n.H, n.T, n.V))
        sizes = (height**0.5, height**0.5, 1.0, 1.0)
        *qkv, grad_out = (torch.randn(x, generator=source) * size for x, size in zip(shapes, sizes, strict=True))
        qkv, grad_out = [x.to(dtype) for x in qkv], grad_out.to(dtype)
        right = naive_gradients([x.double() for x in qkv], grad_out.double(), n.D**-0.5, 0)
        with instructions(backend) as native:
            leaves = [x.detach().requires_grad_() for x in qkv]
            its = torch.autograd.grad(headwise.attention(*leaves, backend=native), leaves, grad_out)
        for i in range(3):
            exact[i].append(right[i]), ours[i].append(its[i])
        for order in range(ORDERS):
            for i, x in enumerate(naive_gradients(qkv, grad_out, n.D**-0.5, order)):
                rough[order][i].append(x)
    for i, leaf in enumerate(("query", "key", "value")):
        mine, naives = error(ours[i], exact[i]), [error(x[i], exact[i]) for x in rough]
        most, rms = max(x.most for x in naives), max(x.rms for x in naives)
        floor = torch.finfo(dtype).smallest_normal  # what is smaller may be 0
        assert mine.most <= 2 * most + floor and mine.rms <= 2 * rms + floor, (
            f"{leaf}: {mine}, naive {most:.2e} {rms:.2e}"
        )


# -- the table ---------------------------------------------------------------------------------------------------------


def fused(name: str, dtype: torch.dtype) -> dict[str, Error] | None:
    """torch's own backward, where it has the case without a mask tensor."""
    case = replace(REGIMES[name], dtype=dtype)
    plain = Case(case.n, dtype, case.mask, kind=case.kind, size=case.size)
    if case != plain or case.mask not in (None, "causal") or (case.mask and case.n.T != case.n.S):
        return None
    leaves = {leaf: x.detach().requires_grad_() for leaf, x in case.leaves().items()}
    run = torch.nn.functional.scaled_dot_product_attention
    out = run(*leaves.values(), is_causal=case.mask == "causal", enable_gqa=case.n.H != case.n.K)
    grads: tuple[Tensor, ...] = torch.autograd.grad(out, list(leaves.values()), case.upstream()[0])
    exact = answers(name, dtype)[0]
    return {leaf: error([x], [exact[leaf]]) for leaf, x in zip(leaves, grads, strict=True)}


def table(line: Callable[[str], None] = print) -> None:
    """The errors as multiples of naive's, largest / rms, for each leaf."""
    for dtype in DTYPES:
        line(f"\n{str(dtype)[6:]}: largest / rms error as a multiple of naive {str(dtype)[6:]}'s")
        names = [*(b.removeprefix("native-") for b in NATIVE), "torch's fused"]
        line(f"{'':34} {'naive':>19} " + " ".join(f"{x:>13}" for x in names))
        for name in REGIMES:
            _, rough = answers(name, dtype)
            theirs = fused(name, dtype)
            ours = [measured(backend, name, dtype) for backend in NATIVE]
            for leaf, its in rough.items():
                cells = [_cell(x[leaf], its) for x in ours] + ([_cell(theirs[leaf], its)] if theirs else [])
                line(f"{name:24} {leaf:9} {its.most:.2e} / {its.rms:.2e} " + " ".join(f"{x:>13}" for x in cells))


def _cell(ours: Error, rough: Error) -> str:
    parts = (x / y if y else math.nan for x, y in ((ours.most, rough.most), (ours.rms, rough.rms)))
    return " / ".join(f"{x:.2f}" for x in parts)


if __name__ == "__main__":
    table()
