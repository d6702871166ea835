"""The decorator that jaxtyping's import hook puts on every function of headwise in the tests; see `conftest.py`.

Every annotation is held against every call, as by `jaxtyping.jaxtyped` with beartype. But that binds the arguments at
each call, checks them twice, and opens a scope for the letters of shapes in functions that name none; it took more than
half of the time of all tests.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

ON = False  # whether calls are checked; jaxtyping's own switch goes with it
typed = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
SHAPES = jaxtyping.jaxtyped("context")  # within it, a letter means one size


def switch(on: bool) -> None:
    """Check calls from now on, or no longer."""
    global ON
    ON = on
    jaxtyping.config.update("jaxtyping_disable", not on)


def install(modules: list[str]) -> None:
    """Decorate every function and dataclass of these modules, once they are imported."""
    setattr(jaxtyping, "jaxtyped", decorator)  # noqa: B010 - the decorators of the hook look it up there
    jaxtyping.install_import_hook(modules, "beartype.beartype")


def decorator(*, typechecker: Any) -> Callable[[Any], Any]:
    """What stands for `jaxtyping.jaxtyped`; the checker of types is always beartype."""
    return checked


def checked(what: Any) -> Any:
    """The function, its calls checked; a dataclass with its `__init__` checked; any other class as it is."""
    if inspect.isclass(what):
        if dataclasses.is_dataclass(what) and "__init__" in vars(what):
            setattr(what, "__init__", checked(what.__init__))  # noqa: B010
        return what
    if not what.__annotations__:
        return what

    @functools.wraps(what)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not ON:
            return what(*args, **kwargs)
        checks = _known.get(id(what.__code__), MISSING)
        if checks is MISSING:  # made at the first call: a process calls few of the functions that it imports
            checks = _checks(what.__code__, what)
        if checks is None:
            return what(*args, **kwargs)
        arguments, result, scope = checks
        with scope:
            arguments(*args, **kwargs)
            return result(what(*args, **kwargs))

    return wrapper


Checks = tuple[Callable[..., Any], Callable[[Any], Any], AbstractContextManager[None]]
# By the code's id: its hash goes over all its instructions, at each call anew. `_kept` lets no id be used twice.
_known: dict[int, Checks | None] = {}
_kept: list[CodeType] = []
MISSING: Any = object()


def _checks(code: CodeType, function: Callable[..., Any]) -> Checks | None:
    """What checks the arguments, what checks the result, and the scope of the shapes' letters; None for no annotation.

    One for all functions made by one `def`, for a function in a function is made anew at each call.
    """
    if id(code) not in _known:
        hints = {name: _hint(hint, function) for name, hint in inspect.get_annotations(function).items()}
        _kept.append(code)
        if all(hint is Any for hint in hints.values()):
            _known[id(code)] = None
        else:
            shapes = any(map(_names_a_shape, hints.values()))
            _known[id(code)] = (*_stand_ins(function, hints), SHAPES if shapes else nullcontext())
    return _known[id(code)]


def _hint(hint: Any, function: Callable[..., Any]) -> Any:
    """An annotation as an object; Any where its names are not there at run time, as jaxtyping has it."""
    carrier: Any = lambda: None  # noqa: E731
    carrier.__annotations__ = {"hint": hint}
    try:
        return get_type_hints(carrier, function.__globals__, include_extras=True)["hint"]
    except Exception:
        return Any


def _names_a_shape(hint: Any) -> bool:
    array = inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
    return array or any(map(_names_a_shape, get_args(hint)))


def _stand_ins(function: Callable[..., Any], hints: dict[str, Any]) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """Two functions under beartype: one of the same parameters that does nothing, one that returns what it takes."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    scope: dict[str, Any] = {parameter.name: parameter.default for parameter in parameters}
    listed = [
        parameter if parameter.default is parameter.empty else parameter.replace(default=_Name(parameter.name))
        for parameter in parameters
    ]
    exec(f"def arguments{inspect.Signature(listed)}: pass\ndef result(value): return value", scope)
    arguments, result = scope["arguments"], scope["result"]
    arguments.__annotations__ = {name: hint for name, hint in hints.items() if name != "return"}
    result.__annotations__ = {"return": hints["return"]} if "return" in hints else {}
    for stand_in in (arguments, result):
        stand_in.__module__, stand_in.__qualname__ = function.__module__, function.__qualname__
    return typed(arguments), typed(result)


class _Name(str):
    """A default that is written as a name."""

    __slots__ = ()
    __repr__ = str.__str__
