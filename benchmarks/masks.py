"""What masks of rules cost: the rows of `docs/masks.md`, each a ratio of two things timed in turns in one run.

    python benchmarks/masks.py [--rounds 7] [--heads 32] [--length 8192] [--json]

1. `causal() | prefix(n)`: its time beside that of `causal()`, over the pairs of the one beside those of the other. Both
   do the same work a pair, so 1.0 is what the arithmetic needs.
2. `rule(function)` for packed documents, with its map of tiles made beforehand, beside FlexAttention compiled for the
   CPU, with its block mask made beforehand, in float32 and in bfloat16; and the time to make the map, as a part of one
   layer's time in bfloat16.
3. `relative(table)`, as T5 has it, beside no bias: the peak memory of a process that runs it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import headwise
from headwise.ops.masks.tiles import tile_map

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

PREFIX, HEAD_DIM, RADIUS = 2048, 128, 128
MUST = {"prefix": 1.15, "documents": 3.0, "map": 0.25, "relative": 64.0}


def tensors(heads: int, length: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """(1, H, T, D), three times."""
    make = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(1, heads, length, HEAD_DIM, generator=make).to(dtype) for _ in range(3))
    return query, key, value


def documents(length: int) -> Tensor:
    """The number of each token's document; documents have 300 to 1500 tokens."""
    make = torch.Generator().manual_seed(3)
    sizes = torch.randint(300, 1500, (length // 300 + 1,), generator=make)
    return torch.repeat_interleave(torch.arange(len(sizes)), sizes)[:length]


def prefix(heads: int, length: int, rounds: int) -> dict[str, Any]:
    q, k, v = tensors(heads, length)
    n = length // (8192 // PREFIX)
    causal, both = headwise.causal(), headwise.causal() | headwise.prefix(n)
    pairs = 1 + n * (n - 1) / 2 / (length * (length + 1) / 2)
    ways = {
        "causal": lambda: headwise.attention(q, k, v, mask=causal),
        "prefix": lambda: headwise.attention(q, k, v, mask=both),
    }
    times = timed(ways, rounds)
    return {**summaries(times), "pairs": pairs, "ratio": times.ratio("prefix", "causal") / pairs}


def packed(heads: int, length: int, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    q, k, v = tensors(heads, length, dtype)
    ids = documents(length)

    def document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ids[i] == ids[j]) & (j <= i)

    mask, block_mask = headwise.rule(document), create_block_mask(document, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)
    [rule] = mask.sized(1, heads).parts

    def make() -> Any:
        rule.__dict__.pop("_maps", None)
        return tile_map(rule, length, length)

    ways = {
        "headwise": lambda: headwise.attention(q, k, v, mask=mask),
        "flex": lambda: compiled(q, k, v, block_mask=block_mask),
        "map": make,
    }
    off = float((ways["headwise"]().float() - ways["flex"]().float()).norm() / ways["flex"]().float().norm())
    times = timed(ways, rounds)
    return {
        **summaries(times),
        "off": off,
        "ratio": times.ratio("flex", "headwise"),
        "map": times.ratio("map", "headwise"),
    }


def relative(heads: int, length: int) -> dict[str, Any]:
    """MiB at the peak of a process each: without a bias, with a table, and with the same bias as a T x S tensor."""
    peaks = {}
    for kind in ("none", "relative", "dense"):
        line = [sys.executable, __file__, "--peak", kind, "--heads", str(heads), "--length", str(length)]
        peaks[kind] = float(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
    return {"MiB": peaks, "more": peaks["relative"] - peaks["none"], "dense": peaks["dense"] - peaks["none"]}


def peak(kind: str, heads: int, length: int) -> float:
    """MiB at the peak of this process, one call of attention in it."""
    q, k, v = tensors(heads, length)
    learned = headwise.relative(torch.randn(heads, 2 * RADIUS + 1, generator=torch.Generator().manual_seed(5)))
    mask = None if kind == "none" else learned if kind == "relative" else learned.dense(length, length).bfloat16()
    headwise.attention(q, k, v, mask=mask)
    lines = Path("/proc/self/status").read_text().splitlines()  # ru_maxrss would be the parent's, where that is more
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def timed(ways: dict[str, clock.Run], rounds: int) -> clock.Rounds:
    for run in ways.values():
        run()
    return clock.measure(ways, {}, rounds, 120.0)


def summaries(times: clock.Rounds) -> dict[str, Any]:
    return {"ms": {way: times.summary(way) for way in times.seconds}, "disturbed": times.disturbed}


def print_table(report: dict[str, Any]) -> None:
    rows = report["results"]
    grid = Table(title="Masks of rules", title_justify="left")
    for name in ("what", "measured", "must be"):
        grid.add_column(name)
    prefixed, memory = rows["prefix"]["ratio"], rows["relative"]
    in_float32, in_bfloat16 = rows["documents, float32"], rows["documents, bfloat16"]
    most, least = {name: f"<= {value:g}" for name, value in MUST.items()}, f">= {MUST['documents']:g}"
    grid.add_row("causal() | prefix(n), over its arithmetic at causal()'s rate", f"{prefixed:.2f}", most["prefix"])
    grid.add_row("rule(documents), FlexAttention compiled over headwise, float32", f"{in_float32['ratio']:.1f}", least)
    grid.add_row("the same in bfloat16", f"{in_bfloat16['ratio']:.1f}", least)
    grid.add_row("making its map, part of one layer's time", f"{in_bfloat16['map']:.2f}", most["map"])
    grid.add_row("relative(table): MiB more than no bias", f"{memory['more']:.0f}", most["relative"])
    grid.add_row("the same bias as a tensor: MiB more", f"{memory['dense']:.0f}", "")
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    table.add_delivery(parser)
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak, options.heads, options.length))
        return
    with torch.no_grad():
        results = {
            "prefix": prefix(options.heads, options.length, options.rounds),
            "documents, float32": packed(options.heads, options.length, options.rounds, torch.float32),
            "documents, bfloat16": packed(options.heads, options.length, options.rounds, torch.bfloat16),
            "relative": relative(8, options.length // 2),
        }
    table.deliver({"machine": clock.machine(), "must": MUST, "results": results}, print_table, options, "masks")


if __name__ == "__main__":
    main()
