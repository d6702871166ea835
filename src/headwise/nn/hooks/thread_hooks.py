"""Hooks that see what one thread calls and not what others call; a block in which compiled models run uncompiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

Returned = TypeVar("Returned")

_lock = threading.Lock()
_uncompiled: list[Any] = []  # what ends it, then None for each further block


class Opener:
    """The thread that made this."""

    def __init__(self) -> None:
        self._number = threading.get_ident()

    def here(self) -> bool:
        """Whether this is that thread, or one of autograd's own, which runs a checkpointed part again."""
        return threading.get_ident() == self._number or (
            torch._C._current_graph_task_id() != -1 and type(threading.current_thread()).__name__ == "_DummyThread"
        )


def in_this_thread(hook: Callable[..., Returned]) -> Callable[..., Returned | None]:
    """The hook, for what the present thread calls; where other threads call it, it does nothing."""
    opener = Opener()

    @wraps(hook)
    def own(*args: Any, **keywords: Any) -> Returned | None:
        return hook(*args, **keywords) if opener.here() else None

    return own


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside the with block compiled models run uncompiled, in all threads: a graph runs past hooks put there later.

    Of several blocks, in any threads and order, the last one that ends gives back how it was before the first.
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
