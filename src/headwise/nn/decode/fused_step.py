"""Fast path for one decode step of a module: its projections, and `step` of the cache between them.

The conditions are checked with little overhead, as decoding takes one step per token. If one of them fails, the modules
run their general path with all checks. Attention is bitwise equal in both; projections of at most eight rows are summed
in another order here (`fast_linear`), so they are equal up to rounding.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...ops.masks.mask import Mask
from ..attention_mode import current_mode
from ..hooks.projections import is_unmodified, plain_weight
from ..inner_attention import InnerAttention
from ..rotary import Rotary
from .fast_linear import FastLinear, few_rows

PLAIN = (nn.Linear, FastLinear)


def is_step(module: Any, x: Any, cache: Any, mask: Any, projection: nn.Module) -> bool:
    """Return whether a call with a cache can be a step: one token per row, and only parts of known classes."""
    parts = module._modules  # faster than attribute access, which calls nn.Module.__getattr__
    inner, rotary, weight = parts["inner"], parts.get("rotary"), projection._parameters.get("weight")
    return (
        (mask is None or type(mask) is Mask)
        and hasattr(cache, "takes_steps")
        and cache.takes_steps(mask)  # False with gradients, autocast, torch.compile, ...
        and type(x) is Tensor
        and x.ndim == 3
        and x.shape[1:] == (1, module.d_model)
        and type(weight) is nn.Parameter  # not a tensor subclass, whose layout is its own
        and type(projection) in PLAIN
        and x.dtype == weight.dtype
        and current_mode() is None
        and type(inner) is InnerAttention
        and inner.backend in ("auto", "native")
        and not (inner.training and inner.dropout)
        and is_unmodified(inner)
        and ((type(rotary) is Rotary and is_unmodified(rotary)) or (rotary is None and module.rotary is None))
    )


def heads_of(fused: Any, heads: int, size: int) -> Tensor | None:
    """Reshape (B, 1, heads * size) to (B, heads, 1, size); return None for any other shape or type."""
    if type(fused) is not Tensor or fused.ndim != 3 or fused.shape[1] != 1 or fused.shape[2] != heads * size:
        return None
    return fused.view(fused.shape[0], heads, 1, size) if fused.is_contiguous() else None


def projected(part: nn.Module, x: Tensor) -> Any:
    """Compute a projection; a plain linear layer is computed directly, without a module call, natively for few rows."""
    own = vars(part)["_parameters"]
    weight = own.get("weight")
    if type(part) not in PLAIN or weight is None or not is_unmodified(part):
        return part(x)
    out = few_rows(x, weight, own.get("bias"))
    return torch._C._nn.linear(x, weight, own.get("bias")) if out is None else out


def multihead_step(mha: Any, x: Tensor, cache: Any, mask: Mask | Tensor | None, gate: Tensor | None) -> Tensor | None:
    """Compute the concatenated heads (B, 1, H * V) of `MultiHeadAttention`; None if the general path must be used."""
    parts = mha._modules
    if not is_step(mha, x, cache, mask, parts["q_proj"]) or mha.memory_dim is not None:
        return None
    if mha.rotary is not None and mha.rotary.head_dim != mha.head_dim:
        return None
    key = heads_of(projected(parts["k_proj"], x), mha.num_kv_heads, mha.head_dim)
    value = heads_of(projected(parts["v_proj"], x), mha.num_kv_heads, mha.value_dim)
    query = heads_of(projected(parts["q_proj"], x), mha.num_heads, mha.head_dim)
    if query is None or key is None or value is None:
        return None
    if mha.q_norm is not None:
        query, key = mha._normalize(query, key)
    turn = None if mha.rotary is None else mha.rotary.turn(cache.lengths)
    inner, gate = parts["inner"], mha._gate(x, gate)
    options = {"mask": mask, "scale": inner.scale, "softcap": inner.softcap, "sinks": inner.sinks}
    gated = {} if gate is None else {"gate": gate}
    out = cache.step(query, key, value, turn=turn, **options, **gated)
    return None if out is None else out.view(x.shape[0], 1, -1)


def latent_step(mla: Any, x: Tensor, cache: Any, mask: Mask | Tensor | None, form: str) -> Tensor | None:
    """Compute the concatenated heads (B, 1, H * V) of an absorbed `LatentAttention`; None to use the general path.

    Queries are projected to the latent space and the results back by the same products as in `_to_latent` and
    `_from_latent` for one token.
    """
    parts, H, C = mla._modules, mla.num_heads, mla.kv_lora_rank
    compress, rotary = parts["kv_a_proj_with_mqa"], parts.get("rotary")
    up = plain_weight(parts["kv_b_proj"], bias=False)
    if rotary is None or not is_step(mla, x, cache, mask, compress) or rotary.head_dim != mla.rope_dim:
        return None
    if type(up) is not nn.Parameter or up.dtype != x.dtype or not (up.is_cpu and x.is_cpu and up.is_contiguous()):
        return None
    if form != "absorbed" and not (form == "auto" and mla.costs.cheaper(1, cache.lengths) == "absorbed"):
        return None
    B, R, fused, new = x.shape[0], mla.rope_dim, _queries(mla, parts, x), projected(compress, x)
    plain = type(fused) is type(new) is Tensor and fused.dtype == new.dtype == up.dtype
    if not plain or fused.shape != (B, 1, H * mla.head_dim) or new.shape != (B, 1, C + R):
        return None
    up_HNC, up_HCV = _up(mla, up)
    latent_B1C, rope_B1R = new.split_with_sizes((C, R), -1)
    key = torch.cat((_normed(parts["kv_a_layernorm"], latent_B1C), rope_B1R), -1).unsqueeze(1)
    # bmm needs the head axis first; for one row this is already the memory layout.
    if B == 1:
        nope, rope = fused.reshape(H, 1, mla.head_dim).split_with_sizes((mla.nope_dim, R), -1)
        query = torch.cat((torch.bmm(nope, up_HNC), rope), -1).unsqueeze(0)
    else:
        nope, rope = fused.reshape(B, H, mla.head_dim).split_with_sizes((mla.nope_dim, R), -1)
        query = torch.cat((torch.bmm(nope.transpose(0, 1), up_HNC).transpose(0, 1), rope), -1).unsqueeze(2)
    inner = parts["inner"]
    scale = mla.head_dim**-0.5 if inner.scale is None else inner.scale
    options = {"mask": mask, "scale": scale, "softcap": inner.softcap, "sinks": inner.sinks}
    out = cache.step(query, key, turn=rotary.turn(cache.lengths, first=C), **options)
    if out is None:
        return None
    if B == 1:
        return torch.bmm(out.view(H, 1, C), up_HCV).view(1, 1, -1)
    return torch.bmm(out.squeeze(2).transpose(0, 1), up_HCV).transpose(0, 1).reshape(B, 1, -1)


_UPS: WeakKeyDictionary[nn.Module, tuple[Any, Tensor, Tensor]] = WeakKeyDictionary()


def _up(mla: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of kv_b_proj for queries (H, N, C) and values (H, C, V), cached for each weight."""
    made, at = _UPS.get(mla), (weight.data_ptr(), weight.dtype, mla.num_heads, mla.nope_dim)
    if made is None or made[0] != at:
        key, value = weight.detach().view(mla.num_heads, -1, mla.kv_lora_rank).split((mla.nope_dim, mla.value_dim), 1)
        made = _UPS[mla] = at, key, value.transpose(1, 2)
    return made[1], made[2]


def _queries(mla: Any, parts: Any, x: Tensor) -> Any:
    """Compute the fused queries, before `LatentAttention._queries` splits them into heads."""
    if mla.q_lora_rank is None:
        return projected(parts["q_proj"], x)
    latent = projected(parts["q_a_proj"], x)
    return projected(parts["q_b_proj"], _normed(parts["q_a_layernorm"], latent))


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Compute a norm in the dtype of `x`; a plain RMSNorm is computed directly, without a module call."""
    if type(norm) is not nn.RMSNorm or not is_unmodified(norm):
        return norm(x).to(x.dtype)
    out = torch.rms_norm(x, norm.normalized_shape, norm._parameters["weight"], norm.eps)
    return out if out.dtype == x.dtype else out.to(x.dtype)
