"""The form of caches for `torch.save` and `pickle`: one function that rebuilds them from plain numbers and tensors.

`torch.load` with `weights_only=True`, its default, calls only registered functions. `rebuild` is registered when
headwise is imported.
"""

from __future__ import annotations

from copyreg import __newobj__  # type: ignore[attr-defined]
from importlib import import_module
from typing import Any

MODULES = {
    "StaticCache": "static",
    "PagedCache": "paged",
    "RollingCache": "rolling",
    "PagePool": "page_pool",
    "Pages": "page_pool",
    "Store": "storage",
}


class Saved:
    """A cache, or a part of one, that is saved as the name of its class and its attributes."""

    def __reduce__(self) -> Any:
        if MODULES.get(type(self).__name__) != type(self).__module__.rpartition(".")[2]:
            return __newobj__, (type(self),), self.__getstate__()  # a user's own class is saved in the default way
        return rebuild, (type(self).__name__, self.__getstate__())

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes; all are numbers, strings, dtypes, tensors, and lists and dicts of those."""
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def rebuild(kind: str, state: dict[str, Any]) -> Any:
    """Rebuild a cache, or a part of one, from its saved state.

    Args:
        kind: the name of its class, one of `MODULES`.
        state: its attributes.

    Raises:
        ValueError: another name, or a state that is not a dict.
    """
    if kind not in MODULES or not isinstance(state, dict):
        raise ValueError(f"a saved cache is one of {', '.join(MODULES)} with a dict of its attributes; got {kind!r}")
    cls = getattr(import_module(f"{__package__}.{MODULES[kind]}"), kind)
    new = cls.__new__(cls)
    new.__setstate__(state)
    return new
