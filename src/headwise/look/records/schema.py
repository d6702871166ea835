"""Records as plain data: what JSON holds, and back, each value checked by the type of its field."""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from ...shapes.arguments import shown

R = TypeVar("R")
P = TypeVar("P", bound="PlainRecord")

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
    ("Look", "kind"): ("decoder", "encoder", "encoder-decoder", "encoder and decoder"),
    ("HeadRecord", "part"): ("encoder", "decoder", "cross"),
}
"""(record, field) -> its allowed values."""

KINDS: dict[Any, str] = {float: "a finite number", int: "a whole number", bool: "true or false", str: "a string"}
"""The names of the types of values in errors."""

Read = Callable[[Any], Any]
"""Returns the value of a field from plain data."""


class Damaged(ValueError):
    """An invalid value: a description of the problem, and the names that lead to its place, ``heads[3].entropy``."""

    def __init__(self, what: str, *names: object) -> None:
        self.what, self.names = what, names
        self.place = "".join(map(under, names)).removeprefix(".")
        super().__init__(f"{self.place or 'it'} {what}")


def under(name: object) -> str:
    """Return a name, or a number, as a place within another.

    >>> under("entropy"), under("first-token sink"), under(3)
    ('.entropy', "['first-token sink']", '[3]')
    """
    return f".{name}" if isinstance(name, str) and name.isidentifier() and len(name) < 40 else f"[{shown(name)}]"


def plain(value: Any) -> Any:
    """Return a record as a dictionary of its fields; bytes are base64, and a score is its list."""
    if hasattr(value, "to_list"):
        return value.to_list()
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [*map(plain, value)] if isinstance(value, tuple) and value and is_dataclass(value[0]) else value


def record(cls: type[R], data: Any, what: str, needs: Iterable[str] = ()) -> R:
    """Return a record from its fields by name, as `plain` and JSON give them; `what` begins the error of a wrong one.

    Fields with a default may be missing, but for those in `needs`. A method `check` finds what only files have wrong.
    """
    try:
        if isinstance(data, Mapping):
            for name in needs:
                if name not in data:
                    raise Damaged("is missing", name)
        return _within(_record(cls), data)
    except Damaged as error:
        raise ValueError(f"{what} read from what to_dict() wrote; {error}") from None


class PlainRecord:
    """A dataclass that converts to plain data and back."""

    CALLED: ClassVar[str]  # the beginning of the error for data that does not fit

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers."""
        return dict(plain(self))

    @classmethod
    def from_dict(cls: type[P], data: dict[str, Any]) -> P:
        """Return the record from the output of `to_dict` (or JSON); raise ValueError if it is invalid."""
        return record(cls, data, cls.CALLED)


def values(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record's fields, lists as tuples; raise Damaged for one that does not fit its field."""
    return {name: _within(read, data[name], name) for name, (read, _) in _readers(cls).items() if name in data}


def _within(read: Read, value: Any, *names: object) -> Any:
    """Return what `read` makes of a value; an error is raised as Damaged, with the names that lead there."""
    try:
        return read(value)
    except Damaged as error:
        raise Damaged(error.what, *names, *error.names) from None
    except ValueError as error:
        raise Damaged(f"does not fit: {error}", *names) from None
    except (TypeError, AttributeError, OverflowError):
        raise Damaged(f"is of another kind; got {shown(value)}", *names) from None


@functools.cache
def _readers(cls: type) -> dict[str, tuple[Read, bool]]:
    """Return by field what reads its value, and whether the field has no default."""
    hints = get_type_hints(cls)
    readers = {}
    for one in fields(cls):
        least = -ROUNDING if one.name in NOT_NEGATIVE else -LARGEST
        read = _reader(hints[one.name], least, WORDS.get((cls.__name__, one.name), ()))
        readers[one.name] = read, one.default is MISSING and one.default_factory is MISSING
    return readers


def _record(cls: type) -> Read:
    def read(data: Any) -> Any:
        readers = _readers(cls)
        if isinstance(data, (list, tuple)) and len(data) <= len(readers):  # the fields in order
            data = dict(zip(readers, data, strict=False))
        if not isinstance(data, Mapping):
            raise TypeError
        for name, (_, needed) in readers.items():
            if needed and name not in data:
                raise Damaged("is missing", name)
        made = cls(**values(cls, data))
        if hasattr(made, "check"):
            made.check()
        return made

    return read


@functools.cache
def _reader(hint: Any, least: int | float, words: tuple[str, ...] = (), otherwise: str = "") -> Read:
    """Return what reads a value of a type, whose numbers are not under `least`, and which is one of `words`, if any."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple:
        return _tuple(inner, least)
    if origin is Mapping:
        return _mapping(inner[0], inner[1], least)
    if origin is UnionType:  # with None
        some = _reader(inner[0], least, words, " or null")
        return lambda value: None if value is None else some(value)
    if is_dataclass(hint):
        return _record(hint)  # type: ignore[arg-type]
    if hint is bytes:
        return lambda value: base64.b64decode(value, validate=True)
    return _plain(hint, least, words, KINDS[hint] + otherwise)


def _plain(hint: Any, least: int | float, words: tuple[str, ...], called: str) -> Read:
    def number(value: Any) -> Any:
        if type(value) not in (NUMBERS if hint is float else {int}) or not abs(value) <= LARGEST:  # NaN fails
            raise Damaged(f"is {called}; got {shown(value)}")
        if value < least:
            raise Damaged(f"is at least 0; got {shown(value)}")
        return value

    def other(value: Any) -> Any:
        if not isinstance(value, hint):
            raise Damaged(f"is {called}; got {shown(value)}")
        if words and value not in words:
            raise Damaged(f"is one of {', '.join(words)}; got {shown(value)}")
        return value

    return number if hint in NUMBERS else other


def _tuple(inner: tuple[Any, ...], least: int | float) -> Read:
    one = _reader(inner[0], least)

    def fit(numbers: Any) -> bool:
        if not numbers or not {*map(type, numbers)} <= NUMBERS:
            return not numbers
        return least <= min(numbers) and max(numbers) <= LARGEST and math.isfinite(math.fsum(numbers))

    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise TypeError
        if inner[-1] is not Ellipsis and len(value) != len(inner):
            raise Damaged(f"is a list of {len(inner)}; got {shown(tuple(value))}")
        if inner[0] is float and fit(value):  # at once, because maps have many numbers
            return tuple(value)
        return tuple(_within(one, part, number) for number, part in enumerate(value))

    return read


def _mapping(key: Any, kind: Any, least: int | float) -> Read:
    one = _reader(kind, least)
    name_of: Read = int if key is int else _reader(key, least)

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError
        made = {}
        for name, part in value.items():
            named = isinstance(part, list) and is_dataclass(kind)  # a record under its name lists its other fields
            made[name_of(name)] = _within(one, [name, *part] if named else part, name)
        return made

    return read
