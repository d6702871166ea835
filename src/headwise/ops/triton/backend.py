"""Backend `triton`: headwise's own kernels for NVIDIA GPUs. They isolate NaN and Inf themselves and return the lse.

On CPU tensors they run in Triton's interpreter, if the process was started with TRITON_INTERPRET=1; for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..call import Call, Limit
from ..options import ScoreOptions
from ..tracing import in_onnx_export, statically_true
from . import operators  # noqa: F401
from .launch import interpreted, trouble
from .masks import lowered, trouble_with

HEAD_DIM = 256
CAPABILITY = 8
DECODE_ROWS = 16

LIMITS = (
    Limit(
        lambda c: c.device_type != "cuda" and not (c.device_type == "cpu" and interpreted()),
        "the Triton kernels run on NVIDIA GPUs",
    ),
    Limit(lambda c: trouble() is not None, lambda c: trouble() or ""),
    Limit(
        lambda c: c.device_type == "cuda" and torch.cuda.get_device_properties(c.query.device).major < CAPABILITY,
        f"the Triton kernels need a card of compute capability {CAPABILITY}.0",
    ),
    Limit(lambda c: c.query.dtype == torch.float64, "the Triton kernels have no float64"),
    Limit(lambda c: c.is_empty, "the Triton kernels take no empty tensors"),
    Limit(lambda c: in_onnx_export(), "ONNX has no operator for the Triton kernels"),
    Limit(lambda c: c.is_transformed, "the Triton kernels have no torch.func rules (vmap, jvp)"),
    Limit(
        lambda c: c.needs_grad,
        "the Triton kernels give no gradient; SDPA and FlexAttention do",
    ),
    Limit(lambda c: c.options.dropout > 0, "the Triton kernels have no dropout"),
    Limit(lambda c: trouble_with(c.options.mask) is not None, lambda c: trouble_with(c.options.mask) or ""),
    Limit(
        lambda c: max(c.query.shape[-1], c.value.shape[-1]) > HEAD_DIM,
        f"the Triton kernels take head dims up to {HEAD_DIM}",
    ),
    Limit(lambda c: c.layout is not None, "no pages yet"),
)


def rules_of(options: ScoreOptions, T: int, S: int, device: torch.device) -> tuple[object, ...]:
    """Return the options as arguments of the operators, in the order of `operators.RULES`."""
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    return (options.scale, options.softcap or 0.0, sinks, *lowered(options.mask, T, S, device))


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return out (B, H, T, V) and the lse (B, H, T) if it is requested."""
    T, S = call.sizes[3:]
    rules = rules_of(call.options, T, S, call.query.device)
    out, lse, *_ = torch.ops.headwise.triton_attend(call.query, call.key, call.value, *rules, None, 0, False)
    return out, lse if call.return_lse else None
