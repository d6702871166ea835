"""Load the model of a command, without warnings and progress bars of other libraries."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from headwise.extras import missing_extra


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
    where = model if model is not None else models.tiny_path()
    return hf.load(where, device=device, dtype=dtype, any_input=any_input)


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
