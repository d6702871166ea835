"""Commands that torchrun starts in several processes: they work together, and only one prints."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

import typer

from ...distributed import torchrun

if TYPE_CHECKING:
    from headwise.distributed.workers import Processes


def process_count() -> int:
    """Return the number of processes of this command; 1 for an invalid number, which `check` refuses."""
    try:
        return torchrun.number("WORLD_SIZE")
    except ValueError:
        return 1


def check() -> None:
    """Raise BadParameter if torchrun's variables are not numbers, or name a rank that does not exist."""
    try:
        for name in torchrun.NUMBERS:
            torchrun.number(name)
        torchrun.place()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def is_first() -> bool:
    """Return whether this process prints and writes the results of all."""
    return process_count() < 2 or os.environ.get("RANK", "0") == "0"


def processes() -> Processes:
    """Return the process group; a single process needs none."""
    from headwise.distributed.workers import Processes

    return Processes.here()


def print_once(text: str) -> contextlib.AbstractContextManager[bool]:
    """Return a context whose value is whether this process prints `text`: the first of those with the same text does.

    Other processes wait until it has printed.
    """
    if process_count() < 2:
        return contextlib.nullcontext(True)
    from headwise.distributed.workers import print_once

    return print_once(text)


def own_device(name: str) -> str:
    """Return ``cuda`` as this process's GPU by torchrun's local rank; other names are returned unchanged."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" and process_count() > 1 else name


def close(code: object) -> None:
    """Close the process group before Python shuts down, because its threads must not outlive the interpreter.

    After an error other processes may be gone and closing would wait for them, so the process exits immediately.
    """
    if process_count() > 1 and "headwise.distributed.workers" in sys.modules:
        if code not in (None, 0):
            os._exit(code if isinstance(code, int) else 1)
        from headwise.distributed.workers import close_group

        close_group()
