"""What a call costs before anything is computed: microseconds on tensors of a few numbers, headwise beside torch.

And a layer's decode step at 512 tokens: in one call, by rotation, append and attention one after another, and what of
it is matrix products and the kernel. python benchmarks/overhead.py [--json]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

import headwise
from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

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


TOKENS = 512


def layers() -> dict[str, dict[str, Callable[[], Any]]]:
    """Layer and cache -> way -> a decode step at 512 tokens, which is taken back."""
    mha = headwise.MultiHeadAttention(512, 8, num_kv_heads=2, head_dim=64, rotary=headwise.nn.Rotary(64)).eval()
    mla = headwise.LatentAttention(512, 8, kv_lora_rank=128, nope_dim=32, rope_dim=32, value_dim=32).eval()
    x = torch.randn(1, 1, 512)
    calls: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, layer, sizes in (
        ("multi-head", mha, {"num_kv_heads": 2, "head_dim": 64}),
        ("latent", mla, {"num_kv_heads": 1, "head_dim": 160, "value_dim": 128, "shared": True}),
    ):
        for kind, cache in _caches(sizes).items():
            calls[f"step, {name}, {kind}"] = _steps(layer, x, cache)
    return calls


def _caches(sizes: dict[str, Any]) -> dict[str, Any]:
    """Caches of one row with room for the tokens and a step."""
    return {
        "static": StaticCache(1, **sizes, capacity=TOKENS + 8),
        "paged": PagedCache(PagePool(TOKENS // 128 + 1, **sizes), 1),
        "rolling": RollingCache(1, **sizes, window=TOKENS),
        "static int8": StaticCache(1, **sizes, capacity=TOKENS + 8, dtype=torch.int8),
    }


def _steps(layer: Any, x: torch.Tensor, cache: Any) -> dict[str, Callable[[], Any]]:
    """A step in one call; in several; and of its attention alone with the matrices around it."""
    with torch.no_grad():
        for prompt in torch.randn(1, TOKENS, x.shape[2]).split(128, dim=1):
            layer(prompt, cache=cache)
    query = torch.randn(1, layer.num_heads, 1, cache.head_dim)
    linears = [part for part in layer.modules() if isinstance(part, torch.nn.Linear)]
    inputs = [torch.randn(1, 1, part.in_features) for part in linears]

    def once() -> None:
        layer(x, cache=cache)
        cache.truncate(TOKENS)

    other = copy.deepcopy(cache)
    other.takes_steps = lambda *_: False

    def apart() -> None:
        layer(x, cache=other)
        other.truncate(TOKENS)

    def computing() -> None:
        for part, row in zip(linears, inputs, strict=True):
            part(row)
        headwise.attention(query, cache)

    return {"in one call": once, "in several": apart, "linears and attention": computing}


def measured(rounds: int = 15, calls: int = 2000) -> dict[str, dict[str, float]]:
    """Microseconds a call: the median of rounds of so many calls, ways in turns, on one thread."""
    results = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking a second thread is not part of the overhead
    with torch.no_grad():
        small = kinds()
        for kind, ways in (small | layers()).items():
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, run in ways.items():
                    run()
                    start = time.perf_counter()
                    some = calls if kind in small else -(-calls // 20)
                    for _ in range(some):
                        run()
                    times[name].append(1e6 * (time.perf_counter() - start) / some)
            results[kind] = {name: statistics.median(values) for name, values in times.items()}
    torch.set_num_threads(threads)
    return results


def print_table(report: dict[str, Any]) -> None:
    grid = Table(title="Overhead of a call, microseconds", title_justify="left")
    ways = ("headwise", "torch", "the bare op", "in one call", "in several", "linears and attention")
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
