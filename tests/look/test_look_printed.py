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
