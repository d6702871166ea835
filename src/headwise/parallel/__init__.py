"""Attention on more than one process or machine, with `torch.distributed`: applied from outside to what is there."""

from .tensor import tensor_parallel

__all__ = [
    "tensor_parallel",
]
