"""A decode step of a module in one call: its projections, and between them `step` of the cache.

What a step can be is asked here in few questions, for there are as many steps as tokens. Where one has another answer
the modules take their usual way, with all its checks; outputs and caches have the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..ops.masks.compose import Mask
from ..ops.native.step import Scores, Turn, runs_plain
from .inner import InnerAttention
from .rotary import Rotary
from .sharded import current


def is_step(module: Any, x: Any, cache: Any, mask: Any, projection: nn.Module) -> bool:
    """Whether a call with a cache may be a step: one plain token a row, and parts of the module that are known."""
    inner, rotary, weight = module.inner, module.rotary, getattr(projection, "weight", None)
    return (
        runs_plain()
        and type(x) is Tensor
        and x.ndim == 3
        and x.shape[1] == 1
        and x.shape[2] == module.d_model
        and (mask is None or type(mask) is Mask)
        and type(weight) is nn.Parameter  # no part of heads that are dealt out to processes
        and type(projection) is nn.Linear
        and x.dtype == weight.dtype
        and current() is None
        and type(inner) is InnerAttention
        and inner.backend in ("auto", "native")
        and not (inner.training and inner.dropout)
        and _is_itself(inner)
        and (rotary is None or (type(rotary) is Rotary and _is_itself(rotary)))
        and hasattr(cache, "takes_steps")
        and cache.takes_steps(mask)
    )


def _is_itself(module: nn.Module) -> bool:
    """Whether nothing listens to the calls of a part, or answers in its place."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or _has_any_global_hook()
    )


def heads_of(fused: Any, heads: int, size: int) -> Tensor | None:
    """(B, 1, heads * size) -> (B, heads, 1, size); None where it is something else."""
    if type(fused) is not Tensor or fused.ndim != 3 or fused.shape[1] != 1 or fused.shape[2] != heads * size:
        return None
    return fused.view(fused.shape[0], heads, 1, size) if fused.is_contiguous() else None


def scores_of(inner: InnerAttention) -> Scores:
    """What an inner part does to scores."""
    return Scores(inner.scale, inner.softcap, inner.sinks)


def turn_of(rotary: Rotary | None, cache: Any) -> Turn | None:
    """How the next token of each row turns."""
    return None if rotary is None else rotary.turn(cache.lengths)


def multihead_step(mha: Any, x: Tensor, cache: Any, mask: Mask | Tensor | None) -> Tensor | None:
    """The heads side by side (B, 1, H * V) of `MultiHeadAttention`; None where the usual way has to be taken."""
    if not is_step(mha, x, cache, mask, mha.q_proj) or mha.memory_dim is not None:
        return None
    if mha.rotary is not None and mha.rotary.head_dim != mha.head_dim:
        return None
    key = heads_of(mha.k_proj(x), mha.num_kv_heads, mha.head_dim)
    value = heads_of(mha.v_proj(x), mha.num_kv_heads, mha.value_dim)
    query = heads_of(mha.q_proj(x), mha.num_heads, mha.head_dim)
    if query is None or key is None or value is None:
        return None
    if mha.q_norm is not None:
        query, key = mha.normalize(query, key)
    out = cache.step(query, key, value, turn=turn_of(mha.rotary, cache), mask=mask, scores=scores_of(mha.inner))
    return None if out is None else out.view(x.shape[0], 1, -1)


def latent_step(mla: Any, x: Tensor, cache: Any, mask: Mask | Tensor | None, form: str) -> Tensor | None:
    """Weighted sums of latents (B, H, 1, C) of `LatentAttention`; None where the usual way has to be taken."""
    rotary, C, R = mla.rotary, mla.kv_lora_rank, mla.rope_dim
    if not is_step(mla, x, cache, mask, mla.kv_a_proj_with_mqa) or rotary is None or rotary.head_dim != R:
        return None
    if type(mla.kv_b_proj.weight) is not nn.Parameter:
        return None
    if form != "absorbed" and not (form == "auto" and mla.costs.absorbs_token(cache.lengths)):
        return None
    nope, rope = mla.queries(x)
    key = torch.cat(mla.compress(x), dim=-1)
    query = torch.cat((mla.to_latent(nope), rope), dim=-1)
    turn = rotary.turn(cache.lengths)._replace(first=C)
    out: Tensor | None = cache.step(query, key, turn=turn, mask=mask, scores=scores_of(mla.inner))
    return out
