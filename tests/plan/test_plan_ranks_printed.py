"""The tables of a model over ranks: every printed row against the numbers of the plan, and the scaling recomputed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from draw import slow_except
from test_plan_ranks import MODELS

from headwise import plan
from headwise.plan.model.model import model_of
from headwise.plan.ranks.communication import Link
from headwise.plan.ranks.mesh import Grid, mesh_cost
from headwise.plan.ranks.rank_plan import ModelOverRanks, over

pytestmark = pytest.mark.unchecked
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
NUMBER = re.compile(r"([\d.,]+) (s|ms|us|B|KiB|MiB|GiB)\b")


def cells(made: ModelOverRanks) -> list[list[str]]:
    """The rows of all tables, in order."""
    lines = [line for line in str(made).splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines]


def sizes(text: str) -> list[float]:
    """The times and bytes of a text, in seconds and bytes."""
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in NUMBER.findall(text)]


def near(text: str, *wanted: float) -> bool:
    found = sizes(text)
    return len(found) == len(wanted) and all(
        one == pytest.approx(other, rel=6e-3, abs=1e-9) for one, other in zip(found, wanted, strict=True)
    )


def planned(name: str, **more: Any) -> ModelOverRanks:
    return over(MODELS[name], "1GB/s,3us", tensor=2, ranks=4, tokens=61, **more)


SPEEDS = {"bandwidth": "3GB/s", "flops": "5GF"}


@pytest.mark.parametrize("speeds", [{}, SPEEDS], ids=["link alone", "all speeds"])
@pytest.mark.parametrize("batch", slow_except((1, 3), (3,)))
@pytest.mark.parametrize("name", MODELS)
def test_the_rows_of_a_rank_are_its_numbers(name: str, batch: int, speeds: dict[str, Any]) -> None:
    made = planned(name, batch=batch, **speeds)
    rows, at = {row[0]: row[1] for row in cells(made) if len(row) == 2}, made.cost
    assert "8 ranks: 2 x heads, 4 x tokens" in " ".join(str(made).split())
    assert rows["at"] == ("61 tokens" if batch == 1 else f"61 tokens, batch {batch}")
    assert near(rows["weights"], at.weight_bytes) and near(rows["activations of one layer"], at.activation_bytes)
    assert near(rows["sent per prefill"], sum(n.count * (n.tensor_bytes + n.costs[0].bytes) for n in at.layers))
    times = {"prefill, at least": at.prefill, "decoded token, at least": at.decode}
    if name == "encoder":
        assert at.decode is None
        for row in ("cache", "sent per decoded token", "decoded token, at least"):
            assert rows[row] == "-"
        del times["decoded token, at least"]
    else:
        assert near(rows["cache"], at.cache_bytes)
        assert near(rows["sent per decoded token"], sum(n.count * n.decode_bytes for n in at.layers))
    for row, time in times.items():
        assert time is not None
        if speeds:
            assert time.compute is not None and time.memory is not None
            total = max(time.compute, time.memory) + time.link
            assert near(rows[row], total, time.compute, time.memory, time.link), rows[row]
            assert re.search(r"\(computing .*, memory .*, link .*\)", rows[row])
        else:
            assert time.compute is None and near(rows[row], time.link) and rows[row].startswith("link ")


@pytest.mark.parametrize("speeds", [{}, SPEEDS], ids=["link alone", "all speeds"])
@pytest.mark.parametrize("name", ["plain", "windows", "chunks", "encoder"])
def test_the_rows_of_a_layer_are_its_layouts(name: str, speeds: dict[str, Any]) -> None:
    made = planned(name, **speeds)
    named = [row for row in cells(made) if len(row) == 7 and row[1] not in ("", "layout", "tokens")]
    rows = [row for row in named if not row[1][0].isdigit()]
    for layer in made.cost.layers:
        first, own, rows = rows[0], rows[1 : 1 + len(layer.costs)], rows[1 + len(layer.costs) :]
        assert first[0] == f"{layer.count} {layer.kind}" and first[1] == "tensor (two all-reduces)"
        assert near(first[2], layer.tensor_bytes) and first[3:] == [""] * 4
        bounded = layer.kind.startswith(("window", "chunks"))
        for place, (row, cost) in enumerate(zip(own, layer.costs, strict=True)):
            layout = "halo" if cost.layout == "ring" and bounded else str(cost.layout)
            assert row[0] == "" and row[1].startswith(layout) and ("(fastest)" in row[1]) == (place == 0)
            assert near(row[2], cost.bytes) and near(row[3], layer.backward[cost.layout])
            assert near(row[4], layer.activations[cost.layout])
            if cost.link_seconds is None:
                assert row[5] == "-"
            else:
                assert near(row[5], cost.link_seconds)
            if cost.seconds is None:
                assert row[6] == "-"
            else:
                assert near(row[6], cost.seconds)
    assert not rows


@pytest.mark.parametrize("speeds", [{}, SPEEDS], ids=["link alone", "all speeds"])
@pytest.mark.parametrize("name", ["plain", "encoder"])
def test_the_scaling_is_that_of_a_plan_of_each_number_of_ranks(name: str, speeds: dict[str, Any]) -> None:
    """Every row anew, as a plan of its own; the efficiency is that of the first row of the same length."""
    made = planned(name, batch=3, **speeds)
    rows = [row for row in cells(made) if len(row) == 7 and re.fullmatch(r"[\d,]+", row[0])]
    counts = [(2 * 2**k, 61) for k in range(6)] + [(2 * 2**k, 10_000_000) for k in range(12)]
    assert [(int(row[0].replace(",", "")), int(row[1].replace(",", ""))) for row in rows] == counts
    rates = {"bandwidth": 3e9, "flop_rate": 5e9} if speeds else {}
    before = 0.0
    for row, (ranks, tokens) in zip(rows, counts, strict=True):
        one = mesh_cost(model_of(MODELS[name]), Grid(2, ranks // 2, Link(1e9, 3e-6), **rates), tokens, batch=3)
        assert near(row[2], one.weight_bytes + one.cache_bytes + one.activation_bytes)
        seconds = one.prefill.total if speeds else one.prefill.link
        assert seconds is not None and near(row[3], seconds)
        if ranks == 2:
            before = 2 * seconds
        if speeds:
            assert row[4] == f"{before / (ranks * seconds):.0%}" and row[5] == f"{one.prefill.link / seconds:.0%}"
        else:
            assert row[4:6] == ["-", "-"]
        after = one.decode and (one.decode.total if speeds else one.decode.link)
        assert row[6] == "-" if after is None else near(row[6], after)


def test_the_remarks_say_what_is_left_out() -> None:
    text = " ".join(str(planned("plain")).split())
    assert "without flops, times include the link only" in text
    assert "without flops" not in str(planned("plain", **SPEEDS)) and "every rank holds" not in text
    assert "every rank holds all towers and all layers with a state" in " ".join(str(planned("states")).split())
    assert plan.over is over
