"""How the command ends: defects in one line, interrupts, streams that are closed, full or read by nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from test_cli import ENVIRONMENT, as_it_was, here, looked, refused, run, runner, tiny

from headwise import cli, plan
from headwise.cli import errors as guard

pytestmark = [pytest.mark.slow, pytest.mark.unchecked]
FIXTURES = (as_it_was, here, looked, tiny)


def in_shell(command: str, *arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """A line of shell in which "$@" is the command with its arguments; it may close or redirect what it likes."""
    line = ["sh", "-c", command, "sh", sys.executable, "-m", "headwise", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=cwd, **{"env": ENVIRONMENT, **options})


# --- defects ----------------------------------------------------------------------------------------------------------


class PanicException(BaseException):
    pass


DEFECTS = [
    (RuntimeError("a defect\nof ours"), "internal error: RuntimeError: a defect; HEADWISE_DEBUG=1 shows the traceback"),
    (
        PanicException("called `Option::unwrap()`\n" * 99),
        "internal error: PanicException: called `Option::unwrap()`; HEADWISE",
    ),
    (EOFError("Ran out of input"), "internal error: EOFError: Ran out of input"),  # Typer takes it for an interrupt
    (AssertionError(), "internal error: AssertionError: no message; HEADWISE_DEBUG=1"),
    (ValueError(), "internal error: ValueError: no message"),
    (TypeError("\x1b[2J" + "x" * 999), "internal error: TypeError: \\x1b[2J" + "x" * 196 + "; HEADWISE"),
    (RecursionError("maximum recursion depth exceeded"), "internal error: RecursionError: maximum"),
]


def failing(error: BaseException) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("error", "line"), DEFECTS, ids=lambda value: type(value).__name__)
def test_a_defect_is_one_line_and_how_to_see_more(
    error: BaseException, line: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWISE_DEBUG", raising=False)
    monkeypatch.setattr(cli.look, "look_at", failing(error))
    result = runner.invoke(cli.app, ["look"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"headwise: {line}") and len(result.stderr.splitlines()) == 1


def test_a_defect_shows_where_if_asked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWISE_DEBUG", "1")
    for error in (RuntimeError("a defect"), ValueError("a wrong value")):
        monkeypatch.setattr(cli.look, "look_at", failing(error))
        assert runner.invoke(cli.app, ["look"]).exception is error
    assert refused("look", "--nonsense"), "a mistake on the line is none of the code"
    monkeypatch.setattr(cli.look, "look_at", failing(KeyboardInterrupt()))
    assert runner.invoke(cli.app, ["look"]).exit_code == 130


def test_no_memory_is_told_in_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    refusal = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried ..."
    )
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), refusal):
        monkeypatch.setattr(cli.look, "look_at", failing(error))
        result = runner.invoke(cli.app, ["look"])
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1 and "not enough memory; give a shorter text" in result.stderr


def test_a_full_disk_is_told_in_one_line(looked: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(OSError(28, "No space left on device")))
    line = refused("look", "--out", "r.html")
    assert line == "headwise: cannot write r.html: No space left on device; free some space, or give another path"
    assert list(here.iterdir()) == []


# --- leaving early ----------------------------------------------------------------------------------------------------


def test_an_interrupt_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.look, "look_at", failing(KeyboardInterrupt()))
    result = runner.invoke(cli.app, ["look"])
    assert (result.exit_code, result.stderr) == (130, "headwise: interrupted\n")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("after", [0.4, 2.0])
def test_a_real_interrupt_leaves_nothing(after: float, tiny: Path, here: Path) -> None:
    """While Python starts, and while the model is read or looked at."""
    command = [sys.executable, "-m", "headwise", "look", "--text", "a b c " * 60]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=ENVIRONMENT, cwd=here) as process:
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    report = here / "headwise-report.html"
    if report.exists() and process.returncode in (0, -signal.SIGINT):  # it came while Python was winding up
        assert report.read_text("utf8").rstrip().endswith("</html>")
        pytest.skip("it was done before the interrupt came")
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert list(here.iterdir()) == []


def test_a_reader_that_leaves_is_no_error(here: Path) -> None:
    """While more is written than a pipe holds, and before a little is."""
    command = [sys.executable, "-m", "headwise", "plan", "--json", *["llama-3.1-405b"] * 5]
    with subprocess.Popen(command, stdout=-1, stderr=-1, cwd=here, env=ENVIRONMENT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"["
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
    assert len(json.dumps([plan.of("llama-3.1-405b").to_dict()] * 5)) > 200_000
    for option in ([], ["--json"]):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [*command[:4], "gpt2", *option], stdout=write, stderr=-1, env=ENVIRONMENT, cwd=here, timeout=60
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (1, b"")


# --- closed and full streams ------------------------------------------------------------------------------------------


def test_a_closed_stdout_is_no_error_and_nothing_runs_into_the_file(here: Path) -> None:
    """The file would get the number of stdout, and what is printed would run into it."""
    chart = plan.svg([plan.of("gpt2")])
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        done = in_shell(f'"$@" {closed}', "plan", "gpt2", "--svg", "chart.svg", cwd=here)
        assert (done.returncode, done.stderr) == (0, ""), closed
        assert (here / "chart.svg").read_text("utf8") == chart
        (here / "chart.svg").unlink()


def test_a_look_with_a_closed_stdout_writes_its_report(tiny: Path, here: Path) -> None:
    """The one run of the whole command, as it is installed, on the packaged model."""
    done = in_shell('"$@" >&-', "look", "--out", "y.html", cwd=here)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    written = (here / "y.html").read_text("utf8")
    assert written.startswith("<!doctype html>") and written.rstrip().endswith("</html>")
    assert [path.name for path in here.iterdir()] == ["y.html"]


def test_a_closed_stderr_leaves_the_exit_code(here: Path) -> None:
    for redirected in ("2>&-", "2>/dev/full"):
        done = in_shell(f'"$@" {redirected}', "plan", "no-such-model", cwd=here)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", ""), redirected


def test_a_closed_stdin_is_an_empty_text(here: Path) -> None:
    done = in_shell('"$@" <&-', "look", "--file", "-", cwd=here)
    assert done.returncode == 2 and "the text is empty" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_full_disk_behind_stdout_is_one_line(here: Path) -> None:
    line = "cannot write standard output: No space left on device; free some space, or send it elsewhere"
    for option in ([], ["--json"]):
        done = in_shell('"$@" >/dev/full', "plan", "gpt2", *option, cwd=here)
        assert (done.returncode, done.stderr) == (2, f"headwise: {line}\n")


def test_what_may_not_be_read_is_told_with_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as an errno: the tests may run as root, who may read anything, so the system's answers are made here."""
    line = "folder/x: Permission denied; check its permissions, and those of its folder"
    assert guard.message_of(PermissionError(13, "Permission denied", "folder/x")) == (line, 2)
    (here / "texts").mkdir()
    (here / "texts" / "config.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(typer.BadParameter, match="--corpus texts: no permission to read it; check its permissions"):
        cli.options.texts.check_corpus("texts")

    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ValueError, match=r"^'texts/config.json': cannot be read \(Permission denied\)$"):
        plan.read_config("texts/config.json")


def test_what_is_told_of_an_exception_of_a_stream() -> None:
    assert guard.message_of(BlockingIOError(11, "Resource temporarily unavailable"))[1] == 2


# --- terminals --------------------------------------------------------------------------------------------------------


def test_a_terminal_that_knows_only_ascii(here: Path) -> None:
    done = run("plan", "gpt2", cwd=here, env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "124,439,808" in done.stdout


def test_a_text_in_a_locale_that_knows_only_ascii(here: Path) -> None:
    """Python then hands over each byte beyond ASCII as half of a surrogate pair."""
    code = "import sys; from headwise.cli.options.texts import read_text; print(ascii(read_text(sys.argv[1], None)))"
    plain = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONUTF8": "0"}
    text = "na\u00efve \u65e5\u672c \U0001f642"
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, env=plain, timeout=60)
    assert (done.stdout, done.stderr) == (f"{text!a}\n", "")
    done = run("look", "--text", "a\udcff", cwd=here, env=plain)
    assert done.returncode == 2
    assert done.stderr == "headwise: --text: not UTF-8 text (byte 1); convert it first\n"
