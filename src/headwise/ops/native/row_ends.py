"""The largest logit of each row from the native kernel, whose softmax has it: no further pass, and no other bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call
from . import library as native_library
from .backend import dropout_of
from .mask_arguments import LoweredOptions, lowered

LEAST_SCALE = 1e-30
"""Up to this scale the kernel scales scores before its softmax (`scales_first` in csrc)."""


def attend_with_ends(call: Call) -> tuple[Tensor, Tensor]:
    """Return out (B, H, T, V), with its gradient, and the largest logit of each row, (B, H, T) float32, without."""
    rules = lowered(call.options, *call.sizes[3:])
    tracing = torch.compiler.is_compiling()
    attend = torch.ops.headwise.attend_ends if tracing else native_library.attend_ends
    out, _, ends = attend(call.query, call.key, call.value, *rules, *dropout_of(call))
    largest, weight = ends.detach()
    scale = 1.0 if _scales_first(rules) else rules.scale
    return out, (largest * scale).masked_fill(weight.isnan(), torch.nan)


def _scales_first(rules: LoweredOptions) -> bool:
    """Return whether the kernel keeps a row's largest score with the scale in it, as `scales_first` in csrc."""
    biased = rules.alibi or rules.relative or any(x.is_floating_point() for x in rules.dense or ())
    return bool(biased) or rules.softcap > 0 or not rules.scale > LEAST_SCALE
