"""The command line: arguments to the functions of the library, and their results to the terminal.

Whatever a user gets wrong ends in one line on stderr and exit code 2. What comes from outside (paths, names, error
texts) is printed through `headwise.report.escape.visible`, so it cannot steer a terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    import rich.console

BAD_INPUT, INTERRUPTED = 2, 130
MAX_FILE = 64_000_000
REPORT = "headwise-report.html"

# Typer keeps click to itself in newer versions, so the class is taken from where it certainly is.
ClickException: Any = typer.BadParameter.__mro__[2]


class OneLine(TyperGroup):
    """The group of commands; turns every mistake into one line and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs a command line; ends the process unless ``standalone_mode`` is off, as Typer's own does."""
        ends = extra.pop("standalone_mode", True)
        extra["standalone_mode"] = False
        if not ends:
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **extra)
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except ClickException as error:
            _fail(error.format_message())
        except BrokenPipeError:
            _leave_the_pipe()
        except (ValueError, OSError) as error:
            _fail(str(error))
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            _fail("not enough memory; give a shorter text, or a smaller --dtype", code=1)
        if code == INTERRUPTED:
            _fail("interrupted", code=INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=OneLine,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The command ``headwise``."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a letter gets its number instead
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="headwise")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # An interrupt that fell into an exec() of a library makes Python kill itself at its end, handled or not.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


@app.callback(invoke_without_command=True, epilog="Example: headwise look --text 'The cat sat. The cat slept.'")
def headwise(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Multi-head attention, head by head."""
    if version:
        from headwise import __version__

        print(f"headwise {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command(epilog="Example: headwise look path/to/checkpoint --file notes.txt --out report.html")
def look(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint folder or hub name.", show_default="the model in the package")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text to read.", show_default="a short program")] = None,
    file: Annotated[str | None, typer.Option(help="A text file to read instead (UTF-8); - is stdin.")] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16 or float64.", show_default="float32 on cpu, else the files' own"),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The report to write.", show_default=f"{REPORT}; none with --json")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """See what each attention head of a model does on a text: a table here, and a report to open in a browser."""
    given = _read_text(text, file)
    from headwise import report

    destination = out if out is not None else None if as_json else REPORT
    if destination is not None:
        report.check_destination(destination)
    result = _look(model, given, device, dtype)
    size = None if destination is None else report.write(result, destination)
    if as_json:
        print(result.to_json())
        return
    _print_heads(result)
    if size is not None and destination is not None:
        print(f"{report.escape.visible(destination)} ({size / 1000:,.0f} kB): open it in a browser")


@app.command(epilog="Example: headwise trace --d-model 512 --num-heads 4 --batch 4 --length 16")
def trace(
    d_model: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="Number of query heads.")] = None,
    num_kv_heads: Annotated[
        int | None, typer.Option(help="Number of key-value heads.", show_default="num_heads")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head.", show_default="d_model / num_heads")] = None,
    config: Annotated[str | None, typer.Option(help="A model's config.json to take the sizes from.")] = None,
    batch: Annotated[int, typer.Option(help="Number of texts.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens a text.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """See every stage of multi-head attention with its shape, the parameters, and what W_O changes."""
    sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    if config is not None:
        if any(value is not None for value in (d_model, num_heads, *sizes.values())):
            raise typer.BadParameter("--config gives all sizes; leave out --d-model, --num-heads and the like")
        from headwise.plan import read_config

        sizes = read_config(config).arguments()
    elif d_model is None or num_heads is None:
        raise typer.BadParameter("give --d-model and --num-heads, or --config")
    else:
        sizes |= {"d_model": d_model, "num_heads": num_heads}
    from headwise.nn.trace import trace_shape

    found = trace_shape(**sizes, batch=batch, length=length)
    if as_json:
        print(json.dumps(found.to_dict(), allow_nan=False))
    else:
        _console().print(found)


@app.command("plan", epilog="Example: headwise plan gpt-3 --context 2048 --batch 8 --bandwidth 3.35TB/s --flops 990TF")
def _plan(  # private, for a command has as many options as its users need, and no one calls it from Python
    configs: Annotated[
        list[str] | None,
        typer.Argument(help="A config.json, a checkpoint folder, a card, or a hub name in the local cache."),
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of a text; several, with commas.")] = "8192,131072",
    batch: Annotated[int, typer.Option(help="Texts at once.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="Numbers in the cache: bf16, fp16, fp32, fp8, int8.")] = "bf16",
    heads_plan: Annotated[str | None, typer.Option(help="A JSON file: which heads are kept, or merged.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Memory speed, such as 3.35TB/s.")] = None,
    flops: Annotated[str | None, typer.Option(help="FLOPs a second, such as 990TF.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Several configs side by side.")] = False,
    list_cards: Annotated[bool, typer.Option("--list", help="Show the cards and architectures, and leave.")] = False,
    svg: Annotated[str | None, typer.Option(help="Write the chart of cache against context here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the tables.")] = False,
) -> None:
    """See what the attention of a model costs, from its config alone: parameters, cache, operations, time."""
    from headwise import plan

    if list_cards:
        if configs or compare:
            raise typer.BadParameter("--list shows the cards; leave out the configs")
        _show(plan.known(), plan.card_list, as_json)
        return
    if not configs:
        raise typer.BadParameter("give a config, or --list to see the cards")
    if len(configs) > 1 and not compare:
        raise typer.BadParameter("several configs: add --compare to see them side by side")
    speeds = {"bandwidth": bandwidth, "flops": flops}
    lengths = plan.contexts(context)
    plans = [
        plan.of(config, context=lengths, batch=batch, kv_dtype=kv_dtype, heads_plan=heads_plan, **speeds)
        for config in configs
    ]
    if svg is not None:
        chart = plan.svg(plans)
        with open(svg, "w", encoding="utf-8") as file:
            file.write(chart)
    if compare:
        _show([one.to_dict() for one in plans], lambda _: plan.side_by_side(plans), as_json)
    else:
        _show(plans[0].to_dict(), lambda _: plans[0], as_json)


def _show(result: Any, table: Callable[[Any], Any], as_json: bool) -> None:
    """The JSON of a result, or its table."""
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        _console().print(table(result))


def _read_text(text: str | None, file: str | None) -> str:
    """The text to look at, checked; the default text where none was given."""
    if text is not None and file is not None:
        raise typer.BadParameter("give --text or --file, not both")
    if file is not None:
        where, read = f"--file {file}", _read_file(file)
    elif text is not None:
        where, read = "--text", text
    else:
        from headwise.models import default_text

        return default_text()
    if not read.strip():
        raise typer.BadParameter(f"{where}: the text is empty; give a few words at least")
    try:
        read.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{where}: the text is not valid Unicode; save it as UTF-8") from None
    return read


def _read_file(file: str) -> str:
    try:
        with open(file, "rb") if file != "-" else contextlib.nullcontext(sys.stdin.buffer) as source:
            content = source.read(MAX_FILE + 1)
    except OSError as error:
        raise typer.BadParameter(f"--file {file}: cannot be read ({error.strerror or error})") from None
    if len(content) > MAX_FILE:
        raise typer.BadParameter(f"--file {file}: more than {MAX_FILE // 1_000_000} MB; give a shorter text")
    try:
        decoded = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"--file {file}: not UTF-8 text (byte {error.start}); convert it first") from None
    if "\0" in decoded:
        raise typer.BadParameter(f"--file {file}: holds NUL bytes, so it is no text; give a text file")
    return decoded


def _look(model: str | None, text: str, device: str, dtype: str | None) -> Any:
    with _progress() as show:
        show("loading the libraries")
        _quiet()
        from headwise import hf, models
        from headwise import look as looking

        show("reading the model")
        loaded = hf.load(model if model is not None else models.tiny_path(), device=device, dtype=dtype)
        ids, tokens = loaded.encode(text)
        show("looking")
        return looking.at(
            loaded.model,
            ids,
            tokens=tokens,
            delimiters=loaded.delimiters,
            name=loaded.name if model is not None else "headwise tiny",
            progress=show,
        )


def _print_heads(result: Any) -> None:
    """The table of heads, its name harmless; without frame and with folded roles where the terminal is narrow."""
    from dataclasses import replace

    from headwise.report.escape import visible

    console = _console()
    table = replace(result, model=visible(result.model, limit=100)).table()
    if console.width < console.measure(table, options=console.options.update(width=1000)).maximum:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
        table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
    console.print(table)


def _quiet() -> None:
    """Other libraries' warnings and bars are not for this command's user."""
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    warnings.simplefilter("ignore")
    import huggingface_hub.utils
    import transformers

    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _console() -> rich.console.Console:
    """Where tables go; a pipe has no width, so nothing is cut there."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 140)


class _Show:
    """A progress bar on stderr that appears once two seconds have passed; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        console = Console(stderr=True, markup=False)
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=None)
        self.timer = threading.Timer(2.0, self.bar.start)
        self.timer.daemon = True

    def __call__(self, what: str | int, total: int | None = None) -> None:
        if isinstance(what, str):
            self.bar.update(self.task, description=what, total=total)
        else:
            self.bar.update(self.task, completed=what, total=total)


@contextlib.contextmanager
def _progress() -> Iterator[_Show]:
    show = _Show()
    show.timer.start()
    try:
        yield show
    finally:
        show.timer.cancel()
        show.timer.join()
        show.bar.stop()


def _out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _leave_the_pipe() -> NoReturn:
    """Who read our output has gone (``headwise look --json | head``): leave without a word."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def _fail(message: str, *, code: int = BAD_INPUT) -> NoReturn:
    from headwise.report.escape import visible

    print(f"headwise: {visible(message.strip(), limit=600)}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
