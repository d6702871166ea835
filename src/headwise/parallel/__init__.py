"""Attention on more than one process or machine, with `torch.distributed`: applied from outside to what is there."""

from .tensor import tensor_parallel
from .weights import load_slices

__all__ = [
    "load_slices",
    "tensor_parallel",
]
