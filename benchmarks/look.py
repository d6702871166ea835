"""What a look costs beside the model's own forward: `python benchmarks/look.py [--json]`.

The model is GPT-2's size (12 layers of 12 heads, d_model 768), random float32 weights, positions for every length. The
base is its forward with "sdpa", logits of the last token alone, as the look makes them. Beside it stand the same with
attn_implementation="headwise", `look.at` with every default role, and, to 2,048 tokens, what other tools do first: all
attention matrices by "eager" with `output_attentions`. `look_peers.py` has those tools.

`--memory` prints what each adds at its peak, counted in a process of its own, of one layer: layers free what they took.
`--layers 2 --heads 4 --length 8192 16384 32768 65536` are other sizes. The last line tells what a further token adds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import headwise.hf  # noqa: F401  registers attn_implementation="headwise"
from headwise import look

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

LENGTHS = (128, 512, 2048, 8192)
LONG = (16384, 65536)  # memory alone
EAGER_LONGEST = 2048
LAYERS, HEADS, HEAD_DIM = 12, 12, 64


def model_of(longest: int, layers: int = LAYERS, heads: int = HEADS) -> GPT2LMHeadModel:
    """Random weights."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_head=heads, n_embd=heads * HEAD_DIM, n_positions=longest)
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
        "own": lambda: forward("headwise"),
        "look": lambda: look.at(model, ids),
    }
    if length <= EAGER_LONGEST:
        ways["eager"] = lambda: forward("eager", output_attentions=True)
    return ways


def measured(lengths: Sequence[int], rounds: int, layers: int, heads: int) -> list[dict[str, Any]]:
    """A row for each length."""
    model = model_of(max(lengths), layers, heads)
    rows = []
    for length in lengths:
        ways = ways_at(model, length)
        for name, way in ways.items():
            if name == "look" or length <= EAGER_LONGEST:  # it has the most memory; the others are of its kind
                way()
        times = clock.measure(ways, {}, rounds, seconds=60.0)
        rows.append(
            {
                "length": length,
                "ratios": {name: times.ratio(name, "forward") for name in ways},
                "look / own": times.ratio("look", "own"),
                "ways": {name: times.summary(name) for name in ways},
                "disturbed": times.disturbed,
            }
        )
    return rows


class Peak:
    """MiB that this process has had at its peak since this was made, beyond what it had then."""

    def __init__(self) -> None:
        self.before = self._status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the system counts the peak anew

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    def added(self) -> int:
        return (self._status("VmHWM") - self.before) // 1024


def peak(way: str, length: int, layers: int, heads: int) -> int:
    """MiB that a way adds to the process at its peak."""
    model = model_of(length, layers, heads)
    ways = ways_at(model, length)
    if way == "look":
        look.at(model, [1, 2, 3])  # libraries loaded
    else:
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]))
    memory = Peak()
    ways[way]()
    return memory.added()


def memory(lengths: Sequence[int], layers: int, heads: int) -> list[dict[str, Any]]:
    """A row for each length, each number by a fresh process."""
    rows = []
    for length in lengths:
        row: dict[str, Any] = {"length": length}
        for way in ("own", "look", *(["eager"] if length <= EAGER_LONGEST else [])):
            command = [sys.executable, __file__, "--peak", way, "--length", str(length)]
            sizes = ["--layers", str(layers), "--heads", str(heads)]
            row[way] = int(subprocess.run([*command, *sizes], check=True, capture_output=True, text=True).stdout)
        rows.append({**row, "more": row["look"] - row["own"]})
    return rows


def print_table(report: dict[str, Any]) -> None:
    title = "{layers} layer(s) of {heads} heads of 64, float32, {threads} threads".format(
        **report, threads=report["machine"]["threads"]
    )
    if "results" in report:
        grid = Table(
            "tokens", "forward, ms", "own, ms", "look, ms", "look / forward", "look / own", "eager", title=title
        )
        for row in report["results"]:
            times = [f"{row['ways'][name]['median_ms']:.0f}" for name in ("forward", "own", "look")]
            eager = f"{row['ratios']['eager']:.2f}" if "eager" in row["ratios"] else "-"
            mark = "~" if row["disturbed"] else ""
            ratios = [f"{row['ratios']['look']:.2f}", f"{row['look / own']:.2f}", eager]
            grid.add_row(f"{row['length']}{mark}", *times, *ratios)
        table.console().print(grid)
    if "memory" in report:
        names = ("length", "own", "look", "more", "eager")
        grid = Table("tokens", *names[1:], title=f"MiB added at the peak: {title}")
        for row in report["memory"]:
            grid.add_row(*(str(row.get(name, "-")) for name in names))
        table.console().print(grid)
        first, last = report["memory"][0], report["memory"][-1]
        if last["length"] > first["length"]:
            slope = (last["more"] - first["more"]) * 2**20 / (last["length"] - first["length"])
            table.console().print(f"look beyond the forward: {slope:.0f} bytes a token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, nargs="+")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--memory", action="store_true", help="memory, not time")
    parser.add_argument("--peak", metavar="WAY", help=argparse.SUPPRESS)
    table.add_delivery(parser)
    options = parser.parse_args()
    layers = options.layers or (1 if options.memory else LAYERS)
    lengths = options.length or ((*LENGTHS, *LONG) if options.memory else LENGTHS)
    if options.peak:
        print(peak(options.peak, lengths[0], layers, options.heads))
        return
    report: dict[str, Any] = {"machine": clock.machine(), "layers": layers, "heads": options.heads}
    if options.memory:
        report["memory"] = memory(lengths, layers, options.heads)
    else:
        report["results"] = measured(lengths, options.rounds, layers, options.heads)
    table.deliver(report, print_table, options, "look")


if __name__ == "__main__":
    main()
