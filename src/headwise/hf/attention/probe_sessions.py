"""The open probes, and their access to attention calls.

A probe belongs to its thread. In that thread, the configs of its model name headwise as their attention; in other
threads they keep their own values, and calls are not recorded.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...nn.hooks.probe import Probe
from ...nn.hooks.thread_hooks import Opener

FIELD = "_attn_implementation_internal"
"""The attribute of a config that stores the name of its attention."""


class Session:
    """One open probe with the names of its modules and the attention names that configs have in its thread."""

    def __init__(self, seen: Probe, names: dict[nn.Module, str], attention_names: dict[int, str]) -> None:
        self.seen, self.names, self.attention_names, self.opener = seen, names, attention_names, Opener()


_lock = threading.Lock()
_sessions: tuple[Session, ...] = ()


def _here() -> list[Session]:
    return [session for session in _sessions if session.opener.here()]


def is_probed(module: nn.Module) -> bool:
    """Return True if this thread has an open probe on this module's model."""
    return bool(_sessions) and any(module in session.names for session in _here())


def record(module: nn.Module, **fields: Any) -> Tensor | None:
    """Pass an attention call of this module to every open probe of this thread on its model.

    Returns the replacement of the output (B, H, T, V): the result of the last opened probe that returns one, or None.
    """
    answers = [session.seen.record(session.names[module], **fields) for session in _here() if module in session.names]
    return next((answer for answer in reversed(answers) if answer is not None), None)


def open_session(session: Session) -> None:
    """Start recording calls for a session."""
    global _sessions
    with _lock:
        if not _sessions:
            setattr(PreTrainedConfig, FIELD, _AttentionNameOfThread())
        _sessions = (*_sessions, session)


def close_session(session: Session) -> None:
    """Stop recording calls for a session."""
    global _sessions
    with _lock:
        _sessions = tuple(other for other in _sessions if other is not session)
        if not _sessions:
            delattr(PreTrainedConfig, FIELD)


class _AttentionNameOfThread:
    """The attention name in configs while probes are open: that of this thread's probe, else the config's own."""

    def __get__(self, config: Any, owner: type) -> Any:
        attention_names = self._names_of(config)
        if attention_names is not None:
            return attention_names[id(config)]
        if config is None or FIELD not in vars(config):
            raise AttributeError(FIELD)
        return vars(config)[FIELD]

    def __set__(self, config: Any, value: Any) -> None:
        attention_names = self._names_of(config)
        if attention_names is None:
            vars(config)[FIELD] = value
        else:
            attention_names[id(config)] = value

    def _names_of(self, config: Any) -> dict[int, str] | None:
        return next(
            (session.attention_names for session in reversed(_here()) if id(config) in session.attention_names), None
        )
