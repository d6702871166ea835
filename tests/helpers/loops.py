"""Parameters that pytest does not see: a test runs for each value in turn, and names those for which it fails.

To pytest a test is 2 ms of work, and as much memory as it takes to remember twenty thousand of them; most cases of a
test of masks are faster than that. `@inside("n", SIZES)` is for such, where `parametrize` would be.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from draw import drawn
from native_cases import collected

Test = Callable[..., None]


def inside(name: str, values: Iterable[Any], *, sweep: bool = False) -> Callable[[Test], Test]:
    """The test with this argument going through the values, each from the same random state; of a sweep, a share."""
    values = list(values)

    def decorate(test: Test) -> Test:
        def one(value: Any, arguments: dict[str, Any]) -> None:
            torch.default_generator.manual_seed(20)  # as `seed` in conftest.py
            try:
                test(**arguments, **{name: value})
            except AssertionError:
                raise
            except Exception as error:
                error.add_note(f"where {name} is {value!r}")
                raise

        @functools.wraps(test)
        def each(**arguments: Any) -> None:
            with collected() as attempt:
                for value in drawn(values) if sweep else values:
                    attempt(f"{name} {value!r}", one, value, arguments)

        signature = inspect.signature(test)
        rest = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        assert len(rest) < len(signature.parameters), f"the test has no argument {name}"
        each.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return each

    return decorate
