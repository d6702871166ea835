"""How far the native kernel's gradients are from the exact ones, largest and root mean square; beside PyTorch's.

Held: each gradient at most twice the error of naive PyTorch in the same dtype (autograd through the textbook), largest
and mean square, and what the rounding of the lse alone costs: a backward is given it in float32, and naive PyTorch has
no use for it. The largest has an ulp of the largest entry as slack. Sizes are large enough that no entry is luck.
The table, with torch's fused backward beside it: `python tests/test_native_gradients_accuracy.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from backends import NATIVE, natives
from gradient_cases import Case, Leaves, answer, gradients, textbook, written_out
from mask_cases import Sizes
from native_cases import DTYPES, dtypes
from test_native_accuracy import Error, error
from torch import Tensor

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
def answers(name: str, dtype: torch.dtype) -> tuple[Leaves, dict[str, Error], dict[str, Error]]:
    """(exact gradients, naive's worst error, the error that an lse of float32 makes on its own) by leaf.

    A weight found again from an lse is off by the factor that the lse is off, as are all gradients of its row.
    """
    case = replace(REGIMES[name], dtype=dtype)
    exact = written_out(case, torch.float64)
    rough = [written_out(case, dtype, order) for order in range(3)]
    each = {leaf: [error([x[leaf]], [exact[leaf]]) for x in rough] for leaf in exact}
    worst = {leaf: Error(max(e.most for e in es), max(e.rms for e in es)) for leaf, es in each.items()}
    lses = [
        textbook(case, {x: y.to(to) for x, y in case.leaves().items()}, to)[1] for to in (torch.float64, torch.float32)
    ]
    given = written_out(case, torch.float64, rows=torch.exp(lses[0] - lses[1]))
    return exact, worst, {leaf: error([given[leaf]], [exact[leaf]]) for leaf in exact}


def measured(backend: str, name: str, dtype: torch.dtype) -> dict[str, Error]:
    case, exact = replace(REGIMES[name], dtype=dtype), answers(name, dtype)[0]
    grad_out, grad_lse = case.upstream()
    ours = gradients(backend, case, case.leaves(), grad_out, grad_lse if case.lse else None)
    return {leaf: error([ours[leaf]], [exact[leaf]]) for leaf in exact}


def faults(ours: dict[str, Error], name: str, dtype: torch.dtype) -> list[str]:
    """The gradients whose error is beyond its budget."""
    exact, rough, given = answers(name, dtype)
    found = []
    for leaf, its in ours.items():
        step = ulp(float(exact[leaf].abs().max()), dtype)
        slack = 0.0
        if exact[leaf].numel() < 100:  # of a few entries (sinks, slopes) naive's errors are luck
            slack = step = answer(replace(REGIMES[name], dtype=dtype)).slack[leaf]
        rms, most = (2 * rough[leaf].rms + given[leaf].rms, 2 * rough[leaf].most + given[leaf].most)
        if its.rms > rms + slack or its.most > most + step:
            found.append(f"{leaf}: ours {its}, naive {rough[leaf]}, by a float32 lse alone {given[leaf]}")
    return found


@natives
@dtypes
@regimes
def test_gradients(backend: str, dtype: torch.dtype, name: str) -> None:
    found = faults(measured(backend, name, dtype), name, dtype)
    assert not found, f"{name}: " + "; ".join(found)


@dtypes
def test_a_small_error_would_be_seen(dtype: torch.dtype) -> None:
    """Scores rounded a little more, or a delta of the rounded output's half, lie outside."""
    name = "full D 64"
    by = 1e-5 if dtype == torch.float32 else 3e-2
    case, exact = replace(REGIMES[name], dtype=dtype), answers(name, dtype)[0]
    wrong = written_out(case, torch.float64, fault=lambda x: {**x, "query": x["query"] * (1 + by)})
    assert faults({leaf: error([wrong[leaf].to(dtype)], [exact[leaf]]) for leaf in exact}, name, dtype)


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
    found: tuple[Tensor, ...] = torch.autograd.grad(out, list(leaves.values()), case.upstream()[0])
    exact = answers(name, dtype)[0]
    return {leaf: error([x], [exact[leaf]]) for leaf, x in zip(leaves, found, strict=True)}


def table(line: Callable[[str], None] = print) -> None:
    """The errors as multiples of naive's, largest / rms, for each leaf."""
    for dtype in DTYPES:
        line(f"\n{str(dtype)[6:]}: largest / rms error as a multiple of naive {str(dtype)[6:]}'s")
        names = [*(b.removeprefix("native-") for b in NATIVE), "torch's fused"]
        line(f"{'':34} {'naive':>19} " + " ".join(f"{x:>13}" for x in names))
        for name in REGIMES:
            _, rough, _ = answers(name, dtype)
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
