"""The layers of attention modules whose heads are split over ranks; their parameters are DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...ops.sharding.heads import Group, as_dtensor, pick_heads


class RankHeadsLinear(nn.Linear):
    """A projection to the heads of this rank.

    Attributes:
        keys: The heads of this rank if every rank has the full weight; None if the weight is sharded.
        size: Size of a head.
    """

    group: Group
    keys: tuple[int, ...] | None = None
    size: int = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, n * size); the input's gradient is only this rank's part: see `HeadShards.shared_inputs`."""
        weight, bias = (None if p is None else self._own(p) for p in (self.weight, self.bias))
        return nn.functional.linear(x, weight, bias)

    def _own(self, parameter: Tensor) -> Tensor:
        if self.keys is None:
            return local_part(parameter)
        heads = as_replica(parameter, self.group.dim).unflatten(0, (-1, self.size))
        return pick_heads(heads, self.keys, 0).flatten(0, 1)


class SumOfHeads(nn.Linear):
    """The output projection of split heads: the sum of the outputs of all ranks."""

    group: Group

    def forward(self, heads: Tensor) -> Tensor:
        """Return (B, T, d_model) from the heads of this rank (B, T, n * size)."""
        out = self.group.summed(nn.functional.linear(heads, local_part(self.weight)))
        return out if self.bias is None else out + local_part(self.bias).to(out.dtype)


class ReplicatedLinear(nn.Linear):
    """A projection that is replicated on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, n)."""
        return nn.functional.linear(x, local_part(self.weight), None if self.bias is None else local_part(self.bias))


class ReplicatedNorm(nn.RMSNorm):
    """A norm that is replicated on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x`, in the same shape."""
        return nn.functional.rms_norm(x, self.normalized_shape, local_part(self.weight), self.eps)


def as_replica(x: Any, dim: int) -> Tensor:
    """Return the full tensor of a DTensor; its gradient is summed over the mesh dimension `dim`."""
    from torch.distributed.tensor import Partial, Replicate

    places = [Replicate()] * len(x.placements)
    parts = [Partial() if at == dim else place for at, place in enumerate(places)]
    return x.redistribute(placements=places).to_local(grad_placements=parts)


def local_part(x: Tensor) -> Tensor:
    """Return the local part of a DTensor as a plain tensor; the gradient of a replicated one is not summed."""
    spread = as_dtensor(x)
    return x if spread is None else spread.to_local()
