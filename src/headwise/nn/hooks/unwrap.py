"""The model inside of what is wrapped around it: adapters, data parallelism, compiled modules; and whether it is whole.

Read from what a wrapper is made of, never from its class: so no library of wrappers is imported.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def unwrap(model: Any) -> Any:
    """The innermost model; what is no wrapper is returned as it is.

    Three kinds are seen through, in any order and depth: adapters (PEFT's ``get_base_model()``; the model it gives has
    the adapters in its layers), compiled modules (``_orig_mod``), and data parallelism (a module with nothing but
    its ``module``, as those of torch, accelerate and DeepSpeed do). A model of yours with a part called ``module`` and
    other parts beside it stays whole.

    Raises:
        ValueError: the adapter is a learned prompt, which is no part of the model inside: that model alone would read
            another text.

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
    """What a module is wrapped around; None where it is no wrapper."""
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
    """Over how many processes tensor parallelism has split the model's weights; 1 where every process has them all.

    What data parallelism shards (FSDP) does not count: its modules gather their weights before they run.

    >>> split_over(nn.Linear(3, 5))
    1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"split_over takes a model, a torch.nn.Module; got {type(model).__name__}")
    parts = list(model.modules())
    sizes = [size for part in parts if isinstance(size := getattr(part, "_tp_size", None), int)]
    distributed: Any = sys.modules.get("torch.distributed.tensor")  # not imported: nothing is split
    gathered = any(type(part).__name__.startswith("FSDP") for part in parts)
    for weight in model.parameters() if distributed is not None else ():
        if isinstance(weight, distributed.DTensor):
            names = weight.device_mesh.mesh_dim_names or ("",) * weight.device_mesh.ndim
            for size, name, placement in zip(weight.device_mesh.shape, names, weight.placements, strict=True):
                if placement.is_shard() and (not gathered or "tp" in name):
                    sizes.append(size)
    return max(sizes, default=1)


def require_whole(model: nn.Module, what: str) -> None:
    """Raise ValueError where this process has a part of the weights alone, and `what` needs all of them."""
    processes = split_over(model) if isinstance(model, nn.Module) else 1
    if processes > 1:
        raise ValueError(
            f"{type(model).__name__} is split over {processes} processes by tensor parallelism, and {what} must be "
            "whole: load the model in one process (looks, importance by gradient and ablations do without)"
        )
