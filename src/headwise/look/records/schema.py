"""Type checks of stored records: file values must match the types of a record's fields; errors have their place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ...shapes.arguments import shown

T = TypeVar("T")

NUMBERS = {int, float}
LARGEST = 10**15

NOT_NEGATIVE = frozenset(
    {"num_layers", "num_heads", "length", "texts", "seconds", "call", "layer", "head", "queries", "keys", "over"}
    | {"entropy", "largest", "offsets", "ahead", "map", "value", "count", "text", "query", "key", "weight", "shape"}
    | {"step", "scores", "plays", "first_moved"}
)
"""Fields whose numbers, at any depth, are at least 0, except for rounding."""

ROUNDING = 1e-3
"""The largest rounding error below 0: an entropy is a difference, and the mean of many small ones may be below 0."""

WORDS = {
    ("LookData", "kind"): ("decoder", "encoder", "encoder-decoder", "encoder and decoder"),
    ("HeadRecord", "part"): ("encoder", "decoder", "cross"),
}
"""(record, field) -> its allowed values."""


KINDS: dict[Any, str] = {
    float: "a finite number", int: "a whole number", bool: "true or false", str: "a string", NoneType: "null",
    tuple: "a list", Mapping: "an object",
}  # fmt: skip
"""The names of the types of values in errors."""


class Damaged(ValueError):
    """An invalid value and its place: ``heads[3].entropy``, and a description of the problem."""

    def __init__(self, place: str, what: str) -> None:
        self.place, self.what = place.removeprefix("."), what
        super().__init__(f"{self.place or 'it'} {what}")


def under(name: object) -> str:
    """Return a name, or a number, as a place within another.

    >>> under("entropy"), under("first-token sink"), under(3)
    ('.entropy', "['first-token sink']", '[3]')
    """
    return f".{name}" if isinstance(name, str) and name.isidentifier() and len(name) < 40 else f"[{shown(name)}]"


class Inside:
    """A context manager that raises each error inside it as `Damaged` with its place.

    `names` lead to the place, and `value` is the value there. It is a class instead of a generator for speed: files
    have many places.
    """

    __slots__ = ("names", "value")

    def __init__(self, value: object, *names: object) -> None:
        self.names, self.value = names, value

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        place = "".join(map(under, self.names))
        fault = error if isinstance(error, Damaged) else error.__context__
        if isinstance(fault, Damaged):
            inner = fault.place if fault.place[:1] in ("", "[") else f".{fault.place}"
            raise Damaged(place + inner, fault.what) from None
        if isinstance(error, KeyError):
            raise Damaged(place + under(error.args[0]), "is missing") from None
        if isinstance(error, ValueError):
            raise Damaged(place, f"does not fit: {error}") from None
        if isinstance(error, (TypeError, AttributeError, OverflowError)):
            raise Damaged(place, f"is of another kind; got {shown(self.value)}") from None


@contextmanager
def one_error(what: str, data: object, by: str = "to_dict") -> Iterator[None]:
    """Raise one ValueError for any invalid value inside: what is read, the place, and the value there.

    Its context is the `Damaged`, from which an outer `Inside` takes the place.
    """
    try:
        with Inside(data):
            yield
    except Damaged as error:
        raise ValueError(f"{what} read from what {by}() wrote; {error}") from None


def entries(name: str, data: Any) -> tuple[Any, ...]:
    """Return the entries of the list under a name."""
    with Inside(data, name):
        return listed(data)


def each(name: str, data: Any, read: Callable[[Any], T]) -> tuple[T, ...]:
    """Return the results of `read` for each entry of the list under a name."""
    made = []
    for number, one in enumerate(entries(name, data)):
        with Inside(one, name, number):
            made.append(read(one))
    return tuple(made)


def fields_of(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record's fields; raise KeyError for a missing one without a default."""
    if not isinstance(data, Mapping):
        raise TypeError("no object")
    names = (one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING)
    return {name: data[name] for name in names} | {one.name: data[one.name] for one in fields(cls) if one.name in data}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def check_fields(cls: type, values: Mapping[str, Any]) -> None:
    """Raise Damaged if a value does not match the annotation of its field."""
    for name, value in values.items():
        hint = _hints(cls)[name]
        if not _fits(value, hint):
            place, value_there, kind_there = _where(value, hint, _fits)
            raise Damaged(name + place, f"is {_called(kind_there)}; got {shown(value_there)}")
        if name in NOT_NEGATIVE and not _not_negative(value):
            place, value_there, _ = _where(value, hint, lambda one, _: _not_negative(one))
            raise Damaged(name + place, f"is at least 0; got {shown(value_there)}")
        words = WORDS.get((cls.__name__, name), (value,))
        if value not in words:
            raise Damaged(name, f"is one of {', '.join(words)}; got {shown(value)}")


def _where(value: Any, hint: Any, fits: Callable[[Any, Any], bool]) -> tuple[str, Any, Any]:
    """Return the place of the first wrong part of a value, the part, and its expected type."""
    origin, inner = get_origin(hint), get_args(hint)
    parts: list[tuple[object, Any]] = []
    if origin is tuple and isinstance(value, tuple) and (Ellipsis in inner or len(value) == len(inner)):
        parts = [*enumerate(value)]
    elif origin is Mapping and isinstance(value, Mapping):
        parts = [*value.items()]
    kind = inner[-1] if origin is Mapping else inner[0] if inner else None
    for name, one in parts:
        if not fits(one, kind):
            place, value_there, kind_there = _where(one, kind, fits)
            return under(name) + place, value_there, kind_there
    return "", value, hint


def _called(hint: Any) -> str:
    """Return the name of a field's type in errors."""
    if get_origin(hint) is UnionType:
        return " or ".join(map(_called, get_args(hint)))
    count = len(get_args(hint)) if get_origin(hint) is tuple and Ellipsis not in get_args(hint) else 0
    text = KINDS.get(get_origin(hint) or hint, "of another kind")
    return f"{text} of {count}" if count else text


def listed(value: Any) -> tuple[Any, ...]:
    """Return a list as a tuple; raise TypeError for a string or a dict, which `tuple` would accept."""
    if not isinstance(value, (list, tuple)):
        raise TypeError("no list")
    return tuple(value)


def _not_negative(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return value >= -ROUNDING
    if isinstance(value, Mapping):
        return all(map(_not_negative, value.values()))
    if isinstance(value, tuple) and value and {*map(type, value)} <= NUMBERS:  # fast path for maps
        return bool(min(value) >= -ROUNDING)
    return not isinstance(value, tuple) or all(map(_not_negative, value))


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is float:
        return type(value) in NUMBERS and abs(value) <= LARGEST  # NaN fails
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST
    if origin is tuple and inner[0] is float:  # fast path for maps, which have many numbers
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
