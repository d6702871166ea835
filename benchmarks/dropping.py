"""Decoding from a cache that dropped tokens: `python benchmarks/dropping.py [--rounds 9] [--json]`.

A cache of 32,768 tokens keeps 2,048, chosen at random for each key-value head. A row has its ways in turns: one query
on the whole cache, on what is left, on a cache that never had more, and with a further mask; and PyTorch's SDPA on keys
that were gathered beforehand, as kvpress leaves them. `keep` itself is timed apart, beside gathering.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

import headwise
from headwise.cache import StaticCache

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table


class Case(NamedTuple):
    """Heads and sizes; S tokens, of which `kept` stay."""

    H: int = 32
    K: int = 8
    D: int = 128
    S: int = 32768
    kept: int = 2048


def lineup(case: Case, dtype: torch.dtype) -> tuple[dict[str, clock.Run], dict[str, clock.Run]]:
    """The ways to attend with one query, and the ways to drop."""
    H, K, D, S, kept = case
    source = torch.Generator().manual_seed(5)
    query = torch.randn(1, H, 1, D, generator=source).to(dtype)
    key, value = (torch.randn(1, K, S, D, generator=source).to(dtype) for _ in range(2))
    chosen = torch.rand(1, K, S, generator=source).topk(kept).indices.sort().values
    places = chosen[..., None].expand(-1, -1, -1, D)
    left = key.gather(2, places), value.gather(2, places)

    def filled(k: torch.Tensor, v: torch.Tensor) -> Any:
        return StaticCache(1, K, D, capacity=S, dtype=dtype).append(k, v)

    whole, dropped, short = filled(key, value), filled(key, value).keep(chosen), filled(*left)
    window = headwise.window(S // 2)
    attending: dict[str, clock.Run] = {
        "all tokens": lambda: whole.attend(query),
        "tokens left": lambda: dropped.attend(query),
        "tokens left, and a window": lambda: dropped.attend(query, mask=window),
        "never had more": lambda: short.attend(query),
        "SDPA, all tokens": lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "SDPA on gathered keys": lambda: scaled_dot_product_attention(query, *left, enable_gqa=True),
    }
    dropping: dict[str, clock.Run] = {
        "keep": lambda: filled(key, value).keep(chosen),
        "the cache without it": lambda: filled(key, value),
        "gather": lambda: (key.gather(2, places), value.gather(2, places)),
    }
    return attending, dropping


def measured(case: Case, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case._asdict(), "dtype": str(dtype).removeprefix("torch.")}
    with torch.inference_mode():
        for kind, ways in zip(("attending", "dropping"), lineup(case, dtype), strict=True):
            for run in ways.values():
                run()
            times = clock.measure(ways, {}, rounds, 15.0)
            row[kind] = {way: times.summary(way) for way in times.seconds}
            row[f"{kind}, disturbed"] = times.disturbed
    return row


def print_table(report: dict[str, Any]) -> None:
    grid = Table("dtype", "", "ms", "quartiles", title="One query after dropping", title_justify="left")
    for row in report["results"]:
        for way, ms in (row["attending"] | row["dropping"]).items():
            quartiles = f"{ms['q25_ms']:.3g} to {ms['q75_ms']:.3g}"
            grid.add_row(row["dtype"], way, f"{ms['median_ms']:.3g}", quartiles)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    table.add_delivery(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(Case(), dtype, options.rounds) for dtype in (torch.bfloat16, torch.float32)]
    table.deliver({"machine": clock.machine(), "results": rows}, print_table, options, "dropping")


if __name__ == "__main__":
    main()
