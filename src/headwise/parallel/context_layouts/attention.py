"""Context parallel attention: check the arguments, compare them between ranks, choose a layout and call it."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ...distributed.comm import Comm, eager
from ...ops.autocast import in_autocast_dtype
from ...ops.masks.mask import as_mask
from ...ops.options import ScoreOptions
from ...ops.sharding.heads import drawn
from ...plan.ranks.sharding import TokenOrder
from ...shapes import check_attention, check_gate, check_options, check_query_key, compute_dtype
from ...shapes.arguments import check_counts, check_flags, shown
from ..head_split.mode import LocalHeads
from .agreement import mask_text, sinks_text
from .call import ContextCall, Expansion, leaves_of
from .gather import GATHER
from .key_exchange import KeyExchange
from .layout_costs import fastest_layout
from .ring import RING
from .sequence import check_order, held_places
from .ulysses import ulysses

LayoutOption: TypeAlias = Literal["auto", "ring", "gather", "ulysses"]
LAYOUTS: tuple[str, ...] = get_args(LayoutOption)


@eager
def context_parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    mask: Any = None,
    group: ProcessGroup | DeviceMesh | None = None,
    layout: LayoutOption = "auto",
    order: TokenOrder = "contiguous",
    expansion: Expansion | None = None,
    timeout: float | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    r"""Compute `headwise.attention` over a sequence split over ranks: each passes and gets its own tokens.

    $$\text{out}_i = \sum_c e^{l_{ic} - l_i}\, \text{out}_{ic}, \qquad l_i = \log \sum_c e^{l_{ic}}$$

    where c are the parts of the keys and $l_{ic}$ the log of the softmax's denominator over part c.

    The mask is the mask of the whole sequence, as in one process: positions, lengths and ids count over all tokens, and
    dense tensors have size T x S (or 1). The mask, the sinks, the slopes and the tables are equal on every rank.
    The gradients of query, key and value are complete. The gradients of tensors that every rank has (sinks, slopes,
    tables, biases, gates of heads, the tensors of an expansion) are this rank's share: the gradient is their sum over
    ranks, as for weights in data parallel training. `sum_gradients` computes this sum.

    Layouts (all exact; "auto" takes the one that sends the fewest bytes, see `explain`):

    - ``"ring"``: keys are sent while the rank computes attention over earlier ones. Only keys that the mask allows are
      sent: a halo for a window. Memory for the keys of one more rank. Partial outputs are merged in float32.
    - ``"gather"``: all keys go to all ranks, one key-value head at a time. Out and lse are bitwise equal to one
      process.
    - ``"ulysses"``: each rank has all tokens of some heads. Out and lse are bitwise equal to one process; gradients are
      too if the number of ranks divides the number of key-value heads.

    Bitwise equality holds for any number of threads, in float32, bfloat16 and float16, if each stretch of a rank's
    queries has more than 192 rows (queries times H / K); with fewer rows the order of summation differs.

    Args:
        query: (B, H, T_r, D), this rank's queries.
        key: (B, K, S_r, D), this rank's keys; or with `expansion` the vectors (B, 1, S_r, E) that it expands.
        value: (B, K, S_r, V), this rank's values; None with `expansion`.
        mask: the mask of all T queries and S keys.
        group: process group, or `DeviceMesh` of one dimension; all processes by default.
        layout: "auto", "ring", "gather" or "ulysses".
        order: the split of the tokens: "contiguous" (any lengths, rank 0 first) or "zigzag", see `split_sequence`.
        expansion: an `Expansion` if ranks send vectors from which each rank computes keys and values.
        timeout: seconds to wait for another rank, for this group from now on; 30 by default.
        return_lse: also return lse.
        options: `scale`, `softcap`, `sinks`, `dropout`, `gate` of `headwise.attention`. A gate with an axis of queries
            holds this rank's queries. Dropout keeps the same weights as one process, with the seed of rank 0. `some`:
            the `headwise.parallel.head_split.mode.LocalHeads` if these are some of a module's heads; dropout needs it.

    Returns:
        out (B, H, T_r, V); with `return_lse` the pair of out and lse (B, H, T_r).

    Raises:
        TypeError, ValueError: the errors of `headwise.attention`, on this rank; the other ranks raise a `RankError`.
        RankMismatch: the arguments of the ranks do not fit together; every rank raises it.
        RankError: a rank has ended, hangs, or has raised.
    """
    comm = Comm.of(group, timeout)
    args, ranks = _agreed(comm, query, key, value, mask, layout, order, expansion, return_lse, options)
    query, key, value = args.tensors
    queries = held_places([one["T"] for one in ranks], order, "context_parallel", "queries")
    keys = held_places([one["S"] for one in ranks], order, "context_parallel", "keys")
    T, S = (sum(one[name] for one in ranks) for name in ("T", "S"))
    call = args.context_call(comm, queries, keys, T, S, ranks[0]["seed"])
    chosen = fastest_layout(call, query) if layout == "auto" else layout
    if chosen == "ulysses":
        out, lse = ulysses(call, query, key, value, args.sinks, return_lse)
    else:
        leaves = leaves_of(call.mask)
        run = RING if chosen == "ring" else GATHER
        out, lse = KeyExchange.apply(run, call, query, key, value, args.sinks, len(leaves), *leaves, *call.read)
    out = out if args.gate is None else out * args.gate.to(out.dtype)
    return (out, lse) if return_lse else out


def _agreed(comm: Comm, query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> tuple[_Arguments, Any]:
    """Return this rank's checked arguments and the own values of each rank; if any rank's are wrong, all raise."""
    with comm.before("context_parallel"):
        args = _Arguments(*in_autocast_dtype(query, key, value), *rest)
    return args, comm.agree("context_parallel", args.same, args.own)


class _Arguments:
    """The checked arguments of one rank; `same` must be equal on every rank, `own` may differ."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        mask: Any,
        layout: str,
        order: str,
        expansion: Expansion | None,
        return_lse: bool,
        options: dict[str, Any],
    ) -> None:
        unknown = options.keys() - {"scale", "softcap", "sinks", "dropout", "gate", "some"}
        if unknown:
            raise TypeError(f"context_parallel() has no option {', '.join(sorted(unknown))}")
        if not isinstance(layout, str) or layout not in LAYOUTS:
            raise ValueError(f"layout is {', '.join(LAYOUTS)}; got {shown(layout)}")
        check_order(order)
        check_flags(return_lse=return_lse)
        self.expansion = expansion
        if expansion is None:
            if value is None:
                raise ValueError("value is left out where an expansion makes keys and values of `key` alone")
            check_attention(query, key, value)
            self.value_dim = value.shape[3]
        else:
            _check_expansion(query, key, value, expansion)
            self.value_dim = expansion.value_dim
        self.sinks = options.get("sinks")
        self.scale, self.softcap, self.dropout = check_options(
            query, options.get("scale"), options.get("softcap"), self.sinks, options.get("dropout", 0.0)
        )
        B, self.heads, T, D = query.shape
        gate = options.get("gate")
        self.gate = None if gate is None else check_gate(gate, (B, self.heads, T, self.value_dim), query.device)
        self.mask = as_mask(mask).sized(B, self.heads)
        self.tensors, self.kv_heads = (query, key, value), key.shape[1]
        tensors = [query, key, *([] if value is None else [value])]
        read = () if expansion is None else expansion.tensors
        learns = [x.requires_grad for x in tensors]
        learns += [self.mask.learns, self.sinks is not None and self.sinks.requires_grad]
        learns += [any(x.requires_grad for x in read)]
        self.same = {
            "dtype": query.dtype,
            "device": query.device.type,
            "shape (B, H, K, D, V)": (B, self.heads, self.kv_heads, D, self.value_dim),
            "layout": layout,
            "order": order,
            "mask": mask_text(self.mask),
            "options": f"scale={self.scale!r}, softcap={self.softcap}, dropout={self.dropout}, return_lse={return_lse}",
            "sinks": sinks_text(self.sinks),
            "gradients": [one and torch.is_grad_enabled() for one in learns],
            "width of an expansion": None if expansion is None else expansion.width,
        }
        self.some: LocalHeads | None = options.get("some")
        seed = 0
        if self.dropout:
            seed = drawn() if self.some is None else self.some.seed()
        self.own = {"T": T, "S": key.shape[2], "seed": seed}

    def context_call(self, comm: Comm, queries: Any, keys: Any, T: int, S: int, seed: int) -> ContextCall:
        """Return the call over all ranks."""
        query = self.tensors[0]
        self.mask.check(query.shape[0], self.heads, T, S, query.device)
        with torch.enable_grad():
            mask = self.mask.computed_in(compute_dtype(query))
        some = None if self.some is None else (self.some.total, self.some.first)
        options = ScoreOptions(mask, self.scale, self.softcap, dropout=self.dropout)
        sizes = (self.heads, self.kv_heads, self.value_dim)
        name = f"context_parallel, operation {comm.count}"
        return ContextCall(comm, queries, keys, options, *sizes, seed, some, self.expansion, name)


def _check_expansion(query: Tensor, key: Tensor, value: Tensor | None, expansion: Expansion) -> None:
    if not isinstance(expansion, Expansion):
        raise TypeError(f"expansion is a headwise.parallel.Expansion; got {type(expansion).__name__}")
    if value is not None:
        raise ValueError("an expansion makes keys and values of `key` alone: leave value out")
    check_query_key(query[..., :1], key[..., :1])
    if key.shape[1] != 1:
        raise ValueError(f"with an expansion, key is (B, 1, S, E), one vector a token; got {tuple(key.shape)}")
    check_counts(1, value_dim=expansion.value_dim, width=expansion.width)
    if key.shape[3] != expansion.width:
        raise ValueError(
            f"key is (B, 1, S, E) with E = {expansion.width}, the width of the expansion; got {tuple(key.shape)}"
        )
