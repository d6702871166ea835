"""Whether what stands in a file is of the kinds that a record's fields have."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

NUMBERS = {int, float}
LARGEST = 10**15

NOT_NEGATIVE = frozenset(
    {"num_layers", "num_heads", "length", "texts", "seconds", "call", "layer", "head", "queries", "keys", "over"}
    | {"entropy", "largest", "offsets", "ahead", "map", "value", "count", "text", "query", "key", "weight", "shape"}
    | {"step", "scores", "plays"}
)
"""Fields whose numbers, however deep they lie, are at least 0, but for rounding."""

ROUNDING = 1e-3
"""How far below 0 a number may be: an entropy is a difference, and the mean of many small ones may end below 0."""

WORDS = {
    ("Look", "kind"): ("decoder", "encoder", "encoder-decoder", "encoder and decoder"),
    ("HeadRecord", "part"): ("encoder", "decoder", "cross"),
}
"""(record, field) -> what stands there."""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def check_fields(cls: type, values: Mapping[str, Any]) -> None:
    """Raises ValueError where a value is not what the field of that name is annotated to hold."""
    for name, value in values.items():
        if not _fits(value, _hints(cls)[name]):
            raise ValueError(f"{name} is of another kind")
        if name in NOT_NEGATIVE and not _not_negative(value):
            raise ValueError(f"{name} is at least 0")
        if value not in WORDS.get((cls.__name__, name), (value,)):
            raise ValueError(f"{name} is none of its words")


def listed(value: Any) -> tuple[Any, ...]:
    """A list as a tuple; TypeError for a string or a dict, of which `tuple` would make one, too."""
    if not isinstance(value, (list, tuple)):
        raise TypeError("no list")
    return tuple(value)


def _not_negative(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return value >= -ROUNDING
    if isinstance(value, Mapping):
        return all(map(_not_negative, value.values()))
    if isinstance(value, tuple) and value and {*map(type, value)} <= NUMBERS:  # maps have many: no call for each
        return bool(min(value) >= -ROUNDING)
    return not isinstance(value, tuple) or all(map(_not_negative, value))


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is float:
        return type(value) in NUMBERS and abs(value) <= LARGEST  # NaN is not
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST
    if origin is tuple and inner[0] is float:  # maps have many: no call for each
        return (
            isinstance(value, tuple)
            and {*map(type, value)} <= NUMBERS
            and math.isfinite(math.fsum(value))
            and (not value or (max(value) <= LARGEST and min(value) >= -LARGEST))
        )
    if origin is tuple:
        if isinstance(value, tuple) and Ellipsis not in inner and len(value) != len(inner):
            return False
        return isinstance(value, tuple) and all(_fits(one, inner[0]) for one in value)
    if origin is UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    return isinstance(value, hint)
