"""The code shared by the layouts that send keys and keep queries: the autograd node and attention to received keys.

Keys and values arrive a few heads at a time. All queries of the rank that may attend to them are computed, then they
are released. In addition to queries, keys, values, outputs and their gradients, a rank holds only a few heads of the
current keys, of the keys in transfer, and of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from ...plan.ranks.sharding import Stretch
from ...shapes import compute_dtype
from .block import Block, Partial, attend, gradient
from .call import ContextCall, local_slices
from .merge import sink_gradient

KVTensors = list[Tensor]
"""Keys and values (B, k, n, width), or the vectors that an expansion uses: the tensors that ranks send."""


class ReceivedKeys(NamedTuple):
    """The received keys of some heads.

    Attributes:
        keys: the keys and values, or the vectors from which an expansion computes them.
        heads: the range of key-value heads.
        first: the position of the first key in the whole sequence.
    """

    keys: KVTensors
    heads: Stretch
    first: int


class QueryBlock(NamedTuple):
    """Some of a rank's queries, and the received keys that they may attend to."""

    rows: Stretch
    at: slice
    """The slice of these queries in the rank's local tensor."""
    span: Stretch


class Route(NamedTuple):
    """A forward and a backward function that define the order in which keys are sent and used."""

    forward: Callable[[ContextCall, Tensor, KVTensors, Tensor | None], Partial]
    backward: Callable[[GradientSums, KVTensors], KVTensors]
    has_all: bool
    """True if each query gets all its keys in one call, so the kernel can compute as in one process."""


class KeyExchange(torch.autograd.Function):
    """The autograd function of attention between this rank's queries and the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, layout: Route, call: ContextCall, *tensors: Any) -> Any:
        """Return out and lse."""
        query, key, value, sinks, n, *rest = tensors
        with call.comm.telling():
            here = call.with_leaves(query, [x.detach() for x in rest[:n]])
            logits = None if sinks is None else sinks.detach()
            whole = layout.forward(here, query, [key] if value is None else [key, value], logits)
        ctx.call, ctx.layout, ctx.n, ctx.casting = call, layout, n, _casting(query.device.type)
        # The backward pass evaluates the mask again; saving its tensors lets autograd detect changes in between.
        again = [x for x in pytree.tree_leaves(call.mask) if not x.is_inference()]
        ctx.again = len(again)
        ctx.save_for_backward(*again, query, key, value, sinks, *whole, *rest)
        ctx.set_materialize_grads(False)
        return whole.out, whole.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """Return the gradients of the arguments of `forward`."""
        query, key, value, sinks, out, lse, ends, *rest = ctx.saved_tensors[ctx.again :]
        call: ContextCall = ctx.call
        with call.comm.telling(), ctx.casting():
            call.comm.agree(f"backward of {call.name}", {})
            grad_out = torch.zeros_like(out) if grad_out is None else grad_out
            sums = GradientSums(
                ctx.layout, call, query, rest[: ctx.n], sinks, (Partial(out, lse, ends), grad_out, grad_lse)
            )
            grads = ctx.layout.backward(sums, [key] if value is None else [key, value])
            dk, dv = [*(x.to(key.dtype) for x in grads), None][:2]
            of_sinks = None if sinks is None else sink_gradient(sinks, sums.whole, grad_out, grad_lse)
        return None, None, sums.query.to(query.dtype), dk, dv, of_sinks, None, *sums.of_tensors()


def _casting(device: str) -> Callable[[], torch.autocast]:
    """Return the current autocast state for the backward pass, which runs outside it and computes attention again."""
    on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return partial(torch.autocast, device, dtype, on, cache_enabled=torch.is_autocast_cache_enabled())


def queries_with_keys(call: ContextCall, span_of: Callable[[Stretch], Stretch | None]) -> list[QueryBlock]:
    """Return this rank's queries, one stretch at a time, with the keys that they may attend to; most keys first."""
    spans = [(rows, at, span_of(rows)) for rows, at in local_slices(call.queries[call.comm.rank])]
    pairs = [QueryBlock(rows, at, span) for rows, at, span in spans if span is not None]
    return sorted(pairs, key=lambda one: one.span[0] - one.span[1])


def attended(
    call: ContextCall, query: Tensor, received: ReceivedKeys, spans: Sequence[QueryBlock], sinks: Tensor | None = None
) -> Iterator[tuple[slice, slice, Partial]]:
    """Yield heads, rows and the partial result of this rank's queries over the received keys."""
    for heads in groups(call, received):
        k, v = expanded(call, received.keys, heads)
        few = slice(*heads)
        for rows, at, span in spans:
            keys = slice(span[0] - received.first, span[1] - received.first)
            logits = None if sinks is None else sinks[few]
            place = Block(rows, span, heads)
            yield few, at, attend(call, place, query[:, few, at], k[:, :, keys], v[:, :, keys], logits)


def groups(call: ContextCall, received: ReceivedKeys) -> list[Stretch]:
    """Return the query heads to compute together: those of the received heads, or a few at a time with an expansion."""
    if call.expansion is None:
        G = call.heads // call.kv_heads
        return [(received.heads[0] * G, received.heads[1] * G)]
    few = max(1, received.keys[0].shape[3] // call.value_dim)
    return [(h, min(h + few, call.heads)) for h in range(0, call.heads, few)]


class GradientSums:
    """The sums of gradients of one rank over parts of the keys; in float32 if a value has several parts."""

    def __init__(
        self,
        layout: Route,
        call: ContextCall,
        query: Tensor,
        leaves: Sequence[Tensor],
        sinks: Tensor | None,
        results: tuple[Partial, Tensor, Tensor | None],
    ) -> None:
        self.leaves = [x.detach().requires_grad_(x.requires_grad) for x in leaves]
        with torch.enable_grad():
            self.call = call.with_leaves(query, self.leaves)
        self.whole, self.grad_out, self.grad_lse = results
        self.has_all, self.inputs, self.wide = layout.has_all, query, compute_dtype(query)
        self.sinks = sinks.detach() if sinks is not None and layout.has_all else None
        self.query = torch.zeros_like(query, dtype=query.dtype if layout.has_all else self.wide)
        self.learning = [x for x in self.leaves if x.requires_grad]
        self.sums: dict[int, Tensor] = {}

    def of_keys(self, received: ReceivedKeys, spans: Sequence[QueryBlock]) -> tuple[int, KVTensors]:
        """Compute this rank's share of the gradient of received keys, in float32, for the keys that its queries use.

        Returns:
            The position of the first of these keys, and the gradients. All other gradients are added to the sums here.
        """
        low, high = (end(one.span[side] for one in spans) for side, end in ((0, min), (1, max)))
        total: KVTensors | None = None
        for heads in groups(self.call, received):
            unfolded = ExpandedKeys(
                self.call, [x[:, :, low - received.first : high - received.first] for x in received.keys], heads
            )
            pair: KVTensors | None = None
            for one in spans:
                keys = slice(one.span[0] - low, one.span[1] - low)
                some = self._of_rectangle(one, heads, [x[:, :, keys] for x in unfolded.pair])
                pair = _added(pair, some, keys.start, high - low, self.wide)
            assert pair is not None
            grads, of_read = unfolded.folded(pair)
            self.add(self.call.read, of_read)
            total = grads if total is None else [x.add_(grad) for x, grad in zip(total, grads, strict=True)]
        assert total is not None
        return low, total

    def _of_rectangle(self, one: QueryBlock, heads: Stretch, pair: KVTensors) -> KVTensors:
        few, at = slice(*heads), one.at
        some = gradient(
            self.call,
            Block(one.rows, one.span, heads),
            (self.inputs[:, few, at], pair[0], pair[1]),
            self.whole.of(at, few),
            self.grad_out[:, few, at],
            None if self.grad_lse is None else self.grad_lse[:, few, at],
            self.learning,
            has_all=self.has_all,
            sinks=None if self.sinks is None else self.sinks[few],
        )
        self.query[:, few, at] += some.query
        self.add(self.learning, some.leaves)
        return [some.key, some.value]

    def add(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Add to the gradients of tensors that all ranks have."""
        for x, grad in zip(tensors, grads, strict=True):
            if grad is not None:
                self.sums[id(x)] = self.sums[id(x)] + grad if id(x) in self.sums else grad

    def of_tensors(self) -> list[Tensor | None]:
        """Return the gradients of the tensors of the mask and then of the expansion, in their order."""
        return [self.sums.get(id(x)) for x in (*self.leaves, *self.call.read)]


def _added(total: KVTensors | None, some: KVTensors, at: int, size: int, wide: torch.dtype) -> KVTensors:
    """Add gradients of keys from `at` on to a sum over `size` keys; the first one with all keys becomes the sum."""
    n = some[0].shape[2]
    if total is None:
        if n == size:
            return [x.to(wide) for x in some]
        total = [x.new_zeros((*x.shape[:2], size, x.shape[3]), dtype=wide) for x in some]
    for x, grad in zip(total, some, strict=True):
        x[:, :, at : at + n] += grad
    return total


class ExpandedKeys:
    """Keys and values from received tensors, with an autograd graph if an expansion computes them."""

    def __init__(self, call: ContextCall, part: KVTensors, heads: Stretch) -> None:
        self.expansion, self.read = call.expansion, call.read
        if self.expansion is None:
            self.pair = part
            return
        with torch.enable_grad():
            self.source = part[0].detach().requires_grad_()
            self.made = self.expansion.function(self.source, *heads)
        self.pair = [x.detach() for x in self.made]

    def folded(self, pair: KVTensors) -> tuple[KVTensors, list[Tensor | None]]:
        """Return the gradients of the received tensors and of the tensors that the expansion reads."""
        if self.expansion is None:
            return pair, []
        wanted = [x for x in self.read if x.requires_grad]
        grads = [x.to(made.dtype) for x, made in zip(pair, self.made, strict=True)]
        back = torch.autograd.grad(self.made, [self.source, *wanted], grads, allow_unused=True)
        of = {id(x): grad for x, grad in zip(wanted, back[1:], strict=True)}
        return [back[0].to(pair[0].dtype)], [of.get(id(x)) for x in self.read]


def expanded(call: ContextCall, part: KVTensors, heads: Stretch) -> KVTensors:
    """Return keys and values from received tensors, without an autograd graph."""
    if call.expansion is None:
        return part
    with torch.no_grad():
        return list(call.expansion.function(part[0], *heads))
