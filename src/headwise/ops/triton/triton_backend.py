"""Backend `triton`: headwise's own kernels for NVIDIA GPUs. They isolate NaN and Inf themselves and return the lse.

On CPU tensors they run in Triton's interpreter, if the process was started with TRITON_INTERPRET=1; for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call, Limit
from ..masks.rules import Band, Lengths
from ..options import ScoreOptions
from ..storage.layout import StorageLayout
from ..tracing import in_onnx_export, statically_true
from . import kernel_operators  # noqa: F401
from .kernel_masks import lowered, trouble_with
from .launch import trouble_on

HEAD_DIM, DECODE_DIM, DECODE_VALUE_DIM = 256, 576, 512
DECODE_ROWS = 16  # up to this many queries the keys are split among programs

LIMITS = (
    Limit(lambda c: trouble_on(c.query.device) is not None, lambda c: trouble_on(c.query.device) or ""),
    Limit(lambda c: c.query.dtype == torch.float64, "the Triton kernels have no float64"),
    Limit(lambda c: c.is_empty, "the Triton kernels take no empty tensors"),
    Limit(lambda c: c.layout is not None and c.layout.bits < 8, "the Triton kernels read no keys of 4 or 3 bits"),
    Limit(lambda c: in_onnx_export(), "ONNX has no operator for the Triton kernels"),
    Limit(lambda c: c.is_transformed, "the Triton kernels have no torch.func rules (vmap, jvp)"),
    Limit(lambda c: c.needs_grad, "the Triton kernels give no gradient; SDPA and FlexAttention do"),
    Limit(lambda c: c.options.dropout > 0, "the Triton kernels have no dropout"),
    Limit(lambda c: trouble_with(c.options.mask) is not None, lambda c: trouble_with(c.options.mask) or ""),
    Limit(
        lambda c: not decodes(c) and max(c.query.shape[-1], c.value.shape[-1]) > HEAD_DIM,
        f"the Triton kernels take head dims above {HEAD_DIM} for at most {DECODE_ROWS} queries",
    ),
    Limit(
        lambda c: c.query.shape[-1] > DECODE_DIM or c.value.shape[-1] > DECODE_VALUE_DIM,
        f"the Triton kernels take head dims up to {DECODE_DIM}, of values up to {DECODE_VALUE_DIM}",
    ),
)


def decodes(call: Call) -> bool:
    """Return True if the call is one of few queries whose keys the decode kernel can tell by numbers alone."""
    rules = [rule for rule in call.options.mask.parts if not rule.biases]
    if not statically_true(call.sizes[3] <= DECODE_ROWS) or not all(isinstance(x, Band | Lengths) for x in rules):
        return False
    # First keys that a window keeps in sight are attended whatever the lower ends are: all must be of such windows.
    kept = {rule.kept for rule in rules if isinstance(rule, Band) and rule.left is not None}
    return kept <= {0} or (len(kept) == 1 and not any(isinstance(x, Lengths) and x.start is not None for x in rules))


def is_worthwhile(call: Call) -> bool:
    """Return True on CUDA for what torch's fused kernels do not serve, or by reading more than keys and values."""
    if call.device_type != "cuda":
        return False
    (_, H, K, _, _), options = call.sizes, call.options
    plain = options.softcap is None and options.sinks is None and not call.return_lse and call.layout is None
    usual = call.query.shape[-1] == call.value.shape[-1] <= HEAD_DIM and (H == K or call.query.dtype != torch.float32)
    masked = bool(call.options.mask.parts) and not call.options.mask.is_top_left
    return not (plain and usual) or masked or decodes(call)


def rules_of(options: ScoreOptions, T: int, S: int, device: torch.device, *, kept: bool = False) -> tuple[object, ...]:
    """Return the options as arguments of the operators, in the order of `kernel_operators.RULES`."""
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    return (options.scale, options.softcap or 0.0, sinks, *lowered(options.mask, T, S, device, kept=kept))


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return out (B, H, T, V) and the lse (B, H, T) if it is requested."""
    if decodes(call):
        out, lse = _decode(call)
    else:
        call = call.dense()
        rules = rules_of(call.options, *call.sizes[3:], call.query.device)
        out, lse, *_ = torch.ops.headwise.triton_attend(call.query, call.key, call.value, *rules, None, 0, 0, False)
    return out, lse if call.return_lse else None


def _decode(call: Call) -> tuple[Tensor, Tensor]:
    (_, _, _, T, S), layout = call.sizes, call.layout or StorageLayout(None, None, None, 0)
    mask, table = call.options.mask, layout.table
    always = max([0, *(rule.kept for rule in mask.parts if isinstance(rule, Band))])
    rules = rules_of(call.options, T, S, call.query.device, kept=True)
    if table is not None:
        table = table.to(call.query.device)
    return torch.ops.headwise.triton_decode(
        call.query, call.key, call.value, layout.key_scale, layout.value_scale, table, S, always, *rules
    )
