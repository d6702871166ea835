"""Runs on every rank: what changes between a forward of `context_parallel` and its backward."""

from typing import Any

import torch
import torch.distributed as dist

import headwise
from headwise.parallel import context_parallel


def changed_before_backward(layout: Any) -> str:
    """What autograd says where a tensor of the mask changes between the forward and its backward."""
    query, key, value = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    ids = torch.arange(5 * dist.get_world_size()) // 4
    mask = headwise.segments(ids) | headwise.prefix(2)
    out = context_parallel(query, key, value, mask=mask, layout=layout)
    ids.zero_()
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""
