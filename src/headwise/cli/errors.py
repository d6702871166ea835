"""Exit handling: print every error as one line and set the exit code. HEADWISE_DEBUG=1 shows the traceback."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from headwise.extras import MissingExtra

from .options import ranks

T = TypeVar("T")
DEFECT, BAD_INPUT, INTERRUPTED = 1, 2, 130
TRACEBACK = "HEADWISE_DEBUG"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""The errors of the system for a disk that is full or broken, and for a file that is too large."""

# Newer versions of Typer have their own copy of click, so the class is taken from Typer's own exception.
ClickException: Any = typer.BadParameter.__mro__[2]


class FileEnded(Exception):
    """A replacement for EOFError, which Typer treats as the end of a prompt and reports as an interrupt."""


class PlainFlags:
    """Help in which a flag has no type: ``--json``, not ``--json <bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the command."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(PlainFlags, TyperCommand):
    """A command."""


class OneLine(PlainFlags, TyperGroup):
    """The group of commands; it reports every error as one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raise BadParameter if torchrun's variables are invalid."""
        ranks.check()
        self.running = ctx
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
            message = with_options(message, self._options()) if code == BAD_INPUT else message
            if os.environ.get(TRACEBACK) and code != INTERRUPTED and not isinstance(error, ClickException):
                raise
            _fail(message, code)
        if code == INTERRUPTED:
            _fail("interrupted", code)
        sys.exit(code if isinstance(code, int) else 0)

    def _options(self) -> dict[str, str]:
        """Return the options of the command that ran, by the names that functions have for them."""
        command = self.commands.get(getattr(getattr(self, "running", None), "invoked_subcommand", None) or "")
        return {one.name: one.opts[0] for one in getattr(command, "params", ()) if one.opts[0].startswith("--")}


def with_options(message: str, options: Mapping[str, str]) -> str:
    """Return an error of the library with options in place of the names of arguments.

    Only what cannot be a plain word is replaced: a name at the beginning, with an underscore, or before ``=True``.

    >>> with_options("zero is a flag; add zero=True or keep_fraction", {"zero": "--zero", "keep_fraction": "--keep"})
    '--zero is a flag; add --zero or --keep'
    """
    if not options:
        return message
    every, unmistakable = ("|".join(map(re.escape, names)) for names in (options, [n for n in options if "_" in n]))
    pattern = rf"^({every})(?= is | must | \W)|\b({every})=True\b" + (
        rf"|(?<![\w.'-])({unmistakable})(?![\w='])" if unmistakable else ""
    )
    return re.sub(pattern, lambda found: options[next(filter(None, found.groups()))], message)


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
    if isinstance(error, OSError) and error.filename is None and error.errno in FULL:
        # Only a stream raises this without a name: the writers of files and folders raise a message of their own.
        return f"cannot write standard output: {error.strerror}; free some space, or send it elsewhere", BAD_INPUT
    if isinstance(error, ValueError | OSError) and str(error):
        return str(error), BAD_INPUT
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"internal error: {type(error).__name__}: {first[:200]}; {TRACEBACK}=1 shows the traceback", DEFECT


def _refusal(error: Any) -> str:
    """Return headwise's own message without "Invalid value", or the parser's message with the value and a way out."""
    text: str = error.format_message()
    if isinstance(error, typer.BadParameter) and error.param is None and error.param_hint is None:
        return str(error.message)
    context: Any = getattr(error, "ctx", None)
    if text.startswith("No such command") and text.endswith("."):
        return f"{text[:-1]}; the commands are {', '.join(context.command.commands)}"
    if hasattr(error, "possibilities") or text.startswith("Missing"):
        near = difflib.get_close_matches(
            str(getattr(error, "option_name", "")).strip("-"),
            [name.strip("-") for name in getattr(error, "possibilities", None) or ()],
        )
        meant = f" (did you mean {', '.join(f'--{name}' for name in near)}?)" if near else ""
        return f"{text.partition(' (')[0].rstrip('.')}{meant}; see {context.command_path} --help"
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
