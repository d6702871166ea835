"""The probes that are open, and what they say of a call of attention.

A probe is its thread's. There, the configs of its model say that attention runs on headwise; in other threads they say
what they did, and their calls are not shown.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...nn.hooks.probe import Probe
from ...nn.hooks.thread_hooks import Opener

FIELD = "_attn_implementation_internal"
"""Where a config keeps the name of its attention."""


class Session:
    """One open probe: the modules that it watches, by name, what it sees, and what configs say in its thread."""

    def __init__(self, seen: Probe, names: dict[nn.Module, str], says: dict[int, str]) -> None:
        self.seen, self.names, self.says, self.opener = seen, names, says, Opener()


_lock = threading.Lock()
_sessions: tuple[Session, ...] = ()


def _here() -> list[Session]:
    return [session for session in _sessions if session.opener.here()]


def watched(module: nn.Module) -> bool:
    """Whether this thread has a probe of this module's model open."""
    return bool(_sessions) and any(module in session.names for session in _here())


def record(module: nn.Module, **fields: Any) -> Tensor | None:
    """Show an attention call of this module to every probe that this thread has open on its model.

    Returns what the call is to give instead, (B, H, T, V): the answer of the last opened of those that answer.
    """
    answers = [session.seen.record(session.names[module], **fields) for session in _here() if module in session.names]
    return next((answer for answer in reversed(answers) if answer is not None), None)


def opened(session: Session) -> None:
    """From here on, calls are shown to it."""
    global _sessions
    with _lock:
        if not _sessions:
            setattr(PreTrainedConfig, FIELD, _SaidHere())
        _sessions = (*_sessions, session)


def closed(session: Session) -> None:
    """From here on, they are not."""
    global _sessions
    with _lock:
        _sessions = tuple(other for other in _sessions if other is not session)
        if not _sessions:
            delattr(PreTrainedConfig, FIELD)


class _SaidHere:
    """The field of configs while probes are open: what the thread's own probe has put there, else the config's own."""

    def __get__(self, config: Any, owner: type) -> Any:
        says = self._says(config)
        if says is not None:
            return says[id(config)]
        if config is None or FIELD not in vars(config):
            raise AttributeError(FIELD)
        return vars(config)[FIELD]

    def __set__(self, config: Any, value: Any) -> None:
        says = self._says(config)
        if says is None:
            vars(config)[FIELD] = value
        else:
            says[id(config)] = value

    def _says(self, config: Any) -> dict[int, str] | None:
        return next((session.says for session in reversed(_here()) if id(config) in session.says), None)
