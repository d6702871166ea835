"""Tables of the command line in terminals of any width: nothing is cut, and numbers stay whole where they can."""

from __future__ import annotations

import io
import random
import re
from collections import Counter

import pytest
from rich.console import Console
from rich.table import Table

from headwise import plan
from headwise.cli import output
from headwise.cli.options.table_width import fit
from headwise.plan.show.printed import parts

pytestmark = pytest.mark.unchecked
FRAME = "─━│┃┏┓┗┛┡┩└┘├┤┼╇┳┬┴┻╈╪"


def console(width: int, *, terminal: bool = True) -> Console:
    options = {"markup": False, "highlight": False, "emoji": False, "color_system": None, "legacy_windows": False}
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, **options)  # type: ignore[arg-type]


def printed(table: Table, shown: Console) -> str:
    fit(table, shown)
    shown.print(table)
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def letters(text: str) -> Counter[str]:
    return Counter(re.sub(rf"[\s{FRAME}]|\x1b\[[0-9;]*m", "", text))


def drawn(dice: random.Random) -> tuple[Table, str]:
    """A table, and all that stands in it."""
    count = dice.randint(1, 9)
    words = ["a few words", "12,345,678", "1.5 GiB", "", "x", "hyphenated-words", "漢字"]
    cells = [dice.sample(words, 3) for _ in range(count)]
    table = Table(*(column[0] for column in cells), title="t")
    for column in table.columns:
        column.justify = dice.choice(["left", "right"])
        column.no_wrap = dice.random() < 0.2
    for row in zip(*(column[1:] for column in cells), strict=True):
        table.add_row(*row)
    return table, "t" + "".join(text for column in cells for text in column)


def test_nothing_is_cut_at_any_width() -> None:
    dice = random.Random(3)
    for width in range(20, 160, 3):
        for terminal in (True, False):
            table, said = drawn(dice)
            shown = printed(table, console(width, terminal=terminal))
            assert letters(shown) == letters(said), (width, shown)
            assert not terminal or max(map(len, shown.splitlines())) <= width


def test_a_pipe_is_as_wide_as_the_words_are() -> None:
    table = Table(*(f"model-number-{i}" for i in range(20)))
    table.add_row(*["405,853,388,800 parameters"] * 20)
    shown = printed(table, console(140, terminal=False))
    assert shown.count("405,853,388,800") == 20 and shown.count("model-number-") == 20


def test_numbers_keep_their_units_and_the_frame_goes_before_a_word_is_broken() -> None:
    at = plan.over("llama-3-8b", "50GB/s,2us", tensor=8, ranks=16, flops="990TF", bandwidth="3.35TB/s")
    framed = {80: "┏", 74: " "}
    for width, begins in framed.items():
        shown = console(width)
        tables = [part for part in parts(at, shown) if isinstance(part, Table)]
        assert len(tables) == 3
        layouts = printed(tables[1], shown)
        assert layouts.splitlines()[0].startswith(begins), layouts
        for text in ("180 MiB", "212 MiB", "1.27 ms", "activations", "all-reduces)", "(fastest)"):
            assert text in layouts, (width, text)
    table = Table("a", "b")
    table.columns[1].justify = "right"
    table.add_row("twenty-letters-a-word and more", "123 GiB")
    assert "123 GiB" in printed(table, console(31))  # rather without the frame


def test_a_table_that_has_room_stays_as_it_is() -> None:
    table = Table("a", "b")
    table.add_row("1 2", "3 4")
    fit(table, console(80))
    assert [column.width for column in table.columns] == [None, None] and table.box is not None


def test_a_plan_is_printed_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """All of it: the tables, the chart and the remarks."""
    output.put(plan.of("llama-3-8b"))
    shown = capsys.readouterr().out
    for text in ("What attention costs", "Projections", "cache against context", "card: 32 query heads"):
        assert text in shown


TITLES = ("the effect of each of the heads on a text", "what its numbers are, in more words than a table is wide")


def narrow() -> Table:
    table = Table("a", "b", title=TITLES[0], caption=TITLES[1])
    table.add_row("1", "2")
    return table


def test_a_title_and_a_caption_take_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    """They were wrapped to the width of their table, which here is nine characters."""
    output.put(narrow())
    shown = capsys.readouterr().out.splitlines()
    assert (shown[0], shown[-1]) == TITLES
    assert max(map(len, shown[1:-1])) == 9


def test_a_title_is_wrapped_to_a_terminal_and_not_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for terminal in (True, False):
        shown = console(20, terminal=terminal)
        monkeypatch.setattr(output, "console", lambda shown=shown: shown)
        output.put(narrow())
        assert isinstance(shown.file, io.StringIO)
        text = re.sub(r"\x1b\[[0-9;]*m", "", shown.file.getvalue())
        title = text[: text.index("┏")].splitlines()
        assert " ".join(" ".join(title).split()) == TITLES[0]
        assert (max(map(len, title)) <= 20) == terminal and (len(title) == 1) != terminal


@pytest.mark.parametrize("printed", [str, output.put])
def test_results_print_their_titles_in_one_way(printed: object, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan, a trace, and a look's results: as text, and by a command."""
    from headwise import look
    from headwise.nn.hooks.trace import trace_shape
    from headwise.testing.constructed import constructed

    model, _ = constructed([["self", "previous-token"], ["broad", "induction"]])
    ids = model.sample(41)
    titled = {
        "m: loss ": look.importance(model, ids, by=("gradient", "zero"), name="m"),
        "rank correlation between criteria: gradient and zero ": look.importance(
            model, ids, by=("gradient", "zero"), name="m"
        ),
        "m: heads off by zero, 41 tokens": look.ablate(model, ids, [(0, 1)], name="m"),
        "m: heads that do the same, 41 tokens, distance at most 0.1": look.redundancy(model, ids, name="m"),
        "m: what heads read of earlier ones": look.circuits(model, ids, name="m"),
        "What attention costs": plan.of("llama-3-8b"),
        "Multi-head attention, stage by stage": trace_shape(32, 4),
    }
    for title, result in titled.items():
        if printed is str:
            lines = str(result).splitlines()
        else:
            output.put(result)
            lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith(title) for line in lines), (title, lines[:4])
