"""The results as tables on a terminal: a section a regime, and then every mark, met or not."""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
COLUMNS = ("torch", "folded", "flex", "onnxruntime", "openvino")
HEADS = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
KNOWN = (*COLUMNS, "headwise")
WIDTH = 176  # of the whole table
NARROW = 128  # of its wider half


def console(stderr: bool = False) -> Console:
    """A console wide enough for the table where no terminal gives the width."""
    normal = Console(stderr=stderr, highlight=False)
    narrow = NARROW if normal.is_terminal or os.environ.get("COLUMNS") else WIDTH
    return normal if normal.width >= narrow else Console(stderr=stderr, highlight=False, width=narrow)


def add_delivery(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, not the table")
    parser.add_argument("--out", type=Path, help="write the results here, not to benchmarks/results")


def deliver(
    report: dict[str, Any], show: Callable[[dict[str, Any]], object], options: argparse.Namespace, name: str
) -> None:
    """Print a table, or JSON; write JSON to `--out`, or beside a printed table to today's file of that name."""
    text = json.dumps(report, indent=1) + "\n"
    if options.json:
        print(text, end="")
    else:
        show(report)
    if options.out:
        options.out.write_text(text)
    elif name and not options.json:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{datetime.date.today().isoformat()}-{name}.json").write_text(text)


def number(x: float) -> str:
    """Three digits or a little more."""
    digits = next((n for n, below in ((4, 0.1), (3, 1), (2, 10), (1, 100)) if x < below), 0)
    return f"{x:.{digits}f}"


def way_cell(row: Row, way: str) -> str:
    if way not in row["ways"]:
        return ""
    return f"{number(row['ways'][way]['median_ms'])} {row['ratios'][way]:.2f}x"


def limit_cells(row: Row) -> tuple[str, str, str]:
    """The limit, what headwise reaches, and the part."""
    limit = row["limit"]
    if limit is None:
        return "", "", ""
    unit = limit["unit"]
    return f"{limit['rate']:.0f} {unit}", f"{limit['reached']:.0f} {unit}", f"{limit['part']:.0%}"


def marks_cell(row: Row) -> str:
    known = [mark for mark in row["marks"] if mark["met"] is not None]
    if not known:
        return ""
    met = sum(mark["met"] for mark in known)
    return f"[{'green' if met == len(known) else 'red'}]{met}/{len(known)}[/]"


def print_table(report: dict[str, Any], out: Console | None = None) -> None:
    """All of it: the machine, the cases, the marks, and which ways were absent and why."""
    out = out or console()
    out.print(heading(report["machine"]))
    if out.width >= WIDTH:
        print_cells(report["results"], {**OURS, **PEERS, **LAST}, out)
    else:
        print_cells(report["results"], {**OURS, **LAST}, out)
        print_cells(report["results"], PEERS, out)
    out.print(CAPTION, "", style="dim")
    print_marks(report["results"], out)
    print_absent(report["results"], out)


def print_cells(rows: list[Row], columns: dict[str, Callable[[Row], str]], out: Console) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("case", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    last = rows[0]["regime"] if rows else ""
    for row in rows:
        if row["regime"] != last:
            table.add_section()
        last = row["regime"]
        table.add_row(row["case"], *(cell(row) for cell in columns.values()))
    out.print(table)


OURS: dict[str, Callable[[Row], str]] = {
    "by": lambda row: row["backend"],
    "limit": lambda row: limit_cells(row)[0],
    "headwise": lambda row: number(row["ways"]["headwise"]["median_ms"]) + ("~" if row["disturbed"] else ""),
    "reached": lambda row: limit_cells(row)[1],
    "%": lambda row: limit_cells(row)[2],
}
PEERS: dict[str, Callable[[Row], str]] = {
    **{HEADS.get(way, way): partial(way_cell, way=way) for way in COLUMNS},
    "other": lambda row: " ".join(f"{way} {way_cell(row, way)}" for way in row["ways"] if way not in KNOWN),
}
LAST: dict[str, Callable[[Row], str]] = {"marks": lambda row: marks_cell(row)}
CAPTION = (
    "Milliseconds, and how many times as long as headwise; medians over rounds of taking turns. ~: fewer than three "
    "quiet rounds.\nCausal, window and padding count only what is attended. onnxruntime has no bfloat16: float16 "
    "there. as-fp32, as-bf16: headwise on these. statistics: output and statistics in one pass; alone: without them."
)


def heading(machine: dict[str, Any]) -> str:
    peers = ", ".join(f"{name} {machine.get(name) or 'absent'}" for name in ("onnxruntime", "openvino"))
    ours = f"headwise {machine['headwise']} ({machine.get('headwise_isa') or 'no native kernel'})"
    cores = f"{machine['threads']} of {machine['cores']} cores, {machine['isa']}"
    return f"{machine['cpu']}, {cores}; {ours}, torch {machine['torch']}, {peers}"


def print_marks(rows: list[Row], out: Console) -> None:
    table = Table(title="Marks", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("case", "of", "reached", "must", "aim", ""):
        table.add_column(name, justify="left" if name in ("case", "of") else "right", no_wrap=True)
    met = measured = 0
    for row in rows:
        for mark in row["marks"]:
            share = mark["of"] == "limit"
            show = (lambda x: f"{x:.0%}") if share else (lambda x: f"{x:.2f}x")
            verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: "not measured"}[mark["met"]]
            if mark["met"] and mark["aim"]:
                verdict += ", [green]aim too[/]" if mark["value"] >= mark["aim"] else ""
            measured, met = measured + (mark["met"] is not None), met + bool(mark["met"])
            value = "" if mark["value"] is None else show(mark["value"])
            aim = show(mark["aim"]) if mark["aim"] else ""
            table.add_row(row["case"], mark["of"], value, show(mark["must"]), aim, verdict)
    if table.row_count:
        out.print(table)
        out.print(f"{met} of {measured} marks met")


def print_absent(rows: list[Row], out: Console) -> None:
    """Each reason once, with the cases it holds for."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for way, why in row["absent"].items():
            if "no form" not in why:
                reasons.setdefault(f"{way}: {why}", []).append(row["case"])
    for reason, cases in reasons.items():
        where = cases[0] if len(cases) == 1 else f"{len(cases)} cases, as {cases[0]}"
        out.print(f"absent: {reason} ({where})", style="dim")
