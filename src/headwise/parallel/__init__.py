"""Attention over several processes or machines with `torch.distributed`, for existing modules and tensors."""

from ..distributed.comm import Comm
from ..distributed.errors import RankError, RankMismatch
from .cache.sharded import ShardedCache
from .context_layouts.attention import context_parallel
from .context_layouts.call import Expansion
from .context_layouts.layout_costs import explain
from .context_layouts.modules import Context, context, sum_gradients
from .context_layouts.sequence import join_sequence, order_for, positions, split_sequence
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
