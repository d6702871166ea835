"""Attention on more than one process or machine, with `torch.distributed`: applied from outside to what is there."""

from .attention import context_parallel as context_parallel
from .cache import ShardedCache as ShardedCache
from .comm import Comm as Comm
from .modules import Context as Context
from .modules import context as context
from .modules import sum_gradients as sum_gradients
from .errors import RankError as RankError
from .errors import RankMismatch as RankMismatch
from .job import Expansion as Expansion
from .order import join_sequence as join_sequence
from .order import order_for as order_for
from .order import positions as positions
from .order import split_sequence as split_sequence
from .prices import explain as explain
