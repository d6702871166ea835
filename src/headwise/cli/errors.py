"""How a run ends: in its result, or in one line and an exit code; never in a traceback that nobody asked for."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import typer
from typer.core import TyperGroup

from headwise.extras import MissingExtra

from .options import ranks as several

T = TypeVar("T")
DEFECT, BAD_INPUT, INTERRUPTED = 1, 2, 130
TRACEBACK = "HEADWISE_DEBUG"

# Typer keeps click to itself in newer versions, so the class is taken from where it certainly is.
ClickException: Any = typer.BadParameter.__mro__[2]


class FileEnded(Exception):
    """Stands for an EOFError, which Typer takes for the end of a prompt: it would say that the user interrupted."""


class OneLine(TyperGroup):
    """The group of commands; turns every mistake into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        several.check()
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise FileEnded from error

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line; end the process unless ``standalone_mode`` is off, as Typer's own does."""
        ends = extra.pop("standalone_mode", True)
        extra["standalone_mode"] = False
        if not ends:
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **extra)
            sys.stdout.flush()  # what cannot be written shows here, not while Python winds up
        except (SystemExit, GeneratorExit):
            raise
        except BrokenPipeError:  # who read our output has gone (``headwise look --json | head``): leave without a word
            sys.exit(DEFECT)
        except BaseException as error:  # other libraries' too: a panic of the tokenizers is no Exception
            message, code = message_of(error)
            if os.environ.get(TRACEBACK) and code != INTERRUPTED and not isinstance(error, ClickException):
                raise
            _fail(message, code)
        if code == INTERRUPTED:
            _fail("interrupted", code)
        sys.exit(code if isinstance(code, int) else 0)


def message_of(error: BaseException) -> tuple[str, int]:
    """Return what the user is told of an exception, and the exit code."""
    if isinstance(error, ClickException):
        return _refusal(error), BAD_INPUT
    if isinstance(error, FileEnded) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, KeyboardInterrupt | typer.Abort) or isinstance(error.__cause__, KeyboardInterrupt):
        # Python itself raises a RuntimeError from what falls into the making of a class (__set_name__).
        return "interrupted", INTERRUPTED
    if isinstance(error, MissingExtra):
        return str(error), BAD_INPUT
    if _out_of_memory(error):
        return "not enough memory; give a shorter text, or a smaller --dtype", DEFECT
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check its permissions, and those of its folder", BAD_INPUT
    if isinstance(error, ValueError | OSError) and str(error):
        return str(error), BAD_INPUT
    first = (str(error).strip().splitlines() or ["without a word"])[0]
    return f"a defect: {type(error).__name__}: {first[:200]}; {TRACEBACK}=1 shows where", DEFECT


def _refusal(error: Any) -> str:
    """Our own words as they are, without "Invalid value"; the parser's, with the value that they leave out."""
    text: str = error.format_message()
    if isinstance(error, typer.BadParameter) and error.param is None and error.param_hint is None:
        return str(error.message)
    mistakes = getattr(error.__cause__, "errors", None)  # pydantic's, which newer versions of Typer read numbers with
    values = [repr(one["input"]) for one in mistakes()] if callable(mistakes) else []
    return "; got ".join([text, *(value if len(value) <= 60 else f"{value[:57]}..." for value in values[:1])])


def together(work: Callable[[], T]) -> T:
    """What `work` gives here, once all processes have done theirs; where one fails, all do, in the same words."""
    if several.started() < 2:
        return work()

    def run() -> T:
        try:
            return work()
        except Exception as error:
            message, code = message_of(error)
            if code != BAD_INPUT:
                raise
            raise ValueError(message) from error

    return several.processes().together(run)


def _out_of_memory(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}  # torch is not imported for this
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _fail(message: str, code: int) -> NoReturn:
    from headwise.files.text import visible

    with several.said_once(message) as first, contextlib.suppress(OSError):  # where stderr is full or closed,
        if first:  # the exit code tells
            print(f"headwise: {visible(message.strip(), limit=600)}", file=sys.stderr, flush=True)
    sys.exit(code)


# --- the streams ------------------------------------------------------------------------------------------------------


def open_streams() -> None:
    """Open what is closed of stdin, stdout and stderr, onto the null device.

    Python has None where a stream is closed (``headwise look >&-``), and the next file that is opened would get its
    number, so that what is printed would run into a report. A terminal that cannot show a letter gets its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def leave(end: SystemExit) -> NoReturn:
    """End the process with that code; drop what cannot be written any more, for Python would print a fault."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    several.end(end.code)
    if end.code == INTERRUPTED:
        # An interrupt that fell into an exec() of a library makes Python kill itself at its end, handled or not.
        os._exit(INTERRUPTED)
    raise end
