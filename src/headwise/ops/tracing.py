"""Checks for tracing (torch.compile, torch.export) and fake tensors, where code must not depend on unknown values."""

from __future__ import annotations

import torch


def without_numbers() -> bool:
    """Return whether tensors have no data: a graph is being traced (also by make_fx), or FakeTensorMode is on."""
    keys = torch._C._TorchDispatchModeKey
    modes = (torch._C._get_dispatch_mode(key) for key in (keys.FAKE, keys.PROXY))
    return torch.compiler.is_compiling() or any(mode is not None for mode in modes)


def in_onnx_export() -> bool:
    """Whether torch.onnx.export(dynamo=True) traces, to which an operator that is not torch's own means nothing."""
    return torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export()


def is_symbol(size: int) -> bool:
    """Return whether a size is symbolic while a graph is traced; a loop over it could not be traced."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(size)


def statically_true(condition: bool) -> bool:
    """Return the condition, or False if it depends on a symbol, so that the graph is valid for every size."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)
