"""Exit handling: print every error as one line and set the exit code. HEADWISE_DEBUG=1 shows the traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import typer
from typer.core import TyperGroup

from headwise.extras import MissingExtra

from .options import ranks

T = TypeVar("T")
DEFECT, BAD_INPUT, INTERRUPTED = 1, 2, 130
TRACEBACK = "HEADWISE_DEBUG"

# Newer versions of Typer have their own copy of click, so the class is taken from Typer's own exception.
ClickException: Any = typer.BadParameter.__mro__[2]


class FileEnded(Exception):
    """A replacement for EOFError, which Typer treats as the end of a prompt and reports as an interrupt."""


class OneLine(TyperGroup):
    """The group of commands; it reports every error as one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raise BadParameter if torchrun's variables are invalid."""
        ranks.check()
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise FileEnded from error

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line and end the process, or return if ``standalone_mode`` is off, as in Typer."""
        ends = extra.pop("standalone_mode", True)
        extra["standalone_mode"] = False
        if not ends:
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **extra)
            sys.stdout.flush()  # a write error must appear here, not while Python shuts down
        except (SystemExit, GeneratorExit):
            raise
        except BrokenPipeError:  # the reader of stdout is gone (``headwise look --json | head``): exit silently
            sys.exit(DEFECT)
        except BaseException as error:  # a panic of the tokenizers library is not an Exception
            message, code = message_of(error)
            if os.environ.get(TRACEBACK) and code != INTERRUPTED and not isinstance(error, ClickException):
                raise
            _fail(message, code)
        if code == INTERRUPTED:
            _fail("interrupted", code)
        sys.exit(code if isinstance(code, int) else 0)


def message_of(error: BaseException) -> tuple[str, int]:
    """Return the message for the user and the exit code of an exception."""
    if isinstance(error, ClickException):
        return _refusal(error), BAD_INPUT
    if isinstance(error, FileEnded) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, KeyboardInterrupt | typer.Abort) or isinstance(error.__cause__, KeyboardInterrupt):
        # Python raises a RuntimeError from an interrupt while a class is created (__set_name__).
        return "interrupted", INTERRUPTED
    if isinstance(error, MissingExtra):
        return str(error), BAD_INPUT
    if _out_of_memory(error):
        return "not enough memory; give a shorter text, or a smaller --dtype", DEFECT
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check its permissions, and those of its folder", BAD_INPUT
    if isinstance(error, ValueError | OSError) and str(error):
        return str(error), BAD_INPUT
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"internal error: {type(error).__name__}: {first[:200]}; {TRACEBACK}=1 shows the traceback", DEFECT


def _refusal(error: Any) -> str:
    """Return headwise's own message without "Invalid value", or the parser's message with the value added."""
    text: str = error.format_message()
    if isinstance(error, typer.BadParameter) and error.param is None and error.param_hint is None:
        return str(error.message)
    mistakes = getattr(error.__cause__, "errors", None)  # newer versions of Typer parse numbers with pydantic
    values = [repr(one["input"]) for one in mistakes()] if callable(mistakes) else []
    return "; got ".join([text, *(value if len(value) <= 60 else f"{value[:57]}..." for value in values[:1])])


def together(work: Callable[[], T]) -> T:
    """Return the result of `work` after all processes finished it; if one fails, all fail with the same message."""
    if ranks.process_count() < 2:
        return work()

    def run() -> T:
        try:
            return work()
        except Exception as error:
            message, code = message_of(error)
            if code != BAD_INPUT:
                raise
            raise ValueError(message) from error

    return ranks.processes().together(run)


def _out_of_memory(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}  # by name, to avoid importing torch
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _fail(message: str, code: int) -> NoReturn:
    from headwise.files.text import visible

    with ranks.print_once(message) as first, contextlib.suppress(OSError):  # if stderr is full or closed,
        if first:  # the exit code is enough
            print(f"headwise: {visible(message.strip(), limit=600)}", file=sys.stderr, flush=True)
    sys.exit(code)


# --- the streams ------------------------------------------------------------------------------------------------------


def open_streams() -> None:
    """Open the null device for each of stdin, stdout and stderr that is closed, and escape unprintable characters.

    Python sets a closed stream (``headwise look >&-``) to None, and the next opened file would get its descriptor, so
    that printed text would end up in a report. Characters that stdout or stderr cannot encode are escaped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def exit_process(end: SystemExit) -> NoReturn:
    """End the process with the exit code; output that cannot be written is dropped, or Python would print an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    ranks.close(end.code)
    if end.code == INTERRUPTED:
        # After an interrupt inside an exec() of a library, Python kills itself at exit even if it was handled.
        os._exit(INTERRUPTED)
    raise end
