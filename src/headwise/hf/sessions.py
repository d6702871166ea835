"""The probes that are open, and what they say of a call of attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..nn.probe import Probe


class Session:
    """One open probe: the modules that it watches, by name, and what it sees."""

    def __init__(self, seen: Probe, names: dict[nn.Module, str]) -> None:
        self.seen, self.names = seen, names


_sessions: tuple[Session, ...] = ()


def watched(module: nn.Module) -> bool:
    """Whether a probe of this module's model is open."""
    return any(module in session.names for session in _sessions)


def record(module: nn.Module, **fields: Any) -> Tensor | None:
    """Show an attention call of this module to every probe that is open on its model.

    Returns what the call is to give instead, (B, H, T, V): the answer of the last opened of those that answer.
    """
    answers = [session.seen.record(session.names[module], **fields) for session in _sessions if module in session.names]
    return next((answer for answer in reversed(answers) if answer is not None), None)


def opened(session: Session) -> None:
    """From here on, calls are shown to it."""
    global _sessions
    _sessions = (*_sessions, session)


def closed(session: Session) -> None:
    """From here on, they are not."""
    global _sessions
    _sessions = tuple(other for other in _sessions if other is not session)
