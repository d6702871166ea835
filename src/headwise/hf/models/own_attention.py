"""Lookup of models with their own attention code that headwise can run (`architectures.OWN_ATTENTION`)."""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache
from typing import Any

from torch import nn

from .architectures import OWN_ATTENTION

MARK = "ALL_ATTENTION_FUNCTIONS"
"""The name in the source of a class that calls transformers' attention interface."""


class Switched(str):
    """The implementation name in the config of a model whose attention modules `switch` has prepared."""


def family_of(cls: type) -> str | None:
    """Return the key in `OWN_ATTENTION` of a model or config class, by the file of the class or of one of its bases."""
    return next((family for base in cls.__mro__ if (family := _family(base.__module__)) is not None), None)


@lru_cache(maxsize=4096)
def _family(module: str) -> str | None:
    path = module.split(".")
    family = path[3].partition("_")[2] if path[:2] == ["transformers", "models"] and len(path) == 4 else ""
    return family if family in OWN_ATTENTION and _is_as_known(family, path[2]) else None


@lru_cache(maxsize=256)
def _is_as_known(family: str, folder: str) -> bool:
    """Return whether transformers has the classes and methods of a row, and they do not use the interface."""
    file = importlib.import_module(f"transformers.models.{folder}.modeling_{family}")
    classes = {getattr(file, name, None): methods for name, methods in OWN_ATTENTION[family].items()}
    return all(
        inspect.isclass(cls) and MARK not in inspect.getsource(cls) and all(hasattr(cls, method) for method in methods)
        for cls, methods in classes.items()
    )


def methods_of(cls: type) -> dict[str, str] | None:
    """Return the methods of a class that `OWN_ATTENTION` replaces; None for a class that is not in `OWN_ATTENTION`."""
    family = family_of(cls)
    if family is None or not issubclass(cls, nn.Module):
        return None
    rows = [OWN_ATTENTION[family][base.__name__] for base in cls.__mro__ if base.__name__ in OWN_ATTENTION[family]]
    return rows[0] if rows else None


def has_own_attention(cls: type) -> bool:
    """Return whether a module class has its own attention code that headwise can run."""
    return methods_of(cls) is not None and "Attention" in cls.__name__


def is_switched(config: Any) -> bool:
    """Return whether a config belongs to a model that `switch` has prepared and that now runs on headwise."""
    return isinstance(getattr(config, "_attn_implementation", None), Switched)
