"""Attention modules whose heads are dealt out to processes: what of a call is for the heads that are here.

A module is dealt out where its query projection is a DTensor cut by rows: by `headwise.parallel.tensor_parallel`, or by
torch's `parallelize_module`. Its sizes stay those of all heads; masks, gates, sinks and slopes are given for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.masks.mask import Mask, as_mask
from ...ops.sharding.heads import Group, Share, as_dtensor, pick_heads
from ...ops.sharding.masks import mapped, share_of_mask
from ...shapes import describe
from ...shapes.arguments import check_tensor
from ..hooks.projections import HOOKS, description, has_hooks, is_linear
from .tokens import LocalHeads, within_heads


class RankHeads(nn.Linear):
    """A projection to heads: gives those of its process alone.

    Attributes:
        keys: the heads to give of a weight that every process has whole; None where the weight is cut.
        size: numbers of a head.
    """

    group: Group
    keys: tuple[int, ...] | None = None
    size: int = 0

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, n * size); the input's gradient is this process's part of it: see `Dealt.entering`."""
        weight, bias = (None if p is None else self._own(p) for p in (self.weight, self.bias))
        return nn.functional.linear(x, weight, bias)

    def _own(self, parameter: Tensor) -> Tensor:
        spread = as_dtensor(parameter)
        if self.keys is None:
            local: Tensor = spread.to_local()
            return local
        heads = as_replica(spread, self.group.dim).unflatten(0, (-1, self.size))
        return pick_heads(heads, self.keys, 0).flatten(0, 1)


class SumOfHeads(nn.Linear):
    """The projection from heads to the output: the sum of what those of every process make of it."""

    group: Group

    def forward(self, heads: Tensor) -> Tensor:
        """(B, T, d_model) from this process's heads (B, T, n * size)."""
        spread: Any = self.weight
        out = self.group.summed(nn.functional.linear(heads, spread.to_local()))
        return out if self.bias is None else out + here_of(self.bias).to(out.dtype)


class ReplicatedLinear(nn.Linear):
    """A projection that every process has and computes alike."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, n)."""
        return nn.functional.linear(x, here_of(self.weight), None if self.bias is None else here_of(self.bias))


class GatheredNorm(nn.RMSNorm):
    """A norm that every process has and computes alike."""

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        return nn.functional.rms_norm(x, self.normalized_shape, here_of(self.weight), self.eps)


@dataclass(frozen=True)
class HeadShards:
    """The heads of a module that this process computes."""

    group: Group
    share: Share

    def entering(self, projection: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The projections' inputs: where they give their own heads alone, an input's gradients are summed, once."""
        if not isinstance(projection, RankHeads):
            return inputs
        shared = {id(x): self.group.shared(x) for x in inputs}
        return tuple(shared[id(x)] for x in inputs)

    def queries(self, fused: Tensor, size: int) -> Tensor:
        """(B, T, H_here * size) -> (B, H_here, T, size)."""
        fused = here_of(fused)
        if fused.shape[-1] != self.share.count * size:
            raise ValueError(
                f"{self._rule()}: q_proj gives {self.share.count} x {size} = {self.share.count * size} numbers a token "
                f"here; got {describe(fused)}; {WAY_OUT}"
            )
        return _as_heads(fused, size)

    def keys(self, projection: nn.Module, fused: Tensor, size: int) -> Tensor:
        """(B, S, n * size) -> (B, n, S, size): one head for each of the share's keys.

        From keys of all heads, which every process has, it takes those; their gradients are summed.
        """
        fused, K = here_of(fused), self.share.num_kv_heads
        own = isinstance(projection, RankHeads)
        here = len(self.share.keys) if own else K // self.group.size
        if fused.shape[-1] == here * size and (own or self.share.deals_keys):
            return _as_heads(fused, size)
        if not own and fused.shape[-1] == K * size:
            return self.share.pick(_as_heads(self.group.shared(fused), size))
        parts = f"{here} x {size} = {here * size}" if own or self.share.deals_keys else "whole key-value heads"
        raise ValueError(
            f"{self._rule()}: k_proj and v_proj give {parts}, or all {K} x {size} = {K * size} numbers a token; got "
            f"{describe(fused)} here; {WAY_OUT}"
        )

    def _rule(self) -> str:
        return (
            f"{self.share.num_heads} query heads and {self.share.num_kv_heads} key-value heads are dealt out to "
            f"{self.group.size} processes"
        )

    def together(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of all processes, in their order; each process goes on alike with them.

        Keys that are the values too (the latents of latent attention) are the same on every process already.
        """
        query = self.group.gathered(query, 1)
        if key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
            return query, key, value
        keys, values = (pick_heads(self.group.gathered(x, 1), self.share.places, 1) for x in (key, value))
        return query, keys, values

    def call(self, part: nn.Module, *args: Any, **options: Any) -> Any:
        """What a part of the module (a norm, what attends) gives with its parameters for the heads here."""
        mine = {name: self.parameter(x) for name, x in part.named_parameters()}
        with within_heads(self.some):
            return torch.func.functional_call(part, mine, args, options) if mine else part(*args, **options)

    @property
    def some(self) -> LocalHeads:
        """The heads here, among all."""
        return LocalHeads(self.share.num_heads, self.share.heads.start, self.group)

    def parameter(self, x: Tensor) -> Tensor:
        """A parameter as the heads here use it: cut where it has one number a head, the same for all otherwise."""
        spread = as_dtensor(x)
        if spread is not None and any(place.is_shard() for place in spread.placements):
            local: Tensor = spread.to_local()
            return local
        if spread is not None:
            return as_replica(spread, self.group.dim)
        x = self.group.shared(x)
        return x[self.share.heads] if x.shape == (self.share.num_heads,) else x

    def weight(self, projection: nn.Module) -> Tensor | None:
        """The weight for the heads here, where a call of a projection without bias computes no more than its product.

        Raises:
            TypeError: torch split the projection, and something else answers for it: then what a call of it gives, and
                which of its gradients are summed, is not known.
        """
        if type(projection) is RankHeads:
            whole = projection.bias is None and not has_hooks(projection) and "forward" not in vars(projection)
            return self.parameter(projection.weight) if whole else None
        hooks = [hook for kind in HOOKS for hook in getattr(projection, kind).values()]
        torchs = all(str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in hooks)
        if not is_linear(projection) or not torchs or projection.bias is not None:
            raise TypeError(
                f"{self._rule()}: of what torch's parallelize_module split, a torch.nn.Linear without bias and without "
                f"hooks of yours can be read; got {description(projection)}; {WAY_OUT}"
            )
        weight: Any = projection.weight
        return self.parameter(weight)

    def mask(self, mask: Mask | Tensor | None) -> Mask:
        """The mask for the heads here; what it learns gets the gradient of all."""
        whole = as_mask(mask)
        whole = mapped(whole, self.group.shared) if whole.learns else whole
        return share_of_mask(whole, slice(None), self.share.heads)

    def gate(self, gate: Tensor | None) -> Tensor | None:
        """The gate (H,), (B, H), ... for the heads here."""
        if gate is None:
            return None
        check_tensor("gate", gate, "a float tensor (H,), (B, H), (B, H, T) or (B, H, T, V)")
        axis = min(gate.ndim, 2) - 1
        if gate.shape[axis] == 1:
            return self.group.shared(gate)
        if gate.shape[axis] != self.share.num_heads:
            raise ValueError(
                f"gate has a number for each of all {self.share.num_heads} heads, also where this process computes "
                f"{self.share.count} of them; got {describe(gate)}"
            )
        return self.group.shared(gate).narrow(axis, self.share.heads.start, self.share.count)


WAY_OUT = (
    "headwise.parallel.tensor_parallel(module, mesh) splits the module by whole heads, any number of key-value heads "
    "included"
)


def dealt(module: Any, projection: nn.Module, num_kv_heads: int | None = None) -> HeadShards | None:
    """What of `module` this process computes, by how its query projection is cut; None where that is all.

    Raises:
        ValueError: its heads do not divide over the processes, or are cut twice.
    """
    own = getattr(projection, "weight", None)
    weight = None if type(own) is nn.Parameter else as_dtensor(own)  # asked in every forward
    if weight is None:
        return None
    cuts = [dim for dim, place in enumerate(weight.placements) if place.is_shard(0)]
    if not cuts:
        return None
    if len(cuts) > 1:
        raise ValueError(
            f"heads are dealt out along one dimension of a mesh; {type(module).__name__} is cut along {len(cuts)}: "
            f"{weight.placements}; flatten them into one"
        )
    group = Group(weight.device_mesh, cuts[0])
    K = module.num_heads if num_kv_heads is None else num_kv_heads
    return HeadShards(group, Share(module.num_heads, K, group.size, group.rank))


def as_replica(x: Any, dim: int) -> Tensor:
    """The numbers of a DTensor that every process has; their gradient is the sum over the mesh's dimension `dim`."""
    from torch.distributed.tensor import Partial, Replicate

    places = [Replicate()] * len(x.placements)
    parts = [Partial() if at == dim else place for at, place in enumerate(places)]
    local: Tensor = x.redistribute(placements=places).to_local(grad_placements=parts)
    return local


def here_of(x: Tensor) -> Tensor:
    """This process's part as a plain tensor: all of a parameter that every process has, its gradient whole on each."""
    spread = as_dtensor(x)
    if spread is None:
        return x
    local: Tensor = spread.to_local()
    return local


def _as_heads(fused: Tensor, size: int) -> Tensor:
    return fused.unflatten(-1, (-1, size)).transpose(1, 2)
