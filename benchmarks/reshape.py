"""What the packaged model loses when its heads are reshaped, and what reconstruction and distillation win back.

    python benchmarks/reshape.py [--only regroup distill prune choices] [--distill 150] [--json] [--out FILE]
    python benchmarks/reshape.py --model runs/encoder --only prune
    python benchmarks/reshape.py --draw RESULTS.json ... --figures docs/images

Losses are nats a token on 24 windows of 512 tokens of library modules that the model was never trained on. Calibration
text is of the modules that it was trained on. An encoder (``scripts/train_encoder.py``) has losses a masked word, on
windows of 128 tokens; it is pruned in memory, for BERT's config cannot count fewer heads of the same size. Results are
written as they come, so that a run that is stopped leaves what it has.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: the scripts are beside this folder

from benchmarks import clock, table
from headwise import hf, look, reshape
from headwise.models import tiny_path
from headwise.reshape import Projections
from headwise.reshape.regrouping.regrouped_checkpoint import Regrouping, plan_regroup
from headwise.reshape.repair.calibration import family_in_memory, loss_of, projections_of
from headwise.reshape.repair.distill import DistillConfig, distill
from headwise.reshape.repair.reconstruct_modules import reconstruct_modules
from scripts import tiny_data, train_encoder

KV_HEADS = (4, 2, 1)
METHODS = ("fitted", "aligned", "mean", "first")
KEEP = (7, 6, 5, 4, 3)  # of 8 heads a layer
CRITERIA = ("gradient", "zero", "contribution", "redundancy")
SECTIONS = ("regroup", "distill", "prune", "choices")
BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
COLOURS = ("#b51d14", "#4053d3", "#00b25d", "#ddb310", "#00beff")
HELD, CALIBRATION, LENGTH = 24, 64, 512
ALONE = 8
"""Rows of the calibration that heads are ranked on."""
VALUE_STEPS = 12
DISTILLED = ((4, "fitted", True), (1, "fitted", True), (4, "mean", False), (1, "mean", False))


class Text:
    """The streams, and windows of them, for a decoder."""

    mask_id: int | None = None

    def __init__(self, model: Path, files: int = 60) -> None:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        tokenizer.no_truncation()
        training, held_out = tiny_data.stdlib_files()
        self.training = tiny_data.encode(tokenizer, tiny_data.read(training[:: max(1, len(training) // files)]))
        self.take(tiny_data.encode(tokenizer, tiny_data.read(held_out)))

    def take(self, tokens: torch.Tensor) -> None:
        """Windows to measure on, to fit to, and to rank heads on."""
        self.rows = tiny_data.text_rows(tokens, HELD, LENGTH)
        self.calibration = list(tiny_data.text_rows(self.training, CALIBRATION, LENGTH).split(2))
        self.ranked = torch.cat(self.calibration)[:ALONE]
        self.held_tokens, self.calibration_tokens = HELD * (LENGTH - 1), CALIBRATION * LENGTH

    def loss(self, model: Any) -> float:
        """Nats a token that was never trained on."""
        loss = loss_of(model, list(self.rows.split(2)))
        assert loss is not None
        return loss


class Words(Text):
    """The same for an encoder: words are hidden in all of them but those that heads are ranked on."""

    mask_id = train_encoder.MASK_ID

    def take(self, tokens: torch.Tensor) -> None:
        width = train_encoder.LENGTH
        rows = HELD * LENGTH // width
        self.words = train_encoder.held_out(tokens, rows)
        some = CALIBRATION * LENGTH // width
        ids, read, _ = train_encoder.held_out(self.training, some)
        self.calibration, self.ranked = list(read.split(min(8, some // 2))), ids[:: max(1, some // ALONE // 4)]
        self.held_tokens, self.calibration_tokens = int(self.words[2].sum()), read.numel()

    def loss(self, model: Any) -> float:
        return train_encoder.masked_loss(model, *self.words)


class Bench:
    """The model, its checkpoint, and the report that grows."""

    def __init__(self, source: hf.Checkpoint, loaded: Any, text: Text, keep: Callable[[dict[str, Any]], None]) -> None:
        self.source, self.text, self.keep = source, text, keep
        self.model = loaded.model
        self.report: dict[str, Any] = {
            "machine": clock.machine(),
            "model": about(source.folder),
            "held_out_tokens": text.held_tokens,
            "calibration_tokens": text.calibration_tokens,
            "original": self.loss(self.model),
            "seconds": {},
        }

    def loss(self, model: Any) -> float:
        return round(self.text.loss(model), 4)

    def built(self, plan: Any) -> Any:
        """The model that a plan describes."""
        return self.source.build(plan.target.config, {one.name: one.make().float() for one in plan.tensors()})

    def add(self, section: str, row: dict[str, Any]) -> None:
        self.report.setdefault(section, []).append(row)
        self.keep(self.report)

    def plan(self, kv_heads: int, method: Any, rows: Any, **more: Any) -> Regrouping:
        return plan_regroup(self.source, kv_heads, method=method, model=self.model, rows=rows, **more)

    def regroup(self, kv_heads: int, method: str, values: bool) -> None:
        """One row: the loss after regrouping, after solving W_O, and after solving the values too."""
        plan = self.plan(kv_heads, method, self.text.calibration)
        row: dict[str, Any] = {"kv_heads": kv_heads, "method": method, "loss": self.loss(self.built(plan))}
        row["W_O"] = self.recovered(self.built(plan), value_steps=0)
        if values:
            row["W_O and V"] = self.recovered(self.built(plan), value_steps=VALUE_STEPS)
        self.add("regroup", row)

    def choices(self, kv_heads: int, method: str) -> None:
        """One row: neighbours share; weights alone tell which do; W_O solved on the changed model's own inputs."""
        near = {str(n): neighbours_of(kv_heads) for n in range(self.model.config.num_hidden_layers)}
        row: dict[str, Any] = {"kv_heads": kv_heads, "method": method}
        row["neighbours"] = self.loss(self.built(self.plan(kv_heads, method, self.text.calibration, groups=near)))
        row["no text"] = self.loss(self.built(self.plan(kv_heads, method, ())))
        plan = self.plan(kv_heads, method, self.text.calibration)
        row["W_O, own inputs"] = self.recovered(self.built(plan), value_steps=0, inputs="own")
        self.add("choices", row)

    def recovered(self, changed: Any, **options: Any) -> float:
        """The loss after solving anew."""
        if self.text.mask_id is None:
            layers = projections_of(family_in_memory(changed, hf.layouts()))
        else:  # the sizes of its heads are not in its config any more; no value is solved, so none is needed
            known = projections_of(family_in_memory(self.model, hf.layouts()))
            layers = {name: Projections(where.output) for name, where in known.items()}
        reconstruct_modules(changed, self.model, self.text.calibration, layers, call=call, **options)
        return self.loss(changed)

    def distill(self, kv_heads: int, method: str, recovered: bool, steps: int, lr: float) -> None:
        """Regrouped, reconstructed or not, then distilled for so many steps of 4,096 tokens, as a training step has."""
        plan = self.plan(kv_heads, method, self.text.calibration)
        student = self.built(plan)
        if recovered:
            self.recovered(student, value_steps=0)
        row = {"kv_heads": kv_heads, "method": method, "recovered": recovered, "steps": steps, "lr": lr}
        row["before"] = self.loss(student)
        config = DistillConfig(steps, rows=8, length=LENGTH, lr=lr, warmup=max(1, steps // 10))
        curve = distill(student, self.model, self.text.training, config, first=tiny_data.BOS_ID)
        self.add("distill", row | {"after": self.loss(student), "curve": curve.steps})

    def prune(self) -> None:
        """Fewer and fewer heads by each criterion, before and after W_O is solved anew."""
        scores = self.scores()
        for keep in KEEP:
            row: dict[str, Any] = {"keep": keep}
            for name, some in scores.items():
                plain, solved = [], []
                for one in some:
                    small = self.smaller(keep, one)
                    plain.append(self.loss(small))
                    solved.append(self.recovered(small, value_steps=0))
                row[name] = round(statistics.mean(plain), 4)
                row[f"{name}, W_O"] = round(statistics.mean(solved), 4)
            self.add("prune", row)

    def scores(self) -> dict[str, list[Any]]:
        """What each head is worth, by criterion; of chance three draws."""
        rows = [row.tolist() for row in self.text.ranked]
        measured = [name for name in CRITERIA if name != "redundancy"]
        importance = look.importance(self.model, rows, by=measured, mask_id=self.text.mask_id)
        twins = look.redundancy(self.model, rows[0]).heads
        values = {name: importance.scores(name) for name in measured}
        values["redundancy"] = reshape.by_twins(((t.layer, t.head), t.output, t.output_of) for t in twins)
        self.report["rank correlation"] = [[a.first, a.second, a.rho] for a in importance.agreements]
        scores: dict[str, list[Any]] = {name: [reshape.by_call(values[name])] for name in CRITERIA}
        return scores | {"random": [reshape.random_scores(seed) for seed in range(3)]}

    def smaller(self, keep: int, scores: Any) -> Any:
        """The model with so many heads a layer."""
        if self.text.mask_id is None:
            return self.built(reshape.plan_prune(self.source, keep_fraction=keep / 8, scores=scores))
        plan = reshape.plan_prune(self.source, keep_fraction=keep / 8, scores=scores, zero=True)
        return reshape.prune_module(copy.deepcopy(self.model), plan.gone, layouts=hf.layouts())


def about(folder: Path) -> dict[str, Any]:
    """Which model it is: its kind, and what its record says of its training."""
    config = json.loads((folder / "config.json").read_text())
    record = json.loads((folder / "loss_curve.json").read_text())
    return {"type": config["model_type"], **record.get("settings", {})}


def call(model: Any, ids: torch.Tensor) -> Any:
    return model(input_ids=ids, use_cache=False)


def neighbours_of(kv_heads: int) -> list[list[int]]:
    size = 8 // kv_heads
    return [list(range(first, first + size)) for first in range(0, 8, size)]


def run(bench: Bench, sections: list[str], steps: int) -> None:
    """All rows, the more telling ones first."""
    for section in sections:
        started = time.perf_counter()
        if section == "regroup":
            for kv_heads in KV_HEADS:
                for method in METHODS[:3] if kv_heads < KV_HEADS[0] else METHODS:
                    bench.regroup(kv_heads, method, values=kv_heads == KV_HEADS[0] and method != "first")
        elif section == "choices":
            for method in METHODS[:2]:
                bench.choices(KV_HEADS[0], method)
        elif section == "distill":
            for kv_heads, method, recovered in DISTILLED:
                bench.distill(kv_heads, method, recovered, steps, lr=1e-3)
        else:
            bench.prune()
        bench.report["seconds"][section] = round(time.perf_counter() - started)
        bench.keep(bench.report)


def show(report: dict[str, Any]) -> None:
    """The rows as tables."""
    console = table.console()
    console.print(f"loss of the original: {report['original']}")
    for section in SECTIONS:
        rows = report.get(section, [])
        names = list(dict.fromkeys(name for row in rows for name in row if name != "curve"))
        shown = Table(*names, title=section)
        for row in rows:
            shown.add_row(*(str(row.get(name, "")) for name in names))
        if rows:
            console.print(shown)


def draw(reports: list[dict[str, Any]], folder: Path) -> None:
    """The tables as pictures: loss after pruning, after regrouping, and during distillation."""
    from matplotlib.figure import Figure

    for section, panel in (("prune", draw_prune), ("regroup", draw_regroup), ("distill", draw_distill)):
        for report in reports:
            if section in report:
                figure = Figure(figsize=(8.4, 4.2), layout="constrained")
                axes = figure.subplots()
                panel(axes, report[section])
                kind = "-encoder" if report.get("model", {}).get("type") == "bert" else ""
                if section != "distill":
                    axes.axhline(report["original"], color="#777777", linewidth=1, linestyle=":", label="original")
                    axes.set_ylabel("held-out loss, nats a word" if kind else "held-out loss, nats a token")
                axes.legend(fontsize=8, **({} if section == "distill" else BESIDE))
                figure.savefig(folder / f"reshape-{section}{kind}.png", dpi=110, metadata={"Software": None})


def draw_prune(axes: Any, rows: list[dict[str, Any]]) -> None:
    shares = [100 * (1 - row["keep"] / 8) for row in rows]
    for name, colour in zip(("random", *CRITERIA), COLOURS, strict=True):
        axes.plot(shares, [row[name] for row in rows], color=colour, marker="o", label=name)
        solved = [row[f"{name}, W_O"] for row in rows]
        axes.plot(shares, solved, color=colour, marker="s", linestyle="--", label=f"{name}, W_O solved anew")
    axes.set_xlabel("heads pruned, percent of each layer")


def draw_regroup(axes: Any, rows: list[dict[str, Any]]) -> None:
    for method, colour in zip(METHODS, COLOURS, strict=False):
        mine = [row for row in rows if row["method"] == method]
        places = [str(row["kv_heads"]) for row in mine]
        axes.plot(places, [row["loss"] for row in mine], color=colour, marker="o", label=method)
        solved = [row.get("W_O and V", row["W_O"]) for row in mine]
        axes.plot(places, solved, color=colour, marker="s", linestyle="--", label=f"{method}, recovered")
    axes.set_xlabel("key-value heads, of 8")


def draw_distill(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row, colour in zip(rows, COLOURS, strict=False):
        repaired = ", recovered" if row["recovered"] else ""
        name = f"{row['kv_heads']} key-value heads, {row['method']}{repaired}: loss {row['before']} to {row['after']}"
        axes.plot(range(1, len(row["curve"]) + 1), row["curve"], color=colour, label=name)
    axes.set_xlabel("step of distillation")
    axes.set_ylabel("divergence from the original, nats a token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=tiny_path(), help="its folder; the packaged model by default")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--distill", type=int, metavar="STEPS", help="5 %% of the model's training by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draw", type=Path, nargs="+", help="results to draw; nothing is measured")
    parser.add_argument("--figures", type=Path, default=Path("docs/images"), help="where pictures are written")
    table.add_delivery(parser)
    options = parser.parse_args()
    if options.draw:
        return draw([json.loads(file.read_text()) for file in options.draw], options.figures)
    torch.set_num_threads(options.threads)

    def keep(report: dict[str, Any]) -> None:
        if options.out:
            table.deliver(report, lambda _: None, argparse.Namespace(json=False, out=options.out), "")

    with hf.checkpoint(options.model) as source:
        loaded = hf.load(options.model)
        masked = loaded.mask_id is not None
        if masked and options.only != ["prune"]:
            parser.error("an encoder is pruned (--only prune): BERT's config has no number of key-value heads")
        bench = Bench(source, loaded, (Words if masked else Text)(options.model), keep)
        run(bench, options.only, options.distill or bench.report["model"]["steps"] // 20)
    table.deliver(bench.report, show, options, "reshape")


if __name__ == "__main__":
    main()
