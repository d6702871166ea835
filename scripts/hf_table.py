"""Models of Hugging Face on headwise, against eager: the table of kinds, and the ledger of all architectures.

    python scripts/hf_table.py                     a few kinds: how far logits lie from eager's, as a Markdown table
    python scripts/hf_table.py --all               a tiny model of every architecture: equal, refused, or broken?
    python scripts/hf_table.py --only llama gpt2   these alone, with what was compared
    python scripts/hf_table.py --all --docs --label NAME   writes docs/models.md, and keeps the counts under NAME

`--json FILE` keeps a row as soon as it is done; with `--resume`, rows in FILE are not measured again.

Exit code 1 where a model is broken: its numbers differ from eager's, or it dies of anything but a refusal; 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "helpers"), str(ROOT / "scripts")]

Row = dict[str, Any]


# -- models of many kinds ---------------------------------------------------------------------------------------------


def kinds() -> None:
    from hf_models import ROWS

    print("| model | calls | padded | unpadded | decode (dynamic, static) | largest logit |")
    print("|---|---|---|---|---|---|")
    for row in ROWS:
        print(kind_line(row), flush=True)


def kind_line(row: Any) -> str:
    from hf_measure import counted, decode_distance, forward_distance
    from hf_models import inputs, logits

    model = row.build()
    unpadded = forward_distance(row, model, "none").to_eager
    padded = "-"
    if row.kind != "vision":
        padded = f"{max(forward_distance(row, model, side).to_eager for side in ('left', 'right')):.1e}"
    decode = "-"
    if row.kind == "decoder":
        decode = f"{max(decode_distance(model, cache).to_eager for cache in ('dynamic', 'static')):.1e}"
    model.set_attn_implementation("headwise")
    with counted() as calls:
        size = logits(model, inputs(row)).abs().max()
    return f"| {row.name} | {len(calls)}/{row.calls} | {padded} | {unpadded:.1e} | {decode} | {size:.1f} |"


# -- all architectures ------------------------------------------------------------------------------------------------


def ledger(wanted: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """The rows of all names, in their order, with a bar of progress."""
    import torch
    import transformers
    from hf_table_measure import measure
    from hf_table_run import rows
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    done = {row["name"]: row for row in kept(options) if row["name"] in wanted}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # No thread of its own: the children are forks.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("models", total=len(wanted), completed=len(done))
        for row in rows([x for x in wanted if x not in done], measure, options.jobs, options.timeout):
            done[row["name"]] = row
            if options.json:
                with options.json.open("a", encoding="utf8") as file:
                    file.write(json.dumps(row) + "\n")
            bar.update(task, advance=1, description=f"{row['name'][:28]:28}", refresh=True)
    return [done[name] for name in wanted]


def kept(options: argparse.Namespace) -> list[Row]:
    """The rows of an earlier run, if this one goes on with it."""
    if options.json is None:
        return []
    if not options.resume:
        options.json.unlink(missing_ok=True)
    if not options.json.exists():
        return []
    return [json.loads(line) for line in options.json.read_text("utf8").splitlines()]


def report(rows: Sequence[Row], whole: bool) -> int:
    from hf_table_page import environment, group, worst

    for row in rows:
        name, reason = group(row), row.get("reason", "")
        if name == "broken" or not whole:
            details = {k: v for k, v in row.items() if k not in ("name", "outcome", "reason")}
            print(f"{row['name']}: {row['outcome']} {reason} {details}")
    counts = Counter(map(group, rows))
    print(f"{len(rows)} architectures: " + ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    print(f"worst {worst(rows)}; {environment()}")
    return 1 if counts["broken"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every architecture of transformers")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these model types alone")
    parser.add_argument("--docs", action="store_true", help="write docs/models.md (with --all)")
    parser.add_argument("--label", help="keep this run's counts under this name, for the docs (with --all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, each of one thread")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a model may take")
    parser.add_argument("--json", type=Path, help="a row a line, written as it is done")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are in --json")
    options = parser.parse_args()
    if not options.all and not options.only:
        kinds()
        return 0
    from hf_table_build import names, parts
    from hf_table_page import PAGE, page, record

    import headwise.hf  # noqa: F401  (registers)

    unknown = sorted(set(options.only or ()) - set(names()))
    if unknown or (options.docs and options.only):
        what = f"no such model type: {', '.join(unknown)}" if unknown else "the docs hold all: --docs goes with --all"
        print(f"hf_table: {what}", file=sys.stderr)
        return 2
    try:
        rows = ledger(options.only or names(), options)
    except KeyboardInterrupt:
        return 130
    if options.label and options.all:
        record(rows, options.label)
    if options.docs:
        PAGE.write_text(page(rows, parts()), "utf8")
    return report(rows, whole=not options.only)


if __name__ == "__main__":
    sys.exit(main())
