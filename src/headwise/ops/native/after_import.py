"""Calls at the end of the import of another module, so that headwise need not import it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def when_imported(module: str, run: Callable[[], Any]) -> None:
    """Call `run` now if the module has been imported, else at the end of its import."""
    if module in sys.modules:
        run()
    else:
        sys.meta_path.insert(0, _WaitFor(module, run))


class _WaitFor(MetaPathFinder):
    """A finder that lets the other finders find a module and adds a call to the end of its import."""

    def __init__(self, module: str, run: Callable[[], Any]) -> None:
        self.module, self.run = module, run

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRun(spec.loader, self.run)
        return spec


class _ThenRun(Loader):
    """The loader of a module, with a call after the import."""

    def __init__(self, loader: Loader, run: Callable[[], Any]) -> None:
        self.loader, self.run = loader, run

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.run()
