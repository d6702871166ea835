"""The command line: it passes arguments to the functions of the library, and prints their results.

Each command has a file; `errors` handles exits, `output` prints, `options` has shared options and their input. Every
mistake of the user ends in one line on stderr and exit code 2. Paths, names and error texts are printed through
`headwise.files.text.visible`, so that they cannot send control characters to a terminal.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import importance, look, patch, plan, regroup, tour, trace
from . import prune as reshape
from .errors import Command, OneLine, exit_process, open_streams

app = typer.Typer(
    cls=OneLine,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command ``headwise``."""
    open_streams()
    try:
        app(prog_name="headwise")
    except SystemExit as end:
        exit_process(end)


@app.callback(invoke_without_command=True, epilog="Example: headwise look --text 'The cat sat. The cat slept.'")
def headwise(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version, backend, instruction set and library versions, and exit."),
    ] = False,
) -> None:
    """Multi-head attention, head by head."""
    if version:
        from .versions import versions

        print(versions())
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


for command, name, example in (
    (look._look, "look", "look path/to/checkpoint --file notes.txt --out report.html"),
    (importance.importance, "importance", "importance path/to/checkpoint --by gradient,zero"),
    (importance.ablate, "ablate", "ablate path/to/checkpoint --heads 3.1,2.4 --by mean"),
    (importance.redundancy, "redundancy", "redundancy path/to/checkpoint --threshold 0.2"),
    (importance.circuits, "circuits", "circuits path/to/checkpoint --json"),
    (patch.patch, "patch", "patch --clean 'return x' --corrupt 'return y' --answer x --wrong y --out patch.svg"),
    (patch.attribute, "attribute", "attribute path/to/checkpoint --text 'return x' --answer x --wrong y"),
    (tour.tour, "tour", "tour --out tour.html --open"),
    (trace._trace, "trace", "trace path/to/checkpoint --text 'The cat sat.' --layer 2 --head 1"),
    (reshape._prune, "prune", "prune path/to/checkpoint --keep-fraction 0.75 --file notes.txt --out pruned"),
    (regroup._regroup, "regroup", "regroup path/to/checkpoint --kv-heads 4 --reconstruct --file text.txt --out new"),
    (regroup._distill, "distill", "distill smaller --teacher path/to/checkpoint --steps 200 --corpus texts --out new"),
    (plan._plan, "plan", "plan gpt-3 --context 2048 --batch 8 --bandwidth 3.35TB/s --flops 990TF"),
):
    app.command(name, cls=Command, epilog=f"Example: headwise {example}")(command)
