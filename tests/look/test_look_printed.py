"""What `look` gives prints as its tables: as text and in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwise import look
from headwise.testing.constructed import constructed

NAME = "<model> & [bold]more[/bold]"
RESULTS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "circuits": (
        look.circuits,
        [f"{NAME}: what heads read of earlier ones", f"{NAME}: what heads write", "│ queries │"],
    ),
    "importance": (look.importance, [f"{NAME}: loss ", "┃ layer ┃ head ┃ gradient ┃"]),
    "ablation": (
        lambda model, ids, **more: look.ablate(model, ids, [(0, 1)], decode=lambda i: "[/b]", **more),
        [f"{NAME}: heads off by zero", "│ none │", "where the next token changed most", "'[/b]'"],
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_print_as_their_tables(name: str) -> None:
    model, _ = constructed([["self", "previous-token"], ["broad", "induction"]])
    measure, shown = RESULTS[name]
    result = measure(model, model.sample(41), name=NAME)
    printed = str(result)
    lines = printed.splitlines()
    words = " ".join(printed.split())
    assert all(text in words for text in shown), printed
    assert max(map(len, lines)) <= 120 and all(line == line.rstrip() for line in lines) and "\x1b" not in printed
    page = result._repr_html_()
    assert page.startswith("<pre>&lt;model&gt; &amp;") and page.endswith("</pre>")
    assert repr(result).startswith(f"{type(result).__name__}(model=")


def test_the_summary_begins_with_what_few_heads_do_and_ends_in_states() -> None:
    """It is in the order of the catalog: the many heads of a common role do not come before the induction heads."""
    from headwise.look.views.tables import summary_table

    model, _ = constructed([["self", "self", "previous-token"], ["duplicate-token", "broad", "induction"]])
    seen = look.at(model, model.sample(41))
    named = [str(cell) for cell in summary_table(seen).columns[0].cells]
    assert named[0] == "induction" and named[-2] in ("broad", "first-token sink") and named[-1] == "no role or state"
    assert named.index("induction") < named.index("duplicate-token") < named.index("self")
    one = look.at(model, [1], repeats=None)
    assert one.title.endswith("decoder, 1 token") and seen.title.endswith("41 tokens")
