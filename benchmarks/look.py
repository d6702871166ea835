"""What a look costs beside the model's own forward: `python benchmarks/look.py [--json]`.

The model is GPT-2's size (12 layers of 12 heads, d_model 768), random float32 weights, positions for every length. The
base is its forward with "sdpa", logits of the last token alone, as the look makes them. Beside it stand `look.at` with
every default role, and, to 2,048 tokens, what other tools do first: all attention matrices by "eager" with
`output_attentions`. `--memory` prints what each adds at its peak, counted in a process of its own.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import headwise.hf  # noqa: F401  registers attn_implementation="headwise"
from headwise import look

try:
    from benchmarks import clock, table
except ImportError:  # run as a script: this folder is on the path, its parent is not
    import clock  # type: ignore[import-not-found,no-redef]
    import table  # type: ignore[import-not-found,no-redef]

LENGTHS = (128, 512, 2048, 8192)
LONG = (16384, 65536)  # memory alone
EAGER_LONGEST = 2048
LAYERS, HEADS, WIDTH = 12, 12, 768


def model_of(longest: int, layers: int = LAYERS) -> GPT2LMHeadModel:
    """Random weights."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_head=HEADS, n_embd=WIDTH, n_positions=longest)
    return GPT2LMHeadModel(config).eval()


def ways_at(model: GPT2LMHeadModel, length: int) -> dict[str, Callable[[], Any]]:
    """The forward, the look, and the matrices where they fit."""
    ids = torch.randint(50000, (1, length), generator=torch.Generator().manual_seed(1))

    def forward(implementation: str, **options: Any) -> Any:
        model.config._attn_implementation = implementation  # what set_attn_implementation does, without its checks
        with torch.no_grad():
            return model(ids, use_cache=False, logits_to_keep=1, **options)

    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: forward("sdpa"),
        "look": lambda: look.at(model, ids),
    }
    if length <= EAGER_LONGEST:
        ways["eager"] = lambda: forward("eager", output_attentions=True)
    return ways


def measured(lengths: Sequence[int] = LENGTHS, rounds: int = 5) -> dict[str, Any]:
    """The machine, and a row for each length."""
    model = model_of(max(lengths))
    rows = []
    for length in lengths:
        ways = ways_at(model, length)
        for way in ways.values():
            way()
        times = clock.measure(ways, {}, rounds, seconds=60.0)
        rows.append(
            {
                "length": length,
                "ratios": {name: times.ratio(name, "forward") for name in ways},
                "ways": {name: times.summary(name) for name in ways},
                "disturbed": times.disturbed,
            }
        )
    return {"machine": clock.machine(), "results": rows}


def peak(way: str, length: int) -> int:
    """MiB that a way adds to the process at its peak; of one layer, for layers free what they took."""
    model = model_of(length, layers=1)
    ways = ways_at(model, length)
    if way == "look":
        look.at(model, [1, 2, 3])  # libraries loaded
    else:
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ways[way]()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


def memory(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each length, each number by a fresh process."""
    rows = []
    for length in lengths:
        row: dict[str, Any] = {"length": length}
        for way in ("forward", "look", *(["eager"] if length <= EAGER_LONGEST else [])):
            command = [sys.executable, __file__, "--peak", way, str(length)]
            row[way] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(row)
    return rows


def print_table(report: dict[str, Any]) -> None:
    title = f"{LAYERS} x {HEADS} heads, d_model {WIDTH}, float32, {report['machine']['threads']} threads"
    if "results" in report:
        grid = Table("tokens", "forward, ms", "look, ms", "look / forward", "eager / forward", title=title)
        for row in report["results"]:
            times = [f"{row['ways'][name]['median_ms']:.0f}" for name in ("forward", "look")]
            eager = f"{row['ratios']['eager']:.2f}" if "eager" in row["ratios"] else "-"
            mark = "~" if row["disturbed"] else ""
            grid.add_row(f"{row['length']}{mark}", *times, f"{row['ratios']['look']:.2f}", eager)
        table.console().print(grid)
    if "memory" in report:
        grid = Table("tokens", "forward", "look", "eager", title="MiB added at the peak, one layer")
        for row in report["memory"]:
            grid.add_row(*(str(row.get(name, "-")) for name in ("length", "forward", "look", "eager")))
        table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--memory", action="store_true", help="memory, not time")
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "LENGTH"), help=argparse.SUPPRESS)
    table.add_delivery(parser)
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak[0], int(options.peak[1])))
        return
    if options.memory:
        report = {"machine": clock.machine(), "memory": memory((*LENGTHS, *LONG))}
    else:
        report = measured(options.length, options.rounds)
    table.deliver(report, print_table, options, "look")


if __name__ == "__main__":
    main()
