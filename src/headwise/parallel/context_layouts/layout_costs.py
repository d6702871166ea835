"""The bytes and the least time of each layout, from the cost model of `headwise.plan.ranks.communication`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...ops.masks.mask import Mask, as_mask
from ...ops.masks.positional_rules import Blocks
from ...ops.masks.rules import Band
from ...plan.ranks.communication import LAYOUTS, LayoutCost, Link, layout_cost, layout_costs
from ...plan.ranks.sharding import MeshCall
from ...shapes import check_attention
from .call import ContextCall


def mesh_call_of(mask: Mask, T: int, S: int, **sizes: int | None) -> MeshCall:
    """Return the call for the cost model: causal, window, chunks or full; another mask becomes one that contains it."""
    lefts: list[int] = []
    rights: list[int] = []
    chunk = None
    for rule in mask.parts:
        if isinstance(rule, Band) and not rule.kept and _is_at_the_end(rule.offset, T, S):
            lefts += [] if rule.left is None else [rule.left - 1]
            rights += [] if rule.right is None else [rule.right]
        elif isinstance(rule, Blocks) and _is_at_the_end(rule.offset, T, S):
            chunk = rule.size
    left, right = min(lefts, default=None), min(rights, default=None)
    left = max(1, left) if left is not None else None
    if chunk is not None and right == 0:
        left = None  # chunks allow fewer keys than the window, or nearly as few
    else:
        chunk = None
    if right not in (0, left):
        left = right = None if right is None or left is None else max(left, right)
    return MeshCall(T, S, left=left, right=right, chunk=chunk, **sizes)  # type: ignore[arg-type]


def _is_at_the_end(offset: int | Tensor | None, T: int, S: int) -> bool:
    """Return whether the last query is at the position of the last key, in every row of the batch."""
    if isinstance(offset, Tensor):
        return not offset.is_meta and bool((offset == S - T).all())
    return offset in (None, S - T)


def fastest_layout(call: ContextCall, query: Tensor) -> str:
    """Return the layout with the fewest bytes sent by the busiest rank, in the token order that the planner chooses."""
    T, S = call.T, call.S
    if not 0 < T <= S:
        return "ring"
    latent = None if call.expansion is None else call.expansion.width
    mesh_call = mesh_call_of(
        call.mask,
        T,
        S,
        heads=call.heads,
        kv_heads=call.heads if latent else call.kv_heads,
        head_dim=query.shape[3],
        value_dim=call.value_dim,
        number_bytes=query.itemsize,
        batch=query.shape[0] or 1,
        latent=latent,
    )
    return _fewest_bytes(mesh_call, call.comm.world)


def _fewest_bytes(call: MeshCall, ranks: int) -> str:
    """Return the layout that ``layout="auto"`` uses."""
    return min((layout_cost(call, layout, ranks) for layout in LAYOUTS), key=lambda cost: cost.bytes).layout


@dataclass(frozen=True)
class LayoutCosts:
    """The bytes and times of each layout, the cheapest first: by time if a link is given. Prints as a table.

    Attributes:
        ranks: the number of ranks.
        costs: the cost of each layout.
        auto: the layout that ``layout="auto"`` uses: the one with the fewest bytes in the forward pass, for any link.
    """

    ranks: int
    costs: tuple[LayoutCost, ...]
    auto: str

    @property
    def layout(self) -> str:
        """The cheapest layout."""
        return self.costs[0].layout

    def __str__(self) -> str:
        lines = [f"{self.ranks} ranks; bytes and time of the rank that has most; `auto` takes {self.auto}"]
        for cost in self.costs:
            seconds = "" if cost.seconds is None else f", {cost.seconds * 1e3:.3g} ms"
            lines.append(
                f"  {cost.layout:<8} {cost.bytes:>16,} bytes in {cost.messages} messages{seconds}"
                f" ({cost.order}, {cost.pairs:,} pairs of a query head and a key)"
            )
        return "\n".join(lines)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ranks: int,
    mask: Mask | Tensor | None = None,
    link: Link | None = None,
    flop_rate: float | None = None,
    backward: bool = False,
) -> LayoutCosts:
    """Return the bytes that `context_parallel` would send in each layout, and the least time. Sends nothing.

    Args:
        query: (B, H, T, D) of the whole sequence; only the sizes of query, key and value are read, so tensors on the
            meta device are enough.
        key: (B, K, S, D).
        value: (B, K, S, V).
        ranks: the number of ranks.
        mask: the mask of the whole sequence. If it is not causal, full, a window or chunks, the cost is that of such a
            mask that contains it.
        link: the `headwise.plan.ranks.communication.Link` from a rank to the others, for times.
        flop_rate: the FLOPs per second of a rank, for times.
        backward: return the costs of the backward pass.

    >>> import torch, headwise
    >>> from headwise.plan.ranks.communication import Link
    >>> q, kv = torch.empty(1, 32, 8192, 128, device="meta"), torch.empty(1, 8, 8192, 128, device="meta")
    >>> print(explain(q, kv, kv, ranks=4, mask=headwise.causal() & headwise.window(512), link=Link(50e9, 2e-6)))
    4 ranks; bytes and time of the rank that has most; `auto` takes ring
      ring            4,186,112 bytes in 1 messages, 0.0857 ms (contiguous, 33,554,432 pairs of a query head and a key)
      gather         50,331,648 bytes in 2 messages, 1.01 ms (contiguous, 33,554,432 pairs of a query head and a key)
      ulysses        62,914,560 bytes in 2 messages, 1.26 ms (contiguous, 32,507,904 pairs of a query head and a key)
    """
    check_attention(query, key, value)
    (B, H, T, D), (K, S), V = query.shape, key.shape[1:3], value.shape[3]
    sizes = {"heads": H, "kv_heads": K, "head_dim": D, "value_dim": V, "number_bytes": query.itemsize, "batch": B}
    mesh_call = mesh_call_of(as_mask(mask), T, S, **sizes)
    costs = layout_costs(mesh_call, ranks, link=link, flop_rate=flop_rate, backward=backward)
    return LayoutCosts(ranks, costs, _fewest_bytes(mesh_call, ranks))
