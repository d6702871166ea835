"""The chart of the cache against context: bars for a terminal, and a figure."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest
from test_plan_words import SMALL

from headwise import plan
from headwise.extras import MissingExtra
from headwise.plan import units
from headwise.plan.costs import totals as costs
from headwise.plan.show import chart

pytestmark = pytest.mark.unchecked


def test_the_contexts_of_a_chart() -> None:
    for last, expected in ((1, [1]), (1023, [1023]), (1024, [1024]), (1025, [1024, 1025]), (4096, [1024, 2048, 4096])):
        assert chart.lengths([plan.of(SMALL, context=last)]) == expected
    assert chart.lengths([plan.of(SMALL, context=(5000, 9)), plan.of(SMALL, context=2048)])[-1] == 5000
    assert chart.lengths([plan.of(SMALL, context=10**10)])[-2:] == [2**33, 10**10]


def test_bars_are_those_of_the_batch() -> None:
    result = plan.of({**SMALL, "model_type": "mistral", "sliding_window": 1500}, context=2048, batch=5)
    bars = chart.bars(result).splitlines()
    token = 3 * 4 * 16 * 2 * 5
    assert bars[0] == "cache against context (# held, . reserved without windows)"
    assert [line.split("  ")[-1] for line in bars[1:]] == [units.show_bytes(n * token) for n in (1024, 1500)]
    drawn = [(line[13:61].count("#"), line[13:61].count(".")) for line in bars[1:]]
    assert drawn == [(24, 0), (36, 12)]
    assert chart.bars(plan.of(SMALL, context=99)).splitlines()[0] == "cache against context (# held)"
    least = chart.bars(plan.of(SMALL, context=10**6)).splitlines()[1]
    assert least.count("#") == 1, "a little is drawn, too"


@pytest.mark.parametrize("dtype", costs.KV_BYTES)
def test_bars_count_the_scales(dtype: str) -> None:
    result = plan.of(SMALL, context=2048, kv_dtype=dtype, batch=3)
    assert chart.cache_at(result, 2048) == result.contexts[0].cache_bytes
    assert chart.bars(result).endswith(units.show_bytes(result.contexts[0].cache_bytes))


def points(plans: list[Any]) -> list[list[tuple[float, float]]]:
    """The points of each line, but for the one that only the legend has."""
    (axes,) = chart.figure(plans).axes
    return [[(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.lines[:-1]]


def words_of(drawing: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawing).iter() if element.tag.endswith("text")]


def test_lines_are_the_bytes_of_the_cache_and_both_axes_logarithmic() -> None:
    result = plan.of({**SMALL, "model_type": "mistral", "sliding_window": 2048}, context=8192)
    reserved, cache = points([result])
    token = 3 * 4 * 16 * 2
    assert reserved == [(1024 << i, (1024 << i) * token) for i in range(4)]
    assert cache == [*reserved[:2], *((x, reserved[1][1]) for x, _ in reserved[2:])]
    (axes,) = chart.figure([result]).axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [line.get_linestyle() for line in axes.lines] == ["--", "-", "--"]


def test_a_chart_of_one_context() -> None:
    one = {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 8}
    assert points([plan.of(one, context=1024)]) == [[(1024, 1024 * 2 * 4 * 8 * 2)]] * 2
    assert len(points([plan.of(SMALL, context=7)])) == 2
    assert plan.svg([plan.of(one, context=1024)]).startswith("<svg")


def test_labels_of_a_chart() -> None:
    many = [plan.of(SMALL, context=2**20)] * 7
    texts = words_of(plan.svg(many))
    for label in ("1K", "512K", "1M", "tokens of context", "dashed: reserved"):
        assert label in texts
    assert texts.count("llama") == 7 and "Key-value cache against context (bf16, batch 1)" in texts
    colours = [line.get_color() for line in chart.figure(many).axes[0].lines[:-1]][::2]
    assert colours[6] == colours[0] and len(set(colours)) == len(chart.COLOURS)
    result = plan.of(SMALL, context=1500)
    strange = replace(result, model=replace(result.model, name="<b>&amp;$x$" + "x" * 40))
    texts = words_of(plan.svg([strange]))
    assert "<b>&amp;$x$" + "x" * 13 in texts and "1,500" in texts
    assert chart._tokens(3 * 2**19) == "1.5M" and chart._tokens(2**20 - 1024) == "1023K"
    assert plan.svg(many) == plan.svg(many), "the same text each time"


@pytest.mark.parametrize("most", [1, 10**10])
def test_a_chart_has_a_few_lines_across(most: int) -> None:
    (axes,) = chart.figure([plan.of({**SMALL, "model_type": "mistral", "sliding_window": 7}, context=most)]).axes
    low, high = axes.get_ylim()
    assert 1 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 10
    assert len(axes.get_xticks()) <= 13


def test_without_matplotlib_there_is_no_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = plan.of(SMALL, context=7)
    with pytest.raises(MissingExtra, match=r"a chart needs .*headwise\[look\]"):
        result.svg()
    page = result._repr_html_()
    assert "<pre>" in page and "<img" not in page
