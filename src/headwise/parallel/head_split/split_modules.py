"""The attention modules of `headwise.nn` with their heads split over ranks.

`headwise.parallel.tensor_parallel` sets these classes on existing modules, as `torch.distributed.fsdp.fully_shard` and
`headwise.nn.replace` do: modules, parameter names and hooks stay, and `headwise.nn` needs no code for ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...nn.attention_mode import current_mode
from ...nn.gated import GatedMultiHeadAttention, output_gate_of, times_gate
from ...nn.hooks.probe import observed
from ...nn.latent import LatentAttention
from ...nn.multihead import MultiHeadAttention
from .shards import HeadShards


class SplitMultiHeadAttention(MultiHeadAttention):
    """A `MultiHeadAttention` that computes the heads of this rank.

    Attributes:
        shards: The heads of this rank.
    """

    shards: HeadShards

    def _project(self, x: Tensor, for_keys: Tensor, for_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values for the heads of this rank."""
        shards, q, k, v = self.shards, self.q_proj, self.k_proj, self.v_proj
        x, for_keys, for_values = shards.shared_inputs(q, x, for_keys, for_values)
        key, value = shards.keys(k, k(for_keys), self.head_dim), shards.keys(v, v(for_values), self.value_dim)
        return shards.queries(q(x), self.head_dim), key, value

    def _project_queries(self, x: Tensor) -> Tensor:
        """Compute queries for the heads of this rank."""
        return self.shards.queries(self.q_proj(*self.shards.shared_inputs(self.q_proj, x)), self.head_dim)

    def _normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Apply q_norm and k_norm; the gradients of their parameters are summed over ranks."""
        if self.q_norm is None or self.k_norm is None:
            return query, key
        call = self.shards.call
        return call(self.q_norm, query).to(query.dtype), call(self.k_norm, key).to(key.dtype)

    def _gate(self, x: Tensor, gate: Tensor | None) -> Tensor | None:
        """Return the gate of the call, and the module's own, for the heads of this rank."""
        shards = self.shards
        if not isinstance(self, GatedMultiHeadAttention):
            return None if gate is None else shards.gate(gate)
        known = output_gate_of(self)
        own = self.gate(*shards.shared_inputs(self.gate if known is None else known.proj, x))
        if own.shape[1] == self.num_heads:  # torch's plan did not split the gate
            own = shards.gate(own)
        out_shape = (x.shape[0], shards.share.count, x.shape[1], self.value_dim)
        return times_gate(own, None if gate is None else shards.gate(gate), out_shape)

    def _attend(self, query: Tensor, key: Any, value: Tensor | None, **options: Any) -> Tensor:
        """Call the inner part with the mask for the heads of this rank."""
        shards = self.shards
        return shards.call(self.inner, query, key, value, **options | {"mask": shards.mask(options["mask"])})


class SplitLatentAttention(LatentAttention):
    """A `LatentAttention` in which each rank has all latents and computes its own heads.

    Attributes:
        shards: The heads of this rank.
    """

    shards: HeadShards

    def forward(self, x: Tensor, *, mask: Any = None, **options: Any) -> Any:
        """Attend with the mask for the heads of this rank: see `LatentAttention.forward`."""
        return super().forward(x, mask=None if mask is None else self.shards.mask(mask), **options)

    def _project_queries(self, projection: nn.Module, x: Tensor) -> Tensor:
        """Compute queries for the heads of this rank."""
        return super()._project_queries(projection, *self.shards.shared_inputs(projection, x))

    def _join(self, latent: Tensor, rope: Tensor) -> Tensor:
        """Return the vectors that a cache stores; their gradient is summed over ranks."""
        return self.shards.group.shared(super()._join(latent, rope))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """Call the inner part with its parameters for the heads of this rank."""
        return self.shards.call(self.inner, query, key, value, mask=mask)

    def _attend_latents(self, query: Tensor, key: Tensor, mask: Any, *, absorbed: bool) -> Tensor:
        """Attend with the heads of this rank, also if tokens are split."""
        if current_mode() is None:
            return super()._attend_latents(query, key, mask, absorbed=absorbed)
        with self.shards.mode():
            return super()._attend_latents(query, key, mask, absorbed=absorbed)

    def _split_heads(self, fused: Tensor, size: int) -> Tensor:
        """Reshape the heads of this rank."""
        return self.shards.queries(fused, size)

    def _expansion_weight(self) -> Tensor | None:
        """Return the weight for the heads of this rank: torch's hooks on kv_b_proj would sum gradients twice."""
        return self._up_weight()

    def _up_weight(self) -> Tensor | None:
        """Return the rows of kv_b_proj's weight for the heads of this rank."""
        return self.shards.weight(self.kv_b_proj)

    def _inner_options(self) -> dict[str, Any]:
        """Return the options of the inner part, with the sinks of this rank."""
        options = super()._inner_options()
        if isinstance(sinks := options.get("sinks"), Tensor):
            options["sinks"] = self.shards.parameter(sinks)
        return options


def set_shards(module: MultiHeadAttention | LatentAttention, shards: HeadShards) -> None:
    """Let a module compute the heads of this rank; a class derived from ours keeps its own methods."""
    split = SplitMultiHeadAttention if isinstance(module, MultiHeadAttention) else SplitLatentAttention
    kind = type(module)
    derived = kind not in (MultiHeadAttention, LatentAttention)
    module.__class__ = type(kind.__name__, (split, kind), {"__module__": kind.__module__}) if derived else split
    vars(module)["shards"] = shards


@observed.register(SplitMultiHeadAttention)
@observed.register(SplitLatentAttention)
def _(
    module: SplitMultiHeadAttention | SplitLatentAttention, call: dict[str, Any], keywords: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    """Return the call with the heads of all ranks, in order, and the part of an answer for this rank."""
    shards = module.shards
    names = ("query", "key", "value")
    call |= dict(zip(names, shards.gather_heads(*(call[name] for name in names)), strict=True))
    if call.get("sinks") is not None:
        call["sinks"] = shards.group.gathered(call["sinks"], 0)
    own = isinstance(module, GatedMultiHeadAttention)
    call |= {
        "mask": keywords.get("mask"),
        "gate": shards.group.gathered(call["gate"], 1) if own else keywords.get("gate"),
    }
    return call, lambda answer: shards.group.parted(answer, 1)
