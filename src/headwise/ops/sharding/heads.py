"""Heads dealt out to processes: who computes which, what each reads, and how the parts come together again.

Of N processes, each has H / N query heads in a row, and of the key-value heads those that its queries read. Nothing
here runs unless a tensor or a weight is a `torch.distributed.tensor.DTensor`, and nothing is imported before.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...shapes import check_head_counts


def as_dtensor(x: object) -> Any:
    """The same object where it is a DTensor, else None."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")  # not imported: there is none
    return x if distributed is not None and isinstance(x, distributed.DTensor) else None


@dataclass(frozen=True)
class Group:
    """The processes along one dimension of a mesh: how many, which of them this is, and the sums among them."""

    mesh: Any
    dim: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without connections, which are no part of a copy: it asks for them anew."""
        return {"mesh": self.mesh, "dim": self.dim}

    @cached_property
    def processes(self) -> Any:
        """The process group."""
        return self.mesh.get_group(self.dim)

    @property
    def size(self) -> int:
        """How many."""
        size: int = self.mesh.size(self.dim)
        return size

    @property
    def rank(self) -> int:
        """Which one this is."""
        rank: int = self.mesh.get_local_rank(self.dim)
        return rank

    def shared(self, x: Tensor) -> Tensor:
        """The same numbers, which every process has; their gradient is the sum of what each process gives them."""
        return _Shared.apply(x, self) if torch.is_grad_enabled() and x.requires_grad else x

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the processes; each part's gradient is that of the sum."""
        return _Summed.apply(x, self)

    def gathered(self, x: Tensor, axis: int) -> Tensor:
        """The parts of all processes, in their order; each process goes on alike with the whole."""
        return _Gathered.apply(x, self, axis)

    def parted(self, x: Tensor, axis: int) -> Tensor:
        """This process's part of what all have alike."""
        return _Parted.apply(x, self, axis)

    @cached_property
    def comm(self) -> Any:
        """What these processes send each other: agreed on first, and counted."""
        from ...distributed.comm import Comm

        return Comm.of(self.processes)

    def sum_of(self, x: Tensor) -> Tensor:
        """The sum over the processes, without a gradient: the same bits on each."""
        self.agree("a sum over heads", x)
        total: Tensor = self.comm.all_reduce("heads", x)
        return total

    def all_of(self, x: Tensor, axis: int) -> Tensor:
        """The parts of all processes, of equal shapes, without a gradient."""
        self.agree("a gathering of heads", x)
        return torch.cat(self.comm.gather("heads", x, [tuple(x.shape)] * self.size), axis)

    def agree(self, what: str, x: Tensor) -> None:
        """Raise on every process where they have tensors of unlike shapes or dtypes: backends end that by an abort.

        Only on the CPU: elsewhere the answer would have to wait for the device.
        """
        if x.device.type == "cpu" and self.size > 1:
            self.comm.agree(what, {"dtype": x.dtype, "shape": tuple(x.shape)})

    def first_of(self, number: int) -> int:
        """The first process's number, on each."""
        ranks = self.comm.agree("dropout", {}, {"seed": number})
        return int(ranks[0]["seed"])

    def part_of(self, x: Tensor, axis: int) -> Tensor:
        """This process's part, without a gradient."""
        size = x.shape[axis] // self.size
        return x.narrow(axis, self.rank * size, size)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_of(grad), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.sum_of(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, axis: int) -> Tensor:
        ctx.group, ctx.axis = group, axis
        return group.all_of(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.part_of(grad, ctx.axis), None, None


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, axis: int) -> Tensor:
        ctx.group, ctx.axis = group, axis
        return group.part_of(x, axis).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_of(grad, ctx.axis), None, None


@dataclass(frozen=True)
class Share:
    """The heads of one process, of H query heads and K key-value heads dealt out to `size` processes.

    Raises:
        ValueError: H is no multiple of `size`.
    """

    num_heads: int
    num_kv_heads: int
    size: int
    rank: int

    def __post_init__(self) -> None:
        check_head_counts(self.num_heads, self.num_kv_heads)
        if self.num_heads % self.size:
            fitting = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"each process takes as many heads as any other: {self.num_heads} heads do not divide over {self.size} "
                f"processes; take one of {', '.join(map(str, fitting))}, or split the tokens instead "
                "(headwise.parallel.context_parallel)"
            )

    @property
    def count(self) -> int:
        """How many query heads it has."""
        return self.num_heads // self.size

    @property
    def heads(self) -> slice:
        """Which query heads, of all."""
        return slice(self.rank * self.count, (self.rank + 1) * self.count)

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Which key-value heads, of all, in the order in which its query heads read them: H_here / len(keys) each.

        As many on every process. Where that is not so, each query head has a key-value head to itself.
        """
        all_heads = [slice(rank * self.count, (rank + 1) * self.count) for rank in range(self.size)]
        all_keys = [keys_read(heads, self.num_heads // self.num_kv_heads) for heads in all_heads]
        if len({len(keys) for keys in all_keys}) == 1:
            return all_keys[self.rank]
        group = self.num_heads // self.num_kv_heads
        return tuple(head // group for head in range(self.heads.start, self.heads.stop))

    @property
    def deals_keys(self) -> bool:
        """Whether each key-value head is on one process alone."""
        return self.num_kv_heads % self.size == 0

    def of_rank(self, rank: int) -> Share:
        """Another process's."""
        return Share(self.num_heads, self.num_kv_heads, self.size, rank)

    @property
    def places(self) -> tuple[int, ...]:
        """Where each key-value head first comes among the `keys` of all processes, one behind the other."""
        all_keys = [key for rank in range(self.size) for key in self.of_rank(rank).keys]
        return tuple(all_keys.index(key) for key in range(self.num_kv_heads))

    def pick(self, x: Tensor, axis: int = 1) -> Tensor:
        """The `keys` of a tensor of all key-value heads."""
        return pick_heads(x, self.keys, axis)


def keys_read(heads: slice, group: int) -> tuple[int, ...]:
    """The key-value heads that query heads in a row read, `group` of all query heads reading one.

    Each once, if equally many of these heads read each; else one for every query head.

    >>> keys_read(slice(2, 6), 4), keys_read(slice(3, 6), 2)
    ((0, 1), (1, 2, 2))
    """
    read = [head // group for head in range(heads.start, heads.stop)]
    once = tuple(dict.fromkeys(read))
    alike = once and read == [key for key in once for _ in range(len(read) // len(once))]
    return once if alike else tuple(read)


def pick_heads(x: Tensor, keys: tuple[int, ...], axis: int = 1) -> Tensor:
    """Some heads of a tensor: a view where they lie in a row."""
    if keys == tuple(range(keys[0], keys[0] + len(keys))):
        return x.narrow(axis, keys[0], len(keys))
    return x.index_select(axis, torch.tensor(keys, device=x.device))


def seed_of_part(seed: int, heads: int, first: int, query: int = 0, key: int = 0) -> Tensor:
    """What the native kernel draws dropout from, so that each weight is kept as in a call of all heads and tokens.

    Args:
        seed: of that call.
        heads: all of its query heads.
        first: the first head of the part; of a part of the batch that starts at row b, that and b times all heads.
        query: the part's first query.
        key: its first key.
    """
    return torch.tensor([seed, heads, first, query, key], dtype=torch.int64, device="cpu")


def drawn() -> int:
    """A seed, from torch's own generator: what one process would draw."""
    return int(torch.randint(1 << 62, (1,), device="cpu"))
