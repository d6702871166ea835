"""Detection of the parts of a model that use transformers' attention interface, by their classes, not by names."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import ModelError
from .architectures import CROSS_ATTENTION, OUTSIDE, SPARSE, SUPPORTED_EXAMPLES
from .own_attention import MARK, family_of, has_own_attention, is_switched

NAME = "headwise"
"""The name that `headwise.hf` registers for its attention: `attn_implementation="headwise"`."""

_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
_OWN = "its attention is code of its own"


def require_interface(model: type[PreTrainedModel], model_type: str) -> None:
    """Raise ModelError unless a model class uses transformers' attention interface or is in `OWN_ATTENTION`."""
    reason = OUTSIDE.get(model_type) or SPARSE.get(model_type)
    if reason is None and (model._can_set_attn_implementation() or family_of(model) is not None):
        return
    raise ModelError(outside_text(model.__name__, model_type, reason or _OWN))


def require_consulted(config: Any) -> None:
    """Raise ModelError if the modeling file of a config has its own attention code and the model was not switched.

    The first mask of a model is checked here, because the name can be written to its config without transformers'
    checks.
    """
    if not (_consults(type(config).__module__) or is_switched(config)):
        name, model_type = type(config).__name__.removesuffix("Config"), config.model_type
        if family_of(type(config)) is not None:
            raise ModelError(
                f"{name} (model_type {model_type!r}): {NAME!r} stands in its config, and its attention was not switched"
                f' with it; call model.set_attn_implementation("{NAME}")'
            )
        raise ModelError(outside_text(name, model_type, OUTSIDE.get(model_type, _OWN)))


@lru_cache(maxsize=1024)
def _consults(module: str) -> bool:
    """Return whether a config's modeling file uses the interface or defines no attention, by its source text."""
    source = source_of(sys.modules.get(module.replace("configuration_", "modeling_")))
    return _ATTENTION_CLASS.search(source) is None or MARK in source


def source_of(code: type | ModuleType | None) -> str:
    """Return the source text of a class or module; empty if it has none, as a class that is made at run time."""
    try:
        return inspect.getsource(code)  # type: ignore[arg-type]  # of None it raises TypeError
    except (OSError, TypeError):
        return ""


def title(model: PreTrainedModel) -> str:
    """Return the class and model_type of a model for error messages."""
    return f"{type(model).__name__} (model_type {model.config.model_type!r})"


def outside_text(model: str, model_type: str, reason: str) -> str:
    """Return the one-line error message for a model that is not on the interface."""
    return (
        f"{model} (model_type {model_type!r}) is not on transformers' attention interface, so its heads cannot be seen "
        f'or run by headwise: {reason}; use attn_implementation="eager" with output_attentions=True in transformers, '
        f"or a model on the interface, such as {SUPPORTED_EXAMPLES}"
    )


@lru_cache(maxsize=4096)
def dispatches(cls: type[nn.Module]) -> bool:
    """Return whether a module class calls the attention interface, by the source of the class that defines `forward`.

    transformers also decides by the source text (`_can_set_attn_implementation`), but of the whole file instead of one
    class.
    """
    for base in cls.__mro__:
        if base is nn.Module:
            return False
        if "forward" not in vars(base):
            continue
        source = source_of(base)
        if MARK in source:
            return True
        if "super().forward" not in source:
            return False
    return False


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose attention headwise can run (by the interface or `OWN_ATTENTION`), by qualified name."""
    return {
        name: module
        for name, module in model.named_modules()
        if dispatches(module.__class__) or has_own_attention(module.__class__)
    }


def caches_memory(model: nn.Module) -> bool:
    """Return whether cross-attention of a model caches encoder keys (`EncoderDecoderCache.cross_attention_cache`)."""
    return any(
        CROSS_ATTENTION.search(name) is not None and _keeps_memory(module.__class__)
        for name, module in model.named_modules()
    )


@lru_cache(maxsize=4096)
def _keeps_memory(cls: type[nn.Module]) -> bool:
    return "cross_attention_cache" in source_of(cls)


def refuse_own_code(model: PreTrainedModel, what: str) -> None:
    """Raise ModelError if a module of the model has its own attention code, which `what` does not support."""
    own = next((type(module).__name__ for module in model.modules() if has_own_attention(type(module))), None)
    if own is not None:
        raise ModelError(
            f"{title(model)}: {own} computes attention in code of its own, and {what} is for models that call "
            f"transformers' attention interface, such as {SUPPORTED_EXAMPLES}"
        )


def unseen_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with "Attention" in their class name that headwise does not run, neither whole nor in part."""
    seen = attention_modules(model)

    def related(name: str) -> bool:
        return any(name == other or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in seen)

    unseen = {
        name: module
        for name, module in model.named_modules()
        if name
        and re.search(r"Attention(?!\w*Output)", type(module).__name__)  # Output layers of attention do not count.
        and not related(name)
        and any(True for _ in module.parameters())
    }
    return {name: module for name, module in unseen.items() if not any(name.startswith(f"{up}.") for up in unseen)}


def configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return every config and sub-config of the model's modules, each once.

    In encoder-decoders, the encoder and the decoder have copies, so a write to `model.config` alone changes neither.
    """

    def walk(config: Any) -> Iterator[PreTrainedConfig]:
        if isinstance(config, PreTrainedConfig):
            yield config
            for key in getattr(config, "sub_configs", None) or {}:
                yield from walk(getattr(config, key, None))

    found = (config for module in model.modules() for config in walk(getattr(module, "config", None)))
    return list({id(config): config for config in found}.values())
