"""Load the model of a command, without warnings and progress bars of other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from headwise.extras import missing_extra

TINY = "tiny"
"""The name of the packaged model; a folder of this name in the working directory has priority."""


def folder_of(name: str | None) -> str | None:
    """Return the folder of the packaged model for its name, and every other name as it is."""
    if name != TINY or os.path.isdir(TINY):
        return name
    from headwise import models

    return str(models.tiny_path())


MODELS = "A checkpoint folder, a hub name, or tiny (the model in the package)."
RequiredModel = Annotated[str, typer.Argument(help=MODELS, callback=folder_of)]
ModelArgument = Annotated[str | None, typer.Argument(help=MODELS, callback=folder_of, show_default=TINY)]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, float16 or float64.", show_default="float32 on cpu, else the files' own"),
]


def load(
    model: str | None,
    device: str,
    dtype: str | None,
    show: Callable[[str], object],
    command: str,
    *,
    any_input: bool = False,
) -> Any:
    """Return the model of a folder or name, or the packaged model; `show` is called with each step."""
    show("loading the libraries")
    quiet(command)
    from headwise import hf, models

    show("reading the model")
    packaged = model is None or model == str(models.TINY)
    loaded = hf.load(models.tiny_path() if model is None else model, device=device, dtype=dtype, any_input=any_input)
    return replace(loaded, name="headwise tiny") if packaged else loaded


def quiet(command: str) -> None:
    """Silence the warnings and progress bars of other libraries."""
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    warnings.simplefilter("ignore")
    try:
        import huggingface_hub.utils
        import transformers
    except ImportError as error:
        raise missing_extra(command, "hf", error) from None

    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
