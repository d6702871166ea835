"""The numbers that make a cache: the least that each may be, one less, and what is no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache

pytestmark = pytest.mark.unchecked
SIZES: dict[str, Any] = {"batch": 2, "num_kv_heads": 3, "head_dim": 8, "value_dim": 5}
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "static": (StaticCache, {**SIZES, "capacity": 7}),
    "rolling": (RollingCache, {**SIZES, "window": 7, "first": 2, "chunk": 3}),
    "pool": (PagePool, {"num_pages": 3, **{name: size for name, size in SIZES.items() if name != "batch"}}),
    "paged": (lambda batch: PagedCache(PagePool(3, 3, 8, 5), batch), {"batch": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_number_from_its_least(kind: str) -> None:
    make, numbers = KINDS[kind]
    for name in numbers:
        least = 0 if name == "first" else 1
        make(**{**numbers, name: least})
        with pytest.raises(ValueError, match=f"{name} is at least {least}; got {least - 1}"):
            make(**{**numbers, name: least - 1})
        for other in (True, 2.0, "2"):
            with pytest.raises(TypeError, match=f"{name} is an int; got {other!r}"):
                make(**{**numbers, name: other})
