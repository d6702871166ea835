"""The table of contents."""

from . import cache as cache
from . import look as look
from . import nn as nn
from . import parallel as parallel
from . import plan as plan
from . import report as report
from . import reshape as reshape
from .nn.hooks.trace import trace as trace
from .nn.latent import LatentAttention as LatentAttention
from .nn.multihead import MultiHeadAttention as MultiHeadAttention
from .ops.attention import Explanation as Explanation
from .ops.attention import attention as attention
from .ops.attention import explain as explain
from .ops.masks.constructors import alibi as alibi
from .ops.masks.constructors import alibi_slopes as alibi_slopes
from .ops.masks.constructors import bias as bias
from .ops.masks.constructors import blocks as blocks
from .ops.masks.constructors import causal as causal
from .ops.masks.constructors import causal_top_left as causal_top_left
from .ops.masks.constructors import dilated as dilated
from .ops.masks.constructors import keep as keep
from .ops.masks.constructors import lengths as lengths
from .ops.masks.constructors import picked as picked
from .ops.masks.constructors import prefix as prefix
from .ops.masks.constructors import relative as relative
from .ops.masks.constructors import rule as rule
from .ops.masks.constructors import segments as segments
from .ops.masks.constructors import window as window
from .ops.masks.mask import Mask as Mask
from .ops.max_logits import attention_max_logits as attention_max_logits
from .ops.statistics.api import HeadStatistics as HeadStatistics
from .ops.statistics.api import RowStatistics as RowStatistics
from .ops.statistics.api import attention_statistics as attention_statistics
from .ops.statistics.api import statistics as statistics
from .ops.statistics.top_keys import TopKeys as TopKeys
from .ops.statistics.top_keys import top_keys as top_keys
from .ops.statistics.weights import weights as weights

__version__: str
