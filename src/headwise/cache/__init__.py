"""Key-value caches: keys and values of earlier tokens, and attention to them in their stored form."""

from ..ops.storage.int8 import Quantized
from .base import KVCache
from .paged import PagedCache, PagePool
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
