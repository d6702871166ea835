"""Whether what stands in a file is of the kinds that a record's fields have."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

NUMBERS = {int, float}
LARGEST = 10**15


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def check_fields(cls: type, values: Mapping[str, Any]) -> None:
    """Raises ValueError where a value is not what the field of that name is annotated to hold."""
    for name, value in values.items():
        if not _fits(value, _hints(cls)[name]):
            raise ValueError(f"{name} is of another kind")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is float:
        return type(value) in NUMBERS and abs(value) <= LARGEST  # NaN is not
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST
    if origin is tuple and inner[0] is float:  # maps have many: no call for each
        return isinstance(value, tuple) and {*map(type, value)} <= NUMBERS and math.isfinite(math.fsum(value))
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(one, inner[0]) for one in value)
    if origin is UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    return isinstance(value, hint)
