"""Backend `sdpa`: torch's fused scaled_dot_product_attention, with headwise's semantics.

Workarounds (torch 2.13, CPU): `is_causal` is aligned top-left, so it is used only for such a mask; key and value of
unequal length are refused earlier; d_v != d_k would not use the fused kernel, so the shorter is padded with zeros
(exact); masks have four axes and cover a strip of rows at a time, never T x S; NaN and Inf: see `fenced`.

On CUDA torch has fused kernels (cuDNN, FlashAttention, a memory-efficient one) and MATH, which builds T x S and is
taken in silence where none of them fits. `LIMITS` has the cases in which only MATH would serve (torch's documentation,
2.13: groups of heads only in FlashAttention, which has no float32, no mask and head dims up to 256).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..call import Call, Limit
from ..row_blocks import strip_of, strips
from ..tracing import is_symbol, statically_true

# Query rows per strip: the strip's mask is (B|1, H|1, STRIP, S), linear in S.
STRIP = 256
# Up to this many query rows, the query heads of a group are folded into the query axis, so that their keys and values
# are loaded once instead of G times (benchmarks/attention.py, cases `fold`).
FOLD_ROWS = 16

# The largest head dim of FlashAttention; its backward pass has less on some cards (compute capability 8.6, 8.9, 12.0).
FLASH_HEAD_DIM, FLASH_HEAD_DIM_BACKWARD = 256, 192
FLASH_CAPABILITY = 8  # the least compute capability of FlashAttention

# On the CPU each thread's scratch memory is not 16-byte aligned if the number of query rows is no multiple of 4, and
# MKL then rounds differently per thread. Zero rows pad the query; from 32 rows on, the kernel's tile is aligned.
ALIGNED_ROWS, TILE_ROWS = 4, 32

LIMITS = (
    Limit(lambda c: c.is_empty, "torch's fused kernel takes no empty tensors"),
    Limit(lambda c: c.options.softcap is not None, "torch's SDPA has no softcap"),
    Limit(lambda c: c.options.sinks is not None, "torch's SDPA has no sinks"),
    Limit(lambda c: c.return_lse, "torch's SDPA does not return the lse"),
    Limit(
        lambda c: c.options.dropout > 0 and c.device_type == "cpu",
        "torch's SDPA has no fused kernel with dropout on the CPU",
    ),
    Limit(lambda c: c.bias_needs_grad, "torch's SDPA has no fused kernel for a bias that needs a gradient"),
    Limit(lambda c: c.is_transformed, "torch's fused kernel has no torch.func rules (vmap, jvp)"),
    Limit(
        lambda c: _has_groups_on_cuda(c) and c.query.dtype == torch.float32,
        "on CUDA, torch's fused kernels take groups of query heads only in bfloat16 and float16, and torch would build "
        "the T x S matrix",
    ),
    Limit(
        lambda c: _has_groups_on_cuda(c) and torch.cuda.get_device_properties(c.query.device).major < FLASH_CAPABILITY,
        f"on CUDA, torch's fused kernels take groups of query heads from compute capability {FLASH_CAPABILITY}.0 on, "
        "and torch would build the T x S matrix",
    ),
    Limit(
        lambda c: (
            _has_groups_on_cuda(c)
            and max(c.query.shape[-1], c.value.shape[-1])
            > (FLASH_HEAD_DIM_BACKWARD if c.needs_grad else FLASH_HEAD_DIM)
        ),
        f"on CUDA, torch's fused kernels take groups of query heads up to a head dim of {FLASH_HEAD_DIM} "
        f"({FLASH_HEAD_DIM_BACKWARD} with a gradient), and torch would build the T x S matrix",
    ),
    Limit(
        lambda c: (
            c.device_type == "cuda"
            and c.query.dtype != torch.float32
            and any(rule.biases for rule in c.options.mask.parts)
        ),
        "on CUDA, torch's fused kernels take a bias only in the query's dtype, and rounding it would change the scores",
    ),
)


def _has_groups_on_cuda(call: Call) -> bool:
    """Return True for groups of query heads that are not folded into the rows (`_fused`)."""
    _, H, K, T, _ = call.sizes
    return call.device_type == "cuda" and H != K and not statically_true(T <= FOLD_ROWS)


def is_slower(call: Call) -> bool:
    """Return True for float32 decoding without groups on the CPU, where the padding rows cost more than is saved."""
    _, H, K, T, _ = call.sizes
    small = statically_true(T * (H // K) < ALIGNED_ROWS)
    return call.device_type == "cpu" and call.query.dtype == torch.float32 and small


def run(call: Call) -> tuple[Tensor, None]:
    """Return out (B, H, T, V) and None for the lse."""
    T, V = call.sizes[3], call.value.shape[-1]
    query, key, value = _equal_head_dims(call.query, call.key, call.value)
    mask = call.options.mask
    if not mask.parts or (mask.is_top_left and call.options.scale > 0):  # SDPA scales -inf after masking
        return _fused(call, query, key, value, causal=bool(mask.parts))[..., :V], None
    # One mask row is valid for all rows. But for groups on CUDA it is MATH that takes a mask, so rows come in strips.
    if mask.is_same_for_rows and statically_true(T >= TILE_ROWS) and not _has_groups_on_cuda(call):
        return _strip(call, query, key, value, slice(None), mask_rows=slice(0, 1))[..., :V], None
    outs = [_strip(call, query, key, value, rows) for rows in strips(T, STRIP)]
    return torch.cat(outs, dim=2)[..., :V], None


def _fused(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Call SDPA, with the query heads of a group folded into the rows if that is faster; mask (B|1, H|1, R, C)."""
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
        if mask is not None:  # repeated rows, because inductor cannot compile the padding of a bool mask (torch 2.13)
            mask = torch.cat([mask, mask[:, :, :1].expand(-1, -1, lacking, -1)], dim=2)
    # `enable_gqa` must be a plain bool: under torch.compile the comparison would be a symbol.
    grouped = True if query.shape[1] != K else False  # noqa: SIM210
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=call.options.scale, enable_gqa=grouped
    )
    out = out[:, :, :R] if lacking else out
    return out if G == 1 else out.unflatten(2, (G, -1)).flatten(1, 2)


def _strip(
    call: Call, query: Tensor, key: Tensor, value: Tensor, rows: slice, mask_rows: slice | None = None
) -> Tensor:
    """Attend with some query rows to the keys that they can reach, with those rows of the mask."""
    T, S = call.sizes[3:]
    cols, allowed, added = strip_of(call.options.mask, mask_rows or rows, T, S, query.device)
    empty = None
    if allowed is not None:
        # Not every kernel returns 0 for an empty row, so the row attends to one key and is zeroed afterwards. Only one
        # key, because the sum of several could overflow, and its gradient would then be 0 * Inf.
        empty = ~allowed.any(-1, keepdim=True)
        allowed = allowed | (empty & (torch.arange(allowed.shape[-1], device=allowed.device) == 0))
    mask = allowed
    if added is not None:
        mask = added.to(query.dtype if query.dtype == torch.float64 else torch.float32)
        mask = mask if empty is None else mask.masked_fill(empty, 0.0)
        mask = mask if allowed is None else mask.masked_fill(~allowed, -torch.inf)
    assert mask is not None  # `trimmed` removes every mask that forbids and adds nothing
    query, key, value = query[:, :, rows], key[:, :, cols], value[:, :, cols]
    if key.shape[2] == 0:
        zero = query[..., :1] + (key.sum() + value.sum())  # connected to all three, so that each gets a gradient of 0
        return zero.masked_fill(torch.ones_like(zero, dtype=torch.bool), 0.0).expand(-1, -1, -1, value.shape[-1])
    out = _fused(call, query, key, value, mask)
    return out if empty is None else out.masked_fill(empty, 0.0)


def _equal_head_dims(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the shorter of D and V with zeros, which changes no result, and make the last axis contiguous."""
    D, V = query.shape[-1], value.shape[-1]
    if V > D:
        query, key = pad(query, (0, V - D)), pad(key, (0, V - D))
    elif V < D:
        value = pad(value, (0, D - V))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return query, key, value
