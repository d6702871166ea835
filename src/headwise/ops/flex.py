"""Backend `flex`: torch's FlexAttention. Masks and biases become functions of indices, empty tiles are skipped.

Compiled on CUDA. On the CPU it runs uncompiled and builds the whole T x S matrix: asked for by name, for tests of
the meaning, and never chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .call import Call, Limit
from .masks import FULL, MIXED, Mask
from .rules import Alibi, Band, Bias, Keep, Lengths, Part, Segments, saturated

TILE = 128
MIN_HEAD_DIM = 16
# FlexAttention multiplies scores by log2(e). A bias as low as float32 goes, a common way to say no, would become -inf
# there, and a row of nothing else would count as one that may attend nothing.
LOWEST = torch.finfo(torch.float32).min / 2

LIMITS = (
    Limit(lambda c: c.is_empty, "FlexAttention takes no empty tensors"),
    Limit(lambda c: c.query.dtype == torch.float64, "FlexAttention has no float64"),
    Limit(lambda c: c.dropout > 0, "FlexAttention has no dropout"),
    Limit(lambda c: c.bias_needs_grad, "FlexAttention gives no gradient to a bias here"),
    Limit(lambda c: c.is_transformed, "FlexAttention has no torch.func rules (vmap, jvp)"),
    Limit(lambda c: c.device_type == "cpu" and c.needs_grad, "FlexAttention has no backward on CPU"),
    Limit(
        lambda c: c.device_type != "cpu" and min(c.query.shape[-1], c.value.shape[-1]) < MIN_HEAD_DIM,
        f"FlexAttention's fused kernel needs head dims of at least {MIN_HEAD_DIM}",
    ),
)


def pays(call: Call) -> bool:
    """On CUDA, where it skips tiles that SDPA would compute, or serves what SDPA cannot."""
    _, _, _, T, S = call.sizes
    if call.device_type != "cuda" or T < TILE or S < TILE:
        return False
    square = call.mask is None or call.mask.is_top_left
    return not square or call.softcap is not None or call.sinks is not None or call.return_lse


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """out (B, H, T, V) and, where asked for, lse (B, H, T)."""
    _, H, K, T, S = call.sizes
    attend = _uncompiled if call.device_type == "cpu" else _compiled()
    out, aux = attend(
        call.query,
        call.key,
        call.value,
        score_mod=_score_mod(call.mask, call.softcap, T, S),
        block_mask=None if call.mask is None else _block_mask(call.mask, T, S, call.query.device),
        scale=call.scale,
        enable_gqa=H != K,
        return_aux=AuxRequest(lse=True),
    )
    lse_BHT = aux.lse
    empty_BHT = lse_BHT == -torch.inf
    if call.sinks is not None:  # one more term in the denominator: out shrinks by sigmoid(lse - sink)
        sinks = call.sinks.to(lse_BHT.dtype).view(1, H, 1)
        sinks = sinks.masked_fill(sinks == torch.inf, torch.nan)  # Inf / Inf: it shows, as a NaN does
        lse_BHT = lse_BHT.masked_fill(empty_BHT, 0.0)  # finite, or the gradient of what is thrown away below is NaN
        out = (out * torch.sigmoid(lse_BHT - sinks)[..., None]).to(out.dtype)
        lse_BHT = torch.logaddexp(lse_BHT, sinks).masked_fill(empty_BHT, -torch.inf)
    return out.masked_fill(empty_BHT[..., None], 0.0), lse_BHT if call.return_lse else None


def _uncompiled(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():  # it says that it is slow uncompiled: known, and why it is never chosen here
        warnings.simplefilter("ignore", UserWarning)
        return flex_attention(*args, **options)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _block_mask(mask: Mask, T: int, S: int, device: torch.device) -> BlockMask | None:
    """FlexAttention's lists of mixed and of full tiles, from ours; no T x S tensor."""
    rules = [part for part in mask.parts if part.restricts]
    if not rules:
        return None
    tiles = mask.tiles(T, S, tile_q=TILE, tile_k=TILE, device=device)

    def listed(kind: int) -> tuple[Tensor, Tensor]:
        hit = tiles == kind
        order = torch.argsort(hit.int(), dim=-1, descending=True, stable=True)
        return hit.sum(-1, dtype=torch.int32), order.to(torch.int32)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = [_value(part, b, h, i, j, T, S) for part in rules]
        return reduce(torch.logical_and, [x != -torch.inf if p.biases else x for p, x in zip(rules, seen, strict=True)])

    return BlockMask.from_kv_blocks(
        *listed(MIXED), *listed(FULL), BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod, seq_lengths=(T, S)
    )


def _score_mod(mask: Mask | None, softcap: float | None, T: int, S: int) -> Callable[..., Tensor] | None:
    rules = [] if mask is None else [part for part in mask.parts if part.biases]
    if not rules and softcap is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        score = reduce(torch.add, [_value(part, b, h, i, j, T, S) for part in rules], score)
        return torch.clamp(score, min=LOWEST)

    return score_mod


def _value(part: Part, b: Tensor, h: Tensor, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
    """A rule at one place, in the scalar form that FlexAttention traces: the same rule as `part.at`."""

    def row(ends: int | Tensor) -> int | Tensor:
        return ends if isinstance(ends, int) else ends[b if ends.shape[0] > 1 else 0]

    match part:
        case Band(left, right, offset, first):
            pos = i + (S - T if offset is None else row(saturated(offset)))
            seen = (j == j) if right is None else j <= pos + right
            return seen if left is None else seen & ((j > pos - left) | (j < first))
        case Lengths(stop, start):
            return j < row(stop) if start is None else (j < row(stop)) & (j >= row(start))
        case Segments(query_ids, key_ids):
            mine = query_ids[i] if query_ids.ndim == 1 else query_ids[b if query_ids.shape[0] > 1 else 0, i]
            theirs = key_ids[j] if key_ids.ndim == 1 else key_ids[b if key_ids.shape[0] > 1 else 0, j]
            return mine == theirs
        case Keep() | Bias():
            full = part.full
            at = [x if size > 1 else 0 for x, size in zip((b, h, i, j), full.shape, strict=True)]
            return full[tuple(at)]
        case Alibi(slopes, offset):
            slopes = slopes.view(-1, slopes.shape[-1])
            pos = i + (S - T if offset is None else row(saturated(offset)))
            return -slopes[b if slopes.shape[0] > 1 else 0, h] * (pos - j).abs()
    raise NotImplementedError(f"FlexAttention has no form for {type(part).__name__}")
