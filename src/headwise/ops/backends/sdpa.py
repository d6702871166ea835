"""Backend `sdpa`: torch's fused scaled_dot_product_attention, kept to our meaning.

Its faults (torch 2.13, CPU) are fenced: `is_causal` is top-left, so it is used only where that is what is meant; key
and value of unequal length are refused before; d_v != d_k would leave the fused kernel, so the shorter is padded
with zeros (exact); masks go in as four axes, a strip of rows at a time, never T x S; NaN and Inf: see `fence`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..call import Call, Limit
from ..row_blocks import strip_of, strips
from ..tracing import is_symbol, statically_true

# Query rows a strip: the strip's mask is (B|1, H|1, STRIP, S), linear in S.
STRIP = 256
# Up to this many query rows, the query heads of a group are laid into the query axis, so that their keys and values
# are read once and not G times (benchmarks/attention.py, cases `fold`).
FOLD_ROWS = 16

# On the CPU the kernel's scratch of each thread begins off 16 bytes where few query rows are no multiple of 4, and MKL
# then rounds otherwise, thread by thread. Zero rows fill them up; from its tile of 32 rows on the tile is the multiple.
ALIGNED_ROWS, TILE_ROWS = 4, 32

LIMITS = (
    Limit(lambda c: c.is_empty, "torch's fused kernel takes no empty tensors"),
    Limit(lambda c: c.scoring.softcap is not None, "torch's SDPA has no softcap"),
    Limit(lambda c: c.scoring.sinks is not None, "torch's SDPA has no sinks"),
    Limit(lambda c: c.return_lse, "torch's SDPA does not return the lse"),
    Limit(
        lambda c: c.dropout > 0 and c.device_type == "cpu", "torch's SDPA with dropout leaves its fused kernel on CPU"
    ),
    Limit(lambda c: c.bias_needs_grad, "torch's SDPA leaves its fused kernel where a bias needs a gradient"),
    Limit(lambda c: c.is_transformed, "torch's fused kernel has no torch.func rules (vmap, jvp)"),
)


def is_slower(call: Call) -> bool:
    """Decoding without groups in float32 on the CPU, where the filled-up rows cost more than the kernel saves."""
    _, H, K, T, _ = call.sizes
    small = statically_true(T * (H // K) < ALIGNED_ROWS)
    return call.device_type == "cpu" and call.query.dtype == torch.float32 and small


def run(call: Call) -> tuple[Tensor, None]:
    """out (B, H, T, V)."""
    T, V = call.sizes[3], call.value.shape[-1]
    query, key, value = _equal_head_dims(call.query, call.key, call.value)
    mask = call.scoring.mask
    if not mask.parts or (mask.is_top_left and call.scoring.scale > 0):  # it masks first and scales -inf then
        return _fused(call, query, key, value, causal=bool(mask.parts))[..., :V], None
    if mask.is_same_for_rows and statically_true(T >= TILE_ROWS):  # one row of the mask serves all
        return _strip(call, query, key, value, slice(None), mask_rows=slice(0, 1))[..., :V], None
    outs = [_strip(call, query, key, value, rows) for rows in strips(T, STRIP)]
    return torch.cat(outs, dim=2)[..., :V], None


def _fused(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """SDPA itself, the query heads of a group folded into the rows where that wins; mask (B|1, H|1, R, C)."""
    _, H, K, T, _ = call.sizes
    G = 1
    if H != K and not causal and not is_symbol(T) and T <= FOLD_ROWS:
        G = H // K
        query = query.unflatten(1, (K, G)).flatten(2, 3)
        if mask is not None:
            mask = mask.expand(-1, H if mask.shape[1] > 1 else G, -1, -1).unflatten(1, (-1, G)).flatten(2, 3)
    R = query.shape[2]
    lacking = -R % ALIGNED_ROWS if call.device_type == "cpu" and not is_symbol(R) and R < TILE_ROWS else 0
    if lacking:
        query = pad(query, (0, 0, 0, lacking))
        if mask is not None:  # by repeated rows: inductor cannot compile the padding of a bool mask (torch 2.13)
            mask = torch.cat([mask, mask[:, :, :1].expand(-1, -1, lacking, -1)], dim=2)
    # `enable_gqa` as a plain bool: under torch.compile it would be a symbol.
    grouped = True if query.shape[1] != K else False  # noqa: SIM210
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=call.scoring.scale, enable_gqa=grouped
    )
    out = out[:, :, :R] if lacking else out
    return out if G == 1 else out.unflatten(2, (G, -1)).flatten(1, 2)


def _strip(
    call: Call, query: Tensor, key: Tensor, value: Tensor, rows: slice, mask_rows: slice | None = None
) -> Tensor:
    """Some query rows against the keys that they can reach, with those rows of the mask."""
    T, S = call.sizes[3:]
    cols, allowed, added = strip_of(call.scoring.mask, mask_rows or rows, T, S, query.device)
    empty = None
    if allowed is not None:
        # Not every kernel gives 0 for an empty row: it attends one key, whatever that holds, and is zeroed after. One,
        # for the sum of several could overflow, and then its gradient would be 0 * Inf.
        empty = ~allowed.any(-1, keepdim=True)
        allowed = allowed | (empty & (torch.arange(allowed.shape[-1], device=allowed.device) == 0))
    mask = allowed
    if added is not None:
        mask = added.to(query.dtype if query.dtype == torch.float64 else torch.float32)
        mask = mask if empty is None else mask.masked_fill(empty, 0.0)
        mask = mask if allowed is None else mask.masked_fill(~allowed, -torch.inf)
    assert mask is not None  # `trimmed` has left no mask that says nothing
    query, key, value = query[:, :, rows], key[:, :, cols], value[:, :, cols]
    if key.shape[2] == 0:
        zero = query[..., :1] + (key.sum() + value.sum())  # and a gradient can pass to all three, which is 0
        return zero.masked_fill(torch.ones_like(zero, dtype=torch.bool), 0.0).expand(-1, -1, -1, value.shape[-1])
    out = _fused(call, query, key, value, mask)
    return out if empty is None else out.masked_fill(empty, 0.0)


def _equal_head_dims(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros behind the shorter of D and V change nothing, and the last axis is made contiguous."""
    D, V = query.shape[-1], value.shape[-1]
    if V > D:
        query, key = pad(query, (0, V - D)), pad(key, (0, V - D))
    elif V < D:
        value = pad(value, (0, D - V))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return query, key, value
