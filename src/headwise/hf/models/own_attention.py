"""Which models compute attention in code of their own, and run on headwise all the same: `architectures.SEAMS`."""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache
from typing import Any

from torch import nn

from .architectures import SEAMS

MARK = "ALL_ATTENTION_FUNCTIONS"
"""The name by which a class calls transformers' attention interface."""


class Switched(str):
    """The name, as it stands in the config of a model whose modules of attention are prepared for it."""


def family_of(cls: type) -> str | None:
    """The row of the table for a class of models or configs, by its file or that of one it inherits from."""
    return next((family for base in cls.__mro__ if (family := _family(base.__module__)) is not None), None)


@lru_cache(maxsize=4096)
def _family(module: str) -> str | None:
    path = module.split(".")
    family = path[3].partition("_")[2] if path[:2] == ["transformers", "models"] and len(path) == 4 else ""
    return family if family in SEAMS and _is_as_known(family, path[2]) else None


@lru_cache(maxsize=256)
def _is_as_known(family: str, folder: str) -> bool:
    """Whether the installed transformers has the classes and the methods of a row, and not on its interface."""
    file = importlib.import_module(f"transformers.models.{folder}.modeling_{family}")
    classes = {getattr(file, name, None): methods for name, methods in SEAMS[family].items()}
    return all(
        inspect.isclass(cls) and MARK not in inspect.getsource(cls) and all(hasattr(cls, method) for method in methods)
        for cls, methods in classes.items()
    )


def methods_of(cls: type) -> dict[str, str] | None:
    """The methods of a class that have another form here; None for a class that the table does not name."""
    family = family_of(cls)
    if family is None or not issubclass(cls, nn.Module):
        return None
    rows = [SEAMS[family][base.__name__] for base in cls.__mro__ if base.__name__ in SEAMS[family]]
    return rows[0] if rows else None


def is_seam(cls: type) -> bool:
    """Whether a class of modules computes attention in code of its own that headwise runs."""
    return methods_of(cls) is not None and "Attention" in cls.__name__


def is_switched(config: Any) -> bool:
    """Whether a config is that of a model prepared by `switch`, and says that it runs on headwise."""
    return isinstance(getattr(config, "_attn_implementation", None), Switched)
