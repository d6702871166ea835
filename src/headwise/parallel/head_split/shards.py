"""The heads of a module on this rank, and the parts of a call for them.

The heads are split if the weight of the query projection is a DTensor sharded by rows, by
`headwise.parallel.tensor_parallel` or by torch's `parallelize_module`. The module's sizes count all heads; masks,
gates, sinks and slopes are passed for all heads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.attention_mode import attention_mode, current_mode
from ...nn.hooks.projections import HOOKS, description, is_intercepted, is_linear
from ...ops.compiled_calls import outside_graphs
from ...ops.masks.mask import Mask, as_mask
from ...ops.sharding.heads import Group, Share, as_dtensor, pick_heads
from ...ops.sharding.masks import mapped, share_of_mask
from ...shapes import describe
from ...shapes.arguments import check_tensor
from .layers import RankHeadsLinear, as_replica, local_part
from .mode import HeadsMode, LocalHeads


@dataclass(frozen=True)
class HeadShards:
    """The heads of a module that this rank computes."""

    group: Group
    share: Share

    def shared_inputs(self, projection: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the projections; of `RankHeadsLinear`, each gradient is summed over ranks once."""
        if not isinstance(projection, RankHeadsLinear):
            return inputs
        shared = {id(x): self.group.shared(x) for x in inputs}
        return tuple(shared[id(x)] for x in inputs)

    def queries(self, fused: Tensor, size: int) -> Tensor:
        """Reshape (B, T, H_here * size) to (B, H_here, T, size)."""
        fused = local_part(fused)
        if fused.shape[-1] != self.share.count * size:
            raise ValueError(
                f"{self._rule()}: q_proj gives {self.share.count} x {size} = {self.share.count * size} numbers a token "
                f"here; got {describe(fused)}; {WAY_OUT}"
            )
        return _as_heads(fused, size)

    def keys(self, projection: nn.Module, fused: Tensor, size: int) -> Tensor:
        """Reshape (B, S, n * size) to (B, n, S, size), with one head for each of the share's keys.

        If every rank has the keys of all heads, those of this rank are selected and their gradients are summed.
        """
        fused, K = local_part(fused), self.share.num_kv_heads
        own = isinstance(projection, RankHeadsLinear)
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
            f"{self.share.num_heads} query heads and {self.share.num_kv_heads} key-value heads are split over "
            f"{self.group.size} processes"
        )

    def gather_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the heads of all ranks in order, on every rank.

        Keys that share memory with the values (the latents of latent attention) are already the same on every rank.
        """
        query = self.group.gathered(query, 1)
        if key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
            return query, key, value
        keys, values = (pick_heads(self.group.gathered(x, 1), self.share.places, 1) for x in (key, value))
        return query, keys, values

    def call(self, part: nn.Module, *args: Any, **options: Any) -> Any:
        """Call a part of the module (a norm or the inner part) with its parameters for the heads of this rank."""
        mine = {name: self.parameter(x) for name, x in part.named_parameters()}
        with self.mode():
            return torch.func.functional_call(part, mine, args, options) if mine else part(*args, **options)

    # The compiler cannot leave the mode again when a message within it breaks the graph.
    outside_graphs(call, "its heads are split over processes, whose messages are not traced")

    def mode(self) -> AbstractContextManager[None]:
        """Enter the mode in which inner parts attend with the heads of this rank."""
        return attention_mode(HeadsMode(self.some, current_mode()))

    @property
    def some(self) -> LocalHeads:
        """The heads of this rank among all heads."""
        return LocalHeads(self.share.num_heads, self.share.heads.start, self.group)

    def parameter(self, x: Tensor) -> Tensor:
        """Return a parameter for the heads of this rank: a slice if it has one number per head, else all of it."""
        spread = as_dtensor(x)
        if spread is not None:
            is_cut = any(place.is_shard() for place in spread.placements)
            return local_part(spread) if is_cut else as_replica(spread, self.group.dim)
        x = self.group.shared(x)
        return x[self.share.heads] if x.shape == (self.share.num_heads,) else x

    def weight(self, projection: nn.Module) -> Tensor | None:
        """Return the weight for the heads of this rank if the projection is plain linear without bias; else None.

        Raises:
            TypeError: torch split the projection, and it is not a plain linear layer, so that its output and the
                summation of its gradients are unknown.
        """
        if type(projection) is RankHeadsLinear:
            whole = projection.bias is None and not is_intercepted(projection)
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
        """Return the mask for the heads of this rank; gradients of its learned tensors are summed over ranks."""
        whole = as_mask(mask)
        whole = mapped(whole, self.group.shared) if whole.learns else whole
        return share_of_mask(whole, None, (self.share.heads.start, self.share.heads.stop))

    def gate(self, gate: Tensor) -> Tensor:
        """Return the gate (H,), (B, H), ... for the heads of this rank."""
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


def shards_of(module: Any, projection: nn.Module, num_kv_heads: int) -> HeadShards | None:
    """Return the heads of `module` on this rank, from the sharding of `projection`; None if they are not split.

    Raises:
        ValueError: the number of heads is not divisible by the ranks, or heads are split along several mesh dimensions.
    """
    weight = as_dtensor(getattr(projection, "weight", None))
    if weight is None:
        return None
    cuts = [dim for dim, place in enumerate(weight.placements) if place.is_shard(0)]
    if not cuts:
        return None
    if len(cuts) > 1:
        raise ValueError(
            f"heads are split along one dimension of a mesh; {type(module).__name__} is split along {len(cuts)}: "
            f"{weight.placements}; flatten them into one"
        )
    group = Group(weight.device_mesh, cuts[0])
    return HeadShards(group, Share(module.num_heads, num_kv_heads, group.size, group.rank))


def _as_heads(fused: Tensor, size: int) -> Tensor:
    return fused.unflatten(-1, (-1, size)).transpose(1, 2)
