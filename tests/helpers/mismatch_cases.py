"""Ranks of `test_parallel_mismatch.py`: without heads, masks that differ or change, gradients in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import headwise
from headwise.parallel import Comm, context_parallel, join_sequence, positions, split_sequence, sum_gradients


def words(run: Callable[[], Any]) -> str:
    """The name and text of what a call raises, "nothing" where it raises nothing."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def tensors(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(1, 3, 5, 7), another on each rank: with four ranks one has no head."""
    make = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(1, 3, 5, 7, generator=make, dtype=dtype)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    x = tensors(dtype)
    lse = context_parallel(x, x, x, layout="ulysses", return_lse=True, timeout=20.0)[1]
    assert lse is not None
    return lse.dtype


def learned(what: str) -> tuple[bool, bool]:
    """Sinks, or a mask's table, alone learn: whether out has a graph, and the leaf a gradient."""
    x, mask, sinks = tensors(torch.float32), None, None
    if what == "sinks":
        leaf = sinks = torch.zeros(3, requires_grad=True)
    else:
        leaf = torch.zeros(3, 41, requires_grad=True)
        mask = headwise.relative(leaf)
    out = context_parallel(x, x, x, mask=mask, sinks=sinks, layout="ulysses", timeout=20.0)
    out.sum().backward()
    return out.requires_grad, leaf.grad is not None


def long_mask() -> str:
    """Masks of many rules, of which the last alone differs."""
    mask = headwise.causal()
    for n in range(12):
        mask = mask & headwise.dilated(1 + n % 2)
    keep = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    keep[..., 0] = dist.get_rank() == 0
    x = tensors(torch.float32)
    return words(lambda: context_parallel(x, x, x, mask=mask & headwise.keep(keep), layout="ring", timeout=20.0))


def turned_parameters() -> str:
    both = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (3, 2))]
    return words(lambda: sum_gradients(both[:: 1 if dist.get_rank() else -1]))


def one_tensor() -> str:
    return words(lambda: sum_gradients(torch.zeros(3, 2, requires_grad=True)))


def lazily_negative() -> float:
    x = tensors()
    minus = torch._neg_view(x)
    ours = context_parallel(x, minus, minus, layout="ulysses", timeout=20.0)
    want = context_parallel(x, -x, -x, layout="ulysses", timeout=20.0)
    return float((ours - want).abs().max())


def places_and_axes() -> list[str]:
    """Ranks and axes that are none: `(2, 3)` in a group of two."""
    x = torch.zeros(2, 3)
    ranks: tuple[Any, ...] = (2, -1, True, 1.5)
    dims: tuple[Any, ...] = (2, -3, "1", None)
    return [
        *(words(lambda rank=rank: positions(7, rank=rank)) for rank in ranks),  # type: ignore[misc]
        *(words(lambda dim=dim: split_sequence(x, dim=dim)) for dim in dims),  # type: ignore[misc]
        *(words(lambda dim=dim: join_sequence(x, dim=dim)) for dim in dims),  # type: ignore[misc]
        words(lambda: split_sequence(x.sum())),
    ]


def one_learns() -> str:
    x = torch.ones(2, 3, requires_grad=dist.get_rank() == 0)
    with torch.no_grad():
        join_sequence(x, dim=0)
    return words(lambda: join_sequence(x, dim=0))


def one_number() -> list[float]:
    """An expanded tensor of one number has a stride of 0."""
    x = torch.tensor(1.0 + dist.get_rank()).expand(1)
    assert x.stride() == (0,)
    return [float(part) for part in Comm.of().gather("number", x, [(1,), (1,)])]


def changed_before_backward(layout: Any) -> str:
    """What autograd says where a tensor of the mask changes between the forward and its backward."""
    query, key, value = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    ids = torch.arange(5 * dist.get_world_size()) // 4
    mask = headwise.segments(ids) | headwise.prefix(2)
    out = context_parallel(query, key, value, mask=mask, layout=layout)
    ids.zero_()
    return words(lambda: out.sum().backward())
