"""Key-value caches: keys and values of earlier tokens, and attention to them in their stored form."""

from ..ops.storage.quantized import Quantized
from .base import KVCache
from .page_pool import PagePool
from .paged import PagedCache
from .quantize import QuantizationError, quantization_error, quantize
from .rolling import RollingCache
from .static import StaticCache

__all__ = [
    "KVCache",
    "PagePool",
    "PagedCache",
    "QuantizationError",
    "Quantized",
    "RollingCache",
    "StaticCache",
    "quantization_error",
    "quantize",
]
