"""docs/models.md: the ledger of all architectures, from its rows and the counts of earlier runs."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

Row = dict[str, Any]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
COUNTS = Path(__file__).resolve().parent / "hf_table_counts.json"
GROUPS = {
    "equal": "Equal to eager",
    "refused": "Refused by name",
    "without": "Without attention on the interface",
    "left": "Not tried, and why",
    "broken": "Broken",
}
"""Outcome -> the heading of its table."""
WAYS = {"right": "R", "left": "L", "cached": "C", "gradient": "G"}


def group(row: Row) -> str:
    """The table that a row stands in."""
    outcome = row["outcome"]
    if outcome == "not reached":
        return "left" if row["modules"] else "without"
    if outcome == "refused":
        return "refused" if row["own"] else "without"
    return {"not built": "left", "not run": "left", "left": "left", "equal": "equal"}.get(outcome, "broken")


def worst(rows: Sequence[Row]) -> dict[str, float]:
    """The largest difference of outputs and of gradients, of the rows that are equal without the proof in float64."""
    equal = [row for row in rows if group(row) == "equal"]
    outputs = [x for row in equal for k, x in row["differences"].items() if k != "gradient" and k not in rounded(row)]
    gradients = [x for row in equal for k, x in row["differences"].items() if k == "gradient" and k not in rounded(row)]
    return {"outputs": max(outputs, default=0.0), "gradients": max(gradients, default=0.0)}


def rounded(row: Row) -> set[str]:
    return set(row.get("rounding", ()))


def record(rows: Sequence[Row], label: str) -> None:
    """The counts of a run, beside those of others; a label holds its last run."""
    sizes = Counter(map(group, rows))
    counts = {
        "label": label, "transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0],
        "all": len(rows), **{name: sizes[name] for name in GROUPS}, "whole": sum(whole(row) for row in rows),
        **worst(rows),
    }  # fmt: skip
    runs = [x for x in recorded() if x["label"] != label]
    COUNTS.write_text(json.dumps([*runs, counts], indent=1) + "\n", "utf8")


def recorded() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(COUNTS.read_text("utf8")) if COUNTS.exists() else []
    return runs


def whole(row: Row) -> bool:
    """Whether all attention of an equal model runs on headwise."""
    return group(row) == "equal" and not row["unseen"] and not row.get("switched")


def page(rows: Sequence[Row], parts: Sequence[str]) -> str:
    rows = sorted(rows, key=lambda row: row["name"])
    counts = Counter(map(group, rows))
    built = sum(counts[name] for name in ("equal", "refused", "without", "broken"))
    lines = [HEAD.format(count=len(rows), built=built, share=built / len(rows), version=transformers.__version__)]
    columns = (
        "run, transformers, torch, in all, equal, of these in part, refused, without, left, broken, output, gradient"
    )
    lines += ["| " + " | ".join(columns.split(", ")) + " |", "|---" * (columns.count(",") + 1) + "|"]
    lines += [_counts(run) for run in recorded()]
    lines.append(NOTES)
    for name, heading in GROUPS.items():
        lines += [f"## {heading}: {counts[name]}", ""]
        if name in TABLES and counts[name]:
            lines += [*TABLES[name], *(line(row, name) for row in rows if group(row) == name)]
        else:
            lines.append(", ".join(row["name"] for row in rows if group(row) == name) or "None.")
        lines.append("")
    lines += [f"## Parts of other models: {len(parts)}", "", PARTS, "", ", ".join(parts)]
    return "\n".join(lines) + "\n"


def _counts(run: dict[str, Any]) -> str:
    cells = [run["label"], run["transformers"], run["torch"], run["all"], run["equal"], run["equal"] - run["whole"]]
    cells += [run[name] for name in ("refused", "without", "left", "broken")]
    return "| " + " | ".join(map(str, cells)) + f" | {run['outputs']:.0e} | {run['gradients']:.0e} |"


def line(row: Row, name: str) -> str:
    if name != "equal":
        return f"| {row['name']} | {short(row)} |"
    outputs = max(x for k, x in row["differences"].items() if k != "gradient")
    gradient = row["differences"].get("gradient")
    ways = "".join(letter for way, letter in WAYS.items() if way in row["differences"])
    marks = ("*" if rounded(row) else "") + ("" if whole(row) else " part")
    return (
        f"| {row['name']} | {row['calls']} | {outputs:.0e} | {'-' if gradient is None else format(gradient, '.0e')} "
        f"| {ways or '-'}{marks} |"
    )


def short(row: Row) -> str:
    """The reason in one short phrase."""
    reason = re.sub(r"\s+", " ", str(row.get("reason", ""))).replace("|", "/")
    match = re.search(r"not on transformers' attention interface, [^:]*: (.*?);", reason)
    needs = re.search(r"requires the (\w+) library|No module named '(\w+)'", reason)
    if needs:
        return f"needs the package {needs.group(1) or needs.group(2)}"
    return match.group(1) if match else reason.removeprefix("ModelError: ").removeprefix("ValueError: ")[:150]


TABLES = {
    "equal": ["| model type | calls | output | gradient | ways |", "|---|---|---|---|---|"],
    **{name: ["| model type | why |", "|---|---|"] for name in ("refused", "left", "broken")},
}
HEAD = """# Every architecture

A script writes this page: `python scripts/hf_table.py --all --docs`. It builds a tiny random model of each of the
{count} architectures (and variants) that an auto class of transformers {version} builds, runs it with
`attn_implementation="eager"` and `"headwise"`, and compares. {built} of them ({share:.0%}) are built and classified;
for the others the table says why not.
"""
NOTES = """
- **equal**: every output, at tokens that are not padding, is within 1e-5 of its largest number; gradients of all
  parameters are within 1e-4 of each one's largest number. If a model amplifies rounding beyond that (`*`), both agree
  in float64, and headwise in float32 is as close to that as eager; the worst differences of the counts exclude these.
  At least one call reached headwise, and halving the first head of each layer changed the output.
- **ways**: R, L: a text of the batch is padded on the right, on the left; C: a cache is filled with a padded batch,
  then a step and a chunk of 3 tokens follow; G: gradients. `part`: some of its attention is in code of its own and does
  not run on headwise. Where such a model is refused with `attn_implementation="headwise"` (SAM), it was built with
  `"eager"` and switched by `set_attn_implementation("headwise")`.
- **calls** of attention in a forward; **output** and **gradient**: the largest difference, relative to the largest
  number.
- **refused**: the model raises one line that says why, before it computes. **without**: convolutions, recurrences; or
  attention in code of its own in a part of a model that is otherwise on the interface (the audio of Gemma 3n and 4):
  that part does not run on headwise, and a warning says so.

The tables below are from the run with the newest transformers. With the oldest that headwise supports, Kosmos-2 is
refused as well (its queries of an image are marked as causal there), and fewer tiny models can be built.

Where transformers' implementations disagree among themselves, one is taken as right:

- **Falcon with ALiBi**: `"sdpa"`. Its eager attention adds ALiBi twice, in the mask and again to the scores; the
  published form, computed by hand, adds it once, like sdpa. With rotary positions: `"eager"`; sdpa is equal.
- **PaliGemma without token types**: `"eager"`. Without `token_type_ids` its sdpa differs by half of the largest number;
  headwise is equal to eager.
- **Grounding DINO, MM Grounding DINO**: `"sdpa"`. Their text goes through BERT with a bool mask, which eager adds to
  the scores as numbers (1 where a token may be seen, 0 where not); sdpa and headwise take it as a mask.
"""
PARTS = """Model types that no auto class builds alone. They run inside the models above: towers of vision-language
models, decoders, text models."""


def environment() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
