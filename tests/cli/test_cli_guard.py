"""How a run ends: what an exception is called, and of several processes which one speaks and what the others do."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from command_line import CliRunner

from headwise import cli
from headwise.cli import errors as guard
from headwise.cli.options import ranks as several

pytestmark = pytest.mark.unchecked


class Ended(BaseException):
    """What stands for the end of this process."""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)


def ranked(monkeypatch: pytest.MonkeyPatch, size: str, rank: str = "0", local: str = "0") -> None:
    for name, value in (("WORLD_SIZE", size), ("RANK", rank), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, value)


def test_how_many_there_are_and_who_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (several.process_count(), several.is_first(), several.own_device("cuda")) == (1, True, "cuda")
    for size, rank, speaks in (("1", "1", True), ("2", "0", True), ("2", "1", False), ("12", "10", False)):
        ranked(monkeypatch, size, rank)
        assert (several.process_count(), several.is_first()) == (int(size), speaks)
    for size in ("abc", "\uff12", "2" * 10, ""):
        ranked(monkeypatch, size)
        assert several.process_count() == 1, "which `check` refuses"
        with pytest.raises(typer.BadParameter, match=r"^WORLD_SIZE is a whole number of at least 1, as torchrun sets"):
            several.check()


def test_a_rank_beyond_the_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, rank in (("2", "2"), ("3", "12")):
        ranked(monkeypatch, size, rank)
        with pytest.raises(typer.BadParameter, match=rf"less than WORLD_SIZE.*RANK = {rank}, WORLD_SIZE = {size}; "):
            several.check()
    for size, rank in (("3", "2"), ("1", "5")):  # one alone has no others to be numbered with
        ranked(monkeypatch, size, rank)
        several.check()


def test_least_numbers_and_what_is_shown_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked(monkeypatch, "1")
    several.check()
    for name, said in (("WORLD_SIZE", "0"), ("LOCAL_RANK", "x"), ("RANK", "y" * 99)):
        ranked(monkeypatch, "1")
        monkeypatch.setenv(name, said)
        with pytest.raises(typer.BadParameter) as caught:
            several.check()
        assert caught.value.message.startswith(name)
        assert caught.value.message.endswith(f"; got {said[:40]!r}; unset it")


def test_each_process_has_a_gpu_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked(monkeypatch, "8", "6", "2")
    names = ("cuda", "cuda:1", "cpu", "mps")
    assert [several.own_device(name) for name in names] == ["cuda:2", "cuda:1", "cpu", "mps"]
    ranked(monkeypatch, "1", "0", "2")
    assert several.own_device("cuda") == "cuda"


def test_the_end_closes_the_group_or_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch, ended: None) -> None:
    """After a fault others may be gone."""
    import headwise.distributed.workers

    left: list[int] = []
    monkeypatch.setattr(headwise.distributed.workers, "close_group", lambda: left.append(1))
    several.close(2)  # alone: nothing to close
    ranked(monkeypatch, "2")
    for code in (None, 0):
        several.close(code)
    assert left == [1, 1]
    for said, code in ((1, 1), (2, 2), (130, 130), ("text", 1)):
        with pytest.raises(Ended) as caught:
            several.close(said)
        assert caught.value.args == (code,)
    monkeypatch.delitem(sys.modules, "headwise.distributed.workers")
    several.close(2)  # no group was made
    assert left == [1, 1]


def test_what_an_exception_is_called() -> None:
    made = RuntimeError("Error calling __set_name__")
    made.__cause__ = KeyboardInterrupt()
    memory = type("OutOfMemoryError", (RuntimeError,), {})
    cases: list[tuple[BaseException, str, int]] = [
        (KeyboardInterrupt(), "interrupted", 130),
        (typer.Abort(), "interrupted", 130),
        (made, "interrupted", 130),
        (PermissionError("not you"), "not you", 2),
        (PermissionError(13, "no", "a"), "a: no; check its permissions, and those of its folder", 2),
        (OSError("a disk"), "a disk", 2),
        (OSError(), "internal error: OSError: no message; HEADWISE_DEBUG=1 shows the traceback", 1),
        (ValueError("a value"), "a value", 2),
        (memory("x"), "not enough memory; give a shorter text, or a smaller --dtype", 1),
        (type("Odd", (memory,), {})("x"), "not enough memory; give a shorter text, or a smaller --dtype", 1),
        (KeyError("k" * 300), f"internal error: KeyError: '{'k' * 199}; HEADWISE_DEBUG=1 shows the traceback", 1),
        (typer.BadParameter("our words"), "our words", 2),
        (typer.BadParameter("their words", param_hint="--x"), "Invalid value for --x: their words", 2),
    ]
    for error, text, code in cases:
        assert guard.message_of(error) == (text, code), repr(error)


def test_an_end_that_was_ordered_and_an_interrupt_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while a checkpoint is written is a SystemExit; and an interrupt shows no traceback, asked for or not."""
    made = RuntimeError("Error calling __set_name__")
    made.__cause__ = KeyboardInterrupt()
    cases = [(SystemExit(143), "", 143, ""), (made, "1", 130, "headwise: interrupted\n")]
    for error, debug, code, text in cases:
        monkeypatch.setenv("HEADWISE_DEBUG", debug)

        def fail(*_: Any, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(cli.look, "look_at", fail)
        result = CliRunner().invoke(cli.app, ["look"])
        assert (result.exit_code, result.stderr) == (code, text), repr(error)


def test_a_message_is_out_before_the_end_whatever_the_stream_holds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that calls the command and ends by `os._exit`, say."""
    there = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(there), encoding="utf-8"))
    with pytest.raises(SystemExit):
        guard._fail("a mistake", 2)
    assert there.getvalue() == b"headwise: a mistake\n"


def test_a_long_message_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for length, said in ((600, "x" * 600), (601, "x" * 600 + "... (601 characters)")):
        with pytest.raises(SystemExit):
            guard._fail("x" * length, 2)
        assert capsys.readouterr().err == f"headwise: {said}\n"


def test_what_stands_in_for_a_closed_stream_keeps_its_number_when_it_is_replaced() -> None:
    """Else the next file that is opened would get the number of stdout, and what is printed would run into it."""
    code = "import os, sys; from headwise.cli import errors; errors.open_streams(); sys.stdout = None; os.fstat(1)"
    line = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(line, stderr=-1, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_parser_shows_the_value_that_it_refuses() -> None:
    """Newer versions of Typer read numbers with pydantic, whose errors have the values."""
    for said, shown in (("abc", "'abc'"), ("x" * 58, repr("x" * 58)), ("x" * 59, f"'{'x' * 56}...")):
        refusal = typer.BadParameter("no number", param_hint="--length")
        refusal.__cause__ = ValueError()
        refusal.__cause__.errors = lambda said=said: [{"input": said}, {"input": "other"}]  # type: ignore[attr-defined]
        assert guard.message_of(refusal) == (f"Invalid value for --length: no number; got {shown}", 2)


@contextlib.contextmanager
def first(text: str) -> Iterator[bool]:
    yield False


def test_one_process_says_what_all_have_to(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(several, "print_once", first)
    with pytest.raises(SystemExit) as caught:
        guard._fail("a mistake", 2)
    assert caught.value.code == 2 and capsys.readouterr().err == ""


def test_what_fails_in_one_process_fails_in_all_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input travels as a ValueError with its message; a defect as itself, so that its traceback can be shown."""

    class Others:
        def together(self, work: Callable[[], Any]) -> Any:
            return "others", work()

    def fail(error: Exception) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    assert guard.together(lambda: 5) == 5
    monkeypatch.setattr(several, "processes", Others)
    assert guard.together(lambda: 5) == 5, "alone it asks nobody"
    ranked(monkeypatch, "2")
    assert guard.together(lambda: 5) == ("others", 5)
    with pytest.raises(ValueError, match=r"^a: no; check its permissions, and those of its folder$"):
        guard.together(fail(PermissionError(13, "no", "a")))
    with pytest.raises(ValueError, match=r"^our words$"):
        guard.together(fail(typer.BadParameter("our words")))
    with pytest.raises(KeyError):
        guard.together(fail(KeyError("k")))


def test_leaving_ends_as_was_said(monkeypatch: pytest.MonkeyPatch, ended: None) -> None:
    codes: list[object] = []
    monkeypatch.setattr(several, "close", codes.append)
    for code in (0, 2, None):
        with pytest.raises(SystemExit) as caught:
            guard.exit_process(SystemExit(code))
        assert caught.value.code == code
    with pytest.raises(Ended) as killed:
        guard.exit_process(SystemExit(130))
    assert killed.value.args == (130,) and codes == [0, 2, None, 130]


def test_within_another_program_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer's own `standalone_mode=False`: exceptions come out as they are."""
    command = typer.main.get_command(cli.app)
    with pytest.raises(typer.BadParameter.__mro__[2], match="No such option"):
        command.main(["plan", "--nonsense"], standalone_mode=False)
    with pytest.raises(SystemExit) as caught:
        command.main(["plan", "--nonsense"])
    assert caught.value.code == 2
