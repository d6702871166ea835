"""Backend `native`: headwise's own kernel for the CPU, written in C++ (`csrc/`).

Masks are passed in compact form (two numbers per row, ids, rows of a tensor), never as T x S. The kernel isolates NaN
and Inf itself and supports any strides. `operators` loads the library, a file in the package; without it the
other backends run everything. Gradients: `gradient`. Masks: `mask_arguments`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...shapes import check_gate, check_sinks
from ...shapes.arguments import FAR, MOST
from ..backends.wrappers import gated
from ..call import Call, Limit, Result
from ..masks.mask import Mask, as_mask
from ..options import ScoreOptions
from ..storage.layout import StorageLayout
from ..storage.packed import rotated
from ..tracing import in_onnx_export
from . import library as native_library
from .library import error_for, raise_unless_refused
from .mask_arguments import UnsupportedMask, ends_of, lowered, trouble_with
from .picked_keys import attend_picked, is_picked

PLAIN = (Tensor, Parameter)
"""The classes of the tensors that `fast_path` hands to the kernel unchecked; subclasses take the full path."""

LIMITS = (
    Limit(lambda c: c.device_type != "cpu", "headwise's own kernel runs on the CPU"),
    Limit(lambda c: c.query.dtype == torch.float64, "headwise's own kernel has no float64"),
    Limit(lambda c: c.is_empty, "headwise's own kernel takes no empty tensors"),
    Limit(lambda c: in_onnx_export(), "ONNX has no operator for headwise's own kernel"),
    Limit(lambda c: c.is_transformed, "headwise's own kernel has no torch.func rules (vmap, jvp)"),
    Limit(
        lambda c: any(is_traceable_wrapper_subclass(x) for x in (c.query, c.key, c.value)),
        "headwise's own kernel takes plain tensors, no subclass that wraps others",
    ),
    Limit(
        lambda c: c.options.dropout > 0 and is_picked(c.options.mask),
        "headwise's own kernel draws dropout by the place of a key among all keys, and it gathers picked keys first",
    ),
    Limit(lambda c: trouble_with(c.options.mask) is not None, lambda c: trouble_with(c.options.mask) or ""),
    Limit(
        lambda c: c.layout is not None and c.needs_grad,
        "headwise's own kernel has no gradient through int8 keys and values, or through pages",
    ),
    Limit(lambda c: error_for() is not None, lambda c: error_for() or ""),
)


def run(call: Call) -> Result:
    """Return out (B, H, T, V) and the lse (B, H, T) if it is requested."""
    packed = call.layout is not None and call.layout.bits < 8
    out, lse = _on_packed(call) if packed else _attend(call)
    return out, lse if call.return_lse else None


@gated
def _on_packed(call: Call) -> Result:
    """Attend in the basis in which keys and values of 4 and 3 bits are stored."""
    options = call.options._replace(gate=None)  # the gate multiplies the output as it is rotated back
    out, lse = _attend(replace(call, query=rotated(call.query), options=options))
    return rotated(out, back=True), lse


def _attend(call: Call) -> Result:
    if is_picked(call.options.mask):
        return attend_picked(call, _attend)
    return _with_gradient(call) if call.needs_grad else _without_gradient(call)


def dropout_of(call: Call) -> tuple[float, Tensor | None]:
    """Return the probability and the seed of a call's dropout, as the operators take them."""
    if not call.options.dropout > 0:
        return 0.0, None
    return call.options.dropout, torch.randint(1 << 62, (1,), device="cpu") if call.seed is None else call.seed


@gated
def _with_gradient(call: Call) -> Result:
    rules = lowered(call.options, *call.sizes[3:])
    # The operator is used only for tracing: its dispatcher overhead is as long as a small backward pass.
    tracing = torch.compiler.is_compiling()
    attend_train = torch.ops.headwise.attend_train if tracing else native_library.attend_train
    return attend_train(call.query, call.key, call.value, *rules, *dropout_of(call))


def _without_gradient(call: Call) -> Result:
    B, H, _, T, S = call.sizes
    gate = None if call.options.gate is None else call.options.gate.expand(B, H, T, call.value.shape[3])
    rules = (*lowered(call.options, T, S), gate, *dropout_of(call))
    return _forward(call.query, call.key, call.value, call.layout, rules)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, layout: StorageLayout | None, rules: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Run the operator without a gradient; keys and values are plain tensors, or stored as the layout describes."""
    if layout is None:
        return native_library.attend_full(query, key, value, *rules)
    key_scale, value_scale, *pages = layout[:4]
    return native_library.attend_held(query, key, key_scale, value, value_scale, *pages, *rules)


def fast_path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    gate: Tensor | None,
    return_lse: bool,
    layout: StorageLayout | None = None,
) -> Any:
    """Run the call without the checks of `attention`, which take longer than a decode step.

    Returns None if the full path must run. This function checks only what the operator cannot check: that all arguments
    are plain tensors and plain numbers. The operator checks sizes, dtypes and ranges; if it refuses, the full path
    raises the error or runs another backend.
    """
    if (
        native_library.attend is None
        or not (type(query) is type(key) is type(value) is Tensor)
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or not (scale is None or type(scale) is float)
        or not (type(dropout) in (float, int) and dropout == 0)  # dropout needs a seed
    ):
        return None
    try:
        (_, _, T, D), S, _ = query.shape, key.shape[2], value.shape[3]
    except (ValueError, IndexError, RuntimeError):  # not four axes; a nested tensor has no shape
        return None
    if type(T) is not int:  # torch.jit.trace uses tensors as sizes and would record their values
        return None
    records = torch.is_grad_enabled()
    learning = records and (query.requires_grad or key.requires_grad or value.requires_grad)
    if layout is not None:
        if type(layout.length) is not int or layout.length > MOST:
            return None
        if learning:
            return None
        for x in layout[:3]:
            if x is None:
                continue
            if not (isinstance(x, Tensor) and x.is_cpu) or (records and x.requires_grad):
                return None  # with a tensor on meta the call is traced, and its numbers have no meaning
        S = S if layout.table is None else layout.length
    scale = (D or 1) ** -0.5 if scale is None else scale
    packed = layout is not None and layout.bits < 8
    if gate is None and sinks is None and softcap is None and return_lse is False and not packed:
        ends = (-FAR, FAR) if mask is None else ends_of(mask, T, S) if type(mask) is Mask else None
        if ends is not None:
            try:
                if learning:
                    return native_library.attend_band(query, key, value, scale, *ends)
                if layout is None:
                    return native_library.attend(query, key, value, scale, *ends)
                key_scale, value_scale, *pages = layout[:4]
                return native_library.attend_stored(query, key, key_scale, value, value_scale, *pages, scale, *ends)
            except RuntimeError as error:
                raise_unless_refused(error)
                return None
    if learning:
        return None
    if packed and gate is not None:  # the gate multiplies the output as it is rotated back
        return None
    q = rotated(query) if packed else query
    result = _with_rules(q, key, value, as_mask(mask), scale, softcap, sinks, gate, return_lse, S, layout)
    if not packed or result is None:
        return result
    return (rotated(result[0], back=True), result[1]) if return_lse else rotated(result, back=True)


def _with_rules(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    gate: Tensor | None,
    return_lse: bool,
    S: int,
    layout: StorageLayout | None,
) -> Any:
    """Run `fast_path` with any mask and the other options."""
    if (
        not (softcap is None or (type(softcap) is float and softcap > 0.0))  # the operator treats 0 as no softcap
        or not (return_lse is False or return_lse is True)
        or not (sinks is None or (type(sinks) in PLAIN and sinks.is_cpu))  # the full path checks subclasses
        or not (gate is None or (type(gate) in PLAIN and gate.is_cpu))
    ):
        return None
    B, H, T, _ = query.shape
    options = ScoreOptions(mask.sized(B, H) if mask.parts else mask, scale, softcap, sinks, 0.0, gate)
    if options.learns:
        return None
    if sinks is not None:
        check_sinks(sinks, H, query.device)
    if gate is not None:
        gate = check_gate(gate, (B, H, T, value.shape[3]), query.device).expand(B, H, T, value.shape[3])
    try:
        rules = (*lowered(options, T, S), gate, 0.0, None)
    except (UnsupportedMask, RuntimeError):  # the mask does not fit; the full path raises the error
        return None
    try:
        out, lse = _forward(query, key, value, layout, rules)
    except RuntimeError as error:
        raise_unless_refused(error)
        return None
    return (out, lse) if return_lse else out
