"""The share of the sweeps that `make test` runs, and parameters inside a test."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draw
import pytest
import torch
from loops import inside


@dataclass(eq=False)
class Spec:
    params: dict[str, int]


@dataclass(eq=False)
class Item:
    """What `draw.split` asks of pytest's item."""

    nodeid: str
    callspec: Spec
    marks: tuple[str, ...] = field(default=("sweep",))
    least: tuple[int, ...] = ()

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return getattr(pytest.mark, name)(*self.least).mark if name in self.marks else None


def items(name: str, *, marks: tuple[str, ...] = ("sweep",)) -> list[Item]:
    """Two backends and three dtypes of eleven cases."""
    numbers = [(b, t, c) for c in range(11) for t in range(3) for b in range(2)]
    return [Item(f"{name}[{b}-{t}-{c}]", Spec({"backend": b, "dtype": t, "case": c}), marks) for b, t, c in numbers]


def test_whatever_is_drawn_runs_on_every_backend_and_in_every_dtype() -> None:
    every = [*items("a"), *items("b")]
    run, left_out = draw.split(every, 4)
    assert len(run) == 2 * 6 * 3 and len(run) + len(left_out) == len(every)
    for name in ("a", "b"):
        cases: dict[int, set[tuple[int, int]]] = {}
        for item in run:
            where = item.callspec.params
            if item.nodeid.startswith(name):
                cases.setdefault(where["case"], set()).add((where["backend"], where["dtype"]))
        assert len(cases) == 3 and all(len(both) == 6 for both in cases.values())
    assert [item for item in every if item in run] == run, "in their order"


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["a", "b"])
@pytest.mark.parametrize("case", range(11))
def test_of_pytests_own_tests_too(request: pytest.FixtureRequest, backend: str, case: int) -> None:
    if any("[" in name for name in request.config.args):
        pytest.skip("pytest was asked for single parameters")
    tests = [item.name for item in request.session.items if f"{request.function.__name__}[{case}-" in item.name]
    assert len(tests) == 2, tests


def test_what_is_no_sweep_runs_whole_and_so_does_everything_without_a_share() -> None:
    every = items("a", marks=())
    assert draw.split(every, 4) == (every, [])
    every = items("a")
    assert draw.split(every, 1) == (every, [])
    assert draw.drawn(range(7), most=1) == [*range(7)]


def test_of_a_marked_sweep_at_least_one_case_of_so_many_runs() -> None:
    every = items("a")
    for item in every:
        item.least = (2,)
    assert len(draw.split(every, 8)[0]) == 6 * 6
    assert draw.split(every, 1)[0] == every


def test_at_least_one_case_is_drawn_and_keys_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "SHARE", 9)
    assert draw.drawn(["one"]) == ["one"] and draw.drawn([]) == []
    assert len(draw.drawn(range(99), most=3)) == 33 and len(draw.drawn(range(99), most=10)) == 11
    assert len({tuple(draw.drawn(range(99), key, most=9)) for key in "abcdef"}) == 6
    assert {case for key in range(60) for case in draw.drawn(range(20), f"{key}", 4)} == {*range(20)}


def test_the_share_is_the_same_on_every_day_and_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code below moves the clock a year ahead before it draws."""
    code = """
import datetime, time
class Later(datetime.date):
    today = classmethod(lambda cls: cls(2027, 11, 27))
datetime.date, now = Later, time.time
time.time = lambda: now() + 366 * 86400
import draw
print(draw.drawn(range(99), 'a key'))
"""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    path = os.pathsep.join([str(Path(draw.__file__).parent), os.environ.get("PYTHONPATH", "")])
    env, command = os.environ | {"PYTHONPATH": path, "HEADWISE_DRAW": "9"}, [sys.executable, "-c", code]
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    monkeypatch.setattr(draw, "SHARE", 9)
    assert output.stdout.strip() == f"{draw.drawn(range(99), 'a key')}"


# -- parameters inside a test ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["a", "b"])
@inside("n", [2, 3])
@inside("m", [5, 7])
def test_other_parameters_are_those_of_pytest(backend: str, n: int, m: int, seen: list[Any] = []) -> None:  # noqa: B006
    seen.append((backend, n, m))
    assert len(seen) <= 8 and float(torch.rand(())) == float(
        torch.rand((), generator=torch.Generator().manual_seed(20))
    )


def test_the_cases_that_fail_are_named() -> None:
    def even(n: int) -> None:
        assert n % 2 == 0, "odd"

    with pytest.raises(AssertionError, match=r"2 of 4 fail\nn 3: odd(.|\n)*\nn 5: odd"):
        inside("n", [2, 3, 4, 5])(even)()
    with pytest.raises(ZeroDivisionError) as error:
        inside("n", [1, 0])(lambda n: 1 / n)()
    assert error.value.__notes__ == ["where n is 0"]
    with pytest.raises(AssertionError, match="the test has no argument m"):
        inside("m", [1])(even)
