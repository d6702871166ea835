"""Training the packaged model with each attention: tokens a second, and whether the losses agree.

    python benchmarks/train.py [--rounds 5] [--curves runs/eager runs/sdpa runs/headwise ...] [--json]

A step is forward, loss, backward, clipping and optimizers, as `scripts/train_tiny.py` takes it; the attentions take
turns. The curves are of runs made with that script; the others are compared with the first of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: the scripts are beside this folder

from benchmarks import clock, table
from scripts.tiny_data import VOCAB_SIZE
from scripts.train_tiny import ATTENTIONS, new_model, new_optimizers

CONTEXTS = ((4, 512), (1, 4096))  # rows and tokens of each
SMOOTHED = 50  # steps


def step_of(model: Any, ids: torch.Tensor, half: bool) -> Callable[[], torch.Tensor]:
    """A whole training step on these ids; returns its loss."""
    optimizers = new_optimizers(model, lr=1e-5, muon=True)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def speed(rows: int, length: int, half: bool, rounds: int, seconds: float = 60.0) -> dict[str, Any]:
    """Tokens a second of each attention, in turns; equal losses of the first step show that all do the same."""
    ids = torch.randint(2, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(1))
    steps = {name: step_of(new_model(0, name, length).train(), ids, half) for name in ATTENTIONS}
    losses = {name: float(step()) for name, step in steps.items()}
    times = clock.measure(steps, {}, rounds, seconds)
    return {
        "case": f"{rows} x {length} tokens, {'bfloat16 autocast' if half else 'float32'}",
        "tokens_per_second": {name: rows * length / times.median(name) for name in steps},
        "ratios": {name: times.ratio(name, "headwise") for name in steps},
        "ways": {name: times.summary(name) for name in steps},
        "first_losses": losses,
        "disturbed": times.disturbed,
    }


def curve(folder: Path, base: Sequence[float]) -> dict[str, Any]:
    """A run's losses, and how far they are from the first run's."""
    run = json.loads((folder / "losses.json").read_text())
    losses, apart = run["losses"], [x - y for x, y in zip(run["losses"], base, strict=False)]
    record = folder / "model" / "loss_curve.json"
    return {
        "run": folder.name,
        "settings": run["settings"],
        "losses": losses,
        "last": statistics.mean(losses[-SMOOTHED:]),
        "held_out": json.loads(record.read_text())["final"]["held_out_loss"] if record.exists() else None,
        "difference_rms": statistics.mean(x * x for x in apart) ** 0.5,
        "difference_mean": statistics.mean(apart),
        "difference_most": max(abs(x) for x in apart),
    }


def measured(
    contexts: Sequence[tuple[int, int]] = CONTEXTS, folders: Sequence[Path] = (), rounds: int = 5
) -> dict[str, Any]:
    """The machine, a row for each context and dtype, and the curves."""
    results = [speed(*context, half, rounds) for context in contexts for half in (True, False)]
    base = json.loads((folders[0] / "losses.json").read_text())["losses"] if folders else []
    return {"machine": clock.machine(), "results": results, "curves": [curve(folder, base) for folder in folders]}


def print_table(report: dict[str, Any]) -> None:
    grid = Table(title="Training the packaged model, tokens a second", title_justify="left")
    for name in ("case", *ATTENTIONS, "against sdpa", "against eager"):
        grid.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for row in report["results"]:
        rates = [f"{row['tokens_per_second'][name]:.0f}" for name in ATTENTIONS]
        ratios = [f"{row['ratios'][name]:.2f}x" for name in ("sdpa", "eager")]
        grid.add_row(row["case"] + ("~" if row["disturbed"] else ""), *rates, *ratios)
    table.console().print(grid)
    if not report["curves"]:
        return
    first = report["curves"][0]
    grid = Table(title=f"Loss of {len(first['losses'])} steps, and its distance from {first['run']}'s")
    for name in ("run", f"mean of the last {SMOOTHED}", "held-out", "distance, rms", "mean", "largest"):
        grid.add_column(name, justify="left" if name == "run" else "right")
    for one in report["curves"]:
        apart = (f"{one[f'difference_{name}']:.4f}" for name in ("rms", "mean", "most"))
        grid.add_row(one["run"], f"{one['last']:.4f}", f"{one['held_out']}", *apart)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--curves", type=Path, nargs="*", default=[], help="folders of runs of scripts/train_tiny.py")
    table.add_delivery(parser)
    options = parser.parse_args()
    table.deliver(measured(folders=options.curves, rounds=options.rounds), print_table, options, "training")


if __name__ == "__main__":
    main()
