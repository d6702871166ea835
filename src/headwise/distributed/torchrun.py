"""What torchrun tells each of its processes in the environment: how many there are, and which of them this is.

Imports nothing of headwise, and no torch: the command line asks before it has either.
"""

from __future__ import annotations

import os

NUMBERS = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
"""The least that each may be, which is what it is where torchrun says nothing."""


def number(name: str) -> int:
    """One of `NUMBERS` as the environment has it.

    Raises:
        ValueError: it is no whole number, or a smaller one.
    """
    least = NUMBERS[name]
    said = os.environ.get(name, str(least))
    if not (said.isascii() and said.isdecimal() and len(said) < 10 and int(said) >= least):
        raise ValueError(
            f"{name} is a whole number of at least {least}, as torchrun sets it; got {said[:40]!r}; unset it"
        )
    return int(said)


def place() -> tuple[int, int]:
    """Which process this is, and of how many; the first of one where it is alone.

    Raises:
        ValueError: as `number`; or a rank beyond the last.
    """
    size = number("WORLD_SIZE")
    rank = number("RANK") if size > 1 else 0
    if rank >= size:
        raise ValueError(
            f"RANK is less than WORLD_SIZE, for processes are numbered from 0; got RANK = {rank}, WORLD_SIZE = {size}; "
            "start them with torchrun, or unset both"
        )
    return rank, size
