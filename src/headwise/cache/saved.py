"""Caches as `torch.save` and `pickle` write them: one function that makes them again, of plain numbers and tensors.

`torch.load` with `weights_only=True`, its default, calls no function that it was not told of. It is told of `rebuild`
as soon as headwise is imported.
"""

from __future__ import annotations

from copyreg import __newobj__  # type: ignore[attr-defined]
from importlib import import_module
from typing import Any

MODULES = {
    "StaticCache": "static",
    "PagedCache": "paged",
    "RollingCache": "rolling",
    "PagePool": "paged",
    "_Pages": "paged",
    "Store": "storage",
}


class Saved:
    """A part of a cache, or a cache, that is saved as its name and its attributes."""

    def __reduce__(self) -> Any:
        if MODULES.get(type(self).__name__) != type(self).__module__.rpartition(".")[2]:
            return __newobj__, (type(self),), self.__getstate__()  # a class of the user's own, saved as Python does it
        return rebuild, (type(self).__name__, self.__getstate__())

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes; all are numbers, strings, dtypes, tensors, and lists and dicts of those."""
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def rebuild(kind: str, state: dict[str, Any]) -> Any:
    """Make a cache, or a part of one, of what was saved.

    Args:
        kind: the name of its class, one of `MODULES`.
        state: its attributes.

    Raises:
        ValueError: another name, or a state that is no dict.
    """
    if kind not in MODULES or not isinstance(state, dict):
        raise ValueError(f"a saved cache is one of {', '.join(MODULES)} with a dict of its attributes; got {kind!r}")
    cls = getattr(import_module(f"{__package__}.{MODULES[kind]}"), kind)
    new = cls.__new__(cls)
    new.__setstate__(state)
    return new
