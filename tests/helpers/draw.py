"""The largest sets of cases: `make test` runs one case in 16 of each (HEADWISE_DRAW=16), `make test-all` all of them.

A loop goes over `drawn(cases)`. A test marked `sweep` runs for a share of its parameters, each of them in every
backend, dtype and form, because each of those is a way of its own through the code. With `sweep(4)` or
`drawn(cases, most=4)` it is one case in four at least, where the code of the cases differs more.

The name of the test decides which cases are drawn: they are the same on every day and on every machine. A test that
asserts a rate over its cases takes all of them. pytest run by hand runs all cases.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, TypeVar

Case = TypeVar("Case")
SHARE = int(os.environ.get("HEADWISE_DRAW", "1"))
WHOLE = ("backend", "dtype", "form")  # parameters that are not drawn


def drawn(cases: Sequence[Case], key: str = "", most: int | None = None) -> list[Case]:
    """Return one case in SHARE, at least one and at least one in `most`, in their order; others for another key."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split("[")[0]
    return _sample(cases, test + key, min(SHARE, most or SHARE))


def split(items: Sequence[Any], share: int = SHARE) -> tuple[list[Any], list[Any]]:
    """Return the tests to run and those to leave out: of each function marked `sweep` a share of its parameters."""
    shares: dict[str, int] = {}
    cases: dict[str, set[str]] = {}
    for item in items:
        if mark := item.get_closest_marker("sweep"):
            function, case = _function_and_case(item)
            shares[function] = min((share, *mark.args))
            cases.setdefault(function, set()).add(case)
    kept = {(name, case) for name, some in cases.items() for case in _sample(sorted(some), name, shares[name])}
    runs = [not item.get_closest_marker("sweep") or _function_and_case(item) in kept for item in items]
    both = [*zip(items, runs, strict=True)]
    return [item for item, run in both if run], [item for item, run in both if not run]


def _function_and_case(item: Any) -> tuple[str, str]:
    """Return the test's function, and those of its parameters that are drawn, by their places in their lists."""
    places = sorted((name, place) for name, place in item.callspec.indices.items() if name not in WHOLE)
    return item.nodeid.split("[")[0], repr(places)


def _sample(cases: Sequence[Case], name: str, share: int) -> list[Case]:
    count = -(-len(cases) // share)
    places = random.Random(f"{name} {len(cases)}").sample(range(len(cases)), count)
    return [cases[place] for place in sorted(places)]
