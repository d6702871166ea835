"""One command that torchrun started several times: they work together, and one of them speaks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from headwise.processes import Processes


def started() -> int:
    """How many processes of this command there are; one where the number is none, which `check` refuses."""
    said = os.environ.get("WORLD_SIZE", "1")
    return int(said) if _is_number(said) else 1


def check() -> None:
    """Raises where what torchrun says of this process is no number, or of a process more than there are."""
    for name, least in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)):
        said = os.environ.get(name, "1")
        if not _is_number(said) or int(said) < least:
            raise typer.BadParameter(
                f"{name} is a whole number of at least {least}, as torchrun sets it; got {said[:40]!r}; unset it"
            )
    rank = os.environ.get("RANK", "0")
    if 1 < started() <= int(rank):
        raise typer.BadParameter(
            f"RANK is less than WORLD_SIZE, for processes are numbered from 0; got RANK = {rank}, WORLD_SIZE = "
            f"{started()}; start them with torchrun, or unset both"
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def speaks() -> bool:
    """Whether this process shows and writes what all have done."""
    return started() < 2 or os.environ.get("RANK", "0") == "0"


def processes() -> Processes:
    """All of them; a process that has no others needs no group."""
    from headwise.processes import Processes

    return Processes.here()


@contextlib.contextmanager
def said_once(text: str) -> Iterator[bool]:
    """Whether this process is to say what it has to: the first of those that have to say the same."""
    if started() < 2:
        yield True
        return
    from headwise.processes import said_once

    with said_once(text) as first:
        yield first


def own_device(name: str) -> str:
    """``cuda`` as this process's own of a machine's GPUs, by torchrun's numbering; other names as they are."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" and started() > 1 else name


def end(code: object) -> None:
    """Close the group before Python winds up: its threads must not outlive what they stand on.

    After a fault others may be gone, and closing would wait for them; then the process ends here.
    """
    if started() > 1 and "headwise.processes" in sys.modules:
        if code not in (None, 0):
            os._exit(code if isinstance(code, int) else 1)
        from headwise.processes import leave

        leave()
