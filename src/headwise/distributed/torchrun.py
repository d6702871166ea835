"""The environment variables that torchrun sets for each process: the number of processes and its own rank.

Imports nothing of headwise and no torch, because the command line needs it before it imports either.
"""

from __future__ import annotations

import os

NUMBERS = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
"""The minimum of each variable, which is also its value if torchrun does not set it."""


def number(name: str) -> int:
    """Return one of `NUMBERS` from the environment.

    Raises:
        ValueError: it is not a whole number, or is too small.
    """
    least = NUMBERS[name]
    value = os.environ.get(name, str(least))
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and int(value) >= least):
        raise ValueError(
            f"{name} is a whole number of at least {least}, as torchrun sets it; got {value[:40]!r}; unset it"
        )
    return int(value)


def place() -> tuple[int, int]:
    """Return the rank of this process and the number of processes; (0, 1) for a single process.

    Raises:
        ValueError: as for `number`; or the rank is not less than the number of processes.
    """
    size = number("WORLD_SIZE")
    rank = number("RANK") if size > 1 else 0
    if rank >= size:
        raise ValueError(
            f"RANK is less than WORLD_SIZE, because ranks begin at 0; got RANK = {rank}, WORLD_SIZE = {size}; "
            "start them with torchrun, or unset both"
        )
    return rank, size
