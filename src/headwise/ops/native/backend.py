"""Backend `native`: headwise's own kernel for the CPU, written in C++ (`csrc/`).

Masks go in as what they are (two numbers a row, ids, rows of a tensor), never as T x S. The kernel itself keeps NaN and
Inf where they belong and reads any strides. The library lies beside the package and is loaded by the first call that
could use it (`library`); without it everything runs on the other backends. Gradients: `gradient`. Masks: `lowering`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...shapes import LEAST_FACTOR, MOST_FACTOR, check_gate, check_options
from ...shapes.kinds import FAR
from ..call import Call, Limit
from ..masks.compose import Mask, as_mask
from ..storage.held import Layout
from . import library as native_library
from .library import trouble
from .lowering import lowered, trouble_with

LIMITS = (
    Limit(lambda c: c.device_type != "cpu", "headwise's own kernel runs on the CPU"),
    Limit(lambda c: c.query.dtype == torch.float64, "headwise's own kernel has no float64"),
    Limit(lambda c: c.is_empty, "headwise's own kernel takes no empty tensors"),
    Limit(lambda c: c.is_transformed, "headwise's own kernel has no torch.func rules (vmap, jvp)"),
    Limit(
        lambda c: any(is_traceable_wrapper_subclass(x) for x in (c.query, c.key, c.value)),
        "headwise's own kernel takes plain tensors, no subclass that wraps others",
    ),
    Limit(lambda c: trouble_with(c.mask) is not None, lambda c: trouble_with(c.mask) or ""),
    Limit(
        lambda c: c.layout is not None and c.needs_grad,
        "headwise's own kernel has no gradient through int8 keys and values, or through pages",
    ),
    Limit(lambda c: trouble() is not None, lambda c: trouble() or ""),
)


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """out (B, H, T, V) and, where asked for, lse (B, H, T). The gate is applied unless a gradient is needed."""
    (B, H, _, T, S), V = call.sizes, call.value.shape[3]
    ops, qkv, masks = torch.ops.headwise, (call.query, call.key, call.value), lowered(call.mask, T, S)
    softcap = 0.0 if call.softcap is None else call.softcap
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    dropout, seed = (call.dropout, torch.randint(1 << 62, (1,), device="cpu")) if call.dropout > 0 else (0.0, None)
    if call.needs_grad:
        # The operator is for those who trace: its way through the dispatcher costs as much as a small backward.
        attend_train = ops.attend_train if torch.compiler.is_compiling() else native_library.attend_train
        out, lse = attend_train(*qkv, call.scale, softcap, sinks, *masks, dropout, seed)
    else:
        gate = None if call.gate is None else call.gate.expand(B, H, T, V)
        rules = (call.scale, softcap, sinks, *masks, gate, dropout, seed)
        if call.layout is None:
            out, lse = ops.attend_full(*qkv, *rules)
        else:
            key_scale, value_scale, *pages = call.layout
            out, lse = ops.attend_held(call.query, call.key, key_scale, call.value, value_scale, *pages, *rules)
    return out, lse if call.return_lse else None


# bounds, segments, dense, alibi, maps, relative, dropout and seed of a call without them.
_PLAIN = (None, None, None, None, None, None, 0.0, None)


def at_once(
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
    layout: Layout | None = None,
) -> Any:
    """The call without the full path's questions, which cost more than decoding a token; None where they must be asked.

    Here is asked only what the operator cannot know: whether anything but plain tensors and plain numbers is at work.
    Sizes and dtypes it checks itself, and where it refuses, the full path finds the words.
    """
    if (
        native_library.attend is None
        or not (type(query) is type(key) is type(value) is Tensor)
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or not (scale is None or (type(scale) is float and LEAST_FACTOR <= abs(scale) <= MOST_FACTOR))
        or not (type(dropout) in (float, int) and dropout == 0)  # not in haste, and not without a seed
    ):
        return None
    try:
        (_, _, T, D), S = query.shape, key.shape[2]
        if layout is not None:
            if type(layout.length) is not int or not all(x is None or x.is_cpu for x in layout[:3]):
                return None  # one tensor on meta would make it a call that is traced, whose numbers mean nothing
            S = S if layout.table is None else layout.length
        scale = D**-0.5 if scale is None else scale
        learning = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if not (
            layout is not None
            or gate is not None
            or sinks is not None
            or softcap is not None
            or return_lse is not False
        ):
            ends = (-FAR, FAR) if mask is None else None
            band = mask.simple_band if type(mask) is Mask else None
            if band is not None:
                left, right, at_end = band
                shift = S - T if at_end else 0
                ends = -FAR if left is None else left + shift, FAR if right is None else right + shift
            if ends is not None and not learning:
                return native_library.attend(query, key, value, scale, *ends)
            if ends is not None:
                return native_library.attend_train(query, key, value, scale, 0.0, None, *ends, *_PLAIN)[0]
        if learning:
            return None
        return _in_full(query, key, value, _sized(mask, query), scale, softcap, sinks, gate, return_lse, S, layout)
    except Exception:  # our own checks say it better; what they do not know the full path meets again
        return None


def _sized(mask: Mask | Tensor | None, query: Tensor) -> Mask | None:
    mask = as_mask(mask)
    return mask if mask is None else mask.sized(query.shape[0], query.shape[1])


def _in_full(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    gate: Tensor | None,
    return_lse: bool,
    S: int,
    layout: Layout | None,
) -> Any:
    """`at_once` with a mask of any kind and further options."""
    learning = torch.is_grad_enabled() and (
        (sinks is not None and sinks.requires_grad)
        or (gate is not None and gate.requires_grad)
        or (mask is not None and mask.learns)
        or any(x is not None and x.requires_grad for x in (layout or ())[:2])
    )
    if learning or (return_lse is not True and return_lse is not False):
        return None
    if not (softcap is None or (type(softcap) is float and LEAST_FACTOR <= softcap <= MOST_FACTOR)):
        return None
    (B, H, T, _), V = query.shape, value.shape[3]
    if sinks is not None:
        check_options(query, scale, softcap, sinks)
        sinks = sinks.float().contiguous()
    if gate is not None:
        gate = check_gate(gate, (B, H, T, V), query.device).expand(B, H, T, V)
    masks = lowered(mask, T, S)
    rules = (scale, softcap or 0.0, sinks, *masks, gate, 0.0, None)
    if layout is None:
        out, lse = native_library.attend_full(query, key, value, *rules)
    else:
        key_scale, value_scale, *pages = layout
        out, lse = native_library.attend_held(query, key, key_scale, value, value_scale, *pages, *rules)
    return (out, lse) if return_lse else out
