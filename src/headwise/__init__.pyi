"""The table of contents."""

from . import cache as cache
from . import look as look
from . import nn as nn
from . import parallel as parallel
from . import plan as plan
from . import report as report
from . import reshape as reshape
from .nn.latent import LatentAttention as LatentAttention
from .nn.multihead import MultiHeadAttention as MultiHeadAttention
from .nn.trace import trace as trace
from .ops.attention import Explanation as Explanation
from .ops.attention import attention as attention
from .ops.attention import explain as explain
from .ops.masks.compose import Mask as Mask
from .ops.masks.make import alibi as alibi
from .ops.masks.make import alibi_slopes as alibi_slopes
from .ops.masks.make import bias as bias
from .ops.masks.make import blocks as blocks
from .ops.masks.make import causal as causal
from .ops.masks.make import causal_top_left as causal_top_left
from .ops.masks.make import dilated as dilated
from .ops.masks.make import keep as keep
from .ops.masks.make import lengths as lengths
from .ops.masks.make import prefix as prefix
from .ops.masks.make import relative as relative
from .ops.masks.make import rule as rule
from .ops.masks.make import segments as segments
from .ops.masks.make import window as window
from .ops.statistics.api import HeadStatistics as HeadStatistics
from .ops.statistics.api import RowStatistics as RowStatistics
from .ops.statistics.api import attention_statistics as attention_statistics
from .ops.statistics.api import statistics as statistics
from .ops.statistics.top_keys import TopKeys as TopKeys
from .ops.statistics.top_keys import top_keys as top_keys
from .ops.statistics.weights import weights as weights

__version__: str
