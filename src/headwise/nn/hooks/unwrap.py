"""Removal of wrappers around a model (adapters, data parallelism, compiled modules), and detection of split weights.

Wrappers are recognized by their attributes and not by their classes, so that no wrapper library is imported.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def unwrap(model: Any) -> Any:
    """Return the innermost model; a model without a wrapper is returned unchanged.

    Three kinds of wrapper are removed, in any order and depth: adapters (PEFT's ``get_base_model()``; the model that it
    returns has the adapters in its layers), compiled modules (``_orig_mod``), and data parallelism (a module that has
    only ``module``, as in torch, accelerate and DeepSpeed). A model with ``module`` and other submodules is not a
    wrapper.

    Raises:
        ValueError: the adapter is a learned prompt. The model inside does not contain it, so its input would differ.

    Example:
        >>> import torch
        >>> wrapped = torch.nn.DataParallel(inner := torch.nn.Linear(2, 3))
        >>> unwrap(wrapped) is inner, unwrap(inner) is inner
        (True, True)
    """
    while (inside := _inside(model)) is not None:
        model = inside
    return model


def _inside(model: Any) -> nn.Module | None:
    """Return the module inside a wrapper; None if `model` is not a wrapper."""
    if not isinstance(model, nn.Module):
        return None
    parts = dict(model.named_children())
    if isinstance(compiled := parts.get("_orig_mod"), nn.Module):
        return compiled
    unadapted: Any = getattr(model, "get_base_model", None)
    if callable(unadapted):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                f"{type(model).__name__} puts a learned prompt before the text, which is no part of the model inside; "
                "call get_base_model() yourself to take that model without the prompt"
            )
        base = unadapted()
        return base if isinstance(base, nn.Module) and base is not model else None
    alone = parts.get("module") if len(parts) == 1 else None
    return alone if next(model.parameters(recurse=False), None) is None else None


def split_over(model: nn.Module) -> int:
    """Return the number of ranks over which tensor parallelism splits the model's weights; 1 if they are not split.

    Sharding by data parallelism (FSDP) is not counted, as its modules gather their weights before they run.

    >>> split_over(nn.Linear(3, 5))
    1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"split_over takes a model, a torch.nn.Module; got {type(model).__name__}")
    parts = list(model.modules())
    sizes = [size for part in parts if isinstance(size := getattr(part, "_tp_size", None), int)]
    distributed: Any = sys.modules.get("torch.distributed.tensor")  # if not imported, nothing is split
    gathered = any(type(part).__name__.startswith("FSDP") for part in parts)
    for weight in model.parameters() if distributed is not None else ():
        if isinstance(weight, distributed.DTensor):
            names = weight.device_mesh.mesh_dim_names or ("",) * weight.device_mesh.ndim
            for size, name, placement in zip(weight.device_mesh.shape, names, weight.placements, strict=True):
                if placement.is_shard() and (not gathered or "tp" in name):
                    sizes.append(size)
    return max(sizes, default=1)


def require_whole(model: nn.Module, what: str) -> None:
    """Raise ValueError if this rank has only a part of the weights; `what` is the code that needs all of them."""
    processes = split_over(model) if isinstance(model, nn.Module) else 1
    if processes > 1:
        raise ValueError(
            f"{type(model).__name__} is split over {processes} processes by tensor parallelism, and {what} must be "
            "whole: load the model in one process (looks, importance by gradient and ablations do without)"
        )
