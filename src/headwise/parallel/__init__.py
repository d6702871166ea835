"""Attention over several processes or machines with `torch.distributed`, for existing modules and tensors."""

from ..distributed.comm import Comm
from ..distributed.errors import RankError, RankMismatch
from .cache.sharded import ShardedCache
from .context.attention import context_parallel
from .context.call import Expansion
from .context.layout_costs import explain
from .context.modules import Context, context, sum_gradients
from .context.sequence import join_sequence, order_for, positions, split_sequence
from .load_slices import load_slices
from .tensor_parallel import tensor_parallel

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
