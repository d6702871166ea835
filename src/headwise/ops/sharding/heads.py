"""Attention heads sharded over ranks: the heads of each rank, and the sums and gathers over ranks.

Each of N ranks has H / N consecutive query heads and the key-value heads that these use. Nothing here runs, and
torch.distributed.tensor is not imported, unless a tensor or a weight is a `torch.distributed.tensor.DTensor`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...shapes import check_head_counts


def as_dtensor(x: object) -> Any:
    """Return the object if it is a DTensor, else None."""
    distributed: Any = sys.modules.get("torch.distributed.tensor")  # if it is not imported, no DTensor exists
    return x if distributed is not None and isinstance(x, distributed.DTensor) else None


def refuse_dtensors(takes: str, way: str = "", /, **tensors: object) -> None:
    """Raise ValueError if a tensor is a DTensor, for functions that read the data of their tensors.

    Args:
        takes: what the message says first, such as "a cache stores plain tensors".
        way: a further way out.
        **tensors: by the names that the message gives them; None and other objects are let through.
    """
    for name, x in tensors.items():
        if as_dtensor(x) is not None:
            raise ValueError(
                f"{takes}; {name} is a DTensor of placements {as_dtensor(x).placements}: pass its to_local(), the part "
                f"of this process, or its full_tensor(){way}"
            )


@dataclass(frozen=True)
class Group:
    """The ranks along one dimension of a mesh: their number, this rank's index, and sums over them."""

    mesh: Any
    dim: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without connections; a copy opens them again when needed."""
        return {"mesh": self.mesh, "dim": self.dim}

    @cached_property
    def processes(self) -> Any:
        """The process group."""
        return self.mesh.get_group(self.dim)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size(self.dim)

    @property
    def rank(self) -> int:
        """The index of this rank in the group."""
        return self.mesh.get_local_rank(self.dim)

    def shared(self, x: Tensor) -> Tensor:
        """Return a tensor that all ranks have; its gradient is the sum of the gradients of all ranks."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return _Linear.apply(x, lambda x: x.view_as(x), self.sum_of)

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks; each part gets the gradient of the sum."""
        return _Linear.apply(x, self.sum_of, lambda grad: grad)

    def gathered(self, x: Tensor, axis: int) -> Tensor:
        """Return the concatenated parts of all ranks; every rank must use the result in the same way."""
        return _Linear.apply(x, partial(self.all_of, axis=axis), partial(self.part_of, axis=axis))

    def parted(self, x: Tensor, axis: int) -> Tensor:
        """Return this rank's part of a tensor that all ranks have."""
        return _Linear.apply(x, lambda x: self.part_of(x, axis).contiguous(), partial(self.all_of, axis=axis))

    @cached_property
    def comm(self) -> Any:
        """The collectives of these ranks, which check arguments first and count the bytes."""
        from ...distributed.comm import Comm

        return Comm.of(self.processes)

    def sum_of(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, without a gradient: the same bits on each rank."""
        self.agree("a sum over heads", x)
        return self.comm.all_reduce("heads", x)

    def all_of(self, x: Tensor, axis: int) -> Tensor:
        """Return the concatenated parts of all ranks, of equal shapes, without a gradient."""
        self.agree("a gathering of heads", x)
        return torch.cat(self.comm.gather("heads", x, [tuple(x.shape)] * self.size), axis)

    def agree(self, what: str, x: Tensor) -> None:
        """Raise an error on every rank if shapes or dtypes differ between ranks, because backends abort in that case.

        Checked only on the CPU: on another device the check would have to wait for the device.
        """
        if x.device.type == "cpu" and self.size > 1:
            self.comm.agree(what, {"dtype": x.dtype, "shape": tuple(x.shape)})

    def first_of(self, number: int) -> int:
        """Return the number of the first rank, on every rank."""
        ranks = self.comm.agree("dropout", {}, {"seed": number})
        return int(ranks[0]["seed"])

    def part_of(self, x: Tensor, axis: int) -> Tensor:
        """Return this rank's part, without a gradient."""
        size = x.shape[axis] // self.size
        return x.narrow(axis, self.rank * size, size)


class _Linear(torch.autograd.Function):
    """A linear function of a tensor over the ranks, and the function that gives its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None


@dataclass(frozen=True)
class Share:
    """The heads of one rank, if H query heads and K key-value heads are sharded over `size` ranks.

    Raises:
        ValueError: H is not a multiple of `size`.
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
        """The number of query heads of this rank."""
        return self.num_heads // self.size

    @property
    def heads(self) -> slice:
        """The query heads of this rank."""
        return slice(self.rank * self.count, (self.rank + 1) * self.count)

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """The key-value heads of this rank, in the order of its query heads: each serves count / len(keys) of them.

        Every rank has the same number. If that is not possible, each query head has a separate key-value head.
        """
        all_heads = [slice(rank * self.count, (rank + 1) * self.count) for rank in range(self.size)]
        all_keys = [keys_read(heads, self.num_heads // self.num_kv_heads) for heads in all_heads]
        if len({len(keys) for keys in all_keys}) == 1:
            return all_keys[self.rank]
        group = self.num_heads // self.num_kv_heads
        return tuple(head // group for head in range(self.heads.start, self.heads.stop))

    @property
    def deals_keys(self) -> bool:
        """True if each key-value head is on exactly one rank."""
        return self.num_kv_heads % self.size == 0

    def of_rank(self, rank: int) -> Share:
        """Return the share of another rank."""
        return Share(self.num_heads, self.num_kv_heads, self.size, rank)

    @property
    def places(self) -> tuple[int, ...]:
        """The first position of each key-value head in the concatenated `keys` of all ranks."""
        all_keys = [key for rank in range(self.size) for key in self.of_rank(rank).keys]
        return tuple(all_keys.index(key) for key in range(self.num_kv_heads))

    def pick(self, x: Tensor, axis: int = 1) -> Tensor:
        """Return the `keys` of a tensor of all key-value heads."""
        return pick_heads(x, self.keys, axis)


def keys_read(heads: slice, group: int) -> tuple[int, ...]:
    """Return the key-value heads that consecutive query heads use, if `group` query heads share each one.

    Each appears once if all are used by equally many of these heads; otherwise one per query head.

    >>> keys_read(slice(2, 6), 4), keys_read(slice(3, 6), 2)
    ((0, 1), (1, 2, 2))
    """
    read = [head // group for head in range(heads.start, heads.stop)]
    once = tuple(dict.fromkeys(read))
    alike = once and read == [key for key in once for _ in range(len(read) // len(once))]
    return once if alike else tuple(read)


def pick_heads(x: Tensor, keys: tuple[int, ...], axis: int = 1) -> Tensor:
    """Return some heads of a tensor: a view if they are consecutive."""
    if keys == tuple(range(keys[0], keys[0] + len(keys))):
        return x.narrow(axis, keys[0], len(keys))
    return x.index_select(axis, torch.tensor(keys, device=x.device))


def seed_of_part(seed: int, heads: int, first: int, query: int = 0, key: int = 0) -> Tensor:
    """Return the seed tensor of the native kernel with which a part of a call gets the dropout of the whole call.

    Args:
        seed: the seed of the whole call.
        heads: the number of query heads of the whole call.
        first: the first head of the part; for a part of the batch from row b on, add b times `heads`.
        query: the first query of the part.
        key: the first key of the part.
    """
    return torch.tensor([seed, heads, first, query, key], dtype=torch.int64, device="cpu")


def drawn() -> int:
    """Return a seed from torch's own generator, the one that a single process would draw."""
    return int(torch.randint(1 << 62, (1,), device="cpu"))
