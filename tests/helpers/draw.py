"""The largest sets of cases: `make test` runs one case in 16 of each (HEADWISE_DRAW=16), `make test-all` all of them.

A loop goes over `drawn(cases)`. A test marked `sweep` runs for a share of its parameters, each of them in every
backend, dtype and form, because each of those is a way of its own through the code. With `sweep(4)` or
`drawn(cases, most=4)` it is one case in four at least, where the code of the cases differs more.

The name of the test decides which cases are drawn: they are the same on every day and on every machine. A test that
asserts a rate over its cases takes all of them. pytest run by hand runs all cases.

`slow_except(values, some)` are parameters of which `make test` runs some, and CI all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
SHARE = int(os.environ.get("HEADWISE_DRAW", "1"))
WHOLE = ("backend", "dtype", "form")  # parameters that are not drawn


def slow_except(values: Iterable[Any], some: Container[Any]) -> list[Any]:
    """Return the values for `parametrize`; tests of those that are not among `some` are marked `slow`.

    A plain tuple has the values of several parameters.
    """

    def slow(value: Any) -> Any:
        return pytest.param(*value if type(value) is tuple else (value,), marks=pytest.mark.slow)

    return [value if value in some else slow(value) for value in values]


def drawn(cases: Sequence[Case], key: str = "", most: int | None = None) -> list[Case]:
    """Return one case in SHARE, at least one and at least one in `most`, in their order; others for another key."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split("[")[0]
    return _sample(cases, test + key, min(SHARE, most or SHARE))


def split(items: Sequence[Any], share: int = SHARE) -> tuple[list[Any], list[Any]]:
    """Return the tests to run and those to leave out: of each function marked `sweep` a share of its parameters."""
    sweeps: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps.setdefault(item.nodeid.split("[")[0], []).append(item)
    out: set[Any] = set()
    for name, tests in sweeps.items():
        cases = _cases(tests)
        kept = _sample(sorted(set(cases)), name, min((share, *tests[0].get_closest_marker("sweep").args)))
        out |= {test for test, case in zip(tests, cases, strict=True) if case not in kept}
    return [item for item in items if item not in out], [item for item in items if item in out]


def _cases(tests: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return which case each test of a function is: the numbers of its parameters that are drawn.

    A value has the number of its first occurrence. (pytest's own `callspec.indices` count the tests, not the values.)
    """
    numbers: dict[str, dict[int, int]] = {}  # the values are those of one list of parameters, so `id` tells them apart
    for test in tests:
        for name, value in test.callspec.params.items():
            if name not in WHOLE:
                known = numbers.setdefault(name, {})
                known.setdefault(id(value), len(known))
    return [tuple(known[id(test.callspec.params[name])] for name, known in numbers.items()) for test in tests]


def _sample(cases: Sequence[Case], name: str, share: int) -> list[Case]:
    count = -(-len(cases) // share)
    places = random.Random(f"{name} {len(cases)}").sample(range(len(cases)), count)
    return [cases[place] for place in sorted(places)]
