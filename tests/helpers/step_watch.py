"""Which decode steps the native kernel took."""

from __future__ import annotations

from typing import Any

import pytest

from headwise.cache.base import KVCache


def taken_steps(monkeypatch: pytest.MonkeyPatch, owner: Any = KVCache, name: str = "step") -> list[bool]:
    """Of every call from here on of the step of caches, or of another function of `owner`, whether it gave a result."""
    taken: list[bool] = []
    step = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        out = step(*args, **options)
        taken.append(out is not None)
        return out

    monkeypatch.setattr(owner, name, watched)
    return taken
