"""Attention on more than one process or machine, with `torch.distributed`: applied from outside to what is there."""

from ..ops.comm import Comm
from ..ops.rank_errors import RankError, RankMismatch
from .attention import context_parallel
from .cache import ShardedCache
from .job import Expansion
from .modules import Context, context, sum_gradients
from .order import join_sequence, order_for, positions, split_sequence
from .prices import explain
from .tensor import tensor_parallel
from .weights import load_slices

__all__ = [
    "Comm",
    "Context",
    "Expansion",
    "RankError",
    "RankMismatch",
    "ShardedCache",
    "context",
    "context_parallel",
    "explain",
    "join_sequence",
    "load_slices",
    "order_for",
    "positions",
    "split_sequence",
    "sum_gradients",
    "tensor_parallel",
]
