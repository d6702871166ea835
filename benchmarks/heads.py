"""How many heads: one small model a row, trained with 1 to 64 heads at equal parameters, data and first weights.

    python benchmarks/heads.py --run runs/heads [--heads 1 8 64] [--seeds 0 1] [--jobs 2] [--finished] [--json]

Each run is `scripts/train_tiny.py` in a folder of its own. It goes on where it was stopped; a finished one is not made
again. `docs/how-many-heads.md` says what came out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: the scripts are beside this folder

from benchmarks import clock, table
from scripts import tiny_data

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tiny.py"
WIDTH = 256
HEADS = (8, 1, 64, 2, 32, 4, 16)
DATA = ("tokenizer.json", "streams.pt")
Row = dict[str, Any]


def finished(run: Path, steps: int) -> Row | None:
    """The row of a run, once it has taken all its steps."""
    written = run / "model" / "loss_curve.json"
    record = json.loads(written.read_text()) if written.exists() else None
    return row_of(record) if record is not None and record["final"]["step"] == steps else None


def train(run: Path, heads: int, seed: int, settings: Sequence[str]) -> None:
    """Make a run, or what is left of it."""
    run.mkdir(parents=True, exist_ok=True)
    for name in DATA:
        if not (run / name).exists():
            shutil.copy(run.parent / name, run / name)
    chosen = ["--heads", str(heads), "--seed", str(seed), *settings]
    with (run / "log.txt").open("a") as log:
        command = [sys.executable, str(SCRIPT), "--run", str(run), "--out", str(run / "model"), *chosen]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def row_of(record: dict[str, Any]) -> Row:
    """What is kept of a run: its settings, its losses, the best head of each role."""
    settings, final = record["settings"], record["final"]
    best = {role: max(max(layer) for layer in layers) for role, layers in final["heads"].items()}
    return {
        "heads": settings["heads"],
        "head_dim": WIDTH // settings["heads"],
        "seed": settings["seed"],
        "held_out_loss": final["held_out_loss"],
        "held_out_tokens": final["held_out_tokens"],
        "tokens": record["tokens"],
        "best": best,
        "settings": settings,
        "curve": record["curve"],
    }


def by_heads(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Rows by number of heads, in order; those of one number by seed."""
    ordered = sorted(rows, key=lambda row: (row["heads"], row["seed"]))
    return {heads: [row for row in ordered if row["heads"] == heads] for heads in sorted({r["heads"] for r in rows})}


def print_table(report: dict[str, Any]) -> None:
    grid = Table(
        "heads", "d_k", "held-out loss", "mean", "previous token", "induction", title="Models by heads a layer"
    )
    for heads, rows in by_heads(report["results"]).items():
        losses = [row["held_out_loss"] for row in rows]
        best = [" ".join(f"{row['best'][role]:.2f}" for row in rows) for role in ("previous", "induction")]
        each = " ".join(f"{loss:.3f}" for loss in losses)
        grid.add_row(str(heads), str(WIDTH // heads), each, f"{statistics.mean(losses):.3f}", *best)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/heads"), help="folder of the runs")
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=256, help="tokens of every sequence")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--finished", action="store_true", help="make no run; the rows of those that are finished")
    table.add_delivery(parser)
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    tiny_data.load_data(options.run)
    settings = ["--measure-every", str(max(options.steps // 5, 1))]
    for name in ("steps", "batch_tokens", "context"):
        settings += [f"--{name.replace('_', '-')}", str(getattr(options, name))]

    def make(job: tuple[int, int]) -> Row | None:
        seed, heads = job
        run = options.run / f"{heads}-heads-seed-{seed}"
        if not options.finished and finished(run, options.steps) is None:
            train(run, heads, seed, settings)
        return finished(run, options.steps)

    with ThreadPoolExecutor(options.jobs) as pool:
        made = list(pool.map(make, [(seed, heads) for seed in options.seeds for heads in options.heads]))
    rows = [row for some in by_heads([row for row in made if row is not None]).values() for row in some]
    report = {"machine": clock.machine(), "results": rows}
    table.deliver(report, print_table, options, "heads")


if __name__ == "__main__":
    main()
