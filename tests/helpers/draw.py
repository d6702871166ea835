"""The widest sweeps: `make test` runs a fixed share of each; `make test-all` runs all of it.

A sweep is many cases of the same code: lengths, head dims, masks, layouts, each on every instruction set and in every
dtype. `drawn(cases)` is the share of a loop; a test marked `sweep` runs a share of its parameters. Drawn are cases, not
backends, instruction sets or dtypes: each case that is drawn runs on all of them, so that no way through the code is
left out.
What is drawn follows from the seed and the test's name alone, never from the date: a tree that is green today is green
tomorrow. A test that asserts a rate over its cases takes all of them, or asserts the rate only where nothing is drawn.

A sweep over families of models, whose code differs more, is marked `sweep(4)`: at least one case of four runs.

    HEADWISE_DRAW=3                     one case of three; 1, or no such variable: all of them
    HEADWISE_DRAW_SEED=anything         another share of the same size; 0 if there is no such variable
"""

from __future__ import annotations

import os
import random
import re
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

Case = TypeVar("Case")
SHARE = int(os.environ.get("HEADWISE_DRAW", "1"))
SEED = os.environ.get("HEADWISE_DRAW_SEED", "0")
WHOLE = ("backend", "dtype", "form")  # parameters that are not drawn: each is a way of its own through the code


def drawn(cases: Sequence[Case], key: str = "", share: int = SHARE) -> list[Case]:
    """One case of so many, at least one, in their order; others for another key."""
    return _share(cases, os.environ.get("PYTEST_CURRENT_TEST", "").split("[")[0] + key, share)


def is_drawn(name: str, share: int = SHARE) -> bool:
    """Return whether the thing of that name is in the share: one of so many, each decided by itself."""
    return zlib.crc32(f"{SEED} {_without_folder(name)}".encode()) % share == 0


def repeats(count: int) -> int:
    """How often a thing is repeated that should be the same each time."""
    return -(-count // SHARE)


def _without_folder(name: str) -> str:
    """Return a test's name without the folders of its file, so that moving a file changes no draw."""
    return re.sub(r"^[\w/]*/(?=\w+\.py)", "tests/", name)


def _share(cases: Sequence[Case], name: str, share: int) -> list[Case]:
    count = -(-len(cases) // share)
    chosen = random.Random(f"{SEED} {_without_folder(name)} {len(cases)}").sample(range(len(cases)), count)
    return [cases[i] for i in sorted(chosen)]


def split(items: Sequence[Any], share: int = SHARE) -> tuple[list[Any], list[Any]]:
    """(tests that run, tests that are left out): of those marked `sweep` a share of each function's parameters."""
    if share == 1:
        return list(items), []
    by_function: dict[str, dict[str, list[Any]]] = {}
    shares: dict[str, int] = {}
    for item in items:
        if mark := item.get_closest_marker("sweep"):
            name = re.sub(r"\[.*", "", item.nodeid, flags=re.S)
            shares[name] = min((share, *mark.args))
            known = by_function.setdefault(name, {})
            known.setdefault(_rest(item), []).append(item)
    out: set[Any] = set()
    for name, known in by_function.items():
        out |= {item for rest in {*known} - {*_share(sorted(known), name, shares[name])} for item in known[rest]}
    return [item for item in items if item not in out], [item for item in items if item in out]


def _rest(item: Any) -> str:
    """The parameters of a test that are drawn, by their places in the lists of parameters."""
    return repr(sorted((name, i) for name, i in item.callspec.indices.items() if name not in WHOLE))


def header() -> str | None:
    """What pytest prints first."""
    if SHARE == 1:
        return None
    again = f"HEADWISE_DRAW={SHARE} HEADWISE_DRAW_SEED={SEED}"
    return f"sweeps: one case of {SHARE}; again: {again}; all of them: make test-all"
