"""Backend `blocks`: plain torch ops on one block of query rows at a time. Every argument is supported; memory O(n)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..call import Call, Limit
from ..row_blocks import row_blocks, score_block, softmax_rows

LIMITS: tuple[Limit, ...] = ()


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return out (B, H, T, V) and the lse (B, H, T) if it is requested."""
    _, _, _, T, S = call.sizes
    blocks = list(row_blocks(T, S, call.device_type)) or [slice(0, 0)]
    outs: list[Tensor] = []
    lses: list[Tensor | None] = []
    for rows in blocks:
        if len(blocks) > 1 and call.needs_grad:  # recomputed in the backward pass to save memory
            out, lse = checkpoint(_block, call, rows, use_reentrant=False)
        else:
            out, lse = _block(call, rows)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2) if call.return_lse else None  # type: ignore[arg-type]


def _block(call: Call, rows: slice) -> tuple[Tensor, Tensor | None]:
    _, H, K, _, _ = call.sizes
    block = score_block(call.query, call.key, call.options, rows)
    allowed = block.allowed_BHRC
    weights_BHRC, lse_BHR = softmax_rows(block.scores_BHRC, allowed, call.options.sinks)
    if call.options.dropout > 0:
        weights_BHRC = torch.dropout(weights_BHRC, call.options.dropout, train=True)
    # By way of one axis: where two of four axes are flattened, torch.export guards their strides, and with bounded
    # sizes it cannot show that the guard always holds.
    B, _, R, C = weights_BHRC.shape
    weights_BKGRC = weights_BHRC.flatten().view(B, K, H // K * R, C)
    out_BKGRV = weights_BKGRC @ call.value[:, :, block.keys].to(weights_BKGRC.dtype)
    out_BHRV = out_BKGRV.unflatten(2, (H // K, -1)).flatten(1, 2).to(call.query.dtype)
    if allowed is not None:  # its weights are 0, but 0 * NaN in the backward pass of the product is NaN
        out_BHRV = out_BHRV.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return out_BHRV, lse_BHR if call.return_lse else None
