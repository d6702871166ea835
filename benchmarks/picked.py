"""Attention to keys chosen for each query: the table of `docs/masks.md`.

    python benchmarks/picked.py [--rounds 5] [--json]

Each row has its ways in turns: the picked keys, all keys (causal), the same keys as a bool mask of T x S, torch's SDPA
with that mask, and torch's SDPA on keys gathered beforehand for 64 queries at a time, the gathering included. Training
is forward and backward. The keys are drawn at random among those up to the query: the worst case for memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import headwise

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

AT_ONCE = 64  # queries whose keys are gathered together for SDPA
MATRIX = 1 << 24  # pairs of the largest bool mask


class Case(NamedTuple):
    """Sizes, n keys of S for each query; a V below D is that of MLA's latents, values being columns of the keys."""

    H: int
    K: int
    D: int
    V: int
    T: int
    S: int
    n: int
    trains: bool = False


CASES = (
    Case(8, 2, 64, 64, 2048, 2048, 128),
    Case(8, 2, 64, 64, 512, 32768, 256),
    Case(8, 2, 64, 64, 512, 32768, 256, trains=True),
    Case(32, 8, 128, 128, 1, 32768, 2048),
    Case(16, 1, 576, 512, 1, 32768, 2048),
)


def drawn(case: Case) -> Tensor:
    """(1, 1, T, n): keys at random, none after their query."""
    make = torch.Generator().manual_seed(case.S)
    last = torch.arange(case.S - case.T, case.S)[:, None]
    order = torch.rand(case.T, case.S, generator=make).masked_fill(torch.arange(case.S) > last, -1.0).topk(case.n)
    return order.indices.masked_fill(order.values < 0, -1)[None, None]


def gathered(query: Tensor, key: Tensor, value: Tensor, indices: Tensor) -> Tensor:
    """SDPA on gathered keys, which a user would write; (1, H, T, V)."""
    outs = []
    for some in indices[0, 0].split(AT_ONCE):
        first = sum(len(x) for x in outs)
        keys, values = (x[0][:, some.clamp(min=0)].transpose(0, 1) for x in (key, value))
        queries = query[0, :, first : first + len(some)].transpose(0, 1)[:, :, None]
        seen = (some >= 0)[:, None, None]
        outs.append(scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)[:, :, 0])
    return torch.cat(outs).transpose(0, 1)[None]


def run(case: Case, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    make = torch.Generator().manual_seed(7)
    H, K, D, V, T, S, *_ = case
    query = torch.randn(1, H, T, D, generator=make).to(dtype).requires_grad_(case.trains)
    key = torch.randn(1, K, S, D, generator=make).to(dtype).requires_grad_(case.trains)
    value = torch.randn(1, K, S, V, generator=make).to(dtype).requires_grad_(case.trains) if V == D else key[..., :V]
    indices = drawn(case)
    mask, grad = headwise.picked(indices), torch.randn(1, H, T, V, generator=make).to(dtype)
    calls: dict[str, clock.Run] = {
        "picked": lambda: headwise.attention(query, key, value, mask=mask),
        "all keys": lambda: headwise.attention(query, key, value, mask=headwise.causal()),
        "SDPA on gathered keys": lambda: gathered(query, key, value, indices),
    }
    if T * S <= MATRIX and not (case.trains or V != D):
        seen = mask.dense(T, S)
        calls["as a bool mask"] = lambda: headwise.attention(query, key, value, mask=seen)
        calls["SDPA, bool mask"] = lambda: scaled_dot_product_attention(
            query, key, value, attn_mask=seen, enable_gqa=True
        )

    def training(call: clock.Run) -> clock.Run:
        return lambda: torch.autograd.grad(call(), (query, key, value), grad)

    ways = {name: training(call) if case.trains else call for name, call in calls.items()}
    with torch.set_grad_enabled(case.trains):
        off = float((calls["picked"]() - calls["SDPA on gathered keys"]()).norm() / grad.norm())
        for way in ways.values():
            way()
        times = clock.measure(ways, {}, rounds, 10.0)
    return {
        "case": case._asdict(),
        "dtype": str(dtype).removeprefix("torch."),
        "off": off,
        "ms": {way: times.summary(way) for way in times.seconds},
        "disturbed": times.disturbed,
    }


def print_table(report: dict[str, Any]) -> None:
    names = ("all keys", "as a bool mask", "SDPA, bool mask", "SDPA on gathered keys", "picked")
    grid = Table(title="Milliseconds of attention to picked keys", title_justify="left")
    for name in ("H, K, D, V", "T, S, n", "dtype", *names):
        grid.add_column(name)
    for row in report["results"]:
        case = Case(**row["case"])
        what = f"{case.T}, {case.S}, {case.n}" + (", training" if case.trains else "")
        times = [f"{row['ms'][name]['median_ms']:.1f}" if name in row["ms"] else "" for name in names]
        grid.add_row(f"{case.H}, {case.K}, {case.D}, {case.V}", what, row["dtype"], *times)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help="which rows, from 0")
    table.add_delivery(parser)
    options = parser.parse_args()
    results = [run(CASES[n], dtype, options.rounds) for n in options.cases for dtype in (torch.bfloat16, torch.float32)]
    table.deliver({"machine": clock.machine(), "results": results}, print_table, options, "picked")


if __name__ == "__main__":
    main()
