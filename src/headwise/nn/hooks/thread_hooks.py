"""Hooks that apply to the calls of one thread only; a context manager that runs compiled models uncompiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

Returned = TypeVar("Returned")

_lock = threading.Lock()
_uncompiled: list[Any] = []  # the stance to restore, then None for each further block


class Opener:
    """The thread that created this object."""

    def __init__(self) -> None:
        self._number = threading.get_ident()

    def here(self) -> bool:
        """Return whether this runs in that thread, or in an autograd thread that recomputes a checkpointed part."""
        return threading.get_ident() == self._number or (
            torch._C._current_graph_task_id() != -1 and type(threading.current_thread()).__name__ == "_DummyThread"
        )


def in_this_thread(hook: Callable[..., Returned]) -> Callable[..., Returned | None]:
    """Return a hook that runs `hook` in the current thread, and does nothing in other threads."""
    opener = Opener()

    @wraps(hook)
    def own(*args: Any, **keywords: Any) -> Returned | None:
        return hook(*args, **keywords) if opener.here() else None

    return own


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models uncompiled inside the with block, in all threads: a compiled graph ignores hooks added later.

    If several blocks overlap, in any threads, the last one that ends restores the state before the first.
    """
    with _lock:
        if not _uncompiled:
            stance = torch.compiler.set_stance("force_eager")
            stance.__enter__()
            _uncompiled.append(stance)
        else:
            _uncompiled.append(None)
    try:
        yield
    finally:
        with _lock:
            if len(_uncompiled) == 1:
                _uncompiled[0].__exit__(None, None, None)
            _uncompiled.pop()
