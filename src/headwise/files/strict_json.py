"""Strict JSON for untrusted files: one object, no duplicate keys, finite numbers, UTF-8."""

from __future__ import annotations

import json
from typing import Any

from .text import visible


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the object of a JSON text.

    Raises:
        ValueError: the error, to be placed after the name of the file: ``not valid JSON (line 1: ...)``, a duplicate
            key, NaN or an infinity, text nested too deeply, or JSON that is not an object.

    Example:
        >>> parse_object(b'{"a": [1, null]}')
        {'a': [1, None]}
    """
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid JSON (not UTF-8 text: byte {error.start})") from None
    except RecursionError:
        raise ValueError("not valid JSON (nested too deeply)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON (line {error.lineno}: {error.msg})") from None
    except ValueError as error:  # from the two functions below, or from Python's limit on the digits of an integer
        raise ValueError(f"not valid JSON ({visible(str(error))})") from None
    if not isinstance(value, dict):
        raise ValueError(f"contains a JSON {type(value).__name__}, and an object is needed")
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:60]!r} occurs twice")
    return table


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
