"""One command that torchrun started several times: they work together, and one of them speaks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from ...distributed import torchrun

if TYPE_CHECKING:
    from headwise.distributed.workers import Processes


def started() -> int:
    """Return how many processes of this command there are; one where the number is none, which `check` refuses."""
    try:
        return torchrun.number("WORLD_SIZE")
    except ValueError:
        return 1


def check() -> None:
    """Raise where what torchrun says of this process is no number, or of a process more than there are."""
    try:
        for name in torchrun.NUMBERS:
            torchrun.number(name)
        torchrun.place()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def speaks() -> bool:
    """Return whether this process shows and writes what all have done."""
    return started() < 2 or os.environ.get("RANK", "0") == "0"


def processes() -> Processes:
    """Return all of them; a process that has no others needs no group."""
    from headwise.distributed.workers import Processes

    return Processes.here()


@contextlib.contextmanager
def said_once(text: str) -> Iterator[bool]:
    """Whether this process is to say what it has to: the first of those that have to say the same."""
    if started() < 2:
        yield True
        return
    from headwise.distributed.workers import said_once

    with said_once(text) as first:
        yield first


def own_device(name: str) -> str:
    """``cuda`` as this process's own of a machine's GPUs, by torchrun's numbering; other names as they are."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" and started() > 1 else name


def end(code: object) -> None:
    """Close the group before Python winds up: its threads must not outlive what they stand on.

    After a fault others may be gone, and closing would wait for them; then the process ends here.
    """
    if started() > 1 and "headwise.distributed.workers" in sys.modules:
        if code not in (None, 0):
            os._exit(code if isinstance(code, int) else 1)
        from headwise.distributed.workers import leave

        leave()
