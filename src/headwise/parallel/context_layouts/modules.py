"""The context in which attention modules work on tokens split over ranks, and the sum of gradients for training."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ...distributed.comm import Comm, eager
from ...nn.attention_mode import Expand, attention_mode, current_mode
from ...nn.inner_attention import Inner
from ...ops.attention import attention
from ...ops.sharding.heads import as_dtensor
from ...plan.ranks.sharding import TokenOrder
from ...shapes.arguments import check_counts, check_tensor
from .attention import LayoutOption, context_parallel
from .call import Expansion
from .sequence import check_order, held_places, positions


class Context:
    """The settings of attention modules within `context`, which creates it.

    Attributes:
        comm: the ranks and their messages.
        order: the split of the tokens, "contiguous" or "zigzag".
        layout: the layout of attention.
        length: the number of tokens of the whole sequence, or None.
    """

    def __init__(self, comm: Comm, order: TokenOrder, layout: LayoutOption, length: int | None) -> None:
        self.comm, self.order, self.layout, self.length = comm, order, layout, length

    @eager
    def positions(self, tokens: int) -> Tensor:
        """Return the positions (T_r,) in the whole sequence of this rank's `tokens` tokens."""
        if self.length is None:
            ranks = self.comm.agree("positions", {"order": self.order}, {"length": tokens})
            own = held_places([one["length"] for one in ranks], self.order, "positions", "tokens")[self.comm.rank]
            return torch.cat([torch.arange(a, b, device="cpu") for a, b in own])
        places = self.places()
        if places.shape[0] != tokens:
            with self.comm.before("positions"):
                raise ValueError(
                    f"rank {self.comm.rank} has {places.shape[0]} of {self.length} tokens in {self.order} order; got "
                    f"{tokens}; split them with split_sequence, or leave length out of the context"
                )
        return places

    def places(self) -> Tensor:
        """Return the positions (T_r,) of this rank's tokens in a sequence of `length` tokens."""
        return positions(self.length or 0, self.comm.group, order=self.order)

    @eager
    def check(self, inner: torch.nn.Module, cache: object) -> None:
        """Raise ValueError for a cache, an inner part that ignores the context, and a forward that ran outside.

        Activation checkpointing recomputes a forward pass in the backward pass. If only one of the two runs inside the
        context, gradients would be wrong.
        """
        if cache is not None:
            raise ValueError(
                "within headwise.parallel.context a module takes no cache: each process would keep its own tokens "
                "alone; leave cache out, or the context"
            )
        if not (isinstance(inner, Inner) and inner.follows_mode):
            raise ValueError(
                f"the inner part {type(inner).__name__} attends the tokens of this process alone; within "
                "headwise.parallel.context take headwise.nn.InnerAttention(...), or leave the context"
            )
        if _refuse_recomputation not in inner._forward_pre_hooks.values():
            _check_first_run()
            inner.register_forward_pre_hook(_refuse_recomputation)

    def attend(self, query: Tensor, key: Any, value: Tensor | None, *, backend: str = "auto", **options: Any) -> Tensor:
        """Call `context_parallel` with the settings of this context; a cache is attended by this rank alone."""
        if not isinstance(key, Tensor):
            return attention(query, key, value, backend=backend, **options)
        return self._run(query, key, value, **options)

    def attend_expanded(
        self,
        query: Tensor,
        vectors: Tensor,
        expand: Expand,
        tensors: tuple[Tensor, ...],
        value_dim: int,
        **options: Any,
    ) -> Tensor:
        """Call `context_parallel` with vectors that ranks send instead of keys and values."""
        expansion = Expansion(expand, tensors, value_dim, vectors.shape[3])
        return self._run(query, vectors, None, expansion=expansion, **options)

    def _run(self, *tensors: Any, **options: Any) -> Tensor:
        return context_parallel(*tensors, group=self.comm.group, layout=self.layout, order=self.order, **options)


@contextmanager
def context(
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    order: TokenOrder = "contiguous",
    layout: LayoutOption = "auto",
    length: int | None = None,
    timeout: float | None = None,
) -> Iterator[Context]:
    """Enter a context in which attention modules take this rank's tokens and attend to the tokens of all ranks.

    It applies to `MultiHeadAttention` and `LatentAttention`. Masks are masks of the whole sequence; rotary positions
    are the positions of this rank's tokens by default. Latent attention sends the latents, not the keys and values of
    all heads. Other layers work on single tokens and need no change. Gradients of parameters are this rank's share: add
    them up with `sum_gradients` before an optimizer step. With activation checkpointing, run the backward pass inside
    the context, too.

    Args:
        group: process group, or `DeviceMesh` of one dimension; all processes by default.
        order: the split of the tokens, see `split_sequence`.
        layout: the layout, see `context_parallel`.
        length: the number of tokens of the whole sequence; if given, ranks do not exchange their lengths.
        timeout: seconds to wait for another rank.

    Raises:
        ValueError: a module got a cache or has an inner part that does not support it; or as `context_parallel`.

    Example::

        with headwise.parallel.context(group, order="zigzag"):
            out = mha(headwise.parallel.split_sequence(x, group, order="zigzag"), mask=headwise.causal())
    """
    check_order(order)
    if length is not None:
        check_counts(length=length)
    made = Context(Comm.of(group, timeout), order, layout, length)
    with attention_mode(made):
        yield made


def _refuse_recomputation(inner: torch.nn.Module, args: object) -> None:
    """Check, before an inner part that ran inside a context runs outside, that this is a new forward pass.

    A hook on the inner part, so that the part needs to know nothing of contexts; it removes itself.
    """
    if torch.compiler.is_compiling() or current_mode() is not None:
        return
    _check_first_run()
    for number in [number for number, hook in inner._forward_pre_hooks.items() if hook is _refuse_recomputation]:
        del inner._forward_pre_hooks[number]


def _check_first_run() -> None:
    """Raise ValueError inside a backward pass."""
    if torch._C._current_graph_task_id() != -1:
        raise ValueError(
            "a forward pass runs again in a backward pass (activation checkpointing), and only one of them runs "
            "within headwise.parallel.context; call backward() where the forward pass ran: within it, or outside"
        )


def sum_gradients(
    parameters: torch.nn.Module | Iterable[Tensor], group: ProcessGroup | DeviceMesh | None = None
) -> None:
    """Sum the gradients of parameters over ranks, in place.

    Call it once per step, after the last backward pass; a second call would add the sums again. A gradient that is None
    counts as 0. If it is None on all ranks it stays None, as in one process, so that optimizers skip the parameter. All
    ranks get the same bits. For a DTensor (if heads are split as well) the local part is summed over the ranks of this
    group.

    Args:
        parameters: a module, or tensors in the same order on every rank.
        group: process group, or `DeviceMesh` of one dimension; all processes by default.

    Raises:
        TypeError: a single tensor, because its rows may be meant; something that is not a tensor; a sparse gradient.
        RankMismatch: the parameters differ between ranks in shapes, dtypes, order or `requires_grad`.
    """
    comm = Comm.of(group)
    with comm.before("sum_gradients"):
        if isinstance(parameters, Tensor):
            raise TypeError("sum_gradients takes a module or a list of tensors, got one tensor; pass [x]")
        tensors = list(parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters)
        for n, x in enumerate(tensors):
            check_tensor(f"parameters[{n}]", x)
        pairs = [(x, _found(n, x)) for n, x in enumerate(tensors) if x.requires_grad]
    sizes = f"{len(pairs)} parameters of {sum(grad.numel() for _, grad in pairs)} numbers"
    dtypes = sorted({str(grad.dtype) for _, grad in pairs})
    shapes = zlib.crc32(str([(tuple(grad.shape), str(grad.dtype)) for _, grad in pairs]).encode())
    learn = zlib.crc32(str([x.requires_grad for x in tensors]).encode())
    facts = {"parameters": sizes, "dtypes": dtypes, "shapes, in their order (a checksum)": f"{shapes:08x}"}
    comm.agree("sum_gradients", facts | {"choice of those that learn (a checksum)": f"{learn:08x}"})
    for step, dtype in enumerate(sorted({grad.dtype for _, grad in pairs}, key=str)):
        some = [(x, grad) for x, grad in pairs if grad.dtype == dtype]
        there = torch.tensor([x.grad is not None for x, _ in some], dtype=dtype, device=some[0][1].device)
        total = comm.all_reduce("gradients", torch.cat([*(grad.reshape(-1) for _, grad in some), there]), step=step)
        *parts, ranks = total.split([*(grad.numel() for _, grad in some), len(some)])
        for (x, grad), part, count in zip(some, parts, ranks.tolist(), strict=True):
            if count:  # the number of ranks that have a gradient
                _put(x, part.view_as(grad))


def _found(n: int, x: Tensor) -> Tensor:
    """Return the gradient of a parameter, 0 if it is None; for a DTensor the local part."""
    grad = torch.zeros_like(x) if x.grad is None else x.grad
    if grad.layout != torch.strided:
        raise TypeError(
            f"sum_gradients adds dense gradients; that of parameters[{n}], of shape {tuple(x.shape)}, has the layout "
            f"{grad.layout}; make its torch.nn.Embedding with sparse=False"
        )
    spread = as_dtensor(grad)
    return grad if spread is None else spread.to_local()


def _put(x: Tensor, total: Tensor) -> None:
    """Store the sum as the gradient of a parameter."""
    if as_dtensor(x) is None:
        x.grad = total.clone()
        return
    if x.grad is None:
        x.grad = torch.zeros_like(x)
    as_dtensor(x.grad).to_local().copy_(total)
