"""What is raised where ranks do not work together; each text names a rank and the reason."""

from __future__ import annotations


class RankError(RuntimeError):
    """A rank has ended, hangs or has raised: the same text on every other rank.

    Attributes:
        rank: of the group; None where no single one is the cause.
        reason: what it did, in words.
    """

    def __init__(self, operation: str, rank: int | None, reason: str) -> None:
        self.operation, self.rank, self.reason = operation, rank, reason
        who = "" if rank is None else f"rank {rank} "
        super().__init__(f"{operation}: {who}{reason}")

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int | None, str]]:
        return type(self), (self.operation, self.rank, self.reason)


class RankMismatch(RankError, ValueError):
    """Ranks pass arguments that do not fit each other: raised on every rank, before anything is sent."""
