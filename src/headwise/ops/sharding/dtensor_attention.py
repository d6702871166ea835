"""Attention of DTensors that are sharded by batch or by head: each rank computes its part without communication.

Every batch row and every head is independent. Replicated keys and values (`Replicate()`) serve queries sharded by head,
for any number of key-value heads; their gradients are then summed over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...shapes import check_attention, check_gate, check_options
from ..masks.indexing import Region
from ..masks.mask import Mask, as_mask
from .heads import Group, as_dtensor, drawn, keys_read, pick_heads, seed_of_part
from .masks import mapped, share_of_mask

RULE = "attention of DTensors takes query, key and value cut by batch, Shard(0), or by head, Shard(1), or Replicate()"


def any_dtensor(*tensors: object) -> bool:
    """Return whether one of the tensors is a DTensor."""
    return any(as_dtensor(x) is not None for x in tensors)


class _Cut(NamedTuple):
    """The sharding of the query, and the rows and heads of this rank."""

    mesh: Any
    placements: tuple[Any, ...]
    rows: slice
    heads: slice

    def plain(self, x: Tensor) -> Tensor:
        """Return the whole tensor; its gradient is the sum over the ranks that have other parts of the query."""
        from torch.distributed.tensor import Partial, Replicate

        if not isinstance(x, Tensor):  # `attend` raises the error
            return x
        dims = [dim for dim, place in enumerate(self.placements) if place.is_shard()]
        spread = as_dtensor(x)
        if spread is None:
            for dim in dims:
                x = Group(self.mesh, dim).shared(x)
            return x
        whole = spread.redistribute(self.mesh, [Replicate()] * len(self.placements))
        parts = [Partial() if dim in dims else Replicate() for dim in range(len(self.placements))]
        return whole.to_local(grad_placements=parts)


def attend_parts(
    attend: Callable[..., Any],
    tensors: tuple[Any, Any, Any],
    mask: Mask | Tensor | None,
    sinks: Tensor | None,
    gate: Tensor | None,
    **options: Any,
) -> Any:
    """Run `attend` on the parts of this rank and return DTensors that are sharded like the query.

    Raises:
        ValueError: the tensors are not all DTensors of one mesh, or are sharded by token, within heads, or not like the
            query; a rank has no heads; or the native kernel does not support the dropout.
    """
    query, key, value = tensors
    placed = _checked(query, key, value)
    seed = None
    if check_options(None, None, None, None, options.get("dropout", 0.0))[2]:
        number, H = drawn(), query.shape[1]
        for dim in range(placed.mesh.ndim):
            number = Group(placed.mesh, dim).first_of(number)
        seed = seed_of_part(number, H, placed.rows.start * H + placed.heads.start)
    keys = keys_read(placed.heads, query.shape[1] // key.shape[1])
    q, k, v = query.to_local(), _here(key, placed, keys), _here(value, placed, keys)
    mask = mapped(as_mask(mask), placed.plain)
    B, H, T, _ = query.shape
    batch, heads = ((part.start, part.stop) for part in (placed.rows, placed.heads))
    mask.check(B, H, T, key.shape[2], q.device)
    if sinks is not None:
        check_options(query, None, None, sinks, 0.0)
        sinks = placed.plain(sinks)[placed.heads]
    if gate is not None:
        gate = check_gate(placed.plain(gate), (*query.shape[:3], value.shape[3]), q.device)
        gate = Region(heads=heads, batch=batch).cut(gate, batch=0, heads=1)
    mask = share_of_mask(mask, batch, heads)
    out = attend(q, k, v, seed=seed, mask=mask, sinks=sinks, gate=gate, **options)
    shape = query.shape[:3]
    if isinstance(out, tuple):
        return _spread(out[0], (*shape, value.shape[3]), placed), _spread(out[1], shape, placed)
    return _spread(out, (*shape, value.shape[3]), placed)


def _checked(query: Any, key: Any, value: Any) -> _Cut:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, x in (("query", query), ("key", key), ("value", value)):
        if as_dtensor(x) is None:
            raise ValueError(
                f"query, key and value are DTensors all, or none of them is; {name} is a {type(x).__name__}; make it "
                "one with torch.distributed.tensor.distribute_tensor(x, mesh, placements)"
            )
        if x.ndim != 4 or x.device_mesh != query.device_mesh:
            raise ValueError(f"{RULE}, of four axes and on one mesh; {name} is {tuple(x.shape)} on {x.device_mesh}")
        _check_placements(name, x.placements)
    check_attention(query, key, value)
    _check_heads(query, key, value)
    (b, h, *_), (row, head, *_) = compute_local_shape_and_global_offset(
        query.shape, query.device_mesh, query.placements
    )
    return _Cut(query.device_mesh, query.placements, slice(row, row + b), slice(head, head + h))


def _check_heads(query: Any, *keys: Any) -> None:
    """Check that each rank has heads and the key-value heads for them; every rank gets the same result."""
    cuts = [size for size, place in zip(query.device_mesh.shape, query.placements, strict=True) if place.is_shard(1)]
    H, K, n = query.shape[1], keys[0].shape[1], math.prod(cuts)
    if -(-H // n) * (n - 1) >= H or (len(cuts) > 1 and H % n):
        raise ValueError(
            f"{H} heads over {n} processes leave one process without a head; use a number that divides the heads"
        )
    for name, x in zip(("key", "value"), keys, strict=True):
        for of_query, of_x in zip(query.placements, x.placements, strict=True):
            if not of_x.is_replicate() and of_x != of_query:
                raise ValueError(
                    f"key and value are cut as the query is, {query.placements}, or Replicate(); {name} is "
                    f"{x.placements}"
                )
        if K != H and (H % n or K % n) and any(place.is_shard(1) for place in x.placements):
            raise ValueError(
                f"{H} query heads and {K} key-value heads cut over {n} processes part queries from the {name}s that "
                "they read; make key and value Replicate() along that dimension of the mesh"
            )


def _check_placements(name: str, placements: tuple[Any, ...]) -> None:
    for place in placements:
        if place.is_shard(2):
            raise ValueError(
                f"{RULE}; {name} is cut by token, {placements}; use headwise.parallel.context_parallel, which sends "
                "what tokens of other processes attend to"
            )
        if not (place.is_replicate() or place.is_shard(0) or place.is_shard(1)):
            raise ValueError(
                f"{RULE}; {name} is {placements}; bring it there with {name}.redistribute(placements=[...])"
            )


def _here(x: Any, placed: _Cut, keys: tuple[int, ...]) -> Tensor:
    """Return the key-value heads that the queries of this rank use."""
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    parts = [
        Partial() if of_query.is_shard() and of_x.is_replicate() else of_x
        for of_query, of_x in zip(placed.placements, x.placements, strict=True)
    ]
    local: Tensor = x.redistribute(placements=x.placements).to_local(grad_placements=parts)  # the gradient is summed
    _, (row, head, *_) = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    local, wanted = local[placed.rows.start - row : placed.rows.stop - row], tuple(key - head for key in keys)
    return local if tuple(range(local.shape[1])) == wanted else pick_heads(local, wanted)


def _spread(local: Tensor, shape: tuple[int, ...], placed: _Cut) -> Any:
    """Return a local part as the DTensor of the whole."""
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(), placed.mesh, placed.placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
