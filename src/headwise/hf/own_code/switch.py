"""Switching of models with their own attention code to headwise and back.

Their classes keep their code. While the config of a switched model contains the name headwise, calls of the modules in
`architectures.OWN_ATTENTION` run through `OwnAttention` (`tracer.py`), and a few methods are replaced
(`replacements.py`). With any other name, they run as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.own_attention import Switched, family_of, has_own_attention, is_switched, methods_of
from . import replacements as positions
from .tracer import OwnAttention, asks_for_weights

_CONFIG = "_headwise_config"
_PREPARED = "_prepared_for_headwise"


def switch(model: PreTrainedModel, name: str) -> None:
    """Prepare every part of a model whose config contains `name` to run on headwise; other parts do not change."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and family_of(type(part)) is not None:
            if part.config._attn_implementation == name:
                part.config._attn_implementation_internal = Switched(name)
            for module in part.modules():
                if methods_of(type(module)) is not None:
                    _prepare(type(module))
                    vars(module)[_CONFIG] = part.config


def _runs_here(module: nn.Module) -> bool:
    config = vars(module).get(_CONFIG)
    return config is not None and is_switched(config)


def _prepare(cls: type[nn.Module]) -> None:
    """Wrap the calls of a class so that they check which attention their model runs on."""
    if hasattr(cls, _PREPARED):
        return
    forms = {name: getattr(positions, form) for name, form in (methods_of(cls) or {}).items()}
    theirs = cls.__call__
    ours = partial(forms.pop("__call__"), theirs) if "__call__" in forms else theirs

    @wraps(theirs)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _runs_here(self):
            return theirs(self, *args, **kwargs)
        return _run(ours, self, *args, **kwargs) if attends else ours(self, *args, **kwargs)

    attends = has_own_attention(cls)
    if attends or ours is not theirs:
        cls.__call__ = __call__  # type: ignore[method-assign]  # forward is replaced module by module by others
    for name, form in forms.items():
        setattr(cls, name, _either(getattr(cls, name), form))
    setattr(cls, _PREPARED, True)


@torch.compiler.disable
def _run(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's own code on headwise's attention; compiled code calls this function without tracing it."""
    wanted = asks_for_weights(type(module).forward, args, kwargs)
    return OwnAttention(module, wanted).run(partial(call, module), *args, **kwargs)


def _either(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs) if _runs_here(self) else theirs(self, *args, **kwargs)

    return method
