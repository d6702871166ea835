"""Statistics of attention heads, without a T x S matrix."""

from .api import HeadStatistics as HeadStatistics
from .api import RowStatistics as RowStatistics
from .api import attention_statistics as attention_statistics
from .api import row_statistics as row_statistics
from .api import statistics as statistics
