"""What a call costs before anything is computed: microseconds on tensors of a few numbers, headwise beside torch.

python benchmarks/overhead.py [--json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

import headwise

try:
    from benchmarks import clock, table
except ImportError:  # run as a script: this folder is on the path, its parent is not
    import clock  # type: ignore[import-not-found,no-redef]
    import table  # type: ignore[import-not-found,no-redef]

NO_LIMIT = 2**40


def kinds() -> dict[str, dict[str, Callable[[], Any]]]:
    """Kind of call -> way -> call; the bare op where the native library is there."""
    q, k, v = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16)
    x = torch.randn(1, 2, 2, 16)
    grouped = torch.randn(1, 4, 1, 16)
    causal = headwise.causal()
    headwise.attention(q, k, v)  # loads the native library, where there is one
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "full": {
            "headwise": lambda: headwise.attention(q, k, v),
            "torch": lambda: scaled_dot_product_attention(q, k, v),
        },
        "causal": {
            "headwise": lambda: headwise.attention(x, k, v, mask=causal),
            "torch": lambda: scaled_dot_product_attention(x, k, v, is_causal=True),
        },
        "causal, mask made in the call": {
            "headwise": lambda: headwise.attention(x, k, v, mask=headwise.causal()),
            "torch": lambda: scaled_dot_product_attention(x, k, v, is_causal=True),
        },
        "grouped": {
            "headwise": lambda: headwise.attention(grouped, k, v),
            "torch": lambda: scaled_dot_product_attention(grouped, k, v, enable_gqa=True),
        },
    }
    attend = getattr(getattr(torch.ops, "headwise", None), "attend", None)
    if attend is not None:
        op = attend.default
        calls["full"]["the bare op"] = lambda: op(q, k, v, 0.25, -NO_LIMIT, NO_LIMIT)
    return calls


def measured(rounds: int = 15, calls: int = 2000) -> dict[str, dict[str, float]]:
    """Microseconds a call: the median of rounds of so many calls, ways in turns, on one thread."""
    results = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking a second thread is not part of the overhead
    with torch.no_grad():
        for kind, ways in kinds().items():
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, run in ways.items():
                    run()
                    start = time.perf_counter()
                    for _ in range(calls):
                        run()
                    times[name].append(1e6 * (time.perf_counter() - start) / calls)
            results[kind] = {name: statistics.median(values) for name, values in times.items()}
    torch.set_num_threads(threads)
    return results


def print_table(report: dict[str, Any]) -> None:
    grid = Table(title="Overhead of a call, microseconds", title_justify="left")
    ways = ("headwise", "torch", "the bare op")
    grid.add_column("call")
    for name in ways:
        grid.add_column(name, justify="right")
    for kind, medians in report["results"].items():
        grid.add_row(kind, *(f"{medians[name]:.2f}" if name in medians else "" for name in ways))
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    table.add_delivery(parser)
    options = parser.parse_args()
    results = measured()
    table.deliver({"machine": clock.machine(), "results": results}, print_table, options, "overhead")


if __name__ == "__main__":
    main()
