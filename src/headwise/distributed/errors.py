"""Errors of communication between ranks; each message names a rank and the reason."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank has ended, hangs or has raised an error; every other rank gets the same message.

    Attributes:
        rank: the rank in the group; None if no single rank is the cause.
        reason: the behaviour of the rank, in words.
    """

    def __init__(self, operation: str, rank: int | None, reason: str) -> None:
        self.operation, self.rank, self.reason = operation, rank, reason
        who = "" if rank is None else f"rank {rank} "
        super().__init__(f"{operation}: {who}{reason}")

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int | None, str]]:
        return type(self), (self.operation, self.rank, self.reason)


class RankMismatch(RankError, ValueError):
    """Ranks pass arguments that do not fit together: raised on every rank before any data is sent."""
